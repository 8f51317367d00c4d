"""`fit`: the one loop, for pre-training and fine-tuning, on one device or several, that continues exactly where it was stopped.

An objective is `f(model, batch, generator=None) -> {"loss", "rel", "parts", ...}`; `fit` back-propagates `loss` and logs the scalars. Where `loss` is a mean over
something else than rows, the objective may say over how many by `count`: micro-batches and processes are weighted by it, so that their sum is
the gradient of the whole global batch.

Order of the data, learning rate, dropout and masks of step s are functions of (seed, s): a checkpoint needs weights, optimizer moments and s.
Numbers that are drawn (dropout, masks) also depend on micro-batch and process; without any, accumulation and the number of processes change rounding alone.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core import __version__, checkpoints, store
from bitimely_core.batch import Batch, Batches
from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.settings import TrainConfig, merged, validated

Objective = Callable[..., dict[str, Any]]
Log = Callable[[dict[str, Any]], None]
Notice = Callable[[Finding], None]

FREE = frozenset({"device", "devices", "compile", "log_every", "checkpoint_every", "keep"})  # of [train]: may change between a stop and its continuation


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
    best: dict[str, Any] | None = None  # validation loss, its step and epoch
    stop: int = 0  # the signal that asked to stop
    since: float = 0.0  # clock, timesteps and waiting since the last logged line
    fed: int = 0
    waited: float = 0.0
    lines: int = 0


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

    AdamW (no decay on vectors, biases, norms), linear warm-up and cosine to 0 over all steps, clipping of the global norm. The same call again continues after a kill
    and gives the weights of the undisturbed run bit for bit (one device kind, one number of processes and threads); when finished, it only loads them.
    The model comes back on the device and in the mode in which it was given.

    Args:
        model: Weights as they are; its `target_scale` is measured before the first step where it is NaN.
        batches: Global batches a call, as `data.batches` returns them.
        objective: `f(model, batch, generator=None)` as above.
        epochs: In the place of `config.epochs`; likewise `steps`, `lr`, `seed`.
        steps: Optimizer steps in all, whatever the epochs.
        lr: Highest learning rate.
        seed: Of dropout and masks.
        config: Defaults of `TrainConfig` where None.
        validation: Evaluated at the end of every epoch and of the training.
        folder: Gets `metrics.jsonl`, `checkpoints/` and, at the end, `model/`. Locked meanwhile. None: nothing is written, Ctrl-C is the caller's.
        identity: JSON that a continued run must agree with (manifest hash of the data, hash of the tokenizer, resolved settings).
        log: Called with every line of the log, and `of`, the number of all steps.
        notice: Called with every warning; where None, `warnings.warn`.

    Returns:
        `steps`, `epochs`, `finished`, `resumed` (step or None), `loss`, `rel`, `validation`, `best`, `device`, `findings`.

    Raises:
        UserError: config, settings_differ (exit 2), shapes_differ, no_input, non_finite_loss (4), integrity (5), resource_limit, disk_full (6), locked (7),
            interrupted (130, 143).
    """
    asked = {"epochs": epochs, "steps": steps, "lr": lr, "seed": seed}
    if epochs is not None and steps is None:
        asked["steps"] = None  # an explicit number of epochs wins over the configured number of steps
        base = (config or TrainConfig()).model_copy(update={"steps": None})
    else:
        base = config or TrainConfig()
    settings = validated(TrainConfig, merged(base.model_dump(), {key: value for key, value in asked.items() if value is not None}))
    total = settings.epochs * batches.steps if settings.steps is None else settings.steps
    if total and not batches.steps:
        raise UserError(Reason.NO_INPUT, "no training batch", wanted="expected at least one", action="See the split: it may leave no training subject")
    join()
    where = device(settings.device)
    home = None if folder is None else Path(folder)
    was_training, was_on = model.training, next((p.device for p in model.parameters()), torch.device("cpu"))
    with ExitStack() as stack:
        if home is not None and rank() == 0:
            store.make_folder(home)
            stack.enter_context(store.lock(home))
        former, findings = _former(home)
        for finding in findings:
            _tell(finding, notice)
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        stack.enter_context(_deterministic(where))
        if former is None and total:
            _measure_scale(model, batches)
        stack.callback(model.to, was_on)
        stack.callback(model.train, was_training)
        model.to(where)
        _same_everywhere(model)
        groups = parameter_groups(model, settings.weight_decay)
        optimizer = torch.optim.AdamW([{k: v for k, v in g.items() if k != "names"} for g in groups], lr=settings.lr, fused=where.type == "cuda")
        run = _Run(
            model=model, objective=objective, batches=batches, validation=validation, config=settings, total=total, device=where, optimizer=optimizer,
            names=[name for group in groups for name in group["names"]], home=home, log=log,
            identity={**(identity or {}), "train": _loop_identity(settings, batches, total)},
        )  # fmt: skip
        if former is not None:
            _continue(run, former)
        if home is not None and rank() == 0 and (former is None or former.step < total):
            _trim(home / "metrics.jsonl", run.step, run.validated)
        if former is None or former.step < total:
            stack.enter_context(_signals(run))
            if settings.compile:
                model.compile()
                stack.callback(setattr, model, "_compiled_call_impl", None)
            model.train()
            try:
                _loop(run)
            except KeyboardInterrupt as error:
                if home is None:
                    raise
                raise _interrupted(run, signal.SIGINT, saved=False) from error
        return {
            "steps": run.step, "epochs": run.step / batches.steps if batches.steps else 0.0, "finished": True, "resumed": former.step if former else None,
            **{"loss": None, "rel": None}, **run.last, "best": run.best, "device": str(where), "findings": findings,
        }  # fmt: skip


