"""Recordings as people have them, with features of public reports: what is read, and what is said.

Each case is a folder of `shared/cases/recordings`, whose README states what is right; it is read by
the command line, from a copy, under a relative path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


def test_the_missing_word_of_bids_is_no_label(bench: Bench) -> None:
    bench.take("02_bids_trialtype_na")
    outcome = bench.run("ingest", "generic", "raw")
    assert (outcome.code, "state no onset or no label: 1" in outcome.said) == (0, True)
    for record in bench.records().values():
        assert notes(record) == [(10.5, 0.0, "1040"), (20.5, 0.0, "2049"), (30.5, 0.0, "1040")]


# --- D: time and units of tables; I: dialects; M: gaps


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


# --- J: units


# --- K: one recording in several files


# --- L: orientation


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
