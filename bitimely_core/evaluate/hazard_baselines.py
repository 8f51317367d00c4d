"""Baselines of times to event: logistic regression or gradient-boosted trees of the hazard in
discrete intervals, on lengths, on the best single code or on counts of codes in windows.

One row per subject and interval, with its outcome there (none, the event, death); an interval that
ends by censoring weighs its share. The intervals have free intercepts. Legend: n rows, C columns
(labels by horizons), 2: time and event, J intervals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.evaluate import survival, window_counts
from bitimely_core.evaluate.linear import MIN_PROBABILITY
from bitimely_core.evaluate.metrics import Array
from bitimely_core.types import parse_horizon

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

INTERVALS = 8
FREE = 100.0  # value of the intercepts' columns, so that the penalty does not matter to them
KIND, TREES = "hazard-counts", "hazard-trees"
MOST_CELLS = 40_000_000  # of the dense table of the trees, one row a subject and interval
DESCRIPTIONS = {
    KIND: f"logistic regression of the hazard in {INTERVALS} intervals on logarithms of {window_counts.WINDOWS}",
    TREES: f"gradient-boosted trees of the hazard in {INTERVALS} intervals on the interval and {window_counts.WINDOWS} (at most the "
    f"{window_counts.MOST_COLUMNS} counts that most training sequences have)",
}
LENGTH_PENALTY = 1e-3


def predict_from_hazards(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    penalties: Sequence[float] = (LENGTH_PENALTY,),
) -> Array:
    """Risks [n, C] of the rows of test; of several penalties that with the best likelihood on
    validation.

    `x`: split -> features [n, D], dense or sparse; `y`: train and validation -> [n, C, 2]; `names`
    of the C columns.
    """
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    models = [LogisticRegression(C=1 / penalty, max_iter=500) for penalty in penalties]
    return _predict({split: csr_matrix(of) for split, of in x.items()}, y, names, models, _join)


def predict_from_trees(
    x: Mapping[str, csr_matrix], y: Mapping[str, Array], names: Sequence[str], settings: int
) -> Array:
    """As `predict_from_hazards` by trees, of their first settings the best."""
    most = min(window_counts.MOST_COLUMNS, MOST_CELLS // (INTERVALS * max(x["train"].shape[0], 1)))
    kept = window_counts.select_columns(x["train"], most)
    dense = {split: of[:, kept].toarray() for split, of in x.items()}
    models = list(window_counts.make_models(window_counts.TREES, settings))
    return _predict(
        dense,
        y,
        names,
        models,
        lambda table, row, interval, _: np.column_stack([table[row], interval]),
    )


def predict_from_code(x: Mapping[str, csr_matrix], target: Array, names: Sequence[str]) -> Array:
    """Risks [n, C] of the rows of test from one code for each label, of which the score test of the
    hazard in train is largest.

    `x`: train and test -> counts of codes [n, D]; `target`: of train [n, C, 2].
    """
    out, labels = (
        np.zeros((x["test"].shape[0], len(names))),
        [parse_horizon(name) for name in names],
    )
    for label in dict.fromkeys(name for name, _ in labels):
        own = [k for k, (name, _) in enumerate(labels) if name == label]
        known = np.flatnonzero(survival.select_known(target[:, own[0]]))
        time, event = target[known, own[0]].astype(np.float64).T
        code = select_code(x["train"][known], time, event, max(labels[k][1] for k in own))
        one = {split: of[:, [code]] for split, of in x.items()} | {
            "validation": x["train"][:0, [code]]
        }
        y = {"train": target[:, own], "validation": target[:0, own]}
        out[:, own] = predict_from_hazards(one, y, [names[k] for k in own])
    return out


def select_code(x: csr_matrix, time: Array, event: Array, end: float) -> int:
    """The column of `x` [n, D] with the largest score statistic in a discrete-time logistic model
    of the hazard with free intercepts.
    """
    row, interval, outcome, _ = _expand(time, event, edges := _make_edges(time, event, end))
    score, variance = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for j in range(len(edges) - 1):
        at, hit = row[interval == j], outcome[interval == j] == 1
        share, sums = hit.mean() if len(at) else 0.0, np.asarray(x[at].sum(0)).ravel()
        score += np.asarray(x[at[hit]].sum(0)).ravel() - share * sums
        variance += (
            share
            * (1 - share)
            * (np.asarray(x[at].power(2).sum(0)).ravel() - sums**2 / max(len(at), 1))
        )
    return int(
        np.argmax(np.divide(score**2, variance, out=np.zeros(len(score)), where=variance > 1e-9))
    )


def _predict(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    models: Sequence[Any],
    join: Callable[[Any, Array, Array, int], Any],
) -> Array:
    """Risks [n, C] of the rows of test by the model with the best likelihood on validation; `join`:
    features, rows, intervals -> table.
    """
    labels = [parse_horizon(name) for name in names]
    out = np.zeros((x["test"].shape[0], len(names)))
    for label in dict.fromkeys(name for name, _ in labels):
        own = [k for k, (name, _) in enumerate(labels) if name == label]
        known = {
            split: np.flatnonzero(survival.select_known(of[:, own[0]])) for split, of in y.items()
        }
        times = {split: y[split][at, own[0]].astype(np.float64).T for split, at in known.items()}
        edges = _make_edges(times["train"][0], times["train"][1], max(labels[k][1] for k in own))
        tables = {split: _expand(of[0], of[1], edges) for split, of in times.items()}
        design = {
            split: join(x[split][known[split]], *table[:2], len(edges) - 1)
            for split, table in tables.items()
        }
        present = np.unique(tables["train"][2])
        if 1 not in present:
            continue
        best = np.inf
        for model in models if len(tables["validation"][2]) else models[:1]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(design["train"], tables["train"][2], sample_weight=tables["train"][3])
            column = {int(outcome): k for k, outcome in enumerate(model.classes_)}
            loss, (_, _, outcome, weight) = 0.0, tables["validation"]
            if len(outcome):
                chance = model.predict_proba(design["validation"])
                at = np.array(
                    [
                        chance[i, column[one]] if one in column else 0.0
                        for i, one in enumerate(outcome.tolist())
                    ]
                )
                loss = -float(
                    (weight * np.log(np.maximum(at, MIN_PROBABILITY))).sum() / weight.sum()
                )
            if loss < best:
                best, out[:, own] = (
                    loss,
                    _accumulate(
                        partial(join, x["test"]),
                        model,
                        x["test"].shape[0],
                        edges,
                        [labels[k][1] for k in own],
                    ),
                )
    return out


def _make_edges(time: Array, event: Array, end: float) -> Array:
    """Days from 0 to `end`, as many events between them."""
    inner = (
        np.unique(np.round(np.quantile(time[event == 1], np.arange(1, INTERVALS) / INTERVALS)))
        if (event == 1).any()
        else np.zeros(0)
    )
    return np.array([0.0, *inner[(inner > 0) & (inner < end)], end])


def _expand(time: Array, event: Array, edges: Array) -> tuple[Array, Array, Array, Array]:
    """Row, interval, outcome (0, 1, 2) and weight of every row and interval that it enters."""
    row, interval = np.nonzero(time[:, None] > edges[:-1])
    ends = (event[row] > 0) & (time[row] <= edges[interval + 1])
    lived = np.minimum((time[row] - edges[interval]) / np.diff(edges)[interval], 1.0)
    return row, interval, np.where(ends, event[row], 0).astype(np.int64), np.where(ends, 1.0, lived)


def _join(x: Any, row: Array, interval: Array, intervals: int) -> Any:
    """The features of each row, and an intercept for its interval."""
    from scipy.sparse import csr_matrix, hstack

    places = csr_matrix(
        (np.full(len(row), FREE), (np.arange(len(row)), interval)), (len(row), intervals)
    )
    return hstack([x[row], places]).tocsr()


def _accumulate(
    join: Callable[[Array, Array, int], Any],
    model: Any,
    n: int,
    edges: Array,
    days: Sequence[float],
) -> Array:
    """Cumulative incidences [n, len(days)]; the hazard is constant within an interval. `join`:
    rows, intervals -> table.
    """
    free, out, classes = np.ones(n), np.zeros((n, len(days))), model.classes_.tolist()
    for j, (low, high) in enumerate(pairwise(edges)):
        chance = model.predict_proba(join(np.arange(n), np.full(n, j), len(edges) - 1))
        stay = (
            np.clip(chance[:, classes.index(0)], MIN_PROBABILITY, 1 - MIN_PROBABILITY)
            if 0 in classes
            else np.full(n, MIN_PROBABILITY)
        )
        share = chance[:, classes.index(1)] / np.maximum(1 - stay, MIN_PROBABILITY)
        for k, day in enumerate(days):
            out[:, k] += free * share * (1 - stay ** np.clip((day - low) / (high - low), 0.0, 1.0))
        free = free * stay
    return np.clip(out, MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def select_lengths(lengths: Array) -> Array:
    """The features of the baseline of lengths, [n, 2]."""
    x = np.log1p(np.asarray(lengths, np.float64))
    return np.stack([x, x**2], 1)
