"""MIMIC-III: diagnoses of stays. Their table has no dates: they are coded at discharge, so they get its time."""

from __future__ import annotations

from functools import partial

import polars as pl

from bitimely_core.claims.dataset import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource, EventBlock, SourceTable
from bitimely_core.claims.sources.columns import check_types, find_table, match_columns
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables
from bitimely_core.formats.source import Source
from bitimely_core.formats.tables import read_table, strip_blanks

DIAGNOSIS = {"subject_id": ("subject_id",), "claim": ("hadm_id",), "position": ("seq_num",), "code": ("icd9_code",)}
STAY = {"claim": ("hadm_id",), "date": ("dischtime",)}
PERSON = {"subject_id": ("subject_id",), "birth": ("dob",), "death": ("dod",), "sex": ("gender",)}


def read_mimic3(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MIMIC-III: a folder with DIAGNOSES_ICD, ADMISSIONS, PATIENTS; no options.

    Subjects over 89 were born 300 years early in it: their ages are top-coded where ages are used. Raises UserError: what cannot be read or
    trusted (exit 4), options that have no meaning here (exit 2).
    """
    stays, cohort, diagnoses = (find_table(source, stem) for stem in ("admissions", "patients", "diagnoses_icd"))
    dated = match_columns(source.path(stays), STAY)
    check_types(source.path(stays), stays, dated)
    discharged, account, stay_findings = keep_unique_rows(read_table(source.path(stays), stays, dated), stays, "claim")
    person = match_columns(source.path(cohort), PERSON)
    check_types(source.path(cohort), cohort, person)
    persons, registered, more = keep_unique_rows(read_table(source.path(cohort), cohort, person), cohort)
    columns = match_columns(source.path(diagnoses), DIAGNOSIS)
    check_types(source.path(diagnoses), diagnoses, columns)
    table = SourceTable(
        file=diagnoses,
        path=source.path(diagnoses),
        columns=tuple(columns.values()),
        shape=partial(date_at_discharge, columns=columns, stays=discharged.select("claim", "date")),
        dated=(stays, dated["date"]),
    )
    survey = survey_tables([table], vocab="icd9cm")
    return ClaimsSource(
        events=bind_events([table]),
        subjects=make_subjects(persons, cohort, more),
        labels=None,
        vocab="icd9cm",
        source="inpatient",
        rows=[*survey.rows, account, registered],
        findings=[*survey.findings, *stay_findings, *more],
        facts={"tables": [diagnoses, stays, cohort], "dates": "time of discharge"},
    )


def date_at_discharge(frame: pl.DataFrame, *, columns: dict[str, str], stays: pl.DataFrame) -> EventBlock:
    """Diagnoses of a block with the date of their stay (`stays`: claim, date); null without such a stay.

    `columns`: key -> name; position as text, any other key as it is.
    """
    named = frame.select("row", *(strip_blanks(pl.col(name)).alias(key) for key, name in columns.items()))
    dated = named.join(stays, on="claim", how="left", maintain_order="left")
    return EventBlock(dated.with_columns(pl.col("position").cast(pl.Int16, strict=False)))
