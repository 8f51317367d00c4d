"""Autoformer: trends, lags, its layers by hand; and what it shares with FEDformer and TimesNet:
complete rows without their padding.
"""

import math

import pytest
import torch
from planted import seeded
from torch import nn

from bitimely_core import heads, models, objectives
from bitimely_core.config import Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.types import Batch
from bitimely_core.zoo.autoformer import AutoCorrelation, SeriesDecomposition, apply_by_length

torch.set_num_threads(1)

NAMES = ["autoformer", "fedformer", "timesnet"]


def tiny(name="autoformer", **options):
    torch.manual_seed(0)
    return models.build(name, **{"preset": "tiny", "channels": 3, "length": 50, **options}).eval()


def lively(model):
    """Weights that all count: biases and scales do not stay 0 or 1."""
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.double()


def waves(rows=16, length=50, channels=3, seed=0):
    """Sines of periods 5 to 25 with any phase."""
    draw = seeded(seed)
    period = 5 + 20 * torch.rand(rows, 1, channels, generator=draw)
    phase = 2 * math.pi * torch.rand(rows, 1, channels, generator=draw)
    return torch.sin(2 * math.pi * torch.arange(length)[None, :, None] / period + phase)


# -------------------------------------------------------------------------------------------------------------- by hand


def average(x, window):
    """Trend [n, D] of one row: the ends are repeated."""
    n, behind = len(x), (window - 1) // 2
    return torch.stack(
        [
            sum(x[min(max(t + j, 0), n - 1)] for j in range(behind - window + 1, behind + 1))
            / window
            for t in range(n)
        ]
    )


def correlation(q, k):
    """R(tau) [n] by its definition in time."""
    n = len(q)
    return torch.stack(
        [sum(q[(t + tau) % n] @ k[t] for t in range(n)) / q.shape[1] for tau in range(n)]
    )


def rolled(v, scores, ranked, factor):
    """Weighted sum of the rolled values [n, D]; the lags are chosen by `ranked`."""
    n = len(v)
    lags = sorted(range(n), key=lambda tau: -float(ranked[tau]))[
        : max(math.floor(factor * math.log(n)), 1)
    ]
    weights = [math.exp(float(scores[tau] - max(scores[lag] for lag in lags))) for tau in lags]
    return sum(
        w * torch.stack([v[(t + tau) % n] for t in range(n)])
        for w, tau in zip(weights, lags, strict=True)
    ) / sum(weights)


def norm(x, module):
    """LN(x) - mean over time."""
    y = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, unbiased=False, keepdim=True) + 1e-5
    ).sqrt() * module.weight + module.bias
    return y - y.mean(0)


def embedded(model, row):
    """Circular convolution of three, one timestep after another."""
    weight, n = model.adapter.steps.weight, len(row)
    return torch.stack(
        [sum(weight[:, :, j] @ row[(t + j - 1) % n] for j in range(3)) for t in range(n)]
    )


def feed(layer, x, window):
    """The part of a layer behind its mixing."""
    x = x - average(x, window)
    inner = x @ layer.first.weight.T
    inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    x = x + inner @ layer.second.weight.T
    return x - average(x, window)


@torch.no_grad()
def by_hand(model, row):
    """States and scores of each layer, of one row [n, V] in eval mode."""
    x, states, found = embedded(model, row), [], []
    for mixer, layer in zip(model.mixers, model.layers, strict=True):
        q, k, v = (
            x @ linear.weight.T + linear.bias for linear in (mixer.query, mixer.key, mixer.value)
        )
        scores = correlation(q, k)
        mixed = (
            rolled(v, scores, scores, model.config.lag_factor) @ mixer.out.weight.T + mixer.out.bias
        )
        x = feed(layer, x + mixed, *model.config.moving_average)
        states.append(norm(x, model.centred))
        found.append(scores)
    return states, found


@pytest.mark.parametrize(
    ("length", "options"),
    [(50, {}), (49, {"lag_factor": 3.0}), (8, {"moving_average": [4]}), (1, {})],
    ids=str,
)
def test_it_equals_its_formulas(length, options):
    model = lively(tiny(length=length, layers=2, dim=8, ffn_dim=12, **options))
    x = torch.randn(2, length, 3, dtype=torch.float64)
    encoded, lags = model(Batch(x)), model.lags(Batch(x))
    assert encoded.attention is None
    assert model(Batch(x), attention=True).attention is None
    for row in range(2):
        states, scores = by_hand(model, x[row])
        for layer in range(2):
            torch.testing.assert_close(
                encoded.hidden[layer][row], states[layer], rtol=1e-8, atol=1e-8
            )
            torch.testing.assert_close(lags[layer][row], scores[layer], rtol=1e-8, atol=1e-8)


