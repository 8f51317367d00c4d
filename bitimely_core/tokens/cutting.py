"""One recording to windows: position, rate, label. Without writing and without splits.

Legend: n windows, T samples a window at the view's rate, V channels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.schemas.tokens import ChannelPreparation, SamplePreparation, WindowOptions
from bitimely_core.tokens import filters
from bitimely_core.types import Annotation, Record, Signal

PIECE_BYTES = 16 << 20  # bytes of windows that are made at once
STEP_VALUES = 1 << 20  # values that are interpolated at once
Method = Literal["none", "interpolated", "held", "placed", "resampled", "causal", "averaged"]
# methods that keep the source's digital values
EXACT = frozenset[Method]({"none", "interpolated", "held"})
# both Greek letters are in use
VOLTS = {"v": 1.0, "mv": 1e-3, "uv": 1e-6, "µv": 1e-6, "μv": 1e-6, "nv": 1e-9}


class WindowPlace(NamedTuple):
    """Position of a window in its recording."""

    start: float  # seconds from the start of the recording
    segment: int
    first: int  # sample in the segment, at the view's rate
    label: Any = None  # class, number, tuple of classes, or None


class RecordCut(NamedTuple):
    """The windows of a recording under a view. `make_windows` makes their values: all int16
    (digital) or all float32 (physical).
    """

    segments: list[list[Signal]]  # [segment][V]
    factors: list[list[float]]  # [segment][V] to the view's units
    digital: bool  # int16
    scale: np.ndarray  # [V] float64: physical = value * scale + offset
    offset: np.ndarray  # [V] float64
    units: tuple[str, ...]
    places: list[WindowPlace]  # in order of time
    # start and end, in seconds, of stretches that no filter goes into or out of
    blocks: tuple[tuple[float, float], ...] = ()


def cut_record(
    record: Record, options: WindowOptions, units: tuple[str, ...] | None, left_out: Counter[str]
) -> RecordCut | None:
    """The windows of `record` under `options`, or None with the reason counted in `left_out` (one
    count a recording, epoch or segment).

    int16 when every channel is int16, has one scale over the recording and need not be filtered;
    else physical float32, NaN = missing. `units` are those of the view, None for the first
    recording: volts of another power are brought to them, others are left out. Raises UserError:
    sampling_rate for a channel that is faster than the view without `rate`, config (exit 2) for one
    that is too slow for the filter.
    """
    if options.clock is not None:
        left_out["times_behind"] += count_times_behind(record, options)
        record = place_irregular(record, options)
    by_onset: dict[float, dict[str, Signal]] = {}
    for signal in record.signals:
        by_onset.setdefault(signal.onset, {})[signal.channel] = signal
    names = options.channels
    found = {
        onset: [named[c] for c in names]
        for onset, named in sorted(by_onset.items())
        if named.keys() >= set(names)
    }
    if not found:
        left_out["missing_channel"] += 1
        return None
    left_out["segments_without_channel"] += len(by_onset) - len(found)
    clock = [signal for signal in record.signals if signal.channel == options.target]
    label = (
        read_recording_label(record, options, left_out)
        if options.target is not None and not clock
        else None
    )
    if options.target is not None and label is None and not clock:
        return None
    segments, onsets = list(found.values()), list(found)
    units = units or tuple(signal.unit for signal in segments[0])
    factors = [
        [find_unit_factor(signal.unit, unit) for signal, unit in zip(segment, units, strict=True)]
        for segment in segments
    ]
    known = [[factor for factor in row if factor is not None] for row in factors]
    if known != factors:
        left_out["unit"] += 1
        return None
    for signal in (
        signal
        for segment in segments
        for signal in segment
        if needs_filter(signal.channel, options)
    ):
        filters.check_rate(
            options.bandpass, options.notch, signal.rate, signal.channel, record.recording_id
        )

    lengths = [
        min(count_resampled(signal, options, record.recording_id) for signal in segment)
        for segment in segments
    ]
    if options.epoch is not None and options.target is None:
        places = trim_windows(
            cut_epochs(record.annotations, onsets, lengths, options, left_out), options, left_out
        )
    else:
        places = []
        for segment, (onset, length) in enumerate(zip(onsets, lengths, strict=True)):
            left_out["too_short"] += length < options.window
            firsts = range(0, length - options.window + 1, options.stride)
            places += [
                WindowPlace(onset + first / options.rate, segment, first, label) for first in firsts
            ]
        places = label_by_start(places, clock, left_out) if clock else places
        places = (
            average_labels(places, record.annotations, options, left_out)
            if options.overlap is not None
            else places
        )
    affine = [
        {(s[v].scale * f[v], s[v].offset * f[v]) for s, f in zip(segments, known, strict=True)}
        for v in range(len(units))
    ]
    stored = all(
        s.samples.dtype == np.int16
        and choose_resampling(s.channel, s.rate, options) in EXACT
        and not needs_filter(s.channel, options)
        for row in segments
        for s in row
    )
    digital = stored and all(len(a) == 1 for a in affine)
    scale, offset = np.array(
        [next(iter(a)) if digital else (1.0, 0.0) for a in affine], dtype=np.float64
    ).T
    return RecordCut(
        segments, known, digital, scale, offset, units, sorted(places, key=lambda place: place[:3])
    )


def count_times_behind(record: Record, options: WindowOptions) -> int:
    """Times of a recording of irregular samples that are in no window: behind the last full one, or
    later than the grid ends.
    """
    clock = next((signal for signal in record.signals if signal.channel == options.clock), None)
    if clock is None:
        return 0
    if options.irregular:
        return max(0, len(clock.samples) - options.window) % options.stride
    seconds = clock.samples.astype(np.float64) * clock.scale + clock.offset
    return int((seconds > options.length).sum())


def place_irregular(record: Record, options: WindowOptions) -> Record:
    """A recording of samples at irregular times as the view has them; others are unchanged.

    Without a grid its rows are filled up with missing ones to a window. On a grid each step is the
    mean of the observations in it, in physical units; those at the end of the window belong to its
    last step, later ones are left out.
    """
    clock = next((signal for signal in record.signals if signal.channel == options.clock), None)
    if clock is None:
        return replace(record, signals=[])
    if options.irregular:
        lacking = max(0, options.window - len(clock.samples))
        signals = [
            s._replace(
                samples=np.append(
                    s.samples.astype(np.float32, copy=False), np.full(lacking, np.nan, np.float32)
                )
            )
            for s in record.signals
        ]
        return replace(record, signals=signals)
    at = (clock.samples.astype(np.float64) * clock.scale + clock.offset) * options.rate
    step = np.minimum(np.floor(at + 1e-6), options.window - 1)
    inside = (at >= 0) & (at <= options.window)
    signals = []
    for signal in record.signals:
        if signal.channel == options.clock:
            continue
        values = signal.samples.astype(np.float64) * signal.scale + signal.offset
        kept = inside & np.isfinite(values)
        places = step[kept].astype(np.int64)
        count, total = (
            np.bincount(places, weights, options.window) for weights in (None, values[kept])
        )
        means = np.divide(total, count, out=np.full(options.window, np.nan), where=count > 0)
        signals.append(
            signal._replace(
                samples=means.astype(np.float32), rate=options.rate, scale=1.0, offset=0.0
            )
        )
    return replace(record, signals=signals)


def make_windows(
    found: RecordCut, places: list[WindowPlace], options: WindowOptions
) -> Iterator[np.ndarray]:
    """The windows at `places`, in pieces [n, T, V] of at most `PIECE_BYTES` bytes (or one
    window).
    """
    dtype = np.dtype(np.int16 if found.digital else np.float32)
    needed = {place.segment for place in places}
    tracks = {
        i: [
            make_values(signal, factor, found, options)
            for signal, factor in zip(segment, found.factors[i], strict=True)
        ]
        for i, segment in enumerate(found.segments)
        if i in needed
    }
    at_once = max(1, PIECE_BYTES // (options.window * len(options.channels) * dtype.itemsize))
    for i in range(0, len(places), at_once):
        now = places[i : i + at_once]
        piece = np.empty((len(now), options.window, len(options.channels)), dtype=dtype)
        for segment in {place.segment for place in now}:
            rows = [row for row, place in enumerate(now) if place.segment == segment]
            firsts = [now[row].first for row in rows]
            for v, track in enumerate(tracks[segment]):
                piece[rows, :, v] = np.lib.stride_tricks.sliding_window_view(track, options.window)[
                    firsts
                ]
        yield piece


def find_observed(
    found: RecordCut, places: list[WindowPlace], options: WindowOptions
) -> np.ndarray:
    """Which windows at `places` have a sample, bool [n]: of the others nothing can be learned or
    scored. Of irregular samples all.
    """
    adds_gaps = count_unfiltered(found, places, options) > 0

    def is_complete(signal: Signal) -> bool:
        if choose_resampling(signal.channel, signal.rate, options) == "placed" or (
            adds_gaps and needs_filter(signal.channel, options)
        ):
            return False
        return signal.samples.dtype.kind != "f" or bool(np.isfinite(signal.samples).all())

    if options.clock is not None or all(
        any(map(is_complete, found.segments[i])) for i in {place.segment for place in places}
    ):
        return np.ones(len(places), dtype=bool)
    return np.concatenate(
        [np.isfinite(piece).any((1, 2)) for piece in make_windows(found, places, options)]
    )


def make_values(
    signal: Signal, factor: float, found: RecordCut, options: WindowOptions
) -> np.ndarray:
    """A channel at the view's rate: its digital int16 values when `found.digital`, else physical
    float32 in the view's unit.
    """
    if needs_filter(signal.channel, options):
        x = signal.samples.astype(np.float64) * signal.scale + signal.offset
        designed = filters.design_filters(options.bandpass, options.notch, signal.rate)
        x = filters.apply_filters(
            x, designed, find_borders(signal, found.blocks), is_causal=options.filtering == "causal"
        )
        signal = signal._replace(samples=x, scale=1.0, offset=0.0)
    x = resample(signal, options)
    return (
        x
        if found.digital
        else ((x.astype(np.float64) * signal.scale + signal.offset) * factor).astype(np.float32)
    )


def needs_filter(channel: str, options: WindowOptions) -> bool:
    """Whether the channel is filtered: one of measurements, not of states or markers (`hold`)."""
    return (
        options.bandpass is not None or options.notch is not None
    ) and channel not in options.hold


def choose_resampling(channel: str, rate: float, options: WindowOptions) -> Method:
    """How a channel of `rate` Hz is brought to the rate of the view."""
    if math.isclose(rate, options.rate, rel_tol=1e-9):
        return "none"
    if options.resampling == "pointwise":
        return "averaged" if rate > options.rate else "placed"
    if rate > options.rate:
        return "causal" if options.resampling == "causal" else "resampled"
    return "held" if options.resampling == "causal" or channel in options.hold else "interpolated"


def describe_preparation(
    rates: Iterable[tuple[str, float]], options: WindowOptions
) -> SamplePreparation:
    """What is done to channels of these names and native rates in Hz."""
    groups: dict[tuple[float, Method, Literal["zero-phase", "causal"] | None], list[str]] = {}
    for channel, rate in sorted(
        set(rates), key=lambda one: (options.channels.index(one[0]), one[1])
    ):
        filtering = options.filtering if needs_filter(channel, options) else None
        groups.setdefault((rate, choose_resampling(channel, rate, options), filtering), []).append(
            channel
        )
    return SamplePreparation(
        channels=tuple(
            ChannelPreparation(
                channels=tuple(names),
                native_rate=rate,
                rate=options.rate,
                resampling=method,
                filters=filtering,
            )
            for (rate, method, filtering), names in groups.items()
        ),
        stride=None if options.epoch is not None else options.stride,
    )


def find_borders(signal: Signal, blocks: Sequence[tuple[float, float]]) -> list[int]:
    """The samples at which a filter restarts: the first of each block, and the first after it."""
    at = [
        ((start - signal.onset) * signal.rate, (stop - signal.onset) * signal.rate)
        for start, stop in blocks
    ]
    return [
        sample
        for start, stop in at
        for sample in (math.floor(start + 1e-6), math.ceil(stop - 1e-6))
    ]


def count_unfiltered(found: RecordCut, places: list[WindowPlace], options: WindowOptions) -> int:
    """How many stretches of the segments with these `places` are too short for the filter."""
    signals = [
        signal
        for i in {place.segment for place in places}
        for signal in found.segments[i]
        if needs_filter(signal.channel, options)
    ]
    chosen = ((s, filters.design_filters(options.bandpass, options.notch, s.rate)) for s in signals)
    if options.filtering == "causal":
        return 0
    return sum(
        filters.count_too_short(s.samples, designed, find_borders(s, found.blocks))
        for s, designed in chosen
    )


def count_resampled(signal: Signal, options: WindowOptions, recording: str) -> int:
    """floor(samples * rate / own rate). Raises UserError (sampling_rate) for a faster channel
    without `rate`.
    """
    method = choose_resampling(signal.channel, signal.rate, options)
    if (
        method in {"resampled", "causal", "averaged"}
        and not options.resample
        and signal.channel not in options.decimate
    ):
        raise input_error(
            Reason.SAMPLING_RATE,
            f"{safe_text(signal.channel)} of recording {safe_text(recording)} has {signal.rate:g} Hz",
            f"expected at most the {options.rate:g} Hz of this view",
            f"Give --rate {options.rate:g} to resample with an anti-alias filter",
            field="rate",
            found=f"{signal.rate:g}",
            expected=f"{options.rate:g}",
        )
    n = len(signal.samples)
    return n if method == "none" else math.floor(n * options.rate / signal.rate + 1e-6)


def resample(signal: Signal, options: WindowOptions) -> np.ndarray:
    """The channel at the view's rate, in its own (digital) values and dtype, but float64 when it
    had to be filtered.

    Slower: linear interpolation (zero-order hold for `options.hold`), after the last sample its
    value; int16 is rounded to the source's own
    digital step, so the error is at most half of it. Faster: one anti-alias filter over the
    segment, see `downsample`. Other choices of
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
        return downsample(
            x,
            Fraction(options.rate).limit_denominator(1000)
            / Fraction(signal.rate).limit_denominator(1000),
            length,
        )
    return upsample(x, signal.rate, options.rate, length, hold=method == "held")


