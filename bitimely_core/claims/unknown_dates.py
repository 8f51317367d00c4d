"""Finds texts and days that stand for an unknown date: words of programs, and special days.

On a special day nothing happened: it is a code of UK Biobank, the first or last day of a
calendar, or a day far from all others on which many rows lie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import date
from typing import NamedTuple

import numpy as np
import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.distinct import count_integers, map_texts

MISSING = re.compile(
    r"|\.[a-z_]?|na|n/a|nan|nat|<na>|null|none|nil|\\n|-|--|\?|unk|unknown|missing|alive"
    r"|(0000|9999)-(00|99)-(00|99).*|0{8}|9{8}|(00|99)([/.-])(00|99)\5(0000|9999|00|99)",
    re.IGNORECASE,
)
DEFAULTS = frozenset(
    dates.to_day(date.fromisoformat(text))
    for text in (
        "0001-01-01",
        "1111-11-11",
        "1582-10-14",
        "1582-10-15",
        "1600-01-01",
        "1601-01-01",
        "1700-01-01",
        "1753-01-01",
        "1800-01-01",
        "1840-12-31",
        "1841-01-01",
        "1899-12-30",
        "1899-12-31",
        "1900-01-01",
        "1901-01-01",
        "1902-02-02",
        "1903-03-03",
        "1909-09-09",
        "2037-07-07",
        "2079-06-06",
        "2999-12-31",
        "3000-01-01",
        "3000-12-31",
        "4000-01-01",
        "7777-07-07",
        "8888-08-08",
        "9999-01-01",
        "9999-09-09",
        "9999-12-31",
    )
)
FAR = 5 * 365  # days from nearly all others
VERY_FAR = 10 * 365
PILED_SHARE, PILED_ROWS = 0.01, 11
EDGE = 0.02  # share of the rows at each end that may lie anywhere


class DateSpan(NamedTuple):
    """The first and last day between which nearly all dates of a column lie."""

    first: int
    last: int

    def measure(self, day: int) -> int:
        """How far a day lies from the span, in days."""
        return max(self.first - day, day - self.last, 0)


def find_span(counts: Mapping[int, int]) -> DateSpan | None:
    """The span of days but for `EDGE` of the rows at each end; None where there are none.

    `counts`: day -> rows. Days of `DEFAULTS` do not count.
    """
    days = np.array(sorted(set(counts) - DEFAULTS), np.int64)
    if not len(days):
        return None
    rows = np.cumsum([counts[int(day)] for day in days])
    first, last = np.searchsorted(rows, (EDGE * rows[-1], (1 - EDGE) * rows[-1]))
    return DateSpan(int(days[first]), int(days[last]))


def find_unknown_days(counts: Mapping[int, int]) -> frozenset[int]:
    """The days that stand for an unknown date in a column: defaults of programs that lie far from
    the other dates, and days alone and very far from them with many rows.

    `counts`: day -> rows.
    """
    span = find_span(counts)
    if span is None:
        return DEFAULTS
    least = max(PILED_ROWS, PILED_SHARE * sum(counts.values()))
    piled = {day for day, n in counts.items() if n >= least and _stands_alone(day, counts)}
    return frozenset(day for day in DEFAULTS if span.measure(day) > FAR) | piled


def _stands_alone(day: int, counts: Mapping[int, int]) -> bool:
    """Whether a day is very far from nearly all others, with none in the year around it."""
    others = {other: n for other, n in counts.items() if other != day}
    span = find_span(others)
    is_far = span is not None and span.measure(day) > VERY_FAR
    return is_far and not any(abs(day - other) < 365 for other in others)


def count_days(texts: pl.Series) -> Counter[int]:
    """Rows by day of a column of dates."""
    return Counter(count_integers(dates.parse_days(texts).drop_nulls()))


def blank_dates(texts: pl.Series, unknown: Collection[int]) -> pl.Series:
    """A column of dates as text without words for a missing one, and without some days."""

    def blank(text: str | None) -> str | None:
        is_blank = text is None or MISSING.fullmatch(text.strip())
        return None if is_blank or dates.parse_day(text) in unknown else text

    return map_texts(texts, blank, pl.String)


def describe_days(days: Collection[int]) -> str:
    """Some days that are of nobody, for a message."""
    texts = list(map(dates.format_day, sorted(days)[:5]))
    return ", ".join(texts) + (" ..." if len(days) > len(texts) else "")
