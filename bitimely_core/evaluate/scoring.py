"""Scores of one run on one split, with baselines that ignore the input. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate import survival_metrics
from bitimely_core.evaluate.intervals import (
    build_class_scores,
    build_difference,
    build_metrics,
    describe_intervals,
    estimate_variance,
    explain_few_units,
    explain_no_interval,
    is_rounding,
    is_scaled,
)
from bitimely_core.evaluate.metrics import (
    CLASS_METRICS,
    EMPTY,
    ESTIMATORS,
    MAIN,
    METRIC,
    METRICS,
    Array,
    Estimates,
    ScoredRows,
    Unit,
    check_rows,
    estimate_predictions,
    find_days,
    find_unit,
    name_metric,
)
from bitimely_core.methods import lengths
from bitimely_core.methods.hazards import select_known
from bitimely_core.page import BarPlot, Figure, MetricLike, rename_units
from bitimely_core.privacy import format_count
from bitimely_core.schemas.scores import Baseline, ClassScores, MetricValue, TaskScores

Metrics = dict[str, MetricValue]

ABOUT = {
    "length_only": "logistic (of times to event: of the hazard) or linear regression on the number "
    "of events or observed samples alone",
    "single_code": "for each label logistic regression (of times to event: of the hazard) on the "
    "count of one code, the best of the training split",
}


class ConstantBaseline(NamedTuple):
    """A prediction that ignores the input."""

    about: str
    prediction: Array  # [n, K], or [n] of a regression
    decisions: Array | None = None  # probabilities [n, K] of a prediction at random


def constant_baselines(
    task: str, train: Array, n: int, names: Sequence[str]
) -> dict[str, ConstantBaseline]:
    """Predictions for `n` rows from training targets alone; `names`: of the K classes or labels."""
    if not len(train):
        return {}
    if task == "survival":
        incidence = np.tile(_estimate_incidences(train, names), (n, 1))
        about = "predicts for all the cumulative incidence of the training split"
        return {"prior": ConstantBaseline(about, incidence)}
    if task == "regression":
        values = {"mean": np.mean(train), "median": np.median(train)}
        return {
            name: ConstantBaseline(
                f"always predicts the {name} of the training targets", np.full(n, float(value))
            )
            for name, value in values.items()
        }
    if task == "classification":
        rates = np.bincount(train, minlength=len(names)) / len(train)
        likely = np.eye(len(names))[rates.argmax()]
        frequent = "always predicts the most frequent training class"
    else:
        rates = _label_rates(train)
        likely = (rates >= 0.5).astype(np.float64)
        frequent = "predicts for each label its more frequent training value"
    spread = np.tile(rates, (n, 1))
    random = "predicts at random with the training frequencies; expected values"
    return {
        "majority": ConstantBaseline(frequent, np.tile(likely, (n, 1))),
        "prior": ConstantBaseline(random, spread, spread),
    }


def _label_rates(labels: Array) -> Array:
    """Share of ones among the known labels, [n, K] -> [K]; 0 where none is known."""
    y = labels.astype(np.float64)
    return np.asarray(np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(0), 1))


def _estimate_incidences(target: Array, names: Sequence[str]) -> Array:
    """Cumulative incidence [K] at the horizon of each column of times and events [n, K, 2]."""
    incidences = np.zeros(len(names))
    for k, day in enumerate(find_days(names).tolist()):
        times = target[select_known(target[:, k]), k]
        if times.size:
            incidences[k] = survival_metrics.estimate_incidence(*times.T).evaluate(day)
    return incidences


def length_baseline(task: str, train_lengths: Any, train_target: Any, scored_lengths: Any) -> Array:
    """Predictions from the sequence length only: logistic or linear regression on log(1 + length)
    and its square.

    Pass it to `score(baselines={"length_only": ...})`.

    Args:
        task: classification, multilabel or regression.
        train_lengths: [m] events or observed samples of each training row.
        train_target: [m], multi-label [m, K], NaN = not known. Classes that do not occur in
            training get no probability; ids must be below K.
        scored_lengths: [n] of the rows to score.

    Returns:
        [n, K] probabilities (K = largest training class + 1, or labels), or [n] values.
    """
    model = lengths.fit_lengths(task, train_lengths, np.asarray(train_target))
    return lengths.predict_lengths(task, model, scored_lengths)


def _empty_scores(task: str, class_names: Sequence[str], by: Unit, subject: str) -> TaskScores:
    """The scores of a split without rows: every metric null with the reason."""
    undefined = MetricValue(undefined_reason=EMPTY)
    each = ClassScores(**dict.fromkeys(CLASS_METRICS, undefined))
    return TaskScores(
        task=task,
        main=MAIN[task],
        metrics=dict.fromkeys(METRICS[task], undefined),
        by_class={} if task == "regression" else dict.fromkeys(class_names, each),
        remarks=["The split holds no rows, so there is nothing to score."],
        intervals=describe_intervals(None, by, subject),
    )


def score(
    task: str,
    target: Any,
    prediction: Any,
    groups: Any,
    *,
    class_names: Sequence[str] = (),
    train_target: Any | None = None,
    baselines: Mapping[str, npt.ArrayLike] | None = None,
    about: Mapping[str, str] | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    unit: str | None = None,
    subject: str = "subject",
) -> TaskScores:
    """Metrics with 95 % confidence intervals, overall and by class, and those of the baselines. The
    order of the rows does not matter.

    AUROC and AUPRC of several classes are means over classes against the rest; of two classes the
    second is the positive one; of labels they are means over labels.

    Args:
        task: classification, multilabel or regression.
        target: [n] class ids, [n, K] labels in {0, 1} (NaN: not known, left out of every sum), or
            [n] values.
        prediction: [n, K] probabilities (`to_probabilities(task, logits)`), or [n] values.
        groups: [n] subjects.
        class_names: K names, in the order of the columns; not read for regression.
        train_target: targets of the training split, for constant baselines; None: no such
            baselines.
        baselines: further predictions on the same rows, such as `{"length_only":
            length_baseline(...)}`.
        about: descriptions of them.
        bootstrap: 0: values without intervals, which need no replicates.
        unit: of the values of a regression.
        subject: word for what `groups` are: subject, recording, segment.
        by: unit of the variance; "window" ignores the correlation of windows of one subject, which
            a remark states.

    Returns:
        Each metric of a baseline also has `difference`, the paired one, run minus baseline.

    Raises:
        UserError: non_finite, where a prediction is NaN or infinite.
    """
    if len(np.asarray(target)) == 0:
        return _empty_scores(task, class_names, by, subject)
    predictions = {"run": prediction, **(baselines or {})}
    rows = check_rows(task, target, predictions, groups, class_names, by, subject)
    estimates = estimate_predictions(rows)
    train = np.asarray([] if train_target is None else train_target)
    constants = constant_baselines(task, train, len(rows.target), rows.names)
    for name, constant in constants.items():
        estimates[name] = ESTIMATORS[task](rows, constant.prediction, constant.decisions)
    metrics = {name: build_metrics(rows, estimates[name], bootstrap) for name in estimates}
    for name in constants:
        metrics[name] |= _list_certain(estimates[name], metrics[name])
    texts = dict.fromkeys(predictions, "predictions on the same windows") | ABOUT
    texts |= dict(about or {}) | {name: constant.about for name, constant in constants.items()}
    run = estimates["run"]
    described = {
        name: Baseline(about=texts[name], metrics=metrics[name]) for name in [*estimates][1:]
    }
    by_class: dict[str, ClassScores] = {}
    if task != "regression":
        by_class = build_class_scores(rows, run, bootstrap)
    return TaskScores(
        task=task,
        main=MAIN[task],
        unit=unit,
        n=len(rows.target),
        n_subjects=rows.n_subjects,
        metrics=metrics["run"],
        by_class=by_class,
        confusion=_count_confusion(rows) if task == "classification" else None,
        baselines={
            name: _describe_baseline(rows, run, estimates[name], baseline, bootstrap, unit)
            for name, baseline in described.items()
        },
        intervals=describe_intervals(rows, by, subject),
        remarks=[str(rename_units(line, subject)) for line in _list_remarks(rows, bootstrap)],
    )


def _list_certain(estimates: Estimates, metrics: Metrics) -> Metrics:
    """The metrics of a constant that scores alike on every subject, which is not uncertain."""
    certain = {}
    for name, estimate in estimates.metrics.items():
        variance = estimate_variance(estimate.influence, estimate.weights.leverage)
        is_alike = is_rounding(float(np.sqrt(variance)), estimate.value, scaled=is_scaled(name))
        if metrics[name].value is not None and is_alike:
            reason = "no CI: the prediction is constant"
            certain[name] = MetricValue(value=estimate.value, undefined_reason=reason)
    return certain


def _describe_baseline(
    rows: ScoredRows,
    run: Estimates,
    estimates: Estimates,
    baseline: Baseline,
    bootstrap: int,
    unit: str | None,
) -> Baseline:
    """A baseline with the paired differences of its metrics, run minus baseline, and of several
    labels with the AUROC and AUPRC of each.
    """
    metrics = {}
    for name, value in baseline.metrics.items():
        pair = (run.metrics[name], estimates.metrics[name])
        uncertain = explain_no_interval(rows, name, bootstrap)
        difference = build_difference(*pair, uncertain, find_unit(name, unit))
        metrics[name] = value.model_copy(update={"difference": difference})
    by_class = None
    if rows.task == "multilabel":
        scores = build_class_scores(rows, estimates, bootstrap)
        by_class = {label: {"auroc": s.auroc, "auprc": s.auprc} for label, s in scores.items()}
    return baseline.model_copy(update={"metrics": metrics, "by_class": by_class})


def _count_confusion(rows: ScoredRows) -> list[list[int]]:
    """Rows [K, K] by their class and by that which the run predicts."""
    counts = np.zeros((len(rows.names), len(rows.names)), dtype=np.int64)
    np.add.at(counts, (rows.target, rows.predictions["run"].argmax(1)), 1)
    return counts.tolist()


def _list_remarks(rows: ScoredRows, bootstrap: int) -> list[str]:
    remarks = []
    if rows.by == "window":
        remarks.append(
            "Intervals are over windows, not subjects: windows of one subject are correlated, so "
            "the intervals are too narrow."
        )
    few = explain_few_units(rows, bootstrap)
    if few is not None:
        remarks.append(f"No confidence intervals: {few}.")
    if rows.task != "classification":
        return remarks
    subjects = [set(rows.groups[of_class].tolist()) for of_class in rows.positive.T]
    present = list(filter(None, subjects))
    if len(present) > 1 and sum(map(len, present)) == len(set.union(*present)) == len(present):
        remarks.append(
            "Each class comes from one subject: classes and subjects cannot be separated."
        )
    if len(present) < len(subjects):
        absent = ", ".join(rows.names[k] for k, owners in enumerate(subjects) if not owners)
        remarks.append(
            f"No row of the split is of class {absent}: excluded from means over classes."
        )
    return remarks


def name_unit(scores: TaskScores) -> str:
    """The word for the unit of the intervals: subject, recording, segment or window."""
    return scores.intervals.unit if scores.intervals else "subject"


def describe_units(scores: TaskScores) -> str:
    """The number of units that windows are grouped by, with their word: `12 subjects`, `50 segments
    (people may be shared)`.
    """
    unit = name_unit(scores)
    people = "subject" if unit == "window" else unit
    shared = "" if people == "subject" else " (people may be shared)"
    return f"{format_count(scores.n_subjects)} {people}s{shared}"


def score_figure(scores: TaskScores) -> Figure | None:
    """The main score and those of the baselines as a figure; None where it is not defined.

    The first block of a page is the headline.
    """
    name = scores.main or ""
    ours = "this run" if getattr(scores, "encoder", None) is None else "this encoder"
    bars: dict[str, MetricLike] = {ours: scores.metrics[name]}
    for key, baseline in scores.baselines.items():
        bars[key.replace("_", " ")] = baseline.metrics[name]
    if bars[ours].value is None:
        return None
    metric = METRIC[name]
    title = name_metric(name, first=True)
    side = "lower" if metric.lower_is_better else "higher"
    counted = f"{format_count(scores.n)} windows of {describe_units(scores)}"
    caption = f"{title} ({side} is better) on {counted}"
    if bars[ours].lo is not None:
        caption += f"; lines: 95 % CI over {name_unit(scores)}s"
    data = BarPlot.from_metrics(bars, metric.label)
    return Figure("main-score", title, f"{caption}.", data)
