"""The operator `bitimely::retention`: the bits of the forms outside of graphs, its rules under
torch, and the Triton kernels in the interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from bitimely_core import models
from bitimely_core.errors import UserError
from bitimely_core.ops import operator, retention, rotary, trial
from bitimely_core.types import Batch

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread")


def make_inputs(
    clock: bool, rotated: bool, dtype: torch.dtype = torch.float32, widths: tuple[int, int] = (4, 6)
) -> tuple[list[Tensor], list[Tensor | None]]:
    """q, k, v, log_decay, and times, mask, rotation, of 2 sequences of 150 tokens."""
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, 150, 2, width, generator=draw).to(dtype).requires_grad_()
        for width in (widths[0], *widths)
    ]
    times = torch.rand(2, 150, generator=draw).cumsum(1).double() if clock else None
    table = rotary.make_rotation(torch.arange(150), widths[0]) if rotated else None
    return [*inputs, torch.tensor([-0.1, -0.01]).requires_grad_()], [
        times,
        torch.rand(2, 150, generator=draw) < 0.9,
        table,
    ]


@pytest.mark.parametrize("core", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_the_operator_has_the_bits_of_the_forms(direction: str, core: str) -> None:
    for clock, rotated in itertools.product((False, True), repeat=2):
        inputs, (times, mask, table) = make_inputs(clock, rotated)
        inputs[3].requires_grad_(core == "fp32")  # a decay that learns is never in bf16
        wanted = [x for x in inputs if x.requires_grad]
        plain = retention.retention(
            *inputs[:3],
            log_decay=inputs[3],
            times=times,
            mask=mask,
            rotation=table,
            direction=direction,
            core_precision=core,
        )
        made = torch.ops.bitimely.retention(*inputs, times, mask, table, direction, 64, core)
        assert torch.equal(made, plain)
        for found, own in zip(
            *(torch.autograd.grad(o.sin().sum(), wanted) for o in (made, plain)), strict=True
        ):
            assert torch.equal(found, own)


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_heads_too_wide_for_the_kernels_are_computed_by_the_forms(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA with Triton, where the operator has called itself without end for them."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 150, 1, width, generator=draw).requires_grad_()
        for width in (2 * operator.WIDEST, 2 * operator.WIDEST, 3)
    )
    log_decay = torch.tensor([-0.1]).requires_grad_()
    inputs = (q, k, v, log_decay)
    plain = retention.retention(q, k, v, log_decay=log_decay, direction=direction)
    monkeypatch.setattr(operator, "has_kernels", lambda _: True)
    made = retention.retention(q, k, v, log_decay=log_decay, direction=direction)
    own = torch.ops.bitimely.retention(*inputs, None, None, None, direction, 64, "fp32")
    for o in (made, own):
        assert torch.equal(o, plain)
        assert all(
            map(
                torch.equal,
                torch.autograd.grad(o.sum(), inputs),
                torch.autograd.grad(plain.sum(), inputs, retain_graph=True),
            )
        )


@pytest.mark.parametrize("rotated", [False, True])
def test_the_operator_keeps_the_rules_of_torch(rotated: bool) -> None:
    """Its schema, its fake tensors and its gradients, under autograd and under the compiler's
    tracing.
    """
    inputs, given = make_inputs(True, rotated)
    torch.library.opcheck(
        torch.ops.bitimely.retention.default, (*inputs, *given, "both", 64, "fp32")
    )


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_clock_that_learns_has_gradients_in_bfloat16(direction: str, timed: bool) -> None:
    """Against the parallel form in float64; they were zeros, and other results than in a compiled
    graph.
    """
    inputs, (times, mask, _) = make_inputs(timed, rotated=False)
    inputs = [
        *(x.detach().bfloat16().requires_grad_() for x in inputs[:3]),
        inputs[3],
        *([] if times is None else [times.requires_grad_()]),
    ]
    given = (*inputs, *(() if timed else (None,)), mask, None, direction, 64, "bf16")
    torch.library.opcheck(torch.ops.bitimely.retention.default, given)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = retention.retention(
        *wide[:3],
        log_decay=wide[3],
        times=wide[4] if timed else None,
        mask=mask,
        direction=direction,
        form="parallel",
    )
    slope = exact.detach().cos().bfloat16()
    found = torch.autograd.grad(torch.ops.bitimely.retention(*given), inputs, slope)
    for made, own in zip(found, torch.autograd.grad(exact, wide, slope.double()), strict=True):
        assert float((made.double() - own).norm() / own.norm()) <= 2e-2


def test_fake_gradients_lie_as_the_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs, (times, *given) = make_inputs(clock=True, rotated=False)
    assert times is not None
    tensors = [x.detach() for x in (inputs[2], *inputs, times.T.contiguous().T)]
    real = torch.ops.bitimely.retention_backward(*tensors, *given, "forward", 64, "fp32")
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in (*tensors, *given)]
        fake = torch.ops.bitimely.retention_backward(*fakes, "forward", 64, "fp32")
    assert [x.stride() for x in fake] == [x.stride() for x in real]


def test_gradients_under_a_mode_below_autograd() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    inputs, given = make_inputs(True, True)
    wanted = torch.autograd.grad(
        torch.ops.bitimely.retention(*inputs, *given, "forward", 64, "fp32").sin().sum(), inputs
    )
    with Plain():
        found = torch.autograd.grad(
            torch.ops.bitimely.retention(*inputs, *given, "forward", 64, "fp32").sin().sum(), inputs
        )
    assert all(map(torch.equal, found, wanted))


def test_a_second_derivative_is_refused() -> None:
    """Not taken for 0, as that of an operator without a rule is; the parallel form has one."""
    (q, k, v, log_decay), _ = make_inputs(clock=False, rotated=False)

    def differentiate_twice(o: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), k)[0]

    o = torch.ops.bitimely.retention(q, k, v, log_decay, None, None, None, "forward", 64, "fp32")
    with pytest.raises(UserError, match=r"once differentiable.*parallel"):
        differentiate_twice(o)
    assert (
        differentiate_twice(retention.retention(q, k, v, log_decay=log_decay, form="parallel"))
        .abs()
        .sum()
        > 0
    )


def test_a_table_rotates_as_positions_do() -> None:
    x, positions = torch.randn(2, 50, 3, 8), torch.rand(2, 50).double().cumsum(1) * 100
    torch.testing.assert_close(
        rotary.apply_rotation(x, rotary.make_rotation(positions, 8)),
        rotary.rotate(x, positions),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.filterwarnings("ignore")  # torch deprecates parts of its own compiler
@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param("bitimelygpt", 640, marks=pytest.mark.slow),
        pytest.param("bitimelygpt", 64, marks=pytest.mark.slow),
        pytest.param("gpt", 64, marks=pytest.mark.slow),
    ],
)
def test_two_layers_are_one_graph_forward_and_backward(name: str, length: int) -> None:
    import torch._dynamo

    torch.manual_seed(0)
    model: Any = models.build(
        name, preset="tiny", channels=2, length=length, layers=2, dropout=0.0, tokenizer="conv"
    )
    batch, weights = Batch(torch.randn(2, length, 2)), list(model.parameters())
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    states = [call(batch).hidden[-1] for call in (model, torch.compile(model, backend="aot_eager"))]
    slopes = [torch.autograd.grad(x.square().mean(), weights, allow_unused=True) for x in states]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-6)
    for found, wanted in zip(slopes[1], slopes[0], strict=True):
        assert (found is None) == (wanted is None)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def run_program(name: str, *options: str, **environment: str) -> dict[str, dict[str, Any]]:
    """The JSON object that a program of this folder prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *options],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def interpret(*options: str) -> dict[str, dict[str, float]]:
    """Errors of the kernels by case."""
    return run_program("interpret_retention.py", *options, TRITON_INTERPRET="1")


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the extra triton"
)


