"""Locks of folders, so that one process at a time writes to a folder.

A lock is `flock` on the file `.lock` of the folder. The kernel frees it when its process dies, and
the file is never removed. Its content (pid, host, since) only serves the message to those who wait.
On a file system without flock a file that one process alone can create stands in for the lock.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bitimely_core.errors import Exit, Reason, UserError, clean
from bitimely_core.store import storage
from bitimely_core.system_errors import describe_os_error, translate_system_errors

LOCK_FILE = ".lock"
STAND_IN = ".lock-exclusive"
# what flock answers on such a file system
WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def lock_folder(folder: Path, wait: float = 0.0, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs.

    Args:
        folder: made if it is missing.
        wait: seconds to wait for another process.
        shared: several processes may hold it at once; none of them while one holds it alone.

    Raises:
        UserError: locked (exit 7) naming the process that holds it; io_error (exit 6).
    """
    path, deadline = folder / LOCK_FILE, time.monotonic() + wait
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fd = _open_lock(path)
    stand_in: Path | None = None
    try:
        stand_in = _wait_for_lock(fd, path, kind, deadline)
        # its holder replaced the folder: the next one would lock another file
        while not _is_same_file(fd, path):
            os.close(fd)
            fd = _open_lock(path)
            stand_in = _wait_for_lock(fd, path, kind, deadline)
        _write_holder(fd, path)
        yield
    finally:
        if stand_in is not None:
            with suppress(OSError):
                stand_in.unlink()
        if not shared:
            with suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)


@contextmanager
def take_turns(folder: Path, wait: float) -> Iterator[None]:
    """Let processes that rewrite one file of `folder` run the block one after the other.

    The lock is on the folder itself, without a file. After `wait` seconds, and on file systems
    without locks, the block runs all the same.
    """
    deadline = time.monotonic() + wait
    with translate_system_errors(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while storage.try_lock(fd) is False and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    """A file descriptor of the lock, in a folder that another process may remove meanwhile."""
    while True:
        storage.make_folder(path.parent)
        storage.refuse_link(path)
        with translate_system_errors(path), suppress(FileNotFoundError):
            return storage.os_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _wait_for_lock(fd: int, path: Path, kind: int, deadline: float) -> Path | None:
    """Wait for the lock until `deadline`.

    Returns the file that stands in for the lock, where the file system has no flock.
    """
    stand_in = path.with_name(STAND_IN)
    cause: OSError
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return None
        except BlockingIOError as error:
            cause = error
            hint = "Repeat the command when it has ended; ingest waits for it under --wait SECONDS"
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise describe_os_error(error, path) from error
            if _create_stand_in(stand_in):
                return stand_in
            cause = error
            hint = "This file system has no locks (flock): if that process is gone, remove "
            hint += str(stand_in)
        if time.monotonic() >= deadline:
            raise _locked_error(path, hint) from cause
        time.sleep(0.05)


def _create_stand_in(path: Path) -> bool:
    """Create the file that stands in for a lock; False where another process has it.

    Raises UserError (exit 6).
    """
    with translate_system_errors(path):
        try:
            os.close(storage.os_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return True


def _write_holder(fd: int, path: Path) -> None:
    """Name this process in the lock."""
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with translate_system_errors(path):
        os.ftruncate(fd, 0)
        storage.os_write(fd, memoryview(storage.encode_json(holder) + b"\n"))


def _locked_error(path: Path, hint: str) -> UserError:
    """The error of exit 7, with the process that the lock names."""
    try:
        holder = json.loads(path.read_bytes())
        host, since = clean(str(holder["host"]), 80), clean(str(holder["since"]), 40)
        text = f"in use by process {int(holder['pid'])} on {host} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        text = "in use by another process"
    return UserError(Reason.LOCKED, text, hint=hint, file=str(path), exit_code=Exit.LOCKED)
