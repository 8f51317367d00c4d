"""Baselines beside every score: what a data set registers, what it may read, the first sentence of
a page, and what is stored.
"""

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from small import SMALL_RECIPE, copy_nights, copy_workspace

from bitimely_core import cache, pipeline, registry, tokens, workflows
from bitimely_core.datasets.synthetic import BANDS
from bitimely_core.errors import UserError
from bitimely_core.evaluate import baselines, score
from bitimely_core.evaluate.verdicts import compare_baselines, judge_baselines
from bitimely_core.registry import DatasetBaseline
from bitimely_core.schemas.runs import RunRecord


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """Tokens and cache of the synthetic cohort in a workspace."""
    home = copy_nights(tmp_path_factory.mktemp("home"))
    windows = tokens.build(
        home / "cache" / "synthetic", view="staging", out=home / "tokens" / "synthetic-staging"
    )
    return home, windows


def record(windows, **settings):
    return RunRecord(
        run="a",
        kind="finetune",
        model="gpt",
        data=[
            {"name": windows.name, "dataset": windows.dataset, "fingerprint": windows.fingerprint}
        ],
        settings=settings,
    )


def register(monkeypatch, measure, **facts):
    """The synthetic cohort with one measure of its own."""
    entry = registry.datasets["synthetic"]
    baseline = DatasetBaseline(name="mine", about="", measure=measure, **facts)
    facts = dataclasses.replace(entry.facts, baselines=(baseline,))
    changed = dataclasses.replace(entry, facts=facts)
    monkeypatch.setitem(registry.datasets._items, "synthetic", changed)


@pytest.mark.slow
def test_a_registered_baseline_reads_the_recording_and_no_test_label(cohort, tmp_path, monkeypatch):
    home, windows = cohort
    seen = []

    def measure(window):
        seen.append((window.samples["EEG Fpz-Cz"], window.rates["EEG Fpz-Cz"]))
        return [window.samples["EEG Fpz-Cz"].std()]

    register(monkeypatch, measure, channels=("EEG Fpz-Cz",), fitted=True)
    assert list(baselines.list_baselines(windows)) == ["features", "kernels", "mine"]
    found = baselines.predict_baseline(
        "mine", record(windows), windows, windows["test"], keep=tmp_path, most=7
    )
    assert found.prediction.shape == (7, 5)
    assert len(found.rows) == 7
    index = windows["test"].index[found.rows]
    signals = {
        r.recording_id: next(s for s in r.signals if s.channel == "EEG Fpz-Cz")
        for r in cache.open_cache(home / "cache" / "synthetic").records()
    }
    by_recording = sorted(zip(index["recording_id"], index["start"], strict=True))
    expected = [
        signals[recording].samples[int(start * 100) :][:3000] * signals[recording].scale
        + signals[recording].offset
        for recording, start in by_recording
    ]
    # train and validation are measured first
    assert len(seen) == len(windows["train"]) + len(windows["validation"]) + 7
    assert {rate for _, rate in seen} == {100}
    measured = [samples for samples, _ in seen[-7:]]
    for samples in expected:
        assert any(np.allclose(samples, other) for other in measured)


@pytest.mark.slow
def test_wrong_measures_of_a_data_set_are_named(cohort, tmp_path, monkeypatch):
    _, windows = cohort
    register(monkeypatch, lambda window: np.zeros(int(window.samples["EEG Fpz-Cz"][0] > 0) + 1),
        channels=("EEG Fpz-Cz",), fitted=True)  # fmt: skip
    with pytest.raises(UserError, match="as many numbers of every window"):
        baselines.predict_baseline("mine", record(windows), windows, windows["test"], keep=tmp_path)
    register(monkeypatch, lambda window: 1.0)
    with pytest.raises(UserError, match="measures a value"):
        baselines.predict_baseline("mine", record(windows), windows, windows["test"], keep=tmp_path)


def test_band_powers_of_the_recording_stage_the_synthetic_cohort(cohort, tmp_path):
    """The module's promise: about three of four epochs of new subjects from the band powers of one
    channel.
    """
    _, windows = cohort
    found = baselines.predict_baseline(
        "band-powers", record(windows), windows, windows["test"], keep=tmp_path
    )
    accuracy = (found.prediction.argmax(1) == windows["test"].targets(None)).mean()
    assert 0.65 < accuracy < 0.9
    one = registry.datasets["synthetic"].facts.baselines[0]
    from bitimely_core.datasets.synthetic import measure_band_powers
    from bitimely_core.types import NativeWindow

    t = np.arange(3000) / 100
    powers = {
        f: measure_band_powers(NativeWindow({"A": np.sin(2 * np.pi * f * t)}, {"A": 100.0}))
        for f in (2, 6, 10, 13, 20)
    }
    assert [int(p.argmax()) for p in powers.values()] == [0, 1, 2, 3, 4]
    assert len(BANDS) == 5
    assert one.views == ("staging",)


