"""Parses the text of WFDB headers: the record line, the lines of its signals or segments, their
calibration.

No other file is opened. Whatever the bytes, only `UserError` is raised. Comments (age, sex, names,
diagnoses) are handed on, not read.
"""

import math
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import date, time
from functools import lru_cache
from typing import NamedTuple

from bitimely_core.errors import (
    Finding,
    Level,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
)
from bitimely_core.formats.text import decode_text, list_numbers, number_duplicates, sanitize_label
from bitimely_core.formats.units import FASTEST, find_range_fault, find_rate_fault
from bitimely_core.formats.wfdb_samples import FLAC, FORMATS, WfdbChannel

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


class SignalLine(NamedTuple):
    """One signal line of a header."""

    file: str
    code: int  # sample format
    start: int  # bytes before the first sample; FLAC: frames of the stream
    channel: WfdbChannel


class Flag(NamedTuple):
    """A report on signals whose line lacks something, or has a text that is not stored as it is."""

    code: Reason
    problem: str  # before the numbers of the signals
    action: str
    field: str
    level: Level


FLAGS = {
    "gain": Flag(
        Reason.GAIN,
        "0 or missing for",
        f"{GAIN:g} a unit by the format's rule: not calibrated",
        "gain",
        "warning",
    ),
    "unit": Flag(Reason.UNIT, "missing for", "mV by the format's rule", "unit", "info"),
    "label": Flag(
        Reason.LABEL_CHARS,
        "markup, formula or control characters in the description or unit of",
        "stored without them",
        "description",
        "warning",
    ),
}


class WfdbHeaderText(NamedTuple):
    """The text of a header, before any file that it names was looked at."""

    rate: float  # frames a second
    frames: int | None
    signals: tuple[SignalLine, ...]
    # name ("~": a gap) and frames of each; None for an ordinary record
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
    count, is_segmented, fields = _parse_record_line(lines[0], stem)
    kind = "segments" if is_segmented else "signals"
    if len(lines) - 1 != count:
        problem = f"the record line says {count} {kind}, {len(lines) - 1} lines follow"
        raise input_error(
            Reason.HEADER_SYNTAX,
            problem,
            "expected one line each",
            field=f"n_{kind}",
            found=str(len(lines) - 1),
        )
    rate = _parse_rate(fields[:1], findings)
    frames = _parse_frames(fields[1:2])
    day, clock = _parse_start(fields[2:], findings)
    if not all(line.isascii() for line in lines):
        problem = "bytes that are not ASCII in its lines"
        findings.append(input_warning(Reason.NON_ASCII, problem, "read as UTF-8, else as Latin-1"))
    if is_segmented:
        segments = tuple(_parse_segment(line, i) for i, line in enumerate(lines[1:], 1))
        signals: tuple[SignalLine, ...] = ()
    else:
        segments = None
        signals = _parse_signals(lines[1:], rate, required, findings)
    return WfdbHeaderText(rate, frames, signals, segments, day, clock, comments, tuple(findings))


def _parse_record_line(line: str, stem: str) -> tuple[int, bool, list[str]]:
    """The number of signals or segments, whether there are segments, and the further fields.

    Raises UserError: header_syntax, record_name, header_implausible.
    """
    name_field, *fields = line.split()
    match = NAME.fullmatch(name_field)
    if match is None or not fields or not re.fullmatch(r"\d{1,9}", fields[0], re.ASCII):
        raise input_error(
            Reason.HEADER_SYNTAX,
            "the first line is no record line",
            "expected a record name and a number of signals",
            "Open it in a text editor: a failed download is often an error page",
        )
    name, segments = match.groups()
    if name.casefold() != stem.casefold():
        raise input_error(
            Reason.RECORD_NAME,
            f"the record line names {safe_text(name)}",
            "expected the name of the file; a copied header describes another record",
            field="record_name",
            found=safe_text(name),
        )
    counts = [int(text) for text in (segments, fields[0]) if text is not None]
    if 0 in counts:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE,
            "found 0 signals or segments",
            "expected at least 1",
            field="n_signals",
            found="0",
        )
    return counts[0], segments is not None, fields[1:]