def _loop(run: _Run) -> None:
    """Steps, validations and checkpoints until the last step."""
    run.since = time.perf_counter()
    _close_epoch(run)  # it was stopped between the last step of an epoch and the validation
    while run.step < run.total:
        epoch, start = divmod(run.step, run.batches.steps)
        count = min(run.batches.steps - start, run.total - run.step)
        with closing(_ahead(run.batches(epoch, start=start, rank=rank(), world=world()), run.device)) as stream:
            for _ in range(count):
                begun = time.perf_counter()
                fault: Exception | None = None
                try:
                    batch = next(stream, None)
                except Exception as error:
                    batch, fault = None, error
                run.waited += time.perf_counter() - begun
                line, stop = _step(run, batch, fault)
                if line is not None:
                    _write(run, line)
                if run.step % run.batches.steps == 0 or run.step == run.total:
                    stop = _close_epoch(run) or stop
                if _due(run) or stop:
                    _save(run)
                if stop and run.step < run.total:
                    raise _interrupted(run, stop, saved=True)
    if run.total == 0:
        _save(run)
    if run.stop and run.home is not None:
        raise _interrupted(run, run.stop, saved=True)


def _step(run: _Run, batch: Batch | None, fault: Exception | None) -> tuple[dict[str, Any] | None, int]:
    """One optimizer step. Returns the line to log, if any, and the signal that asked some process to stop, or 0."""
    number = run.step + 1
    rate = run.config.lr * schedule(run.step, run.total, run.config.warmup)
    run.optimizer.zero_grad(set_to_none=True)
    sums, parts = torch.zeros(3, dtype=torch.float64), {}
    try:
        if fault is not None:
            raise fault
        sums, parts = _gradients(run, batch, number)
    except Exception as error:  # told to the other processes first, else they would wait for this one for ever
        fault = _out_of_memory(error, run, number) or error
    totals = _sum([*sums.tolist(), float(fault is not None), float(run.stop == signal.SIGINT), float(run.stop == signal.SIGTERM)])
    count, loss, rel, faults, interrupts, terminations = totals
    if faults:
        _raise_everywhere(fault)
    if not (count > 0 and math.isfinite(loss)):
        raise _non_finite(run, "loss", loss / count if count else math.nan)
    _share_gradients(run, count)
    norm = float(nn.utils.clip_grad_norm_([p for g in run.optimizer.param_groups for p in g["params"]], run.config.clip))
    if not math.isfinite(norm):
        raise _non_finite(run, "gradient norm", norm)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    _share_statistics(run.model)
    run.step = number
    run.last = {"loss": loss / count, "rel": _number(rel / count)}
    run.fed += 0 if batch is None else batch.values.shape[0] * batch.values.shape[1]
    run.lines += 1
    stop = signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0
    at_end = run.step % run.batches.steps == 0 or run.step == run.total
    if not (run.step == 1 or run.step % run.config.log_every == 0 or at_end):
        return None, int(stop)
    now = time.perf_counter()
    fed, waited = _sum([run.fed, run.waited])
    line = {
        "step": run.step, "epoch": _epoch(run), "split": "train", **run.last, **_mean_parts(parts), "lr": rate, "grad_norm": norm,
        "tokens_per_second": fed / max(now - run.since, 1e-9), "data_wait": waited / world() / run.lines,
    }  # fmt: skip
    run.since, run.fed, run.waited, run.lines = now, 0, 0.0, 0
    return line, int(stop)


