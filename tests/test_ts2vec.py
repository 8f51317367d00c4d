"""TS2Vec: its formulas, crops that meet, the hierarchical loss against slow loops, padding and
missing values, learning.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import partial

import planted
import pytest
import torch
from planted import seeded
from torch import nn

from bitimely_core import data, heads, models, objectives, registry
from bitimely_core.config import (
    Settings,
    TrainConfig,
    build_model_config,
    list_presets,
    load_preset,
)
from bitimely_core.errors import UserError
from bitimely_core.train import loop
from bitimely_core.types import Batch
from bitimely_core.zoo import contrast as comparing
from bitimely_core.zoo.ts2vec import compute_hierarchical_loss, draw_crops

torch.set_num_threads(1)


tiny = partial(planted.tiny, "ts2vec")


# -------------------------------------------------------------------------------------------------------------- the encoder


def convolved(x, conv, dilation):
    """A convolution of width 3 with zeros outside, by its sum: [T, inputs] -> [T, outputs]."""
    out = torch.zeros(len(x), conv.out_channels, dtype=x.dtype) + conv.bias
    for t in range(len(x)):
        for tap in range(3):
            at = t + (tap - 1) * dilation
            if 0 <= at < len(x):
                out[t] += conv.weight[:, :, tap] @ x[at]
    return out


@torch.no_grad()
def by_hand(model, series):
    """One window [T, V] through the formulas; a timestep with any NaN is missing."""
    there = ~series.isnan().any(1, keepdim=True)
    linear = model.adapter.embedding
    x = (series.nan_to_num() @ linear.weight.T + linear.bias) * there

    def gelu(y):
        return 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))

    for at, block in enumerate(model.blocks):
        y = convolved(gelu(convolved(gelu(x), block.first, 2**at)), block.second, 2**at)
        shortcut = (
            x
            if at < len(model.blocks) - 1
            else x @ block.shortcut.weight[:, :, 0].T + block.shortcut.bias
        )
        x = y + shortcut
    return x


def test_it_equals_its_formulas():
    model = tiny(layers=3, dim=12, ffn_dim=6).double()
    x = torch.randn(2, 21, 3, dtype=torch.float64)
    x[0, 4, 1] = x[1, 20] = torch.nan
    before = x.clone()
    mask = ~x.isnan()
    mask[1, 20, 0] = True  # still one of its channels is missing
    encoded = model(Batch(x, mask=mask))
    for row in range(2):
        torch.testing.assert_close(
            encoded.hidden[-1][row], by_hand(model, x[row]), rtol=1e-10, atol=1e-10
        )
    torch.testing.assert_close(encoded.pooled, encoded.hidden[-1].amax(1))
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))  # the input stays as it is


@pytest.mark.parametrize(("channels", "count"), [(1, 637_248), (7, 637_632), (12, 637_952)])
def test_the_size_is_that_of_the_paper(channels, count):
    for preset in ("18m", "7.5m", "7.5m-regression"):
        assert (
            models.count_configured(build_model_config("ts2vec", preset, channels=channels))
            == count
        )


@pytest.mark.parametrize(("preset", "tolerance"), [("18m", 0.05), ("7.5m", 0.05), ("tiny", 0.05)])
@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_matched_sizes_of_the_contrastive_models(name, preset, tolerance):
    data_of = models.default_shape(preset)
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data_of))
    widths = models.match_parameters(name, preset, **data_of)
    assert (
        abs(
            models.count_configured(build_model_config(name, preset, **data_of, **widths)) / goal
            - 1
        )
        < tolerance
    )


# -------------------------------------------------------------------------------------------------------------- padding, missing values


def padded(rows, length, filling=7.0):
    values = torch.full((len(rows), length, rows[0].shape[1]), filling, dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)], mask[i, : len(row)] = row, True
    return Batch(values, mask=mask)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_padding_changes_nothing(name):
    """Content and amount of padding, and the company of longer rows, change neither states nor the
    vector.
    """
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50).double().eval()
    for _, buffer in model.named_buffers():
        if buffer.dtype == torch.float64 and buffer.dim():
            nn.init.uniform_(buffer, 0.5, 2.0)
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (50, 37, 22, 1)]
    together, dirty = model(padded(rows, 50)), model(padded(rows, 50, torch.nan))
    assert torch.equal(together.hidden[-1][together.mask], dirty.hidden[-1][dirty.mask])
    assert torch.equal(together.pooled, dirty.pooled)
    for i, row in enumerate(rows):
        alone = model(Batch(row[None]))
        count = alone.hidden[-1].shape[1]
        assert int(together.mask[i].sum()) == count
        torch.testing.assert_close(
            together.hidden[-1][i, :count], alone.hidden[-1][0], rtol=1e-10, atol=1e-10
        )
        width = alone.pooled.shape[1]
        torch.testing.assert_close(
            together.pooled[i, :width], alone.pooled[0], rtol=1e-10, atol=1e-10
        )
        assert (together.pooled[i, width:] == 0).all()


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_padding_does_not_move_the_loss(name):
    """Neither what stands in the padding nor batch statistics of it."""
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50)
    rows = [torch.randn(n, 3, generator=seeded(n)) for n in (50, 37, 22)]
    for module in model.modules():  # dropout differs from call to call
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    losses = [
        objectives.get(name)(model.train(), padded(rows, 50, filling), seeded())["loss"]
        for filling in (7.0, -3.0)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_a_row_without_any_sample_is_finite(name):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50)
    mask = torch.ones(3, 50, dtype=torch.bool)
    mask[1] = False
    batch = Batch(torch.randn(3, 50, 3), mask=mask)
    encoded = model.eval()(batch)
    assert torch.isfinite(encoded.pooled).all()
    result = objectives.get(name)(model.train(), batch, seeded())
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# -------------------------------------------------------------------------------------------------------------- crops


def test_crops_meet_at_the_same_timesteps():
    """Read off a ramp: the last steps of the first crop are the first steps of the second."""
    draw, ramp = seeded(), torch.arange(40)
    moved, lengths = set(), set()
    for _ in range(300):
        crops = draw_crops(torch.tensor([40, 40, 31]), 1, draw)
        first = [ramp[start : start + crops.lengths[0]] for start in crops.first.tolist()]
        second = [ramp[start : start + crops.lengths[1]] for start in crops.second.tolist()]
        for a, b in zip(first, second, strict=True):
            assert (len(a), len(b)) == crops.lengths  # none runs over the window
            assert a[-crops.shared :].tolist() == b[: crops.shared].tolist()
        moved.add(int(crops.first[0] - crops.first[1]))
        lengths.add(crops.shared)
    assert len(moved) > 20
    assert min(lengths) >= 4  # 2^(unit + 1)
    assert max(lengths) == 40


def test_crops_of_short_rows_stay_within_them_where_they_can():
    draw = seeded(1)
    for _ in range(300):
        crops = draw_crops(torch.tensor([40, 31]), 0, draw)
        span = crops.lengths[0] + crops.lengths[1] - crops.shared
        start = int(crops.first[1])
        assert start + span <= 31 or start == 0


def test_crops_of_one_timestep():
    crops = draw_crops(torch.tensor([1, 1]), 3, seeded())
    assert (crops.shared, crops.lengths, crops.first.tolist()) == (1, (1, 1), [0, 0])


def test_half_of_the_timesteps_are_hidden_and_both_crops_have_their_own():
    model, seen = tiny(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hide"]), with_kwargs=True
    )
    x = torch.randn(8, 50, 3)
    for seed in range(40):
        objectives.get("ts2vec")(model, Batch(x), seeded(seed))
    hidden = torch.cat([hide.flatten() for hide in seen]).float()
    assert float(hidden.mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(len(hidden)))
    assert not torch.equal(seen[0].sum(), seen[1].sum())


# -------------------------------------------------------------------------------------------------------------- the loss


def cross_entropy(view, things):
    """-log of the softmax weight of a thing's partner among all others; `things`: list of vectors,
    the partner at + K.
    """
    partner = (view + len(things) // 2) % len(things)
    scores = [sum(a * b for a, b in zip(things[view], other, strict=True)) for other in things]
    return math.log(sum(math.exp(s) for i, s in enumerate(scores) if i != view)) - scores[partner]


def slow(first, second, unit):
    """The hierarchical loss as the paper writes it, on nested lists [B][N][D]."""
    total, scale = 0.0, 0
    while True:
        rows, times = len(first), len(first[0])
        terms = []
        for t in range(times):
            things = [first[b][t] for b in range(rows)] + [second[b][t] for b in range(rows)]
            terms += [cross_entropy(view, things) for view in range(2 * rows)]
        total += 0.5 * sum(terms) / len(terms)
        if scale >= unit and times > 1:
            terms = [
                cross_entropy(view, first[b] + second[b])
                for b in range(rows)
                for view in range(2 * times)
            ]
            total += 0.5 * sum(terms) / len(terms)
        scale += 1
        if times == 1:
            return total / scale

        def halved(x):
            return [
                [
                    [max(p, q) for p, q in zip(row[2 * t], row[2 * t + 1], strict=True)]
                    for t in range(len(row) // 2)
                ]
                for row in x
            ]

        first, second = halved(first), halved(second)


@pytest.mark.parametrize("block", [2**22, 7, 1])
@pytest.mark.parametrize("unit", [0, 2])
@pytest.mark.parametrize("times", [1, 6, 9])
def test_the_hierarchical_loss_equals_its_formula_in_blocks_of_any_size(
    times, unit, block, monkeypatch
):
    monkeypatch.setattr(comparing, "BLOCK", block)
    first, second = (
        torch.randn(3, times, 4, dtype=torch.float64, generator=seeded(s), requires_grad=True)
        for s in (0, 1)
    )
    instance, temporal, _ = compute_hierarchical_loss(first, second, None, unit)
    assert float((instance + temporal).detach()) == pytest.approx(
        slow(first.tolist(), second.tolist(), unit), rel=1e-12
    )
    (slope,) = torch.autograd.grad(instance + temporal, first)
    step = torch.zeros_like(first)
    step[1, 0, 2] = 1e-6
    with torch.no_grad():
        ahead, behind = (
            sum(compute_hierarchical_loss(first + sign * step, second, None, unit)[:2])
            for sign in (1, -1)
        )
    assert float(slope[1, 0, 2]) == pytest.approx(float(ahead - behind) / 2e-6, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("block", [2**22, 7])
def test_padded_times_have_no_part_in_the_loss(block, monkeypatch):
    """A row of 5 and one of 8 times: by the definition over what is there, whatever the values
    elsewhere.
    """
    monkeypatch.setattr(comparing, "BLOCK", block)
    first, second = (torch.randn(2, 8, 4, dtype=torch.float64, generator=seeded(s)) for s in (0, 1))
    valid = torch.arange(8) < torch.tensor([[8], [5]])
    own = compute_hierarchical_loss(first, second, valid)
    for filling in (0.0, 100.0):
        filled = [view.masked_fill(~valid[..., None], filling) for view in (first, second)]
        torch.testing.assert_close(
            compute_hierarchical_loss(*filled, valid), own, rtol=1e-12, atol=1e-12
        )
    # the finest scale by hand
    terms = []
    for t in range(8):
        rows = [0, 1] if t < 5 else [0]
        things = [view[b, t].tolist() for view in (first, second) for b in rows]
        terms += [cross_entropy(view, things) for view in range(len(things))]
    wanted = sum(terms) / len(terms)
    found, _ = comparing.contrast(first.transpose(0, 1), second.transpose(0, 1), valid.T)
    assert float(found) == pytest.approx(wanted, rel=1e-12)


def test_everything_the_same_has_rel_1():
    same = torch.ones(4, 12, 3, dtype=torch.float64)
    instance, temporal, blind = compute_hierarchical_loss(same, same)
    wanted = sum(0.5 * math.log(7) + 0.5 * math.log(2 * n - 1) for n in (12, 6, 3, 1)) / 4
    assert float(instance + temporal) == pytest.approx(wanted)
    assert float(blind) == pytest.approx(wanted)
    model = tiny()
    for weight in model.parameters():
        nn.init.zeros_(weight)
    result = objectives.get("ts2vec")(model, Batch(torch.randn(4, 50, 3)), seeded())
    assert float(result["rel"]) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_long_window_stays_within_memory():
    """A step on 8 rows of T = 3,000: the scores of the finest scale alone would be 1.15 GB, and a
    plain softmax keeps several such tensors.
    """
    script = """
