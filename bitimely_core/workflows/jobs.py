"""What the verbs that train share: a training that is ready, and how it fills its folder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeGuard

import numpy as np

from bitimely_core import registry
from bitimely_core.cache import open_cache
from bitimely_core.config import ModelConfig, Settings, describe_tokens
from bitimely_core.errors import Finding, UserError, usage_error
from bitimely_core.notices import select_unseen
from bitimely_core.privacy import withhold_small
from bitimely_core.progress import announce, are_lines_shown, report_progress
from bitimely_core.report.model_card import render_card
from bitimely_core.report.renderer import write_report
from bitimely_core.report.run_page import training_page
from bitimely_core.run import (
    FORMAT,
    PREPROCESSING,
    SPLITS,
    claim_folder,
    describe_identity,
    describe_preprocessing,
    hash_subjects,
    load_predictor,
)
from bitimely_core.schemas.runs import (
    FinalLosses,
    Losses,
    RunEnvironment,
    RunRecord,
    ScoredCheckpoint,
    TrainSubjects,
    TuningRecord,
)
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import Calibration, HistoryPreparation
from bitimely_core.store import storage
from bitimely_core.store.records import find_missing, has_result, list_results, write_results
from bitimely_core.tokens.sequences import HISTORIES, EventSequences
from bitimely_core.tokens.sets import TokenSet
from bitimely_core.train import tuning
from bitimely_core.train.state import LOWEST_LOSS, Criterion
from bitimely_core.types import Batches, count_nouns
from bitimely_core.workflows.calibrate import CALIBRATION, calibrate_on_validation
from bitimely_core.workflows.prepare import Execution, hides_counts

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows
    from bitimely_core.train.loop import FitResult
    from bitimely_core.train.metrics_log import LogLine
    from bitimely_core.train.state import Objective

# nested settings by section, as a preset, a recipe or the command line gives them
Flags = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training that is ready to start.

    `record` is `run.json` as it is at the start, `model` has initial weights (in a fine-tuning its
    head too), `objective` is as for `fit`, `windows` are the data sets with all splits, `headline`
    is the first line on the screen, `earlier_subjects` are the training subjects of the
    pre-training. `validation` is None without a validation split, `search` None where the rate is
    given, `criterion` chooses the best weights.
    """

    record: RunRecord
    folder: Path
    model: nn.Module
    objective: Objective
    batches: Batches
    validation: Batches | None
    windows: list[Windows]
    headline: str
    search: tuning.LearningRateSearch | None = None
    earlier_subjects: TrainSubjects | None = None
    criterion: Criterion = LOWEST_LOSS

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.record.settings


class TrainingPlan(NamedTuple):
    """What a training from random weights is of, before the windows are open."""

    model: str
    preset: str  # empty: of a method, which has no network
    settings: Settings
    view: str  # DATASET/VIEW, or the name of tokens
    chosen: Flags  # settings that are not defaults


class TrainingResult(TypedDict, total=False):
    """Result of a verb that trains; under dry_run sizes, memory and time instead of what was
    trained.
    """

    format_version: int
    run: str
    folder: str
    parameters: int
    leak_free: bool | str | None
    notices: list[str]  # in `exact` with all counts, for the owner of the data alone
    exact: dict[str, object]
    windows: dict[str, int | None]  # of a dry run
    exists: bool  # of a dry run: whether the folder has a run
    steps: int
    trained: bool  # False when the run was already finished
    writer: bool  # whether this is the first process
    final: dict[str, object] | None  # last logged loss and rel
    seconds: float  # of a dry run: of all trainings
    trainings: int  # of a dry run over folds or seeds
    processes: int  # of a dry run: what `--devices auto` stands for
    one_process_since: str | None  # why it takes no more
    members: list[str]  # over folds or seeds: the runs that are pooled
    scores: dict[str, object]  # over folds or seeds, as scores.json


def finish_job(job: TrainingJob, execution: Execution) -> TrainingResult:
    """Train the job, or in a dry run say what it would take.

    Raises UserError (config, exit 2) as `refuse_slow_compile`.
    """
    from bitimely_core.train.devices import refuse_slow_compile

    refuse_slow_compile(job.settings.train, job.settings.model)
    if execution.dry_run:
        return summarize_job(job)
    return run_job(job, force_new=execution.force_new)


