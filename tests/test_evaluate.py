"""Metrics against scikit-learn and against their definitions; undefined cases; intervals over
subjects; pairing.
"""

import json
import time
import warnings

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize
from sklearn import metrics as sk

from bitimely_core import evaluate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.evaluate import (
    Predictions,
    compare,
    draw_counts,
    length_baseline,
    parse_predictions,
    score,
    score_figure,
    to_probabilities,
)
from bitimely_core.evaluate.metrics import ESTIMATORS, check_rows, estimate_ranking, weigh_units
from bitimely_core.schemas.scores import ClassCounts


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cohort(seed, n=200, k=4, subjects=20, levels=None):
    """Targets, probabilities (of few levels where ties are wanted) and subjects that depend on each
    other.
    """
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, subjects, n)
    target = rng.integers(0, k, n)
    logits = (
        rng.normal(size=(n, k))
        + 1.2 * np.eye(k)[target]
        + rng.normal(size=(subjects, k))[groups] * 0.5
    )
    p = softmax(logits)
    if levels:
        p = np.round(p * levels) + 1e-3
        p = p / p.sum(1, keepdims=True)
    return target, p, groups


NAMES = ("W", "N1", "N2", "N3", "R")


def values(scores):
    return {name: m.value for name, m in scores.metrics.items()}


# --- against oracles ----------------------------------------------------------------------------------------------------------------------


def auroc_by_pairs(score_, positive):
    """All pairs, ties one half."""
    d = score_[positive][:, None] - score_[~positive][None, :]
    return ((d > 0).sum() + 0.5 * (d == 0).sum()) / d.size


def ap_by_thresholds(score_, positive):
    """Sum over thresholds of precision times the recall added."""
    total, before = 0.0, 0.0
    for threshold in np.unique(score_)[::-1]:
        predicted = score_ >= threshold
        recall = (predicted & positive).sum() / positive.sum()
        total += (recall - before) * (predicted & positive).sum() / predicted.sum()
        before = recall
    return total


@pytest.mark.slow
@pytest.mark.parametrize("levels", [None, 4])
def test_many_random_cases_against_scikit_learn(levels):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        k = int(rng.integers(2, 5))
        y, p, g = cohort(seed, n=int(rng.integers(25, 90)), k=k, levels=levels)
        if len(np.unique(y)) < k:
            continue
        predicted, got = (
            p.argmax(1),
            values(score("classification", y, p, g, class_names=NAMES[:k], bootstrap=0)),
        )
        columns = range(k) if k > 2 else [1]
        want = {
            "accuracy": sk.accuracy_score(y, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
            "macro_f1": sk.f1_score(y, predicted, average="macro"),
            "kappa": sk.cohen_kappa_score(y, predicted),
            "auroc": np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in columns]),
            "auprc": np.mean([sk.average_precision_score(y == c, p[:, c]) for c in columns]),
        }
        assert got == pytest.approx(want, abs=1e-12)


def test_rank_metrics_are_their_definitions_under_ties():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(5, 60))
        s, positive = rng.integers(0, 6, n) / 5.0, rng.random(n) < 0.4
        if positive.all() or not positive.any():
            continue
        auroc, ap = estimate_ranking(s, positive, np.arange(n), n, weigh_units(np.ones(n), n))
        assert auroc.value == pytest.approx(auroc_by_pairs(s, positive), abs=1e-12)
        assert ap.value == pytest.approx(ap_by_thresholds(s, positive), abs=1e-12)


@pytest.mark.slow
def test_labels_and_values_against_scikit_learn():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        y = (rng.random((80, 3)) < [0.5, 0.2, 0.35]).astype(int)
        p = np.round(1 / (1 + np.exp(-rng.normal(size=(80, 3)) - y)), 1 + seed % 3)
        g = rng.integers(0, 12, 80)
        got = values(score("multilabel", y, p, g, class_names=("CHF", "COPD", "DM"), bootstrap=0))
        want = {
            "auprc": sk.average_precision_score(y, p),
            "auroc": sk.roc_auc_score(y, p),
            "auprc_micro": sk.average_precision_score(y, p, average="micro"),
            "macro_f1": sk.f1_score(y, p >= 0.5, average="macro"),
            "accuracy": (y == (p >= 0.5)).mean(),
        }
        assert got == pytest.approx(want, abs=1e-12)
        t, x = rng.normal(size=50), rng.normal(size=50)
        got = values(score("regression", t, x, np.arange(50) % 7, bootstrap=0))
        assert got == pytest.approx(
            {"mae": np.abs(t - x).mean(), "rmse": np.sqrt(((t - x) ** 2).mean())}, abs=1e-12
        )


