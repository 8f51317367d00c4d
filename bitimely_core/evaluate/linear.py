"""Linear models on vectors and on simple features: probes of frozen representations, and their
baselines.

Legend: n rows, V channels, D width of a vector, K classes or labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

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
    out = []
    for start in range(0, len(rows), 256):
        arrays = windows.arrays(rows[start : start + 256])
        values, mask = arrays["values"], arrays["mask"]
        assert values is not None
        if windows.vocabulary:
            counts = np.zeros((len(values), len(windows.vocabulary)), np.float32)
            assert mask is not None
            np.add.at(counts, (np.nonzero(mask)[0], values[mask]), 1.0)
            out.append(np.log1p(np.hstack([counts, counts.sum(1, keepdims=True)])))
            continue
        x = values.astype(np.float64)
        power = np.abs(np.fft.rfft(x - x.mean(1, keepdims=True), axis=1)[:, 1:]) ** 2
        bins = power.shape[1]
        edges = np.unique(np.round(np.geomspace(1, bins + 1, min(BANDS, bins) + 1)).astype(int)) - 1
        bands = np.add.reduceat(power, edges[:-1], axis=1) / np.diff(edges)[None, :, None]
        parts = [x.mean(1), np.log(x.std(1) + 1e-6), *np.moveaxis(np.log(bands + 1e-6), 1, 0)]
        out.append(np.hstack(parts).astype(np.float32))
    return np.concatenate(out) if out else np.zeros((0, 1), np.float32)


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
    """Fit on `train`, choose the penalty on `validation`, predict `test`.

    `x`: split -> vectors [n, D]; `y`: train, validation -> class ids [n], labels [n, K] (NaN: not
    known) or values [n]; K = `classes`.
    """
    train, validation, test = standardise(x["train"], x["validation"], x["test"])
    if task == "regression":
        return _fit_ridge(train, validation, test, y)
    if task == "classification":
        found = _fit_logistic(
            train,
            validation,
            test,
            y["train"].astype(np.int64),
            y["validation"].astype(np.int64),
            classes,
        )
        return LinearProbe(found[0], [found[1]], found[2])
    each = []
    for k in range(classes):
        known = {
            split: np.isfinite(y[split][:, k].astype(np.float64))
            for split in ("train", "validation")
        }
        labels = [y[split][known[split], k].astype(np.int64) for split in ("train", "validation")]
        each.append(
            _fit_logistic(
                train[known["train"]],
                validation[known["validation"]],
                test,
                labels[0],
                labels[1],
                2,
            )
        )
    return LinearProbe(
        np.stack([p[:, 1] for p, _, _ in each], 1),
        [c for _, c, _ in each],
        sum(u for _, _, u in each),
    )


def fit_windows(windows: Windows, x: Mapping[str, Array], y: Mapping[str, Array]) -> LinearProbe:
    """`fit_probe` for the labels of `windows`; a split without rows may have vectors of any
    width.
    """
    width = np.asarray(x["train"]).shape[1]
    given = {
        name: np.asarray(v).reshape(len(v), width) if len(v) else np.zeros((0, width), np.float32)
        for name, v in x.items()
    }
    return fit_probe(windows.task, given, y, max(windows.classes, 1))


def _fit_logistic(
    x: Array, held: Array, new: Array, y: Array, held_y: Array, classes: int
) -> tuple[Array, float, int]:
    """Probabilities [n, K] of `new`, the penalty, and how many fits did not converge."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    present = np.unique(y)
    if len(present) < 2:  # one class
        constant = np.full((len(new), classes), MIN_PROBABILITY)
        constant[:, present] = 1.0
        return constant / constant.sum(1, keepdims=True), PENALTIES[0], 0
    model = LogisticRegression(max_iter=500, warm_start=True)

    def predict(of: Array) -> Array:
        out = np.full((len(of), classes), MIN_PROBABILITY)
        out[:, present] = np.maximum(model.predict_proba(of), MIN_PROBABILITY)
        return out / out.sum(1, keepdims=True)

    best, chosen, unfinished = np.inf, DEFAULT_PENALTY, 0
    prediction = np.empty((0, classes))
    for penalty in PENALTIES if len(held) else (DEFAULT_PENALTY,):
        model.set_params(C=1.0 / penalty)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(x, y)
        unfinished += any(issubclass(w.category, ConvergenceWarning) for w in caught)
        loss = (
            -float(np.log(predict(held)[np.arange(len(held)), held_y]).mean()) if len(held) else 0.0
        )
        if loss < best:
            best, chosen, prediction = loss, penalty, predict(new)
    return prediction, chosen, unfinished


def _fit_ridge(x: Array, held: Array, new: Array, y: Mapping[str, Array]) -> LinearProbe:
    from sklearn.linear_model import Ridge

    best, penalty, prediction = np.inf, DEFAULT_PENALTY, np.empty(0)
    for candidate in PENALTIES if len(held) else (DEFAULT_PENALTY,):
        model = Ridge(alpha=candidate).fit(x, y["train"].astype(np.float64))
        loss = float(np.square(model.predict(held) - y["validation"]).mean()) if len(held) else 0.0
        if loss < best:
            best, penalty, prediction = loss, candidate, model.predict(new)
    return LinearProbe(np.asarray(prediction, np.float64), [penalty], 0)