def bin_samples(x: np.ndarray, rate: float, new_rate: float, length: int) -> np.ndarray:
    """The mean of the samples of `x` [samples] that lie in each of `length` values at `new_rate`
    Hz, float64; NaN where there is none.
    """
    places = np.minimum(
        np.floor(np.arange(len(x)) * new_rate / rate + 1e-9).astype(np.int64), length
    )
    y = x.astype(np.float64)
    seen = np.isfinite(y)
    count = np.bincount(places[seen], minlength=length + 1)[:length]
    total = np.bincount(places[seen], y[seen], minlength=length + 1)[:length]
    return np.divide(total, count, out=np.full(length, np.nan), where=count > 0)


def downsample_causally(x: np.ndarray, rate: float, new_rate: float, length: int) -> np.ndarray:
    """`x` [samples] at `rate` low-passed forward only, at 0.4 of `new_rate`, and read at the last
    sample in each of `length` values, float64.
    """
    y = filters.apply_filters(
        x.astype(np.float64),
        filters.design_filters((None, 0.4 * new_rate), None, rate),
        is_causal=True,
    )
    at = np.ceil((np.arange(length) + 1) * rate / new_rate - 1e-9).astype(np.int64) - 1
    return y[np.minimum(at, len(x) - 1)]


def upsample(x: np.ndarray, rate: float, new_rate: float, length: int, *, hold: bool) -> np.ndarray:
    """`x` [samples] at `rate` brought up to `length` values at `new_rate` Hz. An observed value
    stays when its neighbour is missing.
    """
    out = np.empty(length, dtype=x.dtype)
    last = len(x) - 1
    for i in range(0, length, STEP_VALUES):
        at = np.arange(i, min(i + STEP_VALUES, length)) * rate / new_rate  # in samples of `x`
        left = np.minimum(np.floor(at + 1e-9).astype(np.int64), last)
        if hold:
            out[i : i + STEP_VALUES] = x[left]
            continue
        part = np.clip(at - left, 0.0, 1.0)
        y = np.where(
            part > 1e-9, x[left] * (1 - part) + x[np.minimum(left + 1, last)] * part, x[left]
        )
        out[i : i + STEP_VALUES] = np.rint(y) if x.dtype == np.int16 else y
    return out


