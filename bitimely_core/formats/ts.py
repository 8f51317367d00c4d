"""The .ts files of the UEA, UCR and Monash archives: classification and regression, channels of
unequal length, timestamps, missing values.

One line a case: channels separated by ':', values by ',', the label last. Files are read line by
line, twice: the first pass counts the cases and their shapes, the second parses them. So memory
does not grow with the file, and a damaged case is found even where the header states no shape. A
faulty case is a finding with its line number; values, labels and dates are never shown.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import decode_text, escape_controls
from bitimely_core.formats.units import LARGEST
from bitimely_core.system_errors import raise_system_error

MAX_LINE = 1 << 27  # bytes; the longest case of the archives has a few millions
MAX_SHAPES = 10_000  # different shapes that the first pass keeps count of

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


class TsCase(NamedTuple):
    """One line of data."""

    row: int  # 1-based line of the file
    # float32 [n], NaN where a value is missing; n may differ between channels
    channels: tuple[np.ndarray, ...]
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
    with locate_errors(path, replace=False):
        return _read_header(path)


def _read_header(path: Path) -> TsHeader:
    rest = read_lines(path)
    findings: list[Finding] = []
    keys, data = parse_keys(rest, findings)
    flags = {
        key: _parse_flag(keys, key)
        for key in ("timestamps", "missing", "univariate", "equal", "classes", "target")
    }
    if flags["classes"] and flags["target"]:
        raise input_error(
            Reason.HEADER_SYNTAX,
            "@classLabel and @targetLabel are both true",
            "a case has one label",
            field="classLabel",
        )
    if flags["classes"] is None and flags["target"] is None:
        raise input_error(
            Reason.HEADER_SYNTAX,
            "neither @classLabel nor @targetLabel is given",
            "the last field may be a channel",
            field="classLabel",
        )
    task: TsTask = (
        "classification" if flags["classes"] else "regression" if flags["target"] else "none"
    )
    classes = tuple(keys["classes"][1:]) if flags["classes"] else ()
    if any(name != escape_controls(name) for name in classes):
        raise input_error(
            Reason.LABEL_CHARS,
            "the classes hold control characters",
            "expected plain text",
            field="classLabel",
        )
    dimensions = _parse_count(keys, "dimensions") or (1 if flags["univariate"] else None)
    length = _parse_count(keys, "length")
    equal = bool(flags["equal"]) or (length is not None and flags["equal"] is None)
    shapes: Counter[tuple[int, ...]] = Counter()
    cases, ended, others = 0, True, False
    for _, line, ended in rest:  # noqa: B007 (the last one's is wanted)
        cases += 1
        if line.startswith(b"@"):  # a faulty case, of no shape
            continue
        found = count_values(line, timestamps=bool(flags["timestamps"]), labelled=task != "none")
        if found in shapes or len(shapes) < MAX_SHAPES:
            shapes[found] += 1
        else:
            others = True
    if not cases:
        raise input_error(
            Reason.TRUNCATED, "ends after @data", "expected at least one case", field="data"
        )
    widths = Counter(
        {
            n: sum(k for shape, k in shapes.items() if len(shape) == n)
            for n in {len(shape) for shape in shapes}
        }
    )
    usual = _find_commonest(widths, dimensions)
    if dimensions is not None and dimensions not in widths:
        problem = f"the header states {dimensions} channel{'s' * (dimensions > 1)}, the cases have {usual}"
        raise input_error(Reason.DIMENSIONS, problem, "one of them is wrong", field="dimensions")
    dimensions = dimensions or usual
    if flags["univariate"] is not None and flags["univariate"] != (dimensions == 1):
        problem = f"@univariate is {str(flags['univariate']).lower()}, the cases have {dimensions} channels"
        findings.append(
            input_warning(Reason.DIMENSIONS, problem, "the cases decide", field="univariate")
        )
    same = Counter({shape: k for shape, k in shapes.items() if len(shape) == dimensions})
    lengths: tuple[int, ...] | None = None
    if equal:
        lengths = _find_commonest(same, None if length is None else (length,) * dimensions)
        if length is not None and set(lengths) != {length}:
            problem = f"the header states {length} values, the channels have {', '.join(map(str, lengths[:8]))}"
            findings.append(
                input_warning(Reason.LENGTH, problem, "the cases decide", field="seriesLength")
            )
    elif len(same) == 1 and not others:
        lengths = next(iter(same))
    if flags["timestamps"]:
        problem = "the cases have timestamps"
        findings.append(
            input_warning(
                Reason.TIMESTAMPS,
                problem,
                "kept as times from the beginning of each case, without dates",
                field="timeStamps",
            )
        )
    if not ended:
        findings.append(
            input_warning(
                Reason.TRUNCATED,
                "the last line has no end",
                "the file may be truncated",
                field="data",
            )
        )
    return TsHeader(
        task=task,
        classes=classes,
        timestamps=bool(flags["timestamps"]),
        dimensions=dimensions,
        lengths=lengths,
        equal=equal,
        cases=cases,
        data=data,
        findings=tuple(findings),
    )


def parse_keys(
    lines: Iterator[tuple[int, bytes, bool]], findings: list[Finding]
) -> tuple[dict[str, list[str]], int]:
    """Values of the header's keys, and the line of @data, at which reading stops."""
    keys: dict[str, list[str]] = {}
    unknown, first = 0, ""
    for row, line, _ in lines:
        if not line.startswith(b"@"):
            raise input_error(
                Reason.HEADER_SYNTAX,
                f"line {row} is no key before @data",
                "is @data absent?",
                field="data",
            )
        key, *values = decode_text(line[1:]).split() or [""]
        if key.lower() == "data":
            if unknown:
                findings.append(
                    input_warning(
                        Reason.HEADER_SYNTAX, f"unknown key {first}", "not read", count=unknown
                    )
                )
            return keys, row
        name = KEYS.get(key.lower())
        if name is None:
            unknown, first = unknown + 1, first or f"{safe_text('@' + key)} in line {row}"
        elif keys.setdefault(name, values) != values:
            raise input_error(
                Reason.HEADER_SYNTAX,
                f"{safe_text('@' + key)} is set twice, line {row} differs",
                "expected once",
                field=key,
            )
    raise input_error(
        Reason.HEADER_SYNTAX, "has no @data", "expected before the cases", field="data"
    )


