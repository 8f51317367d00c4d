"""Computes mean and spread of channels from windows that come in pieces, in any order.

Legend: n windows, T samples a window, V channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bitimely_core.schemas.tokens import ChannelStatistics


class Moments(NamedTuple):
    """Of some values: how many, their mean, and the sum of squared deviations from it."""

    n: int
    mean: float
    deviations: float

    @property
    def std(self) -> float:
        """Standard deviation (over n, not n - 1); 0 without values."""
        return math.sqrt(self.deviations / self.n) if self.n else 0.0


def compute_moments(piece: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> list[Moments]:
    """Of `piece` [n, T, V] * scale + offset, one a channel.

    Float NaN is missing and not counted; int16 is summed exactly, in integers.
    """
    moments = []
    for v, (step, zero) in enumerate(zip(scale.tolist(), offset.tolist(), strict=True)):
        if piece.dtype == np.int16:
            digital = piece[:, :, v].ravel().astype(np.int64)
            n, total, squares = len(digital), int(digital.sum()), int(digital @ digital)
            mean = step * (total / n) + zero if n else 0.0
            deviations = step**2 * ((n * squares - total**2) / n) if n else 0.0
        else:
            x = piece[:, :, v].ravel().astype(np.float64)
            x = x[np.isfinite(x)] * step + zero
            n, mean = len(x), float(x.mean()) if len(x) else 0.0
            deviations = float(((x - mean) ** 2).sum())
        moments.append(Moments(n, mean, deviations))
    return moments


def pool_moments(parts: Iterable[Moments]) -> Moments:
    """Of all parts together.

    The sums over parts are exact (fsum), so their order does not change a bit of the result.
    """
    parts = [part for part in parts if part.n]
    n = sum(part.n for part in parts)
    if n == 0:
        return Moments(0, 0.0, 0.0)
    mean = math.fsum(part.n * part.mean for part in parts) / n
    between = (part.n * (part.mean - mean) ** 2 for part in parts)
    return Moments(n, mean, math.fsum((*(part.deviations for part in parts), *between)))


def compute_normalisation(channels: Sequence[ChannelStatistics]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [V] float64 to normalise with.

    `channels` are those of statistics.json. The floor: a channel without spread (at most 1e-12 of
    its mean), or never observed, is only centred, its standard deviation read as 1.
    """
    mean = np.array([channel.mean for channel in channels], dtype=np.float64)
    std = np.array([channel.std for channel in channels], dtype=np.float64)
    return mean, np.where(std > 1e-12 * np.abs(mean), std, 1.0)
