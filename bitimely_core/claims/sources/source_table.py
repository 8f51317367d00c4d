"""The record by which a source of claims describes one of its tables of diagnoses, and a block of
events read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from bitimely_core.errors import Reason
from bitimely_core.formats.csv_text import TableSpan

Stated = Literal["surely", "by name", "nowhere"]
"""What states the vocabulary of rows without one: an option, the name of the column, or nothing."""


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of diagnoses."""

    file: str  # relative to the source
    path: Path
    columns: tuple[str, ...]  # wanted, as the file spells them
    shape: Callable[[pl.DataFrame], EventBlock]
    dated: tuple[str, str]  # file and column that the dates come from, for messages
    # what is counted: records, or their diagnoses where a record holds several
    kind: Literal["rows", "codes"] = "rows"
    delimiter: str = ","
    form: str | None = None  # `--date-format`, where `shape` does not apply it
    span: TableSpan | None = None  # the part of the table to read; None: all of it
    categories: tuple[str, ...] = ()  # columns with few distinct texts
    others: bool = False  # with codes of other vocabularies, and their values


class EventBlock(NamedTuple):
    """A block of a table as events."""

    # row, subject_id, date, code, and any of vocab, source, claim, position, value
    events: pl.DataFrame
    # reason -> rows (or codes, see `SourceTable.kind`) left out by a rule of the source
    dropped: Mapping[str, int] = {}


def count_dropped(reason: Reason, count: int) -> dict[str, int]:
    """Rows left out for one reason, as in `EventBlock.dropped`; empty where there are none."""
    return {str(reason): count} if count else {}
