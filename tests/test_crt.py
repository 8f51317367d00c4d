"""CRT: three views of a window in one sequence, dropped patches, the instance constraint."""

import cmath
import math
from functools import partial

import planted
import pytest
import torch
from planted import lively, seeded
from torch.nn import functional as F

from bitimely_core import heads, models, objectives
from bitimely_core.config import ObjectiveConfig, Settings, TrainConfig, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.train import loop
from bitimely_core.types import Batch
from bitimely_core.zoo.crt import SLACK, CRTTokenizer, build_resnet, compute_constraint, draw_shares

torch.set_num_threads(1)


def draw_dropped(real, ratio, generator):
    """Dropped patches, bool [4K], of a row with `real` ones [4K]."""
    return draw_shares(real, generator) <= ratio + SLACK


tiny = partial(planted.tiny, "crt")


# -------------------------------------------------------------------------------------------------------------- the three views


def spectrum(series, count):
    """log(1 + |X|) and the angle of X of the first T / 2 bins, X = sum x exp(-2 pi i f t / T) /
    sqrt(T), by definition.
    """
    size = len(series)
    bins = [
        sum(x * cmath.exp(-2j * math.pi * f * t / size) for t, x in enumerate(series))
        / math.sqrt(size)
        for f in range(count)
    ]
    return [math.log(1 + abs(b)) for b in bins], [
        cmath.phase(complex(b.real, 0.0 if f == 0 else b.imag)) for f, b in enumerate(bins)
    ]


