"""TF-C: two encoders, the spectrum and its augmentation, and both objectives against their
formulas.
"""

import cmath
import math
from functools import partial

import planted
import pytest
import torch
from planted import seeded
from torch import nn
from torch.nn import functional as F

from bitimely_core import catalog, models, objectives, registry
from bitimely_core.errors import UserError
from bitimely_core.types import Batch
from bitimely_core.zoo import contrast
from bitimely_core.zoo import tf_c as own
from bitimely_core.zoo.contrast import augment_rows, perturb_spectrum

torch.set_num_threads(1)


tiny = partial(planted.tiny, "tf-c")


# -------------------------------------------------------------------------------------------------------------- the model


def test_the_alias_of_the_papers_table():
    assert registry.models["ts-t"].name == "tf-c"
    assert models.build("ts-t", preset="tiny").config.name == "tf-c"
    assert catalog.COSTS.is_file(), "measured seconds are listed"
    row = next(row for row in catalog.list_rows("models", None) if row["name"] == "tf-c")
    assert "ts-t" in row["known"]
    assert row["alias"] == ["ts-t"]
    assert row["objectives"] == ["tf-c", "tf-c-code"]


def test_the_spectrum_equals_the_sum_of_its_definition():
    model = tiny().double()
    x = torch.randn(2, 21, 3, dtype=torch.float64)
    mask = torch.arange(21) < torch.tensor([[21], [13]])
    bins = model.spectrum(Batch(torch.where(mask[..., None], x, torch.nan), mask=mask))
    for row, length in enumerate((21, 13)):
        for channel in range(3):
            for f in range(length):
                turning = (
                    float(x[row, t, channel]) * cmath.exp(-2j * cmath.pi * f * t / length)
                    for t in range(length)
                )
                assert float(bins.values[row, f, channel]) == pytest.approx(
                    abs(sum(turning)) / math.sqrt(length), abs=1e-10
                )
    assert torch.equal(bins.mask, mask)
    assert (bins.values[1, 13:] == 0).all()


def test_the_vector_is_both_projections_side_by_side():
    model = tiny().double()
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    encoded = model(Batch(x))
    parts = []
    for name, values in (("time", x), ("frequency", torch.fft.fft(x, dim=1).abs() / math.sqrt(50))):
        flat = model.trunks[name](values, model.adapter.first[name], None).flatten(1)
        parts.append(model.projectors[name](flat))
    torch.testing.assert_close(encoded.pooled, torch.cat(parts, 1))
    assert encoded.pooled.shape == (2, model.pooled_width)


def test_the_vector_does_not_see_where_a_circular_shift_begins_in_its_frequency_half():
    model = tiny().double()
    x = torch.randn(1, 50, 3, dtype=torch.float64)
    a, b = model(Batch(x)).pooled[0], model(Batch(x.roll(7, 1))).pooled[0]
    torch.testing.assert_close(a[32:], b[32:])
    assert not torch.allclose(a[:32], b[:32])


def test_the_projectors_know_the_length():
    model = tiny()
    with pytest.raises(UserError, match="50") as caught:
        model(Batch(torch.randn(2, 90, 3)))
    assert caught.value.exit_code == 2
    before = {key: value.clone() for key, value in model.state_dict().items()}
    renewed = model.reset_adapter(channels=3, length=90)
    assert set(renewed) == {
        f"projectors.{name}.0.{part}"
        for name in ("time", "frequency")
        for part in ("weight", "bias")
    }
    after = model.state_dict()
    assert all(
        torch.equal(before[key], after[key])
        for key in before
        if key not in {*renewed, "target_scale"}
    )
    assert model(Batch(torch.randn(2, 90, 3))).pooled.shape == (2, 64)


