"""Learning-rate search: a short training at each of a few rates, of which the best is selected.

Every model gets the same budget: steps and seed are the same. In a trial, warm-up and cosine run
over the steps of the trial. The decision is by the metric of the task on the validation windows,
else by the loss of the objective there. The search has no access to the test split
(`TrainValidation`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core.config import Settings, TrainConfig
from bitimely_core.errors import Reason, UserError, check_choice, input_error
from bitimely_core.schemas.runs import TrialRecord, TuningRecord, TuningTrial
from bitimely_core.store import storage
from bitimely_core.store.records import ResultManifest, has_result, write_results
from bitimely_core.types import Batches

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows
    from bitimely_core.train.metrics_log import LogLine

# a trial has a tenth of the steps of the training, and at least so many
TRIAL_SHARE, MIN_TRIAL_STEPS = 10, 50
LOSSES = ("rel", "loss")  # scores of every trial, beside the metrics of its task
TrialScores = dict[str, float | None]


@dataclass(frozen=True)
class TrainValidation:
    """One set of windows without its test split: all that a training and a search may read."""

    train: Windows
    validation: Windows

    def __getitem__(self, split: str) -> Windows:
        """The rows of `split`. Raises UserError (unknown_name, exit 2) for any but train and
        validation.
        """
        check_choice("split to choose on", split, ["train", "validation"])
        rows: Windows = getattr(self, split)
        return rows


def drop_test(windows: Windows) -> TrainValidation:
    """The windows without their test split."""
    return TrainValidation(windows["train"], windows["validation"])


@dataclass(frozen=True, kw_only=True)
class LearningRateSearch:
    """The trials of a learning-rate search: `rates` in ascending order, `steps` of each trial,
    `views` (the windows for `measure`).

    `measure` gives metrics of a trained model on the validation windows by name, the deciding one
    first; losses are added to them. `lower_is_better` are the names of metrics that are errors.
    """

    rates: tuple[float, ...]
    steps: int
    views: Sequence[TrainValidation]
    measure: Callable[[nn.Module, Sequence[TrainValidation]], TrialScores] | None = None
    lower_is_better: Collection[str] = ()


def make_rate_grid(rates: int | tuple[float, ...], lr: float) -> tuple[float, ...]:
    """The rates to try, ascending; of a number: `lr` and its neighbours, half a decade apart, of an
    even number one more above.
    """
    if isinstance(rates, tuple):
        return tuple(sorted(rates))
    below = (rates - 1) // 2
    return tuple(
        lr if k == 0 else float(f"{lr * 10 ** (k / 2):.3g}") for k in range(-below, rates - below)
    )


def plan_search(
    settings: Settings,
    batches: Batches,
    validation: Batches | None,
    views: Sequence[TrainValidation],
    measure: Callable[[nn.Module, Sequence[TrainValidation]], TrialScores] | None = None,
    lower_is_better: Collection[str] = (),
) -> LearningRateSearch | None:
    """The search that `settings` ask for; None for a given rate or no training. Raises UserError
    (no_input, exit 4) without validation windows.
    """
    total = settings.train.count_steps(batches.steps)
    if settings.tune.rates is None or not total:
        return None
    if validation is None or not validation.steps:
        raise input_error(
            Reason.NO_INPUT,
            f"{' and '.join(view.train.name for view in views)} has no validation windows",
            "--tune chooses the learning rate on them",
            "Give the rate with --lr, or ingest more subjects",
            field="--tune",
        )
    return LearningRateSearch(
        rates=make_rate_grid(settings.tune.rates, settings.train.lr),
        steps=min(total, settings.tune.steps or max(MIN_TRIAL_STEPS, total // TRIAL_SHARE)),
        views=views,
        measure=measure,
        lower_is_better=lower_is_better,
    )


def select_learning_rate(
    search: LearningRateSearch,
    model: nn.Module,
    fit: Callable[..., object],
    config: TrainConfig,
    folder: Path,
    log: Callable[[float, LogLine], None],
) -> TuningRecord:
    """Train `model` from its present weights at every rate and select one; the model has its
    present weights again afterwards.

    `fit` is `loop.fit` of the model with its batches, validation, objective and identity. Rate and
    steps of `config` are replaced. `log` is called with the rate and every line of its trial.

    The best value of the first metric of `search.measure` wins, among equals that of the next, at
    last the smaller rate. A rate whose training diverges loses. Each trial has a folder in `folder`
    (`runs/<run>/tuning`); finished trials are not repeated, a stopped one resumes.

    Raises UserError: non_finite_loss (exit 4) when every rate diverges, and those of `fit`.
    """
    from bitimely_core.train.distributed import barrier, get_rank

    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trials = []
    for rate in search.rates:
        home = folder / f"lr-{rate:g}"
        path = home / "trial.json"
        if not has_result(path):
            model.load_state_dict(start)
            changes = {
                "lr": rate,
                "steps": search.steps,
                "minutes": None,
                "patience": None,
                "checkpoint": "last",
                "track": False,
            }
            trained = config.model_copy(update=changes)
            run = partial(fit, config=trained, folder=home, log=partial(log, rate))
            trial = _run_trial(search, model, run, rate, home)
            if get_rank() == 0:
                sealed = {"metrics.jsonl": None} if (home / "metrics.jsonl").is_file() else {}
                write_results(home, {**sealed, path.name: trial.encode()}, finished=False)
            barrier()
        if get_rank() == 0:
            _remove_weights(home)
        barrier()
        stored = TrialRecord.load(path)
        trials.append(TuningTrial(lr=stored.lr, scores=stored.scores, reason=stored.reason))
    model.load_state_dict(start)
    lr, by = select_trial(trials, search.lower_is_better)
    return TuningRecord(
        lr=lr, by=by, steps=search.steps, seed=config.seed, around=config.lr, trials=tuple(trials)
    )


def _run_trial(
    search: LearningRateSearch, model: nn.Module, run: Callable[[], object], rate: float, home: Path
) -> TrialRecord:
    """The scores of one trial, or why it has none; of process 0, which measures and writes."""
    from bitimely_core.train.distributed import get_rank
    from bitimely_core.train.metrics_log import read_metrics

    try:
        run()
        if get_rank() > 0:
            return TrialRecord(lr=rate)
        lines = [line for line in read_metrics(home) if line.get("split") == "validation"]
        loss, rel = lines[-1]["loss"], lines[-1].get("rel")
        if loss is None:
            return TrialRecord(lr=rate, reason="the validation loss is not finite")
        measured = search.measure(model, search.views) if search.measure else {}
        return TrialRecord(lr=rate, scores={**measured, "rel": rel, "loss": loss})
    except UserError as error:
        if error.code not in {Reason.NON_FINITE_LOSS, Reason.NON_FINITE}:
            raise
        return TrialRecord(lr=rate, reason=error.problem)


def _remove_weights(home: Path) -> None:
    """Remove the large files of a trial that has ended, and seal its folder."""
    manifest = ResultManifest.find(home)
    if manifest is not None and not manifest.finished:
        for name in ("checkpoints", "model"):
            storage.remove_folder(home / name)
        write_results(home, {})


def select_trial(
    trials: Sequence[TuningTrial], lower_is_better: Collection[str] = ()
) -> tuple[float, tuple[str, ...]]:
    """The selected rate, and the scores, of all finished trials, that decided. Raises UserError
    (non_finite_loss, exit 4) if none finished.
    """
    finished = [trial for trial in trials if trial.scores]
    if not finished:
        rates = ", ".join(f"{trial.lr:g}" for trial in trials)
        raise input_error(
            Reason.NON_FINITE_LOSS,
            f"all of {len(trials)} learning rates diverge: {rates}",
            "expected one that does not",
            "Give smaller ones: --tune LR,LR...",
        )
    by = _list_shared_scores(finished)
    lower = {*lower_is_better, *LOSSES}

    def rank_key(trial: TuningTrial) -> tuple[float, ...]:
        scores = ((trial.scores[name] or 0.0) * (1 if name in lower else -1) for name in by)
        return (*scores, trial.lr)

    return min(finished, key=rank_key).lr, by


def _list_shared_scores(trials: Sequence[TuningTrial]) -> tuple[str, ...]:
    """The scores that all trials have: the metrics of the task, then the losses."""
    metrics = (name for name in trials[0].scores if name not in LOSSES)
    return tuple(
        name
        for name in (*metrics, *LOSSES)
        if all(trial.scores.get(name) is not None for trial in trials)
    )


def describe_tuning(record: TuningRecord) -> str:
    """A search in one line, for screen, card and page."""
    by = record.by[0]
    trials = ", ".join(
        f"{trial.lr:g}: {trial.scores[by]:.4g}" if trial.scores else f"{trial.lr:g}: diverged"
        for trial in record.trials
    )
    score, steps = by.replace("_", " "), f"{record.steps:,} steps"
    return f"{record.lr:g}, by validation {score} after {steps} each ({trials})"
