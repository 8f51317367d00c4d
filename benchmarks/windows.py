"""Random minibatches of 32 windows, 3,000 samples x 7 channels, from tokens against a numpy memory
map and a Parquet file of lists.

    python benchmarks/windows.py [--quick] [--json]

CPU time of one thread, all sources in one process, interleaved, medians. Every source gives the
same normalised float32 values, which is checked; the memory map uses the same conversion. 100,000
windows, 4.2 GB in a temporary folder; 500 with --quick.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from side_by_side import Row, make_parser, report

from bitimely_core import data, registry, tokens
from bitimely_core.registry import DatasetFacts, View
from bitimely_core.schemas.ingest_records import CacheManifest, CacheSettings
from bitimely_core.tokens.windows import scale_values
from bitimely_core.types import Record, Signal

BATCH, LENGTH, CHANNELS, RATE = 32, 3000, 7, 100.0
PER_RECORDING = 100  # windows
LISTED = 2048  # windows in the Parquet file: it would need four times the room of the tokens
NAMES = tuple(f"channel {v}" for v in range(CHANNELS))
FLOORS = {"memory map": 0.8, "parquet lists": 20.0}


class Made:
    """A cache that makes its recordings when they are read: 12-bit noise, one scale a recording and
    channel.
    """

    dataset, folder = "benchmark", Path("benchmark")

    def __init__(self, recordings: int) -> None:
        self.recordings = recordings
        construct: Any = CacheManifest.model_construct
        self.manifest = construct(
            kind="recordings",
            settings=CacheSettings(dataset="benchmark", version="0", options={}),
            manifest_sha256=hashlib.sha256(b"benchmark").hexdigest(),
        )

    def records(self, channels: list[str] | None = None) -> Iterator[Record]:
        """All of them, the same each time."""
        rng = np.random.default_rng(0)
        for i in range(self.recordings):
            noise = rng.integers(-2048, 2048, (CHANNELS, PER_RECORDING * LENGTH), dtype=np.int16)
            signals = [
                Signal(name, RATE, "uV", noise[v], 0.1 + 0.001 * i, 0.5 * v)
                for v, name in enumerate(NAMES)
            ]
            yield Record(recording_id=f"r{i:04d}", subject_id=f"s{i:04d}", signals=signals)

    def subjects(self) -> pl.DataFrame:
        """One recording each."""
        return pl.DataFrame({"subject_id": [f"s{i:04d}" for i in range(self.recordings)]})

    def signals(self) -> pl.DataFrame:
        """One row a recording and channel."""
        ids = np.repeat(self.recording_ids(), CHANNELS)
        return pl.DataFrame(
            {"recording_id": ids, "channel": list(NAMES) * self.recordings}
        ).with_columns(
            rate=pl.lit(RATE), unit=pl.lit("uV"), n_samples=pl.lit(PER_RECORDING * LENGTH)
        )

    def recording_ids(self) -> list[str]:
        """In the order of `records`."""
        return [f"r{i:04d}" for i in range(self.recordings)]


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call, and what it gives."""
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def read_map(block: np.ndarray, windows: tokens.Windows, rows: np.ndarray) -> np.ndarray:
    """The rows of a memory map of the digital values, in float32, scaled as the tokens are."""
    order = np.argsort(rows)
    x = np.empty((len(rows), LENGTH, CHANNELS), dtype=np.float32)
    x[order] = block[rows[order]]
    scale_values(
        x, windows.centre[windows.recording[rows]], windows.factor[windows.recording[rows]]
    )
    return x


def read_lists(path: Path, group: int, rows: np.ndarray) -> np.ndarray:
    """Rows of a Parquet file of normalised list<float>, each row group that holds one of them read
    once.
    """
    file = pq.ParquetFile(path)
    x = np.empty((len(rows), LENGTH, CHANNELS), dtype=np.float32)
    for number in np.unique(rows // group):
        lists = file.read_row_group(int(number), use_threads=False).column(0).combine_chunks()
        values = lists.values.to_numpy().reshape(-1, LENGTH, CHANNELS)
        here = rows // group == number
        x[here] = values[rows[here] - number * group]
    return x


def measure(count: int, rounds: int, home: Path) -> Iterator[Row]:
    """Make `count` windows, read them in every way."""
    view = View(channels=NAMES, rate=RATE, window=LENGTH)
    facts = DatasetFacts(
        title="", views={"": view}, licence="", url="", download="", paper={}, rules={}
    )
    entry = registry.Entry("benchmark", lambda source, options: iter(()), facts)
    registry.datasets.add("benchmark", entry)
    made: Any = Made(count // PER_RECORDING)
    build, windows = time_call(lambda: tokens.build(made, out=home / "tokens"))
    opening, windows = time_call(lambda: tokens.open_tokens(home / "tokens", verify=False))
    begin = time.perf_counter()
    first, _ = time_call(
        lambda: next(
            iter(data.batches(tokens.open_tokens(home / "tokens", verify=False)["train"], BATCH)(0))
        )
    )
    wall = time.perf_counter() - begin

    block = np.memmap(home / "map", dtype=np.int16, mode="w+", shape=(count, LENGTH, CHANNELS))
    for shard, start in zip(windows.shards, windows.firsts, strict=False):
        block[start : start + len(shard)] = shard
    block.flush()
    block = np.memmap(home / "map", dtype=np.int16, mode="r", shape=(count, LENGTH, CHANNELS))
    listed, group = min(LISTED, count), 64
    with pq.ParquetWriter(
        home / "lists.parquet", pa.schema([("values", pa.list_(pa.float32()))])
    ) as writer:
        for start in range(0, listed, group):
            values = windows.values(np.arange(start, min(start + group, listed)))
            offsets = np.arange(len(values) + 1, dtype=np.int32) * LENGTH * CHANNELS
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))
            writer.write_table(pa.table({"values": column}), row_group_size=group)

    rng = np.random.default_rng(1)
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "tokens": lambda rows: data.collate(windows, rows).values.numpy(),
        "memory map": lambda rows: read_map(block, windows, rows),
        "parquet lists": lambda rows: read_lists(home / "lists.parquet", group, rows % listed),
    }
    rows = rng.choice(listed, BATCH, replace=False)
    for way in ways.values():  # warm up, and compare
        np.testing.assert_array_equal(way(rows), windows.values(rows))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        rows = rng.choice(count, BATCH, replace=False)
        for name, way in ways.items():
            if name == "parquet lists" and i % 10:  # slow, and steady
                continue
            taken[name].append(time_call(lambda way=way, rows=rows: way(rows))[0])  # type: ignore[misc]
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    for name, least in FLOORS.items():
        times = seconds[name] / seconds["tokens"]
        yield Row(figure="random minibatches from tokens", peer=name, value=times, least=least)
    what = f"first batch of {count:,} windows after opening"
    yield Row(figure=what, value=first, unit="CPU s", most=1.0)
    yield Row(figure=what, value=wall, unit="s", most=1.0)
    yield Row(figure="opening the tokens", value=opening, unit="CPU s")
    yield Row(figure="building tokens, windows a CPU second", value=count / build)


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__, "500 windows, all in the page cache").parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    count, rounds = (500, 10) if options.quick else (100_000, 300)
    with tempfile.TemporaryDirectory() as home:
        return report(
            f"minibatches of {BATCH} windows of {LENGTH:,} samples, {CHANNELS} channels",
            measure(count, rounds, Path(home)),
            options,
        )


if __name__ == "__main__":
    sys.exit(main())
