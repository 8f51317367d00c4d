"""Probes on vectors that are known: what is linearly there is found, what is not stays at the
majority, differences are paired.
"""

import numpy as np
import pytest
import torch
from planted import Head, Windows, classes, run
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

from bitimely_core import data, models, report
from bitimely_core.analyses import plain_features
from bitimely_core.analyses.plain_features import VectorChoice, extract_vectors, list_choices
from bitimely_core.analyses.probing import negate_difference, probing
from bitimely_core.errors import UserError
from bitimely_core.methods.linear import PENALTIES, extract_simple_features, fit_probe, standardise
from bitimely_core.page import Figure, Table
from bitimely_core.progress import show_progress
from bitimely_core.schemas.scores import Difference


def splits(rng, n, columns, rule):
    x = {split: rng.normal(size=(n, columns)) for split in ("train", "validation", "test")}
    return x, {split: rule(part, rng) for split, part in x.items()}


def test_a_probe_finds_what_is_linear_and_nothing_else():
    rng = np.random.default_rng(0)
    x, y = splits(rng, 200, 5, lambda part, _: (part[:, 0] > 0).astype(int))
    assert (fit_probe("classification", x, y, 2).prediction.argmax(1) == y["test"]).mean() > 0.95
    x, y = splits(rng, 400, 5, lambda part, _: (part[:, 0] * part[:, 1] > 0).astype(int))
    found = fit_probe("classification", x, y, 2)
    assert (found.prediction.argmax(1) == y["test"]).mean() < 0.62
    assert found.penalty[0] >= 1e2  # noise asks for the strongest


def test_the_penalty_is_the_one_with_the_least_validation_loss_and_test_labels_are_not_read():
    rng = np.random.default_rng(1)
    x, y = splits(
        rng, 60, 20, lambda part, r: (part[:, 0] + r.normal(size=len(part)) > 0).astype(int)
    )
    found = fit_probe("classification", x, {k: y[k] for k in ("train", "validation")}, 2)
    parts = standardise(x["train"], x["validation"], x["test"])
    fitted = {
        p: LogisticRegression(C=1 / p, max_iter=5000, tol=1e-8).fit(parts[0], y["train"])
        for p in PENALTIES
    }
    loss = {p: log_loss(y["validation"], m.predict_proba(parts[1])) for p, m in fitted.items()}
    best = min(loss, key=loss.get)
    assert found.penalty == [best]
    assert found.prediction == pytest.approx(fitted[best].predict_proba(parts[2]), abs=2e-3)


def test_numbers_are_probed_by_ridge_regression():
    rng = np.random.default_rng(2)
    x, y = splits(rng, 80, 6, lambda part, r: 3 + part @ np.arange(6.0) + r.normal(size=len(part)))
    found = fit_probe("regression", x, y, 1)
    parts = standardise(x["train"], x["validation"], x["test"])
    errors = {
        p: np.mean(
            (Ridge(alpha=p).fit(parts[0], y["train"]).predict(parts[1]) - y["validation"]) ** 2
        )
        for p in PENALTIES
    }
    best = min(errors, key=errors.get)
    assert found.penalty == [best]
    assert found.prediction == pytest.approx(
        Ridge(alpha=best).fit(parts[0], y["train"]).predict(parts[2])
    )


def test_labels_are_probed_one_by_one_without_missing_ones():
    rng = np.random.default_rng(3)

    def rule(part, r):
        labels = (part[:, :2] > 0).astype(float)
        labels[r.random(labels.shape) < 0.3] = np.nan
        return labels

    x, y = splits(rng, 300, 4, rule)
    found = fit_probe("multilabel", x, y, 2)
    assert found.prediction.shape == (300, 2)
    assert len(found.penalty) == 2
    for k in range(2):
        known = np.isfinite(y["test"][:, k])
        assert ((found.prediction[known, k] > 0.5) == y["test"][known, k]).mean() > 0.93


