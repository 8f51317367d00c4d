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
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from bitimely_core import __version__, objectives
from bitimely_core.config import RESUME_EXEMPT, TrainConfig, validate
from bitimely_core.errors import Finding, Reason, input_error, usage_error
from bitimely_core.models.layers import StackLayer, compile_layers, recompute_layers
from bitimely_core.schemas.runs import CheckpointMeta
from bitimely_core.store import locks, storage
from bitimely_core.system_errors import attach_result
from bitimely_core.train import (
    averages,
    checkpoints,
    distributed,
    draws,
    event_file,
    faults,
    targets,
)
from bitimely_core.train import budget as budgets
from bitimely_core.train.batches import map_tensors, read_ahead, scale_values, split_rows
from bitimely_core.train.devices import (
    deterministic_kernels,
    resolve_compile,
    resolve_precision,
    restore_model,
    select_device,
    use_arithmetic,
)
from bitimely_core.train.gradients import GradientSum
from bitimely_core.train.losses import BatchLoss, DeviceLosses, Parts, accumulate
from bitimely_core.train.metrics_log import LogLine, describe_log, restore_log
from bitimely_core.train.state import LOWEST_LOSS, Criterion, Log, Notice, Objective, TrainingState
from bitimely_core.types import Batch, Batches

SLOW_RATE = 1e-3  # largest learning rate of parameters that a module names in `slow`


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
        checkpoint, findings = _claim_checkpoint(home, notice, settings.keep, stack)
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
        optimizer, names = _make_optimizer(model, settings, device)
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
        _resume(state, checkpoint)
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
    values |= {name: value for name, value in overrides.items() if value is not None}
    return resolve_precision(validate(TrainConfig, values))


def _make_optimizer(
    model: nn.Module, config: TrainConfig, device: torch.device
) -> tuple[torch.optim.AdamW, list[str]]:
    """The optimizer of the parameters that are trained, and their names in its order."""
    groups = group_parameters(model, config.weight_decay)
    names = list(chain.from_iterable(group.pop("names") for group in groups))
    trained = groups or [{"params": [nn.Parameter(torch.zeros(0))]}]
    return torch.optim.AdamW(trained, lr=config.lr, fused=device.type in {"cuda", "cpu"}), names


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
    stop = _validate(state)
    while state.step < state.total and not stop:
        epoch, start = divmod(state.step, state.batches.steps)
        stream = _open_stream(state, state.batches, "train", state.step + 1, epoch, start)
        with closing(stream):
            for _ in range(state.batches.steps - start):
                line, stop = _run_step(state, stream)
                _write_line(state, line)
                stop = _validate(state) or stop
                if stop or state.step >= state.total:
                    break
                if state.step % every == 0:
                    _save_checkpoint(state, wait=False)
    _save_checkpoint(state, wait=True)
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
    factor = _set_learning_rate(state)
    norm = _apply_gradients(state, sums)
    distributed.all_reduce_statistics(state.model)
    state.step += 1
    if state.average is not None:
        averages.update_average(state.average, state.model, state.step, state.config.ema)
    state.total = budgets.plan_steps(state, pause)
    state.unlogged_steps += 1
    return _describe_step(state, norm, factor, parts) if _is_logged(state) else None, stop


def _sum_gradients(
    state: TrainingState, stream: Iterator[Batch]
) -> tuple[list[float], Parts, Exception | None]:
    """Back-propagate the next global batch by micro-batches: the sums of their losses, the parts of
    these, and what failed, which the other processes must learn of before it is raised.
    """
    sums, parts = [0.0] * 4, Parts()
    if state.on_device is not None:
        state.on_device.last = state.on_device.last.new_zeros(4)
    micros, fault, waited = _read_parts(state, stream, state.config.accumulate)
    state.data_wait += waited
    try:
        faults.raise_write_error(state, wait=False)
        generator = None
        # any module may be trained; some objectives read it
        progress = budgets.find_position(state).share
        setattr(state.model, "progress", progress)  # noqa: B010
        for part, micro in enumerate(micros):
            generator = _make_generator(state, generator, "train", state.step + 1)
            out = _evaluate_batch(state, micro, generator, "train", state.step + 1, part)
            state.gradients.is_last = part == len(micros) - 1
            (out.loss * out.count).backward()
            accumulate(sums, parts, out) if state.on_device is None else state.on_device.add(out)
            state.timesteps_read += micro.batch.values.shape[0] * micro.batch.values.shape[1]
    except Exception as error:
        fault = fault or error
    state.gradients.send_all()
    return sums, parts, fault


