"""S4 against its recurrence and the system that it discretises; contrastive predictive coding
against slow loops.
"""

import math
from functools import partial

import planted
import pytest
import small
import torch
from planted import lively, seeded
from torch import nn

from bitimely_cli.main import main
from bitimely_core import heads, models, objectives
from bitimely_core.analyses.leakage import leakage, measure_code_changes, measure_jacobian
from bitimely_core.config import ObjectiveConfig, Settings, build_model_config
from bitimely_core.errors import UserError
from bitimely_core.train.metrics_log import read_metrics
from bitimely_core.train.optimizer import SLOW_RATE, group_parameters
from bitimely_core.types import Batch
from bitimely_core.zoo.s4 import (
    CPCConfig,
    DiagonalKernel,
    S4Config,
    choose_fft_length,
    draw_negatives,
)

torch.set_num_threads(1)

tiny = partial(planted.tiny, "s4")
KINDS = [(method, start) for method in ("zoh", "bilinear") for start in ("lin", "inv")]


# -------------------------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize(("method", "start"), KINDS)
@pytest.mark.parametrize("sides", ["one", "two"])
def test_convolution_and_recurrence_are_equal(method, start, sides):
    """1e-5 in float32 and 1e-12 in float64, with padding."""
    for kind, within in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        x = torch.randn(2, 300, 3, generator=seeded()).to(kind)
        mask = torch.arange(300) < torch.tensor([[300], [211]])
        made = (
            tiny(length=300, sides=sides, discretisation=method, start=start, state=16, form=form)
            for form in ("fft", "recurrent", "direct")
        )
        fast, slow, taps = (model.to(kind)(Batch(x, mask=mask)).hidden[-1] for model in made)
        for other in (slow, taps):
            torch.testing.assert_close(fast[0], other[0], rtol=0, atol=within)
            torch.testing.assert_close(fast[1, :213], other[1, :213], rtol=0, atol=within)


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_a_kernel_is_its_system(method):
    """Against the matrix exponential (zoh) and the solved trapezoid rule (bilinear) of x' = A x + B
    u, one step after the other.
    """
    config = S4Config(name="s4", dim=3, state=6, discretisation=method)
    torch.manual_seed(0)
    kernel = DiagonalKernel(config).double().requires_grad_(False)
    taps = kernel(12)
    for channel in range(3):
        step = float(kernel.log_step[channel].exp())
        poles = [
            complex(-math.exp(r), f)
            for r, f in zip(
                kernel.log_decay[channel].tolist(), kernel.frequency[channel].tolist(), strict=True
            )
        ]
        out = [complex(*c) for c in kernel.out[channel].tolist()]
        a = torch.diag(torch.tensor(poles, dtype=torch.complex128))
        one = torch.eye(3, dtype=torch.complex128)
        b = torch.ones(3, 1, dtype=torch.complex128)
        if method == "zoh":
            both = torch.linalg.matrix_exp(
                step
                * torch.cat((torch.cat((a, b), 1), torch.zeros(1, 4, dtype=torch.complex128)), 0)
            )
            fade, entry = both[:3, :3], both[:3, 3:]
        else:
            fade = torch.linalg.solve(one - step / 2 * a, one + step / 2 * a)
            entry = torch.linalg.solve(one - step / 2 * a, step * b)
        state = entry
        for tap in taps[channel]:
            assert float(tap) == pytest.approx(
                2 * sum(c * s for c, s in zip(out, state[:, 0].tolist(), strict=True)).real,
                abs=1e-12,
            )
            state = fade @ state


def test_the_start_is_the_papers():
    lin, inv = (
        DiagonalKernel(S4Config(name="s4", dim=2, state=8, start=start)) for start in ("lin", "inv")
    )
    assert lin.log_decay.exp().tolist() == [[0.5] * 4] * 2
    assert lin.frequency[0].tolist() == pytest.approx([0, math.pi, 2 * math.pi, 3 * math.pi])
    assert inv.frequency[1].tolist() == pytest.approx(
        [8 / math.pi * (8 / (2 * n + 1) - 1) for n in range(4)]
    )
    steps = DiagonalKernel(S4Config(name="s4", dim=2000)).log_step.detach().exp()
    assert 0.001 <= float(steps.min()) < 0.0012
    assert 0.08 < float(steps.max()) <= 0.1


