"""Retention against its definition in float64, written independently here: outputs, gradients,
every form, direction and clock.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.ops import retention as module
from bitimely_core.ops.retention import State

retention: Any = module.retention  # the options are plain strings here
decay_matrix: Any = module.decay_matrix
retention_matrix: Any = module.retention_matrix

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
DIRECTIONS = ("forward", "backward", "both")
CLOCKS = ("regular", "ties", "gaps")
# masked: the chunkwise form beyond its guard
FORMS = ("parallel", "chunkwise", "masked", "recurrent")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------- the definition


def by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    times: Tensor | None,
    mask: Tensor | None,
    direction: str,
    ties: str = "index",
) -> Tensor:
    """The definition, one pair of tokens at a time."""
    B, N, H, K = q.shape
    o = torch.zeros(v.shape, dtype=torch.float64)
    for b, h, n, m in itertools.product(range(B), range(H), range(N), range(N)):
        tn, tm = (float(n), float(m)) if times is None else (float(times[b, n]), float(times[b, m]))
        forward = (tm < tn or m == n) if ties == "group" else m <= n
        backward = (tm > tn or m == n) if ties == "group" else m >= n
        if {"forward": forward, "backward": backward, "both": forward or backward}[direction] and (
            mask is None or mask[b, m]
        ):
            o[b, n, h] += (
                float(q[b, n, h] @ k[b, m, h])
                / math.sqrt(K)
                * math.exp(float(g[h]) * abs(tn - tm))
                * v[b, m, h]
            )
    return o


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    times: Tensor | None,
    mask: Tensor | None,
    direction: str,
    ties: str = "index",
) -> Tensor:
    """The definition as one dense map in float64, with the gradients of autograd."""
    N, index = q.shape[1], torch.arange(q.shape[1])
    t = index.double()[None] if times is None else times.double()
    gap = t[:, :, None] - t[:, None, :]
    gap = torch.where(index[:, None] >= index, gap, -gap)  # >= 0, and differentiable at ties
    lower = (index[:, None] >= index).expand(len(t), N, N)
    allowed = {"forward": lower, "backward": lower.mT, "both": lower | lower.mT}[direction]
    if ties == "group":
        allowed = allowed & ((gap > 0) | torch.eye(N, dtype=torch.bool))
    if mask is not None:
        allowed = allowed & mask[:, None]
    D = torch.where(allowed[:, None], g.double()[:, None, None] * gap[:, None], -math.inf).exp()
    R = torch.einsum("bnhk,bmhk->bhnm", q.double(), k.double()) / math.sqrt(q.shape[-1]) * D
    return torch.einsum("bhnm,bmhv->bnhv", R, v.double())


def random_inputs(
    B: int, N: int, H: int, K: int, V: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, ...]:
    """q, k, v and the upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, N, H, width, dtype=torch.float64, generator=generator).to(dtype)
        for width in (K, K, V, V)
    )


def random_times(B: int, N: int, clock: str) -> Any:
    if clock == "regular":
        return None
    gaps = torch.rand(B, N, dtype=torch.float64) * 5 * (torch.rand(B, N) < 0.6)  # many ties
    if clock == "gaps":
        gaps = torch.where(torch.rand(B, N) < 0.1, 1e5, gaps)
    return gaps.cumsum(1)


def decays(H: int) -> Tensor:
    return torch.tensor([-0.03, -0.01, -0.002, -0.3][:H], dtype=torch.float64)


def error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Largest difference relative to the largest entry, which counts as `least` at least."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(least))


def compare(
    options: dict[str, Any],
    inputs: tuple[Tensor, ...],
    times: Tensor | None,
    mask: Tensor | None,
    tolerance: float,
    ties: str = "index",
    *,
    learn: bool = True,
) -> None:
    """Outputs and gradients of q, k, v and (`learn`) log_decay and times against the definition on
    the same rounded numbers.
    """
    q, k, v, do = inputs
    g = decays(q.shape[2]).to(torch.promote_types(q.dtype, torch.float32))
    leaves = [x.detach().clone() for x in (q, k, v, g, *(() if times is None else (times,)))]
    exact = [x.double() for x in leaves]
    learned = len(leaves) if learn else 3
    for x in (*leaves[:learned], *exact[:learned]):
        x.requires_grad_()
    q, k, v, g = exact[:4]
    expected = definition(
        q, k, v, g, exact[4] if times is not None else None, mask, options["direction"], ties
    )
    o = retention(
        *leaves[:3],
        log_decay=leaves[3],
        times=leaves[4] if times is not None else None,
        mask=mask,
        ties=ties,
        **options,
    )
    assert o.dtype == inputs[2].dtype
    found = (
        o,
        *torch.autograd.grad(o, leaves[:learned], do, allow_unused=True, materialize_grads=True),
    )
    wanted = (expected, *torch.autograd.grad(expected, exact[:learned], do.double()))
    for name, f, w in zip(
        ("o", "dq", "dk", "dv", "dlog_decay", "dtimes"), found, wanted, strict=False
    ):
        assert f.isfinite().all(), (name, options)
        # sums of differences of numbers near 1, which may be exactly 0
        least = 1e-2 if name in {"dlog_decay", "dtimes"} else 1e-30
        assert error(f, w, least) <= tolerance, (name, options, error(f, w, least))


