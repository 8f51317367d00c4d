"""What every registered model must do, and what the grid of stacks must do in particular."""

import pytest
import torch
from planted import tiny
from tiny_models import EVENTS, REGULAR, STACKS, combine, events

from bitimely_core import heads, models, objectives, registry
from bitimely_core.config import build_model_config, find_model_config, list_presets
from bitimely_core.errors import UserError
from bitimely_core.models import layers
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.store.records import write_results
from bitimely_core.types import Batch

torch.set_num_threads(1)


# -------------------------------------------------------------------------------------------------------------- every model


@pytest.mark.parametrize("length", [50, 49, 47, 8])
@pytest.mark.parametrize("name", REGULAR)
def test_shapes_for_lengths_that_nothing_divides(name, length):
    model = tiny(name, length=length)
    encoded = model(Batch(torch.randn(2, length, 3)))
    states = encoded.hidden[-1]
    assert states.shape[0] == (6 if model.config.channel_independent else 2)
    assert states.dtype == torch.float32
    assert all(h.shape[:2] == states.shape[:2] for h in encoded.hidden)
    if encoded.targets is not None:
        specials = 2 if encoded.eos is not None else 0
        assert states.shape[1] == encoded.targets.shape[1] + specials
        assert model.output(states).shape[-1] == encoded.targets.shape[-1]


@pytest.mark.parametrize("name", REGULAR)
def test_rows_do_not_see_each_other(name):
    model = tiny(name).double()
    x = torch.randn(3, 50, 3, dtype=torch.float64)
    together, alone = model(Batch(x)).hidden[-1], model(Batch(x[:1])).hidden[-1]
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REGULAR)
def test_the_same_seed_gives_the_same_model_and_states(name):
    x = torch.randn(2, 50, 3)
    first, second = tiny(name)(Batch(x)), tiny(name)(Batch(x))
    assert torch.equal(first.hidden[-1], second.hidden[-1])


@pytest.mark.parametrize("name", REGULAR)
def test_saved_and_loaded_it_gives_the_same_states(name, tmp_path):
    model = tiny(name)
    model.target_scale.fill_(0.25)
    model.save(tmp_path / "model")
    assert {p.name for p in (tmp_path / "model").iterdir()} - {".lock"} == {
        "model.safetensors",
        "config.json",
        "manifest.json",
    }
    loaded = models.load(tmp_path / "model")
    x = torch.randn(2, 50, 3)
    assert torch.equal(model(Batch(x)).hidden[-1], loaded(Batch(x)).hidden[-1])
    assert loaded.config == model.config
    assert loaded.target_scale == 0.25


@pytest.mark.parametrize("name", REGULAR)
def test_nothing_is_forward_in_time_only_in_name(name):
    """The model's last vector depends on every sample where its directions say so."""
    model = tiny(name).double()
    x = torch.randn(1, 50, 3, dtype=torch.float64, requires_grad=True)
    encoded = model(Batch(x))
    directions = registry.models[name].facts.directions
    if encoded.eos is None or not directions:
        pytest.skip("no [SOS] and [EOS]")
    at = 0 if directions[-1] == "backward" else -1
    (slope,) = torch.autograd.grad(encoded.hidden[-1][:, at].square().sum(), x)
    assert (slope.abs().amax(-1)[0, ::4] > 0).all()


@pytest.mark.parametrize("name", REGULAR)
def test_directions_that_its_layers_cannot_take_are_refused(name):
    model = tiny(name)
    for answer, plan in (("one-way", ["forward"]), ("alternating", ["forward", "backward"])):
        plan = (plan * model.config.layers)[: model.config.layers]
        if answer in registry.models[name].facts.capabilities:
            assert len(model(Batch(torch.randn(2, 50, 3)), directions=plan).hidden) == len(plan)
            continue
        with pytest.raises(UserError) as caught:
            model(Batch(torch.randn(2, 50, 3)), directions=plan)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", REGULAR)
def test_counted_without_memory(name):
    model = tiny(name)
    assert models.count_configured(model.config) == models.count_parameters(model) > 0


# -------------------------------------------------------------------------------------------------------------- padding and missing samples

