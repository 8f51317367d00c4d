"""A recipe as a graph: which verb runs with which settings on what, and what it needs before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bitimely_core import registry, workflows
from bitimely_core.config import DataConfig, Section, load_preset, merge_layers
from bitimely_core.errors import Exit, Reason, UserError, input_error, usage_error
from bitimely_core.pipeline.graph import SETTLED, Node, States
from bitimely_core.recipe import AnalyzeStage, Block, Recipe, Stage
from bitimely_core.report.recipe_results import write_results
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import windows_opener
from bitimely_core.workspace import dataset_and_view, is_events, tokens_name

AFTERWARDS = {
    "readout",
    "layers",
    "freeze",
    "from_scratch",
    "fraction",
}  # flags that change the fine-tuning alone: the pre-training is shared
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table under one seed."""

    arm: str
    values: dict[str, Any]  # its point of the matrix
    flags: dict[str, Any]
    set: dict[str, Any] = field(default_factory=dict)  # settings without a flag

    @property
    def row(self) -> str:
        """The row of the table that it belongs to: all but the seed."""
        return " ".join(filter(None, [self.arm, *(str(value) for key, value in self.values.items() if key != "seed")]))

    @property
    def seed(self) -> int:
        """Of its trainings."""
        return int(self.flags.get("seed", 0))

    def name(self, *, pretraining: bool = False) -> str:
        """The values that tell it from other cells; of the pre-training only those that matter to it."""
        shown = [str(value) for key, value in self.values.items() if not pretraining or key not in AFTERWARDS]
        last = ["init"] if pretraining and self.flags.get("from_scratch") else []
        return "-".join(filter(None, [self.arm, *shown, *last]))

    def left_out(self, recipe: Recipe) -> str:
        """Why the recipe has no such cell; empty where it has."""
        return next((out.why for out in recipe.leave_out if all(self.values.get(key) in values for key, values in out.where.items())), "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The stages of a recipe, and the cells of its table."""

    name: str
    recipe: Recipe
    nodes: dict[str, Node] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)  # label of a stage that belongs to one cell -> that cell
    words: dict[str, str] = field(default_factory=dict)  # label -> what --only looks at
    trainings: dict[str, dict[str, Any]] = field(default_factory=dict)  # label -> what its cost is estimated from
    table: list[dict[str, Any]] = field(default_factory=list)  # row, column, seed, run, stage

    def model(self, label: str) -> str:
        """The model that a training is about."""
        training = self.trainings[label]
        first = self.trainings[f"pretrain {training['source']}"] if training["verb"] == "finetune" else training
        return str(first["flags"].get("model", {}).get("name", "bitimelygpt"))