def watched(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The names of the module's functions among `names`, in the order in which they are called from
    now on.
    """
    calls: list[str] = []

    def watch(name: str) -> None:
        original = getattr(module, name)

        def run(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, run)

    for name in names:
        watch(name)
    return calls


@pytest.mark.parametrize("ties", ["index", "group"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_dense_definition_is_the_double_loop(direction: str, ties: str) -> None:
    q, k, v, _ = random_inputs(2, 6, 2, 2, 3)
    for clock, mask in itertools.product(CLOCKS, (None, torch.rand(2, 6) < 0.6)):
        times = random_times(2, 6, clock)
        assert (
            error(
                definition(q, k, v, decays(2), times, mask, direction, ties),
                by_loops(q, k, v, decays(2), times, mask, direction, ties),
            )
            < 1e-14
        )


# -------------------------------------------------------------------------------------------------- forms and gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients(
    form: str, direction: str, clock: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    options = {
        "form": "chunkwise" if form == "masked" else form,
        "direction": direction,
        "chunk": 8,
    }
    # 150 rows: 19 chunks, three groups, a ragged end
    for N in (1, 8, 37) if form == "recurrent" else (1, 7, 8, 16, 37, 150):
        for mask in (None, torch.rand(2, N) < 0.7):
            compare(
                options,
                random_inputs(2, N, 3, 4, 6, dtype, seed=N),
                random_times(2, N, clock),
                mask,
                TOLERANCE[dtype],
            )


@pytest.mark.parametrize("core_precision", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(
    form: str, direction: str, core_precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    options = {
        "form": "chunkwise" if form == "masked" else form,
        "direction": direction,
        "chunk": 16,
        "core_precision": core_precision,
    }
    for clock, learn in itertools.product(("regular", "ties"), (False, True)):
        compare(
            options,
            random_inputs(2, 70, 2, 8, 8, torch.bfloat16),
            random_times(2, 70, clock),
            None,
            2e-2,
            learn=learn,
        )


def test_the_bf16_core_is_another_one_but_not_where_decays_are_learned() -> None:
    q, k, v, _ = random_inputs(1, 200, 2, 8, 8, torch.float32)
    fixed, learned = decays(2), decays(2).requires_grad_()
    exact, coarse, kept = (
        retention(q, k, v, log_decay=g, core_precision=core)
        for g, core in ((fixed, "fp32"), (fixed, "bf16"), (learned, "bf16"))
    )
    assert 1e-3 < error(coarse, exact) < 2e-2
    assert torch.equal(kept, exact)


def test_many_heads_and_sequences_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # a head at a time; three of four heads, so 2 + 2; everything at once
    for cache in (1, 40_000, 2**24):
        monkeypatch.setattr(module, "CACHE", cache)
        for direction, clock in itertools.product(DIRECTIONS[:2], ("regular", "ties")):
            compare(
                {"form": "chunkwise", "direction": direction, "chunk": 16},
                random_inputs(3, 75, 4, 2, 3),
                random_times(3, 75, clock),
                None,
                1e-12,
            )


@pytest.mark.parametrize("form", ["parallel", "auto"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tied_times_can_be_hidden_from_each_other(direction: str, form: str) -> None:
    for clock, mask in itertools.product(CLOCKS, (None, torch.rand(2, 30) < 0.7)):
        compare(
            {"form": form, "direction": direction, "chunk": 4},
            random_inputs(2, 30, 2, 4, 4),
            random_times(2, 30, clock),
            mask,
            1e-12,
            ties="group",
        )


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    N=st.integers(1, 40),
    chunk=st.integers(1, 12),
    direction=st.sampled_from(DIRECTIONS),
    form=st.sampled_from(["auto", "parallel", "chunkwise", "recurrent"]),
    step=st.sampled_from([0.0, 1 / 30.4375, 1.0, 240.0, 1e5]),
    regular=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_length_chunk_direction_and_times(
    N: int,
    chunk: int,
    direction: str,
    form: str,
    step: float,
    *,
    regular: bool,
    masked: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # units, days, years and ties
    steps = torch.randint(0, 3, (2, N), generator=generator).double() * step
    mask = torch.rand(2, N, generator=generator) < 0.8 if masked else None
    compare(
        {"form": form, "direction": direction, "chunk": chunk},
        random_inputs(2, N, 2, 2, 3, seed=seed),
        None if regular else steps.cumsum(1),
        mask,
        1e-12,
    )


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradcheck(direction: str, form: str) -> None:
    q, k, v, _ = (x.requires_grad_() for x in random_inputs(1, 7, 2, 2, 2))
    g = decays(2).requires_grad_()
    # apart, so that the differences keep their order
    times = (torch.arange(7, dtype=torch.float64) * 1.7)[None].requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, times: Tensor) -> Tensor:
        return retention(q, k, v, log_decay=g, times=times, direction=direction, form=form, chunk=3)

    assert torch.autograd.gradcheck(run, (q, k, v, g, times))


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_second_derivatives(direction: str, form: str) -> None:
    """Of an output that is summed, too, whose gradient is a constant that needs none."""
    q, k, v, do = random_inputs(1, 5, 2, 2, 3)
    leaves = [
        x.requires_grad_()
        for x in (q, k, v, decays(2), torch.arange(5, dtype=torch.float64)[None] * 1.7)
    ]

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, times: Tensor) -> Tensor:
        return retention(q, k, v, log_decay=g, times=times, direction=direction, form=form, chunk=2)

    def differentiate_twice(o: Tensor) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(o, leaves[0], do, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaves[1:])

    assert torch.autograd.gradgradcheck(run, leaves)
    wanted = differentiate_twice(definition(*leaves, None, direction))
    for found, exact in zip(differentiate_twice(run(*leaves)), wanted, strict=True):
        assert error(found, exact) <= 1e-12


@pytest.mark.parametrize(("there", "back"), [("forward", "backward"), ("backward", "forward")])
def test_gradients_are_retentions_in_the_other_direction(there: str, back: str) -> None:
    """dv = Ret_back(k, q, dO), dq = Ret(dO, v, k), dk = Ret_back(v, dO, q), all with the scale of
    the first.
    """
    q, k, v, do = (x.requires_grad_() for x in random_inputs(2, 90, 2, 4, 6))
    common = {
        "log_decay": decays(2),
        "times": random_times(2, 90, "ties"),
        "form": "chunkwise",
        "chunk": 16,
    }
    dq, dk, dv = torch.autograd.grad(retention(q, k, v, direction=there, **common), (q, k, v), do)
    scale = math.sqrt(6 / 4)
    assert error(dv, retention(k, q, do, direction=back, **common)) < 1e-13
    assert error(dq, retention(do, v, k, direction=there, **common) * scale) < 1e-13
    assert error(dk, retention(v, do, q, direction=back, **common) * scale) < 1e-13


def test_decay_gradient_survives_late_times_in_float32() -> None:
    """Times of 1e6 would cost dg = sum of t x all its digits; summed by parts it keeps them."""
    q, k, v, do = random_inputs(1, 300, 3, 4, 4, torch.float32)
    for direction in DIRECTIONS[:2]:
        late = torch.rand(1, 300, dtype=torch.float64).cumsum(1) + 1e6
        compare(
            {"form": "chunkwise", "direction": direction, "chunk": 16},
            (q, k, v, do),
            late,
            None,
            2e-5,
        )


def test_only_the_requested_gradients() -> None:
    q, k, v, do = random_inputs(1, 40, 2, 4, 4)
    g = decays(2).requires_grad_()
    o = retention(q, k, v, log_decay=g, form="chunkwise", chunk=8)
    exact = decays(2).requires_grad_()
    expected = torch.autograd.grad(definition(q, k, v, exact, None, None, "forward"), exact, do)[0]
    assert error(torch.autograd.grad(o, g, do)[0], expected) < 1e-12
    assert not retention(q, k, v, log_decay=decays(2), form="chunkwise", chunk=8).requires_grad


# ------------------------------------------------------------------------------------------------- causality and padding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("clock", ["regular", "ties"])
def test_nothing_of_the_other_side_is_seen_bit_for_bit(
    form: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    N, at, kind = 80, 33, "chunkwise" if form == "masked" else form
    q, k, v, _ = random_inputs(1, N, 2, 4, 4, torch.float32)
    times = random_times(1, N, clock)
    for direction, changed, seen in (
        ("forward", slice(at, None), slice(0, at)),
        ("backward", slice(0, at), slice(at, None)),
    ):
        k2, v2 = k.clone(), v.clone()
        k2[:, changed], v2[:, changed] = 1e3 * torch.randn(k[:, changed].shape), -7.0
        o, o2 = (
            retention(
                q,
                *kv,
                log_decay=decays(2).float(),
                times=times,
                direction=direction,
                form=kind,
                chunk=8,
            )
            for kv in ((k, v), (k2, v2))
        )
        assert torch.equal(o[:, seen], o2[:, seen])
        assert not torch.equal(o[:, changed], o2[:, changed])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_and_company_change_nothing(direction: str) -> None:
    """Content and amount of padding, and who else is in the batch, leave outputs and gradients of
    real tokens alone.
    """
    real = 141
    q, k, v, do = random_inputs(1, real, 2, 4, 4, torch.float32)
    times = random_times(1, real, "ties")

    def padded(x: Tensor, amount: int, junk: float) -> Tensor:
        row = torch.cat((x, torch.full((1, amount, *x.shape[2:]), junk)), 1)
        return torch.cat((torch.randn(row.shape), row))

    def run(amount: int, junk: float) -> list[Tensor]:
        leaves = [padded(x, amount, junk).requires_grad_() for x in (q, k, v)]
        t = torch.cat((times, times[:, -1:].expand(-1, amount)), 1).expand(2, -1)
        mask = torch.arange(real + amount).expand(2, -1) < real
        o = retention(*leaves, log_decay=decays(2).float(), times=t, mask=mask, direction=direction)
        grads = torch.autograd.grad(o, leaves, padded(do, amount, 0.0))
        assert all(bool((x[:, real:] == 0).all()) for x in grads[1:])
        return [x[1:, :real] for x in (o, *grads)]

    first = run(3, 0.0)
    for amount, junk in ((3, 50.0), (60, -50.0), (400, 3.0)):
        for found, wanted in zip(run(amount, junk), first, strict=True):
            assert error(found, wanted) <= 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masked_keys_have_no_gradient_at_all(
    form: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    q, k, v, do = (x.requires_grad_() for x in random_inputs(2, 40, 2, 4, 4, torch.float32))
    mask = torch.rand(2, 40) < 0.5
    kind = "chunkwise" if form == "masked" else form
    o = retention(
        q, k, v, log_decay=decays(2).float(), mask=mask, direction=direction, form=kind, chunk=8
    )
    _, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(dk[~mask], torch.zeros_like(dk[~mask]))
    assert torch.equal(dv[~mask], torch.zeros_like(dv[~mask]))
    assert (dk[mask] != 0).any()


# ------------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_chunks_equal_the_full_sequence(
    direction: str, clock: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fed in pieces with the state in between: the same outputs, the same gradients, the same last
    state.
    """
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    options: dict[str, Any] = {
        "direction": direction,
        "form": "chunkwise" if form == "masked" else form,
        "chunk": 8,
    }
    q, k, v, do = random_inputs(2, 60, 2, 4, 6)
    times, mask = random_times(2, 60, clock), torch.rand(2, 60) < 0.8

    def leaves() -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (q, k, v, decays(2))] + (
            [] if times is None else [times.clone().requires_grad_()]
        )

    full, parts = leaves(), leaves()
    o, end = retention(
        *full[:3],
        log_decay=full[3],
        times=full[4] if times is not None else None,
        mask=mask,
        return_state=True,
        **options,
    )
    bounds = list(itertools.pairwise([0, 1, 2, 9, 41, 60]))
    state, outputs = None, []
    for lo, hi in bounds if direction == "forward" else bounds[::-1]:
        piece = [x[:, lo:hi] for x in parts[:3]]
        t = None if times is None else parts[4][:, lo:hi]
        o_piece, state = retention(
            *piece,
            log_decay=parts[3],
            times=t,
            mask=mask[:, lo:hi],
            state=state,
            return_state=True,
            **options,
        )
        outputs.append(o_piece)
    again = torch.cat(outputs if direction == "forward" else outputs[::-1], 1)
    assert error(again, o) <= 1e-12
    assert state is not None
    assert error(state.memory, end.memory) <= 1e-12
    # the clock of a backward sequence without times starts wherever its last piece was put: only
    # distances count
    assert torch.allclose(
        state.time, end.time if times is not None or direction == "forward" else end.time - 41
    )
    weights = torch.randn(end.memory.shape, dtype=torch.float64)  # the state is differentiable too
    for found, wanted in zip(
        torch.autograd.grad((again * do).sum() + (state.memory * weights).sum(), parts),
        torch.autograd.grad((o * do).sum() + (end.memory * weights).sum(), full),
        strict=True,
    ):
        assert error(found, wanted) <= 1e-12