TOKENIZERS = [
    {"tokenizer": "conv"},
    {"tokenizer": "patch"},
    {"tokenizer": "patch", "crop": "start"},
    {"temporal_conv": "causal"},
]


@pytest.mark.parametrize(("name", "options"), combine(STACKS, TOKENIZERS))
def test_padding_changes_nothing(name, options):
    """Content and amount of padding, and the company of longer rows, change neither states nor
    gradients of the real tokens.
    """
    model = tiny(name, **options).double()
    lengths = [50, 37, 22]
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    padded = torch.full((3, 50, 3), 7.0, dtype=torch.float64)
    mask = torch.zeros(3, 50, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)], mask[i, : len(row)] = row, True
    padded = padded.requires_grad_()
    together = model(Batch(padded, mask=mask))
    loss = torch.tensor(0.0, dtype=torch.float64)
    for i, row in enumerate(rows):
        row = row[None].requires_grad_()
        alone = model(Batch(row))
        count = alone.hidden[-1].shape[1]
        assert together.eos[i] == alone.eos[0] == count - 1
        for a, b in zip(together.hidden, alone.hidden, strict=True):
            torch.testing.assert_close(a[i, :count], b[0], rtol=1e-11, atol=1e-11)
        loss = loss + together.hidden[-1][i, :count].square().sum()
        (wanted,) = torch.autograd.grad(alone.hidden[-1].square().sum(), row)
        (slope,) = torch.autograd.grad(
            together.hidden[-1][i, :count].square().sum(), padded, retain_graph=True
        )
        torch.testing.assert_close(slope[i, : row.shape[1]], wanted[0], rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(loss, padded)
    assert (slope[~mask] == 0).all()


@pytest.mark.parametrize(
    ("name", "options"),
    combine(EVENTS, [{}, {"rotary": "time"}, {"ties": "group"}, {"form": "chunkwise", "chunk": 4}]),
)
def test_padding_changes_nothing_for_events(name, options):
    model = tiny(name, tokenizer="codes", codes=52, length=9, **options).double()
    full = events()._replace(times=events().times.double())
    mask = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    times = torch.where(mask, full.times, torch.nan)
    codes = torch.where(mask, full.values, 51)
    together = model(Batch(codes, times, mask))
    alone = model(Batch(full.values[1:, :6], full.times[1:, :6]))
    for a, b in zip(together.hidden, alone.hidden, strict=True):
        torch.testing.assert_close(a[1:, : b.shape[1]], b, rtol=1e-11, atol=1e-11)
    assert together.mask.tolist() == mask.tolist()
    assert together.eos is None or together.eos.tolist() == [10, 7]
    assert torch.isfinite(torch.stack(together.hidden)).all()


@pytest.mark.parametrize("name", STACKS)
def test_what_was_not_observed_is_neither_read_nor_a_target(name):
    model = tiny(name)
    x = torch.randn(2, 50, 3)
    mask = torch.rand(2, 50, 3) > 0.2
    mask[:, -1] = True
    other = torch.where(mask, x, torch.nan)
    a, b = model(Batch(x, mask=mask)), model(Batch(other, mask=mask))
    assert torch.equal(a.hidden[-1], b.hidden[-1])
    targets, valid = model.targets(Batch(other, mask=mask))
    assert torch.isfinite(targets).all()
    assert torch.equal(valid, mask[:, ::4])


@pytest.mark.parametrize("name", STACKS)
def test_a_row_without_any_sample_is_finite(name):
    model = tiny(name)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1] = False
    encoded = model(Batch(torch.randn(2, 50, 3), mask=mask), attention=True)
    assert encoded.eos.tolist() == [14, 1]
    assert all(torch.isfinite(t).all() for t in (*encoded.hidden, *encoded.attention))


