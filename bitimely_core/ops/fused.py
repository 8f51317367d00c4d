"""What a layer does between its matrix products: norms, gates, residual sums, casts of weights.

    residual_norm(x, branch, norm)   x + branch, and its layer norm
    norm_gate(o, gate, norm)         SiLU(gate) * norm(o), the norm of each head and token
    glu(joined, act)                 act(a) * b of the halves of joined
    join_weights(groups, dtype)      the weights of several linear maps of one input as one matrix,
                                     all groups with one copy
    gated_linear(gate, linear, *x)   linear(gate(*x)); a training on a CPU keeps x, not gate(*x)

On a CPU, and in graphs of torch.compile, the others are the plain operations. On CUDA each is one
operator `bitimely::` with a backward written by hand. The backward needs the inputs alone (of
`residual_norm`: the sum). Both are compiled where Triton is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.ops import operator
from bitimely_core.ops.operator import LIBRARY

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}
Item = TypeVar("Item")
# parameters, 25 MiB: gradients of the last layers are there before those of the first
COPIED = 6_500_000
RMS_EPS, GROUP_EPS = 1e-6, 1e-5


def is_used(x: Tensor) -> bool:
    """Whether the regions of this tensor are operators."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def find_dtype(x: Tensor) -> torch.dtype:
    """In which matrix products read `x`: that of autocast, where it is on, else that of `x`."""
    return (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else x.dtype
    )


def widen(x: Tensor) -> Tensor:
    """In float32 at least: sums and Fourier transforms lose precision below."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def residual_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """X + branch [..., D] (None: x), and its layer norm in the precision of matrix products."""
    if not is_used(x):
        total = x if branch is None else x + branch
        return total, norm(total)
    x = x if branch is None else x.to(torch.promote_types(x.dtype, branch.dtype))
    total, normed = torch.ops.bitimely.residual_norm(
        x, branch, norm.weight, norm.bias, norm.eps, find_dtype(x)
    )
    return (x if branch is None else total), normed


def norm_gate(o: Tensor, gate: Tensor, norm: str) -> Tensor:
    """SiLU(gate) * norm(o), [B, M, H W] from o [B, M, H, W]; `norm`: group or rms, of each head and
    token, without weights.
    """
    if not is_used(o):
        return _norm_gate(o, gate, norm)
    gated: Tensor = torch.ops.bitimely.norm_gate(o, gate, norm)
    return gated


def glu(joined: Tensor, act: str) -> Tensor:
    """act(a) * b [..., F], a and b the halves of joined [..., 2 F]; `act`: a key of
    `ACTIVATIONS`.
    """
    if not is_used(joined):
        return _glu(joined, act)
    gated: Tensor = torch.ops.bitimely.glu(joined, act)
    return gated


def gated_linear(gate: Callable[..., Tensor], linear: nn.Linear, *inputs: Tensor) -> Tensor:
    """`linear`, without a bias, of gate(*inputs), a pointwise function or a norm.

    Its backward on a CPU forms gate(*inputs) once more: keeping it, and what is inside it, takes
    most of the memory of a training.
    """
    trains_on_cpu = torch.is_grad_enabled() and inputs[0].device.type == "cpu"
    if not trains_on_cpu or torch.compiler.is_compiling():
        return linear(gate(*inputs))
    gated: Tensor = _GatedLinear.apply(  # type: ignore[no-untyped-call]
        gate, linear.weight, *inputs
    )
    return gated


def join_weights(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """The matrices [O, I] of each group below each other, in `dtype`: one copy for about every
    `COPIED` parameters.
    """
    starts = itertools.accumulate(
        (sum(weight.numel() for weight in group) for group in groups), initial=0
    )
    joined: list[Tensor] = []
    pairs = zip(groups, starts, strict=False)
    for _, run in itertools.groupby(pairs, key=lambda pair: pair[1] // COPIED):
        copied = [group for group, _ in run]
        weights = [*itertools.chain.from_iterable(copied)]
        joined += torch.ops.bitimely.join_weights(weights, [*map(len, copied)], dtype)
    return joined


# --- the functions and their gradients


class _GatedLinear(torch.autograd.Function):
    """`gated_linear` on a CPU."""

    @staticmethod
    def forward(ctx: Any, gate: Callable[..., Tensor], weight: Tensor, *inputs: Tensor) -> Tensor:
        ctx.gate, ctx.casts = gate, torch.is_autocast_enabled("cpu")
        ctx.dtype = torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(weight, *inputs)
        return F.linear(gate(*inputs), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with torch.autocast("cpu", dtype=ctx.dtype, enabled=ctx.casts):
            with torch.enable_grad():
                gated = ctx.gate(*leaves)
            slope = (grad @ weight).to(gated.dtype)
            of_weight = grad.flatten(0, -2).mT @ gated.flatten(0, -2)
        again = torch.is_grad_enabled()  # a second derivative is wanted
        slopes = torch.autograd.grad(gated, leaves, slope, create_graph=again)
        return None, of_weight.to(weight.dtype), *slopes


def _differentiate_norm(
    grad: Tensor, x: Tensor, eps: float, *, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """The normalised rows of `x` and the gradient of `x`, from that of the rows; not `centred`: of
    the root mean square.
    """
    x = x - x.mean(-1, keepdim=True) if centred else x
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x * scale
    slope = grad - x * (grad * x).mean(-1, keepdim=True)
    return x, scale * (slope - grad.mean(-1, keepdim=True) if centred else slope)


def _residual_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    wide = widen(total)
    normed = F.layer_norm(
        wide, wide.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps
    ).to(dtype)
    return (x.new_empty(0) if branch is None else total), normed


def _residual_norm_backward(
    passed: Tensor | None,
    grad: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    branch: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of x, weight and bias, and of the branch where it has another dtype than x;
    `passed` is that of the sum.
    """
    grad, wide = widen(grad), widen(total)
    normed, slope = _differentiate_norm(grad * weight.to(wide.dtype), wide, eps)
    slope = slope if passed is None else slope + passed
    rows = grad.flatten(0, -2)
    sums = ((rows * normed.flatten(0, -2)).sum(0).to(weight.dtype), rows.sum(0).to(weight.dtype))
    return [
        slope.to(total.dtype),
        *sums,
        *([] if branch in (None, total.dtype) else [slope.to(branch)]),
    ]


