"""The Triton kernels of retention in Triton's interpreter against float64 definitions: a program,
since it replaces kernels for its process.

    TRITON_INTERPRET=1 python tests/interpret_retention.py [--all]

The last line is a JSON object: case -> largest error of the result and of each gradient, relative
to its largest entry.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
from torch import Tensor

from bitimely_core.ops import triton_retention
from bitimely_core.ops.rotary import make_rotation, rotate

NAMES = ("o", "dq", "dk", "dv", "dg", "dt")


def define(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    t: Tensor,
    keep: Tensor | None,
    places: Tensor | None,
    direction: str,
) -> Tensor:
    """Equations 4, 8 and 10 in float64, pair by pair."""
    if places is not None:
        q, k = rotate(q, places), rotate(k, places)
    i = torch.arange(q.shape[1])
    later = i[:, None] >= i
    gap = t[:, :, None] - t[:, None, :]
    gap = torch.where(later, gap, -gap)
    allowed = {"forward": later, "backward": later.T, "both": torch.ones_like(later)}[direction]
    D = torch.where(allowed, (g[:, None, None] * gap[:, None]).exp(), 0.0)
    D = D if keep is None else D * keep[:, None, None]
    return torch.einsum(
        "bhnm,bmhv->bnhv", torch.einsum("bnhk,bmhk->bhnm", q, k) * q.shape[-1] ** -0.5 * D, v
    )


def measure(
    shape: tuple[int, ...],
    direction: str,
    clock: str,
    *,
    masked: bool,
    rotated: bool,
    core: str = "fp32",
) -> dict[str, float]:
    """Errors of one case in float32, which the interpreter computes in whatever the core is."""
    B, N, H, K, V, C = shape
    draw = torch.Generator().manual_seed(N)
    q, k, v, w = (torch.randn(B, N, H, d, generator=draw) for d in (K, K, V, V))
    times = None if clock == "regular" else torch.rand(B, N, generator=draw).double()
    if clock == "ties":
        times = (times * 3).floor()  # type: ignore[operator]
    if clock == "gaps":
        times = times * torch.where(torch.rand(B, N, generator=draw) < 0.1, 1e4, 1.0)  # type: ignore[operator]
    times = None if times is None else times.cumsum(1) + 1e5
    decay = -torch.linspace(0.02, 0.7, H)
    keep = torch.rand(B, N, generator=draw) < 0.8 if masked else None
    places = (
        None
        if not rotated
        else torch.arange(N)
        if clock == "regular"
        else torch.rand(B, N, generator=draw).double().cumsum(1)
    )
    table = None if places is None else make_rotation(places, K)
    exact = [x.double().requires_grad_() for x in (q, k, v, decay)]
    t = (
        (torch.arange(N).double()[None].expand(B, -1) if times is None else times)
        .clone()
        .requires_grad_()
    )
    o = define(*exact, t, keep, places, direction)
    wanted = [o.detach(), *torch.autograd.grad((o * w).sum(), [*exact, t])]
    given = decay, times, keep, table, direction, C, core
    parts = [q, k, v]
    if not masked:  # rows apart from each other, as parts of one product
        parts = [
            x.unflatten(-1, (H, -1))
            for x in torch.cat([x.flatten(2) for x in (q, k, v, v)], -1).split(
                [H * K, H * K, H * V, H * V], -1
            )
        ]
    if N == 1:  # contiguous, but of another distance between rows
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    found = [
        triton_retention.forward(*parts[:3], *given),
        *triton_retention.backward(w, *parts[:3], *given),
    ]
    pairs = zip(NAMES, found, wanted, strict=True)
    return {
        name: float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for name, a, b in pairs
        if a.numel()
    }


def main() -> None:
    """A few cases that cover every option, or the grid of all of them."""
    torch.set_num_threads(1)
    ways, clocks, shapes = (
        ("forward", "backward", "both"),
        ("gaps", "regular", "irregular", "ties"),
        [(1, 75, 2, 40, 80, 32), (2, 50, 2, 8, 12, 16)],
    )
    cases = list(itertools.product(shapes, ways, clocks, (False, True), (False, True)))
    if "--all" not in sys.argv:
        plain = [
            (shapes[1], way, clock, False, False)
            for way, clock in itertools.product(ways, clocks[:2])
        ]
        cases = [
            *plain,
            *(
                (shapes[1], way, clock, True, True)
                for way, clock in zip(ways, clocks[1:], strict=True)
            ),
            (shapes[0], "both", "irregular", True, True),
        ]
    cases += [((rows, 1, 2, 4, 6, 16), "forward", "regular", False, False) for rows in (3, 0)]
    found = {f"{case}": measure(*case[:3], masked=case[3], rotated=case[4]) for case in cases}
    found["bf16"] = measure(shapes[1], "both", "irregular", masked=True, rotated=True, core="bf16")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
