"""ResNet for time series (Wang et al. 2017), with strides: a stem, then residual blocks.

y = ReLU(BN(stem(x))), kernel 9. Each block is y = ReLU(BN(conv(ReLU(BN(conv y)))) + BN(y W)) with
kernels of 5; its first convolution and the map W beside it have the stride 2. The first block is
D / 4 wide, the second D / 2 and all others D. The vector is the mean over time.

The paper's blocks have three convolutions of kernels 8, 5 and 3 and no stride. Windows here are
long, so that each block halves the steps: a step of the last map sees the rhythm, at a tenth of
the cost.

Legend: B batch, V channels, n steps, C features, F steps of the last map, D its width.
"""

from __future__ import annotations

import itertools

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.base import Adapter
from bitimely_core.models.contract import config_error
from bitimely_core.models.convolution import STRIDE, ResidualBlock
from bitimely_core.registry import models
from bitimely_core.zoo.convolutions import MapAdapter, MapModel, NormedConv, reduce_counts
from bitimely_core.zoo.supervised import SupervisedFacts

STEM = 9  # kernel of the stem
# longest window in samples -> stride of the stem, blocks; longer ones as the last
SIZES = ((500, 1, 3), (2000, 2, 4), (float("inf"), 4, 5))


class ResNetConfig(ModelConfig):
    """Settings of ResNet."""

    stem: int | None = Field(
        None, ge=1, le=STEM, description="Stride of the first convolution; none: by the length."
    )
    blocks: int | None = Field(
        None, ge=3, le=12, description="Residual blocks of stride 2; none: 3 to 5 by the length."
    )

    @property
    def map_stride(self) -> int:
        """That of the stem times 2 for each block."""
        return (self.stem or 1) * STRIDE ** (self.blocks or 0)


def choose_sizes(config: ResNetConfig) -> ResNetConfig:
    """The configuration with stride and blocks for its windows, where they are not given."""
    _, stem, blocks = next(size for size in SIZES if config.length <= size[0])
    return config.model_copy(
        update={"stem": config.stem or stem, "blocks": config.blocks or blocks}
    )


def list_widths(config: ModelConfig) -> list[int]:
    """Features behind the stem and behind each block: D / 4, D / 4, D / 2, D, D .. ."""
    assert isinstance(config, ResNetConfig)
    assert config.blocks is not None
    return [config.dim // 4, config.dim // 4, config.dim // 2] + [config.dim] * (config.blocks - 2)


class ResNetAdapter(MapAdapter):
    """The stem, which depends on the channels."""

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        super().build(config)
        assert isinstance(config, ResNetConfig)
        self.stem = NormedConv(
            self.tokenizer.channels, list_widths(config)[0], STEM, config.stem or 1
        )


class ResNet(MapModel):
    """The stem of the adapter and the residual blocks."""

    adapter_type = ResNetAdapter

    def __init__(self, config: ResNetConfig) -> None:
        if config.dim % 4:
            raise config_error(f"{config.dim}", "expected a multiple of 4", "model.dim")
        super().__init__(choose_sizes(config))
        self.blocks = nn.ModuleList(
            ResidualBlock(*pair, conv=NormedConv, activate=F.relu)
            for pair in itertools.pairwise(list_widths(self.config))
        )

    def compute_map(self, x: Tensor, counts: Tensor | None, adapter: Adapter) -> Tensor:
        """As `MapModel.compute_map`."""
        assert isinstance(adapter, ResNetAdapter)
        counts = reduce_counts(counts, adapter.stem.conv.stride[0])
        y = F.relu(adapter.stem(x, counts))
        for block in self.blocks:
            counts = reduce_counts(counts, STRIDE)
            y = block(y, counts)
        return y


@models(
    SupervisedFacts(
        config=ResNetConfig,
        family="resnet",
        lr=3e-3,
        step=4,  # the first block is a quarter as wide
        source="Wang et al. 2017, Time Series Classification from Scratch with Deep Neural "
        "Networks: A Strong Baseline",
        known="Supervised only; blocks and strides follow the length of the windows, where the "
        "paper has three blocks without strides",
    )
)
def resnet(config: ResNetConfig) -> ResNet:
    """ResNet: residual blocks of convolutions with batch norm, averaged over time; trained with its
    head alone.
    """
    return ResNet(config)
