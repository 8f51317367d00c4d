"""BiTimelyGPT and its relatives: stacks of layers that read in a direction each.

BiTimelyGPT, TimelyGPT and TimelyBERT mix tokens by retention, GPT and GPT-BAAR by softmax
attention.

Everything stays in forward time order: the direction is an argument of a layer, nothing is flipped.
Positions 0 and n+1 of a row with n tokens hold [SOS] and [EOS]; token i is at position i+1; padding
follows [EOS] and is masked in every direction. Alternation (BAAR, paper section "Bidirectional
Alternating AutoRegressive Modeling"): odd layers forward, even ones backward, from 1 on.

Legend: B batch, N tokens, M = N + 2 positions, D width, H heads, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import PERSON, encode_times, get_time_span
from bitimely_core.models.base import (
    Model,
    extend_positions,
    require_learned_positions,
    standardise_tokens,
)
from bitimely_core.models.contract import Direction, config_error, require_divisible
from bitimely_core.models.layers import (
    BidirectionalConfig,
    Positions,
    StackConfig,
    StackLayer,
    join_layers,
    run_layers,
)
from bitimely_core.ops import operator
from bitimely_core.ops.rotary import make_rotation
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded

TIME_CODE = 32  # width of the waves of a time
READS_NO_TIMES = {"attention", "recurrent"}  # families whose layers do not
GROUP_GAP = 2.0**-6  # months; days are the finest clock of events

LayerDirections = tuple[Direction, ...]  # one per layer


class EmbeddedBatch(NamedTuple):
    """What layers read of a batch, on the clock of the model."""

    batch: Batch
    tokens: Tensor
    targets: Tensor
    real: Tensor  # bool [B, N]
    x: Tensor  # [B, M, D], embedded positions
    hide: Tensor | None  # bool [B, N], tokens that are hidden


LayerReading = tuple[list[Tensor], tuple[Tensor, ...] | None, Tensor | None]
"""States of each layer, maps on request, and the native vector."""


class BidirectionalModel(Model, ABC):
    """[SOS], tokens and [EOS] through layers with a direction each. A subclass adds `read`; `takes`
    lists its allowed directions.
    """

    takes: tuple[Direction, ...] = ("forward", "backward", "both")
    config: BidirectionalConfig

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__(config)
        self.special = nn.Parameter(torch.randn(2, config.dim) * 0.02)  # [SOS], [EOS]
        timed = config.exact_times and models[config.name].facts.family in READS_NO_TIMES
        # the weights of the layers do not depend on what is read beside the codes
        self.person_map: nn.Linear | None = None
        self.time_map: nn.Linear | None = None
        with torch.random.fork_rng(devices=[]):
            if config.tokenizer == "codes" and config.person:
                self.person_map = nn.Linear(PERSON, config.dim, bias=False)
            if config.tokenizer == "codes" and timed:
                self.time_map = nn.Linear(TIME_CODE + 1, config.dim, bias=False)

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode a batch.

        Args:
            batch: signals [B, T, V], or events [B, N] with times in months.
            directions: one per layer, instead of the model's own.
            hide: bool [B, N]; these tokens are replaced by a learned vector and masked as keys in
                every layer (their times stay).
            attention: also return the maps [B, H, N+2, N+2] of each layer (parallel form);
                recurrent layers have none.

        Raises:
            UserError: unsupported or too few directions; more positions than were learned (exit 2).
        """
        plan = self.directions if directions is None else tuple(directions)
        self._check(plan)
        embedded = self.embed(batch, hide)
        _, tokens, targets, real, x, _ = embedded
        states, maps, pooled = self.read(embedded, plan, attention=attention)
        if self.config.target == "tokens" and self.config.tokenizer != "codes":
            targets = standardise_tokens(tokens, real)
        eos = real.sum(1) + 1
        return Encoded(
            tokens,
            targets,
            real,
            tuple(states),
            maps,
            pooled,
            eos,
            eos if self.config.index_day else None,
            x[:, 1:-1],
        )

    def embed(self, batch: Batch, hide: Tensor | None = None) -> EmbeddedBatch:
        """The embedded positions of a batch; `hide` as in `forward`."""
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        if self.config.clock == "index":
            batch = batch._replace(times=None, end=None)
        tokens, targets, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens, batch.numbers)
        if hide is not None:
            x = torch.where(hide[..., None], adapter.blank.to(x.dtype), x)
        x = add_special_tokens(x, self.special, None if batch.mask is None else real.sum(1))
        x = self._add_person(x, batch, real)
        times = None if self.time_map is None else place_times(batch, real)
        if times is not None:
            x = self.add_clock(x, times, times[:, :1], times[:, :1])
        return EmbeddedBatch(batch, tokens, targets, real, x, hide)

    def _add_person(self, x: Tensor, batch: Batch, real: Tensor) -> Tensor:
        """Age and sex, on [SOS] and [EOS]: one of them reaches every position in either
        direction.
        """
        if self.person_map is None or batch.person is None:
            return x
        index = torch.arange(x.shape[1], device=x.device)
        special = (index == 0) | (index == real.sum(1, keepdim=True) + 1)
        return x + special[..., None] * self.person_map(batch.person.to(x.dtype))[:, None]

    def add_clock(self, x: Tensor, times: Tensor, first: Tensor, before: Tensor) -> Tensor:
        """Of layers that read no times: months of positions [B, M] since the `first` event [B, 1],
        and since the one `before` [B, 1].
        """
        if self.time_map is None:
            return x
        times = times - first
        gaps = torch.cat((before - first, times), 1).diff(dim=1).clamp(min=0.0).log1p()
        waves = encode_times(times, get_time_span(self.config), TIME_CODE)
        return x + self.time_map(torch.cat((waves, gaps[..., None]), -1).to(x.dtype))

    def enter_layers(self, x: Tensor) -> Tensor:
        """The input of the first layer from embedded positions [B, M, D]."""
        return x

    @abstractmethod
    def read(
        self, embedded: EmbeddedBatch, plan: LayerDirections, *, attention: bool
    ) -> LayerReading:
        """Embedded positions through the layers."""

    def _check(self, plan: LayerDirections) -> None:
        if len(plan) != self.config.layers:
            raise config_error(
                f"{len(plan)} directions",
                f"expected one per layer, {self.config.layers}",
                "directions",
            )
        if not set(plan) <= set(self.takes):
            raise config_error(
                f"{', '.join(sorted(set(plan)))} layers of {self.config.name}",
                f"its layers read {' or '.join(self.takes)}",
                "objective.name",
                f"Use the objective {models[self.config.name].facts.objective}",
            )


