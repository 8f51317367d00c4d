"""Epochs from annotations of any length: runs, gaps, remainders, contradictions, and the reasons."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from samples import SAMPLES, require_sample

from bitimely_cli.main import main
from bitimely_core.cache import ingest
from bitimely_core.cache.source_use import measure_cover
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.tokens.epochs import Labels, list_epochs, list_points
from bitimely_core.types import Annotation
from bitimely_core.workflows.ingest import suggest_tokens

RATE = 10
STAGES: Labels = {"W": "W", "N1": "N1", "N2": "N2", "N3": "N3", "REM": "REM"}


def cut(notes: list[tuple[float, float, str]], seconds: float = 30.0) -> list[tuple[float, str]]:
    epochs = list_epochs([Annotation(*n) for n in notes], seconds, STAGES, {0.0}, Counter())
    return [(epoch.start, epoch.label) for epoch in epochs]


def count(notes: list[tuple[float, float, str]], seconds: float = 30.0) -> dict[str, int]:
    left_out: Counter[str] = Counter()
    list_epochs([Annotation(*n) for n in notes], seconds, STAGES, {0.0}, left_out)
    return dict(+left_out)


@pytest.mark.parametrize("step", [1.0, 2.0, 4.0, 5.0, 6.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0])
def test_the_length_of_an_annotation_does_not_matter(step: float) -> None:
    """120 s of each stage, written in pieces of `step` seconds."""
    order = ["W", "N1", "N2", "REM"]
    notes = [
        (120.0 * k + step * i, step, stage)
        for k, stage in enumerate(order)
        for i in range(int(120 / step))
    ]
    assert cut(notes) == [(120.0 * k + 30.0 * i, s) for k, s in enumerate(order) for i in range(4)]
    assert count(notes) == {}


@pytest.mark.parametrize("lack", [0.0, 0.001, 0.01, 0.1, 0.25])
def test_ends_that_are_short_and_clocks_that_drift(lack: float) -> None:
    notes = [(30.0 * i, 30.0 - lack, stage) for i, stage in enumerate(["W", "W", "N1", "N2", "N2"])]
    assert cut(notes) == [(30.0 * i, s) for i, s in enumerate(["W", "W", "N1", "N2", "N2"])]
    drifting = [(30.004 * i, 30.004, "N2") for i in range(200)]
    assert cut(drifting) == [(pytest.approx(30.004 * i), "N2") for i in range(200)]


def test_a_gap_ends_a_run_and_a_remainder_is_counted() -> None:
    assert cut([(0, 20, "N2"), (21, 20, "N2")]) == []
    assert count([(0, 20, "N2"), (21, 20, "N2")]) == {"mixed_epochs": 2}
    assert cut([(0, 20, "N2"), (20, 20, "N2"), (40, 20, "N3")]) == [(0.0, "N2")]
    assert count([(0, 20, "N2"), (20, 20, "N2"), (40, 20, "N3")]) == {"mixed_epochs": 2}


def test_long_stretches_are_cut_from_their_start_as_far_as_they_go() -> None:
    assert cut([(3.0, 599.0, "W")]) == [(3.0 + 30 * i, "W") for i in range(19)]
    assert cut([(0.0, 59.9, "W"), (59.9, 600.0, "N2")])[:2] == [(0.0, "W"), (59.9, "N2")]
    assert count([(3.0, 599.0, "W")]) == {}


def test_one_time_has_one_label() -> None:
    both = [(0, 30, "W"), (0, 30, "W"), (30, 30, "N1"), (30, 30, "W"), (60, 30, "N2")]
    assert [start for start, _ in cut(both)] == [0.0, 30.0, 60.0]
    assert count(both) == {"annotation_overlap": 1}
    shifted = [(0, 30, "W"), (15, 30, "N1"), (30, 30, "W"), (45, 30, "N1")]
    assert cut(shifted) == [(0.0, "W"), (30.0, "W")]
    assert count(shifted) == {"annotation_overlap": 2}


def test_points_of_one_sample_count_once() -> None:
    left_out: Counter[str] = Counter()
    points = [Annotation(*n) for n in [(1, 0, "N"), (1, 0, "N"), (1, 0, "V"), (1.01, 0, "N")]]
    starts = list_points(points, 0.01, None, left_out)
    assert [(p.start, p.label) for p in starts] == [(1, "N"), (1.01, "N")]
    assert +left_out == {"annotation_overlap": 1}


def test_covered_time_counts_once() -> None:
    notes = [(0, 10, "a"), (5, 10, "b"), (20, 0, "c"), (30, 5, "a"), (31, 1, "b")]
    marks = np.zeros(4000, dtype=bool)
    for onset, duration, _ in notes:
        marks[int(onset * 100) : int((onset + duration) * 100)] = True
    assert measure_cover([Annotation(*n) for n in notes]) == pytest.approx(marks.sum() / 100)


# --- from files


def write_night(path: Path, notes: list[tuple[float, float, str]], seconds: int = 240) -> None:
    channel = edf_header.EdfChannel("C4-M1", "uV", -200.0, 200.0, -2048, 2047, RATE)
    samples = np.arange(seconds * RATE).astype(np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    annotations = tuple(Annotation(*note) for note in notes)
    edf_writer.write_edf(path, (channel,), [samples], duration=1.0, notes=annotations)


def run(*words: object) -> int:
    return main([*map(str, words), "-w", "ws"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BITIMELY_WORKSPACE", raising=False)
    return tmp_path


def test_the_window_of_the_message_reads_what_was_scored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stages of 20 s that change each time: none of 30 s, and 12 of 20 s."""
    stages = [("W", "N1", "N2")[i % 3] for i in range(12)]
    notes = [(20.0 * i, 20.0, f"Sleep stage {stage}") for i, stage in enumerate(stages)]
    write_night(Path("raw/a.edf"), notes)
    assert run("ingest", "generic", "raw") == 0
    capsys.readouterr()
    assert run("tokenize", "generic/staging", "--json") == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["details"][0]["count"] == 12
    assert "annotations of 20 s: 12 windows of 30 s would hold two labels" in error["message"]
    window = error["message"].split("Give --window ")[1].split()[0]
    assert run("tokenize", "generic/staging", "--window", window) == 0
    index = pl.read_parquet("ws/tokens/generic-staging/index.parquet").sort("start")
    assert index["start"].to_list() == [20.0 * i for i in range(12)]
    assert index["label"].to_list() == stages


