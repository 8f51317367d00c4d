"""Rates by signal processing on signals whose rates are known, and beside the scores of a run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bitimely_core.datasets import physiology
from bitimely_core.datasets.ptb_xl import LEADS
from bitimely_core.methods.linear import fit_windows
from bitimely_core.registry import datasets
from bitimely_core.types import BaselineInput, BaselineSplit, NativeWindow

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


def test_registered_baselines_predict_every_window() -> None:
    ppg = [make_ppg(beats, 15) for beats in (60, 90, 120)]

    def make_split(targets: np.ndarray | None, windows: list[np.ndarray]) -> BaselineSplit:
        def map_native(channels, function):
            return [
                function(NativeWindow(dict.fromkeys(channels, x), dict.fromkeys(channels, RATE)))
                for x in windows
            ]

        return BaselineSplit(
            n=len(windows), targets=targets, read=lambda: iter(()), map_native=map_native
        )

    given = BaselineInput(
        task="regression", class_names=(), channels=("PPG", "ECG"), rate=RATE, seconds=32.0, seed=0,
        train=make_split(np.array([70.0, 90.0]), []), validation=make_split(np.array([80.0]), []),
        test=make_split(None, [*ppg, np.zeros(0), np.full(4000, np.nan), np.full(4000, 7.3)]), fit_linear=lambda parts: np.zeros(0),
    )  # fmt: skip
    named = {one.name: one for one in datasets["bidmc"].facts.baselines}
    np.testing.assert_allclose(
        named["ppg-peaks"].predict(given), [60, 90, 120, 80, 80, 80], atol=1.5
    )
    np.testing.assert_allclose(named["ppg-level"].predict(given), [15, 15, 15, 80, 80, 80], atol=1)
    assert named["ppg-level"].views == ("rr",)
    np.testing.assert_allclose(named["mean-saturation"].predict(given), [80] * 6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("dataset", "channels"),
    [("epilepsy", ("EEG",)), ("ptb-xl", LEADS), ("synthetic", ("C3", "C4"))],
)
def test_baselines_on_features_do_without_validation_windows_and_without_beats(
    dataset: str, channels: tuple[str, ...], flat: bool
) -> None:
    """A part of a data set may have no validation subject, and its training windows no wave that
    could be measured.
    """
    draw = np.random.default_rng(0)

    def make_split(targets: np.ndarray | None, count: int) -> BaselineSplit:
        windows = [
            {
                channel: np.full(1000, 3.0) if flat else draw.standard_normal(1000)
                for channel in channels
            }
            for _ in range(count)
        ]

        def map_native(names, function):
            return [
                function(NativeWindow(window, dict.fromkeys(names, 100.0))) for window in windows
            ]

        return BaselineSplit(n=count, targets=targets, read=lambda: iter(()), map_native=map_native)

    labels = {"train": np.array([0, 1, 0, 1, 0, 0]), "validation": np.zeros(0, np.int64)}
    view = SimpleNamespace(task="classification", classes=2)
    given = BaselineInput(
        task="classification", class_names=("a", "b"), channels=channels, rate=100.0, seconds=10.0, seed=0,
        train=make_split(labels["train"], 6), validation=make_split(labels["validation"], 0), test=make_split(None, 3),
        fit_linear=lambda x: fit_windows(view, x, labels).prediction,  # type: ignore[arg-type]
    )  # fmt: skip
    found = datasets[dataset].facts.baselines[0].predict(given)
    np.testing.assert_allclose(found.sum(1), [1, 1, 1])
    if flat:  # nothing is known but how often each class occurs
        np.testing.assert_allclose(found, [[2 / 3, 1 / 3]] * 3, atol=1e-3)
