"""Methods without a network: against scikit-learn and slow loops, stored without pickles, and as
runs like any other.
"""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import small
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score

import bitimely
from bitimely_cli.main import main
from bitimely_core.errors import UserError
from bitimely_core.evaluate import baselines, score
from bitimely_core.methods import (
    classifiers,
    kernels,
    lengths,
    linear,
    method_contract,
    rates,
    window_counts,
)
from bitimely_core.registry import methods
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store.records import read_result_table

torch.set_num_threads(1)
VIEW = ["--data", "synthetic/staging"]


# --- kernels


@pytest.mark.parametrize(("length", "channels"), [(60, 1), (61, 3), (7, 2)])
def test_responses_of_kernels_are_those_of_a_convolution(length, channels):
    x = np.random.default_rng(0).normal(size=(2, length, channels)).astype(np.float32)
    groups = kernels.draw_groups(length, channels, 84 * 4, 0)
    assert sum(group.biases.size for group in groups) == 84 * 4
    patterns = list(itertools.combinations(range(9), 3))
    for group in groups:
        s = x[:, :, group.channels].astype(np.float64).sum(2)
        for number, response in zip(group.patterns, kernels.convolve(x, group), strict=True):
            taps = np.zeros(8 * group.dilation + 1)
            taps[:: group.dilation] = [2.0 if k in patterns[number] else -1.0 for k in range(9)]
            full = [np.convolve(row, taps[::-1])[4 * group.dilation :][:length] for row in s]
            valid = [np.convolve(row, taps[::-1], "valid") for row in s]
            is_valid = (number + group.parity) % 2 == 1 and length > 8 * group.dilation
            np.testing.assert_allclose(response, valid if is_valid else full, atol=2e-5)


def test_the_longest_kernel_spans_the_window_and_features_are_shares():
    x = np.random.default_rng(0).normal(size=(9, 178, 1)).astype(np.float32)
    groups = kernels.draw_groups(178, 1, 5040, 0)
    dilations = [group.dilation for group in groups]
    assert (dilations[0], dilations[-1]) == (1, 22)  # 8 x 22 = 176 < 178
    kernels.choose_biases(x, groups, 0)
    features = kernels.compute_features(x, groups)
    assert features.shape == (9, 5040)
    column = 0
    for group in groups:
        for response, biases in zip(kernels.convolve(x, group), group.biases, strict=True):
            shares = [(response > bias).mean(1) for bias in biases]
            expected = np.stack(shares, 1)
            np.testing.assert_allclose(
                features[:, column : column + len(biases)], expected, atol=1e-6
            )
            column += len(biases)
    assert 0.4 < features.mean() < 0.6, "biases are quantiles"
    arrays = kernels.pack_groups(groups, 1)
    assert np.array_equal(kernels.compute_features(x, kernels.unpack_groups(arrays)), features)


@pytest.mark.parametrize("width", [12, 90])  # fewer and more than rows
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_the_ridge_regression_is_that_of_scikit_learn(task, width):
    draw = np.random.default_rng(0)
    x = {"train": draw.normal(3, 2, (60, width)), "validation": draw.normal(3, 2, (30, width))}
    new = draw.normal(3, 2, (20, width))
    means = {split: part[:, :3] - 3 for split, part in x.items()}
    if task == "classification":
        y = {split: part.argmax(1) for split, part in means.items()}
        targets = {split: np.eye(3)[ids] for split, ids in y.items()}
    elif task == "multilabel":
        y = {split: (part > 0).astype(float) for split, part in means.items()}
        y["train"][::7, 1] = np.nan
        y["validation"][::5, 1] = np.nan
        targets = y
    else:
        y = {split: part.sum(1) for split, part in means.items()}
        targets = {split: part[:, None] for split, part in y.items()}
    model = kernels.fit_ridge(task, x, y, 3)
    train, validation, test = linear.standardise(x["train"], x["validation"], new)
    columns = [slice(None)] if task != "multilabel" else [slice(k, k + 1) for k in range(3)]
    for place in columns:
        known = {s: np.isfinite(targets[s][:, place]).all(1) for s in targets}
        fits = [
            Ridge(alpha=penalty).fit(train[known["train"]], targets["train"][known["train"], place])
            for penalty in linear.PENALTIES
        ]
        truth = targets["validation"][known["validation"], place]
        errors = [
            (
                (fit.predict(validation[known["validation"]]).reshape(truth.shape) - truth) ** 2
            ).mean()
            for fit in fits
        ]
        expected = fits[int(np.argmin(errors))].predict(test).reshape(20, -1)
        np.testing.assert_allclose(model.compute(new)[:, place], expected, atol=1e-10)


