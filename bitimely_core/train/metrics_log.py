"""The lines of `metrics.jsonl`: read, and brought back to what they were at a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from bitimely_core.errors import integrity_error
from bitimely_core.store import storage
from bitimely_core.store.records import StoredFile, has_result, read_result
from bitimely_core.system_errors import translate_system_errors
from bitimely_core.train import event_file

if TYPE_CHECKING:
    from bitimely_core.train.checkpoints import Checkpoint


class LogLine(TypedDict, total=False):
    """A line of `metrics.jsonl`; the parts of the objective are further keys."""

    step: int
    epoch: int
    split: str
    loss: float | None
    rel: float | None
    lr: float
    grad_norm: float
    # timesteps of the input a second, over all processes; not tokens of the model
    tokens_per_second: float
    data_wait: float  # seconds a step
    of: int  # all steps; only of lines that are handed to `log`


def read_metrics(folder: str | Path) -> list[LogLine]:
    """The lines of `metrics.jsonl`, without one that a kill has cut."""
    path = Path(folder) / "metrics.jsonl"
    lines: list[LogLine] = []
    for text in read_result(path).splitlines() if has_result(path) else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(cast(LogLine, line))
    return lines


def restore_log(home: Path | None, checkpoint: Checkpoint | None, *, track: bool) -> None:
    """Cut the log, and the event file, to what it was at the checkpoint. Raises UserError
    (integrity, exit 5) where it has been altered.
    """
    from bitimely_core.train.distributed import get_rank  # with torch

    if home is None or get_rank() > 0:
        return
    path = home / "metrics.jsonl"
    log = None if checkpoint is None else checkpoint.meta.log
    if log is None:
        storage.remove_file(path)
    else:
        require_log(path, log)
        if log.size < path.stat().st_size:
            storage.write_bytes(path, path.read_bytes()[: log.size])
    if track:
        event_file.restore_events(home, read_metrics(home))


def require_log(path: Path, log: StoredFile) -> None:
    """Raises UserError (integrity, exit 5) where the log at `path` does not begin with what it was
    at a checkpoint, `log`.
    """
    content = path.read_bytes()[: log.size] if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != log.sha256:
        raise integrity_error(
            str(path),
            "is missing"
            if not path.is_file()
            else "differs from what the last checkpoint has of it",
            f"expected {log.size} bytes of sha256 {log.sha256[:16]}",
            "Restore a copy, or start again with --force-new",
        )


def describe_log(path: Path) -> StoredFile | None:
    """Hash and size of the log so far."""
    if not path.is_file():
        return None
    storage.sync_file(path)
    with translate_system_errors(path):
        sha256, size = storage.hash_with_size(path)
    return StoredFile(sha256=sha256, size=size)
