"""Turns the times of rows into a rate with segments, or puts irregular observations on a grid."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.formats.clocks import (
    DAY,
    LOST,
    MOST_BREAKS,
    NEAR,
    UNITS,
    find_breaks,
    list_steps,
    measure_even_step,
    measure_step,
)
from bitimely_core.types import count_nouns

HOUR, HALF_DAY = 3600.0, DAY / 2  # seconds
COUNTERS = (1 << 16, 1 << 24, 1 << 31, 1 << 32)
MAX_SEGMENTS = 10_000
LEAST_ROWS = 5  # by which a pattern is told from chance
MAX_GRID = 50_000_000  # steps of a grid
SNAP = 1e-4  # share of a rate by which it is rounded to a whole number
IRREGULAR_RATE = 20.0  # Hz: faster signals have a regular clock
# seconds: recordings of one device get one grid, whatever the median of their steps
GRID_STEPS = (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)


class RowStretch(NamedTuple):
    """Rows without a gap between them: `first` to `stop` - 1."""

    first: int
    stop: int
    onset: float  # seconds after the first row


class Timing(NamedTuple):
    """A regular clock."""

    rate: float  # Hz
    stretches: list[RowStretch]
    used: np.ndarray | None  # bool [rows]: rows that repeat others are not; None: all
    findings: list[Finding]


class Grid(NamedTuple):
    """A grid for irregular observations."""

    rate: float  # Hz
    places: np.ndarray  # [rows] step of each row
    steps: int
    onset: float  # seconds of the first step after the first row


def measure_timing(
    seconds: np.ndarray, values: np.ndarray, column: str, first: int, stated: float | None = None
) -> Timing:
    """The rate of rows at these times, and where rows are lost.

    Args:
        seconds: times of the rows, [n].
        values: the rows, [n, channels]; equal rows of one time are used once.
        column: the clock, for messages.
        first: line of the first row.
        stated: Hz, of the map.

    Raises:
        UserError: timestamps for times that are missing, go back or repeat, and for too many gaps;
            sampling_rate where the map states another rate.
    """
    code = Reason.SAMPLING_RATE if stated else Reason.TIMESTAMPS
    findings: list[Finding] = []
    _require_times(seconds, column, first, code)
    seconds = _spread_equal_times(seconds, findings)
    used = _drop_repeats(seconds, values, findings, column, first)
    if used is not None:
        seconds = seconds[used]
    if len(seconds) < 2 or not seconds[-1] > seconds[0]:
        raise input_error(code, "the times do not increase", field=column)
    steps = np.diff(seconds)
    rate = stated or _measure_rate(seconds)
    breaks = find_breaks(seconds, rate)
    if stated:
        _compare_rate(steps, stated, column)
    stretches = _cut_stretches(seconds, breaks, rate)
    _report_gaps(stretches, seconds, rate, findings)
    _report_wander(seconds, stretches, rate, findings)
    return Timing(rate, stretches, used, findings)


def _require_times(seconds: np.ndarray, column: str, first: int, code: Reason) -> None:
    missing = np.isnan(seconds)
    if missing.any():
        line = first + int(missing.argmax())
        raise input_error(
            Reason.TIMESTAMPS,
            f"the time of line {line} is missing ({int(missing.sum())} are)",
            "a row without a time has no place",
            "Remove the row, or give `rate` without `time`",
            field=column,
            row=line,
        )
    back = np.diff(seconds) < 0
    if back.any():
        line = first + int(back.argmax()) + 1
        raise input_error(
            code,
            f"the time of line {line} lies before that of the line above",
            "expected times that go up",
            "Sort the rows; or cut the file there, where another recording or person begins",
            field=column,
            row=line,
        )


def continue_clock(
    seconds: np.ndarray, unit: str, column: str, first: int, findings: list[Finding]
) -> np.ndarray:
    """Times of a clock that starts again as those of one that goes on; others as they are.

    Numbers do so at the end of a counter of 16, 24, 31 or 32 bits, or of a day; texts at the end of
    an hour, half a day or a day, and where summer time ends. `unit`: of numbers, a key of
    `clocks.UNITS`.
    """
    steps = np.diff(seconds)
    falls = np.flatnonzero(steps < 0)
    rising = steps[steps > 0]
    if 0 in {falls.size, rising.size}:
        return seconds
    step = float(np.median(rising))
    periods = [HOUR, HALF_DAY, DAY]
    if unit != "datetime":
        periods = [DAY, *(count * UNITS.get(unit, 1.0) for count in COUNTERS)]
    lost = np.abs(step - steps[falls] - np.array(periods)[:, None]).max(1)
    period = periods[int(lost.argmin())]
    if lost.min() > min(10 * step, 0.01 * period):
        return seconds
    line = first + int(falls[0]) + 1
    problem = f"the clock starts again after {period:.10g} s, first at line {line} (in all "
    problem += f"{len(falls)} times)"
    action, hint = "read as one that goes on", "If another recording begins there, cut the file"
    findings.append(
        input_warning(
            Reason.TIMESTAMPS, problem, action, hint, field=column, row=line, count=len(falls)
        )
    )
    passed = np.zeros(len(seconds))
    passed[falls + 1] = period
    return seconds + np.cumsum(passed)


def _spread_equal_times(seconds: np.ndarray, findings: list[Finding]) -> np.ndarray:
    """Times that are rounded, to seconds say, with the rows of one time spread over it."""
    if len(seconds) < 4 or float(np.mean(np.diff(seconds) == 0)) < 0.5:
        return seconds
    times, starts, counts = np.unique(seconds, return_index=True, return_counts=True)
    if len(times) < 3:
        return seconds
    inner = counts[1:-1]
    usual, step = int(np.median(inner)), float(np.median(np.diff(times)))
    if np.abs(inner - usual).max() > 1 or not usual:
        return seconds
    problem = f"{usual} rows have one time each: the times are rounded to {step:g} s"
    findings.append(
        input_warning(Reason.TIMESTAMPS, problem, "the rows are spread evenly between them")
    )
    if inner.min() < inner.max():  # 50 rows, then 51: a row moves over the edge of a second
        return np.arange(len(seconds)) * float(times[-1] - times[1]) / int(inner.sum())
    position = np.arange(len(seconds)) - np.repeat(starts, counts)
    position[: counts[0]] += max(0, usual - int(counts[0]))  # the first second is cut off
    spread = seconds + position * step / usual
    return np.asarray(spread - spread[0])


def restore_rounded(seconds: np.ndarray, findings: list[Finding]) -> np.ndarray:
    """The even clock whose times were written with too few digits, such as five significant ones:
    0.008 s becomes 0.01 s after 100 s. Other times as they are.
    """
    steps = np.diff(seconds)
    is_known = len(seconds) > 3 and np.isfinite(steps).all() and seconds[-1] > seconds[0]
    if not is_known or (steps != 0).all():
        return seconds
    rate = round((len(seconds) - 1) / float(seconds[-1] - seconds[0]))
    if not rate:
        return seconds
    even = seconds[0] + np.arange(len(seconds)) / rate
    late = steps[-len(steps) // 10 :]  # the last times have the fewest digits behind the point
    digits = -round(np.log10(late[late > 0].min(initial=1.0)))
    is_written = np.abs(even - seconds) < 0.55 * 10.0**-digits
    if not is_written.all():
        return seconds
    problem = f"the times are rounded to {10.0**-digits:g} s"
    findings.append(input_warning(Reason.TIMESTAMPS, problem, f"the rows are even, at {rate} Hz"))
    return even


def _drop_repeats(
    seconds: np.ndarray, values: np.ndarray, findings: list[Finding], column: str, first: int
) -> np.ndarray | None:
    """The rows to keep; None: all. Raises UserError (timestamps) for unequal rows of one time."""
    same = np.diff(seconds) == 0
    if not same.any():
        return None
    rows = np.flatnonzero(same) + 1
    equal = ((values[rows] == values[rows - 1]) | np.isnan(values[rows])).all(1)
    if not equal.all():
        line = first + int(rows[~equal][0])
        raise input_error(
            Reason.TIMESTAMPS,
            f"line {line} has the time of the line above and other values"
            f" ({int((~equal).sum())} such lines)",
            "two samples cannot have one time",
            "Give `rate` in [[files]] of --map, without `time`, to use the rows in their order",
            field=column,
            row=line,
        )
    used = np.ones(len(seconds), bool)
    used[rows] = False
    problem = f"{len(rows)} rows repeat the row above"
    findings.append(input_warning(Reason.DUPLICATES, problem, "used once", count=len(rows)))
    return used


def _measure_rate(seconds: np.ndarray) -> float:
    """Hz of the steps without gaps, rounded where that moves no sample."""
    breaks = find_breaks(seconds, 1 / float(np.median(np.diff(seconds))))
    rate = 1 / measure_even_step(seconds, breaks)
    length = float(seconds[-1] - seconds[0])
    for nice in (float(round(rate)), 1 / max(1, round(1 / rate))):
        if nice and abs(nice / rate - 1) < SNAP and abs(nice - rate) * length < NEAR:
            return nice
    return rate


def _compare_rate(steps: np.ndarray, stated: float, column: str) -> None:
    """Raises UserError (sampling_rate) where most steps are of another rate."""
    measured = 1 / float(np.median(steps))
    if abs(measured / stated - 1) > 0.01 and np.mean(np.abs(steps * stated - 1) < NEAR) < 0.5:
        raise input_error(
            Reason.SAMPLING_RATE,
            f"its clock is one of {measured:.6g} Hz",
            f"the map states {stated:g} Hz",
            "Correct `rate`, or state the unit of the times with `clock`",
            field=column,
        )


def _cut_stretches(seconds: np.ndarray, breaks: np.ndarray, rate: float) -> list[RowStretch]:
    if len(breaks) >= MAX_SEGMENTS:
        raise input_error(
            Reason.TIMESTAMPS, f"{len(breaks)} gaps in time", f"expected fewer than {MAX_SEGMENTS}"
        )
    edges = [0, *breaks.tolist(), len(seconds)]
    stretches = []
    for first, stop in pairwise(edges):
        onset = float(seconds[first] - seconds[0])
        place = round(onset * rate)
        if abs(onset * rate - place) < 0.1:  # times are rounded
            onset = place / rate
        stretches.append(RowStretch(first, stop, onset))
    return stretches


def _report_gaps(
    stretches: list[RowStretch], seconds: np.ndarray, rate: float, findings: list[Finding]
) -> None:
    gaps = len(stretches) - 1
    if not gaps:
        return
    lengths = [
        following.onset - before.onset - (before.stop - before.first) / rate
        for before, following in pairwise(stretches)
    ]
    lost = round(sum(lengths) * rate)
    extent = f"{sum(lengths):.6g} s in all ({lost} rows at {rate:g} Hz)"
    problem = f"{count_nouns(gaps, 'gap')} in time, {extent}"
    action = "kept as segments at their true times"
    findings.append(input_warning(Reason.DISCONTINUOUS, problem, action, count=gaps))


def _report_wander(
    seconds: np.ndarray, stretches: list[RowStretch], rate: float, findings: list[Finding]
) -> None:
    """A warning where samples lie more than their distance off an even clock."""
    most = 0.0
    for first, stop, _ in stretches:
        offset = (seconds[first:stop] - seconds[first]) * rate - np.arange(stop - first)
        most = max(most, float(np.abs(offset - np.median(offset)).max(initial=0.0)))
    if most > 1.0:
        problem = f"times lie up to {most / rate:.3g} s ({most:.3g} samples) off {rate:.6g} Hz"
        findings.append(
            input_warning(Reason.TIMESTAMPS, problem, "samples are treated as evenly spaced")
        )


def is_sparse(seconds: np.ndarray) -> bool:
    """Whether slow observations are lost so often that their times are those of no even clock."""
    step, steps = measure_step(seconds), list_steps(seconds)
    gaps = np.count_nonzero(steps >= LOST * step)
    return step >= 1 / IRREGULAR_RATE and bool(gaps > max(LEAST_ROWS, MOST_BREAKS * steps.size))


def find_extra_rows(seconds: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether rows hold no value, and no time or one between those of two samples that follow each
    other: such as a line of an event among samples.
    """
    is_empty = np.isnan(values).all(1)
    around = np.full(len(seconds), np.inf)
    around[1:-1] = seconds[2:] - seconds[:-2]
    # of times that are rounded, with several rows of one, the median is 0
    is_between = around < LOST * np.median(np.append(list_steps(seconds[~is_empty]), 0.0))
    return np.asarray(is_empty & (np.isnan(seconds) | is_between))


