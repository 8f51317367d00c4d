"""One HTML file that opens anywhere, and the numbers beside it.

`write(folder, page)` draws a `Page`: `report.html` (under 1 MB, no request to any server, light and dark, prints), a `.svg` of each figure,
a `.parquet` of each figure and table, and `summary.json`. The same page gives the same bytes. Everything foreign (channel names, codes,
paths) is text: cleaned of control characters, escaped by the template, and never read as markup or as mathematics.

A figure of kind `bars` that stands first is the page's headline: the first name is the result, the others are what it is compared with.
A block of text that starts with "## " is a heading. A cell of a table may be a metric object `{value, lo, hi, ...}` of `evaluate`, or
`{value, text, note, paper?}`: sorted by the value, shown as the text with the note below it.
A figure of kind `matrix` may hold panels: `values` [M, R, C] with `names` [M]; small ones take `row_names` and `column_names`, and every
cell shows its number. Large ones are drawn by the strongest entry of each block of cells; the Parquet file holds them all. A signal of
`traces` with `accent` true is drawn in colour; `lanes` = {"names", "spans": [{"start", "stop", "name"}]} (seconds) adds a panel with a
line a name, on the same axis: a hypnogram, beats, events.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import __version__, storage
from bitimely_core.page import Figure, Page, Table
from bitimely_core.report.figures import COLOURS, format_tick
from bitimely_core.report.numbers import csv_link, figure_data, table_data, to_array, to_parquet
from bitimely_core.report.svg import draw_figure, export_svg, inline_svg
from bitimely_core.report.text import clean_text, format_number, make_slug, to_plain

LIMIT = 1_000_000  # bytes of report.html
LONG = 24  # characters from which on a column of text may wrap, but not into a sliver
ROWS = 500  # rows of a table that are shown
TEMPLATES = Path(__file__).parent.parent / "templates"


@dataclass
class PageParts:
    """What is written: the context of the template and the files beside it."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    headline: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    quoted: bool = False


def _render_headline(figure: Figure) -> dict[str, Any]:
    """The first figure of a page as rows on a common axis, positions in per cent."""
    data = figure.data
    values = to_array(data["values"])
    ends = [to_array(data[k]) if data.get(k) is not None else np.full(len(values), np.nan) for k in ("lo", "hi")]
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
        spread = f"{format_number(lo)} to {format_number(hi)}" if math.isfinite(lo) and math.isfinite(hi) else ""
        position = {"left": at(lo), "width": round(at(hi) - at(lo), 2)} if spread else {}
        rows.append(
            {"name": clean_text(name, 60), "text": format_number(float(values[k])), "interval": spread, "at": at(values[k]), **position}
        )
    return {"rows": rows, "ticks": [{"at": 25 * k, "text": format_tick(low + (high - low) * k / 4)} for k in range(5)]}


def _render_cell(value: Any, digits: int | None) -> dict[str, Any]:
    """A cell as the template shows it; `key` is what the column sorts by."""
    interval = ""
    if isinstance(value, Mapping) and "text" in value:
        known = value["value"]
        return {
            "text": clean_text(value["text"]),
            "key": "" if known is None else repr(known),
            "numeric": True,
            "none": False,
            "interval": clean_text(value["note"]),
        }
    if isinstance(value, Mapping):
        if value.get("lo") is not None and value.get("hi") is not None:
            joint = "–" if value["lo"] >= 0 else " to "
            interval = f"{format_number(value['lo'])}{joint}{format_number(value['hi'])}"
        value = value.get("value", value.get("difference"))
    if isinstance(value, bool | np.bool_):
        return {"text": "yes" if value else "no", "key": "yes" if value else "no", "numeric": False, "none": False, "interval": ""}
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return {"text": "–", "key": "", "numeric": True, "none": True, "interval": ""}
    if isinstance(value, int | float | np.number):
        plain = value.item() if isinstance(value, np.number) else value
        return {"text": format_number(plain, digits), "key": repr(plain), "numeric": True, "none": False, "interval": interval}
    return {"text": clean_text(value), "key": clean_text(value), "numeric": False, "none": False, "interval": ""}


def _choose_decimals(cells: list[Any]) -> int | None:
    """Decimals for a whole column, so that points stand below each other; None: number by number."""
    values = [cell.get("value") if isinstance(cell, Mapping) else cell for cell in cells]
    sizes = [abs(float(v)) for v in values if isinstance(v, float | np.floating) and math.isfinite(v) and v]
    return 3 if sizes and min(sizes) >= 1e-3 and max(sizes) < 10 else None


