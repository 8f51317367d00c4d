"""From states to a vector and to predictions."""

import json
import math

import numpy as np
import planted
import pytest
import torch
from torch.nn import functional as F

from bitimely_core import heads, models, objectives
from bitimely_core.errors import UserError
from bitimely_core.heads import POOLS, Classifier, Head, MultiLabel, Regressor, pool
from bitimely_core.types import Batch, Encoded

torch.set_num_threads(1)

STACKS = ["bitimelygpt", "gpt", "gpt-baar", "timelybert", "timelygpt"]
READOUTS = [name for name in POOLS if name != "native"]


def tiny(name="bitimelygpt", **options):
    return planted.tiny(name, **options)


def labelled(target, lengths=(50, 37, 22, 50)):
    x = torch.randn(len(lengths), 50, 3, generator=torch.Generator().manual_seed(0))
    return Batch(x, mask=torch.arange(50) < torch.tensor(lengths)[:, None], target=target)


# -------------------------------------------------------------------------------------------------------------- readouts


@pytest.mark.parametrize("merge", ["concat", "mean"])
@pytest.mark.parametrize("layers", ["last", "last-two"])
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("name", STACKS)
def test_every_readout_fits_its_head(name, readout, layers, merge):
    model = tiny(name)
    head = Classifier(model, outputs=5, readout=readout, layers=layers, layer_merge=merge).eval()
    batch = labelled(torch.tensor([0, 1, 2, 3]))
    vector = pool(model(batch), model, readout, layers, merge)
    assert vector.shape == (4, head.linear.in_features)
    assert head(batch).shape == (4, 5)
    torch.testing.assert_close(head.predict(batch).sum(-1), torch.ones(4))


@pytest.mark.parametrize("layers", ["last", "last-two"])
@pytest.mark.parametrize("name", ["tst", "bitimelygpt", "patchtst"])
def test_a_batch_of_short_histories_fits_a_flat_readout(name, layers):
    """Batches of events are as long as their longest row: the same row has one vector in all of
    them.
    """
    torch.manual_seed(0)
    model = models.build(
        name, preset="tiny", channels=1, length=20, codes=30, tokenizer="codes"
    ).eval()
    head = MultiLabel(model, outputs=3, readout="flatten", layers=layers).eval()
    codes = torch.randint(5, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < torch.tensor([7, 12])[:, None]
    times = torch.arange(12.0).expand(2, -1)
    both = head(Batch(codes, times=times, mask=mask))
    alone = head(Batch(codes[:1, :7], times=times[:1, :7], mask=mask[:1, :7]))
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=1e-5)


def test_readouts_read_what_they_say():
    """States that are their own position: [SOS] 0, [EOS] at the true end, means and maxima over
    real tokens alone.
    """
    states = torch.arange(7.0).expand(2, -1)[..., None]
    encoded = Encoded(
        None,
        None,
        torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        (states,),
        None,
        None,
        torch.tensor([6, 4]),
    )
    wanted = {"sos": [0, 0], "eos": [6, 4], "mean": [3, 2], "last": [5, 3], "max": [5, 3]}
    for readout, values in wanted.items():
        assert POOLS[readout](states, encoded)[:, 0].tolist() == values
    assert POOLS["sos+eos"](states, encoded).tolist() == [[0, 6], [0, 4]]
    assert POOLS["flatten"](states, encoded).tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    negative = encoded._replace(hidden=(-states,))
    assert POOLS["max"](-states, negative)[:, 0].tolist() == [-1, -1]


def test_models_without_special_positions_and_with_a_vector_of_their_own():
    states = torch.arange(3.0).expand(2, -1)[..., None]
    encoded = Encoded(None, None, None, (states,), None, torch.ones(2, 4), None)
    assert POOLS["mean"](states, encoded)[:, 0].tolist() == [1, 1]
    assert POOLS["last"](states, encoded)[:, 0].tolist() == [2, 2]
    assert POOLS["native"](states, encoded).shape == (2, 4)
    for readout in ("sos", "eos"):
        with pytest.raises(UserError, match="no \\[SOS\\]"):
            POOLS[readout](states, encoded)


def test_last_two_reads_two_layers_behind_the_final_norm():
    model = tiny()
    torch.nn.init.normal_(model.norms["next"].weight)
    encoded = model(labelled(None))
    vector = pool(encoded, model, "sos", "last-two", "concat")
    for part, states in zip(vector.chunk(2, -1), encoded.hidden[-2:], strict=True):
        x = states[:, 0]
        normed = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, unbiased=False, keepdim=True) + 1e-5
        ).sqrt()
        torch.testing.assert_close(part, normed * model.norms["next"].weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        pool(encoded, model, "sos", "last-two", "mean"), sum(vector.chunk(2, -1)) / 2
    )