def _parse_flag(keys: dict[str, list[str]], key: str) -> bool | None:
    """True, false, or None for an absent key."""
    if key not in keys:
        return None
    value = keys[key][0].lower() if keys[key] else ""
    if value not in {"true", "false"}:
        raise input_error(
            Reason.HEADER_SYNTAX, f"found {safe_text(value)}", "expected true or false", field=key
        )
    return value == "true"


def _parse_count(keys: dict[str, list[str]], key: str) -> int | None:
    """A positive integer, or None for an absent key."""
    if key not in keys:
        return None
    value = keys[key][0] if keys[key] else ""
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) == 0:
        raise input_error(
            Reason.HEADER_SYNTAX,
            f"found {safe_text(value)}",
            "expected a whole number above 0",
            field=key,
        )
    return int(value)


def _find_commonest(counts: Counter[Key], stated: Key | None) -> Key:
    """The commonest key; of several equally common ones that of the header."""
    best = max(counts.values())
    return (
        stated
        if stated is not None and counts[stated] == best
        else next(key for key, k in counts.items() if k == best)
    )


def count_values(line: bytes, *, timestamps: bool, labelled: bool) -> tuple[int, ...]:
    """Values a channel, by the separators alone."""
    fields = BETWEEN.split(line) if timestamps else line.split(b":")
    mark = b"(" if timestamps else b","
    return tuple(
        field.count(mark) + (not timestamps) for field in (fields[:-1] if labelled else fields)
    )


