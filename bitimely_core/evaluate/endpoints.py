"""Clinical endpoints: of hypnograms, by the definitions of the AASM manual as YASA computes them,
and of events.

A hypnogram is a sequence of epochs of equal length from lights off to lights on: class ids, -1 =
not scored. Legend: E epochs, K classes, n windows, N nights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate.intervals import LEVEL, MINIMUM_UNITS, average_over_units
from bitimely_core.schemas.scores import (
    EndpointAgreement,
    EndpointValue,
    EventScores,
    MetricValue,
    NightScores,
)

if TYPE_CHECKING:
    import polars as pl

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
    """Whether the classes are sleep stages: wake and at least one stage of sleep, and nothing
    else.
    """
    found = [STAGES.get(name.upper()) for name in class_names]
    return None not in found and "W" in found and len(set(found)) > 1


def place_epochs(
    starts: npt.ArrayLike, stages: npt.ArrayLike, epoch: float, *, origin: float | None = None
) -> Array:
    """The hypnogram [E] of windows that begin at `starts` (seconds); -1 where there is none.
    `origin`: start of the first epoch.
    """
    at = np.asarray(starts, np.float64)
    if not len(at):
        return np.zeros(0, np.int64)
    place = np.rint((at - (at.min() if origin is None else origin)) / epoch).astype(np.int64)
    out = np.full(place.max() + 1, -1, np.int64)
    out[place] = np.asarray(stages, np.int64)
    return out


def compute_endpoints(
    hypnogram: Array, class_names: Sequence[str], epoch: float
) -> dict[str, EndpointValue]:
    """Endpoints of a hypnogram [E] with epochs of `epoch` seconds; what it cannot define is null
    with the reason.

    Latencies count from the first epoch, `rem_latency_from_onset` from the first epoch of sleep;
    the sleep period ends with the last one.
    """
    # -1 is the last: not scored
    stage = np.array([*(STAGES[name.upper()] for name in class_names), ""])[hypnogram]
    minutes = epoch / 60
    sleep = np.flatnonzero(np.isin(stage, SLEEP))
    first, last = (int(sleep[0]), int(sleep[-1]) + 1) if len(sleep) else (0, 0)
    period, total = float(last - first), float(len(sleep))
    out: dict[str, EndpointValue] = {}

    def add(name: str, value: float | None, unit: str = "min", reason: str = NO_SLEEP) -> None:
        factor = minutes if unit == "min" else 1.0
        out[name] = (
            EndpointValue(unit=unit, undefined_reason=reason)
            if value is None
            else EndpointValue(value=value * factor, unit=unit)
        )

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
                add(
                    "rem_latency_from_onset",
                    float(at[0] - first) if len(at) else None,
                    reason=reason,
                )
    for name in ("W", *SLEEP):
        if name in {STAGES[one.upper()] for one in class_names}:
            add(f"minutes_{name}", float((stage == name).sum()))
            if name != "W":
                add(
                    f"percent_{name}",
                    100 * float((stage == name).sum()) / total if total else None,
                    "%",
                )
    add("minutes_not_scored", float((stage == "").sum()))
    return out


# --- nights that are scored


class Nights(NamedTuple):
    """Hypnograms of the model and of the scorer, night by night."""

    units: Array  # [N] subject, numbered from 0
    kappa: npt.NDArray[np.float64]  # [N] NaN: undefined
    scored: list[dict[str, EndpointValue]]
    predicted: list[dict[str, EndpointValue]]


def measure_nights(
    index: pl.DataFrame, target: Array, prediction: Array, class_names: Sequence[str], epoch: float
) -> Nights:
    """Each recording of `index` as a night: epochs of `target` and `prediction` (class ids [n]);
    those without a window are not scored.
    """
    owners = index["subject_id"].unique().sort().to_list()
    units, kappas, scored, predicted = [], [], [], []
    for rows in list_recordings(index):
        starts = index["start"].to_numpy()[rows]
        true, own = (place_epochs(starts, values[rows], epoch) for values in (target, prediction))
        units.append(owners.index(index["subject_id"][int(rows[0])]))
        kappas.append(compute_kappa(target[rows], prediction[rows], len(class_names)))
        scored.append(compute_endpoints(true, class_names, epoch))
        predicted.append(compute_endpoints(own, class_names, epoch))
    return Nights(np.array(units, np.int64), np.array(kappas), scored, predicted)


def list_recordings(index: pl.DataFrame) -> Iterator[Array]:
    """Positions of the windows of each recording in `index`, in order of time."""
    names, starts = index["recording_id"].to_numpy(), index["start"].to_numpy()
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        yield rows[np.argsort(starts[rows], kind="stable")]


def compute_kappa(first: Array, second: Array, k: int) -> float:
    """Cohen's kappa of two sequences of class ids; NaN where chance agreement is 1."""
    a, b = (np.bincount(ids, minlength=k) / len(ids) for ids in (first, second))
    chance = float(a @ b)
    return float(((first == second).mean() - chance) / (1 - chance)) if chance < 1 else np.nan


