"""The loop of labelling: train, predict, correct what is predicted, ingest, train on more."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyedflib
import pyedflib.highlevel
import pytest
from test_generic import recordings

from bitimely_cli.main import main

pytestmark = pytest.mark.slow

RATE = 32  # Hz
EPOCHS = 24  # of 30 s a night
HERTZ = {"W": 10.0, "N2": 4.0, "N3": 1.0}  # of the wave of each stage
TEXTS = {"W": "Sleep stage W", "N2": "Sleep stage N2", "N3": "Sleep stage N3"}
REM = "Sleep stage R"  # of the first epoch of a new night: nothing taught it
LABELLED, NEW = ("a", "b", "c", "d", "e", "f"), ("g", "h")


def draw_stages(name: str) -> list[str]:
    """The true stages of a night, in runs."""
    rng = np.random.default_rng([*name.encode()])
    return [str(stage) for stage in np.repeat(rng.choice(list(HERTZ), EPOCHS // 2), 2)]


def write_night(path: Path, stages: list[str]) -> None:
    """One channel with the wave of each stage in noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = np.arange(30 * RATE) / RATE
    rng = np.random.default_rng([*path.name.encode()])
    wave = np.concatenate([np.sin(2 * np.pi * HERTZ[stage] * times) for stage in stages])
    header = pyedflib.highlevel.make_signal_header(
        "EEG C4", dimension="uV", sample_frequency=RATE, physical_min=-200, physical_max=200
    )
    with pyedflib.EdfWriter(str(path), 1, file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
        writer.setStartdatetime(datetime(2020, 3, 1, 23, 0, 0))
        writer.setSignalHeaders([header])
        writer.writeSamples([50 * wave + rng.normal(0, 10, len(wave))])


def write_hypnogram(path: Path, notes: list[tuple[float, float, str]]) -> None:
    """EDF+ annotations without signals, as an editor writes them."""
    with pyedflib.EdfWriter(str(path), 0, file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
        writer.setStartdatetime(datetime(2024, 1, 1, 12, 0, 0))  # of the day of the correction
        for note in notes:
            writer.writeAnnotation(*note)


def read_hypnogram(path: Path) -> list[tuple[float, float, str]]:
    with pyedflib.EdfReader(str(path)) as reader:
        return list(zip(*reader.readAnnotations(), strict=True))


def expand(notes: list[tuple[float, float, str]]) -> list[str]:
    """The text of each epoch."""
    return [text for _, length, text in notes for _ in range(round(float(length) / 30))]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What a verb prints with --json."""
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


def test_corrected_predictions_are_labels_of_the_next_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "raw"
    for name in LABELLED:
        stages = draw_stages(name)
        write_night(raw / f"{name}.edf", stages)
        notes = [(30.0 * i, 30.0, TEXTS[stage]) for i, stage in enumerate(stages)]
        write_hypnogram(raw / f"{name}-hypnogram.edf", notes)
    for name in NEW:
        write_night(tmp_path / "new" / f"{name}.edf", draw_stages(name))
    training = ("--data", "generic/staging", "--steps", "40", "--batch-size", "16")
    run(capsys, "ingest", "generic", raw)
    run(capsys, "train", "resnet", *training, "--run", "first")
    run(capsys, "predict", "first", *(f"new/{name}.edf" for name in NEW), "--out", "out")

    truth = {name: [REM, *(TEXTS[stage] for stage in draw_stages(name)[1:])] for name in NEW}
    for name in NEW:
        made = tmp_path / "out" / name / f"{name}-hypnogram.edf"
        texts = expand(read_hypnogram(made))
        right = sum(a == b for a, b in zip(texts, truth[name], strict=True))
        assert EPOCHS - 3 <= right < EPOCHS  # a class that was never trained is corrected by hand
        corrected = [(30.0 * i, 30.0, text) for i, text in enumerate(truth[name])]
        write_hypnogram(raw / made.name, corrected)
        (tmp_path / "new" / f"{name}.edf").rename(raw / f"{name}.edf")

    report = run(capsys, "ingest", "generic", raw)
    assert len(report["units"]) == len(LABELLED) + len(NEW)
    records = recordings(tmp_path / "workspace" / "cache" / "generic")
    for name in NEW:
        notes = [(note.onset, note.duration, note.label) for note in records[name].annotations]
        words = [text.removeprefix("Sleep stage ") for text in truth[name]]
        assert expand(notes) == ["REM", *words[1:]]
    said = run(capsys, "train", "resnet", *training, "--run", "early", "--dry-run")
    assert "tokenize again" in json.dumps(said)  # the windows are still those of the first nights
    run(capsys, "tokenize", "generic/staging")
    second = run(capsys, "train", "resnet", *training, "--run", "second")
    assert "tokenize again" not in json.dumps(second)
    (folder,) = tmp_path.glob("workspace/tokens/*")
    index = pl.read_parquet(folder / "index.parquet")
    counts = {name: index.filter(pl.col("recording_id") == name).height for name in NEW}
    assert counts == dict.fromkeys(NEW, EPOCHS)
    assert index.filter(pl.col("label") == "REM")["recording_id"].sort().to_list() == list(NEW)
    trained = json.loads((tmp_path / "workspace/runs/second/run.json").read_text())
    audit = trained["data"][0]["audit"]
    assert sum(split["windows"] for split in audit.values()) == index.height
