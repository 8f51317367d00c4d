"""Reports: pages of runs, comparisons, recipes, data sets and ingests, and the renderer that turns
a `Page` into one HTML file.
"""

from __future__ import annotations

from bitimely_core.report.renderer import LIMIT as LIMIT
from bitimely_core.report.renderer import render_html as render_html
from bitimely_core.report.renderer import write_report as write_report
