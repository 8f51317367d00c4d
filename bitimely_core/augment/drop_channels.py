"""Leaves channels of a window out."""

from __future__ import annotations

import numpy as np

from bitimely_core.augment.interpolation import hide
from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

SHARE = 0.1


@augmentations(AugmentationFacts())
def drop_channels(
    row: LabelledRow, draw: np.random.Generator, context: AugmentationContext
) -> LabelledRow:
    """Each channel left out with probability 0.1; a random one stays in any case."""
    channels = row.values.shape[1]
    dropped = draw.uniform(size=(channels,)) < SHARE
    dropped[draw.integers(channels)] = False
    return hide(row, np.broadcast_to(dropped, row.values.shape))
