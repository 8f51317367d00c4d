"""Header of EDF, EDF+ and BDF files: every field is validated, and every size compared with the
size of the file.

Identifying text (patient and recording fields, transducers, serial numbers) is not kept.
"""

import math
import re
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
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
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import (
    decode_text,
    format_bytes,
    list_numbers,
    number_duplicates,
    sanitize_label,
)
from bitimely_core.formats.units import FASTEST, SLOWEST, find_range_fault
from bitimely_core.system_errors import raise_system_error

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
ANNOTATION_LABELS = ("EDF Annotations", "BDF Annotations")
# a header that promises this many times the records of the file counts as damaged, not the file as
# truncated
IMPLAUSIBLE = 100

INTEGER = re.compile(rb"[+-]?\d+(?:\.0*)?", re.ASCII)
NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
CLOCK = re.compile(r"(\d\d)[.:](\d\d)[.:](\d\d)", re.ASCII)
DAY = re.compile(r"(\d\d)[./-](\d\d)[./-](\d\d)", re.ASCII)


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
    """A validated header. `records` is the number of complete records, never more than the file
    has.
    """

    kind: str  # EDF, EDF+C, EDF+D, BDF, BDF+C or BDF+D
    width: int  # bytes a sample: 2 or 3
    size: int  # bytes of the header
    records: int
    duration: float  # seconds a record; 0 in files that hold nothing but annotations
    record_bytes: int
    channels: tuple[EdfChannel, ...]
    # (start, stop) in the record, in bytes, of the annotation signals
    annotation_spans: tuple[tuple[int, int], ...]
    day: date | None
    clock: time | None
    phi: dict[str, str] = field(default_factory=dict)  # empty without keep_phi
    findings: tuple[Finding, ...] = ()

    @property
    def start(self) -> datetime | None:
        """Start of the recording, where both date and time are valid."""
        return (
            None
            if self.day is None or self.clock is None
            else datetime.combine(self.day, self.clock)
        )

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
    with locate_errors(path, replace=False):
        try:
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise input_error(Reason.NOT_REGULAR_FILE, "is no regular file")
            with path.open("rb") as file:
                fixed = file.read(256)
                rest = file.read(min(_count_signals(fixed, info.st_size) * 256, info.st_size))
        except OSError as error:
            raise_system_error(error, path, stored=False)
            raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
        return parse_header(
            fixed + rest,
            info.st_size,
            suffix=path.suffix.lower(),
            required=required,
            keep_phi=keep_phi,
        )


def parse_header(
    data: bytes,
    size: int,
    *,
    suffix: str = "",
    required: Collection[str] | None = None,
    keep_phi: bool = False,
) -> EdfHeader:
    """As `read_header`, from the first bytes of a file of `size` bytes; `suffix` is that of its
    name.
    """
    count = _count_signals(data, size)
    raw = dict(
        zip(
            (name for name, _ in FIELDS),
            _split_fields(data[:256], [width for _, width in FIELDS]),
            strict=True,
        )
    )
    width = 3 if raw["version"][:1] == b"\xff" else 2
    family = "BDF" if width == 3 else "EDF"
    if suffix in {".edf", ".bdf"} and suffix != "." + family.lower():
        raise input_error(
            Reason.NOT_EDF,
            f"holds {family} data ({8 * width} bits a sample) under the name of another format",
            hint=f"Rename it to .{family.lower()} if that is right, or download it again",
            found=family,
            expected=suffix[1:].upper(),
        )
    header_size = 256 * (count + 1)
    stated = _parse_integer(raw["header_bytes"], "header_bytes")
    if stated != header_size:
        requirement = f"expected {header_size} for {count} signals"
        fault = input_error(
            Reason.HEADER_BYTES,
            f"found {stated}",
            requirement,
            "Download the file again",
            field="header_bytes",
        )
        fault.found, fault.expected = str(stated), str(header_size)
        raise fault
    if header_size > size or len(data) < header_size:
        problem = f"{count} signals need {header_size} bytes of header"
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE, problem, f"the file has {size}", field="n_signals"
        )
    columns = _split_fields(
        data[256:header_size], [w for _, w in SIGNAL_FIELDS for _ in range(count)]
    )
    table = {
        name: columns[i * count : (i + 1) * count] for i, (name, _) in enumerate(SIGNAL_FIELDS)
    }
    findings: list[Finding] = []
    samples = [_parse_samples(text, i) for i, text in enumerate(table["samples_per_record"])]
    starts = [0, *accumulate(n * width for n in samples)]
    labels = [decode_text(label) for label in table["label"]]
    ordinary = [i for i in range(count) if labels[i] not in ANNOTATION_LABELS]
    annotation_spans = tuple(
        (starts[i], starts[i + 1]) for i in range(count) if labels[i] in ANNOTATION_LABELS
    )
    plus = raw["reserved"][:5].decode("latin-1").upper()
    kind = plus if plus in {f"{family}+C", f"{family}+D"} else family
    if kind.endswith("+D") and not annotation_spans:
        problem = f"is {kind} but has no annotation signal"
        raise input_error(
            Reason.DISCONTINUOUS, problem, "the times of its records are unknown", field="reserved"
        )
    records = _count_records(raw["n_records"], starts[-1], size - header_size, findings)
    duration = _parse_duration(raw["record_duration"], [samples[i] for i in ordinary])
    zeros = {name: _find_zero_bytes(data, name, count) for name in ("label", "unit")}
    channels = _parse_channels(
        table,
        [(i, labels[i], samples[i], starts[i]) for i in ordinary],
        zeros,
        width,
        required,
        findings,
    )
    day, clock = _parse_start(raw["start_date"], raw["start_time"], findings)
    return EdfHeader(
        kind=kind,
        width=width,
        size=header_size,
        records=records,
        duration=duration,
        record_bytes=starts[-1],
        channels=tuple(channels),
        annotation_spans=annotation_spans,
        day=day,
        clock=clock,
        phi=_find_phi(raw, findings, keep=keep_phi),
        findings=(*findings, *_report_non_ascii(raw, table)),
    )