def _set_learning_rate(state: TrainingState) -> float:
    """Give every group of parameters the rate of this step; its share of the highest rate."""
    factor = compute_schedule_factor(*budgets.find_position(state), state.config.warmup)
    for group in state.optimizer.param_groups:
        group["lr"] = min(state.config.lr, group.get("largest", math.inf)) * factor
    return factor


def _is_logged(state: TrainingState) -> bool:
    """Whether the log has a line of this step: of the first and last, of the last of an epoch and
    of every `log_every`-th.
    """
    return (
        state.step in {1, state.total}
        or state.step % state.config.log_every == 0
        or state.step % state.batches.steps == 0
    )


def _describe_step(state: TrainingState, norm: float, factor: float, parts: Parts) -> LogLine:
    """The line of this step, with means over the steps since the last line, which it ends."""
    if state.on_device is not None:
        norm, parts = _read_losses(state)
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
    return _add_parts(line, parts)


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
    _require_usable(state, count, loss)
    state.gradients.receive_all()
    torch._foreach_div_([p.grad for p in used if p.grad is not None], count)
    norm = float(nn.utils.clip_grad_norm_(used, state.config.clip))
    _require_usable(state, count, loss, norm)
    state.optimizer.step()
    state.last = {"loss": loss / count, "rel": _finite_or_none(rel / (rel_count or 1.0))}
    return norm


def _require_usable(state: TrainingState, count: float, loss: float, norm: float = 0.0) -> None:
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


def _read_losses(state: TrainingState) -> tuple[float, Parts]:
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
        _require_usable(state, *unusable)
    state.last = {"loss": loss / count, "rel": _finite_or_none(rel / (rel_count or 1.0))}
    return norm, {name: (count, value) for name, value in zip(losses.names, read[9:], strict=True)}


def _validate(state: TrainingState) -> int:
    """Validate at the end of an epoch or of the training, once. Returns the stop signal that any
    process received, or 0.
    """
    if state.validation is None or not _needs_validation(state):
        return 0
    started = time.perf_counter()
    _read_losses(state)
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
    stream = _open_stream(state, validation, "validation", 0)
    with torch.no_grad(), closing(stream):
        for step in range(validation.steps):
            micros, fault, _ = _read_parts(state, stream, 1)
            try:
                for micro in micros:
                    generator = _make_generator(state, None, "validation", step)
                    out = _evaluate_batch(state, micro, generator, "validation", step)
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
        "loss": _finite_or_none(loss / max(count, 1.0)),
        "rel": _finite_or_none(rel / (rel_count or 1.0)),
    }
    state.validated = state.step
    line = _add_parts(entry, parts)
    if state.criterion is not LOWEST_LOSS:
        line = cast(LogLine, {**line, state.criterion.name: score})
    _judge_validation(state, entry, score)
    _write_line(state, line)
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
            state.best_weights = _copy_tensors(state.model)
    elif entry["epoch"] - int(best.get("epoch") or 0) >= (state.config.patience or math.inf):
        state.total = state.step


def _needs_validation(state: TrainingState) -> bool:
    """Whether an epoch or the training ends at this step and is not validated yet."""
    ended = state.step > 0 and (state.step % state.batches.steps == 0 or state.step == state.total)
    return (
        state.validation is not None
        and state.validation.steps > 0
        and ended
        and state.validated < state.step
    )


def _open_stream(
    state: TrainingState, batches: Batches, split: str, first: int, epoch: int = 0, start: int = 0
) -> Generator[Batch]:
    """Batches of this process with what the objective draws by row; `first` is the step of the
    first one.
    """
    read = getattr(batches, "read_narrow", batches) if state.device.type == "cuda" else batches
    stream = read(
        epoch, start=start, rank=distributed.get_rank(), world=distributed.get_world_size()
    )
    return read_ahead(
        draws.draw_rows(state.objective, state.model, stream, state.config.seed, split, first),
        state.device,
    )


def _make_generator(
    state: TrainingState, last: torch.Generator | None, *key: object
) -> torch.Generator:
    """What the objective draws itself (CPU): one stream a step and process, `last`; where it is
    shared by all rows, each micro-batch has the same.
    """
    facts = draws.find_facts(state.objective, state.model)
    if facts is not None and facts.shared:
        return draws.make_generator(state.config.seed, "objective", *key)
    return last or draws.make_generator(
        state.config.seed, "objective", *key, distributed.get_rank()
    )


