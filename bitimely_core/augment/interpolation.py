"""Values of a window between its samples and beyond its ends."""

from __future__ import annotations

import numpy as np

from bitimely_core.types import LabelledRow


def read_at(row: LabelledRow, places: np.ndarray) -> LabelledRow:
    """The row read at `places` [T] float64 (samples from its start), between samples linearly.

    Beyond its ends the row is mirrored. A value is observed where both samples around it are.
    """
    last = len(row.values) - 1
    mirrored = last - np.abs(last - places % max(2 * last, 1))
    before = mirrored.astype(np.int64)
    after = np.minimum(before + 1, last)
    share = (mirrored - before).astype(np.float32)[:, None]
    values = row.values[before] + share * (row.values[after] - row.values[before])
    mask = None
    if row.mask is not None:
        mask = row.mask[before] & (row.mask[after] | (share == 0))
        values = np.where(mask, values, np.float32(0))
    return row._replace(values=values, mask=mask)


def hide(row: LabelledRow, hidden: np.ndarray) -> LabelledRow:
    """The row with 0, the mean of a standardised channel, where `hidden` [T, V] bool is true.

    Where the data set has missing values, they are missing.
    """
    mask = None if row.mask is None else row.mask & ~hidden
    return row._replace(values=np.where(hidden, np.float32(0), row.values), mask=mask)
