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
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polars as pl

from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import (
    check_types,
    match_columns,
    open_table,
    rename_columns,
)
from bitimely_core.claims.sources.options import LabelColumn, parse_label_columns
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
from bitimely_core.claims.sources.survey import EventReader, survey_tables, unpivot_codes
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.csv_text import open_member
from bitimely_core.formats.source import Source, locate_errors

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
SUBJECT = "DESYNPUF_ID"
ADMITTING = "ADMTNG_ICD9_DGNS_CD"
CLAIM_COLUMNS = {
    "subject_id": (SUBJECT,),
    "claim": ("CLM_ID",),
    "date": ("CLM_FROM_DT",),
    "segment": ("SEGMENT",),
}
CODE = re.compile(r"(LINE_)?ICD9_DGNS_CD_(\d+)", re.IGNORECASE | re.ASCII)
PERSON = {
    "subject_id": (SUBJECT,),
    "birth": ("BENE_BIRTH_DT",),
    "death": ("BENE_DEATH_DT",),
    "sex": ("BENE_SEX_IDENT_CD",),
}


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
    if not files:
        raise input_error(
            Reason.NO_INPUT,
            f"no DE1_0_..._Claims_Sample_... among {len(source.files)} files",
            hint="Give the folder that holds the tables of DE-SynPUF",
        )
    shapes = [_open_table(source, file, options) for file in files]
    source_tables = [table for table, _ in shapes]
    survey = survey_tables(source_tables)
    cohort = _find_files(source, BENEFICIARIES)
    accounts = TableAccounts()
    subjects, labels = _read_beneficiaries(source, cohort, options, survey.last, accounts)
    absent = _list_absent(files, cohort)
    if absent:
        accounts.findings.append(
            input_warning(
                Reason.MISSING_PAIR,
                f"{len(absent)} tables are missing ({'; '.join(absent[:6])})",
                hint="Subjects and labels are incomplete without them",
                count=len(absent),
                examples=tuple(absent[:5]),
            )
        )
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=subjects,
        labels=labels,
        source="outpatient",
        survey=survey,
        accounts=accounts,
        facts={
            "records": survey.records,
            "tables": [*survey.records, *(row.file for row in accounts.rows)],
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
    if _is_zip(path) and name.upper().startswith("DE1_0_") and path in source.files:
        return _find_member(source.path(path), path) or name
    return name


def _find_member(path: Path, name: str) -> str:
    """Name of the table in an archive; "" for a table that is only called one."""
    with locate_errors(name), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return ""
        with open_member(file) as (member, _):
            return PurePosixPath(member).name


def _list_absent(claims: Sequence[_SynpufFile], cohort: Sequence[_SynpufFile]) -> list[str]:
    """Usual tables of a sample that this folder does not have."""
    present = {(file.sample, file.content) for file in (*claims, *cohort)}
    samples = sorted({file.sample for file in claims}, key=int)
    usual = itertools.product(samples, (*KIND, *YEARS))
    return [f"sample {sample}: {name}" for sample, name in usual if (sample, name) not in present]


def _open_table(
    source: Source, file: _SynpufFile, options: ClaimsOptions
) -> tuple[SourceTable, _ClaimSegments]:
    """A table of claims, ready to be streamed."""
    path = source.path(file.path)
    names = tables.read_names(path)
    columns = match_columns(path, CLAIM_COLUMNS, {"segment"})
    wide = _find_code_columns(names, admitting=options.admitting)
    if not wide:
        raise input_error(
            Reason.SCHEMA,
            "no column ICD9_DGNS_CD_1 ..",
            f"found {', '.join(map(safe_text, names[:60]))}",
            file=file.path,
        )
    check_types(path, file.path, {**columns, **{name: name for name in wide}}, wide)
    segments = _read_segments(path, file.path, columns, wide)
    columns.pop("segment", None)
    shape = partial(
        _shape_block, columns=columns, wide=wide, kind=KIND[file.content], segments=segments
    )
    table = SourceTable(
        table=OpenTable(file.path, path, columns),
        shape=shape,
        wide=wide,
        kind="codes",
        form=options.date_format or None,
    )
    return table, segments


def _find_code_columns(names: Sequence[str], *, admitting: bool) -> tuple[str, ...]:
    """The columns of codes: of the claim, of its lines, and that of the admission on request."""
    matches = filter(None, map(CODE.fullmatch, names))
    numbered = sorted((bool(match[1]), int(match[2]), match[0]) for match in matches)
    admission = [name for name in names if admitting and name.upper() == ADMITTING]
    return (*(name for _, _, name in numbered), *admission)


def _shape_block(
    frame: pl.DataFrame,
    *,
    columns: Mapping[str, str],
    wide: Sequence[str],
    kind: str,
    segments: _ClaimSegments,
) -> EventBlock:
    """The distinct codes of each claim."""
    claims = rename_columns(frame, columns, *wide)
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


def _read_segments(
    path: Path, file: str, columns: Mapping[str, str], wide: Sequence[str]
) -> _ClaimSegments:
    """Read a table of segments twice: which claims have several, then their rows. Only these are in
    memory.
    """
    if "segment" not in columns:
        return _ClaimSegments()

    def iter_blocks(*names: str) -> Iterator[pl.DataFrame]:
        for block in tables.read_frames(path, (*columns.values(), *names)):
            tables.refuse_faults(block, file)
            yield rename_columns(block.frame, columns, *names)

    later = pl.col("segment").is_not_null() & (pl.col("segment") != "1")
    needs_first = later | pl.col("date").is_null()
    several = pl.concat(
        [block.filter(needs_first).select("claim") for block in iter_blocks()]
    ).unique()
    if not several.height:
        return _ClaimSegments()
    rows = pl.concat(
        [
            block.join(several, on="claim", how="semi", maintain_order="left")
            for block in iter_blocks(*wide)
        ]
    )
    number = pl.col("segment").cast(pl.Int32, strict=False)
    dated = rows.filter(pl.col("date").is_not_null()).sort(number, "row", nulls_last=True)
    first = dated.group_by("claim", maintain_order=True).agg(first=pl.col("date").first())
    undated = rows.filter(pl.col("date").is_null())
    without = undated.join(first, on="claim", how="anti").height
    return _ClaimSegments(first, _find_repeats(rows, wide), undated.height - without, without)


def _find_repeats(rows: pl.DataFrame, wide: Sequence[str]) -> pl.DataFrame:
    """row, code: the codes of segments that are also on an earlier segment of their claim."""
    codes = unpivot_codes(rows.select("row", "claim", *wide), wide)
    codes = codes.with_columns(pl.col("code").str.strip_chars())
    codes = codes.unique(["row", "code"], maintain_order=True)
    return codes.filter(~pl.struct("claim", "code").is_first_distinct()).select("row", "code")


def _read_beneficiaries(
    source: Source,
    files: Sequence[_SynpufFile],
    options: ClaimsOptions,
    last: int | None,
    accounts: TableAccounts,
) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Subjects of all years as one table, and their labels; None without a table of them."""
    wanted = parse_label_columns(options)
    if wanted and not files:
        raise usage_error("--label-column is given", "but there is no table of beneficiaries")
    if not files:
        return None, None
    _check_years(wanted, {file.content for file in files})
    columns = PERSON | {label.column: (label.column,) for label in wanted}
    years = []
    for file in files:
        table = open_table(source, file.path, columns, codes=())
        frame = keep_unique_rows(table.read(), file.path, accounts)
        years.append(frame.with_columns(pl.lit(file.content).alias("year")))
    cohort = pl.concat(years).sort("year", maintain_order=True)
    by_subject = cohort.group_by("subject_id", maintain_order=True)
    persons = by_subject.agg(
        pl.col("birth", "sex").drop_nulls().first(), pl.col("death").drop_nulls().last()
    )
    path = files[0].path
    accounts.findings += _warn_of_conflicting_births(cohort, path)
    subjects = make_subjects(persons, path, accounts, options.date_format or None, last)
    return subjects, by_subject.agg(map(_flag_value, wanted)) if wanted else None


def _check_years(wanted: Sequence[LabelColumn], years: Collection[str]) -> None:
    """Raises UserError (config, exit 2) for a label of a year without a table."""
    absent = sorted({label.year for label in wanted if label.year} - set(years))
    if absent:
        raise usage_error(
            f"--label-column asks for {', '.join(absent)}", f"there are {', '.join(sorted(years))}"
        )


def _warn_of_conflicting_births(cohort: pl.DataFrame, file: str) -> list[Finding]:
    births = cohort.group_by("subject_id").agg(pl.col("birth").drop_nulls().n_unique())
    conflicting = births.filter(pl.col("birth") > 1).height
    if not conflicting:
        return []
    return [
        input_warning(
            Reason.METADATA,
            f"{conflicting} beneficiaries have different dates of birth in different years",
            "the first is used",
            file=file,
            count=conflicting,
        )
    ]


def _flag_value(label: LabelColumn) -> pl.Expr:
    """1 where the column has the value in any year (or the given year), 0 where it only has others,
    null where it is empty.
    """
    cell = pl.col(label.column)
    if label.year:
        cell = cell.filter(pl.col("year") == label.year)
    flag = (cell == label.value).any().cast(pl.Int8)
    return pl.when(cell.count() > 0).then(flag).alias(label.name)
