"""What ingest accepts can be tokenized and trained on; the rest is refused by file, place and
remedy.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_ptb_xl
import test_ts_datasets
import variants
from samples import BAD_INPUTS

from bitimely_cli.main import main
from bitimely_core import cache
from bitimely_core.cache import shards
from bitimely_core.cache.quality import find_constant_stretch, find_repeated_block
from bitimely_core.claims import dates
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources import read_source
from bitimely_core.errors import Finding, UserError
from bitimely_core.formats import edf, edf_header, tables, ts, wfdb
from bitimely_core.formats.source import scan_folder
from bitimely_core.formats.tables import TableRow
from bitimely_core.types import Record, Signal

CLAIMS = [
    (f"p{i:02d}", f"200{k}-0{1 + i % 9}-1{k}", code)
    for i in range(12)
    for k, code in enumerate(("428.0", "496", "250.00", "401.9"))
]
MAP = "icd9,phecode\n428.0,428.2\n496,496\n250.00,250.2\n401.9,401.1\n"


def run(*argv: str | Path) -> tuple[int, str]:
    """Exit code and messages of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(one) for one in argv])
    return code, err.getvalue()


def write_claims(folder: Path, **texts: str | bytes) -> Path:
    """A folder of claims; `texts` replace tables by name."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = sorted({row[0] for row in CLAIMS})
    whole: dict[str, str | bytes] = {
        "claims": "patient_id,date,icd9\n" + "".join(",".join(row) + "\n" for row in CLAIMS),
        "patients": "patient_id,birth_date,sex\n" + "".join(f"{one},1950-01-01,f\n" for one in ids),
        "labels": "patient_id,chf,copd\n"
        + "".join(f"{one},{i % 2},{i // 2 % 2}\n" for i, one in enumerate(ids)),
        "icd9_phecode": MAP,
        **texts,
    }
    for name, text in whole.items():
        (folder / f"{name}.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def write_epilepsy(folder: Path) -> Path:
    """A table of 12 segments of two chunks."""
    rng = np.random.default_rng(0)
    head = ",".join(["id", *(f"X{i}" for i in range(1, 179)), "y"])
    rows = [
        ",".join([f"X{c}.V1.{s}", *map(str, rng.integers(-99, 99, 178)), str(1 + s % 5)])
        for s in range(1, 13)
        for c in (1, 2)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.csv").write_text("\n".join([head, *rows, ""]))
    return folder


def ingest(
    dataset: str, folder: Path, workspace: Path, *more: str | Path
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, messages and report of an ingest."""
    claims = ["--min-codes", "1", "--no-select"] if dataset == "pophr" else []
    code, err = run("ingest", dataset, folder, *claims, "--workspace", workspace, *more)
    report = workspace / "cache" / dataset / "ingest_report.json"
    return code, err, json.loads(report.read_text()) if report.is_file() else {}


# --- encodings


GENERIC_MAP = '[[files]]\npattern = "*_rec.csv"\nrate = 50\n[table]\npath = "recordings.csv"\nfile = "recording"\nsubject = "patient"\nlabel = "label"\n'


def write_generic(folder: Path, channel: str = "l\u00e9ft", label: str = "\u00e9pilepsie") -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        text = f"{channel},b\n" + "".join(
            f"{a:.3f},{b:.3f}\n" for a, b in rng.normal(size=(600, 2))
        )
        (folder / f"{i}_rec.csv").write_text(text, "utf-8")
    rows = "".join(f"{i}_rec,s{i},{label if i % 2 else 'sain'}\n" for i in range(4))
    (folder / "recordings.csv").write_text("recording,patient,label\n" + rows, "utf-8")
    (folder.parent / "map.toml").write_text(GENERIC_MAP)
    return folder


def recode(folder: Path, name: str, encoding: str) -> None:
    for path in folder.glob(name):
        path.write_bytes(path.read_text("utf-8").encode(encoding))


