"""Events as rows and as a grid of months, and what all models of irregular times owe their
users.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_sequences import CODES, LABELS, cohort

from bitimely_core import heads, models, objectives, registry, workflows
from bitimely_core.config import ModelConfig, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.models.adapters import RowTokenizer, make_grid
from bitimely_core.models.tokenizers import FIRST, UNK
from bitimely_core.progress import show_lines
from bitimely_core.types import Batch
from bitimely_core.zoo.supervised import encode_times

torch.set_num_threads(1)

NAMES = ["gru-d", "mtand", "mtand-enc", "raindrop", "seft"]
SUPERVISED = [name for name in NAMES if name != "mtand"]


def tiny(name, **options):
    torch.manual_seed(0)
    return models.build(name, **{"preset": "tiny", "channels": 3, "length": 50, **options}).eval()


def eventful(name, **options):
    return tiny(name, tokenizer="codes", codes=12, **options).double()


def histories(lengths=(9, 6, 3), seed=0):
    """Padded event histories, several codes in some months; nothing usable behind the end."""
    draw = torch.Generator().manual_seed(seed)
    most = max(lengths)
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    times = (torch.rand(len(lengths), most, generator=draw, dtype=torch.float64) * 2).cumsum(1)
    codes = torch.randint(FIRST, 12, mask.shape, generator=draw)
    return Batch(torch.where(mask, codes, 11), torch.where(mask, times, torch.nan), mask)


# -------------------------------------------------------------------------------------------------------------- rows and grid


def test_codes_of_one_month_share_a_row():
    """Days within a month, a code twice in it, an unknown code alone in its month, padding."""
    codes = torch.tensor([[5, 7, 5, 6, UNK, 5], [8, 5, 0, 0, 0, 0]])
    times = torch.tensor([[0.0, 0.2, 0.9, 3.1, 4.0, 7.9], [0.0, 1.0, 9.0, 9.0, 9.0, 9.0]])
    batch = Batch(codes, times, torch.tensor([[True] * 6, [True, True] + [False] * 4]))
    config = ModelConfig(tokenizer="codes", codes=9, index_day=False, exact_times=False)
    rows = RowTokenizer(config).rows(batch)
    assert rows.values.tolist() == [
        [[2, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]],
        [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert rows.times.tolist() == [[0, 3, 7], [0, 1, 1]]
    assert rows.real.tolist() == [[True] * 3, [True, True, False]]
    assert torch.equal(rows.mask, rows.values > 0)
    absent = RowTokenizer(config, absent=True).rows(batch)
    assert torch.equal(absent.mask, rows.real[..., None].expand(2, 3, 4))
    assert torch.equal(absent.values, rows.values)


def test_days_are_rows_and_the_index_day_is_one_without_observations():
    """The clock of 20 months ends with the index day (30), else with the last event (7.5); codes of
    one day share a row.
    """
    codes = torch.tensor([[5, 7, 5, 6], [8, 5, 0, 0]])
    times = torch.tensor([[0.0, 0.25, 0.25, 3.5], [0.0, 7.5, 9.0, 9.0]])
    batch = Batch(
        codes,
        times,
        torch.tensor([[True] * 4, [True, True, False, False]]),
        end=torch.tensor([30.0, 7.5]),
    )
    rows = RowTokenizer(ModelConfig(tokenizer="codes", codes=9, horizon=20), absent=True).rows(
        batch
    )
    assert rows.values[0].tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert rows.times.tolist() == [[-10.0, -9.75, -6.5, 20.0], [12.5, 20.0, 20.0, 20.0]]
    assert rows.real.tolist() == [[True] * 4, [True, True, True, False]]
    assert rows.mask.all(-1).tolist() == [[True, True, True, False], [True, True, False, False]]
    assert rows.mask.any(-1).tolist() == rows.mask.all(-1).tolist()


def test_signals_as_rows_keep_their_timesteps():
    x = torch.randn(2, 6, 3)
    mask = torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[:, -1] = torch.tensor([[True], [False]])
    rows = RowTokenizer(ModelConfig(channels=3, tokenizer="steps")).rows(
        Batch(torch.where(mask, x, torch.nan), mask=mask)
    )
    assert torch.equal(rows.values, torch.where(mask, x, 0.0))
    assert torch.equal(rows.mask, mask)
    assert rows.times[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.real[0].all()
    assert rows.real[1].sum() == 1 + int(mask[1].any(1).nonzero().max())
    at = torch.tensor([[0.0, 0.5, 2.0, 2.5, 7.0, 9.0]]).expand(2, -1)
    assert torch.equal(
        RowTokenizer(ModelConfig(channels=3, tokenizer="steps")).rows(Batch(x, times=at)).times, at
    )


def test_the_grid_has_a_row_for_each_month_up_to_the_end():
    codes = torch.tensor([[5, 7, 5, 6], [8, UNK, 0, 0], [5, 6, 7, 8]])
    times = torch.tensor([[0.0, 0.2, 0.9, 2.1], [0.0, 1.0, 0.0, 0.0], [0.0, 5.5, 8.0, 9.9]])
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4])
    found = make_grid(
        Batch(codes, times, mask, end=torch.tensor([3.5, 1.0, 9.9]), index=torch.arange(3)), 9, 5
    )
    wanted = torch.zeros(3, 5, 4)
    wanted[0, 0, [0, 2]] = 1  # two codes of one month; the second occurrence of 5 adds nothing
    wanted[0, 2, 1] = 1
    wanted[1, 0, 3] = 1  # the unknown code has no channel
    wanted[2, 0, 1] = wanted[2, 3, 2] = wanted[2, 4, 3] = 1  # months 5 to 9 of 0 to 9
    assert torch.equal(found.values, wanted)
    assert found.mask.tolist() == [
        [True] * 4 + [False],
        [True, True, False, False, False],
        [True] * 5,
    ]
    assert found.times is None
    assert found.index.tolist() == [0, 1, 2]
    without = make_grid(Batch(codes, times, torch.zeros_like(mask)), 9, 5)
    assert not without.mask.any()
    assert not without.values.any()


def test_padding_is_not_on_the_grid():
    batch = histories()
    found, alone = (
        make_grid(batch, 12, 24),
        make_grid(Batch(batch.values[1:2, :6], batch.times[1:2, :6]), 12, 24),
    )
    assert torch.equal(found.values[1:2], alone.values)
    assert torch.equal(found.mask[1:2], alone.mask)


@pytest.mark.parametrize("objective", ["masked", "next-previous-strict"])
@pytest.mark.parametrize("name", ["bitimelygpt", "timelybert"])
def test_a_model_of_signals_reads_events_on_the_grid(name, objective):
    """The same states, losses and vectors as of the grid given as a signal."""
    model = tiny(name, codes=12, events="grid", horizon=24).double()
    assert (model.config.channels, model.config.length, model.config.tokenizer) == (7, 24, "conv")
    batch = histories()
    plain = make_grid(batch, 12, 24)
    signals = tiny(name, channels=7, length=24, tokenizer="conv").double()
    signals.load_state_dict(model.state_dict())
    assert torch.equal(model(batch).hidden[-1], signals(plain).hidden[-1])
    assert torch.equal(
        heads.compute_vectors(model, batch, "sos"), heads.compute_vectors(signals, plain, "sos")
    )
    losses = [
        objectives.get(objective)(one, of, torch.Generator().manual_seed(0))
        for one, of in ((model, batch), (signals, plain))
    ]
    assert torch.equal(losses[0]["loss"], losses[1]["loss"])
    assert losses[0]["rel"] == losses[1]["rel"]
    assert model.measure([batch]) == signals.measure([plain])


def test_channels_one_by_one_are_codes_on_the_grid():
    model = tiny(
        "bitimelygpt", codes=12, events="grid", horizon=24, channel_independent=True
    ).double()
    batch = histories()
    assert model(batch).hidden[-1].shape[0] == 3 * 7
    assert heads.compute_vectors(model, batch, "sos").shape == (3, 64)


def test_the_grid_is_part_of_the_saved_model(tmp_path):
    model = tiny("bitimelygpt", codes=12, events="grid", horizon=24).double()
    model.save(tmp_path / "model")
    loaded = models.load(tmp_path / "model").double()
    assert torch.equal(model(histories()).hidden[-1], loaded(histories()).hidden[-1])
    assert loaded.config == model.config
    assert loaded.reset_adapter(channels=7, length=24, codes=12) == []
    assert loaded.reset_adapter(channels=9, length=24, codes=14)
    assert loaded(histories()).tokens.shape[-1] == 9


def test_the_waves_of_the_clock():
    """[sin(t / s_j), cos(t / s_j)], from one unit to the full span."""
    found = encode_times(torch.tensor([[0.0, 3.0]], dtype=torch.float64), 100.0, 6)
    for at, time in enumerate((0.0, 3.0)):
        angles = torch.tensor([time, time / 10, time / 100], dtype=torch.float64)
        torch.testing.assert_close(found[0, at], torch.cat((angles.sin(), angles.cos())))
    assert encode_times(torch.ones(1, 1), 100.0, 2).tolist() == [
        [[pytest.approx(0.841471), pytest.approx(0.540302)]]
    ]


# -------------------------------------------------------------------------------------------------------------- every model of irregular times


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_company_change_nothing(name):
    model, batch = eventful(name), histories()
    together = heads.compute_vectors(model, batch, "native")
    assert together.shape == (3, model.pooled_width)
    for row, length in enumerate((9, 6, 3)):
        alone = heads.compute_vectors(
            model,
            Batch(batch.values[row : row + 1, :length], batch.times[row : row + 1, :length]),
            "native",
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_values_that_were_not_observed_are_never_read(name):
    model = tiny(name).double()
    x = torch.randn(3, 50, 3, dtype=torch.float64)
    mask = torch.rand(3, 50, 3, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[1, 30:] = False
    shown = torch.where(mask, x, torch.nan).requires_grad_()
    together = heads.compute_vectors(model, Batch(shown, mask=mask), "native")
    assert torch.isfinite(together).all()
    (slope,) = torch.autograd.grad(together.square().sum(), shown)
    assert (slope[~mask] == 0).all()
    assert (slope[mask] != 0).any()
    alone = heads.compute_vectors(model, Batch(x[1:2, :30], mask=mask[1:2, :30]), "native")
    torch.testing.assert_close(together[1:2], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_anything_is_finite(name):
    model, batch = eventful(name), histories()
    batch = batch._replace(mask=batch.mask & torch.tensor([[True], [False], [True]]))
    model.train()
    found = heads.compute_vectors(model, batch, "native")
    found.square().sum().backward()
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    signals = tiny(name)
    mask = torch.ones(2, 50, 3, dtype=torch.bool)
    mask[1] = False
    assert torch.isfinite(
        heads.compute_vectors(signals, Batch(torch.randn(2, 50, 3), mask=mask), "native")
    ).all()


@pytest.mark.parametrize("name", NAMES)
def test_when_things_happened_matters_and_where_the_clock_began_does_not(name):
    model, batch = eventful(name), histories()
    for weight in model.parameters():  # queries and decays that start at nothing must count
        torch.nn.init.normal_(weight, std=0.3)
    before = heads.compute_vectors(model, batch, "native")
    later = heads.compute_vectors(model, batch._replace(times=batch.times * 7), "native")
    assert (before - later).abs().amax(1).min() > 1e-6
    far = heads.compute_vectors(model, batch._replace(times=batch.times + 10_000), "native")
    assert torch.isfinite(far).all()


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_one_day_have_no_order(name):
    model = eventful(name)
    times = torch.tensor([[0.0, 2.0, 2.0, 5.0]], dtype=torch.float64)
    a, b = (
        heads.compute_vectors(model, Batch(torch.tensor([ids]), times), "native")
        for ids in ([5, 6, 7, 8], [5, 7, 6, 8])
    )
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("readout", ["mean", "last", "max", "native"])
@pytest.mark.parametrize("name", NAMES)
def test_every_readout_has_its_width(name, readout):
    head = heads.build(eventful(name), task="multilabel", outputs=3, readout=readout).double()
    assert head(histories()).shape == (3, 3)


@pytest.mark.parametrize("name", NAMES)
def test_saved_with_events_it_gives_the_same_vectors(name, tmp_path):
    model = eventful(name, horizon=60)
    model.save(tmp_path / "model")
    loaded = models.load(tmp_path / "model").double()
    assert torch.equal(
        heads.compute_vectors(model, histories(), "native"),
        heads.compute_vectors(loaded, histories(), "native"),
    )


@pytest.mark.parametrize("name", NAMES)
def test_another_length_or_other_channels(name, tmp_path):
    """Another length keeps all weights and moves the clock; other channels renew what depends on
    them. Both can be saved and loaded.
    """
    model = tiny(name).double()
    assert model.reset_adapter(channels=3, length=80) == []
    x = torch.randn(2, 80, 3, dtype=torch.float64)
    torch.testing.assert_close(
        heads.compute_vectors(model, Batch(x), "native"),
        heads.compute_vectors(_copied(model, tmp_path), Batch(x), "native"),
    )
    fresh = model.reset_adapter(channels=4, length=80)
    wholly = (
        {key for key, _ in model.named_parameters()}
        if name == "raindrop"
        else {f"adapter.{k}" for k, _ in model.adapter.named_parameters()}
    )
    assert set(fresh) == wholly
    x = torch.randn(2, 80, 4, dtype=torch.float64)
    torch.testing.assert_close(
        heads.compute_vectors(model, Batch(x), "native"),
        heads.compute_vectors(_copied(model, tmp_path), Batch(x), "native"),
    )
    events = eventful(name, channels=1)
    assert events.reset_adapter(channels=1, length=254, codes=12) == []
    assert events.reset_adapter(channels=1, length=254, codes=12, renew=True)
    assert events.reset_adapter(channels=1, length=254, codes=10)
    assert (
        heads.compute_vectors(
            events,
            Batch(torch.tensor([[5, 9]]), torch.tensor([[0.0, 1.0]], dtype=torch.float64)),
            "native",
        ).shape[0]
        == 1
    )


def _copied(model, folder):
    model.save(folder / "again")
    return models.load(folder / "again").double()


@pytest.mark.parametrize("name", SUPERVISED)
def test_no_objective_is_invented(name):
    assert registry.models[name].facts.objective == "none"
    for objective in ("masked", "next", "next-previous", "gap", "vae"):
        with pytest.raises(UserError) as caught:
            objectives.get(objective)(tiny(name), Batch(torch.randn(2, 50, 3)), torch.Generator())
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("preset", ["tiny", "3m", "7.5m", "18m"])
@pytest.mark.parametrize("name", NAMES)
def test_matched_comes_within_five_percent(name, preset):
    data = models.default_shape(preset)
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data))
    config = build_model_config(name, preset, **data).model_copy(
        update=models.match_parameters(name, preset, **data)
    )
    assert models.count_configured(config) == pytest.approx(goal, rel=0.05)


# 47 codes
COUNTS = {
    "gru-d": 110_254,
    "mtand": 1_160_725,
    "mtand-enc": 452_352,
    "raindrop": 670_752,
    "seft": 35_168,
}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_the_preset_of_events(name):
    config = build_model_config(name, "3m", **models.default_shape("3m"))
    assert models.count_configured(config) == COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gru-d", "seft", "raindrop", "mtand-enc"])
def test_they_learn_from_gaps_what_a_label_says(name):
    """The label is whether the second code came within a month of the first: nothing but the times
    tells.
    """
    draw = torch.Generator().manual_seed(0)
    late = torch.rand(64, generator=draw) > 0.5
    times = torch.stack(
        (torch.zeros(64), torch.where(late, 90.0, 1.5), torch.full((64,), 120.0)), 1
    )
    batch = Batch(
        torch.tensor([[5, 6, 7]]).expand(64, -1),
        times,
        torch.ones(64, 3, dtype=torch.bool),
        target=late[:, None].float(),
    )
    torch.manual_seed(0)
    small = {"reference": 16} if name.startswith("mtand") else {}
    model = models.build(
        name, preset="tiny", tokenizer="codes", codes=9, dropout=0.0, horizon=120, **small
    )
    head = heads.build(model, task="multilabel", outputs=1)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        heads.losses["multilabel"](head, batch)["loss"].backward()
        optimizer.step()
    assert ((head.eval().predict(batch)[:, 0] > 0.5) == late).float().mean() > 0.95


# -------------------------------------------------------------------------------------------------------------- the full workflow


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gru-d", "seft"])
def test_a_model_without_pre_training_is_fine_tuned_from_its_initial_weights(
    name: str, tmp_path: Path
) -> None:
    cohort(tmp_path / "tokens" / "pophr", n=100)
    messages: list[str] = []
    flags = {"model": {"name": name}, "data": {"names": ("pophr",)}}
    planned = workflows.pretrain(preset="tiny", flags=flags, workspace=tmp_path, dry_run=True)
    assert planned["steps"] == 0
    with show_lines(messages.append):
        run = workflows.pretrain(preset="tiny", flags=flags, workspace=tmp_path)
    assert run["run"] == f"tiny-{name}"
    assert run["steps"] == 0
    assert any("Without pre-training" in line for line in messages)
    small = {"train": {"steps": 20, "batch_size": 32, "lr": 3e-3}, "data": {"fraction": 1.0}}
    fine = workflows.finetune(run["run"], data="pophr", flags=small, workspace=tmp_path)
    stored = json.loads((tmp_path / "runs" / fine["run"] / "run.json").read_bytes())
    assert stored["source"] == {"run": run["run"], "weights": None}
    assert (stored["pretraining_data"], stored["pretraining_steps"], stored["leak_free"]) == (
        [],
        0,
        None,
    )
    assert any("Without pre-training" in line for line in stored["notices"])
    scores = workflows.evaluate(fine["run"], workspace=tmp_path, bootstrap=20)
    assert set(scores["by_class"]) == set(LABELS)


def test_objectives_and_models_without_one_do_not_mix(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr")
    for model, objective, hint in (
        ("gru-d", "masked", "no pre-training"),
        ("bitimelygpt", "none", "expected an objective that pre-trains"),
    ):
        flags = {
            "model": {"name": model},
            "objective": {"name": objective},
            "data": {"names": ("pophr",)},
        }
        with pytest.raises(UserError, match=hint) as caught:
            workflows.pretrain(preset="tiny", flags=flags, workspace=tmp_path)
        assert caught.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_model_of_signals_is_trained_on_events(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr", n=100)
    small = {"steps": 3, "batch_size": 16}
    flags = {
        "model": {"name": "gpt", "events": "grid", "horizon": 48},
        "data": {"names": ("pophr",)},
        "train": small,
    }
    run = workflows.pretrain(preset="tiny", budget="matched", flags=flags, workspace=tmp_path)
    model = json.loads((tmp_path / "runs" / run["run"] / "run.json").read_bytes())["settings"][
        "model"
    ]
    assert (model["channels"], model["length"], model["codes"], model["tokenizer"]) == (
        CODES,
        48,
        5 + CODES,
        "conv",
    )
    fine = workflows.finetune(run["run"], data="pophr", flags={"train": small}, workspace=tmp_path)
    assert set(
        workflows.evaluate(fine["run"], workspace=tmp_path, bootstrap=20)["by_class"]
    ) == set(LABELS)
