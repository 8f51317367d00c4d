"""Reads MEDS 0.4: data/**/*.parquet with subject_id, time and code.

Code strings differ by the tool that wrote them. Regular expressions with the groups `vocab` and
`code` say which strings are ICD codes; those of `--code-pattern` are tried first. Where a string
fits none, its parents in metadata/codes.parquet are tried. Strings without a match are counted:
they are not faults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bitimely_core.claims.codes import FAMILIES, OTHER
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import open_table
from bitimely_core.claims.sources.options import parse_default_source
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import TableAccounts, make_subjects
from bitimely_core.claims.sources.survey import EventReader, SourceSurvey, survey_tables
from bitimely_core.errors import Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.system_errors import raise_system_error

PATTERNS = (
    r"DIAGNOSIS//ICD//(?P<vocab>9|10)//(?P<code>[^/]+)",  # MIMIC-IV
    r"(?P<vocab>ICD(?:9|10)(?:CM)?)//?(?P<code>[^/]+)",  # OMOP, parents of MIMIC-IV, bitimely
)
VOCABULARIES = {"9": "icd9cm", "10": "icd10cm", **{name: name for name in FAMILIES}}
COLUMNS = {
    "subject_id": ("subject_id",),
    "date": ("time",),
    "code": ("code",),
    "source": ("visit_kind",),  # written by bitimely alone
}
VALUE = {"value": ("numeric_value",)}
BIRTH, DEATH = "MEDS_BIRTH", "MEDS_DEATH"
SEX = re.compile(r"(?:GENDER|SEX)//?(M|F|MALE|FEMALE)", re.IGNORECASE)
SPLITS = {"train": "train", "tuning": "validation", "held_out": "test"}


@dataclass
class CodeMeanings:
    """Finds the ICD code of each distinct code string once."""

    patterns: tuple[re.Pattern[str], ...]
    parents: Mapping[str, Sequence[str]]
    others: bool = False  # whether rows with other strings stay, with their numeric values
    # vocabulary and code of each string
    by_string: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    def __call__(self, frame: pl.DataFrame) -> EventBlock:
        """The rows that are diagnoses, and with `others` the other rows that are events."""
        strings = frame["code"].drop_nulls().unique().to_list()
        for string in strings:
            if string not in self.by_string:
                self.by_string[string] = self.find_code(string)
        schema = dict.fromkeys(("string", "vocab", "code"), pl.String)
        meanings = [(string, *self.by_string[string]) for string in strings]
        table = pl.DataFrame(meanings, schema=schema, orient="row")
        rows = _select_columns(frame, with_values=self.others).join(
            table, on="string", how="left", maintain_order="left"
        )
        events = _keep_others(rows) if self.others else rows.drop_nulls("vocab")
        left_out = rows.height - events.height
        dropped = count_dropped(Reason.WRONG_VOCABULARY, left_out)
        return EventBlock(events.drop("string"), dropped)

    def find_code(self, string: str) -> tuple[str | None, str | None]:
        """Vocabulary and code of a string, by its own form or by that of a parent."""
        for text in (string, *self.parents.get(string, ())):
            for pattern in self.patterns:
                if match := pattern.fullmatch(text):
                    word = re.sub(r"[^a-z0-9]", "", match["vocab"].lower())
                    return VOCABULARIES.get(word, word), match["code"]
        return None, None


def _select_columns(frame: pl.DataFrame, *, with_values: bool) -> pl.DataFrame:
    """row, subject_id, date, string; source where the table has one (words that are no kind of
    claims are null); Float32 value, null where the table has none.
    """
    columns = [pl.col("row", "subject_id"), pl.col("time").alias("date")]
    columns.append(pl.col("code").alias("string"))
    if "visit_kind" in frame.columns:
        kind = pl.when(pl.col("visit_kind").is_in(KINDS)).then("visit_kind")
        columns.append(kind.alias("source"))
    if with_values:
        has_values = "numeric_value" in frame.columns
        value = pl.col("numeric_value") if has_values else pl.lit(None)
        columns.append(value.cast(pl.Float32, strict=False).alias("value"))
    return frame.select(columns)


def _keep_others(rows: pl.DataFrame) -> pl.DataFrame:
    """The diagnoses, and all other rows with a time but for births and deaths.

    These keep their string as code, and their value if it is finite.
    """
    is_other = pl.col("vocab").is_null()
    is_life_date = pl.col("string").str.contains(f"^({BIRTH}|{DEATH})(//|$)")
    return rows.filter(~is_other | (pl.col("date").is_not_null() & ~is_life_date)).with_columns(
        pl.when(is_other).then(pl.lit(OTHER)).otherwise("vocab").alias("vocab"),
        pl.coalesce("code", "string").alias("code"),
        pl.when(is_other & pl.col("value").is_finite()).then("value").alias("value"),
    )


def read_meds(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MEDS: a folder with data/ and perhaps metadata/.

    Options: code_pattern (list of regular expressions), default_source, date_format (of times that
    are texts), codes. Raises UserError: what cannot be read or trusted (exit 4), options that are
    not understood (exit 2).
    """
    kind = parse_default_source(options)
    others, form = options.codes == "all", options.date_format or None
    meanings = CodeMeanings(_compile_patterns(options.code_pattern), _read_parents(source), others)
    files = [
        path
        for path in source.files
        if "data" in PurePosixPath(path).parts[:-1] and path.lower().endswith(".parquet")
    ]
    if not files:
        text = f"no data/*.parquet among {len(source.files)} files"
        hint = "Give the folder that holds data/ and metadata/"
        raise input_error(Reason.NO_INPUT, text, hint=hint)
    wanted = COLUMNS | (VALUE if others else {})
    opened = [open_table(source, file, wanted, {"source", "value"}) for file in files]
    source_tables = [
        SourceTable(table=table, shape=meanings, form=form, others=others) for table in opened
    ]
    hint = "Identify ICD codes with --code-pattern, a regular expression with the groups"
    survey = survey_tables(source_tables, hint=f"{hint} vocab and code")
    persons, spread = _read_persons(opened, form, survey.last)
    if spread:
        text = f"{spread} subjects are in several files"
        survey.findings.append(
            input_warning(Reason.METADATA, text, "expected each in one file", count=spread)
        )
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=persons,
        source=kind,
        survey=survey,
        facts={"tables": files, **_describe_strings(meanings, survey)},
        splits=_read_splits(source),
    )


