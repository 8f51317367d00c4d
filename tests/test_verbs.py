"""Every verb with wrong arguments, signals, closed streams and broken plug-ins: one clear line,
never exit 1, nothing written in vain.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from bitimely_cli.main import app, main
from bitimely_core import registry
from bitimely_core.train.checkpoints import load_latest_checkpoint

BITIMELY = [sys.executable, "-m", "bitimely_cli"]
VERBS = [
    "ingest",
    "tokenize",
    "verify",
    "list",
    "doctor",
    "pretrain",
    "finetune",
    "train",
    "evaluate",
    "predict",
    "embed",
    "analyze",
    "report",
    "run",
    "demo",
    "reproduce",
    "export",
]


def run(*argv: str | bytes, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
        ),
    }
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": 120, **more}
    return subprocess.run([*BITIMELY, *argv], cwd=cwd, check=False, **settings)  # type: ignore[call-overload, no-any-return]


def test_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert all(f"  {verb} " in out for verb in VERBS)
    assert err == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["pretrain", "--presett", "x"], ["ingest"], ["nothing"], ["evaluate", "x", "--bootstrap", "many"], ["list", "models", "more", "words"],
        ["embed", "x", "--batch-size", "0"], ["tokenize", "sleep-edf", "--window", "-1"], ["run", "smoke", "--jobs"],
    ],
)  # fmt: skip
def test_usage_errors_are_objects_under_json(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*argv, "--json"]) == 2
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert (body["exit_code"], body["error"]["level"]) == (2, "error")
    assert err.startswith("error[")


@pytest.mark.parametrize(
    "argv",
    [
        ["ingest", "synthetic"], ["ingest", "synthetic-claims"], ["ingest", "pophr", "{raw}", "--phecode-map", "{raw}/claims.csv"], ["ingest", "generic", "{raw}"],
        pytest.param(["tokenize", "synthetic"], marks=pytest.mark.slow), pytest.param(["tokenize", "synthetic-claims"], marks=pytest.mark.slow), pytest.param(["pretrain"], marks=pytest.mark.slow), ["finetune", "tiny"], ["evaluate", "tiny"], ["embed", "tiny"], ["predict", "tiny", "{raw}"],
        ["analyze", "leakage"], ["analyze", "svd", "tiny"], ["report", "tiny"], ["run", "smoke"], ["demo"], ["reproduce", "tiny"], ["export", "tiny"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_dry_runs_leave_an_empty_folder_empty(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw, home = tmp_path / "raw", tmp_path / "home"
    raw.mkdir()
    home.mkdir()
    (raw / "claims.csv").write_text("patient_id,date,icd9\np1,2001-02-03,250.00\n")
    (raw / "a.csv").write_text("time,ppg\n0,1\n1,2\n")
    monkeypatch.chdir(home)
    code = main([*(text.replace("{raw}", str(raw)) for text in argv), "--dry-run"])
    assert code in {0, 2, 4}, capsys.readouterr().err
    assert list(home.iterdir()) == []
    assert sorted(p.name for p in raw.iterdir()) == ["a.csv", "claims.csv"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            ["ingest", "synthetic-claims", "--subjects", "200000"], marks=pytest.mark.slow
        ),
        ["run", "smoke"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_signal_ends_a_verb_within_seconds(
    argv: list[str], number: int, code: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(
        [*BITIMELY, *argv],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "workspace").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    start = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 12
    assert process.returncode == code, err
    line = next(line for line in err.splitlines() if line.startswith("error[interrupted]"))
    assert signal.Signals(number).name in line
    assert re.search("[Rr]epeat the (same )?command|the same command again", line)
    assert "Traceback" not in err


def test_a_signal_in_native_code_ends_the_verb_too(tmp_path: Path) -> None:
    script = (
        "import signal, time\n"
        "from bitimely_cli import main, signals, verbs\n"
        "signals.GRACE = 0.5\n"
        "def stuck(arguments):\n"
        # no handler of Python acts
        "    signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "verbs.run_command = stuck\n"
        "main.main(['list', 'models', '--json'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert json.loads(out)["exit_code"] == 143
    assert err.startswith("error[interrupted] stopped by SIGTERM")


@pytest.mark.parametrize(
    "swallow", ["weakref.finalize(thing, stop)", "thing.__class__.__del__ = stop"]
)
def test_a_signal_in_a_callback_that_swallows_errors_ends_the_verb_too(
    swallow: str, tmp_path: Path
) -> None:
    script = (
        "import signal, sys, time, weakref\n"
        "from bitimely_cli import main, verbs\n"
        "class Thing: pass\n"
        "def stop(thing=None):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "def work(arguments):\n"
        f"    thing = Thing(); {swallow}\n"
        "    del thing\n"
        "    time.sleep(60)\n"
        "verbs.run_command = work\n"
        "sys.exit(main.main(['list', 'models', '--json']))\n"
    )
    start = time.monotonic()
    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                             env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})  # fmt: skip
    assert time.monotonic() - start < 7  # before the watcher ends what is stuck
    assert process.returncode == 143, process.stderr
    assert json.loads(process.stdout)["exit_code"] == 143
    assert process.stderr.startswith("error[interrupted] stopped by SIGTERM")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
def test_closed_and_narrow_streams(tmp_path: Path) -> None:
    command = " ".join([*BITIMELY, "list", "models"])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    for line, expected in (
        (f"{command} | head -1; exit ${{PIPESTATUS[0]}}", {0, 141}),
        (f"{command} >&-", {0}),
        (f"{command} 2>&- <&-", {0}),
        (f"LC_ALL=C TERM=dumb COLUMNS=20 {command}", {0}),
        (f"PYTHONIOENCODING=ascii {command}", {0}),
        (f"PYTHONIOENCODING=ascii {command.replace('list models', '--help')}", {0}),
    ):
        found = subprocess.run(
            ["/bin/bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert found.returncode in expected, line
        assert b"Traceback" not in found.stderr
        assert b"Exception ignored" not in found.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_bytes_that_are_no_utf_8_are_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = os.fsdecode(b"a\xff")
    assert (
        main([verb, *([bad] if verb not in {"doctor", "demo", "pretrain"} else []), "-w", bad]) == 2
    )
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of an installed plug-in package."""
    site = tmp_path / "site"
    (site / "sleeplab-1.0.dist-info").mkdir(parents=True)
    (site / "sleeplab-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sleeplab\nVersion: 1.0\n"
    )
    (site / "sleeplab-1.0.dist-info" / "entry_points.txt").write_text(
        "[bitimely.plugins]\nsleeplab = sleeplab_data\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(site), str(Path(__file__).parent.parent)])
    )
    return site / "sleeplab_data.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "import nothing_like_this",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("def broken(:", "raise SystemExit(3)", "1 / 0")
        ),
    ],
)
def test_a_broken_plug_in_is_named_and_other_work_goes_on(
    plugin: Path, tmp_path: Path, fault: str
) -> None:
    plugin.write_text(fault + "\n")
    environment = dict(os.environ)
    good = run("list", "datasets", "--json", cwd=tmp_path, env=environment)
    assert good.returncode == 0, good.stderr
    assert len(json.loads(good.stdout)["datasets"]) > 10
    assert good.stderr.startswith("warning[config]")
    bad = run("ingest", "sleeplab", ".", cwd=tmp_path, env=environment)
    assert bad.returncode == 2
    for found in (good, bad):
        assert "sleeplab_data" in found.stderr
        assert "package sleeplab" in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_plug_in_that_fails_at_work_is_named(plugin: Path, tmp_path: Path) -> None:
    plugin.write_text(
        "from bitimely_core.registry import AnalysisFacts, analyses\n"
        "@analyses(AnalysisFacts(takes='model'))\n"
        "def lab(runs, *, seed=0, model='', objective='', preset=''):\n"
        "    'Fails.'\n"
        "    return {}['absent']\n"
    )
    found = run("analyze", "lab", cwd=tmp_path, env=dict(os.environ))
    assert found.returncode == 2
    assert (
        "the plug-in 'sleeplab_data.py:5' of the package sleeplab fails: KeyError" in found.stderr
    )


