"""Scores that can say "undefined": metrics, bootstrap over subjects, baselines, paired comparison.

A metric is an object `{value, se, lo, hi, n_defined, undefined_reason}`. `value` is null where the rows cannot define it (a class that is
absent, one class only), never a silent 0, 1 or NaN. `se`, `lo`, `hi` are the standard deviation and the 2.5 and 97.5 percentiles over
bootstrap replicates; they are null, with the reason, below the stated minima. `n_defined` counts the replicates in which the metric is
defined; the others are dropped. Macro means also carry `classes: {defined, of}`.

The unit of resampling is the subject: a replicate draws as many subjects as there are, with replacement, and every row weighs as often as
its subject was drawn. So nothing is sorted again or copied: a metric is a function of the weights, evaluated on many replicates at once.

Legend: n rows, U units of resampling (subjects, or rows with by="window"), R replicates, K classes or labels, G groups of equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.batch import Figure
from bitimely_core.errors import Reason, UserError

Array = npt.NDArray[Any]
Unit = Literal["subject", "window"]
Metric = dict[str, Any]
Statistic = Callable[[Array], dict[str, Array]]
"""`f(counts [R, U]) -> {name: [R]}` and `{name + "_each": [R, K]}`, NaN where undefined. All ones give the value itself."""

MINIMUM_UNITS = 5  # fewer subjects: no interval
MINIMUM_ROWS = 5  # fewer rows of a class, or of all others together: no interval for what compares classes
MINIMUM_DEFINED = 0.95  # share of the replicates that must be defined
LEVEL = 0.95
IDENTITY = ("recording_id", "start", "window")  # columns that say which window a row is
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
COMPARES_CLASSES = (*MACRO, "auprc_micro")  # what a handful of rows of one class makes worthless


class Predictions(NamedTuple):
    """What one run says about the rows of one split, as `compare` pairs it."""

    rows: Array  # [n] identity of the window: number, or text such as "recording:start"
    target: Array  # [n], multi-label [n, K] with NaN where a label is not known
    prediction: Array  # as for `score`
    groups: Array  # [n] subject


# --- the rows -----------------------------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Checked rows of one split in an order that does not depend on the order they came in."""

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
        """[n, K] bool: is the row of this class?"""
        k = np.arange(len(self.names))
        return self.target[:, None] == k if self.task == "classification" else self.target.astype(bool)

    @property
    def support(self) -> Array:
        """[K] rows of each class."""
        return self.positive.sum(0)

    @property
    def others(self) -> Array:
        """[K] rows that are known not to be of the class."""
        return (self.known & ~self.positive).sum(0)

    @property
    def present(self) -> Array:
        """[K] bool: classes that have a row and leave a row to the others."""
        return (self.support > 0) & (self.others > 0)


def probabilities(task: str, logits: Any) -> Array:
    """What a head returns as what `score` takes, in float64: softmax, per-label sigmoid, or the value itself. [n, K] or [n]."""
    x = np.asarray(logits, dtype=np.float64)
    if task == "regression":
        return x.reshape(len(x))
    if task == "multilabel":
        return 0.5 * (1.0 + np.tanh(0.5 * x))  # the sigmoid without overflow
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _finite(values: Array, what: str) -> None:
    bad = int((~np.isfinite(values)).reshape(len(values), -1).any(1).sum()) if len(values) else 0
    if bad:
        raise UserError(
            Reason.NON_FINITE,
            f"{bad} of {len(values)} rows have a {what} that is NaN or infinite",
            wanted="nothing is scored, since dropping them would flatter the model",
            action="Look at the loss of the run and at the values of these windows",
            found=str(bad),
            expected="0",
        )