@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_the_state_is_the_decayed_sum_of_keys_and_values(direction: str) -> None:
    """Equation 5 unrolled: S = sum of gamma^(distance to the last row) k^T v."""
    q, k, v, _ = random_inputs(2, 50, 2, 3, 4)
    times, mask = random_times(2, 50, "ties"), torch.rand(2, 50) < 0.7
    last = times[:, -1:] if direction == "forward" else times[:, :1]
    weight = torch.exp(decays(2)[:, None] * (last - times).abs()[:, None]) * mask[:, None]
    _, state = retention(
        q, k, v, log_decay=decays(2), times=times, mask=mask, direction=direction, return_state=True
    )
    assert error(state.memory, torch.einsum("bhn,bnhk,bnhv->bhkv", weight, k, v)) <= 1e-12
    assert torch.equal(state.time, last[:, 0])


def test_one_token_at_a_time_in_bfloat16_keeps_a_float32_state() -> None:
    q, k, v, _ = random_inputs(1, 100, 2, 4, 4, torch.bfloat16)
    state, rows = None, []
    for n in range(100):
        row, state = retention(
            *(x[:, n : n + 1] for x in (q, k, v)),
            log_decay=decays(2),
            state=state,
            return_state=True,
        )
        rows.append(row)
        assert row.dtype == torch.bfloat16
        assert state.memory.dtype == torch.float32
    assert error(torch.cat(rows, 1), definition(q, k, v, decays(2), None, None, "forward")) <= 5e-3


