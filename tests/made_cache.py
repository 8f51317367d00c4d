"""A cache of recordings in memory, with a data set of its own, for tests of windows."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from bitimely_core import registry, tokens
from bitimely_core.registry import DatasetFacts, View
from bitimely_core.schemas.ingest_records import CacheManifest, CacheSettings
from bitimely_core.store import locks, storage
from bitimely_core.types import Annotation, Record, Signal

RATE = 20.0
STAGES = {"Sleep stage W": "W", "Sleep stage 1": "N1", "Sleep stage 2": "N2"}
VIEWS = {
    "": View(channels=("eeg", "temp", "marker"), rate=RATE, window=40, hold=("marker",)),
    "staging": View(
        channels=("eeg",),
        rate=RATE,
        window=40,
        task="classification",
        classes=("W", "N1", "N2"),
        labels=STAGES,
        epoch=2.0,
        trim=("W", 4.0),
    ),
    "age": View(channels=("eeg",), rate=RATE, window=100, task="regression", target="age"),
    "sex": View(channels=("eeg",), rate=RATE, window=100, task="classification", target="sex"),
    "finds": View(
        channels=("eeg",),
        rate=RATE,
        window=100,
        task="multilabel",
        classes=("A", "B", "C"),
        target="finds",
    ),
    "open": View(channels=(), rate=0.0, window=0),
}


class Memory:
    """A cache that lives in memory, with what `tokens` uses of an open cache."""

    def __init__(self, records: list[Record], dataset: str = "tiny", generation: int = 1) -> None:
        self.held, self.dataset, self.folder = records, dataset, Path("cache") / dataset
        settings = CacheSettings(dataset=dataset, version="0", options={})
        self.manifest = CacheManifest.model_construct(
            kind="recordings",
            settings=settings,
            manifest_sha256=hashlib.sha256(f"{generation}".encode()).hexdigest(),
        )

    def records(self, channels: list[str] | None = None) -> Iterator[Record]:
        for record in self.held:
            yield replace(
                record,
                signals=[s for s in record.signals if channels is None or s.channel in channels],
            )

    def subjects(self) -> pl.DataFrame:
        return pl.DataFrame({"subject_id": [record.subject_id for record in self.held]})

    def signals(self) -> pl.DataFrame:
        rows = [
            (record.recording_id, s.channel, s.rate, s.unit, len(s.samples))
            for record in self.held
            for s in record.signals
        ]
        schema = {
            "recording_id": pl.String,
            "channel": pl.String,
            "rate": pl.Float64,
            "unit": pl.String,
            "n_samples": pl.Int64,
        }
        return pl.DataFrame(rows, schema=schema, orient="row")

    def annotations(self) -> pl.DataFrame:
        rows = [(r.recording_id, *note) for r in self.held for note in r.annotations]
        schema = {
            "recording_id": pl.String,
            "onset": pl.Float64,
            "duration": pl.Float64,
            "label": pl.String,
        }
        return pl.DataFrame(rows, schema=schema, orient="row")

    def recording_ids(self) -> list[str]:
        return [record.recording_id for record in self.held]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DatasetFacts(
        title="tiny", views=VIEWS, licence="", url="", download="", paper={}, rules={}
    )
    monkeypatch.setitem(
        registry.datasets._items,
        "tiny",
        registry.Entry("tiny", lambda source, options: iter(()), facts),
    )


def record(
    subject: int, *, seconds: float = 30.0, seed: int | None = None, night: int = 0, **change: Any
) -> Record:
    """eeg at 20 Hz, temp and marker at 1 Hz, int16, each with its own scale and offset; W W N1 N1
    N2 ? ... in epochs of 2 s.
    """
    rng = np.random.default_rng([subject if seed is None else seed, night])
    n = int(seconds)
    signals = [
        Signal(
            "eeg",
            RATE,
            "uV",
            rng.integers(-3000, 3000, int(n * RATE)).astype(np.int16),
            0.1 + 0.01 * subject,
            -3.0,
        ),
        # its interpolation never ends on half a step
        Signal("temp", 1.0, "C", 20 * rng.integers(-25, 25, n).astype(np.int16), 0.01, 37.0),
        Signal("marker", 1.0, "", rng.integers(0, 3, n).astype(np.int16), 1.0, 0.0),
    ]
    cycle = ["Sleep stage W"] * 2 + ["Sleep stage 1"] * 2 + ["Sleep stage 2", "Sleep stage ?"]
    notes = [Annotation(2.0 * i, 2.0, cycle[i % 6]) for i in range(n // 2)]
    found = Record(
        recording_id=f"r{subject:03d}-{night}",
        subject_id=f"s{subject:03d}",
        signals=signals,
        annotations=notes,
        attributes={
            "age": 20.0 + subject,
            "sex": "mf"[subject % 2],
            "finds": ["A", "C"][: subject % 3],
            "fold": subject % 10 + 1,
        },
    )
    return replace(found, **change)


def records(count: int = 24, **change: Any) -> list[Record]:
    return [record(subject, **change) for subject in range(count)]


def physical(found: Record, channel: str) -> np.ndarray:
    """The channel's physical values in float64, its segments one after the other."""
    return np.concatenate(
        [s.samples * np.float64(s.scale) + s.offset for s in found.signals if s.channel == channel]
    )


def files(folder: Path) -> dict[str, str]:
    return {
        p.name: storage.hash_file(p) for p in sorted(folder.iterdir()) if p.name != locks.LOCK_FILE
    }


def build(held: list[Record], folder: Path, **options: Any) -> tokens.Windows:
    memory: Any = Memory(held, generation=options.pop("generation", 1))
    return tokens.build(memory, out=folder, **options)


def planned(held: list[Record], **options: Any) -> dict[str, Any]:
    memory: Any = Memory(held)
    return tokens.plan(memory, **options)


def labels(windows: tokens.Windows, rows: Any = None) -> np.ndarray:
    found = windows.targets(rows)
    assert found is not None
    return found


def missing(held: list[Record]) -> list[Record]:
    """The second recording has float32 eeg with a stretch of NaN, the third none observed."""
    first = held[1].signals[0].samples.astype(np.float32)
    first[30:70] = np.nan
    held[1].signals[0] = held[1].signals[0]._replace(samples=first)
    held[2].signals[0] = held[2].signals[0]._replace(samples=np.full(600, np.nan, np.float32))
    return held


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "append":
        data += bytes(512)
    elif how == "truncate":
        del data[-64:]
    path.write_bytes(data)
    if how == "delete":
        path.unlink()
