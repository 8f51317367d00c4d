"""Quality figures of channels, for reports and filters; data are never changed by them.

Channels of equal shape are measured together: for short recordings the calls take the time, not the
samples.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.types import Record, Signal

SHARES = ("missing", "flat", "clipped", "out_of_range", "line_noise")
FIGURES = (*SHARES, "flat_longest", "line_frequency", "min", "max", "median", "iqr")
QUARTILE_SAMPLES = 1 << 16  # fewest samples for median and interquartile range
COUNTING_LENGTH = 1 << 14  # samples from which on values are counted, not sorted
# samples of all channels that are measured together: they fit into the processor's cache
GROUP_SAMPLES = 1 << 17
STRETCH_SAMPLES, STRETCH_SECONDS = 128, 1.0  # a constant stretch is at least as long as both
STRETCH_STEP = 32  # samples; a coarse look passes over all but some of them
# share of samples that equal the one before, in channels where a constant stretch means something
REPEATS = 0.05
BLOCK_LENGTH, BLOCK_VALUES = 64, 16  # of a repeated block, at least; different values in it
ANCHOR_VALUES = 1 << 18  # values that are looked at together: they stay in the processor's cache
BINARY = (".edf", ".bdf", ".dat")  # files whose samples are numbers of two or three bytes
REPEATED, COMPARE = (
    "a part of the file may have been copied over another",
    "Compare it with its source",
)
HASH = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits without a pattern
CHOSEN = np.uint64(1 << 58)  # of products with HASH one in 64 is below it
MAINS = (50.0, 60.0)  # Hz
NEAR = 1.0  # Hz on either side of them
DRIFT = 0.5  # Hz; the power below it is not counted
SPECTRUM_SECONDS = 4.0  # seconds of a spectrum: the peak of a sine is then 1 Hz wide
SPECTRA = 8  # spectra a channel at most, spread over the recording
MAX_SPECTRUM = 1 << 18  # samples of a spectrum at most

Figures = dict[str, float | None]


def measure_quality(signals: Sequence[Signal]) -> list[Figures]:
    """Cheap robust figures of channels, in their order.

    A figure is None where the source does not say or nothing was measured. Shares of the samples:
    `missing` (NaN), `flat` (in stretches of a second, or 16 samples, without any change), `clipped`
    (at the lowest or highest value of the converter, or of the channel where the source does not
    say), `out_of_range` (beyond it). Share of the power: `line_noise` (see `measure_line_noise`) at
    `line_frequency`. Longest flat stretch in seconds; physical minimum, maximum, median and
    interquartile range, the last two of at most 131,071 samples.
    """
    alike: dict[tuple[str, int, float, bool], list[int]] = defaultdict(list)
    for i, signal in enumerate(signals):
        holes = signal.samples.dtype.kind == "f" and bool(np.isnan(signal.samples).any())
        alike[signal.samples.dtype.str, len(signal.samples), signal.rate, holes].append(i)
    figures: list[Figures] = [{} for _ in signals]
    for (_, n, _, holes), rows in alike.items():
        count = max(1, GROUP_SAMPLES // max(n, 1))
        for first in range(0, len(rows), count):
            group = rows[first : first + count]
            measured = _measure_group([signals[i] for i in group], holes=holes)
            for i, row in zip(group, measured, strict=True):
                figures[i] = row
    return figures


def _measure_group(signals: Sequence[Signal], *, holes: bool) -> list[Figures]:
    """The figures of channels of one type, length and rate; `holes`: each lacks some samples."""
    rate, n = signals[0].rate, len(signals[0].samples)
    if not n:
        return [dict.fromkeys(FIGURES) for _ in signals]
    # a single channel is not copied
    x = np.stack([s.samples for s in signals]) if len(signals) > 1 else signals[0].samples[None]
    missing = np.isnan(x).sum(axis=1) if holes else np.zeros(len(x))
    least, most = np.fmin.reduce(x, axis=1), np.fmax.reduce(x, axis=1)
    flat, longest = _measure_flatness(x, rate)
    limits = _find_limits(signals, least, most)
    at_limits = _count_beyond(x, least, most, limits, np.less_equal)
    has_range = limits[0] < limits[1]
    unlimited = np.array([s.rails is None for s in signals]) | (missing == n)
    first, median, third = _compute_quartiles(x[:, :: max(1, n // QUARTILE_SAMPLES)], holes=holes)
    scale, offset = np.array([(s.scale, s.offset) for s in signals], np.float64).T
    ends = np.sort([least * scale + offset, most * scale + offset], axis=0)
    hum, mains = measure_line_noise(x, rate)
    columns = {
        "missing": missing / n,
        "flat": flat / n,
        "flat_longest": longest / rate,
        "clipped": np.where(has_range, at_limits, 0) / n,
        "out_of_range": np.where(
            unlimited, np.nan, _count_beyond(x, least, most, limits, np.less) / n
        ),
        "line_noise": hum,
        "line_frequency": mains,
        "min": ends[0],
        "max": ends[1],
        "median": median * scale + offset,
        "iqr": np.abs((third - first) * scale),
    }
    rows = np.stack([columns[name] for name in FIGURES], axis=1).tolist()
    return [dict(zip(FIGURES, map(_round_figure, row), strict=True)) for row in rows]


def _measure_flatness(x: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Samples in constant stretches, and in the longest of them, of each channel: [k] each."""
    n = x.shape[1]
    block = max(16, math.ceil(rate))
    flat = _find_flat_blocks(x, block)
    excess = flat.shape[1] * block - n  # of the last block
    counts = np.count_nonzero(flat, axis=1) * block - flat[:, -1] * excess
    return counts, np.array([_find_longest_run(row, block, n) for row in flat])


