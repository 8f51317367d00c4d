"""One history in five layouts (claims, OMOP, MEDS, MIMIC-III, MIMIC-IV): the risks of new people do
not depend on the layout of their tables, and are those that `evaluate` scores.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
import sklearn.linear_model
import torch
from claims_folders import needs
from samples import SAMPLES

import bitimely
from bitimely_cli.main import main
from bitimely_core.errors import Exit
from bitimely_core.heads import Head

MAP = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"
CODES = ("428.0", "250.00", "496", "401.9", "585.9", "486", "414.01", "272.4", "530.81", "599.0")
AS_OF = "2008-02-01"
LABELS = ("chf", "copd", "diabetes")
BIRTH = date(1940, 1, 1)  # MIMIC-IV has years

pytestmark = [needs("phecode"), pytest.mark.slow]


class Stay(NamedTuple):
    """A stay of a person that ends on a day, with its diagnoses."""

    person: int
    number: int
    day: date
    codes: tuple[str, ...]


def draw_stays(people: Iterable[int]) -> list[Stay]:
    """Stays of one day each from 2007 to 2010; some diagnoses come again."""
    stays = []
    for person in people:
        draw = np.random.default_rng(person)
        days = sorted(draw.choice(1400, size=int(draw.integers(4, 9)), replace=False))
        own = draw.choice(len(CODES), size=4, replace=False)
        for k, day in enumerate(days):
            codes = tuple(CODES[i] for i in own if draw.random() < 0.6) or (CODES[own[0]],)
            start = date(2007, 1, 1) + timedelta(int(day))
            stays.append(Stay(person, person * 100 + k, start, codes))
    return stays


def write_table(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def list_people(stays: list[Stay]) -> list[int]:
    return sorted({stay.person for stay in stays})


def write_claims(folder: Path, stays: list[Stay]) -> None:
    rows = [(stay.person, stay.day, code) for stay in stays for code in stay.codes]
    write_table(folder / "claims.csv", "patient_id,date,icd9", rows)
    people = [(person, BIRTH, "F") for person in list_people(stays)]
    write_table(folder / "patients.csv", "patient_id,birth_date,sex", people)


def write_omop(folder: Path, stays: list[Stay]) -> None:
    people = [(person, 8532, 1940, 1, 1) for person in list_people(stays)]
    names = "person_id,gender_concept_id,year_of_birth,month_of_birth,day_of_birth"
    write_table(folder / "person.csv", names, people)
    rows = [
        (stay.number * 10 + k, stay.person, stay.day, code, 0, stay.number)
        for stay in stays
        for k, code in enumerate(stay.codes)
    ]
    names = "condition_occurrence_id,person_id,condition_start_date,condition_source_value"
    names += ",condition_source_concept_id,visit_occurrence_id"
    write_table(folder / "condition_occurrence.csv", names, rows)
    visits = [(stay.number, stay.person, 9201, stay.day, stay.day) for stay in stays]
    names = "visit_occurrence_id,person_id,visit_concept_id,visit_start_date,visit_end_date"
    write_table(folder / "visit_occurrence.csv", names, visits)


def write_meds(folder: Path, stays: list[Stay]) -> None:
    people = list_people(stays)
    rows: list[tuple[object, ...]] = [(person, None, "GENDER//F", None) for person in people]
    rows += [(person, datetime(1940, 1, 1), "MEDS_BIRTH", None) for person in people]
    rows += [
        (stay.person, datetime.combine(stay.day, datetime.min.time()), f"ICD9CM//{code}", None)
        for stay in stays
        for code in stay.codes
    ]
    kinds = (pl.Int64, pl.Datetime("us"), pl.String, pl.Float32)
    names = ("subject_id", "time", "code", "numeric_value")
    frame = pl.DataFrame(rows, schema=dict(zip(names, kinds, strict=True)), orient="row")
    (folder / "data").mkdir(parents=True)
    frame.sort("subject_id", "time").write_parquet(folder / "data" / "0.parquet")


def write_mimic3(folder: Path, stays: list[Stay]) -> None:
    people = [(person, "F", f"{BIRTH} 00:00:00", "") for person in list_people(stays)]
    write_table(folder / "PATIENTS.csv", "subject_id,gender,dob,dod", people)
    rows = [(s.person, s.number, f"{s.day} 08:00:00", f"{s.day} 17:00:00", "") for s in stays]
    names = "subject_id,hadm_id,admittime,dischtime,deathtime"
    write_table(folder / "ADMISSIONS.csv", names, rows)
    codes = [
        (stay.person, stay.number, k + 1, code.replace(".", ""))
        for stay in stays
        for k, code in enumerate(stay.codes)
    ]
    write_table(folder / "DIAGNOSES_ICD.csv", "subject_id,hadm_id,seq_num,icd9_code", codes)


def write_mimic4(folder: Path, stays: list[Stay]) -> None:
    people = [(person, "F", 67, 2007, "2008 - 2010", "") for person in list_people(stays)]
    names = "subject_id,gender,anchor_age,anchor_year,anchor_year_group,dod"
    write_table(folder / "hosp/patients.csv", names, people)
    rows = [(s.person, s.number, f"{s.day} 08:00:00", f"{s.day} 17:00:00", "") for s in stays]
    names = "subject_id,hadm_id,admittime,dischtime,deathtime"
    write_table(folder / "hosp/admissions.csv", names, rows)
    codes = [
        (stay.person, stay.number, k + 1, code.replace(".", ""), 9)
        for stay in stays
        for k, code in enumerate(stay.codes)
    ]
    names = "subject_id,hadm_id,seq_num,icd_code,icd_version"
    write_table(folder / "hosp/diagnoses_icd.csv", names, codes)


WRITERS: dict[str, Callable[[Path, list[Stay]], None]] = {
    "claims": write_claims,
    "omop": write_omop,
    "meds": write_meds,
    "mimic3": write_mimic3,
    "mimic4": write_mimic4,
}
READ = ["--phecode-map", MAP, "--keep-dates", "--no-select"]
SOURCE = {"claims": ["--default-source", "inpatient"], "meds": ["--default-source", "inpatient"]}
BUILT = ["--landmark-date", AS_OF, "--landmark", "0,1000", "--min-codes", "2"]


def run(*words: object) -> None:
    assert main(list(map(str, words))) in {Exit.OK, Exit.PARTIAL}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `trees` and `net`, trained on claims of 300 people in the workspace `train`."""
    folder = tmp_path_factory.mktemp("layouts")
    write_claims(folder / "raw", draw_stays(range(1, 301)))
    run("ingest", "pophr", folder / "raw", "-w", folder / "train", *READ, *SOURCE["claims"], *BUILT)
    run("train", "trees", "--data", "pophr", "-w", folder / "train", "--run", "trees")
    sizes = ["--steps", "3", "--set", "train.device=cpu", "--set", "model.dim=8"]
    words = ["--data", "pophr", "-w", folder / "train", "--run", "net"]
    run("train", "timelygpt", *words, *sizes)
    return folder


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, pl.DataFrame]:
    """The risks of 60 new people in tables of claims: raw id and those of each run."""
    return {name: predict(home, name, "claims") for name in ("trees", "net")}


