"""Reads the headers of a WFDB record and of its segments, checked against the files they name.

Every size in a header is compared with that of the file before anything is allocated, and a name
that leaves the record's folder is refused; the package `wfdb` does neither.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from itertools import chain, groupby
from operator import attrgetter
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    safe_text,
)
from bitimely_core.formats.source import Source, locate_errors, translate_read_errors
from bitimely_core.formats.text import list_numbers
from bitimely_core.formats.wfdb_header import MAX_HEADER, SignalLine, WfdbHeaderText, parse_header
from bitimely_core.formats.wfdb_samples import (
    FLAC,
    FORMATS,
    MAX_EXPANDED,
    WfdbChannel,
    WfdbSignalGroup,
    count_bytes,
    count_flac_frames,
    count_samples,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import leave_out

# A header that promises this many times the frames of the file is damaged; else the file is
# truncated.
IMPLAUSIBLE = 100


class WfdbSegment(NamedTuple):
    """A stretch of frames without a gap: a segment, or all of an ordinary record."""

    first: int  # frame of the record at which it begins
    frames: int
    groups: tuple[WfdbSignalGroup, ...]


CODE = re.compile(r"\d{6,18}")
DIAGNOSES = re.compile(r"Dx:\s*(\d{6,18}(?:\s*,\s*\d{6,18})*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class WfdbHeader:
    """A validated header, with those of its segments.

    Every file that it names exists and holds the samples that it promises.
    """

    where: str  # the header file, for messages
    frame_rate: float  # frames a second
    frames: int
    channels: tuple[WfdbChannel, ...]  # of several segments: the first signal of each name
    parts: tuple[WfdbSegment, ...]
    sized: bool  # the header states the number of frames; else it is inferred
    files: tuple[str, ...]  # headers and signals, relative to the source
    day: date | None
    clock: time | None
    comments: tuple[str, ...] = ()  # empty without keep_phi
    diagnoses: tuple[str, ...] = ()  # codes of SNOMED CT in comments such as `Dx: 426783006`
    findings: tuple[Finding, ...] = ()

    @property
    def start(self) -> datetime | None:
        """Start of the recording, where both date and time are valid."""
        return datetime.combine(self.day, self.clock) if self.day and self.clock else None

    def rate(self, channel: WfdbChannel) -> float:
        """Sampling rate in Hz."""
        return self.frame_rate * channel.samples


@dataclass(frozen=True)
class RecordFolder:
    """The folder of a record, and which channels its headers must have."""

    path: PurePosixPath  # relative to `source`
    source: Source
    required: Collection[str] | None

    def locate(self, name: str) -> str:
        """The path of a file of the folder."""
        return (self.path / name).as_posix()


@dataclass(frozen=True)
class HeaderNotes:
    """What is collected while the headers of a record are read."""

    files: list[str]
    comments: list[str]
    findings: list[Finding]


def read_header(
    rel: str, source: Source, *, required: Collection[str] | None = None, keep_phi: bool = False
) -> WfdbHeader:
    """Header of a record, those of its segments, and the sizes of all files they name.

    Args:
        rel: the record or its header file in the source, with or without `.hea`.
        source: the raw folder that is read.
        required: see `parse_header`.
        keep_phi: keep the comments in `WfdbHeader.comments`.

    Raises:
        UserError: as `parse_header`, and missing_signal_file, missing_segment, path_escape,
            symlink_outside_root, not_regular_file, truncated, header_implausible, length, corrupt,
            expansion_limit, io_error.
    """
    file = PurePosixPath(rel)
    file = file if file.suffix.lower() == ".hea" else file.with_name(file.name + ".hea")
    folder = RecordFolder(file.parent, source, required)
    with locate_errors(str(file)):
        parsed = _read_header_text(folder, file.name)
        notes = HeaderNotes([file.name], list(parsed.comments), list(parsed.findings))
        layout: tuple[WfdbChannel, ...] = ()
        if parsed.segments is None:
            groups = _group_signals(parsed, folder, notes.findings)
            notes.files.extend(group.name for group in groups)
            frames = _find_length(parsed.frames, groups, notes.findings, spare=True)
            parts = [WfdbSegment(0, frames, groups)]
        else:
            parts, layout, frames = _read_segments(parsed, folder, notes)
        _report_comments(notes, keep=keep_phi)
    return WfdbHeader(
        where=str(file),
        frame_rate=parsed.rate,
        frames=frames,
        channels=_list_channels(layout, parts),
        parts=tuple(parts),
        sized=parsed.frames is not None or parsed.segments is not None,
        files=tuple(dict.fromkeys(map(folder.locate, notes.files))),
        day=parsed.day,
        clock=parsed.clock,
        comments=tuple(map(clean, notes.comments)) if keep_phi else (),
        diagnoses=_list_diagnoses(notes.comments),
        findings=tuple(merge_findings(notes.findings)),
    )


def find_unfilled(source: Source, headers: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> those of the `headers` in it, where the only checksum that they state is 0.

    Whoever wrote them filled no checksum in. Headers that do not parse are no matter here: their
    units report them.
    """
    by_folder: dict[str, list[str]] = {}
    filled: set[str] = set()
    for rel in headers:
        if rel in source.rejected:
            continue
        file = PurePosixPath(rel)
        folder = file.parent.as_posix()
        try:
            parsed = _read_header_text(RecordFolder(file.parent, source, ()), file.name)
        except UserError as error:
            raise_system_error(error)
            continue
        checksums = {line.channel.checksum for line in parsed.signals} - {None}
        if checksums == {0}:
            by_folder.setdefault(folder, []).append(rel)
        elif checksums:
            filled.add(folder)
    return leave_out(by_folder, filled)


