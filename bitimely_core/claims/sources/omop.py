"""OMOP CDM 5.2 to 5.4: the source concepts of conditions, and the V, E and Z codes that its rules
of domains put into three other tables.

Standard concepts (SNOMED) are not read. Without a table of concepts, or without a concept, the
source value is read as a code. The other three tables hold procedure codes too, so that a value of
theirs is used only if it can only be an ICD code.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import polars as pl

from bitimely_core.claims.codes import MARK, OTHER
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import (
    OpenTable,
    assign_vocabulary,
    find_table,
    open_table,
    reformat_dates,
)
from bitimely_core.claims.sources.options import parse_default_source, parse_switch_day
from bitimely_core.claims.sources.source_table import EventBlock
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables
from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.types import SourceRows

EVENTS = {  # table -> prefix of its columns, name of its date
    "condition_occurrence": ("condition", "condition_start_date"),
    "observation": ("observation", "observation_date"),
    "procedure_occurrence": ("procedure", "procedure_date"),
    "measurement": ("measurement", "measurement_date"),
}
MORE_EVENTS = {  # with `--codes all`
    "drug_exposure": ("drug", "drug_exposure_start_date"),
    "device_exposure": ("device", "device_exposure_start_date"),
    "visit_occurrence": ("visit", "visit_start_date"),
}
VOCABULARIES = {"ICD9CM": "icd9cm", "ICD10CM": "icd10cm", "ICD10": "icd10"}
VISITS = {"9201": "inpatient", "262": "inpatient", "9202": "outpatient", "9203": "emergency"}
SEXES = {"8507": 1, "8532": 2}
# supplementary codes, with or without their dot
LETTERED = r"^(?:V\d{2}\.?\d{0,2}|E\d{3}\.?\d?|Z\d{2}\.?[0-9A-Z]{0,4})$"
# HCPCS: vision, hearing, equipment
PROCEDURE = r"^(?:V(?:2[0-7]|5[0-3])\d{2}|E(?:[0-2]\d|80)\d{2})$"
SUBJECT = {"subject_id": ("person_id",)}
CONCEPT = {"concept": ("concept_id",), "vocab": ("vocabulary_id",), "known": ("concept_code",)}
PERSON_DATES = {  # table -> key of a date, its column
    "observation_period": {
        "obs_start": "observation_period_start_date",
        "obs_end": "observation_period_end_date",
    },
    "death": {"death": "death_date"},
}


def read_omop(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """OMOP CDM: a folder with its tables as csv or Parquet.

    Options: default_source (of visits of other kinds, and of rows without one), date_format,
    icd10_from (of rows without a source concept), codes (all: rows without an ICD code have their
    standard concept, with the number of measurements and observations), time_unit.
    Raises UserError: what cannot be read or trusted (exit 4), options that have no meaning here
    (exit 2).
    """
    form = options.date_format or None
    since, kind = parse_switch_day(options), parse_default_source(options)
    concepts, visits = _read_concepts(source), _read_visits(source)
    others = options.codes == "all"
    files = {
        name: find_table(source, name, needed=False)
        for name in (*EVENTS, *MORE_EVENTS)
        if others or name in EVENTS
    }
    opened = {
        name: _open_events(source, name, file, others, options.time_unit == "minute")
        for name, file in files.items()
        if file
    }
    named = _name_concepts(source, opened.values()) if others else None
    shape = partial(
        _shape_block, concepts=concepts, visits=visits, form=form, since=since, named=named
    )
    found = [
        table.as_events(
            partial(shape, columns=table.columns, only_lettered=name != "condition_occurrence"),
            others=others,
        )
        for name, table in opened.items()
    ]
    absent = [name for name in EVENTS if not files[name]]
    if not found:
        raise input_error(
            Reason.NO_INPUT,
            f"found none of {', '.join(EVENTS)}",
            hint="Give the folder that holds the tables",
        )
    seen = survey_tables(found, vocab="icd9cm", stated="surely" if since is not None else "nowhere")
    persons, rows, findings = _read_persons(source, form)
    if absent:
        text = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        wanted = "V, E and Z codes (insulin use, status after) may be missing: OMOP routes them by domain"
        findings.append(
            Finding(Reason.MISSING_PAIR, text, wanted, level="warning", count=len(absent))
        )
    kinds = "of the kinds 9201, 262, 9202, 9203; all others are of the default source"
    facts = {
        "tables": [table.file for table in found] + [row.file for row in rows],
        "absent": absent,
        "concepts": "source concepts"
        if concepts is not None
        else "no table of concepts: source values are read as ICD-9-CM",
        "visits": kinds if visits is not None else "no table of visits",
    }
    return ClaimsSource(
        events=bind_events(found),
        subjects=make_subjects(persons, rows[0].file, findings, form, seen.last),
        vocab="icd9cm",
        source=kind,
        rows=[*seen.rows, *rows],
        findings=[*seen.findings, *findings],
        facts=facts,
    )


def _read_concepts(source: Source) -> pl.DataFrame | None:
    """concept, vocab, known: the ICD concepts. The vocabulary's own files are separated by tabs and
    know no quotes.
    """
    if not (file := find_table(source, "concept", needed=False)):
        return None
    _, path, columns, mark = open_table(source, file, CONCEPT, codes=("known",))
    kept = []
    for block in tables.read_frames(
        path, tuple(columns.values()), delimiter=mark, quotes=mark != "\t"
    ):
        if block.faults:
            first = block.faults[0]
            raise input_error(
                first.code, first.problem, first.requirement, file=file, row=first.row
            )
        named = block.frame.select(
            tables.strip_blanks(pl.col(name)).alias(key) for key, name in columns.items()
        )
        kept.append(named.filter(pl.col("vocab").is_in(list(VOCABULARIES))))
    return (
        pl.concat(kept).with_columns(pl.col("vocab").replace_strict(VOCABULARIES)).unique("concept")
    )


def _read_visits(source: Source) -> pl.DataFrame | None:
    """claim, source: the visits whose kind is known."""
    if not (file := find_table(source, "visit_occurrence", needed=False)):
        return None
    table = open_table(
        source, file, {"claim": ("visit_occurrence_id",), "source": ("visit_concept_id",)}
    )
    visits = (
        table.read()
        .select(number_text(key, key) for key in table.columns)
        .filter(pl.col("source").is_in(list(VISITS)))
    )
    return visits.select(
        "claim", pl.col("source").replace_strict(VISITS, return_dtype=pl.String)
    ).unique("claim", maintain_order=True)


def number_text(name: str, key: str) -> pl.Expr:
    """A column of numbers as text; tools that have no empty integers write 10.0 for 10."""
    return tables.strip_blanks(pl.col(name)).str.replace(r"\.0$", "").alias(key)


def _name_concepts(source: Source, opened: Collection[OpenTable]) -> pl.DataFrame:
    """concept, token, symbol of the standard concepts and units in the tables: `LOINC//2345-7`
    (`CONCEPT//3004501` without a row of the vocabulary), and the code alone, `mg/dL` of a unit
    (null without such a row).
    """
    ids = pl.Series("concept", [], pl.String)
    for table in opened:
        keys = [key for key in ("standard", "unit") if key in table.columns]
        for block in tables.read_frames(
            table.path, tuple(table.columns[key] for key in keys), delimiter=table.delimiter
        ):
            found = [
                block.frame.select(number_text(table.columns[key], "concept")).to_series()
                for key in keys
            ]
            ids = pl.concat([ids, *found]).unique()
    wanted = ids.filter(~ids.is_in(["", "0"])).drop_nulls().sort().to_frame()
    named = pl.DataFrame(schema={"concept": pl.String, "vocab": pl.String, "known": pl.String})
    if file := find_table(source, "concept", needed=False):
        _, path, columns, mark = open_table(source, file, CONCEPT, codes=("known",))
        for block in tables.read_frames(
            path, tuple(columns.values()), delimiter=mark, quotes=mark != "\t"
        ):
            rows = block.frame.select(
                tables.strip_blanks(pl.col(name)).alias(key) for key, name in columns.items()
            )
            named = pl.concat([named, rows.join(wanted, on="concept", how="semi")])
    token = pl.coalesce(
        pl.format(f"{{}}{MARK}{{}}", "vocab", "known"), pl.format(f"CONCEPT{MARK}{{}}", "concept")
    )
    joined = wanted.join(named.unique("concept"), on="concept", how="left", maintain_order="left")
    return joined.select("concept", token=token, symbol="known")


def _open_events(source: Source, name: str, file: str, others: bool, timed: bool) -> OpenTable:
    prefix, dated = (EVENTS | MORE_EVENTS)[name]
    wanted = {
        **SUBJECT,
        "date": (dated,),
        **(
            {"code": (f"{prefix}_source_value",), "concept": (f"{prefix}_source_concept_id",)}
            if name in EVENTS
            else {}
        ),
        "claim": ("visit_occurrence_id",),
    }
    number = {
        "value": ("value_as_number",),
        "unit": ("unit_concept_id",),
        "unit_text": ("unit_source_value",),
    }
    more = (
        {"standard": (f"{prefix}_concept_id",), **(number if name in EVENTS else {})}
        if others
        else {}
    )
    clock = {"moment": (f"{dated}time",)} if timed else {}
    return open_table(source, file, wanted | more | clock, {"concept", "claim", "moment", *number})


def _shape_block(
    frame: pl.DataFrame,
    *,
    columns: dict[str, str],
    concepts: pl.DataFrame | None,
    visits: pl.DataFrame | None,
    form: str | None,
    since: int | None,
    only_lettered: bool,
    named: pl.DataFrame | None,
) -> EventBlock:
    """The rows whose source concept is an ICD code, and those without one whose source value is;
    with `named` also other rows, with their standard concept, its unit and number.
    """
    rows = frame.select(
        "row",
        *(
            number_text(name, key)
            if key in {"claim", "concept", "standard", "unit"}
            else tables.strip_blanks(pl.col(name)).alias(key)
            for key, name in columns.items()
        ),
    )
    rows = rows.with_columns(reformat_dates(rows["date"], form))
    # a table without ICD codes
    rows = rows.with_columns(code=pl.lit(None, pl.String)) if "code" not in columns else rows
    if "moment" in columns:
        rows = rows.with_columns(
            date=pl.when(pl.col("moment").str.contains(":")).then("moment").otherwise("date")
        )
    if "claim" in columns and visits is not None:
        rows = rows.join(visits, on="claim", how="left", maintain_order="left")
    text = pl.col("code").str.to_uppercase()
    written, stated = pl.lit(value=True), pl.lit(None, pl.String)
    if only_lettered:
        written = text.str.contains(LETTERED) & ~text.str.contains(PROCEDURE)
        stated = pl.when(text.str.starts_with("Z")).then(pl.lit("icd10cm")).otherwise(stated)
    if since is not None:
        stated = pl.coalesce(stated, assign_vocabulary(rows["date"], since, "icd9cm", "icd10cm"))
    written, known = written.fill_null(value=False), pl.col("known")
    if concepts is None or "concept" not in columns:
        rows = rows.with_columns(pl.lit(None, pl.String).alias("known"), stated.alias("vocab"))
    else:
        rows = rows.join(concepts, on="concept", how="left", maintain_order="left")
        written &= pl.col("concept").is_null() | (pl.col("concept") == "0")
        rows = rows.with_columns(
            pl.when(known.is_null()).then(stated).otherwise(pl.col("vocab")).alias("vocab")
        )
    is_icd = known.is_not_null() | written
    if named is not None:
        rows = _add_tokens(rows, named)
        value = (
            pl.col("value").cast(pl.Float32, strict=False)
            if "value" in columns
            else pl.lit(None, pl.Float32)
        )
        other = ~is_icd & pl.col("token").is_not_null()
        changes = {
            "vocab": pl.lit(OTHER),
            "code": pl.col("token"),
            "known": pl.lit(None, pl.String),
            "claim": pl.lit(None, pl.String),
        }
        rows = (
            rows.with_columns(pl.lit(None, pl.String).alias("claim"))
            if "claim" not in columns
            else rows
        )
        rows = rows.with_columns(other=other, is_icd=is_icd).with_columns(
            *(
                pl.when("other").then(new).otherwise(name).alias(name)
                for name, new in changes.items()
            ),
            value=pl.when(pl.col("other") & value.is_finite()).then(value),
        )
        is_icd = pl.col("is_icd") | pl.col("other")
    kept = rows.filter(is_icd).with_columns(pl.coalesce(known, "code").alias("code"))
    left = rows.height - kept.height
    return EventBlock(kept, {str(Reason.WRONG_VOCABULARY): left} if left else {})


def _add_tokens(rows: pl.DataFrame, named: pl.DataFrame) -> pl.DataFrame:
    """Rows with the token of their standard concept and its unit, `LOINC//2345-7//mg/dL`, so that
    numbers of two units are not taken for one quantity. The unit is that of the vocabulary, else as
    the source writes it, else the number of its concept.
    """
    rows = rows.join(
        named.select("token", standard="concept"), on="standard", how="left", maintain_order="left"
    )
    stated = [pl.lit(None, pl.String)]
    if "unit" in rows.columns:
        rows = rows.join(
            named.select("symbol", unit="concept"), on="unit", how="left", maintain_order="left"
        )
        stated.append(pl.col("symbol"))
    stated += [
        pl.col(name).replace({"": None, "0": None})
        for name in ("unit_text", "unit")
        if name in rows.columns
    ]
    unit = pl.coalesce(stated)
    return rows.with_columns(
        token=pl.when(unit.is_not_null())
        .then(pl.format(f"{{}}{MARK}{{}}", "token", unit))
        .otherwise("token")
    )


def _read_persons(
    source: Source, form: str | None
) -> tuple[pl.DataFrame, list[SourceRows], list[Finding]]:
    """Subjects with birth, sex, death and the time for which they were observed."""
    wanted = {
        **SUBJECT,
        "sex": ("gender_concept_id",),
        "year": ("year_of_birth",),
        "month": ("month_of_birth",),
        "day": ("day_of_birth",),
    }
    table = open_table(source, find_table(source, "person"), wanted, {"month", "day"})
    persons, account, findings = keep_unique_rows(table.read(), table.file)
    persons = persons.with_columns(
        pl.col("sex").replace_strict(SEXES, default=0, return_dtype=pl.UInt8)
    )
    parts = [
        pl.col(name) if name in table.columns else pl.lit(None, pl.String)
        for name in ("month", "day")
    ]
    month, day = (part.fill_null("1").str.replace(r"\.0$", "") for part in parts)
    persons = persons.with_columns(
        pl.format("{}-{}-{}", pl.col("year").str.replace(r"\.0$", ""), month, day).alias("birth")
    )
    rows = [account]
    for name, columns in PERSON_DATES.items():  # any number of rows per person
        if file := find_table(source, name, needed=False):
            frame = open_table(
                source, file, SUBJECT | {key: (column,) for key, column in columns.items()}
            ).read()
            rows.append(SourceRows(file=file, kind="subjects", seen=frame.height))
            read = frame.with_columns(reformat_dates(frame[key], form) for key in columns)
            spans = read.group_by("subject_id").agg(
                pl.col(key).max() if key == "obs_end" else pl.col(key).min() for key in columns
            )
            persons = persons.join(spans, on="subject_id", how="left", maintain_order="left")
    return persons, rows, findings
