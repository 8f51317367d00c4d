"""Distances, scores and permutations against slow loops and closed forms; a planted shapelet is
found, in noise there is none.
"""

import numpy as np
import pytest
import torch

from bitimely_core import report
from bitimely_core.errors import UserError
from bitimely_core.insight.shapelet_mining import (
    MiningOptions,
    compute_distances,
    count_orders,
    default_lengths,
    draw_windows,
    f_statistic,
    information_gain,
    max_correlation,
    mine_shapelets,
    null_maxima,
    p_value,
    permute_labels,
)
from bitimely_core.insight.shapelets import parse_seconds, read_shapelets, shapelets
from bitimely_core.page import Figure, Table
from bitimely_core.progress import show_progress


class Labelled:
    """Windows of noise of two classes and some subjects; in those of class "b" a wave of a second
    is planted somewhere.
    """

    name, rate, split, task, normalise, fingerprint = (
        "planted",
        20.0,
        "subject",
        "classification",
        "channel",
        "a",
    )
    class_names, notices = ("a", "b"), ()
    wave = np.array([0, 1, 2, 3, 2, 1, 0, -2, -4, -6, -4, -2, 0, 3, 5, 3, 1, 0, -1, 0], np.float32)

    def __init__(
        self,
        n=60,
        length=100,
        subjects=6,
        planted=True,
        channels=1,
        rows=None,
        missing=False,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        self.length, self.channels, self.planted, self.missing = length, channels, planted, missing
        self.channel_names = ("C3", "EOG")[:channels]
        self.labels = np.arange(n) % 2
        self.who = np.array([f"s{k}" for k in (np.arange(n) // 2) % subjects])
        self.of_split = np.where(
            np.isin(self.who, [f"s{subjects - 1}", f"s{subjects - 2}"]), "test", "train"
        )
        self.x = rng.normal(size=(n, length, channels)).astype(np.float32)
        self.at = rng.integers(0, length - 20, n)
        if planted:
            for i in np.flatnonzero(self.labels == 1):
                self.x[i, self.at[i] : self.at[i] + 20, 0] += rng.uniform(1.0, 2.0) * self.wave
        self.rows = np.arange(n) if rows is None else rows

    @property
    def classes(self):
        return len(self.class_names)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, split):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.rows = self.rows[self.of_split[self.rows] == split]
        return other

    def _own(self, rows):
        return self.rows if rows is None else np.asarray(rows)

    def arrays(self, rows=None, draw=None):
        x = self.x[self._own(rows)]
        mask = np.ones(x.shape, bool)
        mask[::5, 3] = False
        return {"values": x, "mask": mask if self.missing else None}

    def read(self, rows=None):
        return tuple(self.arrays(rows).values())

    def targets(self, rows=None):
        return self.labels[self._own(rows)]

    def subjects(self):
        return self.who[self.rows]


# --- distances ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [True, False])
def test_distance_is_that_of_a_double_loop(normalised):
    rng = np.random.default_rng(0)
    series, wanted = rng.normal(size=(3, 40)), rng.normal(size=(4, 9)) * 3 + 1
    series[1, 10:30] = 2.0  # flat stretches
    found, places = compute_distances(
        torch.from_numpy(series), torch.from_numpy(wanted), normalised=normalised
    )

    def z(x):
        if not normalised:
            return x
        return (x - x.mean()) / x.std()

    for c in range(4):
        for i in range(3):
            d = []
            for t in range(40 - 9 + 1):
                stretch = series[i, t : t + 9]
                flat = normalised and stretch.std() < 1e-3 * series[i].std()
                # 2 m: not correlated
                d.append(18.0 if flat else ((z(wanted[c]) - z(stretch)) ** 2).sum())
            assert float(found[c, i]) == pytest.approx(min(d), abs=1e-10)
            assert int(places[c, i]) == int(np.argmin(d))


def test_distance_knows_shape_and_not_loudness():
    wave = torch.sin(torch.arange(30) / 3)
    series = torch.zeros(1, 100)
    series[0, 50:80] = 7 * wave + 3
    d, place = compute_distances(series, wave[None])
    assert float(d) == pytest.approx(0, abs=1e-4)
    assert int(place) == 50


def test_shapes_are_alike_at_another_shift():
    t = np.arange(40) / 4
    wave = np.exp(-((t - 5) ** 2)) * np.sin(4 * t)
    assert max_correlation(wave, 3 * wave + 1) == pytest.approx(1)
    assert max_correlation(wave[2:32], wave[6:40]) > 0.95
    assert max_correlation(np.sin(3 * t), np.sign(t - 5)) < 0.9
    assert max_correlation(np.ones(10), wave) == 0


# --- scores -------------------------------------------------------------------------------------------------------------------------------


def test_f_is_that_of_the_textbook():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 2, 5], [4, 7, 9])  # classes that are missing do not count
    d = rng.normal(size=(6, 20)) + 1e4 + (labels == 2)
    expected = [stats.f_oneway(*(row[labels == c] for c in (0, 2, 5))).statistic for row in d]
    assert f_statistic(torch.from_numpy(d), torch.from_numpy(labels)).numpy() == pytest.approx(
        expected, rel=1e-8
    )
    assert f_statistic(torch.from_numpy(7 * d), torch.from_numpy(labels)).numpy() == pytest.approx(
        expected, rel=1e-8
    )


def test_f_at_its_limits():
    labels = torch.tensor([0, 0, 1, 1])
    f = f_statistic(torch.tensor([[1.0, 1, 2, 2], [3, 3, 3, 3], [1, 2, 1, 2]]), labels)
    assert f.tolist() == [np.inf, 0.0, 0.0]
    assert f_statistic(torch.rand(2, 4), torch.zeros(4, dtype=torch.int64)).isnan().all()


def test_gain_by_hand():
    """Six of one class, two of the other. The best threshold takes one of the two and none of the
    six.
    """
    labels = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0])
    d = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    gain, threshold = information_gain(d, labels)
    h = -(0.25 * np.log2(0.25) + 0.75 * np.log2(0.75))
    right = -(1 / 7 * np.log2(1 / 7) + 6 / 7 * np.log2(6 / 7))
    assert float(gain) == pytest.approx(h - 7 / 8 * right)
    assert float(threshold) == 1.5
    split = information_gain(torch.tensor([[0.0, 9, 8, 7, 0, 9, 8, 7]]), labels)
    assert float(split[0]) == pytest.approx(h)  # all that there is to say
    assert float(split[1]) == 3.5
    none = information_gain(torch.ones(1, 8), labels)
    assert float(none[0]) == 0
    assert none[1].isnan().all()