def downsample(x: np.ndarray, ratio: Fraction, length: int) -> np.ndarray:
    """`x` [samples] resampled by `ratio` to `length` values, float64 in the units of `x`
    (`scipy.signal.resample_poly`).

    The edges go on along the line through the first and last sample. Missing values are bridged by
    lines and are missing again afterwards.
    """
    from scipy.signal import resample_poly

    y = x.astype(np.float64)
    missing = ~np.isfinite(y)
    if missing.all():
        return np.full(length, np.nan)
    if missing.any():
        y[missing] = np.interp(np.flatnonzero(missing), np.flatnonzero(~missing), y[~missing])
    level = y.mean()  # the branches of the filter differ by 1e-5: not of the level
    out = (
        resample_poly(y - level, ratio.numerator, ratio.denominator, padtype="line")[:length]
        + level
    )
    if missing.any():
        out[
            missing[
                np.minimum(np.rint(np.arange(length) / float(ratio)).astype(np.int64), len(x) - 1)
            ]
        ] = np.nan
    return out


def find_unit_factor(unit: str, target: str) -> float | None:
    """Factor from `unit` to `target`, letter case ignored; None for different quantities."""
    here, there = unit.strip().casefold(), target.strip().casefold()
    if here == there:
        return 1.0
    return VOLTS[here] / VOLTS[there] if here in VOLTS and there in VOLTS else None


