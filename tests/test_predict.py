"""`predict`: new recordings give the bits of `evaluate`, labels stay closed, faults are named, and
every file opens in other tools.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyedflib
import pytest
import scipy.io
import small

import bitimely
from bitimely_cli.main import main
from bitimely_core import workflows
from bitimely_core.datasets import synthetic
from bitimely_core.errors import UserError
from bitimely_core.evaluate.endpoints import compute_endpoints, place_epochs
from bitimely_core.formats import edf, edf_header, edf_writer
from bitimely_core.recordings.mapping import FileRule
from bitimely_core.schemas.tokens import ChannelStatistics, Preprocessing, WindowOptions
from bitimely_core.tokens.channel_maps import ChannelMap, parse_map
from bitimely_core.tokens.new_recordings import find_recordings
from bitimely_core.tokens.unlabelled import UnlabelledWindows, cut_unlabelled
from bitimely_core.types import Record, Signal

SMALL = [
    "--set",
    "model.tokenizer=patch",
    "--set",
    "model.patch=100",
    *small.RETENTION,
    "--batch-size",
    "16",
    "--steps",
    "2",
]
STAGES = ["W", "N1", "N2", "N3", "REM"]
SUBJECTS = 6
opened: list[str] | None = None


def record_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and opened is not None:
        opened.append(str(arguments[0]))


sys.addaudithook(record_open)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a stager of six synthetic subjects, evaluated and exported, and their files
    in `raw`.
    """
    root = tmp_path_factory.mktemp("predict")
    nights = root / "raw" / "sleep-cassette"
    nights.mkdir(parents=True)
    for subject in range(SUBJECTS):
        for end, content in zip(
            ("E0-PSG", "EC-Hypnogram"), synthetic.encode_night("small", 0, subject, 1), strict=True
        ):
            (nights / f"SC4{subject:02d}1{end}.edf").write_bytes(content)
    work = ["-w", str(root / "ws")]
    assert main(["ingest", "sleep-edf", str(root / "raw"), *work]) in {0, 3}
    assert (
        main(
            [
                "pretrain",
                "--preset",
                "tiny",
                "--data",
                "sleep-edf/staging",
                "--run",
                "base",
                *SMALL,
                *work,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "finetune",
                "base",
                "--data",
                "sleep-edf/staging",
                "--steps",
                "3",
                "--run",
                "stager",
                *work,
            ]
        )
        == 0
    )
    assert main(["evaluate", "stager", "--bootstrap", "0", *work]) == 0
    assert main(["export", "stager", "--out", str(root / "model"), *work]) == 0
    return root


@pytest.fixture(scope="module")
def scored(home: Path) -> pl.DataFrame:
    """Predictions of `evaluate`."""
    return pl.read_parquet(home / "ws" / "runs" / "stager" / "predictions.parquet")


def call(home: Path, files: Sequence[Path], out: Path, *options: str, run: str = "stager") -> int:
    return main(
        ["predict", run, *map(str, files), "--out", str(out), *options, "-w", str(home / "ws")]
    )


def find_night(home: Path, scored: pl.DataFrame) -> Path:
    """The signals of the first scored recording."""
    return next((home / "raw").rglob(f"{scored['recording_id'][0]}*PSG.edf"))


def count_equal(scored: pl.DataFrame, found: pl.DataFrame) -> int:
    """Windows with the same start in both, all of them with equal bits."""
    both = scored.join(found, on="start", suffix="_new")
    for name in STAGES:
        assert np.array_equal(
            both[f"p_{name}"].to_numpy().view(np.int32),
            both[f"p_{name}_new"].to_numpy().view(np.int32),
        ), name
    return len(both)


