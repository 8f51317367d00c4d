"""Codes and dates as written, and what they are read as."""

from __future__ import annotations

import csv
from datetime import date, timedelta
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import SAMPLES, needs_sample

from bitimely_core.claims import codebook, codes, dates
from bitimely_core.errors import Reason

MAP = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("25000", "250.00"),
        (" 250.00 ", "250.00"),
        ("'250.0'", "250.0"),
        ('"250"', "250"),
        ("250.", "250"),
        ("v5867", "V58.67"),
        ("V58", "V58"),
        ("V5", None),
        ("E8889", "E888.9"),
        ("e888", "E888"),
        ("8.5", "008.5"),
        ("38.9", "038.9"),
        ("0085", "008.5"),
        ("4 28.0", "428.0"),
        ("428..", "428"),
        ("0.5", "000.5"),
    ],
)
def test_icd9_spellings(raw: str, code: str | None) -> None:
    assert codes.normalise_code(raw, "icd9")[0] == code
    assert codes.normalise_code(raw, "icd9cm")[0] == code


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        *(
            (raw, "missing")
            for raw in (
                None,
                "",
                "  ",
                "na",
                "N/A",
                "NaN",
                "null",
                "None",
                "-",
                "unk",
                "Unknown",
                "OTHER",
            )
        ),
        *((raw, "ambiguous_short") for raw in ("8", "85", "8.")),
        *(
            (raw, "bad_format")
            for raw in (
                ".",
                "..",
                "25.0.0",
                "E11.9",
                "XX000",
                "2.5E+02",
                "E888.95",
                "428000",
                "1234.5",
                "٤٢٨",
                "250,0",
                "?",
            )
        ),
    ],
)
def test_icd9_refusals(raw: str | None, fault: str) -> None:
    assert codes.normalise_code(raw, "icd9") == (None, fault)


def test_short_numbers_are_padded_on_request_alone() -> None:
    assert codes.normalise_code("8", "icd9", pad_undotted=True) == ("008", None)
    assert codes.normalise_code("85", "icd9", pad_undotted=True) == ("085", None)
    assert codes.normalise_code("", "icd9", pad_undotted=True) == (None, "missing")


@pytest.mark.parametrize(
    ("raw", "code", "fault"),
    [
        ("E119", "E11.9", None),
        ("e11.9", "E11.9", None),
        ("I10", "I10", None),
        ("C7A.010", "C7A.010", None),
        ("S72.001A", "S72.001A", None),
        ("I 50.9 ", "I50.9", None),
        ("J44-9", "J44.9", None),
        ("N/A", None, "missing"),
        ("--", None, "missing"),
        (None, None, "missing"),
        ("428.0", None, "bad_format"),
        ("I5", None, "bad_format"),
        ("S72.001AB", None, "bad_format"),
        ("IX0", None, "bad_format"),
    ],
)
def test_icd10(raw: str | None, code: str | None, fault: str | None) -> None:
    assert (
        codes.normalise_code(raw, "icd10") == codes.normalise_code(raw, "icd10cm") == (code, fault)
    )


@needs_sample(MAP)
def test_every_code_of_the_map_is_a_fixed_point_and_survives_the_loss_of_its_dot() -> None:
    with MAP.open() as stream:
        every = [row["code"] for row in csv.DictReader(stream)]
    assert len(every) == 13707
    for code in every:
        for spelling in (code, code.replace(".", ""), f" {code.lower()}  "):
            assert codes.normalise_code(spelling, "icd9") == (code, None)


@given(st.text(alphabet="0123456789.EV -x", max_size=8), st.sampled_from(["icd9", "icd10"]))
def test_reading_twice_changes_nothing(raw: str, vocab: str) -> None:
    code, fault = codes.normalise_code(raw, vocab)
    assert (code is None) != (fault is None)
    if code is not None:
        assert codes.normalise_code(code, vocab) == (code, None)


