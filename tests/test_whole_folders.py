"""Folders of recordings as laboratories keep them, read in at most two commands to right values."""

from __future__ import annotations

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pyedflib
import pytest
from samples import SAMPLES

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.types import Record

RATE = 64  # Hz
WORDS = {"W": "W", "N1": "N1", "N2": "N2", "N3": "N3", "REM": "R"}
CINC = SAMPLES / "complete" / "cinc2017" / "training2017"
WATCH = SAMPLES / "complete" / "sleep-accel-hr"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where a user would run them: beside the folder `raw`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BITIMELY_WORKSPACE", raising=False)
    Path("raw").mkdir()


def draw_stages(seed: int, count: int = 12) -> list[str]:
    """Stages of 30-s epochs, of every class at least two."""
    stages = list(WORDS) * 2 + ["N2"] * (count - 10)
    np.random.default_rng(seed).shuffle(stages)
    return stages


def write_night(
    path: Path, seed: int, seconds: int, labels: tuple[str, ...] = ("EEG", "EOG")
) -> None:
    """An EDF night of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyedflib.EdfWriter(str(path), len(labels), file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
        writer.setStartdatetime(datetime(2020, 1, 1, 22, 0, 0))
        writer.setSignalHeaders(
            [
                {
                    "label": label,
                    "dimension": "uV",
                    "sample_frequency": RATE,
                    "physical_min": -200.0,
                    "physical_max": 200.0,
                    "digital_min": -2048,
                    "digital_max": 2047,
                    "transducer": "",
                    "prefilter": "",
                }
                for label in labels
            ]
        )
        noise = np.random.default_rng(seed).normal(0, 30, (len(labels), seconds * RATE))
        writer.writeSamples(list(np.clip(noise, -199, 199)))


def records() -> dict[str, Record]:
    """Name -> recording of the cache."""
    cache = open_cache(Path("ws/cache/generic"))
    return {record.recording_id: record for record in cache.records()}


def index(name: str) -> pl.DataFrame:
    """The windows of a set of tokens."""
    return pl.read_parquet(Path("ws/tokens") / name / "index.parquet")


def windows_of(table: pl.DataFrame, recording: str) -> list[tuple[float, str]]:
    """Start in seconds and label of the windows of a recording."""
    rows = table.filter(pl.col("recording_id") == recording).sort("start")
    return list(zip(rows["start"].to_list(), rows["label"].to_list(), strict=True))


def test_edf_nights_with_a_stage_a_line_beside_them() -> None:
    truth = {}
    for number in range(4):
        stages = draw_stages(number)
        truth[f"night{number}"] = [(30.0 * i, stage) for i, stage in enumerate(stages)]
        write_night(Path(f"raw/night{number}.edf"), number, 30 * len(stages))
        Path(f"raw/night{number}.txt").write_text("\n".join(WORDS[s] for s in stages) + "\n")
    assert main(["ingest", "generic", "raw", "-w", "ws"]) == 0
    assert main(["tokenize", "generic/staging", "-w", "ws"]) == 0
    table = index("generic-staging")
    for name, expected in truth.items():
        assert windows_of(table, name) == expected


def test_a_bids_set_of_sleep_with_inherited_events() -> None:
    stages = draw_stages(7)
    Path("raw/dataset_description.json").write_text('{"Name": "sleep", "BIDSVersion": "1.8.0"}')
    Path("raw/participants.tsv").write_text(
        "participant_id\tage\tsex\n" + "".join(f"sub-0{i}\t4{i}\tF\n" for i in range(1, 4))
    )
    rows = [f"{30 * i}\t30\t{stage}" for i, stage in enumerate(stages)]
    Path("raw/task-sleep_events.tsv").write_text("onset\tduration\ttrial_type\n" + "\n".join(rows))
    for i in range(1, 4):
        folder = Path(f"raw/sub-0{i}/eeg")
        write_night(folder / f"sub-0{i}_task-sleep_eeg.edf", i, 30 * len(stages))
    # what lies nearer wins
    turned = [f"{30 * i}\t30\t{stage}" for i, stage in enumerate(stages[::-1])]
    Path("raw/sub-03/eeg/sub-03_task-sleep_events.tsv").write_text(
        "onset\tduration\ttrial_type\n" + "\n".join(turned)
    )
    assert main(["ingest", "generic", "raw", "-w", "ws"]) == 0
    assert main(["tokenize", "generic/staging", "-w", "ws"]) == 0
    table = index("generic-staging")
    assert sorted(table["subject_id"].unique()) == ["01", "02", "03"]
    for i in range(1, 4):
        expected = stages if i < 3 else stages[::-1]
        (name,) = table.filter(pl.col("subject_id") == f"0{i}")["recording_id"].unique()
        assert [label for _, label in windows_of(table, name)] == expected


@pytest.mark.slow
def test_a_wearable_whose_csv_files_have_date_times(capsys: pytest.CaptureFixture[str]) -> None:
    truth = {}
    for number in range(3):
        start = datetime(2021, 5, number + 1, 23, 59, 30)
        values = np.random.default_rng(number).normal(0, 1, (32 * 90, 3)).round(5)
        truth[f"p{number}"] = values
        with Path(f"raw/p{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["timestamp", "acc_x (g)", "acc_y (g)", "acc_z (g)"])
            for i, row in enumerate(values):
                now = start + timedelta(seconds=i / 32)
                writer.writerow([now.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], *row])
    assert main(["ingest", "generic", "raw", "-w", "ws"]) == 0
    assert "2021" not in capsys.readouterr().out  # no dates
    for name, values in truth.items():
        signals = records()[name].signals
        assert [signal.channel for signal in signals] == ["acc_x", "acc_y", "acc_z"]
        assert [signal.unit for signal in signals] == ["g"] * 3
        assert [signal.rate for signal in signals] == pytest.approx([32.0] * 3)
        read = np.stack([signal.samples for signal in signals], axis=1)
        np.testing.assert_allclose(read, values, atol=1e-6)
    assert main(["tokenize", "generic", "-w", "ws"]) == 0


def read_advised_line(said: str) -> str:
    """The line of a map in a warning."""
    return said[said.index("files = [{") :].split(" where ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["subject", "recording"])
def test_the_advised_line_groups_the_files_of_a_person(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for seed, name in enumerate(("p1/ecg", "p1/resp", "p2/ecg", "p2/resp")):
        path = Path(f"raw/{name}.csv")
        path.parent.mkdir(exist_ok=True)
        values = np.random.default_rng(seed).normal(0, 1, 900).round(4)
        path.write_text(
            f"time_s,{path.stem}\n" + "".join(f"{i / 50},{v}\n" for i, v in enumerate(values))
        )
    assert main(["ingest", "generic", "raw", "-w", "ws"]) == 0
    line = read_advised_line(capsys.readouterr().err)
    Path("map.toml").write_text(line.replace("subject", kind))
    assert main(["ingest", "generic", "raw", "--map", "map.toml", "-w", "ws"]) == 0
    if kind == "subject":
        assert {r.subject_id for r in records().values()} == {"p1", "p2"}
    else:
        assert {name: len(r.signals) for name, r in records().items()} == {"p1": 2, "p2": 2}


def test_a_written_map_keeps_the_clocks_beside_tables_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = np.random.default_rng(0).normal(0, 1, 900).round(4)
    rows = "".join(f"{i / 50},{v}\n" for i, v in enumerate(values))
    Path("raw/timed.csv").write_text("time_s,x\n" + rows)
    Path("raw/bare.csv").write_text("x\n" + "".join(f"{v}\n" for v in values))
    assert main(["ingest", "generic", "raw", "--init-map", "map.toml", "-w", "ws"]) == 0
    assert "1 rate to fill in" in capsys.readouterr().out
    text = Path("map.toml").read_text().replace("rate = 1.0", "rate = 20")
    Path("map.toml").write_text(text)
    assert main(["ingest", "generic", "raw", "--map", "map.toml", "-w", "ws"]) == 0
    assert {name: r.signals[0].rate for name, r in records().items()} == {"timed": 50, "bare": 20}


def test_a_table_wider_than_long_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).normal(0, 1, (3, 500)).round(4)
    Path("raw/a.csv").write_text("\n".join(",".join(map(str, row)) for row in noise) + "\n")
    Path("map.toml").write_text("files = [{pattern = '*.csv', rate = 100}]")
    assert main(["ingest", "generic", "raw", "--map", "map.toml", "-w", "ws"]) == 4
    assert "has 500 columns of 3 samples, a row may be a channel" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not CINC.is_dir(), reason="needs the data of CinC 2017")
def test_a_part_of_cinc_2017_with_its_classes() -> None:
    import wfdb

    folder = Path("raw")
    lines = (
        (
            CINC.parent / "REFERENCE.csv"
            if (CINC.parent / "REFERENCE.csv").exists()
            else CINC / "REFERENCE.csv"
        )
        .read_text()
        .splitlines()
    )
    classes = dict(line.split(",") for line in lines if line)
    names = sorted(path.stem for path in CINC.rglob("*.hea"))[:40]
    for name in names:
        for ending in (".hea", ".mat"):
            (file,) = CINC.rglob(name + ending)
            (folder / file.name).symlink_to(file)
    (folder / "REFERENCE.csv").write_text("".join(f"{n},{classes[n]}\n" for n in names))
    assert main(["ingest", "generic", "raw", "-w", "ws", "--follow-symlinks"]) == 0
    assert main(["tokenize", "generic/classification", "-w", "ws"]) == 0
    cached = records()
    assert sorted(cached) == names
    for name in names[:10]:
        values, fields = wfdb.rdsamp(str(folder / name))
        (signal,) = cached[name].signals
        assert signal.rate == fields["fs"] == 300
        np.testing.assert_allclose(signal.samples * signal.scale + signal.offset, values[:, 0])
    table = index("generic-classification")
    assert dict(table.select("recording_id", "label").unique().iter_rows()) == {
        name: classes[name] for name in table["recording_id"].unique()
    }
    assert table["recording_id"].n_unique() >= 38  # those below 10 s have no window


@pytest.mark.slow
@pytest.mark.skipif(not WATCH.is_dir(), reason="needs the data of Walch 2019")
def test_heart_rates_of_a_watch_with_stages_in_a_folder_of_their_own() -> None:
    people = sorted(path.stem.split("_")[0] for path in (WATCH / "labels").iterdir())[:4]
    for kind in ("heart_rate", "labels"):
        (Path("raw") / kind).mkdir()
        for file in (WATCH / kind).iterdir():
            if file.name.split("_")[0] in people:
                (Path("raw") / kind / file.name).write_bytes(file.read_bytes())
    assert main(["ingest", "generic", "raw", "-w", "ws"]) == 0
    assert main(["tokenize", "generic/staging", "-w", "ws"]) == 0
    names = {0: "W", 1: "N1", 2: "N2", 3: "N3", 4: "N3", 5: "REM"}
    table = index("generic-staging")
    assert len(records()) == len(people)
    for person in people:
        (file,) = (Path("raw") / "labels").glob(f"{person}_*")
        rows = [line.replace(",", " ").split() for line in file.read_text().splitlines() if line]
        truth = {float(onset): names[int(float(code))] for onset, code in rows if float(code) >= 0}
        (recording,) = [name for name in records() if person in name]
        (pulse,) = (Path("raw") / "heart_rate").glob(f"{person}_*")
        first = float(pulse.read_text().split(",")[0])  # seconds before the first stage
        made = {
            round((start + first) / 30) * 30: label for start, label in windows_of(table, recording)
        }
        assert len(made) > 0.9 * len(truth)
        assert all(truth[start] == label for start, label in made.items())


def test_the_summary_of_an_ingest_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_night(Path("raw/a.edf"), 1, 120)
    Path("raw/a.txt").write_text("W\nN1\nN2\nR\n")
    capsys.readouterr()
    assert main(["ingest", "generic", "raw", "-w", "ws", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["accepted"] == 1
