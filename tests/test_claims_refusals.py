"""Folders of claims whose tables need another form: what is said works when it is done."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from claims_folders import catch_refusal, list_cells, read_folder, write_files

ROWS = "a1,2015-02-03,E11.9\na1,2016-04-05,I10\na2,2015-03-04,J44.9\n"
CLAIMS = f"patient_id,date,icd10\n{ROWS}"
PEOPLE = "patient_id,birth_date,sex\na1,1950-01-02,M\na2,1940-02-03,F\n"


@pytest.mark.parametrize("title", ["Diagnoses of 2015\n\n", "Export,2020-01-02,\n\n"])
@pytest.mark.parametrize("name", ["claims__csv", "diagnoses__csv", "patients__csv"])
def test_a_title_above_the_names_is_to_be_deleted(tmp_path: Path, title: str, name: str) -> None:
    table = PEOPLE if name == "patients__csv" else CLAIMS
    write_files(tmp_path, **({"claims__csv": CLAIMS} | {name: title + table}))
    if name == "diagnoses__csv":
        (tmp_path / "claims.csv").unlink()
    error = catch_refusal(tmp_path)
    assert (error.row, "tail -n +3" in error.finding.hint) == (3, True)
    write_files(tmp_path, **{name: table})
    assert read_folder(tmp_path)[1].height == 3


def test_columns_of_fixed_widths_are_to_be_parted(tmp_path: Path) -> None:
    write_files(tmp_path, claims__txt="".join(f"a{i}  20150203E119\n" for i in range(5)))
    assert "read_fwf" in catch_refusal(tmp_path).finding.hint


def test_conditions_of_fhir_are_read_as_the_advice_has_them(tmp_path: Path) -> None:
    write_files(tmp_path, Condition__ndjson='{"resourceType":"Condition"}\n')
    assert "code.coding.system" in catch_refusal(tmp_path).finding.hint
    row = "a1,2015-02-03T10:00:00Z,http://hl7.org/fhir/sid/icd-10-cm,E11.9\n"
    person = "id,gender,birthDate,deceasedDateTime\na1,female,1950-01-02,2016-01-02\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,vocab,code\n{row}", patients__csv=person)
    claims, events = read_folder(tmp_path)
    assert list_cells(events, "vocab", "code") == [("icd10cm", "E11.9")]
    assert claims.subjects is not None
    cells = list_cells(claims.subjects, "subject_id", "birth", "death", "sex")
    assert cells == [("a1", "1950-01-02", "2016-01-02", 2)]


def test_omop_with_standard_concepts_alone_names_what_reads_it(tmp_path: Path) -> None:
    head = "condition_occurrence_id,person_id,condition_concept_id,condition_start_date"
    write_files(
        tmp_path,
        condition_occurrence__csv=f"{head}\n1,7,201826,2015-02-03\n",
        person__csv="person_id,gender_concept_id,year_of_birth\n7,8507,1950\n",
    )
    assert "--codes all" in catch_refusal(tmp_path, "omop").finding.hint


def test_the_forms_of_all_columns_of_dates_are_named_together(tmp_path: Path) -> None:
    claims = "patient_id,date,icd10\na1,13/02/2015,E11.9\na2,14/03/2015,J44.9\n"
    head = "patient_id,birth_date,obs_start"
    people = f"{head}\na1,21.01.1950,22/01/2010\na2,23.02.1940,24/02/2011\n"
    write_files(tmp_path, claims__csv=claims, patients__csv=people)
    hint = catch_refusal(tmp_path).finding.hint
    forms = ("date=%d/%m/%Y", "birth=%d.%m.%Y", "obs_start=%d/%m/%Y")
    assert all(f"--date-format '{form}'" in hint for form in forms)
    subjects = read_folder(tmp_path, date_format=forms)[0].subjects
    assert subjects is not None
    assert list_cells(subjects, "birth", "obs_start")[0] == ("1950-01-21", "2010-01-22")


@pytest.mark.parametrize("form", ["%m/%d/%Y", "%d.%m.%y", "%d-%m-%Y %H:%M"])
@pytest.mark.parametrize(
    ("wrong", "column"), [(3, "date"), (3, "birth"), (2, "date"), (2, "birth")]
)
def test_a_column_with_both_orders_of_day_and_month_is_refused(
    tmp_path: Path, form: str, wrong: int, column: str
) -> None:
    """Up to two are slips, which are left out and counted."""
    days = [date(1970, 1 + i % 12, 13 + i % 15) for i in range(60)]
    other = form.replace("%m", "%x").replace("%d", "%m").replace("%x", "%d")
    texts = [day.strftime(other if i < wrong else form) for i, day in enumerate(days)]
    dates = texts if column == "date" else ["2015-03-04"] * 60
    births = texts if column == "birth" else ["1950-01-02"] * 60
    rows = [f"a{i},{day},I10" for i, day in enumerate(dates)]
    write_files(tmp_path, claims__csv="\n".join(["patient_id,date,icd10", *rows, ""]))
    people = [f"a{i},{day}" for i, day in enumerate(births)]
    write_files(tmp_path, patients__csv="\n".join(["patient_id,birth_date", *people, ""]))
    options = {"date_format": (f"{column}={form}",)}
    if wrong > 2:
        finding = catch_refusal(tmp_path, **options).finding
        assert finding.problem == f"3 of 60 dates are not {form} but {other}"
        assert finding.file == ("claims.csv" if column == "date" else "patients.csv")
    else:
        read_folder(tmp_path, **options)


@pytest.mark.parametrize("other", ["claims", "patients"])
def test_ids_that_differ_in_their_case_alone_are_said(tmp_path: Path, other: str) -> None:
    people = PEOPLE.replace("a1", "A1") if other == "patients" else PEOPLE
    claims = CLAIMS.replace("a1,2016", "A1,2016") if other == "claims" else CLAIMS
    write_files(tmp_path, claims__csv=claims, patients__csv=people)
    problems = [finding.problem for finding in read_folder(tmp_path)[0].findings]
    assert "1 ids differ from others in nothing but their case" in problems


MONTHS = {  # enrolment of a1 in the first two months of 2015 and in the first of 2016
    "person_id,month": "a1,2015-01\na1,2015-02\na1,2016-01\n",
    "patient_id,yearmonth": "a1,201501\na1,201502\na1,201601\n",
    "patient_id,year,month,enrolled": "a1,2015,1,1\na1,2015,2,1\na1,2015,3,0\na1,2016,1,1\n",
    "patient_id,year," + ",".join(f"enrolled_{month:02}" for month in range(1, 13)): (
        f"a1,2015,1,1{',0' * 10}\na1,2016,1{',' * 11}\n"
    ),
}


@pytest.mark.parametrize("head", MONTHS)
def test_enrolment_by_month_is_observation(tmp_path: Path, head: str) -> None:
    write_files(tmp_path, claims__csv=CLAIMS, enrolment__csv=f"{head}\n{MONTHS[head]}")
    claims = read_folder(tmp_path)[0]
    assert claims.subjects is not None
    assert claims.periods is not None
    spans = list_cells(claims.subjects, "subject_id", "obs_start", "obs_end")
    assert spans == [("a1", "2015-01-01", "2016-01-31")]
    (days,) = list_cells(claims.periods, "period_starts", "period_ends")
    assert [[end - start for start, end in zip(*days, strict=True)]] == [[58, 30]]


@pytest.mark.parametrize("people", [PEOPLE, ""])
@pytest.mark.parametrize(
    ("column", "lives", "dies"),
    [
        ("discharge_status", "1", "20"),
        ("discharge_disposition", "home", "Expired"),
        ("Entlassungsgrund", "regulär", "Tod"),
        ("Entlassungsgrund", "011", "079"),
        ("MODE_SORTIE", "8", "9"),
        ("dismeth", "1", "4"),
        ("UTSATT", "1", "4"),
    ],
)
def test_deaths_in_hospital_are_said_and_read_by_an_option(
    tmp_path: Path, people: str, column: str, lives: str, dies: str
) -> None:
    rows = f"a1,2015-02-03,E11.9,{lives}\na1,2016-04-05,I10,{dies}\na2,2015-03-04,J44.9,{lives}\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10,{column}\n{rows}")
    if people:
        write_files(tmp_path, patients__csv=people)
    findings = read_folder(tmp_path)[0].findings
    assert any(f"--col vital='{column}'" in finding.line() for finding in findings)
    subjects = read_folder(tmp_path, col=[f"vital={column}"])[0].subjects
    assert subjects is not None
    facts = list_cells(subjects.sort("subject_id"), "subject_id", "death", "obs_end")
    assert facts == [("a1", "2016-04-05", None), ("a2", None, None)]


def test_ends_of_stays_of_which_none_is_a_known_death_are_said(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E11.9,1\na1,2016-04-05,I10,77\na2,2015-03-04,J44.9,1\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10,discharge_status\n{rows}")
    claims, _ = read_folder(tmp_path, col=["vital=discharge_status"])
    assert any("states of 'discharge_status'" in f.line() for f in claims.findings)


def test_who_died_in_a_stay_did_so_on_the_day_that_the_advice_names(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E11.9,0,2015-02-05\na1,2016-04-05,I10,1,2016-04-09\n"
    head = "patient_id,date,icd10,MORTE,DT_SAIDA\n"
    write_files(tmp_path, claims__csv=f"{head}{rows}a2,2015-03-04,J44.9,0,2015-03-05\n")
    claims, _ = read_folder(tmp_path)
    assert any("--col last_contact=NAME" in finding.line() for finding in claims.findings)
    subjects = read_folder(tmp_path, col=["last_contact=DT_SAIDA"])[0].subjects
    assert subjects is not None
    deaths = list_cells(subjects.sort("subject_id"), "subject_id", "death")
    assert deaths == [("a1", "2016-04-09"), ("a2", None)]


def test_fields_of_uk_biobank_are_births_sexes_and_deaths(tmp_path: Path) -> None:
    for name in ("p{}", "{}-0.0", "f.{}.0.0"):
        head = [name.format(field) for field in ("31", "34", "41270", "41280", "40000")]
        death = "p40000_i0" if name == "p{}" else head.pop()
        write_files(
            tmp_path,
            ukb__csv=f"eid,{','.join(head[:4])},{death}\n1,1,1950,E119,2001-02-03,2010-01-02\n",
        )
        subjects = read_folder(tmp_path)[0].subjects
        assert subjects is not None
        found = list_cells(subjects, "birth", "death", "sex")
        assert found == [("1950-07-01", "2010-01-02", 1)]
