"""Figures that are written as SVG without matplotlib: lengths, places and marks."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitimely_core.page import (
    BarPlot,
    DensityPlot,
    Figure,
    HeatMap,
    Hypnogram,
    Line,
    LinePlot,
    PointPlot,
    ScatterPanel,
    ScatterPlot,
    StageTrack,
    Trace,
)
from bitimely_core.report import plain_figures
from bitimely_core.report.canvas import MUTED, RULE, SEQUENTIAL, SERIES
from bitimely_core.report.svg import draw_figure

CLASSES = ["W", "N1", "N2", "N3", "R"]


def draw(data):
    return draw_figure(Figure("f", "f", "f", data))[0]


def list_paths(svg, style):
    return [
        e.get("d") for e in svg.iter() if e.tag.endswith("path") and style in e.get("style", "")
    ]


def list_numbers(path):
    return np.array(re.findall(r"-?\d+\.?\d*", path), float)


def find_place(svg, text):
    (element,) = [e for e in svg.iter() if e.text == text]
    return float(element.get("x")), float(element.get("y"))


def test_the_strokes_of_a_hypnogram_are_as_long_as_its_stages():
    stages = np.random.default_rng(0).choice([0, 1, 2, 3, 4, -1], 300)
    svg = draw(Hypnogram(30.0, [StageTrack("night", stages)], CLASSES))
    strokes = [list_numbers(path).reshape(-1, 4) for path in list_paths(svg, "stroke-width:2.6")]
    order = ["W", "R", "N1", "N2", "N3"]
    names = {round(find_place(svg, name)[1] - 2.5): name for name in CLASSES}
    lengths = {
        names[round(ends[0, 1])]: (ends[:, 2] - ends[:, 0]).sum() for ends in strokes if len(ends)
    }
    counts = {name: (stages == k).sum() for k, name in enumerate(CLASSES)}
    first, last = find_place(svg, "0")[0], find_place(svg, "2")[0]
    epoch = (last - first) / 240  # two hours of epochs of 30 s
    for name in CLASSES:
        assert lengths[name] == pytest.approx(counts[name] * epoch, abs=0.05 * counts[name])
    assert sorted(CLASSES, key=lambda name: find_place(svg, name)[1]) == order


def test_the_areas_of_a_hypnodensity_are_the_mean_probabilities():
    values = np.random.default_rng(1).dirichlet(np.ones(5), 200)
    values[50:60] = np.nan
    svg = draw(DensityPlot(30.0, values, CLASSES))
    areas = {}
    for k, name in enumerate(["W", "R", "N1", "N2", "N3"]):
        (path,) = list_paths(svg, f"fill:{SERIES[k]}")
        areas[name] = 0.0
        for part in path.split("z")[:-1]:
            x, y = list_numbers(part).reshape(-1, 2).T
            areas[name] += abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    total = sum(areas.values())
    for k, name in enumerate(CLASSES):
        assert areas[name] / total == pytest.approx(np.nanmean(values[:, k]), abs=2e-3)


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_goes_through_its_points_and_stops_where_it_is_not_known(log):
    x, y = [1.0, 10.0, 100.0, 1000.0], [1.0, 10.0, math.nan, 1000.0]
    svg = draw(LinePlot([Line("", x, y)], logx=log, logy=log))
    (path,) = list_paths(svg, f"stroke:{SERIES[0]};stroke-width:1.3")
    assert path.count("M") == 2
    points = list_numbers(path).reshape(-1, 2)
    scale = np.log10 if log else np.asarray
    seen = scale(np.array([[1.0, 1.0], [10.0, 10.0], [1000.0, 1000.0]]))
    for k in (0, 1):
        share = (seen[1, k] - seen[0, k]) / (seen[2, k] - seen[0, k])
        drawn = (points[1, k] - points[0, k]) / (points[2, k] - points[0, k])
        assert drawn == pytest.approx(share, abs=1e-3)


def test_bars_begin_at_zero_and_their_lengths_are_the_values():
    svg = draw(BarPlot(["a", "b", "c"], [0.2, -0.4, None], [0.1, -0.5, None], [0.3, -0.3, None]))
    bars = list_numbers(list_paths(svg, "stroke-width:9")[0]).reshape(-1, 4)
    zero = list_numbers(list_paths(svg, f"stroke:{MUTED};stroke-width:0.6")[-1])[0]
    assert bars[:, 0] == pytest.approx(zero, abs=0.05)
    assert (bars[0, 2] - zero) / (bars[1, 2] - zero) == pytest.approx(-0.5, abs=1e-3)


def test_cells_have_their_numbers_and_darker_colours_for_larger_ones():
    values = np.arange(9).reshape(3, 3)[::-1] * 111
    svg = draw(
        HeatMap(values, "predicted", "scored", row_names=list("abc"), column_names=list("xyz"))
    )
    cells = [e for e in svg.iter() if e.get("class") == "cells"]
    corners = np.array([list_numbers(cell.get("d"))[:2] for cell in cells])
    assert [cell.get("style") for cell in (cells[6], cells[2])] == [
        f"fill:{SEQUENTIAL[0]}",
        f"fill:{SEQUENTIAL[-1]}",
    ]
    middle = np.array([16, 18.5])
    for value, corner in zip(values.ravel(), corners, strict=True):
        assert find_place(svg, str(value)) == pytest.approx(corner + middle, abs=0.11)
    lightness = [sum(bytes.fromhex(cell.get("style")[-6:])) for cell in cells]
    assert np.array_equal(np.argsort(lightness), np.argsort(-values.ravel()))


def test_points_are_at_their_places_in_the_colour_of_their_group():
    x, y = np.random.default_rng(2).normal(size=(2, 60))
    group = np.arange(60) % 3 - 1
    svg = draw(ScatterPlot([ScatterPanel("p", x, y, group)], ["a", "b"], "x", "y", ticks=True))
    (path,) = list_paths(svg, f"stroke:{MUTED};stroke-width:2.6")
    across = list_numbers(path).reshape(-1, 2, 2)[:, 0, 0]
    assert np.corrcoef(across, x[group == -1])[0, 1] == pytest.approx(1.0, abs=1e-5)
    dots = list_paths(svg, f"stroke:{SERIES[0]};stroke-width:2.6")
    assert dots[0].count("M") == (group == 0).sum()


def test_found_missed_and_extra_points_differ_in_shape_and_stand_at_their_times():
    times, true = np.arange(8) * 1.5 + 3, np.array([0, 1, 1, 2, 0, 1, 2, 0])
    predicted = np.array([0, 1, 0, 2, 1, 1, 2, 0])
    signal = Trace("II", np.sin(np.arange(1400)))
    svg = draw(PointPlot(times, true, predicted, ("N", "V", "S"), signal, 2.5, 100.0))
    paths = {
        mark: "".join(list_paths(svg, style))
        for mark, style in (
            ("found", f"stroke:{SERIES[0]};stroke-width:6.4"),
            ("missed", f"stroke:{SERIES[1]};stroke-width:1.4"),
            ("extra", f"stroke:{SERIES[6]};stroke-width:1.4"),
        )
    }
    in_legend = 1
    assert paths["found"].count("M") == (true == predicted).sum() + in_legend
    assert paths["missed"].count("M") == (true != predicted).sum() + in_legend
    assert paths["extra"].count("M") == 2 * ((true != predicted).sum() + in_legend)  # a cross
    guides = list_paths(svg, f"stroke:{RULE}")[0].split("M")[1:9]
    across = [float(guide.split()[0]) for guide in guides]
    assert np.corrcoef(across, times)[0, 1] == pytest.approx(1.0, abs=1e-6)
    first = float(paths["found"][1:].split()[0])
    assert first == pytest.approx(across[0], abs=0.06)


def test_ticks_are_round_few_and_inside():
    for low, high in [(0, 1), (-0.13, 0.08), (3e-7, 5e-7), (0, 86_400), (1e9, 1e9 + 1), (2, 2.1)]:
        ticks = plain_figures.list_ticks(low, high, 7)
        assert 2 <= len(ticks) <= 7
        assert all(low <= tick.place * (1 + 1e-12) and tick.place <= high for tick in ticks)
        steps = np.diff([tick.place for tick in ticks])
        lead = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-6)
        assert min(abs(lead - step) for step in (1, 2, 2.5, 5)) < 1e-4
    assert all(t.place % 1 == 0 for t in plain_figures.list_ticks(0, 3, 9, is_integer=True))


def test_matplotlib_is_not_imported_for_them():
    code = (
        "import sys; from test_plain_figures import *; draw(BarPlot(['a'], [1.0])); "
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
