"""Reads the events of a source, and refuses on the way what no check of a single row can find.

Such faults are dates in an unknown form, codes without their leading zeros, and codes whose
vocabulary nothing states.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
EXAMPLES = 5  # rows that a message shows
# what a spreadsheet runs as a formula, or a terminal obeys
ODD_ID = r"^[=+@]|^-[^0-9]|[\x00-\x1f\x7f]"
SHORT_CODE = re.compile(r"\s*\d{1,2}\.\d{1,2}\s*", re.ASCII)  # 38.9: a category has three digits
# poisoning in ICD-9; without their dots amyloidosis ... in ICD-10
SHARED_CODES = {f"E{number}" for number in (850, 851, 852, 853, 854, 860, 861)}
EVENT_TEXTS = ("subject_id", "date", "code", "vocab", "source", "claim")
EVENT_KINDS: dict[str, pl.DataType] = {
    **dict.fromkeys(EVENT_TEXTS, pl.String()),
    "position": pl.Int16(),
}


def unpivot_codes(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """One row for each cell of `columns` that is not empty, by row and column.

    The other columns stay; `code` is the cell and `position` the number of its column from 1 on.
    """
    positions = {name: i for i, name in enumerate(columns, 1)}
    cells = (
        frame.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("index"), *columns)
        .unpivot(columns, index="index", variable_name="column", value_name="code")
        .filter(pl.col("code").str.contains(r"\S"))
        .with_columns(
            pl.col("column").replace_strict(positions, return_dtype=pl.Int16).alias("position")
        )
        .sort("index", "position")
    )
    return frame.drop(columns)[cells["index"]].with_columns(cells["code"], cells["position"])


class EventFrame(NamedTuple):
    """A block of a table as events."""

    events: pl.DataFrame  # all columns of `ClaimsSource.events`
    records: int
    dropped: Mapping[str, int]  # as of `EventBlock`


def _iter_event_frames(table: SourceTable) -> Iterator[EventFrame]:
    """The blocks of a table as events.

    Raises UserError: as `tables.refuse_faults` and `tables.read_frames`.
    """
    source = table.table
    with locate_errors(table.file):
        for block in tables.read_frames(
            source.path,
            tuple(dict.fromkeys((*source.columns.values(), *table.wide))),
            delimiter=source.delimiter,
            span=table.span,
            categories=table.categories,
        ):
            tables.refuse_faults(block, table.file)
            frame, dropped = table.shape(block.frame)
            if block.blanks:
                frame = frame.with_columns(pl.col("subject_id").str.strip_chars())
            if table.form is not None:
                written = frame["date"].cast(pl.String)
                frame = frame.with_columns(reformat_dates(written, table.form))
            yield EventFrame(_fill_columns(frame, table), block.seen, dropped)


def _fill_columns(frame: pl.DataFrame, table: SourceTable) -> pl.DataFrame:
    """All columns of `ClaimsSource.events` in their order and types; null where a table has none.

    Texts that were read as categories stay so.
    """
    kinds = EVENT_KINDS | ({"value": pl.Float32()} if table.others else {})
    columns = []
    for name, kind in kinds.items():
        column = pl.col(name) if name in frame.columns else pl.lit(None)
        is_category = isinstance(frame.schema.get(name), pl.Categorical)
        columns.append(column if is_category else column.cast(kind).alias(name))
    return frame.select(*columns, pl.lit(table.file).alias("file"), "row")


@dataclass(frozen=True)
class EventReader:
    """Reads `ClaimsSource.events` of accepted tables, any number of times, in any process."""

    tables: Sequence[SourceTable]

    def __call__(self) -> Iterator[pl.DataFrame]:
        """The frames."""
        for table in self.tables:
            for frame, _, _ in _iter_event_frames(replace(table, categories=())):
                if frame.height:
                    yield frame

    def split(self, size: int) -> list[EventReader]:
        """Readers of consecutive parts of about `size` bytes, which together read the same rows in
        the same order.
        """
        groups: list[list[SourceTable]] = []
        group_bytes = size
        for table in self.tables:
            source = table.table._replace(path=table.table.path.resolve())
            spans = tables.split_table(source.path, size, delimiter=source.delimiter)
            for span in spans:
                if group_bytes >= size or len(spans) > 1:
                    groups.append([])
                    group_bytes = 0
                groups[-1].append(replace(table, table=source, span=span))
                group_bytes += source.path.stat().st_size if len(spans) == 1 else size
        return [EventReader(group) for group in groups]


@dataclass(kw_only=True)
class SourceSurvey:
    """What the reading of all tables of diagnoses has found; the first fields say how to read."""

    vocab: str = "icd9cm"  # of rows that carry none
    stated: Stated = "surely"  # what states that vocabulary
    counts_subjects: bool = False  # whether to collect `subjects`
    hint: str = ""  # of the error for tables without any diagnosis
    done: bool = False
    rows: list[SourceRows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)  # file -> records
    last: int | None = None  # day of a row
    subjects: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # `hash_ids`

    def read(self, source_tables: Sequence[SourceTable]) -> Iterator[pl.DataFrame]:
        """The frames of `EventReader`. Each is surveyed as it is read.

        Raises UserError: at a block the faults of its table, wrong_vocabulary and schema (unknown
        words in the columns of vocabularies and of kinds of claims); at the end of a table date (a
        column in another form) and ambiguous_code (lost zeros; codes of both vocabularies); at the
        end no_input (no rows at all).
        """
        subjects: list[np.ndarray] = []
        for table in source_tables:
            tally = _TableTally(table)
            for frame in _iter_event_frames(table):
                tally.add(frame)
                if frame.events.is_empty():
                    continue
                if self.counts_subjects:
                    subjects.append(hash_ids(frame.events["subject_id"]))
                    subjects = self._merge_subjects(subjects)
                yield frame.events
            self._close_table(tally)
        self.subjects = sort_distinct(np.concatenate([self.subjects, *subjects]))
        self.done = True
        if not any(row.seen > sum(row.dropped.values()) for row in self.rows):
            raise input_error(
                Reason.NO_INPUT,
                f"none of {sum(self.records.values())} records holds a diagnosis",
                hint=self.hint,
                file=source_tables[0].file if len(source_tables) == 1 else None,
            )

    def _merge_subjects(self, subjects: list[np.ndarray]) -> list[np.ndarray]:
        """What is left of the hashes of blocks: nothing when they are enough to be merged."""
        if sum(map(len, subjects)) <= max(len(self.subjects), MERGED_SUBJECTS):
            return subjects
        self.subjects = sort_distinct(np.concatenate([self.subjects, *subjects]))
        return []

    def _close_table(self, tally: _TableTally) -> None:
        """Check what only a whole table shows, and enter its counts."""
        table, dates = tally.table, tally.dates
        dated = table.dated or (table.file, table.table.columns["date"])
        refuse_unread_dates(dates, *dated)
        self.findings += report_zones(dates.zoned, *dated)
        if dates.last is not None:
            self.last = dates.last if self.last is None else max(self.last, dates.last)
        _refuse_lost_zeros(tally.list_icd9(self.vocab), table.file)
        if plain := tally.codes.get(None):
            _refuse_ambiguous_codes(plain, table.file, self.vocab, self.stated)
        self.records[table.file] = tally.records
        seen = tally.events + tally.dropped.total()
        dropped = dict(tally.dropped)
        self.rows.append(SourceRows(file=table.file, kind=table.kind, seen=seen, dropped=dropped))
        self.findings += tally.report_odd_ids()


@dataclass
class _TableTally:
    """What the reading of one table has found so far."""

    table: SourceTable
    records: int = 0
    events: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dates: DateCounts = field(default_factory=DateCounts)
    codes: dict[str | None, set[str]] = field(default_factory=dict)  # vocabulary -> as written
    odd_ids: int = 0
    odd_rows: list[int] = field(default_factory=list)  # the first of them

    def add(self, frame: EventFrame) -> None:
        """Count a block. Raises UserError: as `_refuse_unknown_words`."""
        events = frame.events
        self.records += frame.records
        self.events += events.height
        self.dropped.update(frame.dropped)
        if events.is_empty():
            return
        _refuse_unknown_words(events, self.table)
        self._add_codes(events)
        self.dates.add(events["date"])
        odd = events.filter(pl.col("subject_id").str.contains(ODD_ID))["row"]
        self.odd_ids += odd.len()
        self.odd_rows += odd.head(EXAMPLES - len(self.odd_rows)).to_list()

    def _add_codes(self, events: pl.DataFrame) -> None:
        groups = events.group_by("vocab") if events["vocab"].count() else [((None,), events)]
        for (vocab,), rows in groups:
            self.codes.setdefault(vocab, set()).update(rows["code"].drop_nulls().unique())

    def list_icd9(self, default: str) -> set[str]:
        """The codes in a vocabulary of ICD-9, which is `default` for rows without one."""
        icd9 = [
            texts
            for vocab, texts in self.codes.items()
            if codes.FAMILIES.get(vocab or default) == "icd9"
        ]
        return set().union(*icd9)

    def report_odd_ids(self) -> list[Finding]:
        """A warning of subjects whose ids are dangerous to show, if there are any."""
        if not self.odd_ids:
            return []
        rows = f"{self.odd_ids} rows have a subject that looks like a formula"
        return [
            input_warning(
                Reason.LABEL_CHARS,
                f"{rows} or holds control characters",
                "ids are never written as they are",
                file=self.table.file,
                count=self.odd_ids,
                examples=tuple(map(str, self.odd_rows)),
            )
        ]


def survey_tables(
    source_tables: Sequence[SourceTable], *, stated: Stated = "surely", hint: str = ""
) -> SourceSurvey:
    """Read all tables of diagnoses once. Arguments and errors: as `SourceSurvey`."""
    survey = SourceSurvey(stated=stated, hint=hint)
    for _ in survey.read(source_tables):
        pass
    return survey


def hash_ids(ids: pl.Series) -> np.ndarray:
    """Hashes of the distinct ids, sorted [n] uint64, for counting.

    The chance that two of a million are equal is 3e-8.
    """
    return sort_distinct(ids.drop_nulls().hash().to_numpy())


def _refuse_unknown_words(frame: pl.DataFrame, table: SourceTable) -> None:
    """Raises UserError: wrong_vocabulary or schema for a word that is no vocabulary or no kind of
    claims.
    """
    vocabularies = [*codes.FAMILIES, *[codes.OTHER] * table.others]
    action = "Map them with --source-value WORD=KIND"
    for name, words, reason, hint in (
        ("vocab", vocabularies, Reason.WRONG_VOCABULARY, ""),
        ("source", KINDS, Reason.SCHEMA, action),
    ):
        unknown = set(frame[name].drop_nulls().unique()) - set(words)
        if unknown:
            raise input_error(
                reason,
                f"holds {', '.join(map(safe_text, sorted(unknown)[:5]))}",
                f"known are {', '.join(words)}",
                hint,
                file=table.file,
                field=name,
            )


def _refuse_lost_zeros(texts: Collection[str], file: str) -> None:
    """Refuse ICD-9 codes without their leading zeros: 38.9 for 038.9, and none that begins with
    0.
    """
    short = sorted(text.strip() for text in texts if SHORT_CODE.fullmatch(text))
    if short and not any(text.lstrip(" '\"").startswith("0") for text in texts):
        examples = ", ".join(map(safe_text, short[:5]))
        raise input_error(
            Reason.AMBIGUOUS_CODE,
            f"codes have lost their leading zeros ({examples}), no code begins with 0",
            "expected three digits before the dot",
            "Write the table again from its origin, with the codes as text",
            file=file,
            found=short[0],
        )


def _refuse_ambiguous_codes(texts: Collection[str], file: str, vocab: str, stated: Stated) -> None:
    """Refuse codes of both ICD-9 and ICD-10 where the vocabulary is not stated, or stated by name
    and contradicted by other rows.
    """
    both = sorted({text.strip().upper() for text in texts} & SHARED_CODES)
    if not both or stated == "surely":
        return
    if stated == "nowhere" or any(_is_other_vocabulary(text, vocab) for text in texts):
        text = f"{', '.join(both)} exist in ICD-9 and in ICD-10, and the vocabulary is not stated"
        raise input_error(
            Reason.AMBIGUOUS_CODE,
            text,
            "expected a vocabulary",
            "Give --icd10-from DATE; or for plain claims --col vocab=COLUMN, or --col vocab=icd9",
            file=file,
        )


def _is_other_vocabulary(text: str, vocab: str) -> bool:
    """Whether a code is not valid in its vocabulary, but in the other one."""
    code, _ = codes.normalise_code(text, vocab)
    is_valid = code is not None and not codes.is_foreign_code(code, vocab)
    return not is_valid and codes.normalise_code(text, codes.get_other_family(vocab))[0] is not None
