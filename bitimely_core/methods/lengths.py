"""Predictions from a single number of each row, such as the length of its sequence: logistic or
linear regression on z and z^2, where z is log(1 + number), standardised.

Legend: m training rows, n rows, K classes, labels or values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bitimely_core.methods.classifiers import extract_logistic
from bitimely_core.methods.method_contract import Array


class LengthModel(NamedTuple):
    """Logits, or values of a regression: z weights[0] + z^2 weights[1] + bias."""

    center: Array  # [1] or, of a number a label, [K]
    scale: Array
    weights: Array  # [2, K]
    bias: Array  # [K], infinite where the training has one class


def fit_lengths(task: str, numbers: Array, target: Array) -> LengthModel:
    """The regression of targets on numbers [m], or of label k on column k of numbers [m, K].

    `task`: classification (class ids [m]), multilabel (labels [m, K], NaN: not known) or
    regression (values [m]).
    """
    from sklearn.linear_model import Ridge

    logs = np.log1p(np.asarray(numbers, np.float64)).reshape(len(numbers), -1)
    center, spread = logs.mean(0), logs.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    z = (logs - center) / scale
    if task == "regression":
        ridge = Ridge(1e-3).fit(np.hstack([z, z**2]), target)
        weights, bias = ridge.coef_.reshape(2, 1), np.atleast_1d(ridge.intercept_)
        return LengthModel(center, scale, weights, bias)
    if task == "classification":
        ids = target.astype(np.int64)
        weights, bias = _fit_logistic(np.hstack([z, z**2]), ids, int(ids.max()) + 1)
        return LengthModel(center, scale, weights, bias)
    weights, bias = np.zeros((2, target.shape[1])), np.zeros(target.shape[1])
    for k, labels in enumerate(target.T.astype(np.float64)):
        observed, x = np.isfinite(labels), z[:, [k % z.shape[1]]]
        pair = _fit_logistic(np.hstack([x, x**2])[observed], labels[observed].astype(np.int64), 2)
        weights[:, k], bias[k] = pair[0][:, 1] - pair[0][:, 0], pair[1][1] - pair[1][0]
    return LengthModel(center, scale, weights, bias)


def _fit_logistic(x: Array, labels: Array, classes: int) -> tuple[Array, Array]:
    """Weights [2, K] and bias [K]; classes without a training row have minus infinity."""
    from sklearn.linear_model import LogisticRegression

    weights, bias = np.zeros((2, classes)), np.full(classes, -np.inf)
    present = np.unique(labels)
    bias[present if len(present) else 0] = 0.0
    if len(present) > 1:
        fitted = extract_logistic(LogisticRegression(max_iter=1000).fit(x, labels))
        weights[:, present], bias[present] = fitted.weights, fitted.bias
    return weights, bias


def predict_lengths(task: str, model: LengthModel, numbers: Array) -> Array:
    """Probabilities [n, K], or values [n] of a regression, of numbers [n] or [n, K]."""
    from scipy.special import expit, softmax

    logs = np.log1p(np.asarray(numbers, np.float64)).reshape(len(numbers), -1)
    z = (logs - model.center) / model.scale
    logits = z * model.weights[0] + z**2 * model.weights[1] + model.bias
    if task == "regression":
        return np.asarray(logits[:, 0])
    return np.asarray(expit(logits) if task == "multilabel" else softmax(logits, axis=1))
