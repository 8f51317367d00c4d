"""Turns raw ids of subjects into numbers and digests, each id once.

A digest is the HMAC-SHA256 of the raw id under the key of the workspace.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from bitimely_core.claims import subject_splits
from bitimely_core.claims.distinct import number_texts, sort_stably
from bitimely_core.claims.job import ClaimsJob

CACHED_SUBJECTS = 1 << 21  # subjects whose number is held in memory: 24 bytes each


@dataclass
class PseudonymCache:
    """Subjects seen so far, sorted by `marks`; of two with equal marks only the first."""

    # two hashes of the raw id, together 128 bits
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    checks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))  # in the shard
    shards: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def insert(self, other: PseudonymCache) -> None:
        """Add new subjects, as many as there is room for."""
        chosen = np.argsort(other.marks)[: max(0, CACHED_SUBJECTS - len(self.marks))]
        places = np.searchsorted(self.marks, other.marks[chosen])
        for name in ("marks", "checks", "numbers", "shards"):
            values = getattr(other, name)[chosen]
            setattr(self, name, np.insert(getattr(self, name), places, values))


def pseudonymize(
    seen: PseudonymCache, ids: pl.Series, job: ClaimsJob, counts: list[int]
) -> tuple[np.ndarray, np.ndarray, pl.DataFrame]:
    """Number and shard of the subject of each row with a raw id; and `compute_digests` of the ids
    not seen before.

    These are numbered by shard from `counts` on, which grows.
    """
    marks, checks = ids.hash().to_numpy(), ids.hash(seed=1).to_numpy()
    numbers, shards = np.zeros(len(ids), np.uint32), np.zeros(len(ids), np.int32)
    is_seen = np.zeros(len(ids), bool)
    if len(seen.marks):
        # a search goes much faster in order, if only by the first bits
        order, _ = sort_stably((marks >> np.uint64(32)).astype(np.int64))
        place = np.empty(len(ids), np.int64)
        place[order] = np.minimum(np.searchsorted(seen.marks, marks[order]), len(seen.marks) - 1)
        is_seen = (seen.marks[place] == marks) & (seen.checks[place] == checks)
        numbers, shards = seen.numbers[place], seen.shards[place]
    new = np.flatnonzero(~is_seen)
    row, number = number_texts(ids.gather(new))
    fresh = compute_digests(ids.gather(new[row]).to_list(), job)
    fresh_shards = fresh["shard"].to_numpy()
    in_block = fresh.select(pl.int_range(pl.len(), dtype=pl.UInt32).over("shard")).to_series()
    fresh_numbers = np.array(counts, np.uint32)[fresh_shards] + in_block.to_numpy()
    counts[:] = (counts + np.bincount(fresh_shards, minlength=len(counts))).tolist()
    numbers[new], shards[new] = fresh_numbers[number], fresh_shards[number]
    seen.insert(PseudonymCache(marks[new[row]], checks[new[row]], fresh_numbers, fresh_shards))
    return numbers, shards, fresh


def compute_digests(names: list[str], job: ClaimsJob) -> pl.DataFrame:
    """Of raw ids: digest (Binary: HMAC-SHA256 under the key), split_bin UInt16, shard Int32."""
    return pl.DataFrame(
        {
            "digest": pl.Series(
                [hmac.digest(job.key, name.encode(), "sha256") for name in names], dtype=pl.Binary
            ),
            "split_bin": subject_splits.compute_bins(names, job.options.seed),
            "shard": subject_splits.assign_shards(names, job.shards),
        }
    )


def to_keys(digests: pl.Series) -> np.ndarray:
    """The first 8 bytes of each digest as a number, in whose order the digests are, [n] uint64."""
    return digests.bin.head(8).bin.reinterpret(dtype=pl.UInt64, endianness="big").to_numpy()