def test_the_lags_of_a_sine_are_its_periods():
    """With q = k = v the score of a lag is the circular autocorrelation; a sine rolled by its
    periods is itself.
    """
    mixer = AutoCorrelation(build_model_config("autoformer", "tiny", dim=2)).double()
    for linear in (mixer.query, mixer.key, mixer.value, mixer.out):
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
    t = torch.arange(120, dtype=torch.float64)
    x = torch.stack((torch.sin(2 * math.pi * t / 20), torch.cos(2 * math.pi * t / 20)), -1)[None]
    out, scores = mixer(x)
    assert sorted(scores[0].topk(6).indices.tolist()) == [0, 20, 40, 60, 80, 100]
    torch.testing.assert_close(
        scores[0], 60 * torch.cos(2 * math.pi * t / 20), rtol=1e-9, atol=1e-9
    )
    # floor(ln 120) = 4 lags, each a multiple of 20
    torch.testing.assert_close(out, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 5, 24, 25, 60])
def test_the_trend_is_a_moving_average_with_repeated_ends(window):
    x = torch.randn(2, 40, 3, dtype=torch.float64)
    seasonal, trend = SeriesDecomposition((window,))(x)
    for row in range(2):
        torch.testing.assert_close(trend[row], average(x[row], window))
    torch.testing.assert_close(seasonal + trend, x)


def test_several_windows_are_mixed_value_by_value():
    torch.manual_seed(0)
    split, x = (
        SeriesDecomposition((3, 8)).double().requires_grad_(False),
        torch.randn(1, 20, 2, dtype=torch.float64),
    )
    _, trend = split(x)
    means = [average(x[0], 3), average(x[0], 8)]
    for t in range(20):
        for d in range(2):
            logits = [
                float(x[0, t, d] * split.mix.weight[i, 0] + split.mix.bias[i]) for i in range(2)
            ]
            share = 1 / (1 + math.exp(logits[1] - logits[0]))
            assert float(trend[0, t, d]) == pytest.approx(
                share * float(means[0][t, d]) + (1 - share) * float(means[1][t, d]), rel=1e-9
            )


def test_common_lags_are_those_of_the_mean_row_while_training():
    torch.manual_seed(0)
    mixer = (
        AutoCorrelation(build_model_config("autoformer", "tiny", dim=4, per_sample=False))
        .double()
        .requires_grad_(False)
    )
    x = torch.randn(3, 30, 4, dtype=torch.float64)
    q, k, v = (linear(x) for linear in (mixer.query, mixer.key, mixer.value))
    scores = torch.stack([correlation(q[row], k[row]) for row in range(3)])
    for training, ranked in ((True, scores.mean(0).expand(3, -1)), (False, scores)):
        out, _ = mixer.train(training)(x)
        wanted = torch.stack(
            [mixer.out(rolled(v[row], scores[row], ranked[row], 1.0)) for row in range(3)]
        )
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)


def test_rows_choose_their_own_lags_in_training_too():
    for name in NAMES:
        model = tiny(name).double().train()
        x = torch.randn(3, 50, 3, dtype=torch.float64)
        torch.testing.assert_close(
            model(Batch(x)).hidden[-1][:1], model(Batch(x[:1])).hidden[-1], rtol=1e-11, atol=1e-11
        )


# -------------------------------------------------------------------------------------------------------------- padding and missing samples


