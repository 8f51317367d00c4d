"""`--tune`: the learning rate by trial, on the validation split alone."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import small

from bitimely_cli.main import main
from bitimely_core import tokens, workflows
from bitimely_core.config import merge_layers
from bitimely_core.errors import Reason, UserError
from bitimely_core.evaluate import LOWER_IS_BETTER
from bitimely_core.recipe import RecipeStage
from bitimely_core.schemas.runs import TuningRecord, TuningTrial
from bitimely_core.tokens import drawing
from bitimely_core.train import loop, tuning
from bitimely_core.workflows.prepare import prepare_windows

TRAIN = {"steps": 4, "batch_size": 8}
DATA = {"names": ("synthetic/staging",), "limit": 24}
SMALL = {"model": {"tokenizer": "patch", "patch": 50, "layers": 2}, "train": TRAIN, "data": DATA}
TUNE = {"rates": (1e-4, 3e-3), "steps": 3}


def read_run(folder: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((Path(folder) / "run.json").read_bytes())
    return body


def pretrained(home: Path, run: str, **more: Any) -> dict[str, Any]:
    """`run.json` of a small pre-training."""
    force_new = more.pop("force_new", False)
    flags = merge_layers(SMALL, more)
    return read_run(
        workflows.pretrain(
            preset="tiny", flags=flags, run=run, workspace=home, force_new=force_new
        )["folder"]
    )


def finetuned(home: Path, run: str, **more: Any) -> dict[str, Any]:
    flags = merge_layers({"train": TRAIN, "data": {"limit": 24, "fraction": 1.0}}, more)
    return read_run(
        workflows.finetune("base", data="synthetic/staging", flags=flags, run=run, workspace=home)[
            "folder"
        ]
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.copy_nights(tmp_path_factory.mktemp("tuning"))
    pretrained(folder, "base")
    return folder


def test_the_grid_is_half_a_decade_apart_around_the_rate() -> None:
    assert tuning.make_rate_grid(3, 1e-3) == (3.16e-4, 1e-3, 3.16e-3)
    assert tuning.make_rate_grid(4, 3e-4) == (9.49e-5, 3e-4, 9.49e-4, 3e-3)
    assert tuning.make_rate_grid(2, 1 / 3000) == (1 / 3000, 1.05e-3), (
        "the rate itself is tried as it is"
    )
    assert tuning.make_rate_grid((0.1, 0.01), 1e-3) == (0.01, 0.1)


def trial(lr: float, reason: str = "", **scores: float | None) -> TuningTrial:
    return TuningTrial(lr=lr, scores=scores, reason=reason)


def test_the_best_wins_ties_go_on_and_what_diverged_loses() -> None:
    assert tuning.select_trial(
        [trial(1, rel=0.5, loss=9), trial(2, rel=0.4, loss=9)], LOWER_IS_BETTER
    ) == (2, ("rel", "loss"))
    assert (
        tuning.select_trial(
            [trial(1, accuracy=0.5, rel=0.5), trial(2, accuracy=0.6, rel=0.9)], LOWER_IS_BETTER
        )[0]
        == 2
    )
    assert tuning.select_trial(
        [trial(1, loss=0.1, mae=3), trial(2, loss=0.2, mae=2)], LOWER_IS_BETTER
    ) == (2, ("mae", "loss"))
    assert (
        tuning.select_trial(
            [trial(1, accuracy=0.5, loss=0.5), trial(2, accuracy=0.5, loss=0.4)], LOWER_IS_BETTER
        )[0]
        == 2
    )
    assert (
        tuning.select_trial(
            [trial(1, accuracy=0.5, loss=0.5), trial(2, accuracy=0.5, loss=0.5)], LOWER_IS_BETTER
        )[0]
        == 1
    )
    assert tuning.select_trial(
        [trial(1, auprc=None, loss=0.5), trial(2, auprc=0.9, loss=0.9)], LOWER_IS_BETTER
    ) == (1, ("loss",))
    assert (
        tuning.select_trial([trial(1, rel=0.9), trial(2, "non-finite loss")], LOWER_IS_BETTER)[0]
        == 1
    )
    with pytest.raises(UserError, match="all of 2 learning rates diverge: 1, 2") as caught:
        tuning.select_trial(
            [trial(1, "non-finite loss"), trial(2, "non-finite loss")], LOWER_IS_BETTER
        )
    assert (caught.value.code, caught.value.exit_code) == (Reason.NON_FINITE_LOSS, 4)


@pytest.mark.slow
def test_the_tuned_run_is_the_run_with_that_rate(home: Path) -> None:
    body = pretrained(home, "tuned", tune=TUNE)
    record = body["tuning"]
    assert [one["lr"] for one in record["trials"]] == list(TUNE["rates"])
    # a trial is the training that the same settings make without --tune
    for one in record["trials"]:
        alone = pretrained(
            home, f"alone-{one['lr']:g}", train={"lr": one["lr"], "steps": TUNE["steps"]}
        )
        assert one["scores"] == {key: alone["final"]["validation"][key] for key in ("loss", "rel")}
    lowest = min(record["trials"], key=lambda one: one["scores"]["rel"])["lr"]
    assert record["lr"] == body["settings"]["train"]["lr"] == lowest
    assert body["weights"] == pretrained(home, "plain", train={"lr": lowest})["weights"]
    folder = home / "runs" / "tuned"
    assert not list(folder.glob("tuning/*/checkpoints")) + list(folder.glob("tuning/*/model"))
    for page in ("model_card.md", "report.html"):
        assert (
            tuning.describe_tuning(TuningRecord.model_validate(record)).split(",")[0]
            in (folder / page).read_text()
        )
    again = workflows.pretrain(
        preset="tiny", flags=merge_layers(SMALL, {"tune": TUNE}), run="tuned", workspace=home
    )
    assert again["trained"] is False
    with pytest.raises(UserError, match=r"settings\.tune\.rates"):
        pretrained(home, "tuned", tune={**TUNE, "rates": (1e-4, 1e-2)})
    assert workflows.reproduce("tuned", workspace=home)["same_weights"]


@pytest.mark.slow
def test_a_head_is_tuned_by_the_metric_of_its_task(home: Path) -> None:
    body = finetuned(home, "head", tune=TUNE)
    assert body["tuning"]["by"][0] == "accuracy"
    windows = tokens.open_tokens(home / "tokens" / "synthetic-staging")
    # what a training with this limit sees
    kept = drawing.limit_windows(windows, DATA["limit"], 0)["validation"].index["window"]
    for one in body["tuning"]["trials"]:
        finetuned(home, "alone", train={"lr": one["lr"], "steps": TUNE["steps"]})
        assert workflows.evaluate("alone", split="validation", bootstrap=0, workspace=home)[
            "n"
        ] == len(windows["validation"])
        rows = pl.read_parquet(home / "runs" / "alone" / "predictions.parquet").filter(
            pl.col("window").is_in(kept.implode())
        )
        assert one["scores"]["accuracy"] == pytest.approx(
            (rows["target"] == rows["prediction"]).mean()
        )
        shutil.rmtree(home / "runs" / "alone")


def test_no_test_window_is_within_reach(home: Path) -> None:
    windows = tokens.open_tokens(home / "tokens" / "synthetic-staging")
    view = tuning.drop_test(windows)
    assert len(view["train"])
    assert len(view["validation"])
    with pytest.raises(UserError, match="test"):
        view["test"]
    tested = windows["test"].rows[:1]
    for split in ("train", "validation"):
        assert len(view[split]["test"]) == 0
        with pytest.raises(IndexError):
            view[split].arrays(tested)
    measured: list[str] = []

    def measure(model: Any, views: list[tuning.TrainValidation]) -> dict[str, float | None]:
        measured.append("test")
        return {"accuracy": float(len(views[0]["test"]))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["bitimely_core.workflows.finetune"],
            "measure_task",
            lambda head, views, device: measure(head, views),
        )
        with pytest.raises(UserError, match="split to choose on") as caught:
            finetuned(home, "reads-test", tune=TUNE)
    assert measured == ["test"]
    assert caught.value.code == Reason.UNKNOWN_NAME


@pytest.mark.slow
def test_a_rate_that_diverges_loses_and_says_why(home: Path) -> None:
    record = pretrained(home, "wild", tune={"rates": (1e-4, 1e30), "steps": 3})["tuning"]
    tame, wild = record["trials"]
    assert record["lr"] == 1e-4
    assert tame["reason"] == ""
    assert wild["scores"] == {}
    assert "non-finite" in wild["reason"] or "not finite" in wild["reason"]
    assert "1e+30: diverged" in tuning.describe_tuning(TuningRecord.model_validate(record))
    with pytest.raises(UserError, match="all of 2 learning rates diverge") as caught:
        pretrained(home, "wilder", tune={"rates": (1e29, 1e30), "steps": 3})
    assert caught.value.exit_code == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped", [pytest.param("in the second trial", marks=pytest.mark.slow), "in the training"]
)
def test_a_stopped_run_keeps_its_trials(
    home: Path, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"stopped-{stopped.split()[-1]}"
    fit, fitted = loop.fit, []

    def counted(*given: Any, **named: Any) -> dict[str, Any]:
        folder = Path(named["folder"]).relative_to(home / "runs").as_posix()
        fitted.append(folder)
        if len(fitted) == (2 if stopped == "in the second trial" else 3):
            raise UserError(Reason.INTERRUPTED, "stopped", exit_code=143)
        return fit(*given, **named)

    monkeypatch.setattr(loop, "fit", counted)
    with pytest.raises(UserError, match="stopped"):
        pretrained(home, name, tune=TUNE)
    before = len(fitted)
    body = pretrained(home, name, tune=TUNE)
    trials = [f"{name}/tuning/lr-0.0001", f"{name}/tuning/lr-0.003"]
    assert fitted[before:] == ([trials[1], name] if stopped == "in the second trial" else [name])
    undisturbed = pretrained(home, "undisturbed", tune=TUNE)
    assert body["weights"] == undisturbed["weights"]
    assert body["tuning"] == undisturbed["tuning"]
    before = len(fitted)
    pretrained(home, name, tune=TUNE, force_new=True)
    assert fitted[before:] == [*trials, name], "--force-new repeats the trials"


def test_without_validation_windows_there_is_no_choice(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = prepare_windows

    def bare(*given: Any, **named: Any) -> Any:
        windows = opened(*given, **named)
        return windows.subset((windows.index["split"] != "validation").to_numpy())

    for verb in ("pretrain", "finetune"):
        monkeypatch.setattr(sys.modules[f"bitimely_core.workflows.{verb}"], "prepare_windows", bare)
    small = ["--batch-size", "8", "--steps", "2", "--tune", "2", "-w", str(home), "--run", "blind"]
    for argv in (
        ["pretrain", "--set", "model.tokenizer=patch", "--data", "synthetic/staging"],
        ["finetune", "base", "--data", "synthetic/staging"],
    ):
        for dry in ([], ["--dry-run"]):
            assert main([*argv, *small, *dry]) == 4
            printed = capsys.readouterr().err.strip()
            assert "has no validation windows" in printed
            assert "--lr" in printed
            assert printed.count("\n") == 0
    assert not (home / "runs" / "blind").exists()


@pytest.mark.slow
def test_the_command_line_and_recipes(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = ["-w", str(home)]
    common = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "synthetic/staging",
        "--set",
        "data.limit=24",
        "--batch-size",
        "8",
        "--json",
        *w,
    ]
    for wrong in ("1", "x", "1e-3", "1e-3,-1", "1e-3,1e-3"):
        assert main([*common, "--tune", wrong]) == 2
        assert "2 to 9" in capsys.readouterr().err
    assert main([*common, "--steps", "1000", "--tune", "3", "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["tuning"]["steps"] == 100
    assert planned["tuning"]["rates"] == pytest.approx(
        [1e-3 * 10**-0.5, 1e-3, 1e-3 * 10**0.5], rel=1e-2
    )
    assert planned["tuning"]["seconds"] == pytest.approx(300 * planned["seconds_per_step"])
    assert main([*common, "--steps", "30", "--tune", "2", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["tuning"]["steps"] == 30, (
        "a trial is never longer than the training"
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[pretrain]\ntune = [1e-3, 1e-4]\n[finetune]\ntune = 3\n")
    assert main([*common, "--steps", "4", "--config", str(recipe), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["tuning"]["rates"] == [1e-4, 1e-3]
    tuned = [
        "finetune",
        "base",
        "--data",
        "synthetic/staging",
        "--batch-size",
        "8",
        "--config",
        str(recipe),
        "--dry-run",
        "--json",
        *w,
    ]
    assert main(tuned) == 0
    assert np.diff(
        np.log10(json.loads(capsys.readouterr().out)["tuning"]["rates"])
    ) == pytest.approx([0.5, 0.5], abs=1e-2)
    cell = RecipeStage.model_validate({"model": "gpt", "tune": 4}).flags()
    assert cell["tune"] == {"rates": 4}


def test_a_model_without_pre_training_has_no_rate_to_choose(home: Path) -> None:
    body = pretrained(home, "supervised", model={"name": "gru-d", "layers": 1}, tune=TUNE)
    assert "tuning" not in body
    assert body["settings"]["tune"]["rates"] is None
    assert any("learning-rate search is skipped" in line for line in body["notices"])
