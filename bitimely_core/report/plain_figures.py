"""Curves, bars, hypnograms and hypnodensities written as SVG: a tenth of the time of matplotlib,
which is not imported for them.

Lengths are points. Widths of texts are estimated, since no font is read.
Legend: n points, C classes.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Literal, NamedTuple

import numpy as np

from bitimely_core.page import BarPlot, DensityPlot, Hypnogram, Line, LinePlot
from bitimely_core.report.canvas import (
    COLUMNS,
    INK,
    MUTED,
    PAPER,
    RULE,
    SERIES,
    format_tick,
    reduce_trace,
)
from bitimely_core.report.numbers import (
    Array,
    fill_missing,
    join_field,
    join_parts,
    stage_indices,
    to_array,
)
from bitimely_core.report.page_text import clean_text, format_power

SVG = "http://www.w3.org/2000/svg"
WIDTH = 540.0
PAD = 4.0
STOP = WIDTH - PAD - 6  # right end of axes
BELOW = 24 + PAD  # height of an axis with its numbers and title
SIZE, TICK_SIZE = 7.5, 7.0  # of texts
LINE = 11.0  # from one line of text to the next
LETTER = 0.62  # mean width of a letter of DejaVu Sans, of its size
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
DASHES = ("", "6.5 2", "2 1.6", "7.8 2 2 2")
# stages from top to bottom, as hypnograms are drawn
DEPTH = ("W", "R", "REM", "N1", "N2", "N3", "N4")
Anchor = Literal["start", "middle", "end"]


class Frame(NamedTuple):
    """Axes in a drawing: their edges, and the values at these."""

    start: float
    stop: float
    top: float
    bottom: float
    x: tuple[float, float]  # at the left and at the right
    y: tuple[float, float]  # at the bottom and at the top

    def place(self, x: Array | Sequence[float], y: Array | Sequence[float]) -> Array:
        """Values [n] and [n] as points [n, 2]."""
        across = (np.asarray(x, float) - self.x[0]) / (self.x[1] - self.x[0])
        up = (np.asarray(y, float) - self.y[0]) / (self.y[1] - self.y[0])
        width, height = self.stop - self.start, self.bottom - self.top
        return np.column_stack([self.start + across * width, self.bottom - up * height])


class Key(NamedTuple):
    """An entry of a legend."""

    name: str
    colour: str
    dash: str = ""


class Tick(NamedTuple):
    """A mark of an axis."""

    place: float
    label: str


class TimeUnit(NamedTuple):
    """The unit of a time axis."""

    name: str
    seconds: float


@singledispatch
def draw_plain(data: object) -> ET.Element | None:
    """The drawing of one kind of figure; None for kinds that matplotlib draws."""
    return None


# ---- parts of a drawing


def start_drawing(height: float, width: float = WIDTH) -> ET.Element:
    """An empty drawing, as wide as a page unless `width` says otherwise."""
    box = f"0 0 {width:g} {height:g}"
    svg = ET.Element(f"{{{SVG}}}svg", viewBox=box, version="1.1")
    svg.attrib |= {"width": f"{width:g}pt", "height": f"{height:g}pt"}
    add_path(svg, f"M0 0H{width:g}V{height:g}H0z", f"fill:{PAPER}")
    return svg


def add_path(svg: ET.Element, path: str, style: str) -> None:
    """A path, if it is not empty."""
    if path:
        ET.SubElement(svg, f"{{{SVG}}}path", d=path, style=style)


def add_text(
    svg: ET.Element,
    text: str,
    place: tuple[float, float],
    anchor: Anchor = "start",
    *,
    colour: str = INK,
    size: float = SIZE,
    upright: bool = False,
) -> None:
    """A text that begins, has its middle or ends at `place`; `upright`: from bottom to top."""
    x, y = (f"{value:.1f}" for value in place)
    style = f"font-size:{size:g}px;text-anchor:{anchor};fill:{colour}"
    element = ET.SubElement(svg, f"{{{SVG}}}text", x=x, y=y, style=style)
    if upright:
        element.set("transform", f"rotate(-90 {x} {y})")
    element.text = text


def stroke(colour: str, width: float, dash: str = "") -> str:
    """The style of a line."""
    dashes = f";stroke-dasharray:{dash}" if dash else ""
    return f"fill:none;stroke:{colour};stroke-width:{width:g}{dashes}"


def measure_text(text: str, size: float = SIZE) -> float:
    """The estimated width of a text."""
    return LETTER * size * len(text)


def measure_widest(texts: Iterable[str], size: float = SIZE) -> float:
    """The estimated width of the widest of some texts; 0 without any."""
    return max((measure_text(text, size) for text in texts), default=0.0)


def trace_line(points: Array) -> str:
    """The path through points [n, 2]; NaN lifts the pen."""
    words, is_drawing = [], False
    for x, y in points.tolist():
        is_known = math.isfinite(x + y)
        if is_known:
            words.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        is_drawing = is_known
    return "".join(words)


def trace_strokes(frame: Frame, strokes: Iterable[tuple[float, float, float, float]]) -> str:
    """The path of lines from x, y to x, y."""
    ends = np.array(list(strokes), float).reshape(-1, 4)
    first, last = frame.place(ends[:, 0], ends[:, 1]), frame.place(ends[:, 2], ends[:, 3])
    rows = np.concatenate([first, last], axis=1).tolist()
    return "".join(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" for x, y, to_x, to_y in rows)


def list_ticks(low: float, high: float, most: int, *, is_integer: bool = False) -> list[Tick]:
    """At most `most` round numbers from `low` to `high`, evenly."""
    step = _choose_step((high - low) or 1.0, most, is_integer=is_integer)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [Tick(k * step, format_tick(round(k * step, 12))) for k in range(first, last + 1)]


def _choose_step(span: float, most: int, *, is_integer: bool) -> float:
    """The least round step of which fewer than `most` make up a span."""
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = [step * factor for factor in (power, 10 * power) for step in STEPS]
    if is_integer:
        steps = [step for step in steps if step >= 1 and step % 1 == 0] or [1.0]
    return next((step for step in steps if span / step < most), steps[-1])


def list_powers(low: float, high: float) -> list[Tick]:
    """The powers of ten from `low` to `high`, which are logarithms of ten, as are the places."""
    return [
        Tick(k, format_tick(10.0**k) if -3 <= k <= 4 else format_power(k))
        for k in range(math.ceil(low), math.floor(high) + 1)
    ]


def find_range(values: Array, margin: float) -> tuple[float, float]:
    """The least and the largest finite value, with a margin as a share of the range."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    room = (high - low) * margin or abs(low) * 0.05 or 0.05
    return low - room, high + room


