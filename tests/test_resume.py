"""Stopping and continuing: kills at every step and inside of the writing, signals, full disks.
Damage is in test_checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import Outcome, Rows, Tiny, drawn, is_finished, squares
from torch import nn

from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.store import storage
from bitimely_core.train import checkpoints, loop, metrics_log
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12  # two epochs of six
IDENTITY = {
    "data": "3f",
    "tokenizer": "77",
    "settings": {"model": {"dim": 6}, "train": {"device": "auto", "lr": 1e-2}},
}
SYSTEM = ("os_open", "os_read", "os_write", "os_fsync", "os_replace", "os_mkdir")


class Killed(BaseException):
    """In the place of SIGKILL where no clean-up would differ."""


def run(
    folder: Path, objective: loop.Objective = drawn, model: nn.Module | None = None, **changes: Any
) -> tuple[nn.Module, Outcome]:
    """The run that all tests here continue; `identity`, `notice` and `log` go to fit, the rest to
    the configuration.
    """
    passed = {"identity": IDENTITY} | {
        key: changes.pop(key) for key in ("identity", "notice", "log", "batches") if key in changes
    }
    values = {"epochs": 2, "lr": 1e-2, "log_every": 1, "device": "cpu", "accumulate": 2, **changes}
    trained, batches = model or Tiny(), passed.pop("batches", Rows())
    held, config = Rows(rows=6, length=batches.values.shape[1]), validate(TrainConfig, values)
    return trained, loop.fit(
        trained, batches, objective, validation=held, folder=folder, config=config, **passed
    )


def log_of(folder: Path) -> list[Outcome]:
    return [
        {k: v for k, v in line.items() if k not in {"tokens_per_second", "data_wait"}}
        for line in metrics_log.read_metrics(folder)
    ]


def state_of(folder: Path) -> tuple[bytes, bytes, bytes, list[Outcome]]:
    """What must be the same bit for bit: exported weights, weights and moments of the last
    checkpoint, the log but for speed.
    """
    last = checkpoints.load_latest_checkpoint(folder)
    assert last is not None
    assert last.step == STEPS
    files = (
        folder / "model" / "model.safetensors",
        last.folder / "model.safetensors",
        last.folder / "optimizer.safetensors",
    )
    return (*(path.read_bytes() for path in files), log_of(folder))  # type: ignore[return-value]


def leftovers(folder: Path) -> list[str]:
    return [
        str(path) for path in folder.rglob("*") if ".tmp" in path.name or ".damaged" in path.name
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes, list[Outcome]]:
    """The undisturbed run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("straight")
    run(folder)
    return state_of(folder)


