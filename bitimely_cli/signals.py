"""SIGINT ends every verb within ten seconds, with one line and exit code 130; SIGTERM, SIGHUP,
SIGUSR1, SIGUSR2 and SIGXCPU with 143.

Three things watch a verb, each for a case that the others miss:

* A handler raises KeyboardInterrupt, which ends ordinary code. Ingest and training have handlers
  of their own, which let the unit or the step end first.
* A hook sees the KeyboardInterrupt that Python drops. The handler may run inside a destructor or a
  callback of a weak reference, out of which no exception goes. Python would print its traceback,
  and the verb would go on until the thread below ends it: this happened to stages under Slurm.
* A thread ends the process where no handler can run, because the verb is in native code. The
  interpreter writes the number of each signal to a pipe at once, and the thread reads it there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from bitimely_core.errors import Reason, UserError, find_stop_code, list_stop_signals

GRACE = 8.0  # seconds that the verb has to end by itself
REPEAT_AFTER = 0.05  # seconds after which a destructor or a callback has ended
NO_MORE_SIGNALS = b"\0"  # in the pipe of signal numbers


def stop_error(number: int) -> UserError:
    """The error of a verb that signal `number` stopped."""
    return UserError(
        Reason.INTERRUPTED,
        f"stopped by {signal.Signals(number).name}",
        "what is finished is kept, and no file is half written",
        "Repeat the same command to go on",
        exit_code=find_stop_code(number),
    )


@contextmanager
def watch_signals(report: Callable[[UserError], int]) -> Iterator[list[int]]:
    """While the block runs, the signals that end a verb raise KeyboardInterrupt in it.

    Code in the block may set handlers of its own. Outside of the main thread, where Python runs no
    handlers, nothing changes.

    Args:
        report: prints an error and returns its exit code. It is called where the block goes on for
            `GRACE` seconds after a signal; then the process ends. Every file is written in one
            atomic step, so none is damaged.

    Yields:
        The numbers of the signals received so far, the first one first.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _end_after_grace(report), _repeat_dropped_stop(received), _raise_stop(received):
        yield received


@contextmanager
def _raise_stop(received: list[int]) -> Iterator[None]:
    """While the block runs, a signal is noted in `received` and raises KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    former = {number: signal.signal(number, handle) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _repeat_dropped_stop(received: list[int]) -> Iterator[None]:
    """While the block runs, a signal whose KeyboardInterrupt was dropped is sent again."""
    former = sys.unraisablehook
    ended = threading.Event()

    def send_again() -> None:
        if not ended.is_set():
            os.kill(os.getpid(), received[0] if received else signal.SIGINT)

    def handle(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Timer(REPEAT_AFTER, send_again).start()
        else:
            former(dropped)

    sys.unraisablehook = handle
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = former


@contextmanager
def _end_after_grace(report: Callable[[UserError], int]) -> Iterator[None]:
    """A block that goes on for `GRACE` seconds after a signal is reported, and the process ends."""
    ended = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stopping = list_stop_signals()

    def watch() -> None:
        while (byte := os.read(reading, 1)) != NO_MORE_SIGNALS:
            if byte[0] in stopping and not ended.wait(GRACE):
                code = report(stop_error(byte[0]))
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(code)

    watcher = threading.Thread(target=watch, daemon=True, name="signals")
    watcher.start()
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        ended.set()
        os.write(writing, NO_MORE_SIGNALS)
        watcher.join()
        os.close(reading)
        os.close(writing)