def _list_channels(
    layout: Sequence[WfdbChannel], parts: Sequence[WfdbSegment]
) -> tuple[WfdbChannel, ...]:
    """The first channel of each name: those of the layout, then by segment and number."""
    channels = {channel.name: channel for channel in layout}
    for part in parts:
        inner = list(chain.from_iterable(group.channels for group in part.groups))
        for channel in sorted(inner, key=attrgetter("number")):
            channels.setdefault(channel.name, channel)
    return tuple(channels.values())


def _list_diagnoses(comments: Iterable[str]) -> tuple[str, ...]:
    """The codes of diagnoses in comments, each once, as in the challenges of 2020 and 2021."""
    lines = filter(None, map(DIAGNOSES.fullmatch, comments))
    return tuple(dict.fromkeys(chain.from_iterable(CODE.findall(line[1]) for line in lines)))


def _report_comments(notes: HeaderNotes, *, keep: bool) -> None:
    count = len(notes.comments)
    if count:
        problem = f"{count} lines of comment, which may identify a person"
        action = "kept because of --keep-phi" if keep else "not stored"
        notes.findings.append(
            Finding(Reason.PHI, problem, action, level="info", field="comments", count=count)
        )


def _read_header_text(folder: RecordFolder, name: str) -> WfdbHeaderText:
    """Header `name` of `folder`, parsed."""
    with translate_read_errors(name), folder.source.path(folder.locate(name)).open("rb") as file:
        data = file.read(MAX_HEADER + 1)
    return parse_header(data, PurePosixPath(name).stem, required=folder.required)


def _find_spelling(folder: RecordFolder, name: str) -> str:
    """The name of a signal file as the source has it.

    File systems and tools change its letters to capitals, or to small ones.
    """
    pure = PurePosixPath(name)
    spellings = (name, name.upper(), name.lower(), str(pure.with_suffix(pure.suffix.upper())))
    files = folder.source.files
    return next((other for other in spellings if folder.locate(other) in files), name)


# --- the files of signals


def _group_signals(
    parsed: WfdbHeaderText, folder: RecordFolder, findings: list[Finding]
) -> tuple[WfdbSignalGroup, ...]:
    """The signals by file. Null signals (format 0) hold no samples and are dropped."""
    null = [line.channel.number for line in parsed.signals if line.code == 0]
    if null:
        problem = f"signal {list_numbers(null)} has no samples (format 0)"
        findings.append(
            input_warning(
                Reason.MISSING_CHANNEL, problem, "dropped", field="format", count=len(null)
            )
        )
    lines = [line for line in parsed.signals if line.code != 0]
    by_file = groupby(lines, key=lambda line: _find_spelling(folder, line.file))
    groups = tuple(_make_group(folder, name, list(same)) for name, same in by_file)
    if len({group.name for group in groups}) < len(groups):
        problem = "the signals of one file do not follow each other"
        raise input_error(
            Reason.HEADER_SYNTAX, problem, "their order is not known", field="file_name"
        )
    if not groups:
        raise input_error(
            Reason.MISSING_CHANNEL, "no signal has samples", "expected at least one", field="format"
        )
    return groups