def test_the_script_of_the_docs_fits_on_the_labels_that_a_run_gets(cohort, tmp_path):
    """A share of the training subjects under a seed: the predictions are those of a run's own
    baseline, and others than with all labels.
    """
    _, windows = cohort
    script = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "baselines.py"))
    run = record(windows, data={"fraction": 0.2}).model_copy(update={"seed": 1})
    found = script["predict_fold"](windows, "features", 0.2, 1)
    assert np.array_equal(
        found,
        baselines.predict_baseline(
            "features", run, windows, windows["test"], keep=tmp_path
        ).prediction,
    )
    assert not np.array_equal(found, script["predict_fold"](windows, "features"))


@pytest.mark.slow
def test_training_windows_are_bounded_and_stated(cohort, tmp_path, monkeypatch):
    _, windows = cohort
    monkeypatch.setattr(baselines, "count_fitted", lambda windows: 50)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    found, remarks = baselines.predict_baselines(
        record(windows), windows, windows["test"], folder=run
    )
    assert not remarks
    assert set(found) == {"simple_features", "random_kernels", "band_powers"}
    of = len(windows["train"])
    assert all(about.endswith(f", on 50 of {of:,} training windows") for about, _ in found.values())
    monkeypatch.setattr(baselines, "fit_and_predict", lambda *a: pytest.fail("computed again"))
    beside = tmp_path / "runs" / "b"
    beside.mkdir()
    again, _ = baselines.predict_baselines(record(windows), windows, windows["test"], folder=beside)
    assert all(
        np.array_equal(again[name][1].prediction, one.prediction)
        for name, (_, one) in found.items()
    )


# --- the first sentence ---------------------------------------------------------------------------------------------------------------------


def answers(skill, base, subjects=20, each=20, seed=0):
    """Scores of a run that is right with probability `skill` beside a baseline that is with
    probability `base`.
    """
    rng = np.random.default_rng(seed)
    n = subjects * each
    y = rng.integers(0, 2, n)
    right = {
        name: rng.random(n) < share for name, share in (("run", skill), ("random_kernels", base))
    }
    p = {name: np.eye(2)[np.where(of, y, 1 - y)] for name, of in right.items()}
    return score(
        "classification",
        y,
        p["run"],
        np.repeat(np.arange(subjects), each),
        class_names=("no", "yes"),
        train_target=y,
        baselines={"random_kernels": p["random_kernels"]},
    ), right


def test_a_baseline_that_beats_the_model_is_the_first_sentence():
    scores, right = answers(0.6, 0.9)
    found = judge_baselines(scores, "D")
    assert found.case == "exceeded"
    difference = 100 * (right["run"].mean() - right["random_kernels"].mean())
    assert found.sentence.startswith(
        f"The random kernels baseline beats this trained model on D in accuracy: {90:.0f}"[:60]
    )
    assert f"a difference of {difference:+.1f} points".replace("-", "−") in found.sentence
    assert "Holm-corrected over 3 baselines; 20 subjects" in found.sentence


def test_no_significant_difference_to_a_baseline_is_said_in_the_decided_words():
    scores, right = answers(0.8, 0.8)
    found = judge_baselines(scores, "D")
    assert found.case == "equal"
    d = compare_baselines(scores)["random_kernels"]
    reach = 100 * max(abs(d.corrected_lo), abs(d.corrected_hi))
    assert found.sentence.startswith(
        "No significant difference between this trained model and the random kernels baseline on D: "
    )
    assert found.sentence.endswith(
        f"; differences of up to {reach:.1f} points either way cannot be excluded."
    )
    assert d.difference == pytest.approx(right["run"].mean() - right["random_kernels"].mean())


def test_few_subjects_have_no_verdict_and_a_good_model_comes_first():
    assert (
        "no verdict (4 subjects, at least 5 required)"
        in judge_baselines(answers(0.6, 0.9, subjects=4)[0], "D").sentence
    )
    best = judge_baselines(answers(0.95, 0.6)[0], "D")
    assert best.case == "exceeds"
    assert best.sentence.startswith(
        "It exceeds all 3 baselines; the closest is the random kernels baseline: +"
    )


