"""Reads tables of samples: a column a channel and a row a sample, or a row a recording."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, filterfalse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    select_errors,
)
from bitimely_core.formats import clocks, sample_values, sniffer, table_facts, tables
from bitimely_core.formats.source import locate_errors, report_faults
from bitimely_core.formats.text import list_names, number_duplicates, sanitize_label
from bitimely_core.formats.units import narrow_samples
from bitimely_core.recordings import timing
from bitimely_core.recordings.channels import list_needed, read_states
from bitimely_core.recordings.folder_tables import account_rows, is_missing, parse_rows
from bitimely_core.recordings.mapping import PEOPLE, RecordingInfo, fold_column
from bitimely_core.recordings.missing_codes import drop_codes
from bitimely_core.recordings.selection import make_record, report_missing
from bitimely_core.types import Annotation, AttributeValue, Record, Records, Signal

MOST_CHANNELS = 64  # of a table that may have fewer rows
MOST_UNIQUE = 0.6  # of the times of a table with a row for each channel
LEAST_ROWS = 6  # of a person in a table of several
RECORDINGS = {"record", "record_id", "recording", "recording_id"}  # of columns that say which
STATES = "labels of the rows"  # the column of their numbers
MOST_STATES, LONGEST_STATE = 60, 60  # different texts, letters: others are remarks
FALLING = 0.9  # of the steps of a clock whose rows lie the newest first


class TimedSignals(NamedTuple):
    """The channels of a table with their times."""

    signals: list[Signal]
    findings: list[Finding]
    start: datetime | None  # of the first sample, where the clock is absolute
    origin: float  # seconds of the first sample on the file's own clock
    zone: float | None = None  # seconds from UTC to the clock of `start`, where it is stated

    @property
    def is_grid(self) -> bool:
        """Whether missing samples are those of a grid for irregular times."""
        return any(finding.code == Reason.MISSING_SAMPLES for finding in self.findings)


def read_table(path: Path, rel: str, info: RecordingInfo) -> Record | Records:
    """A text table or a Parquet file with a column a channel and a row a sample; a recording for
    each person where a column names several.

    Empty cells are missing values, lost rows gaps. Labels of tables whose seconds lie on the
    table's own clock are moved with it.

    Raises UserError as `sniffer.sniff_table`, `sample_values.read_values` and
    `timing.measure_timing`.
    """
    with locate_errors(rel):
        facts = sniff_recording(path, info)
        people = find_subjects(path, facts, info)
        if people:
            facts = facts._replace(columns=_leave_out(facts.columns, people.place))
        remarks: list[Finding] = []
        places, names = _choose_channels(facts, info, remarks)
        clock = _choose_clock(facts, info, places)
        rate = _find_rate(facts, info, clock)
        content = sample_values.read_values(path, facts, places, clock)
        if not len(content.values):
            raise input_error(Reason.TRUNCATED, "has no rows below its header")
        _refuse_long(path, facts, content.times)
        remarks += [] if info.missing is not None else drop_codes(content.values, names)
        remarks += _report_below(content.below)
        width = len(facts.list_channels())
        if width > max(MOST_CHANNELS, len(content.values)):
            problem = f"has {width} columns of {len(content.values)} samples"
            hint = "Turn the table, or give `series` in [[files]] where a row is a recording"
            raise input_error(Reason.DIMENSIONS, problem, "a row may be a channel", hint)
        units = [facts.columns[i].unit for i in places]
        table = NamedColumns(names, units, content.values, content.times, content.first)
        table = _add_states(table, path, facts, places)
        table = _split_by_clocks(table, path, facts, places)
    facts = facts._replace(clock=clock, rate=rate)
    if not people:
        return _make_table_record(rel, info, facts, table, remarks)
    header = facts.columns[people.place].header
    if len(people.rows) == 1:
        info = _name_owner(info, header, *people.rows)
        return _make_table_record(rel, info, facts, table, remarks)
    facts = facts._replace(start=None)
    whole = [
        _make_table_record(rel, _name_person(info, header, name), facts, table.take_rows(rows), [])
        for name, rows in people.rows.items()
    ]
    problem = f"{len(whole)} recordings, one for each value of the column {safe_text(header)}"
    action = "each has a clock of its own"
    said = Finding(Reason.IDENTIFIER, problem, action, level="info")
    return Records(records=whole, findings=[finding.at(rel) for finding in (*remarks, said)])


def _refuse_long(path: Path, facts: table_facts.TableFacts, times: clocks.Times | None) -> None:
    """Raises UserError (schema) for a table with a row for each channel at each time: times occur
    again, and a column of texts tells their rows apart.
    """
    seconds = np.array([]) if times is None else times.seconds
    if len(np.unique(seconds)) >= MOST_UNIQUE * len(seconds):
        return
    for place, column in enumerate(facts.columns):
        if column.kind != "text":
            continue
        texts = sample_values.read_texts(path, facts, place)
        if len(set(zip(seconds.tolist(), texts, strict=True))) == len(texts):
            names = list_names(sorted(set(texts)), 4)
            problem = f"has a row for each {safe_text(column.header)} at each time ({names})"
            line = f"subject_column = {safe_text(column.header)}"
            hint = f"Pivot the table; where they are people, write {line} in [[files]] of --map"
            wanted = "expected a column a channel"
            raise input_error(Reason.SCHEMA, problem, wanted, hint, field=column.header)


def _name_person(info: RecordingInfo, header: str, name: str) -> RecordingInfo:
    """What is known of the rows of `name`; a column of recordings names no person."""
    recording = f"{info.recording_id}-{name}"
    is_person = _is_person_column(info, header)
    return replace(info, recording_id=recording, subject_id=name if is_person else recording)


def _name_owner(info: RecordingInfo, header: str, name: str) -> RecordingInfo:
    """What is known of a table whose rows are all of `name`; a subject that is known stays."""
    is_known = info.has_subject or not _is_person_column(info, header)
    return info if is_known else replace(info, subject_id=name)


def _is_person_column(info: RecordingInfo, header: str) -> bool:
    """Whether a column names people: the map says so, or it is not called as one of recordings."""
    return bool(info.columns) or fold_column(header) not in RECORDINGS


def _make_table_record(
    rel: str,
    info: RecordingInfo,
    facts: table_facts.TableFacts,
    table: NamedColumns,
    remarks: Sequence[Finding],
) -> Record:
    """The recording of rows that follow each other."""
    with locate_errors(rel):
        timed = _join_parts([_time_signals(part, facts, info) for part in table.parts or (table,)])
        timed, states = _take_states(timed, table)
    missing = [] if timed.is_grid else report_missing(timed.signals, "cells are empty")
    info, shift = _place_labels(info, timed)
    findings = [*remarks, *timed.findings, *missing, *shift]
    info = replace(info, notes=(*info.notes, *states))
    start = timed.start or facts.start
    return make_record(rel, replace(info, rate=None), timed.signals, findings=findings, start=start)


class TableSubjects(NamedTuple):
    """Whose the rows of a table are."""

    place: int  # of the column that names them
    rows: dict[str, np.ndarray]  # person -> numbers of the rows


def _find_person_column(facts: table_facts.TableFacts, info: RecordingInfo) -> int | None:
    """The column that says whose each row is, or of which recording: that of the map, else by its
    name.

    Raises UserError (schema) for one of the map that is not there.
    """
    if stated := info.columns.get("subject"):
        return _find_channels(facts, [stated])[0]
    folded = [fold_column(column.header) for column in facts.columns]
    places = [i for names in (PEOPLE, RECORDINGS) for i, name in enumerate(folded) if name in names]
    return next((i for i in places if facts.columns[i].header not in info.channels), None)


def find_subjects(
    path: Path, facts: table_facts.TableFacts, info: RecordingInfo
) -> TableSubjects | None:
    """The people of a table; None where no column names them, or it numbers the rows.

    Raises UserError: identifier for rows of nobody among those of several people, schema for a
    column of the map that is not there.
    """
    person = _find_person_column(facts, info)
    if person is None:
        return None
    rows: dict[str, list[int]] = {}
    for number, text in enumerate(sample_values.read_texts(path, facts, person)):
        rows.setdefault(text, []).append(number)
    if min(map(len, rows.values()), default=0) < LEAST_ROWS or all(map(is_missing, rows)):
        return None
    if any(map(is_missing, rows)):
        header = facts.columns[person].header
        problem = f"rows without a value in {safe_text(header)}"
        hint = "Fill the column, or name the channels without it: `channels` in [[files]] of --map"
        raise input_error(Reason.IDENTIFIER, problem, "whose they are is unknown", hint)
    return TableSubjects(person, {name: np.array(same) for name, same in rows.items()})


def _leave_out(columns: Sequence[table_facts.Column], place: int) -> tuple[table_facts.Column, ...]:
    """The columns, of which that of people is no channel."""
    return tuple(
        column._replace(kind="left out") if i == place else column
        for i, column in enumerate(columns)
    )


class NamedColumns(NamedTuple):
    """The columns of a table that are channels."""

    names: list[str]
    units: list[str]
    values: np.ndarray  # [rows, channels]
    times: clocks.Times | None  # of the rows
    first: int  # line of the first row
    states: tuple[str, ...] = ()  # texts of labels whose numbers the last column, `STATES`, has
    parts: tuple[NamedColumns, ...] = ()  # by clock, where channels have their own

    def take_rows(self, rows: np.ndarray) -> NamedColumns:
        """These rows, whose times count from the first of them."""
        times = self.times
        if times is not None:
            seconds = times.seconds[rows]
            first = float(next(iter(seconds[np.isfinite(seconds)]), 0.0))
            start = times.start + timedelta(seconds=first) if times.start else None
            origin = 0.0 if times.start else times.origin + first
            times = clocks.Times(seconds - first, origin, start, times.zone)
        return self._replace(values=self.values[rows], times=times)

    def take_columns(self, columns: Sequence[int]) -> NamedColumns:
        """These columns, in this order."""
        return self._replace(
            names=[self.names[k] for k in columns],
            units=[self.units[k] for k in columns],
            values=self.values[:, columns],
        )

    def make_signal(self, k: int, rate: float, samples: np.ndarray, onset: float) -> Signal:
        """The channel `k` from `onset` seconds on; a unit such as `1/64 g` is a scale of g."""
        unit = self.units[k]
        part = re.fullmatch(r"1/(\d+) (\w+)", unit)
        scale, unit = (1 / int(part[1]), part[2]) if part else (1.0, unit)
        return Signal(self.names[k], rate, unit, samples, scale, onset=onset)


def _add_states(
    table: NamedColumns, path: Path, facts: table_facts.TableFacts, places: Sequence[int]
) -> NamedColumns:
    """The table with its labels as numbers, NaN where a row has none, in a further column.

    A column of many or long texts is one of remarks, and holds no labels.
    """
    place = facts.find_labels()
    if place is None or place in places:
        return table
    cells = sample_values.read_texts(path, facts, place)
    texts = tuple(sorted(set(filterfalse(is_missing, cells))))
    if not 0 < len(texts) <= MOST_STATES or max(map(len, texts)) > LONGEST_STATE:
        return table
    number_of = {text: float(number) for number, text in enumerate(texts)}
    numbers = [number_of.get(cell, np.nan) for cell in cells]
    return table._replace(
        names=[*table.names, STATES],
        units=[*table.units, ""],
        values=np.column_stack([table.values, numbers]),
        states=tuple(map(sanitize_label, texts)),
    )


def _take_states(timed: TimedSignals, table: NamedColumns) -> tuple[TimedSignals, list[Annotation]]:
    """The channels without that of the labels, and these."""
    parts = [signal for signal in timed.signals if signal.channel == STATES]
    channels = [signal for signal in timed.signals if signal.channel != STATES]
    notes = read_states(parts, is_bridged=timed.is_grid)
    named = [note._replace(label=table.states[int(note.label)]) for note in notes]
    return timed._replace(signals=channels), named


def sniff_recording(path: Path, info: RecordingInfo) -> table_facts.TableFacts:
    """How the table of a recording is written, by its map and its first lines."""
    choice = table_facts.ClockChoice(info.time, info.clock)
    facts = sniffer.sniff_table(path, info.delimiter, choice)
    facts = table_facts.add_description(facts, info.stated_rate, info.headers)
    facts = facts._replace(missing=(*facts.missing, *(info.missing or ())))
    return facts._replace(own_clocks=()) if info.time or info.rate else facts


def _report_below(count: int) -> list[Finding]:
    """The line about what stands below the rows of a table; its texts may hold names."""
    if not count:
        return []
    lines = "its last line is no row" if count == 1 else f"its last {count} lines are no rows"
    return [input_warning(Reason.FORMAT, lines, "left out: texts where the rows have numbers")]


def list_table_channels(path: Path, info: RecordingInfo) -> list[str]:
    """Names by which the channels of a table may be asked for."""
    facts = sniff_recording(path, info)
    headers = [column.header for column in facts.columns if column.kind not in {"empty", "text"}]
    return list(dict.fromkeys([*list_channel_names(facts), *filter(None, headers)]))


def _choose_channels(
    facts: table_facts.TableFacts, info: RecordingInfo, remarks: list[Finding]
) -> tuple[list[int], list[str]]:
    """Places and names of the columns that are channels: those of the map, else all of numbers.

    `remarks` gets what is said of equal names. Raises UserError: schema, duplicate_channel.
    """
    columns, places = facts.columns, facts.list_channels()
    if info.channels:
        return _find_channels(facts, list(info.channels)), list(info.channels)
    if not places:
        headers_text = list_names([column.header for column in columns if column.header], 12)
        wanted = f"found the columns {headers_text or 'without names'}"
        raise input_error(Reason.SCHEMA, "has no column of numbers beside its clock", wanted)
    named = _name_channels(facts, remarks)
    needed = list_needed(named, info)
    return [i for i, name in zip(places, named, strict=True) if name in needed], needed


def list_channel_names(facts: table_facts.TableFacts) -> list[str]:
    """Names of the channels of a table; those without one of their own are numbered."""
    return _name_channels(facts, [])


def _name_channels(facts: table_facts.TableFacts, findings: list[Finding]) -> list[str]:
    columns = [facts.columns[i] for i in facts.list_channels()]
    names = {n: column.name or f"channel {n}" for n, column in enumerate(columns, 1)}
    return [*number_duplicates(names, (), "name", findings).values()]


def _find_channels(facts: table_facts.TableFacts, wanted: Sequence[str]) -> list[int]:
    """Places of columns by their name, header or number. Raises UserError: schema."""
    place_of = dict(zip(list_channel_names(facts), facts.list_channels(), strict=True))
    for i, column in enumerate(facts.columns):
        place_of.setdefault(column.header, i)
        place_of.setdefault(f"column {i + 1}", i)
    missing = [name for name in wanted if name not in place_of]
    if missing:
        headers = [column.header for column in facts.columns if column.header]
        what = "columns" if missing[1:] else "column"
        verb = "are" if missing[1:] else "is"
        problem = f"the {what} {list_names(missing)} {verb} missing"
        headers_text = list_names(headers or list_channel_names(facts))
        raise input_error(Reason.SCHEMA, problem, f"found {headers_text}", field=missing[0])
    return [place_of[name] for name in wanted]


def _choose_clock(
    facts: table_facts.TableFacts, info: RecordingInfo, places: Sequence[int]
) -> table_facts.Clock | None:
    """The clock of the rows: that of the map, else the one there is, unless it is a channel."""
    clock = facts.clock
    if clock is None or clock.form == table_facts.INTERVALS:
        return clock
    if not info.time and not set(clock.places).isdisjoint(places):
        return None
    return clock


def _find_rate(
    facts: table_facts.TableFacts, info: RecordingInfo, clock: table_facts.Clock | None
) -> float | None:
    """Hz that the map or the first lines state.

    Raises UserError (sampling_rate) where they state none and the clock gives none.
    """
    rate = info.rate or (None if info.time else facts.rate)
    needed = "needs --map with a rate (`rate` or `time` in [[files]])"
    if clock is None:
        if rate is None:
            raise input_error(Reason.SAMPLING_RATE, "has no sampling rate", needed)
        return rate
    if clock.unit == "samples" and rate is None:
        raise input_error(Reason.SAMPLING_RATE, "its clock counts samples", needed)
    if not clock.unit and (info.time or rate is None):
        raise input_error(
            Reason.SAMPLING_RATE,
            f"its times are in no unit that is known: {clock.evidence}",
            "expected steps of 0.01 to 50,000 Hz",
            'Give `time` and `clock` in [[files]] of --map, such as clock = "ms", or `rate` alone',
            field=facts.columns[clock.places[0]].header or None,
        )
    return rate


def _time_signals(
    table: NamedColumns, facts: table_facts.TableFacts, info: RecordingInfo
) -> TimedSignals:
    """The channels of a table at their times."""
    clock, rate = facts.clock, facts.rate
    remarks: list[Finding] = []
    table = _turn_rows(table, remarks)
    times = _find_times(clock, table.times, rate)
    if clock is None or times is None:
        return _count_samples(table, rate)
    column = facts.columns[clock.places[-1]].header
    table, times = _drop_empty_rows(table, times)
    seconds = timing.continue_clock(times.seconds, clock.unit, column, table.first, remarks)
    times = times._replace(seconds=timing.restore_rounded(seconds, remarks))
    if _is_uneven(facts, clock, times) and (
        info.time or rate is None or rate <= timing.IRREGULAR_RATE
    ):
        gridded = _grid_signals(table, times, column, rate)
        return gridded._replace(findings=[*remarks, *gridded.findings])
    try:
        timed = timing.measure_timing(times.seconds, table.values, column, table.first, rate)
    except UserError as error:
        if info.time or rate is None:
            raise
        return _count_samples(table, rate, _report_other_clock(error, column, rate, info))
    if timed.used is not None:
        table = table._replace(values=table.values[timed.used])
    signals = _cut_signals(table, timed.rate, timed.stretches)
    findings = [*remarks, *timed.findings]
    return TimedSignals(signals, findings, times.start, times.origin, times.zone)


def _is_uneven(
    facts: table_facts.TableFacts, clock: table_facts.Clock, times: clocks.Times
) -> bool:
    """Whether the rows have no common step: by their form, or by their times."""
    is_known = bool(facts.vendor) or clock.form == table_facts.INTERVALS
    is_uneven = clocks.is_irregular(times.seconds) or timing.is_sparse(times.seconds)
    return (is_known and clock.irregular) or is_uneven


def _turn_rows(table: NamedColumns, remarks: list[Finding]) -> NamedColumns:
    """The rows in the order of time, where they lie the newest first."""
    steps = np.array([]) if table.times is None else clocks.list_steps(table.times.seconds)
    if np.count_nonzero(steps < 0) <= FALLING * np.count_nonzero(steps):
        return table
    problem = "its rows lie the newest first"
    remarks.append(Finding(Reason.TIMESTAMPS, problem, "read from the last one up", level="info"))
    return table.take_rows(np.arange(len(table.values))[::-1])


def _drop_empty_rows(table: NamedColumns, times: clocks.Times) -> tuple[NamedColumns, clocks.Times]:
    """The rows without those that are no samples: lines of text among them."""
    is_sample = ~timing.find_extra_rows(times.seconds, table.values)
    if is_sample.all():
        return table, times
    times = times._replace(seconds=times.seconds[is_sample])
    return table._replace(values=table.values[is_sample]), times


def _find_times(
    clock: table_facts.Clock | None, times: clocks.Times | None, rate: float | None
) -> clocks.Times | None:
    """The times of the rows in seconds; None where no clock tells them."""
    if clock is None or times is None or not clock.unit:
        return None
    if clock.unit != "samples":
        return times
    assert rate is not None
    return times._replace(seconds=times.seconds / rate, origin=times.origin / rate)


def _count_samples(table: NamedColumns, rate: float | None, *findings: Finding) -> TimedSignals:
    """The channels by a rate in Hz that is stated, without the times of the rows."""
    assert rate is not None
    return TimedSignals(_cut_signals(table, rate, None), list(findings), None, 0.0)


def _report_other_clock(error: UserError, column: str, rate: float, info: RecordingInfo) -> Finding:
    """The warning about a clock that nobody named, beside a rate that is stated."""
    problem = f"its column {safe_text(column)} says otherwise: {error.problem}"
    whose = "of the map" if info.rate else "in its first lines"
    action = f"the rate {whose}, {rate:g} Hz, is used"
    return input_warning(Reason.SAMPLING_RATE, problem, action)


def _cut_signals(
    table: NamedColumns, rate: float, stretches: Sequence[timing.RowStretch] | None
) -> list[Signal]:
    """The channels in each stretch without a gap; slow ones at their own rate."""
    parts = stretches or [timing.RowStretch(0, len(table.values), 0.0)]
    signals = []
    for k, (name, column) in enumerate(zip(table.names, table.values.T, strict=True)):
        samples = narrow_samples(column, name)
        is_whole = name == STATES or len(parts) > 1
        for first, stop, onset in parts:
            values, step = samples[first:stop], 1
            if not is_whole:
                values, step = timing.drop_empty_rows(values)
            signals.append(table.make_signal(k, rate / step, values, onset))
    return signals


def _grid_signals(
    table: NamedColumns, times: clocks.Times, column: str, rate: float | None
) -> TimedSignals:
    """Observations at irregular times on a grid whose zero is that of the file's clock."""
    grid = timing.place_on_grid(times.seconds, times.origin, column, rate)
    values = timing.average_on_grid(table.values, grid)
    signals = [
        table.make_signal(k, grid.rate, narrow_samples(samples, name), 0.0)
        for k, (name, samples) in enumerate(zip(table.names, values.T, strict=True))
    ]
    empty = float(np.mean(np.isnan(values).all(1)))
    finding = Finding(
        Reason.MISSING_SAMPLES,
        f"{len(times.seconds)} rows at irregular times on a grid of {1 / grid.rate:g} s",
        f"the mean where a step has several, missing where it has none ({empty:.0%})",
        "Another step is given by `rate` in [[files]] of --map",
        level="info",
    )
    start = times.start + timedelta(seconds=grid.onset) if times.start else None
    return TimedSignals(signals, [finding], start, times.origin + grid.onset, times.zone)


