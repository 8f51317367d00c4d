"""Killed ingests of claims are continued, stale work is discarded, pseudonyms are cached; splits by
raw ids.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from bitimely_core import cache, workflows
from bitimely_core.claims import (
    clean,
    ingest_claims,
    pass1_clean,
    pseudonyms,
    spill,
    steps,
    synthetic_claims,
)
from bitimely_core.claims.subject_splits import read_split_file
from bitimely_core.errors import UserError
from bitimely_core.formats import table_text, tables
from bitimely_core.progress import show_progress

# bytes, rows, bytes: several of each
SMALL = {"BLOCK": 3000, "SPILL_ROWS": 150, "SHARD_BYTES": 6000}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_text, "BLOCK", SMALL["BLOCK"])
    monkeypatch.setattr(pass1_clean, "SPILL_ROWS", SMALL["SPILL_ROWS"])
    monkeypatch.setattr(ingest_claims, "SHARD_BYTES", SMALL["SHARD_BYTES"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a block was cleaned, a shard labelled, a cohort made."""
    counts: Counter[str] = Counter()

    def count_calls(home: Any, name: str) -> None:
        function = getattr(home, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(home, name, wrapped)

    for home, name in (
        (clean, "clean_rows"),
        (steps, "label_shard"),
        (synthetic_claims, "write_cohort"),
    ):
        count_calls(home, name)
    return counts


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    draw = np.random.default_rng(0)
    codes = ["428.0", "250.00", "401.9", "496", "008.5", "25000", "zzz", "V70.0"]
    rows = [
        (
            f"P{draw.integers(120):04d}",
            str(np.datetime64("2004-01-01") + int(draw.integers(3000))),
            codes[draw.integers(len(codes))],
        )
        for _ in range(900)
    ]
    table(
        folder / "claims.csv",
        [("patient_id", "date", "icd9"), *rows, rows[0], ("P0001", "2099-01-01", "496")],
    )
    table(
        folder / "patients.csv",
        [
            ("patient_id", "birth_date"),
            *((f"P{i:04d}", f"{1930 + i % 40}-05-17") for i in range(130)),
        ],
    )
    table(
        folder / "icd9_phecode.csv",
        [
            ("icd9", "phecode"),
            ("428.0", "428.1"),
            ("250.00", "250.2"),
            ("401.9", "401.1"),
            ("496", "496"),
        ],
    )
    (tmp_path / "key").write_bytes(bytes(32))
    return folder


def table(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def ingested(raw: Path, name: str, **given: Any) -> dict[str, Any]:
    options = {"id_key": str(raw.parent / "key"), "rules": "none", **given.pop("options", {})}
    return cache.ingest(
        "pophr", raw, raw.parent / name / "cache" / "pophr", options=options, **given
    )


def files(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.rglob("*.parquet")}


KILLED = """
import os, signal, sys
from bitimely_core import cache
from bitimely_core.claims import clean, ingest_claims, pass1_clean, steps, synthetic_claims
from bitimely_core.formats import table_text, tables
table_text.BLOCK, pass1_clean.SPILL_ROWS, ingest_claims.SHARD_BYTES = {small}
home, name, after, dataset, source, out, options = {what}
function, left = getattr(home, name), [after]
def until(*args, **kwargs):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)
setattr(home, name, until)
cache.ingest(dataset, source, out, options=options)
"""


def killed(
    home: str,
    name: str,
    after: int,
    dataset: str,
    source: Path | None,
    out: Path,
    options: dict[str, Any],
) -> None:
    """An ingest that is killed when `name` is called once more than `after` times."""
    what = f"{home}, {name!r}, {after}, {dataset!r}, {str(source) if source else None!r}, {str(out)!r}, {options!r}"
    code = KILLED.format(small=tuple(SMALL.values()), what=what)
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -9, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "name", "after"),
    [("clean", "clean_rows", 5), pytest.param("steps", "label_shard", 2, marks=pytest.mark.slow)],
)
def test_a_killed_ingest_is_continued_and_gives_the_same_bytes(
    raw: Path, small: None, calls: Counter[str], home: str, name: str, after: int
) -> None:
    complete = ingested(raw, "complete")
    assert calls["clean_rows"] > 7
    assert calls["label_shard"] > 3
    every = Counter(calls)
    calls.clear()
    out = raw.parent / "killed" / "cache" / "pophr"
    killed(
        home, name, after, "pophr", raw, out, {"id_key": str(raw.parent / "key"), "rules": "none"}
    )
    assert not (out / "manifest.json").exists()
    left = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert not any(f"P{i:04d}".encode() in left for i in range(130)), "no raw id on the disk"
    again = ingested(raw, "killed")
    if name == "clean_rows":
        assert every["clean_rows"] - 5 <= calls["clean_rows"] < every["clean_rows"], (
            "spilled rows were not cleaned again"
        )
        assert calls["label_shard"] == every["label_shard"]
    else:
        assert calls == {"label_shard": every["label_shard"] - after}, (
            "nothing was cleaned, finished shards were not made again"
        )
    assert files(out) == files(raw.parent / "complete" / "cache" / "pophr")
    for key in ("content_sha256", "rows", "reason_counts", "units"):
        assert again[key] == complete[key]
    assert not (out / ".parts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["source", "options", "key", "force_new"])
def test_stale_work_is_discarded(raw: Path, small: None, calls: Counter[str], changed: str) -> None:
    out = raw.parent / "killed" / "cache" / "pophr"
    killed(
        "steps",
        "label_shard",
        2,
        "pophr",
        raw,
        out,
        {"id_key": str(raw.parent / "key"), "rules": "none"},
    )
    before = set((out / ".parts").iterdir())
    given: dict[str, Any] = {"options": {}}
    if changed == "source":
        with (raw / "claims.csv").open("a") as file:
            file.write("P0007,2008-01-01,496\n")
    elif changed == "options":
        given["options"] = {"seed": 4}
    elif changed == "key":
        (raw.parent / "key").write_bytes(bytes(range(32)))
    else:
        given["force_new"] = True
    seen: list[set[Path]] = []
    with show_progress(lambda *_: seen.append(set((out / ".parts").iterdir()) & before)):
        ingested(raw, "killed", **given)
    assert seen
    assert not any(seen), "none of the old files is there while the new ones are made"
    cleaned = calls["clean_rows"]
    ingested(raw, "complete", **given)
    assert cleaned == calls["clean_rows"] - cleaned
    assert files(out) == files(raw.parent / "complete" / "cache" / "pophr")


@pytest.mark.slow
def test_an_interrupted_part_of_a_job_array_is_continued(
    raw: Path, small: None, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ingested(raw, "complete")
    every = calls["clean_rows"]
    calls.clear()
    original = clean.clean_rows

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if calls["clean_rows"] == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(clean, "clean_rows", stopped)
        with pytest.raises(KeyboardInterrupt):
            ingested(raw, "parts", shard=(1, 2))
    assert calls["clean_rows"] == 3
    for k in (1, 2):
        ingested(raw, "parts", shard=(k, 2))
    assert calls["clean_rows"] < every + 3, "some of the three blocks were spilled"
    cohorts = [
        cache.open_cache(raw.parent / name / "cache" / "pophr").cohort()
        for name in ("complete", "parts")
    ]
    assert cohorts[0].equals(cohorts[1])


@pytest.mark.long
def test_intact_synthetic_claims_are_not_made_again(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"subjects": 120, "seed": 2}
    out = tmp_path / "killed" / "cache" / "synthetic-claims"
    (tmp_path / "complete").mkdir()
    killed("steps", "label_shard", 2, "synthetic-claims", None, out, options)
    (tmp_path / "complete" / "id.key").write_bytes((tmp_path / "killed" / "id.key").read_bytes())
    monkeypatch.setattr(ingest_claims, "SHARD_BYTES", SMALL["SHARD_BYTES"])
    cache.ingest("synthetic-claims", None, out, options=options)
    assert calls["write_cohort"] == calls["clean_rows"] == 0
    assert not (out / ".raw").exists()
    assert not (out / ".parts").exists()
    other = tmp_path / "complete" / "cache" / "synthetic-claims"
    cache.ingest("synthetic-claims", None, other, options=options)
    assert calls["write_cohort"] == 1
    assert files(out) == files(other)
    killed("steps", "label_shard", 1, "synthetic-claims", None, tmp_path / "third", options)
    cache.ingest("synthetic-claims", None, tmp_path / "third", options={**options, "seed": 3})
    assert calls["write_cohort"] == 2, "another seed is another cohort"


# --- memory


@pytest.mark.slow
def test_a_plain_table_is_read_once(
    raw: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[Path] = []
    original = tables.read_frames

    def read(path: Path, *rest: Any, **more: Any) -> Any:
        readings.append(path)
        return original(path, *rest, **more)

    monkeypatch.setattr(tables, "read_frames", read)
    for times, options in (
        (2, {"rules": "none"}),
        (3, {"rules": "none", "date_format": "%Y-%m-%d"}),
    ):  # once more for the form of the codes; a form may have two digits of the year
        readings.clear()
        cache.ingest("pophr", raw, raw.parent / str(times), options=options)
        assert sum(path.name == "claims.csv" for path in readings) == times


@pytest.mark.slow
def test_uncached_pseudonyms_are_computed_again(
    raw: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pseudonyms beyond the cache are computed again, and one subject stays one."""
    ingested(raw, "complete")
    monkeypatch.setattr(pseudonyms, "CACHED_SUBJECTS", 7)
    ingested(raw, "few")
    assert files(raw.parent / "few") == files(raw.parent / "complete")


def test_a_sliced_table_has_the_bytes_of_the_full_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "GROUP", 1000)
    draw = np.random.default_rng(1)
    complete = pl.DataFrame(
        {
            "subject_id": np.repeat(np.arange(1100), 3),
            "name": ["a", "b", "c"] * 1100,
            "value": draw.integers(0, 2, 3300),
        }
    )
    shard = draw.integers(0, 5, 1100).repeat(3)
    paths = [tmp_path / f"{i}.parquet" for i in range(5)]
    for i, path in enumerate(paths):
        complete.filter(pl.Series(shard == i)).write_parquet(path)
    name, file = spill.write_table(
        tmp_path, "one", spill.merge_sorted(paths, "subject_id", 1100, 7, ("subject_id", "name"))
    )
    with (tmp_path / "other").open("wb") as stream:
        pq.write_table(
            complete.to_arrow(),
            stream,
            compression="zstd",
            version="2.6",
            row_group_size=spill.GROUP,
        )
    assert (tmp_path / name).read_bytes() == (tmp_path / "other").read_bytes()
    assert file.rows == 3300
    assert pq.ParquetFile(tmp_path / name).num_row_groups == 4


# --- splits by the ids of the source


def split_file(
    raw: Path, *names: str, words: tuple[str, ...] = ("train", "tuning", "held_out")
) -> Path:
    rows = [(name, words[i % len(words)]) for i, name in enumerate(names)]
    return table(raw.parent / "split.csv", [("subject_id", "split"), *rows])


def test_a_split_file_by_raw_ids_is_followed(raw: Path, small: None) -> None:
    listed = [f"P{i:04d}" for i in range(130)]
    given = {
        "split_file": str(split_file(raw, *listed, "GHOST", "SPOOK")),
        "keep_ids": str(raw.parent / "ids.csv"),
    }
    out = raw.parent / "w" / "cache" / "pophr"
    options = {"id_key": str(raw.parent / "key"), "keep_ids": given["keep_ids"], "rules": "none"}
    build = {"select": False, "min_codes": 1, "split_file": given["split_file"]}
    report = workflows.ingest("pophr", raw, out, options=options, build=build)
    found = [reason for reason in report["reasons"] if reason["field"] == "--split-file"]
    assert [(one["count"], one["level"]) for one in found] == [(2, "warning")]
    new = {
        row["subject_id"]: int(row["new"])
        for row in csv.DictReader((raw.parent / "ids.csv").read_text().splitlines())
    }
    assert set(new) == set(listed)
    wanted = {new[name]: ("train", "validation", "test")[i % 3] for i, name in enumerate(listed)}
    opened = cache.open_cache(out)
    assert dict(opened.cohort().select("subject_id", "split").iter_rows()) == wanted
    assert opened.events_manifest.split == "official"
    sequences = pl.concat(
        [
            pl.read_parquet(path)
            for path in (raw.parent / "w" / "tokens" / "pophr").glob("sequences-*.parquet")
        ]
    )
    assert all(
        wanted[subject] == split
        for subject, split in sequences.select("subject_id", "split").iter_rows()
    )
    stored = b"".join(path.read_bytes() for path in (raw.parent / "w").rglob("*") if path.is_file())
    assert b"GHOST" not in stored
    with pytest.raises(UserError, match="split_file"):  # another choice is another cache
        cache.ingest("pophr", raw, out, options=options)


@pytest.mark.parametrize(
    ("names", "words", "problem"),
    [
        (range(100), ("train",), "misses at most 30 of at most 130 subjects"),
        (range(130), ("train", "trian"), "trian"),
        ([*range(130), 5], ("train",), "a subject has two rows"),
        ([*range(130), -1], ("train",), "a row has no subject"),
    ],
)
def test_a_split_file_that_cannot_be_followed_is_refused(
    raw: Path, names: Any, words: tuple[str, ...], problem: str
) -> None:
    path = split_file(raw, *(f"P{i:04d}" if i >= 0 else " " for i in names), words=words)
    with pytest.raises(UserError, match=problem) as caught:
        ingested(raw, "w", options={"split_file": str(path)})
    assert caught.value.exit_code == 2
    assert "misses 30 of 130" in caught.value.exact[0].message or "misses" not in problem
    assert "P00" not in str(caught.value)
    home = raw.parent / "w" / "cache" / "pophr"
    assert not [path for path in home.rglob("*") if path.suffix in {".parquet", ".json"}]


def test_a_split_file_may_be_parquet(raw: Path) -> None:
    text = split_file(raw, *(f"P{i:04d}" for i in range(130)))
    frame = pl.read_csv(text, infer_schema=False)
    frame.write_parquet(raw.parent / "split.parquet")
    assert read_split_file(raw.parent / "split.parquet", "raw").equals(read_split_file(text, "raw"))
    assert set(read_split_file(text, "raw")["split"]) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("content", "row", "problem"),
    [
        ("subject_id,split\nP0001,train\nP0002\n", 3, "1 cells"),
        ("subject_id,split\nP0001,train\nP0002,train,x\n", 3, "3 cells"),
        ('subject_id,split\nP0001,train\nP0002,"train\n', 3, "quote"),
        ("subject_id,split\nP0001,train\n,test\n", 3, "no subject"),
        ("subject_id,split\nP0001,train\nP0002,dev\n", 3, "split 'dev'"),
        ("subject_id,split\nP0001,train\nP0001,test\n", 3, "two rows"),
        ("subject,split\nP0001,train\n", None, "subject_id"),
        ("subject_id,split\nP000\udce9,train\n", 2, "UTF-8"),
        ("", None, "0 bytes"),
    ],
)
def test_faults_of_a_split_file_are_named_with_their_row(
    tmp_path: Path, content: str, row: int | None, problem: str
) -> None:
    path = tmp_path / "split.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=problem) as caught:
        read_split_file(path, "the source's own")
    error = caught.value
    assert (error.exit_code, error.code, error.file, error.field, error.row) == (
        2,
        "config",
        str(path),
        "--split-file",
        row,
    )
    assert "subject_id" in error.requirement
    assert "P00" not in str(error)


def test_ids_of_a_split_file_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text("split,subject_id\ntrain, 007\nheld_out,8\n")
    assert list(read_split_file(path, "", numbers=True).iter_rows()) == [(7, "train"), (8, "test")]
    path.write_text("subject_id,split\n7,train\n8.0,test\n")
    with pytest.raises(UserError, match="row 3 is not a whole number") as caught:
        read_split_file(path, "", numbers=True)
    assert (caught.value.exit_code, caught.value.row) == (2, 3)


def test_a_dry_run_estimates_from_the_tables(raw: Path) -> None:
    out = raw.parent / "planned" / "cache" / "pophr"
    plan = cache.ingest("pophr", raw, out, options={"rules": "none"}, dry_run=True)
    assert plan["bytes"] == sum(path.stat().st_size for path in raw.iterdir()) > 0
    assert plan["estimate"]["cache_bytes"] > 0
    assert not out.parent.parent.exists()
