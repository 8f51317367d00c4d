"""One training step of preset 18m against a GPT of the same width, in bf16, on long windows: ratios
of tokens a second in one run.

    python benchmarks/step.py [--quick] [--json]

CPU time of one thread, both models in one process, interleaved, medians. Floors: 1.4 with the
defaults (glu, fp32 core), 2.0 with ffn plain and a bf16 core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bitimely_core import models, objectives
from bitimely_core.types import Batch

WIDTH = {"layers": 12, "heads": 8, "dim": 320, "dropout": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bitimelygpt glu, fp32 core": (
        "bitimelygpt",
        {**WIDTH, "value_dim": 640, "ffn_dim": 640, "ffn": "glu", "core_precision": "fp32"},
        "next-previous",
    ),
    "bitimelygpt plain, bf16 core": (
        "bitimelygpt",
        {**WIDTH, "value_dim": 640, "ffn_dim": 640, "ffn": "plain", "core_precision": "bf16"},
        "next-previous",
    ),
    "gpt, same width": (
        "gpt",
        {**WIDTH, "value_dim": 320, "ffn_dim": 1280, "ffn": "plain"},
        "next",
    ),
}
FLOORS = {"bitimelygpt glu, fp32 core": 1.4, "bitimelygpt plain, bf16 core": 2.0}


def make_step(
    name: str, options: dict[str, Any], objective: str, samples: int, rows: int
) -> Callable[[], float]:
    """A function that runs forward and backward once under bf16 autocast and returns its CPU
    seconds.
    """
    torch.manual_seed(0)
    model = models.build(name, channels=7, length=samples, **options)
    batch = Batch(torch.randn(rows, samples, 7))
    loss = objectives.get(objective)

    def run_step() -> float:
        model.zero_grad(set_to_none=True)
        begin = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model, batch, torch.Generator().manual_seed(0))["loss"]
        value.backward()
        return time.process_time() - begin

    return run_step


def main() -> int:
    """Measure and print; 1 where a floor is missed (not under --quick, whose windows are too short
    for it).
    """
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--quick",
        action="store_true",
        help="3,000 samples and one round: shows that it runs, not the floors",
    )
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    samples, rows, rounds = (3000, 1, 1) if options.quick else (12_000, 1, 5)
    steps = {name: make_step(*case, samples, rows) for name, case in CASES.items()}
    for once in steps.values():
        once()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, once in steps.items():
            seconds[name].append(once())
    tokens = rows * -(-samples // 4)
    rate = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    base = rate["gpt, same width"]
    result = {
        name: {"tokens_per_cpu_second": r, "ratio": r / base, "floor": FLOORS.get(name)}
        for name, r in rate.items()
    }
    missed = int(
        not options.quick and any(r["floor"] and r["ratio"] < r["floor"] for r in result.values())
    )
    if options.json:
        print(
            json.dumps(
                {"samples": samples, "tokens": tokens, "torch": torch.__version__, "cases": result}
            )
        )
        return missed
    print(
        f"{samples} samples = {tokens} tokens a window, bf16 autocast, forward + backward, torch {torch.__version__}"
    )
    for name, r in result.items():
        print(
            f"{name:32s} {r['tokens_per_cpu_second']:8.0f} tokens/s   {r['ratio']:.2f} x"
            + (f"   floor {r['floor']}" if r["floor"] else "")
        )
    return missed


if __name__ == "__main__":
    sys.exit(main())
