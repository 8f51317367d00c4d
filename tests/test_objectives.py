"""Objectives: index map, masks, scales, stamps, and that training reduces the loss."""

import itertools
import math
from collections.abc import Callable

import planted
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bitimely_core import models, objectives, registry, workflows
from bitimely_core.config import ObjectiveConfig, Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.models.tokenizers import FIRST, IGNORE
from bitimely_core.objectives.token_objectives import GapConfig
from bitimely_core.types import Batch

torch.set_num_threads(1)

NAMES = ["next-previous", "next-previous-strict", "next", "masked", "gap"]
STACKS = ["bitimelygpt", "gpt", "gpt-baar", "timelybert", "timelygpt"]


def tiny(name="bitimelygpt", **options):
    return planted.tiny(name, **options).train()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ragged(lengths=(50, 37, 22), channels=3):
    x = torch.randn(len(lengths), 50, channels, generator=seeded())
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    return Batch(x, mask=mask)


def coded(lengths=(9, 6), length=9):
    codes = torch.randint(FIRST, 52, (len(lengths), length), generator=seeded())
    times = (torch.rand(codes.shape, generator=seeded(1)) * 20).cumsum(1)
    return Batch(codes, times, torch.arange(length) < torch.tensor(lengths)[:, None])


# -------------------------------------------------------------------------------------------------------------- the form of a result


@pytest.mark.parametrize(
    "options",
    [{}, {"tokenizer": "patch"}, {"output_heads": "separate"}, {"target": "tokens"}],
    ids=str,
)
@pytest.mark.parametrize("objective", NAMES)
@pytest.mark.parametrize("name", STACKS)
def test_a_result_is_complete_and_every_parameter_has_a_gradient(name, objective, options):
    model = tiny(name, **options)
    result = objectives.get(objective)(model, ragged(), seeded())
    assert result["prediction"].shape == result["target"].shape == result["valid"].shape
    assert not result["target"].requires_grad
    assert result["valid"].any()
    assert result["loss"].dim() == 0
    torch.testing.assert_close(result["loss"].detach(), sum(result["parts"].values()))
    assert float(result["rel"]) > 0
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    untouched = {key for key, p in model.named_parameters() if p.grad is None}
    unread = {
        "adapter.output.previous.weight",
        "adapter.output.previous.bias",
        "norms.previous.weight",
        "norms.previous.bias",
    }
    assert untouched <= (unread if objective in {"next", "masked", "gap"} else set())


@pytest.mark.parametrize("options", [{}, {"ties": "group"}, {"rotary": "time"}], ids=str)
@pytest.mark.parametrize("objective", NAMES)
def test_codes_are_predicted_with_cross_entropy(objective, options):
    model = tiny(tokenizer="codes", codes=52, **options)
    result = objectives.get(objective)(model, coded(), seeded())
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    assert result["prediction"].shape[-1] == 48  # 47 codes and [EOS]
    per_part = float(result["loss"].detach()) / len(result["parts"])
    start = math.log(2) if options.get("ties") and objective.startswith("next") else math.log(48)
    assert per_part == pytest.approx(start, rel=0.35)


@pytest.mark.parametrize("objective", NAMES)
@pytest.mark.parametrize("make", [ragged, coded], ids=["signals", "codes"])
def test_the_same_generator_gives_the_same_loss(objective, make):
    model = tiny(**({"tokenizer": "codes", "codes": 52} if make is coded else {})).eval()
    ask = objectives.get(objective)
    first, again, other = (
        float(ask(model, make(), seeded(seed))["loss"].detach()) for seed in (0, 0, 1)
    )
    assert first == again
    assert (first != other) == (objective in {"masked", "gap"})


def test_loss_is_the_mean_over_valid_values():
    model = tiny().eval()
    batch = ragged()
    holes = batch.mask[..., None] & (torch.rand(3, 50, 3, generator=seeded(5)) > 0.3)
    result = objectives.get("next")(model, batch._replace(mask=holes))
    errors, prediction = [], result["prediction"].detach()
    for row in range(3):
        end = int(holes[row].any(-1).nonzero().max()) + 1
        for n in range(math.ceil(end / 4)):
            for v in range(3):
                if holes[row, 4 * n, v]:
                    errors.append(float((prediction[row, n, v] - batch.values[row, 4 * n, v]) ** 2))
    assert float(result["loss"].detach()) == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert int(result["count"]) == len(errors)