def cells(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The product of `[matrix]`: one dict of flags a cell; a recipe without a matrix is one cell."""
    names = list(recipe.matrix)
    for values in itertools.product(*(recipe.matrix[n] for n in names)):
        yield dict(zip(names, values, strict=True))


def _cells(recipe: Recipe) -> Iterator[Cell]:
    arms = [(arm.name, arm.model_dump(exclude_none=True, exclude={"name", "set"}), arm.set) for arm in recipe.arm] or [("", {}, {})]
    for (arm, own, more), values in itertools.product(arms, cells(recipe)):
        flags = {**own, **values}
        model = registry.models[flags.get("model") or recipe.pretrain.model or "bitimelygpt"]
        if flags.get("objective") == "none" != model.facts.objective:  # no pre-training of a model that could have one
            flags = {**flags, "objective": None, "from_scratch": True}
        yield Cell(arm=arm, values=values, flags={key: value for key, value in flags.items() if value is not None}, set=more)


def planned(
    recipe: Recipe,
    name: str,
    workspace: Path,
    *,
    assignments: list[str],
    devices: int = 1,
    leak_free: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> Plan:
    """All stages of `recipe` under `name`, in an order in which they can be run."""
    for package in ("datasets", "models", "objectives", "analyses"):
        registry.load_members(f"bitimely_core.{package}")
    plan = Plan(name=name, recipe=recipe)
    building = _Building(plan, workspace, assignments, devices, progress, say)
    for dataset in recipe.ingest.datasets:
        building.ingest(dataset)
    for view in recipe.statistics:
        building.tokens(view, recipe.tokenize, recipe.build, "")
    blocks = recipe.block or (Block(),)
    if recipe.pretrain.preset or recipe.block:
        views = [view for block in blocks for view in _views(recipe, block)]
        for block, cell in itertools.product(blocks, _cells(recipe)):
            for fold in recipe.folds or (None,):
                building.cell(block, cell, views, fold)
    building.pages(leak_free)
    return plan


def _views(recipe: Recipe, block: Block) -> tuple[str, ...]:
    data = block.finetune.data or recipe.finetune.data or ()
    return (data,) if isinstance(data, str) else data


def _folded(block: Block, fold: int) -> Block:
    """The block with the windows of one test fold."""
    tokenize = DataConfig.model_validate({**_given(block.tokenize), "test_fold": fold})
    return block.model_copy(update={"name": "-".join(filter(None, [block.name, f"fold-{fold}"])), "tokenize": tokenize})


class _Building:
    """The recipe while its graph is built: what every stage of it shares."""

    def __init__(
        self, plan: Plan, workspace: Path, assignments: list[str], devices: int, progress: Progress | None, say: Say | None
    ) -> None:
        self.plan, self.recipe, self.workspace = plan, plan.recipe, workspace
        self.assignments, self.devices, self.progress, self.say = assignments, devices, progress, say

    def add(self, node: Node, owner: str = "", words: str = "") -> str:
        """Keep a stage once, whoever asks for it. Raises UserError (config, exit 2) where two would have one name."""
        known = self.plan.nodes.setdefault(node.label, node)
        if known.key != node.key:
            raise usage_error(
                f"two stages {node.label!r} with different settings",
                "expected a name of its own for each block and arm",
                "Give them different names",
            )
        if known is node and owner:
            self.plan.owner[node.label] = owner
            self.plan.words[node.label] = words
        return node.label

    def ingest(self, dataset: str) -> None:
        recipe, out = self.recipe.ingest, self.workspace / "cache" / dataset
        source = recipe.sources.get(dataset)
        options = recipe.options.get(dataset, {})

        def call(_: States) -> Mapping[str, Any]:
            if source is None and registry.datasets[dataset].facts.needs_source:
                if (out / "manifest.json").is_file():
                    return {"detail": "the cache that is there"}
                raise input_error(
                    Reason.INCOMPLETE,
                    "no cache of this data set",
                    "expected its raw files",
                    f"Give --set ingest.sources.{dataset}=FOLDER, or run: bitimely ingest {dataset} FOLDER",
                    file=str(out),
                )
            if is_events(dataset):
                from bitimely_core import cache

                return cache.ingest(dataset, source, out, options=options, progress=self.progress)
            return workflows.ingest(dataset, source, out, options=options, jobs=recipe.jobs, progress=self.progress)

        stated = {"source": source, "options": options}
        self.add(Node(label=f"ingest {dataset}", settings=stated, call=call, made=out / "manifest.json"))

    def tokens(self, view: str, own: DataConfig, build: dict[str, Any], block: str) -> tuple[str, str]:
        """The tokens of a view as the recipe wants them: their name, and the label of the stage."""
        dataset, _ = dataset_and_view(view)
        events = is_events(view)
        if events and own.test_fold is not None:
            raise usage_error(f"folds of {view}", "expected windows of signals", "Split claims with --split-file at ingest", field="folds")
        chosen = {**self.recipe.build, **build} if events else {**_given(self.recipe.tokenize), **_given(own)}
        local = bool(build) if events else bool(_given(own))
        name = "-".join([*([self.plan.name] if chosen else []), *([block] if local and block else []), tokens_name(view)])
        cached = self.workspace / "cache" / dataset / "manifest.json"
        ingest = f"ingest {dataset}"
        if not registry.datasets[dataset].facts.needs_source:
            self.ingest(dataset)

        def call(_: States) -> Mapping[str, Any]:
            done = workflows.tokenize(view, workspace=self.workspace, name=name, options=chosen, progress=self.progress)
            return {"detail": f"{done['windows']:,} windows"}

        node = Node(
            label=f"tokenize {name}",
            settings={"data": view, **chosen},
            call=call,
            made=self.workspace / "tokens" / name / "manifest.json",
            needs=(ingest,) if ingest in self.plan.nodes else (),
            reads=() if ingest in self.plan.nodes else (cached,),
        )
        return name, self.add(node)

    def cell(self, block: Block, cell: Cell, views: list[str], fold: int | None) -> None:
        """All stages of one cell in one block, for one test fold where there are several."""
        recipe = self.recipe
        columns = {view: self._column(block, view, views) for view in _views(recipe, block)}
        if why := cell.left_out(recipe):
            self.plan.table.extend({"row": cell.row, "column": column, "seed": cell.seed, "why": why} for column in columns.values())
            return
        if fold is not None:
            block = _folded(block, fold)
        owner = f"{block.name}/{cell.name()}"
        words = " ".join([block.name, cell.row, *map(str, cell.flags.values()), *_views(recipe, block)])
        stage = Stage.model_validate(cell.flags)
        first = Stage.model_validate({**_given(recipe.pretrain), **_given(block.pretrain)})
        names = first.data or load_preset(stage.preset or first.preset or "tiny").get("data", ["synthetic"])
        wanted = [self.tokens(view, block.tokenize, block.build, block.name) for view in ((names,) if isinstance(names, str) else names)]
        default = registry.models[stage.model or first.model or "bitimelygpt"].facts.objective
        instead = recipe.objectives.get(default) if stage.objective is None and first.objective is None else None
        spread = {"train": {"devices": self.devices}} if self.devices > 1 else {}
        pretraining = merge_layers(
            recipe.overrides("pretrain", tokenize=False),
            block.pretrain.flags(),
            {"objective": {"name": instead}} if instead else {},
            {section: values for section, values in stage.flags().items() if section != "finetune"},
            cell.set,
            {"data": {"names": tuple(name for name, _ in wanted)}},
            {"train": {"steps": 0}} if stage.from_scratch else spread,
        )
        base = "-".join(filter(None, [self.plan.name, block.name, cell.name(pretraining=True)]))
        chosen: dict[str, Any] = {
            "preset": stage.preset or first.preset,
            "budget": stage.budget or first.budget,
            "flags": pretraining,
            "assignments": [] if stage.from_scratch else self.assignments,
        }
        if stage.from_scratch:  # a run with the initial weights; what changes the model changes it here too
            chosen["assignments"] = [pair for pair in self.assignments if pair.startswith(("model.", "data."))]
        source = self._training("pretrain", base, chosen, tuple(label for _, label in wanted), owner, words)
        for view, column in columns.items():
            name, tokenized = self.tokens(view, block.tokenize, block.build, block.name)
            own = stage.flags()
            tuning = merge_layers(
                recipe.overrides("finetune", tokenize=False),
                block.finetune.flags(),
                {section: own[section] for section in ("train", "finetune", "tune") if section in own},
                {"data": {"fraction": stage.fraction}} if stage.fraction else {},
                {section: values for section, values in cell.set.items() if section in {"train", "finetune", "tune"}},
                {"data": {"names": (name,)}},
                spread,
            )
            short = view.partition("/")[2] or view
            tuned = "-".join(filter(None, [self.plan.name, block.name, cell.name(), short]))
            trained = self._training(
                "finetune",
                tuned,
                {"source": base, "data": name, "flags": tuning, "assignments": self.assignments},
                (source, tokenized),
                owner,
                words,
            )
            scored = self._evaluate(tuned, trained, cell, column, owner, words)
            self.plan.table.append(
                {"row": cell.row, "column": column, "seed": cell.seed, "run": tuned, "stage": scored, "trained": trained}
            )
            self._analyses("finetune", tuned, trained, owner, words)
        self._analyses("pretrain", base, source, owner, words)

    def _column(self, block: Block, view: str, views: list[str]) -> str:
        """The view; where several blocks have the same one, the name of the block."""
        return view if views.count(view) == 1 else block.name

    def _training(self, verb: str, run: str, chosen: dict[str, Any], needs: tuple[str, ...], owner: str, words: str) -> str:
        label = f"{verb} {run}"
        call = partial(_train, verb, {**chosen, "run": run}, self.workspace, self.devices, self.progress, self.say)
        made = self.workspace / "runs" / run / "run.json"
        self.plan.trainings.setdefault(label, {"verb": verb, "run": run, **chosen, "needs": needs})
        return self.add(Node(label=label, settings={"verb": verb, **chosen}, call=call, made=made, needs=needs), owner, words)

    def _evaluate(self, run: str, trained: str, cell: Cell, column: str, owner: str, words: str) -> str:
        wanted = self.recipe.evaluate
        other = {key: next((v for v in self.recipe.matrix[key] if str(v) == wanted.compare), value) for key, value in cell.values.items()}
        second = None
        if wanted.compare is not None and other != cell.values:
            second = run.replace(cell.name(), Cell(arm=cell.arm, values=other, flags={}).name(), 1)
        chosen: dict[str, Any] = {"split": wanted.split, "bootstrap": wanted.bootstrap, "by": wanted.by, "compare": second}
        needs = (trained, *([f"evaluate {second}"] if second else []))

        def call(_: States) -> Mapping[str, Any]:
            workflows.evaluate(run, **chosen, workspace=self.workspace, progress=self.progress)
            return {}

        made = self.workspace / "runs" / run / "scores.json"
        return self.add(Node(label=f"evaluate {run}", settings=chosen, call=call, made=made, needs=needs), owner, words)

    def _analyses(self, of: str, run: str, trained: str, owner: str, words: str) -> None:
        for analysis in self.recipe.analyze:
            if analysis.of == of and not analysis.together and self._takes(analysis).startswith("run"):
                self._analyze(analysis, [run], f"{analysis.kind}-{run}", (trained,), owner, words)

    def _takes(self, analysis: AnalyzeStage) -> str:
        return registry.analyses[analysis.kind].facts.takes

    def _analyze(
        self, analysis: AnalyzeStage, names: list[str], report: str, needs: tuple[str, ...], owner: str = "", words: str = ""
    ) -> None:
        options = {key: str(value) for key, value in analysis.options.items()}

        def call(_: States) -> Mapping[str, Any]:
            extra: dict[str, Any] = {
                key: options.pop(key) for key in ("model", "objective", "preset") if key in options and self._takes(analysis) == "model"
            }
            return workflows.analyze(
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

        chosen = {**analysis.model_dump(), "runs": names}
        made = self.workspace / "reports" / report / "summary.json"
        self.add(Node(label=f"analyze {report}", settings=chosen, call=call, made=made, needs=needs), owner, words)

    def pages(self, leak_free: bool) -> None:
        """What is about the whole recipe: analyses of all rows together or of none, the comparison, the statistics."""
        plan, recipe = self.plan, self.recipe
        for number, analysis in enumerate(recipe.analyze):
            takes = self._takes(analysis)
            if takes.startswith("run") and analysis.together:
                trained = [entry for entry in plan.trainings if plan.trainings[entry]["verb"] == analysis.of]
                self._analyze(analysis, [plan.trainings[t]["run"] for t in trained], f"{analysis.kind}-{plan.name}", tuple(trained))
            elif analysis.of == "both":
                self._families(analysis)
            elif not takes.startswith("run"):
                self._analyze(analysis, [], f"{analysis.kind}-{plan.name}" + (f"-{number}" if number else ""), ())
        out = self.workspace / "reports" / plan.name
        if recipe.statistics:
            stages = tuple(label for label in plan.nodes if label.startswith("tokenize "))
            stated: dict[str, Any] = {"views": recipe.statistics}
            call = partial(_statistics, recipe, plan.name, self.workspace)
            self.add(Node(label="statistics", settings=stated, call=call, made=out / "summary.json", after=stages))
        if plan.table:
            stages = tuple(entry["stage"] for entry in plan.table if "stage" in entry)
            call = partial(_results, plan, self.workspace, leak_free, self.progress)
            stated = {"table": [[e["row"], e["column"], e["seed"], e.get("run")] for e in plan.table], "paper": recipe.paper}
            self.add(Node(label="results", settings=stated, call=call, made=out / "summary.json", after=stages))

    def _families(self, analysis: AnalyzeStage) -> None:
        """The analysis of every pre-training together with what was fine-tuned from it, a page for each view."""
        tuned: dict[tuple[str, str], list[str]] = {}
        for label, training in self.plan.trainings.items():
            if training["verb"] == "finetune":
                tuned.setdefault((training["source"], training["data"]), []).append(label)
        for (base, data), labels in tuned.items():
            names = [base, *(self.plan.trainings[label]["run"] for label in labels)]
            self._analyze(
                analysis.model_copy(update={"data": data}), names, f"{analysis.kind}-{base}-{data}", (f"pretrain {base}", *labels)
            )


def _given(section: Section) -> dict[str, Any]:
    """The settings that were written down."""
    return section.model_dump(exclude_unset=True, exclude_none=True)


def _train(
    verb: str, call: dict[str, Any], workspace: Path, devices: int, progress: Progress | None, say: Say | None, _: States
) -> Mapping[str, Any]:
    """One training; on several devices in processes of its own."""
    if devices > 1:
        import json

        from bitimely_core.training.distributed import launch

        code = launch([verb, str(workspace), json.dumps(call)], devices, module="bitimely_cli.stage")
        if code:
            raise UserError(
                Reason.INCOMPLETE, f"exit code {code}", f"expected {devices} processes to end well", file=call["run"], exit_code=Exit(code)
            )
        return {}
    return training(verb, call, workspace=workspace, progress=progress, say=say)


def training(verb: str, call: dict[str, Any], **given: Any) -> dict[str, Any]:
    """`runs.pretrain` or `runs.finetune` with the settings of a stage."""
    return workflows.finetune(**call, **given) if verb == "finetune" else workflows.pretrain(**call, **given)


def _results(plan: Plan, workspace: Path, leak_free: bool, progress: Progress | None, states: States) -> Mapping[str, Any]:
    """The page of results: every cell of the table, with what became of it."""
    placed: dict[tuple[str, str, int], list[dict[str, Any]]] = {}  # several runs are test folds of one cell
    for entry in plan.table:
        placed.setdefault((entry["row"], entry["column"], entry["seed"]), []).append(entry)
    entries = []
    for (row, column, seed), parts in placed.items():
        cell = {"row": row, "column": column, "seed": seed}
        if why := parts[0].get("why"):
            entries.append({**cell, "run": None, "state": "left out", "detail": why})
        elif missing := [part for part in parts if states[part["stage"]]["state"] not in SETTLED]:
            stage = missing[0]["stage"]
            unwell = (states[label] for label in _causes(plan, stage) if states[label]["state"] in {"failed", "not run"})
            cause = next(unwell, states[stage])
            of = f"{len(missing)} of {len(parts)} folds, the first: " if len(parts) > 1 else ""
            entries.append({**cell, "run": None, "state": cause["state"], "detail": of + cause["detail"]})
        else:
            runs_of = [part["run"] for part in parts]
            entries.append({**cell, "run": runs_of if len(runs_of) > 1 else runs_of[0], "state": "done", "detail": ""})
    recipe = plan.recipe
    variant = "The leak-free variant" if leak_free else "As the paper has it; --leak-free for the other variant" if recipe.literal else ""
    return write_results(
        plan.name,
        entries,
        paper=recipe.paper,
        title=recipe.title + (" (leak-free variant)" if leak_free else ""),
        description=". ".join(filter(None, [recipe.description, variant])),
        workspace=workspace,
        out=workspace / "reports" / plan.name,
        open_windows=windows_opener(workspace),
        progress=progress,
    )


def _causes(plan: Plan, label: str) -> Iterator[str]:
    """What `label` hangs on, the first first."""
    for need in plan.nodes[label].needs:
        yield from _causes(plan, need)
    yield label


def _statistics(recipe: Recipe, name: str, workspace: Path, states: States) -> Mapping[str, Any]:
    return workflows.statistics(
        recipe.statistics, title=recipe.title, description=recipe.description, workspace=workspace, out=workspace / "reports" / name
    )
