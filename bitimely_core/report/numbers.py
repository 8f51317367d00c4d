"""The numbers behind a page: every figure and table as columns, and these as Parquet and CSV."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from bitimely_core import page
from bitimely_core.errors import quote_formula
from bitimely_core.page import HeatMap, Link, StageTrack, Table
from bitimely_core.report.page_text import clean_text, is_numeric

Array = npt.NDArray[Any]
Columns = dict[str, Array]

# bytes of a download inside the page; larger tables are in the Parquet file only
CSV_LIMIT = 60_000


def to_array(values: Any) -> Array:
    """Numbers as float64 (None: NaN)."""
    return np.asarray(values, np.float64)


def fill_missing(values: Any, count: int) -> Array:
    """Numbers as float64; `count` NaN where there are none."""
    return np.full(count, np.nan) if values is None else to_array(values)


def to_texts(names: Iterable[object], limit: int = 2000) -> Array:
    """Foreign names as an array of clean texts of at most `limit` characters."""
    return np.array([clean_text(name, limit) for name in names], str)


def join_parts(parts: Iterable[Array], kind: type = float) -> Array:
    """Arrays one after another; without any an empty array of `kind`."""
    return np.concatenate([np.empty(0, kind), *parts])


def join_field(parts: Iterable[object], name: str) -> Array:
    """The numbers in one field of all parts, one part after another."""
    return join_parts(to_array(getattr(part, name)) for part in parts)


def _repeat_names(parts: Iterable[tuple[str, Sized]]) -> Array:
    """Each name as often as its values have entries."""
    return join_parts((np.full(len(values), clean_text(name)) for name, values in parts), str)


def matrix_panels(data: HeatMap) -> tuple[Array, list[str]]:
    """The matrices of a figure, [M, R, C], and their names. Large maps stay in single precision."""
    values = np.asarray(data.values)
    if values.dtype != np.float32:
        values = values.astype(np.float64)
    if values.ndim == 2:
        return values[None], [""]
    return values, list(map(clean_text, data.names or range(1, len(values) + 1)))


def stage_indices(track: StageTrack, classes: Sequence[str]) -> Array:
    """Class numbers of a track given by name or number, -1: no class."""
    numbers: dict[Any, int] = {name: k for k, name in enumerate(classes)}
    numbers |= {k: k for k in range(len(classes))}
    stages = np.asarray(track.stages, dtype=object).tolist()
    return np.array([numbers.get(stage, -1) for stage in stages], dtype=np.int64)


@singledispatch
def list_columns(data: object) -> Columns:
    """All numbers of one kind of figure as columns of one table; each kind is registered below."""
    raise ValueError(f"data of type {type(data).__name__} are no kind of figure")


@list_columns.register
def _(data: page.LinePlot) -> Columns:
    has_bands = any(line.lo is not None for line in data.series)
    columns: Columns = {"series": _repeat_names((line.name, line.y) for line in data.series)}
    for key in ("x", "y", "lo", "hi") if has_bands else ("x", "y"):
        columns[key] = join_parts(
            fill_missing(getattr(line, key), len(line.y)) for line in data.series
        )
    return columns


@list_columns.register
def _(data: HeatMap) -> Columns:
    values, panels = matrix_panels(data)
    count, rows, width = values.shape
    row_names = np.arange(rows) if data.row_names is None else to_texts(data.row_names)
    columns: Columns = {"panel": np.repeat(np.array(panels, str), rows)} if panels != [""] else {}
    columns["row"] = np.tile(row_names, count)
    for k, name in enumerate(data.column_names or range(width)):
        columns[f"column {clean_text(name)}"] = values[:, :, k].ravel()
    return columns


@list_columns.register
def _(data: page.FlowPlot) -> Columns:
    return {
        "box": to_texts([*data.names, *data.leaving]),
        "count": to_array([*data.counts, *data.leaving_counts]),
    }


@list_columns.register
def _(data: page.BarPlot) -> Columns:
    ends = {"value": data.values, "lo": data.lo, "hi": data.hi}
    columns = {name: to_array(end) for name, end in ends.items() if end is not None}
    return {"name": to_texts(data.names), **columns}


@list_columns.register
def _(data: page.RankPlot) -> Columns:
    return {
        "name": to_texts(data.names),
        "mean rank": to_array(data.ranks),
        "critical difference": np.full(len(data.names), float(data.critical)),
    }


@list_columns.register
def _(data: page.ForestPlot) -> Columns:
    columns: Columns = {
        "panel": np.repeat(to_texts(panel.name for panel in data.panels), len(data.names)),
        "name": np.tile(to_texts(data.names), len(data.panels)),
    }
    names = {"values": "value", "lo": "lo", "hi": "hi", "other": "other", "margins": "margin"}
    for key, name in names.items():
        parts = [getattr(panel, key) for panel in data.panels]
        if key in {"values", "lo", "hi"} or any(part is not None for part in parts):
            columns[name] = join_parts(fill_missing(part, len(data.names)) for part in parts)
    return columns


@list_columns.register
def _(data: page.TracePlot) -> Columns:
    return {
        "signal": _repeat_names((signal.name, signal.values) for signal in data.signals),
        "seconds": join_parts(np.arange(len(signal.values)) / data.rate for signal in data.signals),
        "value": join_field(data.signals, "values"),
        "unit": _repeat_names((signal.unit, signal.values) for signal in data.signals),
    }


@list_columns.register
def _(data: page.Hypnogram) -> Columns:
    classes = to_texts([*data.classes, ""])  # the last, of index -1: no stage
    tracks = {clean_text(track.name): stage_indices(track, data.classes) for track in data.tracks}
    epochs = np.arange(max(map(len, tracks.values()), default=0))
    columns: Columns = {"epoch": epochs, "seconds": epochs * float(data.epoch)}
    for name, stages in tracks.items():
        padded = np.pad(stages, (0, len(epochs) - len(stages)), constant_values=-1)
        columns[f"stage {name}"] = classes[padded]
    return columns


@list_columns.register
def _(data: page.DensityPlot) -> Columns:
    epochs, shares = np.arange(len(data.values)), np.asarray(data.values, np.float64)
    return {
        "epoch": epochs,
        "seconds": epochs * float(data.epoch),
        **{f"p {clean_text(name)}": shares[:, k] for k, name in enumerate(data.classes)},
    }


@list_columns.register
def _(data: page.NightPlot) -> Columns:
    columns = list_columns(data.density)
    stages = stage_indices(data.track, data.density.classes)
    columns["stage"] = to_texts([*data.density.classes, ""])[stages]
    if data.spectrogram is not None:
        for k, frequency in enumerate(data.spectrogram.frequencies):
            columns[f"dB at {frequency:g} Hz"] = data.spectrogram.power[:, k]
    return columns


@list_columns.register
def _(data: page.PointPlot) -> Columns:
    classes = to_texts(data.classes)
    return {"seconds": data.times, "true": classes[data.true], "predicted": classes[data.predicted]}


@list_columns.register
def _(data: page.TimelinePlot) -> Columns:
    groups = to_texts(data.groups)
    return {
        "lane": _repeat_names((lane.name, lane.times) for lane in data.lanes),
        "time": join_field(data.lanes, "times"),
        "group": join_parts((groups[np.asarray(lane.groups, int)] for lane in data.lanes), str),
    }


@list_columns.register
def _(data: page.ScatterPlot) -> Columns:
    groups = to_texts([*data.groups, ""])  # the last, of index -1: no group
    return {
        "panel": _repeat_names((panel.name, panel.x) for panel in data.panels),
        "x": join_field(data.panels, "x"),
        "y": join_field(data.panels, "y"),
        "group": join_parts((groups[np.asarray(panel.group, int)] for panel in data.panels), str),
    }


def table_data(table: Table) -> Columns:
    """A table as columns: numbers where all cells are numbers, else text; a metric gives value, lo
    and hi.
    """
    columns: Columns = {}
    for k, name in enumerate(table.columns):
        cells = [row[k] for row in table.rows]
        cells = [cell.text if isinstance(cell, Link) else cell for cell in cells]
        values = [getattr(cell, "value", cell) for cell in cells]  # of sparklines, too
        columns |= _list_cell_columns(clean_text(name), values)
    return columns


def _list_cell_columns(label: str, cells: Sequence[Any]) -> Columns:
    """The columns of one column of a table, by name."""
    if any(isinstance(cell, Mapping) for cell in cells):
        return _list_metric_columns(label, cells)
    if not is_numeric(cells):
        return {label: to_texts("" if cell is None else cell for cell in cells)}
    has_integers = all(isinstance(cell, int | np.integer) for cell in cells)
    return {label: np.array(cells, np.int64) if has_integers else to_array(cells)}


def _list_metric_columns(label: str, cells: Sequence[Any]) -> Columns:
    """Value, lo and hi of metrics; of cells that bring a text their value and further numbers."""
    metrics = [cell if isinstance(cell, Mapping) else {"value": cell} for cell in cells]
    keys = set().union(*metrics)
    parts = sorted(keys & {"paper", "to"}) if "text" in keys else ["lo", "hi"]
    names = {"value": label, **{part: f"{label} {part}" for part in parts}}
    return {name: to_array([metric.get(key) for metric in metrics]) for key, name in names.items()}


def to_parquet(columns: Columns) -> bytes:
    """Columns as a Parquet file."""
    import polars as pl
    import pyarrow as pa
    from pyarrow import parquet

    out = io.BytesIO()
    # pa.array and pa.table would import pandas
    arrays = [
        pl.Series(v.tolist() if v.dtype.kind == "U" else v).to_arrow() for v in columns.values()
    ]
    table = pa.Table.from_arrays(
        [a.cast(pa.string()) if pa.types.is_large_string(a.type) else a for a in arrays],
        list(columns),
    )
    parquet.write_table(table, out, compression="zstd")
    return out.getvalue()


def to_csv(columns: Columns) -> str:
    """Columns as CSV, formulas quoted as `quote_formula` does."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = [",".join(map(_format_csv_cell, row)) for row in (list(columns), *rows)]
    return "\r\n".join([*lines, ""])


def _format_csv_cell(value: str | float) -> str:
    if not isinstance(value, str):
        return "" if math.isnan(value) else repr(value)
    text = quote_formula(value)
    return '"' + text.replace('"', '""') + '"' if re.search('[,;"\r\n]', text) else text


def csv_link(columns: Columns) -> tuple[str, bool]:
    """A data link with the CSV, "" if too large; and whether it holds text."""
    if sum(values.size for values in columns.values()) * 6 > CSV_LIMIT:  # certainly too large
        return "", False
    data = to_csv(columns).encode()
    if len(data) > CSV_LIMIT:
        return "", False
    has_text = any(values.dtype.kind == "U" for values in columns.values())
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(data).decode()}", has_text
