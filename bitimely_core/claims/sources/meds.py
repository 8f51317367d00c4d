"""MEDS 0.4: data/**/*.parquet with subject_id, time, code. Code strings differ by the tool that
wrote them.

A list of regular expressions with the groups `vocab` and `code` says which strings are ICD codes;
`--code-pattern` adds more, tried first. Where a string fits none, those of its parents in
metadata/codes.parquet are tried. Strings without a match are counted, they are not faults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bitimely_core.claims.codes import FAMILIES, OTHER
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import open_table
from bitimely_core.claims.sources.options import parse_default_source
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable
from bitimely_core.claims.sources.subject_tables import make_subjects
from bitimely_core.claims.sources.survey import bind_events, survey_tables
from bitimely_core.errors import Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.system_errors import raise_system_error

PATTERNS = (
    r"DIAGNOSIS//ICD//(?P<vocab>9|10)//(?P<code>[^/]+)",  # MIMIC-IV
    r"(?P<vocab>ICD(?:9|10)(?:CM)?)//?(?P<code>[^/]+)",  # OMOP, parents of MIMIC-IV, bitimely
)
VOCABULARIES = {"9": "icd9cm", "10": "icd10cm", **{name: name for name in FAMILIES}}
# the last by bitimely alone
COLUMNS = {
    "subject_id": ("subject_id",),
    "date": ("time",),
    "code": ("code",),
    "source": ("visit_kind",),
}
VALUE = {"value": ("numeric_value",)}
BIRTH, DEATH = "MEDS_BIRTH", "MEDS_DEATH"
SEX = re.compile(r"(?:GENDER|SEX)//?(M|F|MALE|FEMALE)", re.IGNORECASE)
SPLITS = {"train": "train", "tuning": "validation", "held_out": "test"}


@dataclass
class CodeMeanings:
    """ICD codes of the distinct code strings, found once for each; `others`: strings that are none
    are kept, with their numeric values.
    """

    patterns: tuple[re.Pattern[str], ...]
    parents: Mapping[str, Sequence[str]]
    others: bool = False
    # (vocabulary, code)
    known: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    def __call__(self, frame: pl.DataFrame) -> EventBlock:
        """The rows that are diagnoses."""
        rows = frame.select(
            "row",
            "subject_id",
            pl.col("time").alias("date"),
            pl.col("code").alias("string"),
            *self._read_kinds(frame),
        )
        distinct = rows["string"].drop_nulls().unique().to_list()
        for text in distinct:
            if text not in self.known:
                self.known[text] = self.of(text)
        schema = dict.fromkeys(("string", "vocab", "code"), pl.String)
        meant = pl.DataFrame(
            [(text, *self.known[text]) for text in distinct], schema=schema, orient="row"
        )
        if self.others:
            return self._keep_others(frame, rows, meant)
        kept = rows.join(
            meant.drop_nulls("vocab"), on="string", how="inner", maintain_order="left"
        ).drop("string")
        left = rows.height - kept.height
        return EventBlock(kept, {str(Reason.WRONG_VOCABULARY): left} if left else {})

    @staticmethod
    def _keep_others(frame: pl.DataFrame, rows: pl.DataFrame, meant: pl.DataFrame) -> EventBlock:
        """All rows with a time but for births and deaths; those that are no diagnoses keep their
        string, and their value if it is finite.
        """
        value = (
            frame["numeric_value"].cast(pl.Float32, strict=False)
            if "numeric_value" in frame.columns
            else pl.lit(None, pl.Float32)
        )
        rows = rows.with_columns(value=value).join(
            meant, on="string", how="left", maintain_order="left"
        )
        other = pl.col("vocab").is_null()
        kept = rows.filter(
            ~other
            | (
                pl.col("date").is_not_null()
                & ~pl.col("string").str.contains(f"^({BIRTH}|{DEATH})(//|$)")
            )
        )
        named = kept.with_columns(
            pl.when(other).then(pl.lit(OTHER)).otherwise("vocab").alias("vocab"),
            pl.coalesce("code", "string").alias("code"),
            pl.when(other & pl.col("value").is_finite()).then("value").alias("value"),
        )
        left = rows.height - kept.height
        return EventBlock(
            named.drop("string"), {str(Reason.WRONG_VOCABULARY): left} if left else {}
        )

    @staticmethod
    def _read_kinds(frame: pl.DataFrame) -> list[pl.Expr]:
        """The kind of each claim, where a column states it; other words are none."""
        known = pl.when(pl.col("visit_kind").is_in(KINDS)).then("visit_kind").alias("source")
        return [known] if "visit_kind" in frame.columns else []

    def of(self, text: str) -> tuple[str | None, str | None]:
        """Vocabulary and code of a string, by its own form or by that of a parent."""
        for one in (text, *self.parents.get(text, ())):
            for pattern in self.patterns:
                if found := pattern.fullmatch(one):
                    word = re.sub(r"[^a-z0-9]", "", found["vocab"].lower())
                    return VOCABULARIES.get(word, word), found["code"]
        return None, None


def read_meds(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """MEDS: a folder with data/ and perhaps metadata/. Options: code_pattern (list of regular
    expressions), default_source, date_format (of times that are texts).

    Raises UserError: what cannot be read or trusted (exit 4), options that are not understood (exit
    2).
    """
    kind = parse_default_source(options)
    others, form = options.codes == "all", options.date_format or None
    meaning = CodeMeanings(_compile_patterns(options.code_pattern), _read_parents(source), others)
    files = [
        rel
        for rel in source.files
        if "data" in PurePosixPath(rel).parts[:-1] and rel.lower().endswith(".parquet")
    ]
    if not files:
        text = f"no data/*.parquet among {len(source.files)} files"
        raise input_error(
            Reason.NO_INPUT, text, hint="Give the folder that holds data/ and metadata/"
        )
    wanted = COLUMNS | (VALUE if others else {})
    source_tables = [
        open_table(source, file, wanted, {"source", "value"}).as_events(
            meaning, form=form, others=others
        )
        for file in files
    ]
    hint = "Identify ICD codes with --code-pattern, a regular expression with the groups vocab and code"
    seen = survey_tables(source_tables, vocab="icd9cm", hint=hint)
    persons, n_split = _read_persons(source_tables, form, seen.last)
    splits = _read_splits(source)
    dropped = sum(row.dropped.get(str(Reason.WRONG_VOCABULARY), 0) for row in seen.rows)
    if n_split:
        text = f"{n_split} subjects are in several files"
        seen.findings.append(
            input_warning(Reason.METADATA, text, "expected each in one file", count=n_split)
        )
    unmatched = sorted(text for text, (vocab, _) in meaning.known.items() if vocab is None)
    facts = {
        "tables": files,
        "strings": {
            "icd": len(meaning.known) - len(unmatched),
            "other": len(unmatched),
            "rows_of_other": dropped,
        },
        "examples_of_other": [safe_text(text) for text in unmatched[:20]],
    }
    return ClaimsSource(
        events=bind_events(source_tables),
        subjects=persons,
        vocab="icd9cm",
        source=kind,
        rows=seen.rows,
        findings=seen.findings,
        facts=facts,
        splits=splits,
    )


def _compile_patterns(more: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The user's patterns, then the known ones. Raises UserError: config (exit 2)."""
    patterns = []
    for text in (*more, *PATTERNS):
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
    rel = next(
        (rel for rel in source.files if PurePosixPath(rel).parts[-2:] == ("metadata", name)), None
    )
    return source.path(rel) if rel else None


