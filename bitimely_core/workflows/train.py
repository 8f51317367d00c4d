"""The verbs that train: pretrain and finetune. Each resolves settings, claims a run folder, calls `fit` and writes what it found."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import registry, storage
from bitimely_core.config import ModelConfig, Settings, TuneConfig, list_presets, load_preset, merge_layers, parse_assignments
from bitimely_core.errors import Finding, Reason, input_error, usage_error
from bitimely_core.evaluate import LOWER_IS_BETTER
from bitimely_core.evaluate.predict import measure_task
from bitimely_core.recipe import load_recipe, resolve_settings
from bitimely_core.report import run_page
from bitimely_core.report.model_card import model_card, write_card
from bitimely_core.run import (
    FORMAT,
    adapter_channels,
    check_weights,
    claim_folder,
    find_adapter,
    flatten_compared,
    list_versions,
    read_run,
    vocabulary_digest,
)
from bitimely_core.schemas import RunRecord
from bitimely_core.training import tuning
from bitimely_core.types import Progress
from bitimely_core.workflows import hub
from bitimely_core.workflows.prepare import prepare_windows
from bitimely_core.workspace import dataset_of, run_folder, run_name

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows

Say = Callable[[str], None]


def pretrain(
    *,
    preset: str | None = None,
    budget: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, Any] | None = None,
    init: str | Path | None = None,
    run: str | None = None,
    workspace: Path = Path("workspace"),
    force_new: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Pre-train a model on the windows of `data.names`; makes missing tokens first, continues a stopped run exactly.

    Returns run, folder, parameters, steps, final (last logged loss and rel), trained (False when it was already finished).
    Raises UserError: config, unknown_name, settings_differ (2), incomplete (4), integrity (5), resources (6), locked (7).
    """
    from bitimely_core import data, models, objectives

    recipe = load_recipe(config) if config else None
    preset = preset or (recipe.pretrain.preset if recipe else None) or "tiny"
    budget = budget or (recipe.pretrain.budget if recipe else None) or "table"
    shipped = load_preset(preset)
    asked = merge_layers(recipe.overrides("pretrain") if recipe else {}, flags or {}, parse_assignments(assignments or []))
    entry = registry.models[asked.get("model", {}).get("name", "bitimelygpt")]
    name, facts = entry.name, entry.facts
    base = {
        "model": {**shipped.get(facts.family, {}), "name": name},
        "objective": {"name": facts.objective},
        "data": {"names": shipped.get("data", ["synthetic"])},
        "train": shipped.get("train", {}),
    }
    chosen = resolve_settings("pretrain", base, config=recipe, pairs=assignments or [], flags=flags or {})
    objectives.refuse_pair(name, chosen.objective.name)
    supervised = _supervised_only(chosen, facts)
    _options_of_tokenize(chosen)
    windows = [prepare_windows(one, workspace, chosen.data, verify=verify, progress=progress) for one in chosen.data.names]
    windows = [data.limit_windows(one, chosen.data.limit, chosen.train.seed) for one in windows]
    first = windows[0]
    if vocabulary_digest(first) and "tokenizer" not in asked.get("model", {}):  # a preset of signals, given events
        events = load_preset("3m").get(facts.family, {})
        base["model"] |= {key: events[key] for key in ("tokenizer", "decay") if key in events}
        if "decay" in events:  # as many half-lives as heads, over the same span
            span, heads = events["decay"]["months"], {**base["model"], **asked.get("model", {})}.get("heads", ModelConfig().heads)
            months = [span[0] * (span[-1] / span[0]) ** (i / max(heads - 1, 1)) for i in range(heads)]
            base["model"]["decay"] = {**events["decay"], "months": [round(month, 3) for month in months]}
        base["model"] |= {} if "events" in facts.input else {"events": "grid"}
        chosen = resolve_settings("pretrain", base, config=recipe, pairs=assignments or [], flags=flags or {})
    untuned = supervised and chosen.tune.rates is not None
    if supervised:  # the run holds the initial weights, for finetune
        chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update={"steps": 0}), "tune": TuneConfig()})
    shape = _model_shape(windows, chosen)
    dimensions = chosen.model.model_dump(by_alias=True, exclude={"name", *shape})
    if budget == "matched":
        dimensions |= models.matched(
            name, preset, channels=shape["channels"], length=shape["length"], codes=shape.get("codes"), events=chosen.model.events
        )
    set_seeds(chosen.train.seed)
    model = models.build(name, **shape, **dimensions)
    chosen = chosen.model_copy(update={"model": model.config})
    objectives.refuse_unfit(model.config, chosen.objective.name)
    stamp = leak_stamp(chosen, windows)
    parameters = models.parameters(model)
    run = run or run_name(preset, name, chosen.objective.name, ("bitimelygpt", facts.objective))
    folder = workspace / "runs" / run
    start, origin = _find_initial_weights(init, workspace, folder, dry_run=dry_run)
    body: dict[str, Any] = {
        "format_version": FORMAT,
        "run": run,
        "kind": "pretrain",
        "model": name,
        "preset": preset,
        "source": None,
        "init": None if start is None else storage.hash_file(start / "model.safetensors"),
        **({"init_from": origin} if origin else {}),
        "settings": chosen.model_dump(mode="json", by_alias=True),
        "data": [describe_data(w) for w in windows],
        "parameters": parameters,
        "paper_parameters": shipped.get("paper_parameters"),
        "leak_free": stamp,
        "seed": chosen.train.seed,
        "versions": list_versions(),
        "verified": verify,
        "notices": [
            *training_notices(chosen, windows, stamp),
            *_contrastive_batch_note(chosen),
            *([f"{name} has no pre-training, so there is no learning rate to choose here."] if untuned else []),
        ],
    }
    views = [tuning.without_test(w) for w in windows]
    batches = data.mix_batches(
        [view["train"] for view in views],
        chosen.train.batch_size,
        seed=chosen.train.seed,
        ties=chosen.model.ties,
        least=_min_batch_rows(chosen, chosen.train.accumulate * chosen.train.devices),
    )
    held = [view["validation"] for view in views]
    validation = (
        data.mix_batches(held, chosen.train.batch_size, shuffle=False, least=_min_batch_rows(chosen, chosen.train.devices))
        if any(map(len, held))
        else None
    )
    trials = tuning.plan_tuning(chosen, batches, validation, " and ".join(w.name for w in windows))
    if dry_run:
        return dry_run_summary(
            body, folder, model, None if supervised else objectives.get(chosen.objective), batches, chosen, first, trials
        )
    if say:
        paper = f"; the paper says {shipped['paper_parameters'] / 1e6:g} M" if shipped.get("paper_parameters") else ""
        say(f"{name}: {parameters:,} parameters{paper}")
        say(describe_schedule(chosen, batches))
        for line in body["notices"]:
            say(line)
    if start is not None:
        _initialise(model, start)
    identity = {"data": [w.fingerprint for w in windows]}
    objective = objectives.get(chosen.objective)
    tune = partial(tuning.select_learning_rate, views=views, **trials) if trials else None
    result = _fit(model, batches, objective, chosen, folder, body, identity, validation, tune, progress, force_new, say)
    if result["writer"] and (result["trained"] or not (folder / "train_subjects.json").is_file()):  # or a call was killed in between
        _train_subjects(folder, windows)
        write_card(folder)
        run_page.write_training_page(folder)
    return result


