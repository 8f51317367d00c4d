"""Neighbours and silhouettes on planted clusters, against scikit-learn and by hand; the page names
no subject.
"""

import numpy as np
import pytest
from planted import Windows, classes, run
from sklearn.metrics import silhouette_score

from bitimely_core import evaluate, report
from bitimely_core.analyses.embedding import (
    chance_agreement,
    compute_silhouettes,
    compute_tsne,
    embedding,
    measure_space,
    nearest_neighbours,
    neighbour_agreement,
    principal_components,
)
from bitimely_core.errors import UserError
from bitimely_core.page import Figure, ScatterPanel, ScatterPlot
from bitimely_core.report.numbers import list_columns
from bitimely_core.report.svg import draw_figure


def clusters(centres, each=20, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [c + spread * rng.normal(size=(each, len(c))) for c in np.asarray(centres, float)]
    )


def test_silhouettes_are_those_of_scikit_learn():
    x = clusters([[0, 0], [1, 0], [0, 3]], spread=0.5)
    group = np.repeat([0, 1, 2], 20)
    assert compute_silhouettes(x, group).mean() == pytest.approx(silhouette_score(x, group))
    some = np.where(np.arange(60) < 15, -1, group)
    assert np.isnan(compute_silhouettes(x, some)[:15]).all()
    assert np.nanmean(compute_silhouettes(x, some)) == pytest.approx(
        silhouette_score(x[15:], group[15:])
    )
    assert np.isnan(compute_silhouettes(x, np.zeros(60, int))).all()


def test_neighbours_by_hand():
    x = np.array([[0.0], [1.0], [2.5], [10.0]])
    everyone = np.ones((4, 4), dtype=bool)
    found = nearest_neighbours(x, 2, everyone)
    assert found.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert neighbour_agreement(found, np.array([0, 0, 1, -1])) == pytest.approx(
        [0.5, 0.5, 0, np.nan], nan_ok=True
    )
    others = np.array([0, 0, 0, 1])[:, None] != np.array([0, 0, 0, 1])
    assert nearest_neighbours(x, 2, others).tolist() == [[3, -1], [3, -1], [3, -1], [2, 1]]
    assert neighbour_agreement(
        nearest_neighbours(x, 2, others), np.array([1, 0, 1, 1])
    ) == pytest.approx([1, 0, 1, 0.5])


def test_chance_is_the_share_among_the_others():
    group = np.array([0, 0, 0, 1])
    assert chance_agreement(group, np.ones((4, 4), dtype=bool)) == pytest.approx(
        [2 / 3, 2 / 3, 2 / 3, 0]
    )


def test_a_space_of_labels_and_a_space_of_persons():
    label, person = np.tile([0, 1], 40), np.repeat(np.arange(8), 10)
    by_label = clusters(np.zeros((80, 3)), each=1, seed=1) + 5 * label[:, None]
    corners = np.random.default_rng(5).normal(size=(8, 3))
    by_person = clusters(np.zeros((80, 3)), each=1, seed=2) + 5 * corners[person]
    knows = measure_space(by_label, label, person, 8, 5, 200)
    assert knows.label_agreement.value == 1.0
    assert knows.label_silhouette.value > 0.8 > 0 > knows.subject_silhouette.value
    assert knows.subject_agreement.value < 0.3
    remembers = measure_space(by_person, label, person, 8, 5, 200)
    assert remembers.subject_agreement.value > 0.99
    assert remembers.subject_silhouette.value > 0.6
    # neighbours of other persons tell nothing
    assert remembers.label_agreement.value == pytest.approx(0.5, abs=0.15)
    assert remembers.label_chance.value == pytest.approx(0.5)
    assert knows.label_agreement.lo is not None


def test_of_a_rare_label_those_that_have_it_are_counted():
    x = clusters([[0, 0]], each=50)
    label = np.zeros(50, int)
    label[:5] = 1
    found = measure_space(x, label, np.arange(50), 50, 5, 50, label == 1)
    assert found.label_chance.value == pytest.approx(4 / 49)
    assert found.label_agreement.value < 0.4
    assert measure_space(x, label, np.arange(50), 50, 5, 50).label_agreement.value > 0.7


def test_one_sequence_a_subject_says_nothing_about_persons():
    found = measure_space(
        clusters([[0, 0], [5, 5]]), np.repeat([0, 1], 20), np.arange(40), 40, 5, 50
    )
    assert found.subject_agreement.value is None
    assert found.subject_silhouette.value is None
    assert found.label_agreement.value == 1.0


def test_intervals_are_over_subjects():
    units = np.repeat(np.arange(6), 4)
    values = units / 5.0
    wide, point = (
        evaluate.average_over_units(values, units, 6),
        evaluate.average_over_units(np.full(24, 0.3), units, 6),
    )
    assert wide.value == pytest.approx(0.5)
    assert wide.se == pytest.approx(np.std(np.arange(6) / 5, ddof=1) / np.sqrt(6))
    assert (point.value, point.lo, point.undefined_reason) == (
        pytest.approx(0.3),
        None,
        "no CI: all units are alike",
    )
    assert evaluate.average_over_units(values[:8], units[:8], 2).lo is None


