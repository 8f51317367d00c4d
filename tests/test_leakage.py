"""Which objectives show a model its targets: exactly, at random weights, and by training on
noise.
"""

import pytest
import torch
from planted import make_run, tiny, use_paper_tokens

from bitimely_core import models, objectives, registry
from bitimely_core.analyses import leakage as leaking
from bitimely_core.analyses.leakage import leakage
from bitimely_core.config import ObjectiveConfig, Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.page import Figure, LinePlot, Page, Table
from bitimely_core.types import Batch

torch.set_num_threads(1)

NAMES = ["next-previous", "next-previous-strict", "next", "masked", "gap"]
STACKS = ["bitimelygpt", "gpt", "gpt-baar", "timelybert", "timelygpt"]
EVERY = [
    {},
    {"tokenizer": "patch"},
    {"tokenizer": "patch", "crop": "start"},
    {"target": "tokens"},
    {"output_heads": "separate"},
]
CODES = [{"tokenizer": "codes", "codes": 52}, {"tokenizer": "codes", "codes": 52, "numbers": True}]
RETENTION = [
    {"temporal_conv": "causal"},
    {"temporal_conv": "causal", "temporal_norm": "layer"},
    {"retention_norm": "rms"},
    {"ffn": "plain"},
    {"decay": {"kind": "learnable"}},
    {"form": "chunkwise", "chunk": 4},
    {"form": "recurrent"},
    {"xpos_scale": True},
    {"tokenizer": "codes", "codes": 52, "ties": "group"},
    {"tokenizer": "codes", "codes": 52, "ties": "group", "numbers": True},
    {"tokenizer": "codes", "codes": 52, "rotary": "time"},
]


def config_of(name, **options):
    return build_model_config(name, "tiny", channels=2, **use_paper_tokens(name, options))


def measured(config, objective, mode="eval"):
    measure = (
        leaking.measure_code_changes if config.tokenizer == "codes" else leaking.measure_jacobian
    )
    return measure(
        leaking._shrink_config(config), objectives.get(objective), 0, training=mode == "train"
    )


def cases():
    for name in STACKS:
        attention = registry.models[name].facts.family == "attention"
        for options in EVERY + CODES + ([] if attention else RETENTION):
            if name == "timelybert" and "xpos_scale" in options:
                continue
            # the other stacks have the same layers
            is_quick = name == "bitimelygpt" or not options
            yield pytest.param(name, options, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("objective", NAMES)
@pytest.mark.parametrize(
    ("name", "options"),
    list(cases()),
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(map(str, value.values())) or "conv"
    ),
)
def test_no_target_leak(name, options, objective):
    """What is stamped leak-free has a derivative of exactly 0; what is stamped false has another
    one. From the raw signal, in float64.
    """
    config = config_of(name, **options)
    stamp = objectives.leak_free(Settings(model=config, objective=ObjectiveConfig(name=objective)))
    for mode in (
        ("eval", "train") if not options or "temporal_conv" in options else ("eval",)
    ):  # without dropout only batch norm tells them apart
        found = measured(config, objective, mode)
        assert found.allowed > 0  # else the zeros are those of a dead model
        if stamp is True or (isinstance(stamp, str) and mode == "eval"):
            assert found.target == found.beyond == 0
        if stamp is False:
            assert found.target > 1e-6


def largest(name, objective, layers, **options):
    """The largest own-target derivative of each part."""
    model = tiny(name, channels=2, length=40, layers=layers, **options).double()
    x = torch.randn(1, 40, 2, dtype=torch.float64, requires_grad=True)
    result = objectives.get(objective)(model, Batch(x))
    out = {}
    for part, where in result["slices"].items():
        slopes = []
        for n in range(10):
            (slope,) = torch.autograd.grad(
                result["prediction"][0, where][n].sum(), x, retain_graph=True
            )
            slopes.append(float(slope[0, 4 * n].abs().max()))
        out[part] = max(slopes)
    return out


@pytest.mark.parametrize("layers", [2, 4, 6, 8])
@pytest.mark.parametrize("name", ["bitimelygpt", "gpt-baar"])
def test_next_previous_leaks_by_depth(name, layers):
    """The next token, read at layer 1, has no leakage with two layers only; the previous token
    always has.
    """
    found = largest(name, "next-previous", layers)
    assert (found["next"] == 0) == (layers == 2)
    assert found["previous"] > 1e-5


def test_a_window_statistic_leaks():
    """Why z-scores of a window are stamped: from the samples before them, every prediction depends
    on its own target.
    """
    torch.manual_seed(0)
    model = tiny("bitimelygpt", channels=1, length=40).double()
    raw = torch.randn(1, 40, 1, dtype=torch.float64, requires_grad=True)
    window = (raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)
    prediction = objectives.get("next-previous-strict")(model, Batch(window))["prediction"]
    (slope,) = torch.autograd.grad(prediction[0, 5].sum(), raw)
    assert slope[0, 20] != 0


