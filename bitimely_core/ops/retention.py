"""Retention: attention without softmax whose weights decay with time (BiTimelyGPT, equations 4, 5,
8 and 10).

    o_n = sum over m of  s (q_n . k_m) D_nm keep_m v_m
    s = K^(-1/2),  D_nm = exp(g |t_n - t_m|),  g = log_decay <= 0

    direction     pairs allowed, by index
    forward       m <= n
    backward      m >= n
    both          all: forward + backward - diagonal

Three forms of the same: `parallel` (an N x N matrix, O(N^2)), `recurrent` (a K x V state, one step
a token) and `chunkwise` (matrices inside chunks, states between them, O(N)). Nothing is ever
flipped: in `backward` the clock has the opposite sign, triangles are upper ones and chunks are
visited from the last to the first.

Legend: B batch, N tokens, H heads, K key width, V value width, C rows of a chunk, n chunks, G
chunks of a group. The clock is the time with the sign of the direction, so that it never decreases
in the order of processing.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, get_args, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.ops import operator
from bitimely_core.ops.rotary import apply_rotation, find_widest_float

Direction = Literal["forward", "backward", "both"]
Form = Literal["auto", "parallel", "chunkwise", "recurrent"]
Ties = Literal["index", "group"]
Precision = Literal["fp32", "bf16"]

OPTIONS = {"direction": Direction, "form": Form, "ties": Ties, "core_precision": Precision}
# direction -> whether each of its passes reads from the last row to the first
BACKWARD: dict[Direction, tuple[bool, ...]] = {
    "forward": (False,),
    "backward": (True,),
    "both": (False, True),
}
# exp below it is a float32 denormal: slow on a CPU and nothing to the result, so it is exactly 0
SMALLEST = -87.0
# largest exponent that the folded form may give to a key; float32 and bfloat16 overflow at 88
GUARD = 60.0
# chunks whose states the form with masks scans by one matrix product; a loop carries the state from
# group to group
GROUP = 8
# rows up to which the parallel form is as fast on a CPU: with heads of 16 x 32 about 64, of 40 x 80
# about 150 (`python benchmarks/retention.py`)
PARALLEL_ROWS, PARALLEL_STATE = 48, 1 / 31
CACHE = 2**20  # bytes of the second-level cache that the scores of one block may take


# where the rows of a wrong piece lie, and the order of right ones
PIECES = {"forward": ("before", "first to the last"), "backward": ("after", "last to the first")}


class State(NamedTuple):
    """The recurrent state after a piece of a sequence (equation 5), without the scale K^(-1/2)."""

    # [B, H, K, V] = sum over m of exp(g |time - t_m|) keep_m k_m^T v_m; float32, or float64 for
    # float64 inputs
    memory: Tensor
    # [B] float64, of the last row processed: the last one in `forward`, the first one in `backward`
    time: Tensor
    # of the pieces that it is the state of; None: not known
    direction: Literal["forward", "backward"] | None = None


class _Pass(NamedTuple):
    """How a form reads the rows in one direction."""

    backward: bool
    chunk: int  # rows of a chunk
    core: torch.dtype  # of the products

    @property
    def step(self) -> Literal[1, -1]:
        """The step from a row, or chunk, to the next one that is processed."""
        return -1 if self.backward else 1


_Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, _Pass], Tensor]


class PairOptions(TypedDict, total=False):
    """Options of `retention` that say which row reads which, and how much of it is left."""

    times: Tensor | None
    mask: Tensor | None
    direction: Direction
    ties: Ties


class RetentionOptions(PairOptions, total=False):
    """Options of `retention`."""

    form: Form
    rotation: Tensor | None
    state: State | None
    chunk: int
    core_precision: Precision


@overload
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    return_state: Literal[False] = ...,
    **options: Unpack[RetentionOptions],
) -> Tensor: ...
@overload
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    return_state: Literal[True],
    **options: Unpack[RetentionOptions],
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
    rotation: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    chunk: int = 64,
    core_precision: Precision = "fp32",
) -> Tensor | tuple[Tensor, State]:
    """Retention of `v` by `q` and `k`. The scale K^(-1/2) is inside; gate and group norm are
    outside.

    On CUDA with Triton, and in graphs of torch.compile, the chunkwise form is the operator
    `bitimely::retention` (see `operator`).

    Products are accumulated in float32 (float64 inputs in float64) whatever autocast says, unless
    `core_precision` is "bf16": then operands and states are bfloat16. `q`, `k`, `v`, `log_decay`,
    `times` and `state.memory` may all need gradients (once).

    Args:
        q: [B, N, H, K] queries, rotated where there is no `rotation`.
        k: [B, N, H, K] keys, likewise.
        v: [B, N, H, V] values.
        log_decay: [H] ln(gamma) of each head, <= 0, per unit of time.
        times: [B, N], never decreasing along a row; None = 0, 1, 2 ... In the unit of `log_decay`.
        mask: [B, N] bool, True = the key may be read. Masked keys and their values get gradients of
            exactly 0.
        direction: `forward`, `backward` or `both`.
        form: `parallel`, `chunkwise`, `recurrent`; `auto` = recurrent for one token with a state,
            parallel for so few rows that it is faster (on CUDA 2 chunks, on a CPU by the widths of
            keys and values), else chunkwise.
        ties: `index` orders equal times by index; `group` lets no token read another of the same
            time (parallel form only).
        rotation: table of `rotary.make_rotation`, by which queries and keys are rotated; it gets no
            gradient.
        state: left by the rows before these (`backward`: after). Rows without `times` follow it at
            a distance of one.
        return_state: return the state after these rows as well. Like `state` for `forward` and
            `backward` only.
        chunk: rows of a chunk.
        core_precision: `fp32` or `bf16`; the latter counts for neither float64 inputs nor a
            `log_decay` or `times` that need gradients.

    Returns [B, N, H, V] in the dtype of `v`; with `return_state` the pair of it and the `State`.
    Raises UserError: `timestamps` for times that decrease, are not finite or contradict the state;
    `config` for options that exclude others, for a state of the other direction, and for inputs
    that are not of floating point; `shapes_differ` for a state of other rows or heads.

    Times are checked once: a tensor that was in order is checked again after operations of torch
    have changed it, but not after a write through numpy's view of it or through `.data`, which
    torch does not count.
    """
    stateful = state is not None or return_state
    _check_shapes(q, k, v, log_decay, times, mask)
    _check_options(
        {"direction": direction, "form": form, "ties": ties, "core_precision": core_precision},
        stateful=stateful,
    )
    _check_inputs(q, k, v, chunk)
    _check_state(q, v, direction, state)
    if not q.shape[0] * q.shape[1]:
        return _read_nothing(q, k, v, state, return_state=return_state)
    check_order(times)
    form = _choose_form(form, q, v, direction, ties, chunk, stateful=stateful)
    precision = _choose_precision(core_precision, log_decay, times)
    if _is_operator(q, k, v, form, stateful=stateful):
        if operator.fits_kernels(q, k, v):
            precision = core_precision
        return cast(
            Tensor,
            torch.ops.bitimely.retention(
                q, k, v, log_decay, times, mask, rotation, direction, chunk, precision
            ),
        )
    dtype, core = v.dtype, _choose_core(precision, q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        if rotation is not None:
            q, k = apply_rotation(q, rotation), apply_rotation(k, rotation)
        k = _apply_mask(k, mask)
        if form == "parallel":
            scores = retention_matrix(
                q, k, log_decay=log_decay, times=times, direction=direction, ties=ties, dtype=core
            )
            o = (scores @ v.to(core).transpose(1, 2)).transpose(1, 2)
        else:
            passes = [_Pass(backward, chunk, core) for backward in BACKWARD[direction]]
            one_way = _recurrent if form == "recurrent" else _chunkwise
            o = _add_passes(one_way, q, k, v, log_decay, times, passes)
        if not stateful:
            return o.to(dtype)
        o, after = _carry_state(o, (q, k, v), log_decay, times, direction, state)
    return (o.to(dtype), after) if return_state else o.to(dtype)


def _choose_form(
    form: Form,
    q: Tensor,
    v: Tensor,
    direction: Direction,
    ties: Ties,
    chunk: int,
    *,
    stateful: bool,
) -> Form:
    """What `auto` stands for: the fastest form as measured."""
    if form != "auto":
        return form
    length = q.shape[1]
    if stateful and length == 1:
        return "recurrent"
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        most = 2.0 * chunk
    else:
        state = q.shape[-1] * v.shape[-1]
        most = len(BACKWARD[direction]) * (PARALLEL_ROWS + PARALLEL_STATE * state)
    return "parallel" if ties == "group" or length <= most else "chunkwise"


def _choose_precision(
    core_precision: Precision, log_decay: Tensor, times: Tensor | None
) -> Precision:
    """`fp32` where decay or times learn: their gradients are differences, lost in bfloat16."""
    learns = log_decay.requires_grad or (times is not None and times.requires_grad)
    return "fp32" if learns else core_precision


def _choose_core(precision: Precision, *tensors: Tensor) -> torch.dtype:
    """The dtype of the products: float64 if a tensor is."""
    if any(x.dtype == torch.float64 for x in tensors):
        return torch.float64
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _is_operator(q: Tensor, k: Tensor, v: Tensor, form: Form, *, stateful: bool) -> bool:
    """Whether a call is one of `bitimely::retention`."""
    if form == "parallel" or stateful or not operator.is_used(q.device):
        return False
    return torch.compiler.is_compiling() or operator.fits_kernels(q, k, v)


def decay_matrix(
    log_decay: Tensor,
    length: int | None = None,
    *,
    times: Tensor | None = None,
    direction: Direction = "forward",
    ties: Ties = "index",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """D [B, H, N, N] of equations 4, 8 and 10: weights by time alone, exactly 0 where a pair is not
    allowed or its weight is below e^-87.

    Arguments as those of `retention`. Without `times` the regular clock has `length` N. `dtype` is
    that of the result, float32 or float64, by default of `log_decay`. Row = query, column = key;
    the first size is 1 without `times`.
    """
    dtype = dtype or torch.promote_types(log_decay.dtype, torch.float32)
    wide = find_widest_float(log_decay.device)
    t = (
        torch.arange(length or 0, device=log_decay.device, dtype=wide)[None]
        if times is None
        else times.to(wide)
    )
    index = torch.arange(t.shape[1], device=t.device)
    later = index[:, None] >= index  # the query is not before the key
    gap = t[:, :, None] - t[:, None, :]
    if direction == "forward":
        allowed = later
    elif direction == "backward":
        gap, allowed = -gap, later.T
    else:  # signs by index, not abs(): at equal times the gradient is that of the two triangles
        gap, allowed = torch.where(later, gap, -gap), torch.ones_like(later)
    if ties == "group":
        allowed = allowed & ((gap > 0) | (index[:, None] == index))
    return _decay(
        log_decay.to(dtype)[:, None, None] * gap.to(dtype)[:, None],
        allowed.expand(gap.shape)[:, None],
    )


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
    """R = K^(-1/2) q k^T * D of equations 4, 8 and 10, the map of retention [B, H, N, N]: signed,
    not normalised, in forward time order.

    Arguments as those of `retention`; row = query, column = key, and the columns of masked keys are
    0. Everything is cast to `dtype` before it is multiplied, for instance float64 for singular
    values; by default that of `q`, float32 at least.
    """
    dtype = dtype or torch.promote_types(q.dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        weights = decay_matrix(
            log_decay, q.shape[1], times=times, direction=direction, ties=ties, dtype=wide
        ).to(dtype)
        q, k = q.to(dtype).transpose(1, 2), _apply_mask(k, mask).to(dtype).transpose(1, 2)
        return ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)).mul_(weights)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, times: Tensor | None, mask: Tensor | None
) -> None:
    """Programmers' errors."""
    batch, length, heads, _ = q.shape
    assert k.shape == q.shape, f"k {list(k.shape)} is not shaped like q {list(q.shape)}"
    assert v.shape[:3] == q.shape[:3], f"v {list(v.shape)} does not fit q {list(q.shape)}"
    assert log_decay.shape == (heads,), f"log_decay {list(log_decay.shape)} is not [H] = [{heads}]"
    assert times is None or times.shape == (batch, length), (
        f"times are not [B, N] = [{batch}, {length}]"
    )
    assert mask is None or mask.shape == (batch, length), (
        f"mask is not [B, N] = [{batch}, {length}]"
    )


