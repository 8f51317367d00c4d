"""Reads CMS DE-SynPUF: beneficiaries of each year and claims of three kinds, of any number of the
20 samples, unpacked or as downloaded.

A claim is a set of codes: the lines of a carrier claim repeat those of its header. A long claim
goes on in a second segment, whose date is empty: only the first segment has one. Some archives of
the site have wrong names: an archive is identified by the table inside.
"""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import polars as pl

from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import open_table, warn_of_rows
from bitimely_core.claims.sources.source_options import (
    LabelColumn,
    parse_date_forms,
    parse_label_columns,
)
from bitimely_core.claims.sources.source_survey import EventReader, SourceSurvey, unpivot_codes
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    keep_unique_rows,
    make_subjects,
)
from bitimely_core.claims.sources.words import LAYOUTS
from bitimely_core.errors import Reason, input_error, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.table_text import open_member

ENDING = r"(?:\.csv(?:\.gz|\.zip)?|\.parquet|\.zip)"
BENEFICIARIES = re.compile(
    r"DE1_0_(?P<content>\d{4})_Beneficiary_Summary_File"
    rf"_Sample_(?P<sample>\d+)(?P<part>\w*){ENDING}",
    re.IGNORECASE | re.ASCII,
)
CLAIMS = re.compile(
    r"DE1_0_\d{4}_to_\d{4}_(?P<content>Inpatient|Outpatient|Carrier)_Claims"
    rf"_Sample_(?P<sample>\d+)(?P<part>\w*){ENDING}",
    re.IGNORECASE | re.ASCII,
)
KIND = {"inpatient": "inpatient", "outpatient": "outpatient", "carrier": "physician"}
YEARS = ("2008", "2009", "2010")
ADMITTING = "ADMTNG_ICD9_DGNS_CD"
CODE = re.compile(r"(LINE_)?ICD9_DGNS_CD_(\d+)", re.IGNORECASE | re.ASCII)


class _SynpufFile(NamedTuple):
    """A table, and what its name says, in lower case."""

    path: str  # relative to the source
    content: str  # a year of beneficiaries, or a kind of claims as in `KIND`
    sample: str  # a number
    part: str  # of a table in several parts


class _ClaimSegments(NamedTuple):
    """Dates and repeated codes of claims in several segments."""

    # claim, first: the date of its first segment
    dates: pl.DataFrame = pl.DataFrame(schema={"claim": pl.String, "first": pl.String})
    # row, code: is also on an earlier segment
    repeats: pl.DataFrame = pl.DataFrame(schema={"row": pl.Int64, "code": pl.String})
    filled: int = 0  # rows that get the date of their claim
    undated: int = 0  # rows whose claim has none


def read_synpuf(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """CMS DE-SynPUF: a folder with any of the files.

    Options: label_column (`SP_CHF:chf:1` or `SP_CHF:chf:1@2010`; 1 is yes, any year by default),
    admitting, date_format. Raises UserError: what cannot be read or trusted (exit 4), options that
    are not understood (exit 2).
    """
    files = _find_files(source, CLAIMS)
    shapes = [_open_table(source, file, options) for file in files]
    source_tables = [table for table, _ in shapes]
    survey = SourceSurvey(hint="Give the folder that holds DE1_0_..._Claims_Sample_...")
    survey.read_all(source_tables)
    cohort = _find_files(source, BENEFICIARIES)
    subjects, labels = _read_beneficiaries(source, cohort, options, survey)
    present = {(file.sample, file.content) for file in (*files, *cohort)}
    samples = sorted({file.sample for file in files}, key=int)
    absent = [
        f"sample {sample}: {name}"
        for sample, name in itertools.product(samples, (*KIND, *YEARS))
        if (sample, name) not in present
    ]
    survey.findings += warn_of_rows(
        len(absent),
        Reason.MISSING_PAIR,
        f"tables are missing ({'; '.join(absent[:6])})",
        "subjects and labels are incomplete without them",
        examples=absent[:5],
    )
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=subjects,
        labels=labels,
        source="outpatient",
        survey=survey,
        facts={
            "records": survey.records,
            "absent": absent,
            "segments": {
                "dates_filled": sum(segments.filled for _, segments in shapes),
                "without_date": sum(segments.undated for _, segments in shapes),
            },
        },
    )


def _find_files(source: Source, pattern: re.Pattern[str]) -> list[_SynpufFile]:
    """The tables whose name fits, each once: an archive beside the table that came out of it is not
    read.
    """
    files: dict[tuple[str, str, str], _SynpufFile] = {}
    for path in sorted({*source.files, *source.rejected}, key=lambda path: (_is_zip(path), path)):
        match = pattern.fullmatch(_name_table(source, path))
        if match:
            texts = (match["content"].lower(), match["sample"], match["part"].lower())
            files.setdefault(texts, _SynpufFile(path, *texts))
    return sorted(
        files.values(), key=lambda file: (int(file.sample), file.content, file.sample, file.part)
    )


def _is_zip(path: str) -> bool:
    return path.lower().endswith(".zip")


def _name_table(source: Source, path: str) -> str:
    """The name of a table, in an archive of the site that of the table inside."""
    name = PurePosixPath(path).name
    if not _is_zip(path) or not name.upper().startswith("DE1_0_") or path not in source.files:
        return name
    with locate_errors(path), source.path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):  # a table that is only called an archive
            return name
        with open_member(file) as (member, _):
            return PurePosixPath(member).name


