"""Codes, dates and reversals as claims have them: the shared cases by the command line, and further
members of each class.

Expected values come from the README of the cases, or from Python's and pandas' own arithmetic.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from claims_folders import HEAD, read_folder, write_files
from samples import SHARED
from short_maps import MAP9, MAP10

from bitimely_cli.main import main
from bitimely_core.claims import (
    code_cells,
    code_forms,
    codebook,
    codes,
    dates,
    phecode_maps,
    reversals,
    unknown_dates,
)
from bitimely_core.errors import UserError

CASES = SHARED / "cases" / "claims_files"

pytestmark = pytest.mark.skipif(
    not (CASES.exists() and MAP9.exists()), reason="the shared cases and maps are not there"
)


# --- the cases by the command line


class Outcome:
    """What the command left: exit code, screen, and the tables of the cache."""

    def __init__(self, code: int, screen: str, cache: Path) -> None:
        self.code, self.screen, self.cache = code, screen, cache

    def count_cases(self) -> dict[str, int]:
        labels = pl.concat(map(pl.read_parquet, self.cache.glob("labels-*.parquet")))
        cases = labels.filter(pl.col("value") == 1)["name"].value_counts().iter_rows()
        return {"chf": 0, "copd": 0, "diabetes": 0} | {str(name): n for name, n in cases}

    def read_events(self) -> pl.DataFrame:
        return pl.concat(map(pl.read_parquet, sorted(self.cache.glob("events-*.parquet"))))

    def list_days(self) -> list[int]:
        time = self.read_events()["time"]
        return sorted((when.date() - date(1970, 1, 1)).days for when in time)

    def count_codes(self) -> Counter[str]:
        return Counter(self.read_events()["code"].cast(pl.String).to_list())


Ingest = Callable[..., Outcome]


@pytest.fixture
def ingest(
    tmp_path: Path, short_maps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> Ingest:
    """Runs the command as the README of the cases states it, on a copy or on lines of claims; with
    shortened maps unless `whole`.
    """

    def run(
        source: str | Sequence[str],
        *options: str,
        header: str = HEAD.strip(),
        patients: Sequence[str] = (),
        people_header: str = "patient_id,birth_date",
        whole: bool = False,
    ) -> Outcome:
        folder, workspace = (
            tmp_path / "source",
            tmp_path / f"workspace{len(list(tmp_path.iterdir()))}",
        )
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(source, str):
            shutil.copytree(CASES / source, folder)
        else:
            folder.mkdir()
            (folder / "claims.csv").write_text("\n".join([header, *source]) + "\n")
        if patients:
            (folder / "patients.csv").write_text("\n".join([people_header, *patients]) + "\n")
        command = ["ingest", "pophr", str(folder), "--workspace", str(workspace)]
        for path in (MAP9, MAP10) if whole else short_maps:
            command += ["--phecode-map", str(path)]
        command += ["--map-repair", "phecode-zeros", "--default-source", "physician"]
        command += ["--min-codes", "5", "--no-select", "--small-counts", *options]
        capsys.readouterr()
        code = main(command)
        printed = capsys.readouterr()
        screen = " ".join((printed.out + printed.err).split())
        return Outcome(code, screen, workspace / "cache" / "pophr")

    return run


def read_case(name: str) -> list[dict[str, str]]:
    with (CASES / name / "claims.csv").open() as stream:
        return list(csv.DictReader(stream))


RIGHT = {"chf": 10, "copd": 46, "diabetes": 30}


def test_case_04_two_codes_in_a_cell(ingest: Ingest) -> None:
    outcome = ingest("04_two_codes_in_cell")
    written = Counter[str]()
    for row in read_case("04_two_codes_in_cell"):
        written.update(f"ICD10//{code}" for code in row["icd10"].replace(",", ";").split(";"))
    assert outcome.code == 0
    assert outcome.count_codes() == written
    assert outcome.count_cases() == RIGHT
    assert "160 codes stand behind others in one cell" in outcome.screen


@pytest.mark.slow
def test_each_code_of_a_cell_with_both_vocabularies_is_read_as_its_own(ingest: Ingest) -> None:
    """As the column icd9code of eICU has them; E11.65 and V58.67 are of one vocabulary each."""
    cells = {
        "401.9, I10": ("ICD9//401.9", "ICD10//I10"),
        "J44.1, 491.21": ("ICD9//491.21", "ICD10//J44.1"),
        "250.00, E11.9": ("ICD9//250.00", "ICD10//E11.9"),
        "V58.67, Z79.4": ("ICD9//V58.67", "ICD10//Z79.4"),
        "428.0, 427.31, I48.91": ("ICD9//428.0", "ICD9//427.31", "ICD10//I48.91"),
        "486": ("ICD9//486",),
    }
    rows = [f'p{i % 5},2005-01-{i % 28 + 1:02d},"{text}"' for i, text in enumerate([*cells] * 5)]
    outcome = ingest(
        *(rows, "--rules", "none", "--min-codes", "1"), header="uniquepid,date,icd9code", whole=True
    )
    assert outcome.code == 0, outcome.screen
    assert outcome.count_codes() == Counter(
        [code for codes in cells.values() for code in codes] * 5
    )
    assert "cells hold codes of ICD-9 and of ICD-10" in outcome.screen


@pytest.mark.slow
def test_concepts_of_snomed_are_named(ingest: Ingest) -> None:
    """As Synthea writes its conditions."""
    concepts = ("44054006", "38341003", "195967001")
    rows = [f"p{i % 6},2005-01-{i % 28 + 1:02d},{concepts[i % 3]}" for i in range(60)]
    outcome = ingest(rows, header="PATIENT,START,CODE", whole=True)
    assert (outcome.code, "SNOMED CT" in outcome.screen) == (4, True)


def test_case_17c_ruled_out_and_suspected_are_no_diagnoses(ingest: Ingest) -> None:
    outcome = ingest("17c_icd10gm_ruled_out")
    rows = read_case("17c_icd10gm_ruled_out")
    assert outcome.code == 0
    assert outcome.count_cases() == RIGHT | {"diabetes": 0}
    confirmed = Counter(f"ICD10//{row['icd10'][:-2]}" for row in rows if row["icd10"][-1] == "G")
    assert outcome.count_codes() == confirmed
    assert "90 rows (they look like 'x99.9 x'), ruled out, suspected" in outcome.screen


@pytest.mark.slow
def test_case_18c_procedures_are_no_diagnoses(ingest: Ingest) -> None:
    outcome = ingest("18c_icd9proc_with_zeros_elsewhere", whole=True)
    procedures = {"38.93", "99.15", "96.04", "88.72", "37.22", "3893", "36415", "99213"}
    written = [row["icd9"] for row in read_case("18c_icd9proc_with_zeros_elsewhere")]
    kept = Counter(f"ICD9//{code}" for code in written if code not in procedures)
    assert outcome.code == 3
    assert outcome.count_codes() == kept
    assert outcome.count_cases() == RIGHT
    assert "280 rows (they look like '99.99', '99999', '9999')" in outcome.screen
    assert "Give --pad-undotted" in outcome.screen


@pytest.mark.slow
def test_case_01b_days_of_sas(ingest: Ingest) -> None:
    refused = ingest("01b_sas_numeric_no_births")
    assert refused.code == 4
    assert "--date-format sas (then they are of 2005 to 2007)" in refused.screen
    assert "excel" not in refused.screen
    outcome = ingest("01b_sas_numeric_no_births", "--date-format", "sas", "--keep-dates")
    days = [int(row["date"]) for row in read_case("01b_sas_numeric_no_births")]
    expected = [date(1960, 1, 1) + timedelta(day) for day in days]
    assert outcome.code == 0
    assert outcome.list_days() == sorted((day - date(1970, 1, 1)).days for day in expected)
    assert max(expected) == date(2007, 12, 21)


@pytest.mark.slow
def test_case_02_days_of_r(ingest: Ingest) -> None:
    refused = ingest("02_r_numeric_dates")
    assert refused.code == 4
    assert "--date-format unix (then they are of 2005 to 2007)" in refused.screen
    outcome = ingest("02_r_numeric_dates", "--date-format", "unix", "--keep-dates")
    assert outcome.code == 0
    days = sorted(int(row["date"]) for row in read_case("02_r_numeric_dates"))
    assert outcome.list_days() == days
    assert outcome.count_cases() == RIGHT


def test_case_69_years_of_birth(ingest: Ingest) -> None:
    outcome = ingest("69_birth_year", "--keep-dates")
    assert outcome.code == 0
    assert outcome.count_cases() == RIGHT
    assert "60 rows state only the year of birth, 1 July is taken" in outcome.screen
    people = pl.concat(map(pl.read_parquet, outcome.cache.glob("subjects-*.parquet")))
    assert set(people["birth_day"]) == {(date(1950, 7, 1) - date(1970, 1, 1)).days}


@pytest.mark.parametrize("case", ["11b_death_1900", "11c_death_dot"])
def test_cases_11_deaths_that_are_missing(ingest: Ingest, case: str) -> None:
    outcome = ingest(case)
    assert outcome.code == 0
    assert outcome.count_cases() == RIGHT
    assert outcome.read_events().height == 840
    assert ("1900-01-01, which stands for an unknown date" in outcome.screen) == (case[2] == "b")


def test_case_09c_special_days_of_uk_biobank(ingest: Ingest) -> None:
    outcome = ingest("09c_ukb_realistic", "--col", "subject=eid", "--keep-dates")
    special = {"1900-01-01", "1901-01-01", "1902-02-02", "1903-03-03", "2037-07-07"}
    rows = [row for row in read_case("09c_ukb_realistic") if row["date"] not in special]
    days = [(date.fromisoformat(row["date"]) - date(1970, 1, 1)).days for row in rows]
    assert outcome.code == 3
    assert outcome.list_days() == sorted(days)
    assert all(text in outcome.screen for text in special)


@pytest.mark.parametrize(
    "options", [[], ["--col", "status=adj", "--col", "amount=none"], ["--col", "amount=paid"]]
)
def test_case_12_reversals(ingest: Ingest, options: list[str]) -> None:
    outcome = ingest("12_reversals", *options)
    rows = read_case("12_reversals")
    voided = {(row["claim_id"]) for row in rows if row["adj"] == "R"}
    left = [row for row in rows if row["claim_id"] not in voided]
    assert outcome.code == 0
    assert outcome.read_events().height == len(left)
    assert outcome.count_cases() == RIGHT | {"diabetes": 15}
    assert "90 rows, reversed or replaced" in outcome.screen


def test_case_12_reversals_that_shall_be_used(ingest: Ingest) -> None:
    outcome = ingest("12_reversals", "--col", "status=none", "--col", "amount=none")
    assert outcome.count_cases() == RIGHT


# --- codes


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, tuple[str, ...]]]:
    paths = [MAP9, MAP10]
    return phecode_maps.read_map(paths, repair="phecode-zeros").tables


Tables = dict[str, dict[str, tuple[str, ...]]]


def read_column(tables: Tables, vocab: str, cells: Sequence[str], **options: Any) -> dict[str, Any]:
    """The codes or faults of each cell of a column, each in 20 rows."""
    sample = code_forms.ColumnSample({vocab: Counter(dict.fromkeys(cells, 20))}, {vocab: "claims"})
    judged = code_forms.judge_forms(
        sample, tables, pads=options.pop("pads", False), max_bad=options.pop("max_bad", 1.0)
    )
    book = codebook.Codebook(tables, strict=True, forms=judged.forms)
    return {
        cell: [
            book.codes[reading.position].code
            if reading.fault is None
            else str(reading.fault.reason)
            for reading in book.read_cell(vocab, cell)
        ]
        for cell in cells
    }


@pytest.mark.parametrize(("plain", "lines"), [("4011", 0), ("3893", 1)])
def test_codes_without_a_point_are_told_where_some_are_left_out(
    tables: Tables, plain: str, lines: int
) -> None:
    cells = Counter(dict.fromkeys(["250.00", "401.9", "414.01", plain], 20))
    sample = code_forms.ColumnSample({"icd9": cells}, {"icd9": "claims"})
    judged = code_forms.judge_forms(sample, tables, pads=False, max_bad=1.0)
    assert len([f for f in judged.findings if "without a point" in f.problem]) == lines


@pytest.mark.parametrize(
    ("vocab", "cell", "expected"),
    [
        ("icd10", "E11.9|I10", ["E11.9", "I10"]),
        ("icd10", "E11.9 ; ", ["E11.9"]),
        ("icd10", "I10 E78.5", ["I10", "E78.5"]),
        ("icd10", "E11.9/I10", ["E11.9", "I10"]),
        ("icd10", "E10.3+ H36.0*", ["E10.3", "H36.0"]),
        ("icd10", "E10.3†H36.0*", ["E10.3", "H36.0"]),
        ("icd10", "E14.3+H36.0*", ["E14.3", "H36.0"]),  # the map lacks E14.3
        ("icd10", "E14.3 H36.0", ["E14.3", "H36.0"]),
        ("icd10", "E14.3, E14.5", ["E14.3", "E14.5"]),  # the rule of diabetes knows both
        ("icd10", "E14.3/H36.0", ["E14.3", "H36.0"]),
        ("icd10", "E11.9,NA", ["E11.9"]),
        ("icd10", "I10 G; E11.9 A", ["I10", "not_diagnosed"]),
        ("icd9", "250.00;401.9", ["250.00", "401.9"]),
        ("icd9", "250.00 401.9 ", ["250.00", "401.9"]),
        ("icd9", "250,00", ["250.00"]),  # a decimal comma
        ("icd9", "428 0", ["428.0"]),
        ("icd10", "E11,9", ["E11.9"]),
        ("icd10", "J45,909", ["J45.909"]),  # also where the map lacks it
        ("icd10", "E11,9;I25,10", ["E11.9", "I25.10"]),
        ("icd10", "E11,9,I10", ["E11.9", "I10"]),
        ("icd9", "250,00;428,0", ["250.00", "428.0"]),
        ("icd9", "250,401", ["250", "401"]),
        ("icd9", "V10,401", ["V10", "401"]),
        ("icd9", "38,93", ["bad_code"]),  # a procedure
        ("icd10", "I1O", ["I10"]),  # a letter for a zero
        ("icd10", "I5O.9", ["I50.9"]),
        ("icd10", "O1O.9", ["O10.9"]),
        ("icd10", "I 50.9", ["I50.9"]),
        ("icd10", "E11.9 - Type 2 diabetes, without complications", ["E11.9"]),
        ("icd10", "I10: Hypertension (primary)", ["I10"]),
        ("icd10", "[E11.9] Diabetes", ["E11.9"]),
        ("icd10", "Diabetes mellitus (E11.9)", ["E11.9"]),
        ("icd10", "['E11.9', 'I10']", ["E11.9", "I10"]),
        ("icd10", "E11.9^I10", ["E11.9", "I10"]),
        ("icd10", "E11.9~I10", ["E11.9", "I10"]),
        ("icd10", "E11.9:I10", ["E11.9", "I10"]),
        ("icd10", "E11.9   I10", ["E11.9", "I10"]),
        ("icd9", "250.00^401.9", ["250.00", "401.9"]),
        ("icd9", "25000   4019", ["250.00", "401.9"]),
        ("icd9", "4019-", ["401.9"]),  # fillers of fixed columns
        ("icd9", "496---", ["496"]),
        ("icd9", "250.-", ["250"]),
        ("icd10", "Ｅ１１．９", ["E11.9"]),
        ("icd10", "{E11.9}", ["E11.9"]),
        ("icd9", "250.00 - Diabetes", ["250.00"]),
        ("icd10", "E11.9 - ruled out", ["bad_code"]),
        ("icd10", "W99 - xyz unit", ["bad_code"]),
        ("icd10", "E10-E14", ["bad_code"]),  # a block
        ("icd10", "E10 - E14", ["bad_code"]),
        ("icd10", "I10 HTN", ["bad_code"]),
        ("icd10", "E11.9;unsure", ["bad_code"]),
        ("icd9", "120/80", ["bad_code"]),
    ],
)
def test_cells_with_several_codes_or_none(
    tables: Tables, vocab: str, cell: str, expected: list[str]
) -> None:
    plain = {"icd9": ["401.9", "038.9"], "icd10": ["K21.9", "J44.9"]}[vocab]
    assert read_column(tables, vocab, [*plain, cell])[cell] == expected


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("E11.9 V", "not_diagnosed"),  # Germany
        ("E11.9 Z", "not_diagnosed"),
        ("M17.1 G R", "M17.1"),
        ("M17.1 L G", "M17.1"),
        ("U07.1!", "U07.1"),
        ("I10X", "I10"),  # HES
        ("I10-", "I10"),
        ("I10.-", "I10"),
        ("QE119", "not_diagnosed"),  # Canada
        ("DE119", "E11.9"),  # Denmark
        ("D:E11.9", "E11.9"),
        ("I10.x00", "I10"),  # China
        ("E11.900x001", "E11.900"),
        ("C80.+0", "C80"),  # France
        ("S72.001A", "S72.001A"),  # ICD-10-CM
        ("T36.0X1A", "T36.0X1A"),
    ],
)
def test_qualifiers_of_national_forms(tables: Tables, cell: str, expected: str) -> None:
    assert read_column(tables, "icd10", ["K21.9", "J44.9", cell])[cell] == [expected]


CERTAINTIES = {
    "Diagnosesicherheit": ("G", ["A", "V", "Z", "a "]),
    "verificationStatus": ("confirmed", ["refuted", "entered-in-error", "provisional"]),
    "suspected_flag": ("0", ["1", "Y"]),  # Japan
    "rule_out": ("", ["1.0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("column", CERTAINTIES)
def test_a_column_of_certainties_leaves_out_what_was_not_diagnosed(
    ingest: Ingest, column: str
) -> None:
    sure, doubts = CERTAINTIES[column]
    words = [sure, *doubts]
    rows = [f"p{i % 6},2005-01-{i % 28 + 1:02d},{words[i % len(words)]},250.00" for i in range(60)]
    rows += [f"p{i % 6},2005-02-{i % 28 + 1:02d},{sure},401.9" for i in range(60)]
    header = f"patient_id,date,{column},icd9"
    options = ["--rules", "none", "--min-codes", "1"]
    outcome = ingest(rows, *options, header=header)
    n_sure = len(range(0, 60, len(words)))
    assert outcome.count_codes() == {"ICD9//250.00": n_sure, "ICD9//401.9": 60}
    assert f"{60 - n_sure} rows are suspected, ruled out" in outcome.screen
    followed = ingest(rows, *options, "--col", "certainty=none", header=header)
    assert followed.count_codes() == {"ICD9//250.00": 60, "ICD9//401.9": 60}


def test_letters_directly_behind_codes_are_what_the_column_shows(tables: Tables) -> None:
    german = read_column(tables, "icd10", ["E119G", "I10G", "J449A", "M545V", "K219GR", "N390Z"])
    assert german == {
        "E119G": ["E11.9"],
        "I10G": ["I10"],
        "J449A": ["not_diagnosed"],
        "M545V": ["not_diagnosed"],
        "K219GR": ["K21.9"],
        "N390Z": ["not_diagnosed"],
    }
    english = read_column(tables, "icd10", ["E103D", "H360A", "I10X", "J449", "I509", "E119"])
    assert english["H360A"] == ["H36.0"]  # the asterisk, not ruled out
    american = read_column(tables, "icd10", ["F32.A", "I10", "E11.9", "J44.9", "S72.001A"])
    assert american["F32.A"] == ["F32.A"]
    assert read_column(tables, "icd10cm", ["E119A", "I509A"])["E119A"] == ["E11.9A"]


@pytest.mark.parametrize(
    ("vocab", "cell"),
    [
        ("icd10", "C10E."),  # Read
        ("icd10", "G20.."),
        ("icd10", "A10BA02"),  # ATC
        ("icd10", "C09AA05"),
        ("icd10", "B2151ZZ"),  # ICD-10-PCS
        ("icd10", "J1234"),  # HCPCS
        ("icd10", "99213"),  # CPT
        ("icd10", "2345-7"),  # LOINC
        ("icd10", "73211009"),  # SNOMED CT
        ("icd9", "J1234"),
        ("icd9", "73211009"),
        ("icd9", "00002-1434-80"),  # NDC
        ("icd9", "4548-4"),
        ("icd9", "C10E."),
    ],
)
def test_codes_of_other_vocabularies_are_no_diagnoses(
    tables: Tables, vocab: str, cell: str
) -> None:
    plain = {"icd9": ["401.9", "038.9", "250.00"], "icd10": ["K21.9", "J44.9", "E11.9"]}[vocab]
    read = read_column(tables, vocab, [*plain, cell])
    assert read[cell][0] in {"bad_code", "wrong_vocabulary"}
    assert all(read[code] == [code] for code in plain)


def test_procedures_without_points_are_those_that_the_map_lacks(tables: Tables) -> None:
    diagnoses = {"25000": "250.00", "4019": "401.9", "41401": "414.01", "V5867": "V58.67"}
    procedures = ["99213", "36415", "85025", "99214"]
    read = read_column(tables, "icd9", [*diagnoses, *procedures])
    assert {cell: read[cell] for cell in diagnoses} == {
        cell: [code] for cell, code in diagnoses.items()
    }
    assert all(read[cell] == ["wrong_vocabulary"] for cell in procedures)
    # a second site that leaves out the points
    mixed = read_column(tables, "icd9", ["250.00", "401.9", "428.0", "496", "41401", "V5867"])
    assert mixed["41401"] == ["414.01"]


@pytest.mark.parametrize("vocab", ["icd9", "icd10"])
@pytest.mark.parametrize(
    ("cell", "what"),
    [("C10F.00", "Read"), ("G30..00", "Read"), ("C10E.", "Read"), ("44054006", "SNOMED")],
)
def test_a_column_of_another_vocabulary_is_called_by_its_name(
    tables: Tables, vocab: str, cell: str, what: str
) -> None:
    sample = code_forms.ColumnSample({vocab: Counter({cell: 40})}, {vocab: "claims"})
    with pytest.raises(UserError, match=what) as caught:
        code_forms.judge_forms(sample, tables, pads=False, max_bad=0.5)
    assert caught.value.code == "bad_code"


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", ["2.50E+02", "1-Feb", "Feb-01", "1-Feb-24"])
def test_codes_that_a_spreadsheet_has_spoilt_are_to_be_written_again(
    ingest: Ingest, spoilt: str
) -> None:
    written = ["250.00", "401.9", "428.0", spoilt]
    rows = [f"p{i % 6},2005-01-{i % 28 + 1:02d},{written[i % 4]}" for i in range(60)]
    outcome = ingest(rows, "--rules", "none", "--min-codes", "1")
    assert outcome.count_codes().keys() == {"ICD9//250.00", "ICD9//401.9", "ICD9//428.0"}
    assert "A spreadsheet has made numbers and dates of codes" in outcome.screen
    assert "--pad-undotted" not in outcome.screen


FILLERS = ["0", "0000", "NULL", "\\N", "#N/A", "<NA>", "NaT", "nil", "UN", "(blank)", "."]


@pytest.mark.parametrize("filler", FILLERS)
def test_words_for_empty_cells_do_not_hide_lost_zeros(tables: Tables, filler: str) -> None:
    with pytest.raises(UserError, match="lost their leading zeros"):
        read_column(tables, "icd9", ["38.9", "250.00", "401.9", filler])
    assert read_column(tables, "icd9", ["401.9", filler])[filler] == ["empty_code"]


@pytest.mark.parametrize("filler", FILLERS)
def test_words_for_empty_cells_of_several_columns_are_no_rows(ingest: Ingest, filler: str) -> None:
    rows = [f"p{i % 6},2005-01-{i % 28 + 1:02d},250.00,{filler},{filler}" for i in range(60)]
    header = "patient_id,date,dx1,dx2,dx3"
    outcome = ingest(rows, "--rules", "none", "--min-codes", "1", header=header)
    assert (outcome.code, outcome.count_codes()) == (0, {"ICD9//250.00": 60})


def test_lost_zeros_are_put_back_on_request(tables: Tables) -> None:
    cells = ["38.9", "8.5", "250.00", "401.9"]
    with pytest.raises(UserError, match="--pad-undotted") as caught:
        read_column(tables, "icd9", cells)
    assert (caught.value.code, caught.value.exit_code) == ("ambiguous_code", 4)
    read = read_column(tables, "icd9", cells, pads=True)
    assert (read["38.9"], read["8.5"]) == (["038.9"], ["008.5"])
    # procedures: the map lacks them with zeros
    alone = read_column(tables, "icd9", ["38.93", "99.15", "250.00", "401.9"])
    assert alone["38.93"] == ["wrong_vocabulary"]


@pytest.mark.parametrize(
    ("vocab", "cells", "shape"),
    [
        ("icd9", ["38.93", "99.15", "88.72", "250.00", "401.9"], "'99.99'"),
        ("icd9", ["99213", "36415", "99214", "4019"], "'99999'"),
        ("icd10", ["C10E.", "H33..", "14L..", "XaIP9"], "'x99..'"),
        ("icd10", ["73211009", "38341003", "I10"], "'99999999'"),
    ],
)
def test_a_column_of_something_else_is_refused(
    tables: Tables, vocab: str, cells: list[str], shape: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_column(tables, vocab, cells, max_bad=0.5)
    assert caught.value.exit_code == 4
    assert shape in caught.value.finding.line()
    assert not any(cell in caught.value.finding.line() for cell in cells)


@pytest.mark.slow
def test_codes_of_the_other_vocabulary_are_named_with_what_to_give(ingest: Ingest) -> None:
    lines = [f"p{i},2005-01-{day:02d},E11.9" for i in range(12) for day in range(1, 7)]
    refused = ingest(lines, whole=True)
    assert refused.code == 4
    assert "rows hold codes of ICD-10" in refused.screen
    assert "--col vocab=icd10" in refused.screen
    assert ingest(lines, "--col", "vocab=icd10").count_codes() == {"ICD10//E11.9": 72}


def test_the_map_survives_its_own_reading(tables: Tables) -> None:
    """Every code of the maps is read as itself, in a column of such codes."""
    for vocab, table in tables.items():
        form = code_cells.CodeForm(vocab)
        read = {code: code_cells.read_cell(code, form, table) for code in table}
        assert [code for code, cells in read.items() if cells != (code_cells.CellCode(code),)] == []


def test_each_code_of_a_cell_is_a_row_of_the_report(ingest: Ingest) -> None:
    lines = [f"p{i},2005-01-{day:02d},250.00;401.9" for i in range(12) for day in range(1, 7)]
    more = ["p0,2005-02-01,250.00;250.00", "p1,2005-02-01,250.00;whatever"]
    outcome = ingest([*lines, *more], "--rules", "none")
    report = json.loads((outcome.cache / "ingest_report.json").read_text())
    table = report["rows"][0]
    assert (table["kind"], table["seen"], table["used"]) == ("codes", 72 * 2 + 3, 72 * 2 + 1)
    assert table["dropped_by_reason"] == {"duplicates": 1}
    assert table["quarantined_by_reason"] == {"bad_code": 1}
    assert outcome.count_codes() == {"ICD9//250.00": 73, "ICD9//401.9": 72}


# --- dates


@pytest.mark.parametrize(
    ("form", "epoch", "ticks"),
    [
        ("sas", date(1960, 1, 1), 1),
        ("sas", date(1960, 1, 1), 86_400),
        ("stata", date(1960, 1, 1), 1),
        ("stata", date(1960, 1, 1), 86_400_000),
        ("unix", date(1970, 1, 1), 1),
        ("unix", date(1970, 1, 1), 86_400),
        ("r", date(1970, 1, 1), 86_400_000),
        ("excel", date(1899, 12, 30), 1),
        ("excel-1904", date(1904, 1, 1), 1),
    ],
)
def test_numbers_of_programs_are_their_days(form: str, epoch: date, ticks: int) -> None:
    for text in ("1985-03-01", "2005-09-09", "2019-12-31"):
        day = date.fromisoformat(text)
        number = (day - epoch).days * ticks
        assert dates.parse_day(str(number), form) == (day - date(1970, 1, 1)).days
        if ticks > 1:  # within the day
            number += ticks // 2
            assert dates.parse_day(f"{number}.0", form) == (day - date(1970, 1, 1)).days
    assert dates.parse_day("20050909", form) is None  # a date as it is


@pytest.mark.parametrize(
    ("name", "prefixes", "other"),
    [
        ("code", ("ICD9CM:", "ICD10CM:"), "LOINC:2345-7"),
        ("code", ("ICD-9-CM ", "ICD-10 "), "LOINC:2345-7"),
        ("code", ("icd9|", "icd10|"), "LOINC:2345-7"),
        ("CONCEPT_CD", ("ICD9:", "ICD10:"), "DEM|SEX:f"),
    ],
)
def test_codes_behind_their_vocabularies(
    ingest: Ingest, name: str, prefixes: tuple[str, str], other: str
) -> None:
    """As i2b2 has them, with other facts beside; E850 is in both vocabularies."""
    codes = ["ICD9//250.00", "ICD9//E850.0", "ICD10//E85.0", "ICD10//I10", "ICD10//K21.9"]
    texts = [prefixes[code.startswith("ICD10")] + code.partition("//")[2] for code in codes]
    rows = [f"p{i % 6},2005-01-{i % 28 + 1:02d},{texts[i % 5]}" for i in range(60)]
    rows += [f"p{i},2005-02-01,{other}" for i in range(6)]
    header = f"patient_id,date,{name}"
    outcome = ingest(rows, "--rules", "none", "--min-codes", "1", header=header)
    assert outcome.code == 0
    families = Counter(code.replace("CM//", "//") for code in outcome.count_codes().elements())
    assert families == Counter(dict.fromkeys(codes, 12))
    assert "6 rows are of vocabularies without diagnoses" in outcome.screen


@pytest.mark.parametrize(
    ("code", "version", "words"),
    [
        ("ICD_DGNS_CD{}", "ICD_DGNS_VRSN_CD{}", ("9", "0")),  # Medicare
        ("icd_code_{}", "icd_version_{}", ("9.0", "10.0")),
        ("dx{}", "dx{}_ver", ("ICD-9", "ICD-10")),
    ],
)
def test_each_column_of_codes_has_a_version(
    ingest: Ingest, code: str, version: str, words: tuple[str, str]
) -> None:
    """E850 is poisoning in ICD-9 and amyloidosis in ICD-10. Procedures have versions too."""
    cells = [("E850", 0), ("25000", 0), ("E850", 1), ("E119", 1)]  # code, its vocabulary
    rows = []
    for i in range(60):
        (first, one), (second, other) = cells[i % 4], cells[i // 4 % 4]
        row = f"p{i % 6},2005-01-{i % 28 + 1:02d},{words[other]},{first},{words[one]},{second}"
        rows.append(f"{row},3893,9")
    names = [version.format(2), code.format(1), version.format(1), code.format(2)]
    header = ",".join(["patient_id", "date", *names, "ICD_PRCDR_CD1", "ICD_PRCDR_VRSN_CD1"])
    outcome = ingest(rows, "--rules", "none", "--min-codes", "1", header=header)
    assert outcome.code == 0, outcome.screen
    texts = {0: {"E850": "ICD9//E850", "25000": "ICD9//250.00"}}
    texts[1] = {"E850": "ICD10//E85.0", "E119": "ICD10//E11.9"}
    pairs = [cell for i in range(60) for cell in (cells[i % 4], cells[i // 4 % 4])]
    expected = Counter(texts[vocab][text] for text, vocab in pairs)
    assert outcome.count_codes() == expected


WRITTEN_DATES = {  # form of strftime -> what the advice must name; "": read as it is
    "%Y%m%d.0": "",
    "%Y%m%d000000": "",
    "%Y%m%d143059": "",
    "%Y%j": "%Y%j",
    "%Y年%m月%d日": "%Y年%m月%d日",
    "%d%b%Y": "%d%b%Y",
    "%G-W%V-%u": "%G-W%V-%u",
    # Oracle, with nanoseconds
    "%d-%b-%y 12.00.00.000000000 AM": "%d-%b-%y %I.%M.%S.%f %p",
}


@pytest.mark.parametrize("written", WRITTEN_DATES)
def test_dates_as_programs_write_them(ingest: Ingest, written: str) -> None:
    days = [date(2005, 1, 20) + timedelta(13 * i) for i in range(60)]
    rows = [f"p{i % 6},{day.strftime(written)},250.00" for i, day in enumerate(days)]
    options = ["--rules", "none", "--keep-dates"]
    header = "patient_id,date,icd9"
    if form := WRITTEN_DATES[written]:
        refused = ingest(rows, *options, header=header)
        assert refused.code == 4
        assert f"--date-format '{form}'" in refused.screen
        options += ["--date-format", form]
    outcome = ingest(rows, *options, header=header)
    assert outcome.list_days() == [(day - date(1970, 1, 1)).days for day in days]


def test_a_cohort_of_codes_alone_needs_no_births(ingest: Ingest) -> None:
    """Nothing is said of the labels of the rules, which are not made."""
    days = [date(2005, 1, 1) + timedelta(40 * i) for i in range(60)]
    codes = ["401.9", "428.0", "250.00"]
    rows = [f"p{i % 6},{day},{codes[i // 6 % 3]}" for i, day in enumerate(days)]
    header = "patient_id,date,icd9"
    outcome = ingest(rows, "--cohort", "diabetes-codes", header=header)
    assert "births of 0 of 6 subjects are known, ages need them" in outcome.screen
    assert "the label 'chf'" not in outcome.screen


@pytest.mark.parametrize(
    ("texts", "advice"),
    [
        (["9 tammi 2005", "3 helmi 2006"], "Write them as YYYY-MM-DD"),  # Finnish
        (["201533", "201648"], "Write them as YYYY-MM-DD"),  # weeks
        (["2548-03-04", "2549-05-06"], "2548 of the Buddhist calendar is 2005"),
    ],
)
def test_dates_that_no_option_reads_are_to_be_written_again(
    ingest: Ingest, texts: list[str], advice: str
) -> None:
    outcome = ingest([f"p{i},{text},250.00" for i in range(6) for text in texts])
    assert outcome.code == 4
    assert advice in outcome.screen
    assert "--date-format" not in outcome.screen


@pytest.mark.parametrize(
    ("written", "form"),
    [("%m/%Y", "%m/%Y"), ("%m%Y", "%m%Y"), ("%Y%m", "yyyymm"), ("%Y%m%d.0", "")],
)
def test_births_have_one_advice(ingest: Ingest, written: str, form: str) -> None:
    """Numbers of six or eight digits are no seconds of 1960 or 1970."""
    births = [date(1930 + i % 40, 1 + i % 12, 1) for i in range(60)]
    people = [f"P{i:04d},{birth.strftime(written)}" for i, birth in enumerate(births)]
    options = ["--keep-dates"]
    if form:
        refused = ingest("00_control", *options, patients=people)
        assert refused.code == 4
        assert f"birth={form}" in refused.screen
        assert "birth=sas" not in refused.screen
        options += ["--date-format", f"birth={form}"]
    outcome = ingest("00_control", *options, patients=people)
    subjects = pl.concat(map(pl.read_parquet, outcome.cache.glob("subjects-*.parquet")))
    expected = sorted((birth - date(1970, 1, 1)).days for birth in births)
    assert sorted(subjects["birth_day"]) == expected


@pytest.mark.parametrize("words", [("0", "1"), ("N", "Y")])
def test_deaths_that_are_no_dates_have_an_advice(ingest: Ingest, words: tuple[str, str]) -> None:
    people = [f"P{i:04d},{words[i % 6 == 0]}" for i in range(60)]
    flagged = ingest("00_control", patients=people, people_header="patient_id,death")
    assert flagged.code == 0
    assert "10 subjects have died on an unknown day" in flagged.screen
    assert "--col last_contact=NAME" in flagged.screen
    people = [f"P{i:04d},{'2008-01-05' if i % 6 == 0 else 'Alive'}" for i in range(60)]
    outcome = ingest("00_control", patients=people, people_header="patient_id,death")
    subjects = pl.concat(map(pl.read_parquet, outcome.cache.glob("subjects-*.parquet")))
    assert subjects["death_day"].count() == 10


@pytest.mark.parametrize(
    ("texts", "forms"),
    [
        (["18000", "18300"], {"unix": (2019, 2020), "sas": (2009, 2010)}),
        (["8000", "8300"], {"unix": (1991, 1992), "sas": (1981, 1982)}),
        (["44000", "44300"], {"excel": (2020, 2021), "excel-1904": (2024, 2025)}),
        (["1126224000", "1189296000"], {"unix": (2005, 2007), "sas": (1995, 1997)}),
        (["2005", "2007"], {"year": (2005, 2007)}),
        (["200509", "200711"], {"yyyymm": (2005, 2007)}),
        (["123", "456"], {}),
    ],
)
def test_the_advice_is_the_forms_under_which_a_column_is_plausible(
    texts: list[str], forms: dict[str, tuple[int, int]]
) -> None:
    assert dates.list_number_forms(texts, dates.get_plausible("date")) == forms


@pytest.mark.parametrize(
    "word",
    [".", ".A", ".z", "._", "NULL", "NA", "NaT", "\\N", "0000-00-00", "99/99/9999", "00.00.0000"],
)
def test_words_of_programs_for_no_date(tmp_path: Path, word: str) -> None:
    patients = f"patient_id,birth_date,death_date\na,1950-01-02,{word}\nb,{word},{word}\n"
    claims, _ = read_folder(
        write_files(tmp_path, claims__csv=HEAD + "a,2001-02-03,428.0\n", patients__csv=patients)
    )
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1950-01-02", None]
    assert claims.subjects["death"].to_list() == [None, None]
    assert claims.findings == []


def to_days(*texts: str) -> list[int]:
    return [(date.fromisoformat(text) - date(1970, 1, 1)).days for text in texts]


def test_special_days_lie_far_from_other_dates() -> None:
    usual = dict.fromkeys(range(*to_days("2005-01-01", "2007-01-01")), 5)
    special = to_days("1900-01-01", "1753-01-01", "9999-12-31", "2037-07-07")
    assert set(special) <= unknown_dates.find_unknown_days(usual)
    # a day of nobody's calendar on which rows pile up, and one that is merely rare
    piled, rare = to_days("1950-05-05", "1950-09-09")
    unknown = unknown_dates.find_unknown_days(usual | {piled: 90})
    assert piled in unknown
    assert rare not in unknown_dates.find_unknown_days(usual | {rare: 2})
    # people of more than a hundred years, and dates that were shifted
    old = dict.fromkeys(range(*to_days("1899-06-01", "1910-01-01"), 30), 1)
    assert to_days("1901-01-01")[0] not in unknown_dates.find_unknown_days(old)
    shifted = dict.fromkeys(range(*to_days("2030-01-01", "2190-01-01"), 30), 1)
    assert to_days("2037-07-07")[0] not in unknown_dates.find_unknown_days(shifted)


def test_births_of_months_and_years(tmp_path: Path) -> None:
    files = {"claims__csv": HEAD + "a,2001-02-03,428.0\n"}
    for text, options, born in (
        ("1950", {}, "1950-07-01"),
        ("1950.0", {}, "1950-07-01"),
        ("195006", {"date_format": "yyyymm"}, "1950-06-01"),
        ("1950-06", {}, "1950-06-01"),
        ("1950-00-00", {}, "1950-07-01"),  # MySQL
        ("19500000", {}, "1950-07-01"),
        ("1950-06-00", {}, "1950-06-01"),
        ("0000-00-00", {}, None),
    ):
        table = f"patient_id,birth_date\na,{text}\n"
        claims, events = read_folder(write_files(tmp_path, **files, patients__csv=table), **options)
        assert claims.subjects is not None
        assert dates.parse_days(claims.subjects["birth"]).to_list() == (
            to_days(born) if born else [None]
        )
        assert events["date"].to_list() == ["2001-02-03"]


# --- reversals


def test_reversals_remove_as_many_rows_as_there_are(ingest: Ingest) -> None:
    """Against pandas: the sum of the signs of each claim line is what is left of it."""
    lines = [
        "a,2005-01-01,250.00,100.00,paid",
        "a,2005-01-01,250.00,(100.00),paid",
        "a,2005-01-01,250.00,120.00,paid",  # billed again
        "b,2005-01-01,250.00,80,paid",
        "b,2005-01-01,401.9,80,paid",
        "b,2005-01-01,401.9,-20,paid",  # less, not void
        "c,2005-01-01,250.00,50,paid",
        "c,2005-01-01,250.00,50.00-,paid",
    ]
    outcome = ingest(
        lines,
        "--min-codes",
        "1",
        "--rules",
        "none",
        "--col",
        "amount=net",
        header="patient_id,date,icd9,net,kind",
    )
    assert outcome.code == 0
    assert outcome.count_codes() == {"ICD9//250.00": 2, "ICD9//401.9": 1}


def test_frequency_codes_void_and_replace(ingest: Ingest) -> None:
    header = "patient_id,date,icd9,claim_id,clm_freq_cd"
    lines = [
        "a,2005-01-01,250.00,1,1",
        "a,2005-01-01,250.00,1,8",  # void
        "b,2005-01-01,250.00,2,1",
        "b,2005-01-01,401.9,2,7",  # replaces the line with another diagnosis
        "c,2005-01-01,428.0,3,1",
    ]
    outcome = ingest(lines, "--min-codes", "1", "--rules", "none", header=header)
    assert outcome.count_codes() == {"ICD9//401.9": 1, "ICD9//428.0": 1}
    assert "clm_freq_cd" in outcome.screen


def test_columns_that_may_mark_reversals_are_named(ingest: Ingest) -> None:
    lines = [f"p{i},2005-01-0{i},250.00,{-i}" for i in range(1, 9)]
    outcome = ingest(
        lines, "--min-codes", "1", "--rules", "none", header="patient_id,date,icd9,paid"
    )
    assert outcome.read_events().height == len(lines)
    assert "Give --col amount='paid' to leave them out" in outcome.screen


def test_words_of_the_claims_and_claims_line_feed() -> None:
    frame = pl.DataFrame({"status": ["0", "1", "2", None]})
    words = reversals.list_words("CLM_ADJSMT_TYPE_CD")
    assert reversals.mark_reversals(frame, words)["reversal"].to_list() == [0, 1, 2, 0]
    assert codes.shape_text("E11.9 A") == "x99.9 x"


def test_columns_of_one_source_have_forms_of_their_own(ingest: Ingest) -> None:
    """Services in days of SAS, births as days of the United States: the advice is followed."""
    start = date(1960, 1, 1)
    first_day = (date(2005, 1, 1) - start).days
    rows = [f"p{i},12/{i % 28 + 1:02d}/1950,{first_day + i},428.0" for i in range(40)]
    run = partial(ingest, rows, header="patient_id,birth_date,service_date,icd9")
    choices = ["--rules", "none", "--keep-dates", "--min-codes", "1"]
    first = run(*choices)
    assert first.code == 4
    assert "--date-format 'birth=%m/%d/%Y'" in first.screen
    assert "--date-format date=sas (then they are of 2005 to 2005)" in first.screen
    forms = ["--date-format", "date=sas", "--date-format", "birth=%m/%d/%Y"]
    outcome = run(*forms, *choices)
    assert outcome.code == 0
    people = pl.concat(map(pl.read_parquet, outcome.cache.glob("subjects-*.parquet")))
    births = {(date(1950, 12, day) - date(1970, 1, 1)).days for day in range(1, 29)}
    assert set(people["birth_day"]) == births
    expected = (date(2005, 1, 1) - date(1970, 1, 1)).days
    assert outcome.list_days() == [expected + i for i in range(40)]


def test_codes_of_icd10_from_a_day_on_have_their_option(ingest: Ingest) -> None:
    """The advice is followed to the codes that were written."""
    days = [date(2015, 9, 11) + timedelta(day) for day in range(25)]
    written = ["250.00" if day < date(2015, 10, 1) else "E11.9" for day in days]
    lines = [
        f"P{p},{day},{code}" for p in range(12) for day, code in zip(days, written, strict=True)
    ]
    options = ["--rules", "none"]
    first = ingest(lines, *options, header="patient_id,date,code")
    assert first.code == 3
    assert "60 rows (they look like 'x99.9')" in first.screen
    assert "Give --icd10-from DATE" in first.screen
    followed = ingest(lines, "--icd10-from", "2015-10-01", *options, header="patient_id,date,code")
    assert followed.code == 0
    assert followed.count_codes() == {"ICD9//250.00": 240, "ICD10//E11.9": 60}


def test_short_codes_without_a_point_have_their_option(ingest: Ingest) -> None:
    """38 is 038 without its zero."""
    codes_written = ["38", "25000", "4019", "4280", "496"]
    lines = [
        f"P{p},2005-0{m}-03,{code}" for p in range(4) for m in range(1, 6) for code in codes_written
    ]
    first = ingest(lines, "--rules", "none")
    assert first.code == 3
    assert "20 rows (they look like '99')" in first.screen
    assert "Give --pad-undotted" in first.screen
    followed = ingest(lines, "--rules", "none", "--pad-undotted")
    assert followed.count_codes()["ICD9//038"] == 20


EPOCH_TICKS = {"days": 1, "seconds": 86_400, "nanoseconds": 86_400_000_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("ticks", EPOCH_TICKS)
@pytest.mark.parametrize("kind", [pl.Float64, pl.Int64])
def test_numbers_of_parquet_are_days(
    tmp_path: Path, ticks: str, kind: type[pl.DataType], capsys: pytest.CaptureFixture[str]
) -> None:
    days = [date(2005, 1, 3) + timedelta(37 * n) for n in range(20)]
    numbers = [(day - date(1970, 1, 1)).days * EPOCH_TICKS[ticks] for day in days]
    ids = pl.Series([float(n % 4) for n in range(20)])
    table = {"patient_id": ids, "date": pl.Series(numbers).cast(kind), "icd9": ["250.00"] * 20}
    (tmp_path / "raw").mkdir()
    pl.DataFrame(table).write_parquet(tmp_path / "raw" / "claims.parquet")
    command = ["ingest", "pophr", str(tmp_path / "raw"), "--phecode-map", str(MAP9)]
    command += ["-w", str(tmp_path / "w"), "--rules", "none", "--min-codes", "1", "--no-select"]
    assert main(command) == 4
    advice = "--date-format unix (then they are of 2005 to 2006)"
    assert advice in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--date-format", "unix", "--keep-dates"]) == 0
    cache = Outcome(0, "", tmp_path / "w" / "cache" / "pophr")
    assert cache.list_days() == [(day - date(1970, 1, 1)).days for day in days]


def write_roc(day: date, mark: str) -> str:
    """A day in years of the Republic of China, of which 1912 is the first."""
    return mark.join((f"{day.year - 1911:03d}", f"{day.month:02d}", f"{day.day:02d}"))


@pytest.mark.parametrize("mark", ["", "/", "-", "."])
@pytest.mark.parametrize("first", [date(1998, 1, 5), date(2012, 1, 5)])
def test_years_of_the_republic_of_china(ingest: Ingest, mark: str, first: date) -> None:
    days = [first + timedelta(23 * n) for n in range(40)]
    lines = [f"P{n % 4},{write_roc(day, mark)},250.00" for n, day in enumerate(days)]
    refused = ingest(lines, "--rules", "none")
    assert refused.code == 4
    years = f"(then they are of {days[0].year} to {days[-1].year})"
    assert f"--date-format roc {years}" in refused.screen
    read = ingest(lines, "--rules", "none", "--date-format", "roc", "--keep-dates")
    assert read.list_days() == [(day - date(1970, 1, 1)).days for day in days]


def test_six_digits_may_be_of_two_calendars() -> None:
    """940123 is of 2005 in Taiwan, of 1994 elsewhere: both are named."""
    assert dates.parse_day("940123", "roc") == (date(2005, 1, 23) - date(1970, 1, 1)).days
    assert dates.parse_day("881301", "roc") is None
    assert dates.parse_day("16459", "roc") is None


def test_a_form_of_a_column_without_dates_is_refused(ingest: Ingest) -> None:
    outcome = ingest("00_control", "--date-format", "brith=sas")
    assert outcome.code == 2
    assert "birth" in outcome.screen
