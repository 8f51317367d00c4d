"""The verb `finetune`: the model of a run with a supervised head, trained on a labelled view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.config import Settings, list_presets, load_preset, merge_layers, place_options
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.evaluate import LOWER_IS_BETTER
from bitimely_core.evaluate.prediction import measure_task
from bitimely_core.recipe import Recipe
from bitimely_core.run import Run, describe_data, list_versions
from bitimely_core.schemas.runs import RunRecord, RunSource
from bitimely_core.store.records import has_result
from bitimely_core.store.workspace import find_dataset, locate_new
from bitimely_core.tokens.drawing import limit_windows, sample_subjects
from bitimely_core.tokens.sequences import HISTORIES, SPECIAL, EventSequences
from bitimely_core.tokens.sets import require_labels
from bitimely_core.tokens.splits import EXTERNAL
from bitimely_core.train import tuning
from bitimely_core.workflows.choice import choose_criterion, limit_choice
from bitimely_core.workflows.jobs import (
    Flags,
    TrainingJob,
    TrainingResult,
    choose_numbers,
    count_labels,
    derive_model_shape,
    find_labels_with_cases,
    find_moments,
    finish_job,
    list_training_notices,
)
from bitimely_core.workflows.prepare import (
    Execution,
    open_recipe,
    prepare_windows,
    resolve_training,
)

NO_CASE = (
    "Give more people, or leave the label out: bitimely ingest with --rules FILE, or --label-column"
)
OTHER_PSEUDONYMS = (
    "These people have other pseudonyms than those of the pre-training: whether some are in both "
    "cannot be told."
)

# windows of a recording that a training with context reads in a row, for each of its reach
SEQUENCE = 2

if TYPE_CHECKING:
    from bitimely_core.heads import Head
    from bitimely_core.models.base import Model
    from bitimely_core.models.survival import HazardGrid
    from bitimely_core.tokens import Windows


def finetune(
    source: str | Path,
    *,
    data: str | None = None,
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
    """Fine-tune the model of run `source` with a supervised head on the labelled view `data`.

    `options` are those of the command line and further settings by name (`config.place_options`),
    such as steps=500 and seed=1; `flags` are settings by section.

    On the data set of the pre-training a fifth of the training subjects is used (the paper, section
    on experiments), else all.

    Raises UserError: as `pretrain`; no_input (4) without training windows.
    """
    import torch

    from bitimely_core import models

    locate_new(workspace, "runs", "run" if run is None else run, "--run")
    recipe = open_recipe(config)
    parent = Run.open(source, workspace).require_finished().require_network()
    name = require_view(data, recipe)
    settings = resolve_training(
        "finetune",
        _collect_defaults(parent.record, name, workspace),
        config=recipe,
        pairs=assignments or [],
        flags=merge_layers(flags or {}, place_options(options), {"data": {"names": (name,)}}),
    )
    execution = Execution(workspace, force_new, verify, dry_run)
    windows, view = open_view(name, settings, execution)
    scratch = settings.finetune.from_scratch or settings.objective.name == "none"
    torch.manual_seed(settings.train.seed)
    carried = [] if scratch else _match_codes(parent, windows)
    model, reset = _build_backbone(parent, windows, scratch, carried)
    settings, choice = limit_choice(complete_settings(settings, model, windows), view.validation)
    head = build_head(model, settings, windows, view)
    origin = parent.record
    initial = _describe_origin(origin, scratch)
    record = RunRecord(
        run=run or _name_run(origin.run, name, settings),
        kind="finetune",
        model=origin.model,
        preset=origin.preset,
        settings=settings,
        data=(describe_data(windows),),
        parameters=models.count_parameters(head),
        paper_parameters=origin.paper_parameters,
        preparation=(windows.preparation,),
        seed=settings.train.seed,
        versions=list_versions(),
        verified=verify,
        renewed=tuple(reset),
        notices=(
            *_list_changes(windows, view, parent, settings, reset, carried),
            *choice,
            *list_training_notices(
                settings, [windows], initial["leak_free"], pretrained=not scratch
            ),
        ),
        train_windows=len(view.train),
        train_label_counts=count_labels(view.train),
        **initial,
    )
    job = make_job(record, head, windows, view, workspace)
    if not scratch and not _has_other_pseudonyms(parent, windows):
        job = replace(job, earlier_subjects=parent.train_subjects)
    return finish_job(job, execution)


def complete_settings(settings: Settings, model: Model, windows: Windows) -> Settings:
    """The settings with what the model and the windows decide: dimensions, readout, augmentations.

    Raises UserError: as `resolve_augmentation`.
    """
    from bitimely_core import heads
    from bitimely_core.augment.augmented_batches import resolve_augmentation

    tuned = resolve_augmentation(heads.choose_head(settings.finetune, model.config), windows)
    if tuned.context:
        _require_neighbours(windows)
    return settings.model_copy(update={"model": model.config, "finetune": tuned})


def _require_neighbours(windows: Windows) -> None:
    """Raises UserError (config, exit 2) where no row has another one of its recording beside it."""
    is_cut = windows.inputs == "signals" and windows.index["recording_id"].is_duplicated().any()
    if not is_cut:
        raise usage_error(
            f"{windows.name} has no recording with more than one window",
            "expected windows that follow each other for --context",
            "Leave it out, or tokenize with a shorter --window",
            field="--context",
        )


def make_job(
    record: RunRecord, head: Head, windows: Windows, view: tuning.TrainValidation, workspace: Path
) -> TrainingJob:
    """The training of a `head` on the training windows of `view`, with the search of a rate where
    the settings ask for one.
    """
    from bitimely_core import heads
    from bitimely_core.augment.augmented_batches import augment_batches
    from bitimely_core.data import batch_sequences
    from bitimely_core.data import batches as make_batches

    settings, train, size = record.settings, record.settings.train, record.settings.train.batch_size
    make = partial(make_batches, ties=settings.model.ties)
    if reach := settings.finetune.context:
        make = partial(batch_sequences, sequence=SEQUENCE * reach)
    batches = augment_batches(
        make(view.train, size, seed=train.seed), view.train, settings.finetune, train.seed
    )
    validation = make(view.validation, size, shuffle=False) if len(view.validation) else None
    measure = partial(measure_task, device=train.device)
    target = view.train.targets(None)
    assert target is not None, "a view with a task has targets"
    readout = settings.finetune.readout
    return TrainingJob(
        record=record,
        folder=locate_new(workspace, "runs", record.run, "--run"),
        model=head,
        objective=heads.make_loss(head.task, target, head.outputs, settings.finetune),
        batches=batches,
        validation=validation,
        windows=[windows],
        headline=f"{record.model} with a head on {readout}: {record.parameters:,} parameters",
        criterion=choose_criterion(head.task, view, train),
        search=tuning.plan_search(settings, batches, validation, [view], measure, LOWER_IS_BETTER),
    )


def _name_run(parent: str, view: str, settings: Settings) -> str:
    """The name of a run that has none: those of the pre-training and of the view."""
    suffix = "-scratch" if settings.finetune.from_scratch else ""
    return f"{parent}-{view.partition('/')[2] or view}{suffix}"


def _describe_origin(origin: RunRecord, scratch: bool) -> Flags:
    """What `run.json` says of the pre-training; of random weights it is the run alone."""
    if scratch:
        return {
            "source": RunSource(run=origin.run, weights=None),
            "pretraining_data": (),
            "pretraining_steps": 0,
            "leak_free": None,
        }
    return {
        "source": RunSource(run=origin.run, weights=origin.weights),
        "pretraining_data": origin.data,
        "pretraining_steps": origin.final.step if origin.final else None,
        "leak_free": origin.leak_free,
    }


def _list_changes(
    windows: Windows,
    view: tuning.TrainValidation,
    parent: Run,
    settings: Settings,
    reset: list[str],
    carried: Sequence[tuple[int, int]],
) -> list[str]:
    """Notices on weights that are not those of the pre-training, and on subjects left out."""
    notices = [_describe_reset(windows, parent.record, reset, len(carried))] if reset else []
    if _has_other_pseudonyms(parent, windows):
        notices.append(OTHER_PSEUDONYMS)
    if settings.data.fraction < 1:
        notices.append(describe_fraction(windows, len(set(view.train.subjects()))))
    return notices


def require_view(data: str | None, recipe: Recipe) -> str:
    """The view to train on. Raises UserError (config, exit 2) unless there is exactly one."""
    names = (data,) if data else recipe.overrides("finetune").get("data", {}).get("names", ())
    if len(names) != 1:
        raise usage_error(
            "no labelled view",
            "expected one --data",
            "For example --data synthetic/staging",
            field="--data",
        )
    return str(names[0])


def _collect_defaults(origin: RunRecord, name: str, workspace: Path) -> Flags:
    """Settings of the pre-training, and those of its preset for fine-tuning."""
    from bitimely_core.models.patch_lengths import choose_learning_rate

    shipped = load_preset(origin.preset) if origin.preset in list_presets() else {}
    same = find_dataset(name, workspace) in {data.dataset for data in origin.data}
    stored = origin.to_json()["settings"]
    rate = choose_learning_rate(origin.settings.model) or 1e-4
    return {
        "model": stored["model"],
        "objective": stored["objective"],
        "data": {"names": (name,), "fraction": 0.2 if same else 1.0},
        "train": {"epochs": 5, "lr": rate, **shipped.get("finetune", {})},
    }


def open_view(
    name: str, settings: Settings, execution: Execution
) -> tuple[Windows, tuning.TrainValidation]:
    """The windows, and the subjects of the training and validation splits that the run uses."""
    windows = prepare_windows(name, execution, settings.data, together=True)
    require_labels(windows)
    windows = limit_windows(windows, settings.data.limit, settings.train.seed)
    train = sample_subjects(windows["train"], settings.data.fraction, seed=settings.train.seed)
    if not len(train):
        raise input_error(
            Reason.NO_INPUT,
            f"{windows.name} has no training windows",
            "expected at least one",
            _advise_training(windows),
        )
    _require_cases(train)
    return windows, tuning.TrainValidation(train, windows["validation"])


def _advise_training(windows: Windows) -> str:
    """What gives tokens a training split."""
    if windows.split == EXTERNAL:
        return "Tokenize with --split subject: all of these are tested"
    return "Tokenize with a lower --min-codes" if windows.vocabulary else "Ingest more recordings"


def _has_other_pseudonyms(parent: Run, windows: Windows) -> bool:
    """Whether the histories are of another cache than those of the run, so that equal pseudonyms
    are not equal people.
    """
    if not windows.vocabulary or not has_result(parent.folder / HISTORIES):
        return False
    return parent.histories().cache != windows.manifest.cache


def _require_cases(train: Windows) -> None:
    """Raises UserError: class_missing (exit 4) where none of several labels has a case in the
    windows; those without one among others have no risk of new people.
    """
    target = train.targets(None)
    if (
        train.task not in ("multilabel", "survival")
        or target is None
        or find_labels_with_cases(train).any()
    ):
        return
    state = "has no case" if np.isfinite(target[..., -1]).any() else "is unknown"
    names = ", ".join(train.class_names)
    raise input_error(
        Reason.CLASS_MISSING,
        f"each label of {names} {state} in all training windows",
        "expected people with it and people without it",
        NO_CASE,
        file=str(train.name),
        field="--data",
    )


def _match_codes(parent: Run, windows: Windows) -> list[tuple[int, int]]:
    """The codes that the vocabularies of the windows and of the run share, by their text: the place
    of each in the one and in the other.
    """
    if not windows.vocabulary or not has_result(parent.folder / HISTORIES):
        return []
    if parent.record.settings.model.tokenizer != "codes":
        return []  # months on a grid: no code has weights of its own
    places = {code: place for place, code in enumerate(parent.histories().vocabulary)}
    codes = windows.vocabulary[len(SPECIAL) :]
    return [(place, places[code]) for place, code in enumerate(codes) if code in places]


def _build_backbone(
    parent: Run, windows: Windows, scratch: bool, carried: Sequence[tuple[int, int]]
) -> tuple[Model, list[str]]:
    """The model of the run with an adapter for the windows, and the names of its tensors that were
    randomly initialised, but for the codes that are `carried`.
    """
    from bitimely_core import models

    config = parent.record.settings.model
    if scratch:
        # where the data have them, unless they were switched off
        free = config.model_copy(update={"numbers": config.numbers and None})
        config = config.model_copy(update={"numbers": choose_numbers([windows], free)})
    model = models.from_config(config) if scratch else models.load(parent.verified_weights())
    adapter = parent.find_adapter(windows)
    model.select_adapter(adapter or 0)
    shape = derive_model_shape([windows], config)
    size: Flags = {key: shape[key] for key in ("channels", "length", "codes") if key in shape}
    earlier = model.adapter
    reset = model.reset_adapter(**size, renew=adapter is None)
    if carried and model.adapter is not earlier:
        model.adapter.copy_codes(earlier, carried)
    model.fit_numbers(find_moments([windows]))
    return model, reset


def build_head(
    model: Model, settings: Settings, windows: Windows, view: tuning.TrainValidation
) -> Head:
    """The head of the task with random weights, its targets standardised by the training windows,
    and its risks of several labels near their shares there.
    """
    from bitimely_core import heads

    tuned, target = settings.finetune, view.train.targets(None)
    assert target is not None, "a view with a task has targets"
    assert windows.task != "none", "a view with targets has a task"
    head = heads.build(
        model,
        task=windows.task,
        outputs=max(windows.classes, 1),
        readout=tuned.readout,
        layers=tuned.layers,
        layer_merge=tuned.layer_merge,
        freeze=tuned.freeze,
        dropout=tuned.dropout or 0.0,
        grid=_make_grid(settings, windows, target),
        context=tuned.context,
        context_clock=tuned.context_clock,
    )
    heads.standardise(head, target)
    if windows.task == "multilabel" and tuned.class_weights == "none":
        heads.start_at_prevalence(head, target)
    return head


def _make_grid(settings: Settings, windows: Windows, target: np.ndarray) -> HazardGrid | None:
    """Intervals and horizons of a task of times to event, by the training events."""
    if not isinstance(windows, EventSequences) or windows.options.time_to_event is None:
        return None
    from bitimely_core.models.survival import HazardGrid, make_edges

    horizons, tuned = windows.options.time_to_event, settings.finetune
    times = target.reshape(-1, 2)
    times = times[np.isfinite(times).all(1)]
    end = windows.options.landmark.horizon_days if windows.options.landmark else horizons[-1]
    return HazardGrid(
        tuned.hazard,
        make_edges(times[:, 0], times[:, 1], end, tuned.intervals),
        tuple(map(float, horizons)),
    )


def describe_fraction(windows: Windows, used: int, verb: str = "fine-tuning") -> str:
    """The notice on training subjects that are left out."""
    available = len(set(windows["train"].subjects()))
    return f"{verb} on {used:,} of {available:,} training {windows.subject_unit}s"


def _describe_reset(windows: Windows, origin: RunRecord, reset: list[str], carried: int) -> str:
    """The notice on tensors of a pre-trained model that were randomly initialised."""
    adapter = [name for name in reset if name.startswith("adapter.")]
    others = sorted(set(reset) - set(adapter))
    parts = []
    if adapter:
        reason = "another vocabulary"
        if not windows.vocabulary:
            before = " and ".join(map(str, origin.channels))
            reason = f"{windows.channels} channels here, {before} in the pre-training"
        what = f"({len(adapter)} tensors: tokenizer, input and output projection)"
        parts.append(f"{reason}: re-initialised the adapter {what}")
        if carried:
            codes = len(windows.vocabulary) - len(SPECIAL)
            parts[-1] += f", but for {carried:,} of {codes:,} codes, which keep their weights"
    if others:
        parts.append(
            "windows of another length: randomly initialised or extended by random values: "
            f"{', '.join(others)}"
        )
    return "; ".join(parts)
