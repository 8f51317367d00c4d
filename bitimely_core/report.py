"""One HTML file that opens anywhere, and the numbers beside it.

`write(folder, page)` draws a `Page`: `report.html` (under 1 MB, no request to any server, light and dark, prints), a `.svg` of each figure,
a `.parquet` of each figure and table, and `summary.json`. The same page gives the same bytes. Everything foreign (channel names, codes,
paths) is text: cleaned of control characters, escaped by the template, and never read as markup or as mathematics.

A figure of kind `bars` that stands first is the page's headline: the first name is the result, the others are what it is compared with.
A block of text that starts with "## " is a heading. A cell of a table may be a metric object `{value, lo, hi, ...}` of `evaluate`.
A figure of kind `matrix` may hold panels: `values` [M, R, C] with `names` [M]; small ones take `row_names` and `column_names`, and every
cell shows its number. Large ones are drawn by the strongest entry of each block of cells; the Parquet file holds them all. A signal of
`traces` with `accent` true is drawn in colour; `lanes` = {"names", "spans": [{"start", "stop", "name"}]} (seconds) adds a panel with a
line a name, on the same axis: a hypnogram, beats, events.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import __version__, store
from bitimely_core.batch import Figure, Page, Table
from bitimely_core.errors import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas

Array = npt.NDArray[Any]
Columns = dict[str, Array]

LIMIT = 1_000_000  # bytes of report.html
CSV_LIMIT = 60_000  # bytes of a table that the page carries as a download; larger ones are in the Parquet file alone
ROWS = 500  # rows of a table that are shown
PIXELS = 240  # rows and columns of a drawn matrix
COLUMNS = 620  # pixel columns of a drawn trace
WIDTH = 7.5  # inches of a drawing
TEMPLATES = Path(__file__).parent / "templates"
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

# Colours on white; in the page each becomes a variable of that name, which the dark scheme sets to the second one.
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
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.unicode_minus": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "path.simplify": False,
}


# --- text and numbers ---------------------------------------------------------------------------------------------------------------------


def text(value: object, limit: int = 2000) -> str:
    """Foreign text on one line, without what XML, a terminal or a spreadsheet would act upon other than by showing it."""
    return clean(re.sub(r"[\n\r\t]+", " ", str(value)).replace("\ufffe", "?").replace("\uffff", "?"), limit)


def number(value: float | None, digits: int | None = None) -> str:
    """A number for people: three decimals where that says enough, a dash for what is not defined.

    >>> number(0.8421), number(12345), number(3.2e-7), number(None)
    ('0.842', '12,345', '3.2×10⁻⁷', '–')
    """
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, int | np.integer):
        return f"{value:,}".replace("-", "−")
    size = abs(value)
    if digits is None and size and not 1e-3 <= size < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}×10".replace("-", "−") + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    places = (3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0) if digits is None else digits
    return f"{value:,.{places}f}".replace("-", "−")


def slug(name: str, taken: set[str]) -> str:
    """`name` as the name of a file and an anchor, unlike those `taken`; it is added to them."""
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "figure"
    found, k = base, 2
    while found in taken:
        found, k = f"{base}-{k}", k + 1
    taken.add(found)
    return found


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays as lists, NaN and infinities as null, keys as text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _numeric(values: Sequence[Any]) -> bool:
    return all(v is None or (isinstance(v, int | float | np.number) and not isinstance(v, bool)) for v in values) and any(
        v is not None for v in values
    )


# --- the data behind a figure -------------------------------------------------------------------------------------------------------------


def _array(values: Any) -> Array:
    """Numbers as float64 (None: NaN)."""
    return (
        np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        if isinstance(values, list | tuple)
        else np.asarray(values, np.float64)
    )


def _panels(data: Mapping[str, Any]) -> tuple[Array, list[str]]:
    """The matrices of a figure, [M, R, C], and their names."""
    values = np.asarray(data["values"])
    values = values if values.dtype == np.float32 else values.astype(np.float64)  # large maps come in single precision
    return (values[None], [""]) if values.ndim == 2 else (values, [text(n) for n in data.get("names", range(1, len(values) + 1))])


def _stages(track: Mapping[str, Any], classes: Sequence[str]) -> Array:
    """Class numbers of a track, -1 where there is none; they may be given as names."""
    ids = {name: k for k, name in enumerate(classes)}
    numbers = [
        ids.get(s, -1) if isinstance(s, str) else -1 if s is None else int(s) for s in np.asarray(track["stages"], dtype=object).tolist()
    ]
    return np.array([k if 0 <= k < len(classes) else -1 for k in numbers], dtype=np.int64)


def figure_data(figure: Figure) -> Columns:
    """Every number of a figure as columns of one table, for Parquet and CSV."""
    data = figure.data
    if figure.kind == "lines":
        parts: dict[str, list[Array]] = {"x": [], "y": [], "lo": [], "hi": []}
        names: list[str] = []
        for s in data["series"]:
            y = _array(s["y"])
            names += [text(s["name"])] * len(y)
            for key, values in {"x": s["x"], "y": y, "lo": s.get("lo"), "hi": s.get("hi")}.items():
                parts[key].append(np.full(len(y), np.nan) if values is None else _array(values))
        banded = any(s.get("lo") is not None for s in data["series"])
        return {"series": np.array(names, str), **{k: np.concatenate([np.empty(0), *v]) for k, v in parts.items() if banded or k in "xy"}}
    if figure.kind == "matrix":
        values, names = _panels(data)
        m, r, c = values.shape
        columns = [text(n) for n in data.get("column_names", range(c))]
        rows = np.tile(np.array([text(n) for n in data["row_names"]]) if "row_names" in data else np.arange(r), m)
        head: Columns = {"panel": np.repeat(np.array(names, str), r)} if m > 1 or names != [""] else {}
        return {**head, "row": rows, **{f"column {n}": values[:, :, k].ravel() for k, n in enumerate(columns)}}
    if figure.kind == "bars":
        extra = {k: _array(data[k]) for k in ("lo", "hi") if data.get(k) is not None}
        return {"name": np.array([text(n) for n in data["names"]], str), "value": _array(data["values"]), **extra}
    if figure.kind == "traces":
        signals = [(text(s["name"]), text(s.get("unit") or ""), _array(s["values"])) for s in data["signals"]]
        return {
            "signal": np.concatenate([np.empty(0, str), *(np.full(len(v), n) for n, _, v in signals)]),
            "seconds": np.concatenate([np.empty(0), *(np.arange(len(v)) / data["rate"] for _, _, v in signals)]),
            "value": np.concatenate([np.empty(0), *(v for _, _, v in signals)]),
            "unit": np.concatenate([np.empty(0, str), *(np.full(len(v), u) for _, u, v in signals)]),
        }
    if figure.kind == "hypnogram":
        classes = [text(c) for c in data["classes"]]
        tracks = {text(t["name"]): _stages(t, data["classes"]) for t in data["tracks"]}
        n = max((len(v) for v in tracks.values()), default=0)
        said = np.array([*classes, ""])  # -1 is the last: no stage
        padded = {f"stage {name}": said[np.pad(v, (0, n - len(v)), constant_values=-1)] for name, v in tracks.items()}
        return {"epoch": np.arange(n), "seconds": np.arange(n) * float(data["epoch"]), **padded}
    if figure.kind == "timelines":
        lanes = [(text(lane["name"]), _array(lane["times"]), lane["groups"]) for lane in data["lanes"]]
        groups = np.array([text(g) for g in data["groups"]], str)
        return {
            "lane": np.concatenate([np.empty(0, str), *(np.full(len(times), name) for name, times, _ in lanes)]),
            "time": np.concatenate([np.empty(0), *(times for _, times, _ in lanes)]),
            "group": np.concatenate([np.empty(0, str), *(groups[np.asarray(which, dtype=np.int64)] for _, _, which in lanes)]),
        }
    if figure.kind == "scatter":
        groups = np.array([*(text(g) for g in data["groups"]), ""], str)  # -1 is the last: no group
        return {
            "panel": np.concatenate([np.empty(0, str), *(np.full(len(p["x"]), text(p["name"])) for p in data["panels"])]),
            "x": np.concatenate([np.empty(0), *(_array(p["x"]) for p in data["panels"])]),
            "y": np.concatenate([np.empty(0), *(_array(p["y"]) for p in data["panels"])]),
            "group": np.concatenate([np.empty(0, str), *(groups[np.asarray(p["group"], dtype=np.int64)] for p in data["panels"])]),
        }
    raise ValueError(f"figure {figure.name!r} has kind {figure.kind!r}, expected {', '.join(DRAWN)}")


def table_data(table: Table) -> Columns:
    """A table as columns: numbers where all cells are, else text; a metric object gives its value, lo and hi."""
    out: Columns = {}
    for k, name in enumerate(table.columns):
        cells = [row[k] for row in table.rows]
        label = text(name)
        if any(isinstance(c, Mapping) for c in cells):
            for part in ("value", "lo", "hi"):
                values = [c.get(part) if isinstance(c, Mapping) else c if part == "value" else None for c in cells]
                out[label if part == "value" else f"{label} {part}"] = _array(values)
        elif _numeric(cells):
            whole = all(isinstance(c, int | np.integer) for c in cells)
            out[label] = np.array(cells, np.int64) if whole else _array(cells)
        else:
            out[label] = np.array(["" if c is None else text(c) for c in cells], str)
    return out


def _parquet(columns: Columns) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    out = io.BytesIO()
    unique: set[str] = set()
    names = []
    for name in columns:
        fresh, k = name, 2
        while fresh in unique:
            fresh, k = f"{name} {k}", k + 1
        unique.add(fresh)
        names.append(fresh)
    parquet.write_table(
        pa.Table.from_arrays([pa.array(v.tolist() if v.dtype.kind == "U" else v) for v in columns.values()], names), out, compression="zstd"
    )
    return out.getvalue()


def csv(columns: Columns) -> str:
    """Columns as CSV. Text that a spreadsheet could take for a formula (= + - @ at its start) gets an apostrophe; numbers do not."""

    def cell(value: Any) -> str:
        if isinstance(value, str):
            quoted = f"'{value}" if value[:1] in ("=", "+", "-", "@") else value
            return '"' + quoted.replace('"', '""') + '"' if any(c in quoted for c in ',"\n') else quoted
        return "" if value is None or value != value else repr(value)  # not NaN

    lines = [",".join(cell(name) for name in columns)]
    lines += [",".join(map(cell, row)) for row in zip(*(v.tolist() for v in columns.values()), strict=True)]
    return "\r\n".join(lines) + "\r\n"


def _csv_link(columns: Columns) -> tuple[str, bool]:
    """A link that carries the CSV, or "" where it would be too large; and whether it holds text."""
    if sum(v.size for v in columns.values()) * 6 > CSV_LIMIT:  # not even worth writing
        return "", False
    data = csv(columns).encode()
    if len(data) > CSV_LIMIT:
        return "", False
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(data).decode(), any(v.dtype.kind == "U" for v in columns.values())


# --- drawing ------------------------------------------------------------------------------------------------------------------------------


def _tick(value: float, _: int = 0) -> str:
    return f"{value:.6g}".replace("-", "−")


def _decade(value: float, _: int = 0) -> str:
    exponent = math.log10(value) if value > 0 else math.nan
    if abs(exponent - round(exponent)) > 1e-6:
        return ""
    return _tick(value) if -3 <= exponent <= 4 else "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _ticks(axes: Axes, *, logx: bool = False, logy: bool = False) -> None:
    """Tick labels as plain text: the library's own would be mathematics."""
    _plain_ticks(axes.xaxis, log=logx)
    _plain_ticks(axes.yaxis, log=logy)


