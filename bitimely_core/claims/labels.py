"""Onsets and labels of subjects by the rules; under a landmark, index days and the labels at them
(sections 6 and 7 of the builder's reference).

`cohort` is a frame with one row per subject. `subject` in the rows of claims is the number of that
row. Labels are in the columns `y_<name>` (Int8: 1, 0, null) and `onset_<name>` (Int32 days, null:
none).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from bitimely_core.claims import dates, periods
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.label_rules import (
    SOURCES,
    LabelRule,
    Numbers,
    RuleClause,
    find_completion_days,
    match_rules,
)


@dataclass(frozen=True, kw_only=True)
class Landmark:
    """Index day: days after the subject's first valid row, or a calendar day. Labels cover
    `horizon_days` after a gap.
    """

    landmark_days: int | None = 1095
    day: int | None = None
    gap_days: int = 90
    horizon_days: int = 1095


def add_first_days(
    rows: pl.DataFrame, cohort: pl.DataFrame, name: str = "first_day"
) -> pl.DataFrame:
    """`cohort` with the day of the subject's first row, mapped or not, as column `name`; null
    without any.
    """
    first = rows.group_by("subject").agg(pl.col("day").min())
    column = pl.repeat(None, cohort.height, dtype=rows.schema["day"], eager=True)
    return cohort.with_columns(column.scatter(first["subject"], first["day"]).alias(name))


def add_onsets(
    rows: pl.DataFrame, codes: Sequence[IcdCode], rules: Sequence[LabelRule], cohort: pl.DataFrame
) -> pl.DataFrame:
    """`cohort` (with `birth_day`) with the onset and the label of every rule, in the order of
    `rules`, from all valid rows.

    `rows`: subject, day, code (index into `codes`), source. Without a known birth, a rule with an
    age limit gives null label and onset where it has an onset without the limit, else label 0.
    """
    unknown = cohort["birth_day"].is_null()
    for rule, *columns in iter_rule_rows(rows, codes, rules, cohort):
        onset = np.full(cohort.height, dates.LATEST + 1)
        for clause, subject, day in iter_clause_rows(rule, *columns):
            subjects, when = find_completion_days(subject, day, clause)
            onset[subjects] = np.minimum(onset[subjects], when)
        case = onset <= dates.LATEST
        doubtful = pl.Series(case) & unknown & (rule.min_age_years is not None)
        cohort = cohort.with_columns(
            pl.Series(f"y_{rule.name}", case, dtype=pl.Int8).set(doubtful, None),
            pl.Series(f"onset_{rule.name}", onset, dtype=pl.Int32).set(
                pl.Series(~case) | doubtful, None
            ),
        )
    return cohort


def iter_rule_rows(
    rows: pl.DataFrame, codes: Sequence[IcdCode], rules: Sequence[LabelRule], cohort: pl.DataFrame
) -> Iterator[tuple[LabelRule, Numbers, Numbers, Numbers]]:
    """Of each rule the subject, day and source of the rows with a code of it, at an age that it
    admits or that is not known.
    """
    marked, patterns = _select_marked_rows(rows, [match_rules(rules, code) for code in codes])
    subject, day, source, pattern = (
        marked[name].to_numpy() for name in ("subject", "day", "source", "pattern")
    )
    unknown = cohort["birth_day"].is_null().to_numpy()
    for number, rule in enumerate(rules):
        matching = np.array([number in marks for marks in patterns], bool)[pattern]
        if rule.min_age_years is not None:
            birthdays = find_birthdays(cohort["birth_day"], rule.min_age_years)
            matching &= unknown[subject] | (day >= birthdays[subject])
        yield rule, subject[matching], day[matching], source[matching]


def iter_clause_rows(
    rule: LabelRule, subject: Numbers, day: Numbers, source: Numbers
) -> Iterator[tuple[RuleClause, Numbers, Numbers]]:
    """Of each clause of a rule the subject and day of the rows from its sources."""
    for clause in rule.clauses:
        named = np.array([name in clause.sources for name in SOURCES])[source]
        yield clause, subject[named], day[named]


def find_birthdays(births: pl.Series, years: int) -> Numbers:
    """The days on which subjects complete `years` years, any day where the birth is not known."""
    distinct, place = np.unique(births.fill_null(0).to_numpy(), return_inverse=True)
    days = [dates.find_birthday(int(birth), years) for birth in distinct]
    return np.array(days, np.int64)[place]


def _select_marked_rows(
    rows: pl.DataFrame, marks: Sequence[tuple[int, ...]]
) -> tuple[pl.DataFrame, list[tuple[int, ...]]]:
    """The distinct subject, day, source, pattern of the rows with a marked code; `pattern` indexes
    the list of sets of marks.

    `marks`: of each code its marks, empty for most.
    """
    patterns = sorted(set(marks) - {()})
    index = {pattern: i for i, pattern in enumerate(patterns)}
    pattern_of_code = pl.Series(list(map(index.get, marks)), dtype=pl.Int32)
    marked = rows.select("subject", "day", "source", pattern=pattern_of_code.gather(rows["code"]))
    return marked.drop_nulls("pattern").unique(), patterns


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
    names = list(related)
    marks = [
        tuple(i for i, name in enumerate(names) if not related[name].isdisjoint(code.phecodes))
        for code in codes
    ]
    marked, patterns = _select_marked_rows(rows, marks)
    for i, name in enumerate(names):
        has_mark = pl.Series([i in pattern for pattern in patterns], dtype=pl.Boolean)
        bears = marked["subject"].filter(has_mark.gather(marked["pattern"]))
        control = pl.int_range(pl.len()).is_in(bears.cast(pl.Int64).implode()) & (
            pl.col(f"y_{name}") == 0
        )
        cohort = cohort.with_columns(pl.when(~control).then(f"y_{name}").alias(f"y_{name}"))
    return cohort


def apply_landmark(
    cohort: pl.DataFrame,
    names: Sequence[str],
    landmark: Landmark | None,
    data_end: int | None = None,
) -> pl.DataFrame:
    """`cohort` with `index_day` and the labels at it: the table of section 7. Without a landmark
    nothing changes.

    `cohort`: with first_day, obs_end, and y_ and onset_ of each of `names`; labels without onsets
    stay as they are. `data_end`: the last valid day of the data set, used where the end of
    observation is unknown.
    """
    if landmark is None:
        return cohort
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
