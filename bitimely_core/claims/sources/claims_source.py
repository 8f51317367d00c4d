"""The record that a source of claims hands over to the cleaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from bitimely_core.claims.sources.columns import warn_of_rows
from bitimely_core.claims.sources.source_survey import EventReader, SourceSurvey, hash_ids
from bitimely_core.errors import Finding, Reason
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
    subjects: pl.DataFrame | None
    """subject_id, unique; birth, death, obs_start, obs_end (String, nullable); sex (UInt8,
    nullable: 0 unknown, 1 male, 2 female).
    """
    map_files: Sequence[str] = ()  # a map of codes beside the tables
    source: str  # kind of claims of rows that carry none
    facts: dict[str, Any]  # what the report says
    # subject_id, one Int8 column a label (nullable), optional index_date String; unique
    labels: pl.DataFrame | None = None
    splits: pl.DataFrame | None = None  # subject_id, split (train, validation or test)
    # of subjects who were observed several times: `periods.merge_periods`
    periods: pl.DataFrame | None = None
    # fact of subjects that the tables lack (birth, sex) -> what to give
    advice: Mapping[str, str] = field(default_factory=dict)

    def read(self) -> Iterator[pl.DataFrame]:
        """`events`, surveyed as they are read if they have not been."""
        return self.events() if self.survey.done else self.survey.read(self.events.tables)

    @property
    def rows(self) -> list[SourceRows]:
        """The rows of each table, those of events first. Cleaning adds its own counts to them."""
        return sorted(self.survey.rows, key=lambda table: table.kind == "subjects")

    @property
    def findings(self) -> list[Finding]:
        """Warnings and infos; also one of labels without claims and of claims without labels."""
        findings = list(self.survey.findings)
        if self.labels is not None and self.survey.counts_subjects:
            labelled, subjects = hash_ids(self.labels["subject_id"]), self.survey.subjects
            both = len(np.intersect1d(labelled, subjects, assume_unique=True))
            without, unlabelled = len(labelled) - both, len(subjects) - both
            findings += warn_of_rows(
                without + unlabelled,
                Reason.UNMATCHED_LABELS,
                f"subjects have labels or claims alone ({without} subjects no claims, {unlabelled} "
                "subjects no labels)",
                file=self.rows[-1].file,
            )
        return findings