def run_job(job: TrainingJob, *, force_new: bool) -> TrainingResult:
    """Claim the folder, select the learning rate where a search is planned, train, and write
    record, model card and page.

    The settings of the run hold the selected rate and `tuning.around` the given one, so that the
    same command finds its run again.
    """
    from bitimely_core.train.devices import describe_environment, select_device
    from bitimely_core.train.distributed import barrier, get_rank, is_resuming
    from bitimely_core.train.loop import require_validation

    require_validation(
        job.settings.train, job.validation, job.settings.train.count_steps(job.batches.steps)
    )
    writer, fresh = get_rank() == 0, force_new and not is_resuming()
    environment = describe_environment(select_device(job.settings.train.device))
    record = job.record.model_copy(update={"environment": environment})
    search, path = job.search, job.folder / "run.json"
    _announce_job(job)
    if search and not fresh:
        record, search = _reuse_search(record, search, path)
    if writer:
        claim_folder(job.folder, record, force_new=fresh)
    barrier()
    stored = RunRecord.load(path)
    if stored.finished:
        record, steps = stored, stored.final.step if stored.final else 0
    else:
        earlier = _list_environments(stored, environment)
        record = record.model_copy(update={"earlier_environments": earlier})
        if writer and earlier:
            write_results(job.folder, {path.name: record.encode()}, finished=False)
        record, steps = _train(job, record, search, writer)
    if writer:
        before = job.earlier_subjects
        seal_run(job.folder, record, job.windows, before, trained=not stored.finished)
    return {
        **describe_run(record, job.folder),
        "parameters": record.parameters,
        "trained": not stored.finished,
        "writer": writer,
        "steps": steps,
        "final": record.final.model_dump(mode="json") if record.final else None,
    }


def describe_run(record: RunRecord, folder: Path) -> TrainingResult:
    """What the results of trainings and of dry runs have in common."""
    return {
        "format_version": FORMAT,
        "run": record.run,
        "folder": str(folder),
        "leak_free": record.leak_free,
        "notices": list(record.share().notices),
        "exact": {"notices": list(record.notices)},
    }


def describe_plan(record: RunRecord, folder: Path, windows: Windows) -> TrainingResult:
    """What the results of all dry runs have in common; windows of few people are withheld."""
    result, hidden = describe_run(record, folder), hides_counts(windows)
    counts = {split: len(windows[split]) for split in SPLITS}
    shared = {split: withhold_small(n) if hidden else n for split, n in counts.items()}
    return {
        **result,
        "exists": (folder / "run.json").is_file(),
        "windows": shared,
        "exact": {**result["exact"], "windows": counts},
    }


def _announce_job(job: TrainingJob) -> None:
    """The first lines on the screen: the model, how long it trains, and caveats."""
    if not are_lines_shown():
        return
    train, batches = job.settings.train, job.batches
    length = f"{count_nouns(train.epochs, 'epoch')} of {count_nouns(batches.steps, 'step')}"
    if train.minutes is not None:
        length = f"{train.minutes:g} minutes"
    elif train.steps is not None:
        length = count_nouns(train.steps, "step")
    tokens = describe_tokens(job.settings.model, job.record.data[0].rate)
    notices = select_unseen(job.record.notices, job.folder.parent.parent)
    for line in (job.headline, tokens, f"{length} of {batches.size} windows", *notices):
        announce(line)


def _reuse_search(
    record: RunRecord, search: tuning.LearningRateSearch, path: Path
) -> tuple[RunRecord, tuning.LearningRateSearch | None]:
    """The record with the rate of a search that has ended, and the search where it has not."""
    stored = RunRecord.load(path).tuning if path.is_file() else None
    if stored is None or stored.around != record.settings.train.lr:
        return record, search
    return _apply_search(record, stored), None


def _list_environments(
    stored: RunRecord, environment: RunEnvironment
) -> tuple[RunEnvironment, ...] | None:
    """Where the run was trained before, if it is continued elsewhere or was."""
    earlier = stored.earlier_environments
    if stored.environment is None or stored.environment == environment:
        return earlier
    return (*(earlier or ()), stored.environment)