def summarize_nights(nights: Nights, bootstrap: int = 1000) -> NightScores:
    """Mean kappa and Bland-Altman agreement of every endpoint, with intervals over subjects;
    `bootstrap` 0: none.
    """
    n_units = int(nights.units.max(initial=-1)) + 1
    known = nights.kappa[np.isfinite(nights.kappa)]
    names = list(nights.scored[0]) if nights.scored else []
    return NightScores(
        nights=len(nights.units),
        subjects=n_units,
        kappa=average_over_units(nights.kappa, nights.units, n_units, bootstrap=bootstrap),
        kappa_range=(float(known.min()), float(known.max())) if len(known) else None,
        endpoints={name: _compare_endpoint(nights, name, n_units, bootstrap) for name in names},
    )


def pair_endpoint(nights: Nights, name: str) -> npt.NDArray[np.float64]:
    """Scored and predicted values of an endpoint [N, 2]; NaN: undefined."""
    pairs = [
        [night[name].value for night in both]
        for both in zip(nights.scored, nights.predicted, strict=True)
    ]
    return np.array(
        [[np.nan if value is None else value for value in pair] for pair in pairs], np.float64
    ).reshape(-1, 2)


def _compare_endpoint(nights: Nights, name: str, n_units: int, bootstrap: int) -> EndpointAgreement:
    pairs = pair_endpoint(nights, name)
    keep = np.isfinite(pairs).all(1)
    unit = nights.scored[0][name].unit
    if not keep.any():
        reason = next(
            (
                night[name].undefined_reason
                for night in nights.scored
                if night[name].undefined_reason
            ),
            "no night defines both",
        )
        undefined = MetricValue(undefined_reason=reason)
        return EndpointAgreement(
            unit=unit, nights=0, bias=undefined, lower_limit=undefined, upper_limit=undefined
        )
    scored, predicted = pairs[keep].T
    difference, units = predicted - scored, nights.units[keep]
    bias = average_over_units(difference, units, n_units, bootstrap=bootstrap)
    low, high = limits_of_agreement(difference, units, bootstrap=bootstrap)
    return EndpointAgreement(
        unit=unit, nights=len(units), scored=float(scored.mean()), predicted=float(predicted.mean()), bias=bias, lower_limit=low, upper_limit=high
    )  # fmt: skip


