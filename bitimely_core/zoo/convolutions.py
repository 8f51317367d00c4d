"""What the supervised networks of convolutions share (ResNet, InceptionTime): the vector of a
window is the mean of its last map over time.

A sample that was not observed is read as 0. A step of the map stands for the samples that its
stride brings together, and weighs as much in the mean as the share of them that was observed. So a
gap counts less, and a row is the same with and without padding behind its end.

Legend: B batch, T timesteps, V channels, C features of a map, F steps of the last map, D its width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import count_channels
from bitimely_core.models.base import Adapter, PlainAdapter
from bitimely_core.models.contract import refuse_codes
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.layers import normalise_map
from bitimely_core.models.tokenizers import StepTokenizer, find_row_ends, get_observed, mask_before
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import BatchNorm
from bitimely_core.zoo.supervised import SupervisedModel


class StrideTokenizer(StepTokenizer):
    """The samples, as `StepTokenizer`; the convolutions bring `stride` of them together."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__(channels)
        self.stride = stride

    def count(self, length: int) -> int:
        """F of windows of `length` samples."""
        return (length + self.stride - 1) // self.stride

    def weigh_steps(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weight [B, F] of each step, the observed share of its samples within the row, and which
        steps are real, bool [B, F].
        """
        rows, length = batch.values.shape[:2]
        steps, ends = self.count(length), find_row_ends(batch)
        real = mask_before((ends + self.stride - 1) // self.stride, steps)
        if batch.mask is None:
            return torch.ones_like(real, dtype=batch.values.dtype), real
        seen = get_observed(batch).to(batch.values.dtype).mean(-1)
        inside = mask_before(ends, length).to(seen)
        seen, inside = (
            F.pad(share, (0, steps * self.stride - length)).reshape(rows, steps, self.stride)
            for share in (seen, inside)
        )
        return seen.sum(-1) / inside.sum(-1).clamp(min=1), real


class MapAdapter(PlainAdapter):
    """The part of a network that depends on the channels; subclasses add it."""

    tokenizer: StrideTokenizer

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        self.tokenizer = StrideTokenizer(count_channels(config), config.map_stride)
        self.output = nn.ModuleDict()


class NormedConv(nn.Module):
    """A convolution without bias and its batch norm. Step n reads samples around `stride` n.

    Statistics run over the rows and their own steps; behind its end a row is 0, as if it stood
    alone.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = BatchNorm(outputs)

    def forward(self, y: Tensor, counts: Tensor | None) -> Tensor:
        """[B, C, n] -> [B, outputs, ceil(n / stride)], of which the first `counts` [B] steps are a
        row's own (None: all).
        """
        return normalise_map(self.norm, self.conv(y), counts)


def reduce_counts(counts: Tensor | None, stride: int) -> Tensor | None:
    """A row's own steps behind a convolution with `stride`."""
    return None if counts is None else (counts + stride - 1) // stride


class MapModel(SupervisedModel, ABC):
    """A network of convolutions, trained with its head alone. A subclass adds `compute_map`."""

    adapter_type = MapAdapter

    def __init__(self, config: ModelConfig) -> None:
        refuse_codes(config)
        super().__init__(config.model_copy(update={"tokenizer": "steps"}))
        self.dropout = nn.Dropout(config.dropout)
        self.pooled_width = config.dim

    @abstractmethod
    def compute_map(self, x: Tensor, counts: Tensor | None, adapter: Adapter) -> Tensor:
        """The last map [B, D, F] of samples [B, V, T], of which the first `counts` [B] are a row's
        own (None: all). Behind its end a row is 0.
        """

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """The steps of the last map [B, F, D], and their weighted mean as vector [B, D]."""
        adapter = self.adapter_of(batch)
        assert isinstance(adapter, MapAdapter)
        counts = None if batch.mask is None else find_row_ends(batch)
        z = self.compute_map(adapter.tokenizer(batch)[0].mT, counts, adapter).mT
        weights, real = adapter.tokenizer.weigh_steps(batch)
        weights = weights.to(z.dtype)[..., None]
        mean = (z * weights).sum(1) / weights.sum(1).clamp(min=torch.finfo(z.dtype).tiny)
        return Encoded(None, None, real, (z,), None, self.dropout(mean))
