"""Models to compare with: the same architecture in float64, with the weights of a run or with
random ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bitimely_core.registry import models
from bitimely_core.train.devices import select_device


def to_float64(model: nn.Module, device: str = "cpu") -> nn.Module:
    """A copy of the model in float64 and eval mode, because products of maps need that precision.

    It is on the CPU where the device has no float64.
    """
    chosen = select_device(device)
    return copy.deepcopy(model).cpu().double().to("cpu" if chosen.type == "mps" else chosen).eval()


def randomise_model(model: nn.Module, seed: int, device: str = "cpu") -> nn.Module:
    """The same architecture with random weights, in float64: the control that separates training
    from structure.
    """
    config: Any = model.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_float64(models[config.name](config), device)
