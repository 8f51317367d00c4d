"""Cleans rows of claims: text becomes integers, and every excluded row is accounted for (sections
2.1, 3.3).

A row is counted at the first check that it fails. A row that passes all checks is valid, whether or
not its code has a PheCode. Each distinct date and each distinct code is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from bitimely_core.claims import dates, reversals
from bitimely_core.claims.codebook import Codebook, CodeReading
from bitimely_core.claims.codes import FAMILIES, OTHER, STEPS, UNMAPPED, RowFault, shape_text
from bitimely_core.claims.distinct import count_integers, number_texts
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.errors import Reason, safe_text
from bitimely_core.schemas.ingest_records import ClaimsFunnel

GRACE_DAYS = 90  # days after death in which claims are still valid
SILENT_DAYS = 3653  # days without a single row after which dates are in the future of the data
STRAY_SHARE = 0.01  # at most this share of the rows may lie there
EXAMPLES = 5
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of hashes that are put together

NO_SUBJECT = RowFault("identifier", Reason.IDENTIFIER)
BAD_DATE = RowFault("bad_date", Reason.DATE)
BEFORE_BIRTH = RowFault("before_birth", Reason.DATE_OUTSIDE_LIFE)
AFTER_DEATH = RowFault("after_death", Reason.DATE_OUTSIDE_LIFE)
RULE_FAULTS = ("not_diagnosed", "reversed")  # of rows that are dropped by a rule on their claim
# reasons whose examples are numbers of rows; those of the others are codes
ROW_REASONS = {Reason.IDENTIFIER, Reason.DATE, Reason.DATE_OUTSIDE_LIFE}
# reasons that are documented rules; those of the others are faults of the data
RULE_REASONS = {
    Reason.DATE_OUTSIDE_LIFE,
    Reason.DUPLICATES,
    Reason.UNMAPPED_CODE,
    Reason.LABEL_LEAKAGE,
    Reason.NOT_DIAGNOSED,
    Reason.REVERSED,
}


class RowAccount(BaseModel):
    """Rows by outcome. Accounts of several frames add up with `+=`."""

    rows: int = 0
    unknown_days: Counter[int] = Field(default_factory=Counter)  # day that stands for one -> rows
    added: int = 0  # rows for the second and further codes of a cell
    faults: Counter[str] = Field(default_factory=Counter)  # by the names of `RowFault`
    reasons: Counter[Reason] = Field(default_factory=Counter)  # as the ingest report names them
    # of valid rows: exact, trailing_zero, parent, unmapped
    steps: Counter[str] = Field(default_factory=Counter)
    # the first 5: codes as written, or row numbers; never ids or dates
    examples: dict[Reason, list[str]] = {}
    # of codes that are left out: shape of the text -> rows
    shapes: dict[Reason, Counter[str]] = {}

    def __iadd__(self, other: RowAccount) -> RowAccount:
        self.rows += other.rows
        self.added += other.added
        self.unknown_days.update(other.unknown_days)
        self.faults.update(other.faults)
        self.reasons.update(other.reasons)
        self.steps.update(other.steps)
        for reason, examples in other.examples.items():
            self.add_examples(reason, examples)
        for reason, shapes in other.shapes.items():
            self.shapes.setdefault(reason, Counter()).update(shapes)
        return self

    def add_examples(self, reason: Reason, examples: Iterable[str]) -> None:
        """Add examples of a reason; the first 5 stay."""
        self.examples[reason] = [*self.examples.get(reason, []), *examples][:EXAMPLES]

    def split(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rows dropped by a rule and rows quarantined, by reason: the two columns of the ingest
        report.
        """
        dropped: dict[str, int] = {}
        quarantined: dict[str, int] = {}
        for reason, n in sorted(self.reasons.items()):
            (dropped if reason in RULE_REASONS else quarantined)[str(reason)] = n
        return dropped, quarantined

    def funnel(self) -> ClaimsFunnel:
        """The part of the funnel that counts rows, duplicates included: each row once, at the first
        check it fails.
        """
        mapped = {step: self.steps[step] for step in STEPS}
        if self.steps[OTHER]:
            mapped[OTHER] = self.steps[OTHER]
        bad_code = {
            kind: self.faults[kind] for kind in ("missing", "bad_format", "ambiguous_short")
        }
        bad_code |= {kind: self.faults[kind] for kind in RULE_FAULTS if self.faults[kind]}
        return ClaimsFunnel(
            rows=self.rows,
            identifier=self.faults.get("identifier"),
            bad_date=self.faults["bad_date"],
            before_birth=self.faults["before_birth"],
            after_death=self.faults.get("after_death"),
            future=self.faults.get("future"),
            bad_code=bad_code,
            mapped=mapped,
            unmapped=self.faults[UNMAPPED] + self.steps[UNMAPPED],
        )


