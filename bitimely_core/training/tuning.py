"""The learning rate by trial: a few rates, each in a short training of the same steps and seed, the best on the validation split is taken.

Every model gets the same budget. A trial is a whole training in small: warm-up and cosine run over its own steps. What chooses is the metric of
the task on the validation windows, else the objective's loss there; it is given no test split (`Seen`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import registry, storage
from bitimely_core.config import Settings
from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.types import Batches

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows

FORMAT = 1
SHARE, LEAST = 10, 50  # a trial takes a tenth of the steps of the training, and at least so many
Scores = dict[str, float | None]


@dataclass(frozen=True)
class TrainValidation:
    """One set of windows without its test split: all that a training and a choice may look at."""

    train: Windows
    validation: Windows

    def __getitem__(self, split: str) -> Windows:
        """The rows of `split`. Raises UserError (unknown_name, exit 2) for any but train and validation."""
        if split not in {"train", "validation"}:
            raise registry.unknown("split to choose on", split, ["train", "validation"])
        rows: Windows = getattr(self, split)
        return rows


def without_test(windows: Windows) -> TrainValidation:
    """The windows without their test split."""
    return TrainValidation(windows["train"], windows["validation"])


def learning_rate_grid(rates: int | tuple[float, ...], lr: float) -> tuple[float, ...]:
    """The rates to try, ascending; of a number: `lr` and its neighbours, half a decade apart, of an even number one more above."""
    if isinstance(rates, tuple):
        return tuple(sorted(rates))
    below = (rates - 1) // 2
    return tuple(lr if k == 0 else float(f"{lr * 10 ** (k / 2):.3g}") for k in range(-below, rates - below))


def plan_tuning(chosen: Settings, batches: Batches, validation: Batches | None, names: str) -> dict[str, Any] | None:
    """The `rates` that would be tried and the `steps` of each; None where the rate is given, or nothing is trained.

    Raises UserError (no_input, exit 4) without validation windows.
    """
    total = chosen.train.epochs * batches.steps if chosen.train.steps is None else chosen.train.steps
    if chosen.tune.rates is None or not total:
        return None
    if validation is None or not validation.steps:
        raise input_error(
            Reason.NO_INPUT,
            f"{names} has no validation windows",
            "--tune chooses the learning rate on them",
            "Give the rate with --lr, or ingest more subjects",
            field="--tune",
        )
    return {
        "rates": learning_rate_grid(chosen.tune.rates, chosen.train.lr),
        "steps": min(total, chosen.tune.steps or max(LEAST, total // SHARE)),
    }


def select_learning_rate(
    model: nn.Module,
    batches: Batches,
    objective: Callable[..., dict[str, Any]],
    validation: Batches,
    views: list[TrainValidation],
    chosen: Settings,
    folder: Path,
    *,
    rates: tuple[float, ...],
    steps: int,
    measure: Callable[[nn.Module, list[TrainValidation]], Scores] | None = None,
    lower_is_better: Collection[str] = (),
    identity: dict[str, Any] | None = None,
    log: Callable[[float, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train `model` from its present weights at every rate and pick one; the model has its present weights again afterwards.

    The best value of the first of `by` wins, among equals that of the next, at last the smaller rate. A rate whose training diverges loses.
    Trials lie in `folder`, one folder each; those that have ended there are not repeated, one that was stopped continues.

    Args:
        model: with fresh weights.
        batches: of the training split.
        objective: as `train.fit`.
        validation: batches of the validation split.
        views: the windows behind both, handed to `measure`.
        chosen: the settings, of which [train] is used, with another rate and number of steps.
        folder: `runs/<run>/tuning`.
        rates: to try, ascending.
        steps: of each trial.
        measure: metrics of a trained model on the validation windows by name, the one that counts first; losses are left to this function.
        lower_is_better: names of metrics that are errors.
        identity: as `training.fit`.
        log: called with the rate and every line of a trial's log.

    Returns:
        `lr`, `by`, `steps`, `seed`, `around` (the rate of the settings), and of each trial `lr`, `scores` and the `reason` why it has none.

    Raises:
        UserError: non_finite_loss (exit 4) when every rate diverges, and those of `train.fit`.
    """
    from bitimely_core.training.distributed import barrier, rank

    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trials = []
    for rate in rates:
        home = folder / f"lr-{rate:g}"
        if not (home / "trial.json").is_file():
            model.load_state_dict(start)
            config = chosen.train.model_copy(update={"lr": rate, "steps": steps})
            scores, reason = _run_trial(model, batches, objective, validation, views, config, home, measure, identity, rate, log)
            if rank() == 0:
                written = {"format_version": FORMAT, "lr": rate, "scores": scores, "reason": reason}
                storage.write_json(storage.make_folder(home) / "trial.json", written)
                for heavy in ("checkpoints", "model"):
                    shutil.rmtree(home / heavy, ignore_errors=True)
            barrier()
        trial = json.loads((home / "trial.json").read_bytes())
        trials.append({key: trial[key] for key in ("lr", "scores", "reason")})
    model.load_state_dict(start)
    return {**best_trial(trials, lower_is_better), "steps": steps, "seed": chosen.train.seed, "around": chosen.train.lr, "trials": trials}


