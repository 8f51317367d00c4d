"""Codes of other vocabularies, times of day and numbers: Spark writes the bytes of polars, from
MEDS and from OMOP.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from engines import SPARK_ENGINE
from test_other_codes import DRUG, LAB, MEASUREMENT, ODD, RARE, START, Row, write_meds, write_tables

from bitimely_core import cache, workflows
from bitimely_core.claims import event_kind
from bitimely_core.claims import ingest_claims as claims_ingest

SUBJECTS = 120
CHOICES: dict[str, dict[str, Any]] = {
    "codes": {},
    "repeats": {"values": "raw", "dedupe": "none", "max_events": 9},
    "deciles-repeats": {"values": "deciles", "dedupe": "none", "min_codes_unit": "unique"},
    "ages": {"values": "raw", "time": "age30", "dedupe": "first_per_age30"},
    "months": {
        "values": "raw",
        "dedupe": "month",
        "time": "calendar_month",
        "min_codes_unit": "records",
    },
    "landmark": {
        "values": "raw",
        "dedupe": "none",
        "landmark": "400,30,300",
        "leakage": "drop-phecode",
    },
    "selected": {"values": "deciles", "select": "frequency"},
}


def draw_ties() -> list[Row]:
    """Few minutes, so that many rows share one, with other numbers of the same code, without one,
    with 0 of both signs, NaN, and repeated as they are.
    """
    draw, rows = np.random.default_rng(5), list[Row]()
    kinds = [
        "DIAGNOSIS//ICD//9//25000",
        "DIAGNOSIS//ICD//9//4019",
        "DIAGNOSIS//ICD//10//E119",
        DRUG,
        LAB,
        LAB,
        LAB,
        ODD,
    ]
    numbers = [0.0, -0.0, 5.5, float("nan"), None, 1e30, -3.25, float("inf"), 7.0, 1 / 3]
    for subject in range(1, SUBJECTS + 1):
        for _ in range(int(draw.integers(3, 25))):
            day, minute = int(draw.integers(0, 60)) * 13, int(draw.choice([0, 1, 480, 481, 1439]))
            kind = str(draw.choice(kinds))
            number = (
                numbers[draw.integers(len(numbers))]
                if kind in {LAB, DRUG} or draw.random() < 0.1
                else None
            )
            rows += [(subject, START + timedelta(days=day, minutes=minute), kind, number)] * int(
                draw.choice([1, 1, 1, 2])
            )
        rows += [(subject, START, RARE, None)] * (subject < 6)
    return sorted(rows, key=lambda row: (row[0], row[1]))


def write_omop(folder: Path, rows: list[Row]) -> None:
    """The same as OMOP: the hour of every third row is not known."""
    concepts = {
        DRUG: (2, "RxNorm", "860975"),
        LAB: (3, "LOINC", "2345-7"),
        RARE: (5, "SNOMED", "1"),
        ODD: (9201, "Visit", "IP"),
    }
    known = {
        "DIAGNOSIS//ICD//9//25000": (1, "25000"),
        "DIAGNOSIS//ICD//9//4019": (6, "4019"),
        "DIAGNOSIS//ICD//10//E119": (7, "E119"),
    }
    vocabularies = [
        (1, "ICD9CM", "250.00"),
        (6, "ICD9CM", "401.9"),
        (7, "ICD10CM", "E11.9"),
        *concepts.values(),
    ]
    measured, conditions = [], []
    for at, (subject, time, code, number) in enumerate(rows):
        day, exact = (
            time.date().isoformat(),
            "" if at % 3 == 0 else time.strftime("%Y-%m-%d %H:%M:00"),
        )
        if code in known:
            conditions.append((subject, day, exact, known[code][1], known[code][0], 4))
        else:
            measured.append(
                (subject, day, exact, "x", 0, concepts[code][0], "" if number is None else number)
            )
    tables: dict[str, list[Any]] = {
        "person": [
            ("person_id", "gender_concept_id", "year_of_birth"),
            *((p, 8507 + 25 * (p % 2), 1950) for p in range(1, SUBJECTS + 1)),
        ],
        "concept": [("concept_id", "vocabulary_id", "concept_code"), *vocabularies],
        "condition_occurrence": [
            (
                "person_id",
                "condition_start_date",
                "condition_start_datetime",
                "condition_source_value",
                "condition_source_concept_id",
                "condition_concept_id",
            ),
            *conditions,
        ],
        "measurement": [MEASUREMENT, *measured],
    }
    write_tables(folder, tables)


def make(root: Path, source: str, engine: str) -> dict[str, str]:
    """Hashes of all tables and manifests of a cache and of all its sequences, and the counts of the
    report.
    """
    home = root / engine
    options = {
        "source": source,
        "codes": "all",
        "time_unit": "minute",
        "engine": engine,
        "id_key": str(root / "id.key"),
    }
    (root / "id.key").write_bytes(bytes(range(32)))
    options |= {"phecode_map": (str(root / "map.csv"),), "keep_ignored": True}
    options |= {"default_source": "physician"}  # the visits have no kind, the labels need one
    report = workflows.ingest(
        "pophr", root / "raw", home / "cache" / "pophr", options=options, keep_dates=True
    )
    for name, choices in CHOICES.items():
        event_kind.write_sequences(
            home / "cache" / "pophr",
            home / "tokens" / name,
            **{"select": False, "min_codes": 2, "engine": engine, **choices},
        )
    files = [path for path in home.rglob("*.parquet") if ".parts" not in path.parts]
    found = {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    found |= {
        f"{name}/statistics": (home / "tokens" / name / "statistics.json").read_text()
        for name in CHOICES
    }
    return found | {
        name: json.dumps(report[name], sort_keys=True, default=str) for name in ("rows", "reasons")
    }


@pytest.fixture(params=["meds", "omop"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layout of `tmp_path / "raw"`, which is ingested into several shards."""
    monkeypatch.setattr(claims_ingest, "SHARD_BYTES", 3_000 if request.param == "meds" else 40_000)
    write_meds(tmp_path / "raw", draw_ties())
    if request.param == "omop":
        shutil.rmtree(tmp_path / "raw")
        write_omop(tmp_path / "raw", draw_ties())
    (tmp_path / "map.csv").write_text("icd9,phecode\n250.00,250.2\n401.9,401.1\n")
    return request.param


@pytest.mark.slow
def test_zeros_have_no_sign(source: str, tmp_path: Path) -> None:
    make(tmp_path, source, "polars")
    assert len(cache.open_cache(tmp_path / "polars" / "cache" / "pophr").events_manifest.shards) > 2
    stored = [
        pl.read_parquet(path)["values"].explode().to_numpy()
        for path in (tmp_path / "polars" / "tokens" / "repeats").glob("seq*")
    ]
    zeros = np.concatenate(stored)[np.concatenate(stored) == 0]
    assert len(zeros)
    assert not np.signbit(zeros).any(), (
        "-0 and 0 sort as one: their order would be that of the rows"
    )


@pytest.mark.parametrize("engine", [SPARK_ENGINE])
def test_engines_write_the_same_bytes(source: str, engine: str, tmp_path: Path) -> None:
    assert make(tmp_path, source, engine) == make(tmp_path, source, "polars")
