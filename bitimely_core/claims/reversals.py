"""Finds claims that reverse or replace others, and removes what they reverse.

A reversal is a copy of a claim with a negative amount, or one that a word or code of its status
marks as void. A replacement stands for the earlier lines of its own claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

USUAL, VOID, REPLACEMENT = 0, 1, 2  # kinds of rows, column `reversal` Int8
KINDS: dict[str, pl.DataType] = {"reversal": pl.Int8(), "amount": pl.Float64()}
# accepted names of the columns, in lower case
STATUS_NAMES = (
    "status",
    "claim_status",
    "clm_status",
    "line_status",
    "adj",
    "adjustment",
    "adjustment_type",
    "adjustment_code",
    "adj_code",
    "clm_adjsmt_type_cd",
    "claim_frequency_code",
    "clm_freq_cd",
    "clm_freq_code",
    "clm_freq",
    "frequency_code",
    "transaction_type",
    "reversal",
    "void",
)
AMOUNT_NAMES = (
    "amount",
    "paid",
    "paid_amount",
    "amount_paid",
    "paid_amt",
    "amt_paid",
    "payment",
    "net_paid",
    "netpay",
    "pay",
    "clm_pmt_amt",
    "claim_amount",
    "charge",
    "charges",
    "charge_amount",
    "charged_amount",
    "allowed_amount",
    "billed_amount",
    "total_cost",
    "cost",
)
VOID_WORDS = (
    *("r", "rev", "reversal", "reversed", "reverse", "v", "void", "voided", "backout"),
    *("cancel", "canceled", "cancelled", "cancellation", "8", "22", "y", "yes", "true"),
)
REPLACEMENT_WORDS = ("7", "replacement", "replace", "corrected")
WORDS = dict.fromkeys(VOID_WORDS, VOID) | dict.fromkeys(REPLACEMENT_WORDS, REPLACEMENT)
FLAGS = {"y", "yes", "true"}  # of a column that is called reversal or void
CMS_COLUMN, CMS_WORDS = "clm_adjsmt_type_cd", {"1": VOID, "2": REPLACEMENT}  # CCLF
ROW = ("subject", "day", "code")


def list_words(column: str) -> dict[str, int]:
    """Word of a column of statuses, in lower case -> kind of its row."""
    name = column.lower()
    if name == CMS_COLUMN:
        return CMS_WORDS
    if name in {"reversal", "void"}:
        return WORDS | {"1": VOID}
    return {word: kind for word, kind in WORDS.items() if word not in FLAGS}


def mark_reversals(frame: pl.DataFrame, words: Mapping[str, int]) -> pl.DataFrame:
    """The frame with the columns of `KINDS` for its texts `status` and `amount`, either or both.

    `amount` is positive, 0 where there is none.
    """
    amount, kind = pl.lit(0.0), pl.lit(USUAL, pl.Int8)
    if "amount" in frame.columns:
        text = pl.col("amount").cast(pl.String).str.replace_all(r"[^0-9.()-]", "")
        is_negative = text.str.contains(r"^\(|-").fill_null(value=False)
        amount = text.str.replace_all(r"[()-]", "").cast(pl.Float64, strict=False).fill_null(0.0)
        kind = pl.when(is_negative & (amount > 0)).then(VOID).otherwise(USUAL).cast(pl.Int8)
    if "status" in frame.columns:
        status = pl.col("status").cast(pl.String).str.strip_chars().str.to_lowercase()
        stated = status.replace_strict(words, default=USUAL, return_dtype=pl.Int8)
        kind = pl.when(kind == VOID).then(kind).otherwise(stated)
    return frame.with_columns(reversal=kind, amount=amount).drop("status", strict=False)


def is_reversing(frame: pl.DataFrame, keys: Sequence[str]) -> bool:
    """Whether the reversals of some rows have the rows that they reverse among them, half of them
    at least.

    `keys`: columns in which both are equal.
    """
    voids = frame.filter(pl.col("reversal") == VOID)
    usual = frame.filter(pl.col("reversal") != VOID).select(*keys, "amount").unique()
    return voids.height > 0 and 2 * voids.join(usual, on=[*keys, "amount"]).height >= voids.height


def find_reversed(rows: pl.DataFrame) -> pl.Series:
    """Whether a row is a reversal, or is reversed or replaced by another of its subject.

    A reversal removes one row of the same day, code and amount, or of any amount where its own is
    not stated. A replacement removes the other rows of its claim.

    `rows`: subject, day, code, copy_key and the columns of `KINDS`.
    """
    kind = pl.col("reversal")
    table = rows.select(*ROW, "copy_key", *KINDS).with_row_index("position")
    voids, usual = table.filter(kind == VOID), table.filter(kind == USUAL)
    exact = _match_rows(voids, usual, [*ROW, "amount"])
    unstated = voids.filter(pl.col("amount") == 0).filter(~pl.col("position").is_in(exact["void"]))
    usual = usual.filter(~pl.col("position").is_in(exact["usual"]))
    near = _match_rows(unstated, usual, list(ROW))
    replaced = usual.join(table.filter(kind == REPLACEMENT), on=["subject", "copy_key"], how="semi")
    lost = pl.concat(
        [voids["position"], exact["usual"], near["usual"], replaced["position"]]
    ).unique()
    return table["position"].is_in(lost.implode())


def _match_rows(voids: pl.DataFrame, usual: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Pairs of rows that are equal in `keys`, each row once: positions `void` and `usual`."""
    place = pl.int_range(pl.len()).over(keys).alias("place")
    sides = [side.select(*keys, "position", place) for side in (voids, usual)]
    pairs = sides[0].join(sides[1], on=[*keys, "place"], suffix="_usual")
    return pairs.select(void="position", usual="position_usual")