def finetune(
    source: str | Path,
    *,
    data: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, Any] | None = None,
    run: str | None = None,
    workspace: Path = Path("workspace"),
    force_new: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Fine-tune the model of run `source` with a supervised head on the labelled view `data`. Returns as `pretrain`.

    On the data set of the pre-training a fifth of the training subjects is used (the paper, section on experiments), else all.
    """
    from bitimely_core import data as loading
    from bitimely_core import models
    from bitimely_core.models import heads

    recipe = load_recipe(config) if config else None
    parent = run_folder(source, workspace)
    origin = read_run(parent)
    require_finished(parent, origin)
    names: tuple[str, ...] = (data,) if data else tuple(recipe.overrides("finetune").get("data", {}).get("names", ())) if recipe else ()
    if len(names) != 1:
        raise usage_error("no labelled view", "expected one --data", "For example --data synthetic/staging", field="--data")
    shipped = load_preset(origin["preset"]) if origin["preset"] in list_presets() else {}
    same = dataset_of(names[0], workspace) in {d["dataset"] for d in origin["data"]}
    base = merge_layers(
        {k: origin["settings"][k] for k in ("model", "objective")},
        {"data": {"names": names, "fraction": 0.2 if same else 1.0}, "train": {"epochs": 5, "lr": 1e-4, **shipped.get("finetune", {})}},
    )
    chosen = resolve_settings(
        "finetune", base, config=recipe, pairs=assignments or [], flags=merge_layers(flags or {}, {"data": {"names": names}})
    )
    windows = prepare_windows(names[0], workspace, chosen.data, verify=verify, progress=progress)
    task = windows.task
    if task == "none":
        raise usage_error(f"{names[0]} has no labels", "expected a labelled view", "See: bitimely list views", field="--data")
    windows = loading.limit_windows(windows, chosen.data.limit, chosen.train.seed)
    view = tuning.TrainValidation(
        loading.sample_subjects(windows["train"], chosen.data.fraction, seed=chosen.train.seed), windows["validation"]
    )
    training = view["train"]
    if len(training) == 0:
        raise input_error(Reason.NO_INPUT, f"{windows.name} has no training windows", "expected at least one", "Ingest more recordings")
    facts = registry.models[origin["model"]].facts
    set_seeds(chosen.train.seed)
    scratch = chosen.finetune.from_scratch or chosen.objective.name == "none"
    model = models.build(**origin["settings"]["model"]) if scratch else models.load(check_weights(parent, origin))
    at = find_adapter(windows, origin)
    model.settle(at or 0)
    shape = _model_shape([windows], origin["settings"]["model"])
    renewed = model.adapt(**{k: shape[k] for k in ("channels", "length", "codes") if k in shape}, renew=at is None)
    chosen = chosen.model_copy(
        update={"model": model.config, "finetune": chosen.finetune.model_copy(update={"readout": chosen.finetune.readout or facts.readout})}
    )
    head = heads.build(
        model,
        task=task,
        outputs=max(windows.classes, 1),
        readout=chosen.finetune.readout,
        layers=chosen.finetune.layers,
        layer_merge=chosen.finetune.layer_merge,
        freeze=chosen.finetune.freeze,
    )
    target = training.targets(None)
    assert target is not None, "a view with a task has targets"
    heads.standardise(head, target)
    run = run or f"{origin['run']}-{names[0].partition('/')[2] or names[0]}" + ("-scratch" if chosen.finetune.from_scratch else "")
    folder = workspace / "runs" / run
    said = [
        _describe_reset(windows, origin, renewed) if renewed else "",
        f"fine-tuning on {len(set(training.subjects())):,} of {len(set(windows['train'].subjects())):,} training subjects"
        if chosen.data.fraction < 1
        else "",
        *training_notices(chosen, [windows], None if scratch else origin["leak_free"], pretrained=not scratch),
    ]
    body = {
        "format_version": FORMAT,
        "run": run,
        "kind": "finetune",
        "model": origin["model"],
        "preset": origin["preset"],
        "source": {"run": origin["run"], "weights": None if scratch else storage.hash_file(parent / "model" / "model.safetensors")},
        "init": None,
        "settings": chosen.model_dump(mode="json", by_alias=True),
        "data": [describe_data(windows)],
        "pretraining_data": [] if scratch else origin["data"],
        "pretraining_steps": 0 if scratch else origin["final"]["step"] if origin.get("final") else None,
        "parameters": models.parameters(head),
        "paper_parameters": origin.get("paper_parameters"),
        "leak_free": None if scratch else origin["leak_free"],
        "seed": chosen.train.seed,
        "versions": list_versions(),
        "verified": verify,
        "renewed": renewed,
        "notices": [line for line in said if line],
        "train_windows": len(training),
        "train_label_counts": _label_counts(training),
    }
    batches = loading.batches(training, chosen.train.batch_size, seed=chosen.train.seed, ties=chosen.model.ties)
    held = view["validation"]
    validation = loading.batches(held, chosen.train.batch_size, seed=0, shuffle=False) if len(held) else None
    trials = tuning.plan_tuning(chosen, batches, validation, windows.name)
    if dry_run:
        return dry_run_summary(body, folder, head, heads.losses[task], batches, chosen, windows, trials)
    if say:
        say(f"{origin['model']} with a head on {chosen.finetune.readout}: {body['parameters']:,} parameters")
        say(describe_schedule(chosen, batches))
        for line in body["notices"]:
            say(line)
    identity = {"data": [windows.fingerprint], "source": body["source"]}
    measure = partial(measure_task, device=chosen.train.device)
    tune = (
        partial(tuning.select_learning_rate, views=[view], measure=measure, lower_is_better=LOWER_IS_BETTER, **trials) if trials else None
    )
    result = _fit(head, batches, heads.losses[windows.task], chosen, folder, body, identity, validation, tune, progress, force_new, say)
    if result["writer"] and (result["trained"] or not (folder / "train_subjects.json").is_file()):
        _train_subjects(folder, [windows], parent=None if scratch else parent)
        write_card(folder)
        run_page.write_training_page(folder)
    return result


def _fit(
    model: nn.Module,
    batches: Any,
    objective: Any,
    chosen: Settings,
    folder: Path,
    body: dict[str, Any],
    identity: dict[str, Any],
    validation: Any,
    tune: Callable[..., dict[str, Any]] | None,
    progress: Progress | None,
    force_new: bool,
    say: Say | None,
) -> dict[str, Any]:
    """Claim `folder`, choose the learning rate where `tune` is given, train, and write what was found.

    The settings of the run hold the rate that was chosen, `tuning.around` the one that was asked for, so that the same command knows its
    run again.
    """
    from bitimely_core.training import loop
    from bitimely_core.training.distributed import barrier, is_resuming, rank

    result = {
        "run": body["run"],
        "folder": str(folder),
        "parameters": body["parameters"],
        "leak_free": body["leak_free"],
        "format_version": FORMAT,
    }
    writer, anew = rank() == 0, force_new and not is_resuming()
    former = {} if anew or not (folder / "run.json").is_file() else read_run(folder).get("tuning") or {}
    if tune and former.get("around") == chosen.train.lr:
        chosen, body, tune = *_apply_tuned(chosen, body, former), None
    if writer:
        claim_folder(folder, body, force_new=anew)
    barrier()
    done = read_run(folder)
    if done.get("finished"):
        return {
            **result,
            "trained": False,
            "writer": writer,
            "steps": done["final"]["step"],
            "final": done["final"],
            "notices": done["notices"],
        }

    def log(line: dict[str, Any], what: str = "") -> None:
        if progress is not None and line.get("split") == "train":
            progress(f"{body['kind']} {body['run']}{what}\tloss {line['loss']:.4g}", line["step"], line.get("of"))

    def notice(finding: Finding) -> None:
        if say is not None and writer:
            say(finding.line())

    if tune:
        record = tune(
            model,
            batches,
            objective,
            validation,
            chosen=chosen,
            folder=folder / "tuning",
            identity={**identity, "settings": _tuning_identity(body)},
            log=lambda rate, line: log(line, f", rate {rate:g}"),
        )
        chosen, body = _apply_tuned(chosen, body, record)
        if writer:
            storage.write_json(folder / "run.json", {**body, "finished": False})
            if say is not None:
                say(f"learning rate {tuning.describe_tuning(record)}")
    identity |= {"settings": _tuning_identity(body)}
    fitted = loop.fit(
        model, batches, objective, config=chosen.train, validation=validation, folder=folder, identity=identity, log=log, notice=notice
    )
    if writer:
        last = {line["split"]: line for line in loop.metrics(folder)}
        final = {
            "step": fitted["steps"],
            "loss": None,
            "rel": None,
            **{k: v for k, v in last.get("train", {}).items() if k in {"loss", "rel"}},
        }
        final["validation"] = {k: last["validation"].get(k) for k in ("loss", "rel")} if "validation" in last else None
        weights = storage.hash_file(folder / "model" / "model.safetensors")
        body = {**body, "finished": True, "final": final, "device": str(fitted["device"]), "weights": weights}
        storage.write_json(folder / "run.json", body)
        storage.write_bytes(folder / "model_card.md", model_card(RunRecord.parse(body, folder / "run.json")).encode())
    return {**result, "trained": True, "writer": writer, "steps": fitted["steps"], "final": body.get("final"), "notices": body["notices"]}


def _apply_tuned(chosen: Settings, body: dict[str, Any], record: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Settings and description of the run with the rate that was chosen."""
    chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update={"lr": record["lr"]})})
    return chosen, {**body, "settings": chosen.model_dump(mode="json", by_alias=True), "tuning": record}


