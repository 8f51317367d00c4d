"""GRU-D against its equations, step by step, and against PyPOTS."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from bitimely_core import models
from bitimely_core.models.adapters import TimedRows
from bitimely_core.types import Batch
from bitimely_core.zoo.gru_d import carry_forward, compute_gaps

torch.set_num_threads(1)


def tiny(**options):
    torch.manual_seed(0)
    return (
        models.build(
            "gru-d", **{"preset": "tiny", "channels": 3, "length": 20, "dim": 8, **options}
        )
        .double()
        .eval()
    )


def sampled(seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 20, 3, generator=draw, dtype=torch.float64)
    mask = torch.rand(2, 20, 3, generator=draw) > 0.5
    mask[:, -1, 0] = True
    return Batch(x, mask=mask)


def test_gaps_and_last_values_by_hand():
    mask = torch.tensor([[[1, 0], [0, 0], [1, 1], [0, 0]]], dtype=torch.bool)
    values = torch.tensor([[[4.0, 0], [0, 0], [5, 7], [0, 0]]])
    rows = TimedRows(
        values, mask, torch.tensor([[0.0, 2, 5, 9]]), torch.ones(1, 4, dtype=torch.bool)
    )
    assert compute_gaps(rows).tolist() == [[[0, 0], [2, 2], [5, 5], [4, 4]]]
    assert carry_forward(rows, torch.tensor([-1.0, -2.0])).tolist() == [
        [[4, -2], [4, -2], [5, 7], [5, 7]]
    ]


def by_steps(model, batch):
    """delta_t = dt + (0 where observed before, else delta_(t-1)); then the equations of the
    paper.
    """
    adapter, dim = model.adapter, model.config.dim
    w_r, w_z, w_c = adapter.read.weight.split(dim)
    b_r, b_z, b_c = adapter.read.bias.split(dim)
    u_r, u_z = model.gates.weight.split(dim)
    out = []
    for x, m in zip(batch.values, batch.mask.double(), strict=True):
        h, delta, last = (torch.zeros(n, dtype=torch.float64) for n in (dim, 3, 3))
        states = []
        for t in range(len(x)):
            if t:
                delta = 1 / model.config.length + (1 - m[t - 1]) * delta
            gamma_x = torch.exp(-torch.relu(adapter.value_weight * delta + adapter.value_bias))
            gamma_h = torch.exp(-torch.relu(adapter.state.weight @ delta + adapter.state.bias))
            imputed = m[t] * x[t] + (1 - m[t]) * (gamma_x * last + (1 - gamma_x) * 0.0)
            read, h = torch.cat((imputed, m[t])), gamma_h * h
            r, z = (
                torch.sigmoid(w_r @ read + u_r @ h + b_r),
                torch.sigmoid(w_z @ read + u_z @ h + b_z),
            )
            h = (1 - z) * h + z * torch.tanh(w_c @ read + model.candidate.weight @ (r * h) + b_c)
            last = torch.where(m[t].bool(), x[t], last)
            states.append(h)
        out.append(torch.stack(states))
    return torch.stack(out)


def test_equals_the_equations():
    model, batch = tiny(), sampled()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    encoded = model(batch)
    torch.testing.assert_close(encoded.hidden[-1], by_steps(model, batch), rtol=1e-10, atol=1e-10)
    assert torch.equal(encoded.pooled, encoded.hidden[-1][:, -1])


def test_the_state_is_kept_behind_the_end():
    model, batch = tiny(), sampled()
    batch.mask[0, 11:] = False
    states = model(batch).hidden[-1]
    end = int(batch.mask[0].any(1).nonzero().max())
    assert torch.equal(states[0, end:], states[0, end].expand(20 - end, -1))


def test_months_are_the_unit_of_codes():
    """The gap of a code is the time since it was last there, in units of the horizon; the state
    decays by it.
    """
    model = tiny(tokenizer="codes", codes=7, horizon=100, index_day=False, gap_unit=None)
    with torch.no_grad():
        for weight in model.adapter.state.parameters():
            weight.zero_()
        model.adapter.state.weight[:, 0] = 5.0  # only the first code's gap lets the state fade
    months = torch.tensor([[0.0, 10.0, 40.0]], dtype=torch.float64)
    states = {}
    for codes in ([5, 6, 6], [6, 6, 6]):
        found = model(Batch(torch.tensor([codes]), months))
        rows = model.adapter.tokenizer.rows(Batch(torch.tensor([codes]), months))
        delta = compute_gaps(rows)[0, :, 0] / 100
        assert delta.tolist() == pytest.approx([0.0, 0.1, 0.4])
        states[codes[0]] = torch.exp(-torch.relu(model.adapter.state(compute_gaps(rows) / 100)))[
            0, :, 0
        ].tolist()
        assert torch.isfinite(found.pooled).all()
    assert states[5] == pytest.approx([1.0, 0.606531, 0.135335], rel=1e-5)


def test_dropout_is_on_the_vector_alone():
    model, batch = tiny(dropout=0.5).train(), sampled()
    encoded = model(batch)
    assert torch.equal(encoded.hidden[-1], model.eval()(batch).hidden[-1])
    dropped = encoded.pooled == 0
    assert 0 < dropped.sum() < dropped.numel()


# -------------------------------------------------------------------------------------------------------------- the reference


def pypots():
    """The module of PyPOTS by itself: importing the full library would need many others, and writes
    to the home folder.
    """
    found = importlib.util.find_spec("pypots")
    if found is None:
        pytest.skip("pypots is not installed: pip install --no-deps pypots")
    folder = Path(found.submodule_search_locations[0]) / "nn" / "modules" / "grud"
    package = types.ModuleType("grud_reference")
    package.__path__ = [str(folder)]
    sys.modules["grud_reference"] = package
    return importlib.import_module("grud_reference.backbone").BackboneGRUD


@pytest.mark.parity
def test_states_equal_those_of_pypots():
    """`cell = concat`: the state stands also among the inputs of torch's cell."""
    torch.manual_seed(1)
    theirs = pypots()(20, 3, 8).double()
    model, batch = tiny(cell="concat"), sampled()
    cell, adapter = theirs.rnn_cell, model.adapter
    with torch.no_grad():
        inputs, state, seen = cell.weight_ih.split([3, 8, 3], 1)
        adapter.read.weight.copy_(torch.cat((inputs, seen), 1))
        adapter.read.bias.copy_(cell.bias_ih + torch.cat((cell.bias_hh[:16], torch.zeros(8))))
        model.again.weight.copy_(state)
        model.gates.weight.copy_(cell.weight_hh[:16])
        model.candidate.weight.copy_(cell.weight_hh[16:])
        model.candidate.bias.copy_(cell.bias_hh[16:])
        adapter.state.weight.copy_(theirs.temp_decay_h.W)
        adapter.state.bias.copy_(theirs.temp_decay_h.b)
        adapter.value_weight.copy_(theirs.temp_decay_x.W.diagonal())
        adapter.value_bias.copy_(theirs.temp_decay_x.b)
    rows = adapter.tokenizer.rows(batch)
    theirs_last = theirs(
        rows.values,
        rows.mask.double(),
        compute_gaps(rows) / 20,
        torch.zeros(3, dtype=torch.float64),
        carry_forward(rows, torch.zeros(3, dtype=torch.float64)),
    )[1]
    # it starts from a float32 state
    torch.testing.assert_close(model(batch).pooled, theirs_last, rtol=1e-6, atol=1e-6)