# --- classifiers as arrays


def test_linear_models_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 4))
    scaled, new = linear.standardise(x, draw.normal(size=(9, 4)))
    for ids, classes in ((x[:, 0] > 0, 2), (2 * (x[:, 0] > 0), 3), (x[:, :3].argmax(1), 3)):
        y = {"train": ids.astype(int), "validation": np.zeros(0, int)}
        parts = {"train": x, "validation": x[:0]}
        model = linear.fit_linear("classification", parts, y, classes).model
        theirs = LogisticRegression(C=1 / linear.DEFAULT_PENALTY, max_iter=500).fit(scaled, ids)
        expected = np.zeros((9, classes))
        expected[:, np.unique(ids).astype(int)] = theirs.predict_proba(new)
        raw = new * model.scale + model.mean
        found = linear.predict_linear("classification", model, raw)
        np.testing.assert_allclose(found, expected, atol=3e-6)  # the least probability


@pytest.mark.parametrize("classes", [2, 3])
def test_boosted_trees_are_those_of_scikit_learn(classes):
    draw = np.random.default_rng(0)
    x = draw.poisson(2, (400, 6)).astype(np.float32)
    y = np.digitize(x[:, 0] + x[:, 1] * draw.integers(0, 2, 400), [2, 4][: classes - 1])
    theirs = HistGradientBoostingClassifier(max_iter=30, early_stopping=False).fit(x, y)
    new = draw.poisson(3, (200, 6)).astype(np.float32)
    for model in (
        classifiers.extract_classifier(theirs),
        *classifiers.unpack_classifiers(
            classifiers.pack_classifiers([classifiers.extract_classifier(theirs)])
        ),
    ):
        found = classifiers.predict_chance(model, new)
        np.testing.assert_allclose(found, theirs.predict_proba(new), atol=1e-10)
    assert classifiers.predict_chance(model, new[:0]).shape == (0, classes)
    constant = classifiers.make_constant(0.25)
    np.testing.assert_allclose(classifiers.predict_chance(constant, new[:2])[:, 1], 0.25)
    assert classifiers.predict_chance(classifiers.make_constant(0.0), new[:1])[0, 1] == 0


@pytest.mark.parametrize("held_out", [0, 100])
@pytest.mark.parametrize("kind", ["trees", "logistic", "linear"])
def test_a_validation_split_without_a_case_leaves_the_risk_right_on_average(kind, held_out):
    draw = np.random.default_rng(0)
    x = draw.poisson(0.6, (5000, 40)).astype(np.float32)
    y = draw.random(5000) < 1 / (1 + np.exp(4.2 - 0.5 * x[:, 0] - 0.4 * x[:, 1]))
    train, new = slice(0, 800), slice(800, None)
    parts = {"train": x[train], "validation": x[new][~y[new]][:held_out]}
    labels = {"train": y[train, None] * 1.0, "validation": np.zeros((held_out, 1))}
    if kind == "linear":
        model = linear.fit_linear("multilabel", parts, labels, 1).model
        risks = linear.predict_linear("multilabel", model, x[new])
    else:
        fitted = window_counts.fit_labels(kind, parts, labels, 4)
        risks = window_counts.predict_labels(fitted, x[new])
    assert risks.mean() == pytest.approx(y[train].mean(), rel=0.3)  # trees had a tenth of it


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_is_that_of_scikit_learn(classes):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(100, 5))
    theirs = LogisticRegression().fit(x, x[:, :classes].argmax(1))
    model = classifiers.extract_classifier(theirs)
    np.testing.assert_allclose(
        classifiers.predict_chance(model, x), theirs.predict_proba(x), atol=1e-12
    )


