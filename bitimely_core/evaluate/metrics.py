"""The metrics of a prediction, each with the influence that every unit has on it.

Everything comes from sums by unit and one sort a class. Legend: `evaluate`.
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
Scale = Literal["logit", "fisher", "log"]
EMPTY = "the split holds no rows"
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


POINTS = MetricUnit("points", 100.0)
NUMBER = MetricUnit("1", 1.0)
TARGET = MetricUnit("units of the target", 1.0, scaled=True)


class Metric(NamedTuple):
    """What is known about a metric, whatever it is computed from."""

    label: str  # on pages
    unit: MetricUnit = POINTS
    scale: Scale = "logit"  # on which its interval is symmetric
    highest: float = 1.0
    lower_is_better: bool = False
    averages_classes: bool = False  # a mean over the classes that the rows define
    compares_classes: bool = False  # unreliable with few rows of a class
    ranks: bool = False  # from the order of scores: an area under a curve


METRIC = {
    "accuracy": Metric("accuracy"),
    "balanced_accuracy": Metric("balanced accuracy", averages_classes=True, compares_classes=True),
    "macro_f1": Metric("macro F1", averages_classes=True, compares_classes=True),
    "kappa": Metric("Cohen's kappa", NUMBER, "fisher"),
    "auroc": Metric("AUROC", averages_classes=True, compares_classes=True, ranks=True),
    "auprc": Metric("AUPRC", averages_classes=True, compares_classes=True, ranks=True),
    "auprc_micro": Metric("AUPRC, micro", compares_classes=True, ranks=True),
    "mae": Metric("mean absolute error", TARGET, "log", np.inf, lower_is_better=True),
    "rmse": Metric("root mean squared error", TARGET, "log", np.inf, lower_is_better=True),
    "c_index": Metric("Harrell's C"),
    "brier": Metric("Brier score", NUMBER, "log", lower_is_better=True),
    "precision": Metric("precision"),
    "recall": Metric("recall"),
    "f1": Metric("F1"),
}
# of each task, in the order of pages: the first is the main one
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "auroc", "auprc"),
    "multilabel": ("auprc", "auroc", "auprc_micro", "macro_f1", "accuracy"),
    "regression": ("mae", "rmse"),
    "survival": ("c_index", "auroc", "brier"),
}
CLASS_METRICS = ("precision", "recall", "f1", "auroc", "auprc")  # of every class or label
MAIN = {task: names[0] for task, names in METRICS.items()}
NAMES = {name: metric.label for name, metric in METRIC.items()}
LOWER_IS_BETTER = tuple(name for name, metric in METRIC.items() if metric.lower_is_better)


def name_metric(metric: str, *, first: bool = False) -> str:
    """A metric, or another column of scores, in words; `first`: as the first word of a sentence.

    >>> name_metric("auprc_micro"), name_metric("base_rate", first=True)
    ('AUPRC, micro', 'Base rate')
    """
    words = NAMES.get(metric, metric.replace("_", " "))
    return f"{words[0].upper()}{words[1:]}" if first else words


def is_lower_better(metric: str) -> bool:
    """Whether a lower value of a main score is better, as of every loss."""
    return metric in LOWER_IS_BETTER or metric not in NAMES


def find_unit(metric: str, target: str | None = None) -> MetricUnit:
    """The unit of differences of `metric`; `target` is that of the values of a regression."""
    unit = METRIC[metric].unit if metric in METRIC else POINTS
    return unit._replace(name=target) if unit.scaled and target else unit


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
    # [n] int64 class, [n] float64 value, [n, K] int64 labels (0 where not known), or [n, K, 2]
    # times and events (NaN: not known)
    target: Array
    labelled: Array  # [n, K] bool: False for labels that are not known, which count nowhere
    predictions: dict[str, Array]  # name -> [n, K] float64, regression [n]
    units: Array  # [n] int64
    n_units: int
    n_subjects: int
    groups: Array  # [n] int64
    names: tuple[str, ...]  # K
    by: Unit
    subject: str  # what a subject is: subject, recording, segment

    @property
    def unit(self) -> str:
        """The word for a unit."""
        return self.subject if self.by == "subject" else "window"

    @property
    def positive(self) -> Array:
        """[n, K] bool: whether the row is of the class."""
        if self.task == "survival":
            return (self.target[..., 1] == 1) & (self.target[..., 0] <= find_days(self.names))
        if self.task == "classification":
            return self.target[:, None] == np.arange(len(self.names))
        return self.target.astype(bool)

    @property
    def support(self) -> Array:
        """[K] rows of each class."""
        return self.positive.sum(0)

    @property
    def others(self) -> Array:
        """[K] rows known not to be of the class."""
        return (self.labelled & ~self.positive).sum(0)

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
    is_bad = ~np.isfinite(values)
    bad = int(is_bad.any(tuple(range(1, values.ndim))).sum())
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
    subject: str = "subject",
) -> ScoredRows:
    """The rows, checked and in the order of their content.

    So not one digit of a score depends on the order of the input.

    Raises:
        UserError: non_finite, for a prediction or target that is NaN or infinite.
        ValueError: for shapes, classes or choices that no caller may pass.
    """
    if task not in METRICS:
        raise ValueError(f"task {task!r}, expected one of {', '.join(METRICS)}")
    if by not in ("subject", "window"):
        raise ValueError(f"by={by!r}, expected subject or window")
    names = () if task == "regression" else tuple(class_names)
    raw = np.asarray(target)
    checked = {
        name: _check_prediction(task, name, values, len(raw), len(names))
        for name, values in predictions.items()
    }
    y, labelled = TARGET_CHECKS[task](raw, names)
    codes, n_subjects = _number_subjects(groups, len(y))
    order = _order_rows(y, checked, codes)
    codes = codes[order]
    units, n_units = (codes, n_subjects) if by == "subject" else (np.arange(len(y)), len(y))
    return ScoredRows(
        task=task,
        target=y[order],
        labelled=labelled[order],
        predictions={name: values[order] for name, values in checked.items()},
        units=units,
        n_units=n_units,
        n_subjects=n_subjects,
        groups=codes,
        names=names,
        by=by,
        subject=subject,
    )


def _check_prediction(task: str, name: str, values: npt.ArrayLike, n: int, k: int) -> Array:
    """Predictions as float64 [n, K], of a regression [n]."""
    shape = (n,) if task == "regression" else (n, k)
    prediction = np.asarray(values, dtype=np.float64)
    if task == "regression":
        prediction = prediction.reshape(shape)
    if prediction.shape != shape:
        problem = f"prediction {name!r} has shape {prediction.shape}, expected {shape}"
        raise ValueError(f"{problem} ({task}, {k} class names)")
    _require_finite(prediction, "score" if name == "run" else f"score of {name}")
    if task == "classification" and n and not np.allclose(prediction.sum(1), 1.0, atol=1e-3):
        problem = f"prediction {name!r} holds rows that do not sum to 1"
        raise ValueError(f"{problem}: pass evaluate.to_probabilities(task, logits)")
    return prediction


def _check_values(target: Array, names: Sequence[str]) -> tuple[Array, Array]:
    """The values of a regression [n], all of them known."""
    values = target.astype(np.float64).reshape(len(target))
    _require_finite(values, "target")
    return values, np.ones((len(values), 1), dtype=bool)


def _check_times(target: Array, names: Sequence[str]) -> tuple[Array, Array]:
    """Times and events [n, K, 2], and whether the state at the horizon is known [n, K]."""
    times = target.astype(np.float64).reshape(len(target), len(names), 2)
    return times, (times[..., 0] > find_days(names)) | (times[..., 1] > 0)


def _check_classes(target: Array, names: Sequence[str]) -> tuple[Array, Array]:
    """Class ids [n], all of them known."""
    classes = _check_integers(target, (len(target),), len(names))
    return classes, np.ones((len(classes), max(len(names), 1)), dtype=bool)


def _check_labels(target: Array, names: Sequence[str]) -> tuple[Array, Array]:
    """Labels [n, K], 0 where they are not known, and whether they are."""
    unknown = np.zeros(target.shape, dtype=bool)
    if target.dtype.kind == "f":
        unknown = np.isnan(target)
    labels = np.where(unknown, 0, target)
    return _check_integers(labels, (len(target), len(names)), 2), ~unknown


def _check_integers(values: Array, shape: tuple[int, ...], below: int) -> Array:
    """`values` as int64 of a shape, from 0 to less than `below`."""
    if values.dtype.kind == "f":
        _require_finite(values, "target")
    integers = values.astype(np.int64)
    if integers.shape != shape:
        raise ValueError(f"target has shape {integers.shape}, expected {shape}")
    if integers.size and (integers.min() < 0 or integers.max() >= below):
        problem = f"target outside of the classes: {integers.min()} to {integers.max()}"
        raise ValueError(f"{problem}, expected 0 to {below - 1}")
    return integers


# task -> (target, names of K classes) -> the target as `ScoredRows` has it, and `known`
TARGET_CHECKS: dict[str, Callable[[Array, Sequence[str]], tuple[Array, Array]]] = {
    "classification": _check_classes,
    "multilabel": _check_labels,
    "regression": _check_values,
    "survival": _check_times,
}


def find_days(names: Sequence[str]) -> Array:
    """The day [K] of each horizon in the names of times to event."""
    return np.array([parse_horizon(name)[1] for name in names])


def _number_subjects(groups: Any, n: int) -> tuple[Array, int]:
    """The number [n] int64 of the subject of each row, and how many subjects there are."""
    subjects = np.asarray(groups)
    if subjects.shape != (n,):
        raise ValueError(f"groups have shape {subjects.shape}, expected {(n,)}")
    sortable = subjects.astype(str) if subjects.dtype == object else subjects
    distinct, codes = np.unique(sortable, return_inverse=True)
    return codes.astype(np.int64), len(distinct)


def _order_rows(target: Array, predictions: Mapping[str, Array], codes: Array) -> Array:
    """The order [n] by subject, then target, then predictions."""
    columns = [codes, *target.reshape(len(target), -1).T]
    for values in predictions.values():
        columns += list(np.atleast_2d(values.T))
    return np.lexsort(columns[::-1])


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


def _estimate_ratios(parts: Array, among: Array, weights: Sequence[UnitWeights]) -> list[Estimate]:
    """Ratios sum(parts) / sum(among) of K columns [U, K]."""
    total = among.sum(0)
    ratios = _divide(parts.sum(0), total)
    influences = _divide(parts - among * ratios, total).T
    return list(map(Estimate, map(float, ratios), influences, weights))


def _estimate_each(
    rows: ScoredRows,
    prediction: Array,
    counts: tuple[Array, Array, Array],
    sides: Sequence[UnitWeights],
) -> dict[str, list[Estimate]]:
    """The metrics of K classes from the score and counts [U, K] of hits, true and predicted rows;
    F1 is not defined for a class without rows.
    """
    hits, true, decided = counts
    auroc, auprc = _estimate_classes(rows, prediction, sides)
    f1 = [
        estimate if count else estimate._replace(value=float("nan"))
        for estimate, count in zip(
            _estimate_ratios(2 * hits, true + decided, sides), true.sum(0), strict=True
        )
    ]
    return {
        "recall": _estimate_ratios(hits, true, _weigh_columns(true)),
        "precision": _estimate_ratios(hits, decided, _weigh_columns(decided)),
        "f1": f1,
        "auroc": auroc,
        "auprc": auprc,
    }


def _weigh_columns(counts: Array) -> list[UnitWeights]:
    """Weights of K columns of counts [U, K]: the share of each unit in the column."""
    return [weigh_units(column / max(column.sum(), 1), int(column.sum())) for column in counts.T]


def _estimate_mean(estimates: Sequence[Estimate], present: Array, weights: UnitWeights) -> Estimate:
    """The macro mean over the present classes."""
    values = np.array([estimate.value for estimate in estimates])[present]
    if np.isnan(values).any() or not len(values):
        return Estimate(float("nan"), np.zeros(len(weights.leverage)), weights)
    influences = [estimates[k].influence for k in np.flatnonzero(present).tolist()]
    return Estimate(float(np.mean(values)), np.mean(influences, axis=0), weights)


def _estimate_mean_precision(
    estimates: Sequence[Estimate], present: Array, weights: UnitWeights
) -> Estimate:
    """The mean average precision of the classes that are `present`, with the mean of their degrees
    of freedom where these are fewer.
    """
    df = [estimates[k].weights.df for k in np.flatnonzero(present).tolist()]
    fewest = min(weights.df, float(np.mean(df))) if df else weights.df
    return _estimate_mean(estimates, present, weights._replace(df=fewest))


def estimate_ranking(
    score: Array, positive: Array, units: Array, n_units: int, weights: UnitWeights
) -> tuple[Estimate, Estimate]:
    """AUROC and average precision of one `score` [n] against one class [n] bool; `units` [n] int64.

    Equal scores form one group g with P_g positives and N_g negatives. With cumulative sums from
    the highest score down to g, `AUROC = sum_g P_g (N - cumN_g + N_g / 2) / (P N)`: every pair
    counts, ties one half; `AP = sum_g P_g cumP_g / (cumP_g + cumN_g) / P`: precision at each
    threshold, weighted by the recall that it adds (no trapezoid). NaN where a side has no row.
    """
    P = int(positive.sum())
    N = len(positive) - P
    if not P or not N:
        undefined = Estimate(float("nan"), np.zeros(n_units), weights)
        return undefined, undefined
    order = np.argsort(-score, kind="stable")
    s, y, u = score[order], positive[order], units[order]
    begins = np.concatenate([[True], s[1:] != s[:-1]])  # a group of equal scores
    group, start = np.cumsum(begins) - 1, np.flatnonzero(begins)
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
    area = Estimate(auroc, np.bincount(u, place, n_units), weights)
    # of a rare class most of the variance of the precision is that of its few positives
    positives = weigh_units(np.bincount(u[y], minlength=n_units) / P, P)
    by_positives = weights._replace(df=min(weights.df, positives.df))
    return area, Estimate(ap, np.bincount(u, move, n_units), by_positives)


def _estimate_classes(
    rows: ScoredRows, prediction: Array, weights: Sequence[UnitWeights]
) -> tuple[list[Estimate], list[Estimate]]:
    """AUROC and average precision of every class against the rest; of two classes the second is the
    positive one.
    """
    undefined = Estimate(float("nan"), np.zeros(rows.n_units), weights[0])
    areas, precisions = ([undefined] * len(rows.names) for _ in range(2))
    is_binary = rows.task == "classification" and len(rows.names) == 2
    for k in np.flatnonzero(rows.present).tolist():
        if is_binary and k == 0:
            continue
        labelled = rows.labelled[:, k]
        areas[k], precisions[k] = estimate_ranking(
            prediction[labelled, k],
            rows.positive[labelled, k],
            rows.units[labelled],
            rows.n_units,
            weights[k],
        )
    return areas, precisions


def _weigh_sides(positive: Array, negative: Array) -> list[UnitWeights]:
    """Weights of every class against the rest, from rows of each unit [U, K]: the larger of the
    unit's shares in the two sides.
    """
    weights = []
    for p, n in zip(positive.T, negative.T, strict=True):
        has_rows = (p + n) > 0
        one_sided = float(((p == 0) | (n == 0))[has_rows].mean()) if has_rows.any() else 0.0
        leverage = np.maximum(p / max(p.sum(), 1), n / max(n.sum(), 1))
        weights.append(weigh_units(leverage, int((p + n).sum()), one_sided))
    return weights


def _count_tables(rows: ScoredRows, prediction: Array, decisions: Array | None) -> Array:
    """The confusion table of each unit [U, K, K], true classes first.

    `decisions` [n, K] may be probabilities: then the tables are expected ones.
    """
    k, units = len(rows.names), rows.n_units
    cell = (rows.units * k + rows.target) * k
    if decisions is None:
        counts = np.bincount(cell + prediction.argmax(1), minlength=units * k * k)
        return counts.reshape(units, k, k).astype(np.float64)
    columns = [np.bincount(cell, column, units * k * k)[::k] for column in decisions.T]
    return np.stack([column.reshape(units, k) for column in columns], axis=2)


def _estimate_kappa(
    counts: tuple[Array, Array, Array], weights: UnitWeights, *, is_defined: bool
) -> Estimate:
    """Cohen's kappa from counts [U, K] of hits, true and predicted rows."""
    hits, true, decided = counts
    n, N, H = true.sum(1), float(true.sum()), float(hits.sum())
    S, P = true.sum(0), decided.sum(0)
    chance = float(S @ P)
    spread = N**2 - chance
    value = (N * H - chance) / spread if spread > 0 and is_defined else float("nan")
    value = 0.0 if abs(value) < ROUNDING else value
    moved = true @ P + decided @ S
    change = n * H + N * hits.sum(1) - moved - value * (2 * N * n - moved)
    return Estimate(value, np.nan_to_num(_divide(change, np.array(spread))), weights)


