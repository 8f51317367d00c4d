"""Onsets and labels of subjects by the rules; under a landmark, index days and the labels at them
(sections 6 and 7 of the builder's reference).

`cohort` is a frame with one row per subject. `subject` in the rows of claims is the number of that
row. Labels are in the columns `y_<name>` (Int8: 1, 0, null) and `onset_<name>` (Int32 days, null:
none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from bitimely_core.claims import dates, periods
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.label_rules import SOURCES, LabelRule, Numbers, find_completed_sets


@dataclass(frozen=True, kw_only=True)
class Landmark:
    """Index day: days after the subject's first valid row, or a calendar day. Labels cover
    `horizon_days` after a gap.
    """

    landmark_days: int | None = 1095
    day: int | None = None
    gap_days: int = 90
    horizon_days: int = 1095


def find_first_days(rows: pl.DataFrame, subjects: int) -> pl.Series:
    """The day of the first row of each of so many subjects, null without any."""
    first = rows.group_by("subject").agg(pl.col("day").min())
    days = pl.repeat(None, subjects, dtype=rows.schema["day"], eager=True)
    return days.scatter(first["subject"], first["day"])


def add_onsets(
    rows: pl.DataFrame, codes: Sequence[IcdCode], rules: Sequence[LabelRule], cohort: pl.DataFrame
) -> pl.DataFrame:
    """`cohort` (with `birth_day`) with the onset and the label of every rule, in the order of
    `rules`, from all valid rows.

    `rows`: subject, day, code (index into `codes`), source. Without a known birth, a rule with an
    age limit gives null label and onset where it has an onset without the limit, else label 0.
    """
    unknown = cohort["birth_day"].is_null()
    for rule in rules:
        marked = select_rule_rows(rows, codes, rule, cohort["birth_day"])
        onset = find_first_days(find_met_days(rule, marked), cohort.height)
        case = onset.is_not_null()
        doubtful = case & unknown & (rule.min_age_years is not None)
        cohort = cohort.with_columns(
            case.cast(pl.Int8).set(doubtful, None).alias(f"y_{rule.name}"),
            onset.cast(pl.Int32).set(doubtful, None).alias(f"onset_{rule.name}"),
        )
    return cohort


def select_rule_rows(
    rows: pl.DataFrame, codes: Sequence[IcdCode], rule: LabelRule, births: pl.Series
) -> pl.DataFrame:
    """The distinct subject, day and source of the rows with a code of a rule, at an age that it
    admits or that is not known.
    """
    is_marked = pl.Series(list(map(rule.matches, codes)), dtype=pl.Boolean)
    marked = rows.filter(is_marked.gather(rows["code"])).select("subject", "day", "source").unique()
    if rule.min_age_years is None:
        return marked
    birthdays = pl.Series(find_birthdays(births, rule.min_age_years))
    subject = marked["subject"]
    is_old = marked["day"] >= birthdays.gather(subject)
    return marked.filter(births.is_null().gather(subject) | is_old)


def find_met_days(rule: LabelRule, marked: pl.DataFrame) -> pl.DataFrame:
    """Subject and day (Int64) of all sets of rows that fulfil a clause of a rule, of those that
    `select_rule_rows` gives.
    """
    parts = []
    for clause in rule.clauses:
        sources = list(map(SOURCES.index, clause.sources))
        rows = marked.filter(pl.col("source").is_in(sources))
        days = find_completed_sets(rows["subject"].to_numpy(), rows["day"].to_numpy(), clause)
        parts.append(pl.DataFrame(days, schema={"subject": pl.Int64, "day": pl.Int64}))
    return pl.concat(parts).unique()


def find_birthdays(births: pl.Series, years: int) -> Numbers:
    """The days on which subjects complete `years` years, any day where the birth is not known."""
    distinct, place = np.unique(births.fill_null(0).to_numpy(), return_inverse=True)
    days = [dates.find_birthday(int(birth), years) for birth in distinct]
    return np.array(days, np.int64)[place]


def exclude_controls(
    rows: pl.DataFrame,
    codes: Sequence[IcdCode],
    related: Mapping[str, frozenset[str]],
    cohort: pl.DataFrame,
) -> pl.DataFrame:
    """`cohort` with label null instead of 0 for non-cases with a PheCode related to the label.

    `rows`: subject, day, code (index into `codes`), source. `related`: label -> PheCodes that
    exclude controls (`phecode_maps.related_phecodes`).
    """
    for name, phecodes in related.items():
        has_mark = [not phecodes.isdisjoint(code.phecodes) for code in codes]
        is_marked = pl.Series(has_mark, dtype=pl.Boolean).gather(rows["code"])
        bears = rows["subject"].filter(is_marked).unique()
        control = pl.int_range(pl.len()).is_in(bears.cast(pl.Int64).implode()) & (
            pl.col(f"y_{name}") == 0
        )
        cohort = cohort.with_columns(pl.when(~control).then(f"y_{name}").alias(f"y_{name}"))
    return cohort


def apply_landmark(
    cohort: pl.DataFrame, names: Sequence[str], landmark: Landmark, data_end: int | None = None
) -> pl.DataFrame:
    """`cohort` with `index_day` and the labels at it: the table of section 7.

    `cohort`: with first_day, obs_end, and y_ and onset_ of each of `names`; labels without onsets
    stay as they are. `data_end`: the last valid day of the data set, used where the end of
    observation is unknown.
    """
    seen = pl.col("first_day").is_not_null()
    index = (
        pl.lit(landmark.day)
        if landmark.day is not None
        else pl.col("first_day").cast(pl.Int64) + landmark.landmark_days
    )
    cohort = cohort.with_columns(index_day=pl.when(seen).then(index).cast(pl.Int64))
    cohort = periods.place_periods(cohort)
    low = pl.col("index_day") + landmark.gap_days
    high = low + landmark.horizon_days
    followed = pl.col("obs_end").fill_null(pl.lit(data_end, pl.Int32)) >= high
    return cohort.with_columns(
        pl.when(pl.col(f"y_{name}").is_null() | ~seen | (pl.col(f"onset_{name}") <= low))
        .then(None)
        .when(pl.col(f"onset_{name}") <= high)
        .then(1)
        .when(followed)
        .then(0)
        .cast(pl.Int8)
        .alias(f"y_{name}")
        for name in names
    )


def to_long_labels(cohort: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """The labels in the form of the cache: subject_id, name, value Int8, onset_day Int32, one row
    per subject and label.
    """
    schema = {"subject_id": pl.Int64, "name": pl.String, "value": pl.Int8, "onset_day": pl.Int32}
    parts = [
        cohort.select("subject_id", name=pl.lit(name), value=f"y_{name}", onset_day=f"onset_{name}")
        for name in names
    ]
    return pl.concat([pl.DataFrame(schema=schema), *parts]).sort("subject_id", "name")
