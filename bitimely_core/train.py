"""`fit`: the one loop, for pre-training and fine-tuning, on one device or several, that continues exactly where it was stopped.

An objective is `f(model, batch, generator=None) -> {"loss", "rel", "parts", ...}`; `fit` back-propagates `loss` and logs the scalars.
Where `loss` is a mean over something else than rows (valid tokens), the objective says over how many by `count`: micro-batches and
processes are weighted by it, so that together they give the gradient of the whole global batch.

The order of the data, the learning rate, dropout and masks of step s are functions of (seed, s): a checkpoint needs weights, moments and s.
What is drawn depends on the process too (masks) and on the micro-batch (dropout); otherwise accumulation and the number of processes
change rounding alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core import __version__, checkpoints, objectives, registry, store
from bitimely_core.batch import Batch, Batches
from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.settings import TrainConfig, merged, validated

Objective = Callable[..., dict[str, Any]]
Log = Callable[[dict[str, Any]], None]
Notice = Callable[[Finding], None]
Parts = dict[str, tuple[float, float]]  # name -> (count, count x value)

# of [train]: may change between a stop and its continuation
FREE = frozenset({"device", "devices", "compile", "log_every", "checkpoint_every", "keep"})


@dataclass(kw_only=True)
class _Run:
    """What the functions of the loop share."""

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
    identity: dict[str, Any]
    log: Log | None
    step: int = 0  # done
    validated: int = 0  # step of the last validation
    last: dict[str, Any] = field(default_factory=dict)  # loss and rel of the last step
    best: dict[str, Any] | None = None  # lowest validation loss, its rel, step and epoch
    stop: int = 0  # the signal that asked this process to stop
    since: float = 0.0  # clock at the last logged line; from then on: timesteps read, seconds waited for data, steps
    fed: int = 0
    waited: float = 0.0
    unlogged: int = 0


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
    identity: dict[str, Any] | None = None,
    log: Log | None = None,
    notice: Notice | None = None,
) -> dict[str, Any]:
    """Train `model` in place; with `folder`, log and save there, and continue what lies there.

    AdamW (no decay on vectors, biases, norms), linear warm-up, then a cosine to 0 over all steps, the global norm of the gradient clipped.
    The same call again continues after a kill and ends with the weights of the undisturbed run, bit for bit on the same kind of device
    with the same numbers of processes and threads; when the run is finished it only loads them. The model comes back in the mode and on
    the device that it had.

    Args:
        model: Starts from its weights; a `target_scale` that is NaN is measured before the first step.
        batches: Global batches as `data.batches` returns them.
        objective: `f(model, batch, generator=None)`, see above.
        epochs: In the place of `config.epochs`.
        steps: Optimizer steps in all, whatever the epochs.
        lr: Highest learning rate, in the place of `config.lr`.
        seed: Of dropout and masks, in the place of `config.seed`.
        config: None: the defaults of `TrainConfig`. Its `batch_size` is a matter of `batches`.
        validation: Evaluated at the end of every epoch and of the training.
        folder: Gets `metrics.jsonl`, `checkpoints/` and, at the end, `model/`; it is locked meanwhile. None: nothing is written.
        identity: JSON that a continued run must agree with: manifest hash of the data, hash of the tokenizer, resolved settings.
        log: Called with every line of the log, and in it `of`, the number of all steps.
        notice: Called with every warning; None: `warnings.warn`.

    Returns:
        `steps`, `epochs`, `finished`, `resumed` (step or None), `loss` and `rel` of the last step, `best` (validation), `device`,
        `findings`.

    Raises:
        UserError: config, settings_differ (exit 2); shapes_differ, no_input, non_finite_loss (4); integrity (5); resource_limit, disk_full
            (6); locked (7); interrupted (130, 143).
    """
    asked = {name: value for name, value in {"epochs": epochs, "steps": steps, "lr": lr, "seed": seed}.items() if value is not None}
    whole = {} if epochs is None else {"steps": None}  # epochs that are asked for win over configured steps
    settings = validated(TrainConfig, {**(config.model_dump() if config else {}), **whole, **asked})
    total = settings.epochs * batches.steps if settings.steps is None else settings.steps
    if not batches.steps and (settings.epochs if settings.steps is None else settings.steps):
        raise UserError(
            Reason.NO_INPUT,
            "no training batch",
            wanted="expected at least one",
            action="Look at the split: it may leave no subject for training",
        )
    join()
    where = device(settings.device)
    home = None if folder is None else Path(folder)
    with ExitStack() as stack:
        if home is not None and rank() == 0:
            stack.enter_context(store.lock(home))
        former, findings = _former(home)
        for finding in findings:
            _tell(finding, notice)
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        stack.enter_context(_deterministic(where))
        scale = getattr(model, "target_scale", None)
        if former is None and total and isinstance(scale, Tensor) and bool(torch.isnan(scale).any()):
            try:
                objectives.measure_scale(model, batches)
            except Exception as error:
                fault = _out_of_memory(error, batches, settings, 1, alike=_divisible(model, objective))
                if fault is None:
                    raise
                raise fault from None
        stack.callback(model.to, next((p.device for p in model.parameters()), torch.device("cpu")))
        stack.callback(model.train, model.training)
        model.to(where)
        _same_everywhere(model)
        groups = parameter_groups(model, settings.weight_decay)
        names = [name for group in groups for name in group.pop("names")]
        optimizer = torch.optim.AdamW(groups or [{"params": [nn.Parameter(torch.zeros(0))]}], lr=settings.lr, fused=where.type == "cuda")
        run = _Run(
            model=model,
            objective=objective,
            batches=batches,
            validation=validation,
            config=settings,
            total=total,
            device=where,
            optimizer=optimizer,
            names=names,
            home=home,
            log=log,
            identity=merged(identity or {}, {"train": _decisive(settings, batches, total)}),
        )
        if former is not None:
            _continue(run, former)
        if former is None or not former.meta["finished"]:
            if home is not None and rank() == 0:
                _trim(home / "metrics.jsonl", run.step, run.validated)
            stack.enter_context(_signals(run))
            if settings.compile:
                model.compile()
                stack.callback(setattr, model, "_compiled_call_impl", None)
            try:
                _loop(run)
            except KeyboardInterrupt as error:
                if home is None:
                    raise
                raise _interrupted(run, signal.SIGINT, f"at once after step {run.step}", "the last checkpoint is whole") from error
        return {
            "steps": run.step,
            "epochs": run.step / max(batches.steps, 1),
            "finished": True,
            "resumed": None if former is None else former.step,
            "loss": run.last.get("loss"),
            "rel": run.last.get("rel"),
            "best": run.best,
            "device": str(where),
            "findings": findings,
        }


def _loop(run: _Run) -> None:
    """Steps, validations and checkpoints, to the last step or until a signal asks to stop."""
    run.since = time.perf_counter()
    run.model.train()
    every = run.config.checkpoint_every or run.batches.steps
    stop = _validate(run)  # where a run was stopped between the last step of an epoch and its validation
    while run.step < run.total and not stop:
        epoch, start = divmod(run.step, run.batches.steps)
        left = min(run.batches.steps - start, run.total - run.step)
        with closing(_ahead(run.batches(epoch, start=start, rank=rank(), world=world()), run.device)) as stream:
            for _ in range(left):
                line, stop = _step(run, stream)
                if line is not None:
                    _write(run, line)
                stop = _validate(run) or stop
                if stop:
                    break
                if run.step % every == 0 and run.step < run.total:
                    _save(run)
    _save(run)
    if stop or run.stop:
        raise _interrupted(run, stop or run.stop, f"after step {run.step} of {run.total}", "it is saved")


def _step(run: _Run, stream: Iterator[Batch]) -> tuple[dict[str, Any] | None, int]:
    """One optimizer step. Returns the line to log, if one is due, and the signal that asked any process to stop, or 0."""
    rate = run.config.lr * schedule(run.step, run.total, run.config.warmup)
    run.optimizer.zero_grad(set_to_none=True)
    sums, parts = [0.0, 0.0, 0.0], Parts()
    fault: Exception | None = None
    try:
        begun = time.perf_counter()
        batch = next(stream, None)
        run.waited += time.perf_counter() - begun
        generator = _generator(run, "train", run.step + 1)
        setattr(run.model, "progress", run.step / run.total)  # noqa: B010  any module may be trained; some objectives read it
        for at, micro in enumerate(_split(batch, run.config.accumulate)):
            out, count = _evaluate(run, micro, generator, "train", run.step + 1, at)
            (out["loss"] * count).backward()
            _add(sums, parts, out, count)
            run.fed += micro.values.shape[0] * micro.values.shape[1]
    except Exception as error:
        fault = error
    (count, loss, rel), stop = _agree(run, sums, fault, run.step + 1)
    if not count:
        raise UserError(Reason.NO_INPUT, f"no valid value in the batch of step {run.step + 1}", wanted="expected at least one")
    if not math.isfinite(loss):
        raise _non_finite(run, "loss", loss / count)
    _share_gradients(run, count)
    norm = float(nn.utils.clip_grad_norm_(_parameters(run.optimizer), run.config.clip))
    if not math.isfinite(norm):
        raise _non_finite(run, "gradient norm", norm)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    _share_statistics(run.model)
    run.step += 1
    run.unlogged += 1
    run.last = {"loss": loss / count, "rel": _number(rel / count)}
    if not (run.step == 1 or run.step % run.config.log_every == 0 or run.step % run.batches.steps == 0 or run.step == run.total):
        return None, stop
    fed, waited = _sum([run.fed, run.waited])
    now = time.perf_counter()
    line = {
        "step": run.step,
        "epoch": _epoch(run),
        "split": "train",
        **run.last,
        **_means(parts),
        "lr": rate,
        "grad_norm": norm,
        "tokens_per_second": fed / max(now - run.since, 1e-9),
        "data_wait": waited / world() / run.unlogged,
    }
    run.since, run.fed, run.waited, run.unlogged = now, 0, 0.0, 0
    return line, stop


def _validate(run: _Run) -> int:
    """Validation where an epoch or the training has ended and it was not done yet. Returns the signal that asked to stop, or 0."""
    if run.validation is None or not _unvalidated(run):
        return 0
    sums, parts = [0.0, 0.0, 0.0], Parts()
    run.model.eval()
    try:
        with torch.no_grad(), closing(_ahead(run.validation(0, rank=rank(), world=world()), run.device)) as stream:
            for at in range(run.validation.steps):
                fault: Exception | None = None
                try:
                    for micro in _split(next(stream, None), 1):
                        out, count = _evaluate(run, micro, _generator(run, "validation", at), "validation", at)
                        _add(sums, parts, out, count)
                except Exception as error:
                    fault = error
                _, stop = _agree(run, [], fault, run.step)
                if stop:
                    return stop  # the next call does it from its beginning
    finally:
        run.model.train()
    count, loss, rel = _sum(sums)
    mean = {"loss": _number(loss / max(count, 1.0)), "rel": _number(rel / max(count, 1.0))}
    line = {"step": run.step, "epoch": _epoch(run), "split": "validation", **mean}
    run.validated = run.step
    if mean["loss"] is not None and (run.best is None or mean["loss"] < run.best["loss"]):
        run.best = {key: value for key, value in line.items() if key != "split"}
    _write(run, {**line, **_means(parts)})
    run.since = time.perf_counter()
    return 0


def _unvalidated(run: _Run) -> bool:
    ended = run.step > 0 and (run.step % run.batches.steps == 0 or run.step == run.total)
    return run.validation is not None and run.validation.steps > 0 and ended and run.validated < run.step


def _generator(run: _Run, *key: object) -> torch.Generator:
    """The objective's random numbers (CPU): one stream a step, so that what is drawn row by row does not depend on the micro-batches."""
    return torch.Generator().manual_seed(_seed(run.config.seed, "objective", *key, rank()))


