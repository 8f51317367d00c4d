"""Predictions of runs on the same windows, as stored, and paired comparisons of two. Legend:
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.evaluate.intervals import (
    build_difference,
    describe_intervals,
    explain_no_interval,
)
from bitimely_core.evaluate.metrics import (
    EMPTY,
    MAIN,
    METRICS,
    Array,
    Unit,
    check_rows,
    estimate_predictions,
    find_unit,
)
from bitimely_core.schemas.scores import PairedComparison, PairedScores

IDENTITY = ("recording_id", "start", "window")  # columns that identify a window


class Predictions(NamedTuple):
    """Predictions of one run on the rows of one split, as `compare` pairs them."""

    rows: Array  # [n] identity of the window: number, or text such as "recording:start"
    target: Array  # [n], multi-label [n, K] with NaN where a label is not known
    prediction: Array  # as for `score`
    groups: Array  # [n] subject


def align_runs(runs: Mapping[str, Predictions]) -> tuple[Array, Array, dict[str, Array]]:
    """Target and subjects of the rows that all runs share, and the predictions of each in that
    order.

    Raises UserError (settings_differ, exit 4) where the windows, their targets or their subjects
    differ.
    """
    orders = {
        name: np.argsort(np.asarray(p.rows).astype(str), kind="stable") for name, p in runs.items()
    }
    common = {}
    for field, kind in (("rows", str), ("target", np.float64), ("groups", str)):
        sorted_runs = [np.asarray(getattr(p, field))[orders[name]] for name, p in runs.items()]
        a = common[field] = sorted_runs[0]
        for b in sorted_runs[1:]:
            has_nan = field == "target"
            if not np.array_equal(a.astype(kind), b.astype(kind), equal_nan=has_nan):
                what = "subjects" if field == "groups" else field
                raise input_error(
                    Reason.SETTINGS_DIFFER,
                    f"the runs differ in the {what} of their windows ({len(a)} and {len(b)} rows)",
                    "a paired comparison needs the same windows",
                    "Evaluate both runs on the same tokens and split",
                )
    predictions = {name: np.asarray(p.prediction)[orders[name]] for name, p in runs.items()}
    return common["target"], common["groups"], predictions


def compare(
    task: str,
    first: Predictions,
    second: Predictions,
    *,
    class_names: Sequence[str] = (),
    bootstrap: int = 1000,
    by: Unit = "subject",
    unit: str | None = None,
    subject: str = "subject",
) -> PairedComparison:
    """Two runs on the same windows: the difference first - second of every metric.

    Arguments are those of `score`. Raises UserError: settings_differ (exit 4), where the windows,
    their targets or their subjects differ; non_finite.
    """
    target, groups, predictions = align_runs({"first": first, "second": second})
    rows = None
    metrics = dict.fromkeys(METRICS[task], PairedScores(undefined_reason=EMPTY))
    if len(target):
        rows = check_rows(task, target, predictions, groups, class_names, by, subject)
        estimates = estimate_predictions(rows)
        for name in metrics:
            a, b = (estimates[run].metrics[name] for run in ("first", "second"))
            few = explain_no_interval(rows, name, bootstrap)
            metrics[name] = PairedScores(
                first=a.value if np.isfinite(a.value) else None,
                second=b.value if np.isfinite(b.value) else None,
                **build_difference(a, b, few, find_unit(name, unit)).model_dump(),
            )
    return PairedComparison(
        task=task,
        main=MAIN[task],
        n=len(target),
        n_subjects=len(np.unique(groups.astype(str))),
        metrics=metrics,
        intervals=describe_intervals(rows, by, subject),
    )


def predictions_frame(
    index: Any, task: str, class_names: Sequence[str], target: Array, prediction: Array
) -> Any:
    """Rows of a tokens' index with targets and predictions (as for `score`): the content of
    `predictions.parquet`.
    """
    import polars as pl

    prediction = np.asarray(prediction)
    columns = {"target": target}
    if task == "regression":
        columns["prediction"] = prediction.reshape(-1)
    elif task == "classification":
        columns["prediction"] = prediction.argmax(1) if len(prediction) else np.zeros(0, np.int64)
    elif task == "survival":
        columns = {}
        for k, name in enumerate(class_names):
            columns |= {f"time_{name}": target[:, k, 0], f"event_{name}": target[:, k, 1]}
    else:
        columns = {f"target_{name}": target[:, k] for k, name in enumerate(class_names)}
    if task != "regression":
        columns |= {f"p_{name}": prediction[:, k] for k, name in enumerate(class_names)}
    series = {name: pl.Series(values) for name, values in columns.items()}
    return index.select("window", "subject_id", *IDENTITY[:2]).with_columns(**series)


def parse_predictions(task: str, frame: Any, class_names: Sequence[str] = ()) -> Predictions:
    """Predictions from the content of `predictions.parquet`.

    Columns: window, subject_id, recording_id, start, then `target` and `p_<class>`
    (classification), `target_<label>` and `p_<label>` (multi-label), or `target` and `prediction`
    (regression).
    """

    def matrix(prefix: str) -> Array:
        return np.stack([np.asarray(frame[f"{prefix}_{name}"]) for name in class_names], axis=1)

    ids = [
        f"{recording}:{start}:{window}"
        for recording, start, window in zip(*(frame[c] for c in IDENTITY), strict=True)
    ]
    if task == "survival":
        target = np.stack([matrix("time"), matrix("event")], 2)
    else:
        target = matrix("target") if task == "multilabel" else np.asarray(frame["target"])
    prediction = np.asarray(frame["prediction"]) if task == "regression" else matrix("p")
    return Predictions(
        np.array(ids, dtype=str), target, prediction, np.asarray(frame["subject_id"]).astype(str)
    )


def list_classes(frame: Any) -> list[str]:
    """Classes or labels of a `predictions.parquet` in the order of their ids; [] for regression."""
    return [name.removeprefix("p_") for name in frame.columns if name.startswith("p_")]
