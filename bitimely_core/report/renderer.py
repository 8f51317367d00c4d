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
import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import numpy as np

from bitimely_core import __version__
from bitimely_core.errors import UserError
from bitimely_core.page import BarPlot, Figure, Link, Page, Sparkline, Table
from bitimely_core.report.canvas import COLOURS, format_tick
from bitimely_core.report.numbers import (
    csv_link,
    fill_missing,
    list_columns,
    table_data,
    to_array,
    to_parquet,
)
from bitimely_core.report.page_text import clean_text, format_number, is_number, make_slug, to_json
from bitimely_core.report.svg import draw_figure, export_svg, inline_svg
from bitimely_core.schemas.reports import ReportInfo, Summary
from bitimely_core.store import storage
from bitimely_core.store.records import FORMAT, StoredFile, write_results
from bitimely_core.system_errors import raise_system_error
from bitimely_core.wording import fit_number, shorten_answer

if TYPE_CHECKING:
    from jinja2 import Template

LIMIT = 1_000_000  # bytes of report.html
BARS = 20  # of a headline
LONG = 24  # characters from which on a column of text may wrap
LEADING = 8  # rows of a table that a page may begin with
HIGHEST = 720.0  # points of a drawing that a page may begin with
ROWS = 500  # rows of a table that are shown
TEMPLATES = Path(__file__).parent.parent / "templates"
READING = "How to read this page"
RESERVED = {"report", "summary", "notices", "predictions", "scores"}  # no names of blocks
Context = dict[str, Any]  # of the template


@dataclass
class Cell:
    """A cell of a table as the template shows it."""

    text: str
    key: str = ""  # by which its column is sorted
    none: bool = False  # not defined
    interval: str = ""
    href: str = ""
    spark: Context | None = None
    numeric: bool = False  # of a column of numbers
    long: bool = False  # of a column of text that may wrap


@dataclass
class Block:
    """A heading, a paragraph, a figure or a table as the template shows it."""

    kind: str
    text: str = ""  # of a heading or a paragraph
    slug: str = ""
    title: str = ""
    caption: str = ""
    note: str = ""  # behind the caption
    label: str = ""  # such as Table 2
    level: int = 3  # of its heading; 0: the heading is that of the fold
    lead: bool = False  # stands at the top
    csv: str = ""  # data link
    file: str = ""  # Parquet beside the page
    svg: str = ""  # drawing beside the page
    svg_inline: str = ""
    height: float = 0.0  # of the drawing, in points
    columns: list[Context] = field(default_factory=list)
    rows: Sequence[Any] = ()  # cells of a table, bars of a headline
    ticks: Sequence[Context] = ()  # of a headline


class Fold(NamedTuple):
    """A part of the page that is closed until a reader opens it."""

    title: str
    blocks: list[Block]


@dataclass
class PageParts:
    """The blocks of the template and the files beside the page."""

    alone: bool = False  # no block refers to a file
    is_index: bool = False  # the page of a workspace, with a field that filters rows
    slugs: set[str] = field(default_factory=RESERVED.copy)
    blocks: list[Block] = field(default_factory=list)
    headline: Block | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    quoted: bool = False  # some download holds text, in which formulas are quoted


# ---- the headline


def _round_axis(values: np.ndarray) -> tuple[float, float]:
    """The ends of an axis for values: 0 to 1 for shares, else round numbers around them and 0."""
    values = np.append(values[np.isfinite(values)], 0.0)
    low, high = float(values.min()), float(values.max())
    if high <= 1.0 and low >= 0.0:
        return 0.0, 1.0
    step = 10.0 ** math.floor(math.log10(max(high, -low, 1e-12)))
    return math.floor(low / step * 2) * step / 2, math.ceil(high / step * 2) * step / 2


