"""Layers that read a sequence in one direction or both: retention, softmax attention, feed-forward
networks, and the layer that joins them.

Legend: B batch, M positions, D width, H heads, K key width of a head, W value width of a head.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from bitimely_core.config import ModelConfig, Section
from bitimely_core.models.contract import Direction, config_error
from bitimely_core.models.convolution import convolve
from bitimely_core.models.tokenizers import mask_before
from bitimely_core.ops import fused
from bitimely_core.ops.retention import (
    PairOptions,
    RetentionOptions,
    State,
    retention,
    retention_matrix,
)
from bitimely_core.ops.rotary import rotate, xpos


class BidirectionalConfig(ModelConfig):
    """Settings of models whose layers read in given directions."""

    clock: Literal["time", "index"] = Field(
        "time", description="Clock of events: months, or positions alone (a control for the times)."
    )


class Decay(Section):
    """The decay of the retention heads (method.md 1.4). `from`, `to`: gamma = 1 - 1/x, log-spaced
    over the heads.
    """

    model_config = ConfigDict(populate_by_name=True)
    kind: Literal["log", "retnet", "half-life", "learnable"] = Field(
        "log", description="Law of gamma over the heads."
    )
    start: float = Field(
        32.0,
        alias="from",
        gt=1,
        description="First head, gamma = 1 - 1 / from; kinds log and learnable.",
    )
    end: float = Field(512.0, alias="to", gt=1, description="Last head.")
    months: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        (6.0, 24.0, 96.0, 384.0), description="Half-lives, for kind half-life."
    )


class StackConfig(BidirectionalConfig):
    """Settings of the retention models."""

    decay: Decay = Field(Decay(), description="Decay of the heads.")
    retention_norm: Literal["group", "rms"] = Field(
        "group", description="Norm of the retention of each head and token."
    )
    xpos_scale: bool = Field(False, description="Scale of xPos in the rotation.")
    rotary: Literal["index", "time"] = Field(
        "index", description="Rotation by position, or by the months of events."
    )
    temporal_conv: Literal["off", "causal"] = Field(
        "off", description="TimelyGPT's convolution module."
    )
    temporal_norm: Literal["batch", "layer"] = Field(
        "batch", description="Norm within the convolution module."
    )
    form: Literal["auto", "parallel", "chunkwise", "recurrent"] = Field(
        "auto", description="How retention is computed."
    )
    chunk: int = Field(64, ge=1, description="Tokens of a chunk.")
    core_precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Precision of the retention core; set by train.core_precision."
    )

    def leak_conditions(self) -> tuple[str, ...]:
        """As `ModelConfig.leak_conditions`; batch norm over time adds one."""
        mixes = self.temporal_conv == "causal" and self.temporal_norm == "batch"
        return (*super().leak_conditions(), *(("up to batch statistics",) if mixes else ()))


class Carry:
    """What a layer of a stream keeps of the positions before a piece, in constant memory."""

    state: State | None = None  # of the retention
    past: Tensor | None = None  # [B, D, width - 1], of the convolution module

    def retain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_decay: Tensor,
        scaled: bool,
        **options: Unpack[RetentionOptions],
    ) -> Tensor:
        """`retention` behind the pieces before; `scaled` by xPos from the first position of the
        piece on: the state moves to the next one's.
        """
        options["state"] = self.state
        o, state = retention(q, k, v, log_decay=log_decay, return_state=True, **options)
        memory = (
            xpos(state.memory.mT, torch.tensor([q.shape[1]]), "forward", key=False, origin=0.0).mT
            if scaled
            else state.memory
        )
        self.state = state._replace(memory=memory)
        return o

    def prepend(self, y: Tensor, count: int) -> Tensor:
        """Positions y [B, D, M] behind the `count` positions before, which are 0 before the
        first.
        """
        past = y.new_zeros(*y.shape[:2], count) if self.past is None else self.past
        y = torch.cat((past, y), -1)
        self.past = y[..., -count:].clone()
        return y


class Positions(NamedTuple):
    """Positions, times and masks of a batch; the same for all layers."""

    positions: Tensor  # [M] or [B, M], of the rotation
    times: Tensor | None  # [B, M] months, None on a regular clock
    keep: Tensor | None  # [B, M] usable keys, None = all
    real: Tensor | None  # [B, M] not padding, None = all
    rotation: Tensor | None = None  # table of the positions, where retention rotates by itself
    carry: Carry | None = None  # of one layer, in a stream


def log_decays(config: StackConfig) -> Tensor:
    """Logarithm of gamma for each head, float64 [H], from `config.decay`."""
    decay, heads = config.decay, config.heads
    if decay.kind == "half-life":
        if len(decay.months) != heads:
            raise config_error(
                f"{len(decay.months)} half-lives",
                f"expected one per head, {heads}",
                "model.decay.months",
            )
        return -math.log(2) / torch.tensor(decay.months, dtype=torch.float64)
    if decay.kind == "retnet":
        return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float64))))
    return torch.log1p(
        -torch.exp(
            torch.linspace(-math.log(decay.start), -math.log(decay.end), heads, dtype=torch.float64)
        )
    )


def _apply_linear(linear: nn.Linear, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`linear` with the first of `weights` instead of its own, if there are any."""
    return F.linear(x, weights[0], linear.bias) if weights else linear(x)


