"""TST: timesteps as tokens, post-norm layers with batch norm, runs of masked values."""

import itertools
import math
from functools import partial

import planted
import pytest
import torch
from planted import lively, seeded
from torch import nn
from torch.nn import functional as F

from bitimely_core import heads, models, objectives
from bitimely_core.analyses import leakage as leaking
from bitimely_core.config import Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.types import Batch
from bitimely_core.zoo.tst import MaskedRunsConfig, draw_runs

torch.set_num_threads(1)


tiny = partial(planted.tiny, "tst", length=20)


# -------------------------------------------------------------------------------------------------------------- formulas


@torch.no_grad()
def of_torch(layer, x, padding, training):
    """A layer of ours in the parts of torch: MultiheadAttention, Linear and BatchNorm1d, the norm
    over the real tokens.
    """
    dim, heads_ = x.shape[2], layer.mix.heads
    attend = nn.MultiheadAttention(dim, heads_, batch_first=True).double().eval()
    attend.load_state_dict(
        {
            "in_proj_weight": layer.mix.qkv.weight,
            "in_proj_bias": layer.mix.qkv.bias,
            "out_proj.weight": layer.mix.out.weight,
            "out_proj.bias": layer.mix.out.bias,
        }
    )
    mixed, maps = attend(x, x, x, key_padding_mask=padding, average_attn_weights=False)

    def normed(norm, z):
        own = nn.BatchNorm1d(dim).double().train(training)
        own.load_state_dict(norm.batch.state_dict())
        out = torch.zeros_like(z)
        out[~padding] = own(z[~padding])
        return out

    z = normed(layer.norm_mix, x + mixed)
    return normed(layer.norm_ffn, z + layer.out(F.gelu(layer.first(z)))), maps


@pytest.mark.parametrize("training", [False, True])
def test_it_equals_the_parts_of_torch(training):
    model = lively(tiny(layers=3))
    x = torch.randn(3, 20, 3, dtype=torch.float64, generator=seeded())
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    linear = model.adapter.embedding
    with torch.no_grad():
        state = (x * mask[..., None] @ linear.weight.T + linear.bias) * math.sqrt(
            64
        ) + model.positions
    wanted = []
    for layer in model.layers:
        state, maps = of_torch(layer, state, ~mask, training)
        wanted.append((state, maps))
    encoded = model.train(training)(Batch(x, mask=mask), attention=True)
    for ours, map_, (theirs, their_map) in zip(
        encoded.hidden, encoded.attention, wanted, strict=True
    ):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            map_[mask[:, None].expand(-1, 4, -1)],
            their_map[mask[:, None].expand(-1, 4, -1)],
            rtol=1e-9,
            atol=1e-9,
        )


def test_predictions_and_vectors_read_gelu_of_the_states():
    model = tiny()
    batch = Batch(torch.randn(2, 20, 3), mask=torch.arange(20) < torch.tensor([[20], [12]]))
    states = F.gelu(model(batch).hidden[-1])
    linear = model.adapter.output["next"]
    torch.testing.assert_close(
        model.output(model(batch).hidden[-1]), states @ linear.weight.T + linear.bias
    )
    head = heads.Classifier(model, outputs=4).eval()
    assert head.readout == "flatten"
    assert head.linear.in_features == 20 * 64
    states[1, 12:] = 0.0  # padding is 0 before it is flattened
    torch.testing.assert_close(
        head(batch), states.flatten(1) @ head.linear.weight.T + head.linear.bias
    )


