"""Recordings as people have them, with features of public reports: what is read, and what is said.

Each case is a folder of `shared/cases/recordings`, whose README states what is right; it is read by
the command line, from a copy, under a relative path.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
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


TABLES = ("00_first_use_flow", "12_csv_time_in_ms", "20_csv_one_dropped_sample")


@pytest.mark.parametrize("name", TABLES)
def test_the_three_steps_of_a_first_use_work_as_printed(bench: Bench, name: str) -> None:
    bench.take(name)
    (bench.folder / "map.toml").unlink(missing_ok=True)
    refused = bench.run("ingest", "generic", "./raw")
    assert refused.code == 4
    for _ in range(2):
        command = refused.said.split("bitimely ")[-1].splitlines()[0].rstrip(".")
        refused = bench.run(*shlex.split(command))
        assert refused.code in {0, 3}, refused.said
    assert bench.records()


def test_another_map_is_read_with_the_command_of_the_message(bench: Bench) -> None:
    bench.take("00_first_use_flow")
    assert bench.run("ingest", "generic", "raw", "--init-map", "map.toml").code == 0
    assert bench.run("ingest", "generic", "raw", "--map", "map.toml").code == 0
    text = (bench.folder / "map.toml").read_text()
    text = text.replace('channels = ["ppg"]', 'channels = {"ppg" = "PPG"}')
    (bench.folder / "other.toml").write_text(text)
    refused = bench.run("ingest", "generic", "raw", "--map", "other.toml")
    assert refused.code == 2
    command = refused.said.split("To replace it: bitimely ")[1].splitlines()[0].rstrip(".")
    assert bench.run(*shlex.split(command)).code == 0
    (record,) = bench.records().values()
    assert [signal.channel for signal in record.signals] == ["PPG"]


# --- A: paths; B: the bridge to MNE


# --- C: missing values


# --- D: time and units of tables; I: dialects; M: gaps


# --- E: vocabularies


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


# --- G: labels elsewhere


# --- H: channels


# --- J: units


# --- K: one recording in several files


# --- L: orientation


# --- N: marks


# --- points applied; checksums