def _split_lines(data: bytes) -> tuple[list[str], tuple[str, ...]]:
    """Lines of the header that are neither blank nor comments, and its comments."""
    text = _decode_header(data)
    rows = [row.strip() for row in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    lines = [row for row in rows if row and not row.startswith("#")]
    if not lines or "\0" in text:
        problem = "holds NUL characters" if lines else "holds nothing but comments"
        raise input_error(Reason.HEADER_SYNTAX, problem, "expected a record line")
    comments = [row.strip("# \t") for row in rows if row.startswith("#")]
    return lines, tuple(filter(None, comments))


def _decode_header(data: bytes) -> str:
    if not data.strip():
        size = f"{len(data)} bytes, all blank" if data else "0 bytes"
        raise input_error(Reason.EMPTY_FILE, f"has {size}")
    if len(data) > MAX_HEADER:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, f"has more than {MAX_HEADER} bytes", "no header is that long"
        )
    return decode_text(data).removeprefix("\ufeff")


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
    match = RATES.fullmatch(field[0])
    rate = float(match[1]) if match else math.nan
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
    code: Reason, field: str, value: object, requirement: str, signal: int | None = None
) -> UserError:
    """A field of the record line, or of the line of a signal, with a value that cannot be used."""
    text = safe_text(value)
    place = f" for signal {signal}" if signal else ""
    return input_error(code, f"found {text}{place}", requirement, field=field, found=text)


def _parse_start(fields: Sequence[str], findings: list[Finding]) -> tuple[date | None, time | None]:
    """Start date and time as far as they are valid. The values are not shown: dates identify."""
    if not fields:
        return None, None
    clock = _parse_clock(fields[0])
    day = _parse_day(fields[1]) if fields[1:] else None
    if clock is None or (fields[1:] and day is None) or fields[2:]:
        problem = "is no valid time (hh:mm:ss) with a date (dd/mm/yyyy)"
        findings.append(
            input_warning(Reason.BASE_DATE, problem, "the start is unknown", field="base_date")
        )
        return None, None
    return day, clock


def _parse_clock(text: str) -> time | None:
    match = CLOCK.fullmatch(text)
    if match is None:
        return None
    hour, minute, second, fraction = (part or "0" for part in match.groups())
    with suppress(ValueError):
        return time(int(hour), int(minute), int(second), int(fraction.ljust(6, "0")))
    return None


def _parse_day(text: str) -> date | None:
    match = DAY.fullmatch(text)
    if match is None:
        return None
    day, month, year = map(int, match.groups())
    with suppress(ValueError):
        return date(year, month, day)
    return None


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
) -> tuple[SignalLine, ...]:
    """The signal lines, with unique names and usable calibrations.

    Null signals (format 0) are kept: layout headers list nothing else.
    """
    rows = [_parse_signal(line, i, rate) for i, line in enumerate(lines, 1)]
    for name, flag in FLAGS.items():
        numbers = [signal.channel.number for signal, names in rows if name in names]
        if numbers:
            findings.append(
                input_warning(
                    flag.code,
                    f"{flag.problem} signal {list_numbers(numbers)}",
                    flag.action,
                    field=flag.field,
                    count=len(numbers),
                    level=flag.level,
                )
            )
    labels = {signal.channel.number: signal.channel.name for signal, _ in rows}
    unique = number_duplicates(labels, required, "description", findings)
    return tuple(
        signal._replace(channel=signal.channel._replace(name=unique[signal.channel.number]))
        for signal, _ in rows
    )


# a data set has few labels and calibrations, which every record repeats
_sanitize_label = lru_cache(1024)(sanitize_label)


class SignalGain(NamedTuple):
    """The calibration of a signal line."""

    gain: float
    baseline: int | None
    unit: str
    flags: tuple[str, ...]  # of `FLAGS`: what is not stated