def _read_parts(
    state: TrainingState, stream: Iterator[Batch], parts: int
) -> tuple[list[targets.MicroBatch], Exception | None, float]:
    """The next batch of this process in micro-batches, what failed (all processes come as far as
    `faults.sync_step`), and seconds waited.
    """
    counter = targets.find_counter(state.objective, state.model, parts)
    batches: list[Batch] = []
    counts: list[targets.Counts] = []
    fault: Exception | None = None
    started = time.perf_counter()
    waited = 0.0
    try:
        whole = next(stream, None)
        waited = time.perf_counter() - started
        batches = split_rows(whole, parts)
        if counter is not None:
            counts = [counter(state.model, _move_batch(state, batch)) for batch in batches]
    except Exception as error:
        batches, counts, fault = [], [], error
    if counter is None:
        return list(map(targets.MicroBatch, batches)), fault, waited
    return targets.weigh_batches(batches, counts, state.device), fault, waited


def _move_batch(state: TrainingState, batch: Batch) -> Batch:
    return map_tensors(batch, lambda x: x.to(state.device, non_blocking=True))


def _evaluate_batch(
    state: TrainingState, micro: targets.MicroBatch, generator: torch.Generator, *key: object
) -> BatchLoss:
    """The objective on one micro-batch, dropout fixed by `key`."""
    seed = draws.derive_seed(state.config.seed, "model", *key, distributed.get_rank())
    torch.default_generator.manual_seed(seed)
    if state.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif state.device.type == "mps":
        torch.mps.manual_seed(seed)
    with torch.autocast(
        state.device.type, dtype=torch.bfloat16, enabled=state.config.precision == "bf16"
    ):
        batch = scale_values(_move_batch(state, micro.batch))
        # chooses an adapter: read from the device it would be waited for
        batch = batch._replace(source=micro.batch.source)
        out = state.objective(state.model, batch, generator=generator)
        out = out if micro.weigh is None else micro.weigh(out)
    count, rel_count = out.get("count", micro.batch.values.shape[0]), out.get("rel_count")
    return BatchLoss(
        out["loss"],
        count,
        out.get("rel", math.nan),
        out.get("parts", {}),
        count if rel_count is None else rel_count,
    )


def compute_schedule_factor(step: int, total: int, warmup: float) -> float:
    """Share of the highest rate after `step` of `total` steps: linear over the first `warmup`
    share, then a cosine that is 0 at `total`.
    """
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


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


def _add_parts(line: LogLine, parts: Parts) -> LogLine:
    """`line` with the mean of each part over all processes, which may have different parts."""
    sums: dict[str, tuple[float, float]] = {}
    for process_parts in distributed.gather_objects(parts):
        for name, (count, weighted) in process_parts.items():
            counted, total = sums.get(name, (0.0, 0.0))
            sums[name] = counted + count, total + weighted
    means = {name: _finite_or_none(total / count) for name, (count, total) in sums.items()}
    return cast(LogLine, {**line, **means})


def load_latest_checkpoint(folder: str | Path) -> checkpoints.Checkpoint | None:
    """The newest intact checkpoint of a run, None without any. Raises UserError (integrity, exit 5)
    when none of them verifies.
    """
    return checkpoints.find_newest_checkpoint(Path(folder) / "checkpoints")[0]


def _write_line(state: TrainingState, line: LogLine | None) -> None:
    """Log a line in process 0, and hand it to `log`."""
    if line is None or distributed.get_rank() > 0:
        return
    if state.home is not None:
        storage.append_line(state.home / "metrics.jsonl", line)
        if state.config.track:
            event_file.append_event(state.home, line)
    if state.log is not None:
        state.log({**line, "of": state.total})


def _claim_checkpoint(
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


def _resume(state: TrainingState, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Load weights, moments and step, if there are any. Raises UserError (settings_differ,
    shapes_differ, integrity).
    """
    if checkpoint is None:
        return
    checkpoints.require_same_run(checkpoint, state.identity, RESUME_EXEMPT)
    weights = checkpoints.load_tensors(checkpoint, "model")
    checkpoints.require_same_shapes(checkpoint, weights, _list_tensors(state.model))
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


def _save_checkpoint(state: TrainingState, *, wait: bool) -> None:
    """Write a checkpoint of this step, after the last one also `model/`; process 0 does, in a
    thread that it may `wait` for.

    After the last step the model gets the selected weights.
    """
    _read_losses(state)
    finished = state.step == state.total and not _needs_validation(state)
    weights = _list_tensors(state.model)
    if finished and (chosen := state.best_weights or state.average) is not None:
        weights = _copy_tensors(state.model)
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
    content = checkpoints.encode_tensors(_list_tensors(model))
    storage.write_bytes(storage.make_folder(folder) / "model.safetensors", content)


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model as they are now, on the CPU."""
    return {
        name: value.detach().to("cpu", copy=True) for name, value in _list_tensors(model).items()
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
