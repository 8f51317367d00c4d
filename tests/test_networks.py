"""ResNet and InceptionTime: the equations at the default sizes with the statistics of a batch,
masks, padding, gaps, and sizes by the length of the windows.
"""

import math

import pytest
import torch
from planted import tiny
from torch.nn import functional as F

from bitimely_core import heads, models
from bitimely_core.errors import UserError
from bitimely_core.types import Batch

torch.set_num_threads(1)
NAMES = ["resnet", "inceptiontime"]


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def draw(*shape, number=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(number))


# ------------------------------------------------------------------- the equations in plain torch


def batch_norm(y, weights, name):
    """By mean and biased variance over rows and steps."""
    mean = y.mean((0, 2), keepdim=True)
    variance = (y - mean).square().mean((0, 2), keepdim=True)
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return (y - mean) / (variance + 1e-5).sqrt() * scale[:, None] + shift[:, None]


def normed(y, weights, name, stride=1):
    kernel = weights[f"{name}.conv.weight"]
    y = F.conv1d(y, kernel, stride=stride, padding=kernel.shape[2] // 2)
    return batch_norm(y, weights, f"{name}.norm")


def compute_resnet(x, weights, stem, blocks):
    y = normed(x, weights, "adapter.stem", stem).relu()
    for at in range(blocks):
        inner = normed(y, weights, f"blocks.{at}.first", 2).relu()
        inner = normed(inner, weights, f"blocks.{at}.second")
        y = (inner + normed(y, weights, f"blocks.{at}.shortcut", 2)).relu()
    return y.mean(2)


def compute_module(x, weights, name):
    narrow = x
    if f"{name}.bottleneck.weight" in weights:
        narrow = F.conv1d(x, weights[f"{name}.bottleneck.weight"])
    parts = [
        F.conv1d(narrow, weights[f"{name}.kernels.{at}.weight"], padding="same") for at in range(3)
    ]
    parts.append(F.conv1d(F.max_pool1d(x, 3, 1, 1), weights[f"{name}.beside.weight"]))
    return batch_norm(torch.cat(parts, 1), weights, f"{name}.norm").relu()


def compute_inceptiontime(x, weights):
    y = start = x
    for at in range(6):
        y = compute_module(y, weights, "adapter.first" if at == 0 else f"later.{at - 1}")
        if at % 3 == 2:
            name = "adapter.shortcut" if at == 2 else "shortcuts.0"
            start = y = (y + normed(start, weights, name)).relu()
    return y.mean(2)


@pytest.mark.parametrize(("length", "stem", "blocks"), [(178, 1, 3), (1000, 2, 4), (2500, 4, 5)])
def test_resnet_is_its_equations(length, stem, blocks):
    model = tiny("resnet", length=length, dropout=0.0).double().train()
    assert (model.config.stem, model.config.blocks) == (stem, blocks)
    x = draw(3, length, 3)
    vector = compute_resnet(x.mT, dict(model.named_parameters()), stem, blocks)
    torch.testing.assert_close(model(Batch(x)).pooled, vector, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("channels", [1, 3])
def test_inceptiontime_is_its_equations(channels):
    """A single channel has no bottleneck in the first module."""
    model = tiny("inceptiontime", channels=channels, length=60).double().train()
    x, weights = draw(3, 60, channels), dict(model.named_parameters())
    assert ("adapter.first.bottleneck.weight" in weights) == (channels > 1)
    vector = compute_inceptiontime(x.mT, weights)
    torch.testing.assert_close(model(Batch(x)).pooled, vector, rtol=1e-10, atol=1e-10)


def test_inceptiontime_has_the_dimensions_of_its_paper():
    """Six modules of 4 x 32 filters with kernels of 40, 20 and 10 on a bottleneck of 32."""
    model = models.build("inceptiontime", preset="18m", channels=1, length=100)
    first = 32 * (40 + 20 + 10) + 32 + 2 * 128
    later = 128 * 32 + 32 * 32 * (40 + 20 + 10) + 128 * 32 + 2 * 128
    shortcuts = 128 + 2 * 128 + 128 * 128 + 2 * 128
    assert models.count_parameters(model) == first + 5 * later + shortcuts


# ---------------------------------------------------------------------------------- masks and gaps


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name, train):
    """Content and amount of padding change neither vectors nor gradients; in training the
    statistics are those of the real samples.
    """
    model = tiny(name, length=50, dropout=0.0).double().train(train)
    lengths = [50, 37, 22]
    masks = [torch.arange(n) < torch.tensor(lengths)[:, None] for n in (50, 71)]
    x = draw(3, 71, 3)
    short = x[:, :50].masked_fill(~masks[0][..., None], 7.0).requires_grad_()
    long = x.masked_fill(~masks[1][..., None], torch.nan).requires_grad_()
    vectors, slopes = [], []
    for values, mask in zip((short, long), masks, strict=True):
        pooled = model(Batch(values, mask=mask)).pooled
        (slope,) = torch.autograd.grad(pooled.square().sum(), values)
        vectors.append(pooled)
        slopes.append(slope[:, :50])
        assert (slope[~mask] == 0).all()
    torch.testing.assert_close(*vectors, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)
    if not train:
        alone = [
            model(Batch(row[None, :n])).pooled[0] for row, n in zip(short, lengths, strict=True)
        ]
        torch.testing.assert_close(vectors[0], torch.stack(alone), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_weighs_as_much_as_was_observed_of_it(name):
    model = tiny(name, length=48).double()
    x, mask = draw(2, 48, 3), torch.rand(2, 48, 3, generator=seeded(1)) > 0.3
    mask[0, 10:30] = False
    mask[1, 41:] = False
    mask[:, 40] = True
    ends = [48 if bool(mask[0, 47].any()) else int(mask[0].any(-1).nonzero().max()) + 1, 41]
    encoded = model(Batch(x, mask=mask))
    stride = math.ceil(48 / encoded.hidden[-1].shape[1])
    for row in range(2):
        weights = [
            mask[row, start : min(start + stride, ends[row])].double().mean()
            for start in range(0, ends[row], stride)
        ]
        steps = encoded.hidden[-1][row, : len(weights)]
        mean = sum(w * step for w, step in zip(weights, steps, strict=True)) / sum(weights)
        torch.testing.assert_close(encoded.pooled[row], mean, rtol=1e-11, atol=1e-11)
    hidden = torch.where(mask, x, torch.nan)
    assert torch.equal(model(Batch(hidden, mask=mask)).pooled, encoded.pooled)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_any_sample_are_zero(name):
    model = tiny(name).train()
    mask = torch.ones(3, 50, dtype=torch.bool)
    mask[1] = False
    pooled = model(Batch(torch.randn(3, 50, 3, generator=seeded()), mask=mask)).pooled
    pooled.square().sum().backward()
    assert (pooled[1] == 0).all()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


# --------------------------------------------------------------------------------- other windows


@pytest.mark.parametrize("name", NAMES)
def test_other_channels_and_lengths(name):
    """Other channels renew what reads them; another length renews nothing."""
    model = tiny(name, length=50)
    later = {key: value.clone() for key, value in model.state_dict().items()}
    assert model.reset_adapter(channels=3, length=700) == []
    renewed = model.reset_adapter(channels=5, length=700)
    assert renewed
    assert all(key.startswith("adapter.") for key in renewed)
    for key, value in model.state_dict().items():
        if not key.startswith(("adapter.", "target_scale")):
            assert torch.equal(value, later[key])
    assert model(Batch(torch.randn(2, 700, 5))).pooled.shape == (2, 64)


@pytest.mark.parametrize("name", NAMES)
def test_one_network_for_each_channel(name):
    model = tiny(name, channel_independent=True)
    head = heads.Classifier(model, outputs=4).eval()
    mask = torch.rand(2, 50, 3, generator=seeded()) > 0.2
    assert head(Batch(torch.randn(2, 50, 3), mask=mask)).shape == (2, 4)


def test_refusals():
    for name, options, field in (
        ("resnet", {"dim": 30}, "model.dim"),
        ("inceptiontime", {"dim": 30}, "model.dim"),
        ("resnet", {"tokenizer": "codes", "codes": 20}, "model.tokenizer"),
        ("resnet", {"blocks": 2}, "blocks"),
    ):
        with pytest.raises(UserError) as caught:
            tiny(name, **options)
        assert (caught.value.exit_code, caught.value.field) == (2, field)