def _make_group(folder: RecordFolder, name: str, lines: Sequence[SignalLine]) -> WfdbSignalGroup:
    """The signals of the file `name`. Raises UserError: header_syntax, and as `Source.path`."""
    signals = f"the signals of {safe_text(name)}"
    if len({(line.code, line.start) for line in lines}) > 1:
        problem = f"{signals} have several formats or offsets"
        raise input_error(Reason.HEADER_SYNTAX, problem, "one file has one", field="format")
    channels = tuple(line.channel for line in lines)
    _, code, start, _ = lines[0]
    if code in FLAC and len({channel.samples for channel in channels}) > 1:
        problem = f"{signals} have several rates"
        raise input_error(
            Reason.HEADER_SYNTAX, problem, "a FLAC file has one", field="samples_per_frame"
        )
    path = folder.source.path(folder.locate(name))
    return WfdbSignalGroup(path, name, code, start, channels)


def count_frames(group: WfdbSignalGroup) -> tuple[int, int]:
    """Complete frames in the file of a group, and its size in bytes; no samples are read."""
    with translate_read_errors(group.path, group.name):
        size = group.path.stat().st_size
        if group.code in FORMATS:
            return count_samples(group.code, max(0, size - group.start)) // group.width, size
        with group.path.open("rb") as file:
            head = file.read(42)
    return count_flac_frames(head, size, group), size


def _find_length(
    stated: int | None, groups: Sequence[WfdbSignalGroup], findings: list[Finding], *, spare: bool
) -> int:
    """Number of frames: the header's, if every file has them; else those that all files have.

    `spare`: warn about bytes after them.
    """
    available = list(map(count_frames, groups))
    frames = min(n for n, _ in available) if stated is None else stated
    skew = max(channel.skew for group in groups for channel in group.channels)
    if 0 < frames <= skew:
        problem, requirement = f"a skew of {skew} samples", "the record is not longer than that"
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, problem, requirement, field="skew", found=str(skew)
        )
    if stated is None:
        _report_inferred(frames, max(n for n, _ in available), findings)
        return frames
    for group, (there, size) in zip(groups, available, strict=True):
        _check_length(stated, group, there, size)
        if spare and group.code in FORMATS:
            _report_spare(stated, group, size, findings)
    return stated


def _report_inferred(frames: int, most: int, findings: list[Finding]) -> None:
    """Findings on a length that the header does not state; `most`: frames of the longest file."""
    if frames == 0:
        problem = "a signal file holds no complete frame"
        raise input_error(Reason.TRUNCATED, problem, "expected at least one", field="length")
    problem = f"is not in the header, {frames} by the size of the signal files"
    findings.append(Finding(Reason.LENGTH, problem, level="info", field="length"))
    if most > frames:
        problem = "the signal files are of unequal length"
        findings.append(
            input_warning(Reason.SIZE_MISMATCH, problem, "the shortest decides", field="length")
        )


def _check_length(stated: int, group: WfdbSignalGroup, frames: int, size: int) -> None:
    """Raises UserError (truncated, header_implausible) for a file with fewer frames than stated."""
    if frames < stated:
        is_implausible = stated > max(frames, 1) * IMPLAUSIBLE
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE if is_implausible else Reason.TRUNCATED,
            f"{safe_text(group.name)} has {size} bytes for {frames} samples a signal",
            f"the header says {stated}",
            "Download it again",
            field="length",
            found=str(frames),
            expected=str(stated),
        )


def _report_spare(stated: int, group: WfdbSignalGroup, size: int, findings: list[Finding]) -> None:
    rest = size - group.start - count_bytes(group.code, stated * group.width)
    if rest >= 4:  # less is padding
        problem = f"{safe_text(group.name)} has {rest} bytes after the last sample"
        findings.append(
            input_warning(Reason.SIZE_MISMATCH, problem, "they are not read", field="length")
        )


# --- segments


