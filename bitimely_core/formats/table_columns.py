"""Finds what the columns of a table of samples are: channels with units, the clock, others."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats import clocks, vendors
from bitimely_core.formats.table_facts import INTERVALS, Clock, ClockChoice, Column, ColumnKind
from bitimely_core.formats.table_layout import CELLS, MISSING, is_number
from bitimely_core.formats.tables import NUMBER
from bitimely_core.formats.text import list_names
from bitimely_core.formats.units import find_unit
from bitimely_core.types import find_only

CHANNEL_UNITS = {unit.lower() for unit in clocks.WORDS["units"]}
NO_UNITS = set(clocks.WORDS["no_units"])
SUFFIX_UNITS = clocks.WORDS["suffixes"]
# an address may follow: `heart_rate [bpm](/api/datatype/19/)`
BRACKETS = re.compile(r"(.+?)\s*(?:\[([^\]]{1,12})\](?:\(/[^)]*\))?|\(([^)]{1,12})\))")
STATE_NAMES, PLACE_NAMES = set(clocks.WORDS["states"]), set(clocks.WORDS["places"])
INTERVAL_WORDS = set(clocks.WORDS["intervals"])
LEAST_INTERVAL, MOST_INTERVAL = 0.2, 3.0  # seconds, of the median
MANY = 20  # rows
MOST_RISING = 0.9  # of the steps of a clock
MOST_DRIFT = 0.01  # of the steps of two clocks of one rate
MOST_CODES = 8  # different values of a column of labels


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
    return header, SUFFIX_UNITS.get(re.split(r"[_\s.]", header)[-1].lower(), "")


def name_columns(
    names: Sequence[str], units: Sequence[str], rows: Sequence[Sequence[str]], decimal: str
) -> tuple[Column, ...]:
    """The columns by their headers and their first cells.

    Units of a row of their own outrank those of headers; a name that two columns would have stays
    with its unit.
    """
    width = len(rows[0]) if rows else len(names)
    headers, stated = ([*texts, *[""] * width][:width] for texts in (names, units))
    split = list(map(split_header, headers))
    counts = Counter(name for name, _ in split)
    columns = []
    for i, (header, (name, unit)) in enumerate(zip(headers, split, strict=True)):
        unit = stated[i].strip("[]() ") or unit
        kind = choose_kind(header, [row[i] for row in rows[:CELLS]], decimal)
        columns.append(
            Column(
                name=name if counts[name] == 1 else header,
                header=header,
                unit="" if unit.lower() in NO_UNITS else unit,
                kind="number" if kind == "empty" and header else kind,
            )
        )
    return tuple(columns)


def choose_kind(header: str, cells: Sequence[str], decimal: str) -> ColumnKind:
    """As `find_kind`; a column that is called so and has no number in it is one of labels, one of
    places on earth is left out.
    """
    name = "".join(clocks.split_words(header))
    if name in PLACE_NAMES:
        return "left out"
    is_state = name in STATE_NAMES
    has_number = any(is_number(cell, decimal) for cell in cells)
    return "label" if is_state and not has_number else find_kind(cells, decimal)


def is_pressure(cell: str) -> bool:
    """Whether a cell holds a systolic and a diastolic pressure, such as 120/80."""
    return re.fullmatch(r"\s*\d{2,3}\s*/\s*\d{2,3}\s*", cell, re.ASCII) is not None


def find_kind(cells: Sequence[str], decimal: str) -> ColumnKind:
    """What the cells of a column are: at least half of those that are not empty."""
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    if not filled:
        return "empty" if not any(cells) else "number"
    numbers = sum(is_number(cell, decimal) for cell in filled)
    if 2 * numbers >= len(filled):
        return "number"
    if 2 * sum(map(clocks.is_time_text, filled)) >= len(filled):
        return "time"
    if 2 * sum(map(is_pressure, filled)) >= len(filled):
        return "left out"
    # one text in all rows is a name of the whole recording
    return "text" if len(set(filled)) > 1 or len(cells) < MANY else "left out"


def _align_names(
    columns: Sequence[Column], form: vendors.VendorForm, head: str
) -> tuple[int, list[str], list[str]]:
    """How many columns lie before those that a form names, and names and units of all."""
    filled = sum(column.kind != "empty" for column in columns)
    named, units = form.read_names(head), form.read_units(head)
    before = max(filled - len(named), 0) if form.right else 0
    rest = [""] * len(columns)
    return before, [*rest[:before], *named, *rest], [*rest[:before], *units, *rest]


def apply_form(
    columns: Sequence[Column], form: vendors.VendorForm, head: str
) -> tuple[Column, ...]:
    """The columns with the names and units of a vendor's form, and those it leaves out."""
    before, names, units = _align_names(columns, form, head)
    channels = _find_channels(columns, form.count_last(head), before)
    usual_unit = form.read_unit(head)
    result = []
    for i, (column, name, unit) in enumerate(zip(columns, names, units, strict=False)):
        column = _rename(column, name, form)
        unit_of_form = form.find_unit(column.header or f"channel {i + 1}")
        is_channel = i in channels and (unit_of_form is not None or bool(unit) or not form.columns)
        if column.kind == "number" and not is_channel:
            column = column._replace(kind="left out")
        result.append(column._replace(unit=column.unit or unit_of_form or unit or usual_unit))
    return tuple(result)


