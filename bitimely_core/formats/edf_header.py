"""Reads the header of EDF, EDF+ and BDF files: every field is validated, and every size compared
with that of the file.

Identifying text (patient and recording fields, transducers, serial numbers) is not kept.
"""

import math
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time
from fractions import Fraction
from functools import partial
from pathlib import Path
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
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.formats.text import (
    decode_text,
    format_bytes,
    list_numbers,
    number_duplicates,
    sanitize_label,
)
from bitimely_core.formats.units import FASTEST, SLOWEST, find_range_fault
from bitimely_core.wording import list_first

FIELDS = (
    ("version", 8),
    ("patient", 80),
    ("recording", 80),
    ("start_date", 8),
    ("start_time", 8),
    ("header_bytes", 8),
    ("reserved", 44),
    ("n_records", 8),
    ("record_duration", 8),
    ("n_signals", 4),
)
SIGNAL_FIELDS = (
    ("label", 16),
    ("transducer", 80),
    ("unit", 8),
    ("physical_min", 8),
    ("physical_max", 8),
    ("digital_min", 8),
    ("digital_max", 8),
    ("prefilter", 80),
    ("samples_per_record", 8),
    ("signal_reserved", 32),
)
PADDING = b" \x00"  # of fields: some writers pad with zeros
ANNOTATION_LABELS = ("EDF Annotations", "BDF Annotations")
# A header that promises this many times the records of the file is damaged; else the file is
# truncated.
IMPLAUSIBLE = 100

