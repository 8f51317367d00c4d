"""Calibration error by hand and on planted probabilities, temperatures that undo what was done,
nights, subjects, learning curve.
"""

import json

import numpy as np
import pytest
from planted import Head, Windows, run

from bitimely_core import evaluate, report
from bitimely_core.analyses.calibration import calibration, read_learning_curve
from bitimely_core.analyses.reliability import (
    apply_temperature,
    assign_bins,
    bin_means,
    calibration_error,
    describe_bound,
    estimate_reliability,
    fit_temperature,
    sum_bins,
)
from bitimely_core.errors import UserError
from bitimely_core.page import Figure, Hypnogram, Table
from bitimely_core.report.prediction_page import describe_calibration
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store.records import write_results
from bitimely_core.workflows.calibrate import fit_calibration


def spoken(n_subjects=16, each=40, classes=3, sharp=1.0, seed=0, wrong=0.0):
    """Windows whose first samples are probabilities; the labels are drawn from them, then the
    probabilities are sharpened.
    """
    rng = np.random.default_rng(seed)
    n = n_subjects * each
    calibrated = rng.dirichlet(np.ones(classes), n)
    target = (rng.random((n, 1)) > calibrated.cumsum(1)).sum(1)
    target = np.where(rng.random(n) < wrong, rng.integers(0, classes, n), target)
    sharpened = apply_temperature("classification", calibrated, 1 / sharp)
    values = np.zeros((n, 12, 1))
    values[:, :classes, 0] = sharpened
    return Windows(
        values,
        target,
        np.repeat(np.arange(n_subjects), each),
        class_names=("W", "N1", "N2")[:classes],
    )


def test_the_error_by_hand():
    confidence = np.array([0.05, 0.1, 0.35, 0.95, 0.9, 1.0])
    right = np.array([0, 1, 0, 1, 1, 0])
    assert assign_bins(np.array([0.0, 0.1, 0.11, 1.0]), 10).tolist() == [0, 0, 1, 9]
    table = sum_bins(confidence, right, np.zeros(6, int), 1, 10)
    # bins: {.05, .1} 1 of 2 right, {.35} 0 of 1, {.9} 1 of 1, {.95, 1} 1 of 2
    by_hand = (2 * abs(1 / 2 - 0.075) + 0.35 + 0.1 + 2 * abs(1 / 2 - 0.975)) / 6
    assert calibration_error(table.sum(0)) == pytest.approx(by_hand)
    found = estimate_reliability(
        confidence, right, np.zeros(6, int), bins=10, bootstrap=100, seed=0
    )
    assert found.ece.value == pytest.approx(by_hand)
    assert found.gap.value == pytest.approx(confidence.mean() - right.mean())
    assert found.ece.lo is None  # one subject
    assert found.curve.windows == [2, 1, 1, 2]
    assert found.curve.share == pytest.approx([0.5, 0, 1, 0.5])


def test_the_interval_is_that_of_recomputed_resamples():
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(8), 15)
    confidence = rng.random(120)
    right = (rng.random(120) < confidence**2).astype(float)
    found = estimate_reliability(confidence, right, units, bins=5, bootstrap=50, seed=3)
    draws = []
    for counts in evaluate.draw_counts(range(50), 8, 3):
        rows = np.concatenate(
            [np.tile(np.flatnonzero(units == u), int(c)) for u, c in enumerate(counts)]
        )
        total = 0.0
        for b in range(5):
            here = rows[assign_bins(confidence[rows], 5) == b]
            total += abs(right[here].sum() - confidence[here].sum())
        draws.append(total / len(rows))
    assert (found.ece.lo, found.ece.hi) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])))
    assert found.ece.se == pytest.approx(np.std(draws, ddof=1))


def test_only_subjects_whose_label_is_known_are_units():
    """Of a label that some subjects lack: the same as if these were not there, whatever their
    numbers.
    """
    rng = np.random.default_rng(4)
    units = np.repeat([1, 3, 4, 7, 8, 11], 20)
    confidence = rng.random(120)
    right = (rng.random(120) < confidence).astype(float)
    options = {"bins": 5, "bootstrap": 200, "seed": 0}
    found = estimate_reliability(confidence, right, units, **options)
    assert found == estimate_reliability(confidence, right, np.repeat(np.arange(6), 20), **options)
    few = estimate_reliability(confidence[:60], right[:60], units[:60], **options)
    assert (
        few.ece.undefined_reason
        == few.gap.undefined_reason
        == "no CI: 3 subjects, at least 5 required"
    )


