"""Sources of claims: real samples against Python's csv module, written tables for each trap, and sources that are refused."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples import BAD_INPUTS, SAMPLES, needs_sample

from bitimely_core import workflows
from bitimely_core.claims import dates
from bitimely_core.claims.dataset import ClaimsOptions
from bitimely_core.claims.sources import SOURCES, ClaimsSource, read_source
from bitimely_core.errors import UserError
from bitimely_core.formats import csv_text
from bitimely_core.formats.source import scan_folder
from bitimely_core.formats.text import use_encoding

BAD = BAD_INPUTS / "make_bad_inputs.py"
COLUMNS = {
    "subject_id": pl.String,
    "date": pl.String,
    "code": pl.String,
    "vocab": pl.String,
    "source": pl.String,
    "claim": pl.String,
    "position": pl.Int16,
    "file": pl.String,
    "row": pl.Int64,
}
SUBJECTS = {"subject_id": pl.String, "birth": pl.String, "death": pl.String, "obs_start": pl.String, "obs_end": pl.String, "sex": pl.UInt8}

HEAD = "patient_id,date,icd9\n"
GOOD = "a1,2001-02-03,428.0\na2,2002-03-04,038.9\n"


def real(name: str) -> pytest.MarkDecorator:
    return needs_sample(SAMPLES / name)


def folder(root: Path, **files: str | bytes) -> Path:
    """Files by name, with __ for the dot and ___ for a folder."""
    for name, content in files.items():
        path = root / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def sound(claims: ClaimsSource) -> pl.DataFrame:
    """All events, after what must hold for every source."""
    frames = list(pickle.loads(pickle.dumps(claims.events))())
    assert all(dict(frame.schema) == COLUMNS for frame in frames)
    events = pl.concat(frames)
    assert events.equals(pl.concat(list(claims.events())))  # as often as needed
    for row in claims.rows:
        assert row.seen >= sum(row.dropped.values()) + sum(row.quarantined.values())
    kept = dict(events["file"].value_counts().iter_rows())
    listed = {row.file: row.seen - sum(row.dropped.values()) for row in claims.rows}
    assert {file: listed[file] for file in kept} == kept
    if claims.subjects is not None:
        assert dict(claims.subjects.schema) == SUBJECTS
        assert claims.subjects["subject_id"].is_unique().all()
    json.dumps(claims.facts)
    return events


def of(root: Path, kind: str = "claims", **options: Any) -> tuple[ClaimsSource, pl.DataFrame]:
    claims = read_source(scan_folder(root), ClaimsOptions(source=kind, **options))
    return claims, sound(claims)


def refusal(root: Path, kind: str = "claims", **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read_source(scan_folder(root), ClaimsOptions(source=kind, **options))
    error = caught.value
    assert str(root) not in error.finding.line()
    return error


def cells(events: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return list(events.select(columns).iter_rows())


def listed(path: Path) -> list[dict[str, str]]:
    """Python's own reader, names in lower case."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name.lower(): cell for name, cell in row.items()} for row in csv.DictReader(file, strict=True)]


def codes(claims: ClaimsSource) -> set[str]:
    return {str(finding.code) for finding in claims.findings}