def _evaluate(run: _Run, micro: Batch, generator: torch.Generator, *key: object) -> tuple[dict[str, Any], Tensor | float]:
    """The objective on one micro-batch, dropout fixed by `key`, and over how many things its loss is a mean."""
    seed = _seed(run.config.seed, "model", *key, rank())
    torch.default_generator.manual_seed(seed)
    if run.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif run.device.type == "mps":
        torch.mps.manual_seed(seed)
    with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=run.config.precision == "bf16"):
        out = run.objective(run.model, _each(micro, lambda x: x.to(run.device, non_blocking=True)), generator=generator)
    return out, out.get("count", micro.values.shape[0])


def _add(sums: list[float], parts: Parts, out: dict[str, Any], of: Tensor | float) -> None:
    """Add count, count x loss and count x rel to `sums`, and each part to `parts`, in one transfer from the device."""
    named = out.get("parts", {})
    kind = torch.promote_types(out["loss"].dtype, torch.float32)
    values = [of, out["loss"], out.get("rel", math.nan), *named.values()]
    count, loss, rel, *numbers = torch.stack([torch.as_tensor(v, dtype=kind, device=out["loss"].device).detach() for v in values]).tolist()
    sums[:] = [sums[0] + count, sums[1] + count * loss, sums[2] + count * rel]
    for name, number in zip(named, numbers, strict=True):
        seen, weighted = parts.get(name, (0.0, 0.0))
        parts[name] = (seen + count, weighted + count * number)


