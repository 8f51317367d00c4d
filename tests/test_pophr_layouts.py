"""Claims as DE-SynPUF, MIMIC, OMOP and MEDS publish them: real samples against Python's csv module,
and written tables.
"""

from __future__ import annotations

import gzip
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from claims_folders import (
    GOOD,
    HEAD,
    catch_refusal,
    find_codes,
    list_cells,
    needs,
    read_csv,
    read_folder,
    write_files,
)
from samples import SAMPLES

# --- DE-SynPUF


def synpuf_codes(path: Path) -> tuple[set[tuple[str, str, str]], int]:
    """(claim, date, code) of a table of claims with the dates of first segments, and the number of
    codes written.
    """
    rows = read_csv(path)
    first = {row["clm_id"]: row["clm_from_dt"] for row in rows if row["clm_from_dt"]}
    found = [
        (row["clm_id"], row["clm_from_dt"] or first.get(row["clm_id"], ""), cell.strip())
        for row in rows
        for name, cell in row.items()
        if name.startswith(("icd9_dgns_cd_", "line_icd9_dgns_cd_")) and cell.strip()
    ]
    return set(found), len(found)


@pytest.mark.slow
@needs("de-synpuf")
def test_synpuf_is_a_set_of_codes_a_claim() -> None:
    claims, events = read_folder(SAMPLES / "de-synpuf", "synpuf")
    assert events.height == 54_416
    assert claims.facts["segments"] == {"dates_filled": 61, "without_date": 1}
    records = {
        name.split("_")[5] + name[-5]: many for name, many in claims.facts["records"].items()
    }
    assert records == {"Inpatient1": 186, "Outpatient1": 2_460, "CarrierA": 14_675, "CarrierB": 0}
    assert (events["date"].null_count(), claims.survey.vocab, claims.facts["absent"]) == (
        0,
        "icd9cm",
        [],
    )
    kinds = {"Inpatient": "inpatient", "Outpatient": "outpatient", "Carrier": "physician"}
    for (file,), rows in events.group_by("file"):
        expected, written = synpuf_codes(SAMPLES / "de-synpuf" / str(file))
        assert (
            set(
                list_cells(
                    rows.with_columns(pl.col("code").str.strip_chars()), "claim", "date", "code"
                )
            )
            == expected
        )
        (account,) = [row for row in claims.rows if row.file == file]
        assert (account.seen, rows.height) == (written, len(expected))
        assert set(rows["source"]) == {kinds[str(file).split("_")[5]]}
    owners = {
        row["clm_id"]: row["desynpuf_id"]
        for path in (SAMPLES / "de-synpuf").glob("*Claims*")
        for row in read_csv(path)
    }
    assert all(
        owners[claim] == subject for claim, subject in list_cells(events, "claim", "subject_id")
    )


@pytest.mark.slow
@needs("de-synpuf")
def test_synpuf_beneficiaries_and_flags_of_three_years() -> None:
    wanted = [
        f"SP_{name}:{name}{year}:1{'@' + year if year else ''}"
        for name in ("CHF", "COPD", "DIABETES")
        for year in ("", "2008", "2009", "2010")
    ]
    claims, _ = read_folder(SAMPLES / "de-synpuf", "synpuf", label_column=wanted)
    assert claims.subjects is not None
    assert claims.labels is not None
    assert claims.subjects.height == 342
    years = {
        year: {
            row["desynpuf_id"]: row
            for row in read_csv(
                SAMPLES / "de-synpuf" / f"DE1_0_{year}_Beneficiary_Summary_File_Sample_1.csv"
            )
        }
        for year in ("2008", "2009", "2010")
    }
    assert [len(rows) for rows in years.values()] == [342, 338, 334]
    assert {row.file: row.seen for row in claims.rows if "Beneficiary" in row.file} == {
        f"DE1_0_{year}_Beneficiary_Summary_File_Sample_1.csv": len(rows)
        for year, rows in years.items()
    }
    yes = {
        name: [int(claims.labels[f"{name}{year}"].sum()) for year in years]
        for name in ("chf", "copd", "diabetes")
    }
    assert yes == {"chf": [98, 122, 99], "copd": [41, 51, 36], "diabetes": [127, 134, 101]}
    assert claims.labels["chf2010"].null_count() == 8
    for subject, *flags in claims.labels.iter_rows():
        for text, flag in zip(wanted, flags, strict=True):
            column = text.split(":")[0].lower()
            cells_of = [
                rows[subject][column]
                for year, rows in years.items()
                if subject in rows and ("@" not in text or text.endswith(year))
            ]
            assert flag == (None if not cells_of else int("1" in cells_of))
    for subject, birth, death, _, _, sex in claims.subjects.iter_rows():
        known = [rows[subject] for rows in years.values() if subject in rows]
        assert birth == known[0]["bene_birth_dt"]
        assert death == next(
            (row["bene_death_dt"] for row in reversed(known) if row["bene_death_dt"]), None
        )
        assert sex == int(known[0]["bene_sex_ident_cd"])
    assert (
        catch_refusal(SAMPLES / "de-synpuf", "synpuf", label_column=["SP_CHF:chf:1@2011"]).exit_code
        == 2
    )
    assert (
        catch_refusal(SAMPLES / "de-synpuf", "synpuf", label_column=["SP_CFH:chf:1"]).code
        == "schema"
    )


