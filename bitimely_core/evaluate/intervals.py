"""Confidence intervals of scores and of differences, without replicates: linearised variances over
subjects (docs/statistics.md).

The variance of a score is the sum of the squared influences of its units, each over one less its
leverage (CR2); Student's t has the effective number of units less one as degrees of freedom. Scores
between 0 and 1 are taken on the logit scale, kappa on Fisher's z, errors on the logarithm; near a
boundary the interval is that of Korn and Graubard, at the boundary that of Clopper and Pearson.
Legend: `evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bitimely_core.evaluate.metrics import (
    LOWER_IS_BETTER,
    METRIC,
    METRICS,
    Array,
    Estimate,
    Estimates,
    Metric,
    MetricUnit,
    ScoredRows,
    Unit,
    UnitWeights,
    find_days,
    find_unit,
    weigh_units,
)
from bitimely_core.schemas.scores import (
    ClassCounts,
    ClassScores,
    Difference,
    IntervalMethod,
    MetricValue,
)
from bitimely_core.types import parse_horizon

MINIMUM_UNITS = 5  # subjects required for an interval
MINIMUM_EFFECTIVE = 2.0  # effective number of subjects required for an interval
# rows of a class, and of all others together, required where a metric compares classes
MINIMUM_ROWS = 5
MINIMUM_CLASS_UNITS = 2  # subjects on each of the two sides, likewise
LEVEL = 0.95
Interval = tuple[float, float]
# a standard error below is rounding: of scores between 0 and 1 as it is, of others as a share of
# the value
NO_WIDTH = 1e-10
NEAR_BOUNDARY = 5.0  # variances: a score whose squared distance to 0 or 1 is less is near it
HIGHEST_LEVERAGE = 0.99
# why a difference has no interval though there are enough units
NO_SPREAD = ("identical on every unit", "every unit differs alike")


def estimate_variance(influence: Array, leverage: Array) -> float:
    """Sum of the squared influences, each over one less its leverage."""
    return float((influence**2 / (1 - np.minimum(leverage, HIGHEST_LEVERAGE))).sum())


def is_rounding(size: float, *values: float, scaled: bool) -> bool:
    """Whether a standard error or a difference is rounding; `scaled`: relative to `values`, so that
    no unit of them matters.
    """
    return abs(size) <= NO_WIDTH * (max(map(abs, values)) if scaled else 1.0)


def is_scaled(metric: str) -> bool:
    """Whether a metric has the unit of what it is computed from: an error, or a `mean` or `ratio`
    as of `find_interval`.
    """
    return metric in ("mean", "ratio") or find_unit(metric).scaled


def bound_share(share: float, trials: float) -> Interval:
    """Clopper and Pearson's interval of a share of `trials`, which may be any positive number."""
    from scipy.special import betaincinv

    hits, alpha = share * trials, 1 - LEVEL
    lo = float(betaincinv(hits, trials - hits + 1, alpha / 2)) if hits > 0 else 0.0
    hi = float(betaincinv(hits + 1, trials - hits, 1 - alpha / 2)) if hits < trials else 1.0
    return lo, hi


class Spread(NamedTuple):
    """What an interval is computed from."""

    value: float
    variance: float
    t: float  # quantile of Student's t at the level
    weights: UnitWeights
    is_alike: bool  # the units do not vary

    @property
    def reach(self) -> float:
        """Half the width of the interval on the scale of the value."""
        return self.t * float(np.sqrt(self.variance))


