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
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from torch import Tensor

from bitimely_core.errors import Exit, Reason, UserError

Direction = Literal["forward", "backward", "both"]
Form = Literal["auto", "parallel", "chunkwise", "recurrent"]
Ties = Literal["index", "group"]
Precision = Literal["fp32", "bf16"]

OPTIONS = {name: get_args(kind) for name, kind in (("direction", Direction), ("form", Form), ("ties", Ties), ("core_precision", Precision))}
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
    options = {"direction": direction, "form": form, "ties": ties, "core_precision": core_precision}
    _check(q, k, v, log_decay, times, mask, options, stateful=state is not None or return_state)
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
    dtype = dtype or torch.promote_types(log_decay.dtype, torch.float32)
    if times is None:
        times = torch.arange(length or 0, device=log_decay.device, dtype=dtype)[None]
    index = torch.arange(times.shape[1], device=times.device)
    later = index[:, None] >= index  # the query is not before the key
    gap = times[:, :, None] - times[:, None, :]
    if direction == "backward":
        gap, allowed = -gap, later.T
    elif direction == "both":  # signs by index, not abs(): at equal times the gradient is that of the two triangles
        gap, allowed = torch.where(later, gap, -gap), torch.ones_like(later)
    else:
        allowed = later
    if ties == "group":
        allowed = allowed & ((gap > 0) | (index[:, None] == index))
    weights = _decay(log_decay.to(dtype)[:, None, None] * gap.to(dtype)[:, None], allowed.expand(gap.shape)[:, None])
    return weights if mask is None else weights * mask[:, None, None, :]


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
    wide = torch.promote_types(dtype, torch.float32)
    q, k = q.to(dtype).transpose(1, 2), _kept(k, mask).to(dtype).transpose(1, 2)
    weights = decay_matrix(log_decay, q.shape[2], times=times, direction=direction, ties=ties, dtype=wide)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)).mul_(weights.to(dtype))


# -- dispatch ---------------------------------------------------------------------------------------------------------------------------------


@torch.compiler.disable  # loops over blocks with buffers of their own: one clean graph break instead of thousands of unrolled steps
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
    length, dtype = q.shape[1], v.dtype
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    core = torch.bfloat16 if core_precision == "bf16" and wide != torch.float64 else wide
    stateful = state is not None or return_state
    if form == "auto":
        form = "recurrent" if stateful and length == 1 else "parallel" if ties == "group" or length <= 2 * chunk else "chunkwise"
    one_way = _recurrent if form == "recurrent" else _chunkwise
    k = _kept(k, mask)

    if form == "parallel":
        scores = retention_matrix(q, k, log_decay=log_decay, times=times, direction=direction, ties=ties, dtype=core)
        o = (scores @ v.to(core).transpose(1, 2)).transpose(1, 2)
    elif direction == "both":
        q, k, v = q.to(core), k.to(core), v.to(core)  # the sum of the three terms is rounded once, at the end
        o = (q * k).sum(-1, keepdim=True) * -(q.shape[-1] ** -0.5) * v
        for backward in (False, True):
            o = o + one_way(q, k, v, log_decay, _clock(q, times, backward), backward, chunk, core)
    else:
        backward = direction == "backward"
        o = one_way(q, k, v, log_decay, _clock(q, times, backward), backward, chunk, core)

    if not stateful:
        return o.to(dtype)
    received, left = _carried(q, k, v, log_decay, times, direction == "backward", state, wide)
    o = (o if received is None else o + received).to(dtype)
    return (o, left) if return_state else o


def _kept(k: Tensor, mask: Tensor | None) -> Tensor:
    """Keys with the masked ones set to 0: they add nothing, and their gradients and those of their values are exactly 0."""
    return k if mask is None else k.masked_fill(~mask[:, :, None, None], 0.0)


