"""Brings channels to the rate of a view: filters, interpolation, anti-alias filters.

Legend: T samples a window at the view's rate, V channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens import filters
from bitimely_core.types import Signal

STEP_VALUES = 1 << 20  # values that are interpolated at once
Method = Literal["none", "interpolated", "held", "placed", "resampled", "causal", "averaged"]
# methods that keep the source's digital values
EXACT = frozenset[Method]({"none", "interpolated", "held"})


def to_physical(signal: Signal) -> np.ndarray:
    """The samples in the signal's unit, float64."""
    return signal.samples.astype(np.float64) * signal.scale + signal.offset


def needs_filter(channel: str, options: WindowOptions) -> bool:
    """Whether the channel is filtered: one of measurements, not of states or markers (`hold`)."""
    has_filter = options.bandpass is not None or options.notch is not None
    return has_filter and channel not in options.hold


def filter_signal(
    signal: Signal, blocks: Sequence[tuple[float, float]], options: WindowOptions
) -> Signal:
    """The signal in physical units, float64, filtered where its channel is; restarted at blocks."""
    if not needs_filter(signal.channel, options):
        return signal
    samples = filters.apply_filters(
        to_physical(signal),
        filters.design_filters(options.bandpass, options.notch, signal.rate),
        find_borders(signal, blocks),
        is_causal=options.filtering == "causal",
    )
    return signal._replace(samples=samples, scale=1.0, offset=0.0)


def find_borders(signal: Signal, blocks: Sequence[tuple[float, float]]) -> list[int]:
    """The samples at which a filter restarts: the first of each block, and the first after it."""
    borders = []
    for start, stop in blocks:
        borders.append(math.floor((start - signal.onset) * signal.rate + 1e-6))
        borders.append(math.ceil((stop - signal.onset) * signal.rate - 1e-6))
    return borders


def choose_resampling(channel: str, rate: float, options: WindowOptions) -> Method:
    """How a channel of `rate` Hz is brought to the rate of the view."""
    if math.isclose(rate, options.rate, rel_tol=1e-9):
        return "none"
    if options.resampling == "pointwise":
        return "averaged" if rate > options.rate else "placed"
    if rate > options.rate:
        return "causal" if options.resampling == "causal" else "resampled"
    return "held" if options.resampling == "causal" or channel in options.hold else "interpolated"


def count_resampled(signal: Signal, options: WindowOptions, recording: str) -> int:
    """floor(samples * rate / native rate).

    Raises UserError (sampling_rate) for a faster channel without `rate`.
    """
    method = choose_resampling(signal.channel, signal.rate, options)
    allowed = options.resample or signal.channel in options.decimate
    if method in {"resampled", "causal", "averaged"} and not allowed:
        raise input_error(
            Reason.SAMPLING_RATE,
            f"{safe_text(signal.channel)} of recording {safe_text(recording)} "
            f"has {signal.rate:g} Hz",
            f"expected at most the {options.rate:g} Hz of this view",
            f"Give --rate {options.rate:g} to resample with an anti-alias filter",
            field="rate",
            found=f"{signal.rate:g}",
            expected=f"{options.rate:g}",
        )
    n = len(signal.samples)
    return n if method == "none" else math.floor(n * options.rate / signal.rate + 1e-6)


def resample(signal: Signal, options: WindowOptions) -> np.ndarray:
    """The channel at the view's rate, in its own (digital) values.

    The dtype is that of the samples, or float64 when they had to be filtered. A slower channel is
    interpolated on lines, or held (`options.hold`); after the last sample its value goes on. int16
    is rounded to the source's own digital step, so the error is at most half of it. A faster
    channel gets one anti-alias filter over the segment, see `downsample`. Other choices of
    `options.resampling`: `downsample_causally`, `bin_samples`.
    """
    x, method = signal.samples, choose_resampling(signal.channel, signal.rate, options)
    if method == "none":
        return x
    length = count_resampled(signal, options, "")
    if method in {"placed", "averaged"}:
        return bin_samples(x, signal.rate, options.rate, length)
    if method == "causal":
        return downsample_causally(x, signal.rate, options.rate, length)
    if method == "resampled":
        up, down = (Fraction(rate).limit_denominator(1000) for rate in (options.rate, signal.rate))
        return downsample(x, up / down, length)
    return upsample(x, signal.rate, options.rate, length, hold=method == "held")


