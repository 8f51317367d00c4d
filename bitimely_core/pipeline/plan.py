"""A recipe as a graph of stages: the verbs, their settings, and the order in which they can run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bitimely_core import registry, workflows
from bitimely_core.config import DataConfig, Section, load_preset, merge_layers, validate
from bitimely_core.errors import Reason, hide_credentials, input_error, usage_error
from bitimely_core.evaluate import METRICS, NAMES
from bitimely_core.pipeline import stage_actions
from bitimely_core.pipeline.cells import (
    DEFAULT_MODEL,
    FINETUNE_FLAGS,
    CellTrainings,
    ExperimentCell,
    ExperimentPlan,
    StageOwner,
    TableEntry,
    TrainingStage,
    join_names,
    list_cells,
)
from bitimely_core.pipeline.graph import Node, StageResult, States
from bitimely_core.privacy import format_count
from bitimely_core.recipe import AnalyzeStage, Recipe, RecipeBlock, RecipeStage, TuningStage
from bitimely_core.report.recipe_results import read_paper
from bitimely_core.store.workspace import (
    find_data_kind,
    locate,
    locate_new,
    name_tokens,
    parse_view,
)
from bitimely_core.tokens.open_views import advise_labels
from bitimely_core.types import leave_out
from bitimely_core.workflows.jobs import Flags

# sections of the settings of a cell that its fine-tunings read
FINETUNE_SECTIONS = ("train", "finetune", "tune")
# options of an analysis that its verb takes as arguments
MODEL_OPTIONS = {"model", "objective", "preset"}
# option of an analysis: the report of an analysis of the recipe, by its kind
OWN_REPORT = "report:"


def plan_experiment(
    recipe: Recipe,
    name: str,
    workspace: Path,
    *,
    assignments: list[str],
    devices: int = 1,
    leak_free: bool = False,
) -> ExperimentPlan:
    """All stages of `recipe` under `name`, in an order in which they can be run."""
    _check_presets(recipe)
    plan = ExperimentPlan(name=name, recipe=recipe)
    builder = PlanBuilder(plan, recipe, workspace, assignments, devices)
    for dataset in recipe.ingest.datasets:
        builder.add_ingest(dataset)
    for view in recipe.statistics:
        builder.add_tokens(view, recipe.tokenize, recipe.build, "")
    if recipe.pretrain.preset or recipe.block:
        builder.add_cells()
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


def _check_presets(recipe: Recipe) -> None:
    """Raises UserError for a wrong name of a preset, also of one that is not run."""
    stages = [recipe.pretrain, *(block.pretrain for block in recipe.block), *recipe.arm]
    presets = {stage.preset for stage in stages} | set(recipe.matrix.get("preset", ()))
    for preset in presets:
        if preset is not None:
            load_preset(preset)


def _check_columns(plan: ExperimentPlan) -> None:
    """What is stated by column: the page's columns, the margins, and the numbers of the paper.
    Raises UserError (config, exit 2).
    """
    read_paper(plan.recipe.paper)
    stated, margin = plan.recipe.evaluate.columns, plan.recipe.evaluate.margin
    data = {entry.column for entry in plan.table}
    for column in stated:
        _check_column(column, data)
    replaced = {column.partition(":")[0] for column in stated}
    columns = {*(data - replaced), *stated}
    if isinstance(margin, dict) and (odd := sorted(margin.keys() - columns - {""})):
        expected = f"expected some of {', '.join(sorted(columns))}, or '' for the others"
        raise usage_error(f"found {odd[0]!r}", expected, "Correct it", field="evaluate.margin")


def _check_column(column: str, data: set[str]) -> None:
    """Raises UserError (config, exit 2) for a column of the page that is no metric and no class of
    the `data` of the recipe.
    """
    name, _, part = column.partition(":")
    if name in data and part:
        dataset, view_name = parse_view(name)
        view = registry.datasets[dataset].facts.views[view_name]
        parts = (*METRICS.get(view.task, ()), *view.classes)
        # without classes of its own a view takes those of its labels
        if part in parts or not (view.classes or part in NAMES):
            return
        expected = f"expected one of {', '.join(f'{name}:{part}' for part in parts)}"
    else:
        expected = f"expected DATA:METRIC or DATA:CLASS, DATA one of {', '.join(sorted(data))}"
    raise usage_error(f"found {column!r}", expected, "Correct it", field="evaluate.columns")


def _check_labels(view: str, workspace: Path) -> None:
    """Raises UserError (config, exit 2) for a view that never has labels: not behind hours of
    pre-training.
    """
    dataset, name = parse_view(view)
    kind, task = find_data_kind(view), registry.datasets[dataset].facts.views[name].task
    if kind.section == "tokenize" and task == "none":
        raise usage_error(
            f"{view} has no labels",
            "expected a labelled view",
            advise_labels(dataset, locate(workspace, "cache", dataset)),
            field="finetune.data",
        )


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

    def add(self, node: Node, owner: StageOwner | None = None) -> str:
        """Add a stage once, however many cells need it. Raises UserError (config, exit 2) where two
        would have one name.
        """
        present = self.plan.nodes.setdefault(node.label, node)
        if present.key != node.key:
            raise usage_error(
                f"two stages {node.label!r} with different settings",
                "expected different names of blocks and arms",
                "Give them different names",
            )
        if present is node and owner:
            self.plan.owners[node.label] = owner
        return node.label

    def add_ingest(self, dataset: str) -> None:
        """The stage that ingests a data set."""
        recipe, entry = self.recipe.ingest, registry.datasets[dataset]
        out = locate_new(self.workspace, "cache", entry.name)
        source = recipe.sources.get(dataset)
        options, encoding = recipe.options.get(dataset, {}), recipe.encoding.get(dataset)
        if source is not None and hide_credentials(source) != source:
            raise usage_error(
                "found credentials or a query in a URL",
                "recipes are stored and shared",
                "Give them in the environment",
                field=f"ingest.sources.{dataset}",
            )

        def call(_: States) -> StageResult:
            if source is None and entry.facts.needs_source:
                if (out / "manifest.json").is_file():
                    return StageResult("existing cache")
                raise input_error(
                    Reason.INCOMPLETE,
                    "no cache of this data set",
                    "expected its raw files",
                    f"Give --set ingest.sources.{dataset}=FOLDER, "
                    f"or run: bitimely ingest {dataset} FOLDER",
                    file=str(out),
                )
            report = workflows.ingest(
                dataset, source, out, options=options, encoding=encoding, jobs=recipe.jobs
            )
            return StageResult(exit_code=int(report["exit_code"]))

        settings = {"source": source, "options": options}
        settings |= {"encoding": encoding} if encoding else {}
        output = out / "manifest.json"
        self.add(Node(label=f"ingest {dataset}", settings=settings, call=call, output=output))

    def add_tokens(
        self, view: str, tokenize: DataConfig, build: Flags, block: str
    ) -> tuple[str, str]:
        """The tokens of a view with the settings of the recipe: their name, and the label of the
        stage.

        `tokenize` and `build` are the settings of the block, for signals and for claims.
        """
        dataset, _ = parse_view(view)
        kind = find_data_kind(view)
        if kind.no_folds and tokenize.test_fold is not None:
            raise usage_error(
                f"folds of {view}", "expected recordings", kind.no_folds, field="folds"
            )
        common, local = (
            (self.recipe.build, build)
            if kind.section == "build"
            else (_set_fields(self.recipe.tokenize), _set_fields(tokenize))
        )
        chosen = {**common, **local}
        name = join_names(
            self.plan.name if chosen else "", block if local else "", name_tokens(view)
        )
        cached = locate(self.workspace, "cache", dataset) / "manifest.json"
        ingest = f"ingest {dataset}"
        if not registry.datasets[dataset].facts.needs_source:
            self.add_ingest(dataset)

        def call(_: States) -> StageResult:
            result = workflows.tokenize(view, workspace=self.workspace, name=name, options=chosen)
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

    def add_cells(self) -> None:
        """The stages of every cell in every block, for every test fold."""
        recipe = self.recipe
        blocks = recipe.block or (RecipeBlock(),)
        views = list(itertools.chain.from_iterable(_views(recipe, block) for block in blocks))
        for block, cell in itertools.product(blocks, list_cells(recipe)):
            for fold in recipe.folds or (None,):
                self.add_cell(block, cell, views, fold)

    def add_cell(
        self,
        block: RecipeBlock,
        cell: ExperimentCell,
        views: list[str],
        fold: int | None,
        *,
        is_search: bool = False,
    ) -> dict[str, str]:
        """All stages of one cell in one block, for one test fold where there are several.

        Args:
            block: where the cell is.
            cell: arm, point of the matrix and flags.
            views: those of all blocks; one that several blocks have is a column by block.
            fold: the test fold, None without folds.
            is_search: only trainings, which choose learning rates.

        Returns:
            The run behind each data that its trainings read: "" of the pre-training, a view of a
            fine-tuning.
        """
        columns = {
            view: view if views.count(view) == 1 else block.name
            for view in _views(self.recipe, block)
        }
        if why := self._find_exclusion(block, cell):
            self.plan.table.extend(
                TableEntry(row=cell.row, column=column, seed=cell.seed, why=why)
                for column in columns.values()
            )
            return {}
        compared = None if is_search else self._find_compared(block, cell)
        rate_runs = {} if is_search else self._search_rates(block, cell, views)
        common = self._list_common_flags(self.recipe.tuning if is_search else None)
        block = _set_fold(block, fold)
        trainings = CellTrainings(block=block, cell=cell, common=common, rate_runs=rate_runs)
        text = " ".join([block.name, *map(str, cell.flags.values()), cell.row])
        owner = StageOwner(f"{block.name}/{cell.name()}", text)
        pretraining = self._plan_pretraining(trainings)
        source, runs = self._add_training(pretraining, owner), {"": pretraining.run}
        for view, column in columns.items():
            text = " ".join(dict.fromkeys([owner.search_text, column, view]))
            finetuning = self._plan_finetuning(trainings, view, source)
            runs[view] = finetuning.run
            label = self._add_training(finetuning, owner._replace(search_text=text))
            if not is_search:
                second = (
                    self._name_run(block, compared.name(), _shorten(view)) if compared else None
                )
                self._add_scores(cell, column, label, second)
        if not is_search:
            self._add_analyses("pretrain", source)
        return runs

    def _search_rates(
        self, block: RecipeBlock, cell: ExperimentCell, views: list[str]
    ) -> dict[str, str]:
        """View, "" of the pre-training -> the run that chooses the learning rate of the training.

        Their stages are added, if the recipe tunes.
        """
        tuning = self.recipe.tuning
        if not tuning:
            return {}
        search = cell.tune(tuning, self.recipe.matrix)
        return self.add_cell(block, search, views, tuning.fold, is_search=True)

    def _list_common_flags(self, tuning: TuningStage | None) -> Flags:
        """Flags of all trainings of a cell; `tuning`: of one that chooses learning rates."""
        devices: Flags = {"train": {"devices": self.devices}} if self.devices > 1 else {}
        return devices if tuning is None else {**devices, "tune": {"rates": tuning.rates}}

    def _add_scores(
        self, cell: ExperimentCell, column: str, trained: str, second: str | None
    ) -> None:
        """The evaluation of a fine-tuning, its cell of the table, and its analyses.

        `trained` is the label of the fine-tuning, `second` the run that it is compared with.
        """
        run = self.plan.trainings[trained].run
        stage = self._add_evaluation(run, trained, second)
        entry = TableEntry(row=cell.row, column=column, seed=cell.seed, run=run, stage=stage)
        self.plan.table.append(entry)
        self._add_analyses("finetune", trained)

    def _plan_pretraining(self, trainings: CellTrainings) -> TrainingStage:
        """The pre-training of a cell. One from scratch has no steps: it writes initial weights."""
        recipe, block, cell = self.recipe, trainings.block, trainings.cell
        stage = validate(RecipeStage, cell.flags)
        base = validate(
            RecipeStage, {**_set_fields(recipe.pretrain), **_set_fields(block.pretrain)}
        )
        chosen = base.model_copy(update=_set_fields(stage))
        views = base.data or load_preset(chosen.preset or "tiny").get("data", ["synthetic"])
        tokens = [
            self.add_tokens(view, block.tokenize, block.build, block.name)
            for view in ((views,) if isinstance(views, str) else views)
        ]
        shared = leave_out(cell.flags, FINETUNE_FLAGS)
        flags = merge_layers(
            recipe.overrides("pretrain", tokenize=False),
            block.pretrain.flags(),
            self._replace_objective(chosen),
            validate(RecipeStage, shared).flags(),
            cell.set,
            {"data": {"names": tuple(name for name, _ in tokens)}},
            {"train": {"steps": 0}} if stage.from_scratch else trainings.common,
        )
        # initial weights depend on the settings of model and data alone
        read = ("model.", "data.") if stage.from_scratch else ""
        return TrainingStage(
            verb="pretrain",
            run=self._name_run(block, cell.name(pretraining=True)),
            preset=chosen.preset,
            budget=chosen.budget,
            flags=flags,
            assignments=tuple(pair for pair in self.assignments if pair.startswith(read)),
            needs=tuple(label for _, label in tokens),
            rate_from=None if stage.from_scratch else trainings.rate_runs.get(""),
        )

    def _replace_objective(self, stage: RecipeStage) -> Flags:
        """What the recipe states in the place of a model's own objective, as flags."""
        if stage.objective is not None:
            return {}
        model = registry.models[stage.model or DEFAULT_MODEL]
        objective = self.recipe.objectives.get(model.facts.objective)
        return {"objective": {"name": objective}} if objective else {}

    def _plan_finetuning(self, trainings: CellTrainings, view: str, source: str) -> TrainingStage:
        """The fine-tuning of one view; `source`: label of its pre-training."""
        block, cell = trainings.block, trainings.cell
        _check_labels(view, self.workspace)
        name, tokens = self.add_tokens(view, block.tokenize, block.build, block.name)
        stage = validate(RecipeStage, cell.flags)
        flags = merge_layers(
            self.recipe.overrides("finetune", tokenize=False),
            block.finetune.flags(),
            _take_finetuning(stage.flags()),
            {"data": {"fraction": stage.fraction}} if stage.fraction else {},
            _take_finetuning(cell.set),
            {"data": {"names": (name,)}},
            trainings.common,
        )
        return TrainingStage(
            verb="finetune",
            run=self._name_run(block, cell.name(), _shorten(view)),
            source=self.plan.trainings[source].run,
            data=name,
            flags=flags,
            assignments=tuple(self.assignments),
            needs=(source, tokens),
            rate_from=trainings.rate_runs.get(view),
        )

    def _name_run(self, block: RecipeBlock, *parts: str) -> str:
        return join_names(self.plan.name, block.name, *parts)

    def _find_exclusion(self, block: RecipeBlock, cell: ExperimentCell) -> str:
        """Why the recipe leaves a cell out, or ""."""
        point = {"arm": cell.arm, "block": block.name, **cell.values}
        for rule in self.recipe.leave_out:
            if all(point.get(key) in values for key, values in rule.where.items()):
                return rule.why
        return ""

    def _find_compared(self, block: RecipeBlock, cell: ExperimentCell) -> ExperimentCell | None:
        """The cell whose run `evaluate.compare` puts beside that of `cell`; None: there is nothing
        to compare, or it is `cell` itself.
        """
        wanted, matrix = self.recipe.evaluate.compare, self.recipe.matrix
        if wanted is None:
            return None
        texts = [str(value) for values in matrix.values() for value in values]
        if wanted not in texts:
            raise usage_error(
                f"{wanted!r} is no value of the matrix",
                f"expected one of {', '.join(texts)}",
                "Correct it",
                field="evaluate.compare",
            )
        values = {
            key: next((choice for choice in matrix[key] if str(choice) == wanted), value)
            for key, value in cell.values.items()
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
        settings = {"verb": training.verb, **training.arguments()}
        del settings["run"]
        needs = training.needs
        if training.rate_from is not None:
            settings["rate_from"] = training.rate_from
            needs = (*needs, f"{training.verb} {training.rate_from}")
        self.plan.trainings.setdefault(label, training)
        call = partial(stage_actions.train, training, self.workspace, self.devices)
        output = locate_new(self.workspace, "runs", training.run) / "run.json"
        return self.add(
            Node(label=label, settings=settings, call=call, output=output, needs=needs), owner
        )

    def _add_evaluation(self, run: str, trained: str, second: str | None) -> str:
        evaluate = self.recipe.evaluate
        chosen: Flags = evaluate.model_dump(include={"split", "bootstrap", "by"})
        chosen["compare"] = second
        chosen |= {"baselines": evaluate.baselines} if evaluate.baselines != "all" else {}
        needs = (trained, *([f"evaluate {second}"] if second else []))

        def call(_: States) -> StageResult:
            workflows.evaluate(run, **chosen, workspace=self.workspace)
            return StageResult()

        output = locate_new(self.workspace, "runs", run) / "scores.json"
        return self.add(
            Node(label=f"evaluate {run}", settings=chosen, call=call, output=output, needs=needs),
            self.plan.owners[trained],
        )

    def _add_analyses(self, verb: str, trained: str) -> None:
        """The analyses of one training, a pre-training or a fine-tuning as `verb` says."""
        run = self.plan.trainings[trained].run
        for analysis in self.recipe.analyze:
            if analysis.of == verb and not analysis.together and _reads_runs(analysis):
                owner = self.plan.owners[trained]
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
        model_options = MODEL_OPTIONS & options.keys() if _find_input(analysis) == "model" else ()
        model: Flags = {key: options.pop(key) for key in model_options}

        def call(_: States) -> StageResult:
            result = workflows.analyze(
                analysis.kind,
                names,
                data=analysis.data,
                sequences=analysis.sequences,
                options=options,
                name=report,
                workspace=self.workspace,
                **model,
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
        for number, analysis in enumerate(self.recipe.analyze):
            report = f"{analysis.kind}-{self.plan.name}"
            if _reads_runs(analysis) and analysis.together:
                self._add_joint_analysis(analysis, report)
            elif analysis.of == "both":
                self._add_families(analysis)
            elif not _reads_runs(analysis):
                self._add_analysis(analysis, [], report + (f"-{number}" if number else ""), ())
        output = locate_new(self.workspace, "reports", self.plan.name) / "summary.json"
        if self.recipe.statistics:
            self._add_statistics(output)
        if self.plan.table:
            self._add_results(output, leak_free)

    def _add_joint_analysis(self, analysis: AnalyzeStage, report: str) -> None:
        """One analysis of all pre-trainings or of all fine-tunings."""
        trainings = {
            label: training.run
            for label, training in self.plan.trainings.items()
            if training.verb == analysis.of
        }
        # where the recipe has the same analysis of the pre-trainings
        twin = (analysis.kind, True, "pretrain")
        if analysis.of != "pretrain" and any(
            (other.kind, other.together, other.of) == twin for other in self.recipe.analyze
        ):
            report += f"-{analysis.of}"
        self._add_analysis(analysis, list(trainings.values()), report, tuple(trainings))

    def _add_statistics(self, output: Path) -> None:
        """The page of statistics, after all tokens."""
        tokens = tuple(label for label in self.plan.nodes if label.startswith("tokenize "))
        settings: Flags = {"views": self.recipe.statistics}
        call = partial(stage_actions.write_statistics, self.recipe, self.plan.name, self.workspace)
        node = Node(label="statistics", settings=settings, call=call, output=output, after=tokens)
        self.add(node)

    def _add_results(self, output: Path, leak_free: bool) -> None:
        """The page of results, after all evaluations."""
        table, evaluate = self.plan.table, self.recipe.evaluate
        stages = tuple(entry.stage for entry in table if entry.stage)
        call = partial(stage_actions.write_result_page, self.plan, self.workspace, leak_free)
        settings: Flags = {
            "table": [[entry.row, entry.column, entry.seed, entry.run] for entry in table],
            "paper": self.recipe.paper,
        }
        settings |= {} if evaluate.margin is None else {"margin": evaluate.margin}
        settings |= {"columns": evaluate.columns} if evaluate.columns else {}
        self.add(Node(label="results", settings=settings, call=call, output=output, after=stages))

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


def _set_fold(block: RecipeBlock, fold: int | None) -> RecipeBlock:
    """A block with one test fold, which its name ends in; None: as it is."""
    if fold is None:
        return block
    tokenize = DataConfig.model_validate({**_set_fields(block.tokenize), "test_fold": fold})
    name = join_names(block.name, f"fold-{fold}")
    return block.model_copy(update={"name": name, "tokenize": tokenize})


def _shorten(view: str) -> str:
    """A view in the names of runs: `sleep-edf/staging` -> `staging`."""
    return view.partition("/")[2] or view


def _take_finetuning(settings: Flags) -> Flags:
    return {section: settings[section] for section in FINETUNE_SECTIONS if section in settings}


def _find_input(analysis: AnalyzeStage) -> str:
    return registry.analyses[analysis.kind].facts.takes


def _reads_runs(analysis: AnalyzeStage) -> bool:
    return _find_input(analysis).startswith("run")


def _set_fields(section: Section) -> Flags:
    return section.model_dump(exclude_unset=True, exclude_none=True)
