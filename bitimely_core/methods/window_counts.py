"""Counts of every code of a history in windows of time before the index day, and the classifiers
that read them: logistic regression and gradient-boosted trees.

Their settings are chosen by the log loss on the validation split.

Legend: n sequences, C ids of the vocabulary, W windows, K labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core.methods.classifiers import (
    Classifier,
    extract_classifier,
    make_constant,
    predict_chance,
)
from bitimely_core.methods.linear import MIN_PROBABILITY
from bitimely_core.tokens.sequences import MONTH, EventSequences

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array = npt.NDArray[Any]

WINDOW_DAYS = (30, 180, 365, np.inf)  # before the index day, which belongs to each
MOST_COLUMNS = 400  # of the trees, which need a dense table
LOGISTIC, TREES = "logistic", "trees"
WINDOWS = "counts of every code in the 30, 180 and 365 days before the index day and ever"
# 1 / C of scikit-learn. The first of each list is taken where validation cannot choose: of few
# cases it gives risks that are right on average
PENALTIES = (10.0, 1.0, 100.0, 0.1, 1000.0, 30.0, 3.0, 300.0, 0.3)
BOOSTING = (  # learning rate, trees, leaves of a tree, least training sequences of a leaf
    (0.1, 50, 4, 5),
    (0.1, 100, 31, 20),
    (0.05, 100, 7, 20),
    (0.05, 300, 15, 20),
    (0.03, 300, 31, 50),
    (0.1, 200, 7, 10),
    (0.03, 100, 3, 20),
    (0.2, 50, 15, 20),
    (0.05, 200, 63, 10),
)


def count_rows(sequences: EventSequences) -> csr_matrix:
    """`count_windows` of all rows of the sequences."""
    return count_windows(sequences, sequences.rows)


def count_windows(sequences: EventSequences, rows: Array) -> csr_matrix:
    """How often each code is in each window before the index day, [n, W C] float32, windows in the
    order of `WINDOW_DAYS`.

    `rows`: positions in the full index. Without an index day the last event stands for it. Events
    after it count nowhere.
    """
    from scipy.sparse import coo_matrix

    first = sequences.firsts[rows]
    lengths = sequences.firsts[rows + 1] - first
    owner = np.repeat(np.arange(len(rows)), lengths)
    place = np.arange(len(owner)) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    time, last = sequences.clock[place].astype(np.float64), np.full(len(rows), -np.inf)
    np.maximum.at(last, owner, time)
    index = sequences.index_time[rows].astype(np.float64)
    days = np.rint((np.where(np.isnan(index), last, index)[owner] - time) * MONTH)
    code = sequences.flat[place].astype(np.int64)
    window, event = np.nonzero([(days >= 0) & (days <= most) for most in WINDOW_DAYS])
    column = window * sequences.codes + code[event]
    counts = (np.ones(len(event), np.float32), (owner[event], column))
    return coo_matrix(counts, (len(rows), len(WINDOW_DAYS) * sequences.codes)).tocsr()


def select_columns(counts: csr_matrix, most: int = MOST_COLUMNS) -> Array:
    """The columns of the trees, ascending: those that `most` sequences have, of equal ones the
    first, none that is 0 everywhere.
    """
    carriers = counts.getnnz(0)
    order = np.argsort(-carriers, kind="stable")[:most]
    return np.sort(order[carriers[order] > 0])


def fit_labels(
    kind: str, x: Mapping[str, csr_matrix | Array], y: Mapping[str, Array], settings: int
) -> list[Classifier]:
    """A classifier for each of K labels, of its first `settings` the best on validation.

    `x`: train and validation -> features [n, D]; `y`: labels [n, K], NaN: not known.
    """
    columns = range(y["train"].shape[1])
    return [
        _fit_label(kind, x, {split: values[:, k] for split, values in y.items()}, settings)
        for k in columns
    ]


def predict_labels(models: Sequence[Classifier], x: csr_matrix | Array) -> Array:
    """Probabilities [n, K] of the labels of rows [n, D]."""
    chances = [predict_chance(model, x)[:, 1] for model in models]
    return np.clip(np.stack(chances, 1), MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def _fit_label(
    kind: str, x: Mapping[str, csr_matrix | Array], y: Mapping[str, Array], settings: int
) -> Classifier:
    """The classifier of one label; where train cannot teach it, its rate there."""
    labelled = {split: np.flatnonzero(np.isfinite(values)) for split, values in y.items()}
    train, validation = (
        y[split][labelled[split]].astype(np.int64) for split in ("train", "validation")
    )
    if len(np.unique(train)) < 2 or not x["train"].shape[1]:
        return make_constant(float(train.mean()) if len(train) else 0.5)

    def measure_loss(model: Any) -> float:
        """The log loss on validation."""
        chance = model.predict_proba(x["validation"][labelled["validation"]])[:, 1]
        chance = np.maximum(chance, MIN_PROBABILITY)
        right = np.where(validation == 1, chance, np.maximum(1 - chance, MIN_PROBABILITY))
        return -float(np.log(right).mean())

    # of people who all have a label, or all have not, the least loss has the most extreme risk
    models = make_models(kind, settings if len(np.unique(validation)) == 2 else 1)
    return extract_classifier(fit_best(models, measure_loss, x["train"][labelled["train"]], train))


def fit_best(models: Sequence[Any], measure_loss: Callable[[Any], float], *train: Any) -> Any:
    """The model with the least loss after fitting; of one alone the loss is not measured.

    `train`: features, classes and, where rows count differently, weights.
    """
    with warnings.catch_warnings():  # a fit that stops early is one more setting
        warnings.simplefilter("ignore")
        fitted = [model.fit(*train) for model in models]
    return min(fitted, key=measure_loss) if len(fitted) > 1 else fitted[0]


def make_models(kind: str, settings: int) -> list[Any]:
    """Classifiers of scikit-learn with the first settings."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if kind == LOGISTIC:
        return [LogisticRegression(C=1 / penalty, max_iter=500) for penalty in PENALTIES[:settings]]
    return [
        HistGradientBoostingClassifier(
            learning_rate=rate,
            max_iter=trees,
            max_leaf_nodes=leaves,
            min_samples_leaf=least,
            early_stopping=False,
            random_state=0,
        )
        for rate, trees, leaves, least in BOOSTING[:settings]
    ]
