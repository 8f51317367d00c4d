"""The training loop of pre-training and fine-tuning, on one device or several.

It resumes exactly from a checkpoint.

An objective is `f(model, batch, generator=None) -> {"loss", "rel", "parts", ...}`; `fit`
back-propagates `loss` and logs the scalars. Where `loss` is a mean over something other than rows
(valid tokens), the objective gives their number as `count`: micro-batches and processes are
weighted by it, so that together they give the gradient of the global batch.

The order of the data, the learning rate, dropout and masks of step s are functions of (seed, s): a
checkpoint needs weights, moments and s. Masks, gaps and noise are drawn by row of the global batch
(`draws`). Dropout and the neighbours that a head with context sees also depend on the micro-batch
and the process, the views of a contrastive objective on the process; apart from them, gradient
accumulation and the number of processes change rounding alone.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypedDict

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from bitimely_core import objectives
from bitimely_core.config import RESUME_EXEMPT, TrainConfig, validate
from bitimely_core.errors import Finding, Reason, input_error, usage_error
from bitimely_core.models.layers import StackLayer, compile_layers, recompute_layers
from bitimely_core.store import storage
from bitimely_core.system_errors import attach_result
from bitimely_core.train import averages, distributed, faults
from bitimely_core.train import budget as budgets
from bitimely_core.train.checkpoint_steps import claim_checkpoint, resume_training, save_checkpoint
from bitimely_core.train.devices import (
    deterministic_kernels,
    resolve_compile,
    resolve_precision,
    restore_model,
    select_device,
    use_arithmetic,
)
from bitimely_core.train.gradients import GradientSum
from bitimely_core.train.losses import DeviceLosses, Parts, accumulate
from bitimely_core.train.metrics_log import LogLine, restore_log
from bitimely_core.train.micro_batches import (
    evaluate_batch,
    make_generator,
    open_stream,
    read_parts,
)
from bitimely_core.train.optimizer import make_optimizer, set_learning_rate
from bitimely_core.train.state import LOWEST_LOSS, Criterion, Log, Notice, Objective, TrainingState
from bitimely_core.train.step_log import (
    describe_step,
    finite_or_none,
    is_logged,
    require_usable,
    write_line,
)
from bitimely_core.train.validation import validate_training
from bitimely_core.types import Batch, Batches, drop_none


class FitResult(TypedDict):
    """Result of `fit`."""

    steps: int
    epochs: float
    finished: bool
    resumed: int | None  # the step of the checkpoint
    loss: float | None  # of the last step
    rel: float | None
    best: dict[str, int | float | None] | None  # validation
    device: str
    findings: list[Finding]


def fit(
    model: nn.Module,
    batches: Batches,
    objective: Objective,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    config: TrainConfig | None = None,
    validation: Batches | None = None,
    criterion: Criterion = LOWEST_LOSS,
    folder: str | Path | None = None,
    identity: dict[str, JsonValue] | None = None,
    log: Log | None = None,
    notice: Notice | None = None,
) -> FitResult:
    """Train `model` in place; with `folder`, log and save there and resume from its checkpoint.

    AdamW (no decay on vectors, biases, norms), linear warm-up, then a cosine to 0 over all steps,
    gradients clipped by their global norm. The same call again resumes after a kill and ends with
    the weights of the uninterrupted run, bit for bit on the same kind of device with the same
    numbers of processes and threads; a finished run is only loaded. The model keeps its mode and
    device, and starts from its weights; a `target_scale` that is NaN is measured before the first
    step.

    `batches` are global ones, as `data.batches` returns them; they decide the batch size, not
    `config.batch_size`. `epochs` replaces that of `config` (None: the defaults of `TrainConfig`)
    and its steps, `steps` the number of optimizer steps whatever the epochs, `lr` the highest
    learning rate, `seed` that of dropout and masks. `validation` is evaluated at the end of every
    epoch and of the training. `folder` gets `metrics.jsonl`, `checkpoints/` and, at the end,
    `model/`, and is locked meanwhile. A resumed run must agree with `identity` (JSON: manifest hash
    of the data, hash of the tokenizer, resolved settings). `log` is called with every line of the
    log, and in it `of`, the number of all steps; `notice` with every warning (None:
    `warnings.warn`). With `config.checkpoint` best the model ends with the weights of the best
    validation by `criterion`; every checkpoint holds those so far. With `config.minutes` the
    training ends in that time, and steps and weights depend on the machine.

    Raises UserError: config, settings_differ (exit 2); shapes_differ, no_input, non_finite_loss
    (4); integrity (5); resource_limit, disk_full (6); locked (7); interrupted (130, 143).
    """
    overrides = {"epochs": epochs, "steps": steps, "lr": lr, "seed": seed}
    settings = _merge_settings(config or TrainConfig(), overrides)
    _require_arguments(batches, objective)
    total = settings.count_steps(batches.steps)
    require_validation(settings, validation, total)
    _require_batches(settings, batches)
    distributed.join_group()
    device, home = select_device(settings.device), None if folder is None else Path(folder)
    with ExitStack() as stack:
        checkpoint, findings = claim_checkpoint(home, notice, settings.keep, stack)
        has_stack = any(isinstance(module, StackLayer) for module in model.modules())
        settings, missing = resolve_compile(settings, device, stack=has_stack)
        for finding in missing:
            faults.warn(finding, notice)
        stack.enter_context(restore_model(model, device))
        stack.enter_context(deterministic_kernels(device))
        if checkpoint is None and total:
            _measure_moments(model, batches, objective, settings)
        model.to(device)
        distributed.broadcast_parameters(model)
        optimizer, names = make_optimizer(model, settings, device)
        training = _describe_training(settings, batches, total)
        state = TrainingState(
            model=model,
            objective=objective,
            batches=batches,
            validation=validation,
            config=settings,
            total=total,
            device=device,
            names=names,
            optimizer=optimizer,
            home=home,
            log=log,
            criterion=criterion,
            average=averages.start_average(model, settings.ema),
            identity=json.loads(storage.encode_json({**(identity or {}), "train": training})),
        )
        resume_training(state, checkpoint)
        restore_log(home, checkpoint, track=settings.track)
        if checkpoint is None or not checkpoint.meta.finished:
            _train(state, stack)
    return {
        "steps": state.step,
        "epochs": state.step / max(batches.steps, 1),
        "finished": True,
        "resumed": None if checkpoint is None else checkpoint.step,
        "loss": state.last.get("loss"),
        "rel": state.last.get("rel"),
        "best": state.best,
        "device": str(device),
        "findings": [*findings, *missing],
    }


def _merge_settings(config: TrainConfig, overrides: Mapping[str, float | None]) -> TrainConfig:
    """The settings with those of `overrides` that are not None; epochs replace steps."""
    values = config.model_dump()
    if overrides["epochs"] is not None:
        values["steps"] = None
    values |= drop_none(overrides)
    return resolve_precision(validate(TrainConfig, values))


def _describe_training(settings: TrainConfig, batches: Batches, total: int) -> dict[str, JsonValue]:
    """What a resumed run must agree with."""
    shared = settings.model_dump(
        mode="json", exclude={*RESUME_EXEMPT, "epochs", "steps", "batch_size"}
    )
    steps = total if settings.minutes is None else None
    return shared | {"total_steps": steps, "epoch_steps": batches.steps, "batch_rows": batches.size}


def require_validation(config: TrainConfig, validation: Batches | None, total: int) -> None:
    """Raises UserError (no_input, exit 4) where the weights of the lowest validation loss are
    wanted and nothing validates.
    """
    if config.checkpoint == "best" and total and (validation is None or not validation.steps):
        raise input_error(
            Reason.NO_INPUT,
            "no validation windows",
            "the best validation chooses the weights",
            "Use --checkpoint last, or ingest more subjects",
            field="--checkpoint",
        )


def _require_arguments(batches: object, objective: object) -> None:
    """Raises UserError (config, exit 2) for what is neither batches nor an objective."""
    if not hasattr(batches, "steps"):
        expected = "expected bitimely.batches(windows, 32)"
        hint = "Arrays are read by bitimely.Encoder"
        raise usage_error(f"found {type(batches).__name__}", expected, hint, field="batches")
    if not callable(objective):
        expected = "expected a function, as bitimely.get_objective('masked')"
        raise usage_error(f"found {objective!r}", expected, field="objective")


def _require_batches(config: TrainConfig, batches: Batches) -> None:
    """Raises UserError (no_input, exit 4) where a training has nothing to read."""
    if not batches.steps and config.count_steps(1):
        raise input_error(
            Reason.NO_INPUT,
            "no training batch",
            "expected at least one",
            "Check the split: it may have no training subject",
        )


def _measure_moments(
    model: nn.Module, batches: Batches, objective: Objective, config: TrainConfig
) -> None:
    """Measure what standardises features, and `model.target_scale` where it is NaN. Raises
    UserError (resource_limit, exit 6).
    """
    scale = getattr(model, "target_scale", None)
    try:
        objectives.measure_features(model, batches)
        if isinstance(scale, Tensor) and bool(torch.isnan(scale).any()):
            objectives.measure_scale(model, batches)
    except Exception as error:
        fault = faults.out_of_memory_error(
            error, batches, config, 1, divisible=faults.is_divisible(model, objective)
        )
        if fault is None:
            raise
        raise fault from None


def _train(state: TrainingState, stack: ExitStack) -> None:
    stack.enter_context(faults.handle_signals(state))
    # which is waited for, however the training ends
    state.pool = stack.enter_context(ThreadPoolExecutor(1))
    stack.enter_context(use_arithmetic(state.device, state.config.precision))
    stack.enter_context(recompute_layers(active=state.config.recompute == "layers"))
    if state.config.compile:
        stack.enter_context(compile_layers(state.model))
    state.gradients = GradientSum(state.model.parameters())
    stack.callback(state.gradients.close)
    if state.device.type == "cuda" and distributed.get_world_size() == 1:
        zero = torch.zeros((), device=state.device)
        state.on_device = DeviceLosses(zero, zero.new_full((4,), -1.0), zero.new_zeros(4))
    _keep_windows_on_device(state, stack)
    try:
        with attach_result(
            lambda: {
                "steps": state.step,
                "loss": state.last.get("loss"),
                "rel": state.last.get("rel"),
            }
        ):
            _run_steps(state)
    except KeyboardInterrupt as error:
        if state.home is None:
            raise
        raise faults.interrupted_error(
            state,
            signal.SIGINT,
            f"at once after step {state.step}",
            "the last checkpoint is intact",
        ) from error


def _keep_windows_on_device(state: TrainingState, stack: ExitStack) -> None:
    """Hold the windows in the memory of a GPU until `stack` closes, where the settings and an epoch
    or more of training ask for it.
    """
    keep = getattr(state.batches, "keep_on", None)
    if keep is None or state.device.type != "cuda" or state.total < state.batches.steps:
        return
    if state.config.resident:
        share = 0.25 if state.config.resident == "auto" else 0.8
        stack.enter_context(keep(state.device, share * torch.cuda.mem_get_info(state.device)[0]))


def _run_steps(state: TrainingState) -> None:
    """Steps, validations and checkpoints, to the last step or until a stop signal."""
    state.logged_at = state.started_at = time.perf_counter()
    state.model.train()
    every = state.config.checkpoint_every or state.batches.steps
    # where a run was stopped between the last step of an epoch and its validation
    stop = validate_training(state)
    while state.step < state.total and not stop:
        epoch, start = divmod(state.step, state.batches.steps)
        stream = open_stream(state, state.batches, "train", state.step + 1, epoch, start)
        with closing(stream):
            for _ in range(state.batches.steps - start):
                line, stop = _run_step(state, stream)
                write_line(state, line)
                stop = validate_training(state) or stop
                if stop or state.step >= state.total:
                    break
                if state.step % every == 0:
                    save_checkpoint(state, wait=False)
    save_checkpoint(state, wait=True)
    if number := stop or state.stop_signal:
        when = f"after step {state.step} of {state.total}"
        raise faults.interrupted_error(state, number, when, "it is saved")


def _run_step(state: TrainingState, stream: Iterator[Batch]) -> tuple[LogLine | None, int]:
    """One optimizer step. Returns the line to log, if one is due, and the stop signal that any
    process received, or 0.
    """
    state.optimizer.zero_grad(set_to_none=True)
    sums, parts, fault = _sum_gradients(state, stream)
    clock = budgets.read_clock(state)
    (*sums, state.seconds, pause), stop = faults.sync_step(
        state, sums + clock, fault, state.step + 1
    )
    factor = set_learning_rate(state)
    norm = _apply_gradients(state, sums)
    distributed.all_reduce_statistics(state.model)
    state.step += 1
    if state.average is not None:
        averages.update_average(state.average, state.model, state.step, state.config.ema)
    state.total = budgets.plan_steps(state, pause)
    state.unlogged_steps += 1
    return describe_step(state, norm, factor, parts) if is_logged(state) else None, stop


def _sum_gradients(
    state: TrainingState, stream: Iterator[Batch]
) -> tuple[list[float], Parts, Exception | None]:
    """Back-propagate the next global batch by micro-batches: the sums of their losses, the parts of
    these, and what failed, which the other processes must learn of before it is raised.
    """
    sums, parts = [0.0] * 4, Parts()
    if state.on_device is not None:
        state.on_device.last = state.on_device.last.new_zeros(4)
    micros, fault, waited = read_parts(state, stream, state.config.accumulate)
    state.data_wait += waited
    try:
        faults.raise_write_error(state, wait=False)
        generator = None
        # any module may be trained; some objectives read it
        progress = budgets.find_position(state).share
        setattr(state.model, "progress", progress)  # noqa: B010
        for part, micro in enumerate(micros):
            generator = make_generator(state, generator, "train", state.step + 1)
            out = evaluate_batch(state, micro, generator, "train", state.step + 1, part)
            state.gradients.is_last = part == len(micros) - 1
            (out.loss * out.count).backward()
            accumulate(sums, parts, out) if state.on_device is None else state.on_device.add(out)
            state.timesteps_read += micro.batch.values.shape[0] * micro.batch.values.shape[1]
    except Exception as error:
        fault = fault or error
    state.gradients.send_all()
    return sums, parts, fault


def _apply_gradients(state: TrainingState, sums: list[float]) -> float:
    """Take the step that the gradients ask for; their norm, or NaN where it stays on the device. An
    unusable step is never applied.

    Raises UserError: no_input, non_finite_loss (exit 4).
    """
    losses, used = state.on_device, distributed.list_parameters(state.optimizer)
    if losses is not None:
        torch._foreach_div_([p.grad for p in used if p.grad is not None], losses.last[0])
        losses.judge(nn.utils.clip_grad_norm_(used, state.config.clip, foreach=True), state.step)
        state.optimizer.found_inf = losses.found_inf  # type: ignore[attr-defined]
        state.optimizer.step()
        return math.nan
    count, loss, rel, rel_count = sums
    require_usable(state, count, loss)
    state.gradients.receive_all()
    torch._foreach_div_([p.grad for p in used if p.grad is not None], count)
    norm = float(nn.utils.clip_grad_norm_(used, state.config.clip))
    require_usable(state, count, loss, norm)
    state.optimizer.step()
    state.last = {"loss": loss / count, "rel": finite_or_none(rel / (rel_count or 1.0))}
    return norm
