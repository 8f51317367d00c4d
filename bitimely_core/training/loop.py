"""`fit`: the training loop for pre-training and fine-tuning, on one device or several, which resumes exactly from a checkpoint.

An objective is `f(model, batch, generator=None) -> {"loss", "rel", "parts", ...}`; `fit` back-propagates `loss` and logs the scalars.
Where `loss` is a mean over something other than rows (valid tokens), the objective gives their number as `count`: micro-batches and
processes are weighted by it, so that together they give the gradient of the global batch.

The order of the data, the learning rate, dropout and masks of step s are functions of (seed, s): a checkpoint needs weights, moments and s.
Random numbers also depend on the process rank (masks) and on the micro-batch (dropout); apart from them, gradient accumulation and the number
of processes change rounding alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn

from bitimely_core import __version__, objectives, storage
from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Finding, Reason, input_error, integrity_error
from bitimely_core.models.layers import recompute_layers
from bitimely_core.records import StoredFile, has_result, read_result
from bitimely_core.schemas.runs import CheckpointMeta
from bitimely_core.system_errors import attach_result, require_memory, translate_system_errors
from bitimely_core.training import checkpoints, distributed, event_file, faults
from bitimely_core.training.devices import deterministic_kernels, resolve_precision, select_device, use_arithmetic
from bitimely_core.types import Batch, Batches

Objective = Callable[..., dict[str, Any]]
Notice = Callable[[Finding], None]
Parts = dict[str, tuple[float, float]]  # name -> (count, count x value)

# of [train]: may change between a stop and its continuation
SLOW_RATE = 1e-3  # largest learning rate of parameters that a module names in `slow`
RESUME_EXEMPT = frozenset({"device", "devices", "compile", "recompute", "log_every", "checkpoint_every", "keep", "track"})


class LogLine(TypedDict, total=False):
    """A line of `metrics.jsonl`; the parts of the objective are further keys."""

    step: int
    epoch: int
    split: str
    loss: float | None
    rel: float | None
    lr: float
    grad_norm: float
    tokens_per_second: float
    data_wait: float  # seconds a step
    of: int  # all steps; only of lines that are handed to `log`


Log = Callable[[LogLine], None]


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


@dataclass(frozen=True)
class BatchLoss:
    """The objective on one micro-batch."""

    loss: Tensor
    count: Tensor | float  # what the loss is a mean over
    rel: Tensor | float
    parts: dict[str, Tensor | float]


@dataclass
class DeviceLosses:
    """Losses that stay on a device between log lines, so that the host does not wait for every step.

    A step whose loss, gradient norm or count is not usable is not applied and none after it (`found_inf` of the fused AdamW), and the host
    finds out which it was when it reads.
    """

    found_inf: Tensor  # [] 1 from the first unusable step on
    first: Tensor  # [4] number, count, loss sum and gradient norm of that step, else -1
    last: Tensor  # [3 + parts] count, count x loss, count x rel, count x part of the last step
    names: tuple[str, ...] = ()  # of its parts
    norm: Tensor | None = None  # of its gradient

    def add(self, out: BatchLoss) -> None:
        """Add a micro-batch to the last step."""
        values = [
            torch.as_tensor(value, dtype=self.last.dtype, device=self.last.device) for value in (out.loss, out.rel, *out.parts.values())
        ]
        count = torch.as_tensor(out.count, dtype=self.last.dtype, device=self.last.device)
        row = torch.stack([count, *(count * value for value in values)]).detach()
        self.last, self.names = (row if len(row) != len(self.last) else self.last + row), tuple(out.parts)

    def judge(self, norm: Tensor, step: int) -> None:
        """Mark the step as unusable where its count is 0, or its loss or norm is not finite."""
        count, loss = self.last[0], self.last[1]
        bad = (count == 0) | ~torch.isfinite(loss) | ~torch.isfinite(norm)
        here = torch.stack([torch.full_like(loss, step), count, loss, norm.to(loss.dtype)])
        self.first = torch.where(bad & (self.found_inf == 0), here, self.first)
        self.found_inf = torch.maximum(self.found_inf, bad.to(self.found_inf.dtype))
        self.norm = norm


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
    best: dict[str, int | float | None] | None = None  # lowest validation loss, its rel, step and epoch
    best_weights: dict[str, Tensor] | None = None  # of that step, on the CPU, where they are selected
    stop_signal: int = 0  # received by this process
    logged_at: float = 0.0  # clock at the last logged line; the counters below start there
    timesteps_read: int = 0
    data_wait: float = 0.0  # seconds
    unlogged_steps: int = 0
    on_device: DeviceLosses | None = None  # on CUDA in one process


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
    folder: str | Path | None = None,
    identity: dict[str, JsonValue] | None = None,
    log: Log | None = None,
    notice: Notice | None = None,
) -> FitResult:
    """Train `model` in place; with `folder`, log and save there, and resume from the checkpoint there.

    AdamW (no decay on vectors, biases, norms), linear warm-up, then a cosine to 0 over all steps, gradients clipped by their global norm.
    The same call again resumes after a kill and ends with the weights of the uninterrupted run, bit for bit on the same kind of device with
    the same numbers of processes and threads; a finished run is only loaded. The model keeps its mode and device, and starts from its
    weights; a `target_scale` that is NaN is measured before the first step.

    `batches` are global ones, as `data.batches` returns them; they decide the batch size, not `config.batch_size`. `epochs` replaces that
    of `config` (None: the defaults of `TrainConfig`) and its steps, `steps` the number of optimizer steps whatever the epochs, `lr` the
    highest learning rate, `seed` that of dropout and masks. `validation` is evaluated at the end of every epoch and of the training.
    `folder` gets `metrics.jsonl`, `checkpoints/` and, at the end, `model/`, and is locked meanwhile. A resumed run must agree with
    `identity` (JSON: manifest hash of the data, hash of the tokenizer, resolved settings). `log` is called with every line of the log, and
    in it `of`, the number of all steps; `notice` with every warning (None: `warnings.warn`).

    With `config.checkpoint` best the model ends with the weights of the lowest validation loss; every checkpoint holds those so far.

    Raises UserError: config, settings_differ (exit 2); shapes_differ, no_input, non_finite_loss (4); integrity (5); resource_limit,
    disk_full (6); locked (7); interrupted (130, 143).
    """
    overrides = {name: value for name, value in {"epochs": epochs, "steps": steps, "lr": lr, "seed": seed}.items() if value is not None}
    stored = {**(config or TrainConfig()).model_dump(), **({} if epochs is None else {"steps": None})}
    settings = resolve_precision(validate(TrainConfig, {**stored, **overrides}))
    total = settings.count_steps(batches.steps)
    require_validation(settings, validation, total)
    if not batches.steps and settings.count_steps(1):
        raise input_error(Reason.NO_INPUT, "no training batch", "expected at least one", "Check the split: it may have no training subject")
    distributed.join_group()
    device, home = select_device(settings.device), None if folder is None else Path(folder)
    with ExitStack() as stack:
        if home is not None and distributed.get_rank() == 0:
            stack.enter_context(storage.lock(home))
        checkpoint, findings = _find_checkpoint(home, notice, settings.keep)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(deterministic_kernels(device))
        if checkpoint is None and total:
            _measure_scale(model, batches, objective, settings)
        stack.callback(model.to, next((p.device for p in model.parameters()), torch.device("cpu")))
        stack.callback(model.train, model.training)
        model.to(device)
        distributed.broadcast_parameters(model)
        groups = group_parameters(model, settings.weight_decay)
        names = [name for group in groups for name in group.pop("names")]
        trained = groups or [{"params": [nn.Parameter(torch.zeros(0))]}]
        state = TrainingState(
            model=model,
            objective=objective,
            batches=batches,
            validation=validation,
            config=settings,
            total=total,
            device=device,
            optimizer=torch.optim.AdamW(trained, lr=settings.lr, fused=device.type == "cuda"),
            names=names,
            home=home,
            log=log,
            identity=json.loads(storage.encode_json({**(identity or {}), "train": _describe_training(settings, batches, total)})),
        )
        if checkpoint is not None:
            _resume(state, checkpoint)
        _restore_log(home, checkpoint, track=settings.track)
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
        "findings": findings,
    }


def _describe_training(settings: TrainConfig, batches: Batches, total: int) -> dict[str, JsonValue]:
    """What a resumed run must agree with."""
    shared = settings.model_dump(mode="json", exclude={*RESUME_EXEMPT, "epochs", "steps", "batch_size"})
    return shared | {"total_steps": total, "epoch_steps": batches.steps, "batch_rows": batches.size}


def require_validation(config: TrainConfig, validation: Batches | None, total: int) -> None:
    """Raises UserError (no_input, exit 4) where the weights of the lowest validation loss are wanted and nothing validates."""
    if config.checkpoint == "best" and total and (validation is None or not validation.steps):
        problem, expected = "no validation windows", "the lowest validation loss chooses the weights"
        raise input_error(Reason.NO_INPUT, problem, expected, "Use --checkpoint last, or ingest more subjects", field="--checkpoint")


def _measure_scale(model: nn.Module, batches: Batches, objective: Objective, config: TrainConfig) -> None:
    """Measure `model.target_scale` where it is NaN. Raises UserError (resource_limit, exit 6)."""
    scale = getattr(model, "target_scale", None)
    if not isinstance(scale, Tensor) or not bool(torch.isnan(scale).any()):
        return
    try:
        objectives.measure_scale(model, batches)
    except Exception as error:
        fault = faults.out_of_memory_error(error, batches, config, 1, divisible=faults.is_divisible(model, objective))
        if fault is None:
            raise
        raise fault from None


def _train(state: TrainingState, stack: ExitStack) -> None:
    stack.enter_context(faults.handle_signals(state))
    stack.enter_context(use_arithmetic(state.device, state.config.precision))
    stack.enter_context(recompute_layers(active=state.config.recompute == "layers"))
    if state.config.compile:
        state.model.compile()
        stack.callback(setattr, state.model, "_compiled_call_impl", None)
    if state.device.type == "cuda" and distributed.get_world_size() == 1:
        zero = torch.zeros((), device=state.device)
        state.on_device = DeviceLosses(zero, zero.new_full((4,), -1.0), zero.new_zeros(3))
    require_memory(3 * sum(p.numel() * p.element_size() for p in state.model.parameters() if p.requires_grad), "the optimizer")
    try:
        with attach_result(lambda: {"steps": state.step, "loss": state.last.get("loss"), "rel": state.last.get("rel")}):
            _run_steps(state)
    except KeyboardInterrupt as error:
        if state.home is None:
            raise
        raise faults.interrupted_error(state, signal.SIGINT, f"at once after step {state.step}", "the last checkpoint is intact") from error


def _run_steps(state: TrainingState) -> None:
    """Steps, validations and checkpoints, to the last step or until a stop signal."""
    state.logged_at = time.perf_counter()
    state.model.train()
    every = state.config.checkpoint_every or state.batches.steps
    stop = _validate(state)  # where a run was stopped between the last step of an epoch and its validation
    while state.step < state.total and not stop:
        epoch, start = divmod(state.step, state.batches.steps)
        left = min(state.batches.steps - start, state.total - state.step)
        with closing(
            _prefetch(state.batches(epoch, start=start, rank=distributed.get_rank(), world=distributed.get_world_size()), state.device)
        ) as stream:
            for _ in range(left):
                line, stop = _run_step(state, stream)
                if line is not None:
                    _write_line(state, line)
                stop = _validate(state) or stop
                if stop:
                    break
                if state.step % every == 0 and state.step < state.total:
                    _save_checkpoint(state)
    _save_checkpoint(state)
    if stop or state.stop_signal:
        raise faults.interrupted_error(state, stop or state.stop_signal, f"after step {state.step} of {state.total}", "it is saved")


def _run_step(state: TrainingState, stream: Iterator[Batch]) -> tuple[LogLine | None, int]:
    """One optimizer step. Returns the line to log, if one is due, and the stop signal that any process received, or 0."""
    factor = compute_schedule_factor(state.step, state.total, state.config.warmup)
    state.optimizer.zero_grad(set_to_none=True)
    if state.on_device is not None:
        state.on_device.last = state.on_device.last.new_zeros(3)
    sums, parts = [0.0, 0.0, 0.0], Parts()
    fault: Exception | None = None
    try:
        started = time.perf_counter()
        batch = next(stream, None)
        state.data_wait += time.perf_counter() - started
        generator = _make_generator(state, "train", state.step + 1)
        setattr(state.model, "progress", state.step / state.total)  # noqa: B010  any module may be trained; some objectives read it
        for at, micro in enumerate(_split_rows(batch, state.config.accumulate)):
            out = _evaluate_batch(state, micro, generator, "train", state.step + 1, at)
            (out.loss * out.count).backward()
            _accumulate(sums, parts, out) if state.on_device is None else state.on_device.add(out)
            state.timesteps_read += micro.values.shape[0] * micro.values.shape[1]
    except Exception as error:
        fault = error
    sums, stop = faults.sync_step(state, sums, fault, state.step + 1)
    for group in state.optimizer.param_groups:
        group["lr"] = min(state.config.lr, group.get("largest", math.inf)) * factor
    norm = _apply_gradients(state, sums)
    distributed.all_reduce_statistics(state.model)
    state.step += 1
    state.unlogged_steps += 1
    if not (
        state.step == 1 or state.step % state.config.log_every == 0 or state.step % state.batches.steps == 0 or state.step == state.total
    ):
        return None, stop
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
    return _add_parts(line, parts), stop


def _apply_gradients(state: TrainingState, sums: list[float]) -> float:
    """Take the step that the gradients ask for; their norm, or NaN where it stays on the device. An unusable step is never applied.

    Raises UserError: no_input, non_finite_loss (exit 4).
    """
    own, used = state.on_device, distributed.list_parameters(state.optimizer)
    if own is not None:
        torch._foreach_div_([p.grad for p in used if p.grad is not None], own.last[0])
        own.judge(nn.utils.clip_grad_norm_(used, state.config.clip), state.step)
        state.optimizer.found_inf = own.found_inf  # type: ignore[attr-defined]
        state.optimizer.step()
        return math.nan
    count, loss, rel = sums
    _require_usable(state, count, loss)
    distributed.all_reduce_gradients(state, count)
    norm = float(nn.utils.clip_grad_norm_(used, state.config.clip))
    _require_usable(state, count, loss, norm)
    state.optimizer.step()
    state.last = {"loss": loss / count, "rel": _finite_or_none(rel / count)}
    return norm


def _require_usable(state: TrainingState, count: float, loss: float, norm: float = 0.0) -> None:
    """Raises UserError (no_input, non_finite_loss, exit 4) for the step after `state.step`."""
    if not count:
        raise input_error(Reason.NO_INPUT, f"no valid value in the batch of step {state.step + 1}", "expected at least one")
    if not math.isfinite(loss):
        raise faults.non_finite_error(state, "loss", loss / count)
    if not math.isfinite(norm):
        raise faults.non_finite_error(state, "gradient norm", norm)


def _read_losses(state: TrainingState) -> tuple[float, Parts]:
    """Norm and parts of the last step, from the device, with `state.last`. Raises as `_apply_gradients`, for the first unusable step."""
    own = state.on_device
    if own is None or own.norm is None:
        return math.nan, Parts()
    read = torch.cat((own.first, own.norm[None].to(own.last.dtype), own.last)).tolist()
    (step, *unusable), (norm, count, loss, rel), values = read[:4], read[4:8], read[8:]
    if step >= 0:
        state.step = int(step)
        _require_usable(state, *unusable)
    state.last = {"loss": loss / count, "rel": _finite_or_none(rel / count)}
    return norm, {name: (count, value) for name, value in zip(own.names, values, strict=True)}


def _validate(state: TrainingState) -> int:
    """Validate at the end of an epoch or of the training, once. Returns the stop signal that any process received, or 0."""
    if state.validation is None or not _needs_validation(state):
        return 0
    sums, parts = [0.0, 0.0, 0.0], Parts()
    _read_losses(state)
    state.model.eval()
    try:
        with (
            torch.no_grad(),
            closing(
                _prefetch(state.validation(0, rank=distributed.get_rank(), world=distributed.get_world_size()), state.device)
            ) as stream,
        ):
            for at in range(state.validation.steps):
                fault: Exception | None = None
                try:
                    for micro in _split_rows(next(stream, None), 1):
                        _accumulate(sums, parts, _evaluate_batch(state, micro, _make_generator(state, "validation", at), "validation", at))
                except Exception as error:
                    fault = error
                _, stop = faults.sync_step(state, [], fault, state.step)
                if stop:
                    return stop  # the next call repeats the validation
    finally:
        state.model.train()
    count, loss, rel = distributed.all_reduce_sum(sums)
    entry: LogLine = {
        "step": state.step,
        "epoch": (state.step - 1) // state.batches.steps + 1,
        "split": "validation",
        "loss": _finite_or_none(loss / max(count, 1.0)),
        "rel": _finite_or_none(rel / max(count, 1.0)),
    }
    state.validated = state.step
    lowest = math.inf if state.best is None or state.best["loss"] is None else state.best["loss"]
    if entry["loss"] is not None and entry["loss"] < lowest:
        state.best = {"step": entry["step"], "epoch": entry["epoch"], "loss": entry["loss"], "rel": entry["rel"]}
        state.best_weights = _copy_tensors(state.model) if state.config.checkpoint == "best" else None
    _write_line(state, _add_parts(entry, parts))
    state.logged_at = time.perf_counter()
    return 0


def _needs_validation(state: TrainingState) -> bool:
    """Whether an epoch or the training ends at this step and is not validated yet."""
    ended = state.step > 0 and (state.step % state.batches.steps == 0 or state.step == state.total)
    return state.validation is not None and state.validation.steps > 0 and ended and state.validated < state.step


def _make_generator(state: TrainingState, *key: object) -> torch.Generator:
    """The objective's random numbers (CPU): one stream a step, so that what is drawn row by row does not depend on the micro-batches."""
    return torch.Generator().manual_seed(_derive_seed(state.config.seed, "objective", *key, distributed.get_rank()))


