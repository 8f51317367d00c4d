"""Claims as text to claims as integers, with an account of every excluded row (sections 2.1, 3.3).

A row is counted at the first check that it fails; a row that passes all checks is valid, whether or not its code has a PheCode. Each distinct
date and each distinct code is read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl
from pydantic import BaseModel, Field

from bitimely_core.claims import dates
from bitimely_core.claims.codes import FAMILIES, STEPS, UNMAPPED, Codebook, IcdCode
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.errors import Reason, safe_text
from bitimely_core.schemas.ingest import ClaimsFunnel

GRACE_DAYS = 90  # days after death in which claims are still valid
SILENT_DAYS = 3653  # days without a single row after which dates are in the future of the data
STRAY_SHARE = 0.01  # at most this share of the rows may lie there
EXAMPLES = 5

DATE_FAULTS = {  # fault of a date -> reason in the ingest report
    "identifier": Reason.IDENTIFIER,
    "bad_date": Reason.DATE,
    "before_birth": Reason.DATE_OUTSIDE_LIFE,
    "after_death": Reason.DATE_OUTSIDE_LIFE,
    "future": Reason.DATE_OUTSIDE_LIFE,
}
RULE_REASONS = {Reason.DATE_OUTSIDE_LIFE, Reason.DUPLICATES, Reason.UNMAPPED_CODE, Reason.LABEL_LEAKAGE}  # by a documented rule


class RowAccount(BaseModel):
    """Rows by outcome. Accounts of several frames add up with `+=`."""

    rows: int = 0
    faults: Counter[str] = Field(default_factory=Counter)  # as the funnel names them: bad_date, before_birth, missing, bad_format ...
    reasons: Counter[Reason] = Field(default_factory=Counter)  # as the ingest report names them
    steps: Counter[str] = Field(default_factory=Counter)  # of valid rows: exact, trailing_zero, parent, unmapped
    examples: dict[Reason, list[str]] = {}  # the first 5: codes as written, or row numbers; never ids or dates

    def __iadd__(self, other: RowAccount) -> RowAccount:
        self.rows += other.rows
        self.faults.update(other.faults)
        self.reasons.update(other.reasons)
        self.steps.update(other.steps)
        for reason, shown in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, []), *shown][:EXAMPLES]
        return self

    def split(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rows dropped by a rule and rows quarantined, by reason: the two columns of the ingest report."""
        by_rule = {str(reason): n for reason, n in sorted(self.reasons.items()) if reason in RULE_REASONS}
        return by_rule, {str(reason): n for reason, n in sorted(self.reasons.items()) if reason not in RULE_REASONS}

    def funnel(self) -> ClaimsFunnel:
        """The part of the funnel that counts rows: each row once, at the first check it fails, duplicates included."""
        return ClaimsFunnel(
            rows=self.rows,
            identifier=self.faults.get("identifier"),
            bad_date=self.faults["bad_date"],
            before_birth=self.faults["before_birth"],
            after_death=self.faults.get("after_death"),
            future=self.faults.get("future"),
            bad_code={kind: self.faults[kind] for kind in ("missing", "bad_format", "ambiguous_short")},
            mapped={step: self.steps[step] for step in STEPS},
            unmapped=self.faults[UNMAPPED] + self.steps[UNMAPPED],
        )


def clean_rows(
    frame: pl.DataFrame,
    book: Codebook,
    *,
    vocab: str = "icd9",
    source: str = "outpatient",
    life_dates: pl.DataFrame | None = None,
    form: str | None = None,
    latest: int | None = None,
    copy_key: bool = False,
) -> tuple[pl.DataFrame, RowAccount]:
    """The valid rows of one frame as integers, in its order, and the account of all.

    Valid rows: subject_id, day Int32, code Int32 (index in `book.codes`), source Int8 (index in SOURCES), row Int64; `late` where index days
    are given: after the subject's index day, used for labels but not in the input. Raises ValueError: for an unknown vocabulary, or a column
    of another type than text.

    Args:
        frame: subject_id, date, code, optional vocab, source, claim, position, row (its number in the file).
        book: reads the codes; grows.
        vocab: of rows without one.
        source: of rows without one.
        life_dates: subject_id, birth_day, optional death_day, index_day; Int32, nullable.
        form: of the dates (`dates.parse_day`).
        latest: days after this one are in the future of the data.
        copy_key: add the column that `pass2_write.resolve_duplicates` needs.
    """
    everywhere = {"vocab": pl.lit(vocab), "source": pl.lit(source), "row": pl.int_range(1, pl.len() + 1, dtype=pl.Int64)}
    absent = [value.alias(name) for name, value in everywhere.items() if name not in frame.columns]
    texts = [name for name in ("code", "vocab", "source") if name in frame.columns]
    for name in texts:
        if frame.schema[name] not in (pl.String, pl.Null):
            raise ValueError(f"column {name!r} is {frame.schema[name]}, expected text: numbers lose the zeros of codes")
    table = frame.with_columns(pl.col(texts).cast(pl.String)).with_columns(
        *absent, *(pl.col(name).fill_null(everywhere[name]) for name in texts if name != "code")
    )
    table = table.with_columns(dates.parse_days(frame["date"], form).alias("day"))
    table = table.join(_read_codes(table, book), on=["vocab", "code"], how="left", nulls_equal=True, maintain_order="left")
    if life_dates is not None:
        table = table.join(life_dates, on="subject_id", how="left", maintain_order="left")
    checks = _make_checks(set(table.columns), strict=book.strict, latest=latest)
    fault = pl.coalesce(*(pl.when(test).then(pl.lit(name)) for name, test in checks.items()), pl.col("code_fault"))
    reason = pl.col("fault").replace_strict(DATE_FAULTS, default=pl.col("code_reason"), return_dtype=pl.String)
    table = table.with_columns(fault=fault).with_columns(reason=reason)
    source_number = pl.col("source").replace_strict(SOURCES, range(len(SOURCES)), default=SOURCES.index("other"), return_dtype=pl.Int8)
    columns = ["subject_id", "day", pl.col("index").alias("code"), source_number, "row"]
    if "index_day" in table.columns:
        columns.append((pl.col("day") > pl.col("index_day")).fill_null(value=False).alias("late"))
    if copy_key:
        columns.append(_make_copy_key(frame.columns))
    kept = table.filter(pl.col("fault").is_null()).select(columns)
    return kept, _count_rows(table, kept, book.codes)


