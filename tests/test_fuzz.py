"""The fuzz targets hold on their seeds and on a hundred mutations of them; `fuzz.py` itself goes on for as long as it is given."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest

from bitimely_core.formats import ts


@pytest.fixture(autouse=True)
def stop_tracing() -> Iterator[None]:
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_targets_hold(name: str, tmp_path: Path) -> None:
    fuzz.warm(name)
    rng, known = random.Random(5), fuzz.seeds(name)
    for data in [*known, *(fuzz.mutate(rng.choice(known), known, rng) for _ in range(100))]:
        fuzz.check(name, data, tmp_path)


def test_what_fails_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ts, "read_header", broken)
    with pytest.raises(ZeroDivisionError):
        fuzz.by_chance("ts", 60.0, tmp_path, random.Random(0))
    (kept,) = tmp_path.glob("crash-*")
    assert kept.read_bytes() == fuzz.seeds("ts")[0]


def test_limits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = fuzz.Target(lambda data, folder: bytearray(64 << 20), fuzz.lists)
    slow = fuzz.Target(lambda data, folder: sum(range(10**5)), fuzz.lists)
    for name, target, limit, text in (("greedy", greedy, 10.0, "bytes of memory"), ("slow", slow, 0.002, "CPU time")):
        monkeypatch.setitem(fuzz.TARGETS, name, target)
        monkeypatch.setattr(fuzz, "SECONDS", limit)
        with pytest.raises(AssertionError, match=text):
            fuzz.check(name, b"@data", tmp_path)


def test_the_script_runs_targets_in_processes_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, fuzz.__file__, "ts", "table", "--seconds", "0.2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ts" in done.stdout + done.stderr
