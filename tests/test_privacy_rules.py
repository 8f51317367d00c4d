"""The rules of disclosure control one by one, against all tables that fit what is printed."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel

from bitimely_core import privacy
from bitimely_core.privacy import Sharing
from bitimely_core.schemas.ingest_records import FindingRecord, TableReport
from bitimely_core.schemas.runs import RunData, RunRecord, SplitCount
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import Calibration

Cells = dict[str, int]
Sums = list[tuple[str, tuple[str, ...]]]


def list_choices(key: str, counts: Cells, unprinted: set[str], withheld: set[str]) -> list[int]:
    """The values of one count that do not contradict what is said of it."""
    if key not in withheld | unprinted:
        return [counts[key]]
    if 0 < counts[key] < 11:
        return list(range(1, 11))
    return list(range(11 if key in withheld and counts[key] else 0, 80))


def count_values(
    counts: Cells, sums: Sums, unprinted: set[str], withheld: set[str]
) -> dict[str, int]:
    """How many values each hidden count of 1 to 10 has in the tables of whole numbers that agree
    with all that is printed, by trial of all tables.
    """
    choices = {key: list_choices(key, counts, unprinted, withheld) for key in counts}
    totals = {total for total, _ in sums}
    cells = [key for key in counts if key not in totals]
    # no table within reach has larger cells
    grids = np.meshgrid(*([n for n in choices[key] if n < 45] for key in cells), sparse=True)
    table = dict(zip(cells, grids, strict=True))
    fits = np.ones(np.broadcast_shapes(*(grid.shape for grid in grids)), bool)
    for total, parts in sums:
        table[total] = sum(table[part] for part in parts)
        fits = fits & np.isin(table[total], choices[total])
    return {
        key: len(np.unique(np.broadcast_to(table[key], fits.shape)[fits]))
        for key in counts
        if key in withheld | unprinted and 0 < counts[key] < 11
    }


def make_table(a: int, b: int, c: int, d: int) -> tuple[Cells, Sums]:
    """Four cells with the sums of their rows and columns."""
    cells = {"a": a, "b": b, "c": c, "d": d}
    sums = [("ab", ("a", "b")), ("cd", ("c", "d")), ("ac", ("a", "c")), ("bd", ("b", "d"))]
    return cells | {name: sum(cells[part] for part in parts) for name, parts in sums}, sums


def test_counts_of_one_to_ten_people_are_small() -> None:
    assert [n for n in range(-2, 30) if privacy.is_small(n)] == list(range(1, 11))
    assert not privacy.is_small(None)


@pytest.mark.parametrize(
    ("text", "small"),
    [
        ("12 train, 7 test", True),
        ("120 of 1,010 people", False),
        ("1,007", False),
        ("10", True),
        ("11", False),
        ("0 of 40", False),
        ("model v7, 0.5 a day, 7.5 h", False),
        ("no number", False),
    ],
)
def test_a_text_with_a_small_count_is_seen(text: str, small: bool) -> None:
    assert privacy.has_small_count(text) is small


def test_rows_are_rounded_up_to_tens() -> None:
    assert [privacy.round_rows(n) for n in range(45)] == [10 * math.ceil(n / 10) for n in range(45)]
    assert privacy.round_message("3 rows of 1,234 stays, 0 lines") == (
        "at most 10 rows of at most 1,240 stays, 0 lines"
    )
    assert privacy.round_message("2 of 40 subjects") == "at most 10 of at most 40 subjects"


def test_withheld_counts_and_scores_have_their_words() -> None:
    assert [privacy.show_count(n) for n in (0, 12, None)] == [0, 12, "withheld"]
    assert [privacy.format_count(n) for n in (0, 1234, None)] == ["0", "1,234", "withheld"]
    assert [privacy.round_score(x) for x in (0.12345, None)] == [0.123, None]


def test_exact_counts_are_for_the_owner_of_the_data_alone() -> None:
    result = {"run": "a", "people": None, "exact": {"people": 7, "cases": 3}}
    assert privacy.choose_counts(result, owner=False) == {"run": "a", "people": None}
    assert privacy.choose_counts(result, owner=True) == {"run": "a", "people": 7, "cases": 3}
    nothing_exact = {"run": "a"}
    assert privacy.choose_counts(nothing_exact, owner=True) == nothing_exact


class Ward(BaseModel):
    name: str
    people: Annotated[int | None, Sharing.PEOPLE]


class Hospital(BaseModel):
    beds: int
    wards: tuple[Ward, ...]
    rows: Annotated[dict[str, int], Sharing.ROWS]
    notices: Annotated[list[str], Sharing.MESSAGE]
    total: Annotated[int | None, Sharing.OWNER]


def test_a_shared_record_has_no_small_count_and_the_exact_one_stays() -> None:
    exact = Hospital(
        beds=7,
        wards=(Ward(name="A", people=7), Ward(name="B", people=40), Ward(name="C", people=0)),
        rows={"dated": 41, "none": 0},
        notices=["3 subjects have no birth date"],
        total=47,
    )
    shared = privacy.share_record(exact)
    assert [ward.people for ward in shared.wards] == [None, 40, 0]
    assert [ward.people for ward in exact.wards] == [7, 40, 0]
    assert shared.rows == {"dated": 50, "none": 0}
    assert shared.notices == ["at most 10 subjects have no birth date"]
    assert (shared.total, shared.beds) == (None, 7)
    assert privacy.share_record(shared) == shared


# whole numbers in records that count no people and no rows of them
NO_PEOPLE = {
    "beds",
    *("format_version", "seed", "seeds", "folds", "test_fold", "limit", "fraction", "row"),
    *("channels", "others", "length", "layers", "heads", "dim", "value_dim", "ffn_dim", "patch"),
    *("stride", "codes", "horizon", "window", "width", "parameters", "paper_parameters"),
    *("epochs", "steps", "step", "batch_size", "accumulate", "patience", "devices", "log_every"),
    *("checkpoint_every", "keep", "context", "intervals", "rates", "pretraining_steps", "settings"),
    *("bandpass", "notch", "landmark_days", "day", "gap_days", "horizon_days"),
    *("threads", "processes", "bootstrap", "defined", "of", "minimum_units", "minimum_rows"),
}


def list_undeclared(kind: Any, name: str = "", seen: set[Any] | None = None) -> Iterator[str]:
    """Fields of a record, and of the records in it, that are whole numbers without `Sharing`."""
    seen = set() if seen is None else seen
    if kind is int:
        yield name
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind not in seen:
            seen.add(kind)
            for field, info in kind.model_fields.items():
                if not any(isinstance(mark, Sharing) for mark in info.metadata):
                    yield from list_undeclared(info.annotation, field, seen)
    elif not any(isinstance(mark, Sharing) for mark in getattr(kind, "__metadata__", ())):
        for part in typing.get_args(kind):
            yield from list_undeclared(part, name, seen)


@pytest.mark.parametrize("record", [RunRecord, Scores, Calibration, FindingRecord, TableReport])
def test_each_count_of_a_record_that_is_shared_says_what_it_counts(record: type[Any]) -> None:
    undeclared = set(list_undeclared(record)) - NO_PEOPLE
    assert not undeclared, "declare them as Annotated[int | None, Sharing.PEOPLE] or the like"


def test_the_check_of_declarations_sees_a_count() -> None:
    class Forgotten(BaseModel):
        visits: dict[str, list[int]]

    assert set(list_undeclared(Forgotten)) == {"visits"}
    assert "total" not in set(list_undeclared(Hospital))


def make_run(*, small_counts: bool) -> RunRecord:
    audit = {
        "train": SplitCount(windows=80, subjects=80),
        "validation": SplitCount(windows=7, subjects=7),
        "test": SplitCount(windows=20, subjects=20),
    }
    data = RunData(
        name="claims",
        dataset="pophr",
        fingerprint="0",
        windows=107,
        audit=audit,
        vocabulary="0",
        small_counts=small_counts,
    )
    return RunRecord.model_construct(
        run="r",
        kind="train",
        model="gru-d",
        settings=None,
        data=(data,),
        pretraining_data=(data,),
        notices=("7 subjects are left out",),
        train_windows=9,
        train_label_counts={"COPD": 5},
    )


def test_a_shared_run_does_not_show_how_few_people_a_split_has() -> None:
    shared = make_run(small_counts=False).share()
    for data in (*shared.data, *(shared.pretraining_data or ())):
        assert data.audit["validation"] == SplitCount(windows=None, subjects=None)
        assert data.audit["train"].subjects == 80
        assert data.windows is None  # with the other splits it shows the withheld one
    assert (shared.train_windows, shared.train_label_counts) == (None, None)
    assert shared.notices == ("at most 10 subjects are left out",)
    exact = make_run(small_counts=True)
    assert exact.share() == exact


def test_a_table_is_open_where_no_cell_is_small() -> None:
    for a, b, c, d in itertools.product((0, 1, 10, 11), repeat=4):
        is_open = privacy.has_open_table(a, a + b, a + c, a + b + c + d)
        assert is_open is (not any(1 <= cell <= 10 for cell in (a, b, c, d)))


@pytest.mark.parametrize("seed", range(8))
def test_narrow_counts_are_those_with_fewer_than_five_values_in_all_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, sums = make_table(*(int(n) for n in rng.choice([0, 1, 3, 6, 10, 11, 14, 25], 4)))
    small = {key for key, count in counts.items() if 0 < count < 11}
    for extra in ("", "d", "ac", "bd"):
        withheld = small | ({extra} & counts.keys())
        values = count_values(counts, sums, set(), withheld)
        narrow = privacy.find_narrow(counts, sums, (), withheld)
        assert set(narrow) == {key for key, n in values.items() if n < 5}
        numbers = [values[key] for key in narrow]
        assert numbers == sorted(numbers), "those with the fewest values come first"


@pytest.mark.parametrize("values", [4, 5])
def test_five_values_are_enough(values: int) -> None:
    """The other part is of 11 or more, so that the small one is at most the total less 11."""
    total = 11 + values
    counts = {"all": total, "few": 2, "many": total - 2}
    sums = [("all", ("few", "many"))]
    assert count_values(counts, sums, set(), {"few", "many"}) == {"few": values}
    assert privacy.find_narrow(counts, sums, (), {"few", "many"}) == ["few"] * (values < 5)


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_withheld_until_five_tables_fit(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    counts, sums = make_table(*(int(n) for n in rng.choice([0, 2, 5, 9, 12, 17, 30], 4)))
    order = {key: len(key) for key in counts}
    unprinted = {"d"} if seed % 3 == 0 else set()
    withheld = set(privacy.find_withheld(counts, sums, unprinted, order))
    small = {key for key, count in counts.items() if 0 < count < 11}
    assert small - unprinted <= withheld
    assert not withheld & unprinted
    values = count_values(counts, sums, unprinted, withheld)
    zeros = {key for key, count in counts.items() if not count}
    left = counts.keys() - withheld - unprinted - zeros
    assert all(n >= 5 for n in values.values()) or not left
    for key in withheld - small:  # not more than it takes: at least the last one was needed
        fewer = count_values(counts, sums, unprinted, small - unprinted)
        assert min(fewer.values()) < 5, key


def test_the_count_that_is_withheld_beside_a_small_one_is_the_nearest_first_and_smallest() -> None:
    counts = {"all": 100, "few": 3, "x": 40, "y": 30, "z": 27, "none": 0, "total": 200, "far": 100}
    sums = [("all", ("few", "x", "y", "z", "none")), ("total", ("all", "far"))]
    parts = dict.fromkeys(("x", "y", "z", "none", "far"), 1)
    cases: list[tuple[dict[str, int], str]] = [
        (parts, "z"),  # of equal order the smallest that is not 0
        (parts | {"x": 0}, "x"),  # the first of the order
        ({"y": 1, "far": 0}, "y"),  # the nearest
        ({"all": 0, "far": 1}, "all"),
    ]
    for order, expected in cases:
        assert expected in privacy.find_withheld(counts, sums, (), order)
    assert privacy.find_withheld(counts, sums, (), parts) == {"few", "z"}
    assert privacy.find_withheld(counts, sums, (), {"none": 0}) == {"few"}
    # a total that nobody prints, but which another sum gives away
    assert privacy.find_withheld(counts, sums, {"all"}, {"far": 1}) == {"few", "far"}
