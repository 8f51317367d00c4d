"""Reads MEDS 0.4: data/**/*.parquet with subject_id, time and code.

Code strings differ by the tool that wrote them. Regular expressions with the groups `vocab` and
`code` say which strings are ICD codes; those of `--code-pattern` are tried first. Where a string
fits none, its parents in metadata/codes.parquet are tried. Strings without a match are counted:
they are not faults.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.codes import OTHER
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import open_table, warn_of_rows
from bitimely_core.claims.sources.source_options import parse_date_forms
from bitimely_core.claims.sources.source_survey import EXAMPLES, EventReader, SourceSurvey
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import TableAccounts, make_subjects
from bitimely_core.claims.sources.words import LAYOUTS, NO_DIAGNOSIS, fold_name, index_words
from bitimely_core.claims.subject_splits import MEDS_SPLITS
from bitimely_core.errors import Finding, Reason, input_error, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.system_errors import raise_system_error

PATTERNS = (
    r"DIAGNOSIS//ICD//(?P<vocab>9|10)//(?P<code>[^/]+)",  # MIMIC-IV
    # OMOP, parents of MIMIC-IV, bitimely, national forms, codes as FHIR writes them
    r"(?:(?:DIAGNOSIS|DIAGNOSES|DX|CONDITION|CONDITION_OCCURRENCE)//?)?"
    r"(?P<vocab>ICD[-_]?(?:9|10)(?:[-_]?(?:CM|WHO|GM|CA|AM|SE|DX))?)(?://?|:)(?P<code>[^/:]+)",
)
VOCABULARIES = {**index_words("vocabularies"), "9": "icd9cm", "10": "icd10cm"}
# strings of diagnoses, whichever pattern reads them
DIAGNOSES = re.compile(
    r"(?!.*(?:PROC|PCS))(?:.*ICD[-_/]*[\dO]|KCD|SNOMED|DIAGNOS|CONDITION)", re.IGNORECASE
)
LAST_PART = re.compile(r"[/:]+[^/:]*$")
BIRTH, DEATH = "MEDS_BIRTH", "MEDS_DEATH"
SEX = r"(?i)^(?:GENDER|SEX)//?(M|F|MALE|FEMALE)$"
PERSON = ("subject_id", "birth", "death", "sex")


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
        rows = frame.rename({"code": "string"})
        if "source" in rows.columns:  # other words are no kind of claims
            is_kind = pl.col("source").is_in(KINDS)
            rows = rows.with_columns(source=pl.when(is_kind).then("source"))
        if self.others:
            value = pl.col("value") if "value" in rows.columns else pl.lit(None)
            rows = rows.with_columns(value=value.cast(pl.Float32, strict=False))
        rows = rows.join(table, on="string", how="left", maintain_order="left")
        events = _keep_others(rows) if self.others else rows.drop_nulls("vocab")
        left_out = rows.height - events.height
        dropped = count_dropped(Reason.WRONG_VOCABULARY, left_out)
        unread = {text for text, vocab, _ in meanings if vocab is None and DIAGNOSES.match(text)}
        strings = rows.filter(pl.col("string").is_in(unread))["string"].to_list()
        return EventBlock(events.drop("string"), dropped, Counter(strings))

    def find_code(self, string: str) -> tuple[str | None, str | None]:
        """Vocabulary and code of a string, by its own form or by that of a parent."""
        for text in (string, *self.parents.get(string, ())):
            for pattern in self.patterns:
                if match := pattern.fullmatch(text):
                    word = fold_name(match["vocab"])
                    if (vocab := VOCABULARIES.get(word, word)) != NO_DIAGNOSIS:
                        return vocab, match["code"]
        return None, None


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
    others, forms = options.codes == "all", parse_date_forms(options)
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
    wanted = LAYOUTS["meds"]["data"] | ({"value": "numeric_value"} if others else {})
    opened = [open_table(source, file, wanted, {"source", "value"}) for file in files]
    source_tables = [
        SourceTable(table=table, shape=meanings, form=forms["date"], others=others)
        for table in opened
    ]
    hint = "Identify ICD codes with --code-pattern, a regular expression with the groups"
    survey = SourceSurvey(hint=f"{hint} vocab and code")
    survey.read_all(source_tables)
    survey.findings += _report_unread(survey)
    persons, spread = _read_persons(opened, forms, survey.last)
    survey.findings += warn_of_rows(
        spread, Reason.METADATA, "subjects are in several files", "expected each in one file"
    )
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=persons,
        source=options.default_source or "outpatient",
        survey=survey,
        facts=_describe_strings(meanings, survey),
        splits=_read_splits(source),
    )


def _describe_strings(meanings: CodeMeanings, survey: SourceSurvey) -> dict[str, Any]:
    """How many code strings are ICD codes, and some that are not."""
    unmatched = sorted(text for text, (vocab, _) in meanings.by_string.items() if vocab is None)
    return {
        "strings": {
            "icd": len(meanings.by_string) - len(unmatched),
            "other": len(unmatched),
            "rows_of_other": sum(sum(row.dropped.values()) for row in survey.rows),
        },
        "examples_of_other": list(map(safe_text, unmatched[:20])),
    }


def _report_unread(survey: SourceSurvey) -> list[Finding]:
    """A warning of diagnoses whose strings no pattern reads, by what stands before their codes."""
    counts = Counter[str]()
    for strings in survey.unused.values():
        for text, rows in strings.items():
            counts[LAST_PART.sub("", text)] += rows
    text = ", ".join(
        f"{rows} rows of {safe_text(name)}" for name, rows in counts.most_common(EXAMPLES)
    )
    return warn_of_rows(
        counts.total(),
        Reason.WRONG_VOCABULARY,
        f"rows are diagnoses that are not read as ICD codes ({text})",
        "labels and PheCodes do not know them",
        hint="Where they are ICD codes all the same, give --code-pattern, a regular expression "
        "with the groups vocab and code, as (?P<vocab>ICD10)CN//(?P<code>.+)",
    )


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


def _read_splits(source: Source) -> pl.DataFrame | None:
    """subject_id and split, under the names of bitimely; None where the data have none."""
    file = "metadata/subject_splits.parquet"
    path = _find_metadata(source, PurePosixPath(file).name)
    if path is None:
        return None
    rows = pl.DataFrame(schema={"subject_id": pl.String, "split": pl.String})
    for block in tables.read_frames(path, tuple(rows.columns)):
        rows = pl.concat([rows, block.frame.select(rows.columns).drop_nulls()]).unique()
    names = {"train", *MEDS_SPLITS}
    if unknown := sorted(set(rows["split"]) - names):
        text = f"holds {', '.join(map(safe_text, unknown[:5]))}"
        expected = f"expected {', '.join(sorted(names))}"
        raise input_error(Reason.SCHEMA, text, expected, file=file, field="split")
    if rows["subject_id"].is_duplicated().any():
        text = "a subject is in two splits"
        raise input_error(Reason.SUBJECT_LEAKAGE, text, "expected one", file=file, field="split")
    return None if rows.is_empty() else rows.with_columns(pl.col("split").replace(MEDS_SPLITS))


def _read_persons(
    opened: Sequence[OpenTable], forms: Mapping[str, str], last: int | None
) -> tuple[pl.DataFrame, int]:
    """Subjects of all files with birth, death and sex, and the number of subjects in several
    files.
    """
    parts = []
    for table in opened:
        blocks = tables.read_frames(table.path, tuple(table.columns.values()))
        facts = [_select_facts(block.frame) for block in blocks]
        empty = pl.DataFrame(schema=dict.fromkeys(PERSON, pl.String))
        parts.append(_take_first(pl.concat([empty, *facts])))
    listed = pl.concat(parts)
    persons = _take_first(listed).sort("subject_id")
    spread = listed.height - persons.height
    return make_subjects(persons, opened[0].file, TableAccounts(last=last), forms), spread


def _take_first(facts: pl.DataFrame) -> pl.DataFrame:
    """One row for each subject, with the first value of each column."""
    by_subject = facts.drop_nulls("subject_id").group_by("subject_id", maintain_order=True)
    return by_subject.agg(pl.all().drop_nulls().first())


def _select_facts(frame: pl.DataFrame) -> pl.DataFrame:
    """subject_id, birth, death and sex as the rows state them; null where a row does not."""
    code = pl.col("code")
    times = {
        name: pl.when((code == string) | code.str.starts_with(f"{string}//")).then("time")
        for name, string in (("birth", BIRTH), ("death", DEATH))
    }
    return _take_first(frame.select("subject_id", **times, sex=code.str.extract(SEX)))
