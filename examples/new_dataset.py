"""A data set of one's own is one function: here, two noisy sines a subject, labelled by their frequency."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bitimely_core import cache, tokens
from bitimely_core.batch import Annotation, Record, Signal, Unit
from bitimely_core.formats.source import Source
from bitimely_core.registry import DatasetFacts, View, datasets

VIEW = View(
    channels=("A",),
    rate=100.0,
    window=200,
    task="classification",
    classes=("slow", "fast"),
    labels={"slow": "slow", "fast": "fast"},
    epoch=2.0,
)


def record(number: int) -> Record:
    """Twenty seconds of one subject: ten slow, ten fast."""
    time = np.arange(1000) / 100
    noise = np.random.default_rng(number).normal(0, 20, 2000)
    wave = np.concatenate([np.sin(2 * np.pi * 3 * time), np.sin(2 * np.pi * 8 * time)])
    samples = np.round(100 * wave + noise).astype(np.int16)
    notes = [Annotation(0, 10, "slow"), Annotation(10, 10, "fast")]
    return Record(recording_id=f"r{number}", subject_id=f"s{number}", signals=[Signal("A", 100.0, "uV", samples, 0.1)], annotations=notes)


@datasets(
    DatasetFacts(
        title="Two sines",
        views={"": VIEW},
        licence="CC0",
        url="",
        download="made here",
        paper={},
        rules={},
        clinical=False,
        needs_source=False,
    )
)
def two_sines(source: Source | None, options: dict[str, Any]) -> Iterator[Unit]:
    """Ten subjects with two sines each."""
    yield from (Unit(name=f"r{n}", files=(), read=partial(record, n)) for n in range(10))


if __name__ == "__main__":
    with TemporaryDirectory() as home:
        cache.ingest("two-sines", None, Path(home) / "cache")
        windows = tokens.build(Path(home) / "cache", out=Path(home) / "tokens")
        print({split: len(windows[split]) for split in ("train", "validation", "test")})
