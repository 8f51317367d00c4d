"""Reads MIMIC-IV: diagnoses of stays at discharge and, if the module is present, of visits to the
emergency department.

Dates are shifted by subject: intervals are right, calendar years are not. Copies that went through
a spreadsheet have two-digit years. These take the century nearest to the year that the subject is
anchored to.
"""

from __future__ import annotations

from functools import partial

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import find_table, open_table
from bitimely_core.claims.sources.mimic3 import date_at_discharge
from bitimely_core.claims.sources.source_options import parse_date_forms
from bitimely_core.claims.sources.source_survey import EventReader, SourceSurvey
from bitimely_core.claims.sources.source_table import EventBlock, OpenTable, SourceTable
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    keep_unique_rows,
    make_subjects,
)
from bitimely_core.claims.sources.words import LAYOUTS
from bitimely_core.formats.source import Source

TABLES = LAYOUTS["mimic4"]
MODULES = {"diagnoses_icd": ("admissions", "inpatient"), "diagnosis": ("edstays", "emergency")}
"""Table of diagnoses -> table of their stays, kind of claims."""
VERSIONS = {"9": "icd9cm", "10": "icd10cm"}


def read_mimic4(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MIMIC-IV: a folder with hosp/ and perhaps ed/.

    Option: date_format, for copies whose dates are written in another form. Raises UserError: what
    cannot be read or trusted (exit 4), options that have no meaning here (exit 2).
    """
    forms = parse_date_forms(options)
    cohort = open_table(source, find_table(source, "patients"), TABLES["patients"])
    survey = SourceSurvey()
    persons = keep_unique_rows(cohort.read(), cohort.file, survey)
    persons = persons.with_columns(pl.col("age", "year").cast(pl.Int32, strict=False))
    born = pl.col("year") - pl.col("age")  # January of the year in which the subject had the age 0
    persons = persons.with_columns(
        pl.when(born.is_not_null()).then(pl.format("{}-01", born)).alias("birth")
    )
    source_tables, absent = [], []
    for stem in MODULES:
        if file := find_table(source, stem, needed=stem == "diagnoses_icd"):
            diagnoses = open_table(source, file, TABLES[stem])
            dated = _date_module(source, stem, diagnoses, persons, forms["date"], survey)
            source_tables.append(dated)
        else:
            absent.append(stem)
    survey.read_all(source_tables)
    persons = persons.with_columns(_reformat_near_dates(persons, "death", forms["death"]))
    subjects = make_subjects(persons, cohort.file, survey)
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=subjects,
        source="inpatient",
        survey=survey,
        facts={"absent": absent, "dates": "time of discharge; shifted by subject"},
    )


def _date_module(
    source: Source,
    stem: str,
    diagnoses: OpenTable,
    persons: pl.DataFrame,
    form: str,
    accounts: TableAccounts,
) -> SourceTable:
    """A table of diagnoses with the dates of its stays."""
    stem_of_stays, kind = MODULES[stem]
    stays = open_table(source, find_table(source, stem_of_stays), TABLES[stem_of_stays])
    ended = keep_unique_rows(stays.read(), stays.file, accounts, "claim").join(
        persons.select("subject_id", "year"), on="subject_id", how="left", maintain_order="left"
    )
    dates_of_stays = ended.select("claim", _reformat_near_dates(ended, "date", form))
    shape = partial(_shape_block, stays=dates_of_stays, kind=kind)
    dated = (stays.file, stays.columns["date"])
    return SourceTable(table=diagnoses, shape=shape, dated=dated)


def _shape_block(frame: pl.DataFrame, *, stays: pl.DataFrame, kind: str) -> EventBlock:
    events = date_at_discharge(frame, stays=stays).events
    return EventBlock(
        events.with_columns(pl.col("vocab").replace(VERSIONS), pl.lit(kind).alias("source"))
    )


def _reformat_near_dates(frame: pl.DataFrame, name: str, form: str) -> pl.Series:
    """Dates in `form` as YYYY-MM-DD, in the century nearest to the subject's anchor `year`; other
    texts unchanged.
    """
    if not form:
        return frame[name]
    cells: dict[tuple[str | None, int | None], str | None] = {}
    for text, year in frame.select(name, "year").unique().iter_rows():
        # the short form: cells with a date without a time
        days = [dates.parse_day(text, part, year) for part in (form, form.split()[0])]
        cells[text, year] = next((dates.format_day(day) for day in days if day is not None), text)
    reformatted = [cells[row] for row in frame.select(name, "year").iter_rows()]
    return pl.Series(name, reformatted, pl.String)