def label_by_start(
    places: list[WindowPlace], clock: list[Signal], left_out: Counter[str]
) -> list[WindowPlace]:
    """Windows with the label of their start: a channel called as the view's target holds, at each
    time, the label of the window that begins there. Windows that begin at another time, or where it
    is missing, are counted.
    """
    found = []
    for place in places:
        for signal in clock:
            at = (place.start - signal.onset) * signal.rate
            if abs(at - round(at)) < 1e-6 and 0 <= round(at) < len(signal.samples):
                value = float(signal.samples[round(at)]) * signal.scale + signal.offset
                if math.isfinite(value):
                    found.append(place._replace(label=value))
                    break
        else:
            left_out["unlabelled_windows"] += 1
    return found


def average_labels(
    places: list[WindowPlace],
    annotations: Sequence[Annotation],
    options: WindowOptions,
    left_out: Counter[str],
) -> list[WindowPlace]:
    """Windows with the mean of the numeric annotations over them, each weighted by its overlap with
    the window; several at once all count.

    Windows of which annotations cover less than `options.overlap` are counted. From three integrals
    over time, lines between the annotations' ends: of the values, of the number of annotations, and
    of the time in which there is any.
    """
    notes = [
        (note, number)
        for note in annotations
        if note.duration > 0 and (number := parse_number(note.label)) is not None
    ]
    if not notes:
        left_out["unmatched_labels"] += 1
        return []
    begins, ends = (
        np.array(side)
        for side in zip(
            *((note.onset, note.onset + note.duration) for note, _ in notes), strict=True
        )
    )
    values = np.array([number for _, number in notes])
    at, first = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    change = np.zeros((2, len(at)))
    for side, sign in ((first[: len(notes)], 1.0), (first[len(notes) :], -1.0)):
        # around one of them: sums stay small
        np.add.at(change[0], side, sign * (values - values[0]))
        np.add.at(change[1], side, sign)
    level = np.cumsum(change, axis=1)[:, :-1]
    rates = np.stack([level[0], level[1], level[1] > 0.5])
    integrals = np.concatenate([np.zeros((3, 1)), np.cumsum(rates * np.diff(at), axis=1)], axis=1)
    starts = np.array([place.start for place in places])
    total, weight, covered = (
        np.interp(starts + options.length, at, line) - np.interp(starts, at, line)
        for line in integrals
    )
    assert options.overlap is not None
    enough = (covered >= options.overlap * options.length * (1 - 1e-9)) & (weight > 0)
    left_out["unmeasured_windows"] += int((~enough).sum())
    means = values[0] + total[enough] / weight[enough]
    kept = (place for place, keep in zip(places, enough, strict=True) if keep)
    return [place._replace(label=float(mean)) for place, mean in zip(kept, means, strict=True)]


