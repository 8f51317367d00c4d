"""Multiplies each channel of a window by a factor of its own."""

from __future__ import annotations

import numpy as np

from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

SPREAD = 0.15  # standard deviation of the logarithm


@augmentations(AugmentationFacts())
def gain(row: LabelledRow, draw: np.random.Generator, context: AugmentationContext) -> LabelledRow:
    """Each channel times a log-normal factor, standard deviation 0.15 of its logarithm."""
    channels = row.values.shape[1]
    return row._replace(values=row.values * np.exp(SPREAD * draw.standard_normal(channels, "f4")))
