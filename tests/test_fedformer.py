"""FEDformer: its Fourier block by explicit sums, its random frequencies, rows and windows of other
lengths.
"""

import cmath
import math
from functools import partial

import planted
import pytest
import torch
from torch import nn

from bitimely_core import heads, models
from bitimely_core.config import build_model_config
from bitimely_core.errors import UserError
from bitimely_core.types import Batch
from bitimely_core.zoo.autoformer import SeriesDecomposition
from bitimely_core.zoo.fedformer import FourierMixer

torch.set_num_threads(1)


tiny = partial(planted.tiny, "fedformer")


def config(**options):
    return build_model_config(
        "fedformer", "tiny", **{"dim": 8, "heads": 2, "length": 30, "modes": 6, **options}
    )


def block(**options):
    torch.manual_seed(0)
    made = FourierMixer(config(**options)).double()
    nn.init.normal_(made.weight)
    return made.requires_grad_(False)


def by_sums(made, q, bins, kept=None, slots=None):
    """Each frequency by its definition: coefficients, matrix, and back as a real signal. [n, D] ->
    [H, E, n].
    """
    n, width = len(q), made.weight.shape[2]
    kept = range(len(bins)) if kept is None else kept
    slots = bins if slots is None else slots
    out = torch.zeros(made.heads, width, n, dtype=torch.float64)
    for h in range(made.heads):
        for at, mode, slot in zip(bins, kept, slots, strict=True):
            wave = [cmath.exp(-2j * math.pi * at * t / n) for t in range(n)]
            found = [
                sum(wave[t] * float(q[t, h * width + i]) for t in range(n)) for i in range(width)
            ]
            for o in range(width):
                value = sum(
                    found[i] * complex(*made.weight[:, h, i, o, mode].tolist())
                    for i in range(width)
                )
                for t in range(n):
                    # a real signal holds each frequency twice, but that of its mean (whose
                    # imaginary part it has not)
                    wave_back = cmath.exp(2j * math.pi * slot * t / n)
                    out[h, o, t] += (
                        (1 if slot == 0 else 2)
                        * (value.real if slot == 0 else value * wave_back).real
                    ) / n
    return out


@pytest.mark.parametrize(("n", "select"), [(30, "random"), (30, "lowest"), (31, "random")])
def test_the_block_equals_explicit_sums(n, select):
    made = block(length=n, mode_select=select)
    q = torch.randn(2, n, 8, dtype=torch.float64)
    out = made(q, n)
    for row in range(2):
        wanted = by_sums(made, q[row], made.modes.tolist())
        torch.testing.assert_close(out[row], wanted.flatten(0, 1).T, rtol=1e-9, atol=1e-9)


def test_the_layout_of_the_reference_is_there_to_compare():
    """Mode i in frequency i instead of its own, and [H, E, n] read as [n, D]."""
    made = block(reference_layout=True)
    q = torch.randn(1, 30, 8, dtype=torch.float64)
    wanted = by_sums(made, q[0], made.modes.tolist(), slots=range(6)).reshape(30, 8)
    torch.testing.assert_close(made(q, 30)[0], wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(made(q, 30), block()(q, 30))


def test_only_the_chosen_frequencies_come_out():
    made = block()
    spectrum = (
        torch.fft.rfft(made(torch.randn(1, 30, 8, dtype=torch.float64), 30), dim=1)
        .abs()
        .amax((0, 2))
    )
    assert (spectrum > 1e-9).nonzero().flatten().tolist() == made.modes.tolist()
    # a frequency that was not chosen is not seen
    other = next(f for f in range(15) if f not in made.modes.tolist())
    t = torch.arange(30, dtype=torch.float64)
    assert (
        made(torch.cos(2 * math.pi * other * t / 30)[None, :, None].expand(1, 30, 8), 30)
        .abs()
        .max()
        < 1e-12
    )


def test_modes_are_a_random_subset_or_the_lowest():
    assert block(mode_select="lowest").modes.tolist() == list(range(6))
    found = set()
    for seed in range(40):
        torch.manual_seed(seed)
        modes = FourierMixer(config()).modes.tolist()
        assert len(modes) == 6 == len(set(modes))
        assert modes == sorted(modes)
        found |= set(modes)
    assert found == set(range(15))  # 0 .. T / 2 - 1


def test_no_more_modes_than_half_of_the_window():
    assert tiny(length=50).config.modes == 25
    assert tiny(length=50).fourier.modes.tolist() == list(range(25))
    assert tiny(length=1).config.modes == 1
    assert tiny(length=3000).config.modes == 64


def test_random_frequencies_are_in_the_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = tiny(length=400)
    model.save(tmp_path)
    torch.manual_seed(99)  # a new draw would give others
    again = models.load(tmp_path)
    assert torch.equal(again.fourier.modes, model.fourier.modes)
    x = torch.randn(2, 400, 3)
    assert torch.equal(again(Batch(x)).hidden[-1], model(Batch(x)).hidden[-1])
    head = heads.Classifier(model, outputs=2)
    head.save(tmp_path / "head")
    assert torch.equal(heads.load(tmp_path / "head")(Batch(x)), head.eval()(Batch(x)))


def test_the_block_is_one_for_all_layers():
    model = tiny()
    assert [name for name, _ in model.named_parameters() if "fourier" in name] == ["fourier.weight"]
    assert model.fourier.weight.shape == (2, 4, 16, 16, 25)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 13, 29, 30, 47, 60, 300])
