"""Batches on their way to a step: read ahead, scaled on the device, cut into micro-batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from bitimely_core.types import Batch

DEPTH = 2  # batches that are read ahead


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`batch` with `change` applied to each of its tensors."""
    return Batch(change(batch.values), *(None if x is None else change(x) for x in batch[1:]))


def scale_values(batch: Batch) -> Batch:
    """The batch with the values that a model reads, also where they are still as stored.

    The operations are those of the host.
    """
    if batch.affine is None:
        return batch
    centre, factor = batch.affine[:, :, None].unbind(1)
    return batch._replace(values=(batch.values.float() - centre) * factor, affine=None)


def split_rows(batch: Batch | None, parts: int) -> list[Batch]:
    """The rows of `batch` in `parts` runs of nearly equal length; empty ones are left out."""
    if batch is None:
        return []
    rows = batch.values.shape[0]
    bounds = [
        (a, b) for a, b in pairwise(rows * part // parts for part in range(parts + 1)) if b > a
    ]
    return [map_tensors(batch, lambda x, a=a, b=b: x[a:b]) for a, b in bounds]  # type: ignore[misc]


def read_ahead(stream: Iterator[Batch], where: torch.device) -> Generator[Batch]:
    """The batches of `stream`; for a GPU a thread reads `DEPTH` of them ahead into pinned
    memory.
    """
    if where.type != "cuda":
        yield from stream
        return
    waiting: queue.Queue[Batch | Exception | None] = queue.Queue(DEPTH)
    stopped = threading.Event()

    def enqueue(item: Batch | Exception | None) -> None:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            break

    def read_batches() -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(where)  # each thread has its own, at first cuda:0
            for batch in stream:
                enqueue(
                    map_tensors(batch, lambda x: x.pin_memory() if x.device.type == "cpu" else x)
                )
                if stopped.is_set():
                    return
            enqueue(None)
        except Exception as error:  # raised again in the training thread
            enqueue(error)

    threading.Thread(target=read_batches, daemon=True, name="batches").start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()
