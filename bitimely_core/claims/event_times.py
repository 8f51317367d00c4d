"""Times to event from onsets, ends of observation and deaths: one more form of the labels, for time
at risk (docs/survival.md).

Day 1 is the first at risk. A subject without event is censored at the end of its last day, half a
day behind an event on it, so that it counts as without the event on that day. Events: 1 the onset,
2 death before it, 0 neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from bitimely_core.claims.event_labels import Landmark

END_OF_DAY = 0.5


def parse_horizons(value: object) -> tuple[int, ...] | None:
    """Horizons in days, ascending, from `365,730`, numbers or None. Raises ValueError."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    texts = [str(part).strip() for part in (parts if isinstance(parts, list | tuple) else [parts])]
    horizons = tuple(sorted({int(text) for text in texts if text.isdecimal()}))
    if not horizons or horizons[0] < 1 or len(horizons) != len(texts):
        raise ValueError(
            f"horizons of time to event are different numbers of days, as 365,730; found {value!r}"
        )
    return horizons


def add_event_times(
    cohort: pl.DataFrame,
    before: pl.DataFrame,
    names: Sequence[str],
    landmark: Landmark,
    data_end: int | None,
) -> pl.DataFrame:
    """`cohort` with `time_<name>` (Float32 days) and `event_<name>` (Int8) for each of `names`;
    null without time at risk, or where the label is not known or begins before it.

    The time at risk is that of the labels at the landmark: the horizon behind the gap, cut at the
    end of observation.

    Args:
        cohort: with index_day, obs_end, onset_<name> and perhaps death_day.
        before: its labels y_<name> before the landmark.
        names: of the labels.
        landmark: index day, gap and horizon.
        data_end: end of observation where it is not known.
    """
    low = pl.col("index_day") + landmark.gap_days
    death = (
        pl.col("death_day").cast(pl.Int64)
        if "death_day" in cohort.columns
        else pl.lit(None, pl.Int64)
    )
    end = pl.min_horizontal(
        low + landmark.horizon_days, pl.col("obs_end").fill_null(pl.lit(data_end, pl.Int32)), death
    )
    columns = []
    for name in names:
        onset = pl.col(f"onset_{name}")
        is_over = (end <= low) | (onset <= low).fill_null(value=False)
        at_risk = ~(pl.Series(before[f"y_{name}"].is_null()) | is_over)
        at_risk &= pl.col("index_day").is_not_null()
        columns += _make_columns(name, low, end, onset, death, at_risk)
    return cohort.with_columns(columns)


def add_record_times(subjects: pl.DataFrame, record: pl.DataFrame, name: str) -> pl.DataFrame:
    """`subjects` with the same columns of the outcome `name` of a cohort record
    (`cohorts.select_subjects`, in the same order); null for others.
    """
    low, end, member = pl.col("risk_start") - 1, pl.col("risk_end"), pl.col("left_out").is_null()
    onset, death = pl.col("outcome_day"), pl.col("death_day")
    return subjects.with_columns(record.select(_make_columns(name, low, end, onset, death, member)))


def _make_columns(
    name: str, low: pl.Expr, end: pl.Expr, onset: pl.Expr, death: pl.Expr, at_risk: pl.Expr
) -> list[pl.Expr]:
    """Time and event of those `at_risk` from the days: they are at risk behind `low` up to
    `end`.
    """
    dies, has_event = (death <= end).fill_null(value=False), (onset <= end).fill_null(value=False)
    time = (
        pl.when(has_event)
        .then(onset - low)
        .when(dies)
        .then(death - low)
        .otherwise(end - low + END_OF_DAY)
    )
    event = pl.when(has_event).then(1).when(dies).then(2).otherwise(0)
    return [
        pl.when(at_risk).then(time).cast(pl.Float32).alias(f"time_{name}"),
        pl.when(at_risk).then(event).cast(pl.Int8).alias(f"event_{name}"),
    ]