def _check_options(options: Mapping[str, str], *, stateful: bool) -> None:
    for name, kind in OPTIONS.items():
        if options[name] not in get_args(kind):
            raise usage_error(f"{name} is {options[name]!r}", f"one of {', '.join(get_args(kind))}")
    if options["ties"] == "group" and options["form"] not in {"auto", "parallel"}:
        raise usage_error(
            f"ties = group in the {options['form']} form",
            "the parallel form",
            "set form = parallel or ties = index",
        )
    if options["ties"] == "group" and stateful:
        raise usage_error(
            "ties = group with a state",
            "whole sequences",
            "set ties = index or feed the sequence at once",
        )
    if options["direction"] == "both" and stateful:
        raise usage_error("a state of both directions at once", "direction forward or backward")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise usage_error(
                f"{name} of {str(x.dtype).removeprefix('torch.')}",
                "floating-point numbers",
                f"convert it: {name}.float()",
            )
    if chunk < 1:
        raise usage_error(f"chunk is {chunk}", "at least one row")


def _check_state(q: Tensor, v: Tensor, direction: str, state: State | None) -> None:
    if state is None:
        return
    if state.direction not in {None, direction}:
        raise usage_error(
            f"a state of {state.direction} retention in {direction} retention",
            f"one that {direction} retention has left",
            "begin without a state",
        )
    wanted = [q.shape[0], q.shape[2], q.shape[3], v.shape[3]]
    if list(state.memory.shape) != wanted or list(state.time.shape) != wanted[:1]:
        raise usage_error(
            f"a state of {list(state.memory.shape)} at {list(state.time.shape)} times",
            f"{wanted} at {wanted[:1]}",
            "give each sequence its own state",
            code=Reason.SHAPES_DIFFER,
        )


