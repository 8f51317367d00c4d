"""Reads the .ts files of the UEA, UCR and Monash archives: cases of time series with their labels.

Tasks are classification and regression; there may be channels of unequal length, timestamps and
missing values.

One line a case: channels separated by ':', values by ',', the label last. Files are read line by
line, twice: the first pass counts the cases and their shapes, the second parses them. So memory
does not grow with the file, and a damaged case is found even where the header states no shape. A
faulty case is a finding with its line number; values, labels and dates are never shown.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.formats.text import decode_text, escape_controls
from bitimely_core.formats.units import LARGEST
from bitimely_core.types import count_nouns, find_only

MAX_LINE = 1 << 27  # bytes; the longest case of the archives has a few millions

KEYS = {
    "problemname": "problem",
    "timestamps": "timestamps",
    "missing": "missing",
    "univariate": "univariate",
    "dimension": "dimensions",
    "dimensions": "dimensions",
    "equallength": "equal",
    "serieslength": "length",
    "classlabel": "classes",
    "targetlabel": "target",
}
FLAGS = ("timestamps", "missing", "univariate", "equal", "classes", "target")
PLAIN = b"0123456789+-.eE, \t"
NUMBER = re.compile(rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?")
INFINITE = re.compile(rb"[+-]?inf(?:inity)?", re.IGNORECASE)
TUPLE = rb"\(([^(),]*),([^(),]*)\)"
TUPLES = re.compile(TUPLE)
SERIES = re.compile(rb"\([^(),]*,[^(),]*\)(?:\s*,\s*\([^(),]*,[^(),]*\))*")
BETWEEN = re.compile(rb"(?<=\))\s*:\s*")
MISSING = {b"?", b"nan", b"NaN", b"NAN"}
DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?", re.ASCII)

TsTask = Literal["classification", "regression", "none"]
Key = TypeVar("Key")


Line = tuple[int, bytes, bool]
"""1-based number, text without line end, whether it has one."""

Shape = tuple[int, ...]
"""Values of each channel of a case."""


class TsCase(NamedTuple):
    """One line of data."""

    row: int  # 1-based line of the file
    channels: tuple[np.ndarray, ...]  # float32 [n], NaN where missing; n may differ
    # float64 [n], from the earliest of the case: seconds, or the unit of a numeric clock
    times: tuple[np.ndarray, ...] | None
    label: str | float | None


@dataclass(frozen=True, kw_only=True)
class TsHeader:
    """Contents of the header, and the shape that the cases share."""

    task: TsTask
    classes: tuple[str, ...]  # in the header's order; empty where it lists none
    timestamps: bool
    dimensions: int  # channels a case
    # values of each channel, where they are the same in all cases, or promised to be
    lengths: tuple[int, ...] | None
    equal: bool  # the header promises equal lengths, hence enforced
    cases: int  # lines of data, counted without parsing them
    data: int  # 1-based line of @data
    findings: tuple[Finding, ...] = ()


# --- header


def read_header(path: Path) -> TsHeader:
    """Header of the file at `path`, and the number and shape of its cases: one pass over the file.

    Raises UserError: empty_file, header_syntax, dimensions, truncated (no case), resource_limit,
    io_error.
    """
    findings: list[Finding] = []
    with translate_read_errors(path):
        lines = read_lines(path)
        keys, data = parse_keys(lines, findings)
        flags = {key: _parse_flag(keys, key) for key in FLAGS}
        task, classes = _find_task(keys, flags)
        stated, length = _parse_count(keys, "dimensions"), _parse_count(keys, "length")
        timestamps, equal = bool(flags["timestamps"]), flags["equal"]
        is_equal = length is not None if equal is None else equal
        shapes, ended = _count_shapes(lines, timestamps=timestamps, labelled=task != "none")
        dimensions = _find_dimensions(stated, flags["univariate"], shapes, findings)
        same = Counter({shape: k for shape, k in shapes.items() if len(shape) == dimensions})
        lengths = find_only(same, None)
        if is_equal:
            lengths = _find_lengths(same, length, findings)
    if timestamps:
        problem = "the cases have timestamps"
        action = "kept as times from the beginning of each case, without dates"
        findings.append(input_warning(Reason.TIMESTAMPS, problem, action, field="timeStamps"))
    if not ended:
        problem = "the last line has no end"
        findings.append(
            input_warning(Reason.TRUNCATED, problem, "the file may be truncated", field="data")
        )
    return TsHeader(
        task=task,
        classes=classes,
        timestamps=timestamps,
        dimensions=dimensions,
        lengths=lengths,
        equal=is_equal,
        cases=shapes.total(),
        data=data,
        findings=tuple(findings),
    )


def _find_task(
    keys: dict[str, list[str]], flags: dict[str, bool | None]
) -> tuple[TsTask, tuple[str, ...]]:
    """The task and its classes. Raises UserError: header_syntax, label_chars."""
    is_class, is_number = flags["classes"], flags["target"]
    classes = tuple(keys["classes"][1:]) if is_class else ()
    refuse = partial(input_error, field="classLabel")
    if is_class and is_number:
        problem = "@classLabel and @targetLabel are both true"
        raise refuse(Reason.HEADER_SYNTAX, problem, "a case has one label")
    if is_class is None and is_number is None:
        problem = "neither @classLabel nor @targetLabel is given"
        raise refuse(Reason.HEADER_SYNTAX, problem, "the last field may be a channel")
    if any(name != escape_controls(name) for name in classes):
        problem = "the classes hold control characters"
        raise refuse(Reason.LABEL_CHARS, problem, "expected plain text")
    if is_class:
        return "classification", classes
    return "regression" if is_number else "none", ()


def _count_shapes(
    lines: Iterable[Line], *, timestamps: bool, labelled: bool
) -> tuple[Counter[Shape], bool]:
    """Cases by shape, and whether the last line has an end. Raises UserError: truncated."""
    shapes: Counter[Shape] = Counter()
    ended = True
    for _, line, ended in lines:  # noqa: B007 (the last one's is wanted)
        is_key = line.startswith(b"@")  # a faulty case, of no channels
        shapes[() if is_key else count_values(line, timestamps=timestamps, labelled=labelled)] += 1
    if not any(shapes):
        problem = "ends after @data"
        raise input_error(Reason.TRUNCATED, problem, "expected at least one case", field="data")
    return shapes, ended


def _find_dimensions(
    stated: int | None, univariate: bool | None, shapes: Counter[Shape], findings: list[Finding]
) -> int:
    """Channels a case: those of the header, else of most cases. Raises UserError: dimensions."""
    stated = stated or (1 if univariate else None)
    widths: Counter[int] = Counter()
    for shape in sorted(filter(None, shapes), key=len):
        widths[len(shape)] += shapes[shape]
    usual = _find_commonest(widths, stated)
    if stated is not None and stated not in widths:
        channels = count_nouns(stated, "channel")
        problem = f"the header states {channels}, the cases have {usual}"
        raise input_error(Reason.DIMENSIONS, problem, "one of them is wrong", field="dimensions")
    dimensions = stated or usual
    if univariate is not None and univariate != (dimensions == 1):
        flag = str(univariate).lower()
        problem = f"@univariate is {flag}, the cases have {dimensions} channels"
        findings.append(
            input_warning(Reason.DIMENSIONS, problem, "the cases decide", field="univariate")
        )
    return dimensions


def _find_lengths(shapes: Counter[Shape], length: int | None, findings: list[Finding]) -> Shape:
    """The shape of most cases, where the header promises that all have the same."""
    stated = None if length is None else (length,) * len(next(iter(shapes)))
    lengths = _find_commonest(shapes, stated)
    if stated not in {None, lengths}:
        channels = ", ".join(map(str, lengths[:8]))
        problem = f"the header states {length} values, the channels have {channels}"
        findings.append(
            input_warning(Reason.LENGTH, problem, "the cases decide", field="seriesLength")
        )
    return lengths


def parse_keys(lines: Iterator[Line], findings: list[Finding]) -> tuple[dict[str, list[str]], int]:
    """Values of the header's keys, and the line of @data, at which reading stops."""
    keys: dict[str, list[str]] = {}
    unknown: list[str] = []
    for row, line, _ in lines:
        if not line.startswith(b"@"):
            problem = f"line {row} is no key before @data"
            raise input_error(Reason.HEADER_SYNTAX, problem, "is @data absent?", field="data")
        key, *values = decode_text(line[1:]).split() or [""]
        if key.lower() == "data":
            if unknown:
                problem = f"unknown key {unknown[0]}"
                findings.append(
                    input_warning(Reason.HEADER_SYNTAX, problem, "not read", count=len(unknown))
                )
            return keys, row
        name, text = KEYS.get(key.lower()), safe_text("@" + key)
        if name is None:
            unknown.append(f"{text} in line {row}")
        elif keys.setdefault(name, values) != values:
            problem = f"{text} is set twice, line {row} differs"
            raise input_error(Reason.HEADER_SYNTAX, problem, "expected once", field=key)
    raise input_error(
        Reason.HEADER_SYNTAX, "has no @data", "expected before the cases", field="data"
    )