def _open_table(
    source: Source, file: _SynpufFile, options: ClaimsOptions
) -> tuple[SourceTable, _ClaimSegments]:
    """A table of claims, ready to be streamed."""
    names = tables.read_names(source.path(file.path))
    wide = _find_code_columns(names, admitting=options.admitting)
    if not wide:
        raise input_error(
            Reason.SCHEMA,
            "no column ICD9_DGNS_CD_1 ..",
            f"found {', '.join(map(safe_text, names[:60]))}",
            file=file.path,
        )
    table = open_table(source, file.path, LAYOUTS["synpuf"]["claims"], {"segment"}, codes=wide)
    segments = _read_segments(table, wide)
    table.columns.pop("segment", None)
    shape = partial(_shape_block, wide=wide, kind=KIND[file.content], segments=segments)
    return SourceTable(
        table=table, shape=shape, wide=wide, form=parse_date_forms(options)["date"]
    ), segments


def _find_code_columns(names: Sequence[str], *, admitting: bool) -> tuple[str, ...]:
    """The columns of codes: of the claim, of its lines, and that of the admission on request."""
    matches = filter(None, map(CODE.fullmatch, names))
    numbered = sorted((bool(match[1]), int(match[2]), match[0]) for match in matches)
    admission = [name for name in names if admitting and name.upper() == ADMITTING]
    return (*(name for _, _, name in numbered), *admission)


def _shape_block(
    frame: pl.DataFrame, *, wide: Sequence[str], kind: str, segments: _ClaimSegments
) -> EventBlock:
    """The distinct codes of each claim."""
    claims = frame.with_columns(tables.strip_blanks(pl.exclude("row", *wide)))
    if segments.dates.height:
        joined = claims.join(segments.dates, on="claim", how="left", maintain_order="left")
        claims = joined.with_columns(pl.coalesce("date", "first").alias("date")).drop("first")
    every = unpivot_codes(claims, wide)
    distinct = every.with_columns(pl.col("code").str.strip_chars()).unique(
        ["row", "code"], keep="first", maintain_order=True
    )
    if segments.repeats.height:
        distinct = distinct.join(
            segments.repeats, on=["row", "code"], how="anti", maintain_order="left"
        )
    repeated = every.height - distinct.height
    events = distinct.with_columns(pl.lit(kind).alias("source"))
    return EventBlock(events, count_dropped(Reason.DUPLICATES, repeated))


def _read_segments(table: OpenTable, wide: Sequence[str]) -> _ClaimSegments:
    """Read a table of segments twice: which claims have several, then their rows. Only these are in
    memory.
    """
    if "segment" not in table.columns:
        return _ClaimSegments()
    later = pl.col("segment").is_not_null() & (pl.col("segment") != "1")
    needs_first = later | pl.col("date").is_null()
    several = pl.concat(
        [block.filter(needs_first).select("claim") for block in table.read_blocks()]
    ).unique()
    if not several.height:
        return _ClaimSegments()
    rows = pl.concat(
        [
            block.join(several, on="claim", how="semi", maintain_order="left")
            for block in table.read_blocks(*wide)
        ]
    )
    number = pl.col("segment").cast(pl.Int32, strict=False)
    dated = rows.filter(pl.col("date").is_not_null()).sort(number, "row", nulls_last=True)
    first = dated.group_by("claim", maintain_order=True).agg(first=pl.col("date").first())
    undated = rows.filter(pl.col("date").is_null())
    without = undated.join(first, on="claim", how="anti").height
    codes = unpivot_codes(rows.select("row", "claim", *wide), wide)
    codes = codes.with_columns(pl.col("code").str.strip_chars())
    codes = codes.unique(["row", "code"], maintain_order=True)
    repeats = codes.filter(~pl.struct("claim", "code").is_first_distinct()).select("row", "code")
    return _ClaimSegments(first, repeats, undated.height - without, without)


def _read_beneficiaries(
    source: Source, files: Sequence[_SynpufFile], options: ClaimsOptions, accounts: TableAccounts
) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Subjects of all years as one table, and their labels; None without a table of them."""
    wanted = parse_label_columns(options)
    if wanted and not files:
        raise usage_error("--label-column is given", "but there is no table of beneficiaries")
    if not files:
        return None, None
    years = {file.content for file in files}
    if missing := sorted({label.year for label in wanted if label.year} - years):
        text = f"--label-column asks for {', '.join(missing)}"
        raise usage_error(text, f"there are {', '.join(sorted(years))}")
    columns = dict(LAYOUTS["synpuf"]["beneficiaries"])
    columns |= {label.column: label.column for label in wanted}
    tables_of_years = []
    for file in files:
        table = open_table(source, file.path, columns)
        frame = keep_unique_rows(table.read(), file.path, accounts)
        tables_of_years.append(frame.with_columns(pl.lit(file.content).alias("year")))
    cohort = pl.concat(tables_of_years).sort("year", maintain_order=True)
    by_subject = cohort.group_by("subject_id", maintain_order=True)
    persons = by_subject.agg(
        pl.col("birth", "sex").drop_nulls().first(), pl.col("death").drop_nulls().last()
    )
    path = files[0].path
    births = cohort.group_by("subject_id").agg(pl.col("birth").drop_nulls().n_unique())
    accounts.findings += warn_of_rows(
        births.filter(pl.col("birth") > 1).height,
        Reason.METADATA,
        "subjects have different dates of birth in different years",
        "the first is used",
        file=path,
    )
    subjects = make_subjects(persons, path, accounts, parse_date_forms(options))
    return subjects, by_subject.agg(map(_flag_value, wanted)) if wanted else None


def _flag_value(label: LabelColumn) -> pl.Expr:
    """1 where the column has the value in any year (or the given year), 0 where it only has others,
    null where it is empty.
    """
    cell = pl.col(label.column)
    if label.year:
        cell = cell.filter(pl.col("year") == label.year)
    flag = (cell == label.value).any().cast(pl.Int8)
    return pl.when(cell.count() > 0).then(flag).alias(label.name)
