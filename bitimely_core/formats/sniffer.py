"""Finds how a table of samples is written: marks, preamble, header, columns, units and clock.

Only the first lines are looked at. What is found is a `TableFacts`, which `describe_facts` puts in
words; the values are read with it by `sample_values`.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats import clocks, vendors
from bitimely_core.formats.csv_text import open_text, split_cells
from bitimely_core.formats.parquet import is_parquet, read_column_types
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.tables import NUMBER
from bitimely_core.formats.text import UTF8, is_utf8, list_names

if TYPE_CHECKING:
    import polars as pl

HEAD = 1 << 18  # bytes that are looked at
LINES = 1200  # that are looked at
ROWS = 1000  # of a clock that are looked at
CELLS = 200  # of a column that are looked at
DELIMITERS = (",", ";", "\t", "|", " ")  # the last stands for any number of blanks
MARK_NAMES = {"\t": "tabs", " ": "blanks", ",": ",", ";": ";", "|": "|"}
COMMENT = ("%", "#", "//")
MISSING = {"", "n/a", "na", "nan", "null"}  # in lower case
CHANNEL_UNITS = {unit.lower() for unit in clocks.WORDS["units"]}
NO_UNITS = set(clocks.WORDS["no_units"])
UNIT_CELLS = CHANNEL_UNITS | NO_UNITS | clocks.UNIT_OF_WORD.keys()
SUFFIX_UNITS = clocks.WORDS["suffixes"]
LABEL_WORDS = set(clocks.WORDS["labels"])
BRACKETS = re.compile(r"(.+?)\s*(?:\[([^\]]{1,16})\]|\(([^)]{1,16})\))")
PREAMBLE_RATES = (  # pattern with the group of a number, and whether that is a step
    (
        r"(?i)(?:sampl\w*|abtast)[ _-]?(?:rate|freq\w*)[^0-9\n]{0,20}(\d+(?:[.,]\d+)?) *k?(?:hz|$)?",
        0,
    ),
    (r"(?i)^\W*(?:fs|sfreq|abtastrate)\W{1,4}(\d+(?:[.,]\d+)?)", 0),
    (r"(?i)interval\s*[=:]\s*(\d+(?:[.,]\d+)?) *s(?:ec)?\b", 1),
)
MOST_CODES = 8  # different values of a column of labels
LEAST_ROWS = 50  # of a table that is taken for samples without a map

ColumnKind = Literal["number", "time", "text", "empty", "index", "left out"]


class Column(NamedTuple):
    """A column of a table."""

    name: str  # without its unit; "": none
    header: str  # as in the file
    unit: str
    kind: ColumnKind


class TableShape(NamedTuple):
    """How the rows of a text are written."""

    encoding: str  # utf-8, utf-16-le, latin-1 ...
    delimiter: str  # of `DELIMITERS`
    decimal: str  # "." or ","
    quote: str  # '"' or "'"
    skip: int  # lines before the first row
    header: int  # number of the line with the names; 0: there is none
    width: int  # cells of a row


class Clock(NamedTuple):
    """The columns that hold the time of each row."""

    places: tuple[int, ...]  # one column, or a date and a time
    unit: str  # a key of `clocks.UNITS`, samples, datetime; "": not known
    form: str  # of times as text, by `clocks.find_text_form`; of stored time stamps "stored"
    evidence: str  # how the unit was found
    others: tuple[str, ...]  # units that are plausible, too
    step: float  # seconds, of the first rows; NaN: not known
    irregular: bool


class TableFacts(NamedTuple):
    """What a table of samples says of itself."""

    shape: TableShape | None  # None: Parquet
    columns: tuple[Column, ...]
    clock: Clock | None
    rate: float | None  # Hz, stated in its first lines
    vendor: str  # title of its form
    start: datetime | None  # of the first row, where the first lines say it
    rows: int  # that were looked at
    is_codes: bool = False  # the only channel has a few small whole numbers, as labels have
    missing: tuple[str, ...] = ()  # texts of cells without a value, beside the usual ones

    def list_channels(self) -> list[int]:
        """Places of the columns that are channels."""
        return [i for i, column in enumerate(self.columns) if column.kind == "number"]

    def list_left_out(self) -> list[str]:
        """Headers of the columns that are neither channels nor the clock."""
        timed = self.clock.places if self.clock else ()
        return [
            column.header or f"column {i + 1}"
            for i, column in enumerate(self.columns)
            if column.kind not in {"number", "empty"} and i not in timed
        ]

    @property
    def found_rate(self) -> float | None:
        """Hz by the first lines or the first times."""
        step = self.clock.step if self.clock and self.clock.unit else float("nan")
        return self.rate or (1 / step if step > 0 else None)


class ClockChoice(NamedTuple):
    """What a map says of the clock of a table."""

    column: str = ""  # header or name; "": it is found
    unit: str = ""  # a key of `clocks.STATED`


def sniff_table(path: Path, delimiter: str = "", choice: ClockChoice | None = None) -> TableFacts:
    """How a table is written and what its columns are.

    Args:
        path: a text, also packed with gzip, or Parquet.
        delimiter: as the map states; "": found.
        choice: what the map says of the clock.

    Raises:
        UserError: empty_file, encoding, corrupt, schema (a stated clock that is not there).
    """
    choice = choice or ClockChoice()
    with locate_errors(path.name):
        return (
            _sniff_parquet(path, choice)
            if is_parquet(path)
            else _sniff_text(path, delimiter, choice)
        )


def looks_like_samples(facts: TableFacts) -> bool:
    """Whether a table is one of samples, without a word of the user: many rows of numbers.

    Tables of labels have a column of texts, or few rows.
    """
    kinds = Counter(column.kind for column in facts.columns)
    if facts.vendor:
        return bool(kinds["number"])
    words = {word for column in facts.columns for word in clocks.split_words(column.header)}
    slow = facts.found_rate is None or facts.found_rate <= 1.0
    if kinds["text"] or not LABEL_WORDS.isdisjoint(words) or (facts.is_codes and slow):
        return False
    return bool(kinds["number"]) and facts.rows >= LEAST_ROWS


def describe_facts(facts: TableFacts) -> str:
    """One line: marks, header, clock, channels with units, and what is left out."""
    parts = [facts.vendor] if facts.vendor else []
    parts += _describe_shape(facts.shape) if facts.shape else []
    clock = facts.clock
    if facts.rate:
        parts.append(f"{facts.rate:.10g} Hz by the first lines")
    elif clock:
        parts.append(_describe_clock(facts, clock))
    names = [
        safe_text(facts.columns[i].name or f"channel {n}")
        + (f" in {facts.columns[i].unit}" if facts.columns[i].unit else "")
        for n, i in enumerate(facts.list_channels(), 1)
    ]
    more = f" and {len(names) - 12} more" if names[12:] else ""
    parts.append(f"channels {', '.join(names[:12])}{more}")
    if left_out := facts.list_left_out():
        parts.append(f"not channels: {list_names(left_out, 8)}")
    return "; ".join(parts)


def describe_doubt(facts: TableFacts) -> str:
    """What was assumed of a clock whose unit is not certain; "": nothing."""
    clock = facts.clock
    if clock is None or not clock.others or facts.rate:
        return ""
    name = safe_text(facts.columns[clock.places[0]].header or f"column {clock.places[0] + 1}")
    rates = [
        f"{clocks.UNITS[clock.unit] / clocks.UNITS[unit] / clock.step:.4g} Hz in {unit}"
        for unit in clock.others
    ]
    assumed = f"the times {name} are taken for {clock.unit}, {1 / clock.step:.4g} Hz"
    return f"{assumed} ({clock.evidence}); possible, too: {', '.join(rates)}"


def strip_values(facts: TableFacts) -> TableFacts:
    """The facts without what differs between files of one group: numbers of rows, first values."""
    clock = facts.clock
    if clock:
        step = 0.0 if clock.irregular else round_rate(clock.step)
        clock = clock._replace(evidence="", step=step)
    return facts._replace(clock=clock, start=None, rows=0, is_codes=False)


def round_rate(step: float) -> float:
    """A step by which files are grouped: those of one regular clock differ a little."""
    return float(f"{step:.1e}") if step > 0 else 0.0


def is_plain(facts: TableFacts) -> bool:
    """Whether a table is written as csv by the book, with a header in its first line."""
    shape = facts.shape
    return not facts.vendor and (shape is None or shape[:6] == (UTF8, ",", ".", '"', 1, 1))


def _describe_shape(shape: TableShape) -> list[str]:
    parts = [shape.encoding.upper()] if shape.encoding != UTF8 else []
    if shape.width > 1:
        parts.append(f"{MARK_NAMES[shape.delimiter]} between cells")
    if shape.decimal == ",":
        parts.append("decimal comma")
    parts.append(f"header in line {shape.header}" if shape.header else "no header")
    if shape.skip > 1 and shape.skip != shape.header:
        parts.append(f"first row in line {shape.skip + 1}")
    return parts


def _describe_clock(facts: TableFacts, clock: Clock) -> str:
    names = " and ".join(
        safe_text(facts.columns[i].header or f"column {i + 1}") for i in clock.places
    )
    if not clock.unit:
        return f"clock {names} without a unit ({clock.evidence})"
    unit = "as date or time" if clock.form else f"in {clock.unit} ({clock.evidence})"
    if clock.irregular:
        return f"clock {names} {unit} at irregular times, about {clock.step:.3g} s apart"
    rate = f" at {1 / clock.step:.4g} Hz" if clock.step > 0 else ""
    return f"clock {names} {unit}{rate}"


# --- texts


class Head(NamedTuple):
    """The first lines of a text."""

    lines: list[str]
    encoding: str

    @property
    def text(self) -> str:
        """All of them."""
        return "\n".join([*self.lines, ""])


def read_head(path: Path) -> Head:
    """The first complete lines of a text, in UTF-8 or as stated, else in Latin-1.

    Raises UserError: empty_file, encoding and as `csv_text.open_text`.
    """
    with open_text(path) as stream:
        raw = stream.file.read(HEAD)
        encoding = UTF8 if not stream.verified or stream.start else "decoded"
    if not raw:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    if len(raw) == HEAD:
        raw = raw[: raw.rfind(b"\n") + 1] or raw
    if not is_utf8(raw):
        encoding = "latin-1"
    text = raw.decode(encoding if encoding == "latin-1" else UTF8)
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n", LINES)[:LINES]
    return Head([line.rstrip("\r") for line in lines], encoding)


def find_delimiter(path: Path) -> str:
    """The mark between the cells of a table of texts: the one that its first lines agree on."""
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        return "\t"
    if is_parquet(path):
        return ","
    lines = [line for line in read_head(path).lines if line.strip()][:50]
    best, most = ",", (0.0, 1)
    for mark in DELIMITERS[:4]:
        widths = [len(_split_line(line, mark)) for line in lines]
        agree = sum(width == widths[0] for width in widths) / max(1, len(widths))
        if widths and widths[0] > 1 and (round(agree, 1), widths[0]) > most:
            best, most = mark, (round(agree, 1), widths[0])
    return best


def _split_line(line: str, delimiter: str, quote: str = '"') -> list[str]:
    """The cells of a line, without blanks around them."""
    if delimiter == " ":
        return line.split()
    if quote == "'":
        line = line.replace("'", '"')
    cells = split_cells(line, delimiter)
    if isinstance(cells, str):
        cells = line.split(delimiter)
    return [cell.strip() for cell in cells]


def _is_number(cell: str, decimal: str) -> bool:
    return NUMBER.fullmatch(cell.replace(",", ".", 1) if decimal == "," else cell) is not None


def _is_value(cell: str, decimal: str) -> bool:
    return _is_number(cell, decimal) or clocks.is_time_text(cell)


class Grammar(NamedTuple):
    """Marks of a text, and how well they fit its lines."""

    fit: float  # share of the lines of the common width, times share of cells with values
    width: int
    delimiter: str
    decimal: str


def _find_grammar(lines: Sequence[str], stated: str, quote: str) -> Grammar:
    """The marks under which most cells of the last lines are numbers or times."""
    marks = (stated,) if stated else DELIMITERS
    grammars = []
    for mark in marks:
        rows = [_split_line(line, mark, quote) for line in lines]
        width = Counter(map(len, rows)).most_common(1)[0][0]
        rows = [row for row in rows if len(row) == width]
        cells = [cell for row in rows for cell in row if cell.lower() not in MISSING]
        for decimal in (".",) if mark == "," and width > 1 else (".", ","):
            hits = sum(_is_value(cell, decimal) for cell in cells) / max(1, len(cells))
            grammars.append(Grammar(round(len(rows) / len(lines) * hits, 1), width, mark, decimal))
    best = max(grammars, key=lambda grammar: (grammar.fit, grammar.width))
    if best.fit == 0 and not stated:
        best = max(grammars, key=lambda grammar: grammar.width * (grammar.delimiter != " "))
    return best


def _is_decimal_column(lines: Sequence[str], above: str) -> bool:
    """Whether lines such as `-0,012` are one column of decimals, not two of whole numbers."""
    pairs = [line.strip().split(",") for line in lines if line.strip().count(",") == 1]
    if len(pairs) < len(lines) - 1 or not all(part.isdigit() for _, part in pairs):
        return False
    has_zeros = any(len(part) > 1 and part.startswith("0") for _, part in pairs)
    is_one_name = bool(above.strip()) and "," not in above and not _is_number(above.strip(), ".")
    return has_zeros or is_one_name


def _sniff_text(path: Path, delimiter: str, choice: ClockChoice) -> TableFacts:
    head = read_head(path)
    form = vendors.find_form(path.name, "\n".join(head.lines[:60]) + "\n")
    lines = head.lines
    if hint := re.fullmatch(r'"?sep=(.?)"?', lines[0].strip("\r\n ")):  # for spreadsheets
        delimiter = delimiter or hint[1] or "\t"
    quote = "'" if any(line.startswith("'") for line in lines[:3]) else '"'
    filled = [line for line in lines if line.strip() and not _is_comment(line)]
    tail = filled[len(filled) // 3 :][-CELLS:] or filled or [""]
    grammar = _find_grammar(tail, delimiter, quote)
    if grammar.delimiter == "," and grammar.width == 2 and not delimiter:
        above = filled[0] if len(filled) > 1 else ""
        if (form and form.width == 1) or _is_decimal_column(tail, above):
            grammar = Grammar(1.0, 1, ";", ",")
    rows = [_split_line(line, grammar.delimiter, quote) for line in lines]
    layout = _find_layout(lines, rows, grammar, form.skip if form else None)
    shape = TableShape(
        "utf-16" if head.encoding == "decoded" else head.encoding,
        grammar.delimiter,
        grammar.decimal,
        quote,
        layout.skip,
        layout.header,
        grammar.width,
    )
    cells = [row for row in rows[layout.skip :] if len(row) == grammar.width][:ROWS]
    columns = _name_columns(layout.names, layout.units, cells, grammar.decimal)
    top = "\n".join(lines[: max(layout.skip, 1) if not form else 60]) + "\n"
    start = None
    rate = _find_preamble_rate("\n".join(lines[: layout.skip]))
    if form:
        columns = _apply_form(columns, form, top)
        rate = form.read_rate(top) or rate
        text = form.read_start(top)
        start = clocks.parse_moment(text) if text else None
    numbers = _Cells(cells, grammar.decimal)
    patterns = tuple(form.clock) if form else ()
    clock = None
    if choice.column or not (form and rate):
        clock = _find_clock(columns, numbers, choice, patterns)
    if form and clock:
        clock = clock._replace(irregular=clock.irregular or form.irregular)
    columns = _mark_others(columns, clock, numbers, choice, counts=form is None)
    missing = tuple(form.missing) if form else ()
    title = form.title if form else ""
    is_codes = _holds_codes(columns, numbers)
    return TableFacts(shape, columns, clock, rate, title, start, len(cells), is_codes, missing)


class Layout(NamedTuple):
    """Where the rows of a text begin, and what the lines above them name."""

    skip: int  # lines before the first row
    header: int  # number of the line with names; 0: none
    names: list[str]
    units: list[str]


def _find_layout(
    lines: Sequence[str], rows: Sequence[list[str]], grammar: Grammar, skip: int | None
) -> Layout:
    """The first row, and the names and units above it."""
    if skip is not None:
        return Layout(skip, 0, [], [])
    width, decimal = grammar.width, grammar.decimal
    is_comment = list(map(_is_comment, lines))
    whole = [i for i, row in enumerate(rows) if len(row) == width and lines[i].strip()]
    whole = [i for i in whole if not is_comment[i]]
    body = [rows[i] for i in whole[len(whole) // 3 :][-CELLS:]]
    valued = [_is_value_column([row[k] for row in body], decimal) for k in range(width)]
    if not any(valued):  # a table of texts: its first line has the names
        first = whole[0] if whole else 0
        return Layout(first + 1, first + 1, rows[first] if whole else [], [])

    def is_row(i: int) -> bool:
        cells = [cell for cell, is_value in zip(rows[i], valued, strict=True) if is_value]
        filled = [cell for cell in cells if cell.lower() not in MISSING]
        return bool(filled) and all(_is_value(cell, decimal) for cell in filled)

    first = next((i for i in whole if is_row(i)), whole[0])
    header, units = _find_header(lines, rows, first, grammar)
    if (
        header is None
        and _counts_up(rows[first])
        and any("." in cell for row in body for cell in row)
    ):
        return Layout(first + 1, first + 1, rows[first], [])  # columns called 0, 1, 2 ...
    names = [] if header is None else _strip_comment(lines[header], rows[header], grammar)
    begin = _find_first_line(lines, rows, first, header if header is not None else -1, grammar)
    return Layout(begin + bool(units), 0 if header is None else header + 1, names, units)


def _find_first_line(
    lines: Sequence[str], rows: Sequence[list[str]], first: int, header: int, grammar: Grammar
) -> int:
    """The line of the first row: faulty rows between the header and the first right one count.

    Without a header they are those directly above it that begin like a row.
    """
    if header >= 0:
        return header + 1
    begin = first
    while begin and len(rows[begin - 1]) == grammar.width > 1:
        cells = rows[begin - 1]
        if not any(_is_value(cell, grammar.decimal) for cell in cells):
            break
        if _is_comment(lines[begin - 1]):
            break
        begin -= 1
    return begin


def _find_header(
    lines: Sequence[str], rows: Sequence[list[str]], first: int, grammar: Grammar
) -> tuple[int | None, list[str]]:
    """Line of the names above the first right row, from 0, and the units in a row below them."""
    texts = [i for i in range(first) if lines[i].strip() and _is_header(lines[i], rows[i], grammar)]
    if not texts:
        return None, []
    last = texts[-1]
    above = texts[-2] if len(texts) > 1 else -1
    cells = _strip_comment(lines[last], rows[last], grammar)
    is_units = all(cell.strip("[]() ").lower() in UNIT_CELLS for cell in cells if cell)
    if is_units and any(cells) and above >= 0 and not "".join(lines[above + 1 : last]).strip():
        return above, cells
    return last, []


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(COMMENT)


def _is_header(line: str, cells: Sequence[str], grammar: Grammar) -> bool:
    """Whether a line has names: as many as a row has cells, and no numbers but column numbers."""
    cells = _strip_comment(line, cells, grammar)
    if _is_comment(line) and grammar.width == 1:
        return False
    has_end = bool(cells) and not cells[-1] and grammar.width > 1  # a mark after the last name
    if abs(len(cells) - grammar.width) > has_end:
        return False
    texts = [cell for cell in cells if cell and not _is_value(cell, grammar.decimal)]
    numbers = [cell for cell in cells if cell and _is_value(cell, grammar.decimal)]
    is_pair = len(cells) == 1 and re.search(r"[:=,;\t]", cells[0]) is not None
    return bool(texts) and not is_pair and (not numbers or _counts_up(numbers))


def _counts_up(cells: Sequence[str]) -> bool:
    """Whether these are the numbers of columns: 0, 1, 2 or 1, 2, 3 ..."""
    if len(cells) < 2 or not all(re.fullmatch(r"\d{1,4}", cell) for cell in cells):
        return False
    numbers = list(map(int, cells))
    return numbers[0] in {0, 1} and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _strip_comment(line: str, cells: Sequence[str], grammar: Grammar) -> list[str]:
    """The cells of a line without the mark of a comment before them."""
    if not _is_comment(line):
        return list(cells)
    return _split_line(line.lstrip().lstrip("%#/ "), grammar.delimiter)


def _is_value_column(cells: Iterable[str], decimal: str) -> bool:
    """Whether at least half of the cells that are not empty are numbers or times."""
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    return bool(filled) and 2 * sum(_is_value(cell, decimal) for cell in filled) >= len(filled)


def _find_preamble_rate(text: str) -> float | None:
    """Hz that the lines above the table state."""
    for pattern, is_step in PREAMBLE_RATES:
        if match := re.search(pattern, text, re.MULTILINE):
            value = float(match[1].replace(",", "."))
            value *= 1000 if match[0].lower().endswith("khz") else 1
            if value > 0:
                return 1 / value if is_step else value
    return None


# --- columns


def split_header(header: str) -> tuple[str, str]:
    """Name and unit of a header such as `EKG [mV]`; a unit in round brackets must be known."""
    match = BRACKETS.fullmatch(header)
    if match:
        square, round_ = (text.strip() if text else "" for text in match.group(2, 3))
        if square and not square.isdigit():
            return match[1], square
        is_time = clocks.is_clock_name(match[1]) and round_.lower() in clocks.UNIT_OF_WORD
        if is_time or round_.lower() in CHANNEL_UNITS:
            return match[1], round_
    suffix = header.rpartition("_")[2].lower()
    return header, SUFFIX_UNITS.get(suffix, "") if "_" in header else ""


def _name_columns(
    names: Sequence[str], units: Sequence[str], rows: Sequence[Sequence[str]], decimal: str
) -> tuple[Column, ...]:
    width = len(rows[0]) if rows else len(names)
    headers = [*names, *[""] * width][:width]
    split = [split_header(header) for header in headers]
    columns = []
    names_left = Counter(name for name, _ in split)
    for i, (header, (name, unit)) in enumerate(zip(headers, split, strict=True)):
        if i < len(units) and units[i]:
            unit = units[i].strip("[]() ")
        cells = [row[i] for row in rows[:CELLS]]
        kind = _find_kind(cells, decimal)
        kind = "number" if kind == "empty" and header else kind
        unit = "" if unit.lower() in NO_UNITS else unit
        columns.append(Column(name if names_left[name] == 1 else header, header, unit, kind))
    return tuple(columns)


def _find_kind(cells: Sequence[str], decimal: str) -> ColumnKind:
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    if not filled:
        return "empty" if not any(cells) else "number"
    numbers = sum(_is_number(cell, decimal) for cell in filled)
    if 2 * numbers >= len(filled):
        return "number"
    return "time" if 2 * sum(map(clocks.is_time_text, filled)) >= len(filled) else "text"


def _apply_form(
    columns: tuple[Column, ...], form: vendors.VendorForm, head: str
) -> tuple[Column, ...]:
    """The columns with the names and units of a vendor's form, and those it leaves out."""
    names = form.read_names(head)
    unit = form.read_unit(head)
    last = form.count_last(head)
    named = [
        column._replace(name=name, header=name) if not column.header else column
        for column, name in zip(columns, [*names, *[""] * len(columns)], strict=False)
    ]
    numeric = [i for i, column in enumerate(named) if column.kind == "number"]
    kept = set(numeric if last is None else numeric[-last:])
    result = []
    for i, column in enumerate(named):
        patterns = [
            pattern
            for pattern in form.columns
            if fnmatch.fnmatch((column.header or f"channel {i + 1}").lower(), pattern.lower())
        ]
        if column.kind == "number" and (i not in kept or (form.columns and not patterns)):
            column = column._replace(kind="left out")
        stated = form.columns[patterns[0]] if patterns else unit
        result.append(column._replace(unit=column.unit or stated))
    return tuple(result)


