"""Reads tables of enrolment by month: with a row a person and month, or with a row a person and
year and a column for each of its months.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.columns import warn_of_rows
from bitimely_core.claims.sources.date_parts import find_date_parts
from bitimely_core.errors import Finding, Reason, safe_text

PARTS = words.WORDS["date_parts"]
NUMBERED = re.compile(r"(.*?[^\d])0*(\d{1,2})")  # enrolled_01, ENRIND12
MONTHS_OF_YEAR = range(1, 13)
YEAR_AND_MONTH = r"^\s*(\d{4})(?:\.0)?\D?(\d{1,2})"
NOT_ENROLLED = {"", *words.WORDS["vital"]["no"], "00", "0.0"}


class MonthColumns(NamedTuple):
    """Where a table has the months of enrolment."""

    # of year and month, together or apart; of the year alone beside `months`
    dates: tuple[str, ...]
    months: tuple[str, ...] = ()  # columns of the twelve months
    flag: str = ""  # of months in which nobody was enrolled

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.dates, *self.months, *filter(None, [self.flag]))


def find_month_columns(names: Sequence[str]) -> MonthColumns | None:
    """The columns of months of a table of enrolment; None where it has none."""
    years = [name for name in names if _has_part(name, "year")]
    months = _find_numbered(names)
    if years and months:
        return MonthColumns(tuple(years[:1]), months)
    dates = find_date_parts(names) or _find_dated_months(names)
    flags = [name for name in words.find_lookalikes("obs_start", names) if name not in dates]
    return MonthColumns(dates, flag=next(iter(flags), "")) if dates else None


def _find_dated_months(names: Sequence[str]) -> tuple[str, ...]:
    """The first column of months with their years, () without one."""
    dated = [name for name in names if _has_part(name, "month") or _is_year_and_month(name)]
    return tuple(dated[:1])


def _has_part(name: str, part: str) -> bool:
    return not {text.lower() for text in words.NAME_PARTS.split(name)}.isdisjoint(PARTS[part])


def _is_year_and_month(name: str) -> bool:
    return words.fold_name(name).endswith(("yyyymm", "yearmonth", "ym"))


def _find_numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Twelve columns that are called alike but for the number of the month."""
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            groups.setdefault(match[1], {})[int(match[2])] = name
    years = (tuple(map(group.get, MONTHS_OF_YEAR)) for group in groups.values())
    return next((tuple(map(str, year)) for year in years if all(year)), ())


def read_months(frame: pl.DataFrame, columns: MonthColumns) -> pl.DataFrame:
    """First and last day of each month in which a subject was enrolled, as text: row, subject,
    obs_start, obs_end; null where it cannot be read.
    """
    if columns.months:
        frame = frame.unpivot(
            columns.months,
            index=["row", "subject", *columns.dates],
            variable_name="month",
            value_name="flag",
        )
        numbers = {name: str(number) for number, name in enumerate(columns.months, 1)}
        frame = frame.with_columns(month=pl.col("month").replace(numbers))
    elif columns.flag:
        frame = frame.rename({columns.flag: "flag"})
    if "flag" in frame.columns:
        flag = pl.col("flag").fill_null("").str.strip_chars().str.to_lowercase()
        frame = frame.filter(~flag.is_in(list(NOT_ENROLLED)))
    parts = [*columns.dates, *["month"] * bool(columns.months)]
    texts = (pl.col(name).str.strip_chars().str.replace(r"\.0+$", "") for name in parts)
    written = pl.concat_str(*texts, separator="-")
    year, month = (written.str.extract(YEAR_AND_MONTH, i).cast(pl.Int32) for i in (1, 2))
    start = pl.when(month.is_in(list(MONTHS_OF_YEAR))).then(pl.date(year, month, 1))
    return frame.select(
        "row",
        "subject",
        obs_start=start.cast(pl.String),
        obs_end=start.dt.month_end().cast(pl.String),
    )


def report_months(path: str, columns: MonthColumns, months: pl.DataFrame) -> list[Finding]:
    """A line on what is read as months of enrolment, and a warning of what is none."""
    names = safe_text(columns.dates[-1]) if not columns.months else "a column for each"
    flagged = f" where {safe_text(columns.flag)} is not 0" if columns.flag else ""
    text = f"months of enrolment are read from {names}{flagged}"
    rule = "each is observed from its first to its last day"
    problem = "rows state no year and month"
    return [
        Finding(Reason.HEADER, text, rule, level="info", file=path),
        *warn_of_rows(
            months["obs_start"].null_count(),
            Reason.METADATA,
            problem,
            "they are left out: known are 2015-03, 201503, or 2015 and 3 in columns year and month",
            file=path,
        ),
    ]
