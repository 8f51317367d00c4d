"""Computes chunkwise retention and its gradients on a GPU, by four Triton kernels.

See `retention` for the legend and `operator` for the operator that calls them.

With S_c the state entering chunk c (referenced to the row of the chunk that is processed first), r
= `rel`, the time since that row, hop_c the time from it to that of the next chunk, and A_nm = s
(q_n . k_m) exp(g (r_n - r_m)) inside the chunk:

    o_n     = sum_{m <= n} A_nm v_m + s exp(g r_n) q_n S_c
    S_{c+1} = exp(g hop_c) S_c + sum_m exp(g (hop_c - r_m)) k_m^T v_m
    dS_c    = exp(g hop_c) dS_{c+1} + s sum_n exp(g r_n) q_n^T do_n
    dv_m    = sum_{n >= m} A_nm do_n + exp(g (hop_c - r_m)) k_m dS_{c+1}
    dq_n    = s sum_m D_nm (do_n . v_m) k_m + s exp(g r_n) do_n S_c^T
    dk_m    = s sum_n D_nm (do_n . v_m) q_n + exp(g (hop_c - r_m)) v_m dS_{c+1}^T
    dt_n    = sum over heads of g (q_n . dq_n - k_n . dk_n), its sign reversed in `backward`
    dg      = sum over pairs of the time between their rows times their term, where the term is
              formed: nothing cancels

Every exponent is g times a number >= 0: no guard, no overflow, any gap. Times are float64
differences, as high + low float32. States are computed again in the backward pass; nothing N x N
and no [C, C] is in device memory. `both` is forward plus a backward pass without its diagonal.
Before them `_turn_rows` copies q and k with their pairs rotated and masked keys set to 0, and it
turns dq and dk back afterwards. Inside the kernels this was 20 times slower on an H200 in training,
since each tile did it again, and some tiles of Triton 3.6 then multiplied wrongly.

On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1); it cannot run
`triton.autotune`, so the blocks are a table.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

# Precision of the products -> rows of a chunk at most, and for each kernel the columns of V in a
# tile and the warps. In bfloat16 no registers are spilled at K 40, V 80
# (tests/compile_retention.py). Hopper (compute capability 9) multiplies 64 rows at once.
BLOCKS = {
    "fp32": (
        32,
        {
            "_scan_states": (32, 8),
            "_write_outputs": (64, 8),
            "_write_value_gradients": (64, 8),
            "_write_key_gradients": (32, 8),
        },
    ),
    "bf16": (
        32,
        {
            "_scan_states": (32, 8),
            "_write_outputs": (32, 4),
            "_write_value_gradients": (64, 8),
            "_write_key_gradients": (32, 8),
        },
    ),
    "bf16 on Hopper": (
        64,
        {
            "_scan_states": (32, 8),
            "_write_outputs": (64, 4),
            "_write_value_gradients": (32, 4),
            "_write_key_gradients": (32, 8),
        },
    ),
}


@functools.cache
def find_generation(device: torch.device) -> int:
    """Compute capability of a GPU without its fraction; 0 for others and in the interpreter."""
    return (
        torch.cuda.get_device_capability(device)[0]
        if device.type == "cuda" and torch.version.cuda
        else 0
    )


@triton.jit
def _turn_rows(X, MASK, COS, OUT, rows, row, N, H, turn, DK: tl.constexpr, BK: tl.constexpr,
               C: tl.constexpr, MASKED: tl.constexpr, ROTATED: tl.constexpr,
               BACK: tl.constexpr):  # fmt: skip
    """C rows of x [B, N, H, K], its tokens `row` numbers apart, into OUT: their pairs rotated by
    the table [B or 1, N, K / 2, 2], or with BACK by its inverse, and 0 where masked.
    """
    place = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)  # of [B, N, H]
    kk = tl.arange(0, BK)
    token, ok = place // H, place < rows
    keep = ok
    if MASKED:
        keep = ok & (tl.load(MASK + token, ok, 0) != 0)
    inside = keep[:, None] & (kk[None, :] < DK)
    base = X + (token * row + place % H * DK)[:, None]
    x = tl.load(base + kk[None, :], inside, 0.0).to(tl.float32)
    if ROTATED:
        other = tl.load(base + (kk ^ 1)[None, :], inside, 0.0).to(tl.float32)
        pair = COS + (token // N * turn + token % N * DK)[:, None] + (kk // 2 * 2)[None, :]
        cos, sin = tl.load(pair, inside, 0.0), tl.load(pair + 1, inside, 0.0)
        x = x * cos + tl.where((kk % 2 == 0)[None, :] != BACK, -other, other) * sin
    tl.store(OUT + (place * DK)[:, None] + kk[None, :], x, ok[:, None] & (kk[None, :] < DK))


@triton.jit
def _find_sequence(bh, H):
    """The sequence, of 64 bits, since what lies before it may be more than 2^31 numbers, and the
    head of a program.
    """
    return (bh // H).to(tl.int64), bh % H


@triton.jit
def _find_state(bh, c, NC, DK: tl.constexpr, DV: tl.constexpr):
    """Where the state of a chunk begins in [B, H, NC, K, V]."""
    return (bh.to(tl.int64) * NC + c) * (DK * DV)


@triton.jit
def _find_rows(REL, LOW, b, h, c, N, H, clock, C: tl.constexpr):
    """Rows of chunk `c`, which of them there are, their places in [N, H], and their times from the
    chunk's first with their low parts.
    """
    rows = c * C + tl.arange(0, C)
    ok = rows < N
    return (
        rows,
        ok,
        rows * H + h,
        tl.load(REL + b * clock + rows, ok, 0.0),
        tl.load(LOW + b * clock + rows, ok, 0.0),
    )


@triton.jit
def _load_keys(X, row, h, rows, ok, kk, b, N, DK: tl.constexpr):
    """Rows of q or k [C, BK], `row` numbers apart."""
    return tl.load(
        X + b * N * row + (rows * row + h * DK)[:, None] + kk[None, :],
        ok[:, None] & (kk[None, :] < DK),
        0.0,
    )


@triton.jit
def _decay_pairs(rel, low, cc, g, BACKWARD: tl.constexpr, STRICT: tl.constexpr):
    """exp(g gap) [C, C] of the allowed pairs, and their gaps."""
    if BACKWARD:
        allowed = (cc[:, None] < cc[None, :]) if STRICT else (cc[:, None] <= cc[None, :])
    else:
        allowed = cc[:, None] >= cc[None, :]
    gap = tl.where(allowed, (rel[:, None] - rel[None, :]) + (low[:, None] - low[None, :]), 0.0)
    return tl.where(allowed, tl.exp(tl.minimum(g * gap, 0.0)), 0.0), gap


@triton.jit
def _scan_states(X, V_, REL, LOW, HOP, G, S, xr, vr, N, H, NC, scale, clock, hops,
                 DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, BACKWARD: tl.constexpr, STRICT: tl.constexpr,
                 ADJOINT: tl.constexpr, CORE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """S [B, H, NC, K, V] that enters each chunk from k (X) and v, or with ADJOINT the gradient of
    it from q (X) and do, the other way.
    """
    tiles: tl.constexpr = (DV + BV - 1) // BV
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = _find_sequence(bh, H)
    g = tl.load(G + h).to(tl.float32)
    kk, vv = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    acc = tl.zeros((BK, BV), tl.float32)
    for i in range(NC):
        c = i if BACKWARD == ADJOINT else NC - 1 - i
        rows, ok, _, rel, low = _find_rows(REL, LOW, b, h, c, N, H, clock, C)
        hop, hop_low = tl.load(HOP + 2 * (b * hops + c)), tl.load(HOP + 2 * (b * hops + c) + 1)
        x = _load_keys(X, xr, h, rows, ok, kk, b, N, DK).to(tl.float32)
        v = tl.load(
            V_ + b * N * vr + (rows * vr + h * DV)[:, None] + vv[None, :],
            ok[:, None] & (vv[None, :] < DV),
            0.0,
        ).to(CORE)
        place = S + _find_state(bh, c, NC, DK, DV) + kk[:, None] * DV + vv[None, :]
        inside = (kk[:, None] < DK) & (vv[None, :] < DV)
        fade = tl.exp(g * hop)
        if ADJOINT:
            x = (x * (tl.exp(g * rel) * scale)[:, None]).to(CORE)
            acc = acc * fade + tl.dot(tl.trans(x), v, input_precision=PRECISION)
            tl.store(place, acc, inside)
        else:
            tl.store(place, acc, inside)
            x = (x * tl.exp(tl.minimum(g * ((hop - rel) + (hop_low - low)), 0.0))[:, None]).to(CORE)
            acc = acc * fade + tl.dot(tl.trans(x), v, input_precision=PRECISION)


@triton.jit
def _write_outputs(Q, K_, V_, REL, LOW, G, S, OUT, qr, kr, vr, N, H, NC, scale, clock,
                   DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, BACKWARD: tl.constexpr, STRICT: tl.constexpr,
                   CORE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The output of one chunk and tile; with STRICT, the second pass of `both`, it is added to that
    of the first.
    """
    tiles: tl.constexpr = (DV + BV - 1) // BV
    tile, c, bh = (
        tl.program_id(0) % tiles,
        tl.program_id(0) // tiles % NC,
        tl.program_id(0) // tiles // NC,
    )
    b, h = _find_sequence(bh, H)
    g = tl.load(G + h).to(tl.float32)
    kk, vv, cc = tl.arange(0, BK), tile * BV + tl.arange(0, BV), tl.arange(0, C)
    rows, ok, slots, rel, low = _find_rows(REL, LOW, b, h, c, N, H, clock, C)
    wv = ok[:, None] & (vv[None, :] < DV)
    q = _load_keys(Q, qr, h, rows, ok, kk, b, N, DK).to(CORE)
    k = _load_keys(K_, kr, h, rows, ok, kk, b, N, DK).to(CORE)
    v = tl.load(V_ + b * N * vr + (rows * vr + h * DV)[:, None] + vv[None, :], wv, 0.0).to(CORE)
    s = tl.load(
        S + _find_state(bh, c, NC, DK, DV) + kk[:, None] * DV + vv[None, :],
        (kk[:, None] < DK) & (vv[None, :] < DV),
        0.0,
    )
    decay, _ = _decay_pairs(rel, low, cc, g, BACKWARD, STRICT)
    a = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    o = tl.dot(a.to(CORE), v, input_precision=PRECISION)
    o = (o + tl.dot(q, s.to(CORE), input_precision=PRECISION) * tl.exp(g * rel)[:, None]) * scale
    if STRICT:
        o += tl.load(OUT + b * N * H * DV + slots[:, None] * DV + vv[None, :], wv, 0.0)
    tl.store(OUT + b * N * H * DV + slots[:, None] * DV + vv[None, :], o, wv)


