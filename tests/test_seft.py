"""SeFT against its formulas, with the full keys of the paper."""

import math

import pytest
import torch
from torch import nn

from bitimely_core import models
from bitimely_core.types import Batch

torch.set_num_threads(1)


def tiny(**options):
    torch.manual_seed(0)
    model = models.build(
        "seft",
        **{
            "preset": "tiny",
            "tokenizer": "codes",
            "codes": 9,
            "dim": 6,
            "ffn_dim": 5,
            "horizon": 50,
            **options,
        },
    )
    nn.init.normal_(model.queries)
    return model.double().eval()


def history():
    return Batch(
        torch.tensor([[5, 7, 7, 8]]), torch.tensor([[0.0, 0.5, 3.0, 11.0]], dtype=torch.float64)
    )


def element(time, value, channel, channels, span):
    """[sin(t), sin(t / span), cos(t), cos(t / span), value, one-hot]."""
    one_hot = [float(channel == c) for c in range(channels)]
    waves = [math.sin(time), math.sin(time / span), math.cos(time), math.cos(time / span)]
    return torch.tensor([*waves, value, *one_hot], dtype=torch.float64)


def by_elements(model, elements):
    """Vector and weights of one set, with keys that see the context of the full set through
    separate networks.
    """
    dim, heads = model.config.dim, model.config.heads
    first = model.adapter.phi
    phi = nn.Sequential(*model.phi[0], *model.phi[1])
    outputs = [
        phi(torch.relu(s @ torch.cat((first.weight, first.channel)) + first.bias)) for s in elements
    ]
    psi = nn.Sequential(nn.Linear(len(elements[0]), 7), nn.ReLU(), nn.Linear(7, dim)).double()
    context = torch.stack([psi(s) for s in elements]).mean(0)
    of_context = torch.randn(dim, heads, dim, dtype=torch.float64)
    vector, weights = [], []
    for head in range(heads):
        scores = []
        for s in elements:
            key = torch.cat((s, context)) @ torch.cat(
                (model.adapter.key[:, head], of_context[:, head])
            )
            scores.append(key @ model.queries[head] / math.sqrt(dim))
        weights.append(torch.stack(scores).softmax(0))
        vector.append(sum(a * v for a, v in zip(weights[-1], outputs, strict=True)))
    return torch.cat(vector), torch.stack(weights), torch.stack(outputs)


def test_equals_the_formulas_of_the_paper_context_included():
    """The context adds one number to all scores of a head: the softmax does not see it, whatever
    its nets.
    """
    model, batch = tiny(), history()
    events = list(zip(batch.times[0].tolist(), batch.values[0].tolist(), strict=True))
    back = 50 - 11.0  # the clock of 50 months ends with the last event, or the index day
    elements = [element(t + back, 1.0, c - 5, 4, 50) for t, c in events]
    at_index = model(batch._replace(end=torch.tensor([23.0]))).pooled[0]
    later = [element(t + back - 12, 1.0, c - 5, 4, 50) for t, c in events]
    torch.testing.assert_close(at_index, by_elements(model, later)[0], rtol=1e-10, atol=1e-10)
    encoded = model(batch, attention=True)
    vector, weights, outputs = by_elements(model, elements)
    torch.testing.assert_close(encoded.pooled[0], vector, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(encoded.attention[0][0, :, 0], weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(encoded.hidden[-1][0], outputs, rtol=1e-10, atol=1e-10)


def test_of_signals_only_observed_values_are_elements():
    model = tiny(tokenizer="conv", codes=None, channels=2, length=50)
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[[1, 0], [0, 0], [1, 1], [0, 1]]], dtype=torch.bool)
    encoded = model(Batch(x, mask=mask))
    elements = [
        element(float(t), float(x[0, t, v]), v, 2, 50)
        for t in range(4)
        for v in range(2)
        if mask[0, t, v]
    ]
    assert encoded.hidden[-1].shape == (1, 4, 6)
    torch.testing.assert_close(
        encoded.pooled[0], by_elements(model, elements)[0], rtol=1e-10, atol=1e-10
    )


def test_a_set_has_no_order_and_starts_with_equal_weights():
    model, batch = tiny(), history()
    order = [2, 0, 3, 1]
    turned = model(Batch(batch.values[:, order], batch.times[:, order]))
    torch.testing.assert_close(turned.pooled, model(batch).pooled, rtol=1e-12, atol=1e-12)
    torch.manual_seed(0)
    fresh = models.build("seft", preset="tiny", tokenizer="codes", codes=9)
    weights = fresh.eval()(
        history()._replace(times=history().times.float()), attention=True
    ).attention[0]
    assert weights.flatten().tolist() == [0.25] * 16


def test_training_hides_elements_from_the_weights():
    """One in ten; a set of which all would be hidden keeps all."""
    model = tiny().train()
    batch = Batch(torch.full((1, 2000), 5), torch.zeros(1, 2000, dtype=torch.float64))
    weights = model(batch, attention=True).attention[0]
    assert float((weights[0, 0, 0] == 0).double().mean()) == pytest.approx(0.1, abs=0.03)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 1, dtype=torch.float64))
    single = Batch(torch.full((400, 1), 5), torch.zeros(400, 1, dtype=torch.float64))
    assert (model(single, attention=True).attention[0] == 1).all()


def test_weights_at_the_start_are_he_uniform():
    torch.manual_seed(0)
    model = models.build("seft", preset="18m", channels=90, length=100)
    first = model.adapter.phi
    bound = math.sqrt(6 / 95)
    for weight in (first.weight, first.channel):
        assert float(weight.detach().abs().max()) <= bound
        assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert not model.queries.any()