def seal_run(
    folder: Path,
    record: RunRecord,
    windows: list[Windows],
    earlier: TrainSubjects | None = None,
    *,
    trained: bool,
) -> None:
    """Write the record, subjects, card and page of a training that has ended and the manifest of
    all files; later only what is missing. `earlier`: the subjects of the pre-training.
    """
    # in the order of the file
    record = RunRecord.parse(storage.decode_json(record.encode()), folder / "run.json")
    if not trained and not find_missing(folder):
        return
    marks = {*hash_subjects(windows, "train"), *(earlier.marks if earlier else ())}
    subjects = TrainSubjects(marks=tuple(sorted(marks)))
    scores = Scores.load(folder / "scores.json") if has_result(folder / "scores.json") else None
    files: dict[str, storage.Content | None] = {
        "train_subjects.json": subjects.encode(),
        "model_card.md": render_card(folder, record, scores, subjects),
    }
    if trained:
        files |= _describe_inputs(folder, record, windows[0])
        files |= {**dict.fromkeys(list_results(folder)), **files, "run.json": record.encode()}
    if scores is None:
        write_report(folder, training_page(folder, record, windows[0].subject_unit), others=files)
    else:  # the page is that of the evaluation
        write_results(folder, files)


def _describe_inputs(
    folder: Path, record: RunRecord, windows: Windows
) -> dict[str, storage.Content | None]:
    """The files by which new recordings, or histories of new subjects, become inputs."""
    if not windows.vocabulary:
        described = describe_preprocessing(windows) if record.is_finetuned else None
        return {} if described is None else {PREPROCESSING: described.encode()}
    if not has_result(windows.folder / HISTORIES):
        return {}
    prepared = HistoryPreparation.load(windows.folder / HISTORIES)
    if record.is_finetuned:
        has_case = find_labels_with_cases(windows["train"])
        names = itertools.compress(windows.class_names, ~has_case)
        prepared = prepared.model_copy(update={"labels_without_cases": tuple(names)})
    files: dict[str, storage.Content | None] = {HISTORIES: prepared.encode()}
    if record.is_finetuned and (fitted := _calibrate(folder, record, windows)):
        files[CALIBRATION] = fitted.encode()
    return files


def find_labels_with_cases(train: Windows) -> np.ndarray:
    """Which of several labels have a case among training windows, bool [K]."""
    target = np.asarray(train.targets(None))
    return np.any((target[..., 1] if train.task == "survival" else target) == 1, axis=0)


def _calibrate(folder: Path, record: RunRecord, windows: Windows) -> Calibration | None:
    """The calibration of a run on histories: other people are predicted where its own are not."""
    head = load_predictor(folder / "model", record)
    return calibrate_on_validation([head], windows, str(record.weights))


def _train(
    job: TrainingJob, record: RunRecord, search: tuning.LearningRateSearch | None, writer: bool
) -> tuple[RunRecord, int]:
    from bitimely_core.train import loop, metrics_log

    def log(line: LogLine, trial: str = "") -> None:
        if line.get("split") == "train":
            report_progress(
                f"{record.kind} {record.run}{trial}\tloss {line['loss']:.4g}",
                line["step"],
                line.get("of"),
            )

    def notice(finding: Finding) -> None:
        if writer:
            announce(finding.line())

    fit = partial(loop.fit, job.model, job.batches, job.objective, validation=job.validation)
    if search:
        tuned = tuning.select_learning_rate(
            search,
            job.model,
            partial(fit, identity=describe_identity(record)),
            record.settings.train,
            job.folder / "tuning",
            lambda rate, line: log(line, f", rate {rate:g}"),
        )
        record = _apply_search(record, tuned)
        if writer:
            write_results(job.folder, {"run.json": record.encode()}, finished=False)
            announce(f"learning rate {tuning.describe_tuning(tuned)}")
    fitted = fit(
        config=record.settings.train,
        criterion=job.criterion,
        folder=job.folder,
        identity=describe_identity(record),
        log=log,
        notice=notice,
    )
    if writer:
        last = {
            line["split"]: Losses(loss=line.get("loss"), rel=line.get("rel"))
            for line in metrics_log.read_metrics(job.folder)
        }
        train = last.get("train", Losses())
        final = FinalLosses(
            step=fitted["steps"], loss=train.loss, rel=train.rel, validation=last.get("validation")
        )
        weights = storage.hash_file(job.folder / "model" / "model.safetensors")
        update = {
            "final": final,
            "device": fitted["device"],
            "weights": weights,
            "checkpoint": _describe_checkpoint(job, fitted, final),
        }
        record = record.model_copy(update={"finished": True, **update})
    return record, fitted["steps"]


