"""Validates a training at the end of an epoch, and keeps the best weights."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import cast

import torch

from bitimely_core.train import averages, distributed, faults
from bitimely_core.train.checkpoints import copy_tensors
from bitimely_core.train.losses import Parts, accumulate
from bitimely_core.train.metrics_log import LogLine
from bitimely_core.train.micro_batches import (
    evaluate_batch,
    make_generator,
    open_stream,
    read_parts,
)
from bitimely_core.train.state import LOWEST_LOSS, TrainingState
from bitimely_core.train.step_log import add_parts, finite_or_none, read_losses, write_line
from bitimely_core.types import Batches


def validate_training(state: TrainingState) -> int:
    """Validate at the end of an epoch or of the training, once. Returns the stop signal that any
    process received, or 0.
    """
    if state.validation is None or not needs_validation(state):
        return 0
    started = time.perf_counter()
    read_losses(state)
    state.model.eval()
    try:
        with averages.use_average(state.model, state.average):
            sums, parts, stop = _sum_losses(state, state.validation)
            if stop:
                return stop  # the next call repeats the validation
            _log_validation(state, sums, parts, _measure_score(state))
    finally:
        state.model.train()
    state.pause = max(state.pause, time.perf_counter() - started)
    return 0


def _sum_losses(state: TrainingState, validation: Batches) -> tuple[list[float], Parts, int]:
    """The sums of the losses over the validation batches of this process, as `accumulate` makes
    them, and the stop signal that any process received, or 0.
    """
    sums, parts = [0.0] * 4, Parts()
    stream = open_stream(state, validation, "validation", 0)
    with torch.no_grad(), closing(stream):
        for step in range(validation.steps):
            micros, fault, _ = read_parts(state, stream, 1)
            try:
                for micro in micros:
                    generator = make_generator(state, None, "validation", step)
                    out = evaluate_batch(state, micro, generator, "validation", step)
                    accumulate(sums, parts, out)
            except Exception as error:
                fault = fault or error
            _, stop = faults.sync_step(state, [], fault, state.step)
            if stop:
                return sums, parts, stop
    return sums, parts, 0


def _measure_score(state: TrainingState) -> float | None:
    """The metric of the criterion, which process 0 measures; None where it is not defined."""
    value, fault = None, None
    if distributed.get_rank() == 0:
        try:
            value = state.criterion.measure(state.model)
        except Exception as error:
            fault = error
    numbers = [float(value is not None), value or 0.0]
    (is_defined, score), _ = faults.sync_step(state, numbers, fault, state.step)
    return score if is_defined else None


def _log_validation(
    state: TrainingState, sums: list[float], parts: Parts, score: float | None
) -> None:
    """Log the losses and the score of a validation, and judge it."""
    count, loss, rel, rel_count = distributed.all_reduce_sum(sums)
    entry: LogLine = {
        "step": state.step,
        "epoch": (state.step - 1) // state.batches.steps + 1,
        "split": "validation",
        "loss": finite_or_none(loss / max(count, 1.0)),
        "rel": finite_or_none(rel / (rel_count or 1.0)),
    }
    state.validated = state.step
    line = add_parts(entry, parts)
    if state.criterion is not LOWEST_LOSS:
        line = cast(LogLine, {**line, state.criterion.name: score})
    _judge_validation(state, entry, score)
    write_line(state, line)
    state.logged_at = time.perf_counter()


def _judge_validation(state: TrainingState, entry: LogLine, score: float | None) -> None:
    """Copy the weights of the validation `entry` where it is the best so far, and end the training
    where the patience is exhausted.
    """
    by_loss = state.criterion is LOWEST_LOSS
    best = state.best or {}
    decisive, before = (entry["loss"], best.get("loss")) if by_loss else (score, best.get("score"))
    if state.criterion.is_better(decisive, before):
        state.best = {
            "step": entry["step"],
            "epoch": entry["epoch"],
            "loss": entry["loss"],
            "rel": entry["rel"],
            **({} if by_loss else {"score": score}),
        }
        if state.config.checkpoint == "best":
            state.best_weights = copy_tensors(state.model)
    elif entry["epoch"] - int(best.get("epoch") or 0) >= (state.config.patience or math.inf):
        state.total = state.step


def needs_validation(state: TrainingState) -> bool:
    """Whether an epoch or the training ends at this step and is not validated yet."""
    ended = state.step > 0 and (state.step % state.batches.steps == 0 or state.step == state.total)
    return (
        state.validation is not None
        and state.validation.steps > 0
        and ended
        and state.validated < state.step
    )
