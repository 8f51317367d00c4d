"""WFDB records: headers, their checks, and signals; single segments, and fixed or variable layouts of several segments.

Every size in a header is compared with that of the file before anything is allocated, every checksum is verified over all digital samples,
and a name that leaves the record's folder is refused; the package `wfdb` does none of that. Whatever the bytes, only `UserError` is raised.
Comments (age, sex, names, diagnoses) are not kept.

Digital values are the file's own, bit for bit; physical = (digital - baseline) / gain, hence scale = 1 / gain, offset = -baseline / gain.
A frame holds `samples` >= 1 values of each signal: none is averaged away, each signal keeps its own rate.
Legend: F frames, W samples of all signals of one file in a frame.
"""

import math
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, clean, input_error, input_warning, safe_text
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.text import list_names, list_numbers, number_duplicates, sanitize_label
from bitimely_core.formats.units import FASTEST, find_range_fault, find_rate_fault
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

T = TypeVar("T")

GAIN = 200.0  # units a millivolt where the header says 0 or nothing: the rule of the format
RATE = 250.0  # Hz where the header says nothing: the rule of the format
IMPLAUSIBLE = 100  # a header that promises this many times the frames of the file counts as damaged, not the file as truncated
DIGITAL_RANGE = (-(1 << 15), (1 << 15) - 1)  # of most converters; wider formats seldom use theirs
MAX_HEADER = 1 << 22  # bytes; 100,000 segments need half of it


NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"  # one way to match: no quadratic time on long digits
INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
NAME = re.compile(r"([^\s/]+)(?:/(\d{1,9}))?", re.ASCII)
RATES = re.compile(rf"({NUMBER})(?:/{NUMBER}(?:\({NUMBER}\))?)?", re.ASCII)
CODE = re.compile(r"(\d{1,4})(?:x(\d{1,9}))?(?::(\d{1,9}))?(?:\+(\d{1,18}))?", re.ASCII)
CALIBRATION = re.compile(rf"({NUMBER})?(?:\(([+-]?\d{{1,18}})\))?(?:/(\S+))?", re.ASCII)
CLOCK = re.compile(r"(?:(?:(\d{1,2}):)?(\d{1,2}):)?(\d{1,2})(?:\.(\d{1,6})\d*)?", re.ASCII)
DAY = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})", re.ASCII)
INTEGERS = ("adc_resolution", "adc_zero", "initial_value", "checksum", "block_size")
SPELLINGS = {"mv": "mV", "uv": "uV", "µV": "uV", "μV": "uV", "µv": "uV", "μv": "uV"}


class WfdbSegment(NamedTuple):
    """A stretch of frames without a gap: a segment, or all of an ordinary record."""

    first: int  # frame of the record at which it begins
    frames: int
    groups: tuple[WfdbSignalGroup, ...]


class WfdbHeaderText(NamedTuple):
    """The text of a header, before any file that it names was looked at."""

    name: str
    rate: float  # frames a second
    frames: int | None
    signals: tuple[tuple[str, int, int, WfdbChannel], ...]  # file, format, start, signal
    segments: tuple[tuple[str, int], ...] | None  # name ("~": a gap), frames; None for an ordinary record
    day: date | None
    clock: time | None
    comments: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class WfdbHeader:
    """A validated header, with those of its segments. Every file it names exists and holds the samples that it promises."""

    name: str
    where: str  # the header file, for messages
    layout: str  # single, fixed or variable
    frame_rate: float  # frames a second
    frames: int
    channels: tuple[WfdbChannel, ...]  # of several segments: the first signal of each name
    parts: tuple[WfdbSegment, ...]
    sized: bool  # the header states the number of frames; else it is inferred, and the format does not promise checksums
    files: tuple[str, ...]  # headers and signal files, relative to the source, else to the record's folder
    day: date | None
    clock: time | None
    comments: tuple[str, ...] = ()  # empty without keep_phi
    findings: tuple[Finding, ...] = ()

    @property
    def start(self) -> datetime | None:
        """Start of the recording, where both date and time are valid."""
        return None if self.day is None or self.clock is None else datetime.combine(self.day, self.clock)

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
    segments: list[tuple[float, float]]  # (onset, end) in seconds of the stretches without a gap
    findings: list[Finding]