class Stack(BidirectionalModel):
    """Layers between [SOS] and [EOS]: retention under a `StackConfig`, else softmax attention as in
    GPT-2.
    """

    config: BidirectionalConfig

    def __init__(self, config: BidirectionalConfig) -> None:
        config = _validate_config(config)
        super().__init__(config)
        self.positions: nn.Parameter | None = None
        self.layers = nn.ModuleList(StackLayer(config) for _ in range(config.layers))
        if not isinstance(config, StackConfig):
            self.positions = nn.Parameter(self._draw_positions(0, self._count_positions()))
            self._start_like_gpt2()

    def _count_positions(self) -> int:
        return self.adapter.tokenizer.count(self.config.length) + 2

    def _draw_positions(self, first: int, count: int) -> Tensor:
        """Learned positions at the start, about half as large as the tokens, as in GPT-2: N(0,
        0.02) for codes, N(0, 0.1) for signals.
        """
        size = 0.02 if self.config.tokenizer == "codes" else 0.1
        return torch.randn(count, self.config.dim) * size

    def _start_like_gpt2(self) -> None:
        """Layers: N(0, 0.02), biases 0, projections into the residual stream divided by sqrt(2
        L).
        """
        for name, weight in self.layers.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif "norm" not in name:
                nn.init.normal_(
                    weight, std=0.02 / math.sqrt(2 * len(self.layers)) if ".out." in name else 0.02
                )

    def read(
        self, embedded: EmbeddedBatch, plan: LayerDirections, *, attention: bool
    ) -> LayerReading:
        """As `BidirectionalModel.read`; there is no native vector."""
        x, places = embedded.x, self._places(embedded)
        if self.positions is not None:
            require_learned_positions(x.shape[1], len(self.positions))
            x = F.dropout(x + self.positions[: x.shape[1]], self.config.dropout, self.training)
        states, maps = run_layers(
            self.layers, x, plan, places, each=join_layers(self.layers, x), attention=attention
        )
        return states, tuple(maps) if attention else None, None

    def _places(self, embedded: EmbeddedBatch) -> Positions:
        """The N + 2 positions: t_SOS = t_first, t_EOS = t_last; padding has t_EOS so that gaps stay
        finite.
        """
        batch, _, _, real, _, hide = embedded
        index = torch.arange(real.shape[1] + 2, device=real.device)
        inside = keep = None
        if batch.mask is not None or hide is not None:
            inside = keep = index <= real.sum(1, keepdim=True) + 1
        if hide is not None and inside is not None:
            keep = inside & ~F.pad(hide, (1, 1))
        times = place_times(batch, real, GROUP_GAP if self.config.ties == "group" else 0.0)
        if not isinstance(self.config, StackConfig):
            return Positions(index, times, keep, inside)
        positions = index
        if times is not None and self.config.rotary == "time":
            positions = times - times[:, :1]
        return Positions(positions, times, keep, inside, self._make_table(positions, self.config))

    def _make_table(self, positions: Tensor, config: StackConfig) -> Tensor | None:
        """The rotation as the operator of retention reads it; None where it rotates before."""
        exact = config.xpos_scale or positions.requires_grad or self.special.dtype == torch.float64
        if exact or not operator.is_used(positions.device):
            return None
        return make_rotation(positions, config.dim // config.heads)

    def _fit_length(self, before: int) -> list[str]:
        """Learned positions are cut, or continued by random ones."""
        if self.positions is None:
            return []
        return extend_positions(self, "positions", self._count_positions(), self._draw_positions)


def place_times(batch: Batch, real: Tensor, apart: float = 0.0) -> Tensor | None:
    """Months of the N + 2 positions [B, M]: t_SOS = t_first, t_EOS = t_last or the index day, which
    padding has too; None on a regular clock.

    [SOS] and [EOS] stand `apart` from the events: tied with them, they would not see them.
    """
    if batch.times is None:
        return None
    lengths = real.sum(1, keepdim=True)
    times = torch.where(real, batch.times, 0.0)
    first, last = times[:, :1], times.gather(1, (lengths - 1).clamp(min=0))
    # under a landmark the index day
    last = last if batch.end is None else batch.end[:, None].to(last)
    is_event = torch.arange(real.shape[1], device=real.device) < lengths
    inner = torch.where(is_event, times, last + apart)
    return torch.cat((first - apart, inner, last + apart), 1)


def add_special_tokens(x: Tensor, special: Tensor, lengths: Tensor | None) -> Tensor:
    """[SOS] before and [EOS] right after the real tokens of each row, [B, N, D] -> [B, N + 2, D];
    `special` [2, D]: both vectors.
    """
    sos, eos = special[:, None, None].expand(-1, x.shape[0], 1, -1)
    x = torch.cat((sos, x, eos), 1)
    if lengths is None:
        return x
    at_eos = torch.arange(x.shape[1], device=x.device) == lengths[:, None] + 1
    return torch.where(at_eos[..., None], special[1].to(x.dtype), x)


def _validate_config(config: BidirectionalConfig) -> BidirectionalConfig:
    """The effective configuration. Raises UserError (config, exit 2) for incompatible widths,
    heads, layers or options.
    """
    # GPT-2 has one width for keys and values, and a plain FFN
    if not isinstance(config, StackConfig):
        config = config.model_copy(
            update={"value_dim": config.dim, "ffn": "plain", "ties": "canonical"}
        )
    require_divisible(config, "dim", "value_dim")
    if config.dim // config.heads % 2:
        raise config_error(
            f"{config.dim // config.heads} key dimensions a head",
            "expected an even number, rotation works in pairs",
            "model.dim",
        )
    require_even_layers(config)
    if (
        isinstance(config, StackConfig)
        and config.xpos_scale
        and "both" in models[config.name].facts.directions
    ):
        raise config_error(
            "xpos_scale in two-sided layers",
            "expected forward or backward layers",
            "model.xpos_scale",
            "Leave xpos_scale off",
        )
    return config


def require_even_layers(config: ModelConfig) -> None:
    """Directions that alternate need an even number of layers. Raises UserError (config, exit
    2).
    """
    if config.layers % len(models[config.name].facts.directions):
        raise config_error(
            f"{config.layers} layers",
            "expected an even number: forward and backward layers alternate",
            "model.layers",
            f"Use {config.layers + 1} layers",
        )


# --- the registered models

ALTERNATING: LayerDirections = ("forward", "backward")
# of a stack whose layers can read in either direction
DIRECTED_CAPABILITIES = ("alternating", "one-way", "hidden")
PAPER = (
    "Song et al. 2024, Bidirectional Generative Pre-training for Improving Healthcare "
    "Time-series Representation Learning"
)


def _describe_row(
    config: type[BidirectionalConfig],
    directions: LayerDirections,
    objective: str,
    readout: str,
    limits: str,
    source: str = PAPER,
) -> ModelFacts:
    return ModelFacts(
        config=config,
        family="retention" if config is StackConfig else "attention",
        objective=objective,
        capabilities=DIRECTED_CAPABILITIES,
        readout=readout,
        directions=directions,
        attention=True,
        input=("regular", "events"),
        tokenizer="patch-cnn",
        source=source,
        known=limits,
    )


@models(
    _describe_row(
        StackConfig,
        ALTERNATING,
        "next-previous-strict",
        "sos",
        "The paper's objective, next-previous, shows the model its targets; the stated sizes do "
        "not follow from the table of configurations",
    )
)
def bitimelygpt(config: StackConfig) -> Stack:
    """BiTimelyGPT: forward and backward retention in turns."""
    return Stack(config)


@models(
    _describe_row(
        StackConfig,
        ("forward",),
        "next",
        "eos",
        "Its convolution module is off unless model.temporal_conv=causal; the original one sees "
        "15 future tokens",
        "Song et al. 2023, TimelyGPT",
    )
)
def timelygpt(config: StackConfig) -> Stack:
    """TimelyGPT: forward retention in every layer."""
    return Stack(config)


@models(
    _describe_row(
        StackConfig,
        ("both",),
        "masked",
        "sos",
        "The paper compares it with a model without pre-training that also has another "
        "architecture",
    )
)
def timelybert(config: StackConfig) -> Stack:
    """TimelyBERT: two-sided retention in every layer, pre-trained by masking."""
    return Stack(config)


@models(
    _describe_row(
        BidirectionalConfig, ("forward",), "next", "eos", "", "Radford et al. 2019, GPT-2"
    )
)
def gpt(config: BidirectionalConfig) -> Stack:
    """GPT-2: causal softmax attention, learned positions."""
    return Stack(config)


@models(
    _describe_row(
        BidirectionalConfig,
        ALTERNATING,
        "next-previous-strict",
        "sos",
        "The paper's objective shows the targets to the model, as BiTimelyGPT's does",
    )
)
def gpt_baar(config: BidirectionalConfig) -> Stack:
    """GPT-2 with causal and reversed attention in turns."""
    return Stack(config)
