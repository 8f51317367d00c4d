"""A user's own files: generic with its mapping file, edf, wfdb, BIDS, mne; the real folders of
unusual files.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.io
from samples import SAMPLES, require_sample

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.datasets import generic
from bitimely_core.errors import Exit, UserError
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.formats.source import scan_folder
from bitimely_core.recordings.template import write_template
from bitimely_core.types import Annotation, Record


def attempt(dataset: str, source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The ingest report, of a refusal too."""
    try:
        return ingest(dataset, source, out, **options)
    except UserError as error:
        report = error.report or {
            "exit_code": int(error.exit_code),
            "reason_counts": {str(error.code): 1},
            "units": [],
            "rows": [],
        }
        return report | {"message": str(error)}


def codes(report: dict[str, Any]) -> set[str]:
    return set(report["reason_counts"])


def ingest_with_map(folder: Path, text: str, out: Path, **options: Any) -> dict[str, Any]:
    """Ingest `folder` with a map."""
    path = folder.parent / "map.toml"
    path.write_text(text)
    return attempt("generic", folder, out, options={"map": str(path)}, **options)


def recordings(cache: Path) -> dict[str, Record]:
    return {record.recording_id: record for record in open_cache(cache).records()}


def physical(record: Record, channel: str) -> np.ndarray:
    (signal,) = [s for s in record.signals if s.channel == channel]
    return signal.samples.astype(np.float64) * signal.scale + signal.offset


