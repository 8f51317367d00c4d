"""MATLAB 5 files: arrays as scipy wrote them, what is not read, damage in one clear line; the
recordings of the Signal Processing Cup.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from samples import SAMPLES, require_sample

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats.matlab import read_array
from bitimely_core.types import Record

DATA = SAMPLES / "complete"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_arrays_are_read_as_they_were_written(tmp_path: Path, dtype: str, *, packed: bool) -> None:
    rng = np.random.default_rng(0)
    for shape in ((5, 400), (1, 1), (1, 3), (0, 4), (2, 3, 4)):
        values = (100 * rng.random(shape)).astype(dtype)
        scipy.io.savemat(
            tmp_path / "x.mat",
            {"sig": values, "text": "hello", "cell": np.array([1, "a"], object)},
            do_compression=packed,
        )
        for name in ("sig", ""):
            found = read_array(tmp_path / "x.mat", name)
            assert found.dtype == values.dtype
            np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1.0},
        np.array([1, "a"], object),
        "text",
        np.ones(3) + 1j,
        scipy.sparse.csc_matrix(np.eye(3)),
        np.array([(1, 2)], "f8,f8"),
    ],
    ids=["struct", "cells", "text", "complex", "sparse", "records"],
)
def test_what_is_no_array_of_real_numbers_is_named_and_not_built(
    tmp_path: Path, value: Any
) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"sig": value})
    for name in ("sig", "", "other"):
        with pytest.raises(UserError) as caught:
            read_array(tmp_path / "x.mat", name)
        assert caught.value.code == "schema"
        assert "x.mat" in str(caught.value)
    scipy.io.savemat(
        tmp_path / "x.mat", {"sig": value, "b": [1.0, 2.0], "c": [3.0], "d": [4.0, 5.0]}
    )
    assert read_array(tmp_path / "x.mat", "c").tolist() == [[3.0]]
    with pytest.raises(UserError, match="b \\(double\\)"):
        read_array(tmp_path / "x.mat")


def build_matrix(shape: tuple[int, ...], stated: int, content: bytes) -> bytes:
    """A matrix of doubles whose values have a tag of `stated` bytes."""
    body = (
        struct.pack("<IIII", 6, 8, 6, 0)
        + struct.pack("<II", 5, 4 * len(shape))
        + struct.pack(f"<{len(shape)}i", *shape)
    )
    body += (
        b"\0" * (-len(body) % 8)
        + struct.pack("<II", 1, 3)
        + b"sig\0\0\0\0\0"
        + struct.pack("<II", 9, stated)
        + content
    )
    return struct.pack("<II", 14, len(body)) + body


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    good = build_matrix((1, 4), 32, bytes(32))
    files: list[tuple[bytes, set[str]]] = [
        (head + build_matrix((1, 1 << 30), 1 << 31, bytes(32)), {"header_implausible"}),
        (head + build_matrix((1 << 15, 1 << 15, 1 << 15), 32, bytes(32)), {"header_implausible"}),
        (head + build_matrix((1, 5), 32, bytes(32)), {"header_implausible"}),
        (head + build_matrix((-1, 4), 32, bytes(32)), {"corrupt"}),
        (head + good[:-8], {"truncated"}),
        (head + good + good, {"duplicate_key"}),
        (head + struct.pack("<II", 15, 9) + b"no zlib !", {"corrupt"}),
        (head + struct.pack("<II", 99, 8) + bytes(8), {"corrupt"}),
        (head[:100], {"unsupported_format"}),
        (b"MATLAB 7.3 MAT-file".ljust(512), {"unsupported_format"}),
        (bytes(200), {"unsupported_format"}),
        (b"", {"empty_file"}),
    ]
    bomb = zlib.compress(build_matrix((1, 10 << 20), 80 << 20, bytes(80 << 20)))
    files.append((head + struct.pack("<II", 15, len(bomb)) + bomb, {"expansion_limit"}))
    packed = zlib.compress(good)
    files.append(
        (head + struct.pack("<II", 15, len(packed) - 12) + packed[:-12], {"truncated", "corrupt"})
    )
    for data, codes in files:
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            read_array(path)
        assert str(caught.value.code) in codes, caught.value
        assert "x.mat" in str(caught.value)
    path.write_bytes(head + good)
    assert read_array(path, "sig").tolist() == [[0.0] * 4]


# --- the Signal Processing Cup


def write_cup(folder: Path, training: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Training recordings with an ECG, three test recordings of two people, an extra one of a test
    person. Name -> `sig`, `BPM0`.
    """
    rng = np.random.default_rng(7)
    made = {}
    pairs = [
        (f"DATA_{i:02d}_TYPE02", f"DATA_{i:02d}_TYPE02_BPMtrace") for i in range(1, training + 1)
    ]
    pairs += [(f"TEST_{name}", f"True_{name}") for name in ("S01_T01", "S02_T01", "S02_T02")] + [
        ("DATA_S02_T03", "BPM_S02_T03")
    ]
    folder.mkdir(parents=True)
    for k, (name, labels) in enumerate(pairs):
        sig = np.round(rng.normal(0, 200, (6 if "TYPE" in name else 5, 1400 + 250 * k)) * 2) / 2
        rates = 60 + 100 * rng.random(((sig.shape[1] - 1000) // 250 + 1, 1))
        scipy.io.savemat(folder / f"{name}.mat", {"sig": sig}, do_compression=True)
        scipy.io.savemat(folder / f"{labels}.mat", {"BPM0": rates}, do_compression=True)
        made[name] = (sig, rates)
    return made


def test_recordings_of_the_cup_keep_people_and_parts(tmp_path: Path) -> None:
    made = write_cup(tmp_path / "raw")
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], report["reason_counts"]) == (0, {"left_out": 1})
    assert [unit["unit"] for unit in report["units"]] == sorted(set(made) - {"DATA_S02_T03"})
    windows = tokens.build(tmp_path / "cache", out=tmp_path / "t", normalise="none")
    index = windows.index
    assert set(index.filter(index["split"] == "test")["subject_id"]) == {"test-S01", "test-S02"}
    held = set(index.filter(index["split"] == "validation")["subject_id"])
    assert len(held) == 1
    assert held < {f"train-{i:02d}" for i in range(1, 5)}
    targets = windows.targets(None)
    assert targets is not None
    for row, (name, start) in enumerate(zip(index["recording_id"], index["start"], strict=True)):
        sig, rates = made[name]
        first = round(start * 125)
        np.testing.assert_array_equal(windows.values([row])[0], sig[-5:, first : first + 1000].T)
        assert targets[row] == np.float32(rates[first // 250, 0])
    assert len(windows) == sum(
        len(rates) for name, (_, rates) in made.items() if name != "DATA_S02_T03"
    )


def test_the_extra_recording_joins_its_person_by_name_alone(tmp_path: Path) -> None:
    made = write_cup(tmp_path / "raw")
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "cache", options={"extra": "s02_t03"})
    assert "DATA_S02_T03" in {unit["unit"] for unit in report["units"]}
    windows = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    rows = windows.index.filter(windows.index["recording_id"] == "DATA_S02_T03")
    assert (set(rows["subject_id"]), set(rows["split"]), len(rows)) == (
        {"test-S02"},
        {"test"},
        len(made["DATA_S02_T03"][1]),
    )
    with pytest.raises(UserError) as caught:
        ingest("ieee-ppg", tmp_path / "raw", tmp_path / "other", options={"extra": "S09_T01"})
    assert (caught.value.exit_code, caught.value.code) == (2, "config")


def test_odd_recordings_of_the_cup_are_named(tmp_path: Path) -> None:
    made = write_cup(tmp_path / "raw")
    raw = tmp_path / "raw"
    (raw / "DATA_01_TYPE02_BPMtrace.mat").unlink()
    (raw / "DATA_02_TYPE02.mat").unlink()
    scipy.io.savemat(raw / "DATA_03_TYPE02.mat", {"sig": np.zeros((4, 2000))})
    scipy.io.savemat(
        raw / "True_S01_T01.mat", {"BPM0": np.append(made["TEST_S01_T01"][1][:-2], np.nan)[:, None]}
    )
    report = ingest("ieee-ppg", raw, tmp_path / "cache")
    found = {
        unit["unit"]: (
            unit["status"],
            {reason["code"]: reason["count"] for reason in unit["reasons"]},
        )
        for unit in report["units"]
    }
    assert report["exit_code"] == 3
    assert found["DATA_01_TYPE02"] == ("accepted_with_warning", {"unmatched_labels": 1})
    assert found["DATA_02_TYPE02"] == ("quarantined", {"missing_signal_file": 1})
    assert found["DATA_03_TYPE02"] == ("quarantined", {"dimensions": 1})
    assert found["TEST_S01_T01"] == ("accepted_with_warning", {"unmatched_labels": 1, "label": 1})
    assert (
        len(
            tokens.build(tmp_path / "cache", out=tmp_path / "t").index.filter(
                recording_id="TEST_S01_T01"
            )
        )
        == len(made["TEST_S01_T01"][1]) - 2
    )


def test_a_copy_of_a_file_of_the_cup_is_used_once_and_one_that_differs_costs_its_recording(
    tmp_path: Path,
) -> None:
    made = write_cup(tmp_path / "raw")
    plain = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "plain")
    old = tmp_path / "raw" / "old"
    old.mkdir()
    for name in ("DATA_01_TYPE02.mat", "DATA_01_TYPE02_BPMtrace.mat"):
        (old / name).write_bytes((tmp_path / "raw" / name).read_bytes())
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "same")
    assert (report["exit_code"], report["content_sha256"]) == (0, plain["content_sha256"])
    assert report["reason_counts"] == {"left_out": 1, "duplicates": 2}
    scipy.io.savemat(old / "DATA_01_TYPE02_BPMtrace.mat", {"BPM0": made["DATA_01_TYPE02"][1] + 1})
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "differ")
    assert report["exit_code"] == 3
    (unit,) = (unit for unit in report["units"] if unit["status"] == "quarantined")
    assert unit["unit"] == "DATA_01_TYPE02"
    wrong = {
        reason["file"]: reason["message"]
        for reason in unit["reasons"]
        if reason["code"] == "duplicate_key"
    }
    assert set(wrong) == {"DATA_01_TYPE02_BPMtrace.mat", "old/DATA_01_TYPE02_BPMtrace.mat"}
    assert all(
        "2 times, with different contents, none of them is used. Remove the wrong ones" in message
        for message in wrong.values()
    )
    (old / "DATA_01_TYPE02_BPMtrace.mat").unlink()
    # it may be another one: nothing is chosen in silence
    (old / "DATA_01_TYPE02_BPMtrace.mat").symlink_to("/etc/hostname")
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "link")
    (unit,) = (unit for unit in report["units"] if unit["status"] == "quarantined")
    assert ("symlink_outside_root", "old/DATA_01_TYPE02_BPMtrace.mat") in {
        (reason["code"], reason["file"]) for reason in unit["reasons"]
    }


