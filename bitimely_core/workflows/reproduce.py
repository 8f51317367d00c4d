"""`reproduce`: a run is trained again from its record and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from bitimely_core.config import DataConfig
from bitimely_core.errors import usage_error
from bitimely_core.run import FORMAT, Run, list_versions
from bitimely_core.schemas import RunRecord
from bitimely_core.types import Progress
from bitimely_core.workflows.finetune import finetune
from bitimely_core.workflows.prepare import prepare_windows
from bitimely_core.workflows.pretrain import pretrain
from bitimely_core.workflows.train import Flags
from bitimely_core.workspace import locate_new

SHAPE = ("channels", "length", "codes", "others")  # settings of the model that the data decide
LOSS = 1e-6  # relative difference of the last loss that counts as the same on another machine


class ReproduceResult(TypedDict, total=False):
    """Result of `reproduce`; a dry run has only the differences."""

    format_version: int
    run: str
    again: str  # name of the new run
    differences: list[str]  # data and versions that differ from those of the training
    loss: list[float | None]  # of both runs
    same_loss: bool
    same_weights: bool
    reproduced: bool


def reproduce(
    run: str | Path,
    *,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    force_new: bool = False,
    progress: Progress | None = None,
) -> ReproduceResult:
    """Train a run again from its run.json, under `<run>-again`, and compare: weights bit for bit, last loss to rounding.

    Raises:
        UserError: incomplete (exit 4), and those of the training.
    """
    record = Run.open(run, workspace).require_finished().record
    name = locate_new(workspace, "runs", f"{record.run}-again").name
    differences = _list_differences(record, workspace, verify, dry_run)
    result: ReproduceResult = {"format_version": FORMAT, "run": record.run, "again": name, "differences": differences}
    if dry_run:
        return result
    stored = record.to_json()["settings"]
    sections = {key: stored[key] for key in ("model", "objective", "data", "train")}
    common: Flags = {"run": name, "workspace": workspace, "verify": verify, "force_new": force_new, "progress": progress}
    if record.source is None:
        sections["model"] = {key: value for key, value in sections["model"].items() if key not in SHAPE}
        done = pretrain(preset=record.preset, flags=sections, init=_initial_run(record), **common)
    else:
        sections["finetune"] = stored["finetune"]
        del sections["model"]
        done = finetune(record.source.run, data=record.data[0].name, flags=sections, **common)
    again = RunRecord.load(Path(done["folder"]) / "run.json")
    losses = [one.final.loss if one.final else None for one in (record, again)]
    before, after = losses
    near = before is not None and after is not None and abs(before - after) <= LOSS * max(abs(before), 1e-12)
    same = record.weights == again.weights
    return {**result, "loss": losses, "same_loss": before == after or near, "same_weights": same, "reproduced": same or near}


def _initial_run(record: RunRecord) -> str | None:
    """What `--init` was, where the run records it. Raises UserError (config, exit 2) where it was another folder."""
    origin = record.init_from or {}
    if record.init and not origin:
        problem = "the run started from the weights of a folder that it does not name"
        raise usage_error(problem, hint="Train it again with --init", file=record.run)
    return origin.get("run") or (f"{origin['repo']}@{origin['revision']}" if origin else None)


def _list_differences(record: RunRecord, workspace: Path, verify: bool, dry_run: bool) -> list[str]:
    out = [
        f"{name} {version}, it was {record.versions.get(name)}"
        for name, version in list_versions().items()
        if record.versions.get(name) != version
    ]
    for data in record.data:
        fingerprint = prepare_windows(data.name, workspace, DataConfig(), verify=verify, dry_run=dry_run).fingerprint
        if fingerprint != data.fingerprint:
            out.append(f"{data.name} has the fingerprint {fingerprint[:16]}, it was {data.fingerprint[:16]}")
    return out
