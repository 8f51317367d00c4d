"""Atomic writes under every failure; one writer at a time; every change is detected."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.store import locks, manifests, storage

CALLS = (
    "os_open",
    "os_write",
    "os_fsync",
    "os_replace",
    "os_link",
    "os_unlink",
    "os_mkdir",
    "os_read",
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


class Faults:
    """Makes the n-th call of the operating system fail with `number`; counts them all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...] = CALLS) -> None:
        self.n, self.number, self.seen = 0, errno.EIO, 0
        for name in calls:
            monkeypatch.setattr(storage, name, self.wrapped(getattr(storage, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen == self.n:
                raise OSError(self.number, os.strerror(self.number))
            return call(*arguments)

        return fail_or

    def at(self, n: int, number: int) -> None:
        self.n, self.number, self.seen = n, number, 0


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(params=[0, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def attempted(call: Callable[[], object]) -> UserError | None:
    try:
        call()
    except UserError as error:
        return error
    return None


# ---- names and hashes


@settings(max_examples=50, deadline=None)
@given(JSON)
def test_canonical_json_parses_back_and_is_stable(value: Any) -> None:
    assert json.loads(storage.encode_json(value)) == value
    assert storage.encode_json(json.loads(storage.encode_json(value))) == storage.encode_json(value)


def test_canonical_json_has_one_spelling_and_no_nan() -> None:
    assert storage.encode_json({"b": 1.0, "a": "é"}) == b'{"a":"\xc3\xa9","b":1.0}'
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            storage.encode_json([number])


def test_hashes_equal_hashlib(tmp_path: Path) -> None:
    data = os.urandom(3 * storage.CHUNK + 17)
    assert storage.write_bytes(tmp_path / "f", data) == (
        hashlib.sha256(data).hexdigest(),
        len(data),
    )
    assert storage.hash_with_size(tmp_path / "f") == (hashlib.sha256(data).hexdigest(), len(data))
    name, digest, _ = storage.write_hashed(
        tmp_path, "shard", ".bin", lambda stream: stream.write(data)
    )
    assert name == f"shard-{digest[:16]}.bin"
    assert (tmp_path / name).read_bytes() == data


def test_imports_neither_torch_nor_tables() -> None:
    code = "import bitimely_core.store.storage, sys; print(sorted({'torch', 'pyarrow', 'polars', 'numpy'} & set(sys.modules)))"
    assert run(code).communicate()[0].strip() == "[]"


# ---- writing


@pytest.mark.usefixtures("umask")
def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = storage.make_folder(tmp_path / "a" / "b")
    storage.write_json(folder / "x.json", {})
    storage.append_line(folder / "lines", {})
    take(folder)
    assert {oct(stat.S_IMODE(p.stat().st_mode)) for p in folder.iterdir()} == {"0o600"}
    assert {oct(stat.S_IMODE(p.stat().st_mode)) for p in (folder, folder.parent)} == {"0o700"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EMFILE])
def test_any_failing_call_leaves_the_former_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "file"
    storage.write_bytes(path, b"old")
    faults = Faults(monkeypatch)
    codes = {errno.ENOSPC: Reason.DISK_FULL, errno.EMFILE: Reason.RESOURCE_LIMIT}
    passed = False
    for n in range(1, 30):
        faults.at(n, number)
        error = attempted(lambda: storage.write_bytes(path, b"new"))
        passed = faults.seen < n
        # an interrupted write is repeated
        assert (error is None) == passed or number == errno.EINTR
        assert error is None or (error.code, error.exit_code, error.file) == (
            codes.get(number, Reason.IO_ERROR),
            Exit.RESOURCES,
            str(path),
        )
        faults.at(0, number)
        assert path.read_bytes() in ((b"old", b"new") if error else (b"new",))
        assert names(tmp_path) == ["file"]
        if passed:
            break
        storage.write_bytes(path, b"old")
    assert passed
    assert n > 6


def test_a_full_disk_is_reported_whatever_the_serialiser_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(monkeypatch, ("os_write",)).at(1, errno.ENOSPC)
    frame = pl.DataFrame({"a": [1, 2]})
    with pytest.raises(UserError, match="disk full") as caught:
        storage.write_file(tmp_path / "t.parquet", frame.write_parquet)
    assert caught.value.code == Reason.DISK_FULL
    assert names(tmp_path) == []


def test_tables_can_be_written_to_the_stream(tmp_path: Path) -> None:
    frame = pl.DataFrame({"a": [1, 2]})
    storage.write_file(
        tmp_path / "t.parquet", lambda stream: frame.write_parquet(stream, compression="zstd")
    )
    assert pl.read_parquet(tmp_path / "t.parquet").equals(frame)


def test_bytes_of_any_format_land_as_they_are(tmp_path: Path) -> None:
    data = memoryview(bytes(range(256)) * 8192)
    for content in (data, data.cast("b"), data.cast("i"), lambda stream: stream.write(data)):
        assert storage.write_file(tmp_path / "f", content) == (
            hashlib.sha256(data).hexdigest(),
            len(data),
        )
        assert (tmp_path / "f").read_bytes() == data


def test_disk_space_is_checked_before(tmp_path: Path) -> None:
    storage.require_space(tmp_path, 1)
    with pytest.raises(UserError, match=r"need .* TB, have ") as caught:
        storage.require_space(tmp_path, 10**18)
    assert (caught.value.code, caught.value.exit_code) == (Reason.DISK_FULL, Exit.RESOURCES)


def test_lines_survive_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    storage.append_line(path, {"step": 1})
    storage.append_line(path, {"step": 2})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    storage.append_line(path, {"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    path.write_bytes(b"torn")
    storage.append_line(path, {"step": 1})
    assert path.read_text() == '{"step":1}\n'


def test_nothing_is_written_through_a_link_or_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "home")
    with pytest.raises(UserError) as caught:
        storage.make_folder(tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == (Reason.PATH_ESCAPE, Exit.USAGE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        storage.make_folder(tmp_path / "file")
    assert names(tmp_path / "home") == []


def test_sweep_removes_what_dead_runs_left_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "a.parquet.tmp-123-0123abcd",
        "manifest.json.tmp-9-ffffffff",
        "a.parquet",
        "notes.tmp",
        "x.tmp-y",
    ):
        (tmp_path / name).write_text("")
    assert storage.remove_temporary_files(tmp_path) == 2
    assert names(tmp_path) == ["a.parquet", "notes.tmp", "x.tmp-y"]


# ---- the lock

HOLD = "import sys, time\nfrom pathlib import Path\nfrom bitimely_core.store import locks\nwith locks.lock_folder(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"


def take(folder: Path, wait: float = 0.0) -> int | None:
    """Hold the lock for a moment: the process that stands in it meanwhile, if any does."""
    with locks.lock_folder(folder, wait):
        content = (folder / ".lock").read_bytes()
        return int(json.loads(content)["pid"]) if content else None


def test_a_second_process_reports_the_lock_holder_until_it_is_killed(tmp_path: Path) -> None:
    holder = run(HOLD, tmp_path)
    assert holder.stdout is not None
    holder.stdout.readline()
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"process {holder.pid} on .* since 20\d\d-") as caught:
        take(tmp_path, 0.2)
    assert (caught.value.code, caught.value.exit_code) == (Reason.LOCKED, Exit.LOCKED)
    assert time.monotonic() - start >= 0.2
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert take(tmp_path) == os.getpid()
    assert (tmp_path / ".lock").read_bytes() == b""


def test_what_stands_in_the_lock_decides_nothing(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"pid": 1, "host": "elsewhere"')
    assert take(tmp_path) == os.getpid()
    (tmp_path / ".lock").write_text('{"pid": 1, "host": "\x1b[31m", "since": "now"}')
    with locks.lock_folder(tmp_path), pytest.raises(UserError) as caught:
        take(tmp_path)
    assert caught.value.code == Reason.LOCKED


def test_shared_holders_keep_a_single_one_out(tmp_path: Path) -> None:
    with (
        locks.lock_folder(tmp_path, shared=True),
        locks.lock_folder(tmp_path, shared=True),
        pytest.raises(UserError) as caught,
    ):
        take(tmp_path)
    assert caught.value.code == Reason.LOCKED
    with (
        locks.lock_folder(tmp_path),
        pytest.raises(UserError) as caught,
        locks.lock_folder(tmp_path, shared=True),
    ):
        raise AssertionError("shared beside a single one")
    assert caught.value.code == Reason.LOCKED


def test_without_flock_a_file_stands_in_and_is_never_stolen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locks.lock_folder(tmp_path):
        with pytest.raises(UserError, match=r"remove .*lock-exclusive") as caught:
            take(tmp_path)
        assert caught.value.exit_code == Exit.LOCKED
    take(tmp_path)
    assert names(tmp_path) == [".lock"]


# ---- the manifest


def published(folder: Path, content: bytes = b"rows", generation: int = 1) -> dict[str, Any]:
    name, digest, size = storage.write_hashed(
        folder, "part", ".bin", lambda stream: stream.write(content)
    )
    return manifests.publish(
        folder, {"dataset": "x"}, {name: {"sha256": digest, "size": size, "rows": 3}}, generation
    )


def test_a_manifest_names_everything_and_itself(tmp_path: Path) -> None:
    body = published(tmp_path)
    assert manifests.read_manifest(tmp_path) == body
    assert body["manifest_sha256"] == storage.fingerprint(
        {k: v for k, v in body.items() if k != "manifest_sha256"}
    )
    assert manifests.find_damage(tmp_path, body) == []
    manifests.check_files(tmp_path, body)


def test_nothing_published_is_incomplete(tmp_path: Path) -> None:
    for folder, code in ((tmp_path, Reason.INCOMPLETE), (tmp_path / "absent", Reason.NOT_FOUND)):
        with pytest.raises(UserError) as caught:
            manifests.read_manifest(folder)
        assert (caught.value.code, caught.value.exit_code) == (code, Exit.REFUSED)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b'"rows":3', b'"rows":4'),
        lambda raw: re.sub(
            rb'"sha256":"(.)', lambda m: b'"sha256":"' + (b"0" if m[1] != b"0" else b"1"), raw
        ),
        lambda raw: re.sub(rb'"manifest_sha256":"....', b'"manifest_sha256":"0000', raw),
        lambda raw: raw + b" ",
        lambda raw: raw[:-20],
        lambda raw: raw.replace(b",", b", ", 1),
        lambda raw: b"\x00" * len(raw),
        lambda raw: b"[" * 100_000,
        lambda raw: b"{}\n",
    ],
)
def test_any_change_of_the_manifest_is_noticed(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    published(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=r"manifest\.json") as caught:
        manifests.read_manifest(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == (Reason.INTEGRITY, Exit.INTEGRITY)


def test_damaged_missing_and_odd_files_are_named(tmp_path: Path) -> None:
    files = {}
    for i in range(5):
        name, digest, size = storage.write_hashed(
            tmp_path, f"part{i}", ".bin", lambda stream, i=i: stream.write(b"%d" % i * 100)
        )  # type: ignore[misc]
        files[name] = {"sha256": digest, "size": size}
    body = manifests.publish(tmp_path, {}, files, 1)
    flipped, short, gone, pipe, _ = sorted(files)
    (tmp_path / flipped).write_bytes(b"x" * 100)
    (tmp_path / short).write_bytes(b"1" * 99)
    (tmp_path / gone).unlink()
    (tmp_path / pipe).unlink()
    os.mkfifo(tmp_path / pipe)  # must not hang
    assert [Path(str(f.file)).name for f in manifests.find_damage(tmp_path, body)] == [
        flipped,
        short,
        gone,
        pipe,
    ]
    with pytest.raises(UserError) as caught:
        manifests.check_files(tmp_path, body)
    assert len(caught.value.details) == 3
    body["files"]["../outside"] = {"sha256": "", "size": 0}
    assert "leaves the folder" in str(
        manifests.find_damage(tmp_path, body, ["../outside"])[0].message
    )


def test_times_alone_are_no_change(tmp_path: Path) -> None:
    body = published(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 2**31))
    assert manifests.read_manifest(tmp_path) == body
    assert manifests.find_damage(tmp_path, body) == []


def test_a_generation_that_came_in_between_stops_the_commit(tmp_path: Path) -> None:
    published(tmp_path)
    published(tmp_path, b"second", 2)
    with pytest.raises(UserError) as caught:
        published(tmp_path, b"third", 2)
    assert caught.value.exit_code == Exit.LOCKED
    assert manifests.read_manifest(tmp_path)["generation"] == 2
    assert json.loads((tmp_path / "manifest-1.json").read_bytes())["generation"] == 1


def test_publish_refuses_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        manifests.publish(tmp_path, {}, {"a": {"sha256": "", "size": 1}}, 1)
    assert caught.value.exit_code == Exit.INTEGRITY
    assert names(tmp_path) == []


def test_a_file_system_without_hard_links_keeps_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published(tmp_path)
    Faults(monkeypatch, ("os_link",)).at(1, errno.EPERM)
    published(tmp_path, b"second", 2)
    assert json.loads((tmp_path / "manifest-1.json").read_bytes()) == first


def test_files_go_one_generation_later(tmp_path: Path) -> None:
    pattern = re.compile(r"part-[0-9a-f]{16}\.bin")
    kept = []
    for generation in (1, 2, 3):
        kept.append(next(iter(published(tmp_path, b"%d" % generation, generation)["files"])))
        (tmp_path / "mine.bin").write_text("")
        manifests.remove_old_files(tmp_path, pattern)
    assert names(tmp_path) == sorted([*kept[1:], "manifest-2.json", "manifest.json", "mine.bin"])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINTR])
def test_a_commit_that_fails_anywhere_shows_one_generation_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first = published(tmp_path)
    faults = Faults(monkeypatch)
    passed = False
    for n in range(1, 60):
        faults.at(n, number)
        error = attempted(lambda: published(tmp_path, b"second", 2))
        passed = faults.seen < n
        faults.at(0, number)
        assert error is None or error.exit_code == Exit.RESOURCES
        now = manifests.read_manifest(tmp_path)
        assert manifests.find_damage(tmp_path, now) == []
        assert now["generation"] == 2 if error is None else now == first or now["generation"] == 2
        assert not [name for name in names(tmp_path) if "tmp" in name]
        if passed:
            break
        if now != first:  # back to the first, for the next n
            (tmp_path / "manifest-1.json").replace(tmp_path / "manifest.json")
    assert passed
    assert n > 12
