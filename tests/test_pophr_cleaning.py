"""Rows as the command takes them: every one used, dropped or quarantined, and counted once."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import polars as pl
import pytest

from bitimely_core.claims import clean, codes, dates, event_labels, subject_splits
from bitimely_core.claims.codebook import Codebook
from bitimely_core.claims.job import CleaningFindings
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.claims.pass2_write import resolve_duplicates

TABLES = {"icd9": {"250.00": ("250.2",), "496": ("496",)}, "icd10": {"E11.9": ("250.2",)}}


def frame(rows: list[tuple[Any, ...]], names: str = "subject_id date code") -> pl.DataFrame:
    return pl.DataFrame(rows, schema=dict.fromkeys(names.split(), pl.String), orient="row")


def day(text: str) -> int:
    found = dates.parse_day(text)
    assert found is not None
    return found


LIFE_DATES = pl.DataFrame(
    {
        "subject_id": ["a"],
        "birth_day": [day("2000-06-01")],
        "death_day": [day("2005-01-01")],
        "index_day": [day("2003-01-01")],
    },
    schema_overrides={"birth_day": pl.Int32, "death_day": pl.Int32, "index_day": pl.Int32},
)


def test_each_row_is_counted_at_the_first_check_it_fails() -> None:
    rows = [
        ("a", "2001-01-01", "25000"),
        ("", "2001-01-01", "25000"),
        (None, "never", "25000"),
        ("a", "36526", "nonsense"),
        ("a", "2000-05-31", "nonsense"),
        ("a", "2005-04-02", "496"),  # 91 days after death
        ("a", "2005-04-01", "496"),
        ("b", "2001-01-01", "UNKNOWN"),
        ("b", "2001-01-01", "49"),
        ("b", "2001-01-01", "E11.9"),
        ("b", "2001-01-01", "E119"),
        ("b", "2001-01-01", "49.6.0"),
        ("b", "2001-01-01", "999"),
    ]
    book = Codebook(TABLES, strict=True)
    kept, account = clean.clean_rows(frame(rows), book, life_dates=LIFE_DATES.drop("index_day"))
    assert kept["row"].to_list() == [1, 7, 13]
    assert kept.schema == {
        "subject_id": pl.String,
        "day": pl.Int32,
        "code": pl.Int32,
        "source": pl.Int8,
        "row": pl.Int64,
    }
    dropped, quarantined = account.split()
    assert dropped == {"date_outside_life": 2}
    assert quarantined == {
        "ambiguous_code": 1,
        "bad_code": 1,
        "date": 1,
        "empty_code": 1,
        "identifier": 2,
        "wrong_vocabulary": 2,
    }
    assert (
        account.rows == len(rows) == kept.height + sum(dropped.values()) + sum(quarantined.values())
    )
    funnel = account.funnel()
    assert funnel.bad_code == {"missing": 1, "bad_format": 2, "ambiguous_short": 1}
    assert (funnel.bad_date, funnel.before_birth, funnel.after_death) == (1, 1, 1)
    assert (funnel.mapped["exact"], funnel.unmapped) == (2, 2)
    assert [book.codes[i].text for i in kept["code"] if not book.codes[i].phecodes] == ["ICD9//999"]


def test_examples_are_codes_or_row_numbers_and_five_at_most() -> None:
    rows = [("secret-id", "31/12/1999", "496")] * 7 + [
        ("secret-id", "2001-01-01", f"bad{i}" + "x" * 200) for i in range(7)
    ]
    account = clean.RowAccount()
    for part in (frame(rows[:3]), frame(rows[3:])):
        account += clean.clean_rows(part.with_columns(row=pl.lit(7, pl.Int64)), Codebook(TABLES))[1]
    shown = [text for own in account.examples.values() for text in own]
    assert all(len(own) <= 5 for own in account.examples.values())
    assert account.examples["date"] == ["row 7"] * 5  # type: ignore[index]
    assert all(len(text) <= 80 for text in shown)
    assert not any(re.search("secret|1999", text) for text in shown)
    assert account.reasons == {"date": 7, "bad_code": 7}


def test_duplicates_silent_codes_and_late_rows() -> None:
    rows = [
        ("a", "2001-01-01", "25000", None),
        ("a", "2001-01-01", "25000", None),
        ("a", "2001-01-01", "250.00", None),  # written otherwise: no exact duplicate
        ("a", "2001-01-01", "25000", "claim 1"),
        ("a", "20010101", "250.00", "claim 1"),  # an adjusted copy of the claim
        ("a", "2003-01-01", "496", None),  # on the index day
        ("a", "2003-01-02", "496", None),
        ("a", "2003-01-02", "496", None),
        ("a", "2003-01-02", "999", None),
        ("b", "2003-01-02", "496", None),
    ]
    book = Codebook(TABLES)
    valid, account = clean.clean_rows(
        frame(rows, "subject_id date code claim"), book, life_dates=LIFE_DATES, copy_key=True
    )
    assert valid.height == len(rows)
    rows = valid.select(
        pl.exclude("subject_id"), subject=pl.col("subject_id").rank("dense").cast(pl.Int32) - 1
    )
    kept, accounts = resolve_duplicates(
        rows, CleaningFindings(files=["claims.csv"], codes=book.codes)
    )
    more = accounts["claims.csv"]
    assert kept["row"].to_list() == [1, 3, 4, 6, 7, 9, 10]
    assert kept.filter("late")["row"].to_list() == [7, 9]
    assert more.split()[0] == {"duplicates": 3, "label_leakage": 1, "unmapped_code": 1}
    assert more.examples["duplicates"] == ["row 2", "row 5", "row 8"]  # type: ignore[index]
    assert account.funnel().mapped["exact"] == 9  # the funnel counts rows as they stand in the file


def test_rows_after_the_end_of_the_data_leave() -> None:
    rows = [("a", "2001-01-01", "496"), ("a", "2999-01-01", "496"), ("a", "2999-01-01", "999")]
    book = Codebook(TABLES)
    valid, account = clean.clean_rows(frame(rows), book, copy_key=True)
    findings = CleaningFindings(files=["claims.csv"], codes=book.codes, latest=day("2006-01-01"))
    kept, accounts = resolve_duplicates(
        valid.drop("subject_id").with_columns(subject=pl.lit(0, pl.Int32)), findings
    )
    assert kept["row"].to_list() == [1]
    assert accounts["claims.csv"].split() == ({"date_outside_life": 2}, {})
    assert accounts["claims.csv"].examples["date_outside_life"] == ["row 2", "row 3"]  # type: ignore[index]
    account += accounts["claims.csv"]
    funnel = account.funnel()
    assert (funnel.rows, funnel.future, funnel.mapped["exact"], funnel.unmapped) == (3, 2, 1, 0)


def test_vocabularies_and_sources_of_rows() -> None:
    rows = [
        ("a", "2001-01-01", "E119", "icd10", "inpatient"),
        ("a", "2001-01-01", "496", None, None),
        ("a", "2001-01-01", "496", "icd9", "elsewhere"),
    ]
    book = Codebook(TABLES)
    kept, _ = clean.clean_rows(
        frame(rows, "subject_id date code vocab source"),
        book,
        form=clean.RowForm("icd9cm", "physician"),
    )
    assert [SOURCES[i] for i in kept["source"]] == ["inpatient", "physician", "other"]
    assert [book.codes[i].text for i in kept["code"]] == [
        "ICD10//E11.9",
        "ICD9CM//496",
        "ICD9//496",
    ]
    with pytest.raises(ValueError, match="icd8"):
        clean.clean_rows(frame([("a", "x", "1", "icd8")], "subject_id date code vocab"), book)
    with pytest.raises(ValueError, match="expected text"):
        clean.clean_rows(
            frame(rows, "subject_id date code vocab source").with_columns(code=pl.lit(25000)), book
        )


def test_the_future_of_the_data() -> None:
    usual = dict.fromkeys(range(10000, 11000), 10)
    assert clean.find_data_end(usual) is None
    assert clean.find_data_end(usual | {300000: 3}) == 10999
    assert clean.find_data_end(usual | {14000: 3}) is None  # less than ten years
    assert clean.find_data_end(usual | {300000: 300}) is None  # too many to be slips
    assert clean.find_data_end({}) is None


def test_controls_near_the_disease_lose_their_label() -> None:
    rows = pl.DataFrame(
        {
            "subject": [0, 1, 1, 2],
            "day": [1, 1, 2, 3],
            "code": [1, 1, 0, 0],
            "source": [0, 0, 0, 0],
        },
        schema={"subject": pl.Int32, "day": pl.Int32, "code": pl.Int32, "source": pl.Int8},
    )
    people = pl.DataFrame({"y_x": [1, 0, 0, None, 0]}, schema={"y_x": pl.Int8})
    found = [
        codes.IcdCode("icd9", "790.2", ("250.4",), "exact"),
        codes.IcdCode("icd9", "496", ("496",), "exact"),
    ]
    labelled = event_labels.exclude_controls(rows, found, {"x": frozenset({"250.4"})}, people)
    assert labelled["y_x"].to_list() == [1, None, None, None, 0]
    assert event_labels.exclude_controls(rows, found, {"x": frozenset({"496"})}, people)[
        "y_x"
    ].to_list() == [1, None, 0, None, 0]
    assert event_labels.exclude_controls(rows, found, {"x": frozenset()}, people)[
        "y_x"
    ].to_list() == [1, 0, 0, None, 0]


def test_the_bins_of_the_cache_keep_the_splits() -> None:
    names = [f"s{i}" for i in range(3000)]
    kept = [
        subject_splits.assign_split_of_bin(n) for n in subject_splits.compute_bins(names, seed=3)
    ]
    assert kept == [
        subject_splits.assign_split(subject_splits.hash_subject(name, 3)) for name in names
    ]
    assert (
        subject_splits.hash_subject("a")
        == int.from_bytes(sha256(b"0|a").digest()[:8], "big") / 2**64
    )