def test_a_number_alone_predicts_as_scikit_learn_does():
    draw = np.random.default_rng(0)
    numbers = draw.integers(1, 400, 200)
    z = (np.log1p(numbers) - np.log1p(numbers).mean()) / np.log1p(numbers).std()
    x = np.stack([z, z**2], 1)
    ids = (numbers > 90).astype(int) + (numbers > 250)
    model = lengths.fit_lengths("classification", numbers, ids)
    expected = LogisticRegression(max_iter=1000).fit(x, ids).predict_proba(x)
    found = lengths.predict_lengths("classification", model, numbers)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_fitted_method_is_stored_as_arrays_and_text(tmp_path):
    config = method_contract.validate(methods["features"].facts.config, {"name": "features"})
    arrays = {"weights": np.arange(6.0).reshape(2, 3), "bias": np.array([-np.inf, 0.1, 1.0])}
    method_contract.FittedMethod(config, "classification", ("a", "b", "c"), arrays).save(tmp_path)
    again = method_contract.load(tmp_path)
    assert (again.name, again.task, again.class_names) == (
        "features",
        "classification",
        ("a", "b", "c"),
    )
    assert all(np.array_equal(again.arrays[name], array) for name, array in arrays.items())
    assert {path.suffix for path in tmp_path.iterdir() if path.name[0] != "."} == {
        ".json",
        ".safetensors",
    }
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError):
        method_contract.load(tmp_path)


# --- rates


class Beats:
    """Windows of a beat with two harmonics in noise, and their rates a minute."""

    name, task, inputs, class_names = "beats", "regression", "signals", ()
    target_unit, label_scales, length, rate, channels = "/min", "rate", 1000, 50.0, 1

    def __init__(self, labels):
        draw = np.random.default_rng(len(labels))
        self.labels, self.rows = labels, np.arange(len(labels))
        phase = draw.uniform(0, 2 * np.pi, (len(labels), 1))
        turns = 2 * np.pi * labels[:, None] / 60 * np.arange(1000) / 50 + phase
        waves = 0.5 * np.cos(turns) + np.cos(2 * turns) + 0.5 * np.cos(3 * turns)
        self.samples = (waves + draw.normal(size=waves.shape))[..., None].astype(np.float32)

    def __len__(self):
        return len(self.rows)

    def values(self, rows):
        return self.samples[rows]

    def targets(self, rows):
        return self.labels


def test_rates_are_found_below_stronger_multiples_and_at_rates_between_those_of_the_training():
    few = Beats(np.repeat([40.0, 55.0, 85.0, 120.0], 50))
    new = Beats(np.linspace(45.0, 110.0, 60))
    config = method_contract.make_config("rates", few)
    rows = method_contract.MethodRows(few), method_contract.MethodRows(Beats(np.zeros(0)))
    fitted = method_contract.fit_method(config, method_contract.MethodFit(*rows, 0))
    errors = np.abs(fitted.predict(method_contract.MethodRows(new)) / new.labels - 1)
    assert np.median(errors) < 0.02
    assert np.mean(errors < 0.05) > 0.9


def test_spectra_of_a_wave_are_highest_at_its_cycles():
    time = np.arange(1000) / 1000
    x = np.cos(2 * np.pi * 20 * time)[None, :, None]
    assert rates.CYCLES[rates.compute_spectra(x)[0, 0].argmax()] == pytest.approx(20, rel=0.015)


