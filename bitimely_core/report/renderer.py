"""Render a `Page` as one HTML file with its numbers beside it.

`write_report(folder, page)` writes `report.html` (under 1 MB, no network request, light and dark,
printable), a `.svg` of each figure, a `.parquet` of each figure and table, and `summary.json`. The
same page gives the same bytes. Foreign text (channel names, codes, paths) is cleaned of control
characters, escaped by the template, and never read as markup or as mathematics.

A figure of kind `bars` that comes first is the headline: the first name is the result, the others
are its baselines. A block of text that starts with "## " is a heading. A cell of a table may be a
metric `{value, lo, hi, ...}`, or `{value, text, note}`: sorted by the value, shown as the text with
the note below it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import __version__, storage
from bitimely_core.errors import UserError
from bitimely_core.page import BarPlot, Figure, Link, Page, Sparkline, Table
from bitimely_core.records import FORMAT, StoredFile, write_results
from bitimely_core.report.figures import COLOURS, format_tick
from bitimely_core.report.numbers import csv_link, figure_data, table_data, to_array, to_parquet
from bitimely_core.report.svg import draw_figure, export_svg, inline_svg
from bitimely_core.report.text import clean_text, format_number, is_numeric, make_slug, to_json
from bitimely_core.schemas.reports import ReportInfo, Summary

LIMIT = 1_000_000  # bytes of report.html
LONG = 24  # characters from which on a column of text may wrap
LEADING = 8  # rows of a table that a page may begin with
ROWS = 500  # rows of a table that are shown
TEMPLATES = Path(__file__).parent.parent / "templates"
Context = dict[str, Any]  # of the template


@dataclass
class PageParts:
    """The blocks of the template and the files beside the page."""

    blocks: list[Context] = field(default_factory=list)
    headline: Context | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    quoted: bool = False


def _render_headline(data: BarPlot) -> Context:
    """The headline figure as rows on a common axis, positions in per cent."""
    values = to_array(data.values)
    ends = [
        to_array(end) if end is not None else np.full(len(values), np.nan)
        for end in (data.lo, data.hi)
    ]
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
    for k, name in enumerate(data.names):
        lo, hi = float(ends[0][k]), float(ends[1][k])
        if not math.isfinite(values[k]):
            continue
        spread = (
            f"{format_number(lo)} to {format_number(hi)}"
            if math.isfinite(lo) and math.isfinite(hi)
            else ""
        )
        row: Context = {
            "name": clean_text(name, 60),
            "text": format_number(float(values[k])),
            "interval": spread,
            "at": at(values[k]),
        }
        rows.append(row | ({"left": at(lo), "width": round(at(hi) - at(lo), 2)} if spread else {}))
    return {
        "rows": rows,
        "ticks": [
            {"at": 25 * k, "text": format_tick(low + (high - low) * k / 4)} for k in range(5)
        ],
    }


def _make_cell(
    text: object, key: str = "", *, numeric: bool = False, none: bool = False, interval: str = ""
) -> Context:
    return {
        "text": clean_text(text),
        "key": key,
        "numeric": numeric,
        "none": none,
        "interval": interval,
        "href": "",
        "spark": None,
    }


def _render_cell(value: Any, digits: int | None) -> Context:
    """A cell for the template; columns are sorted by `key`."""
    interval = ""
    if isinstance(value, Link):
        return _make_cell(value.text, clean_text(value.text)) | {"href": value.href}
    if isinstance(value, Sparkline):
        return _render_cell(value.value, 3) | {"spark": _render_sparkline(value)}
    if isinstance(value, Mapping) and "text" in value:
        key = "" if value["value"] is None else repr(value["value"])
        return _make_cell(value["text"], key, numeric=True, interval=clean_text(value["note"]))
    if isinstance(value, Mapping):
        if value.get("lo") is not None and value.get("hi") is not None:
            joint = "–" if value["lo"] >= 0 else " to "
            interval = f"{format_number(value['lo'])}{joint}{format_number(value['hi'])}"
        value = value.get("value", value.get("difference"))
    if isinstance(value, bool | np.bool_):
        return _make_cell("yes" if value else "no", "yes" if value else "no")
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return _make_cell("–", numeric=True, none=True)
    if isinstance(value, int | float | np.number):
        plain = value.item() if isinstance(value, np.number) else value
        return _make_cell(
            format_number(plain, digits), repr(plain), numeric=True, interval=interval
        )
    return _make_cell(value, clean_text(value))


def _render_sparkline(data: Sparkline) -> Context:
    """Points of the curves in a box of 100 x 30."""
    points = [point for curve in data.curves for point in curve]
    (left, right), (low, high) = (
        (min(values), max(values)) for values in zip(*points, strict=True)
    )
    wide, tall = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{2 + 96 * (x - left) / wide:.1f},{28 - 26 * (y - low) / tall:.1f}"

    return {
        "about": clean_text(data.about),
        "curves": [" ".join(place(x, y) for x, y in curve) for curve in data.curves if curve],
    }


def _choose_decimals(cells: list[Any]) -> int | None:
    """Decimals of a column, to align its points; None: by number."""
    values = [
        cell.get("value") if isinstance(cell, Mapping) else getattr(cell, "value", cell)
        for cell in cells
    ]
    sizes = [
        abs(float(v))
        for v in values
        if isinstance(v, float | np.floating) and math.isfinite(v) and v
    ]
    return 3 if sizes and min(sizes) >= 1e-3 and max(sizes) < 10 else None


def _render_table(table: Table) -> Context:
    if any(len(row) != len(table.columns) for row in table.rows):
        raise ValueError(
            f"table {table.name!r} has rows that do not have {len(table.columns)} cells"
        )
    shown = table.rows[:ROWS]
    columns = [[row[k] for row in shown] for k in range(len(table.columns))]
    numeric = [
        bool(c) and is_numeric([0, *(0 if isinstance(v, Mapping | Sparkline) else v for v in c)])
        for c in columns
    ]
    made = [[_render_cell(v, _choose_decimals(column)) for v in column] for column in columns]
    for cells, is_number in zip(made, numeric, strict=True):
        long = max((len(cell["text"]) for cell in cells), default=0) > LONG
        for cell in cells:
            cell |= {"numeric": is_number, "long": long and not is_number}
    note = (
        f"The first {ROWS} of {len(table.rows):,} rows; the file holds all."
        if len(table.rows) > ROWS
        else ""
    )
    return {
        "kind": "table",
        "columns": [
            {"name": clean_text(n, 80), "numeric": is_number}
            for n, is_number in zip(table.columns, numeric, strict=True)
        ],
        "rows": [list(row) for row in zip(*made, strict=True)],
        "note": note,
    }


def _render_parts(page: Page, *, alone: bool = False) -> PageParts:
    out, taken = PageParts(), {"report", "summary", "notices", "predictions", "scores"}
    counts = {"Figure": 0, "Table": 0}
    level = 2
    for position, block in enumerate(page.blocks):
        if isinstance(block, str):
            heading = block.startswith("## ")
            level = 3 if heading else level
            out.blocks.append(
                {
                    "kind": "heading" if heading else "text",
                    "text": clean_text(block.removeprefix("## "), 5000),
                }
            )
            continue
        name, title, caption = (
            make_slug(block.name, taken),
            clean_text(block.title),
            clean_text(block.caption),
        )
        columns = figure_data(block) if isinstance(block, Figure) else table_data(block)
        link, quoted = csv_link(columns)
        out.quoted |= quoted
        if not alone:
            out.files[f"{name}.parquet"] = to_parquet(columns)
        entry: Context = {
            "slug": name,
            "title": title,
            "caption": caption,
            "level": level,
            "csv": link,
            "file": f"{name}.parquet",
        }
        if isinstance(block, Figure):
            is_headline = (
                position == 0
                and isinstance(block.data, BarPlot)
                and np.isfinite(to_array(block.data.values)[:1]).any()
            )
            # without the time of a drawing
            if alone and is_headline and isinstance(block.data, BarPlot):
                out.headline = entry | _render_headline(block.data)
                continue
            svg, note = draw_figure(block, name)
            out.files[f"{name}.svg"] = export_svg(svg)
            entry |= {"kind": "figure", "svg": f"{name}.svg", "note": note}
            if is_headline and isinstance(block.data, BarPlot):
                out.headline = entry | _render_headline(block.data)
                continue
            entry["svg_inline"] = inline_svg(svg, f"{title}. {caption}")
        else:
            entry |= _render_table(block)
        kind = "Figure" if isinstance(block, Figure) else "Table"
        counts[kind] += 1
        entry["label"] = f"{kind} {counts[kind]}"
        out.blocks.append(entry)
    return out


def render_html(page: Page, *, alone: bool = False) -> str:
    """The page as one HTML text; `alone`: without links to files beside it."""
    return _fill_template(page, _render_parts(page, alone=alone), {}, alone=alone)


def render_index(page: Page) -> str:
    """A page of tables as one HTML text, with a field that filters their rows."""
    return _fill_template(page, _render_parts(page, alone=True), {}, alone=True, is_index=True)


def _find_lead(blocks: list[Context]) -> Context | None:
    """What a page without a headline begins with, below its sentence: the first figure, or the
    first table that leaves room for the rest.
    """
    return next(
        (
            b
            for b in blocks
            if b["kind"] == "figure" or (b["kind"] == "table" and len(b["rows"]) <= LEADING)
        ),
        None,
    )


def _fill_template(
    page: Page,
    parts: PageParts,
    files: Mapping[str, str],
    *,
    alone: bool = False,
    is_index: bool = False,
) -> str:
    """Fill the template; from a page that is too large, the largest downloads are removed first,
    then the largest drawings (both are files).
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment: Any = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=False,
    )
    script = (TEMPLATES / "script.html.j2").read_text("utf-8").strip()
    schemes = {
        name: " ".join(f"--{k}:{pair[side]};" for k, pair in COLOURS.items())
        for side, name in enumerate(("light", "dark"))
    }
    style = environment.get_template("style.html.j2").render(
        {k: Markup(v) for k, v in schemes.items()}  # noqa: S704
    )  # our own colours
    beside = {"svg": "", "file": ""} if alone else {}
    lead = None if parts.headline or is_index else _find_lead(parts.blocks)
    blocks = [{"svg": "", "note": "", "lead": b is lead, **b, **beside} for b in parts.blocks]
    drawings = {b["slug"]: b["svg_inline"] for b in blocks if b.get("svg_inline")}
    context = {
        "title": clean_text(page.title),
        "verdict": clean_text(page.verdict),
        "notices": [clean_text(n) for n in page.notices],
        "facts": [(clean_text(k), clean_text(v)) for k, v in page.facts.items()],
        "contents": [b for b in blocks if b["kind"] in {"figure", "table"}]
        if len(blocks) > 3
        else [],
        "headline": parts.headline and parts.headline | beside,
        "alone": alone,
        "is_index": is_index,
        "blocks": blocks,
        "files": [(clean_text(k), clean_text(v)) for k, v in files.items()],
        "cells_quoted": parts.quoted,
        "version": __version__,
        "style": Markup(style),  # noqa: S704  # our own
        "script": Markup(script),  # noqa: S704  # our own
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    template = environment.get_template("report.html.j2")

    def render() -> str:
        for b in blocks:
            if b["kind"] == "figure":
                b["svg_inline"] = Markup(drawings[b["slug"]]) if b["slug"] in drawings else ""  # noqa: S704  # drawn here, text escaped
        return template.render(context) + "\n"

    out = render()
    while len(out.encode()) > LIMIT:
        linked = [b for b in blocks if b.get("csv")]
        if linked:
            max(linked, key=lambda b: len(b["csv"]))["csv"] = ""
        elif drawings:
            del drawings[max(drawings, key=lambda name: len(drawings[name]))]
        else:
            break
        out = render()
    return out


def _list_former_files(folder: Path) -> Iterator[str]:
    """Files of an earlier report in `folder`, by its own list."""
    with suppress(UserError):
        yield from (
            n
            for n in Summary.load(folder / "summary.json").report.files
            if re.fullmatch(r"[a-z0-9-]+\.(parquet|svg)", n)
        )


def write_report(
    folder: Path | str,
    page: Page,
    *,
    files: Mapping[str, str] | None = None,
    others: Mapping[str, storage.Content | None] | None = None,
    gone: Iterable[str] = (),
) -> Path:
    """Write `report.html`, `summary.json`, and the data and drawing of every figure and table into
    `folder`; the path of `report.html`.

    They replace those of an earlier report in one step, with the manifest of the folder
    (`records.write_results`); files that bitimely did not write are left alone. `files`: further
    files of the folder to list, name -> content in words; `others`: files to write in the same
    step, `gone`: files to remove in it. Raises UserError: the disk is full or cannot be written
    (exit 6).
    """
    parts = _render_parts(page)
    rendered = _fill_template(page, parts, files or {})
    folder, content = Path(folder), {name: bytes(data) for name, data in parts.files.items()}
    files_of = {
        name: StoredFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        for name, data in content.items()
    }
    info = ReportInfo(
        title=page.title,
        verdict=page.verdict,
        notices=page.notices,
        facts=page.facts,
        files=files_of,
    )
    summary = to_json({**page.summary, "format_version": FORMAT, "report": info.model_dump()})
    write_results(
        folder,
        {
            **(others or {}),
            **content,
            "summary.json": storage.encode_json(summary) + b"\n",
            "report.html": rendered.encode(),
        },
        gone=(set(_list_former_files(folder)) - content.keys()).union(gone),
    )
    return folder / "report.html"
