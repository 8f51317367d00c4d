"""One training step of BiTimelyGPT in bf16, and compiled, beside float32 on this CPU.

    python benchmarks/precision.py [--quick] [--json]

CPU time of one thread, all in one process, interleaved, medians. Windows of 3,000 samples of 3
channels, 16 a step; in bf16 with the default tokens. What bf16 costs in scores, and why `auto` does
not take it on a CPU: docs/decisions/010-bf16-on-cpus.md. Compiled with 125 and 750 tokens a window;
the first step, which compiles, does not count. More than 128 are refused on a CPU.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import Row, make_parser, report, time_calls

from bitimely_core import models, objectives
from bitimely_core.models.layers import compile_layers
from bitimely_core.types import Batch

PRESETS = ("tiny", "7.5m", "18m")
TOKENS = {125: {"tokenizer": "patch", "patch": 24}, 750: {"tokenizer": "conv"}}


def make_model(preset: str, **settings: Any) -> models.Model:
    """The same weights for the same settings."""
    torch.manual_seed(0)
    return models.build("bitimelygpt", preset=preset, channels=3, length=3000, **settings)


def make_step(model: models.Model, precision: str, rows: int) -> Callable[[], None]:
    """A function that runs one step."""
    batch = Batch(torch.randn(rows, 3000, 3))
    loss = objectives.get("next-previous")

    def run_step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            value = loss(model, batch, torch.Generator().manual_seed(0))["loss"]
        value.backward()

    return run_step


def compare_precisions(preset: str, rows: int, rounds: int) -> Row:
    """A step in bf16; at 18m it is to be no slower, where the CPU has AMX."""
    steps = {
        precision: make_step(make_model(preset, core_precision=precision), precision, rows)
        for precision in ("fp32", "bf16")
    }
    seconds = time_calls(steps, rounds)
    has_amx = bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return Row(
        figure=f"step of {preset} in bf16",
        peer="float32",
        value=seconds["fp32"] / seconds["bf16"],
        least=1.0 if has_amx and preset == "18m" else None,
    )


def compare_compiled(tokens: int, rows: int, rounds: int) -> Row:
    """A step of tiny whose layers are compiled."""
    eager, compiled = (make_model("tiny", **TOKENS[tokens]) for _ in range(2))
    steps = {"eager": make_step(eager, "fp32", rows), "compiled": make_step(compiled, "fp32", rows)}
    with compile_layers(compiled):
        seconds = time_calls(steps, rounds)
    return Row(
        figure=f"step of tiny, compiled, {tokens} tokens",
        peer="not compiled",
        value=seconds["eager"] / seconds["compiled"],
    )


def measure(*, quick: bool) -> Iterator[Row]:
    """A row a preset and a length."""
    presets, rows, rounds = (PRESETS[:1], 2, 1) if quick else (PRESETS, 16, 7)
    for preset in presets:
        yield compare_precisions(preset, rows, rounds)
    if shutil.which("g++") is not None and not quick:  # to compile takes ten seconds
        for tokens in TOKENS:
            yield compare_compiled(tokens, rows, rounds)


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__, "one step of tiny, nothing compiled").parse_args()
    torch.set_num_threads(1)
    return report("forward and backward", measure(quick=options.quick), options)


if __name__ == "__main__":
    sys.exit(main())