def _find_channels(columns: Sequence[Column], last: int | None, before: int) -> set[int]:
    """Places of the columns of numbers, but for the first `before` columns.

    `last`: only so many at the end are channels; None: all are.
    """
    numeric = [i for i, column in enumerate(columns) if column.kind == "number"]
    if last is not None:
        numeric = numeric[-last:]
    return {i for i in numeric if i >= before}


def _rename(column: Column, name: str, form: vendors.VendorForm) -> Column:
    """The column with the name of a form; its header stays, unless the form replaces headers."""
    if name and (form.right or not column.header):
        # the form knows the unit of what it names itself: G of a header may be gauss
        return column._replace(name=name, header=name, unit=form.find_unit(name) or column.unit)
    return column


class CellColumns:
    """The first rows of a table by column."""

    def __init__(self, rows: Sequence[Sequence[str]], decimal: str) -> None:
        self.rows = rows
        self.decimal = decimal

    def texts(self, place: int) -> list[str]:
        """The cells of a column."""
        return [row[place] for row in self.rows]

    def drop_last(self, count: int) -> CellColumns:
        """Without so many rows at the end."""
        return CellColumns(self.rows[: len(self.rows) - count], self.decimal)

    def numbers(self, place: int) -> np.ndarray:
        """The cells of a column as numbers, float64 [rows]; NaN where a cell is none."""
        cells = [cell.replace(self.decimal, ".") for cell in self.texts(place)]
        return np.array(
            [float(cell) if NUMBER.fullmatch(cell) else np.nan for cell in cells], np.float64
        )


def find_clock(
    columns: Sequence[Column], cells: CellColumns, choice: ClockChoice, patterns: Sequence[str]
) -> Clock | None:
    """The clock that the map, a form or the columns themselves name; the last row may be the first
    in time, as in exports with the newest values on top.

    Raises UserError: schema, for a stated column that is not there.
    """
    clock = _find_rising_clock(columns, cells, choice, patterns)
    if clock and clock.step > 0:
        return clock
    turned = CellColumns(cells.rows[::-1], cells.decimal)
    other = _find_rising_clock(columns, turned, choice, patterns)
    return other if other and other.step > 0 else clock


def _find_rising_clock(
    columns: Sequence[Column], cells: CellColumns, choice: ClockChoice, patterns: Sequence[str]
) -> Clock | None:
    """As `find_clock`, of rows in the order of time."""
    if choice.column:
        return _make_clock(columns, cells, find_place(columns, choice.column), choice.unit)
    for pattern in patterns:
        for i, column in enumerate(columns):
            if fnmatch.fnmatch(column.header.lower(), pattern.lower()):
                return _make_clock(columns, cells, i, choice.unit)
    places = [i for i in range(len(columns)) if _may_be_clock(i, columns)]
    clocks_found = (_make_clock(columns, cells, i, choice.unit) for i in places)
    rising = [clock for clock in clocks_found if clock and _increases(cells, clock)]
    return max(rising, key=lambda clock: _rate_clock(clock, cells), default=None)


