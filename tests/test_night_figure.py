"""The figure of a night: power in decibels, its picture, and the time of day."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from bitimely_cli.main import main
from bitimely_core.datasets import synthetic
from bitimely_core.evaluate.spectrogram import compute_spectrogram
from bitimely_core.page import DensityPlot, Figure, NightPlot, Spectrogram, StageTrack
from bitimely_core.report.night_figure import list_hours
from bitimely_core.report.svg import draw_figure

RATE, EPOCH = 100.0, 30.0


def test_a_tone_and_noise_have_the_power_of_their_definition() -> None:
    seconds = np.arange(4 * 3000) / RATE
    noise = np.random.default_rng(0).normal(0.0, 5.0, len(seconds))
    samples = noise + 40.0 * np.sin(2 * np.pi * 10.0 * seconds)
    spectrogram = compute_spectrogram("Fpz", samples, RATE, np.arange(4) * EPOCH, EPOCH)
    assert spectrogram is not None
    frequencies, power = spectrogram.frequencies, spectrogram.power.mean(0)
    assert (frequencies[0], frequencies[-1]) == (0.5, 30.0)
    assert frequencies[power.argmax()] == 10.0
    # half the squared amplitude in the bandwidth of a Hann window, 1.5 bins of a quarter of a
    # hertz; the correction of a median over 14 segments for noise raises a tone by 1 / 0.727
    tone = 40.0**2 / 2 / (1.5 * 0.25)
    assert power.max() == pytest.approx(10 * np.log10(tone / 0.727), abs=0.1)
    quiet = power[np.abs(frequencies - 10.0) > 2]
    assert quiet.mean() == pytest.approx(10 * np.log10(25.0 / (RATE / 2)), abs=0.5)


def test_epochs_beyond_the_recording_and_flat_ones_are_gaps() -> None:
    samples = np.random.default_rng(0).normal(size=3 * 3000)
    samples[3000:6000] = 7.0
    onsets = np.array([-15.0, 0.0, 30.0, 60.0, 75.0])
    spectrogram = compute_spectrogram("Fpz", samples, RATE, onsets, EPOCH)
    assert spectrogram is not None
    assert np.isnan(spectrogram.power).all(1).tolist() == [True, False, True, False, True]
    assert compute_spectrogram("Resp", samples, 1.0, onsets, EPOCH) is None


@pytest.mark.parametrize(
    ("clock", "length", "labels"),
    [
        (22.5 * 3600, 4 * 3600, ["23:00", "00:00", "01:00", "02:00"]),
        (23 * 3600 + 50 * 60, 1800, ["00:00", "00:15"]),
        (20 * 3600, 12 * 3600, ["20:00", "22:00", "00:00", "02:00", "04:00", "06:00"]),
    ],
)
def test_hours_are_those_of_the_clock(clock: float, length: float, labels: list[str]) -> None:
    ticks = list_hours(clock, length, 3600.0)
    assert [tick.label for tick in ticks] == labels
    first = int(labels[0][:2]) * 3600 + int(labels[0][3:]) * 60
    assert ticks[0].place * 3600 == pytest.approx((first - clock) % 86_400)


def test_the_picture_is_bright_where_the_power_is() -> None:
    power = np.tile(np.linspace(0.0, -20.0, 59), (200, 1))
    power[150:] -= 30.0
    power[40:50] = np.nan
    plot = NightPlot(
        StageTrack("predicted", np.zeros(200, int)),
        DensityPlot(EPOCH, np.full((200, 2), 0.5), ["W", "N2"]),
        Spectrogram("Fpz", np.linspace(0.5, 30.0, 59), power),
    )
    svg = draw_figure(Figure("night", "", "", plot))[0]
    link = next(e.get("href") for e in svg.iter() if e.tag.endswith("image"))
    png = base64.b64decode(link.partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))
    assert pixels.shape[:2] == (59, 200)
    assert not pixels[:, 40:50, 3].any()
    light = pixels[..., :3].astype(float).mean(-1)
    assert light[-1, 0] > light[0, 0] + 50  # the lowest frequency is at the bottom
    assert light[-1, 0] > light[-1, 199] + 50


@pytest.mark.slow
def test_a_page_shows_the_time_of_day_and_no_date(tmp_path: Path) -> None:
    raw, work = tmp_path / "raw" / "sleep-cassette", ["-w", str(tmp_path / "ws")]
    raw.mkdir(parents=True)
    for subject in range(4):
        for end, content in zip(
            ("E0-PSG", "EC-Hypnogram"), synthetic.encode_night("small", 0, subject, 1), strict=True
        ):
            (raw / f"SC4{subject:02d}1{end}.edf").write_bytes(content)
    assert main(["ingest", "sleep-edf", str(tmp_path / "raw"), *work]) in {0, 3}
    assert main(["tokenize", "sleep-edf/staging", *work]) == 0
    train = ["train", "features", "--data", "sleep-edf/staging", "--run", "stager"]
    assert main([*train, *work]) == 0
    content = bytearray((raw / "SC4001E0-PSG.edf").read_bytes())
    for date, is_known in ((b"24.04.89", True), (b"01.01.85", False)):
        content[168:184] = date + b"16.13.00"
        night, out = tmp_path / "night.edf", tmp_path / date.decode()
        night.write_bytes(content)
        assert main(["predict", "stager", str(night), "--out", str(out), *work]) == 0
        page = (out / "night" / "report.html").read_text()
        assert ("16:15" in page) == is_known
        assert "from the start" not in page or not is_known
        assert "1989" not in page
        assert "24.04" not in page
        assert len(pl.read_parquet(out / "night" / "night.parquet")) == 20
