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


# --- D: time and units of tables; I: dialects; M: gaps


# --- E: vocabularies


# --- F: epochs


# --- G: labels elsewhere


# --- H: channels


# --- J: units


# --- K: one recording in several files


# --- L: orientation


# --- N: marks


# --- points applied; checksums