def _gradients(run: _Run, batch: Batch | None, number: int) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Add the gradient of count x loss of this process's rows; returns [count, count x loss, count x rel] and (count, count x value) a part."""
    sums = torch.zeros(3, dtype=torch.float64)
    parts: dict[str, tuple[float, float]] = {}
    for at, micro in enumerate(_split(batch, run.config.accumulate)):
        out, count = _evaluate(run, micro, "train", number, at)
        (out["loss"] * count).backward()
        _add(sums, parts, out, count)
    return sums, parts


def _evaluate(run: _Run, micro: Batch, *key: object) -> tuple[dict[str, Any], float]:
    """The objective on one micro-batch, its random numbers fixed by `key`, and over how many things its loss is a mean."""
    torch.manual_seed(_seed(run.config.seed, "model", *key, rank()))
    generator = torch.Generator().manual_seed(_seed(run.config.seed, "objective", *key, rank()))
    with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=run.config.precision == "bf16"):
        out = run.objective(run.model, _moved(micro, run.device), generator=generator)
    return out, float(out.get("count", micro.values.shape[0]))


def _add(sums: Tensor, parts: dict[str, tuple[float, float]], out: dict[str, Any], count: float) -> None:
    values = {"loss": out["loss"], "rel": out.get("rel", math.nan), **out.get("parts", {})}
    names = list(values)
    numbers = torch.stack([torch.as_tensor(values[name]).detach().float().to(out["loss"].device) for name in names]).cpu().double()  # one transfer
    sums += torch.cat([torch.ones(1, dtype=torch.float64), numbers[:2]]) * count
    for name, value in zip(names[2:], numbers[2:].tolist(), strict=True):
        seen, weighted = parts.get(name, (0.0, 0.0))
        parts[name] = (seen + count, weighted + count * value)


def _share_gradients(run: _Run, count: float) -> None:
    """Sum the gradients of all processes and divide by `count`. A parameter that no process used keeps None."""
    used = [p for g in run.optimizer.param_groups for p in g["params"]]
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
    """Mean over the processes of the running statistics of batch norms, so that every process holds the same model."""
    if world() == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_var is not None:
            for buffer in (module.running_mean, module.running_var):
                dist.all_reduce(buffer)
                buffer.div_(world())


