"""Reads the events of a source, and refuses on the way what no check of a single row can find.

Such faults are dates in an unknown form, codes without their leading zeros, and codes whose
vocabulary nothing states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from bitimely_core.claims import codes, reversals
from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.sources.columns import (
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    report_zones,
    warn_of_rows,
)
from bitimely_core.claims.sources.id_spellings import refuse_rounded_ids
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable, Stated
from bitimely_core.claims.sources.subject_tables import TableAccounts
from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import locate_errors
from bitimely_core.types import SourceRows

EXAMPLES = 5  # rows that a message shows
# what a spreadsheet runs as a formula, or a terminal obeys
ODD_ID = r"^[=+@]|^-[^0-9]|[\x00-\x1f\x7f]"
# poisoning in ICD-9; without their dots amyloidosis ... in ICD-10
SHARED_CODES = {f"E{number}" for number in (850, 851, 852, 853, 854, 860, 861)}
EVENT_KINDS: dict[str, pl.DataType] = {
    **dict.fromkeys(("subject_id", "date", "code", "vocab", "source", "claim"), pl.String()),
    "position": pl.Int16(),
}


def unpivot_codes(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """One row for each cell of `columns` that is not empty nor a word for it, by row and column.

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


def _iter_event_frames(table: SourceTable) -> Iterator[tuple[EventBlock, int]]:
    """The blocks of a table, with all columns of `ClaimsSource.events`, and their numbers of
    records.

    Raises UserError: as `tables.refuse_faults` and `tables.read_frames`.
    """
    source = table.table
    further = (*table.wide, *table.beside)
    with locate_errors(table.file):
        named = source.name_values(table.wide)
        for block in tables.read_frames(
            source.path,
            tuple(dict.fromkeys((*source.columns.values(), *further))),
            delimiter=source.delimiter,
            span=table.span,
            categories=table.categories,
        ):
            tables.refuse_faults(block, table.file)
            keys = (pl.col(name).alias(key) for key, name in source.columns.items())
            frame = block.frame.select("row", *keys, *further).with_columns(named)
            shaped = table.shape(frame)
            frame = shaped.events
            if block.has_blanks:
                frame = frame.with_columns(pl.col("subject_id").str.strip_chars())
            if table.form:
                written = frame["date"].cast(pl.String)
                frame = frame.with_columns(reformat_dates(written, table.form))
            yield shaped._replace(events=_fill_columns(frame, table)), block.frame.height


def _fill_columns(frame: pl.DataFrame, table: SourceTable) -> pl.DataFrame:
    """All columns of `ClaimsSource.events` in their order and types; null where a table has none.

    Texts that were read as categories stay so.
    """
    kinds = EVENT_KINDS | ({"value": pl.Float32()} if table.others else {})
    if table.reverses:
        kinds |= reversals.KINDS
        usual = (pl.lit(0, kind).alias(name) for name, kind in reversals.KINDS.items())
        frame = frame if "reversal" in frame.columns else frame.with_columns(*usual)
    if table.vocab:
        stated = pl.lit(table.vocab)
        has_vocab = "vocab" in frame.columns
        frame = frame.with_columns(vocab=pl.col("vocab").fill_null(stated) if has_vocab else stated)
    absent = kinds.keys() - frame.columns
    nulls = (pl.lit(None, kinds[name]).alias(name) for name in absent)
    return frame.with_columns(*nulls, file=pl.lit(table.file)).select(*kinds, "file", "row")


@dataclass(frozen=True)
class EventReader:
    """Reads `ClaimsSource.events` of accepted tables, any number of times, in any process."""

    tables: Sequence[SourceTable]

    def __call__(self) -> Iterator[pl.DataFrame]:
        """The frames."""
        for table in self.tables:
            for block, _ in _iter_event_frames(replace(table, categories=())):
                if block.events.height:
                    yield block.events

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
        return list(map(EventReader, groups))


