"""One training step of BiTimelyGPT in bf16 against float32 on this CPU: ratios in one run.

    python benchmarks/precision.py [--quick] [--json]

CPU time of one thread, both precisions in one process, interleaved, medians. Windows of 3,000
samples of 3 channels with the default tokens, 16 a step. What bf16 costs in scores, and why `auto`
does not take it on a CPU: docs/decisions/010-bf16-on-cpus.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bitimely_core import models, objectives
from bitimely_core.types import Batch

PRESETS = ("tiny", "7.5m", "18m")
PRECISIONS = ("fp32", "bf16")


def make_step(preset: str, precision: str, rows: int) -> tuple[int, Callable[[], float]]:
    """The width of a model, and a function that runs one step and returns its CPU seconds."""
    torch.manual_seed(0)
    model = models.build(
        "bitimelygpt", preset=preset, channels=3, length=3000, core_precision=precision
    )
    batch = Batch(torch.randn(rows, 3000, 3))
    loss = objectives.get("next-previous")

    def run_step() -> float:
        model.zero_grad(set_to_none=True)
        begin = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            value = loss(model, batch, torch.Generator().manual_seed(0))["loss"]
        value.backward()
        return time.process_time() - begin

    return model.config.dim, run_step


def main() -> int:
    """Measure and print; 1 where the CPU has AMX and bf16 is slower at 18m."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step of tiny: it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    has_amx = bool(torch.cpu.get_capabilities().get("amx_bf16"))
    presets, rows, rounds = (PRESETS[:1], 2, 1) if options.quick else (PRESETS, 16, 7)
    cases = []
    for preset in presets:
        steps = {precision: make_step(preset, precision, rows) for precision in PRECISIONS}
        seconds: dict[str, list[float]] = {precision: [] for precision in steps}
        for turn in range(rounds + 1):
            for precision, (_, run_step) in steps.items():
                once = run_step()
                if turn:  # the first allocates
                    seconds[precision].append(once)
        fp32, bf16 = (statistics.median(seconds[precision]) for precision in PRECISIONS)
        width = steps["bf16"][0]
        cases.append({"preset": preset, "width": width, "ratio": fp32 / bf16})
    if options.json:
        print(json.dumps({"amx": has_amx, "torch": torch.__version__, "cases": cases}))
    else:
        print(f"float32 over bf16, forward and backward, AMX {has_amx}, torch {torch.__version__}")
        for case in cases:
            print(f"{case['preset']:6s} width {case['width']:4d}   {case['ratio']:.2f} x")
    return int(has_amx and not options.quick and cases[-1]["ratio"] < 1.0)


if __name__ == "__main__":
    sys.exit(main())
