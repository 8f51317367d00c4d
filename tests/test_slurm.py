"""`run --slurm` under a stand-in for Slurm that runs the array's tasks, stops them as Slurm does
and requeues them: the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small

from bitimely_cli.main import main

GRACE = 15.0  # seconds from a signal to SIGKILL


class StandIn:
    """What the script relies on: arrays, their variables, `scontrol requeue`, signals of preemption
    and of the time limit, lost nodes.
    """

    def __init__(self, script: Path, home: Path) -> None:
        self.script, self.home = script, home
        self.options = dict(
            shlex.split(line.removeprefix("#SBATCH --"))[0].partition("=")[::2]
            for line in list_options(script)
        )
        self.requeued = home / "requeued"
        self.requeued.touch()
        (home / "bin").mkdir()
        tool = home / "bin" / "scontrol"
        tool.write_text(
            f'#!/bin/sh\n[ "$1" = requeue ] && echo "$2" >> {shlex.quote(str(self.requeued))}\n'
        )
        tool.chmod(0o755)
        first, _, last = self.options["array"].partition("-")
        self.tasks = range(int(first), int(last) + 1)
        self.processes = {task: self.start(task) for task in self.tasks}
        self.kills = {"limit": 0, "preemption": 0, "lost node": 0}

    def start(self, task: int) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_ARRAY_JOB_ID": "77",
            "SLURM_ARRAY_TASK_ID": str(task),
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
        }
        mode = {"append": "ab", "truncate": "wb"}[self.options["open-mode"]]
        with (self.home / f"slurm-77_{task}.out").open(mode) as out:
            return subprocess.Popen(
                ["bash", str(self.script)],
                env={**os.environ, **variables},
                cwd=self.home,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop(self, task: int, kind: str) -> None:
        """Stop a task as Slurm does, and start it again if it is requeued."""
        process = self.processes[task]
        if kind == "limit":  # --signal=B: the shell of the script alone
            os.kill(process.pid, signal.SIGUSR1)
        elif kind == "preemption":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(GRACE)
        asked = f"77_{task}\n" in self.requeued.read_text()
        self.requeued.write_text("")
        if code == 0:
            return
        self.kills[kind] += 1
        assert asked == (kind == "limit"), self.read_output(task)
        assert "requeue" in self.options
        self.processes[task] = self.start(task)

    def run(self, kills: int, draw: random.Random, span: float) -> None:
        """Until all tasks end, with so many stops in between, each up to `span` seconds after a
        start.
        """
        while sum(self.kills.values()) < kills:
            running = [task for task, process in self.processes.items() if process.poll() is None]
            assert running, self.kills
            time.sleep(draw.uniform(0.2, span))
            self.stop(draw.choice(running), draw.choice(list(self.kills)))
        for task, process in self.processes.items():
            assert process.wait(300) == 0, self.read_output(task)

    def read_output(self, task: int) -> str:
        return (self.home / f"slurm-77_{task}.out").read_text()


def list_options(script: Path) -> list[str]:
    """The lines before the first command, which are all that sbatch reads."""
    lines = script.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return [line for line in lines[:first] if line.startswith("#SBATCH ")]


def make_recipe(folder: Path, steps: int, models: list[str]) -> Path:
    text = (
        small.SMALL_RECIPE.replace("steps = 1", f"steps = {steps}")
        .replace("[train]", "[train]\ncheckpoint_every = 2")
        .replace("bootstrap = 20", "bootstrap = 0\nbaselines = 'cheap'")
    )
    path = folder / "two-models.toml"
    path.write_text(
        text + "layers = 2\ndropout = 0.1\n[matrix]\nmodel = " + json.dumps(models) + "\n"
    )
    return path


def collect_results(ws: Path) -> dict[str, object]:
    """Weights, losses, predictions and tables."""
    names = (
        "runs/*/model/model.safetensors",
        "runs/*/predictions.parquet",
        "reports/*/results.csv",
    )
    found: dict[str, object] = {
        str(path.relative_to(ws)): path.read_bytes() for name in names for path in ws.glob(name)
    }
    for path in ws.glob("runs/*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(ws))] = [
            (line["step"], line["split"], line["loss"]) for line in lines
        ]
    return found


def check_kills(
    home: Path, kills: int, steps: int, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, calm, stormy = (
        make_recipe(home, steps, models),
        small.copy_data(home / "calm"),
        small.copy_data(home / "stormy"),
    )
    assert main(["run", str(recipe), "-w", str(calm)]) == 0
    monkeypatch.chdir(home)
    assert main(["run", recipe.name, "-w", stormy.name, "--slurm", "job.sh", "--jobs", "2"]) == 0
    (home / "slurm").mkdir()
    stand_in = StandIn(home / "job.sh", home / "slurm")
    try:
        stand_in.run(kills, random.Random(kills), 8.0)
    finally:
        for process in stand_in.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    expected = collect_results(calm)
    assert len(expected) == 1 + 5 * len(models), list(expected)
    assert collect_results(stormy) == expected
    assert not [path for path in stormy.rglob("*") if ".tmp-" in path.name]
    assert "Traceback" not in stand_in.read_output(1) + stand_in.read_output(2)


@pytest.mark.slow
def test_tasks_that_are_stopped_three_times_end_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(tmp_path, 3, 4, ["gpt"], monkeypatch)


@pytest.mark.long
def test_tasks_that_are_stopped_twenty_times_end_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(tmp_path, 20, 40, ["bitimelygpt", "gpt"], monkeypatch)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of Python, in a folder with a difficult name: writes its arguments and folder,
    then sleeps if it finds the file `wait`.
    """
    folder = tmp_path / 'it\'s a $HOME "of" mine; #1'
    folder.mkdir()
    (folder / "python").write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys, time\n"
        "place = pathlib.Path(sys.argv[0]).parent\n"
        "(place / 'call.json').write_text(json.dumps([sys.argv[1:], os.getcwd(), os.environ['OMP_NUM_THREADS']]))\n"
        "time.sleep(60 if (place / 'wait').exists() else 0)\n"
    )
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(folder)
    return folder


