"""Recordings as people have them, with features of public reports: what is read, and what is said.

Each case is a folder of `shared/cases/recordings`, whose README states what is right; it is read by
the command line, from a copy, under a relative path.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyedflib
import pytest
from samples import SHARED
from small import RETENTION

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.tokens.windows import open_windows
from bitimely_core.types import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import wfdb

CASES = SHARED / "cases" / "recordings"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not here")


class Outcome(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All that a user sees."""
        return self.out + self.err


class Bench:
    """A workspace beside a copy of one case, in the folder where the commands run."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def take(self, name: str) -> Path:
        """Copy a case to `raw` (and its map to `map.toml`)."""
        shutil.copytree(CASES / name / "in", self.folder / "raw")
        if (CASES / name / "map.toml").exists():
            shutil.copy(CASES / name / "map.toml", self.folder / "map.toml")
        return self.folder / "raw"

    def run(self, *words: object) -> Outcome:
        """One command, such as run("ingest", "generic", "raw")."""
        self.capsys.readouterr()
        code = main([*map(str, words), "-w", "ws"])
        return Outcome(code, *self.capsys.readouterr())

    def records(self, dataset: str = "generic") -> dict[str, Record]:
        """Name -> recording of the cache."""
        cache = open_cache(self.folder / "ws" / "cache" / dataset)
        return {record.recording_id: record for record in cache.records()}

    def report(self, dataset: str = "generic") -> dict[str, Any]:
        """The ingest report."""
        path = self.folder / "ws" / "cache" / dataset / "ingest_report.json"
        return dict(json.loads(path.read_text()))


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BITIMELY_WORKSPACE", raising=False)
    yield Bench(tmp_path, capsys)
    os.chdir("/")


def physical(record: Record, channel: str) -> np.ndarray:
    """The samples of a channel in its unit, segments one after the other."""
    parts = [
        signal.samples.astype(np.float64) * signal.scale + signal.offset
        for signal in record.signals
        if signal.channel == channel
    ]
    return np.concatenate(parts)


def notes(record: Record) -> list[tuple[float, float, str]]:
    """Onset, duration and text of the annotations."""
    return [(round(n.onset, 6), round(n.duration, 6), n.label) for n in record.annotations]


# --- O: first use


TABLES = ("00_first_use_flow", "12_csv_time_in_ms", "20_csv_one_dropped_sample")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_three_steps_of_a_first_use_work(bench: Bench, name: str) -> None:
    bench.take(name)
    (bench.folder / "map.toml").unlink(missing_ok=True)
    assert bench.run("ingest", "generic", "./raw").code in {0, 3, 4}
    assert bench.run("ingest", "generic", "./raw", "--init-map", "map.toml").code == 0
    last = bench.run("ingest", "generic", "./raw", "--map", "map.toml")
    assert last.code == 0, last.said
    assert bench.records()


@pytest.mark.slow
def test_another_map_is_read_without_a_further_option(bench: Bench) -> None:
    bench.take("00_first_use_flow")
    assert bench.run("ingest", "generic", "raw").code == 0
    (bench.folder / "map.toml").write_text('[[files]]\nchannels = {"ppg" = "PPG"}\n')
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    (record,) = bench.records().values()
    assert [signal.channel for signal in record.signals] == ["PPG"]


# --- A: paths; B: the bridge to MNE


@pytest.mark.parametrize("way", ["raw", ".", "link/raw", "absolute"])
def test_mne_formats_are_read_under_every_path(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name in ("27_eeglab_epoched_and_continuous", "35_brainvision_units"):
        shutil.copytree(CASES / name / "in", bench.folder / "a [1] b" / "raw", dirs_exist_ok=True)
    (bench.folder / "link").symlink_to(bench.folder / "a [1] b")
    monkeypatch.chdir(bench.folder / "a [1] b" / ("raw" if way == "." else ""))
    path = {"absolute": bench.folder / "link" / "raw", "link/raw": "../link/raw"}.get(way, way)
    workspace = "../../ws" if way == "." else "../ws"
    assert main(["ingest", "generic", str(path), "-w", workspace]) == 0
    assert set(bench.records()) == {"continuous", "epoched", "r"}


def test_times_of_a_cropped_fif_file_begin_with_the_file(bench: Bench) -> None:
    bench.take("01_fif_cropped")
    assert bench.run("ingest", "generic", "raw", "--keep-phi").code == 0
    for record in bench.records().values():
        assert notes(record) == [(10.0, 1.0, "spindle")]
        marked = np.flatnonzero(physical(record, "C4"))
        assert (marked.min() / 100, (marked.max() + 1) / 100) == (10.0, 11.0)


def test_epochs_of_eeglab_are_segments_called_by_their_event(bench: Bench) -> None:
    bench.take("27_eeglab_epoched_and_continuous")
    assert bench.run("ingest", "generic", "raw", "--keep-phi").code == 0
    records = bench.records()
    assert physical(records["continuous"], "C3")[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert notes(records["continuous"])[0] == (10.0, 0.0, "S1")
    epochs = [signal for signal in records["epoched"].signals if signal.channel == "C3"]
    assert [len(signal.samples) for signal in epochs] == [500] * 6
    assert [label for *_, label in notes(records["epoched"])] == ["S1"] * 6
    assert bench.run("tokenize", "generic/annotations").code == 0


def test_units_and_markers_of_brainvision(bench: Bench) -> None:
    bench.take("35_brainvision_units")
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    (record,) = bench.records().values()
    assert notes(record) == [(2.0, 0.0, "S1"), (4.0, 0.0, "N2")]
    assert {s.channel: s.unit for s in record.signals} == {
        "C3": "uV",
        "GSR": "uS",
        "Temp": "C",
        "ECG": "uV",
    }
    assert np.allclose(physical(record, "GSR"), 2.5)
    assert np.allclose(physical(record, "Temp"), 36.5)
    assert bench.run("tokenize", "generic/points").code == 0


# --- C: missing values


def test_the_missing_word_of_bids_is_no_label(bench: Bench) -> None:
    bench.take("02_bids_trialtype_na")
    outcome = bench.run("ingest", "generic", "raw")
    assert (outcome.code, "state no onset or no label: 1" in outcome.said) == (0, True)
    for record in bench.records().values():
        assert notes(record) == [(10.5, 0.0, "1040"), (20.5, 0.0, "2049"), (30.5, 0.0, "1040")]


# --- D: time and units of tables; I: dialects; M: gaps


def column(path: Path, place: int = 1, **options: Any) -> np.ndarray:
    """A column of a table by pandas, as float32."""
    return pd.read_csv(path, **options).iloc[:, place].to_numpy(np.float32)


@pytest.mark.slow
def test_times_in_milliseconds_are_found_and_said(bench: Bench) -> None:
    raw = bench.take("12_csv_time_in_ms")
    outcome = bench.run("ingest", "generic", "raw")
    assert outcome.code == 0
    assert "'timestamp' are taken for ms" in outcome.err
    assert "0.117 Hz in s" in outcome.err
    records = bench.records()
    assert [s.rate for record in records.values() for s in record.signals] == [117.0] * 3
    np.testing.assert_array_equal(physical(records["p1"], "hart"), column(raw / "p1.csv"))
    (bench.folder / "map.toml").write_text('[[files]]\nclock = "s"\n')
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml", "--force-new")
    assert (outcome.code, "are taken for" in outcome.err) == (0, False)
    assert [round(s.rate, 3) for s in bench.records()["p1"].signals] == [0.117]


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_date_times_are_a_clock(bench: Bench, mapped: bool) -> None:
    raw = bench.take("14_csv_datetime_column")
    options = ("--map", "map.toml") if mapped else ()
    outcome = bench.run("ingest", "generic", "raw", *options)
    assert outcome.code == 0
    report = re.sub(r"\b[0-9a-f]{64}\b", "", json.dumps(bench.report()))  # without checksums
    assert "2016" not in outcome.said + report
    (signal,) = bench.records()["p1"].signals
    assert (signal.rate, signal.channel, bench.records()["p1"].start_time) == (100.0, "hr", None)
    np.testing.assert_array_equal(signal.samples, column(raw / "p1.csv"))
    bench.run("ingest", "generic", "raw", *options, "--keep-dates", "--force-new")
    assert bench.records()["p1"].start_time == "2016-11-24T13:58:58.081000"


@pytest.mark.parametrize("mapped", [False, True])
def test_semicolons_and_decimal_commas_are_read(bench: Bench, mapped: bool) -> None:
    raw = bench.take("15_decimal_comma_semicolon")
    options = ("--map", "map.toml") if mapped else ()
    outcome = bench.run("ingest", "generic", "raw", *options)
    assert outcome.code == 0
    assert "; between cells; decimal comma; header in line 1" in outcome.out
    record = bench.records()["p2"]
    name = "EKG [mV]" if mapped else "EKG"
    assert [(s.channel, s.rate, s.unit) for s in record.signals] == [
        (name, 200.0, "mV"),
        ("Atmung", 200.0, ""),
    ]
    for place, channel in ((1, name), (2, "Atmung")):
        wanted = column(raw / "p2.csv", place, sep=";", decimal=",")
        np.testing.assert_array_equal(physical(record, channel), wanted)


@pytest.mark.slow
def test_an_empatica_e4_is_read_as_it_is(bench: Bench) -> None:
    raw = bench.take("16_empatica_e4")
    outcome = bench.run("ingest", "generic", "raw", "--keep-dates")
    assert outcome.code == 0
    assert "Empatica E4" in outcome.out
    records = bench.records()
    assert list(records) == ["p1", "p2"]
    *axes, pulse = records["p2"].signals
    assert (pulse.channel, pulse.rate, len(pulse.samples)) == ("BVP", 64.0, 3840)
    assert [(s.rate, len(s.samples), s.unit) for s in axes] == [(32.0, 1920, "g")] * 3
    wanted = np.loadtxt(raw / "p2" / "ACC.csv", delimiter=",", skiprows=2, dtype=np.float32)
    np.testing.assert_array_equal([s.samples * s.scale for s in axes], wanted.T / 64)
    start = datetime.fromtimestamp(1544027000, UTC).replace(tzinfo=None).isoformat()
    assert records["p1"].start_time == start


@pytest.mark.parametrize("mapped", [False, True])
def test_open_bci_and_open_signals_are_read(bench: Bench, mapped: bool) -> None:
    raw = bench.take("17_openbci_percent_header")
    outcome = bench.run("ingest", "generic", "raw", *(("--map", "map.toml") if mapped else ()))
    assert outcome.code == 0
    bci, signals = (bench.records()[name] for name in ("OpenBCI-RAW-s1", "opensignals-s1"))
    assert [(s.channel, s.rate, s.unit) for s in bci.signals] == [
        ("EXG Channel 0", 250.0, "uV"),
        ("EXG Channel 1", 250.0, "uV"),
    ]
    assert [s.rate for s in signals.signals] == [1000.0]
    wanted = column(raw / "OpenBCI-RAW-s1.txt", 2, skiprows=4)
    np.testing.assert_array_equal(bci.signals[1].samples, wanted)
    wanted = column(raw / "opensignals-s1.txt", 2, sep="\t", skiprows=3, header=None)
    np.testing.assert_array_equal(signals.signals[0].samples, wanted)


def test_a_lost_row_is_a_gap(bench: Bench) -> None:
    raw = bench.take("20_csv_one_dropped_sample")
    outcome = bench.run("ingest", "generic", "raw")
    assert (outcome.code, "p1.csv: 1 gap in time" in outcome.err) == (0, True)
    record = bench.records()["p1"]
    times = pd.read_csv(raw / "p1.csv")["time"].to_numpy()
    (late,) = np.flatnonzero(np.diff(times) > 0.03) + 1
    assert [(s.rate, len(s.samples), s.onset) for s in record.signals] == [
        (50.0, late, 0.0),
        (50.0, len(times) - late, times[late]),
    ]
    np.testing.assert_array_equal(physical(record, "ppg"), column(raw / "p1.csv"))
    assert [len(s.samples) for s in bench.records()["p2"].signals] == [3000]


@pytest.mark.slow
def test_tables_work_in_the_steps_that_are_printed(bench: Bench) -> None:
    bench.take("00_first_use_flow")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert [s.rate for s in bench.records()["p2"].signals] == [50.0]
    assert bench.run("ingest", "generic", "raw", "--init-map", "map.toml").code == 0
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml", "--force-new")
    assert (outcome.code, [s.rate for s in bench.records()["p2"].signals]) == (0, [50.0])


# --- E: vocabularies

NIGHT = ["W", "W", "N1", "N2", "N3", "REM"]


def test_stages_in_the_words_of_languages_and_programs(bench: Bench) -> None:
    bench.take("05_stage_vocabularies")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert len(bench.records()) == 6
    for record in bench.records().values():
        assert notes(record) == [(30.0 * i, 30.0, stage) for i, stage in enumerate(NIGHT)]
    assert "36 windows" in bench.run("tokenize", "generic/staging").said


def test_concepts_of_the_sleep_research_resource_and_stages_of_profusion(bench: Bench) -> None:
    bench.take("33_nsrr_sdo_and_profusion")
    assert bench.run("ingest", "generic", "raw").code == 0
    for record in bench.records().values():
        assert [(n[0], n[2]) for n in notes(record)] == [
            (0.0, "W"),
            (30.0, "N1"),
            (60.0, "N2"),
            (90.0, "REM"),
        ]


# --- F: epochs


def staged_windows(bench: Bench, *options: object) -> dict[str, list[tuple[float, str]]]:
    """Recording -> start and stage of its windows."""
    assert bench.run("ingest", "generic", "raw").code in {0, 3}
    outcome = bench.run("tokenize", "generic/staging", "--force-new", *options)
    assert outcome.code == 0, outcome.said
    index = pl.read_parquet(bench.folder / "ws" / "tokens" / "generic-staging" / "index.parquet")
    windows: dict[str, list[tuple[float, str]]] = {}
    for row in index.sort("recording_id", "start").iter_rows(named=True):
        windows.setdefault(row["recording_id"], []).append((row["start"], row["label"]))
    return windows


@pytest.mark.slow
def test_stages_of_20_and_of_5_seconds_are_read(bench: Bench) -> None:
    bench.take("06_epochs_20s_5s_1s")
    stages = ["W"] * 2 + ["N2"] * 4 + ["REM"] * 2
    wanted = [(30.0 * i, stage) for i, stage in enumerate(stages)]
    assert staged_windows(bench) == {"dreams5": wanted, "mass20": wanted}
    stages = ["W"] * 3 + ["N2"] * 6 + ["REM"] * 3
    wanted = [(20.0 * i, stage) for i, stage in enumerate(stages)]
    assert staged_windows(bench, "--window", 200) == {"dreams5": wanted, "mass20": wanted}


def test_stages_whose_ends_lack_a_sample_are_whole_epochs(bench: Bench) -> None:
    bench.take("40_stage_durations_29p99_and_suffix")
    wanted = list(zip([0.0, 30.0, 60.0, 90.0], ["W", "N1", "N2", "REM"], strict=True))
    assert staged_windows(bench) == {"inclusive_end": wanted}


def test_two_scorers_give_no_epoch_twice(bench: Bench) -> None:
    bench.take("08_two_scorers_overlap")
    (windows,) = staged_windows(bench).values()
    assert [start for start, _ in windows] == [0.0, 30.0, 60.0, 90.0]


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ("", ["W", "N1", "N2", "N2"]),
        ('scorer = "2"', ["W", "W", "N3", "N2"]),
        ('scorer = "consensus"', ["W", None, None, "N2"]),
    ],
)
def test_two_scorers_are_named_and_one_is_used(
    bench: Bench, labels: str, wanted: list[str | None]
) -> None:
    bench.take("08_two_scorers_overlap")
    (bench.folder / "map.toml").write_text(f"[labels]\n{labels}\n" if labels else "")
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml")
    assert outcome.code == 0
    assert ("differ in 2 of 4 epochs" in outcome.said) == (not labels)
    (record,) = bench.records().values()
    assert notes(record) == [(30.0 * i, 30.0, stage) for i, stage in enumerate(wanted) if stage]


# --- G: labels elsewhere


def stages(record: Record, begin: float = 0.0) -> list[str]:
    """The labels of epochs of 30 s, one after the other."""
    assert [n[:2] for n in notes(record)] == [
        (begin + 30.0 * i, 30.0) for i in range(len(record.annotations))
    ]
    return [n.label for n in record.annotations]


def test_events_of_bids_are_inherited(bench: Bench) -> None:
    bench.take("03_bids_events_inherited")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert [stages(record) for record in bench.records().values()] == [["W", "N2", "N2"]] * 2


def test_annotations_in_a_second_edf_are_those_of_the_first(bench: Bench) -> None:
    bench.take("09_annotations_in_second_edf")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert set(bench.records()) == {"01-03-0001 PSG", "01-03-0002 PSG"}
    for record in bench.records().values():
        assert stages(record, 3.5) == ["W", "N2", "N2", "REM"]


def test_one_stage_a_line_beside_a_recording(bench: Bench) -> None:
    bench.take("10_one_stage_per_line")
    outcome = bench.run("ingest", "generic", "raw")
    assert outcome.code == 0
    assert "read as sleep stages: 0 W, 1 N1, 2 N2, 5 REM" in outcome.said
    found = {name: stages(record) for name, record in bench.records().items()}
    ucddb = ["W", "N2", "N2", "N1", "REM"]
    assert found == {"night3": ["W", "N2", "N2", "N3", "REM"], "ucddb001": ucddb, "ucddb002": ucddb}


def test_a_table_of_annotations_beside_a_recording(bench: Bench) -> None:
    bench.take("38_annotation_tables_per_recording")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert {name: stages(r) for name, r in bench.records().items()} == {
        f"sub{i}": ["W", "N2", "N2"] for i in (1, 2, 3)
    }
    (bench.folder / "map.toml").write_text('[[files]]\npattern = "*"\n')
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml", "--force-new")
    assert (outcome.code, len(bench.records())) == (0, 3)


# --- H: channels


def test_biosemi_triggers_are_points_and_status_is_no_input(bench: Bench) -> None:
    bench.take("04_biosemi_status")
    ingested = bench.run("ingest", "generic", "raw")
    assert ingested.code == 0
    assert "'Status'" in ingested.err
    record = bench.records()["rec"]
    assert [signal.channel for signal in record.signals] == ["A1", "A2"]
    points = [(2.0, 0.0, "7"), (5.0, 0.0, "202"), (9.0, 0.0, "7"), (14.0, 0.0, "65")]
    assert notes(record) == points
    assert "('A1', 'A2')" in bench.run("tokenize", "generic").out


@pytest.mark.slow
def test_other_names_of_one_derivation_are_named_with_the_line_that_makes_them_one(
    bench: Bench,
) -> None:
    bench.take("23_channel_synonyms")
    assert bench.run("ingest", "generic", "raw").code == 0
    said = bench.run("tokenize", "generic/staging").err
    names = ["EEG(sec)", "EEG2", "EEG 2", "EEG sec", "EEG(SEC)"]
    assert all(f"'{name}' in 1" in said for name in names)
    line = said[said.index("files = [") :].split(" and ingest again")[0]
    (bench.folder / "pasted.toml").write_text(line + "\n")
    again = ["ingest", "generic", "raw", "--map", "pasted.toml", "--force-new"]
    assert bench.run(*again).code == 0
    tokenized = bench.run("tokenize", "generic/staging", "--force-new")
    assert "'EEG', 'EOG(L)'" in tokenized.out
    for name, record in bench.records().items():
        with pyedflib.EdfReader(str(bench.folder / "raw" / f"{name}.edf")) as reader:
            np.testing.assert_allclose(physical(record, "EEG"), reader.readSignal(0), atol=1e-6)


def test_several_names_for_one_channel_of_a_map_are_alternatives(bench: Bench) -> None:
    bench.take("23_channel_synonyms")
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    channels = [[s.channel for s in record.signals] for record in bench.records().values()]
    assert channels == [["C3-A2"]] * 5


@pytest.mark.slow
def test_a_derivation_is_advised_and_never_another_signal(bench: Bench) -> None:
    raw = bench.take("24_reference_derivation")
    (bench.folder / "map.toml").write_text('files = [{channels = {"C4-M1" = "C4 - M1"}}]\n')
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    for name, record in bench.records().items():
        with pyedflib.EdfReader(str(raw / f"{name}.edf")) as reader:
            difference = reader.readSignal(0) - reader.readSignal(1)
        np.testing.assert_allclose(physical(record, "C4-M1"), difference, atol=1e-3)
    small = ["--set", "model.tokenizer=patch", "--set", "model.patch=100", *RETENTION]
    steps = ["--steps", "2", "--batch-size", "4"]
    staging = ["--data", "generic/staging"]
    assert bench.run("pretrain", *staging, *small, *steps, "--run", "base").code == 0
    assert bench.run("finetune", "base", *staging, *steps, "--run", "stager").code == 0
    refused = bench.run("predict", "stager", "raw/n0.edf", "--out", "refused")
    assert refused.code == 4
    assert "C4-M1=C4'" not in refused.err
    words = shlex.split(refused.err[refused.err.index("--map") :].split("\n")[0].rstrip("."))
    assert words == ["--map", "C4-M1=C4 - M1"]
    assert bench.run("predict", "stager", "raw/n0.edf", *words, "--out", "advised").code == 0
    assert bench.run("predict", "stager", "ws/cache/generic", "--out", "stored").code == 0
    advised, stored = (
        pl.read_parquet(bench.folder / out / "predictions.parquet").filter(
            pl.col("recording_id") == "n0"
        )
        for out in ("advised", "stored")
    )
    columns = [name for name in stored.columns if name.startswith("p_")]
    np.testing.assert_allclose(advised[columns], stored[columns], atol=1e-5)


# --- J: units


def test_every_spelling_of_a_unit_gives_the_same_level(bench: Bench) -> None:
    bench.take("22_unit_spellings")
    ingested = bench.run("ingest", "generic", "raw")
    assert ingested.code == 0
    assert "r3_dotV.edf:C4-M1: 'C4-M1' is in '.V'" in ingested.err
    assert "r6_empty.edf:C4-M1: 'C4-M1' states no unit" in ingested.err
    tokenized = bench.run("tokenize", "generic", "--normalise", "none")
    assert tokenized.code == 0
    assert "another unit" not in tokenized.err
    windows = open_windows(bench.folder / "ws" / "tokens" / "generic")
    assert set(windows.index["recording_id"]) == set(bench.records())
    assert windows.manifest.units == ["uV"]
    values = windows.values(None)
    for name in bench.records():
        rows = windows.index["recording_id"] == name
        assert values[rows.to_numpy()].std() == pytest.approx(100, rel=0.03)


def test_units_of_the_map_hold_for_every_file(bench: Bench) -> None:
    bench.take("22_unit_spellings")
    (bench.folder / "units.toml").write_text('[units]\n"C4-*" = "uV"\n')
    assert bench.run("ingest", "generic", "raw", "--map", "units.toml").code == 0
    for record in bench.records().values():
        assert record.signals[0].unit == "uV"
        assert physical(record, "C4-M1").std() == pytest.approx(100, rel=0.03)


# --- K: one recording in several files


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_file_a_channel_is_one_recording(bench: Bench, is_mapped: bool) -> None:
    raw = bench.take("29_one_edf_per_channel")
    (bench.folder / "map.toml").write_text("[[files]]\nmatch = '(?P<recording>[^/]+)/'\n")
    options = ["--map", "map.toml"] if is_mapped else []
    ingested = bench.run("ingest", "generic", "raw", *options)
    assert ingested.code == 0
    assert "6 files are 2 recordings" in ingested.err
    assert sorted(bench.records()) == ["s1", "s2"]
    for name, record in bench.records().items():
        assert sorted(s.channel for s in record.signals) == ["EEG L", "EEG R", "dX"]
        for signal in record.signals:
            with pyedflib.EdfReader(str(raw / name / f"{signal.channel}.edf")) as reader:
                np.testing.assert_allclose(
                    physical(record, signal.channel), reader.readSignal(0), atol=1e-6
                )
    assert "3 channels" in bench.run("tokenize", "generic").out


@pytest.mark.slow
def test_files_are_kept_apart_as_the_line_says(bench: Bench) -> None:
    bench.take("29_one_edf_per_channel")
    said = bench.run("ingest", "generic", "raw").err
    line = said[said.index("files = [") :].split("\n")[0].rstrip(".")
    (bench.folder / "apart.toml").write_text(line + "\n")
    assert bench.run("ingest", "generic", "raw", "--map", "apart.toml", "--force-new").code == 0
    assert len(bench.records()) == 6


# --- L: orientation


def test_an_array_of_channels_is_turned_and_said(bench: Bench) -> None:
    raw = bench.take("21_npy_channels_first_and_epochs")
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml")
    assert (outcome.code, "taken for 4 channels of 2000 samples" in outcome.said) == (0, True)
    for name, record in bench.records().items():
        assert np.array_equal([s.samples for s in record.signals], np.load(raw / f"{name}.npy"))


def test_arrays_of_epochs_with_labels_beside(bench: Bench) -> None:
    raw = bench.take("21_npy_channels_first_and_epochs")
    epochs = np.random.default_rng(0).standard_normal((10, 4, 200)).astype(np.float32)
    np.save(raw / "s3_epochs.npy", epochs)
    np.save(raw / "s3_labels.npy", np.arange(10) % 2)
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    records = bench.records()
    assert set(records) == {"s1_raw", "s2_raw", "s3_epochs"}
    assert [label for *_, label in notes(records["s3_epochs"])] == ["0", "1"] * 5
    pieces = [s.samples for s in records["s3_epochs"].signals if s.channel == "channel 3"]
    assert np.array_equal(pieces, epochs[:, 2])


# --- N: marks


def test_a_mark_at_the_start_of_each_minute_is_that_minute(bench: Bench) -> None:
    bench.take("25_apnea_ecg_minutes")
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml")
    assert (outcome.code, "marks every 60 s" in outcome.said) == (0, True)
    for record in bench.records().values():
        texts = ["N", "N", "A", "N", "N"]
        assert notes(record) == [(60.0 * i, 60.0, text) for i, text in enumerate(texts)]
        minute = physical(record, "ECG")[120 * 100 : 180 * 100]
        assert np.mean(minute) == pytest.approx(2.5, abs=0.01)
    outcome = bench.run("tokenize", "generic/annotations", "--window", 6000)
    assert (outcome.code, "10 windows of 6000" in outcome.said) == (0, True)
    assert bench.run("tokenize", "generic/points", "--window", 6000).code == 4


# --- points applied; checksums


CINC = SHARED / "data" / "complete" / "cinc2017" / "training2017"


def take_cinc(bench: Bench, count: int) -> Path:
    """The first records of CinC 2017 in `raw`, with the table of all classes."""
    raw = bench.folder / "raw"
    raw.mkdir()
    shutil.copy(CINC / "REFERENCE.csv", raw)
    for number in range(1, count + 1):
        for ending in ("hea", "mat"):
            shutil.copy(CINC / f"A{number:05d}.{ending}", raw)
    return raw


@pytest.mark.skipif(not CINC.is_dir(), reason="CinC 2017 is not here")
def test_records_without_checksums_are_read_with_the_classes_beside_them(bench: Bench) -> None:
    raw = take_cinc(bench, 40)
    outcome = bench.run("ingest", "generic", "raw")
    assert outcome.code == 0
    assert "40 headers state the checksum 0" in outcome.said
    assert "REFERENCE.csv: names 40 recordings and their classes" in outcome.said
    classes = dict(csv.reader((raw / "REFERENCE.csv").read_text().splitlines()))
    records = bench.records()
    assert len(records) == 40
    for name, record in records.items():
        values, header = wfdb.rdsamp(str(raw / name))
        assert np.allclose(physical(record, "ECG"), values[:, 0], atol=1e-6)
        assert (record.signals[0].rate, record.signals[0].unit) == (header["fs"], "mV")
        assert record.attributes["label"] == classes[name]
    assert bench.run("tokenize", "generic/classification", "--window", 1500).code == 0


@pytest.mark.skipif(not CINC.is_dir(), reason="CinC 2017 is not here")
def test_a_map_names_the_classes_of_a_table(bench: Bench) -> None:
    raw = take_cinc(bench, 20)
    names = {"N": "normal", "A": "atrial fibrillation", "O": "other rhythm"}
    lines = [f'{letter} = "{name}"' for letter, name in names.items()]
    (bench.folder / "map.toml").write_text("\n".join(["[labels]", *lines]))
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    letters = dict(csv.reader((raw / "REFERENCE.csv").read_text().splitlines()))
    for name, record in bench.records().items():
        assert record.attributes["label"] == names.get(letters[name], letters[name])


@pytest.mark.skipif(not CINC.is_dir(), reason="CinC 2017 is not here")
def test_a_wrong_checksum_stays_a_refusal(bench: Bench) -> None:
    """Also one of 0 where another header of the folder has one, for then they are filled in."""
    raw = take_cinc(bench, 2)
    header = raw / "A00001.hea"
    header.write_text(header.read_text().replace(" -127 0 0 ECG", " -127 77 0 ECG"))
    outcome = bench.run("ingest", "generic", "raw")
    assert (outcome.code, outcome.said.count("do not add up to the checksum")) == (4, 2)