def _norm_gate(o: Tensor, gate: Tensor, norm: str) -> Tensor:
    if norm == "rms":
        return F.silu(gate) * (
            o * torch.rsqrt(o.square().mean(-1, keepdim=True) + RMS_EPS)
        ).flatten(-2)
    # = group norm with H groups on each token by itself
    return F.silu(gate) * F.layer_norm(o, o.shape[-1:], eps=GROUP_EPS).flatten(-2)


def _norm_gate_wide(o: Tensor, gate: Tensor, norm: str) -> Tensor:
    wide, x = widen(o), widen(gate)
    return _norm_gate(wide, x, norm).to(gate.dtype)


def _norm_gate_backward(grad: Tensor, o: Tensor, gate: Tensor, norm: str) -> list[Tensor]:
    """Gradients of o and gate."""
    wide, grad, x = map(widen, (o, grad, gate))
    share = x.sigmoid()
    centred = norm != "rms"
    normed, slope = _differentiate_norm(
        (grad * x * share).view(o.shape), wide, GROUP_EPS if centred else RMS_EPS, centred=centred
    )
    return [
        slope.to(o.dtype),
        (grad * normed.flatten(-2) * share * (1 + x * (1 - share))).to(gate.dtype),
    ]


def _glu(joined: Tensor, act: str) -> Tensor:
    a, b = joined.chunk(2, -1)
    return ACTIVATIONS[act](a) * b


def _glu_wide(joined: Tensor, act: str) -> Tensor:
    return _glu(widen(joined), act).to(joined.dtype)


def _glu_backward(grad: Tensor, joined: Tensor, act: str) -> Tensor:
    """The gradient of joined."""
    wide, grad = widen(joined), widen(grad)
    a, b = wide.chunk(2, -1)
    if act == "silu":
        share = a.sigmoid()
        value, slope = a * share, share * (1 + a * (1 - share))
    else:
        share = 0.5 * (1 + torch.erf(a * 0.5**0.5))
        value, slope = a * share, share + a * torch.exp(-0.5 * a.square()) * (2 * torch.pi) ** -0.5
    return torch.cat((grad * b * slope, grad * value), -1).to(joined.dtype)