def find_intervals(
    columns: tuple[Column, ...], cells: CellColumns, file_name: str
) -> tuple[tuple[Column, ...], Clock | None]:
    """The column and the clock of a list of intervals between beats: each beat comes its interval
    after the last. Other columns as they are, without a clock.

    The header of its only column says so, or the name of the file, and the median is one of hearts.
    """
    column = columns[0]
    words = clocks.split_words(column.header or file_name)
    if len(columns) != 1 or INTERVAL_WORDS.isdisjoint(words):
        return columns, None
    values = cells.numbers(0)
    middle = float(np.nanmedian(values)) if np.isfinite(values).any() else 0.0
    for unit in ("ms", "s"):
        step = middle * clocks.UNITS[unit]
        if LEAST_INTERVAL < step < MOST_INTERVAL and np.nanmin(values) >= 0:
            evidence = "intervals between beats"
            clock = Clock((0,), unit, INTERVALS, evidence, (), step, irregular=True)
            name, unit_text = column.name or "RR", column.unit or unit
            return (column._replace(name=name, unit=unit_text),), clock
    return columns, None


def find_unit_column(columns: Sequence[Column], cells: CellColumns) -> str:
    """The known unit that a column called so has in all rows; "": none, or several."""
    places = [i for i, column in enumerate(columns) if column.name.lower() in {"unit", "units"}]
    texts = {text for place in places for text in cells.texts(place)}
    unit = find_only(texts, "")
    return unit if find_unit(unit) else ""


def find_place(columns: Sequence[Column], wanted: str) -> int:
    """The place of the column that a map calls so. Raises UserError: schema."""
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
    return _is_called_clock(column)


def _is_called_clock(column: Column) -> bool:
    """Whether a header is that of a clock; `X [s]` is the axis of the column behind it."""
    is_axis = clocks.split_words(column.header)[:1] == ["x"] and column.unit in clocks.UNITS
    return is_axis or clocks.is_clock_name(column.header)


def _make_clock(
    columns: Sequence[Column], cells: CellColumns, place: int, unit: str
) -> Clock | None:
    """The clock in a column; None for texts that are no times."""
    column = columns[place]
    if column.kind != "time":
        values = cells.numbers(place)
        values = values[np.isfinite(values)]
        if len(values) < 2:
            return None
        if not column.header and not unit and _is_count(values):
            return None
        headers = [other.header for other in columns]
        choice = clocks.choose_unit(column.header, column.unit, values, unit, headers)
        step, irregular = clocks.measure_clock(values)
        step *= clocks.measure_unit(choice.unit)
        return Clock((place,), choice.unit, "", choice.evidence, choice.others, step, irregular)
    return _make_text_clock(columns, cells, place)


def _make_text_clock(columns: Sequence[Column], cells: CellColumns, place: int) -> Clock | None:
    import polars as pl

    places: tuple[int, ...] = (place,)
    texts = cells.texts(place)
    dates = [i for i in range(len(columns)) if i != place and _is_date_column(cells.texts(i))]
    if dates and not clocks.DATE.match(texts[0]):
        places = (dates[0], place)
        texts = [f"{day} {time}" for day, time in zip(cells.texts(dates[0]), texts, strict=True)]
    filled = [text for text in texts if text.lower() not in MISSING]
    form = clocks.find_text_form(filled[:CELLS], columns[place].header)
    times = clocks.parse_texts(pl.Series("", filled, pl.String), form) if form else 0
    if isinstance(times, int):
        return None
    step, irregular = clocks.measure_clock(times.seconds)
    return Clock(places, "datetime", form, "dates and times", (), step, irregular)


def _is_date_column(texts: Sequence[str]) -> bool:
    return bool(texts) and all(map(clocks.DATE.fullmatch, texts[:CELLS]))