def write_edf(
    path: Path,
    seconds: int = 20,
    seed: int = 0,
    unit: str = "uV",
    notes: tuple[Annotation, ...] = (),
) -> np.ndarray:
    channel = edf_header.EdfChannel("EEG Cz", unit, -200.0, 200.0, -2048, 2047, 100)
    other = channel._replace(label="EOG", samples=50)
    rng = np.random.default_rng(seed)
    values = [
        rng.integers(-1000, 1000, seconds * c.samples).astype(np.int16) for c in (channel, other)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    edf_writer.write_edf(path, (channel, other), values, duration=1.0, notes=notes)
    return values[0]


# --- tables and arrays


def write_tables(folder: Path) -> np.ndarray:
    """Four subjects with two recordings each, in csv; labels in recordings.csv."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir(parents=True)
    values = rng.standard_normal((8, 300, 2)).round(5)
    rows = ["recording,patient,diagnosis,hr,sex"]
    for i, table in enumerate(values):
        name = f"p{i // 2}_{i % 2}"
        lines = [f"{k / 50:.4f},{a},{b}" for k, (a, b) in enumerate(table.tolist())]
        (folder / "data" / f"{name}.csv").write_text(
            "t,lead one,lead two\n" + "\n".join(lines) + "\n"
        )
        rows.append(
            f"{name},00{i // 2},{'ill' if i < 4 else 'well'},{60 + i},{'F' if i % 2 else 'n/a'}"
        )
    (folder / "recordings.csv").write_text("\n".join(rows) + "\n")
    return values


MAP = """
[[files]]
pattern = "data/*.csv"
time = "t"
rate = 50
unit = "mV"
channels = {"lead two" = "II", "lead one" = {name = "I", unit = "uV"}}

[table]
path = "recordings.csv"
file = "recording"
subject = "patient"
label = "diagnosis"
value = "hr"
attributes = ["sex"]
"""


def test_tables_with_a_map(tmp_path: Path) -> None:
    values = write_tables(tmp_path / "raw")
    report = ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")
    assert (report["exit_code"], len(report["units"]), codes(report)) == (0, 8, set())
    assert [(rows["file"], rows["seen"], rows["used"]) for rows in report["rows"]] == [
        ("recordings.csv", 8, 8)
    ]
    found = recordings(tmp_path / "cache")
    record = found["data/p1_1"]
    assert (record.subject_id, record.attributes) == (
        "001",
        {"label": "ill", "value": 63.0, "sex": "F"},
    )
    assert [(s.channel, s.unit, s.rate) for s in record.signals] == [
        ("II", "mV", 50.0),
        ("I", "uV", 50.0),
    ]
    np.testing.assert_array_equal(record.signals[0].samples, values[3, :, 1].astype(np.float32))
    assert "sex" not in found["data/p1_0"].attributes
    classes = tokens.build(
        tmp_path / "cache", view="classification", out=tmp_path / "c", window=100
    )
    assert (list(classes.class_names), len(classes), classes.channels) == (["ill", "well"], 24, 2)
    numbers = tokens.build(tmp_path / "cache", view="regression", out=tmp_path / "r")
    assert sorted(numbers.targets(None).tolist()) == [60.0 + i for i in range(8)]
    assert numbers.length == 300  # shorter than ten seconds: the full recording
    by_split = {split: set(classes[split].subjects()) for split in ("train", "validation", "test")}
    assert sum(map(len, by_split.values())) == 4


def test_a_second_run_reads_what_the_map_changes(tmp_path: Path) -> None:
    write_tables(tmp_path / "raw")
    first = ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")
    assert (
        ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")["content_sha256"]
        == first["content_sha256"]
    )
    table = tmp_path / "raw" / "recordings.csv"
    table.write_text(table.read_text().replace("p0_0,000,ill", "p0_0,000,well"))
    assert ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")["exit_code"] == 0
    assert recordings(tmp_path / "cache")["data/p0_0"].attributes["label"] == "well"


def test_parquet_and_npy_give_what_csv_gives(tmp_path: Path) -> None:
    import polars as pl

    values = write_tables(tmp_path / "raw")[0]
    folder = tmp_path / "other"
    folder.mkdir()
    pl.DataFrame({"one": values[:, 0], "two": values[:, 1]}).write_parquet(folder / "a_1.parquet")
    np.save(folder / "b_1.npy", values)
    np.save(folder / "c_1.npy", np.arange(10, dtype=np.int16))
    text = 'files = [{pattern = "c*", rate = 10}, {pattern = "*", match = "(?P<subject>[a-z])_", rate = 50, channels = ["one", "two"]}]'
    report = ingest_with_map(folder, text, tmp_path / "cache")
    # a and b have the same samples
    assert (report["exit_code"], codes(report)) == (0, {"identifier", "duplicate_across_splits"})
    found = recordings(tmp_path / "cache")
    assert (found["a_1"].subject_id, found["b_1"].subject_id, found["c_1"].subject_id) == (
        "a",
        "b",
        "c_1",
    )
    for channel, column in (("one", 0), ("two", 1)):
        np.testing.assert_array_equal(
            physical(found["a_1"], channel), values[:, column].astype(np.float32)
        )
        np.testing.assert_array_equal(
            physical(found["b_1"], channel), values[:, column].astype(np.float32)
        )
    assert found["c_1"].signals[0].samples.dtype == np.int16
    assert found["c_1"].signals[0].rate == 10.0


@pytest.mark.parametrize(("varying", "reported"), [(0, False), (1, True), (2, True)])
def test_equal_recordings_of_two_people_are_reported_unless_every_channel_is_constant(
    tmp_path: Path, varying: int, reported: bool
) -> None:
    values = np.full((2000, 2), 7.0)
    values[:, :varying] = np.random.default_rng(0).normal(size=(2000, varying))
    for name in "ab":
        np.save(tmp_path / f"{name}_1.npy", values)
    text = 'files = [{pattern = "*", match = "(?P<subject>[a-z])_", rate = 50, channels = ["one", "two"]}]'
    report = ingest_with_map(tmp_path, text, tmp_path.parent / f"{tmp_path.name}-cache")
    assert ("duplicate_across_splits" in codes(report)) == reported


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("0.0400,", "0.0400,x", "not_numeric"),
        ("0.0400,", "0.2400,", "sampling_rate"),
        ("0.0400,", "0.0400,7,", "row_width"),
        ("lead one", "lead", "schema"),
    ],
)
def test_a_faulty_table_is_left_out(tmp_path: Path, old: str, new: str, code: str) -> None:
    write_tables(tmp_path / "raw")
    good = ingest_with_map(tmp_path / "raw", MAP, tmp_path / "good")
    path = tmp_path / "raw" / "data" / "p2_0.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    report = ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")
    assert report["exit_code"] == 3
    assert code in codes(report)
    hashes = {unit["unit"]: unit["content_sha256"] for unit in good["units"]}
    assert {u["unit"]: u["content_sha256"] for u in report["units"]} == hashes | {"data/p2_0": None}
    (unit,) = [u for u in report["units"] if u["status"] == "quarantined"]
    assert "p2_0.csv" in unit["reasons"][0]["message"]


def test_empty_cells_are_missing_values(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text("x,y\n1,2\n,4\n5,n/a\n")
    assert (
        ingest_with_map(tmp_path / "raw", "files = [{rate = 4}]", tmp_path / "cache")["exit_code"]
        == 0
    )
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t", normalise="none")
    assert made.mask(None).tolist() == [[[True, True], [False, True], [True, False]]]


def test_a_table_with_a_recording_a_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 20)).round(4)
    lines = ["id,who," + ",".join(f"X{i}" for i in range(1, 21)) + ",y"]
    lines += [
        f"r{i},p{i // 2},{','.join(map(str, row))},{i % 2}" for i, row in enumerate(values.tolist())
    ]
    lines.insert(3, lines[2])  # the same row twice
    lines += [f"r8,p8,{','.join(['1'] * 19)},x,1", "r9,,1" + ",1" * 20]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text("\n".join(lines) + "\n")
    text = "[[files]]\nrate = 10\nunit = 'uV'\nchannels = ['EEG']\nseries = 'X*'\n"
    text += "id_column = 'id'\nsubject_column = 'who'\nlabel_column = 'y'\n"
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert report["exit_code"] == 3
    (rows,) = report["rows"]
    assert (rows["seen"], rows["used"], rows["dropped_by_reason"]) == (9, 6, {"duplicates": 1})
    assert rows["quarantined_by_reason"] == {"not_numeric": 1, "identifier": 1}
    found = recordings(tmp_path / "cache")
    assert sorted(found) == [f"a-r{i}" for i in range(6)]
    assert found["a-r3"].subject_id == "p1"
    np.testing.assert_array_equal(physical(found["a-r3"], "EEG"), values[3].astype(np.float32))
    made = tokens.build(tmp_path / "cache", view="classification", out=tmp_path / "t")
    assert (made.length, list(made.class_names), len(made)) == (20, ["0", "1"], 6)


def test_the_real_table_without_subjects(tmp_path: Path) -> None:
    require_sample(SAMPLES / "esr")
    text = "[[files]]\npattern = 'tfc*'\nrate = 173.6\nseries = 'X*'\nid_column = 'Unnamed'\nlabel_column = 'y'\n"
    path = tmp_path / "map.toml"
    path.write_text(text)
    report = attempt("generic", SAMPLES / "esr", tmp_path / "cache", options={"map": str(path)})
    assert (report["exit_code"], report["rows"][0]["used"]) == (0, 60)
    assert "identifier" in codes(report)
    assert len(tokens.build(tmp_path / "cache", view="classification", out=tmp_path / "t")) == 60


def test_a_table_states_several_classes_and_the_split(tmp_path: Path) -> None:
    folds = ["1-8", "train", "9", "10", "test", "val", "3"]
    (tmp_path / "raw").mkdir()
    for i in range(len(folds)):
        np.save(tmp_path / "raw" / f"r{i}.npy", np.random.default_rng(i).normal(size=(500, 2)))
    cells = [f"r{i},{fold},{i % 2},{int(i > 3)}" for i, fold in enumerate(folds)]
    (tmp_path / "raw" / "t.csv").write_text("\n".join(["record,folds,A,B", *cells]) + "\n")
    text = '[[files]]\nrate = 50\n[table]\npath = "t.csv"\nfile = "record"\nlabels = ["B", "A"]\nsplit = "folds"\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert (report["exit_code"], report["rows"][0]["used"]) == (0, 7)
    windows = tokens.build(
        tmp_path / "cache", view="multilabel", split="official", out=tmp_path / "t"
    )
    splits = dict(zip(windows.index["recording_id"], windows.index["split"], strict=True))
    wanted = ["train", "train", "validation", "test", "test", "validation", "train"]
    assert splits == {f"r{i}": split for i, split in enumerate(wanted)}
    assert windows.class_names == ("A", "B")
    assert np.asarray(windows.targets(None)).tolist() == [
        [i % 2, int(i > 3)] for i in map(int, (r[1:] for r in windows.index["recording_id"]))
    ]
    for old, new in (
        (",1-8,", ",2-9,"),
        (",1-8,0,", ",1-8,2,"),
        (",1-8,0,", ",1-8,,"),
        (",1-8,", ",11,"),
    ):
        (tmp_path / "raw" / "t.csv").write_text(
            "\n".join(["record,folds,A,B", *cells]).replace(old, new) + "\n"
        )
        report = ingest_with_map(tmp_path / "raw", text, tmp_path / "other", force_new=True)
        assert (report["exit_code"], report["rows"][0]["quarantined_by_reason"]) == (
            3,
            {"label": 1},
        )


@pytest.mark.slow
def test_real_records_with_a_table_of_superclasses_and_folds(tmp_path: Path) -> None:
    folder = require_sample(SAMPLES / "complete" / "ptb-xl-499")
    classes = ["NORM", "MI", "STTC", "CD", "HYP"]
    text = f'[[files]]\npattern = "records100/*"\n[table]\npath = "labels.csv"\nfile = "record"\nlabels = {classes}\nsplit = "folds"\n'
    (tmp_path / "map.toml").write_text(text)
    report = attempt(
        "generic", folder, tmp_path / "cache", options={"map": str(tmp_path / "map.toml")}
    )
    assert (report["exit_code"], len(report["units"]), report["rows"][0]["used"]) == (0, 499, 499)
    windows = tokens.build(
        tmp_path / "cache", view="multilabel", split="official", out=tmp_path / "t"
    )
    table = pd.read_csv(folder / "labels.csv", index_col="record")
    found = np.asarray(windows.targets(None))
    splits = {"1-8": "train", "9": "validation", "10": "test"}
    for row, (name, split) in enumerate(
        zip(windows.index["recording_id"], windows.index["split"], strict=True)
    ):
        assert splits[table.loc[name, "folds"]] == split
        assert (
            dict(zip(windows.class_names, found[row], strict=True))
            == table.loc[name, classes].to_dict()
        )


ARRAYS = '[[files]]\npattern = "*.{}"\nrate = 100\n'


def write_array(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".npy":
        with path.open("wb") as file:
            np.save(file, values)
    elif path.suffix.lower() == ".mat":
        with path.open("wb") as file:
            scipy.io.savemat(file, {"sig": values})
    else:
        pd.DataFrame(values).add_prefix("c").to_csv(path, index=False, float_format="%.17g")


@pytest.mark.parametrize("ending", ["npy", "mat", "csv"])
def test_missing_values_of_arrays_are_named(tmp_path: Path, ending: str) -> None:
    values = np.random.default_rng(0).standard_normal((500, 2))
    values[:, 1] = values[3, 0] = np.nan
    write_array(tmp_path / "raw" / f"a.{ending}", values)
    report = ingest_with_map(tmp_path / "raw", ARRAYS.format(ending), tmp_path / "cache")
    (reason,) = report["units"][0]["reasons"]
    whole = "c1" if ending == "csv" else "channel 2"
    assert (report["exit_code"], reason["code"], reason["count"]) == (0, "missing_values", 501)
    assert reason["message"].endswith(f", all of '{whole}', kept as missing (NaN).")
    assert np.isnan(recordings(tmp_path / "cache")["a"].signals[0].samples).nonzero()[
        0
    ].tolist() == [3]


RAMP = np.arange(2000) % 200
OFFSETS = {
    "int32": (RAMP + 2**30).astype(np.int32),
    "int64": (RAMP + 2**50).astype(np.int64),
    "float64": RAMP / 4 + 1e9,
    # one value must not hide what the others lose
    "spike": np.where(np.arange(2000) == 7, 0, RAMP + 2**30).astype(np.int32),
}


@pytest.mark.parametrize(
    ("ending", "kind"), [(ending, kind) for ending in ("npy", "mat", "csv") for kind in OFFSETS]
)
def test_offsets_that_float32_cannot_hold_are_refused(
    tmp_path: Path, ending: str, kind: str
) -> None:
    write_array(tmp_path / "raw" / f"a.{ending}", OFFSETS[kind][:, None])
    report = ingest_with_map(tmp_path / "raw", ARRAYS.format(ending), tmp_path / "cache")
    assert codes(report) == {"physical_range"}
    assert ", of which float32 keeps " in report["units"][0]["reasons"][0]["message"]


def test_numbers_that_float32_holds_are_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal(2000)
    tables = {
        "small": RAMP.astype(np.int32),
        "wide": (noise * 2**29).astype(np.int32),
        "near": RAMP + 1e5,
        "noise": noise,
        "constant": np.full(2000, 2**30 + 1),
        "bytes": RAMP.astype(np.uint8),
        "marker": (np.arange(2000) == 7) * 2**20,
    }
    for name, values in tables.items():
        write_array(tmp_path / "raw" / f"{name}.npy", values)
    report = ingest_with_map(tmp_path / "raw", ARRAYS.format("npy"), tmp_path / "cache")
    assert "physical_range" not in codes(report)
    for name, values in tables.items():
        np.testing.assert_array_equal(
            recordings(tmp_path / "cache")[name].signals[0].samples, values.astype(np.float32)
        )


def test_capitals_of_endings_do_not_count_and_arrays_without_a_group_are_named(
    tmp_path: Path,
) -> None:
    for i, name in enumerate(("in/A.MAT", "in/b.mat", "B/c.mat", "in/d.npy", "in/d.mat")):
        write_array(tmp_path / "raw" / name, np.random.default_rng(i).standard_normal(500))
    report = ingest_with_map(
        tmp_path / "raw", ARRAYS.format("mat").replace("*.", "in/[Ab]."), tmp_path / "cache"
    )
    assert set(recordings(tmp_path / "cache")) == {"in/A", "in/b"}
    left = {
        reason["file"]: reason["examples"]
        for reason in report["reasons"]
        if reason["code"] == "file_name"
    }
    assert left == {"B/c.mat": ["'B/c.mat'", "'in/d.mat'"], "in/d.npy": ["'in/d.npy'"]}
    # in/d.mat is a copy of in/d.npy
    report = ingest_with_map(tmp_path / "raw", ARRAYS.format("NPY"), tmp_path / "copies")
    assert [reason["count"] for reason in report["reasons"] if reason["code"] == "file_name"] == [3]
    assert set(recordings(tmp_path / "copies")) == {"in/d"}


TABLES = """
[[files]]
pattern = "*.npy"
rate = 100
[table]
path = "t.csv"
file = "recording"
subject = "patient"
label = "diagnosis"
[annotations]
path = "a.csv"
file = "recording"
onset = "t"
duration = ""
label = "state"
"""


def test_a_row_is_of_one_recording(tmp_path: Path) -> None:
    """A name that files of several folders have would give one patient's label to another."""
    for i, name in enumerate(("s1/eeg", "s2/eeg", "s3/other", "eeg2", "s1/eeg2")):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "raw" / f"{name}.npy", np.random.default_rng(i).standard_normal(500))
    (tmp_path / "raw" / "t.csv").write_text(
        "recording,patient,diagnosis\neeg,p1,MI\nother.npy,p2,MI\neeg2,p3,N\n"
    )
    (tmp_path / "raw" / "a.csv").write_text("recording,t,state\neeg.npy,0,ill\nother,0,well\n")
    report = ingest_with_map(tmp_path / "raw", TABLES, tmp_path / "cache")
    found = {
        name: (r.subject_id, r.attributes.get("label"), [n.label for n in r.annotations])
        for name, r in recordings(tmp_path / "cache").items()
    }
    assert found == {
        "s1/eeg": ("s1/eeg", None, []),
        "s2/eeg": ("s2/eeg", None, []),
        "s3/other": ("p2", "MI", ["well"]),
        "eeg2": ("p3", "N", []),  # at the root the name is the path
        "s1/eeg2": ("s1/eeg2", None, []),
    }
    lines = [
        reason["message"] for reason in report["reasons"] if reason["code"] == "unmatched_labels"
    ]
    fits = [line for line in lines if "fits 2 recordings: 's1/eeg.npy', 's2/eeg.npy'" in line]
    assert [line.split(" fits")[0] for line in fits] == [
        "t.csv: 'eeg' in the table",
        "a.csv: 'eeg.npy' in the table of annotations",
    ]
    assert not any("have no file here" in line for line in lines)