CONFLICTS = [  # refused before anything is read; the source has enough rows to notice
    ["--engine", "pandas"], ["--preset", "papr"], ["--leakage", "maybe"], ["--landmark", "x"], ["--landmark-date", "2001-01-01"], ["--time", "calendar-month"],
    ["--level", "deep"], ["--preset", "original"], ["--source", "synpuf", "--default-source", "physician"], ["--date-format", "dd/mm/yyyy"], ["--col", "x"], ["--label-column", "a"],
    ["--icd10-from", "soon"], ["--split-file", "absent.csv"], ["--map-overrides", "absent.csv"], ["--phecode-map", "absent.csv"], ["--id-key", "absent"],
    ["--keep-ids", "workspace/ids.csv"], ["--rules", "absent.toml"], ["--default-source", "moon"],
]  # fmt: skip


@pytest.mark.parametrize("options", CONFLICTS, ids=" ".join)
def test_conflicts_of_options_are_found_before_any_work(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bitimely_core.store import storage

    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims.csv").write_text("patient_id,date,icd9\np1,2001-02-03,250.00\n")
    monkeypatch.setattr(storage, "hash_file", lambda path: pytest.fail("a file was read"))
    assert main(["ingest", "pophr", ".", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[")
    assert not (tmp_path / "workspace" / "cache").exists()


@pytest.mark.parametrize("verb", [["ingest", "pophr", "."], ["tokenize", "pophr"]], ids=" ".join)
def test_an_unknown_engine_is_answered_with_the_known_ones(
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims.csv").write_text("patient_id,date,icd9\np1,2001-02-03,250.00\n")
    (tmp_path / "icd9_phecode.csv").write_text("icd9,phecode\n250.00,250.2\n")
    options = ["--rules", "none", "--no-select", "--min-codes", "1"]
    assert main(["ingest", "pophr", ".", *options]) == 0
    capsys.readouterr()
    assert main([*verb, "--engine", "duckdb"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert "polars, spark" in err


MAKERS = {
    "usage_error",
    "input_error",
    "integrity_error",
    "input_warning",
    "Finding",
    "UserError",
    "unknown",
    "replace",
    "note",
}


def list_advice() -> list[tuple[str, str]]:
    """(place, text) of every text in a call that makes a message, or that is assigned as a hint;
    `{}` in the place of values.
    """
    found = []
    root = Path(__file__).parent.parent
    for path in sorted(
        [*(root / "bitimely_core").rglob("*.py"), *(root / "bitimely_cli").rglob("*.py")]
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            makes = (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in MAKERS
            )
            names = (
                [getattr(t, "id", getattr(t, "attr", "")).lower() for t in node.targets]
                if isinstance(node, ast.Assign)
                else []
            )
            if not makes and not any(
                name in {"hint", "action", "text", "problem", "expected"} or name.endswith("_hint")
                for name in names
            ):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.JoinedStr):
                    text = "".join(
                        str(v.value) if isinstance(v, ast.Constant) else "{}" for v in part.values
                    )
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    text = part.value
                else:
                    continue
                if ("--" in text or "bitimely " in text) and "pip " not in text:
                    found.append((f"{path.relative_to(root)}:{part.lineno}", text))
    return found


def list_options() -> dict[str, set[str]]:
    """Verb -> its options."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    own = {
        name: {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
        for name, command in commands.items()
    }
    kinds = {
        f"--{name.replace('_', '-')}"
        for e in registry.analyses.values()
        for name in inspect.signature(e.function).parameters
    }
    return {**own, "analyze": own["analyze"] | kinds}


@pytest.mark.slow
def test_advice_names_commands_and_options_that_exist() -> None:
    options = list_options()
    everywhere = set().union(*options.values())
    advice = list_advice()
    assert len(advice) > 100
    wrong = []
    for place, text in advice:
        for verb, rest in re.findall(r"(?<!of )bitimely ([a-z]+)((?: [^.;:,]*)?)", text):
            if verb not in options:
                wrong.append(f"{place}: bitimely {verb}")
            wrong += [
                f"{place}: {verb} {flag}"
                for flag in re.findall(r"--[a-z][a-z0-9-]+[a-z0-9]", rest)
                if flag not in options.get(verb, set())
            ]
        for verb, flag in re.findall(r"\b([a-z]+) (--[a-z][a-z0-9-]+[a-z0-9])", text):
            if verb in options and flag not in options[verb]:
                wrong.append(f"{place}: {verb} {flag}")
        wrong += [
            f"{place}: {flag}"
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", text)
            if flag not in everywhere
        ]
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_of_a_training_is_named(tmp_path: Path, lost: int) -> None:
    """One line, exit 6 within 10 s, and a checkpoint that opens."""
    assert main(["tokenize", "synthetic", "-w", str(tmp_path / "workspace")]) == 0
    process = subprocess.Popen(
        [*BITIMELY, *["pretrain", "--data", "synthetic", "--devices", "2", "--steps", "100000", "--batch-size", "8", "--set", "train.checkpoint_every=1"]],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    checkpoints = tmp_path / "workspace" / "runs" / "tiny" / "checkpoints"
    deadline = time.monotonic() + 120
    while (
        not (checkpoints / "step-2").is_dir()
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.1)
    children = [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    ranks = {
        pid: re.search(rb"\0RANK=(\d)", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        for pid in children
    }
    os.kill(
        next(pid for pid, found in ranks.items() if found and int(found[1]) == lost), signal.SIGKILL
    )
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == 6, err
    assert err.count("error[") == 1, err
    assert f"process {lost} of 2 was ended by SIGKILL" in err
    assert load_latest_checkpoint(checkpoints.parent) is not None
    assert "the last checkpoint is kept" in err
    assert "This is a bug" not in err
    assert "Traceback" not in err
