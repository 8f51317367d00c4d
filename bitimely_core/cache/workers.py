"""Runs groups of units in worker processes, and catches the signals that stop an ingest.

A reader that kills its process costs its unit, not the ingest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from bitimely_core.cache.unit_groups import IngestTask, ingest_group
from bitimely_core.errors import (
    STOP_SIGNALS,
    Exit,
    Reason,
    UserError,
    find_stop_code,
    replace_handlers,
)
from bitimely_core.schemas.ingest_records import CachedPart
from bitimely_core.system_errors import find_system_error

# times that a unit is tried during which workers died: they may have been killed from outside
MAX_TRIES = 2
POLL_SECONDS = 0.2  # seconds between two checks of the stop flag


class StopFlag:
    """Set by a signal that ends a verb; checked between two units."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raises UserError (interrupted, exit 130 or 143) after a signal."""
        if self.signal is not None:
            raise UserError(
                Reason.INTERRUPTED,
                f"stopped by {signal.Signals(self.signal).name}",
                hint="Give the same command again: it goes on where it stopped",
                exit_code=find_stop_code(self.signal),
            )


@contextmanager
def catch_signals() -> Iterator[StopFlag]:
    """While the block runs the signals that end a verb only set a flag; a second one stops at once.

    Outside of the main thread nothing changes.
    """
    stop = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number

    with replace_handlers(handle):
        yield stop


def run_tasks(
    tasks: Sequence[IngestTask], jobs: int, stop: StopFlag, seen: Callable[[str], None]
) -> Generator[tuple[IngestTask, CachedPart], None, None]:
    """The results of `tasks`, each as soon as it is ready.

    Args:
        tasks: groups of units.
        jobs: processes; 1: this one.
        stop: checked before every unit.
        seen: called with the name of every unit that is started, perhaps twice, and at times "".

    Raises:
        UserError: of a task, or interrupted.
    """
    if min(jobs, len(tasks)) <= 1:

        def alive(unit: str) -> None:
            stop.check()
            seen(unit)

        for task in tasks:
            yield task, ingest_group(task, alive)
        return
    yield from _IngestPool(tasks, jobs, stop, seen).collect_results()


class IngestWorker:
    """A process, this end of its pipe, and its task."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit locks and threads
        self.pipe, worker_end = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve_tasks, args=(worker_end,), daemon=True
        )
        resource_tracker.ensure_running()  # it would change the mask below
        # the child inherits it: its parent decides
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        worker_end.close()
        self.task: IngestTask | None = None
        self.unit = ""  # that it works on

    def end(self) -> None:
        """Kill the process; once more does nothing."""
        if self.pipe.closed:
            return
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class _IngestPool:
    """Gives each idle worker the next task and replaces workers that die."""

    def __init__(
        self, tasks: Sequence[IngestTask], jobs: int, stop: StopFlag, seen: Callable[[str], None]
    ) -> None:
        # a large one at the end would leave others idle
        self.waiting = deque(sorted(tasks, key=lambda task: -sum(task.sizes.values())))
        self.workers: list[IngestWorker] = []
        self.jobs, self.stop, self.seen = min(jobs, len(tasks)), stop, seen
        self.deaths: Counter[str] = Counter()  # of workers, by unit

    def collect_results(self) -> Generator[tuple[IngestTask, CachedPart], None, None]:
        """Tasks with their results, each as soon as it is ready."""
        try:
            while self.waiting or any(worker.task for worker in self.workers):
                self.stop.check()
                self._feed()
                workers = {worker.pipe: worker for worker in self.workers}
                for pipe in wait(list(workers), timeout=POLL_SECONDS):
                    assert isinstance(pipe, Connection)
                    yield from self._receive(workers[pipe])
        finally:
            for worker in self.workers:
                worker.end()

    def _receive(self, worker: IngestWorker) -> Iterator[tuple[IngestTask, CachedPart]]:
        """What a worker says: it has died, starts a unit, failed, or has a result."""
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if kind == "failed":
            raise content
        if kind == "unit":
            worker.unit = content
            self.seen(content)
            return
        task, worker.task, worker.unit = worker.task, None, ""
        assert task is not None
        yield task, content

    def _feed(self) -> None:
        while self.waiting and len(self.workers) < self.jobs:
            self.workers.append(IngestWorker())
        for worker in self.workers:
            if self.waiting and worker.task is None:
                worker.task = self.waiting.popleft()
                with contextlib.suppress(BrokenPipeError):  # it has died, which the next poll shows
                    worker.pipe.send(worker.task)

    def _replace(self, worker: IngestWorker) -> None:
        """End a dead worker and put its task back, without a unit that has killed two workers."""
        worker.end()
        self.workers.remove(worker)
        task, unit = worker.task, worker.unit
        self.deaths[unit] += 1
        if not unit and self.deaths[unit] > MAX_TRIES:
            raise UserError(
                Reason.READER_CRASH,
                "worker processes die outside of any reader",
                hint="Use --jobs 1; in a script of your own, call ingest under "
                '`if __name__ == "__main__":`',
                exit_code=Exit.RESOURCES,
            )
        if task is not None:
            if unit and self.deaths[unit] >= MAX_TRIES:
                task = task._replace(crashed=task.crashed | {unit})
            self.waiting.appendleft(task)


def _serve_tasks(pipe: Connection) -> None:
    """Main loop of a worker: tasks in, results out, until the other end is closed."""
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        reply: tuple[str, Any]
        try:
            reply = ("done", ingest_group(task, lambda unit: pipe.send(("unit", unit))))
        except Exception as error:
            reply = ("failed", find_system_error(error) or error)
        try:
            pipe.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return
