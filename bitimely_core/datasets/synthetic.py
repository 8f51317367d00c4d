"""A synthetic cohort of nights in the form of Sleep-EDF, for demonstrations and tests, without data
of persons.

Every night is written as a real pair of EDF+ files and read back by the reader of Sleep-EDF. Stages
follow a Markov chain; each stage has its own band powers; subjects differ in gain, alpha peak and
1/f slope, epochs jitter; known waveforms are planted at recorded positions. Stages can be learned,
and not trivially: logistic regression on the log band powers of Fpz-Cz classifies about three of
four epochs of new subjects correctly.

Legend: E epochs of a night, T samples of a 100-Hz channel (3000 an epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bitimely_core.datasets.sleep_edf import EPOCH, NATIVE_RATES, RATE, RULES, VIEWS, read_recording
from bitimely_core.errors import Finding, Reason, check_choice, safe_text, usage_error
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.formats.source import Source
from bitimely_core.registry import DatasetBaseline, DatasetFacts, datasets
from bitimely_core.system_errors import describe_os_error
from bitimely_core.types import (
    Annotation,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    NativeWindow,
    Record,
)

# Subjects, epochs a night; two nights each. Forty: enough test subjects for an interval. "planted"
# is "small" in which nothing but the planted waveforms distinguishes the stages.
SIZES = {"small": (40, 20), "large": (60, 240), "night": (1, 240), "planted": (40, 20)}
NIGHTS = 2
PER_EPOCH = int(RATE * EPOCH)
MARK = "shapelet "  # begins the annotations that say where a waveform was planted

W, N1, N2, N3, REM = range(5)
# rows: from; stages change faster than in life, so that a short night has them all
CHAIN = np.array(
    [
        [0.78, 0.20, 0.02, 0.00, 0.00],
        [0.08, 0.58, 0.30, 0.00, 0.04],
        [0.02, 0.05, 0.75, 0.12, 0.06],
        [0.03, 0.01, 0.14, 0.82, 0.00],
        [0.06, 0.06, 0.03, 0.00, 0.85],
    ]
)
# Hz
BANDS = {
    "delta": (0.5, 4.0),
    "theta": (4.0, 8.0),
    "alpha": (8.0, 12.0),
    "sigma": (12.0, 15.0),
    "beta": (15.0, 30.0),
}
MICROVOLTS = np.array(  # rms at Fpz-Cz; rows: stage, columns: band
    [
        [8.0, 5.5, 9.0, 3.0, 5.0],
        [11.0, 8.0, 5.0, 3.0, 4.0],
        [17.0, 8.0, 4.2, 4.2, 3.2],
        [32.0, 8.5, 4.0, 3.6, 2.6],
        [11.0, 7.6, 4.6, 2.7, 3.8],
    ]
)
POSTERIOR = np.array([0.8, 0.9, 1.6, 0.9, 0.9])  # Pz-Oz over Fpz-Cz, by band
EPOCH_SPREAD = 0.2  # of the log amplitude of a band from epoch to epoch
SUBJECT_SPREAD = 0.15  # of the log amplitude of a band from subject to subject
ROLLING = np.array([12.0, 35.0, 6.0, 6.0, 10.0])  # uV of slow eye movements by stage
RAPID = np.array([30.0, 8.0, 5.0, 5.0, 40.0])  # uV of fast eye movements by stage
CHIN = np.array([2.4, 1.8, 1.5, 1.4, 0.7])  # uV of the EMG envelope by stage

# waveform -> mean number an epoch by stage, (shortest, longest) s, (smallest, largest) peak in uV
# at Fpz-Cz
PLANTED = {
    "k-complex": ((0.0, 0.0, 0.7, 0.2, 0.0), (0.8, 1.2), (70.0, 120.0)),
    "spindle": ((0.0, 0.0, 1.2, 0.3, 0.0), (0.7, 1.5), (18.0, 35.0)),
    "vertex-wave": ((0.0, 0.8, 0.1, 0.0, 0.0), (0.2, 0.4), (40.0, 80.0)),
    "sawtooth": ((0.0, 0.0, 0.0, 0.0, 0.7), (1.5, 2.5), (20.0, 35.0)),
    "blink": ((1.5, 0.3, 0.0, 0.0, 0.0), (0.3, 0.5), (40.0, 80.0)),
}
# of "planted": share of the amplitude of N1 that is the background of every stage, and times as
# many waveforms
QUIET, OFTEN = 0.35, 2.0
SLOT = 3.0  # s; each planted waveform has a slot to itself, so none overlap

CHANNELS = (  # ranges as in the official files
    edf_header.EdfChannel("EEG Fpz-Cz", "uV", -250.0, 250.0, -2048, 2047, PER_EPOCH),
    edf_header.EdfChannel("EEG Pz-Oz", "uV", -250.0, 250.0, -2048, 2047, PER_EPOCH),
    edf_header.EdfChannel("EOG horizontal", "uV", -1009.0, 1009.0, -2048, 2047, PER_EPOCH),
    edf_header.EdfChannel("Resp oro-nasal", "", -2048.0, 2047.0, -2048, 2047, int(EPOCH)),
    edf_header.EdfChannel("EMG submental", "uV", -5.0, 5.0, -2500, 2500, int(EPOCH)),
    edf_header.EdfChannel("Temp rectal", "DegC", 34.0, 40.0, -2849, 2731, int(EPOCH)),
    edf_header.EdfChannel("Event marker", "", -2047.0, 2048.0, -2047, 2048, int(EPOCH)),
)
SCORES = ("Sleep stage W", "Sleep stage 1", "Sleep stage 2", "Sleep stage 3", "Sleep stage R")


@dataclass(frozen=True, kw_only=True)
class SyntheticNight:
    """One synthetic night. `stages` int [E], `values` physical values of each of `CHANNELS`,
    `planted` positions of waveforms.
    """

    stages: np.ndarray
    values: list[np.ndarray]
    planted: list[Annotation]


def measure_band_powers(window: NativeWindow) -> np.ndarray:
    """Logarithms of the power of a window in the five bands of the EEG, summed over its channels,
    [channels x bands].
    """
    powers = []
    for channel, samples in window.samples.items():
        frequency = np.fft.rfftfreq(max(len(samples), 2), 1 / (window.rates[channel] or 1.0))
        power = np.abs(np.fft.rfft(samples - samples.mean() if len(samples) else np.zeros(2))) ** 2
        bands = [(frequency >= low) & (frequency < high) for low, high in BANDS.values()]
        powers += [np.log(power[band].sum() + 1e-9) for band in bands]
    return np.array(powers)


@datasets(
    DatasetFacts(
        title="Synthetic cohort in the form of Sleep-EDF, with waveforms planted at known positions",
        views=VIEWS,
        licence="CC0 1.0",
        url="",
        download="nothing to download: it is made from its seed",
        layout="none: no SOURCE is given",
        paper={},
        rules={
            **RULES,
            "planted": (
                f"annotations that begin with '{MARK}' say where a waveform was planted; they "
                "are no labels"
            ),
        },
        native_rates=NATIVE_RATES,
        options={"size": "small", "seed": 0},
        needs_source=False,
        baselines=(
            DatasetBaseline(
                name="band-powers",
                about=(
                    "logistic regression on the logarithms of the power in the delta, theta, "
                    "alpha, sigma and beta bands of the recording"
                ),
                measure=measure_band_powers,
                fitted=True,
                views=("staging",),
            ),
        ),
    )
)
def synthetic(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """Synthetic nights of 40 (small: ten minutes each) or 60 (large: two hours) subjects, the same
    for the same seed.

    planted: as small, but all stages have one quiet background, so that the planted waveforms alone
    distinguish them.
    """
    if source is not None:
        raise usage_error(
            "takes no folder", "its data are generated", "Leave SOURCE away", code=Reason.NO_INPUT
        )
    size, seed = check_options(options.get("size", "small"), options.get("seed", 0))
    for subject in range(SIZES[size][0]):
        for night in range(1, NIGHTS + 1):
            read = partial(
                read_night, size, seed, subject, night, keep_dates=bool(options.get("keep_dates"))
            )
            yield IngestUnit(name=f"SYN{subject:02d}{night}", files=(), read=read)


def check_options(size: object, seed: object) -> tuple[str, int]:
    """The options, checked. Raises UserError: unknown_name or config."""
    check_choice("size of the synthetic cohort", str(size), SIZES)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise usage_error(f"the seed is {safe_text(seed)}", "expected an integer from 0 on")
    return str(size), seed


def read_night(
    size: str, seed: int, subject: int, night: int, *, keep_dates: bool = False
) -> Record:
    """Make one night, write it as EDF+, read it as Sleep-EDF is read."""
    rng = np.random.default_rng([seed, subject, NIGHTS + 1])
    name = f"SYN{subject:02d}{night}"
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}-PSG.edf", Path(folder) / f"{name}-Hypnogram.edf"]
        try:
            for file, data in zip(files, encode_night(size, seed, subject, night), strict=True):
                file.write_bytes(data)
        except OSError as error:
            raise describe_os_error(error, Path(folder)) from None
        attributes: dict[str, AttributeValue] = {
            "night": night,
            "age": int(rng.integers(20, 80)),
            "sex": "FM"[int(rng.integers(2))],
        }
        return read_recording(
            files[0],
            files[1],
            Record(recording_id=name, subject_id=name[:5], signals=[], attributes=attributes),
            names=(files[0].name, files[1].name),
            keep_dates=keep_dates,
            marks=MARK,
        )


def encode_night(size: str, seed: int, subject: int, night: int) -> tuple[bytes, bytes]:
    """One night as two EDF+ files: signals with the planted waveforms as annotations, and the
    hypnogram.
    """
    generated = make_night(SIZES[size][1], seed, subject, night, alike=size == "planted")
    digital = [
        np.clip(
            np.round((values - channel.offset) / channel.scale),
            channel.digital_min,
            channel.digital_max,
        ).astype(np.int16)
        for channel, values in zip(CHANNELS, generated.values, strict=True)
    ]
    start = datetime(2001, 1, 1, 22) + timedelta(days=7 * (night - 1))
    edges = [0, *(np.flatnonzero(np.diff(generated.stages)) + 1).tolist(), len(generated.stages)]
    scores = [
        Annotation(a * EPOCH, (b - a) * EPOCH, SCORES[generated.stages[a]])
        for a, b in pairwise(edges)
    ]
    return edf_writer.encode_edf(
        CHANNELS, digital, duration=EPOCH, notes=generated.planted, start=start
    ), edf_writer.encode_edf((), (), notes=scores, start=start)


# --- one night


def make_night(
    epochs: int, seed: int, subject: int, night: int, *, alike: bool = False
) -> SyntheticNight:
    """Stages, signals and planted waveforms of one night; the same for the same arguments. `alike`:
    one quiet background for all stages.
    """
    subject_rng, rng = (
        np.random.default_rng([seed, subject, 0]),
        np.random.default_rng([seed, subject, night]),
    )
    gain = np.exp(
        SUBJECT_SPREAD * subject_rng.standard_normal(len(BANDS))
        + 0.5 * SUBJECT_SPREAD * subject_rng.standard_normal()
    )
    peak, slope, chin = (
        subject_rng.uniform(8.5, 11.5),
        subject_rng.uniform(1.0, 1.6),
        np.exp(0.3 * subject_rng.standard_normal()),
    )
    spindle_rate, breath = subject_rng.uniform(12.5, 14.5), subject_rng.uniform(0.2, 0.3)
    stages = draw_stages(epochs, rng)
    total = epochs * PER_EPOCH

    jitter = np.exp(EPOCH_SPREAD * rng.standard_normal((epochs, len(BANDS))))
    level = np.full_like(stages, N1) if alike else stages
    amplitude = (QUIET if alike else 1.0) * MICROVOLTS[level] * gain * jitter  # [E, bands]
    frontal, posterior = _make_power_law_noise(total, rng, slope)
    frontal, posterior = 4.0 * frontal, 3.5 * posterior
    for band, (low, high) in enumerate(BANDS.values()):
        shape = (peak, 1.0) if low == 8.0 else None
        front, back = _make_band_noise(total, rng, low, high, shape)
        loud = _make_envelope(amplitude[:, band])
        frontal += loud * front
        # the two derivations share a part
        posterior += loud * POSTERIOR[band] * (0.6 * front + 0.8 * back)
    rolling, rapid = (
        _make_band_noise(total, rng, 0.2, 0.6)[0],
        _make_band_noise(total, rng, 0.7, 3.0)[0],
    )
    eye = np.exp(0.25 * rng.standard_normal((epochs, 2)))
    eyes = (
        _make_envelope(ROLLING[level] * eye[:, 0]) * rolling
        + _make_envelope(RAPID[level] * eye[:, 1]) * rapid
        + 0.3 * frontal
    )

    planted = []
    for name, first, length, size in _draw_positions(stages, rng, OFTEN if alike else 1.0):
        wave = size * make_waveform(name, length, spindle_rate)
        span = slice(first, first + length)
        frontal[span] += wave
        posterior[span] += (0.2 if name == "blink" else 0.6) * wave
        eyes[span] += (4.0 if name == "blink" else 0.3) * wave
        planted.append(Annotation(first / RATE, length / RATE, MARK + name))

    seconds = np.arange(epochs * int(EPOCH))
    per_second = np.repeat(level, int(EPOCH))
    calm = np.where(per_second == W, 0.25, 0.08)
    breathing = 500 * np.sin(
        2 * np.pi * breath * seconds + np.cumsum(calm * rng.standard_normal(len(seconds)))
    )
    muscle = CHIN[per_second] * chin * np.exp(0.25 * rng.standard_normal(len(seconds)))
    warmth = 37.2 - 0.4 * seconds / 28800 + 0.02 * rng.standard_normal(len(seconds))
    # lights off, ten seconds after the start, held for two
    marker = np.where(seconds // 2 == 5, 1000.0, 0.0)
    return SyntheticNight(
        stages=stages,
        values=[frontal, posterior, eyes, breathing, muscle, warmth, marker],
        planted=planted,
    )


def draw_stages(epochs: int, rng: np.random.Generator) -> np.ndarray:
    """Stages from the Markov chain, int [E], drawn again until each stage occurs twice; starts
    awake.
    """
    steps = np.cumsum(CHAIN, axis=1)
    while True:
        draws = rng.random(epochs)
        stages = np.empty(epochs, int)
        stage = W
        for i, draw in enumerate(draws):
            stages[i] = stage
            stage = min(int(np.searchsorted(steps[stage], draw, side="right")), REM)
        if np.bincount(stages, minlength=5).min() >= 2:
            return stages


def _make_band_noise(
    total: int,
    rng: np.random.Generator,
    low: float,
    high: float,
    peak: tuple[float, float] | None = None,
) -> np.ndarray:
    """Two independent noises [2, T] of unit variance between `low` and `high` Hz, or around a peak
    (centre, width).
    """
    rate = np.fft.rfftfreq(total, 1 / RATE)
    first, last = np.searchsorted(rate, [low, high])
    weight = (
        np.ones(last - first)
        if peak is None
        else np.exp(-0.5 * ((rate[first:last] - peak[0]) / peak[1]) ** 2)
    )
    return _make_noise(total, rng, first, weight)


def _make_power_law_noise(total: int, rng: np.random.Generator, slope: float) -> np.ndarray:
    """Two independent noises [2, T] of unit variance with power ~ 1/f^slope from 0.5 Hz on."""
    rate = np.fft.rfftfreq(total, 1 / RATE)
    first = int(np.searchsorted(rate, 0.5))
    return _make_noise(total, rng, first, rate[first:-1] ** (-slope / 2))


def _make_noise(total: int, rng: np.random.Generator, first: int, weight: np.ndarray) -> np.ndarray:
    """Gaussian noise [2, T] of unit variance with the given amplitudes from frequency bin `first`
    on.
    """
    spectrum = np.zeros((2, total // 2 + 1), complex)
    parts = rng.standard_normal((2, 2, len(weight)))
    spectrum[:, first : first + len(weight)] = weight * (parts[0] + 1j * parts[1])
    return np.fft.irfft(spectrum, total) * (total / (2 * np.sqrt(np.sum(weight**2))))


def _make_envelope(levels: np.ndarray) -> np.ndarray:
    """Amplitude [T] from one level an epoch [E], with a transition of two seconds between
    epochs.
    """
    steps = np.repeat(levels, PER_EPOCH)
    width = int(2 * RATE)
    padded = np.concatenate(
        [np.full(width // 2, levels[0]), steps, np.full(width - width // 2, levels[-1])]
    )
    sums = np.cumsum(padded)
    return (sums[width:] - sums[:-width]) / width


def _draw_positions(
    stages: np.ndarray, rng: np.random.Generator, often: float
) -> list[tuple[str, int, int, float]]:
    """(waveform, first sample, samples, peak in uV) of everything that is planted, in order of
    time.
    """
    places = []
    slots = int(EPOCH / SLOT)
    for epoch, stage in enumerate(stages):
        names = [
            name
            for name, (rates, _, _) in PLANTED.items()
            for _ in range(rng.poisson(often * rates[stage]))
        ]
        for slot, name in zip(np.sort(rng.permutation(slots)[: len(names)]), names, strict=False):
            _, (shortest, longest), (smallest, largest) = PLANTED[name]
            length = round(rng.uniform(shortest, longest) * RATE)
            room = 1 - length / RATE / SLOT  # share of the slot
            first = epoch * PER_EPOCH + int((slot + rng.random() * room) * SLOT * RATE)
            places.append((name, first, length, float(rng.uniform(smallest, largest))))
    return places


def make_waveform(name: str, length: int, rate: float = 13.5) -> np.ndarray:
    """A planted waveform [length] with a largest value of about 1; `rate` is the frequency of the
    spindles in Hz.
    """
    return WAVEFORMS[name](np.linspace(0.0, 1.0, length), np.arange(length) / RATE, rate)


def _make_bump(x: np.ndarray, centre: float, width: float) -> np.ndarray:
    return np.asarray(np.exp(-0.5 * ((x - centre) / width) ** 2))


# name -> its values, by the share of its length, its seconds and the frequency of spindles
WAVEFORMS: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "spindle": lambda x, seconds, rate: np.sin(np.pi * x) ** 2 * np.sin(2 * np.pi * rate * seconds),
    "sawtooth": lambda x, seconds, _: np.sin(np.pi * x) * (2 * ((3.0 * seconds) % 1.0) - 1),
    # a sharp negative wave, then a slower positive one
    "k-complex": lambda x, *_: -_make_bump(x, 0.3, 0.07) + 0.7 * _make_bump(x, 0.6, 0.13),
    "vertex-wave": lambda x, *_: 0.4 * _make_bump(x, 0.3, 0.08) - _make_bump(x, 0.5, 0.08),
    "blink": lambda x, *_: np.sin(np.pi * x) ** 2,
}
