"""A workspace that may not be written: every verb that writes ends with 6 and a plain line, every
other one does its work.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small
from faults import OPERATIONS
from test_faults import RECIPE

from bitimely_cli.main import main
from bitimely_core.errors import Exit
from bitimely_core.store import storage

REFUSALS = {errno.EROFS: "read-only file system", errno.EACCES: "permission denied"}
WRITERS = {
    "tokenize": ["tokenize", "generic/classification", "--window", "100", "--name", "other"],
    "pretrain": [*small.VERBS["pretrain"], "--run", "other"],
    "pretrain-anew": [*small.VERBS["pretrain"], "--force-new"],
    "finetune": [*small.VERBS["finetune"], "--run", "other"],
    "evaluate": small.VERBS["evaluate"],
    "embed": small.VERBS["embed"],
    "analyze": small.VERBS["analyze"],
    "report": small.VERBS["report"],
    "export": small.VERBS["export"],
    "reproduce": ["reproduce", "plain"],
    "run": ["run", "RECIPE"],
}
READERS = {
    "verify": ["verify", "--deep"],
    "list": ["list", "runs"],
    "dry-run": [*small.VERBS["pretrain"], "--run", "other", "--dry-run"],
    "reproduce": ["reproduce", "plain", "--dry-run"],
    "finished": small.VERBS["pretrain"],
}


@contextmanager
def refused_writes(number: int) -> Iterator[None]:
    """Every operation that would change the disk fails with the error `number`, as on a disk that
    is mounted to be read.
    """

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **more: Any) -> Any:
            if name == "os_open" and not args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return call(*args, **more)
            raise OSError(number, os.strerror(number), str(args[0]))

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(storage, name, wrap(name, getattr(storage, name)))
        yield


def hash_tree(home: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = small.copy_workspace(tmp_path_factory.mktemp("read") / "ws")
    shutil.rmtree(made / "runs" / "unfinished")  # which `verify` names
    (made.parent / "two.toml").write_text(RECIPE)
    return made


def call(home: Path, argv: list[str], number: int) -> int:
    with refused_writes(number):
        return main(
            [word if word != "RECIPE" else str(home.parent / "two.toml") for word in argv]
            + ["-w", str(home)]
        )


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("verb", WRITERS)
def test_a_verb_that_writes_ends_with_6(
    verb: str, number: int, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hash_tree(home)
    capsys.readouterr()
    code = call(home, WRITERS[verb], number)
    err = capsys.readouterr().err
    assert code == Exit.RESOURCES, err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error[")]
    assert lines, err
    assert any(line.startswith("error[io_error]") and REFUSALS[number] in line for line in lines), (
        err
    )
    assert hash_tree(home) == before


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("verb", READERS)
def test_a_verb_that_reads_does_its_work(
    verb: str, number: int, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hash_tree(home)
    capsys.readouterr()
    assert call(home, READERS[verb], number) == Exit.OK, capsys.readouterr().err
    assert "error[" not in capsys.readouterr().err
    assert hash_tree(home) == before
