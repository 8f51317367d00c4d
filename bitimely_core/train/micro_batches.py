"""Reads the batches of a step in micro-batches, and evaluates the objective on each."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator

import torch

from bitimely_core.train import distributed, draws, targets
from bitimely_core.train.batches import map_tensors, read_ahead, scale_values, split_rows
from bitimely_core.train.losses import BatchLoss
from bitimely_core.train.state import TrainingState
from bitimely_core.types import Batch, Batches


def open_stream(
    state: TrainingState, batches: Batches, split: str, first: int, epoch: int = 0, start: int = 0
) -> Generator[Batch]:
    """Batches of this process with what the objective draws by row; `first` is the step of the
    first one.
    """
    read = getattr(batches, "read_narrow", batches) if state.device.type == "cuda" else batches
    stream = read(
        epoch, start=start, rank=distributed.get_rank(), world=distributed.get_world_size()
    )
    return read_ahead(
        draws.draw_rows(state.objective, state.model, stream, state.config.seed, split, first),
        state.device,
    )


def make_generator(
    state: TrainingState, last: torch.Generator | None, *key: object
) -> torch.Generator:
    """What the objective draws itself (CPU): one stream a step and process, `last`; where it is
    shared by all rows, each micro-batch has the same.
    """
    facts = draws.find_facts(state.objective, state.model)
    if facts is not None and facts.shared:
        return draws.make_generator(state.config.seed, "objective", *key)
    return last or draws.make_generator(
        state.config.seed, "objective", *key, distributed.get_rank()
    )


def read_parts(
    state: TrainingState, stream: Iterator[Batch], parts: int
) -> tuple[list[targets.MicroBatch], Exception | None, float]:
    """The next batch of this process in micro-batches, what failed (all processes come as far as
    `faults.sync_step`), and seconds waited.
    """
    counter = targets.find_counter(state.objective, state.model, parts)
    batches: list[Batch] = []
    counts: list[targets.Counts] = []
    fault: Exception | None = None
    started = time.perf_counter()
    waited = 0.0
    try:
        whole = next(stream, None)
        waited = time.perf_counter() - started
        batches = split_rows(whole, parts)
        if counter is not None:
            counts = [counter(state.model, _move_batch(state, batch)) for batch in batches]
    except Exception as error:
        batches, counts, fault = [], [], error
    if counter is None:
        return list(map(targets.MicroBatch, batches)), fault, waited
    return targets.weigh_batches(batches, counts, state.device), fault, waited


def _move_batch(state: TrainingState, batch: Batch) -> Batch:
    return map_tensors(batch, lambda x: x.to(state.device, non_blocking=True))


def evaluate_batch(
    state: TrainingState, micro: targets.MicroBatch, generator: torch.Generator, *key: object
) -> BatchLoss:
    """The objective on one micro-batch, dropout fixed by `key`."""
    seed = draws.derive_seed(state.config.seed, "model", *key, distributed.get_rank())
    torch.default_generator.manual_seed(seed)
    if state.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif state.device.type == "mps":
        torch.mps.manual_seed(seed)
    with torch.autocast(
        state.device.type, dtype=torch.bfloat16, enabled=state.config.precision == "bf16"
    ):
        batch = scale_values(_move_batch(state, micro.batch))
        # chooses an adapter: read from the device it would be waited for
        batch = batch._replace(source=micro.batch.source)
        out = state.objective(state.model, batch, generator=generator)
        out = out if micro.weigh is None else micro.weigh(out)
    count, rel_count = out.get("count", micro.batch.values.shape[0]), out.get("rel_count")
    return BatchLoss(
        out["loss"],
        count,
        out.get("rel", math.nan),
        out.get("parts", {}),
        count if rel_count is None else rel_count,
    )
