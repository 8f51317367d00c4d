"""mTAND against its formulas: attention channel by channel, the variational bound by hand, both
forms.
"""

import math

import pytest
import torch

from bitimely_core import models, objectives
from bitimely_core.errors import UserError
from bitimely_core.train.loop import fit
from bitimely_core.types import Batch
from bitimely_core.zoo.mtand import (
    FixedTimeEmbedding,
    TimeAttention,
    TimeEmbedding,
    compute_divergence_weight,
    divergence,
    log_likelihood,
)

torch.set_num_threads(1)


def tiny(name="mtand", **options):
    torch.manual_seed(0)
    small = {"reference": 8, "dim": 12, **({"latent": 4} if name == "mtand" else {})}
    return (
        models.build(name, **{"preset": "tiny", "channels": 3, "length": 20, **small, **options})
        .double()
        .eval()
    )


def sampled():
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 20, 3, generator=draw) > 0.5
    mask[:, -1] = True
    mask[1, :, 2] = False  # a channel that was never observed
    return Batch(torch.randn(2, 20, 3, generator=draw, dtype=torch.float64), mask=mask)


# -------------------------------------------------------------------------------------------------------------- attention


def test_the_code_of_a_time():
    torch.manual_seed(0)
    code = TimeEmbedding(48.0).double()
    found = code(torch.tensor([0.3], dtype=torch.float64))[0]
    assert found.shape == (128,)
    found = found.detach()
    code.requires_grad_(False)
    assert float(found[0]) == pytest.approx(
        0.3 * float(code.linear.weight) + float(code.linear.bias)
    )
    assert float(found[7]) == pytest.approx(
        math.sin(0.3 * float(code.periodic.weight[6, 0]) + float(code.periodic.bias[6]))
    )


def test_the_fixed_code_is_the_authors_and_the_learned_one_starts_within_the_scale():
    """sin(48 t 10^(-2i / 128)) and its cosine; frequencies of the learned code span the scale, and
    both codes are settings.
    """
    found = FixedTimeEmbedding(48.0).double()(torch.tensor([0.3], dtype=torch.float64))[0]
    rate = 48 * math.exp(-26 * math.log(10) / 128)
    assert float(found[26]) == pytest.approx(math.sin(0.3 * rate), abs=1e-12)
    assert float(found[27]) == pytest.approx(math.cos(0.3 * rate), abs=1e-12)
    for scale in (5.0, 48.0):
        rates = tiny(time_scale=scale).code.periodic.weight.detach().abs()
        assert 0.9 * scale < float(rates.max()) <= scale
    fixed = tiny(time_code="fixed", time_scale=5.0)
    assert float(fixed.code(torch.tensor([0.1]))[0, 0]) == pytest.approx(math.sin(0.5))
    assert fixed(sampled()).pooled.shape == (2, 12)
    assert not list(fixed.code.parameters())


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_equals_a_softmax_of_each_channel(heads):
    torch.manual_seed(0)
    attend, code = TimeAttention(heads).double(), TimeEmbedding(48.0).double()
    batch = sampled()
    points, times = (
        torch.linspace(0, 1, 5, dtype=torch.float64),
        torch.rand(2, 20, dtype=torch.float64).sort(1).values,
    )
    found, maps = attend(code(points)[None], code(times), batch.values, batch.mask, attention=True)
    size = 128 // heads
    for row in range(2):
        for r in range(5):
            q = attend.query(code(points[r : r + 1])[0])
            every = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack(
                    [
                        q[part] @ attend.key(code(t[None])[0])[part] / math.sqrt(size)
                        for t in times[row]
                    ]
                )
                for channel in range(3):
                    seen = batch.mask[row, :, channel]
                    wanted = torch.tensor(0.0, dtype=torch.float64)
                    if seen.any():
                        weights = scores[seen].softmax(0)
                        wanted = weights @ batch.values[row, seen, channel]
                        every.append(
                            (
                                head,
                                torch.zeros(20, dtype=torch.float64).masked_scatter(seen, weights),
                            )
                        )
                    torch.testing.assert_close(
                        found[row, r, head * 3 + channel], wanted, rtol=1e-10, atol=1e-10
                    )
            for head in range(heads):
                mean = torch.stack([w for at, w in every if at == head]).mean(0)
                torch.testing.assert_close(maps[row, head, r], mean, rtol=1e-10, atol=1e-10)
    attended, plain = attend(code(points)[None], code(times), batch.values, attention=True)
    full, same = attend(
        code(points)[None], code(times), batch.values, torch.ones_like(batch.mask), attention=True
    )
    torch.testing.assert_close(attended, full)
    torch.testing.assert_close(plain, same)