def require_finished(folder: Path, body: dict[str, Any]) -> None:
    """Refuse a run whose training has not ended. Raises UserError (incomplete, exit 4) with the command that ends it."""
    if not body.get("finished"):
        raise input_error(
            Reason.INCOMPLETE,
            "the training of this run has not ended",
            "expected a finished run",
            "Repeat the command that started it: it continues where it stopped",
            file=str(folder),
        )


def set_seeds(seed: int) -> None:
    """Seed the initial weights."""
    import torch

    torch.manual_seed(seed)


def describe_data(windows: Windows) -> dict[str, Any]:
    """What a run says about its data."""
    index = windows.index
    audit = {
        split: {"windows": len(windows[split]), "subjects": len(set(windows[split].subjects()))}
        for split in ("train", "validation", "test")
    }
    return {
        "name": windows.name,
        "dataset": windows.dataset,
        "view": windows.view,
        "fingerprint": windows.fingerprint,
        "channels": windows.channels,
        "channel_names": list(windows.channel_names),
        "length": windows.length,
        "rate": windows.rate,
        "reading": {key: windows.options.get(key) for key in ("normalise", "bandpass", "notch", "leakage", "landmark")},
        "split": windows.split,
        "windows": len(index),
        "audit": audit,
        "class_names": list(windows.class_names),
        **({"vocabulary": vocabulary_digest(windows)} if vocabulary_digest(windows) else {}),
    }


