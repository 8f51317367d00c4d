"""TimesNet (Wu et al. 2023): windows folded by their strongest periods, convolved in two
dimensions, and unfolded.

Every timestep is a token, through the circular convolution of Autoformer and sinusoidal positions.
L layers x = LN(block(x)), one layer norm for all. Block: A = |rfft(x)|, mean over the width,
without the frequency 0; of the k strongest frequencies f the periods p = n // f; for each the
window, continued by zeros to a multiple of p, as an image of n / p rows of p, through two inception
blocks with GELU between them, and unfolded; out = x + sum_f softmax(A)_f out_f.

Each window has its own periods; windows of one period are convolved together. With `per_sample` =
false, as in the reference, periods are common to the rows of a batch (of one length), in evaluation
too: a prediction then depends on the other rows.

Legend: R rows of one length, n timesteps, D width, K kernels of an inception block, k periods.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.contract import config_error
from bitimely_core.models.convolution import convolve
from bitimely_core.ops.fused import widen
from bitimely_core.registry import models
from bitimely_core.zoo.autoformer import TimestepFacts, TimestepModel, configure_timesteps
from bitimely_core.zoo.patchtst import encode_sinusoid


class TimesNetConfig(ModelConfig):
    """Settings of TimesNet."""

    top_periods: int = Field(3, ge=1, description="Periods by which a window is folded.")
    kernels: int = Field(
        6, ge=1, description="Convolutions side by side, with kernels of 1, 3, 5 ..."
    )
    per_sample: bool = Field(
        True, description="Periods of each window; false: common to the batch, as in the reference."
    )


MAX_PARAMETERS = 10**9  # parameters; the paper's widths of transformers make four times as many


class InceptionBlock(nn.Module):
    """Mean of K convolutions with kernels of 1, 3, 5 ..: as they are linear, one convolution with
    the mean of the kernels.
    """

    def __init__(self, inputs: int, outputs: int, kernels: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.empty(outputs, inputs, 2 * i + 1, 2 * i + 1) for i in range(kernels)
        )
        self.biases = nn.Parameter(torch.zeros(kernels, outputs))
        for weight in self.weights:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")

    def merge_kernels(self) -> tuple[Tensor, Tensor]:
        """Mean kernel [outputs, inputs, 2 K - 1, 2 K - 1] and mean bias [outputs]."""
        most = len(self.weights) - 1
        wide = [F.pad(weight, [most - i] * 4) for i, weight in enumerate(self.weights)]
        return torch.stack(wide).mean(0), self.biases.mean(0)


class TimesBlock(nn.Module):
    """One TimesBlock with its residual."""

    def __init__(self, config: TimesNetConfig) -> None:
        super().__init__()
        self.top, self.per_sample = config.top_periods, config.per_sample
        self.widen = InceptionBlock(config.dim, config.ffn_dim, config.kernels)
        self.narrow = InceptionBlock(config.ffn_dim, config.dim, config.kernels)

    def forward(self, x: Tensor) -> Tensor:
        """[R, n, D] -> [R, n, D]."""
        n = x.shape[1]
        frequencies, weights = find_frequencies(x, self.top, per_sample=self.per_sample)
        periods = n // frequencies
        # of equal periods the sum
        share = torch.zeros(x.shape[0], n + 1, device=x.device, dtype=x.dtype).scatter_add(
            1, periods, weights
        )
        widen, narrow = self.widen.merge_kernels(), self.narrow.merge_kernels()
        out = x.clone()
        # a graph cannot depend on the periods of its rows: it holds all that there are
        fixed = torch.compiler.is_exporting()
        for period in (
            sorted({n // f for f in range(1, max(n // 2, 1) + 1)})
            if fixed
            else periods.unique().tolist()
        ):
            # a weight may round to 0
            rows = (
                torch.arange(x.shape[0]) if fixed else (share[:, period] > 0).nonzero().squeeze(1)
            )
            if fixed or len(rows):
                image = (
                    F.pad(x[rows], (0, 0, 0, -n % period))
                    .unflatten(1, (-1, period))
                    .permute(0, 3, 1, 2)
                )
                image = convolve(
                    F.conv2d,
                    F.gelu(convolve(F.conv2d, image, *widen, padding="same")),
                    *narrow,
                    padding="same",
                )
                out.index_add_(
                    0,
                    rows,
                    image.permute(0, 2, 3, 1).flatten(1, 2)[:, :n]
                    * share[rows, period, None, None],
                )
        return out


def find_frequencies(x: Tensor, top: int, *, per_sample: bool = True) -> tuple[Tensor, Tensor]:
    """The strongest frequencies of rows [R, n, D], as cycles a row, int64 [R, k], and softmax over
    their amplitudes, [R, k].

    Amplitudes are means over the width; without `per_sample` also over the rows. Rows of fewer than
    2 `top` timesteps have fewer frequencies.
    """
    amplitude = torch.fft.rfft(x, dim=1).abs().mean(-1)
    if x.shape[1] == 1:
        return torch.ones(x.shape[0], 1, dtype=torch.int64, device=x.device), torch.ones_like(
            amplitude
        )
    beyond = amplitude[:, 1:]
    ranked = beyond if per_sample else beyond.mean(0, keepdim=True).expand_as(beyond)
    chosen = ranked.topk(min(top, beyond.shape[1]), 1).indices
    return chosen + 1, beyond.gather(1, chosen).softmax(1)


def count_block_parameters(config: TimesNetConfig) -> int:
    """Parameters of the blocks: 2 inceptions a layer of sum (2 i + 1)^2 weights for each pair of
    features, and K biases a feature.
    """
    taps = sum((2 * i + 1) ** 2 for i in range(config.kernels))
    return config.layers * (
        2 * taps * config.dim * config.ffn_dim + config.kernels * (config.dim + config.ffn_dim)
    )


class TimesNet(TimestepModel):
    """Blocks with one layer norm for all."""

    def __init__(self, config: TimesNetConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(TimesBlock(config) for _ in range(config.layers))
        self.layer_norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def encode_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """As `TimestepModel.encode_rows`."""
        index = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        states, x = [], self.dropout(x + encode_sinusoid(index, self.config.dim))
        for layer in self.layers:
            x = widen(self.layer_norm(layer(x)))
            states.append(x)
        return tuple(states)


@models(
    TimestepFacts(
        config=TimesNetConfig,
        family="timesnet",
        source="Wu et al. 2023, TimesNet: Temporal 2D-Variation Modeling for General Time Series "
        "Analysis",
        known="The table's widths would make 4 049 M parameters of it; its reference lets a "
        "prediction depend on the other rows of a batch",
    )
)
def timesnet(config: TimesNetConfig) -> TimesNet:
    """TimesNet: windows folded by their strongest periods and convolved in two dimensions; 40 % of
    the timesteps are masked and reconstructed.
    """
    if count_block_parameters(config) > MAX_PARAMETERS:
        raise config_error(
            f"{config.layers} layers of {config.dim} and {config.ffn_dim} have "
            f"{count_block_parameters(config) / 1e6:,.0f} million parameters",
            f"expected at most {MAX_PARAMETERS / 1e6:,.0f} million",
            "model.dim",
            "Leave the preset's widths, or use --budget matched",
        )
    return TimesNet(configure_timesteps(config))