def _close_epoch(run: _Run) -> int:
    """Validate where an epoch or the training has just ended and it was not done. Returns the signal that asked to stop, or 0."""
    ended = run.step > 0 and (run.step % run.batches.steps == 0 or run.step == run.total)
    if run.validation is None or not run.validation.steps or not ended or run.validated >= run.step:
        return 0
    sums = torch.zeros(3, dtype=torch.float64)
    parts: dict[str, tuple[float, float]] = {}
    run.model.eval()
    try:
        with torch.no_grad(), closing(_ahead(run.validation(0, rank=rank(), world=world()), run.device)) as stream:
            for at in range(run.validation.steps):
                batch, fault = None, None
                try:
                    batch = next(stream, None)
                    for micro in _split(batch, 1):
                        out, count = _evaluate(run, micro, "validation", at)
                        _add(sums, parts, out, count)
                except Exception as error:
                    fault = _out_of_memory(error, run, run.step) or error
                faults, interrupts, terminations = _sum(
                    [float(fault is not None), float(run.stop == signal.SIGINT), float(run.stop == signal.SIGTERM)]
                )
                if faults:
                    _raise_everywhere(fault)
                if interrupts or terminations:
                    return int(signal.SIGINT if interrupts else signal.SIGTERM)  # it is done when the run is continued
    finally:
        run.model.train()
    count, loss, rel = _sum(sums.tolist())
    line = {"step": run.step, "epoch": _epoch(run), "split": "validation", "loss": _number(loss / max(count, 1e-9)), "rel": _number(rel / max(count, 1e-9))}
    run.validated = run.step
    if line["loss"] is not None and (run.best is None or line["loss"] < run.best["loss"]):
        run.best = {key: line[key] for key in ("loss", "rel", "step", "epoch")}
    _write(run, {**line, **_mean_parts(parts)})
    run.since = time.perf_counter()
    return 0


# -- what the numbers depend on ----------------------------------------------------------------------------------------------------------------


def schedule(step: int, total: int, warmup: float) -> float:
    """Share of the highest learning rate at the step after `step` done ones: linear over the first `warmup` share of `total`, then a cosine to 0 at `total`."""
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters as two groups (`params`, `names`, `weight_decay`): matrices decay; vectors, biases and whatever a norm owns do not."""
    decayed: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, own = name.rpartition(".")
            plain = parameter.ndim < 2 or own.startswith("bias") or "Norm" in type(model.get_submodule(owner)).__name__
            (kept if plain else decayed).append((name, parameter))
    return [
        {"params": [p for _, p in group], "names": [n for n, _ in group], "weight_decay": decay}
        for group, decay in ((decayed, weight_decay), (kept, 0.0))
        if group
    ]


def _seed(*key: object) -> int:
    """63 bits that depend on every part of `key`."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, key)).encode()).digest()[:8], "little") >> 1


