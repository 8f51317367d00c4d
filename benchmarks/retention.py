"""The retention operator against its own N x N form, against causal softmax attention and against a
plain loop over chunks.

    python benchmarks/retention.py [--quick] [--json]

Forward + backward in float32, 8 heads of key width 40 and value width 80 (preset 18m), softmax
attention with heads of width 48 (the transformers of the paper's table). CPU time of one thread,
all candidates of a case interleaved, medians of the rounds: only ratios inside one run mean
anything. Peak memory above the inputs, one fresh process a case.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import Row, make_parser, read_memory, report, reset_peak, time_calls
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bitimely_core.ops.retention import retention

H, K, V, ATTENTION = 8, 40, 80, 48
DECAY = torch.log1p(-torch.exp(torch.linspace(-math.log(32), -math.log(512), H)))
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of the slopes, B = 1

CASES = {  # rows, length, precision
    "batch": (16, 752, torch.float32),
    "long": (1, 4096, torch.float32),
    "bf16": (16, 752, torch.bfloat16),
}
QUICK_CASES = {case: (1, 256, dtype) for case, (*_, dtype) in CASES.items()}
# (case, candidate, its peer, the least cost of the peer over it)
FASTER = (
    ("batch", "chunkwise", "parallel", 5.0),
    ("batch", "chunkwise, irregular clock", "parallel, irregular clock", 6.0),
    ("batch", "chunkwise", "loop over chunks", None),
    ("batch", "chunkwise", "softmax", 1.4),
    ("long", "chunkwise", "softmax", 5.5),
    ("bf16", "chunkwise", "softmax", None),
    ("batch", "chunkwise, backward", "chunkwise", 0.9),
    ("batch", "chunkwise, irregular clock", "chunkwise", 0.9),
)
SLOPE, ERRORS = 1.15, {"fp32": 1e-6, "bf16": 1e-2}  # ceilings


# heads, widths of keys and values, of presets tiny and 18m, on short sequences
SHORT = {"4 heads of 16 / 32": (4, 16, 32), "8 heads of 40 / 80": (8, 40, 80)}
SHORT_LENGTHS = (32, 64, 125, 188, 250)
CHOICE = 0.8  # floor of the faster form over the one that `auto` takes

FLOPS = 0.81e6  # of the chunkwise form a token, forward + backward, chunks of 64
SQUARE = 2048  # of the matrix product that stands for the machine's peak


def loop_over_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    """Chunkwise retention as in reference code of linear attention: log gates a token, a mask a
    chunk, rows of the result filled in a loop.
    """
    missing, length = -q.shape[1] % chunk, q.shape[1]
    q, k, v = (
        pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, chunk))
        for x in (q * K**-0.5, k, v)
    )
    gate = DECAY[:, None, None].expand(q.shape[:-1]).cumsum(-1)  # [B, H, n, C]
    masks = (gate[..., :, None] - gate[..., None, :]).tril().exp().tril()
    o, state = torch.zeros_like(v), torch.zeros(q.shape[0], H, K, V)
    for i in range(q.shape[2]):
        Q, K_, V_, g = q[:, :, i], k[:, :, i], v[:, :, i], gate[:, :, i]
        o[:, :, i] = (Q @ K_.mT * masks[:, :, i]) @ V_ + (Q * g.exp()[..., None]) @ state
        state = state * g[..., -1:, None].exp() + (K_ * (g[..., -1:] - g).exp()[..., None]).mT @ V_
    return o.flatten(2, 3)[:, :, :length].transpose(1, 2)


def make_candidates(
    B: int, N: int, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[], Any]]:
    """Functions that run one candidate forward and backward on the same inputs."""
    torch.manual_seed(0)

    def draw_leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    q, k, v, do = (
        draw_leaf(B, N, H, K),
        draw_leaf(B, N, H, K),
        draw_leaf(B, N, H, V),
        torch.randn(B, N, H, V, dtype=dtype),
    )
    Q, K_, V_, dO = (draw_leaf(B, H, N, ATTENTION) for _ in range(4))
    times = (torch.rand(B, N) * 2).cumsum(1)
    common: dict[str, Any] = {
        "log_decay": DECAY,
        "core_precision": "bf16" if dtype == torch.bfloat16 else "fp32",
    }

    def make_call(**options: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(retention(q, k, v, **common, **options), (q, k, v), do)

    square = torch.randn(SQUARE, SQUARE, dtype=dtype)
    return {
        "matrix product": lambda: square @ square,
        "chunkwise": make_call(form="chunkwise"),
        "chunkwise, backward": make_call(form="chunkwise", direction="backward"),
        "chunkwise, irregular clock": make_call(form="chunkwise", times=times),
        "parallel": make_call(form="parallel"),
        "parallel, irregular clock": make_call(form="parallel", times=times),
        "loop over chunks": lambda: torch.autograd.grad(loop_over_chunks(q, k, v), (q, k, v), do),
        "softmax": lambda: torch.autograd.grad(
            scaled_dot_product_attention(Q, K_, V_, is_causal=True), (Q, K_, V_), dO
        ),
    }


def time_short(lengths: tuple[int, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Case -> median CPU seconds of `auto` and of both forms, 1,500 tokens a call."""
    taken = {}
    for name, (heads, keys, values) in SHORT.items():
        for length in lengths:
            torch.manual_seed(0)
            q, k, v, do = (
                torch.randn(1500 // length, length, heads, width, requires_grad=True)
                for width in (keys, keys, values, values)
            )

            def run_once(form: str, q: Any = q, k: Any = k, v: Any = v, do: Any = do) -> Any:
                o = retention(q, k, v, log_decay=DECAY[: q.shape[2]], form=form)
                return torch.autograd.grad(o, (q, k, v), do)

            forms = ("auto", "parallel", "chunkwise")
            calls = {form: functools.partial(run_once, form) for form in forms}
            repeats = dict.fromkeys(forms, 3)
            taken[f"{name}, N {length}"] = time_calls(calls, rounds, repeats)
    return taken


def measure_peak_here(B: int, N: int, name: str) -> float:
    """Peak MiB above the inputs of one forward + backward; for a fresh process."""
    small = make_candidates(1, 256)
    small[name]()  # code and thread-local buffers are loaded
    run = make_candidates(B, N)
    before = reset_peak()
    kept = run[name]()
    peak = read_memory("VmHWM") - before
    del kept
    return peak


def measure_peak(B: int, N: int, name: str) -> float:
    """`measure_peak_here` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(B), str(N), name],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def fit_slope(values: dict[int, float]) -> float:
    """Of a line through the logarithms."""
    x, y = [math.log(n) for n in values], [math.log(v) for v in values.values()]
    return statistics.linear_regression(x, y).slope


def measure_error(core: str) -> float:
    """Largest relative L2 error of o, dq, dk, dv against the definition in float64, both directions
    and clocks, N = 375.
    """
    torch.manual_seed(0)
    dtype, N, worst = torch.bfloat16 if core == "bf16" else torch.float32, 375, 0.0
    inputs = [torch.randn(1, N, H, width).to(dtype) for width in (K, K, V, V)]
    index = torch.arange(N)
    for times in (None, (torch.rand(1, N) * 2).cumsum(1)):
        t = index[None].double() if times is None else times.double()
        gap = t[:, :, None] - t[:, None, :]
        for direction in ("forward", "backward"):
            sign, allowed = (
                (1, index[:, None] >= index)
                if direction == "forward"
                else (-1, index[:, None] <= index)
            )
            D = torch.where(
                allowed, sign * DECAY.double()[:, None, None] * gap[:, None], -math.inf
            ).exp()
            q, k, v, do = (x.double().requires_grad_() for x in inputs)
            exact = torch.einsum(
                "bhnm,bmhv->bnhv", torch.einsum("bnhk,bmhk->bhnm", q, k) * K**-0.5 * D, v
            )
            wanted = (exact, *torch.autograd.grad(exact, (q, k, v), do))
            q, k, v, do = (x.clone().requires_grad_() for x in inputs)
            options: dict[str, Any] = {
                "times": times,
                "direction": direction,
                "form": "chunkwise",
                "core_precision": core,
            }
            o = retention(q, k, v, log_decay=DECAY, **options)
            found = (o, *torch.autograd.grad(o, (q, k, v), do))
            worst = max(
                worst,
                *(
                    float((f.double() - w).detach().norm() / w.detach().norm())
                    for f, w in zip(found, wanted, strict=True)
                ),
            )
    return worst


def compare_candidates(
    cases: dict[str, tuple[int, int, torch.dtype]], rounds: int
) -> Iterator[Row]:
    """Chunkwise retention beside its peers, and its share of the rate of a matrix product."""
    for case, (B, N, dtype) in cases.items():
        of = f"B {B}, N {N:,}{', bf16 core' if dtype == torch.bfloat16 else ''}"
        pairs = [pair[1:] for pair in FASTER if pair[0] == case]
        names = {"matrix product", *(name for pair in pairs for name in pair[:2])}
        candidates = make_candidates(B, N, dtype)
        seconds = time_calls({name: candidates[name] for name in names}, rounds)
        for name, peer, least in pairs:
            times = seconds[peer] / seconds[name]
            yield Row(figure=f"{name}, {of}", peer=peer, value=times, least=least)
        rate = B * N * FLOPS / seconds["chunkwise"]
        peak = 2 * SQUARE**3 / seconds["matrix product"]
        yield Row(figure=f"share of a matrix product's rate, {of}", value=rate / peak)


def compare_forms(lengths: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """The form that `auto` takes on short sequences."""
    for name, seconds in time_short(lengths, rounds).items():
        best = min(seconds["parallel"], seconds["chunkwise"])
        times = best / seconds["auto"]
        yield Row(figure=f"auto, {name}", peer="the faster form", value=times, least=CHOICE)
        times = seconds["parallel"] / seconds["chunkwise"]
        yield Row(figure=f"chunkwise, {name}", peer="parallel", value=times)


def measure_growth(lengths: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Slopes of time and memory over the length."""
    runs = {str(n): make_candidates(1, n)["chunkwise"] for n in lengths}
    seconds = time_calls(runs, rounds, {str(n): lengths[-1] // n for n in lengths})
    of = f"N {lengths[0]:,} to {lengths[-1]:,}"
    slope = fit_slope({int(n): one for n, one in seconds.items()})
    yield Row(figure=f"exponent of time, {of}", value=slope, most=SLOPE)
    slope = fit_slope({n: measure_peak(1, n, "chunkwise") for n in lengths})
    yield Row(figure=f"exponent of memory, {of}", value=slope, most=SLOPE)


def compare_memory(B: int, N: int) -> Iterator[Row]:
    """Peaks beside those of the peers."""
    peak = {name: measure_peak(B, N, name) for name in ("chunkwise", "parallel", "softmax")}
    for peer, least in (("parallel", 3.0), ("softmax", None)):
        times = peak[peer] / peak["chunkwise"]
        yield Row(figure=f"peak memory, B {B}, N {N}", peer=peer, value=times, least=least)


def measure(*, quick: bool) -> Iterator[Row]:
    """All rows."""
    rounds = 1 if quick else 7
    yield from compare_candidates(QUICK_CASES if quick else CASES, rounds)
    yield from compare_forms(SHORT_LENGTHS[:1] if quick else SHORT_LENGTHS, rounds)
    yield from measure_growth(LENGTHS[:2] if quick else LENGTHS, rounds)
    yield from compare_memory(*((1, 256) if quick else (16, 752)))
    for core, most in ERRORS.items():
        error = measure_error(core)
        yield Row(figure=f"relative error to float64, {core} core", value=error, most=most)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "short sequences, one round")
    parser.add_argument("--peak", nargs=3, metavar=("B", "N", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(measure_peak_here(int(options.peak[0]), int(options.peak[1]), options.peak[2]))
        return 0
    title = f"retention, {H} heads of {K} / {V}, forward and backward"
    return report(title, measure(quick=options.quick), options)


if __name__ == "__main__":
    sys.exit(main())