def _classification_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None
) -> Estimates:
    """All metrics from one confusion table a unit."""
    k, present = len(rows.names), rows.present
    tables = _count_tables(rows, prediction, decisions)
    counts = hits, true, _ = np.einsum("ukk->uk", tables), tables.sum(2), tables.sum(1)
    n, N = true.sum(1), float(true.sum())
    shares = true / np.maximum(true.sum(0), 1)
    of_present = shares[:, present] if present.any() else (n / N)[:, None]
    of_one_class = float((((true > 0).sum(1) == 1)[n > 0]).mean())
    spent = of_one_class * (max(int(present.sum()), 1) - 1)
    equal = weigh_units(n / N, int(N))
    mean = weigh_units(of_present.mean(1), int(N), spent)
    most = weigh_units(of_present.max(1), int(N), spent)
    sides = _weigh_sides(true, n[:, None] - true)
    each = _estimate_each(rows, prediction, counts, sides)
    averaged = present & (np.arange(k) == 1) if k == 2 else present
    metrics = {
        "accuracy": _estimate_ratios(hits.sum(1, keepdims=True), n[:, None], [equal])[0],
        "balanced_accuracy": _estimate_mean(each["recall"], present, most),
        "macro_f1": _estimate_mean(each["f1"], present, mean),
        "kappa": _estimate_kappa(counts, mean, is_defined=bool(present.any())),
        "auroc": _estimate_mean(each["auroc"], averaged, most),
        "auprc": _estimate_mean_precision(each["auprc"], averaged, most),
    }
    return Estimates(metrics, each)