def limits_of_agreement(
    difference: npt.NDArray[np.float64], units: Array, *, bootstrap: int = 1000
) -> tuple[MetricValue, MetricValue]:
    """Limits of agreement of differences [N] with several nights a subject, and their 95 %
    intervals with the subject as unit.

    The standard deviation of a difference is that between subjects and within them together
    (one-way analysis of variance, Bland and Altman 1999); its interval is Student's t with variance
    sd^2 (1 / U + 1.96^2 / (2 (U - 1))).
    """
    from scipy.special import stdtrit

    _, group = np.unique(units, return_inverse=True)
    count = np.bincount(group)
    subjects, nights = len(count), len(difference)
    if nights < 2:
        missing = MetricValue(
            undefined_reason="one night, the spread of differences cannot be estimated"
        )
        return missing, missing
    means, mean = np.bincount(group, difference) / count, float(difference.mean())
    total = float(((difference - mean) ** 2).sum())
    within = float(((difference - means[group]) ** 2).sum())
    variance = total / (nights - 1)
    if 1 < subjects < nights:
        inner, outer = within / (nights - subjects), (total - within) / (subjects - 1)
        variance = inner + max(
            0.0, (outer - inner) / ((nights - (count**2).sum() / nights) / (subjects - 1))
        )
    sd = float(np.sqrt(variance))
    limits = [mean - 1.96 * sd, mean + 1.96 * sd]
    if subjects < MINIMUM_UNITS or not bootstrap:
        reason = (
            f"no CI: {subjects} subjects, at least {MINIMUM_UNITS} required"
            if bootstrap
            else "no CI: none was requested"
        )
        low, high = (
            MetricValue(value=value, undefined_reason=reason, n_defined=subjects)
            for value in limits
        )
        return low, high
    se = sd * float(np.sqrt(1 / subjects + 1.96**2 / (2 * (subjects - 1))))
    reach = float(stdtrit(subjects - 1, (1 + LEVEL) / 2)) * se
    low, high = (
        MetricValue(value=v, se=se, lo=v - reach, hi=v + reach, n_defined=subjects) for v in limits
    )
    return low, high


# --- events


def find_events(
    rows: Array, positive: npt.NDArray[np.bool_], starts: npt.NDArray[np.float64], step: float
) -> list[tuple[float, float]]:
    """Start and end of each run of successive positive windows of one recording, in seconds; a gap
    in time ends a run.
    """
    chosen = rows[positive[rows]]
    runs = groupby(
        enumerate(chosen.tolist()), key=lambda one: round(starts[one[1]] / step) - one[0]
    )
    spans = [[starts[row] for _, row in run] for _, run in runs]
    return [(float(span[0]), float(span[-1]) + step) for span in spans]


def score_events(
    index: pl.DataFrame, target: Array, prediction: Array, step: float, bootstrap: int = 1000
) -> EventScores:
    """Sensitivity and false alarms an hour of events of class 1 (ids [n] 0 or 1); windows begin
    every `step` seconds.

    An event is found where any predicted event overlaps it; predicted events that overlap none are
    false alarms. Intervals over subjects.
    """
    starts = index["start"].to_numpy()
    _, unit_of = np.unique(index["subject_id"].to_numpy().astype(str), return_inverse=True)
    n_units = int(unit_of.max(initial=-1)) + 1
    hits: list[float] = []
    owners: list[Any] = []
    alarms = np.zeros(len(starts))
    for rows in list_recordings(index):
        true, found = (
            find_events(rows, values == 1, starts, step) for values in (target, prediction)
        )
        hits += [float(any(a < stop and start < b for a, b in found)) for start, stop in true]
        owners += [unit_of[rows[0]]] * len(true)
        false = [span for span in found if not any(a < span[1] and span[0] < b for a, b in true)]
        alarms[rows[np.searchsorted(starts[rows], [span[0] for span in false])]] = 1.0
    none = MetricValue(undefined_reason="no event in these recordings")
    share = (
        average_over_units(np.array(hits), np.array(owners, np.int64), n_units, "share", bootstrap)
        if hits
        else none
    )
    rate, an_hour = average_over_units(alarms, unit_of, n_units, bootstrap=bootstrap), 3600 / step
    scaled = {
        key: None if (value := getattr(rate, key)) is None else value * an_hour
        for key in ("value", "se", "lo", "hi")
    }
    if scaled["lo"] is not None:
        scaled["lo"] = max(0.0, scaled["lo"])
    return EventScores(
        events=len(hits),
        hours=len(starts) * step / 3600,
        false_alarms=int(alarms.sum()),
        sensitivity=share,
        false_alarms_per_hour=rate.model_copy(update=scaled),
    )