def _read_nothing(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, *, return_state: bool
) -> Tensor | tuple[Tensor, State]:
    """Retention of no rows: nothing, and the state as it was."""
    o = ((q * k).sum(-1, keepdim=True) * v).to(v.dtype)
    if not return_state:
        return o
    if state is None:
        raise usage_error(
            "the state after no rows",
            "rows, or the state before them",
            "begin with the first piece that has rows",
        )
    return o, state


# the last times that were in order, and their version
_ordered: tuple[weakref.ref[Tensor], int] | None = None


def check_order(times: Tensor | None) -> None:
    """Refuse times [B, N] that decrease; graphs do not check them.

    The last tensor that was in order is remembered: the layers of a model wait for a GPU once a
    batch. Raises UserError (timestamps, exit 4).
    """
    global _ordered
    if times is None or torch.compiler.is_compiling():
        return
    version = -1 if times.is_inference() else times._version
    if _ordered is not None and version >= 0 and _ordered[0]() is times and _ordered[1] == version:
        return
    t = times.detach()
    bad = (t[:, 1:] < t[:, :-1]).any(1) | ~torch.isfinite(t).all(1)
    if bool(bad.any()):
        raise input_error(
            Reason.TIMESTAMPS,
            f"times decrease or are not finite in {int(bad.sum())} of {len(bad)} sequences, "
            f"first in number {int(bad.nonzero()[0])}",
            "times that never decrease",
            "sort the events of every subject by time",
        )
    _ordered = (weakref.ref(times), version)


