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
import pyedflib
import pytest
from samples import SHARED
from small import RETENTION

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.tokens.windows import open_windows
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


# --- E: vocabularies


# --- F: epochs


# --- G: labels elsewhere


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


def test_files_are_kept_apart_as_the_line_says(bench: Bench) -> None:
    bench.take("29_one_edf_per_channel")
    said = bench.run("ingest", "generic", "raw").err
    line = said[said.index("files = [") :].split("\n")[0].rstrip(".")
    (bench.folder / "apart.toml").write_text(line + "\n")
    assert bench.run("ingest", "generic", "raw", "--map", "apart.toml", "--force-new").code == 0
    assert len(bench.records()) == 6


# --- L: orientation


# --- N: marks


# --- points applied; checksums
