"""Band-pass and notch of `tokenize`. Oracles: scipy on the full recording in float64, planted
sines, closed-form gains.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_cache import RATE, build, physical, planned, record, records
from made_cache import tiny as tiny
from scipy import signal as scipy_signal

from bitimely_cli.main import main
from bitimely_core import tokens
from bitimely_core.config import DataConfig, validate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.tokens import filters
from bitimely_core.types import Record, Signal

FAST = 200.0  # Hz


def oracle(
    x: np.ndarray, rate: float, band: tuple[float, float] | None, *notches: float
) -> np.ndarray:
    """As a notebook would do it."""
    if band:
        x = scipy_signal.sosfiltfilt(
            scipy_signal.butter(4, band, "bandpass", fs=rate, output="sos"), x
        )
    for stop in notches:
        x = scipy_signal.filtfilt(*scipy_signal.iirnotch(stop, 30, fs=rate), x)
    return x


def alone(samples: np.ndarray, rate: float = FAST, subject: int = 0, **change: Any) -> Record:
    """A recording with one channel."""
    return record(subject, signals=[Signal("eeg", rate, "uV", samples, **change)])


def track(windows: tokens.Windows, recording: int = 0) -> np.ndarray:
    """The windows of one recording one after the other [n]."""
    return windows.values()[windows.subjects() == f"s{recording:03d}"][..., 0].ravel()


def tone(hertz: float, seconds: float = 60.0, rate: float = FAST) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32)


WHOLE: dict[str, Any] = {"channels": ["eeg"], "normalise": "none"}
FINE: dict[str, Any] = {**WHOLE, "rate": FAST, "window": 400}


def test_filtered_recordings_equal_scipy_on_the_full_recording(tmp_path: Path) -> None:
    held = [record(subject, seconds=60) for subject in range(3)]
    windows = build(held, tmp_path, **WHOLE, bandpass=(0.5, 8.0), notch=[4.0, 2.0])
    for i, found in enumerate(held):
        wanted = oracle(physical(found, "eeg"), RATE, (0.5, 8.0), 2.0, 4.0)
        np.testing.assert_allclose(track(windows, i), wanted, rtol=2e-7, atol=1e-4)
    assert windows.manifest.shards[0].dtype == "float32"
    assert windows.mask() is None
    assert (windows.options.bandpass, windows.options.notch) == ((0.5, 8.0), (2.0, 4.0))
    assert "band-pass 0.5-8 Hz, notch 2, 4 Hz" in windows.notices[0]


@pytest.mark.parametrize(
    ("hertz", "options", "gain"),
    [
        (10.0, {"bandpass": (0.5, 40.0)}, 1.0),
        (0.05, {"bandpass": (0.5, None)}, 0.0),
        (10.0, {"bandpass": (0.5, None)}, 1.0),
        (90.0, {"bandpass": (None, 40.0)}, 0.0),
        (10.0, {"bandpass": (None, 40.0)}, 1.0),
        # the amplitude of an edge: once 1/sqrt(2), and once more backward
        (40.0, {"bandpass": (0.5, 40.0)}, 0.5),
        (50.0, {"notch": [50.0]}, 0.0),
        (45.0, {"notch": [50.0]}, 0.976),  # 1 / (1 + (50 / 30 * 45 / (50**2 - 45**2))**2)
        (60.0, {"bandpass": (0.5, None), "notch": [50.0, 60.0]}, 0.0),
    ],
)
def test_a_planted_sine_is_kept_in_phase_or_gone(
    tmp_path: Path, hertz: float, options: dict[str, Any], gain: float
) -> None:
    windows = build([alone(tone(hertz))], tmp_path, **FINE, **options)
    middle = slice(20 * int(FAST), 40 * int(FAST))
    np.testing.assert_allclose(track(windows)[middle], gain * tone(hertz)[middle], atol=0.02)


def test_the_offset_of_stored_values_is_no_signal(tmp_path: Path) -> None:
    """A high-pass takes out the physical mean, whatever scale and offset the integers have."""
    digital = np.rint(1000 * tone(10.0)).astype(np.int16)
    windows = build(
        [alone(digital, scale=0.01, offset=500.0)], tmp_path, **FINE, bandpass=(1.0, None)
    )
    np.testing.assert_allclose(track(windows)[2000:-2000], 10 * tone(10.0)[2000:-2000], atol=0.05)


def test_filtered_first_and_resampled_then(tmp_path: Path) -> None:
    """45 Hz would be folded to 15 Hz at 60 Hz; what is left is the filtered signal, resampled."""
    x = (tone(45.0) + tone(5.0)).astype(np.float64)
    windows = build(
        [alone(x.astype(np.float32))],
        tmp_path,
        **WHOLE,
        rate=50.0,
        window=100,
        bandpass=(1.0, 30.0),
        notch=[45.0],
    )
    wanted = scipy_signal.resample_poly(oracle(x, FAST, (1.0, 30.0), 45.0), 1, 4)
    np.testing.assert_allclose(track(windows)[200:-200], wanted[200:-200], atol=2e-4)


def test_each_stretch_between_missing_values_is_filtered_on_its_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=12_000).astype(np.float32)
    x[[0, 5000, 5020]] = np.nan  # 19 samples between the last two: too few for the padding
    x[8000:8100] = np.nan
    windows = build([alone(x)], tmp_path, **FINE, bandpass=(1.0, 40.0))
    mask = windows.mask()
    assert mask is not None
    seen = np.isfinite(x)
    seen[5001:5020] = False
    np.testing.assert_array_equal(mask.ravel(), seen)
    for part in (slice(1, 5000), slice(5021, 8000), slice(8100, 12_000)):
        np.testing.assert_allclose(
            track(windows)[part], oracle(x[part].astype(np.float64), FAST, (1.0, 40.0)), atol=1e-6
        )
    finding = next(f for f in windows.manifest.findings if f.code == Reason.LENGTH)
    assert (finding.count, finding.level) == (1, "warning")
    assert windows.manifest.left_out == {"unfiltered": 1}


def test_each_segment_is_filtered_on_its_own(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=8000).astype(np.float32)
    parts = [Signal("eeg", FAST, "uV", x[:4000]), Signal("eeg", FAST, "uV", x[4000:], onset=100.0)]
    windows = build([record(0, signals=parts)], tmp_path, **FINE, bandpass=(1.0, 40.0))
    for part in (slice(0, 4000), slice(4000, 8000)):
        np.testing.assert_allclose(
            track(windows)[part], oracle(x[part].astype(np.float64), FAST, (1.0, 40.0)), atol=1e-6
        )


def test_the_shortest_stretch_is_that_of_scipy() -> None:
    for band, notch in (
        ((1.0, 40.0), None),
        ((1.0, None), None),
        ((None, 40.0), None),
        (None, (50.0,)),
    ):
        (sections,) = filters.design_filters(band, notch, FAST)
        shortest = filters.count_padding(sections)
        scipy_signal.sosfiltfilt(sections, np.ones(shortest + 1))
        with pytest.raises(ValueError, match="padlen"):
            scipy_signal.sosfiltfilt(sections, np.ones(shortest))
        assert filters.count_too_short(np.zeros(shortest, np.int16), [sections]) == 1
        assert np.isnan(filters.apply_filters(np.zeros(shortest), [sections])).all()
        assert np.isfinite(filters.apply_filters(np.zeros(shortest + 1), [sections])).all()


@pytest.mark.parametrize(
    "options",
    [{"stride": 100}, {"stride": 130, "rate": 60.0, "window": 120}, {"rate": 333.0, "window": 666}],
)
def test_with_a_split_by_time_no_filter_reaches_from_block_to_block(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Other values in one block of time change no bit of the others, though the filter remembers
    seconds.

    Resampling downwards takes the level of the full recording off and puts it back: that is
    rounding.
    """
    made = {**FINE, "split": "time", "bandpass": (0.05, 20.0), **options}
    rng = np.random.default_rng(2)
    x = rng.normal(size=24_000).astype(np.float32)
    first = build([alone(x)], tmp_path / "a", **made)
    length = first.length / first.rate
    for name in ("train", "validation", "test"):
        starts = first[name].index["start"]
        y = x.copy()
        block = slice(
            math.floor(starts[0] * FAST + 1e-6), math.ceil((starts[-1] + length) * FAST - 1e-6)
        )
        y[block] = 10 * rng.normal(size=block.stop - block.start)
        second = build([alone(y)], tmp_path / name, **made)
        for other in {"train", "validation", "test"} - {name}:
            np.testing.assert_allclose(
                first[other].values(),
                second[other].values(),
                rtol=0,
                atol=1e-5 if first.rate < FAST else 0,
            )
        assert np.abs(first[name].values() - second[name].values()).max() > 0.1
    assert first.index["split"].value_counts().height == 3


