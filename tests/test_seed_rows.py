"""Runs that differ in their seed alone are one row, with the best baseline beside their score."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from test_dashboard import list_rows
from test_results import planted

from bitimely_cli.main import main
from bitimely_core.page import Figure, Link, Table
from bitimely_core.report.comparison_page import comparison_page
from bitimely_core.report.dashboard_page import FolderEntry, identify_arm, pool_seeds
from bitimely_core.schemas.runs import PooledRuns, RunRecord


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one method and one run of another."""
    home = tmp_path_factory.mktemp("seeds")
    for seed in range(3):
        planted(home, f"a{seed}", "staging", row="m", seed=seed, skill=0.6, bootstrap=20)
    planted(home, "b", "staging", row="k", skill=0.3, bootstrap=20)
    return home


def read(home: Path, name: str) -> dict:
    return json.loads((home / "runs" / name / "scores.json").read_text())


def find_best(home: Path) -> tuple[float, str]:
    """The best baseline of the main metric, by scores.json."""
    scores = read(home, "a0")
    return max(
        (baseline[scores["main"]]["value"], name.replace("_", " "))
        for name, baseline in scores["baselines"].items()
        if baseline.get(scores["main"], {}).get("value") is not None
    )


def find_right(frame: pl.DataFrame) -> np.ndarray:
    """Which predictions are right."""
    predicted = frame.select(pl.concat_list(pl.selectors.starts_with("p_")).list.arg_max())
    return (frame["target"].cast(int) == predicted.to_series().cast(int)).to_numpy()


def test_a_comparison_has_one_row_for_seeds(home: Path) -> None:
    page = comparison_page([home / "runs" / name for name in ("a0", "a1", "a2", "b")])
    table = next(b for b in page.blocks if isinstance(b, Table) and b.name == "all-scores")
    assert [row[0] for row in table.rows] == ["m (3 seeds)", "b"]
    values = [read(home, f"a{seed}")["metrics"]["accuracy"]["value"] for seed in range(3)]
    cell = dict(zip(table.columns, table.rows[0], strict=True))["accuracy"]
    assert cell["value"] == pytest.approx(np.mean(values))
    assert cell["text"] == f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
    assert table.columns[-1] == "best baseline"
    value, name = find_best(home)
    assert (table.rows[0][-1]["value"], table.rows[0][-1]["note"]) == (value, name)
    figure = page.blocks[0]
    assert isinstance(figure, Figure)
    assert list(figure.data.names)[:2] == ["m (3 seeds)", "b"]
    assert figure.data.values[0] == pytest.approx(
        np.mean(
            [
                read(home, f"a{seed}")["metrics"][read(home, "b")["main"]]["value"]
                for seed in range(3)
            ]
        )
    )
    assert "best baseline" in page.verdict


def test_the_score_of_several_seeds_has_an_interval_over_subjects(home: Path) -> None:
    runs = [home / "runs" / f"a{seed}" for seed in range(3)]
    page = comparison_page(runs)
    figure = page.blocks[0]
    assert isinstance(figure, Figure)
    low, high = figure.data.lo[0], figure.data.hi[0]
    frames = [pl.read_parquet(run / "predictions.parquet") for run in runs]
    right = np.mean([find_right(frame) for frame in frames], axis=0)
    people = frames[0]["subject_id"].to_numpy()
    rng, names = np.random.default_rng(0), np.unique(people)
    sums, counts = (
        np.array([np.sum(values[people == name]) for name in names])
        for values in (right, np.ones(len(right)))
    )
    draws = rng.integers(0, len(names), (4000, len(names)))
    resampled = sums[draws].sum(1) / counts[draws].sum(1)
    assert figure.data.values[0] == pytest.approx(right.mean())
    assert low < np.quantile(resampled, 0.16) < np.quantile(resampled, 0.84) < high
    assert high - low < 8 * resampled.std()
    assert f"(95 % CI {low:.3f} to {high:.3f})" in page.verdict
    assert figure.data.lo[-1] is not None, "that of the best baseline"


def test_the_dashboard_has_one_row_for_seeds_and_leads_to_each(home: Path) -> None:
    assert main(["dashboard", "-w", str(home)]) == 0
    page = (home / "index.html").read_text("utf-8")
    rows = ["|".join(row) for row in list_rows(page, "runs")]
    assert len(rows) == 2
    main_name = read(home, "a0")["main"]
    values = [read(home, f"a{seed}")["metrics"][main_name]["value"] for seed in range(3)]
    assert f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" in rows[0]
    assert f"{find_best(home)[0]:.3f}" in rows[0]
    assert find_best(home)[1] in rows[0]
    assert len(list_rows(page, "seeds")) == 3, "each run keeps its link"
    assert "of 2 runs" in page, "seeds of one setting are one run"


def test_runs_of_a_pooled_run_are_no_rows_beside_it() -> None:
    names = [("all", "s0", "s1"), ("s0",), ("s1",), ("s2",)]
    entries = [
        FolderEntry([Link(pooled[0])], arm="" if pooled[1:] else "arm", seed=seed, pooled=pooled)
        for seed, pooled in enumerate(names)
    ]
    rows, members = pool_seeds(entries)
    assert [entry.pooled[0] for entry in rows] == ["all", "s2"]
    assert [entry.pooled[0] for entry in members] == ["s0", "s1"]


def test_only_the_seed_makes_no_other_method(home: Path) -> None:
    record = RunRecord.load(home / "runs" / "a0" / "run.json")
    train = record.settings.train
    settings = record.settings.model_copy(update={"train": train.model_copy(update={"seed": 9})})
    assert identify_arm(record.model_copy(update={"seed": 9, "settings": settings})) == (
        identify_arm(record)
    )
    settings = record.settings.model_copy(update={"train": train.model_copy(update={"lr": 9.0})})
    assert identify_arm(record.model_copy(update={"settings": settings})) != identify_arm(record)


def test_a_run_over_folds_is_no_seed_of_a_single_run(home: Path) -> None:
    record = RunRecord.load(home / "runs" / "a0" / "run.json")
    members = PooledRuns(by="fold", runs=("x", "y"))
    over_folds = record.model_copy(update={"members": members, "seed": 7})
    assert identify_arm(over_folds) != identify_arm(record)
