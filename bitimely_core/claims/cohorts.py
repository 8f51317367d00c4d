"""Cohorts: who is at risk of an outcome, from which day to which, and who is left out and why.

A cohort is a TOML file, as the shipped ones in `cohort_definitions/`: label rules (`[[rule]]`), an
index day and what it requires (`[index]`), an outcome by one of the rules (`[outcome]`), the time
at risk (`[risk]`), and matched controls (`[controls]`). docs/pophr.md compares the settings with
the population settings of PatientLevelPrediction. Days are integers on any clock; a limit in days
is inclusive.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitimely_core.claims import dates, event_labels, label_rules, periods
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.label_rules import LabelRule

SHIPPED = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "cohort_definitions").glob("*.toml"))
}
YEAR = 365.25  # days
SEXES = {"male": 1, "female": 2}
UNMATCHED = "unmatched"
RECORD_DAYS = (  # columns of a cohort record
    "index_day",
    "observation_start",
    "observation_end",
    "death_day",
    "risk_start",
    "risk_end",
    "risk_full",
    "outcome_day",
    "age_days",
)

Days = Annotated[int, Field(ge=0)]


class CohortPart(BaseModel):
    """A part of a definition; unknown fields are refused, since a misspelt `washout_days` must not
    widen a cohort silently.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CohortIndex(CohortPart):
    """The index day of a subject, and what is required of it.

    `at`: the start of observation; the first valid row; the first day on which `rule` is met
    (event); a calendar day (`date`).
    """

    at: Literal["observation_start", "first_row", "event", "date"] = "observation_start"
    rule: str | None = None
    date: Annotated[datetime.date | None, Field(strict=False)] = None
    after_days: Days = 0  # added to that day
    min_observation_days: Days = 0  # from the start of observation to the index day
    # leave out subjects without a known start of observation; else it is their first valid row
    require_start: bool = False
    min_age_years: Days | None = None  # completed years on the index day, as is the maximum
    max_age_years: Days | None = None
    sex: Literal["male", "female"] | None = None


class CohortOutcome(CohortPart):
    """The outcome: days on which `rule` is met.

    `first`: the first such day of a subject; `all`: each day that completes a set of claims which
    the rule requires. incident: an outcome in the time at risk; prevalent: one up to the index day.
    """

    rule: str
    kind: Literal["incident", "prevalent"] = "incident"
    events: Literal["first", "all"] = "first"
    washout_days: Days = 0  # from the start of observation, without any row with a code of the rule
    exclude_prior: bool = True  # leave out subjects with an outcome before the time at risk
    # an outcome so many days before the index day or earlier does not count; None: all do
    lookback_days: Days | None = None


class CohortRisk(CohortPart):
    """The time at risk, in days after the index day, cut at the end of observation or death."""

    from_day: Days = 1
    to_day: Days | None = None  # None: the end of observation
    min_days: Days | None = None  # from its first to its last day; None: all days up to `to_day`
    keep_outcomes: bool = False  # subjects with an outcome need no `min_days`
    keep_deaths: bool = False  # nor do those who die in it

    @property
    def least_days(self) -> int:
        """Days from the first to the last at risk that are required."""
        if self.min_days is not None:
            return self.min_days
        return 0 if self.to_day is None else self.to_day - self.from_day


class CohortControls(CohortPart):
    """Controls for each case, drawn without replacement among the subjects without outcome in the
    same split.
    """

    ratio: Annotated[int, Field(ge=1)]  # controls a case
    # greatest difference of the ages on the index days
    caliper_years: Annotated[float, Field(ge=0, strict=False)] = 1.0
    sex: bool = True  # the same
    seed: int = 0


