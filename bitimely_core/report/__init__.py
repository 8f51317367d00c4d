"""Reports: pages of runs, comparisons, recipes, data sets and ingests, and the renderer that turns
a `Page` into one HTML file.
"""

from __future__ import annotations

from bitimely_core.report.canvas import reduce_matrix as reduce_matrix
from bitimely_core.report.canvas import reduce_trace as reduce_trace
from bitimely_core.report.numbers import figure_data as figure_data
from bitimely_core.report.numbers import table_data as table_data
from bitimely_core.report.numbers import to_csv as to_csv
from bitimely_core.report.renderer import LIMIT as LIMIT
from bitimely_core.report.renderer import render_html as render_html
from bitimely_core.report.renderer import write_report as write_report
from bitimely_core.report.svg import draw_figure as draw_figure
from bitimely_core.report.text import clean_text as clean_text
from bitimely_core.report.text import format_number as format_number
