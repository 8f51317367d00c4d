"""Atomic, verified writing of files and folders, and locks. No other module writes.

A file is written to `<name>.tmp-<pid>-<random>` in the same folder, flushed to the disk, read back
and compared, renamed, and the folder is flushed too: a kill or a power cut leaves the old file or
the new one. The writer holds a lock on the temporary file, so that only those of dead processes are
removed. Imports neither pyarrow nor torch, so both sides of the cache use it. Every call of the
operating system that can fail goes through one of the `os_*` functions below, so that a test can
make the n-th one fail.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import glob
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    clean,
    integrity_error,
    usage_error,
)
from bitimely_core.system_errors import (
    RETRY_HINT,
    describe_os_error,
    format_size,
    translate_system_errors,
)

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

LOCK = ".lock"
CHUNK = 1 << 20  # bytes a read or write
TEMPORARY_NAME = re.compile(r"\.tmp-\d+-[0-9a-f]{8}$")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # the first part of a path that was a URL
# json.dumps makes one a call
ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def os_open(path: Path, flags: int) -> int:
    """A file descriptor that child processes do not inherit; a new file is private to its owner,
    whatever the umask.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o600)
    return fd


def os_read(fd: int, size: int) -> bytes:
    """Up to `size` bytes."""
    return os.read(fd, size)


def os_write(fd: int, data: memoryview) -> int:
    """Write some of `data`; the number of bytes."""
    return os.write(fd, data)


def os_fsync(fd: int) -> None:
    """Flush a file or a folder to the disk."""
    os.fsync(fd)


def os_replace(old: Path, new: Path) -> None:
    """Rename, replacing an existing file."""
    old.replace(new)


def os_link(old: Path, new: Path) -> None:
    """A second name for the same file; fails where `new` exists."""
    os.link(old, new)


def os_unlink(path: Path) -> None:
    """Remove a name."""
    path.unlink()


