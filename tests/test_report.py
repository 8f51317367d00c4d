"""The page: self-contained, the same bytes again, small, safe against foreign text, written
atomically; its files hold every number.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest

from bitimely_core import report
from bitimely_core.errors import Reason, UserError
from bitimely_core.page import (
    BarPlot,
    Figure,
    ForestPanel,
    ForestPlot,
    HeatMap,
    Hypnogram,
    Line,
    LinePlot,
    Page,
    RankPlot,
    StageTrack,
    Table,
    TimeSpan,
    Trace,
    TracePlot,
)
from bitimely_core.report import LIMIT, write_report
from bitimely_core.report.canvas import reduce_matrix, reduce_trace
from bitimely_core.report.numbers import to_csv
from bitimely_core.report.page_text import clean_text, format_number
from bitimely_core.report.svg import draw_figure
from bitimely_core.store import storage

HOSTILE = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "$x_1$ \\frac{1}{0}",
    "_hidden",
    '=HYPERLINK("http://evil")',
    "\x1b[31mred\x00\u202egnp",
    "{{ 7 * 7 }}{% raw %}",
    "脳波 \ufffe",
    "javascript:alert(1)",
)


class Parsed(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.inside = [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data + "\n"

    def of(self, tag):
        return [a for t, a in self.elements if t == tag]


def figures(names=("EEG Fpz-Cz", "EOG")):
    rng = np.random.default_rng(0)
    x, others = np.arange(50), len(names) - 1
    lines = [Line(n, x, rng.normal(size=50).cumsum(), x * 0.1 - 1, x * 0.1 + 1) for n in names]
    return [
        Figure(
            name="curves",
            title="Curves",
            caption="Loss.",
            data=LinePlot(series=lines, xlabel="step", ylabel=names[0]),
        ),
        Figure(
            name="map",
            title="Map",
            caption="Rows are queries.",
            data=HeatMap(
                values=rng.normal(size=(40, 40)),
                xlabel="key",
                ylabel="query",
                diverging=True,
                mark=[3, 9],
            ),
        ),
        Figure(
            name="maps",
            title="Heads",
            caption="All.",
            data=HeatMap(
                values=rng.normal(size=(len(names) + 1, 12, 12)),
                names=[*names, "c"],
                xlabel="key",
                ylabel="query",
                diverging=True,
            ),
        ),
        Figure(
            name="confusion",
            title="Confusion",
            caption="Counts.",
            data=HeatMap(
                values=rng.integers(0, 9, (len(names), len(names))),
                row_names=names,
                column_names=names,
                xlabel="said",
                ylabel="is",
            ),
        ),
        Figure(
            name="bars",
            title="Bars",
            caption="Score.",
            data=BarPlot(
                names=names,
                values=[0.4] + [0.7] * others,
                lo=[0.3] + [None] * others,
                hi=[0.5] + [None] * others,
                ylabel=names[0],
            ),
        ),
        Figure(
            name="traces",
            title="Traces",
            caption="Signals.",
            data=TracePlot(
                rate=100.0,
                spans=[TimeSpan(start=1.0, stop=2.0, name=names[0])],
                signals=[Trace(name=n, unit="µV", values=rng.normal(size=3000)) for n in names],
            ),
        ),
        Figure(
            name="night",
            title="Night",
            caption="Stages.",
            data=Hypnogram(
                epoch=30.0,
                classes=["W", "N1", "N2", "N3", *(("R",) if names != HOSTILE else HOSTILE)],
                tracks=[
                    StageTrack(
                        name=n,
                        stages=rng.integers(-1, 5, 200)
                        if n == names[0]
                        else ["W", None, "N2"] * 66,
                    )
                    for n in names
                ],
            ),
        ),
        Figure(
            name="forest",
            title="Forest",
            caption="Intervals.",
            data=ForestPlot(
                names=names,
                xlabel=names[0],
                panels=[
                    ForestPanel(
                        name=names[0],
                        values=[1.0, None] + [2.0] * (others - 1),
                        lo=[0.5] + [None] * others,
                        hi=[1.5] + [None] * others,
                    ),
                    ForestPanel(
                        name=names[1],
                        values=[0.1] * (others + 1),
                        other=[0.2] * (others + 1),
                        zero=True,
                        margins=[-0.3] + [None] * others,
                    ),
                ],
            ),
        ),
        Figure(
            name="ranks",
            title="Ranks",
            caption="Mean ranks.",
            data=RankPlot(names=names, ranks=[1.0 + k for k in range(others + 1)], critical=1.2),
        ),
    ]


def page(**changes):
    metric = {
        "value": 0.81,
        "lo": 0.7,
        "hi": 0.9,
        "se": 0.05,
        "n_defined": 10,
        "undefined_reason": None,
    }
    data = BarPlot(["this run", "majority"], [0.81, 0.4], [0.7, None], [0.9, None], "accuracy")
    head = Figure(name="main-score", title="Accuracy", caption="Main.", data=data)
    table = Table(
        name="scores",
        title="Scores",
        caption="All.",
        columns=["metric", "value", "n"],
        rows=[["accuracy", metric, 20], ["kappa", None, 3], ["f1", 0.5, 100]],
    )
    fields = {
        "title": "A run",
        "verdict": "It knows more than the majority.",
        "notices": ["leak_free is false."],
        "facts": {"Data": "synthetic", "Seed": "0"},
        "blocks": [head, "A paragraph.", table, "## Figures", *figures()],
        "summary": {"tiny": {"1": {"auc": 0.5, "bad": float("nan"), "array": np.arange(3)}}},
    }
    return Page(**{**fields, **changes})


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_is_one_file_without_network_requests(tmp_path):
    path = write_report(tmp_path / "r", page())
    raw = path.read_text("utf-8")
    parsed = Parsed(raw)
    assert path.name == "report.html"
    assert len(raw.encode()) < LIMIT
    assert "http" not in raw.replace("http-equiv", "")
    assert not re.search(r"@import|url\((?!#)", raw)
    links = [
        a.get(k, "")
        for _, a in parsed.elements
        for k in ("href", "src", "action", "data", "poster", "srcset")
    ]
    for link in filter(None, links):
        assert (
            link.startswith(("#", "data:image/png;base64,", "data:text/csv"))
            or (path.parent / link).is_file()
        ), link
    policy = next(
        a["content"] for a in parsed.of("meta") if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    script = re.search(r"<script>(.*?)</script>", raw, re.DOTALL).group(1)
    assert (
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    )
    assert len(script) < 2500
    assert len(parsed.of("script")) == len(parsed.of("style")) == len(parsed.of("h1")) == 1
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for reference in re.findall(r"url\(#([^)]+)\)", raw) + re.findall(r'href="#([^"]+)"', raw):
        assert reference in ids


def test_verdict_score_notices_facts_come_first(tmp_path):
    text = Parsed(write_report(tmp_path, page()).read_text("utf-8")).text
    order = [
        text.index(w)
        for w in (
            "It knows more than the majority.",
            "0.810",
            "95 % CI 0.700 to 0.900",
            "leak_free is false.",
            "synthetic",
            "A paragraph.",
        )
    ]
    assert order == sorted(order)
    for words in ("Figure 1", "Figure 9", "Table 1", "Loss.", "0.700–0.900", "–"):
        assert words in text


@pytest.mark.parametrize("kind", ["figure", "table"])
def test_without_a_headline_the_first_figure_or_short_table_leads(kind):
    """Sentence, figure, caveats, then facts and the list of figures; the lead is shown once, a long
    table does not lead.
    """
    curve = replace(
        next(one for one in figures() if isinstance(one.data, LinePlot)),
        name="leading",
        title="The leading curve",
    )
    long = Table(
        name="long", title="A long table", caption="c", columns=["a"], rows=[[k] for k in range(30)]
    )
    short = Table(name="short", title="A short table", caption="c", columns=["a"], rows=[[1]])
    others = figures()[:3]
    blocks = [
        long,
        "## A section",
        curve if kind == "figure" else short,
        *(others if kind == "figure" else [long]),
    ]
    raw = report.render_html(page(blocks=blocks))
    lead = curve.title if kind == "figure" else short.title
    body = raw[raw.index("<main>") :]
    marks = (
        "It knows more",
        f">{lead}</h",
        "leak_free is false.",
        "<dt>Data</dt>",
        ">A long table</h",
    )
    order = [(raw if mark == marks[0] else body).index(mark) for mark in marks if mark in raw]
    assert order[1:] == sorted(order[1:])
    assert raw.count(f">{lead}</h") == 1
    assert raw.count(' lead"') + raw.count('class="lead"') == 1


def test_a_headline_needs_a_value():
    def render(values):
        bars = Figure(
            name="b",
            title="Main",
            caption="c",
            data=BarPlot(names=["x", "y", "z"], values=values, ylabel="v"),
        )
        return Parsed(report.render_html(page(blocks=[bars])))

    shown = render([-2.5, None, 40.0])
    assert [a for a in shown.of("figure") if a.get("class") == "headline"]
    assert "−2.500" in shown.text
    assert "nan" not in shown.text
    assert not [a for a in render([None, 1.0, 2.0]).of("figure") if a.get("class") == "headline"]


@pytest.mark.slow
def test_same_page_same_bytes(tmp_path):
    for name in "ab":
        write_report(tmp_path / name, page())
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.slow
def test_every_figure_has_a_drawing_and_its_data(tmp_path):
    write_report(tmp_path, page())
    expected = {f.name for f in figures()} | {"main-score"}
    assert {p.stem for p in tmp_path.glob("*.svg")} == expected
    # "scores" is the run's own scores.json
    assert {p.stem for p in tmp_path.glob("*.parquet")} == expected | {"scores-2"}
    for path in tmp_path.glob("*.svg"):
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "Date" not in path.read_text("utf-8")


@pytest.mark.slow
def test_foreign_text_stays_text(tmp_path):
    two = HOSTILE[:2]
    tables = [
        Table(name=n, title=n, caption=n, columns=[n, n], rows=[[n, 1], [n, None]]) for n in HOSTILE
    ]
    blocks = [*figures(HOSTILE), *tables, *HOSTILE, *(f"## {n}" for n in HOSTILE)]
    facts = {n: n for n in HOSTILE}
    hostile = page(
        title="".join(HOSTILE),
        verdict="".join(HOSTILE),
        notices=list(HOSTILE),
        facts=facts,
        blocks=blocks,
        summary=facts,
    )
    path = write_report(tmp_path, hostile, files={"predictions.parquet": two[0]})
    raw = path.read_text("utf-8")
    parsed = Parsed(raw)
    assert len(parsed.of("script")) == len(parsed.of("style")) == 1
    assert not parsed.of("img")
    assert len(parsed.of("svg")) == len(figures())
    assert not [key for _, a in parsed.elements for key in a if key.startswith("on")]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ufffe]", raw)
    for link in (a["href"] for a in parsed.of("a")):
        assert (
            link.startswith(("#", "data:text/csv"))
            or (tmp_path / link).is_file()
            or link == "predictions.parquet"
        ), link
    for name in HOSTILE:
        assert parsed.text.count(clean_text(name)) >= 10
    for drawing in tmp_path.glob("*.svg"):
        tags = {e.tag.rpartition("}")[2] for e in ET.parse(drawing).getroot().iter()}
        assert not tags & {"script", "foreignObject", "a", "style"}


@pytest.mark.slow
def test_large_pages_stay_small_and_their_files_complete(tmp_path):
    rng = np.random.default_rng(0)
    noise = [
        Figure(
            name=f"m{k}",
            title="Noise",
            caption="n",
            data=HeatMap(values=rng.normal(size=(16, 240, 240)), diverging=True),
        )
        for k in range(2)
    ]
    trace = Figure(
        name="t",
        title="Long",
        caption="t",
        data=TracePlot(
            rate=256.0,
            signals=[Trace(name=f"c{k}", values=rng.normal(size=50000)) for k in range(6)],
        ),
    )
    table = Table(
        name="rows",
        title="Rows",
        caption="r",
        columns=["n", "x"],
        rows=[[k, k / 7] for k in range(2000)],
    )
    path = write_report(tmp_path, page(blocks=[*noise, trace, table]))
    assert path.stat().st_size <= LIMIT
    assert "The first 500 of 2,000 rows" in path.read_text("utf-8")
    assert "too large for the page" in path.read_text("utf-8")
    assert pl.read_parquet(tmp_path / "m0.parquet").shape == (16 * 240, 242)
    assert pl.read_parquet(tmp_path / "t.parquet").height == 300_000
    assert pl.read_parquet(tmp_path / "rows.parquet").height == 2000
    assert (tmp_path / "t.svg").stat().st_size < 400_000


def test_an_empty_page(tmp_path):
    empty = [
        Figure(name="l", title="l", caption="", data=LinePlot(series=[])),
        Figure(
            name="n",
            title="n",
            caption="",
            data=LinePlot(
                series=[Line(name="x", x=[0, 1], y=[np.nan, np.nan])], logx=True, logy=True
            ),
        ),
        Figure(name="m", title="m", caption="", data=HeatMap(values=np.full((3, 3), np.nan))),
        Figure(
            name="z", title="z", caption="", data=HeatMap(values=np.zeros((20, 20)), diverging=True)
        ),
        Figure(name="b", title="b", caption="", data=BarPlot(names=[], values=[])),
        Figure(name="h", title="h", caption="", data=Hypnogram(epoch=30, classes=["W"], tracks=[])),
        Figure(name="t", title="t", caption="", data=TracePlot(rate=1, signals=[])),
        Figure(name="f", title="f", caption="", data=ForestPlot(names=[], panels=[])),
        Figure(name="r", title="r", caption="", data=RankPlot(names=[], ranks=[], critical=1.0)),
        Table(name="e", title="e", caption="", columns=["a"], rows=[]),
    ]
    assert write_report(tmp_path, Page(title="", verdict="", blocks=empty)).is_file()
    with pytest.raises(ValueError, match="kind"):
        report.render_html(
            Page(title="", verdict="", blocks=[Figure(name="q", title="", caption="", data={})])
        )


# --- the numbers --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_hold_the_numbers_of_the_figures(tmp_path):
    shown = {f.name: f for f in figures()}
    write_report(tmp_path, page())
    read = {name: pl.read_parquet(tmp_path / f"{name}.parquet") for name in shown}
    series = shown["curves"].data.series[1]
    part = read["curves"].filter(pl.col("series") == "EOG")
    for key in ("x", "y", "lo", "hi"):
        assert np.array_equal(part[key].to_numpy(), getattr(series, key)), key
    assert np.array_equal(read["map"].drop("row").to_numpy(), shown["map"].data.values)
    assert np.array_equal(
        read["maps"].drop("row", "panel").to_numpy(), shown["maps"].data.values.reshape(36, 12)
    )
    assert read["confusion"].columns == ["row", "column EEG Fpz-Cz", "column EOG"]
    assert read["bars"].to_dicts()[1] == {
        "name": "EOG",
        "value": 0.7,
        "lo": None,
        "hi": None,
    } or np.isnan(read["bars"]["lo"][1])
    eog = read["traces"].filter(pl.col("signal") == "EOG")
    assert np.array_equal(eog["value"].to_numpy(), shown["traces"].data.signals[1].values)
    assert eog["seconds"][1] == 0.01
    stages = shown["night"].data.tracks[0].stages
    assert read["night"]["stage EEG Fpz-Cz"].to_list() == [
        (["W", "N1", "N2", "N3", "R", ""])[s] for s in stages
    ]
    assert read["forest"].columns == ["panel", "name", "value", "lo", "hi", "other", "margin"]
    assert read["forest"].drop("lo", "hi").row(2) == ("EOG", "EEG Fpz-Cz", 0.1, 0.2, -0.3)
    assert np.isnan(read["forest"]["lo"][2])
    assert read["ranks"].row(1) == ("EOG", 2.0, 1.2)
    scores = pl.read_parquet(tmp_path / "scores-2.parquet")
    assert scores["value"].to_list()[0] == 0.81
    assert scores["value lo"][0] == 0.7
    assert scores["n"].to_list() == [20, 3, 100]


@pytest.mark.slow
def test_summary_is_canonical_json(tmp_path):
    write_report(tmp_path, page())
    raw = (tmp_path / "summary.json").read_bytes()
    summary = json.loads(raw)
    assert raw == storage.encode_json(summary) + b"\n"
    assert summary["format_version"] == 1
    assert summary["tiny"] == {"1": {"auc": 0.5, "bad": None, "array": [0, 1, 2]}}
    for name, facts in summary["report"]["files"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == facts["sha256"]


def test_downloads_carry_the_same_numbers_without_formulas(tmp_path):
    raw = write_report(tmp_path, page()).read_text("utf-8")
    link = next(a["href"] for a in Parsed(raw).of("a") if a.get("download") == "bars.csv")
    assert base64.b64decode(link.partition(",")[2]).decode().splitlines() == [
        "name,value,lo,hi",
        "EEG Fpz-Cz,0.4,0.3,0.5",
        "EOG,0.7,,",
    ]
    lines = to_csv(
        {"=a": np.array(["=1+1", "+x", "-y", "@z", "a,b", 'q"', "plain"]), "n": np.arange(7.0) - 3}
    )
    assert lines.splitlines() == [
        "'=a,n",
        "'=1+1,-3.0",
        "'+x,-2.0",
        "'-y,-1.0",
        "'@z,0.0",
        '"a,b",1.0',
        '"q""",2.0',
        "plain,3.0",
    ]


