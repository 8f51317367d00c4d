"""Metrics of a prediction with the influence of every unit on them, from sums by unit and one sort
a class. Legend: `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.errors import Reason, input_error
from bitimely_core.types import parse_horizon

Array = npt.NDArray[Any]
Unit = Literal["subject", "window"]
EMPTY = "the split holds no rows"
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "auroc", "auprc"),
    "multilabel": ("auprc", "auroc", "auprc_micro", "macro_f1", "accuracy"),
    "regression": ("mae", "rmse"),
    "survival": ("c_index", "auroc", "brier"),
}
MAIN = {
    "classification": "accuracy",
    "multilabel": "auprc",
    "regression": "mae",
    "survival": "c_index",
}
EACH = ("precision", "recall", "f1", "auroc", "auprc")  # of every class or label
LOWER_IS_BETTER = ("mae", "rmse", "brier")
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
    "c_index": "Harrell's C",
    "brier": "Brier score",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
}
# means over the classes that the rows define
MACRO = ("balanced_accuracy", "macro_f1", "auroc", "auprc")
COMPARES_CLASSES = (*MACRO, "auprc_micro")  # unreliable with few rows of a class
ROUNDING = 1e-12  # of a kappa: agreement so close to that of chance is that of chance


class MetricUnit(NamedTuple):
    """The unit in which differences of a metric are printed."""

    name: str  # "1": a number without unit
    factor: float  # from the stored number to the printed one
    scaled: bool = False  # with the values of the target, of which any unit is as good

    @property
    def suffix(self) -> str:
        """What follows a number in a text."""
        return "" if self.name == "1" else f" {self.name}"


def find_unit(metric: str, target: str | None = None) -> MetricUnit:
    """The unit of differences of `metric`; `target` is that of the values of a regression."""
    if metric in ("mae", "rmse"):
        return MetricUnit(target or "units of the target", 1.0, scaled=True)
    return MetricUnit("1", 1.0) if metric in ("kappa", "brier") else MetricUnit("points", 100.0)


class UnitWeights(NamedTuple):
    """How much the units count in a metric."""

    leverage: Array  # [U] share of the unit in the rows that define the metric
    df: float  # degrees of freedom of its variance
    rows: int

    @property
    def effective(self) -> float:
        """Number of units of equal weight that carry as much information (Kish)."""
        squares = float((self.leverage**2).sum())
        return float(self.leverage.sum()) ** 2 / squares if squares else 0.0


class Estimate(NamedTuple):
    """A metric and its derivatives with respect to the weights of the units, at weights of one."""

    value: float  # NaN: not defined
    influence: Array  # [U], sums to zero
    weights: UnitWeights


class Estimates(NamedTuple):
    """All metrics of one prediction."""

    metrics: dict[str, Estimate]
    each: dict[str, list[Estimate]]  # of every class or label


class ScoredRows(NamedTuple):
    """Checked rows of one split, sorted, so that scores do not depend on the order of the input."""

    task: str
    target: (
        # [n] int64 class, [n] float64 value, [n, K] int64 labels (0 where not known), [n, K, 2]
        # times and events (NaN: not known)
        Array
    )
    known: Array  # [n, K] bool: False for labels that are not known, which count nowhere
    predictions: dict[str, Array]  # name -> [n, K] float64, regression [n]
    units: Array  # [n] int64
    n_units: int
    n_subjects: int
    groups: Array  # [n] int64
    names: tuple[str, ...]  # K
    by: Unit
    subject: str = "subject"  # what a subject is: subject, recording, segment

    @property
    def unit(self) -> str:
        """The word for a unit."""
        return self.subject if self.by == "subject" else "window"

    @property
    def positive(self) -> Array:
        """[n, K] bool: whether the row is of the class."""
        k = np.arange(len(self.names))
        if self.task == "survival":
            days = np.array([parse_horizon(name)[1] for name in self.names])
            return (self.target[..., 1] == 1) & (self.target[..., 0] <= days)
        return (
            self.target[:, None] == k if self.task == "classification" else self.target.astype(bool)
        )

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
    """Outputs of a head as `score` takes them, float64 [n, K] or [n]: softmax, sigmoid of each
    label, or the value itself.
    """
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
) -> ScoredRows:
    """Check the rows and order them by their content, so that not one digit depends on the order of
    the input.
    """
    if task not in METRICS:
        raise ValueError(f"task {task!r}, expected one of {', '.join(METRICS)}")
    if by not in ("subject", "window"):
        raise ValueError(f"by={by!r}, expected subject or window")
    y, names = np.asarray(target), () if task == "regression" else tuple(class_names)
    n, k = len(y), len(names)
    shape: tuple[int, ...] = (n,) if task == "regression" else (n, k)
    checked = {}
    for name, values in predictions.items():
        checked[name] = np.asarray(values, dtype=np.float64).reshape(
            shape if task == "regression" else np.shape(values)
        )
        if checked[name].shape != shape:
            raise ValueError(
                f"prediction {name!r} has shape {checked[name].shape}, expected {shape} ({task}, {k} class names)"
            )
        _require_finite(checked[name], "score" if name == "run" else f"score of {name}")
        if task == "classification" and n and not np.allclose(checked[name].sum(1), 1.0, atol=1e-3):
            raise ValueError(
                f"prediction {name!r} holds rows that do not sum to 1: pass evaluate.to_probabilities(task, logits)"
            )
    if task == "regression":
        y = y.astype(np.float64).reshape(n)
        _require_finite(y, "target")
    elif task == "survival":
        y, days = (
            y.astype(np.float64).reshape(n, k, 2),
            np.array([parse_horizon(name)[1] for name in names]),
        )
        known = (y[..., 0] > days) | (y[..., 1] > 0)  # the state at the horizon
    else:
        unknown = (
            np.isnan(y)
            if task == "multilabel" and y.dtype.kind == "f"
            else np.zeros(y.shape, dtype=bool)
        )
        y = np.where(unknown, 0, y)
        if y.dtype.kind == "f":
            _require_finite(y, "target")
        y = y.astype(np.int64)
        if y.shape != (shape if task == "multilabel" else (n,)):
            raise ValueError(f"target has shape {y.shape} for {task} with {k} class names")
        if n and (y.min() < 0 or y.max() >= (2 if task == "multilabel" else k)):
            raise ValueError(
                f"target outside of the classes: {y.min()} to {y.max()}, {k} class names"
            )
    g = np.asarray(groups)
    if g.shape != (n,):
        raise ValueError(f"groups have shape {g.shape}, expected {(n,)}")
    subjects, codes = np.unique(g.astype(str) if g.dtype == object else g, return_inverse=True)
    keys = [
        column
        for values in reversed(list(checked.values()))
        for column in np.atleast_2d(values.T)[::-1]
    ]
    order = np.lexsort([*keys, *np.atleast_2d(y.reshape(n, -1).T)[::-1], codes])
    codes = codes[order].astype(np.int64)
    units, n_units = (codes, len(subjects)) if by == "subject" else (np.arange(n), n)
    ordered = {name: v[order] for name, v in checked.items()}
    if task != "survival":
        known = ~unknown if task == "multilabel" else np.ones((n, max(k, 1)), dtype=bool)
    return ScoredRows(
        task, y[order], known[order], ordered, units, n_units, len(subjects), codes, names, by
    )


def weigh_units(leverage: Array, rows: int, spent: float = 0.0) -> UnitWeights:
    """Weights whose degrees of freedom are the effective number of units less one and `spent`."""
    weights = UnitWeights(leverage, 1.0, rows)
    return weights._replace(df=max(1.0, weights.effective - 1.0 - spent))


def _sum_by_unit(rows: ScoredRows, values: Array) -> Array:
    """[n] -> [U] sums, [n, K] -> [U, K]."""
    if values.ndim == 1:
        return np.bincount(rows.units, values, rows.n_units)
    return np.stack([np.bincount(rows.units, column, rows.n_units) for column in values.T], axis=1)


def _divide(a: Array, b: Array) -> Array:
    """A / b, NaN where b is 0."""
    return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, np.nan), where=np.asarray(b) != 0)


def _estimate_ratios(of: Array, among: Array, weights: Sequence[UnitWeights]) -> list[Estimate]:
    """Ratios sum(of) / sum(among) of K columns [U, K]."""
    total = among.sum(0)
    value = _divide(of.sum(0), total)
    influence = _divide(of - among * value, total)
    return [Estimate(float(v), d, w) for v, d, w in zip(value, influence.T, weights, strict=True)]


def _estimate_mean(
    each: Sequence[Estimate], present: Array, weights: UnitWeights, units: int
) -> Estimate:
    """The macro mean over the present classes."""
    kept = [one for one, there in zip(each, present, strict=True) if there]
    if not kept or any(np.isnan(one.value) for one in kept):
        return Estimate(float("nan"), np.zeros(units), weights)
    return Estimate(
        float(np.mean([one.value for one in kept])),
        np.mean([one.influence for one in kept], axis=0),
        weights,
    )


def estimate_ranking(
    score: Array, positive: Array, units: Array, n_units: int, weights: UnitWeights
) -> tuple[Estimate, Estimate]:
    """AUROC and average precision of one `score` [n] against one class [n] bool; `units` [n] int64.

    Equal scores form one group g with P_g positives and N_g negatives. With cumulative sums from
    the highest score down to g, `AUROC = sum_g P_g (N - cumN_g + N_g / 2) / (P N)`: every pair
    counts, ties one half; `AP = sum_g P_g cumP_g / (cumP_g + cumN_g) / P`: precision at each
    threshold, weighted by the recall that it adds (no trapezoid). NaN where a side has no row.
    """
    nan = Estimate(float("nan"), np.zeros(n_units), weights)
    P = int(positive.sum())
    N = len(positive) - P
    if not P or not N:
        return nan, nan
    order = np.argsort(-score, kind="stable")
    s, y, u = score[order], positive[order], units[order]
    first = np.concatenate([[True], s[1:] != s[:-1]])
    group, start = np.cumsum(first) - 1, np.flatnonzero(first)
    pg = np.add.reduceat(y.astype(np.float64), start)
    ng = np.diff(np.append(start, len(s))) - pg
    tp, fp = np.cumsum(pg), np.cumsum(ng)
    # shares of negatives below and of positives above a row of the group
    below, above = (N - fp + ng / 2) / N, (tp - pg / 2) / P
    auroc = float((pg * below).sum() / P)
    place = np.where(y, (below[group] - auroc) / P, (above[group] - auroc) / N)
    precision = tp / (tp + fp)
    ap = float((pg * precision).sum() / P)
    gain, loss = (np.cumsum((pg / P * other / (tp + fp) ** 2)[::-1])[::-1] for other in (fp, tp))
    move = np.where(y, (precision[group] - ap) / P + gain[group], -loss[group])
    return Estimate(auroc, np.bincount(u, place, n_units), weights), Estimate(
        ap, np.bincount(u, move, n_units), weights
    )


def _estimate_classes(
    rows: ScoredRows, prediction: Array, weights: Sequence[UnitWeights]
) -> tuple[list[Estimate], list[Estimate]]:
    """AUROC and average precision of every class against the rest; of two classes the second is the
    positive one.
    """
    nan = Estimate(float("nan"), np.zeros(rows.n_units), weights[0])
    out = [(nan, nan)] * len(rows.names)
    for k in np.flatnonzero(rows.present).tolist():
        if rows.task == "multilabel" or len(rows.names) != 2 or k == 1:
            kept = rows.known[:, k]
            out[k] = estimate_ranking(
                prediction[kept, k],
                rows.positive[kept, k],
                rows.units[kept],
                rows.n_units,
                weights[k],
            )
    return [auroc for auroc, _ in out], [ap for _, ap in out]


def _weigh_sides(positive: Array, negative: Array) -> list[UnitWeights]:
    """Weights of every class against the rest, from rows of each unit [U, K]: the larger of the
    unit's shares in the two sides.
    """
    out = []
    for p, n in zip(positive.T, negative.T, strict=True):
        holds = (p + n) > 0
        single = float(((p == 0) | (n == 0))[holds].mean()) if holds.any() else 0.0
        out.append(
            weigh_units(
                np.maximum(p / max(p.sum(), 1), n / max(n.sum(), 1)), int((p + n).sum()), single
            )
        )
    return out


def _classification_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None
) -> Estimates:
    """All metrics from one confusion table a unit. `decisions` [n, K] may be probabilities:
    expected tables.
    """
    k, u, present = len(rows.names), rows.n_units, rows.present
    cell = (rows.units * k + rows.target) * k
    if decisions is None:
        tables = (
            np.bincount(cell + prediction.argmax(1), minlength=u * k * k)
            .reshape(u, k, k)
            .astype(np.float64)
        )
    else:
        tables = np.stack(
            [np.bincount(cell, column, u * k * k)[::k].reshape(u, k) for column in decisions.T],
            axis=2,
        )
    true, given, hits = tables.sum(2), tables.sum(1), np.einsum("ukk->uk", tables)
    n, N = true.sum(1), float(true.sum())
    S, P, H = true.sum(0), given.sum(0), float(hits.sum())
    shares = true / np.maximum(S, 1)
    several = shares[:, present] if present.any() else (n / N)[:, None]
    spent = float((((true > 0).sum(1) == 1)[n > 0]).mean()) * (max(int(present.sum()), 1) - 1)
    equal, mean, most = (
        weigh_units(lever, int(N), cost)
        for lever, cost in ((n / N, 0.0), (several.mean(1), spent), (several.max(1), spent))
    )
    sides = _weigh_sides(true, n[:, None] - true)
    own = [weigh_units(shares[:, c], int(S[c])) for c in range(k)]
    recall, f1 = _estimate_ratios(hits, true, own), _estimate_ratios(2 * hits, true + given, sides)
    f1 = [one if S[c] else one._replace(value=float("nan")) for c, one in enumerate(f1)]
    precision = _estimate_ratios(
        hits, given, [weigh_units(given[:, c] / max(P[c], 1), int(P[c])) for c in range(k)]
    )
    auroc, ap = _estimate_classes(rows, prediction, sides)
    averaged = present & (np.arange(k) == 1) if k == 2 else present
    chance = float(S @ P)
    value = (N * H - chance) / (N**2 - chance) if chance < N**2 and present.any() else float("nan")
    value = 0.0 if abs(value) < ROUNDING else value
    moved = true @ P + given @ S
    influence = np.nan_to_num(
        _divide(
            n * H + N * hits.sum(1) - moved - value * (2 * N * n - moved), np.array(N**2 - chance)
        )
    )
    return Estimates(
        {
            "accuracy": _estimate_ratios(hits.sum(1, keepdims=True), n[:, None], [equal])[0],
            "balanced_accuracy": _estimate_mean(recall, present, most, u),
            "macro_f1": _estimate_mean(f1, present, mean, u),
            "kappa": Estimate(value, influence, mean),
            "auroc": _estimate_mean(auroc, averaged, most, u),
            "auprc": _estimate_mean(ap, averaged, most, u),
        },
        {"recall": recall, "precision": precision, "f1": f1, "auroc": auroc, "auprc": ap},
    )


def _multilabel_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None
) -> Estimates:
    """Metrics of every label and their means; a label is predicted from a probability of 0.5."""
    k, u, present = len(rows.names), rows.n_units, rows.present
    decided = ((prediction >= 0.5) if decisions is None else decisions) * rows.known
    hits, true, given, total = (
        _sum_by_unit(rows, v) for v in (decided * rows.target, rows.target, decided, rows.known)
    )
    sides = _weigh_sides(true, total - true)
    kept = [w for w, there in zip(sides, present, strict=True) if there] or sides
    cells = total.sum(1, keepdims=True)
    equal = weigh_units((cells / max(cells.sum(), 1))[:, 0], int(cells.sum()))
    lever = np.mean([w.leverage for w in kept], axis=0)
    mean = UnitWeights(lever, float(np.mean([w.df for w in kept])), int(cells.sum()))
    recall = _estimate_ratios(
        hits,
        true,
        [
            weigh_units(true[:, c] / max(true[:, c].sum(), 1), int(true[:, c].sum()))
            for c in range(k)
        ],
    )
    f1 = [
        one if true[:, c].any() else one._replace(value=float("nan"))
        for c, one in enumerate(_estimate_ratios(2 * hits, true + given, sides))
    ]
    precision = _estimate_ratios(
        hits, given, [weigh_units(g / max(g.sum(), 1), int(g.sum())) for g in given.T]
    )
    auroc, ap = _estimate_classes(rows, prediction, sides)
    pooled = _weigh_sides(true.sum(1, keepdims=True), (total - true).sum(1, keepdims=True))[0]
    flat = rows.known.ravel()
    micro = estimate_ranking(
        prediction.ravel()[flat],
        rows.positive.ravel()[flat],
        np.repeat(rows.units, k)[flat],
        u,
        pooled,
    )[1]
    right = (total - true - given + 2 * hits).sum(1, keepdims=True)
    return Estimates(
        {
            "auprc": _estimate_mean(ap, present, mean, u),
            "auroc": _estimate_mean(auroc, present, mean, u),
            "auprc_micro": micro,
            "macro_f1": _estimate_mean(f1, present, mean, u),
            "accuracy": _estimate_ratios(right, cells, [equal])[0],
        },
        {"recall": recall, "precision": precision, "f1": f1, "auroc": auroc, "auprc": ap},
    )


def _regression_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None = None
) -> Estimates:
    """Means of absolute and squared errors; the influence on the root is that on the mean over
    twice the root.
    """
    error = prediction - rows.target
    n = _sum_by_unit(rows, np.ones_like(error))[:, None]
    equal = weigh_units((n / n.sum())[:, 0], len(error))
    mae, mse = (
        _estimate_ratios(_sum_by_unit(rows, v)[:, None], n, [equal])[0]
        for v in (np.abs(error), error**2)
    )
    root = float(np.sqrt(mse.value))
    return Estimates(
        {
            "mae": mae,
            "rmse": Estimate(root, mse.influence / (2 * root) if root else mse.influence, equal),
        },
        {},
    )


ESTIMATORS: dict[str, Callable[[ScoredRows, Array, Array | None], Estimates]] = {
    "classification": _classification_estimates,
    "multilabel": _multilabel_estimates,
    "regression": _regression_estimates,
}
