"""Reads the values of a table of samples as its `TableFacts` say that it is written.

The parser of pyarrow reads stretches of rows that are as they should be. Where it stops, or a value
is out of range, the rows are read one by one, which names the line at fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error
from bitimely_core.formats import clocks, sniffer, table_facts, table_layout, tables
from bitimely_core.formats.source import finding_to_error
from bitimely_core.formats.table_rows import TableRow, TextStretch, parse_rows, read_stretches
from bitimely_core.formats.text import ENCODING, UTF8, use_encoding
from bitimely_core.formats.units import LARGEST
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

BLOCK = 1 << 22  # bytes that the parser takes at once
NULLS = sorted(  # all spellings: the parser looks at capitals
    {
        "".join(letters)
        for word in table_layout.MISSING
        for letters in product(*({letter, letter.upper()} for letter in word))
    }
)


class SampleValues(NamedTuple):
    """What was read of a table."""

    values: np.ndarray  # float64 [rows, channels], NaN where a cell is empty
    times: clocks.Times | None  # None: the table has no clock, or it is not asked for
    first: int  # line of the first row (of Parquet: 1)


def read_values(
    path: Path,
    facts: table_facts.TableFacts,
    places: Sequence[int],
    clock: table_facts.Clock | None,
) -> SampleValues:
    """The columns at `places` and the times of the rows.

    Raises UserError: the fault of the first row that has one (not_numeric, non_finite,
    physical_range, row_width, csv_syntax, truncated), since a lost row would shift what follows;
    timestamps for a cell that holds no time.
    """
    timed = clock.places if clock else ()
    wanted = list(dict.fromkeys([*places, *timed]))
    texts = set(timed) if clock and clock.form and clock.form != "stored" else set()
    columns = _read_columns(path, facts, wanted, texts)
    rows = len(next(iter(columns.values()), []))
    values = np.empty((rows, len(places)), np.float64)
    for k, place in enumerate(places):
        values[:, k] = columns[place]
    first = facts.shape.skip + 1 if facts.shape else 1
    times = _read_times(columns, facts, clock, first) if clock and rows else None
    return SampleValues(values, times, first)


def read_texts(path: Path, facts: table_facts.TableFacts, place: int) -> list[str]:
    """The cells of a column as texts, "" where one is empty."""
    import polars as pl

    column = _read_columns(path, facts, [place], {place})[place]
    return list(pl.Series("", column).cast(pl.String).fill_null("").str.strip_chars().to_list())


def _read_columns(
    path: Path, facts: table_facts.TableFacts, wanted: Sequence[int], texts: set[int]
) -> dict[int, np.ndarray | pl.Series]:
    """Place -> float64 [rows], or texts."""
    if facts.shape is None:
        return _read_parquet(path, facts, wanted, texts)
    parts: list[dict[int, np.ndarray | pl.Series]] = []
    latin = facts.shape.encoding == "latin-1" and ENCODING.get() == UTF8
    with use_encoding("latin-1" if latin else ENCODING.get()):
        for stretch in chain.from_iterable(read_stretches(path, facts.shape)):
            part = _parse_fast(stretch, facts, wanted, texts)
            parts.append(part or _parse_stretch(stretch, facts, wanted, texts))
    if len(parts) == 1:
        return parts[0]
    return {place: _join_columns([part[place] for part in parts]) for place in wanted}


def _join_columns(parts: Sequence[np.ndarray | pl.Series]) -> np.ndarray | pl.Series:
    import polars as pl

    texts = [part for part in parts if isinstance(part, pl.Series)]
    return pl.concat(texts) if texts else np.concatenate(parts)


def _parse_fast(
    stretch: TextStretch, facts: table_facts.TableFacts, wanted: Sequence[int], texts: set[int]
) -> dict[int, np.ndarray | pl.Series] | None:
    """The columns by pyarrow; None where a row is at fault, or is not a line."""
    import pyarrow as pa
    import pyarrow.csv

    shape = facts.shape
    assert shape is not None
    names = [str(i) for i in range(shape.width)]
    kinds = {str(i): pa.string() if i in texts else pa.float64() for i in wanted}
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(stretch.text),
            read_options=pa.csv.ReadOptions(
                column_names=names, use_threads=False, block_size=BLOCK
            ),
            parse_options=pa.csv.ParseOptions(delimiter=shape.delimiter, quote_char=shape.quote),
            convert_options=pa.csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(kinds),
                null_values=[*NULLS, *facts.missing],
                decimal_point=shape.decimal,
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException:
        return None
    if table.num_rows != stretch.text.count(b"\n"):
        return None
    return _check_columns({i: table.column(str(i)) for i in wanted}, texts)


def _check_columns(
    columns: dict[int, pa.ChunkedArray], texts: set[int]
) -> dict[int, np.ndarray | pl.Series] | None:
    """The columns as arrays; None where a value is not finite or too large for float32."""
    import polars as pl

    result: dict[int, np.ndarray | pl.Series] = {}
    for place, column in columns.items():
        if place in texts:
            result[place] = pl.Series("", column, pl.String)
            continue
        values = column.to_numpy()
        # NaN of the text "nan" is null before: what is left is infinite
        if column.null_count != np.count_nonzero(np.isnan(values)) or np.isinf(values).any():
            return None
        if np.nanmax(np.abs(values), initial=0.0) > LARGEST:
            return None
        result[place] = values
    return result


def _parse_stretch(
    stretch: TextStretch, facts: table_facts.TableFacts, wanted: Sequence[int], texts: set[int]
) -> dict[int, np.ndarray | pl.Series]:
    """The columns row by row. Raises UserError: see `read_values`."""
    import polars as pl

    shape = facts.shape
    assert shape is not None
    cells: dict[int, list[float]] = {i: [] for i in wanted if i not in texts}
    words: dict[int, list[str]] = {i: [] for i in texts}
    for row in stretch.items or parse_rows(stretch.text.decode(), shape, stretch.row)[0]:
        if isinstance(row, Finding):
            problem = f"line {row.row} {row.problem}"
            action = "a lost row would shift what follows"
            raise input_error(row.code, problem, action, row=row.row)
        for place, column in words.items():
            column.append(row.cells[place].strip())
        for place, numbers in cells.items():
            numbers.append(_read_cell(row, place, facts))
    return {
        **{i: np.array(numbers, np.float64) for i, numbers in cells.items()},
        **{i: pl.Series("", column, pl.String) for i, column in words.items()},
    }


def _read_cell(row: TableRow, place: int, facts: table_facts.TableFacts) -> float:
    """A cell as a number, NaN for a missing one. Raises UserError with row and column."""
    cell = row.cells[place].strip()
    if cell.lower() in table_layout.MISSING or cell in facts.missing:
        return math.nan
    timed = facts.clock.places if facts.clock else ()
    decimal = facts.shape.decimal if facts.shape else "."
    try:
        return _parse_cell(cell, decimal, is_time=place in timed)
    except UserError as error:
        name = facts.columns[place].header or f"column {place + 1}"
        raise finding_to_error(tables.locate_cell(error, row.row, name)) from None


def _parse_cell(cell: str, decimal: str, *, is_time: bool) -> float:
    text = cell.replace(",", ".", 1) if decimal == "," else cell
    if is_time and tables.NUMBER.fullmatch(text):
        return float(text)  # nanoseconds since 1970 are larger than any sample
    value = tables.parse_number(text)
    return math.nan if value is None else value


def _read_parquet(
    path: Path, facts: table_facts.TableFacts, wanted: Sequence[int], texts: set[int]
) -> dict[int, np.ndarray | pl.Series]:
    """The columns of a Parquet file; texts are read as cells of csv."""
    import polars as pl

    clock = facts.clock
    stored = clock.places if clock and clock.form == "stored" else ()
    result: dict[int, np.ndarray | pl.Series] = {}
    careful = []
    for place in wanted:
        series = _load_column(path, facts.columns[place].header)
        if place in stored:
            result[place] = sniffer.to_seconds(series)
        elif place in texts:
            result[place] = series.cast(pl.String)
        else:
            is_time = clock is not None and place in clock.places
            numbers = _take_numbers(series, math.inf if is_time else LARGEST)
            if numbers is None:
                careful.append(place)
            else:
                result[place] = numbers
    if careful:
        names = [facts.columns[i].header for i in careful]
        table = tables.read_number_table(path, names, missing=table_layout.MISSING)
        result |= {place: table[:, k] for k, place in enumerate(careful)}
    return result


def _take_numbers(series: pl.Series, largest: float) -> np.ndarray | None:
    """A column of numbers; None for texts, and for values that are not finite or too large."""
    import polars as pl

    if not series.dtype.is_numeric() and series.dtype != pl.Boolean:
        return None
    values = series.cast(pl.Float64).to_numpy()
    is_sound = not np.isinf(values).any() and np.nanmax(np.abs(values), initial=0.0) <= largest
    return values if is_sound else None


def _load_column(path: Path, header: str) -> pl.Series:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    name = next(name for name in names if name.strip() == header)
    try:
        column = pq.read_table(path, columns=[name], use_threads=False).column(name)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as Parquet ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, problem) from None
    return pl.Series(header, column)


def _read_times(
    columns: dict[int, np.ndarray | pl.Series],
    facts: table_facts.TableFacts,
    clock: table_facts.Clock,
    first: int,
) -> clocks.Times:
    """The times of the rows. Raises UserError: timestamps."""
    import polars as pl

    cells = columns[clock.places[-1]]
    name = facts.columns[clock.places[-1]].header
    if clock.form == "stored":
        seconds = np.asarray(cells)
        filled = seconds[np.isfinite(seconds)]
        start = float(filled[0]) if filled.size else 0.0
        is_absolute = clocks.is_unix(filled[:1], 1.0)
        moment = clocks.scale_numbers(filled[:1], "s").start if is_absolute else None
        return clocks.Times(np.round(seconds - start, 6), 0.0 if moment else start, moment)
    if not clock.form:
        numbers = np.asarray(cells, np.float64)
        return clocks.scale_numbers(numbers, clock.unit)
    texts = pl.Series("", cells, pl.String)
    if len(clock.places) > 1:
        texts = pl.Series("", columns[clock.places[0]], pl.String) + " " + texts
    times = clocks.parse_texts(texts, clock.form)
    if isinstance(times, int):
        problem = f"the cell of line {first + times} is no time like those above"
        raise input_error(Reason.TIMESTAMPS, problem, field=name, row=first + times)
    return times