def test_long_traces_keep_their_spikes():
    x = np.random.default_rng(0).normal(size=100_000)
    x[43_210], x[77_777], x[5] = 50.0, -60.0, np.nan
    index, drawn = reduce_trace(x)
    assert len(index) <= 2 * 620
    assert (np.diff(index) > 0).all()
    assert {50.0, -60.0} <= set(drawn.tolist())
    assert np.array_equal(reduce_trace(x[:900])[0], np.arange(900))


def test_large_matrices_keep_their_strongest_entries():
    x = np.random.default_rng(0).normal(size=(500, 301))
    x[123, 45], x[499, 300], x[7, 7] = -40.0, 30.0, np.nan
    small = reduce_matrix(x)
    assert small.shape == (167, 151)  # blocks of 3 and 2, so that there are at most 240
    assert small.min() == -40.0
    assert small[-1, -1] == 30.0
    assert reduce_matrix(x[:50, :50]).shape == (50, 50)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[
            (0.84214, "0.842"),
            (0, "0"),
            (0.0, "0.000"),
            (1234567, "1,234,567"),
            (12.3456, "12.35"),
            (123.45, "123.5"),
            (-0.5, "−0.500"),
        ],
        *[(3.21e-7, "3.2×10⁻⁷"), (7e18, "7.0×10¹⁸"), (float("inf"), "∞"), (None, "–")],
    ],
)
def test_displayed_numbers(value, shown):
    assert format_number(value) == shown