def test_missing_labels_are_left_out_of_every_metric():
    rng = np.random.default_rng(5)
    target = (rng.random((300, 3)) < 0.3).astype(float)
    prediction = np.clip(0.3 * target + rng.random((300, 3)) * 0.7, 0, 1)
    target[rng.random((300, 3)) < 0.2] = np.nan
    scores = score(
        "multilabel",
        target,
        prediction,
        np.arange(300),
        class_names=("a", "b", "c"),
        train_target=target,
        bootstrap=50,
    )
    known = np.isfinite(target)
    each = [
        sk.average_precision_score(target[known[:, k], k], prediction[known[:, k], k])
        for k in range(3)
    ]
    assert values(scores)["auprc"] == pytest.approx(np.mean(each))
    assert values(scores)["auprc_micro"] == pytest.approx(
        sk.average_precision_score(target[known], prediction[known])
    )
    assert values(scores)["accuracy"] == pytest.approx(
        ((prediction >= 0.5) == (target == 1))[known].mean()
    )
    for k, name in enumerate("abc"):
        entry = scores.by_class[name]
        assert entry.base_rate == pytest.approx(np.nanmean(target[:, k]))
        assert entry.unknown == (~known[:, k]).sum()
        assert entry.auroc.value == pytest.approx(
            sk.roc_auc_score(target[known[:, k], k], prediction[known[:, k], k])
        )
    lengths = rng.integers(1, 200, 300)
    assert np.isfinite(length_baseline("multilabel", lengths, target, lengths)).all()
    first, second = (
        Predictions(np.arange(300), target, p, np.arange(300)) for p in (prediction, 1 - prediction)
    )
    assert (
        compare("multilabel", first, second, class_names=("a", "b", "c"), bootstrap=50)
        .metrics["auprc"]
        .difference
        > 0
    )


def test_classes_one_by_one():
    y, p, g = cohort(3, k=5)
    scores = score("classification", y, p, g, class_names=NAMES, bootstrap=50)
    precision, recall, f1, support = sk.precision_recall_fscore_support(y, p.argmax(1))
    for k, name in enumerate(NAMES):
        entry = scores.by_class[name]
        assert entry.support == support[k]
        assert entry.base_rate == pytest.approx((y == k).mean())
        assert entry.subjects == len(set(g[y == k]))
        assert entry.precision.value == pytest.approx(precision[k], abs=1e-12)
        assert entry.recall.value == pytest.approx(recall[k], abs=1e-12)
        assert entry.f1.value == pytest.approx(f1[k], abs=1e-12)
        assert entry.auroc.value == pytest.approx(auroc_by_pairs(p[:, k], y == k), abs=1e-12)
    assert scores.confusion == sk.confusion_matrix(y, p.argmax(1)).tolist()


# --- intervals ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [None, 5])
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_influences_are_derivatives_with_respect_to_the_weights_of_the_subjects(task, levels):
    """A weight of (m + 1) / m is m copies of all rows and one more of the subject's: central
    differences of the scores.
    """
    y, p, g = cohort(7, n=60, k=3, subjects=8, levels=levels)
    names, m = NAMES[:3], 40
    if task == "multilabel":
        y = np.eye(3, dtype=int)[y]
    if task == "regression":
        y, p, names = p[:, 0], p[:, 1], ()
    rows = check_rows(task, y, {"run": p}, g, names, "subject")
    found = ESTIMATORS[task](rows, rows.predictions["run"], None)

    def repeat(subject, copies):
        at = np.repeat(np.arange(60), np.where(rows.units == subject, copies, m))
        again = check_rows(
            task,
            rows.target[at],
            {"run": rows.predictions["run"][at]},
            rows.groups[at],
            names,
            "subject",
        )
        return ESTIMATORS[task](again, again.predictions["run"], None)

    for subject in range(8):
        up, down = repeat(subject, m + 1), repeat(subject, m - 1)
        for name, one in found.metrics.items():
            slope = (up.metrics[name].value - down.metrics[name].value) * m / 2
            assert one.influence[subject] == pytest.approx(slope, abs=2e-4), name
        for name, each in found.each.items():
            for k, one in enumerate(each):
                if np.isfinite(one.value):
                    slope = (up.each[name][k].value - down.each[name][k].value) * m / 2
                    assert one.influence[subject] == pytest.approx(slope, abs=5e-4), name
    assert all(abs(one.influence.sum()) < 1e-12 for one in found.metrics.values())


