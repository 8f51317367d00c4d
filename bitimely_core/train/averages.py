"""An exponential moving average of the weights over the steps of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


def copy_tensors(model: nn.Module) -> Tensors:
    """Copies of the parameters and buffers, on their device."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def start_average(model: nn.Module, decay: float) -> Tensors | None:
    """The average before the first step; None without a decay."""
    return copy_tensors(model) if decay else None


@torch.no_grad()
def update_average(average: Tensors, model: nn.Module, step: int, decay: float) -> None:
    """Move the average to the weights after `step` steps: a <- d a + (1 - d) w.

    d = min(decay, (1 + step) / (10 + step)), so that the first weights are soon forgotten. Buffers
    of whole numbers are those of the model.
    """
    share = 1 - min(decay, (1 + step) / (10 + step))
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, share)
        else:
            average[name].copy_(value)


@contextmanager
def use_average(model: nn.Module, average: Tensors | None) -> Iterator[None]:
    """Inside, the model has the averaged weights; None: its own."""
    if average is None:
        yield
        return
    weights = copy_tensors(model)
    model.load_state_dict(average)
    try:
        yield
    finally:
        model.load_state_dict(weights)
