"""Finds what stands around the numbers of a table: lines below its rows, units in its cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

from bitimely_core.formats.clocks import WORDS
from bitimely_core.formats.table_facts import Column
from bitimely_core.formats.table_layout import COMMENT, MISSING, is_value, split_line
from bitimely_core.formats.table_rows import TableShape, compile_units
from bitimely_core.formats.units import find_unit

MOST_LINES = 100  # below the rows
COUNTED = {"number", "time", "index"}  # kinds of columns in which a text is no value
SUFFIX = re.compile(r"\d\s?([^\W\d_]{1,5}|[%\u00b0\u2103][CF]?)(?=\s*[\"']?(?:[,;\t|]|$))")
CHANNEL_UNITS = {unit.lower() for unit in WORDS["units"]}


def count_footer(lines: Sequence[str], columns: Sequence[Column], shape: TableShape) -> int:
    """How many of the last lines are no rows: remarks, and those that begin with a text where the
    rows have numbers or times, such as `Mean,97`. Blank lines among them count.
    """
    count = 0
    for number, line in enumerate(reversed(lines[-MOST_LINES:]), 1):
        if not line.strip():
            continue
        if not _is_below(line, columns, shape):
            break
        count = number
    return count


def _is_below(line: str, columns: Sequence[Column], shape: TableShape) -> bool:
    """Whether a line at the end of a table is no row."""
    if line.lstrip().startswith(COMMENT):
        return True
    cells = split_line(line, shape.delimiter, shape.quote)
    place = next((i for i, cell in enumerate(cells) if cell.lower() not in MISSING), len(columns))
    if place >= len(columns) or columns[place].kind not in COUNTED:
        return False
    return not is_value(cells[place], shape.decimal) and not cells[place][:1].isdigit()


def find_cell_units(lines: Sequence[str]) -> tuple[str, ...]:
    """Units behind numbers in at least half of the lines, as `97%` and `62 bpm` have them."""
    counts = Counter(chain.from_iterable(set(SUFFIX.findall(line)) for line in lines))
    often = (unit for unit, count in counts.items() if 2 * count >= len(lines))
    return tuple(sorted(unit for unit in often if unit.lower() in CHANNEL_UNITS or find_unit(unit)))


def strip_units(lines: Sequence[str], units: Collection[str]) -> list[str]:
    """The lines without these units behind numbers."""
    pattern = compile_units(tuple(units))
    return [pattern.sub(b"", line.encode()).decode() for line in lines]


def list_units(lines: Sequence[str], shape: TableShape) -> list[str]:
    """The unit behind the numbers of each column; "" for one that has none."""
    rows = [split_line(line, shape.delimiter, shape.quote) for line in lines]
    columns = zip(*(row for row in rows if len(row) == shape.width), strict=True)
    return [_find_suffix(cells, shape.units) for cells in columns]


def _find_suffix(cells: Sequence[str], units: Sequence[str]) -> str:
    """The unit with which most cells end."""
    ends = Counter(match[1] for cell in cells if (match := SUFFIX.search(cell)))
    unit, count = next(iter(ends.most_common(1)), ("", 0))
    return unit if unit in units and 2 * count >= len(cells) else ""
