"""Strict tables against Python's csv module, hand-made faults and fuzzed bytes."""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES

from bitimely_core.errors import Finding, UserError
from bitimely_core.formats import table_rows, table_text, tables
from bitimely_core.formats.tables import TableRow
from bitimely_core.formats.text import decode_table, use_encoding

FUZZ = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

GOOD = "id,x,y\na1,1,2\na2,3,4\na3,5,6\n"


def write_table(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_table(path: Path, *arguments: Any, **options: Any) -> tuple[list[TableRow], list[Finding]]:
    """The rows and the findings."""
    items = list(tables.read_rows(path, *arguments, **options))
    return [item for item in items if isinstance(item, TableRow)], [
        item for item in items if isinstance(item, Finding)
    ]


def read_error(path: Path, *arguments: Any, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        list(tables.read_rows(path, *arguments, **options))
    assert path.name in str(caught.value)
    return caught.value


def list_codes(findings: list[Finding]) -> list[tuple[str, int | None]]:
    return [(str(finding.code), finding.row) for finding in findings]


# --- real files


@pytest.mark.parametrize(
    "name",
    [
        "esr/data.csv",
        "ptb-xl/ptbxl_database.csv",
        "ptb-xl/scp_statements.csv",
        "bidmc/bidmc_csv/bidmc_01_Breaths.csv",
        "de-synpuf/*.csv",
    ],
)
def test_real_tables_read_as_pythons_csv_module_reads_them(name: str) -> None:
    files = sorted(SAMPLES.glob(name))
    if not files:
        pytest.skip(f"real sample {name} is not there: set BITIMELY_TEST_DATA")
    for path in files[:3]:
        with path.open(newline="", encoding="utf-8") as file:
            header, *body = csv.reader(file, strict=True)
        rows, findings = read_table(path)
        assert findings == []
        assert tables.read_names(path) == tuple(name.strip() for name in header)
        assert [list(row.cells) for row in rows] == body


# --- valid, in other words


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.rstrip("\n"),
        GOOD.replace("\n", "\n\n"),
        '"id","x","y"\n'
        + "".join(f'"{i}","{x}","{y}"\n' for i, x, y in (("a1", 1, 2), ("a2", 3, 4), ("a3", 5, 6))),
        GOOD.replace("id,x,y", "id , x, y"),
        gzip.compress(GOOD.encode(), mtime=0),
        gzip.compress(GOOD[:10].encode(), mtime=0) + gzip.compress(GOOD[10:].encode(), mtime=0),
    ],
)
def test_spellings_of_one_table(tmp_path: Path, content: str | bytes) -> None:
    path = write_table(tmp_path, content)
    rows, findings = read_table(path)
    assert findings == []
    assert [row.cells for row in rows] == [("a1", "1", "2"), ("a2", "3", "4"), ("a3", "5", "6")]
    assert [row.cells for row in read_table(path, ["y", "id"], key=["id"])[0]] == [
        ("2", "a1"),
        ("4", "a2"),
        ("6", "a3"),
    ]
    assert tables.read_types(path) == {"id": "text", "x": "text", "y": "text"}


def test_cells_are_text(tmp_path: Path) -> None:
    rows, _ = read_table(write_table(tmp_path, 'id,x\n000123,NA\n123,\n  7 ,"a ""b"", c\r\nd"\n'))
    assert [row.cells for row in rows] == [("000123", "NA"), ("123", ""), ("  7 ", 'a "b", c\nd')]
    assert [row.row for row in rows] == [2, 3, 4]
    assert read_table(write_table(tmp_path, "a;b\n1;2\n"), delimiter=";")[0] == [
        TableRow(2, ("1", "2"))
    ]


