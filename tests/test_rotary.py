"""Rotation of queries and keys, and the xPos scale."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from test_retention import DIRECTIONS, decay_matrix, decays, error, random_inputs, retention
from test_retention import one_thread as one_thread
from torch import Tensor

from bitimely_core.errors import Exit, UserError
from bitimely_core.ops import rotary
from bitimely_core.ops.rotary import SPAN, rotate

xpos: Any = rotary.xpos  # the options are plain strings here


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs (2j, 2j + 1) as complex numbers times e^(i theta_j n)."""
    K = x.shape[-1]
    theta = torch.tensor([10000.0 ** (-j / (K / 2)) for j in range(K // 2)], dtype=torch.float64)
    spin = torch.polar(torch.ones(()).double(), positions.double()[..., None] * theta)
    return torch.view_as_real(
        torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * spin[..., None, :]
    ).flatten(-2)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
def test_rotation_is_exact_at_any_position(dtype: torch.dtype) -> None:
    x = torch.randn(2, 50, 3, 8).to(dtype)
    # of bfloat16 one rounding: angles are float64
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for positions in (
        torch.arange(50),
        torch.arange(50) + 16_334,
        torch.rand(2, 50).double().cumsum(1) * 100,
    ):
        assert rotate(x, positions).dtype == dtype
        assert error(rotate(x, positions), turned(x, positions)) <= tolerance


def test_compiled_rotation_is_the_same() -> None:
    x, positions = torch.randn(2, 50, 3, 8, requires_grad=True), torch.arange(50)
    plain, compiled = rotate(x, positions), torch.compile(rotate, backend="aot_eager")(x, positions)
    assert error(compiled, plain) <= 1e-6
    found, wanted = (torch.autograd.grad(o.sin().sum(), x)[0] for o in (compiled, plain))
    assert error(found, wanted) <= 1e-6


def test_a_slice_of_a_fused_projection_can_be_rotated() -> None:
    fused = torch.randn(2, 9, 3, 13)
    assert (
        error(rotate(fused[..., 3:11], torch.arange(9)), turned(fused[..., 3:11], torch.arange(9)))
        <= 1e-6
    )


def test_rotated_products_depend_on_the_distance_only() -> None:
    q, k = (
        torch.randn(1, 1, 1, 8).double().expand(1, 30, 1, 8),
        torch.randn(1, 1, 1, 8).double().expand(1, 30, 1, 8),
    )
    products = torch.einsum(
        "bnhk,bmhk->nm", rotate(q, torch.arange(30)), rotate(k, torch.arange(30))
    )
    for offset in (-7, 0, 3):
        assert torch.allclose(products.diagonal(offset), products.diagonal(offset)[:1])
    assert not torch.allclose(products[0, 5], products[5, 0])


def test_rotation_has_gradients_for_rows_and_times() -> None:
    x, t = (
        torch.randn(2, 4, 2, 4).double().requires_grad_(),
        torch.rand(2, 4).double().cumsum(1).requires_grad_(),
    )
    assert torch.autograd.gradcheck(rotate, (x, t))


def test_flipped_forward_is_backward_with_conjugated_rotation() -> None:
    """Flip, forward, flip is the backward operator after negating the odd components (rows 1::2 of
    W_Q and W_K), not without.
    """
    N, positions = 40, torch.arange(40)
    q, k, v, _ = random_inputs(1, N, 2, 6, 4)
    sign = torch.tensor([1.0, -1.0] * 3).double()
    explicit = retention(
        rotate(q, positions), rotate(k, positions), v, log_decay=decays(2), direction="backward"
    )

    def flipped(q: Tensor, k: Tensor) -> Tensor:
        q, k, vf = (x.flip(1) for x in (q, k, v))
        return retention(rotate(q, positions), rotate(k, positions), vf, log_decay=decays(2)).flip(
            1
        )

    assert error(flipped(q * sign, k * sign), explicit) <= 1e-12
    assert error(flipped(q, k), explicit) > 0.1


@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_the_xpos_scale_falls_with_the_distance_in_both_directions(direction: str) -> None:
    N, K = 60, 8
    q, k, v, _ = random_inputs(1, N, 2, K, 4)
    positions = torch.arange(N) * 20
    zeta = torch.tensor(
        [(2 * (i // 2) + 0.4 * K) / (1.4 * K) for i in range(K)], dtype=torch.float64
    )
    distance = (positions[:, None] - positions).abs().double() / 512
    scores = torch.einsum("bnhk,bmhk,nmk->bhnm", q, k, zeta ** distance[..., None]) / math.sqrt(K)
    expected = torch.einsum(
        "bhnm,bmhv->bnhv", scores * decay_matrix(decays(2), N, direction=direction), v
    )
    for form, origin in itertools.product(("parallel", "chunkwise", "recurrent"), (None, 0.0)):
        scaled = [
            xpos(x, positions, direction, key=key, origin=origin)
            for x, key in ((q, False), (k, True))
        ]
        assert (
            error(
                retention(
                    *scaled, v, log_decay=decays(2), direction=direction, form=form, chunk=16
                ),
                expected,
            )
            <= 1e-12
        )


@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_the_xpos_scale_is_finite_over_its_full_span(direction: str) -> None:
    q, k, v, do = (x.requires_grad_() for x in random_inputs(1, SPAN, 1, 4, 2, torch.float32))
    positions = torch.arange(SPAN)
    scaled = [xpos(x, positions, direction, key=key) for x, key in ((q, False), (k, True))]
    o = retention(*scaled, v, log_decay=torch.tensor([-1 / 512]), direction=direction)
    for x in (o, *torch.autograd.grad(o, (q, k, v), do)):
        assert x.isfinite().all()


def test_the_xpos_scale_is_refused_where_it_cannot_work() -> None:
    x = torch.randn(1, 4, 1, 4)
    for wrong, positions, direction in (
        (x, torch.arange(4), "both"),
        (x.half(), torch.arange(4), "forward"),
        (x, torch.arange(4) * SPAN, "forward"),
    ):
        with pytest.raises(UserError) as refused:
            xpos(wrong, positions, direction, key=True)
        assert refused.value.exit_code == Exit.USAGE
