"""Drawings of matrices, points, intervals, ranks and flows with matplotlib."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.page import FlowPlot, ForestPanel, ForestPlot, HeatMap, RankPlot
from bitimely_core.report.canvas import (
    DASHES,
    DIVERGING,
    INK,
    MUTED,
    RULE,
    SEQUENTIAL,
    SERIES,
    WIDTH,
    add_legend,
    arrange_panels,
    draw_data,
    hide_rest,
    name_rows,
    new_canvas,
    reduce_matrix,
    set_plain_ticks,
)
from bitimely_core.report.numbers import Array, fill_missing, matrix_panels, to_array, to_texts
from bitimely_core.report.page_text import clean_text, format_number
from bitimely_core.report.plain_matrices import ColourScale, choose_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# ---- matrices


@draw_data.register(HeatMap)
def _draw_matrix(data: HeatMap) -> Canvas:
    values, names = matrix_panels(data)
    scale = choose_scale(data)
    count = len(values)
    down, across = arrange_panels(count, 4)
    canvas = _new_matrix_canvas(values)
    grid = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    hide_rest(grid, count)
    for k, axes in enumerate(grid.flat[:count]):
        picture = _draw_panel(axes, values[k], data, scale)
        if count > 1:
            axes.set_title(names[k])
        set_plain_ticks(axes.xaxis, axes.yaxis)
        axes.locator_params(nbins=4 if count > 1 else 6, integer=True)
        if k >= count - across:
            axes.set_xlabel(clean_text(data.xlabel))
            axes.tick_params(labelbottom=True)
        if k % across == 0:
            axes.set_ylabel(clean_text(data.ylabel))
    if np.isfinite(values).any():
        _add_colour_bar(canvas, picture, grid, scale, is_diverging=data.diverging)
    return canvas


def _new_matrix_canvas(values: Array) -> Canvas:
    """A canvas for matrices [M, R, C] whose cells are about square."""
    count, rows, columns = values.shape
    down, across = arrange_panels(count, 4)
    width, shape = WIDTH if count > 1 else 4.8, min(max(rows / columns, 0.35), 1.4)
    height = down * ((width - 1.0) / across * shape + 0.3) + 0.5
    return new_canvas(height, width, layout="compressed")


def _draw_panel(axes: Axes, values: Array, data: HeatMap, scale: ColourScale) -> Any:
    """One matrix [R, C] in colours; the picture for the colour bar."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = values.shape
    # an odd number of colours, so that zero has its own; few of them, so that the picture is small
    colours = DIVERGING if data.diverging else SEQUENTIAL
    palette = LinearSegmentedColormap.from_list("bitimely", colours, N=63)
    palette.set_bad(RULE)
    is_square = 0.35 <= rows / columns <= 1.4
    picture = axes.imshow(
        reduce_matrix(values),
        cmap=palette,
        vmin=scale.low,
        vmax=scale.top,
        interpolation="none",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        aspect="equal" if is_square else "auto",
    )
    axes.spines[["top", "right"]].set_visible(True)
    for edge in data.mark or ():
        axes.axvline(edge, color=INK, linewidth=0.7, linestyle=DASHES[1])
    return picture


def _add_colour_bar(
    canvas: Canvas, picture: Any, grid: Array, scale: ColourScale, *, is_diverging: bool
) -> None:
    """A bar of the colours; signs at its ends say where larger values share a colour."""
    bar = canvas.colorbar(picture, ax=grid, shrink=0.6, aspect=24, pad=0.02, ticks=scale.ticks)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    first, middle, last = scale.labels
    if scale.largest > scale.top:
        first, last = f"≤ {first}" if is_diverging else first, f"≥ {last}"
    bar.ax.set_yticklabels([first, middle, last])
    bar.ax.tick_params(length=0)


# ---- intervals and ranks