def stopping(
    at: int, stop: Callable[[], object], *, part: int = 0, validation: bool = False
) -> loop.Objective:
    """`drawn`, but `stop` is called in step `at`, counted from the beginning of this process, in
    micro-batch `part`, or in a validation.
    """
    calls = 0

    def objective(
        model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Outcome:
        nonlocal calls
        if model.training is not validation:
            calls += 1
            if calls == (2 * (at - 1) + part + 1 if not validation else at):
                stop()
        return drawn(model, batch, generator)

    return objective


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("every", [None, 1, 5])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("at", [1, 2, 5, 6, 7, 8, 11, 12])
def test_a_kill_in_any_step_changes_nothing(
    at: int, part: int, every: int | None, straight: Any, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stopping(at, kill, part=part), checkpoint_every=every)
    saved = checkpoints.load_latest_checkpoint(tmp_path)
    assert (0 if saved is None else saved.step) == (at - 1) // (every or 6) * (every or 6)
    _, result = run(tmp_path, checkpoint_every=every)
    assert result["resumed"] == (None if saved is None else saved.step)
    assert state_of(tmp_path) == straight
    assert leftovers(tmp_path) == []


def test_many_kills_change_nothing(straight: Any, tmp_path: Path) -> None:
    for at in (2, 1, 3, 2, 1, 4):
        with pytest.raises(Killed):
            run(tmp_path, stopping(at, kill, part=1), checkpoint_every=1)
    run(tmp_path)
    assert state_of(tmp_path) == straight


@pytest.mark.parametrize(
    ("number", "code", "at"),
    [
        *((signal.SIGTERM, Exit.TERMINATED, at) for at in (1, 5, 6, 7, 12)),
        *((signal.SIGINT, Exit.INTERRUPTED, at) for at in (1, 5, 6, 7, 12)),
        *(
            (number, Exit.TERMINATED, 5)
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
        ),
    ],
)
def test_a_signal_ends_the_step_saves_and_tells(
    number: int, code: Exit, at: int, straight: Any, tmp_path: Path
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(UserError) as stopped:
        run(tmp_path, stopping(at, lambda: os.kill(os.getpid(), number)))
    assert (stopped.value.code, stopped.value.exit_code) == (Reason.INTERRUPTED, code)
    assert f"after step {at} of 12" in stopped.value.problem
    assert "same command" in stopped.value.hint
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    saved = checkpoints.load_latest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.step == at
    run(tmp_path)
    assert state_of(tmp_path) == straight


@pytest.mark.parametrize("at", [1, 3])
def test_a_signal_during_validation_leaves_it_to_the_next_call(
    at: int, straight: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="SIGTERM"):
        run(tmp_path, stopping(at, lambda: os.kill(os.getpid(), signal.SIGTERM), validation=True))
    assert not is_finished(tmp_path)
    assert log_of(tmp_path)[-1]["split"] == "train"
    with pytest.raises(UserError, match="SIGTERM"):  # and again
        run(tmp_path, stopping(1, lambda: os.kill(os.getpid(), signal.SIGTERM), validation=True))
    run(tmp_path)
    assert is_finished(tmp_path)
    assert state_of(tmp_path) == straight
    assert leftovers(tmp_path) == []


def test_a_second_interrupt_stops_at_once_without_damage(straight: Any, tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    with pytest.raises(UserError) as stopped:
        run(tmp_path, stopping(4, twice), checkpoint_every=2)
    assert stopped.value.exit_code == Exit.INTERRUPTED
    saved = checkpoints.load_latest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.step == 2
    run(tmp_path)
    assert state_of(tmp_path) == straight


# -- real processes, killed
# ----------------------------------------------------------------------------------------------------------

FORGE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import importlib
importlib.import_module(sys.argv[2]).warm()
for line in sys.stdin:
    task = json.loads(line)
    if "wait" in task:
        print(os.waitstatus_to_exitcode(os.waitpid(task["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        os.environ.update(task["environment"])
        code = 1
        try:
            code = getattr(sys.modules[sys.argv[2]], task["call"])(*task["arguments"])
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
"""


class Forge:
    """A process that has imported torch and forks children, which call functions of a test module:
    a start takes milliseconds.
    """

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-c", FORGE, str(Path(__file__).parent), module]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **task: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, call: str, *arguments: Any, **environment: str) -> int:
        """The pid of a child that runs `call(*arguments)` and exits with its result."""
        return self._ask(call=call, arguments=arguments, environment=environment)

    def wait(self, pid: int) -> int:
        """Its exit code; negative: the signal that killed it."""
        return self._ask(wait=pid)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def warm() -> None:
    """Let torch import what it imports late, so that forks do not."""
    loop.fit(Tiny(), Rows(), squares, steps=1, config=validate(TrainConfig, {"device": "cpu"}))


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    made = Forge("test_resume")
    yield made
    made.close()


def child(folder: str, pause: float) -> int:
    """Train with a pause in every micro-batch; the exit code."""

    def slow(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        time.sleep(pause)
        return drawn(model, batch, generator)

    try:
        run(Path(folder), slow, checkpoint_every=2)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    return 0


def child_killed_in_call(folder: str, number: int) -> int:
    """Train and die by SIGKILL in the `number`-th call of the operating system that writes; beside
    `folder`, the steps whose checkpoints were written before.
    """
    calls, save = 0, checkpoints.save_checkpoint

    def noted(*arguments: Any, **options: Any) -> Path:
        path = save(*arguments, **options)
        with Path(f"{folder}.saved").open("a") as file:
            file.write(f"{path.name.removeprefix('step-')}\n")
        return path

    checkpoints.save_checkpoint = noted

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                if original.__name__ == "os_write":
                    # half of it reaches the file
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        return call

    for name in SYSTEM:
        setattr(storage, name, counted(getattr(storage, name)))
    run(Path(folder))
    return 0


def child_with_small_files(folder: str, size: int) -> int:
    """Train with a limit on the size of files, below the optimizer's moments."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return child(folder, 0.0)


def child_with_little_memory(folder: str, at: int) -> int:
    """Train under a limit on memory; from step `at` on every step asks for 4 GB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))

    def greedy() -> None:
        torch.ones(1 << 30)

    try:
        run(Path(folder), stopping(at, greedy), checkpoint_every=2)
    except UserError as error:
        return (
            int(error.exit_code)
            if "--batch-size 2" in error.hint and f"batch {at}" in error.problem
            else 1
        )
    return 0


def kills(forge: Forge, rounds: int, folder: Path, straight: Any, seed: int) -> None:
    draw = random.Random(seed)
    begun = time.monotonic()
    assert forge.wait(forge.start("child", str(folder / "timed"), 0.01)) == 0
    took = time.monotonic() - begun
    assert state_of(folder / "timed") == straight
    for at in range(rounds):
        home = folder / f"round{at}"
        pid = forge.start("child", str(home), 0.01)
        time.sleep(draw.uniform(0.02, took))
        with_signal = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        os.kill(pid, with_signal)
        assert forge.wait(pid) in {0, -with_signal, Exit.TERMINATED}
        if home.exists():
            checkpoints.load_latest_checkpoint(home)  # reading between is never an error
        run(home)
        assert state_of(home) == straight
        assert leftovers(home) == []


@pytest.mark.slow
def test_kills_at_random_moments(forge: Forge, straight: Any, tmp_path: Path) -> None:
    kills(forge, 5, tmp_path, straight, seed=1)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(forge: Forge, straight: Any, tmp_path: Path) -> None:
    kills(forge, 20, tmp_path, straight, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [3, 1])
def test_a_kill_inside_of_any_write(
    stride: int, forge: Forge, straight: Any, tmp_path: Path
) -> None:
    """The lock, every line of the log, two checkpoints and the export: half of a write, or the call
    before it, is all that happened.
    """
    finished, number = False, 1 - stride
    while not finished:
        number += stride
        home = tmp_path / str(number)
        finished = forge.wait(forge.start("child_killed_in_call", str(home), number)) == 0
        saved = checkpoints.load_latest_checkpoint(home)
        noted = Path(f"{home}.saved")
        assert (
            (0 if saved is None else saved.step)
            >= max(map(int, noted.read_text().split()), default=0)
            if noted.exists()
            else True
        )
        run(home)
        assert state_of(home) == straight
        assert leftovers(home) == []
        shutil.rmtree(home, ignore_errors=True)
    assert number > 100


@pytest.mark.slow
def test_a_limit_on_file_sizes_stops_with_exit_6(
    forge: Forge, straight: Any, tmp_path: Path
) -> None:
    assert forge.wait(forge.start("child_with_small_files", str(tmp_path), 1500)) == Exit.RESOURCES
    assert checkpoints.load_latest_checkpoint(tmp_path) is None
    assert leftovers(tmp_path) == []
    run(tmp_path)
    assert state_of(tmp_path) == straight


@pytest.mark.slow
def test_a_limit_on_memory_stops_with_exit_6(forge: Forge, straight: Any, tmp_path: Path) -> None:
    assert forge.wait(forge.start("child_with_little_memory", str(tmp_path), 6)) == Exit.RESOURCES
    saved = checkpoints.load_latest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.step == 4
    run(tmp_path)
    assert state_of(tmp_path) == straight


# -- disks that fail
# -----------------------------------------------------------------------------------------------------------------


def fault_of(call: Callable[[], object]) -> int | None:
    """The exit code of a call, None when it went well."""
    try:
        call()
    except UserError as error:
        return error.exit_code
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        errno.ENOSPC,
        pytest.param(errno.EIO, marks=pytest.mark.slow),
        pytest.param(errno.EDQUOT, marks=pytest.mark.slow),
    ],
)
def test_the_nth_call_fails(
    fault: int, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = {name: getattr(storage, name) for name in SYSTEM}
    calls = 0
    at = 0

    def failing(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(fault, os.strerror(fault))
            return originals[name](*arguments)

        return call

    number = {errno.ENOSPC: 1, errno.EIO: 2, errno.EDQUOT: 3}[fault]  # the three take turns
    stops = 0
    while True:
        home = tmp_path / str(number)
        with monkeypatch.context() as patch:
            for name in SYSTEM:
                patch.setattr(storage, name, failing(name))
            calls, at = 0, number
            code = fault_of(lambda home=home: run(home))  # type: ignore[misc]
        assert code in {None, Exit.RESOURCES}
        stops += code is not None
        ended = calls < number
        assert [
            name for name in leftovers(home) if "/checkpoints/" in name and "former" not in name
        ] == []
        if number % 4 == 0 or ended:
            run(home)
            assert state_of(home) == straight
        shutil.rmtree(home, ignore_errors=True)
        if ended:
            break
        number += 3
    assert stops > 20


def test_a_full_disk_keeps_the_former_checkpoint(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = storage.os_write

    def full(fd: int, data: memoryview) -> int:
        if "step-8.tmp" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            original(fd, data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data)

    monkeypatch.setattr(storage, "os_write", full)
    with pytest.raises(UserError) as stopped:
        run(tmp_path, checkpoint_every=4)
    monkeypatch.undo()
    assert (stopped.value.code, stopped.value.exit_code) == (Reason.DISK_FULL, Exit.RESOURCES)
    former = checkpoints.load_latest_checkpoint(tmp_path)
    assert former is not None
    assert former.step == 4
    assert leftovers(tmp_path) == []
    run(tmp_path)
    assert state_of(tmp_path) == straight


def weights_of(folder: Path, step: int) -> list[bytes]:
    return [
        (folder / "checkpoints" / f"step-{step}" / f"{name}.safetensors").read_bytes()
        for name in ("model", "optimizer")
    ]


def test_a_checkpoint_holds_its_step_while_the_training_goes_on(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, hashing, later, waited = (
        storage.os_write,
        storage.hash_with_size,
        threading.Event(),
        [],
    )

    def slow(fd: int, data: memoryview) -> int:
        if "step-3.tmp/model" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            waited.append(later.wait(20))
        return original(fd, data)

    def unhashed(path: Path) -> tuple[str, int]:
        assert path.name == "metrics.jsonl", f"{path} is read to be hashed"
        return hashing(path)

    monkeypatch.setattr(storage, "os_write", slow)
    monkeypatch.setattr(storage, "hash_with_size", unhashed)
    run(tmp_path / "beside", stopping(6, later.set), checkpoint_every=3, keep=9)
    monkeypatch.undo()
    assert waited == [True]
    assert state_of(tmp_path / "beside") == straight
    with pytest.raises(UserError, match="after step 3 of 12"):
        run(tmp_path / "stopped", stopping(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert weights_of(tmp_path / "beside", 3) == weights_of(tmp_path / "stopped", 3)
    content = weights_of(tmp_path / "beside", 3)
    meta = json.loads((tmp_path / "beside" / "checkpoints" / "step-3" / "meta.json").read_text())[
        "files"
    ]
    assert [meta[f"{name}.safetensors"]["sha256"] for name in ("model", "optimizer")] == [
        hashlib.sha256(one).hexdigest() for one in content
    ]


def test_a_checkpoint_that_cannot_be_written_ends_the_training_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, reached, failed = storage.os_write, [0], threading.Event()

    def full(fd: int, data: memoryview) -> int:
        if "step-2.tmp" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data)

    def patient(
        model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Outcome:
        reached[0] += model.training
        assert reached[0] <= 4 or failed.wait(20)
        time.sleep(0.02)
        return drawn(model, batch, generator)

    monkeypatch.setattr(storage, "os_write", full)
    with pytest.raises(UserError, match=r"disk full: .* free") as stopped:
        run(tmp_path, patient, checkpoint_every=2)
    assert (stopped.value.code, stopped.value.exit_code) == (Reason.DISK_FULL, Exit.RESOURCES)
    assert "step-2" in str(stopped.value.file)
    assert reached[0] < 2 * 8  # micro-batches: not at the end
    assert leftovers(tmp_path) == []
    assert checkpoints.list_steps(tmp_path / "checkpoints") == []


def test_disk_space_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: Any) -> Any:
        return shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000)

    monkeypatch.setattr(shutil, "disk_usage", none_left)
    with pytest.raises(UserError, match="disk full: need") as stopped:
        run(tmp_path)
    assert stopped.value.exit_code == Exit.RESOURCES
    assert checkpoints.list_steps(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_the_newest_are_kept(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=1, keep=3)
    assert checkpoints.list_steps(tmp_path / "checkpoints") == list(range(STEPS, STEPS - 3, -1))
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step-12\n"
