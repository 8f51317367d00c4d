"""True and predicted classes of points in time, such as beats, as SVG (see `plain_figures`)."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import NamedTuple

import numpy as np

from bitimely_core.page import PointPlot
from bitimely_core.report.canvas import INK, MUTED, RULE, SERIES, reduce_trace
from bitimely_core.report.numbers import Array, to_array
from bitimely_core.report.page_text import clean_text
from bitimely_core.report.plain_figures import (
    BELOW,
    LINE,
    PAD,
    SIZE,
    STOP,
    Frame,
    add_path,
    add_text,
    add_x_axis,
    draw_plain,
    find_range,
    find_start,
    list_ticks,
    measure_text,
    start_drawing,
    stroke,
    trace_line,
)
from bitimely_core.report.plain_matrices import trace_glyphs

PANEL = 80.0  # height of the signal
ROW = 15.0  # height of a class
RADIUS = 3.2  # of a mark


class Mark(NamedTuple):
    """How points of one outcome are drawn: shape and colour both tell them apart."""

    name: str
    glyph: int  # of `GLYPHS`
    style: str


FOUND = Mark("found", 0, stroke(SERIES[0], 6.4))
MISSED = Mark("missed", 5, stroke(SERIES[1], 1.4))
EXTRA = Mark("extra", 3, stroke(SERIES[6], 1.4))


@draw_plain.register(PointPlot)
def _draw_points(data: PointPlot) -> ET.Element:
    """A signal, and below it a row for each class that is true or predicted here."""
    numbers = np.union1d(data.true, data.predicted).tolist()
    names = [clean_text(data.classes[number], 16) for number in numbers]
    signal = to_array(data.signal.values)
    seconds = data.start + np.arange(len(signal)) / data.rate
    label = clean_text(data.signal.name, 16)
    start, stop = find_start([*names, label], "", SIZE), STOP
    top = PAD + LINE + 3
    below = top + PANEL
    bottom = below + ROW * len(names)
    across = find_range(np.append(seconds, data.times), 0.01)
    svg = start_drawing(bottom + BELOW)
    rows = Frame(start, stop, below, bottom, across, (len(names) - 0.5, -0.5))
    _add_guides(svg, rows, top, data.times)
    index, values = reduce_trace(signal)
    panel = Frame(start, stop, top, below, across, find_range(signal, 0.08))
    add_path(svg, trace_line(panel.place(seconds[index], values)), stroke(INK, 0.6))
    add_text(svg, label, (start - 5, top + PANEL / 2 + 2.5), "end", colour=MUTED)
    for row, (number, name) in enumerate(zip(numbers, names, strict=True)):
        _add_row(svg, rows, row, data.times, data.true == number, data.predicted == number)
        add_text(svg, name, (start - 5, below + (row + 0.5) * ROW + 2.5), "end")
    add_x_axis(svg, rows, list_ticks(*across, 9), "seconds from the start of the recording")
    _add_marks_legend(svg)
    return svg


def _add_guides(svg: ET.Element, rows: Frame, top: float, times: Array) -> None:
    """A thin line from each point through the signal to its mark, and along each row."""
    places = rows.place(times, np.zeros(len(times)))[:, 0].tolist()
    lines = "".join(f"M{x:.1f} {top:.1f}V{rows.bottom:.1f}" for x in places)
    heights = np.arange(rows.top + ROW / 2, rows.bottom, ROW).tolist()
    lines += "".join(f"M{rows.start:.1f} {y:.1f}H{rows.stop:.1f}" for y in heights)
    add_path(svg, lines, stroke(RULE, 0.6))


def _add_row(
    svg: ET.Element, rows: Frame, row: int, times: Array, is_true: Array, is_predicted: Array
) -> None:
    """The marks of one class."""
    outcomes = {
        FOUND: is_true & is_predicted,
        MISSED: is_true & ~is_predicted,
        EXTRA: is_predicted & ~is_true,
    }
    for mark, chosen in outcomes.items():
        points = rows.place(times[chosen], np.full(chosen.sum(), float(row)))
        _add_marks(svg, points, mark)


def _add_marks(svg: ET.Element, points: Array, mark: Mark) -> None:
    """A mark at each point [n, 2]."""
    path = trace_glyphs(points, mark.glyph, RADIUS)
    add_path(svg, path, f"{mark.style};stroke-linecap:round")


def _add_marks_legend(svg: ET.Element) -> None:
    """The marks with their names, above the signal."""
    x, y = PAD + RADIUS + 1, PAD + LINE / 2
    for mark in (FOUND, MISSED, EXTRA):
        _add_marks(svg, np.array([[x, y]]), mark)
        add_text(svg, mark.name, (x + 8, y + 2.5))
        x += measure_text(mark.name) + 24