def _split_by_clocks(
    table: NamedColumns, path: Path, facts: table_facts.TableFacts, places: Sequence[int]
) -> NamedColumns:
    """The table with the channels behind each of its clocks apart; labels are by the first one."""
    if facts.clock is None:
        return table
    parts: list[NamedColumns] = []
    states = list(range(len(places), len(table.names)))
    for place in facts.own_clocks:
        channels = facts.list_behind(place)
        behind = [k for k, channel in enumerate(places) if channel in channels]
        if behind:
            clock = facts.clock._replace(places=(place,))
            content = sample_values.read_values(path, facts, [], clock)
            part = table.take_columns([*behind, *states])
            parts.append(part._replace(times=content.times))
            states = []
    return table._replace(parts=tuple(parts))


def _join_parts(parts: Sequence[TimedSignals]) -> TimedSignals:
    """Channels of several clocks that begin together, of which the first is that of the table."""
    return parts[0]._replace(
        signals=list(chain.from_iterable(part.signals for part in parts)),
        findings=list(chain.from_iterable(part.findings for part in parts)),
    )


def _place_labels(info: RecordingInfo, timed: TimedSignals) -> tuple[RecordingInfo, list[Finding]]:
    """`info` with where the clock of seconds begins, for label files that count by it, and with the
    annotations of tables in seconds after the first sample.

    Where the table's clock does not begin at 0 and they lie on that clock, they are moved with it.
    """
    origin, notes = timed.origin, [*info.notes, *info.numbers]
    last = max((s.onset + len(s.samples) / s.rate for s in timed.signals), default=0.0)
    step = max((1 / signal.rate for signal in timed.signals), default=0.0)
    if timed.start is not None:
        return replace(info, zone=timed.zone), []
    if abs(origin) < step:
        return info, []
    info = replace(info, origin=origin)
    if not any(origin <= note.onset < origin + last for note in notes):
        return info, []
    moved, numbers = (
        tuple(note._replace(onset=note.onset - origin) for note in same)
        for same in (info.notes, info.numbers)
    )
    problem = f"the clock begins at {origin:.10g} s, and the labels are on that clock"
    action = "their onsets are counted from the first sample"
    finding = Finding(Reason.START_MISMATCH, problem, action, level="info")
    return replace(info, notes=moved, numbers=numbers), [finding]