# --- the clock


class _Cells:
    """The first rows of a table by column."""

    def __init__(self, rows: Sequence[Sequence[str]], decimal: str) -> None:
        self.rows = rows
        self.decimal = decimal

    def texts(self, place: int) -> list[str]:
        return [row[place] for row in self.rows]

    def numbers(self, place: int) -> np.ndarray:
        cells = [
            cell.replace(",", ".") if self.decimal == "," else cell for cell in self.texts(place)
        ]
        return np.array(
            [float(cell) if NUMBER.fullmatch(cell) else np.nan for cell in cells], np.float64
        )


def _find_clock(
    columns: Sequence[Column], cells: _Cells, choice: ClockChoice, patterns: Sequence[str]
) -> Clock | None:
    """The clock that the map, a form or the columns themselves name.

    Raises UserError: schema, for a stated column that is not there.
    """
    if choice.column:
        return _make_clock(columns, cells, _find_place(columns, choice.column), choice.unit)
    for pattern in patterns:
        for i, column in enumerate(columns):
            if fnmatch.fnmatch(column.header.lower(), pattern.lower()):
                return _make_clock(columns, cells, i, choice.unit)
    clocks_found = [
        clock
        for i, column in enumerate(columns)
        if _may_be_clock(i, columns)
        and (clock := _make_clock(columns, cells, i, choice.unit))
        and _increases(cells, columns, clock)
    ]
    return max(clocks_found, key=lambda clock: _rate_clock(clock, columns, cells), default=None)