def _describe_checkpoint(
    job: TrainingJob, fitted: FitResult, final: FinalLosses
) -> ScoredCheckpoint:
    """Which weights the run has: of a run that was never validated with a finite loss the last."""
    best, steps = fitted["best"], fitted["steps"]
    if job.settings.train.checkpoint == "best" and best is not None:
        return ScoredCheckpoint(
            choice="best",
            step=int(best["step"] or 0),
            steps=steps,
            loss=best["loss"],
            rel=best["rel"],
            metric=job.criterion.name if "score" in best else None,
            score=best.get("score"),
        )
    validation = final.validation or Losses()
    return ScoredCheckpoint(
        choice="last", step=steps, steps=steps, loss=validation.loss, rel=validation.rel
    )


def _apply_search(record: RunRecord, tuned: TuningRecord) -> RunRecord:
    train = record.settings.train.model_copy(update={"lr": tuned.lr})
    return record.model_copy(
        update={"settings": record.settings.model_copy(update={"train": train}), "tuning": tuned}
    )


def summarize_job(job: TrainingJob) -> TrainingResult:
    """The result of a dry run: sizes, parameters, memory and time, those of the learning-rate
    search apart.
    """
    from bitimely_core.train.devices import choose_processes
    from bitimely_core.train.loop import require_validation
    from bitimely_core.train.step_cost import estimate

    record, train = job.record, job.settings.train
    steps = train.count_steps(job.batches.steps)
    require_validation(train, job.validation, steps)
    objective = (
        None if not record.is_finetuned and job.settings.objective.name == "none" else job.objective
    )
    cost = estimate(
        job.model,
        job.batches,
        steps,
        objective=objective,
        precision=train.precision,
        accumulate=train.accumulate,
    )
    if train.minutes is not None:
        seconds = 60 * train.minutes
        cost["steps"], cost["seconds"] = int(seconds / cost["seconds_per_step"]), seconds
    result = {
        **describe_plan(record, job.folder, job.windows[0]),
        "parameters": record.parameters,
        "paper_parameters": record.paper_parameters,
        "tokens": describe_tokens(record.settings.model, record.data[0].rate),
        **cost,
    }
    if train.devices == "auto":
        processes, reason = choose_processes(job.model, job.settings, cost["seconds"])
        result |= {"processes": processes, "one_process_since": reason}
    if job.search:
        seconds = cost["seconds_per_step"] * job.search.steps * len(job.search.rates)
        result["tuning"] = {
            "rates": job.search.rates,
            "steps": job.search.steps,
            "seconds": seconds,
        }
    return result  # type: ignore[return-value]


def derive_model_shape(
    windows: list[Windows], config: ModelConfig
) -> dict[str, int | tuple[int, ...]]:
    """The settings of a model that the data decide: channels of each data set and the longest
    window, of events also the vocabulary.

    Raises UserError (config, exit 2) for signals with codes, events without, or events of several
    vocabularies.
    """
    from bitimely_core.models.adapters import grid_shape

    _require_regular(windows, config.name)
    vocabularies = {view.vocabulary for view in windows}
    shape: dict[str, int | tuple[int, ...]] = {
        "channels": windows[0].channels,
        "length": max(view.length for view in windows),
    }
    reads_events = config.events == "grid" or config.tokenizer == "codes"
    if all(vocabularies) and reads_events:
        codes = _count_codes(windows)
        if config.events == "grid":
            return {**grid_shape(codes, config.horizon, numbers=bool(config.numbers))}
        return {**shape, "codes": codes}
    if config.tokenizer == "codes" or any(vocabularies):
        raise _refuse_inputs(windows, config.tokenizer)
    if not config.channel_independent:
        shape["others"] = tuple(view.channels for view in windows[1:])
    return shape


def _refuse_inputs(windows: list[Windows], tokenizer: str) -> UserError:
    inputs = " and ".join(f"{view.inputs} ({view.name})" for view in windows)
    return usage_error(
        f"tokenizer {tokenizer} for {inputs}",
        "expected codes for events, conv or patch for signals",
        "Choose data of the other kind, or another preset",
        field="--data",
    )


def _count_codes(windows: list[Windows]) -> int:
    """The size of the vocabulary of events. Raises UserError (config, exit 2) for several."""
    if len({view.vocabulary for view in windows}) > 1:
        raise usage_error(
            f"{_join_names(windows)} have different vocabularies",
            "expected one",
            "Tokenize them together, or pre-train on one of them",
            field="--data",
        )
    return len(windows[0].vocabulary)


def _join_names(windows: Sequence[TokenSet]) -> str:
    return " and ".join(view.name for view in windows)