def test_a_constant_channel_of_the_cup_is_reported(tmp_path: Path) -> None:
    made = write_cup(tmp_path / "raw")
    sig = made["DATA_01_TYPE02"][0].copy()
    sig[1] = 0
    scipy.io.savemat(tmp_path / "raw" / "DATA_01_TYPE02.mat", {"sig": sig})
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "cache")
    (unit,) = (unit for unit in report["units"] if unit["status"] != "accepted")
    assert [(reason["code"], reason["field"]) for reason in unit["reasons"]] == [
        ("flat_channel", "PPG 1")
    ]
    assert report["exit_code"] == 0


def test_numbers_beyond_float32_and_labels_that_are_none_are_named(tmp_path: Path) -> None:
    """Not by a warning of numpy, which names no file."""
    write_cup(tmp_path / "raw")
    scipy.io.savemat(tmp_path / "raw" / "DATA_01_TYPE02.mat", {"sig": np.full((6, 1400), 1e300)})
    scipy.io.savemat(
        tmp_path / "raw" / "DATA_02_TYPE02_BPMtrace.mat",
        {"BPM0": np.array([[80.0], [1e300], [70.0]])},
    )
    scipy.io.savemat(tmp_path / "raw" / "DATA_03_TYPE02_BPMtrace.mat", {"BPM0": np.zeros((0, 0))})
    scipy.io.savemat(tmp_path / "raw" / "DATA_04_TYPE02.mat", {"Sig": np.zeros((6, 1400))})
    report = ingest("ieee-ppg", tmp_path / "raw", tmp_path / "cache")
    found = {
        unit["unit"]: {reason["code"]: reason for reason in unit["reasons"]}
        for unit in report["units"]
    }
    assert report["exit_code"] == 3
    assert set(found["DATA_01_TYPE02"]) == {"non_finite"}
    assert found["DATA_02_TYPE02"]["label"]["count"] == 1
    assert found["DATA_03_TYPE02"]["unmatched_labels"]["count"] == 4
    assert (
        "the file holds 'Sig (double)'. Save it under this name"
        in found["DATA_04_TYPE02"]["schema"]["message"]
    )


