"""Two processes on one workspace: the same command twice at once ends as once, or one of them ends
with 7 and nothing is damaged.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from small import SMALL_RECIPE

from bitimely_cli.main import main
from bitimely_core.errors import UserError
from bitimely_core.store import locks, storage

STEPS = ["--steps", "1", "--batch-size", "8"]
PRETRAIN = [
    "pretrain",
    "--preset",
    "tiny",
    "--data",
    "synthetic/staging",
    *STEPS,
    "--set",
    "model.tokenizer=patch",
]
FINETUNE = ["finetune", "tiny", "--data", "synthetic/staging", "--fraction", "1", *STEPS]
# seconds of stages; the speed of trainings is that of a clock that stands still
TIMED = ("pipelines/*/*/*.json",)
RECIPE = "two.toml"  # beside the workspace
VERBS: dict[str, tuple[list[str], list[str]]] = {  # what is removed before, the command
    "ingest": (["cache", "tokens"], ["ingest", "synthetic"]),
    "ingest-anew": ([], ["ingest", "synthetic", "--force-new"]),
    "ingest-claims": (
        [],
        ["ingest", "synthetic-claims", "--subjects", "60", "--no-select", "--min-codes", "2"],
    ),
    "tokenize": (["tokens"], ["tokenize", "synthetic/staging"]),
    "pretrain": (["runs"], PRETRAIN),
    "pretrain-anew": ([], [*PRETRAIN, "--force-new"]),
    "finetune": (["runs/tiny-staging"], FINETUNE),
    "finetune-anew": ([], [*FINETUNE, "--force-new"]),
    "evaluate": ([], ["evaluate", "tiny-staging", "--bootstrap", "20"]),
    "embed": ([], ["embed", "tiny-staging"]),
    "report": ([], ["report", "tiny-staging"]),
    "export": ([], ["export", "tiny-staging"]),
    "verify": ([], ["verify", "--deep"]),
    "reproduce": ([], ["reproduce", "tiny"]),
    "reproduce-anew": ([], ["reproduce", "tiny-staging", "--force-new"]),
    "run": ([], ["run", RECIPE]),
}


def fork(argv: list[str], log: Path, delay: float = 0.0) -> int:
    """A child of this warmed process that runs the command; its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 99
    try:
        with log.open("w", encoding="utf-8") as file:
            sys.stdout = sys.stderr = file
            time.sleep(delay)
            try:
                with mock.patch("time.perf_counter", return_value=0.0):
                    code = main(argv)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(*pids: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def hash_tree(ws: Path) -> dict[str, str]:
    timed = {path for pattern in TIMED for path in ws.glob(pattern)}
    files = (
        path
        for path in ws.rglob("*")
        if path.is_file() and path not in timed and path.name != ".lock"
    )
    return {
        str(path.relative_to(ws)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a pre-trained, fine-tuned and evaluated run."""
    home = tmp_path_factory.mktemp("base")
    ws = home / "ws"
    ws.mkdir()
    (ws / "id.key").write_bytes(bytes(32))  # else the pseudonyms differ
    for argv in (PRETRAIN, FINETUNE, ["evaluate", "tiny-staging", "--bootstrap", "20"]):
        assert wait_for(fork([*argv, "-w", str(ws)], home / "log")) == [0], (
            home / "log"
        ).read_text()
    return ws


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_the_same_command_twice_at_once(verb: str, base: Path, tmp_path: Path) -> None:
    removed, argv = VERBS[verb]
    (tmp_path / RECIPE).write_text(SMALL_RECIPE)
    argv = [word if word != RECIPE else str(tmp_path / RECIPE) for word in argv]
    trees = []
    for name, delays in (("once", [0.0]), ("twice", [0.0, 0.0])):
        ws = tmp_path / name / "ws"
        shutil.copytree(base, ws)
        for part in removed:
            shutil.rmtree(ws / part)
        logs = [tmp_path / f"{name}{k}.log" for k in range(len(delays))]
        codes = wait_for(
            *(
                fork([*argv, "-w", str(ws)], log, delay)
                for log, delay in zip(logs, delays, strict=True)
            )
        )
        texts = [log.read_text() for log in logs]
        done = {3} if verb == "ingest-claims" else {0}  # some rows cannot be used
        assert set(codes) in (done, done | {7}), texts
        assert all(
            "in use by process" in text
            for text, code in zip(texts, codes, strict=True)
            if code == 7
        ), texts
        assert wait_for(fork(["verify", "--deep", "-w", str(ws)], tmp_path / "verify.log")) == [
            0
        ], (tmp_path / "verify.log").read_text()
        trees.append(hash_tree(ws))
        assert not [path for path in ws.rglob("*") if storage.TEMPORARY_NAME.search(path.name)]
    assert trees[0].keys() == trees[1].keys()
    assert [name for name, content in trees[0].items() if content != trees[1][name]] == []


@pytest.mark.long
def test_a_reader_sees_one_generation_while_another_is_published(
    base: Path, tmp_path: Path
) -> None:
    ws = Path(shutil.copytree(base, tmp_path / "ws"))
    writer = fork(["ingest", "synthetic", "--force-new", "-w", str(ws)], tmp_path / "writer.log")
    readers = [
        fork(["verify", "--deep", "-w", str(ws)], tmp_path / f"{k}.log", 0.3 * k) for k in range(4)
    ]
    assert wait_for(writer, *readers) == [0] * 5, [
        (tmp_path / f"{k}.log").read_text() for k in range(4)
    ]


@pytest.mark.long
def test_a_killed_holder_leaves_no_lock(base: Path, tmp_path: Path) -> None:
    ws = Path(shutil.copytree(base, tmp_path / "ws"))
    holder = fork(["ingest", "synthetic", "--force-new", "-w", str(ws)], tmp_path / "holder.log")
    lock = ws / "cache" / "synthetic" / ".lock"
    end = time.monotonic() + 30
    while not (lock.exists() and str(holder) in lock.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(holder, 9)
    assert wait_for(holder) == [-9]
    assert wait_for(fork(["ingest", "synthetic", "-w", str(ws)], tmp_path / "next.log")) == [0], (
        tmp_path / "next.log"
    ).read_text()
    assert wait_for(fork(["verify", "--deep", "-w", str(ws)], tmp_path / "v.log")) == [0], (
        tmp_path / "v.log"
    ).read_text()


@pytest.mark.parametrize(
    "remove", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("old"))]
)
def test_who_waits_for_a_folder_that_is_replaced_locks_the_new_one(
    remove: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    held, end = threading.Event(), threading.Event()

    def wait_and_hold() -> None:
        with locks.lock_folder(folder, 10.0):
            held.set()
            end.wait(10)

    with locks.lock_folder(folder):
        waiting = threading.Thread(target=wait_and_hold)
        waiting.start()
        time.sleep(0.2)
        remove(folder)
    assert held.wait(10)
    try:
        with pytest.raises(UserError) as caught:
            locks.lock_folder(folder).__enter__()
        assert caught.value.exit_code == 7
    finally:
        end.set()
        waiting.join()
