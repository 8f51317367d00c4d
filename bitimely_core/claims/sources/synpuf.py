"""CMS DE-SynPUF: beneficiaries of a year each, claims of three kinds, any number of the 20 samples,
unpacked or as downloaded.

A claim is a set of codes: the lines of a carrier claim repeat those of its header, and a long claim
goes on in a second segment, whose dates
are empty, given only on the first. Some archives of the site have wrong names: an archive is
identified by the table inside.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polars as pl

from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import OpenTable, check_types, match_columns, open_table
from bitimely_core.claims.sources.options import LabelColumn, parse_label_columns
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable
from bitimely_core.claims.sources.subject_tables import keep_unique_rows, make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables, unpivot_codes
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.csv_text import open_member
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.types import SourceRows

ENDING = r"(?:\.csv(?:\.gz|\.zip)?|\.parquet|\.zip)"
BENEFICIARIES = re.compile(
    rf"DE1_0_(?P<year>\d{{4}})_Beneficiary_Summary_File_Sample_(?P<sample>\d+)(?P<part>\w*){ENDING}",
    re.IGNORECASE | re.ASCII,
)
CLAIMS = re.compile(
    rf"DE1_0_\d{{4}}_to_\d{{4}}_(?P<what>Inpatient|Outpatient|Carrier)_Claims_Sample_(?P<sample>\d+)(?P<part>\w*){ENDING}",
    re.IGNORECASE | re.ASCII,
)
KIND = {"inpatient": "inpatient", "outpatient": "outpatient", "carrier": "physician"}
SUBJECT, CLAIM, SEGMENT, DATE, ADMITTING = (
    "DESYNPUF_ID",
    "CLM_ID",
    "SEGMENT",
    "CLM_FROM_DT",
    "ADMTNG_ICD9_DGNS_CD",
)
CODE = re.compile(r"(LINE_)?ICD9_DGNS_CD_(\d+)", re.IGNORECASE | re.ASCII)
PERSON = {
    "subject_id": (SUBJECT,),
    "birth": ("BENE_BIRTH_DT",),
    "death": ("BENE_DEATH_DT",),
    "sex": ("BENE_SEX_IDENT_CD",),
}


class _SynpufFile(NamedTuple):
    rel: str
    about: dict[str, str]  # year or what, sample, part: by the name of the table, in lower case


@dataclass(frozen=True)
class _ClaimSegments:
    """Dates and repeated codes of claims in several segments."""

    dates: pl.DataFrame  # claim, first: the date of its first segment
    repeats: pl.DataFrame  # row, code: is also on an earlier segment
    filled: int  # rows
    undated: int


def read_synpuf(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """CMS DE-SynPUF: a folder with any of the files.

    Options: label_column (`SP_CHF:chf:1` or `SP_CHF:chf:1@2010`; 1 is yes, any year by default),
    admitting,
    date_format. Raises UserError: what cannot
    be read or trusted (exit 4), options that are not understood (exit 2).
    """
    files = _find_files(source, CLAIMS)
    if not files:
        text = f"no DE1_0_..._Claims_Sample_... among {len(source.files)} files"
        raise input_error(
            Reason.NO_INPUT, text, hint="Give the folder that holds the tables of DE-SynPUF"
        )
    parts, filled, undated = [], 0, 0
    for one in files:
        table, segments = _open_table(
            source.path(one.rel), one, admitting=options.admitting, form=options.date_format or None
        )
        parts.append(table)
        filled, undated = filled + segments.filled, undated + segments.undated
    surveyed = survey_tables(parts, vocab="icd9cm")
    cohort = _find_files(source, BENEFICIARIES)
    persons, labels, registered, more = _read_beneficiaries(source, cohort, options, surveyed.last)
    absent = _list_absent(files, cohort)
    facts = {
        "records": surveyed.records,
        "tables": [*surveyed.records, *(row.file for row in registered)],
        "absent": absent,
        "segments": {"dates_filled": filled, "without_date": undated},
    }
    return ClaimsSource(
        events=bind_events(parts),
        subjects=persons,
        labels=labels,
        vocab="icd9cm",
        source="outpatient",
        rows=[*surveyed.rows, *registered],
        findings=[*surveyed.findings, *more, *_warn_absent(absent)],
        facts=facts,
    )


def _find_files(source: Source, pattern: re.Pattern[str]) -> list[_SynpufFile]:
    """The tables whose name fits, each once: an archive beside the table that came out of it is not
    read.
    """
    found: dict[tuple[str, ...], _SynpufFile] = {}
    zipped = {rel: rel.lower().endswith(".zip") for rel in (*source.files, *source.rejected)}
    for rel in sorted(zipped, key=lambda rel: (zipped[rel], rel)):
        name = PurePosixPath(rel).name
        if zipped[rel] and name.upper().startswith("DE1_0_") and rel in source.files:
            name = _find_member(source.path(rel), rel) or name
        if fits := pattern.fullmatch(name):
            about = {key: text.lower() for key, text in fits.groupdict().items()}
            found.setdefault(tuple(about.values()), _SynpufFile(rel, about))
    return sorted(
        found.values(), key=lambda one: (int(one.about["sample"]), list(one.about.values()))
    )


def _find_member(path: Path, rel: str) -> str:
    """Name of the table in an archive; "" for a table that is only called one."""
    with locate_errors(rel), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return ""
        with open_member(file) as (name, _):
            return PurePosixPath(name).name


def _list_absent(claims: Sequence[_SynpufFile], cohort: Sequence[_SynpufFile]) -> list[str]:
    """Usual tables of a sample that this folder does not have."""
    there = {
        (one.about["sample"], one.about[key])
        for one, key in [*((c, "what") for c in claims), *((p, "year") for p in cohort)]
    }
    samples = sorted({one.about["sample"] for one in claims}, key=int)
    return [
        f"sample {sample}: {name}"
        for sample in samples
        for name in (*KIND, "2008", "2009", "2010")
        if (sample, name) not in there
    ]


def _warn_absent(absent: Sequence[str]) -> list[Finding]:
    if not absent:
        return []
    text = f"{len(absent)} tables are missing ({'; '.join(absent[:6])})"
    action = "Subjects and labels are incomplete without them"
    return [
        input_warning(
            Reason.MISSING_PAIR, text, hint=action, count=len(absent), examples=tuple(absent[:5])
        )
    ]


def _open_table(
    path: Path, one: _SynpufFile, *, admitting: bool, form: str | None
) -> tuple[SourceTable, _ClaimSegments]:
    """A table of claims, ready to be streamed."""
    every = tables.read_names(path)
    columns = match_columns(
        path,
        {"subject_id": (SUBJECT,), "claim": (CLAIM,), "date": (DATE,), "segment": (SEGMENT,)},
        {"segment"},
    )
    numbered = [
        (bool(found[1]), int(found[2]), name) for name in every if (found := CODE.fullmatch(name))
    ]
    wide = [name for _, _, name in sorted(numbered)]
    wide += [name for name in every if admitting and name.upper() == ADMITTING]
    if not wide:
        raise input_error(
            Reason.SCHEMA,
            "no column ICD9_DGNS_CD_1 ..",
            f"found {', '.join(map(safe_text, every[:60]))}",
            file=one.rel,
        )
    check_types(path, one.rel, {**columns, **{name: name for name in wide}}, wide)
    segments = _read_segments(path, one.rel, columns, wide)
    shape = partial(
        _shape_block,
        columns=columns,
        wide=tuple(wide),
        kind=KIND[one.about["what"]],
        segments=segments,
    )
    return OpenTable(one.rel, path, columns, ",").as_events(
        shape, wide=wide, kind="codes", form=form
    ), segments


def _shape_block(
    frame: pl.DataFrame,
    *,
    columns: Mapping[str, str],
    wide: Sequence[str],
    kind: str,
    segments: _ClaimSegments,
) -> EventBlock:
    """The distinct codes of each claim."""
    named = frame.select(
        "row",
        *(
            tables.strip_blanks(pl.col(name)).alias(key)
            for key, name in columns.items()
            if key != "segment"
        ),
        *wide,
    )
    if segments.dates.height:
        joined = named.join(segments.dates, on="claim", how="left", maintain_order="left")
        named = joined.with_columns(pl.coalesce("date", "first").alias("date")).drop("first")
    every = unpivot_codes(named, wide)
    single = every.with_columns(pl.col("code").str.strip_chars()).unique(
        ["row", "code"], keep="first", maintain_order=True
    )
    if segments.repeats.height:
        single = single.join(
            segments.repeats, on=["row", "code"], how="anti", maintain_order="left"
        )
    repeated = every.height - single.height
    return EventBlock(
        single.with_columns(pl.lit(kind).alias("source")),
        {str(Reason.DUPLICATES): repeated} if repeated else {},
    )


def _read_segments(
    path: Path, file: str, columns: Mapping[str, str], wide: Sequence[str]
) -> _ClaimSegments:
    """Read a table of segments twice: which claims have several, then their rows. Only these are in
    memory.
    """
    empty = (
        pl.DataFrame(schema={"claim": pl.String, "first": pl.String}),
        pl.DataFrame(schema={"row": pl.Int64, "code": pl.String}),
    )
    if "segment" not in columns:
        return _ClaimSegments(*empty, 0, 0)

    def blocks(*names: str) -> Iterator[pl.DataFrame]:
        for block in tables.read_frames(path, (*columns.values(), *names)):
            tables.refuse_faults(block, file)
            yield block.frame.with_columns(
                tables.strip_blanks(pl.col(name)).alias(key) for key, name in columns.items()
            )

    later = pl.col("segment").is_not_null() & (pl.col("segment") != "1")
    several = pl.concat(
        [block.filter(later | pl.col("date").is_null()).select("claim") for block in blocks()]
    ).unique()
    if not several.height:
        return _ClaimSegments(*empty, 0, 0)
    rows = pl.concat(
        [
            block.join(several, on="claim", how="semi", maintain_order="left")
            for block in blocks(*wide)
        ]
    )
    first = rows.filter(pl.col("date").is_not_null()).sort(
        pl.col("segment").cast(pl.Int32, strict=False), "row", nulls_last=True
    )
    found = first.group_by("claim", maintain_order=True).agg(pl.col("date").first().alias("first"))
    listed = unpivot_codes(rows.select("row", "claim", *wide), wide).with_columns(
        pl.col("code").str.strip_chars()
    )
    listed = listed.unique(["row", "code"], maintain_order=True)
    repeats = listed.filter(~pl.struct("claim", "code").is_first_distinct()).select("row", "code")
    undated_rows = rows.filter(pl.col("date").is_null())
    undated = undated_rows.join(found, on="claim", how="anti").height
    return _ClaimSegments(found, repeats, undated_rows.height - undated, undated)


def _read_beneficiaries(
    source: Source, files: Sequence[_SynpufFile], options: ClaimsOptions, last: int | None
) -> tuple[pl.DataFrame | None, pl.DataFrame | None, list[SourceRows], list[Finding]]:
    """Subjects of all years as one table, and their labels."""
    wanted = parse_label_columns(options)
    if not files:
        if wanted:
            raise usage_error("--label-column is given", "but there is no table of beneficiaries")
        return None, None, [], []
    if lost := sorted(
        {one.year for one in wanted if one.year} - {file.about["year"] for file in files}
    ):
        there = sorted({file.about["year"] for file in files})
        raise usage_error(
            f"--label-column asks for {', '.join(lost)}", f"there are {', '.join(there)}"
        )
    years, rows, findings = [], [], []
    for file in files:
        table = open_table(
            source, file.rel, PERSON | {one.column: (one.column,) for one in wanted}, codes=()
        )
        frame, account, year_findings = keep_unique_rows(table.read(), file.rel)
        years.append(frame.with_columns(pl.lit(file.about["year"]).alias("year")))
        rows.append(account)
        findings += year_findings
    cohort = pl.concat(years).sort("year", maintain_order=True)
    known = [pl.col(name).drop_nulls().first() for name in ("birth", "sex")]
    persons = cohort.group_by("subject_id", maintain_order=True).agg(
        *known, pl.col("death").drop_nulls().last()
    )
    conflicting = (
        cohort.group_by("subject_id")
        .agg(pl.col("birth").drop_nulls().n_unique())
        .filter(pl.col("birth") > 1)
        .height
    )
    if conflicting:
        text = f"{conflicting} beneficiaries have different dates of birth in different years"
        findings.append(
            input_warning(
                Reason.METADATA, text, "the first is used", file=files[0].rel, count=conflicting
            )
        )
    labels = (
        cohort.group_by("subject_id", maintain_order=True).agg(map(_flag_value, wanted))
        if wanted
        else None
    )
    return (
        make_subjects(persons, files[0].rel, findings, options.date_format or None, last),
        labels,
        rows,
        findings,
    )


def _flag_value(one: LabelColumn) -> pl.Expr:
    """1 where the column has the value in any year (or the given year), 0 where it only has others,
    null where it is empty.
    """
    cell = pl.col(one.column).filter(pl.col("year") == one.year) if one.year else pl.col(one.column)
    return pl.when(cell.count() > 0).then((cell == one.value).any().cast(pl.Int8)).alias(one.name)
