"""Registered experiments: one choice of rates for each arm, cells that an arm leaves out, and
families of tests over several recipes.
"""

import json
import shutil
from pathlib import Path
from statistics import mean, median

import polars as pl
import pytest
from small import SMALL_RECIPE
from test_ledger import load_script

from bitimely_core import pipeline
from bitimely_core.errors import UserError

RECIPE = f"""
title = "Small"
{SMALL_RECIPE}patch = 50
layers = 2
[tuning]
seed = 99
rates = [1e-4, 1e-2]
[[arm]]
name = "strict"
model = "bitimelygpt"
objective = "next-previous-strict"
[[arm]]
name = "scratch"
model = "bitimelygpt"
from_scratch = true
[matrix]
fraction = [0.5, 1.0]
seed = [0, 1, 2]
[[leave_out]]
where = {{ arm = ["scratch"], fraction = [1.0] }}
why = "registered at one fraction"
"""
FAMILIES = """
title = "Families"
recipes = ["small.toml"]
[[family]]
name = "F1"
question = "Is pre-training better?"
row = "strict 0.5"
rivals = ["scratch 0.5"]
columns = ["synthetic/staging"]
[[family]]
name = "F2"
question = "Is it no worse than simple features by 30 points?"
row = "strict 0.5"
rivals = ["features"]
columns = ["synthetic/staging"]
margin = { "synthetic/staging" = 30.0 }
[[family]]
name = "D1"
question = "How far is strict from constants, and from scratch?"
row = "strict 0.5"
rivals = ["scratch 0.5", "features"]
columns = ["synthetic/staging"]
descriptive = true
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("registered")
    (folder / "small.toml").write_text(RECIPE)
    (folder / "families.toml").write_text(
        FAMILIES.replace("small.toml", str(folder / "small.toml"))
    )
    return folder


def read_run(home: Path, name: str) -> dict:
    return json.loads((home / "runs" / name / "run.json").read_text())


def read_accuracies(home: Path, arm: str) -> list[float]:
    frames = [
        pl.read_parquet(home / "runs" / f"small-{arm}-0.5-{seed}-staging" / "predictions.parquet")
        for seed in range(3)
    ]
    return [float((f["target"] == f["prediction"]).mean()) for f in frames]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def summaries(home: Path) -> tuple[dict, dict]:
    """Of the families after one arm has run, and after all have."""

    def run_families(only: list[str] | None) -> dict:
        done = pipeline.run(str(home / "families.toml"), workspace=home, only=only)
        assert done["exit_code"] == 0, done["stages"]
        return json.loads((home / "reports" / "families" / "summary.json").read_text())

    return run_families(["strict 0.5"]), run_families(None)


@pytest.mark.slow
def test_families_are_judged_when_they_are_complete(
    home: Path, summaries: tuple[dict, dict]
) -> None:
    one_arm, complete = summaries
    rows = {test["family"]: test for test in one_arm["tests"]}
    assert rows["F1"]["verdict"] is None
    assert (rows["F1"]["done"], rows["F1"]["cells"]) == (3, 6)
    assert rows["F2"]["verdict"] in ("non-inferior", "inferior", "inconclusive")
    # that to scratch waits for its own cells alone
    described = "D1: 1 of 2 differences, without verdicts."
    assert (
        one_arm["report"]["verdict"]
        == f"F1: not complete (3 of 6 cells). F2: {rows['F2']['verdict']} (1). {described}"
    )

    rows = {test["family"]: test for test in complete["tests"]}
    assert (rows["F1"]["done"], rows["F1"]["cells"]) == (6, 6)
    own, other = (read_accuracies(home, arm) for arm in ("strict", "scratch"))
    expected = mean(own) - mean(other)
    assert [rows["F1"][key] for key in ("value", "rival_value", "difference")] == pytest.approx(
        [mean(own), mean(other), expected]
    )
    assert rows["F1"]["medians"] == pytest.approx(median(own) - median(other))
    assert rows["F2"]["margin"] == pytest.approx(0.3)
    assert "on-inferior" in rows["F2"]["sentence"]

    of_scratch, of_features = (test for test in complete["tests"] if test["family"] == "D1")
    # a family of one test has nothing to correct
    shared = ("value", "rival_value", "difference", "lo", "hi")
    assert [of_scratch[key] for key in shared] == [rows["F1"][key] for key in shared]
    assert of_features["difference"] == rows["F2"]["difference"]
    assert (of_scratch["verdict"], of_scratch["sentence"]) == (None, "")
    claim = {
        "id": "x",
        "recipe": "small",
        "row": "strict 0.5",
        "rival": "scratch 0.5",
        "column": "synthetic/staging",
    }
    record = load_script().take_record(claim, home)  # the ledger reads the page as it is written
    assert record["difference"] == pytest.approx(-expected)
    shutil.copytree(home / "reports" / "families", home / "reports" / "open")
    assert load_script().take_record(claim, home)["registered"] == rows["F1"]["verdict"]
    described = load_script("results").make_descriptive("open-descriptive", home)
    assert described.count("| D1 |") == 2
    section = load_script("results").make_families("open-families", home)
    assert "| D1 |" not in section
    assert (
        f"| strict 0.5 | scratch 0.5 | {100 * mean(own):.1f} | {100 * mean(other):.1f} |" in section
    )


@pytest.mark.slow
@pytest.mark.usefixtures("summaries")
def test_an_arm_chooses_its_rates_once_and_takes_them_everywhere(home: Path) -> None:
    search = read_run(home, "small-strict-99")["tuning"]
    assert sorted(trial["lr"] for trial in search["trials"]) == [1e-4, 1e-2]
    for seed in range(3):
        run = read_run(home, f"small-strict-{seed}")
        assert run["settings"]["train"]["lr"] == search["lr"]
        assert run["settings"]["data"]["fraction"] == 1  # labels alone are scarce
        assert "tuning" not in run
        tuned = read_run(home, f"small-strict-1.0-{seed}-staging")
        assert (
            tuned["settings"]["train"]["lr"]
            == read_run(home, "small-strict-0.5-99-staging")["tuning"]["lr"]
        )
    # never scored
    assert not (home / "runs" / "small-strict-0.5-99-staging" / "scores.json").exists()


def test_a_descriptive_family_has_no_margin(home: Path) -> None:
    (home / "odd.toml").write_text(
        (home / "families.toml").read_text() + 'margin = { "synthetic/staging" = 3.0 }\n'
    )
    with pytest.raises(UserError, match="no margin in a descriptive family"):
        pipeline.load(str(home / "odd.toml"))


def test_an_arm_may_leave_cells_out(home: Path) -> None:
    plan = pipeline.run(str(home / "small.toml"), workspace=home, dry_run=True)
    names = {stage["stage"] for stage in plan["stages"]}
    assert "finetune small-strict-1.0-0-staging" in names
    assert "finetune small-scratch-1.0-0-staging" not in names


@pytest.mark.parametrize(
    "name",
    ["open", "open-epilepsy", "open-bidmc", "open-emg", "open-ieee-ppg", "open-ptb-xl", "open-p12"],
)
def test_shipped_experiments_have_the_registered_cells(name: str, tmp_path: Path) -> None:
    recipe = pipeline.load(name)
    for family in recipe.family:
        shipped = [pipeline.load(one) for one in recipe.recipes]
        views = {view for one in shipped for view in one.finetune.data or ()}
        assert set(family.columns) <= views
        assert family.row.partition(" ")[0] in {arm.name for one in shipped for arm in one.arm}
    if not recipe.recipes:
        assert recipe.tuning is not None
        assert recipe.tuning.seed == 99
    with pytest.raises(UserError):
        pipeline.load(f"{name}-unknown")


@pytest.mark.slow
def test_hours_are_those_of_this_machine_or_of_an_accelerator(home: Path) -> None:
    here = pipeline.run(str(home / "small.toml"), workspace=home, estimate=True)
    there = pipeline.run(str(home / "small.toml"), workspace=home, dry_run=True, on="h200")
    assert there["total"]["flops"] == here["total"]["flops"]
    assert "h200" in there["assumptions"]
    long = [
        pipeline.run(
            str(home / "small.toml"),
            workspace=home,
            dry_run=True,
            on=name,
            assignments=["train.steps=100000"],
        )["total"]["seconds"]
        for name in ("h100", "h200", "h200")
    ]
    assert long[1] == long[2] <= long[0]
    with pytest.raises(UserError, match="h2000"):
        pipeline.run(str(home / "small.toml"), workspace=home, dry_run=True, on="h2000")


@pytest.mark.slow
def test_the_run_that_a_supervised_model_starts_from_costs_no_training(tmp_path: Path) -> None:
    stages = pipeline.run("open-p12", workspace=tmp_path, on="h200")["stages"]
    found = {
        stage["stage"].rsplit("-", 1)[0]: stage
        for stage in stages
        if stage["stage"].startswith("pretrain")
    }
    for fold in range(1, 6):
        assert found[f"pretrain open-p12-times-fold-{fold}-gru-d"]["windows"] == 0
        assert found[f"pretrain open-p12-times-fold-{fold}-mtand"]["windows"] == 400 * 32