def test_with_one_subject_per_split_the_full_recording_is_filtered(tmp_path: Path) -> None:
    x = np.random.default_rng(2).normal(size=24_000).astype(np.float32)
    windows = build([alone(x)], tmp_path, **FINE, bandpass=(0.05, 20.0))
    np.testing.assert_allclose(
        track(windows), oracle(x.astype(np.float64), FAST, (0.05, 20.0)), atol=1e-6
    )


def test_held_channels_are_states_and_stay_as_they_are(tmp_path: Path) -> None:
    held = records(3, seconds=60)
    windows = build(
        held, tmp_path, channels=["eeg", "marker"], normalise="none", bandpass=(1.0, 5.0)
    )
    marker = windows.values()[windows.subjects() == "s001"][..., 1].ravel()
    np.testing.assert_array_equal(
        marker, np.repeat(physical(held[1], "marker"), 20).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandpass": (5.0, 1.0)}, "LOW < HIGH"),
        ({"bandpass": (5.0, 5.0)}, "LOW < HIGH"),
        ({"bandpass": (0.0, 5.0)}, "LOW < HIGH"),
        ({"bandpass": (None, None)}, "LOW < HIGH"),
        ({"bandpass": (1.0, float("inf"))}, "bandpass.*finite number"),
        ({"bandpass": (1.0,)}, "LOW,HIGH"),
        ({"bandpass": (1.0, 10.0)}, "below 10 Hz, half of that"),
        ({"notch": [-1.0]}, "above 0 Hz"),
        ({"notch": [10.0]}, "below 10 Hz"),
        ({"channels": ["temp", "eeg"], "bandpass": (None, 0.5)}, "temp.* has 1 Hz.* below 0.5 Hz"),
    ],
)
def test_invalid_frequencies_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    for make in (
        lambda: build(records(2), tmp_path / "t", **{**WHOLE, **options}),
        lambda: planned(records(2), **{**WHOLE, **options}),
    ):
        with pytest.raises(UserError, match=message) as error:
            make()
        assert (error.value.code, error.value.exit_code) == (Reason.CONFIG, Exit.USAGE)
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_another_filter_is_another_set(tmp_path: Path) -> None:
    held = records(3, seconds=60)
    plain = build(held, tmp_path, **WHOLE)
    for options in ({"bandpass": (1.0, 5.0)}, {"notch": [5.0]}):
        with pytest.raises(UserError) as error:
            build(held, tmp_path, **WHOLE, **options)
        assert (error.value.code, error.value.field) == (Reason.SETTINGS_DIFFER, *options)
    made = build(held, tmp_path, **WHOLE, notch=[5.0, 2.0], force_new=True)
    assert (
        build(held, tmp_path, **WHOLE, notch=[2.0, 5.0, 5.0]).fingerprint
        == made.fingerprint
        != plain.fingerprint
    )
    with pytest.raises(UserError, match=r"was made with \[2.0, 5.0\]"):
        build(held, tmp_path, **WHOLE)