def _parse_flag(keys: dict[str, list[str]], key: str) -> bool | None:
    """True, false, or None for an absent key."""
    if key not in keys:
        return None
    value = "".join(keys[key][:1]).lower()
    if value not in {"true", "false"}:
        text = f"found {safe_text(value)}"
        raise input_error(Reason.HEADER_SYNTAX, text, "expected true or false", field=key)
    return value == "true"


def _parse_count(keys: dict[str, list[str]], key: str) -> int | None:
    """A positive integer, or None for an absent key."""
    if key not in keys:
        return None
    value = "".join(keys[key][:1])
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) == 0:
        text, wanted = f"found {safe_text(value)}", "expected a whole number above 0"
        raise input_error(Reason.HEADER_SYNTAX, text, wanted, field=key)
    return int(value)


def _find_commonest(counts: Counter[Key], stated: Key | None) -> Key:
    """The commonest key; of several equally common ones that of the header."""
    return max(counts, key=lambda key: (counts[key], key == stated))


def count_values(line: bytes, *, timestamps: bool, labelled: bool) -> tuple[int, ...]:
    """Values a channel, by the separators alone."""
    fields = BETWEEN.split(line) if timestamps else line.split(b":")
    mark = b"(" if timestamps else b","
    return tuple(
        field.count(mark) + (not timestamps) for field in (fields[:-1] if labelled else fields)
    )


