"""Stacks against their formulas, written a second time: attention, retention, the temporal
convolution, starts.
"""

import math

import pytest
import torch
from planted import tiny
from tiny_models import events
from torch import nn
from torch.nn import functional as F

from bitimely_core import models
from bitimely_core.models import layers
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.types import Batch

torch.set_num_threads(1)


def gpt_reference(model, x, directions):
    """GPT-2 in a few lines: pre-norm, fused projections, -inf mask, tanh GELU."""
    maps = []
    for layer, direction in zip(model.layers, directions, strict=True):
        size, heads = x.shape[1], model.config.heads
        y = F.layer_norm(x, x.shape[-1:], layer.norm_mix.weight, layer.norm_mix.bias)
        q, k, v = (y @ layer.mix.qkv.weight.T + layer.mix.qkv.bias).chunk(3, -1)
        split = [t.reshape(len(t), size, heads, -1).transpose(1, 2) for t in (q, k, v)]
        logits = split[0] @ split[1].mT / math.sqrt(split[0].shape[-1])
        shut = torch.ones(size, size, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(shut if direction == "forward" else shut.T, -torch.inf)
        maps.append(logits.exp() / logits.exp().sum(-1, keepdim=True))
        x = (
            x
            + (maps[-1] @ split[2]).transpose(1, 2).flatten(2) @ layer.mix.out.weight.T
            + layer.mix.out.bias
        )
        y = F.layer_norm(x, x.shape[-1:], layer.norm_ffn.weight, layer.norm_ffn.bias)
        y = y @ layer.ffn.first.weight.T + layer.ffn.first.bias
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ layer.ffn.out.weight.T + layer.ffn.out.bias
    return x, maps


@pytest.mark.parametrize("name", ["gpt", "gpt-baar"])
def test_gpt_equals_its_formulas(name):
    model = tiny(name).double()
    for weight in model.parameters():  # biases start at 0: make them count
        nn.init.normal_(weight, std=0.2)
    values = torch.randn(2, 50, 3, dtype=torch.float64)
    tokens = model.adapter.tokenizer(Batch(values))[0]
    embedded = tokens @ model.adapter.embedding.weight.T + model.adapter.embedding.bias
    sos, eos = model.special[:, None, None].expand(-1, 2, 1, -1)
    wanted, maps = gpt_reference(
        model, torch.cat((sos, embedded, eos), 1) + model.positions, model.directions
    )
    encoded = model(Batch(values), attention=True)
    torch.testing.assert_close(encoded.hidden[-1], wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(Batch(values)).hidden[-1], wanted, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(encoded.attention, maps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def retention_reference(model, x, directions, times):
    """The retention block in a few lines: complex rotation, dense decay, a norm a head, gate, gated
    FFN.
    """
    config = model.config
    for layer, direction in zip(model.layers, directions, strict=True):
        mix, count = layer.mix, x.shape[1]
        y = F.layer_norm(x, x.shape[-1:], layer.norm_mix.weight, layer.norm_mix.bias)
        theta = 10000 ** (
            -torch.arange(0, config.dim // config.heads, 2, dtype=torch.float64)
            / (config.dim // config.heads)
        )
        turn = torch.polar(
            torch.ones(1, dtype=torch.float64), torch.arange(count)[:, None, None] * theta
        )

        def rotated(t, turn=turn, count=count):
            pairs = torch.view_as_complex(
                t.reshape(len(t), count, config.heads, -1, 2).contiguous()
            )
            return torch.view_as_real(pairs * turn).flatten(-2)

        q, k = rotated(y @ mix.query.weight.T), rotated(y @ mix.key.weight.T)
        v = (y @ mix.value.weight.T).reshape(len(y), count, config.heads, -1)
        gap = times[:, :, None] - times[:, None, :]
        order = torch.arange(count)[:, None] - torch.arange(count)
        allowed = {"forward": order >= 0, "backward": order <= 0, "both": order == order}[direction]
        gamma = mix.log_decay.exp()
        decay = torch.where(allowed, gamma[:, None, None] ** gap.abs()[:, None], 0.0)
        o = torch.einsum(
            "bhnm,bmhv->bnhv",
            torch.einsum("bnhk,bmhk->bhnm", q, k) / math.sqrt(q.shape[-1]) * decay,
            v,
        )
        if config.retention_norm == "group":
            o = (o - o.mean(-1, keepdim=True)) / (
                o.var(-1, unbiased=False, keepdim=True) + 1e-5
            ).sqrt()
        else:
            o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        gate = y @ mix.gate.weight.T
        x = x + (gate * torch.sigmoid(gate) * o.flatten(2)) @ mix.out.weight.T
        y = F.layer_norm(x, x.shape[-1:], layer.norm_ffn.weight, layer.norm_ffn.bias)
        act = F.silu if config.ffn_act == "silu" else F.gelu
        if config.ffn == "glu":
            x = (
                x
                + (act(y @ layer.ffn.first.weight.T) * (y @ layer.ffn.second.weight.T))
                @ layer.ffn.out.weight.T
            )
        else:
            x = (
                x
                + act(y @ layer.ffn.first.weight.T + layer.ffn.first.bias) @ layer.ffn.out.weight.T
                + layer.ffn.out.bias
            )
    return x


FORMULAS = [
    {},
    {"retention_norm": "rms"},
    {"form": "chunkwise", "chunk": 4},
    {"form": "recurrent"},
    {"ffn": "plain"},
    {"ffn_act": "silu"},
    {"ffn": "plain", "ffn_act": "silu"},
]


@pytest.mark.parametrize("options", FORMULAS, ids=str)
@pytest.mark.parametrize("name", ["bitimelygpt", "timelygpt", "timelybert"])
def test_retention_models_equal_their_formulas(name, options):
    model = tiny(name, **options).double()
    values = torch.randn(2, 50, 3, dtype=torch.float64)
    tokens = model.adapter.tokenizer(Batch(values))[0]
    sos, eos = model.special[:, None, None].expand(-1, 2, 1, -1)
    x = torch.cat((sos, model.adapter.embed(tokens), eos), 1)
    wanted = retention_reference(
        model, x, model.directions, torch.arange(15.0, dtype=torch.float64).expand(2, -1)
    )
    torch.testing.assert_close(model(Batch(values)).hidden[-1], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bitimelygpt", "timelybert"])
def test_events_decay_by_months_between_the_first_and_the_last(name):
    """t_SOS = t_first, t_EOS = t_last."""
    model = tiny(name, tokenizer="codes", codes=52, length=9).double()
    batch = events()._replace(times=events().times.double())
    times = torch.cat((batch.times[:, :1], batch.times, batch.times[:, -1:]), 1)
    sos, eos = model.special[:, None, None].expand(-1, 2, 1, -1)
    x = torch.cat((sos, model.adapter.embedding.weight[batch.values - FIRST + 1], eos), 1)
    wanted = retention_reference(model, x, model.directions, times)
    torch.testing.assert_close(model(batch).hidden[-1], wanted, rtol=1e-9, atol=1e-9)
    late = batch._replace(times=batch.times + 480.0)  # age is no origin of the decay
    torch.testing.assert_close(model(late).hidden[-1], wanted, rtol=1e-6, atol=1e-6)


def convolution(norm="layer"):
    torch.manual_seed(0)
    return layers.TemporalConv(8, norm).double().eval()


def test_the_temporal_convolution_is_mirrored_with_its_layer():
    """The same kernel looks 30 positions back in a forward layer and 30 ahead in a backward one;
    half of them each way in a two-sided one.
    """
    module, x = convolution(), torch.randn(1, 80, 8, dtype=torch.float64)
    places = layers.Positions(torch.arange(80), None, None, None)
    torch.testing.assert_close(
        module(x, places, "backward"), module(x.flip(1), places, "forward").flip(1)
    )
    reach = {}
    for direction in ("forward", "backward", "both"):
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(y, places, direction)[0, 40].sum(), y)
        seen = slope[0].abs().amax(-1).nonzero().flatten()
        reach[direction] = (int(seen.min()) - 40, int(seen.max()) - 40)
    assert reach == {"forward": (-30, 0), "backward": (0, 30), "both": (-15, 15)}


def test_batch_statistics_leave_the_padding_out():
    module, x = convolution("batch").train(), torch.randn(2, 20, 8, dtype=torch.float64)
    real = torch.arange(20) < torch.tensor([[20], [12]])
    places = layers.Positions(torch.arange(20), None, real, real)
    torch.manual_seed(1)
    a = module(x, places, "forward")
    torch.manual_seed(1)
    b = module(torch.where(real[..., None], x, 100.0), places, "forward")
    torch.testing.assert_close(a[real], b[real])
    assert module.inner.num_batches_tracked == 2


def test_gpt_starts_as_gpt2():
    torch.manual_seed(0)
    model = models.build("gpt", preset="18m", tokenizer="conv", channels=7, layers=8, length=400)
    layer = model.layers[3]
    for weight, std in (
        (layer.mix.qkv.weight, 0.02),
        (layer.ffn.first.weight, 0.02),
        (layer.mix.out.weight, 0.005),
        (layer.ffn.out.weight, 0.005),
        (model.positions, 0.1),  # signals: a linear map of samples, not vectors to look up
        (model.adapter.embedding.weight, (3 * 7) ** -0.5),
        (model.adapter.output["next"].weight, 0.02),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert not layer.mix.qkv.bias.any()
    assert float(model.special.detach().std()) == pytest.approx(0.02, rel=0.1)
    events = models.build("gpt", preset="18m", codes=300, tokenizer="codes", layers=2, length=400)
    for weight in (events.positions, events.adapter.embedding.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_rotation_by_time_knows_no_origin_either():
    model = tiny("bitimelygpt", tokenizer="codes", codes=52, length=9, rotary="time").double()
    batch = events()._replace(times=events().times.double())
    late = batch._replace(times=batch.times + 1024.0)
    torch.testing.assert_close(
        model(batch).hidden[-1], model(late).hidden[-1], rtol=1e-6, atol=1e-6
    )
    assert not torch.allclose(
        model(batch).hidden[-1], model(batch._replace(times=batch.times * 1.5)).hidden[-1]
    )


def test_grouped_ties_have_no_order():
    """With `ties = group` and rotation by time, two codes of one day may change places; [SOS] still
    sees all.
    """
    model = tiny(
        "bitimelygpt", tokenizer="codes", codes=52, length=4, ties="group", rotary="time"
    ).double()
    times = torch.tensor([[0.0, 2.0, 2.0, 5.0]], dtype=torch.float64)
    a = model(Batch(torch.tensor([[7, 8, 9, 10]]), times)).hidden[-1]
    b = model(Batch(torch.tensor([[7, 9, 8, 10]]), times)).hidden[-1]
    torch.testing.assert_close(
        a[:, [0, 1, 2, 3, 4, 5]], b[:, [0, 1, 3, 2, 4, 5]], rtol=1e-10, atol=1e-10
    )
    one_day = torch.zeros(1, 4, dtype=torch.float64)  # no other row can pass these on
    for changed in range(4):
        codes = torch.tensor([[7, 8, 9, 10]])
        before = model(Batch(codes, one_day)).hidden[-1]
        codes[0, changed] = 20
        assert (model(Batch(codes, one_day)).hidden[-1][:, 0] != before[:, 0]).any()
