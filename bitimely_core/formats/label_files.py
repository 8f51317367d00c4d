"""Reads the labels of a recording from text files of their own.

Three forms are known: one stage a line; a table with a row a label, timed in seconds, by the clock
or by the number of the epoch; and the XML of Profusion and of the National Sleep Research Resource.
A form is recognised by the content: a table of samples, or a text of sentences, is none of them.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from tokenize import TokenError
from typing import Literal, NamedTuple

import numpy as np

from bitimely_core.formats import matlab, vendors
from bitimely_core.formats.clocks import DAY, UNIX, ZONES, pass_midnight, read_offset
from bitimely_core.formats.stage_texts import (
    COUNTED_DOWN,
    EPOCH,
    SCORER,
    fold_text,
    name_listed_stage,
    name_stage,
)
from bitimely_core.formats.text import decode_table, sanitize_label
from bitimely_core.types import find_only

MAX_BYTES = 1 << 26
HEAD = 60  # lines before the names of the columns, at most
ARRAYS = {".json", ".mat", ".npy"}
PREAMBLE = 12  # lines above a list of stages, at most
SPREADSHEET_DAYS = (20_000.0, 80_000.0)  # dates from 1954 to 2119
SINGLE_TIMES = 2  # times that are few enough to be seconds
LATEST_ZERO = 600.0  # seconds; times that begin later are times of day
MISSING = {"", "n/a", "na", "nan", "null", "none", ".", "-"}
# what a column holds <- its names as `_fold_name` makes them, the first that is there counts
COLUMNS = {
    "onset": (
        "onset", "start", "begin", "starttime", "start time", "onset time", "time", "timestamp",
        "t", "clock", "clock time", "beginning", "debut", "inicio", "beginn",
        "zeit", "uhrzeit", "heure", "hora", "inizio", "tijd", "time stamp", "date time", "datetime",
        "seconds", "sec", "onset sample", "start sample", "sample index", "sample number", "sample",
        "samples", "latency",
    ),
    "duration": (
        "duration", "dur", "length", "dauer", "duree", "duracion", "durata", "duur",
        "duration in seconds", "seconds",
    ),
    "stop": ("stop", "end", "endtime", "end time", "stop time", "offset", "ende", "fin"),
    "epoch": (
        "epoch", "epoch number", "epoch nr", "epoch no", "epochnumber", "epoch index", "epochs",
        "epoche", "epoque", "epoca", "index", "idx", "#", "number", "nr", "no", "",
    ),
    "text": (
        "trial type", "description", "annotation", "event", "label", "stage", "stages",
        "sleep stage", "sleep stages", "sleepstage", "hypnogram", "hypno", "staging", "scoring",
        "score", "class", "annotations", "events", "text", "state", "type", "name", "schlafstadium",
        "stadium", "stade", "estadio", "stadio", "code", "value", "concept", "annot", "labels",
        "level", "sleep level", "phase", "sleep phase", "sleep state", "sleep type", "schlafphase",
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
    "scoring", "schlafstadium", "stadium", "stade", "estadio", "stadio", "schlafphase",
    "sleep level", "sleep phase", "sleep state",
}  # fmt: skip
PROSE_NAMES = {"description", "annotation", "annotations", "text", "comment", "note", "notes"}
SCALES = {"ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "min": 60.0, "minutes": 60.0}
NUMBER = re.compile(r"[+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
CODE = re.compile(r"-?\d{1,2}(?:\.0+)?")
CLOCK = re.compile(
    r"(?:(?P<day>\d{4}-\d\d?-\d\d?|\d{1,2}[./]\d{1,2}[./]\d{2,4})[T ,]*)?"
    r"(?P<h>\d{1,2})(?P<mark>:|\.(?=\d\d\.\d\d))(?P<m>\d\d)(?:(?P=mark)(?P<s>\d\d(?:[.,]\d+)?))?"
    r"\s*(?P<half>[AaPp]\.?[Mm]\.?)?"
    r"\s*(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d)?"
)
SHORT = re.compile(r"\d{1,3}:\d\d")  # hours and minutes, or minutes and seconds
RDANN = re.compile(
    r"\s*(?:\[[^\]]*\]|[\d:.]+)\s+(?P<sample>\d+)\s+(?P<type>\S)\s+\d+\s+\d+\s+-?\d+"
    r"(?:\s+(?P<aux>\S.*?))?\s*"
)
ELAPSED = re.compile(r"0\+(\d+):(\d\d):(\d\d(?:\.\d+)?)")  # of Luna
EPOCH_NUMBER = re.compile(r"e(?::(\d+))?:(\d+)")  # of Luna: length where it is not 30 s, number
# seconds of a stage, in the lines above a list of them
UNIX_UNITS = (1.0, 1e-3, 1e-6, 1e-9)  # seconds of the units of times since 1970
STATED_EPOCH = re.compile(
    r"(?:time_base|epoch[ _]?(?:length|duration|dur|size|sec)|rate)\W{0,4}"
    r"(\d+(?:\.\d+)?)\s*(?:s|sec|secs|seconds)?\s*$",
    re.IGNORECASE,
)
# of lines above a list of stages that state a time of day
BEGIN = re.compile(r"\b(?:start|begin|anfang|debut|inicio|inizio)", re.IGNORECASE)
DREAMS = re.compile(r"\[hypnogram(?:aasm|r&k)\]", re.IGNORECASE)
LIGHTS_OFF = re.compile(r"\blights?[ _-]*(?:off|out)\b|\blicht[ _-]*aus\b", re.IGNORECASE)
SPLITTERS = ("\t", ";", ",", "|", None)  # None: blanks

Clock = Literal["start", "day", "unix", "epochs", "samples"]


class LabelRow(NamedTuple):
    """One label as the file states it."""

    onset: float  # seconds, or the number of an epoch, by the clock of the file
    duration: float | None  # seconds
    text: str


class LabelText(NamedTuple):
    """The labels of a text file."""

    form: str  # in words
    # what onsets count from: seconds of the recording, seconds of the day in which the first
    # label lies, epochs of the recording, or its samples
    clock: Clock
    rows: list[LabelRow]
    dropped: int = 0  # rows that state no time or no text
    codes: frozenset[str] = frozenset()  # digits that stand for stages
    is_listed: bool = False  # letters and digits alone are stages
    is_prose: bool = False  # texts can be sentences
    epoch: float | None = None  # seconds of a stage, where the file states them
    begin: float | None = None  # seconds of the day, where lines above the stages say so
    lights_off: float | None = None  # the same
    zone: float | None = None  # seconds from UTC to the clock of the first label, where it says so


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
    first_sample: int | None = None  # its number, where onsets are numbers of samples


def read_label_text(path: Path) -> LabelText | None:
    """The labels of a text file, None for a file of another content.

    Raises UserError: encoding.
    """
    if path.suffix.lower() in ARRAYS:
        return parse_label_text(_write_lines(path))
    data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b"\0\0\0"
    if b"\0" in data[:4096] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    text = decode_table(data, fallback="latin-1")
    if vendors.find_form(path.name, "\n".join(text[:4096].splitlines()) + "\n"):
        return None  # samples of a device
    return parse_label_text(text)


def _write_lines(path: Path) -> str:
    """The labels of an array (.npy, .mat, .json) as lines of text, "" for another content."""
    ending = path.suffix.lower()
    try:
        if ending == ".json":
            return _write_json(json.loads(path.read_bytes()[:MAX_BYTES]))
        if ending == ".mat":
            values = matlab.read_vector(path, STAGE_NAMES, None)
        else:
            values = np.squeeze(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, SyntaxError, TokenError, RecursionError):
        return ""  # its unit, or the list of files that are not read, says so
    if values is None or values.ndim != 1 or values.dtype.kind not in "iufU":
        return ""
    texts = values.tolist() if values.dtype.kind == "U" else [f"{cell:g}" for cell in values]
    return "\n".join(texts)  # NaN is nan, a missing one


def _write_json(content: object) -> str:
    """A list of stages as a stage a line, one of rows with names as a table; "" for another."""
    above: list[str] = []
    if isinstance(content, dict):
        stated = (f"{str(key).removesuffix('_s')} {value}" for key, value in content.items())
        above = list(filter(STATED_EPOCH.fullmatch, stated))
        lists = [rows for key, rows in content.items() if _fold_name(str(key)) in ALL_NAMES]
        content = find_only(lists, None)
    if not isinstance(content, list) or not content:
        return ""
    if all(isinstance(row, dict) for row in content):
        return _write_table(content)
    return "\n".join([*above, *map(str, content)])  # null is None, a missing one


def _write_table(rows: Sequence[dict[str, object]]) -> str:
    nested = {name for row in rows for name, cell in row.items() if isinstance(cell, (dict, list))}
    names = [name for name in rows[0] if name not in nested]
    cells = [[str(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(map("\t".join, [names, *cells]))


def parse_label_text(text: str) -> LabelText | None:
    """The labels in a text, None for another content."""
    lines = list(filter(str.strip, re.split(r"\r\n|\r|\n", text)))
    return _parse_stage_lines(lines) or _parse_rdann(lines) or _parse_table(lines)


# --- as rdann prints


def _parse_rdann(lines: Sequence[str]) -> LabelText | None:
    """What the program rdann of WFDB prints: a row an annotation, of which those of rhythms are
    called by the text at their end. Comments are left out.
    """
    rows = list(map(RDANN.fullmatch, lines[1:] if "Sample #" in "".join(lines[:1]) else lines))
    printed = list(filter(None, rows))
    if len(printed) < 2 or len(printed) < len(rows):
        return None
    labels = [
        LabelRow(float(row["sample"]), 0.0, row["aux"] if row["type"] == "+" else row["type"])
        for row in printed
        if row["type"] != '"' and (row["type"] != "+" or row["aux"])
    ]
    return LabelText("a table of labels", "samples", labels, len(rows) - len(labels))


# --- one stage a line


def _parse_stage_lines(lines: Sequence[str]) -> LabelText | None:
    """A text with a stage a line, below a name, where it has one."""
    above, texts = _split_preamble(lines)
    if any(map(DREAMS.fullmatch, above)):
        texts = [COUNTED_DOWN.get(text, "?") for text in texts]
    if len(texts) < 2 or not _are_stages(texts) or max(map(len, texts)) > 40:
        return None
    if len(above) > 1 and len(texts) < len(above):  # a text with two words at its end
        return None
    rows = [
        LabelRow(float(number), None, "?" if text.lower() in MISSING else text)
        for number, text in enumerate(texts)
    ]
    return LabelText(
        "one stage a line",
        "epochs",
        rows,
        codes=_list_codes(rows),
        is_listed=True,
        epoch=_find_stated_epoch(above),
        begin=_find_stated_clock(above, BEGIN),
        lights_off=_find_stated_clock(above, LIGHTS_OFF),
    )


def _split_preamble(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts above the first stage, and those from there on; comments are left out."""
    texts = [line.strip().strip('"') for line in lines if not line.lstrip().startswith(("#", "%"))]
    first = next((i for i, text in enumerate(texts[:PREAMBLE]) if _is_listed(text)), len(texts))
    return texts[:first], texts[first:]


