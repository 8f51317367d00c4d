"""TS2Vec (Yue et al. 2022): dilated convolutions give a vector per timestep; pre-training contrasts
windows and timesteps at all scales.

A linear map of each timestep to H channels; L residual blocks of H channels and one of D, block i
with dilation 2^i: y = x + Conv(GELU(Conv(GELU(x)))), dropout behind the last one. A timestep of
which any channel is missing is 0 behind the linear map, as are those that the objective hides. The
vector of a window is the maximum over its timesteps.

Legend: B batch, T timesteps, V channels, H hidden channels (`ffn_dim`), L blocks of them
(`layers`), D width of the states.

The objective compares two overlapping crops with hidden timesteps: contrastive losses over windows
and over timesteps, at all scales. N are the timesteps that both crops share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.models.adapters import count_channels
from bitimely_core.models.base import Model, PlainAdapter
from bitimely_core.models.convolution import Conv1d, convolve
from bitimely_core.models.tokenizers import StepTokenizer, find_row_ends, get_observed, take_steps
from bitimely_core.objectives.token_objectives import Result
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.contrast import (
    NOTICE,
    ContrastiveModel,
    configure_signals,
    contrast,
    make_contrastive_result,
    require_rows,
)

KERNEL = 3


class TS2VecAdapter(PlainAdapter):
    """The parameters that depend on the channels: the linear map of each timestep."""

    tokenizer: StepTokenizer
    embedding: nn.Linear

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        self.tokenizer = StepTokenizer(count_channels(config))
        self.embedding = nn.Linear(self.tokenizer.width, config.ffn_dim)
        self.output = nn.ModuleDict()


class DilatedBlock(nn.Module):
    """Two convolutions of one dilation and a residual connection (through a convolution of width 1
    where `widen`).
    """

    def __init__(self, inputs: int, outputs: int, dilation: int, *, widen: bool) -> None:
        super().__init__()
        self.first = Conv1d(inputs, outputs, KERNEL, padding=dilation, dilation=dilation)
        self.second = Conv1d(outputs, outputs, KERNEL, padding=dilation, dilation=dilation)
        self.shortcut: nn.Module = Conv1d(inputs, outputs, 1) if widen else nn.Identity()

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """[B, inputs, T] -> [B, outputs, T]; what is not `real` [B, 1, T] (None: all) is read as 0,
        so that padding has no effect.
        """

        def blank(y: Tensor) -> Tensor:
            return y if real is None else y * real

        y = _convolve(self.second, blank(F.gelu(_convolve(self.first, blank(F.gelu(x))))))
        return y + (_convolve(self.shortcut, x) if isinstance(self.shortcut, nn.Conv1d) else x)


def _convolve(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """`conv(x)` of channels-last x [B, C, T], as an image of height 1: avoids a copy, a fifth of
    the time. Outer taps that read only zeros are skipped.
    """
    weight, padding = conv.weight, int(conv.padding[0])
    if conv.dilation[0] >= x.shape[2]:
        weight, padding = weight[..., weight.shape[2] // 2, None], 0
    ordered = weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    return convolve(
        F.conv2d,
        x.unsqueeze(2),
        ordered,
        conv.bias,
        padding=(0, padding),
        dilation=(1, conv.dilation[0]),
    ).squeeze(2)


class TS2Vec(ContrastiveModel):
    """Residual blocks of dilated convolutions over every timestep."""

    adapter_type = TS2VecAdapter
    adapter: TS2VecAdapter
    can_hide = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        widths = [config.ffn_dim] * config.layers + [config.dim]
        inputs = [config.ffn_dim, *widths]
        last = len(widths) - 1
        self.blocks = nn.ModuleList(
            DilatedBlock(inputs[depth], width, 2**depth, widen=depth == last)
            for depth, width in enumerate(widths)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.pooled_width = config.dim

    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """The state of every timestep [B, T, D], and their maximum; `hide` timesteps are 0 behind
        the linear map.
        """
        adapter = self.adapter_of(batch)
        tokens, _, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens)
        if batch.mask is not None:  # any missing channel makes a timestep missing
            x = x.masked_fill(~get_observed(batch).all(-1, keepdim=True), 0.0)
        if hide is not None:
            x = x.masked_fill(hide[..., None], 0.0)
        inside = None if batch.mask is None else real[:, None].to(x.dtype)
        y = x.transpose(1, 2)
        for block in self.blocks:
            y = block(y, inside)
        y = self.dropout(y)
        seen = y if inside is None else y.masked_fill(~real[:, None], -torch.inf)
        pooled = torch.where(real.any(1)[:, None], seen.amax(2), 0.0)
        states = y.transpose(1, 2)
        return Encoded(tokens, None, real, (states,), None, pooled, None)


@models(
    ModelFacts(
        family="ts2vec",
        objective="ts2vec",
        capabilities=("ts2vec",),
        readout="max",
        step=5,  # H is a fifth of it
        source="Yue et al. 2022, TS2Vec: Towards Universal Representation of Time Series",
        known="Contrasting times costs the square of the window: raise objective.temporal_unit "
        "for long ones; its own size is 0.64 M",
    )
)
def ts2vec(config: ModelConfig) -> TS2Vec:
    """TS2Vec: dilated convolutions; windows and timesteps are contrasted at all scales."""
    return TS2Vec(configure_signals(config.model_copy(update={"value_dim": config.dim})))


# --- the objective

HIDDEN = 0.5  # share of hidden timesteps


class RowCrops(NamedTuple):
    """Two crops of each row; the last `shared` steps of the first are the first ones of the
    second.
    """

    first: Tensor  # int64 [B], where a row's first crop starts
    second: Tensor
    lengths: tuple[int, int]
    shared: int


class TS2VecObjectiveConfig(ObjectiveConfig):
    """Settings of ts2vec."""

    temporal_unit: int = Field(
        0,
        ge=0,
        description="Contrast times from scale 2^n on; larger values spare time and memory.",
    )


@objectives(
    ObjectiveFacts(
        leak_free=None,
        requires="ts2vec",
        config=TS2VecObjectiveConfig,
        notice=f"ts2vec: {NOTICE}",
        passes=2,
        rows=2,
    ),
    name="ts2vec",
)
def compute_ts2vec_loss(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: TS2VecObjectiveConfig
) -> Result:
    """Two overlapping crops with half of the timesteps hidden: each timestep finds its partner
    among the rows, and among the times.
    """
    assert isinstance(model, TS2Vec)
    require_rows("ts2vec", batch)
    ends = find_row_ends(batch)
    crops = draw_crops(ends.cpu(), config.temporal_unit, generator)
    first = _encode_crop(model, batch, crops.first, crops.lengths[0], generator)[:, -crops.shared :]
    second = _encode_crop(model, batch, crops.second, crops.lengths[1], generator)[
        :, : crops.shared
    ]
    valid = None
    if batch.mask is not None:
        valid = (
            crops.second.to(ends.device, non_blocking=True)[:, None]
            + torch.arange(crops.shared, device=ends.device)
            < ends[:, None]
        )
    instance, temporal, blind = compute_hierarchical_loss(
        first, second, valid, config.temporal_unit
    )
    return make_contrastive_result(
        {"instance": instance, "temporal": temporal}, blind, len(batch.values)
    )


def draw_crops(ends: Tensor, unit: int, generator: Generator | None = None) -> RowCrops:
    """Crops of rows with `ends` [B] timesteps: N ~ U{2^(unit + 1) .. T} shared ones, [a, b), and
    each row moved by its own offset.

    The first crop is [start, b) with start <= a, the second one [a, end) with end >= b. A row that
    is shorter than the two together is not moved.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    longest = max(int(ends.max()), 1)
    shared = draw(min(2 ** (unit + 1), longest), longest)
    a = draw(0, longest - shared)
    b = a + shared
    start, end = draw(0, a), draw(b, longest)
    offsets = torch.tensor([draw(-start, max(int(row) - end, -start)) for row in ends.tolist()])
    return RowCrops(start + offsets, a + offsets, (b - start, end - a), shared)