@pytest.mark.slow
def test_probabilities_are_those_of_evaluate_bit_for_bit(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    night = find_night(home, scored)
    own = scored.filter(pl.col("recording_id") == scored["recording_id"][0])
    assert call(home, [night], tmp_path / "out") == 0
    found = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert len(found) == 20
    assert count_equal(own, found) == len(own) > 5
    assert (
        main(
            [
                "predict",
                str(home / "model"),
                str(night),
                "--out",
                str(tmp_path / "exported"),
                "-w",
                str(tmp_path / "nowhere"),
            ]
        )
        == 0
    )
    assert pl.read_parquet(tmp_path / "exported" / "predictions.parquet").equals(found)
    assert bitimely.from_pretrained(home / "model").predict(night).equals(found)
    assert call(home, [home / "ws" / "cache" / "sleep-edf"], tmp_path / "cached") == 0
    cached = pl.read_parquet(tmp_path / "cached" / "predictions.parquet")
    assert call(home, [home / "ws" / "cache" / "sleep-edf"], tmp_path / "ahead", "--jobs", "3") == 0
    assert pl.read_parquet(tmp_path / "ahead" / "predictions.parquet").equals(cached)
    assert cached["recording_id"].n_unique() == SUBJECTS
    assert count_equal(own, cached.filter(pl.col("recording_id") == own["recording_id"][0])) == len(
        own
    )


def test_recordings_of_the_training_are_named(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another name as well; those that are held out are not named."""
    held_out = find_night(home, scored)
    index = pl.read_parquet(home / "ws" / "tokens" / "sleep-edf-staging" / "index.parquet")
    trained = index.filter(pl.col("split") == "train")["recording_id"][0]
    night = shutil.copy(next((home / "raw").rglob(f"{trained}*PSG.edf")), tmp_path / "night.edf")
    assert call(home, [held_out, night], tmp_path / "out", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["recordings"]
    assert [row["trained_on"] for row in rows] == [False, True]
    assert "trained on" in rows[1]["messages"][0]
    assert "trained on 1 of 2 recordings" in (tmp_path / "out" / "report.html").read_text()
    assert "trained on" in (tmp_path / "out" / "night" / "report.html").read_text()


def test_a_row_does_not_depend_on_the_rows_beside_it(home: Path) -> None:
    from bitimely_core.evaluate.prediction import Computation, predict

    opened_run = bitimely.Run.open("stager", home / "ws")
    windows, head = opened_run.windows(), opened_run.head()
    every = predict(head, windows, Computation(16))
    keep = np.random.default_rng(0).random(len(windows)) < 0.3
    assert np.array_equal(predict(head, windows.subset(keep), Computation(16)), every[keep])


def test_labels_beside_the_recordings_are_never_opened(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    global opened
    night, folder = find_night(home, scored), tmp_path / "bids"
    (folder / "sub-01").mkdir(parents=True)
    shutil.copy(night, folder / "sub-01" / "sub-01_task-sleep_eeg.edf")
    (folder / "dataset_description.json").write_text("{}")
    for name in (
        "sub-01_task-sleep_events.tsv",
        "sub-01_task-sleep_eeg-Hypnogram.edf",
        "sub-01_task-sleep_eeg.atr",
        "sub-01.xml",
    ):
        (folder / "sub-01" / name).write_bytes(b"\xff" * 50)
    opened = []
    try:
        assert call(home, [folder], tmp_path / "out") == 0
    finally:
        seen, opened = opened, None
    read = {Path(path).name for path in seen if str(folder) in path}
    assert read == {"sub-01_task-sleep_eeg.edf"}
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == [
        "sub-01-sub-01_task-sleep_eeg"
    ]


def test_one_bad_file_is_named_and_the_others_go_on(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, empty, night = tmp_path / "bad.edf", tmp_path / "empty.bdf", find_night(home, scored)
    bad.write_bytes(b"<html>")
    empty.write_bytes(b"")
    assert call(home, [bad, night, empty, tmp_path / "absent.edf"], tmp_path / "out", "--json") == 3
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["status"] for row in found["recordings"]] == [
        "refused",
        "predicted",
        "refused",
        "refused",
    ]
    assert all(name in err for name in ("bad.edf", "empty.bdf", "absent.edf"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert f'href="{found["recordings"][1]["recording"]}/report.html"' in page
    assert call(home, [bad, empty], tmp_path / "none") == 4
    assert call(home, [bad, tmp_path / "absent.edf"], tmp_path / "none") == 4
    assert not (tmp_path / "none").exists()
    assert call(home, [tmp_path / "absent.edf"], tmp_path / "none") == 2


def test_a_defect_of_the_model_is_not_one_of_the_recordings(
    home: Path, scored: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr(
        importlib.import_module("bitimely_core.workflows.predict"), "predict_windows", fail
    )
    with pytest.raises(ZeroDivisionError, match="in the model"):
        workflows.predict(
            "stager", [find_night(home, scored)], out=tmp_path / "out", workspace=home / "ws"
        )


def rewrite(
    night: Path,
    path: Path,
    change: Callable[[edf_header.EdfChannel], edf_header.EdfChannel],
    patient: str = "X X X X",
    factor: int = 1,
) -> Path:
    """The first channel of `night` with another header; `factor`: samples repeated, at a rate that
    many times as high.
    """
    recording = edf.read_recording(night)
    header = recording.header
    channel = header.channels[0]
    samples = np.repeat(recording.signals[0].samples, factor)
    new = change(channel._replace(samples=channel.samples * factor))
    edf_writer.write_edf(path, [new], [samples], duration=header.duration, patient=patient)
    return path


def test_another_name_needs_a_map_and_the_nearest_is_named(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night = find_night(home, scored)
    other = rewrite(night, tmp_path / "other.edf", lambda c: c._replace(label="Fpz-Cz"))
    assert call(home, [other], tmp_path / "out") == 4
    err = capsys.readouterr().err
    assert "missing_channel" in err
    assert "EEG Fpz-Cz=Fpz-Cz" in err
    wanted = bitimely.from_pretrained("stager", workspace=home / "ws").predict(night)
    toml = tmp_path / "map.toml"
    toml.write_text('[channels]\n"EEG Fpz-Cz" = ["Cz", "Fpz-Cz"]\n')
    for item in ("EEG Fpz-Cz=Fpz-Cz", str(toml)):
        assert call(home, [other], tmp_path / "mapped", "--map", item) == 0
        found = pl.read_parquet(tmp_path / "mapped" / "predictions.parquet")
        assert found.drop("recording_id").equals(wanted.drop("recording_id"))
    page = (tmp_path / "mapped" / "other" / "report.html").read_text()
    assert ">Fpz-Cz (Hz)<" in page
    assert "EEG Fpz-Cz (Hz)" not in page
    assert call(home, [other], tmp_path / "wrong", "--map", "EEG Fpz=Fpz-Cz") == 2
    assert "EEG Fpz-Cz" in capsys.readouterr().err


def test_a_recording_in_memory_is_predicted_as_its_file(home: Path, scored: pl.DataFrame) -> None:
    import mne
    import pandas as pd

    night = find_night(home, scored)
    model = bitimely.from_pretrained("stager", workspace=home / "ws")
    wanted = model.predict(night)
    raw = mne.io.read_raw_edf(night, verbose="ERROR")
    found = model.predict([night, raw])
    assert found["recording_id"].n_unique() == 2
    for own in found.partition_by("recording_id", maintain_order=True):
        for stage in STAGES:
            assert np.allclose(own[f"p_{stage}"], wanted[f"p_{stage}"], atol=1e-4), stage
    with pytest.raises(UserError, match=r"ndarray in the place of a recording.*mne.io.RawArray"):
        model.predict(raw.get_data())
    table = {"time": [0.0, 0.01], "EEG Fpz-Cz": [1.0, 2.0]}
    epochs = mne.make_fixed_length_epochs(raw, 30, verbose="ERROR")
    for values in (pd.DataFrame(table), pl.DataFrame(table), epochs, None):
        with pytest.raises(UserError, match=f"{type(values).__name__} in the place of a rec"):
            model.predict(values)
    files = pd.Series([str(night)])
    assert model.predict(files).equals(wanted)


def test_units_and_rates_are_converted_and_said_or_refused(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night = find_night(home, scored)
    model = bitimely.from_pretrained("stager", workspace=home / "ws")
    wanted = model.predict(night)["p_N2"].to_numpy()
    milli = rewrite(
        night,
        tmp_path / "milli.edf",
        lambda c: c._replace(unit="mV", physical_min=-0.25, physical_max=0.25),
    )
    assert call(home, [milli], tmp_path / "out") == 0
    assert "converted to 'uV'" in capsys.readouterr().err
    assert np.allclose(
        pl.read_parquet(tmp_path / "out" / "predictions.parquet")["p_N2"].to_numpy(),
        wanted,
        atol=1e-5,
    )
    fast = rewrite(night, tmp_path / "fast.edf", lambda c: c, factor=2)
    assert call(home, [fast, fast], tmp_path / "two") == 0
    err = capsys.readouterr().err
    assert err.count("resampled") == 1
    assert "200 Hz (and in 1 more recording)" in err
    assert call(home, [fast], tmp_path / "out") == 0
    assert np.allclose(
        pl.read_parquet(tmp_path / "out" / "predictions.parquet")["p_N2"].to_numpy(),
        wanted,
        atol=0.02,
    )
    warm = rewrite(night, tmp_path / "warm.edf", lambda c: c._replace(unit="degC"))
    assert call(home, [warm], tmp_path / "out") == 4
    assert "error[unit]" in capsys.readouterr().err
    short = tmp_path / "short.edf"
    edf_writer.write_edf(
        short,
        [edf_header.EdfChannel("EEG Fpz-Cz", "uV", -250.0, 250.0, -2048, 2047, 100)],
        [np.zeros(1000, np.int16)],
    )
    assert call(home, [short], tmp_path / "out") == 4
    assert "error[length]" in capsys.readouterr().err


def find_signal(path: Path, channel: str) -> Signal:
    return next(s for s in edf.read_recording(path).signals if s.channel == channel)


def test_tables_and_arrays_need_a_rate(
    home: Path, scored: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night = find_night(home, scored)
    signal = find_signal(night, "EEG Fpz-Cz")
    values = signal.samples * signal.scale + signal.offset
    np.save(tmp_path / "night.npy", values)
    (tmp_path / "table.csv").write_text(
        "EEG Fpz-Cz\n" + "\n".join(map(str, values.tolist())) + "\n"
    )
    np.save(tmp_path / "volts.npy", values * 1e-6)  # which its values show
    files = [tmp_path / "night.npy", tmp_path / "table.csv", tmp_path / "volts.npy"]
    assert call(home, files, tmp_path / "out") == 4
    assert capsys.readouterr().err.count("no sampling rate") == 3
    (tmp_path / "map.toml").write_text('rate = 100\n[channels]\n"EEG Fpz-Cz" = "channel 1"\n')
    assert call(home, files, tmp_path / "out", "--map", str(tmp_path / "map.toml")) == 0
    said = capsys.readouterr().err
    units = {line.rpartition(" ")[2] for line in said.splitlines() if "states no unit" in line}
    assert units == {"'uV'.", "'V'."}
    wanted = (
        bitimely.from_pretrained("stager", workspace=home / "ws").predict(night)["p_W"].to_numpy()
    )
    found = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    for _, own in found.group_by("recording_id"):
        assert np.allclose(own["p_W"].to_numpy(), wanted, atol=1e-4)


def test_windows_without_a_sample_have_no_prediction() -> None:
    options = WindowOptions.model_construct(
        dataset="mine",
        view="",
        task="regression",
        normalise="none",
        split="subject",
        seed=0,
        classes=(),
        decimate=(),
        hold=(),
        channels=("x",),
        rate=10.0,
        window=20,
        stride=20,
        resample=False,
        labels=None,
        epoch=None,
        trim=None,
        target=None,
        overlap=None,
        bandpass=None,
        notch=None,
        resampling="two-sided",
        filtering="zero-phase",
        clock=None,
        grid=False,
        points=False,
    )
    statistics = (ChannelStatistics.model_construct(mean=0.0, std=1.0),)
    reads = Preprocessing.model_construct(
        options=options, units=("uV",), class_names=(), missing=True, channels=statistics
    )
    samples = np.arange(100, dtype=np.float32)
    samples[15:70] = np.nan  # of the windows of 20 samples the second and the third are empty

    def cut(x: np.ndarray) -> UnlabelledWindows:
        return cut_unlabelled(
            Record(recording_id="night", subject_id="p", signals=[Signal("x", 10.0, "uV", x)]),
            "night",
            reads,
        )

    found = cut(samples)
    assert found.windows.index["start"].to_list() == [0.0, 6.0, 8.0]
    assert np.array_equal(
        np.concatenate([shard[..., 0] for shard in found.windows.shards])[2], samples[80:]
    )
    assert "2 windows have no sample" in found.findings[-1].message
    with pytest.raises(UserError, match="none of 5 windows has a sample") as caught:
        cut(np.full(100, np.nan, np.float32))
    assert (caught.value.code, caught.value.exit_code) == ("missing_values", 4)


def test_a_hypnogram_opens_in_mne_and_events_are_a_bids_derivative(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    import mne

    night = find_night(home, scored)
    assert call(home, [night], tmp_path) == 0
    folder, name = tmp_path / night.stem, night.stem
    frame = pl.read_parquet(folder / "predictions.parquet")
    probabilities = frame.select([f"p_{stage}" for stage in STAGES]).to_numpy()
    assert frame["prediction"].to_list() == probabilities.argmax(1).tolist()
    assert frame["class"].to_list() == [STAGES[k] for k in frame["prediction"]]
    notes = mne.read_annotations(folder / f"{name}-hypnogram.edf")
    texts = {"REM": "Sleep stage R"}
    assert list(notes.description) == [
        texts.get(stage, f"Sleep stage {stage}") for stage in frame["class"]
    ]
    assert list(notes.onset) == frame["start"].to_list()
    assert set(notes.duration) == {30.0}
    raw = mne.io.read_raw_edf(folder / f"{name}-hypnogram.edf", verbose="ERROR")
    assert raw.get_data()[0].tolist() == frame["prediction"].to_list()
    psg = mne.io.read_raw_edf(night, verbose="ERROR").set_annotations(notes, emit_warning=False)
    assert len(mne.events_from_annotations(psg, chunk_duration=30.0, verbose="ERROR")[0]) == len(
        frame
    )
    events = pl.read_csv(folder / f"{name}_events.tsv", separator="\t")
    assert events.columns[:3] == ["onset", "duration", "trial_type"]
    assert events["trial_type"].to_list() == frame["class"].to_list()
    sidecar = json.loads((folder / f"{name}_events.json").read_text())
    assert set(sidecar["trial_type"]["Levels"]) == set(STAGES)
    assert (sidecar["confidence"]["Minimum"], sidecar["confidence"]["Maximum"]) == (0, 1)
    np.testing.assert_allclose(events["confidence"], frame["confidence"], atol=1e-6)
    (row,) = json.loads((tmp_path / "summary.json").read_text())["recordings"]
    assert (row["windows"], row["status"]) == (len(frame), "predicted")
    assert row["hours"] == pytest.approx((max(notes.onset) + 30) / 3600)
    assert row["confidence"] == pytest.approx(frame["confidence"].mean())
    asleep = sum(stage != "W" for stage in frame["class"])
    assert row["endpoints"]["total_sleep_time"]["value"] == pytest.approx(asleep / 2)
    assert row["prediction"] == f"asleep {asleep / 2:.4g} min"
    table = pl.read_parquet(tmp_path / "recordings.parquet")
    assert "prediction" not in table.columns  # a class and its share say nothing of a night
    stages = frame["class"].to_list()
    if "REM" in stages:  # AASM: from the onset of sleep
        onset = next(k for k, stage in enumerate(stages) if stage != "W")
        assert table["REM latency from onset"].to_list() == [(stages.index("REM") - onset) / 2]
    assert (
        json.loads((tmp_path / "dataset_description.json").read_text())["DatasetType"]
        == "derivative"
    )
    assert main(["verify", str(tmp_path)]) == 0


def test_nothing_of_the_header_leaves_and_names_are_text(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    night, odd = find_night(home, scored), tmp_path / "in" / "<b onclick=a()>night.edf"
    odd.parent.mkdir()
    rewrite(night, odd, lambda c: c, patient="MCH-0234567 F 02-AUG-1951 Haagse_Harry")
    assert call(home, [odd], tmp_path / "out") == 0
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes()
        assert not any(
            text in content for text in (b"Harry", b"0234567", b"1951", b"<b onclick")
        ), path


def test_dry_runs_and_wrong_runs(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "raw"
    assert call(home, [folder], tmp_path / "out", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["n"] == SUBJECTS
    assert not (tmp_path / "out").exists()
    assert call(home, [folder], tmp_path / "out", run="base") == 2
    assert "finetune" in capsys.readouterr().err
    assert call(home, [folder], tmp_path / "out", run="stagr") == 2
    assert "stager" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert call(home, [folder], out) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / 'file'}: is no folder" in error
        assert "predict: " not in error  # no recording was read


@pytest.mark.slow
def test_values_are_a_time_series(tmp_path: Path) -> None:
    raw, work = tmp_path / "raw", ["-w", str(tmp_path / "ws")]
    small.write_raw(raw)
    lines = (raw / "recordings.csv").read_text().splitlines()
    rows = [f"{line},{number}" for number, line in enumerate(lines[1:])]
    (raw / "recordings.csv").write_text("\n".join([f"{lines[0]},age", *rows]) + "\n")
    (raw / "map.toml").write_text(small.MAP + 'value = "age"\n')
    assert main(["ingest", "generic", str(raw), "--map", str(raw / "map.toml"), *work]) in {0, 3}
    tiny = [*small.TINY, *small.RETENTION, *small.PATCHES, "--steps", "2"]
    assert main(["pretrain", *tiny, "--data", "generic/regression", "--run", "base", *work]) == 0
    assert (
        main(
            [
                "finetune",
                "base",
                "--data",
                "generic/regression",
                "--steps",
                "2",
                "--run",
                "ages",
                *work,
            ]
        )
        == 0
    )
    (tmp_path / "map.toml").write_text(f"rate = {small.RATE}\n")
    files = [
        str(raw / "data" / "p00_a.csv"),
        "--map",
        str(tmp_path / "map.toml"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["predict", "ages", *files, *work]) == 0
    series = pl.read_csv(tmp_path / "out" / "p00_a" / "p00_a_timeseries.csv")
    frame = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert series.columns == ["start", "stop", "prediction"]
    assert np.allclose(series["prediction"], frame["prediction"])
    text = (tmp_path / "out" / "p00_a" / "report.html").read_text()
    length = series["stop"].max()
    assert length < 300, "minutes are for longer recordings"
    assert f"over {length:.3g} seconds." in text


# --- endpoints


def yasa_statistics(hypno: Sequence[int], seconds: float) -> dict[str, float]:
    """The definitions that YASA documents, on its coding (0 W, 1 N1, 2 N2, 3 N3, 4 REM, -2 not
    scored).
    """
    x = np.asarray(hypno)
    sleep = [i for i, stage in enumerate(x) if stage > 0]
    inside = x[sleep[0] : sleep[-1] + 1]
    count = {
        "TIB": len(x),
        "SPT": len(inside),
        "WASO": list(inside).count(0),
        "TST": len(sleep),
        "SOL": sleep[0],
    }
    for code, name in enumerate(("N1", "N2", "N3", "REM"), 1):
        count[name] = list(x).count(code)
        count[f"Lat_{name}"] = list(x).index(code) if code in x else np.nan
    out = {name: value * seconds / 60 for name, value in count.items()}
    return out | {
        "SE": 100 * out["TST"] / out["TIB"],
        "SME": 100 * out["TST"] / out["SPT"],
        "%REM": 100 * out["REM"] / out["TST"],
    }


NAMES = {
    "TIB": "time_in_bed", "SPT": "sleep_period_time", "WASO": "wake_after_sleep_onset", "TST": "total_sleep_time", "SOL": "sleep_onset_latency",
    "SE": "sleep_efficiency", "SME": "sleep_maintenance_efficiency", "%REM": "percent_REM", **{f"Lat_{s}": f"latency_{s}" for s in STAGES[1:]},
    **{s: f"minutes_{s}" for s in STAGES[1:]},
}  # fmt: skip


def check_endpoints(oracle: Callable[[np.ndarray, float], dict[str, float]]) -> None:
    rng = np.random.default_rng(0)
    for trial in range(200):
        epoch = float(rng.choice([20.0, 30.0]))
        hypno = rng.choice(
            [-2, 0, 1, 2, 3, 4], size=int(rng.integers(2, 60)), p=[0.05, 0.35, 0.1, 0.3, 0.1, 0.1]
        )
        hypno[int(rng.integers(len(hypno)))] = int(rng.integers(1, 5))
        found = compute_endpoints(np.where(hypno < 0, -1, hypno), STAGES, epoch)
        for theirs, value in oracle(hypno, epoch).items():
            if theirs in NAMES:
                own = found[NAMES[theirs]]
                assert (
                    (own.value is None and own.undefined_reason)
                    if np.isnan(value)
                    else own.value == pytest.approx(value, abs=1e-9)
                ), trial


def test_endpoints_are_those_of_yasa() -> None:
    check_endpoints(yasa_statistics)


def test_endpoints_are_those_of_the_package_yasa() -> None:
    yasa = pytest.importorskip("yasa")
    check_endpoints(lambda hypno, epoch: yasa.sleep_statistics(hypno, sf_hyp=1 / epoch))


def test_endpoints_of_a_night_without_sleep_say_why() -> None:
    found = compute_endpoints(np.zeros(10, np.int64), STAGES, 30.0)
    assert found["total_sleep_time"].value == found["sleep_efficiency"].value == 0.0
    for name in (
        "sleep_onset_latency",
        "wake_after_sleep_onset",
        "latency_REM",
        "rem_latency_from_onset",
        "percent_N2",
    ):
        assert found[name].value is None
        assert found[name].undefined_reason


def test_gaps_of_a_hypnogram_are_epochs_without_a_score() -> None:
    assert place_epochs([60.0, 0.0, 120.0], [1, 0, 2], 30.0).tolist() == [0, -1, 1, -1, 2]


def test_no_two_recordings_have_one_name(tmp_path: Path) -> None:
    files = [
        tmp_path / name
        for name in ("a/night.csv", "b/night.csv", "b/night-2.csv", "c/night.csv", "d/NIGHT.csv")
    ]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x\n1\n")
    options = WindowOptions.model_construct(channels=["x"], rate=100.0, length=1.0)
    names = [one.name for one in find_recordings(files, options, ChannelMap())]
    assert names == ["night", "night-2", "night-2-2", "night-3", "NIGHT-4"], (
        "the second would be written over by the third"
    )


def write_channel(path: Path, seed: int) -> None:
    """An EDF+ file of one channel, called as the file, of 20 s at 64 Hz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.clip(np.random.default_rng(seed).normal(0, 40, 20 * 64), -199, 199)
    with pyedflib.EdfWriter(str(path), 1) as writer:
        writer.setSignalHeaders(
            [
                {
                    "label": path.stem,
                    "dimension": "uV",
                    "sample_frequency": 64,
                    "physical_min": -200.0,
                    "physical_max": 200.0,
                    "digital_min": -2048,
                    "digital_max": 2047,
                    "transducer": "",
                    "prefilter": "",
                }
            ]
        )
        writer.writeSamples([noise])
        writer.writeAnnotation(0, 10, "Sleep stage W")


@pytest.mark.parametrize(
    ("folder", "mapping", "names"),
    [
        (".", ChannelMap(), ["s1", "s2"]),
        ("s1", ChannelMap(), ["s1"]),  # the only folder
        (".", ChannelMap(match=r"s(?P<recording>\d)/"), ["1", "2"]),
        (".", ChannelMap(channels={"left": "EEG L", "difference": "EEG R - EOG"}), ["s1", "s2"]),
    ],
)
def test_files_of_a_channel_each_are_joined(
    tmp_path: Path, folder: str, mapping: ChannelMap, names: list[str]
) -> None:
    stems = ("EEG L", "EEG R", "EOG")
    paths = [tmp_path / place / f"{stem}.edf" for place in ("s1", "s2") for stem in stems]
    for seed, path in enumerate(paths):
        write_channel(path, seed)
    wanted = [*mapping.channels] or ["EOG", "EEG L"]
    options = WindowOptions.model_construct(channels=wanted, rate=64.0, length=10.0, clock=None)
    recordings = list(find_recordings([tmp_path / folder], options, mapping))
    assert [recording.name for recording in recordings] == names
    for place, recording in zip(("s1", "s2"), recordings, strict=False):
        record = recording.read()
        expected = {}
        for stem in stems:
            with pyedflib.EdfReader(str(tmp_path / place / f"{stem}.edf")) as reader:
                expected[stem] = reader.readSignal(0)
        expected |= {"left": expected["EEG L"], "difference": expected["EEG R"] - expected["EOG"]}
        assert [signal.channel for signal in record.signals] == wanted
        assert (record.annotations, record.findings) == ([], [])
        for signal in record.signals:
            values = signal.samples.astype(np.float64) * signal.scale + signal.offset
            np.testing.assert_allclose(values, expected[signal.channel], atol=1e-4)


def read_all(folder: Path, mapping: ChannelMap) -> dict[str, Record]:
    """Name -> recording of a folder, with the channels `EEG` and `EOG` of a run at 50 Hz."""
    options = WindowOptions.model_construct(
        channels=["EEG", "EOG"], rate=50.0, length=10.0, clock=None
    )
    return {new.name: new.read() for new in find_recordings([folder], options, mapping)}


def write_array(path: Path, values: np.ndarray) -> None:
    """[samples, 2] as a file of the ending of `path`."""
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".mat":
        scipy.io.savemat(path, {"data": values, "other": np.ones((3, 4))})
    else:
        np.savetxt(path, values, delimiter=",", header="a,b", comments="", fmt="%.6f")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x.csv", 'rate = 50\n[files.channels]\n"a" = "EEG"\n"b" = "EOG"'),
        ("deep/x.npy", 'rate = 50\nchannels = ["EEG", "EOG"]'),
        ("x.mat", 'variable = "data"\nrate = 50\nchannels = ["EEG", "EOG"]'),
    ],
)
@pytest.mark.parametrize("place", [".", "folder", "file"])
def test_the_map_of_ingest_is_one_of_predict(
    tmp_path: Path, name: str, rule: str, place: str
) -> None:
    raw = tmp_path / "raw"
    file = raw / name
    file.parent.mkdir(parents=True)
    values = np.random.default_rng(0).normal(0, 40, (2000, 2))
    write_array(file, values)
    (raw / "people.csv").write_text("file,age\nx,33\n")
    text = f'[[files]]\npattern = "{name.replace("x", "*")}"\n{rule}\n[labels]\n"4" = "N3"\n'
    (tmp_path / "map.toml").write_text(text)
    mapping = parse_map([str(tmp_path / "map.toml")], ["EEG", "EOG"])
    path = {".": raw, "folder": file.parent, "file": file}[place]
    (record,) = read_all(path, mapping).values()
    assert [signal.channel for signal in record.signals] == ["EEG", "EOG"]
    for signal, column in zip(record.signals, values.T, strict=True):
        assert signal.rate == 50
        np.testing.assert_allclose(signal.samples, column, atol=1e-4)