def _find_stated_epoch(texts: Sequence[str]) -> float | None:
    """Seconds of a stage that the first of these texts to do so states; None: none does."""
    lengths = (float(match[1]) for match in map(STATED_EPOCH.search, texts) if match)
    return next(lengths, 0.0) or None


def _find_stated_clock(texts: Sequence[str], words: re.Pattern[str]) -> float | None:
    """Seconds of the day that the first of these texts with one of `words` states."""
    clocks = (CLOCK.search(text) for text in texts if words.search(text))
    return next((_parse_time(clock[0].strip()) for clock in clocks if clock), None)


def _are_stages(texts: Sequence[str]) -> bool:
    """Whether nine of ten texts are stages in a list of them; which one 4 is the folder says."""
    are_listed = sum(map(_is_listed, texts)) >= 0.9 * len(texts)
    return are_listed and any(text == "4" or name_listed_stage(text) for text in texts)


def _is_listed(text: str) -> bool:
    return name_listed_stage(text) is not None or text == "4" or text.lower() in MISSING


def _list_codes(rows: Sequence[LabelRow]) -> frozenset[str]:
    return frozenset(row.text.partition(".")[0] for row in rows if CODE.fullmatch(row.text))


# --- tables


def _parse_table(lines: Sequence[str]) -> LabelText | None:
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
    if not _are_numbers(times) or not _are_stages(texts):
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


