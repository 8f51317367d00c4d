"""One pass over all tables of diagnoses that refuses what no check of a single row can find; then
their events as a stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from bitimely_core.claims import codes
from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.sources.columns import (
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    report_zones,
)
from bitimely_core.claims.sources.source_table import SourceTable, Stated
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import locate_errors
from bitimely_core.types import SourceRows

MERGED_SUBJECTS = 1 << 20  # subjects of several blocks that are put together at once
# what a spreadsheet runs as a formula, or a terminal obeys
ODD_ID = r"^[=+@]|^-[^0-9]|[\x00-\x1f\x7f]"
SHORT_CODE = re.compile(r"\s*\d{1,2}\.\d{1,2}\s*", re.ASCII)  # 38.9: a category has three digits
# poisoning in ICD-9; without their dots amyloidosis ... in ICD-10
SHARED_CODES = {f"E{number}" for number in (850, 851, 852, 853, 854, 860, 861)}


@dataclass(kw_only=True)
class SourceSurvey:
    """Findings of one pass over all tables of diagnoses."""

    rows: list[SourceRows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)  # file -> records
    last: int | None = None  # day of a row
    # hashes of those with a row, sorted, where requested
    subjects: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))


def unpivot_codes(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """One row per non-empty cell of `columns`: the other columns, `code` and `position` (1, 2,
    ...), by row and column.
    """
    places = {name: i for i, name in enumerate(columns, 1)}
    cells = (
        frame.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("at"), *columns)
        .unpivot(columns, index="at", variable_name="column", value_name="code")
        .filter(pl.col("code").str.contains(r"\S"))
        .with_columns(
            pl.col("column").replace_strict(places, return_dtype=pl.Int16).alias("position")
        )
        .sort("at", "position")
    )
    return frame.drop(columns)[cells["at"]].with_columns(cells["code"], cells["position"])


def _iter_blocks(
    table: SourceTable,
) -> Iterator[tuple[tables.TableBlock, pl.DataFrame, Mapping[str, int]]]:
    """Blocks of a table, their events with all columns of `ClaimsSource.events`, and rows left out
    by reason.

    Raises UserError: as `tables.refuse_faults` and `tables.read_frames`.
    """
    texts = ("subject_id", "date", "code", "vocab", "source", "claim")
    kinds = [
        *((name, pl.String()) for name in texts),
        ("position", pl.Int16()),
        *[("value", pl.Float32())] * table.others,
    ]
    with locate_errors(table.file):
        for block in tables.read_frames(
            table.path,
            table.columns,
            delimiter=table.delimiter,
            span=table.span,
            categories=table.categories,
        ):
            tables.refuse_faults(block, table.file)
            frame, dropped = table.shape(block.frame)
            if block.blanks:
                frame = frame.with_columns(pl.col("subject_id").str.strip_chars())
            if table.form is not None:
                frame = frame.with_columns(
                    reformat_dates(frame["date"].cast(pl.String), table.form)
                )
            filled = [
                pl.col(name)
                if isinstance(frame.schema.get(name), pl.Categorical)
                else (pl.col(name) if name in frame.columns else pl.lit(None))
                .cast(kind)
                .alias(name)
                for name, kind in kinds
            ]
            yield block, frame.select(*filled, pl.lit(table.file).alias("file"), "row"), dropped


@dataclass(frozen=True)
class EventReader:
    """Reads `ClaimsSource.events` of tables that `survey_tables` has accepted, any number of times,
    in any process.
    """

    tables: tuple[SourceTable, ...]

    def __call__(self) -> Iterator[pl.DataFrame]:
        """The frames."""
        return (
            frame
            for table in self.tables
            for _, frame, _ in _iter_blocks(replace(table, categories=()))
            if frame.height
        )

    def split(self, size: int) -> list[EventReader]:
        """Readers of consecutive parts of about `size` bytes, which together read the same rows in
        the same order.
        """
        groups: list[list[SourceTable]] = []
        held = size
        for table in self.tables:
            spans = tables.split_table(table.path, size, delimiter=table.delimiter)
            for span in spans:
                if held >= size or len(spans) > 1:
                    groups.append([])
                    held = 0
                groups[-1].append(replace(table, path=table.path.resolve(), span=span))
                held += table.path.stat().st_size if len(spans) == 1 else size
        return [EventReader(tuple(group)) for group in groups]


def bind_events(source_tables: Sequence[SourceTable]) -> EventReader:
    """The reader of some tables."""
    return EventReader(tuple(source_tables))


def survey_tables(
    source_tables: Sequence[SourceTable],
    *,
    vocab: str = "icd9",
    stated: Stated = "surely",
    hint: str = "",
) -> SourceSurvey:
    """Read all tables of diagnoses once. Arguments and errors: as `iter_surveyed`."""
    survey = SourceSurvey()
    for _ in iter_surveyed(survey, source_tables, vocab=vocab, stated=stated, hint=hint):
        pass
    return survey


def iter_surveyed(
    survey: SourceSurvey,
    source_tables: Sequence[SourceTable],
    *,
    vocab: str,
    stated: Stated,
    listed: bool = False,
    hint: str = "",
) -> Iterator[pl.DataFrame]:
    """The frames of `EventReader`, each entered in the `survey`; at the end of a table, and of all,
    faults that no check of a single row can find.

    `vocab`: of rows that carry none; `stated`: where the vocabulary is stated; `listed`: also
    collect the subjects; `hint`: of the error
    for tables without any diagnosis. Raises UserError: no_input (no rows at all), date (a column in
    another form), ambiguous_code (lost zeros; codes of both vocabularies), wrong_vocabulary and
    schema (unknown words in the columns of vocabularies and of kinds of claims), and the faults of
    a table.
    """
    seen_ids: list[np.ndarray] = []
    for table in source_tables:
        records = kept = odd_ids = 0
        dropped, dated = Counter[str](), DateCounts()
        seen: set[tuple[str | None, str]] = set()
        odd_rows: list[int] = []
        for block, frame, left in _iter_blocks(table):
            records += block.seen
            kept += frame.height
            dropped.update(left)
            if not frame.height:
                continue
            _refuse_unknown_words(frame, table)
            for (named,), rows in (
                frame.group_by("vocab") if frame["vocab"].count() else [((None,), frame)]
            ):
                seen.update((named, code) for code in rows["code"].drop_nulls().unique())
            dated.add(frame["date"])
            marked = frame.filter(pl.col("subject_id").str.contains(ODD_ID))["row"]
            odd_ids += marked.len()
            odd_rows += marked.head(5 - len(odd_rows)).to_list()
            if listed:
                seen_ids.append(hash_ids(frame["subject_id"]))
                if sum(map(len, seen_ids)) > max(len(survey.subjects), MERGED_SUBJECTS):
                    survey.subjects, seen_ids = (
                        sort_distinct(np.concatenate([survey.subjects, *seen_ids])),
                        [],
                    )
            yield frame
        refuse_unread_dates(dated, *table.dated)
        survey.findings += report_zones(dated.zoned, *table.dated)
        survey.last = max(
            (day for day in (survey.last, dated.last) if day is not None), default=None
        )
        _refuse_lost_zeros(
            {code for named, code in seen if codes.FAMILIES.get(named or vocab) == "icd9"},
            table.file,
        )
        if any(named is None for named, _ in seen):
            _refuse_ambiguous_codes(
                {code for named, code in seen if named is None}, table.file, vocab, stated
            )
        survey.records[table.file] = records
        survey.rows.append(
            SourceRows(
                file=table.file,
                kind=table.kind,
                seen=kept + sum(dropped.values()),
                dropped=dict(dropped),
            )
        )
        if odd_ids:
            text = f"{odd_ids} rows have a subject that looks like a formula or holds control characters"
            wanted, examples = "ids are never written as they are", tuple(map(str, odd_rows))
            warning = input_warning(
                Reason.LABEL_CHARS, text, wanted, file=table.file, count=odd_ids, examples=examples
            )
            survey.findings.append(warning)
    survey.subjects = sort_distinct(np.concatenate([survey.subjects, *seen_ids]))
    if not any(row.seen - sum(row.dropped.values()) for row in survey.rows):
        text = f"none of {sum(survey.records.values())} records holds a diagnosis"
        raise input_error(
            Reason.NO_INPUT,
            text,
            hint=hint,
            file=source_tables[0].file if len(source_tables) == 1 else None,
        )


def hash_ids(ids: pl.Series) -> np.ndarray:
    """Hashes of the distinct ids, sorted [n] uint64, for counting: the chance that two of a million
    are equal is 3e-8.
    """
    return sort_distinct(ids.drop_nulls().hash().to_numpy())


def _refuse_unknown_words(frame: pl.DataFrame, table: SourceTable) -> None:
    vocabularies, file = [*codes.FAMILIES, *[codes.OTHER] * table.others], table.file
    for name, known, code in (
        ("vocab", vocabularies, Reason.WRONG_VOCABULARY),
        ("source", KINDS, Reason.SCHEMA),
    ):
        words = set(frame[name].drop_nulls().unique()) - set(known)
        if words:
            text = f"holds {', '.join(map(safe_text, sorted(words)[:5]))}"
            action = "" if name == "vocab" else "Map them with --source-value WORD=KIND"
            raise input_error(
                code, text, f"known are {', '.join(known)}", action, file=file, field=name
            )


def _refuse_lost_zeros(texts: Collection[str], file: str) -> None:
    """Refuse ICD-9 codes without their leading zeros: 38.9 for 038.9, and none that begins with
    0.
    """
    short = sorted(text.strip() for text in texts if SHORT_CODE.fullmatch(text))
    if short and not any(text.lstrip(" '\"").startswith("0") for text in texts):
        text = f"codes have lost their leading zeros ({', '.join(map(safe_text, short[:5]))}), no code begins with 0"
        action = "Write the table again from its origin, with the codes as text"
        raise input_error(
            Reason.AMBIGUOUS_CODE,
            text,
            "expected three digits before the dot",
            action,
            file=file,
            found=short[0],
        )


def _refuse_ambiguous_codes(texts: Collection[str], file: str, vocab: str, stated: Stated) -> None:
    """Refuse codes of both ICD-9 and ICD-10 where the vocabulary is not stated, or stated by name
    and contradicted by other rows.
    """
    both = sorted({text.strip().upper() for text in texts} & SHARED_CODES)
    if both and (
        stated == "nowhere"
        or (stated == "by name" and any(_is_other_vocabulary(text, vocab) for text in texts))
    ):
        text = f"{', '.join(both)} exist in ICD-9 and in ICD-10, and the vocabulary is not stated"
        action = (
            "Give --icd10-from DATE; or for plain claims --col vocab=COLUMN, or --col vocab=icd9"
        )
        raise input_error(Reason.AMBIGUOUS_CODE, text, "expected a vocabulary", action, file=file)


def _is_other_vocabulary(text: str, vocab: str) -> bool:
    """Whether a code is not valid in its vocabulary, but in the other one."""
    other = "icd10" if codes.FAMILIES[vocab] == "icd9" else "icd9"
    code, _ = codes.normalise_code(text, vocab)
    return (code is None or codes.is_foreign_code(code, vocab)) and codes.normalise_code(
        text, other
    )[0] is not None
