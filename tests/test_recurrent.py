"""LSTM, LSTM-BAAR, BiLSTM and ELMo against their equations, and that they look only where they
may.
"""

import itertools
import math

import pytest
import torch
from planted import seeded, tiny, use_paper_tokens
from torch import nn
from torch.nn import functional as F

from bitimely_core import heads, models, objectives, registry
from bitimely_core.analyses import leakage
from bitimely_core.config import ObjectiveConfig, Settings, build_model_config, load_preset
from bitimely_core.errors import UserError
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.types import Batch
from bitimely_core.zoo.recurrent import reverse_rows

torch.set_num_threads(1)

NAMES = ["lstm", "lstm-baar", "bilstm", "elmo"]
CONNECTIONS = ["plain", "residual", "norm", "residual-norm"]


def ragged(lengths=(50, 37, 22)):
    return Batch(
        torch.randn(len(lengths), 50, 3, generator=seeded()),
        mask=torch.arange(50) < torch.tensor(lengths)[:, None],
    )


def embedded(model, values):
    """[SOS], the embedded tokens, [EOS]."""
    tokens = model.adapter.tokenizer(Batch(values))[0]
    sos, eos = model.special[:, None, None].expand(-1, len(values), 1, -1)
    return torch.cat((sos, model.adapter.embed(tokens), eos), 1)


# -------------------------------------------------------------------------------------------------------------- independent references


def steps(lstm, x, order):
    """The equations, step by step in `order`; torch stacks the gates as i, f, g, o."""
    hidden = lstm.hidden_size
    w_i, w_f, w_g, w_o = lstm.weight_ih_l0.split(hidden)
    u_i, u_f, u_g, u_o = lstm.weight_hh_l0.split(hidden)
    b_i, b_f, b_g, b_o = (lstm.bias_ih_l0 + lstm.bias_hh_l0).split(hidden)
    h = c = torch.zeros(len(x), hidden, dtype=x.dtype)
    out = [h] * x.shape[1]
    for t in order:
        i, f, o = (
            torch.sigmoid(x[:, t] @ w.T + h @ u.T + b)
            for w, u, b in ((w_i, u_i, b_i), (w_f, u_f, b_f), (w_o, u_o, b_o))
        )
        c = f * c + i * torch.tanh(x[:, t] @ w_g.T + h @ u_g.T + b_g)
        h = out[t] = o * torch.tanh(c)
    return torch.stack(out, 1)


def reference(layers, x, plan, connections="plain"):
    """States of each layer, from the equations."""
    states = []
    for depth, (layer, direction) in enumerate(zip(layers, plan, strict=True)):
        inner = x
        if depth and "norm" in connections:
            inner = F.layer_norm(x, x.shape[-1:], layer.norm.weight, layer.norm.bias)
        ahead, back = range(x.shape[1]), range(x.shape[1] - 1, -1, -1)
        orders = {"forward": [ahead], "backward": [back], "both": [ahead, back]}[direction]
        y = torch.cat(
            [steps(lstm, inner, order) for lstm, order in zip(layer.lstms, orders, strict=True)], -1
        )
        x = x + y if depth and "residual" in connections else y
        states.append(x)
    return states


