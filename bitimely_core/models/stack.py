"""The grid mixer x direction: BiTimelyGPT, TimelyGPT, TimelyBERT (retention), GPT and GPT-BAAR (softmax attention).

Everything stays in forward time order: the direction is an argument of a layer, nothing is flipped. Positions 0 and n+1 of a row
with n tokens hold [SOS] and [EOS]; token i is at position i+1; padding follows [EOS] and is masked in every direction.
Alternation (BAAR, paper section "Bidirectional Alternating AutoRegressive Modeling"): odd layers forward, even ones backward, from 1 on.

Legend: B batch, N tokens, M = N + 2 positions, D width, H heads, K key width of a head, W value width of a head, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, Section
from bitimely_core.models.base import Direction, Model, config_error, extend_positions, require_learned_positions, standardise_tokens
from bitimely_core.ops.retention import retention, retention_matrix
from bitimely_core.ops.rotary import rotate, xpos
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded

GROUP_GAP = 2.0**-6  # months; days are the finest clock of events


LayerDirections = tuple[Direction, ...]  # one per layer


class BidirectionalConfig(ModelConfig):
    """Settings of models whose layers read in given directions."""

    clock: Literal["time", "index"] = Field("time", description="Clock of events: months, or positions alone (a control for the times).")


class Decay(Section):
    """The decay of the retention heads (method.md 1.4). `from`, `to`: gamma = 1 - 1/x, log-spaced over the heads."""

    model_config = ConfigDict(populate_by_name=True)
    kind: Literal["log", "retnet", "half-life", "learnable"] = "log"
    start: float = Field(32.0, alias="from", gt=1)
    end: float = Field(512.0, alias="to", gt=1)
    months: tuple[float, ...] = Field((6.0, 24.0, 96.0, 384.0), description="Half-lives, for kind half-life.")


class StackConfig(BidirectionalConfig):
    """Settings of the retention models."""

    decay: Decay = Field(Decay(), description="Decay of the heads.")
    retention_norm: Literal["group", "rms"] = Field("group", description="Norm of the retention of each head and token.")
    xpos_scale: bool = Field(False, description="Scale of xPos in the rotation.")
    rotary: Literal["index", "time"] = Field("index", description="Rotation by position, or by the months of events.")
    temporal_conv: Literal["off", "causal"] = Field("off", description="TimelyGPT's convolution module.")
    temporal_norm: Literal["batch", "layer"] = Field("batch", description="Norm within the convolution module.")
    form: Literal["auto", "parallel", "chunkwise", "recurrent"] = Field("auto", description="How retention is computed.")
    chunk: int = Field(64, ge=1, description="Tokens of a chunk.")
    core_precision: Literal["fp32", "bf16"] = Field("fp32", description="Precision of the retention core; set by train.core_precision.")

    def leak_conditions(self) -> tuple[str, ...]:
        """As `ModelConfig.leak_conditions`; batch norm over time adds one."""
        mixes = self.temporal_conv == "causal" and self.temporal_norm == "batch"
        return (*super().leak_conditions(), *(("up to batch statistics",) if mixes else ()))


class Positions(NamedTuple):
    """Positions, times and masks of a batch; the same for all layers."""

    positions: Tensor  # [M] or [B, M], of the rotation
    times: Tensor | None  # [B, M] months, None on a regular clock
    keep: Tensor | None  # [B, M] usable keys, None = all
    real: Tensor | None  # [B, M] not padding, None = all


# ---------------------------------------------------------------------------------------------------------------- mixers


def log_decays(config: StackConfig) -> Tensor:
    """Logarithm of gamma for each head, float64 [H], from `config.decay`."""
    decay, heads = config.decay, config.heads
    if decay.kind == "half-life":
        if len(decay.months) != heads:
            raise config_error(f"{len(decay.months)} half-lives", f"expected one per head, {heads}", "model.decay.months")
        return -math.log(2) / torch.tensor(decay.months, dtype=torch.float64)
    if decay.kind == "retnet":
        return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float64))))
    return torch.log1p(-torch.exp(torch.linspace(-math.log(decay.start), -math.log(decay.end), heads, dtype=torch.float64)))


class Retention(nn.Module):
    """Multi-head retention with rotation and decay (paper Eq. 3, 4, 8, 10): W_O( SiLU(x W_G) * norm(Ret(x)) ), no biases.

    The norm is per head and token, after the sum over keys, and does not mix time.
    """

    log_decay: Tensor

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        dim, values = config.dim, config.value_dim
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value, self.gate = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.out = nn.Linear(values, dim, bias=False)
        decays = log_decays(config)
        if config.decay.kind == "learnable":
            self.logit = nn.Parameter((decays.exp() / -torch.expm1(decays)).log().float())  # gamma = sigmoid(logit)
        else:
            self.register_buffer("log_decay", decays.float())

    @property
    def decays(self) -> Tensor:
        """Logarithm of gamma [H]."""
        return F.logsigmoid(self.logit) if self.config.decay.kind == "learnable" else self.log_decay

    def forward(self, x: Tensor, places: Positions, direction: Direction, *, attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the map R [B, H, M, M] on request."""
        config = self.config
        q, k, v = (linear(x).unflatten(-1, (config.heads, -1)) for linear in (self.query, self.key, self.value))
        q, k = rotate(q, places.positions), rotate(k, places.positions)
        if config.xpos_scale:
            index = torch.arange(x.shape[1], device=x.device)
            q, k = xpos(q, index, direction, key=False), xpos(k, index, direction, key=True)  # type: ignore[arg-type]
        ties: Literal["index", "group"] = "group" if config.ties == "group" else "index"
        if attention:
            maps = retention_matrix(q, k, log_decay=self.decays, times=places.times, mask=places.keep, direction=direction, ties=ties)
            o = torch.einsum("bhnm,bmhw->bnhw", maps, v)
        else:
            maps = None
            o = retention(
                q,
                k,
                v,
                log_decay=self.decays,
                times=places.times,
                mask=places.keep,
                direction=direction,
                ties=ties,
                form=config.form,
                chunk=config.chunk,
                core_precision=config.core_precision,
            )
        if config.retention_norm == "rms":
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6)
        else:
            o = F.layer_norm(o, o.shape[-1:], eps=1e-5)  # = group norm with H groups on each token by itself
        return self.out(F.silu(self.gate(x)) * o.flatten(-2)), maps


