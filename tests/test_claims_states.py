"""Claims of invented folders: who has died and when, dates by quarters and in parts, tables that
are known by their columns. The right values are those that each folder was made from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from claims_folders import read_folder, write_files

CLAIMS = "patient_id,date,icd10\na1,2015-02-03,E11.9\na2,2015-03-04,J44.9\n"


def read_people(root: Path, head: str, *rows: str, **options: object) -> dict[str, tuple[str, ...]]:
    """Death and end of observation of each of the people of a table of patients."""
    table = "".join(f"a{i},{row}\n" for i, row in enumerate(rows, 1))
    write_files(root, claims__csv=CLAIMS, patients__csv=f"patient_id,{head}\n{table}")
    people = read_folder(root, **options)[0].subjects
    assert people is not None
    return {str(who): days for who, *days in people.select("subject_id", "death", "obs_end").rows()}


@pytest.mark.parametrize(
    ("head", "dead", "alive"),
    [
        ("dead,last_contact_date", "1,2016-05-06", "0,2017-12-31"),
        ("death,exit_date", "1,2016-05-06", "0,2017-12-31"),
        ("vital_status,vital_status_date", "Deceased,2016-05-06", "Alive,2017-12-31"),
        ("statut_vital,ddn", "décédé,2016-05-06", "vivant,2017-12-31"),
        ("alive,dlc", "0.0,2016-05-06", "1.0,2017-12-31"),
    ],
)
def test_who_has_died_did_so_on_the_day_of_the_last_contact(
    tmp_path: Path, head: str, dead: str, alive: str
) -> None:
    people = read_people(tmp_path, head, dead, alive)
    assert people == {"a1": ["2016-05-06", "2016-05-06"], "a2": [None, "2017-12-31"]}


def test_a_stated_day_of_death_goes_before_that_of_the_last_contact(tmp_path: Path) -> None:
    people = read_people(tmp_path, "died,death_date,fu_end", "yes,2016-05-06,2016-06-07", "no,,")
    assert people == {"a1": ["2016-05-06", "2016-06-07"], "a2": [None, None]}


def test_the_end_of_observation_is_that_of_life_where_an_option_says_so(tmp_path: Path) -> None:
    rows = ("1,2016-05-06", "0,2017-12-31")
    people = read_people(tmp_path, "died,obs_end", *rows, col=["last_contact=obs_end"])
    assert people == {"a1": ["2016-05-06", "2016-05-06"], "a2": [None, "2017-12-31"]}


def test_a_year_of_death_ends_with_its_last_day(tmp_path: Path) -> None:
    people = read_people(tmp_path, "death_year", "2016", "")
    assert people == {"a1": ["2016-12-31", None], "a2": [None, None]}


@pytest.mark.parametrize(
    ("head", "rows", "words"),
    [
        ("died", ("1", "0"), "1 subjects have died on an unknown day"),
        ("vital_status", ("2", "1"), "2 states of 'vital_status' are not understood"),
        ("tod_datum", ("2016-05-06", ""), "'tod_datum' may hold deaths"),
        ("dth_month", ("201605", ""), "'dth_month' may hold deaths"),
    ],
)
def test_deaths_without_a_day_are_said(
    tmp_path: Path, head: str, rows: tuple[str, str], words: str
) -> None:
    read_people(tmp_path, head, *rows)
    findings = read_folder(tmp_path)[0].findings
    assert any(words in finding.line() for finding in findings)


def test_a_flag_of_death_in_claims_is_that_of_the_last_of_them(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E11.9,0\na1,2016-02-03,I50.0,1\na2,2015-03-04,J44.9,0\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10,died\n{rows}")
    claims, events = read_folder(tmp_path)
    assert events.height == 3
    assert any("1 subjects have died" in finding.problem for finding in claims.findings)
