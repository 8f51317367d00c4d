"""The verb `pretrain`: a model is trained on an objective that needs no labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import registry
from bitimely_core.config import (
    PRETRAINING,
    ModelConfig,
    Settings,
    TuneConfig,
    find_dimensions,
    load_preset,
    merge_layers,
    parse_assignments,
    place_options,
)
from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.run import describe_data, list_versions
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.tokens import SamplePreparation
from bitimely_core.store import storage
from bitimely_core.store.records import check_result, has_result
from bitimely_core.store.workspace import locate, locate_new, name_run
from bitimely_core.tokens.drawing import limit_windows
from bitimely_core.train import tuning
from bitimely_core.types import Batches, count_nouns
from bitimely_core.workflows import hub
from bitimely_core.workflows.jobs import (
    Flags,
    TrainingJob,
    TrainingResult,
    choose_numbers,
    derive_model_shape,
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

if TYPE_CHECKING:
    from bitimely_core.models.base import Model
    from bitimely_core.tokens import Windows


def pretrain(
    data: str | Sequence[str] | None = None,
    *,
    preset: str | None = None,
    budget: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: Flags | None = None,
    init: str | Path | None = None,
    run: str | None = None,
    workspace: Path = Path("workspace"),
    force_new: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    **options: Any,
) -> TrainingResult:
    """Pre-train a model on the windows of `data`, one view or several (None: those of `flags`,
    `config` or the preset); makes missing tokens first, resumes a stopped run exactly.

    `options` are those of the command line and further settings by name (`config.place_options`),
    such as model="timelygpt", steps=500 and seed=1; `flags` are settings by section.

    Raises UserError: config, unknown_name, settings_differ (2), incomplete (4), integrity (5),
    resources (6), locked (7).
    """
    from bitimely_core import models, objectives

    recipe = open_recipe(config)
    placed = merge_layers(flags or {}, place_options(options, PRETRAINING))
    flags, assignments = _name_data(placed, data), assignments or []
    preset = preset or recipe.pretrain.preset or "tiny"
    shipped = load_preset(preset)
    chosen = merge_layers(recipe.overrides("pretrain"), flags, parse_assignments(assignments))
    model_choices = chosen.get("model", {})
    entry = registry.find_network(model_choices.get("name", "bitimelygpt"))
    base = _collect_preset(preset, entry.name, chosen)
    resolve = partial(resolve_training, "pretrain", config=recipe, pairs=assignments, flags=flags)
    settings = resolve(base)
    objectives.check_name(entry.name, settings.objective.name)
    supervised = _is_supervised(settings, entry.facts)
    _require_data(settings)
    matched_preset = _match_preset(preset, budget or recipe.pretrain.budget)
    name = run or name_run(
        preset, entry.name, settings.objective.name, ("bitimelygpt", entry.facts.objective)
    )
    folder = locate_new(workspace, "runs", name, "--run")
    start, origin = _find_initial_weights(init, workspace, folder, dry_run=dry_run)
    execution = Execution(workspace, force_new, verify, dry_run)
    windows = _prepare_data(settings, execution)
    # a preset of signals, given events
    if windows[0].vocabulary and "tokenizer" not in model_choices:
        base["model"] = adapt_to_events(preset, entry.name, model_choices)
        settings = resolve(base)
    notices: list[str] = []
    if supervised:
        settings, notices = _skip_training(settings, entry.name)
    model = build_model(settings, windows, matched_preset)
    settings = choose_rate(settings, model.config, base, chosen)
    settings = settings.model_copy(update={"model": model.config})
    objectives.check_compatible(model.config, settings.objective.name)
    stamp, preparation = _find_stamp(settings, windows)
    record = RunRecord(
        run=name,
        kind="pretrain",
        model=entry.name,
        preset=preset,
        init=start and storage.hash_file(start / "model.safetensors"),
        init_from=origin,
        settings=settings,
        data=tuple(map(describe_data, windows)),
        parameters=models.count_parameters(model),
        paper_parameters=shipped.get("paper_parameters"),
        leak_free=stamp,
        preparation=preparation,
        seed=settings.train.seed,
        versions=list_versions(),
        verified=verify,
        notices=(
            *list_training_notices(settings, windows, stamp),
            *_list_batch_notices(settings),
            *notices,
        ),
    )
    views = list(map(tuning.drop_test, windows))
    batches, validation = _make_batches(settings, views)
    _load_initial_weights(model, start)
    job = TrainingJob(
        record=record,
        folder=folder,
        model=model,
        objective=objectives.get(settings.objective),
        batches=batches,
        validation=validation,
        windows=windows,
        headline=_describe_size(record),
        search=tuning.plan_search(settings, batches, validation, views),
    )
    return finish_job(job, execution)


def _name_data(flags: Flags, data: str | Sequence[str] | None) -> Flags:
    """`flags` with the views of `data` in the place of theirs."""
    if data is None:
        return flags
    names = (data,) if isinstance(data, str) else tuple(data)
    return merge_layers(flags, {"data": {"names": names}})


def _require_data(settings: Settings) -> None:
    """Raises UserError (config, exit 2) without the name of data."""
    if not settings.data.names:
        raise usage_error(
            "no data", "expected --data", "See: bitimely list datasets", field="--data"
        )


def _describe_size(record: RunRecord) -> str:
    paper = f"; paper: {record.paper_parameters / 1e6:g} M" if record.paper_parameters else ""
    return f"{record.model}: {record.parameters:,} parameters{paper}"


def _prepare_data(settings: Settings, execution: Execution) -> list[Windows]:
    """The windows of each data set, up to the limit."""
    prepare = partial(prepare_windows, execution=execution, config=settings.data, together=True)
    return [
        limit_windows(prepare(data), settings.data.limit, settings.train.seed)
        for data in settings.data.names
    ]


def _skip_training(settings: Settings, model: str) -> tuple[Settings, list[str]]:
    """The settings of a model without pre-training, whose run holds the initial weights for
    `finetune`, and what they leave out.
    """
    notices = []
    if settings.tune.rates:
        notices = [f"{model} has no pre-training: the learning-rate search is skipped."]
    train = settings.train.model_copy(update={"steps": 0})
    return settings.model_copy(update={"train": train, "tune": TuneConfig()}), notices


def _find_stamp(
    settings: Settings, windows: list[Windows]
) -> tuple[bool | str | None, tuple[SamplePreparation, ...]]:
    """The stamp of a run on these windows, and how their values were made."""
    from bitimely_core import objectives

    normalise = "window" if "window" in {view.options.normalise for view in windows} else "channel"
    preparation = tuple(view.preparation for view in windows)
    return objectives.leak_free(settings, normalise=normalise, preparation=preparation), preparation


def _match_preset(preset: str, budget: str | None) -> str | None:
    """The preset whose number of parameters the model is to have; None for a budget of a table.

    Raises UserError (unknown_name, exit 2).
    """
    check_choice("budget", budget, ("table", "matched"))
    return preset if budget == "matched" else None


def _collect_preset(preset: str, name: str, chosen: Flags) -> Flags:
    """Settings of the preset for the model `name`; the user has `chosen` some."""
    shipped = load_preset(preset)
    return {
        "model": collect_dimensions(preset, name, chosen.get("model", {})),
        "objective": {"name": registry.models[name].facts.objective},
        "data": {"names": shipped.get("data", ["synthetic"])},
        "train": shipped.get("train", {}),
    }


def _is_supervised(settings: Settings, facts: registry.ModelFacts) -> bool:
    """Whether the model has no pre-training. Raises UserError (config, exit 2) for objective none
    with a model that has one.
    """
    if settings.objective.name == "none" != facts.objective:
        raise usage_error(
            "objective none",
            "expected an objective that pre-trains",
            "Train without pre-training with: bitimely train MODEL --data VIEW",
            field="objective.name",
        )
    return facts.objective == "none"


def collect_dimensions(preset: str, name: str, chosen: Flags) -> Flags:
    """The model settings of the preset for the model `name`; the user has `chosen` some."""
    return {**find_dimensions(name, preset, chosen), "name": name}


def adapt_to_events(preset: str, name: str, chosen: Flags) -> Flags:
    """The model settings of a preset for signals, changed for events.

    There are as many half-lives as heads, over the same span. The user has `chosen` some settings.
    """
    facts = registry.models[name].facts
    events_on_grid = {} if "events" in facts.input else {"events": "grid"}
    model = collect_dimensions(preset, name, {**chosen, **events_on_grid, "tokenizer": "codes"})
    events = load_preset("3m").get(facts.family, {})
    adapted = {**model, **{key: events[key] for key in ("tokenizer", "decay") if key in events}}
    if "decay" in events:
        first, *_, last = events["decay"]["months"]
        heads = {**adapted, **chosen}.get("heads", ModelConfig().heads)
        months = [first * (last / first) ** (i / max(heads - 1, 1)) for i in range(heads)]
        adapted["decay"] = {**events["decay"], "months": [round(month, 3) for month in months]}
    return {**adapted, **events_on_grid}


def build_model(settings: Settings, windows: list[Windows], matched_preset: str | None) -> Model:
    """The model for these windows with random weights; with `matched_preset` as many parameters as
    BiTimelyGPT has there.
    """
    import torch

    from bitimely_core import models
    from bitimely_core.models.patch_lengths import choose_patch

    torch.manual_seed(settings.train.seed)
    config = settings.model.model_copy(update={"numbers": choose_numbers(windows, settings.model)})
    config = choose_patch(config, windows[0].options)
    shape: Flags = {**derive_model_shape(windows, config), "numbers": config.numbers}
    dimensions = config.model_dump(by_alias=True, exclude={"name", *shape})
    if matched_preset is not None:
        size = {
            key: shape[key] for key in ("channels", "length", "codes", "numbers") if key in shape
        }
        chosen = {"events": config.events, "tokenizer": config.tokenizer}
        dimensions |= models.match_parameters(config.name, matched_preset, **size, **chosen)
    model = models.build(config.name, **shape, **dimensions)
    model.fit_numbers(find_moments(windows))
    return model


def choose_rate(settings: Settings, config: ModelConfig, *layers: Flags) -> Settings:
    """With the learning rate of the tokens of the model where none of the `layers` has one."""
    from bitimely_core.models.patch_lengths import choose_learning_rate

    rate = choose_learning_rate(config)
    if rate is None or any("lr" in layer.get("train", {}) for layer in layers):
        return settings
    return settings.model_copy(update={"train": settings.train.model_copy(update={"lr": rate})})


def _list_batch_notices(settings: Settings) -> list[str]:
    """The effect of gradient accumulation and several processes on an objective that compares the
    rows of a micro-batch.
    """
    from bitimely_core.train.distributed import get_world_size

    parts, rows = settings.train.accumulate * get_world_size(), settings.train.batch_size
    if parts == 1 or settings.objective.least_rows == 1:
        return []
    return [
        f"{settings.objective.name} compares each window with the others of its micro-batch: "
        f"{rows // parts} windows, not {rows}."
    ]


def _make_batches(
    settings: Settings, views: list[tuning.TrainValidation]
) -> tuple[Batches, Batches | None]:
    """Batches of the training splits, and of the validation splits where there are any."""
    from bitimely_core import data
    from bitimely_core.train.distributed import get_world_size

    train, training = settings.train, [view.train for view in views]
    least = _require_batch_rows(settings, train.accumulate * get_world_size())
    batches = data.mix_batches(
        training, train.batch_size, seed=train.seed, ties=settings.model.ties, least=least
    )
    validation = [view.validation for view in views]
    if not any(map(len, validation)):
        return batches, None
    return batches, data.mix_batches(
        validation,
        train.batch_size,
        shuffle=False,
        least=_require_batch_rows(settings, get_world_size()),
    )


def _require_batch_rows(settings: Settings, parts: int) -> int:
    """Rows that a batch in `parts` parts needs for its objective; a smaller last batch of an epoch
    is dropped.
    """
    rows = settings.objective.least_rows
    if rows > 1 and settings.train.batch_size < rows * parts:
        raise usage_error(
            f"{settings.train.batch_size} windows in {count_nouns(parts, 'part')}",
            f"{settings.objective.name} compares windows with each other: "
            f"expected at least {rows} in each part",
            f"Use --batch-size {rows * parts} or more",
            field="train.batch_size",
        )
    return rows * parts if rows > 1 else 1


def _find_initial_weights(
    init: str | Path | None, workspace: Path, folder: Path, *, dry_run: bool
) -> tuple[Path | None, dict[str, str] | None]:
    """The model folder that `--init` names, and its origin: the run, or repository and commit,
    which a resumed run keeps.

    `init` is a run, its folder, a model folder, else a name on the hub, which a dry run does not
    download.
    """
    if init is None:
        return None, None
    folders = [Path(init) / "model", Path(init)]
    if str(init) == Path(init).name != "..":
        folders.insert(0, locate(workspace, "runs", str(init)) / "model")
    for path in folders:
        if not (path / "model.safetensors").is_file():
            continue
        if has_result(path / "run.json"):  # of an export
            check_result(path / "run.json")
        run = path.parent
        return path, {"run": run.name} if run.parent == workspace / "runs" else None
    if dry_run:
        return None, None
    record = folder / "run.json"
    return hub.fetch_model(
        str(init), RunRecord.load(record).init_from if record.is_file() else None
    )


def _load_initial_weights(model: Model, start: Path | None) -> None:
    """Copy the weights of the model folder `start`, if any. Adapters stay random where the channels
    differ, and those of further data sets.
    """
    from bitimely_core import models

    if start is None:
        return
    other = models.load(start)
    other.select_adapter(0)
    other.reset_adapter(channels=model.config.channels, length=model.config.length)
    expected = {
        name: value for name, value in model.state_dict().items() if not name.startswith("others.")
    }
    loaded = other.state_dict()
    shapes = [
        {name: value.shape for name, value in tensors.items()} for tensors in (expected, loaded)
    ]
    differing = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if differing:
        raise input_error(
            Reason.SHAPES_DIFFER,
            f"{len(differing)} tensors differ: {', '.join(differing[:5])}",
            "expected the same architecture",
            "Use the preset and model of the other run",
            file=str(start),
        )
    model.load_state_dict({**model.state_dict(), **loaded})
    model.target_scale.fill_(math.nan)