def test_an_unknown_source_suggests_the_closest(tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, claims__csv=HEAD + GOOD), "sinpuf")
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
        ("claims.csv", '"patient_id","date","icd9"\n"a1","2001-02-03","428.0"\n"a2","2002-03-04","038.9"\n'),
        ("claims.csv", "patient_id\tdate\ticd9\n" + GOOD.replace(",", "\t")),
        ("claims.csv", "date,note,icd9,patient_id\n2001-02-03,x,428.0, a1\n2002-03-04,,038.9,a2  \n"),
        ("claims.csv.gz", gzip.compress((HEAD + GOOD).encode(), mtime=0)),
        ("claims.parquet", parquet({"patient_id": ["a1", "a2"], "date": ["2001-02-03", "2002-03-04"], "icd9": ["428.0", "038.9"]})),
        (
            "claims.parquet",
            parquet(
                {
                    "icd9": pa.array(["428.0", "038.9"]).dictionary_encode(),
                    "patient_id": ["a1", "a2"],
                    "date": pa.array([datetime(2001, 2, 3), datetime(2002, 3, 4)]).cast(pa.date32()),
                }
            ),
        ),
    ],
)
def test_spellings_of_one_table_of_claims(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    claims, events = of(tmp_path)
    assert cells(events, "subject_id", "date", "code") == [("a1", "2001-02-03", "428.0"), ("a2", "2002-03-04", "038.9")]
    assert events["row"].to_list() == ([1, 2] if name.endswith("parquet") else [2, 3])
    assert (claims.vocab, claims.source, claims.subjects, claims.labels) == ("icd9", "outpatient", None, None)
    capitals = isinstance(content, str) and "DATE" in content
    assert [(finding.code, finding.level, finding.file) for finding in claims.findings] == [("header", "warning", name)] * capitals
    assert [(row.file, row.seen) for row in claims.rows] == [(name, 2)]


def test_what_is_written_stays_as_it_is(tmp_path: Path) -> None:
    lines = "000123, 2001-2-3 ,v58.67 \n123,,\n,NA,nan\n1e3,x,0042\n1e3,2001-01-01,038.9\n1e3,2001-01-01,038.9\n"
    _, events = of(folder(tmp_path, claims__csv=HEAD + lines))
    assert cells(events, "subject_id", "date", "code") == [
        ("000123", " 2001-2-3 ", "v58.67 "),
        ("123", None, None),
        (None, "NA", "nan"),
        ("1e3", "x", "0042"),
        ("1e3", "2001-01-01", "038.9"),
        ("1e3", "2001-01-01", "038.9"),
    ]


def test_columns_by_option_with_vocabularies_kinds_and_claims(tmp_path: Path) -> None:
    table = "id,when,dx,cls,kind,clm,n\n1,2001-01-01,428.0,ICD-9-CM,IP,c1,2\n1,2016-01-01,I50.9, 10 ,Physician,c2,1\n1,2002-01-01,496,,,,\n"
    named = ["subject=id", "date=when", "code=dx", "vocab=cls", "source=kind", "claim=clm", "position=n"]
    claims, events = of(folder(tmp_path, claims__csv=table), col=named, source_value=["ip=inpatient"], default_source="physician")
    assert cells(events, "vocab", "source", "claim", "position") == [
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
        ({"icd10_from": "2015-10-01", "col": ["vocab=cls"], "source_value": ["ip=inpatient"]}, "config"),
        ({"icd10_from": "October", "source_value": ["ip=inpatient"]}, "config"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    table = "id,date,icd,cls,source,kind\n1,2001-01-01,428.0,9,IP,IP\n"
    error = refusal(folder(tmp_path, claims__csv=table), **options)
    assert error.code == code
    assert error.exit_code == (2 if code in {"config", "unknown_name"} else 4)


def test_wide_tables_have_a_row_for_each_code(tmp_path: Path) -> None:
    table = "patient_id,date,dx2,dx10,dx1\na,2001-01-01,496,V58.67,428.0\nb,2001-01-02,,,\nc,2001-01-03, ,038.9,\n"
    claims, events = of(folder(tmp_path, claims__csv=table))
    expected = [("a", "428.0", 1, 2), ("a", "496", 2, 2), ("a", "V58.67", 3, 2), ("c", "038.9", 3, 4)]
    assert cells(events, "subject_id", "code", "position", "row") == expected
    assert [(row.kind, row.seen) for row in claims.rows] == [("codes", 4)]
    assert claims.facts["records"] == {"claims.csv": 3}
    globbed = table.replace("dx", "DIAG_")
    _, again = of(folder(tmp_path, claims__csv=globbed), col=["code=diag_*"])
    assert cells(again, "subject_id", "code", "position", "row") == expected
    assert refusal(tmp_path, col=["code=xx*"]).exit_code == 2


def test_the_day_of_the_switch_decides_the_vocabulary(tmp_path: Path) -> None:
    table = "patient_id,date,icd\na,2015-09-30,E850\na,20151001,E850\na,2015-10-01 10:00,I509\na,soon,428\n"
    path = folder(tmp_path, claims__csv=table)
    _, events = of(path, icd10_from="2015-10-01")
    assert events["vocab"].to_list() == ["icd9", "icd10", "icd10", None]
    error = refusal(path)  # E850 is a poisoning, or amyloidosis
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
    folder(tmp_path, claims__csv=f"patient_id,date,{header}\n" + "".join(f"a,2001-01-01,{code}\n" for code in rows))
    if refused:
        assert refusal(tmp_path, **options).code == "ambiguous_code"
    else:
        claims, _ = of(tmp_path, **options)
        assert claims.vocab == ("icd10" if options or header == "icd10" else "icd9")


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        (["38.9", "428.0", "V58.67"], True),
        (["38.9", "038.9"], False),  # both forms side by side are repaired
        (["8.5", "0085"], False),
        (["428.0", "V01.1"], False),
        (["2.5E+02", "428.0"], False),  # bad rows, no lost zeros
        (["389", "4280"], False),  # ambiguous
    ],
)
def test_a_column_that_has_lost_its_zeros_is_refused(tmp_path: Path, written: list[str], refused: bool) -> None:
    folder(tmp_path, claims__csv=HEAD + "".join(f"a,2001-01-01,{code}\n" for code in written))
    if not refused:
        of(tmp_path)
        return
    error = refusal(tmp_path)
    assert (error.code, error.exit_code) == ("ambiguous_code", 4)
    assert "38.9" in error.finding.line()


def test_lost_zeros_are_looked_for_in_icd_9_alone(tmp_path: Path) -> None:
    of(folder(tmp_path, claims__csv="patient_id,date,icd,vocab\na,2001-01-01,38.9,icd10\na,2001-01-01,428.0,icd9\n"))


def test_types_that_have_lost_what_was_written(tmp_path: Path) -> None:
    good: dict[str, Any] = {"patient_id": [1, 2], "date": ["2001-02-03", "2002-03-04"], "icd9": ["428.0", "038.9"]}
    _, events = of(folder(tmp_path, claims__parquet=parquet(good)))
    assert events["subject_id"].to_list() == ["1", "2"]
    for name, values, code in (
        ("icd9", [428.0, 38.9], "ambiguous_code"),
        ("icd9", [428, 389], "ambiguous_code"),
        ("patient_id", [1.0, None], "schema"),
        ("date", [20010203.0, None], "schema"),
    ):
        error = refusal(folder(tmp_path, claims__parquet=parquet(good | {name: values})))
        assert (error.code, error.exit_code, error.field) == (code, 4, name)


@pytest.mark.parametrize(("form", "text"), [("%d/%m/%Y", "31/12/2009"), ("%d%b%Y", "31DEC2009"), ("%d/%m/%y %H:%M", "31/12/09 23:59")])
def test_dates_in_another_form_are_read_by_their_format_alone(tmp_path: Path, form: str, text: str) -> None:
    folder(tmp_path, claims__csv=HEAD + f"a,{text},428.0\n" * 3 + "a,2009-12-30,496\na,?,496\n")
    error = refusal(tmp_path)
    assert (error.code, error.exit_code, error.field) == ("date", 4, "date")
    assert text not in error.finding.line()
    _, events = of(tmp_path, date_format=form)
    assert events["date"].to_list() == ["2009-12-31"] * 3 + ["2009-12-30", "?"]
    assert refusal(tmp_path, date_format="%Y.%m.%d").code == "date"


SPOILT = {  # form -> how it writes 3 April 2010 and 5 December 2011
    "%d/%m/%y": ("3/4/10", "5/12/11"),
    "%m/%d/%y": ("4/3/10", "12/5/11"),
    "%d/%m/%Y": ("13/4/2010", "25/12/2011"),
    "%m/%d/%y %H:%M": ("4/13/10 0:00", "12/25/11 14:38"),
    "%d-%b-%y": ("03-Apr-10", "05-Dec-11"),
    "%d%b%Y": ("03APR2010", "05DEC2011"),
    "%d.%m.%Y": ("03.04.2010", "05.12.2011"),
    "%Y/%m/%d": ("2010/04/13", "2011/12/25"),
    "%B %d, %Y": ("April 3, 2010", "December 5, 2011"),
    "%m/%d/%Y %I:%M:%S %p": ("4/13/2010 12:00:00 AM", "12/25/2011 2:38:00 PM"),
    "%d/%m/%Y %H:%M:%S%z": ("13/04/2010 23:30:00-05:00", "25/12/2011 00:30:00+14:00"),
    "excel": ("40271", "40882"),
}


@pytest.mark.parametrize("form", SPOILT)
@pytest.mark.parametrize("kind", ["claims", "claims parquet", "omop", "meds", "mimic3", "synpuf"])
def test_the_advice_on_dates_in_another_form_reads_them(tmp_path: Path, form: str, kind: str) -> None:
    first, second = SPOILT[form]
    if kind == "claims":
        folder(tmp_path, claims__csv=HEAD + "".join(f'a,"{text}",428.0\n' for text in (first, second)))
    elif kind == "claims parquet":
        folder(tmp_path, claims__parquet=parquet({"patient_id": ["a", "a"], "date": [first, second], "icd9": ["428.0", "496"]}))
    elif kind == "omop":
        rows = "".join(f'1,"{text}",4280,0,\n' for text in (first, second))
        head = "person_id,condition_start_date,condition_source_value,condition_source_concept_id,visit_occurrence_id\n"
        person = "person_id,gender_concept_id,year_of_birth\n1,8507,1950\n"
        folder(tmp_path, condition_occurrence__csv=head + rows, person__csv=person)
    elif kind == "meds":
        (tmp_path / "data").mkdir()
        rows = {"subject_id": [1, 1], "time": [first, second], "code": ["ICD9CM//428.0", "ICD9CM//496"]}
        (tmp_path / "data" / "0.parquet").write_bytes(parquet(rows))
    elif kind == "mimic3":
        stays = "".join(f'1,{i},"{text}"\n' for i, text in enumerate((first, second)))
        folder(
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
    error = refusal(tmp_path, layout)
    assert (error.code, error.exit_code) == ("date", 4)
    assert not any(text in error.finding.line() for text in (first, second))
    advised = re.findall(r"--date-format (excel|'[^']+')", error.finding.line())
    assert form in [one.strip("'") for one in advised], error.finding.line()
    _, events = of(tmp_path, layout, date_format=form)
    days = [13 if "13" in first else 3, 25 if "25" in second else 5]
    assert events["date"].to_list() == [f"2010-04-{days[0]:02d}", f"2011-12-{days[1]:02d}"]


def test_births_with_two_digits_of_the_year_are_before_the_claims(tmp_path: Path) -> None:
    patients = "patient_id,birth_date,death_date\na,3/4/40,5/4/11\nb,3/4/09,\nc,3/4/12,\n"
    folder(tmp_path, claims__csv=HEAD + "a,3/4/10,428.0\nb,3/5/11,496\nc,3/5/11,496\n", patients__csv=patients)
    claims, _ = of(tmp_path, date_format="%d/%m/%y")
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1940-04-03", "2009-04-03", "1912-04-03"]
    assert claims.subjects["death"].to_list() == ["2011-04-05", None, None]


@pytest.mark.parametrize(
    "text", ["2010-03-04T00:00:00-05:00", "2010-03-04T23:59:59Z", "2010-03-04 00:30 +1400", "2010-03-04T00:00:00.000+00:00"]
)
def test_dates_with_a_zone_are_those_of_the_clock_that_wrote_them(tmp_path: Path, text: str) -> None:
    claims, events = of(folder(tmp_path, claims__csv=HEAD + f"a,{text},428.0\n"))
    assert dates.parse_days(events["date"]).to_list() == [14672]
    assert "timestamps" in codes(claims)


@pytest.mark.parametrize("options", [{}, {"date_format": "%d/%m/%Y"}, {"icd10_from": "2015-10-01", "col": ["vocab=icd9"]}])
def test_columns_that_hold_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    folder(tmp_path, claims__csv="patient_id,date,icd,vocab,source,claim,position\na,,428,,,,\nb,,,,,,\n,,,,,,\n")
    if "icd10_from" in options:
        assert refusal(tmp_path, **options).exit_code == 2
        (tmp_path / "claims.csv").write_text("patient_id,date,icd\na,,428\nb,,\n,,\n")
        options = {"icd10_from": "2015-10-01"}
    claims, events = of(tmp_path, **options)
    assert cells(events, "subject_id", "date", "code", "vocab", "source", "position") == [
        ("a", None, "428", None, None, None),
        ("b", None, None, None, None, None),
        (None, None, None, None, None, None),
    ]
    assert claims.rows[0].seen == 3


def test_a_few_dates_in_another_form_are_left_to_the_row_checks(tmp_path: Path) -> None:
    _, events = of(folder(tmp_path, claims__csv=HEAD + GOOD + "a,31/12/2009,496\na,39814,496\na,,496\n"))
    assert events["date"].to_list()[2:] == ["31/12/2009", "39814", None]


def test_faults_of_the_table_refuse_it_before_any_row_is_used(tmp_path: Path) -> None:
    for lines, code, row in (
        (GOOD + 'a,2001-01-01,"428.0\n' + GOOD, "csv_syntax", 4),
        (GOOD + "a,2001-01-01\n", "row_width", 4),
        ("a,2001-01-01,428.0,x\n" + GOOD, "row_width", 2),
        (GOOD + "a,2001-01-01,42\0\n", "csv_syntax", 4),
        (GOOD + "a,2001", "truncated", 4),
    ):
        error = refusal(folder(tmp_path, claims__csv=HEAD + lines))
        assert (error.code, error.exit_code, error.row, error.file) == (code, 4, row, "claims.csv")
    (tmp_path / "claims.csv").unlink()
    assert refusal(tmp_path).code == "no_input"
    packed = gzip.compress((HEAD + GOOD * 500).encode(), mtime=0)
    error = refusal(folder(tmp_path, claims__csv__gz=packed[: len(packed) * 7 // 10]))
    assert (error.code, error.file) == ("truncated", "claims.csv.gz")
    assert refusal(folder(tmp_path, claims__csv=HEAD + GOOD)).code == "no_input"  # which of the two?


def test_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, claims__csv=HEAD.replace("date", "service_dt") + GOOD))
    assert error.code == "schema"
    assert "service_dt" in error.finding.line()
    assert "date" in error.finding.line()
    assert refusal(folder(tmp_path, claims__csv=GOOD)).code == "header"
    assert "a1" not in refusal(tmp_path).finding.line()
    assert refusal(folder(tmp_path, claims__csv="patient_id,date,icd9,icd10\na,2001-01-01,428.0,\n")).code == "schema"
    assert refusal(folder(tmp_path, claims__csv=HEAD)).code == "no_input"


def test_formula_like_ids_are_reported_and_other_encodings_are_stated(tmp_path: Path) -> None:
    lines = "=1+1,2001-01-01,428.0\n-5,2001-01-01,428.0\n-x,2001-01-01,428.0\n@a,2001-01-01,428.0\n"
    source = folder(tmp_path, claims__csv=(HEAD + lines).encode() + b"\xe9,2001-01-01,496\n")
    error = refusal(source)
    assert error.code == "encoding"
    assert "claims.csv" in str(error)
    assert f"byte {len(HEAD + lines)} in row 6" in str(error)
    with use_encoding("latin-1"):
        claims, events = of(source)
    by_code = {str(finding.code): finding for finding in claims.findings}
    assert (by_code["label_chars"].count, by_code["label_chars"].examples) == (3, ("2", "4", "5"))
    assert events["subject_id"].to_list()[-1] == "é"
    assert all(finding.level == "warning" for finding in claims.findings)


def test_long_tables_come_in_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_text, "BLOCK", 1 << 12)
    lines = [f"p{i % 97},2001-01-{i % 28 + 1:02d},{i % 900 + 100}" for i in range(5_000)]
    claims, events = of(folder(tmp_path, claims__csv=HEAD + "\n".join(lines)))
    assert [",".join(row) for row in cells(events, "subject_id", "date", "code")] == lines
    assert events["row"].to_list() == list(range(2, 5_002))
    assert max(frame.height for frame in claims.events()) < 300


# --- plain claims: patients, labels, map


PATIENTS = "patient_id,birth_date,death_date,sex,obs_end\na1,1950-01-02,,F,2010-12-31\na2,1960-01,2005-01-01,m,\na3,,,?,\n"


def test_patients(tmp_path: Path) -> None:
    claims, _ = of(folder(tmp_path, claims__csv=HEAD + GOOD, patients__csv=PATIENTS))
    assert claims.subjects is not None
    assert claims.subjects.rows() == [
        ("a1", "1950-01-02", None, None, "2010-12-31", 2),
        ("a2", "1960-01", "2005-01-01", None, None, 1),
        ("a3", None, None, None, None, 0),
    ]
    months = "id,month_of_birth\na1,1950-01\na2,1960-03\n"  # the Québec form
    claims, _ = of(folder(tmp_path, claims__csv="id,date,icd\na1,2001-01-01,4960\n", patients__csv=months))
    assert claims.subjects is not None
    assert cells(claims.subjects, "subject_id", "birth", "sex") == [("a1", "1950-01", None), ("a2", "1960-03", None)]
    claims, _ = of(folder(tmp_path, patients__csv=months.replace("month_of_birth", "born")), col=["birth=born"])
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1950-01", "1960-03"]
    assert refusal(tmp_path, col=["birth=geboren"]).code == "schema"


def test_patients_that_are_there_twice(tmp_path: Path) -> None:
    folder(tmp_path, claims__csv=HEAD + GOOD, patients__csv=PATIENTS + "a1,1950-01-02,,F,2010-12-31\n,1950-01-01,,,\n")
    claims, _ = of(tmp_path)
    assert claims.subjects is not None
    assert claims.subjects.height == 3
    (rows,) = [row for row in claims.rows if row.file == "patients.csv"]
    assert (rows.seen, rows.dropped, rows.quarantined) == (5, {"duplicates": 1}, {"identifier": 1})
    assert codes(claims) == {"duplicates", "identifier"}
    error = refusal(folder(tmp_path, patients__csv=PATIENTS + "a2,1961-01,,m,\n"))
    assert (error.code, error.exit_code, error.file) == ("duplicate_key", 4, "patients.csv")


def test_dates_of_birth_in_another_form(tmp_path: Path) -> None:
    turned = PATIENTS.replace("1950-01-02", "02/01/1950").replace("1960-01", "31/01/1960")
    error = refusal(folder(tmp_path, claims__csv=HEAD + GOOD, patients__csv=turned))
    assert (error.code, error.file, error.field) == ("date", "patients.csv", "birth")
    claims, _ = of(tmp_path, date_format="%d/%m/%Y")
    assert claims.subjects is not None
    assert claims.subjects["birth"].to_list() == ["1950-01-02", "1960-01-31", None]
    claims, _ = of(folder(tmp_path, patients__csv=PATIENTS.replace("1950-01-02", "1950-02-30")))
    assert codes(claims) == {"metadata"}


LABELS = "patient_id,CHF,COPD,index_date\na1,1,0,2005-01-01\na2,,1.0,\n"


def test_labels(tmp_path: Path) -> None:
    claims, _ = of(folder(tmp_path, claims__csv=HEAD + GOOD, labels__csv=LABELS, icd9_phecode__csv="icd9,phecode\n428.0,428.2\n"))
    assert claims.labels is not None
    assert dict(claims.labels.schema) == {"subject_id": pl.String, "index_date": pl.String, "chf": pl.Int8, "copd": pl.Int8}
    assert cells(claims.labels, "subject_id", "chf", "copd", "index_date") == [("a1", 1, 0, "2005-01-01"), ("a2", None, 1, None)]
    assert claims.facts["phecode_map"] == "icd9_phecode.csv"
    assert claims.findings == []


def test_labels_of_nobody_and_subjects_without_any(tmp_path: Path) -> None:
    claims, _ = of(folder(tmp_path, claims__csv=HEAD + GOOD, labels__csv=LABELS.replace("a2", "a7")))
    (finding,) = claims.findings
    assert (finding.code, finding.level, finding.count, finding.file) == ("unmatched_labels", "warning", 2, "labels.csv")
    assert "a7" not in finding.line()


def test_labels_that_are_none(tmp_path: Path) -> None:
    folder(tmp_path, claims__csv=HEAD + GOOD)
    assert refusal(folder(tmp_path, labels__csv=LABELS + "a1,0,0,2005-01-01\n")).code == "duplicate_key"
    error = refusal(folder(tmp_path, labels__csv="patient_id,CHF,age\na1,1,70\na2,0,80\n"))
    assert (error.code, error.field) == ("label", "age")
    claims, _ = of(folder(tmp_path, labels__csv="patient_id,CHF\na1,1\na2,0\na3,0\na4,yes\n"))
    assert claims.labels is not None
    assert claims.labels["chf"].to_list() == [1, 0, 0]
    (rows,) = [row for row in claims.rows if row.file == "labels.csv"]
    assert (rows.seen, rows.quarantined) == (4, {"label": 1})
    assert refusal(folder(tmp_path, labels__csv="patient_id,CHF,chf\na1,1,1\n")).code == "header"
    claims, _ = of(folder(tmp_path, labels__csv=LABELS + "a3,1,1,2005-02-30\n"))
    assert claims.labels is not None
    assert claims.labels["subject_id"].to_list() == ["a1", "a2"]
    assert {row.file: row.quarantined for row in claims.rows}["labels.csv"] == {"date": 1}


def test_label_columns_by_option(tmp_path: Path) -> None:
    folder(tmp_path, claims__csv=HEAD + GOOD, labels__csv="patient_id,Heart,age\na1,yes,70\na2,no,80\na3,,\n")
    claims, _ = of(tmp_path, label_column=["heart:CHF:yes"])
    assert claims.labels is not None
    assert cells(claims.labels, "subject_id", "chf") == [("a1", 1), ("a2", 0), ("a3", None)]
    for wrong in ("heart", "heart:chf", "heart:chf:yes@10", "heart:chf:yes@2010"):
        assert refusal(tmp_path, label_column=[wrong]).exit_code == 2
    assert refusal(tmp_path, label_column=["lung:chf:1"]).code == "schema"
    assert refusal(tmp_path, label_column=["heart:chf:1", "age:CHF:1"]).exit_code == 2


def test_a_leak_names_the_table_of_labels_and_none_where_rules_make_them(tmp_path: Path) -> None:
    """Every positive has the code that defines its label, and no negative."""
    rows = [f"s{i},2001-0{k + 1}-01,{'428.0' if i % 2 else '401.9'}" for i in range(20) for k in range(3)]
    labels = "patient_id,CHF\n" + "".join(f"s{i},{i % 2}\n" for i in range(20))
    raw = folder(tmp_path / "raw", claims__csv=HEAD + "\n".join(rows) + "\n", labels__csv=labels)
    born = "patient_id,birth_date\n" + "".join(f"s{i},1930-01-01\n" for i in range(20))  # the rule has a minimum age
    folder(raw, icd9_phecode__csv="icd9,phecode\n428.0,428.2\n401.9,401.1\n", patients__csv=born)
    physician = {"default_source": "physician"}
    for options, files in ((physician, {"chf": "labels.csv"}), (physician | {"rules": "ccdss"}, {"chf": None, "chf_source": "labels.csv"})):
        home = tmp_path / str(len(files)) / "cache" / "pophr"
        report = workflows.ingest("pophr", raw, home, options=options, build={"min_codes": 1, "select": False})
        leaks = [one for one in report["reasons"] if one["code"] == "label_leakage" and "chf" in one["message"]]
        assert {one["message"].partition("label ")[2].partition(":")[0]: one["file"] for one in leaks} == files
        assert all(one["message"].startswith(f"{one['file']}: label " if one["file"] else "label ") for one in leaks)


# --- bad inputs of the generator


@needs_sample(BAD)
def test_cases_of_claims_are_refused_or_handed_to_the_row_checks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(BAD), str(tmp_path), "--only", "CL"], check=True, capture_output=True)
    cases = {case["id"][:4]: case for case in json.loads((tmp_path / "manifest.json").read_text())}
    refused = {}
    reported = {}
    for name, case in cases.items():
        root = tmp_path / case["command"]["dir"]
        try:
            claims, events = of(root)
        except UserError as error:
            refused[name] = (str(error.code), error.exit_code)
            continue
        lines = (root / case["entry"]).read_bytes().count(b"\n") if case["entry"].endswith(".csv") else 0
        assert events.height == lines - 1
        if found := codes(claims):
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