@pytest.mark.parametrize("connections", CONNECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_they_equal_their_equations(name, connections):
    model = tiny(name, connections=connections).double()
    values = torch.randn(2, 50, 3, dtype=torch.float64)
    x = embedded(model, values)
    if name == "elmo":
        ahead = reference(model.layers, x, ["forward"] * 4, connections)
        back = reference(model.backward_layers, x, ["backward"] * 4, connections)
        wanted = [torch.cat(pair, -1) for pair in zip(ahead, back, strict=True)]
    else:
        wanted = reference(model.layers, x, model.directions, connections)
    for ours, theirs in zip(model(Batch(values)).hidden, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def copied(model):
    """torch.nn.LSTM of all layers with the weights of `model`."""
    sides = len(model.layers[0].lstms)
    hidden = model.layers[0].lstms[0].hidden_size
    stacked = nn.LSTM(
        model.config.dim, hidden, len(model.layers), batch_first=True, bidirectional=sides == 2
    ).double()
    for depth, layer in enumerate(model.layers):
        for lstm, suffix in zip(layer.lstms, ("", "_reverse"), strict=False):
            for key, weight in lstm.named_parameters():
                getattr(stacked, key.replace("_l0", f"_l{depth}{suffix}")).data.copy_(weight)
    return stacked


@pytest.mark.parametrize(
    ("name", "options"), [("lstm", {}), ("bilstm", {}), ("bilstm", {"direction_width": "half"})]
)
def test_plain_stacks_are_those_of_torch_on_padded_rows_too(name, options):
    model = tiny(name, **options).double()
    batch = ragged()._replace(values=ragged().values.double())
    encoded = model(batch)
    x = torch.zeros(3, 15, 64, dtype=torch.float64)
    for row, length in enumerate((50, 37, 22)):
        alone = embedded(model, batch.values[row : row + 1, :length])
        x[row, : alone.shape[1]] = alone
    lengths = encoded.eos + 1
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    wanted, _ = nn.utils.rnn.pad_packed_sequence(copied(model)(packed)[0], batch_first=True)
    real = torch.arange(15) < lengths[:, None]
    torch.testing.assert_close(encoded.hidden[-1][real], wanted[real], rtol=1e-11, atol=1e-12)


def test_a_row_is_turned_without_its_padding():
    x = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 9]])[..., None]
    assert reverse_rows(x, torch.tensor([4, 2]))[..., 0].tolist() == [[4, 3, 2, 1], [2, 1, 0, 9]]
    assert reverse_rows(x, None)[..., 0].tolist() == [[4, 3, 2, 1], [9, 0, 2, 1]]
    draw = torch.randn(3, 7, 2)
    ends = torch.tensor([7, 3, 0])
    assert torch.equal(reverse_rows(reverse_rows(draw, ends), ends), draw)


# -------------------------------------------------------------------------------------------------------------- padding, missing values, times


