"""MIMIC-IV: diagnoses of stays at discharge and, where the module is there, of visits to the emergency department.

Dates are shifted by subject: intervals are right, calendar years are not. Copies that went through a spreadsheet have two-digit years, which
take the century nearest to the year that the subject is anchored to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bitimely_core.claims import dates
from bitimely_core.claims.sources.mimic3 import at_discharge
from bitimely_core.claims.sources.reading import (
    Claims,
    Shaped,
    Table,
    find,
    matched,
    not_for,
    one_row_each,
    stream,
    subjects,
    survey,
    typed,
    whole,
)
from bitimely_core.errors import Finding
from bitimely_core.formats.source import Source
from bitimely_core.types import Rows

if TYPE_CHECKING:
    import polars as pl

PERSON = {"subject_id": ("subject_id",), "sex": ("gender",), "age": ("anchor_age",), "year": ("anchor_year",), "death": ("dod",)}
CODED = {"position": ("seq_num",), "code": ("icd_code",), "vocab": ("icd_version",)}
MODULES = (  # kind of claims, table of diagnoses, table of stays, its key, its date
    ("inpatient", "diagnoses_icd", "admissions", "hadm_id", "dischtime"),
    ("emergency", "diagnosis", "edstays", "stay_id", "outtime"),
)
VERSIONS = {"9": "icd9cm", "10": "icd10cm"}


def read(source: Source, options: dict[str, Any]) -> Claims:
    """MIMIC-IV.

    Args:
        source: folder with hosp/ and perhaps ed/.
        options: date_format, for copies whose dates are written in another form.

    Raises:
        UserError: what cannot be trusted as a whole (exit 4), options that have no meaning here (exit 2).
    """
    not_for("mimic4", options, "col", "icd10_from", "source_value", "label_column", "default_source")
    form = options.get("date_format") or None
    people = find(source, "patients")
    columns = matched(source.path(people), PERSON)
    typed(source.path(people), people, columns)
    persons, registered, findings = one_row_each(whole(source.path(people), people, columns), people)
    persons = _anchored(persons)
    found: list[Table] = []
    rows: list[Rows] = [registered]
    absent: list[str] = []
    for kind, diagnoses, stays, key, dated in MODULES:
        file = find(source, diagnoses, needed=kind == "inpatient")
        if not file:
            absent.append(diagnoses)
            continue
        table, account, told = _module(source, file, find(source, stays), (kind, key, dated), persons, form)
        found.append(table)
        rows.append(account)
        findings += told
    seen = survey(found, vocab="icd9cm")
    return Claims(
        events=stream(found),
        subjects=subjects(persons.with_columns(_near(persons, "death", form)), people, findings),
        labels=None,
        vocab="icd9cm",
        source="inpatient",
        rows=[*seen.rows, *rows],
        findings=[*seen.findings, *findings],
        facts={"tables": [row.file for row in (*seen.rows, *rows)], "absent": absent, "dates": "time of discharge; shifted by subject"},
    )


def _anchored(persons: pl.DataFrame) -> pl.DataFrame:
    """With `year` as a number and `birth`, January of the year in which the subject had the age 0."""
    import polars as pl

    numbered = persons.with_columns(pl.col("age", "year").cast(pl.Int32, strict=False))
    born = pl.col("year") - pl.col("age")
    return numbered.with_columns(pl.when(born.is_not_null()).then(pl.format("{}-01", born)).alias("birth"))


def _module(
    source: Source, file: str, stays: str, names: tuple[str, str, str], persons: pl.DataFrame, form: str | None
) -> tuple[Table, Rows, list[Finding]]:
    """A table of diagnoses, and the account of the stays that date it."""
    kind, key, dated = names
    columns = matched(source.path(stays), {"subject_id": ("subject_id",), "claim": (key,), "date": (dated,)})
    typed(source.path(stays), stays, columns)
    ended, account, told = one_row_each(whole(source.path(stays), stays, columns), stays, "claim")
    ended = ended.join(persons.select("subject_id", "year"), on="subject_id", how="left", maintain_order="left")
    ended = ended.with_columns(_near(ended, "date", form))
    path = source.path(file)
    coded = matched(path, {"subject_id": ("subject_id",), "claim": (key,), **CODED})
    typed(path, file, coded)
    shape = partial(_shape, columns=coded, stays=ended.select("claim", "date"), kind=kind)
    table = Table(file=file, path=path, columns=tuple(coded.values()), shape=shape, dated=(stays, columns["date"]))
    return table, account, told


def _shape(frame: pl.DataFrame, *, columns: dict[str, str], stays: pl.DataFrame, kind: str) -> Shaped:
    import polars as pl

    events = at_discharge(frame, columns=columns, stays=stays).events
    named = pl.col("vocab").replace(VERSIONS)
    return Shaped(events.with_columns(named, pl.lit(kind).alias("source")))


def _near(frame: pl.DataFrame, name: str, form: str | None) -> pl.Series:
    """A column of dates that `form` reads, written anew with the century nearest to the subject's anchor `year`; all others as they are."""
    import polars as pl

    if form is None:
        return frame[name]
    short = form.split()[0]  # of cells that hold a date without a time
    cells: Mapping[tuple[str, int | None], str] = {}
    cells = {
        (text, near): _civil(text, near, form, short) for text, near in frame.select(name, "year").drop_nulls(name).unique().iter_rows()
    }
    return pl.Series(
        name, [None if text is None else cells[text, near] for text, near in frame.select(name, "year").iter_rows()], pl.String
    )


def _civil(text: str, near: int | None, form: str, short: str) -> str:
    days = (dates.read(text, one, near) for one in (form, short))
    day = next((day for day in days if day is not None), None)
    return text if day is None else dates.iso(day)