def _clock(q: Tensor, times: Tensor | None, backward: bool) -> Tensor:
    """[B, N], or [1, N] for the regular clock."""
    wide = find_widest_float(q.device)
    t = (
        torch.arange(q.shape[1], device=q.device, dtype=wide)[None]
        if times is None
        else times.to(wide)
    )
    return -t if backward else t


def _apply_mask(k: Tensor, mask: Tensor | None) -> Tensor:
    """Keys with the masked ones set to 0: they give nothing, and the gradients of them and of their
    values are exactly 0.
    """
    return k if mask is None else k.masked_fill(~mask[:, :, None, None], 0.0)


def _decay(exponent: Tensor, allowed: Tensor | None = None, smallest: float = SMALLEST) -> Tensor:
    """The exp of a fresh tensor, in place; 0 below `smallest` and where not allowed: selected
    before exp, so that no gradient is NaN.
    """
    gone = exponent < smallest
    return exponent.masked_fill_(gone if allowed is None else gone | ~allowed, -math.inf).exp_()


def _add_passes(
    form: _Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    times: Tensor | None,
    passes: list[_Pass],
) -> Tensor:
    """The passes of a direction, [B, N, H, V]; of `both` without counting the diagonal twice."""
    if len(passes) == 1:
        return form(q, k, v, log_decay, _clock(q, times, passes[0].backward), passes[0])
    core = passes[0].core
    # the sum of three terms is rounded once, at the end
    q, k, v = q.to(core), k.to(core), v.to(core)
    o = (q * k).sum(-1, keepdim=True) * -(q.shape[-1] ** -0.5) * v
    for way in passes:
        o = o + form(q, k, v, log_decay, _clock(q, times, way.backward), way)
    return o


