"""TS-TCC: its formulas, augmentations, and the two contrasts against slow loops."""

import math
from functools import partial

import planted
import pytest
import torch
from planted import seeded
from torch import nn
from torch.nn import functional as F

from bitimely_core import heads, models, objectives
from bitimely_core.types import Batch
from bitimely_core.zoo import contrast as comparing
from bitimely_core.zoo.contrast import (
    AugmentationConfig,
    add_jitter,
    count_map_steps,
    nt_xent,
    permute_segments,
    scale_timesteps,
)
from bitimely_core.zoo.ts_tcc import contrast_future

torch.set_num_threads(1)


tiny = partial(planted.tiny, "ts-tcc")


# -------------------------------------------------------------------------------------------------------------- the encoder


@torch.no_grad()
def by_hand(trunk, first, x):
    """The three blocks on [V, T] in eval mode, by torch's own layers: no masks, no adapters."""
    for at, conv in enumerate((first, *trunk.convs)):
        plain = nn.Conv1d(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[0],
            conv.stride,
            conv.kernel_size[0] // 2,
            bias=False,
        ).double()
        plain.weight.copy_(conv.weight)
        y, norm = plain(x[None])[0], trunk.norms[at]
        y = (y - norm.running_mean[:, None]) / (
            norm.running_var[:, None] + 1e-5
        ).sqrt() * norm.weight[:, None] + norm.bias[:, None]
        y = torch.cat((torch.full((len(y), 1), -math.inf, dtype=y.dtype), y.clamp(min=0)), 1)
        y = F.pad(y, (0, y.shape[1] % 2), value=-math.inf)
        x = y.unflatten(1, (-1, 2)).amax(2)
    return x


