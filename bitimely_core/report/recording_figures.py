"""What the page of an ingest shows on labels: how many there are, and the first recording drawn
with its labels on the same axis.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from bitimely_core import cache, registry
from bitimely_core.page import (
    BarPlot,
    Figure,
    SpanLanes,
    Table,
    TimeSpan,
    Trace,
    TracePlot,
    make_table,
)
from bitimely_core.registry import View
from bitimely_core.report.channel_blocks import MAX_BARS
from bitimely_core.report.page_text import format_duration
from bitimely_core.report.plain_figures import DEPTH
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.types import Record, Signal, group_by

EXCERPT = 30.0  # seconds of the first figure
SHORT = 45.0  # seconds up to which a recording has one figure
COLUMNS = 620  # intervals of the overview
MAX_CHANNELS = 20  # of a figure
MAX_LANES = 10  # labels of a figure


# ---- labels


def label_blocks(opened: cache.Cache, report: IngestReport) -> Iterator[Figure | Table]:
    """Recordings by label, and annotations by label."""
    subjects = opened.subjects()
    views = _list_views(report)
    targets = {view.target: view for view in views if view.task in {"classification", "multilabel"}}
    for target, view in targets.items():
        if target is not None and target in subjects.columns:
            yield _label_figure(target, view, subjects[target].to_list())
    if opened.annotations().height:
        yield _annotation_table(opened, report)


def _list_views(report: IngestReport) -> Iterable[View]:
    dataset = registry.datasets.get(report.dataset)
    return dataset.facts.views.values() if dataset else ()


def _label_figure(target: str, view: View, cells: Sequence[Any]) -> Figure:
    """Recordings by label; `cells`: one label or a list of labels of each, None without any."""
    counts: Counter[str] = Counter()
    for cell in cells:
        if cell is not None:
            counts.update(map(str, cell if isinstance(cell, list) else [cell]))
    names = [*view.classes, *sorted(set(counts) - set(view.classes))][:MAX_BARS]
    none = cells.count(None)
    caption = "Every recording has one."
    if none:
        caption = f"{none:,} of {len(cells):,} recordings have none."
    if view.task == "multilabel":
        caption += " A recording may have several."
    bars = BarPlot(names, [counts[name] for name in names], ylabel="recordings")
    title = f"Recordings by {target.replace('_', ' ')}"
    return Figure(f"labels-{target}", title, caption, bars)


def _annotation_table(opened: cache.Cache, report: IngestReport) -> Table:
    name_label = _make_namer(report)
    durations: dict[str, list[float]] = defaultdict(list)
    recordings: dict[str, set[str]] = defaultdict(set)
    for recording, _, duration, label in opened.annotations().iter_rows():
        name = name_label(label)
        durations[name].append(duration)
        recordings[name].add(recording)
    rows = []
    for name in _sort_labels(durations):
        seconds = durations[name]
        total = format_duration(sum(seconds))
        rows.append([name, len(seconds), total, len(recordings[name])])
    caption = "Annotations in the cache, cut at the ends of the signals."
    columns = ["label", "annotations", "total duration", "recordings"]
    return make_table("annotations", "Annotations", caption, columns, rows)


def _make_namer(report: IngestReport) -> Callable[[str], str]:
    """Function from the text of an annotation to its displayed label: its class, if a view of the
    data set names one.

    Texts kept by --keep-phi can hold names, and numbers are no labels: both are only counted.
    """
    classes: dict[str, str] = {}
    for view in _list_views(report):
        classes |= view.labels or {}

    def name_label(text: str) -> str:
        if text in classes:
            return classes[text]
        with suppress(ValueError):
            float(text)
            return "a number"
        return "other text" if report.options.get("keep_phi") else text

    return name_label


def _sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels in drawing order: stages by depth, then the others by name."""
    depths = {stage: depth for depth, stage in enumerate(DEPTH)}
    return sorted(labels, key=lambda label: (depths.get(label, len(DEPTH)), label))


def _make_lanes(record: Record, report: IngestReport) -> SpanLanes | None:
    """The annotations of a recording as spans by label; rare labels beyond MAX_LANES together. None
    without annotations.
    """
    names = list(map(_make_namer(report), (note.label for note in record.annotations)))
    common = dict(Counter(names).most_common())
    if len(common) > MAX_LANES:
        common = dict(Counter(names).most_common(MAX_LANES - 1))
    spans = [
        TimeSpan(note.onset, note.onset + note.duration, name if name in common else "others")
        for note, name in zip(record.annotations, names, strict=True)
    ]
    others = ["others"] if len(common) < len(set(names)) else []
    return SpanLanes([*_sort_labels(common), *others], spans) if names else None