@pytest.mark.parametrize(("subjects", "lowest"), [(10, 0.025 ** (1 / 10)), (5, 0.025 ** (1 / 5))])
def test_all_right_has_the_exact_interval_of_as_many_trials_as_subjects(subjects, lowest):
    y, g = np.tile([0, 1], 10 * subjects), np.repeat(np.arange(subjects), 20)
    found = score(
        "classification", y, np.eye(2)[y] * 0.98 + 0.01, g, class_names=("no", "yes")
    ).metrics
    assert (found["accuracy"].lo, found["accuracy"].hi) == pytest.approx((lowest, 1.0))
    assert found["auroc"].lo == pytest.approx(lowest)
    assert found["kappa"].lo == pytest.approx(2 * lowest - 1)
    wrong = score(
        "classification", y, np.eye(2)[1 - y] * 0.98 + 0.01, g, class_names=("no", "yes")
    ).metrics["accuracy"]
    assert (wrong.lo, wrong.hi) == pytest.approx((0.0, 1 - lowest))
    perfect = score("regression", y.astype(float), y.astype(float), g).metrics["mae"]
    assert (perfect.value, perfect.lo, perfect.undefined_reason) == (
        0.0,
        None,
        "no CI: no row has an error",
    )


@pytest.mark.slow
def test_no_interval_is_without_width():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, subjects = int(rng.integers(10, 60)), int(rng.integers(5, 12))
        y = rng.integers(0, 3, n)
        p = softmax(
            rng.choice([0.0, 1.0, 9.0]) * np.eye(3)[y]
            + rng.choice([0.0, 1.0]) * rng.normal(size=(n, 3))
        )
        scores = score(
            "classification",
            y,
            p,
            rng.integers(0, subjects, n),
            class_names=NAMES[:3],
            train_target=y,
        )
        every = [
            *scores.metrics.values(),
            *(m for one in scores.baselines.values() for m in one.metrics.values()),
        ]
        every += [m.difference for one in scores.baselines.values() for m in one.metrics.values()]
        for one in every:
            assert (one.lo is None) == (one.hi is None)
            assert one.se is None or one.se > 0
            assert one.lo is not None or one.undefined_reason
            assert one.lo is None or one.hi - one.lo > 1e-9


def test_draws_are_of_subjects_and_reproducible():
    counts = draw_counts(range(400), 9, seed=5)
    assert (counts.sum(1) == 9).all()
    assert counts.mean() == pytest.approx(1.0)
    # whatever else is drawn
    assert np.array_equal(counts[100:110], draw_counts(range(100, 110), 9, seed=5))
    assert not np.array_equal(counts, draw_counts(range(400), 9, seed=6))


def test_standard_error_of_a_mean_is_the_analytic_one():
    """Equal clusters: the standard error is that of the mean of subject means."""
    rng = np.random.default_rng(0)
    subject = rng.normal(size=40)
    t = np.zeros(400)
    x = np.abs(np.repeat(subject, 10)) + 0.01 * rng.random(400)
    g = np.repeat(np.arange(40), 10)
    m = score("regression", t, x, g).metrics["mae"]
    means = x.reshape(40, 10).mean(1)
    assert m.se == pytest.approx(means.std(ddof=1) / np.sqrt(40))
    reach = stats.t.isf(0.025, 39) * m.se / m.value
    assert (m.lo, m.hi) == pytest.approx((m.value * np.exp(-reach), m.value * np.exp(reach)))
    by_window = score("regression", t, x, g, by="window")
    # ten windows of one subject are not ten observations
    assert by_window.metrics["mae"].se < 0.5 * m.se
    assert by_window.intervals.by == "window"
    assert "windows, not subjects" in by_window.remarks[0]


@pytest.mark.parametrize("by", ["subject", "window"])
def test_order_of_rows_is_immaterial(by):
    y, p, g = cohort(11, k=4, levels=6)
    subjects = np.array([f"s{i}" for i in g], dtype=object)
    first = score(
        "classification", y, p, subjects, class_names=NAMES[:4], train_target=y, bootstrap=60, by=by
    )
    order = np.random.default_rng(1).permutation(len(y))
    again = score(
        "classification",
        y[order],
        p[order],
        subjects[order],
        class_names=NAMES[:4],
        train_target=y,
        bootstrap=60,
        by=by,
    )
    assert first.model_dump_json() == again.model_dump_json()  # not one digit differs


def test_twenty_thousand_rows_take_a_second():
    y, p, g = cohort(0, n=20_000, k=2, subjects=200)
    start = time.process_time()
    m = score("classification", y, p, g, class_names=("no", "yes"), bootstrap=1000).metrics["auroc"]
    assert time.process_time() - start < 10
    assert m.lo < m.value < m.hi
    assert m.n_defined == 200


