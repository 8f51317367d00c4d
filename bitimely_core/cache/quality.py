"""Quality figures of channels, for reports and filters; data are never changed by them.

Channels of equal shape are measured together: for short recordings the calls take the time, not the
samples.
"""

from __future__ import annotations

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
    """Cheap robust figures of channels, in their order; None where the source does not say or
    nothing was measured.

    Shares of the samples: `missing` (NaN), `flat` (in stretches of a second, or 16 samples, without
    any change), `clipped` (at the lowest or highest value of the converter, or of the channel where
    the source does not say), `out_of_range` (beyond it). Share of
    the power: `line_noise` (see `line_noise`) at `line_frequency`. Longest flat stretch in seconds;
    physical minimum, maximum, median and interquartile range, the last two of at most 131,071
    samples.
    """
    alike: dict[tuple[str, int, float, bool], list[int]] = defaultdict(list)
    for i, signal in enumerate(signals):
        holes = signal.samples.dtype.kind == "f" and bool(np.isnan(signal.samples).any())
        alike[signal.samples.dtype.str, len(signal.samples), signal.rate, holes].append(i)
    found: dict[int, Figures] = {}
    for (_, n, _, holes), rows in alike.items():
        many = max(1, GROUP_SAMPLES // max(n, 1))
        for first in range(0, len(rows), many):
            here = rows[first : first + many]
            found |= zip(here, _measure_group([signals[i] for i in here], holes=holes), strict=True)
    return [found[i] for i in range(len(signals))]


def _measure_group(signals: Sequence[Signal], *, holes: bool) -> list[Figures]:
    """The figures of channels of one type, length and rate; `holes`: each lacks some samples."""
    rate, n = signals[0].rate, len(signals[0].samples)
    if not n:
        return [dict.fromkeys(FIGURES) for _ in signals]
    x = np.stack([s.samples for s in signals]) if len(signals) > 1 else signals[0].samples[None]
    missing = np.isnan(x).sum(axis=1) if holes else np.zeros(len(x))
    block = max(16, math.ceil(rate))
    # fmin and fmax pass NaN over, slowly
    smallest, largest = (np.fmin, np.fmax) if holes else (np.minimum, np.maximum)
    least, most = smallest.reduce(x, axis=1), largest.reduce(x, axis=1)
    flat = _find_flat_blocks(x, block, still=least == most, holes=holes)
    excess = flat.shape[1] * block - n  # of the last block
    floor, ceiling = _find_limits(signals, least, most)
    first, median, third = _compute_quartiles(x[:, :: max(1, n // QUARTILE_SAMPLES)], holes=holes)
    scale, offset = (np.array([getattr(s, name) for s in signals]) for name in ("scale", "offset"))
    ends = np.sort([least * scale + offset, most * scale + offset], axis=0)
    hum, mains = measure_line_noise(x, rate)
    has_limits = np.where([s.rails is None for s in signals], np.nan, 1.0)
    columns = {
        "missing": missing / n,
        "flat": (np.count_nonzero(flat, axis=1) * block - flat[:, -1] * excess) / n,
        "flat_longest": [_find_longest_run(row, block, n) / rate for row in flat],
        "clipped": np.where(
            floor < ceiling, _count_beyond(x, least, most, floor, ceiling, np.less_equal), 0
        )
        / n,
        "out_of_range": has_limits * _count_beyond(x, least, most, floor, ceiling, np.less) / n,
        "line_noise": hum,
        "line_frequency": mains,
        "min": ends[0],
        "max": ends[1],
        "median": median * scale + offset,
        "iqr": np.abs((third - first) * scale),
    }
    listed = [np.asarray(columns[name]).tolist() for name in FIGURES]
    found = [
        dict(zip(FIGURES, map(_round_figure, row), strict=True))
        for row in zip(*listed, strict=True)
    ]
    return [
        row | dict.fromkeys(("out_of_range",)) if lost == n else row
        for row, lost in zip(found, missing, strict=True)
    ]


def _find_flat_blocks(x: np.ndarray, block: int, *, still: np.ndarray, holes: bool) -> np.ndarray:
    """Which blocks of samples hold one value alone (besides NaN): bool [k, blocks]; the last is
    shorter, and no stretch if it is a sample.

    `still`: channels that never change, [k]. A changing block mostly differs at two of its samples;
    only the others are compared in full.
    """
    n = x.shape[1]
    if holes:
        starts = np.arange(0, n, block)
        flat = np.fmin.reduceat(x, starts, axis=1) == np.fmax.reduceat(x, starts, axis=1)
    else:
        many = n // block
        flat = np.empty((len(x), -(-n // block)), bool)
        full, body, tail = (
            flat[:, :many],
            x[:, : many * block].reshape(len(x), many, block),
            x[:, many * block :],
        )
        np.equal(body[..., 0], body[..., block // 2], out=full)
        row, place = np.nonzero(full & ~still[:, None])
        full[row, place] = (body[row, place] == body[row, place, :1]).all(axis=1)
        if tail.size:
            flat[:, -1] = (tail == tail[:, :1]).all(axis=1)
    if n % block == 1:
        flat[:, -1] = False
    return flat


def _find_limits(signals: Sequence[Signal], least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Lowest and highest value of the converter, or of the channel where the source does not say:
    [2, k], of the samples' type.
    """
    limits = [s.rails or (a, b) for s, a, b in zip(signals, least, most, strict=True)]
    if least.dtype.kind == "i":  # else the samples would be converted to be compared
        info = np.iinfo(least.dtype)
        return np.clip(np.rint(np.array(limits, np.float64).T), info.min, info.max).astype(
            least.dtype
        )
    return np.array(limits, least.dtype).T


def _count_beyond(
    x: np.ndarray,
    least: np.ndarray,
    most: np.ndarray,
    floor: np.ndarray,
    ceiling: np.ndarray,
    less: np.ufunc,
) -> np.ndarray:
    """Samples of each channel below the floor or above the ceiling (`less_equal`: or at them): [k].
    Mostly there are none to count.
    """
    count = np.zeros(len(x), np.int64)
    if less(least, floor).any():
        count += np.count_nonzero(less(x, floor[:, None]), axis=1)
    if less(ceiling, most).any():
        count += np.count_nonzero(less(ceiling[:, None], x), axis=1)
    return count


def _compute_quartiles(x: np.ndarray, *, holes: bool) -> np.ndarray:
    """Quartiles and median of each row: [3, k]; NaN where all is missing."""
    if x.dtype.kind == "i":  # as below, and many times as fast
        at = (x.shape[1] - 1) * np.array([0.25, 0.5, 0.75])
        low = at.astype(np.int64)
        below, above = np.hsplit(
            _select_ranks(x, np.concatenate([low, np.ceil(at).astype(np.int64)])).astype(
                np.float64
            ),
            2,
        )
        return np.asarray(below + (above - below) * (at - low)).T
    if not holes:
        return np.percentile(x, [25, 50, 75], axis=1)
    found = np.full((3, len(x)), np.nan)
    some = ~np.isnan(x).all(axis=1)
    if some.any():
        found[:, some] = np.nanpercentile(x[some], [25, 50, 75], axis=1)
    return found


def _select_ranks(x: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The integers of these ranks (from 0) in each row: [k, ranks]. Counting the values of a long
    row is faster than sorting it.
    """
    if x.shape[1] < COUNTING_LENGTH:
        return np.sort(x, axis=1)[:, ranks]
    least = x.min(axis=1).astype(np.int64)
    # samples of this value or a lower one
    up_to = (np.bincount(row - low).cumsum() for row, low in zip(x, least, strict=True))
    return np.array(
        [
            low + np.searchsorted(held, ranks, side="right")
            for held, low in zip(up_to, least, strict=True)
        ]
    )


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
    """First sample and length of the longest constant stretch of a channel that else seldom repeats
    a value, None without one.

    A hole in a file, a detached electrode or a saturated amplifier; in channels that repeat values
    (markers, counts, slow sensors) a stretch means nothing. Constant channels have none either:
    they are in the figures.
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
    if (
        length < fewest
        or not len(rest)
        or np.count_nonzero(rest[1:] == rest[:-1]) > REPEATS * len(rest)
    ):
        return None
    return start, length


def _find_longest_equal(x: np.ndarray) -> tuple[int, int]:
    """First sample and length of the longest run of equal values; missing ones equal none."""
    edges = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1], [True]]))
    longest = int(np.diff(edges).argmax())
    return int(edges[longest]), int(edges[longest + 1] - edges[longest])


def report_constant_stretches(records: Sequence[Record]) -> list[Finding]:
    """One warning for the constant stretches of all channels that no other warning names."""
    found = [
        (signal, *stretch)
        for record in records
        for signal in record.signals
        if not any(
            finding.code == Reason.FLAT_CHANNEL and finding.field == signal.channel
            for finding in record.findings
        )
        if (stretch := find_constant_stretch(signal)) is not None
    ]
    if not found:
        return []
    signal, start, length = max(found, key=lambda one: one[2] / one[0].rate)
    value = "zero" if signal.samples[start] == 0 else "one value"
    problem = f"{length} samples of {value} in a row, from {signal.onset + start / signal.rate:g} s"
    others = f", and stretches in {len(found) - 1} more channels" if len(found) > 1 else ""
    requirement = "is it a hole in the file, or was the sensor detached"
    return [
        input_warning(
            Reason.FLAT_CHANNEL,
            problem + others,
            requirement + "?",
            field=signal.channel,
            count=len(found),
        )
    ]


def find_repeated_block(x: np.ndarray) -> tuple[int, int, int] | None:
    """First value, length and origin of a long block of `x` [n] that equals an earlier one, None
    without one.

    A part of a file that was copied over another. Noise does not repeat `BLOCK_LENGTH` values; what
    is there more than twice is periodic (a calibration, a counter, a simulation), and blocks that
    hardly change (markers, steps, detached electrodes) mean nothing.
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
    _, first, of, times = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    again = np.flatnonzero((first[of] != np.arange(len(keys))) & (times[of] == 2))
    if not len(again):
        return None
    distances = places[again] - places[first[of[again]]]
    lags, counts = np.unique(distances, return_counts=True)
    lag = int(lags[counts.argmax()])
    differs = np.flatnonzero(x[lag:] != x[:-lag]) + lag
    after = int(np.searchsorted(differs, places[again][distances == lag][0]))
    begin, end = (
        int(differs[after - 1]) + 1 if after else lag,
        int(differs[after]) if after < len(differs) else len(x),
    )
    block = x[begin:end]
    if (
        len(block) < BLOCK_LENGTH
        or 2 * np.count_nonzero(block[1:] != block[:-1]) < len(block)
        or len(np.unique(block)) < BLOCK_VALUES
    ):
        return None
    return begin, end - begin, begin - lag


def _choose_anchors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values that the eight bytes from them on choose, some one in 64 of those that change,
    wherever they are: places and these bytes.
    """
    many = max(1, 8 // x.itemsize)
    products, chosen = (
        np.empty(ANCHOR_VALUES // many + 1, np.uint64),
        np.empty(ANCHOR_VALUES // many + 1, bool),
    )
    found = [(np.zeros(0, np.int64), np.zeros(0, np.uint64))]
    for start in range(0, len(x) - many, ANCHOR_VALUES):
        piece = np.ascontiguousarray(x[start : start + ANCHOR_VALUES + many])
        ats, codes = [], []
        for shift in range(min(many, len(piece) - many)):
            words = piece[shift : shift + (len(piece) - 1 - shift) // many * many].view(np.uint64)
            n = len(words)
            np.multiply(words, HASH, out=products[:n])
            at = np.flatnonzero(np.less(products[:n], CHOSEN, out=chosen[:n]))
            ats.append(at * many + shift)
            codes.append(words[at])
        places, words = np.concatenate(ats), np.concatenate(codes)
        order = np.argsort(places, kind="stable")  # four sorted parts
        order = order[piece[places[order]] != piece[places[order] + 1]]
        found.append((places[order] + start, words[order]))
    places, words = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return places, words


def report_repeated_blocks(records: Sequence[Record], files: Sequence[Path]) -> list[Finding]:
    """A warning for each file of samples that repeats a block of its bytes; of other files one for
    the repeated blocks of all channels.
    """
    binary = [
        path
        for path in files
        if path.suffix.lower() in BINARY and path.stat().st_size >= 2 * BLOCK_LENGTH
    ]
    found = []
    for path in binary:
        with path.open("rb") as file:
            # of EDF: the bytes of its header
            header = file.read(192)[184:] if path.suffix.lower() != ".dat" else b""
        skipped = int(header) if header.strip().isdigit() else 0
        values = max(0, path.stat().st_size - skipped) // 2
        if (
            values
            and (block := find_repeated_block(np.memmap(path, "<i2", "r", skipped, (values,))))
            is not None
        ):
            start, length, origin = skipped + 2 * block[0], 2 * block[1], skipped + 2 * block[2]
            problem = f"{length:,} bytes from byte {start:,} equal those from byte {origin:,}"
            found.append(
                input_warning(Reason.DUPLICATES, problem, REPEATED, COMPARE, file=str(path))
            )
    signals = (
        []
        if binary
        else [
            (s, *block)
            for record in records
            for s in record.signals
            if (block := find_repeated_block(s.samples))
        ]
    )
    if signals:
        signal, start, length, origin = max(signals, key=lambda one: one[2] / one[0].rate)
        here, there = (f"{signal.onset + at / signal.rate:g} s" for at in (start, origin))
        others = f", and blocks in {len(signals) - 1} more channels" if len(signals) > 1 else ""
        problem = f"{length} samples from {here} equal those from {there}{others}"
        found.append(
            input_warning(
                Reason.DUPLICATES,
                problem,
                REPEATED,
                COMPARE,
                field=signal.channel,
                count=len(signals),
            )
        )
    return found


def _round_figure(value: float) -> float | None:
    """Six significant digits: the same text whatever the last bit of a sum."""
    return value if value == 0.0 else float(f"{value:.6g}") if math.isfinite(value) else None
