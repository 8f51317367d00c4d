"""InceptionTime (Ismail Fawaz et al. 2020): modules of convolutions with kernels of several lengths
side by side.

A module maps its input by a bottleneck, a linear map of each step to 32 features, and reads the
result with kernels of 40, 20 and 10; beside them the largest of three neighbouring steps of the
input is mapped by itself. The four results of D / 4 features are concatenated: ReLU(BN(.)). Behind
every third module its result y joins the input x of the three: ReLU(y + BN(x W)). A window of one
channel has no bottleneck in the first module. The vector is the mean over time.

This is one network. The method of the paper is the mean of the predictions of five.

Legend: B batch, V channels, n steps, C features, D width of a module.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.base import Adapter
from bitimely_core.models.contract import config_error
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.layers import normalise_map
from bitimely_core.models.tokenizers import mask_before
from bitimely_core.registry import models
from bitimely_core.zoo.convolutions import MapAdapter, MapModel, NormedConv
from bitimely_core.zoo.patchtst import BatchNorm
from bitimely_core.zoo.supervised import SupervisedFacts

BRANCHES = 4  # three kernels and the largest of neighbours
RESIDUAL = 3  # modules from one residual connection to the next


class InceptionTimeConfig(ModelConfig):
    """Settings of InceptionTime."""

    kernel: int = Field(
        40, ge=4, description="Samples of the longest kernel; the others have a half and a quarter."
    )
    bottleneck: int = Field(32, ge=1, description="Features that the kernels of a module read.")


class InceptionModule(nn.Module):
    """One module, from `inputs` features to D."""

    def __init__(self, inputs: int, config: InceptionTimeConfig) -> None:
        super().__init__()
        width, narrow = config.dim // BRANCHES, inputs
        self.bottleneck: nn.Module = nn.Identity()
        if inputs > 1:
            narrow = config.bottleneck
            self.bottleneck = Conv1d(inputs, narrow, 1, bias=False)
        self.sizes = [config.kernel // part for part in (1, 2, 4)]
        self.kernels = nn.ModuleList(Conv1d(narrow, width, size, bias=False) for size in self.sizes)
        self.beside = Conv1d(inputs, width, 1, bias=False)
        self.norm = BatchNorm(config.dim)

    def forward(self, x: Tensor, counts: Tensor | None) -> Tensor:
        """[B, C, n] -> [B, D, n]; behind its `counts` [B] steps a row is 0."""
        narrow = self.bottleneck(x)
        # an even kernel reads one step more behind than before
        parts = [
            kernel(F.pad(narrow, ((size - 1) // 2, size // 2)))
            for kernel, size in zip(self.kernels, self.sizes, strict=True)
        ]
        parts.append(self.beside(pool_neighbours(x, counts)))
        return F.relu(normalise_map(self.norm, torch.cat(parts, 1), counts))


def pool_neighbours(x: Tensor, counts: Tensor | None) -> Tensor:
    """The largest of each step and its neighbours, of [B, C, n]; steps behind a row's end are none
    of them.

    With torch's pooling a graph would be for one length.
    """
    behind = None if counts is None else ~mask_before(counts, x.shape[2])[:, None]
    least = torch.finfo(x.dtype).min
    x = x if behind is None else x.masked_fill(behind, least)
    beside = F.pad(x, (1, 1), value=least)
    largest = torch.maximum(torch.maximum(beside[..., :-2], x), beside[..., 2:])
    return largest if behind is None else largest.masked_fill(behind, 0.0)


class InceptionAdapter(MapAdapter):
    """What depends on the channels: the first module, and the map around the first three."""

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        super().build(config)
        assert isinstance(config, InceptionTimeConfig)
        channels = self.tokenizer.channels
        self.first = InceptionModule(channels, config)
        self.shortcut: NormedConv | None = None
        if config.layers >= RESIDUAL:
            self.shortcut = NormedConv(channels, config.dim, 1)


class InceptionTime(MapModel):
    """The first module of the adapter, all others, and the maps around each further three."""

    adapter_type = InceptionAdapter

    def __init__(self, config: InceptionTimeConfig) -> None:
        if config.dim % BRANCHES:
            raise config_error(f"{config.dim}", f"expected a multiple of {BRANCHES}", "model.dim")
        super().__init__(config)
        self.later = nn.ModuleList(
            InceptionModule(config.dim, config) for _ in range(config.layers - 1)
        )
        self.shortcuts = nn.ModuleList(
            NormedConv(config.dim, config.dim, 1) for _ in range(config.layers // RESIDUAL - 1)
        )

    def compute_map(self, x: Tensor, counts: Tensor | None, adapter: Adapter) -> Tensor:
        """As `MapModel.compute_map`."""
        assert isinstance(adapter, InceptionAdapter)
        shortcuts = iter((adapter.shortcut, *self.shortcuts))
        y, start = x, x
        for number, module in enumerate((adapter.first, *self.later), 1):
            y = module(y, counts)
            if number % RESIDUAL == 0:
                shortcut = next(shortcuts)
                assert shortcut is not None
                y = F.relu(y + shortcut(start, counts))
                start = y
        return y


@models(
    SupervisedFacts(
        config=InceptionTimeConfig,
        family="inceptiontime",
        step=BRANCHES,
        source="Ismail Fawaz et al. 2020, InceptionTime: Finding AlexNet for Time Series "
        "Classification",
        known="Supervised only; the paper's results are of five networks together, this is one",
    )
)
def inceptiontime(config: InceptionTimeConfig) -> InceptionTime:
    """InceptionTime: modules of convolutions with kernels of 40, 20 and 10 side by side, averaged
    over time; trained with its head alone.
    """
    return InceptionTime(config)