@pytest.mark.slow
def test_the_complete_cup_gives_the_windows_of_the_archive(tmp_path: Path) -> None:
    folder = require_sample(DATA / "ieee-spc2015")
    report = ingest("ieee-ppg", folder, tmp_path / "cache")
    assert (report["exit_code"], len(report["units"])) == (0, 22)
    windows = tokens.build(tmp_path / "cache", out=tmp_path / "t", normalise="none")
    counts = {
        split: (len(windows[split]), len(set(windows[split].subjects())))
        for split in ("train", "validation", "test")
    }
    assert counts["train"][0] + counts["validation"][0] == 1768
    assert counts["test"] == (1328, 8)
    targets = windows.targets(None)
    assert targets is not None
    for name, path, labels in (
        ("DATA_06_TYPE02", "Training_data/DATA_06_TYPE02", "Training_data/DATA_06_TYPE02_BPMtrace"),
        ("TEST_S06_T02", "TestData/TEST_S06_T02", "TrueBPM/True_S06_T02"),
    ):
        sig, rates = (
            scipy.io.loadmat(folder / f"{path}.mat")["sig"],
            scipy.io.loadmat(folder / f"{labels}.mat")["BPM0"].ravel(),
        )
        rows = np.flatnonzero((windows.index["recording_id"] == name).to_numpy())
        assert len(rows) == len(rates)
        np.testing.assert_array_equal(targets[rows], rates.astype(np.float32))
        for k in (0, 17, len(rows) - 1):
            np.testing.assert_array_equal(
                windows.values(rows[[k]])[0], sig[-5:, 250 * k : 250 * k + 1000].T.astype("f4")
            )