def _multilabel_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None
) -> Estimates:
    """Metrics of every label and their means; a label is predicted from a probability of 0.5."""
    present = rows.present
    decisions = ((prediction >= 0.5) if decisions is None else decisions) * rows.labelled
    counted = (decisions * rows.target, rows.target, decisions, rows.labelled)
    hits, true, decided, total = (_sum_by_unit(rows, values) for values in counted)
    cells = total.sum(1, keepdims=True)
    equal = _weigh_columns(cells)[0]
    sides = _weigh_sides(true, total - true)
    averaged = [sides[k] for k in np.flatnonzero(present).tolist()] or sides
    leverage = np.mean([weights.leverage for weights in averaged], axis=0)
    df = float(np.mean([weights.df for weights in averaged]))
    mean = UnitWeights(leverage, df, int(cells.sum()))
    right = (total - true - decided + 2 * hits).sum(1, keepdims=True)
    each = _estimate_each(rows, prediction, (hits, true, decided), sides)
    metrics = {
        "auprc": _estimate_mean_precision(each["auprc"], present, mean),
        "auroc": _estimate_mean(each["auroc"], present, mean),
        "auprc_micro": _estimate_micro(rows, prediction, true, total),
        "macro_f1": _estimate_mean(each["f1"], present, mean),
        "accuracy": _estimate_ratios(right, cells, [equal])[0],
    }
    return Estimates(metrics, each)