def _read_parents(source: Source) -> dict[str, list[str]]:
    """Parents of the code strings, as far as they are listed."""
    path = _find_metadata(source, "codes.parquet")
    if path is None or not {"code", "parent_codes"} <= set(tables.read_types(path)):
        return {}
    try:
        held = pq.read_table(
            path, columns=["code", "parent_codes"], page_checksum_verification=True
        ).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        text = f"does not read as Parquet ({type(error).__name__})"
        raise input_error(
            Reason.CORRUPT, text, "expected the table of codes", file="metadata/codes.parquet"
        ) from None
    return {
        code: parents
        for code, parents in zip(held["code"], held["parent_codes"], strict=True)
        if code and isinstance(parents, list)
    }


def _read_splits(source: Source) -> dict[str, str] | None:
    """Subject -> split, under the names of bitimely."""
    path = _find_metadata(source, "subject_splits.parquet")
    if path is None:
        return None
    file = "metadata/subject_splits.parquet"
    splits: dict[str, str] = {}
    with locate_errors(file):
        for block in tables.read_frames(path, ("subject_id", "split")):
            if strange := sorted(set(block.frame["split"].drop_nulls()) - set(SPLITS)):
                text = f"holds {', '.join(map(safe_text, strange[:5]))}"
                raise input_error(
                    Reason.SCHEMA, text, f"expected {', '.join(SPLITS)}", field="split"
                )
            for subject, split in (
                block.frame.select("subject_id", "split").drop_nulls().iter_rows()
            ):
                if splits.setdefault(subject, SPLITS[split]) != SPLITS[split]:
                    raise input_error(
                        Reason.SUBJECT_LEAKAGE,
                        "a subject is in two splits",
                        "expected one",
                        field="split",
                    )
    return splits


def _read_persons(
    source_tables: Sequence[SourceTable], form: str | None, last: int | None
) -> tuple[pl.DataFrame, int]:
    """Subjects of all files with birth, death and sex, and the number of subjects in several
    files.
    """
    sexes = pl.DataFrame(schema={"subject_id": pl.String, "sex": pl.String})
    times = {
        name: pl.DataFrame(schema={"subject_id": pl.String, name: pl.String})
        for name in ("birth", "death")
    }
    cohort = []
    for table in source_tables:
        own = pl.Series("subject_id", [], pl.String)
        for block in tables.read_frames(table.path, table.columns):
            frame = block.frame
            own = pl.concat([own, frame["subject_id"].drop_nulls().unique()]).unique()
            for name, string in (("birth", BIRTH), ("death", DEATH)):
                rows = frame.filter(
                    (pl.col("code") == string) | pl.col("code").str.starts_with(string + "//")
                ).drop_nulls("time")
                found_times = rows.select("subject_id", pl.col("time").alias(name))
                times[name] = pl.concat([times[name], found_times]).unique(
                    "subject_id", maintain_order=True
                )
            words = {
                text: match[1]
                for text in frame["code"].drop_nulls().unique()
                if (match := SEX.fullmatch(text))
            }
            rows = frame.filter(pl.col("code").is_in(list(words)))
            found_sexes = rows.select(
                "subject_id",
                pl.col("code").replace_strict(words, return_dtype=pl.String).alias("sex"),
            )
            sexes = pl.concat([sexes, found_sexes]).unique("subject_id", maintain_order=True)
        cohort.append(own)
    listed = pl.concat(cohort)
    persons = listed.unique().sort().to_frame()
    for one in (times["birth"], times["death"], sexes):
        persons = persons.join(one, on="subject_id", how="left", maintain_order="left")
    return make_subjects(
        persons, source_tables[0].file, [], form, last
    ), listed.len() - persons.height
