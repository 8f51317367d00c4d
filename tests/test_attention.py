"""Maps in float64 without special positions and padding, shares of attention, and the page of a few
sequences.
"""

import numpy as np
import pytest
import torch
from small import find_workspace
from test_saliency import run as labelled
from test_shapelets import Labelled
from test_svd import Windows, run

from bitimely_core import models, report
from bitimely_core.analyses.controls import randomise_model, to_float64
from bitimely_core.errors import UserError
from bitimely_core.insight.attention import attention, compare_region, half_share
from bitimely_core.insight.attention_maps import (
    column_share,
    combine_pair,
    compute_mixings,
    last_map,
)
from bitimely_core.insight.regions import find_shapelet_windows, load_shapelets, spread_over_samples
from bitimely_core.models.tokenizers import PatchTokenizer
from bitimely_core.page import Figure, Table
from bitimely_core.progress import show_progress
from bitimely_core.run import Run
from bitimely_core.types import Batch


def layers_of(one, row=0):
    return compute_mixings(
        to_float64(one.model()), Batch(values=torch.from_numpy(one.windows().x[row : row + 1]))
    )


# --- maps ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "directions"),
    [
        ("bitimelygpt", ["forward", "backward"] * 2),
        ("timelygpt", ["forward"] * 4),
        ("timelybert", ["both"] * 4),
        ("gpt-baar", ["forward", "backward"] * 2),
    ],
)
def test_maps_are_the_model_s_own_without_special_positions(name, directions):
    one = run(name)
    layers = layers_of(one)
    assert [m.direction for m in layers] == directions
    with torch.no_grad():
        expected = one.model()(
            Batch(values=torch.from_numpy(one.windows().x[:1])), attention=True
        ).attention
    for mixing, full in zip(layers, expected, strict=True):
        assert mixing.map.dtype == np.float64
        assert mixing.map.shape == (2, 12, 12)
        assert mixing.map == pytest.approx(
            full[0, :, 1:-1, 1:-1].double().numpy(), abs=2e-5 * float(full.abs().max())
        )
    assert next(one.model().parameters()).dtype == torch.float32  # the run itself is left alone


def test_padding_is_no_token():
    torch.manual_seed(0)
    model = models.build(
        "bitimelygpt",
        tokenizer="codes",
        codes=30,
        layers=2,
        heads=2,
        dim=8,
        value_dim=8,
        ffn_dim=8,
        length=20,
        decay={"kind": "half-life", "months": (6, 24)},
    ).eval()
    ids, times, mask = (
        torch.randint(5, 30, (1, 20)),
        torch.arange(20.0)[None],
        torch.arange(20)[None] < 13,
    )
    padded = compute_mixings(to_float64(model), Batch(values=ids, times=times, mask=mask))
    short = compute_mixings(
        to_float64(model), Batch(values=ids[:, :13], times=times[:, :13], mask=mask[:, :13])
    )
    for a, b in zip(padded, short, strict=True):
        assert a.map.shape == (2, 13, 13)
        assert a.map == pytest.approx(b.map, abs=1e-12)
        assert a.alone == pytest.approx(b.alone, abs=1e-12)


def test_the_figure_of_a_pair_counts_the_diagonal_once():
    layers = layers_of(run())
    both, words = last_map(layers)
    n = both.shape[-1]
    for i in range(n):
        for j in range(n):
            assert both[0, i, j] == (layers[2].map if j <= i else layers[3].map)[0, i, j]
    assert words == "forward layer 3 and backward layer 4"
    assert combine_pair(layers[1], layers[2]) is None
    assert last_map(layers_of(run("timelybert")))[1] == "two-sided layer 4"