@pytest.mark.parametrize(
    ("other", "code"),
    [("p1,MI", "duplicates"), ("p1,N", "unmatched_labels"), ("p9,MI", "unmatched_labels")],
)
def test_rows_that_name_one_recording_in_two_ways_are_one_or_none(
    tmp_path: Path, other: str, code: str
) -> None:
    (tmp_path / "raw" / "in").mkdir(parents=True)
    for i in (1, 2):
        np.save(
            tmp_path / "raw" / "in" / f"eeg{i}.npy", np.random.default_rng(i).standard_normal(500)
        )
    (tmp_path / "raw" / "t.csv").write_text(
        f"recording,patient,diagnosis\neeg1,p1,MI\nin/eeg1.npy,{other}\neeg2,p2,N\n"
    )
    report = ingest_with_map(
        tmp_path / "raw", TABLES[: TABLES.index("[annotations]")], tmp_path / "cache"
    )
    found = {
        name: (r.subject_id, r.attributes.get("label"))
        for name, r in recordings(tmp_path / "cache").items()
    }
    assert found == {
        "in/eeg1": ("p1", "MI") if code == "duplicates" else ("in/eeg1", None),
        "in/eeg2": ("p2", "N"),
    }
    messages = [reason["message"] for reason in report["reasons"] if reason["code"] == code]
    assert messages[0].startswith(
        "t.csv: the rows 'in/eeg1.npy', 'eeg1' are of one recording, 'in/eeg1.npy'"
    )