# ---- signals


def draw_recording(record: Record, report: IngestReport) -> list[Figure]:
    """The first half minute of a recording, then all of it as an envelope, with its labels on the
    same axis.
    """
    channels = group_by(record.signals, lambda signal: signal.channel)
    omitted = ""
    if len(channels) > MAX_CHANNELS:
        omitted = f" The first {MAX_CHANNELS} of {len(channels)} channels."
        channels = dict(list(channels.items())[:MAX_CHANNELS])
    seconds = max(signal.onset + len(signal.samples) / signal.rate for signal in record.signals)
    end = max([seconds, *(note.onset + note.duration for note in record.annotations)])
    lanes = _make_lanes(record, report)
    start = min(signal.onset for signal in record.signals)
    if end <= SHORT:
        title, plot = "The first recording", _plot_excerpt(channels, start, end, lanes)
        return [_excerpt_figure(title, omitted, plot)]
    stop = min(end, start + EXCERPT)
    title = f"Its first {stop - start:.3g} seconds"
    labels = ""
    if lanes is not None:
        labels = (
            " Below: the labels on the same axis. They should change with the signals; a hypnogram "
            "that is shifted, too short or too long shows here."
        )
    interval = format_duration(end / COLUMNS)
    envelopes = [
        Trace(name, _measure_envelope(signals, end), signals[0].unit)
        for name, signals in channels.items()
    ]
    overview = Figure(
        "overview",
        "All of it",
        f"{format_duration(seconds)}: lowest and highest value of each of {COLUMNS} intervals of "
        f"{interval}.{labels}{omitted}",
        TracePlot(2 * COLUMNS / end, envelopes, lanes=lanes),
    )
    return [_excerpt_figure(title, omitted, _plot_excerpt(channels, start, stop, None)), overview]


def _plot_excerpt(
    channels: Mapping[str, Sequence[Signal]], start: float, stop: float, lanes: SpanLanes | None
) -> TracePlot:
    """The channels from `start` to `stop` seconds, at the rate of the fastest."""
    rate = max(signal.rate for signals in channels.values() for signal in signals)
    traces = [
        Trace(name, _resample_segments(signals, rate, start, stop), signals[0].unit)
        for name, signals in channels.items()
    ]
    return TracePlot(rate, traces, lanes=lanes)


def _excerpt_figure(title: str, omitted: str, plot: TracePlot) -> Figure:
    return Figure(
        "excerpt",
        title,
        "Physical units, each channel on its own scale. To check: upright heartbeats, an EEG of "
        f"tens of microvolts, no swapped channels.{omitted}",
        plot,
    )


def _to_physical(signal: Signal, first: int, stop: int) -> np.ndarray:
    return signal.samples[first:stop].astype(np.float64) * signal.scale + signal.offset


def _resample_segments(
    signals: Sequence[Signal], rate: float, start: float, stop: float
) -> np.ndarray:
    """Physical values of the segments of a channel at `rate` from `start` to `stop` seconds, slow
    ones held; NaN in gaps.
    """
    times = start + np.arange(round((stop - start) * rate)) / rate
    values = np.full(len(times), np.nan)
    for signal in signals:
        index = np.floor((times - signal.onset) * signal.rate + 1e-6).astype(np.int64)
        is_inside = (index >= 0) & (index < len(signal.samples))
        index = index[is_inside]
        if len(index):
            physical = _to_physical(signal, int(index[0]), int(index[-1]) + 1)
            values[is_inside] = physical[index - index[0]]
    return values


def _measure_envelope(signals: Sequence[Signal], end: float) -> np.ndarray:
    """Lowest and highest physical value, in turn, of each of COLUMNS intervals from 0 to `end`
    seconds; NaN in gaps.
    """
    edges = np.linspace(0.0, end, COLUMNS + 1)
    low, high = np.full(COLUMNS, np.nan), np.full(COLUMNS, np.nan)
    for signal in signals:
        index = np.floor((edges - signal.onset) * signal.rate + 1e-6).astype(np.int64).tolist()
        for k, (first, stop) in enumerate(pairwise(index)):
            values = _to_physical(signal, max(first, 0), max(stop, first + 1, 0))
            values = values[~np.isnan(values)]
            if len(values) and first < len(signal.samples):
                low[k], high[k] = np.fmin(low[k], values.min()), np.fmax(high[k], values.max())
    return np.stack([low, high], axis=1).reshape(-1)
