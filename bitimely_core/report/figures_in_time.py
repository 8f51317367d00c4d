"""Drawings over time with matplotlib: traces and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bitimely_core.page import SpanLanes, TimelinePlot, TimeSpan, Trace, TracePlot
from bitimely_core.report.canvas import (
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
from bitimely_core.report.numbers import join_field, join_parts, to_array, to_texts
from bitimely_core.report.page_text import clean_text
from bitimely_core.report.plain_figures import TimeUnit, choose_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


def _hide_time_axis(axes: Axes) -> None:
    """No line and no ticks below axes that share the time axis of others."""
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)


# ---- traces


@draw_data.register(TracePlot)
def _draw_traces(data: TracePlot) -> Canvas:
    count = max(len(data.signals), 1)
    length = max((len(signal.values) for signal in data.signals), default=1) / float(data.rate)
    unit = choose_unit(length)
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