@pytest.mark.slow
@FUZZ
@given(
    table=st.lists(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6),
            min_size=3,
            max_size=3,
        ),
        max_size=8,
    )
)
def test_what_csv_writes_is_read_back(tmp_path: Path, table: list[list[str]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([["a", "b", "c"], *table])
    rows, findings = read_table(write_table(tmp_path, out.getvalue()))
    assert findings == []
    assert [list(row.cells) for row in rows] == table


@pytest.mark.parametrize(
    "line",
    [
        "(240 rows affected)",  # sqlcmd
        "(1 Zeile betroffen)",
        "(2 lignes affectées)",
        "(2 rows)",  # psql
        "1,240 rows selected.",  # Oracle
        "  2 record(s) selected.",  # Db2
        "Fetched: 2 row(s)",  # Hive
        "2 rows in set (0.01 sec)",  # MySQL
    ],
)
@pytest.mark.parametrize("above", ["", "\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_number_of_rows_below_a_table_is_no_row(
    tmp_path: Path, line: str, above: str, end: str
) -> None:
    rows, findings = read_table(write_table(tmp_path, GOOD + above + line + end))
    assert (rows, findings) == read_table(write_table(tmp_path, GOOD))


@pytest.mark.parametrize("rule", ["--,----------,---", "-------, --------- ,--"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_rule_of_dashes_below_the_names_is_no_row(tmp_path: Path, rule: str, end: str) -> None:
    names, *lines = GOOD.splitlines()
    rows, findings = read_table(write_table(tmp_path, end.join([names, rule, *lines, ""])))
    good, _ = read_table(write_table(tmp_path, GOOD))
    assert findings == []
    assert [row.cells for row in rows] == [row.cells for row in good]
    assert [row.row for row in rows] == [row.row + 1 for row in good]


# --- faults


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("a2,3", "row_width"),
        ("a2,3,4,", "row_width"),
        ('a2,"3,4', "csv_syntax"),
        ('a2,"3"x,4', "csv_syntax"),
        ('a2,3"5,4', "csv_syntax"),
        ('"a2,3,4', "csv_syntax"),
        ('a2,3,4"', "csv_syntax"),
        ("a2,3,\0", "csv_syntax"),
    ],
)
def test_a_faulty_line_takes_no_other_with_it(tmp_path: Path, line: str, code: str) -> None:
    for content in (
        GOOD.replace("a2,3,4", line),
        GOOD.replace("a2,3,4", line).replace("a3,5,6", '"a3","5","6"'),
    ):
        rows, findings = read_table(write_table(tmp_path, content))
        assert [row.row for row in rows] == [2, 4]
        assert list_codes(findings) == [(code, 3)]
        assert "a2" not in findings[0].message


def test_an_open_quote_far_from_the_next_one(tmp_path: Path) -> None:
    lines = [f"a{i},{i},{i}" for i in range(2000)]
    lines[100] = 'a100,"100,100'
    lines[1500] = '"a1500",1500,"1500"'
    rows, findings = read_table(write_table(tmp_path, "\n".join(["id,x,y", *lines])))
    assert list_codes(findings) == [("csv_syntax", 102)]
    assert len(rows) == 1999


MIXED = b"id,x,y\na1,\xc3\xa4,2\na2,\xe4,4\n"
ENCODED = "id,x,y\na1,Qu\u00e9bec,2\na2,\u0141\u00f3d\u017a,4\n"


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_that_are_no_utf8_refuse_the_table_by_byte_and_row(
    tmp_path: Path, packed: bool
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(gzip.compress(MIXED) if packed else MIXED)
    offset = MIXED.index(b"\xe4")
    for read in (
        lambda: read_table(path, ["id", "y"]),
        lambda: read_frames_as_rows(path, ["id", "y"]),
        lambda: list(tables.split_table(path, 1)) and read_table(path),
    ):
        with pytest.raises(UserError) as caught:
            read()
        line = caught.value.finding.line()
        assert (caught.value.code, caught.value.row) == ("encoding", 3)
        assert f"byte {offset} in row 3" in line
        assert "table.csv" in line
        assert "--encoding" in line


@pytest.mark.parametrize(
    "name",
    [
        "utf-8",
        "utf-8-sig",
        "utf-16",
        "utf-16-le",
        "utf-16-be",
        "utf-32",
        "cp1250",
        "iso8859-2",
        "gb18030",
    ],
)
def test_the_same_cells_from_every_encoding(tmp_path: Path, name: str) -> None:
    expected = [("a1", "Qu\u00e9bec", "2"), ("a2", "\u0141\u00f3d\u017a", "4")]
    path = tmp_path / "table.csv"
    stated = None if name in {"utf-8", "utf-8-sig", "utf-16"} else name
    for line_end in ("\n", "\r\n", "\r"):
        content = ENCODED.replace("\n", line_end).encode(name)
        for data in (content, gzip.compress(content)):
            path.write_bytes(data)
            with use_encoding(stated):
                rows, findings = read_table(path, ["id", "x", "y"])
                frames, faults = read_frames_as_rows(path, ["id", "x", "y"])
            assert [row.cells for row in rows] == [row.cells for row in frames] == expected
            assert [row.row for row in rows] == [row.row for row in frames] == [2, 3]
            assert not findings
            assert not faults
            assert decode_in(content, stated).split(line_end)[1] == "a1,Qu\u00e9bec,2"


def decode_in(content: bytes, name: str | None) -> str:
    with use_encoding(name):
        return decode_table(content)


def test_a_byte_order_mark_outranks_the_stated_encoding(tmp_path: Path) -> None:
    for name in ("utf-8-sig", "utf-16"):
        path = write_table(tmp_path, ENCODED.encode(name))
        with use_encoding("latin-1"):
            assert read_table(path, ["x"])[0][0].cells == ("Qu\u00e9bec",)


@pytest.mark.parametrize(
    "content", [ENCODED.encode("utf-16-le"), ENCODED.encode("utf-16-be"), ENCODED.encode("utf-32")]
)
def test_wide_characters_without_a_usable_mark_are_named(tmp_path: Path, content: bytes) -> None:
    error = read_error(write_table(tmp_path, content))
    assert error.code == "encoding"
    assert "UTF-16" in str(error) or "UTF-32" in str(error)
    assert "--encoding" in str(error)


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "utf-32"])
def test_the_encoding_that_is_advised_reads_the_table_and_plain_ones(
    tmp_path: Path, name: str
) -> None:
    """A map in ASCII lies beside claims of Windows."""
    path = write_table(tmp_path, ENCODED.encode(name))
    advised = str(read_error(path)).rpartition("--encoding ")[2].strip(".")
    assert advised == name
    with use_encoding(advised):
        assert read_table(path, ["x"])[0][0].cells == ("Qu\u00e9bec",)
        assert read_table(write_table(tmp_path, b"id,x\na,b\n"), ["x"])[0][0].cells == ("b",)


def test_damaged_text_of_a_stated_encoding_is_refused_by_its_byte(tmp_path: Path) -> None:
    path = write_table(tmp_path, ENCODED.encode("utf-16")[:-1])
    assert f"byte {len(ENCODED.encode('utf-16')) - 2}" in str(read_error(path))
    path = write_table(tmp_path, b"id,x\na,\x81\n")
    with use_encoding("cp1252"):
        assert "byte 7" in str(read_error(path))


@pytest.mark.parametrize(
    "name", ["rot13", "hex", "no-such", "unicode_escape", "idna", "utf-7", "a\0b"]
)
def test_what_is_no_encoding_of_texts_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        use_encoding(name).__enter__()
    assert caught.value.exit_code == 2
    assert "--encoding" in str(caught.value)


def test_a_last_line_that_was_cut(tmp_path: Path) -> None:
    rows, findings = read_table(write_table(tmp_path, GOOD[:-3]))
    assert list_codes(findings) == [("truncated", 4)]
    assert len(rows) == 2


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write_table(tmp_path, GOOD)
    schema = read_error(path, ["id", "x", "z"])
    assert (str(schema.code), schema.field) == ("schema", "z")
    assert "'x'" in schema.finding.message
    header = read_error(write_table(tmp_path, "a0,7,8\n" + GOOD.split("\n", 1)[1]), ["id", "x"])
    assert str(header.code) == "header"
    assert "a0" not in header.finding.message
    assert read_error(write_table(tmp_path, "id,x,x\n1,2,3\n"), ["x"]).code == "header"
    assert read_table(write_table(tmp_path, "id,x,x\n1,2,3\n"), ["id"])[0] == [TableRow(2, ("1",))]
    assert read_error(write_table(tmp_path, 'id,"x\n1,2\n')).code == "csv_syntax"
    assert read_error(write_table(tmp_path, "")).code == "empty_file"
    assert read_error(write_table(tmp_path, "\n \n")).code == "empty_file"


def test_records_are_identified_by_their_key(tmp_path: Path) -> None:
    more = "".join(f"b{i},0,0\n" for i in range(6))
    path = write_table(tmp_path, GOOD + more + "a1,1,2\na2,3,9\n,1,1\n")
    rows, findings = read_table(path, ["x", "y"], key=["id"])
    assert list_codes(findings) == [
        ("duplicate_key", 3),
        ("duplicates", 11),
        ("duplicate_key", 12),
        ("identifier", 13),
    ]
    assert [finding.level for finding in findings] == ["error", "warning", "error", "error"]
    assert [row.row for row in rows] == [2, 4, *range(5, 11)]
    assert not any(name in finding.message for finding in findings for name in ("a1", "a2"))
    assert len(read_table(path)[0]) == 12
    swapped = write_table(tmp_path, "id,x,y\n1,5,a1\n1,6,a2\n2,7,a3\n2,8,a4\n3,9,a5\n")
    assert read_error(swapped, key=["id"]).code == "identifier"


def test_gzip_that_is_cut_or_damaged_is_no_table(tmp_path: Path) -> None:
    packed = gzip.compress(
        ("id,x,y\n" + "".join(f"a{i},{i * 7919 % 1000},{i}\n" for i in range(5000))).encode()
    )
    path = write_table(tmp_path, packed[: len(packed) * 7 // 10], "t.csv.gz")
    assert read_error(path).code == "truncated"
    flipped = bytearray(packed)
    flipped[-6] ^= 1  # the checksum of the stream
    assert read_error(write_table(tmp_path, bytes(flipped), "t.csv.gz")).code == "corrupt"
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    assert read_error(write_table(tmp_path, bytes(flipped), "t.csv.gz")).code in {
        "corrupt",
        "truncated",
    }
    with pytest.raises(UserError):
        read_frames_as_rows(path, ["id"])


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_text, "MAX_EXPANDED", 10_000)
    assert (
        read_error(
            write_table(
                tmp_path, gzip.compress(b"id,x,y\n" + b"1,2,3\n" * 100_000, mtime=0), "t.csv.gz"
            )
        ).code
        == "expansion_limit"
    )
    monkeypatch.setattr(table_text, "MAX_LINE", 1000)
    assert read_error(write_table(tmp_path, "id,x,y\n" + "1" * 2000)).code == "resource_limit"
    monkeypatch.setattr(table_rows, "MAX_LINES", 3)
    rows, findings = read_table(write_table(tmp_path, 'id,x\n1,"a\nb\nc"\n2,"a\nb\nc\nd"\n'))
    assert [row.row for row in rows] == [2]
    assert list_codes(findings)[0] == ("csv_syntax", 5)


def test_the_limit_of_a_line_is_none_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_text, "MAX_LINE", 100)
    monkeypatch.setattr(table_text, "BLOCK", 64)
    path = write_table(
        tmp_path, text := "id,x\n" + "".join(f"{i},{'y' * (i % 40)}\n" for i in range(300))
    )
    blocks = list(table_text.read_blocks(path))
    assert b"".join(block for block, _ in blocks) == text.encode()
    # complete lines, a block and the rest of one before
    assert all(block.endswith(b"\n") and len(block) <= 164 for block, _ in blocks)
    assert [last for _, last in blocks] == [False] * (len(blocks) - 1) + [True]


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("id,x\n" + "".join(f"{i},{'y' * (i % 40)}\n" for i in range(300)), True),
        ("\ufeffid,x\r\n" + "".join(f'"{i}","{i % 7},"\r\n' for i in range(300)) + "last,1", True),
        ("id,x\n" + "".join(f'{i},"a\n{i},b"\n' for i in range(100)), False),
        ("\n\nid,x\n" + "1,2\n" * 200, False),
        ("id,x\n" + "1,2\n" * 100 + '3,"4\n5,6"\n' + "7,8\n" * 100, True),
        ("id,x\n", False),
    ],
)
def test_spans_of_a_table_are_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, several: bool
) -> None:
    monkeypatch.setattr(table_text, "BLOCK", 100)
    path = write_table(tmp_path, text)
    for name, spans in ((path, tables.split_table(path, 300)), (pack(path), [None])):
        assert tables.split_table(name, 300) == spans
        parts = [
            block.frame
            for span in spans
            for block in tables.read_frames(name, ["x", "id"], span=span)
        ]
        expected = pl.concat([block.frame for block in tables.read_frames(path, ["x", "id"])])
        assert pl.concat(parts).equals(expected)
        assert name != path or (len(spans) > 1) == several


