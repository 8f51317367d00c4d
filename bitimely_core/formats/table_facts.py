"""What a table of samples says of itself, and how that is put in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from typing import Literal, NamedTuple

from bitimely_core.errors import safe_text
from bitimely_core.formats import clocks
from bitimely_core.formats.table_rows import TableShape
from bitimely_core.formats.text import UTF8, list_names
from bitimely_core.wording import list_first

MARK_NAMES = {"\t": "tabs", " ": "blanks", ",": ",", ";": ";", "|": "|"}
LABEL_WORDS = set(clocks.WORDS["labels"])
INTERVALS = "intervals"  # form of a clock whose cells are the time since the row above
RATE_SOURCES = {False: "first lines", True: "file beside it"}
SLOW = 1.0  # Hz: labels are not faster
LEAST_ROWS = 50  # of a table that is taken for samples without a map
MANY_COLUMNS = 4  # of numbers

ColumnKind = Literal["number", "time", "text", "label", "empty", "index", "left out"]


class Column(NamedTuple):
    """A column of a table."""

    name: str  # without its unit; "": none
    header: str  # as in the file
    unit: str
    kind: ColumnKind


class Clock(NamedTuple):
    """The columns that hold the time of each row."""

    places: tuple[int, ...]  # one column, or a date and a time
    unit: str  # a key of `clocks.UNITS`, samples, datetime; "": not known
    form: str  # of texts, by `clocks.find_text_form`; of stored time stamps "stored"; `INTERVALS`
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
    is_described: bool = False  # the rate is that of a description beside the table
    # places of its clocks, where each is that of the channels behind it; (): all have one clock
    own_clocks: tuple[int, ...] = ()

    def list_channels(self) -> list[int]:
        """Places of the columns that are channels."""
        return [i for i, column in enumerate(self.columns) if column.kind == "number"]

    def list_behind(self, clock: int) -> list[int]:
        """Places of the channels behind one of `own_clocks`."""
        end = min((place for place in self.own_clocks if place > clock), default=len(self.columns))
        return [i for i in self.list_channels() if clock < i < end]

    def find_labels(self) -> int | None:
        """Place of the first column whose texts are labels of the time of their rows."""
        return next((i for i, column in enumerate(self.columns) if column.kind == "label"), None)

    def list_left_out(self) -> list[str]:
        """Headers of the columns that are neither channels, labels nor the clock."""
        timed = (*(self.clock.places if self.clock else ()), self.find_labels())
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


def add_description(
    facts: TableFacts, rate: float | None, headers: Sequence[tuple[str, str]]
) -> TableFacts:
    """The facts with the rate (Hz), and the names and units of columns, of a description beside the
    table, where it has none itself.
    """
    columns = facts.columns
    if len(headers) == len(columns) and not any(column.header for column in columns):
        columns = tuple(
            column._replace(name=name, header=name, unit=unit)
            for column, (name, unit) in zip(columns, headers, strict=True)
        )
    is_described = facts.found_rate is None and rate is not None
    rate = rate if is_described else facts.rate
    return facts._replace(columns=columns, rate=rate, is_described=is_described)


def looks_like_samples(facts: TableFacts) -> bool:
    """Whether a table is one of samples, without a word of the user: many rows of numbers.

    Tables of labels have a column of texts, few rows, or one column of codes and a slow clock.
    Actigraphs write texts beside many numbers.
    """
    kinds = Counter(column.kind for column in facts.columns)
    if facts.vendor or not kinds["number"]:
        return bool(kinds["number"])
    if facts.rows < LEAST_ROWS:
        return False
    is_fast = facts.found_rate is not None and facts.found_rate > SLOW
    if _has_even_clock(facts) and (is_fast or kinds["number"] >= MANY_COLUMNS):
        return True  # no table of labels is like that
    return not _has_labels(facts) and (is_fast or not facts.is_codes)


def _has_even_clock(facts: TableFacts) -> bool:
    return facts.clock is not None and not facts.clock.irregular


def _has_labels(facts: TableFacts) -> bool:
    """Whether a column holds texts, or is called as one of labels."""
    if any(column.kind in {"text", "label"} for column in facts.columns):
        return True
    words = set(chain.from_iterable(clocks.split_words(column.header) for column in facts.columns))
    # a device that marks events has numbers in a column of that name
    marks = {"event"} if len(facts.list_channels()) > 2 else set()
    return not LABEL_WORDS.isdisjoint(words - marks)


def describe_facts(facts: TableFacts) -> str:
    """One line: marks, header, clock, channels with units, and what is left out."""
    parts = [facts.vendor] if facts.vendor else []
    parts += _describe_shape(facts.shape) if facts.shape else []
    clock = facts.clock
    if facts.rate:
        parts.append(f"{facts.rate:.10g} Hz by the {RATE_SOURCES[facts.is_described]}")
    elif clock:
        parts.append(_describe_clock(facts, clock))
    channels = [facts.columns[i] for i in facts.list_channels()]
    names = [
        safe_text(column.name or f"channel {n}") + (column.unit and f" in {column.unit}")
        for n, column in enumerate(channels, 1)
    ]
    parts.append(f"channels {list_first(names, 12)}")
    labels = facts.find_labels()
    if labels is not None:
        parts.append(f"labels {safe_text(facts.columns[labels].header)}")
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
        f"{clocks.measure_unit(clock.unit) / clocks.UNITS[unit] / clock.step:.4g} Hz in {unit}"
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
    if shape.remark:
        parts.append(f"texts behind {shape.remark.strip()} at the end of rows left out")
    return parts


def _describe_clock(facts: TableFacts, clock: Clock) -> str:
    names = " and ".join(
        safe_text(facts.columns[i].header or f"column {i + 1}") for i in clock.places
    )
    if not clock.unit:
        return f"clock {names} without a unit ({clock.evidence})"
    is_text = clock.form not in {"", INTERVALS}
    unit = "as date or time" if is_text else f"in {clock.unit} ({clock.evidence})"
    if clock.irregular:
        return f"clock {names} {unit} at irregular times, about {clock.step:.3g} s apart"
    rate = f" at {1 / clock.step:.4g} Hz" if clock.step > 0 else ""
    others = len(facts.own_clocks[1:])
    beside = f" beside {others} of other channels" if others else ""
    return f"clock {names} {unit}{rate}{beside}"
