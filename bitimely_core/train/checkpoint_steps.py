"""Resumes a training from its newest checkpoint, and writes the next ones while it goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from bitimely_core import __version__
from bitimely_core.config import RESUME_EXEMPT
from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.schemas.runs import CheckpointMeta
from bitimely_core.store import locks, storage
from bitimely_core.train import budget as budgets
from bitimely_core.train import checkpoints, distributed, faults
from bitimely_core.train.metrics_log import describe_log
from bitimely_core.train.state import Notice, TrainingState
from bitimely_core.train.step_log import read_losses
from bitimely_core.train.validation import needs_validation


def claim_checkpoint(
    home: Path | None, notice: Notice | None, keep: int, stack: ExitStack
) -> tuple[checkpoints.Checkpoint | None, list[Finding]]:
    """The checkpoint to resume from: process 0 locks the folder until `stack` closes, selects the
    checkpoint, cleans up and broadcasts the step.
    """
    if home is None:
        return None, []
    folder, model = home / "checkpoints", home / "model"
    if distributed.get_rank() > 0:
        (number,) = distributed.all_reduce_sum([0.0])
        path = folder / f"step-{int(number) - 1}"
        if not number:
            return None, []
        return checkpoints.Checkpoint(path, checkpoints.verify_checkpoint(path)), []
    stack.enter_context(locks.lock_folder(home))
    for path in (folder, model):
        storage.refuse_link(path)
    checkpoint, findings = checkpoints.find_newest_checkpoint(folder)
    checkpoints.sweep_folder(folder, checkpoint, keep=keep)
    for path in (home, model):
        if path.is_dir():
            storage.remove_temporary_files(path)
    distributed.all_reduce_sum([0.0 if checkpoint is None else checkpoint.step + 1.0])
    for finding in findings:
        faults.warn(finding, notice)
    return checkpoint, findings


def resume_training(state: TrainingState, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Load weights, moments and step, if there are any. Raises UserError (settings_differ,
    shapes_differ, integrity).
    """
    if checkpoint is None:
        return
    checkpoints.require_same_run(checkpoint, state.identity, RESUME_EXEMPT)
    weights = checkpoints.load_tensors(checkpoint, "model")
    checkpoints.require_same_shapes(checkpoint, weights, checkpoints.list_tensors(state.model))
    state.model.load_state_dict(weights)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoints.load_tensors(checkpoint, "optimizer").items():
        name, _, moment = key.rpartition("::")
        moments.setdefault(name, {})[moment] = value
    loaded = {k: moments[name] for k, name in enumerate(state.names) if name in moments}
    state.optimizer.load_state_dict(
        {"state": loaded, "param_groups": state.optimizer.state_dict()["param_groups"]}
    )
    meta = checkpoint.meta
    _resume_selection(state, checkpoint, weights)
    if meta.finished or state.config.minutes is not None:
        state.total, state.spent, state.seconds = meta.total, meta.seconds, meta.seconds
    state.step, state.validated = meta.step, meta.validated
    state.best, state.last = meta.best, meta.last


def _resume_selection(
    state: TrainingState, checkpoint: checkpoints.Checkpoint, weights: dict[str, Tensor]
) -> None:
    """Load the best weights and the moving average, if there are any; a finished model gets those
    that were selected.
    """
    meta = checkpoint.meta
    # weights of their own only where they are those of another step
    if state.config.checkpoint == "best" and meta.best is not None:
        state.best_weights = weights
        if "best.safetensors" in meta.files:
            state.best_weights = checkpoints.load_tensors(checkpoint, "best")
        checkpoints.require_same_shapes(checkpoint, state.best_weights, weights)
    if "average.safetensors" in meta.files:
        average = checkpoints.load_tensors(checkpoint, "average")
        checkpoints.require_same_shapes(checkpoint, average, weights)
        state.average = {name: value.to(state.device) for name, value in average.items()}
    if meta.finished:
        state.model.load_state_dict(state.best_weights or state.average or weights)


def save_checkpoint(state: TrainingState, *, wait: bool) -> None:
    """Write a checkpoint of this step, after the last one also `model/`; process 0 does, in a
    thread that it may `wait` for.

    After the last step the model gets the selected weights.
    """
    read_losses(state)
    finished = state.step == state.total and not needs_validation(state)
    weights = checkpoints.list_tensors(state.model)
    if finished and (chosen := state.best_weights or state.average) is not None:
        weights = checkpoints.copy_tensors(state.model)
        state.model.load_state_dict(chosen)
    if state.home is None:
        return
    moments = _list_moments(state)
    learned = dict(state.model.named_parameters()) | distributed.list_statistics(state.model)
    if not (checkpoints.is_finite(learned) and checkpoints.is_finite(moments)):
        raise input_error(
            Reason.NON_FINITE_LOSS,
            f"non-finite weights or running statistics after step {state.step}",
            "expected finite numbers",
            "Lower --lr; the previous checkpoint is kept",
            file=str(state.home),
        )
    if distributed.get_rank() == 0:
        faults.raise_write_error(state, wait=True)
        if finished:
            _save_model(state.model, state.home / "model")
        tensors = {"model": weights, "optimizer": moments}
        _start_writing(state, state.home, tensors, finished=finished)
        faults.raise_write_error(state, wait=wait)
    if wait:
        # the others wait: a stop must not end them while process 0 writes
        distributed.all_reduce_sum([0.0])


def _start_writing(
    state: TrainingState, home: Path, tensors: dict[str, dict[str, Tensor]], *, finished: bool
) -> None:
    """Encode a checkpoint of these groups of tensors, and of the best weights where they are of
    another step; a thread writes it.
    """
    if state.average is not None:
        tensors["average"] = state.average
    is_other = state.average is not None or (state.best and state.best["step"] != state.step)
    if state.best_weights and is_other:
        tensors["best"] = state.best_weights
    meta = CheckpointMeta(
        step=state.step,
        epoch=state.step // max(state.batches.steps, 1),
        total=state.total,
        finished=finished,
        validated=state.validated,
        best=state.best,
        last=state.last,
        seconds=budgets.read_clock(state)[0],
        seed=state.config.seed,
        processes=distributed.get_world_size(),
        identity=state.identity,
        log=describe_log(home / "metrics.jsonl"),
        bitimely=__version__,
        torch=str(torch.__version__),
    )
    assert state.pool is not None
    contents = {name: checkpoints.encode_tensors(group) for name, group in tensors.items()}
    folder, keep = home / "checkpoints", state.config.keep
    state.saving = state.pool.submit(checkpoints.save_checkpoint, folder, meta, contents, keep=keep)


def _list_moments(state: TrainingState) -> dict[str, Tensor]:
    """The state of the optimizer, `<parameter>::<moment>`."""
    parameters = distributed.list_parameters(state.optimizer)
    return {
        f"{name}::{key}": value
        for name, parameter in zip(state.names, parameters, strict=False)
        for key, value in state.optimizer.state.get(parameter, {}).items()
    }


def _save_model(model: nn.Module, folder: Path) -> None:
    """Write the model as it saves itself; of a module that cannot, the weights alone."""
    save = getattr(model, "save", None)
    if callable(save):
        save(folder)
        return
    content = checkpoints.encode_tensors(checkpoints.list_tensors(model))
    storage.write_bytes(storage.make_folder(folder) / "model.safetensors", content)
