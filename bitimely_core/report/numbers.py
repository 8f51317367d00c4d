"""Numbers of figures and tables as columns, Parquet and CSV."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bitimely_core import page
from bitimely_core.errors import quote_formula
from bitimely_core.page import Figure, HeatMap, Link, StageTrack, Table
from bitimely_core.report.text import clean_text, is_numeric

Array = npt.NDArray[Any]
Columns = dict[str, Array]

# bytes of a download inside the page; larger tables are in the Parquet file only
CSV_LIMIT = 60_000


def to_array(values: Any) -> Array:
    """Numbers as float64 (None: NaN)."""
    known = (
        [np.nan if v is None else v for v in values] if isinstance(values, list | tuple) else values
    )
    return np.asarray(known, np.float64)


def matrix_panels(data: HeatMap) -> tuple[Array, list[str]]:
    """The matrices of a figure, [M, R, C], and their names."""
    values = np.asarray(data.values)
    # large maps come in single precision
    values = values if values.dtype == np.float32 else values.astype(np.float64)
    return (
        (values[None], [""])
        if values.ndim == 2
        else (values, [clean_text(n) for n in data.names or range(1, len(values) + 1)])
    )


def stage_indices(track: StageTrack, classes: Sequence[str]) -> Array:
    """Class numbers of a track given by name or number, -1: no class."""
    ids: dict[Any, int] = {None: -1, **{name: k for k, name in enumerate(classes)}}
    stages = np.asarray(track.stages, dtype=object).tolist()
    numbers = [
        ids.get(stage, -1) if stage is None or isinstance(stage, str) else int(stage)
        for stage in stages
    ]
    return np.array([k if 0 <= k < len(classes) else -1 for k in numbers], dtype=np.int64)


def _join(parts: Iterable[Array], kind: type = float) -> Array:
    return np.concatenate([np.empty(0, kind), *parts])


def figure_data(figure: Figure) -> Columns:
    """All numbers of a figure as columns of one table."""
    data = figure.data
    if isinstance(data, page.LinePlot):
        parts: dict[str, list[Array]] = {"x": [], "y": [], "lo": [], "hi": []}
        names: list[str] = []
        for s in data.series:
            y = to_array(s.y)
            names += [clean_text(s.name)] * len(y)
            for key, values in {"x": s.x, "y": y, "lo": s.lo, "hi": s.hi}.items():
                parts[key].append(np.full(len(y), np.nan) if values is None else to_array(values))
        banded = any(s.lo is not None for s in data.series)
        return {
            "series": np.array(names, str),
            **{k: _join(v) for k, v in parts.items() if banded or k in "xy"},
        }
    if isinstance(data, HeatMap):
        values, names = matrix_panels(data)
        m, r, c = values.shape
        columns = [clean_text(n) for n in data.column_names or range(c)]
        rows = np.tile(
            np.array([clean_text(n) for n in data.row_names])
            if data.row_names is not None
            else np.arange(r),
            m,
        )
        head: Columns = (
            {"panel": np.repeat(np.array(names, str), r)} if m > 1 or names != [""] else {}
        )
        return {
            **head,
            "row": rows,
            **{f"column {n}": values[:, :, k].ravel() for k, n in enumerate(columns)},
        }
    if isinstance(data, page.FlowPlot):
        boxes = [clean_text(n) for n in [*data.names, *data.leaving]]
        return {
            "box": np.array(boxes, str),
            "count": to_array([*data.counts, *data.leaving_counts]),
        }
    if isinstance(data, page.BarPlot):
        extra = {k: to_array(v) for k, v in (("lo", data.lo), ("hi", data.hi)) if v is not None}
        return {
            "name": np.array([clean_text(n) for n in data.names], str),
            "value": to_array(data.values),
            **extra,
        }
    if isinstance(data, page.RankPlot):
        ranked = np.array([clean_text(n) for n in data.names], str)
        return {
            "name": ranked,
            "mean rank": to_array(data.ranks),
            "critical difference": np.full(len(ranked), float(data.critical)),
        }
    if isinstance(data, page.ForestPlot):
        dots, shown = [clean_text(n) for n in data.names], data.panels
        also = {
            name: name.removesuffix("s")
            for name in ("other", "margins")
            if any(getattr(p, name) is not None for p in shown)
        }
        keys = {"values": "value", "lo": "lo", "hi": "hi", **also}
        held = {
            k: [to_array([None] * len(dots) if (v := getattr(p, k)) is None else v) for p in shown]
            for k in keys
        }
        return {
            "panel": np.repeat(np.array([clean_text(p.name) for p in shown], str), len(dots)),
            "name": np.tile(np.array(dots, str), len(shown)),
            **{keys[k]: _join(stacked) for k, stacked in held.items()},
        }
    if isinstance(data, page.TracePlot):
        signals = [
            (clean_text(s.name), clean_text(s.unit), to_array(s.values)) for s in data.signals
        ]
        return {
            "signal": _join((np.full(len(v), n) for n, _, v in signals), str),
            "seconds": _join(np.arange(len(v)) / data.rate for _, _, v in signals),
            "value": _join(v for _, _, v in signals),
            "unit": _join((np.full(len(v), u) for _, u, v in signals), str),
        }
    if isinstance(data, page.Hypnogram):
        classes = [clean_text(c) for c in data.classes]
        tracks = {clean_text(t.name): stage_indices(t, data.classes) for t in data.tracks}
        n = max((len(v) for v in tracks.values()), default=0)
        labels = np.array([*classes, ""])  # -1 is the last: no stage
        padded = {
            f"stage {name}": labels[np.pad(v, (0, n - len(v)), constant_values=-1)]
            for name, v in tracks.items()
        }
        return {"epoch": np.arange(n), "seconds": np.arange(n) * float(data.epoch), **padded}
    if isinstance(data, page.DensityPlot):
        shares = {
            f"p {clean_text(name)}": np.asarray(data.values, np.float64)[:, k]
            for k, name in enumerate(data.classes)
        }
        return {
            "epoch": np.arange(len(data.values)),
            "seconds": np.arange(len(data.values)) * float(data.epoch),
            **shares,
        }
    if isinstance(data, page.TimelinePlot):
        lanes = [(clean_text(lane.name), to_array(lane.times), lane.groups) for lane in data.lanes]
        groups = np.array([clean_text(g) for g in data.groups], str)
        return {
            "lane": _join((np.full(len(times), name) for name, times, _ in lanes), str),
            "time": _join(times for _, times, _ in lanes),
            "group": _join(
                (groups[np.asarray(which, dtype=np.int64)] for _, _, which in lanes), str
            ),
        }
    if isinstance(data, page.ScatterPlot):
        # -1 is the last: no group
        groups = np.array([*(clean_text(g) for g in data.groups), ""], str)
        return {
            "panel": _join((np.full(len(p.x), clean_text(p.name)) for p in data.panels), str),
            "x": _join(to_array(p.x) for p in data.panels),
            "y": _join(to_array(p.y) for p in data.panels),
            "group": _join((groups[np.asarray(p.group, dtype=np.int64)] for p in data.panels), str),
        }
    raise ValueError(
        f"figure {figure.name!r} has data of type {type(data).__name__}, which is no kind of figure"
    )


def table_data(table: Table) -> Columns:
    """A table as columns: numbers where all cells are numbers, else text; a metric gives value, lo
    and hi.
    """
    out: Columns = {}
    for k, name in enumerate(table.columns):
        cells = [
            row[k].text if isinstance(row[k], Link) else getattr(row[k], "value", row[k])
            for row in table.rows
        ]
        label = clean_text(name)
        if any(isinstance(c, Mapping) for c in cells):
            held = {part for c in cells if isinstance(c, Mapping) for part in c}
            for part in (
                ("value", *sorted(held & {"paper", "to"}))
                if "text" in held
                else ("value", "lo", "hi")
            ):
                values = [
                    c.get(part) if isinstance(c, Mapping) else c if part == "value" else None
                    for c in cells
                ]
                out[label if part == "value" else f"{label} {part}"] = to_array(values)
        elif is_numeric(cells):
            integers = all(isinstance(c, int | np.integer) for c in cells)
            out[label] = np.array(cells, np.int64) if integers else to_array(cells)
        else:
            out[label] = np.array(["" if c is None else clean_text(c) for c in cells], str)
    return out


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

    def cell(value: Any) -> str:
        if isinstance(value, str):
            quoted = quote_formula(value)
            return (
                '"' + quoted.replace('"', '""') + '"'
                if any(c in quoted for c in ',;"\r\n')
                else quoted
            )
        return "" if value is None or value != value else repr(value)  # not NaN

    lines = [",".join(cell(name) for name in columns)]
    lines += [
        ",".join(map(cell, row))
        for row in zip(*(v.tolist() for v in columns.values()), strict=True)
    ]
    return "\r\n".join(lines) + "\r\n"


def csv_link(columns: Columns) -> tuple[str, bool]:
    """A data link with the CSV, "" if too large; and whether it holds text."""
    if sum(v.size for v in columns.values()) * 6 > CSV_LIMIT:  # certainly too large
        return "", False
    data = to_csv(columns).encode()
    if len(data) > CSV_LIMIT:
        return "", False
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(data).decode(), any(
        v.dtype.kind == "U" for v in columns.values()
    )