def _evaluate_batch(state: TrainingState, micro: Batch, generator: torch.Generator, *key: object) -> BatchLoss:
    """The objective on one micro-batch, dropout fixed by `key`."""
    seed = _derive_seed(state.config.seed, "model", *key, distributed.get_rank())
    torch.default_generator.manual_seed(seed)
    if state.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif state.device.type == "mps":
        torch.mps.manual_seed(seed)
    with torch.autocast(state.device.type, dtype=torch.bfloat16, enabled=state.config.precision == "bf16"):
        out = state.objective(state.model, map_tensors(micro, lambda x: x.to(state.device, non_blocking=True)), generator=generator)
    return BatchLoss(out["loss"], out.get("count", micro.values.shape[0]), out.get("rel", math.nan), out.get("parts", {}))


def _accumulate(sums: list[float], parts: Parts, out: BatchLoss) -> None:
    """Add count, count x loss and count x rel to `sums`, and each part to `parts`, in one transfer from the device."""
    kind = torch.promote_types(out.loss.dtype, torch.float32)
    values = [out.count, out.loss, out.rel, *out.parts.values()]
    count, loss, rel, *numbers = torch.stack([torch.as_tensor(v, dtype=kind, device=out.loss.device).detach() for v in values]).tolist()
    sums[:] = [sums[0] + count, sums[1] + count * loss, sums[2] + count * rel]
    for name, number in zip(out.parts, numbers, strict=True):
        counted, weighted = parts.get(name, (0.0, 0.0))
        parts[name] = (counted + count, weighted + count * number)


