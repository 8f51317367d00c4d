"""Signal processing without training: heart, pulse and breathing rates, and band powers of the EEG, as baselines of data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bitimely_core.types import BaselineInput, NativeWindow

Array = npt.NDArray[np.float64]

BEATS = (0.5, 3.7)  # Hz: 30 to 220 a minute
STEPS = (0.67, 3.33)  # Hz: 40 to 200 a minute, of runners
BREATHS = (0.1, 0.5)  # Hz: 6 to 30 a minute
BANDS = {"delta": (0.5, 4.0), "theta": (4.0, 8.0), "alpha": (8.0, 13.0), "beta": (13.0, 30.0), "gamma": (30.0, 60.0)}  # Hz
LENGTH = 1 << 15  # of a padded spectrum at least


def fill_gaps(x: npt.ArrayLike) -> Array:
    """The samples, float64 [n], with lines over missing ones; zeros where all are missing."""
    y = np.array(x, np.float64)
    known = np.isfinite(y)
    if not known.any():
        return np.zeros(len(y))
    return y if known.all() else np.interp(np.arange(len(y)), np.flatnonzero(known), y[known])


def filter_band(x: Array, rate: float, low: float, high: float) -> Array:
    """Band-pass without phase shift (Butterworth, second order both ways); unchanged where there are too few samples."""
    from scipy.signal import butter, sosfiltfilt

    if len(x) < 30:
        return x - x.mean()
    filtered: Array = sosfiltfilt(butter(2, (low, min(high, 0.45 * rate)), "bandpass", fs=rate, output="sos"), x)
    return filtered


def find_beats(x: Array, rate: float) -> npt.NDArray[np.int64]:
    """Places of the maxima that stand out: at least 60 / 220 s apart, by two fifths of the height of the strong ones."""
    from scipy.signal import find_peaks

    height = np.percentile(x, 98) - np.median(x)
    if not height > 0:
        return np.zeros(0, np.int64)
    found: npt.NDArray[np.int64] = find_peaks(x, distance=max(1, int(rate / BEATS[1])), prominence=0.4 * height)[0]
    return found


def _rate_of(beats: npt.NDArray[np.int64], rate: float) -> float:
    """A minute, from the median interval; NaN of fewer than three beats."""
    return 60 * rate / float(np.median(np.diff(beats))) if len(beats) > 2 else float("nan")


def measure_pulse_rate(ppg: npt.ArrayLike, rate: float) -> float:
    """Beats a minute from the peaks of a PPG [n] at `rate` Hz, band-passed from 0.5 to 8 Hz (Elgendi et al. 2013); NaN without peaks."""
    return _rate_of(find_beats(filter_band(fill_gaps(ppg), rate, 0.5, 8.0), rate), rate)


def measure_heart_rate(ecg: npt.ArrayLike, rate: float) -> float:
    """Beats a minute from the R peaks of an ECG [n] at `rate` Hz: energy of the slopes from 5 to 15 Hz (Pan and Tompkins 1985)."""
    slope = np.gradient(filter_band(fill_gaps(ecg), rate, 5.0, 15.0)) ** 2
    width = max(1, round(0.15 * rate))
    energy = np.sqrt(np.convolve(slope, np.ones(width) / width, "same"))
    return _rate_of(find_beats(energy, rate), rate)


def compute_spectrum(x: Array, rate: float, band: tuple[float, float]) -> tuple[Array, Array]:
    """Frequencies in `band` and the amplitude spectrum there, Hann-windowed and padded, with a maximum of 1."""
    size = max(LENGTH, len(x))
    frequency: Array = np.fft.rfftfreq(size, 1 / rate).astype(np.float64)
    inside = (frequency >= band[0]) & (frequency <= band[1])
    amplitude = np.abs(np.fft.rfft((x - x.mean()) * np.hanning(len(x)), size))[inside]
    return frequency[inside], amplitude / max(float(amplitude.max()), 1e-12)


def measure_motion_free_rate(ppg: Sequence[npt.ArrayLike], acceleration: Sequence[npt.ArrayLike], rate: float) -> float:
    """Beats a minute of PPGs in motion: the strongest frequency of their mean power less the largest of the acceleration's axes.

    Subtraction of spectra as in JOSS (Zhang 2015), each window by itself, without tracking.
    """
    spectra = [[compute_spectrum(filter_band(fill_gaps(x), rate, *BEATS), rate, STEPS) for x in group] for group in (ppg, acceleration)]
    pulse = np.mean([amplitude**2 for _, amplitude in spectra[0]], axis=0)
    motion = np.max([amplitude**2 for _, amplitude in spectra[1]], axis=0)
    return 60 * float(spectra[0][0][0][np.argmax(pulse / max(float(pulse.max()), 1e-12) - motion)])


def measure_breathing_rate(ppg: npt.ArrayLike, rate: float) -> float:
    """Breaths a minute from a PPG [n] at `rate` Hz: the strongest frequency of its level, which follows the breath (Karlen et al. 2013)."""
    level = filter_band(fill_gaps(ppg), rate, *BREATHS)
    frequency, amplitude = compute_spectrum(level, rate, BREATHS)
    return 60 * float(frequency[np.argmax(amplitude)])


def measure_eeg(x: npt.ArrayLike, rate: float) -> Array:
    """Features of an EEG [n] at `rate` Hz: logarithms of the power in five bands, of the standard deviation and of the line length.

    Line length (Esteller et al. 2001) is the mean step between neighbours.
    """
    y = fill_gaps(x)
    frequency = np.fft.rfftfreq(len(y), 1 / rate)
    power = np.abs(np.fft.rfft((y - y.mean()) * np.hanning(len(y)))) ** 2 / len(y)
    powers = [power[(frequency >= low) & (frequency < high)].sum() for low, high in BANDS.values()]
    return np.log(np.array([*powers, y.std(), np.abs(np.diff(y)).mean()]) + 1e-6)


# --- baselines of data sets


def predict_rates(given: BaselineInput, channels: Sequence[str], measure: Callable[..., float]) -> Array:
    """`measure(samples of each channel..., rate)` of every scored window, [n]; the mean of the training labels where there is no rate."""

    def measure_window(window: NativeWindow) -> float:
        samples = [window.samples[channel] for channel in channels]
        if any(len(x) < 30 or not np.isfinite(x).any() for x in samples):
            return float("nan")
        return measure(*samples, window.rates[channels[0]])

    found = np.array(given.test.map_native(channels, measure_window), np.float64)
    assert given.train.targets is not None
    return np.where(np.isfinite(found), found, np.nanmean(given.train.targets))


def predict_from_eeg(given: BaselineInput, channel: str) -> Array:
    """Logistic regression on `measure_eeg` of one channel."""
    parts = {"train": given.train, "validation": given.validation, "test": given.test}

    def measure_window(window: NativeWindow) -> Array:
        return measure_eeg(window.samples[channel], window.rates[channel])

    return given.fit_linear({name: np.array(part.map_native((channel,), measure_window)) for name, part in parts.items()})
