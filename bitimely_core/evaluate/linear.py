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
DEFAULT_PENALTY = 1e2  # without a validation split
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
    mean, std = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    return [(part - mean) / np.where(std > 1e-12, std, 1.0) for part in (train, *others)]


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
    train, validation, test = standardise(x["train"], x["validation"], x["test"])
    if task == "regression":
        targets = y["train"].astype(np.float64)
        model = choose_ridge((train, targets), (validation, y["validation"]))
        return LinearProbe(np.asarray(model.predict(test), np.float64), [model.alpha], 0)
    if task == "classification":
        ids = y["train"].astype(np.int64), y["validation"].astype(np.int64)
        return _fit_logistic((train, ids[0]), (validation, ids[1]), test, classes)
    probes = [
        _fit_logistic(
            _select_known(train, y["train"][:, k]),
            _select_known(validation, y["validation"][:, k]),
            test,
            2,
        )
        for k in range(classes)
    ]
    return LinearProbe(
        np.stack([probe.prediction[:, 1] for probe in probes], 1),
        [probe.penalty[0] for probe in probes],
        sum(probe.unfinished for probe in probes),
    )


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


def _fit_logistic(train: Pair, validation: Pair, test: Array, classes: int) -> LinearProbe:
    """Probabilities [n, K] of `test`; those of classes that train lacks are `MIN_PROBABILITY`."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    present = np.unique(train[1])
    if len(present) < 2:
        constant = np.full((len(test), classes), MIN_PROBABILITY)
        constant[:, present] = 1.0
        return LinearProbe(constant / constant.sum(1, keepdims=True), [PENALTIES[0]], 0)
    model = LogisticRegression(max_iter=500, warm_start=True)

    def predict(x: Array) -> Array:
        chance = np.full((len(x), classes), MIN_PROBABILITY)
        chance[:, present] = np.maximum(model.predict_proba(x), MIN_PROBABILITY)
        return chance / chance.sum(1, keepdims=True)

    held_out, ids = validation
    least, best, unfinished = np.inf, LinearProbe(np.empty((0, classes)), [DEFAULT_PENALTY], 0), 0
    for penalty in _list_penalties(ids):
        model.set_params(C=1.0 / penalty)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(*train)
        unfinished += any(issubclass(w.category, ConvergenceWarning) for w in caught)
        loss = 0.0
        if len(ids):
            loss = -float(np.log(predict(held_out)[np.arange(len(ids)), ids]).mean())
        if loss < least:
            least, best = loss, LinearProbe(predict(test), [penalty], 0)
    return best._replace(unfinished=unfinished)


def choose_ridge(train: Pair, validation: Pair) -> Ridge:
    """Ridge regression with the penalty of the least squared error on the validation split."""
    from sklearn.linear_model import Ridge

    held_out, targets = validation
    models = [Ridge(alpha=penalty).fit(*train) for penalty in _list_penalties(targets)]

    def measure_loss(model: Ridge) -> float:
        errors = model.predict(held_out).reshape(targets.shape) - targets
        return float(np.square(errors).mean())

    return min(models, key=measure_loss) if len(models) > 1 else models[0]


def _list_penalties(targets: Array) -> tuple[float, ...]:
    """The penalties to try on a validation split with these targets."""
    return PENALTIES if len(targets) else (DEFAULT_PENALTY,)