def _read_codes(table: pl.DataFrame, book: Codebook) -> pl.DataFrame:
    """vocab, code -> index, code_fault, code_reason, for the distinct pairs of a table."""
    pairs = table.select("vocab", "code").unique().sort("vocab", "code")  # sorted, so that the order of the book is that of the codes
    if odd := [vocab for vocab in pairs["vocab"].unique() if vocab not in FAMILIES]:
        raise ValueError(f"vocab is one of {', '.join(FAMILIES)}, found {safe_text(odd[0])}")
    readings = [(vocab, code, *book.read(vocab, code)) for vocab, code in pairs.iter_rows()]
    schema = {"vocab": pl.String, "code": pl.String, "index": pl.Int32, "code_fault": pl.String, "code_reason": pl.String}
    return pl.DataFrame(readings, schema=schema, orient="row")


def _make_checks(columns: set[str], *, strict: bool, latest: int | None) -> dict[str, pl.Expr]:
    """Fault -> test, in order. A null test, for instance without a known birth, is passed."""
    day = pl.col("day")
    checks = {"bad_date": day.is_null()}
    if strict:
        checks = {"identifier": pl.col("subject_id").cast(pl.String).str.strip_chars().fill_null("") == ""} | checks
    if "birth_day" in columns:
        checks["before_birth"] = day < pl.col("birth_day")
    if "death_day" in columns:
        checks["after_death"] = day > pl.col("death_day") + GRACE_DAYS
    if latest is not None:
        checks["future"] = day > latest
    return checks


def _make_copy_key(columns: list[str]) -> pl.Expr:
    """Equal for copies among the rows of one subject, day and code: rows of one claim, or with equal texts."""
    written = pl.struct(name for name in ("date", "code", "vocab", "source", "position") if name in columns).hash()
    if "claim" in columns:
        written = pl.when(pl.col("claim").is_null()).then(written).otherwise(pl.col("claim").hash(seed=1))
    return written.alias("copy_key")


def _count_rows(table: pl.DataFrame, kept: pl.DataFrame, codes: list[IcdCode]) -> RowAccount:
    left = table.filter(pl.col("fault").is_not_null())
    account = RowAccount(rows=table.height)
    account.faults.update(dict(left["fault"].value_counts().iter_rows()))
    account.reasons.update({Reason(reason): n for reason, n in left["reason"].value_counts().iter_rows()})
    for index, n in kept["code"].value_counts().iter_rows():
        account.steps[codes[index].step] += n
    for (reason,), rows in left.group_by("reason", maintain_order=True):
        shown = rows.head(EXAMPLES)
        by_row = Reason(reason) in DATE_FAULTS.values()
        account.examples[Reason(reason)] = [f"row {row}" for row in shown["row"]] if by_row else [safe_text(text) for text in shown["code"]]
    return account


def find_data_end(counts: Mapping[int, int]) -> int | None:
    """The last day of the data (`counts`: day -> rows) if at most 1 % of the rows come after it and after ten years without any; else None."""
    if not counts:
        return None
    days = np.array(sorted(counts))
    after = np.cumsum([counts[int(day)] for day in days][::-1])[::-1]
    gaps = np.flatnonzero((np.diff(days) > SILENT_DAYS) & (after[1:] <= STRAY_SHARE * after[0]))
    return int(days[gaps[0]]) if len(gaps) else None
