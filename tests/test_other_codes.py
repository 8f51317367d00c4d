"""Codes of other vocabularies, their numbers and times of day, against numpy on the raw tables."""

from __future__ import annotations

import csv
import functools
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from bitimely_cli.main import main
from bitimely_core import cache, tokens, workflows

SUBJECTS = 120
START = datetime(2005, 1, 1)
LAB, DRUG, RARE, ODD = "LAB//GLUCOSE//mg", "RXNORM//860975", "NOTE//dr smith", "VISIT"
Row = tuple[int, datetime, str, float | None]


@functools.cache
def draw_history() -> list[Row]:
    """Diagnoses, drugs and measurements; numbers of the test split are far above those of the
    training split.
    """
    draw, rows = np.random.default_rng(0), []
    for subject in range(1, SUBJECTS + 1):
        high = 1000.0 * (subject % 10 == 0)  # of the test split
        for _ in range(12):
            at = START + timedelta(minutes=int(draw.integers(0, 3 * 365 * 1440)))
            kind = draw.choice(
                ["DIAGNOSIS//ICD//9//25000", "DIAGNOSIS//ICD//9//4019", DRUG, LAB, LAB, ODD]
            )
            rows.append(
                (
                    subject,
                    at,
                    str(kind),
                    round(float(draw.gamma(4, 25)), 1) + high if kind == LAB else None,
                )
            )
        rows += [(subject, START, LAB, float("nan"))] * (subject == 5) + [
            (subject, START, RARE, None)
        ] * (subject < 6)
    return sorted(rows, key=lambda row: (row[0], row[1]))


