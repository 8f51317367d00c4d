"""Recipes: the shipped smoke test runs, a second run does nothing, a failing cell is reported and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitimely_core import pipeline
from bitimely_core.errors import UserError

TINY = """
title = "Two cells"
[pretrain]
preset = "tiny"
data = "synthetic/staging"
steps = 1
[finetune]
data = ["synthetic/staging"]
steps = 1
[evaluate]
bootstrap = 10
[matrix]
model = ["bitimelygpt", "gpt"]
seed = [0, 1]
[model]
tokenizer = "patch"
patch = 50
layers = 2
[train]
batch_size = 8
"""


@pytest.mark.slow
def test_smoke_runs_and_a_second_run_finds_it_done(tmp_path: Path) -> None:
    first = pipeline.run("smoke", workspace=tmp_path)
    assert first["exit_code"] == 0, first["stages"]
    assert {s["state"] for s in first["stages"]} == {"done"}
    assert Path(first["report"]).is_file()
    again = pipeline.run("smoke", workspace=tmp_path)
    trained = [s for s in again["stages"] if s["stage"].startswith(("pretrain", "finetune"))]
    assert {s["state"] for s in trained} == {"already done"}
    assert again["exit_code"] == 0


def test_a_matrix_is_a_product_and_shards_partition_it(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TINY)
    planned = pipeline.run(str(path), workspace=tmp_path, dry_run=True)
    cells = [s["stage"] for s in planned["stages"] if s["stage"].startswith("pretrain")]
    assert cells == [f"pretrain two-{model}-{seed}" for model in ("bitimelygpt", "gpt") for seed in (0, 1)]
    parts = [pipeline.run(str(path), workspace=tmp_path, dry_run=True, shard=(k, 3))["stages"] for k in (1, 2, 3)]
    assert sorted(s["stage"] for part in parts for s in part if s["stage"].startswith("pretrain")) == sorted(cells)
    only = pipeline.run(str(path), workspace=tmp_path, dry_run=True, only=["gpt-0", "bitimelygpt"])["stages"]
    assert [s["stage"] for s in only if s["stage"].startswith("pretrain")] == cells[:2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        TINY.replace("seed = [0, 1]", "").replace("layers = 2", "layers = 3")
    )  # odd: alternating stacks refuse it, gpt does not
    done = pipeline.run(str(path), workspace=tmp_path)
    states = {s["stage"]: s["state"] for s in done["stages"]}
    assert states["pretrain odd-bitimelygpt"] == "failed"
    assert "finetune odd-bitimelygpt-staging" not in states
    assert states["evaluate odd-gpt-staging"] == "done"
    assert done["exit_code"] == 2


def test_unknown_recipes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smoke"):
        pipeline.load("smok")
    path = tmp_path / "bad.toml"
    path.write_text('[pretrain]\nprest = "tiny"\n')
    with pytest.raises(UserError, match="preset"):
        pipeline.load(str(path))
