"""Registers chunkwise retention as an operator of torch, `bitimely::retention`.

It has gradients, fake tensors for torch.compile, and Triton kernels on CUDA.

    retention(q, k, v, log_decay, times?, mask?, rotation?, direction, chunk, core) -> o

Arguments as those of `ops.retention.retention`; `rotation` is a table of `rotary.make_rotation`.
Without a kernel (a CPU, or CUDA without Triton), and with kernels that are wrong on this GPU
(`trial`), the operator calls the forms of `ops.retention`, and its backward repeats them. It is
registered with `torch.library.Library`, because `torch.library.custom_op` imports the compiler with
every program that uses a model.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from bitimely_core.errors import usage_error
from bitimely_core.ops import trial

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? times, Tensor? mask, Tensor? rotation"
)
OPTIONS = "str direction, int chunk, str core"
WIDEST = 128  # K of a head; states of wider ones are left to matrix products
# of C, with which Triton builds the launcher of a kernel
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
TRITON = importlib.util.find_spec("triton") is not None
LIBRARY = torch.library.Library("bitimely", "FRAGMENT")


def find_backend() -> str:
    """What computes chunkwise retention on CUDA: `triton`, or `torch` where Triton or the C
    compiler that it needs is missing.
    """
    return "triton" if COMPILER and TRITON else "torch"


def is_used(device: torch.device) -> bool:
    """Whether retention is the operator on a device: in graphs of torch.compile, and on CUDA where
    it has kernels (if `fits_kernels`).
    """
    if torch.compiler.is_dynamo_compiling():  # where torch 2.11 takes every graph for an export
        return True
    return has_kernels(device) and not torch.compiler.is_exporting()


def has_kernels(device: torch.device) -> bool:
    """Whether tensors of this device have Triton kernels."""
    return device.type == "cuda" and find_backend() == "triton"


def fits_kernels(*tensors: Tensor) -> bool:
    """Whether the tensors, of which the first are queries [B, N, H, K], lie on CUDA, in a precision
    and of a width that the kernels read.
    """
    wanted = (torch.float32, torch.bfloat16, torch.float16)
    return (
        all(has_kernels(x.device) and x.dtype in wanted for x in tensors)
        and tensors[0].shape[-1] <= WIDEST
    )


def register(compute: Callable[..., Tensor]) -> None:
    """Define the operator and its backward; `compute` takes the same arguments and is
    differentiable.
    """
    LIBRARY.define(f"retention({INPUTS}, {OPTIONS}) -> Tensor")
    LIBRARY.define(f"retention_backward(Tensor grad, {INPUTS}, {OPTIONS}) -> Tensor[]")
    for key in ("CPU", "CUDA", "MPS"):
        LIBRARY.impl("retention", functools.partial(_run, compute), key)
        LIBRARY.impl("retention_backward", functools.partial(_run_backward, compute), key)
    torch.library.register_fake(
        "bitimely::retention",
        lambda q, k, v, *_: torch.empty_like(v, memory_format=torch.contiguous_format),
        lib=LIBRARY,
    )
    torch.library.register_fake("bitimely::retention_backward", _make_fake_gradients, lib=LIBRARY)
    torch.library.register_autograd(
        "bitimely::retention", _differentiate, setup_context=_save, lib=LIBRARY
    )
    torch.library.register_autograd(
        "bitimely::retention_backward", _refuse_second_derivative, lib=LIBRARY
    )


def _run(
    compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> Tensor:
    """The operator."""
    if _has_right_kernels(compute, q, k, v, arguments):
        return cast(Tensor, _load_kernels().forward(q, k, v, *arguments))
    # whether the clocks learn is not known here: tensors of a compiled graph do not say
    fixed = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
    with torch.no_grad():
        return compute(q, k, v, *fixed).contiguous()


def _run_backward(
    compute: Callable[..., Tensor],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    times: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Gradients of q, k, v, log_decay and times (empty without)."""
    if _has_right_kernels(compute, q, k, v, options):
        return cast(
            list[Tensor], _load_kernels().backward(grad, q, k, v, log_decay, times, *options)
        )
    inputs = _list_inputs(q, k, v, log_decay, times)
    leaves = [x.detach() for x in inputs]
    # bfloat16 is asked for where neither decay nor times learn
    wanted = leaves[:3] if options[-1] == "bf16" else leaves
    for leaf in wanted:
        leaf.requires_grad_()
    clock = leaves[4] if len(leaves) > 4 else times

    def differentiate() -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            o = compute(*leaves[:4], clock, *options)
        return torch.autograd.grad(o, wanted, grad, allow_unused=True)

    with torch.enable_grad():
        recorded = (q.detach()[:, :1].requires_grad_() * 1).requires_grad
    if recorded:
        slopes = differentiate()
    else:  # under a mode that handles operations below autograd, which another thread is not
        with ThreadPoolExecutor(1) as fresh:
            slopes = fresh.submit(differentiate).result()
    gradients = [
        torch.zeros_like(x) if slope is None else slope.contiguous()
        for x, slope in itertools.zip_longest(inputs, slopes)
    ]
    return gradients if len(inputs) > 4 else [*gradients, q.new_empty(0)]


def _has_right_kernels(
    compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, options: Sequence[Any]
) -> bool:
    """Whether kernels read the tensors and have passed their trial on this device."""
    if not fits_kernels(q, k, v):
        return False
    tiles = trial.Tiles(q.device, q.dtype, q.shape[-1], v.shape[-1], *options[-3:])
    return trial.is_right(_load_kernels(), compute, tiles)


def _list_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, times: Tensor | None
) -> list[Tensor]:
    """Those that can have gradients: times only of floating point."""
    inputs = [q, k, v, log_decay]
    return inputs if times is None or not times.is_floating_point() else [*inputs, times]


def _load_kernels() -> ModuleType:
    """The module of the kernels, which needs Triton."""
    from bitimely_core.ops import triton_retention

    return triton_retention


def _make_fake_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, times: Tensor | None, *_: Any
) -> list[Tensor]:
    inputs = _list_inputs(q, k, v, log_decay, times)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    return gradients if len(inputs) > 4 else [*gradients, q.new_empty(0)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # in bf16 decay and times have no gradients there
    learns = any(ctx.needs_input_grad[3:5]) and not fits_kernels(*ctx.saved_tensors[:3])
    *gradients, clock = torch.ops.bitimely.retention_backward(
        grad, *ctx.saved_tensors, *ctx.options[:2], "fp32" if learns else ctx.options[2]
    )
    return (*gradients, clock if ctx.needs_input_grad[4] else None, None, None, None, None, None)


def _refuse_second_derivative(ctx: Any, grads: Any) -> None:
    """Without a rule torch would take the gradients for constants."""
    raise usage_error(
        "a second derivative of retention",
        "its chunkwise form is once differentiable",
        "set form = parallel",
    )
