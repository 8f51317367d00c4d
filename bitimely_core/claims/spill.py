"""Rows between the two passes of an ingest, by shard: in memory, or in temporary files of one row
group per shard. They hold no raw ids.
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

from bitimely_core import storage
from bitimely_core.claims.job import FILE_SHIFT
from bitimely_core.records import StoredFile

GROUP = 1 << 20  # rows of a row group of a published file
SLICE = 1 << 18  # subjects that are put in order together


Partitions = Path | list[pl.DataFrame]
"""The rows of each shard: in memory, or in a file of `write_partitions`."""


class PartNumbers(NamedTuple):
    """What makes the numbers of a part of the source those of all parts together."""

    codes: np.ndarray  # number of a code in the part -> number among all
    files: np.ndarray  # likewise
    subjects: np.ndarray  # [shards] what is added to the numbers of subjects


class Stretch(NamedTuple):
    """Cleaned rows and subjects of a stretch of the source."""

    rows: Partitions
    cohort: Partitions
    # of its part; None for the first one, whose own hold for all
    numbers: PartNumbers | None = None


def partition_rows(frame: pl.DataFrame, shards: int) -> list[pl.DataFrame]:
    """The rows of each value of the column `shard`, in their order."""
    parts = frame.partition_by("shard", include_key=False, as_dict=True)
    return [parts.get((shard,), frame.drop("shard").clear()) for shard in range(shards)]


def join_partitions(blocks: Sequence[Sequence[pl.DataFrame]]) -> list[pl.DataFrame]:
    """The rows of each shard from several blocks."""
    return [pl.concat(parts) for parts in zip(*blocks, strict=True)]


def write_partitions(path: Path, parts: Sequence[pl.DataFrame]) -> None:
    """Write frames with the same columns as one row group each."""

    def fill(stream: BinaryIO) -> None:
        # read once, soon
        options = {"compression": "lz4", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(stream, parts[0].to_arrow().schema, version="2.6", **options) as out:
            for part in parts:
                out.write_table(part.to_arrow(), row_group_size=max(1, part.height))

    storage.write_file(path, fill)


def read_partition(
    parts: Partitions, shard: int, columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """The rows of one shard."""
    if not isinstance(parts, Path):
        return parts[shard].select(columns or pl.all())
    with pq.ParquetFile(parts) as file:
        partition = pl.from_arrow(
            file.read_row_group(shard, columns=None if columns is None else list(columns))
        )
    assert isinstance(partition, pl.DataFrame)
    return partition


def read_rows(
    spilled: Iterable[Stretch], shard: int, columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """The rows of a shard from all stretches, with common numbers of codes, files and subjects:
    places in `read_subjects`.
    """
    parts = []
    for one in spilled:
        part = read_partition(one.rows, shard, columns)
        if one.numbers is not None:
            part = part.with_columns(pl.col("subject") + int(one.numbers.subjects[shard]))
        if one.numbers is not None and columns is None:
            row, code = part["row"].to_numpy(), one.numbers.codes[part["code"].to_numpy()]
            row = (one.numbers.files[row >> FILE_SHIFT] << FILE_SHIFT) + row % (1 << FILE_SHIFT)
            part = part.with_columns(
                code=pl.Series(code, dtype=pl.Int32), row=pl.Series(row, dtype=pl.Int64)
            )
        parts.append(part)
    return pl.concat(parts) if parts else pl.DataFrame()


def read_subjects(spilled: Iterable[Stretch], shard: int) -> pl.DataFrame:
    """Digest and split_bin of the subjects of a shard from all stretches; several rows of a subject
    may occur.
    """
    return pl.concat(
        [
            pl.DataFrame(schema={"digest": pl.Binary, "split_bin": pl.UInt16}),
            *(read_partition(one.cohort, shard) for one in spilled),
        ]
    )


def release_rows(spilled: Iterable[Stretch], shard: int) -> None:
    """Give the memory of the rows of a shard back."""
    for one in spilled:
        if not isinstance(one.rows, Path):
            one.rows[shard] = one.rows[shard].clear()


def merge_sorted(
    paths: Sequence[Path], column: str, size: int, slices: int, by: Sequence[str]
) -> Iterator[pl.DataFrame]:
    """The rows of many sorted Parquet files as one table sorted by `by`, one slice of `slices` at a
    time in memory.

    `column`, the first of `by`, holds integers from 0 to below `size`, spread evenly.
    """
    for low, high in itertools.pairwise(size * i // slices for i in range(slices + 1)):
        # a lazy filter, so that no file is in memory at once
        in_slice = (pl.col(column) >= low) & (pl.col(column) < high)
        yield pl.concat([pl.scan_parquet(path).filter(in_slice).collect() for path in paths]).sort(
            *by, maintain_order=True
        )


def write_table(out: Path, stem: str, frames: Iterable[pl.DataFrame]) -> tuple[str, StoredFile]:
    """Write a file of a cache from its frames one after another, with the same bytes as from one
    frame; its name, size and hash.
    """
    count = 0

    def fill(stream: BinaryIO) -> None:
        nonlocal count
        tables = _iter_groups(frames)
        if (table := next(tables, None)) is not None:
            with pq.ParquetWriter(
                stream, table.schema, compression="zstd", version="2.6"
            ) as writer:
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
