"""Classifiers of scikit-learn as arrays: logistic regression and gradient-boosted trees.

They are fitted by scikit-learn, stored without pickles, and evaluated here.

Legend: n rows, D features, C classes, R rounds, K trees of a round (1 of two classes, else C), M
nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.methods.method_contract import Array, Arrays

BLOCK = 4096  # rows that walk down the trees at a time


class Logistic(NamedTuple):
    """Multinomial logistic regression."""

    classes: Array  # [C] of the training
    weights: Array  # [D, C]
    bias: Array  # [C]


class BoostedTrees(NamedTuple):
    """Sums of trees; a node without children is a leaf, and its value is added."""

    classes: Array  # [C]
    baseline: Array  # [K] what the sums start from
    roots: Array  # [R, K] first nodes
    feature: Array  # [M] that a node reads
    threshold: Array  # [M] float64
    below: Array  # [M] next node of a row that is not above the threshold; -1: a leaf
    above: Array  # [M] of the other rows
    value: Array  # [M] float64


Classifier = Logistic | BoostedTrees
KINDS: dict[str, type[Logistic] | type[BoostedTrees]] = {
    "logistic": Logistic,
    "trees": BoostedTrees,
}


def make_constant(share: float) -> Classifier:
    """Classes 0 and 1, the second with the probability `share` whatever the features."""
    with np.errstate(divide="ignore"):
        bias = np.log([1 - share, share])
    return Logistic(np.array([0, 1]), np.zeros((0, 2)), bias)


def extract_classifier(fitted: Any) -> Classifier:
    """The arrays of a fitted LogisticRegression or HistGradientBoostingClassifier."""
    if hasattr(fitted, "coef_"):
        return extract_logistic(fitted)
    return extract_trees(fitted)


def extract_logistic(fitted: Any) -> Logistic:
    """The arrays of a fitted LogisticRegression, of two classes with zeros for the first."""
    weights, bias = fitted.coef_.T, fitted.intercept_
    if len(bias) == 1:
        weights, bias = np.hstack([0 * weights, weights]), np.append(0.0, bias)
    return Logistic(fitted.classes_, weights.astype(np.float64), bias.astype(np.float64))


def extract_trees(fitted: Any) -> BoostedTrees:
    """The arrays of a fitted HistGradientBoostingClassifier on numbers without missing ones."""
    nodes = [tree.nodes for trees in fitted._predictors for tree in trees]
    counts = np.array(list(map(len, nodes)), np.int64)
    first = np.cumsum(counts) - counts
    joined = np.concatenate(nodes)
    offset, is_leaf = np.repeat(first, counts), joined["is_leaf"] != 0
    return BoostedTrees(
        classes=fitted.classes_,
        baseline=np.asarray(fitted._baseline_prediction, np.float64).ravel(),
        roots=first.reshape(len(fitted._predictors), -1),
        feature=joined["feature_idx"].astype(np.int64),
        threshold=joined["num_threshold"].astype(np.float64),
        below=np.where(is_leaf, -1, joined["left"] + offset),
        above=np.where(is_leaf, -1, joined["right"] + offset),
        value=joined["value"].astype(np.float64),
    )


def predict_chance(model: Classifier, x: Any) -> Array:
    """Probabilities [n, C] of rows [n, D], dense or for logistic regression sparse."""
    from scipy.special import expit, softmax

    if isinstance(model, Logistic):
        scores = x @ model.weights if len(model.weights) else np.zeros((x.shape[0], 1))
        return np.asarray(softmax(scores + model.bias, axis=1))
    blocks = [_sum_trees(model, x[start : start + BLOCK]) for start in range(0, len(x), BLOCK)]
    sums = np.concatenate(blocks) if blocks else np.zeros((0, len(model.baseline)))
    if sums.shape[1] > 1:
        return np.asarray(softmax(sums, axis=1))
    chance = expit(sums)
    return np.hstack([1 - chance, chance])


def _sum_trees(model: BoostedTrees, x: Array) -> Array:
    """The sums [n, K] of the leaves that rows [n, D] reach."""
    rows = np.arange(len(x))
    sums = np.tile(model.baseline, (len(x), 1))
    for round_roots in model.roots:
        for k, root in enumerate(round_roots):
            node = np.full(len(x), root)
            while True:
                inner = model.below[node] >= 0
                if not inner.any():
                    break
                is_below = x[rows, model.feature[node]] <= model.threshold[node]
                child = np.where(is_below, model.below[node], model.above[node])
                node = np.where(inner, child, node)
            sums[:, k] += model.value[node]
    return sums


def pack_classifiers(models: Sequence[Classifier]) -> Arrays:
    """The arrays of several classifiers: `<number>.<kind>.<name>`."""
    kinds = {kind: name for name, kind in KINDS.items()}
    return {
        f"{number}.{kinds[type(model)]}.{name}": np.asarray(array)
        for number, model in enumerate(models)
        for name, array in model._asdict().items()
    }


def unpack_classifiers(arrays: Mapping[str, Array]) -> list[Classifier]:
    """The classifiers of `pack_classifiers`; other arrays are left out."""
    parts: dict[tuple[int, str], dict[str, Array]] = {}
    for key, array in arrays.items():
        number, _, rest = key.partition(".")
        kind, _, name = rest.partition(".")
        if kind in KINDS:
            parts.setdefault((int(number), kind), {})[name] = array
    return [KINDS[kind](**parts[number, kind]) for number, kind in sorted(parts)]
