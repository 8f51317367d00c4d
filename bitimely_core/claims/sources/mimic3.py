"""Reads MIMIC-III: diagnoses of stays.

Their table has no dates. They are coded at discharge, and so they get its time.
"""

from __future__ import annotations

from functools import partial

import polars as pl

from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import find_table, open_table
from bitimely_core.claims.sources.source_options import parse_date_forms
from bitimely_core.claims.sources.source_survey import EventReader, SourceSurvey
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.words import LAYOUTS
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source


def read_mimic3(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MIMIC-III: a folder with DIAGNOSES_ICD, ADMISSIONS, PATIENTS.

    Option: date_format, for copies whose dates are written in another form. Subjects over 89 were
    born 300 years early in it: their ages are top-coded where ages are used. Raises UserError: what
    cannot be read or trusted (exit 4), options that have no meaning here (exit 2).
    """
    diagnoses, stays, cohort = (
        open_table(source, find_table(source, stem), wanted)
        for stem, wanted in LAYOUTS["mimic3"].items()
    )
    survey, forms = SourceSurvey(), parse_date_forms(options)
    discharges = keep_unique_rows(stays.read(), stays.file, survey, "claim")
    persons = keep_unique_rows(cohort.read(), cohort.file, survey)
    shape = partial(date_at_discharge, stays=discharges.select("claim", "date"))
    table = SourceTable(
        table=diagnoses, shape=shape, dated=(stays.file, stays.columns["date"]), form=forms["date"]
    )
    survey.read_all([table])
    return ClaimsSource(
        events=EventReader([table]),
        subjects=make_subjects(persons, cohort.file, survey, forms),
        source="inpatient",
        survey=survey,
        facts={"dates": "time of discharge"},
    )


def date_at_discharge(frame: pl.DataFrame, *, stays: pl.DataFrame) -> EventBlock:
    """Diagnoses of a block with the date of their stay; null without such a stay.

    `stays`: claim, date.
    """
    rows = frame.with_columns(tables.strip_blanks(pl.col(pl.String)))
    dated = rows.join(stays, on="claim", how="left", maintain_order="left")
    return EventBlock(dated.with_columns(pl.col("position").cast(pl.Int16, strict=False)))
