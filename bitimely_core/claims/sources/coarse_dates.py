"""Completes dates of subjects that state a year, a quarter or a month alone."""

from __future__ import annotations

from itertools import filterfalse

import polars as pl

from bitimely_core.claims import dates, unknown_dates
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.sources.columns import END_COLUMNS, warn_of_rows
from bitimely_core.errors import Finding, Place, Reason

YEAR = r"^\s*(\d{4})(?:\.0)?\s*$"
NO_MONTH = r"^\s*([1-9]\d{3})(?:-00-00\b|0000\s*$)"  # MySQL: 1950-00-00
# column -> day of a year without one, and what is said of it
COMPLETED = {
    "birth": ("-07-01", "1 July is taken"),
    "death": ("-12-31", "31 December is taken, so that no claim of the year comes after it"),
    "obs_start": ("-01-01", "1 January is taken"),
    "obs_end": ("-12-31", "31 December is taken"),
}


def holds_years(texts: pl.Series) -> bool:
    """Whether a column of dates of subjects holds years alone."""
    written = [text.strip() for text in texts.drop_nulls().unique()]
    years = list(filterfalse(unknown_dates.MISSING.fullmatch, written))
    return bool(years) and all(map(dates.is_year, years))


def complete_dates(
    texts: pl.Series, name: str, form: str, file: str
) -> tuple[pl.Series, list[Finding]]:
    """A column of dates of subjects with a day where only a year, or of an end only a month or
    quarter, is stated, and warnings of them. `form`: of texts that are not ISO; "" for none.
    """
    place: Place = {"file": file, "field": name}
    years = texts.cast(pl.String).str.extract(YEAR if holds_years(texts) else NO_MONTH)
    findings = []
    if years.count():
        day, why = COMPLETED[name]
        numbers = years.drop_nulls().cast(pl.Int32).sort() // 10 * 10
        rule = f"{why} (found {numbers[0]} to {numbers[-1] + 9})"
        problem = f"rows state only the year of {name}"
        findings = warn_of_rows(years.count(), Reason.METADATA, problem, rule, **place)
        texts = (years + day).fill_null(texts)
    if name not in END_COLUMNS:
        return texts, findings
    ended = map_texts(texts, lambda text: dates.end_period(text, form), pl.String)
    completed = int(ended.ne_missing(texts.cast(pl.String)).sum())
    problem = f"rows state only the month or quarter of {name}"
    rule = "its last day is taken, so that no claim of it comes after it"
    return ended, findings + warn_of_rows(completed, Reason.METADATA, problem, rule, **place)
