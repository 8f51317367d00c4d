"""Reads long csv tables as frames of text, in blocks of about 16 MiB.

Pieces of a block in which each line is plainly a record go to the parser of polars, all others
through the grammar of `csv_text`. Both give the same cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_error
from bitimely_core.formats.csv_text import (
    CsvShape,
    ParsedRecord,
    RecordCounter,
    RecordParser,
    TableSpan,
    number_lines,
    read_blocks,
    split_plain_blocks,
)

if TYPE_CHECKING:
    import polars as pl


class TableRow(NamedTuple):
    """One record of a table."""

    row: int  # csv: the line on which it begins, the header is line 1; Parquet: the row, from 1
    cells: tuple[str, ...]  # in the order of the requested columns


class TableBlock(NamedTuple):
    """A stretch of a table."""

    # `row` Int64 (as of TableRow) and the requested columns, String, null where a cell is empty
    frame: pl.DataFrame
    faults: list[Finding]  # records that are not in the frame, of level error
    seen: int  # records, counted without the parser that made the frame
    blanks: bool = True  # whether any cell holds one


@dataclass(frozen=True)
class FrameColumns:
    """The columns of a csv table that become those of a frame."""

    shape: CsvShape
    places: Sequence[int]  # in the table
    names: Sequence[str]
    categories: Collection[str]  # names of those with few distinct texts


def make_row(record: ParsedRecord) -> TableRow | Finding:
    """A record of csv text as a row, or its fault; a line without an end that is too short was cut
    off.
    """
    row, cells, ended = record
    if not isinstance(cells, UserError):
        return TableRow(row, tuple(cells))
    is_cut = not ended and cells.code == Reason.ROW_WIDTH
    code = Reason.TRUNCATED if is_cut else cells.code
    return Finding(code, cells.problem, cells.requirement, row=row)


def read_csv_frames(
    path: Path, columns: FrameColumns, span: TableSpan | None
) -> Iterator[TableBlock]:
    """The table, or a span of it; see `tables.read_frames`."""
    parser, counter = RecordParser(columns.shape), RecordCounter(columns.shape)
    row = 0 if span is None else span.row  # lines so far
    is_below_header = row > 0
    for text, last in read_blocks(path, span):
        if not is_below_header:
            end = _find_header_end(text)
            is_below_header = bool(text[:end].strip())
            row += text.count(b"\n", 0, end)
            text = text[end:]
        parts: list[pl.DataFrame] = []
        faults: list[Finding] = []
        seen, category = 0, _make_category()
        for piece, plain in split_plain_blocks(text, columns.shape):
            if plain is not None and not parser.waiting and not counter.waiting:
                parts.append(_parse_plain_block(piece, row, plain, columns, category))
                row += plain
                seen += plain
            else:
                lines = number_lines(piece, row)
                row += len(lines)
                seen += counter.feed(lines)
                _collect_records(parser.feed(lines), columns, parts, faults)
        if last:
            seen += counter.finish()
            _collect_records(parser.finish(), columns, parts, faults)
        has_blanks = b" " in text or b"\t" in text
        yield TableBlock(_join_parts(parts, columns, category), faults, seen, has_blanks)


def _find_header_end(text: bytes) -> int:
    """The place behind the first line that is not blank."""
    blank = len(text) - len(text.lstrip())
    return text.find(b"\n", blank) + 1 or len(text)


def _collect_records(
    records: Iterable[ParsedRecord],
    columns: FrameColumns,
    parts: list[pl.DataFrame],
    faults: list[Finding],
) -> None:
    """Add the valid records to `parts` as a frame, and the others to `faults`."""
    rows: list[TableRow] = []
    for row in map(make_row, records):
        if isinstance(row, Finding):
            faults.append(row)
        else:
            rows.append(row)
    if rows:
        parts.append(_make_frame(rows, columns))


def _make_frame(rows: Sequence[TableRow], columns: FrameColumns) -> pl.DataFrame:
    import polars as pl

    data: dict[str, list[int] | list[str | None]] = {"row": [row.row for row in rows]}
    for name, place in zip(columns.names, columns.places, strict=True):
        data[name] = [row.cells[place] or None for row in rows]
    return pl.DataFrame(data, schema={"row": pl.Int64, **dict.fromkeys(columns.names, pl.String)})


def _join_parts(
    parts: Sequence[pl.DataFrame], columns: FrameColumns, category: pl.Categorical
) -> pl.DataFrame:
    import polars as pl

    if not parts:
        return _make_frame([], columns)
    casts = [pl.col(name).cast(category) for name in columns.categories]
    return pl.concat([part.with_columns(casts) for part in parts])


def _make_category() -> pl.Categorical:
    """The type of columns with few distinct texts; their texts are of one block, if polars can."""
    import polars as pl

    if hasattr(pl, "Categories"):
        return pl.Categorical(pl.Categories.random())
    return pl.Categorical()


def _parse_plain_block(
    text: bytes, row: int, height: int, columns: FrameColumns, category: pl.Categorical
) -> pl.DataFrame:
    """The frame of a text in which each of `height` lines is a record; `row` lines precede it."""
    import polars as pl

    width, delimiter, quotes = columns.shape
    schema: dict[str, pl.DataType | type[pl.DataType]] = {str(i): pl.String for i in range(width)}
    named = []
    for place, name in zip(columns.places, columns.names, strict=True):
        if name in columns.categories:
            schema[str(place)] = category
        named.append(pl.col(str(place)).alias(name))
    frame = pl.read_csv(
        text,
        has_header=False,
        columns=sorted(set(columns.places)),
        schema=schema,
        separator=delimiter,
        quote_char='"' if quotes and b'"' in text else None,
    )
    if frame.height != height:
        raise count_error(height, frame.height)
    number = pl.int_range(row + 1, row + 1 + height, dtype=pl.Int64).alias("row")
    return frame.select(number, *named)


def count_error(counted: int, read: int) -> UserError:
    """The error of two ways to count records that differ."""
    problem = f"{counted} records were counted, {read} read"
    return input_error(Reason.CSV_SYNTAX, problem, "expected the same number")