def read_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(1-based number, text without blanks at both ends, whether it has an end) of the lines that
    are neither blank nor a comment.

    Raises UserError: empty_file, resource_limit, io_error.
    """
    row = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE):
                row += 1
                if len(line) == MAX_LINE:
                    raise input_error(
                        Reason.RESOURCE_LIMIT,
                        f"line {row} has more than {MAX_LINE} bytes",
                        "no case is that long",
                    )
                text = line.removeprefix(b"\xef\xbb\xbf").strip() if row == 1 else line.strip()
                if text and text[:1] not in b"#%":
                    yield row, text, line.endswith(b"\n")
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
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
    with locate_errors(path, replace=False):
        for row, line, ended in read_lines(path):
            if row <= header.data:
                continue
            try:
                case = _parse_case(row, line, header, classes)
            except UserError as error:
                code, text, wanted = (
                    (error.code, error.problem, error.requirement)
                    if ended
                    else (Reason.TRUNCATED, "the file ends inside of it", error.problem)
                )
                yield Finding(code, text, wanted, row=row)
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


def _parse_case(row: int, line: bytes, header: TsHeader, known: frozenset[str]) -> TsCase:
    """One line of data.

    Raises UserError: dimensions, label, length, not_numeric, non_finite, timestamps; the text holds
    neither values nor labels.
    """
    if line.startswith(b"@"):
        problem = "is a key of the header below @data"
        raise input_error(
            Reason.HEADER_SYNTAX,
            problem,
            "expected a case",
            "Are two files joined, or is @data there twice?",
        )
    fields = BETWEEN.split(line) if header.timestamps else line.split(b":")
    label: str | float | None = None
    if header.task != "none":
        last = fields.pop().strip()
        if len(fields) < header.dimensions and (
            last.startswith(b"(") if header.timestamps else b"," in last
        ):
            raise input_error(Reason.LABEL, "ends with a channel", "expected the label")
        label = _parse_label(last, header, known)
    if len(fields) != header.dimensions:
        raise input_error(
            Reason.DIMENSIONS,
            f"has {len(fields)} channel{'s' * (len(fields) != 1)}",
            f"expected {header.dimensions}",
        )
    stamps: list[list[bytes]] = []
    channels = []
    for number, field in enumerate(fields, 1):
        tokens = field.split(b",")
        if header.timestamps:
            clock, tokens = _split_pairs(field.strip(), f"channel {number}")
            stamps.append(clock)
        channels.append(_parse_values(tokens, f"channel {number}"))
    lengths = tuple(map(len, channels))
    if header.equal and header.lengths is not None and lengths != header.lengths:
        wrong = next(
            i for i, (a, b) in enumerate(zip(lengths, header.lengths, strict=True)) if a != b
        )
        raise input_error(
            Reason.LENGTH,
            f"channel {wrong + 1} has {lengths[wrong]} values",
            f"the others have {header.lengths[wrong]}",
        )
    return TsCase(row, tuple(channels), _parse_times(stamps) if header.timestamps else None, label)


def _parse_label(raw: bytes, header: TsHeader, known: frozenset[str]) -> str | float:
    if header.task == "regression":
        value = float(raw) if NUMBER.fullmatch(raw) else math.nan
        if not abs(value) <= LARGEST:
            raise input_error(
                Reason.LABEL,
                "the label is not a finite number",
                f"expected a regression target up to {LARGEST:g}",
            )
        return value
    text = decode_text(raw)
    if text != escape_controls(text):
        raise input_error(
            Reason.LABEL_CHARS, "the label holds control characters", "expected plain text"
        )
    if not text or text == "?" or (known and text not in known):
        wanted = (
            f"expected one of the {len(header.classes)} classes of the header"
            if header.classes
            else "expected a class"
        )
        raise input_error(Reason.LABEL, "the label is not a class", wanted)
    return text


def _parse_values(tokens: list[bytes], where: str) -> np.ndarray:
    """float32 [n], NaN where a value is missing."""
    try:
        if b"".join(tokens).translate(None, PLAIN):
            tokens = [
                b"nan" if token.strip() in MISSING else _check_number(token.strip(), where)
                for token in tokens
            ]
        with np.errstate(over="ignore"):
            values = np.array(list(map(float, tokens)), np.float64).astype(np.float32)
    except ValueError:
        raise input_error(
            Reason.NOT_NUMERIC,
            f"{where} holds a text that is not a number",
            "expected numbers, or ? where one is missing",
        ) from None
    if np.isinf(values).any():
        raise input_error(
            Reason.NON_FINITE, f"{where} holds a number beyond 10^38", "expected finite numbers"
        )
    if np.fmax.reduce(np.abs(values), initial=0.0) > LARGEST:
        raise input_error(
            Reason.PHYSICAL_RANGE,
            f"{where} holds a number beyond {LARGEST:g}",
            "expected values whose squares float32 holds",
        )
    return values


def _check_number(token: bytes, where: str) -> bytes:
    """The token, if it is a number: float() alone would take 'inf', '1_0' and digits of other
    scripts.
    """
    if INFINITE.fullmatch(token):
        raise input_error(
            Reason.NON_FINITE, f"{where} holds an infinite value", "expected finite numbers"
        )
    if not NUMBER.fullmatch(token):
        raise ValueError
    return token


def _split_pairs(field: bytes, where: str) -> tuple[list[bytes], list[bytes]]:
    """Timestamps and values of one channel '(time,value),(time,value)', as text."""
    if not SERIES.fullmatch(field):
        raise input_error(
            Reason.TIMESTAMPS, f"{where} is not a list of (time,value)", "as @timeStamps requires"
        )
    stamps, tokens = zip(*TUPLES.findall(field), strict=True)
    return [stamp.strip() for stamp in stamps], list(tokens)


def _parse_times(stamps: list[list[bytes]]) -> tuple[np.ndarray, ...]:
    """Times of each channel, from the earliest of the case: seconds for dates, else the numbers'
    own unit.
    """
    flat = [stamp for channel in stamps for stamp in channel]
    try:
        if all(NUMBER.fullmatch(stamp) for stamp in flat):
            clock = np.array([float(stamp) for stamp in flat])
            clock = clock - clock.min() if np.isfinite(clock).all() else clock
        else:
            dates = [_parse_date(stamp) for stamp in flat]
            first = min(dates)
            clock = np.array([(moment - first).total_seconds() for moment in dates])
    except ValueError:
        raise input_error(
            Reason.TIMESTAMPS, "a timestamp is neither date nor number", "as @timeStamps requires"
        ) from None
    times = tuple(np.split(clock, np.cumsum([len(channel) for channel in stamps])[:-1]))
    if not np.isfinite(clock).all() or any((np.diff(channel) <= 0).any() for channel in times):
        raise input_error(
            Reason.TIMESTAMPS, "the timestamps do not increase", "two values cannot have one time"
        )
    return times


def _parse_date(stamp: bytes) -> datetime:
    text = stamp.decode("ascii", "replace")
    if not DATE.fullmatch(text):
        raise ValueError
    return datetime.fromisoformat(text)


# --- two files of one problem


def check_compatible(train: TsHeader, test: TsHeader, file: str | None = None) -> None:
    """Refuse a test file (`file`) that does not fit the training file. Raises UserError:
    schema_mismatch, with what differs.
    """
    pairs: dict[str, tuple[object, object]] = {
        "dimensions": (train.dimensions, test.dimensions),
        "timeStamps": (train.timestamps, test.timestamps),
        "label": (train.task, test.task),
        "classLabel": (sorted(train.classes), sorted(test.classes)),
        "seriesLength": (train.lengths, test.lengths)
        if train.equal and test.equal
        else (None, None),
    }
    for field, (one, other) in pairs.items():
        if one != other:
            raise input_error(
                Reason.SCHEMA_MISMATCH,
                f"TEST has {safe_text(str(other))}",
                f"TRAIN has {safe_text(str(one))}",
                "Check that both files are of the same problem",
                file=file,
                field=field,
            )


def find_duplicates(train: Path, test: Path) -> Finding | None:
    """A warning about cases of `test` whose series are, to the byte, those of a case of `train`,
    whatever their labels.
    """
    heads = (read_header(train), read_header(test))
    known = {digest for _, digest in _hash_cases(train, heads[0])}
    rows = [row for row, digest in _hash_cases(test, heads[1]) if digest in known]
    if not rows:
        return None
    return input_warning(
        Reason.DUPLICATE_ACROSS_SPLITS,
        f"{len(rows)} case{'s' * (len(rows) > 1)} of the test file {'are' if len(rows) > 1 else 'is'} in the training file too",
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