_ordered: tuple[weakref.ref[Tensor], int] | None = None  # the times checked last, and their version


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, times: Tensor | None, mask: Tensor | None, options: dict[str, str], stateful: bool
) -> None:
    """Shapes (programmers' errors), options that go together, and times that never decrease."""
    batch, length, heads, _ = q.shape
    assert k.shape == q.shape and v.shape[:3] == q.shape[:3], (
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} are not [B, N, H, .]"
    )
    assert log_decay.shape == (heads,), f"log_decay {list(log_decay.shape)} is not [H] = [{heads}]"
    for name, x in (("times", times), ("mask", mask)):
        assert x is None or x.shape == (batch, length), f"{name} is not [B, N] = [{batch}, {length}]"
    for name, known in OPTIONS.items():
        if options[name] not in known:
            raise UserError(Reason.CONFIG, f"{name} is {options[name]!r}", f"one of {', '.join(known)}", exit_code=Exit.USAGE)
    if options["ties"] == "group" and (stateful or options["form"] not in {"auto", "parallel"}):
        found = "with a state" if stateful else f"in the {options['form']} form"
        raise UserError(
            Reason.CONFIG, f"ties = group {found}", "the parallel form", "set form = parallel or ties = index", exit_code=Exit.USAGE
        )
    if options["direction"] == "both" and stateful:
        raise UserError(Reason.CONFIG, "a state in both directions at once", "forward or backward", exit_code=Exit.USAGE)
    if times is not None:
        _check_order(times)


@torch.compiler.disable
def _check_order(times: Tensor) -> None:
    """Refuse times that decrease along a row. One host synchronisation a tensor, not one a layer: the last tensor checked is remembered."""
    global _ordered
    version = -1 if times.is_inference() else times._version
    if version >= 0 and _ordered is not None and _ordered[0]() is times and _ordered[1] == version:
        return
    t = times.detach()
    if bool((t[:, 1:] < t[:, :-1]).any() | ~torch.isfinite(t).all()):
        row = int(((t[:, 1:] < t[:, :-1]).any(1) | ~torch.isfinite(t).all(1)).nonzero()[0])
        raise UserError(
            Reason.TIMESTAMPS,
            f"times decrease or are not finite in sequence {row} of the batch",
            "times that never decrease",
            "sort the events of every subject by time",
        )
    _ordered = (weakref.ref(times), version)


def _clock(q: Tensor, times: Tensor | None, backward: bool) -> Tensor:
    """[B, N] (1, N for the regular clock) in float64: times with the sign of the direction."""
    wide = _wide(q.device)
    t = torch.arange(q.shape[1], device=q.device, dtype=wide)[None] if times is None else times.to(wide)
    return -t if backward else t


def _wide(device: torch.device) -> torch.dtype:
    """The type of times: their differences must survive large absolute values."""
    return torch.float32 if device.type == "mps" else torch.float64


def _decay(exponent: Tensor, allowed: Tensor | None = None) -> Tensor:
    """exp of a fresh tensor of exponents, in place; exactly 0 below `SMALLEST` and where not allowed (selected before exp: no inf, no NaN)."""
    gone = exponent < SMALLEST
    return exponent.masked_fill_(gone if allowed is None else gone | ~allowed, -math.inf).exp_()


def _carried(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    times: Tensor | None,
    backward: bool,
    state: State | None,
    wide: torch.dtype,
) -> tuple[Tensor | None, State]:
    """What the rows receive from the state, [B, N, H, V], and the state they leave. Linear, hence the same for every form; all exponents <= 0."""
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    g = log_decay.to(wide)[:, None]
    batch, _, length, width = q.shape
    clock = _clock(q.transpose(1, 2), times, backward)
    sign, end = (-1.0, clock[:, :1]) if backward else (1.0, clock[:, -1:])

    weights = _decay(g * (end - clock).to(wide)[:, None])  # [B, H, N]
    memory = (k * weights[..., None]).transpose(2, 3) @ v
    time = (sign * end[:, 0]).expand(batch)
    if state is None:
        return None, State(memory, time)

    if times is None:
        start = clock[:, -1:] - 1 if backward else clock[:, :1] - 1
        time = state.time + sign * length
    else:
        start = sign * state.time.to(clock.dtype)[:, None]
        if bool((clock < start).any()):
            raise UserError(
                Reason.TIMESTAMPS,
                f"times lie {'after' if backward else 'before'} the time of the carried state",
                "pieces of a sequence in the order of the direction",
                "feed the pieces in order, each with the state of the one before",
            )
    before = state.memory.to(wide)
    received = (q * (_decay(g * (clock - start).to(wide)[:, None]) * width**-0.5)[..., None]) @ before
    memory = memory + _decay(g * (end - start).to(wide)[:, None])[..., None] * before
    return received.transpose(1, 2), State(memory, time)