# --- chance -------------------------------------------------------------------------------------------------------------------------------


def test_what_is_permuted_are_exchangeable_units():
    rng = np.random.default_rng(0)
    who = np.repeat(["a", "b", "c", "d"], [1, 5, 2, 4])
    labels = np.repeat([0, 1, 1, 2], [1, 5, 2, 4])
    for _ in range(20):
        new = permute_labels(labels, who, rng)
        assert sorted(new[[0, 1, 6, 8]]) == [0, 1, 1, 2]
        assert all(len(set(new[who == s])) == 1 for s in "abcd")
    mixed = rng.integers(0, 2, 12)
    new = [permute_labels(mixed, who, rng) for _ in range(20)]
    assert all(
        (np.sort(one[who == s]) == np.sort(mixed[who == s])).all() for one in new for s in "abcd"
    )
    assert len({tuple(one) for one in new}) > 5


def test_few_orders_are_counted():
    who = np.array(["a", "a", "b", "c"])
    # a person a class: their classes in any order
    assert count_orders(np.array([0, 0, 1, 2]), who) == 6
    assert count_orders(np.array([0, 0, 1, 1]), who) == 3
    assert count_orders(np.array([0, 1, 1, 1]), who) == 2  # within "a" alone
    assert count_orders(np.arange(200) % 2, np.zeros(200)) == np.inf
    windows = Labelled(n=20, subjects=4)
    windows.who = np.where(windows.labels == 1, "x", "y")
    windows.of_split = np.full(20, "train")
    page = shapelets(windows, lengths="1", candidates=50, permutations=40)
    assert any("no p below 0.5 is possible" in notice for notice in page.notices)
    assert page.summary["shapelets"][0]["p"] > 0.3
    assert page.facts["Permutations"] == "40, of the classes of subjects"


