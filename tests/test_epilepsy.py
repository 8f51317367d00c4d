"""Epileptic Seizure Recognition: rows by name, subjects from their ids, faults row by row; the real
sample.
"""

from __future__ import annotations

import csv
import pickle
import re
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES, needs_sample, require_sample

from bitimely_core import cache, tokens
from bitimely_core.datasets.epilepsy import BINARY, CONDITIONS, VALUES, epilepsy
from bitimely_core.errors import Finding, UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.types import IngestUnit, Record, Records

DATA = SAMPLES / "esr"
HEADER = ["", *VALUES, "y"]

real = needs_sample(DATA)


def rows(subjects: int = 6, chunks: int = 3) -> list[list[Any]]:
    rng = np.random.default_rng(3)
    order = [
        (subject, chunk) for subject in range(1, subjects + 1) for chunk in range(1, chunks + 1)
    ]
    rng.shuffle(order)
    return [
        [f"X{chunk}.V1.{subject}", *rng.integers(-1800, 2000, 178).tolist(), 1 + subject % 5]
        for subject, chunk in order
    ]


def write(
    folder: Path,
    lines: Sequence[Sequence[Any]],
    header: Sequence[str] = HEADER,
    name: str = "data.csv",
) -> Path:
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return folder


def read_epilepsy(folder: Path) -> Records:
    (unit,) = [item for item in epilepsy(scan_folder(folder), {}) if isinstance(item, IngestUnit)]
    again: IngestUnit = pickle.loads(pickle.dumps(unit))
    assert again.read is not None
    found = again.read()
    assert isinstance(found, Records)
    return found


def record(found: Records, name: str) -> Record:
    (one,) = [one for one in found.records if one.recording_id == name]
    return one


def test_columns_are_found_by_name_in_any_order(tmp_path: Path) -> None:
    lines = rows()
    order = np.random.default_rng(0).permutation(len(HEADER)).tolist()
    straight = read_epilepsy(write(tmp_path, lines))
    mixed = read_epilepsy(
        write(tmp_path, [[line[i] for i in order] for line in lines], [HEADER[i] for i in order])
    )
    assert len(straight.records) == len(lines)
    for line, one, other in zip(lines, straight.records, mixed.records, strict=True):
        assert one.recording_id == other.recording_id == line[0]
        assert one.subject_id == line[0].split(".", 1)[1]
        assert one.attributes == other.attributes
        assert one.attributes["condition"] == CONDITIONS[line[-1]]
        assert one.attributes["binary"] == BINARY[line[-1] == 1]
        for got in (one, other):
            (signal,) = got.signals
            assert signal.samples.dtype == np.int16
            assert signal.samples.tolist() == line[1:-1]
            assert (signal.rate, signal.unit) == (173.61, "uV")


def test_values_beyond_int16_are_kept_as_float32(tmp_path: Path) -> None:
    lines = rows()
    lines[0][5], lines[1][5], lines[2][5] = 0.5, 40000, 32767
    found = read_epilepsy(write(tmp_path, lines))
    kinds = [found.records[i].signals[0].samples.dtype.name for i in range(4)]
    assert kinds == ["float32", "float32", "int16", "int16"]
    assert found.records[1].signals[0].samples[4] == 40000


@pytest.mark.parametrize(
    ("column", "cell", "code"),
    [
        (3, "n/a", "not_numeric"),
        (3, "", "missing_values"),
        (3, "inf", "non_finite"),
        (3, "1e400", "non_finite"),
        (3, "1e39", "non_finite"),
        (-1, "6", "label"),
        (-1, "0", "label"),
        (-1, "1.5", "label"),
        (-1, "", "label"),
        (0, "TFC.train.1", "identifier"),
        (0, "", "identifier"),
        (0, "X1.V1", "identifier"),
    ],
)
def test_a_faulty_row_is_dropped_and_counted(
    tmp_path: Path, column: int, cell: str, code: str
) -> None:
    lines = rows()
    name = lines[4][0]
    lines[4][column] = cell
    found = read_epilepsy(write(tmp_path, lines))
    assert name not in {one.recording_id for one in found.records}
    assert len(found.records) == len(lines) - 1
    (table,) = found.rows
    assert (table.seen, table.kind, table.quarantined) == (len(lines), "segments", {code: 1})
    (finding,) = found.findings
    assert (finding.code, finding.row, finding.file) == (code, 6, "data.csv")
    assert cell == "" or cell not in finding.message.replace("6", "") or code == "label"