# --- header text


def parse_header(data: bytes, stem: str, *, required: Collection[str] | None = None) -> WfdbHeaderText:
    """The text of a header file, syntax and plausibility checked, nothing opened.

    Args:
        data: the file's bytes.
        stem: name of the file without `.hea`, which the record line must repeat.
        required: names of signals of which there must be one each; other signals of equal name are numbered, with a warning. None: all.

    Raises:
        UserError: empty_file, header_syntax, header_field, header_implausible, record_name, sampling_rate, format, gain, duplicate_channel.
    """
    lines, comments = _split_lines(data)
    findings: list[Finding] = []
    record = lines[0].split()
    named = NAME.fullmatch(record[0])
    if named is None or len(record) < 2 or not re.fullmatch(r"\d{1,9}", record[1], re.ASCII):
        hint = "Open it in a text editor: a failed download is often an error page"
        raise input_error(Reason.HEADER_SYNTAX, "the first line is no record line", "expected a record name and a number of signals", hint)
    if named[1] != stem:
        shown, requirement = safe_text(named[1]), "expected the name of the file; a copied header describes another record"
        raise input_error(Reason.RECORD_NAME, f"the record line names {shown}", requirement, field="record_name", found=shown)
    count = int(record[1])
    many = None if named[2] is None else int(named[2])
    if count == 0 or many == 0:
        raise input_error(Reason.HEADER_IMPLAUSIBLE, "found 0 signals or segments", "expected at least 1", field="n_signals", found="0")
    kind = "signals" if many is None else "segments"
    expected = count if many is None else many
    if len(lines) - 1 != expected:
        problem = f"the record line says {expected} {kind}, {len(lines) - 1} lines follow"
        raise input_error(Reason.HEADER_SYNTAX, problem, "expected one line each", field=f"n_{kind}", found=str(len(lines) - 1))
    rate = _parse_rate(record[2:3], findings)
    frames = _parse_frames(record[3:4])
    day, clock = _parse_start(record[4:], findings)
    if not all(line.isascii() for line in lines):
        findings.append(input_warning(Reason.NON_ASCII, "bytes that are not ASCII in its lines", "read as UTF-8, else as Latin-1"))
    segments = None if many is None else tuple(_parse_segment(line, i) for i, line in enumerate(lines[1:], 1))
    signals = () if many is not None else _parse_signals(lines[1:], rate, required, findings)
    return WfdbHeaderText(named[1], rate, frames, signals, segments, day, clock, comments, tuple(findings))