def test_calibrated_probabilities_stay_within_chance_and_sharpened_ones_do_not():
    units = np.repeat(np.arange(40), 50)
    within = {"gap": 0, "ece": 0}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        p = rng.uniform(0.3, 0.9, 2000)
        right = (rng.random(2000) < p).astype(float)
        calibrated = estimate_reliability(p, right, units, bins=10, bootstrap=200, seed=0)
        within["gap"] += calibrated.gap.lo < 0 < calibrated.gap.hi
        within["ece"] += calibrated.ece.value <= calibrated.chance.p95
        bold = estimate_reliability(
            np.minimum(p + 0.1, 1), right, units, bins=10, bootstrap=200, seed=0
        )
        assert bold.ece.lo > bold.chance.p95
        assert bold.gap.value == pytest.approx(0.1, abs=0.035)
    assert min(within.values()) >= 17  # 19 of 20 are expected


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_a_temperature_undoes_what_a_temperature_did(task):
    rng = np.random.default_rng(2)
    calibrated = (
        rng.dirichlet(np.ones(3), 6000)
        if task == "classification"
        else rng.uniform(0.05, 0.95, (6000, 3))
    )
    target = (
        (rng.random((6000, 1)) > calibrated.cumsum(1)).sum(1)
        if task == "classification"
        else (rng.random(calibrated.shape) < calibrated).astype(float)
    )
    sharpened = apply_temperature(task, calibrated, 0.4)
    assert sharpened.argmax(1).tolist() == calibrated.argmax(1).tolist()
    found = fit_temperature(task, sharpened, target)
    assert found == pytest.approx(2.5, rel=0.08)
    assert apply_temperature(task, sharpened, 2.5) == pytest.approx(calibrated, abs=1e-6)
    assert fit_temperature(task, calibrated[:0], target[:0]) is None


def test_groups_of_values():
    curve = bin_means(np.array([4.0, 1, 3, 2]), np.array([40.0, 10, 30, 20]), 2)
    assert curve["prediction"].tolist() == [1.5, 3.5]
    assert curve["target"].tolist() == [15, 35]


def test_page_of_a_model_that_is_too_sure(tmp_path):
    windows = spoken(n_subjects=40, sharp=4.0)
    page = calibration([run(windows, Head(3))], bootstrap=100)
    of = page.summary["reliability"]["class that the model names"]
    assert of["as_is"]["ece"]["lo"] > of["as_is"]["chance"]["p95"]
    assert of["tempered"]["ece"]["value"] < of["as_is"]["ece"]["value"] / 2
    assert page.summary["temperature"] == pytest.approx(4.0, rel=0.25)
    assert "too high by" in page.verdict
    rows = windows["test"].rows
    predicted, truth = windows.values[rows, :3, 0].argmax(1), windows.target[rows]
    assert page.summary["metrics"]["accuracy"]["value"] == pytest.approx(
        (predicted == truth).mean()
    )
    shares = next(
        b for b in page.blocks if isinstance(b, Figure) and b.name == "confusion"
    ).data.values
    assert shares.sum(1) == pytest.approx(np.ones(3))
    assert shares[0, 1] == pytest.approx(
        ((truth == 0) & (predicted == 1)).sum() / (truth == 0).sum()
    )
    persons = page.summary["subjects"]
    each = [
        (predicted[windows.of[rows] == s] == truth[windows.of[rows] == s]).mean()
        for s in np.unique(windows.of[rows])
    ]
    assert sorted(p["accuracy"] for p in persons) == pytest.approx(sorted(each))
    assert "p-3" not in report.write_report(tmp_path, page).read_text()
    assert "p-3" not in (tmp_path / "summary.json").read_text()
    assert calibration([run(windows, Head(3))], bootstrap=100).summary == page.summary


