"""Writer of EDF and EDF+ files."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from bitimely_core import storage
from bitimely_core.formats.edf_annotations import encode_tal
from bitimely_core.formats.edf_header import FIELDS, SIGNAL_FIELDS, EdfChannel
from bitimely_core.types import Annotation


def encode_edf(
    channels: Sequence[EdfChannel],
    samples: Sequence[np.ndarray],
    *,
    duration: float = 1.0,
    notes: Sequence[Annotation] | None = None,
    onsets: Sequence[float] | None = None,
    start: datetime = datetime(1985, 1, 1),  # the first date that the format can write
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
    records = len(samples[0]) // channels[0].samples if channels else 1
    if not records or any(
        len(values) != records * channel.samples
        for channel, values in zip(channels, samples, strict=True)
    ):
        raise ValueError("the channels do not fill the same whole number of records")
    if not 1985 <= start.year <= 2084:
        raise ValueError("EDF holds the years 1985 to 2084")
    duration = duration if channels else 0.0
    plus = notes is not None or onsets is not None or not channels
    times = list(onsets) if onsets is not None else [i * duration for i in range(records)]
    if len(times) != records:
        raise ValueError(f"{len(times)} onsets for {records} records")
    blocks = [encode_tal(times[i], None, "") for i in range(records)] if plus else []
    for note in notes or ():
        here = max(0, bisect_right(times, note.onset) - 1) if channels else 0
        blocks[here] += encode_tal(note.onset, note.duration or None, note.label)
    text_bytes = max(map(len, blocks), default=0)
    text_bytes += text_bytes % 2
    gaps = any(abs(b - a - duration) > 1e-9 for a, b in pairwise(times))
    rows = [
        (c.label, c.unit, c.physical_min, c.physical_max, c.digital_min, c.digital_max, c.samples)
        for c in channels
    ]
    if plus:
        rows.append(("EDF Annotations", "", -1.0, 1.0, -32768, 32767, text_bytes // 2))
    month = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")[
        start.month - 1
    ]
    fixed: dict[str, str | float] = {
        "version": "0",
        "patient": patient,
        "recording": f"Startdate {start.day:02d}-{month}-{start.year} X X X",
        "start_date": f"{start:%d.%m.%y}",
        "start_time": f"{start:%H.%M.%S}",
        "header_bytes": 256 * (len(rows) + 1),
        "reserved": ("EDF+D" if gaps else "EDF+C") if plus else "",
        "n_records": records,
        "record_duration": duration,
        "n_signals": len(rows),
    }
    names = (
        "label",
        "unit",
        "physical_min",
        "physical_max",
        "digital_min",
        "digital_max",
        "samples_per_record",
    )
    table = dict(zip(names, zip(*rows, strict=True), strict=True))
    out = io.BytesIO()
    out.write(b"".join(_format_field(fixed[name], width) for name, width in FIELDS))
    out.write(
        b"".join(
            _format_field(value, width)
            for name, width in SIGNAL_FIELDS
            for value in table.get(name, [""] * len(rows))
        )
    )
    columns = [
        np.ascontiguousarray(values, "<i2").reshape(records, -1).view(np.uint8)
        for values in samples
    ]
    if plus:
        columns.append(
            np.frombuffer(
                b"".join(block.ljust(text_bytes, b"\x00") for block in blocks), np.uint8
            ).reshape(records, -1)
        )
    out.write(np.concatenate(columns, axis=1).tobytes())
    return out.getvalue()


def write_edf(
    path: Path,
    channels: Sequence[EdfChannel],
    samples: Sequence[np.ndarray],
    *,
    duration: float = 1.0,
    notes: Sequence[Annotation] | None = None,
    onsets: Sequence[float] | None = None,
    start: datetime = datetime(1985, 1, 1),
    patient: str = "X X X X",
) -> None:
    """Write the file of `encode_edf` with the same arguments to `path`, atomically."""
    storage.write_bytes(
        path,
        encode_edf(
            channels,
            samples,
            duration=duration,
            notes=notes,
            onsets=onsets,
            start=start,
            patient=patient,
        ),
    )


def _format_field(value: str | float, width: int) -> bytes:
    """A header field: text as it is, numbers so that they read back the same."""
    text = (
        value
        if isinstance(value, str)
        else repr(value)
        if isinstance(value, int)
        else _format_number(value, width)
    )
    raw = text.encode("utf-8")
    if len(raw) > width:
        raise ValueError(f"{text!r} does not fit into {width} bytes")
    return raw.ljust(width)


def _format_number(value: float, width: int) -> str:
    for text in (f"{value:.0f}", f"{value:g}", repr(value), repr(value).replace("0.", ".", 1)):
        if len(text) <= width and float(text) == value:
            return text
    raise ValueError(f"{value!r} does not fit into {width} characters exactly")
