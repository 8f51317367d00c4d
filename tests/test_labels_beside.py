"""Labels beside recordings: which file is whose, in which form, by which words and by whom.

Expected values are written out, or read by pandas, pyedflib and wfdb.
"""

from __future__ import annotations

import json
import re
import warnings
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyedflib
import pytest
from samples import SAMPLES, require_sample
from scipy.io import savemat
from test_generic import attempt, ingest_with_map, recordings

from bitimely_core import tokens
from bitimely_core.formats.edf_hypnogram import encode_hypnogram
from bitimely_core.formats.label_files import parse_label_text
from bitimely_core.formats.stage_texts import name_stage
from bitimely_core.types import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

START = datetime(2020, 3, 1, 23, 59, 0)
Note = tuple[float, float, str]


def write_night(
    path: Path,
    seconds: int = 150,
    notes: tuple[Note, ...] = (),
    start: datetime = START,
    rate: int = 100,
) -> None:
    """One channel of noise, `rate` in Hz, written by pyedflib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyedflib.EdfWriter(str(path), 1, file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
        writer.setStartdatetime(start)
        writer.setSignalHeader(
            0,
            {
                "label": "EEG C4",
                "dimension": "uV",
                "sample_frequency": rate,
                "physical_min": -200.0,
                "physical_max": 200.0,
                "digital_min": -2048,
                "digital_max": 2047,
                "transducer": "",
                "prefilter": "",
            },
        )
        seed = [*path.name.encode()]
        writer.writeSamples([np.random.default_rng(seed).normal(0, 20, seconds * rate)])
        for note in notes:
            writer.writeAnnotation(*note)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def labels(record: Record) -> list[Note]:
    return [(round(n.onset, 3), round(n.duration, 3), n.label) for n in record.annotations]


def messages(report: dict[str, Any]) -> str:
    """All that the report says, of the folder and of its units."""
    reasons = [*report["reasons"], *(r for unit in report["units"] for r in unit["reasons"])]
    return "\n".join(f"{reason['level']}: {reason['message']}" for reason in reasons)


STAGES = [(30.0 * i, 30.0, stage) for i, stage in enumerate(["W", "N1", "N2", "N2", "REM"])]
CLOCKS = ["23:59:00", "23:59:30", "00:00:00", "00:00:30", "00:01:00"]
WORDS = ["Wake", "N1", "N2", "N2", "REM"]
SECONDS_1970 = int(START.replace(tzinfo=UTC).timestamp())
DIGITS = "01225"


# --- forms


FORMS = {
    "words a line": "\n".join(["W", "N1", "N2", "N2", "R"]),
    "digits a line below a name": "Stage\n" + "\n".join(DIGITS) + "\n",
    "comments and blank lines": "# scored by hand\n\n" + "\n\n".join(DIGITS),
    "yasa": "Epoch,Stage\n"
    + "".join(f"{i},{w}\n" for i, w in enumerate(["W", "N1", "N2", "N2", "R"])),
    "epochs from 1": "epoch;stage\n" + "".join(f"{i + 1};{d}\n" for i, d in enumerate(DIGITS)),
    "mne": "# MNE-Annotations\n# onset, duration, description\n"
    + "".join(
        f"{30 * i}.0, 30.0, Sleep stage {w}\n" for i, w in enumerate(["W", "1", "2", "2", "R"])
    ),
    "onset and digit without names": "".join(f"{30 * i} {d}\n" for i, d in enumerate(DIGITS)),
    "stage and times": "start,end,stage\n"
    + "".join(f"{30 * i},{30 * i + 30},{w}\n" for i, w in enumerate(WORDS)),
    "milliseconds": "onset_ms,duration_ms,label\n"
    + "".join(f"{30000 * i},30000,{w}\n" for i, w in enumerate(WORDS)),
    "decimal commas": "Onset;Dauer;Stadium\n"
    + "".join(f"{30 * i},0;30,0;{w}\n" for i, w in enumerate(WORDS)),
    "a change of stage a row": "onset,stage\n0,W\n30,N1\n60,N2\n120,REM\n",
    "clock times over midnight": "Time\tStage\n"
    + "".join(f"{c}\t{w}\n" for c, w in zip(CLOCKS, WORDS, strict=True)),
    "clock times of twelve hours": "11:59:00 PM,W\n11:59:30 PM,N1\n12:00:00 AM,N2\n12:00:30 AM,N2\n"
    "12:01:00 AM,R\n",
    "dates": "".join(
        f"2020-03-0{1 + (i > 1)}T{c}.000,30,{w}\n"
        for i, (c, w) in enumerate(zip(CLOCKS, WORDS, strict=True))
    ),
    "remlogic": "RemLogic Event Export\nPatient:\tJane Doe\nRecording Date:\t01/03/2020\n\n"
    "Sleep Stage\tPosition\tTime [hh:mm:ss]\tEvent\tDuration[s]\tLocation\n"
    + "".join(
        f"{w}\tSupine\t{c}\tSLEEP-{s}\t30\tROC-LOC\n"
        for c, w, s in zip(
            CLOCKS, ["W", "S1", "S2", "S2", "R"], ["S0", "S1", "S2", "S2", "REM"], strict=True
        )
    ),
    "luna": "class\tinstance\tchannel\tstart\tstop\tmeta\n"
    + "".join(
        f"{w}\t.\t.\t0+00:0{i // 2}:{30 * (i % 2):02d}\te:{i + 1}\tnote=Doe\n"
        for i, w in enumerate(["W", "N1", "N2", "N2", "R"])
    ),
    "luna with classes above": "# N1 | a stage\n# N2 | another\n"
    + "".join(
        f"{w} . . {30 * i} {30 * i + 30} .\n" for i, w in enumerate(["W", "N1", "N2", "N2", "R"])
    ),
    "dates with a time zone": "time,stage\n"
    + "".join(
        f"2020-03-0{1 + (i > 1)}T{c}+01:00,{w}\n"
        for i, (c, w) in enumerate(zip(CLOCKS, WORDS, strict=True))
    ),
    "seconds since 1970": "timestamp,stage\n"
    + "".join(f"{SECONDS_1970 + 30 * i},{w}\n" for i, w in enumerate(WORDS)),
    "milliseconds since 1970": "start,end,stage\n"
    + "".join(
        f"{1000 * (SECONDS_1970 + 30 * i)},{1000 * (SECONDS_1970 + 30 * i + 30)},{w}\n"
        for i, w in enumerate(WORDS)
    ),
    "microseconds since 1970 and seconds": "timestamp,duration,stage\n"
    + "".join(f"{SECONDS_1970 + 30 * i}000000,30,{w}\n" for i, w in enumerate(WORDS)),
    "a column named by its scorer": "onset,duration,stage_hum\n"
    + "".join(f"{30 * i},30,{w}\n" for i, w in enumerate(WORDS)),
    "clock times with points": "Uhrzeit;Schlafstadium\n"
    + "".join(f"{c.replace(':', '.')};{w}\n" for c, w in zip(CLOCKS, WORDS, strict=True)),
    "durations of minutes and seconds": "Start time,Duration,Stage\n"
    + "".join(f"{c},0:30,{w}\n" for c, w in zip(CLOCKS, WORDS, strict=True)),
    "times of day in days": "start,end,stage\n"
    + "".join(
        f"{(86340 + 30 * i) / 86400 % 1:.9f},{(86370 + 30 * i) / 86400 % 1:.9f},{w}\n"
        for i, w in enumerate(WORDS)
    ),
    "dates in days": "start,duration,stage\n"
    + "".join(f"{43891 + (86340 + 30 * i) / 86400:.9f},30,{w}\n" for i, w in enumerate(WORDS)),
    "line ends of old computers": "\r".join(DIGITS),
    "somnomedics": "Signal ID: SchlafProfil\\profil\nStart Time: 01.03.2020 23:59:00\nUnit: \n"
    "Signal Type: Discret\nEvents list: N4,N3,N2,N1,Rem,Wach,Artefakt\nRate: 30 s\n\n"
    + "".join(f"{c},000; {w}\n" for c, w in zip(CLOCKS, ["Wach", *WORDS[1:4], "Rem"], strict=True)),
    "visbrain": "*Duration_sec\t150\n*Datafile\tnone\n"
    "Wake\t30\nN1\t60\nN2\t90\nN2\t120\nREM\t150\n",
    "elan": "time_base 30\nsampling_period 1.0/100\nepoch_nb 5\nepoch_list\n0\n1\n2\n2\n5\n",
    "seconds of a wearable": "dateTime,level,seconds\n"
    + "".join(
        f"2020-03-0{1 + (i > 1)}T{c}.000,{w},30\n"
        for i, (c, w) in enumerate(zip(CLOCKS, ["wake", *WORDS[1:4], "rem"], strict=True))
    ),
    "beginnings, ends and how sure": "version = tse_v1.0.0\n\n"
    + "".join(f"{30 * i}.0000 {30 * i + 30}.0000 {w} 1.0000\n" for i, w in enumerate(WORDS)),
    "beginnings and ends": "".join(
        f"{30 * i:.3f}\t{30 * i + 30:.3f}\t{w}\n" for i, w in enumerate(WORDS)
    ),
    "luna without names": "".join(
        f"{w}\t.\t.\t{30 * i}\t{30 * i + 30}\t.\n"
        for i, w in enumerate(["W", "N1", "N2", "N2", "R"])
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_text_forms_are_known_by_their_content(tmp_path: Path, form: str) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    write(tmp_path / "raw" / "s1.txt", FORMS[form])
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    found = labels(recordings(tmp_path / "cache")["s1"])
    if form == "a change of stage a row":
        assert found == [STAGES[0], STAGES[1], (60.0, 60.0, "N2"), STAGES[4]]
    else:
        assert found == STAGES
    assert report["units"][0]["files"] == ["s1.edf", "s1.txt"]
    assert "Doe" not in messages(report)


@pytest.mark.parametrize(
    "text",
    [
        "t,x,y\n0,1,2\n1,2,3\n2,3,4\n",
        "0.1\n0.2\n0.5\n",
        "1544027000.0,1544027000.0,1544027000.0\n32.0,32.0,32.0\n"
        + "".join(f"{i % 9},0,10\n" for i in range(20)),
        "rate 30\nW\n",
        "12\n500\n31\n",
        "time,hr\n0,61\n30,62\n60,63\n",
        "0,61\n30,70\n60,66\n",
        "0,1\n0.4,2\n1.1,0\n",
        "This is a night of subject 1.\nIt was scored, twice, by hand.\n",
        "name\ttype\tunits\nEEG\tEEG\tuV\nEOG\tEOG\tuV\n",
        "",
        "5\n",
    ],
)
def test_samples_and_prose_are_no_labels(text: str) -> None:
    assert parse_label_text(text) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_scored_events_of_profusion(tmp_path: Path, encoding: str) -> None:
    write_night(tmp_path / "raw" / "chat-1.edf")
    event = "<ScoredEvent><Name>Obstructive Apnea</Name><Start>65.5</Start><Duration>12</Duration></ScoredEvent>"
    digits = "".join(f"<SleepStage>{d}</SleepStage>" for d in "014456")
    text = (
        f'<?xml version="1.0" encoding="{encoding}"?>'
        f"<CMPStudyConfig><EpochLength>20</EpochLength><ScoredEvents>{event}</ScoredEvents>"
        f"<SleepStages>{digits}</SleepStages></CMPStudyConfig>"
    )
    (tmp_path / "raw" / "chat-1-profusion.xml").write_bytes(text.encode(encoding))
    assert attempt("generic", tmp_path / "raw", tmp_path / "cache")["exit_code"] == 0
    assert labels(recordings(tmp_path / "cache")["chat-1"]) == [
        (0.0, 20.0, "W"),
        (20.0, 20.0, "N1"),
        (40.0, 20.0, "N3"),
        (60.0, 20.0, "N3"),
        (65.5, 12.0, "Obstructive Apnea"),
        (80.0, 20.0, "REM"),
    ]


def test_an_annotation_file_of_wfdb_beside_an_edf(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "r1.edf")
    samples, symbols = np.array([150, 250, 1200]), ["N", "V", "N"]
    wfdb.wrann("r1", "atr", samples, symbols, fs=100, write_dir=str(tmp_path / "raw"))
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    oracle = wfdb.rdann(str(tmp_path / "raw" / "r1"), "atr")
    assert labels(recordings(tmp_path / "cache")["r1"]) == [
        (sample / 100, 0.0, symbol)
        for sample, symbol in zip(oracle.sample, oracle.symbol, strict=True)
    ]


@pytest.mark.parametrize("form", ["edf", "wfdb"])
def test_beats_of_a_second_file_are_no_further_beats(tmp_path: Path, form: str) -> None:
    """Those of a detector beside those of a person; the line that is proposed takes the others."""
    raw = tmp_path / "raw"
    raw.mkdir()
    signal = np.random.default_rng(0).normal(0, 20, (15000, 1))
    if form == "edf":
        write_night(raw / "r1.edf")
    else:
        wfdb.wrsamp("r1", 100, ["mV"], ["II"], p_signal=signal, fmt=["16"], write_dir=str(raw))
    by_hand, detected = np.array([150, 250, 350, 1200]), np.array([149, 252, 351, 700, 1203])
    symbols = ["N", "V", "N", "N"]
    wfdb.wrann("r1", "atr", by_hand, symbols, fs=100, write_dir=str(raw))
    wfdb.wrann("r1", "qrs", detected, ["N"] * 5, fs=100, write_dir=str(raw))
    report = attempt("generic", raw, tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["r1"]) == [
        (sample / 100, 0.0, symbol) for sample, symbol in zip(by_hand, symbols, strict=True)
    ]
    said = messages(report)
    assert "80% of its 5 points are at those of another source" in said
    key = re.findall(r"write (\S+ = .*) in \[\[files\]\]", said)[0]
    text = f'[[files]]\npattern = "r1.{"edf" if form == "edf" else "hea"}"\n{key}\n'
    ingest_with_map(raw, text, tmp_path / "other")
    assert labels(recordings(tmp_path / "other")["r1"]) == [
        (sample / 100, 0.0, "N") for sample in detected
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_of_epochs_in_a_table_of_the_map(tmp_path: Path, first: int) -> None:
    for name in ("s1", "s2"):
        write_night(tmp_path / "raw" / f"{name}.edf", 100)
    rows = "".join(f"s{k},{i + first},{w}\n" for k in (1, 2) for i, w in enumerate(WORDS))
    write(tmp_path / "raw" / "stages.csv", "night,epoch,stage\n" + rows)
    text = '[annotations]\npath = "stages.csv"\nfile = "night"\nonset = "epoch"\n'
    text += 'duration = ""\nlabel = "stage"\n[labels]\nepoch = 20\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert "read as numbers of epochs of 20 s" in messages(report)
    for record in recordings(tmp_path / "cache").values():
        assert labels(record) == [(20.0 * i, 20.0, stage[2]) for i, stage in enumerate(STAGES)]


def test_remarks_in_a_table_beside_are_no_labels(tmp_path: Path) -> None:
    """Codes are kept however seldom they are, sentences are counted."""
    write_night(tmp_path / "raw" / "s1.edf")
    rows = "0,30,Sleep stage W\n10,3,Arousal\n20,0,Mrs Doe coughs\n"
    write(tmp_path / "raw" / "s1.csv", "onset,duration,description\n" + rows)
    said = messages(attempt("generic", tmp_path / "raw", tmp_path / "cache"))
    found = labels(recordings(tmp_path / "cache")["s1"])
    assert found == [(0.0, 30.0, "W"), (10.0, 3.0, "Arousal")]
    assert ("no known label: 1" in said, "Doe" in said) == (True, False)
    attempt("generic", tmp_path / "raw", tmp_path / "kept", keep_phi=True)
    assert len(labels(recordings(tmp_path / "kept")["s1"])) == 3


# --- which recording


@pytest.mark.parametrize(
    ("recording", "file"),
    [
        ("a/X1.edf", "a/X1.txt"),
        ("a/X1.edf", "a/X1_stage.txt"),
        ("a/X1.edf", "a/X1_hypno.csv"),
        ("a/X1.edf", "a/x1-Sleep-Stages.csv"),
        ("a/X1.edf", "a/X1.edf.txt"),
        ("a/X1-PSG.edf", "a/X1-Hypnogram.csv"),
        ("a/X1_eeg.edf", "a/X1_scored_by_hand.txt"),
        ("a/X1.edf", "a/Hypnogram_R&K_X1.txt"),
        ("a/X1.edf", "labels/X1.txt"),
        ("signals/X1_heartrate.edf", "labels/X1_labeled_sleep.txt"),
        ("SC4001E0-PSG.edf", "SC4001EC-Hypnogram.txt"),
        ("p1/eeg.edf", "p1/stages.txt"),
        ("psg/edfs/X3.edf", "psg/scored/X3-stages.txt"),
    ],
)
def test_a_label_file_belongs_to_the_recording_of_its_name(
    tmp_path: Path, recording: str, file: str
) -> None:
    write_night(tmp_path / "raw" / recording)
    for other in ("a/X2.edf", "a/X11.edf", "p2/eeg.edf", "watch/X3.edf"):
        write_night(tmp_path / "raw" / other)
    text = "onset,stage\n" if file.endswith(".csv") else ""
    text += "".join(f"{30 * i},{d}\n" if text else f"{d}\n" for i, d in enumerate(DIGITS))
    write(tmp_path / "raw" / file, text)
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    labelled = {
        name: labels(r) for name, r in recordings(tmp_path / "cache").items() if r.annotations
    }
    assert labelled == {recording.removesuffix(".edf"): STAGES}


def test_a_label_file_of_no_recording_is_named_and_the_map_says_whose_it_is(tmp_path: Path) -> None:
    for i in (1, 2):
        write_night(tmp_path / "raw" / f"night_{i}.edf")
        write(tmp_path / "raw" / "scored" / f"n{i}x.txt", "\n".join(DIGITS[i - 1 :]))
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    said = messages(report)
    assert "2 files of labels belong to no recording" in said
    assert "labels = " in said
    text = '[[files]]\nmatch = "night_(?P<subject>.)"\nlabels = "scored/n{subject}*.txt"\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "mapped")
    assert "no recording" not in messages(report)
    found = recordings(tmp_path / "mapped")
    assert labels(found["night_1"]) == STAGES
    assert [n[2] for n in labels(found["night_2"])] == ["N1", "N2", "N2", "REM"]


def test_a_text_of_another_content_beside_a_recording_is_named(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    write(tmp_path / "raw" / "s1_stages.txt", "the stages of this night are\nin the other room\n")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "1 texts are named as recordings and hold no labels that are known" in messages(report)


EVENTS = "onset\tduration\ttrial_type\tvalue\n"


def test_the_nearest_events_of_bids_count_and_levels_give_words(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for person, task in (("01", "sleep"), ("02", "sleep"), ("02", "rest")):
        write_night(raw / f"sub-{person}" / "eeg" / f"sub-{person}_task-{task}_eeg.edf")
    write(raw / "dataset_description.json", "{}")
    write(raw / "task-sleep_events.tsv", EVENTS + "0\t30\tn/a\t4\n30\tn/a\tn/a\t5\nn/a\t30\tx\t1\n")
    write(raw / "sub-02" / "sub-02_task-sleep_events.tsv", EVENTS + "60\t30\t\t4\n")
    write(
        raw / "task-sleep_events.json",
        '{"value": {"Levels": {"4": "Sleep stage W", "5": "Sleep stage R"}}}',
    )
    report = attempt("generic", raw, tmp_path / "cache")
    assert report["exit_code"] == 0
    found = {name[-25:]: labels(r) for name, r in recordings(tmp_path / "cache").items()}
    assert found == {
        "eeg/sub-01_task-sleep_eeg": [(0.0, 30.0, "W"), (30.0, 30.0, "REM")],
        "eeg/sub-02_task-sleep_eeg": [(60.0, 30.0, "W")],
        "/eeg/sub-02_task-rest_eeg": [],
    }
    assert messages(report).count("rows that state no onset or no label: 1") == 1


def test_rows_of_a_table_without_onset_are_counted(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    write(
        tmp_path / "raw" / "notes.csv",
        "file,onset,duration,label\ns1,n/a,30,W\ns1,,30,W\ns1,30,n/a,N1\ns1,60,30,NA\n",
    )
    text = '[annotations]\npath = "notes.csv"\nfile = "file"\n'
    report = ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    (account,) = report["rows"]
    assert (account["seen"], account["used"]) == (4, 1)
    assert account["dropped_by_reason"] == {"missing_values": 3}
    assert labels(recordings(tmp_path / "cache")["s1"]) == [(30.0, 30.0, "N1")]


# --- the loop: predict, correct, train


def test_a_predicted_hypnogram_that_was_corrected_is_read_back(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name in ("n1", "n2"):
        write_night(raw / f"{name}.edf")
    names = ("W", "N1", "N2", "N3", "REM")
    made = encode_hypnogram([0, 30, 60, 90, 120], [0, 1, 2, 2, -1], names, 30.0)
    (raw / "n1-hypnogram.edf").write_bytes(made)
    (tmp_path / "made.edf").write_bytes(made)
    reader = pyedflib.EdfReader(str(tmp_path / "made.edf"))  # as an editor: the last one corrected
    onsets, durations, texts = reader.readAnnotations()
    reader.close()
    texts[-1] = "Sleep stage R"
    with pyedflib.EdfWriter(
        str(raw / "n2-hypnogram.edf"), 0, file_type=pyedflib.FILETYPE_EDFPLUS
    ) as writer:
        writer.setStartdatetime(datetime(2024, 1, 1, 12, 0, 0))  # of the day of the correction
        for row in zip(onsets, durations, texts, strict=True):
            writer.writeAnnotation(*row)
    report = attempt("generic", raw, tmp_path / "cache")
    assert (report["exit_code"], len(report["units"])) == (0, 2)
    found = recordings(tmp_path / "cache")
    assert labels(found["n1"]) == [*STAGES[:4]]
    assert labels(found["n2"]) == STAGES
    built = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "t")
    assert sorted(built.whole_index["label"].to_list()) == sorted(
        ["W", "N1", "N2", "N2"] * 2 + ["REM"]
    )


def test_a_hypnogram_without_its_recording_is_no_second_person(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "n1.edf")
    content = encode_hypnogram([0, 30], [0, 1], ("W", "N1"), 30.0)
    (tmp_path / "raw" / "other-hypnogram.edf").write_bytes(content)
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], set(recordings(tmp_path / "cache"))) == (3, {"n1"})
    assert "holds no signals, only annotations" in messages(report)


def test_labels_that_begin_later_are_placed_by_the_clock(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "n1 PSG.edf")
    with pyedflib.EdfWriter(
        str(tmp_path / "raw" / "n1 Base.edf"), 0, file_type=pyedflib.FILETYPE_EDFPLUS
    ) as writer:
        writer.setStartdatetime(datetime(2020, 3, 1, 23, 59, 45))
        writer.writeAnnotation(0, 30, "Sleep stage W")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["n1 PSG"]) == [(45.0, 30.0, "W")]
    assert "begins 45 s after the recording" in messages(report)


# --- words


@pytest.mark.parametrize(
    "words",
    [
        "Vigília, Estágio 1, Estágio 2, Estágio 2, Sono REM",
        "Veglia, Stadio 1, Stadio 2, Stadio N2, Sonno REM",
        "Wakker, Slaapstadium 1, N2, N2, REM-slaap",
        "Våken, Søvnstadie N1, Søvnstadie N2, N2, REM-søvn",
        "Éveil, Stade 1, Stade N2, stade 2, Sommeil paradoxal",
        "Wach, Schlafstadium 1, Stadium N2, Stadium 2, REM-Schlaf",
        "Sleep stage W@@EEG C4, Sleep stage N1@@EEG C4, N2@@C4, N2@@C4, REM@@C4",
        "sleep-wake, sleep-n1, sleep-n2, sleep-n2, sleep-rem",
        "Wake|0, Stage 1 sleep|1, Stage 2 sleep|2, Stage 2 sleep|2, REM sleep|5",
        "WK, NREM 1, NREM2, Stage: N2, Stage R",
        "Uyanık, Evre 1, Evre N2, Evre 2, REM uykusu",
        "бодрствование, стадия 1, стадия N2, N2, БДГ",
        "清醒期, N1期, N2期, N2 期, 快速眼动期",
        "覚醒, ステージ1, 睡眠段階2, ノンレム2, レム睡眠",
        "각성, N1단계, N2, 2단계, 렘수면",
        "Valve, N1, N2, N2, vilkeuni",
        "Stage W (wake), Stage 1 (N1), Epoch: N2, light sleep N2, REM (R)",
        "StageWake, StageN1, Stage2, sleep.n2, Hypnogram: R",
        "Stadio Sonno W, Stadio Sonno N1, Stade sommeil N2, Estadio sueño 2, Stadio Sonno R",
        "WAKE, NR1, NR2, NR2, REM",
    ],
)
def test_stages_inside_a_file_in_many_words(tmp_path: Path, words: str) -> None:
    texts = words.split(", ")
    write_night(
        tmp_path / "raw" / "s1.edf", notes=tuple((30.0 * i, 30.0, t) for i, t in enumerate(texts))
    )
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == STAGES
    assert "warning" not in messages(report)


@pytest.mark.parametrize(
    "names",
    [
        "Época;Hora;Fase",
        "Época;Hora de inicio;Etapa del sueño",
        "Epoca;Ora;Stadio del sonno",
        "Époque;Heure de début;Stade de sommeil",
        "Época;Hora;Estágio do sono",
        "Epoche;Startzeit;Schlafphasen",
        "Epoch;Tid;Søvnstadie",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_columns_of_stages_in_other_languages(tmp_path: Path, names: str, encoding: str) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    rows = [f"{i + 1};{30 * i};{stage}" for i, (_, _, stage) in enumerate(STAGES)]
    text = "\n".join([names, *rows, ""])
    (tmp_path / "raw" / "s1.csv").write_text(text, encoding=encoding)
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == STAGES


def test_words_that_are_not_known_are_named_and_a_map_adds_them(tmp_path: Path) -> None:
    texts = ["Wake", "N1", "Dösen", "Dösen", "Dösen", "Jane Doe coughs"]
    write_night(
        tmp_path / "raw" / "s1.edf",
        seconds=180,
        notes=tuple((30.0 * i, 30.0, t) for i, t in enumerate(texts)),
    )
    said = messages(attempt("generic", tmp_path / "raw", tmp_path / "cache"))
    assert "no known label: 4, 'Dösen' (3 times, 90 s) and 1 further text" in said
    assert "67 % of the time has no stage" in said
    assert "Doe" not in said
    (advice,) = (line for line in said.split("such as ")[1:] if line.startswith('"Dösen"'))
    assert advice.startswith('"Dösen" = "N2"')
    report = ingest_with_map(
        tmp_path / "raw", '[labels]\n"Dösen" = "N2"\n"N1" = ""\n', tmp_path / "mapped"
    )
    found = labels(recordings(tmp_path / "mapped")["s1"])
    assert found == [STAGES[0], *((30.0 * i, 30.0, "N2") for i in (2, 3, 4))]
    assert b"Doe" not in b"".join(
        path.read_bytes() for path in (tmp_path / "mapped").rglob("*") if path.is_file()
    )
    assert report["exit_code"] == 0


@pytest.mark.parametrize(
    "text", ["REM behaviour", "wake up", "arousal N2", "stage 1 stage 2", "epoch 2", "deep", "n2 w"]
)
def test_words_beside_a_stage_that_make_another_text(text: str) -> None:
    assert name_stage(text) is None


def test_words_of_wearables_are_asked_about(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    rows = ["0,30,wake", "30,30,light", "60,30,deep", "90,30,light", "120,30,rem"]
    write(tmp_path / "raw" / "s1.csv", "start,duration,level\n" + "\n".join(rows))
    said = messages(attempt("generic", tmp_path / "raw", tmp_path / "cache"))
    lines = '"light" = "N2", "deep" = "N3"'
    assert f"State their stages in [labels] of the map, such as {lines}" in said
    text = "[labels]\n" + lines.replace(", ", "\n")
    ingest_with_map(tmp_path / "raw", text, tmp_path / "mapped")
    stages = [note[2] for note in labels(recordings(tmp_path / "mapped")["s1"])]
    assert stages == ["W", "N2", "N3", "N2", "REM"]


def test_columns_of_two_scorers_are_two_scorers(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    rows = ["1,W,W", "2,N1,N1", "3,N2,N1", "4,N2,N2", "5,R,R"]
    write(tmp_path / "raw" / "s1.csv", "epoch,scorer_1,scorer_2\n" + "\n".join(rows))
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "they differ in 1 of 5 epochs" in messages(report)
    assert labels(recordings(tmp_path / "cache")["s1"]) == STAGES
    ingest_with_map(tmp_path / "raw", '[labels]\nscorer = "scorer 2"\n', tmp_path / "second")
    second = labels(recordings(tmp_path / "second")["s1"])
    assert second == [*STAGES[:2], (60.0, 30.0, "N1"), *STAGES[3:]]


def test_a_digit_that_means_two_stages_is_asked_about(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    write(tmp_path / "raw" / "s1.txt", "0\n1\n2\n4\n4\n")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert 'Write "4" = "REM" or "4" = "N3" in [labels]' in messages(report)
    for stage in ("REM", "N3"):
        text = f'[labels]\n"4" = "{stage}"\n'
        ingest_with_map(tmp_path / "raw", text, tmp_path / stage)
        found = labels(recordings(tmp_path / stage)["s1"])
        assert [n[2] for n in found] == ["W", "N1", "N2", stage, stage]
    write_night(tmp_path / "raw" / "s2.edf")
    write(tmp_path / "raw" / "s2.txt", "5\n5\n5\n")
    attempt("generic", tmp_path / "raw", tmp_path / "five")
    found = labels(recordings(tmp_path / "five")["s1"])
    assert [n[2] for n in found] == ["W", "N1", "N2", "N3", "N3"]


@pytest.mark.parametrize(("step", "read"), [(1, 1), (5, 5), (20, 20), (60, 30)])
def test_epochs_of_a_list_are_as_long_as_the_recording_says(
    tmp_path: Path, step: int, read: int
) -> None:
    """Of a list that may end before the recording the length is asked about."""
    night = ["W"] * (240 // step) + ["R"] * (480 // step)
    write_night(tmp_path / "raw" / "s1.edf", seconds=720)
    write(tmp_path / "raw" / "s1.txt", "\n".join(night))

    def expect(seconds: int) -> list[Note]:
        names = {"W": "W", "R": "REM"}
        return [(float(seconds * i), float(seconds), names[s]) for i, s in enumerate(night)]

    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == expect(read)
    assert f"as many as epochs of {step} s" in messages(report)
    other = step if step != read else 30
    assert f"If that is wrong, write epoch = {other} in [labels]" in messages(report)
    report = ingest_with_map(tmp_path / "raw", f"[labels]\nepoch = {step}\n", tmp_path / "mapped")
    assert labels(recordings(tmp_path / "mapped")["s1"]) == expect(step)
    assert "as many as epochs" not in messages(report)


def test_a_few_labels_beyond_the_recording_are_said(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf", seconds=60)
    write(tmp_path / "raw" / "s1.txt", "W\nW\nR\nR")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "run to 120 s, past the end of the recording at 60 s" in messages(report)
    assert "write epoch = 15 in [labels] of the map" in messages(report)
    ingest_with_map(tmp_path / "raw", "[labels]\nepoch = 15\n", tmp_path / "mapped")
    assert labels(recordings(tmp_path / "mapped")["s1"]) == [
        (15.0 * i, 15.0, "W" if i < 2 else "REM") for i in range(4)
    ]


def test_stages_of_a_night_are_counted_from_zero(tmp_path: Path) -> None:
    """Times from 00:00:00 on that are no times of the night by the clock."""
    write_night(tmp_path / "raw" / "s1.edf", 5400, start=datetime(2020, 3, 1, 23, 20, 0))
    begins = [f"{timedelta(seconds=30 * i)}".zfill(8) for i in range(180)]
    stages = ["W", "N1", "N2"] * 60
    rows = [f"{time},{stage}\n" for time, stage in zip(begins, stages, strict=True)]
    write(tmp_path / "raw" / "s1.csv", "time,stage\n" + "".join(rows))
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "which begins at 23:20:00, they are counted from its start" in messages(report)
    assert labels(recordings(tmp_path / "cache")["s1"]) == [
        (30.0 * i, 30.0, stage) for i, stage in enumerate(stages)
    ]
    # also where they are far from the end of the recording
    write(tmp_path / "raw" / "s1.csv", "time,stage\n" + "".join(rows[:120]))
    attempt("generic", tmp_path / "raw", tmp_path / "short")
    assert labels(recordings(tmp_path / "short")["s1"])[0] == (0.0, 30.0, "W")
    # the same times are those of the clock where the recording goes on
    write_night(tmp_path / "long" / "s1.edf", 2400 + 5400, start=datetime(2020, 3, 1, 23, 20, 0))
    write(tmp_path / "long" / "s1.csv", "time,stage\n" + "".join(rows))
    attempt("generic", tmp_path / "long", tmp_path / "clock")
    assert labels(recordings(tmp_path / "clock")["s1"])[0] == (2400.0, 30.0, "W")


@pytest.mark.parametrize("hour", [22, 0, 21])
def test_labels_of_another_time_zone_are_asked_about(tmp_path: Path, hour: int) -> None:
    """The line that is proposed places them."""
    write_night(tmp_path / "raw" / "s1.edf")
    times = [f"{hour:02d}:{59 + i // 60}:{i % 60:02d}" for i in range(0, 60, 30)]
    write(tmp_path / "raw" / "s1.csv", f"time,stage\n{times[0]}Z,W\n{times[1]}Z,REM\n")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == []
    said = messages(report)
    shift = re.findall(r"write (shift = \S+) in \[labels\] of the map", said)
    ingest_with_map(tmp_path / "raw", f"[labels]\n{shift[0]}\n", tmp_path / "mapped")
    found = labels(recordings(tmp_path / "mapped")["s1"])
    assert [note[::2] for note in found] == [(0.0, "W"), (30.0, "REM")]


def test_epochs_without_a_stage_of_yasa(tmp_path: Path) -> None:
    """They are -1 (artefact) and -2 (not scored)."""
    write_night(tmp_path / "raw" / "s1.edf")
    write(tmp_path / "raw" / "s1_hypno.csv", "Epoch,Stage\n0,-2\n1,0\n2,-1\n3,2\n4,3\n")
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    found = labels(recordings(tmp_path / "cache")["s1"])
    assert found == [(30.0, 30.0, "W"), (90.0, 30.0, "N2"), (120.0, 30.0, "N3")]


def test_stages_of_bids_events_in_columns_of_their_own(tmp_path: Path) -> None:
    """As in ds005555 of OpenNeuro: a column of a person and one of a program, 4 is REM."""
    name = tmp_path / "raw" / "sub-1" / "eeg" / "sub-1_task-Sleep_eeg.edf"
    write_night(name)
    write(tmp_path / "raw" / "dataset_description.json", '{"Name": "x", "BIDSVersion": "1.8.0"}')
    header = "onset\tduration\tbegsample\tendsample\toffset\tstage_hum\tstage_ai\n"
    rows = "".join(
        f"{30 * i}\t30\t{3000 * i + 1}\t{3000 * i + 3000}\t0\t{hum}\t{ai}\n"
        for i, (hum, ai) in enumerate(zip("01224", "01124", strict=True))
    )
    write(name.with_name("sub-1_task-Sleep_events.tsv"), header + rows)
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert 'Write "4" = "REM" or "4" = "N3" in [labels]' in messages(report)
    assert "2 scorers: 'stage hum', 'stage ai'" in messages(report)
    ingest_with_map(tmp_path / "raw", '[labels]\n"4" = "REM"\n', tmp_path / "mapped")
    (record,) = recordings(tmp_path / "mapped").values()
    assert labels(record) == STAGES


# --- scorers and marks


FIRST, SECOND = (
    ["W", "W", "N1", "N2", "N2", "N2", "R", "R"],
    ["W", "N1", "N1", "N2", "N3", "N2", "R", "R"],
)


def write_scored(raw: Path) -> None:
    write_night(raw / "s1.edf", seconds=240)
    write(raw / "s1_anna.txt", "\n".join(FIRST))
    write(raw / "s1_bert.txt", "\n".join(SECOND))


def test_two_label_files_of_a_recording_are_two_scorers(tmp_path: Path) -> None:
    write_scored(tmp_path / "raw")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    said = messages(report)
    agreed = np.mean(np.array(FIRST) == np.array(SECOND))
    chance = sum(FIRST.count(s) * SECOND.count(s) for s in set(FIRST)) / 64
    kappa = (agreed - chance) / (1 - chance)
    assert f"differ in 2 of 8 epochs of 30 s (Cohen's kappa {kappa:.2f})" in said
    assert "those of 's1_anna.txt' are used" in said
    names = {"R": "REM"}
    for scorer, wanted in (("bert", SECOND), ("s1_anna.txt", FIRST)):
        text = f'[labels]\nscorer = "{scorer}"\n'
        ingest_with_map(tmp_path / "raw", text, tmp_path / scorer)
        found = labels(recordings(tmp_path / scorer)["s1"])
        assert [n[2] for n in found] == [names.get(s, s) for s in wanted]
    ingest_with_map(tmp_path / "raw", '[labels]\nscorer = "consensus"\n', tmp_path / "both")
    assert [n[0] for n in labels(recordings(tmp_path / "both")["s1"])] == [
        30.0 * i for i in range(8) if FIRST[i] == SECOND[i]
    ]
    report = ingest_with_map(tmp_path / "raw", '[labels]\nscorer = "carl"\n', tmp_path / "none")
    assert (report["exit_code"], "no scorer called 'carl'" in messages(report)) == (4, True)


def test_scorers_named_in_texts_and_equal_labels_that_are_doubled(tmp_path: Path) -> None:
    notes = [(30.0 * i, 30.0, f"{s}_scorer1") for i, s in enumerate(FIRST)]
    notes += [(30.0 * i, 30.0, f"scorer2: Sleep stage {s}") for i, s in enumerate(SECOND)]
    write_night(tmp_path / "raw" / "s1.edf", 240, tuple(notes))
    ingest_with_map(tmp_path / "raw", '[labels]\nscorer = "scorer2"\n', tmp_path / "two")
    found = labels(recordings(tmp_path / "two")["s1"])
    assert [n[2] for n in found] == [{"R": "REM"}.get(s, s) for s in SECOND]
    write_night(
        tmp_path / "same" / "s1.edf", 240, tuple((30.0 * i, 30.0, s) for i, s in enumerate(FIRST))
    )
    write(tmp_path / "same" / "s1.txt", "\n".join(FIRST))
    report = attempt("generic", tmp_path / "same", tmp_path / "once")
    assert len(labels(recordings(tmp_path / "once")["s1"])) == 8
    assert "info: s1.edf: stages that are there twice and are equal: 8" in messages(report)


@pytest.mark.parametrize(
    ("reaches", "wanted"),
    [
        ('"next"', [(10.0, 40.0, "A"), (50.0, 40.0, "B"), (90.0, 40.0, "A")]),
        ('"previous"', [(0.0, 10.0, "A"), (10.0, 40.0, "B"), (50.0, 40.0, "A")]),
        ("15", [(10.0, 15.0, "A"), (50.0, 15.0, "B"), (90.0, 15.0, "A"), (110.0, 20.0, "C")]),
    ],
)
def test_marks_reach_as_the_map_says(tmp_path: Path, reaches: str, wanted: list[Note]) -> None:
    marks = [(10.0, 0.0, "a"), (50.0, 0.0, "b"), (90.0, 0.0, "a")]
    if reaches == "15":  # a label that is shorter reaches as far, a longer one keeps its end
        marks[1:2] = [(50.0, 1.25, "b"), (110.0, 20.0, "c")]
    write_night(tmp_path / "raw" / "s1.edf", notes=tuple(marks))
    text = f'[labels]\na = "A"\nb = "B"\nc = "C"\nreaches = {reaches}\n'
    ingest_with_map(tmp_path / "raw", text, tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == wanted


def test_diagnoses_in_headers_of_wfdb_are_classes(tmp_path: Path) -> None:
    comments = {
        "a1": ["Age: 62", "Dx: 426783006"],
        "a2": ["Dx: 164889003, 59118001,164889003", "Rx: Unknown"],
        "a3": ["Dx: Unknown"],
        "a4": ["Dx: Doe 426783006"],
    }
    (tmp_path / "raw").mkdir()
    for name, lines in comments.items():
        wfdb.wrsamp(
            name, 100, ["mV"], ["II"], d_signal=np.arange(1000)[:, None], fmt=["16"],
            adc_gain=[200.0], baseline=[0], comments=lines, write_dir=str(tmp_path / "raw"),
        )  # fmt: skip
    ingest_with_map(tmp_path / "raw", '[labels]\n164889003 = "AF"\n', tmp_path / "cache")
    read = {name: record.attributes for name, record in recordings(tmp_path / "cache").items()}
    classes = {"a1": {"labels": ["426783006"]}, "a2": {"labels": ["AF", "59118001"]}}
    assert read == {"a3": {}, "a4": {}, **classes}


def test_stages_of_an_annotation_file_of_wfdb(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    values = np.random.default_rng(0).integers(-500, 500, (15000, 1))
    wfdb.wrsamp(
        "slp01", 100, ["mV"], ["EEG"], d_signal=values, fmt=["16"], adc_gain=[200.0], baseline=[0],
        write_dir=str(raw),
    )  # fmt: skip
    texts = ["W", "1 H", "2", "2 LA", "R"]
    wfdb.wrann("slp01", "st", np.arange(5) * 3000, ['"'] * 5, aux_note=texts, write_dir=str(raw))
    report = attempt("wfdb", raw, tmp_path / "cache")
    assert "marks every 30 s" in messages(report)
    assert labels(recordings(tmp_path / "cache")["slp01"]) == STAGES


# --- real label files


def test_the_real_labels_of_watches(tmp_path: Path) -> None:
    """Stages in a folder of their own, one text a person, compared with pandas."""
    folder = require_sample(SAMPLES / "complete" / "sleep-accel-hr" / "labels")
    raw = tmp_path / "raw"
    (raw / "labels").mkdir(parents=True)
    names = sorted(path.name.split("_")[0] for path in folder.iterdir())[:4]
    for name in names:
        file = f"{name}_labeled_sleep.txt"
        (raw / "labels" / file).write_bytes((folder / file).read_bytes())
        np.save(raw / f"{name}_heartrate.npy", np.random.default_rng(int(name)).normal(size=40_000))
    text = '[[files]]\npattern = "*.npy"\nrate = 1\nmatch = "(?P<subject>[0-9]+)_"\n'
    report = ingest_with_map(raw, text, tmp_path / "cache")
    assert report["exit_code"] == 0
    legend = {0: "W", 1: "N1", 2: "N2", 3: "N3", 4: "N3", 5: "REM"}
    for name in names:
        table = pd.read_csv(folder / f"{name}_labeled_sleep.txt", names=["onset", "code"])
        table = table[table["code"] >= 0]
        wanted = [(float(o), 30.0, legend[c]) for o, c in table.itertuples(index=False)]
        assert labels(recordings(tmp_path / "cache")[f"{name}_heartrate"]) == wanted


ARRAY_STAGES = [0, 1, 2, 3, 5]
STAGE_WORDS = ["W", "N1", "N2", "N3", "REM"]
JSON_FORMS: dict[str, Any] = {
    "numbers": ARRAY_STAGES,
    "words": STAGE_WORDS,
    "a list with a name": {"subject": "x", "stages": STAGE_WORDS},
    "a hypnogram": {"epoch_length": 30, "hypnogram": ARRAY_STAGES},
    "rows": [
        {"onset": 30 * i, "duration": 30, "stage": word} for i, word in enumerate(STAGE_WORDS)
    ],
}


@pytest.mark.parametrize("form", [*JSON_FORMS, ".npy", ".npy of words", ".npy of floats", ".mat"])
def test_hypnograms_as_arrays(tmp_path: Path, form: str) -> None:
    raw = tmp_path / "raw"
    write_night(raw / "n1.edf")
    if form in JSON_FORMS:
        write(raw / "n1_hypno.json", json.dumps(JSON_FORMS[form]))
    elif form == ".mat":
        savemat(raw / "n1_hypno.mat", {"hypnogram": np.array(ARRAY_STAGES)})
    else:
        kinds = {".npy": ARRAY_STAGES, ".npy of words": STAGE_WORDS}
        stages = np.array(kinds.get(form, np.array(ARRAY_STAGES, np.float64)[:, None]))
        np.save(raw / "n1_hypno.npy", stages)
    attempt("generic", raw, tmp_path / "cache")
    record = recordings(tmp_path / "cache")["n1"]
    assert labels(record) == [(30.0 * i, 30.0, word) for i, word in enumerate(STAGE_WORDS)]


@pytest.mark.parametrize("beside", ["", "n1_hypno.txt"])
def test_stages_beside_the_signal_of_a_matlab_file(tmp_path: Path, beside: str) -> None:
    """They are those of the recording, but where a file of labels is named after it."""
    raw = tmp_path / "raw"
    raw.mkdir()
    signal = np.random.default_rng(0).normal(0, 30, (2, 64 * 30 * len(STAGE_WORDS)))
    content = {"data": signal, "fs": 64.0, "stages": np.array(ARRAY_STAGES, np.float64)}
    savemat(raw / "n1.mat", content)
    wanted = STAGE_WORDS
    if beside:
        wanted = STAGE_WORDS[::-1]
        write(raw / beside, "\n".join(wanted))
    write(tmp_path / "map.toml", '[[files]]\npattern = "*.mat"\n')
    attempt("generic", raw, tmp_path / "cache", options={"map": str(tmp_path / "map.toml")})
    record = recordings(tmp_path / "cache")["n1"]
    assert [s.samples.shape for s in record.signals] == [(64 * 150,), (64 * 150,)]
    assert labels(record) == [(30.0 * i, 30.0, word) for i, word in enumerate(wanted)]


def test_stages_in_an_archive_of_numpy_are_named_and_the_advice_works(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    signal = np.random.default_rng(0).normal(0, 30, (64 * 30 * len(STAGE_WORDS), 2))
    np.savez(raw / "n1.npz", data=signal, fs=64.0, stages=np.array(ARRAY_STAGES))
    report = attempt("generic", raw, tmp_path / "cache")
    assert "holds 5 labels beside an array of two dimensions, they are not read" in messages(report)
    write(raw / "n1.txt", "\n".join(STAGE_WORDS))
    attempt("generic", raw, tmp_path / "again")
    record = recordings(tmp_path / "again")["n1"]
    assert labels(record) == [(30.0 * i, 30.0, word) for i, word in enumerate(STAGE_WORDS)]


def test_a_text_that_is_no_stage_in_a_list_of_stages_is_named(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "n1.edf", seconds=330)
    write(tmp_path / "raw" / "n1.txt", "\n".join([*STAGE_WORDS * 2, "SL"]))
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "a list of stages holds other texts: 'SL'" in messages(report)
    text = '[labels]\n"SL" = "N2"\n'
    write(tmp_path / "map.toml", text)
    options = {"map": str(tmp_path / "map.toml")}
    again = attempt("generic", tmp_path / "raw", tmp_path / "again", options=options)
    assert "'SL'" not in messages(again)
    assert labels(recordings(tmp_path / "again")["n1"])[-1] == (300.0, 30.0, "N2")


def test_times_of_day_beside_a_table_whose_clock_is_one(tmp_path: Path) -> None:
    """Samples from 23:58:30 on, stages from a minute later on."""
    raw, start = tmp_path / "raw", datetime(2020, 1, 1, 23, 58, 30)
    signal = np.random.default_rng(0).normal(0, 30, 64 * 240)
    times = [start + timedelta(seconds=i / 64) for i in range(len(signal))]
    lines = [f"{time:%H:%M:%S.%f},{value:.3f}" for time, value in zip(times, signal, strict=True)]
    write(raw / "n1.csv", "\n".join(["clock,C4", *lines]))
    onsets = [start + timedelta(seconds=60 + 30 * i) for i in range(len(STAGE_WORDS))]
    rows = [f"{onset:%H:%M:%S},{word}" for onset, word in zip(onsets, STAGE_WORDS, strict=True)]
    write(raw / "n1_scoring.csv", "\n".join(["start,stage", *rows]))
    attempt("generic", raw, tmp_path / "cache")
    record = recordings(tmp_path / "cache")["n1"]
    assert [(onset, word) for onset, _, word in labels(record)] == [
        (60.0 + 30 * i, word) for i, word in enumerate(STAGE_WORDS)
    ]


def test_brackets_of_wfdb_are_stretches(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    marks = np.array([10, 40, 90, 100]) * 100
    wfdb.wrann("s1", "seizures", marks, list("[][]"), fs=100, write_dir=str(tmp_path))
    (tmp_path / "s1.seizures").rename(tmp_path / "raw" / "s1.edf.seizures")
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == [(10.0, 30.0, "[]"), (90.0, 10.0, "[]")]


def test_annotations_as_rdann_prints_them(tmp_path: Path) -> None:
    rows = [
        "    Time   Sample #  Type  Sub Chan  Num\tAux",
        "    0:00.050       18     +    0    0    0\t(N",
        "    0:00.214       77     N    0    0    0",
        "[23:00:01.028 01/01/2020]      370     A    0    0    0",
        '    0:01.839      662     "    0    0    0\tJohn Doe',
    ]
    table = parse_label_text("\n".join(rows))
    assert table is not None
    assert [(row.onset, row.text) for row in table.rows] == [(18, "(N"), (77, "N"), (370, "A")]
    assert (table.clock, table.dropped) == ("samples", 1)


@pytest.mark.parametrize(
    ("zone", "onset"),
    [
        (0, "2021-06-01T23:00:10+02:00"),
        (2, "2021-06-01 21:00:10 UTC"),
        (3, "2021-06-01T15:00:10-0600"),
        (2, "1622581210"),
        (None, "2021-06-01T23:00:10+02:00"),  # the table counts from 1970
    ],
)
def test_labels_and_a_table_of_two_zones(tmp_path: Path, zone: int | None, onset: str) -> None:
    """The label begins 70 s after the first row."""
    raw, start = tmp_path / "raw", datetime(2021, 6, 1, 20, 59, tzinfo=UTC)
    times = [start + timedelta(seconds=second) for second in range(100)]
    if zone is None:
        cells = [f"{time.timestamp():.0f}" for time in times]
    else:
        cells = [time.astimezone(timezone(timedelta(hours=zone))).isoformat() for time in times]
    write(raw / "a.csv", "\n".join(["time,ECG", *(f"{cell},{i}" for i, cell in enumerate(cells))]))
    write(raw / "a_events.csv", f"onset,duration,label\n{onset},10,rest\n")
    attempt("generic", raw, tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["a"]) == [(70.0, 10.0, "rest")]


def test_a_json_states_its_epochs(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "n1.edf", seconds=100)
    content = {"epoch_length_s": 20, "stages": STAGE_WORDS}
    write(tmp_path / "raw" / "n1.json", json.dumps(content))
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    record = recordings(tmp_path / "cache")["n1"]
    assert labels(record) == [(20.0 * i, 20.0, word) for i, word in enumerate(STAGE_WORDS)]


@pytest.mark.parametrize(
    "content",
    [
        '{"device": "x", "rate": 100}',
        "[1, 2",
        '{"hypnogram": 3}',
        "[" * 200_000,
        json.dumps([{"onset": 5 * i, "value": {"bpm": 60, "confidence": 2}} for i in range(20)]),
    ],
    ids=["other", "cut off", "number", "deep", "heart rates of Fitbit"],
)
def test_a_json_that_holds_no_stages_is_named(tmp_path: Path, content: str) -> None:
    write_night(tmp_path / "raw" / "n1.edf")
    write(tmp_path / "raw" / "n1_hypno.json", content)
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert "'n1_hypno.json', not read. Known are one stage a line or in a list" in messages(report)


@pytest.mark.parametrize(
    ("above", "shift", "onset"),
    [
        ("Scoring start: 23:59:30", None, 30.0),
        ("Start 11:59:30 PM", None, 30.0),
        ("Begin: 23:59:00", None, 0.0),
        ("Printed: 08:15:00", None, 0.0),
        ("Lights off: 23:59:30", None, 0.0),
        ("Lights off: 23:59:30", 30, 30.0),
    ],
)
def test_a_time_above_a_list_of_stages_places_it_or_is_said(
    tmp_path: Path, above: str, shift: int | None, onset: float
) -> None:
    write_night(tmp_path / "raw" / "n.edf", seconds=180)
    write(tmp_path / "raw" / "n.txt", "\n".join([above, *WORDS]))
    rules = f"[labels]\nshift = {shift}\n" if shift else ""
    report = ingest_with_map(tmp_path / "raw", rules, tmp_path / "cache")
    (record,) = recordings(tmp_path / "cache").values()
    assert labels(record) == [(begin + onset, length, stage) for begin, length, stage in STAGES]
    said = "write shift = 30 in [labels] of the map" in messages(report)
    assert said == (above.startswith("Lights") and not shift)


@pytest.mark.parametrize(
    ("header", "first"),
    [("latency,type", 1), ("sample,label", 0), ("onset_sample,duration,event", 0)],
)
def test_labels_are_timed_in_samples(tmp_path: Path, header: str, first: int) -> None:
    write_night(tmp_path / "raw" / "n.edf")  # at 100 Hz
    length = ",3000" if "duration" in header else ""
    rows = [f"{3000 * i + first}{length},{'go' if i % 2 else 'nogo'}" for i in range(5)]
    write(tmp_path / "raw" / "n_events.csv", "\n".join([header, *rows]))
    ingest_with_map(tmp_path / "raw", "", tmp_path / "cache")
    (record,) = recordings(tmp_path / "cache").values()
    seconds = 30.0 if length else 0.0
    texts = ["nogo", "go", "nogo", "go", "nogo"]
    assert labels(record) == [(30.0 * i, seconds, text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("rate", "unit"), [(100, "read as samples at 100 Hz"), (1000, "read as milliseconds"), (1, "")]
)
@pytest.mark.parametrize("header", ["start,end,label", "onset,label"])
def test_times_far_past_the_end_are_samples_or_milliseconds_where_these_fit(
    tmp_path: Path, header: str, rate: int, unit: str
) -> None:
    """Seconds of a whole night beside its first minutes, as many as there are samples, are none."""
    write_night(tmp_path / "raw" / "n.edf")  # 150 s at 100 Hz
    words = ["W", "W", "N1", "N2", "N2"] if unit else ["W", "W", "N1", "N2", "N2"] * 100
    times = [30 * rate * i for i in range(len(words) + 1)]
    ends = [f",{end}" if "end" in header else "" for end in times[1:]]
    rows = [f"{t}{end},{word}" for t, end, word in zip(times, ends, words, strict=False)]
    write(tmp_path / "raw" / "n.csv", "\n".join([header, *rows]))
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    (record,) = recordings(tmp_path / "cache").values()
    assert labels(record) == [(30.0 * i, 30.0, word) for i, word in enumerate(words[:5])]
    assert (unit or "what is beyond is dropped") in messages(report)


def test_stages_of_wfdb_notes_among_events_last_until_the_next_stage(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "s1.edf")
    rows = [
        (0, "W"), (20, "N1"), (45, "(resp_hypopnea"), (50, "N2"), (60, "(arousal_rera"),
        (65, "resp_hypopnea)"), (70, "arousal_rera)"), (110, "R"),
    ]  # fmt: skip
    times, texts = zip(*rows, strict=True)
    marks = np.array(times) * 100
    wfdb.wrann(
        "s1", "arousal", marks, ['"'] * len(rows), aux_note=list(texts), fs=100,
        write_dir=str(tmp_path),
    )  # fmt: skip
    (tmp_path / "s1.arousal").rename(tmp_path / "raw" / "s1.arousal")
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert labels(recordings(tmp_path / "cache")["s1"]) == [
        (0.0, 20.0, "W"),
        (20.0, 30.0, "N1"),
        (45.0, 20.0, "resp_hypopnea"),
        (50.0, 60.0, "N2"),
        (60.0, 10.0, "arousal_rera"),
        (110.0, 40.0, "REM"),
    ]


def test_hypnograms_of_dreams_count_down_from_wake(tmp_path: Path) -> None:
    write_night(tmp_path / "raw" / "subject1.edf", 210)
    stages = "[HypnogramAASM]\n5\n3\n2\n1\n4\n-2\n5\n"
    write(tmp_path / "raw" / "HypnogramAASM_subject1.txt", stages)
    attempt("generic", tmp_path / "raw", tmp_path / "cache")
    found = labels(recordings(tmp_path / "cache")["subject1"])
    assert [text for _, _, text in found] == ["W", "N1", "N2", "N3", "REM", "W"]
    assert [onset for onset, _, _ in found] == [0, 30, 60, 90, 120, 180]


def test_names_with_the_number_of_a_scorer_and_with_a_word_behind_a_number(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name in ("1", "2", "100"):
        write_night(raw / name / f"{name}.edf", 60)
    (raw / "1" / "1.edf").rename(raw / "1" / "1.rec")  # as ISRUC has them
    for name in ("1", "2"):
        write(raw / name / f"{name}_1.txt", "0\n5\n")
    write(raw / "100" / "100annotations.txt", "    0:00.050   5   N  0  0  0\n" * 2)
    write(raw / "100" / "100.rec", "12,10.3,11.3,6\n")  # no EDF
    attempt("generic", raw, tmp_path / "cache")
    found = recordings(tmp_path / "cache")
    assert found.keys() == {"1/1", "2/2", "100/100"}
    for name in ("1/1", "2/2"):
        assert labels(found[name]) == [(0.0, 30.0, "W"), (30.0, 30.0, "REM")]
    assert {text for _, _, text in labels(found["100/100"])} == {"N"}