def _find_place(columns: Sequence[Column], wanted: str) -> int:
    numbered = [f"column {i}" for i in range(1, len(columns) + 1)]
    for texts in ([c.header for c in columns], [c.name for c in columns], numbered):
        if wanted in texts:
            return texts.index(wanted)
    names = list_names([column.header for column in columns if column.header], 12)
    problem = f"has no column {safe_text(wanted)}"
    raise input_error(Reason.SCHEMA, problem, f"found {names or 'no header'}", field="time")


def _may_be_clock(place: int, columns: Sequence[Column]) -> bool:
    column = columns[place]
    if column.kind == "time":
        return True
    if column.kind != "number" or len(columns) < 2:
        return False
    if not column.header:
        return place == 0 and not any(other.header for other in columns)
    return clocks.is_clock_name(column.header)


def _make_clock(columns: Sequence[Column], cells: _Cells, place: int, unit: str) -> Clock | None:
    """The clock in a column; None for texts that are no times."""
    column = columns[place]
    if column.kind != "time":
        values = cells.numbers(place)
        values = values[np.isfinite(values)]
        if len(values) < 2:
            return None
        if not column.header and not unit and _is_count(values):
            return None
        found = clocks.choose_unit(column.header, column.unit, values, unit)
        step = clocks.measure_step(values) * clocks.UNITS.get(found.unit, float("nan"))
        irregular = clocks.is_irregular(values)
        return Clock((place,), found.unit, "", found.evidence, found.others, step, irregular)
    return _make_text_clock(columns, cells, place)


