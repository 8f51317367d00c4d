"""Disclosure control of counts of people: which counts of a table are withheld, so that none of 1
to 10 can be recovered.

Rules (docs/pophr.md): a count of 1 to 10 people is withheld; so are as many of the counts that
are linked to it by sums as it takes to leave every such count at least `FEASIBLE` possible values;
whatever is computed from a withheld count is withheld too. Rows of files are rounded up.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel

if TYPE_CHECKING:
    import numpy as np

# counts of people below it are withheld, 0 is not: the rule of the publisher of Medicare's data
SMALL = 11
FEASIBLE = 5  # least number of values that a withheld count can have, by all that is printed
ROUNDING = 10  # counts of rows are rounded up to multiples of it
DECIMALS = 3  # of scores beside withheld counts
WITHHELD = "withheld"  # in the place of a number
EXACT = "exact"  # of a result: entries as the owner of the data sees them
NOTICE = (
    f"Counts of 1 to {SMALL - 1} people are withheld, and so are counts and scores from which "
    f"they could be computed; counts of rows are rounded up to multiples of {ROUNDING}. "
    "They are shown of synthetic people, and with --small-counts, for consented data only."
)
SHOWN = (
    "Counts below 11 are shown: the people are synthetic, or have consented (--small-counts). "
    "Do not share this page otherwise."
)
# the number of `3 rows`, `3 test subjects` or `3 of 40 stays` in a message
COUNT_IN_MESSAGE = re.compile(
    r"(?<![\w.,:'-])\d[\d,]*(?= (?:of |different |of the |training |validation |test )?"
    r"(?:\d|(?:row|line|subject|claim|stay|id)s?\b))"
)
NUMBER_IN_TEXT = re.compile(r"(?<![\w.-])\d[\d,]*(?!\.?\w)")

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result", bound=Mapping[str, object])  # of a verb
Record = TypeVar("Record", bound=BaseModel)
Sums = Sequence[tuple[Key, Sequence[Key]]]  # total, parts


def choose_counts(result: Result, *, owner: bool) -> Result:
    """The result of a verb for its reader: who owns the data sees on the own screen the entries of
    `exact` in the place of those that may be shared, nobody else does.
    """
    chosen = {name: value for name, value in result.items() if name != EXACT}
    exact = result.get(EXACT)
    if owner and isinstance(exact, Mapping):
        chosen |= exact
    return cast("Result", chosen)


def is_small(count: int | None) -> bool:
    """Whether a count of people is withheld by itself."""
    return count is not None and 0 < count < SMALL


def has_small_count(text: str) -> bool:
    """Whether a text has a number of 1 to 10, as `12 train, 7 test`."""
    return any(is_small(_read_count(number)) for number in NUMBER_IN_TEXT.findall(text))


def _read_count(text: str) -> int:
    return int(text.replace(",", ""))


def round_rows(count: int) -> int:
    """A count of rows, rounded up. Sums and differences of such counts leave at least nine possible
    values of one of 1 to 10.
    """
    return -(-count // ROUNDING) * ROUNDING


def round_message(text: str) -> str:
    """A message with its counts of rows and subjects rounded up."""

    def replace(match: re.Match[str]) -> str:
        count = _read_count(match[0])
        if not count:
            return match[0]
        is_rounded = text[: match.start()].endswith("at most ")
        return f"{'' if is_rounded else 'at most '}{round_rows(count):,}"

    return COUNT_IN_MESSAGE.sub(replace, text)


class Sharing(Enum):
    """How a field of a record (`share_record`) or a part of a page is shared where counts of people
    are withheld.
    """

    PEOPLE = "a count of people, withheld where it is of 1 to 10"
    ROWS = "a count of rows, rounded up"
    MESSAGE = "a text, whose counts are rounded up"
    OPEN = "no people can be counted by it, shared as it is"
    OWNER = "for the owner of the data alone: counts of people could be computed from it"


def withhold_small(count: int) -> int | None:
    """A count of people; None where it is withheld by itself."""
    return None if is_small(count) else count


SHARED: Mapping[Sharing, Callable[[Any], Any]] = {
    Sharing.PEOPLE: withhold_small,
    Sharing.ROWS: round_rows,
    Sharing.MESSAGE: round_message,
    Sharing.OPEN: lambda value: value,
}


def share_record(record: Record) -> Record:
    """The record as it may be shared, with the records in it: each field as its `Sharing` says."""
    changed = {}
    for name, field in type(record).model_fields.items():
        sharing = next((mark for mark in field.metadata if isinstance(mark, Sharing)), None)
        value = getattr(record, name)
        shared = None if sharing is Sharing.OWNER else _share_value(value, sharing)
        if shared != value:
            changed[name] = shared
    return record.model_copy(update=changed)


def _share_value(value: Any, sharing: Sharing | None) -> Any:
    """A value of a field, or each of its parts."""
    match value:
        case BaseModel():
            return share_record(value)
        case dict():
            return {key: _share_value(part, sharing) for key, part in value.items()}
        case list() | tuple():
            return type(value)(_share_value(part, sharing) for part in value)
        case int() | str() if sharing is not None:
            return SHARED[sharing](value)
    return value


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
    """Number of values of 1 to 10 that a cell of a two by two table can have.

    The two margins, which are the sums that hold the cell, and the total are known.
    """
    assert is_small(cell)
    return min(margin, other, SMALL - 1) - max(margin + other - total, 1) + 1


def has_open_table(with_code: int, cases: int, all_with: int, total: int) -> bool:
    """Whether no cell of a two by two table is of 1 to 10 people.

    `with_code` of the `cases` and `all_with` of all `total` people carry a code.
    """
    others_with = all_with - with_code
    cells = (with_code, cases - with_code, others_with, total - cases - others_with)
    return not any(map(is_small, cells))


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
        Every printed count of 1 to 10, and those withheld beside them. A reader who knows all other
        counts, and which of the withheld ones are of 1 to 10, finds at least `FEASIBLE` values for
        each of these, as far as counts in `order` can bring that about.
    """
    withheld = {key for key, count in counts.items() if is_small(count) and key not in unprinted}
    while True:
        hidden = [key for key in counts if key in withheld or key in unprinted]
        narrow = find_narrow(counts, sums, unprinted, withheld)
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
    """The first printed count in `order` among the nearest ones that are linked to `key`."""
    for linked in _iter_linked(key, sums, hidden):
        printed = [
            member
            for member in linked
            if member in order and member not in hidden and counts[member]
        ]
        if printed:
            return min(printed, key=lambda member: (order[member], counts[member]))
    return None


