"""Cuts windows and event sequences into tokens, with their targets and a mask of the real ones.

It follows the paper's appendix "Pre-training overview".

Targets are raw values of the input, never a learned tensor: learned targets collapse (the tokens
shrink until any prediction is good). Missing and padded samples are set to 0, the mean after
normalisation, and excluded from the loss; padding is on the right.

Legend: B batch, T timesteps, V channels, N tokens, F token width, P target width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, usage_error
from bitimely_core.models.convolution import Conv1d
from bitimely_core.types import Batch

PAD, SOS, EOS, MASK, UNK, FIRST = range(6)  # ids of the input vocabulary; codes stand from FIRST on
GELU_LEVEL, GELU_SLOPE = 0.345731, 0.867495  # GELU and its derivative at 0.5
IGNORE = -100  # class of a target that is not predicted


def find_row_ends(batch: Batch) -> Tensor:
    """The true length of each row, int64 [B]: one past its last sample or event that any channel
    observed.
    """
    if batch.mask is None:
        return torch.full(batch.values.shape[:1], batch.values.shape[1], device=batch.values.device)
    seen = batch.mask.any(-1) if batch.mask.dim() == 3 else batch.mask
    return (seen * torch.arange(1, seen.shape[1] + 1, device=seen.device)).amax(1)


def get_observed(batch: Batch) -> Tensor:
    """Which samples were observed, bool [B, T, V]."""
    if batch.mask is None:
        return torch.ones_like(batch.values, dtype=torch.bool)
    mask = batch.mask.bool()
    return mask if mask.dim() == 3 else mask.unsqueeze(-1).expand_as(batch.values)


def take_steps(x: Tensor, index: Tensor) -> Tensor:
    """The steps `index` [B, n] of each row of x [B, M] or [B, M, D]."""
    return x.gather(1, index if x.dim() == 2 else index[..., None].expand(-1, -1, x.shape[2]))


def take_state(states: Tensor, index: Tensor) -> Tensor:
    """The state [B, D] at `index` [B] of each row of states [B, M, D]."""
    return take_steps(states, index[:, None])[:, 0]


def average_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Mean [B, D] of the `real` [B, N] tokens of x [B, N, D], 0 where there are none."""
    return torch.where(real[..., None], x, 0.0).sum(1) / real.sum(1, keepdim=True).clamp(min=1)


def require_channels(batch: Batch, channels: int) -> None:
    """Refuse other samples than [B, T, V] of V `channels`: patches would mix time and channels.
    Raises UserError (shapes_differ, exit 2).

    Shapes alone are read: no wait for a device, no break of a graph.
    """
    if batch.values.dim() != 3 or batch.values.shape[2] != channels or not batch.values.shape[1]:
        raise usage_error(
            f"samples {list(batch.values.shape)}",
            f"this model reads [B, T, {channels}], T > 0",
            "Select its channels, or build a model for these",
            code=Reason.SHAPES_DIFFER,
        )


def _fill_missing(batch: Batch, channels: int) -> Tensor:
    """The samples with 0 where nothing was observed, [B, T, V]. Raises UserError as
    `require_channels`.
    """
    require_channels(batch, channels)
    return (
        batch.values if batch.mask is None else batch.values.masked_fill(~get_observed(batch), 0.0)
    )