def test_padding_and_missing_samples_do_not_move_the_loss():
    model = tiny().eval()
    for objective in ("next-previous", "next-previous-strict", "next"):
        batch = ragged()
        loss = objectives.get(objective)(model, batch)["loss"]
        dirty = batch._replace(values=torch.where(batch.mask[..., None], batch.values, torch.nan))
        assert torch.equal(objectives.get(objective)(model, dirty)["loss"], loss)
        longer = Batch(
            F.pad(dirty.values, (0, 0, 0, 30), value=torch.nan), mask=F.pad(batch.mask, (0, 30))
        )
        torch.testing.assert_close(
            objectives.get(objective)(model, longer)["loss"], loss, rtol=1e-5, atol=1e-6
        )


# -------------------------------------------------------------------------------------------------------------- index map


class Oracle(torch.nn.Module):
    """Stands for a model whose state at position p of layer l is the number 1000 l + p: what a loss
    reads shows in its prediction.
    """

    def __init__(self, model):
        super().__init__()
        self.inner, self.config, self.adapter, self.target_scale = (
            model,
            model.config,
            model.adapter,
            torch.tensor(1.0),
        )
        self.plans = []

    def forward(self, batch, *, directions=None, hide=None, attention=False):
        encoded = self.inner(batch, directions=directions, hide=hide)
        self.plans.append(None if directions is None else tuple(directions))
        count = encoded.hidden[-1].shape[1]
        states = tuple(
            1000.0 * layer + torch.arange(float(count)).expand(len(batch.values), -1)[..., None]
            for layer in range(1, 5)
        )
        return encoded._replace(hidden=states)

    def output(self, hidden, which="next", batch=None):
        return hidden.expand(-1, -1, 48 if self.config.tokenizer == "codes" else 3) + (
            0.5 if which == "previous" else 0.0
        )

    def targets(self, batch):
        return self.inner.targets(batch)

    def expand_channels(self, batch):
        return self.inner.expand_channels(batch)

    def adapter_of(self, batch):
        return self.inner.adapter_of(batch)

    def erase(self, batch, chosen):
        return self.inner.erase(batch, chosen)


def read(objective, model, batch):
    """Layer, position and head (`.5` = previous) that predict each target, by part."""
    oracle = Oracle(model)
    result = objectives.get(objective)(oracle, batch, seeded())
    return (
        {
            name: result["prediction"][0, part, 0].tolist()
            for name, part in result["slices"].items()
        },
        result,
        oracle.plans,
    )


def test_next_previous_reads_layers_l_minus_1_and_l():
    seen, result, plans = read("next-previous", tiny(), Batch(torch.randn(1, 50, 3)))
    assert seen["next"] == [3000.0 + p for p in range(13)]  # position p -> token p
    assert seen["previous"] == [4000.5 + p for p in range(2, 15)]  # position p -> token p - 2
    assert torch.equal(result["target"][:, :13], result["target"][:, 13:])
    assert plans == [("forward", "backward", "forward", "backward")]


def test_strict_reads_layer_l_of_two_passes():
    seen, _, plans = read("next-previous-strict", tiny(), Batch(torch.randn(1, 50, 3)))
    assert seen["next"] == [4000.0 + p for p in range(13)]
    assert seen["previous"] == [4000.5 + p for p in range(2, 15)]
    assert plans == [("forward",) * 4, ("backward",) * 4]


def test_next_reads_layer_l_of_a_forward_pass():
    seen, _, plans = read("next", tiny(), Batch(torch.randn(1, 50, 3)))
    assert seen == {"next": [4000.0 + p for p in range(13)]}
    assert plans == [("forward",) * 4]


@pytest.mark.parametrize("objective", ["masked", "gap"])
def test_hidden_tokens_are_read_at_their_own_position(objective):
    seen, _, plans = read(objective, tiny(), Batch(torch.randn(1, 50, 3)))
    # token i stands at position i + 1
    assert seen == {objective: [4000.0 + p for p in range(1, 14)]}
    assert plans == [None]