class Attention(nn.Module):
    """Softmax attention of GPT-2 with biases; masked pairs get -inf before the softmax (paper Eq. 1, 2; its product would leave a logit of 0)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv, self.out = nn.Linear(config.dim, 3 * config.dim), nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, places: Positions, direction: Direction, *, attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the map A [B, H, M, M] on request; its rows sum to 1."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        allowed = self._allowed_pairs(places, x.shape[1], direction, x.device)
        maps = None
        if attention:
            logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            maps = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)
            o = F.dropout(maps, dropout) @ v
        elif direction == "forward" and places.keep is None:
            o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout)
        return self.out(o.transpose(1, 2).flatten(-2)), maps

    @staticmethod
    def _allowed_pairs(places: Positions, count: int, direction: Direction, device: torch.device) -> Tensor | None:
        """Allowed pairs (query, key), bool [M, M], [B, 1, M, M] or (the same for all queries) [B, 1, 1, M]; None = all."""
        if direction == "both" and places.keep is not None:  # one row of keys for all queries; a row without any key would be NaN
            return (places.keep | ~places.keep.any(1, keepdim=True))[:, None, None]
        pairs = torch.ones(count, count, dtype=torch.bool, device=device)
        if places.keep is None:
            return {"forward": pairs.tril(), "backward": pairs.triu(), "both": None}[direction]
        pairs = pairs.tril() if direction == "forward" else pairs.triu()
        assert places.real is not None
        padding = ~places.real[:, :, None] & torch.eye(count, dtype=torch.bool, device=device)  # a row without any key would be NaN
        return (pairs & places.keep[:, None, :] | padding)[:, None]


# ---------------------------------------------------------------------------------------------------------------- layers


class GLU(nn.Module):
    """W_O( act(x W_1) * (x W_2) ), no biases."""

    def __init__(self, dim: int, hidden: int, act: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)
        self.act = F.silu if act == "silu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        return self.out(self.act(self.first(x)) * self.second(x))


class MLP(nn.Module):
    """Linear, activation, Linear, with biases."""

    def __init__(self, dim: int, hidden: int, act: str) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.act = {"gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.GELU(approximate="tanh")}[act]

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        return self.out(self.act(self.first(x)))


class TemporalConv(nn.Module):
    """TimelyGPT's convolution module: norm, pointwise D -> 2D, GLU, depthwise (31 steps), norm, SiLU, pointwise, dropout 0.1.

    The depthwise kernel covers 30 past positions in the layer's direction (15 to each side in a two-sided layer): symmetric padding would
    show 15 future tokens to a next-token model. In training batch norm, unlike layer norm, mixes rows and times of real positions.
    """

    width = 31

    def __init__(self, dim: int, norm: str) -> None:
        super().__init__()
        self.norm, self.widen = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, self.width, groups=dim, bias=False)
        self.inner: nn.BatchNorm1d | nn.LayerNorm = nn.BatchNorm1d(dim) if norm == "batch" else nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, places: Positions, direction: Direction) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        y = F.glu(self.widen(self.norm(x)), -1)
        if places.real is not None:  # zeros right of [EOS], whatever the padding
            y = y * places.real[..., None]
        past = {"forward": (self.width - 1, 0), "backward": (0, self.width - 1), "both": (self.width // 2, self.width // 2)}[direction]
        weight = self.depthwise.weight.flip(-1) if direction == "backward" else self.depthwise.weight
        y = F.conv1d(F.pad(y.transpose(1, 2), past), weight, groups=y.shape[-1]).transpose(1, 2)
        return F.dropout(self.out(F.silu(self._normalise(y, places.real))), 0.1 if self.training else 0.0)

    def _normalise(self, y: Tensor, real: Tensor | None) -> Tensor:
        if isinstance(self.inner, nn.LayerNorm):
            return self.inner(y)
        if real is None:
            return self.inner(y.flatten(0, 1)).view_as(y)
        normed = torch.zeros_like(y)
        normed[real] = self.inner(y[real]).to(y.dtype)
        return normed


class StackLayer(nn.Module):
    """Pre-norm residual: y = x + mix(norm(x)); y = y + conv(y) if configured; z = y + ffn(norm(y))."""

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__()
        self.mix = Retention(config) if isinstance(config, StackConfig) else Attention(config)
        self.norm_mix, self.norm_ffn = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.conv = None
        if isinstance(config, StackConfig) and config.temporal_conv == "causal":
            self.conv = TemporalConv(config.dim, config.temporal_norm)
        act = config.ffn_act if isinstance(config, StackConfig) else "tanh"
        self.ffn = GLU(config.dim, config.ffn_dim, act) if config.ffn == "glu" else MLP(config.dim, config.ffn_dim, act)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, places: Positions, direction: Direction, *, attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the mixer's map on request."""
        mixed, maps = self.mix(self.norm_mix(x), places, direction, attention=attention)
        x = x + self.dropout(mixed)
        if self.conv is not None:
            x = x + self.conv(x, places, direction)
        return x + self.dropout(self.ffn(self.norm_ffn(x))), maps


