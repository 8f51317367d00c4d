"""Rotation of queries and keys by their position, and the optional xPos scale (BiTimelyGPT,
equation 3).

A query rotated to position n and a key rotated to m meet with the phase theta (n - m). Positions
are absolute forward indices in both directions (`rotary_convention: absolute-forward`), so the
phase is negative in a backward layer.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bitimely_core.errors import Reason, usage_error

BASE = 10000.0
SCALE_BASE = 512.0  # positions over which the xPos scale falls by one factor zeta
# positions over which the xPos scale is safe: exponents up to 20 on either side, beside up to 60 of
# the folded decay
SPAN = 16384
WITHOUT_FLOAT64 = {"mps"}  # types of devices


def find_widest_float(device: torch.device) -> torch.dtype:
    """float64 where the device has it: differences of times survive large absolute values, powers
    and sums lose no digits.
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def make_rotation(positions: Tensor, width: int) -> Tensor:
    """Cosines and sines of `rotate` for key width K, float32 [N, K/2, 2] or [B, N, K/2, 2], for
    `apply_rotation`; angles are in float64.
    """
    angles = _make_angles(positions, width)
    return torch.stack((angles.cos(), angles.sin()), -1).float()


def _make_angles(positions: Tensor, width: int) -> Tensor:
    """Positions [...] * `BASE`^(-2j/K), [..., K/2], in the widest float of their device."""
    wide = find_widest_float(positions.device)
    pair = torch.arange(0, width, 2, device=positions.device, dtype=wide)
    return positions.to(wide)[..., None] * torch.exp(pair * (-math.log(BASE) / width))


def _turn(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = pairs.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)


def apply_rotation(x: Tensor, table: Tensor) -> Tensor:
    """`rotate` of x [B, N, H, K] by the table of `make_rotation`; dtype and shape stay."""
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    return _turn(pairs, *table[..., None, :, :].unbind(-1)).flatten(-2).to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate the pairs (2j, 2j+1) of the last axis of x [B, N, H, K], K even, by positions *
    `BASE`^(-2j/K), per head; dtype and shape stay.

    `positions` [N] or [B, N] are indices or times; gradients flow to float positions that need
    them. Angles are computed in float64 (float32 on a device without it) whatever the dtype of `x`:
    in bfloat16 they are off by whole radians.
    """
    width = x.shape[-1]
    assert width % 2 == 0, f"rotation needs an even key width, not {width}"
    angles = _make_angles(positions, width)[..., None, :]  # [N, 1, K/2] or [B, N, 1, K/2]
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    # compilers have no complex numbers; without one they are seven times as fast
    if torch.compiler.is_compiling():
        turned = _turn(pairs, angles.cos().to(pairs.dtype), angles.sin().to(pairs.dtype))
    else:
        spin = torch.polar(torch.ones_like(angles), angles).to(
            torch.promote_types(pairs.dtype, torch.complex64)
        )
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * spin)
    return turned.flatten(-2).to(x.dtype)


def xpos(
    x: Tensor,
    positions: Tensor,
    direction: Literal["forward", "backward"],
    *,
    key: bool,
    origin: float | None = None,
) -> Tensor:
    """The xPos scale: query n and key m meet with zeta_j^(|n - m| / 512), zeta_j = (2j + 0.4 K) /
    (1.4 K) for the pair j. Off by default.

    Queries (rotated x [B, N, H, K]) are multiplied by zeta^((n - origin) / 512), with `key` by its
    inverse, `backward` the other way round. Only differences of `positions` [N] or [B, N] count, so
    the origin is put in the middle of each row (or at `origin`, where a sequence is fed in pieces):
    neither factor exceeds e^20 over `SPAN` positions, and longer sequences are refused (with the
    origin at 0 the scale overflows float32 at some 36,000 positions and float16 at 4,500).

    Raises UserError: `config` for direction `both` (the scale is not symmetric), float16 and
    positions further than `SPAN / 2` from the origin.
    """
    if direction not in {"forward", "backward"}:
        raise usage_error(
            f"xpos_scale with direction {direction!r}",
            "forward or backward",
            "switch xpos_scale off",
        )
    if x.dtype == torch.float16:
        raise usage_error("xpos_scale in float16", "bfloat16 or float32", "switch xpos_scale off")
    wide = torch.promote_types(x.dtype, torch.float32)
    t = positions.to(find_widest_float(x.device))
    t = t - (
        (t.amin(-1, keepdim=True) + t.amax(-1, keepdim=True)) / 2 if origin is None else origin
    )
    if not torch.compiler.is_exporting() and float(t.detach().abs().max()) > SPAN / 2:
        raise usage_error(
            "the sequence is too long for the xPos scale",
            f"positions within {SPAN // 2} of their origin",
            "switch xpos_scale off or cut shorter windows",
            code=Reason.LENGTH,
        )
    width = x.shape[-1]
    pair, t = (
        torch.arange(0, width, 2, device=x.device, dtype=t.dtype),
        t.to(x.device, non_blocking=True),
    )
    sign = -1.0 if key == (direction == "forward") else 1.0
    exponent = (sign / SCALE_BASE) * t[..., None] * ((pair + 0.4 * width) / (1.4 * width)).log()
    factor = exponent.exp().to(wide).repeat_interleave(2, -1)
    return (x * factor[..., None, :]).to(x.dtype)
