"""Ten test folds hold every subject once; a recipe with folds scores their test sets together, each
by the run that had not seen them.
"""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, roc_auc_score
from small import SMALL_RECIPE
from test_ledger import load_script

from bitimely_core import pipeline, tokens
from bitimely_core.cache import open_cache
from bitimely_core.errors import UserError
from bitimely_core.evaluate import folds
from bitimely_core.evaluate.result_table import read_scored_run
from bitimely_core.report.recipe_results import ResultPlan, write_results
from bitimely_core.report.recipe_tables import PlannedCell
from bitimely_core.tokens import splits
from bitimely_core.workflows.prepare import make_windows_opener

RECIPE = f"""
title = "Two folds"
folds = [4, 9]
{SMALL_RECIPE}patch = 50
layers = 1
[[arm]]
name = "gpt"
model = "gpt"
"""


def test_ten_test_folds_hold_every_subject_once() -> None:
    subjects = [f"s{k}" for k in range(300)]
    of = {k: tokens.assign_splits(subjects, seed=3, test_fold=k) for k in range(1, 11)}
    assert of[10] == tokens.assign_splits(subjects, seed=3)
    for subject in subjects:
        tested = [k for k, placed in of.items() if placed[subject] == "test"]
        held = [k for k, placed in of.items() if placed[subject] == "validation"]
        assert len(tested) == 1
        assert held == [tested[0] % 10 + 1]  # a fold validates when the one behind it is tested


@pytest.mark.parametrize("folds", [5, 10])
def test_dealt_folds_hold_every_subject_once_and_each_class_evenly(folds: int) -> None:
    strata = {f"s{k}": "rare" if k % 7 == 0 else "common" for k in range(53)}
    of = {
        k: splits.assign_dealt_splits(strata, strata, seed=1, folds=folds, test_fold=k)
        for k in range(1, folds + 1)
    }
    for subject in strata:
        assert sum(placed[subject] == "test" for placed in of.values()) == 1
    for placed in of.values():
        counts = {name: sum(v == name for v in placed.values()) for name in splits.SPLITS}
        assert abs(counts["test"] - 53 / folds) <= 2
        assert abs(counts["validation"] - 5.3) < 1
        rare = sum(strata[s] == "rare" for s, v in placed.items() if v == "test")
        assert abs(rare - 8 / folds) <= 2
    bonn = {f"{letter}{k:03}": letter for letter in "ZONFS" for k in range(100)}
    placed = splits.assign_dealt_splits(bonn, bonn, folds=5, test_fold=3)
    assert {
        letter: sum(placed[s] == "test" for s in bonn if bonn[s] == letter) for letter in "ZONFS"
    } == dict.fromkeys("ZONFS", 20)
    with pytest.raises(UserError, match="fold 6"):
        splits.assign_dealt_splits(bonn, bonn, folds=5, test_fold=6)


def test_official_folds_turn_and_leave_the_recommendation_as_the_last_one() -> None:
    assert [splits.read_official_split({"fold": k}) for k in (1, 8, 9, 10, 11, None, True)] == [
        "train",
        "train",
        "validation",
        "test",
        None,
        None,
        None,
    ]
    assert [splits.read_official_split({"fold": k}, 1) for k in (1, 2, 9, 10)] == [
        "test",
        "train",
        "train",
        "validation",
    ]
    assert [splits.read_official_split({"fold": k}, 4) for k in (1, 3, 4, 10)] == [
        "train",
        "validation",
        "test",
        "train",
    ]
    assert splits.read_official_split({"split": "test"}) == "test"
    assert splits.read_official_split({"split": "test"}, 4) is None  # it has no folds to turn


@pytest.mark.parametrize(
    ("split", "subjects", "words"),
    [("time", 40, "no folds"), ("random-window", 40, "no folds"), ("subject", 12, "12 subjects")],
)
def test_a_split_without_ten_folds_is_refused(split: str, subjects: int, words: str) -> None:
    options = SimpleNamespace(split=split, seed=0, test_fold=2, folds=None, stratify=None)
    table = pl.DataFrame({"subject_id": [str(k) for k in range(subjects)]})
    with pytest.raises(UserError, match=words) as caught:
        splits.make_scheme(options, table)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folds")
    (folder / "two.toml").write_text(RECIPE)
    done = pipeline.run(str(folder / "two.toml"), workspace=folder)
    assert done["exit_code"] == 0, done["stages"]
    return folder


