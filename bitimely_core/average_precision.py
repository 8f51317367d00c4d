"""Average precision of scores, of which many may be tied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def average_precision(score: Array, positive: Array) -> float | None:
    """Step-wise sum of precision over the steps of recall, tied scores as one step; None without
    positives.
    """
    value, place = np.unique(score, return_inverse=True)
    n = np.bincount(place, minlength=len(value))
    cases = np.bincount(place, weights=positive, minlength=len(value))
    return average_groups(n[::-1], cases[::-1])


def average_groups(n: Array, cases: Array) -> float | None:
    """Average precision of groups of tied scores in falling order: subjects and cases of each."""
    total = cases.sum()
    if not total:
        return None
    return float(np.sum(cases / total * np.cumsum(cases) / np.maximum(np.cumsum(n), 1)))