@pytest.mark.slow
@needs_triton
def test_kernels_agree_with_the_definition() -> None:
    """In float32 for the result and the gradients of queries, keys, values, decay and times."""
    found = interpret()
    assert len(found) == 13
    assert {name for errors in found.values() for name in errors} == {
        "o",
        "dq",
        "dk",
        "dv",
        "dg",
        "dt",
    }
    assert max(max(errors.values()) for errors in found.values()) <= 2e-5


@needs_triton
@pytest.mark.long
def test_kernels_agree_with_the_definition_for_every_option() -> None:
    found = interpret("--all")
    assert len(found) == 99
    assert max(max(errors.values()) for errors in found.values()) <= 2e-5


@needs_triton
@pytest.mark.slow
def test_kernels_fit_gpus_from_a_t4_to_a_blackwell() -> None:
    """The launcher finds tiles that fit the shared memory of each; in bfloat16 up to Hopper no
    register is spilled, elsewhere few are.
    """
    found = run_program("compile_retention.py", TRITON_DEFAULT_FP_FUSION="1")
    assert len(found) == 8
    for case, kernels in found.items():
        assert len(kernels) == 5, case
        for name, (_, spilled, _) in kernels.items():
            assert case.endswith("128 256") or spilled <= (
                0 if "bf16" in case and "120" not in case else 256
            ), (case, name)