def _plain_ticks(axis: Axis, *, log: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(_decade if log else _tick))
    axis.set_minor_formatter(NullFormatter())


def envelope(values: Array, columns: int = COLUMNS) -> tuple[Array, Array]:
    """Where a long trace is to be drawn: the smallest and the largest sample of each pixel column, in order of time. Spikes stay.

    Args:
        values: [n], NaN where nothing was measured.
        columns: pixel columns.

    Returns:
        Indices [m] (m = n up to 2 columns) and the values there.
    """
    n = len(values)
    if n <= 2 * columns:
        return np.arange(n), values
    edges = np.linspace(0, n, columns + 1).astype(int)
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    index = np.unique(np.concatenate([[a + low[a:b].argmin(), a + high[a:b].argmax()] for a, b in itertools.pairwise(edges)]))
    return index, values[index]


def blocks_of(values: Array, limit: int = PIXELS) -> Array:
    """A matrix [R, C] at no more than `limit` rows and columns: each block by its entry of largest magnitude, with its sign."""
    for axis in (0, 1):
        n = values.shape[axis]
        if n > limit:
            size = -(-n // limit)
            values = np.moveaxis(values, axis, 0)
            padded = np.concatenate([values, np.full((-n % size, *values.shape[1:]), np.nan)])
            grouped = padded.reshape(-1, size, *values.shape[1:])
            strongest = np.where(np.isnan(grouped), -1.0, np.abs(grouped)).argmax(1)
            values = np.moveaxis(np.take_along_axis(grouped, strongest[:, None], 1)[:, 0], 0, axis)
    return values


def _lines(figure: Figure) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    data, series = figure.data, figure.data["series"]
    canvas = Canvas(figsize=(WIDTH, 3.3 if len(series) <= 8 else 3.8), layout="constrained")
    axes = canvas.add_subplot()
    handles = []
    for k, s in enumerate(series):
        x, y = _array(s["x"]), _array(s["y"])
        colour, dash = (MUTED, DASHES[1]) if s.get("reference") else (SERIES[k % 8], DASHES[k // 8 % 4])
        index, _ = envelope(y)
        if s.get("lo") is not None:
            axes.fill_between(x[index], _array(s["lo"])[index], _array(s["hi"])[index], color=colour, alpha=0.16, linewidth=0)
        marker = "o" if len(x) <= 12 and not s.get("reference") else ""
        handles += axes.plot(x[index], y[index], color=colour, linestyle=dash, linewidth=1.3, marker=marker, markersize=3.2)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    logx, logy = (bool(data.get(f"log{k}")) and any((_array(s[k]) > 0).any() for s in series) for k in "xy")
    if logx:
        axes.set_xscale("log")
    if logy:
        axes.set_yscale("log")
    axes.set_xlabel(text(data.get("xlabel", "")))
    axes.set_ylabel(text(data.get("ylabel", "")))
    axes.margins(x=0.02)
    _ticks(axes, logx=logx, logy=logy)
    every = np.concatenate([np.empty(0), *(_array(s["x"]) for s in series)])
    if logx and len(np.unique(every)) <= 10:  # a handful of lengths: each by its number
        axes.set_xticks(np.unique(every), [_tick(v) for v in np.unique(every)])
        axes.set_xticks([], minor=True)
    if every.size and not logx and (every % 1 == 0).all():
        axes.locator_params(axis="x", integer=True)
    if len(series) > 1 or (series and series[0]["name"]):
        labels = [" " + text(s["name"], 60) for s in series]  # a leading underscore would hide it
        canvas.legend(
            handles, labels, loc="outside upper left", ncols=min(len(labels), 4), frameon=False, handlelength=2.2, columnspacing=1.6
        )
    return canvas


def _matrix(figure: Figure) -> tuple[Canvas, str]:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure as Canvas

    data = figure.data
    values, names = _panels(data)
    m, r, c = values.shape
    finite = values[np.isfinite(values)]
    size = np.abs(finite)
    diverging, named = bool(data.get("diverging")), max(r, c) <= 16 and ("row_names" in data or "column_names" in data)
    largest = float(size.max(initial=0.0)) or 1.0
    top = (float(np.quantile(size, 0.995)) or largest) if size.size >= 100 and not named else largest  # one spike must not bleach the rest
    low = -top if diverging else float(finite.min(initial=0.0))
    # an odd number of colours, so that zero has its own; few of them, so that the picture is small
    palette = LinearSegmentedColormap.from_list("bitimely", DIVERGING if diverging else SEQUENTIAL, N=63)
    palette.set_bad(RULE)
    across = min(m, 4)
    down = -(-m // across)
    wide = WIDTH if m > 1 else min(WIDTH, 1.4 + 0.5 * c) if named else 4.8
    shape = min(max(r / c, 0.35), 1.4) if not named else r / c
    canvas = Canvas(figsize=(wide, down * ((wide - 1.0) / across * shape + 0.3) + 0.5), layout="compressed")
    grid = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for k, axes in enumerate(grid.flat):
        if k >= m:
            axes.set_visible(False)
            continue
        picture = axes.imshow(
            blocks_of(values[k]),
            cmap=palette,
            vmin=low,
            vmax=top,
            interpolation="none",
            extent=(-0.5, c - 0.5, r - 0.5, -0.5),
            aspect="equal" if named or 0.35 <= r / c <= 1.4 else "auto",
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(True)
        if m > 1:
            axes.set_title(names[k], loc="left", color=INK)
        for edge in () if data.get("mark") is None else data["mark"]:
            axes.axvline(edge, color=INK, linewidth=0.7, linestyle=DASHES[1])
        if named:
            _cells(axes, values[k], low, top, data)
        else:
            _ticks(axes)
            axes.locator_params(nbins=4 if m > 1 else 6, integer=True)
        if k >= m - across:
            axes.set_xlabel(text(data.get("xlabel", "")))
            axes.tick_params(labelbottom=True)
        if k % across == 0:
            axes.set_ylabel(text(data.get("ylabel", "")))
    if named or not size.size:
        return canvas, ""
    ticks = [low, (low + top) / 2, top]
    bar = canvas.colorbar(picture, ax=grid, shrink=0.6, aspect=24, pad=0.02, ticks=ticks)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    clipped = largest > top
    ends = [_tick(float(f"{v:.3g}")) for v in ticks]
    bar.ax.set_yticklabels([("≤ " if clipped and diverging else "") + ends[0], ends[1], ("≥ " if clipped else "") + ends[2]])
    bar.ax.tick_params(length=0)
    note = f"Colours saturate at {ends[2]}, the 99.5th percentile of magnitudes." if clipped else ""
    if max(r, c) > PIXELS:
        note += f" Drawn by the strongest entry of each block; the file holds all {r:,} × {c:,} values."
    return canvas, note.strip()


def _cells(axes: Axes, values: Array, low: float, top: float, data: Mapping[str, Any]) -> None:
    """Names along a small matrix and the number in every cell, light on dark."""
    r, c = values.shape
    axes.set_xticks(range(c), [text(n, 24) for n in data.get("column_names", range(c))], rotation=0 if c <= 8 else 60)
    axes.set_yticks(range(r), [text(n, 24) for n in data.get("row_names", range(r))])
    axes.tick_params(length=0)
    whole = bool((values[np.isfinite(values)] % 1 == 0).all())
    for i in range(r):
        for j in range(c):
            value = float(values[i, j])
            share = abs(value) / top if low < 0 else (value - low) / (top - low or 1.0)
            shown = f"{int(value):,}" if whole and math.isfinite(value) else number(value, 2 if top <= 10 else None)
            axes.text(j, i, shown, ha="center", va="center", color=PAPER if share > 0.55 else INK, fontsize=7)


def _bars(figure: Figure) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    data = figure.data
    values, n = _array(data["values"]), len(data["values"])
    canvas = Canvas(figsize=(WIDTH, 0.62 + 0.25 * max(n, 1)), layout="constrained")
    axes = canvas.add_subplot()
    y = np.arange(n)
    axes.barh(y, np.nan_to_num(values), height=0.5, color=SERIES[0], linewidth=0)
    if data.get("lo") is not None and data.get("hi") is not None:
        axes.hlines(y, _array(data["lo"]), _array(data["hi"]), color=INK, linewidth=1.1)
    axes.set_yticks(y, [text(name, 48) for name in data["names"]], color=INK)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(not (values < 0).any())
    axes.axvline(0, color=MUTED, linewidth=0.6)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(text(data.get("ylabel", "")))
    _plain_ticks(axes.xaxis)
    return canvas


def _clock(seconds: float) -> tuple[float, str]:
    """The unit in which a stretch of so many seconds is read."""
    return (3600.0, "hours") if seconds > 2 * 3600 else (60.0, "minutes") if seconds > 300 else (1.0, "seconds")


def _traces(figure: Figure) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    data, signals = figure.data, figure.data["signals"]
    n, rate = max(len(signals), 1), float(data["rate"])
    length = max((len(s["values"]) for s in signals), default=1) / rate
    per, unit = _clock(length)
    lanes = data.get("lanes")
    tall = [0.85 if n <= 8 else 0.6] * n + ([0.2 + 0.17 * max(len(lanes["names"]), 2)] if lanes else [])
    canvas = Canvas(figsize=(WIDTH, 0.5 + sum(tall)), layout="constrained")
    canvas.get_layout_engine().set(hspace=0.0, h_pad=0.02)  # type: ignore[union-attr, call-arg]
    grid = canvas.subplots(len(tall), 1, squeeze=False, sharex=True, height_ratios=tall)[:, 0]
    if lanes:
        _lanes(grid[-1], lanes, per)
    for axes, s in zip(grid[:n], signals, strict=False):
        index, drawn = envelope(_array(s["values"]))
        for span in data.get("spans") or ():
            axes.axvspan(span["start"] / per, span["stop"] / per, color=SERIES[1], alpha=0.16, linewidth=0)
        axes.plot(index / rate / per, drawn, color=INK if not s.get("accent") else SERIES[0], linewidth=0.6)
        measured = text(s["name"], 24) + (f"\n{text(s['unit'], 12)}" if s.get("unit") else "")
        axes.set_ylabel(measured, rotation=0, ha="right", va="center", color=INK)
        axes.locator_params(axis="y", nbins=3)
        axes.margins(x=0, y=0.08)
        _ticks(axes)
        if axes is not grid[-1]:
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="x", length=0)
    for span in data.get("spans") or ():
        middle = (span["start"] + span["stop"]) / 2 / per
        grid[0].annotate(
            text(span.get("name", ""), 32), (middle, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", color=SERIES[1]
        )
    grid[-1].set_xlabel(unit)
    canvas.align_ylabels(grid[:n])
    return canvas


def _lanes(axes: Axes, lanes: Mapping[str, Any], per: float) -> None:
    """Spans of time, a line a name; those without length as ticks."""
    names = list(lanes["names"])
    for k, name in enumerate(names):
        spans = [(s["start"] / per, s["stop"] / per) for s in lanes["spans"] if s["name"] == name]
        colour = SERIES[k % 8]
        long = [(a, b) for a, b in spans if b > a]
        axes.plot([v for a, b in long for v in (a, b, np.nan)], [-k] * 3 * len(long), color=colour, linewidth=4, solid_capstyle="butt")
        points = [a for a, b in spans if b <= a]
        axes.plot(points, [-k] * len(points), linestyle="", marker="|", markersize=5, markeredgewidth=0.8, color=colour)
    axes.set_yticks([-k for k in range(len(names))], [text(name, 24) for name in names], color=INK)
    axes.set_ylim(0.6 - max(len(names), 2), 0.6)
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.margins(x=0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _plain_ticks(axes.xaxis)


def _hypnogram(figure: Figure) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    data = figure.data
    classes, epoch = list(data["classes"]), float(data["epoch"])
    depth = ["W", "R", "REM", "N1", "N2", "N3", "N4"]  # as hypnograms are drawn; other classes keep their order
    order = sorted(range(len(classes)), key=lambda k: depth.index(classes[k])) if set(classes) <= set(depth) else list(range(len(classes)))
    height = {k: -place for place, k in enumerate(order)}
    tracks = [(text(t["name"], 24), _stages(t, classes)) for t in data["tracks"]]
    length = max((len(s) for _, s in tracks), default=1)
    per, unit = _clock(length * epoch)
    pair = len(tracks) == 2
    heights = [1.0] * max(len(tracks), 1)
    if pair:
        heights.insert(1, 0.13)
    canvas = Canvas(figsize=(WIDTH, 0.5 + 0.19 * max(len(classes), 3) * len(tracks) + (0.2 if pair else 0.0)), layout="constrained")
    grid = canvas.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    panels = [grid[0], grid[-1]] if pair else list(grid[: len(tracks)])
    gap = [np.nan]  # breaks a line: one path a class keeps the drawing small
    for axes, (name, stages) in zip(panels, tracks, strict=True):
        edges = [0, *(np.flatnonzero(np.diff(stages)) + 1).tolist(), len(stages)]
        held = [(a * epoch / per, b * epoch / per, int(stages[a])) for a, b in itertools.pairwise(edges) if a < b and stages[a] >= 0]
        jumps = [(stop, height[k], height[following]) for (_, stop, k), (start, _, following) in itertools.pairwise(held) if stop == start]
        axes.plot(
            [v for x, _, _ in jumps for v in (x, x, *gap)], [v for _, y, z in jumps for v in (y, z, *gap)], color=MUTED, linewidth=0.5
        )
        for k in range(len(classes)):
            x = [v for a, b, which in held if which == k for v in (a, b, *gap)]
            colour = SERIES[order.index(k) % 8]
            axes.plot(x, [height[k]] * len(x), color=colour, linewidth=2.6, solid_capstyle="butt")
        axes.set_yticks([height[k] for k in order], [text(classes[k], 12) for k in order])
        axes.set_ylim(0.6 - len(classes), 0.6)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_ylabel(name, color=INK)
        axes.tick_params(axis="y", length=0)
        for side in ("left", "bottom") if axes is not panels[-1] else ("left",):
            axes.spines[side].set_visible(False)
        if axes is not panels[-1]:
            axes.tick_params(axis="x", length=0)
    if pair:
        first, second = tracks[0][1], tracks[1][1]
        both = min(len(first), len(second))
        differ = (first[:both] != second[:both]) & (first[:both] >= 0) & (second[:both] >= 0)
        steps = np.flatnonzero(np.diff(np.concatenate([[0], differ.astype(int), [0]]))).tolist()
        x = [v * epoch / per for a, b in zip(steps[::2], steps[1::2], strict=True) for v in (a, b, *gap)]
        grid[1].plot(x, [0.0] * len(x), color=SERIES[1], linewidth=7, solid_capstyle="butt")
        grid[1].set_yticks([])
        grid[1].set_ylabel("differ", rotation=0, ha="right", va="center")
        for side in ("left", "bottom"):
            grid[1].spines[side].set_visible(False)
        grid[1].tick_params(axis="x", length=0)
    grid[-1].set_xlim(0, length * epoch / per)
    _plain_ticks(grid[-1].xaxis)
    grid[-1].set_xlabel(unit)
    canvas.align_ylabels(panels)
    return canvas


def _timelines(figure: Figure) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    data, lanes = figure.data, figure.data["lanes"]
    canvas = Canvas(figsize=(WIDTH, 0.9 + 0.24 * max(len(lanes), 1)), layout="constrained")
    axes = canvas.add_subplot()
    handles = []
    for k in range(len(data["groups"])):  # the first is the background
        at = [(x, y) for y, lane in enumerate(lanes) for x, of in zip(lane["times"], lane["groups"], strict=True) if of == k]
        colour, size = (MUTED, 5.0) if k == 0 else (SERIES[(k - 1) % 8], 8.0)
        handles += axes.plot(
            [x for x, _ in at], [y for _, y in at], linestyle="", marker="|", color=colour, markersize=size, markeredgewidth=1.1
        )
    axes.set_yticks(range(len(lanes)), [text(lane["name"], 32) for lane in lanes], color=INK)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel(text(data.get("xlabel", "")))
    _plain_ticks(axes.xaxis)
    canvas.legend(handles, [" " + text(g, 60) for g in data["groups"]], loc="outside upper left", ncols=4, frameon=False, columnspacing=1.6)
    return canvas


_CIRCLE = [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 9).tolist()]
GLYPHS: list[list[tuple[float, float]]] = [  # strokes that tell groups apart without colour; (nan, nan) lifts the pen
    [(0, 0), (0, 0)],
    [(-1, 0), (1, 0), (math.nan, math.nan), (0, -1), (0, 1)],
    [(-0.8, -0.7), (0.8, -0.7), (0, 0.9), (-0.8, -0.7)],
    [(-0.8, -0.8), (0.8, 0.8), (math.nan, math.nan), (-0.8, 0.8), (0.8, -0.8)],
    [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7), (-0.7, -0.7)],
    [(x * 0.9, y * 0.9) for x, y in _CIRCLE],
    [(0, -1), (0, 1)],
    [(-1, 0), (1, 0)],
]


def _scatter(figure: Figure) -> Canvas:
    """Points in panels, a colour and a glyph a group; each group is one path, so that thousands of points stay small."""
    from matplotlib.figure import Figure as Canvas

    data = figure.data
    panels, groups = data["panels"], list(data["groups"])
    across = min(max(len(panels), 1), 3)
    down = -(-max(len(panels), 1) // across)
    wide = WIDTH if across > 1 else 4.8
    canvas = Canvas(figsize=(wide, down * (wide / across * 0.95 + 0.25) + 0.45), layout="constrained")
    grid = canvas.subplots(down, across, squeeze=False)
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_visible(False)
            continue
        x, y, of = _array(panel["x"]), _array(panel["y"]), np.asarray(panel["group"], dtype=np.int64)
        spans = [float(np.nanmax(v) - np.nanmin(v)) or 1.0 if len(v) and np.isfinite(v).any() else 1.0 for v in (x, y)]
        for k in [-1, *range(len(groups))]:
            here = of == k
            glyph = np.array(GLYPHS[k % len(GLYPHS)] if k >= 0 else GLYPHS[0])
            pen = np.vstack([glyph, [[np.nan, np.nan]]]) * 0.011 * np.array(spans)
            size = 2.6 if k < 0 or k % len(GLYPHS) == 0 else 0.8
            colour = MUTED if k < 0 else SERIES[k % len(SERIES)]
            axes.plot(
                (x[here, None] + pen[:, 0]).ravel(),
                (y[here, None] + pen[:, 1]).ravel(),
                color=colour,
                linewidth=size,
                alpha=0.35 if k < 0 else 0.9,
                solid_capstyle="round",
            )
        axes.set_title(text(panel["name"], 60), loc="left", color=INK)
        if not data.get("ticks"):
            axes.set_xticks([])
            axes.set_yticks([])
        else:
            _ticks(axes)
        axes.set_xlabel(text(data.get("xlabel", "")))
        axes.set_ylabel(text(data.get("ylabel", "")))
    if groups and panels:
        from matplotlib.lines import Line2D

        marks = ["o", "+", "^", "x", "s", "o", "|", "_"]
        keys = [
            Line2D(
                [], [], linestyle="", marker=marks[k % 8], markersize=4.5, color=SERIES[k % 8], fillstyle="full" if k % 8 == 0 else "none"
            )
            for k in range(len(groups))
        ]
        canvas.legend(
            keys,
            [" " + text(g, 40) for g in groups],
            loc="outside upper left",
            ncols=len(groups) if len(groups) <= 6 else 4,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.4,
        )
    return canvas


DRAWN: dict[str, Callable[[Figure], Any]] = {
    "scatter": _scatter,
    "lines": _lines,
    "matrix": _matrix,
    "bars": _bars,
    "traces": _traces,
    "hypnogram": _hypnogram,
    "timelines": _timelines,
}


def draw(figure: Figure, name: str = "figure") -> tuple[ET.Element, str]:
    """The drawing of a figure as an SVG tree, and a note for its caption. No global state, no display, the same bytes every time.

    `name` makes the ids inside unlike those of other figures of the page.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the measuring font lacks are the reader's font's business
        drawn = DRAWN[figure.kind](figure)
        canvas, note = drawn if isinstance(drawn, tuple) else (drawn, "")
        out = io.BytesIO()
        canvas.savefig(
            out, format="svg", bbox_inches="tight", pad_inches=0.02, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _tidied(ET.fromstring(out.getvalue()), name), note  # noqa: S314  # drawn here


def _tidied(svg: ET.Element, name: str) -> ET.Element:
    """The tree without what a page does not need: unused ids, style sheets, digits below a tenth of a point; pictures with a palette."""
    for parent in list(svg.iter()):
        for child in list(parent):
            tag = child.tag.rpartition("}")[2]
            if tag in {"metadata", "style"}:
                parent.remove(child)
    used = set()
    for element in svg.iter():
        for value in element.attrib.values():
            used |= set(re.findall(r"url\(#([^)]+)\)", value)) | ({value[1:]} if value.startswith("#") else set())
    for element in svg.iter():
        for key, value in list(element.attrib.items()):
            plain = key.rpartition("}")[2]
            if plain == "id":
                if value in used:
                    element.set(key, f"{name}-{value}")
                else:
                    del element.attrib[key]
            elif value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
            elif plain == "href" and value.startswith("data:image/png"):
                element.set(key, _small(value))
            elif plain in {"d", "points"}:
                element.set(key, " ".join(re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value).split()))
            elif plain in {"x", "y"}:
                element.set(key, f"{float(value):.2f}")
            elif plain == "transform":
                element.set(key, re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}", value))
            elif plain == "style":
                element.set(key, re.sub(r"font-family: [^;]*;?", "", value).strip())
    for element in svg.iter():
        element.text = element.text if element.text and element.text.strip() else None
        element.tail = None
    return svg


def _small(link: str) -> str:
    """A PNG of few colours with a palette instead of four channels."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))).convert("RGB")
    pixels = np.asarray(picture)
    colours, index = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) > 256:
        return link
    small = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8), mode=None)
    small = small.convert("P") if small.mode != "P" else small
    small.putpalette(colours.astype(np.uint8).tobytes())
    out = io.BytesIO()
    small.save(out, format="PNG", optimize=True, bits=max(1, math.ceil(math.log2(max(len(colours), 2)))))
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _standalone(svg: ET.Element) -> bytes:
    """The drawing as a file of its own, in the light colours."""
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(ET.tostring(svg))  # noqa: S314  # a copy
    root.set("font-family", "DejaVu Sans, Helvetica, Arial, sans-serif")
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def _inline(svg: ET.Element, label: str) -> str:
    """The drawing as part of the page: colours are the page's variables, text is in its font."""
    root = ET.fromstring(ET.tostring(svg))  # noqa: S314  # a copy
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            plain = key.rpartition("}")[2]
            if plain != key:
                del element.attrib[key]
            if plain == "style":
                for name, (light, _) in COLOURS.items():
                    value = value.replace(light, f"var(--{name})")
            element.set(plain, value)
    points = float(root.get("viewBox", "0 0 540 0").split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    if points < 500:  # small drawings keep their size
        root.set("style", f"max-width:{points / 540 * 56:.1f}rem;min-width:{points / 540 * 38:.1f}rem")
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Parts:
    """What is written: the context of the template and the files beside it."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    headline: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    quoted: bool = False


def _headline(figure: Figure) -> dict[str, Any]:
    """The first figure of a page as rows on a common axis, positions in per cent."""
    data = figure.data
    values = _array(data["values"])
    ends = [_array(data[k]) if data.get(k) is not None else np.full(len(values), np.nan) for k in ("lo", "hi")]
    known = np.concatenate([values, *ends])
    known = known[np.isfinite(known)]
    low, high = float(known.min(initial=0.0)), float(known.max(initial=0.0))
    if high <= 1.0 and low >= 0.0:
        high = 1.0
    else:  # a round number above
        step = 10.0 ** math.floor(math.log10(max(high, -low, 1e-12)))
        high, low = math.ceil(high / step * 2) * step / 2, math.floor(low / step * 2) * step / 2

    def at(value: float) -> float:
        return round(100 * (float(value) - low) / ((high - low) or 1.0), 2)

    rows = []
    for k, name in enumerate(data["names"]):
        lo, hi = float(ends[0][k]), float(ends[1][k])
        if not math.isfinite(values[k]):
            continue
        spread = f"{number(lo)} to {number(hi)}" if math.isfinite(lo) and math.isfinite(hi) else ""
        position = {"left": at(lo), "width": round(at(hi) - at(lo), 2)} if spread else {}
        rows.append({"name": text(name, 60), "text": number(float(values[k])), "interval": spread, "at": at(values[k]), **position})
    return {"rows": rows, "ticks": [{"at": 25 * k, "text": _tick(low + (high - low) * k / 4)} for k in range(5)]}


def _cell(value: Any, digits: int | None) -> dict[str, Any]:
    """A cell as the template shows it; `key` is what the column sorts by."""
    interval = ""
    if isinstance(value, Mapping):
        if value.get("lo") is not None and value.get("hi") is not None:
            interval = f"{number(value['lo'])}–{number(value['hi'])}"
        value = value.get("value", value.get("difference"))
    if isinstance(value, bool | np.bool_):
        return {"text": "yes" if value else "no", "key": "yes" if value else "no", "numeric": False, "none": False, "interval": ""}
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return {"text": "–", "key": "", "numeric": True, "none": True, "interval": ""}
    if isinstance(value, int | float | np.number):
        plain = value.item() if isinstance(value, np.number) else value
        return {"text": number(plain, digits), "key": repr(plain), "numeric": True, "none": False, "interval": interval}
    return {"text": text(value), "key": text(value), "numeric": False, "none": False, "interval": ""}


def _decimals(cells: list[Any]) -> int | None:
    """Decimals for a whole column, so that points stand below each other; None: number by number."""
    values = [cell.get("value") if isinstance(cell, Mapping) else cell for cell in cells]
    sizes = [abs(float(v)) for v in values if isinstance(v, float | np.floating) and math.isfinite(v) and v]
    return 3 if sizes and min(sizes) >= 1e-3 and max(sizes) < 10 else None


def _table(table: Table) -> dict[str, Any]:
    if any(len(row) != len(table.columns) for row in table.rows):
        raise ValueError(f"table {table.name!r} has rows that do not have {len(table.columns)} cells")
    shown = table.rows[:ROWS]
    columns = [[row[k] for row in shown] for k in range(len(table.columns))]
    numeric = [
        bool(c)
        and all(v is None or isinstance(v, Mapping) or (isinstance(v, int | float | np.number) and not isinstance(v, bool)) for v in c)
        for c in columns
    ]
    made = [[_cell(v, _decimals(column)) for v in column] for column in columns]
    for cells, is_number in zip(made, numeric, strict=True):
        for cell in cells:
            cell["numeric"] = is_number
    note = f"The first {ROWS} of {len(table.rows):,} rows; the file holds all." if len(table.rows) > ROWS else ""
    return {
        "kind": "table",
        "columns": [{"name": text(n, 80), "numeric": is_number} for n, is_number in zip(table.columns, numeric, strict=True)],
        "rows": [list(row) for row in zip(*made, strict=True)],
        "note": note,
    }


def _parts(page: Page) -> _Parts:
    """Draw and tabulate everything."""
    out, taken = _Parts(), {"report", "summary", "notices", "predictions", "scores"}
    counts = {"Figure": 0, "Table": 0}
    level = 2
    for position, block in enumerate(page.blocks):
        if isinstance(block, str):
            heading = block.startswith("## ")
            level = 3 if heading else level
            out.blocks.append({"kind": "heading" if heading else "text", "text": text(block.removeprefix("## "), 5000)})
            continue
        name = slug(block.name, taken)
        figure = isinstance(block, Figure)
        columns = figure_data(block) if isinstance(block, Figure) else table_data(block)
        link, quoted = _csv_link(columns)
        out.quoted |= quoted
        out.files[f"{name}.parquet"] = _parquet(columns)
        entry = {
            "slug": name,
            "title": text(block.title),
            "caption": text(block.caption),
            "level": level,
            "csv": link,
            "file": f"{name}.parquet",
        }
        if isinstance(block, Figure):
            svg, note = draw(block, name)
            out.files[f"{name}.svg"] = _standalone(svg)
            entry |= {"kind": "figure", "svg": f"{name}.svg", "note": note}
            if position == 0 and block.kind == "bars" and np.isfinite(_array(block.data["values"])[:1]).any():
                out.headline = entry | _headline(block)
                continue
            entry["svg_inline"] = _inline(svg, f"{text(block.title)}. {text(block.caption)}")
        else:
            entry |= _table(block)
        kind = "Figure" if figure else "Table"
        counts[kind] += 1
        entry["label"] = f"{kind} {counts[kind]}"
        out.blocks.append(entry)
    return out


def html(page: Page, files: Mapping[str, str] | None = None, *, alone: bool = False) -> str:
    """The page as one HTML text, with links to the files that `write` makes; `alone`: without, for a page that stands by itself."""
    return _html(page, _parts(page), files or {}, alone=alone)


def _html(page: Page, parts: _Parts, files: Mapping[str, str], *, alone: bool = False) -> str:
    """Fill the template; where the page would be too large, downloads give way first, then the largest drawings (both stand beside it)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment: Any = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=False
    )
    script = (TEMPLATES / "script.html.j2").read_text("utf-8").strip()
    schemes = {name: " ".join(f"--{k}:{pair[side]};" for k, pair in COLOURS.items()) for side, name in enumerate(("light", "dark"))}
    style = environment.get_template("style.html.j2").render({k: Markup(v) for k, v in schemes.items()})  # noqa: S704  # our own colours
    beside = {"svg": "", "file": ""} if alone else {}
    blocks = [{"svg": "", "note": "", **b, **beside} for b in parts.blocks]
    drawings = {b["slug"]: b["svg_inline"] for b in blocks if b.get("svg_inline")}
    context = {
        "title": text(page.title),
        "verdict": text(page.verdict),
        "notices": [text(n) for n in page.notices],
        "facts": [(text(k), text(v)) for k, v in page.facts.items()],
        "contents": [b for b in blocks if b["kind"] in {"figure", "table"}] if len(blocks) > 3 else [],
        "headline": parts.headline and parts.headline | beside,
        "alone": alone,
        "blocks": blocks,
        "files": [(text(k), text(v)) for k, v in files.items()],
        "cells_quoted": parts.quoted,
        "version": __version__,
        "style": Markup(style),  # noqa: S704  # our own
        "script": Markup(script),  # noqa: S704  # our own
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    template = environment.get_template("report.html.j2")

    def filled() -> str:
        for b in blocks:
            if b["kind"] == "figure":
                b["svg_inline"] = Markup(drawings[b["slug"]]) if b["slug"] in drawings else ""  # noqa: S704  # drawn here, text escaped
        return template.render(context) + "\n"

    out = filled()
    while len(out.encode()) > LIMIT:
        linked = [b for b in blocks if b.get("csv")]
        if linked:
            max(linked, key=lambda b: len(b["csv"]))["csv"] = ""
        elif drawings:
            del drawings[max(drawings, key=lambda name: len(drawings[name]))]
        else:
            break
        out = filled()
    return out


def _ours(folder: Path) -> Iterator[str]:
    """Files that a former report made in `folder`, by its own list."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for name in json.loads((folder / "summary.json").read_bytes())["report"]["files"]:
            if re.fullmatch(r"[a-z0-9-]+\.(parquet|svg)", name):
                yield name


def write(folder: Path | str, page: Page, *, files: Mapping[str, str] | None = None) -> Path:
    """Write `report.html`, `summary.json`, and the data and drawing of every figure and table into `folder`.

    A former report is taken away first and the new one comes last, so that a `report.html` always belongs to the files beside it.

    Args:
        folder: made if it is missing; other files in it are left alone.
        page: what to show.
        files: further files of the folder to name at the end: name -> what it holds.

    Returns:
        The path of `report.html`.

    Raises:
        UserError: the disk is full or cannot be written (exit 6).
    """
    parts = _parts(page)
    rendered = _html(page, parts, files or {})
    folder = store.make_folder(Path(folder))
    former = set(_ours(folder))
    with suppress(FileNotFoundError):
        store.os_unlink(folder / "report.html")
    for name in former - parts.files.keys():
        with suppress(FileNotFoundError):
            store.os_unlink(folder / name)
    written = {name: store.write_bytes(folder / name, data) for name, data in parts.files.items()}
    about = {
        "title": page.title,
        "verdict": page.verdict,
        "notices": page.notices,
        "facts": page.facts,
        "files": {name: {"sha256": sha, "size": size} for name, (sha, size) in written.items()},
    }
    store.write_json(folder / "summary.json", _plain({"format_version": 1, **page.summary, "report": about}))
    store.write_bytes(folder / "report.html", rendered.encode())
    return folder / "report.html"