def test_scores_far_apart_are_finite():
    attend = TimeAttention(1).double()
    torch.nn.init.constant_(attend.query.weight, 1.0)
    torch.nn.init.constant_(attend.key.weight, 1.0)
    keys = torch.stack((torch.zeros(128), torch.full((128,), 50.0))).double()[None].requires_grad_()
    mask = torch.tensor([[[True, False], [False, True]]])
    values = torch.tensor([[[2.0, 0.0], [0.0, 3.0]]], dtype=torch.float64)
    found, _ = attend(torch.ones(1, 1, 128, dtype=torch.float64), keys, values, mask)
    assert torch.isfinite(found).all()
    # each channel has one observation: its own
    assert found.detach()[0, 0].tolist() == pytest.approx([2.0, 3.0])
    (slope,) = torch.autograd.grad(found.sum(), keys)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("spread", [30.0, 92.0, 200.0])
def test_attention_of_a_channel_far_from_the_best_row_is_its_own_softmax(spread):
    """In float32 exp(-92) has no reciprocal and exp(-200) is 0; channel 1 was never observed near
    the best row.
    """
    attend = TimeAttention(1)
    for part in (attend.query, attend.key):
        torch.nn.init.eye_(part.weight)
    queries, keys = torch.zeros(1, 1, 128), torch.zeros(1, 4, 128)
    queries[..., 0] = math.sqrt(128)
    keys[..., 0] = torch.tensor([spread, spread - 1, 0.0, -1.0])
    keys.requires_grad_()
    values = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 5.0]]])
    found, _ = attend(queries, keys, values, values != 0)
    near = 1 / (1 + math.exp(-1.0))  # two observations, one score apart
    assert found.detach()[0, 0].tolist() == pytest.approx([2 - near, 5 - 2 * near], rel=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), keys)
    turn = near * (1 - near)
    assert slope[0, :, 0].tolist() == pytest.approx([-turn, turn, -2 * turn, 2 * turn], rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", ["mtand", "mtand-enc"])
def test_the_model_equals_its_parts(name):
    model, batch = tiny(name), sampled()
    times = torch.arange(20, dtype=torch.float64).expand(2, -1) / 20
    values = torch.where(batch.mask, batch.values, 0.0)
    pairs, both = (
        torch.cat((values, batch.mask.double()), -1),
        torch.cat((batch.mask, batch.mask), -1),
    )
    at = model.points
    torch.testing.assert_close(at, torch.linspace(0, 1, 8, dtype=torch.float64), rtol=0, atol=1e-7)
    entered = model.adapter.enter(
        model.attend(model.code(at)[None], model.code(times), pairs, both)[0]
    )
    if name == "mtand":
        states = torch.cat(
            (
                run(model.encoder, entered, ""),
                run(model.encoder, entered.flip(1), "_reverse").flip(1),
            ),
            -1,
        )
        inputs, spread = model.to_latent(states).chunk(2, -1)
        found = model.posterior(batch)
        torch.testing.assert_close(found.mean, inputs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.log_variance, spread, rtol=1e-10, atol=1e-10)
    else:
        inputs = entered
    encoded = model(batch, attention=True)
    wanted = run(model.reader, inputs, "")
    torch.testing.assert_close(encoded.hidden[-1], wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(encoded.pooled, wanted[:, -1], rtol=1e-10, atol=1e-10)
    assert encoded.attention[0].shape == (2, 1, 8, 20)
    torch.testing.assert_close(
        encoded.attention[0].sum(-1), torch.ones(2, 1, 8, dtype=torch.float64)
    )


def run(gru, x, way):
    """A GRU's equations."""
    w, u, b, c = (
        getattr(gru, f"{kind}_l0{way}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = torch.zeros(len(x), gru.hidden_size, dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        (r1, z1, n1), (r2, z2, n2) = (x[:, t] @ w.T + b).chunk(3, -1), (h @ u.T + c).chunk(3, -1)
        r, z = torch.sigmoid(r1 + r2), torch.sigmoid(z1 + z2)
        h = (1 - z) * torch.tanh(n1 + r * n2) + z * h
        out.append(h)
    return torch.stack(out, 1)


def test_with_occurrences_alone_no_time_would_be_seen():
    """Why all codes count as observed in the months that hold any: else each mean is one of
    ones.
    """
    model = tiny(tokenizer="codes", codes=8, horizon=50, index_day=False)
    times = torch.tensor([[0.0, 3.0, 30.0]], dtype=torch.float64)
    a, b = (model(Batch(torch.tensor([[5, 6, 7]]), at)).pooled for at in (times, times * 1.5))
    assert not torch.allclose(a, b)
    rows = model.adapter.tokenizer.rows(Batch(torch.tensor([[5, 6, 7]]), times))
    assert rows.mask.all()
    seen = torch.cat((rows.values > 0, rows.values > 0), -1)
    keys = [model.code(t / 50) for t in (times, times * 1.5)]
    ones = torch.cat((rows.values, torch.ones_like(rows.values)), -1)
    c, d = (model.attend(model.code(model.points)[None], k, ones, seen)[0] for k in keys)
    torch.testing.assert_close(c, d)


# -------------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("samples", [1, 5])
def test_the_loss_equals_the_bound_by_hand(samples):
    model, batch = tiny(), sampled()
    found = objectives.get("vae", samples=samples)(model, batch, torch.Generator().manual_seed(3))
    noise = torch.randn((2, samples, 8, 4), generator=torch.Generator().manual_seed(3)).double()
    posterior = model.posterior(batch)
    beta = 1 - 0.99**290
    bounds, errors, kls = [], [], []
    for row in range(2):
        one = Batch(batch.values[row : row + 1], mask=batch.mask[row : row + 1])
        mean, log_variance = posterior.mean[row], posterior.log_variance[row]
        prior, own = (
            torch.distributions.Normal(0.0, 1.0),
            torch.distributions.Normal(mean, (log_variance / 2).exp()),
        )
        count = int(one.mask.sum())
        kl = torch.distributions.kl_divergence(own, prior).sum() / count
        each = []
        for k in range(samples):
            z = mean + (log_variance / 2).exp() * noise[row, k]
            decoded = model.decode(z[None], model.adapter.tokenizer.rows(one), one)
            log = torch.distributions.Normal(decoded, 0.01).log_prob(
                torch.where(one.mask, one.values, 0.0)
            )
            each.append(log[one.mask].sum() / count - beta * kl)
            errors.append((decoded - one.values)[one.mask].square())
        bounds.append(torch.logsumexp(torch.stack(each), 0) - math.log(samples))
        kls.append(kl)
    torch.testing.assert_close(found["loss"], -torch.stack(bounds).mean(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["parts"]["kl"], torch.stack(kls).mean(), rtol=1e-9, atol=1e-9)
    values = torch.where(batch.mask, batch.values, 0.0)
    centre = values.sum((0, 1)) / batch.mask.sum((0, 1))
    variance = (
        torch.where(batch.mask, batch.values - centre, 0.0)
    ).square().sum() / batch.mask.sum()
    assert float(found["rel"]) == pytest.approx(
        float((torch.cat(errors).mean() / variance).detach()), rel=1e-9
    )
    assert int(found["count"]) == 2
    assert found["prediction"].shape == found["target"].shape == found["valid"].shape == (2, 20, 3)


def test_terms_against_torchs_distributions():
    mean, log_variance = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (log_variance / 2).exp()),
        torch.distributions.Normal(torch.zeros(()), torch.ones(())),
    ).sum((1, 2))
    torch.testing.assert_close(divergence(mean, log_variance), wanted)
    x, decoded, mask = torch.randn(2, 5, 3), torch.randn(4, 2, 5, 3), torch.rand(2, 5, 3) > 0.5
    log = torch.distributions.Normal(decoded, 0.01).log_prob(x)
    torch.testing.assert_close(
        log_likelihood(x, decoded, mask), torch.where(mask, log, 0.0).sum((2, 3))
    )


def test_the_weight_of_the_divergence_follows_the_training():
    assert compute_divergence_weight(0.0) == compute_divergence_weight(10 / 300) == 0
    assert compute_divergence_weight(11 / 300) == pytest.approx(0.01)
    assert compute_divergence_weight(1.0) == pytest.approx(1 - 0.99**290)
    model, batch = tiny(), sampled()
    model.train()
    model.progress = 0.0
    result = objectives.get("vae")(model, batch, torch.Generator().manual_seed(0))
    torch.testing.assert_close(result["loss"].detach(), -result["parts"]["likelihood"])


def test_a_row_without_observations_has_no_part():
    model, batch = tiny(), sampled()
    more = Batch(
        torch.cat((batch.values, torch.ones_like(batch.values[:1]))),
        mask=torch.cat((batch.mask, torch.zeros_like(batch.mask[:1]))),
    )
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    two, three = (
        objectives.get("vae")(model, one, g)
        for one, g in zip((batch, more), generators, strict=True)
    )
    torch.testing.assert_close(two["loss"], three["loss"])
    assert int(three["count"]) == 2
    empty = objectives.get("vae")(model, Batch(more.values[2:], mask=more.mask[2:]), generators[0])
    assert float(empty["loss"].detach()) == 0


@pytest.mark.slow
def test_training_lowers_the_bound_and_keeps_the_latents_apart():
    """Sines of two lengths with gaps: after training a reconstruction is better than the mean."""
    draw = torch.Generator().manual_seed(0)
    phase, slow = (
        torch.rand(32, 1, 1, generator=draw) * 6.28,
        torch.rand(32, 1, 1, generator=draw) > 0.5,
    )
    x = torch.sin(torch.arange(20)[None, :, None] * torch.where(slow, 0.3, 0.8) + phase)
    batch = Batch(x, mask=torch.rand(x.shape, generator=draw) > 0.3)
    torch.manual_seed(0)
    model = models.build(
        "mtand", channels=1, length=20, heads=1, dim=16, latent=8, reference=10, tokenizer="steps"
    )

    class One:
        steps, size = 1, 32

        def __call__(self, epoch, *, start=0, rank=0, world=1):
            return iter([batch][start:])

    before = float(
        objectives.get("vae")(model.eval(), batch, torch.Generator().manual_seed(1))["rel"]
    )
    fit(model, One(), objectives.get("vae"), epochs=150, lr=1e-2, seed=0)
    after = objectives.get("vae")(model.eval(), batch, torch.Generator().manual_seed(1))
    assert before > 0.9
    assert float(after["rel"]) < 0.5
    assert float(model.posterior(batch).mean.detach().var(0).mean()) > 1e-2


def test_unsupported_settings_are_refused():
    with pytest.raises(UserError, match="divisor of 128"):
        tiny(heads=3)
    assert objectives.get("vae").config.samples == 1