def read_lines(path: Path) -> Iterator[Line]:
    """The lines that are neither blank nor a comment.

    Raises UserError: empty_file, resource_limit, io_error.
    """
    row = 0
    with translate_read_errors(path), path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            row += 1
            if len(line) == MAX_LINE:
                problem = f"line {row} has more than {MAX_LINE} bytes"
                raise input_error(Reason.RESOURCE_LIMIT, problem, "no case is that long")
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if row == 1 else line.strip()
            if text and text[:1] not in b"#%":
                yield row, text, line.endswith(b"\n")
    if row == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")


# --- cases


def read_cases(path: Path, header: TsHeader | None = None) -> Iterator[TsCase | Finding]:
    """All cases of a file, one at a time.

    Args:
        path: the file.
        header: its header; read here when absent.

    Yields: One item a line of data, in the order of the file: the case, or a finding of level error
        with its `row` when it must be dropped. Last, without a row, warnings about the file
        (missing_values, with their number).

    Raises:
        UserError: as `read_header`.
    """
    header = header or read_header(path)
    classes = frozenset(header.classes)
    missing = n_incomplete = 0
    with translate_read_errors(path):
        for row, line, ended in read_lines(path):
            if row <= header.data:
                continue
            try:
                case = _parse_case(row, line, header, classes)
            except UserError as error:
                if ended:
                    yield Finding(error.code, error.problem, error.requirement, row=row)
                else:
                    problem = "the file ends inside of it"
                    yield Finding(Reason.TRUNCATED, problem, error.problem, row=row)
                continue
            lost = sum(int(np.count_nonzero(np.isnan(values))) for values in case.channels)
            missing += lost
            n_incomplete += lost > 0
            yield case
    if missing:
        yield input_warning(
            Reason.MISSING_VALUES,
            f"{missing} missing values in {n_incomplete} cases",
            "kept as missing (NaN)",
            count=missing,
        )


