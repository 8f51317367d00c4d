"""Bootstrap over subjects, for what has no closed form: curves, calibration errors, means of
several analyses. Legend: `evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bitimely_core.evaluate.metrics import Array

MINIMUM_DEFINED = 0.95  # share of the replicates in which an estimate must be defined


def draw_counts(replicates: Iterable[int], units: int, seed: int = 0) -> Array:
    """How often each unit is drawn in each replicate, [R, U] float64: a function of (seed,
    replicate, units) alone.
    """
    picks = (np.random.default_rng([seed, r]).integers(0, units, units) for r in replicates)
    return np.array([np.bincount(p, minlength=units) for p in picks], dtype=np.float64)
