"""MIMIC-IV: diagnoses of stays at discharge and, if the module is present, of visits to the
emergency department.

Dates are shifted by subject: intervals are right, calendar years are not. Copies that went through
a spreadsheet have two-digit years, which take the century nearest to the year that the subject is
anchored to.
"""

from __future__ import annotations

from functools import partial

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import find_table, open_table
from bitimely_core.claims.sources.mimic3 import date_at_discharge
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables
from bitimely_core.errors import Finding
from bitimely_core.formats.source import Source
from bitimely_core.types import SourceRows

PERSON = {
    "subject_id": ("subject_id",),
    "sex": ("gender",),
    "age": ("anchor_age",),
    "year": ("anchor_year",),
    "death": ("dod",),
}
CODED = {"position": ("seq_num",), "code": ("icd_code",), "vocab": ("icd_version",)}
MODULES = (  # kind of claims, table of diagnoses, table of stays, its key, its date
    ("inpatient", "diagnoses_icd", "admissions", "hadm_id", "dischtime"),
    ("emergency", "diagnosis", "edstays", "stay_id", "outtime"),
)
VERSIONS = {"9": "icd9cm", "10": "icd10cm"}


def read_mimic4(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MIMIC-IV: a folder with hosp/ and perhaps ed/. Option: date_format, for copies whose dates
    are written in another form.

    Raises UserError: what cannot be read or trusted (exit 4), options that have no meaning here
    (exit 2).
    """
    form = options.date_format or None
    cohort = open_table(source, find_table(source, "patients"), PERSON)
    persons, registered, findings = keep_unique_rows(cohort.read(), cohort.file)
    persons = persons.with_columns(pl.col("age", "year").cast(pl.Int32, strict=False))
    born = pl.col("year") - pl.col("age")  # January of the year in which the subject had the age 0
    persons = persons.with_columns(
        pl.when(born.is_not_null()).then(pl.format("{}-01", born)).alias("birth")
    )
    source_tables: list[SourceTable] = []
    rows, absent = [registered], []
    for kind, diagnoses, stays, key, dated in MODULES:
        file = find_table(source, diagnoses, needed=kind == "inpatient")
        if not file:
            absent.append(diagnoses)
            continue
        table, account, stay_findings = _open_module(
            source, file, find_table(source, stays), (kind, key, dated), persons, form
        )
        source_tables.append(table)
        rows.append(account)
        findings += stay_findings
    seen = survey_tables(source_tables, vocab="icd9cm")
    return ClaimsSource(
        events=bind_events(source_tables),
        subjects=make_subjects(
            persons.with_columns(_reformat_near_dates(persons, "death", form)),
            cohort.file,
            findings,
        ),
        vocab="icd9cm",
        source="inpatient",
        rows=[*seen.rows, *rows],
        findings=[*seen.findings, *findings],
        facts={
            "tables": [row.file for row in (*seen.rows, *rows)],
            "absent": absent,
            "dates": "time of discharge; shifted by subject",
        },
    )


def _open_module(
    source: Source,
    file: str,
    stays_file: str,
    names: tuple[str, str, str],
    persons: pl.DataFrame,
    form: str | None,
) -> tuple[SourceTable, SourceRows, list[Finding]]:
    """A table of diagnoses, and the account of the stays that give its dates."""
    kind, key, dated = names
    stays = open_table(
        source, stays_file, {"subject_id": ("subject_id",), "claim": (key,), "date": (dated,)}
    )
    ended, account, stay_findings = keep_unique_rows(stays.read(), stays.file, "claim")
    ended = ended.join(
        persons.select("subject_id", "year"), on="subject_id", how="left", maintain_order="left"
    )
    ended = ended.with_columns(_reformat_near_dates(ended, "date", form))
    coded = open_table(source, file, {"subject_id": ("subject_id",), "claim": (key,), **CODED})
    shape = partial(
        _shape_block, columns=coded.columns, stays=ended.select("claim", "date"), kind=kind
    )
    return coded.as_events(shape, dated=(stays.file, stays.columns["date"])), account, stay_findings


def _shape_block(
    frame: pl.DataFrame, *, columns: dict[str, str], stays: pl.DataFrame, kind: str
) -> EventBlock:
    events = date_at_discharge(frame, columns=columns, stays=stays).events
    return EventBlock(
        events.with_columns(pl.col("vocab").replace(VERSIONS), pl.lit(kind).alias("source"))
    )


def _reformat_near_dates(frame: pl.DataFrame, name: str, form: str | None) -> pl.Series:
    """Dates in `form` as YYYY-MM-DD, in the century nearest to the subject's anchor `year`; other
    texts unchanged.
    """
    if form is None:
        return frame[name]
    cells: dict[tuple[str | None, int | None], str | None] = {}
    for text, near in frame.select(name, "year").unique().iter_rows():
        # the short form: cells with a date without a time
        days = [dates.parse_day(text, one, near) for one in (form, form.split()[0])]
        cells[text, near] = next((dates.format_day(day) for day in days if day is not None), text)
    return pl.Series(
        name, [cells[row] for row in frame.select(name, "year").iter_rows()], pl.String
    )
