"""TimesNet: periods that were planted, its block by the definition, its size."""

import cmath
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitimely_core import models
from bitimely_core.config import build_model_config, load_preset
from bitimely_core.errors import UserError
from bitimely_core.types import Batch
from bitimely_core.zoo.timesnet import (
    InceptionBlock,
    TimesBlock,
    TimesNetConfig,
    count_block_parameters,
    find_frequencies,
)

torch.set_num_threads(1)


def tiny(**options):
    torch.manual_seed(0)
    return models.build(
        "timesnet", **{"preset": "tiny", "channels": 3, "length": 50, "kernels": 3, **options}
    ).eval()


def lively(module):
    torch.manual_seed(1)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.2)
    return module.double().requires_grad_(False)


# -------------------------------------------------------------------------------------------------------------- periods


def test_planted_periods_are_found_for_each_row():
    """Two sines a row, at integer numbers of cycles; the larger one first, and the level (frequency
    0) never.
    """
    t = torch.arange(120, dtype=torch.float64)
    planted = [(5, 24), (30, 8), (7, 2)]
    rows = [
        100 + 2 * torch.sin(2 * math.pi * a * t / 120) + torch.sin(2 * math.pi * b * t / 120 + 1)
        for a, b in planted
    ]
    x = torch.stack(rows)[..., None].expand(-1, -1, 4)
    frequencies, weights = find_frequencies(x, 2)
    assert frequencies.tolist() == [list(pair) for pair in planted]
    # amplitudes of sines are half of their heights times the length
    torch.testing.assert_close(
        weights,
        torch.tensor([120.0, 60.0], dtype=torch.float64).softmax(0).expand(3, 2),
        rtol=1e-6,
        atol=1e-30,
    )