@pytest.mark.slow
@needs("de-synpuf")
def test_synpuf_admitting_codes_are_read_only_on_request() -> None:
    _, without = read_folder(SAMPLES / "de-synpuf", "synpuf")
    _, with_them = read_folder(SAMPLES / "de-synpuf", "synpuf", admitting=True)
    assert with_them.height > without.height
    assert set(list_cells(without, "claim", "code")) < set(list_cells(with_them, "claim", "code"))


BENEFICIARY = "DESYNPUF_ID,BENE_BIRTH_DT,BENE_DEATH_DT,BENE_SEX_IDENT_CD,SP_CHF,BENE_ESRD_IND\n"
CARRIER = "DESYNPUF_ID,CLM_ID,CLM_FROM_DT,ICD9_DGNS_CD_1,ICD9_DGNS_CD_2,LINE_ICD9_DGNS_CD_1\n"
STAYS = "DESYNPUF_ID,CLM_ID,SEGMENT,CLM_FROM_DT,ICD9_DGNS_CD_1,ICD9_DGNS_CD_2\n"


def archive(path: Path, name: str, content: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)


def test_synpuf_samples_parts_and_archives_by_what_they_hold(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        DE1_0_2008_to_2010_Carrier_Claims_Sample_1A__csv=CARRIER + "a,1,20080101,4280,496,4280\n",
        DE1_0_2008_to_2010_Carrier_Claims_Sample_1B__csv=CARRIER,
        DE1_0_2008_Beneficiary_Summary_File_Sample_2__csv=BENEFICIARY + "c,19300101,,2,1,0\n",
        # an archive by its name only, and one beside its own table
        DE1_0_2008_to_2010_Carrier_Claims_Sample_11A__csv__zip=CARRIER + "b,2,20080102,0416,,\n",
    )
    archive(
        tmp_path / "DE1_0_2008_to_2010_Carrier_Claims_Sample_1A.zip",
        "DE1_0_2008_to_2010_Carrier_Claims_Sample_1A.csv",
        CARRIER + "z,9,20080101,1,,\n",
    )
    archive(
        tmp_path / "DE1_0_2008_to_2010_Inpatient_Claims_Sample_2.zip",
        "DE1_0_2008_to_2010_Inpatient_Claims_Sample_2.csv",
        STAYS + "c,3,1,20080103,41401,\n",
    )
    archive(
        tmp_path / "DE1_0_2010_Beneficiary_Summary_File_Sample_20.zip",
        "DE1_0_2010_Beneficiary_Summary_File_Sample_1.csv",
        BENEFICIARY + "a,19400101,20100501,1,2,Y\n",
    )
    claims, events = read_folder(
        tmp_path, "synpuf", label_column=["SP_CHF:chf:1", "BENE_ESRD_IND:esrd:Y@2010"]
    )
    assert list_cells(events, "subject_id", "claim", "date", "code", "source", "position") == [
        ("a", "1", "20080101", "4280", "physician", 1),
        ("a", "1", "20080101", "496", "physician", 2),
        ("c", "3", "20080103", "41401", "inpatient", 1),
        ("b", "2", "20080102", "0416", "physician", 1),
    ]
    assert claims.subjects is not None
    assert claims.labels is not None
    assert list_cells(claims.subjects, "subject_id", "birth", "death", "sex") == [
        ("c", "19300101", None, 2),
        ("a", "19400101", "20100501", 1),
    ]
    assert list_cells(claims.labels, "subject_id", "chf", "esrd") == [("c", 1, None), ("a", 0, 1)]
    absent = [text for text in claims.facts["absent"] if text.startswith("sample 1:")]
    assert "sample 1: 2008" in absent
    assert "sample 1: 2010" not in absent, "the table in an archive counts, not the archive's name"
    assert "missing_pair" in find_codes(claims)


