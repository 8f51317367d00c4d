"""Several processes on one recipe: each is a call of `run` on the same workspace, and the locks of the stages share the work out."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def start(jobs: int, **call: Any) -> Iterator[None]:
    """`jobs` - 1 further processes that make the same call; at the end of the block they are waited for, or stopped when it fails."""
    context = multiprocessing.get_context("spawn")
    gpus = _gpus() if jobs > 1 else 0
    found = [context.Process(target=_work, args=(number, jobs, gpus, call)) for number in range(1, jobs)]
    for process in found:
        process.start()
    try:
        yield
    except BaseException:
        for process in found:
            process.terminate()
        raise
    finally:
        for process in found:
            process.join()


@contextmanager
def share(jobs: int) -> Iterator[None]:
    """This process with its share of the cores."""
    if jobs == 1:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(_threads(jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _threads(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _work(number: int, jobs: int, gpus: int, call: dict[str, Any]) -> None:
    """One further process: its own GPU, its share of the cores, no word on the screen; what fails is written with the stage."""
    if gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    os.environ["OMP_NUM_THREADS"] = str(_threads(jobs))
    from bitimely_core import pipeline
    from bitimely_core.errors import UserError

    try:
        with share(jobs):
            pipeline.run(**call)
    except (UserError, KeyboardInterrupt):
        pass
