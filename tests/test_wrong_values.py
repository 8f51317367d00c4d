"""Every option and argument of every verb, and every setting, with values that nobody means: one
clear line and a stable exit code, quickly.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import typer

from bitimely_cli.main import app, main
from bitimely_core.schemas.runs import RunRecord

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WRONG = [
    *(
        "",
        " ",
        "abc",
        "-1",
        "0",
        "-0.5",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1_000",
        "٣",
        "9" * 40,
        "1/0",
        "x" * 5000,
        "é" * 200,
    ),
    *(
        "a\nb",
        "a\x1b[31mb",
        "\u202egnp",
        "a=b",
        "=",
        "a,b,,",
        "{",
        "[1,2",
        "..",
        "../../x",
        "/",
        "/dev/null/x",
        "s3://bucket/x",
        "%",
        "\ud800",
    ),
    *("FOLDER", "FILE", "FOLDER/absent/x"),
]
SAMPLE = 1  # values an option in the fast suite; all of them in `make test-long`
SLOW = 4.0  # CPU seconds of one refusal, the first import of the libraries among them
WORK = {  # verb -> a command line that is right, and does nothing
    "ingest": ["ingest", "pophr", "CLAIMS", "--phecode-map", "FILE", "--dry-run"],
    "tokenize": ["tokenize", "generic/classification", "--dry-run"],
    "verify": ["verify", "FOLDER"],
    "list": ["list", "models"],
    "doctor": ["doctor"],
    "pretrain": ["pretrain", *small.PLAIN, "--dry-run"],
    "finetune": [
        "finetune",
        "plain",
        "--data",
        small.VIEW,
        "--fraction",
        "1",
        "--steps",
        "2",
        "--dry-run",
    ],
    "train": ["train", "resnet", "--data", small.VIEW, "--steps", "2", "--dry-run"],
    "evaluate": ["evaluate", "tuned", "--dry-run"],
    "predict": ["predict", "tuned", "CACHE", "--dry-run"],
    "embed": ["embed", "plain", "--dry-run"],
    "analyze": ["analyze", "svd", "plain", "--dry-run"],
    "report": ["report", "tuned", "--dry-run"],
    "dashboard": ["dashboard", "--dry-run"],
    "run": ["run", "smoke", "--dry-run"],
    "demo": ["demo", "--dry-run"],
    "reproduce": ["reproduce", "plain", "--dry-run"],
    "export": ["export", "plain", "--dry-run"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workspace `home`, a source of claims, a folder and a file."""
    folder = tmp_path_factory.mktemp("wrong")
    small.copy_workspace(folder / "home")
    (folder / "claims").mkdir()
    (folder / "claims" / "claims.csv").write_text("patient_id,date,icd9\np1,2001-02-03,250.00\n")
    (folder / "folder").mkdir()
    (folder / "file").write_text("icd9,phecode\n250.00,250.2\n")
    return folder


def list_parameters(verb: str) -> list[str]:
    """The options of a verb that take a value, and its arguments by their places."""
    found = [p for p in COMMANDS[verb].params if not getattr(p, "is_flag", False)]
    arguments = [
        f"<{i}>" for i, p in enumerate(p for p in found if p.param_type_name == "argument")
    ]
    return [
        *arguments,
        *(p.opts[0] for p in found if p.param_type_name == "option" and p.name != "help"),
    ]


def list_settings() -> list[str]:
    """Those of a run, with all that its model and objective have."""
    settings = RunRecord.load(
        small.find_workspace() / "runs" / "plain" / "run.json"
    ).settings.model_dump()
    return [
        f"{section}.{key}"
        for section, values in settings.items()
        if isinstance(values, dict)
        for key in values
    ]


def make_line(place: Path, verb: str, parameter: str, value: str) -> list[str]:
    argv = list(WORK[verb])
    if parameter.startswith("<"):
        at = 1 + int(parameter[1:-1])
        argv[at:] = (
            [value, *argv[at + 1 :]]
            if at < len(argv) and not argv[at].startswith("-")
            else [value, *argv[at:]]
        )
    else:
        argv += (
            [parameter, value]
            if not parameter.startswith("--set ")
            else ["--set", f"{parameter[6:]}={value}"]
        )
    if parameter != "--workspace":
        argv += ["-w", str(place / "home")]
    names = {
        "CLAIMS": place / "claims",
        "FOLDER": place / "folder",
        "FILE": place / "file",
        "CACHE": place / "home" / "cache" / "generic",
    }
    return [
        re.sub("^(CLAIMS|FOLDER|FILE|CACHE)\\b", lambda found: str(names[found[0]]), text)
        for text in argv
    ]