def _make_text_clock(columns: Sequence[Column], cells: _Cells, place: int) -> Clock | None:
    import polars as pl

    places: tuple[int, ...] = (place,)
    texts = cells.texts(place)
    date = next(
        (i for i, c in enumerate(columns) if i != place and _is_date_column(cells.texts(i))), None
    )
    if date is not None and not clocks.DATE.match(texts[0]):
        places = (date, place)
        texts = [f"{day} {time}" for day, time in zip(cells.texts(date), texts, strict=True)]
    filled = [text for text in texts if text.lower() not in MISSING]
    form = clocks.find_text_form(filled[:CELLS], columns[place].header)
    times = clocks.parse_texts(pl.Series("", filled, pl.String), form) if form else 0
    if isinstance(times, int):
        return None
    seconds = times.seconds
    irregular = clocks.is_irregular(seconds)
    step = measure_text_step(seconds)
    return Clock(places, "datetime", form, "dates and times", (), step, irregular)


def measure_text_step(seconds: np.ndarray) -> float:
    """Seconds between rows, where several rows may have one time, rounded to seconds."""
    step = clocks.measure_step(seconds)
    repeats = float(np.mean(np.diff(seconds) == 0)) if len(seconds) > 1 else 0.0
    return step * (1 - repeats) if repeats > 0.5 else step