@pytest.mark.parametrize(
    "options",
    [{}, {"tokenizer": "patch"}, {"tokenizer": "patch", "crop": "start"}, {"tokenizer": "steps"}],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name, options):
    """Content and amount of padding, and the company of longer rows, change neither states, vectors
    nor gradients of the real tokens.
    """
    model = tiny(name, connections="residual-norm", **options).double()
    lengths = [50, 37, 22]
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    padded = torch.full((3, 50, 3), 7.0, dtype=torch.float64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    padded = padded.requires_grad_()
    together = model(Batch(padded, mask=torch.arange(50) < torch.tensor(lengths)[:, None]))
    for i, row in enumerate(rows):
        row = row[None].requires_grad_()
        alone = model(Batch(row))
        count = alone.hidden[-1].shape[1]
        assert together.eos[i] == alone.eos[0] == count - 1
        for a, b in zip(together.hidden, alone.hidden, strict=True):
            torch.testing.assert_close(a[i, :count], b[0], rtol=1e-11, atol=1e-11)
        if alone.pooled is not None:
            torch.testing.assert_close(together.pooled[i], alone.pooled[0], rtol=1e-11, atol=1e-11)
        (wanted,) = torch.autograd.grad(alone.hidden[-1].square().sum(), row)
        (slope,) = torch.autograd.grad(
            together.hidden[-1][i, :count].square().sum(), padded, retain_graph=True
        )
        torch.testing.assert_close(slope[i, : row.shape[1]], wanted[0], rtol=1e-9, atol=1e-9)
        assert not slope[i, row.shape[1] :].any()


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_observed_is_not_read(name):
    model = tiny(name)
    x, mask = torch.randn(2, 50, 3), torch.rand(2, 50, 3) > 0.2
    mask[:, -1] = True
    a, b = model(Batch(x, mask=mask)), model(Batch(torch.where(mask, x, torch.nan), mask=mask))
    assert torch.equal(a.hidden[-1], b.hidden[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_any_sample_is_finite(name):
    model, mask = tiny(name), torch.tensor([[True], [False]]).expand(2, 50)
    encoded = model(Batch(torch.randn(2, 50, 3), mask=mask))
    assert encoded.eos.tolist() == [14, 1]
    assert torch.isfinite(encoded.hidden[-1]).all()
    assert torch.isfinite(
        heads.compute_vectors(
            model, Batch(torch.randn(2, 50, 3), mask=mask), registry.models[name].facts.readout
        )
    ).all()


def test_events_are_read_in_their_order_and_without_exact_times_their_times_are_not():
    model = tiny("lstm", tokenizer="codes", codes=52, length=9, exact_times=False)
    codes, times = torch.randint(FIRST, 52, (2, 9)), torch.rand(2, 9).cumsum(1)
    assert torch.equal(
        model(Batch(codes, times)).hidden[-1], model(Batch(codes, times * 100)).hidden[-1]
    )
    timed = tiny("lstm", tokenizer="codes", codes=52, length=9)
    assert not torch.equal(
        timed(Batch(codes, times)).hidden[-1], timed(Batch(codes, times * 100)).hidden[-1]
    )
    assert not torch.equal(
        model(Batch(codes, times)).hidden[-1], model(Batch(codes.flip(1), times)).hidden[-1]
    )


# -------------------------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize("name", ["lstm", "lstm-baar", "elmo"])
def test_each_direction_looks_one_way_only(name):
    """Change a token: a forward pass is unchanged to the last bit before it, a backward pass behind
    it.
    """
    model = tiny(name).double()
    x = torch.randn(1, 50, 3, dtype=torch.float64)
    other = x.clone()
    other[:, 24] += 1.0  # token 6, position 7
    for direction in ("forward", "backward"):
        plan = [direction] * 4
        for before, after in zip(
            model(Batch(x), directions=plan).hidden,
            model(Batch(other), directions=plan).hidden,
            strict=True,
        ):
            changed = (before != after).any(-1)[0]
            assert changed.tolist() == [
                p >= 7 if direction == "forward" else p <= 7 for p in range(15)
            ]


def test_two_sided_layers_see_everything_and_elmo_s_halves_do_not():
    x = torch.randn(1, 50, 3, dtype=torch.float64)
    other = x.clone()
    other[:, 24] += 1.0
    changed = {}
    for name in ("bilstm", "elmo"):
        model = tiny(name).double()
        differs = model(Batch(x)).hidden[-1] != model(Batch(other)).hidden[-1]
        changed[name] = [half.any(-1)[0].tolist() for half in differs.chunk(2, -1)]
    assert changed["bilstm"] == [[True] * 15] * 2
    assert changed["elmo"] == [[p >= 7 for p in range(15)], [p <= 7 for p in range(15)]]


LEAKS = [
    ("lstm", "next", {}),
    ("lstm", "next", {"tokenizer": "patch"}),
    ("lstm", "next", {"tokenizer": "codes", "codes": 52}),
    ("lstm", "next", {"tokenizer": "codes", "codes": 52, "ties": "group"}),
    ("lstm", "next-previous-strict", {"connections": "residual-norm"}),
    ("lstm-baar", "next-previous", {}),
    ("lstm-baar", "next-previous-strict", {}),
    ("lstm-baar", "gap", {"tokenizer": "patch"}),
    ("bilstm", "masked", {}),
    ("bilstm", "gap", {"direction_width": "half"}),
    ("elmo", "next-previous-strict", {}),
    (
        "elmo",
        "next-previous-strict",
        {"tokenizer": "patch", "output_heads": "separate", "connections": "residual"},
    ),
    ("elmo", "masked", {}),
]


@pytest.mark.parametrize(("name", "objective", "options"), LEAKS, ids=str)
def test_what_is_stamped_leak_free_has_no_derivative(name, objective, options):
    config = build_model_config(name, "tiny", channels=2, **use_paper_tokens(name, options))
    stamp = objectives.leak_free(Settings(model=config, objective=ObjectiveConfig(name=objective)))
    measure = (
        leakage.measure_code_changes if config.tokenizer == "codes" else leakage.measure_jacobian
    )
    found = measure(leakage._shrink_config(config), objectives.get(objective), 0, training=False)
    assert stamp is (objective != "next-previous")
    assert found.allowed > 0
    if stamp:
        assert found.target == found.beyond == 0
    else:
        assert found.target > 1e-6


@pytest.mark.parametrize("name", ["lstm-baar", "elmo"])
def test_strict_predictions_see_all_on_one_side_and_nothing_on_the_other(name):
    """The index map from outside: the next-token prediction of token m moves with tokens 0 .. m-1
    alone, the previous-token one with the rest.
    """
    model = tiny(name, tokenizer="patch", length=48).double()
    x = torch.randn(1, 48, 3, dtype=torch.float64)
    ask = objectives.get("next-previous-strict")
    before = ask(model, Batch(x))
    for n in range(6):
        other = x.clone()
        other[:, 8 * n] += 1.0
        after = ask(model, Batch(other))
        moved = (after["prediction"] != before["prediction"]).any(-1)[0]
        assert moved[before["slices"]["next"]].tolist() == [m > n for m in range(6)]
        assert moved[before["slices"]["previous"]].tolist() == [m < n for m in range(6)]


def test_next_previous_of_lstm_baar_reads_layers_l_minus_1_and_l():
    model = tiny("lstm-baar")
    batch = Batch(torch.randn(2, 50, 3))
    result, hidden = (
        objectives.get("next-previous")(model, batch),
        model(batch, directions=["forward", "backward"] * 2).hidden,
    )
    assert torch.equal(
        result["prediction"],
        torch.cat((model.output(hidden[-2][:, :-2]), model.output(hidden[-1][:, 2:])), 1),
    )
    assert torch.equal(result["target"], torch.cat((batch.values[:, ::4],) * 2, 1))


def test_dimensions_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="even number") as caught:
        tiny("lstm-baar", layers=3)
    assert caught.value.field == "model.layers"
    assert len(tiny("lstm", layers=3).layers) == 3
    with pytest.raises(UserError, match="two halves"):
        tiny("bilstm", dim=63, direction_width="half")
    with pytest.raises(UserError, match="its layers read forward or backward"):
        tiny("lstm")(Batch(torch.randn(1, 50, 3)), directions=["both"] * 4)
    with pytest.raises(UserError, match="one per layer"):
        tiny("lstm")(Batch(torch.randn(1, 50, 3)), directions=["forward"] * 3)


# -------------------------------------------------------------------------------------------------------------- vectors and outputs


@pytest.mark.parametrize("layers", ["last", "last-two"])
@pytest.mark.parametrize("readout", sorted(heads.POOLS))
@pytest.mark.parametrize("name", NAMES)
def test_every_readout_gives_logits(name, readout, layers):
    if readout == "native" and name in {"lstm", "lstm-baar"}:
        with pytest.raises(UserError, match="no vector of its own"):
            heads.Classifier(tiny(name), 5, readout=readout)
        return
    head = heads.Classifier(tiny(name), 5, readout=readout, layers=layers)
    assert head(Batch(torch.randn(2, 50, 3))).shape == (2, 5)


def test_default_vectors_depend_on_every_timestep_and_on_no_padding():
    batch = ragged()
    lstm, baar = tiny("lstm"), tiny("lstm-baar")
    last = lstm(batch).hidden[-1][torch.arange(3), torch.tensor([13, 10, 6])]
    torch.testing.assert_close(heads.compute_vectors(lstm, batch, "last"), lstm.norm(last))
    torch.testing.assert_close(
        heads.compute_vectors(baar, batch, "sos"), baar.norm(baar(batch).hidden[-1][:, 0])
    )
    assert [registry.models[name].facts.readout for name in NAMES] == [
        "last",
        "sos",
        "native",
        "native",
    ]


@pytest.mark.parametrize(
    ("name", "options"), [("bilstm", {}), ("bilstm", {"direction_width": "half"}), ("elmo", {})]
)
def test_native_is_the_last_forward_beside_the_first_backward_state(name, options):
    model, batch = tiny(name, **options), ragged()
    states = model.norm(model(batch).hidden[-1])
    half = states.shape[-1] // 2
    wanted = torch.cat(
        (states[torch.arange(3), torch.tensor([13, 10, 6]), :half], states[:, 1, half:]), -1
    )
    torch.testing.assert_close(heads.compute_vectors(model, batch, "native"), wanted)


def test_elmo_mixes_its_layers_and_the_tokens():
    model, logits = tiny("elmo", elmo_mix="all").double(), [0.25, -1.0, 0.0, 2.0, 0.5]
    with torch.no_grad():
        model.weights.copy_(torch.tensor(logits))
        model.scale.fill_(1.75)
    values = torch.randn(2, 50, 3, dtype=torch.float64)
    encoded = model(Batch(values))
    x = embedded(model, values)
    shares = [math.exp(s) / sum(map(math.exp, logits)) for s in logits]
    wanted = shares[0] * torch.cat((x[:, 13], x[:, 1]), -1)
    for share, states in zip(shares[1:], encoded.hidden, strict=True):
        wanted = wanted + share * torch.cat((states[:, 13, :64], states[:, 1, 64:]), -1)
    torch.testing.assert_close(encoded.pooled, 1.75 * wanted, rtol=1e-12, atol=1e-12)
    heads.Classifier(model, 3).double()(Batch(values)).square().sum().backward()
    assert model.weights.grad.abs().sum() > 0
    assert model.scale.grad != 0


@pytest.mark.parametrize("separate", ["shared", "separate"])
def test_elmo_s_stacks_share_embedding_and_output(separate):
    model, batch = tiny("elmo", output_heads=separate), Batch(torch.randn(2, 50, 3))
    ahead = model(batch, directions=["forward"] * 4).hidden[-1]
    back = model(batch, directions=["backward"] * 4).hidden[-1]
    side_by_side = model(batch).hidden[-1]
    torch.testing.assert_close(side_by_side, torch.cat((ahead, back), -1))
    wanted = (model.output(ahead, "next") + model.output(back, "previous")) / 2
    torch.testing.assert_close(model.output(side_by_side), wanted)
    objectives.get()(model, batch)["loss"].backward()
    assert not [
        key
        for key, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]


# -------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("lstm", {}, (14.19, 5.33, 1.34)),
        ("lstm-baar", {}, (14.19, 5.33, 1.34)),
        ("bilstm", {}, (41.36, 15.30, 3.83)),
        ("bilstm", {"direction_width": "half"}, (10.65, 4.00, 1.00)),
        ("elmo", {}, (28.39, 10.65, 2.67)),
        ("elmo", {"layers": "half"}, (14.19, 5.33, 1.34)),
    ],
)
def test_counts_of_the_layers_at_the_table_s_dimensions(name, options, millions):
    for preset, wanted in zip(("18m", "7.5m", "3m"), millions, strict=True):
        config = build_model_config(name, preset, codes=52, tokenizer="codes", length=254)
        more = {"layers": config.layers // 2} if "layers" in options else options
        with torch.device("meta"):
            model = models.from_config(config.model_copy(update=more))
        found = sum(weight.numel() for key, weight in model.named_parameters() if "layers." in key)
        assert round(found / 1e6, 2) == pytest.approx(wanted, abs=0.006)


def test_a_full_count_by_hand():
    """12 LSTM layers of 4 gates with two biases, conv tokenizer, projection, [SOS] and [EOS], final
    norm, output.
    """
    layers = 12 * (4 * 384 * (384 + 384) + 8 * 384)
    rest = 2 * (3 * 49 + 7) + 7 * 384 + 384 + 2 * 384 + 2 * 384 + 384 * 7 + 7
    assert (
        models.count_configured(build_model_config("lstm", "18m", channels=7, tokenizer="conv"))
        == layers + rest
    )


@pytest.mark.parametrize(
    ("name", "preset"), [*itertools.product(NAMES, ["18m", "7.5m", "tiny"]), ("lstm", "3m")]
)
def test_matched_budgets_come_within_five_percent(name, preset):
    data = use_paper_tokens(name, models.default_shape(preset))
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data))
    found = models.match_parameters(name, preset, **data)
    config = build_model_config(name, preset, **data, **found)
    assert abs(models.count_configured(config) / goal - 1) < 0.05
    shipped = load_preset(preset)["recurrent"]["layers"]
    assert config.layers == (shipped // 2 if name == "elmo" else shipped)
    assert ("direction_width" in found) == (name == "bilstm")
    assert name != "bilstm" or config.direction_width == "half"


# -------------------------------------------------------------------------------------------------------------- files, adapters, training


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lstm", {"connections": "norm"}),
        ("bilstm", {"direction_width": "half"}),
        ("elmo", {"elmo_mix": "all"}),
        ("bilstm", {}),
    ],
)
def test_saved_and_loaded_they_are_the_same(name, options, tmp_path):
    head = heads.Classifier(tiny(name, **options), 4).eval()
    head.save(tmp_path)
    batch = ragged()
    assert torch.equal(heads.load(tmp_path)(batch), head(batch))
    assert torch.equal(models.load(tmp_path)(batch).hidden[-1], head.model(batch).hidden[-1])


