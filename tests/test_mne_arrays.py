"""Formats of mne, and arrays of NumPy and MATLAB, in forms that people have.

What is read is compared with mne, with numpy or with what was written.
"""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.recordings.array_splits import divide_by_split
from bitimely_core.recordings.template import write_template
from bitimely_core.types import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mne

RATE = 100.0


def make_raw(seconds: float = 30, seed: int = 0) -> Any:
    """Two channels of noise, in volts."""
    info = mne.create_info(["Cz", "Pz"], RATE, "eeg", verbose="ERROR")
    volts = np.random.default_rng(seed).standard_normal((2, round(seconds * RATE))) * 1e-5
    return mne.io.RawArray(volts, info, verbose="ERROR")


def read_folder(folder: Path, **options: Any) -> dict[str, Record]:
    """Name -> recording of a folder."""
    cache = folder.parent / "cache"
    ingest("generic", folder, cache, **options)
    return {record.recording_id: record for record in open_cache(cache).records()}


def list_pieces(record: Record, channel: str) -> list[tuple[float, np.ndarray]]:
    """Onset and physical values of the segments of a channel."""
    return [
        (s.onset, s.samples.astype(np.float64) * s.scale + s.offset)
        for s in record.signals
        if s.channel == channel
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


# --- formats of mne


@pytest.mark.parametrize("dated", [False, True])
def test_events_lie_where_the_samples_do(folder: Path, dated: bool) -> None:
    """Cropped at both ends: mne cuts the last event."""
    raw = make_raw(60)
    if dated:
        raw.set_meas_date(1_000_000_000)
    raw.set_annotations(
        mne.Annotations([5.0, 22.5, 47.0], [1.0, 0.01, 9.0], ["before", "tick", "long"])
    )
    raw.crop(20.0, 50.0).save(folder / "a_raw.fif", verbose="ERROR")
    record = read_folder(folder, keep_phi=True, keep_dates=True)["a_raw"]
    rows = [(round(n.onset, 4), round(n.duration, 4), n.label) for n in record.annotations]
    assert rows == [(2.5, 0.0, "tick"), (27.0, 3.01, "long")]
    assert record.start_time == ("2001-09-09T01:47:00" if dated else None)


@pytest.mark.parametrize("mapped", [False, True])
def test_channels_that_a_file_calls_bad_are_left_out_unless_named(
    folder: Path, mapped: bool
) -> None:
    raw = make_raw(60)
    raw.info["bads"] = ["Pz"]
    raw.save(folder / "a_raw.fif", verbose="ERROR")
    options = write_map(folder, 'channels = ["Pz"]') if mapped else {}
    record = read_folder(folder, **options)["a_raw"]
    rest = [name for name in raw.ch_names if name != "Pz"]
    assert [s.channel for s in record.signals] == (["Pz"] if mapped else rest)
    if not mapped:
        report = ingest("generic", folder, folder.parent / "cache")
        said = [reason["message"] for reason in report["reasons"]]
        assert any("'Pz' in 1 of 1 recordings, their file" in message for message in said)


@pytest.mark.parametrize("naming", ["neuromag", "bids"])
def test_a_split_file_is_one_recording(folder: Path, naming: str) -> None:
    raw = make_raw(2000, seed=1)
    name = "a_raw.fif" if naming == "neuromag" else "sub-01_task-x_meg.fif"
    raw.save(
        folder / name, split_size="2MB", split_naming=naming, buffer_size_sec=10, verbose="ERROR"
    )
    make_raw(5, seed=2).save(folder / "b_raw.fif", verbose="ERROR")
    make_raw(5, seed=3).save(folder / "b_raw-1.fif", verbose="ERROR")  # a recording of its own
    assert len(list(folder.glob("*.fif"))) > 3
    report = ingest("generic", folder, folder.parent / "cache")
    first = "a_raw" if naming == "neuromag" else "sub-01_task-x_split-01_meg"
    assert sorted(unit["unit"] for unit in report["units"]) == sorted([first, "b_raw", "b_raw-1"])
    (unit,) = [unit for unit in report["units"] if unit["unit"] == first]
    assert len(unit["files"]) == len(list(folder.glob("*.fif"))) - 2
    record = read_folder(folder)[first]
    ((onset, values),) = list_pieces(record, "Pz")
    assert onset == 0.0
    np.testing.assert_allclose(values, raw.get_data("Pz")[0] * 1e6, rtol=1e-5)


def make_epochs(onsets: list[float], first_samp: int = 0) -> Any:
    """Epochs of 2 s, from 0.5 s before their events."""
    raw = make_raw(60)
    events = np.array([[round(t * RATE) + first_samp, 0, 1 + k % 2] for k, t in enumerate(onsets)])
    raw = mne.io.RawArray(raw.get_data(), raw.info, first_samp=first_samp, verbose="ERROR")
    return mne.Epochs(
        raw,
        events,
        {"left": 1, "right": 2},
        tmin=-0.5,
        tmax=1.49,
        baseline=None,
        preload=True,
        verbose="ERROR",
    )


@pytest.mark.parametrize(
    ("times", "onsets"), [([1.0, 5.0, 20.0], [0.5, 4.5, 19.5]), ([1.0, 2.0, 3.0], [0.0, 3.0, 6.0])]
)
def test_epochs_of_a_fif_file_are_segments(
    folder: Path, times: list[float], onsets: list[float]
) -> None:
    """At their times in the recording; those that overlap lie one after the other."""
    epochs = make_epochs(times)
    epochs.save(folder / "a-epo.fif", verbose="ERROR")
    record = read_folder(folder)["a-epo"]
    pieces = list_pieces(record, "Cz")
    assert [round(onset, 6) for onset, _ in pieces] == onsets
    values = mne.read_epochs(folder / "a-epo.fif", verbose="ERROR").get_data("Cz")[:, 0] * 1e6
    np.testing.assert_allclose([samples for _, samples in pieces], values, rtol=1e-5)
    assert [(round(n.onset, 6), n.duration, n.label) for n in record.annotations] == [
        (onset, 2.0, label) for onset, label in zip(onsets, ["left", "right", "left"], strict=True)
    ]
    windows = tokens.build(folder.parent / "cache", view="annotations", out=folder.parent / "t")
    assert (len(windows), windows.length, list(windows.class_names)) == (3, 200, ["left", "right"])


def write_brainvision(folder: Path, units: list[str], encoding: str = "utf-8") -> np.ndarray:
    """A recording of these units with a marker of 1 and one of 100 samples."""
    values = np.random.default_rng(0).integers(-1000, 1000, (500, len(units))).astype("<i2")
    (folder / "a.eeg").write_bytes(values.tobytes())
    channels = "".join(f"Ch{k}=c{k},,0.1,{unit}\n" for k, unit in enumerate(units, 1))
    page = "UTF-8" if encoding == "utf-8" else "ANSI"
    header = f"""Brain Vision Data Exchange Header File Version 1.0
[Common Infos]
Codepage={page}
DataFile=a.eeg
MarkerFile=a.vmrk
DataFormat=BINARY
DataOrientation=MULTIPLEXED
NumberOfChannels={len(units)}
SamplingInterval=10000
[Binary Infos]
BinaryFormat=INT_16
[Channel Infos]
{channels}"""
    (folder / "a.vhdr").write_bytes(header.encode(encoding))
    (folder / "a.vmrk").write_text(
        "Brain Vision Data Exchange Marker File, Version 1.0\n[Common Infos]\n"
        f"Codepage={page}\nDataFile=a.eeg\n[Marker Infos]\n"
        "Mk1=New Segment,,1,1,0,20131113161403794232\n"
        "Mk2=Stimulus,S  1,101,1,0\nMk3=Stimulus,S  2,201,100,0\n"
    )
    return values.T * 0.1


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_units_of_a_header_are_kept(folder: Path, encoding: str) -> None:
    units = ["\u00b5V", "mmHg", "\u00b5S", "%", "\u00b0C", ""]
    values = write_brainvision(folder, units, encoding)
    record = read_folder(folder, keep_phi=True)["a"]
    assert [s.unit for s in record.signals] == ["uV", "mmHg", "uS", "%", "C", "uV"]
    for row, signal in zip(values, record.signals, strict=True):
        np.testing.assert_allclose(signal.samples, row, rtol=1e-5)
    assert [(n.onset, n.duration) for n in record.annotations if "S" in n.label] == [
        (1.0, 0.0),
        (2.0, 1.0),
    ]


def test_kinds_of_channel_have_the_units_of_their_values(folder: Path) -> None:
    kinds = {"eeg": (1e6, "uV"), "mag": (1, "T"), "grad": (1, "T/m"), "gsr": (1e6, "uS")}
    kinds |= {"temperature": (1, "C"), "hbo": (1, "mol")}
    info = mne.create_info([*kinds], RATE, [*kinds], verbose="ERROR")
    values = np.random.default_rng(0).normal(0, 1e-5, (len(kinds), 500))
    mne.io.RawArray(values, info, verbose="ERROR").save(folder / "a_raw.fif", verbose="ERROR")
    signals = {s.channel: s for s in read_folder(folder)["a_raw"].signals}
    assert {name: s.unit for name, s in signals.items()} == {n: u for n, (_, u) in kinds.items()}
    for row, (name, (factor, _)) in zip(values, kinds.items(), strict=True):
        np.testing.assert_allclose(signals[name].samples, row * factor, rtol=1e-5)


def write_interrupted(path: Path) -> list[tuple[float, int, int]]:
    """10 s in two stretches; the second at which each begins, its first sample and the last."""
    if path.suffix == ".vhdr":
        write_brainvision(path.parent, ["\u00b5V"])
        markers = path.parent / "a.vmrk"
        markers.write_text(f"{markers.read_text()}Mk4=New Segment,,301,1,0,20131113161503794232\n")
        return [(0.0, 0, 300), (3.0, 300, 500)]
    raw = make_raw(10)
    if path.suffix == ".set":
        keys = ("type", "latency", "duration")
        event = np.array([("boundary", 300.5, 99.0)], [(key, object) for key in keys])
        channels = np.array([("Cz",), ("Pz",)], [("labels", object)])
        sizes = {"nbchan": 2, "trials": 1, "pnts": 1000, "srate": RATE, "xmin": 0.0, "xmax": 9.99}
        content = {"data": raw.get_data(), "chanlocs": channels, "event": event, "ref": "common"}
        empty = ("epoch", "icawinv", "icaweights", "icasphere", "icaact", "times")
        content |= {**sizes, **{key: [] for key in empty}}
        scipy.io.savemat(path, {"EEG": content}, oned_as="row")
        return [(0.0, 0, 300), (3.0, 300, 1000)]
    if "pause" in path.name:
        raw.set_annotations(mne.Annotations([3.0], [2.0], ["BAD_ACQ_SKIP"]))
        raw.save(path, verbose="ERROR")
        return [(0.0, 0, 300), (5.0, 500, 1000)]
    joined = [raw.copy().crop(0, 2.99), raw.copy().crop(6)]
    mne.concatenate_raws(joined, verbose="ERROR").save(path, verbose="ERROR")
    return [(0.0, 0, 300), (3.0, 300, 700)]


@pytest.mark.parametrize("name", ["a.vhdr", "a.set", "a_pause_raw.fif", "a_joined_raw.fif"])
def test_stretches_of_an_interrupted_recording_stay_apart(folder: Path, name: str) -> None:
    wanted = write_interrupted(folder / name)
    (record,) = read_folder(folder, keep_phi=True).values()
    whole = mne.io.read_raw(folder / name, verbose="ERROR").get_data()[0] * 1e6
    pieces = list_pieces(record, record.signals[0].channel)
    assert [onset for onset, _ in pieces] == [onset for onset, _, _ in wanted]
    for (_, values), (_, begin, end) in zip(pieces, wanted, strict=True):
        np.testing.assert_allclose(values, whole[begin:end], rtol=1e-5)
    assert not {"boundary", "New Segment/", "BAD_ACQ_SKIP"} & {n.label for n in record.annotations}


def write_gdf(path: Path, values: np.ndarray, events: list[int], units: list[int]) -> None:
    """GDF 2.20 of int16 [T, V] at 100 Hz, with codes of units, and events at these samples."""
    count = len(units)
    fixed = b"GDF 2.20" + b" " * 66 + bytes(14) + b" " * 64 + bytes(16 + 16)
    fixed += struct.pack("<H", 1 + count) + bytes(50)
    fixed += struct.pack("<qIIHH", len(values) // 100, 1, 1, count, 0)
    channels = b"".join(f"c{k}".encode().ljust(16) for k in range(count)) + bytes(86 * count)
    channels += np.array(units, "<u2").tobytes()
    channels += np.repeat([-100.0, 100, -1000, 1000], count).tobytes() + bytes(68 * count)
    channels += np.repeat([30.0, 0, 0], count).astype("<f4").tobytes()
    channels += np.repeat([100, 3], count).astype("<i4").tobytes() + bytes(32 * count)
    marks = len(events)
    table = struct.pack("<B", 1) + marks.to_bytes(3, "little") + struct.pack("<f", 100)
    table += struct.pack(f"<{marks}I{marks}H", *(k + 1 for k in events), *[769] * marks)
    blocks = values.reshape(-1, 100, count).transpose(0, 2, 1).astype("<i2")
    path.write_bytes(fixed + channels + blocks.tobytes() + table)


def write_gdf_1(path: Path, values: np.ndarray, units: list[str]) -> None:
    """GDF 1.25 of int16 [T, V] at 100 Hz, with texts of units."""
    count = len(units)
    fixed = b"GDF 1.25" + b" " * 160 + b"2020010112000000" + struct.pack("<q", 256 * (1 + count))
    fixed += b" " * 44 + struct.pack("<qIII", len(values) // 100, 1, 1, count)
    channels = b"".join(f"c{k}".encode().ljust(16) for k in range(count)) + b" " * (80 * count)
    channels += b"".join(unit.encode().ljust(8) for unit in units)
    channels += np.repeat([-100.0, 100], count).tobytes()
    channels += np.repeat([-1000, 1000], count).astype("<i8").tobytes() + b" " * (80 * count)
    channels += np.repeat([100, 3], count).astype("<i4").tobytes() + b" " * (32 * count)
    blocks = values.reshape(-1, 100, count).transpose(0, 2, 1).astype("<i2")
    path.write_bytes(fixed + channels + blocks.tobytes() + struct.pack("<B3sI", 1, bytes(3), 0))


def write_neuroscan(path: Path, samples: np.ndarray, sensitivity: float) -> None:
    """A .cnt of Neuroscan: samples [T, V] of int16, a stimulus 7 at the hundredth sample."""
    count, channels = samples.shape
    begin = 900 + 75 * channels
    header = bytearray(begin)
    header[:12] = b"Version 3.0\0"
    header[225:247] = b"03/04/21\0\0" + b"10:20:30\0\0\0\0"
    table = begin + samples.size * 2
    for place, form, value in (
        (370, "<H", channels),
        (376, "<H", round(RATE)),
        (864, "<i", count),
        (886, "<i", table),
        (890, "<f", count / RATE),
    ):
        struct.pack_into(form, header, place, value)
    for k in range(channels):
        electrode = 900 + 75 * k
        header[electrode : electrode + 2] = (b"Cz", b"Pz")[k]
        struct.pack_into("<h", header, electrode + 47, 3 + k)  # baseline
        struct.pack_into("<f", header, electrode + 59, sensitivity)
        struct.pack_into("<f", header, electrode + 71, 1.0)
    event = struct.pack("<HBcl", 7, 0, b"\0", begin + 100 * channels * 2)
    path.write_bytes(
        bytes(header) + samples.astype("<i2").tobytes() + struct.pack("<Bll", 1, 8, 0) + event
    )


def test_a_file_of_neuroscan_has_its_values(folder: Path) -> None:
    samples = np.random.default_rng(0).integers(-9000, 9000, (500, 2)).astype(np.int16)
    write_neuroscan(folder / "a.cnt", samples, 20.0)
    record = read_folder(folder, keep_phi=True)["a"]
    assert [(s.channel, s.rate, s.unit) for s in record.signals] == [
        ("Cz", RATE, "uV"),
        ("Pz", RATE, "uV"),
    ]
    for k, signal in enumerate(record.signals):
        wanted = (samples[:, k] - (3.0 + k)) * 20.0 / 204.8
        np.testing.assert_allclose(signal.samples, wanted, rtol=1e-5, atol=1e-3)
    (note,) = record.annotations
    assert (note.label, note.duration) == ("7", 0.0)
    assert note.onset == pytest.approx(100 / RATE, abs=1.01 / RATE)


@pytest.mark.parametrize(
    ("name", "head", "advice"),
    [
        ("a.cnt", b"RIFF\x10\0\0\0CNT ", "mne.io.read_raw_ant(FILE).save('NAME_raw.fif')"),
        ("a.cnt", b"Version 3.0", "export it as EDF+ in the program that recorded it"),
        ("a.set", b"MATLAB 7.3 MAT-file", "'version', '6'"),
        ("a-ave.fif", b"\0\0\0\x64", "Give the raw file or epochs"),
    ],
)
def test_what_mne_does_not_read_says_what_to_do(
    folder: Path, name: str, head: bytes, advice: str
) -> None:
    (folder / name).write_bytes(head + bytes(2000))
    with pytest.raises(UserError) as caught:
        read_folder(folder)
    assert advice in str(caught.value.details)


HEADER = """Brain Vision Data Exchange Header File Version 1.0

[Common Infos]
Codepage=UTF-8
DataFile={0}.eeg
MarkerFile={0}.vmrk
DataFormat=BINARY
DataOrientation=MULTIPLEXED
NumberOfChannels=1
SamplingInterval=10000

[Binary Infos]
BinaryFormat=IEEE_FLOAT_32

[Channel Infos]
Ch1=Cz,,1,\u00b5V
"""


@pytest.mark.parametrize("named", ["night", "$b", "NIGHT", "other"])
def test_names_in_a_header_of_brainvision(folder: Path, named: str) -> None:
    values = np.random.default_rng(0).normal(0, 30, 300).astype("<f4")
    (folder / "night.vhdr").write_text(HEADER.format(named), encoding="utf-8")
    (folder / "night.eeg").write_bytes(values.tobytes())
    (folder / "night.vmrk").write_text(
        "Brain Vision Data Exchange Marker File, Version 1.0\n\n[Common Infos]\nDataFile=x.eeg\n\n"
        "[Marker Infos]\nMk1=Stimulus,S  1,101,1,0\n"
    )
    if named == "other":
        with pytest.raises(UserError) as caught:
            read_folder(folder)
        said = str(caught.value.details)
        assert "names the file 'other.eeg', which is not there" in said
        assert "If 'night.eeg' is it, write that name into the header" in said
        (folder / "other.eeg").write_bytes(values.tobytes())
        with pytest.raises(UserError) as caught:
            read_folder(folder)
        assert "'other.eeg', and 'night.eeg' lies beside it" in str(caught.value.details)
        (folder / "night.vhdr").write_text(HEADER.format("night"), encoding="utf-8")
    record = read_folder(folder, keep_phi=True)["night"]
    np.testing.assert_allclose(record.signals[0].samples, values, rtol=1e-6)
    assert record.signals[0].unit == "uV"
    assert [note.onset for note in record.annotations] == [1.0]


def test_samples_of_eeglab_that_are_not_there_are_named(folder: Path) -> None:
    fields = {"nbchan": 1, "trials": 1, "pnts": 100, "srate": 100.0, "xmin": 0.0, "xmax": 0.99}
    scipy.io.savemat(folder / "a.set", {"EEG": {**fields, "data": "a.fdt", "chanlocs": []}})
    with pytest.raises(UserError) as caught:
        read_folder(folder)
    assert "Copy 'a.fdt' beside it" in str(caught.value.details)


@pytest.mark.parametrize("filled", [False, True])
def test_epochs_of_eeglab_with_several_events_are_called_by_that_at_time_0(
    folder: Path, filled: bool
) -> None:
    """With the field `epoch`, from which mne joins the types of all, and without it."""
    wanted = ["odd", "even", "odd"]
    before, length = 50, 200
    values = np.random.default_rng(0).normal(0, 10, (3, 1, length))
    rows: list[tuple[str, float]] = []
    for number, name in enumerate(wanted):
        first = number * length + 1.0
        rows += [("fixation", first + 5), (name, first + before + 0.4)]
        rows += [("response", first + before + 60)] * (number > 0)
    events = np.array(rows, dtype=[("type", object), ("latency", object)])
    types = [[name for name, at in rows if (at - 1) // length == k] for k in range(3)]
    listed = [(np.array(names, dtype=object),) for names in types]
    fields: dict[str, Any] = {"nbchan": 1, "trials": 3, "pnts": length, "srate": RATE}
    fields |= {"xmin": -before / RATE, "xmax": (length - before - 1) / RATE, "event": events}
    fields["epoch"] = np.array(listed, dtype=[("eventtype", object)]) if filled else []
    data = values.transpose(1, 2, 0).astype(np.float32)
    chanlocs = np.array([("Cz",)], dtype=[("labels", object)])
    scipy.io.savemat(folder / "a.set", {"EEG": {**fields, "data": data, "chanlocs": chanlocs}})
    record = read_folder(folder)["a"]
    assert [note.label for note in record.annotations] == wanted
    for (_, samples), epoch in zip(list_pieces(record, "Cz"), values, strict=True):
        np.testing.assert_allclose(samples, epoch[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("link", [False, True])
def test_gdf_and_links_to_files(folder: Path, monkeypatch: pytest.MonkeyPatch, link: bool) -> None:
    """A relative path, and a folder whose files are links to a store inside of it (datalad)."""
    values = np.random.default_rng(0).integers(-900, 900, 1000)
    write_gdf(folder / "a.gdf", values[:, None], [200, 550], [4275])
    if link:
        (folder / ".store").mkdir()
        (folder / "a.gdf").rename(folder / ".store" / "x.gdf")
        (folder / "a.gdf").symlink_to(folder / ".store" / "x.gdf")
    monkeypatch.chdir(folder.parent)
    record = read_folder(Path("raw"), keep_phi=True)["a"]
    ((_, samples),) = list_pieces(record, "c0")
    np.testing.assert_allclose(samples, values * 0.1, atol=1e-5)
    assert [(n.onset, n.duration) for n in record.annotations] == [(2.0, 0.0), (5.5, 0.0)]


def test_units_and_gaps_between_runs_of_gdf_are_those_of_its_header(folder: Path) -> None:
    """mne takes mmHg, and values without a unit, for volts, and the lowest values for samples."""
    units = {4275: (1.0, "uV"), 4274: (1000.0, "uV"), 3872: (1.0, "mmHg"), 6048: (1.0, "C")}
    units[0] = (1.0, "")
    values = np.random.default_rng(0).integers(-900, 900, (1000, len(units)))
    values[300:340] = -1000
    values[700, 0] = -1000  # one channel alone is at its end
    write_gdf(folder / "a.gdf", values, [200], list(units))
    record = read_folder(folder)["a"]
    assert {s.channel: s.unit for s in record.signals} == {
        f"c{k}": unit for k, (_, unit) in enumerate(units.values())
    }
    for k, (factor, _) in enumerate(units.values()):
        pieces = list_pieces(record, f"c{k}")
        assert [onset for onset, _ in pieces] == [0.0, 3.4]
        samples = np.concatenate([piece for _, piece in pieces])
        wanted = np.delete(values[:, k], np.s_[300:340]) * 0.1 * factor
        np.testing.assert_allclose(samples, wanted, atol=1e-5 * factor)


def test_units_of_the_first_version_of_gdf_are_texts(folder: Path) -> None:
    values = np.random.default_rng(0).integers(-900, 900, (1000, 3))
    write_gdf_1(folder / "a.gdf", values, ["uV", "mV", "mmHg"])
    record = read_folder(folder)["a"]
    assert [signal.unit for signal in record.signals] == ["uV", "uV", "mmHg"]
    for k, factor in enumerate((1, 1000, 1)):
        ((_, samples),) = list_pieces(record, f"c{k}")
        np.testing.assert_allclose(samples, values[:, k] * 0.1 * factor, atol=1e-5 * factor)


def test_the_template_lists_channels_and_texts_of_formats_of_mne(folder: Path) -> None:
    """The line on unknown texts says that it does."""
    write_gdf(folder / "a.gdf", np.zeros((1000, 1)), [200, 550], [4275])
    make_raw().save(folder / "b_raw.fif", verbose="ERROR")
    text = write_template(scan_folder(folder))
    assert '"769" = "769"  # 2 times' in text
    assert '"c0" at 100 Hz' in text
    assert '"Cz" at 100 Hz' in text


def test_files_outside_of_the_folder_are_not_opened(folder: Path) -> None:
    """Through a header, and through a link to the samples."""
    write_brainvision(folder, ["mV"])
    (folder / "a.eeg").rename(folder.parent / "b.eeg")
    (folder / "a.eeg").symlink_to(folder.parent / "b.eeg")
    with pytest.raises(UserError) as caught:
        ingest("generic", folder, folder.parent / "cache")
    assert caught.value.code == "symlink_outside_root"


# --- arrays


def write_map(folder: Path, text: str = "") -> dict[str, Any]:
    """A map of arrays at 100 Hz, as an option of the ingest."""
    path = folder.parent / "map.toml"
    path.write_text(f'[[files]]\nrate = 100\npattern = "*.*"\n{text}')
    return {"options": {"map": str(path)}}


def write_array(path: Path, values: np.ndarray) -> None:
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        scipy.io.savemat(path, {"sig": values})


@pytest.mark.parametrize("ending", ["npy", "mat"])
@pytest.mark.parametrize(
    ("shape", "channels", "turned"),
    [((4, 900), "", True), ((900, 4), "", False), ((3, 5), "channels = ['a', 'b', 'c']", True)],
)
def test_an_array_with_more_channels_than_samples_is_turned(
    folder: Path, ending: str, shape: tuple[int, int], channels: str, turned: bool
) -> None:
    values = np.random.default_rng(0).standard_normal(shape)
    write_array(folder / f"a.{ending}", values)
    options = write_map(folder, f"format = '{ending}'\n{channels}")
    report = ingest("generic", folder, folder.parent / "cache", **options)
    record = read_folder(folder, **options)["a"]
    rows = values if turned else values.T
    np.testing.assert_allclose([s.samples for s in record.signals], rows, rtol=1e-6)
    is_said = "dimensions" in report["reason_counts"]
    assert is_said == (turned and not channels and ending == "npy")


@pytest.mark.parametrize(
    ("name", "labels", "classes"),
    [
        ("labels", np.arange(6) % 2, ["0", "1", "0", "1", "0", "1"]),
        ("y", np.array(["on", "off", "", "on", "on", "off"]), ["on", "off", "on", "on", "off"]),
        ("s1_y", np.array([0.0, 1, 1, np.nan, 2, 2]), ["0", "1", "1", "2", "2"]),
        ("y", np.eye(3, dtype=int)[[2, 0, 1, 1, 0, 2]], ["2", "0", "1", "1", "0", "2"]),  # one-hot
        ("labels", np.array([1.5, 2, 1.5, 2.5, 2, 2]), ["1.5", "2", "1.5", "2.5", "2", "2"]),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_an_array_of_three_dimensions_holds_epochs(
    folder: Path, name: str, labels: np.ndarray, classes: list[str], order: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).standard_normal((6, 3, 250)).astype(np.float32)
    np.save(folder / "s1_X.npy", values.transpose(order))
    np.save(folder / f"{name}.npy", labels)
    records = read_folder(folder, **write_map(folder))
    assert set(records) == {"s1_X"}
    for number in range(3):
        pieces = list_pieces(records["s1_X"], f"channel {number + 1}")
        np.testing.assert_array_equal([samples for _, samples in pieces], values[:, number])
        assert [onset for onset, _ in pieces] == [3.5 * k for k in range(6)]
    assert [note.label for note in records["s1_X"].annotations] == classes
    windows = tokens.build(folder.parent / "cache", view="annotations", out=folder.parent / "t")
    assert (len(windows), windows.length) == (len(classes), 250)


def test_labels_are_found_by_the_name_of_their_epochs(folder: Path) -> None:
    """Two people with as many epochs; integers of another length are samples."""
    rng = np.random.default_rng(0)
    for person in ("s1", "s2"):
        np.save(folder / f"{person}_epochs.npy", rng.standard_normal((4, 2, 50)))
    np.save(folder / "s1_labels.npy", np.array([1, 2, 3, 4]))
    np.save(folder / "s2_labels.npy", np.array([5, 6, 7, 8]))
    np.save(folder / "ppg.npy", rng.integers(0, 9, 500).astype(np.int16))
    records = read_folder(folder, **write_map(folder))
    labels = {name: [n.label for n in record.annotations] for name, record in records.items()}
    assert labels == {"s1_epochs": list("1234"), "s2_epochs": list("5678"), "ppg": []}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_epochs_of_matlab(folder: Path, order: tuple[int, ...]) -> None:
    """[epochs, channels, samples], and as EEGLAB and MATLAB have them, epochs last."""
    values = np.random.default_rng(0).standard_normal((6, 3, 250))
    write_array(folder / "a.mat", values.transpose(order))
    record = read_folder(folder, **write_map(folder, 'format = "mat"'))["a"]
    pieces = list_pieces(record, "channel 2")
    np.testing.assert_allclose([samples for _, samples in pieces], values[:, 1], rtol=1e-6)


# --- tables of classes beside recordings


def write_records(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(count):
        values = rng.integers(-500, 500, 500).astype("<i2")
        (folder / f"r{number}.dat").write_bytes(values.tobytes())
        line = f"r{number}.dat 16 1000/mV 16 0 {values[0]} {values.sum() & 0xFFFF} 0 II"
        (folder / f"r{number}.hea").write_text(f"r{number} 1 100 500\n{line}\n")


def test_labels_of_matlab_epochs_are_in_their_file(folder: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, 2, 100))
    with (folder / "a.mat").open("wb") as file:
        scipy.io.savemat(file, {"X": values, "y": np.array([1, 2, 1, 2, 3])})
    record = read_folder(folder, **write_map(folder, 'format = "mat"'))["a"]
    assert [note.label for note in record.annotations] == ["1", "2", "1", "2", "3"]
    pieces = list_pieces(record, "channel 1")
    np.testing.assert_allclose([samples for _, samples in pieces], values[:, 0], rtol=1e-6)


@pytest.mark.parametrize("ending", ["npy", "npz", "mat"])
def test_several_labels_an_epoch_are_named_and_one_of_them_is_read(
    folder: Path, ending: str
) -> None:
    """As DEAP rates each trial by valence, arousal, dominance and liking."""
    rng = np.random.default_rng(0)
    arrays = {"data": rng.standard_normal((5, 2, 100)), "labels": rng.uniform(1, 9, (5, 4))}

    def save() -> None:
        if ending == "npy":
            for name, array in arrays.items():
                np.save(folder / f"s1_{name}.npy", array)
        elif ending == "npz":
            np.savez(folder / "s1.npz", **arrays)
        else:
            scipy.io.savemat(folder / "s1.mat", arrays)

    save()
    options = write_map(folder, f'format = "{ending}"' if ending == "mat" else "")
    report = ingest("generic", folder, folder.parent / "cache", **options)
    assert len(report["units"]) == 1
    (line,) = [r["message"] for r in report["units"][0]["reasons"] if "labels" in r["message"]]
    assert "has 4 labels an epoch, in an array of 5 x 4" in line
    arrays["labels"] = arrays["labels"][:, 0]  # as the line advises
    save()
    (record,) = read_folder(folder, **options).values()
    assert [n.label for n in record.annotations] == [f"{v:g}" for v in arrays["labels"]]


@pytest.mark.parametrize(
    ("ending", "name", "people"),
    [
        ("npz", "subject", np.array([3, 3, 1, 1, 3, 2])),
        ("mat", "patient_id", np.array([3.0, 3, 1, 1, 3, 2])),
        ("npz", "groups", np.array([3.0, 3, 1, 1, 3, 2])),
        ("npz", "Subjects", np.array(["S3", "S3", "S1", "S1", "S3", "S2"])),
        ("mat", "Subjects", np.array(["S3", "S3", "S1", "S1", "S3", "S2"])),
    ],
)
def test_epochs_of_several_subjects_are_a_recording_for_each(
    folder: Path, ending: str, name: str, people: np.ndarray
) -> None:
    """They counted as one person, or the array of subjects as a second one of samples."""
    values = np.random.default_rng(0).standard_normal((6, 2, 100))
    arrays = {"X": values, "y": np.array([0, 1, 0, 1, 1, 0]), name: people, "fs": RATE}
    if ending == "npz":
        np.savez(folder / "a.npz", **arrays)
    else:
        texts = people if people.dtype.kind != "U" else people.astype(object)
        scipy.io.savemat(folder / "a.mat", arrays | {name: texts})
    records = read_folder(folder)
    wanted = {str(subject).removesuffix(".0"): people == subject for subject in people}
    assert {r.subject_id for r in records.values()} == set(wanted)
    for subject, rows in wanted.items():
        record = records[f"a-{subject}"]
        assert [n.label for n in record.annotations] == list(map(str, arrays["y"][rows]))
        pieces = [samples for _, samples in list_pieces(record, "channel 2")]
        np.testing.assert_allclose(pieces, values[rows, 1], rtol=1e-6)


@pytest.mark.parametrize(
    "names",
    [
        ("X_train", "y_train", "X_test", "y_test"),
        ("xTrain", "yTrain", "xTest", "yTest"),
        ("train_data", "train_labels", "test_data", "test_labels"),
    ],
)
def test_arrays_of_splits_are_a_recording_each(folder: Path, names: tuple[str, ...]) -> None:
    """The file was refused, and its advice read one half. `latest_x` is of no split."""
    rng = np.random.default_rng(0)
    counts = (6, 6, 3, 3)
    shapes = [(count, 2, 100) if k % 2 == 0 else count for k, count in enumerate(counts)]
    drawn = [rng.integers(0, 3, s) if isinstance(s, int) else rng.normal(size=s) for s in shapes]
    np.savez(folder / "a.npz", **dict(zip(names, drawn, strict=True)), fs=RATE)
    records = read_folder(folder)
    for split, values, labels in (("train", *drawn[:2]), ("test", *drawn[2:])):
        record = records.pop(f"a-{split}")
        assert record.attributes["split"] == split
        assert [n.label for n in record.annotations] == list(map(str, labels))
        pieces = [samples for _, samples in list_pieces(record, "channel 2")]
        np.testing.assert_allclose(pieces, values[:, 1], rtol=1e-6)
    assert not records
    assert not divide_by_split({"latest_x": drawn[0], "y": drawn[1]})
    windows = tokens.build(
        folder.parent / "cache", view="annotations", out=folder.parent / "t", split="official"
    )
    assert sorted(windows.index["split"]) == ["test"] * 3 + ["train"] * 6


def test_groups_without_labels_are_no_subjects(folder: Path) -> None:
    """They may be classes: patients and controls are not two people."""
    values = np.random.default_rng(0).standard_normal((6, 2, 100))
    np.savez(folder / "a.npz", X=values, groups=np.array(["ill", "well"] * 3), fs=RATE)
    records = read_folder(folder)
    assert set(records) == {"a"}


def test_an_array_of_subjects_beside_epochs_is_neither_labels_nor_a_recording(folder: Path) -> None:
    """Alone beside the epochs it was their labels, and with labels a recording of its own."""
    values = np.random.default_rng(0).standard_normal((6, 2, 100))
    people = np.array([1, 1, 2, 2, 3, 3])
    np.save(folder / "X.npy", values)
    np.save(folder / "subjects.npy", people)
    options = write_map(folder)
    record = read_folder(folder, **options)["X"]
    assert not record.annotations
    np.save(folder / "y.npy", people % 2)
    report = ingest("generic", folder, folder.parent / "cache", **options)
    (line,) = [r["message"] for r in report["reasons"] if r["code"] == "file_name"]
    assert "subjects.npy" in line
    assert "numpy.savez" in line
    assert set(read_folder(folder, **options)) == {"X"}
    np.savez(folder / "all.npz", X=values, y=people % 2, subject=people, fs=RATE)
    for name in ("X", "y", "subjects"):
        (folder / f"{name}.npy").unlink()
    assert set(read_folder(folder, **options)) == {"all-1", "all-2", "all-3"}


def test_the_only_subject_of_an_archive_is_that_of_its_recording(folder: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 2, 100))
    np.savez(folder / "a.npz", X=values, subject=np.array("S7"), fs=RATE)
    np.savez(folder / "b.npz", X=values[:, :, ::-1], subject=np.repeat(7, 4), fs=RATE)
    np.savez(folder / "c.npz", X=values[:, :, 1:], subject=np.arange(3), fs=RATE)
    records = read_folder(folder)
    assert {name: r.subject_id for name, r in records.items()} == {"a": "S7", "b": "7"}
    report = ingest("generic", folder, folder.parent / "cache")
    (line,) = [r["message"] for u in report["units"] for r in u["reasons"] if "c.npz" in str(r)]
    assert "holds 3 subjects of 4 epochs" in line


@pytest.mark.parametrize(("columns", "is_epoch"), [(178, True), (50, True), (8, False)])
def test_rows_with_a_label_each_are_epochs_where_they_are_long(
    folder: Path, columns: int, is_epoch: bool
) -> None:
    """They were 178 channels, or 40 of 50 samples, without the labels."""
    count = 40 if columns == 50 else 300
    values = np.random.default_rng(0).standard_normal((count, columns))
    labels = np.random.default_rng(1).integers(0, 2, count)
    np.savez(folder / "a.npz", X=values, y=labels, fs=RATE)
    record = read_folder(folder)["a"]
    assert len({s.channel for s in record.signals}) == (1 if is_epoch else columns)
    if is_epoch:
        assert [n.label for n in record.annotations] == list(map(str, labels))
        pieces = [samples for _, samples in list_pieces(record, "channel 1")]
        np.testing.assert_allclose(pieces, values, rtol=1e-6)


def test_a_label_a_sample_is_no_recording(folder: Path) -> None:
    """Of an array that is no epochs; whole numbers under another name are samples."""
    rng = np.random.default_rng(0)
    np.save(folder / "X.npy", rng.standard_normal((400, 3)))
    np.save(folder / "y.npy", rng.integers(0, 2, 400))
    np.save(folder / "pulse.npy", rng.integers(0, 200, 400))
    options = write_map(folder)
    report = ingest("generic", folder, folder.parent / "cache", **options)
    assert set(read_folder(folder, **options)) == {"X", "pulse"}
    assert [r["file"] for r in report["reasons"] if r["code"] == "file_name"] == ["y.npy"]


def test_an_archive_of_arrays(folder: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, 2, 100)).astype(np.float32)
    np.savez(folder / "a.npz", X=values, y=np.array(["on", "off", "on", "on", "off"]))
    np.savez_compressed(folder / "b.npz", x=values[0], other=values)
    np.savez(folder / "c.npz", x=np.array([{}], dtype=object))
    options = write_map(folder) | {"max_bad": 1.0}
    report = ingest("generic", folder, folder.parent / "cache", **options)
    reasons = {unit["unit"]: [r["code"] for r in unit["reasons"]] for unit in report["units"]}
    assert (reasons["b"], reasons["c"]) == (["schema"], ["unsafe_pickle"])
    (record,) = open_cache(folder.parent / "cache").records()
    assert [note.label for note in record.annotations] == ["on", "off", "on", "on", "off"]
    pieces = list_pieces(record, "channel 2")
    np.testing.assert_array_equal([samples for _, samples in pieces], values[:, 1])


@pytest.mark.parametrize(
    ("shape", "is_turned"), [((2, 300), True), ((300, 2), False), ((2, 2), False)]
)
def test_names_of_channels_in_an_archive_are_used(
    folder: Path, shape: tuple[int, int], *, is_turned: bool
) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    np.savez(folder / "a.npz", signal=values, fs=100, ch_names=np.array(["C3", "C4"]))
    record = read_folder(folder)["a"]
    assert [(s.channel, s.rate) for s in record.signals] == [("C3", 100.0), ("C4", 100.0)]
    columns = values if is_turned else values.T
    np.testing.assert_array_equal([s.samples for s in record.signals], columns)


@pytest.mark.parametrize("shape", [(300,), (3, 100, 2)])
@pytest.mark.parametrize(("label", "name"), [("AF", "AF"), (1.0, "1"), (np.array([2]), "2")])
def test_the_only_label_of_an_archive_is_that_of_the_recording(
    folder: Path, shape: tuple[int, ...], label: str | float | np.ndarray, name: str
) -> None:
    np.savez(folder / "a.npz", signal=np.ones(shape), fs=100, label=label)
    record = read_folder(folder)["a"]
    assert record.attributes == {"label": name}
    assert sum(len(s.samples) for s in record.signals) == np.prod(shape)


@pytest.mark.parametrize("shape", [(1, 300), (300, 2), (2, 30, 5)])
@pytest.mark.parametrize(("label", "name"), [("AF", "AF"), (1.0, "1")])
def test_the_only_label_of_a_matlab_file_is_that_of_the_recording(
    folder: Path, shape: tuple[int, ...], label: str | float, name: str
) -> None:
    scipy.io.savemat(folder / "a.mat", {"val": np.ones(shape), "fs": 100, "label": label})
    record = read_folder(folder)["a"]
    assert record.attributes == {"label": name}
    assert record.signals[0].channel == "channel 1"
    assert sum(len(s.samples) for s in record.signals) == np.prod(shape)


@pytest.mark.parametrize("ending", ["npz", "mat"])
@pytest.mark.parametrize(
    ("arrays", "units", "stored"),
    [
        ({"ecg": (300,)}, "mV", {"ecg": "mV"}),
        ({"signal": (300,)}, "microV", {"channel 1": "uV"}),
        ({"ecg": (300,)}, "furlong", {"ecg": ""}),
        ({"data": (300, 2), "ch_names": ["ECG", "RESP"]}, ["mV", "V"], {"ECG": "mV", "RESP": "V"}),
        ({"data": (300, 2)}, ["mV", "uV"], {"channel 1": "mV", "channel 2": "uV"}),
    ],
)
def test_units_and_the_name_of_a_vector_in_a_file_of_arrays_are_used(
    folder: Path, ending: str, arrays: dict[str, Any], units: Any, stored: dict[str, str]
) -> None:
    values = np.random.default_rng(0).normal(size=(300, 2))
    content = {
        name: values[:, : np.prod(shape) // 300].reshape(shape)
        if isinstance(shape, tuple)
        else np.array(shape, object if ending == "mat" else None)
        for name, shape in arrays.items()
    }
    content |= {"fs": 100.0, "units": np.array(units, object) if ending == "mat" else units}
    if ending == "npz":
        np.savez(folder / "a.npz", **content)
    else:
        scipy.io.savemat(folder / "a.mat", content)
    record = read_folder(folder)["a"]
    assert {signal.channel: signal.unit for signal in record.signals} == stored
    assert np.allclose(record.signals[0].samples, values[:, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["npz", "mat"])
def test_a_rate_in_a_file_of_arrays_is_used(folder: Path, kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 700))
    content = {"data": values, "fs": 250.0}
    if kind == "npz":
        np.savez(folder / "a.npz", **content)
    else:
        scipy.io.savemat(folder / "a.mat", content)
    record = read_folder(folder)["a"]  # without a map
    assert [(s.rate, len(s.samples)) for s in record.signals] == [(250.0, 700)] * 4
    np.testing.assert_array_equal([s.samples for s in record.signals], values.astype(np.float32))
    (folder.parent / "other.toml").write_text(f"files = [{{pattern = '*.{kind}', rate = 100}}]\n")
    report = ingest(
        "generic",
        folder,
        folder.parent / "other",
        options={"map": str(folder.parent / "other.toml")},
    )
    (warning,) = (r for r in report["units"][0]["reasons"] if r["code"] == "sampling_rate")
    assert "holds a rate of 250 Hz, the map states 100" in warning["message"]