def find_interval(metric: str, estimate: Estimate) -> Interval | None:
    """The confidence interval of a metric, or of a `mean` of any sign, a positive `ratio`, a
    `share`; None where the units do not vary.
    """
    from scipy.special import stdtrit

    value, weights = estimate.value, estimate.weights
    variance = estimate_variance(estimate.influence, weights.leverage)
    t = float(stdtrit(weights.df, (1 + LEVEL) / 2))
    alike = is_rounding(float(np.sqrt(variance)), value, scaled=is_scaled(metric))
    spread = Spread(value, variance, t, weights, alike)
    if metric == "mean":
        return None if alike else (value - spread.reach, value + spread.reach)
    if metric == "ratio":
        return _bound_on_log(spread)
    facts = METRIC.get(metric, Metric(metric))
    if facts.scale == "log":
        return _bound_on_log(spread, facts.highest)
    if facts.scale == "fisher":
        return _bound_on_fisher(spread)
    return _bound_on_logit(spread, ranks=facts.ranks)


def _bound_on_log(spread: Spread, highest: float = np.inf) -> Interval | None:
    """The interval of a positive number, symmetric on the logarithm."""
    if spread.value <= 0 or spread.is_alike:
        return None
    factor = spread.reach / spread.value
    high = spread.value * float(np.exp(factor))
    return spread.value * float(np.exp(-factor)), min(high, highest)


def _bound_on_fisher(spread: Spread) -> Interval:
    """The interval of a kappa on Fisher's z, at its boundaries that of a share."""
    value = spread.value
    if spread.is_alike or abs(value) > 1 - 1e-9:
        lo, hi = bound_share((value + 1) / 2, spread.weights.effective)
        return 2 * lo - 1, 2 * hi - 1
    z, reach = float(np.arctanh(value)), spread.reach / (1 - value**2)
    return float(np.tanh(z - reach)), float(np.tanh(z + reach))


def _bound_on_logit(spread: Spread, *, ranks: bool) -> Interval:
    """The interval of a number from 0 to 1 on the logit scale, near its boundaries that of Korn and
    Graubard; an area under a curve (`ranks`) has the wider of both there.
    """
    from scipy.special import ndtri

    value, variance, weights = spread.value, spread.variance, spread.weights
    edge = min(value, 1 - value)
    if spread.is_alike or edge < 1e-12:
        return bound_share(min(max(value, 0.0), 1.0), weights.effective)
    z = float(np.log(value / (1 - value)))
    reach = spread.reach / (value * (1 - value))
    lo, hi = float(1 / (1 + np.exp(-(z - reach)))), float(1 / (1 + np.exp(-(z + reach))))
    if edge**2 >= NEAR_BOUNDARY * variance:
        return lo, hi
    shrink = (float(ndtri((1 + LEVEL) / 2)) / spread.t) ** 2
    trials = min(weights.rows, value * (1 - value) / variance * shrink)
    low, high = bound_share(value, trials)
    return (min(lo, low), max(hi, high)) if ranks else (low, high)


def build_metric(
    metric: str,
    estimate: Estimate,
    undefined: str | None,
    uncertain: str | None,
    classes: ClassCounts | None = None,
) -> MetricValue:
    """A metric from its estimate.

    `undefined`: why there is no value; `uncertain`: why there is no interval.
    """
    value, weights = estimate.value, estimate.weights
    if not np.isfinite(value):
        reason = undefined or "not defined by these rows"
        return MetricValue(undefined_reason=reason, classes=classes)
    units = int((weights.leverage > 0).sum())
    score = MetricValue(value=value, n_defined=units, classes=classes)
    uncertain = uncertain or explain_uneven(weights)
    interval = find_interval(metric, estimate) if uncertain is None else None
    if interval is None:
        is_perfect = metric in LOWER_IS_BETTER and value == 0
        alike = "no row has an error" if is_perfect else "all units are alike"
        return score.model_copy(update={"undefined_reason": f"no CI: {uncertain or alike}"})
    se = float(np.sqrt(estimate_variance(estimate.influence, weights.leverage)))
    is_alike = is_rounding(se, value, scaled=is_scaled(metric))
    bounds = {"se": None if is_alike else se, "lo": interval[0], "hi": interval[1]}
    return score.model_copy(update=bounds)