import resource, torch
from bitimely_core import models
from bitimely_core.types import Batch
from bitimely_core.zoo.ts2vec import compute_hierarchical_loss
torch.set_num_threads(1)
model = models.build("ts2vec", preset="tiny", length=3000, layers=2, dim=16, ffn_dim=8).train()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
views = [model(Batch(torch.randn(8, 3000, 1))).hidden[-1] for _ in range(2)]
sum(compute_hierarchical_loss(*views)[:2]).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.5  # GB


# -------------------------------------------------------------------------------------------------------------- the form of a result


@pytest.mark.parametrize(
    ("name", "objective"),
    [("ts2vec", "ts2vec"), ("ts-tcc", "ts-tcc"), ("tf-c", "tf-c"), ("tf-c", "tf-c-code")],
)
def test_a_contrastive_result(name, objective):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=60)
    batch = Batch(torch.randn(6, 60, 3, generator=seeded()))
    result = objectives.get(objective)(model, batch, seeded())
    torch.testing.assert_close(result["loss"].detach(), sum(result["parts"].values()))
    assert (result["prediction"], result["target"], result["count"]) == (None, None, 6)
    result["loss"].backward()
    assert {key for key, p in model.named_parameters() if p.grad is None} == set()
    assert objectives.leak_free(Settings(model=model.config, objective={"name": objective})) is None
    model.eval()
    first, again, other = (
        float(objectives.get(objective)(model, batch, seeded(s))["loss"].detach())
        for s in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("objective", ["ts2vec", "ts-tcc", "tf-c", "tf-c-code"])
def test_unsupported_settings_are_refused(objective):
    torch.manual_seed(0)
    own = objective.removesuffix("-code")
    model = models.build(own, preset="tiny", channels=3, length=50)
    with pytest.raises(UserError, match="at least 2") as caught:
        objectives.get(objective)(model, Batch(torch.randn(1, 50, 3)), seeded())
    assert (caught.value.code, caught.value.exit_code) == ("config", 2)
    with pytest.raises(UserError, match="signals"):
        models.build(own, preset="tiny", tokenizer="codes", codes=52)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
@pytest.mark.parametrize("readout", ["native", "max", "mean", "last", "flatten"])
def test_heads_read_the_contrastive_models(name, readout):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50)
    head = heads.Classifier(model, outputs=4, readout=readout).eval()
    batch = Batch(torch.randn(3, 50, 3), target=torch.tensor([0, 1, 3]))
    assert head(batch).shape == (3, 4)
    heads.losses["classification"](head, batch)["loss"].backward()
    assert heads.Classifier(model, outputs=4).readout == registry.models[name].facts.readout
    with pytest.raises(UserError, match="one layer"):
        heads.Classifier(model, outputs=4, readout="mean", layers="last-two")(batch)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_other_channels_renew_exactly_the_adapter(name):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert model.reset_adapter(channels=3, length=50) == []
    renewed = model.reset_adapter(channels=1, length=50)
    assert set(renewed) == {
        key for key, _ in model.named_parameters() if key.startswith("adapter.")
    }
    after = model.state_dict()
    assert all(
        torch.equal(before[key], after[key])
        for key in before
        if not key.startswith("adapter.") and key != "target_scale"
    )
    assert model(Batch(torch.randn(2, 50, 1))).pooled.shape == (2, model.pooled_width)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_a_mixed_pre_training_has_an_adapter_each(name):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50, others=(2,))
    second = Batch(torch.randn(4, 40, 2), source=torch.ones(4, dtype=torch.int64))
    objectives.get()(model, second, seeded())["loss"].backward()
    touched = {key for key, p in model.named_parameters() if p.grad is not None}
    assert any(key.startswith("others.") for key in touched)
    assert not any(key.startswith("adapter.") for key in touched)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_bf16_is_finite(name):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50)
    with torch.autocast("cpu", torch.bfloat16):
        result = objectives.get()(model, Batch(torch.randn(4, 50, 3)), seeded())
    assert result["loss"].dtype == torch.float32
    result["loss"].backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["ts2vec", "ts-tcc", "tf-c"])
