"""Models to compare with: the same architecture in float64, with the weights of a run or with
random ones.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from bitimely_core.registry import models
from bitimely_core.train.devices import select_device


def to_float64(model: nn.Module, device: str = "cpu") -> nn.Module:
    """A copy of the model in float64 and eval mode, because products of maps need that precision;
    on a device that has it.
    """
    place = select_device(device)
    return copy.deepcopy(model).cpu().double().to("cpu" if place.type == "mps" else place).eval()


def randomise_model(model: nn.Module, seed: int, device: str = "cpu") -> nn.Module:
    """The same architecture with random weights, in float64: the control that separates training
    from structure.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_float64(models[str(model.config.name)](model.config), device)  # type: ignore[union-attr]