def test_nights_stand_where_their_epochs_are():
    windows = spoken()
    page = calibration([run(windows, Head(3))], bootstrap=10)
    shown = [b for b in page.blocks if isinstance(b, Figure) and isinstance(b.data, Hypnogram)]
    assert len(shown) == 3
    tracks = shown[0].data.tracks
    assert len(tracks[0].stages) == 40
    agree = [(np.array(b.data.tracks[0].stages) == b.data.tracks[1].stages).mean() for b in shown]
    assert agree == sorted(agree)
    assert f"{agree[0]:.2f}" in shown[0].title
    short = spoken(each=5)
    assert not any(
        isinstance(b, Figure) and isinstance(b.data, Hypnogram)
        for b in calibration([run(short, Head(3))], bootstrap=10).blocks
    )


def test_labels_are_judged_one_by_one():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.1, 0.9, (800, 2))
    target = (rng.random(p.shape) < p).astype(np.float32)
    p[:, 1] = np.clip(p[:, 1] + 0.3, 0, 1)
    target[rng.random(p.shape) < 0.2] = np.nan
    values = np.zeros((800, 12, 1))
    values[:, :2, 0] = p
    windows = Windows(
        values, target, np.arange(800), "multilabel", ("CHF", "COPD"), cuts=(0.3, 0.5)
    )
    page = calibration([run(windows, Head(2))], bootstrap=100)
    found = page.summary["reliability"]
    assert found["COPD"]["as_is"]["gap"]["value"] > 0.2
    assert abs(found["CHF"]["as_is"]["gap"]["value"]) < 0.06
    assert "COPD" in page.verdict
    assert any(isinstance(b, str) and "one sequence" in b for b in page.blocks)
    table = next(b for b in page.blocks if isinstance(b, Table) and b.name == "calibration")
    assert [row[0] for row in table.rows] == ["CHF", "COPD"]


def test_numbers_are_compared_with_what_was_measured():
    rng = np.random.default_rng(0)
    target = rng.normal(size=320).astype(np.float32)
    values = np.zeros((320, 12, 1))
    values[:, 0, 0] = 2 * target + 1  # exaggerates
    windows = Windows(values, target, np.repeat(np.arange(16), 20), "regression", ())
    page = calibration([run(windows, Head(1))], bootstrap=50)
    assert page.summary["reliability"]["slope"] == pytest.approx(0.5, abs=1e-6)
    test = windows["test"].rows
    assert page.summary["reliability"]["bias"] == pytest.approx(
        (values[test, 0, 0] - target[test]).mean(), abs=1e-5
    )


def record(source="tiny", fraction=1.0, weights="w", readout="sos", run="?"):
    return RunRecord(
        run=run,
        kind="finetune",
        model="bitimelygpt",
        source={"run": source, "weights": weights},
        settings={
            "data": {"fraction": fraction},
            "finetune": {"readout": readout, "from_scratch": weights is None},
        },
        data=[
            {
                "name": "planted",
                "dataset": "planted",
                "fingerprint": "f",
                "class_names": ["W", "N1", "N2"],
            }
        ],
    )


def fields_of(one):
    return {name: getattr(one, name) for name in ("kind", "source", "settings", "data")}


def test_siblings_make_a_learning_curve(tmp_path):
    def evaluated(name, value, **of):
        folder = tmp_path / name
        folder.mkdir()
        record(**of, run=name).save(folder / "run.json")
        metric = {"value": value, "lo": value - 0.1, "hi": value + 0.1}
        scores = {
            "format_version": 1,
            "data": "planted",
            "split": "test",
            "metrics": {"accuracy": metric},
        }
        write_results(folder, {"scores.json": json.dumps(scores).encode()})
        return folder

    here = evaluated("full", 0.9)
    evaluated("tenth", 0.6, fraction=0.1)
    evaluated("scratch", 0.5, fraction=0.1, weights=None)
    evaluated("other-model", 0.1, source="18m")
    evaluated("other-readout", 0.1, readout="mean", fraction=0.5)
    windows = spoken()
    one = run(windows, Head(3), folder=here, **fields_of(record()))
    found = read_learning_curve(one, "accuracy")
    assert [(p.run, p.fraction, p.scratch) for p in found] == [
        ("tenth", 0.1, False),
        ("full", 1.0, False),
        ("scratch", 0.1, True),
    ]
    page = calibration([one], bootstrap=10)
    drawn = next(b for b in page.blocks if isinstance(b, Figure) and b.name == "learning-curve")
    assert [s.name for s in drawn.data.series] == ["pre-trained", "from scratch"]
    assert drawn.data.series[0].y == [0.6, 0.9]


