"""Retention and training steps on a CUDA device beside their peers.

    python benchmarks/gpu.py [--quick] [--json] [--only PART]

Parts: `roofline` (copies and products of this run), `parity` (operator against float64), `operator`
(against its form without kernels, fused softmax attention and, where it is installed,
flash-linear-attention), `step` (training steps of `18m`: windows a second, MFU, memory, waits) and
`train` (200 steps of `tiny` against the CPU). CUDA events, 3 warm-ups, medians of interleaved
rounds. Without CUDA one line and exit code 0.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import Row, make_parser, report, skip
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bitimely_core import models, objectives
from bitimely_core.ops import operator, retention
from bitimely_core.train import loop
from bitimely_core.types import Batch

PEAK = 989e12  # FLOP/s, dense bf16 of a Hopper GPU
# of 18m; the last is a head of softmax attention of the same parameters
HEADS, KEY, VALUE, WIDTH = 8, 40, 80, 48
FLOP = {"conv": 5.38e12 / 64, "patch": 2.70e12 / 64}  # of the products of a step, a window
BOUNDS = {"conv": 3000.0, "patch": 4452.0}  # windows a second


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, interleaved; the device is busy until a call is launched,
    so that launches are not measured.
    """
    filler = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            filler.zero_()  # about 0.4 ms, and nothing of the call is left in the cache
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def measure_roofline(rounds: int) -> Iterator[Row]:
    """Copies and products of this run."""
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy = measure({"copy": lambda: other.copy_(big)}, rounds)["copy"]
    yield Row(figure="copy", value=2 * big.numel() / copy / 1e9, unit="TB/s")
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
        product = measure({"product": lambda a=a: a @ a}, rounds)["product"]
        yield Row(figure=f"product {name}", value=2 * 8192**3 / product / 1e9, unit="TFLOP/s")
    torch.set_float32_matmul_precision("highest")