@pytest.mark.slow
def test_intervals_cover():
    """AUROC 0.75, n = 200, 30 % positives: the 95 % interval holds the truth in 92 to 97 % of 400
    data sets.
    """
    rng = np.random.default_rng(4)
    inside = 0
    for _ in range(400):
        positive = rng.random(200) < 0.3
        # the normal quantile of 0.75
        s = rng.normal(size=200) + positive * np.sqrt(2) * 0.6744897501960817
        p = 1 / (1 + np.exp(-s))
        m = score(
            "classification",
            positive.astype(int),
            np.stack([1 - p, p], 1),
            np.arange(200),
            class_names=("no", "yes"),
        )
        inside += m.metrics["auroc"].lo <= 0.75 <= m.metrics["auroc"].hi
    assert 0.92 <= inside / 400 <= 0.97


# --- undefined ----------------------------------------------------------------------------------------------------------------------------


def test_an_absent_class_is_excluded_with_a_remark():
    y, p, g = cohort(2, k=4)
    y[y == 3] = 2
    scores = score("classification", y, p, g, class_names=NAMES[:4], bootstrap=40)
    assert scores.metrics["auroc"].classes == ClassCounts(defined=3, of=4)
    assert scores.by_class["N3"].auroc.value is None
    assert scores.by_class["N3"].recall.undefined_reason == "no row is of class N3"
    assert scores.metrics["balanced_accuracy"].value == pytest.approx(
        np.mean([(p[y == c].argmax(1) == c).mean() for c in range(3)])
    )
    assert any("N3" in n for n in scores.remarks)


@pytest.mark.parametrize("only", [0, 1])
def test_a_single_class_defines_accuracy_alone(only):
    """scikit-learn gives AUPRC 0.0 or 1.0 and a balanced accuracy here."""
    _, p, g = cohort(5, k=2)
    scores = score(
        "classification", np.full(200, only), p, g, class_names=("no", "yes"), bootstrap=20
    )
    for name in ("auroc", "auprc", "balanced_accuracy", "macro_f1", "kappa"):
        m = scores.metrics[name]
        assert (m.value, m.se, m.lo, m.hi, m.n_defined) == (None, None, None, None, 0), name
        assert "of one class (" in m.undefined_reason
    assert scores.metrics["accuracy"].lo is not None
    labels = score(
        "multilabel", np.full((200, 1), only), p[:, :1], g, class_names=("CHF",), bootstrap=20
    )
    assert labels.metrics["auprc"].value is None


def test_few_positives_give_a_value_without_an_interval():
    rng = np.random.default_rng(0)
    for positives in (1, 3):
        y = np.zeros(40, dtype=int)
        y[:positives] = 1
        p = rng.random(40)
        scores = score(
            "classification",
            y,
            np.stack([1 - p, p], 1),
            np.arange(40),
            class_names=("no", "yes"),
            bootstrap=50,
        )
        m = scores.metrics["auroc"]
        assert m.value == pytest.approx(auroc_by_pairs(p, y == 1))
        assert (m.lo, m.hi, m.se) == (None, None, None)
        assert f"{positives} row" in m.undefined_reason
        assert scores.metrics["accuracy"].lo is not None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_the_rarest_class_decides_whether_there_is_an_interval(order):
    sizes = np.array([3, 10, 17])[list(order)]
    y = np.repeat(np.arange(3), sizes)
    p = softmax(np.random.default_rng(0).normal(size=(30, 3)))
    found = score("classification", y, p, np.arange(30), class_names=("a", "b", "c"), bootstrap=200)
    m = found.metrics["auroc"]
    assert m.value is not None
    assert (m.lo, m.hi, m.se) == (None, None, None)
    assert f"3 rows of class {'abc'[sizes.argmin()]}" in m.undefined_reason
    assert found.metrics["accuracy"].lo is not None


def test_a_class_of_one_subject_gives_no_interval():
    g = np.repeat(np.arange(10), 20)
    y = (g == 0).astype(int)
    p = np.random.default_rng(0).random(200)
    m = score("classification", y, np.stack([1 - p, p], 1), g, class_names=("no", "yes")).metrics[
        "auroc"
    ]
    assert m.value == pytest.approx(auroc_by_pairs(p, y == 1))
    assert m.lo is None
    assert "1 subject of class yes, at least 2" in m.undefined_reason


def test_one_dominant_subject_gives_no_interval():
    g = np.r_[np.zeros(10_000, int), np.repeat(np.arange(1, 9), 5)]
    y, x = np.zeros(len(g)), np.random.default_rng(0).normal(size=len(g))
    m = score("regression", y, x, g).metrics["mae"]
    assert m.lo is None
    assert "effectively 1.01 units" in m.undefined_reason


@pytest.mark.parametrize(("subjects", "words"), [(1, "one subject"), (4, "4 subjects")])
def test_too_few_subjects_give_no_interval(subjects, words):
    y, p, g = cohort(1, k=3)
    scores = score("classification", y, p, g % subjects, class_names=NAMES[:3], bootstrap=30)
    for m in scores.metrics.values():
        assert m.value is not None
        assert m.lo is None
        assert words in m.undefined_reason
    assert any(words in n for n in scores.remarks)


