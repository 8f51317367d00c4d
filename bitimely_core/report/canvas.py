"""What drawings of all kinds share: colours, style, canvases with their axes, and the thinning of
data to what a screen can show.

There is no global state and no display. Each kind of figure registers its drawing with `draw_data`
(`figures`, `figures_in_time`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitimely_core.report.numbers import Array
from bitimely_core.report.page_text import clean_text

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
TICKS = {"color": MUTED, "labelsize": 7, "major.size": 2.5, "major.width": 0.6}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a channel may be called "$x_1"
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    **{f"xtick.{name}": value for name, value in TICKS.items()},
    **{f"ytick.{name}": value for name, value in TICKS.items()},
    "axes.unicode_minus": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "path.simplify": False,
}


@singledispatch
def draw_data(data: object) -> Canvas:
    """The drawing of one kind of figure; each kind is registered in another module."""
    raise ValueError(f"data of type {type(data).__name__} are no kind of figure")


def new_canvas(
    height: float,
    width: float = WIDTH,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> Canvas:
    """An empty canvas of a size in inches."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout=layout)


def arrange_panels(count: int, most: int) -> tuple[int, int]:
    """Rows and columns of a grid for `count` panels, at most `most` beside each other; at least one
    place.
    """
    across = min(max(count, 1), most)
    return -(-max(count, 1) // across), across


def hide_rest(grid: Array, count: int) -> None:
    """Hide the axes of a grid behind the first `count`."""
    for axes in grid.flat[count:]:
        axes.set_visible(False)


def format_tick(value: float, _: int = 0) -> str:
    """The label of a tick: plain text."""
    return f"{value:.6g}".replace("-", "−")


def set_plain_ticks(*axes: Axis) -> None:
    """Tick labels as plain text instead of matplotlib's mathematics."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in axes:
        axis.set_major_formatter(FuncFormatter(format_tick))
        axis.set_minor_formatter(NullFormatter())


def add_legend(
    canvas: Canvas, handles: Sequence[Any], names: Iterable[str], limit: int = 60, **options: Any
) -> None:
    """A legend above the axes; names are cut to `limit` characters."""
    labels = [" " + clean_text(name, limit) for name in names]  # a leading underscore would hide it
    canvas.legend(handles, labels, loc="outside upper left", frameon=False, **options)


def name_rows(axes: Axes, places: Sequence[float] | Array, names: Iterable[str]) -> None:
    """Names at the vertical axis instead of ticks, with thin lines behind the data."""
    axes.set_yticks(places, list(names), color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", linewidth=0.5)


def separate_strokes(strokes: Iterable[Sequence[float]]) -> list[float]:
    """Coordinates of all strokes with NaN behind each, which keeps them apart in one path."""
    return list(itertools.chain.from_iterable((*stroke, math.nan) for stroke in strokes))


def reduce_trace(values: Array) -> tuple[Array, Array]:
    """The smallest and the largest sample of each of `COLUMNS` pixel columns of a trace [n] (NaN:
    not measured), so that spikes remain.

    Returns their indices [m] in order of time (m = n up to 2 `COLUMNS`) and the values there.
    """
    n = len(values)
    if n <= 2 * COLUMNS:
        return np.arange(n), values
    edges = np.linspace(0, n, COLUMNS + 1).astype(int)
    low = np.where(np.isnan(values), np.inf, values)
    high = np.where(np.isnan(values), -np.inf, values)
    extremes = [
        (start + low[start:stop].argmin(), start + high[start:stop].argmax())
        for start, stop in itertools.pairwise(edges)
    ]
    index = np.unique(extremes)
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
