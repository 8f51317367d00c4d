"""How a training stops early: by a signal, for lack of memory, by values that are not finite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from bitimely_core.config import TrainConfig
from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    find_stop_code,
    input_error,
    replace_handlers,
)
from bitimely_core.system_errors import find_system_error, is_out_of_memory
from bitimely_core.train import checkpoints
from bitimely_core.train.distributed import (
    all_reduce_sum,
    find_first_error,
    find_lost_peer,
    get_rank,
)
from bitimely_core.train.draws import find_facts
from bitimely_core.types import Batches
from bitimely_core.wording import list_first

if TYPE_CHECKING:
    from bitimely_core.train.state import Notice, Objective, TrainingState

MOST_NUMBERS = 20  # of a message


@contextmanager
def handle_signals(state: TrainingState) -> Iterator[None]:
    """The signals that end a verb set a flag that the loop reads after each step; a second SIGINT stops at
    once. Only for runs with a folder.

    Raises UserError as `find_lost_peer`.
    """
    if state.home is None:
        yield
        return

    def record_signal(number: int, frame: FrameType | None) -> None:
        if state.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        state.stop_signal = state.stop_signal or number

    with replace_handlers(record_signal):
        try:
            yield
        except RuntimeError as error:
            # in here, where a signal is noted only: `launch` names the lost process, and its
            # SIGTERM to the others would else be reported beside it
            if lost := find_lost_peer(error):
                raise lost from error
            raise


def interrupted_error(state: TrainingState, number: int, when: str, outcome: str) -> UserError:
    """The error of a training that a signal stopped."""
    return UserError(
        Reason.INTERRUPTED,
        f"stopped by {signal.Signals(number).name} {when}",
        outcome,
        "Repeat the same command to resume",
        file=str(state.home),
        exit_code=find_stop_code(number),
    )


def is_divisible(model: nn.Module, objective: Objective) -> bool:
    """Whether gradient accumulation keeps the gradient of a batch: rows are neither compared nor
    normalised by common statistics.
    """
    facts = find_facts(objective, model)
    compared = (
        facts is not None
        and max(facts.rows, getattr(getattr(objective, "config", None), "least_rows", 1)) > 1
    )
    shared = (
        isinstance(part, nn.modules.batchnorm._BatchNorm)
        or getattr(part, "per_sample", True) is False
        for part in model.modules()
    )
    return not (
        compared
        or any(shared)
        or getattr(getattr(model, "config", None), "target", "raw") == "tokens"
    )


def out_of_memory_error(
    error: Exception, batches: Batches, config: TrainConfig, batch: int, *, divisible: bool
) -> UserError | None:
    """The UserError (resource_limit, exit 6) of an out-of-memory exception, else None; `divisible`
    as `is_divisible`.
    """
    fault = find_system_error(error)
    if fault is None or not is_out_of_memory(fault):
        return fault
    return UserError(
        Reason.RESOURCE_LIMIT,
        fault.problem.replace("out of memory", f"out of memory at batch {batch}", 1),
        f"expected room for {batches.size} rows in {config.accumulate} parts",
        f"Try --batch-size {max(batches.size // 2, 1)}, or --accumulate {2 * config.accumulate}"
        + (" for the same gradient" if divisible else "")
        + (", or --set train.recompute=layers" if config.recompute == "none" else ""),
        exit_code=Exit.RESOURCES,
    )


def raise_write_error(state: TrainingState, *, wait: bool) -> None:
    """Raises the error of the checkpoint that is being written, UserError (exit 5, 6), where it has
    one; `wait` until it is written.
    """
    if state.saving is not None and (wait or state.saving.done()):
        saving, state.saving = state.saving, None
        saving.result()


def non_finite_error(state: TrainingState, quantity: str, value: float) -> UserError:
    """The UserError (non_finite_loss) of the step after `state.step`, with the rows of its global
    batch; raises as `raise_write_error`.
    """
    epoch, start = divmod(state.step, state.batches.steps)
    batch = next(iter(state.batches(epoch, start=start)), None)
    rows = non_finite = ""
    if batch is not None:
        index = torch.arange(batch.values.shape[0]) if batch.index is None else batch.index.cpu()
        rows = f", batch rows {format_numbers(index.tolist())}"
        if batch.values.is_floating_point():
            finite = torch.isfinite(batch.values)
            if batch.mask is not None:
                finite |= ~(batch.mask if batch.mask.ndim == finite.ndim else batch.mask[..., None])
            bad = index[~finite.flatten(1).all(1).cpu()].tolist()
            non_finite = f"; values are not finite in rows {format_numbers(bad)}" if bad else ""
    raise_write_error(state, wait=True)
    hint, file = "Check these rows, or lower --lr", None
    if state.home is not None:
        file = str(state.home)
        if steps := checkpoints.list_steps(state.home / "checkpoints"):
            hint += f"; the checkpoint of step {steps[0]} is kept"
    return input_error(
        Reason.NON_FINITE_LOSS,
        f"non-finite {quantity} ({value:g}) at step {state.step + 1}{rows}{non_finite}",
        "expected a finite number",
        hint,
        file=file,
    )


def format_numbers(numbers: list[int]) -> str:
    """The first `MOST_NUMBERS` of `numbers`, and how many more there are."""
    return list_first(list(map(str, numbers)), MOST_NUMBERS)


def warn(finding: Finding, notice: Notice | None) -> None:
    """Hand `finding` to `notice`, else raise it as a warning of the first process."""
    if notice is not None:
        notice(finding)
    elif get_rank() == 0:
        import warnings

        warnings.warn(finding.line(), RuntimeWarning, stacklevel=3)


def sync_step(
    state: TrainingState, numbers: list[float], fault: Exception | None, batch: int
) -> tuple[list[float], int]:
    """Sums of `numbers` over all processes, and the stop signal that any of them received; an error
    of one is raised in all of them.
    """
    flags = [
        float(fault is not None),
        float(state.stop_signal == signal.SIGINT),
        float(state.stop_signal not in (0, signal.SIGINT)),
    ]
    *sums, faults, interrupts, terminations = all_reduce_sum([*numbers, *flags])
    if faults:
        divisible = is_divisible(state.model, state.objective)
        error = fault and (
            out_of_memory_error(fault, state.batches, state.config, batch, divisible=divisible)
            or fault
        )
        raise find_first_error(error) from (fault if error is not fault else None)
    return sums, int(signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0)