def test_an_empty_split_is_null_with_the_reason():
    scores = score("classification", [], np.empty((0, 3)), [], class_names=NAMES[:3])
    assert all(m.value is None and "no rows" in m.undefined_reason for m in scores.metrics.values())
    assert scores.n == 0
    json.dumps(scores.model_dump(), allow_nan=False)


def test_one_subject_per_class_gives_a_remark():
    g = np.repeat([0, 1, 2], 30)
    p = softmax(np.random.default_rng(0).normal(size=(90, 3)))
    assert any(
        "Each class comes from one subject" in n
        for n in score("classification", g, p, g, class_names=NAMES[:3], bootstrap=0).remarks
    )


def test_non_finite_scores_are_refused_and_counted():
    y, p, g = cohort(1, k=3)
    p[[4, 9], 1] = np.nan
    with pytest.raises(UserError) as caught:
        score("classification", y, p, g, class_names=NAMES[:3])
    assert caught.value.code == Reason.NON_FINITE
    assert "2 of 200" in str(caught.value)
    with pytest.raises(UserError):
        score("regression", np.ones(5), np.array([1, 2, np.inf, 1, 1]), np.arange(5))


def test_logits_instead_of_probabilities_are_refused():
    y, _, g = cohort(1, k=3)
    with pytest.raises(ValueError, match="probabilities"):
        score(
            "classification",
            y,
            np.random.default_rng(0).normal(size=(200, 3)),
            g,
            class_names=NAMES[:3],
        )
    assert to_probabilities("classification", [[1e4, 0.0], [0.0, 0.0]]) == pytest.approx(
        np.array([[1, 0], [0.5, 0.5]])
    )
    assert to_probabilities("multilabel", [[-1e4, 0.0, 2.0]]) == pytest.approx(
        np.array([[0, 0.5, 1 / (1 + np.exp(-2))]])
    )
    assert to_probabilities("regression", np.ones((4, 1))).shape == (4,)


def test_every_number_is_json_without_nan():
    y, p, g = cohort(2, k=3)
    json.dumps(
        score(
            "classification", y, p, g, class_names=NAMES[:3], train_target=y, bootstrap=20
        ).model_dump(),
        allow_nan=False,
    )


# --- baselines ----------------------------------------------------------------------------------------------------------------------------


def test_baselines_come_from_the_training_targets():
    y, p, g = cohort(4, k=3)
    train = np.array([2] * 60 + [0] * 30 + [1] * 10)
    scores = score(
        "classification", y, p, g, class_names=NAMES[:3], train_target=train, bootstrap=100
    )
    majority, prior = (scores.baselines[name].metrics for name in ("majority", "prior"))
    assert majority["accuracy"].value == pytest.approx((y == 2).mean())
    assert majority["balanced_accuracy"].value == pytest.approx(1 / 3)
    assert [repr(one["kappa"].value) for one in (majority, prior)] == ["0.0", "0.0"], (
        "agreement by chance, not rounding"
    )
    assert majority["auroc"].value == pytest.approx(0.5)
    rates = np.array([0.3, 0.1, 0.6])
    assert prior["accuracy"].value == pytest.approx(rates[y].mean())  # expected value of guessing
    gain = majority["accuracy"].difference
    assert gain.difference == pytest.approx(scores.metrics["accuracy"].value - (y == 2).mean())
    assert gain.lo < gain.difference < gain.hi
    assert (gain.p < 0.05) == (gain.lo > 0 or gain.hi < 0)
    assert score("classification", y, p, g, class_names=NAMES[:3], bootstrap=0).baselines == {}


def test_baselines_of_labels_and_values():
    rng = np.random.default_rng(0)
    y, p, g = (rng.random((100, 2)) < [0.2, 0.6]).astype(int), rng.random((100, 2)), np.arange(100)
    labels = score(
        "multilabel", y, p, g, class_names=("CHF", "DM"), train_target=y, bootstrap=0
    ).baselines
    assert labels["prior"].metrics["auprc"].value == pytest.approx(y.mean())  # base rates
    assert labels["prior"].metrics["auroc"].value == pytest.approx(0.5)
    for k, name in enumerate(("CHF", "DM")):
        assert labels["prior"].by_class[name]["auprc"].value == pytest.approx(y[:, k].mean())
    t = rng.normal(size=100)
    numbers = score(
        "regression", t, np.zeros(100), g, train_target=np.array([1.0, 1.0, 4.0]), bootstrap=0
    ).baselines
    assert numbers["mean"].metrics["mae"].value == pytest.approx(np.abs(t - 2).mean())
    assert numbers["median"].metrics["rmse"].value == pytest.approx(np.sqrt(((t - 1) ** 2).mean()))