def _find_flat_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """Which blocks of samples hold one value alone (besides NaN): bool [k, blocks].

    The last block is shorter, and no stretch if it is a sample.
    """
    n = x.shape[1]
    starts = np.arange(0, n, block)
    flat = np.fmin.reduceat(x, starts, axis=1) == np.fmax.reduceat(x, starts, axis=1)
    if n % block == 1:
        flat[:, -1] = False
    return flat


def _find_limits(signals: Sequence[Signal], least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Lowest and highest value of the converter, of the samples' type: [2, k].

    Where the source does not say, those of the channel.
    """
    limits = [s.rails or (a, b) for s, a, b in zip(signals, least, most, strict=True)]
    if least.dtype.kind == "i":  # else the samples would be converted to be compared
        info = np.iinfo(least.dtype)
        rounded = np.rint(np.array(limits, np.float64).T)
        return np.clip(rounded, info.min, info.max).astype(least.dtype)
    return np.array(limits, least.dtype).T


def _count_beyond(
    x: np.ndarray, least: np.ndarray, most: np.ndarray, limits: np.ndarray, less: np.ufunc
) -> np.ndarray:
    """Samples of each channel beyond the limits (`less_equal`: or at them): [k].

    Mostly there are none to count.
    """
    floor, ceiling = limits
    count = np.zeros(len(x), np.int64)
    if less(least, floor).any():
        count += np.count_nonzero(less(x, floor[:, None]), axis=1)
    if less(ceiling, most).any():
        count += np.count_nonzero(less(ceiling[:, None], x), axis=1)
    return count


def _compute_quartiles(x: np.ndarray, *, holes: bool) -> np.ndarray:
    """Quartiles and median of each row: [3, k]; NaN where all is missing."""
    if x.dtype.kind == "i":  # as below, and many times as fast
        ranks = (x.shape[1] - 1) * np.array([0.25, 0.5, 0.75])
        low, high = np.floor(ranks).astype(np.int64), np.ceil(ranks).astype(np.int64)
        values = _select_ranks(x, np.concatenate([low, high])).astype(np.float64)
        below, above = np.hsplit(values, 2)
        return np.asarray(below + (above - below) * (ranks - low)).T
    if not holes:
        return np.percentile(x, [25, 50, 75], axis=1)
    quartiles = np.full((3, len(x)), np.nan)
    some = ~np.isnan(x).all(axis=1)
    if some.any():
        quartiles[:, some] = np.nanpercentile(x[some], [25, 50, 75], axis=1)
    return quartiles


def _select_ranks(x: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The integers of these ranks (from 0) in each row: [k, ranks].

    Counting the values of a long row is faster than sorting it.
    """
    if x.shape[1] < COUNTING_LENGTH:
        return np.sort(x, axis=1)[:, ranks]
    selected = np.empty((len(x), len(ranks)), np.int64)
    for i, row in enumerate(x):
        least = row.min().astype(np.int64)
        up_to = np.bincount(row - least).cumsum()  # samples of each value or a lower one
        selected[i] = least + np.searchsorted(up_to, ranks, side="right")
    return selected


def _find_longest_run(flat: np.ndarray, block: int, n: int) -> int:
    if not flat.any():
        return 0
    edges = np.flatnonzero(np.diff(flat.astype(np.int8), prepend=0, append=0))
    ends = np.minimum(edges * block, n)
    return int((ends[1::2] - ends[::2]).max())


def measure_line_noise(x: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """How much of a channel is hum of the mains: the share of its power within 1 Hz of 50 or of 60
    Hz, whichever is larger.

    Power is the mean of at most 8 Hann-windowed spectra of 4 s (Welch 1967, without overlap, spread
    over the recording), above 0.5 Hz, so that drift does not hide the hum. White noise sampled at
    200 Hz has a share of about 0.02. In `x`, samples [k, n] at `rate` Hz, stretches with NaN are
    passed over.

    Returns share and frequency, [k] each: NaN below 122 Hz (the band is not covered), of less than
    2 s (the peak of a sine would be wider than the band), and for constant channels.
    """
    k, n = x.shape
    share, mains = np.full((2, k), np.nan)
    size = min(round(SPECTRUM_SECONDS * rate), n, MAX_SPECTRUM)
    if rate < 2 * (max(MAINS) + NEAR) or size < SPECTRUM_SECONDS / 2 * rate:
        return share, mains
    starts = np.unique(np.linspace(0, n - size, min(SPECTRA, n // size)).astype(np.int64))
    hz = np.fft.rfftfreq(size, 1 / rate)
    window = np.hanning(size + 1)[:-1]
    power = np.zeros((k, len(hz)))
    for start in starts:
        stretch = x[:, start : start + size].astype(np.float64)
        stretch -= stretch.mean(axis=1, keepdims=True)
        spectrum = np.fft.rfft(stretch * window, axis=1)
        power += np.nan_to_num(spectrum.real**2 + spectrum.imag**2)
    total = power @ (hz > DRIFT)
    near = np.stack([power @ (np.abs(hz - f) <= NEAR) for f in MAINS])
    varies = total > 0
    share[varies] = near.max(axis=0)[varies] / total[varies]
    mains[varies] = np.array(MAINS)[near.argmax(axis=0)][varies]
    return share, mains


def find_constant_stretch(signal: Signal) -> tuple[int, int] | None:
    """First sample and length of the longest constant stretch of a channel, None without one.

    It is a hole in a file, a detached electrode or a saturated amplifier. In channels that often
    repeat values (markers, counts, slow sensors) a stretch means nothing. Constant channels have
    none either: they are in the figures.
    """
    x = signal.samples
    fewest = max(STRETCH_SAMPLES, math.ceil(STRETCH_SECONDS * signal.rate))
    if len(x) <= fewest:
        return None
    coarse = x[::STRETCH_STEP]
    same = coarse[1:] == coarse[:-1]
    if not (same[:-2] & same[1:-1] & same[2:]).any():  # the shortest stretch holds four of them
        return None
    start, length = _find_longest_equal(x)
    rest = np.concatenate([x[:start], x[start + length :]])
    repeats = np.count_nonzero(rest[1:] == rest[:-1])
    if length < fewest or not len(rest) or repeats > REPEATS * len(rest):
        return None
    return start, length


def _find_longest_equal(x: np.ndarray) -> tuple[int, int]:
    """First sample and length of the longest run of equal values; missing ones equal none."""
    edges = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1], [True]]))
    longest = int(np.diff(edges).argmax())
    return int(edges[longest]), int(edges[longest + 1] - edges[longest])


def report_constant_stretches(records: Sequence[Record]) -> list[Finding]:
    """One warning for the constant stretches of all channels that no other warning names."""
    stretches = []
    for record in records:
        flat = {finding.field for finding in record.findings if finding.code == Reason.FLAT_CHANNEL}
        for signal in record.signals:
            stretch = None if signal.channel in flat else find_constant_stretch(signal)
            if stretch is not None:
                stretches.append((signal, *stretch))
    if not stretches:
        return []
    signal, start, length = max(stretches, key=lambda stretch: stretch[2] / stretch[0].rate)
    value = "zero" if signal.samples[start] == 0 else "one value"
    problem = f"{length} samples of {value} in a row, from {signal.onset + start / signal.rate:g} s"
    if len(stretches) > 1:
        problem += f", and stretches in {len(stretches) - 1} more channels"
    return [
        input_warning(
            Reason.FLAT_CHANNEL,
            problem,
            "is it a hole in the file, or was the sensor detached?",
            field=signal.channel,
            count=len(stretches),
        )
    ]


def find_repeated_block(x: np.ndarray) -> tuple[int, int, int] | None:
    """First value, length and origin of a long block of `x` [n] that equals an earlier one.

    It is a part of a file that was copied over another. None without one. Noise does not repeat
    `BLOCK_LENGTH` values. What is there more than twice is periodic (a calibration, a counter, a
    simulation), and blocks that hardly change (markers, steps, detached electrodes) mean nothing.
    """
    places, codes = _choose_anchors(x)
    if len(places) < 2:
        return None
    # of what lies between two anchors
    keys = (codes[:-1] * HASH) ^ (codes[1:] + np.diff(places).astype(np.uint64))
    ordered = np.sort(keys)
    # as in nearly every file: what follows takes many times as long
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    _, first, groups, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    origins = first[groups]
    again = np.flatnonzero((origins != np.arange(len(keys))) & (counts[groups] == 2))
    if not len(again):
        return None
    distances = places[again] - places[origins[again]]
    lags, counts = np.unique(distances, return_counts=True)
    lag = int(lags[counts.argmax()])
    # places around the first anchor of that lag where the values differ from those `lag` before
    edges = np.concatenate([[lag - 1], np.flatnonzero(x[lag:] != x[:-lag]) + lag, [len(x)]])
    after = int(np.searchsorted(edges, places[again][distances == lag][0]))
    begin, end = int(edges[after - 1]) + 1, int(edges[after])
    block = x[begin:end]
    changes = np.count_nonzero(block[1:] != block[:-1])
    if len(block) < BLOCK_LENGTH or 2 * changes < len(block):
        return None
    return (begin, end - begin, begin - lag) if len(np.unique(block)) >= BLOCK_VALUES else None


def _choose_anchors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of anchors in `x` and the eight bytes from each on: int64 and uint64 [anchors].

    These bytes alone decide what is an anchor: one in 64 of the values that change.
    """
    width = max(1, 8 // x.itemsize)  # values in eight bytes
    products = np.empty(ANCHOR_VALUES // width + 1, np.uint64)
    chosen = np.empty(len(products), bool)
    anchors = [(np.zeros(0, np.int64), np.zeros(0, np.uint64))]
    for start in range(0, len(x) - width, ANCHOR_VALUES):
        piece = np.ascontiguousarray(x[start : start + ANCHOR_VALUES + width])
        shifted = []
        for shift in range(min(width, len(piece) - width)):
            stop = shift + (len(piece) - 1 - shift) // width * width
            words = piece[shift:stop].view(np.uint64)
            n = len(words)
            np.multiply(words, HASH, out=products[:n])
            rows = np.flatnonzero(np.less(products[:n], CHOSEN, out=chosen[:n]))
            shifted.append((rows * width + shift, words[rows]))
        places, words = map(np.concatenate, zip(*shifted, strict=True))
        order = np.argsort(places, kind="stable")  # `width` sorted parts
        order = order[piece[places[order]] != piece[places[order] + 1]]
        anchors.append((places[order] + start, words[order]))
    places, words = map(np.concatenate, zip(*anchors, strict=True))
    return places, words


def report_repeated_blocks(records: Sequence[Record], files: Sequence[Path]) -> list[Finding]:
    """A warning for each file of samples that repeats a block of its bytes.

    Without such files one for the repeated blocks of all channels.
    """
    binary = [
        path
        for path in files
        if path.suffix.lower() in BINARY and path.stat().st_size >= 2 * BLOCK_LENGTH
    ]
    if not binary:
        return _report_repeated_samples(records)
    findings = map(_report_repeated_bytes, binary)
    return [finding for finding in findings if finding is not None]


def _report_repeated_bytes(path: Path) -> Finding | None:
    """A warning where a file of samples repeats a block of its bytes."""
    with path.open("rb") as file:
        # of EDF: the bytes of its header
        header = file.read(192)[184:] if path.suffix.lower() != ".dat" else b""
    skipped = int(header) if header.strip().isdigit() else 0
    values = (path.stat().st_size - skipped) // 2
    if values <= 0:
        return None
    block = find_repeated_block(np.memmap(path, "<i2", "r", skipped, (values,)))
    if block is None:
        return None
    start, length, origin = skipped + 2 * block[0], 2 * block[1], skipped + 2 * block[2]
    problem = f"{length:,} bytes from byte {start:,} equal those from byte {origin:,}"
    return input_warning(Reason.DUPLICATES, problem, REPEATED, COMPARE, file=str(path))


def _report_repeated_samples(records: Sequence[Record]) -> list[Finding]:
    """One warning for the repeated blocks of all channels."""
    blocks = []
    for signal in itertools.chain.from_iterable(record.signals for record in records):
        block = find_repeated_block(signal.samples)
        if block is not None:
            blocks.append((signal, *block))
    if not blocks:
        return []
    signal, start, length, origin = max(blocks, key=lambda block: block[2] / block[0].rate)
    seconds = [f"{signal.onset + place / signal.rate:g} s" for place in (start, origin)]
    problem = f"{length} samples from {seconds[0]} equal those from {seconds[1]}"
    if len(blocks) > 1:
        problem += f", and blocks in {len(blocks) - 1} more channels"
    return [
        input_warning(
            Reason.DUPLICATES, problem, REPEATED, COMPARE, field=signal.channel, count=len(blocks)
        )
    ]


def _round_figure(value: float) -> float | None:
    """Six significant digits: the same text whatever the last bit of a sum."""
    return value if value == 0.0 else float(f"{value:.6g}") if math.isfinite(value) else None
