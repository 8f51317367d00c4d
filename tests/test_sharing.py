"""A run for others, and the same numbers again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bitimely_core import models, runs
from bitimely_core.batch import Batch
from bitimely_core.errors import UserError

SMALL = {"model": {"tokenizer": "patch", "patch": 50, "layers": 2}, "train": {"steps": 3, "batch_size": 8}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharing")
    runs.pretrain(preset="tiny", flags={**SMALL, "data": {"names": ("synthetic/staging",)}}, workspace=folder)
    runs.finetune("tiny", data="synthetic/staging", flags={"train": SMALL["train"]}, run="tuned", workspace=folder)
    return folder


def test_what_is_exported_is_the_model(home: Path, tmp_path: Path) -> None:
    told = runs.export("tiny", out=tmp_path / "tiny", workspace=home)
    assert {"config.json", "model.safetensors", "run.json", "model_card.md"} <= set(told["files"])
    batch = Batch(torch.randn(2, 3000, 1))
    ours = models.load(home / "runs" / "tiny" / "model")(batch).hidden[-1]
    assert torch.equal(models.load(tmp_path / "tiny")(batch).hidden[-1], ours)
    assert runs.export("tiny", out=tmp_path / "tiny", workspace=home)["sha256"] == told["sha256"]
    again = runs.pretrain(
        preset="tiny", flags={**SMALL, "data": {"names": ("synthetic/staging",)}}, init=tmp_path / "tiny", run="from-export", workspace=home
    )
    assert again["steps"] == 3
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="other files") as caught:
        runs.export("tiny", out=tmp_path / "full", workspace=home)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("run", ["tiny", "tuned"])
def test_a_run_is_the_same_again(home: Path, run: str) -> None:
    assert runs.reproduce(run, workspace=home, dry_run=True)["differences"] == []
    found = runs.reproduce(run, workspace=home)
    assert found["reproduced"]
    assert found["same_weights"]
    assert found["loss"][0] == found["loss"][1]


def test_what_differs_is_said(home: Path) -> None:
    path = home / "runs" / "tiny" / "run.json"
    whole = path.read_bytes()
    body = json.loads(whole)
    body["versions"]["torch"] = "1.0"
    body["data"][0]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(body))
    try:
        told = runs.reproduce("tiny", workspace=home, dry_run=True)["differences"]
    finally:
        path.write_bytes(whole)
    assert any(line.startswith("torch") and line.endswith("1.0") for line in told)
    assert any("fingerprint" in line for line in told)
