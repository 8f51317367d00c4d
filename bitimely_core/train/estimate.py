"""Time and memory of a training, estimated from one step."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import TypedDict

import torch
from torch import Tensor, nn

from bitimely_core.train.batches import map_tensors
from bitimely_core.train.devices import select_device
from bitimely_core.train.state import Objective
from bitimely_core.types import Batch, Batches

FEW = 2  # rows of the first trial: some objectives compare rows
# seconds and number of steps that are measured: single ones differ by a factor of 1.5 on a CPU
ENOUGH, MOST = 0.5, 20
# seconds and bytes of activations of a trial with all rows, above which the first is scaled
LONG, MUCH = 3.0, 1 << 30


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
    """Estimate time and memory of `steps` steps from micro-batches that are run: the median, or the
    one that took long.

    The model is not changed. On the CPU two rows are run first, and the whole micro-batch only if
    that ends soon and fits; otherwise time and activations are scaled by the rows. The time is that
    of a CPU with nothing else to do; the optimizer, reading, validation and checkpoints are not
    included. Without `objective` the mean square of the output replaces the loss.
    """
    device = select_device(device_name)
    batch = batches if isinstance(batches, Batch) else next(iter(batches(0)))
    rows = max(1, batch.values.shape[0] // accumulate)
    before = {name: value.clone() for name, value in model.named_buffers()}
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        )
        stack.callback(model.to, next((p.device for p in model.parameters()), torch.device("cpu")))
        stack.callback(model.train, model.training)
        model.to(device).train()
        used, seconds, activations = 0, 0.0, 0
        for size in [rows] if device.type == "cuda" else sorted({min(rows, FEW), rows}):
            if used and (seconds * size / used > LONG or activations * size / used > MUCH):
                break
            small = map_tensors(batch, lambda x: x[:size].to(device))  # noqa: B023
            used = size
            times: list[float] = []
            while len(times) < 4 or (len(times) < MOST and sum(times) < ENOUGH):
                took, activations = _run_step(model, small, objective, precision)
                times.append(took)
                if took > LONG / 3:
                    break
            seconds = statistics.median(times[1:] or times)  # the first one warms up
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
        "device": str(device),
        "steps": steps,
        "seconds_per_step": per_step,
        "seconds": per_step * steps,
        "memory_bytes": {**memory, "total": sum(memory.values())},
    }


def _run_step(
    model: nn.Module, batch: Batch, objective: Objective | None, precision: str
) -> tuple[float, int]:
    """Seconds of one forward and backward pass, and the bytes that autograd kept between them.

    On the CPU it is the time of the calling thread: what other programs take of the machine
    meanwhile is not counted.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
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
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return seconds, sum(size for at, size in kept.items() if at not in own)
