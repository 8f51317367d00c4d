"""Recordings as people have them, with features of public reports: what is read, and what is said.

Each case is a folder of `shared/cases/recordings`, whose README states what is right; it is read by
the command line, from a copy, under a relative path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from samples import SHARED

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.types import Record

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


# --- A: paths; B: the bridge to MNE


# --- C: missing values


# --- D: time and units of tables; I: dialects; M: gaps


def column(path: Path, place: int = 1, **options: Any) -> np.ndarray:
    """A column of a table by pandas, as float32."""
    return pd.read_csv(path, **options).iloc[:, place].to_numpy(np.float32)


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


@pytest.mark.parametrize("mapped", [False, True])
def test_date_times_are_a_clock(bench: Bench, mapped: bool) -> None:
    raw = bench.take("14_csv_datetime_column")
    options = ("--map", "map.toml") if mapped else ()
    outcome = bench.run("ingest", "generic", "raw", *options)
    assert outcome.code == 0
    assert "2016" not in outcome.said + json.dumps(bench.report())
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


def test_an_empatica_e4_is_read_as_it_is(bench: Bench) -> None:
    raw = bench.take("16_empatica_e4")
    outcome = bench.run("ingest", "generic", "raw", "--keep-dates")
    assert outcome.code == 0
    assert "Empatica E4" in outcome.out
    records = bench.records()
    assert [(s.rate, len(s.samples)) for s in records["p1/BVP"].signals] == [(64.0, 3840)]
    assert [(s.rate, len(s.samples)) for s in records["p2/ACC"].signals] == [(32.0, 1920)] * 3
    wanted = np.loadtxt(raw / "p2" / "ACC.csv", delimiter=",", skiprows=2, dtype=np.float32)
    np.testing.assert_array_equal([s.samples for s in records["p2/ACC"].signals], wanted.T)
    start = datetime.fromtimestamp(1544027000, UTC).replace(tzinfo=None).isoformat()
    assert records["p1/BVP"].start_time == start


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


def test_tables_work_in_the_steps_that_are_printed(bench: Bench) -> None:
    bench.take("00_first_use_flow")
    assert bench.run("ingest", "generic", "raw").code == 0
    assert [s.rate for s in bench.records()["p2"].signals] == [50.0]
    assert bench.run("ingest", "generic", "raw", "--init-map", "map.toml").code == 0
    outcome = bench.run("ingest", "generic", "raw", "--map", "map.toml", "--force-new")
    assert (outcome.code, [s.rate for s in bench.records()["p2"].signals]) == (0, [50.0])


# --- E: vocabularies


# --- F: epochs


# --- G: labels elsewhere


# --- H: channels


# --- J: units


# --- K: one recording in several files


# --- L: orientation


# --- N: marks


# --- points applied; checksums
