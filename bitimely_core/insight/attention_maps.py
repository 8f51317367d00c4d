"""Reads the attention maps of a model: what each layer applies to one sequence, and the parts that
it is computed from.

Maps are R [N, N], row = query, column = key, in forward time order, without [SOS], [EOS] and
padding. Legend: H heads, N tokens, K key width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bitimely_core import data
from bitimely_core.errors import usage_error
from bitimely_core.models.layers import Attention, Retention
from bitimely_core.ops.retention import decay_matrix
from bitimely_core.ops.rotary import rotate
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Encoded

Array = npt.NDArray[np.float64]
MixerCall = tuple[nn.Module, Tensor, Any]  # a layer, what it reads, and the places of that


class LayerMixing(NamedTuple):
    """Map of one layer for one sequence, in float64, with the parts that it is computed from."""

    map: Array  # [H, N, N], what the layer applies
    direction: str  # forward, backward or both, by the zeros of the map
    # [H, N, K]; q k^T is the map without decay, mask or softmax. None: not such a layer
    queries: Array | None = None
    keys: Array | None = None  # [H, N, K], times K^(-1/2)
    # [H, N, N], map without q and k: the decay, or the mean over the allowed keys
    alone: Array | None = None
    gammas: tuple[float, ...] = ()  # decay of each head; () without

    @property
    def key_width(self) -> int | None:
        """K."""
        return None if self.queries is None else self.queries.shape[-1]


@torch.no_grad()
def compute_mixings(model: nn.Module, batch: Batch) -> list[LayerMixing]:
    """The layers of a float64 model on a batch of one row, without special positions and padding.

    For models that read channels one by one a map is the mean over the channels, without queries
    and keys. Raises UserError: config (exit 2), where the model has no attention maps.
    """
    calls: list[MixerCall] = []
    hooks = [
        module.register_forward_pre_hook(lambda mixer, args: calls.append((mixer, *args[:2])))
        for module in model.modules()
        if isinstance(module, Retention | Attention)
    ]
    try:
        encoded, maps = _encode_with_maps(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = _find_tokens(encoded, maps)
    has_calls = len(calls) == len(maps) and len(maps[0]) == 1
    return [
        _make_mixing(layer.mean(0), calls[k] if has_calls else None, tokens)
        for k, layer in enumerate(maps)
    ]


def _encode_with_maps(model: nn.Module, batch: Batch) -> tuple[Encoded, tuple[Tensor, ...]]:
    """The states of a float64 model for a batch, and its maps. Raises UserError (config, exit 2)
    where it has none.
    """
    wide = batch._replace(
        **{name: part.double() for name, part in _list_tensors(batch) if part.is_floating_point()}
    )
    encoded: Encoded = model(data.to_device(wide, data.find_device(model)), attention=True)
    if encoded.attention is None:
        raise usage_error(
            f"{getattr(getattr(model, 'config', None), 'name', 'the model')} has no attention maps",
            "expected a model with retention or attention layers",
            "`bitimely list models` lists them",
        )
    return encoded, encoded.attention


def _list_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(name, part) for name, part in batch._asdict().items() if part is not None]


def _find_tokens(encoded: Encoded, maps: tuple[Tensor, ...]) -> Tensor:
    """Indices of the real tokens among the positions of the maps, [N]."""
    margin = 0 if encoded.eos is None else 1
    count = maps[0].shape[-1] - 2 * margin
    real = maps[0].new_ones(count, dtype=torch.bool)
    if encoded.mask is not None:
        real = encoded.mask.bool().any(0)
    # a class token, where a model has one, is first
    return torch.nonzero(real)[:, 0] + margin + max(0, count - len(real))


def _make_mixing(layer: Tensor, call: MixerCall | None, tokens: Tensor) -> LayerMixing:
    """The mixing of a layer by its maps [H, N', N'] and the call that made them, between real
    `tokens`.
    """

    def select(maps: Tensor) -> Array:
        return maps[:, tokens][:, :, tokens].cpu().numpy()

    maps = select(layer)
    direction = "both" if np.tril(maps, -1).any() else "backward"
    if not np.triu(maps, 1).any():
        direction = "forward"
    if call is None:
        return LayerMixing(maps, direction)
    q, k, alone, gammas = _read_mixer(call, direction)
    queries, keys = (part[0].transpose(0, 1)[:, tokens].cpu().numpy() for part in (q, k))
    return LayerMixing(maps, direction, queries, keys * q.shape[-1] ** -0.5, select(alone), gammas)


def _read_mixer(
    call: MixerCall, direction: str
) -> tuple[Tensor, Tensor, Tensor, tuple[float, ...]]:
    """Queries and keys [1, N', H, K] of a layer, its map without them [H, N', N'], and the decays
    of its heads.
    """
    module, x, places = call
    if isinstance(module, Retention):
        q, k = (
            rotate(linear(x).unflatten(-1, (module.config.heads, -1)), places.positions)
            for linear in (module.query, module.key)
        )
        alone = decay_matrix(
            module.decays,
            x.shape[1],
            times=places.times,
            direction=direction,  # type: ignore[arg-type]
            dtype=torch.float64,
        )[0]
        return q, k, alone, tuple(module.decays.exp().tolist())
    assert isinstance(module, Attention)
    q, k, _ = module.qkv(x).unflatten(-1, (3, module.heads, -1)).unbind(2)
    allowed = x.new_ones(x.shape[1], x.shape[1], dtype=torch.float64)
    if direction != "both":
        allowed = allowed.tril() if direction == "forward" else allowed.triu()
    alone = (allowed / allowed.sum(1, keepdim=True)).expand(module.heads, -1, -1)
    return q, k, alone, ()


def combine_pair(first: LayerMixing, second: LayerMixing) -> Array | None:
    """tril(R_f) + triu(R_b, 1) of a forward layer and the backward layer after it, [H, N, N]; None
    for other directions.
    """
    if (first.direction, second.direction) != ("forward", "backward"):
        return None
    return np.tril(first.map) + np.triu(second.map, 1)


def last_map(layers: Sequence[LayerMixing]) -> tuple[Array, str]:
    """The map that figures show, [H, N, N], and its name: the last pair of an alternating model,
    else the last layer.
    """
    count, last = len(layers), layers[-1]
    pair = combine_pair(layers[-2], last) if count > 1 else None
    if pair is not None:
        return pair, f"forward layer {count - 1} and backward layer {count}"
    return last.map, f"{last.direction.replace('both', 'two-sided')} layer {count}"


def name_heads(count: int, gammas: Sequence[float]) -> list[str]:
    """The heads with their decays, where they have any."""
    if not gammas:
        return [f"head {h + 1}" for h in range(count)]
    return [f"head {h}, γ {gamma:.4f}" for h, gamma in enumerate(gammas, 1)]


def column_share(maps: Array) -> Array:
    """Share of attention that each token gets, [N], sum 1: column sums of |R| averaged over heads.
    From [H, N, N].
    """
    mass = np.abs(maps).sum(1).mean(0)
    return mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))


@torch.no_grad()
def compute_last_shares(model: nn.Module, batch: Batch) -> Array:
    """`column_share` of the `last_map` of a float64 model on one row: over all heads, then head by
    head, [1 + H, N].
    """
    encoded, every = _encode_with_maps(model, batch)
    tokens = _find_tokens(encoded, every)
    maps, _ = last_map([_make_mixing(layer.mean(0), None, tokens) for layer in every[-2:]])
    return np.stack([column_share(maps), *(column_share(head[None]) for head in maps)])


def split_batch(windows: Windows, rows: npt.NDArray[np.int64]) -> list[Batch]:
    """Windows as batches of one row each."""
    batch = data.collate(windows, rows)
    return [
        batch._replace(**{name: part[i : i + 1] for name, part in _list_tensors(batch)})
        for i in range(len(rows))
    ]
