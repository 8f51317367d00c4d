"""CPU seconds of `bitimely evaluate` and `bitimely report` beside those of `import torch`, all
processes with their children.

    python benchmarks/verbs.py [--quick] [--json] [--workspace FOLDER]

Two runs of preset tiny, one with the tokens of `bitimely demo` and one with those of the preset,
trained and fine-tuned for some steps on the cohort of the demonstration (1,600 windows, 320 of them
scored; FOLDER keeps it). The first evaluation fits the baselines, a later one finds their
predictions and those of the run stored; the report is of all scored runs. Fresh processes in turn,
medians of the rounds, bytecode written before.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from side_by_side import Row, make_parser, report

CEILINGS = {"first": 5.0, "later": 2.0}  # evaluation -> its most CPU seconds
# run -> its tokens: 125 and 20 a window
KINDS = {"demo": "--set model.tokenizer=patch --set model.patch=24", "tiny": ""}


def list_preparation(kinds: list[str]) -> Iterator[str]:
    """What is typed before the first evaluation."""
    yield "ingest synthetic --size small"
    yield "tokenize synthetic/staging"
    for run in kinds:
        tokens = KINDS[run]
        yield f"pretrain --data synthetic/staging --preset tiny --steps 5 --run {run} {tokens}"
        yield f"finetune {run} --data synthetic/staging --steps 5 --run {run}-staging"


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


def measure_verbs(workspace: Path, kinds: list[str], rounds: int) -> Iterator[Row]:
    """Median CPU seconds of each kind of process; of several rounds the first does not count."""
    verb, at = ("-m", "bitimely_cli"), ("-w", str(workspace))
    if not workspace.is_dir() or not any(workspace.iterdir()):
        for command in list_preparation(kinds):
            measure_cpu(*verb, *command.split(), *at)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds.setdefault("import torch", []).append(measure_cpu("-c", "import torch"))
        for run in kinds:
            for turn in CEILINGS:
                spent = measure_cpu(*verb, "evaluate", f"{run}-staging", *at)
                seconds.setdefault(f"evaluate {run}, {turn}", []).append(spent)
            # the next run would find them beside it
            for folder in workspace.glob("runs/*/baselines"):
                shutil.rmtree(folder)
        spent = measure_cpu(*verb, "report", *(f"{run}-staging" for run in kinds), *at)
        seconds.setdefault("report", []).append(spent)
    median = {name: statistics.median(values[1:] or values) for name, values in seconds.items()}
    least = median.pop("import torch")
    for name, spent in median.items():
        ceiling = CEILINGS.get(name.rpartition(", ")[2])
        yield Row(figure=name, value=spent, unit="CPU s", most=ceiling)
        yield Row(figure=name, peer="import torch", value=least / spent)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "one run, one round")
    parser.add_argument("--workspace", type=Path, help="made where it is missing, and kept")
    options = parser.parse_args()
    kinds, rounds = (["demo"], 1) if options.quick else (list(KINDS), 6)
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure_verbs(options.workspace or Path(temporary), kinds, rounds)
        return report("processes with their children", rows, options)


if __name__ == "__main__":
    sys.exit(main())
