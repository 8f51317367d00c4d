"""Places the labels of a text file in the time of their recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats.clocks import DAY
from bitimely_core.formats.label_rows import (
    Clock,
    LabelRow,
    LabelText,
    find_commonest_step,
    find_step,
    list_onsets,
    move_rows,
    scale_rows,
)
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.recordings.mapping import LabelRules
from bitimely_core.types import count_nouns

HOUR = 3600.0
LATEST_ZERO = 600.0  # seconds; times that begin later are times of day
STEPS = (1, 2, 4, 5, 10, 15, 20, 60)  # seconds of epochs other than the usual ones
LEAST_EPOCHS = 10  # of a list that says how long they are, or where the clock was changed
MS = 1000.0  # in a second
SPRING = {3, 4, 9, 10}  # months in which clocks are put forward, north and south
SUNDAY = 6


class RecordingTime(NamedTuple):
    """When a recording begins and how long it is."""

    start: datetime | None
    length: float  # seconds
    rate: float  # Hz, of its fastest channel
    origin: float = 0.0  # its beginning by the clock of its own file, seconds
    zone: float | None = None  # seconds from UTC to the clock of `start`, where it is stated


class PlacedRows(NamedTuple):
    """Labels in the time of their recording."""

    rows: list[LabelRow]  # onsets are seconds of the recording
    findings: Sequence[Finding] = ()
    step: float | None = None  # seconds of a row without a length, where it is known


def place_rows(table: LabelText, time: RecordingTime, rules: LabelRules) -> PlacedRows | None:
    """The labels of a text file in seconds of their recording, each with its length.

    None: they are timed by the clock, and the recording states no start.
    """
    placed = PLACERS[table.clock](table, time, rules)
    if placed is None:
        return None
    step = find_step(placed.rows) if placed.step is None else placed.step
    rows = [row if row.duration is not None else row._replace(duration=step) for row in placed.rows]
    return PlacedRows(rows, placed.findings)


# --- epochs, samples and seconds


def _place_epochs(table: LabelText, time: RecordingTime, rules: LabelRules) -> PlacedRows:
    step, said = _choose_epoch(table, rules.epoch, time.length)
    begin, placed = _find_begin(table, time, rules)
    rows = scale_rows(table.rows, step, -begin)
    return PlacedRows(rows, [*said, *placed], step)


def _place_samples(table: LabelText, time: RecordingTime, _: LabelRules) -> PlacedRows:
    return PlacedRows(_count_seconds(table.rows, time.rate))


def _place_seconds(table: LabelText, time: RecordingTime, _: LabelRules) -> PlacedRows:
    unit = _find_other_unit(table.rows, time)
    if unit:
        return PlacedRows(_count_seconds(table.rows, unit.rate), [unit.finding])
    return PlacedRows(scale_rows(table.rows, zero=time.origin))


def _count_seconds(rows: Sequence[LabelRow], rate: float) -> list[LabelRow]:
    """Rows that count samples of `rate` Hz, in seconds."""
    return scale_rows(rows, 1 / rate, length_unit=1 / rate)


def _find_begin(
    table: LabelText, time: RecordingTime, rules: LabelRules
) -> tuple[float, tuple[Finding, ...]]:
    """Seconds of the recording at the first stage of a list, and what is said of it.

    A list begins with the recording, unless it states another time. When the lights went off it
    need not begin.
    """
    begin = _measure_delay(table.begin, time)
    if begin:
        return begin, ()
    off = _measure_delay(table.lights_off, time)
    if not off or rules.shift:
        return 0.0, ()
    problem = f"its stages are read from the start of the recording; lights off is {off:g} s later"
    hint = f"If they begin then, write shift = {off:g} in [labels] of the map"
    return 0.0, (input_warning(Reason.LABEL, problem, "lights off is not used", hint),)


def _measure_delay(moment: float | None, time: RecordingTime) -> float:
    """Seconds from the start of the recording to a time of day; 0 where it is not within."""
    if moment is None or time.start is None:
        return 0.0
    delay = round(moment - _count_from_midnight(time.start)) % DAY
    return delay if delay < time.length else 0.0


def _choose_epoch(
    table: LabelText, stated: float | None, length: float
) -> tuple[float, tuple[Finding, ...]]:
    """Seconds of a row of a list of epochs, and what is said of it.

    They are stated, else 30; where so many run past the end of the recording, what fits it.
    """
    epoch = stated or table.epoch
    count = int(max(row.onset for row in table.rows)) + 1
    step = find_epoch_length(count, length)
    if epoch or count < LEAST_EPOCHS or not step:
        return epoch or EPOCH, ()
    problem = f"has {count} stages, as many as epochs of {step} s in a recording of {length:g} s"
    if count * EPOCH < length:
        action, hint = f"read as epochs of {EPOCH:g} s, from its start", f"epoch = {step}"
        step = int(EPOCH)
    else:
        action, hint = f"read as epochs of {step} s", f"epoch = {EPOCH:g}"
    hint = f"If that is wrong, write {hint} in [labels] of the map"
    return float(step), (input_warning(Reason.LABEL, problem, action, hint),)


def find_epoch_length(count: int, length: float) -> int:
    """Seconds of so many epochs that last as long as the recording; 0: none do."""
    nearest = min(STEPS, key=lambda step: abs(count * step - length))
    return nearest if abs(count * nearest - length) < 2 * nearest else 0


class OtherUnit(NamedTuple):
    """In what times count that are no seconds."""

    rate: float  # of it in a second
    finding: Finding


def _find_other_unit(rows: Sequence[LabelRow], time: RecordingTime) -> OtherUnit | None:
    """The unit of whole numbers that run far past the end of the recording in seconds, and to its
    end as samples or milliseconds; None: there is none.
    """
    end = max(row.onset + (row.duration or 0.0) for row in rows)
    if end < 2 * time.length or not all(row.onset.is_integer() for row in rows):
        return None
    units = {f"samples at {time.rate:g} Hz": time.rate, "milliseconds": MS}
    name, rate = min(units.items(), key=lambda unit: abs(end - unit[1] * time.length))
    # labels of a night beside its first minutes are seconds: in another unit they are too short
    if not time.length / 2 < end / rate < time.length + EPOCH or _measure_span(rows) < rate:
        return None
    problem = f"its times run to {end:g}, and the recording ends at {time.length:g} s"
    hint = "If that is wrong, write them in seconds"
    return OtherUnit(
        rate, input_warning(Reason.ANNOTATION_OUT_OF_RANGE, problem, f"read as {name}", hint)
    )


def _measure_span(rows: Sequence[LabelRow]) -> float:
    """The median length of labels, or from one to the next where they state none; 0 of a single
    one.
    """
    stated = [row.duration for row in rows if row.duration is not None]
    return median(stated or [b.onset - a.onset for a, b in pairwise(rows)] or [0.0])


# --- times of the clock


def _place_on_clock(table: LabelText, time: RecordingTime, rules: LabelRules) -> PlacedRows | None:
    table = _move_to_zone(table, time.zone)
    if time.start is None:
        origin = _find_origin(table, time)
        return None if origin is None else PlacedRows(scale_rows(table.rows, zero=origin))
    shift = _find_shift(table, time, time.start)
    onsets = list_onsets(table.rows)
    if not table.day and time.length <= DAY:
        onsets = _return_to_evening(onsets)
    onsets = _undo_clock_changes(onsets, time.start - timedelta(seconds=shift))
    is_utc = time.zone == 0 and table.zone is None and not rules.shift
    rows = move_rows(table.rows, onsets - shift)
    return PlacedRows(rows, _report_clock(table, time.start, shift, is_utc))


def _move_to_zone(table: LabelText, zone: float | None) -> LabelText:
    """Labels by the clock of the recording, where both say how far theirs is from UTC."""
    if table.zone is None or zone is None or table.zone == zone:
        return table
    delay = zone - table.zone
    if not table.day:
        first = table.rows[0].onset
        delay = (first + delay) % DAY - first
    return table._replace(rows=scale_rows(table.rows, zero=-delay))


# --- where the recording begins


def _find_origin(table: LabelText, time: RecordingTime) -> float | None:
    """Seconds of the table's times at the start of a recording without a date, whose own clock may
    be one of times of day; None: unknown.
    """
    first = table.rows[0].onset
    if first <= LATEST_ZERO and not table.day:
        return 0.0
    delay = (first - time.origin) % DAY
    return first - delay if time.origin and delay < time.length else None


def _find_shift(table: LabelText, time: RecordingTime, start: datetime) -> float:
    """Seconds of the table's times at the start of the recording: by its date, where labels of that
    date are within or begin an hour earlier, else by the time of day.
    """
    first = table.rows[0].onset
    if table.day:
        shift = (start - datetime.combine(table.day, datetime.min.time())).total_seconds()
        onsets = list_onsets(table.rows) - shift
        if onsets.min() < time.length and onsets.max() > -HOUR:
            return shift
    offset = _measure_offset(first, start)
    return 0.0 if _counts_from_start(table, time, offset) else first - offset


def _measure_offset(first: float, start: datetime) -> float:
    """Seconds of the recording at a time of day, which may be up to an hour before its start."""
    offset = (first - _count_from_midnight(start)) % DAY
    return offset - DAY if offset > DAY - HOUR else offset


def _count_from_midnight(moment: datetime) -> float:
    """Seconds of its day."""
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return (moment - midnight).total_seconds()


def _counts_from_start(table: LabelText, time: RecordingTime, offset: float) -> bool:
    """Whether times of day that begin near 0 are times of the recording: they fit so, and by the
    clock they run past its end or lie outside.

    `offset`: seconds of the recording at the first of them, by the clock.
    """
    first, last = table.rows[0].onset, max(row.onset for row in table.rows)
    if table.day or first >= LATEST_ZERO:
        return False
    beyond = offset + last - first - time.length
    is_near = 0 < offset <= 2 * beyond or first == 0 < beyond
    return offset > time.length or (last <= time.length and is_near)


# --- clocks that are put forward or back, lists that begin again


def _return_to_evening(onsets: np.ndarray) -> np.ndarray:
    """Times of a recording of a day at most, in which a list may begin again in the evening: that
    of the next type of event, or of the next scorer.
    """
    days = np.cumsum(np.diff(onsets, prepend=onsets[0]) > DAY / 2)
    return onsets - DAY * days


def _undo_clock_changes(onsets: np.ndarray, zero: datetime) -> np.ndarray:
    """Times of a list of epochs that goes on where the clock is put forward or back by an hour.

    `zero`: when the times count from. Forward, an hour without epochs is told from a clock that
    jumps by the day: a Sunday of spring.
    """
    steps = np.diff(onsets)
    step, count = find_commonest_step(np.round(steps, 3).tolist())
    if len(steps) < LEAST_EPOCHS or count < 0.9 * len(steps):
        return onsets
    changes = np.zeros(len(onsets))
    for row in np.flatnonzero(np.abs(np.abs(steps - step) - HOUR) < 1):
        moment = zero + timedelta(seconds=float(onsets[row + 1]))
        is_spring = moment.month in SPRING and moment.weekday() == SUNDAY
        if steps[row] < 0 or (is_spring and 2 <= moment.hour <= 3):
            changes[row + 1] = steps[row] - step
    return onsets - np.cumsum(changes)


# --- what is said


def _report_clock(table: LabelText, start: datetime, shift: float, is_utc: bool) -> list[Finding]:
    """Warnings of times that may count from the start, be of another zone or of another day."""
    if table.day is None and not shift and _count_from_midnight(start):
        return [_report_zero(start)]
    days = _count_days_between(table.day, shift, start) if table.day else 0
    findings = [_report_other_day(days)] if days else []
    if is_utc:
        findings.append(_report_utc())
    return findings


def _count_days_between(day: date, shift: float, start: datetime) -> int:
    """Days from a recording to the dates of its labels, of which the first is `day`; 0 where one of
    both is the first of January, which devices and programs write that keep no date.
    """
    begin = datetime.combine(day, datetime.min.time()) + timedelta(seconds=shift)
    is_dated = all((moment.month, moment.day) != (1, 1) for moment in (day, start))
    return round((begin - start).total_seconds() / DAY) if is_dated else 0


def _report_other_day(days: int) -> Finding:
    place = "after" if days > 0 else "before"
    problem = f"its dates are {count_nouns(abs(days), 'day')} {place} those of the recording"
    hint = "Are they of another recording?"
    return input_warning(Reason.START_MISMATCH, problem, "placed by the time of day", hint)


def _report_zero(start: datetime) -> Finding:
    problem = f"its times are no times of day of the recording, which begins at {start:%H:%M:%S}"
    return input_warning(Reason.LABEL, problem, "they are counted from its start")


def _report_utc() -> Finding:
    problem = "its times of day are taken for UTC, since the recording is timed in UTC"
    hint = "If they are an hour ahead of UTC, write shift = -3600 in [labels] of the map, and so on"
    return input_warning(Reason.START_MISMATCH, problem, "they may be hours off", hint)


Placer = Callable[[LabelText, RecordingTime, LabelRules], PlacedRows | None]
PLACERS: dict[Clock, Placer] = {
    "start": _place_seconds,
    "day": _place_on_clock,
    "epochs": _place_epochs,
    "samples": _place_samples,
}