def test_synpuf_segments_take_the_date_of_the_first_and_repeat_no_code(tmp_path: Path) -> None:
    lines = [
        "a,7,2,,4280,496",
        "a,7,1,20080101,4280,",
        "a,8,2,,25000,",
        "a,9,1,20080102,25000,25000",
        "a,7,3,,496,0416",
    ]
    write_files(
        tmp_path, DE1_0_2008_to_2010_Outpatient_Claims_Sample_1__csv=STAYS + "\n".join(lines)
    )
    claims, events = read_folder(tmp_path, "synpuf")
    assert list_cells(events, "claim", "date", "code", "row") == [
        ("7", "20080101", "4280", 2),
        ("7", "20080101", "496", 2),
        ("8", None, "25000", 4),
        ("9", "20080102", "25000", 5),
        ("7", "20080101", "0416", 6),
    ]
    assert claims.facts["segments"] == {"dates_filled": 2, "without_date": 1}
    assert claims.rows[0].dropped == {"duplicates": 3}


def test_synpuf_without_its_tables(tmp_path: Path) -> None:
    assert (
        catch_refusal(write_files(tmp_path, claims__csv=HEAD + GOOD), "synpuf").code == "no_input"
    )
    write_files(
        tmp_path,
        DE1_0_2008_to_2010_Carrier_Claims_Sample_1A__csv=CARRIER.replace("ICD9_DGNS", "DX")
        + "a,1,20080101,4280,496,4280\n",
    )
    assert catch_refusal(tmp_path, "synpuf").code == "schema"
    assert catch_refusal(tmp_path, "synpuf", col=["code=x"]).exit_code == 2


# --- MIMIC


@needs("mimic-iii-demo")
def test_mimic3_diagnoses_have_the_time_of_discharge() -> None:
    claims, events = read_folder(SAMPLES / "mimic-iii-demo", "mimic3")
    ended = {
        row["hadm_id"]: row["dischtime"]
        for row in read_csv(SAMPLES / "mimic-iii-demo" / "ADMISSIONS.csv")
    }
    expected = [
        (
            row["subject_id"],
            ended[row["hadm_id"]],
            row["icd9_code"],
            row["hadm_id"],
            int(row["seq_num"]),
        )
        for row in read_csv(SAMPLES / "mimic-iii-demo" / "DIAGNOSES_ICD.csv")
    ]
    assert list_cells(events, "subject_id", "date", "code", "claim", "position") == expected
    assert len(expected) == 1_135
    assert (claims.survey.vocab, claims.source) == ("icd9cm", "inpatient")
    assert claims.subjects is not None
    people = read_csv(SAMPLES / "mimic-iii-demo" / "PATIENTS.csv")
    assert list_cells(claims.subjects, "subject_id", "birth", "death", "sex") == [
        (row["subject_id"], row["dob"], row["dod"] or None, {"M": 1, "F": 2}[row["gender"]])
        for row in people
    ]


def test_mimic3_stays_that_are_not_there_and_codes_that_are_none(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        ADMISSIONS__csv='"ROW_ID","SUBJECT_ID","HADM_ID","ADMITTIME","DISCHTIME"\n1,5,100,"2101-01-01 10:00:00","2101-01-03 09:00:00"\n',
        PATIENTS__csv='"SUBJECT_ID","GENDER","DOB","DOD"\n5,"M","1801-01-01 00:00:00",""\n',
        DIAGNOSES_ICD__csv__gz=gzip.compress(
            b'"ROW_ID","SUBJECT_ID","HADM_ID","SEQ_NUM","ICD9_CODE"\n1,5,100,1,"0389"\n2,5,100,,\n3,5,999,1,"4280"\n'
        ),
    )
    _, events = read_folder(tmp_path, "mimic3")
    assert list_cells(events, "date", "code", "position") == [
        ("2101-01-03 09:00:00", "0389", 1),
        ("2101-01-03 09:00:00", None, None),
        (None, "4280", 1),
    ]
    (tmp_path / "PATIENTS.csv").unlink()
    assert catch_refusal(tmp_path, "mimic3").code == "no_input"


