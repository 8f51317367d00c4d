"""Channels, units and files of one recording: further members of the classes of faults in
`test_real_files.py`, compared with pyedflib, mne and plain arithmetic.
"""

from __future__ import annotations

import json
import re
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyedflib
import pytest

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats.units import find_unit, find_unit_factor
from bitimely_core.recordings.channels import fold_name, read_triggers, suggest_source
from bitimely_core.tokens.open_views import find_alternatives
from bitimely_core.types import Record, Signal

RATE = 100
START = datetime(2020, 1, 1, 22, 0, 0)

Channels = dict[str, tuple[np.ndarray, str]]
"""Label -> physical values and unit."""


def write_edf(
    path: Path,
    channels: Channels,
    *,
    start: datetime = START,
    whole: tuple[str, ...] = (),
    kind: int = pyedflib.FILETYPE_EDF,
    rate: int = RATE,
) -> None:
    """A file by pyedflib; channels in `whole` keep whole numbers as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bits = 24 if kind == pyedflib.FILETYPE_BDF else 16
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pyedflib.EdfWriter(str(path), len(channels), file_type=kind) as writer:
            for i, (name, (values, unit)) in enumerate(channels.items()):
                limit = float(f"{max(1e-3, 2 * np.abs(values).max()):.3g}")
                writer.setSignalHeader(
                    i,
                    {
                        "label": name,
                        "dimension": unit,
                        "sample_frequency": rate,
                        "physical_min": low if name in whole else -limit,
                        "physical_max": high if name in whole else limit,
                        "digital_min": low,
                        "digital_max": high,
                        "transducer": "",
                        "prefilter": "",
                    },
                )
            writer.setStartdatetime(start)
            writer.writeSamples([np.asarray(values, np.float64) for values, _ in channels.values()])


def make_noise(seconds: int = 20, level: float = 50.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=level, size=seconds * RATE)


def make_pulses(pulses: dict[float, int], seconds: int = 20, rest: int = 0) -> np.ndarray:
    """Codes of a tenth of a second at these times."""
    values = np.full(seconds * RATE, rest, np.float64)
    for time, code in pulses.items():
        first = round(time * RATE)
        values[first : first + RATE // 10] = code
    return values


def read(
    folder: Path, text: str | None = None, *, code: int = 0
) -> tuple[dict[str, Record], dict[str, Any]]:
    """Name -> recording of an ingest of `folder` with a map, and its report."""
    options = {}
    if text is not None:
        path = folder.parent / "map.toml"
        path.write_text(text)
        options = {"map": str(path)}
    out = folder.parent / "cache"
    try:
        report = ingest("generic", folder, out, options=options, force_new=True)
    except UserError as error:
        report = error.report or {"exit_code": error.exit_code, "reasons": [], "units": []}
    assert report["exit_code"] == code, report
    if code == 4:
        return {}, report
    return {record.recording_id: record for record in open_cache(out).records()}, report


def list_names(record: Record) -> list[str]:
    return [signal.channel for signal in record.signals]


def physical(record: Record, channel: str) -> np.ndarray:
    return np.concatenate(
        [
            s.samples.astype(np.float64) * s.scale + s.offset
            for s in record.signals
            if s.channel == channel
        ]
    )


def read_label(path: Path, label: str) -> np.ndarray:
    """A channel by pyedflib."""
    with pyedflib.EdfReader(str(path)) as reader:
        return np.asarray(reader.readSignal(reader.getSignalLabels().index(label)))


def list_points(record: Record) -> list[tuple[float, str]]:
    return [(round(note.onset, 6), note.label) for note in record.annotations]


def list_messages(report: dict[str, Any]) -> str:
    reasons = [*report["reasons"], *(r for unit in report["units"] for r in unit["reasons"])]
    return "\n".join(reason["message"] for reason in reasons)


# --- H: codes, counters, markers


@pytest.mark.parametrize("label", ["TRIG", "Trigger", "DC trigger", "Marker", "Event", "STI 014"])
def test_codes_of_a_trigger_channel_are_points(tmp_path: Path, label: str) -> None:
    codes = {1.0: 3, 4.5: 12, 4.6: 3, 19.9: 250}
    channels = {"Cz": (make_noise(), "uV"), label: (make_pulses(codes), "")}
    write_edf(tmp_path / "raw" / "a.edf", channels, whole=(label,))
    records, report = read(tmp_path / "raw")
    assert list_names(records["a"]) == ["Cz"]
    assert list_points(records["a"]) == [(time, str(code)) for time, code in codes.items()]
    assert f"'{label}' in 1 of 1" in list_messages(report)


def test_an_edf_that_is_called_rec(tmp_path: Path) -> None:
    write_edf(tmp_path / "raw" / "a.edf", {"C4": (make_noise(30), "uV")})
    expected = read(tmp_path / "raw")[0]["a"].signals[0].samples
    (tmp_path / "raw" / "a.edf").rename(tmp_path / "raw" / "a.rec")
    np.testing.assert_array_equal(read(tmp_path / "raw")[0]["a"].signals[0].samples, expected)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("label", ["Hypnogram", "Sleep Stage", "STAGE", "hypno"])
def test_a_channel_of_stages_is_no_input(tmp_path: Path, label: str, whole: bool) -> None:
    """A converter may store its numbers with a small error."""
    stages = np.repeat([0.0, 1.0, 2.0, 2.0, 4.0, 5.0], 30 * RATE)
    channels = {"C4": (make_noise(180), "uV"), label: (stages, "")}
    write_edf(tmp_path / "raw" / "a.edf", channels, whole=(label,) if whole else ())
    records, report = read(tmp_path / "raw")
    assert list_names(records["a"]) == ["C4"]
    notes = [(round(n.onset), round(n.duration), n.label) for n in records["a"].annotations]
    assert notes == [
        (0, 30, "W"),
        (30, 30, "N1"),
        (60, 60, "N2"),
        (120, 30, "N3"),
        (150, 30, "REM"),
    ]
    said = list_messages(report)
    assert f"'{label}' in 1 of 1" in said
    assert "0 W, 1 N1, 2 N2, 4 N3, 5 REM" in said


def test_a_four_in_a_channel_of_stages_is_asked_about(tmp_path: Path) -> None:
    stages = np.repeat([0.0, 2.0, 4.0], 30 * RATE)
    channels = {"C4": (make_noise(90), "uV"), "Hypnogram": (stages, "")}
    write_edf(tmp_path / "raw" / "a.edf", channels, whole=("Hypnogram",))
    _, report = read(tmp_path / "raw")
    assert 'Write "4" = "REM" or "4" = "N3" in [labels]' in list_messages(report)
    for stage in ("REM", "N3"):
        records, _ = read(tmp_path / "raw", f'[labels]\n"4" = "{stage}"\n')
        assert [note.label for note in records["a"].annotations] == ["W", "N2", stage]


@pytest.mark.parametrize("label", ["label", "class", "restimulus", "eyeDetection"])
def test_a_column_of_numbered_labels_is_no_input(tmp_path: Path, label: str) -> None:
    (tmp_path / "raw").mkdir()
    rows = "".join(f"{i / 50},{i % 7},{1 + i // 500}\n" for i in range(1500))
    (tmp_path / "raw" / "a.csv").write_text(f"time,acc_x,{label}\n" + rows)
    records, report = read(tmp_path / "raw")
    assert list_names(records["a"]) == ["acc_x"]
    assert [tuple(note) for note in records["a"].annotations] == [
        (0.0, 10.0, "1"),
        (10.0, 10.0, "2"),
        (20.0, 10.0, "3"),
    ]
    assert f"'{label}' in 1 of 1" in list_messages(report)
    text = f'[[files]]\npattern = "*.csv"\ntime = "time"\nchannels = ["acc_x", "{label}"]\n'
    records, _ = read(tmp_path / "raw", text)
    assert list_names(records["a"]) == ["acc_x", label]


@pytest.mark.parametrize(("scale", "digital"), [(400 / 4095, 51), (0.001, 5)])
def test_codes_are_volts_where_these_are_whole(scale: float, digital: int) -> None:
    """5 V in 12 bits, and the code 5 in a file that scales codes like a voltage."""
    samples = make_pulses({1.0: digital}).astype(np.int16)
    points = read_triggers([Signal("TRIG", RATE, "V", samples, scale=scale)])
    assert points is not None
    assert [(note.onset, note.label) for note in points] == [(1.0, "5")]


def test_high_bits_at_rest_are_no_part_of_a_code(tmp_path: Path) -> None:
    """As mne masks them: BioSemi's inputs are high at rest where nothing is plugged in."""
    import mne

    codes = {2.0: 0xFF00 + 7, 5.0: 0xFF00 + 31}
    values = make_pulses(codes, rest=0xFF00) + (1 << 20)
    write_edf(
        tmp_path / "raw" / "a.bdf",
        {"A1": (make_noise(), "uV"), "Status": (values, "Boolean")},
        whole=("Status",),
        kind=pyedflib.FILETYPE_BDF,
    )
    records, _ = read(tmp_path / "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = mne.io.read_raw_bdf(tmp_path / "raw" / "a.bdf", stim_channel="Status", verbose=False)
        events = mne.find_events(raw, "Status", mask=0xFF, mask_type="and", verbose=False)
    assert list_points(records["a"]) == [(row[0] / RATE, str(row[2])) for row in events]
    assert list_points(records["a"]) == [(2.0, "7"), (5.0, "31")]


def test_the_stim_channel_of_a_fif_file_gives_points(tmp_path: Path) -> None:
    import mne

    codes = {1.5: 4, 7.0: 9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = mne.create_info(["Cz", "STI101"], RATE, ["eeg", "stim"])
        values = np.stack([make_noise(level=5e-5), make_pulses(codes)])
        raw = mne.io.RawArray(values, info, verbose="ERROR")
        (tmp_path / "raw").mkdir()
        raw.save(tmp_path / "raw" / "a_raw.fif", verbose="ERROR")
        events = mne.find_events(raw, "STI101", verbose="ERROR")
    records, _ = read(tmp_path / "raw")
    assert list_names(records["a_raw"]) == ["Cz"]
    assert list_points(records["a_raw"]) == [(row[0] / RATE, str(row[2])) for row in events]


def test_a_counter_is_stored_where_the_map_names_it(tmp_path: Path) -> None:
    counter = np.arange(20.0 * RATE) % 256
    channels = {
        "Cz": (make_noise(), "uV"),
        "SampleCounter": (counter, ""),
        "Battery": (np.full(20 * RATE, 97.0), "%"),
    }
    write_edf(tmp_path / "raw" / "a.edf", channels, whole=("SampleCounter",))
    records, report = read(tmp_path / "raw")
    assert list_names(records["a"]) == ["Cz"]
    assert records["a"].annotations == []
    assert "'SampleCounter' in 1, 'Battery' in 1" in list_messages(report)
    records, report = read(tmp_path / "raw", '[[files]]\nchannels = ["Cz", "SampleCounter"]\n')
    assert list_names(records["a"]) == ["Cz", "SampleCounter"]
    np.testing.assert_array_equal(physical(records["a"], "SampleCounter"), counter)
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    assert made.channel_names == ("Cz",)


def test_a_marker_that_is_noise_gives_no_points(tmp_path: Path) -> None:
    channels = {"Cz": (make_noise(), "uV"), "Marker": (make_noise(seed=1), "mV")}
    write_edf(tmp_path / "raw" / "a.edf", channels)
    records, report = read(tmp_path / "raw")
    assert records["a"].annotations == []
    assert "'Marker'" in list_messages(report)


# --- H: alternatives


def test_the_first_alternative_is_read_and_several_are_said(tmp_path: Path) -> None:
    for i, names in enumerate((("EKG",), ("ECG II",), ("ECG II", "EKG"))):
        channels = {name: (make_noise(seed=10 * i + k), "uV") for k, name in enumerate(names)}
        write_edf(tmp_path / "raw" / f"r{i}.edf", channels)
    text = '[[files]]\nchannels = {"ECG" = ["ECG II", "EKG"]}\n'
    records, report = read(tmp_path / "raw", text)
    for name, label in (("r0", "EKG"), ("r1", "ECG II"), ("r2", "ECG II")):
        wanted = read_label(tmp_path / "raw" / f"{name}.edf", label)
        np.testing.assert_allclose(physical(records[name], "ECG"), wanted, atol=1e-6)
    assert "'ECG' is there as 'ECG II' and as 'EKG'" in list_messages(report)
    write_edf(tmp_path / "raw" / "r3.edf", {"V1": (make_noise(seed=9), "uV")})
    _, report = read(tmp_path / "raw", text, code=3)
    assert "has no channel 'ECG II' or 'EKG'" in list_messages(report)


def test_alternatives_are_those_of_no_recording_together() -> None:
    together = {"a": ["EEG1", "EEG2"], "b": ["EEG1", "EEG2", "EOG"], "c": ["EOG left"]}
    assert find_alternatives(together) == {"EOG": ["EOG", "EOG left"]}
    sites = {"a": ["EEG C3-A2"], "b": ["C3-M2"], "c": ["C4-M1"]}
    assert list(find_alternatives(sites).values()) == [["EEG C3-A2", "C3-M2"]]


# --- H: derivations


@pytest.mark.parametrize(
    ("wanted", "names", "advice"),
    [
        ("EEG Fpz-Cz", ["EOG L", "Fpz - Cz"], "Fpz - Cz"),
        ("EEG Fpz-Cz", ["EEG_Fpz_Cz"], "EEG_Fpz_Cz"),
        ("EEG Fpz-Cz", ["EEGFpz_Cz"], "EEGFpz_Cz"),  # as edfread of MATLAB has it
        ("EEG Fpz-Cz", ["EEG_Fpz_Oz"], None),
        ("C4-M1", ["EEG C4-A1", "C4"], "EEG C4-A1"),
        ("C4-M1", ["C4", "M1"], "C4 - M1"),
        ("C4-M1", ["EEG C4-Ref", "EEG A1-Ref"], "EEG C4-Ref - EEG A1-Ref"),
        ("Cz", ["EEG CZ-REF"], "EEG CZ-REF"),
        ("C4-M1", ["C4"], None),
        ("C4-M1", ["C3-M2", "C4-M2"], None),
        ("C4-M1", ["EEG C4-Ref", "M1"], None),  # two references
        ("C4", ["C4-M1"], None),
        ("SaO2", ["ECG"], None),
        ("ECG+", ["ECG-"], None),
    ],
)
def test_only_the_same_signal_is_advised(wanted: str, names: list[str], advice: str | None) -> None:
    assert suggest_source(wanted, names) == advice


def test_a_derivation_is_computed_in_physical_units(tmp_path: Path) -> None:
    channels = {
        "EEG C4-Ref": (make_noise(seed=1), "uV"),
        "EEG A1-Ref": (make_noise(level=0.02, seed=2), "mV"),
    }
    write_edf(tmp_path / "raw" / "a.edf", channels)
    text = '[[files]]\nchannels = {"C4-M1" = ["C4-M1", "C4 - M1"]}\n'
    records, _ = read(tmp_path / "raw", text)
    path = tmp_path / "raw" / "a.edf"
    wanted = read_label(path, "EEG C4-Ref") - 1000 * read_label(path, "EEG A1-Ref")
    np.testing.assert_allclose(physical(records["a"], "C4-M1"), wanted, atol=1e-3)
    (signal,) = records["a"].signals
    assert (signal.unit, signal.samples.dtype) == ("uV", np.float32)


def test_a_derivation_of_a_table_is_the_difference_of_its_columns(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(200, 2)).round(4)
    rows = "\n".join(f"{a},{b},rest" for a, b in values.tolist())
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text(f"F7,T3,task\n{rows}\n")
    text = '[[files]]\nrate = 50\nchannels = {"F7-T7" = "F7 - T7"}\n'
    records, _ = read(tmp_path / "raw", text)
    wanted = values[:, 0] - values[:, 1]
    np.testing.assert_allclose(physical(records["a"], "F7-T7"), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["EEG C3-A2", "C3A2", "C3:A2", "C3/A2", "EEG C3 - A2", "c3-m2", "EEG C3M2", "C3_-_A2"]
)
def test_spellings_of_a_derivation_are_one(name: str) -> None:
    assert fold_name(name) == fold_name("C3-M2") != fold_name("C3-M1")


@pytest.mark.parametrize("name", ["ECG1", "Fp1", "A1", "M2", "SpO2", "EMG A1", "Cam1"])
def test_other_names_stay_apart(name: str) -> None:
    assert "-" not in fold_name(name)
    assert fold_name(name).endswith(name[-1])


# --- J: units


@pytest.mark.parametrize(
    ("unit", "stored"),
    [
        *((text, "uV") for text in ("uVolts", "MicroVol", "\u00b5Volt", "10^-6 V", "1e-6 V")),
        *((text, "uV") for text in ("uVpp", "u V", "mikroV", "\u00c2\u00b5V", "UV")),
        *((text, "mV") for text in ("mVolt", "MilliVol", "mVrms", "10^-3V", "MV")),
        *((text, "nV") for text in ("nVolt", "NanoVol")),
        *((text, None) for text in ("kV", "vol", "adu", "10e-6 V", "uVs", "muscle")),
    ],
)
def test_words_for_volts(unit: str, stored: str | None) -> None:
    found = find_unit(unit)
    assert (found.name if found else None) == stored


def test_a_unit_that_cannot_be_right_is_asked_about_and_the_line_settles_it(tmp_path: Path) -> None:
    write_edf(tmp_path / "raw" / "a.edf", {"EEG Cz": (make_noise(), "mV")})
    write_edf(tmp_path / "raw" / "b.edf", {"EEG Cz": (make_noise(seed=1), "adu")})
    write_edf(tmp_path / "raw" / "c.edf", {"EEG Cz": (make_noise(seed=2), "uV")})
    said = list_messages(read(tmp_path / "raw")[1])
    assert "is in 'mV', its values of about" in said
    assert "is in 'adu', a unit that is not known, kept as stated" in said
    assert said.count('state it in the map, such as [units] "EEG Cz" = "uV"') == 2
    records, _ = read(tmp_path / "raw", '[units]\n"EEG Cz" = "uV"\n')
    assert {record.signals[0].unit for record in records.values()} == {"uV"}
    for name, record in records.items():
        wanted = read_label(tmp_path / "raw" / f"{name}.edf", "EEG Cz")
        np.testing.assert_allclose(physical(record, "EEG Cz"), wanted, rtol=1e-9)


@pytest.mark.parametrize(
    ("unit", "target", "factor"),
    [
        ("\u00b5S", "uS", 1.0),
        ("\u03bcV", "mV", 1e-3),
        ("cm H2O", "mmHg", 98.0665 / 133.322387415),
        ("g", "m/s2", 9.80665),
        ("m/(s^2)", "m/s2", 1.0),
        ("\u00b0C", "degC", 1.0),
        ("mS", "ms", None),
        ("uV", "uS", None),
    ],
)
def test_units_of_one_quantity_are_converted(unit: str, target: str, factor: float | None) -> None:
    assert find_unit_factor(unit, target) == (None if factor is None else pytest.approx(factor))


def test_a_unit_is_assumed_only_where_it_is_plausible(tmp_path: Path) -> None:
    channels = {
        "EEG Cz": (make_noise(level=0.06), ""),  # mV
        "EEG Pz": (make_noise(level=5e4), "?V"),
        "SaO2": (make_noise(level=2), ""),
    }
    write_edf(tmp_path / "raw" / "a.edf", channels)
    records, report = read(tmp_path / "raw")
    assert [signal.unit for signal in records["a"].signals] == ["mV", "?V", ""]
    said = list_messages(report)
    assert "'EEG Cz' states no unit" in said
    assert '[units] "EEG Pz" = "uV"' in said
    assert "SaO2" not in said


def test_the_map_overrides_a_unit_that_the_file_states_wrongly(tmp_path: Path) -> None:
    write_edf(tmp_path / "raw" / "a.edf", {"EEG Cz": (make_noise(), "mV")})
    write_edf(tmp_path / "raw" / "b.edf", {"EEG Cz": (make_noise(level=0.05), "mV")})
    records, report = read(tmp_path / "raw", '[units]\n"EEG *" = "uV"\n')
    for name, factor in (("a", 1), ("b", 1000)):
        wanted = factor * read_label(tmp_path / "raw" / f"{name}.edf", "EEG Cz")
        np.testing.assert_allclose(physical(records[name], "EEG Cz"), wanted, rtol=1e-9)
        assert records[name].signals[0].unit == "uV"
    assert list_messages(report).count("the map states uV") == 2


def test_recordings_at_a_thousand_times_the_level_are_named(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for i, level in enumerate((1.0, 1.3, 1e-3)):
        np.save(tmp_path / "raw" / f"r{i}.npy", make_noise(level=level, seed=i))
    _, report = read(tmp_path / "raw", '[[files]]\nrate = 100\nchannels = ["ECG"]\n')
    said = list_messages(report)
    assert "about 1,000 times as strong in 'r0'" in said
    assert "as in 'r2'" in said
    np.save(tmp_path / "raw" / "r2.npy", make_noise(level=0.1, seed=2))
    _, report = read(tmp_path / "raw", '[[files]]\nrate = 100\nchannels = ["ECG"]\n')
    assert "times as strong" not in list_messages(report)


def test_recordings_in_a_unit_of_another_quantity_are_named_with_the_line(tmp_path: Path) -> None:
    for i, unit in enumerate(("mystery", "mmHg", "kPa")):
        write_edf(tmp_path / "raw" / f"r{i}.edf", {"ABP": (make_noise(seed=i), unit)})
    read(tmp_path / "raw")
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    (finding,) = [finding for finding in made.manifest.findings if finding.code == "unit"]
    assert "'r0' has 'ABP' in 'mystery', others in 'mmHg'" in finding.message
    assert '[units] "ABP" = "mmHg"' in finding.message
    records, _ = read(tmp_path / "raw", '[units]\n"ABP" = "mmHg"\n')
    assert {record.signals[0].unit for record in records.values()} == {"mmHg"}


@pytest.mark.slow
@pytest.mark.parametrize("bare", [2, 3])
def test_a_unit_that_only_some_recordings_state_is_proposed_for_all(
    tmp_path: Path, bare: int
) -> None:
    (tmp_path / "raw").mkdir()
    for i in range(4):
        unit = "" if i < bare else " [uV]"
        rows = "".join(f"{k / RATE},{k % 50},{k % 30}\n" for k in range(2000))
        head = f"time,EEG C3{unit},EEG C4{unit}\n"
        (tmp_path / "raw" / f"r{i}.csv").write_text(head + rows)
    read(tmp_path / "raw")
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    (finding,) = [finding for finding in made.manifest.findings if finding.code == "unit"]
    assert ("others in 'uV'" if bare == 2 else "others without a unit") in finding.message
    proposed = finding.message.rpartition("[units] ")[2].removesuffix(".")
    lines = "\n".join(re.findall(r'"[^"]*" = "[^"]*"', proposed))
    records, _ = read(tmp_path / "raw", f"[units]\n{lines}\n")
    assert {s.unit for record in records.values() for s in record.signals} == {"uV"}


# --- sidecars of BIDS


def test_the_channels_table_of_bids_is_used(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    channels = {
        "Cz": (make_noise(seed=1), ""),
        "Pz": (make_noise(seed=2), "uV"),
        "GSR": (make_noise(seed=3), ""),
        "Photo": (make_noise(seed=4), ""),
        "Task codes": (make_pulses({3.0: 5}), ""),
    }
    for who in ("01", "02"):
        path = root / f"sub-{who}" / "eeg" / f"sub-{who}_task-rest_eeg.edf"
        write_edf(path, channels, whole=("Task codes",))
    (root / "dataset_description.json").write_text("{}")
    rows = ["name\ttype\tunits\tstatus", "Cz\tEEG\tmicroV\tgood", "Pz\tEEG\tuV\tgood"]
    rows += ["GSR\tGSR\tuS\tn/a", "Photo\tMISC\tn/a\tn/a", "Task codes\tTRIG\tV\tgood"]
    (root / "task-rest_channels.tsv").write_text("\n".join(rows) + "\n")  # for both
    rows[2] = "Pz\tEEG\tuV\tbad"
    own = root / "sub-02" / "eeg" / "sub-02_task-rest_channels.tsv"
    own.write_text("\n".join(rows) + "\n")
    (root / "task-rest_eeg.json").write_text(json.dumps({"SamplingFrequency": 500}))
    records, report = read(root)
    first, second = records.values()
    assert list_names(first) == ["Cz", "Pz", "GSR"]
    assert list_names(second) == ["Cz", "GSR"]
    assert [signal.unit for signal in first.signals] == ["uV", "uV", "uS"]
    assert list_points(first) == [(3.0, "5")]
    said = list_messages(report)
    assert "sampled at 100 Hz, the .json beside it states 500" in said
    assert "'Pz' in 1 of 2 recordings, their file or the channels table calls them bad" in said


@pytest.mark.parametrize("unit", ["V", "microV"])
def test_a_channels_table_that_contradicts_the_header_is_named(tmp_path: Path, unit: str) -> None:
    path = tmp_path / "raw" / "sub-01" / "eeg" / "sub-01_task-rest_eeg.edf"
    write_edf(path, {"Cz": (make_noise(), "uV")})
    (tmp_path / "raw" / "dataset_description.json").write_text("{}")
    table = path.with_name("sub-01_task-rest_channels.tsv")
    table.write_text(f"name\ttype\tunits\nCz\tEEG\t{unit}\n")
    records, report = read(tmp_path / "raw")
    (record,) = records.values()
    assert [signal.unit for signal in record.signals] == ["uV"]
    assert ("'Cz' is in uV, its table in 'V'" in list_messages(report)) == (unit == "V")


# --- K: files of one recording


PARTS = "[[files]]\nmatch = '(?P<recording>.+)_part'\n"


def test_parts_in_time_are_segments_at_their_times(tmp_path: Path) -> None:
    for i, minute in enumerate((0, 2)):
        start = START + timedelta(minutes=minute)
        channels = {"Cz": (make_noise(seed=i), "uV"), "Pz": (make_noise(seed=i + 5), "uV")}
        write_edf(tmp_path / "raw" / f"rec_part{i + 1}.edf", channels, start=start)
    records, _ = read(tmp_path / "raw", PARTS)
    assert list(records) == ["rec"]
    segments = [(s.channel, s.onset, len(s.samples)) for s in records["rec"].signals]
    wanted = [(name, onset, 2000) for onset in (0.0, 120.0) for name in ("Cz", "Pz")]
    assert sorted(segments) == sorted(wanted)
    parts = [read_label(tmp_path / "raw" / f"rec_part{i}.edf", "Pz") for i in (1, 2)]
    np.testing.assert_allclose(physical(records["rec"], "Pz"), np.concatenate(parts), atol=1e-6)
    assert len(tokens.build(tmp_path / "cache", out=tmp_path / "t")) == 4


def test_parts_that_overlap_are_refused_by_name(tmp_path: Path) -> None:
    for i in range(2):
        start = START + timedelta(seconds=10 * i)
        write_edf(
            tmp_path / "raw" / f"rec_part{i + 1}.edf",
            {"Cz": (make_noise(seed=i), "uV")},
            start=start,
        )
    write_edf(tmp_path / "raw" / "other.edf", {"Cz": (make_noise(seed=7), "uV")})
    records, report = read(tmp_path / "raw", PARTS, code=3)
    assert list(records) == ["other"]
    assert "'rec_part1.edf', 'rec_part2.edf' both hold 'Cz' over 10 s" in list_messages(report)


def test_channels_that_begin_later_are_cut_where_they_begin(tmp_path: Path) -> None:
    write_edf(tmp_path / "raw" / "n" / "a_part.edf", {"Cz": (make_noise(30), "uV")})
    later = START + timedelta(seconds=10)
    late = {"SpO2": (make_noise(20, level=2, seed=1), "%")}
    write_edf(tmp_path / "raw" / "n" / "b_part.edf", late, start=later)
    records, _ = read(tmp_path / "raw", "[[files]]\nmatch = '(?P<recording>[^/]+)/'\n")
    segments = sorted((s.onset, s.channel, len(s.samples)) for s in records["n"].signals)
    assert segments == [(0.0, "Cz", 1000), (10.0, "Cz", 2000), (10.0, "SpO2", 2000)]
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    assert (made.channel_names, len(made)) == (("Cz", "SpO2"), 2)


def test_tables_of_one_channel_each_are_joined_by_the_map(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 500)).round(4)
    for name, column in zip(("hr", "resp"), values, strict=True):
        folder = tmp_path / "raw" / "p1"
        folder.mkdir(parents=True, exist_ok=True)
        rows = "\n".join(map(str, column.tolist()))
        (folder / f"{name}.csv").write_text(f"{name}\n{rows}\n")
    text = "[[files]]\nrate = 50\nmatch = '(?P<recording>(?P<subject>p\\d))/'\n"
    records, _ = read(tmp_path / "raw", text)
    record = records["p1"]
    assert (record.subject_id, sorted(list_names(record))) == ("p1", ["hr", "resp"])
    np.testing.assert_allclose(physical(record, "resp"), values[1], atol=1e-6)


def test_nights_of_two_people_with_the_same_file_names_stay_apart(tmp_path: Path) -> None:
    for who in ("s1", "s2"):
        for k, night in enumerate(("night1", "night2")):
            values = make_noise(seed=10 * int(who[1]) + k)
            write_edf(tmp_path / "raw" / who / f"{night}.edf", {"Cz": (values, "uV")})
    records, _ = read(tmp_path / "raw")
    assert len(records) == 4