def test_a_table_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "eeg.npy", np.random.default_rng(1).standard_normal(500))
    (tmp_path / "raw" / "t.csv").write_text("recording,patient,diagnosis\n")
    report = ingest_with_map(
        tmp_path / "raw", TABLES[: TABLES.index("[annotations]")], tmp_path / "cache"
    )
    assert "eeg.npy: 1 recordings have no row in the table" in str(
        [reason["message"] for reason in report["reasons"]]
    )


@pytest.mark.parametrize("nights", [(2, 2, 2, 2), (1, 3, 2)])
def test_folders_of_people_that_hold_the_same_are_one_group_of_the_template(
    tmp_path: Path, nights: tuple[int, ...]
) -> None:
    for i, count in enumerate(nights):
        for night in range(count):
            write_edf(tmp_path / "raw" / f"p{i}" / f"night{night}.edf", seed=i)
    text = write_template(scan_folder(tmp_path / "raw"))
    assert text.count("[[files]]") == 1
    line = next(line for line in text.splitlines() if "folder is a person" in line)
    stated = text.replace(line, line.removeprefix("# "))
    report = ingest_with_map(tmp_path / "raw", stated, tmp_path / "cache")
    assert report["exit_code"] == 0
    found = recordings(tmp_path / "cache").values()
    assert Counter(record.subject_id for record in found) == Counter(
        {f"p{i}": count for i, count in enumerate(nights)}
    )


