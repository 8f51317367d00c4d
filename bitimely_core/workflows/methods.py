"""`train` of a method without a network: it is fitted at once, and kept as a run like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitimely_core.config import RESUME_EXEMPT, FinetuneConfig, Settings, TrainConfig, TuneConfig
from bitimely_core.errors import usage_error
from bitimely_core.methods.method_contract import (
    MethodConfig,
    MethodFit,
    MethodRows,
    fit_method,
    resolve_config,
)
from bitimely_core.progress import announce
from bitimely_core.run import claim_folder, describe_data, list_versions
from bitimely_core.schemas.runs import FinalLosses, RunRecord
from bitimely_core.store import storage
from bitimely_core.store.workspace import locate_new
from bitimely_core.workflows.finetune import describe_fraction, open_view
from bitimely_core.workflows.jobs import (
    TrainingPlan,
    TrainingResult,
    count_labels,
    describe_plan,
    describe_run,
    list_training_notices,
    seal_run,
)
from bitimely_core.workflows.prepare import Execution, resolve_training

if TYPE_CHECKING:
    from bitimely_core.recipe import Recipe
    from bitimely_core.tokens import Windows
    from bitimely_core.train.tuning import TrainValidation
    from bitimely_core.workflows.jobs import Flags

# what of [model] and [train] a method reads beside its own settings
MODEL_SETTINGS = {"name", "channels", "length", "codes"}
TRAIN_SETTINGS = RESUME_EXEMPT | {"seed", "precision", "core_precision"}


def resolve_method(
    name: str, data: str, recipe: Recipe, pairs: list[str], flags: Flags, preset: str | None
) -> Settings:
    """The settings of a method. Raises UserError (config, exit 2) for those of networks."""
    if preset:
        raise usage_error(
            f"preset {preset}",
            f"expected none: {name} has no network",
            "Leave it out",
            field="--preset",
        )
    base = {"model": {"name": name}, "objective": {"name": "none"}, "data": {"names": (data,)}}
    settings = resolve_training("finetune", base, config=recipe, pairs=pairs, flags=flags)
    changed = {
        "model": _list_changed(settings.model, MethodConfig(), MODEL_SETTINGS),
        "train": _list_changed(settings.train, TrainConfig(), TRAIN_SETTINGS),
        "finetune": _list_changed(settings.finetune, FinetuneConfig(), set()),
        "tune": _list_changed(settings.tune, TuneConfig(), set()),
    }
    for section, names in changed.items():
        for field in names:
            raise usage_error(
                f"{name} has no network, so it does not read this",
                "expected its own settings",
                f"Leave it out, or name a network such as resnet; see: docs/settings.md, {name}",
                field=f"{section}.{field}",
            )
    return settings


def _list_changed(section: Any, defaults: Any, read: set[str] | frozenset[str]) -> list[str]:
    """Settings that are neither read nor at their defaults."""
    return [
        name
        for name in type(defaults).model_fields
        if name not in read and getattr(section, name) != getattr(defaults, name)
    ]


def train_method(plan: TrainingPlan, run: str | None, execution: Execution) -> TrainingResult:
    """Fit the method of a plan on its view, in the folder of a run.

    Raises UserError: as `finetune`; config (exit 2) for data that the method does not read.
    """
    settings = plan.settings
    windows, view = open_view(plan.view, settings, execution)
    settings = settings.model_copy(update={"model": resolve_config(settings.model, windows)})
    record = _describe_run(run, settings, windows, view, verify=execution.verify)
    folder = locate_new(execution.workspace, "runs", record.run, "--run")
    if execution.dry_run:
        return describe_plan(record, folder, windows)
    for line in record.notices:
        announce(line)
    if is_new := claim_folder(folder, record, force_new=execution.force_new):
        rows = MethodRows(view.train), MethodRows(view.validation)
        fitted = fit_method(settings.model, MethodFit(*rows, record.seed))
        fitted.save(folder / "model")
        weights = storage.hash_file(folder / "model" / "model.safetensors")
        done = {"finished": True, "final": FinalLosses(), "device": "cpu", "weights": weights}
        record = record.model_copy(update={**done, "parameters": fitted.count_parameters()})
    else:
        record = RunRecord.load(folder / "run.json")
    seal_run(folder, record, [windows], trained=is_new)
    return {
        **describe_run(record, folder),
        "parameters": record.parameters,
        "trained": is_new,
        "writer": True,
        "steps": 0,
        "final": None,
    }


def _describe_run(
    run: str | None, settings: Settings, windows: Windows, view: TrainValidation, *, verify: bool
) -> RunRecord:
    """`run.json` before the method is fitted."""
    notices = list_training_notices(settings, [windows], stamp=True)  # no objective to note
    if settings.data.fraction < 1:
        used = len(set(view.train.subjects()))
        notices.insert(0, describe_fraction(windows, used, "training"))
    method, name = settings.model.name, settings.data.names[0]
    return RunRecord(
        run=run or f"{method}-{name.rpartition('/')[2]}",
        kind="train",
        model=method,
        settings=settings,
        data=(describe_data(windows),),
        preparation=(windows.preparation,),
        seed=settings.train.seed,
        versions=list_versions(),
        verified=verify,
        notices=tuple(notices),
        train_windows=len(view.train),
        train_label_counts=count_labels(view.train),
    )