def os_rmdir(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def os_truncate(fd: int, size: int) -> None:
    """Cut a file to `size` bytes."""
    os.ftruncate(fd, size)


def os_mkdir(path: Path) -> None:
    """A folder that is private to its owner, whatever the umask."""
    path.mkdir(0o700)
    path.chmod(0o700)


# ---- canonical JSON, hashes, sizes


def encode_json(obj: Any) -> bytes:
    """`obj` as canonical JSON: sorted keys, no blanks, UTF-8. Raises ValueError for NaN and
    infinities.
    """
    return ENCODER.encode(obj).encode()


def decode_json(raw: bytes) -> Any:
    """`raw` as strict JSON. Raises ValueError, for NaN and infinities too."""
    return json.loads(raw, parse_constant=_parse_finite, parse_float=_parse_finite)


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


def fingerprint(obj: Any) -> str:
    """SHA-256, in hex, of the canonical JSON of `obj`."""
    return hashlib.sha256(encode_json(obj)).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises OSError."""
    return hash_with_size(path)[0]


def hash_with_size(path: Path) -> tuple[str, int]:
    """SHA-256, in hex, and size in bytes of a file. Raises OSError."""
    total, size = hashlib.sha256(), 0
    fd = os_open(path, os.O_RDONLY)
    try:
        while block := os_read(fd, CHUNK):
            total.update(block)
            size += len(block)
    finally:
        os.close(fd)
    return total.hexdigest(), size


def require_space(folder: Path, need: int) -> None:
    """Raises UserError (disk_full, exit 6) when the disk of `folder` has fewer than `need` bytes
    left.
    """
    with translate_system_errors(folder):
        have = shutil.disk_usage(folder).free
    if have < need:
        raise UserError(
            Reason.DISK_FULL,
            f"disk full: need {format_size(need)}, have {format_size(have)}",
            hint=f"Make room. {RETRY_HINT}",
            file=str(folder),
            exit_code=Exit.RESOURCES,
        )


# ---- writing


class _HashingWriter(io.RawIOBase):
    """Counts and hashes the bytes written to a file descriptor, and keeps the error that a
    serialiser may hide.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd, self.total, self.size, self.error = (
            fd,
            hashlib.sha256(),
            0,
            cast("OSError | None", None),
        )

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    # one call each: the buffer above repeats it when it was interrupted
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            done = os_write(self.fd, view)
        except OSError as error:
            self.error = error
            raise
        self.total.update(view[:done])
        self.size += done
        return done


Content = Callable[[BinaryIO], object] | bytes | memoryview
"""Content of a file: bytes, or a function that writes them to a stream (not seekable)."""


class _TemporaryFile(NamedTuple):
    """A new file that its writer holds locked."""

    path: Path
    fd: int


def write_verified(file: _TemporaryFile, content: Content) -> tuple[str, int]:
    """Write the content of a new file, flush it and read it back; its SHA-256 and size.

    Content in memory is compared byte by byte with the file, which is stronger and cheaper than a
    second SHA-256.
    """
    path, sink = file.path, _HashingWriter(file.fd)
    try:
        if callable(content):
            stream = io.BufferedWriter(sink, CHUNK)
            content(cast("BinaryIO", stream))
            stream.flush()
            stream.detach()
        else:
            left = memoryview(content).cast("B")
            while left:
                left = left[sink.write(left) :]
        os_fsync(file.fd)
    except Exception as error:
        cause = sink.error or error  # serialisers wrap it
        cause.add_note(
            f"needs more than {format_size(sink.size)}"
            if callable(content)
            else f"needs {format_size(len(content))}"
        )
        if cause is error:
            raise
        raise cause from None
    written = sink.total.hexdigest(), sink.size
    if (
        hash_with_size(path) != written
        if callable(content)
        else not _has_content(path, memoryview(content).cast("B"))
    ):
        raise integrity_error(
            str(path),
            "what was read back differs from what was written",
            hint="Check disk and memory of this machine",
        )
    return written


def _has_content(path: Path, data: memoryview) -> bool:
    """Whether the bytes of a file are `data` and nothing else."""
    fd, at = os_open(path, os.O_RDONLY), 0
    try:
        while block := os_read(fd, CHUNK):
            if data[at : at + len(block)].tobytes() != block:
                return False
            at += len(block)
    finally:
        os.close(fd)
    return at == len(data)


def _name_temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def temporary_file(path: Path) -> Iterator[_TemporaryFile]:
    """A new file beside `path`, removed at the end where it was not renamed. Those of killed
    processes go first. Errors name `path`.
    """
    with translate_system_errors(path):
        for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
            if is_temporary(left.name):
                _remove_abandoned(left)
        while True:
            temporary = _name_temporary(path)
            fd = os_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            if _try_lock(fd) is not False and os.fstat(fd).st_nlink:
                break
            # taken for abandoned by a process that removes such files, between the two calls
            os.close(fd)
        try:
            yield _TemporaryFile(temporary, fd)
        finally:
            try:
                with suppress(OSError):
                    if temporary.exists():
                        os_unlink(temporary)
            finally:
                os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Lock a file if no other process has; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    fd = os_open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os_fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush folders
            raise
    finally:
        os.close(fd)


def write_file(path: Path, content: Content) -> tuple[str, int]:
    """Write `content` to `path` in one atomic step, an existing file is replaced; its SHA-256 in
    hex and size in bytes.

    Raises UserError: disk_full, resource_limit or io_error (exit 6), integrity (exit 5) when it
    reads back differently. The previous file is intact.
    """
    with temporary_file(path) as temporary:
        found = write_verified(temporary, content)
        os_replace(temporary.path, path)
        sync_folder(path.parent)
    return found


def write_hashed(folder: Path, stem: str, suffix: str, content: Content) -> tuple[str, str, int]:
    """As `write_file`, under the name `<stem>-<first 16 hex digits of its SHA-256><suffix>`, so
    that other content is never replaced.

    Returns the name, SHA-256 in hex and size in bytes.
    """
    with temporary_file(folder / f"{stem}{suffix}") as temporary:
        found, size = write_verified(temporary, content)
        name = f"{stem}-{found[:16]}{suffix}"
        os_replace(temporary.path, folder / name)
        sync_folder(folder)
    return name, found, size


def write_bytes(path: Path, data: bytes | memoryview) -> tuple[str, int]:
    """`write_file` of `data`."""
    return write_file(path, data)


def write_json(path: Path, obj: Any) -> tuple[str, int]:
    """`write_file` of `obj` as canonical JSON and a line break."""
    return write_bytes(path, encode_json(obj) + b"\n")


def encode_parquet(
    data: pl.DataFrame | pa.Table, rows: int = 1 << 20
) -> Callable[[BinaryIO], object]:
    """What writes a frame or an Arrow table as Parquet to a stream, the same bytes for the same
    content; `rows`: of a row group of a table.
    """
    import polars as pl
    import pyarrow.parquet as pq

    if isinstance(data, pl.DataFrame):
        return lambda stream: data.write_parquet(stream, compression="zstd")
    return lambda stream: pq.write_table(
        data, stream, compression="zstd", version="2.6", row_group_size=rows
    )


def write_parquet(
    path: Path, data: pl.DataFrame | pa.Table, rows: int = 1 << 20
) -> tuple[str, int]:
    """`write_file` of a frame or an Arrow table as Parquet, see `encode_parquet`."""
    return write_file(path, encode_parquet(data, rows))


@contextmanager
def open_scratch(folder: Path) -> Iterator[BinaryIO]:
    """A file without a name on the disk of `folder`, or where that is read-only of the folder for
    temporary files; its space is free when nobody has it open.

    Raises UserError: disk_full, io_error (exit 6).
    """
    with (
        translate_system_errors(folder),
        tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None) as stream,
    ):
        yield cast(BinaryIO, stream)


