"""What a report shows, as plain data: figures, tables and the page that holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as data; the report draws it. Every array lands beside the page as Parquet.

    kind `lines`: data = {"series": [{"name", "x", "y", "lo"?, "hi"?, "reference"?: bool}], "xlabel", "ylabel", "logx"?, "logy"?}; `matrix`: {"values": [R, C] array,
    "xlabel", "ylabel", "diverging": bool, "mark"?: [lo, hi], "row_names"?, "column_names"?}; `bars`: {"names": [...], "values": [...], "lo"?, "hi"?, "ylabel"}; `traces`: {"rate", "signals":
    [{"name", "unit", "values"}], "spans"?: [{"start", "stop", "name"}]} (seconds); `hypnogram`: {"epoch", "tracks": [{"name", "stages"}], "classes"};
    `timelines`: {"lanes": [{"name", "times", "groups": [index]}], "groups": [names, the first for the background], "xlabel"};
    `scatter`: {"panels": [{"name", "x", "y", "group": [index, -1 for none]}], "groups": [names], "xlabel", "ylabel", "ticks"?: bool};
    `forest`: {"names": [...], "panels": [{"name", "values", "lo"?, "hi"?, "other"?, "zero"?: bool}], "xlabel", "ours"?, "other"?: words for the legend};
    `ranks`: {"names", "ranks": mean ranks, "critical": difference below which a bar joins two}.
    """

    name: str
    title: str
    caption: str  # what is seen, and what would refute it
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report: cells are text, numbers or None (shown as a dash)."""

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What an analysis or an evaluation found; `report.write` turns it into one self-contained HTML file and its data."""

    title: str
    verdict: str  # one sentence a newcomer understands
    notices: list[str] = field(default_factory=list)  # at the top: leak_free false, random-window split ...
    blocks: list[Figure | Table | str] = field(default_factory=list)  # in reading order; a str is a paragraph
    facts: dict[str, str] = field(default_factory=dict)  # data, split, subjects, seed, versions ...
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
