"""Contrastive learning: the loss that the contrastive objectives share, and the augmentations of TS-TCC and TF-C.

Each of K items has two views. Each view is classified among the other 2K - 1 for its positive; the loss is the mean cross-entropy. The other
items are the negatives, so the size of a micro-batch matters, and at least 2 rows are required.

`rel` is the loss divided by that of a constant representation: 1 = no discrimination, the representation may have collapsed.

Legend: B batch, T timesteps, V channels, G groups, K items in a group, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ObjectiveConfig
from bitimely_core.errors import usage_error
from bitimely_core.models.tokenizers import find_row_ends
from bitimely_core.objectives.tokens import Result, pack_result
from bitimely_core.types import Batch

TEMPERATURE = 0.2
BLOCK = 2**20  # scores that are held at once: 4 MB in float32


class AugmentationConfig(ObjectiveConfig):
    """Settings of the augmentations of TS-TCC and TF-C."""

    jitter: float = Field(0.8, ge=0, description="Standard deviation of added noise.")
    scaling: float = Field(1.1, ge=0, description="Standard deviation of the factor of each timestep, around 2.")
    segments: int = Field(8, ge=2, description="A window is cut into fewer than this many pieces, in a new order.")


def contrast(first: Tensor, second: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the positive among the 2K - 1 other views of the group, by dot products, with at most `BLOCK` scores in memory.

    `first` and `second`, aligned, are views of each item [G, K, D]; items not `valid` [G, K] are neither anchors nor negatives. Returns the
    mean over all valid views, and its value for a constant representation (log(2K - 1) if all are valid), both scalars.
    """
    z = torch.cat((first, second), 1).to(torch.promote_types(first.dtype, torch.float32))
    groups, views, _ = z.shape
    there = None if valid is None else torch.cat((valid, valid), 1)
    counts = z.new_full((groups,), views) if there is None else there.sum(1).to(z.dtype)
    blind = (counts * (counts - 1).clamp(min=1).log()).sum()
    anchors = counts.sum().clamp(min=1)
    total: Tensor = _ContrastiveLoss.apply(z, there)  # type: ignore[no-untyped-call]
    return total / anchors, blind / anchors


