"""Keeps a part of a window, at a random place."""

from __future__ import annotations

import numpy as np

from bitimely_core.augment.interpolation import read_at
from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

LEAST = 0.8  # share of the window that is kept


@augmentations(AugmentationFacts())
def crop(row: LabelledRow, draw: np.random.Generator, context: AugmentationContext) -> LabelledRow:
    """A part of 80 to 100 % of the window, moved to a random place and mirrored at its ends."""
    length = len(row.values)
    size = max(1, round(length * draw.uniform(LEAST, 1)))
    start, place = draw.integers(length - size + 1, size=2)
    part = LabelledRow(
        row.values[start : start + size],
        None if row.mask is None else row.mask[start : start + size],
        row.target,
    )
    return read_at(part, np.arange(length) - float(place))