def _split_fields(data: bytes, widths: Sequence[int]) -> list[bytes]:
    """Consecutive fields without their padding (blanks; some writers pad with zeros)."""
    edges = [0, *accumulate(widths)]
    return [data[a:b].strip(b" \x00") for a, b in pairwise(edges)]


def _find_zero_bytes(data: bytes, name: str, count: int) -> set[int]:
    """The signals, from 0, in whose field `name` a zero byte precedes other characters: no
    padding.
    """
    names = [field for field, _ in SIGNAL_FIELDS]
    width = dict(SIGNAL_FIELDS)[name]
    start = 256 + count * sum(w for _, w in SIGNAL_FIELDS[: names.index(name)])
    fields = (data[start + i * width : start + (i + 1) * width] for i in range(count))
    return {i for i, field in enumerate(fields) if b"\x00" in field.rstrip(b"\x00")}


def _count_signals(data: bytes, size: int) -> int:
    """Number of signals, after the checks that come before everything else."""
    if size == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    version = data[:8]
    if version != b"\xffBIOSEMI" and version.strip(b" \x00") != b"0":
        requirement = "EDF begins with '0', BDF with a byte of 255 and 'BIOSEMI'"
        hint = "Open it in a text editor: a failed download is often an error page"
        raise input_error(
            Reason.NOT_EDF,
            f"begins with {format_bytes(version)}",
            requirement,
            hint,
            field="version",
        )
    if len(data) < 256:
        raise input_error(Reason.TRUNCATED, f"has {size} bytes", "a header has 256 and more")
    count = _parse_integer(data[252:256].strip(b" \x00"), "n_signals")
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
    of = "" if signal is None else f" for signal {signal + 1}"
    return input_error(
        Reason.HEADER_FIELD,
        f"found {format_bytes(raw)}{of}",
        wanted,
        field=name,
        found=format_bytes(raw),
    )


def _parse_integer(raw: bytes, name: str, signal: int | None = None) -> int:
    if not INTEGER.fullmatch(raw):
        raise _field_error(raw, name, "expected a whole number", signal)
    return int(raw.split(b".")[0])


def _parse_float(raw: bytes, name: str, signal: int | None = None) -> float:
    """float() alone would take 'nan', 'inf', '1_0' and digits of other scripts."""
    value = float(raw) if NUMBER.fullmatch(raw) else math.nan
    if not math.isfinite(value):
        raise _field_error(raw, name, "expected a finite number", signal)
    return value


def _parse_samples(raw: bytes, signal: int) -> int:
    count = _parse_integer(raw, "samples_per_record", signal)
    if count < 1:
        text = f"found {count} samples a record for signal {signal + 1}"
        raise input_error(
            Reason.HEADER_IMPLAUSIBLE,
            text,
            "expected at least 1",
            field="samples_per_record",
            found=str(count),
        )
    return count


