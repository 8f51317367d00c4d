"""Adds white noise to a window."""

from __future__ import annotations

import numpy as np

from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

SHARE = 0.1  # of the standard deviation of the channel in the window


@augmentations(AugmentationFacts())
def noise(row: LabelledRow, draw: np.random.Generator, context: AugmentationContext) -> LabelledRow:
    """White noise of a tenth of each channel's standard deviation in the window."""
    seen = np.ones(row.values.shape, bool) if row.mask is None else row.mask
    counts = np.maximum(seen.sum(0), 1)
    centred = np.where(seen, row.values - row.values.sum(0, where=seen) / counts, 0)
    deviations = np.sqrt((centred**2).sum(0) / counts)
    added = SHARE * deviations * draw.standard_normal(row.values.shape, "f4")
    return row._replace(values=np.where(seen, row.values + added, 0).astype(np.float32))
