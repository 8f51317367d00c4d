"""What a training is made of: the objective and the callbacks that `fit` takes, and the state that
it moves from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from bitimely_core.config import TrainConfig
from bitimely_core.errors import Finding
from bitimely_core.train.gradients import GradientSum
from bitimely_core.train.losses import DeviceLosses
from bitimely_core.train.metrics_log import LogLine
from bitimely_core.types import Batches

Objective = Callable[..., dict[str, Any]]
Notice = Callable[[Finding], None]
Log = Callable[[LogLine], None]


@dataclass(kw_only=True)
class TrainingState:
    """Model, optimizer and position of a training."""

    model: nn.Module
    objective: Objective
    batches: Batches
    validation: Batches | None
    config: TrainConfig
    total: int  # steps
    device: torch.device
    optimizer: torch.optim.Optimizer
    names: list[str]  # of the optimizer's parameters, in its order
    home: Path | None
    identity: dict[str, JsonValue]
    log: Log | None
    step: int = 0  # done
    validated: int = 0  # step of the last validation
    last: dict[str, float | None] = field(default_factory=dict)  # loss and rel of the last step
    # lowest validation loss, its rel, step and epoch
    best: dict[str, int | float | None] | None = None
    # of that step, on the CPU, where they are selected
    best_weights: dict[str, Tensor] | None = None
    stop_signal: int = 0  # received by this process
    pool: ThreadPoolExecutor | None = None  # the thread that writes checkpoints
    saving: Future[Path] | None = None  # the checkpoint that it writes
    logged_at: float = 0.0  # clock at the last logged line; the counters below start there
    timesteps_read: int = 0
    data_wait: float = 0.0  # seconds
    unlogged_steps: int = 0
    on_device: DeviceLosses | None = None  # on CUDA in one process
    gradients: GradientSum = field(default_factory=lambda: GradientSum(()))