def pack(path: Path) -> Path:
    """The file, packed with gzip."""
    packed = path.with_name("packed.csv.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    return packed


def test_spans_of_parquet_are_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": [str(i) for i in range(100)]}), path, row_group_size=9)
    spans = tables.split_table(path, 200)
    assert len(spans) > 3
    parts = [block.frame for span in spans for block in tables.read_frames(path, ["id"], span=span)]
    assert pl.concat(parts).rows() == [(i + 1, str(i)) for i in range(100)]


# --- Parquet


def test_parquet_is_text_too(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table(
        {
            "id": ["000123", "123", None],
            " code": [250.0, 38.9, None],
            "n": pa.array([1, None, 3], pa.int32()),
        }
    )
    pq.write_table(table, path, row_group_size=2)
    assert tables.read_types(path) == {"id": "text", "code": "double", "n": "int32"}
    rows, findings = read_table(path, ["n", "id"])
    assert (findings, [row.cells for row in rows]) == (
        [],
        [("1", "000123"), ("", "123"), ("3", "")],
    )
    assert list_codes(read_table(path, key=["id"])[1]) == [("identifier", 3)]
    assert read_error(path, ["id", "date"]).code == "schema"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    assert read_error(path).code == "corrupt"
    path.write_bytes(b"")
    assert read_error(path).code == "corrupt"


# --- cells


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        (" -2.5e3 ", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("", None),
        ("  ", None),
        ("007", 7.0),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert tables.parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("5.0", 5), ("-3.", -3), ("", None), (" 15709.0 ", 15709)]
)
def test_integers(text: str, value: int | None) -> None:
    assert tables.parse_integer(text) == value


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("n/a", "not_numeric"),
        ("1_0", "not_numeric"),
        ("1,5", "not_numeric"),
        ("٣", "not_numeric"),
        ("NaN", "non_finite"),
        ("-inf", "non_finite"),
        ("1e400", "non_finite"),
    ],
)
def test_what_is_no_number(text: str, code: str) -> None:
    for convert in (tables.parse_number, tables.parse_integer):
        with pytest.raises(UserError) as caught:
            convert(text)
        assert caught.value.code in {code, "not_numeric"}
        assert text not in str(caught.value)
    finding = tables.parse_numbers(TableRow(6, ("1", text, "3")), ["a", "b", "c"])
    assert isinstance(finding, Finding)
    assert (str(finding.code), finding.row, finding.field) == (code, 6, "b")
    assert "row 6" in finding.message


