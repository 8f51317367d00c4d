"""Writes files and folders so that a crash leaves the old content or the new one, never a mixture.

A file is written under the temporary name `<name>.tmp-<pid>-<random>` in the same folder, hashed on
the way, flushed to the disk and renamed. Then its folder is flushed. The writer holds a lock on the
temporary file, so that other processes remove only those whose writer was killed.

Only this module changes the disk, but for the files of locks (`locks`). Every call of the operating
system that can fail goes through one of the `os_*` functions below, so that a test can make the
n-th one fail. Importing this module loads neither pyarrow, polars nor torch.
"""

from __future__ import annotations

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
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from bitimely_core.errors import Exit, Finding, Reason, UserError, integrity_error, usage_error
from bitimely_core.system_errors import (
    RETRY_HINT,
    describe_os_error,
    format_size,
    translate_system_errors,
)

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

CHUNK = 1 << 20  # bytes a read or write
ROW_GROUP = 1 << 20  # rows of a row group of an Arrow table in Parquet
TEMPORARY_NAME = re.compile(r"\.tmp-\d+-[0-9a-f]{8}$")
# what a file system answers that has no hard links, or none to a file of another one
WITHOUT_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # the first part of a path that was a URL
# json.dumps would make an encoder at each call
ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def os_open(path: Path, flags: int) -> int:
    """A file descriptor that child processes do not inherit.

    A new file is private to its owner, whatever the umask.
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


@contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of `os_open`, closed at the end."""
    fd = os_open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


# ---- canonical JSON, hashes, sizes


def encode_json(obj: Any) -> bytes:
    """`obj` as canonical JSON: sorted keys, no blanks, UTF-8.

    Raises ValueError for NaN and infinities.
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


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, of the names and contents of files and of the names of their folders. Raises
    OSError.
    """
    digest = hashlib.sha256()
    for path in paths:
        name = f"{path.parent.name}/{path.name}\0{path.stat().st_size}\0"
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def hash_with_size(path: Path) -> tuple[str, int]:
    """SHA-256, in hex, and size in bytes of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with _open_file(path, os.O_RDONLY) as fd:
        while block := os_read(fd, CHUNK):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def require_space(folder: Path, need: int) -> None:
    """Raises UserError (disk_full, exit 6) when the disk of `folder` has less than `need` bytes."""
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
    """A stream into a file descriptor that counts and hashes its bytes.

    It keeps the error of a failed write, which a serialiser may replace by one of its own.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        """Write some of `data` by one call of the system; the buffer above writes the rest."""
        view = memoryview(data).cast("B")
        try:
            done = os_write(self.fd, view)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(view[:done])
        self.size += done
        return done


Content = Callable[[BinaryIO], object] | bytes | memoryview
"""Content of a file: bytes, or a function that writes them to a stream (not seekable)."""


class TemporaryFile(NamedTuple):
    """A new file that its writer holds locked."""

    path: Path
    fd: int


def write_content(file: TemporaryFile, content: Content) -> tuple[str, int]:
    """Write the content of a new file and flush it to the disk.

    Returns its SHA-256 in hex and its size in bytes. The error of a failed write has a note with
    the size that the file needs.
    """
    with _HashingWriter(file.fd) as sink:
        try:
            if callable(content):
                stream = io.BufferedWriter(sink, CHUNK)
                content(cast("BinaryIO", stream))
                stream.flush()
            else:
                _write_all(sink.write, content)
            os_fsync(file.fd)
        except Exception as error:
            cause = sink.error or error
            cause.add_note(_describe_need(content, sink.size))
            if cause is error:
                raise
            raise cause from None
    return sink.digest.hexdigest(), sink.size


def _describe_need(content: Content, written: int) -> str:
    """The size that a file needs, as far as it can be told after `written` bytes."""
    if callable(content):
        return f"needs more than {format_size(written)}"
    return f"needs {format_size(len(content))}"