def add_x_axis(
    svg: ET.Element, frame: Frame, ticks: Sequence[Tick], title: str, *, has_grid: bool = False
) -> None:
    """The line below the axes with its ticks, their numbers and its title."""
    marked = [tick.place for tick in ticks]
    places = frame.place(marked, [frame.y[0]] * len(ticks))[:, 0].tolist()
    if has_grid:
        lines = "".join(f"M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}" for x in places)
        add_path(svg, lines, stroke(RULE, 0.6))
    marks = "".join(f"M{x:.1f} {frame.bottom:.1f}v2.5" for x in places)
    add_path(
        svg, f"M{frame.start:.1f} {frame.bottom:.1f}H{frame.stop:.1f}{marks}", stroke(MUTED, 0.6)
    )
    for x, tick in zip(places, ticks, strict=True):
        add_text(svg, tick.label, (x, frame.bottom + 10), "middle", colour=MUTED, size=TICK_SIZE)
    middle = (frame.start + frame.stop) / 2
    add_text(svg, clean_text(title), (middle, frame.bottom + 20), "middle", colour=MUTED)


def add_y_axis(
    svg: ET.Element, frame: Frame, ticks: Sequence[Tick], title: str, *, has_grid: bool = False
) -> None:
    """The line left of the axes with its ticks, their numbers and its title."""
    marked = [tick.place for tick in ticks]
    places = frame.place([frame.x[0]] * len(ticks), marked)[:, 1].tolist()
    if has_grid:
        lines = "".join(f"M{frame.start:.1f} {y:.1f}H{frame.stop:.1f}" for y in places)
        add_path(svg, lines, stroke(RULE, 0.6))
    marks = "".join(f"M{frame.start:.1f} {y:.1f}h-2.5" for y in places)
    add_path(
        svg, f"M{frame.start:.1f} {frame.top:.1f}V{frame.bottom:.1f}{marks}", stroke(MUTED, 0.6)
    )
    for y, tick in zip(places, ticks, strict=True):
        add_text(svg, tick.label, (frame.start - 5, y + 2.5), "end", colour=MUTED, size=TICK_SIZE)
    place = (PAD + SIZE, (frame.top + frame.bottom) / 2)
    add_text(svg, clean_text(title), place, "middle", colour=MUTED, upright=True)