TABLES = [
    ("pophr", "claims.csv"),
    pytest.param("pophr", "patients.csv", marks=pytest.mark.slow),
    pytest.param("pophr", "labels.csv", marks=pytest.mark.slow),
    ("epilepsy", "data.csv"),
    ("generic", "*_rec.csv"),
    ("generic", "recordings.csv"),
    pytest.param("ptb-xl", "ptbxl_database.csv", marks=pytest.mark.slow),
    pytest.param("ptb-xl", "scp_statements.csv", marks=pytest.mark.slow),
    pytest.param("bidmc", "bidmc_02_Signals.csv", marks=pytest.mark.slow),
    pytest.param("bidmc", "bidmc_02_Numerics.csv", marks=pytest.mark.slow),
]


def write_source(dataset: str, folder: Path) -> Path:
    """A source whose tables all hold letters beyond ASCII."""
    if dataset == "generic":
        return write_generic(folder)
    if dataset == "epilepsy":
        path = write_epilepsy(folder) / "data.csv"
        path.write_text(path.read_text().replace("id,", "identit\u00e9,", 1), "utf-8")
        return folder
    if dataset in {"ptb-xl", "bidmc"}:
        if dataset == "ptb-xl":
            test_ptb_xl.layout(folder, [test_ptb_xl.row(i) for i in range(1, 11)])
        else:
            test_ts_datasets.write_bidmc(folder)
        for path in folder.glob("*.csv"):
            if "Breaths" not in path.name:
                head, *lines = path.read_text().splitlines()
                path.write_text(
                    "\n".join([f"{head},pr\u00e9lev\u00e9", *(f"{line},1" for line in lines), ""]),
                    "utf-8",
                )
        return folder
    write_claims(folder)
    for path in folder.glob("*s.csv"):
        text = path.read_text()
        path.write_text(text.replace("p03", "p\u00e903").replace("chf", "d\u00e9pression"), "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "name"), TABLES)
def test_every_table_follows_one_rule_of_encodings(tmp_path: Path, dataset: str, name: str) -> None:
    extra = ["--map", tmp_path / "map.toml"] if dataset == "generic" else []
    hashes = {}
    for encoding, stated in (
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("utf-16", ""),
        ("latin-1", "latin-1"),
        ("latin-1", ""),
    ):
        folder = write_source(dataset, tmp_path / f"raw-{encoding}-{stated}")
        recode(folder, name if not stated else "*.csv", encoding)
        more = [*extra, *(["--encoding", stated] if stated else [])]
        code, err, report = ingest(dataset, folder, tmp_path / f"work-{encoding}-{stated}", *more)
        if encoding != "latin-1" or stated:
            assert code == 0, err
            hashes[encoding, stated] = report["content_sha256"]
            continue
        if name == "*_rec.csv":  # tables of samples, which state what was assumed
            assert code == 0
            continue
        lines = [line for line in err.splitlines() if line.startswith("error[encoding]")]
        assert code == 4
        assert all(name.lstrip("*") in line for line in lines)
        line = next(line for line in lines if "byte" in line)
        assert "row" in line
        assert "--encoding" in line
    assert len(set(hashes.values())) == 1


def test_a_recipe_states_the_encoding_of_a_data_set(tmp_path: Path) -> None:
    folder = write_source("epilepsy", tmp_path / "raw")
    recode(folder, "*.csv", "latin-1")
    recipe = tmp_path / "r.toml"
    base = f'title = "r"\n[ingest]\ndatasets = ["epilepsy"]\nsources.epilepsy = "{folder}"\n'
    for more, code in (
        ("", 4),
        ('encoding.epilepsy = "latin-1"\n', 0),
        ('encoding.epilepsy = "rot13"\n', 2),
    ):
        recipe.write_text(base + more)
        found, err = run("run", recipe, "--workspace", tmp_path / f"w{code}")
        assert found == code, err
        assert code == 0 or "encoding" in err


def test_a_stated_encoding_is_a_setting_of_the_cache(tmp_path: Path) -> None:
    folder = write_generic(tmp_path / "raw", "left", "sick")
    extra = ["--map", tmp_path / "map.toml"]
    assert ingest("generic", folder, tmp_path / "w", *extra)[0] == 0
    code, err, _ = ingest("generic", folder, tmp_path / "w", *extra, "--encoding", "latin-1")
    assert code == 2
    assert "encoding" in err
    code, err, _ = ingest("generic", folder, tmp_path / "v", *extra, "--encoding", "rot13")
    assert code == 2
    assert "rot13" in err


# --- variants of every class, at their readers


def judge(read: Callable[[], Iterable[Finding]]) -> set[str]:
    """Codes of a refusal, or of the findings with "~" before those of warnings."""
    try:
        found = list(read())
    except UserError as error:
        return {str(error.code)}
    return {
        ("" if one.level == "error" else "~") + str(one.code)
        for one in found
        if one.level != "info"
    }


def check(expected: str, found: set[str]) -> None:
    """Refused or warned about as expected; accepted without a warning where nothing is."""
    assert (expected in found) if expected else not found, (expected, found)


EDF_CASES = [
    (name, text, code)
    for table in (variants.EDF_SIGNAL, variants.EDF_FIXED)
    for name, texts in table.items()
    for text, code in texts.items()
]


@pytest.mark.parametrize(("name", "text", "code"), EDF_CASES)
def test_edf_header_fields(tmp_path: Path, name: str, text: bytes, code: str) -> None:
    channels = [
        edf_header.EdfChannel("EEG", "uV", -192.0, 192.0, -2048, 2047, 100),
        edf_header.EdfChannel("Temp", "DegC", 34.0, 40.0, -2849, 2731, 1),
    ]
    path = variants.write_edf(tmp_path / "night.edf", channels, {name: text})

    def read() -> list[Finding]:
        found = edf.read_recording(path)
        record = shards.validate_record(
            Record(recording_id="r", subject_id="s", signals=found.signals), keep_dates=False
        )
        return [*found.findings, *record.findings]

    check(code, judge(read))


def write_wfdb(
    folder: Path,
    gain: str = "1000/mV",
    rate: str = "100",
    code: str = "16",
    record: str = "",
    name: str = "I",
) -> Path:
    values = np.random.default_rng(0).integers(-900, 900, (50, 2)).astype("<i2")
    rows = [
        f"r.dat {code} {gain} 16 0 {v[0]} {int(v.sum(dtype=np.int64)) & 0xFFFF} 0 {name}"
        for v, name in zip(values.T, (name, "II"), strict=True)
    ]
    (folder / "r.hea").write_text("\n".join([record or f"r 2 {rate} 50", *rows, ""]), "utf-8")
    (folder / "r.dat").write_bytes(values.tobytes())
    return folder / "r"


@pytest.mark.parametrize(
    ("field", "text", "code"),
    [
        *(("gain", *case) for case in variants.WFDB_CALIBRATIONS.items()),
        *(("rate", *case) for case in variants.WFDB_RATES.items()),
        *(("code", *case) for case in variants.WFDB_FORMATS.items()),
        *(("record", *case) for case in variants.WFDB_RECORDS.items()),
        *(("name", *case) for case in variants.WFDB_NAMES.items()),
    ],
)
def test_wfdb_header_fields(tmp_path: Path, field: str, text: str, code: str) -> None:
    path = write_wfdb(tmp_path, **{field: text})

    def read() -> list[Finding]:
        found = wfdb.read_recording(path.name, scan_folder(path.parent, is_flat=True))
        for signal in found.signals:
            physical = (signal.samples * signal.scale + signal.offset).astype(np.float32)
            assert np.isfinite(physical**2).all()
            assert np.unique(physical).size > 10
        return found.findings

    check(code, judge(read))


def read_ts(folder: Path, *lines: str, case: str = "5,6,7,8:5,6,7,8:1") -> list[Finding]:
    cases = [
        "1,2,3,4:1,2,3,5:0",
        "2,3,4,5:1,2,3,5:1",
        "3,4,5,6:1,2,3,5:0",
        case,
        "4,5,6,7:1,2,3,5:1",
    ]
    path = folder / "P_TRAIN.ts"
    path.write_text(
        "\n".join([*variants.TS_HEADER, "@classLabel true 0 1", *lines, "@data", *cases, ""]),
        "utf-8",
    )
    header = ts.read_header(path)
    items = list(ts.read_cases(path, header))
    rows = [item.row for item in items if item.row is not None]
    assert rows == [
        len(path.read_text().split("@data\n")[0].splitlines()) + 2 + i for i in range(5)
    ]
    return [*header.findings, *(item for item in items if isinstance(item, Finding))]


@pytest.mark.parametrize(("line", "code"), variants.TS_LINES.items())
def test_ts_keys(tmp_path: Path, line: str, code: str) -> None:
    check(code, judge(lambda: read_ts(tmp_path, line)))


@pytest.mark.parametrize(("case", "code"), variants.TS_CASES.items())
def test_ts_cases(tmp_path: Path, case: str, code: str) -> None:
    check(code, judge(lambda: read_ts(tmp_path, case=case)))


@pytest.mark.parametrize(("cell", "code"), variants.CELLS.items())
def test_cells_of_tables(tmp_path: Path, cell: str, code: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"id,x\na1,1\nb2,{cell}\nc3,3\n")

    def read() -> list[Finding]:
        rows = list(tables.read_rows(path, ["id", "x"]))
        assert len(rows) == 3
        parsed = [
            row
            if isinstance(row, Finding)
            else tables.parse_numbers(TableRow(row.row, row.cells[1:]), ["x"])
            for row in rows
        ]
        found = [one for one in parsed if isinstance(one, Finding)]
        assert [one.row for one in found] == ([3] if code else [])
        return found

    check(code, judge(read))


@pytest.mark.parametrize("name", variants.TABLE_BYTES)
def test_bytes_of_tables(tmp_path: Path, name: str) -> None:
    change, code = variants.TABLE_BYTES[name]
    path = tmp_path / "t.csv"
    path.write_bytes(change(b"id,x\na1,1\nb2,2\nc3,3\n"))
    for read in (tables.read_rows, tables.read_frames):
        if code:
            with pytest.raises(UserError, match=r"t\.csv") as caught:
                list(read(path, ["x"]))
            assert str(caught.value.code) == code
            continue
        items: list[Any] = list(read(path, ["x"]))
        cells = [row.cells[0] for row in items if isinstance(row, TableRow)] or [
            x for block in items for x in block.frame["x"]
        ]
        assert cells == ["1", "2", "3"]


MOMENTS = [datetime(2001, 3, 4, 23, 30), datetime(2002, 3, 4)]
PARQUET: dict[str, tuple[pa.Array, list[str | None] | str]] = {
    "text": (pa.array(["01.1", None]), ["01.1", None]),
    "large text": (pa.array(["01.1", "x"], pa.large_string()), ["01.1", "x"]),
    "text view": (pa.array(["01.1", "x"], pa.string_view()), ["01.1", "x"]),
    "dictionary": (pa.array(["01.1", "x"]).dictionary_encode(), ["01.1", "x"]),
    "nothing": (pa.nulls(2), [None, None]),
    "whole numbers": (pa.array([1, None]), ["1", None]),
    "decimals": (pa.array([Decimal("01.10"), None]), ["1.10", None]),
    "dates": (pa.array([one.date() for one in MOMENTS]), ["2001-03-04", "2002-03-04"]),
    "moments of a zone": (
        pa.array(MOMENTS, pa.timestamp("s", "Asia/Tokyo")),
        ["2001-03-05 08:30:00.000", "2002-03-04 09:00:00.000"],
    ),
    "lists": (pa.array([["x"], ["y"]]), "corrupt"),
    "records": (pa.array([{"a": 1}, {"a": 2}]), "corrupt"),
    "bytes that are no text": (pa.array([b"\xff", b"x"]), "corrupt"),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_types_of_parquet_columns(tmp_path: Path, kind: str) -> None:
    column, expected = PARQUET[kind]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "x": column}), path)
    if isinstance(expected, str):
        for read in (tables.read_rows, tables.read_frames):
            with pytest.raises(UserError, match=r"t\.parquet") as caught:
                list(read(path, ["x"]))
            assert str(caught.value.code) == expected
        return
    assert [x for block in tables.read_frames(path, ["x"]) for x in block.frame["x"]] == expected
    assert [row.cells[0] for row in tables.read_rows(path, ["x"]) if isinstance(row, TableRow)] == [
        text or "" for text in expected
    ]