def _require_regular(windows: list[Windows], model: str) -> None:
    """Raises UserError (config, exit 2) for samples at irregular times that the model does not
    read.
    """
    readers = [name for name, entry in registry.models.items() if "irregular" in entry.facts.input]
    for view in windows:
        if getattr(view, "irregular", False) and model not in readers:
            raise usage_error(
                f"{view.name} has samples at irregular times, which {model} does not read",
                f"expected one of {', '.join(sorted(readers))}",
                "Choose one of them, or a view on a grid, see: bitimely list views",
                field="--data",
            )


def choose_numbers(windows: Sequence[TokenSet], config: ModelConfig) -> bool | None:
    """`model.numbers` of a model for these windows: on where events have numbers, unless it was
    switched off.

    Raises UserError (config, exit 2) where numbers were requested that are not there.
    """
    some = any(map(_has_numbers, windows))
    if config.numbers and not some:
        raise usage_error(
            f"{_join_names(windows)} has no numbers",
            "expected numbers of events for model.numbers=true",
            "Leave it out, or tokenize with --values raw",
            field="model.numbers",
        )
    return config.numbers is not False if some else config.numbers


def _has_numbers(windows: TokenSet) -> TypeGuard[EventSequences]:
    """Whether events have numbers beside their codes."""
    return isinstance(windows, EventSequences) and windows.numbers is not None


def find_moments(windows: Sequence[TokenSet]) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation of the numbers of each code, of the first set that has any."""
    return next((view.moments() for view in windows if _has_numbers(view)), {})


def list_training_notices(
    settings: Settings, windows: list[Windows], stamp: bool | str | None, *, pretrained: bool = True
) -> list[str]:
    """Caveats of the run, for screen, card and report."""
    notices: list[str] = []
    note = registry.objectives[settings.objective.name].facts.notice
    if pretrained and stamp is not True and note:
        notices.append(note)
    elif pretrained and isinstance(stamp, str):
        notices.append(f"The objective is leak-free {stamp}.")
    for view in windows:
        notices += _list_window_notices(view, settings)
    if not pretrained:  # no caveat of its own: behind those of the data
        is_control = settings.objective.name != "none"
        notices.append(
            "Trained from scratch: control without pre-training." if is_control else note
        )
    if settings.train.minutes is not None:
        notices.append(
            f"Trained for {settings.train.minutes:g} minutes: the number of steps depends on the "
            "machine. A training in steps can be repeated bit for bit."
        )
    if getattr(settings.model, "core_precision", None) == settings.train.precision == "bf16":
        notices.append("The retention core runs in bf16 (train.core_precision).")
    return list(dict.fromkeys(notices))


def _list_window_notices(windows: Windows, settings: Settings) -> list[str]:
    """Caveats of one data set of a run."""
    notices, name, train = [], windows.name, windows["train"]
    if _has_numbers(windows) and not settings.model.numbers:
        notices.append(
            f"{name}: the numbers of events (--values raw) are not read by this model, "
            "their codes are."
        )
    notices += windows.notices
    if _is_outdated(windows):
        notices.append(
            f"{name}: made before the last ingest of {windows.dataset}, whose changes are not "
            "in it: tokenize again."
        )
    if not len(windows["test"]):
        subjects, unit = len(set(train.subjects())), windows.subject_unit
        notices.append(
            f"{name}: no test scores: {count_nouns(subjects, unit)}, a test split needs at least 3."
        )
    present = sum(map(bool, count_labels(train).values()))
    if windows.task == "classification" and present < 2:
        notices.append(
            f"{name}: {present} of {windows.classes} classes in the training split: "
            "no classifier can be trained."
        )
    return notices


def _is_outdated(windows: TokenSet) -> bool:
    """Whether the cache of these windows has changed since they were made."""
    folder = windows.folder.parents[1] / "cache" / windows.dataset
    if not (folder / "manifest.json").is_file():
        return False
    return open_cache(folder, verify=False).manifest.manifest_sha256 != windows.manifest.cache


def count_labels(windows: Windows) -> dict[str, int]:
    """Windows of each class, in the order of the classes; empty without classes."""
    if windows.task != "classification" or not len(windows):
        return {}
    import numpy as np

    counts = np.bincount(
        np.asarray(windows.targets(None), dtype=np.int64), minlength=windows.classes
    )
    return {name: int(n) for name, n in zip(windows.class_names, counts, strict=True)}