@needs("mimic-iv-demo")
def test_mimic4_copies_from_a_spreadsheet_need_their_format() -> None:
    error = catch_refusal(SAMPLES / "mimic-iv-demo", "mimic4")
    assert (error.code, error.exit_code, error.file, error.field) == (
        "date",
        4,
        "hosp/admissions.csv",
        "dischtime",
    )
    claims, events = read_folder(SAMPLES / "mimic-iv-demo", "mimic4", date_format="%m/%d/%y %H:%M")
    hosp = SAMPLES / "mimic-iv-demo" / "hosp"
    people = {row["subject_id"]: row for row in read_csv(hosp / "patients.csv")}
    ended = {}
    for row in read_csv(hosp / "admissions.csv"):
        anchor = int(people[row["subject_id"]]["anchor_year"])
        short = datetime.strptime(row["dischtime"], "%m/%d/%y %H:%M")
        year = min(
            (century + short.year % 100 for century in range(1900, 2400, 100)),
            key=lambda year: abs(year - anchor),
        )
        ended[row["hadm_id"]] = f"{year}-{short.month:02}-{short.day:02}"
        assert 0 <= year - anchor <= 9
    expected = [
        (
            row["subject_id"],
            ended[row["hadm_id"]],
            row["icd_code"].strip(),
            f"icd{row['icd_version']}cm",
            int(row["seq_num"]),
        )
        for row in read_csv(hosp / "diagnoses_icd.csv")
    ]
    assert list_cells(events, "subject_id", "date", "code", "vocab", "position") == expected
    assert Counter(events["vocab"]) == {"icd9cm": 1_069, "icd10cm": 1_115}
    assert set(events["source"]) == {"inpatient"}
    assert claims.subjects is not None
    for subject, birth, death, _, _, _ in claims.subjects.iter_rows():
        assert (
            birth
            == f"{int(people[subject]['anchor_year']) - int(people[subject]['anchor_age'])}-01"
        )
        assert (death is None) == (people[subject]["dod"] == "")
        assert death is None or 0 <= int(death[:4]) - int(people[subject]["anchor_year"]) <= 10


def test_mimic4_official_dates_and_the_emergency_module(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        hosp___patients__csv="subject_id,gender,anchor_age,anchor_year,dod\n5,F,91,2150,2151-01-01\n6,M,,,\n",
        hosp___admissions__csv="subject_id,hadm_id,admittime,dischtime\n5,100,2150-01-01 10:00:00,2150-01-03 09:00:00\n",
        hosp___diagnoses_icd__csv="subject_id,hadm_id,seq_num,icd_code,icd_version\n5,100,1,0389   ,9\n5,100,2,I509,10\n",
        ed___edstays__csv__gz=gzip.compress(
            b"subject_id,hadm_id,stay_id,intime,outtime\n6,,300,2150-02-01 10:00:00,2150-02-02 01:00:00\n"
        ),
        ed___diagnosis__csv__gz=gzip.compress(
            b'subject_id,stay_id,seq_num,icd_code,icd_version,icd_title\n6,300,1,4280,9,"FAILURE, HEART"\n'
        ),
    )
    claims, events = read_folder(tmp_path, "mimic4")
    assert list_cells(events, "subject_id", "date", "code", "vocab", "source", "claim") == [
        ("5", "2150-01-03 09:00:00", "0389", "icd9cm", "inpatient", "100"),
        ("5", "2150-01-03 09:00:00", "I509", "icd10cm", "inpatient", "100"),
        ("6", "2150-02-02 01:00:00", "4280", "icd9cm", "emergency", "300"),
    ]
    assert claims.subjects is not None
    assert list_cells(claims.subjects, "birth", "death") == [
        ("2059-01", "2151-01-01"),
        (None, None),
    ]
    assert catch_refusal(tmp_path, "mimic4", icd10_from="2015-10-01").exit_code == 2
    write_files(
        tmp_path,
        hosp___diagnoses_icd__csv="subject_id,hadm_id,seq_num,icd_code,icd_version\n5,100,1,0389,11\n",
    )
    assert catch_refusal(tmp_path, "mimic4").code == "wrong_vocabulary"


# --- OMOP