def _model_shape(windows: list[Any], chosen: Any) -> dict[str, Any]:
    """What the data decide about a model: channels of each set and the longest window; events: the vocabulary and the longest sequence.

    Raises UserError (config, exit 2) for signals with codes, events without, or events of several vocabularies.
    """
    from bitimely_core.models.adapters import grid_shape
    from bitimely_core.tokens import EventSequences

    model = chosen if isinstance(chosen, dict) else chosen.model.model_dump()
    first = windows[0]
    shape: dict[str, Any] = {"channels": first.channels, "length": max(w.length for w in windows)}
    gridded = model.get("events") == "grid"
    if all(isinstance(w, EventSequences) for w in windows) and (gridded or model["tokenizer"] == "codes"):
        if len({vocabulary_digest(w) for w in windows}) > 1:
            raise usage_error(
                f"{' and '.join(w.name for w in windows)} have different vocabularies",
                "expected one",
                "Tokenize them together, or pre-train on one of them",
                field="--data",
            )
        return grid_shape(first.codes, model["horizon"]) if gridded else {**shape, "codes": first.codes}
    if model["tokenizer"] == "codes" or any(isinstance(w, EventSequences) for w in windows):
        kinds = {w.name: "events" if isinstance(w, EventSequences) else "signals" for w in windows}
        raise usage_error(
            f"tokenizer {model['tokenizer']} for {' and '.join(f'{kind} ({name})' for name, kind in kinds.items())}",
            "expected codes for events, conv or patch for signals",
            "Choose data of the other kind, or another preset",
            field="--data",
        )
    if not model["channel_independent"]:
        shape["others"] = tuple(w.channels for w in windows[1:])
    return shape