# --- as runs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The synthetic cohort at 20 Hz with a run of each method of signals."""
    folder = small.copy_nights(tmp_path_factory.mktemp("workspace"))
    w = ["-w", str(folder)]
    assert main(["tokenize", "synthetic/staging", "--rate", "20", *w]) == 0
    for name in ("features", "signal"):
        assert main(["train", name, *VIEW, *w]) == 0
    assert main(["train", "kernels", *VIEW, "--set", "model.kernels=840", *w]) == 0
    return folder


def call(capsys, home, *words):
    """Exit code, stdout as JSON, stderr."""
    capsys.readouterr()
    code = main([*words, "-w", str(home), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.mark.slow
def test_methods_are_runs_and_the_baselines_of_pages_are_the_same_functions(
    home, capsys, monkeypatch
):
    monkeypatch.delitem(baselines.DESCRIPTIONS, "kernels")  # the slowest
    code, scores, _ = call(capsys, home, "evaluate", "features-staging", "--bootstrap", "0")
    assert code == 0
    rows = read_result_table(home / "runs" / "features-staging" / "predictions.parquet")
    accuracy = accuracy_score(rows["target"].to_numpy(), rows["prediction"].to_numpy())
    assert scores["metrics"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert "simple_features" not in scores["baselines"], "a run is not its own baseline"
    assert accuracy > 0.6
    code, other, _ = call(capsys, home, "evaluate", "signal-staging", "--bootstrap", "0")
    assert code == 0
    value = other["metrics"]["accuracy"]["value"]
    assert other["baselines"]["simple_features"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert scores["baselines"]["band_powers"]["accuracy"]["value"] == pytest.approx(value)
    record = RunRecord.load(home / "runs" / "signal-staging" / "run.json")
    assert (record.kind, record.model, record.settings.model.measure) == (
        "train",
        "signal",
        "band-powers",
    )
    assert record.is_method
    page = (home / "runs" / "signal-staging" / "report.html").read_text()
    assert "signal (no network)" in page
    code, _, _ = call(capsys, home, "report", "signal-staging", "features-staging")
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("kernels", marks=pytest.mark.slow), "signal"])
def test_new_recordings_and_exports_give_the_predictions_of_the_run(home, capsys, tmp_path, method):
    code, result, err = call(
        capsys, home, "export", f"{method}-staging", "--out", str(tmp_path / "out")
    )
    assert code == 0, err
    assert {"model.safetensors", "config.json", "preprocessing.json"} <= set(result["files"])
    model = bitimely.from_pretrained(tmp_path / "out")
    frame = model.predict(home / "cache" / "synthetic")
    run = bitimely.Run.open(f"{method}-staging", home)
    every = run.windows()
    scored = run.head().predict(method_contract.MethodRows(every))
    keys = zip(every.index["recording_id"], every.index["start"], strict=True)
    stored = dict(zip(keys, scored, strict=True))
    both = [
        (stored[key], row)
        for key, row in zip(
            zip(frame["recording_id"], frame["start"], strict=True),
            frame.select([f"p_{name}" for name in every.class_names]).to_numpy(),
            strict=True,
        )
        if key in stored
    ]
    assert len(both) > 0.9 * len(every)
    np.testing.assert_allclose(*map(np.stack, zip(*both, strict=True)), atol=1e-4)
    code, _, err = call(
        capsys, home, "export", f"{method}-staging", "--format", "onnx", "--dry-run"
    )
    assert code == 2
    assert "no network" in err


@pytest.mark.slow
def test_the_same_command_again_does_nothing_and_reproduce_gives_the_same_bits(home, capsys):
    words = ["train", "kernels", *VIEW, "--set", "model.kernels=840"]
    assert call(capsys, home, *words)[1]["trained"] is False
    code, _, err = call(capsys, home, *words[:-1], "model.kernels=84")
    assert code == 2
    assert "model.kernels" in err
    assert call(capsys, home, *words, "--dry-run", "--run", "other")[1]["exists"] is False
    code, result, _ = call(capsys, home, "reproduce", "kernels-staging")
    assert (code, result["same_weights"], result["differences"]) == (0, True, [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "kernels", *VIEW, "--steps", "9"], "train.steps"),
        (["train", "kernels", *VIEW, "--set", "model.layers=2"], "model.layers"),
        (["train", "kernels", *VIEW, "--preset", "tiny"], "has no network"),
        (["train", "kernals", *VIEW], "kernels"),
        (["train", "counts", *VIEW], "expected one of features, kernels, signal"),
        (["train", "rates", *VIEW], "expected one of features, kernels, signal"),
        (["train", "signal", *VIEW, "--set", "model.measure=peaks"], "band-powers"),
        (["embed", "features-staging"], "has no network"),
        (["finetune", "features-staging", *VIEW], "has no network"),
        (["analyze", "svd", "features-staging"], "has no network"),
        (["analyze", "augmentation", "features-staging"], "has no network"),
        (["pretrain", "--init", "features-staging", *VIEW], "has no network"),
        (["pretrain", "--model", "features", *VIEW], "Run: bitimely train features --data"),
    ],
)
def test_what_only_networks_do_is_refused(home, capsys, words, text):
    code, _, err = call(capsys, home, *words)
    assert code == 2, err
    assert text in err


