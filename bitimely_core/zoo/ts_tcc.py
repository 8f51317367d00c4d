"""TS-TCC (Eldele et al. 2021): three blocks of convolutions; in pre-training a transformer
summarises the past of their output to predict its future.

The vector of a window is its flattened map. The transformer and the maps W_k are used in
pre-training only.

Legend: B batch, T timesteps, V channels, F steps of the map, D width of the map, C width of the
context (`value_dim`), K steps ahead, H heads.

The objective makes a weak and a strong augmentation of each window. Each predicts the other's
future from its own past, and a contrastive loss is added.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.models.base import Model
from bitimely_core.models.contract import require_divisible
from bitimely_core.models.layers import PreNormLayer
from bitimely_core.objectives.token_objectives import Result
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo import contrast
from bitimely_core.zoo.patchtst import BatchNorm

DROPOUT = 0.1  # of the context


class TSTCCConfig(contrast.ConvolutionConfig):
    """Settings of TS-TCC."""

    ahead: int | None = Field(
        None, ge=1, description="Steps of the map that are predicted; none: two fifths of the map."
    )


class ContextTransformer(nn.Module):
    """A learned [CLS] before the steps of the map, layers without positions; the context is the
    state of [CLS].
    """

    def __init__(self, config: TSTCCConfig) -> None:
        super().__init__()
        self.embedding = nn.Linear(config.dim, config.value_dim)
        self.start = nn.Parameter(torch.randn(config.value_dim))
        width, hidden, heads = config.value_dim, config.ffn_dim, config.heads
        self.layers = nn.ModuleList(
            PreNormLayer(
                width,
                hidden,
                heads=heads,
                inner=width,
                scale=width**-0.5,
                dropout=DROPOUT,
                act=F.relu,
            )
            for _ in range(config.layers)
        )

    def forward(self, z: Tensor, real: Tensor | None = None) -> Tensor:
        """Steps [B, n, D], of which `real` [B, n] are no padding (None: all) -> [B, C]."""
        x = self.embedding(z)
        x = torch.cat((self.start.to(x.dtype).expand(x.shape[0], 1, -1), x), 1)
        keys = None if real is None else F.pad(real, (1, 0), value=True)
        for layer in self.layers:
            x, _ = layer(x, keys)
        return x[:, 0]


class TSTCC(contrast.ContrastiveModel):
    """The convolutions, and the modules of the objective: `context`, `predict` (the maps W_k side
    by side) and `project`.
    """

    adapter_type = contrast.ConvolutionAdapter
    adapter: contrast.ConvolutionAdapter
    config: TSTCCConfig

    def __init__(self, config: TSTCCConfig) -> None:
        require_divisible(config, "value_dim")
        if config.ahead is None:
            steps = contrast.count_map_steps(
                config.length, config.first_kernel, config.first_stride
            )
            config = config.model_copy(update={"ahead": max(1, 2 * steps // 5)})
        super().__init__(config)
        dim, width, (quarter, half, _) = (
            config.dim,
            config.value_dim,
            contrast.list_filters(config.dim),
        )
        assert config.ahead is not None
        self.trunk, self.context = contrast.ConvolutionTrunk(config), ContextTransformer(config)
        self.predict = nn.Linear(width, config.ahead * dim)
        self.project = nn.Sequential(
            nn.Linear(width, half), BatchNorm(half), nn.ReLU(), nn.Linear(half, quarter)
        )
        self._fit_length(config.length)

    def _fit_length(self, before: int) -> list[str]:
        """The vector is as long as the map of the windows."""
        self.pooled_width = self.config.dim * self.adapter.tokenizer.count(self.config.length)
        return []

    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """The F steps of the map [B, F, D]; vector: the flattened map, filled up with zeros to that
        of the windows it was built for.
        """
        z, real = contrast.compute_map(self.trunk, self.adapter_of(batch), "time", batch)
        pooled = (z * real[..., None]).flatten(1)
        pooled = F.pad(pooled, (0, max(0, (self.pooled_width or 0) - pooled.shape[1])))
        return Encoded(None, None, real, (z,), None, pooled, None)


@models(
    ModelFacts(
        config=TSTCCConfig,
        family="ts-tcc",
        objective="ts-tcc",
        capabilities=("ts-tcc",),
        readout="native",
        step=8,  # the heads divide the context, half as wide
        source="Eldele et al. 2021, Time-Series Representation Learning via Temporal and "
        "Contextual Contrasting",
        known="Its augmentations are tuned to each data set (objective.jitter, scaling, "
        "segments); its own size is below 1 M",
    )
)
def ts_tcc(config: TSTCCConfig) -> TSTCC:
    """TS-TCC: convolutions; two augmented views predict each other's future, with a contrastive
    loss between windows.
    """
    return TSTCC(contrast.configure_signals(config))


# --- the objective

CONTEXTUAL = 0.7  # weight of the NT-Xent part


@objectives(
    ObjectiveFacts(
        leak_free=None,
        requires="ts-tcc",
        config=contrast.AugmentationConfig,
        notice=f"ts-tcc: {contrast.NOTICE}",
        passes=2,
        rows=2,
    ),
    name="ts-tcc",
)
def compute_ts_tcc_loss(
    model: Model,
    batch: Batch,
    generator: Generator | None = None,
    *,
    config: contrast.AugmentationConfig,
) -> Result:
    """Two augmented views: the past of each finds its own row's future in the other; the pasts of a
    row find each other.

    Loss = L1 + L2 + 0.7 NT-Xent of the projected contexts. Weak: scaling; strong: permutation, then
    jitter. New views in each batch.
    """
    assert isinstance(model, TSTCC)
    contrast.require_rows("ts-tcc", batch)
    weak = contrast.scale_timesteps(batch, config.scaling, generator)
    strong = contrast.add_jitter(
        contrast.permute_segments(batch, config.segments, generator), config.jitter, generator
    )
    views = list(map(model, (weak, strong)))
    maps = [F.normalize(view.hidden[-1], dim=-1) for view in views]
    real = None if batch.mask is None else views[0].mask
    ahead = min(model.config.ahead or 1, maps[0].shape[1] - 1)
    losses, contexts = [], []
    for view, other in (maps, maps[::-1]):
        now = int(torch.randint(maps[0].shape[1] - ahead, (), generator=generator))
        context = model.context(view[:, : now + 1], None if real is None else real[:, : now + 1])
        there = None if real is None else real[:, now + 1 : now + 1 + ahead]
        predicted = model.predict(context).unflatten(-1, (-1, maps[0].shape[2]))[:, :ahead]
        losses.append(contrast_future(other[:, now + 1 : now + 1 + ahead], predicted, there))
        contexts.append(model.project(context))
    rows = len(batch.values)
    parts = {
        "temporal": losses[0] + losses[1],
        "contextual": CONTEXTUAL * contrast.nt_xent(contexts[0], contexts[1]),
    }
    return contrast.make_contrastive_result(
        parts, 2 * math.log(rows) + CONTEXTUAL * contrast.uniform_loss(rows), rows
    )


def contrast_future(future: Tensor, predicted: Tensor, there: Tensor | None = None) -> Tensor:
    """-1 / (B K) sum_(i, k) log softmax_j( future[i, k] . predicted[j, k] )[j = i], of [B, K, D]
    each, over the steps `there` [B, K].
    """
    kind = torch.promote_types(future.dtype, torch.float32)
    with torch.autocast(future.device.type, enabled=False):
        scores = torch.einsum("ikd,jkd->kij", future.to(kind), predicted.to(kind)).log_softmax(-1)
    losses = -scores.diagonal(dim1=1, dim2=2).T  # [B, K]
    if there is None:
        return losses.mean()
    return torch.where(there, losses, 0.0).sum() / there.sum().clamp(min=1)
