"""Tries the Triton kernels of retention on short sequences before a process uses them.

Some releases of Triton compile some tiles wrongly for some GPUs, and nothing says so: on an H200
Triton 3.6 gave results that were wrong by 0.4 to 1.3 of their norm, where other tiles were right.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bitimely_core.ops.rotary import make_rotation

LENGTH = 150  # tokens: several chunks, of which the last is shorter
MOST = 0.05  # relative L2 error; products in bfloat16 have 0.004


class Tiles(NamedTuple):
    """What decides how the kernels are compiled."""

    device: torch.device
    dtype: torch.dtype
    key: int  # K of a head
    value: int  # V of a head
    direction: str
    chunk: int
    core: str


@functools.cache
def is_right(kernels: ModuleType, compute: Callable[..., Tensor], tiles: Tiles) -> bool:
    """Whether the kernels agree with `compute` in float64 on the CPU; a warning where not."""
    with ThreadPoolExecutor(1) as fresh:  # modes of torch are those of a thread
        error = fresh.submit(measure_error, kernels, compute, tiles).result()
    if error <= MOST:
        return True
    warnings.warn(
        f"The kernels of retention are not used: on {tiles.device} they are wrong by {error:.1g} "
        f"of the result (heads of {tiles.key} and {tiles.value}, {tiles.core}). "
        "Retention is exact but takes about three times as long. Try another release of Triton.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def measure_error(kernels: ModuleType, compute: Callable[..., Tensor], tiles: Tiles) -> float:
    """Largest relative L2 error of the result and of the gradients of q, k and v, on two sequences
    with irregular times, masked tokens and, where keys have pairs, rotation.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v, slope = (
        torch.randn(2, LENGTH, 2, width, generator=draw).to(tiles.dtype)
        for width in (tiles.key, tiles.key, tiles.value, tiles.value)
    )
    log_decay = torch.tensor([-0.1, -0.01])
    times = torch.rand(2, LENGTH, generator=draw).double().cumsum(1)
    mask = torch.rand(2, LENGTH, generator=draw) < 0.9
    table = None if tiles.key % 2 else make_rotation(torch.arange(LENGTH), tiles.key)
    way = tiles.direction, tiles.chunk

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        exact = compute(*wide, log_decay.double(), times, mask, table, *way, "fp32")
        wanted = [exact.detach(), *torch.autograd.grad(exact, wide, slope.double())]

    sent = [None if x is None else x.to(tiles.device) for x in (log_decay, times, mask, table)]
    inputs = [*(x.to(tiles.device) for x in (q, k, v)), *sent, *way, tiles.core]
    gradients = kernels.backward(slope.to(tiles.device), *inputs)[:3]
    results = [kernels.forward(*inputs), *gradients]
    errors = [
        float((a.cpu().double() - b).norm() / b.norm())
        for a, b in zip(results, wanted, strict=True)
    ]
    return max(float("inf") if error != error else error for error in errors)