def _rows(
    task: str, target: Any, predictions: Mapping[str, Any], groups: Any, class_names: Sequence[str], by: Unit, rows: Any | None = None
) -> _Rows:
    """Check and order the rows. The order is by `rows` where given, else by content, so that replicates do not depend on it."""
    if task not in METRICS:
        raise ValueError(f"task {task!r}, expected one of {', '.join(METRICS)}")
    if by not in ("subject", "window"):
        raise ValueError(f"by={by!r}, expected subject or window")
    y, names = np.asarray(target), () if task == "regression" else tuple(class_names)
    n, k = len(y), len(names)
    shape = (n,) if task == "regression" else (n, k)
    taken = {}
    for name, values in predictions.items():
        taken[name] = np.asarray(values, dtype=np.float64).reshape(shape if task == "regression" else np.shape(values))
        if taken[name].shape != shape:
            raise ValueError(f"prediction {name!r} has shape {taken[name].shape}, expected {shape} ({task}, {k} class names)")
        _finite(taken[name], "score" if name == "run" else f"score of {name}")
        if task == "classification" and n and not np.allclose(taken[name].sum(1), 1.0, atol=1e-3):
            raise ValueError(f"prediction {name!r} holds rows that do not sum to 1: pass evaluate.probabilities(task, logits)")
    if task == "regression":
        y = y.astype(np.float64).reshape(n)
        _finite(y, "target")
    else:
        unknown = np.isnan(y) if task == "multilabel" and y.dtype.kind == "f" else np.zeros(y.shape, dtype=bool)
        y = np.where(unknown, 0, y)
        if y.dtype.kind == "f":
            _finite(y, "target")
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
        keys = [column for values in reversed(list(taken.values())) for column in np.atleast_2d(values.T)[::-1]]
        keys += [*np.atleast_2d(y.T)[::-1], codes]
    else:
        keys = [np.asarray(rows).astype(str) if np.asarray(rows).dtype == object else np.asarray(rows)]
    order = np.lexsort(keys)
    codes = codes[order].astype(np.int64)
    units, n_units = (codes, len(subjects)) if by == "subject" else (np.arange(n), n)
    ordered = {name: v[order] for name, v in taken.items()}
    known = ~unknown[order] if task == "multilabel" else np.ones((n, max(k, 1)), dtype=bool)
    return _Rows(task, y[order], known, ordered, units, n_units, len(subjects), codes, names, by)


# --- statistics: functions of the weights -------------------------------------------------------------------------------------------------


def _ranked(score: Array, positive: Array, units: Array) -> Callable[[Array], tuple[Array, Array]]:
    """AUROC and average precision of one score against one class, for many weights; the scores are sorted once.

    Equal scores form one group g with weights P_g, N_g of positives and negatives. In ascending order, cumN including g,
    `AUROC = sum_g P_g (cumN_g - N_g / 2) / (P N)`: every pair counts, ties one half. In descending order
    `AP = sum_g P_g cumP_g / (cumP_g + cumN_g) / P`: precision at each threshold, weighted by the recall that it adds (no trapezoid).

    Args:
        score: [n] float64.
        positive: [n] bool.
        units: [n] int64, unit of each row.

    Returns:
        `f(counts [R, U]) -> (auroc [R], ap [R])`, NaN where a side has no weight.
    """
    if not len(score):  # labels that are known of no row
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


def _mean(each: Array, present: Array) -> Array:
    """Macro mean [R] of [R, K] over the classes that the rows define; NaN in a replicate that lacks one of them, or without any."""
    return each[:, present].mean(1) if present.any() else np.full(len(each), np.nan)


def _rank_each(rows: _Rows, prediction: Array) -> Callable[[Array], tuple[Array, Array]]:
    """AUROC and average precision of every class against the rest, [R, K] each."""
    present, positive, k = rows.present, rows.positive, len(rows.names)
    columns = [int(c) for c in np.flatnonzero(present)]
    if rows.task == "classification" and k == 2:
        columns = [c for c in columns if c == 1]  # the second class is the positive one
    seen = {c: rows.known[:, c] for c in columns}
    areas = {c: _ranked(prediction[kept, c], positive[kept, c], rows.units[kept]) for c, kept in seen.items()}

    def each(counts: Array) -> tuple[Array, Array]:
        auroc, ap = np.full((2, len(counts), k), np.nan)
        for c, f in areas.items():
            auroc[:, c], ap[:, c] = f(counts)
        return auroc, ap

    return each