class _ContrastiveLoss(torch.autograd.Function):
    """Summed cross-entropy of all views z [G, 2K, D], `there` bool [G, 2K] (None: all).

    With p the softmax of the scores of z and z' its positive, the gradient of its term is sum_j p_j z_j - z' for z, p_j z for each other view
    and -z for z'. It is computed in the forward pass, which has the scores.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, there: Tensor | None) -> Tensor:
        """The sum, a scalar."""
        groups, views, _ = z.shape
        rows = max(1, min(views, BLOCK // max(views, 1)))
        several = max(1, BLOCK // max(views * rows, 1))
        slope = torch.zeros_like(z) if ctx.needs_input_grad[0] else None
        total = z.new_zeros(())
        with torch.autocast(z.device.type, enabled=False):
            for at in range(0, groups, several):
                own, partner = z[at : at + several], z[at : at + several].roll(views // 2, 1)
                for start in range(0, views, rows):
                    part = slice(start, start + rows)
                    scores = own[:, part] @ own.mT
                    scores.diagonal(start, 1, 2).fill_(-torch.inf)
                    anchors = None
                    if there is not None:
                        anchors = there[at : at + several, part, None]
                        scores.masked_fill_(~there[at : at + several, None], -torch.inf).masked_fill_(~anchors, 0.0)  # finite, not counted
                    most = scores.amax(-1, keepdim=True)
                    norm = scores.sub_(most).exp_().sum(-1, keepdim=True)
                    losses = most + norm.log() - (own[:, part] * partner[:, part]).sum(-1, keepdim=True)
                    total += (losses if anchors is None else losses.masked_fill(~anchors, 0.0)).sum()
                    if slope is not None:
                        weight = norm.reciprocal() if anchors is None else anchors / norm
                        own_slope = slope[at : at + several]
                        own_slope[:, part] += weight * (scores @ own) - 2 * (
                            partner[:, part] if anchors is None else anchors * partner[:, part]
                        )
                        own_slope += scores.mT @ (weight * own[:, part])
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The stored gradient times the incoming one."""
        (slope,) = ctx.saved_tensors
        return grad * slope, None


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent of two views of B rows, [B, D] each: `contrast` of cosines divided by the temperature 0.2."""
    kind = torch.promote_types(first.dtype, torch.float32)
    a, b = (F.normalize(view.to(kind), dim=-1) * TEMPERATURE**-0.5 for view in (first, second))
    return contrast(a[None], b[None])[0]


def make_contrastive_result(parts: dict[str, Tensor], blind: float | Tensor, rows: int) -> Result:
    """The result of a contrastive objective: `parts` are summed, `blind` is the loss of a constant representation."""
    loss = torch.stack(list(parts.values())).sum()
    return pack_result(loss, loss.detach() / blind, parts, rows)


def require_rows(name: str, batch: Batch) -> None:
    """Raises UserError (config, exit 2) for a single row, which has no negatives."""
    if len(batch.values) < 2:
        raise usage_error(
            f"{name} with {len(batch.values)} row in a micro-batch",
            "expected at least 2: the other rows are the negatives",
            "Use a larger --batch-size or a smaller --accumulate; of data.batches the option least=2",
            field="train.batch_size",
        )


def draw_noise(like: Tensor, generator: Generator | None, *, normal: bool = False) -> Tensor:
    """Random numbers in the shape of `like`: U(0, 1), or N(0, 1)."""
    draw = torch.randn if normal else torch.rand
    return draw(like.shape, generator=generator).to(like, non_blocking=True)  # a copy that blocks waits for all that is under way


def add_jitter(batch: Batch, sigma: float, generator: Generator | None = None) -> Batch:
    """Noise: x + N(0, sigma^2), every value by itself."""
    return batch._replace(values=batch.values + sigma * draw_noise(batch.values, generator, normal=True))


def scale_timesteps(batch: Batch, sigma: float, generator: Generator | None = None) -> Batch:
    """Another size: x * N(2, sigma^2), one factor a row and timestep, the same for all channels."""
    return batch._replace(values=batch.values * (2 + sigma * draw_noise(batch.values[..., :1], generator, normal=True)))


def permute_segments(batch: Batch, segments: int, generator: Generator | None = None) -> Batch:
    """Each row cut into 1 .. `segments` - 1 pieces at random places, in a new order; all channels together, padding stays where it is."""
    order = torch.arange(batch.values.shape[1]).repeat(len(batch.values), 1)
    for row, end in zip(order, find_row_ends(batch).tolist(), strict=True):
        pieces = min(int(torch.randint(1, segments, (), generator=generator)), max(end, 1))
        cuts = (torch.randperm(max(end, 1) - 1, generator=generator)[: pieces - 1] + 1).sort().values
        parts = row[:end].tensor_split(cuts)
        row[:end] = torch.cat([parts[at] for at in torch.randperm(pieces, generator=generator).tolist()])
    order = order.to(batch.values.device, non_blocking=True)
    mask = batch.mask
    if mask is not None:
        mask = mask.gather(1, order if mask.dim() == 2 else order[..., None].expand_as(mask))
    return batch._replace(values=batch.values.gather(1, order[..., None].expand_as(batch.values)), mask=mask)


def augment_rows(batch: Batch, config: AugmentationConfig, generator: Generator | None = None) -> Batch:
    """One augmentation a row, of jitter, scaling, permutation and masking (nine tenths are kept)."""
    views = [
        add_jitter(batch, config.jitter, generator),
        scale_timesteps(batch, config.scaling, generator),
        permute_segments(batch, config.segments, generator),
        batch._replace(values=batch.values * (draw_noise(batch.values, generator) < 0.9)),
    ]
    rows = torch.arange(len(batch.values), device=batch.values.device)
    chosen = torch.randint(len(views), (len(rows),), generator=generator).to(rows.device, non_blocking=True)
    values = torch.stack([view.values for view in views])[chosen, rows]
    mask = None if batch.mask is None else torch.stack([view.mask for view in views if view.mask is not None])[chosen, rows]
    return batch._replace(values=values, mask=mask)


def perturb_spectrum(spectrum: Batch, generator: Generator | None = None, *, twice: bool = False) -> Batch:
    """Amplitudes of which a tenth is removed, and to a tenth U(0, 0.1 * the largest of the row and channel) is added.

    `twice`: the spectrum with bins removed plus the one with bins added, as the reference code sums them.
    """
    bins = spectrum.values
    least = bins.amax(1, keepdim=True) * 0.1
    removed = bins * (draw_noise(bins, generator) > 0.1)
    added = (draw_noise(bins, generator) < 0.1) * draw_noise(bins, generator) * least
    return spectrum._replace(values=removed + added + (bins if twice else 0.0))


def uniform_loss(rows: int) -> float:
    """NT-Xent of a constant representation: log(2B - 1)."""
    return math.log(2 * rows - 1)