def test_events_are_read_on_a_grid_of_months(name):
    torch.manual_seed(0)
    model = models.build(name, preset="3m", codes=20, horizon=36, layers=2)
    times = torch.tensor([[0.0, 3.5, 3.6, 30.0], [1.0, 2.0, 9.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
    batch = Batch(
        torch.randint(5, 20, (3, 4)),
        times,
        torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]]),
    )
    result = objectives.get()(model, batch, seeded())
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    assert heads.MultiLabel(model.eval(), outputs=3)(batch).shape == (3, 3)


# -------------------------------------------------------------------------------------------------------------- learning


def waves(rows=16, length=64, channels=2, seed=0):
    """Rows of different frequencies and phases."""
    draw = seeded(seed)
    rate = 0.1 + 0.6 * torch.rand(rows, 1, channels, generator=draw)
    phase = 2 * math.pi * torch.rand(rows, 1, channels, generator=draw)
    return 1.4 * torch.sin(phase + rate * torch.arange(length)[None, :, None])


class Waves:
    """Batches of new waves."""

    steps, size = 40, 16

    def __call__(self, epoch, *, start=0, rank=0, world=1):
        for step in range(start, self.steps):
            yield Batch(waves(seed=1000 * epoch + step))


@pytest.mark.parametrize(
    ("name", "objective", "numbers", "limit"),
    [
        ("ts2vec", "ts2vec", {}, 0.75),
        ("ts-tcc", "ts-tcc", {"jitter": 0.1, "scaling": 0.1}, 0.88),
        ("tf-c", "tf-c", {"jitter": 0.1}, 0.75),
        ("tf-c", "tf-c-code", {"jitter": 0.1}, 0.75),
    ],
)
def test_waves_are_separated_and_states_do_not_collapse(name, objective, numbers, limit):
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=2, length=64)
    probe = Batch(waves(seed=77))
    before = model.eval()(probe).pooled.var(0).mean()
    result = loop.fit(
        model,
        Waves(),
        objectives.get(objective, **numbers),
        config=TrainConfig(epochs=1, lr=3e-3, device="cpu"),
    )
    assert result["rel"] < limit
    assert model.eval()(probe).pooled.var(0).mean() > 0.2 * before
    # batch norm of each view by itself, as it was trained
    held = objectives.get(objective, **numbers)(model.train(), probe, seeded())
    assert float(held["rel"]) < limit + 0.1