def test_folders_that_hold_other_channels_are_groups_of_the_template(tmp_path: Path) -> None:
    for i in range(3):
        write_edf(tmp_path / "raw" / f"p{i}" / "night.edf", seed=i, notes=())
    rename = tmp_path / "raw" / "p2" / "night.edf"
    rename.write_bytes(rename.read_bytes().replace(b"EEG Cz", b"EEG Pz"))
    assert write_template(scan_folder(tmp_path / "raw")).count("[[files]]") == 3


def test_a_table_beside_the_map_is_asked_for_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "eeg.npy", np.random.default_rng(1).standard_normal(500))
    text, table = (
        TABLES[: TABLES.index("[annotations]")],
        "recording,patient,diagnosis\neeg,p1,ill\n",
    )
    (tmp_path / "t.csv").write_text(table)  # beside the map
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    (reason,) = report["reasons"]
    assert "t.csv' is missing" in reason["message"]
    assert "into the folder of the recordings" in reason["message"]
    (tmp_path / "raw" / "t.csv").write_text(table)  # as it says
    assert ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")["exit_code"] == 0


def test_a_row_of_a_subject_is_of_all_its_recordings(tmp_path: Path) -> None:
    for i, name in enumerate(("rest/p1", "task/p1")):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "raw" / f"{name}.npy", np.random.default_rng(i).standard_normal(500))
    (tmp_path / "raw" / "t.csv").write_text("person,diagnosis\np1,MI\n")
    text = '[[files]]\nrate = 100\nmatch = "/(?P<subject>p[0-9]+)"\n[table]\npath = "t.csv"\nsubject = "person"\nlabel = "diagnosis"\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert codes(report) == set()
    assert {
        (r.subject_id, r.attributes["label"]) for r in recordings(tmp_path / "cache").values()
    } == {("p1", "MI")}
    (tmp_path / "raw" / "a.csv").write_text("recording,t,state\np1,0,ill\n")
    report = ingest_with_map(
        tmp_path / "raw", text + TABLES[TABLES.index("[annotations]") :], tmp_path / "cache"
    )
    assert [reason["message"].split(" fits")[0] for reason in report["reasons"]] == [
        "a.csv: 'p1' in the table of annotations"
    ]
    assert not any(r.annotations for r in recordings(tmp_path / "cache").values())


def test_faults_of_the_tables_beside_are_rows(tmp_path: Path) -> None:
    write_tables(tmp_path / "raw")
    table = tmp_path / "raw" / "recordings.csv"
    table.write_text(table.read_text().replace(",61,", ",fast,") + "p9_9,9,well,70,F\n")
    report = ingest_with_map(tmp_path / "raw", MAP, tmp_path / "cache")
    assert report["exit_code"] == 3
    assert report["rows"][0]["quarantined_by_reason"] == {"not_numeric": 1}
    assert "unmatched_labels" in codes(report)
    assert "fast" not in json.dumps(report)


def test_arrays_of_objects_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "a.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    np.save(tmp_path / "raw" / "b.npy", np.ones(100))
    data = (tmp_path / "raw" / "b.npy").read_bytes()
    (tmp_path / "raw" / "c.npy").write_bytes(data[:200])
    (tmp_path / "raw" / "d.npy").write_bytes(pickle.dumps([1]))
    report = ingest_with_map(
        tmp_path / "raw", "files = [{rate = 4}]", tmp_path / "cache", max_bad=1.0
    )
    codes = {u["unit"]: [r["code"] for r in u["reasons"]] for u in report["units"]}
    assert codes == {"a": ["unsafe_pickle"], "b": [], "c": ["corrupt"], "d": ["unsafe_pickle"]}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[files]]\npatern = 'x'", "pattern"),
        ("[[files]]\nmatch = '('", "regular expression"),
        ("[[files]]\nmatch = '(?=x)'", "(?=x)"),
        ("[[files]]\nrate = -1", "rate"),
        ("[table]\npath = 'x.csv'", "file"),
        ("files = 3", "files"),
        ("[[files]]\nchannels = {x = {nmae = 'y'}}", "name"),
        ("x =", "TOML"),
    ],
)
def test_a_map_with_a_mistake_is_refused_by_its_key(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "x.csv").write_text("a\n1\n")
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert report["exit_code"] == Exit.USAGE
    assert wanted in report["message"]