def test_rows_of_numbers() -> None:
    values = tables.parse_numbers(TableRow(2, ("1", " 2.5", "-3e0")), ["a", "b", "c"])
    assert isinstance(values, np.ndarray)
    assert values.tolist() == [1.0, 2.5, -3.0]
    empty = tables.parse_numbers(TableRow(2, ("1", "", "3")), ["a", "b", "c"])
    assert isinstance(empty, Finding)
    assert (str(empty.code), empty.field) == ("missing_values", "b")


# --- frames


def read_frames_as_rows(
    path: Path, columns: list[str], **options: Any
) -> tuple[list[TableRow], list[tuple[str, int | None]]]:
    """What `frames` gives, in the form of `rows`."""
    blocks = list(tables.read_frames(path, columns, **options))
    kept = [
        TableRow(row, tuple(cell or "" for cell in cells))
        for block in blocks
        for row, *cells in block.frame.iter_rows()
    ]
    assert all(block.frame.columns == ["row", *columns] for block in blocks)
    return kept, list_codes([fault for block in blocks for fault in block.faults])


def scan_cells(text: str) -> list[str] | str:
    """The cells of a row character by character; "open" or "broken" for a text that is none."""
    cells, state = [""], "start"
    for i, character in enumerate(text):
        is_quote, is_mark = character == '"', character == ","
        if character == "\0" or (is_quote and state == "plain"):
            return "broken"
        if state == "quoted":
            is_doubled = is_quote and text[i + 1 : i + 2] == '"'
            state = "doubled" if is_doubled else "closed" if is_quote else "quoted"
            cells[-1] += "" if is_quote else character
        elif state == "doubled":
            state = "quoted"
            cells[-1] += character
        elif is_mark:
            cells.append("")
            state = "start"
        elif state == "closed":
            return "broken"
        else:
            state = "quoted" if is_quote else "plain"
            cells[-1] += "" if is_quote else character
    return "open" if state == "quoted" else cells


