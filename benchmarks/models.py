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
from pathlib import Path
from typing import Any

CHANNELS, LENGTH = 7, 1000
COSTS = Path(__file__).parents[1] / "bitimely_core" / "models" / "costs.toml"


def read_memory(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) / 1024


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

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = read_memory("VmRSS")
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


def main() -> None:
    """Measure, print, and with --write keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true", help="three models, two rows")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_child(args.child, args.preset, args.rows, args.rounds)))
        return
    from bitimely_core import models, registry  # noqa: F401  registers the models

    if args.quick:
        args.models, args.rows, args.rounds = (
            args.models or ["bitimelygpt", "patchtst", "lstm"],
            2,
            1,
        )
    names = args.models or list(registry.models)
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(["gpt", *names]):
        line = [
            sys.executable,
            __file__,
            "--child",
            name,
            "--preset",
            args.preset,
            "--rows",
            str(args.rows),
            "--rounds",
            str(args.rounds),
        ]
        run = subprocess.run(line, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{name}: failed: {run.stderr.strip().splitlines()[-1][:200]}", flush=True)
            continue
        found[name] = one = json.loads(run.stdout.splitlines()[-1])
        gpt = found.get("gpt", one)
        what = "sequences" if one["events"] else "windows"
        print(
            f"{name:12} {one['parameters']:>10,} parameters  train {one['train']:8.1f} s ({one['train'] / gpt['train']:5.2f}x gpt)  "
            f"infer {one['infer']:7.1f} s  per 1,000 {what}, {one['mib']:7.0f} MiB ({one['mib'] / max(gpt['mib'], 1):5.2f}x)",
            flush=True,
            file=sys.stderr if args.json else sys.stdout,
        )
    if args.json:
        print(json.dumps(found))
    if args.write:
        day = datetime.datetime.now(tz=datetime.UTC).date()
        head = f"""# CPU seconds for 1,000 windows ({LENGTH} samples x {CHANNELS} channels; event models: 254 codes), one thread, float32.
# Written by: python benchmarks/models.py --preset {args.preset} --write
preset = "{args.preset}"
date = "{day}"
device = "one core, {platform.machine()}"
"""
        lines = [
            f"\n[models.{json.dumps(name)}]\ntrain = {one['train']:.1f}\ninfer = {one['infer']:.1f}\n"
            for name, one in found.items()
        ]
        COSTS.write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