def test_groups_of_a_path_are_those_of_python_in_time_linear_in_the_path() -> None:
    from bitimely_core.recordings.mapping import search_groups

    for pattern, path in (
        (r"(?P<subject>s\d+)/(?P<label>[a-z]+)?_x", "raw/s12/abc_x.csv"),
        (r"(?P<subject>s\d+)/(?:(?P<label>q+)|y)", "s12/y"),
        (r"p(?P<subject>.)(.)", "sub-päö"),
        ("x", "y"),
    ):
        match = re.search(pattern, path)
        groups = match.groupdict() if match else {}
        known = {name: text for name, text in groups.items() if text is not None}
        assert search_groups(pattern, path) == known
    # Python's engine would need more than the age of the universe
    assert search_groups("(a+)+$", "a" * 4000 + "b") == {}


# --- numbers over time


NUMBERS = """
[[files]]
match = "p(?P<subject>.)"
rate = 100
channels = ["PPG"]
[annotations]
path = "numbers.csv"
file = "recording"
onset = "t"
"""


def ingest_numbers(folder: Path, rows: str, more: str, people: int = 1) -> dict[str, Any]:
    """Recordings of 60 s at 100 Hz, with a table of numbers."""
    raw = folder / "raw"
    raw.mkdir()
    for i in range(people):
        np.save(raw / f"p{i}.npy", np.random.default_rng(i).normal(size=6000).astype(np.float32))
    (raw / "numbers.csv").write_text(rows)
    return ingest_with_map(raw, NUMBERS + more, folder / "cache")


def test_a_window_has_the_mean_of_the_numbers_over_it(tmp_path: Path) -> None:
    """Windows of 10 s: full cover, two values in unequal shares, half covered, less than half, both
    raters, nothing.
    """
    rows = "recording,t,seconds,hr\np0,0,10,60\np0,10,7,70\np0,17,3,80.5\np0,20,5,90\np0,30,4.9,50\np0,40,10,1e2\np0,45,5,40\n"
    report = ingest_numbers(
        tmp_path, rows, 'duration = "seconds"\nvalue = "hr"\n[labels]\nx = "y"\n'
    )
    assert (report["exit_code"], report["reason_counts"]) == (0, {})
    made = tokens.build(tmp_path / "cache", view="values", out=tmp_path / "t")
    assert made.task == "regression"
    assert made.index["start"].to_list() == [0.0, 10.0, 20.0, 40.0]
    targets = made.targets()
    assert targets is not None
    np.testing.assert_allclose(
        targets, [60, 0.7 * 70 + 0.3 * 80.5, 90, (10 * 100 + 5 * 40) / 15], rtol=1e-6
    )
    assert made.manifest.left_out == {"unmeasured_windows": 2}
    fine = tokens.build(
        tmp_path / "cache", view="values", out=tmp_path / "fine", window=200, stride=37
    )
    notes = [
        (a.onset, a.onset + a.duration, float(a.label))
        for a in recordings(tmp_path / "cache")["p0"].annotations
    ]
    for start, label in fine.index.select("start", "label").iter_rows():
        shares = [max(0.0, min(start + 2, stop) - max(start, begin)) for begin, stop, _ in notes]
        assert label == pytest.approx(
            np.dot(shares, [value for *_, value in notes]) / sum(shares), rel=1e-9
        )


def test_numbers_without_durations_hold_until_the_next_row(tmp_path: Path) -> None:
    """An empty cell ends what held; the last number holds to the end of the recording; rows may
    come in any order.
    """
    rows = "recording,t,hr\np0,20,80\np0,0,60\np0,35,\np0,10,70\np0,50,90\np1,0,55\nnobody,0,1\n"
    report = ingest_numbers(tmp_path, rows, 'duration = ""\nvalue = "hr"\n', people=3)
    assert (report["exit_code"], codes(report)) == (0, {"unmatched_labels", "missing_values"})
    assert recordings(tmp_path / "cache")["p0"].annotations == [
        Annotation(0.0, 10.0, "60.0"),
        Annotation(10.0, 10.0, "70.0"),
        Annotation(20.0, 15.0, "80.0"),
        Annotation(50.0, 10.0, "90.0"),
    ]
    made = tokens.build(tmp_path / "cache", view="values", out=tmp_path / "t")
    assert made.index.select("recording_id", "start", "label").rows() == [
        *zip(
            ["p0"] * 5, [0.0, 10.0, 20.0, 30.0, 50.0], [60.0, 70.0, 80.0, 80.0, 90.0], strict=True
        ),
        *[("p1", 10.0 * i, 55.0) for i in range(6)],
    ]
    assert made.manifest.left_out == {"unmatched_labels": 1, "unmeasured_windows": 1}
    assert made.class_names == ()


def test_rows_that_are_not_numbers_are_counted(tmp_path: Path) -> None:
    rows = (
        "recording,t,seconds,hr\np0,0,10,60\np0,10,10,fast\np0,20,0,70\np0,x,10,70\np0,30,-1,70\n"
        + "p0,40,1,70\n" * 5
    )
    report = ingest_numbers(tmp_path, rows, 'duration = "seconds"\nvalue = "hr"\n')
    assert report["exit_code"] == Exit.PARTIAL
    (account,) = report["rows"]
    assert (account["seen"], account["used"], account["quarantined_by_reason"]) == (
        10,
        6,
        {"not_numeric": 1, "annotation_syntax": 3},
    )


