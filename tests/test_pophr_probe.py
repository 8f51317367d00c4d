"""Shortcut baselines and the interval of the ratio against independent references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from bitimely_core.average_precision import average_precision
from bitimely_core.claims import prevalence, shortcut_baselines
from bitimely_core.claims.sequence_choices import SequenceChoices
from bitimely_core.schemas.tokens import SequenceFunnel


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=60))
def test_average_precision_is_that_of_scikit_learn(rows: list[tuple[int, bool]]) -> None:
    score, positive = (np.array([row[i] for row in rows]) for i in (0, 1))
    found = average_precision(score, positive)
    if not positive.any():
        assert found is None
    else:
        assert found == pytest.approx(average_precision_score(positive, score))


def cohort(seed: int, size: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, ids, label (-1 unknown), split; code 7 belongs to the cases."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1, 0, 1], size, p=[0.1, 0.7, 0.2]).astype(np.int8)
    lengths = rng.integers(1, 9, size)
    ids = rng.integers(5, 9, lengths.sum())
    owner = np.repeat(np.arange(size), lengths)
    ids[(ids == 7) & (y[owner] == 0)] = 8
    return (
        np.append(0, np.cumsum(lengths)),
        ids,
        y,
        rng.choice(["train", "validation", "test"], size, p=[0.7, 0.15, 0.15]),
    )


def test_a_code_that_separates_the_cases_is_named() -> None:
    offsets, ids, y, split = cohort(0)
    owner = np.repeat(np.arange(len(y)), np.diff(offsets))
    ids[offsets[:-1][y == 1]] = 7
    found = shortcut_baselines.score_shortcuts(
        shortcut_baselines.count_shortcuts(offsets, ids, {"chf": y}, split),
        {5: "008", 6: "250", 7: "428", 8: "496"},
        {"chf": ["428", "999"]},
    )["chf"]
    assert found.best is not None
    assert found.best.model_dump() == {
        "phecode": "428",
        "count": dict.fromkeys(("train", "validation", "test", "all"), 1.0),
    }
    assert found.own == {"428": found.best.count}
    assert found.leak
    assert found.subjects["all"] == (y >= 0).sum()
    assert len(owner) == len(ids)


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_equals_that_of_the_subjects_themselves(seed: int) -> None:
    offsets, ids, y, split = cohort(seed)
    names = {5: "008", 6: "250", 7: "428", 8: "496"}
    half = len(y) // 2
    cut = offsets[half]
    parts = [
        shortcut_baselines.count_shortcuts(
            offsets[: half + 1], ids[:cut], {"chf": y[:half]}, split[:half]
        ),
        shortcut_baselines.count_shortcuts(
            offsets[half:] - cut, ids[cut:], {"chf": y[half:]}, split[half:]
        ),
    ]
    found = shortcut_baselines.score_shortcuts(
        shortcut_baselines.merge_tallies(parts), names, {"chf": list(names.values())}
    )["chf"]
    counts = {
        code: np.array([(ids[a:b] == code).sum() for a, b in itertools.pairwise(offsets)])
        for code in names
    }
    for part in ("train", "validation", "test", "all"):
        own = (y >= 0) & ((split == part) | (part == "all"))
        assert found.prevalence[part] == pytest.approx(y[own].mean())
        assert found.length[part] == pytest.approx(average_precision(np.diff(offsets)[own], y[own]))
        for code, name in names.items():
            assert found.own[name][part] == pytest.approx(
                average_precision(counts[code][own], y[own])
            )
    on_train = {name: found.own[name]["train"] for name in names.values()}
    assert found.best is not None
    assert found.best.phecode == max(on_train, key=lambda name: on_train[name])
    assert found.best.count == found.own[found.best.phecode]
    rows = pl.DataFrame({"split": split, "y_chf": pl.Series(y).replace(-1, None)})
    counted = shortcut_baselines.count_prevalence(rows, ["chf"])["chf"]
    assert (counted["all"].subjects, counted["all"].cases) == ((y >= 0).sum(), (y == 1).sum())
    assert counted["test"].cases == ((y == 1) & (split == "test")).sum()


def test_without_cases_there_is_no_score() -> None:
    found = shortcut_baselines.score_shortcuts(
        shortcut_baselines.count_shortcuts(
            np.array([0, 1]), np.array([5]), {"x": np.array([0])}, np.array(["train"])
        ),
        {5: "008"},
        {"x": []},
    )["x"]
    assert (found.best, found.length["train"], found.prevalence["test"], found.leak) == (
        None,
        None,
        None,
        False,
    )


def test_agreement_counts_rows_with_both_labels() -> None:
    label, flag = np.array([1, 1, 0, 0, -1, 1]), np.array([1, 0, 1, 0, 1, -1])
    assert shortcut_baselines.count_agreement(label, flag) == {"tp": 1, "fp": 1, "fn": 1, "tn": 1}


def test_the_funnel_as_lines_adds_up() -> None:
    funnel = SequenceFunnel(
        rows=20,
        bad_date=2,
        before_birth=1,
        bad_code={"missing": 3, "bad_format": 0},
        mapped={"exact": 9, "parent": 1},
        unmapped=4,
        subjects_in=5,
        subjects_out=3,
        no_birth=0,
        events=8,
    )
    counts = {step: n for _, step, n in shortcut_baselines.list_attrition(funnel)}
    assert (
        counts["read"] - sum(n for step, n in counts.items() if step.startswith("excluded"))
        == counts["valid"]
        == 14
    )
    assert (counts["with a sequence"], counts["in sequences"]) == (3, 8)


@pytest.mark.parametrize("denominator", ["all", "controls"])
def test_the_interval_has_the_spread_of_simulated_ratios(denominator: str) -> None:
    rng = np.random.default_rng(0)
    n1, n0, p1, p0 = 400, 3600, 0.4, 0.1
    a1, a0 = rng.binomial(n1, p1, 20000), rng.binomial(n0, p0, 20000)
    reference = (a1 + a0) / (n1 + n0) if denominator == "all" else a0 / n0
    spread = np.log((a1 / n1) / reference).std()
    mean = (n1 * p1 + n0 * p0) / (n1 + n0) if denominator == "all" else p0
    ends = prevalence.compute_interval(p1 / mean, int(n1 * p1), n1, int(n0 * p0), n0, denominator)
    assert ends is not None
    low, high = ends
    assert math.sqrt(low * high) == pytest.approx(p1 / mean)
    assert math.log(high / low) / (2 * 1.96) == pytest.approx(spread, rel=0.03)


def test_no_interval_where_there_is_nothing_to_compare() -> None:
    assert prevalence.compute_interval(1.0, 3, 5, 0, 0, "all") is None
    assert prevalence.compute_interval(math.inf, 3, 5, 0, 7, "controls") is None


def test_support_as_a_share_is_exact() -> None:
    counts = prevalence.CodeCounts()
    counts.cases["x"], counts.known["x"] = 20, 60
    for n, phecode in enumerate(("001", "002", "003"), 10):
        counts.cases_with["x", phecode] = counts.known_with["x", phecode] = n
    # 11 of 20, although 0.55 * 20 > 11 in binary
    found = prevalence.select_codes(counts, ["x"], SequenceChoices(min_case_fraction=0.55))
    assert list(found.ratios["x"]) == ["002", "003"]
    assert found.max_attainable == {"x": 3.0}
    every = prevalence.select_codes(counts, ["x"], SequenceChoices(select=False))
    assert not any(ratio.selected for ratio in every.ratios["x"].values())


def test_selection_by_frequency() -> None:
    counts = prevalence.CodeCounts()
    counts.records.update({"001": 1, "250": 1, "1000": 998})
    for least, phecodes in ((0.001, ["1000"]), (0.0009, ["001", "250", "1000"])):
        choices = SequenceChoices(select="frequency", min_record_frequency=least)
        assert prevalence.select_codes(counts, [], choices).phecodes == phecodes
