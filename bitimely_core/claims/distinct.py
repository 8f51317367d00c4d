"""Columns of texts by their distinct texts, each of which is read once; distinct integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray


def number_texts(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Of the distinct texts of a column, null among them, a row that holds each; and of each row
    the number of its text [n].
    """
    held = (
        column if isinstance(column.dtype, pl.Categorical) else column.cast(pl.Categorical)
    ).to_physical()
    size = int(np.max(held.drop_nulls().to_numpy(), initial=0)) + 2  # the last for null
    physical = held.fill_null(size - 1).to_numpy()
    row = np.full(size, -1)
    row[physical] = np.arange(len(physical))
    known = np.flatnonzero(row >= 0)
    number = np.zeros(len(row), np.int32)
    number[known] = np.arange(len(known))
    return row[known], number[physical]


def map_texts(
    column: pl.Series, function: Callable[[str | None], Any], kind: pl.DataType | type[pl.DataType]
) -> pl.Series:
    """The column with `function` of each text, null too."""
    row, number = number_texts(column)
    return pl.Series(column.name, [function(text) for text in column.gather(row)], kind).gather(
        number
    )


def find_starts(values: NDArray[Any]) -> NDArray[np.intp]:
    """Of a sorted array, the positions at which another value begins."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def sort_distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct integers of an array, sorted: many times faster than `np.unique`, which
    hashes.
    """
    ordered = np.sort(values)
    return ordered[find_starts(ordered)]


def count_integers(column: pl.Series) -> dict[int, int]:
    """The numbers of a column of integers that lie close together, without nulls -> its rows with
    each.
    """
    values = column.to_numpy().astype(np.int64)
    low = int(values.min(initial=0))
    counts = np.bincount(values - low)
    return {int(at) + low: int(counts[at]) for at in np.flatnonzero(counts)}
