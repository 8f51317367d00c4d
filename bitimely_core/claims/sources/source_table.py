"""How a source of claims describes one of its tables of diagnoses, and the form in which a block of
it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from bitimely_core.formats.csv_text import TableSpan

Stated = Literal["surely", "by name", "nowhere"]
"""Whether the vocabulary of rows without one is stated by an option, by the name of the column, or
nowhere.
"""


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of diagnoses."""

    file: str  # relative to the source
    path: Path
    columns: tuple[str, ...]  # wanted, as the file spells them
    shape: Callable[[pl.DataFrame], EventBlock]
    dated: tuple[str, str]  # file and column that the dates come from, for messages
    # what is counted: records, or the diagnoses on them where a record holds several
    kind: Literal["rows", "codes"] = "rows"
    delimiter: str = ","
    form: str | None = None  # `--date-format`, where `shape` does not apply it
    span: TableSpan | None = None  # the part of the table to read; None: all of it
    categories: tuple[str, ...] = ()  # columns with few distinct texts
    others: bool = False  # whether codes of other vocabularies, with values, are kept


class EventBlock(NamedTuple):
    """A block of a table as events."""

    # row, subject_id, date, code, and any of vocab, source, claim, position, value
    events: pl.DataFrame
    dropped: Mapping[str, int] = {}  # reason -> rows (codes) left out by a rule of the source
