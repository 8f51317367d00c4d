"""RAINDROP's messages against a slow loop, and what must not depend on the order of sensors."""

import math

import pytest
import torch

from bitimely_core import heads, models
from bitimely_core.errors import UserError
from bitimely_core.types import Batch
from bitimely_core.zoo.raindrop import MessagePass, compute_graph_distance, prune_edges
from bitimely_core.zoo.supervised import encode_times

torch.set_num_threads(1)


def tiny(**options):
    torch.manual_seed(0)
    return (
        models.build(
            "raindrop",
            **{"preset": "tiny", "channels": 3, "length": 20, "message": "paper", **options},
        )
        .double()
        .eval()
    )


def sampled(channels=3):
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 20, channels, generator=draw) > 0.5
    mask[:, -1] = True
    return Batch(torch.randn(2, 20, channels, generator=draw, dtype=torch.float64), mask=mask)


def messages(message, h, nodes, code, edges, observed):
    """One pass for one sample: who says what to whom at which row, with the edges of the pass
    before.
    """
    rows, sensors, width = h.shape
    matrix = message.query.weight
    out, means = torch.zeros_like(h), torch.zeros(sensors, sensors, dtype=h.dtype)
    for v in range(sensors):
        for t in range(rows):
            got = torch.zeros(width, dtype=h.dtype)
            for u in range(sensors):
                alpha = torch.relu(h[t, u] @ (matrix @ torch.cat((nodes[v], code[t]))))
                got = got + (h[t, u] @ message.send[u]) * message.receive[v] * alpha * edges[u, v]
                if observed[t, u]:
                    means[u, v] += alpha / observed[:, u].sum()
            out[t, v] = torch.relu(got)
    return out, edges * means


def test_messages_equal_the_formulas():
    model, batch = tiny(dim=4), sampled()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    rows = model.adapter.tokenizer.rows(batch)
    code = encode_times(rows.times, 20.0, 16)
    found, edges = model.pass_messages(rows, code)
    for row in range(2):
        h = torch.relu(rows.values[row, ..., None] * model.observation)
        wanted = torch.ones(3, 3, dtype=torch.float64)
        for at, message in enumerate(model.messages):
            h, wanted = messages(message, h, model.nodes, code[row], wanted, rows.mask[row])
            if at == 0:
                cut = wanted.flatten().sort().values[4]  # of 9 edges 5 stay
                wanted = torch.where(wanted >= cut, wanted, 0.0)
        assert h.any()
        torch.testing.assert_close(found[row], h, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(edges[row], wanted, rtol=1e-10, atol=1e-10)


def test_half_of_the_edges_stay():
    edges = torch.tensor([[[4.0, 1.0], [3.0, 2.0]], [[1.0, 1.0], [1.0, 0.0]]])
    assert prune_edges(edges).tolist() == [[[4, 0], [3, 0]], [[1, 1], [1, 0]]]


def test_sensors_have_no_order():
    """Their own vectors follow them, and so do what they say and the edges."""
    torch.manual_seed(0)
    message, order = MessagePass(5, 4).double(), torch.tensor([3, 0, 4, 1, 2])
    turned = MessagePass(5, 4).double()
    turned.load_state_dict(message.state_dict())
    with torch.no_grad():
        turned.send.copy_(message.send[order])
        turned.receive.copy_(message.receive[order])
    h, nodes, code = (
        torch.rand(*s, dtype=torch.float64) for s in ((2, 6, 5, 4), (5, 4), (2, 6, 16))
    )
    observed, edges = torch.rand(2, 6, 5) > 0.5, torch.rand(2, 5, 5, dtype=torch.float64)
    a, edges_a = message(h, nodes, code, edges, observed)
    b, edges_b = turned(
        h[:, :, order], nodes[order], code, edges[:, order][:, :, order], observed[:, :, order]
    )
    torch.testing.assert_close(a[:, :, order], b)
    torch.testing.assert_close(edges_a[:, order][:, :, order], edges_b)


def test_a_sensor_hears_of_the_others_unless_messages_stay_at_home():
    batch = sampled()
    for option, affected in (("paper", True), ("self", False)):
        model = tiny(message=option)
        for weight in (model.observation, model.nodes, *model.messages.parameters()):
            torch.nn.init.uniform_(weight, 0.1, 1.0)
        values = batch.values.abs().requires_grad_()
        rows = model.adapter.tokenizer.rows(batch._replace(values=values))
        found, _ = model.pass_messages(rows, encode_times(rows.times, 20.0, 16))
        (slope,) = torch.autograd.grad(found[:, :, 0].sum(), values)
        assert bool((slope[..., 0][batch.mask[..., 0]] != 0).any())
        assert bool((slope[..., 1:] != 0).any()) is affected


def test_the_vector_is_the_mean_over_the_rows_and_maps_are_rows_of_attention():
    model, batch = tiny(), sampled()
    batch.mask[1, 12:] = False
    encoded = model(batch, attention=True)
    end = int(batch.mask[1].any(1).nonzero().max()) + 1
    torch.testing.assert_close(encoded.pooled[1], encoded.hidden[-1][1, :end].mean(0))
    assert [tuple(maps.shape) for maps in encoded.attention] == [(2, 2, 20, 20)] * 2
    for maps in encoded.attention:
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 20, dtype=torch.float64))
        assert not maps[1, :, :, end:].any()
    torch.testing.assert_close(encoded.hidden[-1], model(batch).hidden[-1])


