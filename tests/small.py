"""A workspace with one of everything, made in seconds: recordings by a formula and generated
claims, their caches and tokens, and runs on them.

The workspace is made once a process, `copy_data` and `copy_workspace` copy it.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bitimely_cli.main import main
from bitimely_core.errors import Reason, UserError
from bitimely_core.store import storage

RATE, SAMPLES, SUBJECTS = 50, 200, 30
CLASSES = ("slow", "fast")
VIEW, EVENTS = "generic/classification", "synthetic-claims"
MAP = f"""
[[files]]
pattern = "data/*.csv"
match = "(?P<subject>p\\\\d+)_"
rate = {RATE}
unit = "uV"

[table]
path = "recordings.csv"
file = "recording"
subject = "subject"
label = "speed"
"""
SMALL_RECIPE = """
[pretrain]
preset = "tiny"
data = "synthetic/staging"
steps = 1

[finetune]
data = ["synthetic/staging"]
fraction = 1.0
steps = 1

[evaluate]
bootstrap = 20

[train]
batch_size = 8

[model]
tokenizer = "patch"
"""  # one step of each stage; more of the model's settings and other tables may follow
TINY = [
    "--preset",
    "tiny",
    "--batch-size",
    "8",
    "--set",
    "train.log_every=1",
    "--set",
    "train.device=cpu",
]
RETENTION = [
    "--set",
    "model.layers=2",
    "--set",
    "model.dim=8",
    "--set",
    "model.heads=2",
    "--set",
    "model.value_dim=16",
]
RETENTION += ["--set", "model.ffn_dim=16", "--set", "model.dropout=0.1"]
PATCHES = ["--set", "model.tokenizer=patch", "--set", "model.patch=10"]
PLAIN = [
    *TINY,
    *RETENTION,
    *PATCHES,
    "--data",
    VIEW,
    "--steps",
    "4",
    "--set",
    "train.checkpoint_every=2",
]
LABELLED = ["--data", VIEW, "--fraction", "1", "--batch-size", "8"]
VERBS = {  # name -> command line, in the order of their needs
    "pretrain": ["pretrain", *PLAIN, "--run", "plain"],
    "finetune": [
        "finetune",
        "plain",
        *LABELLED,
        "--tune",
        "1e-3,1e-2",
        "--set",
        "tune.steps=3",
        "--steps",
        "4",
        "--run",
        "tuned",
    ],
    "scratch": [
        "finetune",
        "plain",
        *LABELLED,
        "--from-scratch",
        "--steps",
        "3",
        "--run",
        "scratch",
    ],
    "baseline": ["evaluate", "scratch", "--bootstrap", "20"],
    "evaluate": ["evaluate", "tuned", "--bootstrap", "20", "--compare", "scratch"],
    "embed": ["embed", "plain", "--split", "test"],
    "analyze": ["analyze", "svd", "plain", "--sequences", "4"],
    "report": ["report", "tuned", "scratch"],
    "export": ["export", "tuned"],
}
FURTHER_RUNS = (  # command lines
    ["evaluate", "plain"],
    ["pretrain", *TINY, *RETENTION, "--data", EVENTS, "--steps", "6", "--run", "events"],
    [
        "finetune",
        "events",
        "--data",
        EVENTS,
        "--fraction",
        "1",
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--run",
        "event-labels",
    ],
    ["evaluate", "event-labels", "--bootstrap", "20"],
)


def make_signals(subject: int) -> tuple[np.ndarray, str]:
    """The recording of one subject: integers [SAMPLES, 2] in microvolts and the class, a slow or a
    fast oscillation in noise.
    """
    fast = subject % 2
    rng = np.random.default_rng(subject)
    seconds = np.arange(SAMPLES) / RATE
    phases = 2 * np.pi * (1.5 + 4.0 * fast) * seconds[:, None] + np.array([0.0, 0.7]) + subject
    return np.rint(60 * np.sin(phases) + 20 * rng.standard_normal((SAMPLES, 2))).astype(
        np.int64
    ), CLASSES[fast]


def write_raw(folder: Path) -> None:
    """The recordings as csv files, their table of labels and the mapping file `map.toml`."""
    (folder / "data").mkdir(parents=True)
    rows = ["recording,subject,speed"]
    for subject in range(SUBJECTS):
        values, label = make_signals(subject)
        lines = [",".join(map(str, row)) for row in values.tolist()]
        (folder / "data" / f"p{subject:02d}_a.csv").write_text("C3,C4\n" + "\n".join(lines) + "\n")
        rows.append(f"p{subject:02d}_a,p{subject:02d},{label}")
    (folder / "recordings.csv").write_text("\n".join(rows) + "\n")
    (folder / "map.toml").write_text(MAP)


def _run(home: Path, *argv: str, codes: tuple[int, ...] = (0,)) -> None:
    """A command line whose output no test is to see."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = main([*argv, "-w", str(home)])
    assert code in codes, output.getvalue()


def _make_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="bitimely-small-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _make_data() -> Path:
    folder = _make_folder()
    raw, home = folder / "raw", folder / "home"
    write_raw(raw)
    _run(home, "ingest", "generic", str(raw), "--map", str(raw / "map.toml"))
    _run(home, "tokenize", "generic")
    _run(home, "tokenize", VIEW, "--window", str(SAMPLES))
    _run(
        home,
        "ingest",
        EVENTS,
        "--subjects",
        "60",
        "--no-select",
        "--min-codes",
        "2",
        "--max-events",
        "24",
        codes=(0, 3),
    )
    return home


@cache
def _make_all() -> Path:
    home = copy_data(_make_folder())
    for argv in (*VERBS.values(), *FURTHER_RUNS):
        _run(home, *argv)
    stop_training(home, 3, "unfinished")
    (home / "index.html").unlink()
    return home


@cache
def _make_nights() -> Path:
    home = _make_folder() / "home"
    _run(home, "ingest", "synthetic")
    return home / "cache" / "synthetic"


def copy_nights(home: Path) -> Path:
    """The cache of the synthetic cohort in a workspace, which takes seconds to make."""
    shutil.copytree(_make_nights(), home / "cache" / "synthetic")
    return home


def find_tokens(name: str) -> Path:
    """The folder of the tokens `name`, to be read alone."""
    return _make_data() / "tokens" / name


def copy_data(home: Path) -> Path:
    """Caches, tokens and the key of their pseudonyms in a workspace."""
    for name in ("cache", "tokens"):
        shutil.copytree(_make_data() / name, home / name)
    for path in _make_data().glob("id.key*"):
        shutil.copy2(path, home)
    return home


def call(home: Path, name: str, code: int = 0) -> None:
    """One of `VERBS`, by the command line."""
    assert main([*VERBS[name], "-w", str(home)]) == code, name


def copy_workspace(home: Path) -> Path:
    """A new workspace with the results of all verbs, runs on claims, and the run `unfinished`."""
    return Path(shutil.copytree(_make_all(), home))


def find_workspace() -> Path:
    """The workspace of `copy_workspace`, to be read alone."""
    return _make_all()


def stop_training(home: Path, step: int, run: str) -> None:
    """The pre-training of `VERBS` under another name, stopped by a fault of the disk after the line
    of a step.
    """
    append_line = storage.append_line

    def fail_after_step(path: Path, line: dict[str, object]) -> None:
        append_line(path, line)
        if line["step"] == step:
            raise UserError(Reason.IO_ERROR, "stopped", exit_code=6)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "append_line", fail_after_step)
        _run(home, *VERBS["pretrain"][:-1], run, codes=(6,))
