"""Finds the date of a table of claims that has it in parts: columns of the year and of the month
and day, or of the quarter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import polars as pl

from bitimely_core.claims.sources import words
from bitimely_core.errors import Finding, Reason, input_warning, safe_text
from bitimely_core.types import find_only

PARTS = words.WORDS["date_parts"]
# words of facts of subjects, whose dates are not those of claims
FACTS = re.compile("|".join(words.WORDS["looks"]["birth"] + words.WORDS["looks"]["death"]))
SPLITS = (("year", "month", "day"), ("year", "month"), ("year", "quarter"))  # the most exact first


def is_quarter(name: str) -> bool:
    """Whether a column holds quarters, with or without their years, by its name."""
    return words.fold_name(name).endswith(tuple(PARTS["quarter"]))


def find_date_parts(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of the parts of a date, called alike but for the words of the parts: year, month,
    day; admit_year, admit_month. () where there are none or several.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for name, part in itertools.product(names, PARTS):
        texts = [text.lower() for text in words.NAME_PARTS.split(name) if text]
        common = tuple(text for text in texts if text not in PARTS[part])
        if len(common) == len(texts) - 1 and not any(map(FACTS.match, common)):
            groups.setdefault(common, {}).setdefault(part, name)
    splits = [_choose_split(parts) for parts in groups.values()]
    dates = list(filter(None, splits))
    return find_only(dates, ())


def _choose_split(parts: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of the most exact date of parts (part -> column), () for none."""
    split = next((split for split in SPLITS if parts.keys() >= set(split)), ())
    return tuple(parts[part] for part in split)


def join_date_parts(events: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The events with `date`, of the year in it and of the other parts, as YYYY-MM-DD or YYYYQ1."""
    mark = "Q" if is_quarter(columns[-1]) else "-"
    texts = [pl.col("date"), *map(pl.col, columns[1:])]
    whole = [text.cast(pl.String).str.strip_chars().str.replace(r"\.0+$", "") for text in texts]
    return events.with_columns(date=pl.concat_str(whole, separator=mark)).drop(columns[1:])


def report_date_parts(file: str, columns: Sequence[str]) -> list[Finding]:
    """A warning that dates are in several columns."""
    if not columns:
        return []
    problem = f"the date is read from {', '.join(map(safe_text, columns))}"
    rule = (
        "" if len(columns) == len(SPLITS[0]) else "the first day of the month or quarter is taken"
    )
    hint = "Choose another with --col date=NAME"
    return [input_warning(Reason.HEADER, problem, rule, hint, file=file, row=1)]