def test_padded_rows_use_the_same_slices():
    """[EOS] stands at the true end, so a short row's last token is predicted from its own [EOS]."""
    batch = coded()
    seen, result, _ = read("next-previous-strict", tiny(tokenizer="codes", codes=52), batch)
    assert seen["next"] == [4000.0 + p for p in range(10)]
    assert seen["previous"] == [4000.5 + p for p in range(2, 11)]
    classes = batch.values - FIRST
    next_, previous = (result["target"][:, part] for part in result["slices"].values())
    assert next_[0].tolist() == [*classes[0].tolist(), 47]
    assert next_[1].tolist() == [*classes[1, :6].tolist(), 47, IGNORE, IGNORE, IGNORE]
    assert previous[1].tolist() == [*classes[1, :6].tolist(), IGNORE, IGNORE, IGNORE]
    assert torch.equal(result["valid"], result["target"] != IGNORE)


def test_codes_of_one_time_are_predicted_as_a_set():
    model = tiny(tokenizer="codes", codes=10, ties="group")
    codes, times = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0.0, 0.0, 2.0, 5.0, 5.0]])
    result = objectives.get("next-previous-strict")(model, Batch(codes, times))

    def targets_of(part):
        rows = zip(result["target"][0, part], result["valid"][0, part], strict=True)
        return [row.nonzero().flatten().tolist() if valid.all() else None for row, valid in rows]

    # positions 0 .. 5: [SOS] asks for the first time, an event for the next time, the last events
    # for [EOS] (class 5)
    assert targets_of(result["slices"]["next"]) == [[0, 1], [2], [2], [3, 4], [5], [5]]
    # positions 1 .. 6: the first events have nothing before them, [EOS] asks for the last time
    assert targets_of(result["slices"]["previous"]) == [None, None, [0, 1], [2], [2], [3, 4]]


# -------------------------------------------------------------------------------------------------------------- random choices


@pytest.mark.parametrize(("ratio", "count"), [(0.4, 5), (0.1, 1), (0.9, 11)])
@pytest.mark.parametrize("objective", ["masked", "gap"])
def test_the_share_of_hidden_tokens_is_exact(objective, ratio, count):
    result = objectives.get(objective, ratio=ratio)(tiny(), ragged(), seeded())
    hidden = result["valid"].all(-1).sum(1).tolist()
    # rows of 13, 10 and 6 tokens
    assert hidden == [count, int(ratio * 10 + 1e-9), int(ratio * 6 + 1e-9)]


def test_the_share_is_not_rounded_down_by_its_digits():
    assert (
        objectives.token_objectives.count_share(0.29, 100) == 29
    )  # 0.29 * 100 is 28.999999999999996
    assert objectives.token_objectives.count_share(0.4, 7) == 2


def test_masked_input_is_zero_and_its_target_is_not():
    model = tiny()
    seen = {}
    model.register_forward_pre_hook(lambda module, args: seen.update(values=args[0].values))
    batch = Batch(torch.randn(2, 50, 3))
    result = objectives.get("masked")(model, batch, seeded())
    chosen = result["valid"].all(-1)
    gone = (seen["values"] == 0).all(-1)
    assert torch.equal(gone, chosen.repeat_interleave(4, 1)[:, :50])
    assert torch.equal(result["target"], batch.values[:, ::4])


def test_masked_codes_become_mask():
    model = tiny(tokenizer="codes", codes=52)
    seen = {}
    model.register_forward_pre_hook(lambda module, args: seen.update(values=args[0].values))
    batch = coded()
    result = objectives.get("masked")(model, batch, seeded())
    assert torch.equal(seen["values"] == 3, result["valid"])


def test_gaps_are_spans():
    config = GapConfig(name="gap", ratio=0.4, span=5)
    lengths = []
    for seed in range(200):
        hidden = sorted(objectives.token_objectives._draw_spans(100, config, seeded(seed)).tolist())
        assert len(set(hidden)) == 40
        assert 0 <= hidden[0] <= hidden[-1] < 100
        runs = [b - a for a, b in itertools.pairwise(hidden)]
        lengths.append(runs.count(1) / len(runs))
    assert sum(lengths) / len(lengths) > 0.6  # single tokens at this share would give 0.4


