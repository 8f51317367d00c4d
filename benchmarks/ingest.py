"""EDF and WFDB to a verified cache, against reading the same files with MNE and wfdb.

A file of 24 hours as in Sleep-EDF (3 channels at 100 Hz, 4 at 1 Hz, annotations) and a folder of
1,500 records as in PTB-XL (12 leads, 10 s at 100 Hz, with their table) are made. Rounds are
interleaved: each runs every candidate once, and medians are compared. For the EDF file that of the
CPU time (of this process and its children), since wall time on a shared machine says little; for
the folder that of the wall time, since `--jobs 2` against a loop over `wfdb.rdrecord` is what a
user waits for (the machine must have two cores to spare), with the CPU time beside it. `ingest`
does more than read: it hashes source and content, compares checksums, computes quality figures,
compresses, writes and flushes.

    python benchmarks/ingest.py [--hours 24] [--records 1500] [--rounds 5] [--quick] [--json]
"""

from __future__ import annotations

import csv
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from itertools import count as count_up
from pathlib import Path

import numpy as np
from side_by_side import Row, make_parser, report

from bitimely_core import cache
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.types import Annotation

LEADS = ("I", "II", "III", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6")
CACHE = "ingest and open_cache(verify=True)"
# peer -> the least ratio of its CPU time to that of a verified cache
PEERS = {
    "mne read_raw_edf(preload=True)": 6.0,
    "mne, the three at 100 Hz": 2.0,
    "pyedflib readSignal": 6.0,
}
MNE, MNE_FAST, PYEDFLIB = PEERS
EEG = ("EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal")
SLOW = ("Resp oro-nasal", "EMG submental", "Temp rectal", "Event marker")


def write_recording(folder: Path, hours: float, night: int = 400) -> Path:
    """A PSG and its hypnogram under their official names; the path of the PSG."""
    rng = np.random.default_rng(night)
    records = int(hours * 120)  # of 30 s
    slow = rng.normal(size=(len(EEG), records * 3000)).cumsum(axis=1)
    slow -= np.linspace(0, 1, slow.shape[1]) * slow[:, -1:]
    samples = [
        np.clip(40 * np.sin(drift / 30) + rng.normal(0, 60, drift.shape), -2048, 2047).astype(
            np.int16
        )
        for drift in slow
    ]
    samples += [rng.integers(-500, 500, records * 30).astype(np.int16) for _ in SLOW]
    channels = [edf_header.EdfChannel(name, "uV", -200.0, 200.0, -2048, 2047, 3000) for name in EEG]
    channels += [edf_header.EdfChannel(name, "", -2048.0, 2047.0, -2048, 2047, 30) for name in SLOW]
    path = folder / f"SC{night}1E0-PSG.edf"
    edf_writer.write_edf(path, channels, samples, duration=30.0, notes=[])
    # as many stages as a night has
    edges = np.unique(np.append(rng.integers(1, records, 150), [0, records])) * 30.0
    stages = [
        Annotation(a, b - a, f"Sleep stage {'W1234R'[i % 6]}")
        for i, (a, b) in enumerate(pairwise(edges.tolist()))
    ]
    edf_writer.write_edf(folder / f"SC{night}1EC-Hypnogram.edf", [], [], notes=stages)
    return path


def write_records(folder: Path, count: int) -> list[Path]:
    """ECGs of 10 s with their two tables in the layout of PTB-XL; the records, without
    extension.
    """
    rng = np.random.default_rng(0)
    (folder / "scp_statements.csv").write_text(",diagnostic,diagnostic_class\nNORM,1.0,NORM\n")
    beat = np.exp(-0.5 * ((np.arange(100) - 40) / 1.5) ** 2) + 0.25 * np.exp(
        -0.5 * ((np.arange(100) - 65) / 6) ** 2
    )
    made, rows = [], []
    for k in range(1, count + 1):
        name = f"records100/{k // 1000 * 1000:05d}/{k:05d}_lr"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        clean = np.outer(np.tile(beat, 10), rng.uniform(200, 1500, 12)) + 80 * np.sin(
            np.arange(1000)[:, None] / 90 + rng.uniform(0, 6, 12)
        )
        values = (clean + rng.normal(0, 12, clean.shape)).astype("<i2")
        values.tofile(path.with_suffix(".dat"))
        sums = values.sum(axis=0, dtype=np.int64) & 0xFFFF
        lines = [
            f"{path.name}.dat 16 1000.0(0)/mV 16 0 {values[0, i]} {sums[i]} 0 {lead}"
            for i, lead in enumerate(LEADS)
        ]
        path.with_suffix(".hea").write_text("\n".join([f"{path.name} 12 100 1000", *lines]) + "\n")
        rows.append(
            [
                k,
                f"{k}.0",
                50.0,
                k % 2,
                "{'NORM': 100.0}",
                k % 10 + 1,
                name,
                name.replace("100", "500").replace("_lr", "_hr"),
            ]
        )
        made.append(path)
    with (folder / "ptbxl_database.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            [
                "ecg_id",
                "patient_id",
                "age",
                "sex",
                "scp_codes",
                "strat_fold",
                "filename_lr",
                "filename_hr",
            ]
        )
        table.writerows(rows)
    return made