def test_dry_run_counts_what_build_makes(tmp_path: Path) -> None:
    held = records(4, seconds=60)
    broken = held[1].signals[0].samples.astype(np.float32)
    broken[::10] = np.nan
    held[1] = replace(held[1], signals=[held[1].signals[0]._replace(samples=broken)])
    options = {**WHOLE, "bandpass": (1.0, None), "notch": [5.0], "split": "time"}
    windows, found = build(held, tmp_path, **options), planned(held, **options)
    assert (found["bandpass"], found["notch"]) == ([1.0, None], [5.0])
    assert found["findings"] == [finding.model_dump() for finding in windows.manifest.findings]
    assert found["bytes"] == sum(shard.nbytes for shard in windows.shards)
    assert windows.manifest.left_out["unfiltered"] > 100


def test_settings_take_numbers_and_text() -> None:
    read = validate(DataConfig, {"bandpass": ",40", "notch": "50, 100"})
    assert (read.bandpass, read.notch) == ((None, 40.0), (50.0, 100.0))
    assert validate(DataConfig, {"bandpass": [0.5, 40], "notch": [50]}).bandpass == (0.5, 40.0)
    for wrong in (
        {"bandpass": "40"},
        {"bandpass": "low,high"},
        {"notch": "50,"},
        {"notch": "fifty"},
        {"bandpass": "1,inf"},
    ):
        with pytest.raises(UserError) as error:
            validate(DataConfig, wrong)
        assert error.value.exit_code == Exit.USAGE


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "raw").mkdir()
    for i in range(3):
        np.save(tmp_path / "raw" / f"{i}.npy", rng.normal(size=4000).astype(np.float32))
    (tmp_path / "map.toml").write_text('[[files]]\nrate = 200\nchannels = ["EMG"]\n')
    w = ["-w", str(tmp_path / "w")]
    assert (
        main(["ingest", "generic", str(tmp_path / "raw"), "--map", str(tmp_path / "map.toml"), *w])
        == 0
    )
    tokenize = ["tokenize", "generic", *w]
    capsys.readouterr()
    for more in (["--dry-run"], []):
        assert main([*tokenize, "--bandpass", "20,", "--notch", "50", "--json", *more]) == 0
        output = json.loads(capsys.readouterr().out)
        assert (output["bandpass"], output["notch"]) == ([20.0, None], [50.0])
        assert "high-pass 20 Hz, notch 50 Hz" in output["notices"][0]
    assert main([*tokenize, "--bandpass", "20,"]) == Exit.USAGE
    assert "settings_differ" in capsys.readouterr().err
    for wrong in (
        ["--bandpass", "20"],
        ["--bandpass", "20,200"],
        ["--notch", "x"],
        ["--channels", "EMB"],
    ):
        assert main([*tokenize, *wrong, "--name", "other"]) == Exit.USAGE
        assert "error[" in capsys.readouterr().err
    assert main([*tokenize, "--notch", "50", "--name", "clean"]) == 0
    assert "next: bitimely pretrain --data clean" in capsys.readouterr().out