# --- DE-SynPUF


def synpuf_codes(path: Path) -> tuple[set[tuple[str, str, str]], int]:
    """(claim, date, code) of a table of claims with the dates of first segments, and the number of codes written."""
    rows = listed(path)
    first = {row["clm_id"]: row["clm_from_dt"] for row in rows if row["clm_from_dt"]}
    found = [
        (row["clm_id"], row["clm_from_dt"] or first.get(row["clm_id"], ""), cell.strip())
        for row in rows
        for name, cell in row.items()
        if name.startswith(("icd9_dgns_cd_", "line_icd9_dgns_cd_")) and cell.strip()
    ]
    return set(found), len(found)


@real("de-synpuf")
def test_synpuf_is_a_set_of_codes_a_claim() -> None:
    claims, events = of(SAMPLES / "de-synpuf", "synpuf")
    assert events.height == 54_416
    assert claims.facts["segments"] == {"dates_filled": 61, "without_date": 1}
    records = {name.split("_")[5] + name[-5]: many for name, many in claims.facts["records"].items()}
    assert records == {"Inpatient1": 186, "Outpatient1": 2_460, "CarrierA": 14_675, "CarrierB": 0}
    assert (events["date"].null_count(), claims.vocab, claims.facts["absent"]) == (0, "icd9cm", [])
    kinds = {"Inpatient": "inpatient", "Outpatient": "outpatient", "Carrier": "physician"}
    for (file,), rows in events.group_by("file"):
        expected, written = synpuf_codes(SAMPLES / "de-synpuf" / str(file))
        assert set(cells(rows.with_columns(pl.col("code").str.strip_chars()), "claim", "date", "code")) == expected
        (account,) = [row for row in claims.rows if row.file == file]
        assert (account.seen, rows.height) == (written, len(expected))
        assert set(rows["source"]) == {kinds[str(file).split("_")[5]]}
    owners = {row["clm_id"]: row["desynpuf_id"] for path in (SAMPLES / "de-synpuf").glob("*Claims*") for row in listed(path)}
    assert all(owners[claim] == subject for claim, subject in cells(events, "claim", "subject_id"))


