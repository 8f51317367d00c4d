"""Disclosure control of counts of people: which counts of a table are withheld, so that none of 1
to 10 can be recovered.

Rules (docs/privacy.md): a count of 1 to 10 people is withheld; so are as many of the counts that
are linked to it by sums as it takes to leave every such count at least `FEASIBLE` possible values;
whatever is computed from a withheld count is withheld too. Rows of files are rounded up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

# smaller counts of people are withheld, 0 is not: the rule of the publisher of Medicare's data
SMALL = 11
FEASIBLE = 5  # possible values that are left of a withheld count, at least
ROUNDING = 10  # counts of rows are rounded up to multiples of it
DECIMALS = 3  # of scores beside withheld counts
WITHHELD = "withheld"  # in the place of a number
NOTICE = (
    f"Counts of 1 to {SMALL - 1} people are withheld, and so are counts and scores from which they could be computed; counts of rows are rounded "
    f"up to multiples of {ROUNDING}. Show them with --small-counts, for synthetic or consented data only."
)
SHOWN = "Counts below 11 are shown (--small-counts): for synthetic or consented data only. Do not share this page otherwise."

Key = TypeVar("Key", bound=Hashable)
Sums = Sequence[tuple[Key, Sequence[Key]]]  # total, parts


def is_small(count: int | None) -> bool:
    """Whether a count of people is withheld by itself."""
    return count is not None and 0 < count < SMALL


def has_small_count(text: str) -> bool:
    """Whether a text has a number of 1 to 10, as `12 train, 7 test`."""
    return any(
        is_small(int(number.replace(",", "")))
        for number in re.findall(r"(?<![\w.-])\d[\d,]*(?!\.?\w)", text)
    )


def round_rows(count: int) -> int:
    """A count of rows, rounded up. Sums and differences of such counts leave at least nine possible
    values of one of 1 to 10.
    """
    return -(-count // ROUNDING) * ROUNDING


def round_message(text: str) -> str:
    """A message with its counts of rows and subjects rounded up."""

    def replace(match: re.Match[str]) -> str:
        count = int(match[0].replace(",", ""))
        # of a message that is rounded already
        bound = "" if text[: match.start()].endswith("at most ") else "at most "
        return f"{bound}{round_rows(count):,}" if count else match[0]

    return re.sub(
        r"(?<![\w.,:'-])\d[\d,]*(?= (?:of |different |of the )?(?:\d|rows?\b|lines?\b|subjects?\b|claims?\b|stays?\b|ids?\b))",
        replace,
        text,
    )


def show_count(count: Any) -> Any:
    """A count as a cell of a table; None: withheld."""
    return WITHHELD if count is None else count


def format_count(count: int | None) -> str:
    """A count in a text; None: withheld."""
    return WITHHELD if count is None else f"{count:,}"


def round_score(score: float | None) -> float | None:
    """A score without the digits from which the counts behind it could be computed."""
    return score if score is None else round(score, DECIMALS)


def count_feasible(margin: int, other: int, total: int, cell: int) -> int:
    """Values of 1 to 10 that a cell of a two by two table can have, its margins (the sums that hold
    the cell) and total known.
    """
    assert is_small(cell)
    return min(margin, other, SMALL - 1) - max(margin + other - total, 1) + 1


def has_open_table(with_code: int, of: int, all_with: int, total: int) -> bool:
    """Whether no cell of a two by two table is of 1 to 10: `with_code` of `of`, out of `all_with`
    of `total`.
    """
    return not any(
        map(
            is_small,
            (with_code, of - with_code, all_with - with_code, total - of - all_with + with_code),
        )
    )


def find_withheld(
    counts: Mapping[Key, int], sums: Sums[Key], unprinted: Collection[Key], order: Mapping[Key, Any]
) -> frozenset[Key]:
    """The counts of a system of sums that are not printed.

    Args:
        counts: all counts, printed or not.
        sums: a total and its parts; all of `counts`.
        unprinted: counts that are nowhere printed, but could be computed; they are protected too.
        order: of the printed counts that may be withheld beside small ones, the first first; others
            are never chosen.

    Returns:
        Every printed count of 1 to 10 and those withheld beside them: whoever knows the others, and
        which of the withheld ones are of 1 to 10, finds at least `FEASIBLE` values for each of
        these, as far as counts in `order` can bring that about.
    """
    withheld = {key for key, count in counts.items() if is_small(count) and key not in unprinted}
    while True:
        hidden = [key for key in counts if key in withheld or key in unprinted]
        narrow = _find_narrow(counts, sums, hidden, withheld)
        complements = (_choose_complement(key, counts, sums, hidden, order) for key in narrow)
        chosen = {key for key in complements if key is not None}
        if not chosen:
            return frozenset(withheld)
        withheld |= chosen


def _choose_complement(
    key: Key,
    counts: Mapping[Key, int],
    sums: Sums[Key],
    hidden: Collection[Key],
    order: Mapping[Key, Any],
) -> Key | None:
    """The first printed count in `order` that shares a sum with `key`, or with a hidden count that
    is linked to it.
    """
    reached, open_sums = {key}, list(sums)
    while True:
        near = [(total, *parts) for total, parts in open_sums if reached & {total, *parts}]
        found = [
            one
            for keys in near
            for one in keys
            if one not in hidden and one in order and counts[one]
        ]
        if found or not near:
            return min(found, key=lambda one: (order[one], counts[one]), default=None)
        open_sums = [(total, parts) for total, parts in open_sums if not reached & {total, *parts}]
        reached |= {one for keys in near for one in keys if one in hidden}


def _find_narrow(
    counts: Mapping[Key, int], sums: Sums[Key], hidden: Sequence[Key], withheld: Collection[Key]
) -> list[Key]:
    """The counts of 1 to 10 for which fewer than `FEASIBLE` values fit everything that is printed,
    the smallest sets first.
    """
    small = [key for key in hidden if is_small(counts[key])]
    if not small:
        return []
    from scipy.optimize import linprog

    place = {key: i for i, key in enumerate(hidden)}
    rows: list[np.ndarray] = []
    right: list[int] = []
    for total, parts in sums:
        row, value = np.zeros(len(hidden)), 0
        for key, sign in ((total, -1), *((part, 1) for part in parts)):
            if key in place:
                row[place[key]] += sign
            else:
                value -= sign * counts[key]
        if row.any():
            rows.append(row)
            right.append(value)
    bounds = [
        (1, SMALL - 1)
        if is_small(counts[key])
        else (SMALL, None)
        if key in withheld and counts[key]
        else (0, None)
        for key in hidden
    ]
    targets = [place[key] for key in small]
    # extremes of the solutions so far
    low, high = (np.array([counts[key] for key in small], dtype=float) for _ in range(2))

    def solve(weights: np.ndarray) -> None:
        found = linprog(
            weights,
            A_eq=np.array(rows) if rows else None,
            b_eq=right or None,
            bounds=bounds,
            method="highs",
        )
        if found.status == 0:
            values = found.x[targets]
            np.minimum(low, values, out=low)
            np.maximum(high, values, out=high)

    def width(i: int) -> int:
        return math.floor(high[i] + 1e-6) - math.ceil(low[i] - 1e-6) + 1

    every = np.zeros(len(hidden))
    every[targets] = 1.0
    solve(every)
    solve(-every)
    for i, at in enumerate(targets):
        for direction in (1.0, -1.0):
            if width(i) < FEASIBLE:
                solve(direction * np.eye(len(hidden))[at])
    return [small[i] for i in sorted(range(len(small)), key=width) if width(i) < FEASIBLE]