def write_meds(folder: Path, rows: list[Row]) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "metadata").mkdir()
    schema = {
        "subject_id": pl.Int64,
        "time": pl.Datetime("us"),
        "code": pl.String,
        "numeric_value": pl.Float32,
    }
    births = [(s, datetime(1950, 1, 1), "MEDS_BIRTH", None) for s in range(1, SUBJECTS + 1)]
    static = [(s, None, "GENDER//F", None) for s in range(1, SUBJECTS + 1)]
    pl.DataFrame([*static, *births, *rows], schema=schema, orient="row").sort(
        "subject_id", "time"
    ).write_parquet(folder / "data" / "0.parquet")
    parts = [
        (s, "held_out" if s % 10 == 0 else "tuning" if s % 10 == 1 else "train")
        for s in range(1, SUBJECTS + 1)
    ]
    pl.DataFrame(parts, schema=["subject_id", "split"], orient="row").write_parquet(
        folder / "metadata" / "subject_splits.parquet"
    )
    with (folder.parent / "map.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("icd9", "phecode"), ("250.00", "250.2"), ("401.9", "401.1")])


def ingest(root: Path, name: str, *more: str) -> Path:
    argv = [
        "ingest",
        "pophr",
        root / "raw",
        "--source",
        "meds",
        "--map",
        root / "map.csv",
        "--keep-ids",
        root / f"{name}.csv",
        "--min-codes",
        "1",
    ]
    assert main([str(word) for word in [*argv, "--no-select", *more, "-w", root / name]]) in {0, 3}
    return root / name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    write_meds(folder / "raw", draw_history())
    ingest(folder, "days", "--codes", "all")
    ingest(folder, "minutes", "--codes", "all", "--time-unit", "minute")
    return folder


def build(root: Path, home: str, name: str, **choices: Any) -> tokens.EventSequences:
    workflows.tokenize(
        "pophr",
        workspace=root / home,
        name=name,
        options={"select": False, "min_codes": 1, **choices},
    )
    made = tokens.open_tokens(root / home / "tokens" / name)
    assert isinstance(made, tokens.EventSequences)
    return made


def read_stored(root: Path, home: str, made: tokens.EventSequences) -> dict[int, dict[str, Any]]:
    """Raw id -> the stored row."""
    old = dict(pl.read_csv(root / f"{home}.csv").select("new", "subject_id").iter_rows())
    frames = [pl.read_parquet(made.folder / shard) for shard in made.manifest.shards]
    return {old[row["subject_id"]]: row for row in pl.concat(frames).iter_rows(named=True)}


def name_code(text: str) -> str:
    return {
        "DIAGNOSIS//ICD//9//25000": "250",
        "DIAGNOSIS//ICD//9//4019": "401",
        ODD: "CODE//VISIT",
    }.get(text, text)


def test_codes_of_other_vocabularies_are_tokens_of_their_own(root: Path) -> None:
    made = build(root, "days", "plain")
    assert set(made.vocabulary[5:]) == {"250", "401", LAB, DRUG, "CODE//VISIT"}, (
        "no births, no static rows, no code of five people"
    )
    stored = read_stored(root, "days", made)
    for subject, row in stored.items():
        expected = {
            ((t - START).days, name_code(code)) for s, t, code, _ in draw_history() if s == subject
        }
        first = min(day for day, _ in expected)
        found = {
            (round(t * 30.4375) + first, made.vocabulary[c])
            for c, t in zip(row["codes"], row["times"], strict=True)
        }
        assert found == {(day, "[UNK]" if code == RARE else code) for day, code in expected}
    assert "dr smith" not in (made.folder / "vocab.parquet").read_bytes().decode("latin-1")
    assert len(stored) == SUBJECTS


def test_deciles_are_those_of_the_training_split_alone(root: Path) -> None:
    made = build(root, "days", "deciles", values="deciles", dedupe="none")
    train = [
        v
        for s, _, code, v in draw_history()
        if code == LAB and v is not None and np.isfinite(v) and s % 10 > 1
    ]
    cuts = np.quantile(np.array(train, np.float32), np.arange(1, 10) / 10, method="inverted_cdf")
    kept = pl.read_parquet(made.folder / "values.parquet").row(0, named=True)
    assert kept["code"] == LAB
    np.testing.assert_array_equal(np.array(kept["cuts"], np.float32), cuts)
    assert (kept["n_values"], kept["n_subjects"]) == (
        len(train),
        len({s for s, _, c, v in draw_history() if c == LAB and v is not None and s % 10 > 1}),
    )
    assert kept["mean"] == pytest.approx(np.mean(train), rel=1e-6)
    for subject, row in read_stored(root, "days", made).items():
        mine = [v for s, _, code, v in draw_history() if s == subject and code == LAB]
        expected = sorted(
            f"{LAB}//d{1 + (cuts < np.float32(v)).sum():02d}"
            for v in mine
            if v is not None and np.isfinite(v)
        )
        tokens_of = [made.vocabulary[c] for c in row["codes"]]
        assert sorted(code for code in tokens_of if code.startswith(LAB)) == expected
        assert subject % 10 or all(
            code.endswith("//d10") for code in tokens_of if code.startswith(LAB)
        ), "the test split is far above"


def test_cut_points_do_not_move_with_other_splits(root: Path, tmp_path: Path) -> None:
    rows = [
        (s, t, code, None if v is None else v * 7 if s % 10 < 2 else v)
        for s, t, code, v in draw_history()
    ]
    write_meds(tmp_path / "raw", rows)
    ingest(tmp_path, "days", "--codes", "all")
    one, other = (
        build(root, "days", "deciles", values="deciles", dedupe="none"),
        build(tmp_path, "days", "deciles", values="deciles", dedupe="none"),
    )
    a, b = (pl.read_parquet(made.folder / "values.parquet") for made in (one, other))
    assert a.equals(b)


def test_raw_numbers_are_stored_beside_their_events(root: Path) -> None:
    made = build(root, "minutes", "raw", values="raw", dedupe="none")
    for subject, row in read_stored(root, "minutes", made).items():
        expected = sorted(
            (t, np.float32(v))
            for s, t, code, v in draw_history()
            if s == subject and code == LAB and v is not None and np.isfinite(v)
        )
        first = min(t for s, t, *_ in draw_history() if s == subject)
        found = [
            (t, np.float32(v))
            for t, v in zip(row["times"], row["values"], strict=True)
            if np.isfinite(v)
        ]
        assert [v for _, v in found] == [v for _, v in expected]
        exact = [(t - first).total_seconds() / 86400 / 30.4375 for t, _ in expected]
        np.testing.assert_allclose([t for t, _ in found], exact, rtol=1e-6)


@pytest.mark.slow
def test_days_stay_the_default(root: Path) -> None:
    plain = ingest(root, "icd")
    day = ingest(root, "again", "--codes", "icd", "--time-unit", "day")
    assert set(tokens.open_tokens(plain / "tokens" / "pophr").vocabulary[5:]) == {"250", "401"}
    one, two = (cache.open_cache(home / "cache" / "pophr") for home in (plain, day))
    assert one.events_manifest.settings.options == two.events_manifest.settings.options
    assert tokens.open_tokens(plain / "tokens" / "pophr").options.values == "none"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["ingest", "pophr", "{raw}", "--source", "claims", "--codes", "all"], "meds or omop"),
        (["ingest", "pophr", "{raw}", "--source", "meds", "--codes", "some"], "--codes"),
        (["ingest", "pophr", "{raw}", "--source", "meds", "--time-unit", "hour"], "--time-unit"),
        (
            [
                "ingest",
                "pophr",
                "{raw}",
                "--source",
                "meds",
                "--time-unit",
                "minute",
                "--date-format",
                "%d",
            ],
            "--date-format",
        ),
        (["tokenize", "pophr", "--values", "quartiles"], "values is one of none, deciles, raw"),
    ],
)
def test_what_cannot_be_is_refused(
    root: Path, argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(raw=root / "raw") for word in argv]
    assert (
        main(
            [
                *words,
                *(["--map", str(root / "map.csv")] if argv[0] == "ingest" else []),
                "-w",
                str(root / "days"),
            ]
        )
        == 2
    )
    assert text in capsys.readouterr().err