def test_the_measurement_catches_what_it_should(monkeypatch):
    """A centred kernel over the tokens, as in the released code, shows token n + 1 to token n: the
    same Jacobian must find it.
    """
    torch.manual_seed(0)
    model = tiny("timelygpt", channels=2, length=38).double()
    mix = torch.nn.Conv1d(64, 64, 3, padding=1).double()
    model.adapter.embedding.register_forward_hook(
        lambda module, args, out: mix(out.transpose(1, 2)).transpose(1, 2)
    )
    monkeypatch.setattr(leaking.building, "from_config", lambda config: model)
    found = leaking.measure_jacobian(model.config, objectives.get("next"), 0, training=False)
    assert found.target > 1e-3


# -------------------------------------------------------------------------------------------------------------- the page


def test_page_of_the_paper_objective():
    page = leakage(steps=0, objective="next-previous")
    assert isinstance(page, Page)
    assert page.summary["leak_free"] is False
    assert page.summary["stamped"] is False
    assert page.summary["contradiction"] is False
    assert page.summary["white_noise"] is None
    assert page.summary["jacobian"]["eval"]["own"] > 0
    assert "leaks" in page.verdict
    assert [type(block) for block in page.blocks] == [Table, Table, Figure]
    # both directions of three patches of 3,000 / 16 samples, the last of half its samples
    assert page.blocks[2].data.values.shape == (2 * 3, 3 * 188 - 188 // 2)


def test_page_of_the_strict_objective():
    page = leakage(objective="next-previous-strict", steps=3)
    assert page.summary["leak_free"] is True
    assert page.summary["white_noise"]["values"] >= 20_000
    assert isinstance(page.blocks[-1].data, LinePlot)
    assert "leak-free here" in page.verdict


@pytest.mark.parametrize("preset", ["3m", "tiny"])
def test_pages_of_codes_and_other_models(preset):
    page = leakage(model="timelygpt", preset=preset, steps=2)
    assert page.summary["leak_free"] is True
    assert page.facts["objective"] == "next"


def test_the_zeros_of_a_dead_model_prove_nothing(monkeypatch):
    made = leaking.building.from_config

    def dead(config):
        model = made(config)
        torch.nn.init.zeros_(model.adapter.output["next"].weight)
        return model

    monkeypatch.setattr(leaking.building, "from_config", dead)
    page = leakage(objective="next", steps=0)
    assert page.summary["leak_free"] is False
    assert any("dead" in line for line in page.notices)


def test_objectives_without_a_target():
    page = leakage(objective="none")
    assert page.summary["leak_free"] is None
    assert "no target" in page.verdict


def run_of(model, settings, stamp, kind="pretrain"):
    return make_run("mine", model, None, kind=kind, settings=settings, leak_free=stamp)


@pytest.mark.slow
def test_a_run_that_contradicts_its_stamp_is_reported():
    config = config_of("bitimelygpt")
    settings = Settings(model=config, objective=ObjectiveConfig(name="next-previous"))
    model = models.from_config(config)
    consistent = leakage([run_of(model, settings, False)], steps=0)
    assert (consistent.summary["leak_free"], consistent.summary["contradiction"]) == (False, False)
    contradicting = leakage([run_of(model, settings, True)], steps=0)
    assert (contradicting.summary["stamped"], contradicting.summary["contradiction"]) == (
        True,
        True,
    )
    assert any("stamped leak-free" in line for line in contradicting.notices)
    with pytest.raises(UserError, match="takes one") as caught:
        leakage([run_of(model, settings, True)] * 2)
    assert caught.value.exit_code == 2


def test_a_condition_is_no_contradiction():
    config = config_of("timelygpt", temporal_conv="causal")
    settings = Settings(model=config, objective=ObjectiveConfig(name="next"))
    page = leakage(
        [run_of(models.from_config(config), settings, "up to batch statistics")], steps=0
    )
    assert page.summary["jacobian"]["eval"]["own"] == 0 < page.summary["jacobian"]["train"]["own"]
    assert (page.summary["leak_free"], page.summary["contradiction"]) == (False, False)


def test_the_analysis_leaves_torch_as_it_was():
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    leakage(objective="next", steps=2)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.slow
def test_the_same_seed_measures_the_same():
    assert leakage(steps=2).summary == leakage(steps=2).summary


# -------------------------------------------------------------------------------------------------------------- white noise


@pytest.mark.slow
def test_next_previous_copies_noise_within_a_few_steps():
    found = leaking.train_on_noise(
        config_of("bitimelygpt", tokenizer="codes", codes=52), objectives.get("next-previous"), 120
    )
    assert found.rel < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "steps", "leaks"),
    [("next-previous", 300, True), ("next-previous-strict", 150, False), ("gap", 150, False)],
)
def test_noise_stays_noise_without_a_leak(objective, steps, leaks):
    found = leaking.train_on_noise(
        build_model_config("bitimelygpt", "tiny", channels=4, tokenizer="conv"),
        objectives.get(objective),
        steps,
    )
    assert (found.rel < 0.9) if leaks else (0.97 <= found.rel < 1.03)
    assert found.values >= 20_000