# --- generic


@pytest.mark.parametrize("turned", [False, True])
def test_a_map_names_variable_and_rate_of_a_matlab_file(tmp_path: Path, *, turned: bool) -> None:
    values = np.random.default_rng(1).normal(size=(900, 2))
    (tmp_path / "raw").mkdir()
    for i in range(3):
        scipy.io.savemat(
            tmp_path / "raw" / f"p{i}.mat",
            {"eeg": (values + i).T if turned else values + i, "fs": 90.0, "mask": values > 0},
        )
    (tmp_path / "map.toml").write_text(
        '[[files]]\npattern = "*.mat"\nvariable = "eeg"\nrate = 90\nchannels = ["left", "right"]\n'
    )
    report = ingest(
        "generic", tmp_path / "raw", tmp_path / "cache", options={"map": str(tmp_path / "map.toml")}
    )
    assert (report["exit_code"], len(report["units"])) == (0, 3)
    for record in open_cache(tmp_path / "cache").records():
        assert [(signal.channel, signal.rate) for signal in record.signals] == [
            ("left", 90.0),
            ("right", 90.0),
        ]
        np.testing.assert_array_equal(
            np.stack([s.samples for s in record.signals], 1),
            (values + int(record.recording_id[1])).astype("f4"),
        )
    (tmp_path / "map.toml").write_text('[[files]]\npattern = "*.mat"\nrate = 90\n')
    with pytest.raises(UserError, match="nothing is left") as caught:
        ingest(
            "generic",
            tmp_path / "raw",
            tmp_path / "other",
            options={"map": str(tmp_path / "map.toml")},
        )
    assert any("eeg (double)" in finding.message for finding in caught.value.details)


