"""WFDB records: headers checked against the files they name, and signals; single segments, and
fixed or variable layouts of several segments.

Every size in a header is compared with that of the file before anything is allocated, every
checksum is verified over all digital samples, and a name that leaves the record's folder is
refused; the package `wfdb` does none of that. Whatever the bytes, only `UserError` is raised.
Comments (age, sex, names, diagnoses) are not kept.

Digital values are the file's own, bit for bit; physical = (digital - baseline) / gain, hence scale
= 1 / gain, offset = -baseline / gain. A frame holds `samples` >= 1 values of each signal: none is
averaged away, each signal keeps its own rate. Legend: F frames, W samples of all signals of one
file in a frame.
"""

import stat
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from itertools import groupby
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    safe_text,
)
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.text import list_names, list_numbers
from bitimely_core.formats.wfdb_header import MAX_HEADER, WfdbHeaderText, parse_header
from bitimely_core.formats.wfdb_samples import (
    FLAC,
    FORMATS,
    MAX_EXPANDED,
    WfdbChannel,
    WfdbSignalGroup,
    calibrate_samples,
    count_bytes,
    count_flac_frames,
    count_samples,
    decode_group,
    verify_checksums,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Signal

# a header that promises this many times the frames of the file counts as damaged, not the file as
# truncated
IMPLAUSIBLE = 100


class WfdbSegment(NamedTuple):
    """A stretch of frames without a gap: a segment, or all of an ordinary record."""

    first: int  # frame of the record at which it begins
    frames: int
    groups: tuple[WfdbSignalGroup, ...]


@dataclass(frozen=True, kw_only=True)
class WfdbHeader:
    """A validated header, with those of its segments. Every file it names exists and holds the
    samples that it promises.
    """

    where: str  # the header file, for messages
    frame_rate: float  # frames a second
    frames: int
    channels: tuple[WfdbChannel, ...]  # of several segments: the first signal of each name
    parts: tuple[WfdbSegment, ...]
    # the header states the number of frames; else it is inferred, and the format does not promise
    # checksums
    sized: bool
    # headers and signal files, relative to the source, else to the record's folder
    files: tuple[str, ...]
    day: date | None
    clock: time | None
    comments: tuple[str, ...] = ()  # empty without keep_phi
    findings: tuple[Finding, ...] = ()

    @property
    def start(self) -> datetime | None:
        """Start of the recording, where both date and time are valid."""
        return (
            None
            if self.day is None or self.clock is None
            else datetime.combine(self.day, self.clock)
        )

    @property
    def seconds(self) -> float:
        """Length of the record, gaps included."""
        return self.frames / self.frame_rate

    def rate(self, channel: WfdbChannel) -> float:
        """Sampling rate in Hz."""
        return self.frame_rate * channel.samples


@dataclass(frozen=True, kw_only=True)
class WfdbRecording:
    """Contents of a record. Times are seconds from its beginning."""

    header: WfdbHeader
    signals: list[Signal]
    findings: list[Finding]


def read_header(
    path: Path | str,
    source: Source | None = None,
    *,
    required: Collection[str] | None = None,
    keep_phi: bool = False,
) -> WfdbHeader:
    """Header of a record, those of its segments, and the sizes of all files they name, checked
    against each other.

    Args:
        path: the record or its header file, with or without `.hea`; relative to `source` where
            there is one.
        source: the raw folder that is read. Without it links must not lead out of the record's
            folder.
        required: see `parse_header`.
        keep_phi: keep the comments in `WfdbHeader.comments`.

    Raises:
        UserError: as `parse_header`, and missing_signal_file, missing_segment, path_escape,
            symlink_outside_root, not_regular_file, truncated, header_implausible, length, corrupt,
            expansion_limit, io_error.
    """
    file = PurePosixPath(path if isinstance(path, str) else path.as_posix())
    file = file if file.suffix.lower() == ".hea" else file.with_name(file.name + ".hea")
    folder = file.parent
    with locate_errors(str(file)):
        parsed = _read_header_text(folder, file.name, source, required)
        files = [file.name]
        findings = list(parsed.findings)
        comments = list(parsed.comments)
        layout: tuple[WfdbChannel, ...] = ()
        if parsed.segments is None:
            groups = _group_signals(parsed, folder, source, findings)
            files += [group.name for group in groups]
            frames = _find_length(parsed.frames, groups, findings, spare=True)
            parts = [WfdbSegment(0, frames, groups)]
        else:
            parts, layout, frames = _read_segments(
                parsed, folder, source, required, files, findings, comments
            )
        channels = {channel.name: channel for channel in layout}
        for part in parts:
            for channel in sorted(
                (c for group in part.groups for c in group.channels), key=attrgetter("number")
            ):
                channels.setdefault(channel.name, channel)
        if comments:
            problem = f"{len(comments)} lines of comment, which may identify a person"
            done = "kept because of --keep-phi" if keep_phi else "not stored"
            findings.append(
                Finding(
                    Reason.PHI, problem, done, level="info", field="comments", count=len(comments)
                )
            )
    return WfdbHeader(
        where=str(file),
        frame_rate=parsed.rate,
        frames=frames,
        channels=tuple(channels.values()),
        parts=tuple(parts),
        sized=parsed.frames is not None or parsed.segments is not None,
        files=tuple(
            dict.fromkeys(
                (folder / name).as_posix() if source else PurePosixPath(name).as_posix()
                for name in files
            )
        ),
        day=parsed.day,
        clock=parsed.clock,
        comments=tuple(map(clean, comments)) if keep_phi else (),
        findings=tuple(_merge_findings(findings)),
    )


def _read_header_text(
    folder: PurePosixPath, name: str, source: Source | None, required: Collection[str] | None
) -> WfdbHeaderText:
    """Header `name` of `folder`, parsed."""
    try:
        with _resolve_path(folder, name, source).open("rb") as file:
            data = file.read(MAX_HEADER + 1)
    except OSError as error:
        raise_system_error(error, name, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
    return parse_header(data, PurePosixPath(name).stem, required=required)


def _resolve_path(folder: PurePosixPath, name: str, source: Source | None) -> Path:
    """Path of a regular file that a header of `folder` names; the name is part of a file, hence not
    trusted.

    Raises UserError: path_escape, missing_signal_file, symlink_outside_root, not_regular_file,
    io_error.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        requirement = "which must be inside the record's folder"
        raise input_error(
            Reason.PATH_ESCAPE, f"names the file {safe_text(name)}", requirement, field="file_name"
        )
    if source is not None:
        return source.path((folder / pure).as_posix())
    path = Path(folder / pure)
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(Path(folder).resolve()):
            raise input_error(
                Reason.SYMLINK_OUTSIDE_ROOT,
                f"the file {safe_text(name)} is a link that leaves the record's folder",
            )
        if not stat.S_ISREG(real.stat().st_mode):
            raise input_error(
                Reason.NOT_REGULAR_FILE, f"the file {safe_text(name)} is no regular file"
            )
    except (FileNotFoundError, NotADirectoryError):
        problem = f"the file {safe_text(name)} is missing"
        raise input_error(Reason.MISSING_SIGNAL_FILE, problem, field="file_name") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise_system_error(error, path, stored=False)
        why = getattr(error, "strerror", None) or "loop of links"
        raise input_error(
            Reason.IO_ERROR, f"the file {safe_text(name)} cannot be reached ({why})"
        ) from None
    return path


def _find_spelling(folder: PurePosixPath, name: str, source: Source | None) -> str:
    """The name of a signal file as the source has it: file systems and tools change its letters to
    capitals, or to small ones.
    """
    if source is None or (folder / name).as_posix() in source.files:
        return name
    others = (
        name.upper(),
        name.lower(),
        str(PurePosixPath(name).with_suffix(PurePosixPath(name).suffix.upper())),
    )
    return next((other for other in others if (folder / other).as_posix() in source.files), name)


def _group_signals(
    parsed: WfdbHeaderText, folder: PurePosixPath, source: Source | None, findings: list[Finding]
) -> tuple[WfdbSignalGroup, ...]:
    """The signals by file. Null signals (format 0) hold no samples and are dropped."""
    groups = []
    null = [channel for _, code, _, channel in parsed.signals if code == 0]
    if null:
        problem = (
            f"signal {list_numbers([channel.number for channel in null])} has no samples (format 0)"
        )
        findings.append(
            input_warning(
                Reason.MISSING_CHANNEL, problem, "dropped", field="format", count=len(null)
            )
        )
    for name, rows in groupby(
        (row for row in parsed.signals if row[1] != 0),
        key=lambda row: _find_spelling(folder, row[0], source),
    ):
        _, codes, starts, channels = zip(*rows, strict=True)
        if len(set(codes)) > 1 or len(set(starts)) > 1:
            problem = f"the signals of {safe_text(name)} have several formats or offsets"
            raise input_error(Reason.HEADER_SYNTAX, problem, "one file has one", field="format")
        if codes[0] in FLAC and len({channel.samples for channel in channels}) > 1:
            problem = f"the signals of {safe_text(name)} have several rates"
            raise input_error(
                Reason.HEADER_SYNTAX, problem, "a FLAC file has one", field="samples_per_frame"
            )
        groups.append(
            WfdbSignalGroup(
                _resolve_path(folder, name, source), name, codes[0], starts[0], channels
            )
        )
    if len({group.name for group in groups}) < len(groups):
        problem = "the signals of one file do not follow each other"
        raise input_error(
            Reason.HEADER_SYNTAX, problem, "their order is not known", field="file_name"
        )
    if not groups:
        raise input_error(
            Reason.MISSING_CHANNEL, "no signal has samples", "expected at least one", field="format"
        )
    return tuple(groups)


def _find_length(
    stated: int | None, groups: Sequence[WfdbSignalGroup], findings: list[Finding], *, spare: bool
) -> int:
    """Number of frames: the header's, if every file has them; else those that all files have.
    `spare`: warn about bytes after them.
    """
    available = [count_frames(group) for group in groups]
    skew = max(channel.skew for group in groups for channel in group.channels)
    if 0 < min([n for n, _ in available] if stated is None else [stated]) <= skew:
        problem, requirement = f"a skew of {skew} samples", "the record is not longer than that"
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, problem, requirement, field="skew", found=str(skew)
        )
    if stated is None:
        frames = min(n for n, _ in available)
        if frames == 0:
            raise input_error(
                Reason.TRUNCATED,
                "a signal file holds no complete frame",
                "expected at least one",
                field="length",
            )
        problem = f"is not in the header, {frames} by the size of the signal files"
        findings.append(Finding(Reason.LENGTH, problem, level="info", field="length"))
        if max(n for n, _ in available) > frames:
            problem = "the signal files are of unequal length"
            findings.append(
                input_warning(Reason.SIZE_MISMATCH, problem, "the shortest decides", field="length")
            )
        return frames
    for group, (frames, size) in zip(groups, available, strict=True):
        file = safe_text(group.name)
        if frames < stated:
            code = (
                Reason.HEADER_IMPLAUSIBLE
                if stated > max(frames, 1) * IMPLAUSIBLE
                else Reason.TRUNCATED
            )
            problem, requirement = (
                f"{file} has {size} bytes for {frames} samples a signal",
                f"the header says {stated}",
            )
            fault = input_error(
                code, problem, requirement, "Download it again", field="length", found=str(frames)
            )
            fault.expected = str(stated)
            raise fault
        rest = (
            size - group.start - count_bytes(group.code, stated * group.width)
            if group.code in FORMATS
            else 0
        )
        if spare and rest >= 4:  # less is padding
            problem = f"{file} has {rest} bytes after the last sample"
            findings.append(
                input_warning(Reason.SIZE_MISMATCH, problem, "they are not read", field="length")
            )
    return stated


def count_frames(group: WfdbSignalGroup) -> tuple[int, int]:
    """Complete frames in the file of a group, and its size in bytes, without reading its
    samples.
    """
    try:
        size = group.path.stat().st_size
        if group.code in FORMATS:
            return count_samples(group.code, max(0, size - group.start)) // group.width, size
        with group.path.open("rb") as file:
            head = file.read(42)
    except OSError as error:
        raise_system_error(error, group.path, stored=False)
        raise input_error(
            Reason.IO_ERROR, f"{safe_text(group.name)} cannot be read ({error.strerror})"
        ) from None
    return count_flac_frames(head, size, group), size


def _read_segments(
    parsed: WfdbHeaderText,
    folder: PurePosixPath,
    source: Source | None,
    required: Collection[str] | None,
    files: list[str],
    findings: list[Finding],
    comments: list[str],
) -> tuple[list[WfdbSegment], tuple[WfdbChannel, ...], int]:
    """The segments of a record that hold samples, the signals of its layout header if it has one,
    and its length in frames.
    """
    parts: list[WfdbSegment] = []
    layout: tuple[WfdbChannel, ...] = ()
    first = 0
    # by name, and whether as the layout
    seen: dict[tuple[str, bool], tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]] = {}
    for number, (name, frames) in enumerate(parsed.segments or (), 1):
        try:
            if name == "~":
                first += frames
                continue
            key = (name, frames == 0)
            if key not in seen:
                seen[key] = _read_segment_header(
                    name, parsed, folder, source, required, layout=frames == 0
                )
                files += [f"{name}.hea", *(group.name for group in seen[key][1])]
                comments += seen[key][0].comments
                findings += [
                    found
                    for found in seen[key][0].findings
                    if found.code not in {Reason.BASE_DATE, Reason.SAMPLING_RATE}
                ]
            inner, groups = seen[key]
            if frames == 0:
                if number > 1:
                    raise input_error(
                        Reason.HEADER_SYNTAX,
                        "has length 0",
                        "only the first, the layout, has that",
                        field="segment",
                    )
                layout = tuple(channel for _, _, _, channel in inner.signals)
                continue
            if inner.frames is not None and inner.frames != frames:
                problem = f"has {inner.frames} samples by its own header"
                raise input_error(
                    Reason.LENGTH,
                    problem,
                    f"the record says {frames}",
                    field="segment",
                    found=str(inner.frames),
                )
            parts.append(
                WfdbSegment(first, _find_length(frames, groups, findings, spare=False), groups)
            )
            first += frames
        except UserError as error:
            error.problem = f"segment {number} ({safe_text(name)}): {error.problem}"
            raise
    if parsed.frames is not None and first != parsed.frames:
        problem = f"the segments have {first} samples in all"
        raise input_error(
            Reason.LENGTH,
            problem,
            f"the record line says {parsed.frames}",
            field="length",
            found=str(first),
        )
    if not parts:
        raise input_error(
            Reason.MISSING_SEGMENT,
            "no segment holds samples",
            "expected at least one",
            field="segment",
        )
    _check_expansion(parts)
    return parts, layout, first


def _read_segment_header(
    name: str,
    parsed: WfdbHeaderText,
    folder: PurePosixPath,
    source: Source | None,
    required: Collection[str] | None,
    *,
    layout: bool,
) -> tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]:
    """Header of one segment and the files it names; a layout header names none."""
    try:
        inner = _read_header_text(folder, f"{name}.hea", source, required)
    except UserError as error:
        if error.code == Reason.MISSING_SIGNAL_FILE:
            error.code, error.field = Reason.MISSING_SEGMENT, "segment"
        raise
    if inner.segments is not None:
        raise input_error(
            Reason.HEADER_SYNTAX,
            "has segments itself",
            "a segment is an ordinary record",
            field="segment",
        )
    if inner.rate != parsed.rate:
        raise input_error(
            Reason.SAMPLING_RATE,
            f"has {inner.rate:g} Hz",
            f"the record has {parsed.rate:g}",
            field="sampling_rate",
        )
    files = PurePosixPath(name).parent  # a segment's files are in the folder of its header
    prefix = "" if files == PurePosixPath(".") else f"{files.as_posix()}/"
    inner = inner._replace(
        signals=tuple(
            (prefix + file, code, start, channel) for file, code, start, channel in inner.signals
        )
    )
    return inner, () if layout else _group_signals(inner, folder, source, [])


def _check_expansion(parts: Sequence[WfdbSegment]) -> None:
    """Limits the samples read from a file: segments may share a file, but not read a small one a
    thousand times.

    Raises UserError: expansion_limit.
    """
    size = sum(
        {group.path: count_frames(group)[1] for part in parts for group in part.groups}.values()
    )
    promised = sum(2 * part.frames * group.width for part in parts for group in part.groups)
    if promised > max(MAX_EXPANDED, IMPLAUSIBLE * size):
        problem = f"{promised} bytes of samples out of files of {size}"
        raise input_error(
            Reason.EXPANSION_LIMIT,
            problem,
            "segments name the same files over and over",
            field="segment",
        )


def _merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Equal findings of several segments as one."""
    merged: dict[tuple[str, str], Finding] = {}
    for found in findings:
        key = (found.code, found.problem)
        merged[key] = (
            replace(found, count=merged[key].count + found.count) if key in merged else found
        )
    return list(merged.values())


# --- samples


def read_recording(
    path: Path | str,
    source: Source | None = None,
    *,
    required: Collection[str] | None = None,
    keep_phi: bool = False,
) -> WfdbRecording:
    """Header and samples of a record.

    Samples are the digital values, at their own rates: int16, or float32 where some are missing
    (NaN) or need more bits. A channel is one signal; in a record of several segments one of each
    stretch without a gap or change of calibration, `onset` in seconds from the record's beginning.
    Sorted by channel as in the header, then by onset.

    Raises UserError: as `read_header`; checksum, initial_value, truncated, corrupt, io_error.
    """
    header = read_header(path, source, required=required, keep_phi=keep_phi)
    findings = list(header.findings)
    missing: Counter[str] = Counter()
    pieces: dict[str, list[tuple[int, int, Signal]]] = {c.name: [] for c in header.channels}
    with locate_errors(header.where):
        for part in header.parts:
            for group in part.groups:
                if not any(channel.name in pieces for channel in group.channels):
                    continue
                values = decode_group(group, part.frames)
                verify_checksums(group, values, findings, sized=header.sized)
                onset = part.first / header.frame_rate
                for channel, digital in zip(group.channels, values, strict=True):
                    if channel.name in pieces:
                        samples, scale, offset, lost = calibrate_samples(
                            channel, digital[channel.skew * channel.samples :], group.code
                        )
                        missing[channel.name] += lost
                        signal = Signal(
                            channel.name,
                            header.rate(channel),
                            channel.unit,
                            samples,
                            scale,
                            offset,
                            onset,
                        )
                        pieces[channel.name].append(
                            (part.first, part.first + part.frames - channel.skew, signal)
                        )
    lossy = {name: n for name, n in missing.items() if n}
    if lossy:
        total = sum(lossy.values())
        problem = (
            f"{total} sample{'s' * (total > 1)} marked as invalid in {list_names(list(lossy), 5)}"
        )
        findings.append(
            input_warning(Reason.MISSING_SAMPLES, problem, "missing values (NaN)", count=total)
        )
    _report_gaps(header, pieces, findings)
    return WfdbRecording(
        header=header,
        signals=[signal for found in pieces.values() for signal in _join_pieces(found)],
        findings=_merge_findings(findings),
    )


def _join_pieces(pieces: Sequence[tuple[int, int, Signal]]) -> list[Signal]:
    """Stretches of one channel that follow each other without a gap, with the same calibration, as
    one.
    """
    runs: list[list[Signal]] = []
    end = -1
    for first, last, signal in pieces:
        if runs and first == end and runs[-1][0][:3] + runs[-1][0][4:6] == signal[:3] + signal[4:6]:
            runs[-1].append(signal)
        else:
            runs.append([signal])
        end = last
    return [
        run[0]
        if len(run) == 1
        else run[0]._replace(samples=np.concatenate([s.samples for s in run]))
        for run in runs
    ]


def _report_gaps(
    header: WfdbHeader, pieces: dict[str, list[tuple[int, int, Signal]]], findings: list[Finding]
) -> None:
    """Add a warning where there are gaps of the record, and one where single channels have some."""
    ends = [part.first + part.frames for part in header.parts]
    gaps = sum(end != part.first for end, part in zip(ends, header.parts[1:], strict=False))
    present = sum(part.frames for part in header.parts)
    if present < header.frames:
        problem = f"{(header.frames - present) / header.frame_rate:g} of {header.seconds:g} s have no samples"
        findings.append(
            input_warning(
                Reason.DISCONTINUOUS,
                problem,
                "kept as segments at their true times",
                count=max(1, gaps),
            )
        )
    partial = [name for name, found in pieces.items() if len(found) < len(header.parts)]
    if partial:
        problem = f"{list_names(partial, 5)}: not in all segments"
        findings.append(
            input_warning(
                Reason.DISCONTINUOUS, problem, "missing where they are not", count=len(partial)
            )
        )
