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
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core import __version__, objectives, storage
from bitimely_core.config import TrainConfig, merge_layers, validate
from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.training import checkpoints
from bitimely_core.training.devices import deterministic_kernels, select_device
from bitimely_core.training.distributed import (
    all_reduce_gradients,
    all_reduce_statistics,
    all_reduce_sum,
    broadcast_parameters,
    join_group,
    list_parameters,
    rank,
    world,
)
from bitimely_core.training.faults import (
    handle_signals,
    interrupted_error,
    is_divisible,
    non_finite_error,
    out_of_memory_error,
    sync_step,
    warn,
)
from bitimely_core.types import Batch, Batches

Objective = Callable[..., dict[str, Any]]
Log = Callable[[dict[str, Any]], None]
Notice = Callable[[Finding], None]
Parts = dict[str, tuple[float, float]]  # name -> (count, count x value)

# of [train]: may change between a stop and its continuation
RESUME_EXEMPT = frozenset({"device", "devices", "compile", "log_every", "checkpoint_every", "keep"})


@dataclass(kw_only=True)
class TrainingState:
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
    settings = validate(TrainConfig, {**(config.model_dump() if config else {}), **whole, **asked})
    total = settings.epochs * batches.steps if settings.steps is None else settings.steps
    if not batches.steps and (settings.epochs if settings.steps is None else settings.steps):
        raise input_error(
            Reason.NO_INPUT, "no training batch", "expected at least one", "Look at the split: it may leave no subject for training"
        )
    join_group()
    where = select_device(settings.device)
    home = None if folder is None else Path(folder)
    with ExitStack() as stack:
        if home is not None and rank() == 0:
            stack.enter_context(storage.lock(home))
        former, findings = _find_checkpoint(home)
        for finding in findings:
            warn(finding, notice)
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        stack.enter_context(deterministic_kernels(where))
        scale = getattr(model, "target_scale", None)
        if former is None and total and isinstance(scale, Tensor) and bool(torch.isnan(scale).any()):
            try:
                objectives.measure_scale(model, batches)
            except Exception as error:
                fault = out_of_memory_error(error, batches, settings, 1, alike=is_divisible(model, objective))
                if fault is None:
                    raise
                raise fault from None
        stack.callback(model.to, next((p.device for p in model.parameters()), torch.device("cpu")))
        stack.callback(model.train, model.training)
        model.to(where)
        broadcast_parameters(model)
        groups = parameter_groups(model, settings.weight_decay)
        names = [name for group in groups for name in group.pop("names")]
        optimizer = torch.optim.AdamW(groups or [{"params": [nn.Parameter(torch.zeros(0))]}], lr=settings.lr, fused=where.type == "cuda")
        run = TrainingState(
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
            identity=merge_layers(identity or {}, {"train": resume_fingerprint(settings, batches, total)}),
        )
        if former is not None:
            _continue(run, former)
        if former is None or not former.meta["finished"]:
            if home is not None and rank() == 0:
                _trim(home / "metrics.jsonl", run.step, run.validated)
            stack.enter_context(handle_signals(run))
            if settings.compile:
                model.compile()
                stack.callback(setattr, model, "_compiled_call_impl", None)
            try:
                _loop(run)
            except KeyboardInterrupt as error:
                if home is None:
                    raise
                raise interrupted_error(run, signal.SIGINT, f"at once after step {run.step}", "the last checkpoint is whole") from error
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


def _loop(run: TrainingState) -> None:
    """Steps, validations and checkpoints, to the last step or until a signal asks to stop."""
    run.since = time.perf_counter()
    run.model.train()
    every = run.config.checkpoint_every or run.batches.steps
    stop = _validate(run)  # where a run was stopped between the last step of an epoch and its validation
    while run.step < run.total and not stop:
        epoch, start = divmod(run.step, run.batches.steps)
        left = min(run.batches.steps - start, run.total - run.step)
        with closing(_prefetch(run.batches(epoch, start=start, rank=rank(), world=world()), run.device)) as stream:
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
        raise interrupted_error(run, stop or run.stop, f"after step {run.step} of {run.total}", "it is saved")


