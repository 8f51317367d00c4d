"""Contrastive predictive coding (van den Oord et al. 2018): from the past, find the encoded token k steps ahead among others (InfoNCE).

The context c_t is the state of the last layer at token t, all layers forward; z_t is the encoded token. For each step k

    -log exp(z_(t+k) . W_k c_t) / (exp(z_(t+k) . W_k c_t) + sum_j exp(z_j . W_k c_t))

averaged over tokens and steps. The negatives z_j are drawn with replacement, `negatives` for each row, and serve all its contexts; one that is
the positive itself is left out. `sequence`, as for ECG (Mehari and Strodthoff 2022): from the row's own tokens; `rows`: from other rows.

`rel` is the loss divided by that of a constant representation. Legend: B batch, N tokens, D width, K steps, n negatives.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.models.base import Model
from bitimely_core.models.contract import config_error
from bitimely_core.models.s4 import S4, S4Config
from bitimely_core.objectives import contrast
from bitimely_core.objectives.tokens import Generators, Result, cycle_directions, pack_result, refuse_overlap
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch


class CPCConfig(ObjectiveConfig):
    """Settings of cpc."""

    negatives: int = Field(128, ge=1, description="Negatives drawn for each row.")
    source: Literal["sequence", "rows"] = Field("sequence", description="Negatives from the row's own tokens, or from other rows.")

    @property
    def least_rows(self) -> int:
        """2 where another row gives the negatives."""
        return 1 + (self.source == "rows")


def check_sides(config: ModelConfig) -> None:
    """Refuse two-sided layers, whose second kernel cpc would not train. Raises UserError (config, exit 2)."""
    refuse_overlap(config)
    if isinstance(config, S4Config) and config.sides == "two":
        raise config_error("two for cpc", "expected layers that read the past alone", "model.sides", "Use the objective masked")


NOTICE = "cpc: contrastive; rel 1.0 = no better than chance. Losses with other negatives, batch sizes or steps cannot be compared."


def draw_own(model: Model, batch: Batch, generators: Generators, config: CPCConfig) -> Tensor | None:
    """Negatives of each row among its own tokens, int64 [B, n]: their places in it. None: they are of other rows."""
    if config.source == "rows":
        return None
    there = find_encoded(model, batch, model.adapter_of(batch).tokenizer.find_real(batch)).cpu()
    return torch.stack([draw_places(row.nonzero().flatten(), config, one) for row, one in zip(there, generators, strict=True)])


def find_encoded(model: Model, batch: Batch, real: Tensor) -> Tensor:
    """The real tokens with an observed value, bool [B, N]."""
    seen = model.adapter_of(batch).tokenizer.find_targets(batch)
    return real & (seen if seen.dim() == 2 else seen.any(-1))


@objectives(
    ObjectiveFacts(
        leak_free=True, context="past", requires="cpc", config=CPCConfig, check=check_sides, notice=NOTICE, states=True, draw=draw_own
    )
)
def cpc(model: Model, batch: Batch, generator: Generator | None = None, *, config: CPCConfig) -> Result:
    """From its past alone, each token finds the encoded tokens ahead among negatives (InfoNCE)."""
    assert isinstance(model, S4)
    if config.source == "rows":
        contrast.require_rows("cpc with negatives of other rows", batch)
    own, (batch, _, _, real, x) = batch.draws, model.embed(batch)
    z = model.encode(x, real)
    context = model.norm(model.read_encoded(z, batch, real, cycle_directions(model, "forward"))[-1])[:, 1:-1]
    z = z[:, 1:-1]
    there = find_encoded(model, batch, real)
    predicted = model.predict(context)
    first = max(1, min(model.config.ahead, z.shape[1] - 1)) if model.config.predictor == "last" else 1  # short windows have fewer steps
    each = predicted.unflatten(-1, (-1, z.shape[2])).unbind(2)
    steps, starts = torch.arange(z.shape[1], device=z.device), z.shape[1] * torch.arange(len(z), device=z.device)[:, None]
    index, drawn = draw_negatives(there, config, generator) if own is None else (own + starts, there.any(1)[:, None, None])
    others = z.flatten(0, 1)[index]  # [B, n, D]
    losses, chances, valid = [], [], []
    for ahead, one in enumerate(each, first):
        inside = there & F.pad(there[:, ahead:], (0, min(ahead, len(steps))))
        positive = F.pad(z[:, ahead:], (0, 0, 0, min(ahead, len(steps))))
        found = index[:, None] == (steps + ahead + starts)[..., None]  # the positive itself
        loss, chance = compare_candidates(one, positive, others, drawn & ~found)
        losses.append(torch.where(inside, loss, 0.0).sum())
        chances.append(torch.where(inside, chance, 0.0).sum())
        valid.append(inside)
    count = torch.stack(valid).sum()
    loss, chance = (torch.stack(sums).sum() / count.clamp(min=1) for sums in (losses, chances))
    width = len(each)
    return pack_result(
        loss,
        loss.detach() / torch.where(chance > 0, chance, 1.0),
        {"cpc": loss},
        count,
        rel_count=chance * count,
        prediction=predicted.unflatten(-1, (width, -1)).flatten(1, 2),
        target=(steps[:, None] + torch.arange(first, first + width, device=z.device)).flatten().expand(len(z), -1),
        valid=torch.stack(valid, 2).flatten(1),
        slices={f"next-{first + at}": slice(at, width * len(steps), width) for at in range(width)},
    )


def compare_candidates(predicted: Tensor, positive: Tensor, others: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax of the positive, and its value for equal scores, [B, N] each.

    `predicted` and `positive` [B, N, D], `others` [B, n, D] the negatives of a row, `usable` [B, N, n] which of them count.
    """
    kind = torch.promote_types(predicted.dtype, torch.float32)
    with torch.autocast(predicted.device.type, enabled=False):
        predicted, positive, others = predicted.to(kind), positive.to(kind), others.to(kind)
        hit = (predicted * positive).sum(-1)
        scores = (predicted @ others.mT).masked_fill(~usable, torch.finfo(kind).min)
        return torch.logaddexp(hit, scores.logsumexp(-1)) - hit, usable.sum(-1).to(kind).log1p()


def draw_negatives(there: Tensor, config: CPCConfig, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Tokens of `there` [B, N] for each row, as places in the flattened [B * N], int64 [B, n], and whether there are any, bool [B, 1, 1]."""
    places = [row.nonzero().flatten() + at * there.shape[1] for at, row in enumerate(there.cpu())]
    chosen, some = [], []
    for at, own in enumerate(places):
        pool = own if config.source == "sequence" else torch.cat([*places[:at], *places[at + 1 :]])
        chosen.append(draw_places(pool, config, generator))
        some.append(len(pool) > 0)
    return torch.stack(chosen).to(there.device, non_blocking=True), torch.tensor(some).to(there.device, non_blocking=True)[:, None, None]


def draw_places(pool: Tensor, config: CPCConfig, generator: Generator | None) -> Tensor:
    """Negatives of a row from the places `pool`, int64 [n]; 0 where there are none."""
    draw = torch.randint(max(len(pool), 1), (config.negatives,), generator=generator)
    return pool[draw] if len(pool) else draw * 0