def _is_date_column(texts: Sequence[str]) -> bool:
    return bool(texts) and all(clocks.DATE.fullmatch(text) for text in texts[:CELLS])


def _increases(cells: _Cells, columns: Sequence[Column], clock: Clock) -> bool:
    """Whether the times of the first rows go up, but for a few of them."""
    if clock.form:
        return clock.step > 0
    steps = np.diff(cells.numbers(clock.places[0]))
    steps = steps[np.isfinite(steps)]
    return bool(steps.size) and float(np.mean(steps >= 0)) > 0.9 and float(np.sum(steps)) > 0


def _rate_clock(
    clock: Clock, columns: Sequence[Column], cells: _Cells
) -> tuple[bool, bool, bool, int]:
    """How good a clock is: few rows of one time, a unit in its header, a known unit, its place."""
    place = clock.places[-1]
    if clock.form:
        return True, True, False, -place
    repeats = float(np.mean(np.diff(cells.numbers(place)) == 0))
    return repeats < 0.05, bool(clock.unit), "header" in clock.evidence, -place


def _is_count(values: np.ndarray) -> bool:
    """Whether these are numbers of samples: whole, one after the other, from 0 or 1."""
    finite = values[np.isfinite(values)]
    if len(finite) < 3 or finite[0] not in {0, 1}:
        return False
    return float(np.mean(np.diff(finite) == 1)) > 0.95