# ---------------------------------------------------------------------------------------------------------------- model


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, plan: Iterable[Direction], given: Any, **options: Any
) -> tuple[list[Tensor], list[Any]]:
    """States [B, M, ..] and map (or None) of each layer; `plan` gives the direction of each."""
    states, maps = [], []
    for layer, direction in zip(layers, plan, strict=True):
        x, of_layer = layer(x, given, direction, **options)
        states.append(x)
        maps.append(of_layer)
    return states, maps


class BidirectionalModel(Model, ABC):
    """[SOS], tokens and [EOS] through layers with a direction each. A subclass adds `read`; `takes` lists its allowed directions."""

    takes: tuple[Direction, ...] = ("forward", "backward", "both")
    config: BidirectionalConfig

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__(config)
        self.special = nn.Parameter(torch.randn(2, config.dim) * 0.02)  # [SOS], [EOS]

    def forward(
        self, batch: Batch, *, directions: Iterable[Direction] | None = None, hide: Tensor | None = None, attention: bool = False
    ) -> Encoded:
        """Encode a batch.

        Args:
            batch: signals [B, T, V], or events [B, N] with times in months.
            directions: one per layer, instead of the model's own.
            hide: bool [B, N]; these tokens are replaced by a learned vector and masked as keys in every layer (their times stay).
            attention: also return the maps [B, H, N+2, N+2] of each layer (parallel form); recurrent layers have none.

        Raises:
            UserError: unsupported or too few directions; more positions than were learned (exit 2).
        """
        plan = self.directions if directions is None else tuple(directions)
        self._check(plan)
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        if self.config.clock == "index":
            batch = batch._replace(times=None, end=None)
        tokens, targets, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens)
        if hide is not None:
            x = torch.where(hide[..., None], adapter.blank.to(x.dtype), x)
        x = add_special_tokens(x, self.special, None if batch.mask is None else real.sum(1))
        states, maps, pooled = self.read(x, batch, real, plan, hide=hide, attention=attention)
        if self.config.target == "tokens" and self.config.tokenizer != "codes":
            targets = standardise_tokens(tokens, real)
        return Encoded(tokens, targets, real, tuple(states), maps, pooled, real.sum(1) + 1)

    @abstractmethod
    def read(
        self, x: Tensor, batch: Batch, real: Tensor, plan: LayerDirections, *, hide: Tensor | None, attention: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...] | None, Tensor | None]:
        """States of each layer, maps on request, and the native vector, from embedded positions [B, M, D]; `real` [B, N]."""

    def _check(self, plan: LayerDirections) -> None:
        if len(plan) != self.config.layers:
            raise config_error(f"{len(plan)} directions", f"expected one per layer, {self.config.layers}", "directions")
        if not set(plan) <= set(self.takes):
            raise config_error(
                f"{', '.join(sorted(set(plan)))} layers of {self.config.name}",
                f"its layers read {' or '.join(self.takes)}",
                "objective.name",
                f"Use the objective {models[self.config.name].facts.objective}",
            )


