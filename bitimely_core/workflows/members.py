"""Test folds by subject and seeds of one training: each is a run of its own, scored, and all are
pooled as one run with one page.

Of folds the predictions are joined, so that every subject is tested once, by the model that was not
trained on it. Of seeds the scores are averaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core.config import DataConfig
from bitimely_core.errors import usage_error
from bitimely_core.evaluate import folds as pooling
from bitimely_core.evaluate import verdicts
from bitimely_core.evaluate.baselines import predict_baselines
from bitimely_core.evaluate.result_table import (
    ScoreColumn,
    ScoredRun,
    compare_column,
    read_scored_run,
)
from bitimely_core.evaluate.scoring import ConstantBaseline
from bitimely_core.page import Page
from bitimely_core.progress import announce, show_lines_once
from bitimely_core.report.comparison_page import comparison_page
from bitimely_core.report.renderer import write_report
from bitimely_core.report.run_page import folds_page
from bitimely_core.run import FORMAT, claim_folder, describe_data, list_versions
from bitimely_core.schemas.runs import PooledRuns, RunData, RunRecord, SplitCount
from bitimely_core.schemas.scores import Difference, MetricValue, Scores
from bitimely_core.store import storage
from bitimely_core.store.records import has_result
from bitimely_core.store.workspace import find_data_kind, find_dataset, locate_new, name_tokens
from bitimely_core.tokens.fold_tokens import name_fold, write_fold
from bitimely_core.tokens.windows import Windows
from bitimely_core.types import SPLITS
from bitimely_core.workflows.evaluate import evaluate, predict_shortcuts, score_endpoints
from bitimely_core.workflows.jobs import TrainingPlan, TrainingResult
from bitimely_core.workflows.prepare import Execution, make_windows_opener, prepare_windows

if TYPE_CHECKING:
    import polars as pl

TrainPlan = Callable[[TrainingPlan, str | None, Execution], TrainingResult]
Baselines = dict[str, ConstantBaseline]


class Repeats(NamedTuple):
    """How often a training is repeated."""

    folds: int | None  # None: the split of the data
    seeds: int | None  # None: the seed of the settings


class Group(NamedTuple):
    """Runs that are pooled as one."""

    run: str
    record: RunRecord
    members: tuple[Group | TrainingPlan, ...]  # in the order of `record.members.runs`


def name_training(plan: TrainingPlan) -> str:
    """The name of a run that has none: `<model>[-<preset>]-<view>`."""
    preset = [plan.preset] if plan.preset not in {"", "tiny"} else []
    return "-".join([plan.model, *preset, plan.view.rpartition("/")[2]])


def train_members(
    plan: TrainingPlan,
    run: str | None,
    repeats: Repeats,
    execution: Execution,
    train_plan: TrainPlan,
) -> TrainingResult:
    """Train and score `plan` for each test fold and each seed, and pool them as the run `run`.

    Runs that are finished or scored are left as they are, so that the same command continues.

    Raises UserError: as `train`; config (exit 2) for too many folds, and for folds of histories.
    """
    from bitimely_core.train.distributed import barrier, get_rank

    windows = _open_windows(plan, repeats, execution)
    if execution.dry_run:
        return _estimate(plan, run, repeats, execution, train_plan)
    group = _plan_group(plan, run, repeats, windows)
    if get_rank() == 0:
        _claim_groups(group, execution)
    barrier()
    results = list(_train_group(group, windows, execution, train_plan))
    if get_rank() == 0:
        _pool_group(group, execution, any(result["trained"] for result in results))
    barrier()
    scores = evaluate(group.run, workspace=execution.workspace)
    return {
        "format_version": FORMAT,
        "run": group.run,
        "folder": str(locate_new(execution.workspace, "runs", group.run)),
        "parameters": results[0]["parameters"],
        "leak_free": results[0]["leak_free"],
        "trained": any(result["trained"] for result in results),
        "writer": results[0]["writer"],
        "steps": sum(result["steps"] for result in results),
        "final": None,
        "notices": scores["notices"],
        "members": [result["run"] for result in results],
        "scores": scores,
    }


def _open_windows(plan: TrainingPlan, repeats: Repeats, execution: Execution) -> Windows:
    """The windows whose subjects are dealt to folds, whatever their split.

    Raises UserError (config, exit 2) for numbers of folds or seeds that cannot be.
    """
    folds, seeds = repeats
    for name, count in (("--folds", folds), ("--seeds", seeds)):
        if count is not None and count < 2:
            raise usage_error(f"found {count}", "expected 2 or more", "Leave it out", field=name)
    kind = find_data_kind(find_dataset(plan.view, execution.workspace))
    if folds and kind.no_folds:
        hint = f"{kind.no_folds}, or average over --seeds"
        raise usage_error(f"folds of {plan.view}", "expected recordings", hint, field="--folds")
    windows = prepare_windows(plan.view, execution, plan.settings.data, together=True)
    subjects, least = len(set(windows.subjects())), max(3, folds or 0)
    if folds and subjects < least:
        hint = f"Give --folds {subjects}" if subjects >= 3 else "Ingest recordings of more people"
        raise usage_error(
            f"{windows.name} has {subjects} {windows.subject_unit}s",
            f"expected at least {least} for {folds} folds",
            hint,
            field="--folds",
        )
    return windows


def _estimate(
    plan: TrainingPlan,
    run: str | None,
    repeats: Repeats,
    execution: Execution,
    train_plan: TrainPlan,
) -> TrainingResult:
    """The result of a dry run: that of one training, and the time of all."""
    trainings = (repeats.folds or 1) * (repeats.seeds or 1)
    result = train_plan(plan, run or _name_group(plan, repeats), execution)
    result["trainings"] = trainings
    if "seconds" in result:  # methods are fitted at once
        result["seconds"] *= trainings
    return result


# ---- which runs are pooled


def _name_group(plan: TrainingPlan, repeats: Repeats) -> str:
    folds = f"-{repeats.folds}-folds" if repeats.folds else ""
    seeds = f"-{repeats.seeds}-seeds" if repeats.seeds else ""
    return name_training(plan) + folds + seeds


def _plan_group(plan: TrainingPlan, run: str | None, repeats: Repeats, windows: Windows) -> Group:
    """The run of all folds and seeds with its members."""
    folds, seeds = repeats
    name, base = run or _name_group(plan, repeats), run or name_training(plan)
    data = describe_data(windows)
    if folds:
        data = _describe_folds(data, folds)
    if not seeds:
        return _plan_folds(plan, name, (base, ""), folds or 1, data)
    first = plan.settings.train.seed
    members: dict[str, Group | TrainingPlan] = {}
    for seed in range(first, first + seeds):
        train = plan.settings.train.model_copy(update={"seed": seed})
        seeded = plan._replace(settings=plan.settings.model_copy(update={"train": train}))
        suffix = f"-seed-{seed}"
        if folds:
            inner = f"{base}-{folds}-folds{suffix}"
            members[inner] = _plan_folds(seeded, inner, (base, suffix), folds, data)
        else:
            members[base + suffix] = seeded
    return _make_group(plan, name, "seed", members, data)


def _plan_folds(
    plan: TrainingPlan, name: str, affixes: tuple[str, str], folds: int, data: RunData
) -> Group:
    """The run of all test folds. `affixes` stand before and behind the fold in names of members."""
    tokens = name_tokens(plan.view)
    members: dict[str, TrainingPlan] = {}
    for fold in range(1, folds + 1):
        view = name_fold(tokens, fold, folds)
        # how windows are cut is said by those that are split anew
        choices = {"names": (view,), "fraction": plan.settings.data.fraction}
        config = DataConfig(**choices, limit=plan.settings.data.limit)
        settings = plan.settings.model_copy(update={"data": config})
        run = name_fold(affixes[0], fold, folds) + affixes[1]
        members[run] = plan._replace(settings=settings, view=view)
    return _make_group(plan, name, "fold", members, data)


def _make_group(
    plan: TrainingPlan,
    run: str,
    by: Literal["fold", "seed"],
    members: Mapping[str, Group | TrainingPlan],
    data: RunData,
) -> Group:
    record = RunRecord(
        run=run,
        kind="train",
        model=plan.model,
        preset=plan.preset,
        settings=plan.settings,
        data=(data,),
        seed=plan.settings.train.seed,
        versions=list_versions(),
        members=PooledRuns(by=by, runs=tuple(members)),
    )
    return Group(run, record, tuple(members.values()))


def _describe_folds(data: RunData, folds: int) -> RunData:
    """The windows of all test folds, in each of which every subject is tested once."""
    subjects = sum(count.subjects or 0 for count in data.audit.values())
    audit = {split: SplitCount() for split in SPLITS}
    audit["test"] = SplitCount(windows=data.windows, subjects=subjects)
    name = f"{data.name}-{folds}-folds"
    return data.model_copy(update={"name": name, "split": "subject", "audit": audit})


def _claim_groups(group: Group, execution: Execution) -> None:
    """Take the folders of a group and of the groups in it. Raises UserError: as `claim_folder`."""
    folder = locate_new(execution.workspace, "runs", group.run, "--run")
    claim_folder(folder, group.record, force_new=execution.force_new)
    for member in group.members:
        if isinstance(member, Group):
            _claim_groups(member, execution)


# ---- training


def _train_group(
    group: Group, windows: Windows, execution: Execution, train_plan: TrainPlan
) -> Iterator[TrainingResult]:
    """Train and score the members of a group one after another."""
    assert group.record.members is not None, "a group has members"
    by, announced = group.record.members.by, set[str]()
    for number, (name, member) in enumerate(
        zip(group.record.members.runs, group.members, strict=True), 1
    ):
        announce(f"{by} {number} of {len(group.members)}: {name}")
        if isinstance(member, Group):
            yield from _train_group(member, windows, execution, train_plan)
            continue
        if by == "fold":
            _write_fold(windows, number, len(group.members), execution)
        with show_lines_once(announced):  # each caveat for the first run alone
            result = train_plan(member, name, execution)
        if result["writer"]:
            _score_member(Path(result["folder"]), member, execution)
        yield result


def _write_fold(windows: Windows, fold: int, folds: int, execution: Execution) -> None:
    """The tokens of a test fold, which the first of several processes writes."""
    from bitimely_core.train.distributed import barrier, get_rank

    if get_rank() == 0:
        name = name_fold(windows.name, fold, folds)
        out = locate_new(execution.workspace, "tokens", name)
        write_fold(windows, out, fold, folds, verify=execution.verify)
    barrier()


def _score_member(folder: Path, plan: TrainingPlan, execution: Execution) -> None:
    """Score a run that has no scores yet."""
    if not has_result(folder / "scores.json"):
        evaluate(
            folder.name,
            workspace=execution.workspace,
            device=plan.settings.train.device,
            verify=execution.verify,
        )


# ---- pooling


def _pool_group(group: Group, execution: Execution, is_changed: bool) -> None:
    """Pool the members of a group, those in it first, and write its record, scores and page where
    a member was trained, or they are missing.
    """
    assert group.record.members is not None, "a group has members"
    for member in group.members:
        if isinstance(member, Group):
            _pool_group(member, execution, is_changed)
    folder = execution.workspace / "runs" / group.run
    if has_result(folder / "scores.json") and not is_changed:
        return
    folders = [folder.parent / name for name in group.record.members.runs]
    parts = (read_scored_run(group.run, "", 0, path) for path in folders)
    runs = list(filter(None, parts))
    record = _finish_record(group.record, [run.record for run in runs])
    files: dict[str, storage.Content | None] = {"run.json": record.encode()}
    if group.record.members.by == "fold":
        scores, page, frame = _pool_folds(record, runs, execution)
        files["predictions.parquet"] = storage.encode_parquet(frame)
    else:
        scores, page = _pool_seeds(record, runs)
    write_report(folder, page, others={**files, "scores.json": scores.encode()})


def _finish_record(record: RunRecord, members: list[RunRecord]) -> RunRecord:
    """The record of a group whose members have been trained."""
    first, notices = members[0], itertools.chain(*(member.notices for member in members))
    update = {
        "parameters": first.parameters,
        "paper_parameters": first.paper_parameters,
        "preparation": first.preparation,
        "verified": all(member.verified for member in members),
        "environment": first.environment,
        "device": first.device,
        "notices": tuple(dict.fromkeys(notices)),
        "finished": True,
    }
    return record.model_copy(update=update)


def _pool_folds(
    record: RunRecord, runs: list[ScoredRun], execution: Execution
) -> tuple[Scores, Page, pl.DataFrame]:
    """Scores, page and predictions of all test folds together, in the order of the windows."""
    opener = make_windows_opener(execution.workspace)
    of_folds = [opener(run.scores.data) for run in runs]
    fitted, remarks = _join_baselines(runs, of_folds, execution)
    joined = pooling.join_predictions(runs)
    scores = pooling.score_folds(runs, joined, opener, fitted)
    frame = joined.sort("window")
    rows = replace(of_folds[0], rows=frame["window"].to_numpy())
    predictions = scoring.parse_predictions(rows.task, frame, rows.class_names)
    columns = {"target": predictions.target, "prediction": predictions.prediction}
    endpoints = score_endpoints(rows, rows, scores.settings.bootstrap, **columns)
    update = {
        "run": record.run,
        "data": record.data[0].name,
        "remarks": [*scores.remarks, *remarks],
        "notices": list(
            dict.fromkeys(itertools.chain.from_iterable(run.scores.notices for run in runs))
        ),
        **endpoints,
    }
    scores = scores.model_copy(update=update)
    scores = scores.model_copy(update={"lift": verdicts.find_lift(scores)})
    return scores, folds_page(record, scores, rows, columns, runs), frame


def _join_baselines(
    runs: list[ScoredRun], of_folds: list[Windows], execution: Execution
) -> tuple[Baselines, list[str]]:
    """The baselines that predict all windows of every fold, each fitted without the subjects of its
    fold, and a remark on the others.
    """
    joined: dict[str, list[ConstantBaseline]] = {}
    remarks: dict[str, None] = {}
    for run, windows in zip(runs, of_folds, strict=True):
        rows = windows["test"]
        shortcuts = predict_shortcuts(windows, rows)
        constants = {name: ConstantBaseline(*pair) for name, pair in shortcuts.items()}
        fitted, missing = predict_baselines(run.record, windows, rows, folder=run.folder)
        remarks |= dict.fromkeys(missing)
        for name, (about, baseline) in fitted.items():
            if len(baseline.rows) == len(rows):
                constants[name] = ConstantBaseline(about, baseline.prediction)
        for name, constant in constants.items():
            joined.setdefault(name, []).append(constant)
    complete = {name: parts for name, parts in joined.items() if len(parts) == len(runs)}
    for name in joined.keys() - complete.keys():
        title = name.replace("_", " ")
        remarks[f"The baseline of {title} was left out: it predicts a part of a fold."] = None
    return {
        name: parts[0]._replace(prediction=np.concatenate([part.prediction for part in parts]))
        for name, parts in complete.items()
    }, list(remarks)


def _pool_seeds(record: RunRecord, runs: list[ScoredRun]) -> tuple[Scores, Page]:
    """Scores averaged over seeds, with intervals over subjects, and the page of the runs."""
    first, row = runs[0].scores, record.run
    seeds = [run._replace(data=first.data, seed=run.record.seed) for run in runs]
    metrics = {}
    for name in first.metrics:
        column = ScoreColumn(f"{first.data}:{name}", first.data, name, None, first.task or "")
        cell = compare_column(column, seeds, row).cells[row]
        metrics[name] = MetricValue(**cell.model_dump(include=set(MetricValue.model_fields)))
    remark = (
        f"Means over {len(runs)} seeds. The intervals are over subjects, for these trainings; the "
        "variation between seeds is a table of the page."
    )
    update = {
        "run": row,
        "metrics": metrics,
        "baselines": {name: _average_baseline(name, runs) for name in first.baselines},
        "remarks": [remark],
        "by_class": {},
        **dict.fromkeys(("confusion", *pooling.OF_ONE_RUN)),
    }
    scores = first.model_copy(update=update)
    page = comparison_page([run.folder for run in runs])
    return scores, replace(page, title=f"Scores of {row}")


def _average_baseline(name: str, runs: list[ScoredRun]) -> object:
    """A baseline of the first seed, with the difference of the mean over seeds to it."""
    baseline = runs[0].scores.baselines[name]
    metrics = dict(baseline.metrics)
    for key, metric in baseline.metrics.items():
        stored = [run.scores.baselines[name].metrics[key].difference for run in runs]
        differences = [d for d in stored if d is not None and d.difference is not None]
        if len(differences) == len(runs):
            mean = scoring.average_differences(differences)
            difference = Difference(**mean.model_dump(include=set(Difference.model_fields)))
            metrics[key] = metric.model_copy(update={"difference": difference})
    return baseline.model_copy(update={"metrics": metrics})