def make_inputs(batch: int, length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and the decay, the gradient of the output and irregular times."""
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(batch, length, HEADS, width, generator=draw).to("cuda", dtype).requires_grad_()
        for width in (KEY, KEY, VALUE)
    ]
    decay = torch.log1p(-torch.exp(torch.linspace(-3.5, -6.2, HEADS))).cuda()
    grad = torch.randn(batch, length, HEADS, VALUE, generator=draw).to("cuda", dtype)
    return (
        [*inputs, decay],
        grad,
        torch.rand(batch, length, generator=draw).double().cumsum(1).cuda(),
    )


def measure_parity(rounds: int) -> Iterator[Row]:
    """Relative L2 errors of the operator and its gradients against the parallel form in float64."""
    for core, dtype, most in (("fp32", torch.float32, 2e-5), ("bf16", torch.bfloat16, 1e-2)):
        (*inputs, decay), grad, times = make_inputs(2, 377, dtype)
        for direction in ("forward", "backward", "both"):
            wide = [x.detach().double().requires_grad_() for x in inputs]
            exact = retention.retention(
                *wide, log_decay=decay.double(), times=times, direction=direction, form="parallel"
            )
            made = torch.ops.bitimely.retention(
                *inputs, decay, times, None, None, direction, 64, core
            )
            wanted = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
            found = [made.detach(), *torch.autograd.grad(made, inputs, grad)]
            worst = max(
                float((a.double() - b).norm() / b.norm())
                for a, b in zip(found, wanted, strict=True)
            )
            yield Row(figure=f"relative error, {core} core, {direction}", value=worst, most=most)


def differentiate(call: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    """The call with its gradients."""

    def run() -> object:
        o = call()
        return torch.autograd.grad(o, leaves, o.detach())

    return run


def measure_size(batch: int, length: int, rounds: int) -> Iterator[Row]:
    """The operator and its peers on one size."""
    (*inputs, decay), _, times = make_inputs(batch, length, torch.bfloat16)
    softmax = [
        torch.randn(
            batch, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    ]
    clock = torch.arange(length, device="cuda", dtype=torch.float64)[None]

    def retain(direction: str, t: Tensor | None) -> Tensor:
        o: Tensor = torch.ops.bitimely.retention(
            *inputs, decay, t, None, None, direction, 64, "bf16"
        )
        return o

    calls: dict[str, Callable[[], Tensor]] = {
        f"{direction} {name}": functools.partial(retain, direction, t)
        for direction in ("forward", "backward", "both")
        for name, t in (("regular", None), ("irregular", times))
    }
    way = retention._Pass(backward=False, chunk=64, core=torch.bfloat16)
    calls["without kernels"] = lambda: retention._chunkwise_with_masks(*inputs, decay, clock, way)
    calls["softmax"] = lambda: scaled_dot_product_attention(*softmax, is_causal=True)
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.simple_gla import chunk_simple_gla

        calls["fla"] = lambda: chunk_simple_gla(*inputs, g_gamma=decay)[0]
    with torch.no_grad():
        plain = measure(calls, rounds)
    both = measure(
        {
            name: differentiate(call, softmax if name == "softmax" else inputs)
            for name, call in calls.items()
        },
        rounds,
    )
    size = f"B {batch} N {length}"
    for name in calls:
        yield Row(figure=f"{size}, {name}, forward", value=plain[name], unit="ms")
        yield Row(figure=f"{size}, {name}, with backward", value=both[name], unit="ms")
    for peer, least in (("without kernels", 2.0), ("softmax", None), ("fla", 1.0)):
        if peer in both:
            times = both[peer] / both["forward regular"]
            figure = f"{size}, forward regular, with backward"
            yield Row(figure=figure, peer=peer, value=times, least=least)


def measure_operator(rounds: int) -> Iterator[Row]:
    """Milliseconds forward and with backward, and ratios to the peers."""
    for batch, length in ((64, 752), (64, 377), (1, 16384)):
        yield from measure_size(batch, length, rounds)


class Noise:
    """Batches of one random batch of windows, as the loader would give them."""

    def __init__(self, steps: int, size: int, length: int, channels: int) -> None:
        self.steps, self.size = steps, size
        self.values = torch.randn(
            size, length, channels, generator=torch.Generator().manual_seed(0)
        )

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """As batches of `data.batches`."""
        return (Batch(self.values) for _ in range(start, self.steps))


def measure_steps(rounds: int) -> Iterator[Row]:
    """Training by the loop itself at batch 64: windows a second between log lines, MFU and peak
    memory.
    """
    for name, tokenizer in (("bitimelygpt", "conv"), ("bitimelygpt", "patch"), ("gpt", "patch")):
        for compiled in (False, True):
            torch.manual_seed(0)
            shape = models.default_shape("18m")
            options = {"core_precision": "bf16"} if name == "bitimelygpt" else {}
            model: Any = models.build(
                name, preset="18m", **{**shape, "tokenizer": tokenizer, **options}
            )
            model.target_scale.fill_(1.0)
            torch.cuda.reset_peak_memory_stats()
            marks: list[tuple[int, float]] = []
            batches = Noise(20 + 10 * rounds, 64, shape["length"], shape["channels"])
            config = loop.TrainConfig(
                epochs=1,
                device="cuda",
                batch_size=64,
                precision="bf16",
                log_every=10,
                compile=compiled,
            )
            log = lambda line, marks=marks: marks.append((line["step"], time.perf_counter()))  # noqa: E731
            loop.fit(
                model,
                batches,
                objectives.get("next" if name == "gpt" else "next-previous"),
                config=config,
                log=log,
            )
            (first, begun), (last, ended) = marks[2], marks[-1]
            speed, label = (
                64 * (last - first) / (ended - begun),
                f"{name} {tokenizer}{' compiled' if compiled else ''}",
            )
            least = BOUNDS[tokenizer] if name == "bitimelygpt" and compiled else None
            yield Row(figure=f"{label}, windows a second", value=speed, least=least)
            if name == "bitimelygpt":
                share, least = speed * FLOP[tokenizer] / PEAK, 0.2 if compiled else None
                yield Row(figure=f"{label}, share of the peak", value=share, least=least)
            peak = torch.cuda.max_memory_allocated() / 1e9
            yield Row(figure=f"{label}, peak memory", value=peak, unit="GB")


def measure_training(rounds: int) -> Iterator[Row]:
    """200 steps of tiny in float32: the losses of the CPU."""
    losses: dict[str, list[float]] = {"cuda": [], "cpu": []}
    for device, kept in losses.items():
        torch.manual_seed(0)
        model: Any = models.build(
            "bitimelygpt", preset="tiny", channels=2, length=1200, tokenizer="conv"
        )
        config = loop.TrainConfig(
            steps=200, device=device, batch_size=8, precision="fp32", log_every=1
        )
        objective = objectives.get("next-previous-strict")
        loop.fit(
            model,
            Noise(200, 8, 1200, 2),
            objective,
            config=config,
            log=lambda line, kept=kept: kept.append(line["loss"]),
        )
    far = max(abs(a - b) / abs(b) for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    yield Row(figure="losses of 200 steps, relative distance from the CPU", value=far, most=1e-3)


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "roofline": measure_roofline,
    "parity": measure_parity,
    "operator": measure_operator,
    "step": measure_steps,
    "train": measure_training,
}


def main() -> int:
    """Print the rows of each part as they are measured."""
    parser = make_parser(__doc__, "5 rounds instead of 20")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        return skip("no CUDA device here")
    rounds = 5 if options.quick else 20
    parts = [options.only] if options.only else list(PARTS)
    rows = (row for name in parts for row in PARTS[name](rounds))
    title = f"{torch.cuda.get_device_name()}, retention by {operator.find_backend()}"
    return report(title, rows, options)


if __name__ == "__main__":
    sys.exit(main())
