"""Reads columns of times: their unit by header, step and plausibility, and date-times as seconds.

Physiology is sampled between 0.01 and 50,000 Hz. Where that leaves several units for a column of
numbers, the usual one is assumed and the others are named.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import polars as pl

UNITS = {  # seconds
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "days": 86_400.0,
    "ticks": 1e-7,
}  # fmt: skip
GUESSED = ("s", "ms", "us", "ns")  # in this order where two are as usual
STATED = (*UNITS, "samples", "datetime")  # what a map may say of a clock
WORDS = tomllib.loads(
    resources.files("bitimely_core.formats").joinpath("table_words.toml").read_text("utf-8")
)
MISSING = set(WORDS["missing"])
UNIT_OF_WORD = {word: unit for unit, words in WORDS["clock_units"].items() for word in words}
CLOCK_WORDS = set(WORDS["clock"])
FIRST_WORDS = {*CLOCK_WORDS, *UNIT_OF_WORD, *WORDS["clock_first"]}
INDEX_WORDS = set(WORDS["index"])
FAST_WORDS, FEATURE_WORDS = set(WORDS["fast"]), set(WORDS["features"])
NUMBERED = re.compile(r"(?i)(?:ch|chan|channel|electrode)[ _.-]?\d+")
LEAST_NUMBERED = 4  # channels of an amplifier
SLOWEST, FASTEST = 0.01, 50_000.0  # Hz, plausible
SLOWEST_STATED = 1e-5  # Hz, where the unit is stated: a value a day
USUAL = (1.0, 2500.0)  # Hz, of a regular clock
USUAL_FAST = (20.0, 2500.0)  # Hz, of channels that need a fast clock
USUAL_IRREGULAR = (1e-4, 20.0)  # Hz, of observations at irregular times
# a part or a multiple of a unit, such as `s/256`, `1/1024 s`, `x10 ms`
SCALED = re.compile(r"(?:x ?)?(\d+(?:\.\d+)?)(?: ?/ ?(\d+))? ?([^\W\d]+)|([^\W\d]+) ?/ ?(\d+)")
EPOCH_STEP = 30.0  # steps of 30, 60, 300 ... are seconds between epochs, not milliseconds
UNIX = (1e9, 2.5e9)  # unix seconds of the years 2001 to 2049
DATE_NUMBER = (1.99e13, 2.1e13)  # 20240301220000: no count of ms, us or ns of such years
YEARS = range(1950, 2101)
# unit -> seconds of its clock at the beginning of 1970: of spreadsheets and of MATLAB, of .NET
EPOCHS = {"days": (25_569 * 86_400.0, 719_529 * 86_400.0), "ticks": (62_135_596_800.0,)}
MOST_DAYS = 0.042  # a step of an hour: days that are dates have smaller ones
DAY = 86_400.0
STEADY = 0.05  # of a step: what most steps of a clock without jitter differ at most
UNEVEN = 0.4  # of a step: standard deviation of times that stay near an even clock
NEAR = 0.5  # of a step: less is jitter
LOST = 1.5  # steps: from here on a row may be lost
AROUND = 5  # rows before and after a late one that say whether others are lost
MOST_BREAKS = 0.1  # of the rows

TIME_TEXT = r"(?:\d+:)?\d{1,2}:\d{2}(?:[.,:]\d+)?"
ELAPSED = re.compile(r"\[?" + TIME_TEXT + r"\]?")
HOURS_MINUTES = re.compile(r"\d{1,2}:\d{2}")
HALF_DAY = re.compile(TIME_TEXT + r" ?[AaPp]\.?[Mm]\.?")
DATE = re.compile(
    r"(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2})"
    r"|\d{1,2}[- ][A-Za-z]{3,9}[- ](?:\d{4}|\d{2})|[A-Za-z]{3,9} \d{1,2},? \d{4}"
    r"|\d{8}(?=[T ]\d{6}))"
)
ZONES: dict[str, str] = WORDS["zones"]  # abbreviation -> offset
ZONE = rf"(?: ?(?:{'|'.join(ZONES)}|[+-]\d{{2}}:?\d{{2}}))?(?: ?\[[A-Za-z_]+(?:/[A-Za-z_]+)*\])?"
DATE_TIME = re.compile(
    rf"{DATE.pattern}(?:[T ]+(?:{TIME_TEXT}|\d{{6}}(?:[.,]\d+)?)(?: ?[AaPp]\.?[Mm]\.?)?{ZONE})?"
)
# as rdsamp of WFDB and oximeters write it; polars knows no references to groups
TIME_DATE = re.compile(
    r"\[?(\d{1,2}:\d{2}:\d{2}(?:\.\d+)?(?: ?[AaPp][Mm])?)"
    r" (\d{1,2}[-/. ](?:\d{1,2}|[A-Za-z]{3,9})[-/. ]\d{4}|[A-Za-z]{3,9} \d{1,2},? \d{4})\]?"
)


class UnitChoice(NamedTuple):
    """The unit of a column of times, and how it was found."""

    unit: str  # a key of `UNITS`, samples, datetime or elapsed; "": none is plausible
    evidence: str  # in words
    others: tuple[str, ...] = ()  # units that are plausible, too


class Times(NamedTuple):
    """The times of the rows of a table."""

    seconds: np.ndarray  # [rows] after the first row that has a time, NaN where a row has none
    origin: float  # seconds on the file's own clock of that first row; 0.0 for date-times
    # of that row, where the clock is absolute: the civil time, where the zone is stated
    start: datetime | None
    zone: float | None = None  # seconds from UTC to the clock of `start`, where it is stated


# --- what a header says


def split_words(header: str) -> list[str]:
    """The words of a header in lower case: `timeMs [s]` has time, ms, s."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", header)
    return re.findall(r"[^\W\d_]+|#|\u2116", spaced.lower().replace("\u00b5", "\u00b5"))


