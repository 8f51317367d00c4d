"""No fault, kill, full disk or change of a cache goes unnoticed, and nothing stored is lost."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import Damage, append, delete, flip, truncate, zero4k
from toys import READ, clean, content, ingest, put, refused, start, tree

from bitimely_core import cache
from bitimely_core.cache import shards, unit_groups
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.progress import show_progress
from bitimely_core.store import locks, manifests, storage

pytestmark = pytest.mark.usefixtures("toys")
CALLS = ("os_open", "os_write", "os_fsync", "os_replace", "os_link", "os_unlink", "os_mkdir")


# ---- processes


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)  # a shard a unit
    put(raw, "d1", 3, fault="header")
    ingest(raw, tmp_path / "one")
    seen: list[tuple[str, int, int | None]] = []
    with show_progress(lambda *event: seen.append(event)):
        ingest(raw, tmp_path / "two", jobs=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert seen[-1] == ("ingest toy", 4, 4)


@pytest.mark.slow
def test_a_reader_that_kills_its_process_costs_its_unit_alone(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    put(raw, "b0", 4, fault="kill")
    # killed from outside: tried again
    put(raw, "c0", 5, fault="kill once", mark=str(tmp_path / "mark"))
    report = ingest(raw, tmp_path / "out", jobs=2)
    assert {u["unit"]: u["status"] for u in report["units"]} == {
        **dict.fromkeys(("a1", "b1", "c0", "c1"), "accepted"),
        "b0": "quarantined",
    }
    assert report["reason_counts"] == {"reader_crash": 1}


def test_parts_make_the_same_cache(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    for i in range(5):
        put(raw, f"x{i}", i)
    expected = clean(raw, tmp_path)
    out = tmp_path / "out"
    parts = [ingest(raw, out, shard=(k, 3)) for k in (1, 2, 3)]
    assert [part["schema"] for part in parts] == ["bitimely.ingest_part/1"] * 2 + [
        "bitimely.ingest_report/1"
    ]
    assert [part["parts_missing"] for part in parts[:2]] == [2, 1]
    assert sum(part["counts"]["units_seen"] for part in parts[:2]) < 8
    assert tree(out) == expected
    before = parts[2]
    put(raw, "x3", 30)
    parts = [ingest(raw, out, shard=(k, 3)) for k in (1, 2, 3)]
    assert parts[2]["generation"] == before["generation"] + 1


def test_parts_side_by_side_publish_once(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    expected = clean(raw, tmp_path)
    out = tmp_path / "out"
    threads = [
        threading.Thread(target=ingest, args=(raw, out), kwargs={"shard": (k, 2)}) for k in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree(out) == expected


def test_a_cache_in_use_is_left_alone(raw: Path, tmp_path: Path) -> None:
    with locks.lock_folder(tmp_path / "out"):
        error = refused(raw, tmp_path / "out")
        assert (error.code, error.exit_code) == (Reason.LOCKED, Exit.LOCKED)
        assert str(os.getpid()) in str(error)
    assert tree(tmp_path / "out") == {}


@pytest.mark.slow
def test_readers_see_one_generation_while_the_next_is_published(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hashes = {ingest(raw, out)["content_sha256"]}
    stop, errors, passes = threading.Event(), [], []

    def look() -> None:
        while not stop.is_set():
            try:
                opened = cache.open_cache(out)
                found = shards.hash_lines(
                    shards.hash_lines([shards.hash_record(record)]) for record in opened.records()
                )
                assert found == opened.manifest.content_sha256
                passes.append(found)
                assert not [f for f in cache.verify(out) if f.level == "error"]
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(8):
        put(raw, "b1", 100 + i)
        hashes.add(ingest(raw, out)["content_sha256"])
        time.sleep(0.1)
    stop.set()
    for reader in readers:
        reader.join()
    assert errors == []
    assert set(passes) <= hashes


# ---- faults, kills, full disks


class Faults:
    """Makes the n-th call of the operating system in `storage` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = self.number = self.seen = 0
        for name in CALLS:
            monkeypatch.setattr(storage, name, functools.partial(self.call, getattr(storage, name)))

    def call(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.seen += 1
        if self.seen == self.n:
            raise OSError(self.number, os.strerror(self.number))
        return real(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        errno.EIO,
        pytest.param(errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param(errno.EINTR, marks=pytest.mark.slow),
    ],
)
def test_any_failing_call_leaves_one_generation_or_the_other_and_the_rerun_is_clean(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    former = tmp_path / "former"
    shutil.copytree(out, former)
    first = manifests.read_manifest(out)
    put(raw, "b1", 77)
    ingest(raw, out)
    second, wanted = manifests.read_manifest(out), tree(out)
    faults = Faults(monkeypatch)
    passed = False
    for n in range(1, 400):
        shutil.rmtree(out)
        shutil.copytree(former, out)
        faults.n, faults.number, faults.seen = n, number, 0
        try:
            report = ingest(raw, out)
        except UserError as error:
            report = {"exit_code": error.exit_code}
        passed = faults.seen < n
        faults.n = 0
        # 3: a file of the source could not be read
        assert report["exit_code"] in ({0} if passed else {0, 3, 6})
        now = manifests.read_manifest(out)
        assert manifests.find_damage(out, now) == []
        assert now in (first, second) or now["generation"] == 2
        ingest(raw, out)
        if now in (first, second):
            assert tree(out) == wanted, n
        else:  # partial: mended in a generation of its own
            assert content(out) == {name: wanted[name] for name in second["files"]}
        if passed:
            break
    assert passed
    assert n > 60


@pytest.mark.slow
def test_a_kill_anywhere_is_followed_by_the_same_cache(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    for name in ("a1", "b1", "c1"):
        put(raw, name, 1, sleep=0.05)
    wanted = clean(raw, tmp_path)
    chance = random.Random(0)
    for n in range(4):
        out = tmp_path / f"out{n}"
        process = start(raw, out, big=1)
        assert process.stdout is not None
        for _ in range(n):
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        process.wait()
        process.stdout.close()
        if (out / "manifest.json").exists():
            assert (
                tree(out).items()
                >= {name: wanted[name] for name in manifests.read_manifest(out)["files"]}.items()
            )
        elif out.exists():
            assert [f.code for f in cache.verify(out)] == [Reason.INCOMPLETE]
            with pytest.raises(UserError, match="finished parts are kept"):
                cache.open_cache(out)
        done = (
            len(list((out / ".progress").glob("*.json"))) - 1 if (out / ".progress").exists() else 0
        )
        READ.clear()
        ingest(raw, out)
        assert len(READ) <= 3 - max(done, 0)
        assert tree(out) == wanted


@pytest.mark.slow
def test_two_at_once_make_what_one_makes(raw: Path, tmp_path: Path) -> None:
    wanted = clean(raw, tmp_path)
    both = [start(raw, tmp_path / "out") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert sorted(process.returncode for process in both) in ([0, 0], [0, Exit.LOCKED])
    assert tree(tmp_path / "out") == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "jobs"),
    [(signal.SIGTERM, 143, 1), pytest.param(signal.SIGINT, 130, 2, marks=pytest.mark.slow)],
)
def test_a_signal_stops_soon_and_the_rerun_goes_on(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, jobs: int
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    for name in ("a1", "b1", "c1", "d1", "e1"):
        put(raw, name, 1, sleep=0.3)
    out = tmp_path / "out"
    process = start(raw, out, jobs=jobs, big=1)
    assert process.stdout is not None
    # reads until the third unit is taken up
    assert "2" in (line.strip() for line in iter(process.stdout.readline, ""))
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert "goes on where it stopped" in text
    assert "Traceback" not in text
    report = json.loads((out / "ingest_report.json").read_bytes())
    assert (report["status"], report["exit_code"], report["error"]["code"]) == (
        "interrupted",
        code,
        "interrupted",
    )
    assert 1 <= report["counts"]["units_seen"] < 5
    assert not list(out.glob("*tmp*"))
    wanted = clean(raw, tmp_path)
    READ.clear()
    ingest(raw, out)
    assert len(READ) < 5
    assert tree(out) == wanted


@pytest.mark.slow
def test_a_file_size_limit_is_a_full_disk(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", 5, n=400_000)
    process = start(raw, tmp_path / "out", FSIZE=100_000)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.RESOURCES
    assert "file size limit" in text
    assert not list((tmp_path / "out").glob("*tmp*"))
    assert not list((tmp_path / "out").glob("*.parquet"))
    assert json.loads((tmp_path / "out" / "ingest_report.json").read_bytes())["status"] == "failed"
    wanted = clean(raw, tmp_path)
    ingest(raw, tmp_path / "out")
    assert tree(tmp_path / "out") == wanted


def test_missing_disk_space_is_reported_before_writing(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.DISK_FULL, Exit.RESOURCES)
    assert "have 1 bytes" in str(error)


@pytest.mark.slow
def test_many_small_units_need_few_descriptors(tmp_path: Path) -> None:
    for i in range(600):
        put(tmp_path / "raw", f"u{i:04d}", i, n=100)
    process = start(tmp_path / "raw", tmp_path / "out", NOFILE=40)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(list((tmp_path / "out").glob("recordings-*"))) <= 8
    assert len(list(cache.open_cache(tmp_path / "out").records())) == 600


def test_everything_is_for_its_owner_alone_whatever_the_umask(raw: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ingest(raw, tmp_path / "workspace" / "toy")
    finally:
        os.umask(before)
    for path in [tmp_path / "workspace", *(tmp_path / "workspace").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ---- damage


def swap(path: Path, rng: random.Random) -> None:
    others = [
        p
        for p in path.parent.iterdir()
        if p.name.split("-")[0] == path.name.split("-")[0] and p != path
    ]
    other = rng.choice(others) if others else path.parent / "subjects.parquet"
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two if two != one else b"")
    other.write_bytes(one)


@pytest.mark.parametrize("harm", [flip, zero4k, truncate, append, delete, swap])
def test_damage_is_noticed_before_the_first_use(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Damage
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
    out = tmp_path / "out"
    ingest(raw, out)
    original = tree(out)
    rng = random.Random(0)
    for name in [*manifests.read_manifest(out)["files"], "manifest.json"] * 2:
        if harm is swap and name == "manifest.json":
            continue
        harm(out / name, rng)
        with pytest.raises(UserError) as caught:
            cache.open_cache(out)
        missing = harm is delete and name == "manifest.json"
        assert caught.value.exit_code == (Exit.REFUSED if missing else Exit.INTEGRITY)
        findings = [caught.value.finding, *caught.value.details]
        assert missing or name in [Path(str(f.file)).name for f in findings]
        found = cache.verify(out)
        assert [f.code for f in found if f.level == "error"][:1] == [
            Reason.INCOMPLETE if missing else Reason.INTEGRITY
        ]
        for old, data in original.items():
            (out / old).write_bytes(data)
    assert cache.verify(out, deep=True) == []


def test_foreign_files_are_reported_and_not_read(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    (shard,) = out.glob("recordings-*")
    shutil.copy(shard, out / "recordings-copy.parquet")
    shutil.copy(shard, out / "recordings-0123456789abcdef.parquet")
    assert [(f.code, f.level, Path(str(f.file)).name) for f in cache.verify(out)] == [
        (Reason.FILE_NAME, "warning", "recordings-0123456789abcdef.parquet"),
        (Reason.FILE_NAME, "warning", "recordings-copy.parquet"),
    ]
    assert len(list(cache.open_cache(out).records())) == 3


def test_a_verification_that_is_deep_decodes_the_content(raw: Path, tmp_path: Path) -> None:
    """Shards and manifest that agree with each other but not with the hashes of the content."""
    out = tmp_path / "out"
    ingest(raw, out)
    body = manifests.read_manifest(out)
    records = list(cache.open_cache(out).records())
    records[0].signals[0] = (
        records[0].signals[0]._replace(samples=records[0].signals[0].samples[::-1].copy())
    )
    names, files = shards.write_shard(out, records, "toy")
    body["files"] |= {name: file.model_dump() for name, file in files.items()}
    body["shards"] = [list(names)]
    body = {key: value for key, value in body.items() if key != "manifest_sha256"}
    storage.write_json(out / "manifest.json", body | {"manifest_sha256": storage.fingerprint(body)})
    assert not [f for f in cache.verify(out) if f.level == "error"]
    assert [
        "the content of the unit a1" in f.message
        for f in cache.verify(out, deep=True)
        if f.level == "error"
    ] == [True]


def test_times_alone_are_no_damage_and_reading_writes_nothing(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    for path in out.rglob("*"):
        os.utime(path, (0, 2**31))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(out.rglob("*"))}
    out.chmod(0o500)
    assert cache.verify(out, deep=True) == []
    assert len(list(cache.open_cache(out).records())) == 3
    out.chmod(0o700)
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(out.rglob("*"))}


def test_a_shard_that_goes_while_it_is_read_is_named(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    opened = cache.open_cache(tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("recordings-*")
    data = shard.read_bytes()
    for harm in (shard.unlink, lambda: shard.write_bytes(data[:500] + b"\x00" * 100 + data[600:])):
        harm()
        with pytest.raises(UserError, match=shard.name) as caught:
            list(opened.records())
        assert caught.value.exit_code == Exit.INTEGRITY


def test_folders_that_are_no_cache_have_distinct_errors(tmp_path: Path) -> None:
    manifests.publish(tmp_path, {"schema": "bitimely.tokens/1"}, {}, 1)
    with pytest.raises(UserError) as caught:
        cache.open_cache(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == (Reason.UNSUPPORTED_FORMAT, Exit.REFUSED)
    manifests.publish(
        tmp_path, {"schema": "bitimely.cache/9", "format_version": 9, "kind": "recordings"}, {}, 2
    )
    assert [f.code for f in cache.verify(tmp_path)] == [Reason.UNSUPPORTED_FORMAT]