def test_bars_join_ranks_within_the_critical_difference():
    """Demsar's figure: ranks 1.0 1.5 2.4 4.0 with 1.0 between them: two bars, from 1.0 to 1.5 and
    from 1.5 to 2.4; 4.0 stands alone.
    """
    data = RankPlot(list("abcd"), [1.0, 2.4, 1.5, 4.0], 1.0)
    svg, _ = draw_figure(Figure(name="r", title="", caption="", data=data))
    blue = [e for e in svg.iter() if report.figures.SERIES[0] in e.get("style", "")]
    ends = [[float(v) for v in e.get("d").split()[1::3]] for e in blue]
    assert len(ends) == 2
    assert ends[0][0] < ends[1][0] < ends[0][1] < ends[1][1]


def test_a_cell_may_be_shown_as_a_text_with_a_note(tmp_path):
    cells = [
        {"value": 90.4, "text": "90.4 (2.5)", "note": "88.1 (2.0)", "paper": 88.1},
        {"value": None, "text": "–", "note": "", "paper": None},
    ]
    path = write_report(
        tmp_path,
        Page(
            title="t",
            verdict="v",
            blocks=[
                Table(
                    name="x",
                    title="x",
                    caption="x",
                    columns=["a", "b"],
                    rows=[["r", c] for c in cells],
                )
            ],
        ),
    )
    assert 'data-v="90.4">90.4 (2.5) <span class="ci">88.1 (2.0)</span>' in path.read_text("utf-8")
    assert pl.read_parquet(tmp_path / "x.parquet").row(0) == ("r", 90.4, 88.1)