def is_clock_name(header: str) -> bool:
    """Whether a header may be that of a clock: its values decide."""
    words = split_words(header)
    return bool(words) and (words[0] in FIRST_WORDS or not CLOCK_WORDS.isdisjoint(words))


def _need_fast_clock(headers: Iterable[str]) -> bool:
    """Whether channels are called as those of muscles, hearts and brains, or are the numbered ones
    of an amplifier, and none as a feature.
    """
    headers = list(headers)
    words = set(chain.from_iterable(map(split_words, headers)))
    numbered = sum(NUMBERED.fullmatch(header) is not None for header in headers)
    is_fast = numbered >= LEAST_NUMBERED or not FAST_WORDS.isdisjoint(words)
    return is_fast and FEATURE_WORDS.isdisjoint(words)


def is_index_name(header: str) -> bool:
    """Whether a header may be that of numbers of samples."""
    words = split_words(header)
    return not words or words[0] in INDEX_WORDS


def read_header_unit(header: str, unit_text: str = "") -> str:
    """The unit that the header of a clock states, in brackets or as its last word; "": none."""
    brackets = re.search(r"\(([^()]+)\)\s*$", header)
    text = (unit_text or (brackets[1] if brackets else "")).strip().lower()
    if np.isfinite(measure_scaled(text)):
        return text
    return UNIT_OF_WORD.get(text) or _find_word_unit(header)


def _find_word_unit(header: str) -> str:
    """The unit that a word of a header states; "" for none."""
    words = split_words(header)
    units = [word for word in words if word in UNIT_OF_WORD]
    if not units:
        return ""
    is_certain = any(len(word) > 1 or word == "s" for word in units)
    return UNIT_OF_WORD[units[-1]] if is_certain or units[-1] == words[-1] else ""


def measure_unit(unit: str) -> float:
    """Seconds of a unit of `UNITS`, or of a part or a multiple of one; NaN: it is none."""
    return UNITS.get(unit, measure_scaled(unit))


def measure_scaled(text: str) -> float:
    """Seconds of a part or a multiple of a unit, such as `s/256` and `10 ms`; NaN: it is none."""
    match = SCALED.fullmatch(text)
    count, parts, word, divided, divisor = match.groups() if match else (None,) * 5
    unit = UNITS.get(UNIT_OF_WORD.get(word or divided or "", ""))
    share = float(divisor or parts or 1)
    return float(count or 1) * unit / share if unit and share else float("nan")