def test_classes_that_training_lacks_and_no_validation_split():
    rng = np.random.default_rng(4)
    x = {
        "train": rng.normal(size=(30, 3)),
        "validation": np.zeros((0, 3)),
        "test": rng.normal(size=(9, 3)),
    }
    y = {"train": np.repeat([0, 2], 15), "validation": np.zeros(0, int)}
    found = fit_probe("classification", x, y, 3)
    assert found.penalty == [1e2]
    assert found.prediction.sum(1) == pytest.approx(np.ones(9))
    assert found.prediction[:, 1].max() < 1e-5
    y["train"][:] = 1
    assert (fit_probe("classification", x, y, 3).prediction.argmax(1) == 1).all()


def test_vectors_are_those_of_the_readouts():
    windows = classes()
    one = run(windows)
    cells = list_choices(one.model(), windows, 0)
    assert {c.readout for c in cells} == {"sos", "eos", "sos+eos", "mean", "last", "max"}
    assert {c.layers for c in cells} == {"last", "last-two", "1"}
    rows = np.array([5, 2, 300])
    found = extract_vectors(one.model(), windows, rows, cells)
    x = windows.values[rows, :, 0]
    assert found[VectorChoice("sos", "last")] == pytest.approx(x[:, :4])
    assert found[VectorChoice("mean", "last")] == pytest.approx(
        np.repeat(x.mean(1)[:, None], 4, 1), abs=1e-6
    )
    assert found[VectorChoice("sos", "last-two")][:, 4:] == pytest.approx(x[:, :4])
    assert found[VectorChoice("sos", "1")] == pytest.approx(
        np.sin(1e4 * x[:, :4].astype(np.float32)), abs=1e-2
    )


@pytest.mark.parametrize("name", ["bitimelygpt", "lstm", "patchtst", "timesnet"])
def test_every_cell_of_a_real_model_is_what_a_head_would_read(name):
    from bitimely_core import heads

    windows = classes(length=48)
    model = models.build(name, preset="tiny", channels=1, length=48).eval()
    cells = list_choices(model, windows, 0)
    found = extract_vectors(model, windows, np.arange(3), cells)
    for cell in cells:
        if cell.layers in {"last", "last-two"}:
            wanted = (
                heads.compute_vectors(
                    model, data.collate(windows, np.arange(3)), cell.readout, cell.layers
                )
                .detach()
                .numpy()
            )
            assert found[cell] == pytest.approx(wanted, abs=1e-5)


def test_raw_features_of_a_sine():
    t = np.arange(64) / 64
    quiet, loud = np.sin(2 * np.pi * 4 * t), 3 + 2 * np.sin(2 * np.pi * 20 * t)
    windows = Windows(np.stack([quiet, loud])[..., None], [0, 1], [0, 1])
    found = extract_simple_features(windows, np.arange(2))
    assert found[:, 0] == pytest.approx([0, 3], abs=1e-6)
    assert found[:, 1] == pytest.approx(np.log([np.sqrt(0.5), 2 * np.sqrt(0.5)]), abs=1e-5)
    assert found[0, 2:].argmax() < found[1, 2:].argmax()


@pytest.mark.slow
def test_page_of_a_run_with_a_planted_layer(tmp_path):
    windows = classes()
    page = probing([run(windows)], bootstrap=200)
    sos = page.summary["cells"]["sos"]
    assert sos["last"]["value"] > 0.95
    assert sos["1"]["value"] < 0.75
    gap = sos["1"]["difference"]
    assert gap["difference"] == pytest.approx(sos["1"]["value"] - sos["last"]["value"])
    assert sos["last"]["difference"] is None
    assert gap["lo"] is None  # four test subjects
    assert any("4 subjects" in notice for notice in page.notices)
    assert "leak_free is false." in page.notices
    table = next(b for b in page.blocks if isinstance(b, Table) and b.name == "probing")
    assert [row[0] for row in table.rows][:4] == [
        "[SOS] (l = L)",
        "[EOS] (l = L)",
        "[SOS] + [EOS] (l = L)",
        "average pooling (l = L)",
    ]
    assert len(table.rows) == 8
    assert isinstance(page.blocks[0], Figure)
    assert page.summary["controls"]["raw"]["value"] is not None
    assert probing([run(windows)], bootstrap=200).summary == page.summary
    written = report.write_report(tmp_path, page)
    assert "p-1" not in written.read_text()


