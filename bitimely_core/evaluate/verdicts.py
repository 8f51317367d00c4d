"""Sentences on differences: when the words better, non-inferior and equivalent may be used
(docs/statistics.md). Legend: `evaluate`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import NamedTuple

from bitimely_core.evaluate.intervals import MINIMUM_UNITS
from bitimely_core.evaluate.metrics import LOWER_IS_BETTER, NAMES, find_unit
from bitimely_core.evaluate.multiple import (
    correct_pairs,
    explain_no_verdict,
    find_margin_test,
    significance_sign,
)
from bitimely_core.evaluate.scoring import name_unit
from bitimely_core.page import rename_units
from bitimely_core.schemas.scores import (
    Baseline,
    BaselineLift,
    CorrectedDifference,
    Difference,
    MetricValue,
    Scores,
    TaskScores,
)
from bitimely_core.types import drop_none, group_by

VANISHING = 1e-6  # a number below this share of the largest beside it is printed as 0


def choose_places(least: int, spread: float | None, *numbers: float | None) -> int:
    """Decimals at which none of `numbers` that is not 0 is printed as 0: `least` where they
    suffice, else two digits of `spread` or more.
    """
    sizes = list(map(abs, filter(None, numbers)))
    shortest, smallest = 0.5 * 10.0**-least, VANISHING * max(sizes, default=0.0)
    digits = [-math.floor(math.log10(size)) for size in sizes if smallest < size < shortest]
    if digits and spread:
        digits.append(1 - math.floor(math.log10(abs(spread))))
    return max(least, *digits) if digits else least


class PrintedMetric(NamedTuple):
    """How a metric is printed."""

    name: str
    target: str | None = None  # unit of the values of a regression
    places: int | None = None  # decimals; None: the ordinary ones

    @property
    def factor(self) -> float:
        """Factor from a score to the printed number."""
        return find_unit(self.name).factor

    @property
    def suffix(self) -> str:
        """The unit behind a difference."""
        return find_unit(self.name, self.target).suffix

    @property
    def sign(self) -> int:
        """-1 where lower is better."""
        return -1 if self.name in LOWER_IS_BETTER else 1

    def number(self, value: float | None, *, signed: bool = False) -> str:
        """A score or a difference as text."""
        if value is None:
            return "undefined"
        places = self.ordinary if self.places is None else self.places
        return f"{value * self.factor:{'+' if signed else ''}.{places}f}".replace("-", "−")

    def score(self, value: float | None) -> str:
        """A score as tables have it: shares are no percentages, in which differences are."""
        is_share = value is not None and self.factor > 1
        return f"{value:.3f}" if is_share else self.number(value)

    @property
    def ordinary(self) -> int:
        """Decimals that suffice for most data."""
        return 1 if self.factor > 1 else 3

    def fit(self, spread: float | None, *numbers: float | None) -> PrintedMetric:
        """With the decimals for such numbers, which may be those of a target in small units."""
        scaled = [None if x is None else x * self.factor for x in (spread, *numbers)]
        return self._replace(places=choose_places(self.ordinary, *scaled))

    def fit_value(self, value: float | None) -> PrintedMetric:
        """With the decimals for a value alone, where it is in the unit of the target."""
        return self.fit(None, value) if find_unit(self.name).scaled else self

    def fit_difference(self, d: CorrectedDifference) -> PrintedMetric:
        """With the decimals for the bounds of a difference, or for the difference where it has
        none.
        """
        bounds = (d.corrected_lo, d.corrected_hi)
        if None in bounds:
            return self.fit_value(d.difference)
        return self.fit(d.total_se, *bounds)

    def difference(self, value: float | None) -> str:
        """A difference with its unit."""
        return self.number(value, signed=True) + ("" if value is None else self.suffix)


def count_units(count: int | None, unit: str = "subject") -> str:
    """`1 subject`, `12 segments`."""
    return f"{count or 0} {unit}{'s' * (count != 1)}"


def describe_difference(
    pair: tuple[str, str],
    data: str,
    d: CorrectedDifference,
    metric: PrintedMetric,
    unit: str = "subject",
) -> str:
    """The difference of `pair`, first less second, as a sentence; better or worse only where
    `explain_no_verdict` allows it.
    """
    row, reference = pair
    reason = rename_units(explain_no_verdict(d), unit)
    if reason is not None:
        difference = metric.fit_value(d.difference).difference(d.difference)
        if d.difference is not None and d.n_defined is not None and d.n_defined < MINIMUM_UNITS:
            few = f"{count_units(d.n_defined, unit)}: no interval (at least {MINIMUM_UNITS})."
            return f"{row} less {reference} on {data}: {difference}; {few}"
        if d.difference is None or "seeds" not in reason:
            return f"{row} and {reference} on {data}: {difference}, no verdict ({reason})."
        models = f"these trained models differ by {difference} ({row} less {reference})"
        return f"On {data} {models}; with {reason} nothing is said about the methods."
    metric = metric.fit_difference(d)
    side = significance_sign(d) * metric.sign
    if not side:
        return describe_no_difference(pair, data, d, metric)
    word = "better" if side > 0 else "worse"
    seeds = min(filter(None, d.seeds), default=0)
    counted = f"{count_units(d.n_defined, unit)}, {seeds} seeds"
    numbers = f"{metric.difference(d.difference)} ({describe_interval(d, metric)}; {counted})"
    return f"{row} is {word} than {reference} on {data}: {numbers}."


def describe_margin(
    pair: tuple[str, str], d: CorrectedDifference, metric: PrintedMetric, *, planned: bool
) -> str:
    """Non-inferiority of the first of `pair` and equivalence as sentences; empty without a margin,
    and where no verdict is allowed.

    `planned`: the margin stands in the recipe, and so was set before training.
    """
    result = find_margin_test(d)
    if result is None or result.worst is None:
        return ""
    row, reference = pair
    worst = max(result.worst, 0.0) if result.non_inferior else result.worst
    metric = metric.fit(d.total_se, result.margin, worst)
    margin, unit = metric.number(result.margin), metric.suffix
    if result.non_inferior:
        when = "set before training" if planned else "given with this comparison"
        bound = f"at most {metric.number(worst)}{unit} worse (margin {margin}, {when})"
        text = f"{row} is non-inferior to {reference}: {bound}."
    else:
        reach = f"the interval reaches {metric.number(-metric.sign * worst)}"
        limit = metric.number(-metric.sign * result.margin)
        text = f"Non-inferiority is not shown: {reach} (margin {limit})."
    if result.equivalent:
        text += f" {row} and {reference} are equivalent within ± {margin}{unit}."
    return text


def describe_margin_of_models(
    pair: tuple[str, str], data: str, d: CorrectedDifference, metric: PrintedMetric
) -> str:
    """Where the interval of two trained models lies against a margin; their methods are not called
    non-inferior or equivalent. Empty without a margin.
    """
    result, bounds = d.against_margin, (d.corrected_lo, d.corrected_hi)
    if result is None:
        return ""
    metric = metric.fit(d.total_se, *bounds, result.margin)
    limit = metric.number(-metric.sign * result.margin, signed=True)
    margin = f"the margin of {limit}{metric.suffix} (given with this comparison)"
    if result.worst is None or None in bounds:
        return f"Without an interval nothing is said on {margin}."
    lies = {
        "non-inferior": f"stays {'above' if metric.sign > 0 else 'below'}",
        "inferior": "lies wholly beyond",
        "inconclusive": "reaches beyond",
    }
    models = f"these two trained models, {pair[0]} less {pair[1]}"
    interval = f"{metric.number(bounds[0])} to {metric.number(bounds[1])}"
    place = lies[_place_against_margin(d, metric)]
    start = f"On {data} the 95 % confidence interval of {models}"
    return f"{start}, is {interval} and {place} {margin}."


def describe_no_difference(
    pair: tuple[str, str], data: str, d: CorrectedDifference, metric: PrintedMetric
) -> str:
    """The sentence where the corrected interval holds 0."""
    metric = metric.fit_difference(d)
    reach = metric.difference(max(abs(d.corrected_lo or 0.0), abs(d.corrected_hi or 0.0)))
    difference = f"{metric.difference(d.difference)} ({describe_interval(d, metric)})"
    return (
        f"No significant difference between {pair[0]} and {pair[1]} on {data}: {difference}; "
        f"differences of up to {reach.removeprefix('+')} either way cannot be excluded."
    )


def name_verdict(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The verdict as one cell of a table."""
    words = {1: "better", -1: "worse", 0: "no significant difference"}
    return explain_no_verdict(d) or words[significance_sign(d) * metric.sign]