# --- the unit of a column of numbers


def choose_unit(
    header: str, unit_text: str, values: np.ndarray, stated: str = "", others: Iterable[str] = ()
) -> UnitChoice:
    """The unit of a clock by what the map states, the header, the size and the step of its values.

    Args:
        header: of the column.
        unit_text: its unit where that stands in brackets or in a row of its own.
        values: the first times, [n] in the file's unit.
        stated: a key of `STATED`; "": none. `datetime`, of numbers, are times since 1970.
        others: headers of the other columns.
    """
    if stated and stated != "datetime":
        return UnitChoice(stated, "as the map states")
    step = measure_step(values)
    named = read_header_unit(header, unit_text)
    if DATE_NUMBER[0] <= values[0] <= DATE_NUMBER[1]:
        return UnitChoice("", f"{values[0]:.0f} is a date and a time written as a number")
    if named == "samples" or (named and is_plausible(step, measure_unit(named), SLOWEST_STATED)):
        return UnitChoice(named, "by its header")
    calendar = _find_calendar_unit(values, step, named)
    if calendar is not None:
        return calendar
    example = f"{values[0]:.10g}, {values[min(1, len(values) - 1)]:.10g}"
    if named:
        return UnitChoice("", f"{example} in {named}, by its header, is no rate of physiology")
    usual = USUAL_FAST if _need_fast_clock(others) else USUAL
    return _guess_unit(step, example, USUAL_IRREGULAR if is_irregular(values) else usual)


def _find_calendar_unit(values: np.ndarray, step: float, named: str) -> UnitChoice | None:
    """The unit of times since 1970 or another beginning; None: they are those of no calendar.

    `named`: the unit by the header, "": none.
    """
    unix = [unit for unit in GUESSED if is_unix(values, UNITS[unit])]
    if unix and is_plausible(step, UNITS[unix[0]], SLOWEST_STATED):
        return UnitChoice(unix[0], "times since 1970")
    if find_epoch(values, "ticks") is not None and is_plausible(step, UNITS["ticks"], SLOWEST):
        return UnitChoice("ticks", "100 ns since the year 1")
    if find_epoch(values, "days") is None or not step < MOST_DAYS:
        return None
    others = ("s",) if not named and 1 / step < USUAL[1] else ()
    return UnitChoice("days", "dates as numbers of days", others)


def _guess_unit(step: float, example: str, bounds: tuple[float, float]) -> UnitChoice:
    """The unit of a clock that nothing states, by its step; `example`: first values, `bounds`: Hz
    that are usual.
    """
    low, high = bounds
    is_epochs = step % EPOCH_STEP == 0
    slowest = SLOWEST_STATED if is_epochs else min(low, SLOWEST)
    plausible = [unit for unit in GUESSED if is_plausible(step, UNITS[unit], slowest)]
    if not plausible:
        return UnitChoice("", f"such as {example}: in no unit a rate of physiology")
    usual = [unit for unit in plausible if low <= 1 / (step * UNITS[unit]) <= high]
    choice = "s" if is_epochs else (usual or plausible)[0]
    # seconds below 1 are hardly anything else
    others = usual if usual == ["s"] else plausible
    rest = tuple(filter(choice.__ne__, others))
    return UnitChoice(choice, f"by its step, such as {example}", rest)


def list_steps(values: np.ndarray) -> np.ndarray:
    """The steps from each time to the next; rows without a time are left out."""
    return np.diff(values[np.isfinite(values)])


def measure_mean_step(values: np.ndarray) -> float:
    """The mean of the steps that are no gaps, where several rows may have one time; NaN: none."""
    steps = list_steps(values)
    rising = steps[steps > 0]
    if not rising.size:
        return float("nan")
    mean = float(np.mean(rising[rising < LOST * np.median(rising)]))
    share = (rising.size + 1) / (steps.size + 1)
    return mean * share if share < NEAR else mean


