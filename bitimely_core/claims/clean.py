"""Claims as text to claims as integers, with an account of every excluded row (sections 2.1, 3.3).

A row is counted at the first check that it fails; a row that passes all checks is valid, whether or
not its code has a PheCode. Each distinct date and each distinct code is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from bitimely_core.claims import dates
from bitimely_core.claims.codes import FAMILIES, OTHER, STEPS, UNMAPPED, Codebook, CodeReading
from bitimely_core.claims.distinct import count_integers, number_texts
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.errors import Reason, safe_text
from bitimely_core.schemas.ingest import ClaimsFunnel

GRACE_DAYS = 90  # days after death in which claims are still valid
SILENT_DAYS = 3653  # days without a single row after which dates are in the future of the data
STRAY_SHARE = 0.01  # at most this share of the rows may lie there
EXAMPLES = 5
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of hashes that are put together

DATE_FAULTS = {  # fault of a date -> reason in the ingest report
    "identifier": Reason.IDENTIFIER,
    "bad_date": Reason.DATE,
    "before_birth": Reason.DATE_OUTSIDE_LIFE,
    "after_death": Reason.DATE_OUTSIDE_LIFE,
    "future": Reason.DATE_OUTSIDE_LIFE,
}
# by a documented rule
RULE_REASONS = {
    Reason.DATE_OUTSIDE_LIFE,
    Reason.DUPLICATES,
    Reason.UNMAPPED_CODE,
    Reason.LABEL_LEAKAGE,
}


class RowAccount(BaseModel):
    """Rows by outcome. Accounts of several frames add up with `+=`."""

    rows: int = 0
    # as the funnel names them: bad_date, before_birth, missing, bad_format ...
    faults: Counter[str] = Field(default_factory=Counter)
    reasons: Counter[Reason] = Field(default_factory=Counter)  # as the ingest report names them
    # of valid rows: exact, trailing_zero, parent, unmapped
    steps: Counter[str] = Field(default_factory=Counter)
    # the first 5: codes as written, or row numbers; never ids or dates
    examples: dict[Reason, list[str]] = {}

    def __iadd__(self, other: RowAccount) -> RowAccount:
        self.rows += other.rows
        self.faults.update(other.faults)
        self.reasons.update(other.reasons)
        self.steps.update(other.steps)
        for reason, shown in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, []), *shown][:EXAMPLES]
        return self

    def split(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rows dropped by a rule and rows quarantined, by reason: the two columns of the ingest
        report.
        """
        by_rule = {
            str(reason): n for reason, n in sorted(self.reasons.items()) if reason in RULE_REASONS
        }
        return by_rule, {
            str(reason): n
            for reason, n in sorted(self.reasons.items())
            if reason not in RULE_REASONS
        }

    def funnel(self) -> ClaimsFunnel:
        """The part of the funnel that counts rows: each row once, at the first check it fails,
        duplicates included.
        """
        return ClaimsFunnel(
            rows=self.rows,
            identifier=self.faults.get("identifier"),
            bad_date=self.faults["bad_date"],
            before_birth=self.faults["before_birth"],
            after_death=self.faults.get("after_death"),
            future=self.faults.get("future"),
            bad_code={
                kind: self.faults[kind] for kind in ("missing", "bad_format", "ambiguous_short")
            },
            mapped={
                step: self.steps[step]
                for step in (*STEPS, OTHER)
                if step in STEPS or self.steps[step]
            },
            unmapped=self.faults[UNMAPPED] + self.steps[UNMAPPED],
        )


