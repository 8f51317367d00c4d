"""Train, validation and test by a hash of the raw subject id: the same in every engine, whoever else is in the data (section 10)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

SPLITS = ("train", "validation", "test")
SEED, TRAIN, VALIDATION = 0, 0.8, 0.1
BINS = 1000


def hash_subject(subject: str, seed: int = SEED) -> float:
    """A number u in [0, 1): the first 8 bytes, big-endian, of the SHA-256 of `{seed}|{subject}`, over 2^64."""
    return int.from_bytes(sha256(f"{seed}|{subject}".encode()).digest()[:8], "big") / 2**64


def assign_split(u: float, train: float = TRAIN, validation: float = VALIDATION) -> str:
    """The split of a subject with share u."""
    return "train" if u < train else "validation" if u < train + validation else "test"


def compute_bins(subjects: Iterable[str], seed: int = SEED) -> list[int]:
    """floor(1000 u), as the cache keeps it, so that pseudonyms keep their splits."""
    return [int(hash_subject(subject, seed) * BINS) for subject in subjects]


def assign_split_of_bin(number: int, train: float = TRAIN, validation: float = VALIDATION) -> str:
    """The split of a subject of whom the cache keeps floor(1000 u); the shares are multiples of 0.001."""
    first, second = round(train * BINS), round((train + validation) * BINS)
    return "train" if number < first else "validation" if number < second else "test"


def assign_shard(subject: str, shards: int) -> int:
    """Which of `shards` a subject lies in; another hash than that of the split."""
    return int.from_bytes(sha256(f"shard|{subject}".encode()).digest(), "big") % shards
