"""Continuing from checkpoints that are damaged, swapped, of another format, or of a run with other
settings.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import IDENTITY, Killed, fault_of, kill, leftovers, run, state_of, stopping
from test_resume import straight as straight
from test_train import Outcome, Rows, Tiny, same, weights
from torch import nn

from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.store import storage
from bitimely_core.train import checkpoints, loop, metrics_log
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _stopped() -> Path:
    """A run that stopped in step 10, with checkpoints of steps 8 and 9; copied by the tests."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="bitimely-resume-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with pytest.raises(Killed):
        run(folder, stopping(10, kill), checkpoint_every=1)
    return folder


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    shutil.copytree(_stopped(), tmp_path / "run")
    return tmp_path / "run"


def damage(path: Path, how: str, draw: random.Random) -> None:
    body = bytearray(path.read_bytes())
    at = draw.randrange(len(body))
    if how == "flip":
        body[at] ^= 1 << draw.randrange(8)
    elif how == "zero":
        body[at : at + 64] = bytes(len(body[at : at + 64]))
    elif how == "truncate":
        del body[at:]
    elif how == "append":
        body += bytes(512)
    path.write_bytes(body)
    if how == "delete":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "append", "delete"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "meta.json"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    how: str, name: str, stopped: Path, straight: Any
) -> None:
    if how == "append" and name == "meta.json":
        (stopped / "checkpoints" / "step-9" / name).write_bytes(b"[]")
    else:
        damage(stopped / "checkpoints" / "step-9" / name, how, random.Random(3))
    (stopped / "checkpoints" / "LATEST").write_text("step-9\n")  # a hint, no more
    warnings: list[Finding] = []
    _, result = run(stopped, notice=warnings.append)
    assert result["resumed"] == 8
    assert result["findings"] == warnings
    assert [(w.code, w.level) for w in warnings] == [(Reason.INTEGRITY, "warning")]
    assert "step-9" in warnings[0].message
    assert "step-8" in warnings[0].message
    assert state_of(stopped) == straight
    # kept for a look; step 9 was not saved again
    assert [Path(p).name for p in leftovers(stopped)] == ["step-9.damaged"]


def test_damage_that_is_trained_again_is_removed(stopped: Path, straight: Any) -> None:
    damage(stopped / "checkpoints" / "step-9" / "model.safetensors", "flip", random.Random(0))
    with pytest.warns(RuntimeWarning, match="step-9 is damaged"):
        run(stopped, checkpoint_every=1)
    assert state_of(stopped) == straight
    assert leftovers(stopped) == []


def test_nothing_but_damage_is_exit_5_and_changes_nothing(stopped: Path) -> None:
    for step in (8, 9):
        damage(
            stopped / "checkpoints" / f"step-{step}" / "model.safetensors",
            "flip",
            random.Random(step),
        )
    before = sorted(path.relative_to(stopped) for path in stopped.rglob("*"))
    with pytest.raises(UserError) as refused:
        run(stopped)
    assert (refused.value.code, refused.value.exit_code) == (Reason.INTEGRITY, Exit.INTEGRITY)
    assert "--force-new" in refused.value.hint
    assert len(refused.value.details) == 2
    assert sorted(path.relative_to(stopped) for path in stopped.rglob("*")) == before
    with pytest.raises(UserError):
        checkpoints.load_latest_checkpoint(stopped)


def test_every_damage_is_noticed(stopped: Path) -> None:
    folder = stopped / "checkpoints" / "step-9"
    original, noticed = {path.name: path.read_bytes() for path in folder.iterdir()}, 0
    for seed in range(200):
        draw = random.Random(seed)
        name = draw.choice(sorted(original))
        damage(folder / name, draw.choice(["flip", "flip", "zero", "truncate", "append"]), draw)
        body = (folder / name).read_bytes()
        code = fault_of(lambda: checkpoints.verify_checkpoint(folder))
        if code is None:  # zeros where zeros were, or JSON that says the same
            assert body == original[name] or _same_json(body, original[name])
        else:
            noticed += 1
            assert code == Exit.INTEGRITY
        (folder / name).write_bytes(original[name])
    assert noticed > 180