FOLDS = [f"two-fold-{k}-gpt-staging" for k in (4, 9)]


@pytest.mark.slow
def test_no_fold_was_trained_on_a_subject_that_it_is_tested_on(ran: Path) -> None:
    tested = [
        set(pl.read_parquet(ran / "runs" / name / "predictions.parquet")["subject_id"])
        for name in FOLDS
    ]
    assert all(tested)
    assert not tested[0] & tested[1]
    for k, name, subjects in zip((4, 9), FOLDS, tested, strict=True):
        body = json.loads((ran / "runs" / name / "run.json").read_bytes())
        for data in (body["data"], body["pretraining_data"]):
            windows = tokens.open_tokens(ran / "tokens" / data[0]["name"])
            assert windows.options.test_fold == k
            assert not subjects & set(windows["train"].subjects())
        assert (
            json.loads((ran / "runs" / name / "scores.json").read_bytes())[
                "subjects_shared_with_training"
            ]
            == 0
        )


@pytest.mark.slow
def test_pooled_folds_are_scored_like_one_run(ran: Path) -> None:
    frame = pl.concat(
        [pl.read_parquet(ran / "runs" / name / "predictions.parquet") for name in FOLDS]
    )
    names = [name for name in frame.columns if name.startswith("p_")]
    target, probabilities = frame["target"].to_numpy(), frame.select(names).to_numpy()
    [line] = csv.DictReader((ran / "reports" / "two" / "results.csv").read_text().splitlines())
    assert line["state"] == "done"
    assert float(line["value"]) == pytest.approx(accuracy_score(target, probabilities.argmax(1)))
    assert int(line["windows"]) == len(frame)
    assert int(line["subjects"]) == frame["subject_id"].n_unique()
    summary = json.loads((ran / "reports" / "two" / "summary.json").read_bytes())
    assert set(summary["baselines"]["synthetic/staging"]) == {"features", "kernels", "band-powers"}
    assert "2 test folds together" in (ran / "reports" / "two" / "report.html").read_text()
    parts = [read_scored_run("gpt", "synthetic/staging", 0, ran / "runs" / name) for name in FOLDS]
    one = folds.pool_folds([part for part in parts if part], ran / "kept", make_windows_opener(ran))
    assert one.scores.metrics["auroc"].value == pytest.approx(
        roc_auc_score(target, probabilities, multi_class="ovr")
    )
    right = 0
    # the commonest class of each fold's own training windows
    for part, name in zip(parts, FOLDS, strict=True):
        assert part is not None
        windows = tokens.open_tokens(ran / "tokens" / part.scores.data)
        commonest = np.bincount(np.asarray(windows["train"].targets())).argmax()
        right += int(
            (
                pl.read_parquet(ran / "runs" / name / "predictions.parquet")["target"] == commonest
            ).sum()
        )
    assert one.scores.baselines["majority"].metrics["accuracy"].value == pytest.approx(
        right / len(frame)
    )
    with pytest.raises(UserError, match="test sets of two folds"):
        folds.pool_folds([parts[0], parts[0]], ran / "kept", make_windows_opener(ran))  # type: ignore[list-item]


@pytest.mark.slow
def test_a_recipe_states_the_columns_of_its_page(ran: Path) -> None:
    """AUROC of all classes and AUPRC of one; the baselines of the runs are compared by the metric
    of the column.
    """
    frame = pl.concat(
        [pl.read_parquet(ran / "runs" / name / "predictions.parquet") for name in FOLDS]
    )
    names = [name for name in frame.columns if name.startswith("p_")]
    target, probabilities = frame["target"].to_numpy(), frame.select(names).to_numpy()
    columns = ["synthetic/staging:auroc", "synthetic/staging:W"]
    (ran / "two.toml").write_text(
        RECIPE.replace("[evaluate]\n", f"[evaluate]\ncolumns = {json.dumps(columns)}\n")
    )
    done = pipeline.run(str(ran / "two.toml"), workspace=ran)
    assert done["exit_code"] == 0
    # nothing is trained anew
    assert [stage["stage"] for stage in done["stages"] if stage["state"] == "done"] == ["results"]
    area, wake = csv.DictReader((ran / "reports" / "two" / "results.csv").read_text().splitlines())
    assert float(area["value"]) == pytest.approx(
        roc_auc_score(target, probabilities, multi_class="ovr")
    )
    at = names.index("p_W")
    assert float(wake["value"]) == pytest.approx(
        average_precision_score(target == at, probabilities[:, at])
    )
    summary = json.loads((ran / "reports" / "two" / "summary.json").read_bytes())
    assert set(summary["baseline_differences"]) == set(columns)
    constant = summary["baseline_differences"][columns[0]]["gpt"]["majority"]
    assert constant["difference"] == pytest.approx(float(area["value"]) - 0.5)
    (ran / "two.toml").write_text(RECIPE)
    assert pipeline.run(str(ran / "two.toml"), workspace=ran)["exit_code"] == 0