def test_other_texts_are_the_reason_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_night(Path("raw/a.edf"), [(0.0, 60.0, "apnoea"), (100.0, 20.0, "arousal")])
    Path("map.toml").write_text('[labels]\napnoea = "apnoea"\narousal = "arousal"\n')
    assert run("ingest", "generic", "raw", "--map", "map.toml") == 0
    capsys.readouterr()
    assert run("tokenize", "generic/staging") == 4
    said = capsys.readouterr().err
    assert "no annotation that lasts has a class" in said
    assert "'apnoea', 'arousal'" in said
    assert "one of W, N1, N2, N3, REM" in said


def test_recordings_without_a_label_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [(30.0 * i, 30.0, "Sleep stage W") for i in range(8)]
    write_night(Path("raw/a.edf"), stages)
    write_night(Path("raw/b.edf"), [])
    assert run("ingest", "generic", "raw") == 0
    said = capsys.readouterr().out
    assert "labels: 50% of the time has one, in 1 of 2 recordings" in said
    assert "subjects: unknown for 2 of 2" in said
    assert "next: bitimely tokenize generic/staging -w ws" in said
    assert run("tokenize", "generic/staging") == 0
    said = capsys.readouterr()
    assert "'b' has no annotation" in said.err
    assert "recordings: 1 of 2 have a window" in said.out
    assert "time: 50% of the recordings is in labelled windows" in said.out


def test_subjects_named_by_one_of_their_recordings_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("ann", "ann2"):
        write_night(Path(f"raw/{name}.edf"), [(0.0, 60.0, "Sleep stage W")])
    Path("map.toml").write_text('[[files]]\npattern = "*.edf"\nmatch = "(?P<subject>ann)2?"\n')
    assert run("ingest", "generic", "raw", "--map", "map.toml") == 0
    assert "subjects: unknown" not in capsys.readouterr().out


def test_the_summary_as_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    write_night(Path("raw/a.edf"), [(0.0, 90.0, "Sleep stage W"), (100.0, 1.0, "Bob")])
    Path("raw/notes.log").write_text("lights off\n")
    Path("raw/README.txt").write_text("about")
    Path("raw/more.csv").write_text("t,x\n0,1\n")
    assert run("ingest", "generic", "raw", "--json") == 0
    use = json.loads(capsys.readouterr().out)["use"]
    assert (use["recordings"], use["channels"]) == (1, {"C4-M1": 1})
    assert (use["seconds"], use["labelled_seconds"], use["unknown_texts"]) == (240.0, 90.0, 1)
    groups = {group["kind"]: group for group in use["files_left"]}
    assert groups.keys() == {".log", ".csv"}
    assert groups[".log"]["examples"] == ["notes.log"]
    assert groups[".csv"]["reason"] == "they need --map"
    assert run("tokenize", "generic/staging", "--json") == 0
    use = json.loads(capsys.readouterr().out)["use"]
    assert math.isclose(use["seconds_used"] / use["seconds"], 90 / 240)
    assert use["recordings_used"] == use["recordings"] == 1


def test_labels_that_nobody_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_night(Path("raw/a.edf"), [(0.0, 90.0, "apnoea")])
    Path("map.toml").write_text('[labels]\n"Apnea" = "apnea"\n')
    assert run("ingest", "generic", "raw", "--map", "map.toml") == 4
    assert "none of 1 annotation has a text of [labels]" in capsys.readouterr().err
    Path("table.csv").write_text("recording,label\nnight-x,ill\n")
    Path("raw/table.csv").write_text("recording,label\nnight-x,ill\n")
    Path("map2.toml").write_text('[table]\npath = "table.csv"\nfile = "recording"\nlabel = "label"')
    assert run("ingest", "generic", "raw", "--map", "map2.toml") == 4
    said = capsys.readouterr().err
    assert "'night-x'" in said
    assert "'a'" in said


@pytest.mark.slow
def test_a_published_set_calls_no_file_unread_that_it_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = require_sample(SAMPLES / "sleep-edf")  # with the tables of its subjects
    assert run("ingest", "sleep-edf", folder, "--json") in {0, 3}
    use = json.loads(capsys.readouterr().out)["use"]
    assert (use["files_left"], use["recordings"]) == ([], 1)


@pytest.mark.parametrize(
    ("numbers", "view"),
    [
        ([0, 1, 2, 3, 4], "annotations"),
        ([0.5, 1.0, 2.25], "values"),
        (list(range(50, 90)), "values"),
    ],
)
def test_whole_numbers_beside_epochs_are_classes_and_others_values(
    tmp_path: Path, numbers: list[float], view: str
) -> None:
    (tmp_path / "raw").mkdir()
    epochs = np.random.default_rng(0).normal(size=(80, 500, 1))
    labels = np.resize(numbers, 80)
    np.savez(tmp_path / "raw" / "a.npz", x=epochs, y=labels, fs=100.0)
    ingest("generic", tmp_path / "raw", tmp_path / "cache")
    assert suggest_tokens("generic", tmp_path / "cache") == f"generic/{view}"