def _fold_name(name: str) -> str:
    """The name of a column in small letters without its unit, and without a # before it."""
    name = re.sub(r"[\[(].*?[\])]", "", name.lstrip("#% \ufeff") or name)
    return re.sub(r" (?:s|sec|secs|seconds|ms|msec|min|hh mm ss)$", "", fold_text(name))


def _find_columns(names: Sequence[str], *, is_text: bool = False) -> Columns | None:
    """The columns of a table by their names, None for a row that holds none of texts.

    `is_text`: the row may be a sentence, which has other words, too.
    """
    folded = list(map(_fold_name, names))
    if len(names) < 2 or any(map(NUMBER.fullmatch, names)):
        return None
    if is_text and not ALL_NAMES.issuperset(folded):
        return None
    onset, duration, stop, epoch = (
        next(iter(_find_places(folded, role)), -1)
        for role in ("onset", "duration", "stop", "epoch")
    )
    duration = -1 if duration == onset else duration
    texts = _find_places(folded, "text")
    if not texts:
        return _mark_scorers(Columns(onset, duration, stop, epoch, ()), _find_scorers(names))
    is_stage = folded[texts[0]] in STAGE_NAMES
    if onset < 0 and not is_stage:
        return None
    scale = _read_scale(_get(names, onset))
    is_prose = folded[texts[0]] in PROSE_NAMES
    columns = Columns(onset, duration, stop, epoch, texts, scale, is_stage, is_prose)
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
    staged = {i: name for i, name in spaced.items() if _is_of_scorer(_fold_name(name))}
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
    if any(map(_is_time, columns[0])):
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
    is_stage = _are_stages(texts)
    if not is_stage and any(map(NUMBER.fullmatch, texts)):
        return None
    if _are_numbers(texts) and not _is_regular(list(map(_parse_time, times))):
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
    starts, stops = ([_parse_time(cell) or 0.0 for cell in column] for column in (first, second))
    is_ordered = all(stop <= start for stop, start in zip(stops[:-1], starts[1:], strict=True))
    return is_ordered and all(a < b for a, b in zip(starts, stops, strict=True))


