"""MIMIC-IV: diagnoses of stays at discharge and, if the module is present, of visits to the emergency department.

Dates are shifted by subject: intervals are right, calendar years are not. Copies that went through a spreadsheet have two-digit years, which
take the century nearest to the year that the subject is anchored to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.dataset import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource, EventBlock, SourceTable
from bitimely_core.claims.sources.columns import check_types, find_table, match_columns
from bitimely_core.claims.sources.mimic3 import date_at_discharge
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables
from bitimely_core.errors import Finding
from bitimely_core.formats.source import Source
from bitimely_core.formats.tables import read_table
from bitimely_core.types import SourceRows

PERSON = {"subject_id": ("subject_id",), "sex": ("gender",), "age": ("anchor_age",), "year": ("anchor_year",), "death": ("dod",)}
CODED = {"position": ("seq_num",), "code": ("icd_code",), "vocab": ("icd_version",)}
MODULES = (  # kind of claims, table of diagnoses, table of stays, its key, its date
    ("inpatient", "diagnoses_icd", "admissions", "hadm_id", "dischtime"),
    ("emergency", "diagnosis", "edstays", "stay_id", "outtime"),
)
VERSIONS = {"9": "icd9cm", "10": "icd10cm"}


def read_mimic4(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MIMIC-IV: a folder with hosp/ and perhaps ed/. Option: date_format, for copies whose dates are written in another form.

    Raises UserError: what cannot be read or trusted (exit 4), options that have no meaning here (exit 2).
    """
    form = options.date_format or None
    cohort = find_table(source, "patients")
    columns = match_columns(source.path(cohort), PERSON)
    check_types(source.path(cohort), cohort, columns)
    persons, registered, findings = keep_unique_rows(read_table(source.path(cohort), cohort, columns), cohort)
    persons = _add_births(persons)
    source_tables: list[SourceTable] = []
    rows: list[SourceRows] = [registered]
    absent: list[str] = []
    for kind, diagnoses, stays, key, dated in MODULES:
        file = find_table(source, diagnoses, needed=kind == "inpatient")
        if not file:
            absent.append(diagnoses)
            continue
        table, account, stay_findings = _open_module(source, file, find_table(source, stays), (kind, key, dated), persons, form)
        source_tables.append(table)
        rows.append(account)
        findings += stay_findings
    seen = survey_tables(source_tables, vocab="icd9cm")
    return ClaimsSource(
        events=bind_events(source_tables),
        subjects=make_subjects(persons.with_columns(_reformat_near_dates(persons, "death", form)), cohort, findings),
        labels=None,
        vocab="icd9cm",
        source="inpatient",
        rows=[*seen.rows, *rows],
        findings=[*seen.findings, *findings],
        facts={"tables": [row.file for row in (*seen.rows, *rows)], "absent": absent, "dates": "time of discharge; shifted by subject"},
    )


def _add_births(persons: pl.DataFrame) -> pl.DataFrame:
    """With `year` as a number and `birth`, January of the year in which the subject had the age 0."""
    numbered = persons.with_columns(pl.col("age", "year").cast(pl.Int32, strict=False))
    born = pl.col("year") - pl.col("age")
    return numbered.with_columns(pl.when(born.is_not_null()).then(pl.format("{}-01", born)).alias("birth"))


def _open_module(
    source: Source, file: str, stays: str, names: tuple[str, str, str], persons: pl.DataFrame, form: str | None
) -> tuple[SourceTable, SourceRows, list[Finding]]:
    """A table of diagnoses, and the account of the stays that give its dates."""
    kind, key, dated = names
    columns = match_columns(source.path(stays), {"subject_id": ("subject_id",), "claim": (key,), "date": (dated,)})
    check_types(source.path(stays), stays, columns)
    ended, account, stay_findings = keep_unique_rows(read_table(source.path(stays), stays, columns), stays, "claim")
    ended = ended.join(persons.select("subject_id", "year"), on="subject_id", how="left", maintain_order="left")
    ended = ended.with_columns(_reformat_near_dates(ended, "date", form))
    path = source.path(file)
    coded = match_columns(path, {"subject_id": ("subject_id",), "claim": (key,), **CODED})
    check_types(path, file, coded)
    shape = partial(_shape_block, columns=coded, stays=ended.select("claim", "date"), kind=kind)
    table = SourceTable(file=file, path=path, columns=tuple(coded.values()), shape=shape, dated=(stays, columns["date"]))
    return table, account, stay_findings


def _shape_block(frame: pl.DataFrame, *, columns: dict[str, str], stays: pl.DataFrame, kind: str) -> EventBlock:
    events = date_at_discharge(frame, columns=columns, stays=stays).events
    named = pl.col("vocab").replace(VERSIONS)
    return EventBlock(events.with_columns(named, pl.lit(kind).alias("source")))


def _reformat_near_dates(frame: pl.DataFrame, name: str, form: str | None) -> pl.Series:
    """Dates in `form` as YYYY-MM-DD, in the century nearest to the subject's anchor `year`; other texts unchanged."""
    if form is None:
        return frame[name]
    short = form.split()[0]  # of cells that hold a date without a time
    cells: Mapping[tuple[str, int | None], str] = {}
    cells = {
        (text, near): _reformat_near_date(text, near, form, short)
        for text, near in frame.select(name, "year").drop_nulls(name).unique().iter_rows()
    }
    return pl.Series(
        name, [None if text is None else cells[text, near] for text, near in frame.select(name, "year").iter_rows()], pl.String
    )


def _reformat_near_date(text: str, near: int | None, form: str, short: str) -> str:
    days = (dates.parse_day(text, one, near) for one in (form, short))
    day = next((day for day in days if day is not None), None)
    return text if day is None else dates.format_day(day)