def _fill_headline(block: Block, data: BarPlot) -> None:
    """The headline figure as rows on a common axis, positions in per cent."""
    values, count = to_array(data.values), len(data.values)
    lo, hi = fill_missing(data.lo, count), fill_missing(data.hi, count)
    low, high = _round_axis(np.concatenate([values, lo, hi]))

    def place(value: float) -> float:
        return round(100 * (value - low) / ((high - low) or 1.0), 2)

    rows = []
    for name, *numbers in zip(data.names, values.tolist(), lo.tolist(), hi.tolist(), strict=True):
        value, start, stop = numbers
        if not math.isfinite(value):
            continue
        row: Context = {
            "name": clean_text(name, 60),
            "text": format_number(value),
            "interval": "",
            "at": place(value),
        }
        if math.isfinite(start) and math.isfinite(stop):
            row["interval"] = f"{format_number(start)} to {format_number(stop)}"
            row |= {"left": place(start), "width": round(place(stop) - place(start), 2)}
        rows.append(row)
    block.rows = rows[:BARS]
    if len(rows) > BARS:
        block.note = f"The first {BARS} of {len(rows)}; the file holds all."
    marks = [low + (high - low) * k / 4 for k in range(5)]
    block.ticks = [{"at": 25 * k, "text": format_tick(mark)} for k, mark in enumerate(marks)]


def _find_headline(page: Page) -> BarPlot | None:
    """The data of the first block of a page, if they are bars of which the first is defined."""
    data = getattr(next(iter(page.blocks), None), "data", None)
    if not isinstance(data, BarPlot) or not np.isfinite(to_array(data.values)[:1]).any():
        return None
    return data


# ---- tables


def _render_cell(value: Any, digits: int | None) -> Cell:
    """A cell for the template; `digits` are the decimals of its column."""
    if isinstance(value, Link):
        return replace(_render_cell(value.text, None), href=value.href)
    if isinstance(value, Sparkline):
        return replace(_render_cell(value.value, 3), spark=_render_sparkline(value))
    if isinstance(value, Mapping):
        return _render_metric(cast(MetricCell, value), digits)
    if isinstance(value, bool | np.bool_):
        value = "yes" if value else "no"
    if value is None or (is_number(value) and math.isnan(value)):
        return Cell("–", none=True)
    if not is_number(value):
        return Cell(clean_text(value), clean_text(value))
    number = value.item() if isinstance(value, np.number) else value
    return Cell(format_number(number, digits), repr(number))


class MetricCell(TypedDict, total=False):
    """A metric in a table: its value or difference with its interval, or a text with its note."""

    value: float | None
    difference: float | None
    lo: float | None
    hi: float | None
    text: str
    note: str


def _render_metric(metric: MetricCell, digits: int | None) -> Cell:
    """A metric with its interval, or a text with its note."""
    if "text" in metric:
        key = "" if metric["value"] is None else repr(metric["value"])
        return Cell(clean_text(metric["text"]), key, interval=clean_text(metric["note"]))
    cell = _render_cell(metric.get("value", metric.get("difference")), digits)
    lo, hi = metric.get("lo"), metric.get("hi")
    if lo is not None and hi is not None:
        cell.interval = f"{format_number(lo)}{'–' if lo >= 0 else ' to '}{format_number(hi)}"
    return cell


