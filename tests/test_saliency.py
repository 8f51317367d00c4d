"""Gradients against finite differences and known weights, shares by hand, and the page of runs on
windows with a planted shapelet.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planted import make_run
from scipy import stats
from test_shapelets import Labelled
from torch import Generator, nn

from bitimely_core import data, heads, models, objectives, report
from bitimely_core.config import ObjectiveConfig, Settings
from bitimely_core.errors import UserError
from bitimely_core.insight.regions import (
    find_shapelet_windows,
    mean_over_subjects,
    random_placement,
    rank_agreement,
    share_ratios,
)
from bitimely_core.insight.saliency import saliency
from bitimely_core.insight.saliency_maps import (
    compute_saliency,
    gradient_magnitudes,
    loss_fn,
    randomise_run,
)
from bitimely_core.insight.shapelet_mining import MiningOptions, mine_shapelets
from bitimely_core.insight.shapelets import shapelets
from bitimely_core.page import Figure, Table
from bitimely_core.progress import show_progress
from bitimely_core.types import Batch, Encoded

SMALL = {
    "layers": 2,
    "heads": 2,
    "dim": 8,
    "value_dim": 8,
    "ffn_dim": 8,
    "tokenizer": "patch",
    "patch": 4,
}


def run(
    name="bitimelygpt", windows=None, objective="", label=None, tuned=False, readout=None, **config
):
    torch.manual_seed(3)
    windows = windows or Labelled(subjects=12)
    model = models.build(
        name, channels=windows.channels, length=windows.length, **{**SMALL, **config}
    ).eval()
    head = (
        heads.build(model, task="classification", outputs=2, readout=readout).eval()
        if tuned
        else None
    )
    settings = Settings(objective=ObjectiveConfig(name=objective))
    return make_run(label or name, model, windows, head, settings=settings, leak_free=False)


class Linear(nn.Module):
    """y = sum w x + 1 of one channel: model and head at once."""

    task, adapter = (
        "regression",
        SimpleNamespace(tokenizer=SimpleNamespace(count=lambda length: length)),
    )
    config, penalty = (
        SimpleNamespace(
            tokenizer="steps", stride=None, patch=1, crop="end", cuts_patches=False, map_stride=1
        ),
        None,
    )
    target_mean, target_std, target_scale = torch.zeros(1), torch.ones(1), torch.ones(())

    def __init__(self, length):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, 1))

    def forward(self, batch):
        return Encoded(None, None, None, (batch.values,))


class Sum(nn.Module):
    """The head of `Linear`."""

    task, target_mean, target_std, target_scale = (
        Linear.task,
        Linear.target_mean,
        Linear.target_std,
        Linear.target_scale,
    )

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return (self.model(batch).hidden[-1] * self.model.weight).sum((1, 2))[:, None] + 1


# --- gradients ----------------------------------------------------------------------------------------------------------------------------


def test_saliency_of_a_linear_model_is_its_weights():
    torch.manual_seed(0)
    windows = Labelled(n=12, subjects=3)
    model = Linear(windows.length)
    one = make_run("linear", model, windows, Sum(model))
    rows = np.arange(12)
    seen = compute_saliency(one, model, one.head(), rows, 0, 8, 0, lambda done: None)
    weights = model.weight.detach().abs().double().numpy()[:, 0]
    for maps in (seen.input, seen.layers[0]):
        assert maps == pytest.approx(np.tile(weights / weights.sum(), (12, 1)), rel=1e-5)
    assert seen.masks == 1  # nothing is drawn
    assert seen.losses == {}
    error = float(one.head()(data.collate(windows, [0])).detach()) - windows.labels[0]
    # of a batch of six
    assert seen.heat[0][:, 0] == pytest.approx(2 * abs(error) * weights / 6, rel=1e-4)


@pytest.mark.parametrize("objective", ["next", "next-previous", "next-previous-strict", "masked"])
def test_slopes_are_finite_differences(objective):
    one = run(objective=objective, windows=Labelled(n=4, length=24, subjects=2))
    model = one.model().double()
    batch = data.collate(one.windows())
    batch = batch._replace(values=batch.values.double())
    ask = loss_fn(one, model, None)
    found = gradient_magnitudes(model, ask, batch, Generator().manual_seed(5))
    assert found.drawn == (objective == "masked")
    assert [tuple(s.shape) for s in found.layers] == [(4, 6, 8)] * 2
    eps, fixed = 1e-5, model.targets(batch)
    model.targets = lambda moved: fixed  # they are no function of the model

    def loss(shift=None, at=None):
        """With x, or the states of every pass at layer `at`, moved at one place."""
        x, hook = batch.values.clone(), None
        if at is None and shift is not None:
            x[shift[0]] += shift[1]
        elif shift is not None:

            def moved(module, args, out):
                state = out[0].clone()
                state[shift[0]] += shift[1]
                return state, out[1]

            hook = model.layers[at].register_forward_hook(moved)
        with torch.no_grad():
            value = float(ask(batch._replace(values=x), Generator().manual_seed(5))["loss"])
        if hook is not None:
            hook.remove()
        return value

    rng = np.random.default_rng(0)
    for b, t in zip(rng.integers(0, 4, 6), rng.integers(0, 24, 6), strict=True):
        slope = (loss(((b, t, 0), eps)) - loss(((b, t, 0), -eps))) / (2 * eps)
        assert float(found.input[b, t, 0]) == pytest.approx(abs(slope), abs=1e-8)
    if objective == "next-previous-strict":
        return  # two passes: their sizes are added, not their slopes
    for layer in range(2):
        for b, n, d in zip(
            rng.integers(0, 4, 6), rng.integers(0, 6, 6), rng.integers(0, 8, 6), strict=True
        ):
            slope = (loss(((b, n + 1, d), eps), layer) - loss(((b, n + 1, d), -eps), layer)) / (
                2 * eps
            )
            assert float(found.layers[layer][b, n, d]) == pytest.approx(abs(slope), abs=1e-8)


def test_at_the_last_layer_it_maps_the_loss():
    """A pointwise head: what the loss at other tokens does is not seen. The reason why the page
    warns.
    """
    one = run("timelybert", Labelled(n=4, length=24, subjects=2))
    chosen = {}

    def ask(batch, generator):
        found = loss_fn(one, one.model(), None)(batch, generator)
        chosen["valid"] = found["valid"].any(-1)
        return found

    found = gradient_magnitudes(
        one.model(), ask, data.collate(one.windows()), Generator().manual_seed(0)
    )
    assert ((found.layers[1].sum(-1) > 0) == chosen["valid"]).all()
    assert (found.layers[0].sum(-1) > 0).all()
    assert ((found.losses["masked"] > 0) == chosen["valid"]).all()


def test_errors_stand_at_the_token_that_makes_them():
    """Token n predicts token n + 1 at layer L - 1 and token n - 1 at layer L: there its own state
    is all that its error depends on.
    """
    one = run(objective="next-previous", windows=Labelled(n=1, length=24, subjects=1))
    found = gradient_magnitudes(
        one.model(), loss_fn(one, one.model(), None), data.collate(one.windows()), Generator()
    )
    assert set(found.losses) == {"next", "previous"}
    # [SOS] predicts the first, [EOS] the last
    assert float(found.losses["next"][0, -1]) == float(found.losses["previous"][0, 0]) == 0
    assert float(found.layers[1][0, 0].sum()) == 0
    assert (found.layers[1][0, 1:].sum(-1) > 0).all()
    encoded = one.model()(data.collate(one.windows()))
    # token 3 predicts token 2
    error = (
        (one.model().output(encoded.hidden[1][:, 4], "previous") - encoded.targets[:, 2])
        .square()
        .mean()
    )
    assert float(found.losses["previous"][0, 3]) == pytest.approx(float(error.detach()), rel=1e-5)


def test_two_passes_are_added():
    one = run(objective="next-previous-strict", windows=Labelled(n=2, length=24, subjects=2))
    batch = data.collate(one.windows())
    found = gradient_magnitudes(
        one.model(), loss_fn(one, one.model(), None), batch, Generator().manual_seed(0)
    )
    both = []
    for direction, which in (("forward", "next"), ("backward", "previous")):
        encoded = one.model()(batch, directions=(direction,) * 2)
        from bitimely_core.objectives.token_objectives import _make_part

        part = _make_part(one.model(), batch, encoded, encoded.hidden[-1], which)
        loss = (part.prediction - part.target).square().sum() / part.valid.sum()
        both.append(torch.autograd.grad(loss, encoded.hidden[0])[0].abs()[:, 1:-1])
    assert found.layers[0].numpy() == pytest.approx((both[0] + both[1]).numpy(), rel=1e-4, abs=1e-8)


def test_models_that_read_channels_one_by_one_are_averaged():
    windows = Labelled(n=4, length=48, channels=2, subjects=2)
    one = run("patchtst", windows, patch=8)
    found = gradient_magnitudes(
        one.model(),
        loss_fn(one, one.model(), None),
        data.collate(windows),
        Generator().manual_seed(0),
    )
    assert {tuple(state.shape) for state in found.layers} == {(4, 6, 8)}
    assert found.input.shape == (4, 48, 2)
    assert found.losses["masked"].shape == (4, 6)


def test_a_model_that_drops_patches_is_read_where_it_predicts():
    one = run("crt", Labelled(n=4, length=48, subjects=2), patch=8)
    found = gradient_magnitudes(
        one.model(),
        loss_fn(one, one.model(), None),
        data.collate(one.windows()),
        Generator().manual_seed(0),
    )
    assert [tuple(state.shape) for state in found.layers] == [(4, 12, 8)]
    assert found.drawn
    seen = compute_saliency(one, one.model(), None, np.arange(4), 0, 2, 0, lambda done: None)
    assert seen.layers[0].shape == (4, 48)  # tokens of the spectrum stand for no samples
    assert seen.layers[0].sum(1) == pytest.approx(1)
    assert "output" not in vars(one.model())


@pytest.mark.parametrize("name", ["gpt", "tst", "lstm", "ts2vec", "ts-tcc", "tf-c", "timesnet"])
def test_every_kind_of_model_has_at_least_a_map_of_its_input(name):
    one = run(name, Labelled(n=8, length=64, subjects=2), dim=16, patch=8, tokenizer="conv")
    seen = compute_saliency(one, one.model(), None, np.arange(8), 0, 2, 0, lambda done: None)
    assert seen.input.sum(1) == pytest.approx(1)
    assert all(maps.shape == (8, 64) for maps in seen.layers)


def test_masks_are_averaged_and_the_same_for_all():
    one = run(objective="masked", windows=Labelled(n=4, length=24, subjects=2))
    seen = compute_saliency(one, one.model(), None, np.arange(4), 2, 3, 7, lambda done: None)
    batch, ask = data.collate(one.windows()), loss_fn(one, one.model(), None)
    each = [
        gradient_magnitudes(one.model(), ask, batch, Generator().manual_seed(7 * 1_000_003 + k))
        .input.mean(-1)
        .double()
        .numpy()
        for k in range(3)
    ]
    assert seen.masks == 3
    assert seen.input == pytest.approx(sum(each) / sum(each).sum(1, keepdims=True))
    assert seen.heat[1].shape == (6, 8)


def test_random_weights_are_seeded_and_leave_the_run_alone():
    one = run(tuned=True)
    before, state = (
        {k: v.clone() for k, v in one.head().state_dict().items()},
        torch.get_rng_state(),
    )
    (_, first), (_, second), (_, other) = (randomise_run(one, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(v, before[k]) for k, v in one.head().state_dict().items() if "scale" not in k
    )
    weights = [
        torch.cat([p.flatten() for p in h.parameters()]) for h in (first, second, other, one.head())
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    assert (first.readout, first.outputs, first.task) == (one.head().readout, 2, "classification")


# --- shares -------------------------------------------------------------------------------------------------------------------------------


def test_ratio_by_hand():
    maps = np.array([[0.1, 0.4, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert share_ratios(maps, np.array([1, 0]), np.array([2, 3])) == pytest.approx([0.8 / 0.5, 1.0])


def test_random_places_are_all_places():
    rng = np.random.default_rng(0)
    maps = rng.dirichlet(np.full(50, 0.3), size=6)
    length = np.array([5, 5, 10, 10, 20, 50])
    found = random_placement(maps, length, 4000, 0)
    every = [
        np.mean([share_ratios(one[None], np.array([s]), np.array([m]))[0] for s in range(51 - m)])
        for one, m in zip(maps, length, strict=True)
    ]
    assert found.mean() == pytest.approx(np.mean(every), abs=0.02)
    assert random_placement(np.full((3, 20), 0.05), np.array([4, 5, 6]), 50, 0) == pytest.approx(1)


def test_intervals_are_over_subjects():
    rng = np.random.default_rng(0)
    who = np.array([f"s{k}" for k in np.repeat(np.arange(8), 3)])
    values = 9 + rng.normal(size=24) + np.repeat(rng.normal(size=8), 3)
    found = mean_over_subjects(values, who, 500)
    # on the logarithm
    reach = stats.t.ppf(0.975, 7) * stats.sem(values.reshape(8, 3).mean(1)) / values.mean()
    assert found.value == pytest.approx(values.mean())
    assert (found.lo, found.hi) == pytest.approx(
        (values.mean() * np.exp(-reach), values.mean() * np.exp(reach))
    )
    assert found.n_subjects == 8
    few = mean_over_subjects(values[:9], who[:9], 500)
    assert few.value == pytest.approx(values[:9].mean())
    assert few.lo is None
    assert few.undefined_reason == "no CI: 3 subjects, at least 5 required"
    assert mean_over_subjects(np.full(3, np.nan), who[:3], 500).value is None


def test_agreement_is_of_ranks():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, size=(2, 5, 40)).astype(float)
    assert rank_agreement(a, b) == pytest.approx(
        np.mean([stats.spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)])
    )
    assert rank_agreement(a, np.exp(a)) == pytest.approx(1)
    assert rank_agreement(np.ones((2, 4)), a[:2, :4]) is None


# --- windows ------------------------------------------------------------------------------------------------------------------------------


def test_windows_are_those_that_hold_the_shapelet():
    windows = Labelled(n=240, subjects=12)
    mined = mine_shapelets(
        windows, MiningOptions(lengths=(1.0,), candidates=300, permutations=0, count=1)
    )
    chosen = find_shapelet_windows(windows, mined.shapelets, 8, 0, mined.drawn.rows)
    assert chosen.split == "test"
    assert len(chosen.rows) == chosen.looked // 10
    assert (windows.labels[chosen.rows] == 1).all()
    assert set(windows.of_split[chosen.rows]) == {"test"}
    assert (chosen.subjects == windows.who[chosen.rows]).all()
    shift = mined.shapelets[0].start - windows.at[mined.shapelets[0].window]
    assert np.abs(chosen.start - windows.at[chosen.rows] - shift).max() <= 2
    assert chosen.distance == pytest.approx(np.sort(chosen.distance), abs=2)
    every = find_shapelet_windows(windows, mined.shapelets, 8, 0, windows["test"].rows[:-3])
    assert every.looked == 3


class Filter(Linear):
    """Says how well the planted wave fits where it fits best, and reads nothing else."""

    def forward(self, batch):
        wave = torch.from_numpy(Labelled.wave)
        fit = batch.values[:, :, 0].unfold(1, len(wave), 1) @ wave
        return Encoded(None, None, None, (fit.amax(1)[:, None, None],))


class Best(Sum):
    """The head of `Filter`."""

    def forward(self, batch):
        return self.model(batch).hidden[-1][:, 0]


def test_a_model_that_reads_the_shapelet_alone_has_its_saliency_there():
    windows = Labelled(n=240, subjects=12)
    mined = mine_shapelets(
        windows, MiningOptions(lengths=(1.0,), candidates=300, permutations=0, count=1)
    )
    chosen = find_shapelet_windows(windows, mined.shapelets, 8, 0, mined.drawn.rows)
    model = Filter(windows.length)
    seen = compute_saliency(
        make_run("filter", model, windows, Best(model)),
        model,
        Best(model),
        chosen.rows,
        0,
        1,
        0,
        lambda done: None,
    )
    assert seen.layers == []  # its state is one of the window, not of a token
    sizes = np.abs(Labelled.wave) / np.abs(Labelled.wave).sum()
    shift = chosen.start - windows.at[chosen.rows]
    inside = [sizes[max(0, k) : 20 + min(0, k)].sum() for k in shift]
    assert share_ratios(seen.input, chosen.start, chosen.length) == pytest.approx(
        np.array(inside) * 100 / 20, rel=1e-4
    )
    assert np.mean(inside) > 0.7
    assert (
        np.quantile(random_placement(seen.input, chosen.length, 300, 0), 0.95)
        < share_ratios(seen.input, chosen.start, chosen.length).mean()
    )


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_compares_runs_on_the_same_windows(tmp_path):
    events = []
    windows = Labelled(n=180, subjects=12)
    windows.of_split = np.where(np.isin(windows.who, [f"s{k}" for k in range(6)]), "test", "train")
    runs = [
        run(windows=windows),
        run("timelybert", windows),
        run(windows=windows, tuned=True, label="tuned"),
    ]
    options = {"sequences": 12, "lengths": "1", "masks": 2, "bootstrap": 50}
    with show_progress(lambda *event: events.append(event)):
        page = saliency(runs, **options)
    assert page.summary == saliency(runs, **options).summary
    assert events[-1] == ("saliency tuned with random weights 5", events[-1][2], events[-1][2])
    about = page.summary["options"]
    assert about["subjects"] >= 5
    for name in ("bitimelygpt", "timelybert", "tuned"):
        cell = page.summary[name]
        for wrt in ("embeddings", "input"):
            assert (
                cell[wrt]["ratio"]["lo"] <= cell[wrt]["ratio"]["value"] <= cell[wrt]["ratio"]["hi"]
            )
            assert 0 < cell[wrt]["p_places"] <= 1
            assert cell[wrt]["random_places"]["lo"] < cell[wrt]["random_places"]["hi"]
    assert (page.summary["bitimelygpt"]["layer"], page.summary["bitimelygpt"]["masks"]) == (2, 1)
    assert page.summary["timelybert"]["masks"] == 2
    # [SOS] of layer 2 is read: its tokens have no gradient
    assert page.summary["tuned"]["layer"] == 1
    assert page.summary["tuned"]["by_layer"]["2"]["trained"]["value"] is None
    figures = {block.name: block for block in page.blocks if isinstance(block, Figure)}
    names = {
        "main-score",
        "windows",
        "layers",
        "case",
        "heat-bitimelygpt",
        "heat-timelybert",
        "heat-tuned",
        "kinds",
    }
    assert set(figures) == names
    assert (
        figures["main-score"].data.values[0]
        == page.summary["bitimelygpt"]["embeddings"]["ratio"]["value"]
    )
    assert figures["main-score"].data.names == [
        *("bitimelygpt", "timelybert", "tuned"),
        *(f"{name}, random weights" for name in ("bitimelygpt", "timelybert", "tuned")),
        *["size of the signal", "random places"],
    ]
    assert figures["heat-bitimelygpt"].data.values.shape == (2, 8, 25)
    mark, span = figures["heat-bitimelygpt"].data.mark, figures["case"].data.spans[0]
    assert (
        (mark[1] - mark[0]) * 4 / windows.rate
        == pytest.approx(span.stop - span.start)
        == pytest.approx(1.0)
    )
    full, masked, dropped = (s.values for s in figures["kinds"].data.signals)
    assert (masked == 0).sum() >= 0.35 * len(full)
    assert np.isnan(dropped).sum() >= 0.6 * len(full)
    tables = [block for block in page.blocks if isinstance(block, Table)]
    assert [len(t.rows) for t in tables] == [6, 6, 4]
    assert any("No run here is leak-free" in notice for notice in page.notices)
    assert "times the saliency at its output embeddings" in page.verdict
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT


def test_few_subjects_have_no_interval():
    page = saliency([run(windows=Labelled(n=80))], sequences=6, lengths="1", bootstrap=50)
    assert page.summary["bitimelygpt"]["input"]["ratio"]["lo"] is None
    assert any("no CI: " in notice for notice in page.notices)
    assert "no CI" in page.verdict


def test_a_layer_without_gradients_is_reported():
    page = saliency(
        [run(windows=Labelled(n=80), tuned=True)], sequences=4, lengths="1", bootstrap=50, layer=2
    )
    assert (
        page.summary["bitimelygpt"]["embeddings"]["ratio"]["undefined_reason"]
        == "no window has a gradient"
    )
    assert "nothing to compare" in page.verdict
    assert page.summary["bitimelygpt"]["input"]["ratio"]["value"] > 0


@pytest.mark.slow
def test_the_mean_over_time_tells_no_times_apart():
    """A head on it gives all steps of a residual network one gradient, whatever the weights are."""
    one = run("resnet", Labelled(n=80), tuned=True)
    page = saliency([one], sequences=4, lengths="1", bootstrap=50)
    assert page.summary["resnet"]["layer"] is None
    assert page.summary["resnet"]["samples_a_token"] == 8  # three blocks of stride 2
    assert "at its input" in page.verdict
    assert any("the mean of its states over time" in notice for notice in page.notices)
    page = saliency([one], sequences=4, lengths="1", bootstrap=50, layer=1)
    # it covers the window: a share as large as that of the length, wherever the shapelets are
    assert page.summary["resnet"]["embeddings"]["ratio"]["value"] == pytest.approx(1, rel=0.05)


def test_shapelets_of_a_report_are_read(tmp_path):
    windows = Labelled(n=80)
    report.write_report(tmp_path, shapelets(windows, lengths="1", candidates=100, permutations=20))
    page = saliency([run(windows=windows)], shapelets=str(tmp_path), sequences=6, bootstrap=2)
    assert page.facts["Shapelets"] == f"5, from {tmp_path}"
    assert page.summary["options"]["shapelets_p"] is None
    windows.channel_names = ("Fz",)
    with pytest.raises(UserError, match="no shapelet is of a channel"):
        saliency([run(windows=windows)], shapelets=str(tmp_path))


def test_unsupported_options_are_refused():
    with pytest.raises(UserError, match="layer 9"):
        saliency([run()], layer=9)
    other = Labelled()
    other.fingerprint = "b"
    with pytest.raises(UserError, match="different windows"):
        saliency([run(), run(windows=other)])
    codes = make_run(
        "codes", SimpleNamespace(config=SimpleNamespace(tokenizer="codes", layers=2)), Labelled()
    )
    with pytest.raises(UserError, match="reads events"):
        saliency([codes])
    without = Labelled()
    without.task = "none"
    with pytest.raises(UserError, match="--shapelets a report"):
        saliency([run(windows=without)])


def test_hooks_are_gone_after_an_error():
    one = run()
    batch = data.collate(one.windows())

    def fails(batch, generator):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        gradient_magnitudes(one.model(), fails, Batch(batch.values), Generator())
    assert not one.model()._forward_hooks
    assert "output" not in vars(one.model())
    assert objectives.get("next")(one.model(), batch)["loss"] > 0


@pytest.mark.slow
def test_fine_tuning_moves_saliency_to_the_planted_wave():
    """The planted cohort: beyond every draw of random weights, with an interval; random weights
    themselves are not beyond one another.
    """
    windows = Labelled(n=360, subjects=12)
    windows.of_split = np.where(np.isin(windows.who, [f"s{k}" for k in range(6)]), "test", "train")
    one = run(
        windows=windows, tuned=True, readout="max", label="tuned", dim=16, value_dim=16, ffn_dim=16
    )
    model, head = randomise_run(one, 7)
    before = make_run("before", model, windows, head, settings=one.record.settings)
    optimiser = torch.optim.Adam(one.head().parameters(), lr=5e-3)
    rng = np.random.default_rng(0)
    for _ in range(120):
        batch = data.collate(windows, rng.choice(windows["train"].rows, 48, replace=False))
        optimiser.zero_grad()
        heads.losses["classification"](one.head(), batch, None)["loss"].backward()
        optimiser.step()
    page = saliency([one, before], sequences=18, lengths="1", bootstrap=200)
    tuned, random = page.summary["tuned"]["input"], page.summary["before"]["input"]
    assert tuned["ratio"]["lo"] > 1
    assert tuned["beyond_random_weights"]["lo"] > 0
    assert tuned["ratio"]["value"] > max(tuned["random_draws"])
    assert len(tuned["random_draws"]) == 5
    assert tuned["p_places"] < 0.01
    assert (
        random["ratio"]["value"] <= max(random["random_draws"])
        or random["beyond_random_weights"]["lo"] <= 0
    )
    assert "Holm-corrected over 6 tests" in page.verdict
    rows = {
        tuple(row[:2]): row
        for row in next(b for b in page.blocks if isinstance(b, Table) and b.name == "table").rows
    }
    # of six people p is 0.05: which side depends on how the processor rounds
    p, verdict = rows["tuned", "layer 2 of 2"][-2:]
    assert p < 0.1
    assert verdict == ("yes" if p < 0.05 else "no")
    assert rows["before", "layer 2 of 2"][-2:] == [1.0, "no"]
    assert tuned["beyond_signal_size"]["hi"] < 0
    assert rows["tuned", "input"][-1] == "no"  # the size of the signal explains more
