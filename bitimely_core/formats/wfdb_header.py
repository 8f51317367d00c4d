"""Text of WFDB headers: the record line, the lines of its signals or segments, their calibration;
nothing is opened.

Whatever the bytes, only `UserError` is raised. Comments (age, sex, names, diagnoses) are handed on,
not read.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import date, time
from functools import lru_cache
from typing import NamedTuple, TypeVar

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.text import list_numbers, number_duplicates, sanitize_label
from bitimely_core.formats.units import FASTEST, find_range_fault, find_rate_fault
from bitimely_core.formats.wfdb_samples import FLAC, FORMATS, WfdbChannel

T = TypeVar("T")

GAIN = 200.0  # units a millivolt where the header says 0 or nothing: the rule of the format
RATE = 250.0  # Hz where the header says nothing: the rule of the format
DIGITAL_RANGE = (-(1 << 15), (1 << 15) - 1)  # of most converters; wider formats seldom use theirs
MAX_HEADER = 1 << 22  # bytes; 100,000 segments need half of it

# one way to match: no quadratic time on long digits
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
NAME = re.compile(r"([^\s/]+)(?:/(\d{1,9}))?", re.ASCII)
RATES = re.compile(rf"({NUMBER})(?:/{NUMBER}(?:\({NUMBER}\))?)?", re.ASCII)
CODE = re.compile(r"(\d{1,4})(?:x(\d{1,9}))?(?::(\d{1,9}))?(?:\+(\d{1,18}))?", re.ASCII)
CALIBRATION = re.compile(rf"({NUMBER})?(?:\(([+-]?\d{{1,18}})\))?(?:/(\S+))?", re.ASCII)
CLOCK = re.compile(r"(?:(?:(\d{1,2}):)?(\d{1,2}):)?(\d{1,2})(?:\.(\d{1,6})\d*)?", re.ASCII)
DAY = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})", re.ASCII)
INTEGERS = ("adc_resolution", "adc_zero", "initial_value", "checksum", "block_size")
SPELLINGS = {"mv": "mV", "uv": "uV", "µV": "uV", "μV": "uV", "µv": "uV", "μv": "uV"}


class WfdbHeaderText(NamedTuple):
    """The text of a header, before any file that it names was looked at."""

    rate: float  # frames a second
    frames: int | None
    signals: tuple[tuple[str, int, int, WfdbChannel], ...]  # file, format, start, signal
    # name ("~": a gap), frames; None for an ordinary record
    segments: tuple[tuple[str, int], ...] | None
    day: date | None
    clock: time | None
    comments: tuple[str, ...]
    findings: tuple[Finding, ...]


def parse_header(
    data: bytes, stem: str, *, required: Collection[str] | None = None
) -> WfdbHeaderText:
    """The text of a header file, syntax and plausibility checked, nothing opened.

    Args:
        data: the file's bytes.
        stem: name of the file without `.hea`, which the record line must repeat.
        required: names of signals of which there must be one each; other signals of equal name are
            numbered, with a warning. None: all.

    Raises:
        UserError: empty_file, header_syntax, header_field, header_implausible, record_name,
            sampling_rate, format, gain, duplicate_channel.
    """
    lines, comments = _split_lines(data)
    findings: list[Finding] = []
    record = lines[0].split()
    named = NAME.fullmatch(record[0])
    if named is None or len(record) < 2 or not re.fullmatch(r"\d{1,9}", record[1], re.ASCII):
        hint = "Open it in a text editor: a failed download is often an error page"
        raise input_error(
            Reason.HEADER_SYNTAX,
            "the first line is no record line",
            "expected a record name and a number of signals",
            hint,
        )
    if named[1].casefold() != stem.casefold():
        shown, requirement = (
            safe_text(named[1]),
            "expected the name of the file; a copied header describes another record",
        )
        raise input_error(
            Reason.RECORD_NAME,
            f"the record line names {shown}",
            requirement,
            field="record_name",
            found=shown,
        )
    count = int(record[1])
    many = None if named[2] is None else int(named[2])
    if count == 0 or many == 0:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE,
            "found 0 signals or segments",
            "expected at least 1",
            field="n_signals",
            found="0",
        )
    kind = "signals" if many is None else "segments"
    expected = count if many is None else many
    if len(lines) - 1 != expected:
        problem = f"the record line says {expected} {kind}, {len(lines) - 1} lines follow"
        raise input_error(
            Reason.HEADER_SYNTAX,
            problem,
            "expected one line each",
            field=f"n_{kind}",
            found=str(len(lines) - 1),
        )
    rate = _parse_rate(record[2:3], findings)
    frames = _parse_frames(record[3:4])
    day, clock = _parse_start(record[4:], findings)
    if not all(line.isascii() for line in lines):
        findings.append(
            input_warning(
                Reason.NON_ASCII,
                "bytes that are not ASCII in its lines",
                "read as UTF-8, else as Latin-1",
            )
        )
    segments = (
        None
        if many is None
        else tuple(_parse_segment(line, i) for i, line in enumerate(lines[1:], 1))
    )
    signals = () if many is not None else _parse_signals(lines[1:], rate, required, findings)
    return WfdbHeaderText(rate, frames, signals, segments, day, clock, comments, tuple(findings))


def _split_lines(data: bytes) -> tuple[list[str], tuple[str, ...]]:
    """Lines of the header that are neither blank nor comments, and its comments."""
    if not data.strip():
        raise input_error(
            Reason.EMPTY_FILE, f"has {len(data)} bytes, all blank" if data else "has 0 bytes"
        )
    if len(data) > MAX_HEADER:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, f"has more than {MAX_HEADER} bytes", "no header is that long"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    rows = [row.strip() for row in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    lines = [row for row in rows if row and not row.startswith("#")]
    if not lines or "\0" in text:
        raise input_error(
            Reason.HEADER_SYNTAX,
            "holds NUL characters" if lines else "holds nothing but comments",
            "expected a record line",
        )
    return lines, tuple(
        row.strip("# \t") for row in rows if row.startswith("#") and row.strip("# \t")
    )


def _parse_rate(field: Sequence[str], findings: list[Finding]) -> float:
    """Frames a second; the counter frequency behind it is of no use here."""
    if not field:
        requirement = f"{RATE:g} Hz by the format's rule"
        findings.append(
            input_warning(
                Reason.SAMPLING_RATE, "is not in the header", requirement, field="sampling_rate"
            )
        )
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
        raise _field_error(
            Reason.HEADER_IMPLAUSIBLE,
            "length",
            frames,
            "expected a positive number of samples a signal",
        )
    return frames or None


def _parse_integer(text: str, name: str, line: int | None = None) -> int:
    if not INTEGER.fullmatch(text):
        raise _field_error(Reason.HEADER_FIELD, name, text, "expected a whole number", line)
    return int(text)


def _field_error(
    code: Reason, field: str, found: object, requirement: str, signal: int | None = None
) -> UserError:
    """A field of the record line, or of the line of a signal, with a value that cannot be used."""
    shown = safe_text(found)
    return input_error(
        code,
        f"found {shown}" + (f" for signal {signal}" if signal else ""),
        requirement,
        field=field,
        found=shown,
    )


def _parse_start(fields: Sequence[str], findings: list[Finding]) -> tuple[date | None, time | None]:
    """Start date and time as far as they are valid. The values are not shown: dates identify."""
    day, clock = None, None
    with suppress(ValueError):
        if fields and (found := CLOCK.fullmatch(fields[0])):
            clock = time(
                int(found[1] or 0),
                int(found[2] or 0),
                int(found[3]),
                int((found[4] or "0").ljust(6, "0")),
            )
    with suppress(ValueError):
        if len(fields) > 1 and (found := DAY.fullmatch(fields[1])):
            day = date(int(found[3]), int(found[2]), int(found[1]))
    if fields and (clock is None or (len(fields) > 1 and day is None) or len(fields) > 2):
        problem = "is no valid time (hh:mm:ss) with a date (dd/mm/yyyy)"
        findings.append(
            input_warning(Reason.BASE_DATE, problem, "the start is unknown", field="base_date")
        )
        return None, None
    return day, clock


def _parse_segment(line: str, number: int) -> tuple[str, int]:
    fields = line.split()
    if len(fields) < 2 or not re.fullmatch(r"\d{1,18}", fields[1], re.ASCII):
        requirement = "expected the segment's name and its length"
        raise input_error(
            Reason.HEADER_SYNTAX, f"line {number} of the segments", requirement, field="segment"
        )
    return fields[0], int(fields[1])


def _parse_signals(
    lines: Sequence[str], rate: float, required: Collection[str] | None, findings: list[Finding]
) -> tuple[tuple[str, int, int, WfdbChannel], ...]:
    """The signal lines, with unique names and usable calibrations; null signals (format 0) are
    kept: layout headers list nothing else.
    """
    rows = [_parse_signal(line, i, rate) for i, line in enumerate(lines, 1)]
    channels = [channel for _, _, _, channel, _ in rows]
    flags = {i: flag for i, (*_, flag) in enumerate(rows)}
    gainless = [channels[i] for i in flags if "gain" in flags[i]]
    if gainless:
        problem = f"0 or missing for signal {_list_channels(gainless)}"
        requirement = f"{GAIN:g} a unit by the format's rule: not calibrated"
        findings.append(
            input_warning(Reason.GAIN, problem, requirement, field="gain", count=len(gainless))
        )
    unitless = [channels[i] for i in flags if "unit" in flags[i]]
    if unitless:
        problem = f"missing for signal {_list_channels(unitless)}"
        findings.append(
            Finding(
                Reason.UNIT,
                problem,
                "mV by the format's rule",
                level="info",
                field="unit",
                count=len(unitless),
            )
        )
    unsafe = [channels[i] for i in flags if "label" in flags[i]]
    if unsafe:
        problem = f"markup, formula or control characters in the description or unit of signal {_list_channels(unsafe)}"
        findings.append(
            input_warning(
                Reason.LABEL_CHARS,
                problem,
                "stored without them",
                field="description",
                count=len(unsafe),
            )
        )
    names = number_duplicates(
        {channel.number: channel.name for channel in channels}, required, "description", findings
    )
    renamed = [
        channel
        if names[channel.number] == channel.name
        else channel._replace(name=names[channel.number])
        for channel in channels
    ]
    return tuple(
        (file, code, start, channel)
        for (file, code, start, *_), channel in zip(rows, renamed, strict=True)
    )


def _list_channels(channels: Sequence[WfdbChannel]) -> str:
    return list_numbers([channel.number for channel in channels])


def _cache_short_texts(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` with a cache for short texts: a data set has few labels and calibrations, which every
    record repeats.
    """
    known = lru_cache(1024)(read)
    return lambda text: known(text) if len(text) <= 80 else read(text)


