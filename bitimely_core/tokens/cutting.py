"""Cuts one recording into windows: position, label and values. It writes nothing and knows no
splits.

Legend: n windows, T samples a window at the view's rate, V channels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from bitimely_core.formats.units import find_unit_factor
from bitimely_core.schemas.tokens import ChannelPreparation, SamplePreparation, WindowOptions
from bitimely_core.tokens import filters
from bitimely_core.tokens.epochs import list_epochs, list_points
from bitimely_core.tokens.resampling import (
    EXACT,
    Method,
    average_bins,
    choose_resampling,
    count_resampled,
    filter_signal,
    find_borders,
    needs_filter,
    resample,
    to_physical,
)
from bitimely_core.types import Annotation, Record, Signal

PIECE_BYTES = 16 << 20  # bytes of windows that are made at once


class WindowPlace(NamedTuple):
    """Position of a window in its recording."""

    start: float  # seconds from the start of the recording
    segment: int
    first: int  # sample in the segment, at the view's rate
    label: Any = None  # class, number, tuple of classes, or None


class RecordCut(NamedTuple):
    """The windows of a recording under a view; `make_windows` makes their values.

    These are all int16 (digital) or all float32 (physical).
    """

    segments: list[list[Signal]]  # [segment][V]
    factors: list[list[float]]  # [segment][V] to the view's units
    digital: bool  # int16
    scale: np.ndarray  # [V] float64: physical = value * scale + offset
    offset: np.ndarray  # [V] float64
    places: list[WindowPlace]  # in order of time
    # start and end, in seconds, of stretches that no filter goes into or out of
    blocks: tuple[tuple[float, float], ...] = ()


def cut_record(
    record: Record, options: WindowOptions, units: tuple[str, ...], left_out: Counter[str]
) -> RecordCut | None:
    """The windows of a recording, or None with the reason counted in `left_out`.

    int16 when every channel is int16, has one scale over the recording and need not be filtered;
    else physical float32, NaN = missing.

    Args:
        record: the recording with at least the channels of the view.
        options: the view with the choices of the caller.
        units: of the channels of the view. Volts of another power are brought to them, recordings
            in other units are left out.
        left_out: gets one count a recording, epoch or segment.

    Raises:
        UserError: sampling_rate for a channel that is faster than the view without `rate`, config
            (exit 2) for one that is too slow for the filter.
    """
    if options.clock is not None:
        record = place_irregular(record, options, left_out)
    segments = _find_segments(record, options.channels, left_out)
    if not segments:
        return None
    label = None
    if options.target is not None and not _list_label_signals(record, options):
        label = read_recording_label(record.attributes.get(options.target), options, left_out)
        if label is None:
            return None
    factors = _find_factors(segments, units)
    if factors is None:
        left_out["unit"] += 1
        return None
    _check_rates(segments, options, record.recording_id)
    stretches = [
        (
            segment[0].onset,
            min(count_resampled(signal, options, record.recording_id) for signal in segment),
        )
        for segment in segments
    ]
    places = _place_windows(record, stretches, label, options, left_out)
    digital, scale, offset = _find_storage(segments, factors, options)
    places.sort(key=lambda place: place[:3])
    return RecordCut(segments, factors, digital, scale, offset, places)


def _check_rates(
    segments: Iterable[Iterable[Signal]], options: WindowOptions, recording_id: str
) -> None:
    """Raises UserError: config (exit 2) for a channel that is too slow for its filter."""
    for signal in itertools.chain(*segments):
        if needs_filter(signal.channel, options):
            filters.check_rate(
                options.bandpass, options.notch, signal.rate, signal.channel, recording_id
            )


def _find_segments(
    record: Record, channels: Sequence[str], left_out: Counter[str]
) -> list[list[Signal]]:
    """The channels, in their order, of each segment that has them all, in the order of time."""
    by_onset: dict[float, dict[str, Signal]] = {}
    for signal in record.signals:
        by_onset.setdefault(signal.onset, {})[signal.channel] = signal
    segments = [
        [by_name[channel] for channel in channels]
        for _, by_name in sorted(by_onset.items())
        if by_name.keys() >= set(channels)
    ]
    if segments:
        left_out["segments_without_channel"] += len(by_onset) - len(segments)
    else:
        left_out["missing_channel"] += 1
    return segments


def _find_factors(segments: list[list[Signal]], units: tuple[str, ...]) -> list[list[float]] | None:
    """What brings each signal to the units of the view, [segment][V].

    None where a signal is of another quantity.
    """
    factors = []
    for segment in segments:
        row = [find_unit_factor(s.unit, unit) for s, unit in zip(segment, units, strict=True)]
        factors.append([factor for factor in row if factor is not None])
        if None in row:
            return None
    return factors


def _list_label_signals(record: Record, options: WindowOptions) -> list[Signal]:
    """Those called as the view's target: they hold the label of each window at its start."""
    return [signal for signal in record.signals if signal.channel == options.target]


