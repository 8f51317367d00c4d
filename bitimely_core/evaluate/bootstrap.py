"""Bootstrap over subjects, metrics with confidence intervals, and the minima below which there are none. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from bitimely_core.evaluate.metrics import COMPARES_CLASSES, EACH, MACRO, METRICS, Array, ScoredRows, Statistic, Unit
from bitimely_core.schemas import ClassCounts, ClassScores, Difference, MetricValue, Resampling, Uncertainty

MINIMUM_UNITS = 5  # subjects required for an interval
MINIMUM_ROWS = 5  # rows of a class, and of all others together, required where a metric compares classes
MINIMUM_DEFINED = 0.95  # share of the replicates in which the metric must be defined
LEVEL = 0.95


def draw_counts(replicates: Iterable[int], units: int, seed: int = 0) -> Array:
    """How often each unit is drawn in each replicate, [R, U] float64: a function of (seed, replicate, units) alone."""
    picks = (np.random.default_rng([seed, r]).integers(0, units, units) for r in replicates)
    return np.array([np.bincount(p, minlength=units) for p in picks], dtype=np.float64)


def run_bootstrap(
    statistics: Mapping[str, Statistic], rows: ScoredRows, bootstrap: int, seed: int
) -> tuple[dict[str, dict[str, Array]], dict[str, dict[str, Array]]]:
    """Values and replicates of several statistics on the same draws: name -> metric -> [] or [K], and [R] or [R, K]."""
    points = {name: {key: v[0] for key, v in f(np.ones((1, rows.n_units))).items()} for name, f in statistics.items()}
    width = rows.target.size + rows.n_units
    block = max(1, 2_000_000 // width)  # rows of 16 MB at a time
    parts: dict[str, list[dict[str, Array]]] = {name: [] for name in statistics}
    for start in range(0, bootstrap, block):
        counts = draw_counts(range(start, min(start + block, bootstrap)), rows.n_units, seed)
        for name, f in statistics.items():
            parts[name].append(f(counts))
    none: dict[str, dict[str, Array]] = {n: {k: np.empty((0, *np.shape(v))) for k, v in p.items()} for n, p in points.items()}
    draws = {n: {k: np.concatenate([p[k] for p in parts[n]]) if parts[n] else none[n][k] for k in points[n]} for n in statistics}
    return points, draws


def build_metric(
    value: float, draws: Array, undefined: str | None, uncertain: str | None, classes: ClassCounts | None = None
) -> MetricValue:
    """A metric from its value and its replicates. `undefined`: why there is no value; `uncertain`: why there is no interval."""
    kept = draws[np.isfinite(draws)]
    if not np.isfinite(value):
        return MetricValue(undefined_reason=undefined or "not defined by these rows", classes=classes)
    if uncertain is None and len(kept) < MINIMUM_DEFINED * len(draws):
        uncertain = f"defined in {len(kept)} of {len(draws)} replicates, at least {100 * MINIMUM_DEFINED:.0f} % required"
    if uncertain is not None:
        return MetricValue(value=float(value), n_defined=len(kept), undefined_reason=f"no CI: {uncertain}", classes=classes)
    lo, hi = np.percentile(kept, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return MetricValue(value=float(value), se=float(kept.std(ddof=1)), lo=float(lo), hi=float(hi), n_defined=len(kept), classes=classes)


def build_difference(value: float, draws: Array, uncertain: str | None) -> Difference:
    """A paired difference from its value and its replicates, with the shares of replicates above and below zero."""
    kept = draws[np.isfinite(draws)]
    found = build_metric(value, draws, "one of the two is not defined", uncertain)
    above, below = (None, None) if found.se is None else (float((kept > 0).mean()), float((kept < 0).mean()))
    return Difference(
        difference=found.value, share_above_zero=above, share_below_zero=below, **found.model_dump(include=set(Uncertainty.model_fields))
    )


def explain_few_units(rows: ScoredRows, bootstrap: int) -> str | None:
    """Why no metric of these rows has a confidence interval, or None."""
    unit = "subject" if rows.by == "subject" else "window"
    if bootstrap < 2:
        return "no bootstrap was requested"
    if rows.n_units == 1:
        return f"one {unit}, between-{unit} variance cannot be estimated"
    return f"{rows.n_units} {unit}s, at least {MINIMUM_UNITS} required" if rows.n_units < MINIMUM_UNITS else None


def explain_rare_class(rows: ScoredRows, k: int) -> str | None:
    """Why metrics that compare class k with the rest have no confidence interval, or None."""
    for count, side in ((int(rows.support[k]), "of"), (int(rows.others[k]), "outside of")):
        if count < MINIMUM_ROWS:
            return f"{count} row{'s' * (count != 1)} {side} class {rows.names[k]}, at least {MINIMUM_ROWS} required"
    return None


def explain_no_interval(rows: ScoredRows, metric: str, bootstrap: int) -> str | None:
    """Why a metric has no confidence interval, or None. Metrics that compare classes need enough rows of the rarest one."""
    few = explain_few_units(rows, bootstrap)
    if few or metric not in COMPARES_CLASSES or rows.task == "regression":
        return few
    classes = np.flatnonzero(rows.present)
    return explain_rare_class(rows, int(classes[np.minimum(rows.support, rows.others)[classes].argmin()])) if len(classes) else None


def explain_absent_class(rows: ScoredRows, k: int) -> str | None:
    """Why class k defines no score, or None."""
    if rows.support[k] == 0:
        return f"no row is of class {rows.names[k]}"
    return f"every row is of class {rows.names[k]}" if rows.others[k] == 0 else None


def build_metrics(rows: ScoredRows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, MetricValue]:
    """The metrics of one prediction."""
    classes = 0 if rows.task == "regression" else int(rows.present.sum())
    undefined = "chance agreement is 1"  # with two classes only kappa can be undefined
    if rows.task == "multilabel":
        undefined = "no label has both positive and negative rows"
    elif rows.task == "classification" and not classes:
        undefined = f"all rows are of one class ({', '.join(rows.names[k] for k in np.flatnonzero(rows.positive.any(0)))})"
    counts = ClassCounts(defined=classes, of=len(rows.names)) if rows.task != "regression" else None
    return {
        name: build_metric(
            float(point[name]), draws[name], undefined, explain_no_interval(rows, name, bootstrap), counts if name in MACRO else None
        )
        for name in METRICS[rows.task]
    }


def build_class_scores(rows: ScoredRows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, ClassScores]:
    """Support, base rate and the metrics of every class or label."""
    few, out = explain_few_units(rows, bootstrap), {}
    for k, name in enumerate(rows.names):
        absent, support = explain_absent_class(rows, k), int(rows.support[k])
        binary = rows.task == "classification" and len(rows.names) == 2 and k == 0
        area = f"of two classes the second, {rows.names[1]}, is the positive one" if binary else absent
        missing = {
            "precision": absent or f"class {name} is never predicted",
            **dict.fromkeys(("recall", "f1"), None if support else absent),
            **dict.fromkeys(("auroc", "auprc"), area),
        }
        each = {
            metric: build_metric(
                float(point[f"{metric}_each"][k]), draws[f"{metric}_each"][:, k], missing[metric], few or explain_rare_class(rows, k)
            )
            for metric in EACH
        }
        out[name] = ClassScores(
            support=support,
            subjects=len(np.unique(rows.groups[rows.positive[:, k]])),
            base_rate=float(support / max(support + rows.others[k], 1)),
            unknown=int((~rows.known[:, k]).sum()) if rows.task == "multilabel" else None,
            **each,
        )
    return out


def describe_resampling(rows: ScoredRows | None, bootstrap: int, by: Unit, seed: int) -> Resampling:
    """The bootstrap as it is stored with the scores."""
    return Resampling(
        replicates=bootstrap,
        by=by,
        seed=seed,
        level=LEVEL,
        interval="percentile",
        units=rows.n_units if rows else 0,
        minimum_units=MINIMUM_UNITS,
        minimum_rows=MINIMUM_ROWS,
        minimum_defined=MINIMUM_DEFINED,
    )