def _render_sparkline(data: Sparkline) -> Context:
    """Points of the curves in a box of 100 x 30."""
    x, y = zip(*(itertools.chain.from_iterable(data.curves)), strict=True)
    start, low = min(x), min(y)
    width, height = (max(x) - start) or 1.0, (max(y) - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{2 + 96 * (x - start) / width:.1f},{28 - 26 * (y - low) / height:.1f}"

    return {
        "about": clean_text(data.about),
        "curves": [" ".join(itertools.starmap(place, curve)) for curve in data.curves if curve],
    }


def _choose_decimals(cells: Sequence[Any]) -> int | None:
    """Decimals of a column, to align its points; None: by number."""
    sizes = []
    for cell in cells:
        value = cell.get("value") if isinstance(cell, Mapping) else getattr(cell, "value", cell)
        if isinstance(value, float | np.floating) and value and math.isfinite(value):
            sizes.append(abs(float(value)))
    return 3 if sizes and min(sizes) >= 1e-3 and max(sizes) < 10 else None


def _render_column(values: Sequence[Any], *, numeric: bool) -> list[Cell]:
    """The cells of a column, aligned with each other."""
    digits = _choose_decimals(values)
    cells = [_render_cell(value, digits) for value in values]
    is_long = not numeric and any(len(cell.text) > LONG for cell in cells)
    for cell in cells:
        cell.numeric, cell.long = numeric, is_long
    return cells


def _fill_table(block: Block, table: Table) -> None:
    """The columns and the first rows of a table. Raises ValueError for a row that is too short or
    too long.
    """
    count = len(table.columns)
    if any(len(row) != count for row in table.rows):
        raise ValueError(f"table {table.name!r} has rows that do not have {count} cells")
    cells = []
    for k, name in enumerate(table.columns):
        values = [row[k] for row in table.rows[:ROWS]]
        numeric = bool(values) and all(
            value is None or isinstance(value, Mapping | Sparkline) or is_number(value)
            for value in values
        )
        block.columns.append({"name": clean_text(name, 80), "numeric": numeric})
        cells.append(_render_column(values, numeric=numeric))
    block.rows = list(zip(*cells, strict=True))
    if len(table.rows) > ROWS:
        block.note = f"The first {ROWS} of {len(table.rows):,} rows; the file holds all."


# ---- the page


def write_text(text: str, limit: int = 2000) -> str:
    """A sentence of ours that may hold foreign names."""
    return fit_number(clean_text(text, limit))


def _render_blocks(page: Page, parts: PageParts) -> PageParts:
    """`parts` with the blocks of a page and their files."""
    counts: Counter[str] = Counter()
    headline = _find_headline(page)
    for block in page.blocks:
        if isinstance(block, str):
            kind = "heading" if block.startswith("## ") else "text"
            parts.blocks.append(Block(kind, write_text(block.removeprefix("## "), 5000)))
            continue
        entry = _start_block(block, parts)
        if isinstance(block, Table):
            _fill_table(entry, block)
        elif headline is None or not parts.alone:  # saves the time of a drawing
            _draw_block(entry, block, parts)
        if headline is not None:
            _fill_headline(entry, headline)
            parts.headline, headline = entry, None
            continue
        kind = type(block).__name__
        counts[kind] += 1
        entry.label = f"{kind} {counts[kind]}"
        parts.blocks.append(entry)
    return parts


def _fold_blocks(blocks: Iterable[Block]) -> list[Fold]:
    """Blocks in parts that open: a heading with all below it; without one, a figure or a table by
    itself, and the paragraphs between them.
    """
    folds: list[Fold] = []
    has_heading = False
    for block in blocks:
        if block.kind == "heading":
            folds.append(Fold(block.text, []))
            has_heading = True
        elif has_heading or (block.kind == "text" and folds and folds[-1].title == READING):
            folds[-1].blocks.append(block)
        elif block.kind == "text":
            folds.append(Fold(READING, [block]))
        else:
            block.level = 0
            folds.append(Fold(block.title, [block]))
    return [fold for fold in folds if fold.blocks]  # the lead may have been all of one


def _start_block(block: Figure | Table, parts: PageParts) -> Block:
    """A figure or table with its name, its texts and its data."""
    columns = list_columns(block.data) if isinstance(block, Figure) else table_data(block)
    entry = Block(type(block).__name__.lower(), slug=make_slug(block.name, parts.slugs))
    entry.title, entry.caption = write_text(block.title), write_text(block.caption)
    entry.csv, has_text = csv_link(columns)
    parts.quoted |= has_text
    if not parts.alone:
        entry.file = f"{entry.slug}.parquet"
        parts.files[entry.file] = to_parquet(columns)
    return entry


def _draw_block(entry: Block, figure: Figure, parts: PageParts) -> None:
    """The drawing of a figure, inline and as a file."""
    from markupsafe import Markup

    svg, entry.note = draw_figure(figure, entry.slug)
    entry.height = float(svg.get("viewBox", "0 0 0 0").split()[3])
    label = f"{entry.title}. {entry.caption}"
    entry.svg_inline = Markup(inline_svg(svg, label))  # noqa: S704  # drawn here, text escaped
    if not parts.alone:
        entry.svg = f"{entry.slug}.svg"
        parts.files[entry.svg] = export_svg(svg)


def render_html(page: Page, *, alone: bool = False) -> str:
    """The page as one HTML text; `alone`: without links to files beside it."""
    return _fill_template(page, _render_blocks(page, PageParts(alone)))


def render_index(page: Page) -> str:
    """A page of tables as one HTML text, with a field that filters their rows."""
    return _fill_template(page, _render_blocks(page, PageParts(alone=True, is_index=True)))


def _fill_template(page: Page, parts: PageParts, files: Iterable[tuple[str, str]] = ()) -> str:
    """The page as text, of at most `LIMIT` bytes as long as there is something to leave out. Where
    it has no headline, the first figure or table that leaves room for the rest stands at the top.

    `files`: names of further files to list, each with its content in words.
    """
    from markupsafe import Markup

    script, blocks = (TEMPLATES / "script.html.j2").read_text("utf-8").strip(), parts.blocks
    if not parts.is_index and not parts.headline:
        _choose_lead(blocks)
    verdict = write_text(page.verdict)
    answer = shorten_answer(verdict)
    context = vars(parts) | {
        "folds": _fold_blocks(block for block in blocks if not block.lead),
        "answer": answer,
        "more": "" if answer == verdict else verdict,
        "title": clean_text(page.title),
        "notices": list(map(write_text, page.notices)),
        "facts": [tuple(map(write_text, fact)) for fact in page.facts.items()],
        "files": [tuple(map(clean_text, file)) for file in files],
        "version": __version__,
        "colours": COLOURS,
        "script": Markup(script),  # noqa: S704  # our own
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    template = _load_template()
    text = template.render(context) + "\n"
    while len(text.encode()) > LIMIT and _drop_largest(blocks):
        text = template.render(context) + "\n"
    return text


def _leaves_room(block: Block) -> bool:
    """Whether a figure or table may stand at the top."""
    return len(block.rows) <= LEADING and block.height <= HIGHEST


def _choose_lead(blocks: Iterable[Block]) -> None:
    """Mark the first figure or table that leaves room for the rest."""
    leading = (block for block in blocks if block.label and _leaves_room(block))
    for block in itertools.islice(leading, 1):
        block.lead, block.level = True, 2


@functools.cache
def _load_template() -> Template:
    """The template of all pages. To compile it takes longer than to fill it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(TEMPLATES)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return templates.get_template("report.html.j2")


def _drop_largest(blocks: Iterable[Block]) -> bool:
    """Remove the largest download of a page, where there is none the largest drawing (both are
    files); whether there was one.
    """
    for name in ("csv", "svg_inline"):
        filled = [block for block in blocks if getattr(block, name)]
        if filled:
            setattr(max(filled, key=lambda block: len(getattr(block, name))), name, "")
            return True
    return False


def _list_former_files(folder: Path) -> list[str]:
    """Files of an earlier report in `folder`, by its own list."""
    try:
        names = Summary.load(folder / "summary.json").report.files
    except UserError as error:
        raise_system_error(error)
        return []
    return [name for name in names if re.fullmatch(r"[a-z0-9-]+\.(parquet|svg)", name)]


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
    (`records.write_results`). Files that bitimely did not write are left alone.

    Args:
        folder: of the report.
        page: what is written.
        files: further files of the folder to list, name -> content in words.
        others: files to write in the same step.
        gone: files to remove in the same step.

    Raises:
        UserError: the disk is full or cannot be written (exit 6).
    """
    folder, parts = Path(folder), _render_blocks(page, PageParts())
    content = parts.files
    info = ReportInfo(
        title=page.title,
        verdict=page.verdict,
        notices=page.notices,
        facts=page.facts,
        files={
            name: StoredFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            for name, data in content.items()
        },
    )
    summary = {**page.summary, "format_version": FORMAT, "report": info.model_dump()}
    write_results(
        folder,
        {
            **(others or {}),
            **content,
            "summary.json": storage.encode_json(to_json(summary)) + b"\n",
            "report.html": _fill_template(page, parts, (files or {}).items()).encode(),
        },
        gone=(set(_list_former_files(folder)) - content.keys()).union(gone),
    )
    return folder / "report.html"
