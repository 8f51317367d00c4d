"""Experiments: a recipe is planned as a graph of stages; `run` executes it, skips finished stages
and continues stopped ones.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bitimely_core import registry
from bitimely_core.config import parse_assignments
from bitimely_core.errors import Exit, unknown_name_error, usage_error
from bitimely_core.pipeline import costs, families, graph, stage_workers
from bitimely_core.pipeline.cells import ExperimentPlan, join_names
from bitimely_core.pipeline.graph import StageState
from bitimely_core.pipeline.plan import plan_experiment
from bitimely_core.recipe import Recipe, check_settings, load_recipe, replace_preset
from bitimely_core.registry import Choices
from bitimely_core.store.workspace import locate_new
from bitimely_core.text_paths import accept_texts

__all__ = ["ExperimentStatus", "StageRow", "load", "run"]
# that --set changes in the recipe itself
RECIPE_SECTIONS = ("ingest", "tokenize", "build", "evaluate", "matrix")


class StageRow(NamedTuple):
    """A stage and its state."""

    stage: str
    state: StageState


class ExperimentStatus(NamedTuple):
    """The stages of a run and the estimated seconds to its end; None: unknown."""

    stages: list[StageRow]
    seconds_left: float | None


Watch = Callable[[ExperimentStatus], object]


def load(
    name: str, *, leak_free: bool = False, preset: str | None = None, changes: Choices | None = None
) -> Recipe:
    """A shipped recipe by name, or a TOML file by path, at another `preset` where one is given.
    Raises UserError (unknown_name or config, exit 2).
    """
    shipped = {p.stem: p for p in registry.RECIPES.glob("*.toml")}
    path = shipped.get(name, Path(name))
    if path.suffix != ".toml" and os.sep not in name:
        raise unknown_name_error("pipeline", name, list(shipped))
    recipe = load_recipe(path, leak_free=leak_free, changes=changes)
    return recipe if preset is None else replace_preset(recipe, preset)


@accept_texts
def run(
    pipeline: str,
    *,
    workspace: Path = Path("workspace"),
    only: list[str] | None = None,
    jobs: int = 1,
    devices: int = 1,
    shard: tuple[int, int] | None = None,
    leak_free: bool = False,
    preset: str | None = None,
    assignments: list[str] | None = None,
    dry_run: bool = False,
    estimate: bool = False,
    on: str | None = None,
    watch: Watch | None = None,
    began: float | None = None,
) -> Choices:
    """Run a recipe: ingest, tokenize, then for each cell pretrain, finetune, evaluate, then the
    analyses and the page of results.

    A stage that fails is reported, stages that depend on it are left out, the others go on; the
    next call tries it again. Several calls may work on one workspace at once: each stage is run by
    one of them.

    Args:
        pipeline: name of a shipped recipe, or path of a TOML file.
        workspace: folder of caches, tokens, runs and reports.
        only: stages that hold one of these texts in a value of the matrix, an arm, a block, or the
            row and the data of a fine-tuning, and what they need; the page shows all.
        jobs: processes that share the work; each has a GPU of its own where there are several.
        devices: of each training, data-parallel.
        shard: (k, n), part k of n of the cells, for a job array.
        leak_free: leave the recipe's section `[literal]` out; names end in -leak-free.
        preset: of all trainings in the place of the recipe's, `paper` for the one that it names as
            the paper's; names end in it.
        assignments: `section.key=value`; sections of a recipe (ingest, tokenize, build, evaluate,
            matrix) change the recipe, the others all trainings.
        dry_run: only show what would be done.
        estimate: as `dry_run`, with parameters, operations, hours and disk; steps are timed.
        on: as `estimate`, with the hours of this accelerator (a key of `costs.ACCELERATORS`);
            nothing is timed.
        watch: called whenever a stage changes: states, and `seconds_left`, the estimated
            seconds to the end.
        began: seconds since the epoch, of processes that share the work; what failed since is not
            tried again. None: now.

    Returns:
        stages (stage, state, detail, exit_code, seconds), report, exit_code: 0, 3 when a data set
        was partly quarantined, else that of the first failed stage; of a dry run stages and totals,
        of estimates with parameters, flops, seconds and bytes of trainings.

    Raises:
        UserError: unknown_name, config (2).
    """
    began = time.time() if began is None else began
    name = _name_experiment(pipeline, leak_free=leak_free, preset=preset)
    home, page = (locate_new(workspace, kind, name) for kind in ("pipelines", "reports"))
    recipe_changes, per_training = _split_assignments(assignments or [])
    recipe = load(pipeline, leak_free=leak_free, preset=preset, changes=recipe_changes)
    check_settings(recipe, parse_assignments(per_training))
    run_again = functools.partial(
        run,
        workspace=workspace,
        only=only,
        devices=devices,
        shard=shard,
        preset=preset,
        assignments=assignments,
        began=began,
    )
    head = {"format_version": 1, "pipeline": pipeline}
    if recipe.recipes:
        plans = _plan_recipes(recipe, pipeline, preset, workspace)
        _check_matches(only, plans.values())
        run_part = functools.partial(
            run_again, jobs=jobs, dry_run=dry_run, estimate=estimate, on=on, watch=watch
        )
        results = {
            plan.name: run_part(part)
            for part, plan in plans.items()
            if not only or find_matches(plan, only)
        }
        return head | _join_recipes(recipe, home, workspace, list(plans.values()), results)
    plan = plan_experiment(
        recipe, name, workspace, assignments=per_training, devices=devices, leak_free=leak_free
    )
    _check_matches(only, [plan])
    selected = graph.closure(plan.nodes, select_stages(plan, only or [], shard))
    if estimate or on is not None:
        return head | costs.estimate_costs(plan, selected, workspace, on=on)
    if dry_run:
        return head | costs.list_stages(plan, selected)
    report = _add_time_left(plan, selected, watch, jobs)
    same_run = functools.partial(run_again, pipeline, leak_free=leak_free)
    with stage_workers.limit_threads(jobs), stage_workers.start_processes(jobs, same_run, devices):
        states = graph.execute(plan.nodes, home, selected=selected, began=began, watch=report)
    return head | _describe_stages(states, page)


def _describe_stages(states: graph.States, page: Path) -> Choices:
    """The stages of a recipe that were run, its page and the exit code."""
    stages = [row for row in graph.list_states(states) if row["state"] != "not run"]
    codes = [row["exit_code"] for row in stages if row["state"] in {"failed", "partial"}]
    return _describe_end(stages, page, codes)


def _name_experiment(pipeline: str, *, leak_free: bool = False, preset: str | None = None) -> str:
    """The name of a recipe, or of its variant, in the workspace."""
    return join_names(Path(pipeline).stem, "leak-free" if leak_free else "", preset)


def _plan_recipes(
    recipe: Recipe, pipeline: str, preset: str | None, workspace: Path
) -> dict[str, ExperimentPlan]:
    """The plan of each recipe of several, which are checked before any of them runs. Raises
    UserError (config, exit 2).
    """
    recipes = {part: load(part, preset=preset) for part in recipe.recipes}
    for part, part_recipe in recipes.items():
        if part_recipe.recipes:
            raise usage_error(
                f"{part} lists recipes itself",
                "expected recipes with stages of their own",
                field="recipes",
                file=pipeline,
            )
    plans = {}
    for part, part_recipe in recipes.items():
        name = _name_experiment(part, preset=preset)
        plans[part] = plan_experiment(part_recipe, name, workspace, assignments=[])
    families.check_families(recipe, list(plans.values()))
    return plans


def _join_recipes(
    recipe: Recipe,
    home: Path,
    workspace: Path,
    plans: list[ExperimentPlan],
    results: dict[str, Choices],
) -> Choices:
    """The results of several recipes as one, and the page of the families that are tested over
    them. `results`: name of a plan -> result of `run`.
    """
    stages = [
        {**stage, "stage": f"{stage['stage']} ({name})"}
        for name, result in results.items()
        for stage in result["stages"]
    ]
    if any("total" in result for result in results.values()):
        return _join_plans(stages, list(results.values()))
    reports = workspace / "reports"

    def call(_: graph.States) -> graph.StageResult:
        families.write_families(recipe, home.name, plans, workspace)
        return graph.StageResult()

    node = graph.Node(
        label="families",
        settings={"families": [family.model_dump() for family in recipe.family]},
        call=call,
        output=reports / home.name / "summary.json",
        inputs=tuple(reports / name / "summary.json" for name in results),
    )
    states = graph.execute({"families": node}, home)
    codes = [result["exit_code"] for result in results.values()]
    return _describe_end(
        [*stages, *graph.list_states(states)],
        reports / home.name,
        [*codes, states["families"].exit_code],
    )


def _join_plans(stages: list[Choices], planned: list[Choices]) -> Choices:
    """The dry runs of several recipes as one."""
    first = planned[0]
    return {
        **{key: first[key] for key in ("exit_code", "report", "assumptions") if key in first},
        "stages": stages,
        "total": {key: sum(part["total"][key] for part in planned) for key in first["total"]},
    }


def _describe_end(stages: list[Choices], page: Path, codes: list[int]) -> Choices:
    """The stages, the page and the exit code of a run: that of the first failure in `codes`, else
    the largest.
    """
    failed = [code for code in codes if code not in {Exit.OK, Exit.PARTIAL}]
    report = page / "report.html"
    return {
        "stages": stages,
        "report": str(report) if report.is_file() else None,
        "exit_code": int(next(iter(failed), max(codes, default=Exit.OK))),
    }


def _split_assignments(pairs: list[str]) -> tuple[Choices, list[str]]:
    """`--set`: changes of the recipe itself, and the pairs that every training gets."""
    changes: list[str] = []
    per_training: list[str] = []
    for pair in pairs:
        is_change = pair.split(".")[0] in RECIPE_SECTIONS
        (changes if is_change else per_training).append(pair)
    return parse_assignments(changes), per_training


def find_matches(plan: ExperimentPlan, only: list[str]) -> set[str]:
    """Labels of the stages in whose block, values, arm, row or data one of the texts occurs."""
    return {
        label
        for label, owner in plan.owners.items()
        if any(text in owner.search_text for text in only)
    }


def _check_matches(only: list[str] | None, plans: Collection[ExperimentPlan]) -> None:
    """Raises UserError (config, exit 2) where no stage of the plans matches."""
    if not only or any(find_matches(plan, only) for plan in plans):
        return
    rows = dict.fromkeys(
        f"{entry.row} {entry.column}".strip()
        for plan in plans
        for entry in plan.table
        if entry.run is not None
    )
    raise usage_error(
        f"no cell holds {' or '.join(map(repr, only))}",
        f"expected a part of a cell such as {', '.join(list(rows)[:5])}",
        field="--only",
    )


def select_stages(plan: ExperimentPlan, only: list[str], shard: tuple[int, int] | None) -> set[str]:
    """Labels of the stages that this call runs."""
    matched = find_matches(plan, only)
    return {
        label
        for label in plan.nodes
        if label not in plan.owners
        or ((not only or label in matched) and _is_in_shard(plan.owners[label].cell, shard))
    }


def _is_in_shard(cell: str, shard: tuple[int, int] | None) -> bool:
    if shard is None:
        return True
    part, count = shard
    return int(sha256(cell.encode()).hexdigest(), 16) % count == part - 1


def _add_time_left(
    plan: ExperimentPlan, selected: set[str], watch: Watch | None, jobs: int
) -> Callable[[graph.States], object] | None:
    """`watch` with the time left; `jobs` processes share the trainings."""
    if watch is None:
        return None

    def report(states: graph.States) -> None:
        rows = [
            StageRow(label, states.get(label, StageState("waiting")))
            for label in plan.nodes
            if label in selected
        ]
        seconds = _estimate_seconds(plan, selected, states)
        watch(ExperimentStatus(rows, seconds / jobs or None))

    return report


def _estimate_seconds(plan: ExperimentPlan, selected: set[str], states: graph.States) -> float:
    """Seconds of the trainings that have not ended: a training takes as long as those of the same
    verb and model took, else as those of the same verb.
    """
    took: dict[tuple[str, ...], list[float]] = {}
    waiting = []
    for label, training in plan.trainings.items():
        kind = (training.verb, plan.model_name(label))
        state = states.get(label, StageState("waiting"))
        if state.state == "done":
            took.setdefault(kind, []).append(state.seconds)
            took.setdefault(kind[:1], []).append(state.seconds)
        elif label in selected and state.state in {"waiting", "running"}:
            waiting.append(kind)
    return sum(mean(took.get(kind) or took.get(kind[:1]) or [0.0]) for kind in waiting)