def predict(home: Path, name: str, layout: str) -> pl.DataFrame:
    """The risks of the new people in a layout, by their raw ids."""
    folder, ids = home / f"new-{layout}", home / f"ids-{layout}-{name}.csv"
    if not folder.exists():
        WRITERS[layout](folder, draw_stays(range(1001, 1061)))
    words = ["--as-of", AS_OF, "--keep-ids", ids, "-w", home / "p"]
    run("predict", home / "train/runs" / name, folder, *words)
    return pl.read_csv(ids).sort("subject_id")


@pytest.mark.parametrize("layout", ["omop", "meds", "mimic3", "mimic4"])
@pytest.mark.parametrize("name", ["trees", "net"])
def test_risks_do_not_depend_on_the_layout(
    home: Path, expected: dict[str, pl.DataFrame], layout: str, name: str
) -> None:
    risks, table = expected[name], predict(home, name, layout)
    assert table["subject_id"].to_list() == risks["subject_id"].to_list() == [*range(1001, 1061)]
    assert table["events"].to_list() == risks["events"].to_list()
    assert risks["risk_chf"].n_unique() > 5
    for label in LABELS:
        both = pl.DataFrame({"new": table[f"risk_{label}"], "claims": risks[f"risk_{label}"]})
        if layout == "meds":  # nobody has an outcome by an admission: MEDS has no kinds of claims
            both = both.drop_nulls()
        assert both["claims"].count() > 20
        np.testing.assert_allclose(both["new"], both["claims"], atol=1e-6)


