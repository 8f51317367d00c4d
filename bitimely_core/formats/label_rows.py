"""Labels as a text file states them, and the times in its cells."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from bitimely_core.formats.clocks import UNIX
from bitimely_core.formats.stage_texts import EPOCH, name_listed_stage

MISSING = {"", "n/a", "na", "nan", "null", "none", ".", "-"}
NUMBER = re.compile(r"[+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
CODE = re.compile(r"-?\d{1,2}(?:\.0+)?")
CLOCK = re.compile(
    r"(?:(?P<day>\d{4}-\d\d?-\d\d?|\d{1,2}[./]\d{1,2}[./]\d{2,4})[T ,]*)?"
    r"(?P<h>\d{1,2})(?P<mark>:|\.(?=\d\d\.\d\d))(?P<m>\d\d)(?:(?P=mark)(?P<s>\d\d(?:[.,]\d+)?))?"
    r"\s*(?P<half>[AaPp]\.?[Mm]\.?)?"
    r"\s*(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d)?"
)
SHORT = re.compile(r"\d{1,3}:\d\d")  # hours and minutes, or minutes and seconds
ELAPSED = re.compile(r"0\+(\d+):(\d\d):(\d\d(?:\.\d+)?)")  # of Luna
EPOCH_NUMBER = re.compile(r"e(?::(\d+))?:(\d+)")  # of Luna: length where it is not 30 s, number
UNIX_UNITS = (1.0, 1e-3, 1e-6, 1e-9)  # seconds of the units of times since 1970

Clock = Literal["start", "day", "epochs", "samples"]


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
    day: date | None = None  # in which the first label lies, where the file states it
    zone: float | None = None  # seconds from UTC to the clock of the first label, where it says so


def parse_time(cell: str) -> float | None:
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


def is_time(cell: str) -> bool:
    """Whether a cell is one time, in any way that label files write it."""
    return any(form.fullmatch(cell) for form in (NUMBER, CLOCK, ELAPSED, EPOCH_NUMBER))


def find_unix_unit(value: float) -> float:
    """Seconds of the unit in which a number is a time since 1970; 0: it is none."""
    return next((unit for unit in UNIX_UNITS if UNIX[0] <= value * unit <= UNIX[1]), 0.0)


def are_stages(texts: Sequence[str]) -> bool:
    """Whether nine of ten texts are stages in a list of them; which one 4 is the folder says."""
    are_listed = sum(map(is_listed, texts)) >= 0.9 * len(texts)
    return are_listed and any(text == "4" or name_listed_stage(text) for text in texts)


def is_listed(text: str) -> bool:
    """Whether a text is a stage in a list of them, or a missing one."""
    return name_listed_stage(text) is not None or text == "4" or text.lower() in MISSING


def list_codes(rows: Sequence[LabelRow]) -> frozenset[str]:
    """The digits among the texts of rows."""
    return frozenset(row.text.partition(".")[0] for row in rows if CODE.fullmatch(row.text))


def scale_rows(
    rows: Sequence[LabelRow], unit: float = 1.0, zero: float = 0.0, length_unit: float = 1.0
) -> list[LabelRow]:
    """Rows in another unit: one of onsets is `unit` of it, one of lengths `length_unit`.

    `zero`: where the new onsets begin, in the new unit.
    """
    return [
        LabelRow(
            round(row.onset * unit - zero, 6), row.duration and row.duration * length_unit, row.text
        )
        for row in rows
    ]


def list_onsets(rows: Sequence[LabelRow]) -> np.ndarray:
    """The onsets of rows, [n]."""
    return np.array([row.onset for row in rows])


def move_rows(rows: Sequence[LabelRow], onsets: np.ndarray) -> list[LabelRow]:
    """Rows at other onsets, [n]."""
    places = np.round(onsets, 6).tolist()
    return [row._replace(onset=place) for row, place in zip(rows, places, strict=True)]


def find_step(rows: Sequence[LabelRow]) -> float:
    """Seconds of the rows of a list of epochs, 0 for a list of changes.

    A list of epochs says the same stage in neighbouring rows; a list of changes does not.
    """
    rows = [row for row in rows if row.text.partition("@@")[2] == rows[0].text.partition("@@")[2]]
    steps = [round(b.onset - a.onset, 3) for a, b in pairwise(rows)]
    step, count = find_commonest_step(steps)
    is_listed = any(a.text == b.text for a, b in pairwise(rows)) and 2 * count > len(steps)
    return max(step, 0.0) if is_listed else 0.0


def find_commonest_step(steps: Sequence[float]) -> tuple[float, int]:
    """The commonest of these steps, and how often it is there; 0 without steps."""
    return next(iter(Counter(steps).most_common(1)), (0.0, 0))