def test_the_transformer_equals_torchs():
    """Post-norm layers with ReLU over [h; p], padding no key."""
    model, batch = tiny(), sampled()
    batch.mask[1, 12:] = False
    rows = model.adapter.tokenizer.rows(batch)
    code = encode_times(rows.times, 20.0, 16)
    x = torch.cat((model.pass_messages(rows, code)[0].flatten(2), code), -1)
    for layer in model.layers:
        theirs = torch.nn.TransformerEncoderLayer(28, 2, 56, batch_first=True).double().train()
        for dropout in (theirs.dropout, theirs.dropout1, theirs.dropout2):
            dropout.p = 0.0
        theirs.self_attn.dropout = 0.0
        with torch.no_grad():
            for name, source in (
                ("self_attn.in_proj_weight", layer.mix.qkv.weight),
                ("self_attn.in_proj_bias", layer.mix.qkv.bias),
                ("self_attn.out_proj.weight", layer.mix.out.weight),
                ("self_attn.out_proj.bias", layer.mix.out.bias),
            ):
                theirs.get_parameter(name).copy_(source)
        for own, other in (
            (layer.first, theirs.linear1),
            (layer.out, theirs.linear2),
            (layer.norm_mix, theirs.norm1),
            (layer.norm_ffn, theirs.norm2),
        ):
            other.load_state_dict(own.state_dict())
        x = theirs(x, src_key_padding_mask=~rows.real)
    torch.testing.assert_close(
        model(batch).hidden[-1][rows.real], x[rows.real], rtol=1e-10, atol=1e-10
    )


def test_widths_that_the_heads_do_not_divide_are_refused():
    with pytest.raises(UserError, match="multiple of the heads") as caught:
        tiny(dim=3)
    assert (caught.value.exit_code, caught.value.field) == (2, "model.dim")


def test_47_codes_give_the_width_of_the_paper():
    model = models.build("raindrop", preset="3m", codes=52)
    assert model.pooled_width == 47 * 4 + 16
    assert model.layers[0].first.out_features == 2 * 204
    assert model.config.dropout == 0.2
    assert model.config.message == "self"


