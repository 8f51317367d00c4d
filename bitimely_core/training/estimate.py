"""Time and memory of a training, estimated from one step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from bitimely_core.training.devices import select_device
from bitimely_core.training.loop import Objective, map_tensors
from bitimely_core.types import Batch, Batches


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
    """What `steps` steps would take: two micro-batches are state, the second is timed (the first, where that took long).

    The model stays as it is. On the CPU a few rows are state, and time and activations are scaled by the rows. The optimizer's own time,
    reading, validation and checkpoints are not in it; nor are second passes of the objective where it is None (a mean of the output then
    stands in for the loss).

    Returns:
        `parameters`, `trainable`, `device`, `steps`, `seconds_per_step`, `seconds`, and `memory_bytes`: `weights`, `gradients`, `moments`,
        `activations` (what autograd keeps of one micro-batch), `total`.
    """
    where = select_device(device_name)
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
        small = map_tensors(batch, lambda x: x[:used].to(where))
        seconds, activations = 0.0, 0
        for _ in range(2):
            begun = time.perf_counter()
            generator = torch.Generator().manual_seed(0)
            autocast = torch.autocast(where.type, dtype=torch.bfloat16, enabled=precision == "bf16")
            with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = objective(model, small, generator=generator)["loss"] if objective else _stand_in_loss(model(small))
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


def _stand_in_loss(out: Any) -> Tensor:
    """A number that depends on the output of a model or a head."""
    tensor = out if isinstance(out, Tensor) else out.hidden[-1]
    return tensor.float().square().mean()
