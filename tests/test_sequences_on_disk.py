"""Large token sets of events are mapped from the disk: the same batches and losses as in memory,
with memory that does not grow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from bitimely_cli.main import main
from bitimely_core import data, tokens
from bitimely_core.schemas.tokens import PredictionStatistics, SequenceManifest
from bitimely_core.store import storage
from bitimely_core.store.records import StoredFile
from bitimely_core.tokens import sequences

MEASURE = """
import resource, sys
from pathlib import Path
from bitimely_core import data, tokens
from bitimely_core.tokens import sequences
sequences.IN_MEMORY = int(sys.argv[2])
read = lambda: int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS")).split()[1]) / 1024
before = read()
made = tokens.open_tokens(sys.argv[1], verify=False)
most = 0.0
for batch in data.batches(made["train"], 64)(0):
    most = max(most, read())
print(most - before)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("disk")
    for line in (
        "ingest synthetic-claims --subjects 400",
        "tokenize synthetic-claims --no-select --min-codes 3 --name few",
    ):
        assert main([*line.split(), "-w", str(home)]) in {0, 3}
    return home


@pytest.mark.slow
def test_batches_are_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name for path in (home / "tokens" / "few").iterdir()}
    kept = tokens.open_tokens(home / "tokens" / "few")
    monkeypatch.setattr(sequences, "IN_MEMORY", 0)
    mapped = tokens.open_tokens(home / "tokens" / "few")
    assert isinstance(kept, tokens.EventSequences)
    assert isinstance(mapped, tokens.EventSequences)
    assert isinstance(mapped.flat, np.memmap)
    assert not isinstance(kept.flat, np.memmap)
    for one, other in zip(
        data.batches(kept["train"], 32, ties="shuffle")(1),
        data.batches(mapped["train"], 32, ties="shuffle")(1),
        strict=True,
    ):
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or bool((a == b).logical_or((a != a) & (b != b)).all())
    np.testing.assert_array_equal(kept.counts(), mapped.counts())
    assert {path.name for path in (home / "tokens" / "few").iterdir()} == before, (
        "the scratch file has no name"
    )


@pytest.mark.slow
def test_losses_are_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for name, most in (("memory", 1 << 28), ("disk", 0)):
        monkeypatch.setattr(sequences, "IN_MEMORY", most)
        argv = f"pretrain --preset tiny --data few --steps 4 --batch-size 16 --run {name} -w {home}".split()
        assert main(argv) == 0
        lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1]
    assert any(losses[0])


def write_large(folder: Path, like: Path, n_shards: int, of: int = 1000, events: int = 500) -> Path:
    """A token set of shards of made-up sequences, with the vocabulary of `like`."""
    folder.mkdir()
    old, draw = SequenceManifest.read(like), np.random.default_rng(0)
    vocabulary = pl.read_parquet(like / "vocab.parquet")
    shards: dict[str, StoredFile] = {}
    subjects = n_shards * of
    for k in range(n_shards):
        codes = draw.integers(5, 5 + vocabulary.height, (of, events), dtype=np.int32)
        times = np.cumsum(draw.random((of, events), np.float32), 1)
        frame = pl.DataFrame(
            {
                "subject_id": np.arange(k * of, (k + 1) * of),
                "codes": list(codes),
                "times": list(times),
                "split": ["train"] * of,
            },
            schema_overrides={"codes": pl.List(pl.Int32), "times": pl.List(pl.Float32)},
        )
        labels = [pl.lit(0, pl.Int8).alias(f"y_{name}") for name in old.class_names]
        shards |= sequences.write_shard(
            folder,
            k,
            frame.with_columns(
                *labels,
                age0_months=pl.lit(700, pl.Int16),
                sex=pl.lit(1, pl.UInt8),
                t_index=pl.lit(None, pl.Float32),
            ),
        )
    changed = {"base": "x", "events": subjects * events, "shards": [], "findings": []}
    sequences.publish_sequences(
        storage.make_folder(folder),
        old.model_copy(update=changed),
        shards=shards,
        vocabulary=vocabulary,
        ratios=pl.read_parquet(like / "ratios.parquet"),
        statistics=PredictionStatistics(
            rows=subjects, without_codes=0, not_in_cache=0, events=subjects * events
        ),
    )
    return folder


@pytest.mark.slow
def test_memory_does_not_grow_with_the_events(home: Path, tmp_path: Path) -> None:
    """Four and sixteen shards of 500,000 events: 16 and 64 MB of codes and times."""
    found = {}
    for n_shards in (4, 16):
        folder = write_large(tmp_path / f"t{n_shards}", home / "tokens" / "few", n_shards)
        for place, most in (("disk", 0), ("memory", 1 << 40)):
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, str(folder), str(most)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            found[n_shards, place] = float(done.stdout)
    assert found[16, "memory"] - found[4, "memory"] > 35, found
    assert found[16, "disk"] - found[4, "disk"] < 20, found
