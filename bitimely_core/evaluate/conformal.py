"""Split-conformal sets and intervals with the subject as the unit.

Windows of one person are alike, so the usual quantile over windows covers a new person less often
than it promises. Here every calibration subject counts alike: the threshold is the smallest t at
which the mean over the U subjects and a new one, of which nothing is known, of the share of windows
with a score up to t reaches the level (hierarchical conformal prediction, Lee, Barber and Willett
2023). A window of a new subject is then covered with at least that probability, whatever the model
and however subjects differ.

Legend: n windows, K classes, U subjects.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COVERAGE = 0.9
LEAST_UNITS = math.ceil(COVERAGE / (1 - COVERAGE) - 1e-9)  # with fewer sets would hold everything


class ConformalThreshold(NamedTuple):
    """The largest score that a set or interval holds; None with the reason: the sets hold
    everything.
    """

    value: float | None
    reason: str | None = None


def score_windows(task: str, prediction: Array, target: Array) -> Array:
    """Nonconformity [n]: one less the probability [n, K] of the true class, or the absolute error
    of a value [n].
    """
    if task == "classification":
        right = prediction[np.arange(len(target)), target.astype(np.int64)]
        return np.asarray(1.0 - right, np.float64)
    return np.abs(np.asarray(prediction, np.float64) - target)


def find_threshold(
    scores: Array, units: Array | None, subject: str = "subject"
) -> ConformalThreshold:
    """The threshold for `scores` [n] of the subjects `units` [n]; None: each window is a unit (of
    one person's own windows).

    `subject`: word for what `units` are.
    """
    _, group = np.unique(np.arange(len(scores)) if units is None else units, return_inverse=True)
    count = np.bincount(group)
    n_units, what = len(count), "windows" if units is None else f"{subject}s"
    if n_units < LEAST_UNITS:
        required = f"at least {LEAST_UNITS} required for {COVERAGE:.0%} coverage"
        few = f"{n_units} calibration {what}, {required}"
        return ConformalThreshold(None, few)
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(1 / ((n_units + 1) * count[group[order]]))
    place = min(int(np.searchsorted(reached, COVERAGE - 1e-12)), len(scores) - 1)
    return ConformalThreshold(float(scores[order][place]))


def predict_sets(prediction: Array, threshold: float | None) -> npt.NDArray[np.bool_]:
    """Which classes each set holds [n, K]: those of a probability of at least 1 - threshold; all
    without one.
    """
    return np.asarray(1.0 - prediction <= (np.inf if threshold is None else threshold))


def measure_coverage(covered: Array, units: Array) -> dict[str, float]:
    """Share of covered windows of each subject."""
    names, group = np.unique(units, return_inverse=True)
    shares = np.bincount(group, covered) / np.bincount(group)
    return dict(zip(names.tolist(), shares.tolist(), strict=True))