def test_length_baseline_predicts_labels_that_depend_on_length():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    length = rng.poisson(20 + 30 * y) + 1
    p = length_baseline("classification", length[:200], y[:200], length[200:])
    extra = {"length_only": p}
    flat, names = np.full((200, 2), 0.5), ("no", "yes")
    scores = score(
        "classification",
        y[200:],
        flat,
        np.arange(200),
        class_names=names,
        baselines=extra,
        bootstrap=30,
    )
    assert scores.baselines["length_only"].metrics["auroc"].value > 0.95
    assert scores.baselines["length_only"].metrics["auroc"].difference.hi < 0
    both = length_baseline(
        "multilabel", length[:200], np.stack([y[:200], np.ones(200, int)], 1), length[200:]
    )
    assert both.shape == (200, 2)
    assert (both[:, 1] == 1).all()
    assert (
        np.corrcoef(
            length_baseline("regression", length[:200], length[:200] * 2.0, length[200:]),
            length[200:],
        )[0, 1]
        > 0.99
    )


def test_length_baseline_is_a_penalised_regression_on_the_logarithm_of_the_length_and_its_square():
    """Against the fits that are written out, on other lengths than those of training; labels that
    are not known have no part in it.
    """
    rng = np.random.default_rng(1)
    length, new = rng.integers(1, 400, 150), np.array([3, 30, 900])
    z, at = (
        (np.log(1 + v) - np.log(1 + length).mean()) / np.log(1 + length).std()
        for v in (length, new)
    )
    x, points = (np.stack([np.ones(len(v)), v, v**2], 1) for v in (z, at))
    curve = 2 - 3 * np.log(1 + length) + 0.5 * np.log(1 + length) ** 2
    wanted = 2 - 3 * np.log(1 + new) + 0.5 * np.log(1 + new) ** 2
    assert length_baseline("regression", length, curve, new) == pytest.approx(wanted, abs=1e-3)

    def fit(x, y):  # unit penalty on all but the intercept
        loss = lambda w: np.logaddexp(0, (1 - 2 * y) * (x @ w)).sum() + (w[1:] ** 2).sum() / 2  # noqa: E731
        return 1 / (1 + np.exp(-points @ minimize(loss, np.zeros(3), tol=1e-10).x))

    y = (rng.random(150) < 1 / (1 + np.exp(-z - 0.5 * z**2))).astype(int)
    found = length_baseline("classification", length, y, new)
    assert found == pytest.approx(np.stack([1 - fit(x, y), fit(x, y)], 1), abs=1e-3)
    assert length_baseline("classification", length, y, new[:1]) == pytest.approx(found[:1])
    partly = np.stack([y, np.where(z > 0, y, np.nan)], 1)
    assert length_baseline("multilabel", length, partly, new) == pytest.approx(
        np.stack([fit(x, y), fit(x[z > 0], y[z > 0])], 1), abs=1e-3
    )


# --- pairing ------------------------------------------------------------------------------------------------------------------------------


def pair(seed=0, k=3):
    y, p, g = cohort(seed, k=k)
    q = softmax(np.log(p) + 0.3 * np.random.default_rng(seed + 1).normal(size=p.shape))
    ids = np.arange(len(y))
    return Predictions(ids, y, p, g), Predictions(ids, y, q, g)


def test_pairs_are_compared_subject_by_subject():
    first, second = pair()
    result = compare("classification", first, second, class_names=NAMES[:3])
    d = result.metrics["accuracy"]
    assert d.difference == pytest.approx(d.first - d.second)
    a = score("classification", *first[1:], class_names=NAMES[:3]).metrics["accuracy"]
    b = score("classification", *second[1:], class_names=NAMES[:3]).metrics["accuracy"]
    assert d.se < np.hypot(a.se, b.se)  # what both have in common cancels
    back = compare("classification", second, first, class_names=NAMES[:3]).metrics["accuracy"]
    assert (back.difference, back.se, back.p) == pytest.approx((-d.difference, d.se, d.p))
    same = compare("classification", first, first, class_names=NAMES[:3]).metrics
    assert all(
        m.difference == 0 and m.lo is None and "identical" in m.undefined_reason
        for m in same.values()
    )