def _increases(cells: CellColumns, clock: Clock) -> bool:
    """Whether the times of the first rows go up, but for a few of them."""
    if clock.form:
        return clock.step > 0
    steps = np.diff(cells.numbers(clock.places[0]))
    steps = steps[np.isfinite(steps)]
    if np.count_nonzero(steps >= 0) <= MOST_RISING * steps.size:
        return False
    return max(float(np.sum(steps)), float(np.median(steps))) > 0  # or it starts again


def _rate_clock(clock: Clock, cells: CellColumns) -> tuple[bool, bool, bool, int]:
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
    return bool(np.mean(np.diff(finite) == 1) > 0.95)


def mark_others(
    columns: Sequence[Column], clock: Clock | None, cells: CellColumns, *, counts: bool = True
) -> tuple[Column, ...]:
    """The columns; further times and (`counts`) numbers of samples are marked as such.

    A table keeps at least one channel, unless it has a clock and nothing else.
    """
    marked = []
    for i, column in enumerate(columns):
        kind = column.kind
        if clock and i in clock.places and clock.form != INTERVALS:
            kind = "time"
        elif kind == "number" and len(columns) > 1:
            kind = _find_kind_beside(i, column, cells, clock, counts)
        marked.append(column._replace(kind=kind))
    has_channel = any(column.kind == "number" for column in marked)
    return tuple(marked if has_channel or clock else columns)


def _find_kind_beside(
    place: int, column: Column, cells: CellColumns, clock: Clock | None, counts: bool
) -> ColumnKind:
    """What a column of numbers beside others is; `counts`: it may be numbers of samples."""
    values = cells.numbers(place)
    if counts and _counts_samples(place, column, values):
        return "index"
    return "time" if clock and _is_further_clock(column, values) else "number"


def _counts_samples(place: int, column: Column, values: np.ndarray) -> bool:
    """Whether a column has the numbers of the samples, or those of packets, which begin anew."""
    if not column.header:
        return place == 0 and _is_count(values)
    return clocks.is_index_name(column.header) and (_is_count(values) or _wraps(values))


def _is_further_clock(column: Column, values: np.ndarray) -> bool:
    """Whether a column beside the clock has times, too."""
    if not column.header or not _is_called_clock(column):
        return False
    steps = clocks.list_steps(values)
    return bool(np.count_nonzero(steps >= 0) > MOST_RISING * steps.size and steps.any())


def find_own_clocks(columns: Sequence[Column], cells: CellColumns) -> tuple[int, ...]:
    """The places of the clocks of a table that begin together, go on at different steps, and stand
    each before channels; () where it has one clock.
    """
    kinds = "".join({"time": "t", "number": "n"}.get(column.kind, "-") for column in columns)
    if re.fullmatch("-*(t-*n[n-]*){2,}", kinds) is None:
        return ()
    places = [match.start() for match in re.finditer("t", kinds)]
    times = list(map(cells.numbers, places))
    steps = list(map(clocks.measure_step, times))
    begin_together = np.ptp([values[0] for values in times]) < steps[0]
    differ = max(steps) > (1 + MOST_DRIFT) * min(steps)
    units = {clocks.read_header_unit(columns[i].header, columns[i].unit) for i in places}
    return tuple(places) if begin_together and differ and len(units) == 1 else ()


def holds_codes(columns: Sequence[Column], cells: CellColumns) -> bool:
    """Whether the only channel has a few small whole numbers, as stages and classes have."""
    places = [i for i, column in enumerate(columns) if column.kind == "number"]
    if len(places) != 1:
        return False
    values = np.unique(cells.numbers(places[0]))
    values = values[np.isfinite(values)]
    is_code = (np.abs(values) < 10) & (values == np.rint(values))
    return len(values) <= MOST_CODES and bool(is_code.all())


def _wraps(values: np.ndarray) -> bool:
    """Whether these count up by 1 and begin anew, as the numbers of packets do."""
    steps = clocks.list_steps(values)
    others = steps[steps != 1]
    return len(others) < 0.2 * steps.size and bool((others < 0).all())
