"""Scores of one run on one split, with baselines that ignore the input. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate import survival
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
    EACH,
    EMPTY,
    ESTIMATORS,
    LOWER_IS_BETTER,
    MAIN,
    METRICS,
    NAMES,
    Array,
    ScoredRows,
    Unit,
    check_rows,
    find_unit,
)
from bitimely_core.page import BarPlot, Figure, rename_units
from bitimely_core.privacy import format_count
from bitimely_core.schemas.scores import Baseline, ClassScores, MetricValue, TaskScores
from bitimely_core.types import parse_horizon

ABOUT = {
    "length_only": "logistic (of times to event: of the hazard) or linear regression on the number of events or observed samples alone",
    "single_code": "for each label logistic regression (of times to event: of the hazard) on the count of one code, the best of the training split",
}


def _label_rates(labels: Array) -> Array:
    """Share of ones among the known labels, [n, K] -> [K]; 0 where none is known."""
    y = labels.astype(np.float64)
    return np.asarray(np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(0), 1))


def constant_baselines(
    task: str, train: Array, n: int, k: int, names: Sequence[str] = ()
) -> dict[str, tuple[str, Array, Array | None]]:
    """Predictions that ignore the input, from training targets alone: name -> (description,
    prediction, decisions or None).
    """
    if not len(train):
        return {}
    if task == "survival":
        known = [train[survival.select_known(train[:, c]), c].T for c in range(k)]
        days = [parse_horizon(name)[1] for name in names]
        rates = np.array(
            [
                float(survival.estimate_incidence(*of).at(day)) if of.size else 0.0
                for of, day in zip(known, days, strict=True)
            ]
        )
        return {
            "prior": (
                "predicts for all the cumulative incidence of the training split",
                np.tile(rates, (n, 1)),
                None,
            )
        }
    if task == "regression":
        centers = {"mean": float(train.mean()), "median": float(np.median(train))}
        return {
            name: (f"always predicts the {name} of the training targets", np.full(n, v), None)
            for name, v in centers.items()
        }
    classes = task == "classification"
    rates = np.bincount(train, minlength=k) / len(train) if classes else _label_rates(train)
    likely = np.eye(k)[rates.argmax()] if classes else (rates >= 0.5).astype(np.float64)
    frequent = (
        "always predicts the most frequent training class"
        if classes
        else "predicts for each label its more frequent training value"
    )
    spread = np.tile(rates, (n, 1))
    random = "predicts at random with the training frequencies; expected values"
    return {
        "majority": (frequent, np.tile(likely, (n, 1)), None),
        "prior": (random, spread, spread),
    }


def length_baseline(task: str, train_lengths: Any, train_target: Any, lengths: Any) -> Array:
    """Predictions from the sequence length only: logistic or linear regression on log(1 + length)
    and its square.

    Pass it to `score(baselines={"length_only": ...})`.

    Args:
        task: classification, multilabel or regression.
        train_lengths: [m] events or observed samples of each training row.
        train_target: [m], multi-label [m, K], NaN = not known. Classes that do not occur in
            training get no probability; ids must be below K.
        lengths: [n] of the rows to score.

    Returns:
        [n, K] probabilities (K = largest training class + 1, or labels), or [n] values.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    y = np.asarray(train_target)
    x, new = (np.log1p(np.asarray(v, dtype=np.float64)) for v in (train_lengths, lengths))
    center, scale = x.mean(), x.std() or 1.0
    x, new = (np.stack([z, z**2], axis=1) for z in ((x - center) / scale, (new - center) / scale))
    if task == "regression":
        return np.asarray(Ridge(1e-3).fit(x, y).predict(new))

    def fit_logistic(of: Array, labels: Array, k: int) -> Array:
        out = np.zeros((len(new), k))
        kept = np.unique(labels)
        out[:, kept] = (
            LogisticRegression(max_iter=1000).fit(of, labels).predict_proba(new)
            if len(kept) > 1
            else 1.0
        )
        return out

    if task == "multilabel":
        known = [np.isfinite(column) for column in y.T.astype(np.float64)]
        return np.stack(
            [
                fit_logistic(x[k], column[k].astype(np.int64), 2)[:, 1]
                for column, k in zip(y.T, known, strict=True)
            ],
            axis=1,
        )
    return fit_logistic(x, y.astype(np.int64), int(y.max()) + 1)


