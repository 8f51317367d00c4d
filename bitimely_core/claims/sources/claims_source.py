"""The record that a source of claims hands over to the cleaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from bitimely_core.claims.sources.subject_tables import TableAccounts
from bitimely_core.claims.sources.survey import EventReader, SourceSurvey, hash_ids
from bitimely_core.errors import Finding, Reason, input_warning
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
    survey: SourceSurvey
    accounts: TableAccounts = field(default_factory=TableAccounts)  # of tables without events
    subjects: pl.DataFrame | None
    """subject_id, unique; birth, death, obs_start, obs_end (String, nullable); sex (UInt8,
    nullable: 0 unknown, 1 male, 2 female).
    """
    source: str  # kind of claims of rows that carry none
    facts: dict[str, Any]  # what the report says
    # subject_id, one Int8 column a label (nullable), optional index_date String; unique
    labels: pl.DataFrame | None = None
    splits: dict[str, str] | None = None  # subject -> train, validation, test

    def read(self) -> Iterator[pl.DataFrame]:
        """`events`, surveyed as they are read if they have not been."""
        return self.events() if self.survey.done else self.survey.read(self.events.tables)

    @property
    def rows(self) -> list[SourceRows]:
        """The rows of each table. Cleaning adds its own counts to those of tables of events."""
        return [*self.survey.rows, *self.accounts.rows]

    @property
    def findings(self) -> list[Finding]:
        """Warnings and infos."""
        return [*self.survey.findings, *self.accounts.findings, *self._find_unmatched()]

    def _find_unmatched(self) -> list[Finding]:
        """A warning of labels without claims and of claims without labels."""
        if self.labels is None or not self.survey.counts_subjects:
            return []
        labelled, subjects = hash_ids(self.labels["subject_id"]), self.survey.subjects
        both = len(np.intersect1d(labelled, subjects, assume_unique=True))
        without, unlabelled = len(labelled) - both, len(subjects) - both
        if without == unlabelled == 0:
            return []
        text = f"{without} subjects with labels have no claims"
        return [
            input_warning(
                Reason.UNMATCHED_LABELS,
                f"{text}, {unlabelled} subjects with claims have no labels",
                file=self.accounts.rows[-1].file,
                count=without + unlabelled,
            )
        ]
