"""Baselines of histories of events: logistic regression and gradient-boosted trees on counts of
every code in windows of time before the index day.

Settings are chosen by the log loss on the validation split. As many are tried as the run tried
learning rates, and at least `LEAST_SETTINGS`.

Legend: n sequences, C ids of the vocabulary, W windows, K labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core.claims.dates import MONTH
from bitimely_core.methods.linear import MIN_PROBABILITY
from bitimely_core.schemas.runs import RunRecord

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from bitimely_core.tokens.sequences import EventSequences

Array = npt.NDArray[Any]

WINDOW_DAYS = (30, 180, 365, np.inf)  # before the index day, which belongs to each
MOST_COLUMNS = 400  # of the trees, which need a dense table
MOST_TRAINING = 50_000  # sequences of train and of validation that are fitted on, drawn at random
LEAST_SETTINGS = 4
LOGISTIC, TREES = "counts-logistic", "counts-trees"
WINDOWS = "counts of every code in the 30, 180 and 365 days before the index day and ever"
DESCRIPTIONS = {
    LOGISTIC: f"logistic regression on logarithms of {WINDOWS}",
    TREES: f"gradient-boosted trees on {WINDOWS} (the {MOST_COLUMNS} counts that most training "
    "sequences have)",
}
TITLES = {LOGISTIC: "window counts logistic", TREES: "window counts trees"}
# 1 / C of scikit-learn; the first of each list is the default
PENALTIES = (10.0, 1.0, 100.0, 0.1, 1000.0, 30.0, 3.0, 300.0, 0.3)
BOOSTING = (  # learning rate, trees, leaves of a tree, least training sequences of a leaf
    (0.1, 100, 31, 20),
    (0.05, 100, 7, 20),
    (0.1, 50, 4, 5),
    (0.05, 300, 15, 20),
    (0.03, 300, 31, 50),
    (0.1, 200, 7, 10),
    (0.03, 100, 3, 20),
    (0.2, 50, 15, 20),
    (0.05, 200, 63, 10),
)


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


def count_settings(record: RunRecord) -> int:
    """How many settings a baseline of a run tries on the validation split."""
    return max(LEAST_SETTINGS, len(record.tuning.trials) if record.tuning else 1)


def select_columns(counts: csr_matrix, most: int = MOST_COLUMNS) -> Array:
    """The columns of the trees, ascending: those that `most` sequences have, of equal ones the
    first, none that is 0 everywhere.
    """
    carriers = counts.getnnz(0)
    order = np.argsort(-carriers, kind="stable")[:most]
    return np.sort(order[carriers[order] > 0])


def predict_from_counts(
    kind: str,
    sequences: EventSequences,
    rows: Mapping[str, Array],
    y: Mapping[str, Array],
    settings: int,
) -> Array:
    """Probabilities [n, K] of the rows of test by `LOGISTIC` or `TREES`.

    Args:
        kind: `LOGISTIC` or `TREES`.
        sequences: those that hold all rows.
        rows: split -> positions in the full index.
        y: train and validation -> labels [n, K], NaN: not known.
        settings: so many of its first settings are tried on the validation split.
    """
    counts = {split: count_windows(sequences, places) for split, places in rows.items()}
    x: dict[str, csr_matrix | Array]
    if kind == TREES:
        columns = select_columns(counts["train"])
        x = {split: matrix[:, columns].toarray() for split, matrix in counts.items()}
    else:
        x = {split: matrix.log1p() for split, matrix in counts.items()}
    prediction = np.empty((len(rows["test"]), y["train"].shape[1]))
    for k in range(prediction.shape[1]):
        labels = {split: values[:, k] for split, values in y.items()}
        prediction[:, k] = _predict_label(kind, x, labels, settings)
    return np.clip(prediction, MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def _predict_label(
    kind: str, x: Mapping[str, csr_matrix | Array], y: Mapping[str, Array], settings: int
) -> Array | float:
    """Probabilities [n] of one label; where train cannot teach it, its rate there."""
    labelled = {split: np.flatnonzero(np.isfinite(y[split])) for split in ("train", "validation")}
    train, validation = (y[split][rows].astype(np.int64) for split, rows in labelled.items())
    if len(np.unique(train)) < 2 or not x["train"].shape[1]:
        return float(train.mean()) if len(train) else 0.5

    def measure_loss(model: Any) -> float:
        """The log loss on validation."""
        chance = model.predict_proba(x["validation"][labelled["validation"]])[:, 1]
        chance = np.maximum(chance, MIN_PROBABILITY)
        right = np.where(validation == 1, chance, np.maximum(1 - chance, MIN_PROBABILITY))
        return -float(np.log(right).mean())

    models = make_models(kind, settings if len(validation) else 1)
    model = fit_best(models, measure_loss, x["train"][labelled["train"]], train)
    return np.asarray(model.predict_proba(x["test"])[:, 1])


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