def _render_table(table: Table) -> dict[str, Any]:
    if any(len(row) != len(table.columns) for row in table.rows):
        raise ValueError(f"table {table.name!r} has rows that do not have {len(table.columns)} cells")
    shown = table.rows[:ROWS]
    columns = [[row[k] for row in shown] for k in range(len(table.columns))]
    numeric = [
        bool(c)
        and all(v is None or isinstance(v, Mapping) or (isinstance(v, int | float | np.number) and not isinstance(v, bool)) for v in c)
        for c in columns
    ]
    made = [[_render_cell(v, _choose_decimals(column)) for v in column] for column in columns]
    for cells, is_number in zip(made, numeric, strict=True):
        long = max((len(cell["text"]) for cell in cells), default=0) > LONG
        for cell in cells:
            cell |= {"numeric": is_number, "long": long and not is_number}
    note = f"The first {ROWS} of {len(table.rows):,} rows; the file holds all." if len(table.rows) > ROWS else ""
    return {
        "kind": "table",
        "columns": [{"name": clean_text(n, 80), "numeric": is_number} for n, is_number in zip(table.columns, numeric, strict=True)],
        "rows": [list(row) for row in zip(*made, strict=True)],
        "note": note,
    }


def _render_parts(page: Page) -> PageParts:
    """Draw and tabulate everything."""
    out, taken = PageParts(), {"report", "summary", "notices", "predictions", "scores"}
    counts = {"Figure": 0, "Table": 0}
    level = 2
    for position, block in enumerate(page.blocks):
        if isinstance(block, str):
            heading = block.startswith("## ")
            level = 3 if heading else level
            out.blocks.append({"kind": "heading" if heading else "text", "text": clean_text(block.removeprefix("## "), 5000)})
            continue
        name = make_slug(block.name, taken)
        figure = isinstance(block, Figure)
        columns = figure_data(block) if isinstance(block, Figure) else table_data(block)
        link, quoted = csv_link(columns)
        out.quoted |= quoted
        out.files[f"{name}.parquet"] = to_parquet(columns)
        entry = {
            "slug": name,
            "title": clean_text(block.title),
            "caption": clean_text(block.caption),
            "level": level,
            "csv": link,
            "file": f"{name}.parquet",
        }
        if isinstance(block, Figure):
            svg, note = draw_figure(block, name)
            out.files[f"{name}.svg"] = export_svg(svg)
            entry |= {"kind": "figure", "svg": f"{name}.svg", "note": note}
            if position == 0 and block.kind == "bars" and np.isfinite(to_array(block.data["values"])[:1]).any():
                out.headline = entry | _render_headline(block)
                continue
            entry["svg_inline"] = inline_svg(svg, f"{clean_text(block.title)}. {clean_text(block.caption)}")
        else:
            entry |= _render_table(block)
        kind = "Figure" if figure else "Table"
        counts[kind] += 1
        entry["label"] = f"{kind} {counts[kind]}"
        out.blocks.append(entry)
    return out


def render_html(page: Page, files: Mapping[str, str] | None = None, *, alone: bool = False) -> str:
    """The page as one HTML text, with links to the files that `write` makes; `alone`: without, for a page that stands by itself."""
    return _fill_template(page, _render_parts(page), files or {}, alone=alone)


def _fill_template(page: Page, parts: PageParts, files: Mapping[str, str], *, alone: bool = False) -> str:
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
        "title": clean_text(page.title),
        "verdict": clean_text(page.verdict),
        "notices": [clean_text(n) for n in page.notices],
        "facts": [(clean_text(k), clean_text(v)) for k, v in page.facts.items()],
        "contents": [b for b in blocks if b["kind"] in {"figure", "table"}] if len(blocks) > 3 else [],
        "headline": parts.headline and parts.headline | beside,
        "alone": alone,
        "blocks": blocks,
        "files": [(clean_text(k), clean_text(v)) for k, v in files.items()],
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


def _list_former_files(folder: Path) -> Iterator[str]:
    """Files that a former report made in `folder`, by its own list."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for name in json.loads((folder / "summary.json").read_bytes())["report"]["files"]:
            if re.fullmatch(r"[a-z0-9-]+\.(parquet|svg)", name):
                yield name


def write_report(folder: Path | str, page: Page, *, files: Mapping[str, str] | None = None) -> Path:
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
    parts = _render_parts(page)
    rendered = _fill_template(page, parts, files or {})
    folder = storage.make_folder(Path(folder))
    former = set(_list_former_files(folder))
    with suppress(FileNotFoundError):
        storage.os_unlink(folder / "report.html")
    for name in former - parts.files.keys():
        with suppress(FileNotFoundError):
            storage.os_unlink(folder / name)
    written = {name: storage.write_bytes(folder / name, data) for name, data in parts.files.items()}
    about = {
        "title": page.title,
        "verdict": page.verdict,
        "notices": page.notices,
        "facts": page.facts,
        "files": {name: {"sha256": sha, "size": size} for name, (sha, size) in written.items()},
    }
    storage.write_json(folder / "summary.json", to_plain({"format_version": 1, **page.summary, "report": about}))
    storage.write_bytes(folder / "report.html", rendered.encode())
    return folder / "report.html"