MEASUREMENT = (
    "person_id",
    "measurement_date",
    "measurement_datetime",
    "measurement_source_value",
    "measurement_source_concept_id",
    "measurement_concept_id",
    "value_as_number",
)


def write_tables(folder: Path, tables: dict[str, list[Any]]) -> None:
    """Each table as a csv, its first row the head."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def ingest_omop(root: Path, tables: dict[str, list[Any]], *options: str) -> tokens.EventSequences:
    """Sequences with raw numbers of 30 men and the tables, all codes; the workspace is `w`."""
    persons = [
        ("person_id", "gender_concept_id", "year_of_birth"),
        *((p, 8507, 1950) for p in range(1, 31)),
    ]
    write_tables(root / "raw", {"person": persons, **tables})
    (root / "map.csv").write_text("icd9,phecode\n250.00,250.2\n")
    argv = [
        "ingest",
        "pophr",
        root / "raw",
        "--source",
        "omop",
        "--codes",
        "all",
        "--map",
        root / "map.csv",
        "--no-select",
        "--rules",
        "none",
        *options,
    ]
    argv += ["--min-codes", "1", "--values", "raw", "--keep-ids", root / "w.csv", "-w", root / "w"]
    assert main([str(word) for word in argv]) in {0, 3}
    made = tokens.open_tokens(root / "w" / "tokens" / "pophr")
    assert isinstance(made, tokens.EventSequences)
    return made


def test_omop_keeps_drugs_measurements_and_visits(tmp_path: Path) -> None:
    tables: dict[str, list[Any]] = {
        "concept": [
            ("concept_id", "vocabulary_id", "concept_code"),
            (1, "ICD9CM", "250.00"),
            (2, "RxNorm", "860975"),
            (3, "LOINC", "2345-7"),
            (9201, "Visit", "IP"),
            (4, "SNOMED", "44054006"),
        ],
        "condition_occurrence": [
            (
                "person_id",
                "condition_start_date",
                "condition_source_value",
                "condition_source_concept_id",
                "condition_concept_id",
                "visit_occurrence_id",
            ),
            *((p, "2010-01-05", "25000", 1, 4, p) for p in range(1, 31)),
        ],
        "drug_exposure": [
            ("person_id", "drug_exposure_start_date", "drug_concept_id", "drug_source_value"),
            *((p, "2010-01-06", 2, "V5867") for p in range(1, 31)),
        ],
        "measurement": [
            MEASUREMENT,
            *(
                (p, "2010-01-07", f"2010-01-07 08:{p:02d}:00", "x", 0, 3, 80 + p)
                for p in range(1, 31)
            ),
            *((p, "2010-01-08", "", "x", 0, 77, "") for p in range(1, 31)),
        ],
        "visit_occurrence": [
            (
                "person_id",
                "visit_occurrence_id",
                "visit_start_date",
                "visit_concept_id",
                "visit_source_value",
            ),
            *((p, p, "2010-01-05", 9201, "V270") for p in range(1, 31)),
        ],
    }
    made = ingest_omop(tmp_path, tables, "--time-unit", "minute")
    assert set(made.vocabulary[5:]) == {
        "250",
        "RxNorm//860975",
        "LOINC//2345-7",
        "Visit//IP",
        "CONCEPT//77",
    }
    for person, row in read_stored(tmp_path, "w", made).items():
        names = [made.vocabulary[c] for c in row["codes"]]
        assert names == ["250", "Visit//IP", "RxNorm//860975", "LOINC//2345-7", "CONCEPT//77"]
        at = names.index("LOINC//2345-7")
        assert row["values"][at] == 80 + person
        assert row["times"][at] == pytest.approx((2 + (8 * 60 + person) / 1440) / 30.4375, rel=1e-6)
        assert np.isnan([v for i, v in enumerate(row["values"]) if i != at]).all()


def test_omop_keeps_numbers_of_different_units_apart(tmp_path: Path) -> None:
    """The unit is the concept's code, else the text of the source, else the number of the concept;
    without one the token has none.
    """
    stated = {
        8840: (8840, "mg / dl", "mg/dL"),
        8753: (8753, "", "mmol/L"),
        0: (0, "g/L", "g/L"),
        99: (99, "", "99"),
        "": ("", "", ""),
    }
    persons = range(1, 31)
    conditions = (
        "person_id",
        "condition_start_date",
        "condition_source_value",
        "condition_source_concept_id",
        "condition_concept_id",
    )
    units = ("unit_concept_id", "unit_source_value")
    made = ingest_omop(
        tmp_path,
        {
            "concept": [
                ("concept_id", "vocabulary_id", "concept_code"),
                (1, "ICD9CM", "250.00"),
                (3, "LOINC", "2345-7"),
                (8840, "UCUM", "mg/dL"),
                (8753, "UCUM", "mmol/L"),
            ],
            "condition_occurrence": [
                conditions,
                *((p, "2010-01-05", "25000", 1, 4) for p in persons),
            ],
            "measurement": [
                (*MEASUREMENT, *units),
                *(
                    (p, f"2010-02-{day:02d}", "", "x", 0, 3, 10 * day + p / 100, *written)
                    for p in persons
                    for day, (*written, _) in enumerate(stated.values(), 1)
                ),
            ],
        },
    )
    expected = [
        "LOINC//2345-7" + (f"//{symbol}" if symbol else "") for *_, symbol in stated.values()
    ]
    for person, row in read_stored(tmp_path, "w", made).items():
        assert [made.vocabulary[c] for c in row["codes"]] == ["250", *expected]
        assert row["values"][1:] == pytest.approx([10 * day + person / 100 for day in range(1, 6)])