def test_principal_components_keep_the_largest_variance():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)) * [5, 3, 1, 0.1]
    flat, share = principal_components(x, 2)
    centred = x - x.mean(0)
    assert flat.var(0) == pytest.approx(np.linalg.eigvalsh(centred.T @ centred / 50)[::-1][:2])
    assert share == pytest.approx(
        np.linalg.eigvalsh(centred.T @ centred)[::-1][:2] / (centred**2).sum()
    )
    assert principal_components(np.ones((5, 1)), 2)[0].shape == (5, 2)


def test_tsne_repeats_itself_and_is_left_out_of_few_rows():
    x = clusters([[0, 0, 0], [9, 9, 9]], each=15)
    first, second = compute_tsne(x, 5, 0), compute_tsne(x, 5, 0)
    assert np.array_equal(first, second)
    assert silhouette_score(first, np.repeat([0, 1], 15)) > 0.5
    assert compute_tsne(x[:5], 5, 0) is None


@pytest.mark.slow
def test_page_tells_the_label_from_the_person(tmp_path):
    windows = classes(n_subjects=20, length=12, spread=0.05)
    windows.values[:, 1:4] = 0.0
    page = embedding([run(windows)], bootstrap=100, neighbours=5)
    own = page.summary["spaces"]["trained"]
    assert own["label_agreement"]["value"] == 1.0
    assert (
        own["label_agreement"]["value"] > page.summary["spaces"]["raw"]["label_agreement"]["value"]
    )
    assert "labels more than subjects" in page.verdict
    names = [b.name for b in page.blocks if isinstance(b, Figure)]
    assert names == ["main-score", "pca-labels", "tsne-labels", "tsne-subjects"]
    written = report.write_report(tmp_path, page)
    assert written.stat().st_size < report.LIMIT
    assert not any(
        name in (tmp_path / file).read_text()
        for name in ("p-1", "r-1")
        for file in ("report.html", "summary.json")
    )
    assert embedding([run(windows)], bootstrap=100, neighbours=5).summary == page.summary


def test_points_of_a_scatter_land_in_its_data():
    figure = Figure(
        name="s",
        title="t",
        caption="c",
        data=ScatterPlot(
            panels=[
                ScatterPanel(name="a", x=[0, 1], y=[2, 3], group=[0, -1]),
                ScatterPanel(name="<b>", x=[5], y=[6], group=[1]),
            ],
            groups=["W", "$N1$"],
        ),
    )
    found = list_columns(figure.data)
    assert found["panel"].tolist() == ["a", "a", "<b>"]
    assert found["x"].tolist() == [0, 1, 5]
    assert found["group"].tolist() == ["W", "", "$N1$"]
    svg, _ = draw_figure(figure)
    words = "".join(svg.itertext())
    assert "<b>" in words
    assert "$N1$" in words
    empty = Figure(name="e", title="t", caption="c", data=ScatterPlot(panels=[], groups=[]))
    draw_figure(empty)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_other_labels(task):
    base = classes(n_subjects=16)
    rng = np.random.default_rng(0)
    target = (
        np.stack([base.target, rng.integers(0, 2, len(base.target)) * 1.0], 1).astype(np.float32)
        if task == "multilabel"
        else base.values[:, 0, 0]
    )
    windows = Windows(
        base.values, target, base.of, task, ("CHF", "COPD") if task == "multilabel" else ()
    )
    page = embedding([run(windows)], bootstrap=20, label="CHF" if task == "multilabel" else "")
    assert page.summary["label"] == ("CHF" if task == "multilabel" else "thirds of the target")
    # chance: 1/2, 1/3
    assert page.summary["spaces"]["trained"]["label_agreement"]["value"] > (
        0.6 if task == "multilabel" else 0.45
    )
    if task == "multilabel":
        with pytest.raises(UserError, match="CHF"):
            embedding([run(windows)], label="CHD")


def test_unsupported_options_are_refused():
    one = run(classes())
    with pytest.raises(UserError, match="sos"):
        embedding([one], readout="soss")
    with pytest.raises(UserError, match="1 to 2"):
        embedding([one], layers="3")
    for options in ({"neighbours": 1000}, {"perplexity": 1000.0}, {"perplexity": 0.0}):
        with pytest.raises(UserError, match="at most") as refused:
            embedding([one], **options)
        assert refused.value.field == f"--{next(iter(options))}"


def test_of_few_rows_all_others_are_neighbours():
    page = embedding([run(classes())], bootstrap=10, sequences=5)
    assert page.summary["neighbours"] == 4
    assert page.facts["Neighbours"] == "4"
