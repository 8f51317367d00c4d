"""One training step of preset 18m beside a GPT of the same width, in bf16, on long windows.

    python benchmarks/step.py [--quick] [--json]

CPU time of one thread, all models in one process, interleaved, medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import Row, make_parser, report, time_calls

from bitimely_core import models, objectives
from bitimely_core.types import Batch

WIDTH = {"layers": 12, "heads": 8, "dim": 320, "dropout": 0.0}
GPT = "GPT of the same width"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "glu, fp32 core": (
        "bitimelygpt",
        {**WIDTH, "value_dim": 640, "ffn_dim": 640, "ffn": "glu", "core_precision": "fp32"},
        "next-previous",
    ),
    "plain, bf16 core": (
        "bitimelygpt",
        {**WIDTH, "value_dim": 640, "ffn_dim": 640, "ffn": "plain", "core_precision": "bf16"},
        "next-previous",
    ),
    GPT: ("gpt", {**WIDTH, "value_dim": 320, "ffn_dim": 1280, "ffn": "plain"}, "next"),
}
FLOORS = {"glu, fp32 core": 1.4, "plain, bf16 core": 2.0}


def make_step(
    name: str, options: dict[str, Any], objective: str, samples: int
) -> Callable[[], None]:
    """A function that runs forward and backward once under bf16 autocast."""
    torch.manual_seed(0)
    model = models.build(name, channels=7, length=samples, **options)
    batch = Batch(torch.randn(1, samples, 7))
    loss = objectives.get(objective)

    def run_step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model, batch, torch.Generator().manual_seed(0))["loss"]
        value.backward()

    return run_step


def measure(samples: int, rounds: int) -> Iterator[Row]:
    """A row a case."""
    steps = {name: make_step(*case, samples) for name, case in CASES.items()}
    seconds = time_calls(steps, rounds)
    for name, least in FLOORS.items():
        yield Row(
            figure=f"step of 18m, {name}", peer=GPT, value=seconds[GPT] / seconds[name], least=least
        )


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__, "1,200 samples, one round").parse_args()
    torch.set_num_threads(1)
    samples, rounds = (1200, 1) if options.quick else (12_000, 5)
    return report(
        f"{samples // 4:,} tokens a window, bf16 autocast, forward and backward",
        measure(samples, rounds),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