class Stack(BidirectionalModel):
    """Layers between [SOS] and [EOS]: retention under a `StackConfig`, else softmax attention as in GPT-2."""

    config: BidirectionalConfig

    def __init__(self, config: BidirectionalConfig) -> None:
        config = _validate_config(config)
        super().__init__(config)
        self.positions: nn.Parameter | None = None
        self.layers = nn.ModuleList(StackLayer(config) for _ in range(config.layers))
        if not isinstance(config, StackConfig):
            self.positions = nn.Parameter(_draw_normal(self.adapter.tokenizer.count(config.length) + 2, config.dim))
            self._start_like_gpt2()

    def _start_like_gpt2(self) -> None:
        """N(0, 0.02), biases 0, projections into the residual stream divided by sqrt(2 L)."""
        for name, weight in self.layers.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif "norm" not in name:
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * len(self.layers)) if ".out." in name else 0.02)

    def read(
        self, x: Tensor, batch: Batch, real: Tensor, plan: LayerDirections, *, hide: Tensor | None, attention: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...] | None, Tensor | None]:
        """As `BidirectionalModel.read`; there is no native vector."""
        places = self._places(batch, real, real.sum(1), hide)
        if self.positions is not None:
            require_learned_positions(x.shape[1], len(self.positions))
            x = F.dropout(x + self.positions[: x.shape[1]], self.config.dropout, self.training)
        states, maps = run_layers(self.layers, x, plan, places, attention=attention)
        return states, tuple(maps) if attention else None, None

    def _places(self, batch: Batch, real: Tensor, lengths: Tensor, hide: Tensor | None) -> Positions:
        """The N + 2 positions: t_SOS = t_first, t_EOS = t_last; padding has t_EOS so that gaps stay finite."""
        index = torch.arange(real.shape[1] + 2, device=real.device)
        inside = None if batch.mask is None and hide is None else index <= lengths[:, None] + 1
        keep = inside
        if hide is not None and inside is not None:
            keep = inside & ~F.pad(hide, (1, 1))
        if batch.times is None:
            return Positions(index, None, keep, inside)
        known = torch.where(real, batch.times, 0.0)
        first, last = known[:, :1], known.gather(1, (lengths - 1).clamp(min=0)[:, None])
        last = last if batch.end is None else batch.end[:, None].to(last)  # under a landmark the index day
        # [SOS] and [EOS] must not be tied with events, which would hide those from them
        apart = GROUP_GAP if self.config.ties == "group" else 0.0
        inner = torch.where(index[1:-1] <= lengths[:, None], known, last + apart)
        times = torch.cat((first - apart, inner, last + apart), 1)
        rotates = isinstance(self.config, StackConfig) and self.config.rotary == "time"
        return Positions(times - times[:, :1] if rotates else index, times, keep, inside)

    @torch.no_grad()
    def reset_adapter(self, channels: int, length: int, codes: int | None = None, *, renew: bool = False) -> list[str]:
        """As `Model.reset_adapter`; learned positions are cut, or continued by random ones (then `positions` is among the names)."""
        fresh = super().reset_adapter(channels, length, codes, renew=renew)
        if self.positions is not None:
            before = len(self.positions)
            self.positions = extend_positions(self.positions, self.adapter.tokenizer.count(length) + 2, _draw_normal)
            fresh += ["positions"] if len(self.positions) > before else []
        return fresh


