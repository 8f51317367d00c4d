"""Tokens by a network in the patch: local features that follow a shift, and no sample of another
token.

Each patch goes through a small network by itself. Short patches have three convolutions, of which
mean and standard deviation over the patch are kept; patches of rhythms have the stem and the
residual blocks of `resnet`, and the mean. The norm is that of groups (Wu and He 2018): batch norm
would mix rows and tokens, which an objective without leaks forbids.

Beside it, `patch_features` gives log amplitudes, mean and size of the patch, which the norm of the
network takes away.

Legend: B batch, N tokens, V channels, P samples of a patch, K bins, C features, F token width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import LONG_PATCH, ModelConfig
from bitimely_core.models.contract import config_error
from bitimely_core.models.convolution import Conv1d, ResidualBlock
from bitimely_core.models.tokenizers import PatchTokenizer
from bitimely_core.types import Batch

GROUP = 8  # channels of a group of the norm
FLOOR = 1e-6  # smallest power, of values with variance 1
BINS = 60  # of the spectrum, at most
FEATURE_DROPOUT = 0.5
SHORT_LAYERS = ((32, 9, 1), (32, 5, 2), (64, 5, 2))  # features, kernel, stride
STEM, WIDTHS = 9, (16, 16, 32, 64, 64, 64)  # kernel of the stem; features behind it and the blocks
# longest patch in samples -> stride of the stem, blocks
LONG_SIZES = ((2000, 2, 4), (math.inf, 4, 5))


def compute_variance(x: Tensor) -> Tensor:
    """The variance over the last dimension, [..., n] -> [...].

    `Tensor.var` takes five to ten times as long on a CPU. The mean is left out of the gradient, to
    which it adds nothing, since deviations from it have the sum 0.
    """
    return (x - x.mean(-1, keepdim=True).detach()).square().mean(-1)


class GroupedConv(nn.Module):
    """A convolution without bias and the norm of groups of its features, over one patch."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.GroupNorm(outputs // GROUP, outputs)

    def forward(self, y: Tensor, counts: Tensor | None = None) -> Tensor:
        """[R, C, n] -> [R, outputs, ceil(n / stride)]; patches have no end of their own, so there
        are no `counts`.
        """
        normed: Tensor = self.norm(self.conv(y))
        return normed


class PatchNetwork(nn.Module):
    """The network of a patch: samples [R, V, P] -> features [R, `width`]."""

    def __init__(self, channels: int, samples: int) -> None:
        super().__init__()
        self.spread = samples < LONG_PATCH  # whether the standard deviation over the patch is kept
        layers: list[nn.Module] = []
        if self.spread:
            last = channels
            for features, kernel, stride in SHORT_LAYERS:
                layers += [GroupedConv(last, features, kernel, stride), nn.GELU()]
                last = features
        else:
            stride, blocks = next(size[1:] for size in LONG_SIZES if samples <= size[0])
            widths = WIDTHS[: blocks + 1]
            last = widths[-1]
            layers = [GroupedConv(channels, widths[0], STEM, stride), nn.GELU()]
            layers += [
                ResidualBlock(*pair, conv=GroupedConv, activate=F.gelu)
                for pair in itertools.pairwise(widths)
            ]
        self.layers = nn.Sequential(*layers)
        self.width = last * (2 if self.spread else 1)

    def forward(self, x: Tensor) -> Tensor:
        """[R, V, P] -> [R, `width`]."""
        y = self.layers(x)
        mean = y.mean(-1)
        if not self.spread:
            return mean
        return torch.cat((mean, (compute_variance(y) + FLOOR).sqrt()), -1)