def test_maps_that_fit_no_file_or_have_a_fault_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((100, 2)))
    with pytest.raises(UserError, match=r"no group of the map fits it, expected '\*.csv'"):
        read_all(tmp_path / "x.npy", ChannelMap(files=(FileRule(pattern="*.csv"),)))
    for text in ("match = '('", "[[files]]\nmatch = '('"):
        (tmp_path / "map.toml").write_text(text)
        with pytest.raises(UserError, match="expected a regular expression"):
            parse_map([str(tmp_path / "map.toml")], ["EEG", "EOG"])


def test_tables_of_labels_beside_recordings_and_copies_are_none(tmp_path: Path) -> None:
    write_channel(tmp_path / "EEG.edf", 0)
    (tmp_path / "EEG.csv").write_text("onset,duration,stage\n0,30,W\n30,30,N2\n")
    (tmp_path / "people.tsv").write_text("name\tage\nEEG\t40\n")
    scipy.io.savemat(tmp_path / "EEG.mat", {"x": np.ones(4)})
    options = WindowOptions.model_construct(channels=["EEG"], rate=64.0, length=10.0, clock=None)
    (new,) = find_recordings([tmp_path], options, ChannelMap())
    assert (new.name, Path(new.file).name) == ("EEG", "EEG.edf")
    for name in ("EEG.edf", "EEG.csv", "people.tsv"):
        (tmp_path / name).unlink()
    (new,) = find_recordings([tmp_path], options, ChannelMap())
    assert Path(new.file).name == "EEG.mat", "nothing else is there"
    (tmp_path / "EEG.mat").rename(tmp_path / "EEG.edf.gz")
    (new,) = find_recordings([tmp_path], options, ChannelMap())
    with pytest.raises(UserError, match=r"no recordings there.* Unpack it"):
        new.read()