INTEGER = re.compile(rb"[+-]?\d+(?:\.0*)?", re.ASCII)
NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
GROUPED = re.compile(rb"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)
CLOCK = re.compile(r"(\d\d)[.:](\d\d)[.:](\d\d)", re.ASCII)
DAY = re.compile(r"(\d\d)[./-](\d\d)[./-](\d\d)", re.ASCII)


class SignalFields(NamedTuple):
    """The fields of one signal as they are in the header."""

    number: int  # from 1
    fields: dict[str, bytes]  # without their padding
    samples: int  # a data record
    start: int  # byte in the data record at which its samples begin

    @property
    def label(self) -> str:
        """The label as text."""
        return decode_text(self.fields["label"])

    @property
    def unit(self) -> str:
        """The unit as text."""
        return decode_text(self.fields["unit"])


class EdfChannel(NamedTuple):
    """One ordinary signal of the header."""

    label: str  # safe to store: without control, markup and formula characters
    unit: str
    physical_min: float
    physical_max: float
    digital_min: int
    digital_max: int
    samples: int  # a data record
    start: int = 0  # byte in the data record at which its samples begin

    @property
    def scale(self) -> float:
        """Physical units a digital step."""
        return (self.physical_max - self.physical_min) / (self.digital_max - self.digital_min)

    @property
    def offset(self) -> float:
        """Physical value of the digital 0."""
        return self.physical_min - self.digital_min * self.scale


@dataclass(frozen=True, kw_only=True)
class EdfHeader:
    """A validated header."""

    kind: str  # EDF, EDF+C, EDF+D, BDF, BDF+C or BDF+D
    width: int  # bytes a sample: 2 or 3
    size: int  # bytes of the header
    records: int  # complete ones, never more than the file has
    duration: float  # seconds a record; 0 in files that hold nothing but annotations
    record_bytes: int
    channels: tuple[EdfChannel, ...]
    annotation_spans: tuple[tuple[int, int], ...]  # (start, stop) in the record, in bytes
    day: date | None
    clock: time | None
    phi: dict[str, str] = field(default_factory=dict)  # empty without keep_phi
    findings: tuple[Finding, ...] = ()

    @property
    def start(self) -> datetime | None:
        """Start of the recording, where both date and time are valid."""
        return datetime.combine(self.day, self.clock) if self.day and self.clock else None

    def rate(self, channel: EdfChannel) -> float:
        """Sampling rate in Hz."""
        return _sampling_rate(channel.samples, self.duration)


def read_header(
    path: Path, *, required: Collection[str] | None = None, keep_phi: bool = False
) -> EdfHeader:
    """Header of the file at `path`, compared with the file's size.

    Args:
        path: a regular file.
        required: labels of the channels that must be sound; another channel without a usable
            calibration is left out with a warning, and other channels of equal label are numbered,
            with a warning. None: every channel is required.
        keep_phi: keep the patient and recording fields in `EdfHeader.phi`.

    Raises:
        UserError: with the path and, where one field is at fault, the field.
    """
    with translate_read_errors(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            fixed = file.read(256)
            rest = file.read(min(_count_signals(fixed, size) * 256, size))
        suffix = path.suffix.lower()
        return parse_header(fixed + rest, size, suffix=suffix, required=required, keep_phi=keep_phi)


def parse_header(
    data: bytes,
    size: int,
    *,
    suffix: str = "",
    required: Collection[str] | None = None,
    keep_phi: bool = False,
) -> EdfHeader:
    """As `read_header`, from the first bytes of a file of `size` bytes whose name has the ending
    `suffix`.
    """
    count = _count_signals(data, size)
    fixed = {name: field for name, (field,) in _split_fields(data, FIELDS, 1).items()}
    width = 3 if fixed["version"][:1] == b"\xff" else 2
    family = "BDF" if width == 3 else "EDF"
    _check_suffix(family, width, suffix)
    header_size = _check_header_size(fixed["header_bytes"], count, size, len(data))
    columns = _split_fields(data[256:header_size], SIGNAL_FIELDS, count)
    signals = _list_signals(columns, width)
    ordinary = [signal for signal in signals if signal.label not in ANNOTATION_LABELS]
    notes = [signal for signal in signals if signal.label in ANNOTATION_LABELS]
    kind = _find_kind(fixed["reserved"], family, has_notes=bool(notes))
    record_bytes = width * sum(signal.samples for signal in signals)
    findings: list[Finding] = []
    records = _count_records(fixed["n_records"], record_bytes, size - header_size, findings)
    duration = _parse_duration(fixed["record_duration"], [signal.samples for signal in ordinary])
    channels = _parse_channels(ordinary, width, required, findings)
    day, clock = _parse_start(fixed["start_date"], fixed["start_time"], findings)
    return EdfHeader(
        kind=kind,
        width=width,
        size=header_size,
        records=records,
        duration=duration,
        record_bytes=record_bytes,
        channels=tuple(channels),
        annotation_spans=tuple((note.start, note.start + note.samples * width) for note in notes),
        day=day,
        clock=clock,
        phi=_find_phi(fixed, findings, keep=keep_phi),
        findings=(*findings, *_report_non_ascii(fixed, signals)),
    )


def _split_fields(
    data: bytes, fields: Sequence[tuple[str, int]], count: int
) -> dict[str, list[bytes]]:
    """Name -> `count` consecutive fields of that width, without their padding."""
    columns: dict[str, list[bytes]] = {}
    start = 0
    for name, width in fields:
        starts = range(start, start + count * width, width)
        texts = [data[i : i + width].rstrip(b"\x00") for i in starts]
        # a zero inside a name is no padding: it is reported
        columns[name] = [
            text.strip(b" " if name in {"label", "unit"} else PADDING) for text in texts
        ]
        start = starts.stop
    return columns


def _check_suffix(family: str, width: int, suffix: str) -> None:
    """Raises UserError (not_edf) for a file under the name of the other format."""
    if suffix in {".edf", ".bdf"} and suffix != "." + family.lower():
        raise input_error(
            Reason.NOT_EDF,
            f"holds {family} data ({8 * width} bits a sample) under the name of another format",
            hint=f"Rename it to .{family.lower()} if that is right, or download it again",
            found=family,
            expected=suffix[1:].upper(),
        )


def _check_header_size(field: bytes, count: int, size: int, length: int) -> int:
    """Bytes of the header of `count` signals, which the header must state.

    A file of `size` bytes, of which the first `length` are at hand, must hold them.
    """
    header_size = 256 * (count + 1)
    stated = _parse_integer(field, "header_bytes")
    if stated != header_size:
        raise input_error(
            Reason.HEADER_BYTES,
            f"found {stated}",
            f"expected {header_size} for {count} signals",
            "Download the file again",
            field="header_bytes",
            found=str(stated),
            expected=str(header_size),
        )
    if header_size > min(size, length):
        problem = f"{count} signals need {header_size} bytes of header"
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, problem, f"the file has {size}", field="n_signals"
        )
    return header_size


def _find_kind(reserved: bytes, family: str, *, has_notes: bool) -> str:
    """EDF, EDF+C, EDF+D or the same of BDF. Raises UserError: discontinuous."""
    kind = reserved[:5].decode("latin-1").upper()
    if kind not in {f"{family}+C", f"{family}+D"}:
        return family
    if kind.endswith("+D") and not has_notes:
        problem = f"is {kind} but has no annotation signal"
        raise input_error(
            Reason.DISCONTINUOUS, problem, "the times of its records are unknown", field="reserved"
        )
    return kind


def _count_signals(data: bytes, size: int) -> int:
    """Number of signals, after the checks that come before everything else."""
    if size == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    version = data[:8]
    if version != b"\xffBIOSEMI" and version.strip(PADDING) != b"0":
        requirement = "EDF begins with '0', BDF with a byte of 255 and 'BIOSEMI'"
        hint = (
            "Open it in a text editor: a failed download is often an error page. "
            "Export a recorder's own format as EDF+ in its program"
        )
        raise input_error(
            Reason.NOT_EDF,
            f"begins with {format_bytes(version)}",
            requirement,
            hint,
            field="version",
        )
    if len(data) < 256:
        raise input_error(Reason.TRUNCATED, f"has {size} bytes", "a header has 256 and more")
    count = _parse_integer(data[252:256].strip(PADDING), "n_signals")
    if count < 1:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE,
            f"found {count} signals",
            "expected at least 1",
            field="n_signals",
            found=str(count),
        )
    return count