def _parse_case(row: int, line: bytes, header: TsHeader, classes: frozenset[str]) -> TsCase:
    """One line of data.

    Raises UserError: dimensions, label, length, not_numeric, non_finite, timestamps; the text holds
    neither values nor labels.
    """
    if line.startswith(b"@"):
        problem = "is a key of the header below @data"
        hint = "Are two files joined, or is @data there twice?"
        raise input_error(Reason.HEADER_SYNTAX, problem, "expected a case", hint)
    fields = BETWEEN.split(line) if header.timestamps else line.split(b":")
    label = None if header.task == "none" else _take_label(fields, header, classes)
    if len(fields) != header.dimensions:
        problem = f"has {count_nouns(len(fields), 'channel')}"
        raise input_error(Reason.DIMENSIONS, problem, f"expected {header.dimensions}")
    stamps: list[list[bytes]] = []
    series: list[np.ndarray] = []
    for number, field in enumerate(fields, 1):
        place = f"channel {number}"
        if header.timestamps:
            clock, tokens = _split_pairs(field.strip(), place)
            stamps.append(clock)
        else:
            tokens = field.split(b",")
        series.append(_parse_values(tokens, place))
    if header.equal and header.lengths is not None:
        _check_lengths(series, header.lengths)
    return TsCase(row, tuple(series), _parse_times(stamps) if header.timestamps else None, label)


