"""Predictions of a run are computed once, and again where anything that they depend on changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small

from bitimely_cli.main import main
from bitimely_core import heads
from bitimely_core.errors import UserError
from bitimely_core.evaluate import stored_predictions
from bitimely_core.models.base import Model
from bitimely_core.workflows import evaluate


class Loaded(Exception):
    """The network was needed."""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose runs are scored."""
    home = small.copy_workspace(tmp_path_factory.mktemp("scored") / "home")
    for run in ("tuned", "scratch"):
        assert main(["evaluate", run, "-w", str(home)]) == 0
    return home


@pytest.fixture
def home(scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; the networks of its runs cannot be loaded any more."""
    shutil.copytree(scored, tmp_path / "home")

    def refuse(folder: Path) -> None:
        raise Loaded

    monkeypatch.setattr(heads, "load", refuse)
    return tmp_path / "home"


def test_a_second_evaluation_needs_no_network_and_gives_the_same_files(home: Path) -> None:
    names = ("scores.json", "predictions.parquet")
    before = [(home / "runs" / "tuned" / name).read_bytes() for name in names]
    scores = evaluate("tuned", workspace=home, compare="scratch")
    assert scores["comparison"]
    evaluate("tuned", workspace=home)
    assert [(home / "runs" / "tuned" / name).read_bytes() for name in names] == before


@pytest.mark.parametrize("changed", ["split", "batch", "device", "code", "weights"])
def test_what_predictions_depend_on_makes_them_anew(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    if changed == "code":
        (tmp_path / "changed.py").write_text("")
        monkeypatch.setattr(stored_predictions, "PACKAGE", tmp_path)
    if changed == "weights":
        path = home / "runs" / "tuned" / "model" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    choices = {"split": "validation"} if changed == "split" else {}
    choices |= {"batch_size": 7} if changed == "batch" else {}
    choices |= {"device": "cpu"} if changed == "device" else {}
    with pytest.raises((Loaded, UserError)):
        evaluate("tuned", workspace=home, **choices)


def test_predictions_of_a_model_of_somebody_else_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = small.copy_workspace(tmp_path / "home")
    kept = heads.load(home / "runs" / "tuned" / "model")
    mine = type("Mine", (type(kept.model),), {"__module__": "my_models"})
    monkeypatch.setattr(kept.model, "__class__", mine)
    assert isinstance(kept.model, Model)
    monkeypatch.setattr(heads, "load", lambda folder: kept)
    stored = list((home / "runs" / "tuned" / "baselines").glob("run-*"))
    evaluate("tuned", workspace=home, batch_size=7)
    assert list((home / "runs" / "tuned" / "baselines").glob("run-*")) == stored