@real("de-synpuf")
def test_synpuf_beneficiaries_and_flags_of_three_years() -> None:
    wanted = [
        f"SP_{name}:{name}{year}:1{'@' + year if year else ''}"
        for name in ("CHF", "COPD", "DIABETES")
        for year in ("", "2008", "2009", "2010")
    ]
    claims, _ = of(SAMPLES / "de-synpuf", "synpuf", label_column=wanted)
    assert claims.subjects is not None
    assert claims.labels is not None
    assert claims.subjects.height == 342
    years = {
        year: {row["desynpuf_id"]: row for row in listed(SAMPLES / "de-synpuf" / f"DE1_0_{year}_Beneficiary_Summary_File_Sample_1.csv")}
        for year in ("2008", "2009", "2010")
    }
    assert [len(rows) for rows in years.values()] == [342, 338, 334]
    assert {row.file: row.seen for row in claims.rows if "Beneficiary" in row.file} == {
        f"DE1_0_{year}_Beneficiary_Summary_File_Sample_1.csv": len(rows) for year, rows in years.items()
    }
    yes = {name: [int(claims.labels[f"{name}{year}"].sum()) for year in years] for name in ("chf", "copd", "diabetes")}
    assert yes == {"chf": [98, 122, 99], "copd": [41, 51, 36], "diabetes": [127, 134, 101]}
    assert claims.labels["chf2010"].null_count() == 8
    for subject, *flags in claims.labels.iter_rows():
        for text, flag in zip(wanted, flags, strict=True):
            column = text.split(":")[0].lower()
            cells_of = [
                rows[subject][column] for year, rows in years.items() if subject in rows and ("@" not in text or text.endswith(year))
            ]
            assert flag == (None if not cells_of else int("1" in cells_of))
    for subject, birth, death, _, _, sex in claims.subjects.iter_rows():
        known = [rows[subject] for rows in years.values() if subject in rows]
        assert birth == known[0]["bene_birth_dt"]
        assert death == next((row["bene_death_dt"] for row in reversed(known) if row["bene_death_dt"]), None)
        assert sex == int(known[0]["bene_sex_ident_cd"])
    assert refusal(SAMPLES / "de-synpuf", "synpuf", label_column=["SP_CHF:chf:1@2011"]).exit_code == 2
    assert refusal(SAMPLES / "de-synpuf", "synpuf", label_column=["SP_CFH:chf:1"]).code == "schema"