@lru_cache(1024)
def _parse_calibration(text: str) -> SignalGain | None:
    """A calibration, with the rules of the format for what is not stated; None for another text."""
    match = CALIBRATION.fullmatch(text)
    if match is None:
        return None
    gain, baseline, unit = float(match[1] or 0), match[2], SPELLINGS.get(match[3], match[3])
    flags = {"gain": not gain, "unit": unit is None}
    return SignalGain(
        gain or GAIN,
        int(baseline) if baseline else None,
        unit or "mV",
        tuple(name for name, is_missing in flags.items() if is_missing),
    )


def _parse_signal(line: str, number: int, rate: float) -> tuple[SignalLine, set[str]]:
    """One signal line, and which of `FLAGS` it has.

    Raises UserError: header_syntax, format, header_implausible, gain, header_field.
    """
    fields = line.split(None, 8)
    file, storage, text, *numbers, description = [*fields, *[""] * (9 - len(fields))]
    code, samples, skew, start = _parse_format(storage, number, rate)
    calibration = _parse_calibration(text)
    if calibration is None:
        raise _field_error(Reason.GAIN, "gain", text, "expected gain(baseline)/unit", number)
    gain, baseline, unit, missing = calibration
    zero, initial, checksum = _parse_integers(list(filter(None, numbers)), number)
    if code == 8 and initial is None:
        initial = zero  # the rule of the format; differences need a beginning
    if baseline is None:
        baseline = zero or 0
    label = description.strip() or f"signal {number}"
    name = _sanitize_label(label) or f"signal {number}"
    channel = WfdbChannel(
        number, name, _sanitize_label(unit), gain, baseline, samples, skew, initial, checksum
    )
    fault = _find_gain_fault(channel, unit)
    if fault:
        raise _field_error(Reason.GAIN, "gain", text, fault, number)
    flags = set(missing)
    if name != label or channel.unit != unit:
        flags.add("label")
    return SignalLine(file, code, start, channel), flags


def _parse_format(text: str, number: int, rate: float) -> tuple[int, int, int, int]:
    """Sample format, samples a frame, skew and start of a signal."""
    match = CODE.fullmatch(text)
    if match is None:
        raise input_error(
            Reason.HEADER_SYNTAX,
            f"line of signal {number}",
            "expected a file name and a sample format",
            field="format",
        )
    code, samples, skew, start = (
        int(part or default) for part, default in zip(match.groups(), (0, 1, 0, 0), strict=True)
    )
    if code not in {0, *FORMATS, *FLAC}:
        requirement = f"known sample formats are {', '.join(map(str, sorted([*FORMATS, *FLAC])))}"
        raise _field_error(Reason.FORMAT, "format", code, requirement, number)
    if samples == 0 or rate * samples > FASTEST:
        requirement = f"expected at least 1, and at most {FASTEST:g} Hz"
        raise _field_error(
            Reason.HEADER_IMPLAUSIBLE, "samples_per_frame", samples, requirement, number
        )
    return code, samples, skew, start


def _parse_integers(fields: Sequence[str], number: int) -> tuple[int | None, ...]:
    """Zero of the converter, initial value and checksum of a signal, as far as stated."""
    if all(map(INTEGER.fullmatch, fields)):  # nearly always, and three times as fast
        values = list(map(int, fields))
    else:
        pairs = zip(fields, INTEGERS, strict=False)
        values = [_parse_integer(text, name, number) for text, name in pairs]
    return tuple(values[i] if len(values) > i else None for i in (1, 2, 3))


def _find_gain_fault(channel: WfdbChannel, unit: str) -> str:
    """What is wrong with the calibration of a signal; "" for a plausible one."""
    gain = channel.gain
    if not (math.isfinite(gain) and math.isfinite(1 / gain) and math.isfinite(channel.offset)):
        return "expected a usable gain"
    low, high = ((end - channel.baseline) / gain for end in DIGITAL_RANGE)
    return find_range_fault(low, high, 1 / gain, unit)