# -------------------------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize(
    ("name", "options"),
    combine(["bitimelygpt", "gpt-baar"], [{}, {"temporal_conv": "causal"}, {"xpos_scale": True}]),
)
def test_each_layer_looks_one_way_only(name, options):
    """Change a token: a forward pass is unchanged to the last bit before it, a backward pass behind
    it; a two-sided one changes everywhere.
    """
    model = tiny(name, **options).double()
    x = torch.randn(1, 50, 3, dtype=torch.float64)
    other = x.clone()
    other[:, 24] += 1.0  # token 6, position 7
    for direction in ("forward", "backward"):
        plan = [direction] * 4
        a, b = model(Batch(x), directions=plan), model(Batch(other), directions=plan)
        for before, after in zip(a.hidden, b.hidden, strict=True):
            changed = (before != after).any(-1)[0]
            wanted = (
                [p >= 7 for p in range(15)]
                if direction == "forward"
                else [p <= 7 for p in range(15)]
            )
            assert changed.tolist() == wanted
    if not options:
        a, b = (
            model(Batch(x), directions=["both"] * 4),
            model(Batch(other), directions=["both"] * 4),
        )
        assert (a.hidden[0] != b.hidden[0]).any(-1).all()


@pytest.mark.parametrize("name", STACKS)
def test_maps_follow_the_direction_and_do_not_change_the_states(name):
    model = tiny(name)
    batch = Batch(torch.randn(2, 50, 3))
    encoded, plain = model(batch, attention=True), model(batch)
    torch.testing.assert_close(encoded.hidden[-1], plain.hidden[-1], rtol=1e-4, atol=1e-5)
    assert plain.attention is None
    for direction, map_ in zip(model.directions, encoded.attention, strict=True):
        assert map_.shape == (2, 4, 15, 15)
        if direction == "forward":
            assert torch.equal(map_, map_.tril())
        if direction == "backward":
            assert torch.equal(map_, map_.triu())
        if registry.models[name].facts.family == "attention":
            assert (map_ >= 0).all()
            torch.testing.assert_close(map_.sum(-1), torch.ones(2, 4, 15))


@pytest.mark.parametrize("name", STACKS)
def test_hidden_tokens_are_no_keys(name):
    model = tiny(name).double()
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    hide = torch.zeros(2, 13, dtype=torch.bool)
    hide[0, [3, 4, 9]] = True
    encoded = model(Batch(x), hide=hide, attention=True)
    keys = torch.stack([m.abs().amax((1, 2)) for m in encoded.attention]).amax(0)  # [B, positions]
    assert (keys[0] == 0).nonzero().flatten().tolist() == [4, 5, 10]
    assert (keys[1] > 0).all()
    other = x.clone()
    other[0, 12:17] += 1.0  # samples of token 3 and the centre of token 4
    changed = model(Batch(other), hide=hide).targets != encoded.targets
    assert changed[0, [3, 4]].all()
    torch.testing.assert_close(
        model(Batch(x), hide=hide).hidden[-1], encoded.hidden[-1], rtol=1e-9, atol=1e-9
    )


