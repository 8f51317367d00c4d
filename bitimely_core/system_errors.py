"""Recognises faults of the machine (memory, files, processes, disks) in exceptions and words them.

An exception is recognised by its type (MemoryError) or its `errno`. Some libraries wrap a fault in
an exception of their own, without a number: for those `_find_errno` reads the text.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bitimely_core.errors import Exit, Reason, UserError, safe_text

RETRY_HINT = "Repeat the command: finished parts are kept"
OUT_OF_MEMORY = "out of memory"


class SystemFault(NamedTuple):
    """A resource that this machine lacks, and what the user reads about it."""

    numbers: tuple[int, ...]  # of errno
    code: Reason
    describe: Callable[[Path | None], str]  # the problem, from the path that was read or written
    hint: str
    is_access: bool = False  # it concerns one file: a source costs itself alone


def format_size(size: float) -> str:
    """A size as text: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def find_folder(path: Path) -> Path:
    """The first folder that is there of `path` and those that hold it."""
    return next(filter(Path.is_dir, (path, *path.absolute().parents)))


def _read_limit(name: int) -> int | None:
    """The soft limit of this process called `resource.RLIMIT_...`; None where there is none."""
    limit = resource.getrlimit(name)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _describe_memory(path: Path | None) -> str:
    limit = _read_limit(resource.RLIMIT_AS)
    if limit is not None:
        return f"{OUT_OF_MEMORY}: the limit of this process is {format_size(limit)} (ulimit -v)"
    with suppress(OSError, MemoryError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable")).split()[1]
        return f"{OUT_OF_MEMORY}: {format_size(int(available) << 10)} available on this machine"
    return OUT_OF_MEMORY


def _describe_descriptors(path: Path | None) -> str:
    limit = _read_limit(resource.RLIMIT_NOFILE) or "none"
    return f"too many open files: the limit of this process is {limit} (ulimit -n)"


def _describe_processes(path: Path | None) -> str:
    problem = "no further thread or process can be started"
    limit = _read_limit(resource.RLIMIT_NPROC)
    return problem if limit is None else f"{problem}, the limit of the user is {limit} (ulimit -u)"


def _describe_space(path: Path | None) -> str:
    """Inodes or bytes, whichever are used up on the disk of `path`."""
    if path is None:
        return "disk full"
    with suppress(OSError, StopIteration):
        folder = find_folder(path)
        disk = os.statvfs(folder)
        if disk.f_files and not disk.f_favail:
            used = f"all {disk.f_files:,} of the disk are used"
            return f"no inodes left: {used}, a new file needs one"
        return f"disk full: {format_size(shutil.disk_usage(folder).free)} free"
    return "disk full"


def _describe_file_size(path: Path | None) -> str:
    limit = _read_limit(resource.RLIMIT_FSIZE)
    if limit is None:
        return "file too large for this file system"
    return f"file size limit of this process reached: {format_size(limit)} (ulimit -f)"


FAULTS = (
    SystemFault((errno.ENOSPC,), Reason.DISK_FULL, _describe_space, f"Make room. {RETRY_HINT}"),
    SystemFault(
        (errno.EDQUOT,),
        Reason.DISK_FULL,
        lambda path: "disk quota used up",
        f"Make room, or ask for a larger quota. {RETRY_HINT}",
    ),
    SystemFault(
        (errno.EFBIG,),
        Reason.DISK_FULL,
        _describe_file_size,
        f"Raise the limit (ulimit -f). {RETRY_HINT}",
    ),
    SystemFault(
        (errno.EROFS,),
        Reason.IO_ERROR,
        lambda path: "cannot be written: read-only file system",
        "Choose a folder on a disk that may be written to (--out or --workspace)",
    ),
    SystemFault(
        (errno.ENFILE,),
        Reason.RESOURCE_LIMIT,
        lambda path: "too many open files on this machine (fs.file-max)",
        f"Close other programs, or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        (errno.EMFILE,),
        Reason.RESOURCE_LIMIT,
        _describe_descriptors,
        f"Raise the limit (ulimit -n), or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        (errno.ENOMEM,),
        Reason.RESOURCE_LIMIT,
        _describe_memory,
        f"Raise the limit, or try a smaller --batch-size or fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        (errno.EAGAIN,),
        Reason.RESOURCE_LIMIT,
        _describe_processes,
        f"Raise the limit (ulimit -u), or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        (errno.EACCES, errno.EPERM),
        Reason.IO_ERROR,
        lambda path: "cannot be read or written: permission denied",
        "Choose a folder that you may read and write",
        is_access=True,
    ),
    SystemFault(
        (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN),
        Reason.IO_ERROR,
        lambda path: (
            "cannot be read or written: the disk or the network file system does not answer"
        ),
        f"Check the disk and its connection. {RETRY_HINT}",
        is_access=True,
    ),
)
FAULT_BY_NUMBER = {number: fault for fault in FAULTS for number in fault.numbers}
RUST_NUMBER = re.compile(r"\(os error (\d+)\)")  # in texts of polars and safetensors
TEXTS = {  # of torch without memory on the CPU or a GPU, and of what wraps a number of the system
    "can't allocate memory": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "no space left on device": errno.ENOSPC,
    "disk quota exceeded": errno.EDQUOT,
}
QUOTING = (ValueError, LookupError, TypeError, AttributeError, SyntaxError)  # they may quote input


def find_system_error(
    error: BaseException, path: Path | str | None = None, *, stored: bool = True
) -> UserError | None:
    """The fault of the machine behind `error` as a UserError; None where it is not at fault.

    Args:
        error: with its causes. A UserError of exit 6 is returned as it is.
        path: what was being read or written.
        stored: whether `path` is a file of bitimely. That a source may not be read, or that its
            disk does not answer, is a fault of this source and gives None.

    Returns:
        A UserError (resource_limit, disk_full or io_error) with exit code 6.
    """
    for cause in _walk_causes(error):
        if isinstance(cause, UserError):
            return cause if cause.exit_code == Exit.RESOURCES else None
        fault = FAULT_BY_NUMBER.get(_find_errno(cause))
        if fault is not None and (stored or not fault.is_access):
            return _make_error(fault, cause, path)
    return None


def raise_system_error(
    error: BaseException, path: Path | str | None = None, *, stored: bool = True
) -> None:
    """Raises UserError (exit 6) where the machine is at fault, see `find_system_error`.

    Every handler that blames a file calls it first.
    """
    fault = find_system_error(error, path, stored=stored)
    if fault is not None:
        raise fault from (None if fault is error else error)


def describe_os_error(error: OSError, path: Path | str | None) -> UserError:
    """The UserError (exit 6) of an OSError on a file of bitimely, whatever its number."""
    fault = find_system_error(error, path)
    if fault is not None:
        return fault
    return UserError(
        Reason.IO_ERROR,
        error.strerror or safe_text(str(error)),
        hint=RETRY_HINT,
        file=None if path is None else str(path),
        exit_code=Exit.RESOURCES,
    )


def is_out_of_memory(error: UserError) -> bool:
    """Whether a fault of `find_system_error` is a lack of memory."""
    return error.problem.startswith(OUT_OF_MEMORY)


@contextmanager
def attach_result(compute: Callable[[], object]) -> Iterator[None]:
    """Add what has been computed to a fault of the machine in this block.

    The command line shows the result that could not be written.
    """
    try:
        yield
    except Exception as error:
        fault = find_system_error(error)
        if fault is None:
            raise
        fault.result = compute()
        if fault is error:
            raise
        raise fault from error


@contextmanager
def translate_system_errors(path: Path | str | None) -> Iterator[None]:
    """Raises UserError (exit 6) for an OSError in this block or another fault of the machine."""
    try:
        yield
    except OSError as error:
        raise describe_os_error(error, path) from error
    except UserError:
        raise
    except Exception as error:
        raise_system_error(error, path)
        raise


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, then what it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _find_errno(error: BaseException) -> int:
    """The `errno` that an exception carries or quotes, ENOMEM for a MemoryError, else 0."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, QUOTING):
        return 0
    text = str(error).lower()
    quoted = RUST_NUMBER.search(text)
    if quoted is not None:
        return int(quoted[1])
    return next((number for words, number in TEXTS.items() if words in text), 0)


def _make_error(fault: SystemFault, error: BaseException, path: Path | str | None) -> UserError:
    notes = getattr(error, "__notes__", ())
    sizes = [note for note in notes if note.startswith("needs ")]  # of `storage`
    return UserError(
        fault.code,
        fault.describe(None if path is None else Path(path)),
        sizes[0] if sizes else "",
        fault.hint,
        file=None if path is None else str(path),
        exit_code=Exit.RESOURCES,
    )


def is_later_process() -> bool:
    """Whether this is not the first process of a training, which alone prints and makes pages."""
    rank = os.environ.get("RANK", "0")
    return os.environ.get("WORLD_SIZE", "1") != "1" and rank.strip("0").isdecimal()
