"""Drawings over time with matplotlib: traces, hypnograms, hypnodensities and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.page import (
    DensityPlot,
    Hypnogram,
    SpanLanes,
    TimelinePlot,
    TimeSpan,
    Trace,
    TracePlot,
)
from bitimely_core.report.canvas import (
    COLUMNS,
    INK,
    MUTED,
    SERIES,
    add_legend,
    draw_data,
    name_rows,
    new_canvas,
    reduce_trace,
    separate_strokes,
    set_plain_ticks,
)
from bitimely_core.report.numbers import (
    Array,
    join_field,
    join_parts,
    stage_indices,
    to_array,
    to_texts,
)
from bitimely_core.report.text import clean_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# stages from top to bottom, as hypnograms are drawn
DEPTH = ("W", "R", "REM", "N1", "N2", "N3", "N4")


class TimeUnit(NamedTuple):
    """The unit of a time axis."""

    name: str
    seconds: float


def _choose_unit(seconds: float) -> TimeUnit:
    """The unit for an axis of that length."""
    if seconds > 2 * 3600:
        return TimeUnit("hours", 3600.0)
    return TimeUnit("minutes", 60.0) if seconds > 300 else TimeUnit("seconds", 1.0)


def _hide_time_axis(axes: Axes) -> None:
    """No line and no ticks below axes that share the time axis of others."""
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)


# ---- traces


@draw_data.register(TracePlot)
def _draw_traces(data: TracePlot) -> Canvas:
    count = max(len(data.signals), 1)
    length = max((len(signal.values) for signal in data.signals), default=1) / float(data.rate)
    unit = _choose_unit(length)
    heights = [0.85 if count <= 8 else 0.6] * count
    if data.lanes:
        heights.append(0.2 + 0.17 * max(len(data.lanes.names), 2))
    canvas = new_canvas(0.5 + sum(heights))
    canvas.get_layout_engine().set(hspace=0.0, h_pad=0.02)  # type: ignore[union-attr, call-arg]
    grid = canvas.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    if data.lanes:
        _draw_lanes(grid[-1], data.lanes, unit)
    for axes, signal in zip(grid, data.signals, strict=False):
        _draw_trace(axes, signal, float(data.rate), data.spans, unit)
        if axes is not grid[-1]:
            _hide_time_axis(axes)
    for span in data.spans:
        grid[0].annotate(
            clean_text(span.name, 32),
            ((span.start + span.stop) / 2 / unit.seconds, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=SERIES[1],
        )
    grid[-1].set_xlabel(unit.name)
    canvas.align_ylabels(grid[:count])
    return canvas


def _draw_trace(
    axes: Axes, signal: Trace, rate: float, spans: Sequence[TimeSpan], unit: TimeUnit
) -> None:
    """A signal on its own scale, with the spans shaded behind it."""
    for span in spans:
        start, stop = span.start / unit.seconds, span.stop / unit.seconds
        axes.axvspan(start, stop, color=SERIES[1], alpha=0.16, linewidth=0)
    index, values = reduce_trace(to_array(signal.values))
    colour = SERIES[0] if signal.accent else INK
    axes.plot(index / rate / unit.seconds, values, color=colour, linewidth=0.6)
    label = clean_text(signal.name, 24)
    if signal.unit:
        label += f"\n{clean_text(signal.unit, 12)}"
    axes.set_ylabel(label, rotation=0, ha="right", va="center", color=INK)
    axes.locator_params(axis="y", nbins=3)
    axes.margins(x=0, y=0.08)
    set_plain_ticks(axes.xaxis, axes.yaxis)


def _draw_lanes(axes: Axes, lanes: SpanLanes, unit: TimeUnit) -> None:
    """Time spans, a line for each name; instants as ticks."""
    for k, name in enumerate(lanes.names):
        spans = [span for span in lanes.spans if span.name == name]
        strokes = separate_strokes(
            (span.start / unit.seconds, span.stop / unit.seconds)
            for span in spans
            if span.stop > span.start
        )
        instants = [span.start / unit.seconds for span in spans if span.stop <= span.start]
        colour = SERIES[k % 8]
        y = [-k] * len(strokes)
        axes.plot(strokes, y, color=colour, linewidth=4, solid_capstyle="butt")
        axes.plot(
            instants,
            [-k] * len(instants),
            linestyle="",
            marker="|",
            markersize=5,
            markeredgewidth=0.8,
            color=colour,
        )
    name_rows(axes, -np.arange(len(lanes.names)), to_texts(lanes.names, 24))
    axes.set_ylim(0.6 - max(len(lanes.names), 2), 0.6)
    axes.margins(x=0)
    axes.spines["left"].set_visible(False)
    set_plain_ticks(axes.xaxis)


# ---- classes of epochs


class StageRun(NamedTuple):
    """Successive epochs of one class; start and stop in units of the time axis."""

    start: float
    stop: float
    stage: int  # number of the class


def _sort_stages(classes: Sequence[str]) -> list[int]:
    """Positions of sleep stages as hypnograms are drawn; other classes keep their order."""
    positions = range(len(classes))
    if not set(classes) <= set(DEPTH):
        return list(positions)
    return sorted(positions, key=lambda k: DEPTH.index(classes[k]))


def _list_runs(stages: Array, epoch: float, unit: TimeUnit) -> list[StageRun]:
    """The runs of a track of class numbers [n]; epochs without a class are in none."""
    edges = [0, *(np.flatnonzero(np.diff(stages)) + 1).tolist(), len(stages)]
    runs = [
        StageRun(start * epoch / unit.seconds, stop * epoch / unit.seconds, int(stages[start]))
        for start, stop in pairwise(edges)
        if start < stop
    ]
    return [run for run in runs if run.stage >= 0]


@draw_data.register(Hypnogram)
def _draw_hypnogram(data: Hypnogram) -> Canvas:
    """Tracks of classes below each other; between two tracks, where they differ."""
    count, epoch = max(len(data.tracks), 1), float(data.epoch)
    tracks = [stage_indices(track, data.classes) for track in data.tracks]
    length = max(map(len, tracks), default=1) * epoch
    unit = _choose_unit(length)
    heights, height = [1.0] * count, 0.5 + 0.19 * max(len(data.classes), 3) * len(tracks)
    if len(tracks) == 2:
        heights, height = [1.0, 0.13, 1.0], height + 0.2
    canvas = new_canvas(height)
    grid = canvas.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    panels = [grid[0], grid[-1]] if len(tracks) == 2 else list(grid[: len(tracks)])
    for axes, stages, track in zip(panels, tracks, data.tracks, strict=True):
        _draw_track(axes, _list_runs(stages, epoch, unit), data.classes)
        axes.set_ylabel(clean_text(track.name, 24), color=INK)
        if axes is not panels[-1]:
            _hide_time_axis(axes)
    if len(tracks) == 2:
        _mark_differences(grid[1], tracks, epoch, unit)
    grid[-1].set_xlim(0, length / unit.seconds)
    set_plain_ticks(grid[-1].xaxis)
    grid[-1].set_xlabel(unit.name)
    canvas.align_ylabels(panels)
    return canvas


def _draw_track(axes: Axes, runs: Sequence[StageRun], classes: Sequence[str]) -> None:
    """A line for each class, in the order of sleep stages, with thin lines where a run follows on
    another.
    """
    order = _sort_stages(classes)
    heights = {k: -place for place, k in enumerate(order)}
    jumps = [(run, after) for run, after in pairwise(runs) if run.stop == after.start]
    x = separate_strokes((run.stop, run.stop) for run, _ in jumps)
    y = separate_strokes((heights[run.stage], heights[after.stage]) for run, after in jumps)
    axes.plot(x, y, color=MUTED, linewidth=0.5)
    for k in range(len(classes)):
        x = separate_strokes((run.start, run.stop) for run in runs if run.stage == k)
        colour = SERIES[-heights[k] % 8]
        axes.plot(x, [heights[k]] * len(x), color=colour, linewidth=2.6, solid_capstyle="butt")
    axes.set_yticks([heights[k] for k in order], [clean_text(classes[k], 12) for k in order])
    axes.set_ylim(0.6 - len(classes), 0.6)
    axes.grid(axis="y", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _mark_differences(axes: Axes, tracks: Sequence[Array], epoch: float, unit: TimeUnit) -> None:
    """Bars over the epochs in which two tracks have different classes."""
    length = min(map(len, tracks))
    first, second = (track[:length] for track in tracks)
    differs = (first != second) & (first >= 0) & (second >= 0)
    runs = _list_runs(np.where(differs, 0, -1), epoch, unit)
    x = separate_strokes((run.start, run.stop) for run in runs)
    axes.plot(x, [0.0] * len(x), color=SERIES[1], linewidth=7, solid_capstyle="butt")
    axes.set_yticks([])
    axes.set_ylabel("differ", rotation=0, ha="right", va="center")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", length=0)


@draw_data.register(DensityPlot)
def _draw_density(data: DensityPlot) -> Canvas:
    """Stacked areas in the order and the colours of the hypnogram; of many epochs the mean of each
    pixel column.
    """
    values, order = np.asarray(data.values, np.float64), _sort_stages(data.classes)
    unit = _choose_unit(len(values) * data.epoch)
    size = max(1, -(-len(values) // COLUMNS))
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    means = np.array([np.nanmean(block, axis=0) for block in blocks])  # NaN: a gap
    edges = np.arange(len(blocks) + 1) * size * data.epoch / unit.seconds
    canvas = new_canvas(1.9)
    axes = canvas.add_subplot()
    below = np.zeros(len(blocks))
    handles = []
    for place, k in enumerate(order):
        above = below + means[:, k]
        low, high = np.append(below, below[-1]), np.append(above, above[-1])
        colour = SERIES[place % 8]
        handles.append(axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0))
        below = above
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1), xlabel=unit.name, ylabel="probability")
    set_plain_ticks(axes.xaxis, axes.yaxis)
    names = [data.classes[k] for k in order]
    add_legend(canvas, handles, names, 20, ncols=len(names), handlelength=1.0)
    return canvas


# ---- events


@draw_data.register(TimelinePlot)
def _draw_timelines(data: TimelinePlot) -> Canvas:
    """A line of ticks for each subject, in the colours of the groups."""
    lanes = data.lanes
    canvas = new_canvas(0.9 + 0.24 * max(len(lanes), 1))
    axes = canvas.add_subplot()
    times = join_field(lanes, "times")
    groups = join_parts((np.asarray(lane.groups, int) for lane in lanes), int)
    heights = np.repeat(np.arange(len(lanes)), [len(lane.times) for lane in lanes])
    handles = []
    for k in range(len(data.groups)):  # the first is the background
        colour, size = (SERIES[(k - 1) % 8], 8.0) if k else (MUTED, 5.0)
        handles += axes.plot(
            times[groups == k],
            heights[groups == k],
            linestyle="",
            marker="|",
            color=colour,
            markersize=size,
            markeredgewidth=1.1,
        )
    name_rows(axes, range(len(lanes)), to_texts((lane.name for lane in lanes), 32))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel(clean_text(data.xlabel))
    set_plain_ticks(axes.xaxis)
    add_legend(canvas, handles, data.groups, ncols=4, columnspacing=1.6)
    return canvas
