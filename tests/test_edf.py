"""EDF reader and writer against pyedflib, hand-made faults and fuzzed bytes; and the scan of a raw
folder.
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyedflib
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, require_sample

from bitimely_core.errors import Exit, Reason, UserError, input_error
from bitimely_core.formats import edf, edf_header, edf_writer
from bitimely_core.formats.edf_annotations import _decode_record_onsets, parse_tals
from bitimely_core.formats.source import locate_errors, scan_folder
from bitimely_core.types import Annotation

FUZZ = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

EEG = edf_header.EdfChannel("EEG Fpz-Cz", "uV", -192.0, 192.0, -2048, 2047, 100)
SLOW = edf_header.EdfChannel("Temp rectal", "DegC", 34.0, 40.0, -2849, 2731, 1)


def two_channels(records: int = 6, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-2048, 2048, records * c.samples).astype(np.int16) for c in (EEG, SLOW)]


def plain(**fields: bytes | tuple[int, bytes]) -> bytes:
    """A valid file of six one-second records with header fields overwritten: name=bytes, or
    name=(signal, bytes) for a signal's field.
    """
    raw = bytearray(edf_writer.encode_edf([EEG, SLOW], two_channels()))
    for name, value in fields.items():
        place = 0
        for known, width in edf_header.FIELDS:
            if known == name and isinstance(value, bytes):
                raw[place : place + width] = value.ljust(width)
            place += width
        for known, width in edf_header.SIGNAL_FIELDS:
            if known == name and isinstance(value, tuple):
                raw[place + value[0] * width : place + (value[0] + 1) * width] = value[1].ljust(
                    width
                )
            place += 2 * width
    return bytes(raw)


def reasons(findings: Any) -> set[str]:
    return {str(finding.code) for finding in findings}


def read_error(path: Path, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        edf.read_recording(path, **options)
    assert path.name in str(caught.value)
    return caught.value


# --- against pyedflib


def same_as_pyedflib(path: Path) -> None:
    ours = edf.read_recording(path)
    theirs = pyedflib.EdfReader(str(path))
    try:
        assert theirs.signals_in_file == len(ours.signals)
        for i, signal in enumerate(ours.signals):
            digital, physical = theirs.readSignal(i, digital=True), theirs.readSignal(i)
            assert signal.channel == theirs.getLabel(i)
            assert signal.rate == theirs.getSampleFrequency(i)
            assert np.array_equal(signal.samples, digital)
            assert signal.samples.flags.c_contiguous
            ends = (
                float(theirs.getPhysicalMinimum(i)),
                float(theirs.getPhysicalMaximum(i)),
                signal.offset,
            )
            assert np.abs(
                signal.samples.astype(np.float64) * signal.scale + signal.offset - physical
            ).max() <= 1e-12 * max(map(abs, ends))
        onsets, durations, labels = theirs.readAnnotations()
        assert [note.label for note in ours.annotations] == [str(label) for label in labels]
        assert np.allclose([note.onset for note in ours.annotations], onsets, atol=1e-6)
        assert np.allclose([note.duration for note in ours.annotations], np.maximum(durations, 0))
    finally:
        theirs.close()


REAL = (
    "sleep-edf/sleep-cassette/SC4001E0-PSG.edf",
    "sleep-edf/sleep-cassette/SC4001EC-Hypnogram.edf",
    "robust/edf/chtypes_edf.edf",
    "robust/edf/mne_test.edf",
    "robust/edf/test_edfann.edf",
    "robust/edf/test_generator.bdf",
    "robust/edf/test_generator.edf",
    "robust/edf/test_reduced.edf",
    "robust/edf/test_subsecond.edf",
    "robust/edf/test_utf8.edf",
    "robust/edf/test_utf8_annotations.edf",
)


@pytest.mark.parametrize("name", REAL)
def test_real_files_read_as_pyedflib_reads_them(name: str) -> None:
    require_sample(SAMPLES / name)
    same_as_pyedflib(SAMPLES / name)


@pytest.mark.parametrize(
    ("name", "code", "records"),
    [
        ("empty.edf", "empty_file", None),
        ("psg_header_only.edf", "truncated", None),
        ("psg_nrecords_minus1.edf", "n_records_unknown", 10),
        ("psg_truncated_mid_record.edf", "truncated", 5),
    ],
)
def test_real_broken_files(name: str, code: str, records: int | None) -> None:
    path = require_sample(SAMPLES / "robust" / "corrupt" / name)
    if records is None:
        assert read_error(path).code == code
        return
    recording = edf.read_recording(path)
    assert code in reasons(recording.findings)
    assert all(len(signal.samples) == records * 30 * signal.rate for signal in recording.signals)


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_is_written_is_read_by_us_and_by_pyedflib(tmp_path: Path, data: st.DataObject) -> None:
    duration = data.draw(st.sampled_from([0.5, 1.0, 2.0, 30.0]))
    records = data.draw(st.integers(1, 5))
    channels, samples = [], []
    for i in range(data.draw(st.integers(1, 4))):
        low = data.draw(st.integers(-32768, 32766))
        high = data.draw(st.integers(low + 1, 32767))
        physical = data.draw(
            st.sampled_from([(-192.0, 192.0), (0.25, 40.5), (8711.0, -8711.0), (-1e-3, 1e-3)])
        )
        size = data.draw(st.sampled_from([1, 7, 100]))
        channels.append(edf_header.EdfChannel(f"channel {i}", "uV", *physical, low, high, size))
        samples.append(
            np.random.default_rng(i).integers(low, high + 1, size * records).astype(np.int16)
        )
    end = records * duration
    times = data.draw(st.one_of(st.none(), st.lists(st.integers(0, int(end * 1000)), max_size=6)))
    notes = (
        None
        if times is None
        else [Annotation(t / 1000, 0.125 * (t % 3), f"note \u00e9 {t}") for t in sorted(times)]
    )
    path = tmp_path / "x.edf"
    edf_writer.write_edf(
        path,
        channels,
        samples,
        duration=duration,
        notes=notes,
        start=datetime(2011, 4, 4, 12, 57, 2),
    )
    ours = edf.read_recording(path)
    assert ours.findings == []
    assert ours.header.start == datetime(2011, 4, 4, 12, 57, 2)
    assert [signal.channel for signal in ours.signals] == [channel.label for channel in channels]
    for signal, values in zip(ours.signals, samples, strict=True):
        assert signal.samples.dtype == np.int16
        assert np.array_equal(signal.samples, values)
    assert ours.annotations == (notes or [])
    same_as_pyedflib(path)


@pytest.mark.parametrize("kind", [pyedflib.FILETYPE_EDFPLUS, pyedflib.FILETYPE_BDFPLUS])
def test_what_pyedflib_writes_is_read(tmp_path: Path, kind: int) -> None:
    bits = 24 if kind == pyedflib.FILETYPE_BDFPLUS else 16
    path = tmp_path / ("x.bdf" if bits == 24 else "x.edf")
    most = 1 << (bits - 1)
    values = np.random.default_rng(0).integers(-most, most, 2000).astype(np.int32)
    writer = pyedflib.EdfWriter(str(path), 1, file_type=kind)
    writer.setSignalHeader(
        0,
        {
            "label": "EEG",
            "dimension": "uV",
            "sample_frequency": 200,
            "physical_min": -400.0,
            "physical_max": 400.0,
            "digital_min": -most,
            "digital_max": most - 1,
            "transducer": "",
            "prefilter": "",
        },
    )
    writer.writeAnnotation(1.5, 2.0, "eyes closed")
    writer.writeSamples([values], digital=True)
    writer.close()
    ours = edf.read_recording(path)
    assert np.array_equal(ours.signals[0].samples, values)
    assert ours.signals[0].samples.dtype == (np.float32 if bits == 24 else np.int16)
    assert ours.signals[0].rails == (-most, most - 1)
    assert ours.annotations == [Annotation(1.5, 2.0, "eyes closed")]
    same_as_pyedflib(path)


# --- faults of the header


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"version": b"1"}, "not_edf"),
    ({"version": b"<!DOCTYP"}, "not_edf"),
    ({"version": b"\xffBIOSEMI"}, "not_edf"),  # under the name .edf
    ({"header_bytes": b"512"}, "header_bytes"),
    ({"header_bytes": b"abc"}, "header_field"),
    ({"n_signals": b"9999", "header_bytes": b"2560000"}, "header_implausible"),
    ({"n_signals": b"0"}, "header_implausible"),
    ({"n_signals": b"-1"}, "header_implausible"),
    ({"n_signals": b""}, "header_field"),
    ({"n_records": b"21474836"}, "header_implausible"),
    ({"n_records": b"-2"}, "header_implausible"),
    ({"n_records": b"4"}, "size_mismatch"),  # 6 records of 2 bytes a sample would be 4 records of 3
    ({"n_records": b"1e2"}, "header_field"),
    ({"record_duration": b"0"}, "record_duration"),
    ({"record_duration": b"-1"}, "record_duration"),
    ({"record_duration": b"1e-6"}, "record_duration"),  # 100 MHz
    ({"record_duration": b"nan"}, "header_field"),
    ({"record_duration": b"1e999"}, "header_field"),
    ({"physical_min": (0, b"nan")}, "header_field"),
    ({"physical_max": (0, b"inf")}, "header_field"),
    ({"physical_max": (1, b"abc")}, "header_field"),
    ({"physical_max": (1, b"1_0")}, "header_field"),
    ({"physical_max": (1, "\u0661\u0662".encode())}, "header_field"),  # digits, but not ASCII
    ({"physical_max": (0, b"1,500")}, "header_field"),  # 1.5 or 1500
    ({"physical_min": (0, b"7"), "physical_max": (0, b"7.0")}, "physical_range"),
    ({"physical_min": (0, b"-1e308"), "physical_max": (0, b"1e308")}, "physical_range"),
    ({"digital_min": (0, b"5"), "digital_max": (0, b"5")}, "digital_range"),
    ({"digital_min": (0, b"5"), "digital_max": (0, b"-5")}, "digital_range"),
    ({"digital_max": (0, b"32768")}, "digital_range"),
    ({"samples_per_record": (0, b"0")}, "header_implausible"),
    ({"samples_per_record": (0, b"-100")}, "header_implausible"),
    ({"samples_per_record": (0, b"99999999")}, "truncated"),
    ({"label": (1, b"EEG Fpz-Cz")}, "duplicate_channel"),
    ({"reserved": b"EDF+D"}, "discontinuous"),  # without the annotation signal that gives the times
]


@pytest.mark.parametrize(("fields", "code"), FAULTS)
def test_faulty_headers_are_refused(tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(**fields))
    assert read_error(path).code == code


WARNINGS: list[tuple[dict[str, Any], str]] = [
    ({"n_records": b"-1"}, "n_records_unknown"),
    ({"n_records": b"0"}, "n_records_unknown"),
    ({"n_records": b"10"}, "size_mismatch"),
    ({"start_date": b"00.00.00"}, "start_date"),
    ({"start_date": b"31.02.89"}, "start_date"),
    ({"start_time": b"25.00.00"}, "start_date"),
    ({"label": (1, b"Posi\xe7\xe3o")}, "non_ascii"),
    ({"patient": b"X F X M\xfcller"}, "non_ascii"),
    ({"label": (1, b"<b onclick=a()>")}, "label_chars"),
    ({"label": (1, b"=1+cmd|'/C calc")}, "label_chars"),
    ({"label": (1, b"[/red]x[bold]")}, "label_chars"),
    ({"label": (1, b"a\x1b[31mb")}, "label_chars"),
    ({"label": (1, b"")}, "label_chars"),
    ({"patient": b"MCH-0234567 F 02-AUG-1951 Haagse_Harry"}, "phi"),
    ({"recording": b"Startdate 24-APR-1989 PSG-1234 NN Telemetry03"}, "phi"),
]


@pytest.mark.parametrize(("fields", "code"), WARNINGS)
def test_unusual_headers_are_accepted_with_a_warning(
    tmp_path: Path, fields: dict[str, Any], code: str
) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(**fields))
    recording = edf.read_recording(path)
    assert code in reasons(recording.findings)
    for signal, values in zip(recording.signals, two_channels(), strict=True):
        assert np.array_equal(signal.samples, values)
    output = (
        repr(recording.header)
        + " ".join(finding.line() for finding in recording.findings)
        + repr(recording.signals[1][:3])
    )
    assert not any(
        word in output for word in ("Haagse", "MCH-02", "1951", "PSG-1234", "Telemetry", "ller")
    )
    assert not set(recording.signals[1].channel) & set("<>[]\x1b")
    assert not recording.signals[1].channel.startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("number", [b"500.5", b"-0.125", b"1234.567"])
def test_a_comma_may_stand_before_decimals(tmp_path: Path, number: bytes) -> None:
    scales = []
    for text in (number, number.replace(b".", b",")):
        (tmp_path / "x.edf").write_bytes(plain(physical_max=(0, text)))
        scales.append([(s.scale, s.offset) for s in edf.read_recording(tmp_path / "x.edf").signals])
    assert scales[0] == scales[1]


def test_a_file_without_a_channel_says_what_is_wrong_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(digital_max=(0, b"-9999"), physical_max=(1, b"abc")))
    with pytest.raises(UserError) as caught:
        edf.read_recording(path, required=())
    assert "such as digital minimum" in str(caught.value)
    assert "maximum -9999 of signal 1" in str(caught.value)


def test_only_a_bad_date_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(start_date=b"00.00.00", start_time=b"16.13.00"))
    header = edf_header.read_header(path)
    assert (header.day, header.start) == (None, None)
    assert header.clock is not None
    assert header.clock.hour == 16


def test_identifying_fields_are_kept_only_with_keep_phi(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(patient=b"MCH-0234567 F 02-AUG-1951 Haagse_Harry"))
    assert edf_header.read_header(path).phi == {}
    assert edf_header.read_header(path, keep_phi=True).phi == {
        "patient": "MCH-0234567 F 02-AUG-1951 Haagse_Harry"
    }
    path.write_bytes(plain(patient=b"X X X X"))
    assert edf_header.read_header(path).findings == ()


def test_channels_that_are_not_required_may_be_faulty(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain(physical_min=(1, b"0"), physical_max=(1, b"0")))
    assert read_error(path).code == Reason.PHYSICAL_RANGE
    kept = edf.read_recording(path, required=["EEG Fpz-Cz"])
    assert [signal.channel for signal in kept.signals] == ["EEG Fpz-Cz"]
    assert reasons(kept.findings) == {"physical_range"}
    path.write_bytes(plain(label=(1, b"EEG Fpz-Cz")))
    assert read_error(path, required=["EEG Fpz-Cz"]).code == Reason.DUPLICATE_CHANNEL
    both = edf.read_recording(path, required=())
    assert [signal.channel for signal in both.signals] == ["EEG Fpz-Cz (1)", "EEG Fpz-Cz (2)"]
    assert reasons(both.findings) == {"duplicate_channel"}


def test_truncated_files_keep_complete_records(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain()[:-150])
    recording = edf.read_recording(path)
    assert reasons(recording.findings) == {"truncated"}
    assert [len(signal.samples) for signal in recording.signals] == [500, 5]
    assert np.array_equal(recording.signals[0].samples, two_channels()[0][:500])
    path.write_bytes(plain() + b"\0" * 11)
    assert reasons(edf.read_recording(path).findings) == {"size_mismatch"}


def test_rates_are_rounded_once() -> None:
    channel = EEG._replace(samples=70)
    raw = edf_writer.encode_edf([channel], [np.zeros(210, np.int16)], duration=0.7)
    header = edf_header.parse_header(raw, len(raw))
    assert header.rate(header.channels[0]) == 100.0


def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.edf"
    path.write_bytes(plain())
    header = edf_header.read_header(path)
    path.write_bytes(plain()[:-100])
    monkeypatch.setattr(edf, "read_header", lambda *_, **__: header)
    with pytest.raises(UserError) as caught:
        edf.read_recording(path)
    assert caught.value.code == Reason.TRUNCATED


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    assert read_error(tmp_path).code == Reason.IO_ERROR
    assert read_error(tmp_path / "absent.edf").code == Reason.IO_ERROR


# --- times


def write_gaps(path: Path, onsets: list[float], kind: bytes = b"EDF+D") -> Path:
    raw = bytearray(
        edf_writer.encode_edf(
            [EEG, SLOW],
            two_channels(len(onsets)),
            onsets=onsets,
            notes=[Annotation(onsets[-1], 1.0, "late")],
        )
    )
    raw[192:197] = kind
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("kind", [b"EDF+D", b"EDF+C"])  # the second lies
def test_gaps_split_and_are_never_joined(tmp_path: Path, kind: bytes) -> None:
    recording = edf.read_recording(write_gaps(tmp_path / "x.edf", [0, 1, 2, 302, 303, 304], kind))
    assert reasons(recording.findings) == {"discontinuous"}
    assert [(s.channel, s.onset, len(s.samples)) for s in recording.signals] == [
        ("EEG Fpz-Cz", 0.0, 300),
        ("EEG Fpz-Cz", 302.0, 300),
        ("Temp rectal", 0.0, 3),
        ("Temp rectal", 302.0, 3),
    ]
    assert np.array_equal(
        np.concatenate([s.samples for s in recording.signals[:2]]), two_channels()[0]
    )
    assert recording.segments == [(0.0, 3.0), (302.0, 305.0)]
    assert recording.annotations == [Annotation(304.0, 1.0, "late")]
    notes, findings = edf.read_annotations(tmp_path / "x.edf", recording.header)
    assert notes == recording.annotations
    assert reasons(findings) == {"discontinuous"}


def test_times_count_from_the_first_sample(tmp_path: Path) -> None:
    recording = edf.read_recording(write_gaps(tmp_path / "x.edf", [0.25, 1.25, 2.25]))
    assert recording.findings == []
    assert recording.origin == 0.25
    assert recording.annotations == [Annotation(2.0, 1.0, "late")]
    assert recording.signals[0].onset == 0.0


def test_overlapping_records_are_refused(tmp_path: Path) -> None:
    assert read_error(write_gaps(tmp_path / "x.edf", [0, 1, 1.5, 2.5])).code == Reason.DISCONTINUOUS


def test_drift_gives_a_warning(tmp_path: Path) -> None:
    recording = edf.read_recording(
        write_gaps(tmp_path / "x.edf", [i * 1.004 for i in range(200)], b"EDF+C")
    )
    assert len(recording.signals) == 2
    assert reasons(recording.findings) == {"discontinuous"}


# --- annotations


@pytest.mark.parametrize(
    "block",
    [
        b"+30\x1530Sleep stage 2\x00+60\x00\x00",
        b"30\x14text\x14\x00",
        b"+30\x15-1\x14text\x14\x00",
        b"+30\x15\x14text\x14\x00",
        b"+nan\x14text\x14\x00",
        b"+" + b"9" * 400 + b"\x14text\x14\x00",
        b"+0\x14\x14\x00+5\x14cut off",
        b"+0\x14\x14\x00junk",
        b"+0\x14W\x14+30\x1530\x14N1\x14\x00",  # the zero between two lists is missing
    ],
)
def test_malformed_lists_are_refused(block: bytes) -> None:
    with pytest.raises(UserError) as caught:
        parse_tals(block)
    assert caught.value.code == Reason.ANNOTATION_SYNTAX
    assert "text" not in caught.value.problem


def test_lists_as_the_standard_has_them() -> None:
    block = b"+180\x14Lights off\x14Close door\x14\x00+1800.2\x1525.5\x14Apnea\x14\x00\x00\x00-0.5\x14\x14\x00"
    assert parse_tals(block) == [
        (180.0, None, [b"Lights off", b"Close door"]),
        (1800.2, 25.5, [b"Apnea"]),
        (-0.5, None, [b""]),
    ]


def test_foreign_texts(tmp_path: Path) -> None:
    path = tmp_path / "x.edf"
    labels = ["caf\u00e9", "<script>", "a\x07b", "plain"]
    edf_writer.write_edf(
        path,
        [EEG],
        [two_channels()[0]],
        notes=[Annotation(float(i), 0.0, label) for i, label in enumerate(labels)],
    )
    path.write_bytes(path.read_bytes().replace("caf\u00e9".encode(), b"caf\xe9 "))
    notes, findings = edf.read_annotations(path, edf_header.read_header(path))
    assert [note.label for note in notes] == ["caf\u00e9", "<script>", "a?b", "plain"]
    assert {str(finding.code): finding.count for finding in findings} == {
        "encoding": 1,
        "label_chars": 2,
    }


def test_writer_refuses_what_the_format_cannot_hold() -> None:
    values = np.zeros(100, np.int16)
    for channel, samples, options in (
        (EEG, values[:-1], {}),
        (EEG, values[:0], {}),
        (EEG._replace(physical_max=1 / 3), values, {}),
        (EEG._replace(label="a label that is too long"), values, {}),
        (EEG, values, {"notes": [Annotation(0.0, 0.0, "a\x14b")]}),
        (EEG, values, {"start": datetime(1984, 1, 1)}),
        (EEG, values, {"onsets": [0.0, 1.0]}),
    ):
        with pytest.raises(ValueError):
            edf_writer.encode_edf([channel], [samples], **options)


# --- fuzz: nothing but UserError, and quickly

TEMPLATE = edf_writer.encode_edf([EEG, SLOW], two_channels(), notes=[Annotation(1.0, 2.0, "text")])
PIECES = [
    b"-1",
    b"0",
    b"nan",
    b"9999",
    b"99999999",
    b"1e-9",
    b"\xff" * 8,
    b"EDF+D",
    b"\x14\x00",
    b"+",
    b"32768",
    b"\x00" * 40,
    b"EDF Annotations",
]
EDIT = st.tuples(
    st.integers(0, len(TEMPLATE) - 1),
    st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from(PIECES)),
)


@given(
    edits=st.lists(EDIT, max_size=6),
    keep=st.one_of(st.just(len(TEMPLATE)), st.integers(0, len(TEMPLATE) + 50)),
    required=st.sampled_from([None, (), ("EEG Fpz-Cz",)]),
)
@FUZZ
def test_fuzzed_files_raise_only_user_errors(
    tmp_path: Path, edits: list[tuple[int, bytes]], keep: int, required: tuple[str, ...] | None
) -> None:
    raw = bytearray(TEMPLATE)
    for place, piece in edits:
        raw[place : place + len(piece)] = piece
    path = tmp_path / "fuzz.edf"
    path.write_bytes(bytes(raw).ljust(keep, b"\0")[:keep])
    try:
        recording = edf.read_recording(path, required=required)
    except UserError:
        return
    read = sum(s.samples.size for s in recording.signals) * recording.header.width
    assert read <= keep
    assert all(
        np.isfinite([s.rate, s.scale, s.offset, s.onset]).all() and s.rate > 0
        for s in recording.signals
    )


@given(data=st.binary(max_size=1200), size=st.integers(0, 10**13), fixed=st.booleans())
@FUZZ
def test_fuzzed_headers_raise_only_user_errors(data: bytes, size: int, *, fixed: bool) -> None:
    data = TEMPLATE[:256] + data if fixed else data
    try:
        header = edf_header.parse_header(data, size)
    except UserError:
        return
    assert header.size + header.records * header.record_bytes <= size


LISTS = [b"+1\x14\x14\x00", b"+2\x1530\x14N2\x14\x00"]
TOKENS = st.sampled_from(
    [b"+", b"-", b"0", b"12", b".", b"\x14", b"\x15", b"\x00", b"W", b"\xff", *LISTS]
)


@given(st.lists(st.one_of(TOKENS, st.binary(max_size=3)), max_size=30).map(b"".join))
@FUZZ
def test_fuzzed_lists_raise_only_user_errors(block: bytes) -> None:
    try:
        lists = parse_tals(block)
    except UserError:
        return
    assert all(
        np.isfinite(onset) and (duration is None or duration >= 0) for onset, duration, _ in lists
    )


@given(
    st.lists(
        st.lists(TOKENS, max_size=8).map(lambda parts: b"".join(parts)[:24].ljust(24, b"\0")),
        min_size=1,
        max_size=5,
    )
)
@FUZZ
def test_the_fast_clock_agrees_with_the_parser(blocks: list[bytes]) -> None:
    rows = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), 24)
    for block, onset in zip(blocks, _decode_record_onsets(rows), strict=True):
        if not np.isnan(onset):
            assert parse_tals(block) == [(onset, None, [b""])]
    assert _decode_record_onsets(np.frombuffer(b"+12.5\x14\x14\0", np.uint8)[None])[0] == 12.5


def test_digits_behind_a_time_are_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "x.edf").write_bytes(
        edf_writer.encode_edf([SLOW], [np.zeros(2, np.int16)], notes=[]).replace(
            b"+1\x14\x14\0\0", b"+\0\x14\x14\x001"
        )
    )
    assert read_error(tmp_path / "x.edf").code == Reason.ANNOTATION_SYNTAX
    assert np.isnan(
        _decode_record_onsets(np.frombuffer(b"+3\0\x14\x14\0" + b"7", np.uint8)[None])
    ).all()


@pytest.mark.slow
def test_thousands_of_equal_labels_take_linear_time(
    seconds: Callable[[Callable[[], object]], float],
) -> None:
    channels = [SLOW._replace(label=f"c{i // 2}") for i in range(9998)]
    few, many = (
        edf_writer.encode_edf(some, [np.zeros(1, np.int16)] * len(some))
        for some in (channels[:2000], channels)
    )
    header = edf_header.parse_header(many, len(many), required=())
    assert [channel.label for channel in header.channels[:3]] == ["c0 (1)", "c0 (2)", "c1 (3)"]
    assert seconds(lambda: edf_header.parse_header(many, len(many), required=())) < 12 * seconds(
        lambda: edf_header.parse_header(few, len(few), required=())
    )


def test_hostile_lists_take_linear_time() -> None:
    for block in (
        b"+1\x14" + b"a" * 2_000_000,
        b"+1\x14" + b"a\x14" * 1_000_000 + b"b",
        b"\0" * 5_000_000,
        b"+" + b"1" * 2_000_000,
    ):
        with suppress(UserError):
            parse_tals(block)


# --- the raw folder


def test_scan_finds_files_and_rejects_others_with_a_reason(tmp_path: Path) -> None:
    root, outside = tmp_path / "raw", tmp_path / "outside"
    (root / "deep" / "er").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.edf").write_bytes(b"x")
    (root / "b.edf").write_bytes(b"12345")
    (root / "deep" / "er" / "a.edf").write_bytes(b"1")
    (root / ".hidden").write_bytes(b"1")
    os.mkfifo(root / "pipe.edf")
    (root / "out.edf").symlink_to(outside / "secret.edf")
    (root / "in.edf").symlink_to(root / "b.edf")
    (root / "broken").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    (root / "far").symlink_to(outside)
    (root / "folder.edf").mkdir()
    (root / os.fsdecode(b"bad\xff.edf")).write_bytes(b"1")
    found = scan_folder(root)
    assert found.files == {"b.edf": 5, "deep/er/a.edf": 1, "in.edf": 5}
    assert {rel: str(finding.code) for rel, finding in found.rejected.items()} == {
        "pipe.edf": "not_regular_file",
        "out.edf": "symlink_outside_root",
        "far": "symlink_outside_root",
        "broken": "not_regular_file",
        "folder.edf": "not_regular_file",
        "bad?.edf": "file_name",
    }
    followed = scan_folder(root, follow_symlinks=True)
    assert {"out.edf", "far/secret.edf"} <= set(followed.files)
    assert pickle.loads(pickle.dumps(found)) == found


def test_paths_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "raw" / "a.dat").write_bytes(b"x")
    os.mkfifo(tmp_path / "raw" / "pipe")
    source = scan_folder(tmp_path / "raw")
    assert source.path("a.dat") == source.path("./a.dat") == tmp_path / "raw" / "a.dat"
    expected = dict.fromkeys(("../secret", "/etc/passwd", "a\\b", "x/../../secret"), "path_escape")
    for rel, code in {
        **expected,
        "b.dat": "missing_signal_file",
        "pipe": "not_regular_file",
    }.items():
        with pytest.raises(UserError) as caught:
            source.path(rel)
        assert caught.value.code == code


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK")
    (tmp_path / "x.edf").write_bytes(b"0")
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "x.zip": Reason.UNSUPPORTED_FORMAT,
        "x.edf": Reason.NO_INPUT,
        "absent": Reason.NOT_FOUND,
        "pipe": Reason.NOT_REGULAR_FILE,
    }
    for name, code in expected.items():
        with pytest.raises(UserError) as caught:
            scan_folder(tmp_path / name)
        assert caught.value.code == code
        assert name in str(caught.value)
        assert caught.value.exit_code == (Exit.USAGE if name == "absent" else Exit.REFUSED)


def test_errors_name_the_file_of_their_block() -> None:
    with pytest.raises(UserError) as caught, locate_errors("sub/x.edf"):
        raise input_error(Reason.NOT_EDF, "is something else")
    assert str(caught.value) == "sub/x.edf: is something else."


def test_written_files_are_complete(tmp_path: Path) -> None:
    edf_writer.write_edf(tmp_path / "x.edf", [EEG], [two_channels()[0]])
    assert [path.name for path in tmp_path.iterdir()] == ["x.edf"]
    assert stat.S_ISREG((tmp_path / "x.edf").stat().st_mode)
