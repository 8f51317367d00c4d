"""Augmentations: what they do to values and labels, and that a row's numbers depend on nothing but
seed, epoch and row.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitimely_core import heads
from bitimely_core.augment.augmented_batches import augment_batches, resolve_augmentation
from bitimely_core.config import FinetuneConfig
from bitimely_core.data import EpochBatches
from bitimely_core.errors import UserError
from bitimely_core.registry import augmentations, datasets
from bitimely_core.types import AugmentationContext, Batch, LabelledRow

RATE = 100.0  # Hz
NAMES = ("stretch", "gain", "noise", "crop", "shift", "drop-channels", "mask-spans", "mixup")


def make_sine(hertz: float, seconds: float = 20.0, channels: int = 1) -> np.ndarray:
    times = np.arange(int(seconds * RATE)) / RATE
    wave = np.sin(2 * np.pi * hertz * times)
    return np.repeat(wave[:, None], channels, 1).astype(np.float32)


def count_cycles(wave: np.ndarray) -> float:
    """Cycles a second, from the median distance of upward zero crossings."""
    rising = np.flatnonzero((wave[:-1] < 0) & (wave[1:] >= 0))
    return RATE / float(np.median(np.diff(rising)))


def apply(name, row, seed=0, scales="none", partner=None):
    context = AugmentationContext(scales, lambda draw: partner or row)
    return augmentations[name](row, np.random.default_rng(seed), context)


@pytest.mark.parametrize("scales", ["rate", "duration", "none"])
def test_a_stretched_sine_has_the_rate_of_its_label(scales):
    """The oracle is the rate that is counted in the stretched wave."""
    row = LabelledRow(make_sine(1.5), None, np.array(90.0, np.float32))  # 90 a minute
    factors = []
    for seed in range(40):
        out = apply("stretch", row, seed, scales)
        counted = 60 * count_cycles(out.values[:, 0])
        expected = {"rate": counted, "duration": 90 * 90 / counted, "none": 90.0}[scales]
        assert float(out.target) == pytest.approx(expected, rel=0.02)
        factors.append(90 / counted)
    bound = 0.3 if scales != "none" else 0.1
    assert 1 - bound - 0.02 < min(factors) < 1 - bound / 2
    assert 1 + bound / 2 < max(factors) < 1 + bound + 0.02


def test_no_augmentation_changes_its_row_or_shape():
    draw = np.random.default_rng(0)
    values = draw.standard_normal((50, 3)).astype(np.float32)
    mask = draw.uniform(size=(50, 3)) < 0.7
    values[~mask] = 0
    for part in (None, mask):
        row = LabelledRow(values, part, np.array([1.0, 0.0], np.float32))
        before = [None if x is None else x.copy() for x in row]
        for name in NAMES:
            out = apply(name, row)
            assert out.values.shape == values.shape
            assert out.values.dtype == np.float32
            assert out.target.dtype == np.float32
            assert np.isfinite(out.values).all()
            assert (out.mask is None) == (part is None)
            if out.mask is not None:
                assert not out.values[~out.mask].any(), "what is missing is 0"
            for x, y in zip(row, before, strict=True):
                np.testing.assert_array_equal(x, y)
    assert set(NAMES) <= set(augmentations)


def test_a_wave_that_no_sample_of_is_missing_stays_observed():
    row = LabelledRow(make_sine(1.0), np.ones((2000, 1), bool), np.array(1.0, np.float32))
    for name in ("stretch", "shift", "crop", "gain", "noise"):
        assert apply(name, row).mask.all()


def test_gain_and_noise_have_the_stated_spread():
    row = LabelledRow(make_sine(1.0, channels=400), None, np.array(0))
    gains = apply("gain", row).values[25] / row.values[25]
    assert np.log(gains).std() == pytest.approx(0.15, rel=0.15)
    noise = apply("noise", row).values - row.values
    assert noise.std() == pytest.approx(0.1 * row.values.std(), rel=0.02)
    assert apply("noise", row._replace(values=np.zeros((5, 2), np.float32))).values.any() == 0


def test_channels_are_dropped_at_their_rate_and_never_all():
    row = LabelledRow(np.ones((4, 1000), np.float32), None, np.array(0))
    assert (apply("drop-channels", row).values[0] == 0).mean() == pytest.approx(0.1, abs=0.03)
    single = LabelledRow(np.ones((4, 1), np.float32), None, np.array(0))
    assert all(apply("drop-channels", single, seed).values.all() for seed in range(50))


def test_spans_hide_at_most_a_fifth():
    row = LabelledRow(np.ones((200, 2), np.float32), None, np.array(0))
    for seed in range(20):
        hidden = apply("mask-spans", row, seed).values == 0
        assert 0 < hidden.mean() <= 0.2
        assert (hidden[:, 0] == hidden[:, 1]).all()


def test_a_shift_moves_and_mirrors():
    row = LabelledRow(np.arange(100, dtype=np.float32)[:, None], None, np.array(0))
    moved = {int(apply("shift", row, seed).values[50, 0]) - 50 for seed in range(60)}
    assert min(moved) < 0 < max(moved)
    assert all(abs(step) <= 10 for step in moved)


def test_a_mixture_is_the_weighted_sum_of_both():
    row = LabelledRow(np.zeros((5, 1), np.float32), None, np.array([1.0, 0.0], np.float32))
    other = LabelledRow(np.ones((5, 1), np.float32), None, np.array([0.0, 1.0], np.float32))
    shares = [apply("mixup", row, seed, partner=other) for seed in range(50)]
    for out in shares:
        share = 1 - out.values[0, 0]
        np.testing.assert_allclose(out.target, [share, 1 - share], atol=1e-6)
    assert len({float(out.target[0]) for out in shares}) == 50


# ---- batches


class Recordings:
    """Training rows in memory, in the place of a token set."""

    inputs, regular, task, classes = "signals", True, "classification", 3
    name, label_scales = "made", ""

    def __init__(self, count: int = 10) -> None:
        draw = np.random.default_rng(1)
        self.rows = np.arange(count) * 2  # positions in the full index
        self.values = draw.standard_normal((2 * count, 30, 2)).astype(np.float32)
        self.labels = np.arange(2 * count) % 3

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self, rows, draw=None):
        return {"values": self.values[rows], "mask": None}

    def targets(self, rows):
        return self.labels[self.rows if rows is None else rows]


def make_batches(names, count=10, size=4, seed=3):
    rows = Recordings(count)
    inner = EpochBatches((rows,), size, seed, shuffle=True)
    config = FinetuneConfig(augment=names, label_scales="none")
    return augment_batches(inner, rows, config, seed)


def collect(batches, epoch, **part):
    """Row -> values and target."""
    return {
        int(row): (values.numpy(), target.numpy())
        for batch in batches(epoch, **part)
        for row, values, target in zip(batch.index, batch.values, batch.target, strict=True)
    }


def test_a_row_depends_on_seed_epoch_and_row_alone():
    """Neither on the processes, nor on the batch size, nor on where an epoch is continued."""
    whole = collect(make_batches(NAMES), 1)
    assert len(whole) == 10
    halves = {}
    for rank in range(2):
        halves |= collect(make_batches(NAMES), 1, rank=rank, world=2)
    small = collect(make_batches(NAMES, size=3), 1)
    rest = collect(make_batches(NAMES), 1, start=1)
    for other in (halves, small, rest):
        assert other.keys() <= whole.keys()
        for row, (values, target) in other.items():
            np.testing.assert_array_equal(values, whole[row][0])
            np.testing.assert_array_equal(target, whole[row][1])
    assert halves.keys() == small.keys() == whole.keys()
    for other in (collect(make_batches(NAMES), 2), collect(make_batches(NAMES, seed=4), 1)):
        assert not any(np.array_equal(other[row][0], whole[row][0]) for row in whole)


def test_mixed_class_ids_are_shares_of_two_training_rows():
    rows = Recordings()
    for row, (values, target) in collect(make_batches(("mixup",)), 0).items():
        assert target.sum() == pytest.approx(1)
        share = target[rows.labels[row]]
        partners = [
            p
            for p in rows.rows
            if np.allclose(
                values, share * rows.values[row] + (1 - share) * rows.values[p], atol=1e-5
            )
        ]
        assert partners or share == pytest.approx(1), "of the training rows alone"


def test_none_leaves_the_batches_as_they_are():
    assert isinstance(make_batches(()), EpochBatches)


@pytest.mark.parametrize(
    ("task", "scales", "regular", "expected"),
    [
        ("regression", "rate", True, ("stretch", "gain")),
        ("regression", "duration", True, ("stretch", "gain")),
        ("regression", "", True, ()),
        ("classification", "", True, ("gain",)),
        ("multilabel", "", True, ("gain",)),
        ("classification", "", False, ()),
    ],
)
def test_defaults_by_the_kind_of_label(task, scales, regular, expected):
    rows = Recordings()
    rows.task, rows.label_scales, rows.regular = task, scales, regular
    config = resolve_augmentation(FinetuneConfig(augment="default"), rows)
    assert config.augment == expected
    assert config.label_scales == (scales or "none")
    given = resolve_augmentation(FinetuneConfig(augment="none"), rows)
    assert given.augment == ()


def test_views_declare_their_labels():
    views = {
        f"{name}/{view}": facts.label_scales
        for name, entry in datasets.items()
        for view, facts in entry.facts.views.items()
    }
    rates = {name for name, scales in views.items() if scales == "rate"}
    assert rates == {"bidmc/hr", "bidmc/rr", "ieee-ppg/", "ppg-dalia/"}


def test_what_cannot_be_augmented_is_refused():
    rows = Recordings()
    rows.inputs = "events"
    with pytest.raises(UserError, match="signals on a grid"):
        resolve_augmentation(FinetuneConfig(augment="gain"), rows)
    with pytest.raises(UserError, match="stretch"):
        resolve_augmentation(FinetuneConfig(augment="strech"), Recordings())


# ---- losses


class Constant(torch.nn.Module):
    """A head that gives stored logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.target_scale = torch.tensor(logits), torch.tensor(1.0)
        self.model = torch.nn.Module()
        self.model.penalty = None

    def forward(self, batch):
        return self.logits


