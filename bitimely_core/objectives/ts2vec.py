"""TS2Vec's objective: contrastive losses over windows and over timesteps, at all scales, of two overlapping crops with hidden timesteps.

Legend: B batch, T timesteps, N timesteps that both crops share, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor

from bitimely_core.config import ObjectiveConfig
from bitimely_core.models.base import Model
from bitimely_core.models.tokenizers import find_row_ends
from bitimely_core.models.ts2vec import TS2Vec
from bitimely_core.objectives.contrast import contrast, make_contrastive_result, require_rows
from bitimely_core.objectives.tokens import Result
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch

HIDDEN = 0.5  # share of hidden timesteps
NOTICE = "ts2vec: contrastive, without targets; rel 1.0 = the same vector for everything. Losses of other batch sizes cannot be compared."


class RowCrops(NamedTuple):
    """Two crops of each row; the last `shared` steps of the first are the first ones of the second."""

    first: Tensor  # int64 [B], where a row's first crop starts
    second: Tensor
    lengths: tuple[int, int]
    shared: int


class TS2VecObjectiveConfig(ObjectiveConfig):
    """Settings of ts2vec."""

    temporal_unit: int = Field(0, ge=0, description="Contrast times from scale 2^n on; larger values spare time and memory.")


@objectives(ObjectiveFacts(leak_free=None, requires="ts2vec", config=TS2VecObjectiveConfig, notice=NOTICE, passes=2, rows=2))
def ts2vec(model: Model, batch: Batch, generator: Generator | None = None, *, config: TS2VecObjectiveConfig) -> Result:
    """Two overlapping crops with half of the timesteps hidden: each timestep finds its partner among the rows, and among the times."""
    assert isinstance(model, TS2Vec)
    require_rows("ts2vec", batch)
    ends = find_row_ends(batch)
    crops = draw_crops(ends.cpu(), config.temporal_unit, generator)
    first = _encode_crop(model, batch, crops.first, crops.lengths[0], generator)[:, -crops.shared :]
    second = _encode_crop(model, batch, crops.second, crops.lengths[1], generator)[:, : crops.shared]
    valid = None
    if batch.mask is not None:
        valid = crops.second.to(ends.device, non_blocking=True)[:, None] + torch.arange(crops.shared, device=ends.device) < ends[:, None]
    instance, temporal, blind = compute_hierarchical_loss(first, second, valid, config.temporal_unit)
    return make_contrastive_result({"instance": instance, "temporal": temporal}, blind, len(batch.values))


def draw_crops(ends: Tensor, unit: int, generator: Generator | None = None) -> RowCrops:
    """Crops of rows with `ends` [B] timesteps: N ~ U{2^(unit + 1) .. T} shared ones, [a, b), and each row moved by its own offset.

    The first crop is [left, b) with left <= a, the second one [a, right) with right >= b. A row that is shorter than the two together
    is not moved.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    longest = max(int(ends.max()), 1)
    shared = draw(min(2 ** (unit + 1), longest), longest)
    a = draw(0, longest - shared)
    b = a + shared
    left, right = draw(0, a), draw(b, longest)
    offsets = torch.tensor([draw(-left, max(int(end) - right, -left)) for end in ends.tolist()])
    return RowCrops(left + offsets, a + offsets, (b - left, right - a), shared)


def _encode_crop(model: TS2Vec, batch: Batch, starts: Tensor, length: int, generator: Generator | None) -> Tensor:
    """States [B, length, D] of a crop, half of its timesteps hidden."""
    index = (starts[:, None] + torch.arange(length)).to(batch.values.device, non_blocking=True)
    values, mask = batch.values.gather(1, index[..., None].expand(-1, -1, batch.values.shape[2])), batch.mask
    if mask is not None:
        mask = mask.gather(1, index if mask.dim() == 2 else index[..., None].expand(-1, -1, mask.shape[2]))
    hide = (torch.rand(index.shape, generator=generator) < HIDDEN).to(index.device, non_blocking=True)
    states: Tensor = model(Batch(values, mask=mask, source=batch.source), hide=hide).hidden[-1]
    return states


def compute_hierarchical_loss(first: Tensor, second: Tensor, valid: Tensor | None = None, unit: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The hierarchical loss of two views [B, N, D], `valid` bool [B, N] (None: all).

    At each scale (the maximum over pairs of times makes the next one, down to one time) half of each of two questions: of every time
    across the rows (instance), of every row across its times (temporal, from scale `unit` on, not of a single time).

    Returns the instance and the temporal part, both divided by the number of scales, and their sum where all vectors are the same.
    """
    zero = first.sum() * 0.0
    instance, temporal, blind = zero, zero, zero.detach()
    scale = 0
    while True:
        across = contrast(first.transpose(0, 1), second.transpose(0, 1), None if valid is None else valid.T)
        instance, blind = instance + across[0] / 2, blind + across[1] / 2
        if scale >= unit and first.shape[1] > 1:
            along = contrast(first, second, valid)
            temporal, blind = temporal + along[0] / 2, blind + along[1] / 2
        scale += 1
        if first.shape[1] < 2:
            return instance / scale, temporal / scale, blind / scale
        even = first.shape[1] // 2 * 2  # maxima over pairs of times; an odd last time is left out
        pairs = [[view[:, :even:2], view[:, 1:even:2]] for view in (first, second)]
        if valid is not None:  # of the valid one where one of a pair is not
            own = [valid[:, :even:2], valid[:, 1:even:2]]
            valid = own[0] | own[1]
            pairs = [[x.masked_fill((valid & ~of)[..., None], -torch.inf) for x, of in zip(pair, own, strict=True)] for pair in pairs]
        first, second = (torch.maximum(*pair) for pair in pairs)