def name_margin_verdict(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The verdict against a margin as one cell of a table: inferior where the whole interval of
    `find_margin_interval` is beyond it.
    """
    if find_margin_test(d) is None:
        return explain_no_verdict(d) or "no interval"
    return _place_against_margin(d, metric)


def _place_against_margin(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """Non-inferior, inferior or inconclusive, by where the interval of a difference with a margin
    lies.
    """
    result, interval = d.against_margin, find_margin_interval(d, metric)
    if result is None or interval is None:
        return "inconclusive"
    if result.non_inferior:
        return "non-inferior"
    least = -interval[1] if metric.sign > 0 else interval[0]  # how much worse it is at least
    return "inferior" if least > result.margin else "inconclusive"


def find_margin_interval(
    d: CorrectedDifference, metric: PrintedMetric
) -> tuple[float, float] | None:
    """The interval of a difference in the family of the tests of non-inferiority, which is not that
    of the tests against 0; None without one.
    """
    result = d.against_margin
    if result is None or result.worst is None or d.difference is None:
        return None
    reach = result.worst + metric.sign * d.difference
    return d.difference - reach, d.difference + reach


def describe_interval(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The corrected interval as text."""
    return f"95 % confidence interval {print_bounds(d, metric)}, Holm-corrected"


def print_bounds(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The bounds of the corrected interval as text."""
    fitted = metric.fit_difference(d)
    return f"{fitted.number(d.corrected_lo)} to {fitted.number(d.corrected_hi)}"


def compare_baselines(scores: TaskScores) -> dict[str, CorrectedDifference]:
    """The main metric of a run less that of each of its baselines, as one family; baselines without
    a difference are left out.
    """
    return correct_pairs(_list_differences(scores.baselines, scores))


def _list_differences(others: Mapping[str, Baseline], scores: TaskScores) -> dict[str, Difference]:
    """The differences in the main metric that are defined."""
    main = str(scores.main)
    differences = {name: find_difference(other, main) for name, other in others.items()}
    return drop_none(differences)


def find_difference(other: Baseline, metric: str) -> Difference | None:
    """The difference of a run to another one or to a baseline, where it is defined."""
    difference = other.metrics.get(metric, MetricValue()).difference
    return difference if difference and difference.difference is not None else None


def find_lift(scores: TaskScores) -> BaselineLift | None:
    """How much a run exceeds the baseline with the best main metric on the scored rows; None
    without a difference to any.
    """
    sign, family = PrintedMetric(str(scores.main)).sign, compare_baselines(scores)
    best = min(family, key=lambda name: sign * (family[name].difference or 0.0), default=None)
    return None if best is None else BaselineLift(**family[best].model_dump(), baseline=best)


def describe_lift(lift: BaselineLift, metric: PrintedMetric) -> str:
    """The lift as text."""
    metric = metric.fit_difference(lift)
    interval = explain_no_verdict(lift) or "no CI"
    if lift.corrected_lo is not None:
        interval = describe_interval(lift, metric)
    over = f"{metric.difference(lift.difference)} over {lift.baseline.replace('_', ' ')}"
    return f"{over} ({interval})"


def compare_models(scores: Scores) -> dict[str, CorrectedDifference]:
    """The main metric of an encoder less that of each row of trained models that it is compared
    with, as one family; else of one seed each.
    """
    if scores.compared_rows is not None:
        return dict(scores.compared_rows)
    return correct_pairs(_list_differences(scores.compared or {}, scores), (1, 1))


class BaselineVerdict(NamedTuple):
    """How a trained model compares with its baselines."""

    # exceeded, unclear (no verdict allowed), equal (no significant difference), exceeds (all), none
    case: str
    baseline: str  # printed name of the one that decides
    sentence: str


def find_closest(family: Mapping[str, CorrectedDifference], sign: int) -> tuple[str, str]:
    """How a model compares with the strongest of its baselines, and the name of that one; `family`:
    model less baseline, each difference known, at least one; `sign` as of the metric.

    exceeded: it beats the model; unclear: no verdict is allowed; equal: no significant difference;
    exceeds: the model significantly beats all. A baseline without a verdict comes before the equal
    ones where it reaches as much as the model and as each of them, else behind them.
    """
    ahead = {name: sign * (d.difference or 0.0) for name, d in family.items()}
    groups = group_by(family, lambda name: _name_case(family[name], sign))
    better, equal, silent = (groups.get(case, []) for case in ("exceeded", "equal", "unclear"))
    strongest = min([0.0, *map(ahead.__getitem__, equal)])
    cases = (
        ("exceeded", better),
        ("unclear", [name for name in silent if ahead[name] <= strongest]),
        ("equal", equal),
        ("unclear", silent),
        ("exceeds", list(family)),
    )
    case, names = next(filter(operator.itemgetter(1), cases))
    return case, min(names, key=lambda name: ahead[name])


def _name_case(difference: CorrectedDifference, sign: int) -> str:
    """How a model compares with one baseline, in the words of `find_closest`."""
    better = significance_sign(difference) * sign
    if better < 0:
        return "exceeded"
    if explain_no_verdict(difference) is not None:
        return "unclear"
    return "exceeds" if better else "equal"


def judge_baselines(scores: TaskScores, data: str) -> BaselineVerdict:
    """The verdict on one trained model and its strongest baselines, in the main metric."""
    metric, family = PrintedMetric(str(scores.main), scores.unit), compare_baselines(scores)
    if not family:
        return BaselineVerdict("none", "", "")
    case, name = find_closest(family, metric.sign)
    d, baseline = family[name], f"the {name.replace('_', ' ')} baseline"
    start = f"{baseline[0].upper()}{baseline[1:]}"
    metric = metric.fit_difference(d)
    ours = metric.score(scores.metrics[metric.name].value)
    theirs = metric.score(scores.baselines[name].metrics[metric.name].value)
    what, difference = NAMES[metric.name], metric.difference(d.difference)
    ours_by, seed = "this trained model", "; this is one trained model"
    if scores.folds:
        ours_by = f"these {scores.folds} trained models"
        seed = f"; they are one for each of {scores.folds} test folds, of one seed"
    seed += ", and nothing is said about the method"
    if case == "exceeded":
        over = f"{len(family)} baselines; {count_units(d.n_defined, name_unit(scores))}"
        interval = f"{describe_interval(d, metric)} over {over}"
        beats = f"{start} beats {ours_by} on {data} in {what}: {theirs} and {ours}"
        text = f"{beats}, a difference of {difference} ({interval}){seed}."
    elif case == "unclear":
        is_ahead = metric.sign * (d.difference or 0.0) > 0
        if is_ahead and len(family) > 1:
            start += f", the closest of {count_units(len(family), 'baseline')},"
        reaches = f"{start} reaches {theirs} in {what} on {data}, {ours_by} {ours}"
        text = f"{reaches}; no verdict ({explain_no_verdict(d)})."
    elif case == "equal":
        text = describe_no_difference((ours_by, baseline), data, d, metric)
    else:
        closest = f"the closest is {baseline}: {difference} ({describe_interval(d, metric)})"
        text = f"It exceeds all {len(family)} baselines; {closest}{seed}."
    return BaselineVerdict(case, name, text)
