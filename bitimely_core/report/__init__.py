"""Reports: pages of runs, comparisons, recipes, data sets and ingests, and the renderer that turns a `Page` into one HTML file."""

from __future__ import annotations

from bitimely_core.report.figures import reduce_matrix, reduce_trace
from bitimely_core.report.numbers import figure_data, table_data, to_csv
from bitimely_core.report.renderer import LIMIT, render_html, write_report
from bitimely_core.report.svg import draw_figure
from bitimely_core.report.text import clean_text, format_number

__all__ = [
    "LIMIT",
    "clean_text",
    "draw_figure",
    "figure_data",
    "format_number",
    "reduce_matrix",
    "reduce_trace",
    "render_html",
    "table_data",
    "to_csv",
    "write_report",
]
