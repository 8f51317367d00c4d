"""Tokenizers: shapes, targets, starts, codes, ends of rows."""

import numpy as np
import pytest
import torch
from planted import tiny

from bitimely_core.errors import Reason, UserError
from bitimely_core.models.tokenizers import (
    CodeTokenizer,
    ConvTokenizer,
    PatchTokenizer,
    find_row_ends,
)
from bitimely_core.registry import models
from bitimely_core.types import Batch

torch.set_num_threads(1)


@pytest.mark.parametrize(("length", "tokens"), [(3000, 750), (178, 45), (375, 94), (1, 1), (5, 2)])
def test_conv_tokens_are_a_quarter(length, tokens):
    conv = ConvTokenizer(2)
    out, targets, real = conv(Batch(torch.randn(1, length, 2)))
    assert out.shape == targets.shape == (1, tokens, 2)
    assert real.shape == (1, tokens)
    assert conv.count(length) == tokens


def test_a_conv_token_sees_seven_samples_and_its_target_is_the_centre():
    conv = ConvTokenizer(1).double()
    x = torch.randn(1, 40, 1, dtype=torch.float64, requires_grad=True)
    tokens, targets, _ = conv(Batch(x))
    for n in (0, 4, 9):
        (slope,) = torch.autograd.grad(tokens[0, n, 0], x, retain_graph=True)
        seen = slope[0, :, 0].nonzero().flatten().tolist()
        assert seen == [i for i in range(4 * n - 3, 4 * n + 4) if 0 <= i < 40]
        assert targets[0, n, 0] == x[0, 4 * n, 0]


@pytest.mark.parametrize("channels", [1, 4, 12, 34])
def test_conv_tokens_start_as_the_low_pass_of_their_channel_in_every_draw(channels):
    """Two binomial kernels at stride 2 are (1, 2, 3, 4, 3, 2, 1) / 16 around x[4n]; tokens follow
    it at its size and rise with the level.
    """
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1024, channels))
    kernel = np.array([1, 2, 3, 4, 3, 2, 1]) / 16
    wanted = np.stack([np.convolve(column, kernel, mode="same")[::4] for column in x.T], 1)
    levels = torch.linspace(-0.75, 3, 16)[:, None, None].expand(-1, 16, channels)
    for seed in range(100):
        torch.manual_seed(seed)
        conv = ConvTokenizer(channels)
        with torch.no_grad():
            tokens, rise = (
                conv(Batch(torch.from_numpy(x).float()[None]))[0][0].numpy(),
                conv(Batch(levels))[0][:, 2].diff(dim=0),
            )
        assert min(np.corrcoef(tokens[:, i], wanted[:, i])[0, 1] for i in range(channels)) > 0.85
        assert np.all(np.abs(np.log(tokens.std(0) / wanted.std(0))) < np.log(1.5))
        assert (rise > 0).all()


def test_a_conv_tokenizer_can_be_built_without_values():
    with torch.device("meta"):
        assert {p.device.type for p in ConvTokenizer(3).parameters()} == {"meta"}


@pytest.mark.parametrize("crop", ["pad", "start"])
@pytest.mark.parametrize("length", [16, 17, 23])
def test_patches_are_the_samples(length, crop):
    patch = PatchTokenizer(2, 8, crop=crop)
    x = torch.arange(length * 2, dtype=torch.float32).reshape(1, length, 2)
    tokens, targets, real = patch(Batch(x))
    assert torch.equal(tokens, targets)
    flat = tokens.reshape(-1, 2)
    wanted = (
        x[0, length % 8 :]
        if crop == "start"
        else torch.cat((x[0], x[0, -1:].expand(-length % 8, 2)))
    )
    assert torch.equal(flat, wanted)
    assert real.all()
    observed = patch.find_targets(Batch(x)).reshape(-1, 2)
    assert observed.all(1).tolist() == (
        [True] * len(wanted) if crop == "start" else [True] * length + [False] * (-length % 8)
    )


def test_patch_stride_and_too_short_windows():
    patch = PatchTokenizer(1, 8, stride=4)
    tokens, _, _ = patch(Batch(torch.arange(20.0)[None, :, None]))
    assert tokens[0, :, 0].tolist() == [0, 4, 8, 12]
    with pytest.raises(UserError, match="at least one patch"):
        PatchTokenizer(1, 8, crop="start").count(7)


def test_codes_map_to_classes_without_specials():
    codes = CodeTokenizer(10)
    ids = torch.tensor([[5, 9, 4, 3, 2, 1, 0]])
    tokens, targets, real = codes(Batch(ids, mask=ids > 0))
    assert tokens.tolist() == ids.tolist()
    assert targets.tolist() == [[0, 4, -100, -100, -100, -100, -100]]
    assert real.tolist() == [[True] * 6 + [False]]
    assert (codes.target_width, codes.eos) == (6, 5)
    assert codes.classes[2] == codes.eos