def _field_error(raw: bytes, name: str, wanted: str, signal: int | None) -> UserError:
    place = "" if signal is None else f" for signal {signal}"
    text = format_bytes(raw)
    return input_error(Reason.HEADER_FIELD, f"found {text}{place}", wanted, field=name, found=text)


def _parse_integer(raw: bytes, name: str, signal: int | None = None) -> int:
    if not INTEGER.fullmatch(raw):
        raise _field_error(raw, name, "expected a whole number", signal)
    return int(raw.split(b".")[0])


def _parse_float(raw: bytes, name: str, signal: int | None = None) -> float:
    """float() alone would take 'nan', 'inf', '1_0' and digits of other scripts.

    Programs under some languages write a comma before decimals; 1,000 may have it before hundreds.
    """
    plain = raw if GROUPED.fullmatch(raw) else raw.replace(b",", b".", 1)
    value = float(plain) if NUMBER.fullmatch(plain) else math.nan
    if not math.isfinite(value):
        raise _field_error(raw, name, "expected a finite number", signal)
    return value


def _list_signals(columns: dict[str, list[bytes]], width: int) -> list[SignalFields]:
    """The signals of the header; `width`: bytes a sample."""
    signals: list[SignalFields] = []
    start = 0
    for number, row in enumerate(zip(*columns.values(), strict=True), 1):
        fields = dict(zip(columns, row, strict=True))
        samples = _parse_samples(fields["samples_per_record"], number)
        signals.append(SignalFields(number, fields, samples, start))
        start += samples * width
    return signals


def _parse_samples(raw: bytes, signal: int) -> int:
    """Samples a record."""
    name = "samples_per_record"
    count = _parse_integer(raw, name, signal)
    if count < 1:
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE,
            f"found {count} samples a record for signal {signal}",
            "expected at least 1",
            field=name,
            found=str(count),
        )
    return count


def _parse_duration(raw: bytes, samples: list[int]) -> float:
    """Seconds a record; `samples` are those of the ordinary signals."""
    duration = _parse_float(raw, "record_duration")
    fault = _find_duration_fault(duration, samples)
    if fault:
        text = format_bytes(raw)
        raise input_error(
            Reason.RECORD_DURATION, f"found {text} s", fault, field="record_duration", found=text
        )
    return duration


def _find_duration_fault(duration: float, samples: list[int]) -> str:
    """What is wrong with the seconds of a record; "" for plausible ones."""
    if duration < 0 or (samples and not 1e-6 <= duration <= 1e7):
        if duration == 0:
            return "0 is for files of annotations alone"
        return "expected between a microsecond and 10^7 seconds"
    rates = [_sampling_rate(n, duration) for n in samples]
    if all(SLOWEST <= rate <= FASTEST for rate in rates):
        return ""
    return f"which gives a sampling rate that is not between {SLOWEST:g} and {FASTEST:g} Hz"