def test_gap_leaves_visible_data_alone():
    model = tiny()
    seen = {}
    model.register_forward_pre_hook(lambda module, args: seen.update(values=args[0].values))
    batch = Batch(torch.randn(2, 50, 3))
    objectives.get("gap")(model, batch, seeded())
    assert torch.equal(seen["values"], batch.values)


def test_masks_are_drawn_row_by_row():
    """The first row's mask does not depend on the rows that follow it."""
    model = tiny()
    batch = ragged()
    first = objectives.get("masked")(model, batch, seeded())["valid"][0]
    alone = objectives.get("masked")(model, Batch(batch.values[:1], mask=batch.mask[:1]), seeded())[
        "valid"
    ][0]
    assert torch.equal(first, alone)


def test_sampled_directions_take_turns():
    ask = objectives.get("next-previous-strict", direction_sampling=True)
    draw, seen = seeded(), set()
    for _ in range(12):
        result = ask(tiny(), Batch(torch.randn(1, 50, 3)), draw)
        assert len(result["parts"]) == 1
        seen |= set(result["parts"])
    assert seen == {"next", "previous"}


# -------------------------------------------------------------------------------------------------------------- scale


def test_rel_is_one_for_the_mean_of_the_target():
    model = tiny()
    torch.nn.init.zeros_(model.adapter.output["next"].weight)
    x = torch.randn(64, 50, 3) * torch.tensor([1.0, 5.0, 0.1]) + 7.0
    batches = [Batch(x[:32]), Batch(x[32:])]
    scale = objectives.measure_scale(model, batches)
    assert float(model.target_scale) == pytest.approx(scale)
    assert scale == pytest.approx(
        float(x[:, ::4].flatten(0, 1).var(0, unbiased=False).mean()), rel=1e-4
    )
    with torch.no_grad():
        model.adapter.output["next"].bias.copy_(x[:, ::4].flatten(0, 1).mean(0))
    for objective in NAMES[:3]:
        result = objectives.get(objective)(model, Batch(x))
        assert float(result["rel"]) == pytest.approx(1.0, rel=1e-3)


def test_rel_without_a_measured_scale_uses_the_batch():
    model = tiny()
    result = objectives.get("next")(model, Batch(torch.randn(8, 50, 3)))
    target = result["target"].flatten(0, 1)
    assert float(result["rel"]) == pytest.approx(
        float(result["loss"].detach() / target.var(0, unbiased=False).mean()), rel=1e-4
    )


def test_scale_is_measured_on_so_many_batches(monkeypatch):
    monkeypatch.setattr(objectives, "SCALE_BATCHES", 4)
    model, taken = tiny(), []

    def batches(epoch):
        for step in range(10):
            taken.append(step)
            yield Batch(torch.randn(2, 50, 3))

    objectives.measure_scale(model, batches)
    assert taken == [0, 1, 2, 3]


