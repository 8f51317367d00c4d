"""`train --folds` and `--seeds`: every subject is tested once, by a model that was not trained on it;
folds are scored together, seeds averaged.
"""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score
from small import RATE, VIEW, copy_data, write_raw

import bitimely as bt
from bitimely_cli.following import name_next
from bitimely_cli.main import main
from bitimely_core import registry, tokens
from bitimely_core.errors import UserError
from bitimely_core.evaluate import METRICS
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores
from bitimely_core.store.records import read_result_table
from bitimely_core.tokens import splits
from bitimely_core.tokens.fold_tokens import write_fold
from bitimely_core.workflows import tokenize
from bitimely_core.workflows.train import RECOMMENDED, find_kind

torch.set_num_threads(1)
TRAIN = ["train", "--data", VIEW, "--steps", "3", "--batch-size", "8"]
RUN = "resnet-classification-3-folds"
FOLDS = [f"resnet-classification-fold-{k}-of-3" for k in (1, 2, 3)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A workspace with resnet trained on three folds."""
    folder = copy_data(tmp_path_factory.mktemp("members"))
    assert main([*TRAIN, "--folds", "3", "-w", str(folder)]) == 0
    return folder


def call(capsys, home, *words):
    """Exit code, stdout as JSON, stderr."""
    capsys.readouterr()
    code = main([*words, "-w", str(home), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def read_run(home, name):
    return RunRecord.load(home / "runs" / name / "run.json")


def read_table(home, run):
    return read_result_table(home / "runs" / run / "predictions.parquet")


@pytest.mark.parametrize(
    ("subjects", "folds"), [(3, 3), (4, 2), (7, 5), (12, 5), (12, 12), (30, 3), (53, 7)]
)
def test_every_subject_is_tested_once_whatever_the_number_of_folds(subjects, folds):
    ids = [f"s{k}" for k in range(subjects)]
    placed = [
        splits.assign_dealt_splits(ids, {}, seed=4, folds=folds, test_fold=k)
        for k in range(1, folds + 1)
    ]
    assert all(sum(fold[s] == "test" for fold in placed) == 1 for s in ids)
    assert all(set(fold.values()) == {"train", "validation", "test"} for fold in placed)
    sizes = [sum(split == "test" for split in fold.values()) for fold in placed]
    assert max(sizes) - min(sizes) <= 2
    with pytest.raises(UserError, match="expected at least"):
        splits.assign_dealt_splits(ids, {}, folds=subjects + 1, test_fold=1)


@pytest.mark.slow
def test_windows_are_split_anew_as_if_they_were_cut_again(home):
    built = tokenize(
        VIEW, workspace=home, name="cut", options={"folds": 3, "test_fold": 2, "split": "subject"}
    )
    cut = tokens.open_tokens(home / "tokens" / "cut")
    anew = tokens.open_tokens(home / "tokens" / "generic-classification-fold-2-of-3")
    assert anew.index.equals(cut.index)
    assert anew.statistics == cut.statistics
    assert {split: len(anew[split]) for split in built["audit"]} == {
        split: audit["windows"] for split, audit in built["audit"].items()
    }
    shard = anew.manifest.shards[0].name
    source = home / "tokens" / "generic-classification" / shard
    assert (anew.folder / shard).stat().st_ino == source.stat().st_ino  # no second copy


def test_folds_are_scored_together_each_subject_by_a_model_that_did_not_see_it(home):
    joined = pl.concat([read_table(home, name) for name in FOLDS])
    assert joined.select("window").is_duplicated().sum() == 0
    for name in FOLDS:
        windows = tokens.open_tokens(home / "tokens" / read_run(home, name).data[0].name)
        assert not set(read_table(home, name)["subject_id"]) & set(windows["train"].subjects())
    pooled = read_table(home, RUN)
    assert pooled.equals(joined.sort("window"))
    scores = Scores.load(home / "runs" / RUN / "scores.json")
    assert (scores.n_subjects, scores.n) == (pooled["subject_id"].n_unique(), len(pooled))
    target = pooled["target"].to_numpy()
    probability = pooled.select(c for c in pooled.columns if c.startswith("p_")).to_numpy()
    assert scores.metrics["accuracy"].value == pytest.approx(
        accuracy_score(target, probability.argmax(1))
    )
    assert scores.metrics["auroc"].value == pytest.approx(roc_auc_score(target, probability[:, 1]))
    assert scores.metrics["accuracy"].lo is not None
    majority = scores.baselines["majority"].metrics["accuracy"]
    assert majority.difference is not None
    assert {"simple_features", "random_kernels"} <= set(scores.baselines)
    assert "Each fold by itself" in (home / "runs" / RUN / "report.html").read_text()


@pytest.mark.slow
def test_the_same_command_again_keeps_the_folds_and_makes_the_missing_one(home, capsys):
    again = [*TRAIN, "--folds", "3"]
    code, result, _ = call(capsys, home, *again)
    assert (code, result["trained"], result["members"]) == (0, False, FOLDS)
    before = Scores.load(home / "runs" / RUN / "scores.json")
    kept = (home / "runs" / FOLDS[0] / "model" / "model.safetensors").stat().st_mtime_ns
    for path in sorted((home / "runs" / FOLDS[2]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, result, _ = call(capsys, home, *again)
    assert (code, result["trained"]) == (0, True)
    assert (home / "runs" / FOLDS[0] / "model" / "model.safetensors").stat().st_mtime_ns == kept
    assert Scores.load(home / "runs" / RUN / "scores.json").metrics == before.metrics
    code, _, err = call(capsys, home, *again, "--lr", "0.5")
    assert code == 2
    assert "lr" in err


def test_the_run_is_one_row_and_its_scores_are_read_again(home, capsys):
    code, result, _ = call(capsys, home, "evaluate", RUN)
    assert (code, result["n_subjects"]) == (0, 30)
    assert main(["evaluate", RUN, "-w", str(home)]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[rows.index("accuracy") :][:6] == list(METRICS["classification"])
    code, result, _ = call(capsys, home, "report", RUN)
    assert code == 0
    assert set(result["summary"]) == {RUN, "baseline_differences"}
    code, _, _ = call(capsys, home, "verify")
    assert code == 0


@pytest.mark.parametrize("verb", ["export", "embed", "reproduce"])
def test_verbs_that_need_weights_name_one_of_its_runs(home, capsys, verb):
    code, _, err = call(capsys, home, verb, RUN)
    assert code == 2
    assert FOLDS[0] in err


def test_new_recordings_get_the_mean_of_all_models(home, capsys, tmp_path):
    write_raw(tmp_path / "raw")
    (tmp_path / "map.toml").write_text(f"rate = {RATE}\n")
    stored = read_table(home, FOLDS[0])
    names = stored["recording_id"].to_list()[:2]
    files = [str(tmp_path / "raw" / "data" / f"{Path(name).stem}.csv") for name in names]
    mapped = [str(tmp_path / "map.toml")]
    out = tmp_path / "out"
    code, _, _ = call(capsys, home, "predict", RUN, *files, "--map", mapped[0], "--out", str(out))
    assert code == 0
    mean = pl.read_parquet(out / "predictions.parquet")
    each = [
        bt.from_pretrained(name, workspace=home).predict(files, channel_map=mapped)
        for name in FOLDS
    ]
    for column in ("p_slow", "p_fast"):
        wanted = np.mean([frame[column].to_numpy() for frame in each], axis=0)
        assert np.allclose(mean[column].to_numpy(), wanted, atol=1e-6)
    # of a fold's own model those of its evaluation, to the last bit
    assert each[0]["p_fast"].to_list() == stored["p_fast"].to_list()[:2]
    assert bt.from_pretrained(RUN, workspace=home).calibration.units == 30


@pytest.mark.slow
def test_seeds_are_averaged_as_one_row(home, capsys):
    result = bt.train(
        data=VIEW, seeds=2, flags={"train": {"steps": 3, "batch_size": 8}}, workspace=home
    )
    assert result["members"] == [f"resnet-classification-seed-{seed}" for seed in (0, 1)]
    each = [Scores.load(home / "runs" / name / "scores.json") for name in result["members"]]
    scores = Scores.load(home / "runs" / result["run"] / "scores.json")
    for name, metric in scores.metrics.items():
        assert metric.value == pytest.approx(np.mean([s.metrics[name].value for s in each]))
    following = name_next(result["run"], home).split()
    assert not set(following) & set(result["members"]), "no comparison with its own seeds"
    code, _, _ = call(capsys, home, "report", result["run"])
    assert code == 0
    page = (home / "reports" / f"compare-{result['run']}" / "report.html").read_text()
    assert "Variation between seeds" in page
    model = bt.from_pretrained(result["run"], workspace=home)
    assert len(model.others) == 1
    assert model.calibration is not None


@pytest.mark.slow
def test_folds_within_seeds(home, capsys):
    code, result, _ = call(capsys, home, *TRAIN, "--folds", "3", "--seeds", "2", "--run", "both")
    assert code == 0
    assert len(result["members"]) == 6
    inner = [Scores.load(home / "runs" / f"both-3-folds-seed-{k}" / "scores.json") for k in (0, 1)]
    scores = Scores.load(home / "runs" / "both" / "scores.json")
    accuracy = [s.metrics["accuracy"].value for s in inner]
    assert scores.metrics["accuracy"].value == pytest.approx(np.mean(accuracy))
    # the seed of the first is that of the folds without seeds
    alone = Scores.load(home / "runs" / RUN / "scores.json")
    assert inner[0].metrics["accuracy"].value == alone.metrics["accuracy"].value


def test_what_cannot_be_is_refused_with_what_works(home, capsys):
    code, _, err = call(capsys, home, *TRAIN, "--folds", "31")
    assert code == 2
    assert "--folds 30" in err
    code, result, _ = call(capsys, home, *TRAIN, "--folds", "3", "--dry-run", "--run", "planned")
    assert (code, result["trainings"]) == (0, 3)
    assert not (home / "runs" / "planned").exists()
    windows = tokens.open_tokens(home / "tokens" / "generic-classification")
    with pytest.raises(UserError, match="expected at least"):
        write_fold(windows, home / "tokens" / "none", 1, 40)


def test_tokenize_names_a_command_that_works(home, capsys):
    assert main(["tokenize", VIEW, "-w", str(home)]) == 0
    out = capsys.readouterr().out
    assert f"bitimely train --data {VIEW} --folds 5 -w" in " ".join(out.split())


def test_the_model_without_a_name_is_that_of_the_kind_of_data(tmp_path):
    kinds = {
        "bidmc/hr": "rates",
        "bidmc/spo2": "signals",
        "physionet-2012/mortality": "irregular",
        "physionet-2012/mortality-grid": "signals",
        "synthetic-claims": "histories",
    }
    assert {name: find_kind(name, tmp_path) for name in kinds} == kinds
    assert set(kinds.values()) == set(RECOMMENDED)
    assert set(RECOMMENDED.values()) <= {*registry.models, *registry.methods}