def _empty_scores(task: str, class_names: Sequence[str], by: Unit, subject: str) -> TaskScores:
    """The scores of a split without rows: every metric null with the reason."""
    undefined = MetricValue(undefined_reason=EMPTY)
    each = ClassScores(**dict.fromkeys(EACH, undefined))
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
    r = check_rows(
        task, target, {"run": prediction, **(baselines or {})}, groups, class_names, by
    )._replace(subject=subject)
    described = {
        name: ({**ABOUT, **(about or {})}).get(name, "predictions on the same windows")
        for name in r.predictions
        if name != "run"
    }
    found = {name: ESTIMATORS[task](r, values, None) for name, values in r.predictions.items()}
    train = np.asarray([] if train_target is None else train_target)
    constants = constant_baselines(task, train, len(r.target), len(r.names), r.names)
    for name, (text, values, decisions) in constants.items():
        described[name], found[name] = text, ESTIMATORS[task](r, values, decisions)
    metrics = {name: build_metrics(r, found[name], bootstrap) for name in found}
    for name in constants:  # a constant that scores alike on every subject is not uncertain
        for m, one in found[name].metrics.items():
            spread = float(np.sqrt(estimate_variance(one.influence, one.weights.leverage)))
            if metrics[name][m].value is not None and is_rounding(
                spread, one.value, scaled=is_scaled(m)
            ):
                metrics[name][m] = MetricValue(
                    value=one.value, undefined_reason="no CI: the prediction is constant"
                )

    def subtract(name: str, m: str) -> MetricValue:
        difference = build_difference(
            found["run"].metrics[m],
            found[name].metrics[m],
            explain_no_interval(r, m, bootstrap),
            find_unit(m, unit),
        )
        return metrics[name][m].model_copy(update={"difference": difference})

    def label_areas(name: str) -> dict[str, dict[str, MetricValue]]:
        return {
            k: {"auroc": each.auroc, "auprc": each.auprc}
            for k, each in build_class_scores(r, found[name], bootstrap).items()
        }

    confusion = None
    if task == "classification":
        counts = np.zeros((len(r.names), len(r.names)), dtype=np.int64)
        np.add.at(counts, (r.target, r.predictions["run"].argmax(1)), 1)
        confusion = counts.tolist()
    return TaskScores(
        task=task,
        main=MAIN[task],
        unit=unit,
        n=len(r.target),
        n_subjects=r.n_subjects,
        metrics=metrics["run"],
        by_class={} if task == "regression" else build_class_scores(r, found["run"], bootstrap),
        confusion=confusion,
        baselines={
            name: Baseline(
                about=text,
                metrics={m: subtract(name, m) for m in metrics[name]},
                by_class=label_areas(name) if task == "multilabel" else None,
            )
            for name, text in described.items()
        },
        intervals=describe_intervals(r, by, subject),
        remarks=[
            str(rename_units(line, subject))
            for line in _list_remarks(r, explain_few_units(r, bootstrap))
        ],
    )


def _list_remarks(rows: ScoredRows, few: str | None) -> list[str]:
    out = []
    if rows.by == "window":
        out.append(
            "Intervals are over windows, not subjects: windows of one subject are correlated, so the intervals are too narrow."
        )
    if few is not None:
        out.append(f"No confidence intervals: {few}.")
    if rows.task == "classification":
        owners = [
            np.unique(rows.groups[rows.positive[:, k]])
            for k in np.flatnonzero(rows.positive.any(0))
        ]
        if (
            len(owners) > 1
            and all(len(o) == 1 for o in owners)
            and len(np.unique(np.concatenate(owners))) == len(owners)
        ):
            out.append(
                "Each class comes from one subject: classes and subjects cannot be separated."
            )
        absent = [rows.names[k] for k in np.flatnonzero(~rows.positive.any(0))]
        if absent:
            out.append(
                f"No row of the split is of class {', '.join(absent)}: excluded from means over classes."
            )
    return out


def name_unit(scores: TaskScores) -> str:
    """The word for the unit of the intervals: subject, recording, segment or window."""
    return scores.intervals.unit if scores.intervals else "subject"


def describe_units(scores: TaskScores) -> str:
    """The number of units that windows are grouped by, with their word: `12 subjects`, `50 segments
    (people may be shared)`.
    """
    unit = name_unit(scores)
    shared = "" if unit in {"subject", "window"} else " (people may be shared)"
    return f"{format_count(scores.n_subjects)} {'subject' if unit == 'window' else unit}s{shared}"


def score_figure(scores: TaskScores, metric: str | None = None) -> Figure | None:
    """The main score (or `metric`) and those of the baselines as a figure; the first block of a
    page is the headline. None: not defined.
    """
    name = metric or scores.main or ""
    ours = "this run" if getattr(scores, "encoder", None) is None else "this encoder"
    named = {b.replace("_", " "): baseline for b, baseline in scores.baselines.items()}
    parts = {
        ours: scores.metrics[name],
        **{b: baseline.metrics[name] for b, baseline in named.items()},
    }
    kept = {label: m for label, m in parts.items() if m.value is not None}
    if ours not in kept:
        return None
    title = f"{NAMES[name][0].upper()}{NAMES[name][1:]}"
    side = "lower" if name in LOWER_IS_BETTER else "higher"
    caption = f"{title} ({side} is better) on {format_count(scores.n)} windows of {describe_units(scores)}"
    if kept[ours].lo is not None:
        caption += f"; lines: 95 % CI over {name_unit(scores)}s"
    about = "; ".join(f"{b}: {baseline.about}" for b, baseline in named.items())
    caption += ". A useful model must exceed the baselines." + (f" {about}." if about else "")
    data = BarPlot(
        list(kept),
        [m.value for m in kept.values()],
        [m.lo for m in kept.values()],
        [m.hi for m in kept.values()],
        NAMES[name],
    )
    return Figure("main-score", title, caption, data)
