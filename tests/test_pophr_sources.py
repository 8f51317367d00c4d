"""Plain tables of claims, patients and labels: written tables for each trap, and what is
refused.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

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
    read_folder,
    write_files,
)
from samples import BAD_INPUTS, needs_sample

from bitimely_core import workflows
from bitimely_core.claims import code_forms, dates
from bitimely_core.claims.sources import SOURCES, ClaimsSource
from bitimely_core.errors import UserError
from bitimely_core.formats import table_text
from bitimely_core.formats.text import use_encoding

BAD = BAD_INPUTS / "make_bad_inputs.py"


def test_an_unknown_source_suggests_the_closest(tmp_path: Path) -> None:
    error = catch_refusal(write_files(tmp_path, claims__csv=HEAD + GOOD), "sinpuf")
    assert (error.code, error.exit_code) == ("unknown_name", 2)
    assert "synpuf" in error.finding.line()
    assert set(SOURCES) == {"claims", "synpuf", "mimic3", "mimic4", "omop", "meds"}


# --- plain claims: spellings that are one table


def parquet(columns: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("claims.csv", HEAD + GOOD),
        ("CLAIMS.CSV", HEAD + GOOD),
        ("deep/claims.csv", HEAD + GOOD),
        ("claims.csv", "\ufeff" + (HEAD + GOOD).replace("\n", "\r\n")),
        ("claims.csv", "Patient_ID , DATE, Icd9 \n" + GOOD.rstrip("\n")),
        (
            "claims.csv",
            '"patient_id","date","icd9"\n"a1","2001-02-03","428.0"\n"a2","2002-03-04","038.9"\n',
        ),
        ("claims.csv", "patient_id\tdate\ticd9\n" + GOOD.replace(",", "\t")),
        (
            "claims.csv",
            "date,note,icd9,patient_id\n2001-02-03,x,428.0, a1\n2002-03-04,,038.9,a2  \n",
        ),
        ("claims.csv.gz", gzip.compress((HEAD + GOOD).encode(), mtime=0)),
        (
            "claims.parquet",
            parquet(
                {
                    "patient_id": ["a1", "a2"],
                    "date": ["2001-02-03", "2002-03-04"],
                    "icd9": ["428.0", "038.9"],
                }
            ),
        ),
        (
            "claims.parquet",
            parquet(
                {
                    "icd9": pa.array(["428.0", "038.9"]).dictionary_encode(),
                    "patient_id": ["a1", "a2"],
                    "date": pa.array([datetime(2001, 2, 3), datetime(2002, 3, 4)]).cast(
                        pa.date32()
                    ),
                }
            ),
        ),
    ],
)
def test_spellings_of_one_table_of_claims(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    claims, events = read_folder(tmp_path)
    assert list_cells(events, "subject_id", "date", "code") == [
        ("a1", "2001-02-03", "428.0"),
        ("a2", "2002-03-04", "038.9"),
    ]
    assert events["row"].to_list() == ([1, 2] if name.endswith("parquet") else [2, 3])
    assert (claims.survey.vocab, claims.source, claims.subjects, claims.labels) == (
        "icd9",
        "outpatient",
        None,
        None,
    )
    capitals = isinstance(content, str) and "DATE" in content
    assert [(finding.code, finding.level, finding.file) for finding in claims.findings] == [
        ("header", "warning", name)
    ] * capitals
    assert [(row.file, row.seen) for row in claims.rows] == [(name, 2)]


def test_what_is_written_stays_as_it_is(tmp_path: Path) -> None:
    lines = "000123, 2001-2-3 ,v58.67 \n123,,\n,NA,nan\n1e3,x,0042\n1e3,2001-01-01,038.9\n1e3,2001-01-01,038.9\n"
    _, events = read_folder(write_files(tmp_path, claims__csv=HEAD + lines))
    assert list_cells(events, "subject_id", "date", "code") == [
        ("000123", " 2001-2-3 ", "v58.67 "),
        ("123", None, None),
        (None, "NA", "nan"),
        ("1e3", "x", "0042"),
        ("1e3", "2001-01-01", "038.9"),
        ("1e3", "2001-01-01", "038.9"),
    ]


def test_columns_by_option_with_vocabularies_kinds_and_claims(tmp_path: Path) -> None:
    table = "id,when,dx,cls,kind,clm,n\n1,2001-01-01,428.0,ICD-9-CM,IP,c1,2\n1,2016-01-01,I50.9, 10 ,Physician,c2,1\n1,2002-01-01,496,,,,\n"
    named = [
        "subject=id",
        "date=when",
        "code=dx",
        "vocab=cls",
        "source=kind",
        "claim=clm",
        "position=n",
    ]
    claims, events = read_folder(
        write_files(tmp_path, claims__csv=table),
        col=named,
        source_value=["ip=inpatient"],
        default_source="physician",
    )
    assert list_cells(events, "vocab", "source", "claim", "position") == [
        ("icd9cm", "inpatient", "c1", 2),
        ("icd10", "physician", "c2", 1),
        (None, None, None, None),
    ]
    assert claims.source == "physician"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"col": ["vocab=cls"]}, "schema"),  # a kind of claims without a declaration
        ({"col": ["vocab=cls"], "source_value": ["ip=hospital"]}, "unknown_name"),
        ({"col": ["vocab=kind"], "source_value": ["ip=inpatient"]}, "wrong_vocabulary"),
        ({"col": ["vokab=cls"]}, "unknown_name"),
        ({"col": ["vocab"]}, "config"),
        ({"col": ["vocab=nothing"]}, "schema"),
        ({"default_source": "inpatiant"}, "unknown_name"),
        (
            {"icd10_from": "2015-10-01", "col": ["vocab=cls"], "source_value": ["ip=inpatient"]},
            "config",
        ),
        ({"icd10_from": "October", "source_value": ["ip=inpatient"]}, "config"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    table = "id,date,icd,cls,source,kind\n1,2001-01-01,428.0,9,IP,IP\n"
    error = catch_refusal(write_files(tmp_path, claims__csv=table), **options)
    assert error.code == code
    assert error.exit_code == (2 if code in {"config", "unknown_name"} else 4)


def test_wide_tables_have_a_row_for_each_code(tmp_path: Path) -> None:
    table = "patient_id,date,dx2,dx10,dx1\na,2001-01-01,496,V58.67,428.0\nb,2001-01-02,,,\nc,2001-01-03, ,038.9,\n"
    claims, events = read_folder(write_files(tmp_path, claims__csv=table))
    expected = [
        ("a", "428.0", 1, 2),
        ("a", "496", 2, 2),
        ("a", "V58.67", 3, 2),
        ("c", "038.9", 3, 4),
    ]
    assert list_cells(events, "subject_id", "code", "position", "row") == expected
    assert [(row.kind, row.seen) for row in claims.rows] == [("codes", 4)]
    assert claims.facts["records"] == {"claims.csv": 3}
    globbed = table.replace("dx", "DIAG_")
    _, again = read_folder(write_files(tmp_path, claims__csv=globbed), col=["code=diag_*"])
    assert list_cells(again, "subject_id", "code", "position", "row") == expected
    assert catch_refusal(tmp_path, col=["code=xx*"]).exit_code == 2


def test_the_day_of_the_switch_decides_the_vocabulary(tmp_path: Path) -> None:
    table = "patient_id,date,icd\na,2015-09-30,E850\na,20151001,E850\na,2015-10-01 10:00,I509\na,soon,428\n"
    path = write_files(tmp_path, claims__csv=table)
    _, events = read_folder(path, icd10_from="2015-10-01")
    assert events["vocab"].to_list() == ["icd9", "icd10", "icd10", None]
    error = catch_refusal(path)  # E850 is a poisoning, or amyloidosis
    assert (error.code, error.exit_code) == ("ambiguous_code", 4)
    assert "E850" in error.finding.line()


@pytest.mark.parametrize(
    ("header", "rows", "options", "refused"),
    [
        ("icd", ["428.0", "E8500"], {}, False),
        ("icd", ["428.0", " e861 "], {}, True),
        ("icd", ["428.0", "E86.1"], {}, False),  # the dot says it
        ("icd", ["428.0", "E861"], {"col": ["vocab=ICD-10"]}, False),
        ("icd9", ["428.0", "E861"], {}, False),
        ("icd9", ["I50.9", "E861"], {}, True),  # a name that the rows belie
        ("icd9", ["E11.9", "E861"], {}, True),
        ("icd10", ["I50.9", "E861"], {}, False),
    ],
)
def test_codes_of_both_vocabularies_are_not_guessed(
    tmp_path: Path, header: str, rows: list[str], options: dict[str, Any], refused: bool
) -> None:
    write_files(
        tmp_path,
        claims__csv=f"patient_id,date,{header}\n"
        + "".join(f"a,2001-01-01,{code}\n" for code in rows),
    )
    if refused:
        assert catch_refusal(tmp_path, **options).code == "ambiguous_code"
    else:
        claims, _ = read_folder(tmp_path, **options)
        assert claims.survey.vocab == ("icd10" if options or header == "icd10" else "icd9")


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        (["38.9", "428.0", "V58.67"], True),
        (["38.9", "038.9"], False),  # beside kept zeros it is a procedure
        (["8.5", "0085"], False),
        (["428.0", "V01.1"], False),
        (["2.5E+02", "428.0"], False),  # bad rows, no lost zeros
        (["389", "4280"], False),  # ambiguous
    ],
)
def test_a_column_that_has_lost_its_zeros_is_refused(
    tmp_path: Path, written: list[str], refused: bool
) -> None:
    write_files(tmp_path, claims__csv=HEAD + "".join(f"a,2001-01-01,{code}\n" for code in written))
    claims, _ = read_folder(tmp_path)
    if not refused:
        judge_forms(claims)
        return
    with pytest.raises(UserError) as caught:
        judge_forms(claims)
    error = caught.value
    assert (error.code, error.exit_code) == ("ambiguous_code", 4)
    assert "'99.9'" in error.finding.line()


def judge_forms(claims: ClaimsSource) -> None:
    """What the command asks of the codes of a source, with a map that knows none."""
    sample = code_forms.sample_columns(claims.events, claims.survey.vocab)
    code_forms.judge_forms(sample, {}, pads=False, max_bad=0.5)


def test_lost_zeros_are_looked_for_in_icd_9_alone(tmp_path: Path) -> None:
    claims, _ = read_folder(
        write_files(
            tmp_path,
            claims__csv="patient_id,date,icd,vocab\na,2001-01-01,38.9,icd10\na,2001-01-01,428.0,icd9\n",
        )
    )
    judge_forms(claims)


def test_types_that_have_lost_what_was_written(tmp_path: Path) -> None:
    good: dict[str, Any] = {
        "patient_id": [1, 2],
        "date": ["2001-02-03", "2002-03-04"],
        "icd9": ["428.0", "038.9"],
    }
    _, events = read_folder(write_files(tmp_path, claims__parquet=parquet(good)))
    assert events["subject_id"].to_list() == ["1", "2"]
    for name, values, code in (
        ("icd9", [428.0, 38.9], "ambiguous_code"),
        ("icd9", [428, 389], "ambiguous_code"),
        ("icd9", [["428.0", "038.9"], ["496"]], "schema"),
        ("patient_id", [{"id": 1}, {"id": 2}], "schema"),
        ("date", [["2001-02-03"], ["2002-03-04"]], "schema"),
        ("patient_id", [1.5, None], "schema"),
        ("patient_id", [2.0**60, None], "schema"),
    ):
        error = catch_refusal(write_files(tmp_path, claims__parquet=parquet(good | {name: values})))
        assert (error.code, error.exit_code, error.field) == (code, 4, name)


@pytest.mark.parametrize(
    ("form", "text"),
    [("%d/%m/%Y", "31/12/2009"), ("%d%b%Y", "31DEC2009"), ("%d/%m/%y %H:%M", "31/12/09 23:59")],
)
def test_dates_in_another_form_are_read_by_their_format_alone(
    tmp_path: Path, form: str, text: str
) -> None:
    write_files(
        tmp_path, claims__csv=HEAD + f"a,{text},428.0\n" * 3 + "a,2009-12-30,496\na,?,496\n"
    )
    error = catch_refusal(tmp_path)
    assert (error.code, error.exit_code, error.field) == ("date", 4, "date")
    assert text not in error.finding.line()
    _, events = read_folder(tmp_path, date_format=form)
    assert events["date"].to_list() == ["2009-12-31"] * 3 + ["2009-12-30", "?"]
    assert catch_refusal(tmp_path, date_format="%Y.%m.%d").code == "date"


SPOILT = {  # form -> how it writes 3 April 2010 and 5 December 2011
    "%d/%m/%y": ("3/4/10", "5/12/11"),
    "%m/%d/%y": ("4/3/10", "12/5/11"),
    "%d/%m/%Y": ("13/4/2010", "25/12/2011"),
    "%m/%d/%y %H:%M": ("4/13/10 0:00", "12/25/11 14:38"),
    "%d-%b-%y": ("03-Apr-10", "05-Dec-11"),
    "%d%b%Y": ("03APR2010", "05DEC2011"),
    "%d.%m.%Y": ("03.04.2010", "05.12.2011"),
    "%Y/%m/%d": ("2010/04/13", "2011/12/25"),
    "%b %d, %Y": ("April 3, 2010", "December 5, 2011"),
    "%d-%b-%Y": ("03-Apr-2010", "05-Dez-2011"),
    "%d %b %Y": ("3 avril 2010", "5 d\u00e9c. 2011"),
    "%m/%d/%Y %I:%M:%S %p": ("4/13/2010 12:00:00 AM", "12/25/2011 2:38:00 PM"),
    "%d/%m/%Y %H:%M:%S%z": ("13/04/2010 23:30:00-05:00", "25/12/2011 00:30:00+14:00"),
    "excel": ("40271", "40882"),
}


@pytest.mark.parametrize("form", SPOILT)
@pytest.mark.parametrize("kind", ["claims", "claims parquet", "omop", "meds", "mimic3", "synpuf"])
def test_the_advice_on_dates_in_another_form_reads_them(
    tmp_path: Path, form: str, kind: str
) -> None:
    first, second = SPOILT[form]
    if kind == "claims":
        write_files(
            tmp_path, claims__csv=HEAD + "".join(f'a,"{text}",428.0\n' for text in (first, second))
        )
    elif kind == "claims parquet":
        write_files(
            tmp_path,
            claims__parquet=parquet(
                {"patient_id": ["a", "a"], "date": [first, second], "icd9": ["428.0", "496"]}
            ),
        )
    elif kind == "omop":
        rows = "".join(f'1,"{text}",4280,0,\n' for text in (first, second))
        head = "person_id,condition_start_date,condition_source_value,condition_source_concept_id,visit_occurrence_id\n"
        person = "person_id,gender_concept_id,year_of_birth\n1,8507,1950\n"
        write_files(tmp_path, condition_occurrence__csv=head + rows, person__csv=person)
    elif kind == "meds":
        (tmp_path / "data").mkdir()
        rows = {
            "subject_id": [1, 1],
            "time": [first, second],
            "code": ["ICD9CM//428.0", "ICD9CM//496"],
        }
        (tmp_path / "data" / "0.parquet").write_bytes(parquet(rows))
    elif kind == "mimic3":
        stays = "".join(f'1,{i},"{text}"\n' for i, text in enumerate((first, second)))
        write_files(
            tmp_path,
            admissions__csv="subject_id,hadm_id,dischtime\n" + stays,
            diagnoses_icd__csv="subject_id,hadm_id,seq_num,icd9_code\n1,0,1,4280\n1,1,1,496\n",
            patients__csv="subject_id,gender,dob,dod\n1,M,1950-01-01,\n",
        )
    else:
        rows = "".join(f'a,{i},"{text}",4280\n' for i, text in enumerate((first, second)))
        (tmp_path / "DE1_0_2008_to_2010_Outpatient_Claims_Sample_1.csv").write_text(
            "DESYNPUF_ID,CLM_ID,CLM_FROM_DT,ICD9_DGNS_CD_1\n" + rows
        )
    layout = kind.split()[0]
    error = catch_refusal(tmp_path, layout)
    assert (error.code, error.exit_code) == ("date", 4)
    assert not any(text in error.finding.line() for text in (first, second))
    advised = re.findall(r"--date-format (excel|'[^']+')", error.finding.line())
    assert form in [one.strip("'") for one in advised], error.finding.line()
    _, events = read_folder(tmp_path, layout, date_format=form)
    days = [13 if "13" in first else 3, 25 if "25" in second else 5]
    assert events["date"].to_list() == [f"2010-04-{days[0]:02d}", f"2011-12-{days[1]:02d}"]


def test_births_with_two_digits_of_the_year_are_before_the_claims(tmp_path: Path) -> None:
    patients = "patient_id,birth_date,death_date\na,3/4/40,5/4/11\nb,3/4/09,\nc,3/4/12,\n"
    write_files(
        tmp_path,
        claims__csv=HEAD + "a,3/4/10,428.0\nb,3/5/11,496\nc,3/5/11,496\n",
        patients__csv=patients,
    )
    claims, _ = read_folder(tmp_path, date_format="%d/%m/%y")
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1940-04-03", "2009-04-03", "1912-04-03"]
    assert claims.subjects["death"].to_list() == ["2011-04-05", None, None]


@pytest.mark.parametrize(
    "text",
    [
        "2010-03-04T00:00:00-05:00",
        "2010-03-04T23:59:59Z",
        "2010-03-04 00:30 +1400",
        "2010-03-04T00:00:00.000+00:00",
    ],
)
def test_dates_with_a_zone_are_those_of_the_clock_that_wrote_them(
    tmp_path: Path, text: str
) -> None:
    claims, events = read_folder(write_files(tmp_path, claims__csv=HEAD + f"a,{text},428.0\n"))
    assert dates.parse_days(events["date"]).to_list() == [14672]
    assert "timestamps" in find_codes(claims)


@pytest.mark.parametrize(
    "options",
    [{}, {"date_format": "%d/%m/%Y"}, {"icd10_from": "2015-10-01", "col": ["vocab=icd9"]}],
)
def test_columns_that_hold_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    write_files(
        tmp_path,
        claims__csv="patient_id,date,icd,vocab,source,claim,position\na,,428,,,,\nb,,,,,,\n,,,,,,\n",
    )
    if "icd10_from" in options:
        assert catch_refusal(tmp_path, **options).exit_code == 2
        (tmp_path / "claims.csv").write_text("patient_id,date,icd\na,,428\nb,,\n,,\n")
        options = {"icd10_from": "2015-10-01"}
    claims, events = read_folder(tmp_path, **options)
    assert list_cells(events, "subject_id", "date", "code", "vocab", "source", "position") == [
        ("a", None, "428", None, None, None),
        ("b", None, None, None, None, None),
        (None, None, None, None, None, None),
    ]
    assert claims.rows[0].seen == 3


def test_a_few_dates_in_another_form_are_left_to_the_row_checks(tmp_path: Path) -> None:
    _, events = read_folder(
        write_files(tmp_path, claims__csv=HEAD + GOOD + "a,31/12/2009,496\na,39814,496\na,,496\n")
    )
    assert events["date"].to_list()[2:] == ["31/12/2009", "39814", None]


def test_faults_of_the_table_refuse_it_before_any_row_is_used(tmp_path: Path) -> None:
    for lines, code, row in (
        (GOOD + 'a,2001-01-01,"428.0\n' + GOOD, "csv_syntax", 4),
        (GOOD + "a,2001-01-01\n", "row_width", 4),
        ("a,2001-01-01,428.0,x\n" + GOOD, "row_width", 2),
        (GOOD + "a,2001-01-01,42\0\n", "csv_syntax", 4),
        (GOOD + "a,2001", "truncated", 4),
    ):
        error = catch_refusal(write_files(tmp_path, claims__csv=HEAD + lines))
        assert (error.code, error.exit_code, error.row, error.file) == (code, 4, row, "claims.csv")
    (tmp_path / "claims.csv").unlink()
    assert catch_refusal(tmp_path).code == "no_input"
    packed = gzip.compress((HEAD + GOOD * 500).encode(), mtime=0)
    error = catch_refusal(write_files(tmp_path, claims__csv__gz=packed[: len(packed) * 7 // 10]))
    assert (error.code, error.file) == ("truncated", "claims.csv.gz")
    # which of the two?
    assert catch_refusal(write_files(tmp_path, claims__csv=HEAD + GOOD)).code == "no_input"


def test_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    error = catch_refusal(
        write_files(tmp_path, claims__csv=HEAD.replace("date", "service_dt") + GOOD)
    )
    assert error.code == "schema"
    assert "service_dt" in error.finding.line()
    assert "date" in error.finding.line()
    assert catch_refusal(write_files(tmp_path, claims__csv=GOOD)).code == "header"
    assert "a1" not in catch_refusal(tmp_path).finding.line()
    assert catch_refusal(write_files(tmp_path, claims__csv=HEAD)).code == "no_input"


def test_formula_like_ids_are_reported_and_other_encodings_are_stated(tmp_path: Path) -> None:
    lines = "=1+1,2001-01-01,428.0\n-5,2001-01-01,428.0\n-x,2001-01-01,428.0\n@a,2001-01-01,428.0\n"
    source = write_files(tmp_path, claims__csv=(HEAD + lines).encode() + b"\xe9,2001-01-01,496\n")
    error = catch_refusal(source)
    assert error.code == "encoding"
    assert "claims.csv" in str(error)
    assert f"byte {len(HEAD + lines)} in row 6" in str(error)
    with use_encoding("latin-1"):
        claims, events = read_folder(source)
    by_code = {str(finding.code): finding for finding in claims.findings}
    assert (by_code["label_chars"].count, by_code["label_chars"].examples) == (3, ("2", "4", "5"))
    assert events["subject_id"].to_list()[-1] == "é"
    assert all(finding.level == "warning" for finding in claims.findings)


def test_long_tables_come_in_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_text, "BLOCK", 1 << 12)
    lines = [f"p{i % 97},2001-01-{i % 28 + 1:02d},{i % 900 + 100}" for i in range(5_000)]
    claims, events = read_folder(write_files(tmp_path, claims__csv=HEAD + "\n".join(lines)))
    assert [",".join(row) for row in list_cells(events, "subject_id", "date", "code")] == lines
    assert events["row"].to_list() == list(range(2, 5_002))
    assert max(frame.height for frame in claims.events()) < 300


# --- plain claims: patients, labels, map


PATIENTS = "patient_id,birth_date,death_date,sex,obs_end\na1,1950-01-02,,F,2010-12-31\na2,1960-01,2005-01-01,m,\na3,,,?,\n"


def test_patients(tmp_path: Path) -> None:
    claims, _ = read_folder(write_files(tmp_path, claims__csv=HEAD + GOOD, patients__csv=PATIENTS))
    assert claims.subjects is not None
    assert claims.subjects.rows() == [
        ("a1", "1950-01-02", None, None, "2010-12-31", 2),
        ("a2", "1960-01", "2005-01-01", None, None, 1),
        ("a3", None, None, None, None, 0),
    ]
    months = "id,month_of_birth\na1,1950-01\na2,1960-03\n"  # the Québec form
    claims, _ = read_folder(
        write_files(tmp_path, claims__csv="id,date,icd\na1,2001-01-01,4960\n", patients__csv=months)
    )
    assert claims.subjects is not None
    assert list_cells(claims.subjects, "subject_id", "birth", "sex") == [
        ("a1", "1950-01", None),
        ("a2", "1960-03", None),
    ]
    claims, _ = read_folder(
        write_files(tmp_path, patients__csv=months.replace("month_of_birth", "born")),
        col=["birth=born"],
    )
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1950-01", "1960-03"]
    assert catch_refusal(tmp_path, col=["birth=geboren"]).code == "schema"


def test_patients_that_are_there_twice(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        claims__csv=HEAD + GOOD,
        patients__csv=PATIENTS + "a1,1950-01-02,,F,2010-12-31\n,1950-01-01,,,\n",
    )
    claims, _ = read_folder(tmp_path)
    assert claims.subjects is not None
    assert claims.subjects.height == 3
    (rows,) = [row for row in claims.rows if row.file == "patients.csv"]
    assert (rows.seen, rows.dropped, rows.quarantined) == (5, {"duplicates": 1}, {"identifier": 1})
    assert find_codes(claims) == {"duplicates", "identifier", "metadata"}  # a sex is '?'
    error = catch_refusal(write_files(tmp_path, patients__csv=PATIENTS + "a2,1961-01,,m,\n"))
    assert (error.code, error.exit_code, error.file) == ("duplicate_key", 4, "patients.csv")


def test_dates_of_birth_in_another_form(tmp_path: Path) -> None:
    turned = PATIENTS.replace("1950-01-02", "02/01/1950").replace("1960-01", "31/01/1960")
    error = catch_refusal(write_files(tmp_path, claims__csv=HEAD + GOOD, patients__csv=turned))
    assert (error.code, error.file, error.field) == ("date", "patients.csv", "birth")
    claims, _ = read_folder(tmp_path, date_format="%d/%m/%Y")
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1950-01-02", "1960-01-31", None]
    claims, _ = read_folder(
        write_files(tmp_path, patients__csv=PATIENTS.replace("1950-01-02", "1950-02-30"))
    )
    assert find_codes(claims) == {"metadata"}


LABELS = "patient_id,CHF,COPD,index_date\na1,1,0,2005-01-01\na2,,1.0,\n"


def test_labels(tmp_path: Path) -> None:
    claims, _ = read_folder(
        write_files(
            tmp_path,
            claims__csv=HEAD + GOOD,
            labels__csv=LABELS,
            icd9_phecode__csv="icd9,phecode\n428.0,428.2\n",
        )
    )
    assert claims.labels is not None
    assert dict(claims.labels.schema) == {
        "subject_id": pl.String,
        "index_date": pl.String,
        "chf": pl.Int8,
        "copd": pl.Int8,
    }
    assert list_cells(claims.labels, "subject_id", "chf", "copd", "index_date") == [
        ("a1", 1, 0, "2005-01-01"),
        ("a2", None, 1, None),
    ]
    assert claims.map_files == ["icd9_phecode.csv"]
    assert claims.findings == []


def test_labels_of_nobody_and_subjects_without_any(tmp_path: Path) -> None:
    claims, _ = read_folder(
        write_files(tmp_path, claims__csv=HEAD + GOOD, labels__csv=LABELS.replace("a2", "a7"))
    )
    (finding,) = claims.findings
    assert (finding.code, finding.level, finding.count, finding.file) == (
        "unmatched_labels",
        "warning",
        2,
        "labels.csv",
    )
    assert "a7" not in finding.line()


def test_labels_that_are_none(tmp_path: Path) -> None:
    write_files(tmp_path, claims__csv=HEAD + GOOD)
    assert (
        catch_refusal(write_files(tmp_path, labels__csv=LABELS + "a1,0,0,2005-01-01\n")).code
        == "duplicate_key"
    )
    error = catch_refusal(
        write_files(tmp_path, labels__csv="patient_id,CHF,age\na1,1,70\na2,0,80\n")
    )
    assert (error.code, error.field) == ("label", "age")
    claims, _ = read_folder(
        write_files(tmp_path, labels__csv="patient_id,CHF\na1,1\na2,0\na3,0\na4,yes\n")
    )
    assert claims.labels is not None
    assert claims.labels["chf"].to_list() == [1, 0, 0]
    (rows,) = [row for row in claims.rows if row.file == "labels.csv"]
    assert (rows.seen, rows.quarantined) == (4, {"label": 1})
    assert (
        catch_refusal(write_files(tmp_path, labels__csv="patient_id,CHF,chf\na1,1,1\n")).code
        == "header"
    )
    claims, _ = read_folder(write_files(tmp_path, labels__csv=LABELS + "a3,1,1,2005-02-30\n"))
    assert claims.labels is not None
    assert claims.labels["subject_id"].to_list() == ["a1", "a2"]
    assert {row.file: row.quarantined for row in claims.rows}["labels.csv"] == {"date": 1}


def test_label_columns_by_option(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        claims__csv=HEAD + GOOD,
        labels__csv="patient_id,Heart,age\na1,yes,70\na2,no,80\na3,,\n",
    )
    claims, _ = read_folder(tmp_path, label_column=["heart:CHF:yes"])
    assert claims.labels is not None
    assert list_cells(claims.labels, "subject_id", "chf") == [("a1", 1), ("a2", 0), ("a3", None)]
    for wrong in ("heart", "heart:chf", "heart:chf:yes@10", "heart:chf:yes@2010"):
        assert catch_refusal(tmp_path, label_column=[wrong]).exit_code == 2
    assert catch_refusal(tmp_path, label_column=["lung:chf:1"]).code == "schema"
    assert catch_refusal(tmp_path, label_column=["heart:chf:1", "age:CHF:1"]).exit_code == 2


@pytest.mark.slow
def test_a_leak_names_the_table_of_labels_and_none_where_rules_make_them(tmp_path: Path) -> None:
    """Every positive has the code that defines its label, and no negative."""
    rows = [
        f"s{i},2001-0{k + 1}-01,{'428.0' if i % 2 else '401.9'}"
        for i in range(20)
        for k in range(3)
    ]
    labels = "patient_id,CHF\n" + "".join(f"s{i},{i % 2}\n" for i in range(20))
    raw = write_files(
        tmp_path / "raw", claims__csv=HEAD + "\n".join(rows) + "\n", labels__csv=labels
    )
    # the rule has a minimum age
    born = "patient_id,birth_date\n" + "".join(f"s{i},1930-01-01\n" for i in range(20))
    write_files(
        raw, icd9_phecode__csv="icd9,phecode\n428.0,428.2\n401.9,401.1\n", patients__csv=born
    )
    physician = {"default_source": "physician"}
    for options, files in (
        (physician, {"chf": "labels.csv"}),
        (physician | {"rules": "ccdss"}, {"chf": None, "chf_source": "labels.csv"}),
    ):
        home = tmp_path / str(len(files)) / "cache" / "pophr"
        report = workflows.ingest(
            "pophr", raw, home, options=options, build={"min_codes": 1, "select": False}
        )
        leaks = [
            one
            for one in report["reasons"]
            if one["code"] == "label_leakage" and "chf" in one["message"]
        ]
        assert {
            one["message"].partition("label ")[2].partition(":")[0]: one["file"] for one in leaks
        } == files
        assert all(
            one["message"].startswith(f"{one['file']}: label " if one["file"] else "label ")
            for one in leaks
        )


# --- bad inputs of the generator


@pytest.mark.slow
@needs_sample(BAD)
def test_cases_of_claims_are_refused_or_handed_to_the_row_checks(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(BAD), str(tmp_path), "--only", "CL"], check=True, capture_output=True
    )
    cases = {case["id"][:4]: case for case in json.loads((tmp_path / "manifest.json").read_text())}
    refused = {}
    reported = {}
    for name, case in cases.items():
        root = tmp_path / case["command"]["dir"]
        try:
            claims, events = read_folder(root)
            judge_forms(claims)
        except UserError as error:
            refused[name] = (str(error.code), error.exit_code)
            continue
        lines = (
            (root / case["entry"]).read_bytes().count(b"\n")
            if case["entry"].endswith(".csv")
            else 0
        )
        assert events.height == lines - 1
        if found := find_codes(claims):
            reported[name] = found
    assert refused == {
        "CL02": ("ambiguous_code", 4),
        "CL12": ("csv_syntax", 4),
        "CL13": ("row_width", 4),
        "CL17": ("schema", 4),
        "CL18": ("truncated", 4),
        "CL19": ("ambiguous_code", 4),
    }
    for name, (code, _) in refused.items():
        assert code in {cases[name]["reason"], *cases[name]["reason_alt"]}
        assert "fail" in {cases[name]["expect"], *cases[name]["alt"]}
    assert reported == {"CL16": {"label_chars"}, "CL21": {"unmatched_labels"}}


def test_a_year_alone_is_advised_as_the_date(tmp_path: Path) -> None:
    write_files(tmp_path, claims__csv="patient_id,Year,icd9\na1,2001,428.0\na2,2002,038.9\n")
    hint = catch_refusal(tmp_path).finding.hint
    assert "--col date='Year' --date-format date=year" in str(hint)
    _, events = read_folder(tmp_path, col=["date=Year"], date_format=["date=year"])
    assert events["date"].to_list() == ["2001-07-01", "2002-07-01"]
