"""Which weights a run has: of the last step, of the best validation, or their moving average;
through kills, damage and every verb that uses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score
from small import copy_data
from test_train import Outcome, Rows
from torch import nn

from bitimely_cli.main import main
from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.store.records import read_result_table
from bitimely_core.train import checkpoints, loop, metrics_log
from bitimely_core.train.state import LOWEST_LOSS, Criterion
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, PER_EPOCH = 5, 6


class Point(nn.Module):
    """One weight, and a buffer that counts training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.register_buffer("seen", torch.zeros(()))


class Killed(BaseException):
    """In the place of SIGKILL."""


def approach(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Training leads to 6, validation is best at 2: the lowest validation loss is somewhere on the
    way.
    """
    assert isinstance(model, Point)
    if model.training:
        model.seen += 1
    loss = (model.weight - (6.0 if model.training else 2.0)).square().mean()
    return {"loss": loss, "rel": loss.detach(), "parts": {}}


def train(
    folder: Path | None,
    choice: str,
    *,
    kill_at: int = 0,
    criterion: Criterion = LOWEST_LOSS,
    objective: Any = approach,
    **changes: Any,
) -> tuple[Point, dict[int, tuple[float, float, float]], loop.FitResult]:
    """The model, and what it was at each validation: step -> loss, weight, batches seen."""
    model, path, lines = Point(), {}, 0

    def log(line: metrics_log.LogLine) -> None:
        nonlocal lines
        lines += 1
        if line["split"] == "validation":
            path[line["step"]] = (float(line["loss"] or 0), model.weight.item(), model.seen.item())
        if lines == kill_at:
            raise Killed

    values = {
        "epochs": EPOCHS,
        "lr": 0.2,
        "warmup": 0.0,
        "weight_decay": 0.0,
        "log_every": 1,
        "device": "cpu",
        "checkpoint": choice,
        **changes,
    }
    result = loop.fit(
        model,
        Rows(),
        objective,
        config=validate(TrainConfig, values),
        validation=Rows(rows=6),
        criterion=criterion,
        folder=folder,
        log=log,
    )
    return model, path, result


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[int, tuple[float, float, float]], bytes, bytes]:
    """The path of a run that nothing stops, and the bytes of its weights and of its last
    checkpoint.
    """
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("best")
    _, path, _ = train(folder, "best")
    return path, *stored(folder)


def stored(folder: Path) -> tuple[bytes, bytes]:
    last = checkpoints.load_latest_checkpoint(folder)
    assert last is not None
    assert last.meta.finished
    return (folder / "model" / "model.safetensors").read_bytes(), (
        last.folder / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("with_folder", [True, False])
def test_the_model_has_the_selected_weights(with_folder: bool, tmp_path: Path) -> None:
    for choice in ("last", "best"):
        folder = tmp_path / choice if with_folder else None
        model, path, result = train(folder, choice)
        steps = [*path]
        assert steps == [PER_EPOCH * (epoch + 1) for epoch in range(EPOCHS)]
        lowest = min(path, key=lambda step: path[step][0])
        assert lowest not in {steps[0], steps[-1]}, "the test would not tell the two apart"
        assert result["best"] is not None
        assert result["best"]["step"] == lowest
        _, weight, seen = path[lowest if choice == "best" else steps[-1]]
        assert (model.weight.item(), model.seen.item()) == (weight, seen), (
            "parameters and buffers of one step"
        )
        if folder is not None:
            found = load_file(folder / "model" / "model.safetensors")
            assert float(found["weight"]) == weight
            again, _, finished = train(folder, choice)  # a finished run is loaded
            assert (again.weight.item(), finished["resumed"]) == (weight, steps[-1])


def test_checkpoints_hold_the_best_weights_once_and_only_where_they_are_selected(
    tmp_path: Path,
) -> None:
    _, path, _ = train(tmp_path / "best", "best", keep=EPOCHS)
    lowest = min(path, key=lambda step: path[step][0])
    for step in path:
        own = tmp_path / "best" / "checkpoints" / f"step-{step}"
        assert (own / "best.safetensors").is_file() == (step > lowest), step
        if step > lowest:
            assert float(load_file(own / "best.safetensors")["weight"]) == path[lowest][1]
        assert float(load_file(own / "model.safetensors")["weight"]) == path[step][1], (
            "the training goes on from its own weights"
        )
    train(tmp_path / "last", "last", keep=EPOCHS)
    assert not list((tmp_path / "last").rglob("best*"))


@pytest.mark.parametrize("every", [None, 1, 4])
@pytest.mark.parametrize("kill_at", range(1, EPOCHS * (PER_EPOCH + 1) + 1, 3))
def test_a_kill_changes_nothing(
    kill_at: int, every: int | None, undisturbed: Any, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(tmp_path, "best", kill_at=kill_at, checkpoint_every=every)
    model, _, _ = train(tmp_path, "best", checkpoint_every=every)
    path, *files = undisturbed
    assert stored(tmp_path) == tuple(files)
    assert model.weight.item() == min(path.values())[1]


def test_an_older_checkpoint_has_its_own_best_weights(undisturbed: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, "best", kill_at=4 * (PER_EPOCH + 1) + 2)
    newest = tmp_path / "checkpoints" / f"step-{4 * PER_EPOCH}" / "best.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    with pytest.warns(RuntimeWarning, match="damaged"):
        train(tmp_path, "best")
    assert stored(tmp_path) == tuple(undisturbed[1:])


def test_the_choice_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, "last", kill_at=10)
    with pytest.raises(UserError) as caught:
        train(tmp_path, "best")
    assert (caught.value.code, caught.value.exit_code) == (Reason.SETTINGS_DIFFER, Exit.USAGE)
    with pytest.raises(UserError, match="no validation windows") as caught:
        loop.fit(Point(), Rows(), approach, config=validate(TrainConfig, {"checkpoint": "best"}))
    assert (caught.value.exit_code, caught.value.field) == (Exit.REFUSED, "--checkpoint")


TUNED = [
    "finetune",
    "plain",
    "--data",
    "generic/classification",
    "--fraction",
    "1",
    "--batch-size",
    "8",
    "--epochs",
    "6",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a pre-trained run, `plain`."""
    torch.set_num_threads(1)
    folder = copy_data(tmp_path_factory.mktemp("runs") / "home")
    begun = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "generic/classification",
        "--batch-size",
        "8",
        "--epochs",
        "2",
    ]
    begun += [
        "--set",
        "model.tokenizer=patch",
        "--set",
        "model.patch=10",
        "--set",
        "model.layers=2",
    ]
    begun += ["--run", "plain", "--checkpoint", "best", "-w", str(folder)]
    assert main(begun) == 0
    assert main(begun) == 0, "the finished run is left alone"
    return folder