def _describe_strings(meanings: CodeMeanings, survey: SourceSurvey) -> dict[str, Any]:
    """How many code strings are ICD codes, and some that are not."""
    unmatched = sorted(text for text, (vocab, _) in meanings.by_string.items() if vocab is None)
    dropped = sum(row.dropped.get(str(Reason.WRONG_VOCABULARY), 0) for row in survey.rows)
    return {
        "strings": {
            "icd": len(meanings.by_string) - len(unmatched),
            "other": len(unmatched),
            "rows_of_other": dropped,
        },
        "examples_of_other": [safe_text(text) for text in unmatched[:20]],
    }


def _compile_patterns(texts: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The user's patterns, then those of this module. Raises UserError: config (exit 2)."""
    patterns = []
    for text in (*texts, *PATTERNS):
        try:
            pattern = re.compile(text, re.IGNORECASE | re.ASCII)
        except re.error as error:
            raise usage_error(
                f"--code-pattern {safe_text(text)} is no regular expression ({error})"
            ) from None
        if not {"vocab", "code"} <= set(pattern.groupindex):
            raise usage_error(
                f"--code-pattern {safe_text(text)} lacks a group",
                "expected the groups (?P<vocab>...) and (?P<code>...)",
            )
        patterns.append(pattern)
    return tuple(patterns)


def _find_metadata(source: Source, name: str) -> Path | None:
    """The path of a file in metadata/."""
    for path in source.files:
        if PurePosixPath(path).parts[-2:] == ("metadata", name):
            return source.path(path)
    return None


def _read_parents(source: Source) -> dict[str, list[str]]:
    """Parents of the code strings, as far as they are listed."""
    path = _find_metadata(source, "codes.parquet")
    if path is None or not {"code", "parent_codes"} <= set(tables.read_types(path)):
        return {}
    try:
        columns = pq.read_table(
            path, columns=["code", "parent_codes"], page_checksum_verification=True
        ).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.CORRUPT,
            f"does not read as Parquet ({type(error).__name__})",
            "expected the table of codes",
            file="metadata/codes.parquet",
        ) from None
    pairs = zip(columns["code"], columns["parent_codes"], strict=True)
    return {code: parents for code, parents in pairs if code and isinstance(parents, list)}


