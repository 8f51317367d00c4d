"""What contrastive models and their objectives share (TS2Vec, TS-TCC, TF-C, CPC).

First the base class of models without targets, and the convolutional encoder of TS-TCC and TF-C.
Then the contrastive loss, and the augmentations of TS-TCC and TF-C.

Each of K items has two views. Each view is classified among the other 2K - 1 for its positive; the
loss is the mean cross-entropy. The other items are the negatives, so the size of a micro-batch
matters, and at least 2 rows are required.

`rel` is the loss divided by that of a constant representation: 1 = no discrimination, the
representation may have collapsed.

Legend: B batch, T timesteps, V channels, F steps of the map behind the convolutions, G groups, K
items in a group, D width.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.errors import usage_error
from bitimely_core.models.adapters import count_channels
from bitimely_core.models.base import Adapter, Model, PlainAdapter
from bitimely_core.models.contract import Direction, Which, objective_error, refuse_codes
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.layers import normalise_map
from bitimely_core.models.tokenizers import StepTokenizer, find_row_ends, mask_before, take_steps
from bitimely_core.objectives.token_objectives import Result, pack_result
from bitimely_core.ops.fused import widen
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import BatchNorm, refuse_directions

KERNEL = 8  # of the second and third convolution

Count = TypeVar("Count", int, Tensor)
Config = TypeVar("Config", bound=ModelConfig)


class ConvolutionConfig(ModelConfig):
    """Settings of TS-TCC and TF-C."""

    first_kernel: int = Field(8, ge=1, description="Samples of the first kernel.")
    first_stride: int = Field(1, ge=1, description="Stride of the first convolution.")


class ContrastiveModel(Model, ABC):
    """A model pre-trained by a contrastive loss: no predicted tokens, output projection or final
    norm. A subclass adds `encode`.
    """

    can_hide = False  # whether timesteps can be hidden

    def __init__(self, config: ModelConfig) -> None:
        refuse_codes(config)
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Identity()})

    @abstractmethod
    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """States and vector of a batch. `batch` as `expand_channels` returns it; `hide` bool [B, T]
        or None.
        """

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode signals [B, T, V]; there are no maps. Raises UserError (config, exit 2):
        directions, or `hide` where nothing can be hidden.
        """
        refuse_directions(self, directions)
        if hide is not None and not self.can_hide:
            raise objective_error(
                self.config, f"hidden tokens for {self.config.name}", "it has none to hide"
            )
        return self.encode(self.expand_channels(batch), hide)

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Raises UserError (config, exit 2): there are no predictions."""
        raise objective_error(
            self.config, f"predicted tokens of {self.config.name}", "it predicts none"
        )

    def measure(self, batches: Iterable[Batch]) -> float:
        """1: there are no targets."""
        return 1.0


def count_convolved(count: Count, kernel: int, stride: int) -> Count:
    """Steps behind a convolution of `count` samples, padded by half its kernel on both sides."""
    return (count + 2 * (kernel // 2) - kernel) // stride + 1


def count_map_steps(count: Count, kernel: int, stride: int) -> Count:
    """F of `count` samples: three convolutions, each with a pooling of two behind it."""
    for size, step in ((kernel, stride), (KERNEL, 1), (KERNEL, 1)):
        count = count_convolved(count, size, step) // 2 + 1
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


class ConvolutionAdapter(PlainAdapter):
    """The parameters that depend on the channels: the first convolution of each encoder."""

    tokenizer: MapTokenizer
    encoders: tuple[str, ...] = ("time",)

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        assert isinstance(config, ConvolutionConfig)
        kernel, stride = config.first_kernel, config.first_stride
        self.tokenizer = MapTokenizer(count_channels(config), kernel, stride)
        first, channels = list_filters(config.dim)[0], self.tokenizer.width
        self.first = nn.ModuleDict(
            {
                name: Conv1d(channels, first, kernel, stride, kernel // 2, bias=False)
                for name in self.encoders
            }
        )
        self.output = nn.ModuleDict()


class ConvolutionTrunk(nn.Module):
    """Batch norm, ReLU and pooling behind each of three convolutions of D / 4, D / 2 and D filters;
    the first is the adapter's.

    Batch statistics run over the rows and their own steps; behind its end a row is 0, as if it
    stood alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        widths = list_filters(config.dim)
        self.convs = nn.ModuleList(
            Conv1d(a, b, KERNEL, padding=KERNEL // 2, bias=False)
            for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(map(BatchNorm, widths))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, first: nn.Module, ends: Tensor | None) -> Tensor:
        """Samples [B, T, V], of which `ends` [B] are a row's own (None: all), through the
        convolution `first` to the map [B, F, D].
        """
        assert isinstance(first, nn.Conv1d)
        y, counts = x.transpose(1, 2), ends
        for depth, (conv, norm) in enumerate(zip([first, *self.convs], self.norms, strict=True)):
            y = conv(y)
            if counts is not None:
                counts = count_convolved(counts, conv.kernel_size[0], conv.stride[0])
            y = F.max_pool1d(F.relu(normalise_map(norm, y, counts)), 2, 2, padding=1)
            counts = None if counts is None else counts // 2 + 1
            y = self.dropout(y) if depth == 0 else y
        return y.transpose(1, 2)


def compute_map(
    trunk: nn.Module, adapter: Adapter, encoder: str, batch: Batch
) -> tuple[Tensor, Tensor]:
    """The map [B, F, D] of a batch by the first convolution of `encoder` and `trunk`, and which
    steps are real [B, F].
    """
    assert isinstance(adapter, ConvolutionAdapter)
    tokenizer, ends = adapter.tokenizer, find_row_ends(batch)
    z: Tensor = trunk(
        tokenizer(batch)[0], adapter.first[encoder], None if batch.mask is None else ends
    )
    counts = torch.where(ends > 0, count_map_steps(ends, tokenizer.kernel, tokenizer.stride), 0)
    return z, mask_before(counts, z.shape[1])


def configure_signals(config: Config) -> Config:
    """The configuration of a contrastive model; codes stay, and `ContrastiveModel` refuses them."""
    if config.tokenizer == "codes":
        return config
    settings = {"tokenizer": "steps", "output_heads": "shared", "target": "raw"}
    return config.model_copy(update=settings)


# --- the objective

NOTICE = (
    "contrastive, without targets; rel 1.0 = the same vector for everything. Losses of other batch "
    "sizes cannot be compared."
)
TEMPERATURE = 0.2
BLOCK = 2**20  # scores that are held at once: 4 MB in float32


class AugmentationConfig(ObjectiveConfig):
    """Settings of the augmentations of TS-TCC and TF-C."""

    jitter: float = Field(0.8, ge=0, description="Standard deviation of added noise.")
    scaling: float = Field(
        1.1, ge=0, description="Standard deviation of the factor of each timestep, around 2."
    )
    segments: int = Field(
        8, ge=2, description="A window is cut into fewer than this many pieces, in a new order."
    )


def contrast(first: Tensor, second: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the positive among the 2K - 1 other views of the group, by dot products,
    with at most `BLOCK` scores in memory.

    `first` and `second`, aligned, are views of each item [G, K, D]; items not `valid` [G, K] are
    neither anchors nor negatives. Returns the mean over all valid views, and its value for a
    constant representation (log(2K - 1) if all are valid), both scalars.
    """
    z = widen(torch.cat((first, second), 1))
    groups, views, _ = z.shape
    there = None if valid is None else torch.cat((valid, valid), 1)
    counts = z.new_full((groups,), views) if there is None else there.sum(1).to(z.dtype)
    blind = (counts * (counts - 1).clamp(min=1).log()).sum()
    anchors = counts.sum().clamp(min=1)
    total: Tensor = _ContrastiveLoss.apply(z, there)  # type: ignore[no-untyped-call]
    return total / anchors, blind / anchors


class _ContrastiveLoss(torch.autograd.Function):
    """Summed cross-entropy of all views z [G, 2K, D], `there` bool [G, 2K] (None: all).

    With p the softmax of the scores of z and z' its positive, the gradient of its term is sum_j p_j
    z_j - z' for z, p_j z for each other view and -z for z'. It is computed in the forward pass,
    which has the scores.
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
            for group in range(0, groups, several):
                some = slice(group, group + several)
                block, partner = z[some], z[some].roll(views // 2, 1)
                for start in range(0, views, rows):
                    part = slice(start, start + rows)
                    scores = block[:, part] @ block.mT
                    scores.diagonal(start, 1, 2).fill_(-torch.inf)
                    anchors = None
                    if there is not None:
                        anchors = there[some, part, None]
                        # finite, not counted
                        scores.masked_fill_(~there[some, None], -torch.inf).masked_fill_(
                            ~anchors, 0.0
                        )
                    most = scores.amax(-1, keepdim=True)
                    norm = scores.sub_(most).exp_().sum(-1, keepdim=True)
                    hits = (block[:, part] * partner[:, part]).sum(-1, keepdim=True)
                    losses = most + norm.log() - hits
                    if anchors is not None:
                        losses = losses.masked_fill(~anchors, 0.0)
                    total += losses.sum()
                    if slope is not None:
                        weight = norm.reciprocal() if anchors is None else anchors / norm
                        positive = (
                            partner[:, part] if anchors is None else anchors * partner[:, part]
                        )
                        slope[some, part] += weight * (scores @ block) - 2 * positive
                        slope[some] += scores.mT @ (weight * block[:, part])
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The stored gradient times the incoming one."""
        (slope,) = ctx.saved_tensors
        return grad * slope, None


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent of two views of B rows, [B, D] each: `contrast` of cosines divided by the temperature
    0.2.
    """
    a, b = (F.normalize(widen(view), dim=-1) * TEMPERATURE**-0.5 for view in (first, second))
    return contrast(a[None], b[None])[0]


def make_contrastive_result(parts: dict[str, Tensor], blind: float | Tensor, rows: int) -> Result:
    """The result of a contrastive objective: `parts` are summed, `blind` is the loss of a constant
    representation.
    """
    loss = torch.stack(list(parts.values())).sum()
    return pack_result(loss, loss.detach() / blind, parts, rows)


def require_rows(name: str, batch: Batch) -> None:
    """Raises UserError (config, exit 2) for a single row, which has no negatives."""
    if len(batch.values) < 2:
        raise usage_error(
            f"{name} with {len(batch.values)} row in a micro-batch",
            "expected at least 2: the other rows are the negatives",
            "Use a larger --batch-size or a smaller --accumulate; of data.batches the option "
            "least=2",
            field="train.batch_size",
        )


def draw_noise(like: Tensor, generator: Generator | None, *, normal: bool = False) -> Tensor:
    """Random numbers in the shape of `like`: U(0, 1), or N(0, 1)."""
    draw = torch.randn if normal else torch.rand
    # a copy that blocks waits for all that is under way
    return draw(like.shape, generator=generator).to(like, non_blocking=True)


def add_jitter(batch: Batch, sigma: float, generator: Generator | None = None) -> Batch:
    """Noise: x + N(0, sigma^2), every value by itself."""
    return batch._replace(
        values=batch.values + sigma * draw_noise(batch.values, generator, normal=True)
    )


def scale_timesteps(batch: Batch, sigma: float, generator: Generator | None) -> Batch:
    """Another size: x * N(2, sigma^2), one factor a row and timestep, the same for all channels."""
    return batch._replace(
        values=batch.values
        * (2 + sigma * draw_noise(batch.values[..., :1], generator, normal=True))
    )


def permute_segments(batch: Batch, segments: int, generator: Generator | None) -> Batch:
    """Each row cut into 1 .. `segments` - 1 pieces at random places, in a new order; all channels
    together, padding stays where it is.
    """
    order = torch.arange(batch.values.shape[1]).repeat(len(batch.values), 1)
    for row, end in zip(order, find_row_ends(batch).tolist(), strict=True):
        pieces = min(int(torch.randint(1, segments, (), generator=generator)), max(end, 1))
        cuts = (
            (torch.randperm(max(end, 1) - 1, generator=generator)[: pieces - 1] + 1).sort().values
        )
        parts = row[:end].tensor_split(cuts)
        places = torch.randperm(pieces, generator=generator).tolist()
        row[:end] = torch.cat([parts[place] for place in places])
    order = order.to(batch.values.device, non_blocking=True)
    mask = batch.mask
    return batch._replace(
        values=take_steps(batch.values, order),
        mask=None if mask is None else take_steps(mask, order),
    )


def augment_rows(batch: Batch, config: AugmentationConfig, generator: Generator | None) -> Batch:
    """One augmentation a row, of jitter, scaling, permutation and masking (nine tenths are
    kept).
    """
    views = [
        add_jitter(batch, config.jitter, generator),
        scale_timesteps(batch, config.scaling, generator),
        permute_segments(batch, config.segments, generator),
        batch._replace(values=batch.values * (draw_noise(batch.values, generator) < 0.9)),
    ]
    rows = torch.arange(len(batch.values), device=batch.values.device)
    chosen = torch.randint(len(views), (len(rows),), generator=generator).to(
        rows.device, non_blocking=True
    )
    values = torch.stack([view.values for view in views])[chosen, rows]
    mask = (
        None
        if batch.mask is None
        else torch.stack([view.mask for view in views if view.mask is not None])[chosen, rows]
    )
    return batch._replace(values=values, mask=mask)


def perturb_spectrum(spectrum: Batch, generator: Generator | None, *, twice: bool = False) -> Batch:
    """Amplitudes of which a tenth is removed, and to a tenth U(0, 0.1 * the largest of the row and
    channel) is added.

    `twice`: the spectrum with bins removed plus the one with bins added, as the reference code sums
    them.
    """
    bins = spectrum.values
    least = bins.amax(1, keepdim=True) * 0.1
    removed = bins * (draw_noise(bins, generator) > 0.1)
    added = (draw_noise(bins, generator) < 0.1) * draw_noise(bins, generator) * least
    return spectrum._replace(values=removed + added + (bins if twice else 0.0))


def uniform_loss(rows: int) -> float:
    """NT-Xent of a constant representation: log(2B - 1)."""
    return math.log(2 * rows - 1)
