"""Days as integers: 1970-01-01 is day 0 (int32), so that no engine does date arithmetic. Each distinct text is read once."""

from __future__ import annotations

import re
from datetime import date, datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

EPOCH = date(1970, 1, 1).toordinal()
MONTH = 30.4375  # days: 365.25 / 12 = 487 / 16
AGE_MONTH = 30  # days of the "age months" of the released code
CLOCK = r"[T ] ?[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?"
ZONE = r" ?(?:Z|UTC|GMT|[+-][0-9]{2}:?(?:[0-9]{2})?)"
DATE_FORMS = re.compile(rf"([0-9]{{4}})-([0-9]{{1,2}})(?:-([0-9]{{1,2}})(?:{CLOCK})?(?:{ZONE})?)?|([0-9]{{4}})([0-9]{{2}})([0-9]{{2}})")
ZONED = rf"^[0-9]{{4}}-[0-9]{{1,2}}-[0-9]{{1,2}}(?:{CLOCK})?{ZONE}$"  # texts that state a zone
EARLIEST, LATEST = date.min.toordinal() - EPOCH, date.max.toordinal() - EPOCH  # what a date can be


def to_day(when: date) -> int:
    """The day of a calendar date."""
    return when.toordinal() - EPOCH


def parse_day(text: str | None, form: str | None = None, near: int | None = None) -> int | None:
    """The day of a text, None where it is not a date.

    Args:
        text: `YYYY-MM-DD` or `YYYY-MM` (day 1; month and day may have one digit), or `YYYYMMDD`; a time of day and a zone after the first do
            not count: the date is that of the clock that wrote it.
        form: a `strptime` format that the trimmed text has instead.
        near: a year; a two-digit year of `form` takes the century that brings it nearest to it.
    """
    if text is None:
        return None
    try:
        if form is None:
            found = DATE_FORMS.fullmatch(text.strip())
            if found is None:
                return None
            year, month, day = found.group(1, 2, 3) if found[1] else found.group(4, 5, 6)
            return to_day(date(int(year), int(month), int(day or 1)))
        when = datetime.strptime(text.strip(), form).date()
        if near is not None and "%y" in form:
            when = when.replace(year=near + (when.year - near + 50) % 100 - 50)
        return to_day(when)
    except ValueError:
        return None


def parse_days(texts: pl.Series, form: str | None = None) -> pl.Series:
    """The days of a column of texts or dates, Int32; null where there is none.

    Raises ValueError: for a column of another type: numbers are not read as dates.
    """
    if texts.dtype not in (pl.String, pl.Date, pl.Null):
        raise ValueError(f"column {texts.name!r} is {texts.dtype}, expected text or dates")
    if texts.dtype == pl.Date:
        return texts.to_physical()
    if texts.is_empty() or texts.dtype == pl.Null:
        return texts.cast(pl.Int32)
    distinct = texts.unique()
    known = pl.Series([parse_day(text, form) for text in distinct], dtype=pl.Int32)
    return texts.replace_strict(distinct, known, return_dtype=pl.Int32)


def format_day(day: int) -> str:
    """`YYYY-MM-DD`."""
    return date.fromordinal(day + EPOCH).isoformat()


def find_birthday(birth: int, years: int) -> int:
    """The day on which a subject born on day `birth` has completed `years` years; 1 March in common years for 29 February."""
    born = date.fromordinal(birth + EPOCH)
    if born.year + years > date.max.year:
        return LATEST
    try:
        return to_day(born.replace(year=born.year + years))
    except ValueError:
        return to_day(date(born.year + years, 3, 1))


def to_calendar_months(of: NDArray[np.integer]) -> NDArray[np.int64]:
    """Calendar months since January 1970 of some days."""
    return of.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)


def to_age_months(since_birth: NDArray[np.integer]) -> NDArray[np.int64]:
    """Days since birth / 30, rounded half to even: 105 -> 4, 135 -> 4, 136 -> 5. Halves are exact in binary."""
    return np.rint(since_birth / AGE_MONTH).astype(np.int64)


def to_completed_months(since_birth: NDArray[np.integer]) -> NDArray[np.int64]:
    """Days since birth / 30.4375, rounded down, in integers."""
    return since_birth.astype(np.int64) * 16 // 487