def _check_lengths(series: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Raises UserError (length) for a channel of another length than promised."""
    for number, (values, length) in enumerate(zip(series, lengths, strict=True), 1):
        if len(values) != length:
            problem = f"channel {number} has {len(values)} values"
            raise input_error(Reason.LENGTH, problem, f"the others have {length}")


def _take_label(fields: list[bytes], header: TsHeader, classes: frozenset[str]) -> str | float:
    """The label of a case, which is taken off its fields. Raises UserError: label, label_chars."""
    last = fields.pop().strip()
    is_series = last.startswith(b"(") if header.timestamps else b"," in last
    if len(fields) < header.dimensions and is_series:
        raise input_error(Reason.LABEL, "ends with a channel", "expected the label")
    if header.task == "regression":
        return _parse_target(last)
    text = decode_text(last)
    if text != escape_controls(text):
        problem = "the label holds control characters"
        raise input_error(Reason.LABEL_CHARS, problem, "expected plain text")
    if text in {"", "?"} or (classes and text not in classes):
        wanted = f"one of the {len(classes)} classes of the header" if header.classes else "a class"
        raise input_error(Reason.LABEL, "the label is not a class", f"expected {wanted}")
    return text


def _parse_target(raw: bytes) -> float:
    value = float(raw) if NUMBER.fullmatch(raw) else math.nan
    if not abs(value) <= LARGEST:
        wanted = f"expected a regression target up to {LARGEST:g}"
        raise input_error(Reason.LABEL, "the label is not a finite number", wanted)
    return value


def _parse_values(tokens: list[bytes], place: str) -> np.ndarray:
    """float32 [n], NaN where a value is missing; `place` is for messages."""
    try:
        if b"".join(tokens).translate(None, PLAIN):
            tokens = [_check_token(token.strip(), place) for token in tokens]
        with np.errstate(over="ignore"):
            values = np.array(list(map(float, tokens)), np.float64).astype(np.float32)
    except ValueError:
        problem = f"{place} holds a text that is not a number"
        wanted = "expected numbers, or ? where one is missing"
        raise input_error(Reason.NOT_NUMERIC, problem, wanted) from None
    if np.isinf(values).any():
        problem = f"{place} holds a number beyond 10^38"
        raise input_error(Reason.NON_FINITE, problem, "expected finite numbers")
    if np.fmax.reduce(np.abs(values), initial=0.0) > LARGEST:
        problem = f"{place} holds a number beyond {LARGEST:g}"
        wanted = "expected values whose squares float32 holds"
        raise input_error(Reason.PHYSICAL_RANGE, problem, wanted)
    return values


def _check_token(token: bytes, place: str) -> bytes:
    """A token that float() may read: alone it would take 'inf', '1_0' and digits of other scripts.

    Raises ValueError for another text, UserError: non_finite.
    """
    if token in MISSING:
        return b"nan"
    if INFINITE.fullmatch(token):
        problem = f"{place} holds an infinite value"
        raise input_error(Reason.NON_FINITE, problem, "expected finite numbers")
    if not NUMBER.fullmatch(token):
        raise ValueError
    return token


def _split_pairs(field: bytes, place: str) -> tuple[list[bytes], list[bytes]]:
    """Timestamps and values of one channel '(time,value),(time,value)', as text."""
    if not SERIES.fullmatch(field):
        problem = f"{place} is not a list of (time,value)"
        raise input_error(Reason.TIMESTAMPS, problem, "as @timeStamps requires")
    stamps, tokens = zip(*TUPLES.findall(field), strict=True)
    return [stamp.strip() for stamp in stamps], list(tokens)


def _parse_times(stamps: list[list[bytes]]) -> tuple[np.ndarray, ...]:
    """Times of each channel, from the earliest of the case.

    They are in seconds for dates, else in the numbers' own unit.
    """
    try:
        clock = _parse_clock(list(chain.from_iterable(stamps)))
    except ValueError:
        problem = "a timestamp is neither date nor number"
        raise input_error(Reason.TIMESTAMPS, problem, "as @timeStamps requires") from None
    times = tuple(np.split(clock, np.cumsum(list(map(len, stamps)))[:-1]))
    if not np.isfinite(clock).all() or any((np.diff(channel) <= 0).any() for channel in times):
        problem = "the timestamps do not increase"
        raise input_error(Reason.TIMESTAMPS, problem, "two values cannot have one time")
    return times


def _parse_clock(stamps: Sequence[bytes]) -> np.ndarray:
    """Raises ValueError for what is neither date nor number."""
    if all(map(NUMBER.fullmatch, stamps)):
        clock = np.array(list(map(float, stamps)))
        return clock - clock.min() if np.isfinite(clock).all() else clock
    dates = list(map(_parse_date, stamps))
    first = min(dates)
    return np.array([(date - first).total_seconds() for date in dates])


def _parse_date(stamp: bytes) -> datetime:
    text = stamp.decode("ascii", "replace")
    if not DATE.fullmatch(text):
        raise ValueError
    return datetime.fromisoformat(text)


# --- two files of one problem


def check_compatible(train: TsHeader, test: TsHeader, file: str | None = None) -> None:
    """Refuse a test file (`file`) that does not fit the training file.

    Raises UserError: schema_mismatch, with what differs.
    """
    are_equal = train.equal and test.equal
    pairs: dict[str, tuple[object, object]] = {
        "dimensions": (train.dimensions, test.dimensions),
        "timeStamps": (train.timestamps, test.timestamps),
        "label": (train.task, test.task),
        "classLabel": (sorted(train.classes), sorted(test.classes)),
        "seriesLength": (train.lengths, test.lengths) if are_equal else (None, None),
    }
    for field, (expected, stated) in pairs.items():
        if expected != stated:
            raise input_error(
                Reason.SCHEMA_MISMATCH,
                f"TEST has {safe_text(str(stated))}",
                f"TRAIN has {safe_text(str(expected))}",
                "Check that both files are of the same problem",
                file=file,
                field=field,
            )


def find_duplicates(train: Path, test: Path) -> Finding | None:
    """A warning about cases of `test` whose series are those of a case of `train`.

    They are compared to the byte, without labels.
    """
    hashes = {digest for _, digest in _hash_cases(train, read_header(train))}
    rows = [row for row, digest in _hash_cases(test, read_header(test)) if digest in hashes]
    if not rows:
        return None
    cases, verb = ("cases", "are") if rows[1:] else ("case", "is")
    return input_warning(
        Reason.DUPLICATE_ACROSS_SPLITS,
        f"{len(rows)} {cases} of the test file {verb} in the training file too",
        "a score on them measures memorisation",
        "Leave them out of the test or report it",
        row=rows[0],
        count=len(rows),
        examples=tuple(f"row {row}" for row in rows[:5]),
    )


def _hash_cases(path: Path, header: TsHeader) -> Iterator[tuple[int, bytes]]:
    """(line, 16-byte hash of the series' text without blanks and label)."""
    for row, line, _ in read_lines(path):
        if row > header.data:
            yield row, blake2b(strip_label(line, header), digest_size=16).digest()


def strip_label(line: bytes, header: TsHeader) -> bytes:
    """The series of a case as text, without label and blanks."""
    return (line.rpartition(b":")[0] if header.task != "none" else line).translate(None, b" \t")