@triton.jit
def _write_value_gradients(Q, K_, DO, REL, LOW, HOP, G, DS, DVAL, qr, kr, N, H, NC,
                           scale, clock, hops, DK: tl.constexpr, DV: tl.constexpr,
                           C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                           BACKWARD: tl.constexpr, STRICT: tl.constexpr, CORE: tl.constexpr,
                           PRECISION: tl.constexpr):  # fmt: skip
    """Dv of one chunk and tile; with STRICT added to that of the first pass."""
    tiles: tl.constexpr = (DV + BV - 1) // BV
    tile, c, bh = (
        tl.program_id(0) % tiles,
        tl.program_id(0) // tiles % NC,
        tl.program_id(0) // tiles // NC,
    )
    b, h = _find_sequence(bh, H)
    g = tl.load(G + h).to(tl.float32)
    kk, vv, cc = tl.arange(0, BK), tile * BV + tl.arange(0, BV), tl.arange(0, C)
    rows, ok, slots, rel, low = _find_rows(REL, LOW, b, h, c, N, H, clock, C)
    hop, hop_low = tl.load(HOP + 2 * (b * hops + c)), tl.load(HOP + 2 * (b * hops + c) + 1)
    wv = ok[:, None] & (vv[None, :] < DV)
    q = _load_keys(Q, qr, h, rows, ok, kk, b, N, DK).to(CORE)
    k = _load_keys(K_, kr, h, rows, ok, kk, b, N, DK).to(CORE)
    do = tl.load(DO + b * N * H * DV + slots[:, None] * DV + vv[None, :], wv, 0.0).to(CORE)
    following = c - 1 if BACKWARD else c + 1  # the chunk that this one's state enters
    top = tl.where((following >= 0) & (following < NC), DK, 0)
    ds = tl.load(
        DS + _find_state(bh, following, NC, DK, DV) + kk[:, None] * DV + vv[None, :],
        (kk[:, None] < top) & (vv[None, :] < DV),
        0.0,
    )
    decay, _ = _decay_pairs(rel, low, cc, g, BACKWARD, STRICT)
    a = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * scale
    out = tl.exp(tl.minimum(g * ((hop - rel) + (hop_low - low)), 0.0))
    dv = (
        tl.dot(tl.trans(a.to(CORE)), do, input_precision=PRECISION)
        + tl.dot(k, ds.to(CORE), input_precision=PRECISION) * out[:, None]
    )
    if STRICT:
        dv += tl.load(DVAL + b * N * H * DV + slots[:, None] * DV + vv[None, :], wv, 0.0)
    tl.store(DVAL + b * N * H * DV + slots[:, None] * DV + vv[None, :], dv, wv)