def _join_weights(weights: list[Tensor], counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    heights = _cut([*map(len, weights)], counts)
    widths = [group[0].shape[1] for group in _cut(weights, counts)]
    joined = [
        weights[0].new_empty(sum(rows), width, dtype=dtype)
        for rows, width in zip(heights, widths, strict=True)
    ]
    torch._foreach_copy_(_split(joined, heights), weights)
    return joined


def _split_gradients(grads: list[Tensor], weights: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Gradients of the weights from those of the joined matrices."""
    out = list(map(torch.empty_like, weights))
    torch._foreach_copy_(out, _split(grads, _cut([*map(len, weights)], counts)))
    return out


def _split(matrices: list[Tensor], heights: list[list[int]]) -> list[Tensor]:
    """The parts of joined matrices, by their rows."""
    return [*itertools.chain.from_iterable(map(Tensor.split, matrices, heights))]


def _cut(items: list[Item], counts: list[int]) -> list[list[Item]]:
    """The items in runs of so many."""
    rest = iter(items)
    return [[*itertools.islice(rest, count)] for count in counts]


# --- their registration


def allow_graphs() -> None:
    """Torch may keep more than 8 graphs of a function: of both directions, training and validation,
    precisions, sizes of several models.
    """
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, 64)


@functools.cache
def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel or few; rows may differ from call to call."""
    allow_graphs()
    return torch.compile(function, fullgraph=True)


def _define(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, fuses: bool = True
) -> None:
    """The operator `schema` of `function`, and what it gives for fake tensors."""
    name = schema.partition("(")[0]

    def run(*arguments: Any) -> Any:
        if not fuses:
            return function(*arguments)
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        # so that training and evaluation have one graph
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return (compile_region(function) if operator.has_kernels(device) else function)(
                *arguments
            )

    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitimely::{name}", fake, lib=LIBRARY)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, branch, weight, _, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.branch = None if branch is None else branch.dtype
    ctx.save_for_backward(x if branch is None else output[0], weight)


def _differentiate_residual_norm(
    ctx: Any, passed: Tensor | None, grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    passed = None if ctx.branch is None else passed
    if grad is None:
        return passed, None if passed is None else passed.to(ctx.branch), None, None, None, None
    slope, of_weight, of_bias, *of_branch = torch.ops.bitimely.residual_norm_backward(
        passed, grad, total, weight, ctx.eps, ctx.branch
    )
    # a branch of the dtype of x has the same gradient
    branch = None if ctx.branch is None else [slope, *of_branch][-1]
    return slope, branch, of_weight, of_bias, None, None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.option = inputs
    ctx.save_for_backward(*tensors)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, ctx.counts, _ = inputs
    ctx.save_for_backward(*weights)


def _register() -> None:
    norm = "Tensor weight, Tensor bias, float eps, ScalarType dtype"
    _define(
        f"residual_norm(Tensor x, Tensor? branch, {norm}) -> (Tensor, Tensor)",
        _residual_norm,
        lambda x, branch, weight, bias, eps, dtype: (
            x.new_empty(0) if branch is None else _like(x),
            _like(x, dtype),
        ),
    )
    _define(
        "residual_norm_backward(Tensor? passed, Tensor grad, Tensor total, Tensor weight, "
        "float eps, ScalarType? branch) -> Tensor[]",
        _residual_norm_backward,
        lambda passed, grad, total, weight, eps, branch: [
            *map(_like, (total, weight, weight)),
            *([] if branch in (None, total.dtype) else [_like(total, branch)]),
        ],
    )
    _define(
        "norm_gate(Tensor o, Tensor gate, str norm) -> Tensor",
        _norm_gate_wide,
        lambda o, gate, norm: _like(gate),
    )
    _define(
        "norm_gate_backward(Tensor grad, Tensor o, Tensor gate, str norm) -> Tensor[]",
        _norm_gate_backward,
        lambda grad, o, gate, norm: [_like(o), _like(gate)],
    )
    _define(
        "glu(Tensor joined, str act) -> Tensor",
        _glu_wide,
        lambda joined, act: _like(joined.chunk(2, -1)[0]),
    )
    _define(
        "glu_backward(Tensor grad, Tensor joined, str act) -> Tensor",
        _glu_backward,
        lambda grad, joined, act: _like(joined),
    )
    counts = "Tensor[] weights, int[] counts"
    _define(
        f"join_weights({counts}, ScalarType dtype) -> Tensor[]",
        _join_weights,
        _join_weights,
        fuses=False,
    )
    _define(
        f"split_gradients(Tensor[] grads, {counts}) -> Tensor[]",
        _split_gradients,
        _split_gradients,
        fuses=False,
    )

    ops = torch.ops.bitimely
    for name, gradients, save in (
        ("residual_norm", _differentiate_residual_norm, _save_norm),
        (
            "norm_gate",
            lambda ctx, grad: (*ops.norm_gate_backward(grad, *ctx.saved_tensors, ctx.option), None),
            _save_inputs,
        ),
        (
            "glu",
            lambda ctx, grad: (ops.glu_backward(grad, *ctx.saved_tensors, ctx.option), None),
            _save_inputs,
        ),
        (
            "join_weights",
            lambda ctx, grads: (
                ops.split_gradients(grads, ctx.saved_tensors, ctx.counts),
                None,
                None,
            ),
            _save_weights,
        ),
    ):
        torch.library.register_autograd(
            f"bitimely::{name}", gradients, setup_context=save, lib=LIBRARY
        )


_register()
