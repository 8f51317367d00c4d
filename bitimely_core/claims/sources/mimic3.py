"""MIMIC-III: diagnoses of stays. Their table has no date: they are coded at discharge, so the time of discharge is theirs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bitimely_core.claims.sources.reading import (
    Claims,
    Shaped,
    Table,
    bare,
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
from bitimely_core.formats.source import Source

if TYPE_CHECKING:
    import polars as pl

DIAGNOSIS = {"subject_id": ("subject_id",), "claim": ("hadm_id",), "position": ("seq_num",), "code": ("icd9_code",)}
STAY = {"claim": ("hadm_id",), "date": ("dischtime",)}
PERSON = {"subject_id": ("subject_id",), "birth": ("dob",), "death": ("dod",), "sex": ("gender",)}


def read(source: Source, options: dict[str, Any]) -> Claims:
    """MIMIC-III.

    Subjects over 89 were born 300 years early in it: their ages are top-coded where ages are used.

    Args:
        source: folder with DIAGNOSES_ICD, ADMISSIONS, PATIENTS.
        options: none of this source.

    Raises:
        UserError: what cannot be trusted as a whole (exit 4), options that have no meaning here (exit 2).
    """
    not_for("mimic3", options, "col", "icd10_from", "source_value", "label_column", "default_source", "date_format")
    stays, people, diagnoses = (find(source, stem) for stem in ("admissions", "patients", "diagnoses_icd"))
    dated = matched(source.path(stays), STAY)
    typed(source.path(stays), stays, dated)
    discharged, account, told = one_row_each(whole(source.path(stays), stays, dated), stays, "claim")
    person = matched(source.path(people), PERSON)
    typed(source.path(people), people, person)
    persons, registered, more = one_row_each(whole(source.path(people), people, person), people)
    columns = matched(source.path(diagnoses), DIAGNOSIS)
    typed(source.path(diagnoses), diagnoses, columns)
    table = Table(
        file=diagnoses,
        path=source.path(diagnoses),
        columns=tuple(columns.values()),
        shape=partial(at_discharge, columns=columns, stays=discharged.select("claim", "date")),
        dated=(stays, dated["date"]),
    )
    found = survey([table], vocab="icd9cm")
    return Claims(
        events=stream([table]),
        subjects=subjects(persons, people, more),
        labels=None,
        vocab="icd9cm",
        source="inpatient",
        rows=[*found.rows, account, registered],
        findings=[*found.findings, *told, *more],
        facts={"tables": [diagnoses, stays, people], "dates": "time of discharge"},
    )


def at_discharge(frame: pl.DataFrame, *, columns: dict[str, str], stays: pl.DataFrame) -> Shaped:
    """Diagnoses with the date of their stay; none where there is no such stay.

    Args:
        frame: a block.
        columns: key -> name; position as text, any other key as it is.
        stays: claim, date.
    """
    import polars as pl

    named = frame.select("row", *(bare(pl.col(name)).alias(key) for key, name in columns.items()))
    dated = named.join(stays, on="claim", how="left", maintain_order="left")
    return Shaped(dated.with_columns(pl.col("position").cast(pl.Int16, strict=False)))
