"""Autoformer (Wu et al. 2021): layers that remove the trend and mix time by lags instead of pairs
of timesteps.

Every timestep is a token. Encoder layer: s = seasonal(x + Drop(AC(x))), out = seasonal(s + FF(s)),
FF = two linear maps without biases. seasonal(x) = x - moving average. AC, the auto-correlation:
R(tau) = sum_t q[t + tau] k[t], mean over the width; the floor(c ln N) largest lags get the weights
w = softmax(R), and out[t] = sum_i w_i v[t + tau_i], all around the window's end. Behind the last
layer LN(x) - mean over time of LN(x).

Fourier transforms, moving averages and circular convolutions cannot mask timesteps. So rows go
through the layers without padding, grouped by length: `TimestepModel`, shared with FEDformer and
TimesNet.

Legend: B batch, R rows of one length, V channels, N timesteps (n of a shorter row), D width, L
layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import count_channels
from bitimely_core.models.base import Model, PlainAdapter
from bitimely_core.models.contract import Direction, Which, config_error
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.tokenizers import StepTokenizer
from bitimely_core.ops.fused import widen
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import refuse_directions

Config = TypeVar("Config", bound=ModelConfig)


class AutoformerConfig(ModelConfig):
    """Settings of Autoformer."""

    moving_average: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (25,),
        min_length=1,
        description="Timesteps of the moving averages that make the trend; several are mixed.",
    )
    lag_factor: float = Field(1.0, gt=0, description="floor(factor * ln N) lags are used.")
    per_sample: bool = Field(
        True,
        description="Lags of each window; false: common to a training batch, as in the reference.",
    )


class CircularAdapter(PlainAdapter):
    """Circular convolution of three timesteps without bias, and the output projection."""

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        channels = count_channels(config)
        self.tokenizer = StepTokenizer(channels)
        self.steps = Conv1d(channels, config.dim, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.kaiming_normal_(self.steps.weight, nonlinearity="leaky_relu")
        self.output = nn.ModuleDict({"next": nn.Linear(config.dim, self.tokenizer.target_width)})

    def embed(self, tokens: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Rows [R, n, V] -> [R, n, D]."""
        return self.steps(tokens.transpose(1, 2)).transpose(1, 2)


TimestepFacts = partial(ModelFacts, objective="masked", capabilities=("hidden",), readout="flatten")


class TimestepModel(Model, ABC):
    """A model of unpadded rows of timesteps, grouped by length. A subclass adds `encode_rows`.

    Heads read Drop(GELU(state)), the output projection the state. States are normalised; those of
    padding are 0.
    """

    adapter_type = CircularAdapter

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Sequential(nn.GELU(), nn.Dropout(config.dropout))})

    @abstractmethod
    def encode_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """States [R, n, D] of each layer, behind the norm, from embedded rows [R, n, D]."""

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Output projection: states [..., D] -> predictions [..., V]."""
        return self.adapter_of(batch).output["next"](hidden)

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode signals [B, T, V]; timesteps `hide` [B, T] are read as 0, and there are no maps.
        Raises UserError: directions (exit 2).
        """
        refuse_directions(self, directions)
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        tokens, targets, real = adapter.tokenizer(batch)
        if hide is not None:
            tokens = tokens.masked_fill(hide[..., None], 0.0)
        states = apply_by_length(
            tokens,
            None if batch.mask is None else real.sum(1),
            lambda x: self.encode_rows(widen(adapter.embed(x))),
        )
        return Encoded(tokens, targets, real, states)


def apply_by_length(
    x: Tensor, lengths: Tensor | None, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """`function`, rows [R, n, F] -> tensors [R, n, ...], on the unpadded rows of `x` [B, N, F],
    padded on the right, grouped by length.

    `lengths` [B] None: all N. Rows without any timestep are read as one timestep of 0. The results
    are [B, N, ...], 0 behind each row's end.
    """
    if lengths is None:
        return function(x)
    groups, order = [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().squeeze(1)
        parts = function(x[rows, : max(length, 1)])
        if not length:
            parts = tuple(part * 0.0 for part in parts)
        groups.append([_pad_rows(part, x.shape[1]) for part in parts])
        order.append(rows)
    back = torch.cat(order).argsort()
    return tuple(torch.cat(parts)[back] for parts in zip(*groups, strict=True))


def _pad_rows(x: Tensor, length: int) -> Tensor:
    """[R, n, ...] -> [R, length, ...], 0 behind n."""
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, length - x.shape[1]])


def configure_timesteps(config: Config) -> Config:
    """The configuration of a model of timesteps. Raises UserError (config, exit 2) for events."""
    if config.codes is not None:
        raise config_error(
            "events",
            f"expected signals: {config.name} reads samples of a regular clock",
            "model.name",
            "Use a model that reads events: bitimely list models",
        )
    settings = {
        "tokenizer": "steps",
        "value_dim": config.dim,
        "output_heads": "shared",
        "target": "raw",
        "ffn": "plain",
    }
    return config.model_copy(update=settings)