@pytest.mark.slow
def test_a_cell_without_one_of_its_folds_has_no_score(ran: Path) -> None:
    found = write_results(
        ResultPlan(
            name="part",
            cells=[PlannedCell("gpt", "synthetic/staging", 0, "done", (*FOLDS, "never-trained"))],
        ),
        workspace=ran,
        out=ran / "part",
        open_windows=make_windows_opener(ran),
    )
    assert not found["cells"]
    assert found["missing"][0]["state"] == "failed"
    assert "never-trained" in found["missing"][0]["detail"]


@pytest.mark.slow
def test_pooled_folds_hold_nothing_of_the_first_one_alone(ran: Path) -> None:
    parts = [
        one
        for name in FOLDS
        if (one := read_scored_run("gpt", "synthetic/staging", 0, ran / "runs" / name))
    ]
    assert parts[0].scores.lift
    assert parts[0].scores.nights
    one = folds.pool_folds(parts, ran / "kept", make_windows_opener(ran)).scores
    assert [one.lift, one.nights, one.events, one.risk_groups, one.comparison] == [None] * 5


@pytest.mark.slow
def test_the_further_metrics_of_the_docs_leave_out_a_cell_without_one_of_its_folds(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, recipe = load_script("results"), pipeline.load(str(ran / "two.toml"))
    arms = [*recipe.arm, recipe.arm[0].model_copy(update={"name": "other"})]
    monkeypatch.setattr(
        pipeline, "load", lambda name, preset: recipe.model_copy(update={"arm": arms})
    )
    for k, name in zip((4, 9), FOLDS, strict=True):
        shutil.copytree(ran / "runs" / name, ran / "runs" / f"two-fold-{k}-other-staging")
    both = results.list_further("two", ran)
    (ran / "runs" / "two-fold-9-other-staging" / "scores.json").unlink()
    assert results.list_further("two", ran) == [line for line in both if "| other |" not in line]
    assert len(both) == 4


@pytest.mark.slow
def test_costs_are_estimated_from_recordings_before_windows_exist(
    ran: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.toml"
    path.write_text(
        RECIPE.replace("folds = [4, 9]", "[tokenize]\nwindow = 500").replace(
            "steps = 1", "epochs = 2"
        )
    )
    planned = pipeline.run(str(path), workspace=ran, on="h200")["stages"]
    [windows] = {stage["windows"] for stage in planned if stage["stage"].startswith("pretrain")}
    signals = open_cache(ran / "cache" / "synthetic").signals()
    longest = signals.group_by("recording_id").agg(
        (pl.col("n_samples") / pl.col("rate")).max().alias("seconds")
    )["seconds"]
    assert windows == int(2 * 0.8 * (longest // (500 / signals["rate"].max())).sum())


@pytest.mark.slow
def test_nothing_beside_the_page_names_a_subject(ran: Path) -> None:
    subjects = set(pl.read_parquet(ran / "runs" / FOLDS[0] / "predictions.parquet")["subject_id"])
    files = [file for file in (ran / "reports" / "two").rglob("*") if file.is_file()]
    assert any(file.name.startswith("folds-") for file in files)
    for file in files:
        content = (
            pl.read_parquet(file).write_csv()
            if file.suffix == ".parquet"
            else file.read_text("utf-8", errors="replace")
        )
        assert not any(subject in content for subject in subjects), file
