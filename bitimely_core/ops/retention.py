"""Retention: attention without softmax whose weights decay with time (BiTimelyGPT, equations 1 to 6).

    o_n = sum over m of  K^(-1/2) (q_n . k_m) D_nm keep_m v_m          D_nm = exp(g |t_n - t_m|),  g = log_decay < 0

    direction     pairs allowed (by index)
    forward       m <= n
    backward      m >= n
    both          all: forward + backward - diagonal

Three forms compute the same: `parallel` (one N x N matrix, O(N^2)), `recurrent` (one K x V state, a step a token) and `chunkwise` (matrices inside
chunks, states between them, O(N)). Nothing is ever flipped: in `backward` the clock runs with the opposite sign, triangles are upper ones and chunks
are visited from the last to the first.

Legend: B batch, N tokens, H heads, K key width, V value width, C rows of a chunk, G chunks of a group, s = K^(-1/2). "Clock" is the time with the sign
of the direction, so that it never decreases in the order of processing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor

from bitimely_core.errors import Exit, Reason, UserError

Direction = Literal["forward", "backward", "both"]
Form = Literal["auto", "parallel", "chunkwise", "recurrent"]
Ties = Literal["index", "group"]
Precision = Literal["fp32", "bf16"]

SMALLEST = -87.0  # exp below it is a float32 denormal: slow on a CPU and nothing to the result, so it is exactly 0
GUARD = 60.0  # largest exponent that the folded form may give to a key; float32 and bfloat16 overflow at 88
GROUP = 16  # chunks whose states are scanned by one matrix product; a loop carries the state from group to group
CACHE = 2**20  # bytes of the second-level cache that the scores of one block may take


class State(NamedTuple):
    """What a sequence leaves behind for the next piece of it (equation 4), without the scale K^(-1/2).

    `memory` [B, H, K, V] in float32 (float64 for float64 inputs) = sum over m of exp(g |time - t_m|) keep_m k_m^T v_m;
    `time` [B] in float64 = time of the last row seen: of the last one in `forward`, of the first one in `backward`.
    """

    memory: Tensor
    time: Tensor


@overload
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    times: Tensor | None = None,
    mask: Tensor | None = None,
    direction: Direction = "forward",
    form: Form = "auto",
    ties: Ties = "index",
    state: State | None = None,
    return_state: Literal[False] = False,
    chunk: int = 64,
    core_precision: Precision = "fp32",
) -> Tensor: ...


@overload
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    times: Tensor | None = None,
    mask: Tensor | None = None,
    direction: Direction = "forward",
    form: Form = "auto",
    ties: Ties = "index",
    state: State | None = None,
    return_state: Literal[True],
    chunk: int = 64,
    core_precision: Precision = "fp32",
) -> tuple[Tensor, State]: ...


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    times: Tensor | None = None,
    mask: Tensor | None = None,
    direction: Direction = "forward",
    form: Form = "auto",
    ties: Ties = "index",
    state: State | None = None,
    return_state: bool = False,
    chunk: int = 64,
    core_precision: Precision = "fp32",
) -> Tensor | tuple[Tensor, State]:
    """Retention of `v` by `q` and `k`; the scale K^(-1/2) is inside, rotation, gate and group norm are outside.

    Sums are accumulated in float32 whatever autocast says (float64 inputs in float64), unless `core_precision` is "bf16": then operands and states
    of the matrix products are bfloat16. All inputs may need gradients, `log_decay`, `times` and `state.memory` included.

    Args:
        q: [B, N, H, K] rotated queries.
        k: [B, N, H, K] rotated keys.
        v: [B, N, H, V] values.
        log_decay: [H] ln(gamma) of each head, <= 0, per unit of time.
        times: [B, N] times that never decrease along a row; None = 0, 1, 2 ... Any unit, in which `log_decay` is meant too.
        mask: [B, N] bool, True = the key may be read. Masked keys get gradients of exactly zero.
        direction: `forward`, `backward` or `both`.
        form: `parallel`, `chunkwise`, `recurrent`; `auto` = parallel up to 2 chunks, recurrent for one new token, else chunkwise.
        ties: `index` orders equal times by index; `group` lets no token read another one of the same time (parallel form only).
        state: of the rows before (`backward`: after) these; rows without `times` go on one unit from its time.
        return_state: also return the state after these rows (`forward` and `backward` only).
        chunk: rows of a chunk.
        core_precision: `fp32` or `bf16`.

    Returns:
        [B, N, H, V] in the dtype of `v`; with `return_state` the pair of it and the `State`.

    Raises:
        UserError: `timestamps` for times that decrease, are not finite or contradict the state; `config` for options that do not go together.
    """
    _check(q, k, v, log_decay, times, mask, direction=direction, form=form, ties=ties, stateful=state is not None or return_state)
    with torch.autocast(q.device.type, enabled=False):
        return _retention(q, k, v, log_decay, times, mask, direction, form, ties, state, return_state, chunk, core_precision)


def decay_matrix(
    log_decay: Tensor,
    length: int | None = None,
    *,
    times: Tensor | None = None,
    mask: Tensor | None = None,
    direction: Direction = "forward",
    ties: Ties = "index",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """D of section "parallel form" of the method notes: weights by time alone, exactly 0 where a pair is not allowed or has decayed below e^-87.

    Args:
        log_decay: [H].
        length: N of the regular clock 0, 1, 2 ...; needed without `times`.
        times: [B, N] or None.
        mask: [B, N] bool, True = the key may be read; its columns are 0 elsewhere.
        direction: `forward`, `backward` or `both`.
        ties: `index` or `group`.
        dtype: float32 or float64 of the result; that of `log_decay` by default.

    Returns:
        [B, H, N, N], row = query, column = key; the first size is 1 without `times` and `mask`.
    """
    dtype = dtype or (torch.float64 if log_decay.dtype == torch.float64 else torch.float32)
    t = torch.arange(length, device=log_decay.device, dtype=_wide(log_decay))[None] if times is None else times
    index = torch.arange(t.shape[1], device=t.device)
    later = index[:, None] >= index  # the query is not before the key
    # With the sign by index instead of abs(): the gradient at equal times is that of the triangular forms.
    gap = (t[:, :, None] - t[:, None, :]).to(dtype)
    gap = {"forward": gap, "backward": -gap, "both": torch.where(later, gap, -gap)}[direction]
    allowed = {"forward": later, "backward": later.T, "both": torch.ones_like(later)}[direction]
    if ties == "group":
        allowed = allowed & ((gap > 0) | (index[:, None] == index))
    allowed = allowed.expand(gap.shape)[:, None]
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    return _decay(log_decay.to(dtype)[:, None, None] * gap[:, None], allowed)


def retention_matrix(
    q: Tensor,
    k: Tensor,
    *,
    log_decay: Tensor,
    times: Tensor | None = None,
    mask: Tensor | None = None,
    direction: Direction = "forward",
    ties: Ties = "index",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """R = K^(-1/2) q k^T * D, the map of retention: signed, not normalised, in forward time order.

    Args:
        q: [B, N, H, K].
        k: [B, N, H, K].
        log_decay: [H].
        times: [B, N] or None.
        mask: [B, N] bool or None; columns of masked keys are 0.
        direction: `forward`, `backward` or `both`.
        ties: `index` or `group`.
        dtype: cast to before anything is multiplied, for instance float64 for singular values; by default that of `q`.

    Returns:
        [B, H, N, N], row = query, column = key.
    """
    dtype = dtype or q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (x.to(dtype).transpose(1, 2) for x in (q, k))
    weights = decay_matrix(log_decay, q.shape[2], times=times, mask=mask, direction=direction, ties=ties, dtype=wide)
    return (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) * weights.to(dtype)


# -- dispatch ---------------------------------------------------------------------------------------------------------------------------------


@torch.compiler.disable  # loops over blocks with buffers of their own: one clean graph break instead of a thousand unrolled steps
def _retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    times: Tensor | None,
    mask: Tensor | None,
    direction: Direction,
    form: Form,
    ties: Ties,
    state: State | None,
    return_state: bool,
    chunk: int,
    core_precision: Precision,
) -> Tensor | tuple[Tensor, State]:
    stateful = state is not None or return_state
    length, dtype = q.shape[1], v.dtype
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    core = torch.bfloat16 if core_precision == "bf16" and wide != torch.float64 else wide
    if form == "auto":
        form = "parallel" if ties == "group" or length <= 2 * chunk else "chunkwise"
        form = "recurrent" if stateful and length == 1 else form

    if form == "parallel":
        scores = retention_matrix(q, k, log_decay=log_decay, times=times, mask=mask, direction=direction, ties=ties, dtype=core)
        o = (scores @ v.to(core).transpose(1, 2)).transpose(1, 2)
    else:
        if direction == "both":  # the sum of three terms is rounded once, at the end
            q, k, v = q.to(core), k.to(core), v.to(core)
        one_way = _recurrent if form == "recurrent" else _chunkwise
        o = sum_ = torch.zeros((), device=q.device)
        for way in ("forward", "backward") if direction == "both" else (direction,):
            clock = _clock(q, times, way)
            sum_ = sum_ + one_way(q, k, v, log_decay, clock, mask, way == "backward", chunk, core) if direction == "both" else one_way(
                q, k, v, log_decay, clock, mask, way == "backward", chunk, core
            )
        o = sum_
        if direction == "both":
            own = (q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
            o = o - (own if mask is None else own * mask[:, :, None, None]) * v
    if not stateful:
        return o.to(dtype)
    return _carried(q, k, v, o, log_decay, times, mask, direction, state, wide)