def _describe_reset(windows: Windows, origin: dict[str, Any], renewed: list[str]) -> str:
    """The line that says what of a pre-trained model is random again."""
    before = " and ".join(str(n) for n in adapter_channels(origin))
    why = "another vocabulary" if vocabulary_digest(windows) else f"{windows.channels} channels here, {before} in the pre-training"
    inside = [name for name in renewed if name.startswith("adapter.")]
    other = sorted(set(renewed) - set(inside))
    said = [f"{why}: re-initialised the adapter ({len(inside)} tensors: tokenizer, input and output projection)"] if inside else []
    return "; ".join(said + ([f"windows of another length: random, or continued by random values: {', '.join(other)}"] if other else []))


def leak_stamp(chosen: Settings, windows: list[Windows]) -> bool | str | None:
    """The leak stamp of a pre-training with these settings on these windows."""
    from bitimely_core import objectives

    normalise = {w.manifest["options"]["normalise"] for w in windows}
    return objectives.leak_free(chosen, normalise="window" if "window" in normalise else "channel")


def training_notices(chosen: Settings, windows: list[Windows], stamp: bool | str | None, *, pretrained: bool = True) -> list[str]:
    """What a reader must know before the numbers, for screen, card and report."""
    out: list[str] = []
    note = registry.objectives[chosen.objective.name].facts.notice
    if not pretrained:
        out.append(note if chosen.objective.name == "none" else "Trained from scratch: the control for what pre-training brings.")
    elif stamp is not True and note:
        out.append(note)
    elif isinstance(stamp, str):
        out.append(f"The objective is leak-free {stamp}.")
    for one in windows:
        out += [line for line in one.manifest.get("notices", []) if line not in out]
        counts = {split: len(set(one[split].subjects())) for split in ("train", "validation", "test")}
        if not counts["test"]:
            out.append(
                f"{one.name}: {counts['train']} subject{'s' if counts['train'] != 1 else ''}, too few for a test split (3 are needed): nothing can be tested."
            )
        if one.task == "classification":
            present = sum(1 for n in _label_counts(one["train"]).values() if n)
            if present < 2:
                out.append(f"{one.name}: {present} of {one.classes} classes in the training split: no classifier can be learned.")
    if chosen.train.precision == "bf16" and chosen.model.core_precision == "bf16":
        out.append("The retention core runs in bf16 (train.core_precision).")
    return out


