"""Filters recordings: band-pass and notch, without phase shift, at the rate of the source.

Each continuous stretch is filtered by itself.

The filters are those of scipy: `sosfiltfilt(butter(4, band, output="sos", fs=rate), x)`, then for
each frequency `sosfiltfilt(tf2sos(*iirnotch(frequency, 30, fs=rate)), x)`, both with scipy's
padding, in float64 on physical values. Run forward and backward the gain is squared: half of the
amplitude is left at the edges of the band (-6 dB).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from bitimely_core.errors import safe_text, usage_error

ORDER = 4  # Butterworth; a band-pass has this order at each edge
QUALITY = 30.0  # of a notch: frequency over its width at -3 dB (once, not forward and backward)

Band = tuple[float | None, float | None]
"""Lower and upper edge in Hz; None: open (high-pass, low-pass)."""


def validate_filters(
    bandpass: Sequence[float | None] | None, notch: Sequence[float] | None
) -> tuple[Band | None, tuple[float, ...] | None]:
    """Both as they are stored: edges as floats, notches ascending and once each.

    None is no filter. Raises UserError (config, exit 2).
    """
    band = None if bandpass is None else _parse_band(bandpass)
    stops = tuple(sorted(set(map(float, notch or ()))))
    if not all(0 < stop < math.inf for stop in stops):
        raise usage_error(
            f"found {','.join(f'{stop:g}' for stop in stops)}",
            "expected frequencies above 0 Hz",
            field="--notch",
        )
    return band, stops or None


def _parse_band(bandpass: Sequence[float | None]) -> Band:
    edges = [None if edge is None else float(edge) for edge in bandpass]
    numbers = [edge for edge in edges if edge is not None]
    ascends = all(low < high for low, high in pairwise((0.0, *numbers, math.inf)))
    if not numbers or not ascends:
        raise usage_error(
            f"found {','.join('' if edge is None else f'{edge:g}' for edge in edges)}",
            "expected LOW,HIGH in Hz with 0 < LOW < HIGH; one of them may be left out",
            field="--bandpass",
        )
    return edges[0], edges[1]


def describe_filters(bandpass: Band | None, notch: tuple[float, ...] | None) -> str:
    """As text: `band-pass 0.5-40 Hz, notch 50 Hz`; "" without a filter."""
    low, high = bandpass or (None, None)
    words = []
    if low and high:
        words.append(f"band-pass {low:g}-{high:g} Hz")
    elif low or high:
        words.append(f"high-pass {low:g} Hz" if low else f"low-pass {high:g} Hz")
    if notch:
        words.append(f"notch {', '.join(f'{stop:g}' for stop in notch)} Hz")
    return ", ".join(words)


def check_rate(
    bandpass: Band | None,
    notch: tuple[float, ...] | None,
    rate: float,
    channel: str,
    recording: str,
) -> None:
    """Raises UserError (config, exit 2) where a frequency is not below half of a channel's rate."""
    for field, edges in (("bandpass", bandpass), ("notch", notch)):
        if any(edge is not None and edge >= rate / 2 for edge in edges or ()):
            raise usage_error(
                f"{safe_text(channel)} of recording {safe_text(recording)} has {rate:g} Hz",
                f"expected frequencies below {rate / 2:g} Hz, half of that",
                "Choose others, or leave the channel out with --channels",
                field=f"--{field}",
            )


@lru_cache(maxsize=64)
def design_filters(
    bandpass: Band | None, notch: tuple[float, ...] | None, rate: float
) -> tuple[np.ndarray, ...]:
    """The filters for `rate` in Hz, as second-order sections [sections, 6] each."""
    from scipy.signal import butter, iirnotch, tf2sos

    low, high = bandpass or (None, None)
    notches = [tf2sos(*iirnotch(stop, QUALITY, fs=rate)) for stop in notch or ()]
    edges: float | tuple[float, float]
    if low is not None and high is not None:
        edges, kind = (low, high), "bandpass"
    elif low is not None:
        edges, kind = low, "highpass"
    elif high is not None:
        edges, kind = high, "lowpass"
    else:
        return tuple(notches)
    return butter(ORDER, edges, kind, output="sos", fs=rate), *notches


def count_padding(sections: np.ndarray) -> int:
    """Samples by which scipy extends both ends under one filter [sections, 6].

    A stretch must be longer.
    """
    zeros = int((sections[:, [2, 5]] == 0).sum(axis=0).min())
    return 3 * (2 * len(sections) + 1 - zeros)


def find_stretches(x: np.ndarray, borders: Sequence[int] = ()) -> Iterator[slice]:
    """Stretches of `x` [n] without missing values; each border begins another stretch."""
    seen = np.zeros(len(x) + 2, dtype=bool)
    seen[1:-1] = True if x.dtype.kind in "iu" else np.isfinite(x)
    edges = np.flatnonzero(seen[1:] != seen[:-1])
    for start, stop in edges.reshape(-1, 2).tolist():
        inner = [border for border in sorted(set(borders)) if start < border < stop]
        yield from (slice(a, b) for a, b in zip([start, *inner], [*inner, stop], strict=True))


def count_too_short(
    x: np.ndarray, filters: Sequence[np.ndarray], borders: Sequence[int] = ()
) -> int:
    """Number of stretches that `apply_filters` leaves missing."""
    shortest = max(map(count_padding, filters), default=-1)
    return sum(part.stop - part.start <= shortest for part in find_stretches(x, borders))


def apply_filters(
    x: np.ndarray,
    filters: Sequence[np.ndarray],
    borders: Sequence[int] = (),
    *,
    is_causal: bool = False,
) -> np.ndarray:
    """`x` [n] float64 filtered forward and backward, stretch by stretch.

    Missing values (NaN) stay missing; stretches that are too short become missing. `is_causal`:
    forward only, from the state of rest at the first value of each stretch, which may have any
    length.
    """
    from scipy.signal import sosfilt, sosfilt_zi, sosfiltfilt

    out = np.full(len(x), np.nan)
    shortest = 0 if is_causal else max(map(count_padding, filters), default=-1)
    for part in find_stretches(x, borders):
        if part.stop - part.start > shortest:
            y = x[part]
            for sections in filters:
                if is_causal:
                    y, _ = sosfilt(sections, y, zi=sosfilt_zi(sections) * y[0])
                else:
                    y = sosfiltfilt(sections, y)
            out[part] = y
    return out