class CohortRules(CohortPart):
    """The definition of a cohort."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    title: str = ""
    source: str = ""
    note: str = ""
    reference: str = ""
    rule: list[dict[str, Any]]  # as in a table of label rules
    index: CohortIndex = CohortIndex()
    outcome: CohortOutcome
    risk: CohortRisk | None = None  # of incident outcomes; None: the defaults
    controls: CohortControls | None = None

    @model_validator(mode="after")
    def _check_index(self) -> Self:
        names = [rule.name for rule in label_rules.parse_rules(self.rule)]
        for section, name in (("outcome", self.outcome.rule), ("index", self.index.rule)):
            if name is not None and name not in names:
                expected = ", ".join(sorted(names))
                raise ValueError(f"{section}.rule is one of {expected}, found {name!r}")
        for key, anchor in (("rule", "event"), ("date", "date")):
            if (getattr(self.index, key) is not None) != (self.index.at == anchor):
                raise ValueError(f"index.{key} is given exactly where index.at is {anchor!r}")
        return self

    @model_validator(mode="after")
    def _check_risk(self) -> Self:
        risk = self.risk
        if risk is not None and risk.to_day is not None and risk.to_day < risk.from_day:
            raise ValueError(
                f"risk.to_day is at least risk.from_day, found {risk.to_day} and {risk.from_day}"
            )
        if self.outcome.kind == "prevalent" and (risk or self.outcome.washout_days):
            raise ValueError("a prevalent outcome has neither [risk] nor washout_days")
        return self

    @property
    def time_at_risk(self) -> CohortRisk:
        """As given, or the defaults."""
        return self.risk or CohortRisk()

    @property
    def outcome_rule(self) -> LabelRule:
        """The rule of the outcome, whose name is that of the label."""
        rules = label_rules.parse_rules(self.rule)
        return next(rule for rule in rules if rule.name == self.outcome.rule)


def load_cohort(name: str | Path) -> CohortRules:
    """A shipped definition or that of a TOML file. Raises UserError: not_found or config (exit
    2).
    """
    return label_rules.read_definition(name, SHIPPED, "Check --cohort", CohortRules.model_validate)


def apply_cohort(
    rules: CohortRules,
    rows: pl.DataFrame,
    codes: Sequence[IcdCode],
    subjects: pl.DataFrame,
    data_end: int | None = None,
) -> pl.DataFrame:
    """The cohort record of every subject of a shard, before the matching of controls: see
    `select_subjects`.

    Args:
        rules: of the cohort.
        rows: all valid rows: subject (row of `subjects`), day, code (index into `codes`), source.
        codes: of the rows.
        subjects: subject_id, first_day, birth_day, obs_start, obs_end, death_day, sex, split.
        data_end: the last valid day of the data set, used where the end of observation is not
            known.
    """
    outcomes = pl.DataFrame(schema={"subject": pl.Int64, "day": pl.Int64})
    wanted = [
        rule
        for rule in label_rules.parse_rules(rules.rule)
        if rule.name in {rules.outcome.rule, rules.index.rule}
    ]
    for rule in wanted:
        marked = event_labels.select_rule_rows(rows, codes, rule, subjects["birth_day"])
        met = event_labels.find_met_days(rule, marked)
        first = event_labels.find_first_days(met, subjects.height)
        if rule.name == rules.index.rule:
            subjects = subjects.with_columns(event_day=first)
        if rule.name == rules.outcome.rule:
            outcomes = met
            doubtful = pl.col("birth_day").is_null() & first.is_not_null()
            subjects = subjects.with_columns(
                diagnosis_day=event_labels.find_first_days(marked, subjects.height),
                doubtful=doubtful & (rule.min_age_years is not None),
            )
    return select_subjects(rules, subjects, outcomes, data_end)


def select_subjects(
    rules: CohortRules, subjects: pl.DataFrame, outcomes: pl.DataFrame, data_end: int | None = None
) -> pl.DataFrame:
    """The cohort record: who belongs to a cohort, and from which day to which everybody is observed
    and at risk.

    Args:
        rules: of the cohort.
        subjects: subject_id, first_day (of the first valid row), birth_day, obs_start, obs_end,
            death_day, sex, split; optional event_day (first day on which `index.rule` is met),
            diagnosis_day (first row with a code of the outcome's rule) and doubtful (the rule is
            met, but has an age limit, and the age is not known). Unknown days are null.
        outcomes: subject (row of `subjects`) and day: every day that completes the outcome's rule.
        data_end: end of observation where obs_end is null.

    Returns:
        One row per row of `subjects`, in their order. subject_id, sex, split, and in Int64, null
        where there is none: `index_day`; `observation_start` (obs_start, else the first valid row);
        `observation_end` (obs_end or `data_end`, or the death before it); `death_day`; `risk_start`
        and `risk_end`, the first and last day at risk, both included, the last at most
        `observation_end`; `risk_full`, the last day if nothing cuts it short; `outcome_day`, the
        first outcome in the time at risk (prevalent: the last one up to the index day); `age_days`
        on the index day. `left_out`: null for the members of the cohort, for others the first
        reason of `list_reasons` that holds; then all days are what they would be. An event of
        survival analysis is `outcome_day`; else death is at `death_day` if that is at most
        `risk_end`; else the subject is censored after `risk_end`.
    """
    index, risk = rules.index, rules.time_at_risk
    optional = {"event_day": pl.Int64, "diagnosis_day": pl.Int64, "doubtful": pl.Boolean}
    frame = subjects.with_columns(
        pl.lit(None, kind).alias(name)
        for name, kind in optional.items()
        if name not in subjects.columns
    ).with_columns(
        pl.col("first_day", "birth_day", "obs_start", "obs_end", "death_day").cast(pl.Int64)
    )
    start = pl.col("obs_start") if index.require_start else pl.coalesce("obs_start", "first_day")
    anchor = {
        "observation_start": start,
        "first_row": pl.col("first_day"),
        "event": pl.col("event_day"),
        "date": pl.lit(index.date and dates.to_day(index.date), pl.Int64),
    }[index.at]
    day = pl.col("index_day")
    frame = periods.place_periods(frame.with_columns(index_day=anchor + index.after_days))
    end = pl.min_horizontal(pl.col("obs_end").fill_null(pl.lit(data_end, pl.Int64)), "death_day")
    frame = frame.with_columns(
        observation_start=start, observation_end=end, age_days=day - pl.col("birth_day")
    )
    first = full = last = pl.lit(None, pl.Int64)
    if rules.outcome.kind == "incident":
        first = day + risk.from_day
        full = pl.col("observation_end") if risk.to_day is None else day + risk.to_day
        last = pl.min_horizontal(full, "observation_end")
    frame = frame.with_columns(risk_start=first, risk_full=full, risk_end=last)
    frame = _add_outcomes(rules, frame, outcomes)
    left_out = pl.coalesce(
        pl.when(test.fill_null(value=False)).then(pl.lit(reason))
        for reason, test in _list_tests(rules, frame).items()
    )
    return frame.select("subject_id", "sex", "split", *RECORD_DAYS, left_out=left_out)


def _add_outcomes(rules: CohortRules, frame: pl.DataFrame, outcomes: pl.DataFrame) -> pl.DataFrame:
    """`frame` with outcome_day and prior (an outcome before the time at risk that counts)."""
    if rules.outcome.events == "first":
        outcomes = outcomes.group_by("subject").agg(pl.col("day").min())
    frame = frame.with_columns(subject=pl.int_range(pl.len(), dtype=pl.Int64))
    spans = outcomes.select(pl.all().cast(pl.Int64)).join(frame, on="subject")
    day, lookback = pl.col("day"), rules.outcome.lookback_days
    recent = pl.lit(value=True) if lookback is None else day > pl.col("index_day") - lookback
    if rules.outcome.kind == "prevalent":
        counted, outcome_day = spans.filter(recent & (day <= pl.col("index_day"))), day.max()
        prior = spans.clear()
    else:
        counted, outcome_day = spans.filter(day.is_between("risk_start", "risk_end")), day.min()
        prior = spans.filter(recent & (day < pl.col("risk_start")))
    days = counted.group_by("subject").agg(outcome_day=outcome_day)
    frame = frame.join(days, on="subject", how="left", maintain_order="left")
    return frame.with_columns(prior=pl.col("subject").is_in(prior["subject"].implode()))


def _list_tests(rules: CohortRules, frame: pl.DataFrame) -> dict[str, pl.Expr]:
    """Reason to leave a subject out -> test of `frame`, in order; without those that the definition
    does not ask for.
    """
    tests = _list_index_tests(rules.index, frame)
    if rules.outcome_rule.min_age_years is not None:
        tests["unknown age"] = pl.col("doubtful")
    if rules.outcome.kind == "incident":
        tests |= _list_risk_tests(rules.outcome, rules.time_at_risk)
    return tests


def _list_index_tests(index: CohortIndex, frame: pl.DataFrame) -> dict[str, pl.Expr]:
    """Tests of what is required of the index day."""
    day, start, end = pl.col("index_day"), pl.col("observation_start"), pl.col("observation_end")
    tests = {
        "no index day": day.is_null() | start.is_null(),
        "outside the observation": ~day.is_between(start, end),
    }
    least, most = index.min_age_years, index.max_age_years
    if least is not None or most is not None:
        outside = day < pl.Series(event_labels.find_birthdays(frame["birth_day"], least or 0))
        if most is not None:
            outside |= day >= pl.Series(event_labels.find_birthdays(frame["birth_day"], most + 1))
        tests["age"] = pl.col("birth_day").is_null() | outside
    if index.sex is not None:
        tests["sex"] = pl.col("sex").fill_null(0) != SEXES[index.sex]
    if index.min_observation_days:
        tests["short observation"] = day - start < index.min_observation_days
    return tests


def _list_risk_tests(outcome: CohortOutcome, risk: CohortRisk) -> dict[str, pl.Expr]:
    """Tests of what is required of the time at risk of an incident outcome."""
    tests, first, last = {}, pl.col("risk_start"), pl.col("risk_end")
    if outcome.washout_days:
        washed_out = pl.col("observation_start") + outcome.washout_days
        tests["diagnosis in the washout"] = pl.col("diagnosis_day") < washed_out
    if outcome.exclude_prior:
        tests["prior outcome"] = pl.col("prior")
    tests["no time at risk"] = last < first
    if risk.least_days:
        short = last < first + risk.least_days
        if risk.keep_outcomes:
            short &= pl.col("outcome_day").is_null()
        if risk.keep_deaths:
            short &= (pl.col("death_day") > last).fill_null(value=True)
        tests["short follow-up"] = short
    return tests


def list_reasons(rules: CohortRules) -> list[str]:
    """The reasons for which subjects may be left out, in the order in which they are tested."""
    births = pl.DataFrame(schema={"birth_day": pl.Int64})
    return [*_list_tests(rules, births), *([UNMATCHED] if rules.controls else [])]


def describe_reasons(rules: CohortRules) -> dict[str, str]:
    """Reason to leave a subject out -> what was required, for readers."""
    index, outcome, risk = rules.index, rules.outcome, rules.time_at_risk
    anchor = {
        "observation_start": "the start of observation",
        "first_row": "the first claim",
        "event": f"the first day of {index.rule}",
        "date": str(index.date),
    }[index.at]
    delay = f"{index.after_days} days after " if index.after_days else ""
    low, high = index.min_age_years or 0, index.max_age_years
    age = f"younger than {low} years on the index day, or of unknown age"
    if high is not None:
        age = f"not {low} to {high} years old on the index day"
    days = outcome.lookback_days
    since = "ever" if days is None else f"in the {days} days up to it"
    end = "the end of observation" if risk.to_day is None else f"day {risk.to_day}"
    follow_up = f"followed for fewer than {risk.least_days} days after the first at risk"
    if ends := ["the outcome"] * risk.keep_outcomes + ["death"] * risk.keep_deaths:
        follow_up += f", without {' or '.join(ends)}"
    ratio = rules.controls.ratio if rules.controls else 0
    return {
        "no index day": f"no index day ({delay}{anchor})",
        "outside the observation": "not observed on the index day",
        "age": age,
        "sex": f"not {index.sex}",
        "short observation": f"observed for fewer than {index.min_observation_days} days before "
        "the index day",
        "unknown age": f"of unknown age, with claims of {outcome.rule}",
        "diagnosis in the washout": f"a claim with a code of {outcome.rule} in the first "
        f"{outcome.washout_days} days of observation (prevalent)",
        "prior outcome": f"{outcome.rule} before the time at risk, {since}",
        "no time at risk": f"no day at risk (day {risk.from_day} to {end} after the index day)",
        "short follow-up": follow_up,
        UNMATCHED: f"not matched ({ratio} controls a case)",
    }


def match_controls(rules: CohortRules, record: pl.DataFrame) -> pl.DataFrame:
    """The cohort record (of all subjects, `select_subjects`) after the matching: controls that are
    not drawn, cases without any control, and members without age or, where it counts, sex are left
    out as unmatched; `case` is the subject_id of the case to which a member belongs.

    Cases choose in the order of subject_id, each the first of a seeded order of the controls that
    are free and within the caliper. The result does not depend on the order of the rows.
    """
    rule = rules.controls
    if rule is None:
        return record
    record = record.with_row_index("row").sort("subject_id")
    rank = np.random.default_rng(rule.seed).permutation(record.height)
    age, case = record["age_days"].fill_null(0).to_numpy(), np.full(record.height, -1)
    usable = pl.col("left_out").is_null() & pl.col("age_days").is_not_null()
    strata = ["split"]
    if rule.sex:
        strata.append("sex")
        usable &= pl.col("sex") > 0
    members = record.with_columns(place=pl.int_range(pl.len())).filter(usable)
    for _, stratum in members.group_by(strata, maintain_order=True):
        cases = stratum.filter(pl.col("outcome_day").is_not_null())["place"].to_numpy()
        others = stratum.filter(pl.col("outcome_day").is_null())
        controls = others.sort("age_days", maintain_order=True)["place"].to_numpy()
        reach = rule.caliper_years * YEAR
        low = np.searchsorted(age[controls], age[cases] - reach, "left")
        high = np.searchsorted(age[controls], age[cases] + reach, "right")
        for place, first, last in zip(cases, low, high, strict=True):
            free = controls[first:last][case[controls[first:last]] < 0]
            drawn = free[np.argsort(rank[free])[: rule.ratio]]
            if len(drawn):
                case[drawn] = case[place] = place
    missed = pl.col("left_out").is_null() & pl.Series(case < 0)
    record = record.with_columns(
        case=record["subject_id"].gather(pl.Series(case).replace(-1, None)),
        left_out=pl.when(missed).then(pl.lit(UNMATCHED)).otherwise("left_out"),
    )
    return record.sort("row").drop("row")
