"""Stages that need each other, run once each: by one process, by several that share a workspace, or by one that was killed and began again.

A stage is named by the hash of its settings and has a folder of that name. Whoever runs it holds the folder's lock; `stage.json` in it is written last
and says what the stage read and made. A stage whose `stage.json` still agrees with the files is not run again. Nothing here knows what a stage does.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitimely_core import storage
from bitimely_core.errors import Exit, UserError

States = Mapping[str, dict[str, Any]]
SETTLED = ("done", "partial", "already done")  # what a later stage can build on
POLL = 0.5  # seconds between two looks at stages that another process runs


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stage.

    `made` is the small file whose SHA-256 stands for everything that the stage makes; `reads` are such files made by nobody in this graph.
    `needs` must have succeeded; `after` must only have ended, whatever way.
    """

    label: str
    settings: Mapping[str, Any]
    call: Callable[[States], Mapping[str, Any]]
    made: Path
    reads: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of what the stage is and of its settings."""
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
    mine: set[str] | None = None,
    began: float | None = None,
    watch: Callable[[States], object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run `nodes` (label -> Node) in their order, each as soon as what it needs is there; stages that others run are waited for.

    Args:
        nodes: label -> stage.
        folder: of the stages' own folders.
        mine: labels to run; of the others it is only said whether they have been done. None: all.
        began: seconds since the epoch; a stage that failed later in another process is not tried again. None: now.
        watch: called with all states whenever one has changed.

    Returns:
        For each label `state` (done, already done, partial, failed, left out, not run), `detail`, `exit_code`, `seconds`.
    """
    began = time.time() if began is None else began
    states: dict[str, dict[str, Any]] = {}
    waiting = dict(nodes)

    def settle(label: str, state: dict[str, Any]) -> None:
        states[label] = state
        del waiting[label]
        if watch:
            watch(states)

    for label in [label for label in nodes if mine is not None and label not in mine]:
        settle(
            label,
            _found(nodes[label], nodes, folder, began, states)
            or {"state": "not run", "detail": "not in this part", "exit_code": 0, "seconds": 0.0},
        )
    while waiting:
        for label, node in list(waiting.items()):
            lost = [need for need in node.needs if need in states and states[need]["state"] not in SETTLED]
            if lost:
                settle(label, {"state": "left out", "detail": f"needs {lost[0]}", "exit_code": 0, "seconds": 0.0})
                break
            if any(other in waiting for other in (*node.needs, *node.after)):
                continue
            try:
                with storage.lock(folder / node.key):
                    found = _found(node, nodes, folder, began, states)
                    if found is None:
                        if watch:
                            watch({**states, label: {"state": "running", "detail": "", "exit_code": 0, "seconds": 0.0}})
                        found = _run(node, nodes, folder, states)
            except UserError as error:
                if error.exit_code != Exit.LOCKED:
                    raise
                continue
            settle(label, found)
            break
        else:
            time.sleep(POLL)
    return {label: states[label] for label in nodes}


def _found(node: Node, nodes: Mapping[str, Node], folder: Path, began: float, states: States) -> dict[str, Any] | None:
    """What `stage.json` says, where it still holds: nothing that was read or made has changed since; a failure since `began`."""
    try:
        known = json.loads((folder / node.key / "stage.json").read_bytes())
        if known["state"] == "failed":
            return {key: known[key] for key in ("state", "detail", "exit_code", "seconds")} if known["time"] >= began else None
        if known["made"] is None or known["made"] != _hash(node.made) or known["read"] != _read(node, nodes, states):
            return None
        mine = known["state"] == "done" and known["time"] < began
        return {
            "state": "already done" if mine else known["state"],
            "detail": known["detail"],
            "exit_code": known["exit_code"],
            "seconds": known["seconds"],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run(node: Node, nodes: Mapping[str, Node], folder: Path, states: States) -> dict[str, Any]:
    """Run one stage under its lock and write down how it ended."""
    start = time.monotonic()
    read = _read(node, nodes, states)
    frames: list[str] = []
    try:
        result = node.call(states)
        code = int(result.get("exit_code") or 0)
        state = "partial" if code == Exit.PARTIAL else "already done" if result.get("trained") is False else "done"
        detail = str(result.get("detail", ""))
    except UserError as error:
        if error.exit_code in {Exit.INTERRUPTED, Exit.TERMINATED}:
            raise
        state, detail, code = "failed", error.finding.line(), int(error.exit_code)
    except Exception as error:  # a bug costs one stage, not the night; the frames say where, without the values of anybody's data
        frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        state, detail, code = (
            "failed",
            f"{type(error).__name__} in {frames[-1]}: a bug; {folder / node.key / 'stage.json'} says where",
            int(Exit.INTERNAL_ERROR),
        )
    ended = {"state": state, "detail": detail, "exit_code": code, "seconds": round(time.monotonic() - start, 3)}
    body = {"format_version": 1, "stage": node.label, "settings": dict(node.settings), "time": time.time(), "frames": frames, **ended}
    storage.write_json(
        folder / node.key / "stage.json",
        {**body, "state": "done" if state == "already done" else state, "read": read, "made": _hash(node.made)},
    )
    return ended


def _read(node: Node, nodes: Mapping[str, Node], states: States) -> dict[str, str | None]:
    """SHA-256 of everything that the stage reads, by file name; None where it is missing, or where the stage that makes it did not succeed now."""
    ended = [label for label in node.after if states.get(label, {}).get("state") in SETTLED]
    made = {str(nodes[label].made): _hash(nodes[label].made) if label in ended else None for label in node.after}
    return {**made, **{str(path): _hash(path) for path in (*(nodes[need].made for need in node.needs), *node.reads)}}


def _hash(path: Path) -> str | None:
    return storage.hash_file(path) if path.is_file() else None
