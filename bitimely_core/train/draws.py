"""Random numbers of a training, which depend on seed and step alone.

Some depend on the row, the process or the micro-batch too.

What an objective draws by row (masks, gaps, noise) is drawn here, on the host, from one stream per
(seed, step, row of the global batch), and travels with the batch: neither the number of processes
nor that of micro-batches changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from bitimely_core import registry
from bitimely_core.models.base import Model
from bitimely_core.registry import ObjectiveFacts
from bitimely_core.train.distributed import get_rank, get_world_size
from bitimely_core.types import Batch

if TYPE_CHECKING:
    from bitimely_core.train.state import Objective


def derive_seed(*key: object) -> int:
    """63 bits that depend on every part of `key`."""
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_generator(*key: object) -> torch.Generator:
    """A stream of random numbers (CPU) that depends on every part of `key`."""
    return torch.Generator().manual_seed(derive_seed(*key))


def find_facts(objective: Objective, model: nn.Module) -> ObjectiveFacts | None:
    """The facts of an objective that is registered; None for any other function."""
    name = getattr(getattr(objective, "config", None), "name", None)
    if name == "" and isinstance(model, Model):
        name = registry.models[model.config.name].facts.objective
    return registry.objectives[name].facts if name else None


def draw_rows(
    objective: Objective,
    model: nn.Module,
    stream: Iterator[Batch],
    seed: int,
    split: str,
    first: int,
) -> Iterator[Batch]:
    """The batches of this process, numbered from `first`, with what the objective draws for each
    row.
    """
    draw, rank, world = getattr(objective, "draw", None), get_rank(), get_world_size()
    for step, batch in enumerate(stream, first):
        if draw is None:
            yield batch
            continue
        rows = range(rank, rank + world * len(batch.values), world)
        shape = batch
        if batch.affine is not None:  # values as stored: none decides
            shape = batch._replace(values=torch.zeros(()).expand(batch.values.shape))
        drawn = draw(model, shape, (make_generator(seed, "row", split, step, row) for row in rows))
        yield drawn._replace(values=batch.values)