def test_many_faults_of_one_kind_are_one_finding(tmp_path: Path) -> None:
    lines = rows(subjects=10)
    for line in lines[2:9]:
        line[-1] = 7
    found = read_epilepsy(write(tmp_path, lines))
    (finding,) = found.findings
    assert (finding.count, finding.row, finding.examples) == (7, 4, ("4", "5", "6", "7", "8"))


def test_repeated_rows_are_used_once_and_torn_ones_not_at_all(tmp_path: Path) -> None:
    lines = rows()
    lines += [list(lines[0]), [lines[1][0], *lines[2][1:]]]
    found = read_epilepsy(write(tmp_path, lines))
    names = [one.recording_id for one in found.records]
    assert names.count(lines[0][0]) == 1
    assert lines[1][0] not in names
    assert (found.rows[0].dropped, found.rows[0].quarantined) == (
        {"duplicates": 1},
        {"duplicate_key": 2},
    )


def test_rows_of_one_value_are_reported_as_segments_are(tmp_path: Path) -> None:
    lines = rows()
    for i, value in ((1, 0), (4, -7)):
        lines[i] = [lines[i][0], *[value] * 178, lines[i][-1]]
    flat = [str(line[0]) for line in lines if len(set(line[1:-1])) == 1]
    assert len(flat) == 2
    write(tmp_path, lines)
    found = read_epilepsy(tmp_path)
    assert len(found.records) == len(lines)
    (reason,) = (finding for finding in found.findings if finding.code == "flat_channel")
    assert (reason.level, reason.count, list(reason.examples), reason.file) == (
        "warning",
        2,
        flat,
        "data.csv",
    )


def test_copies_of_the_table_are_used_once_or_not_at_all(tmp_path: Path) -> None:
    """Under the name of its most common mirror, too; a table of another name is named and not
    read.
    """
    raw = tmp_path / "raw"
    (raw / "old").mkdir(parents=True)
    write(raw, rows())
    (raw / "old" / "Epileptic Seizure Recognition.csv").write_bytes((raw / "data.csv").read_bytes())
    (raw / "old" / "data (1).csv.gz").write_bytes(b"x")
    report = cache.ingest("epilepsy", raw, tmp_path / "same")
    reasons = [*report["reasons"], *report["units"][0]["reasons"]]
    assert report["exit_code"] == 0
    assert {(reason["code"], reason["file"]) for reason in reasons} == {
        ("duplicates", "old/Epileptic Seizure Recognition.csv"),
        ("file_name", "old/data (1).csv.gz"),
    }
    write(raw / "old", rows()[:-1])
    with pytest.raises(UserError) as caught:
        cache.ingest("epilepsy", raw, tmp_path / "differ")
    report = caught.value.report or {}
    named = {
        reason["file"]
        for unit in report["units"]
        for reason in unit["reasons"]
        if reason["code"] == "duplicate_key"
    }
    assert (caught.value.exit_code, named) == (
        4,
        {"data.csv", "old/data.csv", "old/Epileptic Seizure Recognition.csv"},
    )
    shutil.rmtree(raw / "old")
    (raw / "data.csv").rename(raw / "Epileptic Seizure Recognition.csv")
    assert cache.ingest("epilepsy", raw, tmp_path / "alone")["exit_code"] == 0