@pytest.mark.parametrize("length", [64, 50, 8])
def test_tokens_are_patches_of_time_magnitude_and_phase(length):
    views, size = CRTTokenizer(2, 8), 16 * math.ceil(length / 16)
    x = torch.randn(2, length, 2, dtype=torch.float64, generator=seeded())
    tokens, targets, real = views(Batch(x))
    assert tokens.shape == (2, views.count(length), 16) == (2, size // 4, 16)
    assert torch.equal(tokens, targets)
    assert real.all()
    for row in range(2):
        for channel in range(2):
            series = x[row, :, channel].tolist()
            series += [series[-1]] * (size - length)  # the last sample is repeated
            magnitude, phase = spectrum(series, size // 2)
            wanted = torch.tensor(series + magnitude + phase, dtype=torch.float64)
            torch.testing.assert_close(
                tokens[row].unflatten(-1, (8, 2))[..., channel].flatten(),
                wanted,
                rtol=1e-9,
                atol=1e-9,
            )
    seen = views.find_targets(Batch(x)).unflatten(-1, (8, 2))[..., 0].flatten(1)
    assert seen[0].tolist() == [t < length or t >= size for t in range(2 * size)]


def test_a_bin_without_magnitude_has_no_phase_and_no_broken_derivative():
    views = CRTTokenizer(1, 8)
    x = torch.stack(
        [
            torch.zeros(64),
            torch.full((64,), -3.0),
            torch.sin(2 * math.pi * 5 * torch.arange(64) / 64),
        ]
    )[..., None]
    x.requires_grad_()
    tokens, _, _ = views(Batch(x))
    phase = tokens[:, -4:].detach().flatten(1)
    assert (phase[0] == 0).all()
    assert float(phase[1, 0]) == pytest.approx(math.pi)
    assert (phase[1, 1:] == 0).all()
    assert phase[2].nonzero().flatten().tolist() == [5]
    assert float(phase[2, 5]) == pytest.approx(-math.pi / 2, rel=1e-4)
    (slope,) = torch.autograd.grad(tokens.square().sum(), x)
    assert torch.isfinite(slope).all()


def test_each_row_has_the_spectrum_of_its_own_length():
    views = CRTTokenizer(2, 8)
    x, lengths = torch.randn(4, 64, 2, dtype=torch.float64, generator=seeded()), [64, 37, 9, 0]
    mask = torch.arange(64) < torch.tensor(lengths)[:, None]
    tokens, _, real = views(Batch(torch.where(mask[..., None], x, torch.nan), mask=mask))
    parts = [(8, 0), (4, 8), (4, 12)]
    for row, length in enumerate(lengths[:3]):
        alone, _, _ = views(Batch(x[row : row + 1, :length]))
        blocks = alone.shape[1] // 4
        for (_, start), times, own in zip(
            parts, (2, 1, 1), (0, 2 * blocks, 3 * blocks), strict=True
        ):
            torch.testing.assert_close(
                tokens[row, start : start + times * blocks], alone[0, own : own + times * blocks]
            )
        assert real[row].tolist() == [t < 2 * blocks for t in range(8)] + 2 * [
            t < blocks for t in range(4)
        ]
    assert not real[3].any()
    assert torch.isfinite(tokens).all()


# -------------------------------------------------------------------------------------------------------------- formulas


def residual_net(net, x):
    """ResNet-18 in one dimension behind its first convolution, in functions."""

    def normed(norm, y):
        shape = (1, -1, 1)
        y = (y - norm.running_mean.view(shape)) / (norm.running_var.view(shape) + 1e-5).sqrt()
        return y * norm.weight.view(shape) + norm.bias.view(shape)

    x = F.max_pool1d(F.relu(normed(net[0], x)), 3, 2, 1)
    for stage, pair in enumerate(net[3:]):
        for at, block in enumerate(pair):
            stride = 2 if stage and not at else 1
            y = F.relu(
                normed(block.body[1], F.conv1d(x, block.body[0].weight, stride=stride, padding=1))
            )
            y = normed(block.body[4], F.conv1d(y, block.body[3].weight, padding=1))
            if stage and not at:
                x = normed(block.shortcut[1], F.conv1d(x, block.shortcut[0].weight, stride=2))
            x = F.relu(x + y)
    return x


def transformed(layers, x):
    """Pre-norm layers with heads of 64 and no biases in q, k, v; the maps beside."""
    maps = []
    for layer in layers:
        y = F.layer_norm(x, x.shape[-1:], layer.norm_mix.weight, layer.norm_mix.bias)
        q, k, v = (
            part.unflatten(-1, (4, 64)).transpose(1, 2)
            for part in (y @ layer.qkv.weight.T).chunk(3, -1)
        )
        maps.append((q @ k.mT / 8).softmax(-1))
        x = x + (maps[-1] @ v).transpose(1, 2).flatten(2) @ layer.merge.weight.T + layer.merge.bias
        y = F.layer_norm(x, x.shape[-1:], layer.norm_ffn.weight, layer.norm_ffn.bias)
        x = (
            x
            + F.gelu(y @ layer.first.weight.T + layer.first.bias) @ layer.out.weight.T
            + layer.out.bias
        )
    return x, maps


def placed(model, blocks, positions, views):
    """Position and view of each of 4K patches, [4K, D]."""
    rows = []
    for at, (view, times) in enumerate((("time", 2), ("magnitude", 1), ("phase", 1))):
        rows += [positions[view][n] + views[at] for n in range(times * blocks)]
    return torch.stack(rows)


def embed_patches(model, tokens):
    """Each patch through the net of its view, [B, 4K, D]."""
    blocks, out = tokens.shape[1] // 4, []
    for n in range(4 * blocks):
        view = ("time", "time", "magnitude", "phase")[n // blocks]
        patch = tokens[:, n].unflatten(-1, (8, -1)).transpose(1, 2)
        first = F.conv1d(patch, model.adapter.stems[view].weight, stride=2, padding=1)
        out.append(residual_net(model.nets[view], first).mean(-1))
    return torch.stack(out, 1)


@torch.no_grad()
def test_states_vector_and_maps_equal_their_formulas():
    model = lively(tiny(layers=4))
    x = torch.randn(2, 50, 3, dtype=torch.float64, generator=seeded())
    tokens, _, _ = model.adapter.tokenizer(Batch(x))
    inner = embed_patches(model, tokens) + placed(model, 4, model.positions, model.views)
    wanted, maps = transformed(
        model.layers, torch.cat(((model.classes + model.views).expand(2, -1, -1), inner), 1)
    )
    encoded = model(Batch(x), attention=True)
    assert len(encoded.hidden) == 2  # two of four layers decode
    torch.testing.assert_close(encoded.hidden[-1], wanted[:, 3:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(encoded.pooled, wanted[:, :3].mean(1), rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(encoded.attention, maps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.sum(-1), torch.ones(2, 4, 19, dtype=torch.float64))
    torch.testing.assert_close(model(Batch(x)).hidden[-1], encoded.hidden[-1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_reconstruction_equals_its_formulas():
    """Kept patches from the encoder, dropped ones from the decoder, each through the projection of
    its view.
    """
    model = lively(tiny())
    x = torch.randn(1, 50, 3, dtype=torch.float64, generator=seeded())
    tokens, _, real = model.adapter.tokenizer(Batch(x))
    dropped = draw_dropped(real[0], 0.5, seeded())
    keep = (~dropped).nonzero().flatten()
    gone = dropped.nonzero().flatten()
    before = embed_patches(model, tokens)[:, keep]
    inner = before + placed(model, 4, model.positions, model.views)[keep]
    states, _ = transformed(
        model.layers, torch.cat(((model.classes + model.views)[None], inner), 1)
    )
    blank = placed(model, 4, model.decoder_positions, model.masks)[gone]
    decoded, _ = transformed(model.decoder, torch.cat((states, blank[None]), 1))
    full = torch.zeros(1, 16, 64, dtype=torch.float64)
    full[:, keep], full[:, gone] = states[:, 3:], decoded[:, len(keep) + 3 :]
    names = ("time", "time", "magnitude", "phase")
    wanted = torch.stack(
        [
            full[:, n] @ (out := model.adapter.output[names[n // 4]]).weight.T + out.bias
            for n in range(16)
        ],
        1,
    )
    result = model.reconstruct(Batch(x), dropped[None])
    torch.testing.assert_close(result.prediction, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.before, model.project_before(before), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        result.after, model.project_after(states[:, 3:]), rtol=1e-9, atol=1e-9
    )


def test_views_are_identified_by_token_not_by_row():
    """The reference adds the vector of a view by the number of the row while fine-tuning: there a
    row depends on its place in the batch.
    """
    model = lively(tiny())
    x = torch.randn(4, 50, 3, dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        model(Batch(x[order])).pooled, model(Batch(x)).pooled[order], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(training):
    torch.manual_seed(2)
    x, kept = torch.randn(3, 48, 2, dtype=torch.float64), []
    mask = torch.arange(48) < torch.tensor([48, 30, 7])[:, None]
    for fill, more in ((0.0, 0), (7.0, 0), (torch.nan, 20)):
        model = lively(tiny(channels=2, length=80)).train(training)
        values = F.pad(
            torch.where(mask[..., None], x, fill), (0, 0, 0, more), value=fill
        ).requires_grad_()
        batch = Batch(values, mask=F.pad(mask, (0, more)))
        encoded = model(batch)
        result = objectives.get()(model, batch, seeded())
        (encoded.pooled.square().sum() + result["loss"]).backward()
        slope = values.grad[:, :48]
        assert (slope[~mask] == 0).all()
        kept.append((encoded.pooled, encoded.hidden[-1][encoded.mask], result["loss"], slope))
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_window_without_any_sample_is_finite():
    model, mask = tiny(), torch.ones(2, 50, dtype=torch.bool)
    mask[1] = False
    batch = Batch(torch.randn(2, 50, 3), mask=mask)
    encoded = model(batch, attention=True)
    assert all(
        torch.isfinite(t).all() for t in (*encoded.hidden, *encoded.attention, encoded.pooled)
    )
    model.train()
    assert torch.isfinite(objectives.get()(model, batch, seeded())["loss"])
    only = objectives.get()(
        model, Batch(torch.randn(2, 50, 3), mask=torch.zeros(2, 50, dtype=torch.bool)), seeded()
    )
    assert float(only["loss"].detach()) == 0


# -------------------------------------------------------------------------------------------------------------- dropping


@pytest.mark.parametrize(
    ("ratio", "time", "bins"), [(0.7, 14, 7), (0.3, 6, 3), (0.55, 11, 5), (0.29, 5, 2)]
)
def test_so_many_patches_are_dropped_and_phases_with_their_magnitudes(ratio, time, bins):
    """floor(rho N / 2) of time, floor(rho N / 4) of magnitude and the same of phase, N = 40."""
    real = torch.ones(40, dtype=torch.bool)
    found = [draw_dropped(real, ratio, seeded(seed)) for seed in range(20)]
    for row in found:
        assert int(row[:20].sum()) == time
        assert int(row[20:30].sum()) == bins
        assert torch.equal(row[20:30], row[30:])
    assert len({tuple(row.tolist()) for row in found}) == 20
    assert torch.stack(found).double().mean(0)[:20].min() > 0


def test_short_rows_drop_their_own_patches():
    model = tiny()
    mask = torch.arange(50) < torch.tensor([50, 20])[:, None]
    real = model.adapter.tokenizer(Batch(torch.randn(2, 50, 3), mask=mask))[2]
    row = draw_dropped(real[1], 0.7, seeded())
    assert (row[:8].sum(), row[8:12].sum(), row[12:].sum()) == (2, 1, 1)  # of 4, 2 and 2
    assert not (row & ~real[1]).any()


def test_the_share_rises_with_the_training():
    model = tiny().train()
    batch = Batch(torch.randn(2, 160, 3))
    model.reset_adapter(channels=3, length=160)

    def kept(progress, training=True):
        model.train(training).progress = progress
        seen = {}
        hook = model.project_before.register_forward_pre_hook(
            lambda module, args: seen.update(count=args[0].shape[1])
        )
        objectives.get()(model, batch, seeded())
        hook.remove()
        return seen["count"]

    assert [kept(p) for p in (0.0, 0.3, 0.5, 0.7, 1.0)] == [40 - 12, 40 - 12, 20, 40 - 28, 40 - 28]
    assert kept(0.0, training=False) == 40 - 28  # validation always asks the hardest
    assert kept(1.0) == 12


def test_fit_tells_how_far_it_is():
    seen = []

    def objective(model, batch, generator=None):
        seen.append(model.progress)
        return objectives.get()(model, batch, generator)

    def batches(epoch, *, start=0, rank=0, world=1):
        return iter([Batch(torch.randn(2, 50, 3))] * (2 - start))

    batches.steps, batches.size = 2, 2
    loop.fit(tiny(), batches, objective, config=TrainConfig(epochs=2, device="cpu"))
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_nothing_of_a_dropped_patch_is_read():
    """Other contents of dropped patches change no prediction, statistics of the batch included."""
    model = lively(tiny(length=64)).train()
    x = torch.randn(3, 64, 3, dtype=torch.float64)
    views, keep = model.adapter.tokenizer, torch.rand(3, 16, generator=seeded()) > 0.5
    tokens, targets, real = views(Batch(x))
    results = []
    for fill in (0.0, 100.0):
        views.forward = lambda batch, fill=fill: (
            torch.where(keep[..., None], tokens, fill),
            targets,
            real,
        )
        results.append(model.reconstruct(Batch(x), ~keep))
    assert torch.equal(results[0].prediction, results[1].prediction)
    assert torch.equal(results[0].real.sum(1), keep.sum(1))


def test_the_loss_is_over_all_patches_and_the_constraint_is_small():
    model = tiny()
    x = torch.randn(2, 50, 3, generator=seeded())
    result = objectives.get()(model, Batch(x), seeded())
    errors = (result["prediction"] - result["target"]).detach().square()
    # the repeated samples are no targets
    assert result["valid"].sum() == errors.numel() - 2 * 14 * 3
    assert float(result["parts"]["reconstruction"]) == pytest.approx(
        float(errors[result["valid"]].mean()), rel=1e-5
    )
    torch.testing.assert_close(result["loss"].detach(), sum(result["parts"].values()))
    assert 0 < float(result["parts"]["constraint"]) < 1e-3
    assert set(result["slices"]) == {"reconstruction"}


def test_the_constraint_equals_its_formula():
    a, b = torch.randn(2, 4, 5, generator=seeded()), torch.randn(2, 4, 5, generator=seeded(1))
    kept = torch.tensor([[True] * 4, [True, True, True, False]])
    rows = []
    for row, count in enumerate((4, 3)):
        total = 0.0
        for i in range(count):
            for j in range(count):
                if i != j:
                    total += math.exp(float(F.cosine_similarity(a[row, i], b[row, j], dim=0)))
        rows.append(math.log(total))
    assert float(compute_constraint(a, b, kept)) == pytest.approx(sum(rows) / 2, rel=1e-5)
    alone = torch.tensor([[True, False, False, False]] * 2)
    assert float(compute_constraint(a, b, alone)) == 0


@pytest.mark.slow
def test_sines_are_reconstructed():
    torch.manual_seed(0)
    model = models.build("crt", preset="tiny", channels=2, length=64, layers=2, dim=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw, found = seeded(), []
    for _ in range(40):
        phase, rate = (
            6.3 * torch.rand(16, 1, 2, generator=draw),
            0.2 + 0.1 * torch.rand(16, 1, 2, generator=draw),
        )
        batch = Batch(torch.sin(phase + rate * torch.arange(64)[None, :, None]))
        result = objectives.get()(model, batch, draw)
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        found.append(float(result["rel"]))
    spread = model.eval()(batch).pooled.std(0).mean()
    assert sum(found[-10:]) / 10 < 0.5 * sum(found[:5]) / 5
    assert spread > 1e-3  # no collapse


# -------------------------------------------------------------------------------------------------------------- sizes, other data, refusals


def test_its_own_sizes():
    """Three ResNets at the width of the table hold 6.5 M; the paper's encoder and decoder about
    25.8 M and 12.4 M.
    """
    with torch.device("meta"):
        assert 3 * models.count_parameters(build_resnet(384)) + 3 * 48 * 7 * 3 == 6_494_256
    for preset, wanted in (("18m", 25.8e6), ("7.5m", 12.4e6)):
        config = build_model_config("crt", preset, **models.default_shape(preset))
        assert models.count_configured(config) == pytest.approx(wanted, rel=0.03)
    own = build_model_config(
        "crt",
        "18m",
        channels=12,
        length=5000,
        patch=20,
        dim=128,
        ffn_dim=128,
        layers=8,
        decoder_layers=2,
    )
    assert models.count_configured(own) == pytest.approx(3.35e6, rel=0.03)


@pytest.mark.parametrize("preset", ["18m", "7.5m"])
def test_a_matched_budget_is_within_five_percent(preset):
    data = models.default_shape(preset)
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data))
    config = build_model_config("crt", preset, **data).model_copy(
        update=models.match_parameters("crt", preset, **data)
    )
    assert models.count_configured(config) == pytest.approx(goal, rel=0.05)


def test_other_channels_keep_the_resnets_and_longer_windows_the_positions():
    model = tiny()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    renewed = model.reset_adapter(channels=5, length=50)
    assert set(renewed) == {
        name for name, _ in model.named_parameters() if name.startswith("adapter.")
    }
    same = {name for name in before if not name.startswith("adapter.") and name != "target_scale"}
    assert any(name.startswith("nets.") for name in same)
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in same)
    with pytest.raises(UserError, match="positions"):
        model(Batch(torch.randn(1, 80, 5)))
    fresh = model.reset_adapter(channels=5, length=80)
    assert fresh == [
        f"{name}.{view}"
        for name in ("positions", "decoder_positions")
        for view in ("time", "magnitude", "phase")
    ]
    assert torch.equal(model.positions["phase"][:4], before["positions.phase"])
    assert model(Batch(torch.randn(1, 80, 5))).hidden[-1].shape == (1, 20, 64)


def test_a_mixed_pre_training_has_stems_of_its_own():
    model = tiny(others=(2,)).train()
    second = Batch(torch.randn(2, 40, 2), source=torch.ones(2, dtype=torch.int64))
    objectives.get()(model, second, seeded())["loss"].backward()
    touched = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert any(name.startswith("others.0.stems") for name in touched)
    assert not any(name.startswith("adapter.") for name in touched)


def test_heads_read_the_mean_of_the_three():
    model = tiny()
    x = torch.randn(2, 50, 3)
    head = heads.Classifier(model, outputs=5).eval()
    assert (head.readout, head.linear.in_features) == ("native", 64)
    torch.testing.assert_close(
        head(Batch(x)), model(Batch(x)).pooled @ head.linear.weight.T + head.linear.bias
    )
    assert heads.Classifier(model, outputs=2, readout="flatten")(Batch(x)).shape == (2, 2)


def test_its_stamp_is_that_of_no_forecast():
    config = build_model_config("crt", "tiny", channels=2)
    assert objectives.leak_free(Settings(model=config, objective=ObjectiveConfig())) is None


@pytest.mark.parametrize(
    ("options", "objective", "message"),
    [
        ({"layers": 1}, "", "one to decode"),
        ({"dim": 36}, "", "multiple of 8"),
        ({"tokenizer": "codes", "codes": 52}, "", "no spectrum"),
    ],
)
def test_unsupported_settings_are_refused(options, objective, message):
    with pytest.raises(UserError, match=message) as caught:
        objectives.get(objective)(tiny(**options), Batch(torch.randn(2, 50, 3)), seeded())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("length", [48, 96, 240])
def test_phases_of_occurrences_are_the_same_in_both_precisions(length):
    """Months with and without a code: many bins are negative and real, and the sign of a rounding
    must not turn pi into -pi.
    """
    x = (torch.rand(200, length, 8, generator=torch.Generator().manual_seed(0)) < 0.05).float()
    x[:20] = x[:20, : length // 4].repeat(1, 4, 1)  # periodic: most bins are empty
    tokenizer = CRTTokenizer(8, 8)
    single, double = (tokenizer(Batch(values))[0] for values in (x, x.double()))
    assert float((single - double).abs().max()) < 1e-2