@pytest.mark.slow
def test_p_is_valid_on_noise_although_the_best_was_chosen():
    """P(p <= a) <= a for labels that mean nothing, after choosing the best of fifty."""
    p = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        d, labels = (
            torch.from_numpy(rng.normal(size=(50, 24))),
            rng.permutation(np.repeat([0, 1, 2], 8)),
        )
        best = float(f_statistic(d, torch.from_numpy(labels)).max())
        p.append(p_value(best, null_maxima(d, labels, np.zeros(24), "f", 99, seed)))
    p = np.array(p)
    for level in (0.1, 0.25, 0.5, 0.75):  # three binomial deviations
        assert abs((p <= level).mean() - level) < 3 * np.sqrt(level * (1 - level) / 120)
    assert p.min() >= 0.01
    assert p_value(2.0, np.array([1.0, 2.0, 3.0])) == 0.75


# --- mining -------------------------------------------------------------------------------------------------------------------------------


def test_a_planted_shapelet_is_found():
    windows = Labelled()
    found = mine_shapelets(windows, MiningOptions(lengths=(1.0,), candidates=400, permutations=99))
    best = found.shapelets[0]
    assert (best.klass, best.channel, best.seconds) == ("b", "C3", 1.0)
    assert windows.labels[best.window] == 1
    assert windows.of_split[best.window] == "train"
    assert abs(best.start - windows.at[best.window]) <= 8  # the wave is faint at its ends
    assert (best.values == windows.x[best.window, best.start : best.start + 20, 0]).all()
    assert best.p == 0.01  # no permutation is as good
    assert best.gain > 0.8
    assert len({one.window for one in found.shapelets}) == len(found.shapelets)
    assert all(
        max_correlation(a.values, b.values) < 0.9
        for k, a in enumerate(found.shapelets)
        for b in found.shapelets[:k]
    )


def test_it_is_found_on_its_channel():
    found = mine_shapelets(
        Labelled(channels=2), MiningOptions(lengths=(1.0,), candidates=600, permutations=0)
    )
    assert found.shapelets[0].channel == "C3"
    other = mine_shapelets(
        Labelled(channels=2),
        MiningOptions(
            lengths=(1.0,), candidates=200, permutations=99, channel="EOG", score="information-gain"
        ),
    )
    assert {one.channel for one in other.shapelets} == {"EOG"}
    assert other.shapelets[0].p > 0.05  # nothing was planted there


def test_windows_are_drawn_from_all_classes_and_subjects():
    windows = Labelled(n=200, subjects=10)
    part = draw_windows(windows, ("train",), 16, 0)
    assert np.bincount(part.labels).tolist() == [8, 8]
    assert len(set(part.subjects)) == 8
    assert set(windows.of_split[part.rows]) == {"train"}
    assert (part.values.numpy() == windows.x[part.rows]).all()
    few = draw_windows(Labelled(n=20), ("train",), 1000, 0)
    assert len(few.rows) == len(Labelled(n=20)["train"])
    complete = draw_windows(Labelled(missing=True), ("train",), 20, 0)
    assert len(complete.rows) == 16  # every fifth one misses a value
    assert draw_windows(windows, ("validation",), 9, 0) is None