class ConvTokenizer(nn.Module):
    """Two convolutions V -> V (kernel 3, stride 2, padding 1) with GELU: N = ceil(T / 4).

    Token n reads samples 4n-3 .. 4n+3. Its target is the raw centre sample x[4n], which its
    neighbours (up to 4n-1, from 4n+1) do not read: leak-free in both directions. `width` =
    `target_width` = V.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.width = self.target_width = channels
        self.first = Conv1d(channels, channels, 3, stride=2, padding=1)
        self.second = Conv1d(channels, channels, 3, stride=2, padding=1)
        self._start_convolutions()

    @torch.no_grad()
    def _start_convolutions(self) -> None:
        """Each channel starts as its own low-pass of gain 1 through both convolutions, with a tenth
        of fan-in noise.

        The paper gives no start. Two random kernels from one channel to one leave it to eight
        numbers how much of the input is left: with a negative second sum GELU squashes what the
        first let through, and what the kernels read is aliased by their stride. The binomial kernel
        is the filter before a decimation by two of Burt and Adelson (1983), here on the identity
        between channels. At the bias 0.5 both signs of the input pass GELU, and its curvature lets
        the envelope of waves through that are too fast for the tokens.
        """
        for conv, level in ((self.first, 0.0), (self.second, GELU_LEVEL)):
            nn.init.normal_(conv.weight, std=0.1 / math.sqrt(3 * self.width))
            conv.weight.diagonal().add_(
                conv.weight.new_tensor([0.25, 0.5, 0.25])[:, None] / GELU_SLOPE
            )
            assert conv.bias is not None
            conv.bias.copy_(0.5 - level * conv.weight.sum((1, 2)))

    def count(self, length: int) -> int:
        """N of windows of `length` samples."""
        # here and below no quotient of negative numbers: ONNX rounds it towards 0
        return (length + 3) // 4

    def find_real(self, batch: Batch) -> Tensor:
        """Which tokens are real, bool [B, N]; without any weight, so wherever the batch is."""
        return mask_before((find_row_ends(batch) + 3) // 4, self.count(batch.values.shape[1]))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, N, V], targets [B, N, V], mask of real tokens [B, N]."""
        x = _fill_missing(batch, self.channels)
        ends = find_row_ends(batch)
        y = F.gelu(self.first(x.transpose(1, 2)))
        if batch.mask is not None:  # behind its end a row must look as if it were alone
            y = y * mask_before((ends + 1) // 2, y.shape[-1]).unsqueeze(1)
        tokens = F.gelu(self.second(y)).transpose(1, 2)
        return tokens, x[:, ::4].detach(), self.find_real(batch)

    def find_targets(self, batch: Batch) -> Tensor:
        """Which target values were observed, bool [B, N, V]."""
        return get_observed(batch)[:, ::4]

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch with the samples 4n .. 4n+3 of the `chosen` [B, N] tokens set to 0, all
        channels together.
        """
        gone = chosen.repeat_interleave(4, dim=1)[:, : batch.values.shape[1]]
        return batch._replace(values=batch.values.masked_fill(gone.unsqueeze(-1), 0.0))


class StepTokenizer(nn.Module):
    """Every timestep is a token, its raw sample the target: N = T, `width` = `target_width` = V."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.width = self.target_width = channels

    def count(self, length: int) -> int:
        """N of windows of `length` samples."""
        return length

    def find_real(self, batch: Batch) -> Tensor:
        """Which tokens are real, bool [B, T]."""
        return mask_before(find_row_ends(batch), batch.values.shape[1])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, T, V], targets (the same values), mask of real tokens [B, T]."""
        x = _fill_missing(batch, self.channels)
        return x, x.detach(), self.find_real(batch)

    def find_targets(self, batch: Batch) -> Tensor:
        """Which target values were observed, bool [B, T, V]."""
        return get_observed(batch)

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch with the `chosen` [B, T] timesteps set to 0, all channels together."""
        return batch._replace(values=batch.values.masked_fill(chosen.unsqueeze(-1), 0.0))