def _step(run: TrainingState, stream: Iterator[Batch]) -> tuple[dict[str, Any] | None, int]:
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
    (count, loss, rel), stop = sync_step(run, sums, fault, run.step + 1)
    if not count:
        raise input_error(Reason.NO_INPUT, f"no valid value in the batch of step {run.step + 1}", "expected at least one")
    if not math.isfinite(loss):
        raise non_finite_error(run, "loss", loss / count)
    all_reduce_gradients(run, count)
    norm = float(nn.utils.clip_grad_norm_(list_parameters(run.optimizer), run.config.clip))
    if not math.isfinite(norm):
        raise non_finite_error(run, "gradient norm", norm)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    all_reduce_statistics(run.model)
    run.step += 1
    run.unlogged += 1
    run.last = {"loss": loss / count, "rel": _number(rel / count)}
    if not (run.step == 1 or run.step % run.config.log_every == 0 or run.step % run.batches.steps == 0 or run.step == run.total):
        return None, stop
    fed, waited = all_reduce_sum([run.fed, run.waited])
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


def _validate(run: TrainingState) -> int:
    """Validation where an epoch or the training has ended and it was not done yet. Returns the signal that asked to stop, or 0."""
    if run.validation is None or not _unvalidated(run):
        return 0
    sums, parts = [0.0, 0.0, 0.0], Parts()
    run.model.eval()
    try:
        with torch.no_grad(), closing(_prefetch(run.validation(0, rank=rank(), world=world()), run.device)) as stream:
            for at in range(run.validation.steps):
                fault: Exception | None = None
                try:
                    for micro in _split(next(stream, None), 1):
                        out, count = _evaluate(run, micro, _generator(run, "validation", at), "validation", at)
                        _add(sums, parts, out, count)
                except Exception as error:
                    fault = error
                _, stop = sync_step(run, [], fault, run.step)
                if stop:
                    return stop  # the next call does it from its beginning
    finally:
        run.model.train()
    count, loss, rel = all_reduce_sum(sums)
    mean = {"loss": _number(loss / max(count, 1.0)), "rel": _number(rel / max(count, 1.0))}
    line = {"step": run.step, "epoch": _epoch(run), "split": "validation", **mean}
    run.validated = run.step
    if mean["loss"] is not None and (run.best is None or mean["loss"] < run.best["loss"]):
        run.best = {key: value for key, value in line.items() if key != "split"}
    _write(run, {**line, **_means(parts)})
    run.since = time.perf_counter()
    return 0


def _unvalidated(run: TrainingState) -> bool:
    ended = run.step > 0 and (run.step % run.batches.steps == 0 or run.step == run.total)
    return run.validation is not None and run.validation.steps > 0 and ended and run.validated < run.step


def _generator(run: TrainingState, *key: object) -> torch.Generator:
    """The objective's random numbers (CPU): one stream a step, so that what is drawn row by row does not depend on the micro-batches."""
    return torch.Generator().manual_seed(_seed(run.config.seed, "objective", *key, rank()))


def _evaluate(run: TrainingState, micro: Batch, generator: torch.Generator, *key: object) -> tuple[dict[str, Any], Tensor | float]:
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


# -- devices and processes -------------------------------------------------------------------------------------------------------------


def _means(parts: Parts) -> dict[str, float | None]:
    """The mean of each part over all processes; the processes may have different parts."""
    told: list[Any] = [parts]
    if world() > 1:
        told = [None] * world()
        dist.all_gather_object(told, parts)
    names = dict.fromkeys(name for one in told for name in one)
    sums = {name: [sum(column) for column in zip(*(one[name] for one in told if name in one), strict=True)] for name in names}
    return {name: _number(weighted / count) for name, (count, weighted) in sums.items()}


# -- batches on their way --------------------------------------------------------------------------------------------------------------


def _prefetch(stream: Iterator[Batch], where: torch.device, depth: int = 2) -> Generator[Batch]:
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


# -- the folder of a run ---------------------------------------------------------------------------------------------------------------


