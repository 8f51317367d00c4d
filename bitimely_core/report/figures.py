"""Drawing of each kind of figure with matplotlib, without global state and without a display."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitimely_core.page import (
    BarPlot,
    DensityPlot,
    FlowPlot,
    ForestPlot,
    HeatMap,
    Hypnogram,
    LinePlot,
    RankPlot,
    ScatterPlot,
    SpanLanes,
    TimelinePlot,
    TracePlot,
)
from bitimely_core.report.numbers import Array, matrix_panels, stage_indices, to_array
from bitimely_core.report.text import clean_text, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas

PIXELS = 240  # rows and columns of a drawn matrix
COLUMNS = 620  # pixel columns of a drawn trace
WIDTH = 7.5  # inches of a drawing

# Colours on white; in the page each becomes a variable of that name, which the dark scheme sets to
# the second one.
COLOURS = {
    "ink": ("#1d2329", "#e7e3da"),
    "muted": ("#5a636b", "#a3a8ac"),
    "rule": ("#dcd8ce", "#363b40"),
    "paper": ("#fdfcf9", "#15181b"),
    "s1": ("#1f5f8b", "#74b3e2"),
    "s2": ("#b5532a", "#f0a079"),
    "s3": ("#3f7d55", "#83c99a"),
    "s4": ("#7d5ba6", "#c0a3e8"),
    "s5": ("#a77f12", "#dfbd5c"),
    "s6": ("#2b8a8a", "#73cfcb"),
    "s7": ("#a03a5d", "#e98bab"),
    "s8": ("#6b747b", "#b3bbc0"),
}
INK, MUTED, RULE, PAPER = (COLOURS[name][0] for name in ("ink", "muted", "rule", "paper"))
SERIES = [COLOURS[f"s{k}"][0] for k in range(1, 9)]
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]
SEQUENTIAL = ["#f7f5ef", "#cfdde6", "#8fb3cc", "#3f7fa8", "#123f63"]
DIVERGING = ["#8c3b16", "#d9926a", "#f7f5ef", "#7fa9c6", "#123f63"]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a channel may be called "$x_1"
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    **{
        f"{axis}tick.{k}": v
        for axis in "xy"
        for k, v in (("color", MUTED), ("labelsize", 7), ("major.size", 2.5), ("major.width", 0.6))
    },
    "axes.unicode_minus": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "path.simplify": False,
}


def format_tick(value: float, _: int = 0) -> str:
    """The label of a tick: plain text."""
    return f"{value:.6g}".replace("-", "−")


def _format_decade(value: float, _: int = 0) -> str:
    exponent = math.log10(value) if value > 0 else math.nan
    if abs(exponent - round(exponent)) > 1e-6:
        return ""
    return (
        format_tick(value)
        if -3 <= exponent <= 4
        else "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    )


def _set_plain_ticks(*axes: Axis, log: bool = False) -> None:
    """Tick labels as plain text instead of matplotlib's mathematics."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in axes:
        axis.set_major_formatter(FuncFormatter(_format_decade if log else format_tick))
        axis.set_minor_formatter(NullFormatter())


def _add_legend(
    canvas: Canvas, handles: Sequence[Any], names: Iterable[str], limit: int = 60, **options: Any
) -> None:
    labels = [" " + clean_text(name, limit) for name in names]  # a leading underscore would hide it
    canvas.legend(handles, labels, loc="outside upper left", frameon=False, **options)


def reduce_trace(values: Array) -> tuple[Array, Array]:
    """The smallest and the largest sample of each of `COLUMNS` pixel columns of a trace [n] (NaN:
    not measured), so that spikes remain.

    Returns their indices [m] in order of time (m = n up to 2 `COLUMNS`) and the values there.
    """
    n = len(values)
    if n <= 2 * COLUMNS:
        return np.arange(n), values
    edges = np.linspace(0, n, COLUMNS + 1).astype(int)
    low, high = (
        np.where(np.isnan(values), np.inf, values),
        np.where(np.isnan(values), -np.inf, values),
    )
    index = np.unique(
        np.concatenate(
            [[a + low[a:b].argmin(), a + high[a:b].argmax()] for a, b in itertools.pairwise(edges)]
        )
    )
    return index, values[index]


