"""Baselines of times to event: models of the hazard in discrete intervals, on lengths of histories,
on the best single code or on counts of codes in windows.

The model is logistic regression or gradient-boosted trees. A subject has a row for each interval
that it enters, with its outcome there: 0 none, 1 the event, 2 death. An interval that ends by
censoring weighs its share. The intervals have free intercepts.

Legend: n rows, D features, C columns (labels by horizons), 2: time and event, J intervals, m rows
of subjects by intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core.evaluate import window_counts
from bitimely_core.evaluate.metrics import Array
from bitimely_core.evaluate.survival import group_columns, select_known
from bitimely_core.methods.linear import MIN_PROBABILITY

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

INTERVALS = 8
FREE = 100.0  # value of the intercepts' columns, so that the penalty does not matter to them
KIND, TREES = "hazard-counts", "hazard-trees"
MOST_CELLS = 40_000_000  # of the dense table of the trees, one row a subject and interval
DESCRIPTIONS = {
    KIND: f"logistic regression of the hazard in {INTERVALS} intervals on logarithms of "
    f"{window_counts.WINDOWS}",
    TREES: f"gradient-boosted trees of the hazard in {INTERVALS} intervals on the interval and "
    f"{window_counts.WINDOWS} (at most the {window_counts.MOST_COLUMNS} counts that most training "
    "sequences have)",
}
LENGTH_PENALTY = 1e-3


# (features [m, D], interval [m] of each row, J) -> table that a model is fitted on
Join = Callable[[Any, Array, int], Any]


def predict_from_hazards(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    penalties: Sequence[float] = (LENGTH_PENALTY,),
) -> Array:
    """Risks [n, C] of the rows of test by logistic regression.

    Args:
        x: split -> features [n, D], dense or sparse.
        y: train and validation -> times and events [n, C, 2].
        names: of the C columns.
        penalties: that with the best likelihood on validation is taken.
    """
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    models = [LogisticRegression(C=1 / penalty, max_iter=500) for penalty in penalties]
    sparse = {split: csr_matrix(features) for split, features in x.items()}
    return _predict(sparse, y, names, models, _add_intercepts)


def predict_from_trees(
    x: Mapping[str, csr_matrix], y: Mapping[str, Array], names: Sequence[str], settings: int
) -> Array:
    """As `predict_from_hazards` by trees, of their first settings the best."""
    most = min(window_counts.MOST_COLUMNS, MOST_CELLS // (INTERVALS * max(x["train"].shape[0], 1)))
    columns = window_counts.select_columns(x["train"], most)
    dense = {split: counts[:, columns].toarray() for split, counts in x.items()}
    models = window_counts.make_models(window_counts.TREES, settings)
    return _predict(dense, y, names, models, lambda rows, j, _: np.column_stack([rows, j]))


def predict_from_code(x: Mapping[str, csr_matrix], target: Array, names: Sequence[str]) -> Array:
    """Risks [n, C] of the rows of test from one code for each label: that of `select_code`.

    `x`: train and test -> counts of codes [n, D]; `target`: of train [n, C, 2].
    """
    risks = np.zeros((x["test"].shape[0], len(names)))
    for columns, days in group_columns(names).values():
        observed = np.flatnonzero(select_known(target[:, columns[0]]))
        pairs = target[observed, columns[0]].T.astype(np.float64)
        code = select_code(x["train"][observed], pairs, days[-1])
        features = {split: counts[:, [code]] for split, counts in x.items()}
        features["validation"] = features["train"][:0]
        y = {"train": target[:, columns], "validation": target[:0, columns]}
        risks[:, columns] = predict_from_hazards(features, y, [names[k] for k in columns])
    return risks


def select_code(x: csr_matrix, pairs: Array, end: float) -> int:
    """The column of `x` [n, D] with the largest score statistic in a discrete-time logistic model
    of the hazard with free intercepts; `pairs`: times and events [2, n].
    """
    edges = _make_edges(pairs, end)
    table = _expand(pairs, edges)
    score, variance = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for j in range(len(edges) - 1):
        inside = table.interval == j
        present, hit = x[table.row[inside]], table.outcome[inside] == 1
        count = max(len(hit), 1)
        share = hit.sum() / count
        sums, squares = (np.asarray(part.sum(0)).ravel() for part in (present, present.power(2)))
        score += np.asarray(present[hit].sum(0)).ravel() - share * sums
        variance += share * (1 - share) * (squares - sums**2 / count)
    statistic = np.divide(score**2, variance, out=np.zeros(len(score)), where=variance > 1e-9)
    return int(np.argmax(statistic))


def _predict(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    models: Sequence[Any],
    join: Join,
) -> Array:
    """Risks [n, C] of the rows of test by the model with the best likelihood on validation."""
    risks = np.zeros((x["test"].shape[0], len(names)))
    for columns, days in group_columns(names).values():
        times = {split: target[:, columns[0]] for split, target in y.items()}
        risks[:, columns] = _predict_label(x, times, days, models, join)
    return risks


def _predict_label(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    days: Sequence[float],
    models: Sequence[Any],
    join: Join,
) -> Array:
    """Risks [n, H] of one label at its H horizons; 0 where no event of train is before the last."""
    observed = {split: np.flatnonzero(select_known(times)) for split, times in y.items()}
    pairs = {split: y[split][rows].T.astype(np.float64) for split, rows in observed.items()}
    edges = _make_edges(pairs["train"], days[-1])
    tables = {split: _expand(pair, edges) for split, pair in pairs.items()}
    train, validation = tables["train"], tables["validation"]
    if not (train.outcome == 1).any():
        return np.zeros((x["test"].shape[0], len(days)))
    design = {
        split: join(x[split][observed[split][table.row]], table.interval, len(edges) - 1)
        for split, table in tables.items()
    }

    def measure_loss(model: Any) -> float:
        """The mean negative log likelihood of the outcomes in validation."""
        outcomes = _predict_outcomes(model, design["validation"])
        chance = outcomes[np.arange(len(outcomes)), validation.outcome]
        logs = validation.weight * np.log(np.maximum(chance, MIN_PROBABILITY))
        return -float(logs.sum() / validation.weight.sum())

    model = window_counts.fit_best(
        models if len(validation.row) else models[:1],
        measure_loss,
        design["train"],
        train.outcome,
        train.weight,
    )
    return _accumulate(model, x["test"], join, edges, days)


def _make_edges(pairs: Array, end: float) -> Array:
    """Days [J + 1] from 0 to `end`, as many events of times and events [2, n] between them."""
    time, event = pairs
    events = time[event == 1]
    if len(events):
        events = np.quantile(events, np.arange(1, INTERVALS) / INTERVALS)
    inner = np.unique(np.round(events))
    return np.array([0.0, *inner[(inner > 0) & (inner < end)], end])


class SubjectIntervals(NamedTuple):
    """One row for each subject and interval that it enters."""

    row: Array  # [m] of the subject
    interval: Array  # [m]
    outcome: Array  # [m] 0, 1 or 2
    weight: Array  # [m] share of the interval that is observed


def _expand(pairs: Array, edges: Array) -> SubjectIntervals:
    """The rows of times and events [2, n]."""
    time, event = pairs
    row, interval = np.nonzero(time[:, None] > edges[:-1])
    ends = (event[row] > 0) & (time[row] <= edges[interval + 1])
    lived = np.minimum((time[row] - edges[interval]) / np.diff(edges)[interval], 1.0)
    outcome = np.where(ends, event[row], 0).astype(np.int64)
    return SubjectIntervals(row, interval, outcome, np.where(ends, 1.0, lived))


def _add_intercepts(rows: Any, interval: Array, intervals: int) -> Any:
    """The features of each row, and an intercept for its interval."""
    from scipy.sparse import csr_matrix, hstack

    count = len(interval)
    places = (np.full(count, FREE), (np.arange(count), interval))
    return hstack([rows, csr_matrix(places, (count, intervals))]).tocsr()


def _predict_outcomes(model: Any, table: Any) -> Array:
    """Probabilities [m, 3] of the outcomes; 0 for those that the training split lacks."""
    chance = model.predict_proba(table)
    outcomes = np.zeros((len(chance), 3))
    outcomes[:, model.classes_] = chance
    return outcomes


def _accumulate(model: Any, x: Any, join: Join, edges: Array, days: Sequence[float]) -> Array:
    """Cumulative incidences [n, H] on `days`; the hazard is constant within an interval."""
    n = x.shape[0]
    free, incidence = np.ones(n), np.zeros((n, len(days)))
    for j, (low, high) in enumerate(pairwise(edges)):
        outcomes = _predict_outcomes(model, join(x, np.full(n, j), len(edges) - 1))
        stay = np.clip(outcomes[:, 0], MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        share = outcomes[:, 1] / np.maximum(1 - stay, MIN_PROBABILITY)
        lived = np.clip((np.asarray(days) - low) / (high - low), 0.0, 1.0)
        incidence += (free * share)[:, None] * (1 - stay[:, None] ** lived)
        free = free * stay
    return np.clip(incidence, MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def select_lengths(lengths: Array) -> Array:
    """The features [n, 2] of the baseline of lengths."""
    x = np.log1p(np.asarray(lengths, np.float64))
    return np.stack([x, x**2], 1)
