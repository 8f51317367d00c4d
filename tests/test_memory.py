"""Memory and descriptors have a limit of their own: caches ten times as large are tokenized and
trained on, thousands of files ingested.

The limit is on what a process alone can hold (RLIMIT_DATA) or on its full address space
(RLIMIT_AS), over what it takes once everything is imported. Windows are read through memory maps,
whose pages the system takes back whenever it needs them; under RLIMIT_AS without maps.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bitimely_core.formats import edf_header, edf_writer

LIMIT = 64  # MiB
CHANNELS, RATE, WINDOW = 32, 100, 1000
FILES = 135
FILE = 5 << 20  # bytes: of all files more than ten times the limit
OPEN = 256  # files at once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux"),
]


def recordings(folder: Path, count: int, size: int) -> None:
    """EDF files of `size` bytes: a second of noise over and over, so that the cache is small on
    disk.
    """
    folder.mkdir()
    channels = [
        edf_header.EdfChannel(f"c{v:02d}", "uV", -3276.8, 3276.7, -32768, 32767, RATE)
        for v in range(CHANNELS)
    ]
    seconds = size // (2 * RATE * CHANNELS)
    for number in range(count):
        second = (
            np.random.default_rng(number).integers(-500, 500, (CHANNELS, RATE)).astype(np.int16)
        )
        edf_writer.write_edf(
            folder / f"s{number:03d}.edf", channels, list(np.tile(second, seconds))
        )


def run(*arguments: object) -> list[str]:
    """Lines of `child` in a process of its own; the last is JSON."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [*done.stderr.splitlines(), done.stdout.splitlines()[-1]]


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}  # a thread's arena takes 64 MiB of addresses
LIMITS = {"data": (resource.RLIMIT_DATA, "VmData"), "address": (resource.RLIMIT_AS, "VmSize")}


def held(name: str) -> int:
    """MiB of this process, by what the system calls it."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) >> 10


def limited(kind: str, limit: int, command: Callable[[str], list[str]]) -> int:
    """Exit code of a command on `big` with `limit` MiB more than are held once it has run on
    `small`.
    """
    from bitimely_cli.main import main

    assert main(command("small")) == 0
    which, name = LIMITS[kind]
    free = resource.getrlimit(which)
    resource.setrlimit(which, ((held(name) + limit) << 20, free[1]))
    try:
        return main(command("big"))
    finally:
        resource.setrlimit(which, free)


def child_that_trains(home: str, kind: str) -> dict[str, int]:
    """Tokenize, train, and train with a batch that cannot fit; files and pieces are scaled down
    with the limit.
    """
    from bitimely_core.tokens import building, cutting

    building.SHARD_BYTES, cutting.PIECE_BYTES = 4 << 20, 1 << 20
    space = {name: ["--workspace", f"{home}/{name}"] for name in ("small", "big")}
    train = ["pretrain", "--data", "edf", "--preset", "tiny", "--device", "cpu", "--steps", "3"]
    return {
        "tokenize": limited(
            kind, LIMIT, lambda name: ["tokenize", "edf", "--window", str(WINDOW), *space[name]]
        ),
        "pretrain": limited(kind, LIMIT, lambda name: [*train, "--batch-size", "4", *space[name]]),
        "too large": limited(
            kind,
            LIMIT,
            lambda name: [
                *train,
                "--run",
                "large",
                "--batch-size",
                "4" if name == "small" else "4096",
                *space[name],
            ],
        ),
    }


def child_with_few_files(raw: str, out: str) -> dict[str, float]:
    """Ingest with 256 descriptors; seconds of CPU time."""
    from bitimely_core import cache

    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN))
    before = time.process_time()
    report = cache.ingest("edf", raw, out)
    return {
        "exit": report["exit_code"],
        "accepted": report["counts"]["accepted"],
        "seconds": time.process_time() - before,
    }


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind == "data" else []) for kind in LIMITS],
)
def test_a_cache_of_ten_times_the_memory_is_tokenized_and_trained_on(
    tmp_path: Path, kind: str
) -> None:
    from bitimely_core import cache

    for name, count, size in (("small", 3, FILE >> 4), ("big", FILES, FILE)):
        recordings(tmp_path / f"raw-{name}", count, size)
        cache.ingest("edf", tmp_path / f"raw-{name}", tmp_path / name / "cache" / "edf")
    *lines, last = run("child_that_trains", tmp_path, kind)
    windows = sum(path.stat().st_size for path in (tmp_path / "big" / "tokens").rglob("windows-*"))
    assert windows > 10 * (LIMIT << 20)
    assert json.loads(last) == {"tokenize": 0, "pretrain": 0, "too large": 6}
    (error,) = [line for line in lines if line.startswith("error[")]
    assert "out of memory at batch 1" in error
    assert "--batch-size 2048" in error


def tiny(folder: Path, count: int) -> None:
    """Files of 1 KB."""
    raw = edf_writer.encode_edf(
        [edf_header.EdfChannel("c", "uV", -100.0, 100.0, -2048, 2047, 16)],
        [np.arange(256, dtype=np.int16)],
    )
    for number in range(count):
        path = folder / f"{number // 1000:03d}" / f"r{number:06d}.edf"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        # within the digital range
        path.write_bytes(raw[:-4] + np.array([number // 2000, number % 2000], np.int16).tobytes())


def test_thousands_of_files_take_linear_time_and_few_descriptors(tmp_path: Path) -> None:
    seconds = {}
    for count in (1000, 4000):
        tiny(tmp_path / f"raw-{count}", count)
        found = json.loads(
            run("child_with_few_files", tmp_path / f"raw-{count}", tmp_path / f"out-{count}")[-1]
        )
        assert (found["exit"], found["accepted"]) == (0, count)
        seconds[count] = found["seconds"]
    assert seconds[4000] < 6 * seconds[1000]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
