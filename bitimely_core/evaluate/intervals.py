"""Confidence intervals of scores and of differences, without replicates: linearised variances over
subjects (docs/statistics.md).

The variance of a score is the sum of the squared influences of its units, each over one less its
leverage (CR2); Student's t has the effective number of units less one as degrees of freedom. Scores
between 0 and 1 are taken on the logit scale, kappa on Fisher's z, errors on the logarithm; near a
boundary the interval is that of Korn and Graubard, at the boundary that of Clopper and Pearson.
Legend: `evaluate`.
"""

from __future__ import annotations

import numpy as np

from bitimely_core.evaluate.metrics import (
    COMPARES_CLASSES,
    LOWER_IS_BETTER,
    MACRO,
    METRICS,
    Array,
    Estimate,
    Estimates,
    MetricUnit,
    ScoredRows,
    Unit,
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


def bound_share(share: float, trials: float, level: float = LEVEL) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share of `trials`, which may be any positive number."""
    from scipy.special import betaincinv

    hits, alpha = share * trials, 1 - level
    lo = float(betaincinv(hits, trials - hits + 1, alpha / 2)) if hits > 0 else 0.0
    return lo, float(betaincinv(hits + 1, trials - hits, 1 - alpha / 2)) if hits < trials else 1.0


def find_interval(metric: str, one: Estimate) -> tuple[float, float] | None:
    """The confidence interval of a metric, or of a `mean` of any sign, a positive `ratio`, a
    `share`; None where the units do not vary.
    """
    from scipy.special import ndtri, stdtrit

    value, weights = one.value, one.weights
    variance, t = (
        estimate_variance(one.influence, weights.leverage),
        float(stdtrit(weights.df, (1 + LEVEL) / 2)),
    )
    se = float(np.sqrt(variance))
    alike = is_rounding(se, value, scaled=is_scaled(metric))
    if metric == "mean":
        return None if alike else (value - t * se, value + t * se)
    if metric == "ratio" or metric in LOWER_IS_BETTER:
        highest = 1.0 if metric == "brier" else float("inf")
        return (
            (
                value * float(np.exp(-t * se / value)),
                min(value * float(np.exp(t * se / value)), highest),
            )
            if value > 0 and not alike
            else None
        )
    if metric == "kappa":
        if alike or abs(value) > 1 - 1e-9:
            lo, hi = bound_share((value + 1) / 2, weights.effective, LEVEL)
            return 2 * lo - 1, 2 * hi - 1
        z, reach = float(np.arctanh(value)), t * se / (1 - value**2)
        return float(np.tanh(z - reach)), float(np.tanh(z + reach))
    edge = min(value, 1 - value)
    if alike or edge < 1e-12:
        return bound_share(min(max(value, 0.0), 1.0), weights.effective, LEVEL)
    z, reach = float(np.log(value / (1 - value))), t * se / (value * (1 - value))
    lo, hi = float(1 / (1 + np.exp(-(z - reach)))), float(1 / (1 + np.exp(-(z + reach))))
    if edge**2 < NEAR_BOUNDARY * variance:
        trials = min(
            weights.rows, value * (1 - value) / variance * (float(ndtri((1 + LEVEL) / 2)) / t) ** 2
        )
        low, high = bound_share(value, trials, LEVEL)
        return (
            (min(lo, low), max(hi, high))
            if metric in {"auroc", "auprc", "auprc_micro"}
            else (low, high)
        )
    return lo, hi


def build_metric(
    metric: str,
    one: Estimate,
    undefined: str | None,
    uncertain: str | None,
    classes: ClassCounts | None = None,
) -> MetricValue:
    """A metric from its estimate. `undefined`: why there is no value; `uncertain`: why there is no
    interval.
    """
    units = int((one.weights.leverage > 0).sum())
    if not np.isfinite(one.value):
        return MetricValue(
            undefined_reason=undefined or "not defined by these rows", classes=classes
        )
    if uncertain is None and one.weights.effective < MINIMUM_EFFECTIVE:
        uncertain = f"effectively {one.weights.effective:.2f} units of equal weight, at least {MINIMUM_EFFECTIVE:.0f} required"
    found = find_interval(metric, one) if uncertain is None else None
    if found is None:
        alike = (
            "no row has an error"
            if metric in LOWER_IS_BETTER and one.value == 0
            else "all units are alike"
        )
        reason = f"no CI: {uncertain or alike}"
        return MetricValue(
            value=one.value, n_defined=units, undefined_reason=reason, classes=classes
        )
    se = float(np.sqrt(estimate_variance(one.influence, one.weights.leverage)))
    known = None if is_rounding(se, one.value, scaled=is_scaled(metric)) else se
    return MetricValue(
        value=one.value, se=known, lo=found[0], hi=found[1], n_defined=units, classes=classes
    )


def estimate_mean(values: Array, units: Array, n_units: int) -> Estimate:
    """The mean of `values` [n], of which none is NaN."""
    count = np.bincount(units, minlength=n_units).astype(np.float64)
    total = max(count.sum(), 1.0)
    mean = float(values.sum() / total) if len(values) else float("nan")
    return Estimate(
        mean,
        (np.bincount(units, values, n_units) - count * mean) / total,
        weigh_units(count / total, len(values)),
    )


def explain_few(units: int, bootstrap: int = 1000) -> str | None:
    """Why a mean over so many subjects has no interval, or None."""
    few = (
        f"{units} subject{'s' * (units != 1)}, at least {MINIMUM_UNITS} required"
        if units < MINIMUM_UNITS
        else None
    )
    return "none was requested" if bootstrap < 2 else few


def average_over_units(
    values: Array, units: Array, n_units: int, kind: str = "mean", bootstrap: int = 1000
) -> MetricValue:
    """Mean of the finite `values` [n] with its interval over `units` [n]; `kind`: mean, ratio or
    share, see `find_interval`.
    """
    known = np.isfinite(values)
    if not known.any():
        return MetricValue(undefined_reason="not defined by these rows")
    one = estimate_mean(values[known], units[known], n_units)
    return build_metric(kind, one, None, explain_few(len(np.unique(units[known])), bootstrap))


def build_difference(
    first: Estimate, second: Estimate, uncertain: str | None, unit: MetricUnit
) -> Difference:
    """The paired difference, first less second, on the same rows, with its two-sided p and its
    unit.
    """
    from scipy.special import stdtr, stdtrit

    value, weights, printed = (
        first.value - second.value,
        first.weights,
        {"unit": unit.name, "factor": unit.factor},
    )
    units = int((weights.leverage > 0).sum())
    if not np.isfinite(value):
        return Difference(undefined_reason="one of the two is not defined", **printed)
    if uncertain is None and weights.effective < MINIMUM_EFFECTIVE:
        uncertain = f"effectively {weights.effective:.2f} units of equal weight, at least {MINIMUM_EFFECTIVE:.0f} required"
    se = float(np.sqrt(estimate_variance(first.influence - second.influence, weights.leverage)))
    if uncertain is None and is_rounding(se, first.value, second.value, scaled=unit.scaled):
        uncertain = NO_SPREAD[not is_rounding(value, first.value, second.value, scaled=unit.scaled)]
    if uncertain is not None:
        return Difference(
            difference=value, n_defined=units, undefined_reason=f"no CI: {uncertain}", **printed
        )
    reach = float(stdtrit(weights.df, (1 + LEVEL) / 2)) * se
    p = 2 * float(stdtr(weights.df, -abs(value) / se))
    return Difference(
        difference=value,
        se=se,
        lo=value - reach,
        hi=value + reach,
        n_defined=units,
        df=weights.df,
        p=p,
        **printed,
    )


def explain_few_units(rows: ScoredRows, bootstrap: int = 1000) -> str | None:
    """Why no metric of these rows has a confidence interval, or None."""
    unit = rows.unit
    if not bootstrap:
        return "none was requested"
    if rows.n_units == 1:
        return f"one {unit}, between-{unit} variance cannot be estimated"
    return (
        f"{rows.n_units} {unit}s, at least {MINIMUM_UNITS} required"
        if rows.n_units < MINIMUM_UNITS
        else None
    )


def explain_rare_class(rows: ScoredRows, k: int) -> str | None:
    """Why metrics that compare class k with the rest have no confidence interval, or None."""
    unit = rows.unit
    for side, words in (
        (rows.positive[:, k], "of"),
        (rows.known[:, k] & ~rows.positive[:, k], "outside of"),
    ):
        units = len(np.unique(rows.units[side]))
        for count, least, what in (
            (int(side.sum()), MINIMUM_ROWS, "row"),
            (units, MINIMUM_CLASS_UNITS, unit),
        ):
            if count < least:
                return f"{count} {what}{'s' * (count != 1)} {words} class {rows.names[k]}, at least {least} required"
    return None


def explain_no_interval(rows: ScoredRows, metric: str, bootstrap: int = 1000) -> str | None:
    """Why a metric has no confidence interval, or None. Metrics that compare classes need enough
    rows of every class.
    """
    few = explain_few_units(rows, bootstrap)
    if few or metric not in COMPARES_CLASSES or rows.task == "regression":
        return few
    rarest = sorted(np.flatnonzero(rows.present).tolist(), key=lambda k: int(rows.support[k]))
    return next((text for k in rarest if (text := explain_rare_class(rows, k))), None)


def explain_absent_class(rows: ScoredRows, k: int) -> str | None:
    """Why class k defines no score, or None."""
    if rows.support[k] == 0:
        return f"no row is of class {rows.names[k]}"
    return f"every row is of class {rows.names[k]}" if rows.others[k] == 0 else None


def explain_no_followup(rows: ScoredRows, k: int) -> str | None:
    """Why times to event define no score at the horizon of column k, or None."""
    day = parse_horizon(rows.names[k])[1]
    return None if (rows.target[:, k, 0] > day).any() else f"nobody is observed past day {day:g}"


def build_metrics(rows: ScoredRows, found: Estimates, bootstrap: int) -> dict[str, MetricValue]:
    """The metrics of one prediction."""
    classes = 0 if rows.task == "regression" else int(rows.present.sum())
    undefined = "chance agreement is 1"  # with two classes only kappa can be undefined
    if rows.task in ("multilabel", "survival"):
        undefined = "no label has both positive and negative rows"
    elif rows.task == "classification" and not classes:
        undefined = f"all rows are of one class ({', '.join(rows.names[k] for k in np.flatnonzero(rows.positive.any(0)))})"
    counts = ClassCounts(defined=classes, of=len(rows.names)) if rows.task != "regression" else None
    reasons = {name: explain_no_interval(rows, name, bootstrap) for name in METRICS[rows.task]}
    absent: dict[str, str | None] = dict.fromkeys(METRICS[rows.task], undefined)
    if rows.task == "survival":
        why = [
            explain_no_followup(rows, k)
            for k in np.argsort([parse_horizon(name)[1] for name in rows.names])
        ]
        # without anybody past the shortest horizon there is nobody past the others
        shortest = next(iter(why), None)
        absent |= {"brier": shortest, "auroc": shortest or undefined}
    return {
        name: build_metric(
            name,
            found.metrics[name],
            absent[name],
            reasons[name],
            counts if name in MACRO else None,
        )
        for name in METRICS[rows.task]
    }


def build_class_scores(
    rows: ScoredRows, found: Estimates, bootstrap: int
) -> dict[str, ClassScores]:
    """Support, base rate and the metrics of every class or label."""
    few, out = explain_few_units(rows, bootstrap), {}
    for k, name in enumerate(rows.names):
        absent, support = explain_absent_class(rows, k), int(rows.support[k])
        binary = rows.task == "classification" and len(rows.names) == 2 and k == 0
        area = (
            f"of two classes the second, {rows.names[1]}, is the positive one" if binary else absent
        )
        missing = {
            "precision": absent or f"class {name} is never predicted",
            **dict.fromkeys(("recall", "f1"), None if support else absent),
            **dict.fromkeys(("auroc", "auprc"), area),
        }
        if rows.task == "survival":
            unseen = explain_no_followup(rows, k)
            missing |= {"auroc": unseen or absent, "brier": unseen}
        rare = few or explain_rare_class(rows, k)
        out[name] = ClassScores(
            support=support,
            subjects=len(np.unique(rows.groups[rows.positive[:, k]])),
            base_rate=None
            if rows.task == "survival"
            else float(support / max(support + rows.others[k], 1)),
            unknown=int((~rows.known[:, k]).sum()) if rows.task == "multilabel" else None,
            **{
                metric: build_metric(metric, each[k], missing.get(metric), rare)
                for metric, each in found.each.items()
            },
        )
    return out


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