def test_the_difference_of_equal_subjects_is_the_t_test_of_their_means():
    rng = np.random.default_rng(0)
    g, t = np.repeat(np.arange(12), 25), np.zeros(300)
    x, z = rng.gamma(2, size=300), rng.gamma(2.2, size=300)
    d = compare(
        "regression", Predictions(np.arange(300), t, x, g), Predictions(np.arange(300), t, z, g)
    ).metrics["mae"]
    oracle = stats.ttest_1samp((x - z).reshape(12, 25).mean(1), 0.0)
    assert d.p == pytest.approx(oracle.pvalue)
    assert (d.lo, d.hi) == pytest.approx(tuple(oracle.confidence_interval(0.95)))


def test_seeds_without_variance_between_subjects_are_welchs_test():
    """Every subject errs alike, only the seeds differ: the test of two samples of seeds with
    variances of their own.
    """
    g, t = np.repeat(np.arange(8), 5), np.zeros(40)
    first, second = [1.0, 1.2, 1.1, 1.6], [1.3, 1.31, 1.32]
    runs = {
        f"{name}{i}": Predictions(np.arange(40), t, np.full(40, v), g)
        for name, of in (("a", first), ("b", second))
        for i, v in enumerate(of)
    }
    found = evaluate.estimate_runs("regression", runs)
    d = evaluate.paired_difference(found, [f"a{i}" for i in range(4)], [f"b{i}" for i in range(3)])
    oracle = stats.ttest_ind(first, second, equal_var=False)
    assert (d.p, d.df) == pytest.approx((oracle.pvalue, oracle.df))
    assert d.seeds == (4, 3)


def test_a_verdict_needs_three_seeds_and_four_effective_subjects():
    first, second = pair()
    runs = {f"{name}{i}": p for name, p in (("a", first), ("b", second)) for i in range(3)}
    found = evaluate.estimate_runs("classification", runs, class_names=NAMES[:3])
    clear = {"difference": 0.2, "p": 1e-6, "total_se": 0.01, "df": 9.0}
    for seeds, effective, side in ((3, 20.0, 1), (2, 20.0, 0), (3, 3.9, 0), (0, 20.0, 1)):
        d = evaluate.paired_difference(found, ["a0", "a1", "a2"], ["b0", "b1", "b2"])
        d = d.model_copy(update={**clear, "seeds": (seeds, 3), "effective": effective})
        assert evaluate.significance_sign(evaluate.holm_correct([d])[0]) == side


@pytest.mark.slow
@pytest.mark.parametrize("subjects", [10, 50])
def test_intervals_and_tests_of_differences_hold_their_level(subjects):
    """Subjects of unequal size and difficulty, two runs that err alike: coverage of 95 %, at most 6
    % false differences.
    """
    rng, cohorts, inside, rejected = np.random.default_rng(subjects), 500, 0, 0
    for _ in range(cohorts):
        g = np.repeat(np.arange(subjects), rng.integers(5, 41, subjects))
        skill = rng.normal(size=subjects)
        y, right = rng.integers(0, 2, len(g)), []
        for _run in range(2):
            margin = 1.0 + skill[g] + 0.5 * rng.normal(size=subjects)[g] + rng.normal(size=len(g))
            right.append(np.eye(2)[np.where(margin > 0, y, 1 - y)] * 0.98 + 0.01)
        truth = stats.norm.cdf(1 / np.sqrt(2.25))
        one, other = (Predictions(np.arange(len(g)), y, p, g) for p in right)
        m = score("classification", y, right[0], g, class_names=("no", "yes")).metrics["accuracy"]
        inside += m.lo <= truth <= m.hi
        rejected += (
            compare("classification", one, other, class_names=("no", "yes")).metrics["accuracy"].p
            <= 0.05
        )
    slack = 2 * np.sqrt(0.05 * 0.95 / cohorts)
    assert 0.93 - slack <= inside / cohorts <= 0.97 + slack
    assert rejected / cohorts <= 0.06 + slack


def test_pairing_aligns_rows_and_refuses_others():
    first, second = pair()
    order = np.random.default_rng(0).permutation(len(second.rows))
    shuffled = Predictions(*(np.asarray(field)[order] for field in second))
    assert compare(
        "classification", first, shuffled, class_names=NAMES[:3], bootstrap=40
    ) == compare("classification", first, second, class_names=NAMES[:3], bootstrap=40)
    for other in (
        second._replace(rows=second.rows + 1),
        second._replace(target=(second.target + 1) % 3),
        second._replace(groups=second.groups + 1),
        Predictions(*(field[:-1] for field in second)),
    ):
        with pytest.raises(UserError) as caught:
            compare("classification", first, other, class_names=NAMES[:3])
        assert caught.value.exit_code == Exit.REFUSED