def describe_schedule(chosen: Settings, batches: Any) -> str:
    """How long the training is, in one line."""
    if chosen.train.steps is not None:
        return f"{chosen.train.steps:,} steps of {batches.size} windows"
    return f"{chosen.train.epochs} epochs of {batches.steps:,} steps of {batches.size} windows"


def dry_run_summary(
    body: dict[str, Any],
    folder: Path,
    model: nn.Module,
    objective: Any,
    batches: Any,
    chosen: Settings,
    windows: Windows,
    trials: dict[str, Any] | None,
) -> dict[str, Any]:
    """What `--dry-run` says: sizes, parameters, memory and time, that of the trials of a learning rate apart."""
    from bitimely_core.training.estimate import estimate

    steps = chosen.train.epochs * batches.steps if chosen.train.steps is None else chosen.train.steps
    cost = estimate(model, batches, steps, objective=objective, precision=chosen.train.precision, accumulate=chosen.train.accumulate)
    tried = {} if trials is None else {**trials, "seconds": cost["seconds_per_step"] * trials["steps"] * len(trials["rates"])}
    return {
        "format_version": FORMAT,
        "run": body["run"],
        "folder": str(folder),
        "exists": (folder / "run.json").is_file(),
        "parameters": body["parameters"],
        "paper_parameters": body["paper_parameters"],
        "leak_free": body["leak_free"],
        "steps": steps,
        "windows": {split: len(windows[split]) for split in ("train", "validation", "test")},
        "notices": body["notices"],
        **cost,
        **({"tuning": tried} if tried else {}),
    }


def _options_of_tokenize(chosen: Settings) -> None:
    if not chosen.data.names:
        raise usage_error("no data", "expected --data", "See: bitimely list datasets", field="--data")


def _contrastive_batch_note(chosen: Settings) -> list[str]:
    """What accumulation and several devices do to an objective that compares the rows of a micro-batch with each other."""
    parts, rows = chosen.train.accumulate * chosen.train.devices, chosen.train.batch_size
    if parts == 1 or registry.objectives[chosen.objective.name].facts.rows == 1:
        return []
    return [f"{chosen.objective.name} compares each window with those of its own part of the batch: with {rows // parts}, not with {rows}."]