def test_without_siblings_it_says_how_to_get_them():
    page = calibration([run(spoken(), Head(3), **fields_of(record()))], bootstrap=10)
    assert any(
        isinstance(b, str) and "finetune tiny --data planted/staging --fraction" in b
        for b in page.blocks
    )


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UserError, match="only pre-trained"):
        calibration([run(spoken())])
    windows = spoken()
    windows.cuts = (2, 2)
    with pytest.raises(UserError, match="no test rows"):
        calibration([run(windows, Head(3))])


def test_a_temperature_at_the_end_of_the_search_is_said() -> None:
    target = np.arange(400) % 2
    right = np.where(target[:, None] == np.arange(2), 0.9, 0.1)
    unsure = 0.5 + (right - 0.5) / 10
    for prediction, word in ((right[:, ::-1], "constant"), (unsure, "0 or 1")):
        text = describe_bound(fit_temperature("classification", prediction, target))
        assert text is not None
        assert word in text
    # wrong in one of ten
    calibrated = np.where(np.arange(400)[:, None] % 10 == 0, right[:, ::-1], right)
    assert describe_bound(fit_temperature("classification", calibrated, target)) is None
    assert describe_bound(None) is None


def test_slope_intercept_brier_and_tenths_are_those_of_their_definitions():
    """Slope and intercept at scipy's minimum of the log loss, the others by their formulas."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(5)
    p, units = rng.uniform(0.05, 0.95, 600), np.repeat(np.arange(30), 20)
    z = np.log(p / (1 - p))
    right = (rng.random(600) < 1 / (1 + np.exp(-(0.4 + 0.5 * z)))).astype(float)
    found = estimate_reliability(p, right, units, bins=5, bootstrap=20, seed=0)

    def loss(x):
        return float(np.sum(np.logaddexp(0, x) - right * x))

    both = minimize(lambda b: loss(b[0] + b[1] * z), [0.0, 1.0], tol=1e-12).x
    offset = minimize(lambda b: loss(b[0] + z), [0.0], tol=1e-12).x
    assert found.fit.slope.value == pytest.approx(both[1], abs=1e-4)
    assert found.fit.intercept.value == pytest.approx(offset[0], abs=1e-4)
    assert found.fit.brier.value == pytest.approx(np.mean((right - p) ** 2))
    order = np.argsort(p).reshape(10, 60)
    assert found.tenths.windows == [60] * 10
    assert found.tenths.probability == pytest.approx(p[order].mean(1))
    assert found.tenths.share == pytest.approx(right[order].mean(1))


@pytest.mark.parametrize(("wrong", "people", "fits"), [(0, 9, False), (3, 9, True), (3, 8, False)])
def test_windows_without_a_mistake_or_of_few_people_fit_no_temperature(
    wrong: int, people: int, fits: bool
) -> None:
    target, subjects = np.arange(72) % 2, np.repeat(np.arange(people), 72 // people)
    said = np.where(np.arange(72) < wrong, 1 - target, target)
    prediction = np.where(said[:, None] == np.arange(2), 0.9, 0.1)
    fitted = fit_calibration(
        "classification", prediction, target, subjects, weights="w", data="D, validation"
    )
    assert (fitted.temperature is not None) == fits
    if fitted.temperature:  # of two probabilities that are alike everywhere: their share
        share = 1 / (1 + 9 ** (-1 / fitted.temperature))
        assert share == pytest.approx(1 - wrong / 72, abs=1e-3)
    else:
        reason = "not calibrated: 8 cal" if people == 8 else "without a temperature"
        assert reason in describe_calibration(fitted)
