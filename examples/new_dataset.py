"""A data set of one's own is one function: here, two noisy sines a subject, labelled by their
frequency.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bitimely_core import cache, tokens
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import Annotation, IngestUnit, Record, Signal

STATES = {"slow": "slow", "fast": "fast"}  # annotation -> class
VIEW = View(
    channels=("A",),
    rate=100.0,
    window=200,
    task="classification",
    classes=("slow", "fast"),
    labels=STATES,
    epoch=2.0,
)
FACTS = DatasetFacts(
    title="Two sines",
    views={"": VIEW},
    licence="CC0",
    url="",
    download="",
    paper={},
    rules={},
    needs_source=False,
)


def record(number: int) -> Record:
    """Twenty seconds of one subject: ten slow, ten fast."""
    time = np.arange(1000) / 100
    wave = np.concatenate([np.sin(2 * np.pi * 3 * time), np.sin(2 * np.pi * 8 * time)])
    samples = np.round(100 * wave + np.random.default_rng(number).normal(0, 20, 2000)).astype(
        np.int16
    )
    notes = [Annotation(0, 10, "slow"), Annotation(10, 10, "fast")]
    return Record(
        recording_id=f"r{number}",
        subject_id=f"s{number}",
        signals=[Signal("A", 100.0, "uV", samples, 0.1)],
        annotations=notes,
    )


@datasets(FACTS)
def two_sines(source, options):  # type: ignore[no-untyped-def]
    """Ten subjects with two sines each."""
    yield from (IngestUnit(name=f"r{n}", files=(), read=partial(record, n)) for n in range(10))


with TemporaryDirectory() as home:
    cache.ingest("two-sines", None, Path(home) / "cache")
    windows = tokens.build(Path(home) / "cache", out=Path(home) / "tokens")
    print({split: len(windows[split]) for split in ("train", "validation", "test")})