def _place_windows(
    record: Record,
    stretches: list[tuple[float, int]],
    label: Any,
    options: WindowOptions,
    left_out: Counter[str],
) -> list[WindowPlace]:
    """The windows of a recording with their labels; `label` is that of the recording.

    `stretches` are the onset in seconds and the samples of each segment.
    """
    if options.epoch is not None:
        places = cut_epochs(record.annotations, stretches, options, left_out)
        return trim_windows(places, options, left_out)
    places = _slide_windows(stretches, label, options, left_out)
    label_signals = _list_label_signals(record, options)
    if label_signals:
        places = label_by_start(places, label_signals, left_out)
    if options.overlap is not None:
        places = average_labels(places, record.annotations, options, left_out)
    return places


def _slide_windows(
    stretches: list[tuple[float, int]], label: Any, options: WindowOptions, left_out: Counter[str]
) -> list[WindowPlace]:
    """Windows every `options.stride` samples of each segment, all with the same label."""
    places: list[WindowPlace] = []
    for segment, (onset, length) in enumerate(stretches):
        left_out["too_short"] += length < options.window
        places += [
            WindowPlace(onset + first / options.rate, segment, first, label)
            for first in range(0, length - options.window + 1, options.stride)
        ]
    return places


def _find_storage(
    segments: list[list[Signal]], factors: list[list[float]], options: WindowOptions
) -> tuple[bool, np.ndarray, np.ndarray]:
    """Whether all channels stay int16, and the scale and offset [V] of what is stored.

    They are those of the source, or 1 and 0 of physical float32.
    """
    pairs = [
        [
            (signal.scale * factor, signal.offset * factor)
            for signal, factor in zip(*rows, strict=True)
        ]
        for rows in zip(segments, factors, strict=True)
    ]
    digital = all(row == pairs[0] for row in pairs) and all(
        _keeps_digits(signal, options) for signal in itertools.chain(*segments)
    )
    stored = pairs[0] if digital else [(1.0, 0.0)] * len(pairs[0])
    scale, offset = np.array(stored, dtype=np.float64).T
    return digital, scale, offset


def _keeps_digits(signal: Signal, options: WindowOptions) -> bool:
    """Whether a channel keeps the source's int16 on its way into windows."""
    method = choose_resampling(signal.channel, signal.rate, options)
    is_exact = method in EXACT and not needs_filter(signal.channel, options)
    return signal.samples.dtype == np.int16 and is_exact


def place_irregular(record: Record, options: WindowOptions, left_out: Counter[str]) -> Record:
    """A recording of samples at irregular times as the view has them.

    Without a grid its rows are filled up with missing ones to a window. On a grid each step is the
    mean of the observations in it, in physical units; those at the end of the window belong to its
    last step, later ones are left out. Times that are in no window are counted as `times_behind`:
    behind the last full one, or later than the grid ends.
    """
    clock = next((signal for signal in record.signals if signal.channel == options.clock), None)
    if clock is None:
        return replace(record, signals=[])
    if options.irregular:
        left_out["times_behind"] += max(0, len(clock.samples) - options.window) % options.stride
        lacking = np.full(max(0, options.window - len(clock.samples)), np.nan, np.float32)
        signals = [
            signal._replace(
                samples=np.append(signal.samples.astype(np.float32, copy=False), lacking)
            )
            for signal in record.signals
        ]
        return replace(record, signals=signals)
    seconds = to_physical(clock)
    left_out["times_behind"] += int((seconds > options.length).sum())
    places = seconds * options.rate
    step = np.minimum(np.floor(places + 1e-6), options.window - 1)
    is_inside = (places >= 0) & (places <= options.window)
    signals = []
    for signal in record.signals:
        if signal.channel == options.clock:
            continue
        values = to_physical(signal)
        seen = is_inside & np.isfinite(values)
        means = average_bins(step[seen].astype(np.int64), values[seen], options.window)
        samples = means.astype(np.float32)
        signals.append(signal._replace(samples=samples, rate=options.rate, scale=1.0, offset=0.0))
    return replace(record, signals=signals)