def measure_cpu(run: Callable[[], object]) -> float:
    """CPU seconds of this process and its finished children."""

    def read_clock() -> float:
        usage = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return sum(one.ru_utime + one.ru_stime for one in usage)

    before = read_clock()
    run()
    return read_clock() - before


def compare(hours: float, rounds: int) -> dict[str, float]:
    """Median MB/s of source a second of CPU time, by candidate."""
    import mne
    import pyedflib

    with tempfile.TemporaryDirectory() as home:
        raw = Path(home) / "raw"
        raw.mkdir()
        psg = write_recording(raw, hours)

        def read_signals() -> None:
            with pyedflib.EdfReader(str(psg)) as file:
                for i in range(file.signals_in_file):
                    file.readSignal(i)

        folders = (Path(home) / f"cache-{i}" for i in count_up())

        def ingest_anew() -> Path:
            folder = next(folders)
            cache.ingest("sleep-edf", raw, folder)
            return folder

        done = ingest_anew()
        candidates: dict[str, Callable[[], object]] = {
            MNE: lambda: mne.io.read_raw_edf(psg, preload=True, verbose="error"),
            MNE_FAST: lambda: mne.io.read_raw_edf(
                psg, include=list(EEG), preload=True, verbose="error"
            ),
            PYEDFLIB: read_signals,
            "ingest": ingest_anew,
            CACHE: lambda: cache.open_cache(ingest_anew()),
            "ingest again, nothing new": lambda: cache.ingest("sleep-edf", raw, done),
            "plain read of the file": psg.read_bytes,
        }
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for i in range(rounds + 1):  # the first is the warm-up
            for name, run in candidates.items():
                spent = measure_cpu(run)
                if i:
                    seconds[name].append(spent)
        size = psg.stat().st_size / 1e6
        found = {name: size / statistics.median(times) for name, times in seconds.items()}
        return found | {"file MB": size}


def compare_nights(hours: float, rounds: int, nights: int = 4) -> tuple[float, float]:
    """Median MB/s of wall time: MNE reading a folder of recordings one after the other, and `ingest
    --jobs 2` of it.
    """
    import mne

    with tempfile.TemporaryDirectory() as home:
        raw = Path(home) / "raw"
        raw.mkdir()
        paths = [write_recording(raw, hours, 400 + k) for k in range(nights)]

        def read_nights() -> None:
            for path in paths:
                mne.io.read_raw_edf(path, preload=True, verbose="error")

        seconds: list[tuple[float, float]] = []
        for i in range(rounds + 1):  # the first is the warm-up
            both = []
            for run in (
                read_nights,
                lambda i=i: cache.ingest("sleep-edf", raw, Path(home) / f"cache-{i}", jobs=2),
            ):
                began = time.perf_counter()
                run()
                both.append(time.perf_counter() - began)
            seconds += [(both[0], both[1])] if i else []
        size = sum(path.stat().st_size for path in paths) / 1e6
        one, two = (size / statistics.median(times) for times in zip(*seconds, strict=True))
        return one, two