def _split(batch: Batch | None, parts: int) -> list[Batch]:
    """The rows of `batch` in `parts` runs of nearly equal length; empty ones are left out."""
    rows = 0 if batch is None else batch.values.shape[0]
    bounds = [rows * at // parts for at in range(parts + 1)]
    cuts = [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    return [] if batch is None else [Batch(*(None if x is None else x[a:b] for x in batch)) for a, b in cuts]


@contextmanager
def _deterministic(where: torch.device) -> Iterator[None]:
    """On the CPU, the deterministic forms of operations that add in the order of threads; elsewhere what is set."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    if where.type == "cpu":
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _measure_scale(model: nn.Module, batches: Batches) -> None:
    """Measure Var(target) of the training split (codes: the entropy) once, for models that ask for it."""
    scale = getattr(model, "target_scale", None)
    if isinstance(scale, Tensor) and bool(torch.isnan(scale).any()):
        from bitimely_core import objectives

        objectives.measure_scale(model, batches)


# -- devices and processes ---------------------------------------------------------------------------------------------------------------------


def device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` takes CUDA, then MPS, then the CPU. Under several processes each takes the GPU of its local rank.

    Raises UserError (config, exit 2) when it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and world() == 1 else "cpu"
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, "expected auto, cpu, cuda or mps") from error
    if chosen.type == "cuda":
        here = chosen.index if world() == 1 else int(os.environ.get("LOCAL_RANK", "0"))
        found = torch.cuda.device_count()
        if (here or 0) >= found:
            raise _no_device(f"cuda:{here or 0}", f"{found} CUDA devices are here")
        chosen = torch.device("cuda", torch.cuda.current_device() if here is None else here)
        torch.cuda.set_device(chosen)
    elif chosen.type == "mps" and not torch.backends.mps.is_available():
        raise _no_device(name, "no MPS device is here")
    elif chosen.type not in {"cpu", "mps"}:
        raise _no_device(name, "expected auto, cpu, cuda or mps")
    return chosen


def _no_device(name: str, wanted: str) -> UserError:
    return UserError(Reason.CONFIG, f"no device {name!r}", wanted=wanted, action="Use --device auto", field="--device", exit_code=Exit.USAGE)


def rank() -> int:
    """Number of this process; 0 writes and prints."""
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
    """Sums over all processes, float64."""
    if world() == 1:
        return [float(n) for n in numbers]
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together)
    return [float(n) for n in together.tolist()]


def _same_everywhere(model: nn.Module) -> None:
    """Give every process the weights and buffers of process 0."""
    if world() > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def _raise_everywhere(own: Exception | None) -> None:
    """Raise the first process's UserError in all of them; another exception only where it happened."""
    if world() > 1:
        told: list[Any] = [None] * world()
        dist.all_gather_object(told, own if isinstance(own, UserError) else None)
        first = next((error for error in told if error is not None), None)
        own = own if own is not None and not isinstance(own, UserError) else first
    raise own if own is not None else UserError(Reason.INTERNAL, "another process failed", action="See its message", exit_code=Exit.BUG)


def launch(argv: list[str], devices: int, *, module: str = "bitimely_cli") -> int | None:
    """Run `python -m bitimely_cli ARGV` in `devices` processes under torchrun; the exit code of the first that failed, else 0.

    None when this process is to go on itself: it is one of those processes, or one device was asked for.
    """
    if devices <= 1 or "RANK" in os.environ or world() > 1:
        return None
    import logging
    import sys
    import uuid

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # torchrun's own report of a failure; ours is on the screen already
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=devices, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )  # fmt: skip
    try:
        elastic_launch(settings, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


# -- data on its way ---------------------------------------------------------------------------------------------------------------------------


def _moved(batch: Batch, where: torch.device) -> Batch:
    return Batch(*(None if x is None else x.to(where, non_blocking=True) for x in batch))


def _ahead(stream: Iterator[Batch], where: torch.device, depth: int = 2) -> Iterator[Batch]:
    """The batches of `stream`; for a GPU read `depth` ahead by a thread, in pinned memory."""
    if where.type != "cuda":
        yield from stream
        return
    waiting: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    ended = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not ended.is_set():
            try:
                return waiting.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in stream:
                put(Batch(*(None if x is None else x.pin_memory() for x in batch)))
                if ended.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again where the batch is taken
            put(error)

    threading.Thread(target=read, daemon=True, name="batches").start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        ended.set()


# -- faults and signals ------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """SIGTERM and SIGINT set a flag that the loop looks at; SIGINT while a stop is under way stops at once. Only for runs with a folder."""
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


def _interrupted(run: _Run, number: int, *, saved: bool) -> UserError:
    name = signal.Signals(number).name
    return UserError(
        Reason.INTERRUPTED, f"stopped by {name} after step {run.step} of {run.total}",
        wanted=f"step {run.step} is saved" if saved else "the last checkpoint is whole", file=str(run.home),
        action="Repeat the same command to continue", exit_code=Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED,
    )  # fmt: skip


def _out_of_memory(error: Exception, run: _Run, number: int) -> UserError | None:
    """The UserError (resource_limit, exit 6) for an exception that means that memory is exhausted, else None."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not (isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)):
        return None
    smaller = max(run.batches.size // 2, 1)
    return UserError(
        Reason.RESOURCE_LIMIT, f"out of memory at batch {number}", wanted=f"expected room for {run.batches.size} rows in {run.config.accumulate} parts",
        action=f"Try --batch-size {smaller}, or the same gradient by --accumulate {2 * run.config.accumulate}", exit_code=Exit.RESOURCES,
    )  # fmt: skip


def _non_finite(run: _Run, what: str, value: float) -> UserError:
    """The UserError (non_finite_loss) for the step after `run.step`, with the rows of its global batch."""
    epoch, start = divmod(run.step, run.batches.steps)
    batch = next(iter(run.batches(epoch, start=start)), None)
    rows, bad = "unknown", ""
    if batch is not None:
        index = torch.arange(batch.values.shape[0]) if batch.index is None else batch.index.cpu()
        rows = _some(index.tolist())
        if batch.values.is_floating_point():
            finite = torch.isfinite(batch.values)
            if batch.mask is not None:
                finite |= ~(batch.mask if batch.mask.ndim == finite.ndim else batch.mask[..., None])
            broken = ~finite.flatten(1).all(1).cpu()
            bad = f"; values are not finite in rows {_some(index[broken].tolist())}" if bool(broken.any()) else ""
    kept = checkpoints.steps(run.home / "checkpoints") if run.home is not None else []
    return UserError(
        Reason.NON_FINITE_LOSS, f"non-finite {what} ({value:g}) at step {run.step + 1}, batch rows {rows}{bad}", wanted="expected a finite number",
        action=f"Lower --lr or look at these rows{f'; the checkpoint of step {kept[0]} is kept' if kept else ''}",
        file=None if run.home is None else str(run.home),
    )  # fmt: skip


def _some(numbers: list[int], limit: int = 20) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return f"{shown} and {len(numbers) - limit} more" if len(numbers) > limit else shown


def _tell(finding: Finding, notice: Notice | None) -> None:
    if notice is not None:
        notice(finding)
        return
    import warnings

    warnings.warn(finding.line(), RuntimeWarning, stacklevel=3)


# -- folder of a run ---------------------------------------------------------------------------------------------------------------------------


def latest(folder: str | Path) -> checkpoints.Checkpoint | None:
    """The newest checkpoint of a run that verifies, or None. Writes nothing. Raises UserError (integrity, exit 5) when there are some and none verifies."""
    return checkpoints.newest(Path(folder) / "checkpoints")[0]


def finished(folder: str | Path) -> bool:
    """Whether the run in `folder` has taken its last step and its weights are in `model/`."""
    found = latest(folder)
    return found is not None and found.step >= found.meta["total"]


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; a last line that was cut by a kill is left out."""
    path = Path(folder) / "metrics.jsonl"
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _former(home: Path | None) -> tuple[checkpoints.Checkpoint | None, list[Finding]]:
    """The checkpoint to continue from: process 0 decides, sweeps and tells the others the step."""
    if home is None:
        return None, []
    folder = home / "checkpoints"
    if rank() == 0:
        former, findings = checkpoints.newest(folder)
        checkpoints.sweep(folder, former)
        store.sweep(home)
        _sum([0.0 if former is None else former.step + 1.0])
        return former, findings
    (told,) = _sum([0.0])
    if not told:
        return None, []
    path = folder / f"step-{int(told) - 1}"
    return checkpoints.Checkpoint(path, checkpoints.check(path)), []


def _continue(run: _Run, former: checkpoints.Checkpoint) -> None:
    """Load weights, moments and step. Raises UserError (settings_differ, shapes_differ, integrity)."""
    checkpoints.refuse_other_run(former, run.identity, FREE)
    weights = checkpoints.tensors(former, "model")
    checkpoints.refuse_other_shapes(former, weights, _tensors(run.model))
    run.model.load_state_dict(weights)
    moments = checkpoints.tensors(former, "optimizer")
    state: dict[int, dict[str, Tensor]] = {}
    for at, name in enumerate(run.names):
        own = {key.rpartition("::")[2]: value for key, value in moments.items() if key.rpartition("::")[0] == name}
        if own:
            state[at] = own
    run.optimizer.load_state_dict({"state": state, "param_groups": run.optimizer.state_dict()["param_groups"]})
    run.step, run.validated, run.best, run.last = former.step, former.meta["validated"], former.meta["best"], former.meta["last"]


def _due(run: _Run) -> bool:
    every = run.config.checkpoint_every or run.batches.steps
    return run.step % every == 0 or run.step == run.total


def _save(run: _Run) -> None:
    """A checkpoint of the step just done; before the last one the weights for others. Process 0 alone writes."""
    if run.home is None:
        return
    if rank() == 0:
        parameters = dict(run.model.named_parameters())
        moments = {
            f"{name}::{key}": value
            for name, state in zip(run.names, _states(run.optimizer), strict=True)
            for key, value in state.items()
        }  # fmt: skip
        if not (checkpoints.finite(parameters) and checkpoints.finite(moments)):
            raise _non_finite_weights(run)
        if run.step == run.total:
            _export(run.model, run.home / "model")
        checkpoints.save(
            run.home / "checkpoints", run.step, {"model": _tensors(run.model), "optimizer": moments},
            {
                "epoch": run.step // run.batches.steps if run.batches.steps else 0, "total": run.total, "seed": run.config.seed, "processes": world(),
                "validated": run.validated, "best": run.best, "last": run.last, "identity": run.identity, "bitimely": __version__,
                "torch": str(torch.__version__),
            },
            keep=run.config.keep,
        )  # fmt: skip
    _sum([0.0])  # the others wait: a stop must not end them while process 0 writes


def _export(model: nn.Module, folder: Path) -> None:
    save = getattr(model, "save", None)
    if callable(save):
        save(folder)
        return
    from safetensors.torch import save as to_bytes

    store.make_folder(folder)
    store.write_bytes(folder / "model.safetensors", to_bytes(checkpoints.unshared(_tensors(model))))


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _non_finite_weights(run: _Run) -> UserError:
    return UserError(
        Reason.NON_FINITE_LOSS, f"weights or moments are not finite after step {run.step}", wanted="expected finite numbers",
        action="Lower --lr; the former checkpoint is kept", file=str(run.home),
    )  # fmt: skip


def _loop_identity(config: TrainConfig, batches: Batches, total: int) -> dict[str, Any]:
    own = config.model_dump(mode="json", exclude={*FREE, "epochs", "steps", "batch_size"})
    return {**own, "total_steps": total, "epoch_steps": batches.steps, "batch_rows": batches.size}


def _trim(path: Path, step: int, validated: int) -> None:
    """Drop the lines after `step`, so that no step is logged twice."""
    if path.is_file():
        lines = [line for line in metrics(path.parent) if line["step"] <= (validated if line.get("split") == "validation" else step)]
        store.write_bytes(path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def _write(run: _Run, line: dict[str, Any]) -> None:
    if rank() != 0:
        return
    if run.home is not None:
        store.append_line(run.home / "metrics.jsonl", line)
    if run.log is not None:
        run.log({**line, "of": run.total})


def _epoch(run: _Run) -> int:
    """The epoch, from 1, of the step just done."""
    return (run.step - 1) // run.batches.steps + 1


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean_parts(parts: dict[str, tuple[float, float]]) -> dict[str, float | None]:
    """The mean of each part over all processes."""
    if world() > 1:
        told: list[Any] = [None] * world()
        dist.all_gather_object(told, parts)
        parts = {name: tuple(map(sum, zip(*(p[name] for p in told if name in p), strict=True))) for p in told for name in p}  # type: ignore[misc]
    return {name: _number(weighted / count) for name, (count, weighted) in parts.items()}
