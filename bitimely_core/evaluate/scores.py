"""The scores of one run on one split, with baselines that need no model. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitimely_core.evaluate.bootstrap import (
    build_class_scores,
    build_metric,
    build_metrics,
    describe_resampling,
    explain_few_units,
    explain_no_interval,
    run_bootstrap,
)
from bitimely_core.evaluate.metrics import (
    EACH,
    EMPTY,
    LOWER_IS_BETTER,
    MAIN,
    METRICS,
    NAMES,
    STATISTICS,
    Array,
    ScoredRows,
    Unit,
    check_rows,
)
from bitimely_core.evaluate.paired import build_difference
from bitimely_core.page import Figure


def _label_rates(labels: Array) -> Array:
    """Share of ones among the known labels, [n, K] -> [K]; 0 where none is known."""
    y = labels.astype(np.float64)
    return np.asarray(np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(0), 1))


def constant_baselines(task: str, train: Array, n: int, k: int) -> dict[str, tuple[str, Array, Array | None]]:
    """What a model that never looks at its input would say: name -> (words, prediction, decisions), from training targets alone."""
    if not len(train):
        return {}
    if task == "regression":
        mean, median = float(train.mean()), float(np.median(train))
        return {
            "mean": ("always answers the mean of the training targets", np.full(n, mean), None),
            "median": ("always answers the median of the training targets", np.full(n, median), None),
        }
    rates = np.bincount(train, minlength=k) / len(train) if task == "classification" else _label_rates(train)
    likely = np.eye(k)[rates.argmax()] if task == "classification" else (rates >= 0.5).astype(np.float64)
    spread = np.tile(rates, (n, 1))
    return {
        "majority": (
            "always answers the most frequent training class"
            if task == "classification"
            else "answers for each label its commoner training value",
            np.tile(likely, (n, 1)),
            None,
        ),
        "prior": ("guesses at the frequencies of the training targets; expected values", spread, spread),
    }


def length_baseline(task: str, train_lengths: Any, train_target: Any, lengths: Any) -> Array:
    """What the length of a sequence alone gives away: logistic or linear regression on log(1 + length) and its square, from training rows.

    Pass it to `score(baselines={"length_only": ...})`.

    Args:
        task: classification, multilabel or regression.
        train_lengths: [m] events or observed samples of each training row.
        train_target: [m], multi-label [m, K], NaN = not known. Classes that do not occur in training get no probability; ids must be below K.
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

    def fitted(of: Array, labels: Array, k: int) -> Array:
        out = np.zeros((len(new), k))
        kept = np.unique(labels)
        out[:, kept] = LogisticRegression(max_iter=1000).fit(of, labels).predict_proba(new) if len(kept) > 1 else 1.0
        return out

    if task == "multilabel":
        known = [np.isfinite(column) for column in y.T.astype(np.float64)]
        return np.stack([fitted(x[k], column[k].astype(np.int64), 2)[:, 1] for column, k in zip(y.T, known, strict=True)], axis=1)
    return fitted(x, y.astype(np.int64), int(y.max()) + 1)


def _empty_scores(task: str, class_names: Sequence[str], bootstrap: int, by: Unit, seed: int) -> dict[str, Any]:
    """The scores of a split that holds nothing: every metric null with the reason."""
    nothing = build_metric(np.nan, np.empty(0), EMPTY, None)
    each = {m: dict(nothing) for m in EACH}
    return {
        "task": task,
        "main": MAIN[task],
        "n": 0,
        "n_subjects": 0,
        "metrics": {m: dict(nothing) for m in METRICS[task]},
        "by_class": {} if task == "regression" else {c: {"support": 0, "subjects": 0, "base_rate": None, **each} for c in class_names},
        "confusion": None,
        "baselines": {},
        "remarks": ["The split holds no rows, so there is nothing to score."],
        "resampling": describe_resampling(None, bootstrap, by, seed),
    }