def _draw_normal(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


def add_special_tokens(x: Tensor, special: Tensor, lengths: Tensor | None) -> Tensor:
    """[SOS] before and [EOS] right after the real tokens of each row, [B, N, D] -> [B, N + 2, D]; `special` [2, D]: both vectors."""
    sos, eos = special[:, None, None].expand(-1, len(x), 1, -1)
    x = torch.cat((sos, x, eos), 1)
    if lengths is None:
        return x
    at_eos = torch.arange(x.shape[1], device=x.device) == lengths[:, None] + 1
    return torch.where(at_eos[..., None], special[1].to(x.dtype), x)


def _validate_config(config: BidirectionalConfig) -> BidirectionalConfig:
    """The effective configuration. Raises UserError (config, exit 2) for incompatible widths, heads, layers or options."""
    if not isinstance(config, StackConfig):  # GPT-2 has one width for keys and values, and a plain FFN
        config = config.model_copy(update={"value_dim": config.dim, "ffn": "plain", "ties": "canonical"})
    for name, width in (("dim", config.dim), ("value_dim", config.value_dim)):
        if width % config.heads:
            raise config_error(f"{width} for {config.heads} heads", "expected a multiple of the heads", f"model.{name}")
    if config.dim // config.heads % 2:
        raise config_error(
            f"{config.dim // config.heads} key dimensions a head", "expected an even number, rotation works in pairs", "model.dim"
        )
    require_even_layers(config)
    if isinstance(config, StackConfig) and config.xpos_scale and "both" in models[config.name].facts.directions:
        raise config_error(
            "xpos_scale in two-sided layers", "expected forward or backward layers", "model.xpos_scale", "Leave xpos_scale off"
        )
    return config


def require_even_layers(config: ModelConfig) -> None:
    """Directions that alternate need an even number of layers. Raises UserError (config, exit 2)."""
    if config.layers % len(models[config.name].facts.directions):
        raise config_error(
            f"{config.layers} layers",
            "expected an even number: forward and backward layers alternate",
            "model.layers",
            f"Use {config.layers + 1} layers",
        )


# ---------------------------------------------------------------------------------------------------------------- the rows of the grid

ALTERNATING: LayerDirections = ("forward", "backward")
DIRECTED_CAPABILITIES = ("alternating", "one-way", "hidden")  # of a stack whose layers can read in either direction
PAPER = "Song et al. 2024, Bidirectional Generative Pre-training for Improving Healthcare Time-series Representation Learning"


def _describe_row(
    config: type[BidirectionalConfig], directions: LayerDirections, objective: str, readout: str, known: str, source: str = PAPER
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
        source=source,
        known=known,
    )


@models(
    _describe_row(
        StackConfig,
        ALTERNATING,
        "next-previous",
        "sos",
        "Its own objective shows the model its targets; the stated sizes do not follow from the table of configurations",
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
        "Its convolution module is off unless model.temporal_conv=causal; the original one sees 15 future tokens",
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
        "The paper compares it with a model without pre-training that also has another architecture",
    )
)
def timelybert(config: StackConfig) -> Stack:
    """TimelyBERT: two-sided retention in every layer, pre-trained by masking."""
    return Stack(config)


@models(_describe_row(BidirectionalConfig, ("forward",), "next", "eos", "", "Radford et al. 2019, GPT-2"))
def gpt(config: BidirectionalConfig) -> Stack:
    """GPT-2: causal softmax attention, learned positions."""
    return Stack(config)


@models(
    _describe_row(
        BidirectionalConfig, ALTERNATING, "next-previous", "sos", "Its objective shows the targets to the model, as BiTimelyGPT's does"
    )
)
def gpt_baar(config: BidirectionalConfig) -> Stack:
    """GPT-2 with causal and reversed attention in turns."""
    return Stack(config)
