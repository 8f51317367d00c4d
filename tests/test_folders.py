"""Folders as they come: annotation files beside the recordings, differing channels and rates, and the map that is made for a folder."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES, require_sample
from test_generic import attempt, codes, ingest_with_map, recordings, write_edf

from bitimely_core import tokens
from bitimely_core.cache import open_cache
from bitimely_core.errors import UserError
from bitimely_core.tokens import open_views

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

RATE = 360
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas, in the package that writes the records


def write_wfdb(folder: Path, name: str, channels: tuple[str, ...] = ("MLII", "V1"), *, rate: int = RATE, seconds: int = 60) -> None:
    """A record of noise."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng([*name.encode()]).integers(-500, 500, (seconds * rate, len(channels)))
    count = len(channels)
    wfdb.wrsamp(
        name, rate, ["mV"] * count, list(channels), d_signal=values, fmt=["16"] * count, adc_gain=[200.0] * count, baseline=[0] * count,
        write_dir=str(folder),
    )  # fmt: skip


def write_beats(folder: Path, name: str, extension: str = "atr", rate: int = RATE) -> None:
    """A beat a second of which each tenth is ventricular, sinus rhythm for 20 s, fibrillation for 40 s, some noise and a name in a note."""
    rows = [(10 * rate // 100, "+", "(N"), (20 * rate, "+", "(AFIB"), (30 * rate, "~", ""), (31 * rate, '"', "Jane Doe")]
    rows += [(second * rate + rate // 2, "V" if second % 10 == 9 else "N", "") for second in range(60)]
    times, symbols, texts = zip(*sorted(rows), strict=True)
    wfdb.wrann(name, extension, np.array(times), list(symbols), aux_note=list(texts), write_dir=str(folder))


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
    beats = [(s / RATE, symbol) for s, symbol in zip(oracle.sample, oracle.symbol, strict=True) if symbol in "NV"]
    assert [(note.onset, note.label) for note in found if not note.duration] == beats
    assert [note for note in found if note.duration] == [(0.1, pytest.approx(19.9), "N"), (20.0, 40.0, "AFIB")]
    assert b"Jane" not in b"".join(path.read_bytes() for path in (tmp_path / "cache").iterdir() if path.is_file())
    rhythms = tokens.build(tmp_path / "cache", view="annotations", out=tmp_path / "rhythms")
    assert (list(rhythms.class_names), rhythms.length, len(rhythms)) == (["AFIB", "N"], 3600, 4 * (1 + 4))
    beats_view = tokens.build(tmp_path / "cache", view="points", out=tmp_path / "beats")
    index = beats_view.whole_index.filter(beats_view.whole_index["recording_id"] == "r1")
    assert (list(beats_view.class_names), beats_view.length) == (["N", "V"], RATE)
    assert list(zip(index["start"] + 0.5, index["label"], strict=True)) == beats


def test_a_map_chooses_annotation_files_and_their_kinds(tmp_path: Path) -> None:
    write_wfdb(tmp_path / "raw", "r")
    write_beats(tmp_path / "raw", "r", "hyp")
    for number, (events, wanted) in enumerate({"beats": {"N", "V"}, "rhythms": {"N", "AFIB"}, "both": {"N", "V", "AFIB"}}.items()):
        out = tmp_path / str(number)
        report = ingest_with_map(tmp_path / "raw", f'[[files]]\nannotators = ["hyp"]\nevents = "{events}"\n', out)
        assert report["units"][0]["files"] == ["r.hea", "r.dat", "r.hyp"]
        assert {note.label for note in recordings(out)["r"].annotations} == wanted
    ingest_with_map(tmp_path / "raw", '[[files]]\nannotators = ["hyp"]\n[labels]\nV = "ectopic"\n"(AFIB" = "AF"\n', tmp_path / "mapped")
    assert {note.label for note in recordings(tmp_path / "mapped")["r"].annotations} == {"ectopic", "AF"}
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


def test_the_real_record_has_its_beats(tmp_path: Path) -> None:
    require_sample(SAMPLES / "robust" / "wfdb")
    attempt("wfdb", SAMPLES / "robust" / "wfdb", tmp_path / "cache")
    record = recordings(tmp_path / "cache")["100"]
    seconds = max(len(signal.samples) / signal.rate for signal in record.signals)
    oracle = wfdb.rdann(str(SAMPLES / "robust" / "wfdb" / "100"), "atr")
    beats = [symbol for sample, symbol in zip(oracle.sample, oracle.symbol, strict=True) if symbol != "+" and sample / 360 < seconds]
    assert [note.label for note in record.annotations if not note.duration] == beats


# --- channels and rates


def choose_slowly(recordings: dict[str, tuple[str, ...]]) -> tuple[int, int]:
    """Recordings and channels of the best set, by trying all."""
    names = sorted({channel for channels in recordings.values() for channel in channels})
    sets = (set(chosen) for size in range(1, len(names) + 1) for chosen in itertools.combinations(names, size))
    return max((sum(chosen <= set(channels) for channels in recordings.values()), len(chosen)) for chosen in sets)


@pytest.mark.parametrize("seed", range(20))
def test_channels_are_the_largest_set_of_most_recordings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = {str(i): tuple(rng.permutation(list("abcdef"))[: rng.integers(1, 6)]) for i in range(8)}
    chosen = open_views.choose_channels(table)
    count = sum(set(chosen) <= set(channels) for channels in table.values())
    assert (count, len(chosen)) == choose_slowly(table)


def test_the_first_recordings_need_not_be_like_the_others(tmp_path: Path) -> None:
    for i in range(8):
        write_wfdb(tmp_path / "raw", f"r{i}", ("V5", "V2") if i < 2 else ("V1", "MLII") if i % 2 else ("MLII", "V1", "V6"), seconds=20)
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
    for events, view, wanted in (("beats", "annotations", "generic/points"), ("rhythms", "points", "generic/annotations")):
        ingest_with_map(tmp_path / "raw", f'[[files]]\nevents = "{events}"\n', tmp_path / events)
        with pytest.raises(UserError, match=wanted):
            tokens.plan(tmp_path / events, view=view)
    write_edf(tmp_path / "edf" / "a.edf")
    attempt("edf", tmp_path / "edf", tmp_path / "none")
    with pytest.raises(UserError, match="no recording has an annotation"):
        tokens.plan(open_cache(tmp_path / "none"), view="points")