def test_a_segment_with_two_classes_gives_a_warning(tmp_path: Path) -> None:
    lines = rows()
    lines[0][-1] = 1 + lines[0][-1] % 5
    (finding,) = read_epilepsy(write(tmp_path, lines)).findings
    assert (finding.code, finding.level, finding.count) == ("label", "warning", 1)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (HEADER[:5] + HEADER[6:], "schema"),
        ([*HEADER, "extra"], "header"),
        (HEADER[1:], "header"),
        ([str(i) for i in range(180)], "header"),
        (["", *VALUES[:-1], "X1", "y"], "header"),
    ],
)
def test_a_table_with_other_columns_is_refused(
    tmp_path: Path, header: list[str], code: str
) -> None:
    lines = [line + [0] * max(0, len(header) - 180) for line in rows()]
    with pytest.raises(UserError) as caught:
        read_epilepsy(write(tmp_path, [line[: len(header)] for line in lines], header))
    assert caught.value.code in {code, "schema"}
    assert not re.search(r"V1\.\d", str(caught.value))


def test_one_table_is_read_and_others_are_named(tmp_path: Path) -> None:
    write(tmp_path, rows())
    write(tmp_path, rows(), name="other.csv")
    (tmp_path / "README.txt").write_text("x")
    findings = [item for item in epilepsy(scan_folder(tmp_path), {}) if isinstance(item, Finding)]
    assert [(str(finding.code), finding.file) for finding in findings] == [
        ("file_name", "other.csv")
    ]
    (tmp_path / "data.csv").unlink()
    with pytest.raises(UserError) as caught:
        list(epilepsy(scan_folder(tmp_path), {}))
    assert caught.value.code == "no_input"


def test_all_chunks_of_a_segment_stand_in_one_split(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw", rows(subjects=30, chunks=4))
    report = cache.ingest("epilepsy", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], report["rows"][0]["used"]) == (0, 120)
    for view in ("", "five"):
        windows = tokens.build(tmp_path / "cache", view=view, out=tmp_path / f"tokens-{view}")
        assert (len(windows), windows.length, windows.rate) == (120, 178, 173.61)
        per_subject = {
            subject: set(part["split"])
            for (subject,), part in windows.index.partition_by("subject_id", as_dict=True).items()
        }
        assert len(per_subject) == 30
        assert all(len(found) == 1 for found in per_subject.values())
    assert list(windows.class_names) == list(CONDITIONS.values())


@real
def test_the_sample_lands_as_it_is_written(tmp_path: Path) -> None:
    report = cache.ingest("epilepsy", DATA, tmp_path / "cache")
    assert (report["exit_code"], report["rows"][0]["used"], report["reason_counts"]) == (
        0,
        10,
        {"file_name": 1},
    )
    with (DATA / "data.csv").open(newline="") as file:
        table = {line["Unnamed"]: line for line in csv.DictReader(file)}
    found = list(cache.open_cache(tmp_path / "cache").records())
    assert {one.recording_id for one in found} == set(table)
    for one in found:
        line = table[one.recording_id]
        assert one.signals[0].samples.tolist() == [int(line[name]) for name in VALUES]
        assert one.attributes["condition"] == CONDITIONS[int(line["y"])]
        assert line["Unnamed"].endswith(one.subject_id)


# --- the sets of Bonn


def write_sets(
    folder: Path, names: Sequence[str], *, packed: bool = False, seed: int = 1
) -> dict[str, np.ndarray]:
    """Segments of 4,097 integers as text files in a folder a set, or as one zip archive a set.
    Returns the values.
    """
    rng = np.random.default_rng(seed)
    values = {name: rng.integers(-1800, 2000, 4097) for name in names}
    for letter in sorted({name[0] for name in names}):
        texts = {
            name: "".join(f"{x}\r\n" for x in values[name]) for name in names if name[0] == letter
        }
        suffix = "TXT" if letter == "N" else "txt"
        if packed:
            with zipfile.ZipFile(folder / f"{letter}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for name, text in texts.items():
                    archive.writestr(
                        f"{letter}/{name}.{suffix}" if letter == "O" else f"{name}.{suffix}", text
                    )
        else:
            (folder / letter).mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / letter / f"{name}.{suffix}").write_text(text, newline="")
    return values


