"""Where a training stands in its budget: a number of steps, or minutes.

In minutes the learning rate follows the time. The number of steps is estimated from those that
were taken, validations included; process 0 has the clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from bitimely_core.train.distributed import get_rank

if TYPE_CHECKING:
    from bitimely_core.train.state import TrainingState


class Position(NamedTuple):
    """So much of the budget is spent, in steps or in milliseconds."""

    done: int
    total: int

    @property
    def share(self) -> float:
        """Of the budget, 0 to 1."""
        return self.done / self.total


def read_clock(state: TrainingState) -> list[float]:
    """Seconds of training so far, and those that the last validation will take; of process 0, to be
    summed over all.
    """
    if state.config.minutes is None or get_rank() > 0:
        return [0.0, 0.0]
    seconds = state.spent + time.perf_counter() - state.started_at
    pause = state.pause
    if not pause and state.validation is not None:  # a pass forward is about half of a step
        pause = 0.5 * state.validation.steps * seconds / max(state.step, 1)
    return [seconds, pause]


def find_position(state: TrainingState) -> Position:
    """The place in the budget before the next step."""
    if state.config.minutes is None:
        return Position(state.step, state.total)
    total = round(60_000 * state.config.minutes)
    return Position(min(round(1000 * state.seconds), total), max(total, 1))


def plan_steps(state: TrainingState, pause: float) -> int:
    """All steps of the training, as estimated after `state.step` of them; those so far where the
    time is up. `pause`: seconds that the end of the training takes.
    """
    if state.config.minutes is None:
        return state.total
    remaining = 60 * state.config.minutes - state.seconds - pause
    return state.step + max(0, int(remaining * state.step / max(state.seconds, 1e-9)))
