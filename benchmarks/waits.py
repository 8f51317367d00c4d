"""Where users wait besides training: many small recordings, pages, the page of a workspace.

    python benchmarks/waits.py [--quick] [--json] [--recordings N]

* N and 4 N WFDB records of 10 s (N = 2,500) through `ingest`, `ingest` again and `tokenize`, each in
  a process of its own: CPU seconds, peak memory, and the exponent of the time in the number of
  records; `open_cache` and torch's loader in
  this process, the latter beside a memory map.
* Figures as SVG beside the same data drawn with matplotlib, interleaved, medians of CPU time.
* The page of a workspace with 500 runs: read for the first time, and after one run has changed.

Exit code 1 where a bound is missed (not under --quick).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bitimely_core.cache import open_cache
from bitimely_core.page import BarPlot, DensityPlot, Figure, Hypnogram, Line, LinePlot, StageTrack
from bitimely_core.report.dashboard_page import ENTRIES
from bitimely_core.report.svg import draw_figure
from bitimely_core.tokens import Windows, open_tokens
from bitimely_core.workflows.dashboard import dashboard

RATE, SECONDS = 100, 10
CLASSES = ["W", "N1", "N2", "N3", "R"]


class Bound(NamedTuple):
    """A measured value with what it must not pass."""

    name: str
    value: float
    limit: float
    is_floor: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the value is on the right side."""
        return self.value >= self.limit if self.is_floor else self.value <= self.limit


def write_records(folder: Path, count: int) -> None:
    """WFDB records of two channels of int16."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    samples = RATE * SECONDS
    for k in range(count):
        name = f"r{k:06d}"
        values = rng.integers(-20, 21, (samples, 2)).cumsum(0).astype("<i2")
        sums = [
            int(np.int16(column.sum(dtype=np.int64) & 0xFFFF)) for column in values.T.view("u2")
        ]
        (folder / f"{name}.dat").write_bytes(values.tobytes())
        lines = [
            f"{name}.dat 16 1000/mV 16 0 {first} {total} 0 {channel}"
            for first, total, channel in zip(values[0], sums, ("I", "II"), strict=True)
        ]
        head = f"{name} 2 {RATE} {samples}"
        (folder / f"{name}.hea").write_text("\n".join([head, *lines]) + "\n")


def run_verb(*arguments: str) -> tuple[float, float]:
    """CPU seconds and peak MiB of a verb."""
    command = [sys.executable, "-m", "bitimely_cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bitimely {' '.join(arguments)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def time_calls(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each call, in turns, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def measure_recordings(home: Path, count: int) -> list[Bound]:
    """The verbs on `count` and four times as many records."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for n in (count, 4 * count):
        raw, workspace = home / f"raw{n}", str(home / f"workspace{n}")
        write_records(raw, n)
        for name in ("ingest", "ingest again"):
            rows.setdefault(name, []).append(run_verb("ingest", "wfdb", str(raw), "-w", workspace))
        rows.setdefault("tokenize", []).append(run_verb("tokenize", "wfdb", "-w", workspace))
    cache = home / f"workspace{4 * count}" / "cache" / "wfdb"
    opening = time_calls({"open": lambda: open_cache(cache)}, 5)["open"]
    bounds = []
    limits = {"ingest": 4.0, "ingest again": 2.0, "tokenize": 1.2}  # CPU ms a record
    for name, ((small, _), (large, peak)) in rows.items():
        bounds.append(Bound(f"{name}: exponent of the time", math.log(large / small, 4), 1.15))
        bounds.append(Bound(f"{name}: CPU ms a record", 250 * large / count, limits[name]))
        bounds.append(Bound(f"{name}: peak MiB", peak, 400.0))
    tokens = home / f"workspace{4 * count}" / "tokens" / "wfdb"
    return [*bounds, Bound("open_cache: CPU s", opening, 0.3), *measure_loader(tokens)]


class MappedRows(Dataset[torch.Tensor]):
    """What people write: a memory map of the windows [n, T, V], a row at a time."""

    def __init__(self, path: Path) -> None:
        self.block = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, row: int) -> torch.Tensor:
        """A window as float32."""
        return torch.from_numpy(self.block[row].astype(np.float32))


class SingleRows(Dataset[torch.Tensor]):
    """The token set a row at a time."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> torch.Tensor:
        """A window."""
        return self.windows[row]


def measure_loader(folder: Path) -> list[Bound]:
    """Windows that torch's loader reads in shuffled batches of 64."""
    windows = open_tokens(folder, verify=False)
    assert isinstance(windows, Windows)
    blocks = [shard for shard in windows.shards if isinstance(shard, np.ndarray)]
    np.save(folder.parent / "map.npy", np.concatenate(blocks))
    sets: dict[str, Dataset[Any]] = {
        "batches": windows,
        "rows": SingleRows(windows),
        "map": MappedRows(folder.parent / "map.npy"),
    }
    calls = {name: partial(read_batches, rows) for name, rows in sets.items()}
    seconds = time_calls(calls, 3)
    speed, of_map = len(windows) / seconds["batches"], seconds["map"] / seconds["batches"]
    of_rows = seconds["rows"] / seconds["batches"]
    return [
        Bound("loader: windows a CPU second", speed, 75_000, is_floor=True),
        Bound("loader: tokens over a naive memory map", of_map, 0.6, is_floor=True),
        Bound("loader: batches over single rows", of_rows, 3.0, is_floor=True),
    ]


