"""Cohorts against a reading of the definitions row by row with pandas, edge days included; what
definitions are refused.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from bitimely_cli.main import main
from bitimely_core.claims import cohorts, sequence_plan
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.errors import Exit, UserError

CODES = [
    IcdCode("icd9cm", "250.00"),
    IcdCode("icd9cm", "401.9"),
    IcdCode("icd10cm", "E11.9"),
    IcdCode("icd9cm", "428.0"),
]
DIABETES: dict[str, Any] = {
    "name": "diabetes",
    "codes": {"icd9": ["250"], "icd10": ["E11"]},
    "any": [{"sources": ["inpatient"]}, {"sources": ["physician"], "count": 2, "window_days": 20}],
}
CHF: dict[str, Any] = {"name": "chf", "codes": {"icd9": ["428"]}, "any": [{}]}


def draw_tables(draw: np.random.Generator, n: int = 60) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Subjects and rows in so few days that events fall on edges."""

    def some(low: int, high: int, share: float) -> list[int | None]:
        return [int(v) if draw.random() < share else None for v in draw.integers(low, high, n)]

    rows = pl.DataFrame(
        {
            "subject": draw.integers(0, n, 5 * n),
            "day": draw.integers(0, 60, 5 * n),
            "code": draw.choice(len(CODES), 5 * n, p=[0.25, 0.45, 0.15, 0.15]),
            "source": draw.choice([0, 1, 2], 5 * n),
        },
        schema={"subject": pl.Int32, "day": pl.Int32, "code": pl.Int32, "source": pl.Int8},
    )
    first = rows.group_by("subject").agg(first_day=pl.col("day").min())
    subjects = pl.DataFrame(
        {
            "subject_id": draw.permutation(n) * 3,
            "birth_day": some(-22000, -21990, 0.8),
            "sex": [None if draw.random() < 0.1 else int(draw.integers(0, 3)) for _ in range(n)],
            "obs_start": some(0, 20, 0.7),
            "obs_end": some(30, 60, 0.7),
            "death_day": some(20, 60, 0.2),
            "split": draw.choice(["train", "test"], n),
        },
        schema_overrides=dict.fromkeys(("birth_day", "obs_start", "obs_end", "death_day"), pl.Int32)
        | {"sex": pl.UInt8},
    )
    subjects = subjects.with_columns(subject=pl.int_range(pl.len(), dtype=pl.Int32)).join(
        first, on="subject", how="left", maintain_order="left"
    )
    return subjects.drop("subject"), rows


def draw_definition(draw: np.random.Generator) -> dict[str, Any]:
    at = str(draw.choice(["observation_start", "first_row", "event", "date"]))
    index: dict[str, Any] = {
        "at": at,
        "after_days": int(draw.integers(0, 15)),
        "min_observation_days": int(draw.choice([0, 5, 10])),
    }
    index |= {"event": {"rule": "chf"}, "date": {"date": "1970-01-25"}}.get(at, {})
    index |= draw.choice(
        [
            {},
            {"require_start": True},
            {"min_age_years": 60},
            {"max_age_years": 60},
            {"sex": "female"},
        ]
    )
    rule = DIABETES | draw.choice([{}, {"min_age_years": 60}])
    outcome: dict[str, Any] = {"rule": "diabetes", "events": str(draw.choice(["first", "all"]))}
    outcome |= draw.choice([{}, {"lookback_days": 0}, {"lookback_days": 8}])
    definition = {"name": "x", "rule": [rule, CHF], "index": index, "outcome": outcome}
    if draw.random() < 0.2:
        return definition | {"outcome": outcome | {"kind": "prevalent"}}
    outcome |= draw.choice([{}, {"washout_days": 10}, {"exclude_prior": False}])
    low = int(draw.integers(0, 3))
    risk: dict[str, Any] = {
        "from_day": low,
        **draw.choice([{}, {"to_day": low}, {"to_day": low + 12}]),
    }
    risk |= draw.choice([{}, {"min_days": 0}, {"min_days": 6}])
    return definition | {
        "risk": risk | draw.choice([{}, {"keep_outcomes": True}, {"keep_deaths": True}])
    }


