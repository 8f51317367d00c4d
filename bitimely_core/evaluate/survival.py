"""Time to event: incidence under censoring and competing risks, and metrics of predicted risks with
the influence of every unit on them.

Times are in days from the start of the time at risk; events are 0 (censored), 1 (the event), 2
(death before it, a competing risk). On one day events come before censorings. Definitions and
sources: docs/survival.md. Legend: n rows, U units, C columns (a label at a horizon), 2: time and
event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bitimely_core.evaluate.intervals import LEVEL, bound_share
from bitimely_core.evaluate.metrics import (
    ESTIMATORS,
    Array,
    Estimate,
    Estimates,
    ScoredRows,
    UnitWeights,
    weigh_units,
)
from bitimely_core.schemas.scores import RiskGroup, RiskGroups, RiskPoint
from bitimely_core.types import parse_horizon

DECILES = 10
BLOCK = 256  # events at a time against all rows


class StepCurve(NamedTuple):
    """A function of time that is constant between its times [m], at which it takes its values
    [m].
    """

    times: Array
    values: Array
    start: float  # before the first

    def at(self, time: Array | float) -> Array:
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


def count_at_risk(time: Array, event: Array) -> RiskTable:
    """The table of `time` [n] and `event` [n]."""
    times, place = np.unique(time, return_inverse=True)
    censored, events, deaths = (np.bincount(place, event == code, len(times)) for code in (0, 1, 2))
    left = np.cumsum(censored + events + deaths)
    return RiskTable(times, len(time) - left + censored + events + deaths, events, deaths, censored)


def estimate_censoring(time: Array, event: Array) -> StepCurve:
    """Kaplan and Meier's probability to be uncensored: whoever has an event on a day is not at risk
    to be censored on it.
    """
    of = count_at_risk(time, event)
    risk = of.risk - of.events - of.deaths
    return StepCurve(of.times, np.cumprod(1 - of.censored / np.maximum(risk, 1)), 1.0)


def estimate_incidence(time: Array, event: Array, cause: int = 1) -> StepCurve:
    """Aalen and Johansen's cumulative incidence of a cause; without competing events one less
    Kaplan and Meier's survival.
    """
    of = count_at_risk(time, event)
    before = np.append(1.0, np.cumprod(1 - (of.events + of.deaths) / of.risk))[:-1]
    return StepCurve(
        of.times, np.cumsum(before * (of.events if cause == 1 else of.deaths) / of.risk), 0.0
    )


def find_incidence_interval(time: Array, event: Array, day: float) -> tuple[float, float, float]:
    """Cumulative incidence of the event on `day` with its interval: variance by the delta method,
    on the scale of log(-log).
    """
    from scipy.special import ndtri

    of = count_at_risk(time, event)
    any_event = of.events + of.deaths
    before = np.append(1.0, np.cumprod(1 - any_event / of.risk))[:-1]
    path = np.cumsum(before * of.events / of.risk)
    kept = of.times <= day
    value = float(path[kept][-1]) if kept.any() else 0.0
    gap, s, n, d, d1 = (
        value - path[kept],
        before[kept],
        of.risk[kept],
        any_event[kept],
        of.events[kept],
    )
    variance = (
        gap**2 * d / (n * np.maximum(n - d, 1))
        + s**2 * d1 * (n - d1) / n**3
        - 2 * gap * s * d1 / n**2
    ).sum()
    # nobody, or all: as a share of those whose state is known
    if not 0 < value < 1 or variance <= 0:
        return value, *bound_share(
            min(max(value, 0.0), 1.0), max(float(((time > day) | (event > 0)).sum()), 1.0)
        )
    reach = float(ndtri((1 + LEVEL) / 2)) * float(np.sqrt(variance)) / (value * np.log(value))
    return value, float(value ** np.exp(-reach)), float(value ** np.exp(reach))


def weigh_uncensored(time: Array, event: Array, horizon: float) -> Array:
    """Weights [n] by the inverse probability to be uncensored, of the rows whose state on the day
    `horizon` is known; 0 for others.
    """
    free = estimate_censoring(time, event)
    chance = np.where(time <= horizon, free.at(time), free.at(horizon))
    known = (time > horizon) | (event != 0)
    return np.divide(1.0, chance, out=np.zeros(len(time)), where=known & (chance > 0))


def estimate_concordance(
    time: Array, event: Array, risk: Array, units: Array, n_units: int
) -> Estimate:
    """Harrell's C: of the pairs of which one has the event while the other is still without, the
    share in which it has the higher risk.

    Whoever dies first remains without the event (Wolbers et al. 2009). Equal risks count one half;
    NaN without such pairs.
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
    return _make_estimate(
        value, influence, units, n_units, (event == 1).astype(float), np.ones(len(time))
    )


