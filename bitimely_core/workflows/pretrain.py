"""`pretrain`: settings, windows and a model with random or given weights, trained on an objective
without labels.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core import registry, storage
from bitimely_core.config import (
    ModelConfig,
    Settings,
    TuneConfig,
    load_preset,
    merge_layers,
    parse_assignments,
)
from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.recipe import load_recipe
from bitimely_core.records import check_result, has_result
from bitimely_core.run import describe_data, list_versions
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.tokens import SamplePreparation
from bitimely_core.train import tuning
from bitimely_core.types import Batches, Progress
from bitimely_core.workflows import hub
from bitimely_core.workflows.prepare import prepare_windows, resolve_training
from bitimely_core.workflows.train import (
    Flags,
    Say,
    TrainingJob,
    TrainingResult,
    choose_numbers,
    derive_model_shape,
    find_moments,
    list_training_notices,
    run_job,
    summarize_job,
)
from bitimely_core.workspace import locate, locate_new, name_run

if TYPE_CHECKING:
    from bitimely_core.models.base import Model
    from bitimely_core.tokens import Windows

BUDGETS = ("table", "matched")


def pretrain(
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
    progress: Progress | None = None,
    say: Say | None = None,
) -> TrainingResult:
    """Pre-train a model on the windows of `data.names`; makes missing tokens first, resumes a
    stopped run exactly.

    Raises UserError: config, unknown_name, settings_differ (2), incomplete (4), integrity (5),
    resources (6), locked (7).
    """
    from bitimely_core import models, objectives
    from bitimely_core.data import limit_windows

    recipe = load_recipe(config) if config else None
    preset = preset or (recipe.pretrain.preset if recipe else None) or "tiny"
    shipped = load_preset(preset)
    given = merge_layers(
        recipe.overrides("pretrain") if recipe else {},
        flags or {},
        parse_assignments(assignments or []),
    )
    entry = registry.models[given.get("model", {}).get("name", "bitimelygpt")]
    base = _collect_preset(shipped, entry.name, entry.facts)

    resolve = partial(
        resolve_training, "pretrain", config=recipe, pairs=assignments or [], flags=flags or {}
    )
    settings = resolve(base)
    objectives.check_name(entry.name, settings.objective.name)
    supervised = _is_supervised(settings, entry.facts)
    if not settings.data.names:
        raise usage_error(
            "no data", "expected --data", "See: bitimely list datasets", field="--data"
        )
    budget = _check_budget(budget or (recipe.pretrain.budget if recipe else None))
    name = run or name_run(
        preset, entry.name, settings.objective.name, ("bitimelygpt", entry.facts.objective)
    )
    folder = locate_new(workspace, "runs", name, "--run")
    start, origin = _find_initial_weights(init, workspace, folder, dry_run=dry_run)
    prepare = partial(
        prepare_windows,
        workspace=workspace,
        config=settings.data,
        verify=verify,
        dry_run=dry_run,
        progress=progress,
        together=True,
    )
    windows = [
        limit_windows(prepare(one), settings.data.limit, settings.train.seed)
        for one in settings.data.names
    ]
    # a preset of signals, given events
    if windows[0].vocabulary and "tokenizer" not in given.get("model", {}):
        base["model"] = _adapt_to_events(base["model"], given.get("model", {}), entry.facts)
        settings = resolve(base)
    notices = (
        [f"{entry.name} has no pre-training: the learning-rate search is skipped."]
        if supervised and settings.tune.rates
        else []
    )
    if supervised:  # the run holds the initial weights, for finetune
        settings = settings.model_copy(
            update={"train": settings.train.model_copy(update={"steps": 0}), "tune": TuneConfig()}
        )
    model = _build_model(settings, windows, preset if budget == "matched" else None)
    settings = settings.model_copy(update={"model": model.config})
    objectives.check_compatible(model.config, settings.objective.name)
    stamp, preparation = _find_stamp(settings, windows)
    record = RunRecord(
        run=name,
        kind="pretrain",
        model=entry.name,
        preset=preset,
        init=None if start is None else storage.hash_file(start / "model.safetensors"),
        init_from=origin,
        settings=settings,
        data=tuple(describe_data(one) for one in windows),
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
    views = [tuning.drop_test(one) for one in windows]
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
    return (
        summarize_job(job)
        if dry_run
        else run_job(job, force_new=force_new, progress=progress, say=say)
    )


def _describe_size(record: RunRecord) -> str:
    paper = f"; paper: {record.paper_parameters / 1e6:g} M" if record.paper_parameters else ""
    return f"{record.model}: {record.parameters:,} parameters{paper}"


def _find_stamp(
    settings: Settings, windows: list[Windows]
) -> tuple[bool | str | None, tuple[SamplePreparation, ...]]:
    """The stamp of a run on these windows, and how their values were made."""
    from bitimely_core import objectives

    normalise = "window" if "window" in {one.options.normalise for one in windows} else "channel"
    preparation = tuple(one.preparation for one in windows)
    return objectives.leak_free(settings, normalise=normalise, preparation=preparation), preparation


def _check_budget(budget: str | None) -> str:
    """`budget`, or the first of `BUDGETS`. Raises UserError (unknown_name, exit 2)."""
    check_choice("budget", budget, BUDGETS)
    return budget or BUDGETS[0]


def _collect_preset(shipped: Flags, name: str, facts: registry.ModelFacts) -> Flags:
    """Settings of the preset `shipped` for the model `name`."""
    return {
        "model": {**shipped.get(facts.family, {}), "name": name},
        "objective": {"name": facts.objective},
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
            "Train without pre-training with: bitimely finetune RUN --from-scratch",
            field="objective.name",
        )
    return facts.objective == "none"


def _adapt_to_events(model: Flags, given: Flags, facts: registry.ModelFacts) -> Flags:
    """The model settings of a preset for signals, changed for events; as many half-lives as heads,
    over the same span.
    """
    events = load_preset("3m").get(facts.family, {})
    out = {**model, **{key: events[key] for key in ("tokenizer", "decay") if key in events}}
    if "decay" in events:
        span, heads = events["decay"]["months"], {**out, **given}.get("heads", ModelConfig().heads)
        months = [span[0] * (span[-1] / span[0]) ** (i / max(heads - 1, 1)) for i in range(heads)]
        out["decay"] = {**events["decay"], "months": [round(month, 3) for month in months]}
    return out if "events" in facts.input else {**out, "events": "grid"}


def _build_model(settings: Settings, windows: list[Windows], matched_preset: str | None) -> Model:
    """The model for these windows with random weights; with `matched_preset` as many parameters as
    BiTimelyGPT has there.
    """
    import torch

    from bitimely_core import models

    torch.manual_seed(settings.train.seed)
    config = settings.model.model_copy(update={"numbers": choose_numbers(windows, settings.model)})
    shape: Flags = {**derive_model_shape(windows, config), "numbers": config.numbers}
    dimensions = config.model_dump(by_alias=True, exclude={"name", *shape})
    if matched_preset is not None:
        size = {
            key: shape[key] for key in ("channels", "length", "codes", "numbers") if key in shape
        }
        dimensions |= models.match_parameters(
            config.name, matched_preset, **size, events=config.events
        )
    model = models.build(config.name, **shape, **dimensions)
    model.fit_numbers(find_moments(windows))
    return model


def _list_batch_notices(settings: Settings) -> list[str]:
    """The effect of gradient accumulation and several processes on an objective that compares the
    rows of a micro-batch.
    """
    from bitimely_core.train.distributed import get_world_size

    parts, rows = settings.train.accumulate * get_world_size(), settings.train.batch_size
    if parts == 1 or settings.objective.least_rows == 1:
        return []
    return [
        f"{settings.objective.name} compares each window with the others of its micro-batch: {rows // parts} windows, not {rows}."
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
            f"{settings.train.batch_size} windows in {parts} part{'s' if parts > 1 else ''}",
            f"{settings.objective.name} compares windows with each other: expected at least {rows} in each part",
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
    inside = (
        [locate(workspace, "runs", str(init)) / "model"]
        if str(init) == Path(init).name != ".."
        else []
    )
    for path in (*inside, Path(init) / "model", Path(init)):
        if (path / "model.safetensors").is_file():
            if has_result(path / "run.json"):  # of an export
                check_result(path / "run.json")
            return path, {
                "run": path.parent.name
            } if path.parent.parent == workspace / "runs" else None
    if dry_run:
        return None, None
    return hub.fetch_model(
        str(init),
        RunRecord.load(folder / "run.json").init_from if (folder / "run.json").is_file() else None,
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
    shapes = [{name: value.shape for name, value in one.items()} for one in (expected, loaded)]
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