def _read_segments(
    parsed: WfdbHeaderText, folder: RecordFolder, notes: HeaderNotes
) -> tuple[list[WfdbSegment], tuple[WfdbChannel, ...], int]:
    """The segments of a record that hold samples, the signals of its layout header if it has one,
    and its length in frames.
    """
    parts: list[WfdbSegment] = []
    layout: tuple[WfdbChannel, ...] = ()
    first = 0
    # by name, and whether as the layout
    headers: dict[tuple[str, bool], tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]] = {}
    for number, (name, frames) in enumerate(parsed.segments or (), 1):
        if name != "~":  # else a gap
            with _locate_segment(number, name):
                key = (name, frames == 0)
                if key not in headers:
                    headers[key] = _read_segment_header(
                        name, parsed, folder, notes, is_layout=frames == 0
                    )
                header, groups = headers[key]
                if frames == 0 and number > 1:
                    problem, requirement = "has length 0", "only the first, the layout, has that"
                    raise input_error(Reason.HEADER_SYNTAX, problem, requirement, field="segment")
                if frames == 0:
                    layout = tuple(line.channel for line in header.signals)
                elif header.frames not in {None, frames}:
                    raise input_error(
                        Reason.LENGTH,
                        f"has {header.frames} samples by its own header",
                        f"the record says {frames}",
                        field="segment",
                        found=str(header.frames),
                    )
                else:
                    length = _find_length(frames, groups, notes.findings, spare=False)
                    parts.append(WfdbSegment(first, length, groups))
        first += frames
    _check_record(parsed, parts, first)
    return parts, layout, first


def _check_record(parsed: WfdbHeaderText, parts: Sequence[WfdbSegment], frames: int) -> None:
    """Raises UserError: length, where the record line states other than `frames`, those of all
    segments; missing_segment without samples, and that of `_check_expansion`.
    """
    if parsed.frames not in {None, frames}:
        problem = f"the segments have {frames} samples in all"
        requirement = f"the record line says {parsed.frames}"
        raise input_error(Reason.LENGTH, problem, requirement, field="length", found=str(frames))
    if not parts:
        problem = "no segment holds samples"
        raise input_error(Reason.MISSING_SEGMENT, problem, "expected at least one", field="segment")
    _check_expansion(parts)


@contextmanager
def _locate_segment(number: int, name: str) -> Iterator[None]:
    """Errors that leave this block name the segment."""
    try:
        yield
    except UserError as error:
        error.problem = f"segment {number} ({safe_text(name)}): {error.problem}"
        raise


def _read_segment_header(
    name: str, parsed: WfdbHeaderText, folder: RecordFolder, notes: HeaderNotes, *, is_layout: bool
) -> tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]:
    """Header of one segment and the files it names; a layout header names none."""
    try:
        header = _read_header_text(folder, f"{name}.hea")
    except UserError as error:
        if error.code == Reason.MISSING_SIGNAL_FILE:
            error.code, error.field = Reason.MISSING_SEGMENT, "segment"
        raise
    if header.segments is not None:
        raise input_error(
            Reason.HEADER_SYNTAX,
            "has segments itself",
            "a segment is an ordinary record",
            field="segment",
        )
    if header.rate != parsed.rate:
        raise input_error(
            Reason.SAMPLING_RATE,
            f"has {header.rate:g} Hz",
            f"the record has {parsed.rate:g}",
            field="sampling_rate",
        )
    parent = PurePosixPath(name).parent  # a segment's files are in the folder of its header
    prefix = "" if parent == PurePosixPath(".") else f"{parent.as_posix()}/"
    header = header._replace(
        signals=tuple(line._replace(file=prefix + line.file) for line in header.signals)
    )
    groups = () if is_layout else _group_signals(header, folder, [])
    notes.files.extend([f"{name}.hea", *(group.name for group in groups)])
    notes.comments.extend(header.comments)
    notes.findings.extend(
        finding
        for finding in header.findings
        if finding.code not in {Reason.BASE_DATE, Reason.SAMPLING_RATE}
    )
    return header, groups


def _check_expansion(parts: Sequence[WfdbSegment]) -> None:
    """Limits the samples read from a file.

    Segments may share a file, but not read a small one a thousand times. Raises UserError:
    expansion_limit.
    """
    pairs = [(part, group) for part in parts for group in part.groups]
    sizes = {group.path: count_frames(group)[1] for _, group in pairs}
    size = sum(sizes.values())
    promised = sum(2 * part.frames * group.width for part, group in pairs)
    if promised > max(MAX_EXPANDED, IMPLAUSIBLE * size):
        problem = f"{promised} bytes of samples out of files of {size}"
        raise input_error(
            Reason.EXPANSION_LIMIT,
            problem,
            "segments name the same files over and over",
            field="segment",
        )


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Equal findings of several segments as one."""
    merged: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.problem)
        count = merged[key].count if key in merged else 0
        merged[key] = replace(finding, count=count + finding.count)
    return list(merged.values())
