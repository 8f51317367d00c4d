"""Numbers of a model that a step needs on its device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send_constants(values: Sequence[float] | np.ndarray, like: Tensor) -> Tensor:
    """`values` [n] in the dtype and on the device of `like`; unlike `torch.tensor(..., device=...)`
    it does not wait for the device.
    """
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)
