"""Tokens by a network in the patch: what each reads, features by numpy, moments, patches by kind."""

import numpy as np
import pytest
import torch
from planted import lively, tiny

from bitimely_core import heads, models, objectives
from bitimely_core.analyses import leak_stages, leakage
from bitimely_core.config import build_model_config
from bitimely_core.errors import UserError
from bitimely_core.models.patch_cnn import PatchCNNTokenizer, PatchSpectrum
from bitimely_core.models.patch_lengths import count_samples, find_rule
from bitimely_core.types import Batch

torch.set_num_threads(1)

SIZES = {"short": 20, "long": 200}  # samples of a patch: three convolutions, residual blocks


def build(patch, *, channels=2, tokens=4, **options):
    chosen = {"tokenizer": "patch-cnn", "patch": patch, "layers": 2, **options}
    return lively(tiny("bitimelygpt", channels=channels, length=tokens * patch, **chosen))


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("patch", SIZES.values(), ids=SIZES)
def test_a_sample_changes_its_token_alone_and_the_states_on_its_side(patch, features):
    model = build(patch, patch_features=features)
    x = torch.randn(1, 4 * patch, 2, dtype=torch.float64)
    other = x.clone()
    other[0, 2 * patch + 3, 1] += 1  # of patch 2 of 0..3
    for direction, states in (("forward", [3, 4, 5]), ("backward", [0, 1, 2, 3])):
        before, after = (model(Batch(part), directions=[direction] * 2) for part in (x, other))
        assert (before.tokens != after.tokens).any(-1)[0].nonzero().flatten().tolist() == [2]
        changed = (before.hidden[-1] != after.hidden[-1]).any(-1)[0]
        assert changed.nonzero().flatten().tolist() == states


@pytest.mark.parametrize("target", ["raw", "spectrum"])
@pytest.mark.parametrize("patch", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("objective", ["next-previous-strict", "next-previous"])
def test_the_stages_of_the_leak_analysis_find_the_objective_alone(objective, patch, target):
    options = {"tokenizer": "patch-cnn", "patch": patch, "patch_features": True, "target": target}
    config = build_model_config("bitimelygpt", "tiny", channels=1, **options)
    config = leakage._resize_config(config, 3, 1, ragged=True)
    measured = {
        mode: leakage.measure_jacobian(
            config, objectives.get(objective), 0, training=mode == "train"
        )
        for mode in ("eval", "train")
    }
    assert all(part.allowed > 0 for part in measured.values())
    stages = leak_stages.measure_stages(config, measured, [], None, "channel")
    leaking = {stage.stage for stage in stages if stage.influence > 0}
    assert leaking == (set() if objective.endswith("strict") else {"objective"})


@pytest.mark.parametrize("samples", [1, 7, 45, 300])
def test_features_are_the_windowed_spectrum_mean_and_size_of_each_channel(samples):
    x = np.random.default_rng(0).normal(2, 3, (5, 3, samples))
    window = np.sin(np.pi * (np.arange(samples) + 0.5) / samples) ** 2
    centred = x - x.mean(-1, keepdims=True)
    bins = min(samples // 2, 60)
    lines = np.abs(np.fft.rfft(centred * window))[..., 1 : bins + 1] * 2 / window.sum()
    # numpy centres before the window, the linear map behind it: the same for a window of bins
    wanted = np.concatenate(
        [0.5 * np.log(lines**2 + 1e-6).reshape(5, -1), x.mean(-1), 0.5 * np.log(x.var(-1) + 1e-6)],
        axis=1,
    )
    computed = PatchSpectrum(3, samples).compute(torch.from_numpy(x).float())
    assert computed.numpy() == pytest.approx(wanted, abs=2e-3)


def test_moments_are_those_of_the_patches_of_each_channel_that_were_observed_as_a_whole():
    tokenizer = build(20, patch_features=True).adapter.tokenizer.float()
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 80, 2, generator=draw) * torch.tensor([1.0, 5.0]) for _ in range(2)]
    masks = [torch.ones(8, 80, 2, dtype=torch.bool) for _ in range(2)]
    masks[0][3, 25, 1] = False  # patch 1 of channel 1 of row 3
    assert tokenizer.lacks_moments
    tokenizer.fit(Batch(x, mask=mask) for x, mask in zip(batches, masks, strict=True))
    assert not tokenizer.lacks_moments
    patches = torch.cat(batches).unflatten(1, (4, 20)).mT  # [16, 4, 2, 20]
    features = PatchSpectrum(2, 20).compute(patches).numpy().astype(np.float64)
    whole = np.ones((16, 4), dtype=bool)
    whole[3, 1] = False
    for column, rows in (
        (12, np.ones((16, 4), dtype=bool)),
        (20, np.ones_like(whole)),
        (21, whole),
    ):
        values = features[..., column][whole if 10 <= column < 20 else rows]
        assert float(tokenizer.spectrum.mean[column]) == pytest.approx(values.mean(), abs=1e-5)
        assert float(tokenizer.spectrum.std[column]) == pytest.approx(values.std(), rel=1e-4)