class SeriesDecomposition(nn.Module):
    """Seasonal part and trend: x - trend, and moving averages over windows w of which each end is
    repeated.

    (w - 1) / 2 values stand in front, for an even window w / 2, and the rest of w - 1 behind.
    Several windows are mixed for each value by softmax(Linear(1 -> windows)(x)) (FEDformer).
    """

    def __init__(self, windows: tuple[int, ...]) -> None:
        super().__init__()
        self.windows = windows
        self.mix = nn.Linear(1, len(windows)) if len(windows) > 1 else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, n, D] -> seasonal part and trend, [R, n, D] each."""
        means = [self._mean(x, window) for window in self.windows]
        if self.mix is None:
            return x - means[0], means[0]
        trend = (torch.stack(means, -1) * self.mix(x[..., None]).softmax(-1)).sum(-1)
        return x - trend, trend

    @staticmethod
    def _mean(x: Tensor, window: int) -> Tensor:
        behind = (window - 1) // 2
        wide = torch.cat(
            (x[:, :1].expand(-1, window - 1 - behind, -1), x, x[:, -1:].expand(-1, behind, -1)), 1
        )
        return F.avg_pool1d(wide.transpose(1, 2), window, 1).transpose(1, 2)


class AutoCorrelation(nn.Module):
    """Mixing by lags, O(N log N) in time and O(N) in memory; q, k, v and out are linear maps with
    biases.

    Scores are means over the heads and lag weights are common to all, so the number of heads has no
    effect. The weighted sum of rolled values is a circular correlation with the weights, computed
    by Fourier transform.
    """

    def __init__(self, config: AutoformerConfig) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.dim, config.dim) for _ in range(4)
        )
        self.factor, self.per_sample = config.lag_factor, config.per_sample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, n, D] -> [R, n, D] and the scores R(tau) of the lags 0 .. n - 1, [R, n]."""
        n = x.shape[1]
        q, k, v = (
            torch.fft.rfft(widen(linear(x)), dim=1) for linear in (self.query, self.key, self.value)
        )
        scores = torch.fft.irfft((q * k.conj()).mean(-1), n=n, dim=1)
        common = self.training and not self.per_sample
        ranked = scores.mean(0, keepdim=True).expand_as(scores) if common else scores
        lags = ranked.topk(min(max(int(self.factor * math.log(n)), 1), n), 1).indices
        weights = torch.zeros_like(scores).scatter(1, lags, scores.gather(1, lags).softmax(1))
        rolled = torch.fft.irfft(v * torch.fft.rfft(weights, dim=1).conj()[..., None], n=n, dim=1)
        return self.out(rolled), scores


class DecompositionLayer(nn.Module):
    """The layer around its mixing: s = seasonal(x + Drop(mixed)), seasonal(s + FF(s))."""

    def __init__(self, config: AutoformerConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.second = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.split_mix, self.split_ffn = (
            SeriesDecomposition(config.moving_average),
            SeriesDecomposition(config.moving_average),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.act = F.silu if config.ffn_act == "silu" else F.gelu

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """[R, n, D] twice -> [R, n, D]."""
        x, _ = self.split_mix(x + self.dropout(mixed))
        inner = self.dropout(self.second(self.dropout(self.act(self.first(x)))))
        return self.split_ffn(x + inner)[0]


class CentredLayerNorm(nn.LayerNorm):
    """LN(x) - mean over time of LN(x): a seasonal part has no level."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that torch gives it
        """[R, n, D] -> [R, n, D]."""
        x = super().forward(input)
        return x - x.mean(1, keepdim=True)


class Autoformer(TimestepModel):
    """The encoder; without positions, which lags do not need."""

    def __init__(self, config: AutoformerConfig) -> None:
        super().__init__(config)
        self.mixers = nn.ModuleList(AutoCorrelation(config) for _ in range(config.layers))
        self.layers = nn.ModuleList(DecompositionLayer(config) for _ in range(config.layers))
        self.centred = CentredLayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def encode_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """As `TimestepModel.encode_rows`."""
        return tuple(self.centred(state) for state, _ in self._layers(x))

    @torch.no_grad()
    def lags(self, batch: Batch) -> tuple[Tensor, ...]:
        """Scores of all lags in each layer, R(tau) [B, T], 0 past the end of a row; the counterpart
        of attention maps.
        """
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        tokens, _, real = adapter.tokenizer(batch)
        return apply_by_length(
            tokens,
            real.sum(1),
            lambda x: tuple(scores for _, scores in self._layers(widen(adapter.embed(x)))),
        )

    def _layers(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """State [R, n, D] and scores of the lags [R, n] of each layer."""
        layers, x = [], self.dropout(x)
        for mixer, layer in zip(self.mixers, self.layers, strict=True):
            mixed, scores = mixer(x)
            x = layer(x, mixed)
            layers.append((x, scores))
        return layers


@models(
    TimestepFacts(
        config=AutoformerConfig,
        family="attention",
        source="Wu et al. 2021, Autoformer: Decomposition Transformers with Auto-Correlation for "
        "Long-Term Series Forecasting",
        known="A token a timestep; in the reference the lags of a training batch are common to "
        "its rows (model.per_sample=false)",
        step=2,
    )
)
def autoformer(config: AutoformerConfig) -> Autoformer:
    """Autoformer: each layer removes the trend, time is mixed by lags; 40 % of the timesteps are
    masked and reconstructed.
    """
    return Autoformer(configure_timesteps(config))