def bin_samples(x: np.ndarray, rate: float, new_rate: float, length: int) -> np.ndarray:
    """The mean of the samples of `x` [samples] in each of `length` values at `new_rate` Hz.

    float64; NaN where there is none.
    """
    places = np.floor(np.arange(len(x)) * new_rate / rate + 1e-9).astype(np.int64)
    y = x.astype(np.float64)
    seen = np.isfinite(y) & (places < length)
    return average_bins(places[seen], y[seen], length)


def average_bins(bins: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """The mean of the `values` in each of `length` bins, float64; NaN in an empty one."""
    count = np.bincount(bins, minlength=length)
    total = np.bincount(bins, values, minlength=length)
    return np.divide(total, count, out=np.full(length, np.nan), where=count > 0)


def downsample_causally(x: np.ndarray, rate: float, new_rate: float, length: int) -> np.ndarray:
    """`x` [samples] at `rate` low-passed forward only, at 0.4 of `new_rate`, float64.

    It is read at the last sample in each of `length` values.
    """
    sections = filters.design_filters((None, 0.4 * new_rate), None, rate)
    y = filters.apply_filters(x.astype(np.float64), sections, is_causal=True)
    lasts = np.ceil((np.arange(length) + 1) * rate / new_rate - 1e-9).astype(np.int64) - 1
    return y[np.minimum(lasts, len(x) - 1)]


def upsample(x: np.ndarray, rate: float, new_rate: float, length: int, *, hold: bool) -> np.ndarray:
    """`x` [samples] at `rate` brought up to `length` values at `new_rate` Hz.

    An observed value stays when its neighbour is missing.
    """
    out = np.empty(length, dtype=x.dtype)
    last = len(x) - 1
    for i in range(0, length, STEP_VALUES):
        places = np.arange(i, min(i + STEP_VALUES, length)) * rate / new_rate  # in samples of `x`
        before = np.minimum(np.floor(places + 1e-9).astype(np.int64), last)
        if hold:
            out[i : i + STEP_VALUES] = x[before]
            continue
        part = np.clip(places - before, 0.0, 1.0)
        line = x[before] * (1 - part) + x[np.minimum(before + 1, last)] * part
        y = np.where(part > 1e-9, line, x[before])
        out[i : i + STEP_VALUES] = np.rint(y) if x.dtype == np.int16 else y
    return out


def downsample(x: np.ndarray, ratio: Fraction, length: int) -> np.ndarray:
    """`x` [samples] resampled by `ratio` to `length` values (`scipy.signal.resample_poly`).

    float64 in the units of `x`. The edges go on along the line through the first and last sample.
    Missing values are bridged by lines and are missing again afterwards.
    """
    from scipy.signal import resample_poly

    y = x.astype(np.float64)
    missing = ~np.isfinite(y)
    if missing.all():
        return np.full(length, np.nan)
    if missing.any():
        y[missing] = np.interp(np.flatnonzero(missing), np.flatnonzero(~missing), y[~missing])
    level = y.mean()  # the branches of the filter differ by 1e-5: not of the level
    changed = resample_poly(y - level, ratio.numerator, ratio.denominator, padtype="line")
    out = changed[:length] + level
    if missing.any():
        nearest = np.rint(np.arange(length) / float(ratio)).astype(np.int64)
        out[missing[np.minimum(nearest, len(x) - 1)]] = np.nan
    return out