@pytest.mark.parametrize("layout", WRITERS)
def test_risks_are_those_of_evaluate(
    home: Path, expected: dict[str, pl.DataFrame], layout: str
) -> None:
    risks, work, ids = expected["net"], home / f"w-{layout}", home / f"all-{layout}.csv"
    table = predict(home, "net", layout)
    read = [*READ, *SOURCE.get(layout, []), *BUILT, "--keep-ids", ids]
    run("ingest", "pophr", home / f"new-{layout}", "-w", work, *read)
    words = ["--data", "pophr", "-w", work, "--bootstrap", "0", "--baselines", "cheap"]
    run("evaluate", home / "train/runs/net", *words)
    scored = pl.read_parquet(home / "train/runs/net/predictions.parquet")
    scored = scored.with_columns(pl.col("subject_id").cast(pl.Int64))
    scored = scored.rename({"subject_id": "new"}).join(pl.read_csv(ids), on="new")
    both = scored.join(table, on="subject_id", suffix="_new")
    assert both.height == scored.height > 30
    for label in LABELS:
        np.testing.assert_allclose(both[f"p_{label}_new"], both[f"p_{label}"], atol=1e-6)
    assert risks.height == 60


def test_a_folder_is_predicted_in_python_too(home: Path, expected: dict[str, pl.DataFrame]) -> None:
    predict(home, "trees", "omop")
    model = bitimely.Encoder.from_pretrained(home / "train/runs/trees", workspace=home / "p")
    table = model.predict(home / "new-omop", as_of=AS_OF)
    for label in LABELS:
        risk = f"risk_{label}"
        np.testing.assert_allclose(table[risk].sort(), expected["trees"][risk].sort(), atol=1e-6)


def to_log_odds(risks: pl.Series) -> np.ndarray:
    p = risks.cast(pl.Float64).to_numpy().clip(1e-12, 1 - 1e-12)
    return np.log(p / (1 - p))


def recalibrate(known: pl.DataFrame, label: str, new: pl.Series) -> np.ndarray | None:
    """The risks by scikit-learn's logistic regression of the label on the log odds."""
    known = known.filter(pl.col(f"target_{label}").is_not_nan())
    y, z = known[f"target_{label}"].to_numpy().astype(int), to_log_odds(known[f"p_{label}"])
    if min(y.sum(), (1 - y).sum()) < 10:
        return None
    model = sklearn.linear_model.LogisticRegression(C=np.inf, tol=1e-12, max_iter=100_000)
    model.fit(((z - z.mean()) / z.std())[:, None], y)
    standard = (to_log_odds(new) - z.mean()) / z.std()
    return np.asarray(model.predict_proba(standard[:, None])[:, 1])


@pytest.fixture(scope="module")
def places(home: Path) -> pl.DataFrame:
    """Labelled people of two other places in workspaces `w-north` and `w-south`; the scored risks
    of `trees` for the first.
    """
    run_folder = home / "train/runs/trees"
    for place, first in (("north", 3001), ("south", 5001)):
        write_claims(home / place, draw_stays(range(first, first + 240)))
        words = [*READ, *SOURCE["claims"], *BUILT, "--id-key", home / "train/id.key"]
        run("ingest", "pophr", home / place, "-w", home / f"w-{place}", *words)
    run("evaluate", run_folder, "--data", "pophr", "-w", home / "w-north", *CHEAP)
    return pl.read_parquet(run_folder / "predictions.parquet")


