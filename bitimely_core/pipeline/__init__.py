"""Experiments: a recipe is planned as a graph of stages; `run` executes it, skips finished stages
and continues stopped ones.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bitimely_core import registry
from bitimely_core.config import parse_assignments
from bitimely_core.errors import Exit, UserError, unknown_name_error, usage_error
from bitimely_core.pipeline import costs, families, graph, workers
from bitimely_core.pipeline.graph import StageState
from bitimely_core.pipeline.plan import ExperimentPlan, plan_experiment
from bitimely_core.recipe import Recipe, check_settings, load_recipe, replace_preset
from bitimely_core.types import Progress
from bitimely_core.workspace import locate_new

__all__ = ["ExperimentStatus", "StageRow", "load", "run"]
Say = Callable[[str], None]


class StageRow(NamedTuple):
    """A stage and its state."""

    stage: str
    state: StageState


class ExperimentStatus(NamedTuple):
    """The stages of a run and the estimated seconds to its end; None: unknown."""

    stages: list[StageRow]
    left: float | None


Watch = Callable[[ExperimentStatus], object]


def load(
    name: str,
    *,
    leak_free: bool = False,
    preset: str | None = None,
    changes: dict[str, Any] | None = None,
) -> Recipe:
    """A shipped recipe by name, or a TOML file by path, at another `preset` where one is given.
    Raises UserError (unknown_name or config, exit 2).
    """
    shipped = {p.stem: p for p in registry.RECIPES.glob("*.toml")}
    path = Path(name)
    if name in shipped:
        path = shipped[name]
    elif path.suffix != ".toml" and os.sep not in name:
        raise unknown_name_error("pipeline", name, list(shipped))
    recipe = load_recipe(path, leak_free=leak_free, changes=changes)
    return recipe if preset is None else replace_preset(recipe, preset)


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
    on: str | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
    watch: Watch | None = None,
    began: float | None = None,
) -> dict[str, Any]:
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
        dry_run: only show what would be done, with estimates of parameters, operations, hours and
            disk.
        on: an accelerator (a key of `costs.ACCELERATORS`) whose hours the estimates are; None: the
            present device.
        progress: called with what is counted, how far, of how many.
        say: called with one line of information.
        watch: called whenever a stage changes: states, and `left`, the estimated seconds to the
            end.
        began: seconds since the epoch, of processes that share the work; what failed since is not
            tried again. None: now.

    Returns:
        stages (stage, state, detail, exit_code, seconds), report, exit_code: 0, 3 when a data set
        was partly quarantined, else that of the first failed stage; of a dry run stages (stage, and
        of trainings parameters, flops, seconds, bytes) and totals.

    Raises:
        UserError: unknown_name, config (2).
    """
    began = time.time() if began is None else began
    name = _name_experiment(pipeline, leak_free=leak_free, preset=preset)
    home, page = (locate_new(workspace, kind, name) for kind in ("pipelines", "reports"))
    recipe_changes, per_training = _split_assignments(assignments or [])
    recipe = load(pipeline, leak_free=leak_free, preset=preset, changes=recipe_changes)
    check_settings(recipe, parse_assignments(per_training))
    if recipe.recipes:
        plans = _plan_recipes(recipe, pipeline, preset, workspace)
        chosen = [one for one, plan in plans.items() if not only or find_matches(plan, only)]
        if not chosen:
            raise _no_match_error(only or [], plans.values())
        call = functools.partial(
            run, workspace=workspace, only=only, jobs=jobs, devices=devices, shard=shard, preset=preset, assignments=assignments,
            dry_run=dry_run, on=on, progress=progress, say=say, watch=watch, began=began,
        )  # fmt: skip
        return _join_recipes(
            recipe, plans, pipeline, home, workspace, {one: call(one) for one in chosen}, progress
        )
    plan = plan_experiment(
        recipe,
        name,
        workspace,
        assignments=per_training,
        devices=devices,
        leak_free=leak_free,
        progress=progress,
        say=say,
    )
    if only and not find_matches(plan, only):
        raise _no_match_error(only, [plan])
    selected = graph.closure(plan.nodes, select_stages(plan, only or [], shard))
    if dry_run:
        found = costs.estimate_costs(plan, selected, workspace, on=on, progress=progress)
        return {"format_version": 1, "pipeline": pipeline, "exit_code": 0, **found}
    same_run = functools.partial(
        run, pipeline, workspace=workspace, only=only, devices=devices, shard=shard, leak_free=leak_free, preset=preset,
        assignments=assignments, began=began,
    )  # fmt: skip
    with workers.limit_threads(jobs), workers.start_processes(jobs, same_run, devices):
        states = graph.execute(
            plan.nodes,
            home,
            selected=selected,
            began=began,
            watch=_add_time_left(plan, selected, watch, jobs),
        )
    stages = [
        {"stage": label, **state._asdict()}
        for label, state in states.items()
        if state.state != "not run"
    ]
    failed = [state.exit_code for state in states.values() if state.state == "failed"]
    partial = any(state.state == "partial" for state in states.values())
    page /= "report.html"
    return {
        "format_version": 1,
        "pipeline": pipeline,
        "stages": stages,
        "report": str(page) if page.is_file() else None,
        "exit_code": int(failed[0] if failed else Exit.PARTIAL if partial else Exit.OK),
    }


def _name_experiment(pipeline: str, *, leak_free: bool = False, preset: str | None = None) -> str:
    """The name of a recipe, or of its variant, in the workspace."""
    return "-".join(filter(None, [Path(pipeline).stem, "leak-free" if leak_free else "", preset]))