def _carry_state(
    o: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    log_decay: Tensor,
    times: Tensor | None,
    direction: Direction,
    state: State | None,
) -> tuple[Tensor, State]:
    """`o` [B, N, H, V] with what the state before the rows adds, and the state after them.

    The rows are q, k and v. It serves every form; all exponents are <= 0.
    """
    assert direction != "both"
    wide, backward = _choose_core("fp32", *rows), direction == "backward"
    clock, g = _clock(o, times, backward), log_decay.to(wide)[:, None]
    sign, end = (-1.0, clock[:, :1]) if backward else (1.0, clock[:, -1:])
    q, k, v = (x.to(wide).transpose(1, 2) for x in rows)
    batch, _, length, width = q.shape
    weights = _decay(g * (end - clock).to(wide)[:, None])  # [B, H, N]
    memory, time = (k * weights[..., None]).mT @ v, (sign * end[:, 0]).expand(batch)
    if state is None:
        return o, State(memory, time, direction)

    if times is None:  # t = time + 1, time + 2 ... (backward: time - 1, time - 2 ...)
        start = (clock[:, -1:] if backward else clock[:, :1]) - 1
        time = state.time + sign * length
    else:
        start = sign * state.time.to(clock.dtype)[:, None]
        if bool((clock < start).any()):
            side, order = PIECES[direction]
            raise input_error(
                Reason.TIMESTAMPS,
                f"times lie {side} the time of the state",
                f"pieces of a sequence from the {order}",
                "feed the pieces in this order, each with the state of the one before",
            )
    before = state.memory.to(wide)
    received = (
        q * (_decay(g * (clock - start).to(wide)[:, None]) * width**-0.5)[..., None]
    ) @ before
    faded = _decay(g * (end - start).to(wide)[:, None])[..., None] * before
    return o + received.transpose(1, 2), State(memory + faded, time, direction)


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, way: _Pass
) -> Tensor:
    """One update of the state a row, in float32 at least; there are no chunks."""
    wide = torch.promote_types(way.core, torch.float32)
    q, k, v = (x.to(way.core).to(wide) for x in (q * q.shape[-1] ** -0.5, k, v))
    gaps = clock[:, :-1] - clock[:, 1:] if way.backward else clock[:, 1:] - clock[:, :-1]
    # [B, H, 1, 1, N - 1]
    fades = _decay(log_decay.to(wide)[:, None] * gaps.to(wide)[:, None])[:, :, None, None]
    memory, rows = k.new_zeros(()), []
    for step, n in enumerate(range(q.shape[1])[:: way.step]):
        if step:
            memory = memory * fades[..., n if way.backward else n - 1]
        memory = memory + k[:, n, :, :, None] * v[:, n, :, None, :]
        rows.append((q[:, n, :, None] @ memory)[:, :, 0])
    return torch.stack(rows[:: way.step], 1)


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, way: _Pass
) -> Tensor:
    """Folded on a CPU where no key is scaled by more than exp(GUARD), else with masks.

    On a GPU the guard would cost a wait a layer. Exported graphs cannot depend on the clock, and
    may run on another device.
    """
    way = way._replace(chunk=min(way.chunk, q.shape[1]))
    if q.device.type == "cpu" and not torch.compiler.is_exporting():
        first, last = _chunk_ends(clock.detach(), way.chunk)
        if bool((last - first).abs().max() * log_decay.detach().abs().max() < GUARD):
            o: Tensor = _FoldedRetention.apply(  # type: ignore[no-untyped-call]
                q, k, v, log_decay, clock, way
            )
            return o
    return _chunkwise_with_masks(q, k, v, log_decay, clock, way)


def _chunk_ends(clock: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The clock [B, n] at the first and at the last row (by index) of every chunk."""
    first = torch.arange(0, clock.shape[1], chunk, device=clock.device)
    return clock[:, first], clock[:, (first + chunk - 1).clamp(max=clock.shape[1] - 1)]


def _mask_before(size: int, backward: bool, device: torch.device) -> Tensor:
    """[size, size] bool: the column is processed strictly before the row."""
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    return ones.triu(1) if backward else ones.tril(-1)


def _cut_range(count: int, size: int) -> list[slice]:
    """0 .. `count` in pieces of `size`, of which the last may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _chunkwise_with_masks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, way: _Pass
) -> Tensor:
    """Chunkwise with a decay matrix a chunk, on any device, with plain autograd.

    All exponents are <= 0, so any gap will do.

    The state of a chunk is referenced to its far end e (the row processed last), the state entering
    a chunk to its near end r:
    U_c = (exp(g (e - t)) k)^T v,  S_c = sum over chunks j before c of exp(g (r_c - e_j)) U_j.
    """
    length, width = q.shape[1], q.shape[-1]
    missing = -length % way.chunk
    wide = torch.promote_types(way.core, torch.float32)
    g = log_decay.to(wide)[:, None, None]

    def split(x: Tensor) -> Tensor:  # [B, N, H, K] -> [B, H, n, C, K]
        return (
            pad(x.to(way.core), (0, 0, 0, 0, 0, missing))
            .unflatten(1, (-1, way.chunk))
            .permute(0, 3, 1, 2, 4)
        )

    near, far = _chunk_ends(clock, way.chunk)[:: way.step]
    # [B, n, C]
    rows = torch.cat((clock, clock[:, -1:].expand(-1, missing)), 1).unflatten(1, (-1, way.chunk))
    q, k, v = split(q * width**-0.5), split(k), split(v)
    gap = (rows[..., :, None] - rows[..., None, :]).to(wide)[:, None]
    # the diagonal included
    weights = _decay(g[..., None] * gap, ~_mask_before(way.chunk, not way.backward, q.device))
    scores = (q @ k.mT).mul_(weights.to(way.core))
    receiving = (q * _decay(g * (rows - near[..., None]).to(wide)[:, None])[..., None]).to(way.core)
    giving = (k * _decay(g * (far[..., None] - rows).to(wide)[:, None])[..., None]).to(way.core)
    added = (giving.mT @ v).flatten(-2)  # [B, H, n, K V]

    # the state that goes on to the next group, and its time
    carry, since = added[:, :, :0], far[:, :0]
    entering: list[Tensor] = []
    for group in _cut_range(added.shape[2], GROUP)[:: way.step]:
        ahead = far[:, group][:, :1] if way.backward else far[:, group][:, -1:]
        states, sources = (
            torch.cat((added[:, :, group], carry), 2),
            torch.cat((far[:, group], since), 1),
        )
        targets = torch.cat((near[:, group], ahead), 1)
        before = _mask_before(group.stop - group.start, way.backward, q.device)
        # the carry is before all, what goes on after all
        before = pad(before, (0, carry.shape[2], 0, 1), value=True)
        gap = (targets[:, :, None] - sources[:, None, :]).to(wide)[:, None]
        moved = _decay(g * gap, before).to(way.core) @ states
        entering.append(moved[:, :, :-1])
        carry, since = moved[:, :, -1:], ahead
    S = torch.cat(entering[:: way.step], 2).unflatten(-1, (width, -1))
    o = scores @ v + receiving @ S
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