# --- atomic writes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("allowed", range(4))
def test_a_run_that_dies_leaves_the_former_report(tmp_path, monkeypatch, allowed):
    write_report(tmp_path, page())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"}
    (tmp_path / "predictions.parquet").write_bytes(b"mine")
    real, left = storage.write_hashed, [allowed]

    def failing(*args):
        left[0] -= 1
        if left[0] < 0:
            raise UserError(Reason.DISK_FULL, "disk full", exit_code=6)
        return real(*args)

    monkeypatch.setattr(storage, "write_hashed", failing)
    with pytest.raises(UserError):
        write_report(tmp_path, page(title="Another"))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    monkeypatch.setattr(storage, "write_hashed", real)
    write_report(tmp_path, page(title="Another", blocks=[figures()[0]]))
    names = {p.name for p in tmp_path.iterdir()} - {".lock"}
    assert names == {
        "report.html",
        "summary.json",
        "predictions.parquet",
        "curves.svg",
        "curves.parquet",
        "manifest.json",
    }
    assert (tmp_path / "predictions.parquet").read_bytes() == b"mine"


def test_names_of_files_are_plain_and_differ(tmp_path):
    same = [
        Figure(name=n, title="x", caption="", data=BarPlot(names=["a"], values=[1]))
        for n in ("../Evil/x", "..-evil-x", "脳", "predictions")
    ]
    write_report(tmp_path, page(blocks=["x", *same]))
    assert {p.name for p in tmp_path.glob("*.svg")} == {
        "evil-x.svg",
        "evil-x-2.svg",
        "figure.svg",
        "predictions-2.svg",
    }