FOUND = {  # variables of a file -> channels and rate
    "an array and a rate": ({"data": (3, 900), "Fs": 250}, ["channel 1", "channel 2", "channel 3"]),
    "vectors": ({"ECG": (900, 1), "PPG": (1, 900), "fs": 250}, ["ECG", "PPG"]),
    "seconds": ({"t": np.arange(900) / 250, "x": (900, 1)}, ["channel 1"]),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_matlab_file_that_states_a_rate_needs_no_map(tmp_path: Path, kind: str) -> None:
    stated, names = FOUND[kind]
    random = np.random.default_rng(2)
    content = {k: random.normal(size=v) if isinstance(v, tuple) else v for k, v in stated.items()}
    (tmp_path / "raw").mkdir()
    scipy.io.savemat(tmp_path / "raw" / "a.mat", content)
    ingest("generic", tmp_path / "raw", tmp_path / "cache")
    (record,) = open_cache(tmp_path / "cache").records()
    assert [(s.channel, s.rate) for s in record.signals] == [(name, 250.0) for name in names]
    array = next(v for k, v in content.items() if isinstance(stated[k], tuple))
    wanted = array.reshape(-1)[:900].astype("f4")
    np.testing.assert_array_equal(record.signals[0].samples, wanted)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"x": np.zeros((900, 1))}, "has no sampling rate"),
        ({"x": np.zeros((900, 1)), "t": np.arange(900) / 2}, "has no sampling rate"),
        ({"rec": {"data": np.zeros((900, 1)), "fs": 250}}, "'-struct', 'rec'"),
    ],
)
def test_matlab_files_alone_say_what_they_need(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    (tmp_path / "raw").mkdir()
    scipy.io.savemat(tmp_path / "raw" / "a.mat", content)
    with pytest.raises(UserError) as caught:
        ingest("generic", tmp_path / "raw", tmp_path / "cache")
    whole = " ".join(finding.message for finding in (caught.value.finding, *caught.value.details))
    assert said in whole
    assert str(tmp_path) not in whole.split("--init-map")[0].split("Write one")[0]


def store_matlab(folder: Path, arrays: dict[str, Any], text: str = "", **options: Any) -> Record:
    """The recording of a file of MATLAB; `text`: a map."""
    (folder / "raw").mkdir()
    scipy.io.savemat(folder / "raw" / "a.mat", arrays, **options)
    (folder / "map.toml").write_text(text)
    chosen = {"options": {"map": str(folder / "map.toml")}} if text else {}
    assert ingest("generic", folder / "raw", folder / "cache", **chosen)["exit_code"] == 0
    (record,) = open_cache(folder / "cache").records()
    return record


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("word", ["ch_names", "label", "Channels"])
@pytest.mark.parametrize("kind", [object, str])
def test_texts_of_a_matlab_file_name_its_channels(
    tmp_path: Path, kind: type, word: str, *, packed: bool
) -> None:
    names = ["Fp1", "EEG Fpz-Cz", "Ö2"]
    values = np.random.default_rng(0).normal(size=(3, 400))
    arrays = {"eeg": values, "fs": 100.0, word: np.array(names, kind)}
    record = store_matlab(tmp_path, arrays, do_compression=packed)
    assert [signal.channel for signal in record.signals] == names
    for signal, row in zip(record.signals, values, strict=True):
        np.testing.assert_array_equal(signal.samples, row.astype("f4"))


@pytest.mark.parametrize(
    "names", [["a", "a", "b"], ["a", "", "b"], ["a", 1, "b"], ["a", np.array(["b"], object), "c"]]
)
def test_cells_that_name_no_channels_are_left(tmp_path: Path, names: list[Any]) -> None:
    cells = np.empty(3, object)
    cells[:] = names
    record = store_matlab(tmp_path, {"x": np.ones((400, 3)), "fs": 100.0, "names": cells})
    assert [signal.channel for signal in record.signals] == ["channel 1", "channel 2", "channel 3"]


@pytest.mark.parametrize("beside", [False, True])
def test_numbered_arrays_are_trials_of_one_recording(tmp_path: Path, *, beside: bool) -> None:
    rng = np.random.default_rng(1)  # SEED has 15, of which the last comes before the second by name
    trials = {f"xy_eeg{k}": rng.normal(size=(4, 200 * (k + 1))) for k in (1, 2, 10)}
    arrays = dict(reversed(trials.items()))
    text = '[[files]]\npattern = "*.mat"\nrate = 200\n'
    wanted = ["eeg1", "eeg2", "eeg10"]
    if beside:
        arrays["label"], wanted = np.array([[1.0, -1.0, 0.0]]), ["1", "-1", "0"]
    record = store_matlab(tmp_path, arrays, text)
    assert [note.label for note in record.annotations] == wanted
    for note, values in zip(record.annotations, trials.values(), strict=True):
        assert note.duration == values.shape[1] / 200
        segment = [signal for signal in record.signals if signal.onset == note.onset]
        np.testing.assert_array_equal([s.samples for s in segment], values.astype("f4"))
    windows = tokens.build(tmp_path / "cache", out=tmp_path / "tokens", window=200)
    assert len(windows) == 2 + 3 + 11, "no window spans two trials"


def test_labels_of_trials_may_lie_in_a_file_beside_them(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()  # SEED: one file with the labels of the trials of everybody
    trials = {f"xy_eeg{k}": np.random.default_rng(k).normal(size=(4, 300)) for k in (1, 2, 10)}
    for name in ("1_a", "2_b"):
        scipy.io.savemat(tmp_path / "raw" / f"{name}.mat", trials | {"fs": 50.0})
    scipy.io.savemat(tmp_path / "raw" / "label.mat", {"label": [[1.0, -1.0, 0.0]]})
    ingest("generic", tmp_path / "raw", tmp_path / "cache")
    records = list(open_cache(tmp_path / "cache").records())
    assert [record.recording_id for record in records] == ["1_a", "2_b"]
    assert [[note.label for note in r.annotations] for r in records] == [["1", "-1", "0"]] * 2
    scipy.io.savemat(tmp_path / "raw" / "label.mat", {"label": [[1.0, -1.0]]})
    with pytest.raises(UserError) as caught:
        ingest("generic", tmp_path / "raw", tmp_path / "other")
    assert "2 labels in 'label.mat', expected one for each of 3 arrays" in str(caught.value.details)


def test_numbered_arrays_of_other_channels_or_without_a_rate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    arrays = {"x1": np.ones((4, 300)), "x2": np.ones((5, 300))}
    for content, message in (({}, "needs --map with a rate"), ({"fs": 50.0}, "of 4, 5 channels")):
        scipy.io.savemat(tmp_path / "raw" / "a.mat", arrays | content)
        with pytest.raises(UserError) as caught:
            ingest("generic", tmp_path / "raw", tmp_path / "cache")
        assert message in f"{caught.value} {caught.value.details}"