@_cache_short_texts
def _sanitize_label(label: str) -> str:
    return sanitize_label(label)


@_cache_short_texts
def _parse_calibration(text: str) -> tuple[float, int | None, str | None] | None:
    """Gain (0: none), baseline and unit of a calibration as far as stated; None for a text that is
    no calibration.
    """
    found = CALIBRATION.fullmatch(text)
    if found is None:
        return None
    return (
        float(found[1] or 0),
        int(found[2]) if found[2] else None,
        SPELLINGS.get(found[3], found[3]),
    )


def _parse_signal(
    line: str, number: int, rate: float
) -> tuple[str, int, int, WfdbChannel, set[str]]:
    """One signal line: file, format, start, signal, and which of gain, unit and label were missing
    or unsafe.
    """
    fields = line.split(None, 8)
    coded = CODE.fullmatch(fields[1]) if len(fields) > 1 else None
    if coded is None:
        raise input_error(
            Reason.HEADER_SYNTAX,
            f"line of signal {number}",
            "expected a file name and a sample format",
            field="format",
        )
    code, samples, skew, start = (
        int(coded[1]),
        int(coded[2] or 1),
        int(coded[3] or 0),
        int(coded[4] or 0),
    )
    if code not in FORMATS and code not in FLAC and code != 0:
        known = ", ".join(map(str, sorted([*FORMATS, *FLAC])))
        raise _field_error(
            Reason.FORMAT, "format", code, f"known sample formats are {known}", number
        )
    if samples == 0 or rate * samples > FASTEST:
        requirement = f"expected at least 1, and at most {FASTEST:g} Hz"
        raise _field_error(
            Reason.HEADER_IMPLAUSIBLE, "samples_per_frame", samples, requirement, number
        )
    calibration = _parse_calibration(fields[2] if len(fields) > 2 else "")
    if calibration is None:
        raise _field_error(Reason.GAIN, "gain", fields[2], "expected gain(baseline)/unit", number)
    gain, zero_at, unit = calibration
    plain = all(map(INTEGER.fullmatch, fields[3:8]))  # nearly always, and three times as fast
    values = [
        int(text) if plain else _parse_integer(text, name, number)
        for text, name in zip(fields[3:8], INTEGERS, strict=False)
    ]
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
    channel = WfdbChannel(
        number, name, _sanitize_label(unit), gain, baseline, samples, skew, initial, checksum
    )
    usable = math.isfinite(gain) and math.isfinite(1 / gain) and math.isfinite(channel.offset)
    low, high = ((end - baseline) / gain if usable else math.nan for end in DIGITAL_RANGE)
    if fault := find_range_fault(low, high, 1 / gain, unit) if usable else "expected a usable gain":
        raise _field_error(Reason.GAIN, "gain", fields[2], fault, number)
    return fields[0], code, start, channel, flags
