"""Times to event: models of the hazard in discrete intervals, on lengths of histories, on the best
single code or on counts of codes in windows.

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

from bitimely_core.methods import window_counts
from bitimely_core.methods.classifiers import (
    Classifier,
    extract_classifier,
    pack_classifiers,
    predict_chance,
    unpack_classifiers,
)
from bitimely_core.methods.linear import MIN_PROBABILITY
from bitimely_core.methods.method_contract import Array, Arrays
from bitimely_core.types import group_columns

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

INTERVALS = 8
FREE = 100.0  # value of the intercepts' columns, so that the penalty does not matter to them
MOST_CELLS = 40_000_000  # of the dense table of the trees, one row a subject and interval
LENGTH_PENALTY = 1e-3


# (features [m, D], interval [m] of each row, J) -> table that a model is fitted on
Join = Callable[[Any, Array, int], Any]


class Hazards(NamedTuple):
    """The model of the hazard of one label."""

    edges: Array  # [J + 1] days; empty: no event in the training, no risk
    days: Array  # [H] horizons
    columns: Array  # [H] of the task
    model: Classifier | None


def select_known(target: Array) -> Array:
    """Rows [n] bool of which a time is known, of times and events [n, 2]."""
    return np.asarray(np.isfinite(target).all(1))


def fit_logistic(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    penalties: Sequence[float] = (LENGTH_PENALTY,),
) -> list[Hazards]:
    """Logistic regression for each label.

    Args:
        x: train and validation -> features [n, D], dense or sparse.
        y: train and validation -> times and events [n, C, 2].
        names: of the C columns.
        penalties: that with the best likelihood on validation is taken.
    """
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    models = [LogisticRegression(C=1 / penalty, max_iter=500) for penalty in penalties]
    sparse = {split: csr_matrix(features) for split, features in x.items()}
    return _fit(sparse, y, names, models, add_intercepts)


def predict_logistic(fitted: Sequence[Hazards], x: Any) -> Array:
    """Risks [n, C] of rows [n, D] by `fit_logistic`."""
    from scipy.sparse import csr_matrix

    return _predict(fitted, csr_matrix(x), add_intercepts)


def fit_trees(
    x: Mapping[str, Array], y: Mapping[str, Array], names: Sequence[str], settings: int
) -> list[Hazards]:
    """As `fit_logistic` by trees, of their first settings the best."""
    models = window_counts.make_models(window_counts.TREES, settings)
    return _fit(x, y, names, models, add_interval)


def predict_trees(fitted: Sequence[Hazards], x: Array) -> Array:
    """Risks [n, C] of rows [n, D] by `fit_trees`."""
    return _predict(fitted, x, add_interval)


def count_columns(rows: int) -> int:
    """The most columns of counts that trees read, of so many training rows."""
    return min(window_counts.MOST_COLUMNS, MOST_CELLS // (INTERVALS * max(rows, 1)))


def pack_hazards(fitted: Sequence[Hazards]) -> Arrays:
    """The models as arrays."""
    arrays: Arrays = {}
    for number, part in enumerate(fitted):
        for name in ("edges", "days", "columns"):
            arrays[f"{number}.{name}"] = np.asarray(getattr(part, name))
        if part.model is not None:
            packed = pack_classifiers([part.model]).items()
            arrays |= {f"{number}{key[1:]}": array for key, array in packed}
    return arrays


def unpack_hazards(arrays: Mapping[str, Array]) -> list[Hazards]:
    """The models of `pack_hazards`."""
    fitted: list[Hazards] = []
    while (prefix := f"{len(fitted)}.") + "edges" in arrays:
        parts = {key: array for key, array in arrays.items() if key.startswith(prefix)}
        edges, days, columns = (parts[prefix + name] for name in ("edges", "days", "columns"))
        model = next(iter(unpack_classifiers(parts)), None)
        fitted.append(Hazards(edges, days, columns, model))
    return fitted


def choose_codes(x: csr_matrix, target: Array, names: Sequence[str]) -> list[int]:
    """The column of `x` [n, D] for each label; `target`: times and events [n, C, 2]."""
    codes = []
    for columns, days in group_columns(names).values():
        observed = np.flatnonzero(select_known(target[:, columns[0]]))
        pairs = target[observed, columns[0]].T.astype(np.float64)
        codes.append(select_code(x[observed], pairs, days[-1]))
    return codes


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


def _fit(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    names: Sequence[str],
    models: Sequence[Any],
    join: Join,
) -> list[Hazards]:
    """For each label the model with the best likelihood on validation."""
    fitted = []
    for columns, days in group_columns(names).values():
        times = {split: target[:, columns[0]] for split, target in y.items()}
        edges, model = _fit_label(x, times, days[-1], models, join)
        fitted.append(Hazards(edges, np.array(days), np.array(columns), model))
    return fitted


def _fit_label(
    x: Mapping[str, csr_matrix | Array],
    y: Mapping[str, Array],
    end: float,
    models: Sequence[Any],
    join: Join,
) -> tuple[Array, Classifier | None]:
    """Edges of the intervals and the model of one label; none where no event of train is before
    `end`.
    """
    observed = {split: np.flatnonzero(select_known(times)) for split, times in y.items()}
    pairs = {split: y[split][rows].T.astype(np.float64) for split, rows in observed.items()}
    edges = _make_edges(pairs["train"], end)
    tables = {split: _expand(pair, edges) for split, pair in pairs.items()}
    train, validation = tables["train"], tables["validation"]
    if not (train.outcome == 1).any():
        return np.zeros(0), None
    design = {
        split: join(x[split][observed[split][table.row]], table.interval, len(edges) - 1)
        for split, table in tables.items()
    }

    def measure_loss(model: Any) -> float:
        """The mean negative log likelihood of the outcomes in validation."""
        outcomes = _place_outcomes(model.classes_, model.predict_proba(design["validation"]))
        chance = outcomes[np.arange(len(outcomes)), validation.outcome]
        logs = validation.weight * np.log(np.maximum(chance, MIN_PROBABILITY))
        return -float(logs.sum() / validation.weight.sum())

    model = window_counts.fit_best(
        models if (validation.outcome == 1).any() else models[:1],
        measure_loss,
        design["train"],
        train.outcome,
        train.weight,
    )
    return edges, extract_classifier(model)


def _predict(fitted: Sequence[Hazards], x: Any, join: Join) -> Array:
    """Risks [n, C] of rows [n, D]; 0 of labels without an event in the training."""
    risks = np.zeros((x.shape[0], sum(len(part.columns) for part in fitted)))
    for part in fitted:
        if part.model is not None:
            risks[:, part.columns] = _accumulate(part, x, join)
    return risks


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


def add_intercepts(rows: Any, interval: Array, intervals: int) -> Any:
    """The features of each row, and an intercept for its interval."""
    from scipy.sparse import csr_matrix, hstack

    count = len(interval)
    places = (np.full(count, FREE), (np.arange(count), interval))
    return hstack([rows, csr_matrix(places, (count, intervals))]).tocsr()


def add_interval(rows: Array, interval: Array, intervals: int) -> Array:
    """The features of each row, and the number of its interval."""
    return np.column_stack([rows, interval])


def _place_outcomes(classes: Array, chance: Array) -> Array:
    """Probabilities [m, 3] of the outcomes; 0 for those that the training split lacks."""
    outcomes = np.zeros((len(chance), 3))
    outcomes[:, classes] = chance
    return outcomes


def _accumulate(fitted: Hazards, x: Any, join: Join) -> Array:
    """Cumulative incidences [n, H] on the horizons; the hazard is constant within an interval."""
    assert fitted.model is not None
    n, edges = x.shape[0], fitted.edges
    free, incidence = np.ones(n), np.zeros((n, len(fitted.days)))
    for j, (low, high) in enumerate(pairwise(edges)):
        chance = predict_chance(fitted.model, join(x, np.full(n, j), len(edges) - 1))
        outcomes = _place_outcomes(fitted.model.classes, chance)
        stay = np.clip(outcomes[:, 0], MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        share = outcomes[:, 1] / np.maximum(1 - stay, MIN_PROBABILITY)
        lived = np.clip((fitted.days - low) / (high - low), 0.0, 1.0)
        incidence += (free * share)[:, None] * (1 - stay[:, None] ** lived)
        free = free * stay
    return np.clip(incidence, MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def select_lengths(lengths: Array) -> Array:
    """The features [n, 2] of the baseline of lengths."""
    x = np.log1p(np.asarray(lengths, np.float64))
    return np.stack([x, x**2], 1)
