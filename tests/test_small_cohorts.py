"""What a reader can compute of small groups from the shared numbers of times to event.

An integer program knows what is printed, how groups are defined, the number of all people and of
all events, and which counts are of 1 to 10; it tries every value of each of these counts.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from bitimely_core import privacy
from bitimely_core.claims import protected_scores
from bitimely_core.claims.protected_scores import protect_groups
from bitimely_core.evaluate.survival_metrics import describe_groups
from bitimely_core.schemas.scores import RiskGroup, RiskGroups, RiskPoint
from bitimely_core.types import name_horizon

SMALL, LEAST = 11, 5
Terms = dict[tuple[Any, ...], int]  # variable -> factor
Array = npt.NDArray[Any]


class Reader:
    """Linear equations on integers of at least 0, and the terms whose value is 1 to 10."""

    def __init__(self) -> None:
        self.place: dict[tuple[Any, ...], int] = {}
        self.rows: list[tuple[Terms, float, float]] = []
        self.small: dict[str, Terms] = {}

    def learn(self, terms: Terms, low: float, high: float = np.inf) -> None:
        for variable in terms:
            self.place.setdefault(variable, len(self.place))
        self.rows.append((terms, low, high))

    def note(self, name: str, terms: Terms, value: int) -> None:
        """A count of the group that nobody prints, of which it is known whether it is small."""
        if 0 < value < SMALL:
            self.small[name] = terms
            self.learn(terms, 1, SMALL - 1)
        else:
            self.learn(terms, 0)

    def count_values(self, terms: Terms) -> int:
        """How many of the values from 1 to 10 fit, up to `LEAST`."""
        matrix = np.zeros((len(self.rows) + 1, len(self.place)))
        for row, (known, _, _) in zip(matrix, [*self.rows, (terms, 0, 0)], strict=True):
            for variable, factor in known.items():
                row[self.place[variable]] = factor
        low, high = (np.array([*(row[i] for row in self.rows), 0.0]) for i in (1, 2))
        count = 0
        for value in range(1, SMALL):
            low[-1] = high[-1] = value
            fits = milp(
                np.zeros(len(self.place)),
                integrality=np.ones(len(self.place)),
                bounds=Bounds(0, np.inf),
                constraints=LinearConstraint(matrix, low, high),
            )
            count += fits.status == 0
            if count == LEAST:
                break
        return count


def draw_cohort(seed: int, n: int) -> RiskGroups:
    """Thirds and tenths of `n` people with events, deaths and censoring; of every third cohort the
    end of observation is the horizon, so that nobody is at risk behind it.
    """
    rng = np.random.default_rng(seed)
    risk = rng.permutation(np.linspace(0.05, 0.9, n))
    scale = rng.choice([50, 150, 500], 3) / np.array([1, rng.choice([0.3, 1, 5]), 1])
    times = np.stack([rng.exponential(one, n) for one in scale])
    times[0] /= 0.5 + 2 * risk
    if seed % 3 == 0:
        times = np.minimum(times, 99.0 + rng.random(times.shape))
    target = np.stack([np.ceil(times.min(0)), np.array([1, 2, 0])[times.argmin(0)]], 1)
    days = [100] if seed % 2 else [40, 100]
    names = [name_horizon("d", day) for day in days]
    prediction = np.stack([risk / 2, risk], 1)[:, -len(days) :]
    return describe_groups(np.repeat(target[:, None], len(days), 1), prediction, names, 4)["d"]


def read_group(reader: Reader, key: str, exact: RiskGroup, shown: RiskGroup) -> None:
    """What is printed of a group, and what its counts are by definition: on each day its people are
    with the event, at risk or gone; who has an event or is gone stays so.
    """
    size = {("n", key): -1}
    if shown.n is not None:
        assert shown.n == exact.n
        reader.learn(size, -exact.n, -exact.n)
    before: dict[str, tuple[Terms, int]] = {"events": ({}, 0), "gone": ({}, 0), "left": ({}, 0)}
    for k, (point, printed) in enumerate(zip(exact.points, shown.points, strict=True)):
        events, risk, gone = ({(name, key, k): 1} for name in ("events", "risk", "gone"))
        reader.learn({**events, **risk, **gone, **size}, 0, 0)
        n_gone = exact.n - point.events - point.at_risk
        for name, terms, value, stated in (
            ("events", events, point.events, printed.events),
            ("at risk", risk, point.at_risk, printed.at_risk),
            ("gone", gone, n_gone, None),
        ):
            if stated is None:
                reader.note(f"{name} {key} {k}", terms, value)
            else:
                assert stated == value
                reader.learn(terms, value, value)
        now = {
            "events": (events, point.events),
            "gone": (gone, n_gone),
            "left": ({**events, **gone}, point.events + n_gone),
        }
        for name, (terms, value) in now.items():
            earlier, old = before[name]
            newly = {**terms, **dict.fromkeys(earlier, -1)}
            reader.note(f"new {name} {key} {k}", newly, value - old)
        before = now


def read_page(exact: RiskGroups, shown: RiskGroups, n: int) -> Reader:
    """What a reader knows of the printed groups of `n` people, whose sizes differ by one at most
    and leave those whose time is not known.
    """
    reader = Reader()
    for name, all_groups, printed in (
        ("third", exact.groups, shown.groups),
        ("tenth", exact.deciles, shown.deciles),
    ):
        for k, (group, seen) in enumerate(zip(all_groups, printed, strict=False)):
            read_group(reader, f"{name} {k}", group, seen)
        if printed:
            learn_total(reader, name, all_groups)
            sizes = [("n", f"{name} {k}") for k in range(len(all_groups))]
            for first, second in permutations(sizes, 2):
                reader.learn({first: 1, second: -1}, -np.inf, 1)
            unknown = n - sum(group.n for group in all_groups)
            reader.learn({**dict.fromkeys(sizes, 1), ("unknown",): 1}, n, n)
            reader.note("unknown", {("unknown",): 1}, unknown)
    return reader


def learn_total(reader: Reader, name: str, groups: list[RiskGroup]) -> None:
    """All events up to the longest horizon, which is the last day; another page may print them."""
    last = len(groups[0].points) - 1
    total = sum(group.points[-1].events for group in groups)
    if total >= SMALL:
        terms = {("events", f"{name} {k}", last): 1 for k in range(len(groups))}
        reader.learn(terms, total, total)


def learn_overlaps(reader: Reader, groups: RiskGroups) -> None:
    """Both divisions are of the same people in one order: what lies between two limits is part of
    a third and of a tenth.
    """
    owners = [
        np.repeat(range(len(part)), [group.n for group in part])
        for part in (groups.groups, groups.deciles)
    ]
    pairs, sizes = np.unique(np.stack(owners, 1), axis=0, return_counts=True)
    days = [point.day for point in groups.groups[0].points]
    for h, day in enumerate(groups.horizons):
        for name in ("events", "risk", "gone"):
            for column, (part, k) in enumerate((("third", days.index(day)), ("tenth", h))):
                for g in range(len(groups.groups if part == "third" else groups.deciles)):
                    inside = [(name, *pair, h) for pair in pairs[pairs[:, column] == g].tolist()]
                    terms = {(name, f"{part} {g}", k): 1, **dict.fromkeys(inside, -1)}
                    reader.learn(terms, 0, 0)
        for pair, size in zip(pairs.tolist(), sizes.tolist(), strict=True):
            parts = [(name, *pair, h) for name in ("events", "risk", "gone")]
            reader.learn(dict.fromkeys(parts, 1), size, size)


def find_leaks(seed: int, n: int, unknown: int = 0) -> list[str]:
    exact = draw_cohort(seed, n)
    shown = protect_groups(exact, n + unknown)
    reader = read_page(exact, shown, n + unknown)
    if shown.deciles:
        learn_overlaps(reader, exact)
    return [
        f"cohort {seed} of {n}: {name} has {count} values"
        for name, terms in reader.small.items()
        if (count := reader.count_values(terms)) < LEAST
    ]


def draw_size(seed: int) -> int:
    return int(np.random.default_rng([seed, 1]).integers(15, 61))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 40))]
)
def test_no_small_count_of_a_small_cohort_can_be_computed(seed: int) -> None:
    assert find_leaks(seed, draw_size(seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8))]
)
def test_sizes_do_not_show_how_few_people_have_no_known_time(seed: int) -> None:
    for n, unknown in ((60, 1), (150, 8)):
        assert find_leaks(seed, n, unknown) == []
        assert not any(
            group.n for group in protect_groups(draw_cohort(seed, n), n + unknown).groups
        )


@pytest.mark.slow
@pytest.mark.parametrize("n", [360, 2000])
def test_no_small_count_can_be_computed_from_thirds_and_tenths(n: int) -> None:
    shown = [protect_groups(draw_cohort(seed, n), n) for seed in range(12)]
    with_tenths = [seed for seed, groups in enumerate(shown) if groups.deciles]
    assert with_tenths
    assert [leak for seed in with_tenths[:2] for leak in find_leaks(seed, n)] == []


def test_counts_are_shown_beside_sizes_that_are_not() -> None:
    shown = protect_groups(draw_cohort(1, 900), 905).groups
    assert [group.n for group in shown] == [None] * 3
    assert any(point.events for group in shown for point in group.points)
    assert [group.n for group in protect_groups(draw_cohort(1, 900), 920).groups] == [300] * 3


@pytest.mark.slow
def test_groups_of_few_people_are_not_shown() -> None:
    for n, thirds, tenths in ((32, False, False), (33, True, False), (109, True, False)):
        groups = [protect_groups(draw_cohort(seed, n), n) for seed in range(5)]
        assert any(bool(shown.groups) for shown in groups) == thirds
        assert any(bool(shown.deciles) for shown in groups) == tenths


@pytest.mark.slow
def test_an_incidence_does_not_show_who_was_censored() -> None:
    """Without anybody gone it is a share; else it is shown in large groups, in whole percents."""
    for n in (60, 600):
        for seed in range(3):
            exact = draw_cohort(seed, n)
            for group, true in zip(protect_groups(exact, n).groups, exact.groups, strict=False):
                for point, known in zip(group.points, true.points, strict=True):
                    if point.incidence is None:
                        continue
                    gone = group.n - point.events - point.at_risk
                    if gone:
                        assert group.n >= 110
                        assert point.incidence == round(known.incidence, 2)
                        assert (point.lo, point.hi) == (round(known.lo, 2), round(known.hi, 2))
                    else:
                        assert point.incidence == pytest.approx(point.events / group.n)


def test_a_cell_has_as_many_small_values_as_its_margins_leave() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        total = int(rng.integers(12, 60))
        margin, other = rng.integers(1, total + 1, 2).tolist()
        fits = [
            cell
            for cell in range(1, SMALL)
            if min(margin - cell, other - cell, total - margin - other + cell) >= 0
        ]
        if fits:
            assert privacy.count_feasible(margin, other, total, fits[0]) == len(fits)


@pytest.mark.parametrize(
    ("size", "events", "at_risk", "incidence", "shown"),
    [
        (110, 50, 49, 0.46, True),  # at least 1.2 of 11 were censored: 10 values
        (110, 50, 49, 0.48, True),  # 4.8 of them: 7 values
        (110, 50, 49, 0.49, True),  # 6.9 of them: 5 values
        (110, 50, 49, 0.50, False),  # 9.0 of them: 2 or 3 values
        (110, 60, 39, 0.59, False),  # 7.4 of them: 4 values
        (109, 50, 48, 0.46, False),  # a small group
        (110, 0, 99, 0.0, True),
    ],
)
def test_an_incidence_is_shown_where_five_numbers_of_censored_people_fit(
    size: int, events: int, at_risk: int, incidence: float, shown: bool
) -> None:
    point = RiskPoint(day=1, at_risk=at_risk, events=events, incidence=incidence, lo=0.0, hi=1.0)
    assert protected_scores._has_open_incidence(point, size) is shown
    few = point.model_copy(update={"events": 5})
    groups = RiskGroups(
        horizons=[1, 2],
        groups=[
            RiskGroup(
                name="all",
                n=size,
                predicted=[0.1, 0.2],
                points=[few, point.model_copy(update={"day": 2, "events": 50})],
            )
        ],
    )
    assert protected_scores.has_few_events(groups)