def list_tree(place: Path) -> dict[str, float]:
    return {
        str(path): path.lstat().st_mtime_ns
        for path in place.rglob("*")
        if path.name != ".lock" and path.is_file()
    }


def find_fault(argv: list[str]) -> str | None:
    """What is wrong with the end of a command; None: it is as promised."""
    out, err, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    seconds, lines = time.process_time() - start, err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("error[")]
    if code not in {0, 2, 3, 4, 5, 6}:
        return f"exit {code}: {lines[-1:]}"
    if code and (
        not errors or "Traceback" in err.getvalue() or any(len(line) > 1500 for line in errors)
    ):
        return f"exit {code}, {len(errors)} errors, {max(map(len, lines), default=0)} characters: {[line[:200] for line in lines[:3]]}"
    if "internal" in err.getvalue() or "\x1b" in err.getvalue() or "\u202e" in err.getvalue():
        return f"exit {code}: {lines[:3]}"
    return f"{seconds:.1f} s" if code and seconds > SLOW else None


def sweep(
    place: Path, verb: str, parameters: list[str], sample: int | None
) -> Iterator[tuple[Any, ...]]:
    before = list_tree(place)
    for parameter in parameters:
        draw = random.Random(f"{verb} {parameter}")
        for value in WRONG if sample is None else draw.sample(WRONG, sample):
            if fault := find_fault(make_line(place, verb, parameter, value)):
                yield verb, parameter, value[:40], fault
    after = list_tree(place)
    if after != before:
        yield verb, "wrote", sorted({*after.items()} ^ {*before.items()})[:5]


@pytest.mark.parametrize("sample", [SAMPLE, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=[pytest.mark.slow] if verb == "ingest" else []) for verb in WORK],
)
def test_no_value_of_an_option_is_a_fault_of_the_program(
    verb: str, sample: int | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(place / "here")
    # --devices starts no process that the sweep does not wait for
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert list(sweep(place, verb, list_parameters(verb), sample)) == []


@pytest.mark.slow
@pytest.mark.parametrize("sample", [SAMPLE, pytest.param(None, marks=pytest.mark.long)])
def test_no_value_of_a_setting_is_a_fault_of_the_program(
    sample: int | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert (
        list(sweep(place, "pretrain", [f"--set {name}" for name in list_settings()], sample)) == []
    )


def test_the_sweep_knows_every_verb() -> None:
    assert set(WORK) == set(COMMANDS)
    assert sum(len(list_parameters(verb)) for verb in WORK) > 150
    assert len(list_settings()) > 40


@pytest.mark.parametrize("verb", sorted(WORK))
def test_the_command_line_without_a_wrong_value_is_right(
    verb: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    # verify and report of an unfinished run or none
    assert main([*make_line(place, verb, "--workspace", str(place / "home"))]) in {0, 4}


@pytest.mark.parametrize("device", ["cuda:64", "cuda:300", "gpu"])
@pytest.mark.parametrize(
    "verb", sorted(name for name in COMMANDS if "--device" in list_parameters(name))
)
def test_a_dry_run_refuses_the_device_that_the_call_refuses(
    verb: str, device: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its line: a dry run must not plan what cannot be done here."""
    argv, lines = (
        [
            text.replace("device=cpu", f"device={device}")
            for text in make_line(place, verb, "--device", device)
        ],
        [],
    )
    for line in (argv, [text for text in argv if text != "--dry-run"]):
        assert main(line) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == lines[1]
    assert f"--device: no device '{device}'" in lines[0]


@pytest.mark.parametrize("name", ["gpu", "cuda:x"])
def test_an_experiment_refuses_a_device_that_no_machine_has(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = place / "recipe.toml"
    recipe.write_text(small.SMALL_RECIPE.replace("batch_size", f'device = "{name}"\nbatch_size'))
    for argv in (["run", "smoke", "--set", f"train.device={name}"], ["run", str(recipe)]):
        for more in ([], ["--dry-run"]):
            assert main([*argv, *more, "-w", str(place / "none")]) == 2
            assert f"--device: no device '{name}'" in capsys.readouterr().err
    assert not (place / "none").exists()
