"""Reads every distinct text of a column once, and counts and sorts integers fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray


def number_texts(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Number the distinct texts of a column; null counts as a text.

    Returns a row that holds each text, and the number of the text of each row [n].
    """
    if not isinstance(column.dtype, pl.Categorical):
        column = column.cast(pl.Categorical)
    physical = column.to_physical()
    null = int(np.max(physical.drop_nulls().to_numpy(), initial=0)) + 1
    index = physical.fill_null(null).to_numpy()
    last_row = np.full(null + 1, -1)
    last_row[index] = np.arange(len(index))
    present = last_row >= 0
    number = np.cumsum(present, dtype=np.int32) - 1
    return last_row[present], number[index]


def map_texts(
    column: pl.Series, function: Callable[[str | None], Any], kind: pl.DataType | type[pl.DataType]
) -> pl.Series:
    """The column with `function` applied to each text, also to null."""
    row, number = number_texts(column)
    values = list(map(function, column.gather(row)))
    return pl.Series(column.name, values, kind).gather(number)


def count_integers(column: pl.Series) -> dict[int, int]:
    """Rows with each number of a column of integers that lie close together, without nulls."""
    values = column.to_numpy().astype(np.int64)
    low = int(values.min(initial=0))
    counts = np.bincount(values - low)
    return {int(place) + low: int(counts[place]) for place in np.flatnonzero(counts)}


def find_starts(values: NDArray[Any]) -> NDArray[np.intp]:
    """The positions of a sorted array at which another value begins."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def sort_distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct integers of an array, sorted.

    This is many times faster than `np.unique`, which hashes.
    """
    ordered = np.sort(values)
    return ordered[find_starts(ordered)]


def sort_stably(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order of numbers of 0 and above, and the numbers in it.

    numpy sorts integers several times faster than it finds an order: each number is packed with its
    position where that fits.
    """
    bits = len(numbers).bit_length()
    if int(numbers.max(initial=0)) < 1 << (62 - bits):
        packed = np.sort((numbers << bits) + np.arange(len(numbers)))
        return packed & ((1 << bits) - 1), packed >> bits
    order = np.argsort(numbers, kind="stable")
    return order, numbers[order]
