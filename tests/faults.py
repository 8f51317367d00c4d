"""A kill at the n-th operation of the disk: from there on nothing of the process reaches the disk,
as after SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitimely_core import workflows
from bitimely_core.errors import UserError
from bitimely_core.pipeline import graph
from bitimely_core.store import storage
from bitimely_core.train import loop, micro_batches, step_log, validation

OPERATIONS = (
    "os_open",
    "os_write",
    "os_fsync",
    "os_replace",
    "os_link",
    "os_unlink",
    "os_mkdir",
    "os_rmdir",
    "os_truncate",
)
SAMPLE = 6  # operations in the fast suite; all of them in `make test-long`


class Killed(BaseException):
    """In the place of SIGKILL."""


@contextmanager
def killed_at(limit: float) -> Iterator[list[str]]:
    """The operations of the block that change the disk; number `limit` (from 0) and all later ones
    raise `Killed`, a write after its half.
    """
    done: list[str] = []
    dead = False

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            nonlocal dead
            if name == "os_open" and not args[1] & os.O_CREAT:
                return call(*args)
            if dead:
                raise Killed
            if len(done) >= limit:
                dead = True
                if name == "os_write":
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            done.append(name)
            return call(*args)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(storage, name, wrap(name, getattr(storage, name)))
        yield done


@contextmanager
def stopped_clock() -> Iterator[None]:
    """The documented fields of the clock (speed of a training, duration and time of a stage) and
    the key of the pseudonyms are constants.
    """
    clock = SimpleNamespace(
        perf_counter=lambda: 0.0, monotonic=lambda: 0.0, time=lambda: 1e9, sleep=lambda _: None
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, micro_batches, step_log, validation, graph):
            patch.setattr(module, "time", clock)
        patch.setattr(storage.secrets, "token_bytes", bytes)
        yield


def read_tree(home: Path) -> dict[str, bytes]:
    """Content of every file by name, but for the files of locks, the index of the workspace's page,
    which holds times, and the notices that were on the screen.
    """
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.name not in {".lock", ".index.json", ".notices.json"}
    }


def list_folders(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_dir()}


def check_kills(
    tmp_path: Path, prepared: Path, command: Callable[[Path], object], *, sample: int | None
) -> int:
    """Kill `command` (called with a copy of the workspace `prepared`) at every operation, or at
    `sample` of them, and repeat it: the workspace is that of the undisturbed command. Between the
    two `verify` reports no damage. Returns the number of operations.
    """
    with stopped_clock():
        undisturbed = shutil.copytree(prepared, tmp_path / "undisturbed")
        with killed_at(float("inf")) as done:
            command(undisturbed)
        expected, folders = read_tree(undisturbed), list_folders(undisturbed)
        numbers = (
            range(len(done))
            if sample is None
            else sorted(random.Random(0).sample(range(len(done)), min(sample, len(done))))
        )
        for number in numbers:
            home = shutil.copytree(prepared, tmp_path / "home")
            # the command line ends with 1, which the caller asserts
            with killed_at(number) as reached, suppress(Killed, AssertionError):
                command(home)
            assert len(reached) == number, "the same operations in the same order"
            with suppress(UserError):  # nothing to verify yet
                found = workflows.verify(home)
                lines = [finding.line() for finding in found["findings"]]
                assert found["exit_code"] in {0, 4}, (number, done[number], lines)
            command(home)
            now = read_tree(home)
            assert now.keys() == expected.keys(), (
                number,
                done[number],
                sorted(now.keys() ^ expected.keys()),
            )
            differing = [name for name in now if now[name] != expected[name]]
            assert differing == [], (number, done[number], differing)
            assert list_folders(home) == folders, (number, done[number])
            shutil.rmtree(home)
        return len(done)