def _parse_duration(raw: bytes, samples: list[int]) -> float:
    """Seconds a record; `samples` are those of the ordinary signals."""
    duration = _parse_float(raw, "record_duration")
    if duration < 0 or (samples and not 1e-6 <= duration <= 1e7):
        requirement = (
            "0 is for files of annotations alone"
            if duration == 0
            else "expected between a microsecond and 10^7 seconds"
        )
    elif (
        samples
        and not SLOWEST
        <= _sampling_rate(min(samples), duration)
        <= _sampling_rate(max(samples), duration)
        <= FASTEST
    ):
        requirement = (
            f"which gives a sampling rate that is not between {SLOWEST:g} and {FASTEST:g} Hz"
        )
    else:
        return duration
    found = format_bytes(raw)
    raise input_error(
        Reason.RECORD_DURATION,
        f"found {found} s",
        requirement,
        field="record_duration",
        found=found,
    )


def _sampling_rate(samples: int, duration: float) -> float:
    """Samples a second, rounded once: 70 / 0.7 is 100 and not 100.00000000000001."""
    return float(samples / Fraction(repr(duration))) if duration else 0.0


def _count_records(raw: bytes, record_bytes: int, body: int, findings: list[Finding]) -> int:
    """Complete records to read, by the header's number and the bytes after the header."""
    stated = _parse_integer(raw, "n_records")
    complete, rest = divmod(body, record_bytes)
    promised = stated * record_bytes
    refuse, warn = (
        partial(input_error, field="n_records", found=str(stated)),
        partial(input_warning, field="n_records"),
    )
    if stated < -1:
        raise refuse(
            Reason.HEADER_IMPLAUSIBLE,
            f"found {stated} records",
            "expected a positive number, or -1",
        )
    if stated > max(complete, 1) * IMPLAUSIBLE:
        raise refuse(
            Reason.HEADER_IMPLAUSIBLE,
            f"{stated} records need {promised} bytes",
            f"the file has {body} after its header",
        )
    if complete == 0:
        raise refuse(
            Reason.TRUNCATED, f"has {body} bytes after its header", f"one record has {record_bytes}"
        )
    if stated > 0 and 2 * body == 3 * promised:
        problem = f"has {body} bytes for {stated} records, 3 for each sample that EDF holds in 2"
        raise refuse(
            Reason.SIZE_MISMATCH, problem, "this looks like a BDF body under an EDF header"
        )
    dropped = f", {rest} bytes of the last one are dropped" if rest else ""
    if stated in {-1, 0}:
        requirement = f"the size gives {complete} complete records{dropped}"
        findings.append(
            warn(Reason.N_RECORDS_UNKNOWN, f"found {stated} (recording not closed)", requirement)
        )
    elif stated > complete:
        problem = f"the header says {stated} records, the file ends after {complete} complete ones{dropped}"
        findings.append(
            warn(
                Reason.TRUNCATED if rest else Reason.SIZE_MISMATCH,
                problem,
                "the complete ones are kept",
            )
        )
    elif body > promised:
        problem = f"{body - promised} bytes after the last of {stated} records"
        findings.append(warn(Reason.SIZE_MISMATCH, problem, "they are not read"))
        return stated
    return complete


def _parse_channels(
    table: dict[str, list[bytes]],
    signals: list[tuple[int, str, int, int]],
    zeros: dict[str, set[int]],
    width: int,
    required: Collection[str] | None,
    findings: list[Finding],
) -> list[EdfChannel]:
    """The ordinary signals (0-based number, label, samples, start) that have a usable calibration,
    with unique names; `zeros`: signals with zero bytes by field.
    """
    names = {i + 1: sanitize_label(label) or f"signal {i + 1}" for i, label, _, _ in signals}
    units = {i: decode_text(table["unit"][i]) for i, *_ in signals}
    for place, unsafe in (
        (
            "label",
            [i + 1 for i, label, _, _ in signals if names[i + 1] != label or i in zeros["label"]],
        ),
        (
            "unit",
            [
                i + 1
                for i, unit in units.items()
                if sanitize_label(unit) != unit or i in zeros["unit"]
            ],
        ),
    ):
        if unsafe:
            problem = f"blank, or with markup, formula or control characters: {place} of signal {list_numbers(unsafe)}"
            findings.append(
                input_warning(
                    Reason.LABEL_CHARS,
                    problem,
                    "stored without them",
                    field=place,
                    count=len(unsafe),
                )
            )
    names = number_duplicates(names, required, "label", findings)
    channels = []
    for i, _, samples, start in signals:
        name = names[i + 1]
        try:
            unit = sanitize_label(units[i])
            low, high = (
                _parse_float(table[field][i], field, i)
                for field in ("physical_min", "physical_max")
            )
            bottom, top = (
                _parse_integer(table[field][i], field, i)
                for field in ("digital_min", "digital_max")
            )
            channels.append(
                _check_calibration(
                    EdfChannel(name, unit, low, high, bottom, top, samples, start), width, i
                )
            )
        except UserError as error:
            if required is None or name in required:
                raise
            requirement = f"{error.requirement}; the channel {safe_text(name)} is dropped"
            findings.append(
                input_warning(error.code, error.problem, requirement, field=error.field)
            )
    if signals and not channels:
        raise input_error(
            Reason.PHYSICAL_RANGE,
            "no channel has a usable calibration",
            "expected at least one",
            field="physical_min",
        )
    return channels