def explain_uneven(weights: UnitWeights) -> str | None:
    """Why units of so unequal weight give no interval, or None."""
    if weights.effective >= MINIMUM_EFFECTIVE:
        return None
    effective = f"effectively {weights.effective:.2f} units of equal weight"
    return f"{effective}, at least {MINIMUM_EFFECTIVE:.0f} required"


def estimate_mean(values: Array, units: Array, n_units: int) -> Estimate:
    """The mean of `values` [n], of which none is NaN."""
    count = np.bincount(units, minlength=n_units).astype(np.float64)
    total = max(count.sum(), 1.0)
    mean = float(values.sum() / total) if len(values) else float("nan")
    influence = (np.bincount(units, values, n_units) - count * mean) / total
    return Estimate(mean, influence, weigh_units(count / total, len(values)))


def explain_few(units: int, bootstrap: int = 1000) -> str | None:
    """Why a mean over so many subjects has no interval, or None."""
    if bootstrap < 2:
        return "none was requested"
    if units >= MINIMUM_UNITS:
        return None
    return f"{units} subject{'s' * (units != 1)}, at least {MINIMUM_UNITS} required"


def average_over_units(
    values: Array, units: Array, n_units: int, kind: str = "mean", bootstrap: int = 1000
) -> MetricValue:
    """Mean of the finite `values` [n] with its interval over `units` [n]; `kind`: mean, ratio or
    share, see `find_interval`.
    """
    finite = np.isfinite(values)
    if not finite.any():
        return MetricValue(undefined_reason="not defined by these rows")
    mean = estimate_mean(values[finite], units[finite], n_units)
    return build_metric(kind, mean, None, explain_few(len(np.unique(units[finite])), bootstrap))


def average_rate(
    events: Array, exposure: Array, highest: float, bootstrap: int = 1000
) -> MetricValue:
    """Events [U] of units over their exposure [U], with its interval; `highest`: what the rate
    cannot exceed.
    """
    total = float(exposure.sum())
    if not total:
        return MetricValue(undefined_reason="not defined by these rows")
    value, share = float(events.sum()) / total, exposure / total
    weights = weigh_units(share, len(exposure))
    few = explain_few(len(exposure), bootstrap) or explain_uneven(weights)
    score = MetricValue(value=value, n_defined=len(exposure))
    if few is not None:
        return score.model_copy(update={"undefined_reason": f"no CI: {few}"})
    if not value:
        bounds = {"lo": 0.0, "hi": min(_bound_no_event(exposure), highest)}
        return score.model_copy(update=bounds)
    influence = (events - exposure * value) / total
    se = float(np.sqrt(estimate_variance(influence, weights.leverage)))
    reach = _reach_of_rate(events, exposure, se / value, weights.df)
    highest_factor = float(np.log(highest / value))
    bounds = {
        "se": se,
        "lo": value * float(np.exp(-reach)),
        "hi": value * float(np.exp(min(reach, highest_factor))),
    }
    return score.model_copy(update=bounds)


def _reach_of_rate(events: Array, exposure: Array, se: float, df: float) -> float:
    """Half the width of the interval of a rate on the logarithm: Student's t times the larger of
    the linearised standard error `se` and that of the jackknife over units.

    A rate that is 0 without one unit counts as half an event.
    """
    from scipy.special import stdtrit

    units, left_events = len(events), np.maximum(events.sum() - events, 0.5)
    without = np.log(left_events / (exposure.sum() - exposure))
    jackknife = float(np.sqrt((units - 1) * np.var(without)))
    return float(stdtrit(df, (1 + LEVEL) / 2)) * max(se, jackknife)


def _bound_no_event(exposure: Array) -> float:
    """The upper bound of a rate without any event: where the rates of units are distributed
    exponentially around it, the probability of no event is half of one less the level.
    """
    from scipy.optimize import brentq

    surprise = -float(np.log((1 - LEVEL) / 2))

    def exceed(rate: float) -> float:
        return float(np.log1p(rate * exposure).sum()) - surprise

    # the largest unit alone is enough there
    return float(brentq(exceed, 0.0, np.expm1(surprise) / exposure.max()))