def _agree(run: _Run, numbers: list[float], fault: Exception | None, batch: int) -> tuple[list[float], int]:
    """Sums of `numbers` over all processes and the signal that any of them got; a fault of one is raised in all: none waits for ever."""
    flags = [float(fault is not None), float(run.stop == signal.SIGINT), float(run.stop == signal.SIGTERM)]
    *sums, faults, interrupts, terminations = _sum([*numbers, *flags])
    if faults:
        own = (
            None
            if fault is None
            else _out_of_memory(fault, run.batches, run.config, batch, alike=_divisible(run.model, run.objective)) or fault
        )
        raise _of_all(own) from (fault if own is not fault else None)
    return sums, int(signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0)


# -- what the numbers depend on --------------------------------------------------------------------------------------------------------


def schedule(step: int, total: int, warmup: float) -> float:
    """Share of the highest rate after `step` of `total` steps: linear over the first `warmup` share, then a cosine that is 0 at `total`."""
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in up to two groups of `params`, `names`, `weight_decay`: vectors, biases and all of a norm do not decay."""
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, own = name.rpartition(".")
            vector = parameter.ndim < 2 or own.startswith("bias") or "Norm" in type(model.get_submodule(owner)).__name__
            (plain if vector else decayed).append((name, parameter))
    return [
        {"params": [p for _, p in group], "names": [n for n, _ in group], "weight_decay": decay}
        for group, decay in ((decayed, weight_decay), (plain, 0.0))
        if group
    ]


def estimate(
    model: nn.Module,
    batches: Batches | Batch,
    steps: int,
    *,
    objective: Objective | None = None,
    accumulate: int = 1,
    precision: str = "fp32",
    device_name: str = "auto",
) -> dict[str, Any]:
    """What `steps` steps would take: two micro-batches are run, the second is timed (the first, where that took long).

    The model stays as it is. On the CPU a few rows are run, and time and activations are scaled by the rows. The optimizer's own time,
    reading, validation and checkpoints are not in it; nor are second passes of the objective where it is None (a mean of the output then
    stands in for the loss).

    Returns:
        `parameters`, `trainable`, `device`, `steps`, `seconds_per_step`, `seconds`, and `memory_bytes`: `weights`, `gradients`, `moments`,
        `activations` (what autograd keeps of one micro-batch), `total`.
    """
    where = device(device_name)
    batch = batches if isinstance(batches, Batch) else next(iter(batches(0)))
    rows = max(1, batch.values.shape[0] // accumulate)
    used = rows if where.type == "cuda" else min(rows, max(2, 8192 // batch.values.shape[1]))  # two: some objectives compare rows
    before = {name: value.clone() for name, value in model.named_buffers()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        stack.callback(model.to, next((p.device for p in model.parameters()), torch.device("cpu")))
        stack.callback(model.train, model.training)
        model.to(where).train()
        small = _each(batch, lambda x: x[:used].to(where))
        seconds, activations = 0.0, 0
        for _ in range(2):
            begun = time.perf_counter()
            generator = torch.Generator().manual_seed(0)
            autocast = torch.autocast(where.type, dtype=torch.bfloat16, enabled=precision == "bf16")
            with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = objective(model, small, generator=generator)["loss"] if objective else _stand_in(model(small))
            loss.backward()
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            seconds = time.perf_counter() - begun
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            activations = sum(size for at, size in kept.items() if at not in own)
            kept.clear()
            model.zero_grad(set_to_none=True)
            if seconds > 3:
                break
        for name, value in model.named_buffers():
            value.copy_(before[name])
    every, trainable = list(model.parameters()), [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trainable)
    memory = {
        "weights": sum(p.numel() * p.element_size() for p in every),
        "gradients": gradients,
        "moments": 2 * gradients,
        "activations": activations * rows // used,
    }
    per_step = seconds * rows / used * accumulate
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in trainable),
        "device": str(where),
        "steps": steps,
        "seconds_per_step": per_step,
        "seconds": per_step * steps,
        "memory_bytes": {**memory, "total": sum(memory.values())},
    }


def _stand_in(out: Any) -> Tensor:
    """A number that depends on the output of a model or a head."""
    tensor = out if isinstance(out, Tensor) else out.hidden[-1]
    return tensor.float().square().mean()


def _seed(*key: object) -> int:
    """63 bits that depend on every part of `key`."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, key)).encode()).digest()[:8], "little") >> 1


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return Batch(change(batch.values), *(None if x is None else change(x) for x in batch[1:]))


