"""Reads WFDB records: single segments, and fixed or variable layouts of several segments.

`wfdb_files` checks the headers against the files they name; here the samples are read. Every
checksum is verified over all digital samples. Whatever the bytes, only `UserError` is raised.
Comments (age, sex, names, diagnoses) are not kept.

Digital values are the file's own, bit for bit; physical = (digital - baseline) / gain, hence scale
= 1 / gain, offset = -baseline / gain. A frame holds `samples` >= 1 values of each signal: none is
averaged away, each signal keeps its own rate. Legend: F frames, W samples of all signals of one
file in a frame.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.text import list_names
from bitimely_core.formats.wfdb_files import (
    WfdbHeader,
    WfdbSegment,
    find_unfilled,
    merge_findings,
    read_header,
)
from bitimely_core.formats.wfdb_samples import (
    WfdbSignalGroup,
    calibrate_samples,
    decode_group,
    verify_checksums,
)
from bitimely_core.types import Signal, count_nouns

__all__ = ["WfdbHeader", "WfdbRecording", "find_unfilled", "read_header", "read_recording"]


class Piece(NamedTuple):
    """A signal of one segment: frames `first` to `stop` - 1 of the record."""

    first: int
    stop: int
    signal: Signal


@dataclass(frozen=True, kw_only=True)
class WfdbRecording:
    """Contents of a record. Times are seconds from its beginning."""

    header: WfdbHeader
    signals: list[Signal]
    findings: list[Finding]


def read_recording(
    rel: str,
    source: Source,
    *,
    required: Collection[str] | None = None,
    keep_phi: bool = False,
    unfilled: bool = False,
) -> WfdbRecording:
    """Header and samples of a record; the arguments are those of `read_header`.

    `unfilled`: its folder is one of `find_unfilled`, and a checksum of 0 says nothing.

    Returns:
        Digital values at the signals' own rates: int16, or float32 where samples are missing (NaN)
        or need more bits. One signal a channel; in a record of several segments one a channel and
        stretch without a gap or change of calibration, `onset` in seconds from the record's
        beginning. Sorted by channel as in the header, then by onset.

    Raises:
        UserError: as `read_header`, and checksum, initial_value, truncated, corrupt, io_error.
    """
    header = read_header(rel, source, required=required, keep_phi=keep_phi)
    findings = list(header.findings)
    missing: Counter[str] = Counter()
    pieces: dict[str, list[Piece]] = {channel.name: [] for channel in header.channels}
    with locate_errors(header.where):
        for part in header.parts:
            for group in part.groups:
                values = decode_group(group, part.frames)
                verify_checksums(group, values, findings, sized=header.sized, unfilled=unfilled)
                for piece, lost in _make_pieces(header, part, group, values):
                    pieces[piece.signal.channel].append(piece)
                    missing[piece.signal.channel] += lost
    lossy = [name for name, count in missing.items() if count]
    if lossy:
        total = missing.total()
        problem = f"{count_nouns(total, 'sample')} marked as invalid in {list_names(lossy, 5)}"
        findings.append(
            input_warning(Reason.MISSING_SAMPLES, problem, "missing values (NaN)", count=total)
        )
    _report_gaps(header, pieces, findings)
    signals: list[Signal] = []
    for same in pieces.values():
        signals += _join_pieces(same)
    return WfdbRecording(header=header, signals=signals, findings=merge_findings(findings))


def _make_pieces(
    header: WfdbHeader, part: WfdbSegment, group: WfdbSignalGroup, values: Sequence[np.ndarray]
) -> Iterator[tuple[Piece, int]]:
    """The signals of one file in a segment, with the number of missing samples."""
    onset = part.first / header.frame_rate
    for channel, digital in zip(group.channels, values, strict=True):
        samples, scale, offset, missing = calibrate_samples(
            channel, digital[channel.skew * channel.samples :], group.code
        )
        rate = header.rate(channel)
        signal = Signal(channel.name, rate, channel.unit, samples, scale, offset, onset)
        yield Piece(part.first, part.first + part.frames - channel.skew, signal), missing


def _join_pieces(pieces: Sequence[Piece]) -> list[Signal]:
    """Pieces of one channel that follow each other without a gap, with the same rate, unit and
    calibration, as one.
    """
    runs: list[list[Signal]] = []
    end = -1
    for first, stop, signal in pieces:
        if runs and first == end and _describe_signal(runs[-1][0]) == _describe_signal(signal):
            runs[-1].append(signal)
        else:
            runs.append([signal])
        end = stop
    return [
        run[0]._replace(samples=np.concatenate([signal.samples for signal in run]))
        if run[1:]
        else run[0]
        for run in runs
    ]


def _describe_signal(signal: Signal) -> tuple[float, str, float, float]:
    return signal.rate, signal.unit, signal.scale, signal.offset


def _report_gaps(
    header: WfdbHeader, pieces: dict[str, list[Piece]], findings: list[Finding]
) -> None:
    """Warnings about gaps, of the record or of single channels."""
    parts = header.parts
    missing = header.frames - sum(part.frames for part in parts)
    if missing > 0:
        rate = header.frame_rate
        problem = f"{missing / rate:g} of {header.frames / rate:g} s have no samples"
        gaps = sum(part.first + part.frames != after.first for part, after in pairwise(parts))
        action = "kept as segments at their true times"
        findings.append(input_warning(Reason.DISCONTINUOUS, problem, action, count=max(1, gaps)))
    partial = [name for name, same in pieces.items() if len(same) < len(parts)]
    if partial:
        problem = f"{list_names(partial, 5)}: not in all segments"
        action = "missing where they are not"
        findings.append(input_warning(Reason.DISCONTINUOUS, problem, action, count=len(partial)))
