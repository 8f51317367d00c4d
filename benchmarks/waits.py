"""Where users wait besides training: many small recordings, pages, the page of a workspace.

    python benchmarks/waits.py [--quick] [--json] [--recordings N]

* N and 4 N WFDB records of 10 s (N = 2,500) through `ingest`, `ingest` again and `tokenize`, each in
  a process of its own: CPU seconds, peak memory, and the exponent of the time in the number of
  records; `open_cache` and torch's loader in
  this process, the latter beside a memory map.
* Figures as SVG beside the same data drawn with matplotlib, interleaved, medians of CPU time.
* The page of a workspace with 500 runs: read for the first time, and after one run has changed.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import Row, make_parser, report, time_calls
from torch.utils.data import DataLoader, Dataset

from bitimely_core.cache import open_cache
from bitimely_core.page import BarPlot, DensityPlot, Figure, Hypnogram, Line, LinePlot, StageTrack
from bitimely_core.report.dashboard_page import ENTRIES
from bitimely_core.report.svg import draw_figure
from bitimely_core.tokens import Windows, open_tokens
from bitimely_core.workflows.dashboard import dashboard

RATE, SECONDS = 100, 10
CLASSES = ["W", "N1", "N2", "N3", "R"]


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


def measure_recordings(home: Path, count: int) -> Iterator[Row]:
    """The verbs on `count` and four times as many records."""
    measured: dict[str, list[tuple[float, float]]] = {}
    for n in (count, 4 * count):
        raw, workspace = home / f"raw{n}", str(home / f"workspace{n}")
        write_records(raw, n)
        for name in ("ingest", "ingest again"):
            measured.setdefault(name, []).append(
                run_verb("ingest", "wfdb", str(raw), "-w", workspace)
            )
        measured.setdefault("tokenize", []).append(run_verb("tokenize", "wfdb", "-w", workspace))
    ceilings = {"ingest": 4.0, "ingest again": 2.0, "tokenize": 1.2}  # CPU ms a record
    for name, ((small, _), (large, peak)) in measured.items():
        exponent = math.log(large / small, 4)
        yield Row(figure=f"{name}: exponent of the time", value=exponent, most=1.15)
        spent = 250 * large / count
        yield Row(figure=f"{name}: a record", value=spent, unit="CPU ms", most=ceilings[name])
        yield Row(figure=f"{name}: peak memory", value=peak, unit="MiB", most=400.0)
    cache = home / f"workspace{4 * count}" / "cache" / "wfdb"
    opening = time_calls({"open": lambda: open_cache(cache)}, 5)["open"]
    yield Row(figure="open_cache", value=opening, unit="CPU s", most=0.3)
    yield from measure_loader(home / f"workspace{4 * count}" / "tokens" / "wfdb")


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


def measure_loader(folder: Path) -> Iterator[Row]:
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
    speed = len(windows) / seconds["batches"]
    yield Row(figure="DataLoader, windows a CPU second", value=speed, least=75_000)
    for peer, name, least in (("naive memory map", "map", 0.6), ("single rows", "rows", 3.0)):
        times = seconds[name] / seconds["batches"]
        yield Row(figure="DataLoader over tokens", peer=peer, value=times, least=least)


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


def measure_figures(rounds: int) -> Iterator[Row]:
    """How many times as long matplotlib takes."""
    for name, (figure, peer) in list_figures().items():
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(draw_figure, figure),
            "matplotlib": partial(draw_peer, peer),
        }
        seconds = time_calls(calls, rounds)
        times = seconds["matplotlib"] / seconds["ours"]
        yield Row(figure=f"figure: {name}", peer="matplotlib", value=times, least=5.0)


def measure_dashboard(home: Path, runs: int, rounds: int) -> Iterator[Row]:
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
    page = f"page of {runs} runs after one changed"
    yield Row(figure=page, value=seconds["changed"], unit="CPU s", most=0.3)
    times = seconds["all"] / seconds["changed"]
    yield Row(figure=page, peer="reading all of them", value=times, least=2.0)


def measure(home: Path, count: int, runs: int, rounds: int) -> Iterator[Row]:
    """All rows."""
    yield from measure_figures(rounds)
    yield from measure_dashboard(home, runs, rounds)
    yield from measure_recordings(home, count)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "25 and 100 records, 20 runs, one round")
    parser.add_argument("--recordings", type=int, default=2500)
    options = parser.parse_args()
    count, runs, rounds = (25, 20, 1) if options.quick else (options.recordings, 500, 7)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), count, runs, rounds)
        return report(f"{count:,} and {4 * count:,} records", rows, options)


if __name__ == "__main__":
    sys.exit(main())