def test_two_files_of_predictions():
    first, second = pair()
    frames = []
    for p in (first, second):
        columns = {
            "window": p.rows,
            "recording_id": [f"r{g}" for g in p.groups],
            "start": p.rows * 30,
            "subject_id": [f"s{g}" for g in p.groups],
        }
        frames.append(
            {
                **columns,
                "target": p.target,
                **{f"p_{n}": p.prediction[:, k] for k, n in enumerate(NAMES[:3])},
            }
        )

    def compare_tables(*tables, **choices):
        read = (parse_predictions("classification", table, NAMES[:3]) for table in tables)
        return compare("classification", *read, class_names=NAMES[:3], **choices).metrics

    got = compare_tables(*frames, bootstrap=30)
    assert (
        got["kappa"].difference
        == compare("classification", first, second, class_names=NAMES[:3])
        .metrics["kappa"]
        .difference
    )
    with pytest.raises(UserError):
        compare_tables(frames[0], {**frames[1], "start": second.rows * 20})


def test_pairing_without_rows_is_null_with_the_reason():
    nothing = Predictions(np.empty(0), np.empty(0), np.empty((0, 3)), np.empty(0))
    m = compare("classification", nothing, nothing, class_names=NAMES[:3]).metrics["auroc"]
    assert m.difference is None
    assert "no rows" in m.undefined_reason


def test_score_figure_shows_the_run_and_its_baselines():
    y, p, g = cohort(4, k=3)
    scores = score("classification", y, p, g, class_names=NAMES[:3], train_target=y, bootstrap=50)
    figure = score_figure(scores)
    assert figure.data.names == ["this run", "majority", "prior"]
    assert figure.data.values[0] == scores.metrics["accuracy"].value
    assert "95 % CI over subjects" in figure.caption
    assert (
        score_figure(score("classification", [], np.empty((0, 3)), [], class_names=NAMES[:3]))
        is None
    )


def test_undefined_metrics_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, p, g = cohort(0, n=30, k=5)
        p[:, 4] = 0
        p /= p.sum(1, keepdims=True)
        scores = score("classification", y, p, g, class_names=NAMES, train_target=y, bootstrap=100)
    never = scores.by_class["R"].precision
    assert never.value is None
    assert "never predicted" in never.undefined_reason


def test_labels_missing_in_every_row_are_undefined():
    found = score(
        "multilabel",
        np.full((6, 2), np.nan),
        np.full((6, 2), 0.4),
        np.arange(6),
        class_names=("a", "b"),
        bootstrap=20,
    )
    assert all(
        metric.value is None and metric.undefined_reason for metric in found.metrics.values()
    )


@pytest.mark.parametrize("seed", range(40))
def test_agreement_by_chance_is_a_kappa_of_zero(seed):
    """A constant and guessing by training frequencies agree as chance does, whatever rounding
    adds.
    """
    rng = np.random.default_rng(seed)
    y, p, g = cohort(seed, k=4)
    found = score(
        "classification",
        y,
        p,
        g,
        class_names=NAMES[:4],
        train_target=rng.integers(0, 4, 50 + seed),
        bootstrap=100,
    )
    for name in ("majority", "prior"):
        kappa = found.baselines[name].metrics["kappa"]
        assert (repr(kappa.value), kappa.lo, kappa.hi) == ("0.0", None, None), name
    assert abs(found.metrics["kappa"].value) > 1e-6


@pytest.mark.parametrize(
    ("task", "unit", "expected"),
    [
        (
            "classification",
            None,
            {"accuracy": ("points", 100.0), "auroc": ("points", 100.0), "kappa": ("1", 1.0)},
        ),
        ("regression", "/min", {"mae": ("/min", 1.0), "rmse": ("/min", 1.0)}),
        ("regression", None, {"mae": ("units of the target", 1.0)}),
    ],
)
def test_differences_have_a_unit(task, unit, expected):
    rng = np.random.default_rng(3)
    y, p, g = (
        cohort(3, k=3)
        if task == "classification"
        else (rng.normal(70, 9, 90), rng.normal(70, 9, 90), np.arange(90) % 9)
    )
    other = np.roll(p, 1, axis=0)
    names = NAMES[:3] if task == "classification" else ()
    rows = np.arange(len(y))
    both = [evaluate.Predictions(rows, y, x, g) for x in (p, other)]
    paired = evaluate.compare(task, *both, class_names=names, unit=unit).metrics
    base = score(task, y, p, g, class_names=names, train_target=y, unit=unit).baselines
    for metric, found in expected.items():
        for one in (paired[metric], *(b.metrics[metric].difference for b in base.values())):
            assert (one.unit, one.factor) == found
            assert one.model_dump(mode="json")["unit"] == found[0]
    measured = evaluate.estimate_runs(
        task, dict(zip("ab", both, strict=True)), class_names=names, unit=unit
    )
    main = evaluate.paired_difference(measured, ["a"], ["b"])
    assert (main.unit, main.factor) == expected[measured.metric]