@needs("omop-synpuf50")
def test_omop_without_concepts_reads_source_values() -> None:
    claims, events = read_folder(SAMPLES / "omop-synpuf50", "omop")
    kinds = {"9201": "inpatient", "262": "inpatient", "9202": "outpatient", "9203": "emergency"}
    visits = {
        row["visit_occurrence_id"]: kinds.get(row["visit_concept_id"])
        for row in read_csv(SAMPLES / "omop-synpuf50" / "visit_occurrence.csv")
    }
    expected = [
        (
            row["person_id"],
            row["condition_start_date"],
            row["condition_source_value"],
            visits.get(row["visit_occurrence_id"]),
        )
        for row in read_csv(SAMPLES / "omop-synpuf50" / "condition_occurrence.csv")
    ]
    assert list_cells(events, "subject_id", "date", "code", "source") == expected
    assert len(expected) == 2_442
    assert events["subject_id"].n_unique() == 21
    assert claims.facts["absent"] == ["observation", "procedure_occurrence", "measurement"]
    assert "missing_pair" in find_codes(claims)
    assert claims.subjects is not None
    people = {row["person_id"]: row for row in read_csv(SAMPLES / "omop-synpuf50" / "person.csv")}
    spans = {
        row["person_id"]: row
        for row in read_csv(SAMPLES / "omop-synpuf50" / "observation_period.csv")
    }
    assert claims.subjects.height == len(people) == 25
    for subject, birth, death, start, end, sex in claims.subjects.iter_rows():
        row, span = people[subject], spans.get(subject, {})
        assert birth == f"{row['year_of_birth']}-{row['month_of_birth']}-{row['day_of_birth']}"
        assert (death, sex) == (None, {"8507": 1, "8532": 2}[row["gender_concept_id"]])
        assert (start, end) == (
            span.get("observation_period_start_date"),
            span.get("observation_period_end_date"),
        )


PERSON = "person_id,gender_concept_id,year_of_birth,month_of_birth,day_of_birth\n1,8507,1940,,\n2,8532,1950,6,\n"
CONDITION = "condition_occurrence_id,person_id,condition_start_date,condition_source_value,condition_source_concept_id,visit_occurrence_id\n"
OBSERVATION = "observation_id,person_id,observation_date,observation_source_value,observation_source_concept_id,visit_occurrence_id\n"
CONCEPT = 'concept_id\tconcept_name\tvocabulary_id\tconcept_code\n77\tHeart "failure\tICD9CM\t428.0\n78\tHeart failure\tICD10CM\tI50.9\n79\tInsulin\tICD9CM\tV58.67\n80\tx\tSNOMED\t84114007\n'


def test_omop_takes_source_concepts_of_all_tables(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        person__csv=PERSON,
        CONCEPT__csv=CONCEPT,
        visit_occurrence__csv="visit_occurrence_id,visit_concept_id\n10,9201\n11,0\n12,9203\n",
        condition_occurrence__csv=CONDITION
        + "1,1,2001-01-01,4280,77.0,10.0\n2,1,2016-01-01,I50.9,78,11\n3,2,2001-01-02,496,0,12\n4,2,2001-01-03,84114007,80,\n",
        observation__csv=OBSERVATION
        + "1,1,2001-01-04,V5867,79,10\n2,1,2001-01-05,12345,80,10\n3,2,2001-01-06,99213,0,\n4,2,2001-01-06,V5861,0,\n",
        observation_period__csv="person_id,observation_period_start_date,observation_period_end_date\n1,2001-01-01,2001-12-31\n1,2000-01-01,2000-06-30\n",
        death__csv="person_id,death_date\n2,2002-02-02\n",
    )
    claims, events = read_folder(tmp_path, "omop", default_source="physician")
    assert list_cells(events, "subject_id", "date", "code", "vocab", "source") == [
        ("1", "2001-01-01", "428.0", "icd9cm", "inpatient"),
        ("1", "2016-01-01", "I50.9", "icd10cm", None),
        ("2", "2001-01-02", "496", None, "emergency"),
        ("1", "2001-01-04", "V58.67", "icd9cm", "inpatient"),
        ("2", "2001-01-06", "V5861", None, None),
    ]
    assert claims.source == "physician"
    assert {row.file: row.dropped for row in claims.rows if row.dropped} == {
        "condition_occurrence.csv": {"wrong_vocabulary": 1},
        "observation.csv": {"wrong_vocabulary": 2},
    }
    assert claims.facts["absent"] == ["procedure_occurrence", "measurement"]
    assert claims.subjects is not None
    assert claims.subjects.rows() == [
        ("1", "1940-1-1", None, "2000-01-01", "2001-12-31", 1),
        ("2", "1950-6-1", "2002-02-02", None, None, 2),
    ]