def test_texts_are_no_numbers(tmp_path: Path) -> None:
    """A table of labels gives no number to the view of numbers; labels without durations hold,
    too.
    """
    report = ingest_numbers(
        tmp_path, "recording,t,label\np0,0,calm\np0,30,busy\n", 'duration = ""\n'
    )
    assert report["exit_code"] == 0
    assert recordings(tmp_path / "cache")["p0"].annotations == [
        Annotation(0.0, 30.0, "calm"),
        Annotation(30.0, 30.0, "busy"),
    ]
    with pytest.raises(UserError, match="no window fits"):
        tokens.build(tmp_path / "cache", view="values", out=tmp_path / "t")


# --- formats that say more themselves


def test_edf_and_annotations_by_a_map(tmp_path: Path) -> None:
    notes = (
        Annotation(0.0, 5.0, "A"),
        Annotation(5.0, 10.0, "B"),
        Annotation(3.0, 0.0, "Mrs Doe coughs"),
        Annotation(15.0, 20.0, "A"),
    )
    values = write_edf(tmp_path / "raw" / "p1" / "n1.edf", notes=notes)
    write_edf(tmp_path / "raw" / "p1" / "n2.edf", seed=1, notes=notes[:2])
    text = '[[files]]\nmatch = "(?P<subject>p\\\\d+)/"\nchannels = {"EEG Cz" = {name = "EEG", unit = "mV"}}\n[labels]\nA = "calm"\nB = "busy"\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (0, {"unknown_label", "annotation_out_of_range"})
    record = recordings(tmp_path / "cache")["p1/n1"]
    assert record.subject_id == "p1"
    assert record.annotations == [
        Annotation(0.0, 5.0, "calm"),
        Annotation(5.0, 10.0, "busy"),
        Annotation(15.0, 5.0, "calm"),
    ]
    (signal,) = record.signals
    np.testing.assert_array_equal(signal.samples, values)
    assert (signal.channel, signal.unit) == ("EEG", "mV")
    np.testing.assert_allclose(
        physical(record, "EEG"), ((values + 2048.0) * 400 / 4095 - 200) / 1000, atol=1e-9
    )
    made = tokens.build(tmp_path / "cache", view="annotations", out=tmp_path / "t")
    assert (made.length, list(made.class_names), len(made)) == (500, ["busy", "calm"], 7)
    assert b"Doe" not in b"".join(
        path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ('channels = ["EEG Fz"]', "missing_channel"),
        ("rate = 200", "sampling_rate"),
        ('unit = "mmHg"', "unit"),
    ],
)
def test_the_map_is_compared_with_the_file(tmp_path: Path, files: str, code: str) -> None:
    write_edf(tmp_path / "raw" / "a.edf")
    assert ingest_with_map(tmp_path / "raw", f"[[files]]\n{files}\n", tmp_path / "cache")[
        "reason_counts"
    ] == {code: 1}


def test_edf_keeps_texts_only_with_keep_phi(tmp_path: Path) -> None:
    write_edf(tmp_path / "raw" / "a.edf", notes=(Annotation(1.0, 2.0, "x"),))
    write_edf(tmp_path / "raw" / "a.copy.edf", seed=3)
    assert attempt("edf", tmp_path / "raw", tmp_path / "plain")["exit_code"] == 0
    assert recordings(tmp_path / "plain")["a"].annotations == []
    with pytest.raises(UserError, match="no recording has an annotation"):
        tokens.build(tmp_path / "plain", view="annotations", out=tmp_path / "none")
    attempt("edf", tmp_path / "raw", tmp_path / "kept", keep_phi=True)
    assert recordings(tmp_path / "kept")["a"].annotations == [Annotation(1.0, 2.0, "x")]
    made = tokens.build(tmp_path / "plain", out=tmp_path / "t")
    assert (made.length, made.rate, list(made.channel_names), len(made)) == (
        1000,
        100.0,
        ["EEG Cz", "EOG"],
        4,
    )


def test_files_of_one_name_are_two_units(tmp_path: Path) -> None:
    write_edf(tmp_path / "a.edf")
    write_edf(tmp_path / "a.EDF", seed=1)
    write_edf(tmp_path / "b.edf", seed=2)
    names = {
        item.name
        for item in generic.edf(scan_folder(tmp_path), {})
        if isinstance(item, generic.IngestUnit)
    }
    assert names == {"a.EDF", "a.edf", "b"}


