"""Vectors and losses of every model equal those that tests/fixtures/parity computes from the
papers' equations with numpy alone.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import parity
from fixtures.parity import contrastive, directed, frequency, irregular, networks, rule, tokens

from bitimely_core import heads, models, objectives, registry
from bitimely_core.types import Batch

CASES = {name: (family, case) for family in parity.FAMILIES for name, case in family.CASES.items()}
DERIVED = ("target_scale", "log_decay", "points", "modes")  # buffers that follow from the settings
STACK = {"layers": 2, "heads": rule.HEADS, "dim": rule.DIM, "ffn_dim": rule.HIDDEN}
SPARSE = {"dim": irregular.D, "heads": rule.HEADS, "ffn_dim": rule.HIDDEN}
SETTINGS = {
    **dict.fromkeys(CASES, STACK),
    **dict.fromkeys(irregular.CASES, SPARSE),
    **dict.fromkeys(directed.CASES, STACK | {"tokenizer": "conv"}),
    **dict.fromkeys(
        ("bitimelygpt", "timelygpt", "timelybert"),
        STACK | {"tokenizer": "conv", "value_dim": directed.VALUES},
    ),
    "patchtst": STACK | {"patch": tokens.PATCH},
    "fedformer": STACK | {"modes": len(frequency.MODES)},
    "timesnet": STACK | {"top_periods": frequency.PERIODS, "kernels": frequency.KERNELS},
    "ts-tcc": STACK | {"value_dim": contrastive.CONTEXT, "first_stride": 1},
    "tf-c": STACK | {"first_stride": 1},
    "crt": STACK | {"dim": contrastive.WIDE, "patch": contrastive.PATCH},
    "s4": STACK
    | {"state": directed.STATE, "encoder_layers": 2, "ahead": directed.AHEAD, "predictor": "each"},
    "mtand": SPARSE | {"heads": 1, "reference": irregular.POINTS, "latent": irregular.LATENT},
    "mtand-enc": SPARSE | {"heads": 1, "reference": irregular.POINTS},
    "resnet": STACK | {"dim": networks.WIDE},
    "inceptiontime": STACK
    | {
        "dim": networks.WIDE,
        "layers": networks.MODULES,
        "bottleneck": networks.BOTTLENECK,
        "kernel": networks.LONGEST,
    },
    "raindrop": SPARSE | {"layers": 1, "ffn_dim": 8, "message": "paper"},
}
ALTERNATING = ("bitimelygpt", "gpt-baar", "lstm-baar")  # by the paper's objective
OBJECTIVES = {"mtand": {"samples": irregular.SAMPLES}, "s4": {"negatives": directed.NEGATIVES}}


@pytest.fixture
def _draws_by_rule(monkeypatch):
    """Random numbers of the objectives by the rule."""

    def flatten(shape):
        return shape[0] if shape and not isinstance(shape[0], int) else shape

    monkeypatch.setattr(
        torch, "rand", lambda *shape, **_: torch.from_numpy(rule.draw_uniform(*flatten(shape)))
    )
    monkeypatch.setattr(
        torch, "randn", lambda *shape, **_: torch.from_numpy(rule.draw_normal(*flatten(shape)))
    )
    monkeypatch.setattr(
        torch, "randperm", lambda count, **_: torch.from_numpy(rule.draw_order(count))
    )
    monkeypatch.setattr(
        torch,
        "randint",
        lambda *limits, **_: torch.as_tensor(
            rule.draw_integers(*((0, *limits) if len(limits) == 2 else limits)[:2], *limits[-1])
        ),
    )


def make_batch(family):
    """The windows of a family, the shorter ones padded."""
    if family is irregular:
        values, mask = (np.stack(part) for part in zip(*rule.SPARSE, strict=True))
        return Batch(torch.from_numpy(values), mask=torch.from_numpy(mask))
    values = np.stack(
        [
            np.pad(row, ((0, rule.LENGTH - len(row)), (0, 0)), constant_values=9.0)
            for row in rule.ROWS
        ]
    )
    return Batch(
        torch.from_numpy(values), mask=torch.arange(rule.LENGTH) < torch.tensor(rule.ENDS)[:, None]
    )


@torch.no_grad()
def build_by_rule(name):
    """The model with the weights that the equations read; all others are NaN, since nothing may
    depend on them.
    """
    family, case = CASES[name]
    length = rule.SHORT if family is irregular else rule.LENGTH
    model = (
        models.build(name, preset="tiny", channels=rule.V, length=length, **SETTINGS[name])
        .double()
        .eval()
    )
    if name == "fedformer":
        model.fourier.modes.copy_(torch.tensor(frequency.MODES))
    _, weights = rule.compute(case)
    own = dict(model.named_parameters()) | {
        key: x
        for key, x in model.named_buffers()
        if x.is_floating_point() and not key.endswith(DERIVED)
    }
    assert set(weights) <= set(own)
    for key, weight in own.items():
        assert key not in weights or tuple(weight.shape) == weights[key].shape, key
        weight.copy_(torch.from_numpy(weights[key])) if key in weights else weight.fill_(torch.nan)
    return model


@pytest.mark.usefixtures("_draws_by_rule")
@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_those_of_the_equations(name):
    wanted = json.loads((Path(parity.__file__).parent.with_name("parity.json")).read_text())[name]
    model, batch = build_by_rule(name), make_batch(CASES[name][0])
    facts = registry.models[name].facts
    with torch.no_grad():
        found = {"vector": heads.compute_vectors(model, batch, facts.readout)}
        if name == "mtand":  # one draw for all rows by the rule, not one for each
            noise = rule.draw_normal(
                len(batch.values), irregular.SAMPLES, irregular.POINTS, irregular.LATENT
            )
            batch = batch._replace(draws=torch.from_numpy(noise)[:, None])
        if "loss" in wanted:
            objective = "next-previous" if name in ALTERNATING else facts.objective
            compute_loss = objectives.get(objective, **OBJECTIVES.get(name, {}))
            found["loss"] = compute_loss(model, batch)["loss"]
    assert float((found["vector"][0] - found["vector"][1]).abs().max()) > 1e-3, (
        "the numbers depend on the window"
    )
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(
            found[key], torch.tensor(value, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


def test_every_model_has_numbers_which_are_those_of_the_equations():
    stored = json.loads((Path(parity.__file__).parent.with_name("parity.json")).read_text())
    assert set(stored) == set(CASES) == set(registry.models)
    for name, (_, case) in CASES.items():
        for key, value in rule.compute(case)[0].items():
            np.testing.assert_allclose(value, stored[name][key], rtol=1e-12, atol=1e-12)
