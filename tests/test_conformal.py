"""Conformal sets cover new subjects, pooled windows do not; the temperature is stored, exported and
applied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from test_predict import STAGES, call, find_night, home, scored  # noqa: F401  the fixtures

import bitimely
from bitimely_core.evaluate.conformal import (
    COVERAGE,
    find_threshold,
    measure_coverage,
    predict_sets,
    score_windows,
)
from bitimely_core.schemas.tokens import Calibration
from bitimely_core.store.records import write_results


def draw_cohort(rng: np.random.Generator, subjects: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of subjects whose errors differ in size; those with large errors have few windows, as
    poor recordings do.
    """
    size = np.exp(0.8 * rng.standard_normal(subjects))
    units = np.repeat(np.arange(subjects), np.clip(200 / size, 10, 1000).astype(int))
    return np.abs(rng.standard_normal(len(units))) * size[units], units


def test_coverage_over_subjects_is_90_percent_where_windows_alone_fail() -> None:
    rng, by_subject, by_window = np.random.default_rng(0), [], []
    for _ in range(200):
        scores, units = draw_cohort(rng, 60)
        new, whose = draw_cohort(rng, 20)
        ordered = np.sort(scores)
        # split conformal over windows
        pooled = ordered[int(np.ceil(COVERAGE * (len(scores) + 1))) - 1]
        for threshold, out in (
            (find_threshold(scores, units).value, by_subject),
            (pooled, by_window),
        ):
            out.append(np.mean(list(measure_coverage(new <= threshold, whose).values())))
    assert 0.88 <= np.mean(by_subject) <= 0.92
    assert np.mean(by_window) < 0.85


def test_windows_of_one_person_are_units_of_their_own() -> None:
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(500):
        scores = rng.exponential(size=101)
        threshold = find_threshold(scores[:100], None).value
        assert threshold == np.sort(scores[:100])[90]  # ceil(0.9 * 101) = 91st
        covered.append(scores[100] <= threshold)
    assert 0.87 < np.mean(covered) < 0.93


def test_too_few_subjects_give_sets_that_hold_everything_and_the_reason() -> None:
    found = find_threshold(np.ones(800), np.repeat(np.arange(8), 100))
    assert found.value is None
    assert "8 calibration subjects, at least 9" in str(found.reason)
    assert predict_sets(np.array([[0.9, 0.1]]), None).all()
    assert find_threshold(np.arange(90.0), np.repeat(np.arange(9), 10)).value == 89.0
    # the sum of 90,000 equal shares falls short of 0.9 by more than the tolerance
    assert find_threshold(np.arange(9e4), np.repeat(np.arange(9), 10_000)).value == 9e4 - 1


def test_scores_are_of_the_true_class_and_sets_hold_what_scores_less() -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
    assert score_windows("classification", p, np.array([0, 2])) == pytest.approx([0.3, 0.75])
    assert predict_sets(p, 0.7).tolist() == [[True, False, False], [True, True, False]]
    assert score_windows("regression", np.array([1.0, 5.0]), np.array([2.0, 2.0])).tolist() == [
        1.0,
        3.0,
    ]


@pytest.mark.slow
def test_the_temperature_is_stored_exported_and_applied(
    home: Path,  # noqa: F811
    scored: pl.DataFrame,  # noqa: F811
    tmp_path: Path,
) -> None:
    night, run = find_night(home, scored), home / "ws" / "runs" / "stager"
    assert call(home, [night], tmp_path / "out") == 0
    stored = Calibration.load(run / "calibration.json")
    assert Calibration.load(home / "model" / "calibration.json") == stored
    frame = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    p = frame.select([f"p_{name}" for name in STAGES]).to_numpy().astype(np.float64)
    assert stored.temperature is None  # too few subjects for one, too
    assert frame["confidence"].to_numpy() == pytest.approx(p.max(1), abs=1e-6)
    copy = tmp_path / "ws" / "runs" / "stager"
    shutil.copytree(run, copy)
    tempered = stored.model_copy(update={"temperature": 2.0})
    write_results(copy, {"calibration.json": tempered.encode()})
    made = bitimely.predict(str(copy), [night], out=tmp_path / "hot", workspace=home / "ws")
    assert made["exit_code"] == 0
    powers = p ** (1 / 2)  # a softmax of logits over the temperature
    expected = (powers / powers.sum(1, keepdims=True)).max(1)
    hot = pl.read_parquet(tmp_path / "hot" / "predictions.parquet")["confidence"].to_numpy()
    assert hot == pytest.approx(expected, abs=1e-6)
    validation = bitimely.Run.open("stager", home / "ws").windows()["validation"]
    assert stored.units == len(set(validation.subjects()))
    assert stored.windows == len(validation)
    assert stored.threshold is None  # too few subjects, and the page says so
    assert "at least 9 required" in (tmp_path / "out" / night.stem / "report.html").read_text()


@pytest.mark.slow
def test_a_person_s_own_labelled_night_calibrates(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    night = find_night(home, scored)
    own = tmp_path / "own"
    (own / "sub-1").mkdir(parents=True)
    shutil.copy(night, own / "sub-1" / "sub-1_task-sleep_eeg.edf")
    (own / "dataset_description.json").write_text("{}")
    stages = ["W"] * 6 + ["N1"] * 4 + ["N2"] * 10
    rows = [f"{30 * i}\t30\t{name}" for i, name in enumerate(stages)]
    (own / "sub-1" / "sub-1_task-sleep_events.tsv").write_text(
        "\n".join(["onset\tduration\ttrial_type", *rows]) + "\n"
    )
    assert call(home, [night], tmp_path / "out", "--calibrate-on", str(own)) == 0
    frame = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    sets = [text.split("|") for text in frame["set"]]
    held = [name in chosen for name, chosen in zip(stages, sets, strict=True)]
    assert np.mean(held) >= COVERAGE  # on the windows that it was fitted on
    page = json.loads((tmp_path / "out" / night.stem / "summary.json").read_text())["report"][
        "facts"
    ]["Confidence"]
    assert "20 windows" in page
    (tmp_path / "bare").mkdir()  # without the hypnogram that lies beside it
    shutil.copy(night, tmp_path / "bare")
    bare = str(tmp_path / "bare" / night.name)
    assert call(home, [night], tmp_path / "none", "--calibrate-on", bare) == 4
    assert "unmatched_labels" in capsys.readouterr().err
