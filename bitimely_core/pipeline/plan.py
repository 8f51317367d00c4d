"""A recipe as a graph of stages: the verbs, their settings, and the order in which they can run."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core import registry, workflows
from bitimely_core.config import DataConfig, Section, load_preset, merge_layers, validate
from bitimely_core.errors import Exit, Reason, UserError, hide_credentials, input_error, usage_error
from bitimely_core.evaluate import METRICS, NAMES
from bitimely_core.pipeline.graph import SUCCEEDED, Node, StageResult, States
from bitimely_core.privacy import format_count
from bitimely_core.recipe import AnalyzeStage, Recipe, RecipeBlock, RecipeStage, TuningStage
from bitimely_core.report.recipe_results import ResultPlan, read_paper, write_results
from bitimely_core.report.recipe_tables import PlannedCell
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import make_windows_opener
from bitimely_core.workflows.train import Flags, Say, TrainingResult
from bitimely_core.workspace import find_data_kind, locate, locate_new, name_tokens, parse_view

# they leave the pre-training as it is: it is shared
FINETUNE_FLAGS = {"readout", "layers", "freeze", "from_scratch", "fraction"}
# option of an analysis: the report of an analysis of the recipe, by its kind
OWN_REPORT = "report:"


@dataclass(frozen=True, kw_only=True)
class ExperimentCell:
    """One row of the table under one seed."""

    arm: str
    values: Flags  # its point of the matrix
    flags: Flags
    set: Flags = field(default_factory=dict)  # settings without a flag

    @property
    def row(self) -> str:
        """The row of the table that it belongs to: all but the seed."""
        return " ".join(
            filter(
                None,
                [self.arm, *(str(value) for key, value in self.values.items() if key != "seed")],
            )
        )

    @property
    def seed(self) -> int:
        """The seed of its trainings."""
        return int(self.flags.get("seed", 0))

    def tune(self, tuning: TuningStage, matrix: Mapping[str, tuple[Any, ...]]) -> ExperimentCell:
        """The cell that chooses the learning rates of its arm: the seed of `tuning`, the first
        value of what the fine-tuning alone reads.
        """
        first = {key: matrix[key][0] for key in self.values if key in FINETUNE_FLAGS} | {
            "seed": tuning.seed
        }
        return replace(self, values={**self.values, **first}, flags={**self.flags, **first})

    def name(self, *, pretraining: bool = False) -> str:
        """The values that tell it from other cells; of the pre-training only those that matter to
        it.
        """
        shown = [
            name_value(value)
            for key, value in self.values.items()
            if not pretraining or key not in FINETUNE_FLAGS
        ]
        last = ["init"] if pretraining and self.flags.get("from_scratch") else []
        return "-".join(filter(None, [self.arm, *shown, *last]))


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A training of a recipe: the verb and its arguments. `source` and `data` belong to
    fine-tuning, `preset` and `budget` to pre-training.
    """

    verb: str
    run: str
    flags: Flags
    assignments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    source: str | None = None
    data: str | None = None
    preset: str | None = None
    budget: str | None = None
    rate_from: str | None = None  # run whose chosen learning rate it takes

    def arguments(self) -> dict[str, Any]:
        """The arguments of the verb."""
        own = (
            {"source": self.source, "data": self.data}
            if self.verb == "finetune"
            else {"preset": self.preset, "budget": self.budget}
        )
        return {**own, "run": self.run, "flags": self.flags, "assignments": list(self.assignments)}


class StageOwner(NamedTuple):
    """The cell that a stage belongs to, and the text that `--only` searches: its block, row,
    values, and of a fine-tuning its data.
    """

    cell: str
    search_text: str


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A cell of the table of results: the run behind it, or why the recipe excludes it."""

    row: str
    column: str
    seed: int
    run: str | None = None
    stage: str = ""  # label of its evaluation
    trained: str = ""  # label of its training
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """The stages of a recipe, and the cells of its table."""

    name: str
    recipe: Recipe
    nodes: dict[str, Node] = field(default_factory=dict)
    # label of a stage that belongs to one cell -> that cell
    cell_of: dict[str, str] = field(default_factory=dict)
    search_texts: dict[str, str] = field(default_factory=dict)  # label -> text that --only searches
    trainings: dict[str, TrainingStage] = field(default_factory=dict)
    table: list[TableEntry] = field(default_factory=list)

    def pretraining_of(self, label: str) -> TrainingStage:
        """The pre-training behind a training, or itself."""
        training = self.trainings[label]
        return (
            self.trainings[f"pretrain {training.source}"]
            if training.verb == "finetune"
            else training
        )

    def model_name(self, label: str) -> str:
        """The model of a training."""
        return str(self.pretraining_of(label).flags.get("model", {}).get("name", "bitimelygpt"))


def name_value(value: object) -> str:
    """A value of a matrix as a part of names: `sleep-edf/staging` -> `sleep-edf-staging`."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value)).strip("-")