NAMES = ["F001", "N001", "N002", "O001", "S001", "Z001"]


def test_sets_and_table_hold_the_same_under_one_content_hash(tmp_path: Path) -> None:
    for name in ("folders", "archives", "table"):
        (tmp_path / name).mkdir()
    values = write_sets(tmp_path / "folders", NAMES)
    write_sets(tmp_path / "archives", NAMES, packed=True)
    labels = {"Z": 5, "O": 4, "N": 3, "F": 2, "S": 1}
    lines = [
        [f"X{k + 1}.V1.{i}", *values[name][178 * k : 178 * (k + 1)].tolist(), labels[name[0]]]
        for i, name in enumerate(NAMES)
        for k in np.random.default_rng(0).permutation(23).tolist()
    ]
    write(tmp_path / "table", lines)
    reports = {
        name: cache.ingest("epilepsy", tmp_path / name, tmp_path / f"cache-{name}")
        for name in ("folders", "archives", "table")
    }
    assert {report["content_sha256"] for report in reports.values()} == {
        reports["table"]["content_sha256"]
    }
    for name in ("folders", "archives"):
        assert reports[name]["exit_code"] == 0
        assert {(row["kind"], row["seen"], row["used"]) for row in reports[name]["rows"]} == {
            ("segments", 1, 1),
            ("segments", 2, 2),
        }
        assert reports[name]["reason_counts"] == {"class_missing": 494, "identifier": 1}
        windows = tokens.build(tmp_path / f"cache-{name}", out=tmp_path / f"tokens-{name}")
        assert len(windows) == 6 * 23
        assert set(windows.subjects()) == set(NAMES)
        assert any("segments are not people" in notice for notice in windows.notices)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1\n" * 4095, "length"),
        ("1\n" * 4098, "length"),
        ("1\n" * 4096 + "x\n", "not_numeric"),
        ("1\n" * 4096 + "nan\n", "non_finite"),
        ("1\n" * 200_000, "length"),
        ("", "length"),
        ("1\n" * 4096 + "\udcff\n", "encoding"),
    ],
)
def test_a_damaged_segment_is_counted_and_the_others_land(
    tmp_path: Path, text: str, code: str
) -> None:
    for packed in (False, True):
        folder = tmp_path / ("zip" if packed else "txt")
        folder.mkdir()
        write_sets(folder, ["Z001", "Z002", "Z003"], packed=packed)
        raw = text.encode(errors="surrogateescape")
        if packed:
            with zipfile.ZipFile(folder / "Z.zip", "a") as archive:
                archive.writestr("Z004.txt", raw)
        else:
            (folder / "Z" / "Z004.txt").write_bytes(raw)
        found = read_epilepsy(folder)
        assert {one.subject_id for one in found.records} == {"Z001", "Z002", "Z003"}
        (row,) = found.rows
        assert (row.seen, row.quarantined) == (4, {code: 1})
        assert found.findings[0].code == code
        assert "Z004" in found.findings[0].message


def test_a_segment_in_two_places_is_used_once_or_not_at_all(tmp_path: Path) -> None:
    write_sets(tmp_path, ["Z001", "Z002"])
    write_sets(tmp_path, ["Z001", "Z002"], packed=True)
    found = read_epilepsy(tmp_path)
    assert len(found.records) == 46
    assert [(row.file, row.seen, row.dropped) for row in found.rows] == [
        ("Z", 2, {"duplicates": 2}),
        ("Z.zip", 2, {}),
    ]
    write_sets(tmp_path, ["Z001"], seed=2)
    found = read_epilepsy(tmp_path)
    assert {one.subject_id for one in found.records} == {"Z002"}
    assert [row.quarantined for row in found.rows] == [{"duplicate_key": 1}] * 2


