"""The losses of the steps of a training, as its log has them."""

from __future__ import annotations

import math
import time
from typing import cast

import torch

from bitimely_core.errors import Reason, input_error
from bitimely_core.store import storage
from bitimely_core.train import distributed, event_file, faults
from bitimely_core.train.losses import Parts
from bitimely_core.train.metrics_log import LogLine
from bitimely_core.train.state import TrainingState


def read_losses(state: TrainingState) -> tuple[float, Parts]:
    """Norm and parts of the last step, from the device, with `state.last`. Raises as
    `_apply_gradients`, for the first unusable step.
    """
    losses = state.on_device
    if losses is None or losses.norm is None:
        return math.nan, Parts()
    norm_of_last = losses.norm[None].to(losses.last.dtype)
    read = torch.cat((losses.first, norm_of_last, losses.last)).tolist()
    step, *unusable, norm, count, loss, rel, rel_count = read[:9]
    if step >= 0:
        state.step = int(step)
        require_usable(state, *unusable)
    state.last = {"loss": loss / count, "rel": finite_or_none(rel / (rel_count or 1.0))}
    return norm, {name: (count, value) for name, value in zip(losses.names, read[9:], strict=True)}


def require_usable(state: TrainingState, count: float, loss: float, norm: float = 0.0) -> None:
    """Raises UserError (no_input, non_finite_loss, exit 4) for the step after `state.step`."""
    if not count:
        raise input_error(
            Reason.NO_INPUT,
            f"no valid value in the batch of step {state.step + 1}",
            "expected at least one",
        )
    if not math.isfinite(loss):
        raise faults.non_finite_error(state, "loss", loss / count)
    if not math.isfinite(norm):
        raise faults.non_finite_error(state, "gradient norm", norm)


def describe_step(state: TrainingState, norm: float, factor: float, parts: Parts) -> LogLine:
    """The line of this step, with means over the steps since the last line, which it ends."""
    if state.on_device is not None:
        norm, parts = read_losses(state)
    timesteps, waited = distributed.all_reduce_sum([state.timesteps_read, state.data_wait])
    now = time.perf_counter()
    line: LogLine = {
        "step": state.step,
        "epoch": (state.step - 1) // state.batches.steps + 1,
        "split": "train",
        "loss": state.last["loss"],
        "rel": state.last["rel"],
        "lr": state.config.lr * factor,
        "grad_norm": norm,
        "tokens_per_second": timesteps / max(now - state.logged_at, 1e-9),
        "data_wait": waited / distributed.get_world_size() / state.unlogged_steps,
    }
    state.logged_at, state.timesteps_read, state.data_wait, state.unlogged_steps = now, 0, 0.0, 0
    return add_parts(line, parts)


def is_logged(state: TrainingState) -> bool:
    """Whether the log has a line of this step: of the first and last, of the last of an epoch and
    of every `log_every`-th.
    """
    return (
        state.step in {1, state.total}
        or state.step % state.config.log_every == 0
        or state.step % state.batches.steps == 0
    )


def add_parts(line: LogLine, parts: Parts) -> LogLine:
    """`line` with the mean of each part over all processes, which may have different parts."""
    sums: dict[str, tuple[float, float]] = {}
    for process_parts in distributed.gather_objects(parts):
        for name, (count, weighted) in process_parts.items():
            counted, total = sums.get(name, (0.0, 0.0))
            sums[name] = counted + count, total + weighted
    means = {name: finite_or_none(total / count) for name, (count, total) in sums.items()}
    return cast(LogLine, {**line, **means})


def write_line(state: TrainingState, line: LogLine | None) -> None:
    """Log a line in process 0, and hand it to `log`."""
    if line is None or distributed.get_rank() > 0:
        return
    if state.home is not None:
        storage.append_line(state.home / "metrics.jsonl", line)
        if state.config.track:
            event_file.append_event(state.home, line)
    if state.log is not None:
        state.log({**line, "of": state.total})


def finite_or_none(value: float) -> float | None:
    """The value as JSON has it: None where it is infinite or NaN."""
    return value if math.isfinite(value) else None