class RowForm(NamedTuple):
    """How rows are read."""

    vocab: str = "icd9"  # of rows without one
    source: str = "outpatient"  # of rows without one
    minutes: bool = False  # add the column `minute` Int16: of the day, 0 for a date without time
    unknown_days: frozenset[int] = frozenset()  # days that stand for an unknown date


PLAIN_ROWS = RowForm()


def clean_rows(
    frame: pl.DataFrame,
    book: Codebook,
    *,
    form: RowForm = PLAIN_ROWS,
    life_dates: pl.DataFrame | None = None,
    copy_key: bool = False,
) -> tuple[pl.DataFrame, RowAccount]:
    """The valid rows of one frame as integers, in its order, and the account of all.

    Valid rows: subject_id, day Int32, code Int32 (index in `book.codes`), source Int8 (index in
    SOURCES), row Int64; `value` Float32 where the frame has one; `late` where index days are given:
    after the subject's index day, used for labels but not in the input. Raises ValueError: for an
    unknown vocabulary, or a column of another type than text.

    Args:
        frame: subject_id, date, code, optional vocab, source, claim, position, value, row (its
            number in the file).
        book: reads the codes; grows.
        form: how the rows are read.
        life_dates: subject_id, birth_day, optional death_day, index_day; Int32, nullable.
        copy_key: add the column that `pass2_write.resolve_duplicates` needs.
    """
    texts = _number_columns(frame, form)
    if "row" not in frame.columns:
        frame = frame.with_columns(row=pl.int_range(1, pl.len() + 1, dtype=pl.Int64))
    cells, cell_index = _read_codes(texts["vocab"], texts["code"], book)
    cell_rows = frame.height
    row, readings, reading_index = _separate_codes(cells, cell_index)
    if row is not None:
        frame = frame[row]
        texts = {name: text._replace(number=text.number[row]) for name, text in texts.items()}
    positions = np.array([reading.position for reading in readings], np.int32)
    day, unknown = _read_days(frame, texts, form.unknown_days)
    code = pl.Series("code", positions[reading_index])
    table = _tabulate(frame, day.alias("day"), code, texts["source"], minutes=form.minutes)
    columns = table.columns
    if life_dates is not None:
        table = _join_life_dates(table, life_dates)
        columns += ["late"] if "late" in table.columns else []
    if copy_key:
        table = table.with_columns(_make_copy_key(frame, texts))
        columns.append("copy_key")
    faults, fault = _find_faults(table, readings, reading_index, strict=book.strict)
    number = pl.Series("fault", fault)
    lost = table.select("row", frame["code"], number).filter(number >= 0)
    account = _count_lost(faults, lost)
    account.rows = frame.height
    account.added = frame.height - cell_rows
    account.unknown_days.update(unknown)
    valid = (table.filter(number < 0) if lost.height else table).select(columns)
    for position, n in count_integers(valid["code"]).items():
        account.steps[book.codes[position].step] += n
    return valid, account


def _number_columns(frame: pl.DataFrame, form: RowForm) -> dict[str, _NumberedTexts]:
    """The columns of text by their distinct texts. Raises ValueError: as `_number_column`."""
    defaults = {"code": None, "vocab": form.vocab, "source": form.source}
    if isinstance(frame.schema["date"], pl.String | pl.Categorical):
        defaults["date"] = None
    return {name: _number_column(frame, name, default) for name, default in defaults.items()}