def find_start(labels: Iterable[str], title: str, size: float = TICK_SIZE) -> float:
    """Where axes begin that have these labels and a title at their left."""
    return PAD + measure_widest(labels, size) + 7 + (LINE if title else 0.0)


def add_legend(svg: ET.Element, keys: Sequence[Key], most: int, *, is_area: bool = False) -> None:
    """The keys at the top, at most `most` in a row; `measure_legend` is its height."""
    columns = arrange_legend(keys, most)
    width = _measure_entry(keys)
    for number, key in enumerate(keys):
        row, column = divmod(number, columns)
        x, y = PAD + column * width, PAD + LINE * (row + 0.5)
        line = f"M{x:.1f} {y:.1f}h{8 if is_area else 16}"
        add_path(svg, line, stroke(key.colour, 6 if is_area else 1.3, key.dash))
        add_text(svg, key.name, (x + (11 if is_area else 19), y + 2.5))


def arrange_legend(keys: Sequence[Key], most: int) -> int:
    """How many keys stand beside each other."""
    return max(1, min(most, len(keys), int((WIDTH - 2 * PAD) / _measure_entry(keys))))


def _measure_entry(keys: Sequence[Key]) -> float:
    """The width of an entry of a legend."""
    return measure_widest(key.name for key in keys) + 30