def _sampling_rate(samples: int, duration: float) -> float:
    """Samples a second, rounded once: 70 / 0.7 is 100 and not 100.00000000000001."""
    return float(samples / Fraction(repr(duration))) if duration else 0.0


def _count_records(raw: bytes, record_bytes: int, body: int, findings: list[Finding]) -> int:
    """Complete records to read, by the header's number and the bytes after the header."""
    stated = _parse_integer(raw, "n_records")
    complete, rest = divmod(body, record_bytes)
    promised = stated * record_bytes
    refuse = partial(input_error, field="n_records", found=str(stated))
    warn = partial(input_warning, field="n_records")
    if stated < -1:
        raise refuse(
            Reason.HEADER_IMPLAUSIBLE,
            f"found {stated} records",
            "expected a positive number, or -1",
        )
    if stated > max(complete, 1) * IMPLAUSIBLE:
        problem = f"{stated} records need {promised} bytes"
        raise refuse(Reason.HEADER_IMPLAUSIBLE, problem, f"the file has {body} after its header")
    if complete == 0:
        problem = f"has {body} bytes after its header"
        raise refuse(Reason.TRUNCATED, problem, f"one record has {record_bytes}")
    if stated > 0 and 2 * body == 3 * promised:
        problem = f"has {body} bytes for {stated} records, 3 for each sample that EDF holds in 2"
        raise refuse(
            Reason.SIZE_MISMATCH, problem, "this looks like a BDF body under an EDF header"
        )
    dropped = f", {rest} bytes of the last one are dropped" if rest else ""
    if stated in {-1, 0}:
        problem = f"found {stated} (recording not closed)"
        requirement = f"the size gives {complete} complete records{dropped}"
        findings.append(warn(Reason.N_RECORDS_UNKNOWN, problem, requirement))
    elif stated > complete:
        code = Reason.TRUNCATED if rest else Reason.SIZE_MISMATCH
        end = f"the file ends after {complete} complete ones{dropped}"
        problem = f"the header says {stated} records, {end}"
        findings.append(warn(code, problem, "the complete ones are kept"))
    elif body > promised:
        problem = f"{body - promised} bytes after the last of {stated} records"
        findings.append(warn(Reason.SIZE_MISMATCH, problem, "they are not read"))
        return stated
    return complete


def _parse_channels(
    signals: Sequence[SignalFields],
    width: int,
    required: Collection[str] | None,
    findings: list[Finding],
) -> list[EdfChannel]:
    """The signals that have a usable calibration, with unique names."""
    names = {
        signal.number: sanitize_label(signal.label) or f"signal {signal.number}"
        for signal in signals
    }
    _report_unsafe("label", signals, names, findings)
    units = {signal.number: sanitize_label(signal.unit) for signal in signals}
    _report_unsafe("unit", signals, units, findings)
    names = number_duplicates(names, required, "label", findings)
    channels: list[EdfChannel] = []
    faults: list[UserError] = []
    for signal in signals:
        name = names[signal.number]
        try:
            channels.append(_parse_channel(signal, name, width))
        except UserError as error:
            if required is None or name in required:
                raise
            faults.append(error)
            requirement = f"{error.requirement}; the channel {safe_text(name)} is dropped"
            findings.append(
                input_warning(error.code, error.problem, requirement, field=error.field)
            )
    if signals and not channels:
        first = faults[0]
        problem = f"no channel has a usable calibration, such as {first.problem}"
        raise input_error(
            Reason.PHYSICAL_RANGE,
            problem,
            first.requirement,
            "Correct the header, or export the file again",
            field=first.field,
        )
    return channels


def _report_unsafe(
    field: str, signals: Sequence[SignalFields], safe: dict[int, str], findings: list[Finding]
) -> None:
    """A warning about labels or units that differ from what is stored."""
    numbers = [signal.number for signal in signals if getattr(signal, field) != safe[signal.number]]
    if numbers:
        place = f"{field} of signal {list_numbers(numbers)}"
        problem = f"blank, or with markup, formula or control characters: {place}"
        findings.append(
            input_warning(
                Reason.LABEL_CHARS, problem, "stored without them", field=field, count=len(numbers)
            )
        )


