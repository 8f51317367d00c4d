"""Assigns subjects to train, validation and test by a hash of the raw id, or by a file (section
10).

The hash does not depend on other subjects.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.errors import safe_text, usage_error
from bitimely_core.formats import tables

MEDS_SPLITS = {"tuning": "validation", "held_out": "test"}
SPLITS = ("train", "validation", "test")
SEED, TRAIN, VALIDATION = 0, 0.8, 0.1
BINS = 1000


def hash_subject(subject: str, seed: int = SEED) -> float:
    """A number u in [0, 1) of a subject.

    It is the first 8 bytes, big-endian, of the SHA-256 of `{seed}|{subject}`, over 2^64.
    """
    return int.from_bytes(sha256(f"{seed}|{subject}".encode()).digest()[:8], "big") / 2**64


def assign_split(u: float, train: float = TRAIN, validation: float = VALIDATION) -> str:
    """The split of a subject with share u."""
    return "train" if u < train else "validation" if u < train + validation else "test"


def compute_bins(subjects: Iterable[str], seed: int = SEED) -> NDArray[np.uint16]:
    """floor(1000 u), as the cache keeps it, so that pseudonyms keep their splits [n]."""
    return np.array([hash_subject(subject, seed) * BINS for subject in subjects]).astype(np.uint16)


def assign_split_of_bin(number: int) -> str:
    """The split of a subject with stored floor(1000 u)."""
    return assign_split(number / BINS)


def assign_shards(subjects: Iterable[str], shards: int) -> NDArray[np.int32]:
    """Numbers of the shards of subjects [n], by another hash than that of the split.

    The number is the hash, as an integer of 256 bits, modulo the shards.
    """
    digests = (sha256(b"shard|" + subject.encode()).digest() for subject in subjects)
    return np.array([int.from_bytes(digest) % shards for digest in digests], np.int32)


def read_split_file(path: Path, ids: str, *, numbers: bool = False) -> pl.DataFrame:
    """subject_id (String, trimmed, or Int64 for `numbers`) and split of a CSV or Parquet file.

    MEDS names of splits are accepted. `ids` names the ids in messages.

    Raises UserError (config, exit 2) where the file cannot be
    read, a row has no subject, or a subject or split is not as expected.
    """
    columns = f"expected the columns subject_id ({ids}) and split"
    integers = ("subject_id",) if numbers else ()
    frame = tables.read_option_table(
        path, ("subject_id", "split"), "--split-file", columns, integers=integers
    )
    frame = frame.with_columns(pl.col("split").replace(MEDS_SPLITS))
    for problem, is_wrong in (
        ("a row has no subject", pl.col("subject_id").is_null()),
        ("split {}", ~pl.col("split").is_in(SPLITS).fill_null(value=False)),
        ("a subject has two rows", ~pl.col("subject_id").is_first_distinct()),
    ):
        wrong = frame.filter(is_wrong)
        if wrong.height:
            raise usage_error(
                problem.format(safe_text(str(wrong["split"][0]))),
                f"{columns}: train, validation or test, one row per subject",
                file=str(path),
                field="--split-file",
                row=wrong["row"][0],
            )
    return frame.drop("row")
