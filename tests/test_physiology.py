"""Rates by signal processing on signals whose rates are known, and beside the scores of a run."""

from __future__ import annotations

import numpy as np
import pytest

from bitimely_core.datasets import physiology
from bitimely_core.datasets.ptb_xl import LEADS
from bitimely_core.registry import datasets
from bitimely_core.types import NativeWindow

RATE = 125.0
T = np.arange(4000) / RATE


def make_ppg(beats: float, breaths: float, noise: float = 0.05) -> np.ndarray:
    """A pulse with its second wave, on a level and with a height that follow the breath; rates a
    minute.
    """
    phase, breath = 2 * np.pi * beats / 60 * T, np.sin(2 * np.pi * breaths / 60 * T)
    pulse = np.sin(phase) + 0.4 * np.sin(2 * phase + 0.8)
    return (
        (1 + 0.1 * breath) * pulse
        + 0.3 * breath
        + noise * np.random.default_rng(0).standard_normal(len(T))
    )


@pytest.mark.parametrize(("beats", "breaths"), [(48, 8), (66, 15), (75, 24), (110, 12), (160, 28)])
def test_rates_of_known_signals(beats: float, breaths: float) -> None:
    ppg = make_ppg(beats, breaths)
    assert abs(physiology.measure_pulse_rate(ppg, RATE) - beats) < 1.5
    assert abs(physiology.measure_breathing_rate(ppg, RATE) - breaths) < 1
    ecg = np.zeros(len(T))
    for beat in np.arange(0.2, T[-1], 60 / beats):
        ecg += np.exp(-0.5 * ((T - beat) / 0.012) ** 2) + 0.25 * np.exp(
            -0.5 * ((T - beat - 0.25) / 0.05) ** 2
        )
    assert abs(physiology.measure_heart_rate(ecg, RATE) - beats) < 1.5
    lost = ppg.copy()
    lost[500:540] = np.nan
    assert abs(physiology.measure_pulse_rate(lost, RATE) - beats) < 2


def make_ecg(rr: float, pr: float, qrs: float, qt: float, rate: float) -> np.ndarray:
    """Beats of a P wave, a triangle of the width `qrs` and a half-sine T wave; `pr` from the top of
    P, `qt` to the end of T; seconds.
    """
    t, out = np.arange(round(10 * rate)) / rate, np.zeros(round(10 * rate))
    for onset in np.arange(0.4, 10, rr):
        s = t - onset
        out += 1.2 * np.clip(1 - np.abs(s - qrs / 2) / (qrs / 2), 0, None) + 0.15 * np.exp(
            -0.5 * ((s + pr) / 0.02) ** 2
        )
        out += 0.3 * np.where((s > qt - 0.16) & (s < qt), np.sin(np.pi * (s - qt + 0.16) / 0.16), 0)
    return out + 0.005 * np.random.default_rng(0).standard_normal(len(t))


@pytest.mark.parametrize("rate", [100.0, 500.0])
@pytest.mark.parametrize(
    ("rr", "pr", "qrs", "qt"),
    [
        (0.8, 0.12, 0.08, 0.36),
        (1.1, 0.18, 0.14, 0.42),
        (0.65, 0.1, 0.1, 0.33),
        (0.5, 0.12, 0.08, 0.3),
        (0.4, 0.12, 0.06, 0.27),
    ],
)
def test_intervals_of_a_known_ecg(rate: float, rr: float, pr: float, qrs: float, qt: float) -> None:
    lead = make_ecg(rr, pr, qrs, qt, rate)
    found = physiology.measure_ecg([lead, 0.5 * lead], rate)
    np.testing.assert_allclose(found[0], rr, atol=0.005)
    np.testing.assert_allclose(found[1:3], 0, atol=0.01)  # a steady beat
    np.testing.assert_allclose(found[3], qrs, atol=0.03)
    # there the T wave ends in the P wave of the next beat
    np.testing.assert_allclose(found[4], pr, atol=0.03 if rr > 0.4 else 0.05)
    np.testing.assert_allclose(found[5], qt, atol=0.04)
    heights = found[6:].reshape(5, 2)  # P, R, S, ST, T of both leads
    np.testing.assert_allclose(heights[1] / heights[1, 0], [1, 0.5], atol=0.02)
    assert heights[1, 0] > 0.7
    assert heights[4, 0] == pytest.approx(0.3, abs=0.08)
    assert np.isnan(physiology.measure_ecg([np.zeros(1000), np.zeros(1000)], rate)).all()


