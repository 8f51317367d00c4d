"""Temporary files between the two passes of an ingest: one row group per shard, so that each shard is read alone. They hold no raw ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bitimely_core import storage
from bitimely_core.claims.job import FILE_SHIFT
from bitimely_core.records import StoredFile

GROUP = 1 << 20  # rows of a row group of a published file
SLICE = 1 << 18  # subjects that are put in order together


class SpillFile(NamedTuple):
    """Cleaned rows and subjects of a stretch of the source."""

    rows: Path
    cohort: Path
    codes: np.ndarray  # its numbers of codes -> those of all files together
    files: np.ndarray  # likewise


def write_partitioned(path: Path, frame: pl.DataFrame, shards: int) -> None:
    """Write a frame with one row group for each value of its column `shard`; the order of rows stays."""
    frame = frame.sort("shard", maintain_order=True)
    bounds = np.searchsorted(frame["shard"].to_numpy(), np.arange(shards + 1))
    table = frame.drop("shard").to_arrow()

    def fill(stream: BinaryIO) -> None:
        with pq.ParquetWriter(stream, table.schema, compression="zstd", version="2.6", write_statistics=False) as out:
            for low, high in itertools.pairwise(bounds):
                out.write_table(table.slice(low, high - low), row_group_size=max(1, int(high - low)))

    storage.write_file(path, fill)


def read_partition(path: Path, shard: int, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """One shard of a file of `write_partitioned`."""
    with pq.ParquetFile(path) as file:
        partition = pl.from_arrow(file.read_row_group(shard, columns=None if columns is None else list(columns)))
    assert isinstance(partition, pl.DataFrame)
    return partition


def read_rows(spilled: Iterable[SpillFile], shard: int, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """The rows of a shard from all spill files, with common numbers of codes and files."""
    parts = []
    for one in spilled:
        part = read_partition(one.rows, shard, columns)
        if columns is None:
            row, code = part["row"].to_numpy(), one.codes[part["code"].to_numpy()]
            row = (one.files[row >> FILE_SHIFT] << FILE_SHIFT) + row % (1 << FILE_SHIFT)
            part = part.with_columns(code=pl.Series(code, dtype=pl.Int32), row=pl.Series(row, dtype=pl.Int64))
        parts.append(part)
    return pl.concat(parts) if parts else pl.DataFrame()


def merge_sorted(paths: Sequence[Path], column: str, size: int, slices: int, by: Sequence[str]) -> Iterator[pl.DataFrame]:
    """The rows of many sorted Parquet files as one table sorted by `by`, one slice of `slices` at a time in memory.

    `column`, the first of `by`, holds integers from 0 to below `size`, spread evenly.
    """
    for low, high in itertools.pairwise(size * i // slices for i in range(slices + 1)):
        in_slice = (pl.col(column) >= low) & (pl.col(column) < high)  # a lazy filter, so that no file is in memory at once
        yield pl.concat([pl.scan_parquet(path).filter(in_slice).collect() for path in paths]).sort(*by, maintain_order=True)


def write_table(out: Path, stem: str, frames: Iterable[pl.DataFrame]) -> tuple[str, StoredFile]:
    """Write a file of a cache from its frames one after another, with the same bytes as from one frame; its name, size and hash."""
    count = 0

    def fill(stream: BinaryIO) -> None:
        nonlocal count
        tables = _iter_groups(frames)
        if (table := next(tables, None)) is not None:
            with pq.ParquetWriter(stream, table.schema, compression="zstd", version="2.6") as writer:
                for group in itertools.chain([table], tables):
                    writer.write_table(group, row_group_size=GROUP)
                    count += group.num_rows

    name, digest, size = storage.write_hashed(out, stem, ".parquet", fill)
    return name, StoredFile(sha256=digest, size=size, rows=count)


def _iter_groups(frames: Iterable[pl.DataFrame]) -> Iterator[pa.Table]:
    """The rows of the frames, GROUP at a time."""
    held: pl.DataFrame | None = None
    for frame in frames:
        held = frame if held is None else pl.concat([held, frame])
        while held.height > GROUP:
            yield held[:GROUP].rechunk().to_arrow()
            held = held[GROUP:]
    if held is not None:
        yield held.rechunk().to_arrow()
