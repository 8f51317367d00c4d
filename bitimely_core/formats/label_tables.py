"""Reads tables with a row a label, timed in seconds, by the clock or by the number of the epoch."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from itertools import chain, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from bitimely_core.formats.clocks import (
    DATE_TIME,
    DAY,
    ZONES,
    list_steps,
    pass_midnight,
    read_moments,
    read_offset,
)
from bitimely_core.formats.label_rows import (
    CLOCK,
    EPOCH_NUMBER,
    MISSING,
    NUMBER,
    SHORT,
    LabelRow,
    LabelText,
    are_stages,
    find_commonest_step,
    find_unix_unit,
    is_time,
    list_codes,
    list_onsets,
    move_rows,
    parse_time,
    scale_rows,
)
from bitimely_core.formats.stage_texts import (
    EPOCH,
    SCORER,
    fold_text,
    name_listed_stage,
    name_stage,
)
from bitimely_core.formats.text import sanitize_label

HEAD = 60  # lines before the names of the columns, at most
TABLE = "a table of labels"
SPREADSHEET_ZERO = date(1899, 12, 30)
SPREADSHEET_DAYS = (20_000.0, 80_000.0)  # dates from 1954 to 2119
SINGLE_TIMES = 2  # times that are few enough to be seconds
LOCAL_STAGES = (  # names of columns of stages in other languages
    "schlafstadium", "schlafstadien", "schlafphase", "schlafphasen", "stadium", "hypnogramm",
    "stade", "stade de sommeil", "stade du sommeil", "stade sommeil", "hypnogramme",
    "estadio", "estadio de sueno", "estadio del sueno", "fase de sueno", "fase del sueno",
    "etapa de sueno", "etapa del sueno", "hipnograma", "stadio", "stadio del sonno",
    "stadio sonno", "fase del sonno", "fase di sonno", "ipnogramma", "estagio", "estagio do sono",
    "fase do sono", "slaapstadium", "slaapfase", "sovnstadie", "sovnstadium", "somnstadium",
)  # fmt: skip
# what a column holds <- its names as `fold_name` makes them, the first that is there counts
COLUMNS = {
    "onset": (
        "onset", "start", "begin", "starttime", "start time", "onset time", "time", "timestamp",
        "t", "clock", "clock time", "beginning", "debut", "inicio", "beginn",
        "zeit", "uhrzeit", "startzeit", "heure", "heure de debut", "hora", "hora de inicio",
        "hora inicio", "inizio", "ora", "ora inizio", "tijd", "starttijd", "tid", "time stamp",
        "date time", "datetime",
        "seconds", "sec", "onset sample", "start sample", "sample index", "sample number", "sample",
        "samples", "latency",
    ),
    "duration": (
        "duration", "dur", "length", "dauer", "duree", "duracion", "durata", "duur", "duracao",
        "duration in seconds", "seconds",
    ),
    "date": ("date", "datum", "fecha", "data", "day", "dato", "tag"),
    "stop": ("stop", "end", "endtime", "end time", "stop time", "offset", "ende", "endzeit", "fin",
        "heure de fin", "hora de fin", "hora fin", "fine", "ora fine", "eindtijd"),
    "epoch": (
        "epoch", "epoch number", "epoch nr", "epoch no", "epochnumber", "epoch index", "epochs",
        "epoche", "epoque", "epoca", "index", "idx", "#", "number", "nr", "no", "",
    ),
    "text": (
        "trial type", "description", "annotation", "event", "label", "stage", "stages",
        "sleep stage", "sleep stages", "sleepstage", "hypnogram", "hypno", "staging", "scoring",
        "score", "class", "annotations", "events", "text", "state", "type", "name", "code",
        "value", "concept", "annot", "labels", "level",
        "sleep level", "phase", "sleep phase", "sleep state", "sleep type",
        *LOCAL_STAGES, "fase", "etapa",
    ),
}  # fmt: skip
ALL_NAMES = set(chain.from_iterable(COLUMNS.values()))
# of columns that count samples -> the number of the first one
SAMPLE_NAMES = {
    "onset sample": 0, "start sample": 0, "sample index": 0, "sample number": 0, "sample": 0,
    "samples": 0, "latency": 1,
}  # fmt: skip
STAGE_NAMES = {  # columns of texts in which digits are stages
    "stage", "stages", "sleep stage", "sleep stages", "sleepstage", "hypnogram", "hypno", "staging",
    "scoring", "sleep level", "sleep phase", "sleep state", *LOCAL_STAGES,
}  # fmt: skip
PROSE_NAMES = {"description", "annotation", "annotations", "text", "comment", "note", "notes"}
SCALES = {"ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "min": 60.0, "minutes": 60.0}
SPLITTERS = ("\t", ";", ",", "|", None)  # None: blanks


class Columns(NamedTuple):
    """Where the cells of a label are in a row; -1: nowhere."""

    onset: int
    duration: int
    stop: int
    epoch: int
    text: tuple[int, ...]  # the first with a text counts
    scale: float = 1.0  # of onset and duration: seconds each
    is_stage: bool = False
    is_prose: bool = False  # texts can be sentences
    scorers: tuple[str, ...] = ()  # whose the texts are; (): the first with a text counts
    date: int = -1  # of the days of the onsets
    first_sample: int | None = None  # its number, where onsets are numbers of samples


def parse_table(lines: Sequence[str]) -> LabelText | None:
    """A table with a row a label."""
    for splitter in SPLITTERS:
        cells = [_split(line, splitter) for line in lines]
        for number, row in enumerate(cells[:HEAD]):
            columns = _find_columns(row, is_text=splitter is None)
            table = _parse_rows(cells[number + 1 :], columns) if columns else None
            if table:
                return table
        body = _drop_preamble([row for row in cells if not row[0].startswith(("#", "%"))])
        table = _parse_unnamed(body)
        if table:
            return table
    return None


def _parse_unnamed(rows: Sequence[Sequence[str]]) -> LabelText | None:
    """A table without names of its columns."""
    if columns := _guess_columns(rows):
        return _parse_rows(rows, columns)
    if _are_ends(rows):
        return _parse_rows(_state_begins(rows), Columns(0, -1, 1, -1, (2,), is_stage=True))
    return None


def _drop_preamble(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The rows without those above that are not as wide as the last one."""
    width = len(rows[-1]) if rows else 0
    first = next((i for i, row in enumerate(rows[:HEAD]) if len(row) == width), 0)
    while first < min(HEAD, len(rows)) and rows[first][0].startswith("*"):
        first += 1
    return rows[first:] if width > 1 else rows