def _parse_channel(signal: SignalFields, name: str, width: int) -> EdfChannel:
    """Raises UserError: header_field, digital_range, physical_range."""
    low, high = (
        _parse_float(signal.fields[field], field, signal.number)
        for field in ("physical_min", "physical_max")
    )
    bottom, top = (
        _parse_integer(signal.fields[field], field, signal.number)
        for field in ("digital_min", "digital_max")
    )
    unit = sanitize_label(signal.unit)
    channel = EdfChannel(name, unit, low, high, bottom, top, signal.samples, signal.start)
    _check_calibration(channel, width, signal.number)
    return channel


def _check_calibration(channel: EdfChannel, width: int, number: int) -> None:
    """Raises UserError for ranges that give no scale: digital_range, physical_range.

    physical_min > physical_max is legal: the polarity is inverted.
    """
    place = f"of signal {number} ({safe_text(channel.label)})"
    limit = 1 << (8 * width - 1)
    low, high = channel.digital_min, channel.digital_max
    if not -limit <= low < high < limit:
        problem = f"digital minimum {low} and maximum {high} {place}"
        requirement = f"expected minimum < maximum within -{limit} and {limit - 1}"
        raise input_error(
            Reason.DIGITAL_RANGE, problem, requirement, field="digital_min", found=str(low)
        )
    usable = channel.scale != 0 and math.isfinite(channel.scale) and math.isfinite(channel.offset)
    fault = find_range_fault(
        channel.physical_min, channel.physical_max, channel.scale, channel.unit
    )
    if fault or not usable:
        text = f"{channel.physical_min:g}"
        problem = f"physical minimum {text} and maximum {channel.physical_max:g} {place}"
        requirement = fault if usable else "expected two different numbers"
        raise input_error(
            Reason.PHYSICAL_RANGE, problem, requirement, field="physical_min", found=text
        )


def _parse_start(
    raw_day: bytes, raw_clock: bytes, findings: list[Finding]
) -> tuple[date | None, time | None]:
    """Start date and time as far as they are valid. The values are not shown: dates identify."""
    day, clock = _parse_day(decode_text(raw_day)), _parse_clock(decode_text(raw_clock))
    for value, what, form in ((day, "date", "dd.mm.yy"), (clock, "time", "hh.mm.ss")):
        if value is None:
            findings.append(
                input_warning(
                    Reason.START_DATE,
                    f"is no valid {what} ({form})",
                    f"the {what} is unknown",
                    field=f"start_{what}",
                )
            )
    return day, clock


def _parse_day(text: str) -> date | None:
    """Years 85 to 99 are 1985 to 1999."""
    match = DAY.fullmatch(text)
    if match is None:
        return None
    day, month, year = map(int, match.groups())
    with suppress(ValueError):
        return date(1900 + year if year >= 85 else 2000 + year, month, day)
    return None


def _parse_clock(text: str) -> time | None:
    if CLOCK.fullmatch(text):
        with suppress(ValueError):
            hour, minute, second = map(int, re.split("[.:]", text))
            return time(hour, minute, second)
    return None


def _find_phi(fixed: dict[str, bytes], findings: list[Finding], *, keep: bool) -> dict[str, str]:
    """Header fields that hold more than the blanks of EDF+ ('X'), sex and start date.

    There is a note on each. They are returned only where they are kept.
    """
    words = {name: decode_text(fixed[name]).split() for name in ("patient", "recording")}
    if words["recording"][:1] == ["Startdate"]:
        del words["recording"][:2]
    identifying = [name for name in words if set(words[name]) - {"X", "F", "M"}]
    status = "kept because of --keep-phi" if keep else "not stored"
    findings += [
        Finding(Reason.PHI, "may identify a person", status, level="info", field=name)
        for name in identifying
    ]
    return {name: clean(decode_text(fixed[name])) for name in identifying} if keep else {}


def _report_non_ascii(fixed: dict[str, bytes], signals: Sequence[SignalFields]) -> list[Finding]:
    """One warning for all bytes of the header's texts that are not ASCII."""
    places = [name for name in ("patient", "recording") if not fixed[name].isascii()]
    for name in ("label", "transducer", "unit", "prefilter"):
        places += [
            f"{name} of signal {signal.number}"
            for signal in signals
            if not signal.fields[name].isascii()
        ]
    if not places:
        return []
    return [
        input_warning(
            Reason.NON_ASCII,
            f"bytes that are not ASCII: {list_first(places, 5)}",
            "read as UTF-8, else as Latin-1",
            field=places[0].split()[0],
            count=len(places),
        )
    ]
