"""Arguments and tables of `build_sequences` that are refused, empty, or of other types."""

from __future__ import annotations

from datetime import date
from typing import Any

import polars as pl
import pytest
from engines import SPARK_ENGINE
from naive_builder import RULES, random_tables

from bitimely_core.claims.build import build_sequences


def table(rows: list[tuple[Any, ...]], names: str, **types: Any) -> pl.DataFrame:
    columns = names.split()
    return pl.DataFrame(
        rows, schema={name: types.get(name, pl.String) for name in columns}, orient="row"
    )


def small(**params: Any) -> dict[str, Any]:
    events = table(
        [("a", "2001-01-01", "496"), ("b", "2001-01-02", "4280")], "subject_id date code"
    )
    return build_sequences(
        params.pop("events", events),
        params.pop("subjects", None),
        params.pop("phemap", random_tables(0)[2]),
        **{"select": False, "min_codes": 1} | params,
    )


@pytest.mark.parametrize(
    "params",
    [
        *(
            {name: "other"}
            for name in (
                "engine",
                "vocab",
                "level",
                "leakage",
                "population",
                "denominator",
                "dedupe",
                "min_codes_unit",
                "time",
            )
        ),
        *({name: value} for name in ("pad_undotted", "select") for value in (None, 1, "frequency")),
        *(
            {name: value}
            for name in ("top_k", "min_codes", "max_events", "min_case_support")
            for value in (-1, 1.5, True, "1")
        ),
        {"max_events": 0},
        {"min_case_support": 0},
        {"min_case_fraction": 1.1},
        {"threshold": "5"},
        {"threshold": float("nan")},
        {"fallback": ["exact", "nearest"]},
        {"fallback": "exact"},
        {"landmark": {"days": 3}},
        {"landmark": {"landmark_days": 3, "date": "2001-01-01"}},
        {"landmark": {"date": "soon"}},
        {"landmark": {"landmark_days": -1}},
        {"landmark": {"landmark_days": 1.0}},
        {"split": {"seeds": 1}},
        {"split": {"seed": "1"}},
        {"split": {"train": 80}},
        {"split_override": {"a": "train"}},
        {"split_override": {"a": "train", "b": "tuning"}},
        {"rules": [{"name": "x"}]},
        {"subjects": table([("a",), ("a",)], "subject_id")},
        {"subjects": table([(None,)], "subject_id")},
        {"subjects": table([(1,)], "subject_id", subject_id=pl.Int64)},
        {"subjects": table([("a", 19600101)], "subject_id birth", birth=pl.Int64)},
        {"subjects": table([("1960-01-01",)], "birth")},
        {"events": table([("a", "2001-01-01", 496)], "subject_id date code", code=pl.Int64)},
        {"events": table([("a", "2001-01-01", 250.0)], "subject_id date code", code=pl.Float64)},
        {"events": table([("a", 20010101, "496")], "subject_id date code", date=pl.Int64)},
        {"events": table([(1, "2001-01-01", "496")], "subject_id date code", subject_id=pl.Int32)},
        {"events": table([(None, "2001-01-01", "496")], "subject_id date code")},
        {"events": table([("a", "bad", "496", "icd8")], "subject_id date code vocab")},
        {"events": table([("a", "2001-01-01")], "subject_id date")},
        {"phemap": table([("icd9", "496")], "vocab code")},
        {"phemap": table([("icd8", "496", "496")], "vocab code phecode")},
        {"phemap": table([("icd9", "496", 496.0)], "vocab code phecode", phecode=pl.Float64)},
    ],
)
def test_what_is_no_value_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        small(**params)


def test_unknown_keywords_and_other_types_are_refused() -> None:
    with pytest.raises(TypeError):
        small(treshold=5)
    with pytest.raises(TypeError):
        small(events=[])


def test_none_stands_for_a_default_that_is_none() -> None:
    assert small(landmark=None, max_events=None, split=None, split_override=None) == small()


@pytest.mark.parametrize("engine", ["polars", SPARK_ENGINE])
def test_tables_without_rows(engine: str) -> None:
    none = table([], "subject_id date code")
    empty = small(events=none, engine=engine, rules=RULES)
    assert (empty["labels"], empty["sequences"], empty["selected"]) == ({}, {}, [])
    cohort = table([(7, "1960-01-01")], "subject_id birth", subject_id=pl.Int64)
    alone = small(
        events=none,
        subjects=cohort,
        engine=engine,
        rules=RULES,
        time="age30",
        dedupe="first_per_age30",
    )
    assert alone["labels"] == {"7": {"diabetes": 0, "chf": 0, "copd": 0}}
    assert small(events=none, subjects=cohort, rules=RULES, landmark={}, engine=engine)[
        "labels"
    ] == {"7": dict.fromkeys(("diabetes", "chf", "copd"))}
    rubbish = table([("a", None, None)], "subject_id date code", date=pl.Null, code=pl.Null)
    assert small(events=rubbish, engine=engine, dedupe="month")["funnel"]["bad_date"] == 1


@pytest.mark.parametrize("limit", [{"min_age_years": 0}, {}])
def test_a_limit_of_no_years_is_a_limit(limit: dict[str, int]) -> None:
    """Section 6, unknown age: no birth date, an age limit and an onset without it give no label;
    without an event the label is 0.
    """
    events = table(
        [(s, "2001-01-01", "496") for s in ("born", "unborn", "old")]
        + [("other", "2001-01-01", "4280")],
        "subject_id date code",
    )
    cohort = table(
        [("born", "2001-01-01"), ("unborn", None), ("old", "1960-01-01"), ("other", None)],
        "subject_id birth",
    )
    rule = {"name": "copd", "codes": {"icd9": ["496"]}, "any": [{}], **limit}
    found = {
        s: of["copd"]
        for s, of in small(events=events, subjects=cohort, rules=[rule])["labels"].items()
    }
    assert found == {"born": 1, "unborn": None if limit else 1, "old": 1, "other": 0}


def test_typed_dates_and_integers_and_extra_columns() -> None:
    rows = [
        (10, date(2001, 1, 1), "496", "x", 3),
        (9, date(2001, 1, 3), "496", "y", 4),
        (10, date(2001, 1, 2), "4280", "z", 5),
    ]
    events = table(
        rows,
        "subject_id date code row birth_day",
        subject_id=pl.Int64,
        date=pl.Date,
        birth_day=pl.Int64,
    )
    cohort = table(
        [(10, date(1960, 1, 1), 1)],
        "subject_id birth code",
        subject_id=pl.Int64,
        birth=pl.Date,
        code=pl.Int64,
    )
    found = small(events=events, subjects=cohort, split_override={"9": "test", "10": "train"})
    assert list(found["sequences"]) == ["9", "10"]
    assert found["sequences"]["10"]["phecodes"] == ["496", "428"]
    assert found["sequences"]["10"]["age0_months"] == 492
    assert found["split"] == {"9": "test", "10": "train"}