class Retention(nn.Module):
    """Multi-head retention with rotation and decay (paper Eq. 3, 4, 8, 10): W_O( SiLU(x W_G) *
    norm(Ret(x)) ), no biases.

    The norm is per head and token, after the sum over keys, and does not mix time.
    """

    log_decay: Tensor

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        dim, values = config.dim, config.value_dim
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value, self.gate = (
            nn.Linear(dim, values, bias=False),
            nn.Linear(dim, values, bias=False),
        )
        self.out = nn.Linear(values, dim, bias=False)
        decays = log_decays(config)
        if config.decay.kind == "learnable":
            # gamma = sigmoid(logit)
            self.logit = nn.Parameter((decays.exp() / -torch.expm1(decays)).log().float())
        else:
            self.register_buffer("log_decay", decays.float())

    @property
    def decays(self) -> Tensor:
        """Logarithm of gamma [H]."""
        return F.logsigmoid(self.logit) if self.config.decay.kind == "learnable" else self.log_decay

    def list_weights(self) -> list[list[Tensor]]:
        """Those of one input together, as `forward` takes them joined."""
        return [
            [linear.weight for linear in (self.query, self.key, self.value, self.gate)],
            [self.out.weight],
        ]

    def forward(
        self,
        x: Tensor,
        places: Positions,
        direction: Direction,
        *,
        attention: bool = False,
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the map R [B, H, M, M] on request; `weights`: those of
        `list_weights`, joined.
        """
        config = self.config
        q, k, v, gate = self._project(x, weights)
        q, k, v = (part.unflatten(-1, (config.heads, -1)) for part in (q, k, v))
        if places.rotation is None or attention:
            q, k = rotate(q, places.positions), rotate(k, places.positions)
        if config.xpos_scale:
            # on the host, where their range is checked without a wait
            index = torch.arange(x.shape[1])
            origin = None if places.carry is None else 0.0
            q = xpos(q, index, direction, key=False, origin=origin)  # type: ignore[arg-type]
            k = xpos(k, index, direction, key=True, origin=origin)  # type: ignore[arg-type]
        pairs: PairOptions = {
            "times": places.times,
            "mask": places.keep,
            "direction": direction,
            "ties": "group" if config.ties == "group" else "index",
        }
        maps = None
        if attention:
            maps = retention_matrix(q, k, log_decay=self.decays, **pairs)
            o = torch.einsum("bhnm,bmhw->bnhw", maps, v)
        else:
            carry = places.carry
            read = partial(carry.retain, scaled=config.xpos_scale) if carry else retention
            o = read(
                q,
                k,
                v,
                log_decay=self.decays,
                rotation=places.rotation,
                form=config.form,
                chunk=config.chunk,
                core_precision=config.core_precision,
                **pairs,
            )
        norm_gate = partial(fused.norm_gate, norm=config.retention_norm)
        if weights:
            return F.linear(norm_gate(o, gate), weights[1]), maps
        return fused.gated_linear(norm_gate, self.out, o, gate), maps

    def _project(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Queries, keys, values and gate, of all heads together."""
        linears = (self.query, self.key, self.value, self.gate)
        if not weights:
            return [linear(x) for linear in linears]
        return F.linear(x, weights[0]).split([linear.out_features for linear in linears], -1)


def _map_attention(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Weights of the `allowed` keys (None: all), [B, H, M, M], from q and k [B, H, M, K]."""
    logits = q @ k.mT * scale
    return (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)


class Attention(nn.Module):
    """Softmax attention of GPT-2 with biases; masked pairs get -inf before the softmax (paper Eq.
    1, 2; its product would leave a logit of 0).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv, self.out = (
            nn.Linear(config.dim, 3 * config.dim),
            nn.Linear(config.dim, config.dim),
        )

    def list_weights(self) -> list[list[Tensor]]:
        """As those of `Retention`."""
        return [[self.qkv.weight], [self.out.weight]]

    def forward(
        self,
        x: Tensor,
        places: Positions,
        direction: Direction,
        *,
        attention: bool = False,
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the map A [B, H, M, M] on request; its rows sum to 1.
        `weights` as those of `Retention`.
        """
        q, k, v = (
            _apply_linear(self.qkv, x, weights[:1])
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        allowed = self._allowed_pairs(places, x.shape[1], direction, x.device)
        maps = None
        if attention:
            maps = _map_attention(q, k, allowed, q.shape[-1] ** -0.5)
            o = F.dropout(maps, dropout) @ v
        elif direction == "forward" and places.keep is None:
            o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout)
        return _apply_linear(self.out, o.transpose(1, 2).flatten(-2), weights[1:]), maps

    @staticmethod
    def _allowed_pairs(
        places: Positions, count: int, direction: Direction, device: torch.device
    ) -> Tensor | None:
        """Allowed pairs (query, key), bool [M, M], [B, 1, M, M] or (the same for all queries) [B,
        1, 1, M]; None = all.
        """
        # one row of keys for all queries; a row without any key would be NaN
        if direction == "both" and places.keep is not None:
            return (places.keep | ~places.keep.any(1, keepdim=True))[:, None, None]
        pairs = torch.ones(count, count, dtype=torch.bool, device=device)
        if places.keep is None:
            return {"forward": pairs.tril(), "backward": pairs.triu(), "both": None}[direction]
        pairs = pairs.tril() if direction == "forward" else pairs.triu()
        assert places.real is not None
        # a row without any key would be NaN
        padding = ~places.real[:, :, None] & torch.eye(count, dtype=torch.bool, device=device)
        return (pairs & places.keep[:, None, :] | padding)[:, None]


class GLU(nn.Module):
    """W_O( act(x W_1) * (x W_2) ), no biases."""

    def __init__(self, dim: int, hidden: int, act: str) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(dim, hidden, bias=False),
        )
        self.out = nn.Linear(hidden, dim, bias=False)
        self.act = act

    def list_weights(self) -> list[list[Tensor]]:
        """Those of one input together, as `forward` takes them joined."""
        return [[self.first.weight, self.second.weight], [self.out.weight]]

    def forward(self, x: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
        """[B, M, D] -> [B, M, D]; `weights`: those of `list_weights`, joined."""
        if weights:
            return F.linear(fused.glu(F.linear(x, weights[0]), self.act), weights[1])
        return fused.gated_linear(self._gate, self.out, self.first(x), self.second(x))

    def _gate(self, a: Tensor, b: Tensor) -> Tensor:
        return fused.ACTIVATIONS[self.act](a) * b


class MLP(nn.Module):
    """Linear, activation, Linear, with biases."""

    def __init__(self, dim: int, hidden: int, act: str) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.act = {"gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.GELU(approximate="tanh")}[act]

    def list_weights(self) -> list[list[Tensor]]:
        """As those of `GLU`."""
        return [[self.first.weight], [self.out.weight]]

    def forward(self, x: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
        """[B, M, D] -> [B, M, D]; `weights` as those of `GLU`."""
        return _apply_linear(
            self.out, self.act(_apply_linear(self.first, x, weights[:1])), weights[1:]
        )


def normalise_tokens(norm: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """The `real` [R, N] tokens (None: all) of x [R, N, D] through a norm of [n, D], 0 for the
    others.
    """
    if real is None:
        return norm(x.flatten(0, 1)).view_as(x)
    # pointwise: no selection whose size depends on the data, which graphs do not have
    if not norm.training:
        return torch.where(real[..., None], norm(x.flatten(0, 1)).view_as(x).to(x.dtype), 0.0)
    normed = torch.zeros_like(x)
    normed[real] = norm(x[real]).to(x.dtype)
    return normed


def normalise_map(norm: nn.Module, y: Tensor, counts: Tensor | None) -> Tensor:
    """The map y [B, C, n] through a norm of [n, C], 0 from step `counts` [B] of each row on (None:
    rows have no end).
    """
    if counts is None:
        return norm(y)
    return normalise_tokens(norm, y.mT, mask_before(counts, y.shape[2])).mT


class TemporalConv(nn.Module):
    """TimelyGPT's convolution module: norm, pointwise D -> 2D, GLU, depthwise (31 steps), norm,
    SiLU, pointwise, dropout 0.1.

    The depthwise kernel covers 30 past positions in the layer's direction (15 to each side in a
    two-sided layer): symmetric padding would show 15 future tokens to a next-token model. In
    training batch norm, unlike layer norm, mixes rows and times of real positions.
    """

    width = 31

    def __init__(self, dim: int, norm: str) -> None:
        super().__init__()
        self.norm, self.widen = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, self.width, groups=dim, bias=False)
        self.inner: nn.BatchNorm1d | nn.LayerNorm = (
            nn.BatchNorm1d(dim) if norm == "batch" else nn.LayerNorm(dim)
        )
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, places: Positions, direction: Direction) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        y = F.glu(self.widen(self.norm(x)), -1)
        if places.real is not None:  # zeros right of [EOS], whatever the padding
            y = y * places.real[..., None]
        past = {
            "forward": (self.width - 1, 0),
            "backward": (0, self.width - 1),
            "both": (self.width // 2, self.width // 2),
        }[direction]
        weight = (
            self.depthwise.weight.flip(-1) if direction == "backward" else self.depthwise.weight
        )
        y = (
            F.pad(y.mT, past)
            if places.carry is None
            else places.carry.prepend(y.mT, self.width - 1)
        )
        y = convolve(F.conv1d, y, weight, groups=y.shape[1]).transpose(1, 2)
        y = (
            self.inner(y)
            if isinstance(self.inner, nn.LayerNorm)
            else normalise_tokens(self.inner, y, places.real)
        )
        return F.dropout(self.out(F.silu(y)), 0.1 if self.training else 0.0)


class StackLayer(nn.Module):
    """Pre-norm residual: y = x + mix(norm(x)); y = y + conv(y) if configured; z = y +
    ffn(norm(y)).
    """

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__()
        self.mix = Retention(config) if isinstance(config, StackConfig) else Attention(config)
        self.norm_mix, self.norm_ffn = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.conv = None
        if isinstance(config, StackConfig) and config.temporal_conv == "causal":
            self.conv = TemporalConv(config.dim, config.temporal_norm)
        act = config.ffn_act if isinstance(config, StackConfig) else "tanh"
        self.ffn = (
            GLU(config.dim, config.ffn_dim, act)
            if config.ffn == "glu"
            else MLP(config.dim, config.ffn_dim, act)
        )
        self.dropout = nn.Dropout(config.dropout)

    def list_weights(self) -> list[list[Tensor]]:
        """Those of the mixer and of the feed-forward network, as `forward` takes them joined."""
        return [*self.mix.list_weights(), *self.ffn.list_weights()]

    def forward(
        self,
        x: Tensor,
        places: Positions,
        direction: Direction,
        *,
        attention: bool = False,
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] -> [B, M, D] and the mixer's map on request; `weights`: those of
        `list_weights`, joined.
        """
        x, y = fused.residual_norm(x, None, self.norm_mix)
        mixed, maps = self.mix(y, places, direction, attention=attention, weights=weights[:2])
        if self.conv is not None:
            x = x + self.dropout(mixed)
            mixed = self.conv(x, places, direction)
        x, y = fused.residual_norm(
            x, self.dropout(mixed) if self.conv is None else mixed, self.norm_ffn
        )
        return x + self.dropout(self.ffn(y, weights[2:])), maps

    def advance(self, x: Tensor, places: Positions, carry: Carry | None) -> tuple[Tensor, Carry]:
        """The next positions of a stream, [B, M, D] -> [B, M, D], and what the ones after them
        need.
        """
        carry = copy.copy(carry or Carry())
        return self(x, places._replace(carry=carry), "forward")[0], carry


class PreNormLayer(nn.Module):
    """Pre-norm residual without positions: attention (logits times `scale`, no biases but that of
    the output), then an MLP.

    `inner` is the width of queries, keys and values, `hidden` that of the MLP.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        heads: int,
        inner: int,
        scale: float,
        dropout: float,
        act: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.act = heads, scale, act
        self.norm_mix, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * inner, bias=False), nn.Linear(inner, width)
        self.first, self.out = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, keys: Tensor | None, *, attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, M, D] and usable keys [B, M] (None: all) -> [B, M, D] and the map [B, H, M, M] on
        request.
        """
        q, k, v = (
            self.qkv(self.norm_mix(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        allowed, maps = None if keys is None else keys[:, None, None], None
        if attention:
            maps = _map_attention(q, k, allowed, self.scale)
            mixed = maps @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        x = x + self.dropout(self.merge(mixed.transpose(1, 2).flatten(-2)))
        inner = self.dropout(self.act(self.first(self.norm_ffn(x))))
        return x + self.dropout(self.out(inner)), maps


_recomputes = [False]  # no context variable: torch.compile cannot trace them


@contextmanager
def recompute_layers(*, active: bool) -> Iterator[None]:
    """Inside, layers that are trained keep their inputs alone for the backward pass, which computes
    them again (`train.recompute`).
    """
    before, _recomputes[0] = _recomputes[0], active
    try:
        yield
    finally:
        _recomputes[0] = before


@contextmanager
def _keep_statistics(layer: nn.Module) -> Iterator[None]:
    """Inside, where a layer is computed again, its batch norms do not count the batch once more."""
    norms = [module for module in layer.modules() if isinstance(module, nn.BatchNorm1d)]
    statistics = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        yield
    finally:
        for norm, state in zip(norms, statistics, strict=True):
            norm.momentum, norm.num_batches_tracked = state


@contextmanager
def compile_layers(model: nn.Module) -> Iterator[None]:
    """Inside, the layers of a stack are compiled, with one graph for all that read in one
    direction; other models as a unit.
    """
    fused.allow_graphs()
    parts: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, StackLayer)
    ] or [model]
    for part in parts:
        part.compile()
    try:
        with warnings.catch_warnings():  # fp32 is float32: TF32 is another precision of [train]
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
            yield
    finally:
        for part in parts:
            part._compiled_call_impl = None


def join_layers(layers: Iterable[Any], x: Tensor) -> list[dict[str, list[Tensor]]]:
    """The `weights` of each layer for `run_layers`, cast for products with `x` and joined; none on
    a CPU.
    """
    if x.device.type != "cuda":
        return []
    groups = [layer.list_weights() for layer in layers]
    joined = iter(fused.join_weights([*itertools.chain.from_iterable(groups)], fused.find_dtype(x)))
    return [{"weights": [*itertools.islice(joined, len(group))]} for group in groups]


def run_layers(
    layers: Iterable[nn.Module],
    x: Tensor,
    plan: Iterable[Direction],
    shared: Any,
    *,
    each: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> tuple[list[Tensor], list[Any]]:
    """States [B, M, ..] and map (or None) of each layer.

    Args:
        layers: called with states, `shared`, their direction and the options.
        x: the input of the first layer.
        plan: the direction of each layer.
        shared: what all layers read beside the states.
        each: further options of each layer.
        options: those of all layers.
    """
    states, maps = [], []
    recomputes = _recomputes[0] and torch.is_grad_enabled()
    rows = zip(layers, plan, strict=True)
    for (layer, direction), extra in zip(rows, each or itertools.repeat({}), strict=False):
        run = partial(_recompute, layer) if recomputes else layer
        x, layer_maps = run(x, shared, direction, **options, **extra)
        states.append(x)
        maps.append(layer_maps)
    return states, maps


def _recompute(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    """The layer, which keeps its inputs alone for the backward pass."""
    contexts = partial(lambda layer: (nullcontext(), _keep_statistics(layer)), layer)
    return checkpoint(layer, *arguments, use_reentrant=False, context_fn=contexts, **options)