def _run_trial(
    model: nn.Module,
    batches: Batches,
    objective: Callable[..., dict[str, Any]],
    validation: Batches,
    views: list[TrainValidation],
    config: Any,
    home: Path,
    measure: Callable[[nn.Module, list[TrainValidation]], Scores] | None,
    identity: dict[str, Any] | None,
    rate: float,
    log: Callable[[float, dict[str, Any]], None] | None,
) -> tuple[Scores, str]:
    """The scores of one trial, or why it has none."""
    from bitimely_core.training import loop
    from bitimely_core.training.distributed import rank

    def tell(line: dict[str, Any]) -> None:
        if log is not None:
            log(rate, line)

    try:
        loop.fit(model, batches, objective, config=config, validation=validation, folder=home, identity=identity, log=tell)
        if rank() > 0:
            return {}, ""  # the first process measures and writes
        last = [line for line in loop.metrics(home) if line.get("split") == "validation"][-1]
        if last["loss"] is None:
            return {}, "the validation loss is not finite"
        return {**(measure(model, views) if measure else {}), "rel": last.get("rel"), "loss": last["loss"]}, ""
    except UserError as error:
        if error.code not in {Reason.NON_FINITE_LOSS, Reason.NON_FINITE}:
            raise
        return {}, error.problem


def best_trial(trials: list[dict[str, Any]], lower_is_better: Collection[str] = ()) -> dict[str, Any]:
    """`lr` and `by`, the scores that decided, of trials with `lr`, `scores` and `reason`. A score counts where all that have ended have it.

    Raises UserError (non_finite_loss, exit 4) when none has ended.
    """
    ended = [trial for trial in trials if trial["scores"]]
    if not ended:
        raise input_error(
            Reason.NON_FINITE_LOSS,
            f"all of {len(trials)} learning rates diverge: {', '.join(format(trial['lr'], 'g') for trial in trials)}",
            "expected one that does not",
            "Give smaller ones: --tune LR,LR...",
        )
    last = ("rel", "loss")  # the task's metric comes before them
    shared = [name for name in ended[0]["scores"] if all(trial["scores"].get(name) is not None for trial in ended)]
    by = sorted(shared, key=lambda name: last.index(name) if name in last else -1)
    lower = {*lower_is_better, *last}
    won = min(ended, key=lambda trial: (*(trial["scores"][name] * (1 if name in lower else -1) for name in by), trial["lr"]))
    return {"lr": won["lr"], "by": by}


def describe_tuning(record: dict[str, Any]) -> str:
    """A record of `choose` in one line, for screen, card and page."""
    by = record["by"][0]
    values = [
        f"{trial['lr']:g}: {trial['scores'][by]:.4g}" if trial["scores"] else f"{trial['lr']:g}: diverged" for trial in record["trials"]
    ]
    return f"{record['lr']:g}, by validation {by.replace('_', ' ')} after {record['steps']:,} steps each ({', '.join(values)})"
