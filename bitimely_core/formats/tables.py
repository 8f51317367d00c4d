"""Reads tables as text: csv and its like (also packed), Parquet, and those of Stata, SAS and SPSS.

Every fault is a finding with its row and column. Types are never guessed: that would merge the
patients '000123' and '123'. Every cell is text until the caller parses it as a number, a row has
the width of the header or is dropped, and an open quote costs one row, not the rest of the file.
Cells are never shown in messages: they hold ids and values of patients.

`read_frames` gives long tables block by block, `read_rows` the same row by row.
"""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats.parquet import (
    TextBatch,
    is_parquet,
    read_batches,
    read_column_types,
    split_row_groups,
)
from bitimely_core.formats.source import finding_to_error, translate_read_errors
from bitimely_core.formats.stat_files import is_stat_file, read_stat_batches, read_stat_types
from bitimely_core.formats.table_rows import TableRow as TableRow
from bitimely_core.formats.table_rows import (
    TableShape,
    TextStretch,
    parse_header,
    parse_rows,
    read_stretches,
    split_text,
)
from bitimely_core.formats.table_text import TableSpan, read_first_line
from bitimely_core.formats.text import list_names
from bitimely_core.formats.units import LARGEST, MAX_FLOAT32
from bitimely_core.types import group_by

if TYPE_CHECKING:
    import polars as pl


NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
INTEGER = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
BATCH = 1 << 19  # rows of a table that is no text, in one frame
PLAIN = str.maketrans("", "", "0123456789+-.eE, ")


# --- the table


def read_names(path: Path, *, delimiter: str = ",") -> tuple[str, ...]:
    """Names of the columns, without blanks around them.

    Raises UserError: empty_file, encoding, csv_syntax, corrupt, truncated, expansion_limit,
    io_error.
    """
    return _read_header(path, delimiter)[0]


def _read_header(path: Path, delimiter: str) -> tuple[tuple[str, ...], TableShape]:
    """Names of the columns, and how the rows below are written."""
    with translate_read_errors(path):
        if is_binary(path):
            return tuple(read_types(path)), TableShape()
        row, line, above = read_first_line(path)
        names = parse_header(line, row, delimiter)
        return names, TableShape(delimiter=delimiter, skip=above, header=row, width=len(names))


def is_binary(path: Path) -> bool:
    """Whether a table is no text, by its ending."""
    return is_parquet(path) or is_stat_file(path)


def read_types(path: Path) -> dict[str, str]:
    """Type of each column as stored: 'text' throughout a csv file, the Arrow type's name in a
    Parquet file, 'text' or 'number' in one of Stata, SAS or SPSS.

    A code stored as a double has lost its zeros, whatever its text looks like.
    """
    if is_parquet(path):
        return read_column_types(path)
    if is_stat_file(path):
        return read_stat_types(path)
    return dict.fromkeys(read_names(path), "text")


