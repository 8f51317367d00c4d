"""The command that a verb names last: computed from what the workspace holds, with its names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_cli.options import name_workspace
from bitimely_core.errors import UserError
from bitimely_core.records import has_result
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    from bitimely_core.schemas.runs import RunRecord


def name_next(run: str | Path, workspace: Path) -> str:
    """The line with the verb that follows on a run: what it lacks first, which is a head, scores, a
    comparison or an export; else the page of the workspace.
    """
    folder = workspace / "runs" / Path(run).name
    try:
        words = _choose_verb(folder, workspace) if has_result(folder / "run.json") else []
    except (UserError, OSError, ValueError) as error:  # a damaged record: `verify` names it
        raise_system_error(error)
        words = []
    return f"next: bitimely {shlex.join(words or ['dashboard'])}{name_workspace(workspace)}"


def _choose_verb(folder: Path, workspace: Path) -> list[str]:
    records = _read_records(workspace)
    record = records.pop(folder.name)
    if not record.finished:
        return []
    view = "" if record.is_finetuned else _find_labels(record, workspace)
    heads = {other.source.run for other in records.values() if other.source}
    if view and folder.name not in heads:
        return ["finetune", folder.name, "--data", view]
    return _choose_use(folder, record, records, workspace)


def _choose_use(
    folder: Path, record: RunRecord, records: Mapping[str, RunRecord], workspace: Path
) -> list[str]:
    """The verb on a trained run: scores, a comparison, an export, whichever it lacks first."""
    if not has_result(folder / "scores.json"):
        return ["evaluate", folder.name]
    rivals = _list_rivals(record, records, workspace)
    if rivals and not any((workspace / "reports").glob(f"*{folder.name}*")):
        return ["report", folder.name, rivals[-1]]
    if not record.members and not (workspace / "exports" / folder.name).exists():
        return ["export", folder.name]
    return []


def _list_rivals(record: RunRecord, others: Mapping[str, RunRecord], workspace: Path) -> list[str]:
    """The evaluated runs on the data of a run, the oldest first."""
    task = record.is_finetuned, record.data[0].name
    return [
        name
        for name, other in others.items()
        if (other.is_finetuned, other.data[0].name) == task
        and not other.members
        and has_result(workspace / "runs" / name / "scores.json")
    ]


def _read_records(workspace: Path) -> dict[str, RunRecord]:
    """The records of all runs by name, the oldest first."""
    from bitimely_core.schemas.runs import RunRecord

    paths = (workspace / "runs").glob("*/run.json")
    ordered = sorted(paths, key=lambda path: path.stat().st_mtime)
    return {path.parent.name: RunRecord.load(path) for path in ordered}


def _find_labels(record: RunRecord, workspace: Path) -> str:
    """The labelled tokens of the data set of a run, those of the run itself first; "": none."""
    from bitimely_core.schemas.tokens import TokenManifest

    names = {}
    for path in sorted((workspace / "tokens").glob("*/manifest.json")):
        options = TokenManifest.read(path.parent).options
        if options.dataset == record.data[0].dataset and options.task != "none":
            names[path.parent.name] = options
    trained_on = record.data[0].name
    name = trained_on if trained_on in names else next(iter(names), "")
    view = f"{names[name].dataset}/{names[name].view}" if name else ""
    return view if name == view.replace("/", "-") else name
