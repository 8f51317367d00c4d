"""Numbers of the codes that are not ICD: cut points and moments of the training subjects, and codes
by decile (`--values`).

Counts of distinct numbers add up over shards, so that quantiles are exact and memory does not grow
with the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bitimely_core.claims import codes
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.tokens.sequences import VALUES

DECILES = 10
COUNTED = {"code": pl.String, "value": pl.Float32, "n": pl.Int64, "subjects": pl.Int64}


def count_values(shard: ClaimsShard) -> pl.DataFrame:
    """Of the training subjects, up to their index days: code, value, n records; and, with a null
    value, the subjects of each code.
    """
    train = shard.cohort.select(
        subject=pl.int_range(pl.len(), dtype=pl.Int32), train=pl.col("split") == "train"
    )
    rows = shard.rows.drop_nulls("value").join(train.filter("train"), on="subject")
    if "index_day" in shard.cohort.columns:
        ends = shard.cohort.select(
            subject=pl.int_range(pl.len(), dtype=pl.Int32), index_day="index_day"
        ).drop_nulls()
        rows = rows.join(ends, on="subject").filter(pl.col("day") <= pl.col("index_day"))
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    rows = rows.select("subject", "value", code=texts.gather(rows["code"]))
    values = rows.group_by("code", "value").agg(
        n=pl.len().cast(pl.Int64), subjects=pl.lit(0, pl.Int64)
    )
    carriers = rows.group_by("code").agg(
        value=pl.lit(None, pl.Float32),
        n=pl.lit(0, pl.Int64),
        subjects=pl.col("subject").n_unique().cast(pl.Int64),
    )
    return pl.concat(
        [
            frame.select(pl.col(name).cast(kind) for name, kind in COUNTED.items())
            for frame in (values, carriers)
        ]
    )


def fit_values(counts: Iterable[pl.DataFrame], least: int) -> pl.DataFrame:
    """code, n_subjects, n_values, mean, std, cuts (the nine deciles, inverted distribution
    function), of codes with a number of at least so many subjects.
    """
    merged = pl.DataFrame(schema=COUNTED)
    for part in counts:
        merged = (
            pl.concat([merged, part])
            .group_by("code", "value")
            .agg(pl.col("n").sum(), pl.col("subjects").sum())
        )
    fitted = []
    for (code,), own in merged.sort("code", "value", nulls_last=True).group_by(
        "code", maintain_order=True
    ):
        known = own.drop_nulls("value")
        value, n, subjects = (
            known["value"].to_numpy(),
            known["n"].to_numpy(),
            int(own["subjects"].sum()),
        )
        if subjects < least:
            continue
        total, below = n.sum(), np.cumsum(n)
        cuts = value[np.searchsorted(below * DECILES, np.arange(1, DECILES) * total)]
        mean = float((value.astype(np.float64) * n).sum() / total)
        std = float(np.sqrt(((value.astype(np.float64) - mean) ** 2 * n).sum() / total))
        fitted.append((code, subjects, int(total), mean, std, cuts.tolist()))
    kinds: dict[str, Any] = {
        "code": pl.String,
        "n_subjects": pl.Int64,
        "n_values": pl.Int64,
        "mean": pl.Float64,
        "std": pl.Float64,
        "cuts": pl.List(pl.Float32),
    }
    return pl.DataFrame(fitted, schema=kinds, orient="row")


def bin_values(shard: ClaimsShard, fitted: pl.DataFrame) -> ClaimsShard:
    """The shard with the decile in the code of each record with a number: `LOINC//2345-7//d03`;
    codes that are not fitted stay.
    """
    order = {code: i for i, code in enumerate(fitted["code"])}
    cuts = np.array(fitted["cuts"].to_list(), np.float32).reshape(-1, DECILES - 1)
    place = np.array(
        [order.get(code.text, -1) if code.vocab == codes.OTHER else -1 for code in shard.codes],
        np.int64,
    )
    code = shard.rows["code"].to_numpy().astype(np.int64)
    value = shard.rows["value"].fill_null(float("nan")).to_numpy()
    at = place[code] if len(place) else code
    chosen = np.flatnonzero((at >= 0) & ~np.isnan(value))
    decile = np.zeros(len(chosen), np.int64)
    for k in range(DECILES - 1):
        decile += cuts[at[chosen], k] < value[chosen]
    code[chosen] = len(shard.codes) + at[chosen] * DECILES + decile
    more = [IcdCode(codes.OTHER, token, (token,), codes.OTHER) for token in list_deciles(fitted)]
    rows = shard.rows.with_columns(code=pl.Series(code, dtype=pl.Int32)).drop("value")
    return replace(shard, rows=rows, codes=[*shard.codes, *more])


def list_deciles(fitted: pl.DataFrame) -> list[str]:
    """The tokens of all deciles."""
    return [f"{text}{codes.MARK}d{k:02d}" for text in fitted["code"] for k in range(1, DECILES + 1)]


def load_values(folder: Path) -> pl.DataFrame | None:
    """What `fit_values` gave for the token set in `folder`, if it reads numbers."""
    path = folder / VALUES
    return pl.read_parquet(path) if path.is_file() else None