CHEAP = ("--bootstrap", "0", "--baselines", "cheap")


def test_predict_recalibrates_as_a_logistic_regression(home: Path, places: pl.DataFrame) -> None:
    predict(home, "trees", "claims")
    words = ["--as-of", AS_OF, "--calibrate-on", "pophr", "--out", home / "out"]
    run("predict", home / "train/runs/trees", home / "new-claims", "-w", home / "w-north", *words)
    table = pl.read_parquet(home / "out/predictions.parquet")
    fitted = 0
    for label in LABELS:
        risk = recalibrate(places, label, table[f"p_{label}"])
        if risk is not None:
            given = table[f"risk_{label}"].is_not_null()  # not of who has had the outcome
            assert given.sum() > 20
            new = table[f"risk_{label}"].filter(given)
            np.testing.assert_allclose(new, risk[given.to_numpy()], atol=1e-5)
            assert abs(risk - table[f"p_{label}"].to_numpy()).max() > 1e-3
            fitted += 1
    assert fitted >= 2
    assert "recalibrated, label by label" in (home / "out/report.html").read_text("utf-8")


def test_evaluate_recalibrates_by_the_people_of_another_place(
    home: Path, places: pl.DataFrame
) -> None:
    """`--data` south, `--calibrate-on` north: the Brier score is that of the recalibrated risks."""
    run_folder = home / "train/runs/trees"
    tokens = home / "w-south/tokens"
    shutil.copytree(home / "w-north/tokens/pophr-trees", tokens / "north-trees")
    words = ["--data", "pophr", "-w", home / "w-south", *CHEAP]
    run("evaluate", run_folder, *words, "--calibrate-on", "north-trees")
    scores = json.loads((run_folder / "scores.json").read_text())
    table = pl.read_parquet(run_folder / "predictions.parquet")
    fitted = 0
    for label in LABELS:
        known = table.filter(pl.col(f"target_{label}").is_not_nan())
        risk = recalibrate(places, label, known[f"p_{label}"])
        if risk is not None:
            stored = scores["risk_calibration"][label]["recalibrated"]
            y = known[f"target_{label}"].to_numpy()
            assert stored["brier"]["value"] == pytest.approx(np.mean((y - risk) ** 2), abs=1e-5)
            fitted += 1
    assert fitted >= 2


@pytest.mark.parametrize("kind", [pl.String, pl.Int64])
def test_a_table_in_memory_gives_vectors_and_risks(
    home: Path, expected: dict[str, pl.DataFrame], kind: type[pl.DataType]
) -> None:
    rows = [(s.person, s.day, code) for s in draw_stays(range(1001, 1061)) for code in s.codes]
    table = pl.DataFrame(rows, schema=["person", "date", "code"], orient="row")
    table = table.with_columns(pl.col("person").cast(kind), birth_date=BIRTH, sex=pl.lit("F"))
    table = table.sample(fraction=1, shuffle=True, seed=0)
    encoder = bitimely.Encoder.from_pretrained(home / "train/runs/net", workspace=home / "train")
    risks = encoder.predict(table, as_of=AS_OF)
    assert risks["subject_id"].to_list() == table["person"].unique().sort().to_list()
    for column in (f"{name}_{label}" for name in ("p", "risk") for label in LABELS):
        np.testing.assert_allclose(risks[column], expected["net"][column], atol=1e-6)
    vectors = encoder.transform(table, as_of=AS_OF)
    assert vectors["subject_id"].equals(risks["subject_id"])
    head = encoder.head
    assert isinstance(head, Head)
    matrix = torch.from_numpy(vectors["embedding"].to_numpy().copy())
    assert matrix.dtype == torch.float32
    logits = head.linear(matrix).detach().numpy()
    p = risks.select(f"p_{label}" for label in LABELS).to_numpy()
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), p, atol=1e-6)
