"""Pages open with answer, figure and caveat; all else is folded, and stays reachable."""

from __future__ import annotations

import itertools
import re

import pytest
from page_height import measure
from small import copy_workspace

from bitimely_cli.main import main
from bitimely_core import report
from bitimely_core.page import BarPlot, Line, LinePlot, Page, PageBuilder

HIGHEST = 4000  # pixels, on a screen 1,440 wide


def make_large_page(headline: bool) -> Page:
    page = PageBuilder("A page with a title that is long enough for a second line of the heading")
    if headline:
        names = [f"run {k}" for k in range(80)]
        page.figure("scores", "Scores", "All runs.", BarPlot(names, [0.5] * 80))
    page.notice(*(f"Caveat {k}: {'a reason in many words ' * 12}" for k in range(30)))
    page.add_facts({f"fact {k}": "a value " * 20 for k in range(40)})
    plot = LinePlot([Line("a", [0.0, 1.0], [0.0, 1.0])])
    page.text("How to read it. " * 60)
    for k in range(25):
        page.figure(f"figure-{k}", f"Figure {k}", "A caption. " * 30, plot)
        page.table(f"table-{k}", f"Table {k}", "A caption. " * 30, ["a", "b"], [[k, k]] * 400)
    page.section("Methods")
    page.text("A method. " * 300)
    page.table("last", "The last table", "c", ["a"], [[1]])
    return page.finish(f"{'A long sentence about a result ' * 20}. {'And another one. ' * 30}")


@pytest.mark.slow
@pytest.mark.parametrize("headline", [True, False])
def test_a_page_of_any_length_opens_below_the_limit(headline: bool) -> None:
    html = report.render_html(make_large_page(headline), alone=True)
    opened = measure(html)
    assert opened.height < HIGHEST
    assert opened.rows == 0
    flat = re.sub(r"</?details[^>]*>|</?summary>", "", html)
    assert measure(flat).height > 5 * HIGHEST, "the measure sees what is folded"


@pytest.mark.slow
def test_what_is_folded_is_there_and_named() -> None:
    page = make_large_page(headline=True)
    html = report.render_html(page, alone=True)
    folded = re.findall(r'<details class="fold"><summary><h2>(.*?)</h2>', html)
    assert folded[:2] == ["The result in full, data and settings", "How to read this page"]
    assert folded[-1] == "Methods"
    assert len(folded) == 2 + 50 + 1
    assert page.verdict in html
    assert all(notice in html for notice in page.notices)
    assert "<h3>The last table</h3>" in html, "a section has its own headings one level below"
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert "details::details-content{content-visibility:visible" in html, "paper shows all"


def test_one_caveat_is_one_line_and_none_is_no_line() -> None:
    page = PageBuilder("Page")
    assert 'class="notices"' not in report.render_html(page.finish("Yes."), alone=True)
    page.notice("Few people.")
    html = report.render_html(page.finish("Yes."), alone=True)
    assert '<p class="notices"><b>Caveat.</b> Few people.</p>' in html


@pytest.mark.slow
def test_pages_of_a_workspace_open_below_the_limit(tmp_path) -> None:
    home = copy_workspace(tmp_path / "home")
    assert main(["dashboard", "-w", str(home)]) == 0
    pages = [*home.rglob("report.html"), home / "index.html"]
    assert len(pages) > 3
    assert {
        page: h for page in pages if (h := measure(page.read_text("utf-8")).height) > 4000
    } == {}
