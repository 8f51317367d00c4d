"""SeFT (Horn et al. 2020): a sample is a set of observations, pooled by attention with learned
queries.

An element is s = [p(t), value, one-hot of its channel], embedded as phi(s). The weights a_i of a
head are the softmax over the set of k_i . q / sqrt(D); the vector concatenates sum_i a_i phi(s_i)
over the heads. Queries start at 0: uniform weights.

The paper's keys also depend on the set, k_i = [s_i; c] W with c = rho'(mean_i psi(s_i)). As the map
is linear, c shifts all scores of a head by the same number, which the softmax cancels: psi and rho'
have no effect and are omitted, k_i = s_i W. Weights sum to 1, so the vector does not depend on the
size of the set.

A linear map of s is a linear map of [p(t), value] plus one learned vector per channel: the one-hot
is never built.

Legend: B batch, N elements, V channels (events: codes), D width of phi and of the keys, H heads.
phi is three layers of `ffn_dim` and one of D.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import RowTokenizer, find_end_times, get_time_span
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.registry import models
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.supervised import RowAdapter, SupervisedFacts, SupervisedModel, encode_times

POSITIONS = 4  # n_pos, width of p(t)
DROPPED = 0.1  # share of the elements masked in the attention during training


class SetElements(NamedTuple):
    """The set of each sample; the order has no meaning."""

    times: Tensor  # [B, N] months; signals: number of the sample
    values: Tensor  # [B, N]; events: 1
    channels: Tensor  # [B, N] int64
    real: Tensor  # [B, N] bool


class SetTokenizer(RowTokenizer):
    """Observations as tokens: every event, or every observed value of a signal."""

    def count(self, length: int) -> int:
        """N of windows of `length` samples without gaps (events: sequences of `length` events)."""
        return length if self.events else length * self.width

    def elements(self, batch: Batch) -> SetElements:
        """The observations of each sample, those of signals packed to the left."""
        if self.events:
            ids = batch.values.long()
            real = ids >= FIRST if batch.mask is None else batch.mask.bool() & (ids >= FIRST)
            times = torch.zeros_like(ids).float() if batch.times is None else batch.times
            # the clock ends at the index day
            times = times + self.span - find_end_times(batch)[:, None] if self.ends else times
            plain = SetElements(
                torch.where(real, times, 0.0), real.to(times), (ids - FIRST).clamp(min=0), real
            )
            if self.numbers is None:
                return plain
            # a number is an element of its own, of the channel V + code
            z, numbered = self.numbers(ids, batch.numbers)
            numbered = numbered & real
            numbers = SetElements(
                plain.times,
                torch.where(numbered, z, 0.0).to(times),
                plain.channels + self.target_width,
                numbered,
            )
            return SetElements(*(torch.cat(pair, 1) for pair in zip(plain, numbers, strict=True)))
        rows = self.rows(batch)
        real = rows.mask.flatten(1)
        if batch.mask is None:
            times, channels = (
                rows.times[..., None].expand_as(rows.values),
                torch.arange(self.width, device=real.device),
            )
            return SetElements(
                times.flatten(1),
                rows.values.flatten(1),
                channels.expand(rows.values.shape).flatten(1),
                real,
            )
        order = (
            (~real)
            .to(torch.int8)
            .argsort(stable=True, dim=1)[:, : max(int(real.sum(1).max()), 1) if len(real) else 1]
        )
        times = rows.times[..., None].expand_as(rows.values).flatten(1).gather(1, order)
        return SetElements(
            times,
            rows.values.flatten(1).gather(1, order),
            order % self.width,
            real.gather(1, order),
        )


class ElementLinear(nn.Module):
    """A linear map of [p(t), value, one-hot of the channel], without the one-hot."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        bound = math.sqrt(6 / (POSITIONS + 1 + channels))  # He-uniform, of the whole map
        self.weight = nn.Parameter(torch.empty(POSITIONS + 1, out).uniform_(-bound, bound))
        self.channel = nn.Parameter(torch.empty(channels, out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, plain: Tensor, channels: Tensor) -> Tensor:
        """[p(t), value] [B, N, 5] and channels [B, N] -> [B, N, out]."""
        return plain @ self.weight + self.channel[channels] + self.bias


class SeFTAdapter(RowAdapter):
    """The parameters that depend on the channels: first layer of phi, keys W [5 + V, H, D]."""

    tokenizer: SetTokenizer

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        super().build(config)
        self.tokenizer = SetTokenizer(config)
        channels = self.tokenizer.width
        self.phi = ElementLinear(channels, config.ffn_dim)
        size = (POSITIONS + 1 + channels, config.heads, config.dim)
        bound = math.sqrt(6 / (size[0] + config.dim))  # the fan-in includes the omitted part
        self.key = nn.Parameter(torch.empty(size).uniform_(-bound, bound))


def build_dense(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear, ReLU (and dropout) for each pair of widths, He-uniform weights, biases 0."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
    return nn.Sequential(*layers)


class SeFT(SupervisedModel):
    """A set of observations under H learned queries."""

    adapter_type = SeFTAdapter

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        dim = config.dim
        hidden = config.ffn_dim
        self.phi = nn.Sequential(
            build_dense(hidden, hidden, hidden, dropout=config.dropout), build_dense(hidden, dim)
        )
        self.queries = nn.Parameter(torch.zeros(config.heads, dim))
        self.pooled_width = config.heads * dim

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """Phi of each element [B, N, D] and the set vector [B, H * D]; maps: weights of the
        elements [B, H, 1, N].
        """
        adapter = cast(SeFTAdapter, self.adapter_of(batch))
        elements = adapter.tokenizer.elements(batch)
        times = encode_times(elements.times, get_time_span(self.config), POSITIONS)
        plain = torch.cat((times, elements.values[..., None]), -1).to(self.queries.dtype)
        states = self.phi(
            F.dropout(
                F.relu(adapter.phi(plain, elements.channels)), self.config.dropout, self.training
            )
        )
        # k . q = s (W q), [5 + V, H]: no key is ever built
        folded = (adapter.key * self.queries).sum(-1)
        scores = (
            plain @ folded[: POSITIONS + 1] + folded[POSITIONS + 1 :][elements.channels]
        ).transpose(1, 2)
        usable = elements.real
        if self.training:
            drawn = usable & (torch.rand(usable.shape, device=usable.device) >= DROPPED)
            usable = torch.where(drawn.any(1, keepdim=True), drawn, usable)
        scores = (scores / math.sqrt(self.config.dim)).masked_fill(
            ~usable[:, None], torch.finfo(scores.dtype).min
        )
        # [B, H, N], each row sums to 1; 0 for an empty set
        weights = torch.where(usable[:, None], scores.softmax(-1), 0.0)
        pooled = (weights @ torch.where(elements.real[..., None], states, 0.0)).flatten(1)
        return Encoded(
            elements.values,
            None,
            elements.real,
            (states,),
            (weights[:, :, None],) if attention else None,
            pooled,
        )


@models(
    SupervisedFacts(
        family="seft",
        input=("regular", "events", "irregular"),
        step=2,
        source="Horn et al. 2020, Set Functions for Time Series",
        known="Supervised only; its weights sum to 1, so how many observations there are is not "
        "seen",
    )
)
def seft(config: ModelConfig) -> SeFT:
    """SeFT: observations as a set under learned queries; trained with its head alone."""
    return SeFT(config)