def test_omop_without_concepts_tells_supplementary_codes_from_procedures(tmp_path: Path) -> None:
    values = [
        "V5867",
        "V10.3",
        "Z79.4",
        "E8889",
        "V2020",
        "V5008",
        "E0100",
        "E1390",
        "99213",
        "J7030",
        "2345-7",
        "",
    ]
    lines = "".join(f"{i},1,2001-01-01,{value},{i},\n" for i, value in enumerate(values))
    write_files(tmp_path, person__csv=PERSON, observation__csv=OBSERVATION + lines)
    claims, events = read_folder(tmp_path, "omop")
    assert list_cells(events, "code", "vocab") == [
        ("V5867", None),
        ("V10.3", None),
        ("Z79.4", "icd10cm"),
        ("E8889", None),
    ]
    assert claims.rows[0].dropped == {"wrong_vocabulary": 8}


def test_omop_source_values_change_their_vocabulary_on_a_day(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        person__csv=PERSON,
        condition_occurrence__csv=CONDITION + "1,1,2015-09-30,4280,0,\n2,1,2015-10-01,E861,0,\n",
    )
    assert catch_refusal(tmp_path, "omop").code == "ambiguous_code"
    _, events = read_folder(tmp_path, "omop", icd10_from="2015-10-01")
    assert events["vocab"].to_list() == ["icd9cm", "icd10cm"]


def test_omop_source_values_behind_their_vocabulary(tmp_path: Path) -> None:
    values = ["ICD10CM:E11.9", "ICD9CM:250.00", "icd-10 I10", "SNOMED:44054006", "4280"]
    rows = (f"{i},1,2015-09-30,{text},0,\n" for i, text in enumerate(values))
    line = "9,1,,ICD10CM:K21.9,0,2015-09-30\n"  # of a table with codes of procedures, too
    write_files(
        tmp_path,
        person__csv=PERSON,
        condition_occurrence__csv=CONDITION + "".join(rows),
        observation__csv=OBSERVATION.splitlines()[0] + "\n" + line,
    )
    claims, events = read_folder(tmp_path, "omop")
    assert list_cells(events, "vocab", "code") == [
        ("icd10cm", "E11.9"),
        ("icd9cm", "250.00"),
        ("icd10", "I10"),
        (None, "4280"),
        ("icd10cm", "K21.9"),
    ]
    assert claims.rows[0].dropped == {"wrong_vocabulary": 1}


# --- MEDS


def meds(
    root: Path, rows: Iterable[tuple[int, datetime | None, str]], name: str = "data/train/0.parquet"
) -> Path:
    subjects, times, strings = (list(column) for column in zip(*rows, strict=True))
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    values = pa.array([None] * len(subjects), pa.float32())
    pq.write_table(
        pa.table(
            {
                "subject_id": pa.array(subjects, pa.int64()),
                "time": pa.array(times, pa.timestamp("us")),
                "code": strings,
                "numeric_value": values,
            }
        ),
        path,
    )
    return root


def day(year: int, month: int = 1) -> datetime:
    return datetime(year, month, 1, 13, 30)


ROWS: Sequence[tuple[int, datetime | None, str]] = [
    (7, None, "GENDER//F"),
    (7, day(1950), "MEDS_BIRTH"),
    (7, day(2001), "DIAGNOSIS//ICD//9//4280"),
    (7, day(2002), "DIAGNOSIS//ICD//10//I509"),
    (7, day(2003), "ICD9CM/250.00"),
    (7, day(2004), "ICD10CM//E11.9"),
    (7, day(2005), "ICD9Proc/45.13"),
    (7, day(2006), "LAB//50912//mg/dL"),
    (7, day(2007), "HOSPITAL//9//x"),
    (7, day(2008), "MEDS_DEATH"),
]


