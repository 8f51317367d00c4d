"""Devices: which one a name selects, and deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bitimely_core.errors import UserError, usage_error
from bitimely_core.training.distributed import get_world_size


@contextmanager
def deterministic_kernels(where: torch.device) -> Iterator[None]:
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


def select_device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` takes CUDA, then MPS, then the CPU. Of several processes each takes the GPU of its local rank.

    Raises UserError (config, exit 2) when it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and get_world_size() == 1 else "cpu"
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise missing_device(name, "expected auto, cpu, cuda or mps") from error
    if chosen.type == "cuda":
        at = int(os.environ.get("LOCAL_RANK", "0")) if get_world_size() > 1 else chosen.index or 0
        if at >= torch.cuda.device_count():
            raise missing_device(f"cuda:{at}", f"{torch.cuda.device_count()} CUDA devices are here")
        chosen = torch.device("cuda", at)
        torch.cuda.set_device(chosen)
    elif chosen.type == "mps" and not torch.backends.mps.is_available():
        raise missing_device(name, "no MPS device is here")
    elif chosen.type not in {"cpu", "mps"}:
        raise missing_device(name, "expected auto, cpu, cuda or mps")
    return chosen


def missing_device(name: str, wanted: str) -> UserError:
    """The error for a device that this machine does not have."""
    return usage_error(f"no device {name!r}", wanted, "Use --device auto", field="--device")
