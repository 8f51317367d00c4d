"""SIGINT and SIGTERM: every verb ends within ten seconds, with one line and exit code 130 or 143."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from bitimely_core.errors import Exit, Reason, UserError

GRACE = 8.0  # seconds that the verb has to end by itself
STOPPING = (signal.SIGINT, signal.SIGTERM)


def stop_error(number: int) -> UserError:
    """The error of a verb that a signal stopped."""
    code = Exit.TERMINATED if number == signal.SIGTERM else Exit.INTERRUPTED
    kept = "what is finished is kept, and no file is half written"
    return UserError(
        Reason.INTERRUPTED, f"stopped by {signal.Signals(number).name}", kept, "Repeat the same command to go on", exit_code=code
    )


@contextmanager
def watch_signals(report: Callable[[UserError], int]) -> Iterator[list[int]]:
    """While the block runs, SIGINT and SIGTERM raise KeyboardInterrupt, where the block has no handler of its own; yields those received.

    A block that is still there after `GRACE`, perhaps in native code where no handler of Python runs, is reported and ended: the interpreter
    writes the number of each signal to a pipe, which a thread reads. Every file is written in an atomic step, so nothing is damaged.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    ended = threading.Event()

    def raise_stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def repeat_dropped_stop(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is KeyboardInterrupt:  # raised in a destructor or a callback, from where no exception goes on
            threading.Timer(0.05, send_again).start()
        else:
            former_hook(ignored)

    def send_again() -> None:
        if not ended.is_set():
            os.kill(os.getpid(), next(iter(received), signal.SIGINT))

    def end_late() -> None:
        while (byte := os.read(reading, 1)) not in {b"", b"\0"}:
            if byte[0] in STOPPING and not ended.wait(GRACE):
                code = report(stop_error(byte[0]))
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(code)

    with ExitStack() as restore:
        for number in STOPPING:
            restore.callback(signal.signal, number, signal.signal(number, raise_stop))
        former_hook, sys.unraisablehook = sys.unraisablehook, repeat_dropped_stop
        restore.callback(setattr, sys, "unraisablehook", former_hook)
        watcher, size = threading.Thread(target=end_late, daemon=True, name="signals"), threading.stack_size(1 << 18)
        try:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            watcher.start()
        except (OSError, RuntimeError):  # a limit of this process: the handlers alone have to do
            yield received
            return
        finally:
            threading.stack_size(size)
        former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            yield received
        finally:
            signal.set_wakeup_fd(former)
            ended.set()
            os.write(writing, b"\0")
            watcher.join()
            os.close(reading)
            os.close(writing)