def test_lengths_of_transforms_are_long_enough_and_fast():
    for count in range(1, 400):
        size = choose_fft_length(count)
        assert count <= size < 1.5 * count + 2
        assert size // (size & -size) in (1, 3, 5)


def test_events_are_impulses_that_fade_over_their_months():
    """Against sum K(t - s) u(s), with K at any time between."""
    model = lively(tiny(tokenizer="codes", codes=20, layers=1, step_max=1.0, encoder_norm="layer"))
    codes = torch.randint(5, 20, (2, 7), generator=seeded())
    times = torch.tensor(
        [[0.0, 0.5, 0.5, 4.0, 9.25, 30.0, 31.0], [0.0, 1, 2, 3, 4, 5, 6]], dtype=torch.float64
    )
    layer, found = model.layers[0], []
    layer.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    states = model(Batch(codes, times, end=torch.tensor([40.0, 7.0]))).hidden[-1]
    (u,) = found
    at = torch.cat((times[:, :1], times, torch.tensor([[40.0], [7.0]], dtype=torch.float64)), 1)
    rate, weight = layer.kernel.discretise()
    y = u * layer.skip
    for row in range(2):
        for n in range(9):
            for m in range(n + 1):
                y[row, n] = (
                    y[row, n]
                    + 2
                    * (weight * (rate * (at[row, n] - at[row, m])).exp()).sum(1).real
                    * u[row, m]
                )
    mixed = nn.functional.gelu(y) @ layer.mix.weight.T + layer.mix.bias
    wanted = layer.norm(u + mixed[..., :64] * torch.sigmoid(mixed[..., 64:]))
    torch.testing.assert_close(states, wanted, rtol=1e-10, atol=1e-10)
    later = model(Batch(codes, times, end=torch.tensor([52.0, 19.0])))
    assert not torch.allclose(
        later.pooled, model(Batch(codes, times, end=torch.tensor([40.0, 7.0]))).pooled
    )


def test_a_layer_of_two_sides_reads_both_and_one_of_one_side_the_past():
    x = torch.randn(1, 50, 3, dtype=torch.float64, requires_grad=True)
    for sides, after in (("one", False), ("two", True)):
        model = lively(tiny(sides=sides, encoder_norm="layer"))
        (slope,) = torch.autograd.grad(model(Batch(x)).hidden[-1][0, 21].sum(), x)
        assert (slope[0, :21] != 0).any(1).all()
        assert bool((slope[0, 21:] != 0).any()) == after
    assert tiny(sides="two").directions == ("both", "both")


def test_parameters_of_the_system_do_not_decay_and_learn_slowly():
    model = tiny(sides="two")
    groups = group_parameters(model, 0.1)
    slow = next(group for group in groups if group.get("largest") == SLOW_RATE)
    wanted = {
        f"layers.{i}.{k}.{name}"
        for i in range(2)
        for k in ("kernel", "back")
        for name in ("log_step", "log_decay", "frequency")
    }
    assert set(slow["names"]) == wanted
    assert slow["weight_decay"] == 0.0
    assert sorted(name for group in groups for name in group["names"]) == sorted(
        name for name, _ in model.named_parameters()
    )


def test_the_preset_has_the_parameters_of_the_paper():
    """3.8 million; by hand: encoder, entry, four layers, predictor, the rest."""
    d, v = 512, 12
    encoder = v * d + d + 3 * (d * d + d) + 4 * 2 * d
    layer = d + 2 * d * 4 + d * 4 * 2 + d + 2 * d * d + 2 * d + 2 * d
    count = encoder + d * d + d + 4 * layer + (d * d + d + d * d) + 2 * d + 2 * d + d * v + v
    config = build_model_config("s4", "3.8m-ecg", **models.default_shape("3.8m-ecg"))
    assert models.count_configured(config) == count == pytest.approx(3.8e6, rel=0.03)
    others = [
        build_model_config(name, "3.8m-ecg", **models.default_shape("3.8m-ecg"), **tokens)
        for name, tokens in (
            *((name, {"tokenizer": "conv"}) for name in ("bitimelygpt", "gpt", "lstm")),
            ("patchtst", {}),
        )
    ]
    assert [models.count_configured(one) for one in others] == [pytest.approx(3.8e6, rel=0.05)] * 4


def test_what_does_not_fit_is_refused():
    for options, message in (({"step_min": 0.2}, "ascending"), ({"state": 7}, "multiple of 2")):
        with pytest.raises(UserError, match=message) as caught:
            tiny(**options)
        assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="read the past") as caught:
        objectives.get("cpc")(tiny(sides="two"), Batch(torch.randn(2, 50, 3)))
    assert caught.value.exit_code == 2