def measure_legend(keys: Sequence[Key], most: int) -> float:
    """The height of a legend."""
    return LINE * -(-len(keys) // arrange_legend(keys, most)) if keys else 0.0


# ---- curves and bars


@draw_plain.register(LinePlot)
def _draw_lines(data: LinePlot) -> ET.Element:
    curves = [_scale_curve(line, data) for line in data.series]
    keys = list(map(_choose_key, data.series, itertools.count()))
    legend = [] if [key.name for key in keys] == [""] else keys
    across = find_range(join_parts(curve[:, 0] for curve in curves), 0.02)
    up = find_range(join_parts(curve[:, 1:].ravel() for curve in curves), 0.05)
    ticks = list_powers(*up) if data.logy else list_ticks(*up, 7)
    height = 240.0 + 36.0 * (len(curves) > 8)
    start = find_start((tick.label for tick in ticks), data.ylabel)
    top = PAD + measure_legend(legend, 4) + 3
    frame = Frame(start, STOP, top, height - BELOW, across, up)
    svg = start_drawing(height)
    add_y_axis(svg, frame, ticks, data.ylabel, has_grid=True)
    add_x_axis(svg, frame, _list_places(data, across), data.xlabel)
    for curve, key, line in zip(curves, keys, data.series, strict=True):
        _add_line(svg, frame, curve, key, has_points=len(line.x) <= 12 and not line.reference)
    add_legend(svg, legend, 4)
    return svg


def _scale_curve(line: Line, data: LinePlot) -> Array:
    """x, y and the ends of the band (NaN: none) of a curve, [n, 4], as the axes have them."""
    x, y = to_array(line.x), to_array(line.y)
    lo, hi = fill_missing(line.lo, len(y)), fill_missing(line.hi, len(y))
    index, _ = reduce_trace(y)
    curve = np.column_stack([x, y, lo, hi])[index]
    with np.errstate(invalid="ignore", divide="ignore"):
        curve[:, :1] = np.log10(curve[:, :1]) if data.logx else curve[:, :1]
        curve[:, 1:] = np.log10(curve[:, 1:]) if data.logy else curve[:, 1:]
    return np.where(np.isfinite(curve), curve, np.nan)


def _choose_key(line: Line, position: int) -> Key:
    """Name, colour and dashes of a curve; its place in the figure sets its colour."""
    name = clean_text(line.name, 60)
    if line.reference:
        return Key(name, MUTED, DASHES[1])
    return Key(name, SERIES[position % 8], DASHES[position // 8 % 4])


def _list_places(data: LinePlot, across: tuple[float, float]) -> list[Tick]:
    """The ticks of the horizontal axis; a handful of lengths are named each by its number."""
    x = join_field(data.series, "x")
    if not data.logx:
        return list_ticks(*across, 9, is_integer=bool(x.size and (x % 1 == 0).all()))
    places = np.unique(x[x > 0]).tolist()
    if len(places) <= 10:
        return [Tick(math.log10(place), format_tick(place)) for place in places]
    return list_powers(*across)


def _add_line(svg: ET.Element, frame: Frame, curve: Array, key: Key, *, has_points: bool) -> None:
    """A curve of `_scale_curve` with its band; `has_points`: and a point at each value."""
    band = curve[np.isfinite(curve).all(1)]
    edges = [frame.place(band[:, 0], band[:, 2]), frame.place(band[:, 0], band[:, 3])[::-1]]
    add_path(
        svg, trace_line(np.concatenate(edges)), f"fill:{key.colour};fill-opacity:0.16;stroke:none"
    )
    points = frame.place(curve[:, 0], curve[:, 1])
    add_path(svg, trace_line(points), stroke(key.colour, 1.3, key.dash))
    if has_points:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points.tolist() if math.isfinite(x + y))
        add_path(svg, dots, f"{stroke(key.colour, 3.2)};stroke-linecap:round")


@draw_plain.register(BarPlot)
def _draw_bars(data: BarPlot) -> ET.Element:
    values, count = to_array(data.values), max(len(data.values), 1)
    lo, hi = fill_missing(data.lo, len(values)), fill_missing(data.hi, len(values))
    reached = join_parts([values, lo, hi])
    reached = reached[np.isfinite(reached)]
    low, high = float(reached.min(initial=0.0)), float(reached.max(initial=0.0))
    room = 0.05 * (high - low) or 1.0
    low, high = low - room * (low < 0), high + room * (high > 0 or low == 0)
    names = [clean_text(name, 48) for name in data.names]
    height = 0.25 * 72 * count + 26 + 2 * PAD
    start = find_start(names, "", SIZE)
    frame = Frame(start, STOP, PAD, height - BELOW, (low, high), (count - 0.5, -0.5))
    svg = start_drawing(height)
    add_x_axis(svg, frame, list_ticks(low, high, 9), data.ylabel, has_grid=True)
    rows = np.arange(len(values))
    bars = [(0.0, float(k), float(v), float(k)) for k, v in enumerate(values) if math.isfinite(v)]
    add_path(svg, trace_strokes(frame, bars), stroke(SERIES[0], 9))
    seen = np.isfinite(lo) & np.isfinite(hi)
    spans = zip(lo[seen].tolist(), rows[seen], hi[seen].tolist(), rows[seen], strict=True)
    add_path(svg, trace_strokes(frame, spans), stroke(INK, 1.1))
    zero = trace_strokes(frame, [(0.0, -0.5, 0.0, count - 0.5)])
    add_path(svg, zero, stroke(MUTED, 0.6))
    for name, (_, y) in zip(names, frame.place(0 * rows, rows).tolist(), strict=True):
        add_text(svg, name, (start - 5, y + 2.5), "end")
    return svg


# ---- classes of epochs


class StageRun(NamedTuple):
    """Successive epochs of one class; start and stop in units of the time axis."""

    start: float
    stop: float
    stage: int  # number of the class


def choose_unit(seconds: float) -> TimeUnit:
    """The unit for an axis of that length."""
    if seconds > 2 * 3600:
        return TimeUnit("hours", 3600.0)
    return TimeUnit("minutes", 60.0) if seconds > 300 else TimeUnit("seconds", 1.0)


def sort_stages(classes: Sequence[str]) -> list[int]:
    """Positions of sleep stages as hypnograms are drawn; other classes keep their order."""
    positions = range(len(classes))
    if not set(classes) <= set(DEPTH):
        return list(positions)
    return sorted(positions, key=lambda k: DEPTH.index(classes[k]))


def list_runs(stages: Array, epoch: float, unit: TimeUnit) -> list[StageRun]:
    """The runs of a track of class numbers [n]; epochs without a class are in none."""
    edges = [0, *(np.flatnonzero(np.diff(stages)) + 1).tolist(), len(stages)]
    runs = [
        StageRun(start * epoch / unit.seconds, stop * epoch / unit.seconds, int(stages[start]))
        for start, stop in itertools.pairwise(edges)
        if start < stop
    ]
    return [run for run in runs if run.stage >= 0]


@draw_plain.register(Hypnogram)
def _draw_hypnogram(data: Hypnogram) -> ET.Element:
    """Tracks of classes below each other; between two tracks, where they differ."""
    tracks = [stage_indices(track, data.classes) for track in data.tracks]
    length = max(map(len, tracks), default=1) * data.epoch
    unit = choose_unit(length)
    panel = 0.19 * 72 * max(len(data.classes), 3)
    gap = 22.0 if len(tracks) == 2 else 8.0
    names = [clean_text(name, 12) for name in data.classes]
    start = max(find_start(names, "tracks"), PAD + measure_text("differ") + 7)
    height = PAD + len(tracks) * panel + max(len(tracks) - 1, 0) * gap + 24 + PAD
    svg, span = start_drawing(height), (0.0, length / unit.seconds)
    for number, (stages, track) in enumerate(zip(tracks, data.tracks, strict=True)):
        top = PAD + number * (panel + gap)
        frame = Frame(start, STOP, top, top + panel, span, (0.6 - len(names), 0.6))
        add_track(svg, frame, list_runs(stages, data.epoch, unit), data.classes)
        place = (PAD + SIZE, top + panel / 2)
        add_text(svg, clean_text(track.name, 24), place, "middle", upright=True)
    if len(tracks) == 2:
        top = PAD + panel
        between = Frame(start, STOP, top, top + gap, span, (-1.0, 1.0))
        _mark_differences(svg, between, tracks, data.epoch, unit)
    bottom = height - BELOW
    below = Frame(start, STOP, PAD, bottom, span, (0.0, 1.0))
    add_x_axis(svg, below, list_ticks(*span, 9), unit.name)
    return svg


def add_track(
    svg: ET.Element, frame: Frame, runs: Sequence[StageRun], classes: Sequence[str]
) -> None:
    """A line for each class, in the order of sleep stages, with thin lines where a run follows on
    another.
    """
    order = sort_stages(classes)
    heights = {k: -place for place, k in enumerate(order)}
    start, stop = frame.x
    rules = trace_strokes(frame, ((start, y, stop, y) for y in heights.values()))
    add_path(svg, rules, stroke(RULE, 0.5))
    jumps = [(run, after) for run, after in itertools.pairwise(runs) if run.stop == after.start]
    ends = ((run.stop, heights[run.stage], run.stop, heights[after.stage]) for run, after in jumps)
    add_path(svg, trace_strokes(frame, ends), stroke(MUTED, 0.5))
    for k, name in enumerate(classes):
        y = heights[k]
        same = ((run.start, y, run.stop, y) for run in runs if run.stage == k)
        add_path(svg, trace_strokes(frame, same), stroke(SERIES[-y % 8], 2.6))
        ((_, place),) = frame.place([start], [y]).tolist()
        text = clean_text(name, 12)
        add_text(svg, text, (frame.start - 5, place + 2.5), "end", colour=MUTED, size=TICK_SIZE)


def _mark_differences(
    svg: ET.Element, frame: Frame, tracks: Sequence[Array], epoch: float, unit: TimeUnit
) -> None:
    """Bars over the epochs in which two tracks have different classes."""
    length = min(map(len, tracks))
    first, second = (track[:length] for track in tracks)
    differs = (first != second) & (first >= 0) & (second >= 0)
    runs = list_runs(np.where(differs, 0, -1), epoch, unit)
    path = trace_strokes(frame, ((run.start, 0.0, run.stop, 0.0) for run in runs))
    add_path(svg, path, stroke(SERIES[1], 7))
    middle = (frame.top + frame.bottom) / 2
    add_text(svg, "differ", (frame.start - 5, middle + 2.5), "end", colour=MUTED)


@draw_plain.register(DensityPlot)
def _draw_density(data: DensityPlot) -> ET.Element:
    """Stacked areas in the order and the colours of the hypnogram, with their legend."""
    names = [clean_text(data.classes[k], 20) for k in sort_stages(data.classes)]
    keys = [Key(name, SERIES[place % 8]) for place, name in enumerate(names)]
    top, height = PAD + measure_legend(keys, len(keys)) + 3, 1.9 * 72
    unit = choose_unit(len(data.values) * data.epoch)
    span = (0.0, len(data.values) * data.epoch / unit.seconds)
    start = find_start(["0.5"], "probability")
    frame = Frame(start, STOP, top, height - BELOW, span, (0.0, 1.0))
    svg = start_drawing(height)
    add_density(svg, frame, data)
    add_y_axis(svg, frame, list_ticks(0.0, 1.0, 6), "probability")
    add_x_axis(svg, frame, list_ticks(*span, 9), unit.name)
    add_legend(svg, keys, len(keys), is_area=True)
    return svg


def add_density(svg: ET.Element, frame: Frame, data: DensityPlot) -> None:
    """The stacked areas; of many epochs the mean of each pixel column."""
    values = np.asarray(data.values, np.float64)
    size = max(1, -(-len(values) // COLUMNS))
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    means = np.array(list(map(_average_epochs, blocks)))
    edges = np.linspace(*frame.x, len(values) + 1)[[*range(0, len(values), size), len(values)]]
    below = np.zeros(len(blocks))
    for place, k in enumerate(sort_stages(data.classes)):
        above, colour = below + means[:, k], SERIES[place % 8]
        add_path(svg, _trace_steps(frame, edges, below, above), f"fill:{colour};stroke:none")
        below = above


def _average_epochs(block: Array) -> Array:
    """The mean of epochs [n, C] without gaps, [C]; NaN where all are gaps."""
    seen = block[np.isfinite(block).all(1)]
    return seen.mean(0) if len(seen) else np.full(block.shape[1], np.nan)


def _trace_steps(frame: Frame, edges: Array, low: Array, high: Array) -> str:
    """The path around steps [n] from `low` to `high` between `edges` [n + 1]; none at NaN."""
    seen = np.isfinite(low) & np.isfinite(high)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], seen, [False]]).astype(int)))
    words = []
    for start, stop in borders.reshape(-1, 2).tolist():
        x = np.repeat(edges[start : stop + 1], 2)[1:-1]
        up = frame.place(x, np.repeat(high[start:stop], 2))
        down = frame.place(x, np.repeat(low[start:stop], 2))[::-1]
        words.append(trace_line(np.concatenate([up, down])) + "z")
    return "".join(words)