def find_met_days(
    rows: pd.DataFrame, rule: dict[str, Any], birthday: float
) -> tuple[list[int], list[int]]:
    """Days on which a rule with at most two dates within a window is met, and days of rows with its
    codes.
    """
    text = rows["code"].map(lambda i: (CODES[i].family, CODES[i].code.replace(".", "")))
    mine = rows[
        text.map(lambda t: t[1].startswith(tuple(rule["codes"].get(t[0], ["#"]))))
        & ~(rows["day"] < birthday)
    ]
    met: set[int] = set()
    for clause in rule["any"]:
        numbers = [SOURCES.index(name) for name in clause.get("sources", SOURCES)]
        own = sorted(set(mine.loc[mine["source"].isin(numbers), "day"]))
        if clause.get("count", 1) == 1:
            met |= set(own)
        else:
            met |= {b for a, b in itertools.pairwise(own) if b - a <= clause["window_days"]}
    return sorted(met), sorted(mine["day"])


def read_subject(
    definition: dict[str, Any], who: pd.Series, rows: pd.DataFrame, data_end: int
) -> dict[str, Any]:
    """The record of one subject by the letter of docs/pophr.md."""
    index, outcome, risk = definition["index"], definition["outcome"], definition.get("risk", {})
    rule = definition["rule"][0]
    known = {
        name: None if pd.isna(who[name]) else int(who[name])
        for name in ("birth_day", "sex", "obs_start", "obs_end", "death_day", "first_day")
    }
    birthday = -np.inf
    if rule.get("min_age_years") and known["birth_day"] is not None:
        birth = pd.Timestamp("1970-01-01") + pd.Timedelta(days=known["birth_day"])
        birthday = (birth + pd.DateOffset(years=60) - pd.Timestamp("1970-01-01")).days
    met, diagnoses = find_met_days(rows, rule, birthday)
    events = met[:1] if outcome["events"] == "first" else met
    start = known["obs_start"]
    if start is None and not index.get("require_start"):
        start = known["first_day"]
    end = known["obs_end"] if known["obs_end"] is not None else data_end
    if known["death_day"] is not None:
        end = min(end, known["death_day"])
    chf = find_met_days(rows, CHF, -np.inf)[0]
    anchor = {
        "observation_start": start,
        "first_row": known["first_day"],
        "event": chf[0] if chf else None,
        "date": 24,
    }[index["at"]]
    if anchor is None or start is None:
        return {"left_out": "no index day"}
    day = anchor + index["after_days"]
    if not start <= day <= end:
        return {"left_out": "outside the observation"}
    if "min_age_years" in index or "max_age_years" in index:
        if known["birth_day"] is None:
            return {"left_out": "age"}
        birth, now = (
            pd.Timestamp("1970-01-01") + pd.Timedelta(days=d) for d in (known["birth_day"], day)
        )
        years = now.year - birth.year - ((now.month, now.day) < (birth.month, birth.day))
        if years < index.get("min_age_years", 0) or years > index.get("max_age_years", 200):
            return {"left_out": "age"}
    if "sex" in index and known["sex"] != 2:
        return {"left_out": "sex"}
    if day - start < index["min_observation_days"]:
        return {"left_out": "short observation"}
    if met and rule.get("min_age_years") and known["birth_day"] is None:
        return {"left_out": "unknown age"}
    lookback = outcome.get("lookback_days", 10**6)
    if outcome.get("kind") == "prevalent":
        return {
            "left_out": None,
            "index_day": day,
            "outcome_day": max((e for e in events if day - lookback < e <= day), default=None),
        }
    if outcome.get("washout_days") and diagnoses and diagnoses[0] < start + outcome["washout_days"]:
        return {"left_out": "diagnosis in the washout"}
    begin = day + risk["from_day"]
    if outcome.get("exclude_prior", True) and any(day - lookback < e < begin for e in events):
        return {"left_out": "prior outcome"}
    stop = min(end, day + risk["to_day"]) if "to_day" in risk else end
    if stop < begin:
        return {"left_out": "no time at risk"}
    at_risk = [e for e in events if begin <= e <= stop]
    least = risk.get("min_days", risk.get("to_day", risk["from_day"]) - risk["from_day"])
    died = known["death_day"] is not None and known["death_day"] <= stop
    if (
        stop - begin < least
        and not (risk.get("keep_outcomes") and at_risk)
        and not (risk.get("keep_deaths") and died)
    ):
        return {"left_out": "short follow-up"}
    return {
        "left_out": None,
        "index_day": day,
        "risk_start": begin,
        "risk_end": stop,
        "outcome_day": min(at_risk, default=None),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3))]
)
def test_records_equal_the_naive_reading(block: int) -> None:
    reasons: set[str | None] = set()
    for seed in range(block * 30, block * 30 + 30):
        draw = np.random.default_rng(seed)
        subjects, rows = draw_tables(draw)
        definition = draw_definition(draw)
        data_end = int(rows["day"].max())  # type: ignore[arg-type]
        record = cohorts.apply_cohort(
            CohortRules.model_validate(definition), rows, CODES, subjects, data_end
        )
        table, frame = (
            pd.DataFrame(rows.to_dict(as_series=False)),
            pd.DataFrame(subjects.to_dict(as_series=False)),
        )
        for i, found in enumerate(record.iter_rows(named=True)):
            expected = read_subject(
                definition, frame.iloc[i], table[table["subject"] == i], data_end
            )
            assert {name: found[name] for name in expected} == expected, (seed, i, definition)
            reasons.add(expected["left_out"])
    assert len(reasons) >= 10, reasons