def build_difference(
    first: Estimate, second: Estimate, uncertain: str | None, unit: MetricUnit
) -> Difference:
    """The paired difference, first less second, on the same rows, with its two-sided p and its
    unit.
    """
    from scipy.special import stdtr, stdtrit

    value, weights = first.value - second.value, first.weights
    if not np.isfinite(value):
        reason = "one of the two is not defined"
        return Difference(unit=unit.name, factor=unit.factor, undefined_reason=reason)
    uncertain = uncertain or explain_uneven(weights)
    se = float(np.sqrt(estimate_variance(first.influence - second.influence, weights.leverage)))
    if uncertain is None and is_rounding(se, first.value, second.value, scaled=unit.scaled):
        uncertain = NO_SPREAD[not is_rounding(value, first.value, second.value, scaled=unit.scaled)]
    units = int((weights.leverage > 0).sum())
    difference = Difference(difference=value, n_defined=units, unit=unit.name, factor=unit.factor)
    if uncertain is not None:
        return difference.model_copy(update={"undefined_reason": f"no CI: {uncertain}"})
    reach = float(stdtrit(weights.df, (1 + LEVEL) / 2)) * se
    tested = {
        "se": se,
        "lo": value - reach,
        "hi": value + reach,
        "df": weights.df,
        "p": 2 * float(stdtr(weights.df, -abs(value) / se)),
    }
    return difference.model_copy(update=tested)


def explain_few_units(rows: ScoredRows, bootstrap: int = 1000) -> str | None:
    """Why no metric of these rows has a confidence interval, or None."""
    unit = rows.unit
    if not bootstrap:
        return "none was requested"
    if rows.n_units == 1:
        return f"one {unit}, between-{unit} variance cannot be estimated"
    if rows.n_units >= MINIMUM_UNITS:
        return None
    return f"{rows.n_units} {unit}s, at least {MINIMUM_UNITS} required"


def explain_rare_class(rows: ScoredRows, k: int) -> str | None:
    """Why metrics that compare class k with the rest have no confidence interval, or None."""
    positive = rows.positive[:, k]
    for side, words in ((positive, "of"), (rows.labelled[:, k] & ~positive, "outside of")):
        counts = {"row": int(side.sum()), rows.unit: len(np.unique(rows.units[side]))}
        for word, count in counts.items():
            least = MINIMUM_ROWS if word == "row" else MINIMUM_CLASS_UNITS
            if count < least:
                few = f"{count} {word}{'s' * (count != 1)} {words} class {rows.names[k]}"
                return f"{few}, at least {least} required"
    return None


def explain_no_interval(rows: ScoredRows, metric: str, bootstrap: int = 1000) -> str | None:
    """Why a metric has no confidence interval, or None. Metrics that compare classes need enough
    rows of every class.
    """
    few = explain_few_units(rows, bootstrap)
    if few or not METRIC[metric].compares_classes:
        return few
    rarest = sorted(np.flatnonzero(rows.present).tolist(), key=lambda k: int(rows.support[k]))
    return next(filter(None, (explain_rare_class(rows, k) for k in rarest)), None)


def explain_absent_class(rows: ScoredRows, k: int) -> str | None:
    """Why class k defines no score, or None."""
    if rows.support[k] == 0:
        return f"no row is of class {rows.names[k]}"
    return f"every row is of class {rows.names[k]}" if rows.others[k] == 0 else None


def explain_no_followup(rows: ScoredRows, k: int) -> str | None:
    """Why times to event define no score at the horizon of column k, or None."""
    day = parse_horizon(rows.names[k])[1]
    is_observed = bool((rows.target[:, k, 0] > day).any())
    return None if is_observed else f"nobody is observed past day {day:g}"