def _check_calibration(channel: EdfChannel, width: int, signal: int) -> EdfChannel:
    """The channel, if its ranges give a scale. physical_min > physical_max is legal: the polarity
    is inverted.
    """
    of = f"of signal {signal + 1} ({safe_text(channel.label)})"
    limit = 1 << (8 * width - 1)
    low, high = channel.digital_min, channel.digital_max
    if not -limit <= low < high < limit:
        problem, requirement = (
            f"digital minimum {low} and maximum {high} {of}",
            f"expected minimum < maximum within -{limit} and {limit - 1}",
        )
        raise input_error(
            Reason.DIGITAL_RANGE, problem, requirement, field="digital_min", found=str(low)
        )
    usable = channel.scale != 0 and math.isfinite(channel.scale) and math.isfinite(channel.offset)
    fault = find_range_fault(
        channel.physical_min, channel.physical_max, channel.scale, channel.unit
    )
    if fault or not usable:
        low_text = f"{channel.physical_min:g}"
        problem = f"physical minimum {low_text} and maximum {channel.physical_max:g} {of}"
        requirement = fault if usable else "expected two different numbers"
        raise input_error(
            Reason.PHYSICAL_RANGE, problem, requirement, field="physical_min", found=low_text
        )
    return channel


def _parse_start(
    raw_day: bytes, raw_clock: bytes, findings: list[Finding]
) -> tuple[date | None, time | None]:
    """Start date and time as far as they are valid. Years 85 to 99 are 1985 to 1999. The values are
    not shown: dates identify.
    """
    day, clock = None, None
    with suppress(ValueError):
        if found := DAY.fullmatch(decode_text(raw_day)):
            dd, mm, yy = (int(part) for part in found.groups())
            day = date(1900 + yy if yy >= 85 else 2000 + yy, mm, dd)
    with suppress(ValueError):
        if found := CLOCK.fullmatch(decode_text(raw_clock)):
            clock = time(int(found[1]), int(found[2]), int(found[3]))
    if day is None:
        findings.append(
            input_warning(
                Reason.START_DATE,
                "is no valid date (dd.mm.yy)",
                "the date is unknown",
                field="start_date",
            )
        )
    if clock is None:
        findings.append(
            input_warning(
                Reason.START_DATE,
                "is no valid time (hh.mm.ss)",
                "the time is unknown",
                field="start_time",
            )
        )
    return day, clock


def _find_phi(raw: dict[str, bytes], findings: list[Finding], *, keep: bool) -> dict[str, str]:
    """Header fields that hold more than the blanks of EDF+ ('X'), sex and start date, with a note
    on each; {} unless they are kept.
    """
    words = {name: decode_text(raw[name]).split() for name in ("patient", "recording")}
    if words["recording"][:1] == ["Startdate"]:
        del words["recording"][:2]
    identifying = [name for name in words if set(words[name]) - {"X", "F", "M"}]
    status = "kept because of --keep-phi" if keep else "not stored"
    findings += [
        Finding(Reason.PHI, "may identify a person", status, level="info", field=name)
        for name in identifying
    ]
    return {name: clean(decode_text(raw[name])) for name in identifying} if keep else {}


def _report_non_ascii(raw: dict[str, bytes], table: dict[str, list[bytes]]) -> list[Finding]:
    """One warning for all bytes of the header's texts that are not ASCII."""
    places = [name for name in ("patient", "recording") if not raw[name].isascii()]
    for name in ("label", "transducer", "unit", "prefilter"):
        places += [
            f"{name} of signal {i + 1}" for i, text in enumerate(table[name]) if not text.isascii()
        ]
    if not places:
        return []
    problem = f"bytes that are not ASCII: {', '.join(places[:5])}" + (
        f" and {len(places) - 5} more" if len(places) > 5 else ""
    )
    return [
        input_warning(
            Reason.NON_ASCII,
            problem,
            "read as UTF-8, else as Latin-1",
            field=places[0].split()[0],
            count=len(places),
        )
    ]


# --- annotations