# -------------------------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("form", ["chunkwise", "masked"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_long_sequences_stay_finite(
    direction: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    q, k, v, do = random_inputs(1, 16384, 2, 4, 4, torch.float32)
    g = torch.tensor([-1 / 32, -1 / 512]).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)] + [g]
    o = retention(q, k, v, log_decay=g, direction=direction, form="chunkwise")
    for x in (o, *torch.autograd.grad(o, leaves, do)):
        assert x.isfinite().all()
    rows = slice(8190, 8198)  # some rows in the middle against the definition
    t = torch.arange(16384, dtype=torch.float64)
    gap = t[rows, None] - t
    allowed = {"forward": gap >= 0, "backward": gap <= 0, "both": gap.isfinite()}[direction]
    D = torch.where(allowed, g.detach().double()[:, None, None] * gap.abs(), -math.inf).exp()
    R = torch.einsum("nhk,mhk->hnm", q[0, rows].double(), k[0].double()) / 2 * D
    assert error(o[0, rows], torch.einsum("hnm,mhv->nhv", R, v[0].double())) <= 2e-5


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
def test_a_gap_of_1e5_separates_exactly(form: str, dtype: torch.dtype) -> None:
    """exp(-0.03 * 1e5) is nothing at all: both sides compute as if the other one were not there,
    and no gradient is NaN.
    """
    q, k, v, do = (x.requires_grad_() for x in random_inputs(1, 40, 2, 4, 4, dtype))
    times = torch.arange(40, dtype=torch.float64)[None] + 1e5 * (torch.arange(40) >= 20)
    for direction, core in itertools.product(DIRECTIONS, ("fp32", "bf16")):
        o = retention(
            q,
            k,
            v,
            log_decay=decays(2),
            times=times,
            direction=direction,
            form=form,
            chunk=8,
            core_precision=core,
        )
        grads = torch.autograd.grad(o[:, :20], (q, k, v), do[:, :20])
        for x in (o, *grads):
            assert x.isfinite().all()
        for x in grads:
            assert torch.equal(x[:, 20:], torch.zeros_like(x[:, 20:]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_weight_below_e_minus_87_is_exactly_zero(direction: str) -> None:
    D = decay_matrix(
        torch.tensor([-1.0]), times=torch.tensor([[0.0, 86.0, 173.5]]), direction=direction
    )[0, 0]
    near, far = (
        D[1, 0] if direction != "backward" else D[0, 1],
        D[2, 0] + D[0, 2] + D[2, 1] + D[1, 2],
    )
    assert float(near) == pytest.approx(math.exp(-86.0), rel=1e-4)
    assert float(far) == 0.0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_the_guard_decides_between_folded_and_masked(
    direction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponents just below 60 are folded, just above they are not, and both are accurate; far above
    the folded form would be inf.
    """
    calls = watched(monkeypatch, "_chunkwise_with_masks")
    core = "bf16" if dtype == torch.bfloat16 else "fp32"
    options = {"direction": direction, "form": "chunkwise", "chunk": 16, "core_precision": core}
    for span, falls_back in ((59.9, False), (60.1, True), (1000.0, True)):
        calls.clear()
        times = torch.linspace(0, span / 0.03, 16, dtype=torch.float64).repeat(1, 3)
        times = (times + torch.arange(3).repeat_interleave(16) * (span / 0.03 + 1.0)).expand(2, -1)
        for learn in (False, True):
            compare(
                options,
                random_inputs(2, 48, 2, 4, 4, dtype),
                times,
                None,
                TOLERANCE[dtype],
                learn=learn,
            )
            assert bool(calls) == falls_back


def test_chunkwise_keeps_no_maps() -> None:
    """What is saved for the backward grows with N, not with N^2: q, k, v, and a state a chunk."""
    q, k, v, _ = (x.requires_grad_() for x in random_inputs(2, 1024, 2, 8, 8, torch.float32))
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        retention(q, k, v, log_decay=decays(2), form="chunkwise")
    assert sum(saved) <= 3 * q.numel() + 16 * 2 * 2 * 8 * 8 + 2048


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, inside forward and backward, float32 inputs give the same bits and bfloat16
    inputs are summed in float32.
    """
    if form == "masked":
        monkeypatch.setattr(module, "GUARD", -1.0)
    kind = "chunkwise" if form == "masked" else form
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, do = (
            x.requires_grad_()
            for x in random_inputs(1, 200 if form != "recurrent" else 40, 2, 8, 8, dtype)
        )
        common: dict[str, Any] = {"log_decay": decays(2).float(), "form": kind, "chunk": 32}
        plain = retention(q, k, v, **common)
        with torch.autocast("cpu", torch.bfloat16):
            cast = retention(q, k, v, **common)
            maps = retention_matrix(q, k, log_decay=common["log_decay"])
            inside = (
                torch.autograd.grad(cast, (q, k, v), do, retain_graph=True)
                if form == "chunkwise"
                else ()
            )
        assert torch.equal(plain, cast)
        assert maps.dtype == torch.float32
        wanted = torch.autograd.grad(plain, (q, k, v), do)
        for found in (torch.autograd.grad(cast, (q, k, v), do), inside):
            assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=False))
        exact = definition(q, k, v, common["log_decay"], None, None, "forward")
        rounding = 2e-5 if dtype == torch.float32 else 2**-8  # bfloat16: one rounding, at the end
        assert (cast.double() - exact).abs().max() <= rounding * exact.abs().max()


def test_a_sum_of_many_bfloat16_terms_does_not_stall() -> None:
    """1 + 1 + ... stops at 256 in bfloat16; with a weak decay the true sum is near 1,000."""
    N = 1024
    one = torch.ones(1, N, 1, 2, dtype=torch.bfloat16)
    for form in ("parallel", "chunkwise", "recurrent"):
        o = retention(one, one, one, log_decay=torch.tensor([-1e-5]), form=form)
        assert float(o[0, -1, 0, 0]) == pytest.approx(N * math.sqrt(2), rel=0.01)


# ------------------------------------------------------------------------------------------------------------------ maps


@pytest.mark.parametrize("ties", ["index", "group"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_maps_reproduce_the_outputs(direction: str, ties: str) -> None:
    q, k, v, _ = random_inputs(2, 33, 2, 4, 4)
    for clock, mask in itertools.product(CLOCKS, (None, torch.rand(2, 33) < 0.7)):
        times = random_times(2, 33, clock)
        common: dict[str, Any] = {
            "times": times,
            "mask": mask,
            "direction": direction,
            "ties": ties,
        }
        R = retention_matrix(
            q.float(), k.float(), log_decay=decays(2), dtype=torch.float64, **common
        )
        assert R.shape == (2, 2, 33, 33)
        assert R.dtype == torch.float64
        expected = definition(q.float(), k.float(), v, decays(2), times, mask, direction, ties)
        assert error(torch.einsum("bhnm,bmhv->bnhv", R, v), expected) <= 1e-12
        D = decay_matrix(
            decays(2), 33, **{name: value for name, value in common.items() if name != "mask"}
        )
        scores = (
            torch.einsum("bnhk,bmhk->bhnm", q, k) / 2 * (1 if mask is None else mask[:, None, None])
        )
        assert error(scores * D, retention_matrix(q, k, log_decay=decays(2), **common)) <= 1e-12


def test_the_dtype_of_maps_can_be_chosen() -> None:
    q, k, _, _ = random_inputs(1, 5, 2, 4, 4, torch.bfloat16)
    g = decays(2).bfloat16()
    assert decay_matrix(g, 5).dtype == torch.float32
    assert retention_matrix(q, k, log_decay=g).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        assert decay_matrix(g, 5, dtype=dtype).dtype == dtype
        assert retention_matrix(q, k, log_decay=g, dtype=dtype).dtype == dtype


def test_maps_are_triangular_with_the_plain_diagonal() -> None:
    """Equations 4, 8, 10: forward lower, backward upper, both the sum of the two less the diagonal,
    which is in each.
    """
    q, k, _, _ = random_inputs(1, 20, 2, 4, 4)
    lower, upper, both = (
        retention_matrix(q, k, log_decay=decays(2), direction=d) for d in DIRECTIONS
    )
    diagonal = torch.diag_embed((q * k).sum(-1).transpose(1, 2) / 2)
    assert torch.equal(lower, lower.tril())
    assert torch.equal(upper, upper.triu())
    assert error(both, lower + upper - diagonal) <= 1e-14


# -------------------------------------------------------------------------------------------------- refusals and company


def test_decreasing_times_are_refused() -> None:
    q, k, v, _ = random_inputs(2, 5, 1, 2, 2)
    good = torch.arange(5.0).expand(2, -1).clone()
    common: dict[str, Any] = {"log_decay": decays(1)}
    for form in ("parallel", "chunkwise", "recurrent"):
        for at, wrong in ((3, 1.5), (2, math.nan), (4, math.inf)):
            bad = good.clone()
            bad[1, at] = wrong
            with pytest.raises(UserError, match="number 1") as refused:
                retention(q, k, v, times=bad, form=form, **common)
            assert refused.value.code == Reason.TIMESTAMPS
    retention(q, k, v, times=good, **common)
    good[0, 2] = 0.5  # the same tensor, found good a moment ago
    with pytest.raises(UserError, match="number 0"):
        retention(q, k, v, times=good, **common)
    with torch.inference_mode():
        t = good.clone()
        with pytest.raises(UserError):
            retention(q, k, v, times=t, **common)
        t[0, 2] = 2.0
        retention(q, k, v, times=t, **common)
        t[0, 2] = 0.0
        with pytest.raises(UserError):
            retention(q, k, v, times=t, **common)


@pytest.mark.parametrize(("direction", "time"), [("forward", 3.5), ("backward", 6.0)])
def test_pieces_out_of_order_are_refused(direction: str, time: float) -> None:
    q, k, v, _ = random_inputs(1, 4, 1, 2, 2)
    state = State(
        torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.tensor([time], dtype=torch.float64)
    )
    with pytest.raises(UserError) as refused:
        retention(
            q,
            k,
            v,
            log_decay=decays(1),
            times=torch.arange(4.0)[None] + 3.25,
            direction=direction,
            state=state,
        )
    assert refused.value.code == Reason.TIMESTAMPS


@pytest.mark.parametrize("form", ["auto", "parallel", "chunkwise", "recurrent"])
@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_a_state_of_the_other_direction_is_refused(direction: str, form: str) -> None:
    """Which holds what lies on the other side; also of no rows."""
    other = DIRECTIONS[1 - DIRECTIONS.index(direction)]
    q, k, v, _ = random_inputs(1, 4, 1, 2, 2)
    state = retention(q, k, v, log_decay=decays(1), direction=other, return_state=True)[1]
    for rows in (4, 0):
        with pytest.raises(
            UserError, match=f"a state of {other} retention in {direction} retention"
        ) as refused:
            retention(
                q[:, :rows],
                k[:, :rows],
                v[:, :rows],
                log_decay=decays(1),
                direction=direction,
                form=form,
                state=state,
            )
        assert (refused.value.code, refused.value.exit_code) == (Reason.CONFIG, Exit.USAGE)


@pytest.mark.parametrize(
    "options",
    [
        {"ties": "group", "form": "chunkwise"},
        {"ties": "group", "form": "recurrent"},
        {"ties": "group", "return_state": True},
        {"direction": "both", "return_state": True},
        {"direction": "sideways"},
        {"form": "fast"},
        {"ties": "none"},
        {"core_precision": "fp16"},
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    q, k, v, _ = random_inputs(1, 4, 1, 2, 2)
    with pytest.raises(UserError) as refused:
        retention(q, k, v, log_decay=decays(1), **options)
    assert refused.value.code == Reason.CONFIG
    assert refused.value.exit_code == Exit.USAGE


@pytest.mark.parametrize("form", ["auto", "parallel", "chunkwise", "recurrent"])
@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 300), (0, 0)])
@pytest.mark.parametrize("timed", [False, True])
def test_no_rows_have_no_retention_and_leave_the_state(
    form: str, batch: int, length: int, timed: bool
) -> None:
    q, k, v, _ = random_inputs(batch, length, 1, 2, 3)
    q.requires_grad_()
    options: dict[str, Any] = {
        "log_decay": decays(1),
        "form": form,
        "times": torch.zeros(batch, length) if timed else None,
    }
    o = retention(q, k, v, **options)
    assert o.shape == v.shape
    assert torch.autograd.grad(o.sum(), q)[0].shape == q.shape
    state = State(
        torch.ones(batch, 1, 2, 3, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)
    )
    assert retention(q, k, v, state=state, return_state=True, **options)[1] is state
    with pytest.raises(UserError, match="after no rows"):
        retention(q, k, v, return_state=True, **options)


def test_inputs_that_would_be_cut_or_spread_are_refused() -> None:
    """Integers would cut the weights, and a state of other rows would be given to each."""
    q, k, v, _ = random_inputs(3, 4, 1, 2, 2)
    for inputs in ((q.int(), k, v), (q, k.int(), v), (q, k, v.long())):
        with pytest.raises(UserError, match="floating"):
            retention(*inputs, log_decay=decays(1))
    for chunk in (0, -5):
        with pytest.raises(UserError, match="chunk"):
            retention(q, k, v, log_decay=decays(1), chunk=chunk, form="chunkwise")
    for rows, heads in ((1, 1), (3, 2)):
        state = State(
            torch.zeros(rows, heads, 2, 2, dtype=torch.float64),
            torch.full((rows,), -1.0, dtype=torch.float64),
        )
        with pytest.raises(UserError, match="its own state") as refused:
            retention(q, k, v, log_decay=decays(1), state=state)
        assert (refused.value.code, refused.value.exit_code) == (Reason.SHAPES_DIFFER, Exit.USAGE)


def test_auto_takes_the_form_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short sequences the faster one, as `benchmarks/retention.py` measures: the wider keys and
    values are, the more rows the parallel form is worth.
    """
    used = watched(monkeypatch, "_recurrent", "_chunkwise")
    tiny, wide = (16, 32), (40, 80)
    for N, widths, options, expected in (
        (50, tiny, {}, []),
        (90, tiny, {}, ["_chunkwise"]),
        (125, wide, {}, []),
        (190, wide, {}, ["_chunkwise"]),
        (190, wide, {"ties": "group"}, []),
        (1, tiny, {"return_state": True}, ["_recurrent"]),
        (1, tiny, {}, []),
        (90, tiny, {"direction": "both"}, []),
        (190, tiny, {"direction": "both"}, ["_chunkwise"] * 2),
    ):
        used.clear()
        inputs = random_inputs(1, N, 1, *widths)[:3]
        retention(*inputs, log_decay=decays(1), **options)
        assert used == expected


@pytest.mark.slow
def test_torch_compile_keeps_the_operator() -> None:
    layer = torch.nn.Linear(8, 3 * 8)
    x = torch.randn(2, 150, 8, requires_grad=True)
    times = torch.rand(2, 150).cumsum(1)

    def block(x: Tensor) -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return retention(q, k, v, log_decay=torch.tensor([-0.1, -0.01]), times=times).sum(2).tanh()

    plain = block(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    assert error(compiled, plain.detach()) <= 1e-6
    found, wanted = (torch.autograd.grad(o.square().sum(), x)[0] for o in (compiled, plain))
    assert error(found, wanted) <= 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", ["auto", "parallel", "chunkwise", "recurrent"])
def test_cuda_computes_the_same(form: str, direction: str) -> None:
    for clock, N in itertools.product(CLOCKS, (40, 300)):
        times = random_times(2, N, clock)
        inputs = random_inputs(2, N, 3, 4, 6, torch.float32)
        here = [x.clone().requires_grad_() for x in inputs[:3]]
        there = [x.cuda().requires_grad_() for x in inputs[:3]]
        common: dict[str, Any] = {"direction": direction, "form": form}
        o = retention(*here, log_decay=decays(3).float(), times=times, **common)
        cuda = retention(
            *there,
            log_decay=decays(3).float().cuda(),
            times=None if times is None else times.cuda(),
            **common,
        )
        assert error(cuda.cpu(), o) <= 2e-5
        for f, w in zip(
            torch.autograd.grad(cuda, there, inputs[3].cuda()),
            torch.autograd.grad(o, here, inputs[3]),
            strict=True,
        ):
            assert error(f.cpu(), w) <= 2e-5
