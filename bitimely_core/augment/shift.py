"""Moves a window in time."""

from __future__ import annotations

import numpy as np

from bitimely_core.augment.interpolation import read_at
from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

FAR = 0.1  # of the window, either way


@augmentations(AugmentationFacts())
def shift(row: LabelledRow, draw: np.random.Generator, context: AugmentationContext) -> LabelledRow:
    """All channels moved by up to a tenth of the window, either way, mirrored at the ends."""
    length = len(row.values)
    far = round(FAR * length)
    return read_at(row, np.arange(length) - float(draw.integers(-far, far + 1)))
