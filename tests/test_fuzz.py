"""The fuzz targets hold on their seeds and on a hundred mutations of them; `fuzz.py` itself goes on
for as long as it is given.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fuzz
import fuzz_stored
import pytest
import small

from bitimely_core import cache, tokens
from bitimely_core.errors import UserError
from bitimely_core.formats import ts
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store import storage

LONG = ("recipe", "record")  # targets of more than two seconds


@pytest.fixture(autouse=True)
def stop_tracing() -> Iterator[None]:
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in fuzz.TARGETS],
)
def test_targets_hold(name: str, tmp_path: Path) -> None:
    fuzz.warm(name)
    rng, known, work = random.Random(5), fuzz.seeds(name), fuzz.TARGETS[name].work
    # each shipped recipe is planned by tests/test_pipeline.py
    unchanged = known if work == 1 else known[:5]
    for data in [
        *unchanged,
        *(fuzz.mutate(rng.choice(known), known, rng) for _ in range(100 // work)),
    ]:
        fuzz.check(name, data, tmp_path)


def test_what_fails_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ts, "read_header", broken)
    with pytest.raises(ZeroDivisionError):
        fuzz.by_chance("ts", 60.0, tmp_path, random.Random(0))
    (kept,) = tmp_path.glob("crash-*")
    assert kept.read_bytes() == fuzz.seeds("ts")[0]


def test_limits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = fuzz.Target(lambda data, folder: bytearray(64 << 20), fuzz.lists)
    slow = fuzz.Target(lambda data, folder: sum(range(10**5)), fuzz.lists)
    for name, target, limit, text in (
        ("greedy", greedy, 10.0, "bytes of memory"),
        ("slow", slow, 0.002, "CPU time"),
    ):
        monkeypatch.setitem(fuzz.TARGETS, name, target)
        monkeypatch.setattr(fuzz, "SECONDS", limit)
        with pytest.raises(AssertionError, match=text):
            fuzz.check(name, b"@data", tmp_path)


@pytest.mark.slow
def test_the_script_runs_targets_in_processes_of_their_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        fuzz.__file__,
        "ts",
        "table",
        "--seconds",
        "0.2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ts" in done.stdout + done.stderr


def test_text_in_parquet_that_is_not_utf8_is_refused_not_a_panic(tmp_path: Path) -> None:
    raw = next(fuzz_stored.list_parquets())
    (tmp_path / "claims.parquet").write_bytes(raw.replace(b"2001-05-03", b"2001-05-\xff\xff"))
    (tmp_path / "icd9_phecode.csv").write_bytes(fuzz_stored.MAP)
    with pytest.raises(UserError) as caught:
        cache.ingest("pophr", tmp_path, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert caught.value.file == "claims.parquet"


@pytest.mark.parametrize(
    "change", [{"files": {"a": 1}}, {"files": []}, {"class_names": ["other"]}, {"generation": "1"}]
)
def test_manifests_that_contradict_their_files_are_refused_though_their_hash_is_right(
    change: dict[str, object], tmp_path: Path
) -> None:
    folder = shutil.copytree(small.find_tokens("generic-classification"), tmp_path / "tokens")
    body = {**json.loads((folder / "manifest.json").read_bytes()), **change}
    del body["manifest_sha256"]
    storage.write_json(
        folder / "manifest.json", {**body, "manifest_sha256": storage.fingerprint(body)}
    )
    with pytest.raises(UserError) as caught:
        tokens.open_tokens(folder)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    "text",
    [
        '{"format_version": NaN}',
        '{"x": 1e999}',
        '{"settings": {"model": "x"}}',
        "[" * 100_000,
        '{"run": 1}',
    ],
)
def test_records_that_are_no_records_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError) as caught:
        RunRecord.load(tmp_path / "run.json")
    assert caught.value.exit_code == 5


def test_a_source_without_a_usable_row_makes_no_sequences_but_no_fault(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "claims.csv").write_text(
        "patient_id,date,icd9\na,2001-02-03,\nb,2001-02-04,\n"
    )
    (tmp_path / "source" / "icd9_phecode.csv").write_bytes(fuzz_stored.MAP)
    with pytest.raises(UserError) as caught:
        cache.ingest("pophr", tmp_path / "source", tmp_path / "out", max_bad=1.0)
    assert caught.value.exit_code in {2, 4}