def compute_schedule_factor(step: int, total: int, warmup: float) -> float:
    """Share of the highest rate after `step` of `total` steps: linear over the first `warmup` share, then a cosine that is 0 at `total`."""
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in up to three groups of `params`, `names`, `weight_decay`: vectors, biases and all of a norm do not decay.

    Nor do those that their module names in `slow`; their learning rate stays below `SLOW_RATE` (`largest` of their group).
    """
    kinds = ({"weight_decay": weight_decay}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "largest": SLOW_RATE})
    groups: list[dict[str, Any]] = [{"params": [], "names": [], **kind} for kind in kinds]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            vector = parameter.ndim < 2 or own.startswith("bias") or "Norm" in type(module).__name__
            group = groups[2 if own in getattr(module, "slow", ()) else int(vector)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


def _derive_seed(*key: object) -> int:
    """63 bits that depend on every part of `key`."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, key)).encode()).digest()[:8], "little") >> 1


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`batch` with `change` applied to each of its tensors."""
    return Batch(change(batch.values), *(None if x is None else change(x) for x in batch[1:]))


def _split_rows(batch: Batch | None, parts: int) -> list[Batch]:
    """The rows of `batch` in `parts` runs of nearly equal length; empty ones are left out."""
    if batch is None:
        return []
    rows = batch.values.shape[0]
    bounds = [(a, b) for a, b in pairwise(rows * at // parts for at in range(parts + 1)) if b > a]
    return [map_tensors(batch, lambda x, a=a, b=b: x[a:b]) for a, b in bounds]  # type: ignore[misc]


def _add_parts(line: LogLine, parts: Parts) -> LogLine:
    """`line` with the mean of each part over all processes, which may have different parts."""
    gathered: list[Any] = [parts]
    if distributed.get_world_size() > 1:
        gathered = [None] * distributed.get_world_size()
        dist.all_gather_object(gathered, parts)
    names = dict.fromkeys(name for one in gathered for name in one)
    sums = {name: [sum(column) for column in zip(*(one[name] for one in gathered if name in one), strict=True)] for name in names}
    return cast(LogLine, {**line, **{name: _finite_or_none(weighted / count) for name, (count, weighted) in sums.items()}})


def _prefetch(stream: Iterator[Batch], where: torch.device, depth: int = 2) -> Generator[Batch]:
    """The batches of `stream`; for a GPU a thread reads `depth` of them ahead into pinned memory."""
    if where.type != "cuda":
        yield from stream
        return
    waiting: queue.Queue[Batch | Exception | None] = queue.Queue(depth)
    stopped = threading.Event()

    def enqueue(item: Batch | Exception | None) -> None:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            break

    def read_batches() -> None:
        try:
            for batch in stream:
                enqueue(map_tensors(batch, lambda x: x.pin_memory()))
                if stopped.is_set():
                    return
            enqueue(None)
        except Exception as error:  # raised again in the training thread
            enqueue(error)

    threading.Thread(target=read_batches, daemon=True, name="batches").start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()


def load_latest_checkpoint(folder: str | Path) -> checkpoints.Checkpoint | None:
    """The newest intact checkpoint of a run, None without any. Raises UserError (integrity, exit 5) when none of them verifies."""
    return checkpoints.find_newest_checkpoint(Path(folder) / "checkpoints")[0]


def is_finished(folder: str | Path) -> bool:
    """Whether the last step of the run in `folder` is done and validated; then its weights are in `model/`."""
    checkpoint = load_latest_checkpoint(folder)
    return checkpoint is not None and checkpoint.meta.finished


def read_metrics(folder: str | Path) -> list[LogLine]:
    """The lines of `metrics.jsonl`, without one that a kill has cut."""
    path = Path(folder) / "metrics.jsonl"
    lines: list[LogLine] = []
    for text in read_result(path).splitlines() if has_result(path) else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(cast(LogLine, line))
    return lines


def _restore_log(home: Path | None, checkpoint: checkpoints.Checkpoint | None, *, track: bool) -> None:
    """Cut the log, and the event file, to what it was at the checkpoint. Raises UserError (integrity, exit 5) where it has been altered."""
    if home is None or distributed.get_rank() > 0:
        return
    path = home / "metrics.jsonl"
    if checkpoint is None:
        storage.remove_file(path)
    elif (log := checkpoint.meta.log) is not None:
        require_log(path, log)
        if log.size < path.stat().st_size:
            storage.write_bytes(path, path.read_bytes()[: log.size])
    elif path.is_file() and not checkpoint.meta.finished:  # of version 0.1: without the lines after the checkpoint
        step, validated = checkpoint.meta.step, checkpoint.meta.validated
        kept = [one for one in read_metrics(path.parent) if one["step"] <= (validated if one.get("split") == "validation" else step)]
        storage.write_bytes(path, b"".join(storage.encode_json(one) + b"\n" for one in kept))
    if track:
        event_file.restore_events(home, read_metrics(home))


def require_log(path: Path, log: StoredFile) -> None:
    """Raises UserError (integrity, exit 5) where the log at `path` does not begin with what it was at a checkpoint, `log`."""
    content = path.read_bytes()[: log.size] if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != log.sha256:
        raise integrity_error(
            str(path),
            "is missing" if not path.is_file() else "differs from what the last checkpoint has of it",
            f"expected {log.size} bytes of sha256 {log.sha256[:16]}",
            "Restore a copy, or start again with --force-new",
        )


def _write_line(state: TrainingState, line: LogLine) -> None:
    if distributed.get_rank() == 0:
        if state.home is not None:
            storage.append_line(state.home / "metrics.jsonl", line)
            if state.config.track:
                event_file.append_event(state.home, line)
        if state.log is not None:
            state.log({**line, "of": state.total})


def _find_checkpoint(home: Path | None, notice: Notice | None, keep: int) -> tuple[checkpoints.Checkpoint | None, list[Finding]]:
    """The checkpoint to resume from: process 0 selects it, cleans up and broadcasts the step."""
    if home is None:
        return None, []
    folder = home / "checkpoints"
    if distributed.get_rank() == 0:
        for own in (folder, home / "model"):
            storage.refuse_link(own)
        checkpoint, findings = checkpoints.find_newest_checkpoint(folder)
        checkpoints.sweep_folder(folder, checkpoint, keep=keep)
        for swept in (home, home / "model"):
            if swept.is_dir():
                storage.remove_temporary_files(swept)
        distributed.all_reduce_sum([0.0 if checkpoint is None else checkpoint.step + 1.0])
        for finding in findings:
            faults.warn(finding, notice)
        return checkpoint, findings
    (number,) = distributed.all_reduce_sum([0.0])
    path = folder / f"step-{int(number) - 1}"
    return (checkpoints.Checkpoint(path, checkpoints.verify_checkpoint(path)) if number else None), []


def _resume(state: TrainingState, checkpoint: checkpoints.Checkpoint) -> None:
    """Load weights, moments and step. Raises UserError (settings_differ, shapes_differ, integrity)."""
    checkpoints.require_same_run(checkpoint, state.identity, RESUME_EXEMPT)
    weights = checkpoints.load_tensors(checkpoint, "model")
    checkpoints.require_same_shapes(checkpoint, weights, _list_tensors(state.model))
    state.model.load_state_dict(weights)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoints.load_tensors(checkpoint, "optimizer").items():
        name, _, moment = key.rpartition("::")
        moments.setdefault(name, {})[moment] = value
    loaded = {at: moments[name] for at, name in enumerate(state.names) if name in moments}
    state.optimizer.load_state_dict({"state": loaded, "param_groups": state.optimizer.state_dict()["param_groups"]})
    meta = checkpoint.meta
    if state.config.checkpoint == "best" and meta.best is not None:  # weights of their own only where they are those of another step
        state.best_weights = checkpoints.load_tensors(checkpoint, "best") if "best.safetensors" in meta.files else weights
        checkpoints.require_same_shapes(checkpoint, state.best_weights, weights)
        if meta.finished:
            state.model.load_state_dict(state.best_weights)
    state.step, state.validated, state.best, state.last = meta.step, meta.validated, meta.best, meta.last


def _save_checkpoint(state: TrainingState) -> None:
    """Write a checkpoint of this step, after the last one also `model/`. Process 0 alone writes.

    After the last step the model gets the selected weights.
    """
    _read_losses(state)
    finished = state.step == state.total and not _needs_validation(state)
    weights = _list_tensors(state.model)
    if finished and state.best_weights is not None:
        weights = _copy_tensors(state.model)
        state.model.load_state_dict(state.best_weights)
    if state.home is None:
        return
    parameters = dict(state.model.named_parameters())
    states = [state.optimizer.state.get(p, {}) for p in distributed.list_parameters(state.optimizer)]
    moments = {f"{name}::{key}": value for name, state in zip(state.names, states, strict=False) for key, value in state.items()}
    if not (checkpoints.is_finite(parameters) and checkpoints.is_finite(moments)):
        raise input_error(
            Reason.NON_FINITE_LOSS,
            f"non-finite weights after step {state.step}",
            "expected finite numbers",
            "Lower --lr; the previous checkpoint is kept",
            file=str(state.home),
        )
    if distributed.get_rank() == 0:
        if finished and callable(save := getattr(state.model, "save", None)):
            save(state.home / "model")
        elif finished:  # it cannot save its configuration
            checkpoints.write_tensors(storage.make_folder(state.home / "model") / "model.safetensors", _list_tensors(state.model))
        meta = CheckpointMeta(
            step=state.step,
            epoch=state.step // max(state.batches.steps, 1),
            total=state.total,
            finished=finished,
            validated=state.validated,
            best=state.best,
            last=state.last,
            seed=state.config.seed,
            processes=distributed.get_world_size(),
            identity=state.identity,
            log=_describe_log(state.home / "metrics.jsonl"),
            bitimely=__version__,
            torch=str(torch.__version__),
        )
        tensors = {"model": weights, "optimizer": moments}
        if state.best_weights is not None and state.best is not None and state.best["step"] != state.step:
            tensors["best"] = state.best_weights
        checkpoints.save_checkpoint(state.home / "checkpoints", meta, tensors, keep=state.config.keep)
    distributed.all_reduce_sum([0.0])  # the others wait: a stop must not end them while process 0 writes


def _describe_log(path: Path) -> StoredFile | None:
    """Hash and size of the log so far."""
    if not path.is_file():
        return None
    storage.sync_file(path)
    with translate_system_errors(path):
        sha256, size = storage.hash_with_size(path)
    return StoredFile(sha256=sha256, size=size)


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model as they are now, on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in _list_tensors(model).items()}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
