"""Power of a channel in the epochs of a night."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import signal

from bitimely_core.page import Spectrogram

SEGMENT = 4.0  # seconds; a quarter of a hertz from one frequency to the next
HIGHEST = 30.0  # Hz, that sleep is scored by


def compute_spectrogram(
    channel: str,
    samples: npt.NDArray[np.float64],
    rate: float,
    onsets: npt.NDArray[np.float64],
    epoch: float,
) -> Spectrogram | None:
    """Power [E, F] in dB of the epochs that begin at `onsets` [E] seconds, by the median over
    segments of four seconds with a Hann window that overlap by half (Welch 1967).

    None for a channel too slow for rhythms of sleep, or shorter than a segment. Epochs that are not
    wholly in the recording, and flat ones, are NaN.
    """
    size, length = round(SEGMENT * rate), round(epoch * rate)
    if rate < 2 * 10 or size > length:
        return None
    frequencies = np.fft.rfftfreq(size, 1 / rate)
    keep = (frequencies >= 0.5) & (frequencies <= HIGHEST)
    power = np.full((len(onsets), int(keep.sum())), np.nan)
    starts = np.rint(onsets * rate).astype(int)
    for row, start in enumerate(starts):
        block = samples[max(start, 0) : start + length]
        if start < 0 or len(block) < length or not np.isfinite(block).all() or not np.ptp(block):
            continue
        _, density = signal.welch(block, rate, nperseg=size, average="median")
        power[row] = 10 * np.log10(np.maximum(density[keep], 1e-12))
    return Spectrogram(channel, frequencies[keep], power)