# -- recurrent form (equation 4) --------------------------------------------------------------------------------------------------------------


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, backward: bool, chunk: int, core: torch.dtype
) -> Tensor:
    """One state update a row, in float32 at least; `chunk` has no meaning here."""
    wide = torch.promote_types(core, torch.float32)
    q, k, v = (x.to(core).to(wide) for x in (q * q.shape[-1] ** -0.5, k, v))
    order = range(q.shape[1])[::-1] if backward else range(q.shape[1])
    gaps = clock[:, :-1] - clock[:, 1:] if backward else clock[:, 1:] - clock[:, :-1]
    fade = _decay(log_decay.to(wide)[:, None, None, None] * gaps.to(wide)[:, None, None, None])  # [B, H, 1, 1, N-1]
    memory, rows = k.new_zeros(()), []
    for step, n in enumerate(order):
        if step:
            memory = memory * fade[..., n if backward else n - 1]
        memory = memory + k[:, n, :, :, None] * v[:, n, :, None, :]
        rows.append((q[:, n, :, None] @ memory)[:, :, 0])
    return torch.stack(rows[::-1] if backward else rows, 1)


# -- chunkwise form (equations 5 and 6) -------------------------------------------------------------------------------------------------------


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, backward: bool, chunk: int, core: torch.dtype
) -> Tensor:
    """Folded on a CPU where its exponents are safe, else masked. (On a GPU the guard would cost a synchronisation a layer.)"""
    chunk = min(chunk, q.shape[1])
    if q.device.type == "cpu" and _safe(log_decay, clock, chunk):
        return cast(Tensor, _Folded.apply(q, k, v, log_decay, clock, backward, chunk, core))
    return _masked(q, k, v, log_decay, clock, backward, chunk, core)


def _safe(log_decay: Tensor, clock: Tensor, chunk: int) -> bool:
    """Whether no key of any chunk would be scaled by more than exp(GUARD)."""
    first, last = _ends(clock.detach(), chunk)
    return bool((last - first).abs().max() * log_decay.detach().abs().max() < GUARD)