@pytest.mark.parametrize(("text", "code"), variants.DATES.items())
def test_dates_of_claims(tmp_path: Path, text: str, code: str) -> None:
    rows = "".join(f"a,2001-01-{day:02d},428.0\n" for day in range(1, 9))
    write_claims(tmp_path, claims=f"patient_id,date,icd9\n{rows}a,{text},496\n")
    found = read_source(scan_folder(tmp_path), ClaimsOptions())
    warned = {f"~{one.code}" for one in found.findings if one.code == "timestamps"}
    day = dates.parse_day(text)
    assert day == (
        None
        if code == "date"
        else dates.parse_day("2001-03-01" if text == "2001-03" else "2001-03-04")
    )
    assert warned == ({code} if code.startswith("~") else set())
    assert all(one.file == "claims.csv" for one in found.findings if one.code == "timestamps")


# --- through the command


def write_nights(
    folder: Path,
    count: int = 4,
    channels: list[edf_header.EdfChannel] | None = None,
    **fields: bytes,
) -> Path:
    """Files of one-minute recordings; noise differs between them."""
    chosen = channels or [
        edf_header.EdfChannel(name, "uV", -192.0, 192.0, -2048, 2047, 100) for name in ("A", "B")
    ]
    for i in range(count):
        path = variants.write_edf(folder / f"s{i}.edf", chosen, fields, records=60)
        raw = bytearray(path.read_bytes())
        # half of the samples at most
        last = min(1000, 30 * sum(channel.samples for channel in chosen))
        raw[-2 * last :] = (
            np.random.default_rng(i).integers(-900, 900, last).astype("<i2").tobytes()
        )
        path.write_bytes(bytes(raw))
    return folder