def _encode_crop(
    model: TS2Vec, batch: Batch, starts: Tensor, length: int, generator: Generator | None
) -> Tensor:
    """States [B, length, D] of a crop, half of its timesteps hidden."""
    index = (starts[:, None] + torch.arange(length)).to(batch.values.device, non_blocking=True)
    mask = None if batch.mask is None else take_steps(batch.mask, index)
    hide = (torch.rand(index.shape, generator=generator) < HIDDEN).to(
        index.device, non_blocking=True
    )
    crop = Batch(take_steps(batch.values, index), mask=mask, source=batch.source)
    states: Tensor = model(crop, hide=hide).hidden[-1]
    return states


def compute_hierarchical_loss(
    first: Tensor, second: Tensor, valid: Tensor | None = None, unit: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The hierarchical loss of two views [B, N, D], `valid` bool [B, N] (None: all).

    At each scale (the maximum over pairs of times makes the next one, down to one time) half of
    each of two questions: of every time across the rows (instance), of every row across its times
    (temporal, from scale `unit` on, not of a single time).

    Returns the instance and the temporal part, both divided by the number of scales, and their sum
    where all vectors are the same.
    """
    zero = first.sum() * 0.0
    instance, temporal, blind = zero, zero, zero.detach()
    scale = 0
    while True:
        across = contrast(
            first.transpose(0, 1), second.transpose(0, 1), None if valid is None else valid.T
        )
        instance, blind = instance + across[0] / 2, blind + across[1] / 2
        if scale >= unit and first.shape[1] > 1:
            along = contrast(first, second, valid)
            temporal, blind = temporal + along[0] / 2, blind + along[1] / 2
        scale += 1
        if first.shape[1] < 2:
            return instance / scale, temporal / scale, blind / scale
        even = first.shape[1] // 2 * 2  # maxima over pairs of times; an odd last time is left out
        pairs = [(view[:, :even:2], view[:, 1:even:2]) for view in (first, second)]
        if valid is not None:  # of the valid one where one of a pair is not
            former, latter = valid[:, :even:2], valid[:, 1:even:2]
            pairs = [
                (
                    a.masked_fill((latter & ~former)[..., None], -torch.inf),
                    b.masked_fill((former & ~latter)[..., None], -torch.inf),
                )
                for a, b in pairs
            ]
            valid = former | latter
        first, second = (torch.maximum(*pair) for pair in pairs)
