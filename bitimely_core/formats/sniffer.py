"""Finds how a table of samples is written: marks, preamble, header, columns, units and clock.

Only the first lines are looked at. What is found is a `TableFacts`, which `describe_facts` puts in
words; the values are read with it by `sample_values`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats import clocks, vendors
from bitimely_core.formats.parquet import is_parquet, read_column_types
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.table_columns import (
    CellColumns,
    apply_form,
    choose_kind,
    find_clock,
    find_intervals,
    find_own_clocks,
    find_place,
    find_unit_column,
    holds_codes,
    mark_others,
    name_columns,
    split_header,
)
from bitimely_core.formats.table_edges import count_footer, find_cell_units, list_units, strip_units
from bitimely_core.formats.table_facts import Clock, ClockChoice, Column, TableFacts
from bitimely_core.formats.table_facts import looks_like_samples as looks_like_samples
from bitimely_core.formats.table_layout import (
    CELLS,
    DELIMITERS,
    THOUSANDS,
    Layout,
    TableHead,
    find_grammar,
    find_layout,
    find_preamble_rate,
    find_preamble_unit,
    read_head,
    split_line,
)
from bitimely_core.formats.table_rows import TableShape
from bitimely_core.formats.table_text import STATED_MARK
from bitimely_core.formats.tables import is_binary

if TYPE_CHECKING:
    import polars as pl

ROWS = 1000  # of a clock that are looked at


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


def find_delimiter(path: Path) -> str:
    """The mark between the cells of a table of texts: the one that its first lines agree on.

    Raises UserError: as `table_layout.read_head`.
    """
    if is_binary(path):
        return ","
    lines = [line for line in read_head(path).lines if line.strip()][:50]
    first = next(iter(lines), "")
    if (stated := STATED_MARK.fullmatch(first)) and stated[1] in DELIMITERS:
        return stated[1]
    is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
    if is_tsv and ("\t" in first or "," not in first):
        return "\t"
    return max(DELIMITERS[:4], key=lambda mark: _rate_mark(lines, mark))


def _rate_mark(lines: Sequence[str], mark: str) -> tuple[float, int]:
    """The share of the lines with as many cells as the first, and that number; 0 for one cell."""
    widths = [len(split_line(line, mark)) for line in lines] or [1]
    share = widths.count(widths[0]) / len(widths)
    return (round(share, 1), widths[0]) if widths[0] > 1 else (0.0, 1)


def _sniff_text(path: Path, delimiter: str, choice: ClockChoice) -> TableFacts:
    whole = read_head(path)
    top = "\n".join([*whole.lines[: vendors.FORM_LINES], ""])
    form = vendors.find_form(path.name, top)
    head, cell_units = _strip_cells(whole, form)
    lines = head.lines
    shape, layout = _find_shape(head, delimiter, form)
    shape = shape._replace(units=cell_units)
    if form and form.counts and re.match(form.counts, lines[shape.skip]):
        shape = shape._replace(skip=shape.skip + 1)
    rows = [split_line(line, shape.delimiter, shape.quote) for line in lines[shape.skip :]]
    cells = CellColumns([row for row in rows if len(row) == shape.width][:ROWS], shape.decimal)
    _refuse_thousands(cells.rows, shape.decimal)
    units = layout.units or list_units(whole.lines[shape.skip :], shape)
    columns = name_columns(layout.names, units, cells.rows, shape.decimal)
    below = count_footer(lines[shape.skip :], columns, shape)
    cells = cells.drop_last(sum(len(row) == shape.width for row in rows[len(rows) - below :]))
    rate = find_preamble_rate("\n".join(lines[: shape.skip]), shape.decimal)
    facts = TableFacts(shape, columns, None, rate, "", None, len(cells.rows))
    facts = (
        _read_by_cells(facts, cells, choice, path.name)
        if form is None
        else _read_by_form(facts, cells, choice, form, top)
    )
    above = find_preamble_unit("\n".join(lines[: shape.skip]))
    return _add_unit(facts, above or find_unit_column(facts.columns, cells))


def _add_unit(facts: TableFacts, stated: str) -> TableFacts:
    """The facts with the unit that is stated of the whole table, where no channel has its own."""
    places = facts.list_channels()
    if any(facts.columns[place].unit for place in places):
        return facts
    columns = [
        column._replace(unit=stated) if i in places else column
        for i, column in enumerate(facts.columns)
    ]
    return facts._replace(columns=tuple(columns))


def _strip_cells(
    head: TableHead, form: vendors.VendorForm | None
) -> tuple[TableHead, tuple[str, ...]]:
    """The first lines without the remarks of a form and the units behind numbers, and these."""
    lines = head.lines
    if form and form.remark:
        lines = [line.partition(form.remark)[0] for line in lines]
    units = find_cell_units(lines)
    return head._replace(lines=strip_units(lines, units) if units else lines), units


def _read_by_cells(
    facts: TableFacts, cells: CellColumns, choice: ClockChoice, file_name: str
) -> TableFacts:
    """The facts of a table of no vendor, with its clock."""
    columns = facts.columns
    clock = find_clock(columns, cells, choice, ())
    if clock is None and facts.rate is None:
        columns, clock = find_intervals(columns, cells, file_name)
    marked = mark_others(columns, clock, cells)
    facts = facts._replace(columns=marked, clock=clock, is_codes=holds_codes(marked, cells))
    return facts._replace(own_clocks=find_own_clocks(marked, cells))


def _read_by_form(
    facts: TableFacts, cells: CellColumns, choice: ClockChoice, form: vendors.VendorForm, top: str
) -> TableFacts:
    """The facts of a table with what the form of its vendor says; `top`: its first lines."""
    columns = apply_form(facts.columns, form, top)
    rate = form.read_rate(top) or facts.rate
    clock = None
    if choice.column or not rate:
        clock = find_clock(columns, cells, choice, form.clock)
    if clock and form.irregular:
        clock = clock._replace(irregular=True)
    marked = mark_others(columns, clock, cells, counts=False)
    timed = TableFacts(facts.shape, marked, clock, rate, *facts[4:])
    return timed._replace(
        vendor=form.title,
        start=clocks.parse_moment(form.read_start(top)),
        missing=tuple(form.missing),
    )


def _refuse_thousands(rows: Sequence[Sequence[str]], decimal: str) -> None:
    """Raises UserError (not_numeric) for a column with marks between thousands: 990, 1,000."""
    marks = ",." if decimal == "," else ","
    for cells, mark in product(zip(*rows, strict=True), marks):
        marked = [cell for cell in cells if mark in cell]
        if marked and _are_thousands(cells, marked, mark, is_decimal=mark == decimal):
            problem = f"numbers such as {marked[0]} have marks between thousands"
            hint = "Export the table without them"
            raise input_error(Reason.NOT_NUMERIC, problem, "which may be decimal marks", hint)


def _are_thousands(
    cells: Sequence[str], marked: Sequence[str], mark: str, *, is_decimal: bool
) -> bool:
    """Whether a mark stands between the thousands of all cells that have it, and of no shorter one.

    `is_decimal`: decimals follow the same mark, so that shorter numbers must stand beside.
    """
    longest = max(map(len, filter(str.isdigit, cells)), default=9 if is_decimal else 0)
    return longest < 4 and all(map(THOUSANDS[mark].fullmatch, marked))


def _find_shape(
    head: TableHead, delimiter: str, form: vendors.VendorForm | None
) -> tuple[TableShape, Layout]:
    """The marks of a text, and where its rows begin."""
    lines = head.lines
    if hint := re.fullmatch(r'"?sep=(.?)"?', lines[0].strip("\r\n ")):  # for spreadsheets
        delimiter = delimiter or hint[1] or "\t"
    quote = "'" if any(line.startswith("'") for line in lines[:3]) else '"'
    is_single = form is not None and form.width == 1
    grammar = find_grammar(lines, delimiter, quote=quote, is_single=is_single)
    rows = [split_line(line, grammar.delimiter, quote) for line in lines]
    layout = find_layout(lines, rows, grammar, form.skip if form else None)
    shape = TableShape(
        encoding=head.encoding,
        delimiter=grammar.delimiter,
        decimal=grammar.decimal,
        quote=quote,
        skip=layout.skip,
        header=layout.header,
        width=grammar.width,
        remark=form.remark if form else "",
    )
    return shape, layout


def _sniff_parquet(path: Path, choice: ClockChoice) -> TableFacts:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = read_column_types(path)
    with pq.ParquetFile(path) as file:
        batches = list(islice(file.iter_batches(ROWS), 1))
        total = file.metadata.num_rows
        frame = pl.DataFrame(pa.Table.from_batches(batches, file.schema_arrow))
    columns = []
    texts: list[list[str]] = []
    stored: dict[int, Clock] = {}
    for i, (header, kind) in enumerate(types.items()):
        _refuse_nested(header, kind)
        series = frame.to_series(i)
        whole = series.to_physical() if series.dtype == pl.Duration else series  # it has no text
        cells = whole.cast(pl.String, strict=False).fill_null("").to_list()
        texts.append(cells)
        name, unit = split_header(header)
        column_kind = choose_kind(header, cells[:CELLS], ".")
        if cells and kind.startswith(("timestamp", "duration", "time", "date")):
            column_kind = "time"
            step, irregular = clocks.measure_clock(to_seconds(series))
            evidence = "stored as times"
            stored[i] = Clock((i,), "datetime", "stored", evidence, (), step, irregular)
        columns.append(Column(name, header, unit, column_kind))
    table = CellColumns(list(map(list, zip(*texts, strict=True))), ".")
    clock = _choose_stored(columns, stored, choice) or find_clock(columns, table, choice, ())
    marked = mark_others(columns, clock, table)
    rows_seen, is_codes = min(total, ROWS), holds_codes(marked, table)
    return TableFacts(None, marked, clock, None, "", None, rows_seen, is_codes)


def _refuse_nested(header: str, kind: str) -> None:
    """Raises UserError (schema) for a column of lists, such as the samples of a recording a row."""
    if re.match("(large_|fixed_size_)?list|struct|map", kind) is None:
        return
    name = safe_text(header)
    problem = f"its column {name} holds several values a row"
    hint = (
        "Write a column a sample, and give `series` in [[files]] of --map: t = "
        f"pandas.read_parquet(FILE); s = pandas.DataFrame(t.pop({name}).tolist()).add_prefix('x'); "
        "t.join(s).to_csv('NAME.csv', index=False), and series = \"x*\""
    )
    raise input_error(Reason.SCHEMA, problem, "expected a number a row", hint, field=header)


def _choose_stored(
    columns: Sequence[Column], stored: dict[int, Clock], choice: ClockChoice
) -> Clock | None:
    """The clock of stored time stamps that is asked for, or the first one."""
    if choice.column:
        return stored.get(find_place(columns, choice.column))
    return next((clock for clock in stored.values() if clock.step > 0), None)


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