def test_the_script_passes_every_argument_as_it_was_given(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stub / "my `x`'s" / "recipe.toml"
    recipe.parent.mkdir()
    recipe.write_text(small.SMALL_RECIPE)
    words = [
        "--only",
        "a b",
        "--only",
        "-x",
        "--only",
        "staging",
        "--set",
        "train.seed=3",
        "--devices",
        "2",
        "-w",
        "ws $(touch hacked)",
    ]
    options = ["--sbatch", "partition=gpu", "--sbatch", "comment=it's #1", "--sbatch", "exclusive"]
    assert (
        main(
            [
                "run",
                str(recipe.relative_to(stub)),
                *words,
                "--slurm",
                "job.sh",
                "--jobs",
                "3",
                *options,
            ]
        )
        == 0
    )
    script = stub / "job.sh"
    assert not (stub / "hacked").exists()
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd="/",
        env={"PATH": os.environ["PATH"], "SLURM_CPUS_PER_TASK": "4"},
        check=False,
    )
    assert done.returncode == 127, "the script is not in this folder"
    subprocess.run(
        ["bash", str(script)],
        cwd="/",
        env={"PATH": os.environ["PATH"], "SLURM_CPUS_PER_TASK": "4"},
        check=True,
    )
    arguments, folder, threads = json.loads((stub / "call.json").read_text())
    assert (folder, threads) == (str(stub), "4")
    assert arguments[:4] == ["-m", "bitimely", "run", str(recipe.relative_to(stub))]
    assert set(arguments[4:]) == {
        "--only=a b",
        "--only=-x",
        "--only=staging",
        "--set=train.seed=3",
        "--devices=2",
        "--workspace=ws $(touch hacked)",
    }
    assert not (stub / "hacked").exists()
    found = [shlex.split(line.removeprefix("#SBATCH ")) for line in list_options(script)]
    assert found[-3:] == [["--partition=gpu"], ["--comment=it's #1"], ["--exclusive"]]
    assert ["--array=1-3"] in found
    assert re.fullmatch(r"--job-name=[\w.-]+", found[0][0])
    written = script.read_bytes()
    assert (
        main(
            [
                "run",
                str(recipe.relative_to(stub)),
                *words,
                "--slurm",
                "job.sh",
                "--jobs",
                "3",
                *options,
            ]
        )
        == 0
    )
    assert script.read_bytes() == written


@pytest.mark.parametrize(
    ("number", "requeued"),
    [pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow), (signal.SIGUSR1, True)],
)
def test_a_cancelled_task_is_not_requeued(stub: Path, number: int, requeued: bool) -> None:
    (stub / "wait").touch()
    assert main(["run", "smoke", "--slurm", "job.sh"]) == 0
    (stub / "slurm").mkdir()
    stand_in = StandIn(stub / "job.sh", stub / "slurm")
    process = stand_in.processes[1]
    try:
        until = time.monotonic() + 30
        while not (stub / "call.json").exists():
            assert time.monotonic() < until, stand_in.read_output(1)
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(GRACE) == 143
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert stand_in.requeued.read_text() == ("77_1\n" if requeued else "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sbatch", "time=1"], "--sbatch without --slurm"),
        (["--slurm", "job.sh", "--shard", "1/2"], "--shard with --slurm"),
        (["--slurm", "job.sh", "--sbatch", "array=1-9"], "--jobs N"),
        (["--slurm", "job.sh", "--sbatch", "time 1"], "NAME=VALUE"),
        (["--slurm", "job.sh", "--sbatch", "comment=a\ntouch b"], "control characters"),
        (["--slurm", "absent/job.sh"], "folder is missing"),
        (["--slurm", "mine.sh"], "is there already"),
        (["--slurm", "."], "is there already"),
        (["--slurm", "job.sh", "--set", "train.epohcs=1"], "epochs"),
    ],
)
def test_what_cannot_be_written_is_refused(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sh").write_text("#!/bin/sh\n")
    assert main(["run", "smoke", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.sh"]
    assert (tmp_path / "mine.sh").read_text() == "#!/bin/sh\n"


def test_a_dry_run_shows_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "smoke", "--slurm", "job.sh", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")
    assert list(tmp_path.iterdir()) == []