def _tabulate(
    frame: pl.DataFrame, day: pl.Series, code: pl.Series, source: _NumberedTexts, *, minutes: bool
) -> pl.DataFrame:
    """The rows as integers, with `minute` on request."""
    optional = [name for name in ("value", *reversals.KINDS) if name in frame.columns]
    kinds = source.map(lambda text: SOURCES.index(text if text in SOURCES else "other"), pl.Int8)
    table = frame.select("subject_id", day, code, kinds.alias("source"), "row", *optional)
    if not minutes:
        return table
    minute = dates.read_minutes(pl.col("date").cast(pl.String))
    return table.hstack(frame.select(minute=minute))


def _join_life_dates(table: pl.DataFrame, life_dates: pl.DataFrame) -> pl.DataFrame:
    """The rows with the dates of their subjects, and `late` where these have index days."""
    table = table.join(life_dates, on="subject_id", how="left", maintain_order="left")
    if "index_day" not in table.columns:
        return table
    is_late = pl.col("day") > pl.col("index_day")
    return table.with_columns(late=is_late.fill_null(value=False))


def _read_days(
    frame: pl.DataFrame, texts: Mapping[str, _NumberedTexts], unknown: frozenset[int]
) -> tuple[pl.Series, dict[int, int]]:
    """Days without those that stand for an unknown date, and the rows of each of these."""
    if "date" in texts:
        days = texts["date"].map(dates.parse_day, pl.Int32)
    else:
        days = dates.parse_days(frame["date"])
    is_unknown = days.is_in(sorted(unknown)).fill_null(value=False)
    return days.set(is_unknown, None), count_integers(days.filter(is_unknown))


class _NumberedTexts(NamedTuple):
    """A column by its distinct texts."""

    texts: list[str | None]  # distinct
    number: NDArray[np.int32]  # [rows] index of each row's text

    def map(self, function: Callable[[str | None], Any], kind: type[pl.DataType]) -> pl.Series:
        """`function` of the text of each row."""
        return pl.Series(list(map(function, self.texts)), dtype=kind).gather(self.number)


def _number_column(frame: pl.DataFrame, name: str, default: str | None) -> _NumberedTexts:
    """The texts of a column, `default` where there is none. Raises ValueError for another type."""
    if name not in frame.columns or not frame[name].count():
        return _NumberedTexts([default], np.zeros(frame.height, np.int32))
    kind = frame.schema[name]
    if not isinstance(kind, pl.String | pl.Categorical):
        text = f"column {name!r} is {kind}, expected text: numbers lose the zeros of codes"
        raise ValueError(text)  # noqa: TRY004
    row, number = number_texts(frame[name])
    texts = [default if text is None else text for text in frame[name].gather(row)]
    return _NumberedTexts(texts, number)


