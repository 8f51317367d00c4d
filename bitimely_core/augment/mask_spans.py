"""Hides stretches of a window."""

from __future__ import annotations

import numpy as np

from bitimely_core.augment.interpolation import hide
from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

SPANS, LONGEST = 2, 0.1  # stretches, and the largest share of the window of each


@augmentations(AugmentationFacts())
def mask_spans(
    row: LabelledRow, draw: np.random.Generator, context: AugmentationContext
) -> LabelledRow:
    """Two stretches of up to a tenth of the window hidden in all channels."""
    length = len(row.values)
    hidden = np.zeros(row.values.shape, bool)
    for _ in range(SPANS):
        size = draw.integers(1, max(round(LONGEST * length), 1) + 1)
        start = draw.integers(length - size + 1)
        hidden[start : start + size] = True
    return hide(row, hidden)
