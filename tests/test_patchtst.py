"""PatchTST: each channel by itself, RevIN, patches, post-norm layers with batch norm; what is
masked and what is compared.
"""

import math
import warnings
from functools import partial

import numpy as np
import planted
import pytest
import torch
from planted import lively, seeded
from torch.nn import functional as F

from bitimely_core import heads, models, objectives
from bitimely_core.analyses import leakage as leaking
from bitimely_core.config import ObjectiveConfig, Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.insight import attention_maps as looking
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.types import Batch
from bitimely_core.zoo.patchtst import TokenNorm, encode_sinusoid

torch.set_num_threads(1)


tiny = partial(planted.tiny, "patchtst")


# -------------------------------------------------------------------------------------------------------------- formulas


def standardise(series):
    """RevIN by hand."""
    mean = sum(series) / len(series)
    variance = sum((v - mean) ** 2 for v in series) / len(series)
    return [(v - mean) / math.sqrt(variance + 1e-5) for v in series]


@torch.no_grad()
def by_hand(model, series):
    """One channel of one window through the formulas, eval mode: list of T numbers -> states of
    each layer [N, D].
    """
    size, length = model.config.patch, len(series)
    count = (max(length, size) - size) // size + 1
    series = standardise(series)[length - size * count :]  # the first samples are cropped
    linear = model.adapter.embedding
    patches = torch.tensor(
        [series[n * size : (n + 1) * size] for n in range(count)], dtype=torch.float64
    )
    x = patches @ linear.weight.T + linear.bias + model.positions[:count]
    states, width = [], model.config.dim // model.config.heads

    def normed(norm, z):
        norm = norm.batch
        return (z - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias

    for layer in model.layers:
        q, k, v = (x @ layer.mix.qkv.weight.T + layer.mix.qkv.bias).chunk(3, -1)
        out = torch.zeros_like(x)
        for h in range(model.config.heads):
            part = slice(h * width, (h + 1) * width)
            for n in range(count):
                weights = [
                    math.exp(float(q[n, part] @ k[m, part]) / math.sqrt(width))
                    for m in range(count)
                ]
                out[n, part] = sum(w * v[m, part] for m, w in enumerate(weights)) / sum(weights)
        x = normed(layer.norm_mix, x + out @ layer.mix.out.weight.T + layer.mix.out.bias)
        inner = x @ layer.first.weight.T + layer.first.bias
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = normed(layer.norm_ffn, x + inner @ layer.out.weight.T + layer.out.bias)
        states.append(x)
    return states


@pytest.mark.parametrize("length", [50, 48, 8])
def test_it_equals_its_formulas_channel_by_channel(length):
    model = lively(tiny(length=length, layers=2))
    x = torch.randn(2, length, 3, dtype=torch.float64) * 5 + 3
    hidden = model(Batch(x)).hidden
    for row in range(2):
        for channel in range(3):
            for ours, wanted in zip(
                hidden, by_hand(model, x[row, :, channel].tolist()), strict=True
            ):
                torch.testing.assert_close(
                    ours[3 * row + channel], wanted.detach(), rtol=1e-9, atol=1e-9
                )


def test_maps_are_softmax_weights_of_each_channel():
    model = tiny()
    batch = Batch(torch.randn(2, 50, 3))
    encoded = model(batch, attention=True)
    torch.testing.assert_close(encoded.hidden[-1], model(batch).hidden[-1], rtol=1e-5, atol=1e-6)
    assert len(encoded.attention) == 4
    for map_ in encoded.attention:
        assert map_.shape == (6, 4, 6, 6)
        assert (map_ >= 0).all()
        torch.testing.assert_close(map_.sum(-1), torch.ones(6, 4, 6))


def test_analyses_see_the_mean_map_over_the_channels():
    model = tiny().double()
    batch = Batch(torch.randn(1, 50, 3))
    found = looking.compute_mixings(model, batch)
    wanted = model(Batch(batch.values.double()), attention=True).attention
    np.testing.assert_allclose(found[-1].map, wanted[-1].mean(0).detach().numpy(), rtol=1e-12)
    assert found[-1].direction == "both"
    one = looking.compute_mixings(model, Batch(batch.values[:, :, :1]))
    assert one[-1].queries.shape == (4, 6, 16)
    logits = torch.from_numpy(one[-1].queries @ one[-1].keys.transpose(0, 2, 1))
    np.testing.assert_allclose(logits.softmax(-1).numpy(), one[-1].map, rtol=1e-9)


def test_batch_norm_pools_rows_and_real_tokens():
    torch.manual_seed(0)
    norm, x = TokenNorm(4).train(), torch.randn(3, 5, 4)
    real = torch.arange(5) < torch.tensor([[5], [3], [1]])
    y = norm(torch.where(real[..., None], x, 1e6), real)
    values = torch.cat([x[0], x[1, :3], x[2, :1]])
    torch.testing.assert_close(norm.batch.running_mean, 0.1 * values.mean(0))
    torch.testing.assert_close(norm.batch.running_var, 0.9 + 0.1 * values.var(0))
    wanted = (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(y[real], wanted, rtol=1e-4, atol=1e-5)
    assert (y[~real] == 0).all()
    torch.testing.assert_close(
        TokenNorm(4).train()(x, None).flatten(0, 1).mean(0), torch.zeros(4), atol=1e-6, rtol=0
    )


def test_one_token_alone_can_be_trained_on():
    """One value a feature has no spread: the running statistics stand in, and stay."""
    norm = TokenNorm(4).train()
    x = torch.randn(1, 1, 4)
    torch.testing.assert_close(norm(x, None), x / math.sqrt(1 + 1e-5))
    assert (norm.batch.running_mean == 0).all()


# -------------------------------------------------------------------------------------------------------------- RevIN, padding, missing samples


def test_revin_leaves_missing_samples_out():
    model = tiny()
    x, mask = torch.randn(2, 50, 3) * 4 + 2, torch.rand(2, 50, 3) > 0.3
    mask[0, :, 1] = False  # a channel that was never observed
    mask[:, -1, [0, 2]] = True
    found = model.standardise(
        model.expand_channels(Batch(torch.where(mask, x, torch.nan), mask=mask))
    ).values
    for row in range(2):
        for channel in range(3):
            seen = mask[row, :, channel]
            wanted = torch.zeros(50)
            if seen.any():
                wanted[seen] = torch.tensor(standardise(x[row, seen, channel].tolist()))
            torch.testing.assert_close(found[3 * row + channel, :, 0], wanted, rtol=1e-5, atol=1e-5)


def test_level_and_size_of_a_channel_are_lost_with_revin_only():
    x, loud = torch.randn(2, 50, 3), torch.tensor([2.0, 30.0, 0.5])
    for revin in (True, False):
        model = tiny(revin=revin)
        a, b = model(Batch(x)).hidden[-1], model(Batch(x * loud + 7)).hidden[-1]
        assert torch.allclose(a, b, atol=1e-2) == revin


@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(training):
    """Content and amount of padding, with the statistics of the batch and without: states, running
    statistics and gradients.
    """
    torch.manual_seed(2)
    lengths, kept = [50, 37, 22], []
    x = torch.randn(3, 50, 2, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    for fill, more in ((0.0, 0), (7.0, 0), (torch.nan, 14)):
        model = lively(tiny(channels=2, length=64)).train(training)
        values = F.pad(
            torch.where(mask[..., None], x, fill), (0, 0, 0, more), value=fill
        ).requires_grad_()
        encoded = model(Batch(values, mask=F.pad(mask, (0, more))))
        real = encoded.mask
        assert real.sum(1).tolist() == [6, 6, 4, 4, 2, 2]
        encoded.hidden[-1][real].square().sum().backward()
        slope = values.grad[:, :50]
        assert (slope[~mask] == 0).all()
        kept.append(
            (
                encoded.hidden[-1][real],
                encoded.pooled,
                slope,
                model.layers[0].norm_mix.batch.running_var.clone(),
            )
        )
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    if not training:
        model = lively(tiny(channels=2, length=64))
        alone = model(Batch(x[1:2, :37])).hidden[-1]
        torch.testing.assert_close(
            model(Batch(x, mask=mask)).hidden[-1][2:4, :4], alone, rtol=1e-10, atol=1e-10
        )


def test_a_window_without_any_sample_is_finite():
    model, mask = tiny(), torch.ones(2, 50, dtype=torch.bool)
    mask[1] = False
    for training in (False, True):
        encoded = model.train(training)(Batch(torch.randn(2, 50, 3), mask=mask), attention=True)
        assert all(
            torch.isfinite(t).all() for t in (*encoded.hidden, *encoded.attention, encoded.pooled)
        )
    assert (encoded.pooled[1] == 0).all()


# -------------------------------------------------------------------------------------------------------------- masked patches


@pytest.mark.parametrize(
    ("length", "patch", "ratio", "masked"),
    [(64, 8, 0.4, 4), (60, 6, 0.9, 9), (42 * 12, 12, 0.4, 17), (48, 8, 0.4, 3)],
)
def test_number_of_kept_patches(length, patch, ratio, masked):
    """floor(N (1 - r)) are kept: of 8 at 40 % four, of 10 at 90 % one, of 42 at 40 %
    twenty-five.
    """
    model = tiny(length=length, patch=patch)
    valid = objectives.get(ratio=ratio)(model, Batch(torch.randn(4, length, 3)), seeded())["valid"]
    assert valid.all(-1).sum(1).tolist() == [masked] * 12
    assert torch.equal(valid.all(-1), valid.any(-1))
    # each channel has its own
    assert len(set(map(tuple, valid.all(-1).tolist()))) > 3 or masked == 9


def test_the_loss_is_the_mean_over_masked_patches_of_standardised_samples():
    model = tiny()
    x = torch.randn(2, 50, 3) * 3 + 1
    result = objectives.get()(model, Batch(x), seeded())
    errors = []
    for row in range(6):
        series = standardise(x[row // 3, :, row % 3].tolist())[2:]
        for n in range(6):
            if result["valid"][row, n].all():
                wanted = torch.tensor(series[8 * n : 8 * n + 8])
                errors.append(
                    float((result["prediction"][row, n].detach() - wanted).square().mean())
                )
    assert len(errors) == int(result["count"]) // 8 == 18
    assert float(result["loss"].detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_masked_values_are_zero_after_revin():
    model = tiny()
    batch = model.expand_channels(Batch(torch.randn(2, 50, 3)))
    chosen = torch.rand(6, 6) < 0.5
    normed = model.standardise(batch).values[:, 2:].clone()
    normed[chosen.repeat_interleave(8, 1)] = 0.0
    plain = tiny(revin=False, length=48)
    torch.testing.assert_close(
        model(batch, hide=chosen).hidden[-1], plain(Batch(normed)).hidden[-1], rtol=1e-5, atol=1e-6
    )


def test_its_stamp_says_what_the_derivative_says():
    def stamp(**options):
        config = build_model_config("patchtst", "tiny", channels=2, **options)
        return objectives.leak_free(Settings(model=config, objective=ObjectiveConfig()))

    assert stamp() == "given window statistics"
    assert stamp(revin=False) is True
    for training in (False, True):
        found = leaking.measure_jacobian(
            tiny(channels=1, length=72, revin=False).config, objectives.get(), 0, training=training
        )
        assert found.target == found.beyond == 0 < found.allowed
    found = leaking.measure_jacobian(
        tiny(channels=1, length=72).config, objectives.get(), 0, training=False
    )
    assert found.target > 0  # the size of the window, by RevIN
    page = leaking.leakage(model="patchtst", steps=0)
    assert (page.summary["stamped"], page.summary["leak_free"], page.summary["contradiction"]) == (
        "given window statistics",
        False,
        False,
    )


@pytest.mark.slow
def test_white_noise_stays_unpredicted():
    assert leaking.train_on_noise(tiny(channels=2).config, objectives.get(), 200).rel > 0.97


@pytest.mark.slow
def test_sines_are_learned():
    torch.manual_seed(0)
    model = models.build("patchtst", preset="tiny", channels=2, length=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw, found = seeded(), []
    for _ in range(150):
        phase, rate = (
            6.3 * torch.rand(16, 1, 2, generator=draw),
            0.2 + 0.1 * torch.rand(16, 1, 2, generator=draw),
        )
        result = objectives.get()(
            model, Batch(torch.sin(phase + rate * torch.arange(64)[None, :, None])), draw
        )
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        found.append(float(result["rel"]))
    assert sum(found[-10:]) / 10 < 0.5 < 0.8 < found[0]


# -------------------------------------------------------------------------------------------------------------- vectors, other data


def test_its_vector_is_the_mean_of_each_channel_side_by_side():
    model = tiny()
    x = torch.randn(2, 50, 3)
    encoded = model(Batch(x))
    wanted = encoded.hidden[-1].reshape(2, 3, 6, 64).mean(2).reshape(2, 192)
    torch.testing.assert_close(encoded.pooled, wanted)
    head = heads.Classifier(model, outputs=5).eval()
    assert head.readout == "native"
    torch.testing.assert_close(head(Batch(x)), wanted @ head.linear.weight.T + head.linear.bias)
    over = heads.compute_vectors(model, Batch(x), "mean")
    torch.testing.assert_close(over, wanted.reshape(2, 3, 64).mean(1))
    mask = torch.ones(2, 50, 3, dtype=torch.bool)
    mask[0, :, 1] = False
    assert (model(Batch(x, mask=mask)).pooled[0, 64:128] == 0).all()


def test_other_channels_and_longer_windows():
    model = tiny()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model.positions.detach().clone()
    # one adapter serves any number of channels
    assert model.reset_adapter(channels=7, length=50) == []
    assert all(
        torch.equal(weight, weights[name])
        for name, weight in model.state_dict().items()
        if name != "target_scale"
    )
    assert heads.Classifier(model, outputs=2).linear.in_features == model.pooled_width == 7 * 64
    with pytest.raises(UserError, match="positions"):
        model(Batch(torch.randn(1, 80, 7)))
    assert model.reset_adapter(channels=7, length=80) == ["positions"]
    assert torch.equal(model.positions[:6], before)
    assert model(Batch(torch.randn(1, 80, 7))).hidden[-1].shape == (7, 10, 64)
    assert model.reset_adapter(channels=7, length=24) == []
    assert len(model.positions) == 3


def test_computed_positions_have_no_longest_window():
    model = tiny(positions="sinusoid")
    assert model.positions is None
    assert model(Batch(torch.randn(1, 400, 3))).hidden[-1].shape == (3, 50, 64)
    wanted = [[math.sin(7.0), math.cos(7.0), math.sin(7 / 10000**0.5), math.cos(7 / 10000**0.5)]]
    torch.testing.assert_close(encode_sinusoid(torch.tensor([7.0]), 4), torch.tensor(wanted))
    assert encode_sinusoid(torch.zeros(2, 3), 5).shape == (2, 3, 5)


def test_a_mixed_pre_training_shares_everything():
    model = tiny(others=(2,))
    assert len(model.others) == 0
    second = Batch(torch.randn(2, 40, 2), source=torch.ones(2, dtype=torch.int64))
    assert objectives.get()(model, second, seeded())["target"].shape == (4, 5, 8)


def test_events_stand_at_their_months():
    model = tiny(tokenizer="codes", codes=52, length=9).double()
    assert not model.config.channel_independent
    codes = torch.randint(FIRST, 52, (2, 9), generator=seeded())
    times = (torch.rand(2, 9, generator=seeded(1)) * 30).cumsum(1).double()
    batch = Batch(codes, times)
    hidden = model(batch).hidden[-1]
    # the order of the rows says nothing, the times do
    order = torch.tensor([8, 1, 2, 3, 4, 5, 6, 7, 0])
    torch.testing.assert_close(
        model(Batch(codes[:, order], times[:, order])).hidden[-1], hidden[:, order]
    )
    assert not torch.allclose(model(Batch(codes, times * 1.5)).hidden[-1], hidden)
    result = objectives.get()(model, batch, seeded())
    assert result["valid"].sum(1).tolist() == [4, 4]  # five of nine are kept
    assert float(result["loss"].detach()) == pytest.approx(math.log(48), rel=0.5)
    assert model(batch).pooled.shape == (2, 64)
    assert model.pooled_width == 64


@pytest.mark.parametrize(
    ("options", "objective", "message"),
    [
        ({}, "masked", "masked-patches"),
        ({"stride": 4}, "masked-patches", "overlap"),
        ({"dim": 66}, "", "multiple of the heads"),
    ],
)
def test_unsupported_settings_are_refused(options, objective, message):
    with pytest.raises(UserError, match=message) as caught:
        objectives.get(objective)(tiny(**options), Batch(torch.randn(2, 50, 3)), seeded())
    assert caught.value.exit_code == 2


def test_without_revin_the_common_objectives_are_supported():
    for name in ("masked", "gap"):
        result = objectives.get(name)(tiny(revin=False), Batch(torch.randn(2, 50, 3)), seeded())
        assert result["valid"].all(-1).sum(1).tolist() == [2] * 6  # floor(0.4 * 6)


# -------------------------------------------------------------------------------------------------------------- the reference


def reference(kind, **options):
    """A model of transformers and ours with the same weights, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip(
            "transformers", reason="transformers is not installed: pip install 'bitimely[parity]'"
        )
        config = transformers.PatchTSTConfig(
            num_input_channels=3,
            context_length=50,
            patch_length=8,
            patch_stride=8,
            d_model=64,
            num_attention_heads=4,
            num_hidden_layers=4,
            ffn_dim=256,
            norm_type="batchnorm",
            pre_norm=False,
            channel_attention=False,
            share_embedding=True,
            scaling="std",
            positional_encoding_type="random",
            positional_dropout=0.0,
            attn_implementation="eager",
            **options,
        )
        torch.manual_seed(0)
        theirs = getattr(transformers, kind)(config)
    theirs = lively(theirs)
    ours, encoder = tiny().double(), getattr(theirs, "model", theirs).encoder

    def copy(target, source):
        target.load_state_dict(source.state_dict())

    with torch.no_grad():
        copy(ours.adapter.embedding, encoder.embedder.input_embedding)
        ours.positions.copy_(encoder.positional_encoder.position_enc)
        for own, other in zip(ours.layers, encoder.layers, strict=True):
            parts = [other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj]
            own.mix.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            own.mix.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
            for target, source in (
                (own.mix.out, other.self_attn.out_proj),
                (own.norm_mix.batch, other.norm_sublayer1.batchnorm),
                (own.norm_ffn.batch, other.norm_sublayer3.batchnorm),
                (own.first, other.ff[0]),
                (own.out, other.ff[3]),
            ):
                copy(target, source)
    return ours.eval(), theirs.eval()


@pytest.mark.parity
def test_states_and_maps_equal_those_of_transformers():
    ours, theirs = reference("PatchTSTModel")
    x = torch.randn(2, 50, 3, dtype=torch.float64) * 4 + 2
    encoded = ours(Batch(x), attention=True)
    found = theirs(past_values=x, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(
        encoded.hidden[-1], found.last_hidden_state.flatten(0, 1), rtol=1e-10, atol=1e-10
    )
    for own, other in zip(encoded.attention, found.attentions, strict=True):
        torch.testing.assert_close(own, other.reshape(own.shape), rtol=1e-10, atol=1e-10)


@pytest.mark.parity
def test_predictions_and_loss_equal_those_of_transformers():
    ours, theirs = reference(
        "PatchTSTForPretraining",
        do_mask_input=True,
        mask_type="random",
        random_mask_ratio=0.4,
        mask_value=0,
    )
    ours.adapter.output["next"].load_state_dict(theirs.head.linear.state_dict())
    x = torch.randn(2, 50, 3, dtype=torch.float64) * 4 + 2
    torch.manual_seed(3)
    found = theirs(past_values=x)
    torch.manual_seed(3)
    hide = theirs.model(past_values=x).mask.flatten(0, 1).bool()
    assert hide.sum(1).tolist() == [3] * 6  # both keep floor(6 * 0.6)
    batch = ours.expand_channels(Batch(x))
    target, valid = ours.targets(batch)
    prediction = ours.output(ours(batch, hide=hide).hidden[-1])
    torch.testing.assert_close(
        prediction, found.prediction_output.flatten(0, 1), rtol=1e-10, atol=1e-10
    )
    part = objectives.LossPart("masked", prediction, target, valid & hide[..., None])
    torch.testing.assert_close(
        objectives.make_result(ours, batch, [part])["loss"], found.loss, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parity
def test_logits_equal_those_of_transformers():
    ours, theirs = reference("PatchTSTForClassification", pooling_type="mean", num_targets=5)
    head = heads.Classifier(ours, outputs=5).double().eval()
    head.linear.load_state_dict(theirs.head.linear.state_dict())
    x = torch.randn(2, 50, 3, dtype=torch.float64) * 4 + 2
    torch.testing.assert_close(
        head(Batch(x)), theirs(past_values=x).prediction_logits, rtol=1e-10, atol=1e-10
    )
