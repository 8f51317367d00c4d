"""Time and memory of a training, estimated from one step."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from bitimely_core.train.batches import map_tensors
from bitimely_core.train.devices import restore_model, select_device
from bitimely_core.train.state import Objective
from bitimely_core.types import Batch, Batches

FEW = 2  # rows of the first trial: some objectives compare rows
# seconds and number of steps that are measured: single ones differ by a factor of 1.5 on a CPU
ENOUGH, MOST = 0.5, 20
# seconds and bytes of activations of a trial with all rows, above which the first is scaled
LONG, MUCH = 3.0, 1 << 30


class Trial(NamedTuple):
    """Steps that were run on the first rows of a micro-batch."""

    rows: int
    seconds: float  # a step
    activations: int  # bytes


class CostEstimate(TypedDict):
    """Result of `estimate`."""

    parameters: int
    trainable: int
    device: str
    steps: int
    seconds_per_step: float
    seconds: float
    # weights, gradients, moments, activations (what autograd keeps of one micro-batch), total
    memory_bytes: dict[str, int]


def estimate(
    model: nn.Module,
    batches: Batches | Batch,
    steps: int,
    *,
    objective: Objective | None = None,
    accumulate: int = 1,
    precision: str = "fp32",
    device_name: str = "auto",
) -> CostEstimate:
    """Estimate time and memory of `steps` steps from a few micro-batches that are run.

    The time of one is the median, or that of the one that took long. The model is not changed.
    On the CPU two rows are run first, and the whole micro-batch only if that ends soon and fits.
    Otherwise time and activations are scaled by the rows. The time is that of a CPU with nothing
    else to do. The optimizer, reading, validation and checkpoints are not included. Without
    `objective` the mean square of the output replaces the loss.
    """
    device = select_device(device_name)
    batch = batches if isinstance(batches, Batch) else next(iter(batches(0)))
    rows = max(1, batch.values.shape[0] // accumulate)
    before = {name: value.clone() for name, value in model.named_buffers()}
    with restore_model(model, device):
        model.to(device).train()
        sizes = [rows] if device.type == "cuda" else sorted({min(rows, FEW), rows})
        part = map_tensors(batch, lambda x: x[:rows].to(device))
        trial = _run_trials(model, part, sizes, objective, precision)
        for name, value in model.named_buffers():
            value.copy_(before[name])
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    gradients = _count_bytes(trainable)
    memory = {
        "weights": _count_bytes(parameters),
        "gradients": gradients,
        "moments": 2 * gradients,
        "activations": trial.activations * rows // trial.rows,
    }
    per_step = trial.seconds * rows / trial.rows * accumulate
    return {
        "parameters": sum(map(Tensor.numel, parameters)),
        "trainable": sum(map(Tensor.numel, trainable)),
        "device": str(device),
        "steps": steps,
        "seconds_per_step": per_step,
        "seconds": per_step * steps,
        "memory_bytes": {**memory, "total": sum(memory.values())},
    }


def _count_bytes(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _run_trials(
    model: nn.Module, batch: Batch, sizes: list[int], objective: Objective | None, precision: str
) -> Trial:
    """The trial with the most of `sizes` rows that ends soon and fits by that before it."""
    trial = Trial(0, 0.0, 0)
    for size in sizes:
        scale = size / max(trial.rows, 1)
        if trial.seconds * scale > LONG or trial.activations * scale > MUCH:
            break
        part = map_tensors(batch, lambda x: x[:size])  # noqa: B023
        times: list[float] = []
        while len(times) < 4 or (len(times) < MOST and sum(times) < ENOUGH):
            seconds, activations = _run_step(model, part, objective, precision)
            times.append(seconds)
            if seconds > LONG / 3:
                break
        # the first one warms up
        trial = Trial(size, statistics.median(times[1:] or times), activations)
    return trial


def _run_step(
    model: nn.Module, batch: Batch, objective: Objective | None, precision: str
) -> tuple[float, int]:
    """Seconds of one forward and backward pass, and the bytes that autograd kept between them.

    On the CPU it is the time of the calling thread: what other programs take of the machine
    meanwhile is not counted.
    """
    saved: dict[int, int] = {}  # storage -> bytes

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    device = batch.values.device
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    started = clock()
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if objective:
            loss = objective(model, batch, generator=torch.Generator().manual_seed(0))["loss"]
        else:
            out = model(batch)
            loss = (out if isinstance(out, Tensor) else out.hidden[-1]).float().square().mean()
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = clock() - started
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return seconds, sum(saved.values())