def read_series(path: Path, rel: str, info: RecordingInfo) -> Records:
    """A table with a recording a row: the columns of `info.series` are its samples.

    Faulty rows are counted and left out.
    """
    with locate_errors(rel):
        if info.rate is None:
            wanted = "expected `rate` in [[files]] of the map"
            raise input_error(Reason.CONFIG, "has no sampling rate", wanted)
        info = replace(info, delimiter=info.delimiter or sniffer.find_delimiter(path))
        first = tables.read_names(path, delimiter=info.delimiter)
        headed = not all(map(tables.NUMBER.fullmatch, first))
        names = first if headed else [f"channel {n}" for n in range(1, len(first) + 1)]
        samples = _find_sample_columns(names, info)
        columns = [*info.columns.values(), *samples]
        records, faults = parse_rows(
            _list_rows(path, info, columns) if headed else _list_bare(path, info, names, columns),
            partial(_make_series_record, samples=samples, info=info),
        )
    account = account_rows(rel, "segments", len(records) + len(faults), faults)
    findings = report_faults(fault.at(rel) for fault in select_errors(faults))
    if len(records) > 1 and "subject" not in info.columns:
        findings.append(
            input_warning(
                Reason.IDENTIFIER,
                f"{len(records)} rows with unknown subjects, each counted as a subject of its own",
                "recordings of one person in two splits make scores optimistic",
                "Give subject_column",
                file=rel,
                field="subject",
                count=len(records),
            )
        )
    return Records(records=records, rows=[account], findings=findings)


