"""Ingest and sequences on two executors of a Spark cluster, against polars in one process."""

from __future__ import annotations

import hashlib
import json
import operator
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import SPARK

from bitimely_core import workflows
from bitimely_core.cache.workers import StopFlag
from bitimely_core.claims import (
    cluster,
    engines,
    ingest_claims,
    pass1_clean,
    pass2_write,
    steps,
    subject_splits,
)
from bitimely_core.errors import Exit, UserError

pytestmark = SPARK


@pytest.fixture(scope="module")
def executors() -> Iterator[Any]:
    """A cluster of two executors, processes of their own, with one core each."""
    from pyspark import SparkContext

    if running := SparkContext._active_spark_context:
        running.stop()
    SparkContext._ensure_initialized()
    # as `spark-submit` leaves its --master there; Java may run since an earlier test
    settings = SparkContext._jvm.java.lang.System
    settings.setProperty("spark.master", "local-cluster[2,1,1024]")
    try:
        context = engines.open_spark()
    finally:
        settings.clearProperty("spark.master")
    assert context.master == "local-cluster[2,1,1024]"
    yield context
    context.stop()


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """About 0.3 MB of rows, some of them faulty, repeated in other parts or in quotes, to be cut
    into several parts and shards.
    """
    folder, draw = tmp_path / "source", np.random.default_rng(3)
    folder.mkdir()
    codes = ["428.0", "250.00", "496", "401.9", "V45.85", "250", "junk", "", "585.9"]
    rows = [
        f"P{draw.integers(200)},{np.datetime64('2001-01-01') + draw.integers(4000)},{codes[draw.integers(9)]},{'physician' if i % 5 else 'inpatient'}"
        for i in range(7000)
    ]
    rows[5] = 'P3,"2003-02-30",428.0,physician'
    rows[6000:6100] = rows[:100]
    rows += ["P7,2091-01-01,428.0,physician", ",2001-01-01,496,physician"]
    (folder / "claims.csv").write_text("patient_id,date,icd9,source\r\n" + "\r\n".join(rows))
    people = [f"P{i},{1930 + i % 60}-0{1 + i % 9}-11,{1 + i % 2}" for i in range(220)]
    (folder / "patients.csv").write_text("patient_id,birth_date,sex\n" + "\n".join(people) + "\n")
    (folder / "icd9_phecode.csv").write_text(
        "icd9,phecode\n428,428\n250,250.2\n496,496\n401,401.1\n585,585\n"
    )
    monkeypatch.setattr(cluster, "PART_BYTES", 100_000)
    monkeypatch.setattr(ingest_claims, "SHARD_BYTES", 100_000)
    monkeypatch.setattr("bitimely_core.formats.table_text.BLOCK", 40_000)
    return folder


def make(home: Path, folder: Path, engine: str, key: Path) -> dict[str, str]:
    """The hashes of all tables of a cache with its sequences, and the funnel and findings of the
    report.
    """
    key.write_bytes(bytes(range(32)))
    build = {"select": False, "min_codes": 2, "engine": engine}
    report = workflows.ingest(
        "pophr",
        folder,
        home / "cache" / "pophr",
        options={"engine": engine, "id_key": str(key)},
        build=build,
    )
    tables = {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in home.rglob("*.parquet")
    }
    manifest = json.loads((home / "cache" / "pophr" / "manifest.json").read_text())
    return (
        tables
        | {name: json.dumps(report[name], sort_keys=True) for name in ("rows", "reasons")}
        | {"funnel": str(manifest["funnel"])}
    )


def test_executors_write_the_same_bytes(
    executors: Any, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "id.key"
    expected = make(tmp_path / "polars", claims, "polars", key)
    assert sum(name.startswith("cache/pophr/events-") for name in expected) > 2
    assert sum("sequences-" in name for name in expected) > 2

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the driver touches rows")

    for module, name in (
        (pass1_clean, "clean_source"),
        (pass2_write, "resolve_duplicates"),
        (steps, "number_codes"),
        (steps, "build_shard"),
    ):
        monkeypatch.setattr(module, name, refuse)
    assert make(tmp_path / "spark", claims, "spark", key) == expected


def test_finished_parts_and_shards_are_not_made_again(
    executors: Any, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, home, run = tmp_path / "id.key", tmp_path / "spark", engines.run_tasks
    tasks: list[list[int]] = []

    def record(task: Any, numbers: Any, stop: Any = None) -> list[Any]:
        tasks.append(list(numbers))
        if len(tasks) == 2:
            run(task, list(numbers)[:2], stop)
            raise UserError("interrupted", "stopped", exit_code=Exit.INTERRUPTED)  # type: ignore[arg-type]
        return run(task, numbers, stop)

    monkeypatch.setattr(engines, "run_tasks", record)
    with pytest.raises(UserError, match="stopped"):
        make(home, claims, "spark", key)
    again = make(home, claims, "spark", key)
    parts, shards = tasks[:2]
    assert len(parts) > 2
    assert tasks[2:4] == [[], shards[2:]]
    assert again == make(tmp_path / "polars", claims, "polars", key)


def test_errors_of_executors_are_those_of_the_command(executors: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as own:
        engines.run_tasks(partial(subject_splits.read_split_file, tmp_path / "absent.csv"), [1, 2])
    assert own.value.exit_code == Exit.USAGE
    with pytest.raises(UserError, match="ZeroDivisionError") as other:
        engines.run_tasks(partial(operator.truediv, 1), [1, 0])
    assert other.value.exit_code == Exit.RESOURCES
    stop = StopFlag()
    stop.signal, begun = signal.SIGTERM, time.monotonic()
    with pytest.raises(UserError) as stopped:
        engines.run_tasks(time.sleep, [60, 60], stop)
    assert stopped.value.exit_code == Exit.TERMINATED
    assert time.monotonic() - begun < 30
    assert engines.run_tasks(abs, [-3, 2]) == [3, 2]
