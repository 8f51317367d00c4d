"""Reads the values of a table of samples as its `TableFacts` say that it is written.

The parser of pyarrow reads stretches of rows that are as they should be. Where it stops, or a value
is out of range, the rows are read one by one, which names the line at fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error
from bitimely_core.formats import clocks, sniffer, table_facts, table_layout, tables
from bitimely_core.formats.source import finding_to_error
from bitimely_core.formats.table_edges import MOST_LINES, count_footer
from bitimely_core.formats.table_rows import (
    TableRow,
    TableShape,
    TextStretch,
    parse_rows,
    read_stretches,
)
from bitimely_core.formats.text import ENCODING, UTF8, use_encoding
from bitimely_core.formats.units import LARGEST
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import polars as pl

MISSING_HINT = (
    "If such cells hold no value, write their texts into [[files]] of --map: "
    'missing = ["<0.1", "low"], and so on'
)
REPEATED_HINT = """The line repeats the names of the columns: remove it where the recording \
goes on, cut the file where another one begins"""
BLOCK = 1 << 22  # bytes that the parser takes at once
NULLS = sorted(  # all spellings: the parser looks at capitals
    {
        "".join(letters)
        for word in table_layout.MISSING
        for letters in product(*({letter, letter.upper()} for letter in word))
    }
)


class WantedColumns(NamedTuple):
    """Columns of a table by their places."""

    places: Sequence[int]
    texts: set[int]  # those that are read as text


class SampleValues(NamedTuple):
    """What was read of a table."""

    values: np.ndarray  # float64 [rows, channels], NaN where a cell is empty
    times: clocks.Times | None  # None: the table has no clock, or it is not asked for
    first: int  # line of the first row (of Parquet: 1)
    below: int = 0  # lines below the rows that are none


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
    columns = WantedColumns(
        list(dict.fromkeys([*places, *timed])),
        set(timed) if clock and clock.form not in {"", "stored", table_facts.INTERVALS} else set(),
    )
    frame, below = _read_columns(path, facts, columns)
    values = np.empty((frame.height, len(places)), np.float64)
    for k, place in enumerate(places):
        values[:, k] = frame[str(place)].to_numpy()
    first = facts.shape.skip + 1 if facts.shape else 1
    times = _read_times(frame, facts, clock, first) if clock and frame.height else None
    return SampleValues(values, times, first, below)


def read_texts(path: Path, facts: table_facts.TableFacts, place: int) -> list[str]:
    """The cells of a column as texts, "" where one is empty."""
    frame, _ = _read_columns(path, facts, WantedColumns([place], {place}))
    return list(frame[str(place)].fill_null("").str.strip_chars().to_list())


def _read_columns(
    path: Path, facts: table_facts.TableFacts, columns: WantedColumns
) -> tuple[pl.DataFrame, int]:
    """The columns, each called by its place: Float64, or String; and the number of lines below the
    rows, which are left out.
    """
    import polars as pl

    shape = facts.shape
    if shape is None:
        return _read_parquet(path, facts, columns), 0
    parts: list[pl.DataFrame] = []
    below = 0
    latin = shape.encoding == "latin-1" and ENCODING.get() == UTF8
    with use_encoding("latin-1" if latin else ENCODING.get()):
        stretches = chain.from_iterable(read_stretches(path, shape))
        for stretch, count in _drop_footer(stretches, facts.columns, shape):
            part = _parse_fast(stretch, shape, facts.missing, columns)
            parts.append(_parse_stretch(stretch, shape, facts, columns) if part is None else part)
            below = max(below, count)
    return pl.concat(parts), below


def _drop_footer(
    stretches: Iterable[TextStretch], columns: Sequence[table_facts.Column], shape: TableShape
) -> Iterator[tuple[TextStretch, int]]:
    """The stretches of a table without the lines below its rows; with the last one their number."""
    waiting: list[TextStretch] = []  # the last line may be a stretch of its own
    for stretch in stretches:
        waiting.append(stretch)
        if len(waiting) > 2:
            yield waiting.pop(0), 0
    text = b"".join(stretch.text for stretch in waiting)
    tail = text.rsplit(b"\n", MOST_LINES)[-MOST_LINES:]
    count = count_footer([line.decode() for line in tail], columns, shape)
    below = tail[len(tail) - count :]
    size = len(text) - len(b"\n".join(below))
    for stretch in waiting:
        if size < len(stretch.text):
            stretch = TextStretch(stretch.row, stretch.text[:size], None, [])
        yield stretch, sum(bool(line.strip()) for line in below)
        size = max(0, size - len(stretch.text))


def _parse_fast(
    stretch: TextStretch, shape: TableShape, missing: Sequence[str], columns: WantedColumns
) -> pl.DataFrame | None:
    """The columns by pyarrow; None where a row is at fault, or is not a line."""
    import polars as pl
    import pyarrow as pa
    import pyarrow.csv

    kinds = {str(i): pa.string() if i in columns.texts else pa.float64() for i in columns.places}
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(stretch.text),
            read_options=pa.csv.ReadOptions(
                column_names=list(map(str, range(shape.width))), use_threads=False, block_size=BLOCK
            ),
            parse_options=pa.csv.ParseOptions(delimiter=shape.delimiter, quote_char=shape.quote),
            convert_options=pa.csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(kinds),
                null_values=[*NULLS, *missing],
                decimal_point=shape.decimal,
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException:
        return None
    frame = pl.DataFrame(table)
    is_sound = frame.height == stretch.text.count(b"\n") and all(
        _are_finite(column, LARGEST) for column in frame.select(pl.col(pl.Float64))
    )
    return frame if is_sound else None


def _are_finite(column: pl.Series, largest: float) -> bool:
    """Whether no number of a column is NaN, infinite or larger than this."""
    return bool((column.is_finite() & (column.abs() <= largest)).all())


def _parse_stretch(
    stretch: TextStretch, shape: TableShape, facts: table_facts.TableFacts, columns: WantedColumns
) -> pl.DataFrame:
    """The columns row by row. Raises UserError: see `read_values`."""
    import polars as pl

    rows: list[list[str | float]] = []
    for row in stretch.items or parse_rows(stretch.text.decode(), shape, stretch.row)[0]:
        if isinstance(row, Finding):
            problem = f"line {row.row} {row.problem}"
            action = "a lost row would shift what follows"
            hint = "Remove or complete the line"
            raise input_error(row.code, problem, action, hint, row=row.row)
        rows.append(
            [
                row.cells[place].strip()
                if place in columns.texts
                else _read_cell(row, place, facts)
                for place in columns.places
            ]
        )
    schema = {str(i): pl.String if i in columns.texts else pl.Float64 for i in columns.places}
    return pl.DataFrame(rows, schema, orient="row")


def _read_cell(row: TableRow, place: int, facts: table_facts.TableFacts) -> float:
    """A cell as a number, NaN for a missing one. Raises UserError with row and column."""
    cell = row.cells[place].strip()
    if cell.lower() in table_layout.MISSING or cell in facts.missing:
        return math.nan
    if facts.shape and facts.shape.decimal == ",":
        cell = cell.replace(",", ".", 1)
    if facts.clock and place in facts.clock.places and tables.NUMBER.fullmatch(cell):
        return float(cell)  # nanoseconds since 1970 are larger than any sample
    try:
        value = tables.parse_number(cell)
    except UserError as error:
        name = facts.columns[place].header or f"column {place + 1}"
        fault = tables.locate_cell(error, row.row, name)
        fault = replace(fault, hint=REPEATED_HINT if cell == name else MISSING_HINT)
        raise finding_to_error(fault) from None
    return math.nan if value is None else value


def _read_parquet(
    path: Path, facts: table_facts.TableFacts, columns: WantedColumns
) -> pl.DataFrame:
    """The columns of a Parquet file; texts are read as cells of csv."""
    import polars as pl

    result: dict[str, pl.Series] = {}
    careful = []
    for place in columns.places:
        series = _convert_column(
            _load_column(path, facts.columns[place].header), place, facts, columns
        )
        if series is None:
            careful.append(place)
        else:
            result[str(place)] = series
    if careful:
        names = [facts.columns[place].header for place in careful]
        table = tables.read_number_table(path, names, missing=table_layout.MISSING)
        result |= {str(place): pl.Series(table[:, k]) for k, place in enumerate(careful)}
    return pl.DataFrame(result)


def _convert_column(
    series: pl.Series, place: int, facts: table_facts.TableFacts, columns: WantedColumns
) -> pl.Series | None:
    """A column as its type gives it: seconds, texts, or numbers with null for the missing ones.

    None: its cells are read as those of csv.
    """
    import polars as pl

    clock = facts.clock
    is_timed = clock is not None and place in clock.places
    if is_timed and clock and clock.form == "stored":
        return pl.Series(sniffer.to_seconds(series))
    if place in columns.texts:
        return series.cast(pl.String)
    if not (series.dtype.is_numeric() or series.dtype == pl.Boolean):
        return None
    numbers = series.cast(pl.Float64).fill_nan(None)
    return numbers if _are_finite(numbers, math.inf if is_timed else LARGEST) else None


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
    frame: pl.DataFrame, facts: table_facts.TableFacts, clock: table_facts.Clock, first: int
) -> clocks.Times:
    """The times of the rows. Raises UserError: timestamps."""
    *dates, cells = (frame[str(place)] for place in clock.places)
    name = facts.columns[clock.places[-1]].header
    if clock.form == "stored":
        seconds = cells.to_numpy()
        filled = seconds[np.isfinite(seconds)]
        start = float(filled[0]) if filled.size else 0.0
        is_absolute = clocks.is_unix(filled[:1], 1.0)
        moment = clocks.scale_numbers(filled[:1], "s").start if is_absolute else None
        return clocks.Times(np.round(seconds - start, 6), 0.0 if moment else start, moment)
    if clock.form == table_facts.INTERVALS:
        intervals = cells.to_numpy() * clocks.measure_unit(clock.unit)
        seconds = np.nancumsum(intervals)
        return clocks.Times(seconds - seconds[0], float(seconds[0]), None)
    if not clock.form:
        return clocks.scale_numbers(cells.to_numpy(), clock.unit)
    for day in dates:  # a column of their own
        cells = day + " " + cells
    times = clocks.parse_texts(cells, clock.form)
    if isinstance(times, int):
        problem = f"the cell of line {first + times} is no time like those above"
        raise input_error(Reason.TIMESTAMPS, problem, field=name, row=first + times)
    return times
