"""Stretches the time of a window, and with it a label that is a rate or a duration."""

from __future__ import annotations

import math

import numpy as np

from bitimely_core.augment.interpolation import read_at
from bitimely_core.registry import AugmentationFacts, augmentations
from bitimely_core.types import AugmentationContext, LabelledRow

WIDE, NARROW = 0.3, 0.1  # largest change of the time, where the label follows and where it is kept

POWERS = {"rate": -1, "duration": 1, "none": 0}  # of the factor, by which the label is multiplied


@augmentations(AugmentationFacts())
def stretch(
    row: LabelledRow, draw: np.random.Generator, context: AugmentationContext
) -> LabelledRow:
    """Time times a factor, log-uniform within 30 % where the label is a rate, which is divided by
    it, or a duration, which is multiplied; else within 10 % and the label kept.

    A longer window is cut at a random place, a shorter one is mirrored at its ends.
    """
    power = POWERS[context.label_scales]
    spread = WIDE if power else NARROW
    factor = math.exp(draw.uniform(math.log(1 - spread), math.log(1 + spread)))
    steps = len(row.values) - 1
    start = draw.uniform() * steps * (1 - 1 / factor)
    stretched = read_at(row, start + np.arange(steps + 1) / factor)
    scaled = (row.target * factor**power).astype(row.target.dtype)
    return stretched._replace(target=scaled if power else row.target)
