"""What an error says about the machine: the one place that decides whether memory, files, threads or the disk are at fault, not the input.

Native libraries wrap the fault of a system call in exceptions of their own, often without `errno`, so texts are read as well.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bitimely_core.errors import Exit, Reason, UserError, safe_text

if sys.platform != "win32":
    import resource

RETRY_HINT = "Repeat the command: finished parts are kept"
SPARE = 96 << 20  # bytes of addresses below which libraries fail in ways of their own
OUT_OF_MEMORY = "out of memory"
UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
REQUEST = re.compile(r"(?:allocate|allocation of|alloc of size|you tried to allocate)\s+([\d.]+)\s*(b|[kmgt])i?b?", re.IGNORECASE)


class SystemFault(NamedTuple):
    """A resource that this machine lacks: how its errors are recognised, and what the user reads."""

    code: Reason
    numbers: frozenset[int]  # of errno
    texts: re.Pattern[str]  # of exceptions without one, in any case
    describe: Callable[[Path | None], str]  # what was found
    hint: str
    is_access: bool = False  # it concerns one file: of a source it costs that file alone


def format_size(size: float) -> str:
    """A size as text: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def read_status(name: str, process: int | str = "self") -> int | None:
    """A number of /proc/PROCESS/status, for instance VmSize in kB; None where there is none."""
    with suppress(OSError, MemoryError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return None


def read_limit(name: str) -> int | None:
    """The soft limit of this process called `name`, for instance RLIMIT_AS; None where there is none."""
    if sys.platform == "win32" or not hasattr(resource, name):
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def measure_headroom(process: int | str = "self") -> int | None:
    """Bytes of addresses or data that the limits of this process (RLIMIT_AS, RLIMIT_DATA) leave it, or a child; None without such a limit."""
    pairs = [(read_limit(limit), read_status(held, process)) for limit, held in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData"))]
    left = [limit - (held << 10) for limit, held in pairs if limit is not None and held is not None]
    return max(0, min(left)) if left else None


def require_memory(need: int, what: str) -> None:
    """Raises UserError (resource_limit, exit 6) where limits leave fewer than `need` bytes: native code may end a process that runs out."""
    left = measure_headroom()
    if left is not None and left < need:
        raise UserError(
            Reason.RESOURCE_LIMIT,
            f"{OUT_OF_MEMORY}: {what} needs at least {format_size(need)} more",
            f"the limits of this process leave {format_size(left)} (ulimit -v, ulimit -d)",
            f"Raise the limit. {RETRY_HINT}",
            exit_code=Exit.RESOURCES,
        )


def _describe_memory(path: Path | None, *, alive: bool = True) -> str:
    flags = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}
    limits = [f"{format_size(limit)} ({flag})" for name, flag in flags.items() if (limit := read_limit(name))]
    if limits:
        held = read_status("VmSize") if alive else None
        return f"{OUT_OF_MEMORY}: {f'{format_size(held << 10)} held, ' if held else ''}the limit of this process is {' and '.join(limits)}"
    with suppress(OSError, MemoryError, StopIteration, ValueError, IndexError):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        return f"{OUT_OF_MEMORY}: {format_size(int(line.split()[1]) << 10)} available on this machine"
    return OUT_OF_MEMORY


def _describe_descriptors(path: Path | None) -> str:
    return f"too many open files: the limit of this process is {read_limit('RLIMIT_NOFILE') or 'none'} (ulimit -n)"


def _describe_threads(path: Path | None) -> str:
    threads, limit = read_status("Threads"), read_limit("RLIMIT_NPROC")
    return (
        "no further thread or process can be started"
        + (f": this process has {threads}" if threads else "")
        + (f", the limit of the user is {limit} (ulimit -u)" if limit is not None else "")
        + (f", {format_size(left)} of memory are left for its stack (ulimit -v)" if (left := measure_headroom()) is not None else "")
    )


def _describe_space(path: Path | None) -> str:
    """Inodes or bytes, whichever are used up on the disk of `path`."""
    with suppress(OSError, StopIteration):
        folder = next(place for place in (path, *path.absolute().parents) if place.is_dir()) if path else None
        disk = os.statvfs(folder) if folder else None
        if disk and disk.f_files and not disk.f_favail:
            return f"no inodes left: all {disk.f_files:,} of the disk are used, a new file needs one"
        if folder:
            return f"disk full: {format_size(shutil.disk_usage(folder).free)} free"
    return "disk full"


def _describe_file_limit(path: Path | None) -> str:
    limit = read_limit("RLIMIT_FSIZE")
    return (
        "file too large for this file system"
        if limit is None
        else f"file size limit of this process reached: {format_size(limit)} (ulimit -f)"
    )


FAULTS = (  # the first that fits
    SystemFault(
        Reason.DISK_FULL,
        frozenset(),
        re.compile("no usable temporary directory"),
        lambda _: "no folder for temporary files can be written",
        f"Make room, or set TMPDIR. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.DISK_FULL,
        frozenset({errno.ENOSPC}),
        re.compile("no space left|disk (is )?full"),
        _describe_space,
        f"Make room. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.DISK_FULL,
        frozenset({errno.EDQUOT}),
        re.compile("disk quota exceeded"),
        lambda _: "disk quota used up",
        f"Make room, or ask for a larger quota. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.DISK_FULL,
        frozenset({errno.EFBIG}),
        re.compile("file too large"),
        _describe_file_limit,
        f"Raise the limit (ulimit -f). {RETRY_HINT}",
    ),
    SystemFault(
        Reason.IO_ERROR,
        frozenset({errno.EROFS}),
        re.compile("read-only file system"),
        lambda _: "cannot be written: read-only file system",
        "Choose a folder on a disk that may be written to (--workspace)",
    ),
    SystemFault(
        Reason.RESOURCE_LIMIT,
        frozenset({errno.ENFILE}),
        re.compile("too many open files in system|file table overflow"),
        lambda _: "too many open files on this machine (fs.file-max)",
        f"Close other programs, or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.RESOURCE_LIMIT,
        frozenset({errno.EMFILE}),
        re.compile("too many open files"),
        _describe_descriptors,
        f"Raise the limit (ulimit -n), or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.RESOURCE_LIMIT,
        frozenset({errno.ENOMEM}),
        re.compile(
            r"out of memory|(can(no|')t|could ?n[o']t|unable to|failed to|failure to|not) (al|re)locat|not enough memory|insufficient memory|bad_alloc"
            r"|memory allocation|allocation (error|failed|failure)|alloc of size|failed to (map segment|mmap)|cannot allocate|mmap failed"
            r"|error -4 while|can't allocate lock|cannot apply additional memory protection|static tls|no memory|memory exhausted"
        ),
        _describe_memory,
        f"Raise the limit, or try a smaller --batch-size or fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.RESOURCE_LIMIT,
        frozenset({errno.EAGAIN}),
        re.compile(
            r"can't start new thread|(launch|spawn|create|start)\w* (a |new |worker )*threads?|thread creation failed|thread ?pool ?build"
            r"|resource temporarily unavailable|pthread_create"
        ),
        _describe_threads,
        f"Raise the limit (ulimit -u), or use fewer --jobs. {RETRY_HINT}",
    ),
    SystemFault(
        Reason.IO_ERROR,
        frozenset({errno.EACCES, errno.EPERM}),
        re.compile("permission denied|operation not permitted"),
        lambda _: "cannot be read or written: permission denied",
        "Choose a folder that you may read and write",
        is_access=True,
    ),
    SystemFault(
        Reason.IO_ERROR,
        frozenset({errno.EIO, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN}),
        re.compile(r"input/output error|stale (nfs )?file handle|transport endpoint is not connected"),
        lambda _: "cannot be read or written: the disk or the network file system does not answer",
        f"Check the disk and its connection. {RETRY_HINT}",
        is_access=True,
    ),
)


def find_system_error(error: BaseException, path: Path | str | None = None, *, stored: bool = True) -> UserError | None:
    """The fault of the machine behind `error` as a UserError (resource_limit, disk_full or io_error, exit 6); None where there is none.

    Args:
        error: with its causes; a UserError of exit 6 is returned as it is.
        path: what was being read or written.
        stored: a file of bitimely. Of other files it is their own fault when they may not be read or their disk does not answer.
    """
    for cause in _walk_causes(error):
        if isinstance(cause, UserError):
            return cause if cause.exit_code == Exit.RESOURCES else None
        fault = _match_fault(cause)
        if fault is not None and (stored or not fault.is_access):
            return _make_error(fault, cause, path)
    return None


def raise_system_error(error: BaseException, path: Path | str | None = None, *, stored: bool = True) -> None:
    """Raises UserError (exit 6) where the machine is at fault, see `find_system_error`; every handler that blames a file calls it first."""
    found = find_system_error(error, path, stored=stored)
    if found is not None:
        raise found from (None if found is error else error)


def describe_os_error(error: OSError, path: Path | str | None) -> UserError:
    """A failed call of the operating system on a file of bitimely as a UserError (exit 6), whatever its number."""
    found = find_system_error(error, path)
    text = error.strerror or safe_text(str(error))
    return found or UserError(Reason.IO_ERROR, text, hint=RETRY_HINT, file=None if path is None else str(path), exit_code=Exit.RESOURCES)


def is_out_of_memory(error: UserError) -> bool:
    """Whether a fault of `find_system_error` is a lack of memory."""
    return error.problem.startswith(OUT_OF_MEMORY)


def describe_native_fault(what: str | None = None) -> UserError:
    """The UserError (resource_limit, exit 6) of a process that died in native code, which cannot report that it has no memory or threads."""
    lacking = _describe_threads(None) if measure_headroom() is None else _describe_memory(None, alive=False)
    text = f"{lacking}; native code could not go on"
    return UserError(Reason.RESOURCE_LIMIT, text, hint=f"Raise the limit. {RETRY_HINT}", file=what, exit_code=Exit.RESOURCES)


def describe_tight_memory(what: str) -> UserError | None:
    """The UserError (resource_limit, exit 6) of an unknown error `what` where a limit leaves next to no memory, else None."""
    if not _is_tight():
        return None
    text = f"{_describe_memory(None)}; ended by {what}"
    return UserError(Reason.RESOURCE_LIMIT, text, hint=f"Raise the limit. {RETRY_HINT}", exit_code=Exit.RESOURCES)


def _is_tight() -> bool:
    """Whether a limit leaves this process next to no memory."""
    left = measure_headroom()
    return left is not None and left < SPARE


@contextmanager
def attach_result(compute: Callable[[], object]) -> Iterator[None]:
    """Give a fault of the machine in this block what has been computed before it, so that it can be shown when it cannot be written."""
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
    """Turns an OSError of the block into a UserError (exit 6), and so any other error that the machine is at fault for."""
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
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _match_fault(error: BaseException) -> SystemFault | None:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and isinstance(error, OSError) and not FAULTS[0].texts.search(str(error).lower()):
        return next((fault for fault in FAULTS if number in fault.numbers), None)
    if isinstance(error, MemoryError) or (
        isinstance(error, SystemError) and _is_tight()
    ):  # no input makes the interpreter raise the latter
        return next(fault for fault in FAULTS if errno.ENOMEM in fault.numbers)
    if isinstance(error, (ValueError, LookupError, TypeError, AttributeError, SyntaxError)):
        return None  # its text may quote the input
    text = str(error).lower()
    return next((fault for fault in FAULTS if fault.texts.search(text)), None)


def _make_error(fault: SystemFault, error: BaseException, path: Path | str | None) -> UserError:
    request = REQUEST.search(str(error)) if fault.code is Reason.RESOURCE_LIMIT else None
    needs = [f"needs {format_size(float(request[1]) * UNITS[request[2].upper()])} more"] if request is not None else []
    needs += [note for note in getattr(error, "__notes__", ()) if note.startswith("needs ")]
    return UserError(
        fault.code,
        fault.describe(None if path is None else Path(path)),
        needs[0] if needs else "",
        fault.hint,
        file=None if path is None else str(path),
        exit_code=Exit.RESOURCES,
    )


def is_later_process() -> bool:
    """Whether this is another process than the first one of a training of several, which alone prints and refreshes pages."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0").strip("0").isdecimal()