def latest(folder: str | Path) -> checkpoints.Checkpoint | None:
    """The newest checkpoint of a run that verifies, None without any. Raises UserError (integrity, exit 5) when none of them verifies."""
    return checkpoints.newest_checkpoint(Path(folder) / "checkpoints")[0]


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
        storage.write_bytes(path, b"".join(storage.encode_json(line) + b"\n" for line in lines))


def _write(run: TrainingState, line: dict[str, Any]) -> None:
    if rank() == 0:
        if run.home is not None:
            storage.append_line(run.home / "metrics.jsonl", line)
        if run.log is not None:
            run.log({**line, "of": run.total})


def _find_checkpoint(home: Path | None) -> tuple[checkpoints.Checkpoint | None, list[Finding]]:
    """The checkpoint to continue from: process 0 decides, tidies up and tells the others the step."""
    if home is None:
        return None, []
    folder = home / "checkpoints"
    if rank() == 0:
        former, findings = checkpoints.newest_checkpoint(folder)
        checkpoints.sweep(folder, former)
        for swept in (home, home / "model"):
            if swept.is_dir():
                storage.remove_temporary_files(swept)
        all_reduce_sum([0.0 if former is None else former.step + 1.0])
        return former, findings
    (told,) = all_reduce_sum([0.0])
    path = folder / f"step-{int(told) - 1}"
    return (checkpoints.Checkpoint(path, checkpoints.verify_checkpoint(path)) if told else None), []


def _continue(run: TrainingState, former: checkpoints.Checkpoint) -> None:
    """Load weights, moments and step. Raises UserError (settings_differ, shapes_differ, integrity)."""
    checkpoints.refuse_other_run(former, run.identity, RESUME_EXEMPT)
    weights = checkpoints.load_tensors(former, "model")
    checkpoints.refuse_other_shapes(former, weights, _tensors(run.model))
    run.model.load_state_dict(weights)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoints.load_tensors(former, "optimizer").items():
        name, _, moment = key.rpartition("::")
        moments.setdefault(name, {})[moment] = value
    state = {at: moments[name] for at, name in enumerate(run.names) if name in moments}
    run.optimizer.load_state_dict({"state": state, "param_groups": run.optimizer.state_dict()["param_groups"]})
    run.step, run.validated, run.best, run.last = former.step, former.meta["validated"], former.meta["best"], former.meta["last"]


def _save(run: TrainingState) -> None:
    """A checkpoint of the step just done; of the last one also the weights for others. Process 0 alone writes."""
    if run.home is None:
        return
    parameters = dict(run.model.named_parameters())
    states = [run.optimizer.state.get(p, {}) for p in list_parameters(run.optimizer)]
    moments = {f"{name}::{key}": value for name, state in zip(run.names, states, strict=False) for key, value in state.items()}
    if not (checkpoints.all_finite(parameters) and checkpoints.all_finite(moments)):
        raise input_error(
            Reason.NON_FINITE_LOSS,
            f"non-finite weights after step {run.step}",
            "expected finite numbers",
            "Lower --lr; the former checkpoint is kept",
            file=str(run.home),
        )
    if rank() == 0:
        done = run.step == run.total and not _unvalidated(run)
        if done:
            _export(run.model, run.home / "model")
        checkpoints.save_checkpoint(
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
    all_reduce_sum([0.0])  # the others wait: a stop must not end them while process 0 writes


def _export(model: nn.Module, folder: Path) -> None:
    save = getattr(model, "save", None)
    if callable(save):
        save(folder)
    else:
        checkpoints.write_tensors(storage.make_folder(folder) / "model.safetensors", _tensors(model))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def resume_fingerprint(config: TrainConfig, batches: Batches, total: int) -> dict[str, Any]:
    """What of the loop's own settings a continued run must agree with."""
    own = config.model_dump(mode="json", exclude={*RESUME_EXEMPT, "epochs", "steps", "batch_size"})
    return {**own, "total_steps": total, "epoch_steps": batches.steps, "batch_rows": batches.size}


def _epoch(run: TrainingState) -> int:
    """The epoch, from 1, of the step just done."""
    return (run.step - 1) // run.batches.steps + 1


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
