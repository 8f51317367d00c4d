"""Damage to a stored file, each kind drawn from a seeded generator."""

import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, draw: random.Random) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero4k(path: Path, draw: random.Random) -> None:
    """A block of zeros, as a copy with a hole has it."""
    content = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(content) - 4096))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def append(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(512))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()
