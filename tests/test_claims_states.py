"""Claims of invented folders: who has died and when, dates by quarters and in parts, tables that
are known by their columns. The right values are those that each folder was made from.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from claims_folders import catch_refusal, find_codes, list_cells, read_folder, write_files

from bitimely_core.claims.dates import (
    QUARTER,
    get_plausible,
    list_number_forms,
    parse_day,
    suggest_forms,
    to_day,
)

NAMES = ("claims.csv", "lines.csv")
SAME = ("E11.9", "I10", "E11.9", "E11.9")  # codes, most of which another column has
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
    ("form", "start", "end", "days"),
    [
        ("", "2015Q1", "2016Q4", ("2015-01-01", "2016-12-31")),
        ("quarter", "20151", "20162", ("2015-01-01", "2016-06-30")),
        ("quarter", "2015-2", "2016-4", ("2015-04-01", "2016-12-31")),
        ("wareki", "H27.2", "平成28年2月", ("2015-02-01", "2016-02-29")),
        ("wareki", "H27.2.3", "H28.2.3", ("2015-02-03", "2016-02-03")),
        ("%b %Y", "oct 2015", "OCT 2016", ("2015-10-01", "2016-10-31")),
        ("", "2015", "2016", ("2015-01-01", "2016-12-31")),
        ("year", "2015", "2016", ("2015-01-01", "2016-12-31")),
    ],
)
@pytest.mark.parametrize("table", ["patients", "enrolment"])
def test_an_observation_lasts_from_the_first_to_the_last_day_of_what_is_stated(
    tmp_path: Path, table: str, form: str, start: str, end: str, days: tuple[str, str]
) -> None:
    rows = f"a1,{start},{end}\na2,{start},{end}\n"
    files = {f"{table}__csv": f"patient_id,obs_start,obs_end\n{rows}"}
    write_files(tmp_path, claims__csv=CLAIMS, **files)
    forms = [f"obs_start={form}", f"obs_end={form}"] if form else []
    claims = read_folder(tmp_path, date_format=forms)[0]
    assert claims.subjects is not None
    days_read = claims.subjects.select("obs_start", "obs_end").rows()
    assert [tuple(map(parse_day, row)) for row in days_read] == [tuple(map(parse_day, days))] * 2


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


@pytest.mark.parametrize(
    ("head", "first", "second"),
    [
        ("year,month,day", "2015,2,3", "2016,12,31"),
        ("admit_year,admit_month", "2015.0,2.0", "2016,12"),
        ("jahr,quartal", "2015,1", "2016,4"),
        ("Quartal", "20151", "20164"),
        ("quarter", "1/2015", "2016-4"),
        ("date", "2015Q1", "Q4 2016"),
    ],
)
def test_dates_in_parts_and_quarters_are_read(
    tmp_path: Path, head: str, first: str, second: str
) -> None:
    rows = f"a1,{first},E11.9\na2,{second},J44.9\n"
    write_files(tmp_path, claims__csv=f"patient_id,{head},icd10\n{rows}")
    days = read_folder(tmp_path)[1]["date"]
    exact = {"year,month,day": ["2015-2-3", "2016-12-31"], "date": ["2015Q1", "Q4 2016"]}
    months = ["2015-2", "2016-12"] if "month" in head else ["2015-01-01", "2016-10-01"]
    parsed = [parse_day(text) for text in exact.get(head, months)]
    assert [parse_day(day) for day in days] == parsed
    assert None not in parsed


def test_quarters_are_not_advised_as_counted_days(tmp_path: Path) -> None:
    rows = "a1,20153,E11.9\na2,20164,J44.9\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10\n{rows}")
    hint = catch_refusal(tmp_path, date_format="").finding.hint
    assert "--date-format quarter" in hint
    assert "sas" not in hint
    assert QUARTER not in list_number_forms(["12005", "12012", "12010"], get_plausible("date"))


def test_each_code_may_have_a_column_of_its_certainty(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E119,I10,,Q\na2,2015-03-04,J449,N189,1,\n"
    head = "patient_id,date,dx10code1,dx10code2,suspect1,suspect2"
    write_files(tmp_path, claims__csv=f"{head}\n{rows}")
    claims, events = read_folder(tmp_path)
    assert list_cells(events, "subject_id", "code") == [("a1", "E119"), ("a2", "N189")]
    assert claims.survey.vocab == "icd10"


def test_prefixes_of_codes_are_certainties_by_the_letter_of_a_query(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E119,I10,A,Q\n"
    head = "patient_id,date,icd10_1,icd10_2,diag_prefix_1,diag_prefix_2"
    write_files(tmp_path, claims__csv=f"{head}\n{rows}")
    assert read_folder(tmp_path)[1]["code"].to_list() == ["E119"]


def test_a_column_that_may_hold_certainties_is_named(tmp_path: Path) -> None:
    rows = "a1,2015-02-03,E11.9,G\na2,2015-03-04,J44.9,V\n"
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10,sicherheit_x\n{rows}")
    findings = read_folder(tmp_path)[0].findings
    assert any("--col certainty='sicherheit_x'" in finding.line() for finding in findings)


PEOPLE = "patient_id,birth_date,sex\na1,1950-01-02,M\na2,1940-02-03,F\n"


@pytest.mark.parametrize("people", [PEOPLE, ""])
def test_deaths_are_read_from_a_table_of_any_name(tmp_path: Path, people: str) -> None:
    deaths = "patient_id,date_of_death,cause\na1,,E11.9\na1,2016-05-06,I50.0\n"
    write_files(tmp_path, diagnoses__csv=CLAIMS, death_registry__csv=deaths)
    if people:
        write_files(tmp_path, patients__csv=people)
    claims, events = read_folder(tmp_path)
    assert claims.subjects is not None
    dead = claims.subjects.drop_nulls("death")
    assert list_cells(dead, "subject_id", "death") == [("a1", "2016-05-06")]
    assert events.height == 2


def test_times_of_observation_are_known_by_the_name_of_their_table(tmp_path: Path) -> None:
    spells = "patient_id,start_date,end_date\na1,2014-01-01,2014-06-30\na1,2015-01-01,2016-06-30\n"
    write_files(tmp_path, diagnoses__csv=CLAIMS, enrolment_2015__csv=spells)
    claims, events = read_folder(tmp_path)
    assert claims.subjects is not None
    assert claims.periods is not None
    spans = list_cells(claims.subjects, "subject_id", "obs_start", "obs_end")
    assert spans == [("a1", "2014-01-01", "2016-06-30")]
    assert (claims.periods.height, events.height) == (1, 2)


def test_a_year_whose_columns_are_called_otherwise_is_warned_of(tmp_path: Path) -> None:
    other = CLAIMS.replace("patient_id,date", "pat,day_of_it")
    write_files(tmp_path, diag_2014__csv=CLAIMS, diag_2015__csv=other)
    finding = next(f for f in read_folder(tmp_path)[0].findings if "not read" in f.problem)
    assert (finding.level, "diag_2015.csv" in finding.problem) == ("warning", True)


@pytest.mark.parametrize(
    ("header", "codes"),
    [
        ("claim_id,patient_id,date\nc1,a1,2015-02-03\n", "claim_id,icd10\nc1,E11.9\nc1,I10\n"),
        (  # UK Biobank: the number of a stay counts the stays of a person
            "eid,ins_index,admidate\n1,0,2015-02-03\n1,1,2015-03-04\n2,0,2016-01-02\n",
            "eid,ins_index,diag_icd9,diag_icd10\n1,0,,E119\n1,1,,I10\n2,0,,J449\n2,0,,I10\n",
        ),
        (  # SNDS: that of a stay counts the stays of a hospital
            "ETA_NUM;RSA_NUM;NIR_ANO_17;EXE_SOI_DTD\n7;1;a;2015-02-03\n7;2;b;2015-03-04\n"
            "8;1;c;2016-01-02\n",
            "ETA_NUM;RSA_NUM;DGN_PAL\n7;1;E119\n7;2;I10\n8;1;J449\n",
        ),
    ],
)
def test_the_join_that_is_advised_keeps_the_codes_of_each_claim(
    tmp_path: Path, header: str, codes: str
) -> None:
    write_files(tmp_path, claims__csv=header, lines__csv=codes)
    hint = catch_refusal(tmp_path).finding.hint
    on = ast.literal_eval(hint.split("on=")[1].split("), and")[0])
    frames = [pd.read_csv(tmp_path / name, sep=None, engine="python") for name in NAMES]
    assert len(frames[0].merge(frames[1], on=on)) == len(frames[1])


@pytest.mark.parametrize("other", ["SDG1O", "nd1", "comorbidity1", "c_bdiag"])
def test_a_column_of_the_same_codes_is_named_whatever_it_is_called(
    tmp_path: Path, other: str
) -> None:
    lines = "".join(f"a{i},2015-02-0{i},E11.9,{code},12\n" for i, code in enumerate(SAME, 1))
    write_files(tmp_path, claims__csv=f"patient_id,date,icd10,{other},cost\n{lines}")
    (finding,) = [f for f in read_folder(tmp_path)[0].findings if "not read" in f.problem]
    assert finding.hint == f"Give --col code='icd10','{other}' to read all of them"
    columns = read_folder(tmp_path, col=[f"code=icd10,{other}"])[1]["code"]
    assert columns.sort().to_list() == sorted([*SAME, *["E11.9"] * len(SAME)])


@pytest.mark.parametrize(
    ("name", "cells", "flags"),
    [
        ("ENC_TYPE", ("IP", "AV"), ["'av'=physician", "'ip'=inpatient"]),
        ("setting", ("hospital", "Office"), ["'hospital'=inpatient", "'office'=physician"]),
        ("ward", ("AV", "AV"), []),
        ("sex", ("M", "F"), []),
    ],
)
def test_a_column_of_kinds_of_claims_is_named_with_what_reads_it(
    tmp_path: Path, name: str, cells: Sequence[str], flags: list[str]
) -> None:
    rows = zip(CLAIMS.splitlines(), (name, *cells), strict=True)
    write_files(tmp_path, claims__csv="".join(f"{row},{cell}\n" for row, cell in rows))
    findings = [f for f in read_folder(tmp_path)[0].findings if "kinds" in f.problem]
    advice = "".join(f" --source-value {flag}" for flag in flags)
    assert [f.hint for f in findings] == [f"Give --col source='{name}'{advice}"] * bool(flags)
    if flags:
        pairs = [flag.replace("'", "") for flag in flags]
        kinds = read_folder(tmp_path, col=[f"source={name}"], source_value=pairs)[1]["source"]
        assert kinds.to_list() == ["inpatient", "physician"]


@pytest.mark.parametrize(
    ("head", "rows", "is_parted"),
    [
        ("member_id,member_suffix", ["7,1", "7,2", "8,1", "8,2"], True),
        ("patient_id,family_id", ["1,7", "2,7", "1,8", "2,8"], True),
        ("BEN_NIR_PSA,BEN_RNG_GEM", ["7,1", "7,2", "8,1", "9,1"], True),  # twins
        ("patient_id,family_id", ["71,7", "72,7", "81,8", "82,8"], False),
        ("patient_id,member_suffix", ["71,1", "71,", "82,2", "82,2"], False),
    ],
)
def test_a_second_part_of_ids_is_said(
    tmp_path: Path, head: str, rows: Sequence[str], is_parted: bool
) -> None:
    lines = "".join(f"{row},2015-02-03,E11.9\n" for row in rows)
    write_files(tmp_path, claims__csv=f"{head},date,icd10\n{lines}")
    findings = [f for f in read_folder(tmp_path)[0].findings if f.code == "identifier"]
    assert [finding.count for finding in findings] == [len(rows)] * is_parted
    assert all(name in f.problem for name in head.split(",") for f in findings)


@pytest.mark.parametrize("stay", ["patientunitstayid", "patient_encounter_id"])
def test_the_number_of_a_stay_is_not_advised_as_a_person(tmp_path: Path, stay: str) -> None:
    write_files(tmp_path, claims__csv=f"{stay},date,icd10\n7,2015-02-03,E11.9\n")
    assert catch_refusal(tmp_path).finding.hint.endswith("--col subject=NAME")


@pytest.mark.parametrize(
    ("name", "days", "forms"),
    [
        ("age_days", ["25000", "26200"], []),
        ("visit_offset", ["14000", "14365"], ["sas", "unix"]),
        ("date", ["-30", "400"], []),
    ],
)
def test_days_that_count_from_a_day_of_each_person_are_advised(
    tmp_path: Path, name: str, days: Sequence[str], forms: Sequence[str]
) -> None:
    lines = "".join(f"a{i},{day},E11.9\n" for i, day in enumerate(days))
    write_files(tmp_path, claims__csv=f"patient_id,{name},icd10\n{lines}")
    hint = catch_refusal(tmp_path, col=[f"date={name}"]).finding.hint
    assert hint.startswith("If they are days from the birth or an index day")
    assert re.findall(r"--date-format (\w+)", hint) == forms


@pytest.mark.parametrize("rounded", ["1.23457E+11", "1.23456E+09", "1.23457e+09", "1.2346E9"])
def test_ids_that_a_program_has_rounded_are_refused(tmp_path: Path, rounded: str) -> None:
    write_files(tmp_path, claims__csv=CLAIMS.replace("a2", rounded))
    error = catch_refusal(tmp_path, date_format="%Y-%m-%d")
    assert (error.finding.code, error.row) == ("identifier", 3)
    assert rounded not in error.finding.line()
    people = f"patient_id,sex\na1,F\n{rounded},F\n{rounded},M\n"
    write_files(tmp_path, claims__csv=CLAIMS, patients__csv=people)
    error = catch_refusal(tmp_path)
    assert (error.finding.code, error.row) == ("identifier", 3)


@pytest.mark.parametrize("name", ["1E11", "1e+05", "3E08", "7.12"])
def test_a_code_that_looks_like_a_rounded_id_is_an_id(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, claims__csv=CLAIMS.replace("a2", name))
    assert read_folder(tmp_path)[1]["subject_id"].to_list() == ["a1", name]


EMPTY_DATES = "patid,admit_date,dx_date,dx,dx_type\n" + "".join(
    f"a{i},2015-02-{i:02d},{cell},E11.9,10\n"
    for i, cell in enumerate(("", "NULL", "2014-01-01"), 1)
)


def test_a_column_of_dates_that_most_rows_leave_empty_is_not_their_date(tmp_path: Path) -> None:
    claims, events = read_folder(write_files(tmp_path, diagnosis__csv=EMPTY_DATES))
    days = pd.read_csv(tmp_path / "diagnosis.csv")["admit_date"]
    assert events["date"].to_list() == days.to_list()
    assert any("not from 'dx_date'" in finding.problem for finding in claims.findings)


STAYS = "pnr,recnum,c_adiag,d_inddto\na,1,DE119,2015-02-03\nb,2,DI109,2015-03-04\n"
DIAGNOSES = "recnum,c_diag,c_diagtype\n1,DE119,A\n1,DJ449,B\n2,DI109,A\n2,DE119,B\n"


def test_further_diagnoses_of_the_claims_are_said_and_the_advice_reads_them(tmp_path: Path) -> None:
    titles = "c_adiag,title\nDE119,Diabetes\nDJ449,COPD\n"
    write_files(tmp_path, stays__csv=STAYS, t_diag__csv=DIAGNOSES, titles__csv=titles)
    warnings = [f for f in read_folder(tmp_path)[0].findings if "more diagnoses" in f.requirement]
    assert ["'t_diag.csv'" in finding.problem for finding in warnings] == [True]
    assert "by 'recnum'" in warnings[0].hint
    stays, diagnoses = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("stays", "t_diag"))
    dated = diagnoses.merge(stays.drop(columns="c_adiag"), on="recnum")
    dated.rename(columns={"c_diag": "c_adiag"}).to_csv(tmp_path / "t_diag.csv", index=False)
    claims, events = read_folder(tmp_path)
    assert not any("more diagnoses" in finding.requirement for finding in claims.findings)
    assert set(list_cells(events, "subject_id", "code")) == set(
        dated[["pnr", "c_diag"]].itertuples(index=False, name=None)
    )


def test_tables_like_the_claims_by_columns_but_not_by_name_are_said(tmp_path: Path) -> None:
    hospital = "patient_id,date,icd10\na3,2015-02-03,E11.9\na4,2015-02-03,E11.9\n"
    claims, _ = read_folder(write_files(tmp_path, claims__csv=CLAIMS, hospital__csv=hospital))
    hints = [f.hint for f in claims.findings if "'hospital.csv'" in f.problem]
    assert hints == [
        "Call all tables of claims claims_NAME, as 'claims.csv', and their columns alike"
    ]
    (tmp_path / "hospital.csv").rename(tmp_path / "claims_hospital.csv")
    assert set(read_folder(tmp_path)[1]["subject_id"]) == {"a1", "a2", "a3", "a4"}


def test_people_of_whom_only_sexes_are_told_are_a_table_of_any_name(tmp_path: Path) -> None:
    years = {
        f"jk_{year}__csv": f"stnd_y,person_id,sex,dth_ym\n{year},a1,1,\n{year},a2,2,{month}\n"
        for year, month in ((2014, ""), (2015, "201504"))
    }
    write_files(tmp_path, claims__csv=CLAIMS, **years)
    people = read_folder(tmp_path, date_format=["death=yyyymm"])[0].subjects
    assert people is not None
    facts = people.sort("subject_id").select("sex", "death").rows()
    assert facts == [(1, None), (2, "2015-04-30")]


def test_days_of_discharge_in_claims_are_no_deaths(tmp_path: Path) -> None:
    stays = "hcn,admdate,ddate,icd10,sex\na1,2015-02-03,2015-02-09,E11.9,1\n"
    people = read_folder(write_files(tmp_path, claims__csv=stays))[0].subjects
    assert people is not None
    assert people.select("subject_id", "death").rows() == [("a1", None)]
    people = read_folder(tmp_path, col=["death=ddate"])[0].subjects
    assert people is not None
    assert people["death"].to_list() == ["2015-02-09"]


@pytest.mark.parametrize(
    ("written", "form"), [("%Y-%m", ""), ("%Y%m", "yyyymm"), ("%m/%Y", "%m/%Y")]
)
def test_lives_and_observations_end_with_the_last_day_of_their_month(
    tmp_path: Path, written: str, form: str
) -> None:
    months = pd.period_range("2015-11", "2016-02", freq="M")
    rows = [f"2015-01-05,{month.strftime(written)},{month.strftime(written)}" for month in months]
    forms = {"date_format": [f"death={form}", f"obs_end={form}"]} if form else {}
    people = read_people(tmp_path, "obs_start,death_date,obs_end", *rows, **forms)
    last = [str(month.end_time.date()) for month in months]
    assert list(people.values()) == [[day, day] for day in last]


def test_times_of_observation_by_months_that_follow_each_other_have_no_gap(tmp_path: Path) -> None:
    spells = "patient_id,start,end\na1,2015-01,2015-03\na1,2015-04,2016-02\na2,2015-01,2015-01\n"
    claims, _ = read_folder(write_files(tmp_path, claims__csv=CLAIMS, enrolment__csv=spells))
    assert claims.periods is None
    assert claims.subjects is not None
    spans = claims.subjects.sort("subject_id").select("obs_start", "obs_end").rows()
    assert spans == [("2015-01-01", "2016-02-29"), ("2015-01-01", "2015-01-31")]


ERAS = (  # as the cabinet of Japan announced them: first day, name, letter, number
    (date(2019, 5, 1), "令和", "R", 5),
    (date(1989, 1, 8), "平成", "H", 4),
    (date(1926, 12, 25), "昭和", "S", 3),
    (date(1912, 7, 30), "大正", "T", 2),
)


def test_years_of_eras_are_days_of_the_calendar() -> None:
    days = [date(1913, 1, 1) + timedelta(97 * i) for i in range(420)]
    for day in days:
        first, name, letter, number = next(era for era in ERAS if era[0] <= day)
        year = day.year - first.year + 1
        texts = (
            f"{name}{'元' if year == 1 else year}年{day.month}月{day.day}日",
            f"{letter}{year}.{day.month}.{day.day}",
            f"{letter.lower()}{year:02d}/{day.month:02d}/{day.day:02d}",
            f"{number}{year:02d}{day.month:02d}{day.day:02d}",
        )
        assert {parse_day(text, "wareki") for text in texts} == {to_day(day)}
        month = f"{number}{year:02d}{day.month:02d}"
        assert parse_day(month, "wareki") == to_day(day.replace(day=1))
    births = [f"3{year:02d}0{year % 9 + 1}15" for year in range(10, 60)]
    assert list_number_forms(births, get_plausible("birth")) == {"wareki": (1935, 1984)}
    assert parse_day("2015-02-03", "wareki") is None  # an ISO date beside them stays one
    serials = list_number_forms(["42339", "42370", "42401"], get_plausible("date"))
    assert "wareki" not in serials


@pytest.mark.parametrize(
    "form", ["%Y년 %m월 %d일", "%Y년%m월%d일", "%Y年%m月%d日", "%Y. %m. %d.", "%d. %m. %Y"]
)
def test_the_forms_of_dates_with_letters_or_blanks_are_advised(form: str) -> None:
    days = [date(2015, 1, 31) + timedelta(40 * i) for i in range(30)]
    texts = [
        form.replace("%Y", str(day.year)).replace("%m", str(day.month)).replace("%d", str(day.day))
        for day in days
    ]
    advised = suggest_forms(texts)[0]
    assert [parse_day(text, advised) for text in texts] == list(map(to_day, days))


def test_times_of_iso_without_marks_are_dates() -> None:
    assert parse_day("20150203T143000Z") == parse_day("20150203T143000") == to_day(date(2015, 2, 3))


def test_suspected_diagnoses_of_japanese_claims_are_left_out(tmp_path: Path) -> None:
    table = pl.DataFrame(
        {
            "加入者ID": ["a", "a", "b"],
            "診療年月": ["2015-02", "2015-03", "2015-02"],
            "ICD10小分類コード": ["E119", "J449", "E119"],
            "疑いフラグ": ["0", "1", "0"],
        }
    )
    table.write_csv(tmp_path / "claims.csv")
    claims, events = read_folder(tmp_path)
    sure = table.filter(pl.col("疑いフラグ") == "0")
    assert (
        list_cells(events, "subject_id", "code")
        == sure.select("加入者ID", "ICD10小分類コード").rows()
    )
    assert "not_diagnosed" in find_codes(claims)


def test_codes_of_a_main_diagnosis_are_read_however_its_name_is_parted(tmp_path: Path) -> None:
    head = "cns,dt_inter,diag_princ,diagsec1,diagsec2\n"
    write_files(tmp_path, claims__csv=f"{head}a,20150203,E119,,\nb,20150203,I10,,\n")
    assert read_folder(tmp_path)[1]["code"].to_list() == ["E119", "I10"]


def test_types_and_prefixes_of_diagnoses_are_not_advised_as_codes(tmp_path: Path) -> None:
    head = "patient_id,date,hdiag_x,hdiag_xtype,diagprefix1\n"
    write_files(tmp_path, claims__csv=f"{head}a,2015-02-03,E119,M,Q\n")
    assert catch_refusal(tmp_path).finding.hint.endswith("--col code='hdiag_x'")
