"""Periods of observation of subjects who were observed several times, with gaps between.

`period_starts` and `period_ends` are lists of days in order, null for subjects with one period or
none. A subject is at risk in the period that holds its index day alone: what happens in a gap is
not known.
"""

from __future__ import annotations

import polars as pl

PERIOD_COLUMNS = ("period_starts", "period_ends")


def merge_periods(periods: pl.DataFrame) -> pl.DataFrame:
    """The subjects with several periods: subject_id, `PERIOD_COLUMNS`.

    `periods`: subject_id, start and end (Int32 days), in any order. Periods that overlap or follow
    without a day between are one.
    """
    ordered = periods.drop_nulls().sort("subject_id", "start", "end")
    reached = pl.col("end").cum_max().shift().over("subject_id")
    is_new = (pl.col("start") > reached + 1).fill_null(value=True)
    merged = (
        ordered.with_columns(period=is_new.cum_sum().over("subject_id"))
        .group_by("subject_id", "period", maintain_order=True)
        .agg(pl.col("start").min(), pl.col("end").max())
        .group_by("subject_id", maintain_order=True)
        .agg(period_starts="start", period_ends="end")
    )
    return merged.filter(pl.col("period_starts").list.len() > 1)


def place_periods(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with `obs_start` and `obs_end` of the period that holds `index_day`, of subjects with
    several; of a day in a gap those of the period before it, else of the first one.
    """
    if not set(PERIOD_COLUMNS) <= set(frame.columns):
        return frame
    numbered = frame.with_row_index("subject_row")
    spans = (
        numbered.select("subject_row", "index_day", *PERIOD_COLUMNS)
        .drop_nulls(PERIOD_COLUMNS)
        .explode(PERIOD_COLUMNS)
        .with_columns(
            is_past=(pl.col("period_starts") <= pl.col("index_day")).fill_null(value=False)
        )
        # the first one, or the last one that has begun
        .filter(pl.col("is_past") | pl.col("subject_row").is_first_distinct())
        .group_by("subject_row")
        .agg(pl.col(PERIOD_COLUMNS).last())
    )
    placed = numbered.drop(PERIOD_COLUMNS).join(
        spans, on="subject_row", how="left", maintain_order="left"
    )
    kinds = {name: frame.schema[name] for name in ("obs_start", "obs_end") if name in frame.columns}
    days = {"obs_start": "period_starts", "obs_end": "period_ends"}
    return placed.with_columns(
        pl.coalesce(days[name], name).cast(kind).alias(name) for name, kind in kinds.items()
    ).drop("subject_row", *PERIOD_COLUMNS)