def _classification(rows: _Rows, prediction: Array, decisions: Array | None) -> Statistic:
    """Everything from one confusion table a unit. `decisions` [n, K] may spread a row over the classes: an expected table."""
    k, present = len(rows.names), rows.present
    if decisions is None:
        decisions = np.eye(k)[prediction.argmax(1)]
    tables = np.zeros((rows.n_units, k, k))
    np.add.at(tables, (rows.units, rows.target), decisions)
    ranks = _rank_each(rows, prediction)
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
                "balanced_accuracy": _mean(recall, present),
                "macro_f1": _mean(f1, present),
                "kappa": np.where((total**2 > chance) & present.any(), agreement, np.nan),
                "auroc": _mean(auroc, averaged),
                "auprc": _mean(ap, averaged),
                "recall_each": recall,
                "precision_each": precision,
                "f1_each": f1,
                "auroc_each": auroc,
                "auprc_each": ap,
            }

    return statistic


def _multilabel(rows: _Rows, prediction: Array, decisions: Array | None) -> Statistic:
    """Labels one by one; a label is given from a probability of one half."""
    k, present = len(rows.names), rows.present
    said = (prediction >= 0.5).astype(np.float64) if decisions is None else decisions
    true, known = rows.target.astype(np.float64), rows.known.astype(np.float64)
    said = said * known
    sums = np.zeros((4, rows.n_units, k))  # hits, support, said, rows
    for into, values in zip(sums, (said * true, true, said, known), strict=True):
        np.add.at(into, rows.units, values)
    ranks = _rank_each(rows, prediction)
    kept = rows.known.ravel()
    micro = _ranked(prediction.ravel()[kept], rows.positive.ravel()[kept], np.repeat(rows.units, k)[kept])

    def statistic(counts: Array) -> dict[str, Array]:
        hits, support, given, total = (counts @ part for part in sums)
        auroc, ap = ranks(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            f1 = np.where(support > 0, 2 * hits / (support + given), np.nan)
            return {
                "accuracy": ((total - support - given + 2 * hits).sum(1)) / total.sum(1),
                "macro_f1": _mean(f1, present),
                "auroc": _mean(auroc, present),
                "auprc": _mean(ap, present),
                "auprc_micro": micro(counts)[1],
                "recall_each": np.where(support > 0, hits / support, np.nan),
                "precision_each": np.where(given > 0, hits / given, np.nan),
                "f1_each": f1,
                "auroc_each": auroc,
                "auprc_each": ap,
            }

    return statistic


def _regression(rows: _Rows, prediction: Array, decisions: Array | None = None) -> Statistic:
    """Sums a unit once, then weighted ratios: the number of rows differs between replicates."""
    error = prediction - rows.target
    sums = np.stack([np.bincount(rows.units, v, rows.n_units) for v in (np.abs(error), error**2, np.ones_like(error))])

    def statistic(counts: Array) -> dict[str, Array]:
        absolute, squared, total = (counts @ part for part in sums)
        return {"mae": absolute / total, "rmse": np.sqrt(squared / total)}

    return statistic


STATISTICS: dict[str, Callable[[_Rows, Array, Array | None], Statistic]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
}


# --- bootstrap ----------------------------------------------------------------------------------------------------------------------------


def draw(replicates: Iterable[int], units: int, seed: int = 0) -> Array:
    """How often each unit is drawn in each replicate, [R, U] float64: a function of (seed, replicate, units) alone."""
    picks = (np.random.default_rng([seed, r]).integers(0, units, units) for r in replicates)
    return np.array([np.bincount(p, minlength=units) for p in picks], dtype=np.float64)


def _bootstrap(
    statistics: Mapping[str, Statistic], rows: _Rows, bootstrap: int, seed: int
) -> tuple[dict[str, dict[str, Array]], dict[str, dict[str, Array]]]:
    """Values and replicates of several statistics on the same draws: name -> metric -> [] or [K], and [R] or [R, K]."""
    points = {name: {key: v[0] for key, v in f(np.ones((1, rows.n_units))).items()} for name, f in statistics.items()}
    width = rows.target.size + rows.n_units
    block = max(1, 2_000_000 // width)  # rows of 16 MB at a time
    parts: dict[str, list[dict[str, Array]]] = {name: [] for name in statistics}
    for start in range(0, bootstrap, block):
        counts = draw(range(start, min(start + block, bootstrap)), rows.n_units, seed)
        for name, f in statistics.items():
            parts[name].append(f(counts))
    none: dict[str, dict[str, Array]] = {n: {k: np.empty((0, *np.shape(v))) for k, v in p.items()} for n, p in points.items()}
    draws = {n: {k: np.concatenate([p[k] for p in parts[n]]) if parts[n] else none[n][k] for k in points[n]} for n in statistics}
    return points, draws


def _metric(value: float, draws: Array, undefined: str | None, uncertain: str | None) -> Metric:
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


def _too_few(rows: _Rows, bootstrap: int) -> str | None:
    """Why no metric of these rows has an interval, or None."""
    unit = "subject" if rows.by == "subject" else "window"
    if bootstrap < 2:
        return "no bootstrap was asked for"
    if rows.n_units == 1:
        return f"all rows come from one {unit}, so the spread between {unit}s cannot be seen"
    if rows.n_units < MINIMUM_UNITS:
        return f"{rows.n_units} {unit}s, an interval needs at least {MINIMUM_UNITS}"
    return None


def _rare(rows: _Rows, k: int) -> str | None:
    """Why what compares class k with the rest has no interval, or None."""
    for count, whose in ((int(rows.support[k]), f"of class {rows.names[k]}"), (int(rows.others[k]), f"outside of class {rows.names[k]}")):
        if count < MINIMUM_ROWS:
            return f"{count} row{'s' * (count != 1)} {whose}, an interval needs at least {MINIMUM_ROWS}"
    return None


def _uncertain(rows: _Rows, metric: str, bootstrap: int) -> str | None:
    """Why a metric has no interval, or None. The rarest class decides for what compares classes."""
    few = _too_few(rows, bootstrap)
    if few or metric not in COMPARES_CLASSES or rows.task == "regression":
        return few
    classes = np.flatnonzero(rows.present)
    return _rare(rows, int(classes[np.minimum(rows.support, rows.others)[classes].argmin()])) if len(classes) else None


def _absent(rows: _Rows, k: int) -> str | None:
    """Why class k defines no score, or None."""
    if rows.support[k] == 0:
        return f"no row is of class {rows.names[k]}"
    return f"every row is of class {rows.names[k]}" if rows.others[k] == 0 else None


def _metrics(rows: _Rows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, Metric]:
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
        out[name] = _metric(float(point[name]), draws[name], undefined, _uncertain(rows, name, bootstrap))
        if rows.task != "regression" and name in MACRO:
            out[name]["classes"] = {"defined": classes, "of": len(rows.names)}
    return out


def _by_class(rows: _Rows, point: dict[str, Array], draws: dict[str, Array], bootstrap: int) -> dict[str, dict[str, Any]]:
    """Support, base rate and the metric objects of every class or label."""
    few, positive, out = _too_few(rows, bootstrap), rows.positive, {}
    for k, name in enumerate(rows.names):
        absent = _absent(rows, k)
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
            entry[metric] = _metric(float(point[f"{metric}_each"][k]), values, missing, few or _rare(rows, k))
        out[name] = entry
    return out


# --- baselines ----------------------------------------------------------------------------------------------------------------------------


def _rates(labels: Array) -> Array:
    """Share of ones among the known labels, [n, K] -> [K]; 0 where none is known."""
    y = labels.astype(np.float64)
    return np.asarray(np.nansum(y, axis=0) / np.maximum(np.isfinite(y).sum(0), 1))


def _constant(task: str, train: Array, n: int, k: int) -> dict[str, tuple[str, Array, Array | None]]:
    """What a model that never looks at its input would say: name -> (words, prediction, decisions), from training targets alone."""
    if not len(train):
        return {}
    if task == "regression":
        mean, median = float(train.mean()), float(np.median(train))
        return {
            "mean": ("always answers the mean of the training targets", np.full(n, mean), None),
            "median": ("always answers the median of the training targets", np.full(n, median), None),
        }
    rates = np.bincount(train, minlength=k) / len(train) if task == "classification" else _rates(train)
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


def length_only(task: str, train_lengths: Any, train_target: Any, lengths: Any) -> Array:
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


# --- the two public verbs -----------------------------------------------------------------------------------------------------------------


def _resampling(rows: _Rows | None, bootstrap: int, by: Unit, seed: int) -> dict[str, Any]:
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


def _empty(task: str, class_names: Sequence[str], bootstrap: int, by: Unit, seed: int) -> dict[str, Any]:
    """The scores of a split that holds nothing: every metric null with the reason."""
    nothing = _metric(np.nan, np.empty(0), EMPTY, None)
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
        "resampling": _resampling(None, bootstrap, by, seed),
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
        baselines: further predictions on the same rows, such as `{"length_only": length_only(...)}`.
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
        return _empty(task, class_names, bootstrap, by, seed)
    r = _rows(task, target, {"run": prediction, **(baselines or {})}, groups, class_names, by, rows)
    make = STATISTICS[task]
    about = dict.fromkeys(r.predictions, "predictions on the same windows")
    statistics = {name: make(r, values, None) for name, values in r.predictions.items()}
    train = np.asarray([] if train_target is None else train_target)
    for name, (words, values, decisions) in _constant(task, train, len(r.target), len(r.names)).items():
        about[name], statistics[name] = words, make(r, values, decisions)
    points, draws = _bootstrap(statistics, r, bootstrap, seed)
    metrics = {name: _metrics(r, points[name], draws[name], bootstrap) for name in statistics}
    for name in about:
        for m, metric in metrics[name].items() if name != "run" else ():
            metric["difference"] = _difference(
                points["run"][m] - points[name][m], draws["run"][m] - draws[name][m], _uncertain(r, m, bootstrap)
            )
    labels = {
        name: {k: {m: each[m] for m in ("auroc", "auprc")} for k, each in _by_class(r, points[name], draws[name], bootstrap).items()}
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
        "by_class": {} if task == "regression" else _by_class(r, points["run"], draws["run"], bootstrap),
        "confusion": None if confusion is None else confusion.tolist(),
        "baselines": {
            name: {"about": about[name], **found, **({"by_class": labels[name]} if name in labels else {})}
            for name, found in metrics.items()
        },
        "resampling": _resampling(r, bootstrap, by, seed),
        "remarks": _remarks(r, _too_few(r, bootstrap)),
    }


def _remarks(rows: _Rows, few: str | None) -> list[str]:
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


def _difference(value: Array, drawn: Array, why: str | None) -> Metric:
    """The object of a paired difference: `difference` in the place of `value`, with the shares of replicates above and below zero."""
    kept = drawn[np.isfinite(drawn)]
    out = _metric(float(value), drawn, "one of the two is not defined", why)
    sides = {"share_above_zero": float((kept > 0).mean()), "share_below_zero": float((kept < 0).mean())} if out["se"] is not None else {}
    return {"difference": out.pop("value"), **out, "share_above_zero": None, "share_below_zero": None, **sides}


def aligned(runs: Mapping[str, Predictions]) -> tuple[Array, Array, Array, dict[str, Array]]:
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
                raise UserError(
                    Reason.SETTINGS_DIFFER,
                    f"the runs differ in the {field if field != 'groups' else 'subjects'} of their windows ({len(a)} and {len(b)} rows)",
                    wanted="a paired comparison needs the same windows",
                    action="Evaluate both runs on the same tokens and split",
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
    target, groups, ids, both = aligned({"run": first, "other": second})
    out: dict[str, Any] = {"task": task, "main": MAIN[task], "n": len(target), "n_subjects": len(np.unique(groups.astype(str)))}
    if not len(target):
        nothing = {"first": None, "second": None, **_difference(np.array(np.nan), np.empty(0), None), "undefined_reason": EMPTY}
        return {**out, "metrics": {m: dict(nothing) for m in METRICS[task]}, "resampling": _resampling(None, bootstrap, by, seed)}
    r = _rows(task, target, both, groups, class_names, by, ids)
    points, draws = _bootstrap({name: STATISTICS[task](r, values, None) for name, values in r.predictions.items()}, r, bootstrap, seed)
    alone = {name: _metrics(r, points[name], draws[name], bootstrap) for name in both}
    metrics = {}
    for m in METRICS[task]:
        d = _difference(points["run"][m] - points["other"][m], draws["run"][m] - draws["other"][m], _uncertain(r, m, bootstrap))
        metrics[m] = {"first": alone["run"][m]["value"], "second": alone["other"][m]["value"], **d}
    return {**out, "metrics": metrics, "resampling": _resampling(r, bootstrap, by, seed)}


def frame(index: Any, task: str, class_names: Sequence[str], target: Array, prediction: Array) -> Any:
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


def predictions(task: str, frame: Any, class_names: Sequence[str] = ()) -> Predictions:
    """A `predictions.parquet` as a data frame, with the columns that `compare_frames` names."""

    def matrix(prefix: str) -> Array:
        return np.stack([np.asarray(frame[f"{prefix}_{name}"]) for name in class_names], axis=1)

    ids = [f"{recording}:{start}:{window}" for recording, start, window in zip(*(frame[c] for c in IDENTITY), strict=True)]
    target = matrix("target") if task == "multilabel" else np.asarray(frame["target"])
    prediction = np.asarray(frame["prediction"]) if task == "regression" else matrix("p")
    return Predictions(np.array(ids, dtype=str), target, prediction, np.asarray(frame["subject_id"]).astype(str))


def classes_of(frame: Any) -> list[str]:
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
        predictions(task, first, class_names),
        predictions(task, second, class_names),
        class_names=class_names,
        bootstrap=bootstrap,
        by=by,
        seed=seed,
    )
    return dict(result["metrics"])


# --- several runs -------------------------------------------------------------------------------------------------------------------------


class Replicates(NamedTuple):
    """One metric of several runs on the same windows and the same draws."""

    values: dict[str, float]  # by run
    draws: dict[str, Array]  # [R] by run
    units: int
    n_subjects: int
    undefined: str | None  # why there is no value
    uncertain: str | None  # why there is no interval


def replicates(
    task: str,
    runs: Mapping[str, Predictions],
    *,
    class_names: Sequence[str] = (),
    metric: str | None = None,
    label: str | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    seed: int = 0,
) -> Replicates:
    """One metric of all `runs`, with its replicates: what `contrast` pairs. Draws are those of `score` and `compare`.

    Args:
        task: classification, multilabel or regression.
        runs: by name, on the same windows.
        class_names: as for `score`.
        metric: None: the main one of the task.
        label: the average precision of this class or label, in the place of a metric.
        bootstrap: replicates.
        by: what is resampled.
        seed: of the draws.

    Raises:
        UserError: settings_differ (exit 4), where the windows, their targets or their subjects differ; non_finite.
    """
    target, groups, ids, predictions = aligned(runs)
    if not len(target):
        return Replicates(dict.fromkeys(runs, np.nan), dict.fromkeys(runs, np.empty(0)), 0, 0, EMPTY, None)
    rows = _rows(task, target, predictions, groups, class_names, by, ids)
    name = metric or MAIN[task]
    k = None if label is None else rows.names.index(label)
    points, draws = _bootstrap({run: _single(rows, values, name, k) for run, values in rows.predictions.items()}, rows, bootstrap, seed)
    undefined = _absent(rows, k) if k is not None else "not defined by these rows"
    uncertain = _uncertain(rows, name, bootstrap) if k is None else _too_few(rows, bootstrap) or _rare(rows, k)
    values = {run: float(point["value"]) for run, point in points.items()}
    return Replicates(values, {run: d["value"] for run, d in draws.items()}, rows.n_units, rows.n_subjects, undefined, uncertain)


def _single(rows: _Rows, prediction: Array, metric: str, label: int | None) -> Statistic:
    """One metric as `value`; accuracy and a label alone without the cost of all the others."""
    if label is not None:
        kept = rows.known[:, label]
        areas = _ranked(prediction[kept, label], rows.positive[kept, label], rows.units[kept])
        return lambda counts: {"value": areas(counts)[1]}
    if rows.task == "classification" and metric == "accuracy":
        hits, total = (np.bincount(rows.units, w, rows.n_units) for w in (prediction.argmax(1) == rows.target, np.ones(len(prediction))))
        return lambda counts: {"value": (counts @ hits) / (counts @ total)}
    every = STATISTICS[rows.task](rows, prediction, None)
    return lambda counts: {"value": every(counts)[metric]}


def average(found: Replicates, runs: Sequence[str]) -> Metric:
    """The metric object of the mean over `runs`, such as a run a seed, on the same draws."""
    drawn = np.mean([found.draws[run] for run in runs], axis=0)
    return _metric(float(np.mean([found.values[run] for run in runs])), drawn, found.undefined, found.uncertain)


def contrast(found: Replicates, first: Sequence[str], second: Sequence[str], spread: tuple[float, float] | None = None) -> Metric:
    """The paired difference of the means of two sets of runs, such as one model and another, a run a seed each.

    `se`, `lo` and `hi` are those of the mean difference on the same draws of subjects, as `compare` has them for one pair. `total_se` adds what
    another training would change, `sqrt(se^2 U / (U - 1) + variance)`, where it is known. `p` is two-sided, of the difference over `total_se` against
    Student's t with the degrees of freedom of Welch and Satterthwaite: the replicates themselves do not reach as far into the tails as a
    correction for many comparisons asks.

    Args:
        found: of all runs in question.
        first: runs of the first.
        second: runs of the second.
        spread: variance of the mean difference over seeds, and its degrees of freedom; None: not known (one training each).

    Returns:
        `{difference, se, lo, hi, n_defined, undefined_reason, share_above_zero, share_below_zero, total_se, df, p}`; `total_se`, `df` and `p`
        are null where there is no interval.
    """
    from scipy import stats

    (value, drawn), (other, others) = (
        (np.mean([found.values[run] for run in runs]), np.mean([found.draws[run] for run in runs], axis=0)) for runs in (first, second)
    )
    out = {**_difference(np.asarray(value - other), drawn - others, found.uncertain), "total_se": None, "df": None, "p": None}
    if out["se"] is None:
        return out
    units = found.units  # the variance of a mean over replicates is too small by (U - 1) / U
    variances = [(out["se"] ** 2 * units / (units - 1), float(units - 1)), *([spread] if spread is not None and spread[1] > 0 else [])]
    total = sum(v for v, _ in variances)
    if total == 0:  # the runs say the same of every row that counts
        return {**out, "total_se": 0.0, "df": float(found.units - 1), "p": 1.0 if out["difference"] == 0 else None}
    df = total**2 / sum(v**2 / n for v, n in variances)
    p = 2 * float(stats.t.sf(abs(out["difference"]) / np.sqrt(total), df))
    return {**out, "total_se": float(np.sqrt(total)), "df": float(df), "p": p}


def holm(p: Sequence[float | None], level: float = LEVEL) -> list[tuple[float, float] | None]:
    """Holm's step-down correction of a family of comparisons; None stands for one that has no p and does not count.

    Returns:
        For each `(adjusted, alpha)`: the adjusted p, to be compared with 1 - level, and the error rate at which the procedure decides on
        this one. An interval of level 1 - alpha excludes zero exactly where the adjusted p is at most 1 - level.
    """
    out: list[tuple[float, float] | None] = [None] * len(p)
    known = sorted((value, k) for k, value in enumerate(p) if value is not None)
    highest, kept = 0.0, None
    for place, (value, k) in enumerate(known):
        left = len(known) - place
        highest = max(highest, min(1.0, left * value))
        alpha = (1 - level) / left
        if kept is None and value > alpha:
            kept = alpha  # from the first that is not told apart on, nothing is
        out[k] = (highest, alpha if kept is None else kept)
    return out


def corrected(differences: Sequence[Metric], level: float = LEVEL) -> list[Metric]:
    """Differences of `contrast` as one family: each with `p_holm` and the interval `corrected_lo` to `corrected_hi`, null without p."""
    from scipy import stats

    out = []
    for d, found in zip(differences, holm([d["p"] for d in differences], level), strict=True):
        if found is None:
            out.append({**d, "p_holm": None, "corrected_lo": None, "corrected_hi": None})
            continue
        reach = float(stats.t.isf(found[1] / 2, d["df"])) * d["total_se"]
        out.append({**d, "p_holm": found[0], "corrected_lo": d["difference"] - reach, "corrected_hi": d["difference"] + reach})
    return out


def apart(difference: Mapping[str, Any]) -> int:
    """1 or -1 where the corrected interval lies above or below zero, else 0."""
    lo, hi = difference.get("corrected_lo"), difference.get("corrected_hi")
    return 0 if lo is None or hi is None else int(lo > 0) - int(hi < 0)


def ranks(values: Sequence[float | None], *, lower_is_better: bool = False) -> list[float | None]:
    """Rank of each value, 1 the best, equal ones their mean rank; None has none."""
    from scipy import stats

    known = [k for k, value in enumerate(values) if value is not None]
    found = stats.rankdata([values[k] if lower_is_better else -values[k] for k in known])  # type: ignore[operator]
    out: list[float | None] = [None] * len(values)
    for k, rank in zip(known, found.tolist(), strict=True):
        out[k] = rank
    return out


def nemenyi(table: Any, level: float = LEVEL) -> dict[str, Any]:
    """Mean ranks over data sets and how far two must lie apart (Nemenyi's test; Demsar 2006, section 3.2.2).

    Args:
        table: [N data sets, k rows] ranks.
        level: one less the error rate over all pairs.

    Returns:
        `{mean_ranks [k], critical, friedman_p, data_sets, rows}`; critical = q sqrt(k (k + 1) / 6 N), q = the studentised range at infinite
        degrees of freedom over sqrt(2). `friedman_p` of the hypothesis that all rows are equal; null below three rows.
    """
    from scipy import stats

    x = np.asarray(table, dtype=np.float64)
    n, k = x.shape
    q = float(stats.studentized_range.ppf(level, k, np.inf)) / np.sqrt(2)
    p = float(stats.friedmanchisquare(*x.T).pvalue) if k > 2 and n > 1 else None
    critical = float(q * np.sqrt(k * (k + 1) / (6 * n)))
    return {"mean_ranks": x.mean(0).tolist(), "critical": critical, "friedman_p": p, "data_sets": n, "rows": k}


def headline(scores: Mapping[str, Any], metric: str | None = None) -> Figure | None:
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