def _same_json(a: bytes, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def test_two_files_swapped_between_checkpoints_are_noticed(stopped: Path) -> None:
    a, b = (stopped / "checkpoints" / f"step-{step}" / "model.safetensors" for step in (8, 9))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with pytest.raises(UserError) as refused:
        checkpoints.load_latest_checkpoint(stopped)
    assert refused.value.exit_code == Exit.INTEGRITY


def test_a_touched_checkpoint_is_intact(stopped: Path) -> None:
    for path in stopped.rglob("*"):
        os.utime(path, (4e9, 4e9))
    latest = checkpoints.load_latest_checkpoint(stopped)
    assert latest is not None
    assert latest.step == 9


def test_a_checkpoint_of_a_newer_format_is_refused_and_stays(stopped: Path) -> None:
    path = stopped / "checkpoints" / "step-9" / "meta.json"
    meta = {
        key: value for key, value in json.loads(path.read_bytes()).items() if key != "sha256"
    } | {"format_version": 99}
    storage.write_json(path, {**meta, "sha256": storage.fingerprint(meta)})
    with pytest.raises(UserError) as refused:
        run(stopped)
    assert refused.value.code is Reason.UNSUPPORTED_FORMAT
    assert path.is_file()


def test_a_torn_or_overlong_log_is_mended(stopped: Path, straight: Any) -> None:
    with (stopped / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 10, "split": "train", "loss": 1.0}\n{"step": 11, "spl')
    run(stopped)
    assert state_of(stopped) == straight


def test_what_a_killed_run_left_is_swept(stopped: Path, straight: Any) -> None:
    (stopped / "checkpoints" / "step-10.tmp").mkdir()
    (stopped / "checkpoints" / "step-10.tmp" / "model.safetensors").write_bytes(b"half")
    (stopped / "checkpoints" / "LATEST.tmp-77-0123abcd").write_bytes(b"")
    (stopped / "metrics.jsonl.tmp-77-0123abcd").write_bytes(b"")
    run(stopped)
    assert leftovers(stopped) == []
    assert state_of(stopped) == straight


# -- other settings
# ------------------------------------------------------------------------------------------------------------------


def keys(error: UserError) -> list[str | None]:
    return [finding.field for finding in (error, *error.details)]


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"identity": {**IDENTITY, "data": "40"}}, ["data"]),
        ({"identity": {**IDENTITY, "tokenizer": None}}, ["tokenizer"]),
        (
            {"identity": {"data": "3f", "tokenizer": "77", "more": [1]}},
            ["more", "settings.model.dim", "settings.train.lr"],
        ),
        ({"lr": 2e-2, "seed": 1}, ["train.lr", "train.seed"]),
        ({"epochs": 3}, ["train.total_steps"]),
        ({"accumulate": 1}, ["train.accumulate"]),
        ({"batches": Rows(rows=30, size=5)}, ["train.batch_rows"]),
    ],
)
def test_another_identity_is_refused_with_its_keys(
    changes: dict[str, Any], differing: list[str], stopped: Path
) -> None:
    files = {
        path: path.read_bytes()
        for path in stopped.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    model = Tiny(seed=4)
    before = weights(model)
    with pytest.raises(UserError) as refused:
        run(stopped, model=model, **changes)
    assert (refused.value.code, refused.value.exit_code) == (Reason.SETTINGS_DIFFER, Exit.USAGE)
    assert keys(refused.value) == differing
    assert all("was made with" in one.problem for one in (refused.value, *refused.value.details))
    assert same(weights(model), before)
    assert {
        path: path.read_bytes()
        for path in stopped.rglob("*")
        if path.is_file() and path.name != ".lock"
    } == files


def test_what_changes_no_number_may_change(stopped: Path, straight: Any) -> None:
    identity = {
        **IDENTITY,
        "settings": {"model": {"dim": 6}, "train": {"device": "cpu", "lr": 1e-2}},
    }
    run(stopped, identity=identity, keep=5, checkpoint_every=3, devices=2)
    assert state_of(stopped) == straight


def test_other_shapes_are_refused_with_their_keys(stopped: Path) -> None:
    model = Tiny(width=7)
    model.register_buffer("extra", torch.zeros(3))
    with pytest.raises(UserError) as refused:
        run(stopped, model=model)
    assert (refused.value.code, refused.value.exit_code) == (Reason.SHAPES_DIFFER, Exit.REFUSED)
    found = keys(refused.value)
    assert {"extra", "enter.weight", "leave.weight", "norm.bias"} <= set(found)
    assert "leave.bias" not in found
    assert any("nothing" in finding.problem for finding in refused.value.details)


def test_an_empty_folder_of_checkpoints_starts_from_scratch(straight: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-x").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("step-400\n")
    _, result = run(tmp_path)
    assert result["resumed"] is None
    assert state_of(tmp_path) == straight


# -- the models themselves
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["next-previous-strict", "masked", "gap"])
def test_a_model_is_pretrained_and_continued_bit_for_bit(name: str, tmp_path: Path) -> None:
    from bitimely_core import models, objectives

    plain = objectives.get(name)

    def trained(folder: Path, objective: loop.Objective) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = models.build(
            "bitimelygpt",
            tokenizer="conv",
            channels=2,
            length=24,
            layers=2,
            heads=2,
            dim=8,
            value_dim=8,
            ffn_dim=8,
            dropout=0.1,
        )
        return run(folder, objective, model, batches=Rows(length=24))[0]

    def killed(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        if len(metrics_log.read_metrics(tmp_path / "killed")) == 9:
            raise Killed
        return plain(model, batch, generator)  # type: ignore[arg-type]

    killed.draw = getattr(plain, "draw", None)  # type: ignore[attr-defined]
    straight = trained(tmp_path / "straight", plain)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", killed)
    continued = trained(tmp_path / "killed", plain)
    assert same(weights(straight), weights(continued))
    assert state_of(tmp_path / "killed") == state_of(tmp_path / "straight")
    assert same(weights(models.load(tmp_path / "killed" / "model")), weights(straight))
    assert all(line["rel"] > 0 for line in metrics_log.read_metrics(tmp_path / "killed"))