def estimate_horizon(
    time: Array, event: Array, risk: Array, horizon: float, units: Array, n_units: int
) -> tuple[Estimate, Estimate]:
    """AUROC (cumulative cases against those without the event by the day `horizon`) and Brier score
    there, weighted against censoring.

    The influences take the distribution of the censoring as known. Both are NaN where the last
    people under observation are censored by then: nobody shows what becomes of those without the
    event, and the weights would leave them out.
    """
    if estimate_censoring(time, event).at(horizon) == 0:
        nothing = _make_estimate(
            float("nan"), np.zeros(len(time)), units, n_units, np.ones(len(time))
        )
        return nothing, nothing
    weight = weigh_uncensored(time, event, horizon)
    case = (event == 1) & (time <= horizon)
    w, v = weight * case, weight * ~case
    each = weight * (case - risk) ** 2
    brier = _make_estimate(
        float(each.mean()), (each - each.mean()) / len(each), units, n_units, np.ones(len(each))
    )
    if not w.sum() or not v.sum():
        return _make_estimate(float("nan"), np.zeros(len(time)), units, n_units, w, v), brier
    values, place = np.unique(risk, return_inverse=True)
    ours, theirs = np.bincount(place, w, len(values)), np.bincount(place, v, len(values))
    below, above = (
        (np.cumsum(theirs) - theirs / 2) / v.sum(),
        (ours.sum() - np.cumsum(ours) + ours / 2) / w.sum(),
    )
    value = float((ours * below).sum() / w.sum())
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


def select_known(target: Array) -> Array:
    """Rows [n] bool of which a time is known, of times and events [n, 2]."""
    return np.asarray(np.isfinite(target).all(1))


def _estimate_columns(rows: ScoredRows, prediction: Array, decisions: Array | None) -> Estimates:
    """All metrics of every column: the C of the label by the risk at this horizon, AUROC and Brier
    score at the horizon.
    """
    each: dict[str, list[Estimate]] = {name: [] for name in ("c_index", "auroc", "brier")}
    # the longest horizon of each label
    last = {parse_horizon(name)[0]: k for k, name in enumerate(rows.names)}
    for k, name in enumerate(rows.names):
        kept = select_known(rows.target[:, k])
        (time, event), risk, units = rows.target[kept, k].T, prediction[kept, k], rows.units[kept]
        if not len(time):
            nothing = Estimate(
                float("nan"),
                np.zeros(rows.n_units),
                weigh_units(np.ones(rows.n_units) / rows.n_units, 0),
            )
            found = [nothing] * 3
        else:
            found = [estimate_concordance(time, event, risk, units, rows.n_units)]
            found += estimate_horizon(
                time, event, risk, parse_horizon(name)[1], units, rows.n_units
            )
        for metric, one in zip(each, found, strict=True):
            each[metric].append(one)
    longest = [each["c_index"][k] for k in last.values()]
    means = {
        name: _average([one for one in of if np.isfinite(one.value)] or of)
        for name, of in {**each, "c_index": longest}.items()
    }
    return Estimates(means, each)


def _average(each: Sequence[Estimate]) -> Estimate:
    """The mean over columns."""
    lever = np.mean([one.weights.leverage for one in each], axis=0)
    weights = UnitWeights(
        lever,
        float(np.mean([one.weights.df for one in each])),
        max(one.weights.rows for one in each),
    )
    return Estimate(
        float(np.mean([one.value for one in each])),
        np.mean([one.influence for one in each], axis=0),
        weights,
    )


def describe_groups(
    target: Array, prediction: Array, names: Sequence[str], points: int
) -> dict[str, RiskGroups]:
    """Label -> thirds of the rows by the risk at its longest horizon, with the observed incidence
    on so many days and at the horizons.

    `target` [n, C, 2], `prediction` [n, C]; rows of equal risk are in one group. Tenths, for the
    calibration, are described at the horizons.
    """
    out, columns = {}, [parse_horizon(name) for name in names]
    for label in dict.fromkeys(label for label, _ in columns):
        own = sorted((day, k) for k, (name, day) in enumerate(columns) if name == label)
        end, last = own[-1]
        kept = select_known(target[:, last])
        (time, event), risk = (
            target[kept, last].astype(np.float64).T,
            prediction[kept][:, [k for _, k in own]],
        )
        days = np.unique([*np.linspace(0, end, points + 1)[1:].round(), *(day for day, _ in own)])
        place, tenth = (_cut_risk(risk[:, -1], parts) for parts in (3, DECILES))
        held = np.unique(place).tolist()
        words = dict(
            zip(
                held,
                {1: ("all",), 2: ("lower", "higher")}.get(
                    len(held), ("lowest", "middle", "highest")
                ),
                strict=False,
            )
        )
        groups = [
            _describe_group(
                words[g], time[place == g], event[place == g], risk[place == g].mean(0), days
            )
            for g in held
        ]
        horizons = np.array([day for day, _ in own])
        deciles = [
            _describe_group(
                f"{g + 1}", time[tenth == g], event[tenth == g], risk[tenth == g].mean(0), horizons
            )
            for g in np.unique(tenth)
        ]
        out[label] = RiskGroups(horizons=horizons.tolist(), groups=groups, deciles=deciles)
    return out


def _cut_risk(risk: Array, parts: int) -> Array:
    """The number of the group of each row [n], from 0: parts of equal size; rows of equal risk are
    in one.
    """
    edges = np.unique(np.quantile(risk, np.arange(1, parts) / parts)) if len(risk) else np.zeros(0)
    return np.searchsorted(edges, risk, "left")


def _describe_group(
    name: str, time: Array, event: Array, predicted: Array, days: Array
) -> RiskGroup:
    points = []
    for day in days.tolist():
        value, lo, hi = find_incidence_interval(time, event, day)
        events, left = int(((event == 1) & (time <= day)).sum()), int((time > day).sum())
        points.append(
            RiskPoint(day=day, at_risk=left, events=events, incidence=value, lo=lo, hi=hi)
        )
    return RiskGroup(name=name, n=len(time), predicted=predicted.tolist(), points=points)


ESTIMATORS["survival"] = _estimate_columns
