"""Verdicts: their words, margins against t-tests of scipy, and how often each is given where it is
not true.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats
from test_results import planted, write

from bitimely_core import evaluate, workflows
from bitimely_core.analyses.calibration import _verdict
from bitimely_core.analyses.reliability import correct_gaps, estimate_reliability
from bitimely_core.config import validate
from bitimely_core.errors import UserError
from bitimely_core.evaluate import multiple
from bitimely_core.evaluate.result_table import BaselinePair, ScoreColumn
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    choose_places,
    describe_difference,
    describe_margin,
    describe_margin_of_models,
    find_margin_interval,
    name_margin_verdict,
)
from bitimely_core.insight.regions import compare_with_controls, describe_finding, judge_measures
from bitimely_core.pipeline.families import RegisteredTest, correct_families, judge_test
from bitimely_core.recipe import Recipe, RegisteredFamily
from bitimely_core.report import differences
from bitimely_core.report.recipe_tables import format_cell
from bitimely_core.report.run_page import verdict_text
from bitimely_core.report.score_blocks import metric_table
from bitimely_core.schemas.scores import (
    CorrectedDifference,
    Difference,
    MeanDifference,
    MetricValue,
    Scores,
)

# tests/ has a module of that name, too
SPEC = importlib.util.spec_from_file_location(
    "benchmark_verdicts", Path(__file__).parent.parent / "benchmarks" / "verdicts.py"
)
simulation = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(simulation)

COHORTS = {"maps: any of eight heads": 30}
CHEAP = ("the gap", "margin")


@pytest.mark.slow
@pytest.mark.parametrize("case", simulation.CASES)
def test_a_verdict_is_rarely_given_where_it_is_not_true(case):
    """No more often than a verdict of type I error 0.06 in 99.5 % of such simulations;
    `benchmarks/verdicts.py` draws more cohorts.
    """
    cohorts = COHORTS.get(case, 400 if any(word in case for word in CHEAP) else 150)
    assert simulation.measure_errors(case, 20, cohorts) * cohorts <= simulation.bound_errors(
        cohorts
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["probing: any of ten readouts", "calibration: any of five labels"]
)
def test_without_correction_the_simulation_finds_too_many_verdicts(case, monkeypatch):
    monkeypatch.setattr(
        multiple,
        "holm",
        lambda p, level=0.95: [None if one is None else (one, 1 - level) for one in p],
    )
    assert simulation.measure_errors(case, 20, 150) * 150 > simulation.bound_errors(150)


def paired(values):
    """A difference of one value a subject, as a family of its own."""
    return evaluate.holm_correct(
        [evaluate.compare_with_zero(np.asarray(values), np.arange(len(values)), len(values))]
    )[0]


def test_a_mean_against_zero_is_the_t_test_and_random_draws_add_their_variance():
    rng = np.random.default_rng(0)
    values, draws = rng.normal(0.3, 1, 12), rng.normal(0, 0.4, 5)
    plain = evaluate.compare_with_zero(values, np.arange(12), 12)
    assert plain.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    both = evaluate.compare_with_zero(values, np.arange(12), 12, draws=draws)
    parts = [values.var(ddof=1) / 12, draws.var(ddof=1) / 5]
    df = sum(parts) ** 2 / (parts[0] ** 2 / 11 + parts[1] ** 2 / 4)
    assert both.total_se == pytest.approx(np.sqrt(sum(parts)))
    assert both.p == pytest.approx(2 * stats.t.sf(abs(values.mean()) / np.sqrt(sum(parts)), df))


@pytest.mark.parametrize("sign", [1, -1])
def test_one_margin_is_the_one_sided_t_test_and_two_of_them(sign):
    """Non-inferior at .025; equivalent at .05 on each side where it is non-inferior; of errors
    (sign -1) more is worse.
    """
    seen = set()
    for k in range(60):
        values = np.random.default_rng(k).normal(0.01 * (k % 7 - 3), 0.06, 15)
        d = paired(values)
        (found,) = evaluate.apply_margins([d], [0.05], [sign])
        worse = stats.ttest_1samp(sign * values, -0.05, alternative="greater").pvalue
        sides = max(
            stats.ttest_1samp(values, -0.05, alternative="greater").pvalue,
            stats.ttest_1samp(values, 0.05, alternative="less").pvalue,
        )
        one = found.against_margin
        assert (one.non_inferior, one.equivalent) == (worse < 0.025, sides < 0.05 and worse < 0.025)
        assert one.worst == pytest.approx(stats.t.ppf(0.975, 14) * d.se - sign * values.mean())
        assert (one.lo, one.hi) == pytest.approx(stats.t.interval(0.9, 14, values.mean(), d.se))
        seen.add((one.non_inferior, one.equivalent))
    assert len(seen) >= 3


@pytest.mark.parametrize("sign", [1, -1])
def test_the_verdict_against_a_margin_is_where_the_interval_lies(sign):
    """Of one test the interval is the t interval of the mean: short of the margin, wholly beyond
    it, or neither.
    """
    seen, metric = set(), PrintedMetric("accuracy" if sign > 0 else "mae")
    for k in range(60):
        values = np.random.default_rng(k).normal(0.03 * (k % 9 - 4), 0.06, 15)
        (found,) = evaluate.apply_margins([paired(values)], [0.05], [sign])
        worse = sorted(
            -sign * bound for bound in stats.t.interval(0.95, 14, values.mean(), found.se)
        )
        expected = (
            "non-inferior" if worse[1] < 0.05 else "inferior" if worse[0] > 0.05 else "inconclusive"
        )
        assert name_margin_verdict(found, metric) == expected
        seen.add(expected)
    assert len(seen) == 3
    assert (
        name_margin_verdict(found.model_copy(update={"seeds": (2, 5)}), metric)
        == "fewer than 3 seeds"
    )


def measured(difference, se, df, **fields):
    """A difference of five seeds each with its test."""
    p = 2 * stats.t.sf(abs(difference) / se, df)
    known = {
        "difference": difference,
        "se": se,
        "total_se": se,
        "df": df,
        "p": p,
        "effective": df + 1,
        "seeds": (5, 5),
        "n_defined": 50,
    }
    return MeanDifference(**{**known, **fields})


@pytest.mark.parametrize("sign", [1, -1])
def test_the_verdict_against_a_margin_is_that_of_the_printed_interval(sign):
    """The interval against 0 has another step of Holm's correction: the last of these lies beyond
    the margin by it, and not by that against the margin.
    """
    metric = PrintedMetric("accuracy" if sign > 0 else "brier")
    family = evaluate.holm_correct(
        [measured(-sign * d, 0.004, 49.0) for d in (0.08, 0.07, 0.06, 0.0385)]
    )
    tested = evaluate.apply_margins(family, [0.03] * 4, [sign] * 4)
    assert [name_margin_verdict(d, metric) for d in tested] == [
        "inferior",
        "inferior",
        "inferior",
        "inconclusive",
    ]
    for d in tested:
        worse = sorted(-sign * bound for bound in find_margin_interval(d, metric))
        assert (worse[0] > 0.03) == (name_margin_verdict(d, metric) == "inferior")
        assert worse[1] == pytest.approx(d.against_margin.worst)
    assert min(abs(tested[3].corrected_lo), abs(tested[3].corrected_hi)) > 0.03


@pytest.mark.parametrize("sign", [1, -1])
def test_equivalent_is_non_inferior(sign):
    """The 90 % interval ends at -2.8, the 95 % interval at -3.2."""
    family = evaluate.holm_correct([measured(-0.012 * sign, 0.0098, 60.0)])
    (found,) = evaluate.apply_margins(family, [0.03], [sign])
    one = found.against_margin
    assert max(abs(one.lo), abs(one.hi)) < 0.03 < one.worst
    assert (one.non_inferior, one.equivalent) == (False, False)


def test_margins_are_a_second_family():
    found = [paired(np.random.default_rng(k).normal(0.0, 0.1, 12)) for k in range(4)]
    tested = evaluate.apply_margins(found, [0.12] * 4, [1] * 4)
    p = [2 * stats.t.sf((d.difference + 0.12) / d.se, 11) for d in found]
    assert [d.against_margin.non_inferior for d in tested] == [
        a is not None and a[0] <= 0.05 for a in evaluate.holm(p)
    ]
    assert [d.p_holm for d in tested] == [d.p_holm for d in found]
    assert evaluate.apply_margins(found, [None] * 4, [1] * 4) == found


def corrected(difference, lo, hi, **fields):
    return CorrectedDifference(
        **{
            "difference": difference,
            "corrected_lo": lo,
            "corrected_hi": hi,
            "p_holm": 0.5,
            "effective": 20.0,
            "seeds": (5, 5),
            "n_defined": 53,
            **fields,
        }
    )


def test_the_sentences_are_those_that_were_decided():
    metric, pair = PrintedMetric("accuracy"), ("A", "B")
    assert describe_difference(pair, "D", corrected(0.021, 0.006, 0.036), metric) == (
        "A is better than B on D: +2.1 points (95 % confidence interval 0.6 to 3.6, Holm-corrected; 53 subjects, 5 seeds)."
    )
    assert describe_difference(pair, "D", corrected(0.008, -0.011, 0.027), metric) == (
        "No significant difference between A and B on D: +0.8 points (95 % confidence interval −1.1 to 2.7, Holm-corrected); differences of "
        "up to 2.7 points either way cannot be excluded."
    )
    assert describe_difference(pair, "D", corrected(0.2, 0.1, 0.3, seeds=(1, 2)), metric) == (
        "On D these trained models differ by +20.0 points (A less B); with fewer than 3 seeds nothing is said about the methods."
    )
    few = corrected(
        0.2,
        None,
        None,
        p_holm=None,
        n_defined=3,
        undefined_reason="no CI: 3 subjects, at least 5 required",
    )
    assert describe_difference(pair, "D", few, metric).endswith(
        "3 subjects: no interval (at least 5)."
    )
    errors = PrintedMetric("mae", "beats/min")
    assert describe_difference(pair, "D", corrected(1.5, 0.5, 2.5), errors, "segment") == (
        "A is worse than B on D: +1.500 beats/min (95 % confidence interval 0.500 to 2.500, Holm-corrected; 53 segments, 5 seeds)."
    )


def test_small_units_are_printed_with_the_digits_that_they_need():
    """Errors in seconds of milliseconds; a number that is 0, or 0 but for rounding, needs none."""
    d = measured(-0.000503, 0.000126, 29.0, seeds=(3, 3), unit="s")
    (found,) = evaluate.apply_margins(evaluate.holm_correct([d]), [0.0004], [-1])
    metric = PrintedMetric("mae", "s")
    assert describe_difference(("A", "B"), "D", found, metric) == (
        "A is better than B on D: −0.00050 s (95 % confidence interval −0.00076 to −0.00025, Holm-corrected; 50 subjects, 3 seeds)."
    )
    assert "(margin 0.00040, set before training)" in describe_margin(
        ("A", "B"), found, metric, planned=True
    )
    assert differences._difference_cells(found, "mae")[3]["text"] == "−0.00076 to −0.00025"
    column = ScoreColumn("D", "D", "mae", None, "regression")
    assert format_cell(MetricValue(value=0.0016586, se=0.0000667), column) == "0.001659 (0.000067)"
    assert format_cell(MetricValue(value=7.25, se=1.04), column) == "7.25 (1.04)"
    assert format_cell(MetricValue(value=0.0), column) == "0.00 (no s.e.)"
    percent = ScoreColumn("D", "D", "accuracy", None, "classification")
    assert format_cell(MetricValue(value=0.9042, se=0.0254), percent) == "90.4 (2.5)"
    assert format_cell(MetricValue(value=0.9042, se=0.0004), percent) == "90.420 (0.040)"
    scores = Scores(run="r", data="D", main="mae", task="regression", n=9, n_subjects=9, metrics={"mae": MetricValue(value=0.0004, se=5e-5, lo=0.0003, hi=0.0005)})  # fmt: skip
    assert verdict_text(scores).startswith(
        "Mean absolute error 0.000400 (95 % CI 0.000300 to 0.000500) on 9 test windows"
    )


@pytest.mark.parametrize(("numbers", "places"), [
    ((0.3, 1.1, -2.7), 1),  # as ever
    ((0.3, 0.0, 1.2), 1),
    ((0.3, 1e-9, 1.2), 1),  # rounding
    ((0.3, 0.04, 1.2), 2),
    ((0.03, 0.04, 0.2), 3),
    ((None, 0.004, 1.2), 3),
])  # fmt: skip
def test_decimals_grow_where_a_number_would_be_printed_as_zero(numbers, places):
    assert choose_places(1, *numbers) == places


def test_corrected_intervals_match_the_tests_and_are_not_simultaneous():
    """Of five true differences, all far from 0, any of five intervals misses its own in far more
    than .05 of families, and the pages say so.
    """
    rng, missed = np.random.default_rng(0), 0
    true = np.array([0.05, 0.06, 0.07, 0.08, 0.09])
    for _ in range(400):
        family = evaluate.holm_correct(
            [measured(d, 0.004, 49.0) for d in true + 0.004 * rng.standard_t(49, 5)]
        )
        missed += any(
            not d.corrected_lo <= t <= d.corrected_hi for d, t in zip(family, true, strict=True)
        )
        assert all((d.p_holm <= 0.05) == (d.corrected_lo > 0) for d in family)
    assert missed > 0.08 * 400
    assert "not simultaneous" in differences.METHOD


def test_a_difference_that_is_withheld_says_nothing_about_baselines():
    withheld = CorrectedDifference(undefined_reason="withheld", seeds=(3, 0))
    pairs = {
        ("A", "kernels"): withheld,
        ("B", "kernels"): withheld,
        ("B", "features"): corrected(-0.2, -0.3, -0.1),
    }
    table = SimpleNamespace(
        baseline_differences={BaselinePair(row, "D", name): d for (row, name), d in pairs.items()},
        name=str,
        metric=lambda column: "accuracy",
        unit=lambda data=None: "subject",
    )
    assert (
        differences.summarize_baselines(table)
        == "B is worse than the features baseline on D: −20.0 points (95 % confidence interval −30.0 to −10.0, Holm-corrected; 53 subjects, 5 seeds)."
    )
    (page,) = differences.baseline_difference_table(table)
    assert [row[2] for row in page.rows] == ["kernels", "kernels", "features (best)"]


def test_rows_ahead_of_a_baseline_without_an_interval_are_named():
    few = {"p_holm": None, "undefined_reason": "no CI: 3 subjects, at least 5 required"}
    pairs = {
        ("A", "kernels"): corrected(0.1, None, None, **few),
        ("B", "kernels"): corrected(-0.1, None, None, **few),
    }
    table = SimpleNamespace(
        baseline_differences={BaselinePair(row, "D", name): d for (row, name), d in pairs.items()},
        name=str,
        metric=lambda column: "accuracy",
    )
    assert differences.summarize_baselines(table) == (
        "Without a verdict, a baseline reaches as much as 1 of 2 models (Holm-corrected over 2 comparisons with baselines): B on D (kernels). "
        "Without a verdict, the closest baseline reaches less than 1 of 2 models: A on D (kernels)."
    )


def test_sentences_of_margins():
    values = np.random.default_rng(0).normal(0.0, 0.02, 40)
    d = paired(values).model_copy(update={"seeds": (3, 3)})
    metric, pair = PrintedMetric("accuracy"), ("A", "B")
    (inside,) = evaluate.apply_margins([d], [0.03], [1])
    worst = 100 * inside.against_margin.worst
    assert describe_margin(pair, inside, metric, planned=True) == (
        f"A is non-inferior to B: at most {worst:.1f} points worse (margin 3.0, set before training). A and B are equivalent within ± 3.0 points."
    )
    assert "margin 3.0, given with this comparison" in describe_margin(
        pair, inside, metric, planned=False
    )
    (beyond,) = evaluate.apply_margins([d], [0.001], [1])
    reached = f"{-100 * beyond.against_margin.worst:.1f}".replace("-", "−")
    assert (
        describe_margin(pair, beyond, metric, planned=True)
        == f"Non-inferiority is not shown: the interval reaches {reached} (margin −0.1)."
    )
    assert describe_margin(pair, d, metric, planned=True) == ""
    assert (
        describe_margin(pair, inside.model_copy(update={"seeds": (2, 3)}), metric, planned=True)
        == ""
    )


@pytest.mark.parametrize(("fields", "end"), [
    ({"seeds": (2, 2)}, "with fewer than 3 seeds nothing is said about the methods."),
    ({"effective": 3.0}, "no verdict (effectively 3.00 segments of equal weight, at least 4 required)."),
])  # fmt: skip
def test_a_registered_test_against_a_margin_says_why_it_has_no_verdict(fields, end):
    family = RegisteredFamily(
        name="F2", question="q", row="a", rivals=("b",), columns=("d",), margin={"d": 3.0}
    )
    test = RegisteredTest(
        family,
        "d",
        "b",
        4,
        4,
        measured(-0.01, 0.005, 40.0, **fields),
        PrintedMetric("accuracy"),
        "segment",
    )
    result = judge_test(test, correct_families([test])[0])
    assert result.sentence.endswith(end)
    assert "+" not in result.sentence
    assert "−1.0 points" in result.sentence


@pytest.mark.parametrize(
    ("difference", "lies"),
    [(-0.005, "stays"), (-0.03, "reaches beyond"), (-0.06, "lies wholly beyond")],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_two_trained_models_are_placed_against_a_margin_without_a_word_on_their_methods(
    difference, lies, sign
):
    d = measured(sign * difference, 0.005, 40.0, seeds=())
    metric = PrintedMetric("accuracy" if sign > 0 else "mae", "s")
    (found,) = evaluate.correct_pairs(
        {"": Difference(**{k: getattr(d, k) for k in Difference.model_fields})}, (1, 1)
    ).values()
    (found,) = evaluate.apply_margins([found], [0.03], [sign])
    reach = stats.t.ppf(0.975, 40) * 0.005
    lo, hi = (metric.number(sign * difference + side * reach) for side in (-1, 1))
    where = f"{lies} {'above' if sign > 0 else 'below'}" if lies == "stays" else lies
    margin = "−3.0 points" if sign > 0 else "+0.030 s"
    assert describe_margin_of_models(("A", "B"), "D", found, metric) == (
        f"On D the 95 % confidence interval of these two trained models, A less B, is {lo} to {hi} and {where} the margin of {margin} (given "
        "with this comparison)."
    )
    (few,) = evaluate.apply_margins([CorrectedDifference(difference=0.1)], [0.03], [sign])
    assert describe_margin_of_models(("A", "B"), "D", few, metric).startswith(
        f"Without an interval nothing is said on the margin of {margin}"
    )
    assert (
        describe_margin_of_models(
            ("A", "B"), "D", found.model_copy(update={"against_margin": None}), metric
        )
        == ""
    )


def test_margins_of_recipes_and_of_report(tmp_path):
    entries = [
        planted(tmp_path, f"{row}-{s}", "one", row=row, seed=s, skill=skill)
        for row, skill in (("a", 0.7), ("b", 0.7))
        for s in range(3)
    ]
    without = write(tmp_path, entries)["verdict"]
    assert "inferior" not in without
    assert "equivalent" not in without
    done = write(tmp_path, entries, margins={"": 60.0})
    assert "b is non-inferior to a: at most " in done["verdict"]
    assert (
        "points worse (margin 60.0, set before training). b and a are equivalent within ± 60.0 points."
        in done["verdict"]
    )
    test = done["differences"]["b"]["one"]["against_margin"]
    assert test["margin"] == 0.6
    assert test["equivalent"]
    names = [f"{row}-{s}" for row in "ab" for s in range(3)]
    found = workflows.report(names, margin=60.0, workspace=tmp_path)
    assert "(margin 60.0, given with this comparison)" in found["verdict"]
    with pytest.raises(UserError, match="expected a number above 0"):
        workflows.report(names, margin=-1.0, workspace=tmp_path)
    assert validate(Recipe, {"evaluate": {"margin": {"one": 2.0, "": 3.0}}}).evaluate.margin == {
        "one": 2.0,
        "": 3.0,
    }
    with pytest.raises((UserError, ValidationError)):
        validate(Recipe, {"evaluate": {"margin": 0}})


# --- analyses -------------------------------------------------------------------------------------------------------------------------------


def test_a_finding_needs_all_three_conditions():
    rng = np.random.default_rng(0)
    for case in ("", "random weights", "signal size", "random places"):
        maps, controls, size, chosen = simulation.draw_maps(case, 30, rng)
        one = compare_with_controls(maps, controls, size, chosen, 1000, 0)
        (judged,) = judge_measures({"run": one}).values()
        assert judged.is_found == (case == ""), case
        text = describe_finding(one, judged)
        assert text.startswith(
            "a finding, more than" if case == "" else "no finding, not significantly more than"
        )
        assert "in these windows only" in text
        values = {name: test.p for name, test in one.tests.items()}
        adjusted = evaluate.holm([values["random weights"], values["signal size"], one.p_places])
        assert list(judged.p.values()) == pytest.approx([p for p, _ in adjusted])
    few = judge_measures(
        {"run": compare_with_controls(*simulation.draw_maps("", 4, rng), 1000, 0)}
    )["run"]
    assert few.why == "4 subjects, at least 5 required"
    assert not few.is_found


def test_the_verdict_on_calibration_is_that_of_the_gap():
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(20), 40)
    found = {}
    for name, shift in (("CHF", 0.0), ("COPD", 0.2), ("asthma", -0.2)):
        p = rng.uniform(0.3, 0.7, len(units))
        right = (rng.random(len(p)) < p - shift).astype(float)
        found[name] = {"as_is": estimate_reliability(p, right, units, bins=5, bootstrap=20, seed=0)}
    gaps = correct_gaps(found)
    assert gaps["COPD"].difference == pytest.approx(0.2, abs=0.05)
    text = _verdict(found, "multilabel")
    assert text.startswith("The probabilities of COPD are too high by ")
    assert "The probabilities of asthma are too low by " in text
    assert "CHF" not in text.partition("Expected")[0]
    assert "Holm-corrected over 3 labels" in text
    assert "by chance" not in text


def test_units_that_are_no_people_are_named_beside_every_interval():
    from bitimely_core import registry
    from bitimely_core.datasets.generic import name_unit

    assert registry.datasets["epilepsy"].facts.subject_unit == "segment"
    archives = registry.datasets["ppg-dalia"].facts.subject_unit
    assert (archives(["PPGDalia-00001"], ["a"]), archives(["S1"], ["S1"])) == (
        "recording",
        "subject",
    )
    assert (name_unit(["a", "b"], ["a", "b"]), name_unit(["p", "p"], ["a", "b"])) == (
        "recording",
        "subject",
    )
    rng = np.random.default_rng(0)
    y, groups = rng.integers(0, 2, 200), np.repeat(np.arange(20), 10)
    p = np.eye(2)[np.where(rng.random(200) < 0.8, y, 1 - y)]
    found = evaluate.score(
        "classification", y, p, groups, class_names=("no", "yes"), train_target=y, subject="segment"
    )
    scores = Scores(
        **{name: getattr(found, name) for name in type(found).model_fields}, data="D", run="r"
    )
    assert scores.to_json()["intervals"]["unit"] == "segment"
    assert "of 20 segments (people may be shared)" in verdict_text(scores)
    assert "over segments" in metric_table(scores).caption
    few = evaluate.score(
        "classification", y[:30], p[:30], groups[:30], class_names=("no", "yes"), subject="segment"
    )
    assert "3 segments, at least 5 required" in few.metrics["accuracy"].undefined_reason


def test_a_protected_difference_has_no_corrected_interval():
    """Of means whose degrees of freedom are withheld the difference is printed, and no verdict."""
    kept = evaluate.compare_with_zero(np.array([0.1, 0.2, 0.3, 0.15, 0.25, 0.12]), np.arange(6), 6)
    first, second = evaluate.holm_correct([kept, kept.model_copy(update={"df": None})])
    assert first.corrected_lo is not None
    assert (second.difference, second.corrected_lo, second.corrected_hi) == (
        kept.difference,
        None,
        None,
    )


@pytest.mark.parametrize("scale", [1e-12, 1e-10, 1e-6, 1e9])
def test_no_verdict_depends_on_the_unit_of_the_target(scale):
    rng = np.random.default_rng(0)
    groups, y = np.repeat(np.arange(30), 10), rng.normal(0, 1, 300)
    a, b = y + rng.normal(0, 1, 300), y + rng.normal(0, 1.5, 300)
    rows, found = np.arange(300), {}
    for k in (1.0, scale):
        runs = {
            name: evaluate.Predictions(rows, y * k, values * k, groups.astype(str))
            for name, values in (("a", a), ("b", b))
        }
        compared = evaluate.compare("regression", runs["a"], runs["b"]).metrics
        means = evaluate.paired_difference(evaluate.estimate_runs("regression", runs), ["a"], ["b"])
        scores = evaluate.score("regression", y * k, a * k, groups, train_target=y * k)
        mean = evaluate.average_over_units(a * k, groups, 30)
        ratio = evaluate.average_over_units(np.exp(a) * k, groups, 30, "ratio")
        found[k] = [
            *(compared[name].p for name in ("mae", "rmse")),
            means.p,
            *(one.metrics["mae"].difference.p for one in scores.baselines.values()),
            *(
                v / k
                for one in (*scores.metrics.values(), mean, ratio)
                for v in (one.value, one.se, one.lo, one.hi)
            ),
        ]
    assert found[scale] == pytest.approx(found[1.0])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_rounding_is_no_spread_in_any_unit(scale):
    """Subjects that err alike, by an amount that floating point does not hold exactly."""
    groups, y, rows = (
        np.repeat(np.arange(10), 7),
        np.random.default_rng(0).normal(0, 1, 70) * scale,
        np.arange(70),
    )
    near, far = y + 0.1 * scale, y - 0.3 * scale
    same = evaluate.score("regression", y, near, groups).metrics["mae"]
    assert (same.lo, same.undefined_reason) == (None, "no CI: all units are alike")
    runs = {
        name: evaluate.Predictions(rows, y, p, groups.astype(str))
        for name, p in (("near", near), ("far", far), ("again", near))
    }
    assert (
        evaluate.compare("regression", runs["near"], runs["again"]).metrics["mae"].undefined_reason
        == "no CI: identical on every unit"
    )
    assert (
        evaluate.compare("regression", runs["near"], runs["far"]).metrics["mae"].undefined_reason
        == "no CI: every unit differs alike"
    )
    assert (
        evaluate.score("regression", y, y, groups).metrics["mae"].undefined_reason
        == "no CI: no row has an error"
    )
