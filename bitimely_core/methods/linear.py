"""Linear models on vectors and on simple features: probes of frozen representations and baselines.

A model is fitted on `train`, its penalty is chosen on `validation`, and it predicts `test`.

Legend: n rows, T samples, V channels, D width of a vector, K classes or labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sklearn.linear_model import Ridge

    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]  # vectors [n, D] and targets of the same rows

BANDS = 16  # of a spectrum, of equal width in the logarithm of the frequency
# of the squared weights on standardised vectors, strongest first; 1 / C of scikit-learn
PENALTIES = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1)
DEFAULT_PENALTY = 1e2  # where validation cannot choose
MIN_PROBABILITY = 1e-6  # of a class that the training split lacks


def extract_simple_features(windows: Windows, rows: Array) -> Array:
    """Features without a model, float32.

    Signals: mean, logarithm of the standard deviation and logarithm of the power in 16 bands of
    frequency of each channel, [n, 18 V].
    Events: log(1 + count) of every code that is read, and of all, [n, codes + 1].
    """
    blocks = [np.zeros((0, 1), np.float32)]
    for start in range(0, len(rows), 256):
        arrays = windows.arrays(rows[start : start + 256])
        values, mask = arrays["values"], arrays["mask"]
        assert values is not None
        if windows.vocabulary:
            assert mask is not None
            blocks.append(_count_codes(values, mask, len(windows.vocabulary)))
        else:
            blocks.append(_summarize_signals(values.astype(np.float64)))
    return np.concatenate(blocks[1:] or blocks)


def _count_codes(values: Array, mask: Array, codes: int) -> Array:
    """Logarithms of the counts of codes [n, codes + 1], with that of all behind them."""
    counts = np.zeros((len(values), codes), np.float32)
    np.add.at(counts, (np.nonzero(mask)[0], values[mask]), 1.0)
    return np.log1p(np.hstack([counts, counts.sum(1, keepdims=True)]))


def _summarize_signals(x: Array) -> Array:
    """The features [n, 18 V] of windows [n, T, V]."""
    power = np.abs(np.fft.rfft(x - x.mean(1, keepdims=True), axis=1)[:, 1:]) ** 2
    bins = power.shape[1]
    edges = np.unique(np.round(np.geomspace(1, bins + 1, min(BANDS, bins) + 1)).astype(int)) - 1
    bands = np.add.reduceat(power, edges[:-1], axis=1) / np.diff(edges)[None, :, None]
    parts = [x.mean(1), np.log(x.std(1) + 1e-6), *np.moveaxis(np.log(bands + 1e-6), 1, 0)]
    return np.hstack(parts).astype(np.float32)


def standardise(train: Array, *others: Array) -> list[Array]:
    """Each column less its mean over `train`, over its standard deviation there (1 where it is
    constant), float64.
    """
    mean, scale = measure_moments(train)
    return [(part - mean) / scale for part in (train, *others)]


def measure_moments(x: Array) -> tuple[Array, Array]:
    """Mean and standard deviation (1 where it is 0) of each column of [n, D], float64."""
    mean, std = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    return mean, np.where(std > 1e-12, std, 1.0)


class LinearModel(NamedTuple):
    """Logits, or values of a regression: ((x - mean) / scale) @ weights + bias, all float64."""

    mean: Array  # [D]
    scale: Array  # [D]
    weights: Array  # [D, K]
    bias: Array  # [K], minus infinity for a class that the training lacks

    def compute(self, x: Array) -> Array:
        """The logits or values [n, K] of rows [n, D]."""
        return np.asarray((x - self.mean) / self.scale @ self.weights + self.bias)


class LinearFit(NamedTuple):
    """A linear model and how it was fitted."""

    model: LinearModel
    penalty: list[float]  # one, for labels one each
    unfinished: int  # fits that did not converge


class LinearProbe(NamedTuple):
    """Predictions of a linear probe."""

    prediction: Array  # [n, K] probabilities or [n] values, of the test rows
    penalty: list[float]  # one, for labels one each
    unfinished: int  # fits that did not converge


def fit_probe(
    task: str, x: Mapping[str, Array], y: Mapping[str, Array], classes: int
) -> LinearProbe:
    """Predictions of a linear model for the rows of test.

    Args:
        task: classification, multilabel or regression.
        x: split -> vectors [n, D].
        y: train and validation -> class ids [n], labels [n, K] (NaN: not known) or values [n].
        classes: K.
    """
    fit = fit_linear(task, x, y, classes)
    return LinearProbe(predict_linear(task, fit.model, x["test"]), fit.penalty, fit.unfinished)


def fit_linear(
    task: str, x: Mapping[str, Array], y: Mapping[str, Array], classes: int
) -> LinearFit:
    """Logistic or ridge regression on the standardised vectors of train, with the penalty chosen
    on validation. Arguments: as `fit_probe`.
    """
    mean, scale = measure_moments(x["train"])
    train, validation = ((x[split] - mean) / scale for split in ("train", "validation"))
    if task == "regression":
        targets = y["train"].astype(np.float64)
        ridge = choose_ridge((train, targets), (validation, y["validation"]))
        weights, bias = ridge.coef_.reshape(-1, 1), np.atleast_1d(ridge.intercept_)
        return LinearFit(LinearModel(mean, scale, weights, bias), [ridge.alpha], 0)
    if task == "classification":
        ids = y["train"].astype(np.int64), y["validation"].astype(np.int64)
        fit = _fit_logistic((train, ids[0]), (validation, ids[1]), classes)
        return LinearFit(LinearModel(mean, scale, fit.weights, fit.bias), [fit.penalty], fit.late)
    fits = [
        _fit_logistic(
            _select_known(train, y["train"][:, k]),
            _select_known(validation, y["validation"][:, k]),
            2,
        )
        for k in range(classes)
    ]
    # of two classes the logit of the second alone
    weights = np.stack([fit.weights[:, 1] - fit.weights[:, 0] for fit in fits], 1)
    bias = np.array([fit.bias[1] - fit.bias[0] for fit in fits])
    model = LinearModel(mean, scale, weights, bias)
    return LinearFit(model, [fit.penalty for fit in fits], sum(fit.late for fit in fits))


def predict_linear(task: str, model: LinearModel, x: Array) -> Array:
    """Probabilities [n, K] of rows [n, D], none below `MIN_PROBABILITY`, or values [n]."""
    from scipy.special import expit, softmax

    logits = model.compute(x)
    if task == "regression":
        return logits[:, 0]
    if task == "multilabel":
        return np.clip(expit(logits), MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return share_out(softmax(logits, axis=1))


def share_out(chance: Array) -> Array:
    """Probabilities [n, K] of classes, none below `MIN_PROBABILITY`, that sum to one."""
    chance = np.maximum(chance, MIN_PROBABILITY)
    return np.asarray(chance / chance.sum(1, keepdims=True))


def _select_known(x: Array, labels: Array) -> Pair:
    """The rows of which a label is known."""
    rows = np.isfinite(labels.astype(np.float64))
    return x[rows], labels[rows].astype(np.int64)


def fit_windows(windows: Windows, x: Mapping[str, Array], y: Mapping[str, Array]) -> LinearProbe:
    """`fit_probe` for the labels of `windows`; a split without rows may have vectors of any
    width.
    """
    width = np.asarray(x["train"]).shape[1]
    vectors = {split: np.asarray(rows).reshape(len(rows), width) for split, rows in x.items()}
    return fit_probe(windows.task, vectors, y, max(windows.classes, 1))


class _LogisticFit(NamedTuple):
    """Logits of K classes with the penalty of the least loss."""

    weights: Array  # [D, K]
    bias: Array  # [K]
    penalty: float
    late: int  # fits that did not converge


def _fit_logistic(train: Pair, validation: Pair, classes: int) -> _LogisticFit:
    """Multinomial logistic regression, of two classes binary."""
    from scipy.special import softmax
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    present = np.unique(train[1])
    weights, bias = np.zeros((train[0].shape[1], classes)), np.zeros(classes)
    if len(present):
        bias[np.setdiff1d(np.arange(classes), present)] = -np.inf
    if len(present) < 2:
        return _LogisticFit(weights, bias, PENALTIES[0], 0)
    model = LogisticRegression(max_iter=500, warm_start=True)
    held_out, ids = validation
    least, late, best = np.inf, 0, _LogisticFit(weights, bias, DEFAULT_PENALTY, 0)
    # people of one class alone cannot choose: the least loss has the most extreme risk
    for penalty in PENALTIES if len(np.unique(ids)) > 1 else (DEFAULT_PENALTY,):
        model.set_params(C=1.0 / penalty)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(*train)
        late += any(issubclass(w.category, ConvergenceWarning) for w in caught)
        weights, bias = weights.copy(), bias.copy()
        # of two classes it holds the second alone
        weights[:, present[-len(model.coef_) :]] = model.coef_.T
        bias[present[-len(model.coef_) :]] = model.intercept_
        loss = 0.0
        if len(ids):
            chance = share_out(softmax(held_out @ weights + bias, axis=1))
            loss = -float(np.log(chance[np.arange(len(ids)), ids]).mean())
        if loss < least:
            least, best = loss, _LogisticFit(weights, bias, penalty, 0)
    return best._replace(late=late)


def choose_ridge(train: Pair, validation: Pair) -> Ridge:
    """Ridge regression with the penalty of the least squared error on the validation split."""
    from sklearn.linear_model import Ridge

    held_out, targets = validation
    penalties = PENALTIES if len(targets) else (DEFAULT_PENALTY,)
    models = [Ridge(alpha=penalty).fit(*train) for penalty in penalties]

    def measure_loss(model: Ridge) -> float:
        errors = model.predict(held_out).reshape(targets.shape) - targets
        return float(np.square(errors).mean())

    return min(models, key=measure_loss) if len(models) > 1 else models[0]