def _mark_others(
    columns: Sequence[Column],
    clock: Clock | None,
    cells: _Cells,
    choice: ClockChoice,
    *,
    counts: bool = True,
) -> tuple[Column, ...]:
    """The columns, those of further times and (`counts`) of numbers of samples marked as such."""
    marked = list(columns)
    for i, column in enumerate(columns):
        if clock and i in clock.places:
            marked[i] = column._replace(kind="time")
        elif column.kind == "number" and len(columns) > 1:
            values = cells.numbers(i)
            is_named = bool(column.header) and clocks.is_index_name(column.header)
            may_count = counts and (is_named or (i == 0 and not column.header))
            if may_count and (_is_count(values) or (is_named and _wraps(values))):
                marked[i] = column._replace(kind="index")
            elif clock and column.header and clocks.is_clock_name(column.header):
                steps = np.diff(values[np.isfinite(values)])
                if steps.size and (steps >= 0).all() and steps.any():
                    marked[i] = column._replace(kind="time")
    if not any(column.kind == "number" for column in marked) and not choice.column:
        return tuple(columns) if clock is None else tuple(marked)
    return tuple(marked)


def _holds_codes(columns: Sequence[Column], cells: _Cells) -> bool:
    """Whether the only channel has a few small whole numbers, as stages and classes have."""
    places = [i for i, column in enumerate(columns) if column.kind == "number"]
    if len(places) != 1:
        return False
    values = np.unique(cells.numbers(places[0]))
    values = values[np.isfinite(values)]
    is_small = len(values) <= MOST_CODES and bool((np.abs(values) < 10).all())
    return is_small and bool((values == np.rint(values)).all())