def scan_rows(body: str, before: int) -> tuple[list[TableRow], list[tuple[str, int | None]]]:
    """Rows of three cells and faults of a text, by the definition."""
    lines = body.replace("\r\n", "\n").removesuffix("\r").split("\n")
    rows, faults, i = [], [], 0
    while i < len(lines):
        texts = ("\n".join(lines[i:end]) for end in range(i + 1, len(lines) + 1))
        text, cells = next(
            ((text, cells) for text in texts if (cells := scan_cells(text)) != "open"), ("", "open")
        )
        height = text.count("\n") + 1
        if not lines[i].strip(" \t\r\f\v"):
            height = 1
        elif isinstance(cells, list) and len(cells) == 3:
            rows.append(TableRow(before + i + 1, tuple(cells)))
        elif isinstance(cells, list) and height == 1:
            faults.append(("row_width" if i < len(lines) - 1 else "truncated", before + i + 1))
        else:
            faults.append(("csv_syntax", before + i + 1))
            height = 1
        i += height
    return rows, faults


PIECES = [
    "a",
    "1",
    " ",
    "ä",
    ",",
    ",",
    "\n",
    "\n",
    "\r\n",
    "\r",
    '"',
    '""',
    "\0",
    '"x"',
    '"x,y"',
    '"x\ny"',
    "a,b,c\n",
    "d,e,f\n",
    '"q","r","s"\n',
]