def _split(batch: Batch | None, parts: int) -> list[Batch]:
    """The rows of `batch` in `parts` runs of nearly equal length; empty ones are left out."""
    if batch is None:
        return []
    rows = batch.values.shape[0]
    bounds = [(a, b) for a, b in pairwise(rows * at // parts for at in range(parts + 1)) if b > a]
    return [_each(batch, lambda x, a=a, b=b: x[a:b]) for a, b in bounds]  # type: ignore[misc]


@contextmanager
def _deterministic(where: torch.device) -> Iterator[None]:
    """On the CPU, the deterministic forms of operations that otherwise add in the order of threads; elsewhere whatever is set."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    if where.type == "cpu":
        settings.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        settings.fill_uninitialized_memory = fill


# -- devices and processes -------------------------------------------------------------------------------------------------------------


def device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` takes CUDA, then MPS, then the CPU. Of several processes each takes the GPU of its local rank.

    Raises UserError (config, exit 2) when it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and world() == 1 else "cpu"
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, "expected auto, cpu, cuda or mps") from error
    if chosen.type == "cuda":
        at = int(os.environ.get("LOCAL_RANK", "0")) if world() > 1 else chosen.index or 0
        if at >= torch.cuda.device_count():
            raise _no_device(f"cuda:{at}", f"{torch.cuda.device_count()} CUDA devices are here")
        chosen = torch.device("cuda", at)
        torch.cuda.set_device(chosen)
    elif chosen.type == "mps" and not torch.backends.mps.is_available():
        raise _no_device(name, "no MPS device is here")
    elif chosen.type not in {"cpu", "mps"}:
        raise _no_device(name, "expected auto, cpu, cuda or mps")
    return chosen


def _no_device(name: str, wanted: str) -> UserError:
    return UserError(
        Reason.CONFIG, f"no device {name!r}", wanted=wanted, action="Use --device auto", field="--device", exit_code=Exit.USAGE
    )


def rank() -> int:
    """Number of this process; process 0 alone writes and prints."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def world() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def resuming() -> bool:
    """Whether torchrun has started this process again after a failure: then nothing may be started over."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join() -> None:
    """Join the other processes of torchrun, once; nothing for a single one. CPU tensors go by gloo, CUDA tensors by nccl."""
    if world() > 1 and not dist.is_initialized():
        import atexit

        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def barrier() -> None:
    """Wait until every process is here."""
    join()
    _sum([0.0])


def _sum(numbers: list[float]) -> list[float]:
    """Sums over all processes."""
    if world() == 1:
        return numbers
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together)
    return [float(number) for number in together.tolist()]


def _same_everywhere(model: nn.Module) -> None:
    """Give every process the weights and buffers of process 0."""
    if world() > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def _share_gradients(run: _Run, count: float) -> None:
    """Sum the gradients over all processes and divide by `count`. A parameter that no process used keeps None."""
    used = _parameters(run.optimizer)
    if world() > 1:
        present = torch.tensor([p.grad is not None for p in used], dtype=torch.float32)
        dist.all_reduce(present)
        used = [p for p, seen in zip(used, present.tolist(), strict=True) if seen]
        for kind in sorted({p.dtype for p in used}, key=str):
            alike = [p for p in used if p.dtype == kind]
            together = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in alike])
            dist.all_reduce(together)
            for p, piece in zip(alike, together.split([p.numel() for p in alike]), strict=True):
                p.grad = piece.view_as(p)
    for p in used:
        if p.grad is not None:
            p.grad.div_(count)


def _share_statistics(model: nn.Module) -> None:
    """Mean over the processes of the running statistics of batch norms, so that all hold the same model."""
    if world() > 1:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_var is not None:
                for buffer in (module.running_mean, module.running_var):
                    dist.all_reduce(buffer)
                    buffer.div_(world())


def _means(parts: Parts) -> dict[str, float | None]:
    """The mean of each part over all processes; the processes may have different parts."""
    told: list[Any] = [parts]
    if world() > 1:
        told = [None] * world()
        dist.all_gather_object(told, parts)
    names = dict.fromkeys(name for one in told for name in one)
    sums = {name: [sum(column) for column in zip(*(one[name] for one in told if name in one), strict=True)] for name in names}
    return {name: _number(weighted / count) for name, (count, weighted) in sums.items()}


def _of_all(own: Exception | None) -> Exception:
    """The exception to raise when some process has a fault: its own where that is a bug, else the first UserError of any."""
    told: list[Any] = [own]
    if world() > 1:
        told = [None] * world()
        dist.all_gather_object(told, own if isinstance(own, UserError) else None)
    if own is None or isinstance(own, UserError):
        other = UserError(Reason.INTERNAL, "another process failed", action="See its message", exit_code=Exit.BUG)
        return next((error for error in told if error is not None), other)
    return own


def launch(argv: list[str], devices: int, *, module: str = "bitimely_cli") -> int | None:
    """Run `python -m bitimely_cli ARGV` in `devices` processes under torchrun; 0, or the exit code of the process that failed first.

    None when this process is to go on itself: it is already one of those processes, or one device was asked for.
    """
    if devices <= 1 or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return None
    import logging
    import sys
    import uuid

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of torchrun's report of a failure: process 0 has said what happened
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


# -- batches on their way --------------------------------------------------------------------------------------------------------------


def _ahead(stream: Iterator[Batch], where: torch.device, depth: int = 2) -> Generator[Batch]:
    """The batches of `stream`; for a GPU a thread reads `depth` of them ahead into pinned memory."""
    if where.type != "cuda":
        yield from stream
        return
    waiting: queue.Queue[Batch | Exception | None] = queue.Queue(depth)
    ended = threading.Event()

    def put(item: Batch | Exception | None) -> None:
        while not ended.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            break

    def read() -> None:
        try:
            for batch in stream:
                put(_each(batch, lambda x: x.pin_memory()))
                if ended.is_set():
                    return
            put(None)
        except Exception as error:  # raised again where the batch is taken
            put(error)

    threading.Thread(target=read, daemon=True, name="batches").start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        ended.set()


# -- faults and signals ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """SIGTERM and SIGINT set a flag that the loop looks at; SIGINT while that is under way stops at once. Only for runs with a folder."""
    if run.home is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if run.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop = run.stop or number

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(run: _Run, number: int, when: str, what: str) -> UserError:
    return UserError(
        Reason.INTERRUPTED,
        f"stopped by {signal.Signals(number).name} {when}",
        wanted=what,
        file=str(run.home),
        action="Repeat the same command to continue",
        exit_code=Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED,
    )


def _divisible(model: nn.Module, objective: Objective) -> bool:
    """Whether a batch in parts has the gradient of the whole: no row is compared with others, nor read by their statistics."""
    own = getattr(getattr(objective, "config", None), "name", "")
    compared = bool(own) and registry.objectives[own].facts.rows > 1
    shared = (isinstance(part, nn.modules.batchnorm._BatchNorm) or getattr(part, "per_sample", True) is False for part in model.modules())
    return not (compared or any(shared))


def _out_of_memory(error: Exception, batches: Batches, config: TrainConfig, batch: int, *, alike: bool) -> UserError | None:
    """The UserError (resource_limit, exit 6) for an exception which says that memory is exhausted, else None.

    `alike`: a batch in parts has the gradient of the whole.
    """
    words = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    if not (said or isinstance(error, MemoryError)):
        return None
    return UserError(
        Reason.RESOURCE_LIMIT,
        f"out of memory at batch {batch}",
        wanted=f"expected room for {batches.size} rows in {config.accumulate} parts",
        action=f"Try --batch-size {max(batches.size // 2, 1)}, or --accumulate {2 * config.accumulate}"
        + (" for the same gradient" if alike else ""),
        exit_code=Exit.RESOURCES,
    )


def _non_finite(run: _Run, what: str, value: float) -> UserError:
    """The UserError (non_finite_loss) of the step after `run.step`, with the rows of its global batch."""
    epoch, start = divmod(run.step, run.batches.steps)
    batch = next(iter(run.batches(epoch, start=start)), None)
    rows = broken = ""
    if batch is not None:
        index = torch.arange(batch.values.shape[0]) if batch.index is None else batch.index.cpu()
        rows = f", batch rows {_some(index.tolist())}"
        if batch.values.is_floating_point():
            finite = torch.isfinite(batch.values)
            if batch.mask is not None:
                finite |= ~(batch.mask if batch.mask.ndim == finite.ndim else batch.mask[..., None])
            bad = index[~finite.flatten(1).all(1).cpu()].tolist()
            broken = f"; values are not finite in rows {_some(bad)}" if bad else ""
    kept = [] if run.home is None else checkpoints.steps(run.home / "checkpoints")
    return UserError(
        Reason.NON_FINITE_LOSS,
        f"non-finite {what} ({value:g}) at step {run.step + 1}{rows}{broken}",
        wanted="expected a finite number",
        action="Look at these rows, or lower --lr" + (f"; the checkpoint of step {kept[0]} is kept" if kept else ""),
        file=None if run.home is None else str(run.home),
    )


def _some(numbers: list[int], limit: int = 20) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return f"{shown} and {len(numbers) - limit} more" if len(numbers) > limit else shown


def _tell(finding: Finding, notice: Notice | None) -> None:
    if notice is not None:
        notice(finding)
    elif rank() == 0:
        import warnings

        warnings.warn(finding.line(), RuntimeWarning, stacklevel=3)


# -- the folder of a run ---------------------------------------------------------------------------------------------------------------


def latest(folder: str | Path) -> checkpoints.Checkpoint | None:
    """The newest checkpoint of a run that verifies, None without any. Raises UserError (integrity, exit 5) when none of them verifies."""
    return checkpoints.newest(Path(folder) / "checkpoints")[0]


def finished(folder: str | Path) -> bool:
    """Whether the run in `folder` has taken and validated its last step; then its weights are in `model/`."""
    found = latest(folder)
    return found is not None and bool(found.meta["finished"])


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; one that a kill has cut is left out."""
    path = Path(folder) / "metrics.jsonl"
    lines = []
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _trim(path: Path, step: int, validated: int) -> None:
    """Drop the lines after `step`, so that none is there twice."""
    if path.is_file():
        lines = [line for line in metrics(path.parent) if line["step"] <= (validated if line.get("split") == "validation" else step)]
        store.write_bytes(path, b"".join(store.canonical(line) + b"\n" for line in lines))


def _write(run: _Run, line: dict[str, Any]) -> None:
    if rank() == 0:
        if run.home is not None:
            store.append_line(run.home / "metrics.jsonl", line)
        if run.log is not None:
            run.log({**line, "of": run.total})


def _former(home: Path | None) -> tuple[checkpoints.Checkpoint | None, list[Finding]]:
    """The checkpoint to continue from: process 0 decides, tidies up and tells the others the step."""
    if home is None:
        return None, []
    folder = home / "checkpoints"
    if rank() == 0:
        former, findings = checkpoints.newest(folder)
        checkpoints.sweep(folder, former)
        for swept in (home, home / "model"):
            if swept.is_dir():
                store.sweep(swept)
        _sum([0.0 if former is None else former.step + 1.0])
        return former, findings
    (told,) = _sum([0.0])
    path = folder / f"step-{int(told) - 1}"
    return (checkpoints.Checkpoint(path, checkpoints.check(path)) if told else None), []


def _continue(run: _Run, former: checkpoints.Checkpoint) -> None:
    """Load weights, moments and step. Raises UserError (settings_differ, shapes_differ, integrity)."""
    checkpoints.refuse_other_run(former, run.identity, FREE)
    weights = checkpoints.tensors(former, "model")
    checkpoints.refuse_other_shapes(former, weights, _tensors(run.model))
    run.model.load_state_dict(weights)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoints.tensors(former, "optimizer").items():
        name, _, moment = key.rpartition("::")
        moments.setdefault(name, {})[moment] = value
    state = {at: moments[name] for at, name in enumerate(run.names) if name in moments}
    run.optimizer.load_state_dict({"state": state, "param_groups": run.optimizer.state_dict()["param_groups"]})
    run.step, run.validated, run.best, run.last = former.step, former.meta["validated"], former.meta["best"], former.meta["last"]


def _save(run: _Run) -> None:
    """A checkpoint of the step just done; of the last one also the weights for others. Process 0 alone writes."""
    if run.home is None:
        return
    parameters = dict(run.model.named_parameters())
    states = [run.optimizer.state.get(p, {}) for p in _parameters(run.optimizer)]
    moments = {f"{name}::{key}": value for name, state in zip(run.names, states, strict=False) for key, value in state.items()}
    if not (checkpoints.finite(parameters) and checkpoints.finite(moments)):
        raise UserError(
            Reason.NON_FINITE_LOSS,
            f"non-finite weights after step {run.step}",
            wanted="expected finite numbers",
            file=str(run.home),
            action="Lower --lr; the former checkpoint is kept",
        )
    if rank() == 0:
        done = run.step == run.total and not _unvalidated(run)
        if done:
            _export(run.model, run.home / "model")
        checkpoints.save(
            run.home / "checkpoints",
            run.step,
            {"model": _tensors(run.model), "optimizer": moments},
            {
                "epoch": run.step // max(run.batches.steps, 1),
                "total": run.total,
                "finished": done,
                "validated": run.validated,
                "best": run.best,
                "last": run.last,
                "seed": run.config.seed,
                "processes": world(),
                "identity": run.identity,
                "bitimely": __version__,
                "torch": str(torch.__version__),
            },
            keep=run.config.keep,
        )
    _sum([0.0])  # the others wait: a stop must not end them while process 0 writes


def _export(model: nn.Module, folder: Path) -> None:
    save = getattr(model, "save", None)
    if callable(save):
        save(folder)
    else:
        checkpoints.write_tensors(store.make_folder(folder) / "model.safetensors", _tensors(model))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _decisive(config: TrainConfig, batches: Batches, total: int) -> dict[str, Any]:
    """What of the loop's own settings a continued run must agree with."""
    own = config.model_dump(mode="json", exclude={*FREE, "epochs", "steps", "batch_size"})
    return {**own, "total_steps": total, "epoch_steps": batches.steps, "batch_rows": batches.size}


def _epoch(run: _Run) -> int:
    """The epoch, from 1, of the step just done."""
    return (run.step - 1) // run.batches.steps + 1


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