@pytest.mark.parametrize("level", [0.0, 1.0, 1000.3, -5e6])
def test_a_flat_signal_has_no_rate(level: float) -> None:
    """Whatever its level: the rounding errors of a filter are no beats."""
    flat, t = np.full(4000, level), np.arange(1000) / RATE
    for measure in (
        physiology.measure_pulse_rate,
        physiology.measure_heart_rate,
        physiology.measure_breathing_rate,
    ):
        assert np.isnan(measure(flat, RATE))
        assert np.isnan(measure(np.where(np.arange(4000) % 9, flat, np.nan), RATE))
    assert np.isnan(physiology.measure_ecg([flat[:1000]] * 2, 100.0)).all()
    assert np.isnan(physiology.measure_motion_free_rate([flat] * 2, [flat] * 3, RATE))
    pulse = np.sin(2 * np.pi * 1.5 * t)
    for ppg in ([pulse, pulse], [flat[:1000], pulse], [np.full(1000, np.nan), pulse]):
        assert abs(physiology.measure_motion_free_rate(ppg, [flat[:1000]] * 3, RATE) - 90) < 1
    np.testing.assert_allclose(physiology.measure_eeg(flat[:178], 173.61), np.log(1e-6))


def test_the_frequency_of_steps_is_not_taken_for_the_pulse() -> None:
    t = np.arange(1000) / RATE
    steps, pulse = np.sin(2 * np.pi * 2.7 * t), np.sin(2 * np.pi * 2.1 * t)
    ppg = [pulse + 1.3 * steps, 0.8 * pulse + 1.2 * steps]
    found = physiology.measure_motion_free_rate(ppg, [steps, 0.1 * t, 0.5 * steps], RATE)
    assert abs(found - 60 * 2.1) < 3


def test_registered_measures_read_every_window() -> None:
    named = {baseline.name: baseline for baseline in datasets["bidmc"].facts.baselines}

    def measure(name: str, samples: np.ndarray) -> float:
        channels = named[name].channels
        window = NativeWindow(dict.fromkeys(channels, samples), dict.fromkeys(channels, RATE))
        return float(named[name].measure(window))

    for beats in (60, 90, 120):
        assert measure("ppg-peaks", make_ppg(beats, 15)) == pytest.approx(beats, abs=1.5)
        assert measure("ppg-level", make_ppg(beats, 15)) == pytest.approx(15, abs=1)
    for nothing in (np.zeros(0), np.full(4000, np.nan), np.full(4000, 7.3)):
        assert np.isnan(measure("ppg-peaks", nothing))
        assert np.isnan(measure("mean-saturation", nothing))
    assert named["ppg-level"].views == ("rr",)
    assert not named["ppg-level"].fitted


@pytest.mark.parametrize(
    ("dataset", "channels"),
    [("epilepsy", ("EEG",)), ("ptb-xl", LEADS), ("synthetic", ("C3", "C4"))],
)
def test_measures_have_as_many_numbers_without_a_wave(
    dataset: str, channels: tuple[str, ...]
) -> None:
    """A window may have no wave that could be measured."""
    draw = np.random.default_rng(0)
    baseline = datasets[dataset].facts.baselines[0]
    assert baseline.fitted
    sizes = {
        len(baseline.measure(NativeWindow(window, dict.fromkeys(channels, 100.0))))
        for window in (
            {channel: np.full(1000, 3.0) for channel in channels},
            {channel: draw.standard_normal(1000) for channel in channels},
        )
    }
    assert len(sizes) == 1