def test_token_targets_are_standardised_and_have_no_gradient():
    model = tiny(target="tokens")
    batch = ragged()
    targets, valid = model.targets(batch)
    assert not targets.requires_grad
    inside = targets[valid[..., 0]]
    torch.testing.assert_close(inside.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inside.var(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)
    assert torch.equal(model(batch).targets, targets)


# -------------------------------------------------------------------------------------------------------------- stamps and refusals


@pytest.mark.parametrize(
    ("model", "objective", "options", "stamp"),
    [
        ("bitimelygpt", "", {}, True),
        ("bitimelygpt", "next-previous", {"normalise": "window"}, False),
        ("bitimelygpt", "next-previous-strict", {}, True),
        ("bitimelygpt", "gap", {}, True),
        ("timelygpt", "", {}, True),
        ("timelybert", "", {}, True),
        ("bitimelygpt", "next-previous-strict", {"normalise": "window"}, "given window statistics"),
        ("bitimelygpt", "next", {"temporal_conv": "causal"}, "up to batch statistics"),
        (
            "bitimelygpt",
            "next",
            {"temporal_conv": "causal", "normalise": "window"},
            "given window statistics and up to batch statistics",
        ),
        ("bitimelygpt", "next", {"temporal_conv": "causal", "temporal_norm": "layer"}, True),
        ("bitimelygpt", "next-previous-strict", {"target": "tokens"}, False),
        ("bitimelygpt", "next-previous-strict", {"target": "tokens", "tokenizer": "patch"}, True),
        ("bitimelygpt", "none", {}, None),
        ("gpt-baar", "", {}, True),
    ],
)
def test_stamps(model, objective, options, stamp):
    options = dict(options)
    normalise = options.pop("normalise", None)
    config = build_model_config(model, "tiny", **planted.use_paper_tokens(model, options))
    settings = Settings(model=config, objective=ObjectiveConfig(name=objective))
    assert objectives.leak_free(settings, normalise=normalise) == stamp
    assert objectives.leak_free(settings.model_dump(by_alias=True), normalise=normalise) == stamp


def test_strict_is_the_default_and_the_paper_objective_says_what_it_is():
    for name in ("bitimelygpt", "gpt-baar", "lstm-baar"):
        assert registry.objectives[registry.models[name].facts.objective].facts.leak_free is True
    facts = registry.objectives["next-previous"].facts
    assert facts.leak_free is False
    assert "see its targets" in facts.notice
    model, batch = tiny(), Batch(torch.randn(2, 50, 3))
    assert set(objectives.get()(model, batch)["parts"]) == {"next", "previous"}
    assert set(objectives.get()(tiny("timelygpt"), batch)["parts"]) == {"next"}
    assert set(objectives.get(ObjectiveConfig(name="gap"))(model, batch, seeded())["parts"]) == {
        "gap"
    }


def test_unsupported_settings_are_refused():
    batch = Batch(torch.randn(1, 50, 3))
    with pytest.raises(UserError, match="even number") as caught:
        objectives.get("next-previous")(tiny("timelygpt", layers=3), batch)
    assert caught.value.exit_code == 2
    overlapping = tiny(tokenizer="patch", stride=4)
    for objective in NAMES[1:]:
        with pytest.raises(UserError, match="overlap"):
            objectives.get(objective)(overlapping, batch, seeded())
        with pytest.raises(UserError, match="overlap"):
            objectives.leak_free(
                Settings(model=overlapping.config, objective=ObjectiveConfig(name=objective))
            )
    assert torch.isfinite(objectives.get("next-previous")(overlapping, batch)["loss"])
    with pytest.raises(UserError, match="objective none"):
        objectives.get("none")(tiny(), batch)
    with pytest.raises(UserError, match="Did you mean"):
        objectives.get("next-prevous")
    with pytest.raises(UserError, match="ratio"):
        objectives.get("masked", ratio=1.5)


@pytest.mark.parametrize("name", list(registry.models))
def test_each_objective_trains_a_step_or_is_refused_before_it(name):
    """The full grid: every conflict is found before the first step. The error is one line that
    names the supported objectives.
    """
    model = tiny(name, length=64).train()
    batch = Batch(torch.randn(4, 64, 3))
    fit = objectives.compatible_objectives(name)
    for objective in registry.objectives:
        model.zero_grad()
        refused = refusal(model.config, objective)
        if refused is not None:
            assert (refused.code, refused.exit_code) == ("config", 2)
            assert refused.field in {"objective.name", "model.layers"}
            assert "\n" not in str(refused)
            assert (
                objective in {"masked", "masked-runs"}
                if objective in fit
                else all(one in str(refused) for one in fit)
            )
            with pytest.raises(UserError):
                objectives.get(objective)(model, batch, seeded())
        elif objective != "none":  # which `pretrain` refuses, but for models that have no other
            assert objective in fit
            objectives.get(objective)(model, batch, seeded())["loss"].backward()
            slopes = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.isfinite(slope).all() for slope in slopes)
            assert any(slope.any() for slope in slopes)


def refusal(config, objective):
    try:
        objectives.check_compatible(config, objective)
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("name", "objective"),
    [("bilstm", "next"), ("elmo", "next-previous"), ("gpt", "vae"), ("seft", "masked")],
)
def test_an_unsupported_objective_leaves_no_files(name, objective, tmp_path):
    with pytest.raises(UserError, match=f"{objective} for {name}"):
        workflows.pretrain(
            flags={"model": {"name": name}, "objective": {"name": objective}}, workspace=tmp_path
        )
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- learning