@draw_data.register(ForestPlot)
def _draw_forest(data: ForestPlot) -> Canvas:
    """A dot and an interval for each name, in panels that share the names; hollow marks for the
    values compared to.
    """
    panels, names = data.panels, to_texts(data.names, 32)
    down, across = arrange_panels(len(panels), 4)
    canvas = new_canvas(0.35 + down * (0.55 + 0.19 * max(len(names), 2)))
    grid = canvas.subplots(down, across, squeeze=False, sharey=True)
    hide_rest(grid, len(panels))
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        handles |= _draw_intervals(axes, panel, len(names))
        name_rows(axes, np.arange(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.set_title(clean_text(panel.name, 112 // across))
        axes.locator_params(axis="x", nbins=4)
        axes.margins(x=0.08)
        set_plain_ticks(axes.xaxis)
    for axes in grid[-1]:
        axes.set_xlabel(clean_text(data.xlabel))
    if "other" in handles:
        pair = [handles["ours"], handles["other"]]
        add_legend(canvas, pair, (data.ours, data.other), 40, ncols=2)
    return canvas


def _draw_intervals(axes: Axes, panel: ForestPanel, count: int) -> dict[str, Any]:
    """The values of a panel with what they are compared to; the handles for the legend."""
    y = np.arange(count)
    values, lo, hi = (fill_missing(part, count) for part in (panel.values, panel.lo, panel.hi))
    if panel.zero:
        axes.axvline(0, color=MUTED, linewidth=0.8)
    if panel.margins is not None:
        style: dict[str, Any] = {"color": SERIES[1], "linewidth": 1.1, "linestyle": "--"}
        axes.vlines(to_array(panel.margins), y - 0.4, y + 0.4, **style)
    axes.hlines(y, lo, hi, color=SERIES[0], linewidth=1.3)
    style = {"linestyle": "", "marker": "o", "markersize": 3.6, "color": SERIES[0]}
    handles = {"ours": axes.plot(values, y, **style)[0]}
    if panel.other is not None:
        hollow = {"marker": "D", "color": SERIES[1], "fillstyle": "none", "markeredgewidth": 0.9}
        handles["other"] = axes.plot(to_array(panel.other), y, **style | hollow)[0]
    return handles


def _join_similar(ranks: Array, critical: float) -> list[tuple[int, int]]:
    """First and last of each run of sorted ranks that differ by less than the critical difference;
    runs inside another one are left out.
    """
    last = [int((ranks <= rank + critical).sum()) - 1 for rank in ranks]
    return [
        (first, end)
        for first, end in enumerate(last)
        if end > first and (first == 0 or end > last[first - 1])
    ]


@draw_data.register(RankPlot)
def _draw_ranks(data: RankPlot) -> Canvas:
    """Mean ranks on a line, the best on the left; bars join groups that differ by less than the
    critical difference (Demsar 2006).
    """
    order = np.argsort(to_array(data.ranks), kind="stable")
    ranks, names = to_array(data.ranks)[order], to_texts(data.names, 32)[order]
    joined = _join_similar(ranks, data.critical)
    top, half = 0.5 + 0.3 * len(joined), -(-len(names) // 2)  # below the bars begin the names
    canvas = new_canvas(0.9 + 0.2 * (top + half))
    axes = canvas.add_subplot()
    low, high = 1.0, float(max(len(names), 2))
    span = high - low
    pad = 0.42 * span
    axes.set(xlim=(low - pad, high + pad), ylim=(top + half, -1.9))
    axes.plot([low, high], [0, 0], color=INK, linewidth=0.9)
    for mark in range(1, int(high) + 1):
        axes.plot([mark, mark], [0, -0.25], color=INK, linewidth=0.8)
        axes.text(mark, -0.4, str(mark), ha="center", va="bottom", color=MUTED, fontsize=7)
    axes.plot([low, low + data.critical], [-1.5, -1.5], color=INK, linewidth=1.4, clip_on=False)
    text = f"critical difference {format_number(float(data.critical), 2)}"
    axes.text(low - 0.02 * span, -1.5, text, ha="right", va="center", fontsize=7)
    for k, (rank, name) in enumerate(zip(ranks.tolist(), names, strict=True)):
        # the better half stands at the left, the other at the right, from the bottom up
        edge, depth, side = low - 0.04 * span, top + k, "right"
        if k >= half:
            edge, depth, side = high + 0.04 * span, top + len(names) - 1 - k, "left"
        axes.plot([rank, rank, edge], [0, depth, depth], color=MUTED, linewidth=0.7)
        label = f" {name} {format_number(rank, 2)} "
        axes.text(edge, depth, label, ha=side, va="center", fontsize=7)
    reach = 0.012 * span
    for level, (first, end) in enumerate(joined):
        x, y = [ranks[first] - reach, ranks[end] + reach], [0.35 + 0.3 * level] * 2
        axes.plot(x, y, color=SERIES[0], linewidth=2.6, solid_capstyle="butt")
    axes.set_axis_off()
    return canvas


# ---- flows


@draw_data.register(FlowPlot)
def _draw_flow(data: FlowPlot) -> Canvas:
    """Boxes below each other on the left, what leaves on the right."""
    count = len(data.names)
    canvas = new_canvas(0.2 + 0.85 * count)
    axes = canvas.add_subplot()
    axes.set(xlim=(0, 10), ylim=(count - 0.6, -0.4))
    axes.set_axis_off()
    arrow = {"arrowstyle": "->", "color": MUTED}
    for y, (name, number) in enumerate(zip(data.leaving, data.leaving_counts, strict=True)):
        axes.annotate("", (2.4, y + 0.76), (2.4, y + 0.24), arrowprops=arrow)
        if name:
            axes.annotate("", (4.3, y + 0.5), (2.4, y + 0.5), arrowprops=arrow)
            _write_box(axes, (4.5, y + 0.5), name, number, ha="left", edge=MUTED)
    for y, (name, number) in enumerate(zip(data.names, data.counts, strict=True)):
        _write_box(axes, (2.4, y), name, number, ha="center", edge=INK)
    return canvas


def _write_box(
    axes: Axes, place: tuple[float, float], name: str, number: int | None, *, ha: str, edge: str
) -> None:
    """A name with its count in a box."""
    counted = "withheld" if number is None else f"n = {number:,}"
    text = "\n".join([*textwrap.wrap(clean_text(name, 160), 46), counted])
    box = {"boxstyle": "square,pad=0.5", "facecolor": "none", "edgecolor": edge, "linewidth": 0.9}
    axes.text(*place, text, ha=ha, va="center", bbox=box)