@pytest.mark.slow
@FUZZ
@given(
    body=st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    block=st.sampled_from([8, 64, 1 << 20]),
    piece=st.sampled_from([4, 16, 1 << 16]),
    head=st.sampled_from(["", "\ufeff", "\n", "\r\n\n"]),
)
def test_rows_and_frames_are_those_of_the_definition(
    tmp_path: Path, body: str, block: int, piece: int, head: str
) -> None:
    path = write_table(tmp_path, head + "x,y,z\n" + body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_text, "BLOCK", block)
        patch.setattr(table_rows, "PIECE", piece)
        rows, findings = read_table(path)
        assert (rows, list_codes(findings)) == scan_rows(body, head.count("\n") + 1)
        chosen = [TableRow(number, cells[::-2]) for number, cells in rows]
        assert read_frames_as_rows(path, ["z", "x"]) == (chosen, list_codes(findings))


@pytest.mark.parametrize("line", [None, '7,"a\nb",7', '7,"a""b",7', "", '7,"a,b",7'])
def test_one_faulty_line_among_many(tmp_path: Path, line: str | None) -> None:
    lines = [f"{i},{i * i},x{i}" for i in range(20_000)]
    if line is not None:
        lines[10_000:10_000] = [line]
    path = write_table(tmp_path, "a,b,c\n" + "\n".join(lines) + "\n")
    rows, _ = read_table(path, ["c", "a"])
    assert read_frames_as_rows(path, ["c", "a"]) == (rows, [])
    assert len(rows) == 20_000 + bool(line)


