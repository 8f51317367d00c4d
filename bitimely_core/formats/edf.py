"""EDF, EDF+C, EDF+D, BDF and BDF+ files: samples, annotations and gaps.

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

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.formats.edf_annotations import decode_annotations
from bitimely_core.formats.edf_header import EdfChannel, EdfHeader, read_header
from bitimely_core.formats.source import locate_errors
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation, Signal

MAX_SEGMENTS = 10_000
BLOCK = 1 << 20  # bytes read at once: stays in the processor's cache between the read and the copy


@dataclass(frozen=True, kw_only=True)
class EdfRecording:
    """Contents of a file. Times are seconds from its first sample, `origin` seconds after the start
    in the header.
    """

    header: EdfHeader
    signals: list[Signal]
    annotations: list[Annotation]
    segments: list[tuple[float, float]]  # (onset, end) in seconds of the stretches without a gap
    origin: float
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
    """Header, samples and annotations in one pass over the file; see `read_header` and
    `read_annotations`.

    Samples are the digital values of the ordinary signals, at their own rates, int16 (BDF: float32,
    which holds 24 bits exactly). A channel is one signal; in a file with gaps one of each segment,
    `onset` in seconds from the first sample. Segments are never joined over a gap, which is a
    finding.

    Raises UserError: as `read_header` and `read_annotations`; discontinuous for records that
    overlap in time, truncated when the file has shrunk.
    """
    header = read_header(path, required=required, keep_phi=keep_phi)
    return _read_channels(path, header, header.channels)


def _read_channels(path: Path, header: EdfHeader, channels: Sequence[EdfChannel]) -> EdfRecording:
    spans = [(c.start, c.start + c.samples * header.width) for c in channels]
    with locate_errors(path, replace=False):
        columns = _read_columns(path, header, [*spans, *header.annotation_spans])
        onsets, notes, findings = decode_annotations(columns[len(spans) :])
        origin, parts = _find_segments(onsets, header, findings)
    signals = []
    for channel, rows in zip(channels, columns, strict=False):
        values = rows.view("<i2") if header.width == 2 else _decode_int24(rows)
        model = Signal(
            channel.label,
            header.rate(channel),
            channel.unit,
            values.reshape(-1),
            channel.scale,
            channel.offset,
        )
        model = model._replace(rails=(float(channel.digital_min), float(channel.digital_max)))
        signals += [
            model._replace(samples=values[a:b].reshape(-1), onset=onset) for a, b, onset in parts
        ]
    return EdfRecording(
        header=header,
        signals=signals,
        annotations=[note._replace(onset=note.onset - origin) for note in notes]
        if origin
        else notes,
        segments=[(onset, onset + (b - a) * header.duration) for a, b, onset in parts],
        origin=origin,
        findings=[*header.findings, *findings],
    )


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
    try:
        with path.open("rb") as file:
            file.seek(header.size)
            for first in range(0, header.records, many):
                rows = block[: min(many, header.records - first)]
                if file.readinto(rows.data.cast("B")) != rows.size:
                    raise input_error(
                        Reason.TRUNCATED,
                        "became shorter while it was read",
                        "nothing may write to it",
                    )
                for output, (start, stop) in zip(outputs, spans, strict=True):
                    output[first : first + len(rows)] = rows[:, start:stop]
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
    return outputs


def _decode_int24(rows: np.ndarray) -> np.ndarray:
    """Little-endian 24-bit two's complement, uint8 [R, 3 S] -> float32 [R, S] (exact: float32 has
    24 bits of mantissa).
    """
    wide = np.zeros((rows.size // 3, 4), np.uint8)
    wide[:, 1:] = rows.reshape(-1, 3)
    return (wide.view("<i4") >> 8).astype(np.float32).reshape(len(rows), -1)


def _find_segments(
    onsets: np.ndarray, header: EdfHeader, findings: list[Finding]
) -> tuple[float, list[tuple[int, int, float]]]:
    """Onset of the first sample after the header's start, and (first record, last + 1, onset in
    seconds) of stretches without a gap.

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
        return 0.0, [(0, header.records, 0.0)]
    if missing:
        text = f"{missing} of {len(onsets)} records have no time"
        findings.append(
            input_warning(
                Reason.ANNOTATION_SYNTAX, text, "assumed to follow the record before", count=missing
            )
        )
    clock = onsets.copy()
    for i in np.flatnonzero(np.isnan(clock)).tolist():
        clock[i] = clock[i - 1] + header.duration if i else 0.0
    steps = np.diff(clock) - header.duration
    near = max(0.5 / max(header.rate(c) for c in header.channels), 1e-3)
    if (steps < -near).any():
        at = int((steps < -near).argmax()) + 2
        raise input_error(
            Reason.DISCONTINUOUS,
            f"record {at} begins before record {at - 1} ends",
            "two samples cannot have one time",
        )
    edges = [0, *(np.flatnonzero(steps > near) + 1).tolist(), len(clock)]
    parts = [(a, b, float(clock[a] - clock[0])) for a, b in pairwise(edges)]
    gaps = len(parts) - 1
    if gaps >= MAX_SEGMENTS:
        raise input_error(
            Reason.DISCONTINUOUS, f"{gaps} gaps in time", f"expected fewer than {MAX_SEGMENTS}"
        )
    if gaps:
        text = f"{gaps} gap{'s' * (gaps > 1)} in time, {steps[steps > near].sum():g} s in all ({header.kind})"
        findings.append(
            input_warning(
                Reason.DISCONTINUOUS, text, "kept as segments at their true times", count=gaps
            )
        )
    drift = max(
        abs(float(clock[b - 1] - clock[a]) - (b - 1 - a) * header.duration) for a, b, _ in parts
    )
    if drift > 0.5:
        problem = f"the clock of the records drifts by {drift:g} s"
        findings.append(
            input_warning(Reason.DISCONTINUOUS, problem, "samples are treated as evenly spaced")
        )
    return float(clock[0]), parts