def _ends(clock: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Times [B, n] of the first and of the last row (by index) of every chunk."""
    length = clock.shape[1]
    first = torch.arange(0, length, chunk, device=clock.device)
    return clock[:, first], clock[:, (first + chunk - 1).clamp(max=length - 1)]


def _before(size: int, backward: bool, device: torch.device) -> Tensor:
    """[size, size] bool: the column's chunk comes strictly before the row's in the order of processing."""
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    return ones.triu(1) if backward else ones.tril(-1)


def _groups(chunks: int, backward: bool) -> list[slice]:
    """Chunks in groups of `GROUP`, in the order of processing."""
    groups = [slice(at, min(at + GROUP, chunks)) for at in range(0, chunks, GROUP)]
    return groups[::-1] if backward else groups


def _masked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, backward: bool, chunk: int, core: torch.dtype
) -> Tensor:
    """Chunkwise with a decay matrix a chunk: all exponents <= 0, any gap, any device, plain autograd.

    A chunk's state is referenced to its far end e (the last row processed), the state entering a chunk to its near end r:
    U_c = (exp(g (e - t)) k)^T v,  S_c = sum over chunks j before c of exp(g (r_c - e_j)) U_j.
    """
    batch, length, _, width = q.shape
    pad = -length % chunk
    wide = torch.promote_types(core, torch.float32)
    g = log_decay.to(wide)[:, None, None]

    def split(x: Tensor) -> Tensor:  # [B, N, H, K] -> [B, H, n, C, K]
        x = torch.nn.functional.pad(x.to(core), (0, 0, 0, 0, 0, pad))
        return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)

    near, far = _ends(clock, chunk)[:: -1 if backward else 1]
    rows = torch.cat((clock, clock[:, -1:].expand(-1, pad)), 1).unflatten(1, (-1, chunk))  # [B, n, C]
    q, k, v = split(q * width**-0.5), split(k), split(v)

    allowed = ~_before(chunk, not backward, q.device)  # the diagonal included
    gap = (rows[..., None] - rows[..., None, :]).to(wide)
    scores = (q @ k.transpose(-1, -2)).mul_(_decay(g[..., None] * gap[:, None], allowed).to(core))
    received = (q * _decay(g * (rows - near[..., None]).to(wide)[:, None])[..., None]).to(core)
    given = _decay(g * (far[..., None] - rows).to(wide)[:, None])
    own = ((k * given[..., None]).to(core).transpose(-1, -2) @ v).flatten(-2)  # [B, H, n, K V]

    entering: list[Tensor] = []
    carry, since = None, None
    for group in _groups(own.shape[2], backward):
        X, source, query = own[:, :, group], far[:, group], near[:, group]
        last = source[:, :1] if backward else source[:, -1:]
        before = _before(X.shape[2], backward, q.device)
        before = torch.cat((before, torch.ones_like(before[:1])))  # a further row: the state that goes on, referenced to the far end
        if carry is not None:
            X, source = torch.cat((X, carry), 2), torch.cat((source, since), 1)
            before = torch.cat((before, torch.ones_like(before[:, :1])), 1)
        gap = (torch.cat((query, last), 1)[:, :, None] - source[:, None, :]).to(wide)
        S = _decay(g * gap[:, None], before).to(core) @ X
        entering.append(S[:, :, :-1])
        carry, since = S[:, :, -1:], last
    S = torch.cat(entering[::-1] if backward else entering, 2).unflatten(-1, (width, -1))
    o = scores @ v + received @ S
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


# The folded form: row n of q is scaled by a_n = s exp(g (t_n - r)), row m of k by b_m = exp(-g (t_m - r)), r = the time of the chunk's row that
# is processed first, so that a C x C decay matrix is never formed:
#     A = lower(q~ k~^T)    U_c = k~^T v    S_c = sum over chunks j before c of exp(g (r_c - r_j)) U_j    o = A v + q~ S_c
# Everything is done block by block (some heads of some rows of the batch, one group of chunks), so that a block stays in the cache.


class _Plan(NamedTuple):
    """What the blocks of the folded form share. The first size is 1, not B, where the whole batch has the regular clock."""

    elapsed: Tensor  # [B, N] t - r
    step: Tensor  # [B, n] r - r of the chunk processed before
    queries: Tensor  # [B, H, N] a, at most s
    keys: Tensor  # [B, H, N] b, at most exp(GUARD)
    moves: list[
        tuple[slice, Tensor]
    ]  # groups of chunks in the order of processing: [B, H, G (+ 1), G] from U to S (and to the next group's first S)
    blocks: list[tuple[slice, slice]]  # (batch, heads) whose scores fit the cache


def _plan(shape: torch.Size, log_decay: Tensor, clock: Tensor, backward: bool, chunk: int, core: torch.dtype) -> _Plan:
    batch, length, heads, width = shape
    wide = torch.promote_types(core, torch.float32)
    g = log_decay.to(clock.dtype)[:, None]
    first, last = _ends(clock, chunk)
    reference = last if backward else first  # of the row processed first: every other row of the chunk is later
    elapsed = clock - reference.repeat_interleave(chunk, 1)[:, :length]
    step = torch.zeros_like(reference)
    if backward:
        step[:, :-1] = reference[:, :-1] - reference[:, 1:]
    else:
        step[:, 1:] = reference[:, 1:] - reference[:, :-1]
    exponent = g * elapsed[:, None]  # in float64: an exponent of 60 loses nothing
    queries, keys = exponent.exp() * width**-0.5, (-exponent).exp_()

    moves, chunks = [], reference.shape[1]
    floor = SMALLEST if wide == torch.float32 else -700.0  # keys may be up to exp(GUARD): to float64 that tail still counts
    for group in _groups(chunks, backward):
        onward = slice(max(group.start - 1, 0), group.start) if backward else slice(group.stop, group.stop + 1)
        to = torch.cat((reference[:, group], reference[:, onward]), 1)
        before = _before(group.stop - group.start, backward, clock.device)
        before = torch.cat((before, before.new_ones(to.shape[1] - len(before), len(before))))
        exponent = g[..., None] * (to[:, :, None] - reference[:, None, group])[:, None]
        moves.append((group, exponent.masked_fill_(~before | (exponent < floor), -math.inf).exp_().to(core)))

    rows = max(1, CACHE // (min(GROUP, chunks) * chunk**2 * core.itemsize))
    few = -(-heads // -(-heads // rows)) if rows < heads else heads  # heads split evenly
    many = max(1, rows // heads)
    blocks = [(slice(b, min(b + many, batch)), slice(h, min(h + few, heads))) for b in range(0, batch, many) for h in range(0, heads, few)]
    return _Plan(elapsed, step, queries.to(wide), keys.to(wide), moves, blocks)


class _Block(NamedTuple):
    """One visit: `at` = (batch, tokens, heads) of [B, N, H, K] tensors; as matrices [R G, C, K] with R = batch x heads of the block."""

    at: tuple[slice, slice, slice]
    sizes: tuple[int, int, int]  # batch, heads, G
    move: Tensor  # [R, G, G] states of the chunks to states entering them
    onward: Tensor  # [R, 1, G] to the state entering the next group; [R, 0, G] in the last one
    number: int  # of the visit in the order of processing
    starts: bool  # nothing is carried into it


def _visits(plan: _Plan, shape: torch.Size, chunk: int, *, undo: bool = False) -> Iterator[_Block]:
    """Every block, its groups in the order of processing (`undo`: the reverse of it)."""
    batch, length, heads, _ = shape
    last = len(plan.moves) - 1
    for index, (some, few) in enumerate(plan.blocks):
        b, h = len(range(batch)[some]), len(range(heads)[few])
        for turn in range(last + 1):
            which = last - turn if undo else turn
            group, move = plan.moves[which]
            size = group.stop - group.start
            move = _part(move, some, few).expand(b, h, -1, -1).reshape(b * h, -1, size)
            at = (some, slice(group.start * chunk, min(group.stop * chunk, length)), few)
            yield _Block(at, (b, h, size), move[:, :size], move[:, size:], index * (last + 1) + which, turn == 0)


def _part(factor: Tensor, some: slice, few: slice, *more: slice) -> Tensor:
    """Rows of [B or 1, H, ...]."""
    return factor[(some if factor.shape[0] > 1 else slice(None), few, *more)]


def _scratch(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Buffers by name, allocated once and used again by every block: `room(name, *shape)`."""
    kept: dict[str, Tensor] = {}

    def room(name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in kept or kept[name].numel() < size:
            kept[name] = torch.empty(size, dtype=dtype)
        return kept[name][:size].view(shape)

    return room


def _load(x: Tensor, block: _Block, chunk: int, room: Callable[..., Tensor], name: str, factor: Tensor | None = None) -> Tensor:
    """The block of `x` [B, N, H, K], times its part of `factor` [B or 1, H, N], padded with zeros to whole chunks: [R G, C, K]."""
    (some, tokens, few), (b, h, size) = block.at, block.sizes
    x = x[block.at].transpose(1, 2)
    out = room(name, b, h, size * chunk, x.shape[-1])
    filled = out[:, :, : x.shape[2]]
    if factor is None:
        filled.copy_(x)
    else:
        torch.mul(x, _part(factor, some, few, tokens)[..., None], out=filled)
    out[:, :, x.shape[2] :].zero_()
    return out.view(-1, chunk, x.shape[-1])


def _save(rows: Tensor, block: _Block, out: Tensor, factor: Tensor | None = None) -> None:
    """The inverse of `_load`: [R G, C, K], times the factor, into the block of `out`."""
    (some, tokens, few), (b, h, _) = block.at, block.sizes
    out = out[block.at].transpose(1, 2)
    rows = rows.view(b, h, -1, rows.shape[-1])[:, :, : out.shape[2]]
    if factor is None:
        out.copy_(rows)
    else:
        torch.mul(rows, _part(factor, some, few, tokens)[..., None], out=out)


class _Folded(torch.autograd.Function):
    """Chunkwise retention of one direction on a CPU, with its own backward: saves the chunk states, recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        clock: Tensor,
        backward: bool,
        chunk: int,
        core: torch.dtype,
    ) -> Tensor:
        plan = _plan(q.shape, log_decay, clock, backward, chunk, core)
        room, keep, first = _scratch(core), any(ctx.needs_input_grad), -1 if backward else 0
        triangle = Tensor.triu_ if backward else Tensor.tril_
        width, value = q.shape[-1], v.shape[-1]
        o, states, carry = v.new_empty(v.shape), [], None
        for block in _visits(plan, q.shape, chunk):
            size = block.sizes[-1]
            Q = _load(q, block, chunk, room, "q", plan.queries)
            K = _load(k, block, chunk, room, "k", plan.keys)
            V = _load(v, block, chunk, room, "v")
            U = torch.bmm(K.mT, V, out=room("u", len(K), width, value)).view(-1, size, width * value)
            if not block.starts:
                U[:, first] += carry
            S = torch.bmm(block.move, U)
            if not block.starts:
                S[:, first] += carry
            carry = torch.bmm(block.onward, U).squeeze(1)
            if keep:
                states.append(S)
            A = triangle(torch.bmm(Q, K.mT, out=room("a", len(K), chunk, chunk)))
            O = torch.bmm(A, V, out=room("o", len(K), chunk, value))
            _save(O.baddbmm_(Q, S.view(-1, width, value)), block, o)
        ctx.save_for_backward(q, k, v, log_decay, *states)
        ctx.plan, ctx.options = plan, (backward, chunk, core)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            return (*_folded_backward(ctx, do), None, None, None)


def _folded_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay and clock.

    With W_c = q~^T dO and G_c = sum over chunks j after c of exp(g (r_j - r_c)) W_j (the scan transposed), P = lower(dO v^T):
        dv = A^T dO + k~ G_c        dq = a (P k~ + dO S_c^T)        dk = b (P^T q~ + v G_c^T)
    and with x_n = q_n . dq_n - k_n . dk_n and F_c = <S_c, W_c + G_c>, what flows over the near end of chunk c:
        dt_n = g x_n                dg = sum of (t_n - r) x_n + sum of (r_c - r of the chunk before) F_c
    (the identity dg = sum of t_n x_n, summed by parts: no cancellation at large t).
    """
    plan, (backward, chunk, core) = ctx.plan, ctx.options
    q, k, v, log_decay, *states = ctx.saved_tensors
    room, first = _scratch(core), -1 if backward else 0
    triangle = Tensor.triu_ if backward else Tensor.tril_
    width, value = q.shape[-1], v.shape[-1]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    learns = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dg, dt = torch.zeros_like(log_decay, dtype=plan.elapsed.dtype), plan.elapsed.new_zeros(q.shape[:2])
    carry = None
    for block in _visits(plan, q.shape, chunk, undo=True):
        size, S = block.sizes[-1], states[block.number]
        Q = _load(q, block, chunk, room, "q", plan.queries)
        K = _load(k, block, chunk, room, "k", plan.keys)
        V = _load(v, block, chunk, room, "v")
        dO = _load(do, block, chunk, room, "do")
        W = torch.bmm(Q.mT, dO, out=room("w", len(K), width, value)).view(-1, size, width * value)
        G = torch.bmm(block.move.mT, W, out=room("g", *W.shape))
        if not block.starts:
            G.baddbmm_(block.onward.mT, carry)
        carry = W[:, first, None] + G[:, first, None]

        A = triangle(torch.bmm(Q, K.mT, out=room("a", len(K), chunk, chunk)))
        dV = torch.bmm(A.mT, dO, out=room("dv", len(K), chunk, value))
        _save(dV.baddbmm_(K, G.view(-1, width, value)), block, dv)
        P = triangle(torch.bmm(dO, V.mT, out=A))
        dQ = torch.bmm(P, K, out=room("dq", len(K), chunk, width)).baddbmm_(dO, S.view(-1, width, value).mT)
        _save(dQ, block, dq, plan.queries)
        dK = torch.bmm(P.mT, Q, out=room("dk", len(K), chunk, width)).baddbmm_(V, G.view(-1, width, value).mT)
        _save(dK, block, dk, plan.keys)
        if learns:
            (some, tokens, few), (b, h, _) = block.at, block.sizes
            x = ((Q * dQ).sum(-1) - (K * dK).sum(-1)).view(b, h, -1)[..., : tokens.stop - tokens.start].to(dt.dtype)
            dt[some, tokens] += (log_decay.to(dt.dtype)[few, None] * x).sum(1)
            group = slice(tokens.start // chunk, tokens.start // chunk + size)
            flow = (S * W.add_(G)).sum(-1).view(b, h, -1).to(dt.dtype)
            some = some if len(plan.step) > 1 else slice(None)
            dg[few] += (x * plan.elapsed[some, None, tokens]).sum((0, 2)) + (flow * plan.step[some, None, group]).sum((0, 2))
    return dq, dk, dv, dg.to(log_decay.dtype), dt if ctx.needs_input_grad[4] else None