def make_windows(cut: RecordCut, options: WindowOptions) -> Iterator[np.ndarray]:
    """The windows in pieces [n, T, V] of at most `PIECE_BYTES` bytes, or one window."""
    tracks = {
        segment: [
            make_values(signal, factor, cut, options)
            for signal, factor in zip(cut.segments[segment], cut.factors[segment], strict=True)
        ]
        for segment in {place.segment for place in cut.places}
    }
    shape = (options.window, len(options.channels))
    dtype = np.dtype(np.int16 if cut.digital else np.float32)
    size = max(1, PIECE_BYTES // (math.prod(shape) * dtype.itemsize))
    for i in range(0, len(cut.places), size):
        places = cut.places[i : i + size]
        piece = np.empty((len(places), *shape), dtype=dtype)
        for row, place in enumerate(places):
            for v, track in enumerate(tracks[place.segment]):
                piece[row, :, v] = track[place.first : place.first + options.window]
        yield piece


def make_values(
    signal: Signal, factor: float, cut: RecordCut, options: WindowOptions
) -> np.ndarray:
    """A channel at the view's rate.

    Its digital int16 values when `cut.digital`, else physical float32 in the view's unit.
    """
    signal = filter_signal(signal, cut.blocks, options)
    x = resample(signal, options)
    if cut.digital:
        return x
    return (to_physical(signal._replace(samples=x)) * factor).astype(np.float32)


def find_observed(cut: RecordCut, options: WindowOptions) -> np.ndarray:
    """Which windows have a sample, bool [n]; of irregular samples all.

    Of the others nothing can be learned or scored.
    """
    adds_gaps = count_unfiltered(cut, options) > 0
    segments = {place.segment for place in cut.places}
    if options.clock is not None or all(
        any(_is_complete(signal, adds_gaps, options) for signal in cut.segments[segment])
        for segment in segments
    ):
        return np.ones(len(cut.places), dtype=bool)
    return np.concatenate([np.isfinite(x).any((1, 2)) for x in make_windows(cut, options)])


def _is_complete(signal: Signal, adds_gaps: bool, options: WindowOptions) -> bool:
    """Whether each value of the channel is there without a look at its windows."""
    if choose_resampling(signal.channel, signal.rate, options) == "placed":
        return False
    if adds_gaps and needs_filter(signal.channel, options):
        return False
    return signal.samples.dtype.kind != "f" or bool(np.isfinite(signal.samples).all())


def count_unfiltered(cut: RecordCut, options: WindowOptions) -> int:
    """How many stretches of the segments with windows are too short for the filter."""
    if options.filtering == "causal":
        return 0
    count = 0
    for segment in {place.segment for place in cut.places}:
        for signal in cut.segments[segment]:
            if needs_filter(signal.channel, options):
                sections = filters.design_filters(options.bandpass, options.notch, signal.rate)
                borders = find_borders(signal, cut.blocks)
                count += filters.count_too_short(signal.samples, sections, borders)
    return count


def describe_preparation(
    rates: Iterable[tuple[str, float]], options: WindowOptions
) -> SamplePreparation:
    """What is done to channels of these names and native rates in Hz."""
    groups: dict[tuple[float, Method, Literal["zero-phase", "causal"] | None], list[str]] = {}
    pairs = set(rates)
    for channel in options.channels:
        for rate in sorted(rate for name, rate in pairs if name == channel):
            filtering = options.filtering if needs_filter(channel, options) else None
            method = choose_resampling(channel, rate, options)
            groups.setdefault((rate, method, filtering), []).append(channel)
    return SamplePreparation(
        channels=tuple(
            ChannelPreparation(
                channels=tuple(channels),
                native_rate=rate,
                rate=options.rate,
                resampling=method,
                filters=filtering,
            )
            for (rate, method, filtering), channels in groups.items()
        ),
        stride=None if options.epoch is not None else options.stride,
    )


def label_by_start(
    places: list[WindowPlace], signals: list[Signal], left_out: Counter[str]
) -> list[WindowPlace]:
    """Windows with the label of their start.

    A channel called as the view's target holds, at each time, the label of the window that begins
    there. Windows that begin at another time, or where it is missing, are counted.
    """
    labelled = []
    for place in places:
        value = next(filter(math.isfinite, _read_values(signals, place.start)), None)
        if value is None:
            left_out["unlabelled_windows"] += 1
        else:
            labelled.append(place._replace(label=value))
    return labelled


def _read_values(signals: list[Signal], seconds: float) -> Iterator[float]:
    """The physical values that the segments of a channel have exactly at a time."""
    for signal in signals:
        place = (seconds - signal.onset) * signal.rate
        if abs(place - round(place)) < 1e-6 and 0 <= round(place) < len(signal.samples):
            yield float(signal.samples[round(place)]) * signal.scale + signal.offset


def average_labels(
    places: list[WindowPlace],
    annotations: Sequence[Annotation],
    options: WindowOptions,
    left_out: Counter[str],
) -> list[WindowPlace]:
    """Windows with the mean of the numeric annotations over them.

    Each is weighted by its overlap with the window; several at once all count. Windows of which
    annotations cover less than `options.overlap` are counted.
    """
    numbers = _list_numbers(annotations)
    if not len(numbers):
        left_out["unmatched_labels"] += 1
        return []
    times, integrals = _integrate_numbers(numbers)
    starts = np.array([place.start for place in places])
    total, weight, covered = (
        np.interp(starts + options.length, times, line) - np.interp(starts, times, line)
        for line in integrals
    )
    assert options.overlap is not None
    enough = (covered >= options.overlap * options.length * (1 - 1e-9)) & (weight > 0)
    left_out["unmeasured_windows"] += int((~enough).sum())
    means = numbers[0, 2] + total[enough] / weight[enough]
    measured = itertools.compress(places, enough)
    return [
        place._replace(label=mean) for place, mean in zip(measured, means.tolist(), strict=True)
    ]


def _list_numbers(annotations: Sequence[Annotation]) -> np.ndarray:
    """Start, end and value of the annotations that last and are finite numbers, [notes, 3]."""
    rows = []
    for note in annotations:
        try:
            number = float(note.label)
        except ValueError:
            continue
        if note.duration > 0 and math.isfinite(number):
            rows.append((note.onset, note.onset + note.duration, number))
    return np.array(rows, dtype=np.float64)


def _integrate_numbers(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times [t], and three integrals [3, t] up to each of them, with lines between the times.

    Of the values less the first one, which keeps sums small; of the number of annotations; and of
    the time in which there is any.
    """
    n, values = len(numbers), numbers[:, 2] - numbers[0, 2]
    times, places = np.unique(numbers[:, :2].T.ravel(), return_inverse=True)
    change = np.zeros((2, len(times)))
    for side, sign in ((places[:n], 1.0), (places[n:], -1.0)):
        np.add.at(change[0], side, sign * values)
        np.add.at(change[1], side, sign)
    total, count = np.cumsum(change, axis=1)[:, :-1]
    rates = np.stack([total, count, count > 0.5])
    areas = np.cumsum(rates * np.diff(times), axis=1)
    return times, np.concatenate([np.zeros((3, 1)), areas], axis=1)


def cut_epochs(
    annotations: list[Annotation],
    stretches: list[tuple[float, int]],
    options: WindowOptions,
    left_out: Counter[str],
) -> list[WindowPlace]:
    """One window a labelled epoch, centred on it; see `epochs.list_epochs`.

    With `options.points` one centred on each annotation without a duration instead. `stretches` are
    the onset in seconds and the samples of each segment. Epochs whose window is not in one segment
    count as `annotation_out_of_range`.
    """
    assert options.epoch is not None
    if options.points:
        length = 0.0
        epochs = list_points(annotations, 1 / options.rate, options.labels, left_out)
    else:
        length = float(options.epoch)
        borders = {onset for onset, _ in stretches}
        epochs = list_epochs(annotations, length, options.labels, borders, left_out)
    places = []
    for epoch in epochs:
        start = epoch.start + (length - options.length) / 2
        place = _place_window(start, epoch.label, stretches, options)
        if place is None:
            left_out["annotation_out_of_range"] += 1
        else:
            places.append(place)
    return places


def _place_window(
    start: float, label: str, stretches: list[tuple[float, int]], options: WindowOptions
) -> WindowPlace | None:
    """The window at a time in seconds; None where no segment holds all of it."""
    for segment, (onset, length) in enumerate(stretches):
        first = round((start - onset) * options.rate)
        if 0 <= first <= length - options.window:
            return WindowPlace(onset + first / options.rate, segment, first, label)
    return None


def trim_windows(
    places: list[WindowPlace], options: WindowOptions, left_out: Counter[str]
) -> list[WindowPlace]:
    """Windows within `options.trim[1]` seconds of the first and last class but `options.trim[0]`.

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
    trimmed = [place for place in places if earliest <= place.start <= latest]
    left_out["trimmed"] += len(places) - len(trimmed)
    return trimmed


def read_recording_label(value: Any, options: WindowOptions, left_out: Counter[str]) -> Any:
    """The label of a recording from its attribute; None (counted) for a missing or unknown one."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if value is None or (options.task == "regression" and not is_number):
        left_out["unmatched_labels"] += 1
        return None
    if options.task == "regression":
        return float(value)
    if options.task == "multilabel" and isinstance(value, list | tuple):
        return _choose_labels(set(map(str, value)), options.classes, left_out)
    if options.classes and str(value) not in options.classes:
        left_out["unknown_label"] += 1
        return None
    return str(value)


def _choose_labels(
    names: Set[str], classes: Sequence[str], left_out: Counter[str]
) -> tuple[str, ...]:
    """The labels of a recording in the order of the classes; others are counted."""
    labels = tuple(name for name in classes or sorted(names) if name in names)
    left_out["unknown_label"] += len(names) - len(labels)
    return labels
