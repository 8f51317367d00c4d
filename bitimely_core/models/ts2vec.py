"""TS2Vec (Yue et al. 2022): dilated convolutions give a vector per timestep; pre-training contrasts windows and timesteps at all scales.

A linear map of each timestep to H channels; L residual blocks of H channels and one of D, block i with dilation 2^i:
y = x + Conv(GELU(Conv(GELU(x)))), dropout behind the last one. A timestep of which any channel is missing is 0 behind the linear map, as
are those that the objective hides. The vector of a window is the maximum over its timesteps.

Legend: B batch, T timesteps, V channels, H hidden channels (`ffn_dim`), L blocks of them (`layers`), D width of the states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.base import Adapter
from bitimely_core.models.contrast import ContrastiveModel, configure_signals
from bitimely_core.models.convolution import Conv1d, convolve
from bitimely_core.models.tokenizers import StepTokenizer
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded

KERNEL = 3


class TS2VecAdapter(Adapter):
    """The parameters that depend on the channels: the linear map of each timestep."""

    tokenizer: StepTokenizer
    embedding: nn.Linear

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        nn.Module.__init__(self)
        self.tokenizer = StepTokenizer(1 if config.channel_independent else config.channels)
        self.embedding = nn.Linear(self.tokenizer.width, config.ffn_dim)
        self.output = nn.ModuleDict()


class DilatedBlock(nn.Module):
    """Two convolutions of one dilation and a residual connection (through a convolution of width 1 where `widen`)."""

    def __init__(self, inputs: int, outputs: int, dilation: int, *, widen: bool) -> None:
        super().__init__()
        self.first = Conv1d(inputs, outputs, KERNEL, padding=dilation, dilation=dilation)
        self.second = Conv1d(outputs, outputs, KERNEL, padding=dilation, dilation=dilation)
        self.shortcut: nn.Module = Conv1d(inputs, outputs, 1) if widen else nn.Identity()

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """[B, inputs, T] -> [B, outputs, T]; what is not `real` [B, 1, T] (None: all) is read as 0, so that padding has no effect."""

        def own(y: Tensor) -> Tensor:
            return y if real is None else y * real

        y = _convolve(self.second, own(F.gelu(_convolve(self.first, own(F.gelu(x))))))
        return y + (_convolve(self.shortcut, x) if isinstance(self.shortcut, nn.Conv1d) else x)


def _convolve(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """`conv(x)` of channels-last x [B, C, T], as an image of height 1: avoids a copy, a fifth of the time. Outer taps that read only zeros are skipped."""
    weight, padding = conv.weight, int(conv.padding[0])
    if conv.dilation[0] >= x.shape[2]:
        weight, padding = weight[..., weight.shape[2] // 2, None], 0
    ordered = weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    return convolve(F.conv2d, x.unsqueeze(2), ordered, conv.bias, padding=(0, padding), dilation=(1, conv.dilation[0])).squeeze(2)


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
        self.blocks = nn.ModuleList(DilatedBlock(inputs[at], width, 2**at, widen=at == last) for at, width in enumerate(widths))
        self.dropout = nn.Dropout(config.dropout)
        self.pooled_width = config.dim

    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """The state of every timestep [B, T, D], and their maximum; `hide` timesteps are 0 behind the linear map."""
        adapter = self.adapter_of(batch)
        tokens, _, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens)
        if batch.mask is not None:  # any missing channel makes a timestep missing
            x = x.masked_fill(~(batch.mask.all(-1) if batch.mask.dim() == 3 else batch.mask)[..., None], 0.0)
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
        known="Contrasting times costs the square of the window: raise objective.temporal_unit for long ones; its own size is 0.64 M",
    )
)
def ts2vec(config: ModelConfig) -> TS2Vec:
    """TS2Vec: dilated convolutions; windows and timesteps are contrasted at all scales."""
    return TS2Vec(configure_signals(config.model_copy(update={"value_dim": config.dim})))
