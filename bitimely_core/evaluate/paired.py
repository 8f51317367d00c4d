"""Runs on the same windows: what they predicted, as it lies on the disk, and the paired comparison of two. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.evaluate.bootstrap import build_metric, build_metrics, describe_resampling, explain_no_interval, run_bootstrap
from bitimely_core.evaluate.metrics import EMPTY, MAIN, METRICS, STATISTICS, Array, Metric, Unit, check_rows

IDENTITY = ("recording_id", "start", "window")  # columns that say which window a row is


class Predictions(NamedTuple):
    """What one run says about the rows of one split, as `compare` pairs it."""

    rows: Array  # [n] identity of the window: number, or text such as "recording:start"
    target: Array  # [n], multi-label [n, K] with NaN where a label is not known
    prediction: Array  # as for `score`
    groups: Array  # [n] subject


def build_difference(value: Array, drawn: Array, why: str | None) -> Metric:
    """The object of a paired difference: `difference` in the place of `value`, with the shares of replicates above and below zero."""
    kept = drawn[np.isfinite(drawn)]
    out = build_metric(float(value), drawn, "one of the two is not defined", why)
    sides = {"share_above_zero": float((kept > 0).mean()), "share_below_zero": float((kept < 0).mean())} if out["se"] is not None else {}
    return {"difference": out.pop("value"), **out, "share_above_zero": None, "share_below_zero": None, **sides}


def align_runs(runs: Mapping[str, Predictions]) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Target, subjects and identity of the rows that all runs share, and the predictions of each in that order.

    Raises UserError (settings_differ, exit 4) where the windows, their targets or their subjects differ.
    """
    orders = {name: np.argsort(np.asarray(p.rows).astype(str), kind="stable") for name, p in runs.items()}
    first = next(iter(runs))
    common = {field: np.asarray(getattr(runs[first], field))[orders[first]] for field in ("rows", "target", "groups")}
    for name, p in runs.items():
        for field, a in common.items():
            b = np.asarray(getattr(p, field))[orders[name]]
            kind, nan = (np.float64, True) if field == "target" else (str, False)
            if a.shape != b.shape or not np.array_equal(a.astype(kind), b.astype(kind), equal_nan=nan):
                raise input_error(
                    Reason.SETTINGS_DIFFER,
                    f"the runs differ in the {field if field != 'groups' else 'subjects'} of their windows ({len(a)} and {len(b)} rows)",
                    "a paired comparison needs the same windows",
                    "Evaluate both runs on the same tokens and split",
                )
    predictions = {name: np.asarray(p.prediction)[orders[name]] for name, p in runs.items()}
    return common["target"], common["groups"], common["rows"], predictions


def compare(
    task: str,
    first: Predictions,
    second: Predictions,
    *,
    class_names: Sequence[str] = (),
    bootstrap: int = 1000,
    by: Unit = "subject",
    seed: int = 0,
) -> dict[str, Any]:
    """Two runs on the same windows: the difference of every metric, on the same draws.

    Args:
        task: classification, multilabel or regression.
        first: the run in question.
        second: the run it is compared with.
        class_names: as for `score`.
        bootstrap: replicates.
        by: what is resampled.
        seed: of the draws.

    Returns:
        `{task, main, n, n_subjects, metrics, resampling}`; each metric is `{first, second, difference, se, lo, hi, share_above_zero,
        share_below_zero, n_defined, undefined_reason}`: difference = first - second; shares of the replicates, the rest is exactly zero.

    Raises:
        UserError: settings_differ (exit 4), where the windows, their targets or their subjects differ; non_finite.
    """
    target, groups, ids, both = align_runs({"run": first, "other": second})
    out: dict[str, Any] = {"task": task, "main": MAIN[task], "n": len(target), "n_subjects": len(np.unique(groups.astype(str)))}
    if not len(target):
        nothing = {"first": None, "second": None, **build_difference(np.array(np.nan), np.empty(0), None), "undefined_reason": EMPTY}
        return {**out, "metrics": {m: dict(nothing) for m in METRICS[task]}, "resampling": describe_resampling(None, bootstrap, by, seed)}
    r = check_rows(task, target, both, groups, class_names, by, ids)
    points, draws = run_bootstrap({name: STATISTICS[task](r, values, None) for name, values in r.predictions.items()}, r, bootstrap, seed)
    alone = {name: build_metrics(r, points[name], draws[name], bootstrap) for name in both}
    metrics = {}
    for m in METRICS[task]:
        d = build_difference(
            points["run"][m] - points["other"][m], draws["run"][m] - draws["other"][m], explain_no_interval(r, m, bootstrap)
        )
        metrics[m] = {"first": alone["run"][m]["value"], "second": alone["other"][m]["value"], **d}
    return {**out, "metrics": metrics, "resampling": describe_resampling(r, bootstrap, by, seed)}


def predictions_frame(index: Any, task: str, class_names: Sequence[str], target: Array, prediction: Array) -> Any:
    """A data frame as `predictions.parquet`, of rows of a tokens' index with their targets and predictions, as `score` takes them."""
    import polars as pl

    prediction = np.asarray(prediction)
    if task == "regression":
        said = {"target": target, "prediction": prediction.reshape(-1)}
    elif task == "classification":
        said = {"target": target, "prediction": prediction.argmax(1) if len(prediction) else np.zeros(0, np.int64)}
    else:
        said = {f"target_{name}": target[:, k] for k, name in enumerate(class_names)}
    if task != "regression":
        said |= {f"p_{name}": prediction[:, k] for k, name in enumerate(class_names)}
    return index.select("window", "subject_id", *IDENTITY[:2]).with_columns(**{k: pl.Series(v) for k, v in said.items()})


def parse_predictions(task: str, frame: Any, class_names: Sequence[str] = ()) -> Predictions:
    """A `predictions.parquet` as a data frame, with the columns that `compare_frames` names."""

    def matrix(prefix: str) -> Array:
        return np.stack([np.asarray(frame[f"{prefix}_{name}"]) for name in class_names], axis=1)

    ids = [f"{recording}:{start}:{window}" for recording, start, window in zip(*(frame[c] for c in IDENTITY), strict=True)]
    target = matrix("target") if task == "multilabel" else np.asarray(frame["target"])
    prediction = np.asarray(frame["prediction"]) if task == "regression" else matrix("p")
    return Predictions(np.array(ids, dtype=str), target, prediction, np.asarray(frame["subject_id"]).astype(str))


def list_classes(frame: Any) -> list[str]:
    """The classes or labels of a `predictions.parquet` in the order of their ids; [] for numbers."""
    return [name.removeprefix("p_") for name in frame.columns if name.startswith("p_")]


def compare_frames(
    task: str, first: Any, second: Any, class_names: Sequence[str] = (), *, bootstrap: int = 1000, by: Unit = "subject", seed: int = 0
) -> dict[str, Metric]:
    """`compare` for two `predictions.parquet` as data frames; returns its metrics.

    Columns: window, subject_id, recording_id, start, then `target` and `p_<class>` (classification), `target_<label>` and `p_<label>`
    (multi-label), or `target` and `prediction` (regression). Raises as `compare`.
    """
    result = compare(
        task,
        parse_predictions(task, first, class_names),
        parse_predictions(task, second, class_names),
        class_names=class_names,
        bootstrap=bootstrap,
        by=by,
        seed=seed,
    )
    return dict(result["metrics"])