@triton.jit
def _write_key_gradients(Q, K_, V_, DO, REL, LOW, HOP, G, S, DS, DQ, DKEY, DG, DT, qr,
                         kr, vr, N, H, NC, scale, clock, hops, DK: tl.constexpr,
                         DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                         BACKWARD: tl.constexpr, STRICT: tl.constexpr, CORE: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """dq, dk, and the shares of dg (of the chunk) and dt (of the head); V in tiles of BV, since
    with more sums the registers spill.
    """
    c, bh = tl.program_id(0) % NC, tl.program_id(0) // NC
    b, h = _find_sequence(bh, H)
    kk, cc = tl.arange(0, BK), tl.arange(0, C)
    rows = c * C + cc
    ok = rows < N
    slots = rows * H + h
    p, dq, dk = (
        tl.zeros((C, C), tl.float32),
        tl.zeros((C, BK), tl.float32),
        tl.zeros((C, BK), tl.float32),
    )
    flow = 0.0  # <S_c, dS_{c+1}>
    following = c - 1 if BACKWARD else c + 1
    top = tl.where((following >= 0) & (following < NC), DK, 0)
    for start in range(0, DV, BV):
        vv = start + tl.arange(0, BV)
        wv, ws = ok[:, None] & (vv[None, :] < DV), (kk[:, None] < DK) & (vv[None, :] < DV)
        v = tl.load(V_ + b * N * vr + (rows * vr + h * DV)[:, None] + vv[None, :], wv, 0.0).to(CORE)
        do = tl.load(DO + b * N * H * DV + slots[:, None] * DV + vv[None, :], wv, 0.0).to(CORE)
        s = tl.load(S + _find_state(bh, c, NC, DK, DV) + kk[:, None] * DV + vv[None, :], ws, 0.0)
        ds = tl.load(
            DS + _find_state(bh, following, NC, DK, DV) + kk[:, None] * DV + vv[None, :],
            (kk[:, None] < top) & (vv[None, :] < DV),
            0.0,
        )
        flow += tl.sum(s * ds)
        p += tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dq += tl.dot(do, tl.trans(s.to(CORE)), input_precision=PRECISION)
        dk += tl.dot(v, tl.trans(ds.to(CORE)), input_precision=PRECISION)
    g = tl.load(G + h).to(tl.float32)
    rel, low = tl.load(REL + b * clock + rows, ok, 0.0), tl.load(LOW + b * clock + rows, ok, 0.0)
    hop, hop_low = tl.load(HOP + 2 * (b * hops + c)), tl.load(HOP + 2 * (b * hops + c) + 1)
    far = (hop - rel) + (hop_low - low)
    dq *= (tl.exp(g * rel) * scale)[:, None]
    dk *= tl.exp(tl.minimum(g * far, 0.0))[:, None]
    q = _load_keys(Q, qr, h, rows, ok, kk, b, N, DK).to(CORE)
    k = _load_keys(K_, kr, h, rows, ok, kk, b, N, DK).to(CORE)
    dg = (
        tl.sum(rel * tl.sum(q * dq, 1))
        + tl.sum(tl.where(ok, far, 0.0) * tl.sum(k * dk, 1))
        + (hop + hop_low) * tl.exp(g * hop) * flow
    )
    decay, gap = _decay_pairs(rel, low, cc, g, BACKWARD, STRICT)
    p *= decay * scale
    dg += tl.sum(p * tl.dot(q, tl.trans(k), input_precision=PRECISION) * gap)
    inner = p.to(CORE)
    dq += tl.dot(inner, k, input_precision=PRECISION)
    dk += tl.dot(tl.trans(inner), q, input_precision=PRECISION)
    dt = g * (tl.sum(q * dq, 1) - tl.sum(k * dk, 1))
    if BACKWARD:
        dt = -dt
    wk, place = ok[:, None] & (kk[None, :] < DK), slots[:, None] * DK + kk[None, :]
    if STRICT:
        dq += tl.load(DQ + b * N * H * DK + place, wk, 0.0)
        dk += tl.load(DKEY + b * N * H * DK + place, wk, 0.0)
        dt += tl.load(DT + b * N * H + slots, ok, 0.0)
        dg += tl.load(DG + bh * NC + c)
    tl.store(DQ + b * N * H * DK + place, dq, wk)
    tl.store(DKEY + b * N * H * DK + place, dk, wk)
    tl.store(DT + b * N * H + slots, dt, ok)
    tl.store(DG + bh * NC + c, dg)


def make_clock(times, length, chunk, backward, device):
    """Time since the first row of the chunk, high and low part [B or 1, N], and times between the
    chunks [B or 1, n, 2], all float32.
    """
    if times is None:
        return _make_regular_clock(length, chunk, backward, device)
    return _make_clock(times.detach().double(), chunk, backward)


@functools.lru_cache(maxsize=32)
def _make_regular_clock(length, chunk, backward, device):
    return _make_clock(
        torch.arange(length, dtype=torch.float64, device=device)[None], chunk, backward
    )


def _make_clock(t, chunk, backward):
    length = t.shape[1]
    first = torch.arange(0, length, chunk, device=t.device)
    start = t[:, (first + chunk - 1).clamp(max=length - 1) if backward else first]
    rel = (
        t - start.repeat_interleave(chunk, 1, output_size=start.shape[1] * chunk)[:, :length]
    ).abs()
    # of the last one: nobody receives it, but it is >= rel
    between, last = start.diff(dim=1), rel[:, :1] if backward else rel[:, -1:]
    hop = torch.cat((last, between) if backward else (between, last), 1)
    high, wide = rel.float(), hop.float()
    return (
        high.contiguous(),
        (rel - high).float().contiguous(),
        torch.stack((wide, (hop - wide).float()), -1).contiguous(),
    )


def choose_operands(core):
    """Dtype of the operands, and precision of their products.

    Triton's interpreter multiplies the bits of bfloat16 as integers.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if core == "bf16":
        return tl.float32 if interpreted else tl.bfloat16, "tf32"
    if interpreted:
        return tl.float32, "ieee"
    return tl.float32, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


class _Call:
    """Arguments common to the kernels of one direction."""

    def __init__(self, q, v, log_decay, times, chunk, core, *, backward, strict):
        self.batch, length, self.heads, width = q.shape
        on_hopper = core == "bf16" and find_generation(q.device) == 9
        most, self.blocks = BLOCKS["bf16 on Hopper" if on_hopper else core]
        rows = min(most, max(16, triton.next_power_of_2(min(chunk, length))))
        self.chunks, self.decay = triton.cdiv(length, rows), log_decay
        *self.clock, self.hop = make_clock(times, length, rows, backward, q.device)
        strides = (length, self.chunks) if self.hop.shape[0] > 1 else (0, 0)
        self.sizes = length, self.heads, self.chunks, width**-0.5, *strides
        operands, precision = choose_operands(core)
        self.options = {
            "DK": width,
            "DV": v.shape[-1],
            "C": rows,
            "BK": max(16, triton.next_power_of_2(width)),
            "BACKWARD": backward,
            "STRICT": strict,
            "CORE": operands,
            "PRECISION": precision,
        }

    def run(self, kernel, count, *arguments, **options):
        """One kernel; `count(tiles)` gives its programs, in the one dimension of a grid that may
        have more than 65535. Where shared memory is too small, nothing is loaded ahead, then the
        tiles are narrower.
        """
        most, warps = self.blocks[getattr(kernel, "fn", kernel).__name__]
        for columns, stages in ((most, 3), (most, 1), (16, 1)):
            columns = min(columns, max(16, triton.next_power_of_2(self.options["DV"])))
            launch = kernel[(count(triton.cdiv(self.options["DV"], columns)),)]
            try:
                launch(
                    *arguments,
                    **self.options,
                    BV=columns,
                    num_warps=warps,
                    num_stages=stages,
                    **options,
                )
                return
            except triton.OutOfResources:
                if (columns, stages) == (16, 1):
                    raise

    def scan(self, x, v, *, adjoint):
        """The state that enters each chunk, or its gradient, [B, H, n, K, V]."""
        widths = self.options["DK"], self.options["DV"]
        S = torch.empty(self.batch, self.heads, self.chunks, *widths, device=x.device)
        self.run(
            _scan_states,
            lambda tiles: tiles * self.batch * self.heads,
            *(x, v, *self.clock, self.hop, self.decay, S, x.stride(1), v.stride(1)),
            *self.sizes,
            ADJOINT=adjoint,
        )
        return S

    def write_outputs(self, q, k, v, o):
        """Into o [B, N, H, V]."""
        S = self.scan(k, v, adjoint=False)
        self.run(
            _write_outputs,
            lambda tiles: tiles * self.chunks * self.batch * self.heads,
            *(q, k, v, *self.clock, self.decay, S, o, q.stride(1), k.stride(1), v.stride(1)),
            *self.sizes[:-1],
        )

    def write_gradients(self, q, k, v, do, dq, dk, dv, dg, dt):
        """Into dq, dk, dv, the shares of the chunks dg [B, H, n] and of the heads dt [B, N, H]."""
        S, dS = self.scan(k, v, adjoint=False), self.scan(q, do, adjoint=True)
        clock = (*self.clock, self.hop, self.decay)
        programs = self.chunks * self.batch * self.heads
        self.run(
            _write_value_gradients,
            lambda tiles: tiles * programs,
            *(q, k, do, *clock, dS, dv, q.stride(1), k.stride(1)),
            *self.sizes,
        )
        self.run(
            _write_key_gradients,
            lambda _: programs,
            *(q, k, v, do, *clock, S, dS, dq, dk, dg, dt, q.stride(1), k.stride(1), v.stride(1)),
            *self.sizes,
        )


def _list_calls(q, v, log_decay, times, direction, chunk, core):
    ways = {
        "forward": [(False, False)],
        "backward": [(True, False)],
        "both": [(False, False), (True, True)],
    }[direction]
    log_decay = log_decay.float().contiguous()
    return [
        _Call(q, v, log_decay, times, chunk, core, backward=back, strict=strict)
        for back, strict in ways
    ]


def _align_rows(x):
    """[B, N, H, K] itself where its heads lie beside each other and its rows at equal distances, as
    in a part of a joined product.
    """
    _, length, heads, width = x.shape
    row = x.stride(1)
    if x.stride() == (length * row, row, width, 1) and row >= heads * width:
        return x
    # a contiguous tensor may have any stride where its size is 1
    return x.clone(memory_format=torch.contiguous_format)


_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def _turn(x, mask, rotation, dtype, *, back=False):
    """X [B, N, H, K] rotated by the table, or with `back` by its inverse, and 0 in masked rows, in
    `dtype`; x itself where there is neither.
    """
    if mask is None and rotation is None:
        return x
    batch, length, heads, width = x.shape
    by_row = rotation is not None and rotation.dim() == 4 and rotation.shape[0] > 1
    out, rows = _like(x, dtype=dtype), batch * length * heads
    _turn_rows[(triton.cdiv(rows, 16),)](
        x,
        x if mask is None else mask.contiguous().view(torch.uint8),
        x if rotation is None else rotation.contiguous(),
        out,
        rows,
        x.stride(1),
        length,
        heads,
        rotation[0].numel() if by_row else 0,
        DK=width,
        BK=triton.next_power_of_2(width),
        C=16,
        MASKED=mask is not None,
        ROTATED=rotation is not None,
        BACK=back,
    )
    return out


def _turn_inputs(q, k, mask, rotation, core):
    """Q rotated, and k rotated and masked, in the precision of the products."""
    dtype = torch.bfloat16 if choose_operands(core)[0] == tl.bfloat16 else torch.float32
    return _turn(q, None, rotation, dtype), _turn(k, mask, rotation, dtype)


def forward(q, k, v, log_decay, times, mask, rotation, *options):
    """O [B, N, H, V] in the dtype of v; arguments as those of the operator."""
    q, k, v = map(_align_rows, (q, k, v))
    with torch.cuda.device_of(q):  # Triton launches on the current one
        q, k = _turn_inputs(q, k, mask, rotation, options[-1])
        calls = _list_calls(q, v, log_decay, times, *options)
        o = _like(v, dtype=torch.float32 if len(calls) > 1 else v.dtype)  # a sum is rounded once
        for call in calls:
            call.write_outputs(q, k, v, o)
        return o.to(v.dtype)


def backward(grad, q, k, v, log_decay, times, mask, rotation, *options):
    """Gradients of q, k, v, log_decay and times (empty without)."""
    q, k, v, grad = *map(_align_rows, (q, k, v)), grad.contiguous()
    with torch.cuda.device_of(q):
        turned = _turn_inputs(q, k, mask, rotation, options[-1])
        calls = _list_calls(q, v, log_decay, times, *options)
        kind = {"dtype": torch.float32} if len(calls) > 1 else {}
        dq, dk, dv = (_like(x, **kind) for x in (*turned, v))
        dg = torch.empty(q.shape[0], q.shape[2], calls[0].chunks, device=q.device)
        dt = torch.empty(q.shape[:3], device=q.device)
        for call in calls:
            call.write_gradients(*turned, v, grad, dq, dk, dv, dg, dt)
        dq = _turn(dq, None, rotation, q.dtype, back=True)
        dk = _turn(dk, mask, rotation, k.dtype, back=True)
    timed = times is not None and times.is_floating_point()
    return [
        *(x.to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v))),
        dg.sum((0, 2)).to(log_decay.dtype),
        dt.double().sum(-1).to(times.dtype) if timed else q.new_empty(0),
    ]