# --- in a browser -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_a_browser(tmp_path):
    """No complaint on the console (the page's policy included), and tables sort on a click: numbers
    as numbers, dashes last.
    """
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("no chromium on this machine")
    rows = [["b", 10.5], ["a", 9.25], ["d", None], ["c", 100.0]]
    path = write_report(
        tmp_path / "r",
        page(
            blocks=[
                Table(name="t", title="T", caption="c", columns=["name", "x"], rows=rows),
                *figures(),
            ]
        ),
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--dump-dom",
    ]

    def opened(file, k):
        done = subprocess.run(
            [browser, *options, f"--user-data-dir={tmp_path / f'home{k}'}", f"file://{file}"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.stdout.decode(), done.stderr.decode()

    _, console = opened(path, 0)
    assert "CONSOLE" not in console
    tried = tmp_path / "clicked.html"
    raw = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text("utf-8"))
    tried.write_text(
        raw.replace(
            "</body>",
            "<script>document.querySelectorAll('thead button')[1].click()</script></body>",
        ),
        "utf-8",
    )
    dom, _ = opened(tried, 1)
    body = dom[dom.index("<tbody>") : dom.index("</tbody>")]
    assert re.findall(r'<th scope="row"[^>]*>(\w)</th>', body) == ["a", "b", "c", "d"]
    assert dom.count('aria-sort="ascending"') == 1


def test_the_name_of_a_single_panel_is_whole() -> None:
    name = "generic-classification-without-codes (points)"
    plot = ForestPlot(["a run"], [ForestPanel(name, [1.0], [0.5], [1.5])], "difference")
    assert name in "".join(draw_figure(Figure("f", "", "", plot))[0].itertext())
