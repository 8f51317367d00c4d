"""A graph of stages, each run once: by one process, by several that share a workspace, or by one
that was killed and started again.

A stage is named by the hash of its settings and has a folder of that name. The process that runs it
holds the folder's lock; `stage.json` in it is written last, with the hashes of the stage's inputs
and output. A stage whose `stage.json` still agrees with the files is not run again.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.registry import find_plugin_error
from bitimely_core.schemas.reports import StageRecord
from bitimely_core.store import locks, storage
from bitimely_core.store.records import complete_results, find_missing, has_result, write_results
from bitimely_core.system_errors import attach_result, find_system_error

SUCCEEDED = ("done", "partial", "already done")  # states that a later stage can build on
POLL = 0.5  # seconds between two looks at stages that another process runs


class StageState(NamedTuple):
    """How a stage ended, or that it has not."""

    state: str  # done, already done, partial, failed, left out, not run, running, waiting
    detail: str = ""
    exit_code: int = 0
    seconds: float = 0.0


States = Mapping[str, StageState]


class StageResult(NamedTuple):
    """What the call of a stage returns."""

    detail: str = ""
    exit_code: int = 0
    is_new: bool = True  # False: everything had been done before


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stage.

    `output` is the small file whose SHA-256 represents the complete output of the stage; `inputs`
    are such files from outside of this graph. `needs` must have succeeded; `after` must only have
    ended.
    """

    label: str
    settings: Mapping[str, Any]
    call: Callable[[States], StageResult]
    output: Path
    inputs: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of what the stage is and of its
        settings.
        """
        return storage.fingerprint({"stage": self.label, "settings": self.settings})[:16]


def closure(nodes: Mapping[str, Node], wanted: set[str]) -> set[str]:
    """`wanted` and everything that it needs, directly or not."""
    labels: set[str] = set()
    waiting = list(wanted)
    while waiting:
        label = waiting.pop()
        if label not in labels:
            labels.add(label)
            waiting += nodes[label].needs
    return labels


def execute(
    nodes: Mapping[str, Node],
    folder: Path,
    *,
    selected: set[str] | None = None,
    began: float | None = None,
    watch: Callable[[States], object] | None = None,
) -> dict[str, StageState]:
    """Run `nodes` (label -> Node) in their order, each as soon as its inputs exist; stages that
    other processes run are waited for.

    `folder` holds the stages' own folders. Of labels that are not `selected` only the last state is
    read. A stage that failed in another process after `began` (seconds since the epoch; None: now)
    is not tried again. `watch` is called with all states whenever one has changed. Returns the
    state of each label.
    """
    run = GraphRun(nodes, folder, time.time() if began is None else began, watch)
    for label, node in nodes.items():
        if selected is not None and label not in selected:
            state = run.load_state(node)
            run.record_state(label, state or StageState("not run", "not in this part"))
    while len(run.states) < len(nodes):
        if not any(label not in run.states and run.try_stage(label) for label in nodes):
            time.sleep(POLL)
    return {label: run.states[label] for label in nodes}


@dataclass(frozen=True)
class GraphRun:
    """The stages of a graph while they are run; the fields are the arguments of `execute`."""

    nodes: Mapping[str, Node]
    folder: Path
    began: float
    watch: Callable[[States], object] | None
    states: dict[str, StageState] = field(default_factory=dict)

    def record_state(self, label: str, state: StageState) -> None:
        """Note how a stage ended, and show it."""
        self.states[label] = state
        if self.watch:
            self.watch(self.states)

    def try_stage(self, label: str) -> bool:
        """Run a stage if it can be run now, or leave it out where what it needs has failed.

        Returns whether it has ended: False where inputs are missing or another process runs it.
        """
        node = self.nodes[label]
        for need in node.needs:
            if need in self.states and not self._has_succeeded(need):
                self.record_state(label, StageState("left out", f"needs {need}"))
                return True
        if not self.states.keys() >= {*node.needs, *node.after}:
            return False
        folder = self.folder / node.key
        try:
            with locks.lock_folder(folder):
                complete_results(folder, held=True)
                state = self.load_state(node) or self._run_stage(node)
        except UserError as error:
            if error.exit_code != Exit.LOCKED:
                raise
            return False
        self.record_state(label, state)
        return True

    def load_state(self, node: Node) -> StageState | None:
        """The stored state where it still holds: no input or output has changed since, or the stage
        failed since `began`.
        """
        path = self.folder / node.key / "stage.json"
        if not has_result(path):
            return None
        record = StageRecord.load(path)
        # a time in the future: the clock was set back
        is_recent = self.began <= record.time <= time.time()
        if record.state == "failed":
            holds = is_recent
        else:
            holds = (
                record.made is not None
                and record.made == _hash(node.output)
                and record.read == self._hash_inputs(node)
                and not find_missing(node.output.parent)
            )
        if not holds:
            return None
        is_old = record.state == "done" and not is_recent
        state = "already done" if is_old else record.state
        return StageState(state, record.detail, record.exit_code, record.seconds)

    def _has_succeeded(self, label: str) -> bool:
        return label in self.states and self.states[label].state in SUCCEEDED

    def _run_stage(self, node: Node) -> StageState:
        """Run one stage under its lock and store how it ended."""
        if self.watch:
            self.watch({**self.states, node.label: StageState("running")})
        start = time.monotonic()
        read = self._hash_inputs(node)
        path = self.folder / node.key / "stage.json"
        frames: list[str] = []
        try:
            result = node.call(self.states)
            code, detail = result.exit_code, result.detail
            state = "done" if result.is_new else "already done"
            state = "partial" if code == Exit.PARTIAL else state
        except Exception as error:
            # a defect fails one stage, not the experiment
            state = "failed"
            fault = (
                error
                if isinstance(error, UserError)
                else find_system_error(error) or find_plugin_error(error)
            )
            if fault is None:
                # the frames give the place without the values of the data
                frames = [
                    f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
                    for frame in traceback.extract_tb(error.__traceback__)
                ]
                code = Exit.INTERNAL_ERROR
                detail = f"{type(error).__name__} in {frames[-1]}: a bug; see {path}"
            elif fault.exit_code in {Exit.INTERRUPTED, Exit.TERMINATED}:
                raise
            else:
                code, detail = fault.exit_code, _describe_fault(fault, node)
        seconds = round(time.monotonic() - start, 3)
        ended = StageState(state, detail, int(code), seconds)
        record = StageRecord(
            stage=node.label,
            settings=dict(node.settings),
            time=time.time(),
            frames=frames,
            state="done" if state == "already done" else state,
            detail=detail,
            exit_code=ended.exit_code,
            seconds=seconds,
            read=read,
            made=_hash(node.output),
        )
        states = {**self.states, node.label: ended}
        with attach_result(lambda: {"stages": list_states(states)}):
            write_results(path.parent, {path.name: record.encode()}, held=True)
        return ended

    def _hash_inputs(self, node: Node) -> dict[str, str | None]:
        """SHA-256 of every input by its path from the folder, so that a workspace can be moved;
        None where it is missing, or where the stage that makes it has not succeeded now.
        """
        hashes: dict[Path, str | None] = {}
        for label in node.after:
            output = self.nodes[label].output
            hashes[output] = _hash(output) if self._has_succeeded(label) else None
        for path in (*(self.nodes[need].output for need in node.needs), *node.inputs):
            hashes[path] = _hash(path)
        return {
            Path(os.path.relpath(path, self.folder)).as_posix(): content
            for path, content in hashes.items()
        }


def list_states(states: States) -> list[dict[str, Any]]:
    """The states as rows of a result."""
    return [{"stage": label, **state._asdict()} for label, state in states.items()]


def _describe_fault(fault: UserError, node: Node) -> str:
    """The line of an error. A recipe has no --run or --force-new, which the errors of verbs
    advise.
    """
    if fault.code == Reason.SETTINGS_DIFFER:
        fault.hint = f"Give the changed recipe another file name, or remove {node.output.parent}"
    return fault.finding.line()


def _hash(path: Path) -> str | None:
    return storage.hash_file(path) if path.is_file() else None
