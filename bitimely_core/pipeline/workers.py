"""Several processes on one experiment: each calls `run` on the same workspace, and the locks of the stages divide the work."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def start_processes(jobs: int, **call: Any) -> Iterator[None]:
    """`jobs` - 1 further processes that make the same call; at the end of the block they are waited for, or stopped when it fails."""
    context = multiprocessing.get_context("spawn")
    gpus = _count_gpus() if jobs > 1 else 0
    processes = [context.Process(target=_run_process, args=(number, jobs, gpus, call)) for number in range(1, jobs)]
    for process in processes:
        process.start()
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()


@contextmanager
def limit_threads(jobs: int) -> Iterator[None]:
    """This process with its share of the cores."""
    if jobs == 1:
        yield
        return
    from bitimely_core.training.devices import use_threads

    with use_threads(_threads_per_process(jobs)):
        yield


def _threads_per_process(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_process(number: int, jobs: int, gpus: int, call: dict[str, Any]) -> None:
    """One further process: one GPU, its share of the cores, nothing on the screen; failures are stored with the stage."""
    if gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    os.environ["OMP_NUM_THREADS"] = str(_threads_per_process(jobs))
    from bitimely_core import pipeline
    from bitimely_core.errors import UserError

    try:
        with limit_threads(jobs):
            pipeline.run(**call)
    except (UserError, KeyboardInterrupt):
        pass