def test_differences_with_enough_subjects_exclude_zero_only_where_planted():
    windows = classes(n_subjects=40)
    page = probing([run(windows)], bootstrap=300, readouts="sos,eos", sequences=300)
    gap = page.summary["cells"]["eos"]["last"]["difference"]
    assert gap["hi"] < 0
    assert gap["p"] < 0.05
    assert set(page.summary["cells"]) == {"sos", "eos"}
    assert any("--sequences" in notice for notice in page.notices)


def test_a_difference_the_other_way_round():
    found = negate_difference(Difference(difference=0.1, se=0.02, lo=0.05, hi=0.2, p=0.01))
    assert (found.difference, found.lo, found.hi, found.p) == (-0.1, -0.2, -0.05, 0.01)


def test_what_cannot_be_probed_is_refused():
    windows = classes()
    with pytest.raises(UserError, match="sos\\+eos"):
        probing([run(windows)], readouts="sso")
    with pytest.raises(UserError, match="vector of its own"):
        probing([run(windows)], readouts="native")
    windows.task = "none"
    with pytest.raises(UserError, match="no labels"):
        probing([run(windows)])
    with pytest.raises(UserError, match="no test rows"):
        probing([run(Windows(np.zeros((4, 12, 1)), [0, 1, 0, 1], [0, 0, 1, 1], cuts=(2, 2)))])


def test_subjects_are_numbered_without_telling_their_order():
    numbers, count = plain_features.number_subjects(np.array([f"s{k:02d}" for k in range(20)]), 0)
    assert count == 20
    assert sorted(numbers) == list(range(20))
    assert list(numbers) != list(range(20))


@pytest.mark.slow
def test_fine_tuned_runs_stand_beside_the_frozen_probe():
    windows = classes(n_subjects=40)
    windows.cuts = (0.5, 0.6)
    good, poor = Head(2), Head(2)
    poor.readout, poor.layers = "mean", "last-two"
    good.predict = lambda batch: torch.stack(
        [-batch.values[:, 0, 0], batch.values[:, 0, 0]], 1
    ).softmax(1)
    poor.predict = lambda batch: torch.full((len(batch.values), 2), 0.5)
    events = []
    runs = [
        run(windows, name="base"),
        run(windows, good, "tuned"),
        run(windows, poor, "tuned-mean"),
    ]
    with show_progress(lambda *event: events.append(event[0])):
        page = probing(runs, bootstrap=100, control=False)
    found = page.summary["fine_tuned"]
    assert list(found) == ["tuned", "tuned-mean"]
    target = windows["test"].targets()
    accuracy = (good.predict(data.collate(windows["test"])).argmax(1).numpy() == target).mean()
    assert found["tuned"]["value"] == pytest.approx(accuracy)
    assert (found["tuned"]["readout"], found["tuned"]["difference"]) == ("sos", None)
    assert found["tuned-mean"]["difference"]["difference"] == pytest.approx(
        found["tuned-mean"]["value"] - accuracy
    )
    assert found["tuned"]["frozen"] == page.summary["cells"]["sos"]["last"]["value"]
    assert found["tuned"]["beyond_frozen"]["value"] == pytest.approx(
        accuracy - found["tuned"]["frozen"]
    )
    assert found["tuned-mean"]["frozen"] == page.summary["cells"]["mean"]["last-two"]["value"]
    table = next(b for b in page.blocks if isinstance(b, Table) and b.name == "fine-tuned")
    assert [row[:2] for row in table.rows] == [
        ["tuned", "[SOS] (l = L)"],
        ["tuned-mean", "average pooling (l = {L − 1, L})"],
    ]
    assert "predict tuned-mean" in events
    alone = probing([run(windows, good, "tuned")], bootstrap=10, control=False)
    assert list(alone.summary["fine_tuned"]) == ["tuned"]
    assert "fine_tuned" not in probing([run(windows)], bootstrap=10, control=False).summary


def test_only_the_first_run_is_probed():
    windows = classes()
    with pytest.raises(UserError, match="only pre-trained"):
        probing([run(windows), run(windows, name="other")])
    other = classes(seed=1)
    other.fingerprint = "g"
    with pytest.raises(UserError, match="other windows"):
        probing([run(windows), run(other, Head(2))])