def _wraps(values: np.ndarray) -> bool:
    """Whether these count up by 1 and begin anew, as the numbers of packets do."""
    steps = np.diff(values[np.isfinite(values)])
    return (
        bool(steps.size)
        and float(np.mean(steps == 1)) > 0.8
        and bool((steps[steps != 1] < 0).all())
    )


# --- Parquet


def _sniff_parquet(path: Path, choice: ClockChoice) -> TableFacts:
    import pyarrow.parquet as pq

    types = read_column_types(path)
    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(ROWS), None)
        total = file.metadata.num_rows
    frame: pl.DataFrame | None = None
    if batch is not None:
        import polars as pl

        frame = pl.DataFrame(batch)
    columns = []
    texts: list[list[str]] = []
    stored: dict[int, Clock] = {}
    for i, (header, kind) in enumerate(types.items()):
        series = None if frame is None else frame.to_series(i)
        cells = [] if series is None else _show_cells(series)
        texts.append(cells)
        name, unit = split_header(header)
        column_kind = _find_kind(cells[:CELLS], ".")
        if series is not None and kind.startswith(("timestamp", "duration", "time", "date")):
            column_kind = "time"
            stored[i] = _make_stored_clock(i, series)
        columns.append(Column(name, header, unit, column_kind))
    table = _Cells([list(row) for row in zip(*texts, strict=True)], ".")
    clock = _choose_stored(columns, stored, choice) or _find_clock(columns, table, choice, ())
    marked = _mark_others(columns, clock, table, choice)
    rows_seen, is_codes = min(total, ROWS), _holds_codes(marked, table)
    return TableFacts(None, marked, clock, None, "", None, rows_seen, is_codes)


