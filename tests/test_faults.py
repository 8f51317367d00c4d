"""Finished means finished: each command is killed at every operation of the disk and repeated; then
the workspace is the undisturbed one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
import small

from bitimely_cli.main import main

RECIPE = """
title = "Two stages"

[pretrain]
preset = "tiny"
data = "generic/classification"
steps = 2

[finetune]
data = ["generic/classification"]
fraction = 1.0
steps = 2

[evaluate]
bootstrap = 20

[model]
tokenizer = "patch"
patch = 10
layers = 2
dim = 8
heads = 2
value_dim = 16
ffn_dim = 16

[train]
batch_size = 8
"""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The workspace before a verb of `small.VERBS`."""
    folder, ready = tmp_path_factory.mktemp("prepared"), {}
    now = small.copy_data(folder / "data")

    def before(verb: str) -> Path:
        nonlocal now
        names = list(small.VERBS)
        with faults.stopped_clock():
            for name in names[len(ready) : names.index(verb) + 1]:
                ready[name] = now
                now = shutil.copytree(now, folder / name)
                small.call(now, name)
        return ready[verb]

    return before


def call(*argv: str) -> Callable[[Path], None]:
    def command(home: Path) -> None:
        assert main([*argv, "-w", str(home)]) in {0, 3}

    return command


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["analyze", "embed", "export", "report"])
def test_a_killed_reader_of_runs_is_repeated(
    prepared: Callable[[str], Path], tmp_path: Path, verb: str
) -> None:
    assert (
        faults.check_kills(
            tmp_path, prepared(verb), lambda home: small.call(home, verb), sample=faults.SAMPLE
        )
        > 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["pretrain", "finetune", "evaluate"])
def test_a_killed_training_or_evaluation_is_repeated(
    prepared: Callable[[str], Path], tmp_path: Path, verb: str
) -> None:
    assert (
        faults.check_kills(
            tmp_path, prepared(verb), lambda home: small.call(home, verb), sample=faults.SAMPLE
        )
        > 20
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "verb", ["pretrain", "finetune", "evaluate", "analyze", "embed", "export", "report"]
)
def test_a_verb_killed_at_every_operation_is_repeated(
    prepared: Callable[[str], Path], tmp_path: Path, verb: str
) -> None:
    faults.check_kills(tmp_path, prepared(verb), lambda home: small.call(home, verb), sample=None)


def make_ingest(tmp_path: Path) -> Callable[[Path], None]:
    small.write_raw(tmp_path / "raw")
    return call(
        "ingest", "generic", str(tmp_path / "raw"), "--map", str(tmp_path / "raw" / "map.toml")
    )


CLAIMS = (
    "ingest",
    "synthetic-claims",
    "--subjects",
    "60",
    "--no-select",
    "--min-codes",
    "2",
    "--max-events",
    "24",
)
TOKENIZE = ("tokenize", "generic/classification", "--window", "100", "--name", "again")


@pytest.mark.slow
@pytest.mark.parametrize("sample", [faults.SAMPLE, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", ["recordings", "claims", "tokenize", "tokenize claims"])
def test_a_killed_command_on_data_is_repeated(
    tmp_path: Path, verb: str, sample: int | None
) -> None:
    home = tmp_path / "prepared"
    home.mkdir()
    if verb.startswith("tokenize"):
        small.copy_data(home)
    command = {
        "recordings": make_ingest(tmp_path),
        "claims": call(*CLAIMS),
        "tokenize": call(*TOKENIZE),
        "tokenize claims": call(
            "tokenize", "synthetic-claims", "--no-select", "--min-codes", "3", "--name", "again"
        ),
    }[verb]
    assert faults.check_kills(tmp_path, home, command, sample=sample) > 20


@pytest.mark.long
@pytest.mark.parametrize("sample", [faults.SAMPLE])
def test_a_killed_recipe_is_repeated(tmp_path: Path, sample: int) -> None:
    home = tmp_path / "prepared"
    home.mkdir()
    small.copy_data(home)
    recipe = tmp_path / "two.toml"
    recipe.write_text(RECIPE)
    assert faults.check_kills(tmp_path, home, call("run", str(recipe)), sample=sample) > 100


@pytest.mark.long
def test_a_killed_reproduction_is_repeated(prepared: Callable[[str], Path], tmp_path: Path) -> None:
    assert (
        faults.check_kills(
            tmp_path, prepared("export"), call("reproduce", "tuned"), sample=faults.SAMPLE
        )
        > 40
    )


def test_files_of_a_live_process_stay(tmp_path: Path) -> None:
    """While a file is written, another process that sweeps the folder does not remove it."""
    import subprocess
    import sys

    from bitimely_core.store import storage

    sweep = f"from pathlib import Path; from bitimely_core.store import storage; print(storage.remove_temporary_files(Path({str(tmp_path)!r})))"
    (tmp_path / "old.json.tmp-1-0123abcd").write_bytes(
        b"of a dead process, though number 1 is alive"
    )
    found: list[str] = []

    def fill(stream: object) -> None:
        found.append(
            subprocess.run(
                [sys.executable, "-c", sweep], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        stream.write(b"content")  # type: ignore[attr-defined]

    storage.write_file(tmp_path / "new.json", fill)
    assert found == ["1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json"]
