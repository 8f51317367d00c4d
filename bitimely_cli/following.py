"""The command that a verb names last: computed from what the workspace holds, with its names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_cli.options import name_workspace
from bitimely_core.errors import UserError
from bitimely_core.store.records import has_result
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
    view = _find_labels(record, workspace)
    heads = {other.source.run for other in records.values() if other.source}
    if record.kind == "pretrain" and view and folder.name not in heads:
        return ["finetune", folder.name, "--data", view]
    if not has_result(folder / "scores.json"):
        return ["evaluate", folder.name]
    return _follow_scores(folder, record, records, workspace)


def _follow_scores(
    folder: Path, record: RunRecord, records: Mapping[str, RunRecord], workspace: Path
) -> list[str]:
    """What follows on an evaluated run: a method that beats it, a comparison, an export."""
    method, view = _find_better_method(folder), _find_labels(record, workspace)
    if method and view and method not in {other.model for other in records.values()}:
        return ["train", method, "--data", view]
    rivals = _list_rivals(record, records, workspace)
    if rivals and not any((workspace / "reports").glob(f"*{folder.name}*")):
        return ["report", folder.name, rivals[-1]]
    if not record.members and not (workspace / "exports" / folder.name).exists():
        return ["export", folder.name]
    return []


def _find_better_method(folder: Path) -> str:
    """The method without a network that is a baseline and beats an evaluated run; "": none does."""
    from bitimely_core.evaluate.baselines import BASELINES
    from bitimely_core.evaluate.metrics import LOWER_IS_BETTER
    from bitimely_core.schemas.scores import Scores

    scores = Scores.load_shared(folder)
    if scores.lift is None or scores.lift.corrected_lo is None:
        return ""
    low, high = scores.lift.corrected_lo, scores.lift.corrected_hi or 0.0
    is_beaten = low > 0 if scores.main in LOWER_IS_BETTER else high < 0
    methods = {entry.title.replace(" ", "_"): entry.method for entry in BASELINES.values()}
    return methods.get(scores.lift.baseline, "") if is_beaten else ""


def _list_rivals(record: RunRecord, others: Mapping[str, RunRecord], workspace: Path) -> list[str]:
    """The evaluated runs on the data of a run, the oldest first, without those of a pooled run."""
    task = record.is_finetuned, record.data[0].name
    pooled = {
        name for run in (record, *others.values()) if run.members for name in run.members.runs
    }
    return [
        name
        for name, other in others.items()
        if (other.is_finetuned, other.data[0].name) == task
        and name not in pooled
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
