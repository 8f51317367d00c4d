"""Rule tables: what is refused, what matches, when a rule is fulfilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import SAMPLES, needs_sample

from bitimely_core.claims import label_rules, phecode_maps
from bitimely_core.claims.codes import IcdCode, roll_up_phecode
from bitimely_core.errors import Exit, UserError

MAP = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"
GOOD: dict[str, Any] = {
    "name": "a",
    "codes": {"icd9": ["250"]},
    "any": [{"count": 2, "window_days": 730}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"nam": "b"},
        {"name": ""},
        {"name": 3},
        {"codes": ["250"]},
        {"codes": {"icd9": "250"}},
        {"codes": {"icd9": [""]}},
        {"codes": {"icd9": [250]}},
        {"codes": {"icd9cm": ["250"]}},
        {"exclude": {"icd11": ["250"]}},
        {"min_age_years": "40"},
        {"min_age_years": -1},
        {"min_age_years": True},
        {"any": []},
        {"any": {}},
        {"any": ["inpatient"]},
        {"any": [{"windowdays": 730}]},
        {"any": [{"source": "inpatient"}]},
        {"any": [{"sources": ["impatient"]}]},
        {"any": [{"sources": "inpatient"}]},
        {"any": [{"sources": []}]},
        {"any": [{"count": 0}]},
        {"any": [{"count": 1.5}]},
        {"any": [{"window_days": -1}]},
        {"any": [{"min_gap_days": "1"}]},
    ],
)
def test_invalid_rules_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        label_rules.parse_rules([GOOD | change])


def test_missing_fields_and_repeated_names_are_refused() -> None:
    for field in GOOD:
        with pytest.raises(ValueError):
            label_rules.parse_rules([{key: value for key, value in GOOD.items() if key != field}])
    with pytest.raises(ValueError, match="two rules"):
        label_rules.parse_rules([GOOD, GOOD])
    for wrong in (GOOD, "ccdss", 3):
        with pytest.raises(ValueError):
            label_rules.parse_rules(wrong)  # type: ignore[arg-type]


def test_comments_are_allowed() -> None:
    assert label_rules.parse_rules(
        [GOOD | {"source": "x", "note": "y", "reference": "z"}]
    ) == label_rules.parse_rules([GOOD])


def test_shipped_tables() -> None:
    ccdss, ccw = (
        label_rules.parse_rules(label_rules.load_rules(name)) for name in ("ccdss", "ccw")
    )
    assert (
        [rule.name for rule in ccdss] == [rule.name for rule in ccw] == ["chf", "copd", "diabetes"]
    )
    assert [rule.min_age_years for rule in ccdss] == [40, 35, 1]
    assert ccdss[2].clauses[1] == label_rules.RuleClause(
        sources=frozenset({"physician"}), count=2, window_days=730, min_gap_days=1
    )
    code = IcdCode("icd9", "398.91")
    assert [rule.matches(code) for rule in ccw] == [True, False, False]


def test_own_tables(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rule]]\nname = "x"\ncodes = { icd9 = ["1"] }\nany = [{ counts = 2 }]\n')
    with pytest.raises(UserError, match="counts") as refused:
        label_rules.load_rules(path)
    assert refused.value.exit_code == Exit.USAGE
    for text in ("", "x = [", "rules = []\n"):
        path.write_text(text)
        with pytest.raises(UserError):
            label_rules.load_rules(path)
    with pytest.raises(UserError, match="shipped are ccdss, ccw"):
        label_rules.load_rules("ccds")


def test_matching_by_prefix_family_and_exclusion() -> None:
    (rule,) = label_rules.parse_rules(
        [
            GOOD
            | {
                "codes": {"icd9": ["250", "v58.67"], "icd10": ["E11"]},
                "exclude": {"icd9": ["250.0"]},
            }
        ]
    )
    yes = [
        IcdCode("icd9", "250"),
        IcdCode("icd9cm", "250.10"),
        IcdCode("icd9", "V58.67"),
        IcdCode("icd10cm", "E11.9"),
        IcdCode("icd10", "E11"),
    ]
    no = [
        IcdCode("icd9", "250.00"),
        IcdCode("icd9", "E11.9"),
        IcdCode("icd10", "E10"),
        IcdCode("icd9", "025.0"),
        IcdCode("icd9", "V58.6"),
    ]
    assert all(map(rule.matches, yes))
    assert not any(map(rule.matches, no))


def brute(days: list[int], clause: label_rules.RuleClause) -> int | None:
    """The clause's day by the letter of the rule."""
    ends = []
    for start in days:
        chosen = [start]
        while len(chosen) < clause.count and (
            later := [d for d in days if d - chosen[-1] >= clause.min_gap_days]
        ):
            chosen.append(min(later))
        if len(chosen) == clause.count and (
            clause.window_days is None or chosen[-1] - start <= clause.window_days
        ):
            ends.append(chosen[-1])
    return min(ends, default=None)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-40, 60)), max_size=40),
    st.integers(1, 5),
    st.none() | st.integers(0, 80),
    st.sampled_from([1, 2, 7, 30, 10**9]),
)
def test_completion_equals_the_letter_of_the_rule(
    events: list[tuple[int, int]], count: int, window: int | None, gap: int
) -> None:
    clause = label_rules.RuleClause(
        sources=frozenset(label_rules.SOURCES), count=count, window_days=window, min_gap_days=gap
    )
    subject, day = (np.array([event[i] for event in events], np.int32) for i in (0, 1))
    who, when = label_rules.find_completed_sets(subject, day, clause)
    first = np.unique(who, return_index=True)[1]  # sets that start later end later
    who, when = who[first], when[first]
    wanted = {s: brute(sorted({d for own, d in events if own == s}), clause) for s in range(5)}
    assert dict(zip(who.tolist(), when.tolist(), strict=True)) == {
        s: d for s, d in wanted.items() if d is not None
    }


@needs_sample(MAP)
def test_defining_phecodes_come_from_the_map() -> None:
    tables = phecode_maps.read_map([MAP]).tables

    def rolled(name: str) -> dict[str, set[str]]:
        found = label_rules.find_defining_phecodes(
            label_rules.parse_rules(label_rules.load_rules(name)), tables
        )
        return {
            rule: {roll_up_phecode(phecode, "integer") for phecode in own}
            for rule, own in found.items()
        }

    assert rolled("ccw") == {
        "chf": {"428", "401"},
        "copd": {"496", "497"},
        "diabetes": {"249", "250", "366"},
    }
    assert rolled("ccdss") == {"chf": {"428"}, "copd": {"496"}, "diabetes": {"250"}}


def test_a_stored_landmark_is_read() -> None:
    from dataclasses import asdict

    from bitimely_core.claims.event_labels import Landmark
    from bitimely_core.schemas.tokens import LandmarkOptions

    stored = asdict(Landmark(landmark_days=365))
    assert LandmarkOptions.model_validate(stored).model_dump() == stored