def test_odd_layers_are_refused_where_directions_alternate():
    for name in ("bitimelygpt", "gpt-baar"):
        with pytest.raises(UserError) as caught:
            tiny(name, layers=3)
        assert (caught.value.code, caught.value.exit_code, caught.value.field) == (
            "config",
            2,
            "model.layers",
        )
    assert len(tiny("timelygpt", layers=3).layers) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bitimelygpt", {"dim": 66}, "multiple of the heads"),
        ("bitimelygpt", {"dim": 12, "heads": 4}, "even number"),
        ("bitimelygpt", {"value_dim": 66}, "model.value_dim"),
        ("timelybert", {"xpos_scale": True}, "xpos_scale"),
        ("bitimelygpt", {"tokenizer": "codes"}, "model.codes"),
        ("bitimelygpt", {"decay": {"kind": "half-life", "months": [6, 24]}}, "one per head"),
        (
            "bitimelygpt",
            {"decay": {"kind": "half-life", "months": [-3, 1, 6, 24]}},
            "greater than 0",
        ),
        (
            "bitimelygpt",
            {"decay": {"kind": "half-life", "months": [0, 1, 6, 24]}},
            "greater than 0",
        ),
        ("bitimelygpt", {"tokens": "patch"}, "tokenizer"),
    ],
)
def test_incompatible_settings_are_refused(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        tiny(name, **options)
    assert caught.value.exit_code == 2


def test_learned_positions_end():
    model = tiny("gpt")
    with pytest.raises(UserError, match="positions") as caught:
        model(Batch(torch.randn(1, 60, 3)))
    assert caught.value.exit_code == 2


# -------------------------------------------------------------------------------------------------------------- decays, numerics


def test_decay_kinds():
    def gammas(**decay):
        config = build_model_config("bitimelygpt", "tiny", decay=decay)
        return [round(g, 5) for g in layers.log_decays(config).exp().tolist()]

    assert gammas(kind="log") == [0.96875, 0.9876, 0.99508, 0.99805]
    assert gammas(kind="retnet") == [0.96875, 0.98438, 0.99219, 0.99609]
    assert gammas(kind="half-life", months=[6, 24, 96, 384]) == [0.8909, 0.97153, 0.99281, 0.9982]
    eight = build_model_config("bitimelygpt", "18m")
    wanted = [0.96875, 0.97897, 0.98585, 0.99048, 0.99359, 0.99569, 0.9971, 0.99805]
    assert [round(g, 5) for g in layers.log_decays(eight).exp().tolist()] == wanted


def test_learnable_decays_start_as_the_others_and_learn():
    fixed, learnt = tiny("bitimelygpt"), tiny("bitimelygpt", decay={"kind": "learnable"})
    torch.testing.assert_close(
        learnt.layers[0].mix.decays, fixed.layers[0].mix.decays, rtol=1e-4, atol=1e-6
    )
    assert models.count_parameters(learnt) == models.count_parameters(fixed) + 4 * 4
    learnt(Batch(torch.randn(2, 50, 3))).hidden[-1].square().sum().backward()
    assert all((layer.mix.logit.grad != 0).any() for layer in learnt.layers)


def test_gaps_of_ten_thousand_months_are_finite():
    model = tiny("bitimelygpt", tokenizer="codes", codes=52, length=9)
    times = torch.tensor(
        [[0.0, 0.0, 0.03, 10_000.0, 10_000.0, 20_000.0, 20_001.0, 30_000.0, 30_000.0]]
    )
    encoded = model(Batch(torch.randint(FIRST, 52, (1, 9)), times))
    encoded.hidden[-1].square().sum().backward()
    assert torch.isfinite(encoded.hidden[-1]).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_four_thousand_tokens_are_finite():
    model = tiny("bitimelygpt", channels=1, length=16_000, layers=2)
    encoded = model(Batch(torch.randn(1, 16_000, 1)))
    encoded.hidden[-1].square().mean().backward()
    assert encoded.hidden[-1].shape[1] == 4002
    assert torch.isfinite(encoded.hidden[-1]).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("name", "options"),
    combine(STACKS, [{}, {"core_precision": "bf16"}, {"temporal_conv": "causal"}]),
)
def test_bf16_is_finite_and_near(name, options):
    model = tiny(name, length=600, **options)
    batch = Batch(torch.randn(2, 600, 3))
    exact = model(batch).hidden[-1]
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(batch).hidden[-1]
        rough.float().square().mean().backward()
    assert torch.isfinite(rough).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert (rough.float() - exact).norm() / exact.norm() < 0.15


def test_xpos_shrinks_with_distance_in_both_directions():
    """The scale zeta^(|n - m| / 512): with it the far corner of a map is smaller, never larger,
    than without it.
    """
    with_scale, without = tiny("bitimelygpt", xpos_scale=True), tiny("bitimelygpt")
    batch = Batch(torch.randn(1, 50, 3))
    for direction in ("forward", "backward"):
        plan = [direction] * 4
        a = with_scale(batch, directions=plan, attention=True).attention[0]
        b = without(batch, directions=plan, attention=True).attention[0]
        torch.testing.assert_close(
            a.diagonal(dim1=-2, dim2=-1), b.diagonal(dim1=-2, dim2=-1), rtol=1e-5, atol=1e-6
        )
        assert not torch.allclose(a, b)
    with pytest.raises(UserError, match="xpos"):
        with_scale(batch, directions=["both"] * 4)


@pytest.mark.parametrize("name", STACKS)
def test_dropout_acts_in_training_only(name):
    model = tiny(name, dropout=0.5)
    batch = Batch(torch.randn(1, 50, 3))
    assert torch.equal(model(batch).hidden[-1], model(batch).hidden[-1])
    model.train()
    assert not torch.equal(model(batch).hidden[-1], model(batch).hidden[-1])