def amplitude(x):
    """Mean over the width of |DFT| by its definition, [n // 2 + 1]."""
    n = len(x)
    return [
        sum(
            abs(sum(cmath.exp(-2j * math.pi * f * t / n) * float(x[t, d]) for t in range(n)))
            for d in range(x.shape[1])
        )
        / x.shape[1]
        for f in range(n // 2 + 1)
    ]


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("n", [24, 25, 5, 2, 1])
def test_frequencies_are_the_strongest_by_definition(n, per_sample):
    torch.manual_seed(0)
    x = torch.randn(3, n, 2, dtype=torch.float64) * 0.2
    frequencies, weights = find_frequencies(x, 3, per_sample=per_sample)
    of_row = [amplitude(row) for row in x]
    for row in range(3):
        ranked = of_row[row] if per_sample else [sum(of) / 3 for of in zip(*of_row, strict=True)]
        wanted = sorted(range(1, n // 2 + 1), key=lambda f: -ranked[f])[:3] or [1]
        assert frequencies[row].tolist() == wanted
        exps = [math.exp(of_row[row][f]) if f < len(of_row[row]) else 1.0 for f in wanted]
        torch.testing.assert_close(
            weights[row], torch.tensor([e / sum(exps) for e in exps], dtype=torch.float64)
        )


# -------------------------------------------------------------------------------------------------------------- the block


def inception(module, image):
    """Mean of the convolutions one by one."""
    kernels = [
        F.conv2d(image, weight, bias, padding=i)
        for i, (weight, bias) in enumerate(zip(module.weights, module.biases, strict=True))
    ]
    return torch.stack(kernels).mean(0)


def test_one_convolution_is_the_mean_of_all():
    module = lively(InceptionBlock(3, 5, 6))
    image = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    torch.testing.assert_close(
        F.conv2d(image, *module.merge_kernels(), padding="same"), inception(module, image)
    )
    assert [tuple(w.shape[2:]) for w in module.weights] == [
        (1, 1),
        (3, 3),
        (5, 5),
        (7, 7),
        (9, 9),
        (11, 11),
    ]


def by_hand(block, x, frequencies, weights):
    """One row [n, D] through the definition: every period by itself, equal ones too."""
    n, out = len(x), x.clone()
    for f, w in zip(frequencies.tolist(), weights.tolist(), strict=True):
        period = n // f
        rows = -(-n // period)
        image = torch.zeros(rows, period, x.shape[1], dtype=torch.float64)
        for t in range(n):
            image[t // period, t % period] = x[t]
        y = inception(block.narrow, F.gelu(inception(block.widen, image.permute(2, 0, 1)[None])))[0]
        for t in range(n):
            out[t] = out[t] + w * y[:, t // period, t % period]
    return out


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("n", [50, 47, 6, 1])
def test_the_block_equals_its_definition(n, per_sample):
    config = build_model_config(
        "timesnet", "tiny", dim=4, ffn_dim=6, kernels=3, top_periods=5, per_sample=per_sample
    )
    block = lively(TimesBlock(config))
    x = 0.3 * torch.randn(3, n, 4, dtype=torch.float64)
    frequencies, weights = find_frequencies(x, 5, per_sample=per_sample)
    out = block(x)
    for row in range(3):
        torch.testing.assert_close(
            out[row], by_hand(block, x[row], frequencies[row], weights[row]), rtol=1e-9, atol=1e-9
        )


def test_the_weights_of_the_periods_learn():
    """The choice of periods has no slope, their weights have."""
    block = lively(TimesBlock(build_model_config("timesnet", "tiny", dim=4, ffn_dim=4, kernels=2)))
    x = 0.1 * torch.randn(1, 20, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(block, x.requires_grad_(), atol=1e-6)


def test_the_model_is_blocks_with_one_norm():
    model = lively(tiny())
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    hidden = model(Batch(x)).hidden
    weight = model.adapter.steps.weight
    for row in range(2):
        y = torch.stack(
            [sum(weight[:, :, j] @ x[row, (t + j - 1) % 50] for j in range(3)) for t in range(50)]
        )
        for t in range(50):
            for i in range(0, 16, 2):
                y[t, i] += math.sin(t / 10_000 ** (i / 16))
                y[t, i + 1] += math.cos(t / 10_000 ** (i / 16))
        for block, ours in zip(model.layers, hidden, strict=True):
            frequencies, weights = find_frequencies(y[None], 3)
            y = by_hand(block, y, frequencies[0], weights[0])
            y = (y - y.mean(-1, keepdim=True)) / (
                y.var(-1, unbiased=False, keepdim=True) + 1e-5
            ).sqrt()
            y = y * model.layer_norm.weight + model.layer_norm.bias
            torch.testing.assert_close(ours[row], y, rtol=1e-8, atol=1e-8)


def test_periods_of_a_batch_make_rows_depend_on_each_other():
    """The reference's choice, supported and off by default."""
    x = 20 * torch.randn(8, 50, 3)  # the positions alone have common periods
    for per_sample in (True, False):
        model = tiny(per_sample=per_sample)
        together, alone = model(Batch(x)).hidden[-1][:1], model(Batch(x[:1])).hidden[-1]
        assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5) is per_sample


# -------------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("name", "count"), [("18m", 18_751_367), ("7.5m", 7_327_452), ("7.5m-regression", 7_327_452)]
)
def test_parameters_of_the_presets(name, count):
    config = build_model_config("timesnet", name, **models.default_shape(name))
    d, ff, v = config.dim, config.ffn_dim, config.channels
    blocks = config.layers * (2 * 286 * d * ff + 6 * (d + ff))
    assert count_block_parameters(config) == blocks
    assert models.count_configured(config) == blocks + 3 * v * d + 2 * d + d * v + v == count


@pytest.mark.parametrize(("name", "millions"), [("18m", 4049), ("7.5m", 1518)])
def test_the_widths_of_the_table_are_refused_with_their_size(name, millions):
    table = {key: load_preset(name)["attention"][key] for key in ("layers", "dim", "ffn_dim")}
    assert round(count_block_parameters(TimesNetConfig(name="timesnet", **table)) / 1e6) == millions
    with pytest.raises(UserError, match=f"{millions:,} million parameters") as caught:
        models.build("timesnet", preset=name, **table)
    assert caught.value.exit_code == 2
    assert "--budget matched" in caught.value.finding.hint