def one(**facts: Any) -> pl.DataFrame:
    days = {
        "first_day": 0,
        "birth_day": -9000,
        "obs_start": 0,
        "obs_end": 1000,
        "death_day": None,
        "diagnosis_day": None,
    }
    kinds = dict.fromkeys(days, pl.Int64) | {"sex": pl.UInt8}
    return pl.DataFrame(
        [{"subject_id": 7, "split": "train", "sex": 1, **days, **facts}], schema_overrides=kinds
    )


@pytest.mark.parametrize(
    ("facts", "outcomes", "reason", "outcome_day"),
    [
        ({}, [], None, None),
        # the last day of the washout
        ({"diagnosis_day": 364}, [], "diagnosis in the washout", None),
        ({"diagnosis_day": 365}, [], None, None),  # the day after it
        ({"diagnosis_day": -3}, [], "diagnosis in the washout", None),  # before the observation
        ({}, [365], "prior outcome", None),  # on the index day
        ({}, [366], None, 366),  # on the first day at risk
        ({}, [730], None, 730),  # on the last
        ({}, [731], None, None),
        ({"obs_end": 500}, [500], None, 500),  # on the last day of follow-up
        ({"obs_end": 500}, [501], "short follow-up", None),
        ({"obs_end": 729}, [], "short follow-up", None),
        ({"obs_end": 730}, [], None, None),
        ({"obs_end": 366}, [], "short follow-up", None),
        ({"obs_end": 365}, [], "no time at risk", None),
        ({"obs_end": 364}, [], "outside the observation", None),
        ({"death_day": 400}, [], "short follow-up", None),
        # observation starts with the first row
        ({"obs_start": None, "first_day": 10}, [], None, None),
        ({"obs_start": None, "first_day": None}, [], "no index day", None),
        ({"birth_day": None}, [], "age", None),
        ({"birth_day": -6209}, [], None, None),  # born on 1 January 1953, 18 on the index day
        ({"birth_day": -6208}, [], "age", None),
    ],
)
def test_edge_days_of_a_shipped_definition(
    facts: dict[str, Any], outcomes: list[int], reason: str | None, outcome_day: int | None
) -> None:
    events = pl.DataFrame(
        {"subject": [0] * len(outcomes), "day": outcomes},
        schema={"subject": pl.Int64, "day": pl.Int64},
    )
    found = cohorts.select_subjects(
        cohorts.load_cohort("diabetes-incident"), one(**facts), events
    ).row(0, named=True)
    assert (found["left_out"], found["outcome_day"]) == (reason, outcome_day)