def test_lookup_steps() -> None:
    table = {
        "496": ("496",),
        "401.9": ("401.1",),
        "414": ("411",),
        "E10.3": ("250.1",),
        "250": ("250",),
        "250.0": ("250.x",),
    }
    assert codes.find_phecodes("496", table) == (("496",), "exact")
    assert codes.find_phecodes("496.0", table) == (("496",), "trailing_zero")
    assert codes.find_phecodes("401.90", table) == (("401.1",), "trailing_zero")
    # not yet the category
    assert codes.find_phecodes("250.00", table) == (("250.x",), "trailing_zero")
    assert codes.find_phecodes("414.9", table) == (("411",), "parent")
    assert codes.find_phecodes("E10.3491", table) == (("250.1",), "parent")
    assert codes.find_phecodes("4149", table) == ((), "unmapped")
    assert codes.find_phecodes("500.1", table) == ((), "unmapped")
    assert codes.find_phecodes("496.0", table, ["exact", "parent"]) == (("496",), "parent")
    assert codes.find_phecodes("496.0", table, ["exact"]) == ((), "unmapped")
    assert codes.find_phecodes("496", table, ["parent"]) == ((), "unmapped")


def test_the_exact_vocabulary_chooses_where_the_map_has_both() -> None:
    both = {"icd10": {"A00": ("1",)}, "icd10cm": {"A00": ("2",)}, "icd9": {}}
    assert [codes.choose_table(both, vocab).get("A00") for vocab in ("icd10", "icd10cm")] == [
        ("1",),
        ("2",),
    ]
    assert codes.choose_table({"icd10cm": both["icd10cm"]}, "icd10") == both["icd10cm"]
    assert codes.choose_table({"icd9": both["icd10"]}, "icd9cm") == both["icd10"]
    assert codes.choose_table({"icd9": both["icd10"]}, "icd10") == {}


def test_levels_and_order() -> None:
    assert [codes.roll_up_phecode("250.21", level) for level in codes.LEVELS] == [
        "250",
        "250.2",
        "250.21",
    ]
    assert [codes.roll_up_phecode("008", level) for level in codes.LEVELS] == ["008"] * 3
    assert [codes.roll_up_phecode("ID_001.11", level) for level in codes.LEVELS] == [
        "ID_001",
        "ID_001.1",
        "ID_001.11",
    ]
    assert sorted(
        ["1000", "250.2", "ID_001", "008", "250", "CV_404.1", "250.20"], key=codes.phecode_sort_key
    ) == (["008", "250", "250.2", "250.20", "1000", "CV_404.1", "ID_001"])


@pytest.mark.parametrize(
    ("raw", "vocab", "reason"),
    [
        ("", "icd9", Reason.EMPTY_CODE),
        ("...", "icd9", Reason.EMPTY_CODE),
        (None, "icd10", Reason.EMPTY_CODE),
        ("85", "icd9", Reason.AMBIGUOUS_CODE),
        ("2.5E+02", "icd9", Reason.AMBIGUOUS_CODE),
        ("E11.9", "icd9", Reason.WRONG_VOCABULARY),
        ("428.0", "icd10", Reason.WRONG_VOCABULARY),
        ("25.0.0", "icd9", Reason.BAD_CODE),
        ("XX000", "icd9", Reason.BAD_CODE),
    ],
)
def test_reasons_of_the_report(raw: str | None, vocab: str, reason: Reason) -> None:
    fault = codes.normalise_code(raw, vocab)[1]
    assert fault is not None
    assert codes.classify_fault(raw, vocab, fault) == reason


def test_icd9_external_causes() -> None:
    assert not any(
        codes.is_foreign_code(code, "icd9")
        for code in ("E000", "E030.1", "E800", "E888.9", "E999", "250", "V58")
    )
    assert all(codes.is_foreign_code(code, "icd9cm") for code in ("E119", "E031", "E799.9"))
    assert not codes.is_foreign_code("E11.9", "icd10")