def test_an_open_quote_swallows_nothing_in_frames(tmp_path: Path) -> None:
    lines = [f"{i},{i * i},x{i}" for i in range(20_000)]
    lines[5_000] = '5000,"open,x'
    lines[9_000] = 'close",9000,x'
    rows, faults = read_frames_as_rows(write_table(tmp_path, "a,b,c\n" + "\n".join(lines)), ["a"])
    assert faults == [("csv_syntax", 5_002), ("csv_syntax", 9_002)]
    assert len(rows) == 19_998


def test_tabs_without_quotes(tmp_path: Path) -> None:
    path = write_table(tmp_path, 'id\tname\n1\t"5" wide\n2\t"\n3\n\n')
    assert read_frames_as_rows(path, ["name", "id"], delimiter="\t", quotes=False) == (
        [TableRow(2, ('"5" wide', "1")), TableRow(3, ('"', "2"))],
        [("row_width", 4)],
    )
    path = write_table(tmp_path, 'id\tname\n1\t"5" wide\n2\t"\n')
    assert read_frames_as_rows(path, ["name"], delimiter="\t", quotes=False) == (
        [TableRow(2, ('"5" wide',)), TableRow(3, ('"',))],
        [],
    )


def test_an_archive_of_one_table_is_read_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.csv", GOOD)
    assert read_frames_as_rows(path, ["y", "id"]) == (
        [TableRow(2, ("2", "a1")), TableRow(3, ("4", "a2")), TableRow(4, ("6", "a3"))],
        [],
    )
    content = path.read_bytes()
    path.write_bytes(content[:60])
    assert read_error(path).code == "corrupt"
    path.write_bytes(content)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("second.csv", GOOD)
    assert read_error(path).code == "unsupported_format"


def test_frames_of_packed_texts_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(b"a,b\n" + b"0,0\n" * 100_000, mtime=0)
    path = write_table(tmp_path, packed, "t.csv.gz")
    assert len(read_frames_as_rows(path, ["b"])[0]) == 100_000
    monkeypatch.setattr(table_text, "MAX_EXPANDED", 1000)
    monkeypatch.setattr(table_text, "MAX_RATIO", 2)
    with pytest.raises(UserError) as caught:
        read_frames_as_rows(path, ["b"])
    assert caught.value.code == "expansion_limit"
    monkeypatch.undo()
    path.write_bytes(packed[:-20])
    with pytest.raises(UserError) as caught:
        read_frames_as_rows(path, ["b"])
    assert caught.value.code == "truncated"


def test_frames_of_parquet_are_text_with_civil_times(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    # 2010-01-01 04:00 UTC
    late = pa.array([1_262_318_400_000_000, None], pa.timestamp("us", tz="America/Montreal"))
    table = pa.table(
        {
            "id": pa.array(["01", None]).dictionary_encode(),
            "at": late,
            "day": pa.array([0, 1], pa.date32()),
            "n": [7, 8],
        }
    )
    pq.write_table(table, path)
    assert tables.read_types(path)["id"] == "text"
    rows, faults = read_frames_as_rows(path, ["n", "id", "at", "day"])
    assert faults == []
    assert [
        (row.row, row.cells[0], row.cells[1], row.cells[2][:10], row.cells[3]) for row in rows
    ] == [(1, "7", "01", "2009-12-31", "1970-01-01"), (2, "8", "", "", "1970-01-02")]


# --- fuzz


@pytest.mark.slow
@FUZZ
@given(body=st.text('a1,"\n\r\0ä', max_size=60))
def test_each_line_counts_once(tmp_path: Path, body: str) -> None:
    rows, findings = read_table(write_table(tmp_path, "x,y\n" + body))
    assert all(len(row.cells) == 2 for row in rows)
    assert all(finding.row is not None and finding.row >= 2 for finding in findings)
    lines = [row.row for row in rows] + [finding.row for finding in findings]
    assert len(set(lines)) == len(lines)


@pytest.mark.slow
@FUZZ
@given(content=st.binary(max_size=200), zipped=st.booleans(), parquet=st.booleans())
def test_no_bytes_do_more_than_refuse(
    tmp_path: Path, content: bytes, zipped: bool, parquet: bool
) -> None:
    path = write_table(
        tmp_path, b"\x1f\x8b" + content if zipped else content, "t.parquet" if parquet else "t.csv"
    )
    with suppress(UserError):
        read_table(path)