@pytest.mark.parametrize("name", NAMES)
def test_other_channels_renew_exactly_the_adapter(name):
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    renewed = model.reset_adapter(channels=1, length=30)
    assert set(renewed) == {
        key for key, _ in model.named_parameters() if key.startswith("adapter.")
    }
    kept = {key for key in before if not key.startswith("adapter.") and key != "target_scale"}
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in kept)
    assert torch.isfinite(objectives.get()(model, Batch(torch.randn(2, 30, 1)), seeded())["loss"])


@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_pre_training_has_one_adapter_a_data_set_and_one_trunk(name):
    model = tiny(name, others=(2,), tokenizer="patch")
    for channels, source, own in ((3, 0, "adapter."), (2, 1, "others.")):
        model.zero_grad()
        batch = Batch(torch.randn(2, 48, channels), source=torch.full((2,), source))
        objectives.get()(model, batch, seeded())["loss"].backward()
        touched = {key for key, weight in model.named_parameters() if weight.grad is not None}
        assert {key for key in touched if key.startswith(("adapter.", "others."))} == {
            key for key, _ in model.named_parameters() if key.startswith(own)
        }


@pytest.mark.parametrize("name", NAMES)
def test_channel_independent_reads_each_channel_alone(name):
    model = tiny(name, channel_independent=True)
    x = torch.randn(2, 50, 3)
    alone = [model(Batch(x[:, :, v : v + 1])).hidden[-1] for v in range(3)]
    torch.testing.assert_close(
        model(Batch(x)).hidden[-1].unflatten(0, (2, 3)), torch.stack(alone, 1)
    )


