"""Reads dates as days: integers (int32) that count from 1970-01-01, which is day 0.

Integers need no date arithmetic. Of a column, each distinct text is read once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from functools import lru_cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.claims.distinct import map_texts

EPOCH = date(1970, 1, 1).toordinal()
MONTH = 30.4375  # days: 365.25 / 12 = 487 / 16
AGE_MONTH = 30  # days of the "age months" of the released code
CLOCK = r"[T ] ?[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?"
ZONE = r" ?(?:Z|UTC|GMT|[+-][0-9]{2}:?(?:[0-9]{2})?)"
DATE_FORMS = re.compile(
    rf"([0-9]{{4}})-([0-9]{{1,2}})(?:-([0-9]{{1,2}})(?:{CLOCK})?(?:{ZONE})?)?"
    r"|([0-9]{4})([0-9]{2})([0-9]{2})"
)
ZONED = rf"^[0-9]{{4}}-[0-9]{{1,2}}-[0-9]{{1,2}}(?:{CLOCK})?{ZONE}$"  # texts that state a zone
# forms of serial numbers of spreadsheets -> the number of 1970-01-01
SERIALS = {"excel": 25569, "excel-1904": 24107}
SERIAL = re.compile(r"([0-9]{3,6})(?:\.[0-9]+)?")
# forms that an unknown one may have: orders of the letters of `strptime`, what separates them
ORDERS = ("dmy", "mdy", "ymd", "ydm")
GAPS = ("{}-{}-{}", "{}/{}/{}", "{}.{}.{}", "{} {} {}", "{}{}{}", "{} {}, {}")
TIME_OF_DAY = re.compile(r"[ T:][0-9]{1,2}:[0-9].*")
CLOCK_FORMS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
TIME_FORMS = tuple(map("".join, itertools.product((" ", "T", ":"), CLOCK_FORMS, ("", "%z", " %z"))))
EARLIEST, LATEST = date.min.toordinal() - EPOCH, date.max.toordinal() - EPOCH  # what a date can be
# days that a form may read for it to be suggested
PLAUSIBLE = range(date(1800, 1, 1).toordinal() - EPOCH, date(2100, 1, 1).toordinal() - EPOCH)


def to_day(when: date) -> int:
    """The day of a calendar date."""
    return when.toordinal() - EPOCH


@lru_cache(1 << 15)
def parse_day(text: str | None, form: str | None = None, near: int | None = None) -> int | None:
    """The day of a text; None where it is not a date.

    Args:
        text: `YYYY-MM-DD` or `YYYY-MM` (day 1; month and day may have one digit), or `YYYYMMDD`.
            After the first a time of day and a zone may follow. They are left out: the date is that
            of the clock that wrote it.
        form: a `strptime` format that the trimmed text has instead, or a key of `SERIALS`.
        near: a year; a two-digit year of `form` takes the century that brings it nearest to it.
    """
    if text is None:
        return None
    try:
        if form is None:
            return _parse_iso_day(text.strip())
        if form in SERIALS:
            serial = SERIAL.fullmatch(text.strip())
            return int(serial[1]) - SERIALS[form] if serial else None
        when = datetime.strptime(text.strip(), form).date()
        if near is not None and "%y" in form:
            when = when.replace(year=near + (when.year - near + 50) % 100 - 50)
        return to_day(when)
    except ValueError:
        return None


def _parse_iso_day(text: str) -> int | None:
    """Raises ValueError for a date that is in no calendar."""
    match = DATE_FORMS.fullmatch(text)
    if match is None:
        return None
    year, month, day = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
    return to_day(date(int(year), int(month), int(day or 1)))


def suggest_forms(texts: Sequence[str]) -> list[str]:
    """The forms of `parse_day` that read the most of some texts, the most likely one first.

    [] where no form reads more than half of them.
    """
    plain = [text.strip() for text in texts]
    if 2 * sum(map(_is_serial_number, plain)) > len(plain):
        return list(SERIALS)
    without_time = [TIME_OF_DAY.sub("", text) for text in plain]
    date_forms = _choose_forms(_iter_date_forms(), without_time)
    return _choose_forms(map("".join, itertools.product(date_forms, ("", *TIME_FORMS))), plain)


def _is_serial_number(text: str) -> bool:
    """Whether a text may be the number by which a spreadsheet holds a day up to 2099."""
    is_number = SERIAL.fullmatch(text) is not None and text[0] != "0"
    return is_number and float(text) < SERIALS["excel"] + PLAUSIBLE.stop


def _iter_date_forms() -> Iterator[str]:
    """`strptime` formats of dates without a time; a month in letters may be short or long."""
    for order, gaps, month, year in itertools.product(ORDERS, GAPS, "mbB", "yY"):
        letters = order.replace("m", month).replace("y", year)
        yield gaps.format(*(f"%{letter}" for letter in letters))


def _choose_forms(forms: Iterable[str], texts: Sequence[str]) -> list[str]:
    """The formats that read a plausible day from most of the texts, and from more than half."""
    counts = {}
    for form in forms:
        days = [parse_day(text, form) for text in texts]
        counts[form] = sum(day is not None and day in PLAUSIBLE for day in days)
    most = max(counts.values(), default=0)
    return [form for form, n in counts.items() if n == most] if 2 * most > len(texts) else []


def parse_days(texts: pl.Series) -> pl.Series:
    """The days of a column of texts or dates, Int32; null where there is none.

    Raises ValueError for a column of another type: numbers are not read as dates.
    """
    if texts.dtype == pl.Date:
        return texts.to_physical()
    if texts.dtype == pl.Null:
        return texts.cast(pl.Int32)
    if not isinstance(texts.dtype, pl.String | pl.Categorical):
        raise ValueError(f"column {texts.name!r} is {texts.dtype}, expected text or dates")  # noqa: TRY004
    return map_texts(texts, parse_day, pl.Int32)


def read_minutes(text: pl.Expr) -> pl.Expr:
    """The minute of the day of ISO texts with a time, Int16; 0 without one."""
    hour, minute = (
        text.str.extract(r"^[0-9-]+[T ] ?([0-9]{2}):([0-9]{2})", group).cast(pl.Int16).fill_null(0)
        for group in (1, 2)
    )
    return hour.clip(0, 23) * 60 + minute.clip(0, 59)


def format_day(day: int) -> str:
    """`YYYY-MM-DD`."""
    return date.fromordinal(day + EPOCH).isoformat()


def get_year(day: int) -> int:
    """The calendar year of a day."""
    return date.fromordinal(day + EPOCH).year


def find_birthday(birth: int, years: int) -> int:
    """The day on which a subject born on day `birth` has completed `years` years.

    It is 1 March in common years for 29 February.
    """
    born = date.fromordinal(birth + EPOCH)
    if born.year + years > date.max.year:
        return LATEST
    try:
        return to_day(born.replace(year=born.year + years))
    except ValueError:
        return to_day(date(born.year + years, 3, 1))


def to_calendar_months(days: NDArray[np.integer]) -> NDArray[np.int64]:
    """Calendar months since January 1970 of some days."""
    return days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)


def to_age_months(since_birth: NDArray[np.integer]) -> NDArray[np.int64]:
    """Days since birth / 30, rounded half to even: 105 -> 4, 135 -> 4, 136 -> 5."""
    return np.rint(since_birth / AGE_MONTH).astype(np.int64)


def to_completed_months(since_birth: NDArray[np.integer]) -> NDArray[np.int64]:
    """Days since birth / 30.4375, rounded down, in integers."""
    return since_birth.astype(np.int64) * 16 // 487