@real("de-synpuf")
def test_synpuf_admitting_codes_are_read_only_on_request() -> None:
    _, without = of(SAMPLES / "de-synpuf", "synpuf")
    _, with_them = of(SAMPLES / "de-synpuf", "synpuf", admitting=True)
    assert with_them.height > without.height
    assert set(cells(without, "claim", "code")) < set(cells(with_them, "claim", "code"))


BENEFICIARY = "DESYNPUF_ID,BENE_BIRTH_DT,BENE_DEATH_DT,BENE_SEX_IDENT_CD,SP_CHF,BENE_ESRD_IND\n"
CARRIER = "DESYNPUF_ID,CLM_ID,CLM_FROM_DT,ICD9_DGNS_CD_1,ICD9_DGNS_CD_2,LINE_ICD9_DGNS_CD_1\n"
STAYS = "DESYNPUF_ID,CLM_ID,SEGMENT,CLM_FROM_DT,ICD9_DGNS_CD_1,ICD9_DGNS_CD_2\n"


def archive(path: Path, name: str, content: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)


def test_synpuf_samples_parts_and_archives_by_what_they_hold(tmp_path: Path) -> None:
    folder(
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
    claims, events = of(tmp_path, "synpuf", label_column=["SP_CHF:chf:1", "BENE_ESRD_IND:esrd:Y@2010"])
    assert cells(events, "subject_id", "claim", "date", "code", "source", "position") == [
        ("a", "1", "20080101", "4280", "physician", 1),
        ("a", "1", "20080101", "496", "physician", 2),
        ("c", "3", "20080103", "41401", "inpatient", 1),
        ("b", "2", "20080102", "0416", "physician", 1),
    ]
    assert claims.subjects is not None
    assert claims.labels is not None
    assert cells(claims.subjects, "subject_id", "birth", "death", "sex") == [("c", "19300101", None, 2), ("a", "19400101", "20100501", 1)]
    assert cells(claims.labels, "subject_id", "chf", "esrd") == [("c", 1, None), ("a", 0, 1)]
    absent = [text for text in claims.facts["absent"] if text.startswith("sample 1:")]
    assert "sample 1: 2008" in absent
    assert "sample 1: 2010" not in absent, "the table in an archive counts, not the archive's name"
    assert "missing_pair" in codes(claims)


def test_synpuf_segments_take_the_date_of_the_first_and_repeat_no_code(tmp_path: Path) -> None:
    lines = ["a,7,2,,4280,496", "a,7,1,20080101,4280,", "a,8,2,,25000,", "a,9,1,20080102,25000,25000", "a,7,3,,496,0416"]
    folder(tmp_path, DE1_0_2008_to_2010_Outpatient_Claims_Sample_1__csv=STAYS + "\n".join(lines))
    claims, events = of(tmp_path, "synpuf")
    assert cells(events, "claim", "date", "code", "row") == [
        ("7", "20080101", "4280", 2),
        ("7", "20080101", "496", 2),
        ("8", None, "25000", 4),
        ("9", "20080102", "25000", 5),
        ("7", "20080101", "0416", 6),
    ]
    assert claims.facts["segments"] == {"dates_filled": 2, "without_date": 1}
    assert claims.rows[0].dropped == {"duplicates": 3}


def test_synpuf_without_its_tables(tmp_path: Path) -> None:
    assert refusal(folder(tmp_path, claims__csv=HEAD + GOOD), "synpuf").code == "no_input"
    folder(tmp_path, DE1_0_2008_to_2010_Carrier_Claims_Sample_1A__csv=CARRIER.replace("ICD9_DGNS", "DX") + "a,1,20080101,4280,496,4280\n")
    assert refusal(tmp_path, "synpuf").code == "schema"
    assert refusal(tmp_path, "synpuf", col=["code=x"]).exit_code == 2


# --- MIMIC


@real("mimic-iii-demo")
def test_mimic3_diagnoses_have_the_time_of_discharge() -> None:
    claims, events = of(SAMPLES / "mimic-iii-demo", "mimic3")
    ended = {row["hadm_id"]: row["dischtime"] for row in listed(SAMPLES / "mimic-iii-demo" / "ADMISSIONS.csv")}
    expected = [
        (row["subject_id"], ended[row["hadm_id"]], row["icd9_code"], row["hadm_id"], int(row["seq_num"]))
        for row in listed(SAMPLES / "mimic-iii-demo" / "DIAGNOSES_ICD.csv")
    ]
    assert cells(events, "subject_id", "date", "code", "claim", "position") == expected
    assert len(expected) == 1_135
    assert (claims.vocab, claims.source) == ("icd9cm", "inpatient")
    assert claims.subjects is not None
    people = listed(SAMPLES / "mimic-iii-demo" / "PATIENTS.csv")
    assert cells(claims.subjects, "subject_id", "birth", "death", "sex") == [
        (row["subject_id"], row["dob"], row["dod"] or None, {"M": 1, "F": 2}[row["gender"]]) for row in people
    ]


def test_mimic3_stays_that_are_not_there_and_codes_that_are_none(tmp_path: Path) -> None:
    folder(
        tmp_path,
        ADMISSIONS__csv='"ROW_ID","SUBJECT_ID","HADM_ID","ADMITTIME","DISCHTIME"\n1,5,100,"2101-01-01 10:00:00","2101-01-03 09:00:00"\n',
        PATIENTS__csv='"SUBJECT_ID","GENDER","DOB","DOD"\n5,"M","1801-01-01 00:00:00",""\n',
        DIAGNOSES_ICD__csv__gz=gzip.compress(
            b'"ROW_ID","SUBJECT_ID","HADM_ID","SEQ_NUM","ICD9_CODE"\n1,5,100,1,"0389"\n2,5,100,,\n3,5,999,1,"4280"\n'
        ),
    )
    _, events = of(tmp_path, "mimic3")
    assert cells(events, "date", "code", "position") == [
        ("2101-01-03 09:00:00", "0389", 1),
        ("2101-01-03 09:00:00", None, None),
        (None, "4280", 1),
    ]
    (tmp_path / "PATIENTS.csv").unlink()
    assert refusal(tmp_path, "mimic3").code == "no_input"


@real("mimic-iv-demo")
def test_mimic4_copies_from_a_spreadsheet_need_their_format() -> None:
    error = refusal(SAMPLES / "mimic-iv-demo", "mimic4")
    assert (error.code, error.exit_code, error.file, error.field) == ("date", 4, "hosp/admissions.csv", "dischtime")
    claims, events = of(SAMPLES / "mimic-iv-demo", "mimic4", date_format="%m/%d/%y %H:%M")
    hosp = SAMPLES / "mimic-iv-demo" / "hosp"
    people = {row["subject_id"]: row for row in listed(hosp / "patients.csv")}
    ended = {}
    for row in listed(hosp / "admissions.csv"):
        anchor = int(people[row["subject_id"]]["anchor_year"])
        short = datetime.strptime(row["dischtime"], "%m/%d/%y %H:%M")
        year = min((century + short.year % 100 for century in range(1900, 2400, 100)), key=lambda year: abs(year - anchor))
        ended[row["hadm_id"]] = f"{year}-{short.month:02}-{short.day:02}"
        assert 0 <= year - anchor <= 9
    expected = [
        (row["subject_id"], ended[row["hadm_id"]], row["icd_code"].strip(), f"icd{row['icd_version']}cm", int(row["seq_num"]))
        for row in listed(hosp / "diagnoses_icd.csv")
    ]
    assert cells(events, "subject_id", "date", "code", "vocab", "position") == expected
    assert Counter(events["vocab"]) == {"icd9cm": 1_069, "icd10cm": 1_115}
    assert set(events["source"]) == {"inpatient"}
    assert claims.subjects is not None
    for subject, birth, death, _, _, _ in claims.subjects.iter_rows():
        assert birth == f"{int(people[subject]['anchor_year']) - int(people[subject]['anchor_age'])}-01"
        assert (death is None) == (people[subject]["dod"] == "")
        assert death is None or 0 <= int(death[:4]) - int(people[subject]["anchor_year"]) <= 10


def test_mimic4_official_dates_and_the_emergency_module(tmp_path: Path) -> None:
    folder(
        tmp_path,
        hosp___patients__csv="subject_id,gender,anchor_age,anchor_year,dod\n5,F,91,2150,2151-01-01\n6,M,,,\n",
        hosp___admissions__csv="subject_id,hadm_id,admittime,dischtime\n5,100,2150-01-01 10:00:00,2150-01-03 09:00:00\n",
        hosp___diagnoses_icd__csv="subject_id,hadm_id,seq_num,icd_code,icd_version\n5,100,1,0389   ,9\n5,100,2,I509,10\n",
        ed___edstays__csv__gz=gzip.compress(b"subject_id,hadm_id,stay_id,intime,outtime\n6,,300,2150-02-01 10:00:00,2150-02-02 01:00:00\n"),
        ed___diagnosis__csv__gz=gzip.compress(
            b'subject_id,stay_id,seq_num,icd_code,icd_version,icd_title\n6,300,1,4280,9,"FAILURE, HEART"\n'
        ),
    )
    claims, events = of(tmp_path, "mimic4")
    assert cells(events, "subject_id", "date", "code", "vocab", "source", "claim") == [
        ("5", "2150-01-03 09:00:00", "0389", "icd9cm", "inpatient", "100"),
        ("5", "2150-01-03 09:00:00", "I509", "icd10cm", "inpatient", "100"),
        ("6", "2150-02-02 01:00:00", "4280", "icd9cm", "emergency", "300"),
    ]
    assert claims.subjects is not None
    assert cells(claims.subjects, "birth", "death") == [("2059-01", "2151-01-01"), (None, None)]
    assert refusal(tmp_path, "mimic4", icd10_from="2015-10-01").exit_code == 2
    folder(tmp_path, hosp___diagnoses_icd__csv="subject_id,hadm_id,seq_num,icd_code,icd_version\n5,100,1,0389,11\n")
    assert refusal(tmp_path, "mimic4").code == "wrong_vocabulary"


# --- OMOP


@real("omop-synpuf50")
def test_omop_without_concepts_reads_source_values() -> None:
    claims, events = of(SAMPLES / "omop-synpuf50", "omop")
    kinds = {"9201": "inpatient", "262": "inpatient", "9202": "outpatient", "9203": "emergency"}
    visits = {
        row["visit_occurrence_id"]: kinds.get(row["visit_concept_id"]) for row in listed(SAMPLES / "omop-synpuf50" / "visit_occurrence.csv")
    }
    expected = [
        (row["person_id"], row["condition_start_date"], row["condition_source_value"], visits.get(row["visit_occurrence_id"]))
        for row in listed(SAMPLES / "omop-synpuf50" / "condition_occurrence.csv")
    ]
    assert cells(events, "subject_id", "date", "code", "source") == expected
    assert len(expected) == 2_442
    assert events["subject_id"].n_unique() == 21
    assert claims.facts["absent"] == ["observation", "procedure_occurrence", "measurement"]
    assert "missing_pair" in codes(claims)
    assert claims.subjects is not None
    people = {row["person_id"]: row for row in listed(SAMPLES / "omop-synpuf50" / "person.csv")}
    spans = {row["person_id"]: row for row in listed(SAMPLES / "omop-synpuf50" / "observation_period.csv")}
    assert claims.subjects.height == len(people) == 25
    for subject, birth, death, start, end, sex in claims.subjects.iter_rows():
        row, span = people[subject], spans.get(subject, {})
        assert birth == f"{row['year_of_birth']}-{row['month_of_birth']}-{row['day_of_birth']}"
        assert (death, sex) == (None, {"8507": 1, "8532": 2}[row["gender_concept_id"]])
        assert (start, end) == (span.get("observation_period_start_date"), span.get("observation_period_end_date"))


PERSON = "person_id,gender_concept_id,year_of_birth,month_of_birth,day_of_birth\n1,8507,1940,,\n2,8532,1950,6,\n"
CONDITION = (
    "condition_occurrence_id,person_id,condition_start_date,condition_source_value,condition_source_concept_id,visit_occurrence_id\n"
)
OBSERVATION = "observation_id,person_id,observation_date,observation_source_value,observation_source_concept_id,visit_occurrence_id\n"
CONCEPT = 'concept_id\tconcept_name\tvocabulary_id\tconcept_code\n77\tHeart "failure\tICD9CM\t428.0\n78\tHeart failure\tICD10CM\tI50.9\n79\tInsulin\tICD9CM\tV58.67\n80\tx\tSNOMED\t84114007\n'


def test_omop_takes_source_concepts_of_all_tables(tmp_path: Path) -> None:
    folder(
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
    claims, events = of(tmp_path, "omop", default_source="physician")
    assert cells(events, "subject_id", "date", "code", "vocab", "source") == [
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
    values = ["V5867", "V10.3", "Z79.4", "E8889", "V2020", "V5008", "E0100", "E1390", "99213", "J7030", "2345-7", ""]
    lines = "".join(f"{i},1,2001-01-01,{value},{i},\n" for i, value in enumerate(values))
    folder(tmp_path, person__csv=PERSON, observation__csv=OBSERVATION + lines)
    claims, events = of(tmp_path, "omop")
    assert cells(events, "code", "vocab") == [("V5867", None), ("V10.3", None), ("Z79.4", "icd10cm"), ("E8889", None)]
    assert claims.rows[0].dropped == {"wrong_vocabulary": 8}


def test_omop_source_values_change_their_vocabulary_on_a_day(tmp_path: Path) -> None:
    folder(tmp_path, person__csv=PERSON, condition_occurrence__csv=CONDITION + "1,1,2015-09-30,4280,0,\n2,1,2015-10-01,E861,0,\n")
    assert refusal(tmp_path, "omop").code == "ambiguous_code"
    _, events = of(tmp_path, "omop", icd10_from="2015-10-01")
    assert events["vocab"].to_list() == ["icd9cm", "icd10cm"]


# --- MEDS


def meds(root: Path, rows: Iterable[tuple[int, datetime | None, str]], name: str = "data/train/0.parquet") -> Path:
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
    meds(tmp_path, [(8, day(2001), "LOCAL-42"), (8, day(2002), "dx:icd9=496")], "data/tuning/0.parquet")
    (tmp_path / "metadata").mkdir()
    parents = pa.table({"code": ["LOCAL-42", "x"], "description": ["", ""], "parent_codes": [["SNOMED/1", "ICD9CM/428.0"], None]})
    pq.write_table(parents, tmp_path / "metadata" / "codes.parquet")
    splits = pa.table({"subject_id": pa.array([7, 8, 9], pa.int64()), "split": ["train", "tuning", "held_out"]})
    pq.write_table(splits, tmp_path / "metadata" / "subject_splits.parquet")
    claims, events = of(tmp_path, "meds", code_pattern=[r"dx:(?P<vocab>icd9)=(?P<code>.+)"])
    assert [
        (subject, str(date)[:10], code, vocab) for subject, date, code, vocab in cells(events, "subject_id", "date", "code", "vocab")
    ] == [
        ("7", "2001-01-01", "4280", "icd9cm"),
        ("7", "2002-01-01", "I509", "icd10cm"),
        ("7", "2003-01-01", "250.00", "icd9cm"),
        ("7", "2004-01-01", "E11.9", "icd10cm"),
        ("8", "2001-01-01", "428.0", "icd9cm"),
        ("8", "2002-01-01", "496", "icd9"),
    ]
    assert claims.splits == {"7": "train", "8": "validation", "9": "test"}
    assert claims.subjects is not None
    assert [
        (subject, birth and birth[:10], death and death[:10], sex) for subject, birth, death, _, _, sex in claims.subjects.iter_rows()
    ] == [("7", "1950-01-01", "2008-01-01", 2), ("8", None, None, None)]
    assert claims.rows[0].dropped == {"wrong_vocabulary": 6}
    assert claims.facts["strings"] == {"icd": 6, "other": 6, "rows_of_other": 6}
    _, fewer = of(tmp_path, "meds")
    assert fewer.height == 5


def test_meds_that_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(folder(tmp_path, claims__csv=HEAD + GOOD), "meds").code == "no_input"
    error = refusal(meds(tmp_path, [(1, day(2001), "LAB//1")]), "meds")
    assert (error.code, error.exit_code) == ("no_input", 4)
    assert "--code-pattern" in error.finding.line()
    assert refusal(tmp_path, "meds", code_pattern=["(?P<code>x"]).exit_code == 2
    assert refusal(tmp_path, "meds", code_pattern=["(?P<code>x)"]).exit_code == 2
    meds(tmp_path, ROWS)
    (tmp_path / "metadata").mkdir()
    pq.write_table(pa.table({"subject_id": pa.array([7], pa.int64()), "split": ["dev"]}), tmp_path / "metadata" / "subject_splits.parquet")
    assert refusal(tmp_path, "meds").code == "schema"
