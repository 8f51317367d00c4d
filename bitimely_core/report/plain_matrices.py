"""Confusion matrices and points written as SVG, without matplotlib (see `plain_figures`)."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bitimely_core.page import HeatMap, ScatterPanel, ScatterPlot
from bitimely_core.report.canvas import (
    DIVERGING,
    INK,
    MUTED,
    PAPER,
    PIXELS,
    RULE,
    SEQUENTIAL,
    SERIES,
    arrange_panels,
    format_tick,
)
from bitimely_core.report.numbers import Array, matrix_panels, to_array, to_texts
from bitimely_core.report.page_text import clean_text, format_number
from bitimely_core.report.plain_figures import (
    LINE,
    PAD,
    SIZE,
    TICK_SIZE,
    WIDTH,
    Frame,
    add_path,
    add_text,
    add_x_axis,
    add_y_axis,
    draw_plain,
    find_range,
    list_ticks,
    measure_widest,
    start_drawing,
    stroke,
    trace_line,
)

CELL = 32.0  # side of a cell with its number, at most
NARROW = 4.8 * 72  # width of a single panel of points
COLOURS = 63  # of a matrix: an odd number, so that zero has its own

# ---- matrices


class ColourScale(NamedTuple):
    """The values of the first and the last colour of a matrix."""

    low: float
    top: float
    largest: float  # magnitude of all values; above `top` where few large ones share its colour

    @property
    def ticks(self) -> list[float]:
        """The ends and the middle."""
        return [self.low, (self.low + self.top) / 2, self.top]

    @property
    def labels(self) -> list[str]:
        """The ticks as text, in three digits."""
        return [format_tick(float(f"{tick:.3g}")) for tick in self.ticks]


def has_named_cells(data: HeatMap) -> bool:
    """Whether a matrix is small and has names, so that each cell shows its number."""
    is_named = data.row_names is not None or data.column_names is not None
    return is_named and max(np.shape(data.values)[-2:]) <= 16


def choose_scale(data: HeatMap) -> ColourScale:
    """A single spike must not compress the scale: of many values it ends at the 99.5th percentile
    of magnitudes.
    """
    values, _ = matrix_panels(data)
    values = values[np.isfinite(values)]
    sizes = np.abs(values)
    largest = top = float(sizes.max(initial=0.0)) or 1.0
    if sizes.size >= 100 and not has_named_cells(data):
        top = float(np.quantile(sizes, 0.995)) or largest
    low = -top if data.diverging else float(values.min(initial=0.0))
    return ColourScale(low, top, largest)


def describe_matrix(data: HeatMap) -> str:
    """How the colours and the cells of a large matrix stand for its values."""
    values, _ = matrix_panels(data)
    scale, (rows, columns) = choose_scale(data), values.shape[1:]
    if has_named_cells(data) or not np.isfinite(values).any():
        return ""
    notes = []
    if scale.largest > scale.top:
        end = scale.labels[-1]
        notes.append(f"Colours saturate at {end}, the 99.5th percentile of magnitudes.")
    if max(rows, columns) > PIXELS:
        notes.append(
            "Drawn by the strongest entry of each block; the file holds all "
            f"{rows:,} × {columns:,} values."
        )
    return " ".join(notes)


class CellGrid(NamedTuple):
    """Where a matrix with numbers in its cells stands, and the names along it."""

    start: float
    top: float
    side: float  # of a cell
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def stop(self) -> float:
        """The edge behind the last column."""
        return self.start + self.side * len(self.columns)

    @property
    def bottom(self) -> float:
        """The edge below the last row."""
        return self.top + self.side * len(self.rows)


@draw_plain.register(HeatMap)
def _draw_cells(data: HeatMap) -> ET.Element | None:
    """Small matrices with names along them and the number in every cell; of others there is no such
    drawing.
    """
    if not has_named_cells(data):
        return None
    panels, titles = matrix_panels(data)
    count, *shape = panels.shape
    rows, columns = (
        list(to_texts(names or range(n), 24))
        for names, n in zip((data.row_names, data.column_names), shape, strict=True)
    )
    start = PAD + LINE + measure_widest(rows) + 7
    side = min(CELL, (WIDTH - start - PAD) / len(columns))
    widest = measure_widest(columns)
    below = (widest if widest > side else SIZE) + 8
    across = min(count, max(1, int(WIDTH / (start + side * len(columns) + PAD))))
    top = PAD + (LINE if count > 1 else 0.0)
    first = CellGrid(start, top, side, rows, columns)
    width, height = first.stop + PAD, first.bottom + below + LINE + PAD
    svg = start_drawing(-(-count // across) * height, max(across * width, 160.0))
    for k, values in enumerate(panels.astype(np.float64)):
        row, column = divmod(k, across)
        grid = first._replace(start=start + column * width, top=top + row * height)
        _add_cells(svg, grid, values, choose_scale(data), is_diverging=data.diverging)
        _add_names(svg, grid, data, below)
        if count > 1:
            add_text(svg, titles[k], (grid.start, grid.top - 3))
    return svg


def _add_names(svg: ET.Element, grid: CellGrid, data: HeatMap, below: float) -> None:
    """The names along a matrix, and the titles of its sides."""
    for k, name in enumerate(grid.rows):
        place = (grid.start - 5, grid.top + (k + 0.5) * grid.side + 2.5)
        add_text(svg, name, place, "end", colour=MUTED)
    is_upright = below > SIZE + 8
    for k, name in enumerate(grid.columns):
        x = grid.start + (k + 0.5) * grid.side
        if is_upright:
            place = (x + 2.5, grid.bottom + 5)
            add_text(svg, name, place, "end", colour=MUTED, upright=True)
        else:
            add_text(svg, name, (x, grid.bottom + 10), "middle", colour=MUTED)
    place = ((grid.start + grid.stop) / 2, grid.bottom + below + SIZE)
    add_text(svg, clean_text(data.xlabel), place, "middle", colour=MUTED)
    start = grid.start - 7 - LINE - measure_widest(grid.rows)
    place = (start + SIZE, (grid.top + grid.bottom) / 2)
    add_text(svg, clean_text(data.ylabel), place, "middle", colour=MUTED, upright=True)


def _add_cells(
    svg: ET.Element, grid: CellGrid, values: Array, scale: ColourScale, *, is_diverging: bool
) -> None:
    """The cells of a matrix [R, C] with their numbers, light on dark."""
    shares = np.clip((values - scale.low) / ((scale.top - scale.low) or 1.0), 0.0, 1.0)
    strengths = np.abs(values) / scale.top if scale.low < 0 else shares
    palette = DIVERGING if is_diverging else SEQUENTIAL
    has_integers = bool((values[np.isfinite(values)] % 1 == 0).all())
    places, side = (2 if scale.top <= 10 else None), grid.side
    for (row, column), value in np.ndenumerate(values):
        x, y = grid.start + column * side, grid.top + row * side
        is_known = math.isfinite(value)
        fill = mix_colours(palette, float(shares[row, column])) if is_known else RULE
        add_path(svg, f"M{x:.1f} {y:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z", f"fill:{fill}")
        svg[-1].set("class", "cells")
        text = f"{int(value):,}" if has_integers and is_known else format_number(value, places)
        colour = PAPER if strengths[row, column] > 0.55 else INK
        place = (x + side / 2, y + side / 2 + 2.5)
        add_text(svg, text, place, "middle", colour=colour, size=TICK_SIZE)
    border = f"M{grid.start:.1f} {grid.top:.1f}H{grid.stop:.1f}V{grid.bottom:.1f}H{grid.start:.1f}z"
    add_path(svg, border, stroke(MUTED, 0.6))


def mix_colours(palette: Sequence[str], share: float) -> str:
    """The colour at a share of the way through evenly spaced ones, in `COLOURS` steps."""
    place = round(share * (COLOURS - 1)) / (COLOURS - 1) * (len(palette) - 1)
    first = min(int(place), len(palette) - 2)
    parts = zip(*(bytes.fromhex(name[1:]) for name in palette[first : first + 2]), strict=True)
    mixed = (round(low + (high - low) * (place - first)) for low, high in parts)
    return "#" + "".join(f"{part:02x}" for part in mixed)


# ---- points


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
RADIUS = 1.8  # of a glyph


@draw_plain.register(ScatterPlot)
def _draw_scatter(data: ScatterPlot) -> ET.Element:
    """Points in panels, a colour and a glyph a group."""
    down, across = arrange_panels(len(data.panels), 3)
    width = WIDTH if across > 1 else NARROW
    names = [clean_text(name, 40) for name in data.groups]
    entry = measure_widest(names) + 22
    columns = max(1, int((width - 2 * PAD) / entry))
    start = PAD + LINE * -(-len(names) // columns) if data.panels else PAD
    side = width / across
    height = side * 0.95 + 18
    svg = start_drawing(start + down * height + PAD, width)
    for k, panel in enumerate(data.panels):
        row, column = divmod(k, across)
        _draw_points(svg, panel, data, (column * side, start + row * height), (side, height))
    for k, name in enumerate(names if data.panels else []):
        row, column = divmod(k, columns)
        x, y = PAD + 6 + column * entry, PAD + LINE * (row + 0.5)
        add_glyphs(svg, np.array([[x, y]]), k)
        add_text(svg, name, (x + 8, y + 2.5))
    return svg


def _draw_points(
    svg: ET.Element,
    panel: ScatterPanel,
    data: ScatterPlot,
    corner: tuple[float, float],
    size: tuple[float, float],
) -> None:
    """The points of a panel with its axes; each group is one path, so that thousands stay small."""
    x, y, group = to_array(panel.x), to_array(panel.y), np.asarray(panel.group, dtype=np.int64)
    (start, top), (width, height) = corner, size
    spans = find_range(x, 0.05), find_range(y, 0.05)
    up = list_ticks(*spans[1], 6) if data.ticks else []
    labels = measure_widest((tick.label for tick in up), TICK_SIZE)
    title = LINE if data.ylabel else 0.0
    edges = start + PAD + title + labels + 5, start + width - PAD - 6
    frame = Frame(*edges, top + LINE, top + height - 26, *spans)
    add_y_axis(svg, frame, up, "")
    add_x_axis(svg, frame, list_ticks(*spans[0], 6) if data.ticks else [], data.xlabel)
    middle = (start + PAD + SIZE, (frame.top + frame.bottom) / 2)
    add_text(svg, clean_text(data.ylabel), middle, "middle", colour=MUTED, upright=True)
    add_text(svg, clean_text(panel.name, 60), (frame.start, frame.top - 3))
    points = frame.place(x, y)
    if not data.groups:  # there is nothing that the points are the background of
        group = np.zeros_like(group)
    for k in range(-1, max(1, len(data.groups))):
        add_glyphs(svg, points[group == k], k)


def add_glyphs(svg: ET.Element, points: Array, group: int) -> None:
    """The mark of a group at each point [n, 2]; -1: in none."""
    shape = group % len(GLYPHS) if group >= 0 else 0
    colour, opacity = (SERIES[group % len(SERIES)], 0.9) if group >= 0 else (MUTED, 0.35)
    line = stroke(colour, 0.8 if shape else 2.6)
    style = f"{line};stroke-opacity:{opacity};stroke-linecap:round"
    add_path(svg, trace_glyphs(points, shape, RADIUS), style)


def trace_glyphs(points: Array, shape: int, radius: float) -> str:
    """The path of one of `GLYPHS` at each point [n, 2]."""
    pen = np.vstack([GLYPHS[shape], [(math.nan, math.nan)]]) * (radius, -radius)
    return trace_line((points[:, None] + pen).reshape(-1, 2))
