"""Which weights a run has: of the last step, or of the lowest validation loss; through kills,
damage and every verb that uses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import copy_data
from test_train import Outcome, Rows
from torch import nn

from bitimely_cli.main import main
from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.train import loop, metrics_log
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
    folder: Path | None, choice: str, *, kill_at: int = 0, **changes: Any
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
        approach,
        config=validate(TrainConfig, values),
        validation=Rows(rows=6),
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
    last = loop.load_latest_checkpoint(folder)
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


def test_run_scores_and_page_name_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is the log: the step with the lowest validation loss."""
    home = copy_data(tmp_path / "home")
    begun = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "generic/classification",
        "--batch-size",
        "8",
        "--set",
        "model.tokenizer=patch",
    ]
    begun += [
        "--set",
        "model.patch=10",
        "--set",
        "model.layers=2",
        "--run",
        "plain",
        "-w",
        str(home),
        "--checkpoint",
    ]
    assert main([*begun, "best", "--epochs", "2"]) == 0
    tuned = [
        "finetune",
        "plain",
        "--data",
        "generic/classification",
        "--fraction",
        "1",
        "--batch-size",
        "8",
    ]
    tuned += ["--epochs", "6", "--lr", "0.03", "-w", str(home)]
    for choice in ("last", "best"):
        assert main([*tuned, "--checkpoint", choice, "--run", choice]) == 0
        assert main(["evaluate", choice, "--bootstrap", "20", "-w", str(home)]) == 0
    runs = {choice: home / "runs" / choice for choice in ("last", "best")}
    lines = [
        line for line in metrics_log.read_metrics(runs["best"]) if line["split"] == "validation"
    ]
    assert [line["loss"] for line in lines] == [
        line["loss"]
        for line in metrics_log.read_metrics(runs["last"])
        if line["split"] == "validation"
    ]
    lowest, end = min(lines, key=lambda line: line["loss"] or 0.0), lines[-1]
    for choice, line in (("best", lowest), ("last", end)):
        expected = {
            "choice": choice,
            "step": line["step"],
            "steps": end["step"],
            "loss": line["loss"],
            "rel": line["rel"],
        }
        record, scores = (
            json.loads((runs[choice] / name).read_bytes()) for name in ("run.json", "scores.json")
        )
        assert record["settings"]["train"]["checkpoint"] == choice
        assert record["checkpoint"] == scores["settings"]["checkpoint"] == expected
        page = (runs[choice] / "report.html").read_text()
        assert (
            f"last, step {end['step']}"
            if choice == "last"
            else f"step {lowest['step']} of {end['step']}"
        ) in page
    capsys.readouterr()
    assert main([*tuned, "--checkpoint", "last", "--run", "best"]) == int(Exit.USAGE)
    assert "settings.train.checkpoint" in capsys.readouterr().err
    assert main([*begun, "best", "--epochs", "2"]) == 0, "the finished run is left alone"