def measure_growth(hours: float, rounds: int) -> dict[str, float]:
    """Exponent of the CPU time of `ingest` and `open_cache` over the hours of a recording and over
    the number of recordings, of 1, 2 and 4 times.
    """
    slopes = {}
    with tempfile.TemporaryDirectory() as home:
        for name, plans in (
            ("hours", [(1, 1), (2, 1), (4, 1)]),
            ("files", [(1, 1), (1, 2), (1, 4)]),
        ):
            folders = [Path(home) / f"{name}-{length * nights}" for length, nights in plans]
            for folder, (length, nights) in zip(folders, plans, strict=True):
                folder.mkdir()
                for night in range(nights):
                    write_recording(folder, hours * length, 400 + night)
            taken: list[list[float]] = [[] for _ in folders]
            for i in range(rounds + 1):  # the first is the warm-up
                for folder, times in zip(folders, taken, strict=True):
                    out = Path(home) / f"cache-{name}-{folder.name}-{i}"
                    spent = measure_cpu(
                        lambda raw=folder, out=out: (
                            cache.ingest("sleep-edf", raw, out),
                            cache.open_cache(out),
                        )
                    )
                    times += [spent] if i else []
            slopes[name] = float(
                np.polyfit(
                    np.log([1, 2, 4]), np.log([statistics.median(times) for times in taken]), 1
                )[0]
            )
    return slopes


def compare_records(count: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median records a second of wall time and of CPU time, by candidate."""
    import wfdb

    with tempfile.TemporaryDirectory() as home:
        raw = Path(home) / "raw"
        raw.mkdir()
        paths = [str(path) for path in write_records(raw, count)]
        folders = (Path(home) / f"cache-{i}" for i in count_up())

        def read_records() -> None:
            for path in paths:
                wfdb.rdrecord(path)

        candidates: dict[str, Callable[[], object]] = {
            "wfdb.rdrecord, in a loop": read_records,
            "ingest": lambda: cache.ingest("ptb-xl", raw, next(folders)),
            "ingest --jobs 2": lambda: cache.ingest("ptb-xl", raw, next(folders), jobs=2),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        for i in range(rounds + 1):  # the first is the warm-up
            for name, run in candidates.items():
                began = time.perf_counter()
                spent = measure_cpu(run)
                if i:
                    seconds[name].append((time.perf_counter() - began, spent))
        medians = {
            name: [statistics.median(times) for times in zip(*both, strict=True)]
            for name, both in seconds.items()
        }
        return {name: (count / wall, count / spent) for name, (wall, spent) in medians.items()}


def measure_edf(hours: float, rounds: int) -> Iterator[Row]:
    """The EDF files."""
    found = compare(hours, rounds)
    night = f"night of {found.pop('file MB'):.0f} MB to a verified cache"
    for peer, least in PEERS.items():
        yield Row(figure=night, peer=peer, value=found[CACHE] / found[peer], least=least)
    for name, speed in found.items():
        yield Row(figure=name, value=speed, unit="MB/s")
    for name, slope in measure_growth(hours / 4, rounds).items():
        yield Row(figure=f"exponent of CPU time over {name}", value=slope, most=1.1)
    read, two = compare_nights(hours, min(rounds, 3))
    yield Row(figure="four nights, ingest --jobs 2, wall time", peer=MNE, value=two / read)


def measure_wfdb(count: int, rounds: int) -> Iterator[Row]:
    """The folder of records."""
    found = compare_records(count, rounds)
    peer = "wfdb.rdrecord, in a loop"
    wall, spent = found.pop(peer)
    for name, (own_wall, own_spent) in found.items():
        least = 3.0 if name == "ingest --jobs 2" else None
        figure = f"{count:,} records, {name}"
        yield Row(figure=f"{figure}, wall time", peer=peer, value=own_wall / wall, least=least)
        yield Row(figure=f"{figure}, CPU time", peer=peer, value=own_spent / spent)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "a quarter of an hour, 50 records, one round")
    parser.add_argument("--hours", type=float, default=24.0, help="0: leave the EDF files out")
    parser.add_argument("--records", type=int, default=1500, help="0: leave the folder out")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.quick:
        options.hours, options.records, options.rounds = 0.25, 50, 1
    parts = [
        *([measure_edf(options.hours, options.rounds)] if options.hours else []),
        *([measure_wfdb(options.records, options.rounds)] if options.records else []),
    ]
    return report("files to a verified cache", chain.from_iterable(parts), options)


if __name__ == "__main__":
    sys.exit(main())