def write_secret(path: Path, size: int) -> None:
    """Random bytes, private to their owner, and then their SHA-256 beside them; an existing file is
    kept.

    Raises UserError: integrity (exit 5) for a file that differs from its SHA-256, and as
    `write_file`.
    """
    with translate_system_errors(path):
        if path.parent.is_dir():
            remove_temporary_files(path.parent)
        if fault := find_secret_damage(path):
            raise damage_error(fault)
        if not path.exists():
            make_folder(path.parent)
            with temporary_file(path) as temporary:
                write_verified(temporary, secrets.token_bytes(size))
                with suppress(FileExistsError):  # another process was faster
                    os_link(temporary.path, path)
            sync_folder(path.parent)
        if not (mark := _name_checksum(path)).exists():
            write_bytes(mark, f"{hash_file(path)}  {path.name}\n".encode())


def _name_checksum(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def damage_error(first: Finding, *others: Finding) -> UserError:
    """The findings of `find_damage` as one error (integrity, exit 5)."""
    return integrity_error(
        first.file, first.problem, first.requirement, first.hint, details=list(others)
    )


def find_secret_damage(path: Path) -> Finding | None:
    """What is wrong with a file of `write_secret`; None where it is intact or has no SHA-256 beside
    it.
    """
    with translate_system_errors(path):
        if not (mark := _name_checksum(path)).exists():
            return None
        expected = mark.read_bytes()
        found = f"{hash_file(path)}  {path.name}\n".encode() if path.is_file() else b""
    if found == expected:
        return None
    problem = f"differs from {mark.name}" if found else "is missing"
    hint = (
        f"Restore a copy; removing {path.name} and {mark.name} makes a new key and other pseudonyms"
    )
    return Finding(
        Reason.INTEGRITY, problem, "expected the key of the pseudonyms", hint, file=str(path)
    )


def sync_file(path: Path) -> None:
    """Flush a file to the disk. Raises UserError (exit 6)."""
    with translate_system_errors(path):
        fd = os_open(path, os.O_RDONLY)
        try:
            os_fsync(fd)
        finally:
            os.close(fd)


def append_line(path: Path, obj: Any) -> None:
    """Add `obj` as one line of canonical JSON; an unfinished last line of a killed run is removed
    first. Raises UserError (exit 6).
    """
    with translate_system_errors(path):
        fd = os_open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            tail = os.pread(fd, CHUNK, max(0, size - CHUNK))
            if tail and not tail.endswith(b"\n"):
                os_truncate(fd, size - (len(tail) - tail.rfind(b"\n") - 1))
            _write_all(fd, encode_json(obj) + b"\n")
        finally:
            os.close(fd)


def create_file(path: Path) -> None:
    """An empty file, also in the place of another; not flushed to the disk. Raises UserError (exit
    6).
    """
    with translate_system_errors(path):
        fd = os_open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
        try:
            os_truncate(fd, 0)
        finally:
            os.close(fd)


def append_bytes(path: Path, data: bytes) -> None:
    """Add `data` to a file that is there. Raises UserError (exit 6)."""
    with translate_system_errors(path):
        fd = os_open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os_write(fd, left) :]


