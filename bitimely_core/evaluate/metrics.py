"""Metrics as functions of row weights, so that all bootstrap replicates are one call. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.errors import Reason, input_error

Array = npt.NDArray[Any]
Unit = Literal["subject", "window"]
Statistic = Callable[[Array], dict[str, Array]]
"""`f(counts [R, U]) -> {name: [R]}` and `{name + "_each": [R, K]}`, NaN where undefined. All ones give the value itself."""
EMPTY = "the split holds no rows"
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "auroc", "auprc"),
    "multilabel": ("auprc", "auroc", "auprc_micro", "macro_f1", "accuracy"),
    "regression": ("mae", "rmse"),
}
MAIN = {"classification": "accuracy", "multilabel": "auprc", "regression": "mae"}
EACH = ("precision", "recall", "f1", "auroc", "auprc")  # of every class or label
LOWER_IS_BETTER = ("mae", "rmse")
NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "kappa": "Cohen's kappa",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "auprc_micro": "AUPRC, micro",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
}
MACRO = ("balanced_accuracy", "macro_f1", "auroc", "auprc")  # means over the classes that the rows define
COMPARES_CLASSES = (*MACRO, "auprc_micro")  # unreliable with few rows of a class


class ScoredRows(NamedTuple):
    """Checked rows of one split, sorted, so that scores do not depend on the order of the input."""

    task: str
    target: Array  # [n] int64 class, [n] float64 value, [n, K] int64 labels (0 where not known)
    known: Array  # [n, K] bool: False for labels that are not known, which count nowhere
    predictions: dict[str, Array]  # name -> [n, K] float64, regression [n]
    units: Array  # [n] int64
    n_units: int
    n_subjects: int
    groups: Array  # [n] int64
    names: tuple[str, ...]  # K
    by: Unit

    @property
    def positive(self) -> Array:
        """[n, K] bool: whether the row is of the class."""
        k = np.arange(len(self.names))
        return self.target[:, None] == k if self.task == "classification" else self.target.astype(bool)

    @property
    def support(self) -> Array:
        """[K] rows of each class."""
        return self.positive.sum(0)

    @property
    def others(self) -> Array:
        """[K] rows known not to be of the class."""
        return (self.known & ~self.positive).sum(0)

    @property
    def present(self) -> Array:
        """[K] bool: classes with rows both of the class and outside of it."""
        return (self.support > 0) & (self.others > 0)


def to_probabilities(task: str, logits: Any) -> Array:
    """Outputs of a head as `score` takes them, float64 [n, K] or [n]: softmax, sigmoid of each label, or the value itself."""
    x = np.asarray(logits, dtype=np.float64)
    if task == "regression":
        return x.reshape(len(x))
    if task == "multilabel":
        return 0.5 * (1.0 + np.tanh(0.5 * x))  # the sigmoid without overflow
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _require_finite(values: Array, what: str) -> None:
    bad = int((~np.isfinite(values)).reshape(len(values), -1).any(1).sum()) if len(values) else 0
    if bad:
        raise input_error(
            Reason.NON_FINITE,
            f"{bad} of {len(values)} rows have a {what} that is NaN or infinite",
            "nothing is scored: dropping them would bias the scores",
            "Look at the loss of the run and at the values of these windows",
            found=str(bad),
            expected="0",
        )


def check_rows(
    task: str,
    target: Any,
    predictions: Mapping[str, npt.ArrayLike],
    groups: Any,
    class_names: Sequence[str],
    by: Unit,
    rows: Any | None = None,
) -> ScoredRows:
    """Check and order the rows. The order is by `rows` where given, else by content, so that replicates do not depend on it."""
    if task not in METRICS:
        raise ValueError(f"task {task!r}, expected one of {', '.join(METRICS)}")
    if by not in ("subject", "window"):
        raise ValueError(f"by={by!r}, expected subject or window")
    y, names = np.asarray(target), () if task == "regression" else tuple(class_names)
    n, k = len(y), len(names)
    shape: tuple[int, ...] = (n,) if task == "regression" else (n, k)
    checked = {}
    for name, values in predictions.items():
        checked[name] = np.asarray(values, dtype=np.float64).reshape(shape if task == "regression" else np.shape(values))
        if checked[name].shape != shape:
            raise ValueError(f"prediction {name!r} has shape {checked[name].shape}, expected {shape} ({task}, {k} class names)")
        _require_finite(checked[name], "score" if name == "run" else f"score of {name}")
        if task == "classification" and n and not np.allclose(checked[name].sum(1), 1.0, atol=1e-3):
            raise ValueError(f"prediction {name!r} holds rows that do not sum to 1: pass evaluate.to_probabilities(task, logits)")
    if task == "regression":
        y = y.astype(np.float64).reshape(n)
        _require_finite(y, "target")
    else:
        unknown = np.isnan(y) if task == "multilabel" and y.dtype.kind == "f" else np.zeros(y.shape, dtype=bool)
        y = np.where(unknown, 0, y)
        if y.dtype.kind == "f":
            _require_finite(y, "target")
        y = y.astype(np.int64)
        if y.shape != (shape if task == "multilabel" else (n,)):
            raise ValueError(f"target has shape {y.shape} for {task} with {k} class names")
        if n and (y.min() < 0 or y.max() >= (2 if task == "multilabel" else k)):
            raise ValueError(f"target outside of the classes: {y.min()} to {y.max()}, {k} class names")
    g = np.asarray(groups)
    if g.shape != (n,):
        raise ValueError(f"groups have shape {g.shape}, expected {(n,)}")
    subjects, codes = np.unique(g.astype(str) if g.dtype == object else g, return_inverse=True)
    if rows is None:
        keys = [column for values in reversed(list(checked.values())) for column in np.atleast_2d(values.T)[::-1]]
        keys += [*np.atleast_2d(y.T)[::-1], codes]
    else:
        keys = [np.asarray(rows).astype(str) if np.asarray(rows).dtype == object else np.asarray(rows)]
    order = np.lexsort(keys)
    codes = codes[order].astype(np.int64)
    units, n_units = (codes, len(subjects)) if by == "subject" else (np.arange(n), n)
    ordered = {name: v[order] for name, v in checked.items()}
    known = ~unknown[order] if task == "multilabel" else np.ones((n, max(k, 1)), dtype=bool)
    return ScoredRows(task, y[order], known, ordered, units, n_units, len(subjects), codes, names, by)


def rank_scores(score: Array, positive: Array, units: Array) -> Callable[[Array], tuple[Array, Array]]:
    """AUROC and average precision of one `score` [n] float64 against one class [n] bool, for many weights; the scores are sorted once.

    Equal scores form one group g with weights P_g, N_g of positives and negatives. In ascending order, cumN including g,
    `AUROC = sum_g P_g (cumN_g - N_g / 2) / (P N)`: every pair counts, ties one half. In descending order
    `AP = sum_g P_g cumP_g / (cumP_g + cumN_g) / P`: precision at each threshold, weighted by the recall that it adds (no trapezoid).

    Returns `f(counts [R, U]) -> (auroc [R], ap [R])`, NaN where a side has no weight; `units` [n] int64 is the unit of each row.
    """
    if not len(score):  # labels known in no row
        return lambda counts: (np.full(len(counts), np.nan), np.full(len(counts), np.nan))
    order = np.argsort(score, kind="stable")
    s, y, u = score[order], positive[order].astype(np.float64), units[order]
    starts = np.flatnonzero(np.concatenate([[True], s[1:] != s[:-1]]))
    ties = len(starts) < len(s)

    def areas(counts: Array) -> tuple[Array, Array]:
        weight = counts[:, u]
        pos = weight * y
        neg = weight - pos
        if ties:
            pos, neg = np.add.reduceat(pos, starts, axis=1), np.add.reduceat(neg, starts, axis=1)
        cum_pos, cum_neg = np.cumsum(pos, axis=1), np.cumsum(neg, axis=1)
        P, N = cum_pos[:, -1], cum_neg[:, -1]
        auroc = np.einsum("rg,rg->r", pos, cum_neg - 0.5 * neg)
        at_least_pos = P[:, None] - cum_pos + pos
        at_least = at_least_pos + N[:, None] - cum_neg + neg
        precision = np.divide(at_least_pos, at_least, out=np.zeros_like(at_least), where=at_least > 0)
        ap = np.einsum("rg,rg->r", pos, precision)
        with np.errstate(divide="ignore", invalid="ignore"):
            defined = (P > 0) & (N > 0)
            return np.where(defined, auroc / (P * N), np.nan), np.where(defined, ap / P, np.nan)

    return areas


def _macro_mean(each: Array, present: Array) -> Array:
    """Macro mean [R] of [R, K] over the present classes; NaN in replicates that lack one of them, or without any."""
    return each[:, present].mean(1) if present.any() else np.full(len(each), np.nan)


def _rank_classes(rows: ScoredRows, prediction: Array) -> Callable[[Array], tuple[Array, Array]]:
    """AUROC and average precision of every class against the rest, [R, K] each."""
    present, positive, k = rows.present, rows.positive, len(rows.names)
    columns = [int(c) for c in np.flatnonzero(present)]
    if rows.task == "classification" and k == 2:
        columns = [c for c in columns if c == 1]  # the second class is the positive one
    seen = {c: rows.known[:, c] for c in columns}
    areas = {c: rank_scores(prediction[kept, c], positive[kept, c], rows.units[kept]) for c, kept in seen.items()}

    def each(counts: Array) -> tuple[Array, Array]:
        auroc, ap = np.full((2, len(counts), k), np.nan)
        for c, f in areas.items():
            auroc[:, c], ap[:, c] = f(counts)
        return auroc, ap

    return each


def _classification_statistic(rows: ScoredRows, prediction: Array, decisions: Array | None) -> Statistic:
    """All metrics from one confusion table per unit. `decisions` [n, K] may be probabilities: expected tables."""
    k, present = len(rows.names), rows.present
    if decisions is None:
        decisions = np.eye(k)[prediction.argmax(1)]
    tables = np.zeros((rows.n_units, k, k))
    np.add.at(tables, (rows.units, rows.target), decisions)
    ranks = _rank_classes(rows, prediction)
    averaged = present & (np.arange(k) == 1) if k == 2 else present

    def statistic(counts: Array) -> dict[str, Array]:
        confusion = (counts @ tables.reshape(rows.n_units, k * k)).reshape(-1, k, k)
        support, predicted, hits = confusion.sum(2), confusion.sum(1), np.einsum("rkk->rk", confusion)
        total = support.sum(1)
        chance = (support * predicted).sum(1)
        auroc, ap = ranks(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            recall = np.where(support > 0, hits / support, np.nan)
            precision = np.where(predicted > 0, hits / predicted, np.nan)
            f1 = np.where(support > 0, 2 * hits / (support + predicted), np.nan)
            agreement = (total * hits.sum(1) - chance) / (total**2 - chance)
            return {
                "accuracy": hits.sum(1) / total,
                "balanced_accuracy": _macro_mean(recall, present),
                "macro_f1": _macro_mean(f1, present),
                "kappa": np.where((total**2 > chance) & present.any(), agreement, np.nan),
                "auroc": _macro_mean(auroc, averaged),
                "auprc": _macro_mean(ap, averaged),
                "recall_each": recall,
                "precision_each": precision,
                "f1_each": f1,
                "auroc_each": auroc,
                "auprc_each": ap,
            }

    return statistic


def _multilabel_statistic(rows: ScoredRows, prediction: Array, decisions: Array | None) -> Statistic:
    """Metrics of every label and their means; a label is predicted from a probability of 0.5."""
    k, present = len(rows.names), rows.present
    decided = (prediction >= 0.5).astype(np.float64) if decisions is None else decisions
    true, known = rows.target.astype(np.float64), rows.known.astype(np.float64)
    decided = decided * known
    sums = np.zeros((4, rows.n_units, k))  # hits, support, predicted, rows
    for into, values in zip(sums, (decided * true, true, decided, known), strict=True):
        np.add.at(into, rows.units, values)
    ranks = _rank_classes(rows, prediction)
    kept = rows.known.ravel()
    micro = rank_scores(prediction.ravel()[kept], rows.positive.ravel()[kept], np.repeat(rows.units, k)[kept])

    def statistic(counts: Array) -> dict[str, Array]:
        hits, support, given, total = (counts @ part for part in sums)
        auroc, ap = ranks(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            f1 = np.where(support > 0, 2 * hits / (support + given), np.nan)
            return {
                "accuracy": ((total - support - given + 2 * hits).sum(1)) / total.sum(1),
                "macro_f1": _macro_mean(f1, present),
                "auroc": _macro_mean(auroc, present),
                "auprc": _macro_mean(ap, present),
                "auprc_micro": micro(counts)[1],
                "recall_each": np.where(support > 0, hits / support, np.nan),
                "precision_each": np.where(given > 0, hits / given, np.nan),
                "f1_each": f1,
                "auroc_each": auroc,
                "auprc_each": ap,
            }

    return statistic


def _regression_statistic(rows: ScoredRows, prediction: Array, decisions: Array | None = None) -> Statistic:
    """Sums per unit, then weighted ratios: the number of rows differs between replicates."""
    error = prediction - rows.target
    sums = np.stack([np.bincount(rows.units, v, rows.n_units) for v in (np.abs(error), error**2, np.ones_like(error))])

    def statistic(counts: Array) -> dict[str, Array]:
        absolute, squared, total = (counts @ part for part in sums)
        return {"mae": absolute / total, "rmse": np.sqrt(squared / total)}

    return statistic


STATISTICS: dict[str, Callable[[ScoredRows, Array, Array | None], Statistic]] = {
    "classification": _classification_statistic,
    "multilabel": _multilabel_statistic,
    "regression": _regression_statistic,
}