@pytest.mark.parametrize("right", [True, False])
def test_kernels_that_are_wrong_are_not_used(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton 3.6 compiled some on an H200: with a warning the result is that of the forms."""
    inputs, given = make_inputs(clock=True, rotated=True)
    plain = torch.ops.bitimely.retention(*inputs, *given, "both", 64, "fp32")
    wanted = torch.autograd.grad(plain.sum(), inputs)

    def forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *options: Any) -> Tensor:
        called.append(q.shape[1])
        named = dict(zip(("times", "mask", "rotation", "direction"), options[:4], strict=True))
        k = k if right else k.flip(-1)
        return retention.retention(q, k, v, log_decay=log_decay, form="parallel", **named)

    def differentiate(grad: Tensor, *others: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in others[:4]]
        slopes = torch.autograd.grad(forward(*leaves, *others[4:]), leaves, grad)
        return [*slopes, grad.new_empty(0)]

    def backward(*others: Any) -> list[Tensor]:  # below autograd in this thread alone
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(differentiate, *others).result()

    called: list[int] = []
    kernels = Mock(forward=forward, backward=backward)
    monkeypatch.setattr(operator, "has_kernels", lambda _: True)
    monkeypatch.setattr(operator, "_load_kernels", lambda: kernels)
    trial.is_right.cache_clear()
    expected = contextlib.nullcontext() if right else pytest.warns(RuntimeWarning, match="wrong by")
    with expected:
        made = torch.ops.bitimely.retention(*inputs, *given, "both", 64, "fp32")
        found = torch.autograd.grad(made.sum(), inputs)
    assert len(called) == (4 if right else 2)  # of which two are the trial
    assert torch.allclose(made, plain, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or operator.find_backend() != "triton",
    reason="needs CUDA and Triton",
)
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize(("core", "within"), [("fp32", 2e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("widths", [(4, 6), (32, 64), (40, 80)])
def test_kernels_on_a_gpu_agree_with_float64(
    widths: tuple[int, int], direction: str, core: str, within: float
) -> None:
    """Kernels that fail their trial warn, which is an error here."""
    for clock, rotated in itertools.product((False, True), repeat=2):
        inputs, (times, mask, table) = make_inputs(clock, rotated, widths=widths)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        options = {"times": times, "mask": mask, "direction": direction, "form": "parallel"}
        turned = (
            wide[:2] if table is None else [rotary.rotate(x, torch.arange(150)) for x in wide[:2]]
        )
        wanted = retention.retention(*turned, wide[2], log_decay=wide[3], **options)
        here = [x.detach().cuda().requires_grad_() for x in inputs]
        there = [None if x is None else x.cuda() for x in (times, mask, table)]
        made = torch.ops.bitimely.retention(*here, *there, direction, 64, core)
        # the same for both: that of each own result would differ by far more than the kernels do
        slope = wanted.detach().cos()
        slopes = (
            torch.autograd.grad(made, here, slope.float().cuda()),
            torch.autograd.grad(wanted, wide, slope),
        )
        errors = [
            float((found.detach().cpu().double() - own.detach()).norm() / own.norm().detach())
            for found, own in zip((made, *slopes[0]), (wanted, *slopes[1]), strict=True)
        ]
        assert max(errors[:-1]) <= within
        # of the decay: a difference of large sums, which loses digits; 0.07 was seen
        assert errors[-1] <= (within if core == "fp32" else 0.2)
