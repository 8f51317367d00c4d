"""One training step and inference of every model on the same windows, relative to GPT.

    python benchmarks/models.py                                  # preset tiny, all models, under ten minutes on two cores
    python benchmarks/models.py --preset 7.5m --models bitimelygpt gpt patchtst --rows 4
    python benchmarks/models.py --write                          # also bitimely_core/models/costs.toml, which `bitimely list models` shows

Each model runs in a process of its own: median CPU seconds of a step (its own objective, forward
and backward; models without one: a supervised loss) and of a forward pass without gradients, peak
resident memory of the first step above that of the built model. Float32, random windows; signals of
1,000 samples x 7 channels, for models that read events alone 254 codes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from side_by_side import Row, make_parser, read_memory, report, reset_peak

CHANNELS, LENGTH = 7, 1000
COSTS = Path(__file__).parents[1] / "bitimely_core" / "models" / "costs.toml"


def measure_child(name: str, preset: str, rows: int, rounds: int) -> dict[str, Any]:
    """Costs of one model."""
    import torch

    from bitimely_core import heads, models, objectives, registry
    from bitimely_core.types import Batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = registry.models[name].facts
    events = "regular" not in facts.input
    if events:
        codes = torch.randint(5, 52, (rows, 254))
        times = torch.rand(rows, 254).cumsum(1)
        batch = Batch(
            codes,
            times,
            torch.ones(rows, 254, dtype=torch.bool),
            target=torch.zeros(rows, dtype=torch.int64),
        )
        model = models.build(
            name,
            preset="3m" if preset != "tiny" else preset,
            codes=52,
            length=254,
            tokenizer="codes",
        )
    else:
        batch = Batch(
            torch.randn(rows, LENGTH, CHANNELS), target=torch.zeros(rows, dtype=torch.int64)
        )
        tokens = {"tokenizer": "conv"} if facts.tokenizer else {}  # a token each four samples
        model = models.build(name, preset=preset, channels=CHANNELS, length=LENGTH, **tokens)
    supervised = facts.objective == "none"
    network: torch.nn.Module = heads.Classifier(model, outputs=5) if supervised else model
    objective: Any = heads.cross_entropy if supervised else objectives.get(facts.objective)

    def run_step() -> None:
        network.zero_grad()
        objective(network, batch, torch.Generator().manual_seed(0))["loss"].backward()

    def run_forward() -> None:
        with torch.inference_mode():
            model(batch)

    before = reset_peak()
    network.train()
    run_step()
    peak = read_memory("VmHWM") - before
    costs: dict[str, list[float]] = {"step": [], "forward": []}
    for _ in range(rounds):
        for key, call in (("step", run_step), ("forward", run_forward)):
            network.train(key == "step")
            begun = time.process_time()
            call()
            costs[key].append(time.process_time() - begun)
    seconds = {key: statistics.median(values) * 1000 / rows for key, values in costs.items()}
    return {
        "name": name,
        "parameters": models.count_parameters(model),
        "train": seconds["step"],
        "infer": seconds["forward"],
        "mib": peak,
        "events": events,
    }


def measure_model(name: str, preset: str, rows: int, rounds: int) -> dict[str, Any]:
    """`measure_child` in a process of its own."""
    arguments = ["--child", name, "--preset", preset, "--rows", str(rows), "--rounds", str(rounds)]
    run = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise SystemExit(f"{name}: {run.stderr.strip().splitlines()[-1]}")
    costs: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return costs


def compare(names: list[str], found: dict[str, dict[str, Any]], *size: Any) -> Iterator[Row]:
    """Rows of each model beside GPT; its costs are added to `found`."""
    for name in dict.fromkeys(["gpt", *names]):
        found[name] = costs = measure_model(name, *size)
        what = "sequences" if costs["events"] else "windows"
        for key, of in (("train", "step"), ("infer", "forward pass")):
            amount = f"{name}, {of}, per 1,000 {what}"
            yield Row(figure=amount, value=costs[key], unit="CPU s")
            if name != "gpt":
                ratio = found["gpt"][key] / costs[key]
                yield Row(figure=f"{name}, {of}", peer="gpt", value=ratio)
        if name != "gpt":
            ratio = found["gpt"]["mib"] / max(costs["mib"], 1)
            least = 0.91 if (name, size[0]) == ("bitimelygpt", "18m") else None
            yield Row(figure=f"{name}, peak memory of a step", peer="gpt", value=ratio, least=least)


def write_costs(preset: str, found: dict[str, dict[str, Any]]) -> None:
    """The table that `bitimely list models` shows."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    head = f"""# CPU seconds for 1,000 windows ({LENGTH} samples x {CHANNELS} channels; event models: 254 codes), one thread, float32.
# Written by: python benchmarks/models.py --preset {preset} --write
preset = "{preset}"
date = "{day}"
device = "one core, {platform.machine()}"
"""
    lines = [
        f"\n[models.{json.dumps(name)}]\ntrain = {one['train']:.1f}\ninfer = {one['infer']:.1f}\n"
        for name, one in found.items()
    ]
    COSTS.write_text(head + "".join(lines))


def main() -> int:
    """Measure, print, and with --write keep."""
    parser = make_parser(__doc__, "two models, two rows")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        size = (options.preset, options.rows, options.rounds)
        print(json.dumps(measure_child(options.child, *size)))
        return 0
    from bitimely_core import models, registry  # noqa: F401  registers the models

    names = options.models or list(registry.models)
    if options.quick:
        names, options.rows, options.rounds = options.models or ["bitimelygpt"], 2, 1
    found: dict[str, dict[str, Any]] = {}
    rows = compare(names, found, options.preset, options.rows, options.rounds)
    code = report(f"preset {options.preset}, {options.rows} windows a step", rows, options)
    if options.write:
        write_costs(options.preset, found)
    return code


if __name__ == "__main__":
    sys.exit(main())