def _iter_linked(key: Key, sums: Sums[Key], hidden: Collection[Key]) -> Iterator[list[Key]]:
    """The members of the sums that hold `key`; then those of the sums that hold a hidden one of
    these; and so on.
    """
    reached, waiting = {key}, [(total, *parts) for total, parts in sums]
    while near := list(filter(reached.intersection, waiting)):
        linked = list(itertools.chain.from_iterable(near))
        yield linked
        waiting = [members for members in waiting if members not in near]
        reached |= set(linked).intersection(hidden)


def find_narrow(
    counts: Mapping[Key, int],
    sums: Sums[Key],
    unprinted: Collection[Key],
    withheld: Collection[Key],
) -> list[Key]:
    """The hidden counts of 1 to 10 for which fewer than `FEASIBLE` values fit everything that is
    printed, those with the fewest values first; arguments as of `find_withheld`.
    """
    import numpy as np

    hidden = [key for key in counts if key in withheld or key in unprinted]
    values = np.array([counts[key] for key in hidden], dtype=float)
    small = np.flatnonzero((values > 0) & (values < SMALL))
    if not len(small):
        return []
    from scipy.optimize import linprog

    matrix, right = _list_equations(counts, sums, hidden)
    bounds = [_bound_count(counts[key], is_withheld=key in withheld) for key in hidden]
    # the least and the greatest value of each small count in the solutions so far
    low, high = values[small], values[small]

    def widen(weights: np.ndarray) -> None:
        """Add the solution with the least weighted sum."""
        solution = linprog(weights, A_eq=matrix, b_eq=right, bounds=bounds, method="highs")
        if solution.status == 0:
            np.minimum(low, solution.x[small], out=low)
            np.maximum(high, solution.x[small], out=high)

    def count_values() -> np.ndarray:
        return np.floor(high + 1e-6) - np.ceil(low - 1e-6) + 1

    alone = np.eye(len(hidden))[small]  # the weights of each small count
    widen(alone.sum(0))
    widen(-alone.sum(0))
    for i, weights in enumerate(alone):
        for direction in (weights, -weights):
            if count_values()[i] < FEASIBLE:
                widen(direction)
    numbers = count_values()
    return [hidden[small[i]] for i in np.argsort(numbers, kind="stable") if numbers[i] < FEASIBLE]


def _list_equations(
    counts: Mapping[Key, int], sums: Sums[Key], hidden: Sequence[Key]
) -> tuple[np.ndarray, np.ndarray]:
    """What the sums say about the hidden counts: the matrix [equations, hidden] and the right
    sides.
    """
    import numpy as np

    place = {key: i for i, key in enumerate(hidden)}
    matrix, right = np.zeros((len(sums), len(hidden))), np.zeros(len(sums))
    for equation, (total, parts) in enumerate(sums):
        for key, sign in ((total, -1), *((part, 1) for part in parts)):
            if key in place:
                matrix[equation, place[key]] += sign
            else:
                right[equation] -= sign * counts[key]
    informative = matrix.any(axis=1)
    return matrix[informative], right[informative]


def _bound_count(count: int, *, is_withheld: bool) -> tuple[int, int | None]:
    """The least and the greatest value (None: any) of a hidden count, as far as it is known that it
    is small, or withheld though it is not.
    """
    if is_small(count):
        return 1, SMALL - 1
    return SMALL if is_withheld and count else 0, None
