"""CPU seconds of `bitimely evaluate` beside those of `import torch`, all processes with their
children.

    python benchmarks/verbs.py [--quick] [--json] [--workspace FOLDER]

Two runs of preset tiny, one with the tokens of `bitimely demo` and one with those of the preset,
trained for some steps and fine-tuned on the cohort of the demonstration (1,600 windows, 320 of them
scored; FOLDER keeps it). The first evaluation fits the baselines, the second finds them stored.
Fresh processes in turn, medians of the rounds, bytecode written before. Exit code 1 where the first
evaluation of the former takes more than 5 s (not under --quick).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CEILING = 5.0  # CPU seconds of the first evaluation
# run -> its tokens: 125 and 750 a window
KINDS = {"demo": "--set model.tokenizer=patch --set model.patch=24", "tiny": ""}
PREPARATION = (
    "ingest synthetic --size small",
    "tokenize synthetic/staging",
    *(
        f"pretrain --data synthetic/staging --preset tiny --steps 5 --run {run} {tokens}"
        for run, tokens in KINDS.items()
    ),
    *(f"finetune {run} --data synthetic/staging --epochs 1 --run {run}-staging" for run in KINDS),
)


def measure_cpu(*arguments: str) -> float:
    """User and system seconds of `python ARGUMENTS`."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def measure_verbs(workspace: Path, rounds: int) -> dict[str, float]:
    """Median CPU seconds of each kind of process."""
    verb, at = ("-m", "bitimely_cli"), ("-w", str(workspace))
    if not workspace.is_dir() or not any(workspace.iterdir()):
        for command in PREPARATION:
            measure_cpu(*verb, *command.split(), *at)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        seconds.setdefault("import torch", []).append(measure_cpu("-c", "import torch"))
        for run in KINDS:
            for name in (f"{run}, first evaluation", f"{run}, evaluation"):
                seconds.setdefault(name, []).append(
                    measure_cpu(*verb, "evaluate", f"{run}-staging", *at)
                )
            # the next run would find them beside it
            for folder in workspace.glob("runs/*/baselines"):
                shutil.rmtree(folder)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> int:
    """Measure and print."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--quick", action="store_true", help="1 round instead of 5")
    arguments.add_argument(
        "--json", action="store_true", help="one JSON object instead of the table"
    )
    arguments.add_argument("--workspace", type=Path, help="made where it is missing, and kept")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        seconds = measure_verbs(options.workspace or Path(temporary), 1 if options.quick else 5)
    if options.json:
        print(json.dumps({"cpu_seconds": seconds, "ceiling": CEILING}))
    else:
        for name, value in seconds.items():
            print(
                f"{name:<24} {value:6.2f} CPU s, {value / seconds['import torch']:5.2f} times import torch"
            )
    return 0 if options.quick or seconds["demo, first evaluation"] <= CEILING else 1


if __name__ == "__main__":
    sys.exit(main())