@pytest.mark.parametrize("name", NAMES)
def test_dropout_acts_in_training_only(name):
    model, batch = tiny(name, dropout=0.5), Batch(torch.randn(1, 50, 3))
    assert torch.equal(model(batch).hidden[-1], model(batch).hidden[-1])
    model.train()
    first, again = model(batch).hidden, model(batch).hidden
    assert torch.equal(first[0], again[0])  # as torch.nn.LSTM: between layers
    assert not torch.equal(first[-1], again[-1])


def sines(draw):
    phase = torch.rand(16, 1, 2, generator=draw) * 2 * math.pi
    rate = 0.15 + 0.2 * torch.rand(16, 1, 2, generator=draw)
    return Batch(torch.sin(phase + rate * torch.arange(64)[None, :, None]) * 1.4)


@pytest.mark.parametrize(
    ("name", "limit"), [("lstm", 0.7), ("lstm-baar", 0.7), ("bilstm", 0.8), ("elmo", 0.7)]
)
def test_sines_are_learned(name, limit):
    """Each model's own objective falls as a share of the target's variance."""
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=2, length=64, layers=2, tokenizer="patch")
    objectives.measure_scale(model, [sines(seeded(9)) for _ in range(4)])
    optimizer, draw, found = torch.optim.AdamW(model.parameters(), lr=5e-3), seeded(), []
    for _ in range(60):
        optimizer.zero_grad()
        result = objectives.get()(model, sines(draw), draw)
        result["loss"].backward()
        optimizer.step()
        found.append(float(result["rel"]))
    assert sum(found[-5:]) / 5 < limit


def test_the_start_and_connections_let_deep_stacks_learn():
    """The gradient that reaches the first of 12 layers: with torch's random biases next to
    nothing.
    """

    def reached(connections, start=None):
        model = tiny("lstm", layers=12, connections=connections)
        for layer in model.layers if start == "torch" else ():
            layer.lstms[0].reset_parameters()
        objectives.get()(model, Batch(torch.randn(4, 50, 3, generator=seeded())))["loss"].backward()
        norms = [float(layer.lstms[0].weight_ih_l0.grad.norm()) for layer in model.layers]
        return norms[0] / norms[-1]

    assert reached("plain", "torch") < 1e-3 < 1e-1 < reached("residual-norm")
    assert reached("plain") > 1e-1
