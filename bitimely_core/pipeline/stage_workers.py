"""Further processes that share the stages of one experiment; the locks of the stages divide the
work.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess

from bitimely_core.errors import UserError


@contextmanager
def start_processes(jobs: int, call: Callable[[], object], devices: int) -> Iterator[None]:
    """Run `jobs` - 1 further processes; at the end of the block they are waited for, or stopped
    when it fails.

    Args:
        jobs: processes that share the work, this one included.
        call: what each of them runs; it is pickled.
        devices: GPUs of a training.
    """
    context = multiprocessing.get_context("spawn")
    gpus = list_gpus() if jobs > 1 else []
    started: list[SpawnProcess] = []
    try:
        for number in range(1, jobs):
            process = context.Process(
                target=_run_process, args=(jobs, choose_gpus(gpus, number, devices), call)
            )
            process.start()
            started.append(process)
        yield
    except BaseException:
        for process in started:
            process.terminate()
        raise
    finally:
        for process in started:
            process.join()


@contextmanager
def limit_threads(jobs: int) -> Iterator[None]:
    """This process with one thread where others work beside it, or with $OMP_NUM_THREADS.

    Processes use cores better than threads do, and the digits do not depend on their number.
    """
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    from bitimely_core.train.devices import use_threads

    with use_threads(1):
        yield


def list_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them: numbers, or the
    identifiers of GPUs and their parts.
    """
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name for name in names if name.strip()]
    return visible[:count] or list(map(str, range(count)))


def choose_gpus(gpus: Sequence[str], number: int, devices: int) -> list[str]:
    """The GPUs of process `number`, as many as a training takes, in turn; none where there is one
    for all.
    """
    if len(gpus) < 2:
        return []
    first = number * devices
    return [gpus[(first + k) % len(gpus)] for k in range(min(devices, len(gpus)))]


def _run_process(jobs: int, gpus: Sequence[str], call: Callable[[], object]) -> None:
    """One further process: GPUs of its own, nothing on the screen; failures are stored with the
    stage.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        with limit_threads(jobs):
            # of what it starts
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            call()
    except (UserError, KeyboardInterrupt):
        pass
