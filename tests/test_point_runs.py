"""Runs on windows around points, such as beats, applied to new recordings: where windows lie, that
they give what `evaluate` gives, and the annotations that are written.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import small

import bitimely
from bitimely_cli.main import main
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.types import Annotation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import wfdb

pytestmark = pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")
RATE, SECONDS, RECORDS = 100, 20, 12


def write_record(folder: Path, name: str, seed: int) -> np.ndarray:
    """A record with a beat about every second, N narrow and V wide; the samples of the beats."""
    rng = np.random.default_rng(seed)
    beats = np.cumsum(rng.integers(80, 130, 17)) - 60
    kinds = ["V" if k % 3 == 0 else "N" for k in range(len(beats))]
    t = np.arange(SECONDS * RATE)
    widths = [8 if kind == "V" else 2 for kind in kinds]
    values = sum(
        np.exp(-0.5 * ((t - beat) / width) ** 2) for beat, width in zip(beats, widths, strict=True)
    )
    digital = np.rint(1000 * (values + 0.05 * rng.standard_normal(len(t)))).astype("<i2")
    (folder / f"{name}.dat").write_bytes(digital.tobytes())
    line = f"{name}.dat 16 1000/mV 16 0 {digital[0]} {digital.sum() & 0xFFFF} 0 II"
    (folder / f"{name}.hea").write_text(f"{name} 1 {RATE} {len(t)}\n{line}\n")
    wfdb.wrann(name, "atr", beats, symbol=kinds, write_dir=str(folder))
    return beats


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on beats, evaluated, and its records in `raw`."""
    root = tmp_path_factory.mktemp("points")
    (root / "raw").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(RECORDS):
            write_record(root / "raw", f"r{number:02d}", number)
        small_model = ["--preset", "tiny", "--set", "model.tokenizer=patch"]
        small_model += ["--set", "model.patch=10", *small.RETENTION]
        data = ["--data", "wfdb/points", "--batch-size", "16"]
        for words in (
            ["ingest", "wfdb", str(root / "raw")],
            ["tokenize", "wfdb/points", "--window", "60"],
            ["pretrain", *small_model, *data, "--steps", "2", "--run", "base"],
            ["finetune", "base", *data, "--steps", "2", "--run", "beats"],
            ["evaluate", "beats", "--bootstrap", "0"],
        ):
            assert main([*words, "-w", str(root / "ws")]) == 0
    return root


@pytest.fixture
def scored(home: Path) -> pl.DataFrame:
    """What `evaluate` gave for one recording."""
    frame = pl.read_parquet(home / "ws" / "runs" / "beats" / "predictions.parquet")
    first = frame["recording_id"][0]
    return frame.filter(frame["recording_id"] == first).sort("start")


def predict(home: Path, out: Path, *words: object) -> int:
    options = ["--out", str(out), "-w", str(home / "ws")]
    return main(["predict", "beats", *map(str, words), *options])


def require_equal(scored: pl.DataFrame, predicted: pl.DataFrame) -> None:
    """The same windows, with the same bits."""
    assert scored["start"].to_list() == predicted["start"].to_list()
    for name in ("p_N", "p_V"):
        assert np.array_equal(scored[name].to_numpy(), predicted[name].to_numpy())


@pytest.mark.parametrize("way", ["beside", "csv", "lines", "wfdb", "edf", "named"])
def test_windows_around_points_are_those_of_evaluate(
    home: Path, scored: pl.DataFrame, tmp_path: Path, way: str
) -> None:
    name = scored["recording_id"][0]
    seconds = (scored["start"].to_numpy() + 0.3).round(6)
    record = home / "raw" / f"{name}.hea"
    options: list[object] = []
    if way != "beside":
        for ending in ("hea", "dat"):
            shutil.copy(home / "raw" / f"{name}.{ending}", tmp_path)
        record = tmp_path / f"{name}.hea"
        options = ["--at", write_times(tmp_path, way, seconds, name)]
    assert predict(home, tmp_path / "out", record, *options) == 0
    require_equal(scored, pl.read_parquet(tmp_path / "out" / "predictions.parquet"))
    assert f"one around each of {len(scored)} times" in (
        tmp_path / "out" / name / "report.html"
    ).read_text("utf-8")
    drawn = pl.read_parquet(tmp_path / "out" / name / "hypnogram.parquet")
    assert np.allclose(np.sort(drawn["time"].to_numpy()), np.sort(seconds))
    frame = bitimely.from_pretrained("beats", workspace=home / "ws").predict(
        record, times=options[1] if options else None
    )
    require_equal(scored, frame)


