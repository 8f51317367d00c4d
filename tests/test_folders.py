"""Folders as they come: annotation files beside the recordings, differing channels and rates, and
the map that is made for a folder.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyedflib
import pytest
from samples import SAMPLES, require_sample
from test_generic import attempt, codes, ingest_with_map, recordings, write_edf

from bitimely_cli.main import main
from bitimely_core import tokens
from bitimely_core.cache import open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats import nsrr_xml
from bitimely_core.tokens import open_views

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

RATE = 360
# of pandas, in the package that writes the records
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def write_wfdb(
    folder: Path,
    name: str,
    channels: tuple[str, ...] = ("MLII", "V1"),
    *,
    rate: int = RATE,
    seconds: int = 60,
) -> None:
    """A record of noise."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng([*name.encode()]).integers(
        -500, 500, (seconds * rate, len(channels))
    )
    count = len(channels)
    wfdb.wrsamp(
        name, rate, ["mV"] * count, list(channels), d_signal=values, fmt=["16"] * count, adc_gain=[200.0] * count, baseline=[0] * count,
        write_dir=str(folder),
    )  # fmt: skip


def write_beats(folder: Path, name: str, extension: str = "atr", rate: int = RATE) -> None:
    """A beat a second of which each tenth is ventricular, sinus rhythm for 20 s, fibrillation for
    40 s, some noise and a name in a note.
    """
    rows = [
        (10 * rate // 100, "+", "(N"),
        (20 * rate, "+", "(AFIB"),
        (30 * rate, "~", ""),
        (31 * rate, '"', "Jane Doe"),
    ]
    rows += [
        (second * rate + rate // 2, "V" if second % 10 == 9 else "N", "") for second in range(60)
    ]
    times, symbols, texts = zip(*sorted(rows), strict=True)
    wfdb.wrann(
        name, extension, np.array(times), list(symbols), aux_note=list(texts), write_dir=str(folder)
    )


# --- WFDB annotations


def test_beats_and_rhythms_of_wfdb_records_are_labels(tmp_path: Path) -> None:
    for i in range(4):
        write_wfdb(tmp_path / "raw", f"r{i}")
        write_beats(tmp_path / "raw", f"r{i}")
    report = attempt("wfdb", tmp_path / "raw", tmp_path / "cache")
    assert codes(report) == {"identifier", "left_out", "unknown_label"}  # subjects, noise, the note
    assert report["units"][0]["files"] == ["r0.hea", "r0.dat", "r0.atr"]
    found = recordings(tmp_path / "cache")["r1"].annotations
    oracle = wfdb.rdann(str(tmp_path / "raw" / "r1"), "atr")
    beats = [
        (s / RATE, symbol)
        for s, symbol in zip(oracle.sample, oracle.symbol, strict=True)
        if symbol in "NV"
    ]
    assert [(note.onset, note.label) for note in found if not note.duration] == beats
    assert [note for note in found if note.duration] == [
        (0.1, pytest.approx(19.9), "N"),
        (20.0, 40.0, "AFIB"),
    ]
    assert b"Jane" not in b"".join(
        path.read_bytes() for path in (tmp_path / "cache").iterdir() if path.is_file()
    )
    rhythms = tokens.build(tmp_path / "cache", view="annotations", out=tmp_path / "rhythms")
    assert (list(rhythms.class_names), rhythms.length, len(rhythms)) == (
        ["AFIB", "N"],
        3600,
        4 * (1 + 4),
    )
    beats_view = tokens.build(tmp_path / "cache", view="points", out=tmp_path / "beats")
    index = beats_view.whole_index.filter(beats_view.whole_index["recording_id"] == "r1")
    assert (list(beats_view.class_names), beats_view.length) == (["N", "V"], RATE)
    assert list(zip(index["start"] + 0.5, index["label"], strict=True)) == beats


def test_a_map_chooses_annotation_files_and_their_kinds(tmp_path: Path) -> None:
    write_wfdb(tmp_path / "raw", "r")
    write_beats(tmp_path / "raw", "r", "hyp")
    for number, (events, wanted) in enumerate(
        {"beats": {"N", "V"}, "rhythms": {"N", "AFIB"}, "both": {"N", "V", "AFIB"}}.items()
    ):
        out = tmp_path / str(number)
        report = ingest_with_map(
            tmp_path / "raw", f'[[files]]\nannotators = ["hyp"]\nevents = "{events}"\n', out
        )
        assert report["units"][0]["files"] == ["r.hea", "r.dat", "r.hyp"]
        assert {note.label for note in recordings(out)["r"].annotations} == wanted
    ingest_with_map(
        tmp_path / "raw",
        '[[files]]\nannotators = ["hyp"]\n[labels]\nV = "ectopic"\n"(AFIB" = "AF"\n',
        tmp_path / "mapped",
    )
    assert {note.label for note in recordings(tmp_path / "mapped")["r"].annotations} == {
        "ectopic",
        "AF",
    }
    text = '[[files]]\nannotators = ["hyp"]\nevents = "notes"\n[labels]\n"Jane Doe" = "patient"\n'
    ingest_with_map(tmp_path / "raw", text, tmp_path / "notes")
    assert recordings(tmp_path / "notes")["r"].annotations == [(31.0, 29.0, "patient")]


def test_a_damaged_annotation_file_is_named(tmp_path: Path) -> None:
    write_wfdb(tmp_path / "raw", "r")
    for content in (b"<html>not found</html>", b""):
        (tmp_path / "raw" / "r.atr").write_bytes(content)
        report = attempt("wfdb", tmp_path / "raw", tmp_path / "cache")
        assert report["exit_code"] == 4
        assert report["units"][0]["reasons"][0]["file"] == "r.atr"
        assert codes(report) <= {"annotation_syntax", "empty_file"}


@pytest.mark.slow
def test_the_real_record_has_its_beats(tmp_path: Path) -> None:
    require_sample(SAMPLES / "robust" / "wfdb")
    attempt("wfdb", SAMPLES / "robust" / "wfdb", tmp_path / "cache")
    record = recordings(tmp_path / "cache")["100"]
    seconds = max(len(signal.samples) / signal.rate for signal in record.signals)
    oracle = wfdb.rdann(str(SAMPLES / "robust" / "wfdb" / "100"), "atr")
    beats = [
        symbol
        for sample, symbol in zip(oracle.sample, oracle.symbol, strict=True)
        if symbol != "+" and sample / 360 < seconds
    ]
    assert [note.label for note in record.annotations if not note.duration] == beats


# --- channels and rates


def choose_slowly(recordings: dict[str, tuple[str, ...]]) -> tuple[int, int]:
    """Recordings and channels of the best set, by trying all."""
    names = sorted({channel for channels in recordings.values() for channel in channels})
    sets = (
        set(chosen)
        for size in range(1, len(names) + 1)
        for chosen in itertools.combinations(names, size)
    )
    return max(
        (sum(chosen <= set(channels) for channels in recordings.values()), len(chosen))
        for chosen in sets
    )


@pytest.mark.parametrize("seed", range(20))
def test_channels_are_the_largest_set_of_most_recordings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = {str(i): tuple(rng.permutation(list("abcdef"))[: rng.integers(1, 6)]) for i in range(8)}
    chosen = open_views.choose_channels(table)
    count = sum(set(chosen) <= set(channels) for channels in table.values())
    assert (count, len(chosen)) == choose_slowly(table)


def test_the_first_recordings_need_not_be_like_the_others(tmp_path: Path) -> None:
    for i in range(8):
        write_wfdb(
            tmp_path / "raw",
            f"r{i}",
            ("V5", "V2") if i < 2 else ("V1", "MLII") if i % 2 else ("MLII", "V1", "V6"),
            seconds=20,
        )
    attempt("wfdb", tmp_path / "raw", tmp_path / "cache")
    built = tokens.build(tmp_path / "cache", out=tmp_path / "out")
    assert (built.manifest.options.channels, len(built), built.length) == (("MLII", "V1"), 12, 3600)
    (finding,) = [one for one in built.manifest.findings if one.code == "missing_channel"]
    assert finding.count == 2
    assert "r0" in finding.message
    assert "lacks 'MLII', 'V1'" in finding.message
    assert "--channels" in finding.message
    chosen: Any = tokens.build(tmp_path / "cache", out=tmp_path / "v5", channels=["V5"])
    assert len(chosen) == 4


def test_recordings_of_another_rate_do_not_stop_the_others(tmp_path: Path) -> None:
    for i in range(5):
        write_wfdb(tmp_path / "raw", f"r{i}", rate=500 if i == 0 else 250, seconds=20)
    attempt("wfdb", tmp_path / "raw", tmp_path / "cache")
    built = tokens.build(tmp_path / "cache", out=tmp_path / "out")
    assert (built.manifest.options.rate, len(built)) == (250.0, 8)
    (finding,) = [one for one in built.manifest.findings if one.code == "sampling_rate"]
    assert "'r0' has 500 Hz" in finding.message
    assert "--rate" in finding.message
    assert len(tokens.build(tmp_path / "cache", out=tmp_path / "all", rate=250)) == 10


def test_points_and_stretches_name_each_other(tmp_path: Path) -> None:
    write_wfdb(tmp_path / "raw", "r")
    write_beats(tmp_path / "raw", "r")
    for events, view, wanted in (
        ("beats", "annotations", "generic/points"),
        ("rhythms", "points", "generic/annotations"),
    ):
        ingest_with_map(tmp_path / "raw", f'[[files]]\nevents = "{events}"\n', tmp_path / events)
        with pytest.raises(UserError, match=wanted):
            tokens.plan(tmp_path / events, view=view)
    write_edf(tmp_path / "edf" / "a.edf")
    attempt("edf", tmp_path / "edf", tmp_path / "none")
    with pytest.raises(UserError, match="no recording has an annotation"):
        tokens.plan(open_cache(tmp_path / "none"), view="points")


# --- sleep stages


def write_night(
    path: Path,
    texts: list[str],
    duration: float = 30.0,
    channels: tuple[str, ...] = ("EEG C4-M1", "EOG"),
) -> None:
    """An EDF+ file written by pyedflib with an annotation of each text every 30 s."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([*path.name.encode()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pyedflib.EdfWriter(
            str(path), len(channels), file_type=pyedflib.FILETYPE_EDFPLUS
        ) as writer:
            for i, name in enumerate(channels):
                header = {
                    "label": name,
                    "dimension": "uV",
                    "sample_frequency": 100,
                    "physical_min": -500.0,
                    "physical_max": 500.0,
                }
                writer.setSignalHeader(
                    i,
                    {
                        **header,
                        "digital_min": -32768,
                        "digital_max": 32767,
                        "transducer": "",
                        "prefilter": "",
                    },
                )
            writer.writeSamples([rng.normal(0, 50, 3000 * max(len(texts), 1)) for _ in channels])
            for i, text in enumerate(texts):
                writer.writeAnnotation(30.0 * i, duration, text)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (
            [
                "Sleep stage W",
                "Sleep stage N1",
                "Sleep stage N2",
                "Sleep stage N3",
                "Sleep stage R",
            ],
            "W N1 N2 N3 REM",
        ),
        (
            [
                "Sleep stage W",
                "Sleep stage 1",
                "Sleep stage 2",
                "Sleep stage 3",
                "Sleep stage 4",
                "Sleep stage R",
            ],
            "W N1 N2 N3 N3 REM",
        ),
        (["W", "N1", "N2", "N3", "R"], "W N1 N2 N3 REM"),
        (
            ["SLEEP-S0", "SLEEP-S1", "SLEEP-S2", "SLEEP-S3", "SLEEP-S4", "SLEEP-REM"],
            "W N1 N2 N3 N3 REM",
        ),
        (["Wake", "S1", "s2", "S3", "S4", "REM"], "W N1 N2 N3 N3 REM"),
        (
            ["Stage 1 sleep", "sleep_stage_2", "Sleep  stage ?", "Movement time", "Jane Doe"],
            "N1 N2",
        ),
    ],
)
@pytest.mark.parametrize("duration", [30.0, -1.0])
def test_stages_in_common_spellings_need_no_map(
    tmp_path: Path, texts: list[str], wanted: str, duration: float
) -> None:
    write_night(tmp_path / "raw" / "a.edf", texts, duration)
    attempt("edf", tmp_path / "raw", tmp_path / "cache")
    built = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "out")
    index = built.whole_index.sort("start")
    assert (built.class_names, built.length) == (("W", "N1", "N2", "N3", "REM"), 3000)
    assert " ".join(index["label"]) == wanted
    assert index["start"].to_list() == [30.0 * i for i in range(len(index))]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [(["0", "1", "2", "5"], "'0', '1', '2', '5'"), (["R", "W", "S1"], "'r', 's1', 'w'")],
)
def test_ambiguous_stages_are_named_and_not_read(
    tmp_path: Path, texts: list[str], shown: str
) -> None:
    write_night(tmp_path / "raw" / "a.edf", texts)
    report = attempt("edf", tmp_path / "raw", tmp_path / "cache")
    assert not recordings(tmp_path / "cache")["a"].annotations
    (reason,) = [one for one in report["units"][0]["reasons"] if one["level"] == "warning"]
    assert (reason["code"], shown in reason["message"], "[labels]" in reason["message"]) == (
        "unknown_label",
        True,
        True,
    )


EVENT = "<ScoredEvent><EventType>{0}</EventType><EventConcept>{0}</EventConcept><Start>{1}</Start><Duration>{2}</Duration></ScoredEvent>"


def write_nsrr(
    path: Path,
    events: list[tuple[str, str, str]],
    head: str = '<?xml version="1.0" encoding="UTF-8"?>',
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(EVENT.format(*event) for event in events)
    path.write_text(f"{head}\n<PSGAnnotation><ScoredEvents>{rows}</ScoredEvents></PSGAnnotation>\n")


NIGHT = [("Recording Start Time", "0", "150"), ("Wake|0", "0", "30"), ("Stage 1 sleep|1", "30.0", "30.0"), ("Stage 4 sleep|4", "60", "30"),
         ("REM sleep|5", "90", "60"), ("Obstructive apnea|Obstructive Apnea", "65.5", "12")]  # fmt: skip


@pytest.mark.parametrize("folder", ["raw", "raw/annotations-events-nsrr"])
def test_scored_events_of_the_sleep_research_resource_are_labels(
    tmp_path: Path, folder: str
) -> None:
    write_night(tmp_path / "raw" / "edfs" / "shhs1-1.edf", [""] * 5)
    write_nsrr(tmp_path / folder / "shhs1-1-nsrr.xml", NIGHT)
    report = attempt("edf", tmp_path / "raw", tmp_path / "cache")
    assert len(report["units"][0]["files"]) == 2
    (record,) = recordings(tmp_path / "cache").values()
    assert (65.5, 12.0, "Obstructive apnea") in record.annotations
    built = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "out")
    assert built.whole_index["label"].to_list() == ["W", "N1", "N3", "REM", "REM"]
    ingest_with_map(
        tmp_path / "raw",
        '[labels]\n"REM sleep|5" = "dream"\n"Wake" = "awake"\n',
        tmp_path / "mapped",
    )
    (record,) = recordings(tmp_path / "mapped").values()
    assert [note.label for note in record.annotations] == ["awake", "dream"]


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize(
    "head",
    [
        BOMB,
        OUTSIDE,
        "<!DOCTYPE PSGAnnotation SYSTEM 'x.dtd'>",
        "<a/>",
        '<?xml version="1.0" encoding="no"?>',
    ],
)
def test_scored_events_with_a_document_type_are_refused(tmp_path: Path, head: str) -> None:
    write_night(tmp_path / "raw" / "a.edf", [""] * 5)
    write_nsrr(
        tmp_path / "raw" / "a-nsrr.xml", [("&b;|1" if "b" in head else "Wake|0", "0", "30")], head
    )
    report = attempt("edf", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (4, {"annotation_syntax"})


@pytest.mark.parametrize(
    ("start", "duration"), [("", "30"), ("x", "30"), ("0", "-1"), ("0", "nan"), ("1e400", "30")]
)
def test_scored_events_without_times_are_refused(tmp_path: Path, start: str, duration: str) -> None:
    write_nsrr(tmp_path / "a-nsrr.xml", [("Wake|0", start, duration)])
    with pytest.raises(UserError, match="scored event 1"):
        nsrr_xml.read_events(tmp_path / "a-nsrr.xml")


def test_tables_without_a_map_name_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in "ab":
        (tmp_path / "raw" / f"{name}.csv").write_text("x,y\n1,2\n")
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 4
    assert "needs --map with a rate" in report["message"]
    assert "--init-map" in report["message"]
    report = ingest_with_map(
        tmp_path / "raw", '[[files]]\npattern = "*.csv"\n', tmp_path / "mapped"
    )
    assert report["exit_code"] == 4, report
    assert "needs --map with a rate" in str(report)


# --- five folders, each in two commands


def call(*argv: object) -> int:
    return main([str(one) for one in argv])


def write_bids(raw: Path) -> str:
    for i in range(1, 5):
        name = f"sub-{i:02d}/eeg/sub-{i:02d}_task-sleep"
        write_night(raw / f"{name}_eeg.edf", [""] * 4)
        (raw / f"{name}_events.tsv").write_text(
            "onset\tduration\ttrial_type\n0\t30\tSleep stage W\n30\t30\tN2\n60\t60\tSleep stage R\n"
        )
    (raw / "participants.tsv").write_text(
        "participant_id\tage\n" + "".join(f"sub-{i:02d}\t{30 + i}\n" for i in range(1, 5))
    )
    (raw / "dataset_description.json").write_text("{}")
    return "staging"


def write_arrhythmias(raw: Path) -> str:
    for i in range(4):
        write_wfdb(raw / "db", f"{100 + i}", ("V5", "V2") if i == 0 else ("MLII", "V1"))
        write_beats(raw / "db", f"{100 + i}")
    return "points"


def write_csvs(raw: Path) -> str:
    rng = np.random.default_rng(0)
    for i in range(4):
        rows = rng.normal(size=(400, 2)).round(3).tolist()
        (raw / f"subject {i}").mkdir(parents=True)
        lines = [f"{k / 20:.2f},{a},{b},note {k}" for k, (a, b) in enumerate(rows)]
        (raw / f"subject {i}" / "day [1].csv").write_text(
            "time,acc x,acc y,remark\n" + "\n".join(lines) + "\n"
        )
    return ""


def write_arrays(raw: Path) -> str:
    rng = np.random.default_rng(0)
    (raw / "arrays").mkdir(parents=True)
    for i in range(4):
        np.save(raw / "arrays" / f"rec{i}.npy", rng.normal(size=(60, 3)))
    (raw / "labels.csv").write_text(
        "filename,patient,label\n" + "".join(f"rec{i}.npy,p{i},{'ab'[i % 2]}\n" for i in range(4))
    )
    return "classification"


def write_research_nights(raw: Path) -> str:
    for i in range(4):
        write_night(raw / "polysomnography" / f"n-{i}.edf", [""] * 5)
        write_nsrr(raw / "annotations" / f"n-{i}-nsrr.xml", NIGHT)
    return "staging"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "needs_map"),
    [
        (write_bids, False),
        (write_arrhythmias, False),
        (write_csvs, True),
        (write_arrays, True),
        (write_research_nights, False),
    ],
)
def test_folders_reach_windows_in_two_commands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], str],
    needs_map: bool,
) -> None:
    raw, home, path = tmp_path / "raw", tmp_path / "home", tmp_path / "map.toml"
    view = write(raw)
    assert call("ingest", "generic", raw, "--init-map", path, "-w", home) == 0
    assert not (home / "cache").exists()
    assert ("to fill in" in capsys.readouterr().out) == (write is write_arrays)
    # the map as it is, and where it is not needed without
    for chosen in [True] if needs_map else [True, False]:
        place = home / str(chosen)
        assert call(
            "ingest", "generic", raw, *(["--map", path] if chosen else []), "-w", place
        ) in {0, 3}
        assert call("tokenize", f"generic/{view}".rstrip("/"), "-w", place) == 0
        built = tokens.open_tokens(place / "tokens" / f"generic-{view}".rstrip("-"))
        assert len(built) >= 4
        assert len(built.whole_index["recording_id"].unique()) == (
            3 if write is write_arrhythmias else 4
        )
    # it is there already
    assert call("ingest", "generic", raw, "--init-map", path, "-w", home) == 2


def test_a_map_shows_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        write_night(
            tmp_path / "raw" / "nights" / f"a{i}.edf",
            ["Sleep stage W", 'say "hi"\\'],
            channels=("C3", "C4") if i else ("C3",),
        )
        write_wfdb(tmp_path / "raw", f"r{i}")
        write_beats(tmp_path / "raw", f"r{i}")
    assert call("ingest", "generic", tmp_path / "raw", "--init-map", tmp_path / "map.toml") == 0
    text = (tmp_path / "map.toml").read_text()
    for wanted in (
        '"C3" at 100 Hz, in 3 of 3 files',
        '"C4" at 100 Hz, in 2 of 3',
        '"MLII" at 360 Hz, in 3 of 3',
        '"N" = "N"  # 165 times',
    ):
        assert wanted in text
    given = "\n".join(
        line.removeprefix("# ") if line.startswith(('# "', "# [labels]")) else line
        for line in text.splitlines()
    )
    (tmp_path / "filled.toml").write_text(given)
    report = attempt(
        "generic",
        tmp_path / "raw",
        tmp_path / "cache",
        options={"map": str(tmp_path / "filled.toml")},
    )
    assert report["counts"]["quarantined"] == 0
    assert {note.label for note in recordings(tmp_path / "cache")["nights/a1"].annotations} == {
        "W",
        'say "hi"\\',
    }
    for argv in (["edf", tmp_path / "raw"], ["generic"], ["generic", tmp_path / "none"]):
        assert call("ingest", *argv, "--init-map", tmp_path / "other.toml") in {2, 4}
    (tmp_path / "empty").mkdir()
    assert call("ingest", "generic", tmp_path / "empty", "--init-map", tmp_path / "other.toml") == 4
    assert not (tmp_path / "other.toml").exists()
