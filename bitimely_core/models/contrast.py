"""Base class of the contrastive models, which have no targets, and the convolutional encoder of TS-TCC and TF-C.

Legend: B batch, T timesteps, V channels, F steps of the map behind the convolutions, D width.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.base import Adapter, Model
from bitimely_core.models.contract import Direction, Which, config_error, objective_error
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.layers import normalise_tokens
from bitimely_core.models.patchtst import BatchNorm, refuse_directions
from bitimely_core.models.tokenizers import StepTokenizer, find_row_ends, mask_before
from bitimely_core.types import Batch, Encoded

KERNEL = 8  # of the second and third convolution

Count = TypeVar("Count", int, Tensor)
Config = TypeVar("Config", bound=ModelConfig)


class ConvolutionConfig(ModelConfig):
    """Settings of TS-TCC and TF-C."""

    first_kernel: int = Field(8, ge=1, description="Samples of the first kernel.")
    first_stride: int = Field(1, ge=1, description="Stride of the first convolution.")


class ContrastiveModel(Model, ABC):
    """A model pre-trained by a contrastive loss: no predicted tokens, output projection or final norm. A subclass adds `encode`."""

    can_hide = False  # whether timesteps can be hidden

    def __init__(self, config: ModelConfig) -> None:
        if config.tokenizer == "codes":
            raise config_error(f"codes for {config.name}", "expected signals", "model.tokenizer", "Choose another model")
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Identity()})

    @abstractmethod
    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """States and vector of a batch. `batch` as `expand_channels` returns it; `hide` bool [B, T] or None."""

    def forward(
        self, batch: Batch, *, directions: Iterable[Direction] | None = None, hide: Tensor | None = None, attention: bool = False
    ) -> Encoded:
        """Encode signals [B, T, V]; there are no maps. Raises UserError (config, exit 2): directions, or `hide` where nothing can be
        hidden.
        """
        refuse_directions(self, directions)
        if hide is not None and not self.can_hide:
            raise objective_error(self.config, f"hidden tokens for {self.config.name}", "it has none to hide")
        return self.encode(self.expand_channels(batch), hide)

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Raises UserError (config, exit 2): there are no predictions."""
        raise objective_error(self.config, f"predicted tokens of {self.config.name}", "it predicts none")

    def measure(self, batches: Iterable[Batch]) -> float:
        """1: there are no targets."""
        return 1.0


def count_convolved(count: Count, kernel: int, stride: int) -> Count:
    """Steps behind a convolution of `count` samples, padded by half its kernel on both sides."""
    return (count + 2 * (kernel // 2) - kernel) // stride + 1


def count_map_steps(count: Count, kernel: int, stride: int) -> Count:
    """F of `count` samples: three convolutions, each with a pooling of two behind it."""
    for of, step in ((kernel, stride), (KERNEL, 1), (KERNEL, 1)):
        count = count_convolved(count, of, step) // 2 + 1
    return count


def list_filters(dim: int) -> tuple[int, int, int]:
    """Of the three convolutions: D / 4, D / 2 and D."""
    return max(1, dim // 4), max(1, dim // 2), dim


class MapTokenizer(StepTokenizer):
    """The samples, as `StepTokenizer`; the convolutions reduce them to F steps."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__(channels)
        self.kernel, self.stride = kernel, stride

    def count(self, length: int) -> int:
        """F of windows of `length` samples."""
        return count_map_steps(length, self.kernel, self.stride)


class ConvolutionAdapter(Adapter):
    """The parameters that depend on the channels: the first convolution of each encoder."""

    tokenizer: MapTokenizer
    encoders: tuple[str, ...] = ("time",)

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        nn.Module.__init__(self)
        assert isinstance(config, ConvolutionConfig)
        kernel, stride = config.first_kernel, config.first_stride
        self.tokenizer = MapTokenizer(1 if config.channel_independent else config.channels, kernel, stride)
        first, channels = list_filters(config.dim)[0], self.tokenizer.width
        self.first = nn.ModuleDict({name: Conv1d(channels, first, kernel, stride, kernel // 2, bias=False) for name in self.encoders})
        self.output = nn.ModuleDict()


class ConvolutionTrunk(nn.Module):
    """Batch norm, ReLU and pooling behind each of three convolutions of D / 4, D / 2 and D filters; the first is the adapter's.

    Batch statistics run over the rows and their own steps; behind its end a row is 0, as if it stood alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        widths = list_filters(config.dim)
        self.convs = nn.ModuleList(Conv1d(a, b, KERNEL, padding=KERNEL // 2, bias=False) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(BatchNorm(width) for width in widths)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, first: nn.Module, ends: Tensor | None) -> Tensor:
        """Samples [B, T, V], of which `ends` [B] are a row's own (None: all), through the convolution `first` to the map [B, F, D]."""
        assert isinstance(first, nn.Conv1d)
        y, counts = x.transpose(1, 2), ends
        for at, (conv, norm) in enumerate(zip([first, *self.convs], self.norms, strict=True)):
            y = conv(y)
            if counts is not None:
                counts = count_convolved(counts, conv.kernel_size[0], conv.stride[0])
            y = F.max_pool1d(F.relu(_normalise(norm, y, counts)), 2, 2, padding=1)
            counts = None if counts is None else counts // 2 + 1
            y = self.dropout(y) if at == 0 else y
        return y.transpose(1, 2)


def compute_map(trunk: nn.Module, adapter: Adapter, encoder: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """The map [B, F, D] of a batch by the first convolution of `encoder` and `trunk`, and which steps are real [B, F]."""
    assert isinstance(adapter, ConvolutionAdapter)
    tokenizer, ends = adapter.tokenizer, find_row_ends(batch)
    z: Tensor = trunk(tokenizer(batch)[0], adapter.first[encoder], None if batch.mask is None else ends)
    counts = torch.where(ends > 0, count_map_steps(ends, tokenizer.kernel, tokenizer.stride), 0)
    return z, mask_before(counts, z.shape[1])


def configure_signals(config: Config) -> Config:
    """The configuration of a contrastive model; codes stay, and `ContrastiveModel` refuses them."""
    own = {"tokenizer": "steps", "output_heads": "shared", "target": "raw"}
    return config if config.tokenizer == "codes" else config.model_copy(update=own)


def _normalise(norm: nn.Module, y: Tensor, counts: Tensor | None) -> Tensor:
    """[B, C, n] -> [B, C, n], 0 from `counts` [B] on."""
    return norm(y) if counts is None else normalise_tokens(norm, y.mT, mask_before(counts, y.shape[2])).mT