def _are_times(cells: Sequence[str]) -> bool:
    return all(map(_is_time, cells))


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(map(NUMBER.fullmatch, cells))


def _is_time(cell: str) -> bool:
    return any(form.fullmatch(cell) for form in (NUMBER, CLOCK, ELAPSED, EPOCH_NUMBER))


def _is_regular(times: Sequence[float | None]) -> bool:
    """Whether times follow each other in nine of ten equal steps of a second or more."""
    steps = [round(b - a, 3) for a, b in pairwise(times) if a is not None and b is not None]
    step, count = _find_commonest_step(steps)
    return step >= 1 and count >= 0.9 * len(steps)


def _find_commonest_step(steps: Sequence[float]) -> tuple[float, int]:
    """The commonest of these steps, and how often it is there; 0 without steps."""
    return next(iter(Counter(steps).most_common(1)), (0.0, 0))


def _parse_rows(cells: Sequence[Sequence[str]], columns: Columns) -> LabelText | None:
    """The rows of a table; None where they are no labels."""
    first = _get(next(iter(cells), ()), columns.onset)
    is_clock = CLOCK.fullmatch(first) is not None
    parsed = [
        (_parse_row(row, number, choice, is_clock), mark)
        for choice, mark in _list_texts(columns)
        for number, row in enumerate(cells)
    ]
    labelled = [(row, mark) for row, mark in parsed if row is not None]
    rows = [row for row, _ in labelled]
    if not _are_labels(rows, columns):
        return None
    form, clock, rows = _place_rows(rows, columns, is_clock)
    is_listed = columns.is_stage and _are_stages([row.text for row in rows])
    codes = _list_codes(rows) if is_listed else frozenset()
    rows = [
        row._replace(text=row.text + mark) for row, (_, mark) in zip(rows, labelled, strict=True)
    ]
    dropped = len(parsed) - len(rows)
    table = LabelText(form, clock, rows, dropped, codes, is_listed, columns.is_prose)
    return table._replace(zone=_find_zone(clock, first))