def test_a_page_of_scores_shows_true_and_predicted_beats(home: Path) -> None:
    run = home / "ws" / "runs" / "beats"
    shown = pl.read_parquet(run / "points.parquet")
    stored = pl.read_parquet(run / "predictions.parquet")
    names = ["N", "V"]
    kinds = pl.concat_list("p_N", "p_V").list.arg_max()
    found = stored.select(
        pl.col("start") + 0.3,
        true=pl.col("target").cast(int).replace_strict(dict(enumerate(names)), default=None),
        predicted=kinds.replace_strict(dict(enumerate(names)), default=None),
    ).sort("start")
    first = int((found["start"] - shown["seconds"][0]).abs().arg_min() or 0)
    assert 2 <= len(shown) <= 12
    assert shown["true"].n_unique() == 2
    same = found[first : first + len(shown)]
    assert np.allclose(shown["seconds"], same["start"])
    for column in ("true", "predicted"):
        assert shown[column].to_list() == same[column].to_list()
    report = (run / "report.html").read_text("utf-8")
    assert "Beats: true and predicted" in report
    assert "Detection of" not in report


def write_times(folder: Path, way: str, seconds: np.ndarray, name: str) -> Path:
    """A file with the times, in one of the forms that people have."""
    rows = seconds.tolist()
    if way == "wfdb":
        samples = np.rint(seconds * RATE).astype(int)
        symbols = ["N"] * len(samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wfdb.wrann("beats", "qrs", samples, symbol=symbols, write_dir=str(folder))
        return folder / "beats.qrs"
    if way == "edf":
        channel = edf_header.EdfChannel("EEG Cz", "uV", -200.0, 200.0, -2048, 2047, 100)
        values = [np.zeros(SECONDS * 100, np.int16)]
        notes = tuple(Annotation(t, 0.0, "beat") for t in rows)
        edf_writer.write_edf(folder / "t.edf", (channel,), values, duration=1.0, notes=notes)
        return folder / "t.edf"
    texts = {
        "csv": "number;Onset;kind\n" + "".join(f"{k};{t};x\n" for k, t in enumerate(rows)),
        "lines": "".join(f"{t}\n" for t in rows),
        "named": "recording,time\nother,1.0\n" + "".join(f"{name},{t}\n" for t in rows),
    }
    path = folder / ("times.txt" if way == "lines" else "times.csv")
    path.write_text(texts[way])
    return path


def test_beats_are_written_as_annotations(home: Path, scored: pl.DataFrame, tmp_path: Path) -> None:
    name = scored["recording_id"][0]
    assert predict(home, tmp_path / "out", home / "raw" / f"{name}.hea") == 0
    folder = tmp_path / "out" / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = wfdb.rdann(str(folder / name), "bta")
        truth = wfdb.rdann(str(home / "raw" / name), "atr")
    assert set(written.sample) <= set(truth.sample)
    assert written.symbol == pl.read_parquet(folder / "predictions.parquet")["class"].to_list()
    assert written.fs == RATE
    events = pl.read_csv(folder / f"{name}_events.tsv", separator="\t")
    assert np.array_equal(np.rint(events["onset"].to_numpy() * RATE), written.sample)
    assert set(events["duration"]) == {0.0}


def test_without_times_windows_follow_each_other_and_it_is_said(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = scored["recording_id"][0]
    for ending in ("hea", "dat"):
        shutil.copy(home / "raw" / f"{name}.{ending}", tmp_path)
    assert predict(home, tmp_path / "out", tmp_path / f"{name}.hea") == 0
    assert "one every 0.6 s, for no time is known" in capsys.readouterr().out
    frame = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert np.allclose(frame["start"], np.arange(33) * 0.6, atol=1e-6)


def test_times_must_be_of_one_recording_and_inside_of_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = sorted((home / "raw").glob("*.hea"))[:2]
    times = tmp_path / "t.txt"
    times.write_text("1.5\n3\n99\n")
    assert predict(home, tmp_path / "a", *records, "--at", times) == 2
    assert "expected a column `recording`" in capsys.readouterr().err
    assert predict(home, tmp_path / "b", records[0], "--at", times) == 0
    assert "without a full window at the edges" in capsys.readouterr().err
    frame = pl.read_parquet(tmp_path / "b" / "predictions.parquet")
    assert frame["start"].round(6).to_list() == [1.2, 2.7]
    times.write_text("soon\n")
    assert predict(home, tmp_path / "c", records[0], "--at", times) == 4
    times.write_text("recording,time\nr99,2.0\n")
    assert predict(home, tmp_path / "d", records[0], "--at", times, "--json") == 4
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unmatched_labels"