@pytest.mark.parametrize(("subjects", "sizes", "why"), [
    (1, 60, "one subject, between-subject variance cannot be estimated"),
    (3, 20, "3 subjects, at least 5 required"),
    (6, [60, 60, 60, 2, 2, 2], "effectively 3.20 subjects of equal weight, at least 4 required"),
])  # fmt: skip
def test_a_model_ahead_of_its_baselines_does_not_exceed_them_without_a_verdict(
    subjects, sizes, why
):
    groups, rng = np.repeat(np.arange(subjects), sizes), np.random.default_rng(0)
    y = rng.integers(0, 2, len(groups))
    p = np.eye(2)[np.where(rng.random(len(y)) < 0.9, y, 1 - y)]
    found = judge_baselines(
        score("classification", y, p, groups, class_names=("no", "yes"), train_target=y), "D"
    )
    assert found.case == "unclear"
    assert "exceeds" not in found.sentence
    assert f", the closest of 2 baselines, reaches {50:.0f}"[:-2] in found.sentence
    assert found.sentence.endswith(f"; no verdict ({why}).")


@pytest.mark.slow
def test_baselines_are_cheap_to_repeat_and_can_be_left_out(tmp_path):
    home = tmp_path / "home"
    copy_workspace(home)
    run = home / "runs" / "tuned"
    before = json.loads((run / "scores.json").read_bytes())
    stored = (home / "runs").glob("*/baselines/*.parquet")  # of whichever run was scored first
    assert {path.name.split("-")[0] for path in stored} >= {"features", "kernels"}
    assert {"majority", "prior", "simple_features", "random_kernels"} <= before["baselines"].keys()
    assert before["baselines"]["random_kernels"]["accuracy"]["difference"][
        "difference"
    ] == pytest.approx(
        before["metrics"]["accuracy"]["value"]
        - before["baselines"]["random_kernels"]["accuracy"]["value"]
    )
    cheap = workflows.evaluate("tuned", baselines="cheap", workspace=home)
    assert set(cheap["baselines"]) == {"majority", "prior"}
    assert cheap["settings"]["baselines"] == "cheap"
    assert any("--baselines cheap" in notice for notice in cheap["notices"])
    assert pl.read_parquet(run / "baselines.parquet").height
    with pytest.raises(UserError, match="unknown choice of --baselines"):
        workflows.evaluate("tuned", baselines="some", workspace=home)


@pytest.mark.slow
def test_the_page_of_a_recipe_that_fits_baselines_does_not_say_that_they_were_left_out(tmp_path):
    copy_workspace(tmp_path / "home")
    recipe = tmp_path / "cheap.toml"
    recipe.write_text(
        SMALL_RECIPE.replace("bootstrap = 20", 'bootstrap = 20\nbaselines = "cheap"')
        + "patch = 50\nlayers = 2\n"
    )
    done = pipeline.run(str(recipe), workspace=tmp_path / "home")
    assert done["exit_code"] == 0
    page = Path(done["report"]).read_text("utf-8")
    assert "random kernels" in page
    assert "--baselines cheap" not in page
    (scores,) = (tmp_path / "home" / "runs").glob("cheap-*/scores.json")
    assert "--baselines cheap" in scores.read_text("utf-8")


def test_the_strongest_baseline_is_named_where_a_weaker_one_equals_the_run():
    """The run names one class throughout, as the majority does; another baseline is right more
    often, but not significantly.
    """
    rng = np.random.default_rng(0)
    y = (rng.random(200) < 0.45).astype(int)
    p = np.eye(2)[np.where(rng.random(200) < 0.7, y, 1 - y)]
    groups, constant = np.repeat(np.arange(20), 10), np.tile([1.0, 0.0], (200, 1))
    scores = score(
        "classification",
        y,
        constant,
        groups,
        class_names=("no", "yes"),
        train_target=y,
        baselines={"random_kernels": p},
    )
    assert scores.baselines["majority"].metrics["accuracy"].value == pytest.approx((y == 0).mean())
    assert scores.baselines["random_kernels"].metrics["accuracy"].value > (y == 0).mean()
    assert judge_baselines(scores, "D").sentence.startswith(
        "No significant difference between this trained model and the random kernels baseline on D"
    )
