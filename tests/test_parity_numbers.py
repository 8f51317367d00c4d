"""Vectors equal those that tests/fixtures/make_parity.py computes from the papers' equations with numpy alone."""

import json
from pathlib import Path

import pytest
import torch
from fixtures import make_parity as made

from bitimely_core import models
from bitimely_core.types import Batch

SETTINGS = {
    "gru-d": {},
    "seft": {"heads": made.H, "ffn_dim": made.HIDDEN},
    "mtand-enc": {"heads": 1, "reference": made.R},
    "raindrop": {"layers": 1, "heads": made.H, "ffn_dim": 8, "message": "paper"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_vectors_equal_those_of_the_equations(name):
    model = models.build(name, preset="tiny", channels=made.V, length=made.T, dim=made.D, **SETTINGS[name]).double().eval()
    own = dict(model.named_parameters())
    assert {key: tuple(weight.shape) for key, weight in own.items()} == made.SHAPES[name]
    with torch.no_grad():
        for key, weight in made.weights(name).items():
            own[key].copy_(torch.from_numpy(weight))
        values, seen = made.windows()
        found = model(Batch(torch.from_numpy(values), mask=torch.from_numpy(seen))).pooled
    wanted = json.loads((Path(made.__file__).with_name("parity.json")).read_text())[name]
    assert float((found[0] - found[1]).abs().max()) > 1e-3, "the numbers depend on the window"
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-10)
