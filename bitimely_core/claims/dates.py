"""Reads dates as days: integers (int32) that count from 1970-01-01, which is day 0.

Integers need no date arithmetic. Of a column, each distinct text is read once.
"""

from __future__ import annotations

import calendar
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from unicodedata import normalize

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.claims.distinct import map_texts
from bitimely_core.types import drop_none

EPOCH = date(1970, 1, 1).toordinal()
AGE_MONTH = 30  # days of the "age months" of the released code
CLOCK = r"[T ] ?[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?"
ZONE = r" ?(?:Z|[A-Z]{3,4}|[A-Z][A-Za-z]+/[A-Z][A-Za-z_]+|[+-][0-9]{2}:?(?:[0-9]{2})?)"
DATE_FORMS = re.compile(
    rf"([0-9]{{4}})-([0-9]{{1,2}})(?:-([0-9]{{1,2}})(?:{CLOCK})?(?:{ZONE})?)?"
    # eight digits, as a number with a fraction of 0, or with a time of day: 20050909143000
    r"|([0-9]{4})([0-9]{2})([0-9]{2})(?:\.0+|T?(?:[01][0-9]|2[0-3])(?:[0-5][0-9]){2}Z?)?"
)
MONTH_TEXT = re.compile(r"[0-9]{4}-[0-9]{1,2}(-00?)?")
MONTH_FORM = re.compile(r"yyyymm|(?!.*%[djuUVW])(?=.*%[mbB]).*")  # a form without a day
ZONED = rf"^[0-9]{{4}}-[0-9]{{1,2}}-[0-9]{{1,2}}(?:{CLOCK})?{ZONE}$"  # texts that state a zone
# forms of numbers -> the days from their first day to 1970-01-01. They count days, or seconds or
# parts of them where that is a day of people
EPOCHS = {"excel": 25569, "excel-1904": 24107, "sas": 3653, "stata": 3653, "unix": 0, "r": 0}
SERIALS = ("excel", "excel-1904")  # of spreadsheets: days only
# of a day: in days, seconds, milli-, micro- and nanoseconds
TICKS = (1, 86_400, 86_400_000, 86_400_000_000, 86_400_000_000_000)
DAYS_BELOW, SECONDS_ABOVE = 100_000, 100_000_000  # between: days of 2229 on, seconds of three years
YEAR, YEAR_MONTH = "year", "yyyymm"  # forms: a year stands for its 1 July, a month for its first
ROC = "roc"  # form: years of the Republic of China (Taiwan), as 0940123, 94/1/23
WAREKI = "wareki"  # form: years of eras of Japan, as 令和3年5月12日, R3/05/12, 5030512, H30.4
# form: a quarter stands for its first day, of an end for its last
QUARTER = "quarter"  # as 20153, 3/2015, 2015Q3
NUMBER_FORMS = (*EPOCHS, YEAR, YEAR_MONTH, ROC, WAREKI, QUARTER)
QUARTER_TEXT = re.compile(
    r"([0-9]{4})[-/. ]?(?:[QTqt]\.?)?([1-4])(?:\.0)?"
    # 12005 is a number of days
    r"|(?:[QTqt]\.?|(?=[1-4][-/. ]))([1-4])[-/. ]?([0-9]{4})"
)
QUARTER_WITH_LETTERS = re.compile(rf"^(?=.*[QTqt])(?:{QUARTER_TEXT.pattern})$")
ALIASES = {"stata": "sas", "r": "unix"}  # forms that read the same, of which one is advised
ROC_YEARS = 1911  # before the first of them
ROC_DATE = re.compile(r"([0-9]{2,3})([./-]?)([0-9]{2}|(?<=[./-])[0-9])\2([0-9]{2}|(?<=[./-])[0-9])")
# years before the first of the eras of Japan, which have a name, a letter and a number
BEFORE_ERAS = (1867, 1911, 1925, 1988, 2018)
ERAS = {
    **dict(zip(("明治", "大正", "昭和", "平成", "令和"), BEFORE_ERAS, strict=True)),
    **dict(zip("MTSHR", BEFORE_ERAS, strict=True)),
    **dict(zip("12345", BEFORE_ERAS, strict=True)),
}
WAREKI_DATE = re.compile(
    r"(明治|大正|昭和|平成|令和|[MTSHR]|[1-5](?=\d{4}(?:\d\d)?$))\.?\s*(元|\d{1,2})\s*[年./-]?"
    r"\s*(\d{1,2})\s*[月./-]?\s*(\d{0,2})\s*日?",
    re.ASCII | re.IGNORECASE,
)
NUMBER = re.compile(r"(-?[0-9]{1,19})(?:\.[0-9]+)?")
# forms that an unknown one may have: orders of the letters of `strptime`, what separates them
ORDERS = ("dmy", "mdy", "ymd", "ydm")
GAPS = (
    "{}-{}-{}",
    "{}/{}/{}",
    "{}.{}.{}",
    "{} {} {}",
    "{}{}{}",
    "{} {}, {}",
    "{}. {}. {}.",
    "{}. {}. {}",
)
# a form in which nothing parts day, month and year
NO_GAP = re.compile(r"(%[dmyY]){3}|%[yY]%j")
DIGITS = {"Y": 4, "j": 3}  # of a letter of such a form; others have two
# with letters behind the numbers, of days of the year, and of months
SHORT_FORMS = (
    "%Y年%m月%d日",
    "%Y년%m월%d일",
    "%Y년 %m월 %d일",
    "%Y%j",
    "%Y-%j",
    "%y%j",
    "%G-W%V-%u",
    "%m/%Y",
    "%m.%Y",
    "%m-%Y",
    "%m%Y",
    "%Y/%m",
    "%Y.%m",
    "%b-%Y",
    "%b %Y",
)
# how the months of Western languages begin, without accents, beside the English ones
MONTH_WORDS = (
    "jan ene gen",
    "feb fev",
    "mar maer mrz maa mrt",
    "apr avr abr",
    "may mai mei mag",
    "jun juin giu",
    "jul juil lug",
    "aug aou ago",
    "sep set",
    "oct okt ott out",
    "nov",
    "dec dez dic",
)
MONTH_OF = {word: month for month, words in enumerate(MONTH_WORDS, 1) for word in words.split()}
LETTERS = re.compile(r"[^\W\d_]{3,}\.?")
TIME_OF_DAY = re.compile(r"[ T:][0-9]{1,2}(?::[0-9]|\.[0-9]{2}\.[0-9]{2}\b).*")
CLOCK_FORMS = (
    "%H:%M",
    "%H:%M:%S",
    "%H:%M:%S.%f",
    "%I:%M %p",
    "%I:%M:%S %p",
    "%I.%M.%S %p",  # of Oracle
    "%I.%M.%S.%f %p",
)
NANOSECONDS = re.compile(r"(?<=\.[0-9]{6})[0-9]{3}\b")  # digits of a second that %f lacks
TIME_FORMS = tuple(map("".join, itertools.product((" ", "T", ":"), CLOCK_FORMS, ("", "%z", " %z"))))
EARLIEST, LATEST = date.min.toordinal() - EPOCH, date.max.toordinal() - EPOCH  # what a date can be
# days that a form may read for it to be suggested
PLAUSIBLE = range(date(1800, 1, 1).toordinal() - EPOCH, date(2100, 1, 1).toordinal() - EPOCH)
# days of no source, shifted ones included; those of the Buddhist calendar are
DISTANT = date(2400, 1, 1).toordinal() - EPOCH
FIRST_CLAIM, FIRST_BIRTH, LAST_YEAR = 1980, 1890, datetime.now(UTC).year


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
        form: a `strptime` format that the trimmed text has instead, or one of `NUMBER_FORMS`.
        near: a year; a two-digit year of `form` takes the century that brings it nearest to it.
    """
    if text is None:
        return None
    text = text if text.isascii() else normalize("NFKC", text)  # digits of full width
    try:
        if form is None:
            return _parse_iso_day(text.strip())
        if form in READERS:
            return READERS[form](text.strip())
        if form in NUMBER_FORMS:
            number = NUMBER.fullmatch(text.strip())
            if number is None or DATE_FORMS.fullmatch(text.strip()):
                return None  # eight digits are a date in any file
            return _parse_number(int(number[1]), form)
        plain = NANOSECONDS.sub("", text.strip())
        when = datetime.strptime(_translate_month(plain, form), form).date()
        if near is not None and "%y" in form:
            when = when.replace(year=near + (when.year - near + 50) % 100 - 50)
        return to_day(when)
    except (ValueError, OverflowError):
        return None


def _parse_iso_day(text: str) -> int | None:
    """Raises ValueError for a date that is in no calendar."""
    match = DATE_FORMS.fullmatch(text)
    if match is None:  # letters of a quarter mean nothing else
        return None if text.isdecimal() else _parse_quarter(text, letters=True)
    year, month, day = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
    return to_day(date(int(year), int(month), int(day or 1) or 1))


def _translate_month(text: str, form: str) -> str:
    """A text with the name of its month in English, where the form has one in letters."""
    letters = re.search("%[bB]", form)
    word = LETTERS.search(text)
    if letters is None or word is None:
        return text
    plain = "".join(c for c in normalize("NFKD", word[0].lower()) if c.isalpha())
    month = MONTH_OF.get(plain[:4], MONTH_OF.get(plain[:3]))
    names = calendar.month_name if letters[0] == "%B" else calendar.month_abbr
    return text[: word.start()] + names[month] + text[word.end() :] if month else text


def _parse_roc_day(text: str) -> int | None:
    """Raises ValueError: as `_parse_iso_day`."""
    match = ROC_DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day = map(int, match.group(1, 3, 4))
    return to_day(date(year + ROC_YEARS, month, day))


def _parse_wareki_day(text: str) -> int | None:
    """Raises ValueError: as `_parse_iso_day`. A month stands for its first day."""
    match = WAREKI_DATE.fullmatch(text)
    if match is None:
        return None
    era, year, month, day = match.groups()
    first = ERAS[era.upper()]
    return to_day(date(first + int(year.replace("元", "1")), int(month), max(1, int(f"0{day}"))))


def _parse_quarter(text: str, *, letters: bool = False) -> int | None:
    """`letters`: one of them says that it is a quarter."""
    match = QUARTER_TEXT.fullmatch(text)
    if match is None or (letters and not QUARTER_WITH_LETTERS.search(text)):
        return None
    year, quarter = match.group(1, 2) if match[1] else match.group(4, 3)
    return to_day(date(int(year), 3 * int(quarter) - 2, 1))


READERS = {
    ROC: _parse_roc_day,
    WAREKI: _parse_wareki_day,
    QUARTER: _parse_quarter,
}  # of forms of texts


def _parse_number(number: int, form: str) -> int | None:
    """The day of a number in one of `NUMBER_FORMS`. Raises ValueError: as `_parse_iso_day`."""
    if form == YEAR:
        return to_day(date(number, 7, 1))
    if form == YEAR_MONTH:
        return to_day(date(number // 100, number % 100, 1))
    for ticks in TICKS[: 1 if form in SERIALS else None]:
        day = number // ticks - EPOCHS[form]
        if day in PLAUSIBLE:
            return day
    return None


def is_year(text: str) -> bool:
    """Whether a text is a year in which a person of the data may be born."""
    return bool(re.fullmatch(r"[0-9]{4}(\.0)?", text)) and FIRST_BIRTH <= int(text[:4]) <= LAST_YEAR


def list_number_forms(texts: Sequence[str], days: range) -> dict[str, tuple[int, int]]:
    """The forms under which numbers are days of a range, each with its first and last year.

    Up to one number in twenty may be another day: a slip, or one that stands for an unknown date.
    Numbers that are too large for days, and of all dates as seconds too small, count neither.
    """
    numbers = [text.strip() for text in texts if NUMBER.fullmatch(text.strip())]
    forms = _list_possible_forms(numbers) if 2 * len(numbers) > len(texts) else ()
    read_as: dict[str, Sequence[str]] = {form: numbers for form in forms if form not in ALIASES}
    read_as |= dict.fromkeys(READERS, texts)
    years = {form: _find_years(written, form, days) for form, written in read_as.items()}
    # numbers that all end in 1 to 4 behind a year are no count of days
    if span := years[QUARTER]:
        return {QUARTER: span}
    return drop_none(years)


def _find_years(texts: Sequence[str], form: str, days: range) -> tuple[int, int] | None:
    """First and last year of texts in a form; None where more than one in twenty is no day of a
    range.
    """
    read = [parse_day(text, form) for text in texts]
    within = sorted(day for day in read if day is not None and day in days)
    if not within or len(within) < 0.95 * len(texts):
        return None
    return get_year(within[0]), get_year(within[-1])


def _list_possible_forms(numbers: Sequence[str]) -> tuple[str, ...]:
    """The forms of numbers without those that count, where these are too large or too small."""
    counts_none = all(DAYS_BELOW < abs(float(number)) < SECONDS_ABOVE for number in numbers)
    return (YEAR, YEAR_MONTH) if counts_none else NUMBER_FORMS


def suggest_forms(texts: Sequence[str]) -> list[str]:
    """The forms of `parse_day` that read the most of some texts, the most likely one first.

    [] where no form reads more than half of them.
    """
    plain = [text.strip() for text in texts]
    without_time = [TIME_OF_DAY.sub("", text) for text in plain]
    date_forms = _choose_forms(_iter_date_forms(), without_time)
    return _choose_forms(map("".join, itertools.product(date_forms, ("", *TIME_FORMS))), plain)


def _iter_date_forms() -> Iterator[str]:
    """`strptime` formats of dates without a time; %b reads short and long names of months."""
    yield from SHORT_FORMS
    for order, gaps, month, year in itertools.product(ORDERS, GAPS, "mb", "yY"):
        letters = order.replace("m", month).replace("y", year)
        yield gaps.format(*(f"%{letter}" for letter in letters))


def _choose_forms(forms: Iterable[str], texts: Sequence[str]) -> list[str]:
    """The formats that read a plausible day from most of the texts, and from more than half."""
    counts = {}
    for form in forms:
        days = [parse_day(text, form) for text in texts if _has_all_digits(text, form)]
        counts[form] = sum(day is not None and day in PLAUSIBLE for day in days)
    most = max(counts.values(), default=0)
    return [form for form, n in counts.items() if n == most] if 2 * most > len(texts) else []


def _has_all_digits(text: str, form: str) -> bool:
    """Whether a text has all digits of a form without marks between them: `strptime` reads
    2005252, the day 252 of a year, as 25 February too.
    """
    gapless = NO_GAP.match(form)
    if gapless is None:
        return True
    n_digits = sum(DIGITS.get(letter, 2) for letter in gapless[0][1::2])
    return re.match(rf"[0-9]{{{n_digits}}}", text) is not None


def get_plausible(name: str) -> range:
    """The days that a column of dates may hold: births from 1890 on, others from 1980, to now."""
    first = FIRST_BIRTH if name == "birth" else FIRST_CLAIM
    return range(to_day(date(first, 1, 1)), to_day(datetime.now(UTC).date()) + 2)


def end_period(text: str | None, form: str) -> str | None:
    """The last day of the month or quarter that a text states without a day, as YYYY-MM-DD; other
    texts unchanged. `form`: of texts that are not ISO; "" for none.
    """
    plain = (text or "").strip()
    day, months = None, 1
    if form == QUARTER or QUARTER_WITH_LETTERS.search(plain):
        day, months = parse_day(plain, QUARTER), 3
    elif MONTH_TEXT.fullmatch(plain):
        day = parse_day(plain)
    elif MONTH_FORM.fullmatch(form) or (form == WAREKI and _is_month_of_era(plain)):
        day = parse_day(plain, form)
    if day is None:
        return text
    first = date.fromordinal(day + EPOCH)
    month = first.month + months - 1
    return date(first.year, month, calendar.monthrange(first.year, month)[1]).isoformat()


def _is_month_of_era(text: str) -> bool:
    """Whether a text of the form `WAREKI` has no day."""
    match = WAREKI_DATE.fullmatch(normalize("NFKC", text))
    return match is not None and not int(f"0{match[4]}")


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