def warned(report: dict[str, Any], code: str) -> list[dict[str, Any]]:
    reasons = [
        *report["reasons"],
        *(reason for unit in report["units"] for reason in unit["reasons"]),
    ]
    return [reason for reason in reasons if reason["code"] == code and reason["level"] == "warning"]


@pytest.mark.parametrize(("size", "value"), [(8192, 0), (4096, 0), (8192, 255)])
@pytest.mark.parametrize("place", [1024, 5000, 11000])
def test_a_block_of_one_value_in_a_file_is_reported_by_channel_and_time(
    tmp_path: Path, size: int, value: int, place: int
) -> None:
    folder = write_nights(tmp_path / "raw")
    raw = bytearray((folder / "s1.edf").read_bytes())
    raw[place : place + size] = bytes([value]) * size
    (folder / "s1.edf").write_bytes(bytes(raw))
    report = cache.ingest("edf", folder, tmp_path / "cache" / "edf")
    assert report["exit_code"] == 0
    (found,) = warned(report, "flat_channel")
    assert found["file"] == "s1.edf"
    assert "s1.edf" in found["message"]
    assert float(found["message"].split("from ")[1].split(" s")[0].rstrip(",")) == pytest.approx(
        (place - 768) / 400, abs=1.5
    )


def test_channels_that_repeat_values_have_no_constant_stretches() -> None:
    rng = np.random.default_rng(0)
    marker = np.zeros(6000, np.int16)
    marker[rng.integers(0, 6000, 20)] = 1
    slow = np.repeat(rng.integers(0, 9, 60), 100).astype(np.int16)
    noise = rng.integers(-900, 900, 6000).astype(np.int16)
    held = noise.copy()
    held[1000:1300] = 77
    cases = {
        "marker": marker,
        "slow": slow,
        "noise": noise,
        "constant": np.full(6000, 5, np.int16),
        "short": noise[:50],
    }
    assert {
        name: find_constant_stretch(Signal(name, 100.0, "", x)) for name, x in cases.items()
    } == dict.fromkeys(cases)
    assert find_constant_stretch(Signal("held", 100.0, "", held)) == (1000, 300)
    assert find_constant_stretch(Signal("held", 1.0, "", held.astype(np.float32))) == (1000, 300)
    assert find_constant_stretch(Signal("held", 400.0, "", held)) is None  # less than a second


