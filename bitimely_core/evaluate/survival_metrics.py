"""Scores of predicted times to event: incidence under censoring and competing risks, and metrics of
predicted risks with the influence of every unit on them.

Times are in days from the start of the time at risk. Events are 0 (censored), 1 (the event), 2
(death before it, a competing risk). On one day events come before censorings. Definitions and
sources are in docs/survival.md.

Legend: n rows, U units, C columns (a label at a horizon), H horizons of a label, 2: time and event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bitimely_core.evaluate.intervals import LEVEL, bound_share
from bitimely_core.evaluate.metrics import (
    ESTIMATORS,
    METRICS,
    Array,
    Estimate,
    Estimates,
    ScoredRows,
    UnitWeights,
    weigh_units,
)
from bitimely_core.methods.hazards import select_known
from bitimely_core.schemas.scores import RiskGroup, RiskGroups, RiskPoint
from bitimely_core.types import group_columns, parse_horizon

DECILES = 10
HIGHEST_POWER = 700.0  # of e
BLOCK = 256  # events at a time against all rows
# names of groups by their number: equal risks may leave fewer than three
GROUP_NAMES = ((), ("all",), ("lower", "higher"), ("lowest", "middle", "highest"))


class StepCurve(NamedTuple):
    """A function of time that is constant between its times [m], where it takes its values [m]."""

    times: Array
    values: Array
    start: float  # before the first

    def evaluate(self, time: Array | float) -> Array:
        """The values at `time`."""
        return np.append(self.start, self.values)[np.searchsorted(self.times, time, "right")]


class RiskTable(NamedTuple):
    """Distinct times [m] with the rows at risk on each, and those with the event, with the
    competing one, and censored.
    """

    times: Array
    risk: Array
    events: Array
    deaths: Array
    censored: Array

    @property
    def before(self) -> Array:
        """Probability [m] to be without any event before each time."""
        return np.append(1.0, np.cumprod(1 - (self.events + self.deaths) / self.risk))[:-1]


def count_at_risk(time: Array, event: Array) -> RiskTable:
    """The table of `time` [n] and `event` [n]."""
    times, place = np.unique(time, return_inverse=True)
    censored, events, deaths = (np.bincount(place, event == code, len(times)) for code in (0, 1, 2))
    leaving = censored + events + deaths
    return RiskTable(times, len(time) - np.cumsum(leaving) + leaving, events, deaths, censored)


def estimate_censoring(time: Array, event: Array) -> StepCurve:
    """Kaplan and Meier's probability to be uncensored.

    Whoever has an event on a day is not at risk to be censored on it.
    """
    table = count_at_risk(time, event)
    risk = table.risk - table.events - table.deaths
    return StepCurve(table.times, np.cumprod(1 - table.censored / np.maximum(risk, 1)), 1.0)


def estimate_incidence(time: Array, event: Array) -> StepCurve:
    """Aalen and Johansen's cumulative incidence of the event.

    Without competing events it is one less Kaplan and Meier's survival.
    """
    table = count_at_risk(time, event)
    return StepCurve(table.times, np.cumsum(table.before * table.events / table.risk), 0.0)


def find_incidence_interval(time: Array, event: Array, day: float) -> tuple[float, float, float]:
    """Cumulative incidence of the event on `day`, and the two bounds of its interval.

    The variance is that of the delta method, the interval is symmetric on the scale of log(-log).
    Where nobody or everybody has the event, it is that of a share of those whose state is known.
    """
    from scipy.special import ndtri

    table, path = count_at_risk(time, event), estimate_incidence(time, event).values
    past = table.times <= day
    value = float(path[past][-1]) if past.any() else 0.0
    gap, s, n, d1 = value - path[past], table.before[past], table.risk[past], table.events[past]
    d = d1 + table.deaths[past]
    of_both = gap**2 * d / (n * np.maximum(n - d, 1))
    of_event = s**2 * d1 * (n - d1) / n**3
    variance = (of_both + of_event - 2 * gap * s * d1 / n**2).sum()
    if value >= 1 or variance <= 0:  # the variance is 0 where nobody has the event
        observed = max(float(((time > day) | (event > 0)).sum()), 1.0)
        return value, *bound_share(min(max(value, 0.0), 1.0), observed)
    reach = float(ndtri((1 + LEVEL) / 2)) * float(np.sqrt(variance)) / (value * np.log(value))
    # of a tiny incidence one of the bounds of the logarithm is beyond all numbers
    lo, hi = (float(value ** np.exp(min(power, HIGHEST_POWER))) for power in (-reach, reach))
    return value, lo, hi


def weigh_uncensored(time: Array, event: Array, horizon: float) -> Array:
    """Weights [n] by the inverse probability to be uncensored.

    Rows whose state on the day `horizon` is not known have the weight 0.
    """
    uncensored = estimate_censoring(time, event)
    chance = np.where(time <= horizon, uncensored.evaluate(time), uncensored.evaluate(horizon))
    counts = ((time > horizon) | (event != 0)) & (chance > 0)
    return np.divide(1.0, chance, out=np.zeros(len(time)), where=counts)


def estimate_concordance(
    time: Array, event: Array, risk: Array, units: Array, n_units: int
) -> Estimate:
    """Harrell's C, NaN without a pair that can be compared.

    Pairs are those of which one has the event while the other is still without; C is the share in
    which the first has the higher risk. Equal risks count one half. Whoever dies first remains
    without the event (Wolbers et al. 2009).
    """
    until, case = np.where(event == 2, np.inf, time), np.flatnonzero(event == 1)
    agreed, pairs = np.zeros(len(time)), np.zeros(len(time))
    for start in range(0, len(case), BLOCK):
        i = case[start : start + BLOCK, None]
        comparable = (until > time[i]) | ((until == time[i]) & (event == 0))
        score = comparable * ((risk[i] > risk) + 0.5 * (risk[i] == risk))
        agreed += score.sum(0)
        pairs += comparable.sum(0)
        np.add.at(agreed, i[:, 0], score.sum(1))
        np.add.at(pairs, i[:, 0], comparable.sum(1))
    total = pairs.sum() / 2
    value = float(agreed.sum() / 2 / total) if total else float("nan")
    influence = (agreed - value * pairs) / max(total, 1)
    sides = (event == 1).astype(float), np.ones(len(time))
    return _make_estimate(value, influence, units, n_units, *sides)


def estimate_horizon(
    time: Array, event: Array, risk: Array, horizon: float, units: Array, n_units: int
) -> tuple[Estimate, Estimate]:
    """AUROC and Brier score at the day `horizon`, weighted against censoring.

    AUROC compares those with the event by that day with those without. The influences take the
    distribution of the censoring as known. Both are NaN where the last people under observation are
    censored by then: nobody shows what becomes of those without the event, and the weights would
    leave them out.
    """
    equal = np.ones(len(time))
    zeros = np.zeros(len(time))
    if estimate_censoring(time, event).evaluate(horizon) == 0:
        undefined = _make_estimate(float("nan"), zeros, units, n_units, equal)
        return undefined, undefined
    weight = weigh_uncensored(time, event, horizon)
    case = (event == 1) & (time <= horizon)
    w, v = weight * case, weight * ~case
    errors = weight * (case - risk) ** 2
    mean = errors.mean()
    brier = _make_estimate(float(mean), (errors - mean) / len(errors), units, n_units, equal)
    if not w.sum() or not v.sum():
        return _make_estimate(float("nan"), zeros, units, n_units, w, v), brier
    values, place = np.unique(risk, return_inverse=True)
    cases, controls = (np.bincount(place, side, len(values)) for side in (w, v))
    below = (np.cumsum(controls) - controls / 2) / v.sum()
    above = (cases.sum() - np.cumsum(cases) + cases / 2) / w.sum()
    value = float((cases * below).sum() / w.sum())
    influence = w * (below[place] - value) / w.sum() + v * (above[place] - value) / v.sum()
    return _make_estimate(value, influence, units, n_units, w, v), brier


def _make_estimate(
    value: float, influence: Array, units: Array, n_units: int, *sides: Array
) -> Estimate:
    """An estimate from influences of rows; the leverage of a unit is the largest of its shares in
    `sides` [n].
    """
    shares = [np.bincount(units, side, n_units) / max(side.sum(), 1e-300) for side in sides]
    weights = weigh_units(np.max(shares, axis=0), len(units), float(len(sides) - 1))
    return Estimate(value, np.bincount(units, np.nan_to_num(influence), n_units), weights)


def _estimate_columns(rows: ScoredRows, prediction: Array, decisions: Array | None) -> Estimates:
    """All metrics of every column, and their means; that of C is over the longest horizons."""
    columns = [_estimate_column(rows, prediction, k) for k in range(len(rows.names))]
    each = {metric: [column[metric] for column in columns] for metric in METRICS["survival"]}
    means = {metric: _average(estimates) for metric, estimates in each.items()}
    last = [group.columns[-1] for group in group_columns(rows.names).values()]
    return Estimates({**means, "c_index": _average([each["c_index"][k] for k in last])}, each)


def _estimate_column(rows: ScoredRows, prediction: Array, k: int) -> dict[str, Estimate]:
    """The C of a label by the risk at the horizon of column k, AUROC and Brier score there."""
    observed = select_known(rows.target[:, k])
    if not observed.any():
        weights = weigh_units(np.ones(rows.n_units) / rows.n_units, 0)
        undefined = Estimate(float("nan"), np.zeros(rows.n_units), weights)
        return dict.fromkeys(METRICS["survival"], undefined)
    time, event = rows.target[observed, k].T
    risk, units = prediction[observed, k], rows.units[observed]
    day = parse_horizon(rows.names[k])[1]
    auroc, brier = estimate_horizon(time, event, risk, day, units, rows.n_units)
    concordance = estimate_concordance(time, event, risk, units, rows.n_units)
    return {"c_index": concordance, "auroc": auroc, "brier": brier}


def _average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over the columns in which a metric is defined."""
    defined = [estimate for estimate in estimates if np.isfinite(estimate.value)] or estimates
    values, influences, weights = zip(*defined, strict=True)
    leverage = np.mean([weight.leverage for weight in weights], axis=0)
    df = float(np.mean([weight.df for weight in weights]))
    mean = UnitWeights(leverage, df, max(weight.rows for weight in weights))
    return Estimate(float(np.mean(values)), np.mean(influences, axis=0), mean)


