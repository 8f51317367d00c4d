"""Estimates: memory and time of a training by `estimate`, and what a dry run states of the stages
of a recipe.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import Rows, Tiny, same, squares, weights

from bitimely_core import models, pipeline, registry
from bitimely_core.config import ModelConfig
from bitimely_core.pipeline import costs
from bitimely_core.pipeline.plan import plan_experiment
from bitimely_core.tokens.kind import estimate_windows
from bitimely_core.train.step_cost import estimate
from bitimely_core.types import Batch


@pytest.mark.usefixtures("one_thread")
def test_estimate_counts_and_changes_nothing() -> None:
    model, batches = Tiny().eval(), Rows(size=8)
    before, state = weights(model), torch.get_rng_state()
    facts = estimate(model, batches, 100, objective=squares, accumulate=2, device_name="cpu")
    assert facts["parameters"] == facts["trainable"] == (2 * 6 + 6) + (6 * 2 + 2) + 12 + 12
    assert facts["memory_bytes"]["moments"] == 8 * facts["parameters"]
    assert facts["memory_bytes"]["total"] == sum(
        value for key, value in facts["memory_bytes"].items() if key != "total"
    )
    # at least one hidden layer of four rows
    assert facts["memory_bytes"]["activations"] >= 4 * 5 * 6 * 4
    assert facts["seconds"] == pytest.approx(100 * facts["seconds_per_step"])
    assert facts["seconds"] > 0
    assert same(weights(model), before)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert estimate(model, next(batches(0)), 1, precision="bf16", device_name="cpu")["steps"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_estimates_leave_out_what_other_programs_take_of_the_cpu() -> None:
    """A thread that sleeps waits as one that is displaced: neither is time of the step."""

    def delayed(*args: Any, **options: Any) -> dict[str, Any]:
        time.sleep(0.05)
        return squares(*args, **options)

    batch = next(iter(Rows(size=8)(0)))
    assert (
        estimate(Tiny(), batch, 1, objective=delayed, device_name="cpu")["seconds_per_step"] < 0.025
    )


def test_estimates_count_learning_rates_that_set_gives(tmp_path: Path) -> None:
    """As many as there are, and not as many as the text has characters."""
    flops = [
        pipeline.run(
            "smoke",
            workspace=tmp_path,
            dry_run=True,
            on="h200",
            assignments=[f"tune.rates={rates}"],
        )["total"]["flops"]
        for rates in ("1e-4,1e-3", "2", "3")
    ]
    assert flops[0] == flops[1] < flops[2]


def test_estimates_are_of_the_width_that_a_matched_budget_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted and timed is the model that `pretrain` builds."""
    path = tmp_path / "matched.toml"
    path.write_text(
        '[ingest]\ndatasets = ["synthetic"]\n[pretrain]\npreset = "tiny"\nbudget = "matched"\ndata = "synthetic"\nsteps = 2\n'
        '[matrix]\nmodel = ["s4", "lstm"]\n'
    )
    plan = plan_experiment(pipeline.load(str(path)), "matched", tmp_path, assignments=[])
    timed: list[ModelConfig] = []
    monkeypatch.setattr(costs, "_time_window", lambda config, *_: timed.append(config))
    for label, training in plan.trainings.items():
        name = training.flags["model"]["name"]
        cost = costs.estimate_training(plan, label, tmp_path, timed=True)
        shape = {"channels": timed[-1].channels, "length": timed[-1].length}
        widths = models.match_parameters(name, "tiny", **shape, tokenizer=timed[-1].tokenizer)
        built = models.build(name, preset="tiny", **shape, **widths)
        assert cost.parameters == models.count_parameters(built)
        assert cost.parameters != models.count_parameters(
            models.build(name, preset="tiny", **shape)
        )
        assert models.count_configured(timed[-1]) == cost.parameters


def test_estimates_of_a_fine_tuning_are_of_its_own_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        costs, "_time_window", lambda config, *_: timed.append((config.channels, config.length))
    )
    plan = plan_experiment(pipeline.load("emg"), "emg", tmp_path, assignments=[])
    for label in ("pretrain emg-gpt-0", "finetune emg-gpt-0-emg"):
        costs.estimate_training(plan, label, tmp_path, timed=True)
    # 10 s of 12 leads at 100 Hz, 1,500 samples of one channel
    assert timed == [(12, 1000), (1, 1500)]


def test_estimates_know_the_length_of_windows_at_another_rate() -> None:
    facts = registry.datasets["synthetic"].facts
    # of 30 s at 100 Hz
    assert [
        estimate_windows(facts, "staging", None, None, rate)["length"] for rate in (None, 20.0)
    ] == [3000, 600]
    assert estimate_windows(facts, "staging", None, 250, 20.0)["length"] == 250


def test_estimates_of_irregular_data_count_what_is_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Batch] = []

    def record_batch(_: object, batch: Batch, *__: object, **___: object) -> dict[str, float]:
        seen.append(batch)
        return {"seconds_per_step": 1.0}

    monkeypatch.setattr("bitimely_core.train.step_cost.estimate", record_batch)
    plan = plan_experiment(pipeline.load("open-p12"), "open-p12", tmp_path, assignments=[])
    for run in ("times-fold-1-seft-0-mortality", "hours-fold-1-bitimelygpt-0-mortality-grid"):
        costs.estimate_training(plan, f"finetune open-p12-{run}", tmp_path, timed=True)
    irregular, grid = seen
    assert irregular.mask is not None
    assert irregular.times is not None
    # sets a and b: 744 of 9504 in the fullest stay of 32
    assert float(irregular.mask.float().mean()) == pytest.approx(0.08, abs=0.005)
    assert grid.mask is grid.times is None
