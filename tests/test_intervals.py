"""Intervals against their definitions, and how often they hold the truth in simulated cohorts."""

import ast
from pathlib import Path

import intervals as simulation  # of benchmarks/
import numpy as np
import pytest
from scipy import stats

from bitimely_core import evaluate
from bitimely_core.evaluate import score
from bitimely_core.evaluate.intervals import average_rate


@pytest.mark.parametrize("name", simulation.OTHERS)
def test_an_interval_holds_the_truth_as_often_as_it_says(name):
    """As often as one of coverage 0.93 to 0.98 in 99.9 % of such simulations."""
    cohorts = 1000 if name.startswith("rate") else 100
    share, absent = simulation.measure_other(name, 20, cohorts, seed=1)
    # of 5 positives on average 44 % of cohorts have fewer, by Poisson's distribution
    assert absent < (0.55 if name.startswith("rare label: 5 ") else 0.15)
    lowest, highest = (stats.binom.ppf(q, cohorts, p) for q, p in ((1e-3, 0.93), (0.999, 0.98)))
    assert lowest <= share * cohorts <= highest


QUANTILES = {"stdtrit", "ndtri", "betaincinv", "percentile"}


def list_interval_functions():
    """Functions that take a quantile of a distribution, or 1.96, as `file:function`."""
    package = Path(evaluate.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if not any(word in text for word in (*QUANTILES, "1.96")):
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            names |= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            numbers = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant)}
            if names & QUANTILES or 1.96 in numbers or "Z" in names:
                yield f"{path.relative_to(package).as_posix()}:{function.name}"


def test_every_interval_is_simulated():
    others = ("formats/", "datasets/", "cache/", "insight/complexity.py", "report/")
    missing = [
        name
        for name in list_interval_functions()
        if not name.startswith(others)
        and not {name, name.partition(":")[0]} & simulation.SIMULATED.keys()
    ]
    assert missing == [], "add a row to OTHERS and SIMULATED of benchmarks/intervals.py"
    rows = {
        name for name in simulation.SIMULATED.values() if " " in name and "no interval" not in name
    }
    assert {name for name in rows if not name.startswith("docs")} <= simulation.OTHERS.keys()


def test_the_precision_of_a_rare_label_has_the_degrees_of_freedom_of_its_positives():
    rng = np.random.default_rng(0)
    y = np.zeros(200, np.int64)
    y[:6] = 1
    s = rng.normal(size=200) + 1.5 * y
    found = score("multilabel", y[:, None], s[:, None], np.arange(200), class_names=["a"])
    order = np.argsort(-s)
    ranked = y[order]
    recall = np.cumsum(ranked) / 6
    precision = np.cumsum(ranked) / np.arange(1, 201)
    auprc = found.metrics["auprc"]
    assert auprc.value == pytest.approx(np.sum(np.diff(recall, prepend=0.0) * precision))
    value, logit = auprc.value, stats.logistic.ppf
    reach = stats.t.ppf(0.975, 6 - 1) * auprc.se / (value * (1 - value))
    # near 0 or 1 the interval is the wider of this and of Korn and Graubard's
    assert logit(auprc.hi) - logit(value) >= reach * (1 - 1e-9)
    assert logit(value) - logit(auprc.lo) >= reach * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_of_a_rate_is_that_of_its_definition(seed):
    rng = np.random.default_rng(seed)
    hours, alarms = rng.uniform(1, 20, 9), rng.poisson(2.0, 9).astype(float)
    rate = average_rate(alarms, hours, highest=3600.0)
    value, share = alarms.sum() / hours.sum(), hours / hours.sum()
    linear = np.sqrt(
        sum((a - h * value) ** 2 / (1 - s) for a, h, s in zip(alarms, hours, share, strict=True))
    )
    linear /= hours.sum()
    logs = [
        np.log((alarms.sum() - a) / (hours.sum() - h)) for a, h in zip(alarms, hours, strict=True)
    ]
    jackknife = np.sqrt(8 / 9 * sum((x - np.mean(logs)) ** 2 for x in logs))
    reach = stats.t.ppf(0.975, 1 / sum(share**2) - 1) * max(linear / value, jackknife)
    assert (rate.value, rate.se) == pytest.approx((value, linear))
    assert np.log([rate.lo, rate.hi]) == pytest.approx(np.log(value) + reach * np.array([-1, 1]))


def test_a_rate_without_events_is_bounded_from_above():
    hours = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 3.0])
    rate = average_rate(np.zeros(6), hours, highest=3600.0)
    assert (rate.value, rate.lo, rate.se) == (0.0, 0.0, None)
    # a gamma distributed rate of shape 1 makes counts geometric
    assert np.prod(stats.nbinom.pmf(0, 1, 1 / (1 + rate.hi * hours))) == pytest.approx(0.025)
    assert rate.hi > stats.chi2.ppf(0.975, 2) / 2 / hours.sum()  # Poisson's, of equal rates


def test_a_rate_is_never_above_what_is_possible_and_has_no_interval_of_few_subjects():
    alarms, hours = np.array([40.0, 0, 0, 0, 0, 1]), np.ones(6)
    rate = average_rate(alarms, hours, highest=60.0)
    assert rate.hi == pytest.approx(60.0)
    few = average_rate(alarms[:4], hours[:4], highest=60.0)
    assert (few.value, few.lo, few.hi) == (10.0, None, None)
    assert few.undefined_reason == "no CI: 4 subjects, at least 5 required"
    uneven = average_rate(alarms, np.array([1e4, 1, 1, 1, 1, 1]), highest=60.0)
    assert uneven.lo is None
    assert "effectively 1.00 units" in uneven.undefined_reason
    assert average_rate(np.zeros(0), np.zeros(0), 60.0).value is None