def parse_table(text: str) -> tuple[tuple[str, ...], list[TableRow | Finding]]:
    """Names of the columns, rows and faults of csv in memory. Raises UserError: as `read_names`."""
    text = text.replace("\r\n", "\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    first = re.search(r"^.*\S.*$", text, re.MULTILINE)
    if first is None:
        raise input_error(Reason.EMPTY_FILE, "holds nothing but blank lines")
    row = 1 + text.count("\n", 0, first.start())
    names = parse_header(first[0], row, ",")
    items, _ = parse_rows(text[first.end() + 1 :], TableShape(width=len(names)), row)
    return names, items


def read_rows(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    key: Sequence[str] = (),
    delimiter: str = ",",
) -> Iterator[TableRow | Finding]:
    """All rows of a table.

    Args:
        path: .csv, .csv.gz (or another name: csv is assumed, gzip is recognised by its first bytes)
            or .parquet.
        columns: names of the columns to return, in this order; None: all.
        key: names of the columns that identify a row. A repeated row that is equal in all
            columns is dropped with a warning (duplicates); of several different ones with one key
            none is kept (duplicate_key), since the right one is unknown.
        delimiter: of csv.

    Yields: One item a row, in the order of the file: the row, or a finding with its number
        when it must be dropped, of level error for a fault (row_width, csv_syntax, encoding,
        truncated, identifier, duplicate_key) and of level warning for an exact duplicate.

    Raises:
        UserError: header (absent, or a wanted name twice), schema (columns missing: the message
            names those found and those wanted), identifier (most rows share their key with rows
            that differ), and as `read_names`.
    """
    names, shape = _read_header(path, delimiter)
    with translate_read_errors(path):
        places = range(len(names)) if columns is None else _find_columns(names, columns)
        if not key:
            yield from _read_items(path, shape, places)
            return
        for item in _read_unique_rows(path, names, shape, _find_columns(names, key)):
            if isinstance(item, TableRow):
                item = TableRow(item.row, tuple(item.cells[i] for i in places))
            yield item


def _read_items(
    path: Path, shape: TableShape, places: Sequence[int]
) -> Iterator[TableRow | Finding]:
    """The rows and faults of a table in the order of the file; the cells of columns at `places`."""
    import polars as pl

    names = list(map(str, range(len(places))))
    for block in _read_blocks(path, FrameColumns(shape, places, names)):
        rows = block.frame.with_columns(pl.col(pl.String).fill_null("")).iter_rows()
        items: Iterator[TableRow | Finding] = (TableRow(cells[0], cells[1:]) for cells in rows)
        yield from heapq.merge(items, block.faults, key=lambda item: item.row or 0)


def read_number_table(
    path: Path, columns: Sequence[str], *, missing: Collection[str]
) -> np.ndarray:
    """Samples of a table of numbers, float64 [rows, columns].

    NaN for empty cells and for the texts `missing` (in lower case).

    Raises:
        UserError: as `read_rows` and `parse_number`; the fault of the first row that has one, since
            a lost row would shift all that follow.
    """
    cells: array[float] = array("d")
    for row in read_rows(path, columns):
        if isinstance(row, Finding):
            requirement = "a lost row would shift what follows"
            raise input_error(row.code, row.problem, requirement, row=row.row)
        for name, cell in zip(columns, row.cells, strict=True):
            try:
                value = None if cell.strip().lower() in missing else parse_number(cell)
            except UserError as error:
                raise finding_to_error(locate_cell(error, row.row, name)) from None
            cells.append(math.nan if value is None else value)
    return np.array(cells, np.float64).reshape(-1, len(columns))


def _read_unique_rows(
    path: Path, names: Sequence[str], shape: TableShape, key: Sequence[int]
) -> Iterator[TableRow | Finding]:
    """All columns of the rows with a key of their own, and the faults of the others.

    Two passes: the first keeps a hash of key and cells of each row. Raises UserError: identifier,
    when most rows share their key with rows that differ.
    """
    columns = range(len(names))
    field = ", ".join(names[i] for i in key)
    ambiguous = _find_ambiguous(_read_items(path, shape, columns), key, field)
    used: set[bytes] = set()
    for item in _read_items(path, shape, columns):
        if isinstance(item, Finding):
            yield item
        else:
            yield _check_key(item, key, field, ambiguous, used) or item


def _find_ambiguous(
    items: Iterable[TableRow | Finding], key: Sequence[int], field: str
) -> set[bytes]:
    """Hashes of the keys of rows that differ. Raises UserError: identifier."""
    first: dict[bytes, bytes] = {}
    ambiguous: set[bytes] = set()
    counts: Counter[bytes] = Counter()
    for item in items:
        if isinstance(item, TableRow):
            mark, digest = _hash_key(item, key), _hash_cells(item.cells)
            counts[mark] += 1
            if first.setdefault(mark, digest) != digest:
                ambiguous.add(mark)
    if len(ambiguous) > 1 and 2 * sum(counts[mark] for mark in ambiguous) > counts.total():
        rows = f"most of the {counts.total()} rows"
        problem = f"{rows} share their {safe_text(field)} with a row that differs"
        requirement = "it identifies no row: are columns swapped?"
        raise input_error(Reason.IDENTIFIER, problem, requirement, field=field)
    return ambiguous


def _check_key(
    row: TableRow, key: Sequence[int], field: str, ambiguous: set[bytes], used: set[bytes]
) -> Finding | None:
    """Why a row is dropped, None where it is used; its key is added to those `used`."""
    mark = _hash_key(row, key)
    if not all(row.cells[i].strip() for i in key):
        problem = f"the value in row {row.row} is empty"
        return Finding(Reason.IDENTIFIER, problem, "every row needs one", field=field, row=row.row)
    if mark in ambiguous:
        problem = f"the value in row {row.row} is also in other rows, which differ"
        return Finding(
            Reason.DUPLICATE_KEY, problem, "none of them is used", field=field, row=row.row
        )
    if mark in used:
        return input_warning(Reason.DUPLICATES, "repeats a row above", "used once", row=row.row)
    used.add(mark)
    return None


def _hash_key(row: TableRow, key: Sequence[int]) -> bytes:
    return _hash_cells(row.cells[i].strip() for i in key)


def _hash_cells(cells: Iterable[str]) -> bytes:
    return blake2b("\0".join(cells).encode(), digest_size=16).digest()


def _find_columns(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Positions of the wanted columns. Raises UserError: header, schema."""
    for name in wanted:
        if names.count(name) > 1:
            problem = f"the column {safe_text(name)} occurs {names.count(name)} times"
            raise input_error(Reason.HEADER, problem, "expected once", field=name)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise _missing_columns_error(names, wanted, missing)
    return list(map(names.index, wanted))


def _missing_columns_error(
    names: Sequence[str], wanted: Sequence[str], missing: Sequence[str]
) -> UserError:
    """Names found are shown only when the first line is the header beyond doubt: else it holds a
    patient's row.
    """
    folded = {name.casefold(): name for name in names}
    respelled = [name for name in missing if name.casefold() in folded]
    if respelled:
        first = respelled[0]
        spelling = safe_text(folded[first.casefold()])
        rest = f", and {len(respelled) - 1} more" if respelled[1:] else ""
        return input_error(
            Reason.SCHEMA,
            f"the column {safe_text(first)} is written {spelling}{rest}",
            "case counts in this table",
            "Rename the columns in its header",
            field=first,
            row=1,
        )
    if len(missing) == len(wanted):
        problem = f"the first line names none of the columns wanted ({list_names(wanted, 5)})"
        requirement = "is the header line absent, or the separator another?"
        return input_error(Reason.HEADER, problem, requirement)
    columns, verb = ("columns", "are") if missing[1:] else ("column", "is")
    problem = f"the {columns} {list_names(missing)} {verb} missing"
    return input_error(Reason.SCHEMA, problem, f"found {list_names(names)}", field=missing[0])


def group_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings of one code, level and file as one: the first, with their number.

    Up to five of their rows are examples.
    """
    groups = group_by(findings, lambda finding: (finding.code, finding.level, finding.file))
    return list(map(_join_findings, groups.values()))


def _join_findings(same: Sequence[Finding]) -> Finding:
    rest = f" (and {len(same) - 1} more rows)" if same[1:] else ""
    rows = [str(finding.row) for finding in same if finding.row is not None]
    return replace(
        same[0],
        problem=same[0].problem + rest,
        count=sum(finding.count for finding in same),
        examples=tuple(rows[:5]),
    )


# --- frames


class FrameColumns(NamedTuple):
    """The columns of a table that become those of a frame."""

    shape: TableShape
    places: Sequence[int]  # in the table
    names: Sequence[str]
    categories: Collection[str] = ()  # names of those with few distinct texts


class TableBlock(NamedTuple):
    """A stretch of a table."""

    # `row` Int64 (as of TableRow) and the requested columns, String, null where a cell is empty
    frame: pl.DataFrame
    faults: Sequence[Finding] = ()  # rows that are not in the frame, of level error
    has_blanks: bool = True  # whether any cell may hold one


def split_table(path: Path, size: int, *, delimiter: str = ",") -> list[TableSpan | None]:
    """Spans of about `size` bytes for `read_frames`; one None where a table cannot be split.

    Raises UserError: as `read_names`.
    """
    _, shape = _read_header(path, delimiter)
    if is_parquet(path):
        return split_row_groups(path, size)
    if is_stat_file(path):
        return [None]
    with translate_read_errors(path):
        return split_text(path, shape, size)


def read_frames(
    path: Path,
    columns: Sequence[str],
    *,
    delimiter: str = ",",
    quotes: bool = True,
    span: TableSpan | None = None,
    categories: Collection[str] = (),
) -> Iterator[TableBlock]:
    """A long table in stretches of about 16 MiB, every cell text, in bounded memory.

    Args:
        path: as for `read_rows`.
        columns: names of the columns to return, in this order.
        delimiter: of csv.
        quotes: False: a quote is an ordinary character (tab-separated exports of vocabularies).
        span: of `split_table`, to read only that.
        categories: columns of csv with few distinct texts, read as Categorical, each block with its
            own.

    Yields:
        Blocks, in the order of the file. Of a Parquet file every column is given as
        text: dates ISO, time stamps with a zone as the civil time there.

    Raises:
        UserError: as `read_rows`; csv_syntax when the independent count of the rows differs from
            what was read.
    """
    names, shape = _read_header(path, delimiter)
    shape = shape if quotes else shape._replace(quote="")
    with translate_read_errors(path):
        places = _find_columns(names, columns)
        yield from _read_blocks(path, FrameColumns(shape, places, columns, categories), span)


def _read_blocks(
    path: Path, columns: FrameColumns, span: TableSpan | None = None
) -> Iterator[TableBlock]:
    if is_stat_file(path):
        yield from _make_frames(read_stat_batches(path, columns.places, BATCH), columns.names)
    elif is_parquet(path):
        yield from _make_frames(read_batches(path, columns.places, BATCH, span), columns.names)
    else:
        for stretches in read_stretches(path, columns.shape, span):
            yield _make_block(stretches, columns)


def _make_frames(batches: Iterable[TextBatch], columns: Sequence[str]) -> Iterator[TableBlock]:
    import polars as pl

    for batch in batches:
        first = batch.before + 1
        rows = pl.int_range(first, first + batch.rows, dtype=pl.Int64, eager=True).alias("row")
        texts = [
            pl.Series(name, column, pl.String)
            for name, column in zip(columns, batch.columns, strict=True)
        ]
        yield TableBlock(pl.DataFrame([rows, *texts]))


def _make_block(stretches: Sequence[TextStretch], columns: FrameColumns) -> TableBlock:
    """The rows and faults of a block of text."""
    import polars as pl

    category = pl.Categorical()
    if hasattr(pl, "Categories"):  # its texts are of this block alone
        category = pl.Categorical(pl.Categories.random())
    casts = [pl.col(name).cast(category) for name in columns.categories]
    frames = [
        _make_frame(stretch.items, columns)
        if stretch.height is None
        else _parse_plain(stretch, columns, category)
        for stretch in stretches
    ]
    items = chain.from_iterable(stretch.items for stretch in stretches)
    return TableBlock(
        pl.concat([frame.with_columns(casts) for frame in frames]),
        [item for item in items if isinstance(item, Finding)],
        any(b" " in stretch.text or b"\t" in stretch.text for stretch in stretches),
    )


def _make_frame(items: Sequence[TableRow | Finding], columns: FrameColumns) -> pl.DataFrame:
    """The frame of the rows among these items."""
    import polars as pl

    rows = [item for item in items if isinstance(item, TableRow)]
    texts: dict[str, list[int] | list[str | None]] = {"row": [row.row for row in rows]}
    for name, place in zip(columns.names, columns.places, strict=True):
        texts[name] = [row.cells[place] or None for row in rows]
    return pl.DataFrame(texts, schema={"row": pl.Int64, **dict.fromkeys(columns.names, pl.String)})


def _parse_plain(
    stretch: TextStretch, columns: FrameColumns, category: pl.Categorical
) -> pl.DataFrame:
    """The frame of a text in which each line is a row. Raises UserError: csv_syntax."""
    import polars as pl

    shape = columns.shape
    schema: dict[str, pl.DataType | type[pl.DataType]] = {}
    schema |= {str(i): pl.String for i in range(shape.width)}
    named = []
    for place, name in zip(columns.places, columns.names, strict=True):
        if name in columns.categories:
            schema[str(place)] = category
        named.append(pl.col(str(place)).alias(name))
    quote = shape.quote if shape.quote and shape.quote.encode() in stretch.text else None
    frame = pl.read_csv(
        stretch.text,
        has_header=False,
        columns=sorted(set(columns.places)),
        schema=schema,
        separator=shape.delimiter,
        quote_char=quote,
    )
    if frame.height != stretch.height:
        problem = f"{stretch.height} rows were counted, {frame.height} read"
        raise input_error(Reason.CSV_SYNTAX, problem, "expected the same number")
    first = stretch.row + 1
    number = pl.int_range(first, first + frame.height, dtype=pl.Int64).alias("row")
    return frame.select(number, *named)


def refuse_faults(block: TableBlock, file: str) -> None:
    """Refuse a table with a malformed record: its other records cannot be trusted either.

    Raises UserError: csv_syntax, row_width, truncated.
    """
    if block.faults:
        first, *others = (finding.at(file) for finding in group_findings(block.faults))
        wanted = first.requirement if first.code == Reason.ROW_WIDTH else "expected a record"
        action = "Correct the table; none of it is used"
        raise input_error(
            first.code, first.problem, wanted, action, file=file, row=first.row, details=others
        )


def strip_blanks(column: pl.Expr) -> pl.Expr:
    """Text without surrounding blanks; null where empty."""
    import polars as pl

    text = column.str.strip_chars()
    return pl.when(text != "").then(text)


def read_table(path: Path, file: str, columns: Mapping[str, str], mark: str = ",") -> pl.DataFrame:
    """A table that fits in memory: `row` and the columns by key, text without surrounding blanks,
    null where empty.

    Args:
        path: as for `read_frames`.
        file: its name in messages.
        columns: key -> name in the header.
        mark: delimiter of csv.

    Raises:
        UserError: as `refuse_faults` and `read_frames`.
    """
    import polars as pl

    texts = [strip_blanks(pl.col(name)).alias(key) for key, name in columns.items()]
    parts = []
    for block in read_frames(path, tuple(dict.fromkeys(columns.values())), delimiter=mark):
        refuse_faults(block, file)
        parts.append(block.frame.select("row", *texts))
    return pl.concat(parts)


def read_option_table(
    path: Path, columns: Sequence[str], option: str, wanted: str, *, integers: Collection[str] = ()
) -> pl.DataFrame:
    """The table that an option names, as by `read_table`; the columns `integers` are Int64.

    `wanted` describes it in messages.

    Raises UserError (config, exit 2) with the row, where the table or a number cannot be read.
    """
    import polars as pl

    try:
        frame = read_table(path, str(path), {name: name for name in columns})
        for name in integers:
            text, number = frame[name], frame[name].cast(pl.Int64, strict=False)
            if (wrong := frame["row"].filter(text.is_not_null() & number.is_null())).len():
                problem = f"the cell of row {wrong[0]} is not a whole number"
                raise input_error(
                    Reason.NOT_NUMERIC, problem, f"expected one in {name}", row=wrong[0]
                )
            frame = frame.with_columns(number)
    except UserError as error:
        if error.exit_code != Exit.REFUSED:
            raise
        requirement = "; ".join(filter(None, (error.requirement, wanted)))
        raise usage_error(
            error.problem, requirement, error.hint, file=str(path), field=option, row=error.row
        ) from error
    return frame


# --- cells


def parse_number(text: str) -> float | None:
    """A cell as a finite number; None for an empty one. Raises UserError: not_numeric, non_finite,
    physical_range, without its text.
    """
    text = text.strip()
    if not text:
        return None
    if NOT_FINITE.fullmatch(text):
        raise input_error(Reason.NON_FINITE, "is not finite", "expected a finite number")
    if not NUMBER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is not a number", "expected a finite number")
    if abs(value := float(text)) > MAX_FLOAT32:
        raise input_error(Reason.NON_FINITE, "is not finite in float32", "expected a finite number")
    if abs(value) > LARGEST:
        raise input_error(
            Reason.PHYSICAL_RANGE,
            f"is beyond {LARGEST:g}",
            "expected a value whose square float32 holds",
        )
    return value


def parse_integer(text: str) -> int | None:
    """A cell as an integer ('5' and '5.0', as tools write columns with gaps); None for an empty
    one.

    Raises UserError: not_numeric, without the cell's text.
    """
    text = text.strip()
    if not text:
        return None
    if not INTEGER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is not a whole number", "expected one")
    return int(text.split(".")[0])


def parse_numbers(row: TableRow, columns: Sequence[str]) -> np.ndarray | Finding:
    """All cells of a row as finite numbers, float64 [len(cells)]; `columns` are their names.

    A finding of level error instead for the first cell that is missing_values, not_numeric,
    non_finite or beyond the physical_range.
    """
    plain = ",".join(row.cells)
    if not plain.translate(PLAIN):
        with suppress(ValueError):
            values = np.array(list(map(float, row.cells)), np.float64)
            if np.abs(values).max(initial=0.0) <= LARGEST:
                return values
    numbers: list[float] = []
    for name, cell in zip(columns, row.cells, strict=True):
        try:
            value = parse_number(cell)
            if value is None:
                raise input_error(Reason.MISSING_VALUES, "is empty", "expected a number")
        except UserError as error:
            return locate_cell(error, row.row, name)
        numbers.append(value)
    return np.array(numbers, np.float64)


def locate_cell(error: UserError, row: int, column: str) -> Finding:
    """The fault of a cell, as `parse_number` raises it, with its row and column."""
    problem = f"the cell of row {row} {error.problem}"
    return replace(error.finding, problem=problem, field=column, row=row)
