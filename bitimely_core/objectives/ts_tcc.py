"""TS-TCC's objective: each of a weak and a strong augmentation predicts the other's future from its own past, plus a contrastive loss.

Legend: B batch, F steps of the map, D its width, K steps ahead, C width of the context.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.models.base import Model
from bitimely_core.models.ts_tcc import TSTCC
from bitimely_core.objectives import contrast
from bitimely_core.objectives.tokens import Result
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch

CONTEXTUAL = 0.7  # weight of the NT-Xent part
NOTICE = "ts-tcc: contrastive, without targets; rel 1.0 = the same vector for everything. Losses of other batch sizes cannot be compared."


@objectives(ObjectiveFacts(leak_free=None, requires="ts-tcc", config=contrast.AugmentationConfig, notice=NOTICE, passes=2, rows=2))
def ts_tcc(model: Model, batch: Batch, generator: Generator | None = None, *, config: contrast.AugmentationConfig) -> Result:
    """Two augmented views: the past of each finds its own row's future in the other; the pasts of a row find each other.

    Loss = L1 + L2 + 0.7 NT-Xent of the projected contexts. Weak: scaling; strong: permutation, then jitter. New views in each batch.
    """
    assert isinstance(model, TSTCC)
    contrast.require_rows("ts-tcc", batch)
    weak = contrast.scale_timesteps(batch, config.scaling, generator)
    strong = contrast.add_jitter(contrast.permute_segments(batch, config.segments, generator), config.jitter, generator)
    views = [model(view) for view in (weak, strong)]
    maps = [F.normalize(view.hidden[-1], dim=-1) for view in views]
    real = None if batch.mask is None else views[0].mask
    ahead = min(model.config.ahead or 1, maps[0].shape[1] - 1)
    losses, contexts = [], []
    for own, other in (maps, maps[::-1]):
        now = int(torch.randint(maps[0].shape[1] - ahead, (), generator=generator))
        context = model.context(own[:, : now + 1], None if real is None else real[:, : now + 1])
        there = None if real is None else real[:, now + 1 : now + 1 + ahead]
        predicted = model.predict(context).unflatten(-1, (-1, maps[0].shape[2]))[:, :ahead]
        losses.append(contrast_future(other[:, now + 1 : now + 1 + ahead], predicted, there))
        contexts.append(model.project(context))
    rows = len(batch.values)
    parts = {"temporal": losses[0] + losses[1], "contextual": CONTEXTUAL * contrast.nt_xent(contexts[0], contexts[1])}
    return contrast.make_contrastive_result(parts, 2 * math.log(rows) + CONTEXTUAL * contrast.uniform_loss(rows), rows)


def contrast_future(future: Tensor, predicted: Tensor, there: Tensor | None = None) -> Tensor:
    """-1 / (B K) sum_(i, k) log softmax_j( future[i, k] . predicted[j, k] )[j = i], of [B, K, D] each, over the steps `there` [B, K]."""
    kind = torch.promote_types(future.dtype, torch.float32)
    with torch.autocast(future.device.type, enabled=False):
        scores = torch.einsum("ikd,jkd->kij", future.to(kind), predicted.to(kind)).log_softmax(-1)
    own = -scores.diagonal(dim1=1, dim2=2).T  # [B, K]
    if there is None:
        return own.mean()
    return torch.where(there, own, 0.0).sum() / there.sum().clamp(min=1)