def test_rows_do_not_see_each_other_while_training_but_for_batch_statistics():
    """The reference's attention runs across the batch; here only batch norm does, and not in eval
    mode.
    """
    model = tiny().double()
    x = torch.randn(4, 50, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(model(Batch(x)).pooled[0].sum(), x)
    assert (slope[0] != 0).any()
    assert (slope[1:] == 0).all()


# -------------------------------------------------------------------------------------------------------------- augmentations


def test_a_tenth_of_the_components_is_removed_and_to_a_tenth_is_added():
    bins = 1.0 + torch.rand(20, 400, 2, generator=seeded(5))
    bins[:, :, 1] *= 100
    other = perturb_spectrum(Batch(bins), seeded()).values
    removed, raised = (other < bins).float(), (other > bins).float()
    assert float(removed.mean()) == pytest.approx(0.1, abs=0.012)
    # a tenth of those that were not removed
    assert float(raised.mean()) == pytest.approx(0.09, abs=0.012)
    added = (other - bins)[raised.bool()]
    share = (
        (added / (bins.amax(1, keepdim=True) * 0.1).expand_as(bins)[raised.bool()]).sort().values
    )
    assert float(share.max()) <= 1.0 + 1e-4
    assert float(share.mean()) == pytest.approx(0.5, abs=0.03)  # uniform
    assert float(share.var()) == pytest.approx(1 / 12, abs=0.01)
    twice = perturb_spectrum(Batch(bins), seeded(), twice=True).values
    torch.testing.assert_close(twice, other + bins)


def test_the_bank_takes_one_augmentation_a_row():
    x = torch.randn(400, 60, 2, generator=seeded(9))
    x = x + 10 * x.sign()  # far from 0
    out = augment_rows(
        Batch(x, mask=torch.ones(400, 60, dtype=torch.bool)),
        own.TFCObjectiveConfig(jitter=0.3, scaling=0.5, segments=6),
        seeded(),
    )
    kinds = []
    for before, after in zip(x, out.values, strict=True):
        if (after == before).all() or torch.equal(after.sort(0).values, before.sort(0).values):
            kinds.append("permuted")
        elif ((after == before) | (after == 0)).all():
            kinds.append("masked")
        elif (after - before).abs().max() < 2:
            kinds.append("jittered")
        else:
            torch.testing.assert_close(
                after[:, 0] / before[:, 0], after[:, 1] / before[:, 1], rtol=1e-3, atol=1e-3
            )
            kinds.append("scaled")
    assert all(
        kinds.count(kind) == pytest.approx(100, abs=40)
        for kind in ("permuted", "masked", "jittered", "scaled")
    )


# -------------------------------------------------------------------------------------------------------------- the objectives


def distance(a, b):
    """NT-Xent as cross-entropy on the matrix of cosines."""
    a, b = a.detach(), b.detach()
    unit = F.normalize(torch.cat((a, b)), dim=-1)
    return float(
        F.cross_entropy(
            (unit @ unit.T / 0.2).fill_diagonal_(-torch.inf), torch.arange(len(unit)).roll(len(a))
        )
    )


def polynomial(zis, zjs):
    """The loss of the trainer, written as its steps: positives first, then the negatives; labels 0;
    a one-hot of all logits.
    """
    rows = len(zis)
    unit = F.normalize(torch.cat((zjs, zis)).detach(), dim=-1)
    matrix = unit @ unit.T
    positives = torch.cat((matrix.diagonal(rows), matrix.diagonal(-rows)))[:, None]
    other = ~(torch.eye(2 * rows) + torch.eye(rows).repeat(2, 2)).bool()
    logits = torch.cat((positives, matrix[other].view(2 * rows, -1)), 1) / 0.2
    label = torch.zeros_like(logits)
    label[:, 0] = 1
    inner = F.cross_entropy(logits, torch.zeros(2 * rows, dtype=torch.int64), reduction="sum") / (
        2 * rows
    )
    return float(inner + rows * (1 / rows - (label * logits.softmax(-1)).mean()))


@pytest.mark.parametrize("bank", [False, True])
def test_both_objectives_equal_their_formulas(bank, monkeypatch):
    model, batch = tiny().double(), Batch(torch.randn(5, 50, 3, dtype=torch.float64))
    seen = {}
    plain = own._encode_views
    monkeypatch.setattr(own, "_encode_views", lambda *args: seen.setdefault(args[0], plain(*args)))
    results = {
        name: objectives.get(name, bank=bank)(model, batch, seeded())
        for name in ("tf-c", "tf-c-code")
    }
    for name, result in results.items():
        t, t_other, f, f_other = seen[name]
        d = distance if name == "tf-c" else polynomial
        l_t, l_f, s = d(t.flat, t_other.flat), d(f.flat, f_other.flat), d(t.vector, f.vector)
        pairs = [
            (t.vector, f_other.vector),
            (t_other.vector, f.vector),
            (t_other.vector, f_other.vector),
        ]
        l_c = sum(s - distance(a, b) + 1 for a, b in pairs)
        wanted = 0.5 * (l_t + l_f) + 0.5 * l_c if name == "tf-c" else 0.2 * (l_t + l_f) + s
        assert float(result["loss"].detach()) == pytest.approx(wanted, rel=1e-9)
        torch.testing.assert_close(t.vector, model(batch).pooled[:, :32])


@pytest.mark.parametrize("name", ["tf-c", "tf-c-code"])
def test_one_vector_for_everything_has_rel_1(name):
    model = tiny()
    for weight in model.parameters():
        nn.init.zeros_(weight)
    result = objectives.get(name)(model, Batch(torch.randn(6, 50, 3)), seeded())
    assert float(result["rel"]) == pytest.approx(1.0)
    assert float(result["loss"].detach()) == pytest.approx(
        math.log(11) + 1.5 if name == "tf-c" else 1.4 * (math.log(11) + 1 - 6 / 121)
    )


def test_the_code_doubles_the_augmented_spectrum(monkeypatch):
    calls = []
    plain = contrast.perturb_spectrum
    monkeypatch.setattr(
        contrast,
        "perturb_spectrum",
        lambda bins, generator, twice: calls.append(twice) or plain(bins, generator, twice=twice),
    )
    for name in ("tf-c", "tf-c-code"):
        objectives.get(name)(tiny(), Batch(torch.randn(3, 50, 3)), seeded())
    assert calls == [False, True]