class PatchSpectrum(nn.Module):
    """Log amplitudes of the lowest K bins, mean and log standard deviation of each channel of a
    patch, standardised by their moments in the training split.

    The amplitude of bin k is 2 / sum(w) |sum_p w_p (x_p - mean x) exp(-2 pi i k p / P)| with Hann's
    window w. Both parts are linear maps of the samples, so that any device and format has them.

    Attributes:
        mean, std: float32 [V (K + 2)]; NaN until they are measured, and then read as 0 and 1.
    """

    mean: Tensor
    std: Tensor
    waves: Tensor

    def __init__(self, channels: int, samples: int) -> None:
        super().__init__()
        self.channels, self.bins = channels, min(samples // 2, BINS)
        self.width = channels * (self.bins + 2)
        self.target_width = channels * (self.bins + 1)  # log amplitudes and means
        p = torch.arange(samples, dtype=torch.float64)
        window = torch.sin(math.pi * (p + 0.5) / samples).square()
        angle = 2 * math.pi * p[:, None] * torch.arange(1, self.bins + 1) / samples
        waves = torch.cat((angle.cos(), angle.sin()), 1) * (window * 2 / window.sum())[:, None]
        self.register_buffer("waves", (waves - waves.mean(0)).float(), persistent=False)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.full((self.width,), torch.nan))

    def compute(self, x: Tensor) -> Tensor:
        """[..., V, P] -> [..., V (K + 2)]: all log amplitudes, all means, all log standard
        deviations.
        """
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.waves.dtype)
            cosine, sine = (x @ self.waves).chunk(2, -1)
            amplitude = 0.5 * (cosine.square() + sine.square() + FLOOR).log()
            size = 0.5 * (compute_variance(x) + FLOOR).log()
            return torch.cat((amplitude.flatten(-2), x.mean(-1), size), -1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., V, P] -> [..., V (K + 2)], standardised."""
        return (self.compute(x) - self.mean.nan_to_num(0.0)) / self.std.nan_to_num(1.0)

    def fit(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Measure the moments of patches [..., V, P], of which those [..., V] that were observed
        as a whole count; a channel without any keeps its values.
        """
        sums = torch.zeros(3, self.width, dtype=torch.float64)  # 1, x, x^2
        for patches, whole in parts:
            x, seen = self.compute(patches), self.spread_over_features(whole)
            x = torch.where(seen, x, 0.0).flatten(0, -2).cpu().double()
            counts = seen.flatten(0, -2).sum(0).cpu()
            sums += torch.stack((counts, x.sum(0), x.square().sum(0)))
        observed = sums[0] > 0
        mean = sums[1] / sums[0]
        std = (sums[2] / sums[0] - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(torch.where(observed, mean, self.mean.cpu()))
        self.std.copy_(torch.where(observed, torch.where(std > 0, std, 1.0), self.std.cpu()))

    def spread_over_features(self, of_channels: Tensor) -> Tensor:
        """What holds for channels [..., V], for their features [..., V (K + 2)]."""
        amplitudes = of_channels.repeat_interleave(self.bins, -1)
        return torch.cat((amplitudes, of_channels, of_channels), -1)


class PatchCNNTokenizer(PatchTokenizer):
    """Patches as `PatchTokenizer` cuts them, each read by a network of its own samples.

    The target of a token is its raw patch, or with `model.target = spectrum` the standardised log
    amplitudes and means of its channels: fixed functions of the input. `width` = features of the
    network, and with `model.patch_features` those of `PatchSpectrum`.
    """

    def __init__(self, config: ModelConfig, channels: int) -> None:
        if config.target == "tokens":
            raise config_error(
                "tokens of a network",
                "expected raw or spectrum: learned targets collapse",
                "model.target",
                "Leave it out, or use model.tokenizer=patch",
            )
        super().__init__(channels, config.patch, stride=config.stride, crop=config.crop)
        self.network = PatchNetwork(channels, config.patch)
        self.features, self.aims = bool(config.patch_features), config.target
        self.dropout = nn.Dropout(FEATURE_DROPOUT)
        self.spectrum: PatchSpectrum | None = None
        self.width = self.network.width
        if self.features or self.aims == "spectrum":
            self.spectrum = PatchSpectrum(channels, config.patch)
            self.width += self.spectrum.width if self.features else 0
        if self.spectrum is not None and self.aims == "spectrum":
            self.target_width = self.spectrum.target_width

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, N, F], targets [B, N, P V] or [B, N, V (K + 1)], mask of real tokens
        [B, N].
        """
        patches, _, real = super().forward(batch)
        x = self._separate(patches)
        tokens = self.network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        spectrum = None if self.spectrum is None else self.spectrum(x)
        if spectrum is not None and self.features:
            tokens = torch.cat((tokens, self.dropout(spectrum.to(tokens.dtype))), -1)
        return tokens, self._aim(patches, spectrum), real

    def make_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Targets and mask of real tokens as `forward`, without the network."""
        patches, _, real = super().forward(batch)
        spectrum = None
        if self.spectrum is not None and self.aims == "spectrum":
            spectrum = self.spectrum(self._separate(patches))
        return self._aim(patches, spectrum), real

    def find_targets(self, batch: Batch) -> Tensor:
        """Which target values were observed, bool [B, N, P V]; a spectrum [B, N, V (K + 1)] where
        all samples of the channel in the patch were.
        """
        seen = super().find_targets(batch)
        if self.spectrum is None or self.aims != "spectrum":
            return seen
        whole = self.spectrum.spread_over_features(self._separate(seen).all(-1))
        return whole[..., : self.target_width]

    @property
    def lacks_moments(self) -> bool:
        """Whether the moments of its features were not measured."""
        return self.spectrum is not None and bool(self.spectrum.mean.isnan().all())

    @torch.no_grad()
    def fit(self, batches: Iterable[Batch]) -> None:
        """Measure the moments of the features on `batches`, signals as the tokenizer reads them."""
        if self.spectrum is None:
            return
        self.spectrum.fit(
            (
                self._separate(PatchTokenizer.forward(self, batch)[0]),
                self._separate(PatchTokenizer.find_targets(self, batch)).all(-1),
            )
            for batch in batches
        )

    def _separate(self, patches: Tensor) -> Tensor:
        """[B, N, P V] -> [B, N, V, P]."""
        return patches.unflatten(2, (self.patch, self.channels)).mT

    def _aim(self, patches: Tensor, spectrum: Tensor | None) -> Tensor:
        """The targets among raw `patches` and all features."""
        if spectrum is None or self.aims != "spectrum":
            return patches.detach()
        return spectrum[..., : self.target_width].detach()