def _find_zone(clock: Clock, cell: str) -> float | None:
    """Seconds from UTC to the clock of a time that ends with its zone."""
    if clock == "unix":
        return 0.0
    time = CLOCK.fullmatch(cell)
    text = time["zone"] if time else None
    return read_offset(ZONES.get(text, text).replace(":", "")) if text else None


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
        onset = _parse_time(cell) if is_same else None
    if onset is None or not text:
        return None
    return LabelRow(onset * scale, _read_duration(row, columns, onset), text)


def _place_rows(
    rows: list[LabelRow], columns: Columns, is_clock: bool
) -> tuple[str, Clock, list[LabelRow]]:
    """What a table is in words, what its onsets count from, and its rows by that."""
    if is_clock:
        return "a table of labels", "day", _pass_midnight(rows)
    if columns.onset < 0 or _counts_epochs(rows, columns):
        return "a table with a row an epoch", "epochs", _count_from_zero(rows)
    if columns.first_sample is not None:
        first = columns.first_sample
        return "a table of labels", "samples", [r._replace(onset=r.onset - first) for r in rows]
    if _count_days(rows):
        return "a table of labels", "day", _pass_midnight(_read_days(rows, columns))
    unit = find_unix_unit(rows[0].onset)
    if unit:
        return "a table of labels", "unix", _count_from_midnight(rows, columns, unit)
    return "a table of labels", "start", rows


def _count_days(rows: Sequence[LabelRow]) -> bool:
    """Whether onsets are times of day, or dates, as spreadsheets count them: in days.

    As seconds, many labels would lie within one or two.
    """
    onsets = [row.onset for row in rows]
    first, last = min(onsets), max(onsets)
    is_short = (first >= 0 and last < 1) or (first > SPREADSHEET_DAYS[0] and last - first < 2)
    return is_short and last < SPREADSHEET_DAYS[1] and len(set(onsets)) > SINGLE_TIMES


def _read_days(rows: Sequence[LabelRow], columns: Columns) -> list[LabelRow]:
    """Seconds of the day of times in days; so are durations, unless most last a second or more."""
    lengths = [row.duration for row in rows if row.duration is not None]
    are_seconds = columns.duration >= 0 and median(lengths or [0.0]) >= 1
    factor = 1.0 if are_seconds else DAY
    return [
        LabelRow(
            round(row.onset % 1 * DAY, 3),
            row.duration and round(row.duration * factor, 3),
            row.text,
        )
        for row in rows
    ]


def find_unix_unit(value: float) -> float:
    """Seconds of the unit in which a number is a time since 1970; 0: it is none."""
    return next((unit for unit in UNIX_UNITS if UNIX[0] <= value * unit <= UNIX[1]), 0.0)


