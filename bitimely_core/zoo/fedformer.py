"""FEDformer (Zhou et al. 2022), Fourier version: Autoformer's layers with learned matrices on a few
frequencies as mixing.

FEB-f: q = W_q x, its Fourier transform over time, of M frequencies the coefficients of each head
times a complex matrix of that frequency, and back. The matrices are the same in all layers, W_q and
the output map are each layer's own. Positions are sinusoids.

A frequency is f / T of the sampling rate, T the configured window length. Rows of n timesteps use
the bins floor(f n / T), the next free one on a collision; of more than n / 2 modes an even subset
is used. `reset_adapter` keeps the frequencies for other window lengths.

Legend: R rows of one length, n timesteps, D width, H heads, E = D / H, M modes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bitimely_core.models.contract import require_divisible
from bitimely_core.ops.fused import widen
from bitimely_core.registry import models
from bitimely_core.zoo import autoformer
from bitimely_core.zoo.patchtst import encode_sinusoid


class FEDformerConfig(autoformer.AutoformerConfig):
    """Settings of FEDformer."""

    moving_average: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (24,),
        min_length=1,
        description="Timesteps of the moving averages that make the trend; several are mixed.",
    )
    modes: int = Field(64, ge=1, description="Frequencies that are mixed, at most N / 2.")
    mode_select: Literal["random", "lowest"] = Field("random", description="Which frequencies.")
    reference_layout: bool = Field(
        False,
        description="Frequencies and memory layout of the reference, both mistaken, to compare "
        "with it.",
    )


class FourierMixer(nn.Module):
    """FEB-f behind its projection: the chosen frequencies of each head times a complex matrix, all
    others 0.

    Attributes:
        modes: int64 [M], ascending; bins of windows of `config.length`. In the checkpoint: they may
            be random.
        weight: real and imaginary parts [2, H, E, E, M], at the start U[0, 1) / D^2.
    """

    modes: Tensor

    def __init__(self, config: FEDformerConfig) -> None:
        super().__init__()
        self.heads, self.wrong = config.heads, config.reference_layout
        bins = max(config.length // 2, 1)
        chosen = (
            torch.randperm(bins)[: config.modes].sort().values
            if config.mode_select == "random"
            else torch.arange(config.modes)
        )
        self.register_buffer("modes", chosen)
        width = config.dim // config.heads
        self.weight = nn.Parameter(
            torch.rand(2, config.heads, width, width, config.modes) / config.dim**2
        )

    def bins(self, n: int, length: int) -> tuple[Tensor, Tensor]:
        """Bins of rows of `n` timesteps, ascending, and the mode behind each; `length`: of the
        windows that the modes are bins of.
        """
        most, modes = max(n // 2, 1), len(self.modes)
        order = torch.arange(min(modes, most), device=self.modes.device)
        chosen = order * modes // len(order)
        apart = (self.modes[chosen] * n // length - order).cummax(0).values
        return apart.clamp(max=most - len(order)) + order, chosen

    def forward(self, q: Tensor, length: int) -> Tensor:
        """Projected rows [R, n, D] -> [R, n, D]."""
        n = q.shape[1]
        bins, chosen = self.bins(n, length)
        # [R, n // 2 + 1, H, E]
        spectrum = torch.fft.rfft(widen(q), dim=1).unflatten(-1, (self.heads, -1))
        matrices = torch.view_as_complex(
            widen(self.weight[..., chosen]).movedim(0, -1).contiguous()
        )
        mixed = torch.einsum("rmhi,hiom->rmho", spectrum[:, bins], matrices)
        places = torch.arange(len(bins), device=bins.device) if self.wrong else bins
        out = torch.fft.irfft(torch.zeros_like(spectrum).index_copy(1, places, mixed), n=n, dim=1)
        return out.permute(0, 2, 3, 1).reshape(q.shape) if self.wrong else out.flatten(2)

    @torch.no_grad()
    def fit(self, old: int, length: int) -> None:
        """Make the modes bins of windows of `length` instead of `old`; matrices for which there are
        no bins go.
        """
        self.modes, chosen = self.bins(length, old)
        if len(chosen) < self.weight.shape[-1]:
            self.weight = nn.Parameter(self.weight[..., chosen].clone())


class FEDformer(autoformer.TimestepModel):
    """The encoder."""

    config: FEDformerConfig

    def __init__(self, config: FEDformerConfig) -> None:
        require_divisible(config, "dim")
        super().__init__(config)
        self.fourier = FourierMixer(config)
        self.queries = nn.ModuleList(
            nn.Linear(config.dim, config.dim) for _ in range(config.layers)
        )
        self.outs = nn.ModuleList(nn.Linear(config.dim, config.dim) for _ in range(config.layers))
        self.layers = nn.ModuleList(
            autoformer.DecompositionLayer(config) for _ in range(config.layers)
        )
        self.centred = autoformer.CentredLayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def encode_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """As `TimestepModel.encode_rows`."""
        index = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        states, x = [], self.dropout(x + encode_sinusoid(index, self.config.dim))
        for query, out, layer in zip(self.queries, self.outs, self.layers, strict=True):
            x = layer(x, out(self.fourier(query(x), self.config.length)))
            states.append(self.centred(x))
        return tuple(states)

    def _fit_length(self, before: int) -> list[str]:
        """The frequencies stay, as bins of the other length; short windows may have fewer bins than
        modes.
        """
        self.fourier.fit(before, self.config.length)
        self.config = self.config.model_copy(update={"modes": len(self.fourier.modes)})
        return []


@models(
    autoformer.TimestepFacts(
        config=FEDformerConfig,
        family="attention",
        source="Zhou et al. 2022, FEDformer: Frequency Enhanced Decomposed Transformer for "
        "Long-term Series Forecasting",
        known="In the reference results go to the wrong frequencies, in a scrambled layout, and a "
        "checkpoint does not hold its random frequencies",
    )
)
def fedformer(config: FEDformerConfig) -> FEDformer:
    """FEDformer: Autoformer's layers, mixed in a few frequencies; 40 % of the timesteps are masked
    and reconstructed.
    """
    return FEDformer(
        autoformer.configure_timesteps(config).model_copy(
            update={"modes": min(config.modes, max(config.length // 2, 1))}
        )
    )
