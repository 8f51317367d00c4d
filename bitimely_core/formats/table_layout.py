"""Finds the marks of a text table and the lines where its names, units and rows stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bitimely_core.errors import Reason, input_error
from bitimely_core.formats import clocks
from bitimely_core.formats.table_rows import split_cells
from bitimely_core.formats.table_text import normalize_minus, open_text
from bitimely_core.formats.tables import NUMBER
from bitimely_core.formats.text import UTF8, is_utf8
from bitimely_core.formats.units import find_unit
from bitimely_core.types import find_only

HEAD = 1 << 18  # bytes that are looked at
LINES = 1200  # that are looked at
CELLS = 200  # of a column that are looked at
DELIMITERS = (",", ";", "\t", "|", " ")  # the last stands for any number of blanks
# a cell with blanks beside another mark, such as `0,"[12 34]",5000`; it may go on in the next line
QUOTED_BLANKS = re.compile(r'[,;\t|]"[^"]*\s[^"]*(?:"|$)|(?:^|")[^"]*\s[^"]*"[,;\t|]')
# a date and a time, before or behind which another mark stands; a comma may be that of decimals
DAY = r"(?:\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{2,4})"
DATED_BLANKS = re.compile(
    rf"[,;\t|]{DAY} +\d\d?:\d\d|{DAY} +\d\d?:\d\d[\d:.]*(?:[;\t|]| ?[+-]\d\d:?\d\d[,;\t|])"
)
COMMENT = ("%", "#", "//")
MISSING = clocks.MISSING
THOUSANDS = {  # mark between thousands -> numbers that have it
    ",": re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?"),
    ".": re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+(?:,\d+)?"),
}
UNIT_CELLS = {unit.lower() for unit in clocks.WORDS["units"]} | clocks.UNIT_OF_WORD.keys()
UNIT_CELLS |= set(clocks.WORDS["no_units"])
SIZES = {"s": 1.0, "d": 1.0, "m": 1e-3, "u": 1e-6, "\u00b5": 1e-6, "\u03bc": 1e-6}  # seconds
RATE_NAMES = r"(?:sampl\w*|abtast)[ _-]?(?:rate|freq\w*)"
STEP_NAMES = r"intervall?|(?:sampl\w*|abtast)[ _-]?period\w*"
# number and unit, which may also stand in brackets before it
VALUE = r"(?P<value>\d+(?:[.,]\d+)*(?:e-?\d+)?)"
UNIT = r"(?P<unit>s|ms|us|\u00b5s|\u03bcs)(?:ec)?"
PREAMBLE_RATES = (
    rf"(?i){RATE_NAMES}[^0-9\n]{{0,20}}{VALUE} *(?P<hertz>k?hz)?",
    rf"(?i)^\W*(?:fs|sfreq|abtastrate)\W{{1,4}}{VALUE}",
    rf"(?i)^\W*frequency\W{{1,4}}{VALUE} *(?P<hertz>k?hz)",
    rf"(?i)\bsamples (?:per|/) ?(?:second|sec|s)\W{{1,4}}{VALUE}",
    rf"(?i)\b{VALUE} *(?:samples ?(?:/|per) ?s|sps\b)",
)
PREAMBLE_UNIT = re.compile(r"(?im)^\W*(?:units?|einheit)\W{1,3}(\S+?)[\"')\]]*\s*$")
PREAMBLE_STEPS = (
    rf"(?i)(?:{STEP_NAMES})\s*[=:,;\t]\s*{VALUE} *{UNIT}\b",
    rf"(?i)(?:{STEP_NAMES}) *[(\[]{UNIT}[)\]]\s*[=:,;\t]?\s*{VALUE}",
    rf"(?i)^\W*(?P<unit>d)t *(?:\(s\)|\[s\])?\s*[=:,;\t]\s*{VALUE}",
    rf"(?i){VALUE} *(?P<unit>m)(?:illi)?sec\w*/sample",
)


class TableHead(NamedTuple):
    """The first lines of a text."""

    lines: list[str]
    encoding: str

    @property
    def text(self) -> str:
        """All of them."""
        return "\n".join([*self.lines, ""])


def read_head(path: Path) -> TableHead:
    """The first complete lines of a text, in UTF-8 or as stated, else in Latin-1.

    Raises UserError: empty_file, encoding and as `table_text.open_text`.
    """
    with open_text(path) as stream:
        raw = stream.file.read(HEAD)
        encoding = "utf-16" if _begins_like_utf16(path) else UTF8
    if not raw:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    if len(raw) == HEAD:
        raw = raw[: raw.rfind(b"\n") + 1] or raw
    if not is_utf8(raw):
        encoding = "latin-1"
    text = normalize_minus(raw).decode(encoding if encoding == "latin-1" else UTF8)
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n", LINES)[:LINES]
    return TableHead([line.rstrip("\r") for line in lines], encoding)


def _begins_like_utf16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in {b"\xff\xfe", b"\xfe\xff"}


def split_line(line: str, delimiter: str, quote: str = '"') -> list[str]:
    """The cells of a line, without blanks around them."""
    if delimiter == " ":
        return line.split()
    cells = split_cells(line, delimiter, quote) or line.split(delimiter)
    return [cell.strip() for cell in cells]


def is_number(cell: str, decimal: str) -> bool:
    """Whether a cell is a number with this decimal mark, before which may be others."""
    plain = cell.replace(",", ".", 1) if decimal == "," else cell
    if NUMBER.fullmatch(plain):
        return True
    other = "." if decimal == "," else ","
    return decimal in cell and THOUSANDS[other].fullmatch(cell) is not None


def is_value(cell: str, decimal: str) -> bool:
    """Whether a cell is a number or a time."""
    return is_number(cell, decimal) or clocks.is_time_text(cell)


class Grammar(NamedTuple):
    """Marks of a text, and how well they fit its lines."""

    fit: float  # share of the lines of the common width, times share of cells with values
    width: int
    delimiter: str
    decimal: str


def _find_grammar(lines: Sequence[str], stated: str, quote: str) -> Grammar:
    """The marks under which most cells of the last lines are numbers or times."""
    marks = (stated,) if stated else _list_delimiters(lines)
    has_quotes = any('"' in line for line in lines)
    grammars: list[Grammar] = []
    for mark in marks:
        rows = [split_line(line, mark, quote) for line in lines]
        decimals = (".",) if mark == "," and not has_quotes else (".", ",")
        grammars += [_rate_grammar(rows, mark, decimal) for decimal in decimals]
    # blanks stand in dates, too: `2023-05-01 10:00:00 +0100,60` has two cells
    best = max(grammars, key=lambda g: (g.fit, g.delimiter != " ", g.width))
    if best.fit == 0 and not stated:
        best = max(grammars, key=lambda grammar: grammar.width * (grammar.delimiter != " "))
    return best


def _list_delimiters(lines: Sequence[str]) -> Sequence[str]:
    """The marks that may part the cells; no blanks where they stand in cells beside others."""
    has_blanks = any(form.search(line) for line in lines for form in (QUOTED_BLANKS, DATED_BLANKS))
    return DELIMITERS[:-1] if has_blanks else DELIMITERS


def _rate_grammar(rows: Sequence[list[str]], mark: str, decimal: str) -> Grammar:
    """How well marks fit rows that were split by them."""
    width = Counter(map(len, rows)).most_common(1)[0][0]
    whole = [row for row in rows if len(row) == width]
    cells = [cell for row in whole for cell in row if cell.lower() not in MISSING]
    hits = sum(is_value(cell, decimal) for cell in cells) / max(1, len(cells))
    return Grammar(round(len(whole) / len(rows) * hits, 1), width, mark, decimal)


def _is_decimal_column(lines: Sequence[str], above: str) -> bool:
    """Whether lines such as `-0,012` are one column of decimals, not two of whole numbers."""
    pairs = [line.strip().split(",") for line in lines if line.strip().count(",") == 1]
    if len(pairs) < len(lines) - 1 or not all(part.isdigit() for _, part in pairs):
        return False
    has_zeros = any(re.match(r"0.", part) for _, part in pairs)
    is_one_name = bool(above.strip()) and "," not in above and not is_number(above.strip(), ".")
    return has_zeros or is_one_name


class Layout(NamedTuple):
    """Where the rows of a text begin, and what the lines above them name."""

    skip: int  # lines before the first row
    header: int  # number of the line with names; 0: none
    names: list[str]
    units: list[str]


def find_grammar(
    lines: Sequence[str], stated: str, *, quote: str, is_single: bool = False
) -> Grammar:
    """The marks of a text by its first lines.

    `stated`: the delimiter; "": found. `is_single`: the table is known to have one column.
    """
    filled = [line for line in lines if line.strip() and not _is_comment(line)] or [""]
    tail = filled[len(filled) // 3 :][-CELLS:]
    grammar = _find_grammar(tail, stated, quote)
    if grammar.delimiter != "," or grammar.width != 2 or stated:
        return grammar
    above = filled[0] if len(filled) > 1 else ""
    if is_single or _is_decimal_column(tail, above):
        return Grammar(1.0, 1, ";", ",")
    return grammar


def find_layout(
    lines: Sequence[str], rows: Sequence[list[str]], grammar: Grammar, skip: int | None
) -> Layout:
    """The first row, and the names and units above it; `skip`: lines above it, where known."""
    if skip is not None:
        return Layout(skip, 0, [], [])
    full = _find_full_rows(lines, rows, grammar)
    body = [rows[i] for i in full[len(full) // 3 :][-CELLS:]]
    valued = [_is_value_column(cells, grammar.decimal) for cells in zip(*body, strict=True)]
    if not any(valued):
        return _find_text_layout(rows, full)
    first = next((i for i in full if _is_row(rows[i], valued, grammar.decimal)), full[0])
    texts = _pad_names(rows, body)
    header, units = _find_header(lines, texts, first, grammar)
    if header is not None:
        names = _strip_comment(lines[header], texts[header], grammar)
        below = header + 1 + bool(units)
        begin = next(i for i in full if i >= below)  # faulty rows count, other lines do not
        return Layout(begin, header + 1, names, units)
    if _counts_up(rows[first]) and "." in "".join(chain(*body)):  # columns called 0, 1, 2 ...
        return Layout(first + 1, first + 1, rows[first], [])
    return Layout(_find_first_line(lines, rows, first, grammar), 0, [], [])


def _find_text_layout(rows: Sequence[list[str]], full: Sequence[int]) -> Layout:
    """The layout of a table of texts, whose first line has the names."""
    if not full:
        return Layout(1, 1, [], [])
    return Layout(full[0] + 1, full[0] + 1, rows[full[0]], [])


def _find_full_rows(lines: Sequence[str], rows: Sequence[list[str]], grammar: Grammar) -> list[int]:
    """Numbers of the lines that have the common width and are no comments."""
    return [
        i
        for i, row in enumerate(rows)
        if len(row) == grammar.width and lines[i].strip() and not _is_comment(lines[i])
    ]


def _pad_names(rows: Sequence[list[str]], body: Sequence[list[str]]) -> Sequence[list[str]]:
    """All lines, names with an empty cell at their end where rows end with a mark."""
    width = len(body[0])
    if width == 1 or any(row[-1] for row in body):
        return rows
    return [[*row, ""] if len(row) == width - 1 else row for row in rows]


def _is_row(cells: Sequence[str], valued: Sequence[bool], decimal: str) -> bool:
    """Whether a line has values, and nothing else, in the columns of values."""
    filled = [
        cell
        for cell, is_valued in zip(cells, valued, strict=True)
        if is_valued and cell.lower() not in MISSING
    ]
    return bool(filled) and all(is_value(cell, decimal) for cell in filled)


def _find_first_line(
    lines: Sequence[str], rows: Sequence[list[str]], first: int, grammar: Grammar
) -> int:
    """The line of the first row of a table without a header, from 0.

    Faulty rows directly above the first right one count: they begin like a row. A key with a value
    for each channel, such as `TopValue=`, is none.
    """
    begin = first
    while begin and len(rows[begin - 1]) == grammar.width > 1:
        has_value = any(is_value(cell, grammar.decimal) for cell in rows[begin - 1])
        if not has_value or _is_comment(lines[begin - 1]) or _is_preamble(rows[begin - 1]):
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
    *_, above, last = [-1, *texts]
    cells = _strip_comment(lines[last], rows[last], grammar)
    filled = list(filter(None, cells))
    is_units = 2 * sum(map(_is_unit, filled)) > len(filled)
    if is_units and above >= 0 and not "".join(lines[above + 1 : last]).strip():
        return above, cells
    return last, []


def _is_unit(cell: str) -> bool:
    """Whether a cell of a second header row is a unit, or the form of a time such as hh:mm:ss."""
    text = cell.strip("[]() ").lower()
    return (
        text in UNIT_CELLS
        or find_unit(text) is not None
        or re.fullmatch(r"[hmsdy:./ -]{5,}", text) is not None
    )


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(COMMENT)


def _is_header(line: str, cells: Sequence[str], grammar: Grammar) -> bool:
    """Whether a line has names: as many as a row has cells, and no numbers but column numbers."""
    cells = _strip_comment(line, cells, grammar)
    if len(cells) == grammar.width + 1 > 2 and not cells[-1]:  # a mark after the last name
        cells = cells[:-1]
    is_bare_comment = _is_comment(line) and grammar.width == 1
    if len(cells) != grammar.width or is_bare_comment or _is_preamble(cells):
        return False
    filled = list(filter(None, cells))
    numbers = [cell for cell in filled if is_value(cell, grammar.decimal)]
    return len(numbers) < len(filled) and (not numbers or _counts_up(numbers))


def _is_preamble(cells: Sequence[str]) -> bool:
    """Whether a line is a key with its value."""
    is_pair = len(cells) == 1 and re.search(r"[:=,;\t]", cells[0]) is not None
    return is_pair or cells[0].endswith(("=", ":"))


def _counts_up(cells: Sequence[str]) -> bool:
    """Whether these are the numbers of columns: 0, 1, 2 or 1, 2, 3 ..."""
    if len(cells) < 2 or not all(re.fullmatch(r"\d{1,4}", cell) for cell in cells):
        return False
    numbers = list(map(int, cells))
    return numbers in (list(range(len(numbers))), list(range(1, len(numbers) + 1)))


def _strip_comment(line: str, cells: Sequence[str], grammar: Grammar) -> list[str]:
    """The cells of a line without the mark of a comment before them."""
    if not _is_comment(line):
        return list(cells)
    return split_line(line.lstrip().lstrip("%#/ "), grammar.delimiter)


def _is_value_column(cells: Iterable[str], decimal: str) -> bool:
    """Whether at least half of the cells that are not empty are numbers or times."""
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    return bool(filled) and 2 * sum(is_value(cell, decimal) for cell in filled) >= len(filled)


def find_preamble_rate(text: str, decimal: str) -> float | None:
    """Hz that the lines above the table state; None where they state none, or several.

    `decimal`: the mark before decimals in the table.
    """
    for pattern in (*PREAMBLE_RATES, *PREAMBLE_STEPS):
        matches = re.finditer(pattern, text, re.MULTILINE)
        rates = {_read_rate(match.groupdict(), decimal) for match in matches} - {0.0}
        if rates:
            return find_only(rates, None)
    return None


def find_preamble_unit(text: str) -> str:
    """The known unit that the lines above the table state; "": none, or several."""
    units = {unit for unit in PREAMBLE_UNIT.findall(text) if find_unit(unit)}
    return find_only(units, "")


def _read_rate(parts: Mapping[str, str | None], decimal: str) -> float:
    """Hz of a number of Hz or kHz, or of units of time; 0: it is none."""
    text, unit = parts["value"] or "", (parts.get("unit") or "").lower()
    number, _, power = text.lower().partition("e")
    value = float(".".join(re.split("[.,]", number)[:2])) * 10.0 ** int(power or 0)
    if unit:
        seconds = value * SIZES[unit[0]]
        return 1 / seconds if seconds else 0.0
    mark = "." if decimal == "," else ","
    grouped = number.replace(mark, "").replace(",", ".")
    if THOUSANDS[mark].fullmatch(number) and float(grouped) <= clocks.FASTEST:
        value = float(grouped)  # 1,000 Hz; 250,000 Hz would be no rate of physiology
    return value * (1000 if (parts.get("hertz") or "").lower() == "khz" else 1)