def read_batches(rows: Dataset[Any]) -> int:
    """Windows of all batches of an epoch."""
    return sum(map(len, DataLoader(rows, batch_size=64, shuffle=True)))


def list_figures() -> dict[str, tuple[Figure, Callable[[Any], object]]]:
    """Figures, each with the least that matplotlib needs for the same."""
    rng = np.random.default_rng(0)
    stages = np.repeat(rng.integers(0, 5, 80), 12)
    shares, hours = rng.dirichlet(np.ones(5), 960), np.arange(960) / 120
    x, y = np.arange(400), rng.normal(size=400).cumsum()
    data: dict[str, Any] = {
        "bars": BarPlot(["a", "b", "c"], [0.2, 0.4, 0.3]),
        "curve": LinePlot([Line("loss", x, y)], "step", "loss"),
        "hypnogram": Hypnogram(30.0, [StageTrack("night", stages)], CLASSES),
        "hypnodensity": DensityPlot(30.0, shares, CLASSES),
    }
    peers: dict[str, Callable[[Any], object]] = {
        "bars": lambda axes: axes.barh(["a", "b", "c"], [0.2, 0.4, 0.3]),
        "curve": lambda axes: axes.plot(x, y),
        "hypnogram": lambda axes: axes.step(hours, stages),
        "hypnodensity": lambda axes: axes.stackplot(hours, shares.T),
    }
    return {name: (Figure(name, "", "", data[name]), peers[name]) for name in data}


def draw_peer(draw: Callable[[Any], object]) -> None:
    """One figure with matplotlib as SVG, in the layout that pages of bitimely had."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.5, 2.5), layout="constrained")
    draw(canvas.add_subplot())
    canvas.savefig(io.BytesIO(), format="svg")


def measure_figures(rounds: int) -> list[Bound]:
    """How many times as long matplotlib takes."""
    bounds = []
    for name, (figure, peer) in list_figures().items():
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(draw_figure, figure),
            "matplotlib": partial(draw_peer, peer),
        }
        seconds = time_calls(calls, rounds)
        ratio = seconds["matplotlib"] / seconds["ours"]
        bounds.append(Bound(f"{name}: matplotlib / bitimely", ratio, 5.0, is_floor=True))
    return bounds


def measure_dashboard(home: Path, runs: int, rounds: int) -> list[Bound]:
    """The page of a workspace whose runs are all new, and after a change of one."""
    workspace = home / "dashboard"
    run_verb("ingest", "synthetic", "--size", "small", "-w", str(workspace))
    training = ["pretrain", "--preset", "tiny", "--steps", "2", "--run", "r0"]
    run_verb(*training, "-w", str(workspace))
    files = [path for path in (workspace / "runs" / "r0").iterdir() if path.is_file()]
    for k in range(1, runs):
        folder = workspace / "runs" / f"r{k}"
        folder.mkdir()
        for path in files:
            shutil.copy(path, folder)

    def read_all() -> None:
        (workspace / ENTRIES).unlink(missing_ok=True)
        dashboard(workspace=workspace)

    def read_changed() -> None:
        (workspace / "runs" / "r0" / "run.json").touch()
        dashboard(workspace=workspace)

    seconds = time_calls({"all": read_all, "changed": read_changed}, rounds)
    ratio = seconds["all"] / seconds["changed"]
    return [
        Bound(f"page of {runs} runs after one changed: CPU s", seconds["changed"], 0.3),
        Bound(f"page of {runs} runs: all read / one read", ratio, 2.0, is_floor=True),
    ]


def main() -> int:
    """Measure and print."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--quick", action="store_true", help="100 records, 20 runs, 1 round")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--recordings", type=int, default=2500)
    options = arguments.parse_args()
    count, runs, rounds = (100, 20, 1) if options.quick else (options.recordings, 500, 7)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        bounds = [
            *measure_figures(rounds),
            *measure_dashboard(home, runs, rounds),
            *measure_recordings(home, count),
        ]
    if options.json:
        print(
            json.dumps(
                {bound.name: {"value": bound.value, "bound": bound.limit} for bound in bounds}
            )
        )
    else:
        for bound in bounds:
            sign, missed = ">=" if bound.is_floor else "<=", "" if bound.is_kept else "  missed"
            print(f"{bound.name:<46} {bound.value:9.3f}   bound {sign} {bound.limit:g}{missed}")
    return 0 if options.quick or all(bound.is_kept for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