def reduce_matrix(values: Array) -> Array:
    """A matrix [R, C] at no more than `PIXELS` rows and columns: of each block the entry of largest
    magnitude, with its sign.
    """
    for axis in (0, 1):
        n = values.shape[axis]
        if n > PIXELS:
            size = -(-n // PIXELS)
            values = np.moveaxis(values, axis, 0)
            padded = np.concatenate([values, np.full((-n % size, *values.shape[1:]), np.nan)])
            grouped = padded.reshape(-1, size, *values.shape[1:])
            strongest = np.where(np.isnan(grouped), -1.0, np.abs(grouped)).argmax(1)
            values = np.moveaxis(np.take_along_axis(grouped, strongest[:, None], 1)[:, 0], 0, axis)
    return values


def _new_canvas(
    size: tuple[float, float], layout: Literal["constrained", "compressed"] = "constrained"
) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=size, layout=layout)


def _name_rows(
    axes: Axes, places: Sequence[float] | Array, names: Sequence[str], grid: float = 0.5
) -> None:
    """Names at the vertical axis instead of ticks, with horizontal lines of width `grid` behind the
    data (0: none).
    """
    axes.set_yticks(places, names, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="y", color=RULE, linewidth=grid)


def _draw_lines(data: LinePlot) -> Canvas:
    series = data.series
    canvas = _new_canvas((WIDTH, 3.3 if len(series) <= 8 else 3.8))
    axes = canvas.add_subplot()
    handles = []
    for k, s in enumerate(series):
        x, y = to_array(s.x), to_array(s.y)
        colour, dash = (MUTED, DASHES[1]) if s.reference else (SERIES[k % 8], DASHES[k // 8 % 4])
        index, _ = reduce_trace(y)
        if s.lo is not None:
            axes.fill_between(
                x[index],
                to_array(s.lo)[index],
                to_array(s.hi)[index],
                color=colour,
                alpha=0.16,
                linewidth=0,
            )
        marker = "o" if len(x) <= 12 and not s.reference else ""
        handles += axes.plot(
            x[index],
            y[index],
            color=colour,
            linestyle=dash,
            linewidth=1.3,
            marker=marker,
            markersize=3.2,
        )
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    logx, logy = (
        is_log and any((to_array(getattr(s, k)) > 0).any() for s in series)
        for k, is_log in (("x", data.logx), ("y", data.logy))
    )
    if logx:
        axes.set_xscale("log")
    if logy:
        axes.set_yscale("log")
    axes.set(xlabel=clean_text(data.xlabel), ylabel=clean_text(data.ylabel))
    axes.margins(x=0.02)
    _set_plain_ticks(axes.xaxis, log=logx)
    _set_plain_ticks(axes.yaxis, log=logy)
    every = np.concatenate([np.empty(0), *(to_array(s.x) for s in series)])
    if logx and len(np.unique(every)) <= 10:  # a handful of lengths: each by its number
        axes.set_xticks(np.unique(every), [format_tick(v) for v in np.unique(every)])
        axes.set_xticks([], minor=True)
    if every.size and not logx and (every % 1 == 0).all():
        axes.locator_params(axis="x", integer=True)
    if len(series) > 1 or (series and series[0].name):
        _add_legend(
            canvas,
            handles,
            [s.name for s in series],
            ncols=min(len(series), 4),
            handlelength=2.2,
            columnspacing=1.6,
        )
    return canvas


def _draw_matrix(data: HeatMap) -> tuple[Canvas, str]:
    from matplotlib.colors import LinearSegmentedColormap

    values, names = matrix_panels(data)
    m, r, c = values.shape
    finite = values[np.isfinite(values)]
    size = np.abs(finite)
    diverging, named = (
        data.diverging,
        max(r, c) <= 16 and (data.row_names is not None or data.column_names is not None),
    )
    largest = top = float(size.max(initial=0.0)) or 1.0
    if size.size >= 100 and not named:
        # a single spike must not compress the scale
        top = float(np.quantile(size, 0.995)) or largest
    low = -top if diverging else float(finite.min(initial=0.0))
    # an odd number of colours, so that zero has its own; few of them, so that the picture is small
    palette = LinearSegmentedColormap.from_list(
        "bitimely", DIVERGING if diverging else SEQUENTIAL, N=63
    )
    palette.set_bad(RULE)
    across = min(m, 4)
    down = -(-m // across)
    wide = WIDTH if m > 1 else min(WIDTH, 1.4 + 0.5 * c) if named else 4.8
    shape = min(max(r / c, 0.35), 1.4) if not named else r / c
    canvas = _new_canvas(
        (wide, down * ((wide - 1.0) / across * shape + 0.3) + 0.5), layout="compressed"
    )
    grid = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for k, axes in enumerate(grid.flat):
        if k >= m:
            axes.set_visible(False)
            continue
        picture = axes.imshow(
            reduce_matrix(values[k]),
            cmap=palette,
            vmin=low,
            vmax=top,
            interpolation="none",
            extent=(-0.5, c - 0.5, r - 0.5, -0.5),
            aspect="equal" if named or 0.35 <= r / c <= 1.4 else "auto",
        )
        axes.spines[["top", "right"]].set_visible(True)
        if m > 1:
            axes.set_title(names[k], loc="left", color=INK)
        for edge in data.mark or ():
            axes.axvline(edge, color=INK, linewidth=0.7, linestyle=DASHES[1])
        if named:
            _label_cells(axes, values[k], low, top, data)
        else:
            _set_plain_ticks(axes.xaxis, axes.yaxis)
            axes.locator_params(nbins=4 if m > 1 else 6, integer=True)
        if k >= m - across:
            axes.set_xlabel(clean_text(data.xlabel))
            axes.tick_params(labelbottom=True)
        if k % across == 0:
            axes.set_ylabel(clean_text(data.ylabel))
    if named or not size.size:
        return canvas, ""
    ticks = [low, (low + top) / 2, top]
    bar = canvas.colorbar(picture, ax=grid, shrink=0.6, aspect=24, pad=0.02, ticks=ticks)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    clipped = largest > top
    ends = [format_tick(float(f"{v:.3g}")) for v in ticks]
    bar.ax.set_yticklabels(
        [
            ("≤ " if clipped and diverging else "") + ends[0],
            ends[1],
            ("≥ " if clipped else "") + ends[2],
        ]
    )
    bar.ax.tick_params(length=0)
    note = f"Colours saturate at {ends[2]}, the 99.5th percentile of magnitudes." if clipped else ""
    if max(r, c) > PIXELS:
        note += (
            f" Drawn by the strongest entry of each block; the file holds all {r:,} × {c:,} values."
        )
    return canvas, note.strip()


def _label_cells(axes: Axes, values: Array, low: float, top: float, data: HeatMap) -> None:
    """Names along a small matrix and the number in every cell, light on dark."""
    r, c = values.shape
    axes.set_xticks(
        range(c),
        [clean_text(n, 24) for n in data.column_names or range(c)],
        rotation=0 if c <= 8 else 60,
    )
    axes.set_yticks(range(r), [clean_text(n, 24) for n in data.row_names or range(r)])
    axes.tick_params(length=0)
    integers = bool((values[np.isfinite(values)] % 1 == 0).all())
    for i in range(r):
        for j in range(c):
            value = float(values[i, j])
            share = abs(value) / top if low < 0 else (value - low) / (top - low or 1.0)
            shown = (
                f"{int(value):,}"
                if integers and math.isfinite(value)
                else format_number(value, 2 if top <= 10 else None)
            )
            axes.text(
                j,
                i,
                shown,
                ha="center",
                va="center",
                color=PAPER if share > 0.55 else INK,
                fontsize=7,
            )


def _draw_bars(data: BarPlot) -> Canvas:
    values, n = to_array(data.values), len(data.values)
    canvas = _new_canvas((WIDTH, 0.62 + 0.25 * max(n, 1)))
    axes = canvas.add_subplot()
    y = np.arange(n)
    axes.barh(y, np.nan_to_num(values), height=0.5, color=SERIES[0], linewidth=0)
    if data.lo is not None and data.hi is not None:
        axes.hlines(y, to_array(data.lo), to_array(data.hi), color=INK, linewidth=1.1)
    _name_rows(axes, y, [clean_text(name, 48) for name in data.names], 0)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(not (values < 0).any())
    axes.axvline(0, color=MUTED, linewidth=0.6)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_xlabel(clean_text(data.ylabel))
    _set_plain_ticks(axes.xaxis)
    return canvas


def _select_time_unit(seconds: float) -> tuple[float, str]:
    """Seconds per unit of a time axis of that length, and the name of the unit."""
    return (
        (3600.0, "hours")
        if seconds > 2 * 3600
        else (60.0, "minutes")
        if seconds > 300
        else (1.0, "seconds")
    )


def _draw_traces(data: TracePlot) -> Canvas:
    signals = data.signals
    n, rate = max(len(signals), 1), float(data.rate)
    length = max((len(s.values) for s in signals), default=1) / rate
    per, unit = _select_time_unit(length)
    lanes = data.lanes
    tall = [0.85 if n <= 8 else 0.6] * n + (
        [0.2 + 0.17 * max(len(lanes.names), 2)] if lanes else []
    )
    canvas = _new_canvas((WIDTH, 0.5 + sum(tall)))
    canvas.get_layout_engine().set(hspace=0.0, h_pad=0.02)  # type: ignore[union-attr, call-arg]
    grid = canvas.subplots(len(tall), 1, squeeze=False, sharex=True, height_ratios=tall)[:, 0]
    if lanes:
        _draw_lanes(grid[-1], lanes, per)
    for axes, s in zip(grid[:n], signals, strict=False):
        index, drawn = reduce_trace(to_array(s.values))
        for span in data.spans:
            axes.axvspan(
                span.start / per, span.stop / per, color=SERIES[1], alpha=0.16, linewidth=0
            )
        axes.plot(
            index / rate / per, drawn, color=INK if not s.accent else SERIES[0], linewidth=0.6
        )
        measured = clean_text(s.name, 24) + (f"\n{clean_text(s.unit, 12)}" if s.unit else "")
        axes.set_ylabel(measured, rotation=0, ha="right", va="center", color=INK)
        axes.locator_params(axis="y", nbins=3)
        axes.margins(x=0, y=0.08)
        _set_plain_ticks(axes.xaxis, axes.yaxis)
        if axes is not grid[-1]:
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="x", length=0)
    for span in data.spans:
        at, place = ((span.start + span.stop) / 2 / per, 1), ("data", "axes fraction")
        grid[0].annotate(
            clean_text(span.name, 32), at, xycoords=place, ha="center", va="bottom", color=SERIES[1]
        )
    grid[-1].set_xlabel(unit)
    canvas.align_ylabels(grid[:n])
    return canvas


def _draw_lanes(axes: Axes, lanes: SpanLanes, per: float) -> None:
    """Time spans, a line for each name; instants as ticks."""
    names = list(lanes.names)
    for k, name in enumerate(names):
        spans = [(s.start / per, s.stop / per) for s in lanes.spans if s.name == name]
        colour = SERIES[k % 8]
        long = [(a, b) for a, b in spans if b > a]
        axes.plot(
            [v for a, b in long for v in (a, b, np.nan)],
            [-k] * 3 * len(long),
            color=colour,
            linewidth=4,
            solid_capstyle="butt",
        )
        points = [a for a, b in spans if b <= a]
        axes.plot(
            points,
            [-k] * len(points),
            linestyle="",
            marker="|",
            markersize=5,
            markeredgewidth=0.8,
            color=colour,
        )
    _name_rows(axes, [-k for k in range(len(names))], [clean_text(name, 24) for name in names])
    axes.set_ylim(0.6 - max(len(names), 2), 0.6)
    axes.margins(x=0)
    axes.spines["left"].set_visible(False)
    _set_plain_ticks(axes.xaxis)


def _sort_stages(classes: Sequence[str]) -> list[int]:
    """Positions of sleep stages as hypnograms are drawn; other classes keep their order."""
    depth = ["W", "R", "REM", "N1", "N2", "N3", "N4"]
    return (
        sorted(range(len(classes)), key=lambda k: depth.index(classes[k]))
        if set(classes) <= set(depth)
        else list(range(len(classes)))
    )


def _draw_hypnogram(data: Hypnogram) -> Canvas:
    classes, epoch = list(data.classes), float(data.epoch)
    order = _sort_stages(classes)
    height = {k: -place for place, k in enumerate(order)}
    tracks = [(clean_text(t.name, 24), stage_indices(t, classes)) for t in data.tracks]
    length = max((len(s) for _, s in tracks), default=1)
    per, unit = _select_time_unit(length * epoch)
    pair = len(tracks) == 2
    heights = [1.0] * max(len(tracks), 1)
    if pair:
        heights.insert(1, 0.13)
    canvas = _new_canvas(
        (WIDTH, 0.5 + 0.19 * max(len(classes), 3) * len(tracks) + (0.2 if pair else 0.0))
    )
    grid = canvas.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    panels = [grid[0], grid[-1]] if pair else list(grid[: len(tracks)])
    gap = [np.nan]  # breaks a line: one path a class keeps the drawing small
    for axes, (name, stages) in zip(panels, tracks, strict=True):
        edges = [0, *(np.flatnonzero(np.diff(stages)) + 1).tolist(), len(stages)]
        held = [
            (a * epoch / per, b * epoch / per, int(stages[a]))
            for a, b in itertools.pairwise(edges)
            if a < b and stages[a] >= 0
        ]
        jumps = [
            (stop, height[k], height[following])
            for (_, stop, k), (start, _, following) in itertools.pairwise(held)
            if stop == start
        ]
        x, y = (
            [v for x, _, _ in jumps for v in (x, x, *gap)],
            [v for _, y, z in jumps for v in (y, z, *gap)],
        )
        axes.plot(x, y, color=MUTED, linewidth=0.5)
        for k in range(len(classes)):
            x = [v for a, b, which in held if which == k for v in (a, b, *gap)]
            colour = SERIES[order.index(k) % 8]
            axes.plot(x, [height[k]] * len(x), color=colour, linewidth=2.6, solid_capstyle="butt")
        axes.set_yticks([height[k] for k in order], [clean_text(classes[k], 12) for k in order])
        axes.set_ylim(0.6 - len(classes), 0.6)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_ylabel(name, color=INK)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        if axes is not panels[-1]:
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="x", length=0)
    if pair:
        first, second = tracks[0][1], tracks[1][1]
        both = min(len(first), len(second))
        differ = (first[:both] != second[:both]) & (first[:both] >= 0) & (second[:both] >= 0)
        steps = np.flatnonzero(np.diff(np.concatenate([[0], differ.astype(int), [0]]))).tolist()
        x = [
            v * epoch / per
            for a, b in zip(steps[::2], steps[1::2], strict=True)
            for v in (a, b, *gap)
        ]
        grid[1].plot(x, [0.0] * len(x), color=SERIES[1], linewidth=7, solid_capstyle="butt")
        grid[1].set_yticks([])
        grid[1].set_ylabel("differ", rotation=0, ha="right", va="center")
        grid[1].spines[["left", "bottom"]].set_visible(False)
        grid[1].tick_params(axis="x", length=0)
    grid[-1].set_xlim(0, length * epoch / per)
    _set_plain_ticks(grid[-1].xaxis)
    grid[-1].set_xlabel(unit)
    canvas.align_ylabels(panels)
    return canvas


def _draw_timelines(data: TimelinePlot) -> Canvas:
    lanes = data.lanes
    canvas = _new_canvas((WIDTH, 0.9 + 0.24 * max(len(lanes), 1)))
    axes = canvas.add_subplot()
    handles = []
    for k in range(len(data.groups)):  # the first is the background
        at = [
            (x, y)
            for y, lane in enumerate(lanes)
            for x, of in zip(lane.times, lane.groups, strict=True)
            if of == k
        ]
        colour, size = (MUTED, 5.0) if k == 0 else (SERIES[(k - 1) % 8], 8.0)
        x, y = [x for x, _ in at], [y for _, y in at]
        handles += axes.plot(
            x, y, linestyle="", marker="|", color=colour, markersize=size, markeredgewidth=1.1
        )
    _name_rows(axes, range(len(lanes)), [clean_text(lane.name, 32) for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel(clean_text(data.xlabel))
    _set_plain_ticks(axes.xaxis)
    _add_legend(canvas, handles, data.groups, ncols=4, columnspacing=1.6)
    return canvas


_CIRCLE = [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 9).tolist()]
# strokes that distinguish groups without colour; (nan, nan) lifts the pen
GLYPHS: list[list[tuple[float, float]]] = [
    [(0, 0), (0, 0)],
    [(-1, 0), (1, 0), (math.nan, math.nan), (0, -1), (0, 1)],
    [(-0.8, -0.7), (0.8, -0.7), (0, 0.9), (-0.8, -0.7)],
    [(-0.8, -0.8), (0.8, 0.8), (math.nan, math.nan), (-0.8, 0.8), (0.8, -0.8)],
    [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7), (-0.7, -0.7)],
    [(x * 0.9, y * 0.9) for x, y in _CIRCLE],
    [(0, -1), (0, 1)],
    [(-1, 0), (1, 0)],
]


def _draw_scatter(data: ScatterPlot) -> Canvas:
    """Points in panels, a colour and a glyph a group; each group is one path, so that thousands of
    points stay small.
    """
    panels, groups = data.panels, list(data.groups)
    across = min(max(len(panels), 1), 3)
    down = -(-max(len(panels), 1) // across)
    wide = WIDTH if across > 1 else 4.8
    canvas = _new_canvas((wide, down * (wide / across * 0.95 + 0.25) + 0.45))
    grid = canvas.subplots(down, across, squeeze=False)
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_visible(False)
            continue
        x, y, of = to_array(panel.x), to_array(panel.y), np.asarray(panel.group, dtype=np.int64)
        spans = [
            float(np.nanmax(v) - np.nanmin(v)) or 1.0 if len(v) and np.isfinite(v).any() else 1.0
            for v in (x, y)
        ]
        for k in [-1, *range(len(groups))]:
            here = of == k
            glyph = np.array(GLYPHS[k % len(GLYPHS)] if k >= 0 else GLYPHS[0])
            pen = np.vstack([glyph, [[np.nan, np.nan]]]) * 0.011 * np.array(spans)
            size = 2.6 if k < 0 or k % len(GLYPHS) == 0 else 0.8
            colour, alpha = (MUTED, 0.35) if k < 0 else (SERIES[k % len(SERIES)], 0.9)
            at = (x[here, None] + pen[:, 0]).ravel(), (y[here, None] + pen[:, 1]).ravel()
            axes.plot(*at, color=colour, linewidth=size, alpha=alpha, solid_capstyle="round")
        axes.set_title(clean_text(panel.name, 60), loc="left", color=INK)
        if data.ticks:
            _set_plain_ticks(axes.xaxis, axes.yaxis)
        else:
            axes.set(xticks=[], yticks=[])
        axes.set(xlabel=clean_text(data.xlabel), ylabel=clean_text(data.ylabel))
    if groups and panels:
        from matplotlib.lines import Line2D

        shapes = [("o", "full"), *((mark, "none") for mark in "+^xso|_")]
        styles: list[dict[str, Any]] = [
            {"marker": mark, "fillstyle": fill, "color": SERIES[k]}
            for k, (mark, fill) in enumerate(shapes)
        ]
        keys = [
            Line2D([], [], linestyle="", markersize=4.5, **styles[k % 8])
            for k in range(len(groups))
        ]
        ncols = len(groups) if len(groups) <= 6 else 4
        _add_legend(canvas, keys, groups, 40, ncols=ncols, handlelength=1.2, columnspacing=1.4)
    return canvas


def _draw_forest(data: ForestPlot) -> Canvas:
    """A dot and an interval for each name, in panels that share the names; hollow marks for the
    values compared to.
    """
    panels, names = data.panels, [clean_text(n, 32) for n in data.names]
    across = min(max(len(panels), 1), 4)
    down = -(-max(len(panels), 1) // across)
    canvas = _new_canvas((WIDTH, 0.35 + down * (0.55 + 0.19 * max(len(names), 2))))
    grid = canvas.subplots(down, across, squeeze=False, sharey=True)
    y = np.arange(len(names))
    handles = {}
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_visible(False)
            continue
        values, lo, hi = (
            to_array([None] * len(names) if v is None else v)
            for v in (panel.values, panel.lo, panel.hi)
        )
        if panel.zero:
            axes.axvline(0, color=MUTED, linewidth=0.8)
        if panel.margins is not None:
            axes.vlines(
                to_array(panel.margins),
                y - 0.4,
                y + 0.4,
                color=SERIES[1],
                linewidth=1.1,
                linestyle="--",
            )
        axes.hlines(y, lo, hi, color=SERIES[0], linewidth=1.3)
        handles["ours"] = axes.plot(
            values, y, linestyle="", marker="o", markersize=3.6, color=SERIES[0]
        )[0]
        if panel.other is not None:
            hollow: dict[str, Any] = {
                "marker": "D",
                "markersize": 3.6,
                "color": SERIES[1],
                "fillstyle": "none",
                "markeredgewidth": 0.9,
            }
            handles["other"] = axes.plot(to_array(panel.other), y, linestyle="", **hollow)[0]
        _name_rows(axes, y, names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.set_title(clean_text(panel.name, 28), loc="left", color=INK)
        axes.locator_params(axis="x", nbins=4)
        axes.margins(x=0.08)
        _set_plain_ticks(axes.xaxis)
    for axes in grid[-1]:
        axes.set_xlabel(clean_text(data.xlabel))
    if "other" in handles:
        _add_legend(
            canvas, [handles["ours"], handles["other"]], (data.ours, data.other), 40, ncols=2
        )
    return canvas


def _draw_ranks(data: RankPlot) -> Canvas:
    """Mean ranks on a line, the best on the left; bars join groups that differ by less than the
    critical difference (Demsar 2006).
    """
    order = np.argsort(to_array(data.ranks), kind="stable")
    ranks, names = to_array(data.ranks)[order], [clean_text(data.names[k], 32) for k in order]
    k, half = len(names), -(-len(names) // 2)
    near = [
        np.flatnonzero(ranks <= r + data.critical).max(initial=i)
        for i, r in enumerate(ranks.tolist())
    ]
    joined = [
        (i, j)
        for i, j in enumerate(near)
        if j > i and not any(a < i and b >= j for a, b in enumerate(near))
    ]
    top = 0.5 + 0.3 * len(joined)  # below the bars begin the names
    canvas = _new_canvas((WIDTH, 0.9 + 0.2 * (top + half)))
    axes = canvas.add_subplot()
    low, high = 1.0, float(max(k, 2))
    pad = 0.42 * (high - low)
    axes.set(xlim=(low - pad, high + pad), ylim=(top + half, -1.9))
    axes.plot([low, high], [0, 0], color=INK, linewidth=0.9)
    for mark in range(1, int(high) + 1):
        axes.plot([mark, mark], [0, -0.25], color=INK, linewidth=0.8)
        axes.text(mark, -0.4, str(mark), ha="center", va="bottom", color=MUTED, fontsize=7)
    axes.plot([low, low + data.critical], [-1.5, -1.5], color=INK, linewidth=1.4, clip_on=False)
    text = f"critical difference {format_number(float(data.critical), 2)}"
    axes.text(low - 0.02 * (high - low), -1.5, text, ha="right", va="center", fontsize=7)
    for i, (rank, name) in enumerate(zip(ranks.tolist(), names, strict=True)):
        left = i < half
        depth = top + (i if left else k - 1 - i)
        edge = low - 0.04 * (high - low) if left else high + 0.04 * (high - low)
        axes.plot([rank, rank, edge], [0, depth, depth], color=MUTED, linewidth=0.7)
        axes.text(
            edge,
            depth,
            f" {name} {format_number(rank, 2)} ",
            ha="right" if left else "left",
            va="center",
            fontsize=7,
        )
    for level, (i, j) in enumerate(joined):
        reach = 0.012 * (high - low)
        axes.plot(
            [ranks[i] - reach, ranks[j] + reach],
            [0.35 + 0.3 * level] * 2,
            color=SERIES[0],
            linewidth=2.6,
            solid_capstyle="butt",
        )
    axes.set_axis_off()
    return canvas


def _draw_flow(data: FlowPlot) -> Canvas:
    """Boxes below each other on the left, what leaves on the right."""
    n = len(data.names)
    canvas = _new_canvas((WIDTH, 0.2 + 0.85 * n))
    axes = canvas.add_subplot()
    axes.set(xlim=(0, 10), ylim=(n - 0.6, -0.4))
    axes.set_axis_off()

    def write(
        x: float, y: float, text: str, count: int | None, colour: str, side: str = "center"
    ) -> None:
        shown = "withheld" if count is None else f"n = {count:,}"
        content = "\n".join([*textwrap.wrap(clean_text(text, 160), 46), shown])
        box = {
            "boxstyle": "square,pad=0.5",
            "facecolor": "none",
            "edgecolor": colour,
            "linewidth": 0.9,
        }
        axes.text(x, y, content, ha=side, va="center", fontsize=7.5, color=INK, bbox=box)

    for y in range(n - 1):
        axes.annotate(
            "", (2.4, y + 0.76), (2.4, y + 0.24), arrowprops={"arrowstyle": "->", "color": MUTED}
        )
        if data.leaving[y]:
            axes.annotate(
                "", (4.3, y + 0.5), (2.4, y + 0.5), arrowprops={"arrowstyle": "->", "color": MUTED}
            )
            write(4.5, y + 0.5, data.leaving[y], data.leaving_counts[y], MUTED, "left")
    for y, (name, count) in enumerate(zip(data.names, data.counts, strict=True)):
        write(2.4, y, name, count, INK)
    return canvas


def _draw_density(data: DensityPlot) -> Canvas:
    """Stacked areas in the order and the colours of the hypnogram; of many epochs the mean of each
    pixel column.
    """
    classes, values = list(data.classes), np.asarray(data.values, np.float64)
    order = _sort_stages(classes)
    per, unit = _select_time_unit(len(values) * data.epoch)
    size = max(1, -(-len(values) // COLUMNS))
    blocks = [values[i : i + size] for i in range(0, len(values), size)]
    means = np.array(
        [
            np.nanmean(b, axis=0) if np.isfinite(b).any() else np.full(len(classes), np.nan)
            for b in blocks
        ]
    )
    edges = np.arange(len(blocks) + 1) * size * data.epoch / per
    canvas = _new_canvas((WIDTH, 1.9))
    axes = canvas.add_subplot()
    below = np.zeros(len(blocks))
    handles = []
    for place, k in enumerate(order):
        above = below + means[:, k]
        handles.append(
            axes.fill_between(
                edges,
                [*below, below[-1]],
                [*above, above[-1]],
                step="post",
                color=SERIES[place % 8],
                linewidth=0,
            )
        )
        below = above
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1), xlabel=unit, ylabel="probability")
    _set_plain_ticks(axes.xaxis, axes.yaxis)
    _add_legend(
        canvas, handles, [classes[k] for k in order], 20, ncols=len(classes), handlelength=1.0
    )
    return canvas


DRAWERS: dict[type, Callable[[Any], Any]] = {
    FlowPlot: _draw_flow,
    ForestPlot: _draw_forest,
    RankPlot: _draw_ranks,
    ScatterPlot: _draw_scatter,
    LinePlot: _draw_lines,
    HeatMap: _draw_matrix,
    BarPlot: _draw_bars,
    TracePlot: _draw_traces,
    Hypnogram: _draw_hypnogram,
    DensityPlot: _draw_density,
    TimelinePlot: _draw_timelines,
}