def padded(lengths=(50, 37, 0, 1, 37), fill=7.0):
    rows = [torch.randn(n, 3, dtype=torch.float64, generator=seeded(n)) for n in lengths]
    x = torch.full((len(lengths), 50, 3), fill, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    for at, row in enumerate(rows):
        x[at, : len(row)] = row
    return x, mask, rows


@pytest.mark.parametrize("fill", [7.0, math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name, fill):
    """Content and amount of padding, and the company of other rows, change neither states nor
    gradients.
    """
    model = lively(tiny(name, layers=2))
    x, mask, rows = padded(fill=fill)
    x.requires_grad_()
    together = model(Batch(x, mask=mask))
    assert torch.equal(together.mask, mask)
    assert all(torch.isfinite(states).all() for states in together.hidden)
    assert (together.hidden[-1][~mask] == 0).all()
    for at, row in enumerate(rows):
        if not len(row):
            continue
        row = row[None].requires_grad_()
        alone = model(Batch(row))
        for a, b in zip(together.hidden, alone.hidden, strict=True):
            torch.testing.assert_close(a[at, : row.shape[1]], b[0], rtol=1e-10, atol=1e-10)
        (wanted,) = torch.autograd.grad(alone.hidden[-1].pow(3).sum(), row)
        (slope,) = torch.autograd.grad(together.hidden[-1][at].pow(3).sum(), x, retain_graph=True)
        torch.testing.assert_close(slope[at, : row.shape[1]], wanted[0], rtol=1e-8, atol=1e-8)
        assert (slope[~mask] == 0).all()


def test_lags_of_padded_rows_are_those_of_the_rows_alone():
    model = lively(tiny(layers=2))
    x, mask, rows = padded()
    found = model.lags(Batch(x, mask=mask))
    for at in (0, 1, 4):
        wanted = model.lags(Batch(rows[at][None]))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[at, : len(rows[at])], b[0], rtol=1e-9, atol=1e-9)
            assert (a[at, len(rows[at]) :] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_missing_samples_are_neither_read_nor_targets(name):
    model = tiny(name)
    x, mask = torch.randn(2, 50, 3), torch.rand(2, 50, 3, generator=seeded()) > 0.2
    mask[:, -1] = True
    other = torch.where(mask, x, torch.nan)
    assert torch.equal(
        model(Batch(x, mask=mask)).hidden[-1], model(Batch(other, mask=mask)).hidden[-1]
    )
    targets, valid = model.targets(Batch(other, mask=mask))
    assert torch.isfinite(targets).all()
    assert torch.equal(valid, mask)


def test_rows_of_each_length_come_back_in_their_places():
    x = torch.arange(24.0).reshape(4, 6, 1)
    lengths = torch.tensor([6, 2, 0, 2])
    seen = []

    def doubled(rows):
        seen.append(tuple(rows.shape))
        return 2 * rows, rows.sum(-1)

    out, flat = apply_by_length(x, lengths, doubled)
    keep = torch.arange(6) < lengths[:, None]
    assert torch.equal(out, torch.where(keep[..., None], 2 * x, 0.0))
    assert torch.equal(flat, torch.where(keep, x[..., 0], 0.0))
    assert seen == [(1, 1, 1), (2, 2, 1), (1, 6, 1)]


# -------------------------------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize("name", NAMES)
def test_forty_percent_of_the_timesteps_are_masked(name):
    model = tiny(name).train()
    x, mask, _ = padded((50, 37, 22))
    result = objectives.get()(model, Batch(x.float(), mask=mask), seeded())
    hidden = result["valid"]
    assert hidden.all(-1).sum(1).tolist() == [20, 14, 8]
    assert torch.equal(hidden.any(-1), hidden.all(-1))
    assert torch.equal(result["target"][hidden], x.float()[hidden])
    result["loss"].backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("objective", ["masked", "gap"])
@pytest.mark.parametrize("name", NAMES)
def test_no_prediction_sees_its_target(name, objective):
    model = tiny(name, length=30).double().train()
    x = torch.randn(2, 30, 3, dtype=torch.float64, requires_grad=True)
    result = objectives.get(objective)(model, Batch(x), seeded())
    valid = result["valid"]
    (slope,) = torch.autograd.grad(result["prediction"][valid].square().sum(), x)
    assert (slope[valid] == 0).all()
    assert (slope[~valid] != 0).any()
    assert objectives.leak_free(Settings(model=model.config)) is True


@pytest.mark.parametrize("name", [*NAMES[:2], pytest.param("timesnet", marks=pytest.mark.slow)])
def test_masked_sines_can_be_learned_and_states_do_not_collapse(name):
    small = {"kernels": 2} if name == "timesnet" else {}
    model = tiny(name, dim=16, ffn_dim=32, layers=2, **small).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(0)
    first = last = 0.0
    for step in range(60):
        result = objectives.get()(model, Batch(waves(seed=step)), seeded(step))
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        first, last = (float(result["rel"]) if step == 0 else first), float(result["rel"])
    assert last < 0.8 < first
    assert model.eval()(Batch(waves())).hidden[-1].std(1).mean() > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_unsupported_settings_are_refused(name):
    with pytest.raises(UserError, match="both ways") as caught:
        objectives.get("next")(tiny(name), Batch(torch.randn(2, 50, 3)))
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="regular clock") as caught:
        tiny(name, codes=52)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="readout"):
        heads.Classifier(tiny(name), outputs=2, readout="sos")(Batch(torch.randn(2, 50, 3)))


