"""`bitimely train`: a run from random weights on labels, like any other run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score

from bitimely_cli.main import main
from bitimely_core import heads, tokens
from bitimely_core.data import collate
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store.records import read_result_table

torch.set_num_threads(1)
VIEW = ["--data", "synthetic/staging"]
SMALL = ["--steps", "12", "--batch-size", "8"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The synthetic cohort at 20 Hz with one run of resnet."""
    folder = tmp_path_factory.mktemp("workspace")
    w = ["-w", str(folder)]
    assert main(["ingest", "synthetic", *w]) == 0
    assert main(["tokenize", "synthetic/staging", "--rate", "20", *w]) == 0
    assert main(["train", *VIEW, *SMALL, *w]) == 0
    return folder


def load_record(home, run):
    return RunRecord.load(home / "runs" / run / "run.json")


def call(capsys, home, *words):
    """Exit code, stdout as JSON, stderr."""
    capsys.readouterr()
    code = main([*words, "-w", str(home), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.mark.slow
def test_signals_are_trained_by_resnet_on_all_subjects(home):
    record = load_record(home, "resnet-staging")
    assert (record.kind, record.model, record.source) == ("train", "resnet", None)
    assert record.finished
    assert record.train_windows == record.data[0].audit["train"].windows
    train = record.settings.train
    assert (train.lr, train.warmup, train.steps) == (3e-3, 0.05, 12)
    assert record.settings.model.length == 600
    assert (record.settings.model.stem, record.settings.model.blocks) == (2, 4)
    head = heads.load(home / "runs" / "resnet-staging" / "model")
    assert head.task == "classification"


def test_the_same_command_again_does_nothing(home, capsys):
    code, result, _ = call(capsys, home, "train", "resnet", *VIEW, *SMALL)
    assert (code, result["trained"]) == (0, False)


@pytest.mark.slow
def test_it_is_evaluated_embedded_exported_and_reported(home, capsys):
    code, result, _ = call(capsys, home, "evaluate", "resnet-staging", "--bootstrap", "0")
    assert code == 0
    rows = read_result_table(home / "runs" / "resnet-staging" / "predictions.parquet")
    wanted = accuracy_score(rows["target"].to_numpy(), rows["prediction"].to_numpy())
    assert result["metrics"]["accuracy"]["value"] == pytest.approx(wanted)
    code, result, _ = call(capsys, home, "embed", "resnet-staging", *VIEW)
    assert (code, result["width"]) == (0, 64)
    out = home / "exported"
    assert call(capsys, home, "export", "resnet-staging", "--out", str(out))[0] == 0
    assert "Trained resnet" in (out / "model_card.md").read_text()
    code, result, _ = call(capsys, home, "report", "resnet-staging")
    assert code == 0
    page = (home / "runs" / "resnet-staging" / "report.html").read_text()
    assert "none (from scratch)" in page


@pytest.mark.slow
def test_scores_on_other_windows_say_that_they_replace_those_before(home, capsys):
    words = ("evaluate", "resnet-staging", "--bootstrap", "0", "--baselines", "cheap", "--split")
    call(capsys, home, *words, "test")
    for split, before in (("validation", "test"), ("test", "validation")):
        notices = " ".join(call(capsys, home, *words, split)[1]["notices"])
        assert f"({before}): evaluate it on them again" in notices


@pytest.mark.slow
def test_it_is_reproduced_to_the_last_bit(home, capsys):
    code, result, _ = call(capsys, home, "reproduce", "resnet-staging")
    assert (code, result["same_weights"], result["differences"]) == (0, True, [])


@pytest.mark.slow
def test_a_budget_in_epochs_or_steps(home, capsys):
    """Without either 3,000 steps; epochs count where they are given."""
    plain = call(capsys, home, "train", *VIEW, "--run", "plain", "--dry-run")[1]
    assert plain["steps"] == 3000
    windows = plain["windows"]["train"]
    epochs = call(capsys, home, "train", *VIEW, "--run", "plain", "--epochs", "2", "--dry-run")[1]
    assert epochs["steps"] == 2 * int(np.ceil(windows / 32))


@pytest.mark.slow
def test_a_budget_in_minutes(home, capsys):
    """The run says that its steps depend on the machine."""
    words = ["train", *VIEW, "--batch-size", "8", "--minutes", "0.02", "--run", "timed"]
    planned = call(capsys, home, *words, "--dry-run")[1]
    assert planned["seconds"] == pytest.approx(1.2)
    code, result, err = call(capsys, home, *words)
    assert code == 0, err
    assert "0.02 minutes of 8 windows" in err
    record = load_record(home, "timed")
    assert record.settings.train.steps is None
    assert record.final.step == result["steps"] > 0
    assert any("depends on the machine" in notice for notice in result["notices"])
    again = call(capsys, home, *words)[1]
    assert (again["trained"], again["steps"]) == (False, result["steps"])


def test_the_run_names_its_augmentations_and_choice(home, capsys):
    """Classes have gain by default; few validation people do not choose the weights."""
    record = load_record(home, "resnet-staging")
    assert record.settings.finetune.augment == ("gain",)
    assert record.settings.train.checkpoint == record.checkpoint.choice == "last"
    assert any("too few to choose the best" in notice for notice in record.notices)
    page = (home / "runs" / "resnet-staging" / "report.html").read_text()
    assert "gain" in page
    words = ["train", *VIEW, *SMALL, "--run", "other", "--augment", "stretch,mixup"]
    words += ["--set", "finetune.class_weights=balanced", "--set", "train.ema=0.9"]
    assert call(capsys, home, *words)[0] == 0
    assert load_record(home, "other").settings.finetune.augment == ("stretch", "mixup")
    code, _, err = call(capsys, home, "train", *VIEW, "--augment", "strech", "--run", "wrong")
    assert code == 2
    assert "stretch" in err


def test_a_share_of_the_subjects(home, capsys):
    code, result, _ = call(
        capsys, home, "train", *VIEW, *SMALL, "--fraction", "0.3", "--run", "few"
    )
    assert code == 0
    record = load_record(home, "few")
    assert record.train_windows < load_record(home, "resnet-staging").train_windows
    assert any(notice.startswith("training on ") for notice in result["notices"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "rate"),
    [
        ("inceptiontime", ["--set", "model.dim=8", "--set", "model.layers=3"], 1e-3),
        ("bitimelygpt", ["--set", "model.layers=2", "--preset", "tiny"], 1e-3),
        pytest.param("gru-d", [], 1e-3, marks=pytest.mark.slow),
    ],
)
def test_any_model_can_be_trained(home, capsys, model, options, rate):
    few = ["--steps", "2", "--batch-size", "4"]
    code, _, err = call(capsys, home, "train", model, *VIEW, *few, *options)
    assert code == 0, err
    record = load_record(home, f"{model}-staging")
    assert record.settings.train.lr == rate
    assert record.leak_free is None


@pytest.mark.slow
def test_histories_are_trained_by_trees_or_a_network(tmp_path, capsys):
    made = ["--subjects", "300", "--no-select", "--max-events", "48"]
    assert main(["ingest", "synthetic-claims", *made, "-w", str(tmp_path)]) in {0, 3}
    few = ["--steps", "2", "--batch-size", "4"]
    code, _, err = call(capsys, tmp_path, "train", "--data", "synthetic-claims")
    assert code == 0, err
    assert load_record(tmp_path, "trees-synthetic-claims").model == "trees"
    code, _, err = call(
        capsys, tmp_path, "train", "bitimelygpt", "--data", "synthetic-claims", *few
    )
    assert code == 0, err
    record = load_record(tmp_path, "bitimelygpt-synthetic-claims")
    assert record.settings.model.tokenizer == "codes"
    head = heads.load(tmp_path / "runs" / record.run / "model")
    people = tokens.open_tokens(tmp_path / "tokens" / "synthetic-claims")["train"]
    risk = head.predict(collate(people)).detach().mean()
    assert 0 < risk < 2 * people.targets(None).mean(), "rare labels, after two steps"
    code, _, err = call(
        capsys, tmp_path, "train", "resnet", "--data", "synthetic-claims", *few, "--dry-run"
    )
    assert code == 0, err


@pytest.mark.slow
def test_what_is_refused_says_what_to_do(home, capsys):
    for words, text in (
        (["resnett", *VIEW], "resnet"),
        (["resnet"], "expected one --data"),
        (
            ["resnet", "--data", "synthetic"],
            "expected a labelled view. Take a view with labels: synthetic/staging",
        ),
    ):
        code, _, err = call(capsys, home, "train", *words)
        assert code == 2
        assert text in err


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_refused(home, capsys):
    """`--force-new` replaces the run."""
    words = ["train", *VIEW, *SMALL, "--run", "again"]
    assert call(capsys, home, *words)[0] == 0
    code, _, err = call(capsys, home, *words, "--lr", "0.01")
    assert code == 2
    assert "train.lr" in err
    assert call(capsys, home, *words, "--lr", "0.01", "--force-new")[0] == 0
    assert load_record(home, "again").settings.train.lr == 0.01
    assert Path(home / "runs" / "again" / "report.html").is_file()


@pytest.mark.slow
def test_the_page_has_the_score_on_training_windows(home, capsys):
    """The oracle is the evaluation of the training split itself."""
    assert call(capsys, home, "train", *VIEW, *SMALL, "--run", "known")[0] == 0
    code, tested, _ = call(capsys, home, "evaluate", "known", "--bootstrap", "0")
    assert code == 0
    page = (home / "runs" / "known" / "report.html").read_text()
    assert "training windows" in page
    code, trained, _ = call(
        capsys, home, "evaluate", "known", "--bootstrap", "0", "--split", "train"
    )
    assert "training" not in trained, "it would be the score itself"
    known = tested["training"]
    assert known["n"] == known["total"] == trained["n"]
    for name, metric in trained["metrics"].items():
        assert known["metrics"][name]["value"] == pytest.approx(metric["value"])


@pytest.mark.slow
def test_a_stored_score_on_training_windows_is_measured_again_where_it_was_altered(home, capsys):
    words = ["evaluate", "stored", "--bootstrap", "0", "--baselines", "cheap"]
    assert call(capsys, home, "train", *VIEW, *SMALL, "--run", "stored")[0] == 0
    _, first, _ = call(capsys, home, *words)
    assert call(capsys, home, *words)[1]["training"] == first["training"]
    path = home / "runs" / "stored" / "scores.json"
    scores = json.loads(path.read_text())
    scores["training"]["metrics"]["accuracy"]["value"] = 0.99
    path.write_text(json.dumps(scores))
    assert call(capsys, home, *words)[1]["training"] == first["training"]