def make_folder(path: Path) -> Path:
    """A folder and its missing parents, readable by their owner alone.

    Raises UserError: path_escape (exit 2) when `path` is a URL or itself a link, not_found (exit 2)
    when it is a file, io_error (exit 6).
    """
    refuse_url(path)
    refuse_link(path)
    with translate_system_errors(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process was faster
                os_mkdir(folder)
                sync_folder(folder.parent)
    if not path.is_dir():
        raise usage_error(
            "is no folder", "expected a folder", code=Reason.NOT_FOUND, file=str(path)
        )
    return path


def refuse_link(path: Path) -> None:
    """Raises UserError (path_escape, exit 2) when `path` itself is a link."""
    if path.is_symlink():
        problem, requirement, hint = (
            "is a link",
            "results are not written through links",
            "Give the folder that it leads to",
        )
        raise usage_error(problem, requirement, hint, code=Reason.PATH_ESCAPE, file=str(path))


def refuse_url(path: Path) -> None:
    """Raises UserError (path_escape, exit 2) when `path` was made from a URL: it would be a local
    folder of that name.
    """
    if path.parts and URL.fullmatch(path.parts[0]):
        hint = "Give a local folder, and copy it there afterwards"
        raise usage_error(
            "is a URL",
            "expected a path on this machine: workspaces and results are local",
            hint,
            code=Reason.PATH_ESCAPE,
            file=str(path),
        )


def is_temporary(name: str) -> bool:
    """Whether a killed process may have left a file or folder of that name."""
    return TEMPORARY_NAME.search(name) is not None


def remove_temporary_files(folder: Path) -> int:
    """Remove what killed processes left in `folder` under temporary names; the number of files.
    Those of a live process stay.
    """
    removed = 0
    for path in list_folder(folder) if folder.is_dir() else []:
        if is_temporary(path.name):
            try:
                removed += _remove_abandoned(path)
            except OSError as error:
                # of a folder that is only read
                if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
                    raise describe_os_error(error, path) from error
    return removed


def _remove_abandoned(path: Path) -> bool:
    """Remove a temporary file unless its writer lives, or a folder that was being removed."""
    if path.is_dir() and not path.is_symlink():
        _remove_tree(path)
        return True
    try:
        fd = os_open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # renamed or removed meanwhile
        return False
    try:
        abandoned = _try_lock(fd) is True
        if abandoned:
            with suppress(FileNotFoundError):
                os_unlink(path)
        return abandoned
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in one step, an existing file is replaced. Raises UserError (exit
    6).
    """
    with translate_system_errors(new):
        os_replace(old, new)
        sync_folder(new.parent)


def remove_file(path: Path) -> None:
    """Remove a file if it is there. Raises UserError (exit 6)."""
    with translate_system_errors(path), suppress(FileNotFoundError):
        os_unlink(path)
        sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content; a kill leaves it as it is or under a temporary name. Raises
    UserError (exit 6).
    """
    with translate_system_errors(path):
        if path.is_dir() and not path.is_symlink():
            temporary = path if path.name.endswith(".tmp") else _name_temporary(path)
            if temporary != path:
                os_replace(path, temporary)
            _remove_tree(temporary)


def _remove_tree(path: Path) -> None:
    for inner in sorted(path.iterdir()):
        if inner.is_dir() and not inner.is_symlink():
            _remove_tree(inner)
        else:
            os_unlink(inner)
    os_rmdir(path)


def list_folder(folder: Path) -> list[Path]:
    """What a folder holds, in the order of the names."""
    with translate_system_errors(folder):
        return sorted(folder.iterdir())


# ---- one writer at a time


@contextmanager
def lock(folder: Path, wait: float = 0.0, *, shared: bool = False) -> Iterator[None]:
    """Hold `folder` while the block runs: `flock` on `.lock`, which the kernel frees when the
    process dies and which is never removed.

    The content of the file (pid, host, since) is for the message only.

    Args:
        folder: made if it is missing.
        wait: seconds to wait for another process.
        shared: several processes may hold it at once; none of them while one holds it alone.

    Raises:
        UserError: locked (exit 7) naming the process that holds it; io_error (exit 6).
    """
    path, deadline = folder / LOCK, time.monotonic() + wait
    fd = _open_lock(path)
    guard: Path | None = None
    try:
        guard = _acquire_lock(fd, path, deadline, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        # its holder replaced the folder: the next one would lock another file
        while not _is_same_file(fd, path):
            os.close(fd)
            fd = _open_lock(path)
            guard = _acquire_lock(fd, path, deadline, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        with translate_system_errors(path):
            os.ftruncate(fd, 0)
            since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            os_write(
                fd,
                memoryview(
                    encode_json({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
                    + b"\n"
                ),
            )
        yield
    finally:
        if guard is not None:
            with suppress(OSError):
                guard.unlink()
        if not shared:
            with suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)


@contextmanager
def hold_folder(folder: Path, wait: float) -> Iterator[None]:
    """Processes that rewrite one file of `folder` from what they read go one after the other,
    without a file of a lock; after `wait` seconds, and on file systems without locks, the block
    runs all the same.
    """
    with translate_system_errors(folder):
        fd, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + wait
    try:
        while _try_lock(fd) is False and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    while True:
        make_folder(path.parent)
        refuse_link(path)
        # the folder was removed meanwhile
        with translate_system_errors(path), suppress(FileNotFoundError):
            return os_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _acquire_lock(fd: int, path: Path, deadline: float, kind: int) -> Path | None:
    """Wait for the lock until `deadline`. Where the file system has no flock: a file made with
    O_EXCL, to be removed at the end.
    """
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return None
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _locked_error(
                    path,
                    "Repeat the command when it has ended; ingest waits for it under --wait SECONDS",
                ) from error
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise describe_os_error(error, path) from error
            guard = path.with_name(".lock-exclusive")
            try:
                with translate_system_errors(guard):
                    os.close(os_open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                return guard
            except UserError as refused:
                if not isinstance(refused.__cause__, FileExistsError):
                    raise
                if time.monotonic() >= deadline:
                    raise _locked_error(
                        path,
                        f"This file system has no locks (flock): if that process is gone, remove {guard}",
                    ) from error
        time.sleep(0.05)


def _locked_error(path: Path, action: str) -> UserError:
    """The error of exit 7, with the content of the lock."""
    try:
        holder = json.loads(path.read_bytes())
        text = f"in use by process {int(holder['pid'])} on {clean(str(holder['host']), 80)} since {clean(str(holder['since']), 40)}"
    except (OSError, ValueError, KeyError, TypeError):
        text = "in use by another process"
    return UserError(Reason.LOCKED, text, hint=action, file=str(path), exit_code=Exit.LOCKED)