def train(model, objective, data, steps, lr=2e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    draw, found = seeded(), []
    for _ in range(steps):
        optimizer.zero_grad()
        result = objective(model, data(draw), draw)
        result["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(result["rel"]))
    return sum(found[-10:]) / 10


def sines(draw):
    phase = torch.rand(16, 1, 2, generator=draw) * 2 * math.pi
    rate = 0.15 + 0.2 * torch.rand(16, 1, 2, generator=draw)
    return Batch(torch.sin(phase + rate * torch.arange(64)[None, :, None]) * 1.4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective", "options", "steps", "limit"),
    [
        ("bitimelygpt", "next-previous-strict", {"tokenizer": "patch"}, 50, 0.5),
        pytest.param("timelybert", "masked", {}, 80, 0.75, marks=pytest.mark.slow),
        pytest.param(
            "bitimelygpt", "gap", {"tokenizer": "patch"}, 90, 0.85, marks=pytest.mark.slow
        ),
        ("gpt", "next", {}, 60, 0.85),
        pytest.param(
            "bitimelygpt",
            "next-previous-strict",
            {"target": "tokens"},
            60,
            0.9,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sines_are_learned_and_tokens_do_not_collapse(name, objective, options, steps, limit):
    """The loss falls as a share of the target's variance, and not because the tokens shrink."""
    torch.manual_seed(0)
    model = planted.tiny(name, channels=2, length=64, **options).train()
    objectives.measure_scale(model, [sines(seeded(9)) for _ in range(4)])
    probe = sines(seeded(3))
    before = model(probe).tokens.var()
    assert train(model, objectives.get(objective), sines, steps) < limit
    assert model(probe).tokens.var() > 0.2 * before


@pytest.mark.slow
def test_periodic_codes_are_learned():
    torch.manual_seed(0)
    model = models.build("bitimelygpt", preset="tiny", tokenizer="codes", codes=15, length=12)

    def cycles(draw):
        start = torch.randint(10, (16, 1), generator=draw)
        return Batch(FIRST + (start + torch.arange(12)) % 10, torch.arange(12.0).expand(16, -1))

    objectives.measure_scale(model, [cycles(seeded())])
    assert float(model.target_scale) == pytest.approx(math.log(10), rel=0.05)
    assert train(model, objectives.get("next-previous-strict"), cycles, 40) < 0.3


@pytest.mark.parametrize("objective", NAMES)
def test_bf16_losses_are_finite(objective):
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16):
        result = objectives.get(objective)(model, ragged(), seeded())
    assert result["loss"].dtype == torch.float32
    result["loss"].backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("objective", "model"),
    [("next-previous-strict", "bitimelygpt"), ("next-previous", "bitimelygpt"), ("ts-tcc", "ts-tcc"), ("tf-c", "tf-c"), ("tf-c-code", "tf-c"), ("drop", "crt")],
)  # fmt: skip
def test_passes_are_those_of_a_step(objective: str, model: str) -> None:
    """The operations of a step over those of one pass, as torch counts them; losses that compare
    states add some.
    """
    built, batch = (
        planted.tiny(model, channels=2, length=512).train(),
        Batch(torch.randn(4, 512, 2)),
    )

    def count(compute: Callable[..., object], *arguments: object) -> int:
        with FlopCounterMode(display=False) as counter:
            compute(*arguments)
        return counter.get_total_flops()

    ratio = count(objectives.get(objective), built, batch) / count(built, batch)
    passes = registry.objectives[objective].facts.passes
    assert passes - 0.1 < ratio < passes + 0.5


def test_ts2vec_passes_twice() -> None:
    """Its crops are shorter than the window and its loss costs their square: calls are counted, not
    operations.
    """
    built, calls = models.build("ts2vec", preset="tiny", channels=2, length=64), []
    built.register_forward_hook(lambda *_: calls.append(1))
    objectives.get("ts2vec")(built, Batch(torch.randn(4, 64, 2)))
    assert len(calls) == registry.objectives["ts2vec"].facts.passes == 2
