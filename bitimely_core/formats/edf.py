"""Reads EDF, EDF+C, EDF+D, BDF and BDF+ files: samples, annotations and gaps.

Damaged files are refused, or read with a warning, never read as plausible values in silence.
Whatever the bytes, only `UserError` is raised. `edf_header` validates the header before anything is
allocated.

Digital values are the file's own, bit for bit; physical = digital * scale + offset in float64 with
scale = (physical_max - physical_min) / (digital_max - digital_min), offset = physical_min -
digital_min * scale. Legend: R data records, S samples of a signal in one record.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.formats.edf_annotations import decode_annotations
from bitimely_core.formats.edf_header import EdfChannel, EdfHeader, read_header
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.types import Annotation, Signal, count_nouns

MAX_SEGMENTS = 10_000
BLOCK = 1 << 20  # bytes read at once: stays in the processor's cache between the read and the copy


class Stretch(NamedTuple):
    """Records without a gap between them: `first` to `stop` - 1."""

    first: int
    stop: int
    onset: float  # seconds after the first sample of the file


@dataclass(frozen=True, kw_only=True)
class EdfRecording:
    """Contents of a file. Times are seconds from its first sample."""

    header: EdfHeader
    signals: list[Signal]
    annotations: list[Annotation]
    segments: list[tuple[float, float]]  # (onset, end) in seconds of the stretches without a gap
    origin: float  # seconds from the start in the header to the first sample
    findings: list[Finding]


def read_annotations(path: Path, header: EdfHeader) -> tuple[list[Annotation], list[Finding]]:
    """All annotations, sorted by onset, and findings, which include gaps between records
    (`discontinuous`).

    Onsets are seconds from the first sample; in a file of annotations alone from the start in the
    header. Labels are without control characters, but foreign text that may hold a name: show only
    those of a known vocabulary. A duration that is not given is 0.

    Raises UserError: annotation_syntax, discontinuous.
    """
    recording = _read_channels(path, header, ())
    return recording.annotations, recording.findings[len(header.findings) :]


def read_recording(
    path: Path, *, required: Collection[str] | None = None, keep_phi: bool = False
) -> EdfRecording:
    """Header, samples and annotations in one pass over the file; see `read_annotations`.

    Args:
        path: the file.
        required: see `read_header`.
        keep_phi: see `read_header`.

    Returns:
        Digital values of the ordinary signals at their own rates, int16 (BDF: float32, which holds
        24 bits exactly). One signal a channel; in a file with gaps one a channel and segment,
        `onset` in seconds from the first sample. Segments are never joined over a gap.

    Raises:
        UserError: as `read_header` and `read_annotations`, and truncated when the file has shrunk.
    """
    header = read_header(path, required=required, keep_phi=keep_phi)
    return _read_channels(path, header, header.channels)


def _read_channels(path: Path, header: EdfHeader, channels: Sequence[EdfChannel]) -> EdfRecording:
    spans = [(c.start, c.start + c.samples * header.width) for c in channels]
    with translate_read_errors(path):
        columns = _read_columns(path, header, [*spans, *header.annotation_spans])
        onsets, notes, findings = decode_annotations(columns[len(spans) :])
        origin, stretches = _find_stretches(onsets, header, findings)
    signals: list[Signal] = []
    for channel, rows in zip(channels, columns, strict=False):
        signals += _cut_signal(header, channel, rows, stretches)
    if origin:
        notes = [note._replace(onset=note.onset - origin) for note in notes]
    return EdfRecording(
        header=header,
        signals=signals,
        annotations=notes,
        segments=[
            (onset, onset + (stop - first) * header.duration) for first, stop, onset in stretches
        ],
        origin=origin,
        findings=[*header.findings, *findings],
    )


def _cut_signal(
    header: EdfHeader, channel: EdfChannel, rows: np.ndarray, stretches: Sequence[Stretch]
) -> list[Signal]:
    """The signal of a channel in each stretch; `rows`: its bytes, uint8 [R, S * width]."""
    values = rows.view("<i2") if header.width == 2 else _decode_int24(rows)
    return [
        Signal(
            channel.label,
            header.rate(channel),
            channel.unit,
            values[first:stop].reshape(-1),
            channel.scale,
            channel.offset,
            onset,
            rails=(float(channel.digital_min), float(channel.digital_max)),
        )
        for first, stop, onset in stretches
    ]


def _read_columns(
    path: Path, header: EdfHeader, spans: Sequence[tuple[int, int]]
) -> list[np.ndarray]:
    """Bytes of the given spans of every record, each contiguous: uint8 [R, stop - start].

    Read in blocks rather than through a memory map: as fast, and a file that shrinks meanwhile
    gives an error instead of a SIGBUS.
    """
    outputs = [np.empty((header.records, stop - start), np.uint8) for start, stop in spans]
    if not spans:
        return outputs
    many = max(1, BLOCK // header.record_bytes)
    block = np.empty((min(many, header.records), header.record_bytes), np.uint8)
    with path.open("rb") as file:
        file.seek(header.size)
        for first in range(0, header.records, many):
            rows = block[: min(many, header.records - first)]
            if file.readinto(rows.data.cast("B")) != rows.size:
                problem = "became shorter while it was read"
                raise input_error(Reason.TRUNCATED, problem, "nothing may write to it")
            for output, (start, stop) in zip(outputs, spans, strict=True):
                output[first : first + len(rows)] = rows[:, start:stop]
    return outputs


def _decode_int24(rows: np.ndarray) -> np.ndarray:
    """Little-endian 24-bit two's complement, uint8 [R, 3 S] -> float32 [R, S].

    It is exact: float32 has 24 bits of mantissa.
    """
    wide = np.zeros((rows.size // 3, 4), np.uint8)
    wide[:, 1:] = rows.reshape(-1, 3)
    return (wide.view("<i4") >> 8).astype(np.float32).reshape(len(rows), -1)


def _find_stretches(
    onsets: np.ndarray, header: EdfHeader, findings: list[Finding]
) -> tuple[float, list[Stretch]]:
    """Seconds from the header's start to the first sample, and the stretches without a gap.

    The time-keeping annotations decide, not EDF+C or EDF+D in the header. Records join where they
    meet to half a sample of the fastest signal.
    """
    missing = int(np.isnan(onsets).sum())
    if missing and header.kind.endswith("+D") and header.channels:
        raise input_error(
            Reason.DISCONTINUOUS,
            f"{missing} of {len(onsets)} records have no time",
            f"required in {header.kind}",
        )
    if not header.channels or missing == len(onsets):
        return 0.0, [Stretch(0, header.records, 0.0)]
    clock = _fill_clock(onsets, header.duration, findings)
    steps = np.diff(clock) - header.duration
    near = max(0.5 / max(map(header.rate, header.channels)), 1e-3)
    if (steps < -near).any():
        record = int((steps < -near).argmax()) + 2
        raise input_error(
            Reason.DISCONTINUOUS,
            f"record {record} begins before record {record - 1} ends",
            "two samples cannot have one time",
        )
    edges = [0, *(np.flatnonzero(steps > near) + 1).tolist(), len(clock)]
    stretches = [
        Stretch(first, stop, float(clock[first] - clock[0])) for first, stop in pairwise(edges)
    ]
    _report_gaps(len(stretches) - 1, float(steps[steps > near].sum()), header.kind, findings)
    _report_drift(clock, header.duration, stretches, findings)
    return float(clock[0]), stretches


def _fill_clock(onsets: np.ndarray, duration: float, findings: list[Finding]) -> np.ndarray:
    """The onset of each record: where none is stated, that of the record before plus `duration`."""
    gaps = np.flatnonzero(np.isnan(onsets)).tolist()
    if gaps:
        text = f"{len(gaps)} of {len(onsets)} records have no time"
        wanted = "assumed to follow the record before"
        findings.append(input_warning(Reason.ANNOTATION_SYNTAX, text, wanted, count=len(gaps)))
    clock = onsets.copy()
    for record in gaps:
        clock[record] = clock[record - 1] + duration if record else 0.0
    return clock


def _report_gaps(gaps: int, seconds: float, kind: str, findings: list[Finding]) -> None:
    """A warning about gaps, `seconds` in all. Raises UserError (discontinuous) for too many."""
    if gaps >= MAX_SEGMENTS:
        raise input_error(
            Reason.DISCONTINUOUS, f"{gaps} gaps in time", f"expected fewer than {MAX_SEGMENTS}"
        )
    if gaps:
        text = f"{count_nouns(gaps, 'gap')} in time, {seconds:g} s in all ({kind})"
        wanted = "kept as segments at their true times"
        findings.append(input_warning(Reason.DISCONTINUOUS, text, wanted, count=gaps))


def _report_drift(
    clock: np.ndarray, duration: float, stretches: Sequence[Stretch], findings: list[Finding]
) -> None:
    drift = max(
        abs(float(clock[stop - 1] - clock[first]) - (stop - 1 - first) * duration)
        for first, stop, _ in stretches
    )
    if drift > 0.5:
        problem = f"the clock of the records drifts by {drift:g} s"
        findings.append(
            input_warning(Reason.DISCONTINUOUS, problem, "samples are treated as evenly spaced")
        )