@pytest.mark.slow
@pytest.mark.parametrize("dated", [False, True])
def test_sequences_of_a_cohort_are_those_of_its_members(dated: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    raw, home = tmp_path / "raw", tmp_path / "w"
    raw.mkdir()
    start = pd.Timestamp("2010-03-01")
    n = 150
    claims = pd.DataFrame(
        {
            "subject": draw.integers(0, n, 6 * n),
            "day": draw.integers(0, 60, 6 * n),
            "source": draw.choice([0, 2], 6 * n),
        }
    )
    claims["code"] = draw.choice(len(CODES) - 2, 6 * n, p=[0.3, 0.7])
    claims = claims.drop_duplicates()
    texts = {
        "patient_id": "P" + claims["subject"].astype(str),
        "date": (start + pd.to_timedelta(claims["day"], "D")).dt.strftime("%Y-%m-%d"),
    }
    texts |= {
        "icd9": claims["code"].map(lambda i: CODES[i].code),
        "source": claims["source"].map(lambda i: SOURCES[i]),
    }
    pd.DataFrame(texts).to_csv(raw / "claims.csv", index=False)
    begins = [int(v) if draw.random() < 0.7 else None for v in draw.integers(0, 20, n)]
    days = [
        None if day is None else (start + pd.Timedelta(days=day)).strftime("%Y-%m-%d")
        for day in begins
    ]
    people = {
        "patient_id": [f"P{i}" for i in range(n)],
        "birth_date": "1940-05-17",
        "obs_start": days,
    }
    pd.DataFrame(people).to_csv(raw / "patients.csv", index=False)
    (raw / "icd9_phecode.csv").write_text("icd9,phecode\n250.00,250.2\n401.9,401.1\n")
    definition = {
        "name": "x",
        "rule": [DIABETES],
        "index": {"at": "observation_start", "after_days": 15, "min_observation_days": 5},
        "outcome": {"rule": "diabetes", "events": "first", "washout_days": 3},
        "risk": {"from_day": 1, "to_day": 12},
    }
    (tmp_path / "x.toml").write_text(write_toml(definition))
    argv = [
        "ingest",
        "pophr",
        str(raw),
        "--cohort",
        str(tmp_path / "x.toml"),
        "--no-select",
        "--min-codes",
        "1",
        "--small-counts",
    ]
    argv += [
        "--leakage",
        "drop-phecode",
        "--keep-ids",
        str(tmp_path / "ids.csv"),
        *(["--keep-dates"] if dated else []),
    ]
    assert main([*argv, "-w", str(home)]) == 0
    folder = home / "tokens" / "pophr"
    names = dict(pl.read_csv(tmp_path / "ids.csv").select("new", "subject_id").iter_rows())
    built = pl.concat([pl.read_parquet(path) for path in folder.glob("sequences-*.parquet")])
    record = pl.read_parquet(folder / "cohort.parquet")
    assert record.height == claims["subject"].nunique() + len(
        set(range(n)) - set(claims["subject"])
    )
    assert "250" not in pl.read_parquet(folder / "vocab.parquet")["code"], (
        "drop-phecode knows the codes of the outcome"
    )
    expected = {}
    for i in range(n):
        own = claims[claims["subject"] == i]
        facts = {
            "birth_day": -10820,
            "sex": None,
            "obs_start": begins[i],
            "obs_end": None,
            "death_day": None,
        }
        who = pd.Series(facts | {"first_day": own["day"].min() if len(own) else None}, dtype=object)
        found = read_subject(definition, who, own, int(claims["day"].max()))
        if found["left_out"] is None:
            events = own[(own["day"] <= found["index_day"]) & (own["code"] == 1)]["day"].nunique()
            if events:
                expected[f"P{i}"] = (int(found["outcome_day"] is not None), events)
    assert {
        names[s]: (y, len(c))
        for s, y, c in built.select("subject_id", "y_diabetes", "codes").iter_rows()
    } == expected
    assert {0, 1} == {y for y, _ in expected.values()}
    if dated:
        labels = pl.read_parquet(folder / "meds" / "labels" / "diabetes" / "0.parquet")
        first = dict(record.select("subject_id", "index_day").iter_rows())
        epoch = pd.Timestamp("1970-01-01").to_pydatetime()
        assert {
            s: (t - epoch).days
            for s, t in labels.select("subject_id", "prediction_time").iter_rows()
        } == {s: first[s] for s in labels["subject_id"]}
        _check_labels_of_times(tmp_path, home, record)


def _check_labels_of_times(tmp_path: Path, home: Path, record: pl.DataFrame) -> None:
    """Labels of MEDS are events within a horizon; of members observed for less there are none."""
    argv = ["tokenize", "pophr", "-w", str(home), "--cohort", str(tmp_path / "x.toml")]
    argv += ["--time-to-event", "4,9", "--no-select", "--min-codes", "1", "--name", "times"]
    assert main(argv) == 0
    for days in (4, 9):
        folder = home / "tokens" / "times" / "meds" / "labels" / f"diabetes@{days}d"
        labels = pl.read_parquet(folder / "0.parquet")
        stored = dict(labels.select("subject_id", "boolean_value").iter_rows())
        tokens = home / "tokens" / "times"
        members = pl.concat([pl.read_parquet(path) for path in tokens.glob("sequences-*.parquet")])
        expected = {}
        rows = record.filter(pl.col("subject_id").is_in(members["subject_id"].implode()))
        for row in rows.iter_rows(named=True):
            last = row["index_day"] + days
            has_event = row["outcome_day"] is not None and row["outcome_day"] <= last
            if has_event or row["risk_end"] >= last:
                expected[row["subject_id"]] = has_event
        assert stored == expected
        assert set(expected.values()) == {True, False}


@pytest.mark.parametrize("seed", range(8))
def test_controls_are_matched(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = 300
    record = pl.DataFrame(
        {
            "subject_id": draw.permutation(n),
            "sex": draw.choice([0, 1, 2], n, p=[0.1, 0.45, 0.45]).astype(np.uint8),
            "split": draw.choice(["train", "test"], n),
            "age_days": [
                None if draw.random() < 0.05 else int(a) for a in draw.integers(20000, 23000, n)
            ],
            "outcome_day": [5 if draw.random() < 0.25 else None for _ in range(n)],
            "left_out": ["age" if draw.random() < 0.1 else None for _ in range(n)],
        }
    )
    definition = {
        "name": "x",
        "rule": [DIABETES],
        "outcome": {"rule": "diabetes"},
        "controls": {"ratio": 2, "caliper_years": 1, "seed": seed},
    }
    rules = CohortRules.model_validate(definition)
    found = cohorts.match_controls(rules, record)
    assert (
        cohorts.match_controls(rules, record.sample(fraction=1.0, shuffle=True, seed=1))
        .sort("subject_id")
        .equals(found.sort("subject_id"))
    )
    table = pd.DataFrame(found.to_dict(as_series=False)).set_index("subject_id")
    members = table[table["left_out"].isna()]
    controls, cases = (
        members[members["outcome_day"].isna()],
        members[members["outcome_day"].notna()],
    )
    assert len(cases) > 20
    assert (cases["case"] == cases.index).all()
    of = table.loc[controls["case"]]
    assert (controls["sex"].to_numpy() == of["sex"].to_numpy()).all()
    assert (controls["split"].to_numpy() == of["split"].to_numpy()).all()
    assert (abs(controls["age_days"].to_numpy() - of["age_days"].to_numpy()) <= 365.25).all()
    assert controls["case"].value_counts().between(1, 2).all()
    assert set(controls["case"]) == set(cases.index)
    free = table[
        (table["left_out"] == "unmatched")
        & table["outcome_day"].isna()
        & table["age_days"].notna()
        & (table["sex"] > 0)
    ]
    for who, row in table[
        table["outcome_day"].notna()
        & table["age_days"].notna()
        & (table["sex"] > 0)
        & (table["left_out"] != "age")
    ].iterrows():
        own = free[
            (free["sex"] == row["sex"])
            & (free["split"] == row["split"])
            & (abs(free["age_days"] - row["age_days"]) <= 365.25)
        ]
        assert own.empty or (controls["case"] == who).sum() == 2, (
            "a case without all its controls leaves none free"
        )
    assert (
        table.loc[record.filter(pl.col("left_out") == "age")["subject_id"].to_list(), "left_out"]
        .eq("age")
        .all()
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index": {"washout": 3}}, "washout"),
        ({"outcome": {"rule": "gout"}}, "diabetes"),
        ({"index": {"at": "event"}}, "index.rule"),
        ({"index": {"rule": "diabetes"}}, "index.rule"),
        ({"index": {"at": "date"}}, "index.date"),
        ({"risk": {"from_day": 5, "to_day": 4}}, "to_day"),
        ({"risk": {"from_day": -1}}, "greater"),
        ({"outcome": {"rule": "diabetes", "kind": "prevalent", "washout_days": 3}}, "prevalent"),
        ({"controls": {"ratio": 0}}, "greater"),
        ({"controls": {"ratio": 1, "caliper": 2}}, "caliper"),
        ({"index": {"after_days": "3"}}, "integer"),
        ({"rule": [DIABETES | {"any": []}]}, "rule.0.any: .* at least 1 item"),
        ({"name": "Über"}, "pattern"),
    ],
)
def test_definitions_that_mean_nothing_are_refused(
    change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    definition = {"name": "x", "rule": [DIABETES], "outcome": {"rule": "diabetes"}} | change
    path = tmp_path / "x.toml"
    path.write_text(write_toml(definition))
    with pytest.raises(UserError, match=text) as refused:
        cohorts.load_cohort(path)
    assert refused.value.exit_code == Exit.USAGE


def write_toml(definition: dict[str, Any]) -> str:
    """TOML of nested tables, inline."""

    def show(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {show(one)}" for key, one in value.items()) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(map(show, value)) + "]"
        return f"'{value}'" if isinstance(value, str) else str(value).lower()

    return "".join(f"{key} = {show(value)}\n" for key, value in definition.items())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cohort", "gout"], "shipped are"),
        (["--cohort", "diabetes-incident", "--landmark", "30,0,30"], "both set index days"),
        (["--cohort", "dated.toml"], "--keep-dates"),
    ],
)
def test_choices_beside_a_cohort_are_checked_before_the_ingest(
    flags: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    definition = {
        "name": "x",
        "rule": [DIABETES],
        "index": {"at": "date", "date": "2010-01-01"},
        "outcome": {"rule": "diabetes"},
    }
    (tmp_path / "dated.toml").write_text(write_toml(definition))
    (tmp_path / "claims.csv").write_text("patient_id,date,icd9\na,2010-01-01,428.0\n")
    (tmp_path / "map.csv").write_text("icd9,phecode\n428.0,428\n")
    assert (
        main(["ingest", "pophr", ".", "--phecode-map", "map.csv", *flags, "-w", "w"]) == Exit.USAGE
    )
    assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("w/cache/**/*.parquet"))


def test_a_misspelt_choice_of_sequences_is_refused() -> None:
    with pytest.raises(UserError, match="leakage") as refused:
        sequence_plan.parse_choices(leakages="keep")
    assert refused.value.exit_code == Exit.USAGE


def test_shipped_definitions_are_read_and_unknown_names_list_them() -> None:
    assert {cohorts.load_cohort(name).outcome_rule.name for name in cohorts.SHIPPED} == {
        "chf",
        "diabetes",
    }
    with pytest.raises(UserError, match="chf-incident, diabetes-codes, diabetes-incident"):
        cohorts.load_cohort("gout")