def list_matrix_points(recipe: Recipe) -> Iterator[Flags]:
    """The product of `[matrix]`: one dict of flags a cell; a recipe without a matrix is one
    cell.
    """
    names = list(recipe.matrix)
    for values in itertools.product(*(recipe.matrix[n] for n in names)):
        yield dict(zip(names, values, strict=True))


def _list_cells(recipe: Recipe) -> Iterator[ExperimentCell]:
    arms = [
        (arm.name, arm.model_dump(exclude_none=True, exclude={"name", "set"}), arm.set)
        for arm in recipe.arm
    ] or [("", {}, {})]
    for (arm, own, more), values in itertools.product(arms, list_matrix_points(recipe)):
        flags = {**own, **values}
        model = registry.models[flags.get("model") or recipe.pretrain.model or "bitimelygpt"]
        # no pre-training of a model that could have one
        if flags.get("objective") == "none" != model.facts.objective:
            flags = {**flags, "objective": None, "from_scratch": True}
        yield ExperimentCell(
            arm=arm,
            values=values,
            flags={key: value for key, value in flags.items() if value is not None},
            set=more,
        )


def plan_experiment(
    recipe: Recipe,
    name: str,
    workspace: Path,
    *,
    assignments: list[str],
    devices: int = 1,
    leak_free: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> ExperimentPlan:
    """All stages of `recipe` under `name`, in an order in which they can be run."""
    stages = [recipe.pretrain, *(block.pretrain for block in recipe.block), *recipe.arm]
    for preset in {stage.preset for stage in stages} | set(recipe.matrix.get("preset", ())):
        if preset is not None:
            load_preset(preset)  # raises for a wrong name, also where nothing is run
    plan = ExperimentPlan(name=name, recipe=recipe)
    builder = PlanBuilder(plan, recipe, workspace, assignments, devices, progress, say)
    for dataset in recipe.ingest.datasets:
        builder.add_ingest(dataset)
    for view in recipe.statistics:
        builder.add_tokens(view, recipe.tokenize, recipe.build, "")
    blocks = recipe.block or (RecipeBlock(),)
    if recipe.pretrain.preset or recipe.block:
        views = [view for block in blocks for view in _views(recipe, block)]
        for block, cell in itertools.product(blocks, _list_cells(recipe)):
            for fold in recipe.folds or (None,):
                builder.add_cell(block, cell, views, fold)
    elif recipe.matrix or recipe.arm or recipe.finetune.data:
        raise usage_error(
            "found no preset",
            "expected pretrain.preset for the trainings",
            "Give one, such as tiny",
            field="pretrain.preset",
        )
    _check_columns(plan)
    builder.add_pages(leak_free)
    if not plan.nodes:
        raise usage_error(
            "found nothing to do",
            "expected ingest.datasets, statistics or pretrain.preset",
            "Give one of them",
        )
    return plan


def _check_columns(plan: ExperimentPlan) -> None:
    """What is stated by column: the page's columns, the margins, and the numbers of the paper.
    Raises UserError (config, exit 2).
    """
    read_paper(plan.recipe.paper)
    margin, stated = plan.recipe.evaluate.margin, plan.recipe.evaluate.columns
    data = {entry.column for entry in plan.table}
    for column in stated:
        of, _, part = column.partition(":")
        if of not in data or not part:
            known = f"expected DATA:METRIC or DATA:CLASS, DATA one of {', '.join(sorted(data))}"
            raise usage_error(f"found {column!r}", known, "Correct it", field="evaluate.columns")
        dataset, named = parse_view(of)
        view = registry.datasets[dataset].facts.views[named]
        parts = (*METRICS.get(view.task, ()), *view.classes)
        # without classes of its own a view takes those of its labels
        if part not in parts and (view.classes or part in NAMES):
            known = f"expected one of {', '.join(f'{of}:{one}' for one in parts)}"
            raise usage_error(f"found {column!r}", known, "Correct it", field="evaluate.columns")
    finer = {column.partition(":")[0] for column in stated}
    columns = {"", *(data - finer), *stated}
    if isinstance(margin, dict) and (odd := sorted(margin.keys() - columns)):
        known = f"expected some of {', '.join(sorted(columns - {''}))}, or '' for the others"
        raise usage_error(f"found {odd[0]!r}", known, "Correct it", field="evaluate.margin")


def _views(recipe: Recipe, block: RecipeBlock) -> tuple[str, ...]:
    data = block.finetune.data or recipe.finetune.data or ()
    return (data,) if isinstance(data, str) else data


@dataclass(frozen=True)
class PlanBuilder:
    """Builds the graph of a recipe, stage by stage."""

    plan: ExperimentPlan
    recipe: Recipe
    workspace: Path
    assignments: list[str]
    devices: int
    progress: Progress | None
    say: Say | None

    def add(self, node: Node, owner: StageOwner | None = None) -> str:
        """Add a stage once, however many cells need it. Raises UserError (config, exit 2) where two
        would have one name.
        """
        known = self.plan.nodes.setdefault(node.label, node)
        if known.key != node.key:
            raise usage_error(
                f"two stages {node.label!r} with different settings",
                "expected different names of blocks and arms",
                "Give them different names",
            )
        if known is node and owner:
            self.plan.cell_of[node.label] = owner.cell
            self.plan.search_texts[node.label] = owner.search_text
        return node.label

    def add_ingest(self, dataset: str) -> None:
        """The stage that ingests a data set."""
        recipe, out = (
            self.recipe.ingest,
            locate_new(self.workspace, "cache", registry.datasets[dataset].name),
        )
        source = recipe.sources.get(dataset)
        options, encoding = recipe.options.get(dataset, {}), recipe.encoding.get(dataset)
        if source is not None and hide_credentials(source) != source:
            problem, hint = "found credentials or a query in a URL", "Give them in the environment"
            raise usage_error(
                problem, "recipes are stored and shared", hint, field=f"ingest.sources.{dataset}"
            )

        def call(_: States) -> StageResult:
            if source is None and registry.datasets[dataset].facts.needs_source:
                if (out / "manifest.json").is_file():
                    return StageResult("existing cache")
                raise input_error(
                    Reason.INCOMPLETE,
                    "no cache of this data set",
                    "expected its raw files",
                    f"Give --set ingest.sources.{dataset}=FOLDER, or run: bitimely ingest {dataset} FOLDER",
                    file=str(out),
                )
            report = workflows.ingest(
                dataset,
                source,
                out,
                options=options,
                encoding=encoding,
                jobs=recipe.jobs,
                progress=self.progress,
            )
            return StageResult(exit_code=int(report["exit_code"]))

        stated = {
            "source": source,
            "options": options,
            **({"encoding": encoding} if encoding else {}),
        }
        self.add(
            Node(
                label=f"ingest {dataset}", settings=stated, call=call, output=out / "manifest.json"
            )
        )

    def add_tokens(self, view: str, own: DataConfig, build: Flags, block: str) -> tuple[str, str]:
        """The tokens of a view with the settings of the recipe: their name, and the label of the
        stage.
        """
        dataset, _ = parse_view(view)
        kind = find_data_kind(view)
        if kind.no_folds and own.test_fold is not None:
            raise usage_error(
                f"folds of {view}", "expected recordings", kind.no_folds, field="folds"
            )
        choices = {
            "tokenize": (_set_fields(self.recipe.tokenize), _set_fields(own)),
            "build": (self.recipe.build, build),
        }
        common, local = choices[kind.section]
        chosen = {**common, **local}
        name = "-".join(
            [
                *([self.plan.name] if chosen else []),
                *([block] if local and block else []),
                name_tokens(view),
            ]
        )
        cached = locate(self.workspace, "cache", dataset) / "manifest.json"
        ingest = f"ingest {dataset}"
        if not registry.datasets[dataset].facts.needs_source:
            self.add_ingest(dataset)

        def call(_: States) -> StageResult:
            result = workflows.tokenize(
                view, workspace=self.workspace, name=name, options=chosen, progress=self.progress
            )
            return StageResult(f"{format_count(result['windows'])} windows")

        node = Node(
            label=f"tokenize {name}",
            settings={"data": view, **chosen},
            call=call,
            output=locate_new(self.workspace, "tokens", name) / "manifest.json",
            needs=(ingest,) if ingest in self.plan.nodes else (),
            inputs=() if ingest in self.plan.nodes else (cached,),
        )
        return name, self.add(node)

    def add_cell(
        self,
        block: RecipeBlock,
        cell: ExperimentCell,
        views: list[str],
        fold: int | None,
        *,
        is_search: bool = False,
    ) -> dict[str, str]:
        """All stages of one cell in one block, for one test fold where there are several; of a
        search those that choose learning rates alone.

        Returns the run behind each data that its trainings read: "" of the pre-training, a view of
        a fine-tuning.
        """
        recipe = self.recipe
        # of several the block's name
        columns = {
            view: view if views.count(view) == 1 else block.name for view in _views(recipe, block)
        }
        if why := self._find_exclusion(block, cell):
            self.plan.table.extend(
                TableEntry(row=cell.row, column=column, seed=cell.seed, why=why)
                for column in columns.values()
            )
            return {}
        compared = None if is_search else self._find_compared(block, cell)
        rate_runs: dict[str, str] = {}
        if recipe.tuning and not is_search:
            rate_runs = self.add_cell(
                block,
                cell.tune(recipe.tuning, recipe.matrix),
                views,
                recipe.tuning.fold,
                is_search=True,
            )
        # to all trainings of the cell
        common: Flags = {"train": {"devices": self.devices}} if self.devices > 1 else {}
        if recipe.tuning and is_search:
            common["tune"] = {"rates": recipe.tuning.rates}
        if fold is not None:
            tokenize = DataConfig.model_validate({**_set_fields(block.tokenize), "test_fold": fold})
            block = block.model_copy(
                update={
                    "name": "-".join(filter(None, [block.name, f"fold-{fold}"])),
                    "tokenize": tokenize,
                }
            )
        owner = StageOwner(
            f"{block.name}/{cell.name()}",
            " ".join([block.name, *map(str, cell.flags.values()), cell.row]),
        )
        pretraining = self._plan_pretraining(block, cell, common, rate_runs.get(""))
        source, runs = self._add_training(pretraining, owner), {"": pretraining.run}
        for view, column in columns.items():
            short = view.partition("/")[2] or view
            of_view = owner._replace(
                search_text=" ".join(dict.fromkeys([owner.search_text, column, view]))
            )
            finetuning = self._plan_finetuning(
                block, cell, view, self._name_run(block, cell.name(), short), source, common
            )
            runs[view] = run = finetuning.run
            trained = self._add_training(
                replace(finetuning, rate_from=rate_runs.get(view)), of_view
            )
            if not is_search:
                scored = self._add_evaluation(
                    run,
                    trained,
                    self._name_run(block, compared.name(), short) if compared else None,
                    of_view,
                )
                self.plan.table.append(
                    TableEntry(
                        row=cell.row,
                        column=column,
                        seed=cell.seed,
                        run=run,
                        stage=scored,
                        trained=trained,
                    )
                )
                self._add_analyses("finetune", run, trained, of_view)
        if not is_search:
            self._add_analyses("pretrain", pretraining.run, source, owner)
        return runs

    def _plan_pretraining(
        self, block: RecipeBlock, cell: ExperimentCell, common: Flags, rate_from: str | None
    ) -> TrainingStage:
        recipe, stage = self.recipe, validate(RecipeStage, cell.flags)
        base = validate(
            RecipeStage, {**_set_fields(recipe.pretrain), **_set_fields(block.pretrain)}
        )
        names = base.data or load_preset(stage.preset or base.preset or "tiny").get(
            "data", ["synthetic"]
        )
        tokens = [
            self.add_tokens(view, block.tokenize, block.build, block.name)
            for view in ((names,) if isinstance(names, str) else names)
        ]
        own = registry.models[stage.model or base.model or "bitimelygpt"].facts.objective
        objective = (
            recipe.objectives.get(own)
            if stage.objective is None and base.objective is None
            else None
        )
        flags = merge_layers(
            recipe.overrides("pretrain", tokenize=False),
            block.pretrain.flags(),
            {"objective": {"name": objective}} if objective else {},
            {
                section: values
                for section, values in stage.model_copy(update={"fraction": None}).flags().items()
                if section != "finetune"
            },
            cell.set,
            {"data": {"names": tuple(name for name, _ in tokens)}},
            {"train": {"steps": 0}} if stage.from_scratch else common,
        )
        assignments = tuple(self.assignments)
        # a run with the initial weights, which depend on the settings of model and data alone
        if stage.from_scratch:
            assignments = tuple(
                pair for pair in self.assignments if pair.startswith(("model.", "data."))
            )
        return TrainingStage(
            verb="pretrain",
            run=self._name_run(block, cell.name(pretraining=True)),
            preset=stage.preset or base.preset,
            budget=stage.budget or base.budget,
            flags=flags,
            assignments=assignments,
            needs=tuple(label for _, label in tokens),
            rate_from=None if stage.from_scratch else rate_from,
        )

    def _plan_finetuning(
        self,
        block: RecipeBlock,
        cell: ExperimentCell,
        view: str,
        run: str,
        source: str,
        common: Flags,
    ) -> TrainingStage:
        """The fine-tuning of one view; `source`: label of its pre-training."""
        name, tokenized = self.add_tokens(view, block.tokenize, block.build, block.name)
        stage = validate(RecipeStage, cell.flags)
        own = stage.flags()
        flags = merge_layers(
            self.recipe.overrides("finetune", tokenize=False),
            block.finetune.flags(),
            {section: own[section] for section in ("train", "finetune", "tune") if section in own},
            {"data": {"fraction": stage.fraction}} if stage.fraction else {},
            {
                section: values
                for section, values in cell.set.items()
                if section in {"train", "finetune", "tune"}
            },
            {"data": {"names": (name,)}},
            common,
        )
        return TrainingStage(
            verb="finetune",
            run=run,
            source=self.plan.trainings[source].run,
            data=name,
            flags=flags,
            assignments=tuple(self.assignments),
            needs=(source, tokenized),
        )

    def _name_run(self, block: RecipeBlock, *parts: str) -> str:
        return "-".join(filter(None, [self.plan.name, block.name, *parts]))

    def _find_exclusion(self, block: RecipeBlock, cell: ExperimentCell) -> str:
        """Why the recipe leaves a cell out, or ""."""
        point = {"arm": cell.arm, "block": block.name, **cell.values}
        return next(
            (
                out.why
                for out in self.recipe.leave_out
                if all(point.get(key) in known for key, known in out.where.items())
            ),
            "",
        )

    def _find_compared(self, block: RecipeBlock, cell: ExperimentCell) -> ExperimentCell | None:
        """The cell whose run `evaluate.compare` puts beside that of `cell`; None: there is nothing
        to compare, or it is `cell` itself.
        """
        wanted, matrix = self.recipe.evaluate.compare, self.recipe.matrix
        if wanted is None:
            return None
        if not any(str(value) == wanted for values in matrix.values() for value in values):
            known = ", ".join(str(value) for values in matrix.values() for value in values)
            raise usage_error(
                f"{wanted!r} is no value of the matrix",
                f"expected one of {known}",
                "Correct it",
                field="evaluate.compare",
            )
        values = {
            key: next((value for value in matrix[key] if str(value) == wanted), own)
            for key, own in cell.values.items()
        }
        if values == cell.values:
            return None
        other = replace(cell, values=values)
        if why := self._find_exclusion(block, other):
            raise usage_error(
                f"{cell.row} is to be compared with {other.row}, which is left out ({why})",
                "expected a cell that is run",
                "Leave it out too, or compare with another value",
                field="evaluate.compare",
            )
        return other

    def _add_training(self, training: TrainingStage, owner: StageOwner) -> str:
        label = f"{training.verb} {training.run}"
        settings = {
            "verb": training.verb,
            **{key: value for key, value in training.arguments().items() if key != "run"},
        }
        needs = training.needs
        if training.rate_from is not None:
            settings["rate_from"] = training.rate_from
            needs = (*needs, f"{training.verb} {training.rate_from}")
        self.plan.trainings.setdefault(label, training)
        call = partial(_train, training, self.workspace, self.devices, self.progress, self.say)
        output = locate_new(self.workspace, "runs", training.run) / "run.json"
        return self.add(
            Node(label=label, settings=settings, call=call, output=output, needs=needs), owner
        )

    def _add_evaluation(self, run: str, trained: str, second: str | None, owner: StageOwner) -> str:
        wanted = self.recipe.evaluate
        chosen: Flags = {
            "split": wanted.split,
            "bootstrap": wanted.bootstrap,
            "by": wanted.by,
            "compare": second,
        }
        chosen |= {"baselines": wanted.baselines} if wanted.baselines != "all" else {}
        needs = (trained, *([f"evaluate {second}"] if second else []))

        def call(_: States) -> StageResult:
            workflows.evaluate(run, **chosen, workspace=self.workspace, progress=self.progress)
            return StageResult()

        output = locate_new(self.workspace, "runs", run) / "scores.json"
        return self.add(
            Node(label=f"evaluate {run}", settings=chosen, call=call, output=output, needs=needs),
            owner,
        )

    def _add_analyses(self, of: str, run: str, trained: str, owner: StageOwner) -> None:
        for analysis in self.recipe.analyze:
            if (
                analysis.of == of
                and not analysis.together
                and _input_of(analysis).startswith("run")
            ):
                self._add_analysis(analysis, [run], f"{analysis.kind}-{run}", (trained,), owner)

    def _add_analysis(
        self,
        analysis: AnalyzeStage,
        names: list[str],
        report: str,
        needs: tuple[str, ...],
        owner: StageOwner | None = None,
    ) -> None:
        options = {key: str(value) for key, value in analysis.options.items()}
        for key, value in options.items():
            if value.startswith(OWN_REPORT):  # of another analysis of the recipe
                other = f"{value.removeprefix(OWN_REPORT)}-{self.plan.name}"
                options[key] = str(locate_new(self.workspace, "reports", other))
                needs = (*needs, f"analyze {other}")

        def call(_: States) -> StageResult:
            of_model = ("model", "objective", "preset") if _input_of(analysis) == "model" else ()
            extra: Flags = {key: options.pop(key) for key in of_model if key in options}
            result = workflows.analyze(
                analysis.kind,
                names,
                data=analysis.data,
                sequences=analysis.sequences,
                options=options,
                name=report,
                workspace=self.workspace,
                progress=self.progress,
                **extra,
            )
            return StageResult(exit_code=int(result["exit_code"]))

        chosen = {**analysis.model_dump(), "runs": names}
        output = locate_new(self.workspace, "reports", report) / "summary.json"
        self.add(
            Node(label=f"analyze {report}", settings=chosen, call=call, output=output, needs=needs),
            owner,
        )

    def add_pages(self, leak_free: bool) -> None:
        """The stages that depend on the complete recipe: analyses of all rows together or of none,
        statistics, the page of results.
        """
        plan, recipe = self.plan, self.recipe
        for number, analysis in enumerate(recipe.analyze):
            takes = _input_of(analysis)
            if takes.startswith("run") and analysis.together:
                trained = [
                    entry for entry in plan.trainings if plan.trainings[entry].verb == analysis.of
                ]
                both = any(
                    (one.kind, one.together, one.of) == (analysis.kind, True, "pretrain")
                    for one in recipe.analyze
                )
                suffix = f"-{analysis.of}" if both and analysis.of != "pretrain" else ""
                self._add_analysis(
                    analysis,
                    [plan.trainings[t].run for t in trained],
                    f"{analysis.kind}-{plan.name}{suffix}",
                    tuple(trained),
                )
            elif analysis.of == "both":
                self._add_families(analysis)
            elif not takes.startswith("run"):
                self._add_analysis(
                    analysis,
                    [],
                    f"{analysis.kind}-{plan.name}" + (f"-{number}" if number else ""),
                    (),
                )
        out = locate_new(self.workspace, "reports", plan.name)
        if recipe.statistics:
            stages = tuple(label for label in plan.nodes if label.startswith("tokenize "))
            stated: Flags = {"views": recipe.statistics}
            call = partial(_write_statistics, recipe, plan.name, self.workspace)
            self.add(
                Node(
                    label="statistics",
                    settings=stated,
                    call=call,
                    output=out / "summary.json",
                    after=stages,
                )
            )
        if plan.table:
            stages = tuple(entry.stage for entry in plan.table if entry.stage)
            call = partial(_write_results, plan, self.workspace, leak_free, self.progress)
            stated = {
                "table": [[entry.row, entry.column, entry.seed, entry.run] for entry in plan.table],
                "paper": recipe.paper,
            }
            stated |= {} if recipe.evaluate.margin is None else {"margin": recipe.evaluate.margin}
            stated |= {"columns": recipe.evaluate.columns} if recipe.evaluate.columns else {}
            self.add(
                Node(
                    label="results",
                    settings=stated,
                    call=call,
                    output=out / "summary.json",
                    after=stages,
                )
            )

    def _add_families(self, analysis: AnalyzeStage) -> None:
        """The analysis of every pre-training together with what was fine-tuned from it, a page for
        each view.
        """
        finetunings: dict[tuple[str, str], list[str]] = {}
        for label, training in self.plan.trainings.items():
            if training.source is not None and training.data is not None:
                finetunings.setdefault((training.source, training.data), []).append(label)
        for (base, data), labels in finetunings.items():
            names = [base, *(self.plan.trainings[label].run for label in labels)]
            self._add_analysis(
                analysis.model_copy(update={"data": data}),
                names,
                f"{analysis.kind}-{base}-{data}",
                (f"pretrain {base}", *labels),
            )


def _input_of(analysis: AnalyzeStage) -> str:
    return registry.analyses[analysis.kind].facts.takes


def _set_fields(section: Section) -> Flags:
    return section.model_dump(exclude_unset=True, exclude_none=True)


def _train(
    training: TrainingStage,
    workspace: Path,
    devices: int,
    progress: Progress | None,
    say: Say | None,
    _: States,
) -> StageResult:
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
    result = run_training(
        training.verb, training.arguments(), workspace=workspace, progress=progress, say=say
    )
    return StageResult(is_new=result.get("trained") is not False)


def run_training(
    verb: str,
    arguments: Flags,
    *,
    workspace: Path,
    progress: Progress | None = None,
    say: Say | None = None,
) -> TrainingResult:
    """`workflows.pretrain` or `workflows.finetune` with the arguments of a stage."""
    run = workflows.finetune if verb == "finetune" else workflows.pretrain
    return run(**arguments, workspace=workspace, progress=progress, say=say)


def _write_results(
    plan: ExperimentPlan,
    workspace: Path,
    leak_free: bool,
    progress: Progress | None,
    states: States,
) -> StageResult:
    """The page of results: every cell of the table, with its state."""
    # several runs are test folds of one cell
    entries: dict[tuple[str, str, int], list[TableEntry]] = {}
    for entry in plan.table:
        entries.setdefault((entry.row, entry.column, entry.seed), []).append(entry)
    cells = []
    for place, parts in entries.items():
        if parts[0].why:
            cells.append(PlannedCell(*place, state="left out", detail=parts[0].why))
        elif missing := [part for part in parts if states[part.stage].state not in SUCCEEDED]:
            stage = missing[0].stage
            failed = (
                states[label]
                for label in _list_needs(plan, stage)
                if states[label].state in {"failed", "not run"}
            )
            cause = next(failed, states[stage])
            of = f"{len(missing)} of {len(parts)} folds, the first: " if len(parts) > 1 else ""
            cells.append(PlannedCell(*place, state=cause.state, detail=of + cause.detail))
        else:
            cells.append(
                PlannedCell(
                    *place, state="done", runs=tuple(part.run for part in parts if part.run)
                )
            )
    recipe, margin = plan.recipe, plan.recipe.evaluate.margin
    variant = (
        "The leak-free variant"
        if leak_free
        else "As the paper has it; --leak-free for the other variant"
        if recipe.literal
        else ""
    )
    write_results(
        ResultPlan(
            name=plan.name,
            cells=cells,
            title=recipe.title + (" (leak-free variant)" if leak_free else ""),
            description=". ".join(filter(None, [recipe.description, variant])),
            paper=recipe.paper,
            columns=recipe.evaluate.columns,
            margins=margin if isinstance(margin, dict) else {} if margin is None else {"": margin},
        ),
        workspace=workspace,
        out=workspace / "reports" / plan.name,
        open_windows=make_windows_opener(workspace),
        progress=progress,
    )
    return StageResult()


def _list_needs(plan: ExperimentPlan, label: str) -> Iterator[str]:
    """All stages that `label` depends on, the first first, and itself."""
    for need in plan.nodes[label].needs:
        yield from _list_needs(plan, need)
    yield label


def _write_statistics(recipe: Recipe, name: str, workspace: Path, states: States) -> StageResult:
    workflows.statistics(
        recipe.statistics,
        title=recipe.title,
        description=recipe.description,
        workspace=workspace,
        out=workspace / "reports" / name,
    )
    return StageResult()