def test_training_measures_the_moments_once_and_they_are_stored(tmp_path):
    x = torch.randn(6, 40, 1) * 3 + 1
    head = heads.Classifier(models.build("timelygpt", preset="tiny", length=40, patch=10), 2)
    objectives.measure_features(head, lambda epoch: iter([Batch(x)]))
    means = x.unflatten(1, (4, 10)).mean(2).flatten().double()
    spectrum = head.model.adapter.tokenizer.spectrum
    assert float(spectrum.mean[5]) == pytest.approx(float(means.mean()), abs=1e-5)
    objectives.measure_features(head, lambda epoch: iter([Batch(x * 9)]))
    assert float(spectrum.mean[5]) == pytest.approx(float(means.mean()), abs=1e-5)
    head.save(tmp_path)
    assert torch.equal(heads.load(tmp_path)(x), head.eval()(x))


def test_missing_samples_are_read_as_0_and_padding_changes_nothing():
    model = build(20, patch_features=True)
    x = torch.randn(1, 80, 2, dtype=torch.float64)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, 30:50, 0] = False
    zeroed, masked = Batch(x.masked_fill(~mask, 0)), Batch(x, mask=mask)
    assert torch.equal(model(zeroed).tokens, model(masked).tokens)
    shorter = Batch(x[:, :60])
    mask = torch.arange(80)[None] < 60
    padded = model(Batch(x, mask=mask))
    alone = model(shorter)
    assert padded.mask.tolist() == [[True, True, True, False]]
    torch.testing.assert_close(padded.hidden[-1][:, :5], alone.hidden[-1])
    vectors = [heads.pool(part, model, "mean+tokens") for part in (padded, alone)]
    torch.testing.assert_close(*vectors)


def test_a_head_reads_the_mean_of_the_states_beside_mean_and_largest_of_the_tokens():
    model = build(20)
    assert heads.find_readout(model.config) == "mean+tokens"
    encoded = model(torch.randn(3, 80, 2, dtype=torch.float64))
    tokens = model.adapter.embed(encoded.tokens)
    states = model.norm(encoded.hidden[-1], "previous")[:, 1:-1]
    wanted = torch.cat((states.mean(1), tokens.mean(1), tokens.amax(1)), -1)
    torch.testing.assert_close(heads.pool(encoded, model, "mean+tokens"), wanted)
    linear = heads.Head(model, task="regression", outputs=1).linear
    assert linear.in_features == wanted.shape[1]