def test_meds_codes_by_pattern_parent_and_the_users_own(tmp_path: Path) -> None:
    meds(tmp_path, ROWS)
    meds(
        tmp_path,
        [(8, day(2001), "LOCAL-42"), (8, day(2002), "dx:icd9=496")],
        "data/tuning/0.parquet",
    )
    (tmp_path / "metadata").mkdir()
    parents = pa.table(
        {
            "code": ["LOCAL-42", "x"],
            "description": ["", ""],
            "parent_codes": [["SNOMED/1", "ICD9CM/428.0"], None],
        }
    )
    pq.write_table(parents, tmp_path / "metadata" / "codes.parquet")
    splits = pa.table(
        {"subject_id": pa.array([7, 8, 9], pa.int64()), "split": ["train", "tuning", "held_out"]}
    )
    pq.write_table(splits, tmp_path / "metadata" / "subject_splits.parquet")
    claims, events = read_folder(
        tmp_path, "meds", code_pattern=[r"dx:(?P<vocab>icd9)=(?P<code>.+)"]
    )
    assert [
        (subject, str(date)[:10], code, vocab)
        for subject, date, code, vocab in list_cells(events, "subject_id", "date", "code", "vocab")
    ] == [
        ("7", "2001-01-01", "4280", "icd9cm"),
        ("7", "2002-01-01", "I509", "icd10cm"),
        ("7", "2003-01-01", "250.00", "icd9cm"),
        ("7", "2004-01-01", "E11.9", "icd10cm"),
        ("8", "2001-01-01", "428.0", "icd9cm"),
        ("8", "2002-01-01", "496", "icd9"),
    ]
    assert claims.splits is not None
    assert dict(claims.splits.iter_rows()) == {"7": "train", "8": "validation", "9": "test"}
    assert claims.subjects is not None
    assert [
        (subject, birth and birth[:10], death and death[:10], sex)
        for subject, birth, death, _, _, sex in claims.subjects.iter_rows()
    ] == [("7", "1950-01-01", "2008-01-01", 2), ("8", None, None, None)]
    assert claims.rows[0].dropped == {"wrong_vocabulary": 6}
    assert claims.facts["strings"] == {"icd": 6, "other": 6, "rows_of_other": 6}
    _, fewer = read_folder(tmp_path, "meds")
    assert fewer.height == 5


def test_meds_strings_of_diagnoses_are_read_or_named(tmp_path: Path) -> None:
    strings = {
        "ICD10GM//E11.9": ("icd10", "E11.9"),
        "ICD10CM:I10": ("icd10cm", "I10"),
        "CONDITION//ICD9CM//250.00": ("icd9cm", "250.00"),
        "DIAGNOSIS//ICD10//I50.9": ("icd10", "I50.9"),
        "ICD10CN/E11.900": None,
        "ICD10CN/I10.x00": None,
        "SNOMED/44054006": None,
        "ICD10PCS/0DTJ4ZZ": None,
        "PROCEDURE//ICD//9//4513": None,
        "LAB//GLUCOSE//mg/dL": None,
    }
    meds(tmp_path, [(7, day(2001 + n), text) for n, text in enumerate(strings)])
    claims, events = read_folder(tmp_path, "meds")
    assert list_cells(events, "vocab", "code") == list(filter(None, strings.values()))
    unread = [row for row in claims.survey.findings if row.code == "wrong_vocabulary"]
    assert [row.count for row in unread] == [3]
    line = unread[0].line()
    assert "3 rows are diagnoses" in line
    assert "(2 rows of 'ICD10CN', 1 rows of 'SNOMED')" in line
    pattern = line.split("as ")[-1].rstrip(".")
    _, read = read_folder(tmp_path, "meds", code_pattern=[pattern.replace("//", "/")])
    assert list_cells(read, "code")[4:] == [("E11.900",), ("I10.x00",)], "the advice works"


def test_meds_that_cannot_be_read(tmp_path: Path) -> None:
    assert catch_refusal(write_files(tmp_path, claims__csv=HEAD + GOOD), "meds").code == "no_input"
    error = catch_refusal(meds(tmp_path, [(1, day(2001), "LAB//1")]), "meds")
    assert (error.code, error.exit_code) == ("no_input", 4)
    assert "--code-pattern" in error.finding.line()
    assert catch_refusal(tmp_path, "meds", code_pattern=["(?P<code>x"]).exit_code == 2
    assert catch_refusal(tmp_path, "meds", code_pattern=["(?P<code>x)"]).exit_code == 2
    meds(tmp_path, ROWS)
    (tmp_path / "metadata").mkdir()
    pq.write_table(
        pa.table({"subject_id": pa.array([7], pa.int64()), "split": ["dev"]}),
        tmp_path / "metadata" / "subject_splits.parquet",
    )
    assert catch_refusal(tmp_path, "meds").code == "schema"
