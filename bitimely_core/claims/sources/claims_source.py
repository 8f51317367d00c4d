"""The record that a source of claims hands over to the cleaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from bitimely_core.claims.sources.survey import EventReader
from bitimely_core.errors import Finding
from bitimely_core.types import SourceRows


@dataclass(frozen=True, kw_only=True)
class ClaimsSource:
    """Rows of a source before cleaning.

    Every value is text as written. Only dates in the form `--date-format` are YYYY-MM-DD.
    """

    events: EventReader
    """Frames of at most about a million rows, in file order: subject_id, date, code, vocab, source
    (String, nullable), claim (String, nullable), position (Int16, nullable), file (String), row
    (Int64: 1-based line of a text, number of the row in a Parquet file).
    """
    subjects: pl.DataFrame | None
    """subject_id, unique; birth, death, obs_start, obs_end (String, nullable); sex (UInt8,
    nullable: 0 unknown, 1 male, 2 female).
    """
    source: str  # kind of claims of rows that carry none
    rows: list[SourceRows]  # of each table; cleaning adds its own counts to the tables of events
    findings: list[Finding]  # warnings and infos
    facts: dict[str, Any]  # what the report says
    vocab: str = "icd9cm"  # of rows that carry none
    # subject_id, one Int8 column a label (nullable), optional index_date String; unique
    labels: pl.DataFrame | None = None
    splits: dict[str, str] | None = None  # subject -> train, validation, test
    # where the tables have not been surveyed: reads `events` and surveys them
    survey: Callable[[], Iterator[pl.DataFrame]] | None = None
    # the source with the findings of `survey`, once it has ended
    complete: Callable[[], ClaimsSource] | None = None
