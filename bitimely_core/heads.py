"""Heads under the name that the library API promises; the code is in `models.heads`."""

from bitimely_core.models.heads import (
    POOLS,
    Classifier,
    Head,
    MultiLabel,
    Regressor,
    binary_cross_entropy,
    build,
    compute_vectors,
    cross_entropy,
    load,
    losses,
    mean_squared_error,
    pool,
)

__all__ = [
    "POOLS",
    "Classifier",
    "Head",
    "MultiLabel",
    "Regressor",
    "binary_cross_entropy",
    "build",
    "compute_vectors",
    "cross_entropy",
    "load",
    "losses",
    "mean_squared_error",
    "pool",
]