def _choose_stored(
    columns: Sequence[Column], stored: dict[int, Clock], choice: ClockChoice
) -> Clock | None:
    """The clock of stored time stamps that is asked for, or the first one."""
    if choice.column:
        return stored.get(_find_place(columns, choice.column))
    return next((clock for clock in stored.values() if clock.step > 0), None)


def _show_cells(series: pl.Series) -> list[str]:
    import polars as pl

    return list(series.cast(pl.String, strict=False).fill_null("").to_list())


def _make_stored_clock(place: int, series: pl.Series) -> Clock:
    seconds = to_seconds(series)
    irregular = clocks.is_irregular(seconds)
    step = measure_text_step(seconds[np.isfinite(seconds)])
    return Clock((place,), "datetime", "stored", "stored as times", (), step, irregular)


def to_seconds(series: pl.Series) -> np.ndarray:
    """Stored time stamps or durations as seconds since 1970 or from 0; NaN where there is none."""
    import polars as pl

    whole = series.cast(pl.Datetime("us")) if series.dtype == pl.Date else series
    if isinstance(whole.dtype, pl.Duration):
        numbers = whole.dt.total_microseconds()
    elif whole.dtype == pl.Time:
        numbers = whole.cast(pl.Int64) // 1000
    else:
        numbers = whole.dt.timestamp("us")
    return numbers.cast(pl.Float64).to_numpy() / 1e6
