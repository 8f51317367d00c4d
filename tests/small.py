"""A workspace with one of everything, made in seconds: the cache and the tokens of the fixture of
version 0.1, and runs on them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fixtures import make_v1

from bitimely_cli.main import main

FIXTURE = Path(__file__).parent / "fixtures" / "v1" / make_v1.HOME
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
VERBS = {  # name -> command line, in the order of their needs
    "pretrain": [
        *make_v1.COMMANDS["plain"],
        "--steps",
        "4",
        "--set",
        "train.checkpoint_every=2",
        "--run",
        "plain",
    ],
    "finetune": [*make_v1.COMMANDS["plain-class"], "--steps", "4", "--run", "tuned"],
    "scratch": [*make_v1.COMMANDS["plain-scratch"], "--steps", "3", "--run", "scratch"],
    "baseline": ["evaluate", "scratch", "--bootstrap", "20"],
    "evaluate": ["evaluate", "tuned", "--bootstrap", "20", "--compare", "scratch"],
    "embed": ["embed", "plain", "--split", "test"],
    "analyze": ["analyze", "svd", "plain", "--sequences", "4"],
    "report": ["report", "tuned", "scratch"],
    "export": ["export", "tuned"],
}


def copy_data(home: Path) -> Path:
    """Cache, tokens and key of the fixture in a new workspace."""
    for name in ("cache", "tokens"):
        shutil.copytree(FIXTURE / name, home / name)
    return home


def call(home: Path, name: str, code: int = 0) -> None:
    """One of `VERBS`, by the command line."""
    assert main([*VERBS[name], "-w", str(home)]) == code, name


def make_workspace(home: Path) -> Path:
    """Every verb once."""
    copy_data(home)
    for name in VERBS:
        call(home, name)
    return home