def clean_rows(
    frame: pl.DataFrame,
    book: Codebook,
    *,
    vocab: str = "icd9",
    source: str = "outpatient",
    life_dates: pl.DataFrame | None = None,
    copy_key: bool = False,
    minutes: bool = False,
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
        vocab: of rows without one.
        source: of rows without one.
        life_dates: subject_id, birth_day, optional death_day, index_day; Int32, nullable.
        copy_key: add the column that `pass2_write.resolve_duplicates` needs.
        minutes: add the column `minute` Int16: of the day, 0 for a date without time.
    """
    for name in ("code", "vocab", "source"):
        if name in frame.columns and not isinstance(
            frame.schema[name], pl.String | pl.Categorical | pl.Null
        ):
            raise ValueError(
                f"column {name!r} is {frame.schema[name]}, expected text: numbers lose the zeros of codes"
            )
    defaults = {"date": None, "code": None, "vocab": vocab, "source": source}
    texts = {
        name: _number_column(frame, name, value)
        for name, value in defaults.items()
        if name != "date" or isinstance(frame.schema[name], pl.String | pl.Categorical)
    }
    readings, pair = _read_codes(texts["vocab"], texts["code"], book)
    kinds = [
        SOURCES.index(text) if text in SOURCES else SOURCES.index("other")
        for text in texts["source"].texts
    ]
    table = frame.select(
        "subject_id",
        (
            texts["date"].map(dates.parse_day, pl.Int32)
            if "date" in texts
            else dates.parse_days(frame["date"])
        ).alias("day"),
        pl.Series("code", np.array([reading.position for reading in readings], np.int32)[pair]),
        pl.Series("source", np.array(kinds, np.int8)[texts["source"].number]),
        "row"
        if "row" in frame.columns
        else pl.int_range(1, pl.len() + 1, dtype=pl.Int64).alias("row"),
        *(["value"] if "value" in frame.columns else []),
    )
    if minutes:
        table = table.with_columns(_read_minutes(texts["date"]).alias("minute"))
    columns = table.columns
    if life_dates is not None:
        table = table.join(life_dates, on="subject_id", how="left", maintain_order="left")
    if "index_day" in table.columns:
        table = table.with_columns(
            (pl.col("day") > pl.col("index_day")).fill_null(value=False).alias("late")
        )
        columns.append("late")
    if copy_key:
        table = table.with_columns(_make_copy_key(frame, texts))
        columns.append("copy_key")
    outcomes: list[tuple[str, Reason]] = list(
        dict.fromkeys((one.fault, one.reason) for one in readings if one.fault and one.reason)
    )
    numbers = [
        outcomes.index((one.fault, one.reason)) if one.fault and one.reason else -1
        for one in readings
    ]
    outcome = np.array(numbers, np.int16)[pair]
    for name, test in reversed(_make_checks(set(table.columns), strict=book.strict).items()):
        outcome[table.select(test.fill_null(value=False)).to_series().to_numpy()] = len(outcomes)
        outcomes.append((name, DATE_FAULTS[name]))
    lost = np.flatnonzero(outcome >= 0)
    account = _count_lost(
        outcomes, outcome[lost], frame["code"].gather(lost), table["row"].gather(lost)
    )
    account.rows = frame.height
    kept = (table.filter(pl.Series(outcome < 0)) if len(lost) else table).select(columns)
    for index, n in count_integers(kept["code"]).items():
        account.steps[book.codes[index].step] += n
    return kept, account


class _NumberedTexts(NamedTuple):
    texts: list[str | None]  # distinct
    number: NDArray[np.int32]  # [rows] position of each row's text

    def map(self, function: Callable[[str | None], Any], kind: type[pl.DataType]) -> pl.Series:
        """`function` of the text of each row."""
        return pl.Series([function(text) for text in self.texts], dtype=kind).gather(self.number)


def _number_column(frame: pl.DataFrame, name: str, default: str | None) -> _NumberedTexts:
    """The texts of a column, `default` where there is none."""
    if name not in frame.columns or not frame[name].count():
        return _NumberedTexts([default], np.zeros(frame.height, np.int32))
    row, number = number_texts(frame[name])
    return _NumberedTexts(
        [default if text is None else text for text in frame[name].gather(row)], number
    )


def _read_codes(
    vocab: _NumberedTexts, code: _NumberedTexts, book: Codebook
) -> tuple[list[CodeReading], NDArray[np.int32]]:
    """The readings of the distinct pairs of vocabulary and code, and of each row the position of
    its own.
    """
    if odd := [text for text in vocab.texts if text not in (*FAMILIES, OTHER)]:
        raise ValueError(f"vocab is one of {', '.join(FAMILIES)}, found {safe_text(str(odd[0]))}")
    pair = vocab.number.astype(np.int64) * len(code.texts) + code.number
    present = np.zeros(len(vocab.texts) * len(code.texts), bool)
    present[pair] = True
    written = [
        (str(vocab.texts[at // len(code.texts)]), code.texts[at % len(code.texts)])
        for at in np.flatnonzero(present)
    ]
    # the order of the book is that of the codes
    order = sorted(range(len(written)), key=lambda i: (written[i][0], written[i][1] or ""))
    found = {i: book.read(*written[i]) for i in order}
    return [found[i] for i in range(len(written))], (
        np.cumsum(present, dtype=np.int32) - np.int32(1)
    )[pair]


def _read_minutes(written: _NumberedTexts) -> pl.Series:
    """The minutes of the day of texts of dates."""
    distinct = pl.DataFrame({"date": pl.Series(written.texts, dtype=pl.String)})
    return distinct.select(dates.read_minutes(pl.col("date"))).to_series().gather(written.number)


def _make_checks(columns: set[str], *, strict: bool) -> dict[str, pl.Expr]:
    """Fault -> test, in order. A null test, for instance without a known birth, is passed."""
    day = pl.col("day")
    checks = {"bad_date": day.is_null()}
    if strict:
        checks = {
            "identifier": ~pl.col("subject_id")
            .cast(pl.String)
            .str.contains(r"\S")
            .fill_null(value=False)
        } | checks
    if "birth_day" in columns:
        checks["before_birth"] = day < pl.col("birth_day")
    if "death_day" in columns:
        checks["after_death"] = day > pl.col("death_day") + GRACE_DAYS
    return checks


def _make_copy_key(frame: pl.DataFrame, texts: Mapping[str, _NumberedTexts]) -> pl.Series:
    """Equal for copies among the rows of one subject, day and code: rows of one claim, or with
    equal texts.
    """
    written = np.zeros(frame.height, np.uint64)
    for distinct, number in texts.values():
        written = (
            written * MULTIPLIER + pl.Series(distinct, dtype=pl.String).hash().to_numpy()[number]
        )
    for name in ("position", "value"):
        if name in frame.columns:
            written = written * MULTIPLIER + frame[name].hash().to_numpy()
    if "claim" not in frame.columns or not frame["claim"].count():
        return pl.Series("copy_key", written)
    claim = frame["claim"]
    return pl.Series(
        "copy_key", np.where(claim.is_null().to_numpy(), written, claim.hash(seed=1).to_numpy())
    )


def _count_lost(
    outcomes: Sequence[tuple[str, Reason]],
    outcome: NDArray[np.int16],
    written: pl.Series,
    rows: pl.Series,
) -> RowAccount:
    """The account of rows that are left out: each an `outcome` (fault and reason), its code as
    `written` and its number.
    """
    account = RowAccount()
    for (fault, reason), n in zip(
        outcomes, np.bincount(outcome, minlength=len(outcomes)).tolist(), strict=True
    ):
        if n:
            account.faults[fault] += n
            account.reasons[reason] += n
    for reason in account.reasons:
        first = np.flatnonzero(np.array([of == reason for _, of in outcomes])[outcome])[:EXAMPLES]
        by_row = reason in DATE_FAULTS.values()
        account.examples[reason] = [
            f"row {rows[i]}" if by_row else safe_text(written[i]) for i in first.tolist()
        ]
    return account


def find_data_end(counts: Mapping[int, int]) -> int | None:
    """The last day of the data (`counts`: day -> rows) if at most 1 % of the rows come after it and
    after ten years without any; else None.
    """
    if not counts:
        return None
    days = np.array(sorted(counts))
    after = np.cumsum([counts[int(day)] for day in days][::-1])[::-1]
    gaps = np.flatnonzero((np.diff(days) > SILENT_DAYS) & (after[1:] <= STRAY_SHARE * after[0]))
    return int(days[gaps[0]]) if len(gaps) else None