def _explain_undefined(rows: ScoredRows) -> dict[str, str | None]:
    """Why each metric of the task has no value, where it has none."""
    metrics = METRICS[rows.task]
    if rows.task == "multilabel":
        return dict.fromkeys(metrics, "no label has both positive and negative rows")
    if rows.task == "survival":
        undefined = "no label has both positive and negative rows"
        order = np.argsort(find_days(rows.names))
        # without anybody past the shortest horizon there is nobody past the others
        shortest = explain_no_followup(rows, order[0]) if len(order) else None
        return {"c_index": undefined, "brier": shortest, "auroc": shortest or undefined}
    if rows.task == "classification" and not rows.present.any():
        names = ", ".join(rows.names[k] for k in np.flatnonzero(rows.positive.any(0)))
        return dict.fromkeys(metrics, f"all rows are of one class ({names})")
    return dict.fromkeys(metrics, "chance agreement is 1")  # only kappa can be undefined


def build_metrics(rows: ScoredRows, estimates: Estimates, bootstrap: int) -> dict[str, MetricValue]:
    """The metrics of one prediction."""
    undefined = _explain_undefined(rows)
    counts = None
    if rows.task != "regression":
        counts = ClassCounts(defined=int(rows.present.sum()), of=len(rows.names))
    return {
        name: build_metric(
            name,
            estimates.metrics[name],
            undefined[name],
            explain_no_interval(rows, name, bootstrap),
            counts if METRIC[name].averages_classes else None,
        )
        for name in METRICS[rows.task]
    }


def _explain_undefined_class(rows: ScoredRows, k: int) -> dict[str, str | None]:
    """Why each metric of class k has no value, where it has none."""
    name, absent = rows.names[k], explain_absent_class(rows, k)
    reasons: dict[str, str | None] = dict.fromkeys(("auroc", "auprc"), absent)
    if rows.task == "survival":
        unseen = explain_no_followup(rows, k)
        return reasons | {"auroc": unseen or absent, "brier": unseen}
    if rows.task == "classification" and len(rows.names) == 2 and k == 0:
        second = f"of two classes the second, {rows.names[1]}, is the positive one"
        reasons = dict.fromkeys(reasons, second)
    reasons["precision"] = absent or f"class {name} is never predicted"
    return reasons | dict.fromkeys(("recall", "f1"), None if rows.support[k] else absent)


def build_class_scores(
    rows: ScoredRows, estimates: Estimates, bootstrap: int
) -> dict[str, ClassScores]:
    """Support, base rate and the metrics of every class or label."""
    few, scores = explain_few_units(rows, bootstrap), {}
    for k, name in enumerate(rows.names):
        undefined = _explain_undefined_class(rows, k)
        uncertain = few or explain_rare_class(rows, k)
        metrics = {
            metric: build_metric(metric, classes[k], undefined.get(metric), uncertain)
            for metric, classes in estimates.each.items()
        }
        support = int(rows.support[k])
        rate = float(support / max(support + rows.others[k], 1))
        scores[name] = ClassScores(
            support=support,
            subjects=len(np.unique(rows.groups[rows.positive[:, k]])),
            base_rate=None if rows.task == "survival" else rate,
            unknown=int((~rows.labelled[:, k]).sum()) if rows.task == "multilabel" else None,
            **metrics,
        )
    return scores


def list_values(metrics: Iterable[MetricValue | None]) -> list[float]:
    """The values of the metrics that are defined."""
    return [metric.value for metric in metrics if metric and metric.value is not None]


def describe_intervals(rows: ScoredRows | None, by: Unit, unit: str = "subject") -> IntervalMethod:
    """The intervals as they are stored with the scores."""
    return IntervalMethod(
        by=by,
        unit=unit if by == "subject" else "window",
        level=LEVEL,
        units=rows.n_units if rows else 0,
        minimum_units=MINIMUM_UNITS,
        minimum_effective=MINIMUM_EFFECTIVE,
        minimum_rows=MINIMUM_ROWS,
    )
