"""Mixes a window and its label with another one (Zhang et al. 2018)."""

from __future__ import annotations

import numpy as np

from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

ALPHA = 0.2  # both parameters of the beta distribution of the share


@augmentations(AugmentationFacts(mixes_labels=True))
def mixup(row: LabelledRow, draw: np.random.Generator, context: AugmentationContext) -> LabelledRow:
    """The window and its label times a share, plus a random training window and its label times
    the rest; the share is beta(0.2, 0.2).

    What is missing in one of the two is missing in the mixture.
    """
    share = np.float32(draw.beta(ALPHA, ALPHA))
    other = context.draw_partner(draw)
    values = share * row.values + (1 - share) * other.values
    mask = row.mask
    if mask is not None and other.mask is not None:
        mask = mask & other.mask
        values = np.where(mask, values, np.float32(0))
    target = share * row.target + (1 - share) * other.target
    return LabelledRow(values, mask, target.astype(np.float32))
