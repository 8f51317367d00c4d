"""The numbers behind figures and tables of a page, against those that were put in."""

import base64
import csv
import io
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from bitimely_core import page
from bitimely_core.report import numbers, score_blocks
from bitimely_core.report.page_text import make_slug, to_json
from bitimely_core.schemas.scores import MetricValue, NightScores, RiskGroup, RiskGroups, RiskPoint


def test_a_hypnogram_has_the_seconds_and_stages_of_its_epochs() -> None:
    tracks = [page.StageTrack("scored", ["W", "N1", None]), page.StageTrack("ours", [1, 0, 7, -1])]
    columns = numbers.list_columns(page.Hypnogram(30.0, tracks, ("W", "N1")))
    assert columns["seconds"].tolist() == [0.0, 30.0, 60.0, 90.0]
    assert columns["epoch"].tolist() == [0, 1, 2, 3]
    assert columns["stage scored"].tolist() == ["W", "N1", "", ""]
    assert columns["stage ours"].tolist() == ["N1", "W", "", ""]


def test_a_hypnodensity_has_the_seconds_and_shares_of_its_epochs() -> None:
    shares = [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    columns = numbers.list_columns(page.DensityPlot(4.0, shares, ("W", "N1")))
    assert columns["seconds"].tolist() == [0.0, 4.0, 8.0]
    assert np.stack([columns["p W"], columns["p N1"]], 1).tolist() == shares


@pytest.mark.parametrize("margins", [None, [0.5, None]])
def test_differences_have_a_column_of_margins_where_there_are_any(
    margins: list[float | None] | None,
) -> None:
    panel = page.ForestPanel("D", [1.0, None], [0.5, None], [1.5, None], margins=margins)
    columns = numbers.list_columns(page.ForestPlot(["a", "b"], [panel, panel]))
    assert {"panel", "name", "value", "lo", "hi"} <= columns.keys()
    assert ("margin" in columns) is (margins is not None)
    assert "other" not in columns
    np.testing.assert_array_equal(columns["value"], [1.0, np.nan] * 2)
    np.testing.assert_array_equal(columns["hi"], [1.5, np.nan] * 2)
    assert columns["name"].tolist() == ["a", "b"] * 2


def test_a_link_to_the_data_of_a_figure_says_whether_it_holds_text() -> None:
    values = np.array([1.5, np.nan])
    link, has_text = numbers.csv_link({"x": values, "y": values})
    assert not has_text
    content = base64.b64decode(link.partition("base64,")[2]).decode()
    assert list(csv.reader(io.StringIO(content))) == [["x", "y"], ["1.5", "1.5"], ["", ""]]
    assert numbers.csv_link({"x": values, "name": np.array(["a", "=1+1"])})[1]


def make_groups() -> RiskGroups:
    """Two groups with points on eight days, the second withheld in part."""
    days = [float(day) for day in range(100, 900, 100)]
    high = [
        RiskPoint(day=day, at_risk=200 - k, events=20 + k, incidence=0.01 * k, lo=0.0, hi=0.02 * k)
        for k, day in enumerate(days)
    ]
    low = [
        RiskPoint(day=day, at_risk=None, events=None, incidence=None, lo=None, hi=None)
        for day in days
    ]
    return RiskGroups(
        horizons=[300.0, 800.0],
        groups=[
            RiskGroup(name="high", n=210, predicted=[0.125, 0.5], points=high),
            RiskGroup(name="low", n=None, predicted=None, points=low),
        ],
    )


def test_calibration_is_in_percent_at_each_horizon() -> None:
    table = score_blocks._calibration_table("CHF", make_groups())
    rows = [row[:5] for row in table.rows]
    assert rows == [
        ["300", "high", 210, 22, 12.5],
        ["300", "low", "withheld", "withheld", None],
        ["800", "high", 210, 27, 50.0],
        ["800", "low", "withheld", "withheld", None],
    ]
    observed = [(row[5]["value"], row[5]["lo"], row[5]["hi"]) for row in table.rows]
    assert observed[0] == pytest.approx((2.0, 0.0, 4.0))
    assert observed[2] == pytest.approx((7.0, 0.0, 14.0))
    assert observed[1] == (None, None, None)


def test_numbers_at_risk_are_those_of_the_horizons_and_of_about_four_days() -> None:
    table = score_blocks._at_risk_table("CHF", make_groups())
    assert table.columns == [
        "risk",
        "at first",
        *(f"day {day}" for day in (200, 300, 400, 600, 800)),
    ]
    assert table.rows[0] == ["high", 210, 199, 198, 197, 195, 193]
    assert table.rows[1] == ["low", *["withheld"] * 6]


def test_of_few_days_all_numbers_at_risk_are_shown() -> None:
    groups = make_groups()
    short = [g.model_copy(update={"points": g.points[:4]}) for g in groups.groups]
    groups = groups.model_copy(update={"groups": short, "horizons": [300.0]})
    table = score_blocks._at_risk_table("CHF", groups)
    assert table.columns[2:] == ["day 100", "day 200", "day 300", "day 400"]


def test_the_line_of_a_right_prediction_reaches_the_largest_risk() -> None:
    groups = make_groups()
    tenths = [g.model_copy(update={"points": [g.points[2], g.points[7]]}) for g in groups.groups]
    groups = groups.model_copy(update={"deciles": tenths})
    (figure,) = score_blocks._calibration_figures("CHF", groups)
    assert isinstance(figure.data, page.LinePlot)
    *lines, diagonal = figure.data.series
    assert [(list(line.x), list(line.y)) for line in lines] == [
        ([12.5], pytest.approx([2.0])),
        ([50.0], pytest.approx([7.0])),
    ]
    assert (list(diagonal.x), list(diagonal.y)) == ([0.0, 50.0], [0.0, 50.0])


def test_json_has_null_for_what_is_no_finite_number() -> None:
    values = {1: (1.5, math.nan, math.inf), "b": np.array([2.0, np.nan]), "c": {3, 1}, "d": "x"}
    assert to_json(values) == {"1": [1.5, None, None], "b": [2.0, None], "c": [1, 3], "d": "x"}


def test_names_of_figures_are_short_and_differ() -> None:
    used: set[str] = set()
    slugs = [make_slug(name, used) for name in ("x" * 100, "Risk: CHF, %", "risk chf", "%%")]
    assert slugs[0] == "x" * 60
    assert slugs[1] == "risk-chf"
    assert len(set(slugs)) == 4


def test_differences_of_nights_are_minutes_predicted_less_scored() -> None:
    nights = {"a": (["W", "N2", "N2", "REM"], ["W", "W", "N2", "W"]), "b": (["N2"] * 4, ["N2"] * 4)}
    stages = ["W", "N1", "N2", "N3", "REM"]
    scored, predicted = (
        np.array([stages.index(stage) for night in nights.values() for stage in night[side]])
        for side in (0, 1)
    )
    starts = [30.0 * k for k in range(4)]
    index = pl.DataFrame(
        {"recording_id": np.repeat([*nights], 4), "subject_id": np.repeat(["p", "q"], 4)}
    ).with_columns(start=pl.Series(starts * 2))
    options = SimpleNamespace(epoch=30.0, length=30.0)
    rows: Any = SimpleNamespace(index=index, class_names=stages, options=options)
    probabilities = np.full((8, 5), 0.1)
    probabilities[np.arange(8), predicted] = 0.6
    scores = NightScores(nights=2, subjects=2, kappa=MetricValue(), kappa_range=None, endpoints={})
    builder = page.PageBuilder("")
    score_blocks._add_nights(builder, scores, rows, {"target": scored, "prediction": probabilities})
    (figure,) = (block for block in builder.finish("").blocks if isinstance(block, page.Figure))
    assert isinstance(figure.data, page.ScatterPlot)
    (panel,) = (part for part in figure.data.panels if part.name == "total sleep time")
    asleep = np.array(
        [[sum(stage != "W" for stage in side) / 2 for side in night] for night in nights.values()]
    )
    np.testing.assert_allclose(panel.x, asleep.mean(1))
    np.testing.assert_allclose(panel.y, asleep[:, 1] - asleep[:, 0])
