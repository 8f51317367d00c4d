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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core import locks, storage
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.records import complete_results, find_missing, has_result, write_results
from bitimely_core.registry import find_plugin_error
from bitimely_core.schemas.reports import StageRecord
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
    out: set[str] = set()
    waiting = list(wanted)
    while waiting:
        label = waiting.pop()
        if label not in out:
            out.add(label)
            waiting += nodes[label].needs
    return out


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
    began = time.time() if began is None else began
    states: dict[str, StageState] = {}
    waiting = dict(nodes)

    def record_result(label: str, state: StageState) -> None:
        states[label] = state
        del waiting[label]
        if watch:
            watch(states)

    for label in [label for label in nodes if selected is not None and label not in selected]:
        known = _load_state(nodes[label], nodes, folder, began, states)
        record_result(label, known or StageState("not run", "not in this part"))
    while waiting:
        for label, node in list(waiting.items()):
            failed = [
                need
                for need in node.needs
                if need in states and states[need].state not in SUCCEEDED
            ]
            if failed:
                record_result(label, StageState("left out", f"needs {failed[0]}"))
                break
            if any(other in waiting for other in (*node.needs, *node.after)):
                continue
            try:
                with locks.lock_folder(folder / node.key):
                    complete_results(folder / node.key, held=True)
                    state = _load_state(node, nodes, folder, began, states)
                    if state is None:
                        if watch:
                            watch({**states, label: StageState("running")})
                        state = _run_stage(node, nodes, folder, states)
            except UserError as error:
                if error.exit_code != Exit.LOCKED:
                    raise
                continue
            record_result(label, state)
            break
        else:
            time.sleep(POLL)
    return {label: states[label] for label in nodes}


def _load_state(
    node: Node, nodes: Mapping[str, Node], folder: Path, began: float, states: States
) -> StageState | None:
    """The stored state where it still holds: no input or output has changed since, or the stage
    failed since `began`.
    """
    path = folder / node.key / "stage.json"
    if not has_result(path):
        return None
    known = StageRecord.load(path)
    is_recent = began <= known.time <= time.time()  # a time in the future: the clock was set back
    if known.state == "failed":
        return (
            StageState("failed", known.detail, known.exit_code, known.seconds)
            if is_recent
            else None
        )
    changed = (
        known.made is None
        or known.made != _hash(node.output)
        or known.read != _hash_inputs(node, nodes, folder, states)
    )
    if changed or find_missing(node.output.parent):
        return None
    state = "already done" if known.state == "done" and not is_recent else known.state
    return StageState(state, known.detail, known.exit_code, known.seconds)


def _run_stage(node: Node, nodes: Mapping[str, Node], folder: Path, states: States) -> StageState:
    """Run one stage under its lock and store how it ended."""
    start = time.monotonic()
    read = _hash_inputs(node, nodes, folder, states)
    frames: list[str] = []
    path = folder / node.key / "stage.json"
    try:
        result = node.call(states)
        code, detail = result.exit_code, result.detail
        state = "partial" if code == Exit.PARTIAL else "done" if result.is_new else "already done"
    except Exception as error:
        # a defect fails one stage, not the experiment; the frames give the place without the values
        # of the data
        fault = (
            error
            if isinstance(error, UserError)
            else find_system_error(error) or find_plugin_error(error)
        )
        if fault is not None and fault.exit_code in {Exit.INTERRUPTED, Exit.TERMINATED}:
            raise
        frames = [
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        state, code, detail = (
            "failed",
            int(Exit.INTERNAL_ERROR),
            f"{type(error).__name__} in {frames[-1]}: a bug; see {path}",
        )
        if fault is not None:
            # a recipe has no --run or --force-new, which the error of a verb advises
            if fault.code == Reason.SETTINGS_DIFFER:
                fault.hint = (
                    f"Give the changed recipe another file name, or remove {node.output.parent}"
                )
            frames, code, detail = [], int(fault.exit_code), fault.finding.line()
    ended = StageState(state, detail, int(code), round(time.monotonic() - start, 3))
    record = StageRecord(
        stage=node.label,
        settings=dict(node.settings),
        time=time.time(),
        frames=frames,
        state="done" if state == "already done" else state,
        detail=detail,
        exit_code=ended.exit_code,
        seconds=ended.seconds,
        read=read,
        made=_hash(node.output),
    )
    with attach_result(
        lambda: {
            "stages": [
                {"stage": label, **one._asdict()}
                for label, one in {**states, node.label: ended}.items()
            ]
        }
    ):
        write_results(path.parent, {path.name: record.encode()}, held=True)
    return ended


def _hash_inputs(
    node: Node, nodes: Mapping[str, Node], folder: Path, states: States
) -> dict[str, str | None]:
    """SHA-256 of every input by its path from `folder`, so that a workspace can be moved; None
    where it is missing, or where the stage that makes it has not succeeded now.
    """
    ended = [label for label in node.after if label in states and states[label].state in SUCCEEDED]
    found = {
        nodes[label].output: _hash(nodes[label].output) if label in ended else None
        for label in node.after
    }
    found |= {
        path: _hash(path) for path in (*(nodes[need].output for need in node.needs), *node.inputs)
    }
    return {
        Path(os.path.relpath(path, folder)).as_posix(): content for path, content in found.items()
    }


def _hash(path: Path) -> str | None:
    return storage.hash_file(path) if path.is_file() else None
