"""The verb `train`: a model and its head from random weights, on the labels of a view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import registry
from bitimely_core.config import (
    Settings,
    load_preset,
    merge_layers,
    parse_assignments,
    place_options,
)
from bitimely_core.errors import unknown_name_error
from bitimely_core.methods.rates import is_rate
from bitimely_core.recipe import Recipe
from bitimely_core.run import describe_data, list_versions
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.tokens import WindowManifest
from bitimely_core.store.workspace import (
    find_data_kind,
    find_dataset,
    locate,
    locate_new,
    name_tokens,
)
from bitimely_core.workflows.choice import limit_choice
from bitimely_core.workflows.finetune import (
    build_head,
    complete_settings,
    describe_fraction,
    make_job,
    open_view,
    require_view,
)
from bitimely_core.workflows.jobs import (
    Flags,
    TrainingPlan,
    TrainingResult,
    count_labels,
    finish_job,
    list_training_notices,
)
from bitimely_core.workflows.members import Repeats, name_training, train_members
from bitimely_core.workflows.methods import resolve_method, train_method
from bitimely_core.workflows.prepare import Execution, open_recipe, resolve_training
from bitimely_core.workflows.pretrain import (
    adapt_to_events,
    build_model,
    choose_rate,
    collect_dimensions,
)

if TYPE_CHECKING:
    from bitimely_core.heads import Head
    from bitimely_core.tokens import Windows
    from bitimely_core.train.tuning import TrainValidation

PRESET = "tiny"
# kind of data -> the model or method that is trained where none is named; docs/pophr.md has the
# measurement of histories, docs/models/methods.md that of rates
RECOMMENDED = {"signals": "resnet", "rates": "rates", "irregular": "gru-d", "histories": "trees"}
# of AdamW, one cycle: the rate rises over the warm-up and falls as a cosine to 0
BUDGET: Flags = {
    "steps": 3000,
    "batch_size": 32,
    "warmup": 0.05,
    "weight_decay": 0.01,
    "clip": 1.0,
    "checkpoint": "best",
}
# of heads with context: windows of one recording are alike, so a step takes many recordings
CONTEXT_BUDGET: Flags = {"steps": 400, "batch_size": 512}


def train(
    model: str | None = None,
    *,
    data: str | None = None,
    folds: int | None = None,
    seeds: int | None = None,
    preset: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: Flags | None = None,
    run: str | None = None,
    workspace: Path = Path("workspace"),
    force_new: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    **options: Any,
) -> TrainingResult:
    """Train `model` with a head on the labelled view `data`, from random weights and on all
    training subjects.

    `model` None: the one of `RECOMMENDED` for the kind of data. The budget is 3,000 steps, with
    context 400 larger ones, unless epochs, steps or minutes are given. With `folds` or `seeds` it
    is trained and scored for each test fold by subject and each seed, which are pooled as one run
    (`workflows.members`).

    `options` are those of the command line and further settings by name (`config.place_options`),
    such as steps=500 and seed=1; `flags` are settings by section.

    Raises UserError: as `finetune`; config (exit 2) for more folds than subjects.
    """
    locate_new(workspace, "runs", "run" if run is None else run, "--run")
    placed = merge_layers(flags or {}, place_options(options))
    plan = _plan_training(
        model, data, preset, open_recipe(config), assignments or [], placed, workspace
    )
    execution = Execution(workspace, force_new, verify, dry_run)
    if folds or seeds:
        return train_members(plan, run, Repeats(folds, seeds), execution, _train_plan)
    return _train_plan(plan, run, execution)


def _plan_training(
    model: str | None,
    data: str | None,
    preset: str | None,
    recipe: Recipe,
    pairs: list[str],
    flags: Flags,
    workspace: Path,
) -> TrainingPlan:
    """The model, its sizes and the resolved settings. Raises UserError: as `train`."""
    name = require_view(data, recipe)
    chosen = merge_layers(recipe.overrides("finetune"), flags, parse_assignments(pairs))
    kind = find_kind(name, workspace)
    wanted = model or chosen.get("model", {}).get("name") or RECOMMENDED[kind]
    if wanted in registry.methods:
        method = resolve_method(wanted, name, recipe, pairs, flags, preset)
        return TrainingPlan(wanted, "", method, name, chosen)
    entry = _find_model(wanted)
    preset = preset or recipe.pretrain.preset or PRESET
    settings = resolve_training(
        "finetune",
        _collect_defaults(preset, entry, chosen, is_events=kind == "histories"),
        config=recipe,
        pairs=pairs,
        flags=merge_layers(flags, {"data": {"names": (name,)}, "model": {"name": entry.name}}),
    )
    return TrainingPlan(entry.name, preset, settings, name, chosen)


def find_kind(name: str, workspace: Path) -> str:
    """The kind of data, a key of `RECOMMENDED`, of a view or of tokens."""
    dataset = find_dataset(name, workspace)
    if find_data_kind(dataset).section == "build":
        return "histories"
    manifest = locate(workspace, "tokens", name_tokens(name)) / "manifest.json"
    view = registry.datasets[dataset].facts.views.get(name.partition("/")[2])
    is_irregular = bool(view and view.clock and not view.grid)
    if manifest.is_file():
        options = WindowManifest.read(manifest.parent).options
        is_irregular = options.irregular
    if is_irregular:
        return "irregular"
    return "rates" if is_rate(view) else "signals"


def _train_plan(plan: TrainingPlan, run: str | None, execution: Execution) -> TrainingResult:
    """One training as planned; `run`: its name, None: that of model and view."""
    from bitimely_core import models

    if plan.model in registry.methods:
        return train_method(plan, run, execution)
    windows, view = open_view(plan.view, plan.settings, execution)
    settings, choice = limit_choice(plan.settings, view.validation)
    settings, head = _build_network(settings, plan.chosen, windows, view)
    record = RunRecord(
        run=run or name_training(plan),
        kind="train",
        model=plan.model,
        preset=plan.preset,
        settings=settings,
        data=(describe_data(windows),),
        parameters=models.count_parameters(head),
        paper_parameters=load_preset(plan.preset).get("paper_parameters"),
        preparation=(windows.preparation,),
        seed=settings.train.seed,
        versions=list_versions(),
        verified=execution.verify,
        notices=(*_list_notices(settings, windows, view), *choice),
        train_windows=len(view.train),
        train_label_counts=count_labels(view.train),
    )
    job = make_job(record, head, windows, view, execution.workspace)
    job = replace(job, headline=f"{job.headline}; {describe_schedule(settings)}")
    return finish_job(job, execution)


def _find_model(name: str) -> registry.Entry[registry.ModelFacts]:
    """The model. Raises UserError (unknown_name, exit 2) with the closest names, methods among
    them.
    """
    if name not in {**registry.models, **registry.models.aliases}:
        raise unknown_name_error("model", name, [*registry.models, *registry.methods])
    return registry.models[name]


def describe_schedule(settings: Settings) -> str:
    """The optimiser, its rate and the augmentations, in words."""
    chosen = settings.train
    names = ", ".join(settings.finetune.augment) or "no"
    return f"AdamW at {chosen.lr:g}, warm-up {chosen.warmup:.0%}, cosine to 0; {names} augmentation"


def _collect_defaults(
    preset: str, entry: registry.Entry[registry.ModelFacts], chosen: Flags, *, is_events: bool
) -> Flags:
    """The dimensions of the preset, and the budget of a training from random weights."""
    facts, choices = entry.facts, chosen.get("model", {})
    dimensions = collect_dimensions(preset, entry.name, choices)
    if is_events and "tokenizer" not in choices:
        dimensions = adapt_to_events(preset, entry.name, choices)
    budget = {**BUDGET, "lr": facts.lr}
    if chosen.get("finetune", {}).get("context"):
        budget |= CONTEXT_BUDGET
    if {"epochs", "minutes"} & chosen.get("train", {}).keys():
        del budget["steps"]
    return {
        "model": dimensions,
        "objective": {"name": "none"},
        "train": budget,
        "finetune": {"augment": ("default",)},
    }


def _build_network(
    settings: Settings, chosen: Flags, windows: Windows, view: TrainValidation
) -> tuple[Settings, Head]:
    """The model for the windows with its head, both with random weights, and the settings with what
    the windows decided where the user has not `chosen` it.
    """
    model = build_model(settings, [windows], None)
    settings = choose_rate(settings, model.config, chosen)
    settings = complete_settings(settings, model, windows)
    return settings, build_head(model, settings, windows, view)


def _list_notices(settings: Settings, windows: Windows, view: TrainValidation) -> list[str]:
    """Caveats of the run, and subjects that it leaves out."""
    notices = list_training_notices(settings, [windows], None, pretrained=False)
    if settings.data.fraction < 1:
        used = len(set(view.train.subjects()))
        notices.insert(0, describe_fraction(windows, used, "training"))
    return notices
