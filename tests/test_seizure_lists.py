"""Lists of seizures beside recordings, as CHB-MIT and Siena have them: against the written times."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyedflib
import pytest
import wfdb

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.tokens import open_tokens

RATE, SECONDS = 64, 120
CHB = """Data Sampling Rate: 256 Hz
*************************

Channels in EDF Files:
**********************
Channel 1: FP1-F7
Channel 2: F7-T7

File Name: chb01_01.edf
File Start Time: 11:42:54
File End Time: 11:44:54
Number of Seizures in File: 0

File Name: chb01_03.edf
File Start Time: 13:43:04
File End Time: 13:45:04
Number of Seizures in File: 1
Seizure Start Time: 30 seconds
Seizure End Time: 60 seconds

File Name: chb01_04.edf
Number of Seizures in File: 2
Seizure 1 Start Time: 10 seconds
Seizure 1 End Time: 20 seconds
Seizure 2 Start Time:             80 seconds
Seizure 2 End Time:             120 seconds
"""
SIENA = """Data Sampling Rate: 512 Hz
Channel 1: EEG Fp1

Seizure n 1
File name: PN00-1.edf
Registration start time: 23.59.33
Registration end time:  00.01.33
Seizure start time: 00.00.03\x20
Seizure end time: 00:00:43
"""
TRUTH = {
    "chb01_01": [],
    "chb01_03": [(30, 60)],
    "chb01_04": [(10, 20), (80, 120)],
    "PN00-1": [(30, 70)],
}


def write_edf(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = pyedflib.EdfWriter(str(path), 2)
    limits = {"physical_min": -500, "physical_max": 500}
    limits |= {"digital_min": -32768, "digital_max": 32767}
    about = {"dimension": "uV", "sample_frequency": RATE, "transducer": "", "prefilter": ""}
    writer.setSignalHeaders([{"label": name, **about, **limits} for name in ("FP1-F7", "F7-T7")])
    draw = np.random.default_rng([*path.name.encode()])
    writer.writeSamples([draw.normal(0, 50, RATE * SECONDS) for _ in range(2)])
    writer.close()


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    for name in TRUTH:
        write_edf(folder / name[:5] / f"{name}.edf")
    (folder / "chb01" / "chb01-summary.txt").write_text(CHB)
    (folder / "PN00-" / "Seizures-list-PN00.txt").write_text(SIENA)
    return folder


def ingest(raw: Path, *words: str) -> dict[str, list[tuple[float, float, str]]]:
    home = raw.parent / "home"
    assert main(["ingest", "generic", str(raw), "-w", str(home), "--force-new", *words]) == 0
    records = open_cache(home / "cache" / "generic").records()
    return {r.recording_id: [tuple(note) for note in r.annotations] for r in records}


def list_seizures(notes: list[tuple[float, float, str]]) -> list[tuple[float, float]]:
    return [(onset, onset + length) for onset, length, label in notes if label == "seizure"]


def test_windows_are_seizures_where_the_lists_say_so(raw: Path) -> None:
    read = ingest(raw)
    assert {name.split("/")[-1]: list_seizures(notes) for name, notes in read.items()} == TRUTH
    home = raw.parent / "home"
    words = ["tokenize", "generic/annotations", "--window", str(10 * RATE), "-w", str(home)]
    assert main(words) == 0
    windows = open_tokens(home / "tokens" / "generic-annotations")
    assert list(windows.class_names) == ["no seizure", "seizure"]
    index = windows.index
    assert len(index) == len(TRUTH) * SECONDS // 10, "all of the time has a label"
    for name, start, target in zip(
        index["recording_id"], index["start"], windows.targets(None), strict=True
    ):
        spans = TRUTH[name.split("/")[-1]]
        assert target == any(onset <= start < end for onset, end in spans), (name, start)


def test_annotations_of_wfdb_beside_a_list_are_not_a_second_label(raw: Path) -> None:
    marks = np.array([30 * RATE, 60 * RATE])
    wfdb.wrann("x", "seizures", marks, symbol=["[", "]"], write_dir=str(raw))
    shutil.move(raw / "x.seizures", raw / "chb01" / "chb01_03.edf.seizures")
    labels = {label for notes in ingest(raw).values() for _, _, label in notes}
    assert labels == {"seizure", "no seizure"}


def test_a_time_that_does_not_read_leaves_its_recording_without_labels(
    raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no seizure is not known there, and the others are read."""
    path = raw / "chb01" / "chb01-summary.txt"
    path.write_text(CHB.replace("Seizure End Time: 60 seconds", "Seizure End Time: later"))
    read = {name.split("/")[-1]: notes for name, notes in ingest(raw).items()}
    assert read["chb01_03"] == []
    assert list_seizures(read["chb01_04"]) == TRUTH["chb01_04"]
    output = capsys.readouterr()
    text = " ".join(f"{output.err} {output.out}".split())
    assert "chb01-summary.txt: states no times that read for the seizures of chb01/chb01_03" in text
    assert "rows dropped: 1 of 'chb01/chb01-summary.txt'" in text


def test_a_table_of_the_map_goes_before_lists(raw: Path) -> None:
    (raw / "notes.csv").write_text("file,onset,duration,label\nchb01_01.edf,5,10,spike\n")
    rule = '[annotations]\npath = "notes.csv"\nfile = "file"\nonset = "onset"\n'
    path = raw.parent / "map.toml"
    path.write_text(rule + 'duration = "duration"\nlabel = "label"\n')
    read = {name.split("/")[-1]: notes for name, notes in ingest(raw, "--map", str(path)).items()}
    assert read["chb01_01"] == [(5, 10, "spike")]
    assert read["chb01_03"] == []