def score(
    task: str,
    target: Any,
    prediction: Any,
    groups: Any,
    *,
    class_names: Sequence[str] = (),
    train_target: Any | None = None,
    baselines: Mapping[str, Any] | None = None,
    rows: Any | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    seed: int = 0,
) -> dict[str, Any]:
    """Metrics with intervals, per class, beside what needs no model. Everything is JSON; the order of the rows does not matter.

    AUROC and AUPRC of several classes are means over classes against the rest; of two classes the second is the positive one; of labels
    they are means over labels.

    Args:
        task: classification, multilabel or regression.
        target: [n] class ids, [n, K] labels in {0, 1} (NaN: not known, such a label of such a row counts nowhere), or [n] values.
        prediction: [n, K] probabilities (`probabilities(task, logits)`), or [n] values.
        groups: [n] subjects.
        class_names: K names, in the order of the columns; not read for regression.
        train_target: targets of the training split, for the baselines; None: none are made.
        baselines: further predictions on the same rows, such as `{"length_only": length_baseline(...)}`.
        rows: [n] identity of the rows; makes replicates of by="window" independent of the last digits of the predictions.
        bootstrap: replicates R; 0: no intervals.
        by: what is resampled; "window" ignores that windows of one subject resemble each other, and is stamped.
        seed: of the draws.

    Returns:
        `{task, main, n, n_subjects, metrics, by_class, confusion, baselines, resampling, remarks}`. Rows of `confusion` are true classes.
        A baseline is `{about, <metric>: {...}}`, of labels with `by_class`; each of its metrics also has `difference`, the paired one, run
        minus baseline.

    Raises:
        UserError: non_finite, where a prediction is NaN or infinite.
    """
    if len(np.asarray(target)) == 0:
        return _empty_scores(task, class_names, bootstrap, by, seed)
    r = check_rows(task, target, {"run": prediction, **(baselines or {})}, groups, class_names, by, rows)
    make = STATISTICS[task]
    about = dict.fromkeys(r.predictions, "predictions on the same windows")
    statistics = {name: make(r, values, None) for name, values in r.predictions.items()}
    train = np.asarray([] if train_target is None else train_target)
    for name, (words, values, decisions) in constant_baselines(task, train, len(r.target), len(r.names)).items():
        about[name], statistics[name] = words, make(r, values, decisions)
    points, draws = run_bootstrap(statistics, r, bootstrap, seed)
    metrics = {name: build_metrics(r, points[name], draws[name], bootstrap) for name in statistics}
    for name in about:
        for m, metric in metrics[name].items() if name != "run" else ():
            metric["difference"] = build_difference(
                points["run"][m] - points[name][m], draws["run"][m] - draws[name][m], explain_no_interval(r, m, bootstrap)
            )
    labels = {
        name: {
            k: {m: each[m] for m in ("auroc", "auprc")} for k, each in build_class_scores(r, points[name], draws[name], bootstrap).items()
        }
        for name in (about if task == "multilabel" else ())
    }
    confusion = None
    if task == "classification":
        confusion = np.zeros((len(r.names), len(r.names)), dtype=np.int64)
        np.add.at(confusion, (r.target, r.predictions["run"].argmax(1)), 1)
    return {
        "task": task,
        "main": MAIN[task],
        "n": len(r.target),
        "n_subjects": r.n_subjects,
        "metrics": metrics.pop("run"),
        "by_class": {} if task == "regression" else build_class_scores(r, points["run"], draws["run"], bootstrap),
        "confusion": None if confusion is None else confusion.tolist(),
        "baselines": {
            name: {"about": about[name], **found, **({"by_class": labels[name]} if name in labels else {})}
            for name, found in metrics.items()
        },
        "resampling": describe_resampling(r, bootstrap, by, seed),
        "remarks": _list_remarks(r, explain_few_units(r, bootstrap)),
    }


def _list_remarks(rows: ScoredRows, few: str | None) -> list[str]:
    """What a reader must know before the numbers."""
    out = []
    if rows.by == "window":
        out.append("Intervals resample windows, not subjects: windows of one subject resemble each other, so the intervals are too narrow.")
    if few is not None:
        out.append(f"There are no intervals: {few}.")
    if rows.task == "classification":
        owners = [np.unique(rows.groups[rows.positive[:, k]]) for k in np.flatnonzero(rows.positive.any(0))]
        if len(owners) > 1 and all(len(o) == 1 for o in owners) and len(np.unique(np.concatenate(owners))) == len(owners):
            out.append("Each class is one subject: the score cannot tell whether the model knows the class or the person.")
        absent = [rows.names[k] for k in np.flatnonzero(~rows.positive.any(0))]
        if absent:
            out.append(f"No row of the split is of class {', '.join(absent)}: means over classes leave it out.")
    return out


def score_figure(scores: Mapping[str, Any], metric: str | None = None) -> Figure | None:
    """The main score beside its baselines as a figure; put first on a page it becomes the page's headline. None: it is not defined.

    Args:
        scores: what `score` returned.
        metric: which metric; None: the main one of the task.
    """
    name = metric or scores["main"]
    parts = [("this run", scores["metrics"][name]), *((b.replace("_", " "), m[name]) for b, m in scores["baselines"].items())]
    kept = [(label, m) for label, m in parts if m["value"] is not None]
    if not kept or kept[0][0] != "this run":
        return None
    about = "; ".join(f"{b.replace('_', ' ')}: {m['about']}" for b, m in scores["baselines"].items())
    unit = {"subject": "subjects", "window": "windows"}[scores["resampling"]["by"]]
    side = "lower" if name in LOWER_IS_BETTER else "higher"
    caption = (
        f"{NAMES[name][0].upper()}{NAMES[name][1:]} ({side} is better) on {scores['n']:,} windows of {scores['n_subjects']:,} subjects"
    )
    if kept[0][1]["lo"] is not None:
        caption += f"; lines are 95 % intervals from {scores['resampling']['replicates']:,} resamples of {unit}"
    return Figure(
        name="main-score",
        title=f"{NAMES[name][0].upper()}{NAMES[name][1:]}",
        caption=f"{caption}. A model that does not clear the baselines has learnt nothing that its input is needed for."
        + (f" {about}." if about else ""),
        kind="bars",
        data={
            "names": [label for label, _ in kept],
            "values": [m["value"] for _, m in kept],
            "lo": [m["lo"] for _, m in kept],
            "hi": [m["hi"] for _, m in kept],
            "ylabel": NAMES[name],
        },
    )
