"""Baselines of histories: counts of every code in windows before the index day, with logistic
regression and with gradient-boosted trees.

Settings are chosen by the log loss on the validation split; as many are tried as the run tried
learning rates, and at least `LEAST_SETTINGS`.

Legend: n sequences, C ids of the vocabulary, W windows, K labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core.claims.dates import MONTH
from bitimely_core.evaluate.linear import MIN_PROBABILITY
from bitimely_core.schemas.runs import RunRecord

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from bitimely_core.tokens.sequences import EventSequences

Array = npt.NDArray[Any]

# before the index day, which belongs to each; the last is all history
WINDOW_DAYS = (30, 180, 365, np.inf)
# of the trees, which need a dense table: the counts that most training sequences have, of equal
# ones the first
MOST_COLUMNS = 400
MOST_TRAINING = 50_000  # sequences of train and of validation that are fitted on, drawn at random
LEAST_SETTINGS = 4
LOGISTIC, TREES = "counts-logistic", "counts-trees"
WINDOWS = "counts of every code in the 30, 180 and 365 days before the index day and ever"
DESCRIPTIONS = {
    LOGISTIC: f"logistic regression on logarithms of {WINDOWS}",
    TREES: f"gradient-boosted trees on {WINDOWS} (the {MOST_COLUMNS} counts that most training sequences have)",
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
    at = np.arange(len(owner)) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    time, last = sequences.clock[at].astype(np.float64), np.full(len(rows), -np.inf)
    np.maximum.at(last, owner, time)
    index = sequences.index_time[rows].astype(np.float64)
    days = np.rint((np.where(np.isnan(index), last, index)[owner] - time) * MONTH)
    inside = [np.flatnonzero((days >= 0) & (days <= most)) for most in WINDOW_DAYS]
    column = np.concatenate(
        [
            k * sequences.codes + sequences.flat[at[one]].astype(np.int64)
            for k, one in enumerate(inside)
        ]
    )
    owner = owner[np.concatenate(inside)]
    return coo_matrix(
        (np.ones(len(owner), np.float32), (owner, column)),
        (len(rows), len(inside) * sequences.codes),
    ).tocsr()


def count_settings(record: RunRecord) -> int:
    """How many settings a baseline of a run tries on the validation split."""
    return max(LEAST_SETTINGS, len(record.tuning.trials) if record.tuning else 1)


def select_columns(counts: csr_matrix, most: int | None = None) -> Array:
    """The columns of the trees, ascending: at most so many (`MOST_COLUMNS`), none that is 0
    everywhere.
    """
    carriers = counts.getnnz(0)
    order = np.argsort(-carriers, kind="stable")[: most or MOST_COLUMNS]
    return np.sort(order[carriers[order] > 0])


def predict_from_counts(
    kind: str,
    sequences: EventSequences,
    rows: Mapping[str, Array],
    y: Mapping[str, Array],
    settings: int,
) -> Array:
    """Probabilities [n, K] of the rows of test by `LOGISTIC` or `TREES`, of the first `settings` of
    its settings the best on validation.

    `rows`: split -> positions in the full index; `y`: train, validation -> labels [n, K], NaN: not
    known.
    """
    x: dict[str, csr_matrix] = {split: count_windows(sequences, at) for split, at in rows.items()}
    if kind == TREES:
        kept = select_columns(x["train"])
        x = {split: one[:, kept].toarray() for split, one in x.items()}
    else:
        x = {split: one.log1p() for split, one in x.items()}
    out = np.empty((len(rows["test"]), y["train"].shape[1]))
    for k in range(out.shape[1]):
        known = {split: np.flatnonzero(np.isfinite(of[:, k])) for split, of in y.items()}
        train, held = (
            y[split][known[split], k].astype(np.int64) for split in ("train", "validation")
        )
        if len(np.unique(train)) < 2 or not x["train"].shape[1]:
            out[:, k] = train.mean() if len(train) else 0.5
            continue
        best = np.inf
        with warnings.catch_warnings():  # a fit that stops early is one more setting
            warnings.simplefilter("ignore")
            for model in make_models(kind, settings if len(held) else 1):
                model.fit(x["train"][known["train"]], train)
                found = (
                    np.clip(
                        model.predict_proba(x["validation"][known["validation"]])[:, 1],
                        MIN_PROBABILITY,
                        None,
                    )
                    if len(held)
                    else held
                )
                loss = (
                    -float(
                        np.log(
                            np.where(held == 1, found, np.clip(1 - found, MIN_PROBABILITY, None))
                        ).mean()
                    )
                    if len(held)
                    else 0.0
                )
                if loss < best:
                    best, out[:, k] = loss, model.predict_proba(x["test"])[:, 1]
    return np.clip(out, MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def make_models(kind: str, settings: int) -> Iterator[Any]:
    """Classifiers of scikit-learn with the first settings."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if kind == LOGISTIC:
        yield from (
            LogisticRegression(C=1 / penalty, max_iter=500) for penalty in PENALTIES[:settings]
        )
        return
    for rate, trees, leaves, least in BOOSTING[:settings]:
        yield HistGradientBoostingClassifier(
            learning_rate=rate,
            max_iter=trees,
            max_leaf_nodes=leaves,
            min_samples_leaf=least,
            early_stopping=False,
            random_state=0,
        )
