"""DuckDB with little memory: it spills to disk, and the sequences are those of polars."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from bitimely_core.claims import engines, prevalence, sequence_builder, steps
from bitimely_core.claims.codes import IcdCode

duckdb = pytest.importorskip("duckdb")
ROWS, SUBJECTS, CODES = 600_000, 10_000, 300
LIMIT = "24MB"


@contextmanager
def limit_memory(folder: Path | None):
    """DuckDB with less memory than the rows need; without a folder it cannot spill."""
    with engines.open_engine("duckdb", threads=1, memory=LIMIT, folder=folder) as engine:
        yield engine


def make_shard() -> steps.ClaimsShard:
    """Random rows of random subjects, half of whom have a label."""
    draw = np.random.default_rng(0)
    columns = {"subject": SUBJECTS, "day": 6000, "code": CODES}
    rows = pl.DataFrame({name: draw.integers(0, size, ROWS).astype(np.int32) for name, size in columns.items()})
    rows = rows.with_columns(source=pl.lit(0, pl.Int8), row=pl.int_range(ROWS, dtype=pl.Int64))
    codes = [IcdCode("icd9", f"{i:03d}", (f"{i:03d}", f"{i + 400}.1")) for i in range(CODES)]
    cohort = pl.DataFrame({"subject_id": np.arange(SUBJECTS), "y_x": np.arange(SUBJECTS) % 2})
    known = {"birth_day": pl.lit(None, pl.Int32), "obs_end": pl.lit(6000, pl.Int32), "split": pl.lit("train")}
    return steps.ClaimsShard(rows=rows, codes=codes, cohort=cohort.with_columns(**known), labels=("x",))


def build(engine: engines.Engine) -> tuple[prevalence.CodeCounts, sequence_builder.CodeSequences]:
    """Counts and sequences."""
    shard, choices = make_shard(), steps.SequenceChoices(select=False, min_codes=2, dedupe="month")
    counts = steps.count_shard(shard, choices, engine)
    return counts, steps.build_shard(shard, choices, steps.select_vocabulary(counts, ["x"], choices), engine)


def test_what_does_not_fit_into_memory_is_spilled_and_nothing_changes(tmp_path: Path) -> None:
    with engines.open_engine("polars") as engine:
        expected = build(engine)
    with limit_memory(tmp_path / "spill") as engine:
        found = build(engine)
    assert found[0] == expected[0]
    for name in ("subjects", "offsets", "ids", "days", "times", "ends"):
        np.testing.assert_array_equal(getattr(found[1], name), getattr(expected[1], name))
    assert len(expected[1].ids) > ROWS
    duck = duckdb.connect(config={"threads": 1, "memory_limit": LIMIT, "temp_directory": ""})
    with duck, pytest.raises(duckdb.OutOfMemoryException):  # the same without a folder: so it was spilled
        build(lambda frame: engines.nw.from_native(duck.from_arrow(frame.to_arrow())))