# -------------------------------------------------------------------------------------------------------------- counts, adapters, files


def closed_form(
    layers, d, v, ff, channels=None, patch=None, codes=None, ffn="glu", conv=False, separate=False
):
    """The counts by formula: block, tokenizer, [SOS] and [EOS], final norm, output."""
    block = (
        2 * d * d
        + 3 * d * v
        + (3 * d * ff + 4 * d if ffn == "glu" else 2 * d * ff + ff + 5 * d)
        + (3 * d * d + 38 * d if conv else 0)
    )
    if codes:
        tokenizer, out = (codes + 1) * d + 4 * d, codes + 1  # with age and sex
    elif patch:
        tokenizer, out = patch * channels * d + d, patch * channels
    else:
        tokenizer, out = 2 * (3 * channels**2 + channels) + channels * d + d, channels
    return layers * block + tokenizer + 2 * d + (2 * d + d * out + out) * (2 if separate else 1)


@pytest.mark.parametrize(
    ("preset", "options", "count"),
    [
        ("18m", {"channels": 7}, 17_224_955),
        ("18m", {"channels": 7, "tokenizer": "patch"}, 17_256_056),
        ("18m", {"channels": 1}, 17_220_809),
        ("18m", {"channels": 7, "ffn": "plain"}, 14_778_875),
        ("18m", {"channels": 7, "temporal_conv": "causal"}, 21_057_275),
        ("18m", {"channels": 7, "ffn": "plain", "temporal_conv": "causal"}, 18_611_195),
        ("7.5m", {"channels": 12}, 6_466_740),
        ("7.5m", {"channels": 4}, 6_462_108),
        ("7.5m", {"channels": 12, "tokenizer": "patch"}, 6_506_256),
        ("7.5m", {"channels": 12, "ffn": "plain"}, 5_550_900),
        ("7.5m-regression", {"channels": 12}, 6_466_740),
        # 47 codes; the class of [EOS] is one more output; age and sex 4 * 144
        ("3m", {"codes": 52}, 1_177_823 + 145 + 576),
        ("3m", {"codes": 52, "ffn": "plain"}, 1_013_663 + 145 + 576),
        ("tiny", {"channels": 7}, None),
        ("tiny", {"channels": 7, "output_heads": "separate"}, None),
    ],
)
def test_parameter_counts_of_the_presets_with_the_paper_s_tokens(preset, options, count):
    options = options if "codes" in options else {"tokenizer": "conv", **options}
    config = build_model_config("bitimelygpt", preset, **options)
    wanted = closed_form(
        config.layers,
        config.dim,
        config.value_dim,
        config.ffn_dim,
        channels=config.channels,
        patch=config.patch if config.tokenizer == "patch" else None,
        codes=None if config.codes is None else config.codes - FIRST,
        ffn=config.ffn,
        conv=config.temporal_conv == "causal",
        separate=config.output_heads == "separate",
    )
    assert models.count_configured(config) == wanted
    assert count is None or wanted == count


def test_gpt_blocks_have_the_counts_of_standard_layers():
    for preset, blocks in (("18m", 12 * 1_774_464), ("7.5m", 8 * 999_072), ("3m", 8 * 250_704)):
        config = build_model_config("gpt", preset, **models.default_shape(preset))
        with torch.device("meta"):
            assert models.count_parameters(models.from_config(config).layers) == blocks