@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(training):
    torch.manual_seed(2)
    x, kept = torch.randn(3, 20, 2, dtype=torch.float64), []
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    for fill, more in ((0.0, 0), (7.0, 0), (torch.nan, 9)):
        model = lively(tiny(channels=2, length=32)).train(training)
        values = F.pad(
            torch.where(mask[..., None], x, fill), (0, 0, 0, more), value=fill
        ).requires_grad_()
        encoded = model(Batch(values, mask=F.pad(mask, (0, more))))
        encoded.hidden[-1][encoded.mask].square().sum().backward()
        slope = values.grad[:, :20]
        assert (slope[~mask] == 0).all()
        kept.append(
            (
                encoded.hidden[-1][encoded.mask],
                slope,
                model.layers[2].norm_ffn.batch.running_mean.clone(),
            )
        )
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_missing_values_are_neither_read_nor_targets():
    model, x, mask = tiny(), torch.randn(2, 20, 3), torch.rand(2, 20, 3, generator=seeded()) > 0.3
    mask[:, -1] = True
    a, b = (model(Batch(values, mask=mask)) for values in (x, torch.where(mask, x, torch.nan)))
    assert torch.equal(a.hidden[-1], b.hidden[-1])
    result = objectives.get()(model, Batch(torch.where(mask, x, torch.nan), mask=mask), seeded())
    assert torch.isfinite(result["loss"])
    assert not result["valid"][~mask].any()


# -------------------------------------------------------------------------------------------------------------- runs of masked values


def machine(count, ratio, mean, draw):
    """The two states step by step: p_stop(masked) = 1 / lm, p_stop(kept) = r / (1 - r) / lm, masked
    at the start with r.
    """
    masked, out = draw() < ratio, []
    for _ in range(count):
        out.append(masked)
        if draw() < (1 / mean if masked else ratio / (1 - ratio) / mean):
            masked = not masked
    return out


def lengths_of(rows):
    """Inner masked and kept runs: those at the ends are cut."""
    inner = [
        [(state, len(list(group))) for state, group in itertools.groupby(row)][1:-1] for row in rows
    ]
    return [[n for row in inner for state, n in row if state == wanted] for wanted in (True, False)]


@pytest.mark.parametrize("ratio", [0.15, 0.4, 0.75])
def test_runs_are_those_of_the_two_state_machine(ratio):
    count, draw = 20_000, seeded(3)
    ours = draw_runs(count, 8, MaskedRunsConfig(ratio=ratio), seeded()).T.tolist()
    slow = [
        machine(count, ratio, 3.0, lambda: float(torch.rand((), generator=draw))) for _ in range(1)
    ]
    assert sum(map(sum, ours)) / count / 8 == pytest.approx(ratio, abs=0.01)
    for mine, theirs, mean in zip(
        lengths_of(ours), lengths_of(slow), (3.0, 3.0 * (1 - ratio) / ratio), strict=True
    ):
        assert sum(mine) / len(mine) == pytest.approx(mean, rel=0.03)
        assert sum(theirs) / len(theirs) == pytest.approx(mean, rel=0.1)
        for n in (1, 2, 5):  # geometric
            assert sum(m == n for m in mine) / len(mine) == pytest.approx(
                (1 - 1 / mean) ** (n - 1) / mean, abs=0.01
            )


def test_every_place_is_masked_as_often():
    config = MaskedRunsConfig(ratio=0.4)
    share = (
        torch.stack([draw_runs(12, 40, config, seeded(seed)) for seed in range(100)])
        .double()
        .mean((0, 2))
    )
    assert share.tolist() == pytest.approx([0.4] * 12, abs=0.03)


def test_a_share_beyond_three_quarters_takes_longer_runs():
    found = draw_runs(20_000, 4, MaskedRunsConfig(ratio=0.9), seeded())
    assert float(found.double().mean()) == pytest.approx(0.9, abs=0.01)
    masked, kept = lengths_of(found.T.tolist())
    assert set(kept) == {1}
    assert sum(masked) / len(masked) == pytest.approx(9.0, rel=0.05)


def test_options_of_the_runs():
    alone = draw_runs(20_000, 3, MaskedRunsConfig(ratio=0.4, bernoulli=True), seeded())
    masked, _ = lengths_of(alone.T.tolist())
    assert sum(masked) / len(masked) == pytest.approx(1 / 0.6, rel=0.03)
    together = objectives.get(concurrent=True)(tiny(), Batch(torch.randn(2, 20, 3)), seeded())[
        "valid"
    ]
    apart = objectives.get()(tiny(), Batch(torch.randn(2, 20, 3)), seeded())["valid"]
    assert (together.any(-1) == together.all(-1)).all()
    assert not (apart.any(-1) == apart.all(-1)).all()
    assert draw_runs(0, 3, MaskedRunsConfig(), seeded()).shape == (0, 3)


