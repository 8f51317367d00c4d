"""Clinical endpoints of hypnograms, by the definitions of the AASM manual as YASA computes them.

A hypnogram is a sequence of epochs of equal length from lights off to lights on: class ids, -1 = not scored. Legend: E epochs, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bitimely_core.schemas import EndpointValue

Array = npt.NDArray[np.int64]

STAGES = {  # class name in capitals -> stage
    **dict.fromkeys(("W", "WAKE", "WK"), "W"),
    **dict.fromkeys(("N1", "S1"), "N1"),
    **dict.fromkeys(("N2", "S2"), "N2"),
    **dict.fromkeys(("N3", "N4", "S3", "S4"), "N3"),
    **dict.fromkeys(("R", "REM"), "REM"),
}
SLEEP = ("N1", "N2", "N3", "REM")
NO_SLEEP = "no epoch of sleep"


def is_staging(class_names: Sequence[str]) -> bool:
    """Whether the classes are sleep stages: wake and at least one stage of sleep, and nothing else."""
    found = [STAGES.get(name.upper()) for name in class_names]
    return None not in found and "W" in found and len(set(found)) > 1


def place_epochs(starts: npt.ArrayLike, stages: npt.ArrayLike, epoch: float, *, origin: float | None = None) -> Array:
    """The hypnogram [E] of windows that begin at `starts` (seconds); -1 where there is none. `origin`: start of the first epoch."""
    at = np.asarray(starts, np.float64)
    if not len(at):
        return np.zeros(0, np.int64)
    place = np.rint((at - (at.min() if origin is None else origin)) / epoch).astype(np.int64)
    out = np.full(place.max() + 1, -1, np.int64)
    out[place] = np.asarray(stages, np.int64)
    return out


def compute_endpoints(hypnogram: Array, class_names: Sequence[str], epoch: float) -> dict[str, EndpointValue]:
    """Endpoints of a hypnogram [E] with epochs of `epoch` seconds; what it cannot define is null with the reason.

    Latencies count from the first epoch, `rem_latency_from_onset` from the first epoch of sleep; the sleep period ends with the last one.
    """
    stage = np.array([*(STAGES[name.upper()] for name in class_names), ""])[hypnogram]  # -1 is the last: not scored
    minutes = epoch / 60
    sleep = np.flatnonzero(np.isin(stage, SLEEP))
    first, last = (int(sleep[0]), int(sleep[-1]) + 1) if len(sleep) else (0, 0)
    period, total = float(last - first), float(len(sleep))
    out: dict[str, EndpointValue] = {}

    def add(name: str, value: float | None, unit: str = "min", reason: str = NO_SLEEP) -> None:
        factor = minutes if unit == "min" else 1.0
        out[name] = EndpointValue(unit=unit, undefined_reason=reason) if value is None else EndpointValue(value=value * factor, unit=unit)

    add("time_in_bed", float(len(stage)))
    add("total_sleep_time", total)
    add("sleep_efficiency", 100 * total / len(stage) if len(stage) else None, "%", "no epochs")
    add("sleep_period_time", period if period else None)
    add("sleep_maintenance_efficiency", 100 * total / period if period else None, "%")
    add("wake_after_sleep_onset", float((stage[first:last] == "W").sum()) if period else None)
    add("sleep_onset_latency", float(first) if period else None)
    for name in SLEEP:
        if name in {STAGES[one.upper()] for one in class_names}:
            at = np.flatnonzero(stage == name)
            reason = f"no epoch of {name}"
            add(f"latency_{name}", float(at[0]) if len(at) else None, reason=reason)
            if name == "REM":
                add("rem_latency_from_onset", float(at[0] - first) if len(at) else None, reason=reason)
    for name in ("W", *SLEEP):
        if name in {STAGES[one.upper()] for one in class_names}:
            add(f"minutes_{name}", float((stage == name).sum()))
            if name != "W":
                add(f"percent_{name}", 100 * float((stage == name).sum()) / total if total else None, "%")
    add("minutes_not_scored", float((stage == "").sum()))
    return out