def test_page_says_what_was_checked(tmp_path):
    events = []
    windows = Labelled()
    with show_progress(lambda *event: events.append(event)):
        page = shapelets(windows, lengths="0.5,1", candidates=300, permutations=60, count=3)
    assert (
        page.summary
        == shapelets(windows, lengths="0.5,1", candidates=300, permutations=60, count=3).summary
    )
    assert {what for what, *_ in events} == {"distances", "permutations"}
    assert "separates the classes" in page.verdict
    assert "does so again on held-out" in page.verdict
    assert any("Checked on 2 subjects" in notice for notice in page.notices)
    assert any("Mined from 4 subjects" in notice for notice in page.notices)
    held = page.summary["held_out"]
    assert (held["split"], held["windows"], held["subjects"]) == ("test", 20, 2)
    assert held["shapelets"][0]["p"] < 0.05
    names = [block.name for block in page.blocks if isinstance(block, Figure)]
    assert names == ["main-score", "shapelets", "source", "matches", "distances", "chance"]
    assert (
        next(block for block in page.blocks if isinstance(block, Table))
        .rows[0][0]
        .startswith("1: b, ")
    )
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT
    again = read_shapelets(tmp_path)
    assert again[0].values.tolist() == page.summary["shapelets"][0]["values"]
    assert again[0].klass == "b"


def test_noise_is_called_noise():
    page = shapelets(Labelled(planted=False, seed=2), lengths="1", candidates=200, permutations=60)
    assert "does not significantly separate" in page.verdict


def test_without_held_out_windows_it_says_so():
    windows = Labelled()
    windows.of_split = np.full(60, "train")
    page = shapelets(windows, lengths="1", candidates=50, permutations=20)
    assert page.summary["held_out"] is None
    assert any("no held-out windows" in notice for notice in page.notices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "9"}, "half a window"),
        ({"lengths": "1,9"}, "lengths of 9 s"),
        ({"lengths": "x"}, "expected seconds"),
        ({"score": "g"}, "score"),
        ({"channel": "C9"}, "channel"),
        ({"normalise": "min"}, "normalisation"),
    ],
)
def test_unsupported_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        shapelets(Labelled(), **options)


def test_windows_without_classes_are_refused():
    windows = Labelled()
    windows.task = "none"
    with pytest.raises(UserError, match="separate classes"):
        shapelets(windows)
    with pytest.raises(UserError, match="no report"):
        read_shapelets("/nowhere/at/all")
    assert parse_seconds("0.5, 1") == (0.5, 1.0)


def test_raw_distances_keep_their_digits_beside_an_offset_and_drift() -> None:
    rng = np.random.default_rng(0)
    drift = 1000 + np.linspace(0, 50, 400)
    x = torch.from_numpy((rng.normal(size=(4, 400)) + drift).astype(np.float32))
    shapelets = torch.stack([x[0, 40:70], x[2, 300:330] + 0.5])
    # [C, n, T - m + 1]
    exact = (x.double().unfold(1, 30, 1)[None] - shapelets.double()[:, None, None]).square().sum(-1)
    found, places = compute_distances(x, shapelets, normalised=False)
    assert found.dtype == torch.float32
    assert found.numpy() == pytest.approx(exact.amin(-1).numpy(), rel=1e-4, abs=1e-3)
    assert (places == exact.argmin(-1)).all()


@pytest.mark.parity
def test_distances_and_scores_are_those_of_pyts():
    transform = pytest.importorskip(
        "pyts.transformation", reason="pyts is not installed: pip install pyts"
    )
    windows = Labelled(n=20, length=60)
    x = windows.x[:, :, 0].astype(np.float64)
    made = transform.ShapeletTransform(
        n_shapelets=8, criterion="anova", window_sizes=[20], window_steps=[4], remove_similar=False
    )
    theirs = made.fit_transform(x, windows.labels)
    ours, _ = compute_distances(
        torch.from_numpy(x), torch.from_numpy(np.stack(list(made.shapelets_))), normalised=False
    )
    roots = (ours / 20).sqrt()  # they take the root of the mean, and score that
    assert roots.T.numpy() == pytest.approx(theirs, rel=1e-8, abs=1e-6)
    assert f_statistic(roots, torch.from_numpy(windows.labels)).numpy() == pytest.approx(
        made.scores_, rel=1e-6
    )


def test_lengths_that_nobody_chose_fit_the_windows() -> None:
    class Short:
        length, rate = 1500, 4000.0  # EMG: 0.375 s

    assert default_lengths(Labelled()) == (0.5, 1.0, 2.0)  # type: ignore[arg-type]
    assert default_lengths(Short()) == pytest.approx((0.0234375, 0.046875, 0.09375))  # type: ignore[arg-type]