def _split_lines(data: bytes) -> tuple[list[str], tuple[str, ...]]:
    """Lines of the header that are neither blank nor comments, and its comments."""
    if not data.strip():
        raise input_error(Reason.EMPTY_FILE, f"has {len(data)} bytes, all blank" if data else "has 0 bytes", hint="Download it again")
    if len(data) > MAX_HEADER:
        raise input_error(Reason.HEADER_IMPLAUSIBLE, f"has more than {MAX_HEADER} bytes", "no header is that long")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    rows = [row.strip() for row in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    lines = [row for row in rows if row and not row.startswith("#")]
    if not lines or "\0" in text:
        raise input_error(Reason.HEADER_SYNTAX, "holds NUL characters" if lines else "holds nothing but comments", "expected a record line")
    return lines, tuple(row.strip("# \t") for row in rows if row.startswith("#") and row.strip("# \t"))


def _parse_rate(field: Sequence[str], findings: list[Finding]) -> float:
    """Frames a second; the counter frequency behind it is of no use here."""
    if not field:
        requirement = f"{RATE:g} Hz by the format's rule"
        findings.append(input_warning(Reason.SAMPLING_RATE, "is not in the header", requirement, field="sampling_rate"))
        return RATE
    found = RATES.fullmatch(field[0])
    rate = float(found[1]) if found else math.nan
    if fault := find_rate_fault(rate):
        raise _field_error(Reason.SAMPLING_RATE, "sampling_rate", field[0], fault)
    return rate


def _parse_frames(field: Sequence[str]) -> int | None:
    if not field or field[0] == "0":
        return None
    frames = _parse_integer(field[0], "length")
    if frames < 0:
        raise _field_error(Reason.HEADER_IMPLAUSIBLE, "length", frames, "expected a positive number of samples a signal")
    return frames or None


def _parse_integer(text: str, name: str, line: int | None = None) -> int:
    if not INTEGER.fullmatch(text):
        raise _field_error(Reason.HEADER_FIELD, name, text, "expected a whole number", line)
    return int(text)


def _field_error(code: Reason, field: str, found: object, requirement: str, signal: int | None = None) -> UserError:
    """A field of the record line, or of the line of a signal, with a value that cannot be used."""
    shown = safe_text(found)
    return input_error(code, f"found {shown}" + (f" for signal {signal}" if signal else ""), requirement, field=field, found=shown)


def _parse_start(fields: Sequence[str], findings: list[Finding]) -> tuple[date | None, time | None]:
    """Start date and time as far as they are valid. The values are not shown: dates identify."""
    day, clock = None, None
    with suppress(ValueError):
        if fields and (found := CLOCK.fullmatch(fields[0])):
            clock = time(int(found[1] or 0), int(found[2] or 0), int(found[3]), int((found[4] or "0").ljust(6, "0")))
    with suppress(ValueError):
        if len(fields) > 1 and (found := DAY.fullmatch(fields[1])):
            day = date(int(found[3]), int(found[2]), int(found[1]))
    if fields and (clock is None or (len(fields) > 1 and day is None) or len(fields) > 2):
        problem = "is no valid time (hh:mm:ss) with a date (dd/mm/yyyy)"
        findings.append(input_warning(Reason.BASE_DATE, problem, "the start is unknown", field="base_date"))
        return None, None
    return day, clock


def _parse_segment(line: str, number: int) -> tuple[str, int]:
    fields = line.split()
    if len(fields) < 2 or not re.fullmatch(r"\d{1,18}", fields[1], re.ASCII):
        requirement = "expected the segment's name and its length"
        raise input_error(Reason.HEADER_SYNTAX, f"line {number} of the segments", requirement, field="segment")
    return fields[0], int(fields[1])


def _parse_signals(
    lines: Sequence[str], rate: float, required: Collection[str] | None, findings: list[Finding]
) -> tuple[tuple[str, int, int, WfdbChannel], ...]:
    """The signal lines, with unique names and usable calibrations; null signals (format 0) are kept: layout headers list nothing else."""
    rows = [_parse_signal(line, i, rate) for i, line in enumerate(lines, 1)]
    channels = [channel for _, _, _, channel, _ in rows]
    flags = {i: flag for i, (*_, flag) in enumerate(rows)}
    gainless = [channels[i] for i in flags if "gain" in flags[i]]
    if gainless:
        problem = f"0 or missing for signal {_list_channels(gainless)}"
        requirement = f"{GAIN:g} a unit by the format's rule: not calibrated"
        findings.append(input_warning(Reason.GAIN, problem, requirement, field="gain", count=len(gainless)))
    unitless = [channels[i] for i in flags if "unit" in flags[i]]
    if unitless:
        problem = f"missing for signal {_list_channels(unitless)}"
        findings.append(Finding(Reason.UNIT, problem, "mV by the format's rule", level="info", field="unit", count=len(unitless)))
    unsafe = [channels[i] for i in flags if "label" in flags[i]]
    if unsafe:
        problem = f"markup, formula or control characters in the description or unit of signal {_list_channels(unsafe)}"
        findings.append(input_warning(Reason.LABEL_CHARS, problem, "stored without them", field="description", count=len(unsafe)))
    names = number_duplicates({channel.number: channel.name for channel in channels}, required, "description", findings)
    renamed = [channel if names[channel.number] == channel.name else channel._replace(name=names[channel.number]) for channel in channels]
    return tuple((file, code, start, channel) for (file, code, start, *_), channel in zip(rows, renamed, strict=True))


def _list_channels(channels: Sequence[WfdbChannel]) -> str:
    return list_numbers([channel.number for channel in channels])


def _cache_short_texts(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` with a cache for short texts: a data set has few labels and calibrations, which every record repeats."""
    known = lru_cache(1024)(read)
    return lambda text: known(text) if len(text) <= 80 else read(text)


@_cache_short_texts
def _sanitize_label(label: str) -> str:
    return sanitize_label(label)


@_cache_short_texts
def _parse_calibration(text: str) -> tuple[float, int | None, str | None] | None:
    """Gain (0: none), baseline and unit of a calibration as far as stated; None for a text that is no calibration."""
    found = CALIBRATION.fullmatch(text)
    if found is None:
        return None
    return float(found[1] or 0), int(found[2]) if found[2] else None, SPELLINGS.get(found[3], found[3])


def _parse_signal(line: str, number: int, rate: float) -> tuple[str, int, int, WfdbChannel, set[str]]:
    """One signal line: file, format, start, signal, and which of gain, unit and label were missing or unsafe."""
    fields = line.split(None, 8)
    coded = CODE.fullmatch(fields[1]) if len(fields) > 1 else None
    if coded is None:
        raise input_error(Reason.HEADER_SYNTAX, f"line of signal {number}", "expected a file name and a sample format", field="format")
    code, samples, skew, start = int(coded[1]), int(coded[2] or 1), int(coded[3] or 0), int(coded[4] or 0)
    if code not in FORMATS and code not in FLAC and code != 0:
        known = ", ".join(map(str, sorted([*FORMATS, *FLAC])))
        raise _field_error(Reason.FORMAT, "format", code, f"known sample formats are {known}", number)
    if samples == 0 or rate * samples > FASTEST:
        requirement = f"expected at least 1, and at most {FASTEST:g} Hz"
        raise _field_error(Reason.HEADER_IMPLAUSIBLE, "samples_per_frame", samples, requirement, number)
    calibration = _parse_calibration(fields[2] if len(fields) > 2 else "")
    if calibration is None:
        raise _field_error(Reason.GAIN, "gain", fields[2], "expected gain(baseline)/unit", number)
    gain, zero_at, unit = calibration
    plain = all(map(INTEGER.fullmatch, fields[3:8]))  # nearly always, and three times as fast
    values = [int(text) if plain else _parse_integer(text, name, number) for text, name in zip(fields[3:8], INTEGERS, strict=False)]
    zero, initial, checksum = (values[i] if len(values) > i else None for i in (1, 2, 3))
    if code == 8 and initial is None:
        initial = zero  # the rule of the format; differences need a beginning
    flags = set()
    if gain == 0:
        gain = GAIN
        flags.add("gain")
    if unit is None:
        unit = "mV"
        flags.add("unit")
    label = (fields[8].strip() if len(fields) > 8 else "") or f"signal {number}"
    name = _sanitize_label(label) or f"signal {number}"
    if name != label or _sanitize_label(unit) != unit:
        flags.add("label")
    baseline = zero or 0 if zero_at is None else zero_at
    channel = WfdbChannel(number, name, _sanitize_label(unit), gain, baseline, samples, skew, initial, checksum)
    usable = math.isfinite(gain) and math.isfinite(1 / gain) and math.isfinite(channel.offset)
    low, high = ((end - baseline) / gain if usable else math.nan for end in DIGITAL_RANGE)
    if fault := find_range_fault(low, high, 1 / gain, unit) if usable else "expected a usable gain":
        raise _field_error(Reason.GAIN, "gain", fields[2], fault, number)
    return fields[0], code, start, channel, flags


# --- header with its files


def read_header(
    path: Path | str, source: Source | None = None, *, required: Collection[str] | None = None, keep_phi: bool = False
) -> WfdbHeader:
    """Header of a record, those of its segments, and the sizes of all files they name, checked against each other.

    Args:
        path: the record or its header file, with or without `.hea`; relative to `source` where there is one.
        source: the raw folder that is read. Without it links must not lead out of the record's folder.
        required: see `parse_header`.
        keep_phi: keep the comments in `WfdbHeader.comments`.

    Raises:
        UserError: as `parse_header`, and missing_signal_file, missing_segment, path_escape, symlink_outside_root, not_regular_file,
            truncated, header_implausible, length, corrupt, expansion_limit, io_error.
    """
    file = PurePosixPath(path if isinstance(path, str) else path.as_posix())
    file = file if file.suffix == ".hea" else file.with_name(file.name + ".hea")
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
            kind = "single"
        else:
            kind = "variable" if parsed.segments[0][1] == 0 else "fixed"
            parts, layout, frames = _read_segments(parsed, folder, source, required, files, findings, comments)
        channels = {channel.name: channel for channel in layout}
        for part in parts:
            for channel in sorted((c for group in part.groups for c in group.channels), key=attrgetter("number")):
                channels.setdefault(channel.name, channel)
        if comments:
            problem = f"{len(comments)} lines of comment, which may identify a person"
            done = "kept because of --keep-phi" if keep_phi else "not stored"
            findings.append(Finding(Reason.PHI, problem, done, level="info", field="comments", count=len(comments)))
    return WfdbHeader(
        name=parsed.name,
        where=str(file),
        layout=kind,
        frame_rate=parsed.rate,
        frames=frames,
        channels=tuple(channels.values()),
        parts=tuple(parts),
        sized=parsed.frames is not None or parsed.segments is not None,
        files=tuple(dict.fromkeys((folder / name).as_posix() if source else PurePosixPath(name).as_posix() for name in files)),
        day=parsed.day,
        clock=parsed.clock,
        comments=tuple(map(clean, comments)) if keep_phi else (),
        findings=tuple(_merge_findings(findings)),
    )


def _read_header_text(folder: PurePosixPath, name: str, source: Source | None, required: Collection[str] | None) -> WfdbHeaderText:
    """Header `name` of `folder`, parsed."""
    try:
        with _resolve_path(folder, name, source).open("rb") as file:
            data = file.read(MAX_HEADER + 1)
    except OSError as error:
        raise_system_error(error, name, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
    return parse_header(data, PurePosixPath(name).name.removesuffix(".hea"), required=required)


def _resolve_path(folder: PurePosixPath, name: str, source: Source | None) -> Path:
    """Path of a regular file that a header of `folder` names; the name is part of a file, hence not trusted.

    Raises UserError: path_escape, missing_signal_file, symlink_outside_root, not_regular_file, io_error.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        requirement = "which must be inside the record's folder"
        raise input_error(Reason.PATH_ESCAPE, f"names the file {safe_text(name)}", requirement, field="file_name")
    if source is not None:
        return source.path((folder / pure).as_posix())
    path = Path(folder / pure)
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(Path(folder).resolve()):
            raise input_error(Reason.SYMLINK_OUTSIDE_ROOT, f"the file {safe_text(name)} is a link that leaves the record's folder")
        if not stat.S_ISREG(real.stat().st_mode):
            raise input_error(Reason.NOT_REGULAR_FILE, f"the file {safe_text(name)} is no regular file")
    except (FileNotFoundError, NotADirectoryError):
        problem = f"the file {safe_text(name)} is missing"
        raise input_error(Reason.MISSING_SIGNAL_FILE, problem, hint="Download it again", field="file_name") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise_system_error(error, path, stored=False)
        why = getattr(error, "strerror", None) or "loop of links"
        raise input_error(Reason.IO_ERROR, f"the file {safe_text(name)} cannot be reached ({why})") from None
    return path


def _group_signals(
    parsed: WfdbHeaderText, folder: PurePosixPath, source: Source | None, findings: list[Finding]
) -> tuple[WfdbSignalGroup, ...]:
    """The signals by file. Null signals (format 0) hold no samples and are dropped."""
    groups = []
    null = [channel for _, code, _, channel in parsed.signals if code == 0]
    if null:
        problem = f"signal {_list_channels(null)} has no samples (format 0)"
        findings.append(input_warning(Reason.MISSING_CHANNEL, problem, "dropped", field="format", count=len(null)))
    for name, rows in groupby((row for row in parsed.signals if row[1] != 0), key=lambda row: row[0]):
        _, codes, starts, channels = zip(*rows, strict=True)
        if len(set(codes)) > 1 or len(set(starts)) > 1:
            problem = f"the signals of {safe_text(name)} have several formats or offsets"
            raise input_error(Reason.HEADER_SYNTAX, problem, "one file has one", field="format")
        if codes[0] in FLAC and len({channel.samples for channel in channels}) > 1:
            problem = f"the signals of {safe_text(name)} have several rates"
            raise input_error(Reason.HEADER_SYNTAX, problem, "a FLAC file has one", field="samples_per_frame")
        groups.append(WfdbSignalGroup(_resolve_path(folder, name, source), name, codes[0], starts[0], channels))
    if len({group.name for group in groups}) < len(groups):
        problem = "the signals of one file do not follow each other"
        raise input_error(Reason.HEADER_SYNTAX, problem, "their order is not known", field="file_name")
    if not groups:
        raise input_error(Reason.MISSING_CHANNEL, "no signal has samples", "expected at least one", field="format")
    return tuple(groups)


def _find_length(stated: int | None, groups: Sequence[WfdbSignalGroup], findings: list[Finding], *, spare: bool) -> int:
    """Number of frames: the header's, if every file has them; else those that all files have. `spare`: warn about bytes after them."""
    available = [count_frames(group) for group in groups]
    skew = max(channel.skew for group in groups for channel in group.channels)
    if 0 < min([n for n, _ in available] if stated is None else [stated]) <= skew:
        problem, requirement = f"a skew of {skew} samples", "the record is not longer than that"
        raise input_error(Reason.HEADER_IMPLAUSIBLE, problem, requirement, field="skew", found=str(skew))
    if stated is None:
        frames = min(n for n, _ in available)
        if frames == 0:
            raise input_error(Reason.TRUNCATED, "a signal file holds no complete frame", "expected at least one", field="length")
        problem = f"is not in the header, {frames} by the size of the signal files"
        findings.append(Finding(Reason.LENGTH, problem, level="info", field="length"))
        if max(n for n, _ in available) > frames:
            problem = "the signal files are of unequal length"
            findings.append(input_warning(Reason.SIZE_MISMATCH, problem, "the shortest decides", field="length"))
        return frames
    for group, (frames, size) in zip(groups, available, strict=True):
        file = safe_text(group.name)
        if frames < stated:
            code = Reason.HEADER_IMPLAUSIBLE if stated > max(frames, 1) * IMPLAUSIBLE else Reason.TRUNCATED
            problem, requirement = f"{file} has {size} bytes for {frames} samples a signal", f"the header says {stated}"
            fault = input_error(code, problem, requirement, "Download it again", field="length", found=str(frames))
            fault.expected = str(stated)
            raise fault
        rest = size - group.start - count_bytes(group.code, stated * group.width) if group.code in FORMATS else 0
        if spare and rest >= 4:  # less is padding
            problem = f"{file} has {rest} bytes after the last sample"
            findings.append(input_warning(Reason.SIZE_MISMATCH, problem, "they are not read", field="length"))
    return stated


def count_frames(group: WfdbSignalGroup) -> tuple[int, int]:
    """Complete frames in the file of a group, and its size in bytes, without reading its samples."""
    try:
        size = group.path.stat().st_size
        if group.code in FORMATS:
            return count_samples(group.code, max(0, size - group.start)) // group.width, size
        with group.path.open("rb") as file:
            head = file.read(42)
    except OSError as error:
        raise_system_error(error, group.path, stored=False)
        raise input_error(Reason.IO_ERROR, f"{safe_text(group.name)} cannot be read ({error.strerror})") from None
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
    """The segments of a record that hold samples, the signals of its layout header if it has one, and its length in frames."""
    parts: list[WfdbSegment] = []
    layout: tuple[WfdbChannel, ...] = ()
    first = 0
    seen: dict[tuple[str, bool], tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]] = {}  # by name, and whether as the layout
    for number, (name, frames) in enumerate(parsed.segments or (), 1):
        try:
            if name == "~":
                first += frames
                continue
            key = (name, frames == 0)
            if key not in seen:
                seen[key] = _read_segment_header(name, parsed, folder, source, required, layout=frames == 0)
                files += [f"{name}.hea", *(group.name for group in seen[key][1])]
                comments += seen[key][0].comments
                findings += [found for found in seen[key][0].findings if found.code not in {Reason.BASE_DATE, Reason.SAMPLING_RATE}]
            inner, groups = seen[key]
            if frames == 0:
                if number > 1:
                    raise input_error(Reason.HEADER_SYNTAX, "has length 0", "only the first, the layout, has that", field="segment")
                layout = tuple(channel for _, _, _, channel in inner.signals)
                continue
            if inner.frames is not None and inner.frames != frames:
                problem = f"has {inner.frames} samples by its own header"
                raise input_error(Reason.LENGTH, problem, f"the record says {frames}", field="segment", found=str(inner.frames))
            parts.append(WfdbSegment(first, _find_length(frames, groups, findings, spare=False), groups))
            first += frames
        except UserError as error:
            error.problem = f"segment {number} ({safe_text(name)}): {error.problem}"
            raise
    if parsed.frames is not None and first != parsed.frames:
        problem = f"the segments have {first} samples in all"
        raise input_error(Reason.LENGTH, problem, f"the record line says {parsed.frames}", field="length", found=str(first))
    if not parts:
        raise input_error(Reason.MISSING_SEGMENT, "no segment holds samples", "expected at least one", field="segment")
    _check_expansion(parts)
    return parts, layout, first


def _read_segment_header(
    name: str, parsed: WfdbHeaderText, folder: PurePosixPath, source: Source | None, required: Collection[str] | None, *, layout: bool
) -> tuple[WfdbHeaderText, tuple[WfdbSignalGroup, ...]]:
    """Header of one segment and the files it names; a layout header names none."""
    try:
        inner = _read_header_text(folder, f"{name}.hea", source, required)
    except UserError as error:
        if error.code == Reason.MISSING_SIGNAL_FILE:
            error.code, error.field = Reason.MISSING_SEGMENT, "segment"
        raise
    if inner.segments is not None:
        raise input_error(Reason.HEADER_SYNTAX, "has segments itself", "a segment is an ordinary record", field="segment")
    if inner.rate != parsed.rate:
        raise input_error(Reason.SAMPLING_RATE, f"has {inner.rate:g} Hz", f"the record has {parsed.rate:g}", field="sampling_rate")
    files = PurePosixPath(name).parent  # a segment's files are in the folder of its header
    prefix = "" if files == PurePosixPath(".") else f"{files.as_posix()}/"
    inner = inner._replace(signals=tuple((prefix + file, code, start, channel) for file, code, start, channel in inner.signals))
    return inner, () if layout else _group_signals(inner, folder, source, [])


def _check_expansion(parts: Sequence[WfdbSegment]) -> None:
    """Limits the samples read from a file: segments may share a file, but not read a small one a thousand times.

    Raises UserError: expansion_limit.
    """
    size = sum({group.path: count_frames(group)[1] for part in parts for group in part.groups}.values())
    promised = sum(2 * part.frames * group.width for part in parts for group in part.groups)
    if promised > max(MAX_EXPANDED, IMPLAUSIBLE * size):
        problem = f"{promised} bytes of samples out of files of {size}"
        raise input_error(Reason.EXPANSION_LIMIT, problem, "segments name the same files over and over", field="segment")


def _merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Equal findings of several segments as one."""
    merged: dict[tuple[str, str], Finding] = {}
    for found in findings:
        key = (found.code, found.problem)
        merged[key] = replace(found, count=merged[key].count + found.count) if key in merged else found
    return list(merged.values())


# --- samples


def read_signals(header: WfdbHeader, channels: Collection[str] | None = None) -> list[Signal]:
    """Digital values of the signals, at their own rates: int16, or float32 where samples are missing (NaN) or need more bits.

    Args:
        header: the record's header.
        channels: names to read; None: all.

    Returns:
        One signal a channel; in a record of several segments one a channel and stretch without a gap or change of calibration, `onset` in
        seconds from the record's beginning. Sorted by channel as in the header, then by onset. `read_recording` also returns findings.

    Raises:
        UserError: checksum, initial_value, truncated, corrupt, io_error.
    """
    return _read_channels(header, channels).signals


def read_recording(
    path: Path | str,
    source: Source | None = None,
    *,
    required: Collection[str] | None = None,
    channels: Collection[str] | None = None,
    keep_phi: bool = False,
) -> WfdbRecording:
    """Header and samples of a record; see `read_header` and `read_signals`."""
    return _read_channels(read_header(path, source, required=required, keep_phi=keep_phi), channels)


def _read_channels(header: WfdbHeader, channels: Collection[str] | None) -> WfdbRecording:
    findings = list(header.findings)
    missing: Counter[str] = Counter()
    pieces: dict[str, list[tuple[int, int, Signal]]] = {c.name: [] for c in header.channels if channels is None or c.name in channels}
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
                        samples, scale, offset, lost = calibrate_samples(channel, digital[channel.skew * channel.samples :], group.code)
                        missing[channel.name] += lost
                        signal = Signal(channel.name, header.rate(channel), channel.unit, samples, scale, offset, onset)
                        pieces[channel.name].append((part.first, part.first + part.frames - channel.skew, signal))
    lossy = {name: n for name, n in missing.items() if n}
    if lossy:
        total = sum(lossy.values())
        problem = f"{total} sample{'s' * (total > 1)} marked as invalid in {list_names(list(lossy), 5)}"
        findings.append(input_warning(Reason.MISSING_SAMPLES, problem, "missing values (NaN)", count=total))
    segments = _find_stretches(header, pieces, findings)
    return WfdbRecording(
        header=header,
        signals=[signal for found in pieces.values() for signal in _join_pieces(found)],
        segments=segments,
        findings=_merge_findings(findings),
    )


def _join_pieces(pieces: Sequence[tuple[int, int, Signal]]) -> list[Signal]:
    """Stretches of one channel that follow each other without a gap, with the same calibration, as one."""
    runs: list[list[Signal]] = []
    end = -1
    for first, last, signal in pieces:
        if runs and first == end and runs[-1][0][:3] + runs[-1][0][4:6] == signal[:3] + signal[4:6]:
            runs[-1].append(signal)
        else:
            runs.append([signal])
        end = last
    return [run[0] if len(run) == 1 else run[0]._replace(samples=np.concatenate([s.samples for s in run])) for run in runs]


def _find_stretches(
    header: WfdbHeader, pieces: dict[str, list[tuple[int, int, Signal]]], findings: list[Finding]
) -> list[tuple[float, float]]:
    """(onset, end) in seconds of the stretches without a gap, and a warning where there are gaps, of the record or of single channels."""
    edges: list[list[int]] = []
    for part in header.parts:
        if edges and edges[-1][1] == part.first:
            edges[-1][1] += part.frames
        else:
            edges.append([part.first, part.first + part.frames])
    present = sum(part.frames for part in header.parts)
    if present < header.frames:
        problem = f"{(header.frames - present) / header.frame_rate:g} of {header.seconds:g} s have no samples"
        findings.append(input_warning(Reason.DISCONTINUOUS, problem, "kept as segments at their true times", count=max(1, len(edges) - 1)))
    partial = [name for name, found in pieces.items() if len(found) < len(header.parts)]
    if partial:
        problem = f"{list_names(partial, 5)}: not in all segments"
        findings.append(input_warning(Reason.DISCONTINUOUS, problem, "missing where they are not", count=len(partial)))
    return [(first / header.frame_rate, last / header.frame_rate) for first, last in edges]
