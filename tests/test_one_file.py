"""An option of windows, of a training and of an analysis is a change of one file: in a copy of the
packages one line is added, and the command line, the stored record, the checks and the page of
settings have it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FIELD = '    demo: int | None = Field(None, ge=1, description="Something new.")\n'

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages, and what docs/settings.md is made with."""
    for folder in ("bitimely", "bitimely_cli", "bitimely_core", "pipelines", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.md", "*.svg", "*.png")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def insert(path: Path, before: str, line: str) -> None:
    """Write `line` above the only place of `before`."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before))


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The result of `bitimely WORDS` with the packages of the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bitimely_cli", *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def format_settings(copy: Path) -> str:
    """docs/settings.md as the copy makes it."""
    code = "import settings; print(settings.format_page())"
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'docs'}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=True
    ).stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_an_option_of_windows_is_one_line(copy: Path) -> None:
    insert(copy / "bitimely_core/config.py", "    window: int | None = Field(None, ge=1,", FIELD)
    assert "Something new.  [x>=1]" in run(copy, "tokenize", "--help").stdout
    made = run(copy, "tokenize", "synthetic/staging", "--demo", "3")
    assert made.returncode == 0, made.stderr
    tokens = copy / "workspace/tokens/synthetic-staging/manifest.json"
    assert read(tokens)["options"]["demo"] == 3
    refused = run(copy, "tokenize", "synthetic/staging", "--demo", "0")
    assert refused.returncode == 2
    assert "--demo" in refused.stderr
    changed = run(copy, "tokenize", "synthetic/staging", "--demo", "4")
    assert changed.returncode == 2
    assert "settings_differ" in changed.stderr
    assert "| `data.demo` | none |  | Something new. |" in format_settings(copy)


def test_an_option_of_trainings_is_one_file(copy: Path) -> None:
    config = copy / "bitimely_core/config.py"
    insert(config, "    epochs: int = Field(20,", FIELD)
    insert(config, '            *("epochs", "steps", "minutes",', '            "demo",\n')
    words = ("train", "resnet", "--data", "synthetic/staging", "--steps", "1")
    for verb in ("pretrain", "finetune", "train"):
        assert "--demo <int range>" in run(copy, verb, "--help").stdout
    made = run(copy, *words, "--demo", "3")
    assert made.returncode == 0, made.stderr
    (record,) = copy.glob("workspace/runs/*/run.json")
    assert read(record)["settings"]["train"]["demo"] == 3
    assert run(copy, *words, "--demo", "0").returncode == 2
    changed = run(copy, *words, "--demo", "4")
    assert changed.returncode == 2
    assert "settings_differ" in changed.stderr
    assert "| `train.demo` | none |  | Something new. |" in format_settings(copy)


def test_an_option_of_an_analysis_is_one_line(copy: Path) -> None:
    insert(
        copy / "bitimely_core/insight/complexity.py", "    rounds: int = 5,", "    demo: int = 3,\n"
    )
    listed = run(copy, "list", "analyses")
    assert "--demo 3" in " ".join(listed.stdout.split())
    refused = run(copy, "analyze", "complexity", "--demo", "x")
    assert refused.returncode == 2
    assert "--demo: found 'x', expected int" in refused.stderr