def describe_groups(
    target: Array, prediction: Array, names: Sequence[str], points: int
) -> dict[str, RiskGroups]:
    """Label -> thirds of the rows by the risk at its longest horizon, with the observed incidence.

    Thirds have it on so many days and at the horizons; tenths, for the calibration, at the
    horizons. Rows of equal risk are in one group. `target` [n, C, 2], `prediction` [n, C].
    """
    groups = {}
    for label, (columns, days) in group_columns(names).items():
        observed = select_known(target[:, columns[-1]])
        times = target[observed, columns[-1]].astype(np.float64)
        groups[label] = _describe_label(times, prediction[observed][:, columns], days, points)
    return groups


def _describe_label(times: Array, risk: Array, days: list[float], points: int) -> RiskGroups:
    """The groups of one label by times and events [n, 2] and risks [n, H] at its horizons."""
    third, tenth = (_cut_risk(risk[:, -1], parts) for parts in (3, DECILES))
    curve = np.unique([*np.linspace(0, days[-1], points + 1)[1:].round(), *days]).tolist()
    present = np.unique(third).tolist()
    groups = [
        _describe_group(name, times[third == number], risk[third == number], curve)
        for name, number in zip(GROUP_NAMES[len(present)], present, strict=True)
    ]
    deciles = [
        _describe_group(f"{number + 1}", times[tenth == number], risk[tenth == number], days)
        for number in np.unique(tenth)
    ]
    return RiskGroups(horizons=days, groups=groups, deciles=deciles)


def _cut_risk(risk: Array, parts: int) -> Array:
    """The number [n] of the group of each row, from 0, by parts of equal size; rows of equal risk
    are in one.
    """
    edges = np.unique(np.quantile(risk, np.arange(1, parts) / parts)) if len(risk) else np.zeros(0)
    return np.searchsorted(edges, risk, "left")


def _describe_group(name: str, times: Array, risk: Array, days: Sequence[float]) -> RiskGroup:
    """One group by times and events [n, 2] and risks [n, H], with the incidence on `days`."""
    time, event = times.T
    points = []
    for day in days:
        value, lo, hi = find_incidence_interval(time, event, day)
        at_risk, events = (time > day).sum(), ((event == 1) & (time <= day)).sum()
        points.append(
            RiskPoint(day=day, at_risk=at_risk, events=events, incidence=value, lo=lo, hi=hi)
        )
    return RiskGroup(name=name, n=len(times), predicted=risk.mean(0).tolist(), points=points)


ESTIMATORS["survival"] = _estimate_columns
