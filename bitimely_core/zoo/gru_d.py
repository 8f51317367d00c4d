"""GRU-D (Che et al. 2018): a GRU on values, observation masks and time gaps, with learned decays of
inputs and state.

Per row with values x, mask m and gaps delta (the time since each channel was last observed):

    gamma_x = exp(-max(0, w_x * delta + b_x))         each channel by itself
    gamma_h = exp(-max(0, W_h delta + b_h))
    x^ = m x + (1 - m) (gamma_x x' + (1 - gamma_x) mu)
    h <- gamma_h * h
    r, z = sigmoid(W [x^; m] + U h + b)
    h~ = tanh(W [x^; m] + U (r * h) + b)
    h = (1 - z) * h + z * h~

with the decayed h throughout. x' is the last observed value, mu before the first. mu is 0: windows
are standardised on the training split, and of codes 0 is absence.

Legend: B batch, T rows, V channels (events: codes), H hidden width = D.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import TimedRows, get_time_span
from bitimely_core.registry import models
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.supervised import RowAdapter, SupervisedFacts, SupervisedModel


class GRUDConfig(ModelConfig):
    """Settings of GRU-D."""

    cell: Literal["paper", "concat"] = Field(
        "paper", description="concat: the inputs also hold the state, in torch's cell."
    )
    gap_unit: float | None = Field(
        12.0, gt=0, description="Months of events that are a gap of 1; none: the horizon."
    )

    def get_gap_unit(self) -> float:
        """The time that is a gap of 1: months; signals: samples of a window."""
        return (
            self.gap_unit
            if self.gap_unit is not None and self.codes is not None
            else get_time_span(self)
        )


def compute_gaps(rows: TimedRows) -> Tensor:
    """Delta, [B, T, V]: the time since each channel was last observed before the row, or since the
    first row where it never was.
    """
    before = torch.where(rows.mask, rows.times[..., None], rows.times[:, :1, None]).cummax(1).values
    before = torch.cat((rows.times[:, :1, None].expand_as(before[:, :1]), before[:, :-1]), 1)
    return rows.times[..., None] - before


def carry_forward(rows: TimedRows, mean: Tensor) -> Tensor:
    """X' [B, T, V]: the last observed value of each channel up to the row, `mean` [V] before its
    first.
    """
    index = torch.arange(rows.mask.shape[1], device=rows.mask.device)[:, None]
    last = torch.where(rows.mask, index, -1).cummax(1).values
    return torch.where(last >= 0, rows.values.gather(1, last.clamp(min=0)), mean)


class GRUDAdapter(RowAdapter):
    """The parameters that depend on the channels: both decays, and the weights of [x^; m] in the
    gates.
    """

    mean: Tensor

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        super().build(config)
        channels, hidden = self.tokenizer.width, config.dim
        bound = 1 / math.sqrt(channels)
        self.value_weight, self.value_bias = (
            nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) for _ in range(2)
        )
        self.state = nn.Linear(channels, hidden)
        self.read = nn.Linear(2 * channels, 3 * hidden)
        self.register_buffer("mean", torch.zeros(channels))


class GRUD(SupervisedModel):
    """One recurrent layer with decays; the sequence vector is the state at the last row."""

    adapter_type = GRUDAdapter
    config: GRUDConfig

    def __init__(self, config: GRUDConfig) -> None:
        super().__init__(config)
        hidden = config.dim
        self.gates = nn.Linear(hidden, 2 * hidden, bias=False)  # U of r and z
        self.candidate = nn.Linear(hidden, hidden, bias=config.cell == "concat")  # U of h~
        self.again = nn.Linear(hidden, 3 * hidden, bias=False) if config.cell == "concat" else None
        self.pooled_width = hidden

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """States after each row [B, T, H], past the end of a sample its last one; no maps."""
        adapter = cast(GRUDAdapter, self.adapter_of(batch))
        rows = adapter.tokenizer.rows(batch)
        delta = compute_gaps(rows) / self.config.get_gap_unit()
        gamma = torch.exp(-F.relu(adapter.value_weight * delta + adapter.value_bias))
        # x^
        imputed = torch.where(
            rows.mask,
            rows.values,
            gamma * carry_forward(rows, adapter.mean) + (1 - gamma) * adapter.mean,
        )
        read = adapter.read(torch.cat((imputed, rows.mask.to(delta)), -1))
        states = self.recur(read, torch.exp(-F.relu(adapter.state(delta))), rows.real)
        pooled = F.dropout(states[:, -1], self.config.dropout, self.training)
        return Encoded(rows.values, None, rows.real, (states,), None, pooled)

    def recur(self, read: Tensor, gamma: Tensor, real: Tensor) -> Tensor:
        """States [B, T, H] from W [x^; m] + b [B, T, 3 H] (r, z, h~ side by side) and gamma_h [B,
        T, H]; padding leaves the state unchanged.
        """
        h = read.new_zeros(read.shape[0], gamma.shape[-1])
        states = []
        for gate, decay, inside in zip(
            read.unbind(1), gamma.to(read).unbind(1), real[..., None].unbind(1), strict=True
        ):
            faded = decay * h
            from_r, from_z, from_c = (
                gate if self.again is None else gate + self.again(faded)
            ).chunk(3, -1)
            to_r, to_z = self.gates(faded).chunk(2, -1)
            r, z = torch.sigmoid(from_r + to_r), torch.sigmoid(from_z + to_z)
            if self.again is None:
                new = (1 - z) * faded + z * torch.tanh(from_c + self.candidate(r * faded))
            else:  # torch's cell: r gates behind the product, and z keeps
                new = z * faded + (1 - z) * torch.tanh(from_c + r * self.candidate(faded))
            h = torch.where(inside, new, h)
            states.append(h)
        return torch.stack(states, 1)


@models(
    SupervisedFacts(
        config=GRUDConfig,
        family="gru-d",
        input=("regular", "events", "irregular"),
        source="Che et al. 2018, Recurrent Neural Networks for Multivariate Time Series with "
        "Missing Values",
        known="Supervised only; a step a row: long windows are slow",
    )
)
def gru_d(config: GRUDConfig) -> GRUD:
    """GRU-D: a GRU whose inputs and state decay with the time since they were observed; trained
    with its head alone.
    """
    return GRUD(config)
