"""Finds the columns of dates of a table that has one for each column of codes, as the arrays of UK
Biobank, and pairs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain

import polars as pl

from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.code_columns import find_field, list_numbers, match_pattern
from bitimely_core.claims.sources.columns import find_names
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.types import group_by

Pairs = Mapping[str, tuple[str, ...]]
"""Column of codes -> that of its dates; several where a cell of it holds a list of codes."""

DATE_NAMES = words.WORDS["claims"]["date"]
DATE_FIELDS = dict(words.WORDS["fields"].values())  # of UK Biobank: codes -> their dates
LAST_NUMBER = re.compile(r"\d+(?=\D*$)", re.ASCII)
LISTED_CODE = r"[0-9A-Za-z.]+"  # of a cell that holds a list: ['E119', 'I10']


def find_pairs(
    names: Sequence[str], codes: Sequence[str], stated: str | None
) -> dict[str, tuple[str, ...]]:
    """The columns of dates of columns of codes; {} where one date is that of all.

    `stated`: the column of dates by option. Raises UserError: config (exit 2) for a pattern whose
    columns cannot be paired, or one column of a series.
    """
    if stated is not None:
        if dates := match_pattern(names, stated, "date"):
            return _pair_columns(codes, dates)
        _refuse_one_of_series(names, codes, stated)
        return {}
    if find_names(names, DATE_NAMES):
        return {}
    return _pair_fields(names, codes) or _pair_series(names, codes)


def _pair_columns(codes: Sequence[str], dates: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The n-th column of codes with the n-th of dates, or the only one with all."""
    if len(codes) == len(dates):
        return {code: (date,) for code, date in zip(codes, dates, strict=True)}
    if len(codes) == 1:
        return {codes[0]: tuple(dates)}
    raise _refuse_columns(codes, dates)


def _refuse_columns(codes: Sequence[str], dates: Sequence[str]) -> UserError:
    return usage_error(
        f"{len(dates)} columns of dates and {len(codes)} columns of codes cannot be paired",
        f"dates are {_abridge(dates)}, codes are {_abridge(codes)}",
        "Name as many of dates as of codes, as --col 'date=41280-*' --col 'code=41270-*'",
        field="--col date",
    )


def _abridge(names: Sequence[str]) -> str:
    """The first and the last of some names."""
    return " to ".join(map(safe_text, dict.fromkeys((names[0], names[-1]))))


def _pair_fields(names: Sequence[str], codes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The arrays of UK Biobank, each with that of its dates."""
    pairs = dict[str, tuple[str, ...]]()
    for field, dated in DATE_FIELDS.items():
        arrays = [name for name in codes if find_field(name) == field]
        dates = sorted((name for name in names if find_field(name) == dated), key=list_numbers)
        if arrays and dates:
            pairs |= _pair_array(arrays, dates)
    return pairs


def _pair_array(codes: Sequence[str], dates: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The columns of one array of codes with the dates of the same numbers; a column that holds
    lists of codes has none, and all dates are its own.

    Raises UserError: config (exit 2) for codes whose numbers no date has.
    """
    date_of = {_find_place(name): name for name in dates}
    if all(_find_place(code) in date_of for code in codes):
        return {code: (date_of[_find_place(code)],) for code in codes}
    if len(codes) > 1:
        raise _refuse_columns(codes, dates)
    return {codes[0]: tuple(dates)}


def _find_place(name: str) -> tuple[int, ...]:
    """The numbers of a column of UK Biobank behind that of its field: instance and array."""
    return tuple(list_numbers(name)[1:])


def _pair_series(names: Sequence[str], codes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Columns that differ by a number, as many as there are of codes, and are called as dates."""
    alike = words.find_lookalikes("date", [name for name in names if name not in codes])
    series = [group for group in map(list, _group_series(alike)) if len(group) == len(codes) > 1]
    return _pair_columns(codes, series[0]) if len(series) == 1 else {}


def _group_series(names: Sequence[str]) -> list[list[str]]:
    """Names that differ by their last number alone, in the order of their numbers."""
    ordered = sorted(names, key=list_numbers)
    return list(group_by(ordered, lambda name: LAST_NUMBER.sub("", name)).values())


def _refuse_one_of_series(names: Sequence[str], codes: Sequence[str], stated: str) -> None:
    """Raises UserError (config, exit 2) for one date of as many as there are columns of codes."""
    group = next((group for group in _group_series(names) if stated in group), [])
    if len(group) != len(codes) or len(codes) < 2:
        return
    pattern = LAST_NUMBER.sub("*", stated)
    raise usage_error(
        f"--col date={safe_text(stated)} is one of {len(group)} columns, as many as there are of "
        "codes",
        "expected the date of each code",
        f"Give --col 'date={pattern}', or rename the column if it is the date of all codes",
        field="--col date",
    )


def report_pairs(file: str, pairs: Pairs, *, is_stated: bool) -> list[Finding]:
    """A warning that each column of codes has a date of its own, where no option states it."""
    if is_stated or not pairs:
        return []
    dates = list(chain.from_iterable(pairs.values()))
    problem = f"codes of {_abridge(list(pairs))} have their dates in {_abridge(dates)}"
    hint = "Give --col date=NAME for another date of the rows"
    return [input_warning(Reason.HEADER, problem, "", hint, file=file, row=1)]


def spread_lists(frame: pl.DataFrame, pairs: Pairs) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """The frame with a column for each code of cells that hold lists, and the names of all columns
    of codes.

    Raises UserError: code_form for a cell with more codes than there are columns of dates.
    """
    columns = list[str]()
    for name, dates in pairs.items():
        if len(dates) == 1:
            columns.append(name)
            continue
        codes = frame[name].cast(pl.String).str.extract_all(LISTED_CODE)
        longest = codes.list.len().max()
        if isinstance(longest, int) and longest > len(dates):
            problem = f"cells hold up to {longest} codes"
            expected = f"there are {len(dates)} columns of dates"
            hint = "Export all columns of dates"
            raise input_error(Reason.CODE_FORM, problem, expected, hint, field=name)
        parts = [f"{name}.{i}" for i in range(len(dates))]
        frame = frame.drop(name).with_columns(
            codes.list.get(i, null_on_oob=True).alias(part) for i, part in enumerate(parts)
        )
        columns += parts
    return frame, tuple(columns)


def join_cells(events: pl.DataFrame, key: str, columns: Sequence[str]) -> pl.DataFrame:
    """The events with `key`, the cell of the column that has the number `position`."""
    place = pl.col("position").cast(pl.Int64) - 1
    events = events.with_columns(
        pl.concat_list(columns).list.get(place, null_on_oob=True).alias(key)
    )
    return events.drop(name for name in columns if name != key)
