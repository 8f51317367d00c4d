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


@dataclass(frozen=True)
class Criterion:
    """A metric of the model on the validation windows, by which the best weights are chosen."""

    name: str
    measure: Callable[[nn.Module], float | None]  # None: not defined there
    lower_is_better: bool = False

    def is_better(self, value: float | None, before: float | None) -> bool:
        """Whether `value` is defined and better than the best `before`, if there is one."""
        if value is None or before is None:
            return value is not None
        return value < before if self.lower_is_better else value > before


LOWEST_LOSS = Criterion("loss", lambda model: None, lower_is_better=True)


@dataclass(kw_only=True)
class TrainingState:
    """Model, optimizer and position of a training."""

    model: nn.Module
    objective: Objective
    batches: Batches
    validation: Batches | None
    config: TrainConfig
    total: int  # steps; of a budget in minutes as estimated so far
    device: torch.device
    optimizer: torch.optim.Optimizer
    names: list[str]  # of the optimizer's parameters, in its order
    home: Path | None
    identity: dict[str, JsonValue]
    log: Log | None
    criterion: Criterion = LOWEST_LOSS
    step: int = 0  # done
    validated: int = 0  # step of the last validation
    last: dict[str, float | None] = field(default_factory=dict)  # loss and rel of the last step
    # best validation: its loss, rel, step and epoch, and the metric that decided as `score`
    best: dict[str, int | float | None] | None = None
    # of that step, on the CPU, where they are selected
    best_weights: dict[str, Tensor] | None = None
    average: dict[str, Tensor] | None = None  # moving average of the weights
    started_at: float = 0.0  # clock when this process began to train
    spent: float = 0.0  # seconds of training before that
    seconds: float = 0.0  # of a budget in minutes: all so far, the same in every process
    pause: float = 0.0  # seconds of the longest validation
    stop_signal: int = 0  # received by this process
    pool: ThreadPoolExecutor | None = None  # the thread that writes checkpoints
    saving: Future[Path] | None = None  # the checkpoint that it writes
    logged_at: float = 0.0  # clock at the last logged line; the counters below start there
    timesteps_read: int = 0
    data_wait: float = 0.0  # seconds
    unlogged_steps: int = 0
    on_device: DeviceLosses | None = None  # on CUDA in one process
    gradients: GradientSum = field(default_factory=lambda: GradientSum(()))