# -------------------------------------------------------------------------------------------------------------- contrastive predictive coding


@pytest.mark.parametrize("predictor", ["each", "last"])
@pytest.mark.parametrize("source", ["sequence", "rows"])
def test_the_loss_is_its_formula(predictor, source):
    model = lively(tiny(ahead=3, predictor=predictor))
    x = torch.randn(3, 9, 3, dtype=torch.float64, generator=seeded())
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    batch, config = Batch(x, mask=mask), CPCConfig(name="cpc", negatives=5, source=source)
    found = objectives.get(config)(model, batch, seeded(4))
    index, _ = draw_negatives(mask, config, seeded(4))
    embedded = model.embed(batch)
    z = model.encode(embedded.x, embedded.real)
    c = model.norm(model.read_encoded(z, embedded, ("forward",) * 2)[-1])[:, 1:-1]
    z = z[:, 1:-1]
    losses, chances = [], []
    for row in range(3):
        for t in range(9):
            for k in (1, 2, 3) if predictor == "each" else (3,):
                if t + k >= (6 if row == 1 else 9):
                    continue
                guess = model.predict(c[row, t]).unflatten(-1, (-1, 64))[
                    k - 1 if predictor == "each" else 0
                ]
                drawn = [int(j) for j in index[row] if int(j) != 9 * row + t + k]
                assert all((j // 9 == row) == (source == "sequence") for j in drawn)
                scores = torch.stack(
                    [guess @ z[row, t + k], *(guess @ z[j // 9, j % 9] for j in drawn)]
                )
                losses.append(float((scores.logsumexp(0) - scores[0]).detach()))
                chances.append(math.log(1 + len(drawn)))
    assert float(found["loss"].detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-10)
    assert float(found["rel"]) == pytest.approx(sum(losses) / sum(chances), rel=1e-10)
    assert int(found["count"]) == len(losses)


def test_one_vector_for_everything_has_rel_1():
    model = tiny(ahead=2)
    nn.init.zeros_(model.predict[2].weight)
    assert float(
        objectives.get("cpc")(model, Batch(torch.randn(4, 40, 3)), seeded())["rel"]
    ) == pytest.approx(1.0)


def test_a_last_batch_of_one_window_is_left_out_where_negatives_are_of_other_rows(tmp_path):
    """23 training windows in batches of eleven: the third batch of an epoch has one, which no other
    window can give a negative.
    """
    home = small.copy_data(tmp_path / "home")
    argv = [
        "pretrain",
        "--model",
        "s4",
        "--data",
        "generic/classification",
        "--run",
        "rows",
        "--batch-size",
        "11",
        "--epochs",
        "2",
    ]
    for setting in (
        "objective.source=rows",
        "objective.negatives=4",
        "model.layers=1",
        "model.dim=8",
        "model.ahead=2",
        "train.log_every=1",
    ):
        argv += ["--set", setting]
    assert main([*argv, "-w", str(home)]) == 0
    assert [
        line["step"] for line in read_metrics(home / "runs" / "rows") if line["split"] == "train"
    ] == [1, 2, 3, 4]


def test_the_stamp_follows_from_tokens_and_norm():
    def stamp(**options):
        return objectives.leak_free(
            Settings(
                model=build_model_config("s4", "tiny", **options),
                objective=ObjectiveConfig(name="cpc"),
            )
        )

    assert stamp() == "up to batch statistics"
    assert stamp(encoder_norm="layer") is True
    assert stamp(encoder_norm="layer", tokenizer="patch") is True
    assert stamp(encoder_norm="layer", tokenizer="conv") is False  # neighbours share samples
    with pytest.raises(UserError, match="overlap"):
        stamp(tokenizer="patch", patch=8, stride=4)


@pytest.mark.parametrize(
    ("options", "leaks"),
    [
        pytest.param({"tokenizer": "steps"}, False, marks=pytest.mark.slow),
        ({"tokenizer": "patch"}, False),
        ({"tokenizer": "conv"}, True),
        ({"codes": 25}, False),
    ],
)
def test_the_stamp_is_measured(options, leaks):
    """No context reads a sample of what it has to find; with batch norm only running statistics are
    such.
    """
    codes = "codes" in options
    for norm in ("layer", "batch"):
        config = build_model_config(
            "s4",
            "tiny",
            channels=2,
            length=40 if not codes else 10,
            encoder_norm=norm,
            ahead=3,
            predictor="each",
            **options,
        )
        config = config.model_copy(update={"tokenizer": "codes"} if codes else {})
        measure = measure_code_changes if codes else measure_jacobian
        ask = objectives.get("cpc", source="rows")
        still, training = (measure(config, ask, 0, training=mode) for mode in (False, True))
        assert still.allowed > 0
        assert (max(still.target, still.beyond) > 0) == leaks
        assert (max(training.target, training.beyond) > 0) == (leaks or norm == "batch")


@pytest.mark.slow
def test_noise_cannot_be_found():
    page = leakage(model="s4", steps=3)
    assert page.summary["white_noise"]["rel"] > 0.97
    assert page.summary["contradiction"] is False
    assert "leak-free up to batch statistics" in page.verdict
    assert (
        page.summary["jacobian"]["eval"]["own"] == 0 < page.summary["jacobian"]["eval"]["allowed"]
    )


@pytest.mark.slow
def test_it_learns_to_find_what_comes():
    """Rows of different frequencies: chance is 1, and each row's future follows from its past."""
    model = planted.tiny(
        "s4", channels=1, length=64, ahead=4, predictor="each", dropout=0.0
    ).train()
    draw = seeded()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ask, rel = objectives.get("cpc", negatives=32, source="rows"), []
    for _ in range(60):
        phase = torch.rand(16, 1, 1, generator=draw) * 6.28
        pace = 0.3 + torch.rand(16, 1, 1, generator=draw)
        result = ask(model, Batch((torch.arange(64.0)[None, :, None] * pace + phase).sin()), draw)
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        rel.append(float(result["rel"].detach()))
    assert sum(rel[-5:]) / 5 < 0.92


@pytest.mark.parametrize("sides", ["one", "two"])
def test_padding_and_company_change_no_vector(sides):
    model = lively(tiny(sides=sides))
    x = torch.randn(3, 50, 3, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor([[50], [31], [7]])
    together = heads.compute_vectors(
        model, Batch(torch.where(mask[..., None], x, 9.0), mask=mask), "native"
    )
    for row, length in enumerate((50, 31, 7)):
        alone = heads.compute_vectors(model, Batch(x[row : row + 1, :length]), "native")
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-10, atol=1e-12)
    assert torch.isfinite(
        heads.compute_vectors(model, Batch(x, mask=mask & (torch.arange(3) > 0)[:, None]), "native")
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize("events", [False, True])
def test_an_exported_graph_takes_any_number_of_rows(events):
    options = {"tokenizer": "codes", "codes": 12} if events else {}
    model = tiny(length=80, **options)

    class Vector(nn.Module):
        def forward(self, values, times=None):
            return model(Batch(values, times)).pooled

    def rows(count):
        signals = (torch.randn(count, 80, 3),)
        return (
            (torch.randint(5, 12, (count, 9)), torch.rand(count, 9).cumsum(1))
            if events
            else signals
        )

    shapes = tuple({0: torch.export.Dim("rows")} for _ in rows(3))
    graph = torch.export.export(Vector().eval(), rows(3), dynamic_shapes=shapes).module()
    given = rows(5)
    torch.testing.assert_close(graph(*given), Vector()(*given), rtol=0, atol=1e-6)


def test_a_backward_pass_over_events_is_the_forward_pass_over_their_mirror():
    torch.manual_seed(0)
    model = (
        models.build(
            "s4", preset="tiny", codes=40, tokenizer="codes", length=12, layers=2, dropout=0.0
        )
        .double()
        .eval()
    )
    codes, times = (
        torch.randint(4, 40, (2, 12), generator=seeded()),
        torch.rand(2, 12, generator=seeded()).double().cumsum(1),
    )
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    layer, x = model.layers[0], torch.randn(1, 14, model.config.dim, generator=seeded()).double()
    gaps = times[:1, [0, *range(12), 11]]
    there = layer(x, type("Places", (), {"ends": None, "times": gaps}), "backward")[0]
    mirror = layer(
        x.flip(1), type("Places", (), {"ends": None, "times": -gaps.flip(1)}), "forward"
    )[0]
    torch.testing.assert_close(there, mirror.flip(1), rtol=0, atol=1e-12)
    assert torch.isfinite(objectives.get("next-previous")(model, Batch(codes, times, mask))["loss"])
