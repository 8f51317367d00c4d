"""The retention operator against its own N x N form, against causal softmax attention and against a
plain loop over chunks.

    python benchmarks/retention.py [--quick] [--json]

Forward + backward in float32, 8 heads of key width 40 and value width 80 (preset 18m), softmax
attention with heads of width 48 (the transformers of the paper's table). CPU time of one thread,
all candidates of a case interleaved, medians of the rounds: only ratios inside one run mean
anything. Peak memory above the inputs, one fresh process a case. Exit code 1 where a floor is
missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bitimely_core.ops.retention import retention

H, K, V, ATTENTION = 8, 40, 80, 48
DECAY = torch.log1p(-torch.exp(torch.linspace(-math.log(32), -math.log(512), H)))
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of the slopes, B = 1

# row of the table: (case, slow candidate, fast candidate, floor of slow / fast)
FASTER = {
    "parallel": ("B16 N752", "parallel", "chunkwise", 5.0),
    "parallel, irregular clock": (
        "B16 N752",
        "parallel, irregular clock",
        "chunkwise, irregular clock",
        6.0,
    ),
    "loop over chunks": ("B16 N752", "loop over chunks", "chunkwise", None),
    "softmax": ("B16 N752", "softmax", "chunkwise", 1.4),
    "softmax, N4096": ("B1 N4096", "softmax", "chunkwise", 5.5),
    "softmax, bf16 core": ("B16 N752 bf16", "softmax", "chunkwise", None),
}
# (case, candidate, ceiling of candidate / plain chunkwise)
NO_DEARER = {
    "backward direction": ("B16 N752", "chunkwise, backward", 1.1),
    "irregular clock": ("B16 N752", "chunkwise, irregular clock", 1.1),
}
SLOPE, SHARE, ERRORS = 1.15, 1 / 3, {"fp32": 1e-6, "bf16": 1e-2}  # ceilings


# heads, widths of keys and values, of presets tiny and 18m, on short sequences
SHORT = {"4 heads of 16 / 32": (4, 16, 32), "8 heads of 40 / 80": (8, 40, 80)}
SHORT_LENGTHS = (32, 64, 125, 188, 250)
CHOICE = 1.25  # ceiling of the form that `auto` takes over the faster one

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


def time_calls(
    run: dict[str, Callable[[], Any]], rounds: int, repeats: dict[str, int] | None = None
) -> dict[str, float]:
    """Median CPU seconds of each function: one warm-up, then rounds in which each of them runs
    (`repeats` times).
    """
    taken: dict[str, list[float]] = {name: [] for name in run}
    for once in run.values():
        once()
    for _ in range(rounds):
        for name, once in run.items():
            times = (repeats or {}).get(name, 1)
            begin = time.process_time()
            for _ in range(times):
                once()
            taken[name].append((time.process_time() - begin) / times)
    return {name: statistics.median(each) for name, each in taken.items()}


def time_short(rounds: int) -> dict[str, dict[str, float]]:
    """Case -> median CPU seconds of `auto` and of both forms, 1,500 tokens a call."""
    taken = {}
    for name, (heads, keys, values) in SHORT.items():
        for length in SHORT_LENGTHS:
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


def read_memory(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure_peak_here(B: int, N: int, name: str) -> float:
    """Peak MiB above the inputs of one forward + backward; for a fresh process."""
    small = make_candidates(1, 256)
    small[name]()  # code and thread-local buffers are loaded
    run = make_candidates(B, N)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = read_memory("VmRSS")
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


def measure(*, quick: bool) -> dict[str, Any]:
    """All figures: `rows` of the table and the absolute numbers behind them."""
    rounds = 3 if quick else 7
    cases = {
        "B16 N752": (16, 752, torch.float32),
        "B1 N4096": (1, 4096, torch.float32),
        "B16 N752 bf16": (16, 752, torch.bfloat16),
    }
    wanted = {case: {"chunkwise", "matrix product"} for case in cases}
    for case, slow, fast, _ in FASTER.values():
        wanted[case] |= {slow, fast}
    for case, name, _ in NO_DEARER.values():
        wanted[case].add(name)
    taken = {
        case: time_calls(
            {n: f for n, f in make_candidates(*cases[case]).items() if n in wanted[case]}, rounds
        )
        for case in cases
    }

    rows: list[dict[str, Any]] = []

    def add_row(
        name: str, value: float, *, floor: float | None = None, ceiling: float | None = None
    ) -> None:
        good = (floor is None or value >= floor) and (ceiling is None or value <= ceiling)
        rows.append(
            {"name": name, "value": value, "floor": floor, "ceiling": ceiling, "pass": good}
        )

    for name, (case, slow, fast, floor) in FASTER.items():
        add_row(f"time, {name} / chunkwise", taken[case][slow] / taken[case][fast], floor=floor)
    for name, (case, candidate, ceiling) in NO_DEARER.items():
        add_row(
            f"time, {name} / chunkwise",
            taken[case][candidate] / taken[case]["chunkwise"],
            ceiling=ceiling,
        )
    for case in ("B16 N752", "B16 N752 bf16"):
        rate, peak_rate = (
            16 * 752 * FLOPS / taken[case]["chunkwise"],
            2 * SQUARE**3 / taken[case]["matrix product"],
        )
        add_row(f"share of the rate of a matrix product, {case}", rate / peak_rate)

    short = time_short(rounds)
    for name, seconds in short.items():
        best = min(seconds["parallel"], seconds["chunkwise"])
        add_row(f"time, auto / faster form, {name}", seconds["auto"] / best, ceiling=CHOICE)
        add_row(f"time, parallel / chunkwise, {name}", seconds["parallel"] / seconds["chunkwise"])

    runs = {str(n): make_candidates(1, n)["chunkwise"] for n in LENGTHS}
    by_length = {
        int(n): s
        for n, s in time_calls(runs, rounds, {str(n): LENGTHS[-1] // n for n in LENGTHS}).items()
    }
    add_row(f"slope of time, N {LENGTHS[0]} to {LENGTHS[-1]}", fit_slope(by_length), ceiling=SLOPE)

    mebibytes = {name: measure_peak(16, 752, name) for name in ("chunkwise", "parallel", "softmax")}
    add_row(
        "peak memory, chunkwise / parallel",
        mebibytes["chunkwise"] / mebibytes["parallel"],
        ceiling=SHARE,
    )
    add_row("peak memory, chunkwise / softmax", mebibytes["chunkwise"] / mebibytes["softmax"])
    memory_by_length = {n: measure_peak(1, n, "chunkwise") for n in LENGTHS}
    add_row(
        f"slope of memory, N {LENGTHS[0]} to {LENGTHS[-1]}",
        fit_slope(memory_by_length),
        ceiling=SLOPE,
    )
    for core, ceiling in ERRORS.items():
        add_row(f"relative error, {core} core", measure_error(core), ceiling=ceiling)
    return {
        "torch": torch.__version__,
        "rounds": rounds,
        "rows": rows,
        "cpu_seconds": taken,
        "cpu_seconds_short": short,
        "cpu_seconds_by_length": by_length,
        "peak_mebibytes": mebibytes,
        "peak_mebibytes_by_length": memory_by_length,
    }


def main() -> int:
    """Measure, print, and say whether all floors hold."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    arguments.add_argument(
        "--json", action="store_true", help="one JSON object instead of the table"
    )
    arguments.add_argument("--peak", nargs=3, metavar=("B", "N", "NAME"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(measure_peak_here(int(options.peak[0]), int(options.peak[1]), options.peak[2]))
        return 0
    result = measure(quick=options.quick)
    good = all(row["pass"] for row in result["rows"])
    if options.json:
        print(json.dumps(result))
        return 0 if good else 1
    print(
        f"retention, {H} heads of {K} / {V}, forward + backward, one thread, torch {result['torch']}, {result['rounds']} rounds"
    )
    for row in result["rows"]:
        bound = (
            f">= {row['floor']:.3g}"
            if row["floor"]
            else f"<= {row['ceiling']:.3g}"
            if row["ceiling"]
            else ""
        )
        print(
            f"{row['name']:52s} {row['value']:10.3g}   {bound:10s} {('PASS' if row['pass'] else 'MISSED') if bound else ''}"
        )
    milliseconds = {
        case: ", ".join(f"{n} {s * 1e3:.0f}" for n, s in each.items())
        for case, each in result["cpu_seconds"].items()
    }
    for case, text in milliseconds.items():
        print(f"{case}, CPU ms: {text}")
    print(
        "B1 chunkwise, CPU ms and peak MiB: "
        + ", ".join(
            f"N{n} {s * 1e3:.0f} {result['peak_mebibytes_by_length'][n]:.0f}"
            for n, s in result["cpu_seconds_by_length"].items()
        )
    )
    print(
        "B16 N752, peak MiB: "
        + ", ".join(f"{n} {m:.0f}" for n, m in result["peak_mebibytes"].items())
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
