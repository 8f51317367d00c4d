"""Writes EDF and EDF+ files."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from bitimely_core.formats.edf_annotations import encode_tal
from bitimely_core.formats.edf_header import FIELDS, SIGNAL_FIELDS, EdfChannel
from bitimely_core.store import storage
from bitimely_core.types import Annotation

FIRST_DATE = datetime(1985, 1, 1)  # that the format can write
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
CHANNEL_FIELDS = (*EdfChannel._fields[:6], "samples_per_record")


class EdfOptions(TypedDict, total=False):
    """The options of `encode_edf`."""

    duration: float
    notes: Sequence[Annotation] | None
    onsets: Sequence[float] | None
    start: datetime
    patient: str


def encode_edf(
    channels: Sequence[EdfChannel],
    samples: Sequence[np.ndarray],
    *,
    duration: float = 1.0,
    notes: Sequence[Annotation] | None = None,
    onsets: Sequence[float] | None = None,
    start: datetime = FIRST_DATE,
    patient: str = "X X X X",
) -> bytes:
    """An EDF file, or EDF+ when there are notes or record onsets, as bytes.

    Args:
        channels: calibration and samples a record; `start` is not used.
        samples: int16 digital values, one array [R * S] a channel. None at all: a file of
            annotations alone, one record of duration 0.
        duration: seconds a record.
        notes: annotations, seconds from `start`; each lands in the record that holds its onset,
            else in the last.
        onsets: seconds from `start` at which each record begins; EDF+D when they leave a gap.
        start: date and time in the header.
        patient: field of the header; the default is EDF+ for unknown.

    Raises:
        ValueError: what the format cannot hold.
    """
    records = _count_records(channels, samples)
    if not 1985 <= start.year <= 2084:
        raise ValueError("EDF holds the years 1985 to 2084")
    duration = duration if channels else 0.0
    times = _list_onsets(records, duration, onsets)
    rows: list[tuple[str | float, ...]] = [channel[:7] for channel in channels]
    columns = [
        np.ascontiguousarray(values, "<i2").reshape(records, -1).view(np.uint8)
        for values in samples
    ]
    kind = ""
    if notes is not None or onsets is not None or not channels:
        kind = "EDF+D" if _has_gaps(times, duration) else "EDF+C"
        columns.append(_encode_notes(times, notes or ()))
        rows.append(("EDF Annotations", "", -1.0, 1.0, -32768, 32767, columns[-1].shape[1] // 2))
    month = MONTHS[start.month - 1]
    fixed: dict[str, str | float] = {
        "version": "0",
        "patient": patient,
        "recording": f"Startdate {start.day:02d}-{month}-{start.year} X X X",
        "start_date": f"{start:%d.%m.%y}",
        "start_time": f"{start:%H.%M.%S}",
        "header_bytes": 256 * (len(rows) + 1),
        "reserved": kind,
        "n_records": records,
        "record_duration": duration,
        "n_signals": len(rows),
    }
    return _encode_header(fixed, rows) + np.concatenate(columns, axis=1).tobytes()


def _list_onsets(records: int, duration: float, onsets: Sequence[float] | None) -> Sequence[float]:
    """When each record begins, without gaps where nothing is stated. Raises ValueError."""
    if onsets is None:
        return [i * duration for i in range(records)]
    if len(onsets) != records:
        raise ValueError(f"{len(onsets)} onsets for {records} records")
    return onsets


def _has_gaps(times: Sequence[float], duration: float) -> bool:
    """Whether a record begins elsewhere than at the end of the one before."""
    return any(abs(after - before - duration) > 1e-9 for before, after in pairwise(times))


def _encode_header(fixed: dict[str, str | float], rows: Sequence[tuple[str | float, ...]]) -> bytes:
    """The fields of the file, and those of its signals, a row of `CHANNEL_FIELDS` each."""
    table = dict(zip(CHANNEL_FIELDS, zip(*rows, strict=True), strict=True))
    empty = ("",) * len(rows)
    fields = [_format_field(fixed[name], width) for name, width in FIELDS]
    for name, width in SIGNAL_FIELDS:
        fields += [_format_field(value, width) for value in table.get(name, empty)]
    return b"".join(fields)


def _count_records(channels: Sequence[EdfChannel], samples: Sequence[np.ndarray]) -> int:
    """The records that the channels fill, 1 without channels. Raises ValueError."""
    records = len(samples[0]) // channels[0].samples if channels else 1
    lengths = list(map(len, samples))
    if not records or lengths != [records * channel.samples for channel in channels]:
        raise ValueError("the channels do not fill the same whole number of records")
    return records


def _encode_notes(times: Sequence[float], notes: Sequence[Annotation]) -> np.ndarray:
    """The annotation signal of records that begin at `times`, uint8 [R, an even width]."""
    blocks = [encode_tal(time, None, "") for time in times]
    for note in notes:
        record = max(0, bisect_right(times, note.onset) - 1)
        blocks[record] += encode_tal(note.onset, note.duration or None, note.label)
    width = max(map(len, blocks))
    width += width % 2
    data = b"".join(block.ljust(width, b"\x00") for block in blocks)
    return np.frombuffer(data, np.uint8).reshape(len(blocks), width)


def write_edf(
    path: Path,
    channels: Sequence[EdfChannel],
    samples: Sequence[np.ndarray],
    **options: Unpack[EdfOptions],
) -> None:
    """Write the file of `encode_edf` to `path`, atomically."""
    storage.write_bytes(path, encode_edf(channels, samples, **options))


def _format_field(value: str | float, width: int) -> bytes:
    """A header field: text as it is, numbers so that they read back the same."""
    text = _format_number(value, width) if isinstance(value, float) else str(value)
    raw = text.encode("utf-8")
    if len(raw) > width:
        raise ValueError(f"{text!r} does not fit into {width} bytes")
    return raw.ljust(width)


def _format_number(value: float, width: int) -> str:
    for text in (f"{value:.0f}", f"{value:g}", repr(value), repr(value).replace("0.", ".", 1)):
        if len(text) <= width and float(text) == value:
            return text
    raise ValueError(f"{value!r} does not fit into {width} characters exactly")