def _read_codes(
    vocab: _NumberedTexts, code: _NumberedTexts, book: Codebook
) -> tuple[list[tuple[CodeReading, ...]], NDArray[np.int32]]:
    """The readings of the distinct pairs of vocabulary and code, one for each code of the cell;
    and of each row the index of its pair.
    """
    unknown = [text for text in vocab.texts if text not in (*FAMILIES, OTHER)]
    if unknown:
        text = safe_text(str(unknown[0]))
        raise ValueError(f"vocab is one of {', '.join(FAMILIES)}, found {text}")
    pair = vocab.number.astype(np.int64) * len(code.texts) + code.number
    present = np.zeros(len(vocab.texts) * len(code.texts), bool)
    present[pair] = True
    written = [
        (str(vocab.texts[number // len(code.texts)]), code.texts[number % len(code.texts)])
        for number in np.flatnonzero(present)
    ]
    # the order of the book is that of the codes
    order = sorted(range(len(written)), key=lambda i: (written[i][0], written[i][1] or ""))
    readings = {i: book.read_cell(*written[i]) for i in order}
    index = np.cumsum(present, dtype=np.int32) - np.int32(1)  # of a pair among those present
    return [readings[i] for i in range(len(written))], index[pair]


def _separate_codes(
    cells: Sequence[tuple[CodeReading, ...]], cell_index: NDArray[np.int32]
) -> tuple[NDArray[np.int64] | None, list[CodeReading], NDArray[np.int32]]:
    """One row for each code of a cell: the row it stands in, the readings, and of each new row the
    index of its reading.

    The rows are None where no cell has several codes.
    """
    readings = list(chain.from_iterable(cells))
    if len(readings) == len(cells):
        return None, readings, cell_index
    sizes = np.array(list(map(len, cells)), np.int32)
    first_reading = np.cumsum(sizes, dtype=np.int32) - sizes
    row_sizes = sizes[cell_index]
    row = np.repeat(np.arange(len(cell_index)), row_sizes)
    first_row = np.cumsum(row_sizes) - row_sizes
    place = np.arange(len(row)) - first_row[row]  # of a code in its cell
    return row, readings, (first_reading[cell_index][row] + place).astype(np.int32)


def _find_faults(
    table: pl.DataFrame,
    readings: Sequence[CodeReading],
    reading_index: NDArray[np.int32],
    *,
    strict: bool,
) -> tuple[list[RowFault], NDArray[np.int16]]:
    """The faults that occur, and of each row the index of its first one, -1 where it has none."""
    faults = list(dict.fromkeys(reading.fault for reading in readings if reading.fault))
    index = [faults.index(reading.fault) if reading.fault else -1 for reading in readings]
    fault = np.array(index, np.int16)[reading_index]
    day, checks = pl.col("day"), []
    if "death_day" in table.columns:
        checks.append((AFTER_DEATH, day > pl.col("death_day") + GRACE_DAYS))
    if "birth_day" in table.columns:
        checks.append((BEFORE_BIRTH, day < pl.col("birth_day")))
    checks.append((BAD_DATE, day.is_null()))
    if strict:
        text = pl.col("subject_id").cast(pl.String).fill_null("")
        checks.append((NO_SUBJECT, ~text.str.contains(r"\S")))
    for name, is_faulty in checks:  # the last one, which is checked first, has the last word
        # a null test, for instance without a known birth, is passed
        fault[table.select(is_faulty.fill_null(value=False)).to_series().to_numpy()] = len(faults)
        faults.append(name)
    return faults, fault


def _make_copy_key(frame: pl.DataFrame, texts: Mapping[str, _NumberedTexts]) -> pl.Series:
    """Equal for copies among the rows of one subject, day and code: rows of one claim, or with
    equal texts.
    """
    key = np.zeros(frame.height, np.uint64)
    for name in ("date", "code", "vocab", "source"):
        if name in texts:
            distinct, number = texts[name]
            hashes = pl.Series(distinct, dtype=pl.String).hash().to_numpy()
            key = key * MULTIPLIER + hashes[number]
    for name in ("position", "value"):
        if name in frame.columns:
            key = key * MULTIPLIER + frame[name].hash().to_numpy()
    if "claim" in frame.columns and frame["claim"].count():
        claim = frame["claim"]
        key = np.where(claim.is_null().to_numpy(), key, claim.hash(seed=1).to_numpy())
    return pl.Series("copy_key", key)


def _count_lost(faults: Sequence[RowFault], lost: pl.DataFrame) -> RowAccount:
    """The account of rows that are left out: row, code as written, fault (index in `faults`)."""
    account = RowAccount()
    for (number,), rows in lost.group_by("fault", maintain_order=True):
        name, reason = faults[int(str(number))]
        account.faults[name] += rows.height
        account.reasons[reason] += rows.height
        first = rows.head(EXAMPLES)
        if reason in ROW_REASONS:
            account.add_examples(reason, [f"row {row}" for row in first["row"]])
            continue
        account.add_examples(reason, map(safe_text, first["code"]))
        if reason != Reason.EMPTY_CODE:
            shapes = account.shapes.setdefault(reason, Counter())
            for text, n in rows["code"].cast(pl.String).value_counts().iter_rows():
                shapes[shape_text(text or "")] += n
    return account


def find_data_end(counts: Mapping[int, int]) -> int | None:
    """The last day of the data, if few rows come long after it: they are slips. Else None.

    Few are at most 1 % of the rows, and long is ten years without any. `counts`: day -> rows.
    """
    if not counts:
        return None
    days = np.array(sorted(counts))
    after = np.cumsum([counts[int(day)] for day in days][::-1])[::-1]
    gaps = np.flatnonzero((np.diff(days) > SILENT_DAYS) & (after[1:] <= STRAY_SHARE * after[0]))
    return int(days[gaps[0]]) if len(gaps) else None