def _read_splits(source: Source) -> dict[str, str] | None:
    """Subject -> split, under the names of bitimely; None where the data have none."""
    path = _find_metadata(source, "subject_splits.parquet")
    if path is None:
        return None
    splits: dict[str, str] = {}
    with locate_errors("metadata/subject_splits.parquet"):
        for block in tables.read_frames(path, ("subject_id", "split")):
            rows = block.frame.select("subject_id", "split")
            if unknown := sorted(set(rows["split"].drop_nulls()) - set(SPLITS)):
                text = f"holds {', '.join(map(safe_text, unknown[:5]))}"
                raise input_error(
                    Reason.SCHEMA, text, f"expected {', '.join(SPLITS)}", field="split"
                )
            for subject, split in rows.drop_nulls().iter_rows():
                if splits.setdefault(subject, SPLITS[split]) != SPLITS[split]:
                    text = "a subject is in two splits"
                    raise input_error(Reason.SUBJECT_LEAKAGE, text, "expected one", field="split")
    return splits


def _read_persons(
    opened: Sequence[OpenTable], form: str | None, last: int | None
) -> tuple[pl.DataFrame, int]:
    """Subjects of all files with birth, death and sex, and the number of subjects in several
    files.
    """
    facts = {
        name: pl.DataFrame(schema={"subject_id": pl.String, name: pl.String})
        for name in ("birth", "death", "sex")
    }
    listed = pl.Series("subject_id", [], pl.String)
    for table in opened:
        subjects = listed.clear()
        for block in tables.read_frames(table.path, tuple(table.columns.values())):
            subjects = pl.concat([subjects, block.frame["subject_id"].drop_nulls()]).unique()
            for name, rows in _select_facts(block.frame).items():
                facts[name] = pl.concat([facts[name], rows]).unique(
                    "subject_id", maintain_order=True
                )
        listed = pl.concat([listed, subjects])
    persons = listed.unique().sort().to_frame()
    for frame in facts.values():
        persons = persons.join(frame, on="subject_id", how="left", maintain_order="left")
    spread = listed.len() - persons.height
    return make_subjects(persons, opened[0].file, TableAccounts(), form, last), spread


def _select_facts(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Birth, death and sex -> subject_id and its value, of the rows that state it."""
    code = pl.col("code")
    matches = [SEX.fullmatch(text) for text in frame["code"].drop_nulls().unique()]
    sexes = {match[0]: match[1] for match in matches if match}
    sex = code.replace_strict(sexes, return_dtype=pl.String)
    facts = {"sex": frame.filter(code.is_in(list(sexes))).select("subject_id", sex=sex)}
    for name, string in (("birth", BIRTH), ("death", DEATH)):
        is_stated = (code == string) | code.str.starts_with(string + "//")
        rows = frame.filter(is_stated).drop_nulls("time")
        facts[name] = rows.select("subject_id", pl.col("time").alias(name))
    return facts