def _write_all(write: Callable[[memoryview], int], data: bytes | memoryview) -> None:
    """Call `write`, which may take a part only, until all of `data` is written."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[write(rest) :]


@contextmanager
def temporary_file(path: Path) -> Iterator[TemporaryFile]:
    """A new file beside `path`, removed at the end unless it was renamed. Errors name `path`.

    Temporary files for the same `path` that killed processes left are removed first.
    """
    with translate_system_errors(path):
        for other in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
            if is_temporary(other.name):
                _remove_abandoned(other)
        file = _create_temporary(path)
        try:
            yield file
        finally:
            try:
                with suppress(OSError):
                    if file.path.exists():
                        os_unlink(file.path)
            finally:
                os.close(file.fd)


def _create_temporary(path: Path) -> TemporaryFile:
    """A new, locked file under a temporary name beside `path`.

    Between creation and lock another process may take it for abandoned and remove it: then the next
    name is tried.
    """
    while True:
        temporary = _name_temporary(path)
        fd = os_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        if try_lock(fd) is not False and os.fstat(fd).st_nlink:
            return TemporaryFile(temporary, fd)
        os.close(fd)


def _name_temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def is_temporary(name: str) -> bool:
    """Whether a killed process may have left a file or folder of that name."""
    return TEMPORARY_NAME.search(name) is not None


def try_lock(fd: int) -> bool | None:
    """Lock a file, without waiting, for this process alone.

    Returns False where another process has it, and None where the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    with _open_file(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            os_fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot flush folders
                raise


def write_file(path: Path, content: Content) -> tuple[str, int]:
    """Write `content` to `path` in one step, replacing an existing file.

    Returns its SHA-256 in hex and its size in bytes. Raises UserError: disk_full, resource_limit or
    io_error (exit 6). The previous file is intact then.
    """
    with temporary_file(path) as temporary:
        sha256, size = write_content(temporary, content)
        os_replace(temporary.path, path)
        sync_folder(path.parent)
    return sha256, size


def write_hashed(folder: Path, stem: str, suffix: str, content: Content) -> tuple[str, str, int]:
    """As `write_file`, under a name that other content never has, so that it is never replaced.

    Returns the name, `<stem>-<first 16 hex digits of its SHA-256><suffix>`, the SHA-256 in hex and
    the size in bytes.
    """
    with temporary_file(folder / f"{stem}{suffix}") as temporary:
        sha256, size = write_content(temporary, content)
        name = f"{stem}-{sha256[:16]}{suffix}"
        os_replace(temporary.path, folder / name)
        sync_folder(folder)
    return name, sha256, size


def link_file(path: Path, new: Path) -> None:
    """One more name of a file that is never written again; a copy where there are no links.

    An existing file of that name is replaced. Raises OSError.
    """
    with suppress(FileNotFoundError):
        os_unlink(new)
    try:
        os_link(path, new)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        with path.open("rb") as source:
            write_file(new, lambda stream: shutil.copyfileobj(source, stream))


def write_bytes(path: Path, data: bytes | memoryview) -> tuple[str, int]:
    """`write_file` of `data`."""
    return write_file(path, data)


def write_json(path: Path, obj: Any) -> tuple[str, int]:
    """`write_file` of `obj` as canonical JSON and a line break."""
    return write_bytes(path, encode_json(obj) + b"\n")


def encode_parquet(data: pl.DataFrame | pa.Table) -> Callable[[BinaryIO], object]:
    """A function that writes a frame or an Arrow table as Parquet to a stream.

    The same content gives the same bytes.
    """
    import polars as pl
    import pyarrow.parquet as pq

    if isinstance(data, pl.DataFrame):
        return lambda stream: data.write_parquet(stream, compression="zstd")
    return lambda stream: pq.write_table(
        data, stream, compression="zstd", version="2.6", row_group_size=ROW_GROUP
    )


def write_parquet(path: Path, data: pl.DataFrame | pa.Table) -> tuple[str, int]:
    """`write_file` of a frame or an Arrow table as Parquet, see `encode_parquet`."""
    return write_file(path, encode_parquet(data))


@contextmanager
def open_scratch(folder: Path) -> Iterator[BinaryIO]:
    """A file without a name on the disk of `folder`; its space is free when nobody has it open.

    Where `folder` is read-only it is in the system's folder for temporary files.

    Raises UserError: disk_full, io_error (exit 6).
    """
    place = folder if os.access(folder, os.W_OK) else None
    with translate_system_errors(folder), tempfile.TemporaryFile(dir=place) as stream:
        yield cast(BinaryIO, stream)


def write_secret(path: Path, size: int) -> None:
    """Write random bytes, private to their owner, and then their SHA-256 beside them.

    An existing file is kept. Raises UserError: integrity (exit 5) for a file that differs from its
    SHA-256, and as `write_file`.
    """
    with translate_system_errors(path):
        if path.parent.is_dir():
            remove_temporary_files(path.parent)
        if damage := find_secret_damage(path):
            raise damage_error(damage)
        if not path.exists():
            _create_secret(path, size)
        if not (checksum := _name_checksum(path)).exists():
            write_bytes(checksum, _make_checksum_line(path))


def _create_secret(path: Path, size: int) -> None:
    make_folder(path.parent)
    with temporary_file(path) as temporary:
        write_content(temporary, secrets.token_bytes(size))
        with suppress(FileExistsError):  # another process was faster
            os_link(temporary.path, path)
    sync_folder(path.parent)


def _name_checksum(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _make_checksum_line(path: Path) -> bytes:
    """The line that `sha256sum` prints for a file."""
    return f"{hash_file(path)}  {path.name}\n".encode()


def damage_error(first: Finding, *others: Finding) -> UserError:
    """The findings of `find_damage` as one error (integrity, exit 5)."""
    return integrity_error(
        first.file, first.problem, first.requirement, first.hint, details=list(others)
    )


def find_secret_damage(path: Path) -> Finding | None:
    """What is wrong with a file of `write_secret`.

    None where it is intact or has no SHA-256 beside it.
    """
    checksum = _name_checksum(path)
    with translate_system_errors(path):
        if not checksum.exists():
            return None
        expected = checksum.read_bytes()
        actual = _make_checksum_line(path) if path.is_file() else b""
    if actual == expected:
        return None
    return Finding(
        Reason.INTEGRITY,
        f"differs from {checksum.name}" if actual else "is missing",
        "expected the key of the pseudonyms",
        f"Restore a copy; removing {path.name} and {checksum.name} makes a new key and other "
        "pseudonyms",
        file=str(path),
    )


def sync_file(path: Path) -> None:
    """Flush a file to the disk. Raises UserError (exit 6)."""
    with translate_system_errors(path), _open_file(path, os.O_RDONLY) as fd:
        os_fsync(fd)


def append_line(path: Path, obj: Any) -> None:
    """Add `obj` as one line of canonical JSON. Raises UserError (exit 6).

    An unfinished last line, as a killed process leaves it, is removed first.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with translate_system_errors(path), _open_file(path, flags) as fd:
        _remove_unfinished_line(fd)
        _append_to(fd, encode_json(obj) + b"\n")


def _remove_unfinished_line(fd: int) -> None:
    """Cut a file after its last line break; lines are shorter than `CHUNK`."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, CHUNK, max(0, size - CHUNK))
    if tail and not tail.endswith(b"\n"):
        unfinished = len(tail) - (tail.rfind(b"\n") + 1)
        os_truncate(fd, size - unfinished)


def create_file(path: Path) -> None:
    """An empty file, also in the place of another; not flushed to the disk.

    Raises UserError (exit 6).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    with translate_system_errors(path), _open_file(path, flags) as fd:
        os_truncate(fd, 0)


def append_bytes(path: Path, data: bytes) -> None:
    """Add `data` to a file that is there. Raises UserError (exit 6)."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    with translate_system_errors(path), _open_file(path, flags) as fd:
        _append_to(fd, data)


def _append_to(fd: int, data: bytes) -> None:
    _write_all(lambda rest: os_write(fd, rest), data)


# ---- folders


def make_folder(path: Path) -> Path:
    """A folder and its missing parents, readable by their owner alone.

    Raises UserError: path_escape (exit 2) when `path` is a URL or itself a link, not_found (exit 2)
    when it is a file or below one, io_error (exit 6).
    """
    _find_parent(path)
    with translate_system_errors(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process was faster
                os_mkdir(folder)
                sync_folder(folder.parent)
    return path


def check_target(path: Path) -> None:
    """See before long work whether the folder `path` can be made and written; nothing stays.

    Raises UserError: as `make_folder`.
    """
    parent = _find_parent(path)
    with translate_system_errors(path), tempfile.TemporaryFile(dir=parent):
        pass


def _find_parent(path: Path) -> Path:
    """The first that is there of `path` and the folders above. Raises UserError: `make_folder`."""
    refuse_url(path)
    refuse_link(path)
    with translate_system_errors(path):
        parent = next(filter(Path.exists, (path, *path.parents)))
    if not parent.is_dir():
        raise usage_error(
            "is no folder", "expected a folder", code=Reason.NOT_FOUND, file=str(parent)
        )
    return parent


def refuse_link(path: Path) -> None:
    """Raises UserError (path_escape, exit 2) when `path` itself is a link."""
    if path.is_symlink():
        raise usage_error(
            "is a link",
            "results are not written through links",
            "Give the folder that it leads to",
            code=Reason.PATH_ESCAPE,
            file=str(path),
        )


def refuse_url(path: Path) -> None:
    """Raises UserError (path_escape, exit 2) when `path` was made from a URL.

    It would be a local folder of that name.
    """
    if path.parts and URL.fullmatch(path.parts[0]):
        raise usage_error(
            "is a URL",
            "expected a path on this machine: workspaces and results are local",
            "Give a local folder, and copy it there afterwards",
            code=Reason.PATH_ESCAPE,
            file=str(path),
        )


def list_folder(folder: Path) -> list[Path]:
    """What a folder holds, in the order of the names. Raises UserError (exit 6)."""
    with translate_system_errors(folder):
        return sorted(folder.iterdir())


# ---- renaming and removing


def remove_temporary_files(folder: Path) -> int:
    """Remove what killed processes left in `folder` under temporary names; the number of files.

    Those of a live process stay, and all of a folder without permission to write.
    """
    if not folder.is_dir():
        return 0
    removed = 0
    for path in list_folder(folder):
        if is_temporary(path.name):
            try:
                removed += _remove_abandoned(path)
            except OSError as error:
                if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
                    raise describe_os_error(error, path) from error
    return removed


def _remove_abandoned(path: Path) -> bool:
    """Remove a temporary file unless its writer lives, or a folder that was being removed."""
    if path.is_dir() and not path.is_symlink():
        _remove_tree(path)
        return True
    abandoned = False
    with (
        suppress(FileNotFoundError),  # renamed or removed meanwhile
        _open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd,
    ):
        abandoned = try_lock(fd) is True
        if abandoned:
            os_unlink(path)
    return abandoned


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in one step; an existing file is replaced. Raises UserError (6)."""
    with translate_system_errors(new):
        os_replace(old, new)
        sync_folder(new.parent)


def remove_file(path: Path) -> None:
    """Remove a file if it is there. Raises UserError (exit 6)."""
    with translate_system_errors(path), suppress(FileNotFoundError):
        os_unlink(path)
        sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content; a kill leaves it as it is or under a temporary name.

    Raises UserError (exit 6).
    """
    with translate_system_errors(path):
        if path.is_dir() and not path.is_symlink():
            temporary = path
            if not path.name.endswith(".tmp"):
                temporary = _name_temporary(path)
                os_replace(path, temporary)
            _remove_tree(temporary)


def _remove_tree(path: Path) -> None:
    for inner in sorted(path.iterdir()):
        if inner.is_dir() and not inner.is_symlink():
            _remove_tree(inner)
        else:
            os_unlink(inner)
    os_rmdir(path)
