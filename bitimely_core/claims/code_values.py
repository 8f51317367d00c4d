"""Reads the numbers of codes that are not ICD, such as laboratory values, as deciles (`--values`).

The cut points and moments are those of the training subjects. Counts of distinct numbers add up
over shards: so quantiles are exact, and memory does not grow with the records.
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
FITTED: dict[str, Any] = {
    "code": pl.String,
    "n_subjects": pl.Int64,
    "n_values": pl.Int64,
    "mean": pl.Float64,
    "std": pl.Float64,
    "cuts": pl.List(pl.Float32),
}
COUNTED = {"code": pl.String, "value": pl.Float32, "n": pl.Int64, "subjects": pl.Int64}


def count_values(shard: ClaimsShard, number: int = 0) -> pl.DataFrame:
    """Count the numbers of the training subjects, up to their index days.

    Columns: code, value, n (records); and a row for each code with a null value and its subjects.
    """
    cohort = shard.cohort.with_columns(subject=pl.int_range(pl.len(), dtype=pl.Int32))
    train = cohort.filter(pl.col("split") == "train").select("subject")
    rows = shard.rows.drop_nulls("value").join(train, on="subject")
    if "index_day" in cohort.columns:
        ends = cohort.select("subject", "index_day").drop_nulls()
        rows = rows.join(ends, on="subject").filter(pl.col("day") <= pl.col("index_day"))
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    rows = rows.select("subject", "value", code=texts.gather(rows["code"]))
    values = rows.group_by("code", "value").agg(n=pl.len())
    carriers = rows.group_by("code").agg(subjects=pl.col("subject").n_unique())
    counts = pl.concat([values, carriers], how="diagonal")
    return counts.select(pl.col(name).cast(kind) for name, kind in COUNTED.items())


def fit_values(counts: Iterable[pl.DataFrame], least: int) -> pl.DataFrame:
    """Fit the deciles of each code whose numbers are of at least so many subjects.

    Columns: code, n_subjects, n_values, mean, std, cuts (the nine deciles, by the inverted
    distribution function).
    """
    merged = pl.DataFrame(schema=COUNTED)
    for part in counts:
        merged = (
            pl.concat([merged, part])
            .group_by("code", "value")
            .agg(pl.col("n").sum(), pl.col("subjects").sum())
        )
    by_code = merged.sort("code", "value", nulls_last=True).group_by("code", maintain_order=True)
    fitted = []
    for (code,), rows in by_code:
        subjects = int(rows["subjects"].sum())
        if subjects >= least:
            fitted.append((code, subjects, *_fit_code(rows.drop_nulls("value"))))
    return pl.DataFrame(fitted, schema=FITTED, orient="row")


def _fit_code(rows: pl.DataFrame) -> tuple[int, float, float, list[float]]:
    """n_values, mean, std and cuts of the numbers of a code (value, ascending, and n)."""
    value, n = rows["value"].to_numpy(), rows["n"].to_numpy()
    total = n.sum()
    cuts = value[np.searchsorted(np.cumsum(n) * DECILES, np.arange(1, DECILES) * total)]
    mean = float((value.astype(np.float64) * n).sum() / total)
    std = float(np.sqrt(((value.astype(np.float64) - mean) ** 2 * n).sum() / total))
    return int(total), mean, std, cuts.tolist()


def bin_values(shard: ClaimsShard, fitted: pl.DataFrame) -> ClaimsShard:
    """The shard with the decile in the code of each record with a number: `LOINC//2345-7//d03`.

    Codes that are not fitted stay as they are.
    """
    fitted_index = {code: i for i, code in enumerate(fitted["code"])}
    cuts = np.array(fitted["cuts"].to_list(), np.float32).reshape(-1, DECILES - 1)
    code = shard.rows["code"].to_numpy().astype(np.int64)
    value = shard.rows["value"].fill_null(float("nan")).to_numpy()
    indices = [
        fitted_index.get(code.text, -1) if code.vocab == codes.OTHER else -1 for code in shard.codes
    ]
    index = np.array(indices, np.int64)[code]  # in `fitted`, -1 for codes that are not there
    chosen = np.flatnonzero((index >= 0) & ~np.isnan(value))
    decile = np.zeros(len(chosen), np.int64)
    for k in range(DECILES - 1):
        decile += cuts[index[chosen], k] < value[chosen]
    code[chosen] = len(shard.codes) + index[chosen] * DECILES + decile
    deciles = [IcdCode(codes.OTHER, token, (token,), codes.OTHER) for token in list_deciles(fitted)]
    rows = shard.rows.with_columns(code=pl.Series(code, dtype=pl.Int32)).drop("value")
    return replace(shard, rows=rows, codes=[*shard.codes, *deciles])


def list_deciles(fitted: pl.DataFrame) -> list[str]:
    """The tokens of all deciles."""
    return [f"{text}{codes.MARK}d{k:02d}" for text in fitted["code"] for k in range(1, DECILES + 1)]


def load_values(folder: Path) -> pl.DataFrame | None:
    """What `fit_values` gave for the token set in `folder`, if it reads numbers."""
    path = folder / VALUES
    return pl.read_parquet(path, glob=False) if path.is_file() else None