@pytest.mark.parametrize("name", ["gpt", "timelygpt"])
@pytest.mark.parametrize("preset", ["tiny", "7.5m"])
def test_matched_widths_are_the_nearest_multiples_of_the_head_width(name, preset):
    def off(dim):
        scaled = {key: widths[key] * dim // widths["dim"] for key in widths}
        config = build_model_config(name, preset, channels=12, length=500, **scaled)
        return abs(models.count_configured(config) / goal - 1)

    goal = models.count_configured(
        build_model_config("bitimelygpt", preset, channels=12, length=500)
    )
    widths = models.match_parameters(name, preset, channels=12, length=500)
    step = 2 * (4 if preset == "tiny" else 8)
    assert widths["dim"] % step == 0
    assert off(widths["dim"]) <= min(off(widths["dim"] - step), off(widths["dim"] + step))
    assert off(widths["dim"]) < (0.15 if preset == "tiny" else 0.05)


def test_every_preset_has_typical_data():
    assert set(list_presets()) <= set(models.DEFAULT_SHAPES)


@pytest.mark.parametrize("name", STACKS)
def test_other_channels_renew_exactly_the_adapter(name):
    model = tiny(name)
    model.target_scale.fill_(1.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert model.reset_adapter(channels=3, length=50) == []
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    renewed = model.reset_adapter(channels=1, length=30)
    after = model.state_dict()
    assert set(renewed) == {
        key for key, _ in model.named_parameters() if key.startswith("adapter.")
    }
    kept = {
        key
        for key in before
        if not key.startswith("adapter.") and key not in {"target_scale", "positions"}
    }
    assert all(torch.equal(before[key], after[key]) for key in kept)
    assert torch.isnan(model.target_scale)
    assert model(Batch(torch.randn(2, 30, 1))).hidden[-1].shape == (2, 10, 64)
    assert (model.config.channels, model.config.length) == (1, 30)


@pytest.mark.parametrize("name", STACKS)
def test_a_mixed_pre_training_has_one_adapter_a_data_set_and_one_trunk(name, tmp_path):
    model = tiny(name, others=(2,), tokenizer="patch")
    first, second = (
        Batch(torch.randn(2, 50, 3), source=torch.tensor([0, 0])),
        Batch(torch.randn(2, 40, 2), source=torch.tensor([1, 1])),
    )
    for batch, own, other in ((first, "adapter.", "others."), (second, "others.", "adapter.")):
        model.zero_grad()
        objectives.get()(model, batch, torch.Generator().manual_seed(0))["loss"].backward()
        touched = {key for key, weight in model.named_parameters() if weight.grad is not None}
        assert {key for key in touched if key.startswith(own)} == {
            key for key, _ in model.named_parameters() if key.startswith(own)
        }
        assert not any(key.startswith(other) for key in touched)
        assert any(key.startswith("layers.") for key in touched)
    model.save(tmp_path)
    again = models.load(tmp_path)
    again.select_adapter(1)
    model.eval()
    assert torch.equal(again(second._replace(source=None)).hidden[-1], model(second).hidden[-1])
    assert again.config.channels == 2
    assert not any(key.startswith("others.") for key in again.state_dict())


def test_the_scale_of_a_mixed_pre_training_is_the_variance_within_each_set():
    model = tiny("bitimelygpt", tokenizer="patch", others=(2,))
    batches = [
        Batch(torch.randn(4, 48, 3) * 2 + 7, source=torch.zeros(4, dtype=torch.int64)),
        Batch(torch.randn(4, 48, 2) - 7, source=torch.ones(4, dtype=torch.int64)),
    ]
    sums = [
        sum(
            float(dim.var(correction=0)) * dim.numel()
            for dim in model.targets(b)[0].flatten(0, 1).T
        )
        for b in batches
    ]
    assert model.measure(batches) == pytest.approx(sum(sums) / (4 * 48 * 5), rel=1e-5)


@pytest.mark.parametrize("name", STACKS)
def test_channel_independent_reads_each_channel_alone(name):
    model = tiny(name, channel_independent=True).eval()
    x = torch.randn(2, 50, 3)
    joint = model(Batch(x)).hidden[-1]
    alone = [model(Batch(x[:, :, channel : channel + 1])).hidden[-1] for channel in range(3)]
    torch.testing.assert_close(
        joint.reshape(2, 3, *joint.shape[1:]), torch.stack(alone, 1), rtol=1e-4, atol=1e-5
    )
    pooled = heads.compute_vectors(model, Batch(x), "mean")
    torch.testing.assert_close(
        pooled,
        heads.compute_vectors(model, Batch(x[:, :, [2, 0, 1]]), "mean"),
        rtol=1e-4,
        atol=1e-5,
    )
    seen = torch.ones(2, 50, 3, dtype=torch.bool)
    seen[:, :, 2] = False
    wanted = heads.compute_vectors(model, Batch(x[:, :, :2]), "mean")
    torch.testing.assert_close(
        heads.compute_vectors(model, Batch(x, mask=seen), "mean"), wanted, rtol=1e-4, atol=1e-5
    )
    result = objectives.get()(model, Batch(x), torch.Generator().manual_seed(0))
    assert result["target"].shape[0] == 6
    # one adapter serves any number of channels
    assert model.reset_adapter(channels=7, length=50) == []


def test_channels_of_codes_are_refused():
    with pytest.raises(UserError, match="channel_independent"):
        tiny("bitimelygpt", tokenizer="codes", codes=52, channel_independent=True)


def test_longer_windows_continue_learned_positions():
    model = tiny("gpt")
    before = model.positions.detach().clone()
    assert model.reset_adapter(channels=3, length=100) == ["positions"]
    assert torch.equal(model.positions[: len(before)], before)
    assert model(Batch(torch.randn(1, 100, 3))).hidden[-1].shape[1] == 27


def test_other_vocabularies_renew_the_adapter():
    model = tiny("bitimelygpt", tokenizer="codes", codes=52)
    assert model.reset_adapter(channels=3, length=50, codes=20)
    assert model(Batch(torch.randint(FIRST, 20, (1, 6)))).hidden[-1].shape[1] == 8


def test_a_damaged_or_foreign_model_folder_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        models.load(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("not_found", 2)
    tiny("bitimelygpt").save(tmp_path)
    original = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(original[: len(original) // 2])
    with pytest.raises(UserError) as caught:
        models.load(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("integrity", 5)
    (tmp_path / "model.safetensors").write_bytes(original)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"layers":4', '"layers":6'))
    with pytest.raises(UserError, match=r"config\.json: has sha256") as caught:
        models.load(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("integrity", 5)
    write_results(tmp_path, {"config.json": config.replace('"layers":4', '"layers":6').encode()})
    with pytest.raises(UserError, match="is missing") as caught:
        models.load(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("shapes_differ", 5)
    write_results(
        tmp_path,
        {"config.json": config.replace('"format_version":1', '"format_version":99').encode()},
    )
    with pytest.raises(UserError, match="format version"):
        models.load(tmp_path)


@pytest.mark.parametrize("name", sorted(registry.models))
def test_a_model_refuses_the_settings_of_others(name):
    own = find_model_config(name).model_fields
    for other in sorted(registry.models):
        for key, info in find_model_config(other).model_fields.items():
            if key not in own:
                with pytest.raises(UserError, match="unknown key") as caught:
                    build_model_config(name, "tiny", **{key: info.default})
                assert (caught.value.code, caught.value.exit_code, caught.value.field) == (
                    "config",
                    2,
                    key,
                )
                assert other in caught.value.hint


def test_unknown_names_suggest_the_closest():
    with pytest.raises(UserError, match="Did you mean bitimelygpt") as caught:
        models.build("bitimelygtp")
    assert caught.value.exit_code == 2


def test_measured_scale_is_the_variance_around_each_dimension():
    model = tiny("bitimelygpt", tokenizer="patch")
    batches = [
        Batch(torch.randn(4, 50, 3) * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([5.0, 0.0, 0.0]))
        for _ in range(5)
    ]
    targets = torch.cat([model.targets(b)[0].flatten(0, 1) for b in batches])
    valid = torch.cat([model.targets(b)[1].flatten(0, 1) for b in batches])
    wanted = (
        sum(((t[v] - t[v].mean()) ** 2).sum() for t, v in zip(targets.T, valid.T, strict=True))
        / valid.sum()
    )
    assert model.measure(batches) == pytest.approx(float(wanted), rel=1e-4)


def test_measured_scale_of_codes_is_the_unigram_entropy():
    model = tiny("bitimelygpt", tokenizer="codes", codes=52)
    ids = torch.tensor([[5, 5, 6, 7], [5, 6, 0, 0]])
    share = torch.tensor([3, 2, 1]) / 6
    assert model.measure([Batch(ids, mask=ids > 0)]) == pytest.approx(
        float(-(share * share.log()).sum()), rel=1e-6
    )
