"""The optimizer of a training, its groups of parameters and its learning rate."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import nn

from bitimely_core.config import TrainConfig
from bitimely_core.train import budget as budgets
from bitimely_core.train.state import TrainingState

SLOW_RATE = 1e-3  # largest learning rate of parameters that a module names in `slow`


def make_optimizer(
    model: nn.Module, config: TrainConfig, device: torch.device
) -> tuple[torch.optim.AdamW, list[str]]:
    """The optimizer of the parameters that are trained, and their names in its order."""
    groups = group_parameters(model, config.weight_decay)
    names = list(chain.from_iterable(group.pop("names") for group in groups))
    trained = groups or [{"params": [nn.Parameter(torch.zeros(0))]}]
    return torch.optim.AdamW(trained, lr=config.lr, fused=device.type in {"cuda", "cpu"}), names


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in up to three groups of `params`, `names`, `weight_decay`: vectors,
    biases and all of a norm do not decay.

    Nor do those that their module names in `slow`; their learning rate stays below `SLOW_RATE`
    (`largest` of their group).
    """
    kinds = (
        {"weight_decay": weight_decay},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "largest": SLOW_RATE},
    )
    groups: list[dict[str, Any]] = [{"params": [], "names": [], **kind} for kind in kinds]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            vector = (
                parameter.ndim < 2 or leaf.startswith("bias") or "Norm" in type(module).__name__
            )
            group = groups[2 if leaf in getattr(module, "slow", ()) else int(vector)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


def compute_schedule_factor(step: int, total: int, warmup: float) -> float:
    """Share of the highest rate after `step` of `total` steps: linear over the first `warmup`
    share, then a cosine that is 0 at `total`.
    """
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


def set_learning_rate(state: TrainingState) -> float:
    """Give every group of parameters the rate of this step; its share of the highest rate."""
    factor = compute_schedule_factor(*budgets.find_position(state), state.config.warmup)
    for group in state.optimizer.param_groups:
        group["lr"] = min(state.config.lr, group.get("largest", math.inf)) * factor
    return factor
