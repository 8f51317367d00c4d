"""A budget in minutes: the training ends in time, its schedule is complete, and a stopped one goes
on with what is left.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_choice import Killed, Point, approach
from test_train import Rows

from bitimely_core.config import TrainConfig, validate
from bitimely_core.train import budget, checkpoints, loop, micro_batches, step_log, validation
from bitimely_core.train.metrics_log import LogLine

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 0.1  # seconds that a step takes by the made clock


class Clock:
    """In the place of `time`: stands still but for what the steps take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (budget, loop, micro_batches, step_log, validation):
        monkeypatch.setattr(module, "time", made)
    return made


def train(
    clock: Clock | None, folder: Path | None = None, *, kill_at: int = 0, **changes: Any
) -> tuple[loop.FitResult, list[LogLine]]:
    lines: list[LogLine] = []

    def note(line: LogLine) -> None:
        lines.append(line)
        if kill_at and line["step"] == kill_at:
            raise Killed

    def measured(model: Any, batch: Any, generator: Any = None) -> Any:
        if clock is not None:
            clock.now += STEP
        return approach(model, batch)

    values = {"log_every": 1, "device": "cpu", "minutes": 0.5, "lr": 0.2, **changes}
    result = loop.fit(
        Point(),
        Rows(),
        measured,
        config=validate(TrainConfig, values),
        validation=Rows(rows=6),
        folder=folder,
        log=note,
    )
    return result, lines


def test_it_ends_in_time_with_the_schedule_complete(clock: Clock) -> None:
    """Steps of 0.1 s and two for a validation after each epoch of 6 make 225 steps in 30 s."""
    began = clock.now
    result, lines = train(clock)
    assert 28.5 < clock.now - began <= 30
    assert result["steps"] == pytest.approx(30 / (STEP * 8 / 6), rel=0.03)
    rates = [line["lr"] for line in lines if line["split"] == "train"]
    peak = max(range(len(rates)), key=rates.__getitem__)
    assert peak / len(rates) == pytest.approx(0.05, abs=0.01)
    assert rates[peak] == pytest.approx(0.2, rel=0.05)
    assert rates[-1] < 0.001
    assert lines[-1]["split"] == "validation"
    # estimated all the way
    assert [line["of"] for line in lines][20] == pytest.approx(result["steps"], rel=0.1)


def test_a_machine_that_slows_down_ends_in_time_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = clock.now
    steps = 0

    def slow_down(model: Any, batch: Any, generator: Any = None) -> Any:
        nonlocal steps
        steps += 1
        clock.now += STEP if steps < 100 else 5 * STEP
        return approach(model, batch)

    rates: list[float] = []
    loop.fit(
        Point(),
        Rows(),
        slow_down,
        config=validate(TrainConfig, {"device": "cpu", "minutes": 0.5, "log_every": 1}),
        log=lambda line: rates.append(line["lr"]),
    )
    assert 29 < clock.now - began <= 30.5
    assert rates[-1] < 0.01 * max(rates)


def test_a_stopped_training_has_what_is_left(clock: Clock, tmp_path: Path) -> None:
    began = clock.now
    with pytest.raises(Killed):
        train(clock, tmp_path, kill_at=120)
    clock.now += 1000  # the pause does not count
    result, _ = train(clock, tmp_path)
    assert result["resumed"] == 114  # of an epoch of 6
    spent = clock.now - began - 1000
    assert 28.5 < spent <= 30 + 8 * STEP, "and the steps since the checkpoint once more"
    meta = checkpoints.load_latest_checkpoint(tmp_path).meta
    assert (meta.finished, meta.step, meta.total) == (True, result["steps"], result["steps"])
    again, lines = train(clock, tmp_path)
    assert (again["steps"], again["resumed"], lines) == (result["steps"], result["steps"], [])


@pytest.mark.slow
def test_a_real_clock() -> None:
    torch.manual_seed(0)
    began = time.perf_counter()
    result, _ = train(None, minutes=0.02)
    assert result["steps"] > 1
    assert time.perf_counter() - began < 1.2 + 1