class PatchTokenizer(nn.Module):
    """Patches of P samples, flattened over time and channels; the target of a token is its raw
    patch (the paper's figures: 3000 -> 375).

    If P does not divide the length, the last sample is repeated (`crop="pad"`, excluded from the
    loss), or the first samples are dropped (`crop="start"`). Overlapping patches show a token parts
    of its neighbours' targets. `width` = `target_width` = P * V.
    """

    def __init__(
        self, channels: int, patch: int = 8, *, stride: int | None = None, crop: str = "pad"
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.stride, self.crop = channels, patch, stride or patch, crop
        self.width = self.target_width = patch * channels

    def count(self, length: int) -> int:
        """N of windows of `length` samples. Raises UserError (shapes_differ, exit 2) when not one
        patch fits.
        """
        if length < self.patch and self.crop == "start":
            raise usage_error(
                f"windows of {length} samples",
                f"expected at least one patch of {self.patch}",
                "Choose a smaller model.patch",
                code=Reason.SHAPES_DIFFER,
            )
        beyond = length - self.patch
        if self.crop == "start":
            return beyond // self.stride + 1
        return (max(beyond, 0) + self.stride - 1) // self.stride + 1

    def _starts(self, ends: Tensor) -> Tensor:
        """First sample that is used, [B]."""
        return (
            (ends - self.patch).clamp(min=0) % self.stride
            if self.crop == "start"
            else torch.zeros_like(ends)
        )

    def _index(self, batch: Batch) -> Tensor:
        """The sample behind each entry of each patch, before repetition, [B, N * P]."""
        count, device = self.count(batch.values.shape[1]), batch.values.device
        steps = torch.arange(count, device=device)[:, None] * self.stride + torch.arange(
            self.patch, device=device
        )
        return self._starts(find_row_ends(batch))[:, None] + steps.flatten()

    def _is_view(self, batch: Batch) -> bool:
        """Whether patches are just a view of the window."""
        # whose graph is for other lengths, too
        if batch.mask is not None or self.stride != self.patch or torch.compiler.is_exporting():
            return False
        return batch.values.shape[1] % self.patch == 0

    def _cut(self, samples: Tensor, index: Tensor) -> Tensor:
        """[B, T, V] -> [B, N, P * V]."""
        return self._join_samples(take_steps(samples, index))

    def _join_samples(self, samples: Tensor) -> Tensor:
        """[B, N * P, V] -> [B, N, P * V]."""
        return samples.unflatten(1, (-1, self.patch)).flatten(2)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, N, P * V], targets (the same values), mask of real tokens [B, N]."""
        x, ends = _fill_missing(batch, self.channels), find_row_ends(batch)
        if self._is_view(batch):
            tokens = self._join_samples(x)
        else:
            tokens = self._cut(
                x, torch.minimum(self._index(batch), (ends - 1).clamp(min=0)[:, None])
            )
        return tokens, tokens.detach(), self.find_real(batch)

    def find_real(self, batch: Batch) -> Tensor:
        """Which tokens are real, bool [B, N]."""
        ends = find_row_ends(batch)
        beyond = ends - self.patch
        if self.crop == "start":
            counts = torch.where(beyond < 0, 0, beyond // self.stride + 1)
        else:
            counts = torch.where(
                ends > 0, (beyond.clamp(min=0) + self.stride - 1) // self.stride + 1, 0
            )
        return mask_before(counts, self.count(batch.values.shape[1]))

    def find_targets(self, batch: Batch) -> Tensor:
        """Which target values were observed (repeated samples were not), bool [B, N, P * V]."""
        if self._is_view(batch):
            return self._join_samples(torch.ones_like(batch.values, dtype=torch.bool))
        index, ends = self._index(batch), find_row_ends(batch)[:, None]
        seen = take_steps(get_observed(batch), torch.minimum(index, (ends - 1).clamp(min=0)))
        return self._join_samples(seen & (index < ends)[..., None])

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch with the patches of the `chosen` [B, N] tokens set to 0, all channels together
        (patches that do not overlap).
        """
        samples = (
            torch.arange(batch.values.shape[1], device=chosen.device)
            - self._starts(find_row_ends(batch))[:, None]
        )
        token, within = samples // self.stride, samples % self.stride
        inside = (samples >= 0) & (token < chosen.shape[1]) & (within < self.patch)
        gone = chosen.gather(1, token.clamp(0, chosen.shape[1] - 1)) & inside
        return batch._replace(values=batch.values.masked_fill(gone.unsqueeze(-1), 0.0))


