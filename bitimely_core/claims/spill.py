"""Holds rows between the two passes of an ingest, by shard; and writes the files of a cache.

The rows are in temporary files of Arrow with a batch for each shard. They hold no raw ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bitimely_core.claims.distinct import sort_stably
from bitimely_core.claims.job import FILE_SHIFT
from bitimely_core.store import storage
from bitimely_core.store.records import StoredFile

GROUP = 1 << 20  # rows of a row group of a published file
SLICE = 1 << 18  # subjects that are put in order together


class PartNumbers(NamedTuple):
    """Turns the numbers of one part of the source into those of all parts together."""

    codes: np.ndarray  # number of a code in the part -> number among all
    files: np.ndarray  # number of a file in the part -> number among all
    subjects: np.ndarray  # [shards] what is added to the numbers of subjects


class SpilledStretch(NamedTuple):
    """Cleaned rows and subjects of a stretch of the source, in files of `write_partitions`."""

    rows: Path
    cohort: Path
    numbers: PartNumbers  # of its part


def write_partitions(path: Path, frame: pl.DataFrame, shards: int) -> None:
    """Write the rows of each value of the column `shard`, in their order, as one batch.

    They are read once and soon, so they are not compressed.
    """
    order, shard = sort_stably(frame["shard"].to_numpy().astype(np.int64))
    ordered = frame.drop("shard")[order]
    bounds = np.searchsorted(shard, np.arange(shards + 1)).tolist()
    batches = [_to_batch(ordered[low:high]) for low, high in itertools.pairwise(bounds)]

    def fill(stream: BinaryIO) -> None:
        with pa.ipc.new_file(stream, batches[0].schema) as out:
            for batch in batches:
                out.write_batch(batch)

    storage.write_file(path, fill)


def _to_batch(frame: pl.DataFrame) -> pa.RecordBatch:
    table = frame.to_arrow()
    columns = [column.combine_chunks() for column in table.itercolumns()]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def read_partition(path: Path, shard: int) -> pl.DataFrame:
    """The rows of one shard in a file of `write_partitions`."""
    with pa.OSFile(str(path)) as file:
        partition = pl.from_arrow(pa.ipc.open_file(file).get_batch(shard))
    assert isinstance(partition, pl.DataFrame)
    return partition


def read_rows(spilled: Iterable[SpilledStretch], shard: int) -> pl.DataFrame:
    """The rows of a shard from all stretches, with common numbers of codes, files and subjects:
    places in `read_subjects`.
    """
    parts = [
        _renumber(read_partition(stretch.rows, shard), stretch.numbers, shard)
        for stretch in spilled
    ]
    return pl.concat(parts) if parts else pl.DataFrame()


def _renumber(rows: pl.DataFrame, numbers: PartNumbers, shard: int) -> pl.DataFrame:
    """Rows of a part with the common numbers."""
    file, line = np.divmod(rows["row"].to_numpy(), 1 << FILE_SHIFT)
    return rows.with_columns(
        pl.col("subject") + int(numbers.subjects[shard]),
        code=pl.Series(numbers.codes[rows["code"].to_numpy()], dtype=pl.Int32),
        row=pl.Series((numbers.files[file] << FILE_SHIFT) + line, dtype=pl.Int64),
    )


def read_subjects(spilled: Iterable[SpilledStretch], shard: int) -> pl.DataFrame:
    """Digest and split_bin of the subjects of a shard from all stretches; several rows of a subject
    may occur.
    """
    empty = pl.DataFrame(schema={"digest": pl.Binary, "split_bin": pl.UInt16})
    return pl.concat([empty, *(read_partition(stretch.cohort, shard) for stretch in spilled)])


def merge_sorted(
    paths: Sequence[Path], column: str, size: int, slices: int, by: Sequence[str]
) -> Iterator[pl.DataFrame]:
    """The rows of many sorted Parquet files as one table sorted by `by`, in slices.

    Only one of the `slices` is in memory at a time. `column`, the first of `by`, holds integers
    from 0 to below `size`, spread evenly.
    """
    for low, high in itertools.pairwise(size * i // slices for i in range(slices + 1)):
        # a lazy filter, so that no file is in memory at once
        in_slice = (pl.col(column) >= low) & (pl.col(column) < high)
        yield pl.concat(
            [pl.scan_parquet(path, glob=False).filter(in_slice).collect() for path in paths]
        ).sort(*by, maintain_order=True)


def write_table(out: Path, stem: str, frames: Iterable[pl.DataFrame]) -> tuple[str, StoredFile]:
    """Write a file of a cache from its frames one after another; its name, size and hash.

    The bytes are those of the file from one frame.
    """
    count = 0

    def fill(stream: BinaryIO) -> None:
        nonlocal count
        tables = _iter_groups(frames)
        first = next(tables)
        with pq.ParquetWriter(stream, first.schema, compression="zstd", version="2.6") as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table, row_group_size=GROUP)
                count += table.num_rows

    name, digest, size = storage.write_hashed(out, stem, ".parquet", fill)
    return name, StoredFile(sha256=digest, size=size, rows=count)


def _iter_groups(frames: Iterable[pl.DataFrame]) -> Iterator[pa.Table]:
    """The rows of the frames, GROUP at a time."""
    waiting: pl.DataFrame | None = None
    for frame in frames:
        waiting = frame if waiting is None else pl.concat([waiting, frame])
        while waiting.height > GROUP:
            yield waiting[:GROUP].rechunk().to_arrow()
            waiting = waiting[GROUP:]
    if waiting is not None:
        yield waiting.rechunk().to_arrow()