def _count_from_midnight(rows: Sequence[LabelRow], columns: Columns, unit: float) -> list[LabelRow]:
    """Times since 1970 as seconds of the day, in UTC, in which the first one lies.

    Durations of a column of their own are seconds; those between two times are of their unit.
    """
    day = rows[0].onset * unit // DAY * DAY
    factor = 1.0 if columns.duration >= 0 else unit
    return [
        LabelRow(row.onset * unit - day, row.duration and row.duration * factor, row.text)
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
    return _parse_time(cell) if columns.epoch >= 0 else float(number)


def _read_duration(row: Sequence[str], columns: Columns, onset: float) -> float | None:
    """Seconds, None where the row states none."""
    cell = _get(row, columns.duration)
    if SHORT.fullmatch(cell) and not SHORT.fullmatch(_get(row, columns.onset)):
        cell = f"0:{cell}"  # minutes and seconds
    length = _parse_time(cell)
    if length is not None:
        return max(length if ":" in cell else length * columns.scale, 0.0)
    cell = _get(row, columns.stop)
    stop = _parse_time(cell)
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
    return is_certain or _are_stages(texts)


def _counts_epochs(rows: Sequence[LabelRow], columns: Columns) -> bool:
    """Whether onsets are the numbers of epochs: whole ones that follow each other from 0 or 1."""
    onsets = sorted({row.onset for row in rows})
    steps = {b - a for a, b in pairwise(onsets)}
    is_stage = all(name_listed_stage(row.text) is not None for row in rows)
    return onsets[0] in {0.0, 1.0} and steps == {1.0} and is_stage and columns.duration < 0


def _count_from_zero(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Numbers of epochs, of which the first is 0: most programs count from 1."""
    first = 0.0 if min(row.onset for row in rows) < 1 else 1.0
    return [row._replace(onset=row.onset - first) for row in rows]


def _parse_time(cell: str) -> float | None:
    """Seconds, or seconds of the day; None for another text."""
    if NUMBER.fullmatch(cell):
        value = float(cell.replace(",", "."))
        return value if math.isfinite(value) else None
    if elapsed := ELAPSED.fullmatch(cell):
        return int(elapsed[1]) * 3600 + int(elapsed[2]) * 60 + float(elapsed[3])
    if number := EPOCH_NUMBER.fullmatch(cell):
        return (int(number[2]) - 1) * float(number[1] or EPOCH)
    clock = CLOCK.fullmatch(cell)
    if clock is None:
        return None
    hour = int(clock["h"])
    if half := clock["half"]:
        hour = hour % 12 + 12 * half.lower().startswith("p")
    seconds = float((clock["s"] or "0").replace(",", "."))
    return hour * 3600 + int(clock["m"]) * 60 + seconds


def _pass_midnight(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Clock times that go on over midnight, in seconds of the first day."""
    onsets = pass_midnight(np.array([row.onset for row in rows])).tolist()
    return [row._replace(onset=onset) for row, onset in zip(rows, onsets, strict=True)]


# --- the time of a recording


def place_on_clock(first: float, last: float, start: float, length: float) -> float:
    """Seconds to subtract from clock times for times of a recording.

    Args:
        first: the first clock time, seconds of its day.
        last: the last one, seconds of the same day.
        start: start of the recording, seconds of its day.
        length: of the recording, seconds.

    Labels may begin up to an hour before the recording. Times that begin near 0 count from its
    start where they fit so, and by the clock run past its end or lie outside.
    """
    offset = (first - start) % DAY
    if offset > DAY - 3600:
        offset -= DAY
    beyond = offset + last - first - length
    is_near = 0 < offset <= 2 * beyond or first == 0 < beyond
    is_outside = offset > length or (last <= length and is_near)
    if is_outside and first < LATEST_ZERO:
        return 0.0
    return first - offset


def find_step(rows: Sequence[LabelRow]) -> float:
    """Seconds of the rows of a list of epochs, 0 for a list of changes.

    A list of epochs says the same stage in neighbouring rows; a list of changes does not.
    """
    rows = [row for row in rows if row.text.partition("@@")[2] == rows[0].text.partition("@@")[2]]
    steps = [round(b.onset - a.onset, 3) for a, b in pairwise(rows)]
    step, count = _find_commonest_step(steps)
    is_listed = any(a.text == b.text for a, b in pairwise(rows)) and 2 * count > len(steps)
    return max(step, 0.0) if is_listed else 0.0