def test_a_bids_folder(tmp_path: Path) -> None:
    root = tmp_path / "bids"
    for i in (1, 2, 3):
        stem = root / f"sub-0{i}" / "eeg" / f"sub-0{i}_task-rest"
        write_edf(Path(f"{stem}_eeg.edf"), seed=i)
        Path(f"{stem}_events.tsv").write_text(
            "onset\tduration\ttrial_type\n0\t2\topen\n4.0\t2\tclosed\n8\tn/a\tclick\n"
        )
    write_edf(root / "derivatives" / "clean" / "sub-01_eeg.edf")
    (root / "dataset_description.json").write_text("{}")
    (root / "participants.tsv").write_text(
        "participant_id\tage\tsex\tname\nsub-01\t30\tF\tAnn\nsub-02\tn/a\tM\tBen\nsub-03\t50\tM\tCem\n"
    )
    report = attempt("generic", root, tmp_path / "cache")
    assert (report["exit_code"], len(report["units"]), codes(report)) == (0, 3, set())
    found = recordings(tmp_path / "cache")
    record = found["sub-01/eeg/sub-01_task-rest_eeg"]
    assert (record.subject_id, record.attributes) == ("01", {"age": "30", "sex": "F"})
    assert [note.label for note in record.annotations] == ["open", "closed", "click"]
    assert found["sub-02/eeg/sub-02_task-rest_eeg"].attributes == {"sex": "M"}
    made = tokens.build(tmp_path / "cache", view="annotations", out=tmp_path / "t")
    assert (made.length, len(made), list(made.class_names)) == (200, 6, ["closed", "open"])
    events = root / "sub-02" / "eeg" / "sub-02_task-rest_events.tsv"
    events.write_text("onset\tduration\ttrial_type\nsoon\t2\topen\n")
    report = attempt("generic", root, tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (3, {"annotation_syntax"})


def test_other_formats_go_through_mne(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mne

        rng = np.random.default_rng(0)
        volts = rng.standard_normal((2, 500)) * 1e-5
        raw = mne.io.RawArray(
            volts, mne.create_info(["Cz", "aux"], 100.0, ["eeg", "misc"]), verbose="ERROR"
        )
        raw.set_annotations(mne.Annotations([1.0], [2.0], ["open"]))
        (tmp_path / "raw").mkdir()
        raw.save(tmp_path / "raw" / "s1_raw.fif", verbose="ERROR")
    report = ingest_with_map(tmp_path / "raw", "[labels]\nopen = 'open'\n", tmp_path / "cache")
    assert report["exit_code"] == 0
    record = recordings(tmp_path / "cache")["s1_raw"]
    np.testing.assert_allclose(physical(record, "Cz"), volts[0] * 1e6, rtol=1e-6)
    np.testing.assert_allclose(physical(record, "aux"), volts[1], rtol=1e-6)
    assert [s.unit for s in record.signals] == ["uV", ""]
    assert record.annotations == [Annotation(1.0, 2.0, "open")]
    (tmp_path / "raw" / "s1_raw.fif").write_bytes(b"\0" * 100)
    assert codes(
        ingest_with_map(tmp_path / "raw", "[labels]\nopen = 'open'\n", tmp_path / "cache")
    ) == {"corrupt"}


def test_brainvision_headers_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    header = "Brain Vision Data Exchange Header File Version 1.0\n[Common Infos]\nDataFile={}\nMarkerFile=a.vmrk\nDataFormat=BINARY\nDataOrientation=MULTIPLEXED\n"
    header += "NumberOfChannels=1\nSamplingInterval=10000\n[Binary Infos]\nBinaryFormat=INT_16\n[Channel Infos]\nCh1=Cz,,0.5,µV\n"
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.vhdr").write_text(header.format("a.eeg"))
    (tmp_path / "raw" / "a.eeg").write_bytes(np.arange(100, dtype="<i2").tobytes())
    (tmp_path / "raw" / "a.vmrk").write_text(
        "Brain Vision Data Exchange Marker File, Version 1.0\n[Common Infos]\nDataFile=a.eeg\n[Marker Infos]\n"
    )
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    assert report["units"][0]["files"] == ["a.vhdr", "a.eeg", "a.vmrk"]
    np.testing.assert_allclose(
        physical(recordings(tmp_path / "cache")["a"], "Cz"), np.arange(100) * 0.5, rtol=1e-6
    )
    (tmp_path / "raw" / "a.vhdr").write_text(header.format("../secret.eeg"))
    assert codes(attempt("generic", tmp_path / "raw", tmp_path / "cache")) == {"path_escape"}


# --- the real samples


@pytest.mark.parametrize(
    ("dataset", "folder", "exit_code", "landed", "quarantined"),
    [
        ("edf", "robust/edf", 3, 8, {"test_edfann": "no_input"}),
        ("edf", "robust/corrupt", 3, 2, {"empty": "empty_file", "psg_header_only": "truncated"}),
        ("wfdb", "robust/wfdb", 3, 8, {"12726": "missing_signal_file"}),
        ("wfdb", "robust/wfdb-multi", 0, 3, {}),
    ],
)
def test_real_folders_of_unusual_files(
    tmp_path: Path,
    dataset: str,
    folder: str,
    exit_code: int,
    landed: int,
    quarantined: dict[str, str],
) -> None:
    require_sample(SAMPLES / folder)
    report = attempt(dataset, SAMPLES / folder, tmp_path / "cache")
    assert report["exit_code"] == exit_code
    bad = {
        u["unit"]: u["reasons"][0]["code"] for u in report["units"] if u["status"] == "quarantined"
    }
    assert bad == quarantined
    assert len(recordings(tmp_path / "cache")) == landed
    again = attempt(dataset, SAMPLES / folder, tmp_path / "cache")
    assert again["content_sha256"] == report["content_sha256"]


def test_a_repaired_record_is_picked_up(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    samples = np.arange(50, dtype="<i2")
    (raw / "r.hea").write_text(f"r 1 100 50\nr.dat 16 200/mV 16 0 0 {int(samples.sum())} 0 I\n")
    assert codes(attempt("wfdb", raw, tmp_path / "cache")) == {"missing_signal_file"}
    (raw / "r.dat").write_bytes(samples.tobytes())
    report = attempt("wfdb", raw, tmp_path / "cache")
    assert (report["exit_code"], report["units"][0]["files"]) == (0, ["r.hea", "r.dat"])
    np.testing.assert_allclose(physical(recordings(tmp_path / "cache")["r"], "I"), samples / 200)


@pytest.mark.parametrize("name", ["night", "good_hypnogram"])
def test_an_array_with_an_open_bracket_in_its_head_does_not_stop_the_others(
    tmp_path: Path, name: str
) -> None:
    """As a recording and as labels beside one; numpy tokenizes such a head as Python."""
    raw = tmp_path / "raw"
    raw.mkdir()
    np.save(raw / "good.npy", np.random.default_rng(0).normal(size=(500, 2)))
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': ("
    start = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little")
    (raw / f"{name}.npy").write_bytes(start + head)
    ingest_with_map(raw, ARRAYS.format("npy"), tmp_path / "cache")
    assert recordings(tmp_path / "cache").keys() == {"good"}
