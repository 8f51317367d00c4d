"""The operators between the matrix products of a layer: their rules under torch, gradients against
float64, what they save; joined weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bitimely_core import models
from bitimely_core.models.layers import run_layers
from bitimely_core.ops import fused
from bitimely_core.types import Batch

OPS = torch.ops.bitimely
pytestmark = pytest.mark.usefixtures("one_thread")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (
        torch.randn(
            shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
        )
        .to(dtype)
        .requires_grad_()
    )


def normalise(o: Tensor, norm: str) -> Tensor:
    if norm == "rms":
        return o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (o - o.mean(-1, keepdim=True)) / (o.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def define_residual(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    total = x + branch
    return torch.cat((total, normalise(total, "group") * weight + bias), -1)


# name -> the operator of its leaves, its definition, the leaves' shapes
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    **{
        f"norm_gate {norm}": (
            functools.partial(lambda o, gate, norm: OPS.norm_gate(o, gate, norm), norm=norm),
            functools.partial(
                lambda o, gate, norm: gate * gate.sigmoid() * normalise(o, norm).flatten(-2),
                norm=norm,
            ),
            [(2, 3, 2, 5), (2, 3, 10)],
        )
        for norm in ("group", "rms")
    },
    "glu gelu": (
        lambda x: OPS.glu(x, "gelu"),
        lambda x: x[..., :4] * 0.5 * (1 + torch.erf(x[..., :4] / 2**0.5)) * x[..., 4:],
        [(2, 3, 8)],
    ),
    "glu silu": (
        lambda x: OPS.glu(x, "silu"),
        lambda x: x[..., :4] * x[..., :4].sigmoid() * x[..., 4:],
        [(2, 3, 8)],
    ),
    "residual_norm": (
        lambda x, branch, weight, bias: torch.cat(
            OPS.residual_norm(x, branch, weight, bias, 1e-5, x.dtype), -1
        ),
        define_residual,
        [(2, 3, 6), (2, 3, 6), (6,), (6,)],
    ),
    "norm": (
        lambda x, weight, bias: OPS.residual_norm(x, None, weight, bias, 1e-5, x.dtype)[1],
        lambda x, weight, bias: normalise(x, "group") * weight + bias,
        [(2, 3, 6), (6,), (6,)],
    ),
    "join_weights": (
        lambda a, b, c: torch.cat(
            [x.flatten() for x in OPS.join_weights([a, b, c], [2, 1], a.dtype)]
        ),
        lambda a, b, c: torch.cat((torch.cat((a, b)).flatten(), c.flatten())),
        [(3, 4), (2, 4), (4, 3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_the_values_and_gradients_of_its_definition(name: str) -> None:
    made, defined, shapes = CASES[name]
    leaves = [draw(*shape, seed=at) for at, shape in enumerate(shapes)]
    torch.testing.assert_close(made(*leaves), defined(*leaves), rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(made, leaves)
    slopes = [torch.autograd.grad(call(*leaves).sin().sum(), leaves) for call in (made, defined)]
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16_only_inputs_and_results_are_rounded(name: str) -> None:
    made, defined, shapes = CASES[name]
    leaves = [draw(*shape, dtype=torch.bfloat16, seed=at) for at, shape in enumerate(shapes)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    outs = made(*leaves), defined(*wide)
    assert outs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outs[0].double(), outs[1], rtol=2**-7, atol=2**-7)
    weight = draw(*outs[0].shape, dtype=torch.bfloat16).detach()
    slopes = [
        torch.autograd.grad(out, inputs, weight.to(out.dtype))
        for out, inputs in zip(outs, (leaves, wide), strict=True)
    ]
    for found, wanted in zip(*slopes, strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) <= 2**-7


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (OPS.norm_gate, (draw(2, 3, 2, 5), draw(2, 3, 10), "group")),
        (OPS.glu, (draw(2, 3, 8), "gelu")),
        (OPS.residual_norm, (draw(2, 3, 6), draw(2, 3, 6), draw(6), draw(6), 1e-5, torch.float32)),
        (OPS.residual_norm, (draw(2, 3, 6), None, draw(6), draw(6), 1e-5, torch.float64)),
        (OPS.join_weights, ([draw(3, 4), draw(2, 4), draw(4, 3)], [2, 1], torch.float32)),
    ],
)
def test_an_operator_keeps_the_rules_of_torch(operator: Any, given: tuple[Any, ...]) -> None:
    """Its schema, its fake tensors and its gradients, under autograd and under the compiler's
    tracing.
    """
    torch.library.opcheck(operator.default, given)


def test_an_operator_saves_its_inputs_alone() -> None:
    x, branch, joined, o, gate = (
        draw(2, 3, 6),
        draw(2, 3, 6),
        draw(2, 3, 8),
        draw(2, 3, 2, 5),
        draw(2, 3, 10),
    )
    norm = nn.LayerNorm(6).double()
    for call, kept in (
        (
            lambda: OPS.residual_norm(x, branch, norm.weight, norm.bias, norm.eps, torch.bfloat16),
            36 + 6,
        ),
        (lambda: OPS.glu(joined, "gelu"), 48),
        (lambda: OPS.norm_gate(o, gate, "group"), 120),
    ):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            call()
        assert sum(tensor.numel() for tensor in saved) == kept


def test_weights_are_joined_by_groups_of_about_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "COPIED", 40)
    groups = [[draw(3, 4, seed=at), draw(2, 4, seed=at + 50)] for at in range(6)]
    called: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func is OPS.join_weights.default)
            return func(*args, **(kwargs or {}))

    with Counting():
        joined = fused.join_weights(groups, torch.float32)
    assert sum(called) == 3
    assert [x.dtype for x in joined] == [torch.float32] * 6
    for made, group in zip(joined, groups, strict=True):
        assert torch.equal(made, torch.cat(group).float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch deprecates parts of its own compiler
def test_the_functions_on_a_gpu_are_full_graphs() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    x, weight, bias = (y.detach().float() for y in (draw(2, 3, 6), draw(6), draw(6)))
    o, gate, joined = (
        y.detach().bfloat16() for y in (draw(2, 3, 2, 5), draw(2, 3, 10), draw(2, 3, 8))
    )
    for function, given in (
        (fused._residual_norm, (x, x, weight, bias, 1e-5, torch.bfloat16)),
        (fused._residual_norm_backward, (x, x, x, weight, 1e-5, torch.bfloat16)),
        (fused._norm_gate_wide, (o, gate, "group")),
        (fused._norm_gate_backward, (gate, o, gate, "rms")),
        (fused._glu_wide, (joined, "gelu")),
        (fused._glu_backward, (joined[..., :4], joined, "silu")),
    ):
        made = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
        wanted = function(*given)
        for found, plain in zip(
            *((y if isinstance(y, list | tuple) else [y]) for y in (made, wanted)), strict=True
        ):
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_on_a_cpu_the_regions_are_the_plain_operations() -> None:
    x, branch, o, gate = (
        y.detach().float() for y in (draw(2, 3, 6), draw(2, 3, 6), draw(2, 3, 2, 5), draw(2, 3, 10))
    )
    norm = nn.LayerNorm(6)
    total, normed = fused.residual_norm(x, branch, norm)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, norm(x + branch))
    assert torch.equal(
        fused.norm_gate(o, gate, "group"),
        F.silu(gate) * F.layer_norm(o, (5,), eps=1e-5).flatten(-2),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("bitimelygpt", {}), ("bitimelygpt", {"ffn": "plain", "value_dim": 96}), ("gpt", {})],
)
def test_joined_weights_are_those_of_the_layers(name: str, options: dict[str, Any]) -> None:
    """The path of CUDA on a CPU: states and gradients of all parameters."""
    torch.manual_seed(0)
    model: Any = models.build(name, preset="tiny", channels=2, length=64, layers=2, **options)
    batch, weights = Batch(torch.randn(2, 64, 2)), list(model.layers.parameters())
    embedded = model.embed(batch)
    x, places = embedded.x, model._places(embedded)
    groups = [layer.list_weights() for layer in model.layers]
    joined = iter(fused.join_weights([group for own in groups for group in own], torch.float32))
    each = [{"weights": [next(joined) for _ in own]} for own in groups]
    states = [
        run_layers(model.layers, x.detach(), ("forward", "forward"), places, each=own)[0][-1]
        for own in (each, [])
    ]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)
    slopes = [torch.autograd.grad(state.square().mean(), weights) for state in states]
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["norm_gate group", "norm_gate rms", "glu"])
def test_a_gated_linear_has_the_gradients_of_its_definition(kind: str) -> None:
    linear = nn.Linear(10, 4, bias=False).double()
    o, gate, out = draw(2, 3, 2, 5), draw(2, 3, 10), draw(2, 3, 4)
    norm = kind.partition(" ")[2]

    def apply_gate(o: Tensor, gate: Tensor) -> Tensor:
        return fused.norm_gate(o, gate, norm) if norm else F.gelu(o.flatten(-2)) * gate

    def define(o: Tensor, gate: Tensor) -> Tensor:
        wide = gate * gate.sigmoid() * normalise(o, norm).flatten(-2) if norm else None
        return F.gelu(o.flatten(-2)) * gate if wide is None else wide

    leaves = (o, gate, linear.weight)
    ours = fused.gated_linear(apply_gate, linear, o, gate)
    definition = define(o, gate) @ linear.weight.T
    torch.testing.assert_close(ours, definition)
    for found, expected in zip(
        torch.autograd.grad(ours, leaves, out),
        torch.autograd.grad(definition, leaves, out),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_a_gated_linear_has_second_derivatives() -> None:
    linear = nn.Linear(10, 4, bias=False).double()
    leaves = (draw(3, 10), draw(3, 10), linear.weight)

    def read(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        return fused.gated_linear(lambda a, b: F.silu(a) * b, linear, a, b)

    assert torch.autograd.gradgradcheck(read, leaves)


def test_a_gated_linear_under_autocast_is_as_exact_as_the_operations_it_stands_for() -> None:
    linear = nn.Linear(10, 4, bias=False)
    a, b, out = (draw(*shape, dtype=torch.float32) for shape in ((6, 10), (6, 10), (6, 4)))
    exact = (F.silu(a.double()) * b.double()) @ linear.weight.double().T
    leaves = (a, b, linear.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = fused.gated_linear(lambda a, b: F.silu(a) * b, linear, a, b)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.02)
    for found, expected in zip(
        torch.autograd.grad(ours, leaves, out.bfloat16()),
        torch.autograd.grad(exact, leaves, out.double()),
        strict=True,
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def count_kept(name: str, **options: Any) -> int:
    """Bytes that the backward of one pass of a model of the width of preset 18m keeps, without its
    weights.
    """
    model = models.build(
        name,
        layers=12,
        heads=8,
        dim=320,
        dropout=0.0,
        tokenizer="patch",
        patch=8,
        channels=7,
        length=3000,
        **options,
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # by storage: a view keeps all of it

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(Batch(torch.randn(1, 3000, 7)))
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def test_a_training_keeps_at_most_a_tenth_more_than_one_of_gpt() -> None:
    ours = count_kept("bitimelygpt", value_dim=640, ffn_dim=640, ffn="glu")
    gpt = count_kept("gpt", value_dim=320, ffn_dim=1280, ffn="plain")
    assert ours <= 1.1 * gpt