def _estimate_micro(rows: ScoredRows, prediction: Array, true: Array, total: Array) -> Estimate:
    """Average precision of all labels in one ranking; `true` and `total` are counts [U, K]."""
    positives, negatives = (counts.sum(1, keepdims=True) for counts in (true, total - true))
    labelled = rows.labelled.ravel()
    units = np.repeat(rows.units, len(rows.names))[labelled]
    weights = _weigh_sides(positives, negatives)[0]
    scores, labels = prediction.ravel()[labelled], rows.positive.ravel()[labelled]
    return estimate_ranking(scores, labels, units, rows.n_units, weights)[1]


def _regression_estimates(
    rows: ScoredRows, prediction: Array, decisions: Array | None = None
) -> Estimates:
    """Means of absolute and squared errors; the influence on the root is that on the mean over
    twice the root.
    """
    error = prediction - rows.target
    n = _sum_by_unit(rows, np.ones_like(error))[:, None]
    equal = weigh_units((n / n.sum())[:, 0], len(error))
    absolute, squared = (_sum_by_unit(rows, size)[:, None] for size in (np.abs(error), error**2))
    mae, mse = (_estimate_ratios(sums, n, [equal])[0] for sums in (absolute, squared))
    root = float(np.sqrt(mse.value))
    rmse = Estimate(root, mse.influence / (2 * root) if root else mse.influence, equal)
    return Estimates({"mae": mae, "rmse": rmse}, {})


ESTIMATORS: dict[str, Callable[[ScoredRows, Array, Array | None], Estimates]] = {
    "classification": _classification_estimates,
    "multilabel": _multilabel_estimates,
    "regression": _regression_estimates,
}


def estimate_predictions(rows: ScoredRows) -> dict[str, Estimates]:
    """The metrics of every prediction of the rows."""
    estimate = ESTIMATORS[rows.task]
    return {name: estimate(rows, values, None) for name, values in rows.predictions.items()}