def parse_number(text: str) -> float | None:
    """The finite number that an annotation's text is, else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def cut_epochs(
    annotations: list[Annotation],
    onsets: list[float],
    lengths: list[int],
    options: WindowOptions,
    left_out: Counter[str],
) -> list[WindowPlace]:
    """One window a labelled epoch: annotations are cut into full epochs from their onset, the
    window is centred on its epoch.

    With `options.points` one centred on each annotation without a duration instead. Epochs without
    a class count as `unlabelled_epochs`, those whose window is not in one segment as
    `annotation_out_of_range`.
    """
    assert options.epoch is not None
    places = []
    for annotation in annotations:
        count = (
            int(annotation.duration == 0)
            if options.points
            else int(annotation.duration / options.epoch + 1e-6)
        )
        label = annotation.label if options.labels is None else options.labels.get(annotation.label)
        if label is None:
            left_out["unlabelled_epochs"] += count
            continue
        for i in range(count):
            start = (
                annotation.onset
                + i * options.epoch
                + ((0.0 if options.points else options.epoch) - options.length) / 2
            )
            for segment, (onset, length) in enumerate(zip(onsets, lengths, strict=True)):
                first = round((start - onset) * options.rate)
                if 0 <= first <= length - options.window:
                    places.append(WindowPlace(onset + first / options.rate, segment, first, label))
                    break
            else:
                left_out["annotation_out_of_range"] += 1
    return places


def trim_windows(
    places: list[WindowPlace], options: WindowOptions, left_out: Counter[str]
) -> list[WindowPlace]:
    """Of class `options.trim[0]`, only windows within `options.trim[1]` seconds of the first and
    last window of another class.

    Without another class nothing is trimmed and `class_missing` is counted (method notes, section
    12, row 21).
    """
    if options.trim is None or not places:
        return places
    name, seconds = options.trim
    others = [place.start for place in places if place.label != name]
    if not others:
        left_out["class_missing"] += 1
        return places
    slack = 0.5 / options.rate  # rounding of the clock
    earliest, latest = min(others) - seconds - slack, max(others) + seconds + slack
    kept = [place for place in places if earliest <= place.start <= latest]
    left_out["trimmed"] += len(places) - len(kept)
    return kept


def read_recording_label(record: Record, options: WindowOptions, left_out: Counter[str]) -> Any:
    """The label of a recording, from its attribute `options.target`; None (counted) for a missing
    or unknown one.
    """
    assert options.target is not None
    value = record.attributes.get(options.target)
    if options.task == "regression":
        number = float(value) if isinstance(value, int | float) else math.nan
        value = number if math.isfinite(number) else None
    elif options.task == "multilabel" and isinstance(value, list | tuple):
        names = {str(name) for name in value}
        known = (
            [name for name in options.classes if name in names]
            if options.classes
            else sorted(names)
        )
        left_out["unknown_label"] += len(names) - len(known)
        return tuple(known)
    elif value is not None:
        value = str(value)
        if options.classes and value not in options.classes:
            left_out["unknown_label"] += 1
            return None
    if value is None:
        left_out["unmatched_labels"] += 1
    return value