def test_calibration_is_analyzed_and_methods_are_listed(home, capsys):
    code, _, err = call(capsys, home, "analyze", "calibration", "features-staging")
    assert code == 0, err
    listed = call(capsys, home, "list", "models")[1]
    rows = {row["name"]: row for row in listed["models"]}
    for name in ("kernels", "features", "signal", "rates", "counts", "trees"):
        assert rows[name]["family"] == "no network"


@pytest.mark.slow
def test_histories_have_counts_trees_and_a_single_code(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(baselines.DESCRIPTIONS, "counts-trees")  # the slowest
    made = ["--subjects", "1000", "--no-select", "--max-events", "48", "--small-counts"]
    assert main(["ingest", "synthetic-claims", *made, "-w", str(tmp_path)]) in {0, 3}
    values = {}
    for name, options in (
        ("counts", []),
        ("trees", ["--set", "model.tries=1"]),
        ("counts", ["--set", "model.form=single-code", "--run", "single-synthetic-claims"]),
    ):
        code, _, err = call(capsys, tmp_path, "train", name, "--data", "synthetic-claims", *options)
        assert code == 0, err
    for name in ("counts", "single"):
        words = ["evaluate", f"{name}-synthetic-claims", "--bootstrap", "0"]
        code, scores, err = call(capsys, tmp_path, *words)
        assert code == 0, err
        values[name] = scores["metrics"]["auprc"]["value"]
    assert scores["baselines"]["window_counts_logistic"]["auprc"]["value"] == values["counts"]
    assert scores["baselines"]["single_code"]["auprc"]["value"] == values["single"]
    run = bitimely.Run.open("trees-synthetic-claims", tmp_path)
    test = run.windows()["test"]
    prediction = run.head().predict(method_contract.MethodRows(test))
    found = score("multilabel", test.targets(None), prediction, test.subjects(),
        class_names=test.class_names, bootstrap=0)  # fmt: skip
    assert found.metrics["auroc"].value > 0.6


def test_rows_without_the_measure_have_the_training_median():
    from bitimely_core.methods import signal

    baseline = SimpleNamespace(name="m", channels=("a",), measure=float, fitted=False)
    rows = SimpleNamespace(
        windows=SimpleNamespace(dataset="d"), map_native=lambda channels, measure: [1.0, np.nan]
    )
    assert signal.measure_rows(baseline, rows).tolist()[0] == [1.0]