def test_masked_values_are_zero_and_the_loss_is_the_mean_over_them():
    model, seen = tiny(), {}
    model.register_forward_pre_hook(lambda module, args: seen.update(values=args[0].values))
    x = torch.randn(3, 20, 3, generator=seeded())
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    result = objectives.get()(model, Batch(x, mask=mask), seeded())
    valid = result["valid"]
    assert torch.equal(seen["values"] == 0, valid)
    assert not valid[~mask].any()
    errors = [
        float((result["prediction"][at] - x[at]).detach().square())
        for at in map(tuple, valid.nonzero().tolist())
    ]
    assert float(result["loss"].detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert int(result["count"]) == len(errors)
    again = objectives.get()(model, Batch(x[:1], mask=mask[:1]), seeded())["valid"]
    assert torch.equal(again[0], valid[0])  # row by row


# -------------------------------------------------------------------------------------------------------------- stamps, events, sizes


def test_it_is_free_of_leaks():
    config = build_model_config("tst", "tiny", channels=2, dropout=0.3)
    assert objectives.leak_free(Settings(model=config)) is True
    for name in ("", "masked"):
        for training in (False, True):
            found = leaking.measure_jacobian(
                leaking._shrink_config(tiny(channels=2, length=40).config),
                objectives.get(name),
                0,
                training=training,
            )
            assert found.target == found.beyond == 0 < found.allowed


@pytest.mark.slow
def test_white_noise_stays_unpredicted():
    assert leaking.train_on_noise(tiny(channels=2).config, objectives.get(), 200).rel > 0.97


@pytest.mark.slow
def test_sines_are_learned():
    torch.manual_seed(0)
    model = models.build(
        "tst", preset="tiny", channels=2, length=24, layers=2, positions="sinusoid"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw, found = seeded(), []
    for _ in range(130):
        phase, rate = (
            6.3 * torch.rand(16, 1, 2, generator=draw),
            0.2 + 0.1 * torch.rand(16, 1, 2, generator=draw),
        )
        result = objectives.get(concurrent=True)(
            model, Batch(torch.sin(phase + rate * torch.arange(24)[None, :, None])), draw
        )
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        found.append(float(result["rel"]))
    assert sum(found[-10:]) / 10 < 0.5 < 0.8 < found[0]


def test_events_are_masked_in_runs():
    model = tiny(tokenizer="codes", codes=52, length=200).train()
    codes = torch.randint(FIRST, 52, (2, 200), generator=seeded())
    times = (torch.rand(2, 200, generator=seeded(1)) * 30).cumsum(1)
    seen = {}
    model.register_forward_pre_hook(lambda module, args: seen.update(values=args[0].values))
    result = objectives.get()(model, Batch(codes, times), seeded())
    assert torch.equal(seen["values"] == 3, result["valid"])  # [MASK]
    masked, _ = lengths_of(result["valid"].tolist())
    assert 2 < sum(masked) / len(masked) < 4.5
    assert float(result["loss"].detach()) == pytest.approx(math.log(48), rel=0.5)


def test_longer_windows_and_other_channels():
    model = tiny()
    assert all(name.startswith("adapter.") for name in model.reset_adapter(channels=5, length=20))
    assert model.reset_adapter(channels=5, length=30) == ["positions"]
    assert model(Batch(torch.randn(1, 30, 5))).hidden[-1].shape == (1, 30, 64)
    with pytest.raises(UserError, match="positions"):
        model(Batch(torch.randn(1, 31, 5)))


def test_timestep_objectives_need_models_that_read_timesteps():
    with pytest.raises(UserError, match="timesteps") as caught:
        objectives.get("masked-runs")(
            models.build("bitimelygpt", preset="tiny"), Batch(torch.randn(1, 40, 1))
        )
    assert caught.value.exit_code == 2
