"""By what the best weights of a supervised training are chosen, and who is enough to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitimely_core.config import Settings, TrainConfig
from bitimely_core.evaluate import LOWER_IS_BETTER, MAIN
from bitimely_core.evaluate.prediction import measure_task
from bitimely_core.train.state import LOWEST_LOSS, Criterion
from bitimely_core.train.tuning import TrainValidation

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows

# validation subjects that suffice to choose the best weights; fewer do with so many windows
ENOUGH_SUBJECTS, FEW_SUBJECTS, MANY_WINDOWS = 20, 5, 500


def limit_choice(settings: Settings, validation: Windows) -> tuple[Settings, list[str]]:
    """The settings, with the last weights in the place of the best where too few people validate,
    and the notice that says so.
    """
    subjects, rows = len(set(validation.subjects())), len(validation)
    if settings.train.checkpoint == "last" or subjects >= ENOUGH_SUBJECTS:
        return settings, []
    if subjects >= FEW_SUBJECTS and rows >= MANY_WINDOWS:
        return settings, []
    notice = (
        f"The weights are those of the last step: {subjects:,} validation "
        f"{validation.subject_unit}s are too few to choose the best (at least {ENOUGH_SUBJECTS}, "
        f"or {FEW_SUBJECTS} with {MANY_WINDOWS} windows)."
    )
    train = settings.train.model_copy(update={"checkpoint": "last"})
    return settings.model_copy(update={"train": train}), [notice]


def choose_criterion(task: str, view: TrainValidation, train: TrainConfig) -> Criterion:
    """The main metric of the task on the validation windows, where it has something to decide."""
    is_used = train.checkpoint == "best" or train.patience is not None
    if not is_used or not len(view.validation):
        return LOWEST_LOSS
    name = MAIN[task]

    def measure(model: nn.Module) -> float | None:
        return measure_task(model, [view], train.device)[name]

    return Criterion(name, measure, lower_is_better=name in LOWER_IS_BETTER)
