"""Signal processing without training: heart, pulse and breathing rates, band powers of the EEG,
widths and intervals of the ECG, as baselines of data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bitimely_core.types import NativeWindow

Array = npt.NDArray[np.float64]

BEATS = (0.5, 3.7)  # Hz: 30 to 220 a minute
STEPS = (0.67, 3.33)  # Hz: 40 to 200 a minute, of runners
BREATHS = (0.1, 0.5)  # Hz: 6 to 30 a minute
# Hz
BANDS = {
    "delta": (0.5, 4.0),
    "theta": (4.0, 8.0),
    "alpha": (8.0, 13.0),
    "beta": (13.0, 30.0),
    "gamma": (30.0, 60.0),
}
LENGTH = 1 << 15  # of a padded spectrum at least


def fill_gaps(x: npt.ArrayLike) -> Array:
    """The samples less the first, float64 [n], with lines over missing ones: zeros, without a
    rounding error, where all are equal or missing.
    """
    y = np.array(x, np.float64)
    places = np.flatnonzero(np.isfinite(y))
    if not len(places):
        return np.zeros(len(y))
    return np.interp(np.arange(len(y)), places, y[places] - y[places[0]])


def filter_band(x: Array, rate: float, low: float, high: float) -> Array:
    """Band-pass without phase shift (Butterworth, second order both ways); unchanged where there
    are too few samples.
    """
    from scipy.signal import butter, sosfiltfilt

    if len(x) < 30:
        return x - x.mean()
    sections = butter(2, (low, min(high, 0.45 * rate)), "bandpass", fs=rate, output="sos")
    return np.asarray(sosfiltfilt(sections, x))


def find_beats(x: Array, rate: float) -> npt.NDArray[np.int64]:
    """Places of the maxima that stand out: at least 60 / 220 s apart, by two fifths of the height
    of the strong ones.
    """
    from scipy.signal import find_peaks

    height = np.percentile(x, 98) - np.median(x)
    if not height > 0:
        return np.zeros(0, np.int64)
    distance = max(1, int(rate / BEATS[1]))
    places, _ = find_peaks(x, distance=distance, prominence=0.4 * height)
    return np.asarray(places)


def _compute_rate(beats: npt.NDArray[np.int64], rate: float) -> float:
    """A minute, from the median interval; NaN of fewer than three beats."""
    return 60 * rate / float(np.median(np.diff(beats))) if len(beats) > 2 else float("nan")


def measure_pulse_rate(ppg: npt.ArrayLike, rate: float) -> float:
    """Beats a minute from the peaks of a PPG [n] at `rate` Hz, band-passed from 0.5 to 8 Hz
    (Elgendi et al. 2013); NaN without peaks.
    """
    return _compute_rate(find_beats(filter_band(fill_gaps(ppg), rate, 0.5, 8.0), rate), rate)


def measure_heart_rate(ecg: npt.ArrayLike, rate: float) -> float:
    """Beats a minute from the R peaks of an ECG [n] at `rate` Hz: energy of the slopes from 5 to 15
    Hz (Pan and Tompkins 1985).
    """
    return _compute_rate(find_heartbeats(fill_gaps(ecg)[:, None], rate), rate)


def find_heartbeats(x: Array, rate: float) -> npt.NDArray[np.int64]:
    """Places of the QRS complexes of leads [n, V]: maxima of the energy of the slopes from 5 to 15
    Hz, all leads together.
    """
    slope = np.sum([np.gradient(filter_band(lead, rate, 5.0, 15.0)) ** 2 for lead in x.T], 0)
    width = max(1, round(0.15 * rate))
    return find_beats(np.sqrt(np.convolve(slope, np.ones(width) / width, "same")), rate)


def compute_spectrum(x: Array, rate: float, band: tuple[float, float]) -> tuple[Array, Array]:
    """Frequencies in `band` and the amplitude spectrum there, Hann-windowed and padded, with a
    maximum of 1.
    """
    size = max(LENGTH, len(x))
    frequency: Array = np.fft.rfftfreq(size, 1 / rate).astype(np.float64)
    inside = (frequency >= band[0]) & (frequency <= band[1])
    amplitude = np.abs(np.fft.rfft((x - x.mean()) * np.hanning(len(x)), size))[inside]
    return frequency[inside], amplitude / max(float(amplitude.max()), 1e-12)


def measure_motion_free_rate(
    ppg: Sequence[npt.ArrayLike], acceleration: Sequence[npt.ArrayLike], rate: float
) -> float:
    """Beats a minute of PPGs in motion: the strongest frequency of their mean power less the
    largest of the acceleration's axes; NaN of flat PPGs.

    Subtraction of spectra as in JOSS (Zhang 2015), each window by itself, without tracking.
    """
    frequency, pulse = _compute_powers(ppg, rate)
    _, motion = _compute_powers(acceleration, rate)
    power = pulse.mean(0)
    if not power.any():
        return float("nan")
    return 60 * float(frequency[np.argmax(power / power.max() - motion.max(0))])


def _compute_powers(signals: Sequence[npt.ArrayLike], rate: float) -> tuple[Array, Array]:
    """Frequencies of running and the power of each signal there, [signals, frequencies]."""
    filtered = [filter_band(fill_gaps(x), rate, *BEATS) for x in signals]
    spectra = [compute_spectrum(x, rate, STEPS) for x in filtered]
    return spectra[0][0], np.stack([amplitude**2 for _, amplitude in spectra])


def measure_breathing_rate(ppg: npt.ArrayLike, rate: float) -> float:
    """Breaths a minute from a PPG [n] at `rate` Hz: the strongest frequency of its level, which
    follows the breath (Karlen et al. 2013); NaN if flat.
    """
    level = filter_band(fill_gaps(ppg), rate, *BREATHS)
    frequency, amplitude = compute_spectrum(level, rate, BREATHS)
    return 60 * float(frequency[np.argmax(amplitude)]) if amplitude.any() else float("nan")


def measure_eeg(x: npt.ArrayLike, rate: float) -> Array:
    """Features of an EEG [n] at `rate` Hz: logarithms of the power in five bands, of the standard
    deviation and of the line length.

    Line length (Esteller et al. 2001) is the mean step between neighbours.
    """
    y = fill_gaps(x)
    frequency = np.fft.rfftfreq(len(y), 1 / rate)
    power = np.abs(np.fft.rfft((y - y.mean()) * np.hanning(len(y)))) ** 2 / len(y)
    powers = [power[(frequency >= low) & (frequency < high)].sum() for low, high in BANDS.values()]
    return np.log(np.array([*powers, y.std(), np.abs(np.diff(y)).mean()]) + 1e-6)


def measure_ecg(leads: Sequence[npt.ArrayLike], rate: float) -> Array:
    """Intervals, widths and amplitudes of an ECG, V leads [n] in mV at `rate` Hz: [6 + 5 V],
    seconds and mV, NaN without beats.

    Of all leads the median RR interval, SDNN and RMSSD (Task Force 1996), and of the median beat
    the width of the QRS, the PR interval to the top of the P wave and QT to the end of the T wave
    by the tangent (Lepeschkin and Surawicz 1952); of each lead the heights of P, R, S, the ST
    segment 60 ms after the QRS, and T, above the level before the QRS. At 500 Hz or more.
    """
    from scipy.signal import resample_poly

    fine = max(1, int(np.ceil(500 / rate)))
    filtered = [filter_band(fill_gaps(lead), rate, 0.5, 40.0) for lead in leads]
    x = np.stack([resample_poly(lead, fine, 1) for lead in filtered], 1)
    rate *= fine
    size, reach = np.sqrt((x**2).sum(1)), round(0.1 * rate)
    beats = np.array(
        [_find_top(size, place, reach) for place in find_heartbeats(x, rate)], np.int64
    )
    before, after = round(0.35 * rate), round(0.6 * rate)
    inside = beats[(beats >= before) & (beats + after <= len(x))]
    if len(beats) < 3 or not len(inside):
        return np.full(6 + 5 * x.shape[1], np.nan)
    rr = np.diff(beats) / rate
    # of the beats, sample by sample
    beat = np.median([x[place - before : place + after] for place in inside], 0)
    slope = np.sqrt((np.gradient(beat, axis=0) ** 2).sum(1))
    near = slice(before - reach, before + reach)
    steep = np.flatnonzero(slope[near] > 0.15 * slope[near].max()) + near.start
    on, off = int(steep[0]), int(steep[-1])
    beat = beat - beat[max(on - round(0.04 * rate), 0) : on + 1].mean(0)
    # samples from beat to beat: at high rates the waves of the beats before and after are within
    # reach
    cycle = float(np.median(rr)) * rate
    early, late = max(on - round(0.04 * rate), 1), min(on + round(0.7 * cycle), len(beat))
    p = slice(min(max(before - round(0.5 * cycle), 0), early - 1), early)
    st = off + round(0.06 * rate)
    t = slice(st, max(min(off + round(0.4 * rate), late), st + 1))
    shape = np.sqrt((beat**2).sum(1))
    tops = p.start + int(shape[p].argmax()), t.start + int(shape[t].argmax())
    fall = np.gradient(shape)[tops[1] : max(late, tops[1] + 1)]
    steepest = int(fall.argmin())
    # samples from the steepest point to the level
    down = shape[tops[1] + steepest] / max(-float(fall[steepest]), 1e-9)
    end = min(tops[1] + steepest + down, float(late))
    intervals = [
        np.median(rr),
        rr.std(),
        np.sqrt((np.diff(rr) ** 2).mean()),
        (off - on) / rate,
        (on - tops[0]) / rate,
        (end - on) / rate,
    ]
    return np.concatenate(
        [
            intervals,
            beat[tops[0]],
            beat[on : off + 1].max(0),
            beat[on : off + 1].min(0),
            beat[st],
            beat[tops[1]],
        ]
    )


def _find_top(size: Array, place: int, reach: int) -> int:
    """Place of the largest value within `reach`."""
    first = max(place - reach, 0)
    return first + int(size[first : place + reach].argmax())


# --- measures of data sets


def measure_channels(
    window: NativeWindow, channels: Sequence[str], measure: Callable[..., float]
) -> float:
    """`measure(samples of each channel..., rate)`; NaN where a channel is short."""
    samples = [window.samples[channel] for channel in channels]
    if min(map(len, samples)) < 30:
        return float("nan")
    return measure(*samples, window.rates[channels[0]])


def measure_nothing(window: NativeWindow) -> float:
    """NaN: the prediction is the mean of the training labels."""
    return float("nan")


def measure_window_eeg(window: NativeWindow, channel: str) -> Array:
    """`measure_eeg` of one channel."""
    return measure_eeg(window.samples[channel], window.rates[channel])


def measure_window_ecg(window: NativeWindow, leads: Sequence[str]) -> Array:
    """`measure_ecg` of the leads."""
    return measure_ecg([window.samples[lead] for lead in leads], window.rates[leads[0]])