def _are_ends(rows: Sequence[Sequence[str]]) -> bool:
    """Whether rows are stages with the times of their ends, as Visbrain writes them."""
    if len(rows) < 2 or set(map(len, rows)) != {2}:
        return False
    texts, times = zip(*rows, strict=True)
    if not _are_numbers(times) or not are_stages(texts):
        return False
    ends = np.array([0.0, *(float(time.replace(",", ".")) for time in times)])
    return bool((np.diff(ends) > 0).all())


def _state_begins(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of begin, end and stage: each stage begins where the one above ends."""
    begins = ["0", *(row[1] for row in rows)]
    return [[begin, end, text] for begin, (text, end) in zip(begins, rows, strict=False)]


def _split(line: str, splitter: str | None) -> list[str]:
    cells = line.split(splitter)
    if splitter and '"' in line:
        with suppress(csv.Error):  # a cell that is too long
            cells = next(csv.reader([line], delimiter=splitter), cells)
    return [cell.strip().strip('"').strip() for cell in cells]


def fold_name(name: str) -> str:
    """The name of a column in small letters without its unit, and without a # before it."""
    name = re.sub(r"[\[(].*?[\])]", "", name.lstrip("#% \ufeff") or name)
    return re.sub(r" (?:s|sec|secs|seconds|ms|msec|min|hh mm ss)$", "", fold_text(name))


def _find_columns(names: Sequence[str], *, is_text: bool = False) -> Columns | None:
    """The columns of a table by their names, None for a row that holds none of texts.

    `is_text`: the row may be a sentence, which has other words, too.
    """
    folded = list(map(fold_name, names))
    if len(names) < 2 or any(map(NUMBER.fullmatch, names)):
        return None
    if is_text and not ALL_NAMES.issuperset(folded):
        return None
    onset, duration, stop, epoch, day = (
        next(iter(_find_places(folded, role)), -1)
        for role in ("onset", "duration", "stop", "epoch", "date")
    )
    duration = -1 if duration == onset else duration
    texts = _find_places(folded, "text")
    if not texts:
        columns = Columns(onset, duration, stop, epoch, (), date=day)
        return _mark_scorers(columns, _find_scorers(names))
    is_stage = folded[texts[0]] in STAGE_NAMES
    if onset < 0 and not is_stage:
        return None
    scale = _read_scale(_get(names, onset))
    is_prose = folded[texts[0]] in PROSE_NAMES
    columns = Columns(onset, duration, stop, epoch, texts, scale, is_stage, is_prose, date=day)
    return columns._replace(first_sample=SAMPLE_NAMES.get(_get(folded, onset)))


def _mark_scorers(columns: Columns, scorers: Mapping[int, str]) -> Columns | None:
    """The columns with the texts of each scorer, None where there is none."""
    marked = columns._replace(text=tuple(scorers), is_stage=True, scorers=tuple(scorers.values()))
    return marked if scorers else None


def _find_scorers(names: Sequence[str]) -> dict[int, str]:
    """Column -> scorer, of a table with a column of stages for each of several, or one with a name
    such as `stage_hum`.
    """
    spaced = dict(enumerate(name.replace("_", " ") for name in names))
    staged = {i: name for i, name in spaced.items() if _is_of_scorer(fold_name(name))}
    scorers = staged | {i: name for i, name in spaced.items() if SCORER.search(name)}
    return scorers if len(scorers) > 1 else staged


def _is_of_scorer(name: str) -> bool:
    """Whether a name is one of stages, with a further word that is no column of its own."""
    first, _, last = name.rpartition(" ")
    return first in STAGE_NAMES and last not in ALL_NAMES


def _find_places(folded: Sequence[str], role: str) -> tuple[int, ...]:
    return tuple(folded.index(name) for name in COLUMNS[role] if name in folded)


def _read_scale(name: str) -> float:
    """Seconds of the unit that the name of a column states, 1 where it states none."""
    unit = re.search(r"[\[(_ ](ms|msec|us|min|minutes|milliseconds)[\])]?$", name.lower())
    return SCALES[unit[1]] if unit else 1.0


def _guess_columns(rows: Sequence[Sequence[str]]) -> Columns | None:
    """The columns of a table without names: those of Luna, or a time, a duration and a text."""
    if len(set(map(len, rows))) != 1:
        return None
    columns = list(zip(*rows, strict=True))
    width = len(columns)
    middle = width // 2
    if width not in {4, 6} or not _are_times(columns[middle]):
        return _guess_time_and_text(columns)
    if any(map(is_time, columns[0])):
        return None
    return Columns(middle, -1, middle + 1, -1, (0,))  # as Luna writes them


def _guess_time_and_text(columns: Sequence[Sequence[str]]) -> Columns | None:
    """A time, a duration or an end where there are three columns, and a text or a stage."""
    columns = _drop_certainty(columns)
    width = len(columns)
    if width not in {2, 3} or len(columns[0]) < 2 or not _are_times(columns[0]):
        return None
    if width == 3 and not _are_numbers(columns[1]):
        return None
    times, texts = columns[0], columns[-1]
    is_stage = are_stages(texts)
    if not is_stage and any(map(NUMBER.fullmatch, texts)):
        return None
    if _are_numbers(texts) and not _is_regular(list(map(parse_time, times))):
        return None
    duration, stop = _find_second(columns)
    return Columns(0, duration, stop, -1, (width - 1,), 1.0, is_stage)


def _drop_certainty(columns: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The columns without the number behind a beginning, an end and a text."""
    is_certainty = len(columns) == 4 and _are_numbers(columns[3]) and _are_stops(columns)
    return columns[:3] if is_certainty else columns


def _find_second(columns: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The places of the duration and of the end; -1: nowhere."""
    if len(columns) < 3:
        return -1, -1
    return (-1, 1) if _are_stops(columns) else (1, -1)


def _are_stops(columns: Sequence[Sequence[str]]) -> bool:
    """Whether the second of these columns has the ends of what begins at the times of the first,
    and no durations: each lies between its row's beginning and the next one's.
    """
    first, second, *_ = columns
    if len(columns) < 3 or len(first) < 2 or not _are_numbers([*first, *second]):
        return False
    starts, stops = ([parse_time(cell) or 0.0 for cell in column] for column in (first, second))
    is_ordered = all(stop <= start for stop, start in zip(stops[:-1], starts[1:], strict=True))
    return is_ordered and all(a < b for a, b in zip(starts, stops, strict=True))


def _are_times(cells: Sequence[str]) -> bool:
    return all(map(is_time, cells))


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(map(NUMBER.fullmatch, cells))


def _is_regular(times: Sequence[float | None]) -> bool:
    """Whether times follow each other in nine of ten equal steps of a second or more."""
    steps = [round(b - a, 3) for a, b in pairwise(times) if a is not None and b is not None]
    step, count = find_commonest_step(steps)
    return step >= 1 and count >= 0.9 * len(steps)


def _parse_rows(cells: Sequence[Sequence[str]], columns: Columns) -> LabelText | None:
    """The rows of a table; None where they are no labels."""
    if columns.onset < 0:
        columns = columns._replace(onset=_find_clock_column(cells, columns))
    timed = _read_dates(cells, columns) or _read_clock(cells, columns)
    parsed = list(_parse_cells(timed, columns))
    labelled = [(row, mark) for row, mark in parsed if row is not None]
    rows = [row for row, _ in labelled]
    if not _are_labels(rows, columns):
        return None
    table = _place_rows(rows, columns, timed)
    is_listed = columns.is_stage and are_stages([row.text for row in rows])
    marked = [
        row._replace(text=row.text + mark)
        for row, (_, mark) in zip(table.rows, labelled, strict=True)
    ]
    return table._replace(
        rows=marked,
        dropped=len(parsed) - len(rows),
        codes=list_codes(rows) if is_listed else frozenset(),
        is_listed=is_listed,
        is_prose=columns.is_prose,
    )


def _parse_cells(timed: TimedCells, columns: Columns) -> Iterator[tuple[LabelRow | None, str]]:
    """Each row for each scorer, None where it is no label, with what goes behind its text."""
    for choice, mark in _list_texts(columns):
        for number, row in enumerate(timed.cells):
            yield _parse_row(row, number, choice, timed.is_clock), mark


# --- clocks and dates


class TimedCells(NamedTuple):
    """The rows of a table, and what their times are."""

    cells: Sequence[Sequence[str]]
    is_clock: bool = False  # times of day
    day: date | None = None  # the times are seconds from its beginning
    zone: float | None = None  # seconds from UTC to the clock of the first time, where it says so


def _find_clock_column(cells: Sequence[Sequence[str]], columns: Columns) -> int:
    """The first column of times of day under any name, of which each row has another; -1: none."""
    width = min(map(len, cells), default=0)
    for place in set(range(width)) - {columns.duration, columns.stop}:
        texts = {row[place] for row in cells}
        if 1 < len(texts) == len(cells) and all(map(CLOCK.fullmatch, texts)):
            return place
    return -1


def _read_clock(cells: Sequence[Sequence[str]], columns: Columns) -> TimedCells:
    """The rows as they are; whether they are timed by the clock the first one says."""
    first = CLOCK.fullmatch(_get(next(iter(cells), ()), columns.onset))
    zone = first["zone"] if first else None
    offset = read_offset(ZONES.get(zone, zone).replace(":", "")) if zone else None
    return TimedCells(cells, is_clock=first is not None, zone=offset)


def _read_dates(cells: Sequence[Sequence[str]], columns: Columns) -> TimedCells | None:
    """Rows whose beginnings and ends are seconds of the first one's day; None: they lack dates."""
    begins = [_write_moment(_get(row, columns.onset), _get(row, columns.date)) for row in cells]
    ends = [_write_dated(_get(row, columns.stop)) for row in cells]
    times = read_moments(list(chain.from_iterable(zip(begins, ends, strict=True))))
    if times is None or times.start is None:
        return None
    midnight = times.start.replace(hour=0, minute=0, second=0, microsecond=0)
    seconds = times.seconds + (times.start - midnight).total_seconds()
    days = {_get(row, columns.date) for row in cells}
    if columns.date >= 0 and len(days) == 1 and _falls_to_morning(seconds[::2]):
        return None  # the date of the evening
    pairs = seconds.reshape(-1, 2).tolist()
    timed = [_replace_times(row, columns, *pair) for row, pair in zip(cells, pairs, strict=True)]
    return TimedCells(timed, day=midnight.date(), zone=times.zone)


def _write_moment(cell: str, day: str = "") -> str:
    """The date and time of a cell, by its own date or `day`; "" for another text."""
    clock = CLOCK.fullmatch(cell)
    if clock is None:
        return cell if DATE_TIME.fullmatch(cell) else ""
    parts = clock.groupdict("")
    date_and_time = f"{parts['day'] or day} {parts['h']}:{parts['m']}:{parts['s'] or '00'}"
    return f"{date_and_time} {parts['half']}".strip() + parts["zone"]


def _write_dated(cell: str) -> str:
    """The same of a cell that states its own date; "" for another."""
    moment = _write_moment(cell)
    return moment if DATE_TIME.fullmatch(moment) else ""


def _falls_to_morning(seconds: np.ndarray) -> bool:
    steps = list_steps(seconds)
    return bool((steps < -DAY / 2).any())


def _replace_times(row: Sequence[str], columns: Columns, begin: float, end: float) -> list[str]:
    """The row with its beginning and its end in seconds; an end without a date stays."""
    cells = list(row)
    cells[columns.onset : columns.onset + 1] = ["" if math.isnan(begin) else f"{begin:.6f}"]
    if not math.isnan(end):
        cells[columns.stop] = f"{end:.6f}"
    return cells


def _list_texts(columns: Columns) -> list[tuple[Columns, str]]:
    """The columns for each scorer, with the name that goes behind the texts of it."""
    if not columns.scorers:
        return [(columns, "")]
    pairs = zip(columns.text, columns.scorers, strict=True)
    return [(columns._replace(text=(place,)), f"@@{name}") for place, name in pairs]


def _parse_row(
    row: Sequence[str], number: int, columns: Columns, is_clock: bool
) -> LabelRow | None:
    """One row, None where it states no time or no text; `number`: its place, from 0."""
    text = _choose_text(row, columns)
    if columns.onset < 0:
        onset, scale = _read_epoch(row, columns, number), 1.0
    else:
        cell, scale = _get(row, columns.onset), 1.0 if is_clock else columns.scale
        is_same = (CLOCK.fullmatch(cell) is not None) == is_clock
        onset = parse_time(cell) if is_same else None
    if onset is None or not text:
        return None
    return LabelRow(onset * scale, _read_duration(row, columns, onset), text)


def _place_rows(rows: list[LabelRow], columns: Columns, timed: TimedCells) -> LabelText:
    """The table with its rows by what its onsets count from."""
    if timed.day:
        return LabelText(TABLE, "day", rows, day=timed.day, zone=timed.zone)
    if timed.is_clock:
        return LabelText(TABLE, "day", _pass_midnight(rows), zone=timed.zone)
    if columns.onset < 0 or _counts_epochs(rows, columns):
        return LabelText("a table with a row an epoch", "epochs", _count_from_zero(rows))
    if columns.first_sample is not None:
        return LabelText(TABLE, "samples", scale_rows(rows, zero=columns.first_sample))
    if _count_days(rows):
        return _place_days(rows, columns)
    if unit := find_unix_unit(rows[0].onset):
        return _place_unix(rows, columns, unit)
    return LabelText(TABLE, "start", rows)


def _count_days(rows: Sequence[LabelRow]) -> bool:
    """Whether onsets are times of day, or dates, as spreadsheets count them: in days.

    As seconds, many labels would lie within one or two.
    """
    onsets = [row.onset for row in rows]
    first, last = min(onsets), max(onsets)
    is_short = (first >= 0 and last < 1) or (first > SPREADSHEET_DAYS[0] and last - first < 2)
    return is_short and last < SPREADSHEET_DAYS[1] and len(set(onsets)) > SINGLE_TIMES


def _place_days(rows: Sequence[LabelRow], columns: Columns) -> LabelText:
    """Times of day, or dates, in days; so are durations, unless most last a second or more."""
    lengths = [row.duration for row in rows if row.duration is not None]
    are_seconds = columns.duration >= 0 and median(lengths or [0.0]) >= 1
    placed = _count_from_midnight(rows, DAY, 1.0 if are_seconds else DAY)
    days = int(rows[0].onset)
    if not days:
        return LabelText(TABLE, "day", _pass_midnight(placed))
    return LabelText(TABLE, "day", placed, day=SPREADSHEET_ZERO + timedelta(days))


def _place_unix(rows: Sequence[LabelRow], columns: Columns, unit: float) -> LabelText:
    """Times since 1970. Durations of a column of their own are seconds; those between two times
    are of their unit.
    """
    placed = _count_from_midnight(rows, unit, 1.0 if columns.duration >= 0 else unit)
    first = datetime(1970, 1, 1) + timedelta(seconds=rows[0].onset * unit)
    return LabelText(TABLE, "day", placed, day=first.date(), zone=0.0)


def _count_from_midnight(
    rows: Sequence[LabelRow], unit: float, length_unit: float
) -> list[LabelRow]:
    """Rows in seconds of the day in which the first one lies, from units of so many seconds."""
    midnight = rows[0].onset * unit // DAY * DAY
    return [
        LabelRow(
            round(row.onset * unit - midnight, 3),
            row.duration and round(row.duration * length_unit, 3),
            row.text,
        )
        for row in rows
    ]


def _get(row: Sequence[str], place: int) -> str:
    return row[place] if 0 <= place < len(row) else ""


def _choose_text(row: Sequence[str], columns: Columns) -> str:
    for place in columns.text:
        cell = _get(row, place)
        if cell.lower() not in MISSING:
            return cell if NUMBER.fullmatch(cell) else sanitize_label(cell)
    return ""


def _read_epoch(row: Sequence[str], columns: Columns, number: int) -> float | None:
    """The number of the epoch of a row: its own, else that of the row."""
    cell = _get(row, columns.epoch)
    return parse_time(cell) if columns.epoch >= 0 else float(number)


def _read_duration(row: Sequence[str], columns: Columns, onset: float) -> float | None:
    """Seconds, None where the row states none."""
    cell = _get(row, columns.duration)
    if SHORT.fullmatch(cell) and not SHORT.fullmatch(_get(row, columns.onset)):
        cell = f"0:{cell}"  # minutes and seconds
    length = parse_time(cell)
    if length is not None:
        return max(length if ":" in cell else length * columns.scale, 0.0)
    cell = _get(row, columns.stop)
    stop = parse_time(cell)
    if stop is None:
        return None
    if number := EPOCH_NUMBER.fullmatch(cell):
        stop += float(number[1] or EPOCH)  # the epoch is within
    if CLOCK.fullmatch(cell):
        return (stop - onset) % DAY
    return max(stop - onset, 0.0) * columns.scale


def _are_labels(rows: Sequence[LabelRow], columns: Columns) -> bool:
    """Whether there are rows, and their texts are labels: texts, or stages as digits."""
    texts = [row.text for row in rows]
    if not rows or min(row.onset for row in rows) < -DAY:
        return False
    numbers = len(list(filter(NUMBER.fullmatch, texts)))
    if not columns.is_stage:
        return numbers <= 0.5 * len(rows) or any(map(name_stage, texts))
    is_certain = columns.onset >= 0 and numbers < len(rows)
    return is_certain or are_stages(texts)


def _counts_epochs(rows: Sequence[LabelRow], columns: Columns) -> bool:
    """Whether onsets are the numbers of epochs: whole ones that follow each other from 0 or 1."""
    onsets = sorted({row.onset for row in rows})
    steps = {b - a for a, b in pairwise(onsets)}
    is_stage = all(name_listed_stage(row.text) is not None for row in rows)
    return onsets[0] in {0.0, 1.0} and steps == {1.0} and is_stage and columns.duration < 0


def _count_from_zero(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Numbers of epochs, of which the first is 0: most programs count from 1."""
    return scale_rows(rows, zero=0.0 if min(row.onset for row in rows) < 1 else 1.0)


def _pass_midnight(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Clock times that go on over midnight, in seconds of the first day."""
    return move_rows(rows, pass_midnight(list_onsets(rows)))