@dataclass(kw_only=True)
class SourceSurvey(TableAccounts):
    """What the reading of all tables has found; the first fields say how to read those of
    diagnoses.
    """

    vocab: str = "icd9cm"  # of rows that carry none
    stated: Stated = "surely"  # what states that vocabulary
    counts_subjects: bool = False  # whether to collect `subjects`
    hint: str = ""  # of the error for tables without any diagnosis
    done: bool = False
    events: int = 0
    records: dict[str, int] = field(default_factory=dict)  # file -> records
    subjects: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # `hash_ids`
    # file -> source concept or string -> rows, as `EventBlock.unused`
    unused: dict[str, Counter[str]] = field(default_factory=dict)
    odd_dates: set[str] = field(default_factory=set)  # files with texts that are no dates

    def read(self, source_tables: Sequence[SourceTable]) -> Iterator[pl.DataFrame]:
        """The frames of `EventReader`. Each is surveyed as it is read.

        Raises UserError: at a block the faults of its table, wrong_vocabulary and schema (unknown
        words in the columns of vocabularies and of kinds of claims); at the end of a table date (a
        column in another form) and ambiguous_code (lost zeros; codes of both vocabularies); at the
        end no_input (no rows at all).
        """
        for table in source_tables:
            tally = _TableTally(table)
            for block, records in _iter_event_frames(table):
                events = block.events
                tally.add(block, records)
                if events.is_empty():
                    continue
                self.spellings.add(events["subject_id"])
                if self.counts_subjects:
                    ids = hash_ids(events["subject_id"])
                    self.subjects = sort_distinct(np.append(self.subjects, ids))
                yield events
            self._close_table(tally)
        self.done = True
        self.findings += self.spellings.report()
        if not self.events:
            raise input_error(
                Reason.NO_INPUT,
                f"none of {sum(self.records.values())} records holds a diagnosis",
                hint=self.hint,
                file=source_tables[0].file if len(source_tables) == 1 else None,
            )

    def read_all(self, source_tables: Sequence[SourceTable]) -> None:
        """Read all tables of diagnoses once. Raises UserError: as `read`."""
        deque(self.read(source_tables), maxlen=0)

    def _close_table(self, tally: _TableTally) -> None:
        """Check what only a whole table shows, and enter its counts."""
        table, dates = tally.table, tally.dates
        dated = table.dated or (table.file, table.table.columns["date"])
        refuse_unread_dates(dates, *dated)
        self.findings += report_zones(dates.zoned, *dated)
        if dates.last is not None:
            self.last = dates.last if self.last is None else max(self.last, dates.last)
        if plain := tally.codes.get(None):
            _refuse_ambiguous_codes(plain, table.file, self.vocab, self.stated)
        self.events += tally.events
        self.records[table.file] = tally.records
        self.unused[table.file] = tally.unused
        self.odd_dates.update([table.file] * bool(dates.bad))
        seen, kind = tally.events + tally.dropped.total(), "codes" if table.wide else "rows"
        dropped = dict(tally.dropped)
        self.rows.append(SourceRows(file=table.file, kind=kind, seen=seen, dropped=dropped))
        n_doubted = tally.dropped[Reason.NOT_DIAGNOSED]
        column = table.table.columns.get("certainty")
        doubted = safe_text(column) if column else "the column beside each"
        self.findings += warn_of_rows(
            n_doubted,
            Reason.NOT_DIAGNOSED,
            f"{kind} are suspected, ruled out or states after a disease by {doubted}",
            "they are left out",
            hint="Give --col certainty=none to use them",
            file=table.file,
        )
        if table.dropped_note:
            self.findings += warn_of_rows(
                tally.dropped.total() - n_doubted,
                Reason.WRONG_VOCABULARY,
                f"rows {table.dropped_note}",
                "they are left out",
                file=table.file,
            )
        self.findings += warn_of_rows(
            tally.odd_ids,
            Reason.LABEL_CHARS,
            "rows have a subject that looks like a formula or holds control characters",
            "ids are never written as they are",
            file=table.file,
            examples=tally.odd_rows,
        )


@dataclass
class _TableTally:
    """What the reading of one table has found so far."""

    table: SourceTable
    records: int = 0
    events: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)  # concept -> rows left out
    dates: DateCounts = field(default_factory=DateCounts)
    codes: dict[str | None, set[str]] = field(default_factory=dict)  # vocabulary -> as written
    odd_ids: int = 0
    odd_rows: list[int] = field(default_factory=list)  # the first of them

    def add(self, block: EventBlock, records: int) -> None:
        """Count a block. Raises UserError: as `_refuse_unknown_words` and `refuse_rounded_ids`."""
        events = block.events
        self.records += records
        self.events += events.height
        self.dropped.update(block.dropped)
        self.unused.update(block.unused)
        if events.is_empty():
            return
        _refuse_unknown_words(events, self.table)
        refuse_rounded_ids(events, "subject_id", self.table.file)
        groups = events.group_by("vocab") if events["vocab"].count() else [((None,), events)]
        for (vocab,), rows in groups:
            self.codes.setdefault(vocab, set()).update(rows["code"].drop_nulls().unique())
        self.dates.add(events["date"])
        odd = events.filter(pl.col("subject_id").str.contains(ODD_ID))["row"]
        self.odd_ids += odd.len()
        self.odd_rows += odd.head(EXAMPLES - len(self.odd_rows)).to_list()


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
    action = (
        "Map them with --source-value WORD=KIND; if the column holds something else, leave it out "
        "with --col source=none"
    )
    example = (
        "Say what they are with --source-vocab WORD=icd10, or WORD=none for other codes; if the "
        "column holds something else, give the vocabulary of all rows, as --col vocab=icd10"
    )
    for name, words, reason, hint in (
        ("vocab", vocabularies, Reason.WRONG_VOCABULARY, example),
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


def _refuse_ambiguous_codes(texts: Collection[str], file: str, vocab: str, stated: Stated) -> None:
    """Refuse codes of both ICD-9 and ICD-10 where the vocabulary is not stated, or stated by name
    and contradicted by other rows.
    """
    both = sorted({text.strip().upper() for text in texts} & SHARED_CODES)
    if not both or stated == "surely":
        return
    if stated == "nowhere" or any(_is_other_vocabulary(text, vocab) for text in texts):
        raise input_error(
            Reason.AMBIGUOUS_CODE,
            f"{', '.join(both)} exist in ICD-9 and in ICD-10",
            "expected a stated vocabulary",
            "Give --icd10-from DATE; or for plain claims --col vocab=COLUMN, or --col vocab=icd9",
            file=file,
        )


def _is_other_vocabulary(text: str, vocab: str) -> bool:
    """Whether a code is not valid in its vocabulary, but in the other one."""
    code, _ = codes.normalise_code(text, vocab)
    is_valid = code is not None and not codes.is_foreign_code(code, vocab)
    return not is_valid and codes.normalise_code(text, codes.get_other_family(vocab))[0] is not None