def drop_empty_rows(column: np.ndarray) -> tuple[np.ndarray, int]:
    """A slow channel that is filled up with empty cells, and the rows from value to value.

    Values lie up to half a step off their rows, so that it begins with the other channels. Another
    column stays as it is, with a step of 1.
    """
    filled = np.flatnonzero(~np.isnan(column))
    if filled.size < LEAST_ROWS:
        return column, 1
    rows = filled - filled[0]
    step = int(np.gcd.reduce(rows))
    if 2 * step * filled.size <= rows[-1]:
        return column, 1
    first = int(filled[0]) % step
    values = column[first::step]
    if 2 * first > step:
        values = np.append(np.float32(np.nan), values)
    return values, step


def place_on_grid(
    seconds: np.ndarray, origin: float, column: str, stated: float | None = None
) -> Grid:
    """A grid of steps for observations at irregular times; its zero is that of the file's clock.

    Args:
        seconds: times after the first row, [n].
        origin: the first time on the file's own clock.
        column: the clock, for messages.
        stated: Hz of the grid, of the map.

    Raises:
        UserError: timestamps, for a signal too fast for that, or a grid of too many steps.
    """
    steps = np.diff(np.sort(seconds[np.isfinite(seconds)]))
    steps = steps[steps > 0]
    if not steps.size:
        raise input_error(Reason.TIMESTAMPS, "the times do not increase", field=column)
    median, mean = float(np.median(steps)), float(np.mean(steps))
    if not stated and 1 / median > IRREGULAR_RATE:
        raise input_error(
            Reason.TIMESTAMPS,
            f"the times have no common step: {steps.min():.3g} to {steps.max():.3g} s",
            f"the mean is {1 / mean:.6g} Hz",
            "Give `rate` in [[files]] of --map, without `time`, to use the rows as evenly spaced",
            field=column,
        )
    step = 1 / stated if stated else min(GRID_STEPS, key=lambda s: abs(np.log(s / median)))
    places = np.floor((seconds + origin) / step + 1e-6)
    begin = float(np.nanmin(places))
    count = int(np.nanmax(places) - begin) + 1
    if count > MAX_GRID:
        problem = f"{count} steps of {step:g} s from the first to the last time"
        raise input_error(
            Reason.TIMESTAMPS, problem, f"expected up to {MAX_GRID}", "Give a smaller `rate`"
        )
    return Grid(1 / step, places - begin, count, begin * step - origin)


def average_on_grid(values: np.ndarray, grid: Grid) -> np.ndarray:
    """The mean of the observations in each step, [steps, channels]; NaN where there is none."""
    result = np.full((grid.steps, values.shape[1]), np.nan)
    for k, column in enumerate(values.T):
        seen = np.isfinite(column) & np.isfinite(grid.places)
        places = grid.places[seen].astype(np.int64)
        counts = np.bincount(places, minlength=grid.steps)
        sums = np.bincount(places, column[seen], grid.steps)
        np.divide(sums, counts, out=result[:, k], where=counts > 0)
    return result
