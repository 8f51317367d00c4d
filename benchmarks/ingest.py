"""EDF to a verified cache, against reading the same file with MNE.

A file of 24 hours as in Sleep-EDF (3 channels at 100 Hz, 4 at 1 Hz, annotations) is made with our own writer. Rounds are interleaved:
each runs every candidate once, and medians of the CPU time (of this process and its children) are compared, since wall time on a shared
machine says little. `ingest` does more than read: it hashes source and content, computes quality figures, compresses, writes, flushes and
reads back.

    python benchmarks/ingest.py [--hours 24] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from bitimely_core import cache
from bitimely_core.batch import Annotation
from bitimely_core.formats import edf

TARGET = 6.0  # times the MB/s of mne.io.read_raw_edf(preload=True)
EEG = ("EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal")
SLOW = ("Resp oro-nasal", "EMG submental", "Temp rectal", "Event marker")


def recording(folder: Path, hours: float) -> Path:
    """A PSG and its hypnogram under their official names; the path of the PSG."""
    rng = np.random.default_rng(0)
    records = int(hours * 120)  # of 30 s
    slow = rng.normal(size=(len(EEG), records * 3000)).cumsum(axis=1)
    slow -= np.linspace(0, 1, slow.shape[1]) * slow[:, -1:]
    samples = [np.clip(40 * np.sin(drift / 30) + rng.normal(0, 60, drift.shape), -2048, 2047).astype(np.int16) for drift in slow]
    samples += [rng.integers(-500, 500, records * 30).astype(np.int16) for _ in SLOW]
    channels = [edf.Channel(name, "uV", -200.0, 200.0, -2048, 2047, 3000) for name in EEG]
    channels += [edf.Channel(name, "", -2048.0, 2047.0, -2048, 2047, 30) for name in SLOW]
    path = folder / "SC4001E0-PSG.edf"
    edf.write(path, channels, samples, duration=30.0, notes=[])
    edges = np.unique(np.append(rng.integers(1, records, 150), [0, records])) * 30.0  # as many stages as a night has
    stages = [Annotation(a, b - a, f"Sleep stage {'W1234R'[i % 6]}") for i, (a, b) in enumerate(pairwise(edges.tolist()))]
    edf.write(folder / "SC4001EC-Hypnogram.edf", [], [], notes=stages)
    return path


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of this process and its finished children."""

    def spent() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in usage)

    before = spent()
    run()
    return spent() - before


def compare(hours: float, rounds: int) -> dict[str, float]:
    """Median MB/s of source a second of CPU time, by candidate."""
    import mne

    with tempfile.TemporaryDirectory() as home:
        raw = Path(home) / "raw"
        raw.mkdir()
        psg = recording(raw, hours)
        folders = (Path(home) / f"cache-{i}" for i in count())

        def fresh() -> Path:
            folder = next(folders)
            cache.ingest("sleep-edf", raw, folder)
            return folder

        done = fresh()
        candidates: dict[str, Callable[[], object]] = {
            "mne read_raw_edf(preload=True)": lambda: mne.io.read_raw_edf(psg, preload=True, verbose="error"),
            "ingest": fresh,
            "ingest and open_cache(verify=True)": lambda: cache.open_cache(fresh()),
            "ingest again, nothing new": lambda: cache.ingest("sleep-edf", raw, done),
            "plain read of the file": psg.read_bytes,
        }
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for i in range(rounds + 1):  # the first is the warm-up
            for name, run in candidates.items():
                spent = cpu(run)
                if i:
                    seconds[name].append(spent)
        size = psg.stat().st_size / 1e6
        found = {name: size / statistics.median(times) for name, times in seconds.items()}
        return found | {"file MB": size}


def main() -> None:
    """Print the table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = compare(given.hours, given.rounds)
    size = found.pop("file MB")
    base = found["mne read_raw_edf(preload=True)"]
    ratio = found["ingest and open_cache(verify=True)"] / base
    if given.json:
        body = {"file_mb": round(size, 1), "mb_per_cpu_second": found, "times_mne": ratio, "target": TARGET, "reached": ratio >= TARGET}
        print(json.dumps(body))
        return
    print(f"EDF of {size:.1f} MB, {given.hours:g} h; median of {given.rounds} rounds, CPU time with children\n")
    print(f"| {'':36} | MB/s | times MNE |\n|{'-' * 38}|-----:|----------:|")
    for name, speed in found.items():
        print(f"| {name:36} | {speed:4.0f} | {speed / base:9.1f} |")
    print(f"\nEDF to verified cache: {ratio:.1f} times MNE, target {TARGET:g}: {'reached' if ratio >= TARGET else 'missed'}")


if __name__ == "__main__":
    main()