def test_separate_output_heads_have_the_norm_of_their_layer():
    model = tiny(output_heads="separate")
    torch.nn.init.constant_(model.norms["next"].weight, 2.0)
    torch.nn.init.constant_(model.norms["previous"].weight, 3.0)
    vector = pool(model(labelled(None)), model, "mean", "last-two", "concat")
    ratio = [float(part.detach().std()) for part in vector.chunk(2, -1)]
    plain = tiny(output_heads="separate")
    plain.load_state_dict(model.state_dict())
    for norm in plain.norms.values():
        torch.nn.init.ones_(norm.weight)
    base = [
        float(part.detach().std())
        for part in pool(plain(labelled(None)), plain, "mean", "last-two", "concat").chunk(2, -1)
    ]
    assert [r / b for r, b in zip(ratio, base, strict=True)] == pytest.approx([2.0, 3.0], rel=1e-4)


def test_the_default_readout_is_the_models_own():
    assert {name: Classifier(tiny(name), outputs=2).readout for name in STACKS} == {
        "bitimelygpt": "sos",
        "gpt": "eos",
        "gpt-baar": "sos",
        "timelybert": "sos",
        "timelygpt": "eos",
    }


@pytest.mark.parametrize("name", STACKS)
def test_the_default_vector_depends_on_every_timestep_and_on_no_padding(name):
    head = Classifier(tiny(name).double(), outputs=2).double().eval()
    batch = labelled(None)
    x = batch.values.double().requires_grad_()
    (slope,) = torch.autograd.grad(head(batch._replace(values=x)).square().sum(), x)
    assert (slope.abs().amax(-1)[:, ::4][batch.mask[:, ::4]] > 0).all()
    assert (slope[~batch.mask] == 0).all()


def test_readouts_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="no readout") as caught:
        Classifier(tiny(), outputs=2, readout="cls")
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="no vector of its own") as caught:
        Classifier(tiny(), outputs=2, readout="native")
    assert caught.value.exit_code == 2


# -------------------------------------------------------------------------------------------------------------- losses


def test_cross_entropy_in_the_form_of_an_objective():
    head = Classifier(tiny(), outputs=3).eval()
    batch = labelled(torch.tensor([0, 1, 2, 2]))
    heads.standardise(head, np.array([0, 0, 1, 2]))
    assert float(head.target_scale) == pytest.approx(1.5 * math.log(2))
    result = heads.cross_entropy(head, batch)
    logits = head(batch)
    torch.testing.assert_close(result["loss"], F.cross_entropy(logits, batch.target))
    assert float(result["rel"]) == pytest.approx(float(result["loss"].detach() / head.target_scale))
    assert float(result["parts"]["accuracy"]) == (logits.argmax(-1) == batch.target).float().mean()
    assert int(result["count"]) == 4


def test_missing_labels_do_not_count():
    head = MultiLabel(tiny(), outputs=2).eval()
    target = torch.tensor([[1.0, 0.0], [torch.nan, 1.0], [0.0, torch.nan], [0.0, 0.0]])
    heads.standardise(head, target.numpy())
    share = [1 / 3, 1 / 3]
    assert float(head.target_scale) == pytest.approx(
        sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in share) / 2, rel=1e-5
    )
    result = heads.binary_cross_entropy(head, labelled(target))
    known = ~target.isnan()
    torch.testing.assert_close(
        result["loss"],
        F.binary_cross_entropy_with_logits(head(labelled(target))[known], target[known]),
    )
    result["loss"].backward()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)
    assert int(result["count"]) == 6


def test_risks_of_labels_begin_near_their_shares():
    head = MultiLabel(tiny(), outputs=3).eval()
    torch.nn.init.zeros_(head.linear.weight)
    target = np.full((99, 3), 0.0)
    target[:4, 0], target[:50, 1], target[90:, 1] = 1, 1, np.nan
    heads.start_at_prevalence(head, target)
    risks = head.predict(labelled(torch.zeros(4, 3)))
    # half a case and half a control beside those that are known
    wanted = torch.tensor([4.5 / 100, 50.5 / 91, 0.5 / 100]).expand(4, 3)
    torch.testing.assert_close(risks, wanted)


