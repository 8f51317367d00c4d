"""Claims as people have them: files of any name, format and separator; optional facts that are
missing are said; rows, people and labels are not lost in silence.

The right values of the shared cases are those of their README. Other members of each class are
made from the control and compared with it, or with pandas and pyreadstat.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
from claims_folders import GOOD, HEAD, read_folder, write_files
from samples import SHARED, needs_sample
from short_maps import MAP9, MAP10

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.claims import cohorts, event_labels, periods
from bitimely_core.claims.sources import code_columns

CASES = SHARED / "cases" / "claims_files"
CONTROL = CASES / "00_control"
RIGHT = {"chf": 10, "copd": 46, "diabetes": 30}
HISTORIES_ALONE = ["--rules", "none", "--min-codes", "1", "--keep-dates"]
pytestmark = [needs_sample(CASES), needs_sample(MAP9)]


class Ended(NamedTuple):
    """How an ingest ended."""

    code: int
    text: str  # both streams
    workspace: Path

    def count_cases(self) -> dict[str, int]:
        """Label -> subjects that have it."""
        cases = open_cache(self.workspace / "cache" / "pophr").labels().filter(value=1)
        return dict(cases["name"].value_counts().iter_rows())

    def count_rows(self) -> int:
        return open_cache(self.workspace / "cache" / "pophr").events_manifest.funnel.rows

    def has(self, *texts: str) -> bool:
        """Whether one line holds all texts."""
        return any(all(text in line for text in texts) for line in self.text.splitlines())


Ingest = Callable[..., Ended]


@pytest.fixture
def ingest(
    tmp_path: Path, short_maps: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> Ingest:
    """Run a folder as the README of the cases does, with shortened maps unless `whole`."""

    def run(folder: Path, *options: str, workspace: str = "w", whole: bool = False) -> Ended:
        home = tmp_path / workspace
        map9, map10 = map(str, (MAP9, MAP10) if whole else short_maps)
        arguments = ["ingest", "pophr", str(folder), "-w", str(home), "--phecode-map", map9]
        if MAP10.is_file():
            arguments += ["--phecode-map", map10, "--map-repair", "phecode-zeros"]
        arguments += ["--default-source", "physician", "--min-codes", "5", "--no-select"]
        capfd.readouterr()
        code = main([*arguments, "--small-counts", *options])
        out, err = capfd.readouterr()
        return Ended(code, out + err, home)

    return run


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    return folder


def copy_case(raw: Path, name: str) -> Path:
    shutil.copytree(CASES / name, raw, dirs_exist_ok=True)
    return raw


def read_control() -> pl.DataFrame:
    return pl.read_csv(CONTROL / "claims.csv", infer_schema=False)


def read_patients() -> pl.DataFrame:
    return pl.read_csv(CONTROL / "patients.csv", infer_schema=False)


def copy_patients(raw: Path) -> None:
    shutil.copy(CONTROL / "patients.csv", raw)


# --- optional facts speak


@pytest.mark.slow
def test_the_control(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "00_control"), whole=True)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    assert "subjects are known" not in ended.text


@pytest.mark.parametrize(
    ("birth", "sex"),
    [
        ("dob", "gender"),  # 08
        ("BIRTHDATE", "GENDER"),
        ("Date of Birth", "Patient-Sex"),
        ("Geburtsdatum", "Geschlecht"),
    ],
)
def test_known_names_of_births_and_sexes_are_read(
    ingest: Ingest, raw: Path, birth: str, sex: str
) -> None:
    copy_case(raw, "00_control")
    patients = read_patients().rename({"birth_date": birth, "sex": sex})
    patients.write_csv(raw / "patients.csv")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases()) == (0, RIGHT)
    known = open_cache(ended.workspace / "cache" / "pophr").cohort()
    sexes = read_patients()["sex"].replace_strict({"M": 1, "F": 2}).value_counts()
    assert sorted(known["sex"].value_counts().iter_rows()) == sorted(sexes.iter_rows())


def test_case_08(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "08_patients_other_names"))
    assert (ended.code, ended.count_cases()) == (0, RIGHT)


@pytest.mark.slow
def test_an_unknown_name_of_births_is_said_with_the_option_that_works(
    ingest: Ingest, raw: Path
) -> None:
    copy_case(raw, "00_control")
    read_patients().rename({"birth_date": "born_on_day"}).write_csv(raw / "patients.csv")
    ended = ingest(raw)
    assert ended.code == 0
    assert ended.has("births of 0 of", "--col birth=born_on_day", "'chf', 'copd' or 'diabetes'")
    followed = ingest(raw, "--col", "birth=born_on_day", workspace="followed")
    assert (followed.code, followed.count_cases()) == (0, RIGHT)


@pytest.mark.parametrize(
    "names",
    [
        ["cohort.csv"],
        ["Pacientes.csv"],
        ["tbl_patient_info.tsv"],
        ["patients_2005.csv", "patients_2006.csv"],
        ["2005/enrollees.csv", "2006/enrollees.csv"],
    ],
)
def test_a_table_of_births_is_that_of_patients_by_any_name(
    ingest: Ingest, raw: Path, names: list[str]
) -> None:
    """People are in one file or in all of them; deaths are in the last alone. Births on other
    tables are not read."""
    shutil.copy(CONTROL / "claims.csv", raw)
    patients = read_patients().with_columns(death_date=pl.lit("2008-01-01"))
    for name in names:
        table = patients if name == names[-1] else patients.head(30).with_columns(death_date=None)
        (raw / name).parent.mkdir(exist_ok=True)
        table.write_csv(raw / name, separator="\t" if name.endswith(".tsv") else ",")
    wrong = patients.select("patient_id", birth_date=pl.lit("1999-01-01"), result=pl.lit("7"))
    wrong.write_csv(raw / "lab_results.csv")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    known = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert (known.height, known["death_day"].null_count()) == (60, 0)


@pytest.mark.slow
def test_sexes_that_are_not_understood_are_said(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    read_patients().with_columns(sex=pl.lit("qqq")).write_csv(raw / "patients.csv")
    assert ingest(raw).has("60 of 60 sexes are not understood ('qqq')")
    zeros = pl.Series("sex", ["0", "1"] * 30)
    read_patients().with_columns(zeros).write_csv(raw / "patients.csv")
    assert ingest(raw, workspace="v").has("sexes are written 0 and 1", "Write M and F")


@pytest.mark.parametrize(
    ("male", "female"),
    [
        ("1.0", "2.0"),
        ("01", "02"),
        ("1 - Male", "2 - Female"),
        ("H", "F"),
        ("M", "K"),
        ("Masculino", "Feminino"),
        ("男", "女"),
        ("8507", "8532"),
    ],
)
def test_sexes_as_countries_write_them(ingest: Ingest, raw: Path, male: str, female: str) -> None:
    copy_case(raw, "00_control")
    sexes = pl.Series("sex", [male, male, female] * 20)
    read_patients().with_columns(sexes).write_csv(raw / "patients.csv")
    ended = ingest(raw)
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert dict(cohort["sex"].value_counts().iter_rows()) == {1: 40, 2: 20}
    assert not ended.has("sexes are")


@pytest.mark.parametrize(
    ("sexes", "numbers"),
    [
        (("H", "M"), {1: 40, 2: 20}),
        (("V", "M"), {0: 60}),
        (("1.0", "0.0"), {0: 60}),
        (("1", "3"), {1: 40, 2: 20}),
    ],
)
def test_sexes_that_mean_another_one_elsewhere_are_said(
    ingest: Ingest, raw: Path, sexes: tuple[str, str], numbers: dict[int, int]
) -> None:
    """M is mujer beside H (hombre); beside V it is man (vrouw) or mujer (varón). Beside
    0 either may be 1. 3 is of Brazil."""
    copy_case(raw, "00_control")
    column = pl.Series("sex", [sexes[0], sexes[0], sexes[1]] * 20)
    read_patients().with_columns(column).write_csv(raw / "patients.csv")
    ended = ingest(raw)
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert dict(cohort["sex"].value_counts().iter_rows()) == numbers
    assert ended.has("sexes are written", "Write M and F")


@pytest.mark.parametrize("column", ["p31", "31-0.0", "f.31.0.0", "participant.p31"])
@pytest.mark.parametrize("apart", [True, False])
def test_women_of_uk_biobank_are_coded_0(
    ingest: Ingest, raw: Path, column: str, apart: bool
) -> None:
    copy_case(raw, "00_control")
    sexes = read_patients().select("patient_id", (pl.int_range(60) % 3 == 0).cast(pl.Int8))
    sexes = sexes.rename({sexes.columns[1]: column})
    if apart:
        read_patients().drop("sex").join(sexes, on="patient_id").write_csv(raw / "patients.csv")
    else:
        (raw / "patients.csv").unlink()
        claims = pl.read_csv(raw / "claims.csv", infer_schema=False)
        claims.join(sexes, on="patient_id").write_csv(raw / "claims.csv")
    ended = ingest(raw, *HISTORIES_ALONE)
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert dict(cohort["sex"].value_counts().iter_rows()) == {1: 20, 2: 40}
    assert not ended.has("sexes are")


@pytest.mark.slow
def test_a_column_source_of_other_things_is_left_out(ingest: Ingest, raw: Path) -> None:
    """That of UK Biobank says where a stay began."""
    copy_case(raw, "00_control")
    claims = pl.read_csv(raw / "claims.csv", infer_schema=False)
    claims.with_columns(source=pl.lit("3")).write_csv(raw / "claims.csv")
    refused = ingest(raw)
    assert refused.code == 4
    assert refused.has("--col source=none")
    ended = ingest(raw, "--col", "source=none")
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)


def test_dates_of_a_table_of_deaths_alone_are_named_by_it(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    (raw / "patients.csv").unlink()
    (raw / "jk.csv").write_text("PATIENT_ID,DTH_YM\n" + "P0001,202001\nP0002,202002\n")
    refused = ingest(raw)
    assert refused.has("jk.csv:death", "--date-format death=yyyymm")


@pytest.mark.parametrize("header", ["{},BYEAR,SEX_TYPE", "{},syntyv,sukup"])
def test_tables_of_people_of_registers(ingest: Ingest, raw: Path, header: str) -> None:
    """Of Korea and Finland, by their columns; Korea has a row a year."""
    copy_case(raw, "00_control")
    (raw / "patients.csv").unlink()
    rows = [
        f"{subject},1950,{i % 2 + 1}" for i, subject in enumerate(read_patients()["patient_id"])
    ]
    (raw / "jk.csv").write_text("\n".join([header.format("PATIENT_ID"), *rows, *rows]))
    ended = ingest(raw)
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert dict(cohort["sex"].value_counts().iter_rows()) == {1: 30, 2: 30}
    assert (ended.count_cases(), cohort["birth_day"].null_count()) == (RIGHT, 0)


@pytest.mark.slow
def test_case_70_ends_in_three_commands(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "70_plain_doc_path")
    first = ingest(raw, "--default-source", "outpatient")
    assert first.code == 4
    assert first.has("error[class_missing]", "--default-source")
    second = ingest(raw)
    assert second.code == 0
    assert second.has("births of 0 of", "patients.csv with patient_id, birth_date and sex")
    copy_patients(raw)
    third = ingest(raw)
    assert (third.code, third.count_cases()) == (0, RIGHT)


def test_histories_without_labels_are_asked_for(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "70_plain_doc_path"), "--rules", "none")
    assert ended.code == 0
    assert open_cache(ended.workspace / "cache" / "pophr").events_manifest.names == []


def test_ages_at_claims_are_a_way_to_births(ingest: Ingest, raw: Path) -> None:
    claims = read_control().join(read_patients(), on="patient_id", how="left")
    year, birth = (pl.col(name).str.head(4).cast(pl.Int32) for name in ("date", "birth_date"))
    aged = claims.select("patient_id", "date", "icd9", "sex", Age=year - birth)
    aged.write_csv(raw / "claims.csv")
    first = ingest(raw)
    assert first.has("patients.csv", "birth_date", "the year of a claim less its 'Age'")
    born = aged.select("patient_id", birth_date=year - pl.col("Age"))
    born.unique("patient_id").write_csv(raw / "patients.csv")
    second = ingest(raw, workspace="v")
    assert (second.code, second.count_cases()) == (0, RIGHT)


@pytest.mark.parametrize(
    ("text", "advice", "other"),
    [("", "Their dates are missing", "--date-format"), ("13.2005", "--date-format", "missing")],
)
def test_rows_without_a_date_are_told_from_those_in_another_form(
    ingest: Ingest, raw: Path, text: str, advice: str, other: str
) -> None:
    copy_patients(raw)
    is_left = pl.int_range(pl.len()) % 3 > 0
    claims = read_control().with_columns(date=pl.when(is_left).then("date").otherwise(pl.lit(text)))
    claims.write_csv(raw / "claims.csv")
    ended = ingest(raw)
    assert ended.has("280 rows, expected a calendar date", advice)
    assert not ended.has("280 rows, expected a calendar date", other)


def test_births_and_sexes_on_the_rows_of_the_claims(ingest: Ingest, raw: Path) -> None:
    """As MarketScan has them."""
    claims = read_control().join(read_patients(), on="patient_id", how="left")
    claims.rename({"birth_date": "DOB", "sex": "SEX"}).write_csv(raw / "claims.csv")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases()) == (0, RIGHT)
    assert ingest(raw, "--col", "death=dod", workspace="v").code == 2


@pytest.mark.parametrize("table", ["claims.csv", "patients.csv"])
def test_whole_ids_with_a_fraction_are_the_same_ids(ingest: Ingest, raw: Path, table: str) -> None:
    copy_case(raw, "10b_ids_float")
    pl.read_csv(raw / "patients.csv", infer_schema=False).with_columns(
        pl.col("patient_id").str.replace(r"\.0$", "")
    ).write_csv(raw / "patients.csv")
    other = pl.read_csv(raw / table, infer_schema=False)
    other.with_columns(pl.col("patient_id") + ".0").write_csv(raw / table)
    ended = ingest(raw)
    assert (ended.code, sum(ended.count_cases().values())) == (0, sum(RIGHT.values()))
    assert ended.has(table, "9999.0")


def test_case_10b(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "10b_ids_float"))
    assert (ended.code, ended.count_cases()) == (0, RIGHT)


def test_ids_that_match_nobody_are_said(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    read_patients().with_columns(pl.format("X{}", "patient_id").alias("patient_id")).write_csv(
        raw / "patients.csv"
    )
    ended = ingest(raw)
    assert ended.code == 0
    assert ended.has("0 of", "60 ids of patients are among the claims")


def test_ids_some_of_which_have_lost_their_zeros_are_said(ingest: Ingest, raw: Path) -> None:
    """00500 is 500 in a spreadsheet, 10100 stays."""
    number = pl.col("patient_id").str.slice(1).cast(pl.Int32) * 400 + 500
    text = number.cast(pl.String)
    read_control().with_columns(patient_id=text.str.pad_start(5, "0")).write_csv(raw / "claims.csv")
    read_patients().with_columns(patient_id=text).write_csv(raw / "patients.csv")
    short = read_patients().filter(number < 10_000).height
    ended = ingest(raw)
    assert ended.has(f"{short} of 60 subjects with claims are not among the 60 ids", "zeros")
    read_patients().with_columns(patient_id=text.str.pad_start(5, "0")).write_csv(
        raw / "patients.csv"
    )
    assert ingest(raw, workspace="followed").count_cases() == RIGHT


def test_case_62_index_dates_are_missing(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "62_index_date_missing"))
    assert ended.code == 0
    assert ended.has("20 of 60 subjects have no index date", "whole history")


# --- OMOP


@pytest.mark.slow
def test_case_40c_concepts_that_no_map_reads(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "40c_omop_kcd7_mixed"), "--source", "omop")
    assert ended.code == 0
    assert ended.has("372 of 840 rows", "'KCD7'", "--source-vocab KCD7=icd10")
    followed = ingest(raw, "--source", "omop", "--source-vocab", "KCD7=icd10", workspace="followed")
    assert followed.code == 0
    assert followed.count_rows() == 840
    assert "KCD7" not in followed.text


@pytest.mark.slow
def test_icd10_without_a_table_of_concepts_has_an_option_of_this_layout(
    ingest: Ingest, raw: Path
) -> None:
    copy_case(raw, "40c_omop_kcd7_mixed")
    (raw / "CONCEPT.csv").unlink()
    ended = ingest(raw, "--source", "omop")
    assert ended.has("--icd10-from DATE", "1900-01-01 if all are of ICD-10")
    assert "--col" not in ended.text
    followed = ingest(raw, "--source", "omop", "--icd10-from", "1900-01-01", workspace="followed")
    assert followed.code == 0
    assert followed.count_rows() == 840


def test_concepts_without_a_row_in_the_vocabulary_are_said(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "40c_omop_kcd7_mixed")
    text = (raw / "CONCEPT.csv").read_text()
    kept = [line for line in text.splitlines(keepends=True) if "KCD7" not in line]
    (raw / "CONCEPT.csv").write_text("".join(kept))
    ended = ingest(raw, "--source", "omop")
    assert ended.has("372 of 840 rows", "'no vocabulary'")


def test_case_42_periods_of_observation_are_kept_apart(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "42_omop_observation_gap")
    ended = ingest(raw, "--source", "omop", "--cohort", str(raw / "chf.toml"))
    assert ended.code == 4
    assert ended.has("belong to the cohort chf-one-year", "followed for fewer than 364 days")
    assert "at most" not in ended.text, "the screen of the owner"
    # one period for all: everybody is followed, and nobody has the outcome
    both = pl.read_csv(raw / "observation_period.csv")
    joined = both.group_by("person_id").agg(
        pl.col("observation_period_id").first(),
        pl.col("observation_period_start_date").min(),
        pl.col("observation_period_end_date").max(),
    )
    joined.select(both.columns).write_csv(raw / "observation_period.csv")
    whole = ingest(raw, "--source", "omop", "--cohort", str(raw / "chf.toml"), workspace="whole")
    assert "belong to the cohort" not in whole.text


def test_periods_are_merged_where_no_day_is_between() -> None:
    table = pl.DataFrame(
        [("a", 0, 9), ("a", 10, 19), ("a", 21, 30), ("b", 5, 50), ("b", 7, 9), ("c", 1, 1)],
        schema={"subject_id": pl.String, "start": pl.Int32, "end": pl.Int32},
        orient="row",
    )
    merged = periods.merge_periods(table.sample(fraction=1, shuffle=True, seed=1))
    assert merged.rows() == [("a", [0, 21], [19, 30])]


@pytest.mark.parametrize(
    ("index_day", "start", "end"), [(5, 0, 19), (19, 0, 19), (20, 0, 19), (25, 21, 30), (-3, 0, 19)]
)
def test_the_period_is_that_of_the_index_day(index_day: int, start: int, end: int) -> None:
    frame = pl.DataFrame(
        {
            "index_day": [index_day, index_day],
            "obs_start": [0, -9],
            "obs_end": [30, 99],
            "period_starts": [[0, 21], None],
            "period_ends": [[19, 30], None],
        },
        schema_overrides={"period_starts": pl.List(pl.Int32), "period_ends": pl.List(pl.Int32)},
    )
    placed = periods.place_periods(frame)
    assert placed.select("obs_start", "obs_end").rows() == [(start, end), (-9, 99)]


def test_an_event_in_a_later_period_is_followed_in_it() -> None:
    """The first event is the index: its own period counts, as in PatientLevelPrediction."""
    rules = cohorts.CohortRules.model_validate(
        {
            "name": "later",
            "rule": [
                {"name": "chf", "codes": {"icd9": ["428"]}, "any": [{"count": 1}]},
                {"name": "start", "codes": {"icd9": ["250"]}, "any": [{"count": 1}]},
            ],
            "index": {"at": "event", "rule": "start"},
            "outcome": {"rule": "chf"},
            "risk": {"to_day": 100},
        }
    )
    subjects = pl.DataFrame(
        {
            "subject_id": [0, 1, 2],
            "first_day": [0, 0, 0],
            "birth_day": [-20000] * 3,
            "obs_start": [0, 0, 0],
            "obs_end": [900, 900, 900],
            "death_day": [None, None, None],
            "sex": [1, 1, 2],
            "split": ["train"] * 3,
            "event_day": [700, 250, 850],  # in the second period, in the gap, too late
            "period_starts": [[0, 600]] * 3,
            "period_ends": [[200, 900]] * 3,
        },
        schema_overrides={"death_day": pl.Int32},
    )
    outcomes = pl.DataFrame(schema={"subject": pl.Int64, "day": pl.Int64})
    record = cohorts.select_subjects(rules, subjects, outcomes)
    assert record["left_out"].to_list() == [None, "outside the observation", "short follow-up"]
    assert record["observation_start"].to_list()[0] == 600


def test_a_landmark_is_followed_in_its_period() -> None:
    cohort = pl.DataFrame(
        {
            "first_day": [0, 0],
            "obs_end": [900, 900],
            "y_chf": [0, 0],
            "onset_chf": [None, None],
            "period_starts": [[0, 600], None],
            "period_ends": [[200, 900], None],
        },
        schema_overrides={
            "onset_chf": pl.Int32,
            "period_starts": pl.List(pl.Int32),
            "period_ends": pl.List(pl.Int32),
        },
    )
    landmark = event_labels.Landmark(landmark_days=100, gap_days=0, horizon_days=200)
    followed = event_labels.apply_landmark(cohort, ["chf"], landmark)
    assert followed["y_chf"].to_list() == [None, 0], "unknown is null, never 0"


# --- rows that are dropped


def test_all_rows_outside_of_the_lives_are_refused(ingest: Ingest, raw: Path) -> None:
    """As 02 and 11b: every claim lies before the births."""
    copy_case(raw, "00_control")
    births = read_patients().with_columns(birth_date=pl.lit("2015-01-01"))
    births.write_csv(raw / "patients.csv")
    ended = ingest(raw)
    assert ended.code == 4
    assert ended.has("error[date_outside_life]", "none of", "840 rows")
    assert not (ended.workspace / "tokens").exists()


def test_rows_dropped_by_a_rule_count_for_max_bad(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    late = pl.col("patient_id").is_in(read_patients()["patient_id"].head(20).implode())
    day = (pl.int_range(pl.len()) % 9 + 1).cast(pl.String)
    born = pl.when(late).then(pl.lit("2015-01-0") + day).otherwise("birth_date")
    read_patients().with_columns(birth_date=born).write_csv(raw / "patients.csv")
    lost = read_control().filter(late).height
    strict = ingest(raw, "--max-bad", "0.1")
    assert strict.code == 4
    assert strict.has("are dropped by a rule", "--max-bad 0.1")
    lenient = ingest(raw, "--max-bad", "0.5", workspace="lenient")
    assert lenient.code == 0
    assert lenient.has(f"{lost} rows", "a day between birth and death")


@pytest.mark.parametrize("value", ["0", ""])
def test_a_column_of_labels_without_a_case_is_refused(
    ingest: Ingest, raw: Path, value: str
) -> None:
    copy_case(raw, "00_control")
    table = read_patients().select("patient_id", outcome=pl.lit(value), other=pl.lit("1"))
    table.write_csv(raw / "labels.csv")
    ended = ingest(raw)
    assert ended.code == 0
    assert ended.has("warning[class_missing]", "0 of 60 subjects have the label 'outcome'")
    asked = ingest(raw, "--label-column", "outcome:stroke:1", workspace="asked")
    assert asked.code == 4
    assert asked.has("error[class_missing]", "'stroke'")


def test_histories_too_short_for_all_end_with_the_reason(ingest: Ingest, raw: Path) -> None:
    ended = ingest(copy_case(raw, "00_control"), "--min-codes", "500")
    assert ended.code == 4
    assert ended.has("error[no_input]", "no subject has a sequence")
    assert ended.text.count("no subject has a sequence") == 1


# --- files


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["05_pcornet_dxtype", "07_semicolon", "15_yearly_files", "30e_spark_folder"]
)
def test_cases_of_files(ingest: Ingest, raw: Path, case: str) -> None:
    copy_case(raw, case)
    if case == "05_pcornet_dxtype":
        claims = pl.read_csv(raw / "claims.csv", infer_schema=False)
        people = claims.select(PATID=pl.col("PATID").unique(maintain_order=True))
        people.with_columns(BIRTH_DATE=pl.lit("1950-06-15")).write_csv(raw / "demographic.csv")
    else:
        copy_patients(raw)
    ended = ingest(raw, whole=True)
    assert ended.code == 0
    expected = {name: 2 * n for name, n in RIGHT.items()} if case.startswith("05") else RIGHT
    assert ended.count_cases() == expected


@pytest.mark.parametrize(
    ("name", "mark"),
    [("claims.csv", ";"), ("claims.tsv", "\t"), ("claims.txt", "|"), ("CLAIMS.CSV", "|")],
)
def test_any_separator(ingest: Ingest, raw: Path, name: str, mark: str) -> None:
    copy_patients(raw)
    noted = read_control().with_columns(note=pl.lit('a, "b"; c | d'))
    noted.write_csv(raw / name, separator=mark)
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "sep=;;;", "SEP=;"])
def test_a_first_line_may_state_the_separator(ingest: Ingest, raw: Path, line: str) -> None:
    copy_patients(raw)
    table = read_control().write_csv(separator=";")
    (raw / "claims.csv").write_text(f"{line}\r\n{table}")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)


@pytest.mark.parametrize(
    "names",
    [
        ["export of my claims.csv"],
        ["dx_a.csv", "dx_b.csv.gz", "dx_c.csv"],
        ["claims-000000000000.csv", "claims-000000000001.csv"],
        ["2005/claims.csv", "2006/claims.csv"],
        ["claims.csv/part-00000-1f.c000.csv", "claims.csv/part-00001-1f.c000.csv"],
    ],
)
def test_any_names_and_numbers_of_files(ingest: Ingest, raw: Path, names: Sequence[str]) -> None:
    copy_patients(raw)
    (raw / "README.txt").write_text("claims of a hospital\n")
    (raw / "prices.csv").write_text("patient_id,price\nP0000,7\n")
    claims = read_control()
    for number, name in enumerate(names):
        path = raw / name
        path.parent.mkdir(exist_ok=True)
        part = claims.gather_every(len(names), number)
        text = part.write_csv().encode()
        if name.endswith(".gz"):
            import gzip

            text = gzip.compress(text)
        path.write_bytes(text)
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    assert ended.has("not read", "prices.csv")


def test_a_table_that_is_there_twice_is_refused(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    read_control().write_parquet(raw / "claims.parquet")
    ended = ingest(raw)
    assert ended.code == 4
    assert ended.has("occurs 2 times")


def test_partitions_state_what_their_files_lack(ingest: Ingest, raw: Path) -> None:
    copy_patients(raw)
    claims = read_control()
    for year in ("2005", "2006", "2007"):
        folder = raw / "claims" / "icd_version=9" / f"year={year}"
        folder.mkdir(parents=True)
        part = claims.filter(pl.col("date").str.starts_with(year))
        part.rename({"icd9": "code"}).write_parquet(folder / "data_0.parquet")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)


def test_files_of_two_vocabularies_by_the_names_of_their_columns(ingest: Ingest, raw: Path) -> None:
    copy_patients(raw)
    read_control().write_csv(raw / "claims_2005.csv")
    later = pl.DataFrame({"patient_id": ["P0000"] * 3, "icd10": ["I10", "E78.5", "J44.9"]})
    later.with_columns(date=pl.lit("2008-01-02")).write_csv(raw / "claims_2008.csv")
    ended = ingest(raw)
    assert ended.code == 0
    events = pl.concat(list(open_cache(ended.workspace / "cache" / "pophr").events()))
    codes = events["code"].str.extract(r"^(\w+)//").value_counts()
    assert dict(codes.iter_rows()) == {"ICD9": 840, "ICD10": 3}


@pytest.mark.parametrize(
    "names",
    [
        ("claims_inpatient.csv", "claims_physician.csv"),
        ("hospital_2005.csv", "physician_2005.csv"),
        ("2005/DAD.csv", "2005/MSP.csv"),
        ("inpatient.csv", "visits.csv"),  # of which one states no kind
    ],
)
def test_names_of_files_state_the_kinds_of_their_rows(
    ingest: Ingest, raw: Path, names: tuple[str, str]
) -> None:
    """All are born in 1950: a stay with heart failure is a case, of other claims two in a year."""
    copy_patients(raw)
    claims = read_control()
    is_failure = pl.col("icd9") == "428.0"
    for name, rows in zip(names, (is_failure, ~is_failure), strict=True):
        (raw / name).parent.mkdir(exist_ok=True)
        claims.filter(rows).write_csv(raw / name)
    ended = ingest(raw)
    is_stated = names[1] != "visits.csv"
    stays = claims.filter(is_failure)["patient_id"].n_unique()
    assert ended.count_cases() == RIGHT | ({"chf": stays} if is_stated else {})
    assert ended.has("rows are inpatient, by the name of the file") is is_stated


@pytest.mark.slow
def test_several_columns_of_codes(ingest: Ingest, raw: Path) -> None:
    """Two claims of one day and person in one row; the same codes as in the control."""
    copy_patients(raw)
    claims = read_control().with_columns(
        n=pl.int_range(pl.len()).over("patient_id") // 2, k=pl.int_range(pl.len()) % 2
    )
    wide = claims.group_by("patient_id", "n", maintain_order=True).agg(
        pl.col("date").first(),
        main=pl.col("icd9").first(),
        other=pl.col("icd9").get(1, null_on_oob=True),
    )
    wide.drop("n").write_csv(raw / "claims.csv")
    ended = ingest(raw, "--col", "code=main,other")
    assert ended.code == 0
    assert ended.count_rows() == 840
    assert ingest(raw, "--col", "code=main,third", workspace="v").code == 2
    numbered = wide.rename({"main": "DIAG_01", "other": "DIAG_02"}).drop("n")
    numbered.write_csv(raw / "claims.csv")
    assert ingest(raw, workspace="numbered").count_cases() == ended.count_cases()


WIDE_NAMES = {
    "medicare": ("ICD_DGNS_CD1", "ICD_DGNS_CD2"),
    "sweden": ("DIA1", "DIA2"),
    "taiwan": ("ACODE_ICD9_1", "ACODE_ICD9_2"),
    "state": ("odiag1", "odiag2"),
    "korea": ("SICK_SYM1", "SICK_SYM2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "main"), [*zip(WIDE_NAMES, itertools.cycle(["dx_admit", "icd_main"]), strict=False)]
)
def test_another_diagnosis_beside_numbered_ones_is_named(
    ingest: Ingest, raw: Path, name: str, main: str
) -> None:
    """Each row has three codes of its person; those of procedures are no diagnoses."""
    copy_patients(raw)
    names = [main, *WIDE_NAMES[name]]
    claims = read_control().with_columns(n=pl.int_range(pl.len()).over("patient_id") // 3)
    wide = claims.group_by("patient_id", "n", maintain_order=True).agg(
        pl.col("date").first(),
        *(pl.col("icd9").get(i, null_on_oob=True).alias(key) for i, key in enumerate(names)),
    )
    wide = wide.with_columns(ICD_PRCDR_CD1=pl.lit("3893"), ICD_DGNS_VRSN_CD1=pl.lit("9"))
    wide.drop("n").write_csv(raw / "claims.csv")
    first = ingest(raw)
    assert first.has("1 column of codes is not read", f"'{main}'")
    assert first.count_rows() == 540
    columns = ",".join([*names[1:], main])
    assert first.has("--col code=" + ",".join(f"'{key}'" for key in columns.split(",")))
    followed = ingest(raw, "--col", f"code={columns}", workspace="followed")
    assert (followed.code, followed.count_rows()) == (0, 840)


@pytest.mark.parametrize(
    "names",
    [
        ("HDIA", "DIA1", "DIA2"),  # Sweden
        ("PRNCPAL_DGNS_CD", "ICD_DGNS_CD1", "ICD_DGNS_CD2"),  # Medicare
        ("DGN_PAL", "DGN_REL", "ASS_DGN1"),  # France
        ("MAIN_SICK", "SUB_SICK", "SICK_SYM3"),  # Korea
        ("principal_dx", "secondary_dx", "dx1"),
        ("hovedtilstand1", "bitilstand_1_1", "bitilstand_1_2"),  # Norway
        ("PDGO", "SDG1O", "SDG2O"),  # Finland
        ("diagnosis_codeP", "diagnosis_code1", "diagnosis_code2"),  # Australia
        ("PRINC_DIAG_CODE", "OTH_DIAG_CODE_1", "OTH_DIAG_CODE_2"),  # Texas
        ("diag_p", "odiag1", "odiag2"),  # California
        ("Principal Diagnosis Code", "Other Diagnosis Code 1", "Other Diagnosis Code 2"),
        ("MRDX", "DX_CODE_1", "DX_CODE_2"),
    ],
)
def test_main_diagnoses_are_read_beside_others(tmp_path: Path, names: Sequence[str]) -> None:
    lines = "a1,2015-02-03,E119,I10,J449\na2,2015-02-04,I500,,K210\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,{','.join(names)}\n{lines}")
    claims, events = read_folder(tmp_path)
    assert sorted(events["code"]) == ["E119", "I10", "I500", "J449", "K210"]
    assert not [finding for finding in claims.findings if "not read" in finding.problem]


@pytest.mark.parametrize(
    ("code", "flag"),
    [
        ("OTH_DIAG_CODE_{}", "POA_OTH_DIAG_CODE_{}"),  # Texas
        ("DX{}", "POADX{}"),
        ("I10_DX{}", "DXPOA{}"),  # HCUP
        ("ICD_DGNS_CD{}", "CLM_POA_IND_SW{}"),  # Medicare
    ],
)
def test_flags_of_presence_on_admission_are_no_codes(tmp_path: Path, code: str, flag: str) -> None:
    names = [name.format(n) for n in range(1, 26) for name in (code, flag)]
    cells = [("E119", "Y"), ("I10", "N"), ("I500", "1"), *[("", "")] * 22]
    row = ",".join(cell for pair in cells for cell in pair)
    write_files(tmp_path, claims__csv=f"patient_id,date,{','.join(names)}\na1,2015-02-03,{row}\n")
    claims, events = read_folder(tmp_path)
    assert list(events["code"]) == ["E119", "I10", "I500"]
    assert not [finding for finding in claims.findings if "not read" in finding.problem]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (("icd9", "icd10"), []),
        (("ICD_10", "ICD-9"), []),
        (("icd9_code", "icd10_code"), []),
        (("icd10cm", "icd9cm"), []),
        (("diag_icd9", "diag_icd10"), []),
        (("diag_icd9", "diag_icd10"), ["--col", "code=diag_icd9,diag_icd10"]),
    ],
)
def test_columns_of_two_vocabularies_keep_them(
    ingest: Ingest, raw: Path, columns: tuple[str, str], options: list[str]
) -> None:
    copy_patients(raw)
    nine, ten = sorted(columns, key=lambda name: "10" in name)
    claims = read_control().rename({"icd9": nine}).with_columns(pl.lit("").alias(ten))
    later = pl.DataFrame({"patient_id": ["P0000"] * 3, "date": ["2008-01-02"] * 3, nine: [""] * 3})
    later = later.with_columns(pl.Series(ten, ["I10", "E78.5", "J44.9"]))
    pl.concat([claims, later]).select("patient_id", "date", *columns).write_csv(raw / "claims.csv")
    ended = ingest(raw, *options)
    assert ended.code == 0
    events = pl.concat(list(open_cache(ended.workspace / "cache" / "pophr").events()))
    codes = events["code"].str.extract(r"^(ICD9|ICD10)(?:CM)?//").value_counts()
    assert dict(codes.iter_rows()) == {"ICD9": 840, "ICD10": 3}


@pytest.mark.parametrize(
    ("series", "others"),
    [
        ("icd_{}", ["icd_type", "icd_date_1"]),  # icd_9 and icd_10 are two of the series
        ("icd{}", ["icdproc1"]),
        ("dx{}", ["dxccs1", "dxpoa1", "dxtype1", "dxdate1", "dxver1"]),  # HCUP
        ("DX10CODE{}", ["DXTYPE1", "ADMITDATE"]),  # Canada
        ("diag_{}_code", ["diag_1_date", "diag_1_desc"]),
        ("dx{}_icd9", ["px1_icd9"]),
        ("secondary_diagnosis_{}", ["secondary_procedure_1"]),
        ("Nebendiagnose{}", ["OPS1"]),
        ("DIAG{}", ["DIAG1R", "PRDIAG1", "DIAG13D"]),  # NHAMCS
    ],
)
def test_columns_that_differ_by_a_number_are_those_of_codes(series: str, others: list[str]) -> None:
    wide = [series.format(i) for i in range(1, 13)]
    names = ["patient_id", "date", *others, *reversed(wide)]
    assert code_columns.find_wide_columns(names, None) == tuple(wide)


# --- a date for each code


def read_dated_codes(ended: Ended) -> Counter[tuple[str, str]]:
    """Rows by date and code without its point."""
    assert ended.code == 0, ended.text
    events = pl.concat(list(open_cache(ended.workspace / "cache" / "pophr").events()))
    codes = events["code"].cast(pl.String).str.extract(r"//(.*)").str.replace(".", "", literal=True)
    return Counter(zip(events["time"].dt.strftime("%Y-%m-%d"), codes, strict=True))


DISEASES = ("E119", "I10", "I509", "J449")


def make_arrays() -> tuple[list[list[str]], list[list[str]]]:
    """Codes and dates of 30 people, up to four each, in another order by person."""
    codes, dates_of_codes = [], []
    for person in range(30):
        n = 2 + person % 3
        written = [DISEASES[(person + i) % 4] for i in range(n)]
        days = [
            f"20{5 + (person + 3 * i) % 7:02d}-0{1 + i}-{1 + person % 28:02d}" for i in range(n)
        ]
        codes.append(written + [""] * (4 - n))
        dates_of_codes.append(days + [""] * (4 - n))
    return codes, dates_of_codes


def write_arrays(path: Path, code: str, date_name: str) -> Counter[tuple[str, str]]:
    """A row a person, with columns of codes and of dates; the pairs that it holds."""
    codes, days = make_arrays()
    subject = {"d": "person_id", "p": "participant.eid"}.get(code[0], "eid")
    ids = [(subject, [str(n) for n in range(30)])]
    named = ids + [
        (name.format(i, i + 1), [row[i] for row in cells])
        for name, cells in ((code, codes), (date_name, days))
        for i in range(4)
    ]
    pl.DataFrame(dict(named)).write_csv(path)
    pairs = [zip(*row, strict=True) for row in zip(days, codes, strict=True)]
    return Counter(pair for row in pairs for pair in row if pair[1])


@pytest.mark.parametrize(
    ("code", "date_name", "options"),
    [
        ("41270-0.{0}", "41280-0.{0}", []),
        ("f.41270.0.{0}", "f.41280.0.{0}", ["--col", "subject=eid"]),
        ("participant.p41270_a{0}", "participant.p41280_a{0}", []),
        ("41270-0.{0}", "41280-0.{0}", ["--col", "code=41270-*", "--col", "date=41280-*"]),
        ("dx{1}", "dx{1}_date", []),
        ("dx_{1}", "dxdate{1}", ["--col", "date=dxdate1,dxdate2,dxdate3,dxdate4"]),
    ],
)
def test_each_code_has_its_own_date(
    ingest: Ingest, raw: Path, code: str, date_name: str, options: list[str]
) -> None:
    expected = write_arrays(raw / "export.csv", code, date_name)
    vocab = ["--col", "vocab=icd10"] if code.startswith("dx") else []
    ended = ingest(raw, *HISTORIES_ALONE, *vocab, *options)
    assert read_dated_codes(ended) == expected
    assert ended.has("have their dates in") == ("date=" not in " ".join(options))


@pytest.mark.parametrize("mark", ["|", "', '"])
def test_a_cell_with_a_list_has_the_dates_of_its_columns(
    ingest: Ingest, raw: Path, mark: str
) -> None:
    expected = write_arrays(raw / "export.csv", "41270-0.{0}", "p41280_a{0}")
    table = pl.read_csv(raw / "export.csv", infer_schema=False)
    arrays = [f"41270-0.{i}" for i in range(4)]
    lists = table.select(pl.concat_list(arrays).list.drop_nulls().list.join(mark)).to_series()
    listed = [f"['{text}']" if "'" in mark else text for text in lists]
    wide = table.drop(arrays).with_columns(p41270=pl.Series(listed))
    wide.write_csv(raw / "export.csv")
    assert read_dated_codes(ingest(raw, *HISTORIES_ALONE)) == expected
    wide.drop("p41280_a3").write_csv(raw / "export.csv")
    short = ingest(raw, *HISTORIES_ALONE, workspace="short")
    assert short.code == 4
    assert short.has("p41270", "up to 4 codes", "3 columns of dates", "Export all columns")


@pytest.mark.slow
def test_columns_that_cannot_be_paired_are_refused(ingest: Ingest, raw: Path) -> None:
    expected = write_arrays(raw / "export.csv", "41270-0.{0}", "41280-0.{0}")
    one = ingest(raw, *HISTORIES_ALONE, "--col", "date=41280-0.0")
    assert one.code == 2
    assert one.has("is one of 4 columns", "Give --col 'date=41280-0.*'")
    followed = ingest(raw, *HISTORIES_ALONE, "--col", "date=41280-0.*", workspace="followed")
    assert read_dated_codes(followed) == expected
    table = pl.read_csv(raw / "export.csv", infer_schema=False)
    table.drop("41270-0.0", "41280-0.3").write_csv(raw / "export.csv")
    other = ingest(raw, *HISTORIES_ALONE, workspace="other")  # numbers 1 to 3 and 0 to 2
    assert other.code == 2
    table.drop("41270-0.0").write_csv(raw / "export.csv")
    later = read_dated_codes(ingest(raw, *HISTORIES_ALONE, workspace="later"))
    assert set(later) < set(expected)
    table.drop("41280-0.3").write_csv(raw / "export.csv")
    unequal = ingest(raw, *HISTORIES_ALONE, workspace="unequal")
    assert unequal.code == 2
    assert unequal.has("3 columns of dates and 4 columns of codes cannot be paired")


# --- times of observation


SPELLS = (("2005-01-01", "2005-12-31"), ("2006-03-01", "2007-12-31"))


def make_spells(*names: str, last: str = "2007-12-31") -> pl.DataFrame:
    """Two times of observation of each of the 60 people, with a gap between."""
    ends = {"2007-12-31": last}
    rows = [
        (person, start, ends.get(end, end))
        for person in read_patients()["patient_id"]
        for start, end in SPELLS
    ]
    return pl.DataFrame(rows, schema=list(names), orient="row")


def read_spells(ended: Ended) -> list[tuple[object, ...]]:
    """The distinct times of observation, as lists of dates."""
    assert ended.code == 0, ended.text
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    days = [
        pl.col(name).cast(pl.List(pl.Date)).list.eval(pl.element().cast(pl.String))
        for name in ("period_starts", "period_ends")
    ]
    return cohort.select(days).unique().rows()


GAPS = [tuple(map(list, zip(*SPELLS, strict=True)))]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("enrollment.csv", ("patient_id", "enr_start", "enr_end")),
        ("ENROLLMENT.csv", ("PATID", "ENR_START_DATE", "ENR_END_DATE")),
        ("spells.csv", ("patient_id", "DTSTART", "DTEND")),
    ],
)
@pytest.mark.parametrize("with_patients", [True, False])
def test_a_row_for_each_time_of_observation(
    ingest: Ingest, raw: Path, name: str, columns: Sequence[str], *, with_patients: bool
) -> None:
    copy_case(raw, "00_control")
    if not with_patients:
        (raw / "patients.csv").unlink()
    make_spells(*columns).write_csv(raw / name)
    ended = ingest(raw, "--keep-dates", *[] if with_patients else ["--rules", "none"])
    assert read_spells(ended) == GAPS
    assert ended.has(name, "60 subjects were observed in several periods")


def test_patients_with_a_row_for_each_time_of_observation(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    spells = make_spells("patient_id", "obs_start", "obs_end")
    read_patients().join(spells, on="patient_id").write_csv(raw / "patients.csv")
    ended = ingest(raw, "--keep-dates")
    assert ended.count_cases() == RIGHT
    assert read_spells(ended) == GAPS


@pytest.mark.parametrize("last", ["", "9999-12-31"])
def test_an_observation_without_an_end_reaches_to_the_last_day(
    ingest: Ingest, raw: Path, last: str
) -> None:
    copy_case(raw, "00_control")
    make_spells("patient_id", "enr_start", "enr_end", last=last).write_csv(raw / "enrollment.csv")
    [(starts, ends)] = read_spells(ingest(raw, "--keep-dates"))
    assert starts == [start for start, _ in SPELLS]
    assert ends == [SPELLS[0][1], read_control()["date"].max()]


@pytest.mark.parametrize("file", ["patients.csv", "enrollment.csv"])
def test_an_observation_that_ends_before_it_starts_is_said(
    ingest: Ingest, raw: Path, file: str
) -> None:
    copy_case(raw, "00_control")
    start, end = ["2005-01-01"] * 55 + ["2009-12-31"] * 5, "2009-01-01"
    dates = read_patients().with_columns(obs_start=pl.Series(start), obs_end=pl.lit(end))
    dates.write_csv(raw / file)
    ended = ingest(raw, "--keep-dates")
    assert ended.has(f"{file}:obs_end: 5 times of observation end before they start")
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort(("subject_id", "obs_start"))
    assert cohort["obs_start"].null_count() == 5


@pytest.mark.slow
def test_a_table_of_observation_by_other_names_is_asked_for(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    make_spells("patient_id", "from_day", "to_day").write_csv(raw / "insured.csv")
    ended = ingest(raw)
    assert ended.has("not read", "insured.csv", "--col obs_start=NAME --col obs_end=NAME")
    options = ["--col", "obs_start=from_day", "--col", "obs_end=to_day", "--keep-dates"]
    followed = ingest(raw, *options, workspace="followed")
    assert read_spells(followed) == GAPS
    assert followed.count_cases() == RIGHT


@pytest.mark.parametrize(
    "word",
    [
        *("09", "9", "9.0", "ICD9CM", "ICD-9-CM", "icd 9", "i9"),
        *("http://hl7.org/fhir/sid/icd-9-cm", "2.16.840.1.113883.6.103"),
    ],
)
def test_words_of_vocabularies(ingest: Ingest, raw: Path, word: str) -> None:
    copy_patients(raw)
    claims = read_control().rename({"icd9": "code"}).with_columns(vocabulary_id=pl.lit(word))
    snomed = claims.head(5).with_columns(code=pl.lit("44054006"), vocabulary_id=pl.lit("SM"))
    pl.concat([claims, snomed]).write_csv(raw / "claims.csv")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    assert ended.has("5 rows", "are of vocabularies without diagnoses")


def test_a_word_that_is_not_known_is_asked_for(ingest: Ingest, raw: Path) -> None:
    copy_patients(raw)
    claims = read_control().rename({"icd9": "code"}).with_columns(DXVER=pl.lit("nine"))
    claims.write_csv(raw / "claims.csv")
    ended = ingest(raw)
    assert ended.code == 4
    assert ended.has("error[wrong_vocabulary]", "'nine'", "--source-vocab")
    followed = ingest(raw, "--source-vocab", "nine=icd9")
    assert (followed.code, followed.count_cases()) == (0, RIGHT)
    assert ingest(raw, "--source-vocab", "nine=icd8").code == 2


def test_the_vocabulary_of_all_rows_may_have_the_name_of_the_column(
    ingest: Ingest, raw: Path
) -> None:
    """DX_TYPE is a vocabulary in PCORnet, and main or secondary in Canada."""
    copy_patients(raw)
    read_control().with_columns(DX_TYPE=pl.lit("M")).write_csv(raw / "claims.csv")
    assert ingest(raw).has("'M'", "--col vocab=")
    followed = ingest(raw, "--col", "vocab=icd9", workspace="followed")
    assert (followed.code, followed.count_cases(), followed.count_rows()) == (0, RIGHT, 840)


@pytest.mark.slow
def test_a_column_of_vocabularies_by_another_name_is_named(ingest: Ingest, raw: Path) -> None:
    copy_patients(raw)
    claims = read_control().rename({"icd9": "code"})
    later = claims.head(2).with_columns(code=pl.Series(["E85.0", "I10"]), coded_in=pl.lit("ICD10"))
    pl.concat([claims.with_columns(coded_in=pl.lit("ICD9")), later]).write_csv(raw / "claims.csv")
    first = ingest(raw)
    assert first.has("'coded_in' may hold the vocabularies", "Give --col vocab='coded_in'")
    followed = ingest(raw, "--col", "vocab=coded_in", workspace="followed")
    assert (followed.code, followed.count_cases(), followed.count_rows()) == (0, RIGHT, 842)


# --- Stata, SAS, SPSS


@pytest.mark.parametrize("case", ["31_stata", "31b_sas_xpt", "31c_spss"])
def test_cases_of_statistics_files(ingest: Ingest, raw: Path, case: str) -> None:
    """All dates of these files are 1970-01-01: 840 rows are read, births are asked for."""
    pytest.importorskip("pyreadstat")
    ended = ingest(copy_case(raw, case))
    assert ended.code == 0
    assert ended.has("births of 0 of")


@pytest.mark.parametrize("ending", ["dta", "sav", "xpt"])
def test_statistics_files_are_the_table_that_was_written(
    ingest: Ingest, raw: Path, ending: str
) -> None:
    pyreadstat = pytest.importorskip("pyreadstat")
    pandas = pytest.importorskip("pandas")
    claims = pandas.read_csv(CONTROL / "claims.csv", dtype=str)
    claims["patient_id"] = claims["patient_id"].str[1:].astype(float)  # numbers are doubles there
    claims["date"] = pandas.to_datetime(claims["date"]).dt.date
    patients = pandas.read_csv(CONTROL / "patients.csv", dtype=str)
    patients["patient_id"] = patients["patient_id"].str[1:].astype(float)
    patients["birth_date"] = pandas.to_datetime(patients["birth_date"]).dt.date
    patients["sex"] = [float(i % 3 == 0) for i in range(60)]  # of which 20 are 1, female
    write = getattr(
        pyreadstat, {"dta": "write_dta", "sav": "write_sav", "xpt": "write_xport"}[ending]
    )
    write(claims, str(raw / f"claims.{ending}"))
    named = {} if ending == "xpt" else {"variable_value_labels": {"sex": {0: "Male", 1: "Female"}}}
    write(patients, str(raw / f"patients.{ending}"), **named)
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    if named:
        cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
        assert (cohort["sex"] == 2).sum() == patients["sex"].sum()


def test_labels_of_numbers_are_read_in_every_column_of_words(ingest: Ingest, raw: Path) -> None:
    """Sexes, states and kinds of claims stand in one table, with numbers against custom."""
    pyreadstat = pytest.importorskip("pyreadstat")
    pandas = pytest.importorskip("pandas")
    claims = pandas.read_csv(CONTROL / "claims.csv", dtype=str)
    claims["date"] = pandas.to_datetime(claims["date"]).dt.date
    person = claims["patient_id"].rank(method="dense").astype(int)
    claims["sex"] = 1.0 + person % 2
    claims["vital_status"] = (person > 7).astype(float)
    claims["last_contact"] = claims["date"].max()
    claims["source"] = 2.0
    labels = {
        "sex": {1.0: "Female", 2.0: "Male"},
        "vital_status": {0.0: "Dead", 1.0: "Alive"},
        "source": {1.0: "Inpatient", 2.0: "Physician"},
    }
    pyreadstat.write_sav(claims, str(raw / "claims.sav"), variable_value_labels=labels)
    ended = ingest(raw)
    assert ended.code == 0
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert cohort.height == 60
    assert (cohort["sex"] == 1).sum() == 30
    assert cohort["death_day"].is_not_null().sum() == 7
    events = pl.read_parquet(ended.workspace / "cache" / "pophr" / "events-*.parquet")
    assert events["source"].cast(pl.String).unique().to_list() == ["physician"]


@pytest.mark.parametrize(("column", "exit_code", "rows"), [("icd9", 3, 841), ("dx1", 0, 840)])
def test_labels_that_are_codes_are_read_for_their_numbers(
    ingest: Ingest, raw: Path, column: str, exit_code: int, rows: int
) -> None:
    """As `encode` of Stata writes codes. A number without a label is no code of ICD-9."""
    pyreadstat = pytest.importorskip("pyreadstat")
    pandas = pytest.importorskip("pandas")
    claims = pandas.read_csv(CONTROL / "claims.csv", dtype=str)
    claims["date"] = pandas.to_datetime(claims["date"]).dt.date
    texts = sorted(claims["icd9"].unique())
    numbers = {text: i for i, text in enumerate(texts, 401)}
    claims[column] = claims.pop("icd9").map(numbers).astype(float)
    claims = pandas.concat([claims, claims.head(1).assign(**{column: 250.0})])
    titled = {n: text if n % 2 else f"{text} - title" for text, n in numbers.items()}
    labels = {column: titled | {999: "Missing"}}
    pyreadstat.write_dta(claims, str(raw / "claims.dta"), variable_value_labels=labels)
    shutil.copy(CONTROL / "patients.csv", raw)
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (exit_code, RIGHT, rows)


def test_codes_stored_as_numbers_are_refused(ingest: Ingest, raw: Path) -> None:
    pyreadstat = pytest.importorskip("pyreadstat")
    pandas = pytest.importorskip("pandas")
    claims = pandas.read_csv(CONTROL / "claims.csv", dtype=str)
    claims["icd9"] = pandas.to_numeric(claims["icd9"], errors="coerce")
    pyreadstat.write_dta(claims, str(raw / "claims.dta"))
    ended = ingest(raw)
    assert ended.code == 4
    assert ended.has("error[ambiguous_code]")
    (raw / "claims.dta").write_bytes(b"no table of Stata")
    damaged = ingest(raw)
    assert damaged.code == 4
    assert damaged.has("error[corrupt]")


def test_without_pyreadstat_the_way_out_is_named(
    ingest: Ingest, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyreadstat", None)
    ended = ingest(copy_case(raw, "31_stata"))
    assert ended.code == 2
    assert ended.has("error[missing_extra]", "pip install 'bitimely[stat]'")


# --- the first fifteen minutes: person, date and code in a table that somebody has


STRANGE = {
    "german, windows-1252": (
        ("Patientennummer", "Behandlungsdatum", "ICD"),
        {"separator": ";", "format": "%d.%m.%Y"},
        ["--encoding", "cp1252", "--date-format", "%d.%m.%Y"],
    ),
    "french": (
        ("id_patient", "date_entree", "diagnostic_principal"),
        {"separator": ";", "format": "%d/%m/%Y"},
        ["--date-format", "%d/%m/%Y"],
    ),
    "canadian": (("HCN", "ADMDATE", "DIAG_CODE"), {"separator": ",", "format": "%Y%m%d"}, []),
    "sentinel": (("PatID", "ADate", "DX"), {}, []),
    "french hospitals": (("NIR_ANO_17", "EXE_SOI_DTD", "DGN_PAL"), {"format": "%Y%m%d"}, []),
    "primary care": (("Patient ID", "Event Date", "Code Value"), {}, []),
    "stays": (("member", "admission", "dx"), {}, []),
}


@pytest.mark.parametrize("name", STRANGE)
def test_columns_as_people_call_them(ingest: Ingest, raw: Path, name: str) -> None:
    """The name of the icd9 column does not say the vocabulary: the codes are ICD-9 by default."""
    columns, form, options = STRANGE[name]
    table = read_control().select("patient_id", "date", "icd9")
    table = table.rename(dict(zip(table.columns, columns, strict=True)))
    day = pl.col(columns[1]).str.to_date().dt.strftime(form.get("format", "%Y-%m-%d"))
    table = table.with_columns(day, Bemerkung=pl.lit("Störung, übrig"), Betrag=pl.lit("1.234,50"))
    text = table.write_csv(separator=form.get("separator", ","))
    (raw / "export.csv").write_bytes(text.encode("cp1252" if "--encoding" in options else "utf-8"))
    copy_patients(raw)
    ended = ingest(raw, "--col", "vocab=icd9", *options)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        (("PatKey", "DtOfEvent", "icd9"), "--col subject='PatKey' --col date='DtOfEvent'"),
        (("key", "when", "icd9"), "--col subject=NAME --col date=NAME"),
        (("patient_id", "Visit_Dt_Local", "MyDx"), "--col date='Visit_Dt_Local' --col code='MyDx'"),
        (("patient_id", "date", "primary_dx", "second_dx"), "--col code='primary_dx','second_dx'"),
    ],
)
def test_columns_that_are_missing_are_asked_for_by_name(
    ingest: Ingest, raw: Path, columns: Sequence[str], advice: str
) -> None:
    table = read_control().select("patient_id", "date", "icd9")
    table = table.rename(dict(zip(table.columns, columns, strict=False)))
    table.with_columns(pl.lit("").alias(name) for name in columns[3:]).write_csv(raw / "export.csv")
    copy_patients(raw)
    first = ingest(raw)
    assert first.code == 4
    assert first.has(advice), first.text
    named = [
        f"{key}={name}" for key, name in zip(("subject", "date", "code"), columns, strict=False)
    ]
    options = [word for text in named for word in ("--col", text)]
    options += ["--col", "vocab=icd9"] if columns[2] != "icd9" else []
    second = ingest(raw, *options, workspace="v")
    assert (second.code, second.count_cases()) == (0, RIGHT)


def test_deaths_in_a_table_apart(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    died = read_patients()["patient_id"].gather_every(7)
    deaths = pl.DataFrame({"patient_id": died, "date": ["2007-12-31"] * len(died)})
    deaths.write_csv(raw / "deaths.csv")
    ended = ingest(raw, "--keep-dates")
    assert (ended.code, ended.count_cases()) == (0, RIGHT)
    day = (date(2007, 12, 31) - date(1970, 1, 1)).days
    cohort = open_cache(ended.workspace / "cache" / "pophr").cohort()
    assert cohort["death_day"].drop_nulls().to_list() == [day] * len(died)


@pytest.mark.parametrize(
    ("first", "facts", "second", "fact"),
    [
        ("births.csv", ["birth_date"], "sex.csv", "sex"),
        ("patients.csv", ["birth_date"], "gender.csv", "sex"),
        ("patients.csv", ["sex"], "births.csv", "birth_date"),
    ],
)
def test_births_and_sexes_in_tables_apart(
    ingest: Ingest, raw: Path, first: str, facts: list[str], second: str, fact: str
) -> None:
    copy_case(raw, "00_control")
    patients = read_patients()
    patients = patients.with_columns(sex=pl.Series(["M", "F", "F"] * 20))
    (raw / "patients.csv").unlink()
    patients.select("patient_id", *facts).write_csv(raw / first)
    wanted = [name for name in ("birth_date", "sex") if name not in facts]
    assert ingest(raw, workspace="v").has(f"Add a column {wanted[0]} to {first}")
    patients.select("patient_id", fact).write_csv(raw / second)
    ended = ingest(raw)
    assert (ended.code, ended.count_cases()) == (0, RIGHT)
    sexes = open_cache(ended.workspace / "cache" / "pophr").cohort()["sex"].to_list()
    assert (sexes.count(1), sexes.count(2)) == (20, 40)


def test_sexes_that_differ_between_rows_of_a_table_apart_are_unknown(tmp_path: Path) -> None:
    visits = "patient_id,sex,ward\na1,F,1\na1,F,2\na2,M,1\na2,F,2\n"
    patients = "patient_id,birth_date\na1,1950-01-02\na2,1951-01-02\n"
    write_files(tmp_path, claims__csv=HEAD + GOOD, patients__csv=patients, visits__csv=visits)
    claims, _ = read_folder(tmp_path)
    assert claims.subjects is not None
    sexes = dict(claims.subjects.select("subject_id", "sex").iter_rows())
    assert sexes == {"a1": 2, "a2": None}


@pytest.mark.slow
def test_deaths_and_observation_by_other_names(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    people = read_patients().with_columns(
        enr_start=pl.lit("2005-01-01"), enr_end=pl.lit("2007-12-31"), fecha_defuncion=pl.lit("")
    )
    people = people.with_columns(
        fecha_defuncion=pl.when(pl.int_range(pl.len()) < 9).then(pl.lit("2008-01-05"))
    )
    people.write_csv(raw / "patients.csv")
    read = open_cache(ingest(raw).workspace / "cache" / "pophr").cohort()
    facts = ["death_day", "obs_start", "obs_end"]
    assert [read[name].count() for name in facts] == [9, 60, 60]
    names = {"enr_start": "enrolled", "enr_end": "Enroll To", "fecha_defuncion": "exitus_day"}
    people.rename(names).with_columns(region=pl.lit("north")).write_csv(raw / "patients.csv")
    first = ingest(raw, workspace="v")
    assert first.has("'exitus_day' may hold deaths, not read", "--col death='exitus_day'")
    assert first.has(
        "'enrolled' and 'Enroll To' may hold times of observation",
        "--col obs_start=NAME --col obs_end=NAME",
    )
    assert not first.has("'region'")
    options = ["death=exitus_day", "obs_start=enrolled", "obs_end=Enroll To"]
    followed = ingest(raw, *(f"--col={text}" for text in options), workspace="followed")
    cohort = open_cache(followed.workspace / "cache" / "pophr").cohort()
    assert [cohort[name].count() for name in facts] == [9, 60, 60]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("claims.zip", "Unpack"),
        ("claims.csv.xz", "Unpack"),
        ("Claims 2005.xlsx", "Save"),
        ("claims.rds", "Save"),
    ],
)
def test_formats_that_are_not_read_are_named(
    ingest: Ingest, raw: Path, name: str, advice: str
) -> None:
    copy_patients(raw)
    (raw / name).write_bytes(b"PK\x03\x04")
    ended = ingest(raw)
    assert ended.code == 4
    assert ended.has(f"not read: '{name}'", advice)


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("deaths.xlsx", True),
        ("claims_2006.csv.zip", True),
        ("patients.xlsx", False),  # the origin of patients.csv
        ("codebook.xlsx", False),
    ],
)
def test_tables_beside_claims_in_formats_that_are_not_read_are_named(
    ingest: Ingest, raw: Path, name: str, *, is_named: bool
) -> None:
    copy_case(raw, "00_control")
    (raw / name).write_bytes(b"PK\x03\x04")
    ended = ingest(raw)
    assert ended.code == 0
    assert ended.has(f"not read: '{name}'") == is_named


PCORNET = ("PATID", "ADMIT_DATE", "DX", "PX"), ("diagnosis", "procedures", "vital")
SYNTHEA = ("PATIENT", "START", "CODE", "CODE"), ("conditions", "procedures", "observations")


@pytest.mark.parametrize(("columns", "files"), [PCORNET, SYNTHEA])
def test_tables_of_procedures_and_measurements_are_no_claims(
    ingest: Ingest, raw: Path, columns: Sequence[str], files: Sequence[str]
) -> None:
    copy_patients(raw)
    subject, day, code, other = columns
    claims = read_control().select(
        pl.col("patient_id").alias(subject), pl.col("date").alias(day), pl.col("icd9").alias(code)
    )
    claims.write_csv(raw / f"{files[0]}.csv")
    apart = claims.rename({code: other}).with_columns(pl.lit("38.93").alias(other))
    for name in files[1:]:
        apart.write_csv(raw / f"{name}.csv")
    ended = ingest(raw)
    assert (ended.code, ended.count_cases(), ended.count_rows()) == (0, RIGHT, 840)
    assert ended.has("not read", f"'{files[1]}.csv'", f"'{files[2]}.csv'")


@pytest.mark.slow
def test_further_columns_of_codes_are_named(ingest: Ingest, raw: Path) -> None:
    copy_case(raw, "00_control")
    claims = read_control().with_columns(dx_other=pl.lit("401.9"), diag_text=pl.lit("pressure"))
    claims.write_csv(raw / "claims.csv")
    first = ingest(raw)
    assert first.has("1 column of codes is not read", "'dx_other'", "--col code='icd9','dx_other'")
    assert not first.has("columns of codes", "diag_text")
    second = ingest(raw, "--col", "code=icd9,dx_other", workspace="v")
    assert second.count_rows() > first.count_rows()


@pytest.mark.parametrize("code", ["E11.9", "DE119"])  # of the Danish SKS
def test_icd10_with_a_map_of_icd10_alone(
    raw: Path, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    rows = [f"{p},2015-01-{day:02d},{code}" for p in range(12) for day in range(1, 7)]
    (raw / "export.csv").write_text("\n".join(["person,date,code", *rows]) + "\n")
    (raw / "map.csv").write_text("icd10,phecode\nE11.9,250.2\nI10,401.1\n")
    home = raw.parent / "w"
    words = ["ingest", "pophr", str(raw), "-w", str(home), "--phecode-map", str(raw / "map.csv")]
    assert main(words) == 4
    assert "--col vocab=icd10" in capfd.readouterr().err
    words += ["--col", "vocab=icd10", "--rules", "none", "--no-select", "--min-codes", "1"]
    assert main(words) == 0
    assert "not read" not in "".join(capfd.readouterr())  # the map lies beside the claims
    assert open_cache(home / "cache" / "pophr").events_manifest.funnel.rows == 72
