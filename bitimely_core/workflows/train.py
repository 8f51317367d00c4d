"""The verb `train`: a model and its head from random weights, on the labels of a view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core import registry
from bitimely_core.config import Settings, load_preset, merge_layers, parse_assignments
from bitimely_core.errors import unknown_name_error
from bitimely_core.run import describe_data, list_versions
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.types import Progress
from bitimely_core.workflows.finetune import (
    build_head,
    describe_fraction,
    make_job,
    open_view,
    require_view,
)
from bitimely_core.workflows.jobs import (
    Flags,
    Say,
    TrainingResult,
    count_labels,
    finish_job,
    list_training_notices,
)
from bitimely_core.workflows.methods import MethodStart, resolve_method, train_method
from bitimely_core.workflows.prepare import open_recipe, resolve_training
from bitimely_core.workflows.pretrain import adapt_to_events, build_model
from bitimely_core.workspace import find_data_kind, find_dataset, locate_new

if TYPE_CHECKING:
    from bitimely_core.heads import Head
    from bitimely_core.tokens import Windows
    from bitimely_core.train.tuning import TrainValidation

PRESET = "tiny"
SIGNALS, HISTORIES = "resnet", "bitimelygpt"  # the default models of recordings and of claims
# of AdamW, one cycle: the rate rises over the warm-up and falls as a cosine to 0
BUDGET: Flags = {"steps": 1500, "batch_size": 32, "warmup": 0.05, "weight_decay": 0.01, "clip": 1.0}


def train(
    model: str | None = None,
    *,
    data: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: Flags | None = None,
    run: str | None = None,
    workspace: Path = Path("workspace"),
    force_new: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> TrainingResult:
    """Train `model` with a head on the labelled view `data`, from random weights and on all
    training subjects.

    `model` None: resnet for recordings, bitimelygpt for histories. The budget is 1,500 steps unless
    epochs or steps are given.

    Raises UserError: as `finetune`.
    """
    from bitimely_core import models

    locate_new(workspace, "runs", "run" if run is None else run, "--run")
    recipe = open_recipe(config)
    name, pairs = require_view(data, recipe), assignments or []
    chosen = merge_layers(recipe.overrides("finetune"), flags or {}, parse_assignments(pairs))
    is_events = find_data_kind(find_dataset(name, workspace)).section == "build"
    standard = HISTORIES if is_events else SIGNALS
    wanted = model or chosen.get("model", {}).get("name") or standard
    if wanted in registry.methods:
        method = resolve_method(wanted, name, recipe, pairs, flags or {}, preset)
        start = MethodStart(run, workspace, force_new, verify, dry_run)
        return train_method(method, start, progress, say)
    entry = _find_model(wanted)
    preset = preset or recipe.pretrain.preset or PRESET
    settings = resolve_training(
        "finetune",
        _collect_defaults(preset, entry, chosen, is_events=is_events),
        config=recipe,
        pairs=pairs,
        flags=merge_layers(
            flags or {}, {"data": {"names": (name,)}, "model": {"name": entry.name}}
        ),
    )
    windows, view = open_view(name, settings, workspace, verify, dry_run, progress)
    settings, head = _build_network(settings, entry.facts.readout, windows, view)
    record = RunRecord(
        run=run or _name_run(entry.name, preset, name),
        kind="train",
        model=entry.name,
        preset=preset,
        settings=settings,
        data=(describe_data(windows),),
        parameters=models.count_parameters(head),
        paper_parameters=load_preset(preset).get("paper_parameters"),
        preparation=(windows.preparation,),
        seed=settings.train.seed,
        versions=list_versions(),
        verified=verify,
        notices=tuple(_list_notices(settings, windows, view)),
        train_windows=len(view.train),
        train_label_counts=count_labels(view.train),
    )
    job = make_job(record, head, windows, view, workspace)
    job = replace(job, headline=f"{job.headline}; {describe_schedule(settings)}")
    return finish_job(job, dry_run=dry_run, force_new=force_new, progress=progress, say=say)


def _find_model(name: str) -> registry.Entry[registry.ModelFacts]:
    """The model. Raises UserError (unknown_name, exit 2) with the closest names, methods among
    them.
    """
    if name not in registry.models:
        raise unknown_name_error("model", name, [*registry.models, *registry.methods])
    return registry.models[name]


def describe_schedule(settings: Settings) -> str:
    """The optimiser and its rate, in words."""
    chosen = settings.train
    return f"AdamW at {chosen.lr:g}, warm-up {chosen.warmup:.0%}, cosine to 0"


def _collect_defaults(
    preset: str, entry: registry.Entry[registry.ModelFacts], chosen: Flags, *, is_events: bool
) -> Flags:
    """The dimensions of the preset, and the budget of a training from random weights."""
    facts = entry.facts
    dimensions = {**load_preset(preset).get(facts.family, {}), "name": entry.name}
    choices = chosen.get("model", {})
    if is_events and "tokenizer" not in choices:
        dimensions = adapt_to_events(dimensions, choices, facts)
    budget = {**BUDGET, "lr": facts.lr}
    if "epochs" in chosen.get("train", {}):
        del budget["steps"]
    return {"model": dimensions, "objective": {"name": "none"}, "train": budget}


def _build_network(
    settings: Settings, readout: str, windows: Windows, view: TrainValidation
) -> tuple[Settings, Head]:
    """The model for the windows with its head, both with random weights, and the settings with what
    the windows decided; `readout` is the model's own.
    """
    model = build_model(settings, [windows], None)
    tuned = settings.finetune.model_copy(update={"readout": settings.finetune.readout or readout})
    settings = settings.model_copy(update={"model": model.config, "finetune": tuned})
    return settings, build_head(model, settings, windows, view)


def _name_run(model: str, preset: str, view: str) -> str:
    """The name of a run that has none: `<model>[-<preset>]-<view>`."""
    return "-".join([model, *([preset] if preset != PRESET else []), view.rpartition("/")[2]])


def _list_notices(settings: Settings, windows: Windows, view: TrainValidation) -> list[str]:
    """Caveats of the run, and subjects that it leaves out."""
    notices = list_training_notices(settings, [windows], None, pretrained=False)
    if settings.data.fraction < 1:
        used = len(set(view.train.subjects()))
        notices.insert(0, describe_fraction(windows, used, "training"))
    return notices