def test_a_name_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as fault:
        bitimely.from_pretrained("nothing", workspace=tmp_path)
    assert fault.value.exit_code == 2


# --- nights and events against scores


def test_night_scores_are_those_of_plain_code(home: Path, scored: pl.DataFrame) -> None:
    from sklearn.metrics import cohen_kappa_score

    from bitimely_core.schemas.scores import Scores

    found = Scores.load(home / "ws" / "runs" / "stager" / "scores.json").nights
    assert found is not None
    nights = [
        group.sort("start") for _, group in scored.group_by("recording_id", maintain_order=True)
    ]
    kappas = [cohen_kappa_score(night["target"], night["prediction"]) for night in nights]
    assert found.nights == len(nights)
    assert found.kappa.value == pytest.approx(np.mean(kappas), abs=1e-12)
    sleep = [
        [(night[side] != 0).sum() / 2 for side in ("prediction", "target")] for night in nights
    ]
    own = found.endpoints["total_sleep_time"]
    assert own.bias.value == pytest.approx(np.mean([a - b for a, b in sleep]), abs=1e-9)
    assert (own.predicted, own.scored) == pytest.approx(tuple(np.mean(sleep, axis=0)), abs=1e-9)
    assert "Clinical endpoints" in (home / "ws" / "runs" / "stager" / "report.html").read_text()


