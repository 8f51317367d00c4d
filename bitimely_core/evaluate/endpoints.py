"""Clinical endpoints: of hypnograms, by the definitions of the AASM manual as YASA computes them,
and of events.

A hypnogram is a sequence of epochs of equal length from lights off to lights on: class ids, -1 =
not scored. Legend: E epochs, K classes, n windows, N nights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate.intervals import LEVEL, MINIMUM_UNITS, average_over_units, average_rate
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
# names of a class of which nothing is to be found
QUIET = re.compile(
    r"(no|non|not|none|without|normal|sinus|sr|nsr|background|bckg|interictal|baseline|healthy|"
    r"control|negative|false|0)\b",
    re.IGNORECASE,
)


def is_staging(class_names: Sequence[str]) -> bool:
    """Whether the classes are sleep stages: wake and at least one stage of sleep, and nothing
    else.
    """
    stages = {STAGES.get(name.upper()) for name in class_names}
    return None not in stages and "W" in stages and len(stages) > 1


def place_epochs(
    starts: npt.ArrayLike, stages: npt.ArrayLike, epoch: float, *, origin: float | None = None
) -> Array:
    """The hypnogram [E] of windows that begin at `starts` (seconds); -1 where there is none.
    `origin`: start of the first epoch.
    """
    seconds = np.asarray(starts, np.float64)
    first = seconds.min(initial=np.inf) if origin is None else origin
    place = np.rint((seconds - first) / epoch).astype(np.int64)
    hypnogram = np.full(place.max(initial=-1) + 1, -1, np.int64)
    hypnogram[place] = np.asarray(stages, np.int64)
    return hypnogram


def compute_endpoints(
    hypnogram: Array, class_names: Sequence[str], epoch: float
) -> dict[str, EndpointValue]:
    """Endpoints of a hypnogram [E] with epochs of `epoch` seconds; what it cannot define is null
    with the reason.

    Latencies count from the first epoch, `rem_latency_from_onset` from the first epoch of sleep;
    the sleep period ends with the last one.
    """
    names = [STAGES[name.upper()] for name in class_names]
    # -1 is the last: not scored
    stage = np.array([*names, ""])[hypnogram]
    sleep = np.flatnonzero(np.isin(stage, SLEEP)).tolist()
    first, last = (sleep[0], sleep[-1] + 1) if len(sleep) else (0, 0)
    epochs, total = len(stage), len(sleep)
    period = last - first or None
    endpoints = {
        "time_in_bed": _count_epochs(epochs, epoch),
        "total_sleep_time": _count_epochs(total, epoch),
        "sleep_efficiency": _divide_epochs(total, epochs, "no epochs"),
        "sleep_period_time": _count_epochs(period, epoch),
        "sleep_maintenance_efficiency": _divide_epochs(total, period),
        "wake_after_sleep_onset": _count_epochs(period and (stage[first:last] == "W").sum(), epoch),
        "sleep_onset_latency": _count_epochs(period and first, epoch),
    }
    for name in filter(names.__contains__, SLEEP):
        onset = next(iter(np.flatnonzero(stage == name).tolist()), None)
        reason = f"no epoch of {name}"
        endpoints[f"latency_{name}"] = _count_epochs(onset, epoch, reason)
        if name == "REM":
            after = None if onset is None else onset - first
            endpoints["rem_latency_from_onset"] = _count_epochs(after, epoch, reason)
    for name in filter(names.__contains__, ("W", *SLEEP)):
        count = (stage == name).sum()
        endpoints[f"minutes_{name}"] = _count_epochs(count, epoch)
        if name != "W":
            endpoints[f"percent_{name}"] = _divide_epochs(count, total)
    endpoints["minutes_not_scored"] = _count_epochs((stage == "").sum(), epoch)
    return endpoints


def _count_epochs(count: float | None, epoch: float, reason: str = NO_SLEEP) -> EndpointValue:
    """The minutes of a number of epochs; None: undefined for a reason."""
    if count is None:
        return EndpointValue(undefined_reason=reason)
    return EndpointValue(value=float(count) * (epoch / 60))


def _divide_epochs(part: float, among: float | None, reason: str = NO_SLEEP) -> EndpointValue:
    """The share of epochs among others, %."""
    if not among:
        return EndpointValue(unit="%", undefined_reason=reason)
    return EndpointValue(value=100 * float(part) / among, unit="%")


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
    units, kappas = [], []
    scored: list[dict[str, EndpointValue]] = []
    predicted: list[dict[str, EndpointValue]] = []
    for rows in list_recordings(index):
        starts = index["start"].to_numpy()[rows]
        units.append(owners.index(index["subject_id"][int(rows[0])]))
        kappas.append(compute_kappa(target[rows], prediction[rows], len(class_names)))
        for nights, stages in ((scored, target), (predicted, prediction)):
            hypnogram = place_epochs(starts, stages[rows], epoch)
            nights.append(compute_endpoints(hypnogram, class_names, epoch))
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
    agreement = float((first == second).mean())
    return (agreement - chance) / (1 - chance) if chance < 1 else np.nan


def summarize_nights(nights: Nights, bootstrap: int = 1000) -> NightScores:
    """Mean kappa and Bland-Altman agreement of every endpoint, with intervals over subjects;
    `bootstrap` 0: none.
    """
    n_units = int(nights.units.max(initial=-1)) + 1
    defined = nights.kappa[np.isfinite(nights.kappa)]
    names = list(nights.scored[0]) if nights.scored else []
    return NightScores(
        nights=len(nights.units),
        subjects=n_units,
        kappa=average_over_units(nights.kappa, nights.units, n_units, bootstrap=bootstrap),
        kappa_range=(float(defined.min()), float(defined.max())) if len(defined) else None,
        endpoints={name: _compare_endpoint(nights, name, n_units, bootstrap) for name in names},
    )


def pair_endpoint(nights: Nights, name: str) -> npt.NDArray[np.float64]:
    """Scored and predicted values of an endpoint [N, 2]; NaN: undefined."""
    nights_of_both = (nights.scored, nights.predicted)
    columns = [[night[name].value for night in part] for part in nights_of_both]
    return np.array(columns, np.float64).T


def _compare_endpoint(nights: Nights, name: str, n_units: int, bootstrap: int) -> EndpointAgreement:
    pairs = pair_endpoint(nights, name)
    defined = np.isfinite(pairs).all(1)
    unit = nights.scored[0][name].unit
    if not defined.any():
        reasons = filter(None, (night[name].undefined_reason for night in nights.scored))
        undefined = MetricValue(undefined_reason=next(reasons, "no night defines both"))
        return EndpointAgreement(
            unit=unit, nights=0, bias=undefined, lower_limit=undefined, upper_limit=undefined
        )
    scored, predicted = pairs[defined].T
    difference, units = predicted - scored, nights.units[defined]
    low, high = limits_of_agreement(difference, units, bootstrap=bootstrap)
    return EndpointAgreement(
        unit=unit,
        nights=len(units),
        scored=float(scored.mean()),
        predicted=float(predicted.mean()),
        bias=average_over_units(difference, units, n_units, bootstrap=bootstrap),
        lower_limit=low,
        upper_limit=high,
    )


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
        reason = "one night, the spread of differences cannot be estimated"
        return MetricValue(undefined_reason=reason), MetricValue(undefined_reason=reason)
    means, mean = np.bincount(group, difference) / count, float(difference.mean())
    total = float(((difference - mean) ** 2).sum())
    within = float(((difference - means[group]) ** 2).sum())
    variance = total / (nights - 1)
    if 1 < subjects < nights:
        inner, outer = within / (nights - subjects), (total - within) / (subjects - 1)
        mean_nights = (nights - (count**2).sum() / nights) / (subjects - 1)
        variance = inner + max(0.0, (outer - inner) / mean_nights)
    sd = float(np.sqrt(variance))
    limits = [mean - 1.96 * sd, mean + 1.96 * sd]
    if subjects < MINIMUM_UNITS or not bootstrap:
        few = f"{subjects} subjects, at least {MINIMUM_UNITS} required"
        reason = f"no CI: {few if bootstrap else 'none was requested'}"
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
    # windows without a gap have one difference of number and place
    gaps = np.rint(starts[chosen] / step) - np.arange(len(chosen))
    runs = np.split(starts[chosen], np.flatnonzero(np.diff(gaps)) + 1)
    return [(float(run[0]), float(run[-1]) + step) for run in runs if len(run)]


def choose_event(names: Sequence[str]) -> int:
    """Which of two classes is the event: the other one where the name of one says that nothing
    happens, as `sinus` beside `AF`, else the second.
    """
    is_quiet = [QUIET.match(re.sub(r"[\W_]+", " ", name)) is not None for name in names]
    return int(is_quiet != [False, True])


def score_events(
    index: pl.DataFrame, target: Array, prediction: Array, step: float, bootstrap: int = 1000
) -> EventScores:
    """Sensitivity and false alarms an hour of events (target and prediction [n], 1 or True where
    one is); windows begin every `step` seconds.

    An event is found where any predicted event overlaps it; predicted events that overlap none are
    false alarms. Intervals over subjects.
    """
    starts = index["start"].to_numpy()
    _, units = np.unique(index["subject_id"].to_numpy().astype(str), return_inverse=True)
    n_units = int(units.max(initial=-1)) + 1
    hits: list[float] = []
    owners: list[int] = []
    alarms = np.zeros(len(starts))
    for rows in list_recordings(index):
        true, predicted = (
            find_events(rows, values == 1, starts, step) for values in (target, prediction)
        )
        hits += [float(_overlaps(event, predicted)) for event in true]
        owners += [units[rows[0]]] * len(true)
        false = [start for start, end in predicted if not _overlaps((start, end), true)]
        alarms[rows[np.searchsorted(starts[rows], false)]] = 1.0
    sensitivity = MetricValue(undefined_reason="no event in these recordings")
    if hits:
        sensitivity = average_over_units(
            np.array(hits), np.array(owners, np.int64), n_units, "share", bootstrap
        )
    hours = np.bincount(units, minlength=n_units) * step / 3600
    rate = average_rate(np.bincount(units, alarms, n_units), hours, 3600 / step, bootstrap)
    return EventScores(
        events=len(hits),
        hours=len(starts) * step / 3600,
        false_alarms=int(alarms.sum()),
        sensitivity=sensitivity,
        false_alarms_per_hour=rate,
    )


def _overlaps(event: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Whether any other event overlaps an event."""
    return any(start < event[1] and event[0] < end for start, end in others)
