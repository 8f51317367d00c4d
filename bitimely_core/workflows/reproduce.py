"""The verb `reproduce`: a run is trained again from its record and compared."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from bitimely_core.errors import UserError, usage_error
from bitimely_core.evaluate import parse_predictions
from bitimely_core.report import run_page
from bitimely_core.report.renderer import write_report
from bitimely_core.run import FORMAT, Run, list_versions
from bitimely_core.schemas.runs import Reproduction, RunEnvironment, RunRecord
from bitimely_core.schemas.scores import Scores
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, read_result_table, write_results
from bitimely_core.store.workspace import locate, locate_new
from bitimely_core.workflows.evaluate import evaluate
from bitimely_core.workflows.finetune import finetune
from bitimely_core.workflows.jobs import Flags, TrainingResult
from bitimely_core.workflows.prepare import Execution, prepare_windows
from bitimely_core.workflows.pretrain import pretrain
from bitimely_core.workflows.train import train

if TYPE_CHECKING:
    import torch

SHAPE = ("channels", "length", "codes", "others")  # settings of the model that the data decide
LOSS = 1e-6  # relative difference of the last loss that counts as the same on another machine


class ReproduceResult(TypedDict, total=False):
    """Result of `reproduce`; a dry run has only the differences."""

    format_version: int
    run: str
    again: str  # name of the new run
    differences: list[str]  # data, versions and environment that differ from those of the training
    loss: list[float | None]  # of both runs
    metrics: dict[str, list[float | None]]  # scores of both runs, of an evaluated run
    changes: list[str]  # numbers that differ by more than rounding of the digits that pages show
    same_loss: bool
    same_weights: bool
    reproduced: bool
    trained: bool  # False: the other run was there already


def reproduce(
    run: str | Path,
    *,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    force_new: bool = False,
) -> ReproduceResult:
    """Train a run again from its run.json, under `<run>-again`, and compare: weights bit for bit,
    last loss to rounding, scores.

    An evaluated run is evaluated again, too. The result is stored with the run as
    `reproduction.json`; where shown digits change, its page says so.

    Raises:
        UserError: incomplete (exit 4), and those of the training.
    """
    from bitimely_core.train.devices import describe_environment

    opened = Run.open(run, workspace).require_finished()
    record = opened.record
    name = locate_new(workspace, "runs", f"{record.run}-again").name
    machine = _list_environment(
        record, describe_environment(_select_device(record)), list_versions()
    )
    execution = Execution(workspace, force_new, verify, dry_run)
    differences = [*machine, *_list_data(record, execution)]
    result: ReproduceResult = {
        "format_version": FORMAT,
        "run": record.run,
        "again": name,
        "differences": differences,
    }
    if dry_run:
        return result
    result_again = _train_again(record, name, workspace, verify=verify, force_new=force_new)
    again = RunRecord.load(Path(result_again["folder"]) / "run.json")
    if again.environment is not None:  # it may have been there before
        differences[: len(machine)] = _list_environment(record, again.environment, again.versions)
    before, after = (part.final.loss if part.final else None for part in (record, again))
    near = _is_near(before, after)
    same = record.weights == again.weights
    reproduction = Reproduction(
        again=name,
        differences=tuple(differences),
        loss=(before, after),
        same_weights=same,
        metrics=_score_again(opened, name, workspace, verify),
    )
    _store_reproduction(opened, reproduction)
    return {
        **result,
        "loss": [before, after],
        "metrics": {metric: list(pair) for metric, pair in reproduction.metrics.items()},
        "changes": reproduction.list_changes(),
        "same_loss": before == after or near,
        "same_weights": same,
        "reproduced": same or near,
        "trained": result_again["trained"],
    }


def _train_again(
    record: RunRecord, name: str, workspace: Path, *, verify: bool, force_new: bool
) -> TrainingResult:
    """Train under `name` with the settings of `record`, on a device that this machine has."""
    stored = record.to_json()["settings"]
    sections = {key: stored[key] for key in ("model", "objective", "data", "train")}
    device = _select_device(record).type
    sections["train"]["device"] = device
    if record.environment is None or record.environment.device != device:
        sections["train"]["compile"] = "auto"
    common: Flags = {"run": name, "workspace": workspace, "verify": verify, "force_new": force_new}
    if record.source is None:
        for key in SHAPE:
            sections["model"].pop(key, None)
    if record.kind == "train":
        sections["finetune"] = stored["finetune"]
        data = record.data[0].name
        return train(record.model, data=data, preset=record.preset, flags=sections, **common)
    if record.source is None:
        return pretrain(preset=record.preset, flags=sections, init=_initial_run(record), **common)
    sections["finetune"] = stored["finetune"]
    del sections["model"]
    return finetune(record.source.run, data=record.data[0].name, flags=sections, **common)


def _is_near(before: float | None, after: float | None) -> bool:
    """Whether two losses differ by no more than another machine makes of them."""
    if before is None or after is None:
        return False
    return abs(before - after) <= LOSS * max(abs(before), 1e-12)


def _select_device(record: RunRecord) -> torch.device:
    """The device of the settings, or where this machine does not have it the one that it has."""
    from bitimely_core.train.devices import select_device

    with suppress(UserError):
        return select_device(record.settings.train.device)
    return select_device()


def _score_again(
    run: Run, again: str, workspace: Path, verify: bool
) -> dict[str, tuple[float | None, float | None]]:
    """The scores of a run that has been evaluated, as they are printed, and those of the other one
    on the same rows.
    """
    if run.scores is None:
        return {}
    before = Scores.load_shared(run.folder)
    how = before.settings
    evaluate(
        again,
        data=before.data,
        split=before.split,
        bootstrap=how.bootstrap,
        by=how.by,
        baselines=how.baselines,
        workspace=workspace,
        verify=verify,
    )
    after = Scores.load_shared(locate(workspace, "runs", again)).metrics
    return {
        name: (metric.value, after[name].value)
        for name, metric in before.metrics.items()
        if name in after
    }


def _store_reproduction(run: Run, reproduction: Reproduction) -> None:
    """Write `reproduction.json`, and the page of the run again where it has to say that shown
    digits change.
    """
    files: dict[str, storage.Content | None] = {"reproduction.json": reproduction.encode()}
    write_results(run.folder, files)
    if not reproduction.list_changes():
        return
    page = run_page.training_page(run.folder, run.record)
    if run.scores is not None:
        scores, columns = Scores.load_shared(run.folder), {}
        if has_result(run.folder / "predictions.parquet") and scores.task:
            frame = read_result_table(run.folder / "predictions.parquet")
            rows = parse_predictions(scores.task, frame, run.windows().class_names)
            columns = {"target": rows.target, "prediction": rows.prediction}
        page = run_page.evaluation_page(
            Run(run.folder, run.record, scores.data, run.open_windows), scores, columns
        )
    write_report(run.folder, page)


def _initial_run(record: RunRecord) -> str | None:
    """What `--init` was, where the run records it. Raises UserError (config, exit 2) where it was
    another folder.
    """
    origin = record.init_from or {}
    if record.init and not origin:
        problem = "the run started from the weights of a folder that it does not name"
        raise usage_error(problem, hint="Train it again with --init", file=record.run)
    return origin.get("run") or (f"{origin['repo']}@{origin['revision']}" if origin else None)


def _list_environment(
    record: RunRecord, environment: RunEnvironment, versions: dict[str, str]
) -> list[str]:
    """Versions and environment that differ from those of the run."""
    out = [
        f"{name} {version}, it was {record.versions.get(name)}"
        for name, version in versions.items()
        if record.versions.get(name) != version
    ]
    if record.environment is not None:
        out += environment.list_changes(record.environment)
    if record.earlier_environments:
        first = record.earlier_environments[0].describe()
        out.append(f"the run was stopped and continued elsewhere; it began on {first}")
    return out


def _list_data(record: RunRecord, execution: Execution) -> list[str]:
    out = []
    for data in record.data:
        fingerprint = prepare_windows(data.name, execution).fingerprint
        if fingerprint != data.fingerprint:
            now, before = fingerprint[:16], data.fingerprint[:16]
            out.append(f"{data.name} has the fingerprint {now}, it was {before}")
    return out