def test_regression_is_on_standardised_targets_and_predicts_in_their_unit():
    head = Regressor(tiny()).eval()
    training = np.array([60.0, 80.0, 100.0, np.nan])
    heads.standardise(head, training)
    assert head.target_mean.tolist() == pytest.approx([80.0])
    assert head.target_std.tolist() == pytest.approx([float(np.nanstd(training))])
    assert float(head.target_scale) == 1.0
    torch.nn.init.zeros_(head.linear.weight)
    torch.nn.init.zeros_(head.linear.bias)
    batch = labelled(torch.tensor([60.0, 80.0, 100.0, torch.nan]))
    result = heads.mean_squared_error(head, batch)
    assert float(result["loss"].detach()) == pytest.approx(1.0)
    assert float(result["rel"]) == pytest.approx(1.0)
    assert float(result["parts"]["mae"]) == pytest.approx(40 / 3, rel=1e-5)
    assert head.predict(batch).tolist() == pytest.approx([80.0] * 4)


def test_a_constant_target_does_not_divide_by_zero():
    head = Regressor(tiny()).eval()
    heads.standardise(head, np.full(5, 3.0))
    assert torch.isfinite(heads.mean_squared_error(head, labelled(torch.full((4,), 3.0)))["loss"])


@pytest.mark.parametrize(
    ("task", "target"), [("classification", [0, 1, 1, 0]), ("regression", [1.0, 2.0, 3.0, 4.0])]
)
def test_fit_can_measure_a_head_from_batches(task, target):
    head = heads.build(tiny(), task=task, outputs=2 if task == "classification" else 1)
    assert torch.isnan(head.target_scale)
    objectives.measure_scale(head, [labelled(torch.tensor(target)) for _ in range(3)])
    assert float(head.target_scale) == pytest.approx(
        math.log(2) if task == "classification" else 1.0
    )
    if task == "regression":
        assert head.target_mean.tolist() == pytest.approx([2.5])
    assert torch.isfinite(heads.losses[task](head, labelled(torch.tensor(target)))["rel"])


# -------------------------------------------------------------------------------------------------------------- training, files


def test_frozen_models_do_not_change():
    head = Classifier(tiny("gpt", dropout=0.5), outputs=2, freeze=True).train()
    assert not head.model.training
    assert models.count_parameters(head) == head.linear.weight.numel() + 2
    batch = labelled(torch.tensor([0, 1, 0, 1]))
    assert torch.equal(head(batch), head(batch))
    heads.cross_entropy(head, batch)["loss"].backward()
    assert all(p.grad is None for p in head.model.parameters())


@pytest.mark.slow
def test_fine_tuning_learns_what_separates_two_classes():
    torch.manual_seed(0)
    head = Classifier(models.build("bitimelygpt", preset="tiny", channels=1, length=64), outputs=2)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    draw, accuracy = torch.Generator().manual_seed(0), []
    for _ in range(60):
        target = torch.randint(2, (16,), generator=draw)
        phase = torch.rand(16, 1, generator=draw) * 2 * math.pi
        values = torch.sin(phase + torch.where(target == 1, 0.5, 0.2)[:, None] * torch.arange(64))[
            ..., None
        ]
        optimizer.zero_grad()
        result = heads.cross_entropy(head, Batch(values, target=target))
        result["loss"].backward()
        optimizer.step()
        accuracy.append(float(result["parts"]["accuracy"]))
    assert sum(accuracy[-20:]) / 20 > 0.9


@pytest.mark.parametrize("kind", [Classifier, MultiLabel, Regressor])
def test_a_saved_head_comes_back_and_so_does_its_model(kind, tmp_path):
    head = kind(tiny(), outputs=2, readout="sos+eos", layers="last-two", layer_merge="mean").eval()
    if kind is Regressor:
        heads.standardise(head, np.random.default_rng(0).normal(5, 2, (20, 2)))
    head.save(tmp_path / "model")
    again = heads.load(tmp_path / "model")
    batch = labelled(None)
    assert torch.equal(head.predict(batch), again.predict(batch))
    assert (again.task, again.readout, again.layers, again.layer_merge) == (
        head.task,
        "sos+eos",
        "last-two",
        "mean",
    )
    below = models.load(tmp_path / "model")
    assert torch.equal(below(batch).hidden[-1], head.model(batch).hidden[-1])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["head"]["outputs"] == 2
    below.save(tmp_path / "plain")
    with pytest.raises(UserError, match="without a head"):
        heads.load(tmp_path / "plain")


def test_fine_tuning_elsewhere_renews_the_adapter_and_the_head_alone():
    model = tiny()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    renewed = model.reset_adapter(channels=1, length=40)
    head = Head(model, task="classification", outputs=4)
    assert head(Batch(torch.randn(2, 40, 1))).shape == (2, 4)
    changed = {
        key
        for key, value in head.model.state_dict().items()
        if key in before and not torch.equal(before[key], value)
    }
    assert changed - {"target_scale"} <= set(renewed)