# The folded form: row n of q is scaled by a_n = s exp(g (t_n - r)), and row m of k by
# b_m = exp(-g (t_m - r)), where r is the clock at the row of the chunk that is processed first.
# So no C x C decay matrix is ever formed. With c - 1 for the chunk processed before c:
#     A = lower(q~ k~^T)                               U_c = k~^T v
#     S_c = exp(g (r_c - r_(c-1))) (S_(c-1) + U_(c-1))  o = A v + q~ S_c
# A block is some chunks of some heads of some sequences. All products are done block by block, so
# that a block stays in the cache.


class _ChunkBlock(NamedTuple):
    """One visit. R = sequences x heads of the block, G its chunks."""

    rows: tuple[slice, slice, slice]  # sequences, heads, tokens of [B, H, N, K]
    chunks: tuple[slice, slice, slice]  # sequences, heads, chunks of [B, H, n, 1]


class _ChunkPlan(NamedTuple):
    """Quantities common to all blocks."""

    elapsed: Tensor  # [B, N] t - r
    step: Tensor  # [B, n] r - r of the chunk processed before, 0 for the first one
    fades: Tensor  # [B, H, n, 1] exp(g step)
    # [B, H, N, 1] a, at most s; in the precision of the products, because mixed ones are slow
    queries: Tensor
    keys: Tensor  # [B, H, N, 1] b, at most exp(GUARD); likewise
    # those of the same sequences and heads, in the order of processing
    blocks: list[list[_ChunkBlock]]


def _plan_chunks(shape: torch.Size, log_decay: Tensor, clock: Tensor, way: _Pass) -> _ChunkPlan:
    batch, length, _, width = shape
    wide = torch.promote_types(way.core, torch.float32)
    # what it drops was scaled by up to exp(GUARD): float64 would notice
    smallest = SMALLEST if wide == torch.float32 else -700.0
    g = log_decay.to(clock.dtype)[:, None]
    reference = _chunk_ends(clock, way.chunk)[1 if way.backward else 0]
    elapsed = clock - reference.repeat_interleave(way.chunk, 1)[:, :length]
    exponent = g * elapsed[:, None]  # in float64: an exponent of 60 loses nothing
    step = torch.zeros_like(reference)
    later, earlier = (slice(-1), slice(1, None)) if way.backward else (slice(1, None), slice(-1))
    step[:, later] = reference[:, later] - reference[:, earlier]
    factors = (
        (_decay(g * step[:, None], smallest=smallest), wide),
        (exponent.exp().mul_(width**-0.5), way.core),
        (exponent.neg().exp_(), way.core),
    )
    fades, queries, keys = (x.to(dtype).expand(batch, -1, -1)[..., None] for x, dtype in factors)
    blocks = _cut_blocks(shape, step.shape[1], way)
    return _ChunkPlan(
        elapsed.expand(batch, -1), step.expand(batch, -1), fades, queries, keys, blocks
    )


