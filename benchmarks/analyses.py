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

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitimely_core import report, workflows
from bitimely_core.insight.shapelet_mining import compute_distances, information_gain

STEP, LENGTH = 10, 100  # samples
# times less CPU time than pyts; seconds of an analysis; seconds of a page
LEAST, MOST, DRAWING = 40.0, 180.0, 5.0
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
) -> tuple[dict[str, float], np.ndarray]:
    """CPU seconds of the distances of every candidate to every series and of their information
    gains, the best gain; and the distances.
    """
    begin = time.process_time()
    values = torch.from_numpy(x)
    candidates = values.unfold(1, LENGTH, STEP).reshape(-1, LENGTH)
    d, _ = compute_distances(values, candidates, normalised=normalised, placed=False)
    gain = float(information_gain(d, torch.from_numpy(y))[0].max())
    return {
        "cpu_seconds": time.process_time() - begin,
        "best_gain": gain,
        "candidates": len(candidates),
    }, d.numpy()


def run_pyts(
    python: str, x: np.ndarray, y: np.ndarray
) -> tuple[dict[str, float], np.ndarray] | None:
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
        return {
            "cpu_seconds": float(found["seconds"]),
            "best_gain": gain,
            "candidates": len(found["d"]),
        }, found["d"]


def time_call(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Wall and CPU seconds of a call, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    return {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }, out


def time_analyses(workspace: Path, *, quick: bool) -> dict[str, dict[str, float]]:
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
    out: dict[str, dict[str, float]] = {}
    for kind, sequences in {"saliency": 16 if quick else 256, "svd": 2 if quick else 32}.items():
        out[kind], found = time_call(
            lambda kind=kind, n=sequences: workflows.analyze(
                kind, ["bench"], sequences=n, workspace=workspace
            )
        )
        looked = found["summary"]["options"]
        out[kind]["sequences"] = (
            looked["windows"] if kind == "saliency" else looked["runs"]["bench"]["sequences"]
        )
        with tempfile.TemporaryDirectory() as folder:
            drawn, _ = time_call(
                lambda page=found["page"], folder=folder: report.write_report(Path(folder), page)
            )
        out[kind]["drawing_cpu_seconds"] = drawn["cpu_seconds"]
    return out


def main() -> int:
    """Measure and print; 1 where a bound is missed (not under --quick, whose sizes are too small
    for them).
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it runs, not the bounds"
    )
    parser.add_argument("--json", action="store_true")
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
    x, y = make_series(*((8, 500) if options.quick else (32, 3000)))
    pyts = run_pyts(options.pyts, x, y)
    raw, distance = search_shapelets(x, y, normalised=False)
    result: dict[str, Any] = {
        "standardised": search_shapelets(x, y, normalised=True)[0],
        "raw": raw,
        "pyts": pyts and pyts[0],
    }
    if pyts is not None:
        raw["farthest_from_pyts"] = float(
            np.abs(np.sqrt(distance / LENGTH) - pyts[1]).max()
        )  # all are near 1, but for a stretch and itself
    with tempfile.TemporaryDirectory() as folder:
        result |= time_analyses(options.workspace or Path(folder), quick=options.quick)
    failed = [
        f"{kind}: {result[kind]['wall_seconds']:.0f} s"
        for kind in ("saliency", "svd")
        if result[kind]["wall_seconds"] > MOST
    ]
    failed += [
        f"page of {kind}: {s:.1f} s"
        for kind in ("saliency", "svd")
        if (s := result[kind]["drawing_cpu_seconds"]) > DRAWING
    ]
    if result["pyts"]:
        for name in ("standardised", "raw"):
            times = result[name]["times_pyts"] = (
                result["pyts"]["cpu_seconds"] / result[name]["cpu_seconds"]
            )
            failed += [f"shapelets, {name}: {times:.0f} times pyts"] if times < LEAST else []
        if (
            abs(raw["best_gain"] - result["pyts"]["best_gain"]) > 1e-9
            or raw["farthest_from_pyts"] > 1e-2
        ):
            failed.append("the search on raw stretches is not that of pyts")
    failed = [] if options.quick else failed
    if options.json:
        print(json.dumps({"torch": torch.__version__, **result, "missed": failed}))
    else:
        for name, row in result.items():
            if row:
                print(
                    f"{name:14s}" + "   ".join(f"{key} {value:.4g}" for key, value in row.items())
                )
        print(
            "bounds: "
            + (
                "not looked at"
                if options.quick
                else "; ".join(["missed", *failed])
                if failed
                else "held"
            )
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