@pytest.mark.parametrize(
    ("size", "origin", "place"),
    [(8192, 1024, 12000), (4096, 1024, 9216), (2048, 5002, 14004), (8192, 5001, 14000)],
)
def test_a_block_of_a_file_that_is_copied_over_another_is_reported(
    tmp_path: Path, size: int, origin: int, place: int
) -> None:
    folder = write_nights(tmp_path / "raw")
    rng = np.random.default_rng(5)
    raw = bytearray((folder / "s1.edf").read_bytes())
    raw[768:] = rng.integers(-900, 900, (len(raw) - 768) // 2).astype("<i2").tobytes()
    (folder / "s1.edf").write_bytes(bytes(raw))
    assert not warned(cache.ingest("edf", folder, tmp_path / "clean"), "duplicates")
    raw[place : place + size] = raw[origin : origin + size]
    (folder / "s1.edf").write_bytes(bytes(raw))
    found = warned(cache.ingest("edf", folder, tmp_path / "cache" / "edf"), "duplicates")
    if (place - origin) % 2:  # between the bytes of a sample: other values
        assert not found
        return
    assert [one["file"] for one in found] == ["s1.edf"]
    assert f"bytes from byte {place:,} equal those from byte {origin:,}" in found[0]["message"]


def test_blocks_repeat_only_where_one_is_copied() -> None:
    """Against a search of all pairs of blocks."""
    found, n = 0, 60
    for seed in range(n):
        rng = np.random.default_rng(seed)
        dtype = (np.int16, np.int32, np.float32, np.float64)[seed % 4]
        x = (rng.normal(size=3000) * 50).astype(dtype)
        assert find_repeated_block(x) is None
        origin, place, length = (
            int(rng.integers(0, 900)),
            int(rng.integers(1500, 2400)),
            int(rng.integers(300, 600)),
        )
        x[place : place + length] = x[origin : origin + length]
        block = find_repeated_block(x)
        found += block is not None
        if block is not None:
            start, size, first = block
            assert np.array_equal(x[start : start + size], x[first : first + size])
            assert (start - first, start <= place, start + size >= place + length) == (
                place - origin,
                True,
                True,
            )
    assert found >= 0.9 * n
    rng, t = np.random.default_rng(0), np.arange(60_000) / 100
    marker, steps = (
        np.zeros(6000, np.int16),
        np.repeat(rng.integers(0, 9, 60), 100).astype(np.int16),
    )
    marker[rng.integers(0, 6000, 20)] = 1
    calm = {
        "marker": marker,
        "steps": steps,
        "sine": (1000 * np.sin(2 * np.pi * t)).astype(np.int16),
        "square": np.sign(np.sin(t)),
        "none": np.zeros(0),
    }
    walk = {
        "walk": np.cumsum(rng.integers(-1, 2, 60_000)).astype(np.int16),
        "few": np.arange(5.0),
        "constant": np.full(6000, 7, np.int16),
    }
    assert {name: find_repeated_block(x) for name, x in (calm | walk).items()} == dict.fromkeys(
        calm | walk
    )


def test_counters_and_the_texts_of_a_header_are_no_copies(tmp_path: Path) -> None:
    names = [
        edf_header.EdfChannel(f"C{i}", "uV", -192.0, 192.0, -2048, 2047, 256) for i in range(12)
    ]
    path = variants.write_edf(tmp_path / "raw" / "a.edf", names, {}, records=60)
    raw = bytearray(path.read_bytes())
    head = 256 * 13
    transducer = 256 + 12 * 16
    raw[transducer : transducer + 12 * 80] = (
        b"Active electrode, Ag/AgCl pellet; amplifier 7 of set B, impedance below 5 kOhm".ljust(80)
    ) * 12
    signal = np.random.default_rng(3).integers(-900, 900, (60, 12, 256)).astype("<i2")
    signal[:, 4] = np.arange(256)  # a counter of the samples of a record
    raw[head:] = signal.tobytes()
    path.write_bytes(bytes(raw))
    assert not warned(cache.ingest("edf", tmp_path / "raw", tmp_path / "cache"), "duplicates")


@pytest.mark.parametrize("patient", ["X X X X", "P-0007 F 02-MAY-1951 X"])
def test_a_copy_of_another_subject_s_recording_is_named_with_it_whatever_its_header_says(
    patient: str, tmp_path: Path
) -> None:
    folder = write_nights(tmp_path / "raw")
    assert not warned(cache.ingest("edf", folder, tmp_path / "clean"), "duplicate_across_splits")
    raw = bytearray((folder / "s0.edf").read_bytes())
    raw[8:168] = f"{patient:80}{'Startdate X X X X':80}".encode()
    (folder / "s3.edf").write_bytes(bytes(raw))
    for _ in range(2):  # the second time nothing is read again
        report = cache.ingest("edf", folder, tmp_path / "cache")
        (found,) = warned(report, "duplicate_across_splits")
        assert (found["file"], report["exit_code"]) == ("s0.edf", 0)
        assert "s3.edf" in found["message"]


def test_rows_of_another_subject_are_counted(tmp_path: Path) -> None:
    folder = write_epilepsy(tmp_path / "raw")
    lines = (folder / "data.csv").read_text().splitlines()
    copies = [line.replace(".V1.1,", ".V1.99,", 1) for line in lines if ".V1.1," in line]
    (folder / "data.csv").write_text("\n".join([*lines, *copies, ""]))
    (found,) = warned(
        cache.ingest("epilepsy", folder, tmp_path / "cache"), "duplicate_across_splits"
    )
    assert (found["file"], found["count"]) == ("data.csv", len(copies))


def test_control_characters_are_stored_as_escapes(tmp_path: Path) -> None:
    folder = write_generic(tmp_path / "raw", "a", "ill\x07")
    table = folder / "recordings.csv"
    table.write_text(table.read_text().replace("s3", "s\x1b3"))
    report = cache.ingest(
        "generic", folder, tmp_path / "cache", options={"map": str(tmp_path / "map.toml")}
    )
    assert len(warned(report, "label_chars")) == 2
    records = {r.recording_id: r for r in cache.open_cache(tmp_path / "cache").records()}
    assert records["3_rec"].subject_id == r"s\x1b3"
    assert records["1_rec"].attributes["label"] == r"ill\x07"


def test_names_of_claims_columns_match_without_case_and_say_so(tmp_path: Path) -> None:
    plain = read_source(scan_folder(write_claims(tmp_path / "a")), ClaimsOptions())
    folder = write_claims(tmp_path / "b")
    for path in folder.glob("*s.csv"):
        head, rest = path.read_text().split("\n", 1)
        path.write_text(f"{head.upper()}\n{rest}")
    upper = read_source(scan_folder(folder), ClaimsOptions())
    assert [one.file for one in upper.findings if one.code == "header"] == [
        "claims.csv",
        "patients.csv",
        "labels.csv",
    ]
    assert not [one for one in plain.findings if one.code == "header"]
    assert upper.labels is not None
    assert plain.labels is not None
    assert upper.labels.equals(plain.labels)


# --- what is accepted can be used

EXTREMES = {
    "range 1e16": [edf_header.EdfChannel("x", "", -1e16, 1e16, -2048, 2047, 100)],
    "range 1e-15": [edf_header.EdfChannel("x", "", -1e-15, 1e-15, -2048, 2047, 100)],
    "offset": [edf_header.EdfChannel("x", "Pa", 101000.0, 101300.0, -32768, 32767, 100)],
    "inverted": [edf_header.EdfChannel("x", "uV", 192.0, -192.0, -2048, 2047, 100)],
    "two rates": [
        edf_header.EdfChannel("x", "", -1.0, 1.0, -2048, 2047, 256),
        edf_header.EdfChannel("y", "", -1.0, 1.0, -2048, 2047, 1),
    ],
    "fast": [edf_header.EdfChannel("x", "", -1.0, 1.0, -2048, 2047, 3000)],
    "one sample": [edf_header.EdfChannel("x", "", -1.0, 1.0, -2048, 2047, 1)],
}


def use(dataset: str, workspace: Path, steps: int = 2) -> list[tuple[int, str]]:
    """Exit codes and messages of tokenize and of two steps of training on what was ingested."""
    made = [("tokenize", dataset, "--workspace", workspace)] if dataset != "pophr" else []
    train = (
        "pretrain",
        "--model",
        "lstm",
        "--preset",
        "tiny",
        "--steps",
        steps,
        "--batch-size",
        4,
        "--data",
        dataset,
        "--device",
        "cpu",
    )
    return [run(*argv) for argv in (*made, (*train, "--workspace", workspace))]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_recordings_that_are_accepted_can_be_used(tmp_path: Path, name: str) -> None:
    folder = write_nights(tmp_path / "raw", channels=EXTREMES[name])
    code, err, _ = ingest("edf", folder, tmp_path / "w")
    assert code == 0, err
    for code, err in use("edf", tmp_path / "w"):
        assert code == 0, err


def claims_case(change: Callable[[str], str], name: str = "claims") -> Callable[[Path], Path]:
    """A folder of claims with one table changed."""

    def write(folder: Path) -> Path:
        path = write_claims(folder) / f"{name}.csv"
        path.write_text(change(path.read_text()))
        return folder

    return write


USED: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "claims: zones": (
        "pophr",
        claims_case(lambda text: re.sub(r"(\d{4}-\d\d-\d\d),", r"\1T23:30:00+02:00,", text)),
    ),
    "claims: capitals": (
        "pophr",
        claims_case(lambda text: text.replace("patient_id,date,icd9", "PATIENT_ID,DATE,ICD9")),
    ),
    "claims: control characters": (
        "pophr",
        claims_case(lambda text: text.replace("p03", "p\x0703")),
    ),
    "claims: one label": (
        "pophr",
        claims_case(
            lambda text: re.sub(r",\d$", "", text.replace(",copd", ""), flags=re.MULTILINE),
            "labels",
        ),
    ),
    "claims: no birth dates": (
        "pophr",
        claims_case(lambda text: text.replace("1950-01-01", ""), "patients"),
    ),
    "epilepsy: copies": ("epilepsy", write_epilepsy),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_odd_tables_that_are_accepted_can_be_used(tmp_path: Path, name: str) -> None:
    dataset, write = USED[name]
    code, err, report = ingest(dataset, write(tmp_path / "raw"), tmp_path / "w")
    assert code == 0, err
    # added by the build, about no file
    of_sequences = {"min_codes", "label_leakage", "class_missing"}
    assert all(
        one["file"]
        for one in report["reasons"]
        if one["level"] != "info" and one["code"] not in of_sequences
    )
    for code, err in use(dataset, tmp_path / "w"):
        assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("size", [8192, 4096])
def test_recordings_with_holes_copies_and_missing_channels_can_be_used(
    tmp_path: Path, size: int
) -> None:
    folder = write_nights(tmp_path / "raw")
    raw = bytearray((folder / "s1.edf").read_bytes())
    raw[5000 : 5000 + size] = bytes(size)
    (folder / "s1.edf").write_bytes(bytes(raw))
    (folder / "s3.edf").write_bytes((folder / "s0.edf").read_bytes())
    code, err, report = ingest("edf", folder, tmp_path / "w")
    assert code == 0, err
    assert {"flat_channel", "duplicate_across_splits"} <= set(report["reason_counts"])
    for code, err in use("edf", tmp_path / "w"):
        assert code == 0, err


SHARED = BAD_INPUTS / "make_bad_inputs.py"


@pytest.mark.long
@pytest.mark.skipif(
    not SHARED.is_file(), reason="the shared family of malformed inputs is not here"
)
@pytest.mark.parametrize("family", ["EDF0", "EDF1", "EDF2", "EDF3", "WF", "PX", "TS", "UC", "CL"])
def test_every_accepted_case_of_the_shared_family_can_be_used(tmp_path: Path, family: str) -> None:
    """What ingest publishes becomes windows or sequences, and two steps of training end, at worst,
    with a refusal: never with exit 1.
    """
    subprocess.run(
        [sys.executable, str(SHARED), str(tmp_path / "cases"), "--only", family],
        check=True,
        capture_output=True,
    )
    for case in json.loads((tmp_path / "cases" / "manifest.json").read_text()):
        # 200,000 claims of one patient: elsewhere
        if family == "CL" and case["id"].startswith("CL15"):
            continue
        folder, work = tmp_path / "cases" / case["command"]["dir"], tmp_path / "work" / case["id"]
        argv = [part.format(dir=folder, workspace=work) for part in case["command"]["argv"]]
        code, err = run(*argv)
        assert code in {0, 3, 4}, (case["id"], err)
        if code:  # what is left is ordinary
            continue
        for code, err in use(case["command"]["dataset"], work):
            assert code in {0, 4}, (case["id"], err)
            assert "internal" not in err