def tune(home: Path, run: str, *options: str) -> int:
    return main([*TUNED, "--lr", "0.03", "--run", run, "-w", str(home), *options])


def read_validations(run: Path) -> list[dict[str, Any]]:
    lines = metrics_log.read_metrics(run)
    return [dict(line) for line in lines if line["split"] == "validation"]


@pytest.mark.slow
def test_run_scores_and_page_name_the_weights(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracles are the log, and the score of the run's own predictions on the validation
    split.
    """
    monkeypatch.setattr("bitimely_core.workflows.choice.ENOUGH_SUBJECTS", 2)
    for choice in ("last", "best"):
        assert tune(home, choice, "--checkpoint", choice) == 0
        evaluated = ["evaluate", choice, "--split", "validation", "--bootstrap", "20"]
        assert main([*evaluated, "-w", str(home)]) == 0
    runs = {choice: home / "runs" / choice for choice in ("last", "best")}
    lines = read_validations(runs["best"])
    assert [line["loss"] for line in lines] == [
        line["loss"] for line in read_validations(runs["last"])
    ]
    highest, end = max(lines, key=lambda line: line["accuracy"]), lines[-1]
    for choice, line in (("best", highest), ("last", end)):
        expected = {
            "choice": choice,
            "step": line["step"],
            "steps": end["step"],
            "loss": line["loss"],
            "rel": line["rel"],
        }
        if choice == "best":
            expected |= {"metric": "accuracy", "score": line["accuracy"]}
        record, scores = (
            json.loads((runs[choice] / name).read_bytes()) for name in ("run.json", "scores.json")
        )
        assert record["settings"]["train"]["checkpoint"] == choice
        assert record["checkpoint"] == scores["settings"]["checkpoint"] == expected
        rows = read_result_table(runs[choice] / "predictions.parquet")
        measured = accuracy_score(rows["target"].to_numpy(), rows["prediction"].to_numpy())
        assert measured == pytest.approx(line["accuracy"])
        page = (runs[choice] / "report.html").read_text()
        words = f"step {highest['step']} of {end['step']}"
        assert (f"last, step {end['step']}" if choice == "last" else words) in page
    capsys.readouterr()
    assert tune(home, "best", "--checkpoint", "last") == int(Exit.USAGE)
    assert "settings.train.checkpoint" in capsys.readouterr().err


def test_few_validation_people_do_not_choose(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(home, "few", "--checkpoint", "best") == 0
    record = json.loads((home / "runs" / "few" / "run.json").read_bytes())
    assert record["settings"]["train"]["checkpoint"] == record["checkpoint"]["choice"] == "last"
    (notice,) = (line for line in record["notices"] if "last step" in line)
    assert "2 validation subjects are too few" in notice
    assert notice in capsys.readouterr().err
    assert notice in (home / "runs" / "few" / "report.html").read_text()


# ---- a criterion other than the loss, patience, moving average


def near_four(model: nn.Module) -> float:
    """Highest on the way, where neither the loss of validation nor that of training is lowest."""
    assert isinstance(model, Point)
    return -abs(model.weight.item() - 4.0)


FOUR = Criterion("near_four", near_four)


def train_by_four(folder: Path | None, *, kill_at: int = 0, **changes: Any) -> Any:
    return train(folder, "best", kill_at=kill_at, criterion=FOUR, **changes)


def test_the_criterion_chooses_in_the_place_of_the_loss(tmp_path: Path) -> None:
    model, path, result = train_by_four(tmp_path / "whole")
    closest = max(path, key=lambda step: -abs(path[step][1] - 4.0))
    assert closest != min(path, key=lambda step: path[step][0])
    assert result["best"] is not None
    assert (result["best"]["step"], result["best"]["score"]) == (closest, near_four(model))
    assert model.weight.item() == path[closest][1]
    for kill_at in range(1, EPOCHS * (PER_EPOCH + 1), 5):
        folder = tmp_path / str(kill_at)
        with pytest.raises(Killed):
            train_by_four(folder, kill_at=kill_at)
        train_by_four(folder)
        assert stored(folder) == stored(tmp_path / "whole")


def test_an_undefined_score_is_never_the_best() -> None:
    criterion = Criterion("odd", lambda model: None if model.weight.item() > 3 else 1.0)
    _, path, result = train(None, "best", criterion=criterion)
    assert result["best"] is not None
    assert result["best"]["step"] == min(path)


def test_patience_ends_the_training(tmp_path: Path) -> None:
    """So many epochs after the lowest loss; a killed run ends there, too."""
    _, whole, _ = train(None, "best")
    lowest = min(whole, key=lambda step: whole[step][0])
    assert lowest + PER_EPOCH < max(whole)
    model, path, result = train(tmp_path / "whole", "best", patience=1)
    assert result["steps"] == max(path) == lowest + PER_EPOCH
    assert model.weight.item() == whole[lowest][1]
    _, _, again = train(tmp_path / "whole", "best", patience=1)
    assert (again["resumed"], again["steps"]) == (result["steps"], result["steps"])
    with pytest.raises(Killed):
        train(tmp_path / "killed", "best", patience=1, kill_at=PER_EPOCH + 3)
    train(tmp_path / "killed", "best", patience=1)
    assert stored(tmp_path / "killed") == stored(tmp_path / "whole")


def test_the_average_of_the_weights_against_its_definition(tmp_path: Path) -> None:
    weights: list[float] = []

    def approach_noted(model: nn.Module, batch: Batch, generator: Any = None) -> Outcome:
        if model.training:
            weights.append(model.weight.item())
        return approach(model, batch)

    model, _, _ = train(tmp_path / "whole", "last", ema=0.8, objective=approach_noted)
    last = load_file(tmp_path / "whole" / "checkpoints" / "step-30" / "model.safetensors")
    after = [*weights[1:], float(last["weight"])]  # of each step
    average = 0.0
    for step, weight in enumerate(after, 1):
        decay = min(0.8, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * weight
    assert model.weight.item() == pytest.approx(average, rel=1e-5)
    assert abs(average - after[-1]) > 1e-4
    with pytest.raises(Killed):
        train(tmp_path / "killed", "last", ema=0.8, kill_at=17)
    train(tmp_path / "killed", "last", ema=0.8)
    assert stored(tmp_path / "killed") == stored(tmp_path / "whole")
    path = train(None, "best", ema=0.8)[1]
    assert min(path.values())[0] != min(train(None, "best")[1].values())[0], "it is validated"
