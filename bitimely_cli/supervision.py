"""Verbs under limits of memory, threads and processes: small pools, and a parent that reports a death in native code, which cannot do it itself."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bitimely_core.errors import Exit, UserError
from bitimely_core.system_errors import describe_native_fault, measure_headroom, raise_system_error, read_limit, read_status

TIGHT = 4 << 30  # bytes of addresses: the libraries alone take more than a third of it
SETTINGS = {  # read when the libraries are loaded
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS", "ARROW_IO_THREADS"), "1"),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
NATIVE_DEATHS = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGKILL}
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
M_ARENA_MAX, PR_SET_PDEATHSIG = -8, 1
MANY = 4096  # processes of one user: with more of them threads are not tried
STALLED, NEAR = 45.0, 1 << 28  # seconds without work, bytes that are left
PROBES, STACK = 12, 1 << 18  # threads at once (a verb with small pools starts some six), bytes of the stack of each


def run_supervised(run: Callable[[], int], report: Callable[[UserError], int]) -> int:
    """The exit code of `run`; under a limit it runs in a child process, and `report` prints that native code ended it.

    Args:
        run: does the work and prints its errors.
        report: prints an error and returns its exit code.
    """
    if sys.platform != "linux":
        return run()
    left, processes = measure_headroom(), read_limit("RLIMIT_NPROC")
    few = processes is not None and processes < MANY and not has_threads()
    if left is None and not few:
        return run()
    if few or (left is not None and left < TIGHT):
        use_small_pools()
    if has_companions():  # a child would lack them
        return run()
    try:
        ended = mmap.mmap(-1, 1)  # shared: whether the child ended by itself
    except OSError as error:
        return run_or_report(run, report, error)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    try:
        child = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run_or_report(run, report, error)
    if child:
        try:
            status = wait_for(child, few)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return explain_status(status, ended[0] == 1, report)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = int(Exit.INTERNAL_ERROR)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        code = run()
    finally:
        ended[0] = 1
        os._exit(code)


def run_or_report(run: Callable[[], int], report: Callable[[UserError], int], error: OSError) -> int:
    """Without a parent the work runs alone, except where not one page of memory is left: native code would abort without a word."""
    if error.errno != errno.ENOMEM:
        return run()
    try:
        raise_system_error(error, stored=False)
    except UserError as found:
        return report(found)
    return run()


def wait_for(child: int, few: bool) -> int:
    """The wait status of a child. Signals that were sent to this process alone are forwarded; those of the terminal reach both.

    A child that is near its limit of memory, or of processes (`few`), and computes nothing for `STALLED` seconds is killed: native code that
    could start one thread and not the next waits for the other for ever.
    """
    spent, since = measure_work(child), time.monotonic()
    while True:
        found = signal.sigtimedwait({signal.SIGCHLD, *FORWARDED}, 1.0)
        if found is not None and found.si_signo in FORWARDED and found.si_code <= 0:  # sent by a process
            with suppress(ProcessLookupError):
                os.kill(child, found.si_signo)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if (now := measure_work(child)) != spent:
            spent, since = now, time.monotonic()
        elif time.monotonic() - since > STALLED and (few or ((left := measure_headroom(child)) is not None and left < NEAR)):
            os.kill(child, signal.SIGKILL)


def measure_work(process: int) -> int:
    """CPU time of a process with all its threads, in ticks of the clock."""
    with suppress(OSError, MemoryError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def explain_status(status: int, ended: bool, report: Callable[[UserError], int]) -> int:
    """The exit code of a child with this wait status; `ended`: by itself, not in native code."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and -code not in NATIVE_DEATHS:
        return 128 - code
    return code if code >= 0 and ended else report(describe_native_fault())


def has_threads() -> bool:
    """Whether a few threads can be started at once."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # an arena of each would reserve 64 MiB
    go, started, size = threading.Event(), [], threading.stack_size(STACK)
    try:
        for _ in range(PROBES):
            thread = threading.Thread(target=go.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        threading.stack_size(size)
        go.set()
        for thread in started:
            thread.join()
    return True


def has_companions() -> bool:
    """Whether this process has further threads; those that have just ended may count for some milliseconds."""
    for _ in range(20):
        if read_status("Threads") == 1:
            return False
        time.sleep(0.001)
    return True


def use_small_pools() -> None:
    """One thread and the system's allocator for every library; those that are loaded already keep theirs, with the addresses that it holds."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "pyarrow" in sys.modules:
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