@pytest.mark.parametrize("name", ["conv", "patch", "patch-start"])
def test_erase_takes_exactly_the_chosen_samples(name):
    tokenizer = {
        "conv": ConvTokenizer(2),
        "patch": PatchTokenizer(2, 8),
        "patch-start": PatchTokenizer(2, 8, crop="start"),
    }[name]
    x = torch.randn(2, 35, 2)
    count = tokenizer.count(35)
    chosen = torch.zeros(2, count, dtype=torch.bool)
    chosen[0, 1] = chosen[1, -1] = True
    gone = (tokenizer.erase(Batch(x), chosen).values == 0).all(-1)
    step, start = (4, 0) if name == "conv" else (8, 35 % 8 if name == "patch-start" else 0)
    assert gone[0].nonzero().flatten().tolist() == list(range(start + step, start + 2 * step))
    assert gone[1].nonzero().flatten().tolist() == list(range(start + (count - 1) * step, 35))


def test_row_ends_are_the_last_observed_sample():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert find_row_ends(Batch(torch.zeros(3, 4, 1), mask=mask)).tolist() == [3, 0, 4]
    assert find_row_ends(
        Batch(torch.zeros(3, 4, 2), mask=mask[..., None].expand(-1, -1, 2))
    ).tolist() == [3, 0, 4]


@pytest.mark.parametrize("name", [name for name in models if name != "patchtst"])
@pytest.mark.parametrize(("steps", "channels"), [(24, 2), (48, 1), (48, 6)])
def test_data_of_other_channels_are_refused(name, steps, channels):
    """Also where a whole number of patches could be made of them; patchtst reads each channel by
    itself.
    """
    model = tiny(name, length=48, tokenizer="patch")
    with pytest.raises(UserError, match=rf"{channels}\].*reads \[B, T, 3\]") as caught:
        model(torch.randn(2, steps, channels))
    assert (caught.value.code, caught.value.exit_code) == (Reason.SHAPES_DIFFER, 2)


@pytest.mark.parametrize("name", list(models))
def test_windows_without_samples_are_refused(name):
    with pytest.raises(UserError, match="samples") as caught:
        tiny(name, length=48, tokenizer="patch")(torch.zeros(2, 0, 3))
    assert (caught.value.code, caught.value.exit_code) == (Reason.SHAPES_DIFFER, 2)


@pytest.mark.parametrize(
    "tokenizer",
    [
        ConvTokenizer(3),
        PatchTokenizer(3),
        PatchTokenizer(3, stride=3),
        PatchTokenizer(3, crop="start"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_no_rows_have_no_tokens(tokenizer, masked):
    one = Batch(torch.zeros(1, 48, 3), mask=torch.ones(1, 48, dtype=torch.bool) if masked else None)
    none = one._replace(values=one.values[:0], mask=None if one.mask is None else one.mask[:0])
    for found, wanted in zip(
        (*tokenizer(none), tokenizer.find_targets(none)),
        (*tokenizer(one), tokenizer.find_targets(one)),
        strict=True,
    ):
        assert found.shape == (0, *wanted.shape[1:])


@pytest.mark.parametrize(
    "name", ["bitimelygpt", "gpt", "lstm", "s4", "patchtst", "ts2vec", "timesnet"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int16])
def test_samples_of_any_precision_are_read_as_the_same_numbers(name, dtype):
    """Arrays of numpy are float64; these numbers are exact in all of them."""
    model = tiny(name, length=48)
    x = torch.randint(-3, 4, (2, 48, 3), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        for rows in (x.to(dtype), Batch(x.to(dtype)), {"values": x.to(dtype)}):
            assert torch.equal(model(rows).hidden[-1], model(x).hidden[-1])


@pytest.mark.parametrize("name", ["bitimelygpt", "patchtst", "crt", "tf-c", "ts2vec"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("channels", [False, True])
def test_masks_of_any_type_are_read_as_the_same(name, dtype, channels):
    model, draw = tiny(name, length=48), torch.Generator().manual_seed(0)
    x, mask = torch.randn(2, 48, 3, generator=draw), torch.rand(2, 48, 3, generator=draw) < 0.8
    mask[1, 40:] = False
    mask = mask if channels else mask[..., 0]
    with torch.no_grad():
        found, wanted = (model(Batch(x, mask=one)) for one in (mask.to(dtype), mask))
    assert torch.equal(found.hidden[-1], wanted.hidden[-1])


def test_channels_are_checked_without_a_break_of_the_graph():
    model = torch.compile(PatchTokenizer(3), backend="eager", fullgraph=True)
    tokens, _, _ = model(Batch(torch.randn(2, 24, 3)))
    assert tokens.shape == (2, 3, 24)