def test_random_weights_are_seeded_and_leave_the_generator_alone():
    one = run()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first, second, other = (randomise_model(one.model(), seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# --- shares -------------------------------------------------------------------------------------------------------------------------------


def test_share_of_columns():
    maps = np.zeros((2, 3, 3))
    maps[0, :, 1] = -2.0
    maps[1, 0, 0] = 3.0
    assert column_share(maps) == pytest.approx([1 / 3, 2 / 3, 0])
    # maps of other scale compare
    assert column_share(7 * maps) == pytest.approx(column_share(maps))
    assert column_share(np.zeros((1, 4, 4))) == pytest.approx([0.25] * 4)


def test_half_of_the_attention():
    assert half_share(np.full(10, 0.1)) == 0.5
    assert half_share(np.eye(10)[3]) == 0.1
    assert half_share(np.array([0.4, 0.3, 0.2, 0.1])) == 0.5


def test_tokens_are_spread_over_their_samples():
    patch = run().model().config
    share = np.random.default_rng(0).dirichlet(np.ones(12))
    over = spread_over_samples(share, 96, patch)
    assert over.sum() == pytest.approx(1)
    assert over[8:16] == pytest.approx(share[1] / 8)
    ragged = spread_over_samples(share, 93, patch)  # the last patch stands for five samples
    assert ragged.sum() == pytest.approx(1)
    assert ragged[-5:] == pytest.approx(share[-1] / 5)
    cropped = spread_over_samples(share, 99, patch.model_copy(update={"crop": "start"}))
    assert cropped[:3].sum() == 0
    assert cropped[3:11] == pytest.approx(share[0] / 8)
    conv = spread_over_samples(np.full(24, 1 / 24), 94, run(tokenizer="conv").model().config)
    assert conv.sum() == pytest.approx(1)
    assert conv[:4] == pytest.approx(1 / 96)


# patch, stride, samples
PATCHES = [(8, 4, 99), (16, 5, 96), (8, 3, 50), (8, 12, 97), (8, None, 93)]


@pytest.mark.parametrize(
    ("patch", "stride", "samples", "crop"),
    [(*p, crop) for p in PATCHES for crop in ("pad", "start")] + [(8, 4, 5, "pad")],
)
def test_shares_of_patches_against_plain_loops(patch, stride, samples, crop):
    """The definition: a token's share is divided evenly among the samples of the window that its
    patch reads.
    """
    config = (
        run().model().config.model_copy(update={"patch": patch, "stride": stride, "crop": crop})
    )
    tokenizer = PatchTokenizer(1, patch, stride=stride, crop=crop)
    ramp = torch.arange(samples, dtype=torch.float64)[None, :, None]
    # each token holds the numbers of its samples, the last one repeated by padding
    read, _, _ = tokenizer(Batch(values=ramp))
    share = np.random.default_rng(patch).dirichlet(np.ones(read.shape[1]))
    expected = np.zeros(samples)
    for k in range(read.shape[1]):
        own = {int(t) for t in read[0, k].tolist()}
        for t in own:
            expected[t] += share[k] / len(own)
    over = spread_over_samples(share, samples, config)
    assert over == pytest.approx(expected, abs=1e-15)
    assert over.sum() == pytest.approx(1)


def test_a_region_against_all_others_of_its_length():
    share = np.full(100, 0.005)
    share[20:30] = 0.055
    found = compare_region(share, 2.0, 3.0, 10.0)
    assert found.share == pytest.approx(0.55)
    assert found.ratio == pytest.approx(5.5)
    assert found.higher_elsewhere == 0
    even = compare_region(np.full(100, 0.01), 2.0, 3.0, 10.0)
    assert even.ratio == pytest.approx(1)
    with pytest.raises(UserError):
        compare_region(share, 50.0, 60.0, 10.0)


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_shows_signal_maps_and_random_weights(tmp_path):
    runs = [run(), run("timelybert", tokenizer="conv")]
    page = attention(runs, sequences=2, start=0.2, stop=0.6)
    figures = {block.name: block for block in page.blocks if isinstance(block, Figure)}
    assert {
        "signal-1",
        "signal-2",
        "map-bitimelygpt-1",
        "heads-bitimelygpt-2",
        "map-timelybert-1",
    } <= set(figures)
    traces = figures["signal-1"].data
    assert [s.name for s in traces.signals] == [
        "C3",
        "EOG",
        "bitimelygpt",
        "timelybert",
        "bitimelygpt, random weights",
    ]
    assert {len(s.values) for s in traces.signals} == {96}
    assert traces.signals[2].values.mean() == pytest.approx(1)  # in units of an even share
    assert traces.spans[0].start == 0.2
    entry = page.summary["bitimelygpt"]["1"]
    assert sum(entry["share"]) == pytest.approx(1)
    assert entry["tokens"] == 12
    assert page.summary["timelybert"]["1"]["tokens"] == 24
    assert entry["window"] == page.summary["timelybert"]["1"]["window"]  # the same sequence
    assert entry["region"]["ratio"] > 0
    assert page.summary == attention(runs, sequences=2, start=0.2, stop=0.6).summary
    table = next(block for block in page.blocks if isinstance(block, Table))
    # sequences x layers x heads, a pair and a single layer
    assert len(table.rows) == 2 * 2 * 2 + 2 * 1 * 2
    assert figures["heads-bitimelygpt-1"].data.values.shape == (2, 12, 12)
    assert "random weights" in figures["map-bitimelygpt-1"].data.names
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT


def sleepers(*names, n=180):
    """Runs on windows with a planted wave, half of the twelve subjects held out."""
    windows = Labelled(n=n, subjects=12)
    windows.of_split = np.where(np.isin(windows.who, [f"s{k}" for k in range(6)]), "test", "train")
    return [labelled(name, windows) for name in names], windows


@pytest.mark.slow
def test_share_on_shapelets_has_intervals_and_controls(tmp_path):
    events = []
    runs, windows = sleepers("bitimelygpt", "patchtst")
    with show_progress(lambda *event: events.append(event)):
        page = attention(runs, sequences=2, windows=12, lengths="1", bootstrap=50)
    assert {what for what, *_ in events} >= {
        "shapelets bitimelygpt",
        "shapelets patchtst",
        "attention bitimelygpt",
    }
    for name in ("bitimelygpt", "patchtst"):
        about = page.summary[name]["shapelets"]
        assert about["ratio"]["lo"] <= about["ratio"]["value"] <= about["ratio"]["hi"]
        assert about["random_places"]["lo"] < 1.3
        assert 0 < about["p_places"] <= 1
        assert about["beyond_random_weights"]["value"] == pytest.approx(
            about["ratio"]["value"] - about["random_weights"]["value"]
        )
        assert set(about["heads"]) == {"1", "2"}
    assert page.summary["bitimelygpt"]["shapelets"]["heads"]["1"]["ratio"]["lo"] is not None
    figures = {block.name: block for block in page.blocks if isinstance(block, Figure)}
    assert next(iter(figures)) == "main-score"
    assert figures["main-score"].data.names[-2:] == ["size of the signal", "random places"]
    assert figures["signal-1"].data.spans[0].stop - figures["signal-1"].data.spans[
        0
    ].start == pytest.approx(1.0)
    tables = {block.name: block for block in page.blocks if isinstance(block, Table)}
    assert [row[0] for row in tables["shapelets"].rows] == ["bitimelygpt", "patchtst"]
    assert tables["differences"].rows[0][:2] == ["bitimelygpt", "patchtst"]
    assert len(tables["shapelets-heads"].rows) == 4
    assert "times the attention of their length" in page.verdict
    assert windows.of_split[page.summary["bitimelygpt"]["1"]["window"]] == "test"
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT


@pytest.mark.slow
def test_the_ratio_on_shapelets_is_that_of_the_maps_by_hand():
    (one,), windows = sleepers("bitimelygpt")
    page = attention([one], windows=5, lengths="1", bootstrap=10)
    stretches, but, _ = load_shapelets(windows, "", "1", 0)
    chosen = find_shapelet_windows(windows, stretches, 5, 0, but)
    found = []
    for row, start, length in zip(chosen.rows, chosen.start, chosen.length, strict=True):
        maps = last_map(
            compute_mixings(
                to_float64(one.model()), Batch(values=torch.from_numpy(windows.x[row : row + 1]))
            )
        )[0]
        share = np.repeat(np.abs(maps).sum(1).mean(0), 4)  # four samples a patch
        found.append(share[start : start + length].mean() / share.mean())
    assert page.summary["bitimelygpt"]["shapelets"]["ratio"]["value"] == pytest.approx(
        np.mean(found)
    )
    assert page.summary["bitimelygpt"]["shapelets"]["ratio"]["n"] == len(chosen.rows) == 5


def test_where_there_are_no_shapelets_it_says_so():
    (one,), windows = sleepers("timelygpt", n=60)
    windows.task = "none"
    page = attention([one])
    assert any("No shapelets: planted has no classes" in notice for notice in page.notices)
    assert "shapelets" not in page.summary["timelygpt"]
    with pytest.raises(UserError, match="no report"):
        attention([one], shapelets="/nowhere/at/all")


def test_a_model_without_maps_is_refused_before_shapelets_are_mined():
    (one,), _ = sleepers("resnet")
    events = []
    with (
        show_progress(lambda *event: events.append(event)),
        pytest.raises(UserError, match="resnet has no attention maps"),
    ):
        attention([one], lengths="1")
    assert events == []


def test_half_a_region_is_refused():
    with pytest.raises(UserError, match="--stop"):
        attention([run()], start=1.0)


@pytest.mark.parametrize(
    ("start", "stop", "flag"),
    [(0.2, 99.0, "--stop"), (-0.5, 0.6, "--start"), (0.6, 0.2, "--stop"), (50.0, 99.0, "--stop")],
)
def test_a_region_beyond_the_sequence_is_refused(start, stop, flag):
    one = run()
    with pytest.raises(UserError) as refused:
        attention([one], start=start, stop=stop)
    assert (refused.value.exit_code, refused.value.field) == (2, flag)
    assert f"{start:g} to {stop:g} s" in str(refused.value)
    assert flag != "--start" or f"0 to {96 / one.windows().rate:g} s" in str(refused.value)
    with pytest.raises(UserError, match="0 to 6 events"):
        compare_region(np.ones(6) / 6, 2, 7, None)


@pytest.mark.slow
def test_a_region_of_events_and_of_a_grid_of_months():
    """Neither has a rate: a region counts tokens, and distances have no seconds."""
    events = Run.open("events", find_workspace())
    grid = run(windows=Windows(96))
    grid.windows().rate = 0.0
    for one in (events, grid):
        page = attention([one], sequences=1, start=0, stop=3, windows=0)
        entry = page.summary[one.name]["1"]
        share = np.array(entry["share"])
        assert entry["region"]["share"] == pytest.approx(share[:3].sum())
        assert entry["region"]["length"] == pytest.approx(3 / len(share))
        assert entry["region"]["higher_elsewhere"] == pytest.approx(
            np.mean(
                [
                    share[at : at + 3].sum() > share[:3].sum() * (1 + 1e-9)
                    for at in range(len(share) - 2)
                ]
            )
        )
        table = next(block for block in page.blocks if isinstance(block, Table))
        assert {row[7] for row in table.rows} == {None}
        with pytest.raises(UserError, match="events"):
            attention([one], sequences=1, start=0, stop=9999, windows=0)


def test_mean_distance_grows_with_memory():
    page = attention(
        [run(windows=Windows(480), heads=2, decay={"from": 2.0, "to": 512.0})], windows=0
    )
    table = next(block for block in page.blocks if isinstance(block, Table))
    distance = {(row[2], row[3]): row[6] for row in table.rows}
    assert distance[3, 1] < distance[3, 2]
    assert distance[4, 1] < distance[4, 2]
