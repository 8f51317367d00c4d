"""WFDB reader against the package `wfdb`, hand-made faults and fuzzed headers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, require_sample

from bitimely_core.errors import UserError
from bitimely_core.formats import wfdb as own
from bitimely_core.formats import wfdb_header
from bitimely_core.formats.source import scan_folder
from bitimely_core.formats.wfdb_samples import count_bytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

FUZZ = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NAMES = ("I", "II", "V1")


def samples(frames: int = 50, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(7).integers(-900, 900, (frames, channels)).astype("<i2")


def signal_line(
    values: np.ndarray, name: str, file: str = "r.dat", code: str = "16", gain: str = "1000.0(0)/mV"
) -> str:
    return f"{file} {code} {gain} 16 0 {int(values[0])} {int(values.sum(dtype=np.int64)) & 0xFFFF} 0 {name}"


def write(
    folder: Path,
    name: str = "r",
    *,
    record: str = "{name} {channels} 100 {frames}",
    values: np.ndarray | None = None,
    lines: dict[int, str] | None = None,
    data: bytes | None = None,
    tail: str = "",
    **line: str,
) -> Path:
    """A record of three signals in format 16; `lines` replaces signal lines, `data` the samples."""
    values = samples() if values is None else values
    file = f"{name}.dat"
    rows = [signal_line(values[:, i], NAMES[i], file, **line) for i in range(values.shape[1])]
    for i, text in (lines or {}).items():
        rows[i] = text.format(good=rows[i])
    head = record.format(name=name, channels=values.shape[1], frames=len(values))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hea").write_text("\n".join([head, *rows]) + "\n" + tail)
    (folder / file).write_bytes(values.tobytes() if data is None else data)
    return folder / name


def codes(findings: Any, level: str | None = None) -> set[str]:
    return {str(finding.code) for finding in findings if level is None or finding.level == level}


def read(path: Path, **options: Any) -> own.WfdbRecording:
    return own.read_recording(path.name, scan_folder(path.parent), **options)


def read_header(path: Path, **options: Any) -> own.WfdbHeader:
    return own.read_header(path.name, scan_folder(path.parent), **options)


def read_error(path: Path, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    assert path.name in str(caught.value)
    return caught.value


def physical(signal: Any) -> np.ndarray:
    assert signal.samples.dtype in {np.dtype(np.int16), np.dtype(np.float32)}
    assert signal.samples.flags.c_contiguous
    return signal.samples.astype(np.float64) * signal.scale + signal.offset


# --- against the package


def written_by_wfdb(folder: Path, **fields: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        wfdb.wrsamp("r", write_dir=str(folder), **fields)
    return folder / "r"


def same_as_wfdb(path: Path) -> None:
    ours = read(path)
    theirs = wfdb.rdrecord(str(path), smooth_frames=False)
    assert [signal.channel for signal in ours.signals] == [
        name or f"signal {i}" for i, name in enumerate(theirs.sig_name, 1)
    ]
    for signal, values, spf in zip(
        ours.signals, theirs.e_p_signal, theirs.samps_per_frame, strict=True
    ):
        assert signal.rate == pytest.approx(theirs.fs * spf, rel=1e-12)
        rough = 1e-6 if signal.samples.dtype == np.float32 and signal.scale == 1 else 1e-12
        biggest = max(abs(signal.offset), np.nanmax(np.abs(values), initial=0))
        np.testing.assert_allclose(
            physical(signal), values[: len(signal.samples)], rtol=rough, atol=rough * biggest
        )
        assert len(values) - len(signal.samples) in {
            spf * channel.skew for channel in ours.header.channels
        }


SINGLE = (
    *(
        f"robust/wfdb/{name}"
        for name in (
            "100",
            "100-no-len",
            "a103l",
            "binformats",
            "s0010_re",
            "test01_00s",
            "test01_00s_frame",
        )
    ),
    *(
        f"robust/wfdb-multi/{name}"
        for name in ("s25047/s25047-2704-05-04-10-44n", "s25047/3234460_0018", "fixed1/v102s_1")
    ),
    *(f"emg/emg_{name}" for name in ("healthy", "myopathy", "neuropathy")),
    *(f"ptb-xl/records100/00000/{name}_lr" for name in ("00001", "00728")),
)


@pytest.mark.parametrize("name", SINGLE)
def test_real_records_read_as_wfdb_reads_them(name: str) -> None:
    require_sample(SAMPLES / f"{name}.hea")
    same_as_wfdb(SAMPLES / name)


@pytest.mark.parametrize("name", ["s25047/s25047-2704-05-04-10-44", "fixed1/v102s"])
def test_real_records_of_several_segments_read_as_wfdb_reads_them(name: str) -> None:
    path = SAMPLES / "robust" / "wfdb-multi" / name
    require_sample(path.with_name(path.name + ".hea"))
    ours = read(path)
    theirs = wfdb.rdrecord(str(path))
    assert {signal.channel for signal in ours.signals} == set(theirs.sig_name)
    for i, channel in enumerate(theirs.sig_name):
        pieced = np.full(theirs.sig_len, np.nan)
        pieces = [signal for signal in ours.signals if signal.channel == channel]
        assert all(a.onset + len(a.samples) / a.rate <= b.onset + 1e-9 for a, b in pairwise(pieces))
        for piece in pieces:
            first = round(piece.onset * piece.rate)
            pieced[first : first + len(piece.samples)] = physical(piece)
        np.testing.assert_allclose(pieced, theirs.p_signal[:, i], rtol=1e-12, atol=1e-12)
    assert ("discontinuous" in codes(ours.findings)) == (name[0] == "s")


def test_real_records_that_must_not_read() -> None:
    folder = require_sample(SAMPLES / "robust")
    assert read_error(folder / "wfdb" / "12726").code == "missing_signal_file"
    assert read_error(folder / "wfdb-multi" / "s25047" / "3234460_layout").code == "missing_channel"


def test_a_real_stale_initial_value_is_a_warning() -> None:
    path = SAMPLES / "robust" / "wfdb" / "test01_00s_frame"
    require_sample(path.with_name(path.name + ".hea"))
    assert codes(read(path).findings, "warning") == {"initial_value"}


@pytest.mark.parametrize("code", [8, 16, 24, 32, 61, 80, 160, 212, 310, 311])
@pytest.mark.parametrize(("frames", "each"), [(10, (1, 1)), (11, (1,)), (13, (2, 1, 3)), (1, (1,))])
def test_every_sample_format_decodes_as_in_wfdb(
    tmp_path: Path, code: int, frames: int, each: tuple[int, ...]
) -> None:
    raw = np.random.default_rng(code).integers(0, 256, 4 * frames * sum(each), np.uint8)
    if code == 311:
        raw[3::4] &= 0x3F  # wfdb lets one of the two unused bits into the third sample
    lines = [f"r.dat {code}x{n}+4 200/mV 12 5" + " 9" * (code == 8) for n in each]
    (tmp_path / "r.hea").write_text("\n".join([f"r {len(each)} 250 {frames}", *lines]))
    content = b"head" + raw.tobytes()[: count_bytes(code, frames * sum(each))]
    (tmp_path / "r.dat").write_bytes(content)
    same_as_wfdb(tmp_path / "r")
    (tmp_path / "r.dat").write_bytes(content[:-1])
    assert read_error(tmp_path / "r").code == "truncated"


def test_the_two_unused_bits_of_format_311_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "r.hea").write_text("r 1 250 3\nr.dat 311 200/mV")
    word = (5 & 1023) | (-6 & 1023) << 10 | (7 & 1023) << 20 | 3 << 30
    (tmp_path / "r.dat").write_bytes(word.to_bytes(4, "little"))
    assert read(tmp_path / "r").signals[0].samples.tolist() == [5, -6, 7]


@pytest.mark.parametrize(
    ("code", "bits"),
    [
        ("16", 16),
        ("24", 24),
        ("32", 32),
        ("80", 8),
        ("212", 12),
        ("508", 8),
        ("516", 16),
        ("524", 24),
    ],
)
def test_what_wfdb_writes_is_read_back(tmp_path: Path, code: str, bits: int) -> None:
    most = 1 << (bits - 1)
    digital = np.random.default_rng(1).integers(1 - most, most, (333, 2))
    digital[7:9, 0], digital[50, 1] = most - 1, 1 - most
    fields = {
        "sig_name": ["a", "b"],
        "units": ["mV", "uV"],
        "fmt": [code] * 2,
        "adc_gain": [123.4, 2.0],
        "baseline": [-7, 30],
    }
    written_by_wfdb(tmp_path, fs=250, d_signal=digital, **fields)
    same_as_wfdb(tmp_path / "r")
    for signal, values in zip(read(tmp_path / "r").signals, digital.T, strict=True):
        if bits <= 24:
            assert np.array_equal(signal.samples, values)
    damaged = bytearray((tmp_path / "r.dat").read_bytes())
    damaged[len(damaged) // 2] ^= 0x08
    (tmp_path / "r.dat").write_bytes(damaged)
    assert read_error(tmp_path / "r").code in {"checksum", "corrupt", "truncated"}


def test_flac_with_several_samples_a_frame_reads_as_wfdb_reads_it(tmp_path: Path) -> None:
    digital = [np.arange(40, dtype=np.int64) - 20, 3 * np.arange(40, dtype=np.int64)]
    fields = {
        "sig_name": ["a", "b"],
        "units": ["mV", "mV"],
        "fmt": ["516"] * 2,
        "adc_gain": [200.0] * 2,
        "baseline": [0, 0],
    }
    ours = read(
        written_by_wfdb(tmp_path, fs=62.5, e_d_signal=digital, samps_per_frame=[4, 4], **fields)
    )
    assert [signal.rate for signal in ours.signals] == [250.0, 250.0]
    for signal, values in zip(ours.signals, digital, strict=True):
        assert np.array_equal(signal.samples, values)


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_the_least_value_of_flac_samples_marks_a_missing_one(tmp_path: Path, bits: int) -> None:
    least = -(1 << (bits - 1))
    digital = np.arange(80).reshape(40, 2) - 40
    digital[[3, 17, 18], 1] = least
    digital[5, 0] = least + 1
    fields = {
        "sig_name": ["a", "b"],
        "units": ["mV"] * 2,
        "fmt": [str(500 + bits)] * 2,
        "adc_gain": [200.0] * 2,
        "baseline": [0, 0],
    }
    path = written_by_wfdb(tmp_path, fs=250, d_signal=digital, **fields)
    same_as_wfdb(path)
    recording = read(path)
    assert [(str(finding.code), finding.count) for finding in recording.findings] == [
        ("missing_samples", 3)
    ]
    assert np.array_equal(recording.signals[0].samples, digital[:, 0])
    assert np.flatnonzero(np.isnan(recording.signals[1].samples)).tolist() == [3, 17, 18]


def test_skewed_signals_line_up_as_in_wfdb(tmp_path: Path) -> None:
    path = write(tmp_path, lines={1: "r.dat 16:3 1000/mV 16 0"})
    same_as_wfdb(path)
    ours = read(path).signals
    assert [len(signal.samples) for signal in ours] == [50, 47, 50]
    assert np.array_equal(ours[1].samples, samples()[3:, 1])
    assert (
        read_error(write(tmp_path, lines={1: "r.dat 16:50 1000/mV 16 0"})).code
        == "header_implausible"
    )


# --- values


def test_digital_values_are_the_files_own(tmp_path: Path) -> None:
    recording = read(write(tmp_path))
    assert recording.findings == []
    assert [signal.channel for signal in recording.signals] == list(NAMES)
    assert np.array_equal(
        np.stack([signal.samples for signal in recording.signals], axis=1), samples()
    )
    assert [signal.onset for signal in recording.signals] == [0.0, 0.0, 0.0]


def test_invalid_samples_become_missing(tmp_path: Path) -> None:
    values = samples()
    values[10:15, 1] = -32768
    recording = read(write(tmp_path, values=values))
    assert codes(recording.findings) == {"missing_samples"}
    assert recording.findings[0].count == 5
    assert [signal.samples.dtype.name for signal in recording.signals] == [
        "int16",
        "float32",
        "int16",
    ]
    assert np.flatnonzero(np.isnan(recording.signals[1].samples)).tolist() == [10, 11, 12, 13, 14]
    assert np.nanmin(physical(recording.signals[1])) > -1


def test_values_beyond_24_bits_are_kept_as_physical_values(tmp_path: Path) -> None:
    digital = np.array([[2**31 - 1], [2**31 - 3], [-(2**31)], [2**30]], "<i4")
    (tmp_path / "r.hea").write_text("r 1 100 4\nr.dat 32 2(2147483640)/mV")
    (tmp_path / "r.dat").write_bytes(digital.tobytes())
    (signal,) = read(tmp_path / "r").signals
    assert (signal.scale, signal.offset) == (1.0, 0.0)
    assert signal.samples[:2].tolist() == [3.5, 2.5]
    assert np.isnan(signal.samples[2])


def test_defaults_of_the_format_are_used_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "r.hea").write_text("r 1\nr.dat 16")
    (tmp_path / "r.dat").write_bytes(samples(20, 1).tobytes())
    recording = read(tmp_path / "r")
    (signal,) = recording.signals
    assert (signal.channel, signal.rate, signal.unit, signal.scale, len(signal.samples)) == (
        "signal 1",
        250.0,
        "mV",
        1 / 200,
        20,
    )
    assert codes(recording.findings, "warning") == {"sampling_rate", "gain"}
    assert codes(recording.findings, "info") == {"unit", "length"}


@pytest.mark.parametrize(
    ("gain", "scale", "offset", "unit"),
    [
        ("-20(5)/degC", -0.05, 0.25, "degC"),
        ("2e3/mv", 5e-4, -0.0, "mV"),
        ("4/µV", 0.25, -0.0, "uV"),
    ],
)
def test_calibrations(tmp_path: Path, gain: str, scale: float, offset: float, unit: str) -> None:
    signal = read(write(tmp_path, gain=gain)).signals[0]
    assert (signal.scale, signal.offset, signal.unit) == pytest.approx((scale, offset, unit))


def test_a_missing_baseline_is_the_adc_zero(tmp_path: Path) -> None:
    signal = read(write(tmp_path, lines={0: "r.dat 16 200/mV 12 1024"})).signals[0]
    assert signal.offset == -1024 / 200


def test_times_are_read_where_they_are_valid(tmp_path: Path) -> None:
    header = read_header(
        write(tmp_path, record="{name} {channels} 100/100(5) {frames} 8:26:04.5 26/10/1994")
    )
    assert header.start == datetime(1994, 10, 26, 8, 26, 4, 500_000)
    assert (
        read_header(write(tmp_path, record="{name} {channels} 100 {frames} 0:07")).clock is not None
    )
    for clock in ("05-May-2020 09:49:17", "2020", "25:00:00", "8:26:04 31/02/1994"):
        header = read_header(write(tmp_path, record="{name} {channels} 100 {frames} " + clock))
        assert header.start is None
        assert codes(header.findings) == {"base_date"}
        assert not any(word in repr(header.findings) for word in clock.split())


def test_comments_are_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path, tail="# Name: Doe, John\n#DOB: 1951-08-02\n#\n")
    recording = read(path)
    assert codes(recording.findings) == {"phi"}
    assert recording.findings[0].count == 2
    assert "Doe" not in repr(recording)
    assert read_header(path, keep_phi=True).comments == ("Name: Doe, John", "DOB: 1951-08-02")


# --- faults

GOOD = "{good}"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another record's header": ({"record": "other {channels} 100 {frames}"}, "record_name"),
    "no frequency": ({"record": "{name} {channels} 0 {frames}"}, "sampling_rate"),
    "negative frequency": ({"record": "{name} {channels} -100 {frames}"}, "sampling_rate"),
    "frequency no number": ({"record": "{name} {channels} nan {frames}"}, "sampling_rate"),
    "more signals than lines": ({"record": "{name} 4 100 {frames}"}, "header_syntax"),
    "more lines than signals": ({"record": "{name} 2 100 {frames}"}, "header_syntax"),
    "no signals": ({"record": "{name} 0 100 {frames}"}, "header_implausible"),
    "bomb": ({"record": "{name} {channels} 100 2147483647"}, "header_implausible"),
    "negative length": ({"record": "{name} {channels} 100 -5"}, "header_implausible"),
    "length no number": ({"record": "{name} {channels} 100 5.5"}, "header_field"),
    "cut": ({"data": samples().tobytes()[:-1]}, "truncated"),
    "empty signal file": ({"data": b""}, "truncated"),
    "empty signal file, no length": ({"record": "{name} {channels} 100", "data": b""}, "truncated"),
    "bit flip": (
        {"data": samples().tobytes()[:100] + b"\x55" + samples().tobytes()[101:]},
        "checksum",
    ),
    "rotated by a frame": (
        {"data": samples().tobytes()[6:] + samples().tobytes()[:6]},
        "initial_value",
    ),
    "unknown format": ({"code": "999"}, "format"),
    "format no number": ({"code": "16bit"}, "header_syntax"),
    "no samples a frame": ({"code": "16x0"}, "header_implausible"),
    "too many samples a frame": ({"code": "16x999999999"}, "header_implausible"),
    "gain no number": ({"gain": "nan/mV"}, "gain"),
    "gain without a scale": ({"gain": "1e-320/mV"}, "gain"),
    "gain beyond all numbers": ({"gain": "1e400/mV"}, "gain"),
    "checksum no number": ({"lines": {1: "r.dat 16 1000/mV 16 0 1 6x58 0 II"}}, "header_field"),
    "signals twice": ({"lines": {2: signal_line(samples()[:, 2], "II")}}, "duplicate_channel"),
    "two formats in one file": ({"lines": {2: "r.dat 212 1000/mV"}}, "header_syntax"),
    "signals of one file apart": (
        {"lines": {1: "s.dat 16 1000/mV"}, "tail": ""},
        "missing_signal_file",
    ),
    "only null signals": ({"code": "0"}, "missing_channel"),
    "out of the folder": ({"lines": {0: "../../secret.dat 16 1000/mV"}}, "path_escape"),
    "absolute": ({"lines": {0: "/etc/hostname 16 1000/mV"}}, "path_escape"),
    "not FLAC": ({"code": "516"}, "corrupt"),
    "NUL": ({"tail": "\0"}, "header_syntax"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_by_name(tmp_path: Path, name: str) -> None:
    how, code = FAULTS[name]
    assert read_error(write(tmp_path, **how)).code == code


def test_headers_that_are_none(tmp_path: Path) -> None:
    for text, code in (
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"# only\n", "header_syntax"),
        (b"<!DOCTYPE html>\n<html>", "header_syntax"),
    ):
        (tmp_path / "r.hea").write_bytes(text)
        assert read_error(tmp_path / "r").code == code
    (tmp_path / "r.hea").unlink()
    assert read_error(tmp_path / "r").code == "missing_signal_file"


def test_unusual_but_valid_spellings_of_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, tail="# end\n")
    text = (tmp_path / "r.hea").read_bytes()
    for changed in (
        b"\xef\xbb\xbf" + text,
        b"# before\r\n\r\n" + text.replace(b"\n", b"\r\n"),
        text.replace(b" ", b"\t"),
        b"  " + text.replace(b"\n", b" \n\n"),
        text.rstrip(b"\n"),
    ):
        (tmp_path / "r.hea").write_bytes(changed)
        assert [signal.channel for signal in read(path).signals] == list(NAMES)


def test_a_group_of_signals_must_be_together(tmp_path: Path) -> None:
    path = write(tmp_path, lines={1: "s.dat 16 1000/mV"})
    (tmp_path / "s.dat").write_bytes(bytes(1000))
    assert read_error(path).code == "header_syntax"


def test_optional_signals_of_one_name_are_numbered(tmp_path: Path) -> None:
    path = write(tmp_path, lines={2: signal_line(samples()[:, 2], "II")})
    recording = read(path, required=["I"])
    assert [signal.channel for signal in recording.signals] == ["I", "II (2)", "II (3)"]
    assert codes(recording.findings) == {"duplicate_channel"}
    assert read_error(path, required=["II"]).code == "duplicate_channel"


def test_foreign_text_is_made_fit_to_store(tmp_path: Path) -> None:
    recording = read(write(tmp_path, lines={0: signal_line(samples()[:, 0], "<b>=1+1[/red]")}))
    assert codes(recording.findings) == {"label_chars"}
    assert not set(recording.signals[0].channel) & set("<>[]")


def test_null_signals_are_left_out(tmp_path: Path) -> None:
    recording = read(
        write(
            tmp_path, lines={1: "~ 0 86/mV 11 0 -1024 0 0 II"}, data=samples()[:, [0, 2]].tobytes()
        )
    )
    assert [signal.channel for signal in recording.signals] == ["I", "V1"]
    assert codes(recording.findings) == {"missing_channel"}


def test_checksums_are_compared_modulo_65536_and_only_where_the_format_promises_them(
    tmp_path: Path,
) -> None:
    total = int(samples()[:, 0].sum(dtype=np.int64))
    for written in (total, total & 0xFFFF, total - 65536):
        assert read(
            write(tmp_path, lines={0: f"r.dat 16 1000/mV 16 0 {samples()[0, 0]} {written} 0 I"})
        ).signals
    wrong = {0: f"r.dat 16 1000/mV 16 0 {samples()[0, 0]} {total + 1} 0 I"}
    assert read_error(write(tmp_path, lines=wrong)).code == "checksum"
    assert codes(
        read(write(tmp_path, lines=wrong, record="{name} {channels} 100")).findings, "warning"
    ) == {"checksum"}
    empty = {i: f"r.dat 16 1000/mV 16 0 0 0 0 {name}" for i, name in enumerate(NAMES)}
    assert codes(read(write(tmp_path, lines=empty)).findings, "warning") == {
        "checksum",
        "initial_value",
    }
    assert read_error(write(tmp_path, lines={0: empty[0]})).code == "checksum"


def test_a_stale_initial_value_is_distinguished_from_shifted_samples(tmp_path: Path) -> None:
    stale = signal_line(samples()[:, 0], "I").replace(f" {samples()[0, 0]} ", " 12345 ")
    assert codes(read(write(tmp_path, lines={0: stale})).findings, "warning") == {"initial_value"}
    unsummed = " ".join(stale.split()[:6])
    # nothing vouches for the samples
    assert read_error(write(tmp_path, lines={0: unsummed})).code == "initial_value"
    rotated = np.roll(samples(), 20, axis=0)
    assert read_error(write(tmp_path, data=rotated.tobytes())).code == "initial_value"


def test_bytes_after_the_samples_give_a_warning(tmp_path: Path) -> None:
    assert codes(read(write(tmp_path, data=samples().tobytes() + bytes(10))).findings) == {
        "size_mismatch"
    }
    assert read(write(tmp_path, data=samples().tobytes() + bytes(2))).findings == []


def test_a_flac_file_cannot_promise_more_than_it_may_hold(tmp_path: Path) -> None:
    streaminfo = (
        (100).to_bytes(2, "big") * 2
        + bytes(6)
        + (8000 << 44 | 15 << 36 | (1 << 36) - 1).to_bytes(8, "big")
        + bytes(16)
    )
    (tmp_path / "r.dat").write_bytes(b"fLaC" + b"\x80\0\0\x22" + streaminfo + bytes(100))
    for frames, code in ((1 << 35, "expansion_limit"), (10, "expansion_limit")):
        (tmp_path / "r.hea").write_text(f"r 1 100 {frames}\nr.dat 516 1000/mV 16 0")
        assert read_error(tmp_path / "r").code == code


# --- links and special files


def test_links_and_pipes(tmp_path: Path) -> None:
    inside = tmp_path / "root"
    path = write(inside)
    (inside / "r.dat").rename(tmp_path / "elsewhere.dat")
    (inside / "r.dat").symlink_to(tmp_path / "elsewhere.dat")
    assert read_error(path).code == "symlink_outside_root"
    assert len(own.read_recording("r", scan_folder(inside, follow_symlinks=True)).signals) == 3
    (inside / "r.dat").unlink()
    os.mkfifo(inside / "r.dat")
    assert read_error(path).code == "not_regular_file"


def test_a_source_gives_relative_names(tmp_path: Path) -> None:
    write(tmp_path / "p1")
    header = own.read_header("p1/r.hea", scan_folder(tmp_path))
    assert header.files == ("p1/r.hea", "p1/r.dat")
    assert read_header(tmp_path / "p1" / "r").files == ("r.hea", "r.dat")
    with pytest.raises(UserError) as caught:
        own.read_header("../p1/r", scan_folder(tmp_path))
    assert caught.value.code == "path_escape"
    assert caught.value.file == "../p1/r.hea"


# --- several segments


def segments(
    folder: Path, lines: list[str], record: str = "m/{n} 3 100 {frames}", **parts: dict[str, Any]
) -> Path:
    """A record `m` whose segment lines are given; its segments are written by `write` with the
    options in `parts`.
    """
    for name, how in parts.items():
        write(folder, name, **how)
    frames = sum(int(line.split()[1]) for line in lines)
    (folder / "m.hea").write_text(
        "\n".join([record.format(n=len(lines), frames=frames), *lines]) + "\n"
    )
    return folder / "m"


def test_adjacent_segments_are_joined(tmp_path: Path) -> None:
    path = segments(
        tmp_path, ["a 50", "~ 30", "b 50", "c 50", "d 50"], a={}, b={}, c={}, d={"gain": "500/mV"}
    )
    recording = read(path)
    assert [(s.channel, s.onset, len(s.samples), s.scale) for s in recording.signals[:3]] == [
        ("I", 0.0, 50, 1e-3),
        ("I", 0.8, 100, 1e-3),
        ("I", 1.8, 50, 2e-3),
    ]
    assert codes(recording.findings) == {"discontinuous"}
    assert recording.header.frames == 230
    assert set(recording.header.files) == {
        "m.hea",
        *(f"{x}.{e}" for x in "abcd" for e in ("hea", "dat")),
    }


def test_a_variable_layout_names_the_signals(tmp_path: Path) -> None:
    layout = "\n".join(["lay 3 100 0", *(f"~ 0 86/mV 11 0 -1024 0 0 {name}" for name in NAMES)])
    tmp_path.joinpath("lay.hea").write_text(layout)
    path = segments(tmp_path, ["lay 0", "a 50", "b 50"], a={}, b={"values": samples(50, 2)})
    recording = read(path)
    assert [channel.name for channel in recording.header.channels] == list(NAMES)
    assert [(s.channel, len(s.samples)) for s in recording.signals] == [
        ("I", 100),
        ("II", 100),
        ("V1", 50),
    ]
    assert codes(recording.findings, "warning") == {"discontinuous"}


def test_a_layout_is_no_segment(tmp_path: Path) -> None:
    tmp_path.joinpath("lay.hea").write_text(
        "\n".join(["lay 3 100 0", *(f"~ 0 86/mV 11 0 -1024 0 0 {name}" for name in NAMES)])
    )
    assert read_error(segments(tmp_path, ["lay 0", "lay 50"])).code == "missing_channel"


def test_segments_in_a_folder_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "sub", "a")
    path = segments(tmp_path, ["sub/a 50"])
    assert read(path).header.files == ("m.hea", "sub/a.hea", "sub/a.dat")
    assert own.read_header("m", scan_folder(tmp_path)).files == ("m.hea", "sub/a.hea", "sub/a.dat")


@pytest.mark.parametrize(
    ("lines", "record", "code"),
    [
        (["a 50", "x 50"], "m/{n} 3 100 {frames}", "missing_segment"),
        (["a 50"], "m/2 3 100 {frames}", "header_syntax"),
        (["a 50"], "m/{n} 3 100 60", "length"),
        (["a 49"], "m/{n} 3 100 {frames}", "length"),
        (["a 50"], "m/{n} 3 200 {frames}", "sampling_rate"),
        (["m 50"], "m/{n} 3 100 {frames}", "header_syntax"),
        (["../a 50"], "m/{n} 3 100 {frames}", "path_escape"),
        (["a 50", "b 0"], "m/{n} 3 100 {frames}", "header_syntax"),
        (["~ 50"], "m/{n} 3 100 {frames}", "missing_segment"),
        (["a fifty"], "m/1 3 100 50", "header_syntax"),
        (["a 50", "cut 50"], "m/{n} 3 100 {frames}", "truncated"),
        (["a 50", "bad 50"], "m/{n} 3 100 {frames}", "checksum"),
    ],
)
def test_faults_of_segments(tmp_path: Path, lines: list[str], record: str, code: str) -> None:
    parts = {
        "a": {},
        "b": {},
        "cut": {"data": samples().tobytes()[:200]},
        "bad": {"data": samples().tobytes()[:-1] + b"\x7f"},
    }
    for name, how in parts.items():
        write(tmp_path, name, **how)
    (tmp_path / "m.hea").write_text(
        "\n".join([record.format(n=len(lines), frames=50 * len(lines)), *lines])
    )
    assert read_error(tmp_path / "m").code == code


def test_one_small_file_cannot_be_named_over_and_over(tmp_path: Path) -> None:
    values = np.zeros((30_000, 3), "<i2")
    path = segments(tmp_path, ["a 30000"] * 2000, a={"values": values})
    with pytest.raises(UserError) as caught:
        read_header(path)
    assert caught.value.code == "expansion_limit"


# --- fuzz


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_no_header_does_more_than_refuse(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "a.hea").is_file():
        segments(tmp_path, ["a 50", "~ 10", "b 50"], a={}, b={})
    good = data.draw(
        st.sampled_from([(tmp_path / name).read_bytes() for name in ("a.hea", "m.hea")])
    )
    tokens = st.sampled_from(
        [
            b"0",
            b"-1",
            b"9" * 30,
            b"1e9",
            b"nan",
            b"~",
            b"a",
            b"m",
            b"16x2",
            b"212",
            b"516",
            b"8+3",
            b"/",
            b"(",
            b"#",
            b"\n",
            b" ",
            b"\xff",
            b"../x",
        ]
    )
    text = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 6))] = data.draw(
            st.one_of(tokens, st.binary(max_size=4))
        )
    stem = "a" if good.startswith(b"a") else "m"
    (tmp_path / f"{stem}.hea").write_bytes(text)
    try:
        recording = read(tmp_path / stem, required=())
    except UserError as error:
        named = error.file
    else:
        assert all(
            np.isfinite([signal.rate, signal.scale, signal.offset, signal.onset]).all()
            for signal in recording.signals
        )
        assert all(signal.rate > 0 and signal.samples.ndim == 1 for signal in recording.signals)
        named = recording.header.where
    finally:
        (tmp_path / f"{stem}.hea").write_bytes(good)
    assert named == f"{stem}.hea"


@pytest.mark.slow
@FUZZ
@given(text=st.text(max_size=200))
def test_any_text_is_a_header_or_refused(text: str) -> None:
    with suppress(UserError):
        wfdb_header.parse_header(text.encode("utf-8", "replace"), "r")


@pytest.mark.slow
def test_thousands_of_equal_names_take_linear_time(
    seconds: Callable[[Callable[[], object]], float],
) -> None:
    lines = [f"r.dat 16 1 0 0 0 0 0 x{i // 2}" for i in range(30_000)]
    few, many = ("\n".join([f"r {n} 100", *lines[:n]]).encode() for n in (5000, 30_000))
    assert seconds(lambda: wfdb_header.parse_header(many, "r", required=())) < 15 * seconds(
        lambda: wfdb_header.parse_header(few, "r", required=())
    )
    parsed = wfdb_header.parse_header(many, "r", required=())
    assert [channel.name for *_, channel in parsed.signals[:3]] == ["x0 (1)", "x0 (2)", "x1 (3)"]


def test_long_digits_cost_no_more_than_their_length() -> None:
    for field in ("9" * 1_000_000 + "x", "1" * 500_000 + "." + "1" * 500_000 + "x"):
        with pytest.raises(UserError):
            wfdb_header.parse_header(f"r 1 {field} 10\nr.dat 16".encode(), "r")
        with pytest.raises(UserError):
            wfdb_header.parse_header(f"r 1 100 10\nr.dat 16 {field}".encode(), "r")