def _plan_recipes(
    recipe: Recipe, pipeline: str, preset: str | None, workspace: Path
) -> dict[str, ExperimentPlan]:
    """The plan of each recipe of several, which are checked before any of them runs. Raises
    UserError (config, exit 2).
    """
    parts = {one: load(one, preset=preset) for one in recipe.recipes}
    if nested := [one for one, part in parts.items() if part.recipes]:
        raise usage_error(
            f"{nested[0]} lists recipes itself",
            "expected recipes with stages of their own",
            field="recipes",
            file=pipeline,
        )
    plans = {
        one: plan_experiment(part, _name_experiment(one, preset=preset), workspace, assignments=[])
        for one, part in parts.items()
    }
    families.check_families(recipe, list(plans.values()))
    return plans


def _join_recipes(
    recipe: Recipe,
    plans: dict[str, ExperimentPlan],
    pipeline: str,
    home: Path,
    workspace: Path,
    results: dict[str, dict[str, Any]],
    progress: Progress | None,
) -> dict[str, Any]:
    """The results of several recipes as one, and the page of the families that are tested over
    them.
    """
    stages = [
        {**stage, "stage": f"{stage['stage']} ({plans[one].name})"}
        for one, result in results.items()
        for stage in result["stages"]
    ]
    totals = [result["total"] for result in results.values() if "total" in result]
    if totals:
        total = {key: sum(one[key] for one in totals) for key in totals[0]}
        about = next(iter(results.values()))["assumptions"]
        return {
            "format_version": 1, "pipeline": pipeline, "exit_code": 0, "stages": stages, "report": None, "total": total, "assumptions": about,
        }  # fmt: skip
    page = workspace / "reports" / home.name

    def call(_: graph.States) -> graph.StageResult:
        families.write_families(recipe, home.name, list(plans.values()), workspace, progress)
        return graph.StageResult()

    read = tuple(workspace / "reports" / plans[one].name / "summary.json" for one in results)
    settings = {"families": [one.model_dump() for one in recipe.family]}
    node = graph.Node(
        label="families", settings=settings, call=call, output=page / "summary.json", inputs=read
    )
    state = graph.execute({"families": node}, home)["families"]
    codes = [result["exit_code"] for result in results.values()]
    failed = [code for code in (*codes, state.exit_code) if code not in {Exit.OK, Exit.PARTIAL}]
    return {
        "format_version": 1,
        "pipeline": pipeline,
        "stages": [*stages, {"stage": "families", **state._asdict()}],
        "report": str(page / "report.html") if (page / "report.html").is_file() else None,
        "exit_code": int(failed[0] if failed else max(codes)),
    }


def _split_assignments(pairs: list[str]) -> tuple[dict[str, Any], list[str]]:
    """`--set`: changes of the recipe itself, and the pairs that every training gets."""
    own = ("ingest", "tokenize", "build", "evaluate", "matrix")
    return parse_assignments([p for p in pairs if p.split(".")[0] in own]), [
        p for p in pairs if p.split(".")[0] not in own
    ]


def find_matches(plan: ExperimentPlan, only: list[str]) -> set[str]:
    """Labels of the stages in whose block, values, arm, row or data one of the texts occurs."""
    return {
        label for label, words in plan.search_texts.items() if any(text in words for text in only)
    }


def _no_match_error(only: list[str], plans: Iterable[ExperimentPlan]) -> UserError:
    rows = dict.fromkeys(
        f"{entry.row} {entry.column}".strip()
        for plan in plans
        for entry in plan.table
        if entry.run is not None
    )
    examples = ", ".join(list(rows)[:5])
    return usage_error(
        f"no cell holds {' or '.join(map(repr, only))}",
        f"expected a part of a cell such as {examples}",
        field="--only",
    )


def select_stages(plan: ExperimentPlan, only: list[str], shard: tuple[int, int] | None) -> set[str]:
    """Labels of the stages that this call runs."""
    selected = {label for label in plan.nodes if label not in plan.cell_of}
    matched = find_matches(plan, only)
    for label, owner in plan.cell_of.items():
        in_shard = (
            shard is None or int(sha256(owner.encode()).hexdigest(), 16) % shard[1] == shard[0] - 1
        )
        if in_shard and (not only or label in matched):
            selected.add(label)
    return selected


def _add_time_left(
    plan: ExperimentPlan, selected: set[str], watch: Watch | None, jobs: int
) -> Callable[[graph.States], object] | None:
    """`watch` with the time left: a training takes as long as those of the same verb and model
    took, else as those of the same verb.

    `jobs`: processes that share the trainings.
    """
    if watch is None:
        return None

    def report(states: graph.States) -> None:
        took: dict[tuple[str, ...], list[float]] = {}
        for label, training in plan.trainings.items():
            if label in states and states[label].state == "done":
                for kind in ((training.verb, plan.model_name(label)), (training.verb,)):
                    took.setdefault(kind, []).append(states[label].seconds)
        left = 0.0
        for label in selected & plan.trainings.keys():
            if label not in states or states[label].state == "running":
                verb = plan.trainings[label].verb
                left += mean(took.get((verb, plan.model_name(label))) or took.get((verb,)) or [0.0])
        rows = [
            StageRow(label, states.get(label, StageState("waiting")))
            for label in plan.nodes
            if label in selected
        ]
        watch(ExperimentStatus(rows, left / jobs or None))

    return report