# -------------------------------------------------------------------------------------------------------------- rows of a batch


class Rows:
    """Stands for a set of windows."""

    def __init__(self, count):
        self.rows = torch.arange(count).numpy()

    def __len__(self):
        return len(self.rows)


@pytest.mark.parametrize(
    ("count", "size", "least", "sizes"),
    [(9, 4, 1, [4, 4, 1]), (9, 4, 2, [4, 4]), (10, 4, 2, [4, 4, 2]), (3, 4, 4, [])],
)
def test_a_last_batch_with_too_few_rows_is_left_out(count, size, least, sizes):
    for shuffle in (True, False):
        batches = data.EpochBatches((Rows(count),), size, 0, shuffle, "canonical", least)
        assert batches.steps == len(sizes)
        assert [len(positions) for _, positions in batches.order(0)] == sizes


def test_rows_left_out_of_one_epoch_are_in_another():
    batches = data.EpochBatches((Rows(9),), 4, 0, True, "canonical", 2)
    seen = [
        {row for _, positions in batches.order(epoch) for row in positions.tolist()}
        for epoch in range(6)
    ]
    assert all(len(rows) == 8 for rows in seen)
    assert set.union(*seen) == set(range(9))


# -------------------------------------------------------------------------------------------------------------- the reference

PARITY = """
import json, torch
from pypots.nn.modules.ts2vec import TS2VecEncoder
from pypots.nn.modules.ts2vec.losses import hierarchical_contrastive_loss
from bitimely_core import models
from bitimely_core.types import Batch
from bitimely_core.zoo.ts2vec import compute_hierarchical_loss
torch.manual_seed(0)
model = models.build("ts2vec", preset="18m", channels=3).eval()
theirs = TS2VecEncoder(3, 320, 64, 10).eval()
with torch.no_grad():
    theirs.input_fc.load_state_dict(model.adapter.embedding.state_dict())
    for ours, block in zip(model.blocks, theirs.feature_extractor.net):
        block.conv1.conv.load_state_dict(ours.first.state_dict())
        block.conv2.conv.load_state_dict(ours.second.state_dict())
        if block.projector is not None:
            block.projector.load_state_dict(ours.shortcut.state_dict())
    x = torch.randn(4, 100, 3)
    x[1, 5, 2] = x[2, 40:60] = torch.nan
    wanted = theirs(x.clone(), "all_true")
    found = model(Batch(x, mask=~x.isnan())).hidden[-1]
    other = found.roll(1, 1) * 0.9
    losses = [float(sum(compute_hierarchical_loss(found, other, None, unit)[:2]) - hierarchical_contrastive_loss(found, other, 0.5, unit)) for unit in (0, 3)]
    print("\\n" + json.dumps([float((found - wanted).abs().max()), float(wanted.abs().max()), *losses]))
"""


@pytest.mark.parity
def test_parity_with_pypots(tmp_path):
    """Encoder and loss of the reference, as PyPOTS carries it; in a process of its own: it writes
    to the home folder on import.
    """
    if importlib.util.find_spec("pypots") is None:
        pytest.skip("pypots is not installed: pip install 'bitimely[parity]'")
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", PARITY], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    states, size, *losses = json.loads(done.stdout.splitlines()[-1])
    assert states <= 1e-6 * size
    assert all(abs(loss) < 1e-5 for loss in losses)


def test_settings_of_the_presets_are_complete():
    """Each preset that has one of the contrastive models has them all."""
    for name in list_presets():
        assert {"ts2vec", "ts-tcc", "tf-c"} <= load_preset(name).keys()