@pytest.mark.parametrize("channels", [4, 12, 34])
@pytest.mark.parametrize("message", ["paper", "self"])
def test_at_the_start_observations_keep_their_size_through_both_passes(message, channels):
    """Of windows of unit variance; a pass multiplies four factors, and small ones made the second
    pass a ten-thousandth of the first.
    """
    batch = Batch(
        torch.randn(
            8, 48, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
    )
    sizes = []
    for seed in range(5):
        torch.manual_seed(seed)
        model = models.build(
            "raindrop", preset="tiny", channels=channels, length=48, message=message
        ).double()
        rows = model.adapter.tokenizer.rows(batch)
        h, _ = model.pass_messages(rows, encode_times(rows.times, 48.0, 16))
        sizes.append(float(h.detach().square().mean().sqrt()))
    assert 0.2 < sorted(sizes)[2] < 2


def test_graphs_of_a_batch_are_drawn_together_in_training_alone():
    """graph_distance times the mean over pairs of samples of the distance between their edges."""
    edges = torch.randn(4, 3, 3, dtype=torch.float64)
    pairs = [math.dist(edges[i].flatten(), edges[j].flatten()) for i in range(4) for j in range(i)]
    assert float(compute_graph_distance(edges)) == pytest.approx(sum(pairs) / 6)
    assert float(compute_graph_distance(edges[:1])) == 0
    batch = sampled()._replace(target=torch.tensor([0, 1]))
    for options, weight in (
        ({"dropout": 0.0, "graph_distance": 0.02}, 0.02),
        ({"dropout": 0.0}, 0.0),
        ({"dropout": 0.0, "graph_distance": 0.02, "message": "self"}, 0.0),
    ):
        torch.manual_seed(3)
        head = heads.Classifier(tiny(**options), outputs=2).double()
        rows = head.model.adapter.tokenizer.rows(batch)
        _, found = head.model.pass_messages(rows, encode_times(rows.times, 20.0, 16).double())
        plain = heads.cross_entropy(head.eval(), batch)["loss"]
        trained = heads.cross_entropy(head.train(), batch)
        assert float((trained["loss"] - plain).detach()) == pytest.approx(
            weight * float(compute_graph_distance(found).detach()), abs=1e-12
        )
        assert ("penalty" in trained["parts"]) == (weight > 0)
        trained["loss"].backward()
        slopes = [p.grad for p in head.parameters() if p.grad is not None]
        assert all(torch.isfinite(slope).all() for slope in slopes)
        assert "penalty" not in heads.cross_entropy(head.eval(), batch)["parts"]


def score(seed, channels, **options):
    """Accuracy on new windows after 150 steps on two classes that differ in the mean of the last
    channel; chance is 0.5.
    """
    draw = torch.Generator().manual_seed(seed)

    def windows(count):
        target = torch.arange(count) % 2
        values = torch.randn(count, 24, channels, generator=draw)
        values[..., -1] += target[:, None] - 0.5
        return Batch(values, target=target)

    torch.manual_seed(seed)
    head = heads.Classifier(
        models.build("raindrop", preset="tiny", channels=channels, length=24, **options), outputs=2
    ).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        heads.cross_entropy(head, windows(32))["loss"].backward()
        optimizer.step()
    return float(heads.cross_entropy(head.eval(), windows(300))["parts"]["accuracy"])


@pytest.mark.parametrize(
    "channels", [pytest.param(channels, marks=pytest.mark.slow) for channels in (4, 12, 34)]
)
def test_it_learns_the_mean_of_one_channel(channels):
    assert [score(seed, channels) >= 0.95 for seed in (1, 2, 3)] == [True] * 3


@pytest.mark.slow
def test_it_learns_with_messages_and_the_distance_between_graphs():
    """Before the start kept the size of the observations, it stayed at chance with both."""
    assert (
        min(score(seed, 12, message="paper", graph_distance=0.02, dropout=0.0) for seed in (1, 2))
        > 0.8
    )
    # one channel has no graph to compare
    assert score(1, 1, message="paper", graph_distance=0.02) > 0.9
