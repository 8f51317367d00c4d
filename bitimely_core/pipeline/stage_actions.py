"""What the stages of a recipe do: train, and write results and statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bitimely_core import workflows
from bitimely_core.config import merge_layers
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.pipeline.cells import ExperimentPlan, TrainingStage
from bitimely_core.pipeline.graph import SUCCEEDED, StageResult, StageState, States
from bitimely_core.recipe import Recipe
from bitimely_core.report.recipe_results import ResultPlan, write_results
from bitimely_core.report.recipe_tables import PlannedCell
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store.workspace import locate
from bitimely_core.types import group_by
from bitimely_core.workflows.jobs import Flags, TrainingResult
from bitimely_core.workflows.prepare import make_windows_opener


def train(training: TrainingStage, workspace: Path, devices: int, _: States) -> StageResult:
    """A training, on several devices in processes of their own. Raises UserError: incomplete."""
    if training.rate_from is not None:
        search = RunRecord.load(locate(workspace, "runs", training.rate_from) / "run.json")
        rate = search.tuning.lr if search.tuning else search.settings.train.lr
        training = replace(training, flags=merge_layers(training.flags, {"train": {"lr": rate}}))
    if devices > 1:
        from bitimely_core.train.distributed import launch

        code = launch(
            [training.verb, str(workspace), json.dumps(training.arguments())],
            devices,
            module="bitimely_cli.stage",
        )
        if code:
            raise UserError(
                Reason.INCOMPLETE,
                f"exit code {code}",
                f"expected 0 of all {devices} processes",
                file=training.run,
                exit_code=Exit(code),
            )
        if code is not None:  # None: a launcher has started this process as one of several
            return StageResult()
    result = run_training(training.verb, training.arguments(), workspace=workspace)
    return StageResult(is_new=result.get("trained") is not False)


def run_training(verb: str, arguments: Flags, *, workspace: Path) -> TrainingResult:
    """`workflows.pretrain` or `workflows.finetune` with the arguments of a stage."""
    run = workflows.finetune if verb == "finetune" else workflows.pretrain
    return run(**arguments, workspace=workspace)


def write_result_page(
    plan: ExperimentPlan, workspace: Path, leak_free: bool, states: States
) -> StageResult:
    """The page of results: every cell of the table, with its state."""
    recipe, margin = plan.recipe, plan.recipe.evaluate.margin
    title, variant = recipe.title, ""
    if leak_free:
        title, variant = f"{title} (leak-free variant)", "The leak-free variant"
    elif recipe.literal:
        variant = "As the paper has it; --leak-free for the other variant"
    write_results(
        ResultPlan(
            name=plan.name,
            cells=_find_states(plan, states),
            title=title,
            description=". ".join(filter(None, [recipe.description, variant])),
            paper=recipe.paper,
            columns=recipe.evaluate.columns,
            margins={"": margin} if isinstance(margin, float) else margin or {},
        ),
        workspace=workspace,
        out=workspace / "reports" / plan.name,
        open_windows=make_windows_opener(workspace),
    )
    return StageResult()


def _find_states(plan: ExperimentPlan, states: States) -> list[PlannedCell]:
    """The cells of the table with their states. The test folds of one cell are its runs."""
    folds = group_by(plan.table, lambda entry: (entry.row, entry.column, entry.seed))
    cells = []
    for place, entries in folds.items():
        missing = [
            entry for entry in entries if entry.run and states[entry.stage].state not in SUCCEEDED
        ]
        if why := entries[0].why:
            cells.append(PlannedCell(*place, state="left out", detail=why))
        elif missing:
            cause = _find_cause(plan, missing[0].stage, states)
            count = f"{len(missing)} of {len(entries)} folds, the first: "
            detail = (count if len(entries) > 1 else "") + cause.detail
            cells.append(PlannedCell(*place, state=cause.state, detail=detail))
        else:
            runs = tuple(entry.run for entry in entries if entry.run)
            cells.append(PlannedCell(*place, state="done", runs=runs))
    return cells


def _find_cause(plan: ExperimentPlan, stage: str, states: States) -> StageState:
    """The state of the first stage that failed or was not run, of all that `stage` depends on."""
    for label in _list_needs(plan, stage):
        if states[label].state in {"failed", "not run"}:
            return states[label]
    return states[stage]


def _list_needs(plan: ExperimentPlan, label: str) -> Iterator[str]:
    """All stages that `label` depends on, the first first, and itself."""
    for need in plan.nodes[label].needs:
        yield from _list_needs(plan, need)
    yield label


def write_statistics(recipe: Recipe, name: str, workspace: Path, states: States) -> StageResult:
    """The page of what the views of a recipe hold."""
    workflows.statistics(
        recipe.statistics,
        title=recipe.title,
        description=recipe.description,
        workspace=workspace,
        out=workspace / "reports" / name,
    )
    return StageResult()