@pytest.mark.parametrize(
    ("kernel", "stride", "length"), [(25, 3, 100), (8, 1, 50), (8, 2, 33), (7, 3, 8)]
)
def test_it_equals_its_formulas(kernel, stride, length):
    model = tiny(length=length, first_kernel=kernel, first_stride=stride).double()
    for name, buffer in model.named_buffers():
        if "running" in name:
            nn.init.uniform_(buffer, 0.5, 2.0)
    for norm in model.trunk.norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    x = torch.randn(2, length, 3, dtype=torch.float64)
    encoded = model(Batch(x))
    for row in range(2):
        wanted = by_hand(model.trunk, model.adapter.first["time"], x[row].T)
        assert wanted.shape[1] == count_map_steps(length, kernel, stride)
        torch.testing.assert_close(encoded.hidden[-1][row], wanted.T, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(encoded.pooled[row], wanted.T.flatten(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("length", "kernel", "stride", "steps", "ahead"),
    [(3000, 25, 3, 127, 50), (128, 8, 1, 18, 7), (178, 8, 1, 24, 9)],
)
def test_the_map_is_as_long_as_the_papers_data_sets_have_it(length, kernel, stride, steps, ahead):
    """Sleep-EDF 127, HAR 18, Epilepsy 24."""
    model = models.build(
        "ts-tcc", preset="18m", length=length, first_kernel=kernel, first_stride=stride
    )
    assert model.adapter.tokenizer.count(length) == steps
    assert model.pooled_width == 128 * steps
    assert model.config.ahead == ahead  # of the paper: 50, 6, 10


def test_the_parameters_are_counted_by_hand():
    """Sleep-EDF: encoder, context of width 64 with four layers, 50 maps, projection."""
    encoder = 25 * 32 + 2 * 32 + 8 * 32 * 64 + 2 * 64 + 8 * 64 * 128 + 2 * 128
    layer = 4 * 64 + 3 * 64 * 64 + 64 * 64 + 64 + 2 * (64 * 64 + 64)
    context = 128 * 64 + 64 + 64 + 4 * layer
    ahead, projection = 50 * (64 * 128 + 128), 64 * 64 + 64 + 2 * 64 + 64 * 32 + 32
    assert (
        models.count_parameters(models.build("ts-tcc", preset="18m"))
        == encoder + context + ahead + projection
    )


def test_other_lengths_give_other_vectors_and_survive_saving(tmp_path):
    model = tiny(length=300)
    assert model.reset_adapter(channels=3, length=20) == []
    assert model(Batch(torch.randn(2, 20, 3))).pooled.shape == (2, model.pooled_width)
    model.save(tmp_path)
    # though fewer steps are left than it predicts
    assert models.load(tmp_path).pooled_width == model.pooled_width
    assert torch.isfinite(
        objectives.get()(model.train(), Batch(torch.randn(4, 20, 3)), seeded())["loss"]
    )


def test_the_context_reads_the_past_alone_and_no_order():
    model = tiny(length=200).double()
    z = torch.randn(2, 12, 64, dtype=torch.float64)
    real = torch.arange(12) < torch.tensor([[12], [5]])
    torch.testing.assert_close(model.context(z, real)[1:], model.context(z[1:, :5]))
    torch.testing.assert_close(model.context(z), model.context(z.flip(1)))


def test_attention_of_the_context_is_divided_by_the_full_width():
    layer = tiny().context.layers[0].double().eval()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    y = layer.norm_mix(x)
    q, k, v = (y @ layer.qkv.weight.T).chunk(3, -1)
    out = []
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        weights = (q[0, :, part] @ k[0, :, part].T / math.sqrt(32)).softmax(-1)
        out.append(weights @ v[0, :, part])
    mixed = x + torch.cat(out, -1) @ layer.merge.weight.T + layer.merge.bias
    inner = (layer.norm_ffn(mixed) @ layer.first.weight.T + layer.first.bias).clamp(min=0)
    torch.testing.assert_close(
        layer(x, None)[0], mixed + inner @ layer.out.weight.T + layer.out.bias
    )


# -------------------------------------------------------------------------------------------------------------- augmentations


def test_noise_has_its_size_and_every_value_its_own():
    x = torch.randn(8, 500, 3)
    added = add_jitter(Batch(x), 0.7, seeded()).values - x
    assert float(added.std()) == pytest.approx(0.7, rel=0.03)
    assert float(added.mean()) == pytest.approx(0.0, abs=0.03)
    assert abs(float(torch.corrcoef(added.flatten(0, 1).T)[0, 1])) < 0.05
    assert torch.equal(add_jitter(Batch(x), 0.0).values, x)


def test_scaling_is_around_two_and_the_same_for_all_channels():
    x = torch.randn(8, 500, 3)
    factor = scale_timesteps(Batch(x), 1.1, seeded()).values / x
    torch.testing.assert_close(factor, factor[..., :1].expand_as(factor), rtol=1e-3, atol=1e-3)
    assert float(factor[..., 0].mean()) == pytest.approx(2.0, abs=0.07)
    assert float(factor[..., 0].std()) == pytest.approx(1.1, rel=0.04)


def test_permutation_moves_segments_and_keeps_channels_aligned():
    x = torch.arange(60.0)[None, :, None] * torch.tensor([1.0, 1000.0]) + 1
    pieces = []
    for seed in range(400):
        before = x.clone()
        moved = permute_segments(Batch(x), 8, seeded(seed)).values[0]
        assert torch.equal(x, before)
        torch.testing.assert_close((moved[:, 1] - 1) / 1000, moved[:, 0] - 1)
        assert sorted(moved[:, 0].tolist()) == x[0, :, 0].tolist()
        pieces.append(1 + int((moved[1:, 0] != moved[:-1, 0] + 1).sum()))
    assert max(pieces) <= 7
    assert pieces.count(1) > 400 / 7 * 0.6  # one piece, and several that came to lie as they were
    assert len(set(pieces)) == 7


def test_padding_stays_where_it_is_and_missing_samples_go_with_their_values():
    x = torch.arange(1.0, 31.0)[None, :, None].repeat(2, 1, 1)
    mask = torch.ones(2, 30, 1, dtype=torch.bool)
    mask[0, 3:6] = False
    mask[1, 12:] = False
    out = permute_segments(Batch(x, mask=mask), 8, seeded(3))
    assert set(out.values[0, ~out.mask[0, :, 0], 0].tolist()) == {4.0, 5.0, 6.0}
    assert out.mask[1, :12].all()
    assert not out.mask[1, 12:].any()
    assert sorted(out.values[1, :12, 0].tolist()) == list(range(1, 13))
    for length in (1, 2):  # fewer samples than pieces
        short = permute_segments(Batch(x[:, :length]), 8, seeded(0)).values
        assert sorted(short[0, :, 0].tolist()) == list(range(1, length + 1))


def test_rows_are_drawn_one_by_one():
    x = torch.randn(4, 40, 2)
    assert torch.equal(
        permute_segments(Batch(x), 8, seeded()).values[0],
        permute_segments(Batch(x[:1]), 8, seeded()).values[0],
    )


# -------------------------------------------------------------------------------------------------------------- contrasts


@pytest.mark.parametrize("block", [2**22, 5])
def test_nt_xent_equals_its_formula(block, monkeypatch):
    """Also as cross-entropy on the matrix of cosines with -inf on the diagonal."""
    monkeypatch.setattr(comparing, "BLOCK", block)
    first, second = (
        torch.randn(5, 7, dtype=torch.float64, generator=seeded(s)) * 3 for s in (0, 1)
    )
    both = [row.tolist() for row in (*first, *second)]

    def cosine(a, b):
        return sum(p * q for p, q in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    wanted = 0.0
    for i, row in enumerate(both):
        scores = [math.exp(cosine(row, other) / 0.2) for other in both]
        wanted -= math.log(scores[(i + 5) % 10] / (sum(scores) - scores[i])) / 10
    assert float(nt_xent(first, second)) == pytest.approx(wanted, rel=1e-12)
    unit = F.normalize(torch.cat((first, second)), dim=-1)
    matrix = (unit @ unit.T / 0.2).fill_diagonal_(-torch.inf)
    assert float(nt_xent(first, second)) == pytest.approx(
        float(F.cross_entropy(matrix, torch.arange(10).roll(5))), rel=1e-12
    )
    # cosines: sizes do not matter
    torch.testing.assert_close(nt_xent(first * 4, second), nt_xent(first, second))
    torch.testing.assert_close(nt_xent(second, first), nt_xent(first, second))


def test_the_future_is_found_among_the_rows():
    future, predicted = (
        torch.randn(4, 3, 6, dtype=torch.float64, generator=seeded(s)) for s in (0, 1)
    )
    there = torch.ones(4, 3, dtype=torch.bool)
    there[1, 2] = there[3, 1:] = False
    for mask in (None, there):
        terms = []
        for i in range(4):
            for k in range(3):
                if mask is None or mask[i, k]:
                    scores = [float(future[i, k] @ predicted[j, k]) for j in range(4)]
                    terms.append(math.log(sum(math.exp(s) for s in scores)) - scores[i])
        assert float(contrast_future(future, predicted, mask)) == pytest.approx(
            sum(terms) / len(terms), rel=1e-12
        )


def test_the_loss_has_its_weights_and_reads_past_and_future_of_different_views(monkeypatch):
    """Weights 1 and 0.7; each view's past predicts the other view's future, step by step."""
    from bitimely_core.zoo import ts_tcc as own

    calls = []
    monkeypatch.setattr(
        own,
        "contrast_future",
        lambda future, predicted, there=None: (
            calls.append((future, predicted)) or torch.tensor(2.0)
        ),
    )
    monkeypatch.setattr(comparing, "nt_xent", lambda a, b: torch.tensor(3.0))
    model = tiny(length=200, ahead=5)
    seen, maps = [], []
    model.context.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.trunk.register_forward_hook(
        lambda module, args, out: maps.append(F.normalize(out, dim=-1))
    )
    result = objectives.get("ts-tcc")(model, Batch(torch.randn(3, 200, 3)), seeded())
    assert float(result["loss"]) == pytest.approx(2 * 2.0 + 0.7 * 3.0)
    for past, (future, predicted), (mine, other) in zip(
        seen, calls, (maps, maps[::-1]), strict=True
    ):
        now = past.shape[1]
        assert torch.equal(past, mine[:, :now])
        assert torch.equal(future, other[:, now : now + 5])
        assert predicted.shape == (3, 5, 64)


def test_one_vector_for_everything_has_rel_1():
    model = tiny(length=200)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    result = objectives.get("ts-tcc")(model, Batch(torch.randn(6, 200, 3)), seeded())
    assert float(result["rel"]) == pytest.approx(1.0)
    assert float(result["loss"].detach()) == pytest.approx(2 * math.log(6) + 0.7 * math.log(11))


def test_the_numbers_are_those_of_the_settings(monkeypatch):
    arguments = {}
    for name in ("scale_timesteps", "permute_segments", "add_jitter"):
        plain = getattr(comparing, name)

        def record(batch, number, generator, name=name, plain=plain):
            arguments[name] = number
            return plain(batch, number, generator)

        monkeypatch.setattr(comparing, name, record)
    ask = objectives.get(AugmentationConfig(name="ts-tcc", jitter=2.0, scaling=1.5, segments=12))
    ask(tiny(), Batch(torch.randn(3, 50, 3)), seeded())
    assert arguments == {"scale_timesteps": 1.5, "permute_segments": 12, "add_jitter": 2.0}


def test_batches_shorter_than_the_windows_have_vectors_of_the_same_width():
    model = tiny().double()
    x = torch.randn(2, 40, 3, dtype=torch.float64)
    encoded = model(Batch(x))
    flat = encoded.hidden[-1].flatten(1)
    assert encoded.pooled.shape == (2, model.pooled_width)
    assert torch.equal(encoded.pooled[:, : flat.shape[1]], flat)
    assert not encoded.pooled[:, flat.shape[1] :].any()
    assert heads.Classifier(model, outputs=2).double()(Batch(x)).shape == (2, 2)
