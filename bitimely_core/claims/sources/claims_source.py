"""What a source of claims hands over to the cleaning, and how it describes its tables of diagnoses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import polars as pl

from bitimely_core.errors import Finding
from bitimely_core.formats.csv_text import TableSpan
from bitimely_core.types import SourceRows

if TYPE_CHECKING:
    from bitimely_core.claims.sources.survey import EventReader

Stated = Literal["surely", "by name", "nowhere"]
"""Whether the vocabulary of rows without one is stated by an option, by the name of the column, or nowhere."""


@dataclass(frozen=True, kw_only=True)
class ClaimsSource:
    """Rows of a source before cleaning: every value is text as written, but for dates in the form `--date-format`, which are YYYY-MM-DD."""

    events: EventReader
    """Frames of at most about a million rows, in file order: subject_id, date, code, vocab, source (String, nullable), claim (String,
    nullable), position (Int16, nullable), file (String), row (Int64: 1-based line of a text, number of the row in a Parquet file)."""
    subjects: pl.DataFrame | None
    """subject_id, unique; birth, death, obs_start, obs_end (String, nullable); sex (UInt8, nullable: 0 unknown, 1 male, 2 female)."""
    vocab: str  # of rows that carry none
    source: str  # of rows that carry none
    rows: list[SourceRows]  # each table as far as known before cleaning, which adds its own counts to the tables of events
    findings: list[Finding]  # warnings and infos
    facts: dict[str, Any]  # what the report says
    labels: pl.DataFrame | None = None  # subject_id, one Int8 column a label (nullable), optional index_date String; unique
    splits: dict[str, str] | None = None  # subject -> train, validation, test
    survey: Callable[[], Iterator[pl.DataFrame]] | None = None  # `events`, surveyed as they are read, where the tables have not been
    complete: Callable[[], ClaimsSource] | None = None  # the source with what that reading has found


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of diagnoses."""

    file: str  # relative to the source
    path: Path
    columns: tuple[str, ...]  # wanted, as the file spells them
    shape: Callable[[pl.DataFrame], EventBlock]
    dated: tuple[str, str]  # file and column that the dates come from, for messages
    kind: Literal["rows", "codes"] = "rows"  # what is counted: records, or the diagnoses on them where a record holds several
    delimiter: str = ","
    form: str | None = None  # `--date-format`, where `shape` does not apply it
    span: TableSpan | None = None  # the part of the table to read; None: all of it
    categories: tuple[str, ...] = ()  # columns with few distinct texts
    others: bool = False  # whether codes of other vocabularies, with values, are kept


class EventBlock(NamedTuple):
    """A block of a table as events."""

    events: pl.DataFrame  # row, subject_id, date, code, and any of vocab, source, claim, position, value
    dropped: Mapping[str, int] = {}  # reason -> rows (codes) left out by a rule of the source
