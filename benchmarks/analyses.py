"""The dear analyses: shapelet search against pyts, saliency and spectra at preset 7.5m, drawing of
their reports.

    python benchmarks/analyses.py [--quick] [--json] [--pyts PYTHON] [--workspace FOLDER]

Shapelets: 32 series of 3,000 samples, half of them with a planted wave, all stretches of 100
samples whose start is a multiple of 10; CPU time of one thread. pyts wants a numpy of its own
(numba caps it): PYTHON is the interpreter of an environment that has it, for instance

    python -m venv pyts && pyts/bin/pip install pyts==0.14.1

and runs the same search (raw stretches: it knows no others); without it that comparison is skipped.
Saliency of 256 held-out windows and spectra with all controls of 32 are those of `bitimely
analyze`, on a model of preset 7.5m with patch tokens (N = 375) that was trained for one step, on
the large synthetic cohort (FOLDER keeps it): wall and CPU seconds on two threads, the report
included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import Row, make_parser, report

from bitimely_core import workflows
from bitimely_core.insight.shapelet_mining import compute_distances, information_gain
from bitimely_core.report import write_report

STEP, LENGTH = 10, 100  # samples
THEIRS = """
import json, sys, time
import numpy as np
from pyts.transformation import ShapeletTransform
x, y = np.load(sys.argv[1])["x"].astype(float), np.load(sys.argv[1])["y"]
make = lambda m, s: ShapeletTransform(n_shapelets=10**9, criterion="anova", window_sizes=[m], window_steps=[s], remove_similar=False)
make(8, 8).fit(x[:4, :40], y[:4])  # compiles
begin = time.process_time()
d = make(int(sys.argv[2]), int(sys.argv[3])).fit_transform(x, y)
np.savez(sys.argv[4], d=d.T, seconds=time.process_time() - begin)
"""


def make_series(n: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise [n, T] float32 of two classes; in the second a wave stands at a random place, in some
    too small to be found.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, samples)), np.arange(n) % 2
    wave = 4 * np.sin(np.linspace(0, 6 * np.pi, LENGTH)) * np.hanning(LENGTH)
    for i in np.flatnonzero(y):
        at = rng.integers(0, samples - LENGTH)
        x[i, at : at + LENGTH] += rng.uniform(0.0, 0.8) * wave
    return x.astype(np.float32), y


def search_shapelets(
    x: np.ndarray, y: np.ndarray, *, normalised: bool
) -> tuple[float, float, np.ndarray]:
    """CPU seconds of the distances of every candidate to every series and of their information
    gains, the best gain, and the distances.
    """
    begin = time.process_time()
    values = torch.from_numpy(x)
    candidates = values.unfold(1, LENGTH, STEP).reshape(-1, LENGTH)
    d, _ = compute_distances(values, candidates, normalised=normalised, placed=False)
    gain = float(information_gain(d, torch.from_numpy(y))[0].max())
    return time.process_time() - begin, gain, d.numpy()


def run_pyts(python: str, x: np.ndarray, y: np.ndarray) -> tuple[float, float, np.ndarray] | None:
    """The same of pyts in its own interpreter, its distances the roots of mean squares; None where
    that has no pyts.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.npz"), Path(folder, "made.npz")
        np.savez(given, x=x, y=y)
        done = subprocess.run(
            [python, "-c", THEIRS, str(given), str(LENGTH), str(STEP), str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (
                done.stderr.strip().splitlines()[-1]
                if done.stderr.strip()
                else f"exit {done.returncode}"
            )
            print(
                f"pyts is skipped: {reason} (--pyts PYTHON names an interpreter that has it)",
                file=sys.stderr,
            )
            return None
        found = np.load(made)
        gain = float(information_gain(torch.from_numpy(found["d"]), torch.from_numpy(y))[0].max())
        return float(found["seconds"]), gain, found["d"]


def time_call(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall and CPU seconds of a call, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    return time.perf_counter() - wall, time.process_time() - cpu, out


def measure_shapelets(python: str, series: int, samples: int) -> Iterator[Row]:
    """The search on raw and on standardised stretches beside that of pyts."""
    x, y = make_series(series, samples)
    pyts = run_pyts(python, x, y)
    for name in ("raw", "standardised"):
        seconds, gain, distance = search_shapelets(x, y, normalised=name == "standardised")
        figure = f"search of {len(distance):,} {name} stretches"
        yield Row(figure=figure, value=seconds, unit="CPU s")
        if pyts is None:
            continue
        their_seconds, their_gain, theirs = pyts
        yield Row(figure=figure, peer="pyts", value=their_seconds / seconds, least=40.0)
        if name == "raw":
            # all are near 1, but for a stretch and itself
            far = float(np.abs(np.sqrt(distance / LENGTH) - theirs).max())
            yield Row(figure="distances, difference from pyts", value=far, most=1e-2)
            apart = abs(gain - their_gain)
            yield Row(figure="best gain, difference from pyts", value=apart, most=1e-9)


def measure_analyses(workspace: Path, *, quick: bool) -> Iterator[Row]:
    """Saliency and spectra of a barely trained model, through the same function as the command
    line.
    """
    if not (workspace / "runs" / "bench").is_dir():
        workflows.ingest(
            "synthetic",
            None,
            workspace / "cache" / "synthetic",
            options={"size": "small" if quick else "large"},
        )
        workflows.pretrain(
            preset="tiny" if quick else "7.5m",
            flags={
                "data": {"names": ("synthetic/staging",)},
                "train": {"steps": 1, "batch_size": 2},
            },
            assignments=["model.tokenizer=patch"],
            run="bench",
            workspace=workspace,
        )
    torch.set_num_threads(2)
    for kind, sequences in {"saliency": 2 if quick else 256, "svd": 2 if quick else 32}.items():
        few = {"lengths": "1"} if quick and kind == "saliency" else {}
        wall, cpu, found = time_call(
            lambda kind=kind, n=sequences, few=few: workflows.analyze(
                kind, ["bench"], sequences=n, options=few, workspace=workspace
            )
        )
        figure = f"{kind} of {sequences} windows"
        yield Row(figure=figure, value=wall, unit="s", most=180.0)
        yield Row(figure=figure, value=cpu, unit="CPU s")
        with tempfile.TemporaryDirectory() as folder:
            page = found["page"]
            _, drawing, _ = time_call(
                lambda page=page, folder=folder: write_report(Path(folder), page)
            )
        yield Row(figure=f"page of {kind}", value=drawing, unit="CPU s", most=5.0)


def measure(python: str, workspace: Path, *, quick: bool) -> Iterator[Row]:
    """All rows."""
    yield from measure_shapelets(python, *((8, 500) if quick else (32, 3000)))
    yield from measure_analyses(workspace, quick=quick)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "small sizes")
    parser.add_argument(
        "--pyts", metavar="PYTHON", default=sys.executable, help="interpreter that has pyts"
    )
    parser.add_argument(
        "--workspace",
        type=Path,
        metavar="FOLDER",
        help="keeps the cohort and the run for the next time",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.pyts, options.workspace or Path(folder), quick=options.quick)
        return report("shapelets on one thread, analyses on two", rows, options)


if __name__ == "__main__":
    sys.exit(main())