class CodeTokenizer(StepTokenizer):
    """Events: a token is the id of a code; its target is the output class. Classes: the codes in
    the order of their ids, one for [EOS].

    [PAD], [SOS], [EOS], [MASK] and [UNK] are ids of the input only; `classes` holds the map,
    `IGNORE` where an id has no class.

    Attributes:
        width: rows of the embedding: one a code, and one for all ids below them (pads are never
            read: it is that of [MASK] and [UNK]).
        target_width: output classes, codes + 1.
    """

    classes: Tensor

    def __init__(self, codes: int) -> None:
        super().__init__(codes - FIRST + 1)
        classes = torch.full((codes,), IGNORE)
        classes[FIRST:] = torch.arange(codes - FIRST)
        classes[EOS] = codes - FIRST
        self.register_buffer("classes", classes)

    @property
    def eos(self) -> int:
        """The class of [EOS]."""
        return self.target_width - 1

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Code ids int64 [B, N], classes [B, N], mask of real tokens [B, N]."""
        ids = batch.values.long()
        if batch.mask is not None:
            ids = ids.masked_fill(~batch.mask.bool(), PAD)
        return ids, torch.where(ids < FIRST, IGNORE, self.classes[ids]), self.find_real(batch)

    def find_targets(self, batch: Batch) -> Tensor:
        """Which targets have a class, bool [B, N]."""
        named = batch.values >= FIRST
        return named if batch.mask is None else named & batch.mask.bool()

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch with [MASK] in the place of the `chosen` [B, N] codes."""
        return batch._replace(values=batch.values.masked_fill(chosen, MASK))

    def sets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The codes of each distinct time, for models that do not order equal times, and the number
        j of each event's time, int64 [B, N].

        The sets, float [B, N + 1, P], hold a 1 for each code of the row's j-th distinct time; the
        one behind the last holds [EOS] alone.
        """
        _, targets, real = self(batch)
        times = (
            torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
            if batch.times is None
            else batch.times
        )
        group = F.pad((times[:, 1:] > times[:, :-1]) & real[:, 1:], (1, 0)).cumsum(1)
        sets = torch.zeros(
            *targets.shape[:1], targets.shape[1] + 1, self.target_width, device=targets.device
        )
        row = torch.arange(len(sets), device=targets.device)
        index = (row[:, None].expand_as(group), group, targets.clamp(min=0))
        # no selection: no wait for a device
        sets.index_put_(index, (targets != IGNORE).to(sets), accumulate=True).clamp_(max=1.0)
        sets[row, torch.where(real.any(1), group[:, -1] + 1, 0), self.eos] = 1.0
        return sets, group


class NumberScale(nn.Module):
    """Numbers of codes, standardised: z = asinh((x - mean) / std), by mean and standard deviation
    of each code in the training split.

    asinh is the identity around 0 and a logarithm in the tails: a number of 1000 standard
    deviations becomes 7.6. A code without moments has no numbers. Models keep the moments of their
    own training.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, codes: int) -> None:
        super().__init__()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.full((codes,), torch.nan))

    @torch.no_grad()
    def fit(self, moments: Mapping[int, tuple[float, float]]) -> None:
        """Mean and standard deviation (0: read as 1) of each id."""
        for code, (mean, std) in moments.items():
            self.mean[code], self.std[code] = mean, std or 1.0

    def forward(self, ids: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Z of events [B, N], 0 where there is none, and which have one, bool [B, N]."""
        if numbers is None:
            return self.mean.new_zeros(ids.shape), torch.zeros_like(ids, dtype=torch.bool)
        z = torch.asinh((numbers.to(self.mean) - self.mean[ids]) / self.std[ids])
        numbered = z.isfinite()
        return torch.where(numbered, z, 0.0), numbered


class NumberEmbedding(nn.Module):
    """What the number of an event adds to the embedding of its code: a + z W of the code; nothing
    where there is none.
    """

    def __init__(self, codes: int, dim: int) -> None:
        super().__init__()
        self.scale = NumberScale(codes)
        self.slope = nn.Embedding(codes, dim)  # W
        # a: a mean number is another input than none
        self.presence = nn.Parameter(torch.randn(dim))

    def forward(self, ids: Tensor, numbers: Tensor | None) -> Tensor:
        """Ids and numbers [B, N] -> [B, N, D]."""
        z, numbered = self.scale(ids, numbers)
        added = self.presence + z[..., None].to(self.presence.dtype) * self.slope(ids)
        return torch.where(numbered[..., None], added, 0.0)


def mask_before(ends: Tensor, count: int) -> Tensor:
    """Positions before each row's end, bool [B, count]."""
    return torch.arange(count, device=ends.device) < ends[:, None]


def samples_per_token(config: ModelConfig) -> int:
    """Samples from one token to the next."""
    steps = {"conv": 4, "steps": config.map_stride}
    return steps.get(config.tokenizer, config.stride or config.patch)