def test_sets_are_read_from_tar_archives_and_only_published_names(tmp_path: Path) -> None:
    values = write_sets(tmp_path / "x", ["Z001", "Z100", "S007"])
    raw = tmp_path / "raw"
    (raw / "S").mkdir(parents=True)
    with tarfile.open(raw / "Z.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x" / "Z", "Z")
    for name in ("S007", "S000", "S101"):
        shutil.copy(tmp_path / "x" / "S" / "S007.txt", raw / "S" / f"{name}.txt")
    report = cache.ingest("epilepsy", raw, tmp_path / "cache")
    assert {row["file"]: row["used"] for row in report["rows"]} == {"Z.tar.gz": 2, "S": 1}
    (reason,) = (reason for reason in report["reasons"] if reason["code"] == "file_name")
    assert (reason["count"], reason["file"]) == (2, "S/S000.txt")
    first = {one.recording_id: one for one in cache.open_cache(tmp_path / "cache").records()}[
        "X1.Z100"
    ]
    np.testing.assert_array_equal(first.signals[0].samples, values["Z100"][:178])


def test_what_an_archive_holds_besides_segments_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_sets(raw, ["S001", "Z001", "Z002"], packed=True)
    with zipfile.ZipFile(raw / "Z.zip", "a") as archive:
        for name in ("Z/notes.doc", "README.txt", "Z003.csv"):
            archive.writestr(name, "x")
    with zipfile.ZipFile(raw / "F.zip", "w") as archive:
        archive.writestr("F/F.zip", "x")
    report = cache.ingest("epilepsy", raw, tmp_path / "cache")
    reasons = {(reason["code"], reason["file"]): reason for reason in report["units"][0]["reasons"]}
    assert reasons["file_name", "Z.zip"]["examples"] == ["'Z/notes.doc'", "'Z003.csv'"]
    assert reasons["no_input", "F.zip"]["level"] == "error"
    assert report["exit_code"] == 3
    assert {one.subject_id for one in cache.open_cache(tmp_path / "cache").records()} == {
        "S001",
        "Z001",
        "Z002",
    }


def test_archives_beside_their_folders_are_counted_by_place(tmp_path: Path) -> None:
    names = [f"Z{i:03d}" for i in range(1, 9)]
    write_sets(tmp_path, names)
    write_sets(tmp_path, names, packed=True)
    found = read_epilepsy(tmp_path)
    (reason,) = (finding for finding in found.findings if finding.code == "duplicates")
    assert (reason.file, reason.count, reason.level) == ("Z", 8, "warning")


def test_what_is_odd_in_segments_that_are_used_names_them(tmp_path: Path) -> None:
    """A segment of zeros, one in volts, and one that is another's copy under a second name."""
    raw = tmp_path / "raw"
    write_sets(raw, ["S001", "S002", "S003", "S004", "Z001", "Z002", "Z003"])
    (raw / "S" / "S002.txt").write_text("0\n" * 4097)
    (raw / "Z" / "Z002.txt").write_text(
        "".join(f"{float(x) / 1e6:.9e}\n" for x in (raw / "Z" / "Z002.txt").read_text().split())
    )
    (raw / "S" / "S003.txt").write_bytes((raw / "Z" / "Z001.txt").read_bytes())
    report = cache.ingest("epilepsy", raw, tmp_path / "cache")
    assert (report["exit_code"], report["rows"][0]["used"], report["rows"][1]["used"]) == (0, 4, 3)
    found = {
        reason["code"]: reason for reason in (*report["units"][0]["reasons"], *report["reasons"])
    }
    assert (found["flat_channel"]["count"], found["flat_channel"]["examples"]) == (1, ["S002"])
    assert (found["unit"]["count"], found["unit"]["examples"]) == (1, ["Z002"])
    copies = found["duplicate_across_splits"]
    assert (copies["file"], copies["count"]) == ("bonn", 23)
    assert "'X1.Z001' as 'X1.S003' and so on" in copies["message"]


def damage_archive(raw: bytes) -> list[bytes]:
    return [raw[:-60], raw[:500] + b"xxxx" + raw[504:], b"", b"PK", b"text"]


