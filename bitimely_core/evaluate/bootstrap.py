"""The bootstrap over subjects, and when its numbers may be shown. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bitimely_core.evaluate.metrics import COMPARES_CLASSES, EACH, MACRO, METRICS, Array, Metric, ScoredRows, Statistic, Unit

MINIMUM_UNITS = 5  # fewer subjects: no interval
MINIMUM_ROWS = 5  # fewer rows of a class, or of all others together: no interval for what compares classes
MINIMUM_DEFINED = 0.95  # share of the replicates that must be defined
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


def build_metric(value: float, draws: Array, undefined: str | None, uncertain: str | None) -> Metric:
    """The object of one metric. `undefined`: why there is no value; `uncertain`: why there is no interval."""
    kept = draws[np.isfinite(draws)]
    out: Metric = {"value": None, "se": None, "lo": None, "hi": None, "n_defined": len(kept), "undefined_reason": None}
    if not np.isfinite(value):
        return {**out, "n_defined": 0, "undefined_reason": undefined or "not defined by these rows"}
    out["value"] = float(value)
    if uncertain is None and len(kept) < MINIMUM_DEFINED * len(draws):
        uncertain = f"only {len(kept)} of {len(draws)} replicates define it, an interval needs {100 * MINIMUM_DEFINED:.0f} %"
    if uncertain is not None:
        return {**out, "undefined_reason": f"no interval: {uncertain}"}
    lo, hi = np.percentile(kept, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return {**out, "se": float(kept.std(ddof=1)), "lo": float(lo), "hi": float(hi)}


def explain_few_units(rows: ScoredRows, bootstrap: int) -> str | None:
    """Why no metric of these rows has an interval, or None."""
    unit = "subject" if rows.by == "subject" else "window"
    if bootstrap < 2:
        return "no bootstrap was asked for"
    if rows.n_units == 1:
        return f"all rows come from one {unit}, so the spread between {unit}s cannot be seen"
    if rows.n_units < MINIMUM_UNITS:
        return f"{rows.n_units} {unit}s, an interval needs at least {MINIMUM_UNITS}"
    return None


def explain_rare_class(rows: ScoredRows, k: int) -> str | None:
    """Why what compares class k with the rest has no interval, or None."""
    for count, whose in ((int(rows.support[k]), f"of class {rows.names[k]}"), (int(rows.others[k]), f"outside of class {rows.names[k]}")):
        if count < MINIMUM_ROWS:
            return f"{count} row{'s' * (count != 1)} {whose}, an interval needs at least {MINIMUM_ROWS}"
    return None


def explain_no_interval(rows: ScoredRows, metric: str, bootstrap: int) -> str | None:
    """Why a metric has no interval, or None. The rarest class decides for what compares classes."""
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


def build_metrics(rows: ScoredRows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, Metric]:
    """The metric objects of one prediction."""
    out = {}
    classes = 0 if rows.task == "regression" else int(rows.present.sum())
    for name in METRICS[rows.task]:
        undefined = "agreement by chance is complete"  # kappa alone can be undefined with two classes
        if rows.task == "multilabel":
            undefined = "no label has rows with and without it"
        elif rows.task == "classification" and not classes:
            held = [rows.names[k] for k in np.flatnonzero(rows.positive.any(0))]
            undefined = f"the rows hold one class only ({', '.join(held)})"
        out[name] = build_metric(float(point[name]), draws[name], undefined, explain_no_interval(rows, name, bootstrap))
        if rows.task != "regression" and name in MACRO:
            out[name]["classes"] = {"defined": classes, "of": len(rows.names)}
    return out


def build_class_scores(rows: ScoredRows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, dict[str, Any]]:
    """Support, base rate and the metric objects of every class or label."""
    few, positive, out = explain_few_units(rows, bootstrap), rows.positive, {}
    for k, name in enumerate(rows.names):
        absent = explain_absent_class(rows, k)
        entry: dict[str, Any] = {
            "support": int(rows.support[k]),
            "subjects": len(np.unique(rows.groups[positive[:, k]])),
            "base_rate": float(rows.support[k] / max(rows.support[k] + rows.others[k], 1)),
        }
        if rows.task == "multilabel":
            entry["unknown"] = int((~rows.known[:, k]).sum())
        for metric in EACH:
            missing = absent
            if metric in ("recall", "f1") and entry["support"]:
                missing = None
            if metric == "precision" and absent is None:
                missing = f"class {name} is never predicted"
            elif metric in ("auroc", "auprc") and rows.task == "classification" and len(rows.names) == 2 and k == 0:
                missing = f"of two classes the second, {rows.names[1]}, is the positive one"
            values = draws[f"{metric}_each"][:, k]
            entry[metric] = build_metric(float(point[f"{metric}_each"][k]), values, missing, few or explain_rare_class(rows, k))
        out[name] = entry
    return out


def describe_resampling(rows: ScoredRows | None, bootstrap: int, by: Unit, seed: int) -> dict[str, Any]:
    """What was resampled, how often and from which seed, as the scores say it."""
    return {
        "replicates": bootstrap,
        "by": by,
        "seed": seed,
        "level": LEVEL,
        "interval": "percentile",
        "units": rows.n_units if rows else 0,
        "minimum_units": MINIMUM_UNITS,
        "minimum_rows": MINIMUM_ROWS,
        "minimum_defined": MINIMUM_DEFINED,
    }