def test_rows_of_any_length_keep_the_physical_frequencies(n):
    made = block()
    bins, kept = made.bins(n, 30)
    most = max(n // 2, 1)
    assert len(bins) == len(kept) == min(6, most)
    assert sorted(set(bins.tolist())) == bins.tolist()
    assert bins.min() >= 0
    assert bins.max() < most
    if n == 30:
        assert torch.equal(bins, made.modes)
    if n >= 30:  # finer bins: nothing can meet
        assert bins.tolist() == [int(mode) * n // 30 for mode in made.modes]
    q = torch.randn(1, n, 8, dtype=torch.float64)
    wanted = by_sums(made, q[0], bins.tolist(), kept.tolist())
    torch.testing.assert_close(made(q, 30)[0], wanted.flatten(0, 1).T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [400, 150, 90, 40])
def test_windows_of_another_length_see_what_padded_rows_of_that_length_saw(length):
    model = tiny(length=200).double()
    x = torch.randn(2, length, 3, dtype=torch.float64)
    before = model(Batch(x)).hidden[-1]
    model.reset_adapter(channels=3, length=length)
    assert (
        model.config.modes
        == len(model.fourier.modes)
        == model.fourier.weight.shape[-1]
        == min(64, length // 2)
    )
    torch.testing.assert_close(model(Batch(x)).hidden[-1], before, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def by_hand(model, row):
    """States of each layer of one row [n, V], in eval mode; the block and the trend are tested
    above.
    """
    n, d = len(row), model.config.dim
    weight = model.adapter.steps.weight
    x = torch.stack(
        [sum(weight[:, :, j] @ row[(t + j - 1) % n] for j in range(3)) for t in range(n)]
    )
    for t in range(n):
        for i in range(0, d, 2):
            angle = t / 10_000 ** (i / d)
            x[t, i] += math.sin(angle)
            x[t, i + 1] += math.cos(angle)
    split, states = SeriesDecomposition((24,)), []
    for query, out, layer in zip(model.queries, model.outs, model.layers, strict=True):
        mixed = (
            model.fourier((x @ query.weight.T + query.bias)[None], n)[0] @ out.weight.T + out.bias
        )
        x = split((x + mixed)[None])[0][0]
        inner = x @ layer.first.weight.T
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = split((x + inner @ layer.second.weight.T)[None])[0][0]
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        y = y * model.centred.weight + model.centred.bias
        states.append(y - y.mean(0))
    return states


def test_it_equals_its_formulas():
    model = tiny().double()
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    hidden = model(Batch(x)).hidden
    for row in range(2):
        for ours, wanted in zip(hidden, by_hand(model, x[row]), strict=True):
            torch.testing.assert_close(ours[row], wanted, rtol=1e-8, atol=1e-8)


def test_several_windows_of_the_trend():
    model = tiny(moving_average=[12, 24])
    assert model.layers[0].split_mix.mix.weight.shape == (2, 1)
    model(Batch(torch.randn(2, 50, 3))).hidden[-1].pow(3).sum().backward()
    assert all(
        torch.isfinite(p.grad).all()
        for name, p in model.named_parameters()
        if "adapter.output" not in name
    )


@pytest.mark.parametrize("preset", ["18m", "7.5m"])
def test_parameters_of_the_presets(preset):
    data = models.default_shape(preset)
    made = build_model_config("fedformer", preset, **data)
    d, ff, v, h = made.dim, made.ffn_dim, made.channels, made.heads
    fourier = 2 * h * (d // h) ** 2 * 64
    assert fourier == {"18m": 2 * 1_179_648, "7.5m": 2 * 663_552}[preset]
    assert (
        models.count_configured(made)
        == made.layers * (2 * (d * d + d) + 2 * d * ff) + fourier + 3 * v * d + 2 * d + d * v + v
    )


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(UserError, match="multiple of the heads") as caught:
        tiny(dim=66)
    assert caught.value.exit_code == 2
