"""CRT's objective: reconstruction of all patches of a window and its spectrum from those not dropped, and a term that keeps tokens distinct."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ObjectiveConfig
from bitimely_core.models.base import Model
from bitimely_core.models.crt import CRT
from bitimely_core.objectives.tokens import Generators, LossPart, Result, make_result
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch

LEAST = 0.3  # share of dropped patches at the start
SLACK = 1e-6  # of a share, against rounding
WEIGHT = 1e-4  # of the instance constraint

NOTICE = "drop: magnitudes and phases are of the whole window, dropped patches included; its loss measures reconstruction, not forecasting."


class DropConfig(ObjectiveConfig):
    """Settings of drop."""

    dropped: float = Field(0.7, gt=0, lt=1, description="Largest share of dropped patches, reached during the training.")


def draw_order(model: Model, batch: Batch, generators: Generators, config: DropConfig) -> Tensor:
    """The share from which on each patch is dropped, float32 [B, 4K], on the CPU, see `draw_dropped`."""
    real = model.adapter_of(batch).tokenizer.find_real(batch).cpu()
    return torch.stack([draw_shares(row, generator) for row, generator in zip(real, generators, strict=True)])


@objectives(ObjectiveFacts(leak_free=None, requires="drop", config=DropConfig, notice=NOTICE, draw=draw_order))
def drop(model: Model, batch: Batch, generator: Generator | None = None, *, config: DropConfig) -> Result:
    """Up to 70 % of the patches dropped, of phase those of magnitude; reconstruct all, with CRT's instance constraint.

    The share rises with the training, clip(progress, 0.3, `dropped`); outside training it is the largest. Every row drops its own.
    """
    assert isinstance(model, CRT)
    assert batch.draws is not None
    target, valid = model.targets(batch)
    ratio = min(max(model.progress if model.training else 1.0, LEAST), config.dropped)
    output = model.reconstruct(batch, batch.draws <= ratio + SLACK)
    out = make_result(model, batch, [LossPart("reconstruction", output.prediction, target, valid)])
    constraint = WEIGHT * compute_constraint(output.before, output.after, output.kept)
    return {**out, "loss": out["loss"] + constraint, "parts": {**out["parts"], "constraint": constraint.detach()}}


def draw_dropped(real: Tensor, ratio: float, generator: Generator | None = None) -> Tensor:
    """Dropped patches, bool [4K], of a row with `real` ones [4K]: floor(ratio * 2k) of time, floor(ratio * k) of magnitude, the same of
    phase.
    """
    return draw_shares(real, generator) <= ratio + SLACK


def draw_shares(real: Tensor, generator: Generator | None = None) -> Tensor:
    """The share from which on each patch of a row is dropped, float32 [4K]: those in a random order, of padding infinite."""
    most = len(real) // 4
    blocks = int(real[2 * most : 3 * most].sum())
    time, bins = (torch.randperm(count, generator=generator) for count in (2 * blocks, blocks))
    out = torch.full(real.shape, torch.inf)
    for start, places in zip((0, 2 * most, 3 * most), (time, bins, bins), strict=True):
        out[start + places] = torch.arange(1, len(places) + 1) / max(len(places), 1)
    return out


def compute_constraint(before: Tensor, after: Tensor, kept: Tensor) -> Tensor:
    """Instance discrimination: mean over rows of log sum_(i != j) exp(a_i . b_j) of kept patches, a, b = [B, n, D] scaled to length 1."""
    before, after = F.normalize(before.float(), dim=-1), F.normalize(after.float(), dim=-1)
    pairs = kept[:, :, None] & kept[:, None] & ~torch.eye(kept.shape[1], dtype=torch.bool, device=kept.device)
    enough = pairs.flatten(1).any(1)
    scores = (before @ after.mT).masked_fill(~pairs & enough[:, None, None], -torch.inf)  # rows without a pair stay finite and are left out
    return torch.where(enough, scores.flatten(1).logsumexp(1), 0.0).sum() / enough.sum().clamp(min=1)
