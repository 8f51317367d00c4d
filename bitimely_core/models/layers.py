"""Layers that read a sequence in a given direction: retention, softmax attention, feed-forward networks, and the layer that joins them.

Legend: B batch, M positions, D width, H heads, K key width of a head, W value width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from bitimely_core.config import ModelConfig, Section
from bitimely_core.models.base import Direction, config_error
from bitimely_core.ops.retention import retention, retention_matrix
from bitimely_core.ops.rotary import rotate, xpos


class BidirectionalConfig(ModelConfig):
    """Settings of models whose layers read in given directions."""

    clock: Literal["time", "index"] = Field("time", description="Clock of events: months, or positions alone (a control for the times).")


class Decay(Section):
    """The decay of the retention heads (method.md 1.4). `from`, `to`: gamma = 1 - 1/x, log-spaced over the heads."""

    model_config = ConfigDict(populate_by_name=True)
    kind: Literal["log", "retnet", "half-life", "learnable"] = Field("log", description="Law of gamma over the heads.")
    start: float = Field(32.0, alias="from", gt=1, description="First head, gamma = 1 - 1 / from; kinds log and learnable.")
    end: float = Field(512.0, alias="to", gt=1, description="Last head.")
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
    rotation: Tensor | None = None  # table of the positions, where retention rotates by itself


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
        if places.rotation is None or attention:
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
                rotation=places.rotation,
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


class PreNormLayer(nn.Module):
    """Pre-norm residual without positions: attention (logits times `scale`, no biases but that of the output), then an MLP.

    `inner` is the width of queries, keys and values, `hidden` that of the MLP.
    """

    def __init__(
        self, width: int, hidden: int, *, heads: int, inner: int, scale: float, dropout: float, act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.act = heads, scale, act
        self.norm_mix, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * inner, bias=False), nn.Linear(inner, width)
        self.first, self.out = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keys: Tensor | None, *, attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] and usable keys [B, M] (None: all) -> [B, M, D] and the map [B, H, M, M] on request."""
        q, k, v = self.qkv(self.norm_mix(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        allowed, maps = None if keys is None else keys[:, None, None], None
        if attention:
            logits = q @ k.transpose(-1, -2) * self.scale
            maps = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)
            mixed = maps @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        x = x + self.dropout(self.merge(mixed.transpose(1, 2).flatten(-2)))
        inner = self.dropout(self.act(self.first(self.norm_ffn(x))))
        return x + self.dropout(self.out(inner)), maps


_recomputes = [False]  # no context variable: torch.compile cannot trace them


@contextmanager
def recompute_layers(*, active: bool) -> Iterator[None]:
    """Inside, layers that are trained keep their inputs alone for the backward pass, which computes them again (`train.recompute`)."""
    before, _recomputes[0] = _recomputes[0], active
    try:
        yield
    finally:
        _recomputes[0] = before


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, plan: Iterable[Direction], given: Any, **options: Any
) -> tuple[list[Tensor], list[Any]]:
    """States [B, M, ..] and map (or None) of each layer; `plan` gives the direction of each."""
    states, maps = [], []
    for layer, direction in zip(layers, plan, strict=True):
        if _recomputes[0] and torch.is_grad_enabled():
            x, of_layer = checkpoint(layer, x, given, direction, use_reentrant=False, **options)
        else:
            x, of_layer = layer(x, given, direction, **options)
        states.append(x)
        maps.append(of_layer)
    return states, maps