def _list_rows(
    path: Path, info: RecordingInfo, columns: Sequence[str]
) -> Iterator[tables.TableRow | Finding]:
    """These columns of a table with a recording a row."""
    key = [info.columns["id"]] if "id" in info.columns else []
    return tables.read_rows(path, columns, key=key, delimiter=info.delimiter)


def _list_bare(
    path: Path, info: RecordingInfo, names: Sequence[str], columns: Sequence[str]
) -> Iterator[tables.TableRow | Finding]:
    """As `_list_rows`, of a table whose first line is a row, too. Raises UserError: schema."""
    if missing := [column for column in columns if column not in names]:
        problem = f"has no column {safe_text(missing[0])}"
        wanted = f"its columns have no names and are called {names[0]} to {names[-1]}"
        raise input_error(Reason.SCHEMA, problem, wanted)
    places = [names.index(column) for column in columns]
    first = tables.TableRow(1, tuple(tables.read_names(path, delimiter=info.delimiter)))
    for row in chain([first], tables.read_rows(path, delimiter=info.delimiter)):
        if isinstance(row, tables.TableRow):
            row = tables.TableRow(row.row, tuple(row.cells[place] for place in places))
        yield row


def _find_sample_columns(columns: Sequence[str], info: RecordingInfo) -> list[str]:
    """The columns that match `info.series`. Raises UserError: schema."""
    others = info.columns.values()
    samples = [
        name for name in columns if fnmatch.fnmatchcase(name, info.series) and name not in others
    ]
    if not samples:
        problem = f"has no column that matches {safe_text(info.series)}"
        wanted = f"found {', '.join(map(safe_text, columns[:12]))}"
        raise input_error(Reason.SCHEMA, problem, wanted, field="series")
    return samples