def test_spectra_as_targets_do_not_depend_on_the_weights():
    config = build_model_config(
        "timelygpt", "tiny", length=80, tokenizer="patch-cnn", patch=20, target="spectrum"
    )
    made = [PatchCNNTokenizer(config, 1).train() for _ in range(2)]
    batch = Batch(torch.randn(2, 75, 1), mask=torch.rand(2, 75, 1) > 0.02)
    targets = [tokenizer(batch)[1] for tokenizer in made]
    assert torch.equal(*targets)
    assert torch.equal(targets[0], made[0].make_targets(batch)[0])
    assert not targets[0].requires_grad
    assert targets[0].shape == (2, 4, 11)
    whole = torch.nn.functional.pad(batch.mask[..., 0], (0, 5)).unflatten(1, (4, 20)).all(-1)
    assert torch.equal(made[0].find_targets(batch).all(-1), whole)


def test_learned_tokens_are_no_targets():
    with pytest.raises(UserError, match="collapse"):
        build(20, target="tokens")
    with pytest.raises(UserError, match="patch-cnn"):
        models.build("timelygpt", tokenizer="patch", target="spectrum")


@pytest.mark.parametrize(
    ("channels", "label", "rate", "length", "patch", "features"),
    [
        (["EEG"], "condition", 173.61, 178, 45, True),  # Bonn: a quarter of a second
        (["EEG Fpz-Cz", "EOG"], None, 100, 3000, 150, True),  # epochs of sleep: 1.5 s
        (["F3-A2"], None, 100, 3000, 150, True),
        (["PPG", "ECG"], "hr", 125, 4000, 1000, False),  # 8 s
        (["PPG", "ECG"], "rr", 125, 4000, 1334, False),  # 16 s, but at least three patches
        (["I", "II", "V1"], None, 500, 5000, 1667, False),
        (["ECG"], None, 300, 18000, 2250, False),
        (["EMG submental"], None, 4000, 4000, 1000, True),
        (["x", "y"], None, 50, 1600, 100, None),  # of no known kind: 16 patches
    ],
)
def test_patches_are_as_long_as_the_slowest_thing_that_they_must_hold(
    channels, label, rate, length, patch, features
):
    rule = find_rule(channels, label, length / rate)
    wanted = length / 16 if rule is None else rule.seconds * rate
    assert count_samples(length, wanted) == patch
    assert (rule and rule.features) == features


@pytest.mark.parametrize("length", [3, 10, 178, 3000, 100_000])
@pytest.mark.parametrize("wanted", [1, 44.5, 5000])
def test_a_window_has_3_to_60_patches_and_the_last_is_nearly_full(length, wanted):
    patch = count_samples(length, wanted)
    patches = -(-length // patch)
    assert min(3, length) <= patches <= 60
    assert patches * patch - length < max(patches, 60)


def test_presets_have_these_tokens_for_signals_and_the_paper_s_by_name():
    options = {"channels": 2, "length": 400}
    assert build_model_config("bitimelygpt", "tiny", **options).layers == 2
    paper = build_model_config("bitimelygpt", "tiny", tokenizer="conv", **options)
    events = build_model_config("bitimelygpt", "tiny", tokenizer="codes", codes=52)
    assert paper.layers == events.layers == 4
    for name in ("bitimelygpt", "timelygpt", "timelybert", "gpt", "gpt-baar", "lstm", "elmo"):
        for preset in ("tiny", "18m", "7.5m", "7.5m-regression", "3.8m-ecg"):
            assert build_model_config(name, preset, **options).tokenizer == "patch-cnn"
    assert build_model_config("gpt", "3m").tokenizer == "codes"


@pytest.mark.parametrize("name", ["gpt", "timelybert", "lstm", "bilstm", "elmo", "s4", "patchtst"])
def test_other_models_take_these_tokens(name):
    model = tiny(name, length=90, tokenizer="patch-cnn", patch=30)
    assert isinstance(model.adapter.tokenizer, PatchCNNTokenizer)
    head = heads.Classifier(model, 2).train()
    loss = heads.cross_entropy(
        head, Batch(torch.randn(4, 90, 3), target=torch.tensor([0, 1, 0, 1]))
    )["loss"]
    loss.backward()
    assert all(part.grad is not None for part in model.adapter.tokenizer.network.parameters())