def measure_step(values: np.ndarray) -> float:
    """The median of the steps that are not 0, in the unit of the values; NaN: there are none."""
    steps = list_steps(values)
    steps = steps[steps > 0]
    return float(np.median(steps)) if steps.size else float("nan")


def measure_clock(values: np.ndarray) -> tuple[float, bool]:
    """The step of a clock in the unit of its values, and whether they are irregular."""
    irregular = is_irregular(values)
    return (measure_step if irregular else measure_mean_step)(values), irregular


def is_plausible(step: float, seconds: float, slowest: float) -> bool:
    """Whether a step, of a unit of so many seconds, is one of physiology; `slowest`: Hz."""
    return step > 0 and slowest <= 1 / (step * seconds) <= FASTEST * (1 + 1e-6)


def is_unix(values: np.ndarray, seconds: float) -> bool:
    """Whether these are times since 1970 of the years 2001 to 2049."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and UNIX[0] <= finite[0] * seconds <= UNIX[1]


def find_epoch(values: np.ndarray, unit: str) -> float | None:
    """Seconds of a clock at the beginning of 1970, where it is one of the years 2001 to 2049.

    None: its times are those of no calendar.
    """
    finite = values[np.isfinite(values)]
    if not finite.size or unit not in UNITS:
        return None
    first = float(finite[0]) * UNITS[unit]
    epochs = EPOCHS.get(unit, (0.0,))
    return next((zero for zero in epochs if UNIX[0] <= first - zero <= UNIX[1]), None)


def find_breaks(times: np.ndarray, rate: float) -> np.ndarray:
    """The rows before which others are lost: late ones after which the clock stays late.

    `times`: seconds or another unit, [n], going up; `rate`: rows a unit.
    """
    late = np.flatnonzero(np.diff(times) * rate >= LOST)
    offset = times * rate - np.arange(len(times))
    lost = [
        row + 1
        for row in late.tolist()
        if np.median(offset[row + 1 : row + 1 + AROUND])
        - np.median(offset[max(0, row + 1 - AROUND) : row + 1])
        > NEAR
    ]
    return np.array(lost, np.int64)


def measure_even_step(times: np.ndarray, breaks: np.ndarray) -> float:
    """The mean step of times, those over breaks left out."""
    steps = np.delete(np.diff(times), breaks - 1)
    return float(np.mean(steps)) if steps.size else float(np.mean(np.diff(times)))


def is_irregular(values: np.ndarray) -> bool:
    """Whether times have no common step: they do not stay near any even clock.

    A clock that drifts has equal steps, one that jitters comes back, and lost rows leave whole
    steps: these are regular.
    """
    times = np.unique(values[np.isfinite(values)])
    if len(times) < 6:
        return False
    steps = np.diff(times)
    ratio = steps / np.median(steps)
    if float(np.mean(np.abs(ratio - np.maximum(1, np.rint(ratio))) < STEADY)) > 0.9:
        return False
    breaks = find_breaks(times, 1 / float(np.median(steps)))
    if len(breaks) > MOST_BREAKS * len(times):
        return True
    step = measure_even_step(times, breaks)
    lost = np.zeros(len(times))
    lost[breaks] = np.rint(steps[breaks - 1] / step) - 1
    offset = times / step - np.arange(len(times)) - np.cumsum(lost)
    return float(np.std(offset)) > UNEVEN


# --- times as text


def is_time_text(cell: str) -> bool:
    """Whether a cell is a date, a date with a time, or a time."""
    return any(form.fullmatch(cell) for form in (DATE_TIME, ELAPSED, HALF_DAY, TIME_DATE))


def find_text_form(cells: Sequence[str], header: str = "") -> str:
    """How the times in these cells are written.

    A form of `strptime` for date-times, `elapsed` or `elapsed hh:mm` for times alone, `half-day`
    for those with AM and PM; "": in no way that is known.
    """
    texts = list(filter(None, cells))
    if not texts:
        return ""
    if all(map(ELAPSED.fullmatch, texts)):
        lacks_seconds = all(map(HOURS_MINUTES.fullmatch, texts)) and "mm:ss" not in header.lower()
        return "elapsed hh:mm" if lacks_seconds else "elapsed"
    if all(map(HALF_DAY.fullmatch, texts)):
        return "half-day"
    is_date = all(map(DATE_TIME.fullmatch, texts)) or all(map(TIME_DATE.fullmatch, texts))
    return _find_date_form(texts) if is_date else ""


def _find_date_form(texts: Sequence[str]) -> str:
    import polars as pl

    cells = _normalise_texts(pl.Series("", texts, pl.String))
    first = cells[0]
    has_half = re.search("[AP]M", first) is not None
    has_zone = re.search("[+-]..:?..$", first) is not None and ":" in first
    zone = " %z" if has_zone else ""
    hours = [form for form in WORDS["hours"] if ("%p" in form) == has_half]
    for date, hour in product(WORDS["dates"], hours):
        form = f"{date} {hour}{zone}"
        moments = cells.str.to_datetime(form, time_unit="us", strict=False, exact=True)
        years = moments.dt.year()
        if not moments.null_count() and years.min() in YEARS and years.max() in YEARS:
            return form
    return ""


def _normalise_texts(cells: pl.Series) -> pl.Series:
    """Date-times with a point before fractions, one blank between date, time and zone, and AM."""
    return (
        _write_offsets(cells.str.strip_chars())
        .str.replace(TIME_DATE.pattern, "$2 $1")
        .str.replace_all(",", ".", literal=True)
        .str.replace(r"^([A-Za-z]{3,9} \d{1,2})\.", "$1")
        .str.replace(r"(\d)T(\d)", "$1 $2")
        .str.replace(r"(:\d\d):(\d+)", "${1}:$2")
        .str.replace(r"(\d\d:\d\d:\d\d):(\d+)", "$1.$2")
        .str.replace(r"(:\d\d(?:\.\d+)?|\d{6}(?:\.\d+)?) ?([+-]\d\d):?(\d\d)$", "$1 $2$3")
        .str.replace(r"(?i) ?([ap])\.?m\.?", " ${1}M")
        .str.replace(" aM", " AM", literal=True)
        .str.replace(" pM", " PM", literal=True)
    )


def _write_offsets(cells: pl.Series) -> pl.Series:
    """Date-times whose zone is an offset, where it is a letter, an abbreviation or a place."""
    cells = cells.str.replace(r" ?\[[A-Za-z_/]+\]$", "")  # the offset stands before a place
    for word in cells.str.extract(r"([A-Z]+)$").unique().drop_nulls():
        if word in ZONES:
            cells = cells.str.replace(f" ?{word}$", f" {ZONES[word]}")
    return cells


def parse_texts(cells: pl.Series, form: str) -> Times | int:
    """The times in cells of a form of `find_text_form`, or the first row that is not of it.

    Times alone that fall by more than half a day have passed midnight.
    """
    texts = cells.str.strip_chars()
    texts = texts.set(texts.str.to_lowercase().is_in(MISSING), None)
    if form.startswith("elapsed"):
        seconds = _parse_elapsed(texts, has_hours=form == "elapsed hh:mm")
    else:
        is_half = form == "half-day"
        if is_half:
            texts = "2000-01-01 " + texts
        pattern = "%Y-%m-%d %I:%M:%S%.f %p" if is_half else form
        texts = _normalise_texts(texts)
        seconds = _parse_dates(texts, pattern)
    wrong = np.isnan(seconds) & texts.is_not_null().to_numpy()
    if wrong.any():
        return int(wrong.argmax())
    filled = seconds[np.isfinite(seconds)]
    if not filled.size:
        return Times(seconds, 0.0, None)
    first = float(filled[0])
    if form.startswith("elapsed") or form == "half-day":
        return Times(pass_midnight(seconds) - first, 0.0 if form == "half-day" else first, None)
    zone = read_offset(texts[int(np.isfinite(seconds).argmax())]) if "%z" in form else None
    # whole microseconds: float64 holds those of this century
    return Times(np.round(seconds - first, 6), 0.0, _make_moment(first + (zone or 0.0)), zone)


def read_offset(text: str) -> float:
    """Seconds from UTC to the civil time of a date-time that ends with its offset, as +0100."""
    return float(f"{text[-5]}1") * (3600 * int(text[-4:-2]) + 60 * int(text[-2:]))


def _parse_dates(texts: pl.Series, form: str) -> np.ndarray:
    """Seconds since 1970. Where day and month may be swapped, the way with the smaller steps, else
    the month first where hours have AM and PM, as in the USA.
    """
    import polars as pl

    swapped = re.sub("^%([dm])(.)%([dm])(?=.)", r"%\3\2%\1", form)
    patterns = list(dict.fromkeys((form, swapped)))
    if "%p" in form and "/" in form:
        patterns.sort(reverse=True)  # %m/%d before %d/%m
    ways = []
    for pattern in patterns:
        moments = texts.str.to_datetime(pattern, time_unit="us", strict=False)
        ways.append(moments.dt.timestamp("us").cast(pl.Float64).to_numpy() / 1e6)

    def rate_way(seconds: np.ndarray) -> tuple[int, float]:
        steps = list_steps(seconds)
        return int(np.isnan(seconds).sum()), float(np.abs(steps).max(initial=0.0))

    return min(ways, key=rate_way)


def _parse_elapsed(texts: pl.Series, *, has_hours: bool) -> np.ndarray:
    """Seconds of h:mm:ss, mm:ss or, with `has_hours`, hh:mm."""
    import polars as pl

    plain = texts.str.strip_chars("[]").str.replace_all(",", ".", literal=True)
    plain = plain.str.replace(r"(\d\d:\d\d:\d\d):(\d+)", "$1.$2")
    parts = plain.str.extract_groups(r"^(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)$").struct.unnest()
    hour, minute, second = (
        parts.to_series(i).cast(pl.Float64, strict=False).to_numpy() for i in range(3)
    )
    seconds = np.nan_to_num(hour) * 3600 + minute * 60 + second
    return seconds * 60 if has_hours else seconds


def pass_midnight(seconds: np.ndarray) -> np.ndarray:
    """Times of day as they go on over midnight."""
    filled = np.flatnonzero(np.isfinite(seconds))
    days = np.zeros(len(seconds))
    days[filled[1:]] = np.cumsum(np.diff(seconds[filled]) < -DAY / 2)
    return seconds + DAY * days


def _make_moment(seconds: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None) + timedelta(seconds=seconds)


# --- times as numbers


def scale_numbers(values: np.ndarray, unit: str) -> Times:
    """Times in a unit, or numbers of samples."""
    seconds = 1.0 if unit in {"", "samples"} else measure_unit(unit)
    filled = values[np.isfinite(values)]
    if not filled.size:
        return Times(values, 0.0, None)
    first = float(filled[0])
    # the difference first: a unix time in ns leaves float64 no digits for the product
    elapsed = (values - first) * seconds
    epoch = find_epoch(filled[:1], unit)
    if epoch is not None:
        unix = first * seconds - epoch
        return Times(elapsed, unix, _make_moment(unix), zone=0.0)
    return Times(elapsed, first * seconds, None)


def parse_moment(text: str) -> datetime | None:
    """A moment in unix seconds, in days of a spreadsheet or as a date-time."""
    text = text.strip().strip('"')
    number = text.replace(",", ".")  # a decimal comma
    if re.fullmatch(r"\d{5}(\.\d+)?|\d\.\d+e\+0?04", number, re.IGNORECASE):
        return datetime(1899, 12, 30) + timedelta(milliseconds=round(float(number) * DAY * 1e3))
    if re.fullmatch(r"\d{9,10}(\.\d+)?", number):
        return _make_moment(float(number))
    times = read_moments([text])
    return times.start if times else None


def read_moments(cells: Sequence[str]) -> Times | None:
    """The times in cells that are written alike, of which some may be empty; None: in no way."""
    import polars as pl

    form = find_text_form(cells)
    times = parse_texts(pl.Series("", cells, pl.String), form) if form else None
    return times if isinstance(times, Times) else None