def _make_series_record(
    row: tables.TableRow, samples: list[str], info: RecordingInfo
) -> Record | Finding:
    """One row as a recording, or its fault."""
    cells = {key: cell.strip() for key, cell in zip(info.columns, row.cells, strict=False)}
    values = tables.parse_numbers(tables.TableRow(row.row, row.cells[len(info.columns) :]), samples)
    if isinstance(values, Finding):
        return values
    try:
        value = tables.parse_number(cells.get("value", ""))
    except UserError as error:
        return tables.locate_cell(error, row.row, info.columns["value"])
    if is_missing(cells.get("subject", "?")):
        problem, field = f"row {row.row} has no subject", info.columns["subject"]
        return Finding(Reason.IDENTIFIER, problem, "expected one", field=field, row=row.row)
    name, unit = next(iter(info.channels.values()), ("channel 1", ""))
    try:
        narrow = narrow_samples(values, name)
    except UserError as error:
        return replace(error.finding, row=row.row, problem=f"row {row.row} has {error.problem}")
    recording = f"{info.recording_id}-{cells.get('id') or f'{row.row:06d}'}"
    assert info.rate is not None
    return Record(
        recording_id=recording,
        subject_id=cells.get("subject") or recording,
        signals=[Signal(name, info.rate, unit or info.unit, narrow)],
        attributes=_list_attributes(info, cells.get("label", ""), value),
    )


def _list_attributes(
    info: RecordingInfo, label: str, value: float | None
) -> dict[str, AttributeValue]:
    """The attributes of the map, with the label and the value of a row that has them."""
    attributes: dict[str, AttributeValue] = dict(info.attributes)
    if not is_missing(label):
        attributes["label"] = _name_class(label)
    if value is not None:
        attributes["value"] = value
    return attributes


def _name_class(label: str) -> str:
    """The class in a cell: 2 of 2.0 and of 2.000e+00, as numpy and pandas write it."""
    if tables.NUMBER.fullmatch(label) and not label.lstrip("+-").isdecimal():
        return f"{float(label):.12g}"
    return label