def test_limits_of_agreement_hold_95_percent_of_new_nights() -> None:
    """Two nights a subject, differences with standard deviations 4 between and 3 within subjects:
    the limits are +- 1.96 * 5.
    """
    from bitimely_core.evaluate.endpoints import limits_of_agreement

    rng, widths, inside = np.random.default_rng(0), [], 0
    units = np.repeat(np.arange(30), 2)
    for _ in range(400):
        difference = 4 * rng.standard_normal(30)[units] + 3 * rng.standard_normal(60)
        low, high = limits_of_agreement(difference, units)
        assert low.value is not None
        assert high.value is not None
        widths.append(high.value - low.value)
        inside += (low.lo or 0.0) < -1.96 * 5 < (low.hi or 0.0)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 5, rel=0.03)
    assert 0.92 < inside / 400 < 0.98
    single, _ = limits_of_agreement(np.array([1.0, 2.0, 4.0]), np.arange(3))
    assert single.value == pytest.approx(7 / 3 - 1.96 * np.std([1, 2, 4], ddof=1))
    assert single.lo is None


def test_events_are_found_where_predictions_overlap() -> None:
    from bitimely_core.evaluate.endpoints import score_events

    names = ["a"] * 10 + ["b"] * 10
    index = pl.DataFrame(
        {"recording_id": names, "subject_id": names, "start": [6.0 * i for i in range(10)] * 2}
    )
    target = np.array([0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
    predicted = np.array([0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    found = score_events(index, target, predicted, 6.0)
    # the first is found; the second is missed by one window; b's is missed
    assert found.events == 3
    assert found.sensitivity.value == pytest.approx(1 / 3)
    assert found.false_alarms == 3
    assert found.hours == pytest.approx(20 * 6 / 3600)
    assert found.false_alarms_per_hour.value == pytest.approx(3 / (20 * 6 / 3600))
    nothing = score_events(index, np.zeros(20, np.int64), predicted, 6.0)
    assert nothing.sensitivity.value is None
    assert nothing.sensitivity.undefined_reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wfdb with a newer pandas
def test_wfdb_and_bdf_recordings_are_read_and_their_labels_stay_closed(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    """The same night in both formats, with annotations beside it, gives the probabilities of the
    EDF to rounding of the header.
    """
    global opened
    import pyedflib
    import wfdb

    night, folder = find_night(home, scored), tmp_path / "in"
    folder.mkdir()
    signal = find_signal(night, "EEG Fpz-Cz")
    digital = signal.samples.astype(np.int64)[:, None]
    header = {
        "fs": 100,
        "units": ["uV"],
        "sig_name": ["EEG Fpz-Cz"],
        "fmt": ["16"],
        "write_dir": str(folder),
    }
    wfdb.wrsamp(
        "record",
        d_signal=digital,
        adc_gain=[1 / signal.scale],
        baseline=[round(-signal.offset / signal.scale)],
        **header,
    )
    wfdb.wrann("record", "atr", np.array([100, 200]), symbol=["N", "N"], write_dir=str(folder))
    with pyedflib.EdfWriter(
        str(folder / "night.bdf"), 1, file_type=pyedflib.FILETYPE_BDF
    ) as writer:
        limits = {
            "physical_min": -250,
            "physical_max": 250,
            "digital_min": -(2**23),
            "digital_max": 2**23 - 1,
        }
        named = {
            "label": "EEG Fpz-Cz",
            "dimension": "uV",
            "sample_frequency": 100,
            "transducer": "",
            "prefilter": "",
        }
        writer.setSignalHeader(0, {**named, **limits})
        writer.writeSamples([signal.samples * signal.scale + signal.offset])
    for name in ("night-Hypnogram.bdf", "night-Hypnogram.edf", "night.xml"):
        (folder / name).write_bytes(b"\xff" * 50)
    opened = []
    try:
        assert call(home, [folder], tmp_path / "out") == 0
    finally:
        seen, opened = opened, None
    assert {Path(path).name for path in seen if str(folder) in path} <= {
        "record.hea",
        "record.dat",
        "night.bdf",
    }
    wanted = bitimely.from_pretrained("stager", workspace=home / "ws").predict(night)
    found = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert found["recording_id"].n_unique() == 2
    for _, own in found.group_by("recording_id"):
        for stage in STAGES:
            assert np.allclose(
                own[f"p_{stage}"].to_numpy(), wanted[f"p_{stage}"].to_numpy(), atol=5e-3
            ), stage


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_files(
    home: Path, scored: pl.DataFrame, tmp_path: Path
) -> None:
    """Thirty more recordings than thirty add less than a tenth of what keeping their windows and
    pages would.
    """
    import subprocess

    night, peaks = find_night(home, scored), []
    program = (
        "import resource, sys; from bitimely_cli.main import main; assert main(sys.argv[1:]) == 0; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    for count in (30, 60):
        folder = tmp_path / f"of-{count}"
        folder.mkdir()
        for number in range(count):
            shutil.copy(night, folder / f"n{number}.edf")
        arguments = [
            "predict",
            "stager",
            str(folder),
            "--out",
            str(tmp_path / f"out-{count}"),
            "-w",
            str(home / "ws"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 40, f"peaks of {peaks} MiB"