def _cut_blocks(shape: torch.Size, chunks: int, way: _Pass) -> list[list[_ChunkBlock]]:
    """The blocks of q [B, N, H, K] whose scores take at most `CACHE`."""
    batch, length, heads, _ = shape
    most = max(1, CACHE // (way.chunk**2 * way.core.itemsize))  # matrices of scores in a block
    few = min(heads, most)
    size = -(-chunks // -(-chunks // (most // few)))  # chunks, split evenly
    many = max(1, most // (few * size))
    tokens, groups = _cut_range(length, size * way.chunk), _cut_range(chunks, size)
    pairs = [*zip(tokens, groups, strict=True)][:: way.step]
    return [
        [_ChunkBlock((*rows, part), (*rows, group)) for part, group in pairs]
        for rows in itertools.product(_cut_range(batch, many), _cut_range(heads, few))
    ]


def _make_scratch(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Buffers by name and shape, allocated once and used again by every block: `room(name,
    *shape)`.
    """
    buffers: dict[tuple[Any, ...], Tensor] = {}

    def room(*key: Any) -> Tensor:
        if key not in buffers:
            buffers[key] = torch.empty(key[1:], dtype=dtype)
        return buffers[key]

    return room


def _load(
    x: Tensor,
    block: _ChunkBlock,
    chunk: int,
    room: Callable[..., Tensor],
    name: str,
    factor: Tensor | None = None,
) -> Tensor:
    """The block of `x` [B, H, N, K], times that of `factor` [B, H, N, 1], filled up with zeros to
    whole chunks: [R G, C, K].
    """
    x = x[block.rows]
    many, few, length, width = x.shape
    rows = out = room(name, many, few, length + -length % chunk, width)
    if length % chunk:
        rows = out[:, :, :length]
        out[:, :, length:].zero_()
    if factor is None:
        rows.copy_(x)
    else:
        torch.mul(x, factor[block.rows], out=rows)
    return out.view(-1, chunk, width)


def _save(x: Tensor, block: _ChunkBlock, out: Tensor, factor: Tensor | None = None) -> None:
    """[R G, C, K], times the block of `factor`, into the block of `out`: the way back from
    `_load`.
    """
    out = out[block.rows]
    x = x.view(*out.shape[:2], -1, out.shape[-1])[:, :, : out.shape[2]]
    if factor is None:
        out.copy_(x)
    else:
        torch.mul(x, factor[block.rows], out=out)


def _scan_states(added: Tensor, fades: Tensor, carry: Tensor, out: Tensor, order: range) -> Tensor:
    """The states [.., G, K V] on entering each chunk, as `out`; `carry` [.., K V] becomes the state
    after the last one, in float32 at least.
    """
    for c in order:
        out[:, :, c] = carry.mul_(fades[:, :, c])
        carry += added[:, :, c]
    return out


class _FoldedRetention(torch.autograd.Function):
    """Chunkwise retention of one direction on a CPU with its own backward: saves the states between
    chunks, recomputes the scores.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, clock: Tensor, way: _Pass
    ) -> Tensor:
        plan, chunk = _plan_chunks(q.shape, log_decay, clock, way), way.chunk
        room, triangle = _make_scratch(way.core), Tensor.triu_ if way.backward else Tensor.tril_
        width, value = q.shape[-1], v.shape[-1]
        o, states = v.new_empty(v.shape), []
        q_, k_, v_, o_ = (x.transpose(1, 2) for x in (q, k, v, o))
        for blocks in plan.blocks:
            carry = plan.fades.new_zeros(*plan.fades[blocks[0].chunks].shape[:2], width * value)
            for block in blocks:
                Q = _load(q_, block, chunk, room, "q", plan.queries)
                K = _load(k_, block, chunk, room, "k", plan.keys)
                V = _load(v_, block, chunk, room, "v")
                fades = plan.fades[block.chunks]
                S = Q.new_empty(*fades.shape[:3], width * value)
                U = torch.bmm(K.mT, V, out=room("u", len(K), width, value)).view(S.shape)
                _scan_states(U, fades, carry, S, range(S.shape[2])[:: way.step])
                if any(ctx.needs_input_grad):
                    states.append(S)
                A = triangle(torch.bmm(Q, K.mT, out=room("a", len(K), chunk, chunk)))
                out = torch.bmm(A, V, out=room("o", len(K), chunk, value)).baddbmm_(
                    Q, S.view(-1, width, value)
                )
                _save(out, block, o_)
        ctx.save_for_backward(q, k, v, log_decay, clock, *states)
        ctx.way = way
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            if not torch.is_grad_enabled():
                return (*_folded_backward(ctx, do), None)
            # the gradients are to have a graph: as the form with masks
            inputs = [x.view_as(x) for x in ctx.saved_tensors[:5]]
            leaves = [x for x in inputs if x.requires_grad]
            q, k, v, log_decay, clock = inputs
            o = _chunkwise_with_masks(q, k, v, log_decay, clock, ctx.way)
            gradients = iter(torch.autograd.grad(o, leaves, do, create_graph=True))
            return (*(next(gradients) if x.requires_grad else None for x in inputs), None)


def _folded_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay and clock.

    With W_c = q~^T dO, G_c = exp(g (r_(c+1) - r_c)) (G_(c+1) + W_(c+1)) and P = lower(dO v^T):
        dv = A^T dO + k~ G_c        dq = a (P k~ + dO S_c^T)        dk = b (P^T q~ + v G_c^T)
    With x_n = q_n . dq_n - k_n . dk_n, and F_c = <S_c, W_c + G_c>, which is all that flows over the
    border before chunk c:
        dt_n = g x_n
        dg = sum of (t_n - r) x_n + sum of (r_c - r of the chunk before) F_c
    The latter is dg = sum of t_n x_n summed by parts: nothing cancels at large t.
    """
    way, chunk = ctx.way, ctx.way.chunk
    q, k, v, log_decay, clock, *states = ctx.saved_tensors
    plan = _plan_chunks(q.shape, log_decay, clock, way)
    room, triangle = _make_scratch(way.core), Tensor.triu_ if way.backward else Tensor.tril_
    width, value = q.shape[-1], v.shape[-1]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    q_, k_, v_, do_, dq_, dk_, dv_ = (x.transpose(1, 2) for x in (q, k, v, do, dq, dk, dv))
    wide = plan.elapsed.dtype
    g = log_decay.to(wide)
    dg, dt = torch.zeros_like(g), torch.zeros(q.shape[:2], dtype=wide)
    # those of the chunk processed after; nothing is carried into the last one
    fades = plan.fades.roll(-way.step, 2)
    for blocks in reversed(plan.blocks):
        carry = fades.new_zeros(*fades[blocks[0].chunks].shape[:2], width * value)
        for block in reversed(blocks):
            S = states.pop()
            Q = _load(q_, block, chunk, room, "q", plan.queries)
            K = _load(k_, block, chunk, room, "k", plan.keys)
            V = _load(v_, block, chunk, room, "v")
            dO = _load(do_, block, chunk, room, "do")
            W = torch.bmm(Q.mT, dO, out=room("w", len(K), width, value)).view(S.shape)
            G = _scan_states(
                W, fades[block.chunks], carry, room("g", *S.shape), range(S.shape[2])[:: -way.step]
            )
            S_, G_ = S.view(-1, width, value), G.view(-1, width, value)

            A = triangle(torch.bmm(Q, K.mT, out=room("a", len(K), chunk, chunk)))
            _save(torch.bmm(A.mT, dO, out=room("dv", *V.shape)).baddbmm_(K, G_), block, dv_)
            P = triangle(torch.bmm(dO, V.mT, out=A))
            dQ = torch.bmm(P, K, out=room("dq", *Q.shape)).baddbmm_(dO, S_.mT)
            dK = torch.bmm(P.mT, Q, out=room("dk", *K.shape)).baddbmm_(V, G_.mT)
            _save(dQ, block, dq_, plan.queries)
            _save(dK, block, dk_, plan.keys)
            if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
                some, few, tokens = block.rows
                sizes = dq_[block.rows].shape[:3]
                x = (Q * dQ - K * dK).sum(-1, dtype=wide).view(*sizes[:2], -1)[..., : sizes[2]]
                F = (S * (W + G)).sum(-1, dtype=wide)
                dt[some, tokens] += (g[few, None] * x).sum(1)
                dg[few] += (x * plan.elapsed[some, None, tokens]).sum((0, 2)) + (
                    F * plan.step[some, None, block.chunks[2]]
                ).sum((0, 2))
    return dq, dk, dv, dg.to(log_decay.dtype), dt if ctx.needs_input_grad[4] else None


def _compute_chunkwise(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *options: Any) -> Tensor:
    """The chunkwise form, as the operator computes it where it has no kernel that is right.

    The options are those of the operator, in its order.
    """
    times, mask, rotation, direction, chunk, core_precision = options
    if not q.shape[0] * q.shape[1]:
        return v.clone()
    core = _choose_core(_choose_precision(core_precision, log_decay, times), q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        if rotation is not None:
            q, k = apply_rotation(q, rotation), apply_rotation(k, rotation)
        passes = [_Pass(backward, chunk, core) for backward in BACKWARD[direction]]
        o = _add_passes(_chunkwise, q, _apply_mask(k, mask), v, log_decay, times, passes)
    return o.to(v.dtype)


operator.register(_compute_chunkwise)
