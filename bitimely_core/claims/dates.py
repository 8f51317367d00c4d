"""Days as integers: 1970-01-01 is day 0 (int32), so that no date arithmetic is needed. Each
distinct text is read once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
    rf"([0-9]{{4}})-([0-9]{{1,2}})(?:-([0-9]{{1,2}})(?:{CLOCK})?(?:{ZONE})?)?|([0-9]{{4}})([0-9]{{2}})([0-9]{{2}})"
)
ZONED = rf"^[0-9]{{4}}-[0-9]{{1,2}}-[0-9]{{1,2}}(?:{CLOCK})?{ZONE}$"  # texts that state a zone
# forms of serial numbers of spreadsheets -> the number of 1970-01-01
SERIALS = {"excel": 25569, "excel-1904": 24107}
SERIAL = re.compile(r"([0-9]{3,6})(?:\.[0-9]+)?")
PARTS = re.compile(
    r"([0-9]{1,4}|[A-Za-z]+)([-/. ]?)([0-9]{1,2}|[A-Za-z]+)([-/. ]?|, )([0-9]{4}|[0-9]{1,2})(\D.*)?"
)
TIMES = (
    "",
    *(
        f"{gap}{clock}"
        for gap in (" ", "T", ":")
        for clock in ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
    ),
)
ZONES = ("", "%z", " %z")
EARLIEST, LATEST = date.min.toordinal() - EPOCH, date.max.toordinal() - EPOCH  # what a date can be


def to_day(when: date) -> int:
    """The day of a calendar date."""
    return when.toordinal() - EPOCH


@lru_cache(1 << 15)
def parse_day(text: str | None, form: str | None = None, near: int | None = None) -> int | None:
    """The day of a text, None where it is not a date.

    Args:
        text: `YYYY-MM-DD` or `YYYY-MM` (day 1; month and day may have one digit), or `YYYYMMDD`; a
            time of day and a zone after the first do not count: the date is that of the clock that
            wrote it.
        form: a `strptime` format that the trimmed text has instead, or a key of `SERIALS`.
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
        if form in SERIALS:
            serial = SERIAL.fullmatch(text.strip())
            return int(serial[1]) - SERIALS[form] if serial else None
        when = datetime.strptime(text.strip(), form).date()
        if near is not None and "%y" in form:
            when = when.replace(year=near + (when.year - near + 50) % 100 - 50)
        return to_day(when)
    except ValueError:
        return None


def suggest_forms(texts: Sequence[str]) -> list[str]:
    """The forms of `parse_day`, most likely first, that read most of some texts and no fewer than
    any other form does; [] where none reads half.
    """
    plain = [text.strip() for text in texts]
    # to 2099
    if sum(
        SERIAL.fullmatch(text) is not None and text[0] != "0" and float(text) < 73051
        for text in plain
    ) * 2 > len(plain):
        return list(SERIALS)
    counts = Counter(
        form
        for text in plain
        for form in dict.fromkeys(_list_forms(text))
        if (day := parse_day(text, form)) is not None and 1800 <= get_year(day) < 2100
    )
    most = max(counts.values(), default=0)
    return [form for form, n in counts.items() if n == most] if 2 * most > len(plain) else []


def _list_forms(text: str) -> Iterator[str]:
    """`strptime` formats that a text might have."""
    if re.fullmatch(r"[0-9]{6}|[0-9]{8}", text):
        yield from ("%d%m%y", "%m%d%y", "%y%m%d") if len(text) == 6 else ("%d%m%Y", "%m%d%Y")
    if (found := PARTS.fullmatch(text)) is None:
        return
    one, gap, two, second, three, rest = found.groups()
    for order in ("dmy", "mdy", "ymd", "ydm"):
        words = dict(zip(order, (one, two, three), strict=True))
        if not (words["d"].isdigit() and words["y"].isdigit() and len(words["y"]) in (2, 4)):
            continue
        marks = {"d": "%d", "m": "%m", "y": "%Y" if len(words["y"]) == 4 else "%y"}
        for month in ("%m",) if words["m"].isdigit() else ("%b", "%B"):
            stem = (
                gap.join((marks | {"m": month})[key] for key in order[:2])
                + second
                + (marks | {"m": month})[order[2]]
            )
            yield from (
                f"{stem}{clock}{zone}"
                for clock in TIMES
                for zone in (ZONES if clock else ZONES[:1])
                if bool(rest) == bool(clock)
            )


def parse_days(texts: pl.Series) -> pl.Series:
    """The days of a column of texts or dates, Int32; null where there is none.

    Raises ValueError: for a column of another type: numbers are not read as dates.
    """
    if texts.dtype not in (pl.String, pl.Date, pl.Null) and not isinstance(
        texts.dtype, pl.Categorical
    ):
        raise ValueError(f"column {texts.name!r} is {texts.dtype}, expected text or dates")
    if texts.dtype == pl.Date:
        return texts.to_physical()
    if texts.is_empty() or texts.dtype == pl.Null:
        return texts.cast(pl.Int32)
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
    """The day on which a subject born on day `birth` has completed `years` years; 1 March in common
    years for 29 February.
    """
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
    """Days since birth / 30, rounded half to even: 105 -> 4, 135 -> 4, 136 -> 5. Halves are exact
    in binary.
    """
    return np.rint(since_birth / AGE_MONTH).astype(np.int64)


def to_completed_months(since_birth: NDArray[np.integer]) -> NDArray[np.int64]:
    """Days since birth / 30.4375, rounded down, in integers."""
    return since_birth.astype(np.int64) * 16 // 487
