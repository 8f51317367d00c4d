"""Finds the rows of a text table, of any dialect.

A delimiter separates cells. A cell that begins with a quote ends with one, holds two for one, and
may hold line breaks; no other cell holds a quote. Blank lines are no rows, nor is the number of
rows that databases write below a table. A line that opens a quote which nothing closes properly is
one faulty row, and reading goes on with the next line.

Where each line is plainly a row, the text is left to a fast parser: `TextStretch.height`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.formats import table_text
from bitimely_core.formats.table_text import LINE_FEED, TableSpan, normalize_line_ends
from bitimely_core.formats.text import UTF8, require_plain_names

MAX_LINES = 256  # that one row with quoted line breaks may run over
MAX_TEXT = 1 << 17  # characters of such a row
PIECE = 1 << 16  # bytes that are parsed together where a block is not plain
FAULTY, OPEN = -1, -2  # ends of rows: there is none; it may be in the lines that follow
SPACE = " \t\r\f\v"
BLANKS = re.compile(rb"[ \t]+")
OUTER_BLANKS = re.compile(rb"^ | $", re.MULTILINE)
BLANK_LINE = re.compile(rb"\n[ \t\f\v]*\n")
# what tools of databases write below a table, and the rule of dashes below its header
NO_ROW = re.compile(
    r"\W*(fetched:? )?\d[\d,.]* (row|record|zeile|ligne|fila)(s|n|\(s\))?\b[^,;|\t]*|[-+ ]+",
    re.IGNORECASE,
)


class TableShape(NamedTuple):
    """How the rows of a text are written."""

    encoding: str = UTF8  # utf-8, utf-16-le, latin-1 ...
    delimiter: str = ","  # " ": any number of blanks
    decimal: str = "."  # or ","
    quote: str = '"'  # or "'"; "": a quote is an ordinary character
    skip: int = 1  # lines before the first row
    header: int = 1  # number of the line with the names; 0: there is none
    width: int = 1  # cells of a row
    remark: str = ""  # what begins a text behind the last cell of some rows; "": there is none
    units: tuple[str, ...] = ()  # that stand behind numbers in cells: `97%`


class TableRow(NamedTuple):
    """One row of a table."""

    row: int  # text: the line on which it begins, from 1; Parquet: the row, from 1
    cells: tuple[str, ...]


class TextStretch(NamedTuple):
    """Consecutive rows of a text."""

    row: int  # lines before it
    text: bytes
    height: int | None  # rows, where each line is plainly one
    items: list[TableRow | Finding]  # where `height` is None: rows, and faults of level error


class Patterns(NamedTuple):
    """Regular expressions of one dialect."""

    row: re.Pattern[str]
    cell: re.Pattern[str]  # of a row: a quoted one is its first group, another one the second
    opening: re.Pattern[str]  # of a row whose last cell opens a quote


@lru_cache
def compile_patterns(delimiter: str, quote: str) -> Patterns:
    """The patterns of a dialect with quotes."""
    mark, q = re.escape(delimiter), re.escape(quote)
    opened = rf"{q}[^{q}\0]*+(?:{q}{q}[^{q}\0]*+)*+"
    cell = rf"(?:{opened}{q}|[^{mark}{q}\n\0]*+)"
    return Patterns(
        re.compile(rf"{cell}(?:{mark}{cell})*+(?=\n|\Z)"),
        re.compile(rf"(?:\A|{mark})(?:{q}((?:[^{q}]|{q}{q})*+){q}|([^{mark}{q}]*+))"),
        re.compile(rf"(?:{cell}{mark})*+{opened}"),
    )


@lru_cache
def compile_units(units: tuple[str, ...]) -> re.Pattern[bytes]:
    """The pattern of these units behind the number of a cell."""
    names = b"|".join(re.escape(unit.encode()) for unit in units)
    return re.compile(rb"(?<=\d)(?: |\xc2\xa0)?(?:" + names + rb")(?=\s*[\"']?(?:[,;\t|\r\n]|\Z))")


def split_cells(text: str, delimiter: str, quote: str = '"') -> list[str] | None:
    """The cells of one row; None for a text that is none."""
    if "\0" in text:
        return None
    if not quote or quote not in text:
        return text.split(delimiter)
    patterns = compile_patterns(delimiter, quote)
    if patterns.row.fullmatch(text) is None:
        return None
    cells = patterns.cell.finditer(text)
    return [m[2] if m[1] is None else m[1].replace(quote * 2, quote) for m in cells]


def parse_header(line: str, row: int, delimiter: str) -> tuple[str, ...]:
    """Names of the columns, without blanks around them.

    Raises UserError: csv_syntax, label_chars.
    """
    cells = split_cells(line, delimiter)
    if cells is None:
        problem = f"line {row}, the header, is not well formed"
        raise input_error(Reason.CSV_SYNTAX, problem, "expected column names")
    names = tuple(cell.strip() for cell in cells)
    require_plain_names(names)
    return names


def parse_rows(
    text: str, shape: TableShape, before: int, *, last: bool = True
) -> tuple[list[TableRow | Finding], str]:
    """The rows and faults of a text below `before` lines, and what is left of it.

    Only without `last` something may be left: a row that goes on in the lines that follow.
    """
    items: list[TableRow | Finding] = []
    place, number = 0, before + 1
    while place < len(text):
        stop = text.find("\n", place)
        stop = len(text) if stop < 0 else stop
        end = _find_end(text, place, stop, shape)
        if end == OPEN and not last:
            return items, text[place:]
        end = max(end, stop)
        item = _parse_row(text[place:end], shape, number, is_ended=end < len(text))
        if item is not None:
            items.append(item)
        stop = end if isinstance(item, TableRow) else stop  # a fault takes one line
        number += 1 + text.count("\n", place, stop)
        place = stop + 1
    return items, ""


def _parse_row(
    text: str, shape: TableShape, row: int, *, is_ended: bool
) -> TableRow | Finding | None:
    """One row or its fault; None for a line that is blank or `NO_ROW`. A last line without an end
    was cut off.
    """
    if not text.strip(SPACE) and shape.delimiter not in text:
        return None
    cells = split_cells(text, shape.delimiter, shape.quote)
    if cells is not None and len(cells) == shape.width:
        return TableRow(row, tuple(cells))
    if NO_ROW.fullmatch(text):
        return None
    if cells is not None and "\n" not in text:
        code = Reason.ROW_WIDTH if is_ended else Reason.TRUNCATED
        return Finding(code, f"has {len(cells)} cells", f"the header has {shape.width}", row=row)
    # of several lines: what closed the quote was another cell's
    line = text.partition("\n")[0]
    problem = "a quote in the wrong place, or a NUL character"
    if shape.quote and compile_patterns(shape.delimiter, shape.quote).opening.fullmatch(line):
        problem = "a quote is opened and not closed"
    action = "the line is dropped, reading goes on with the next"
    return Finding(Reason.CSV_SYNTAX, problem, action, row=row)


def _find_end(text: str, place: int, stop: int, shape: TableShape) -> int:
    """The end of the row that begins at `place`, in a line that ends at `stop`; FAULTY or OPEN."""
    if not shape.quote or text.find(shape.quote, place, stop) < 0:
        return stop
    patterns = compile_patterns(shape.delimiter, shape.quote)
    if patterns.row.match(text, place, stop):
        return stop
    if not patterns.opening.fullmatch(text, place, stop):
        return FAULTY
    limit = _find_limit(text, place)
    if match := patterns.row.match(text, place, limit):
        return match.end()
    is_open = limit == len(text) and patterns.opening.fullmatch(text, place, limit)
    return OPEN if is_open else FAULTY


def _find_limit(text: str, place: int) -> int:
    """The end of the last line to which a row may go on; that of the text: perhaps beyond it."""
    end = text.find("\n", place)
    for _ in range(MAX_LINES - 1):
        following = text.find("\n", end + 1)
        following = len(text) if following < 0 else following
        if end < 0 or following - place > MAX_TEXT:
            break
        end = following
    return len(text) if end < 0 else end


def read_stretches(
    path: Path, shape: TableShape, span: TableSpan | None = None
) -> Iterator[list[TextStretch]]:
    """The rows of a table, or of a span of it, block by block.

    Raises UserError: as `table_text.read_blocks`.
    """
    row = 0 if span is None else span.row
    waiting = b""  # a row that goes on
    for text, last in table_text.read_blocks(path, span):
        while row < shape.skip and text:
            row += 1
            text = text[text.find(b"\n") + 1 or len(text) :]
        text = table_text.normalize_minus(text)
        if shape.delimiter == " ":
            text = join_blanks(text)
        if shape.remark:
            text = re.sub(re.escape(shape.remark.encode()) + rb"[^\n]*", b"", text)
        if shape.units:
            text = compile_units(shape.units).sub(b"", text)
        stretches, waiting = _split_block(text, shape, row, waiting, last=last)
        row = stretches[-1].row + stretches[-1].text.count(b"\n")
        yield stretches


def _split_block(
    text: bytes, shape: TableShape, row: int, waiting: bytes, *, last: bool
) -> tuple[list[TextStretch], bytes]:
    """The stretches of a block below `row` lines, and a row that goes on in the next block.

    `waiting`: that of the block before.
    """
    stretches: list[TextStretch] = []
    pieces = list(_split_pieces(text, shape))
    for i, (piece, height) in enumerate(pieces, 1):
        if height is not None and not waiting:
            stretches.append(TextStretch(row, piece, height, []))
            row += height
            continue
        piece = waiting + piece
        items, rest = parse_rows(piece.decode(), shape, row, last=last and i == len(pieces))
        waiting = rest.encode()
        piece = piece[: len(piece) - len(waiting)]
        stretches.append(TextStretch(row, piece, None, items))
        row += piece.count(b"\n")
    return stretches, waiting


def join_blanks(text: bytes) -> bytes:
    """A text with one blank between cells, and none at the ends of lines."""
    return OUTER_BLANKS.sub(b"", BLANKS.sub(b" ", text))


def _split_pieces(text: bytes, shape: TableShape) -> Iterator[tuple[bytes, int | None]]:
    """Pieces of a text, each with its number of lines where each line is plainly a row.

    There is one piece where the text is plain throughout, else many small ones.
    """
    height = count_plain_rows(text, shape)
    if height is not None or len(text) <= PIECE:
        yield text, height
        return
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        piece = text[start:end]
        yield piece, count_plain_rows(piece, shape)
        start = end


def count_plain_rows(text: bytes, shape: TableShape) -> int | None:
    """Number of lines of a text whose delimiters, line ends and quotes show that each line is one
    row; None where they do not.

    Without quotes the marks must repeat `width - 1` delimiters and a line end.
    """
    delimiter, quote = shape.delimiter.encode(), shape.quote.encode()
    if not text.endswith(b"\n") or (shape.width == 1 and BLANK_LINE.search(b"\n" + text)):
        return None
    others = bytes(set(range(256)) - {*delimiter, *quote, *b"\n\0\r"})
    marks = text.translate(None, others)
    row = delimiter * (shape.width - 1) + b"\n"
    if marks == row * (len(marks) // shape.width):
        return len(marks) // shape.width
    if not quote or quote not in marks or b"\0" in marks or b"\r" in marks:
        return None
    return _count_quoted_rows(text, marks, shape, row)


def _count_quoted_rows(text: bytes, marks: bytes, shape: TableShape, row: bytes) -> int | None:
    """As `count_plain_rows`, of a text with quotes.

    Each pair of quotes must fill a cell of one line: a quote in a cell or a line break in quotes is
    left to `parse_rows`. The marks outside of quotes must repeat `row`.
    """
    height = text.count(b"\n")
    expected = row * height
    characters = np.frombuffer(text, np.uint8)
    is_quote = characters == ord(shape.quote)
    places = np.flatnonzero(is_quote)
    is_edge = np.zeros(256, bool)
    is_edge[[ord(shape.delimiter), LINE_FEED]] = True
    if len(places) % 2:
        return None
    # [-1], a line end, is before [0]
    before, after = characters[places[::2] - 1], characters[places[1::2] + 1]
    if not (is_edge[before].all() and is_edge[after].all()):
        return None
    if marks.replace(shape.quote.encode() * 2, b"") == expected:  # no mark is inside quotes
        return height
    outside = characters[is_edge[characters] & ~np.logical_xor.accumulate(is_quote)]
    return height if outside.tobytes() == expected else None


def split_text(path: Path, shape: TableShape, size: int) -> list[TableSpan | None]:
    """Spans of about `size` bytes, cut where all text before is plainly one row a line.

    None for a text that is packed or not in UTF-8. What follows a block that is not plain is one
    span. Raises UserError: as `table_text.open_text`.
    """
    spans: list[TableSpan | None] = []
    with table_text.open_text(path) as (file, _, start, verified):
        if verified or not isinstance(getattr(file, "raw", None), io.FileIO):
            return [None]
        place, row, rest, cut = start, 0, b"", TableSpan(start, start, 0)
        while chunk := file.read(table_text.BLOCK):
            rest += chunk
            text = rest[: rest.rfind(b"\n") + 1]
            if not text or count_plain_rows(normalize_line_ends(text), shape) is None:
                break
            place, row, rest = place + len(text), row + text.count(b"\n"), rest[len(text) :]
            if place - cut.start >= size:
                spans.append(cut._replace(stop=place))
                cut = TableSpan(place, place, row)
    end = path.stat().st_size
    if cut.start < end or not spans:
        spans.append(cut._replace(stop=end))
    return spans
