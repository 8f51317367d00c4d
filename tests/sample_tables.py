"""Tables of samples that tests write, and what is read of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core.cache import ingest, open_cache
from bitimely_core.types import Record

ROWS = 300
WAVE = np.round(np.sin(np.arange(ROWS) / 7), 4)


def comma(value: float) -> str:
    return f"{value:.4f}".replace(".", ",")


def lines(head: str, row: Callable[[int, float], str]) -> str:
    """A table with a row for each value of `WAVE`."""
    return head + "".join(f"{row(i, value)}\n" for i, value in enumerate(WAVE.tolist()))


def read(folder: Path, name: str, text: str | bytes, chosen: str = "") -> Record:
    """The only recording of a folder with this one file; `chosen`: a map."""
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    options: dict[str, Any] = {"keep_dates": True}
    if chosen:
        (folder / "map.toml").write_text(chosen)
        options["options"] = {"map": str(folder / "map.toml")}
    report = ingest("generic", raw, folder / "cache", **options)
    assert report["exit_code"] == 0
    (record,) = open_cache(folder / "cache").records()
    return record


def messages(folder: Path) -> str:
    """The report of an ingest without its checksums, whose digits can spell any year."""
    report = (folder / "cache" / "ingest_report.json").read_text()
    return re.sub(r"\b[0-9a-f]{64}\b", "", report)


def read_folder(folder: Path, chosen: Path | None = None) -> dict[str, Record]:
    """The recordings of `folder / "raw"`, by their names."""
    options = {"map": str(chosen)} if chosen else None
    cache = folder / ("mapped" if chosen else "cache")
    report = ingest("generic", folder / "raw", cache, options=options, keep_dates=True)
    assert report["exit_code"] == 0
    return {record.recording_id: record for record in open_cache(cache).records()}


def find_values(record: Record, channel: str) -> tuple[np.ndarray, np.ndarray]:
    """Times and physical values of a channel, by its segments."""
    parts = [signal for signal in record.signals if signal.channel == channel]
    times = [s.onset + np.arange(len(s.samples)) / s.rate for s in parts]
    return np.concatenate(times), np.concatenate([s.samples * s.scale for s in parts])