def test_class_weights_and_smoothing_against_their_definition():
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((6, 3)).astype(np.float32)
    target = np.array([0, 0, 0, 1, 1, 2])
    config = FinetuneConfig(class_weights="balanced", label_smoothing=0.3)
    loss = heads.make_loss("classification", target, 3, config)
    batch = Batch(torch.zeros(6, 1, 1), target=torch.tensor(target))
    head = Constant(logits)
    scores = logits.astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    weights = 6 / (3 * np.bincount(target))
    shares = 0.7 * np.eye(3)[target] + 0.1
    expected = -(shares * weights * logs).sum(1).mean()
    assert float(loss(head, batch)["loss"]) == pytest.approx(expected, rel=1e-5)
    mixed = batch._replace(target=torch.eye(3)[batch.target])
    assert float(loss(head, mixed)["loss"]) == pytest.approx(expected, rel=1e-5)
    plain = -logs[np.arange(6), target].mean()
    assert float(loss(head.eval(), batch)["loss"]) == pytest.approx(plain, rel=1e-5)


def test_label_weights_and_smoothing_of_labels_beside_others():
    logits = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    target = np.array([[1, 0], [0, 1], [0, np.nan], [0, 1]], np.float32)
    config = FinetuneConfig(class_weights="balanced", label_smoothing=0.2)
    loss = heads.make_loss("multilabel", target, 2, config)
    out = loss(Constant(logits), Batch(torch.zeros(4, 1, 1), target=torch.tensor(target)))
    known, x = np.isfinite(target), logits.astype(np.float64)
    y = np.where(known, 0.8 * target + 0.1, 0)
    p = 1 / (1 + np.exp(-x))
    terms = -(np.array([3, 0.5]) * y * np.log(p) + (1 - y) * np.log(1 - p))
    assert float(out["loss"]) == pytest.approx(terms[known].mean(), rel=1e-5)
    with pytest.raises(UserError, match="for classes"):
        heads.make_loss("regression", target, 1, config)