def _min_batch_rows(chosen: Settings, parts: int) -> int:
    """Rows that a batch in `parts` parts needs for its objective; a last one of an epoch with fewer is left out.

    Raises UserError (config, exit 2) where no batch has as many.
    """
    own = registry.objectives[chosen.objective.name].facts.rows
    if own == 1:
        return 1
    if chosen.train.batch_size < own * parts:
        raise usage_error(
            f"{chosen.train.batch_size} windows in {parts} part{'s' if parts > 1 else ''}",
            f"{chosen.objective.name} compares windows with each other: expected at least {own} in each part",
            f"Use --batch-size {own * parts} or more",
            field="train.batch_size",
        )
    return own * parts


def _supervised_only(chosen: Settings, facts: registry.ModelFacts) -> bool:
    """Whether the model has no pre-training. Raises UserError (config, exit 2) where it has and is asked for none."""
    if chosen.objective.name == "none" != facts.objective:
        raise usage_error(
            "objective none",
            "expected an objective that pre-trains",
            "Train without pre-training with: bitimely finetune RUN --from-scratch",
            field="objective.name",
        )
    return facts.objective == "none"


def _tuning_identity(body: dict[str, Any]) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that continues it."""
    return flatten_compared({key: body[key] for key in ("model", "settings", "init")})


def _label_counts(windows: Windows) -> dict[str, int]:
    """Windows a class, in the order of the classes; empty without classes."""
    if windows.task != "classification" or not len(windows):
        return {}
    import numpy as np

    counts = np.bincount(np.asarray(windows.targets(None), dtype=np.int64), minlength=windows.classes)
    return {name: int(n) for name, n in zip(windows.class_names, counts, strict=True)}


def _find_initial_weights(
    init: str | Path | None, workspace: Path, run: Path, *, dry_run: bool
) -> tuple[Path | None, dict[str, str] | None]:
    """The model folder that `--init` names, and where it is from: the run, or repository and commit, which a continued run keeps.

    `init` is a run, its folder, a model folder, else a name on the hub, which a dry run does not download.
    """
    if init is None:
        return None, None
    for folder in (workspace / "runs" / init / "model", Path(init) / "model", Path(init)):
        if (folder / "model.safetensors").is_file():
            return folder, {"run": folder.parent.name} if folder.parent.parent == workspace / "runs" else None
    if dry_run:
        return None, None
    return hub.fetch(str(init), read_run(run).get("init_from") if (run / "run.json").is_file() else None)


def _initialise(model: Any, start: Path) -> None:
    """Copy the weights of the model folder `start`; adapters stay new where the channels differ, and those of further data sets."""
    from bitimely_core import models

    other = models.load(start)
    other.settle(0)
    other.adapt(channels=model.config.channels, length=model.config.length)
    wanted, found = {k: v for k, v in model.state_dict().items() if not k.startswith("others.")}, other.state_dict()
    differing = sorted(k for k in wanted.keys() | found.keys() if k not in wanted or k not in found or wanted[k].shape != found[k].shape)
    if differing:
        raise input_error(
            Reason.SHAPES_DIFFER,
            f"{len(differing)} tensors differ: {', '.join(differing[:5])}",
            "expected the same architecture",
            "Use the preset and model of the other run",
            file=str(start),
        )
    model.load_state_dict({**model.state_dict(), **found})
    model.target_scale.fill_(math.nan)


def subject_marks(windows: list[Windows], split: str) -> list[str]:
    """Hashes of the subjects of one split, bound to the data set: enough to see overlaps, not to read identifiers."""
    marks = {hashlib.sha256(f"{w.dataset}|{s}".encode()).hexdigest()[:16] for w in windows for s in set(w[split].subjects())}
    return sorted(marks)


def _train_subjects(folder: Path, windows: list[Windows], parent: Path | None = None) -> None:
    import json

    marks = set(subject_marks(windows, "train"))
    if parent is not None and (parent / "train_subjects.json").is_file():
        marks |= set(json.loads((parent / "train_subjects.json").read_bytes())["marks"])
    storage.write_json(folder / "train_subjects.json", {"format_version": FORMAT, "marks": sorted(marks)})