def test_a_damaged_archive_costs_its_set_alone(tmp_path: Path) -> None:
    """A half download of F.zip: it is named with what to do, and the four other sets land."""
    raw, names = tmp_path / "raw", [f"{letter}00{i}" for letter in "FNOSZ" for i in (1, 2)]
    raw.mkdir()
    write_sets(raw, names, packed=True)
    for i, damaged in enumerate(damage_archive((raw / "F.zip").read_bytes())):
        (raw / "F.zip").write_bytes(damaged)
        report = cache.ingest("epilepsy", raw, tmp_path / f"cache{i}")
        assert report["exit_code"] == 3
        assert {one.subject_id for one in cache.open_cache(tmp_path / f"cache{i}").records()} == {
            name for name in names if name[0] != "F"
        }
        (row,) = (row for row in report["rows"] if row["kind"] == "sets")
        assert (row["file"], row["seen"], row["quarantined"]) == ("F.zip", 5, 1)
        (named,) = (
            reason for reason in report["units"][0]["reasons"] if reason["level"] == "error"
        )
        assert named["message"].startswith("F.zip: ")
        assert "none of its segments is used. Download it again" in named["message"]


def test_more_damaged_archives_than_max_bad_are_refused_as_sets(tmp_path: Path) -> None:
    """How many segments a damaged archive has is not known: the message counts what --max-bad does,
    folders and archives.
    """
    raw = tmp_path / "raw"
    raw.mkdir()
    write_sets(raw, [f"{letter}00{i}" for letter in "FNOSZ" for i in (1, 2)], packed=True)
    for letter in "FNO":
        (raw / f"{letter}.zip").write_bytes((raw / f"{letter}.zip").read_bytes()[:-60])
    with pytest.raises(
        UserError, match=r"3 of 5 sets are quarantined, more than --max-bad 0\.5"
    ) as refused:
        cache.ingest("epilepsy", raw, tmp_path / "cache")
    assert refused.value.exit_code == 4
    assert cache.ingest("epilepsy", raw, tmp_path / "cache", max_bad=0.6)["exit_code"] == 3


def test_a_damaged_archive_and_two_forms_are_refused_in_one_line(tmp_path: Path) -> None:
    write_sets(tmp_path, ["Z001"], packed=True)
    raw = (tmp_path / "Z.zip").read_bytes()
    for damaged in damage_archive(raw):
        (tmp_path / "Z.zip").write_bytes(damaged)
        with pytest.raises(UserError) as caught:
            read_epilepsy(tmp_path)
        assert caught.value.code in {"corrupt", "truncated", "empty_file"}
        assert "Z.zip" in str(caught.value)
    write(tmp_path, rows())
    with pytest.raises(UserError) as caught:
        list(epilepsy(scan_folder(tmp_path), {}))
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_sets_of_bonn_give_the_table_of_uci(tmp_path: Path) -> None:
    folder = require_sample(DATA.parent / "complete" / "bonn")
    report = cache.ingest("epilepsy", folder, tmp_path / "cache")
    assert (report["exit_code"], report["reason_counts"]) == (0, {"identifier": 1})
    records = list(cache.open_cache(tmp_path / "cache").records())
    assert len(records) == 11_500
    assert Counter(one.attributes["condition"] for one in records) == dict.fromkeys(
        CONDITIONS.values(), 2300
    )
    for one in records[::97]:
        chunk, name = int(one.attributes["chunk"]) - 1, one.subject_id
        (path,) = (path for path in (folder / name[0]).iterdir() if path.stem == name)
        assert (
            one.signals[0].samples.tolist()
            == np.loadtxt(path, dtype=int)[178 * chunk : 178 * (chunk + 1)].tolist()
        )
    with (DATA / "data.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    by_content = {one.signals[0].samples.tobytes(): one for one in records}
    for line in table:
        one = by_content[np.array([int(line[name]) for name in VALUES], np.int16).tobytes()]
        assert one.attributes["condition"] == CONDITIONS[int(line["y"])]
        assert line["Unnamed"].startswith(f"X{one.attributes['chunk']}.")