# -------------------------------------------------------------------------------------------------------------- heads, adapters, sizes


@pytest.mark.parametrize("readout", [None, "mean", "last", "max"])
@pytest.mark.parametrize("layers", ["last", "last-two"])
@pytest.mark.parametrize("name", NAMES)
def test_heads_read_every_row_and_never_its_padding(name, layers, readout):
    head = heads.Classifier(tiny(name), outputs=4, readout=readout, layers=layers).eval()
    x, mask, _ = padded()
    x = x.float()
    logits = head(Batch(x, mask=mask))
    assert logits.shape == (5, 4)
    assert torch.isfinite(logits).all()
    # also `mean`: the mean over time is not that of the centred states, which is 0
    assert not torch.allclose(logits[0], logits[1])
    torch.testing.assert_close(
        logits, head(Batch(torch.where(mask[..., None], x, -3.0), mask=mask))
    )
    if readout is None:
        assert head.readout == "flatten"
        assert head.linear.in_features == 50 * head.model.config.dim * (
            2 if layers == "last-two" else 1
        )


@pytest.mark.parametrize("name", NAMES)
def test_other_channels_and_lengths_renew_exactly_the_adapter(name, tmp_path):
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    renewed = model.reset_adapter(channels=5, length=80)
    assert set(renewed) == {key for key in before if key.startswith("adapter.")}
    trunk = {
        key
        for key in before
        if not key.startswith("adapter.") and key not in {"target_scale", "fourier.modes"}
    }
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in trunk)
    x = torch.randn(2, 80, 5)
    model.save(tmp_path)
    assert torch.equal(models.load(tmp_path)(Batch(x)).hidden[-1], model(Batch(x)).hidden[-1])
    assert heads.Classifier(model, outputs=3)(Batch(x)).shape == (2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_channels_one_by_one(name):
    model = tiny(name, channel_independent=True)
    x = torch.randn(2, 50, 3)
    joint = model(Batch(x)).hidden[-1].unflatten(0, (2, 3))
    for channel in range(3):
        torch.testing.assert_close(
            joint[:, channel], model(Batch(x[:, :, [channel]])).hidden[-1], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_two_data_sets_of_other_channels_and_lengths(name):
    model = tiny(name, others=(2,))
    first, second = (
        Batch(torch.randn(2, 50, 3)),
        Batch(torch.randn(2, 40, 2), source=torch.tensor([1, 1])),
    )
    for batch, own, other in ((first, "adapter.", "others."), (second, "others.", "adapter.")):
        model.zero_grad()
        objectives.get()(model, batch, seeded())["loss"].backward()
        touched = {key for key, weight in model.named_parameters() if weight.grad is not None}
        assert {key for key in touched if key.startswith(own)} == {
            key for key, _ in model.named_parameters() if key.startswith(own)
        }
        assert not any(key.startswith(other) for key in touched)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_finite_and_near(name):
    model = tiny(name)
    batch = Batch(torch.randn(2, 49, 3))
    exact = model(batch).hidden[0]
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(batch).hidden
        rough[-1].float().pow(3).mean().backward()
    assert all(torch.isfinite(states).all() for states in rough)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert (rough[0].float() - exact).norm() / exact.norm() < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_with_the_window_and_not_with_its_square(name):
    def kept(length):
        sizes, model = {}, tiny(name, length=3200, dim=16, ffn_dim=16, layers=1).train()
        x = torch.randn(1, length, 3)

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(Batch(x)).hidden[-1].sum()
        del loss
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for at, size in sizes.items() if at not in own)

    assert kept(3200) < 5 * kept(800)


@pytest.mark.parametrize(("preset", "count"), [("18m", 21_263_623), ("7.5m", 7_986_252)])
def test_parameters_of_the_presets(preset, count):
    data = models.default_shape(preset)
    config = build_model_config("autoformer", preset, **data)
    d, ff, v = config.dim, config.ffn_dim, config.channels
    assert (
        models.count_configured(config)
        == config.layers * (4 * (d * d + d) + 2 * d * ff) + 3 * v * d + 2 * d + d * v + v
        == count
    )


@pytest.mark.parametrize("preset", ["18m", "7.5m", "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_a_matched_budget_is_within_five_percent(name, preset):
    data = models.default_shape(preset)
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data))
    base = build_model_config(name, preset, **data)
    found = models.count_configured(
        base.model_copy(update=models.match_parameters(name, preset, **data))
    )
    assert found == pytest.approx(goal, rel=0.05)