def test_codebook_reads_each_spelling_once_and_merges_them() -> None:
    book = codebook.Codebook({"icd9": {"250.00": ("250.2",)}}, strict=True)
    places = [book.read("icd9", raw).position for raw in ("25000", "250.00", " 250.00")]
    assert places == [0, 0, 0]
    assert book.codes == [codes.IcdCode("icd9", "250.00", ("250.2",), "exact")]
    assert book.codes[0].text == "ICD9//250.00"
    assert book.read("icd9", "E119") == codebook.CodeReading(
        -1, codes.RowFault("unmapped", Reason.WRONG_VOCABULARY)
    )
    assert len(book.codes) == 1


# --- dates


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("1970-01-01", 0),
        ("19700102", 1),
        (" 1970-1-3 ", 2),
        ("1970-02", 31),
        ("1970-2", 31),
        ("2000-02-29T23:59:59Z", 11016),
        ("2000-02-29 23:59:59 EST", 11016),
        ("2000-02-29 23:59 Europe/Paris", 11016),
        ("1969-12-31 00:00", -1),
        *(
            (text, None)
            for text in (
                None,
                "",
                "2001-02-29",
                "2001-13",
                "0000-01-01",
                "700101",
                "20010230",
                "2001/01/01",
                "01-02-2001",
            )
        ),
        *(
            (text, None)
            for text in (
                "20010101 10:00",
                "200101011",
                "٢٠٠١-٠١-٠١",
                "2001-001-01",
                "2001-01-01-"[:9] + "x",
                "36526",
                "1.5",
            )
        ),
    ],
)
def test_dates(text: str | None, day: int | None) -> None:
    assert dates.parse_day(text) == day


def test_a_form_and_the_century_of_an_anchor() -> None:
    form = "%m/%d/%y %H:%M"
    assert dates.parse_day(" 2/24/96 14:38 ", form, 2190) == dates.to_day(date(2196, 2, 24))
    assert dates.parse_day("2/24/96 14:38", form, 2201) == dates.to_day(date(2196, 2, 24))
    assert dates.parse_day("1/1/02 00:00", form, 2198) == dates.to_day(date(2202, 1, 1))
    assert dates.parse_day("2/29/00 00:00", form, 2201) is None  # 2200 is no leap year
    assert dates.parse_day("2196-02-24", form) is None


def test_columns_of_dates() -> None:
    texts = pl.Series("date", ["19700102", None, "x", "19700102"])
    assert dates.parse_days(texts).to_list() == [1, None, None, 1]
    assert dates.parse_days(pl.Series("date", [None, None])).to_list() == [None, None]
    assert dates.parse_days(pl.Series("date", [None, None], dtype=pl.String)).to_list() == [
        None,
        None,
    ]
    assert dates.parse_days(pl.Series("date", [date(1970, 1, 2), None])).to_list() == [1, None]
    for kind in (pl.String, pl.Null, pl.Date):
        assert dates.parse_days(pl.Series("date", [], dtype=kind)).dtype == pl.Int32
    for wrong in (
        pl.Series("date", [20010101]),
        pl.Series("date", [date(2001, 1, 1)]).cast(pl.Datetime),
    ):
        with pytest.raises(ValueError, match="expected text or dates"):
            dates.parse_days(wrong)


def test_birthdays() -> None:
    born = dates.to_day(date(1960, 2, 29))
    assert dates.format_day(dates.find_birthday(born, 40)) == "2000-02-29"
    assert dates.format_day(dates.find_birthday(born, 41)) == "2001-03-01"
    assert dates.find_birthday(born, 9000) == dates.LATEST


@given(st.integers(0, 60000))
def test_age_months_are_exact(days: int) -> None:
    assert dates.to_age_months(np.array([days])).item() == round(Fraction(days, 30))
    assert (
        dates.to_completed_months(np.array([days])).item()
        == Fraction(days) / Fraction("30.4375") // 1
    )


@given(st.dates(date(1850, 1, 1), date(2300, 1, 1)), st.integers(0, 4000))
def test_calendar_months(start: date, days: int) -> None:
    later = start + timedelta(days=days)
    first, last = dates.to_calendar_months(
        np.array([dates.to_day(start), dates.to_day(later)], np.int32)
    )
    assert last - first == 12 * (later.year - start.year) + later.month - start.month
