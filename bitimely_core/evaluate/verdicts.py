"""Sentences on differences: when the words better, non-inferior and equivalent may be used
(docs/statistics.md). Legend: `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from bitimely_core.evaluate.intervals import MINIMUM_UNITS
from bitimely_core.evaluate.metrics import LOWER_IS_BETTER, NAMES, find_unit
from bitimely_core.evaluate.multiple import correct_pairs, explain_no_verdict, significance_sign
from bitimely_core.page import rename_units
from bitimely_core.schemas.scores import (
    BaselineLift,
    CorrectedDifference,
    MetricValue,
    Scores,
    TaskScores,
)

VANISHING = 1e-6  # a number below this share of the largest beside it is printed as 0


def choose_places(least: int, spread: float | None, *numbers: float | None) -> int:
    """Decimals at which none of `numbers` that is not 0 is printed as 0: `least` where they
    suffice, else two digits of `spread` or more.
    """
    known = [abs(one) for one in numbers if one]
    lost = [one for one in known if one < 0.5 * 10.0**-least and one > VANISHING * max(known)]
    digits = [-math.floor(math.log10(one)) for one in lost]
    if lost and spread:
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

    @property
    def ordinary(self) -> int:
        """Decimals that suffice for most data."""
        return 1 if self.factor > 1 else 3

    def fit(self, spread: float | None, *numbers: float | None) -> PrintedMetric:
        """With the decimals for such numbers, which may be those of a target in small units."""
        scaled = (None if one is None else one * self.factor for one in (spread, *numbers))
        return self._replace(places=choose_places(self.ordinary, *scaled))

    def fit_value(self, value: float | None) -> PrintedMetric:
        """With the decimals for a value alone, where it is in the unit of the target."""
        return self.fit(None, value) if find_unit(self.name).scaled else self

    def fit_difference(self, d: CorrectedDifference) -> PrintedMetric:
        """With the decimals for the bounds of a difference, or for the difference where it has
        none.
        """
        bounds = (d.corrected_lo, d.corrected_hi)
        return self.fit_value(d.difference) if None in bounds else self.fit(d.total_se, *bounds)

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
    (row, reference), side = pair, significance_sign(d) * metric.sign
    if (reason := rename_units(explain_no_verdict(d), unit)) is not None:
        metric = metric.fit_value(d.difference)
        if d.difference is not None and d.n_defined is not None and d.n_defined < MINIMUM_UNITS:
            few = f"{count_units(d.n_defined, unit)}: no interval (at least {MINIMUM_UNITS})."
            return f"{row} less {reference} on {data}: {metric.difference(d.difference)}; {few}"
        if d.difference is None or "seeds" not in reason:
            return f"{row} and {reference} on {data}: {metric.difference(d.difference)}, no verdict ({reason.removeprefix('no CI: ')})."
        return (
            f"On {data} these trained models differ by {metric.difference(d.difference)} ({row} less {reference}); with {reason} nothing is "
            "said about the methods."
        )
    metric = metric.fit_difference(d)
    interval = describe_interval(d, metric)
    if side:
        found = f"{count_units(d.n_defined, unit)}, {min((count for count in d.seeds if count), default=0)} seeds"
        return f"{row} is {'better' if side > 0 else 'worse'} than {reference} on {data}: {metric.difference(d.difference)} ({interval}; {found})."
    return describe_no_difference(pair, data, d, metric)


def describe_margin(
    pair: tuple[str, str], d: CorrectedDifference, metric: PrintedMetric, *, planned: bool
) -> str:
    """Non-inferiority of the first of `pair` and equivalence as sentences; empty without a margin,
    and where no verdict is allowed.

    `planned`: the margin stands in the recipe, and so was set before training.
    """
    one = d.against_margin
    if one is None or one.worst is None or explain_no_verdict(d) is not None:
        return ""
    metric = metric.fit(
        d.total_se, one.margin, max(one.worst, 0.0) if one.non_inferior else one.worst
    )
    (row, reference), margin = pair, metric.number(one.margin)
    unit = metric.suffix
    if one.non_inferior:
        when = "set before training" if planned else "given with this comparison"
        text = f"{row} is non-inferior to {reference}: at most {metric.number(max(one.worst, 0.0))}{unit} worse (margin {margin}, {when})."
    else:
        reaches = metric.number(-metric.sign * one.worst)
        text = f"Non-inferiority is not shown: the interval reaches {reaches} (margin {metric.number(-metric.sign * one.margin)})."
    return (
        f"{text} {row} and {reference} are equivalent within ± {margin}{unit}."
        if one.equivalent
        else text
    )


def describe_margin_of_models(
    pair: tuple[str, str], data: str, d: CorrectedDifference, metric: PrintedMetric
) -> str:
    """Where the interval of two trained models lies against a margin; their methods are not called
    non-inferior or equivalent. Empty without a margin.
    """
    one, bounds = d.against_margin, (d.corrected_lo, d.corrected_hi)
    if one is None:
        return ""
    fitted = metric.fit(d.total_se, *bounds, one.margin)
    margin = f"the margin of {fitted.number(-metric.sign * one.margin, signed=True)}{fitted.suffix} (given with this comparison)"
    if one.worst is None or None in bounds:
        return f"Without an interval nothing is said on {margin}."
    lies = {
        "non-inferior": f"stays {'above' if metric.sign > 0 else 'below'}",
        "inferior": "lies wholly beyond",
        "inconclusive": "reaches beyond",
    }
    return (
        f"On {data} the 95 % confidence interval of these two trained models, {pair[0]} less {pair[1]}, is {fitted.number(bounds[0])} to "
        f"{fitted.number(bounds[1])} and {lies[_place_against_margin(d, metric)]} {margin}."
    )


def describe_no_difference(
    pair: tuple[str, str], data: str, d: CorrectedDifference, metric: PrintedMetric
) -> str:
    """The sentence where the corrected interval holds 0."""
    metric = metric.fit_difference(d)
    reach = metric.difference(
        max(abs(d.corrected_lo or 0.0), abs(d.corrected_hi or 0.0))
    ).removeprefix("+")
    return (
        f"No significant difference between {pair[0]} and {pair[1]} on {data}: {metric.difference(d.difference)} "
        f"({describe_interval(d, metric)}); differences of up to {reach} either way cannot be excluded."
    )


def name_verdict(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The verdict as one cell of a table."""
    words = {1: "better", -1: "worse", 0: "no significant difference"}
    return (explain_no_verdict(d) or words[significance_sign(d) * metric.sign]).removeprefix(
        "no CI: "
    )


def name_margin_verdict(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """The verdict against a margin as one cell of a table: inferior where the whole interval of
    `find_margin_interval` is beyond it.
    """
    reason = explain_no_verdict(d)
    if d.against_margin is None or d.against_margin.worst is None or reason is not None:
        return (reason or "no interval").removeprefix("no CI: ")
    return _place_against_margin(d, metric)


def _place_against_margin(d: CorrectedDifference, metric: PrintedMetric) -> str:
    """Non-inferior, inferior or inconclusive, by where the interval of a difference with a margin
    lies.
    """
    one, (lo, hi) = d.against_margin, find_margin_interval(d, metric) or (-math.inf, math.inf)
    least = -hi if metric.sign > 0 else lo  # how much worse it is at least
    return (
        "inconclusive"
        if one is None
        else "non-inferior"
        if one.non_inferior
        else "inferior"
        if least > one.margin
        else "inconclusive"
    )


def find_margin_interval(
    d: CorrectedDifference, metric: PrintedMetric
) -> tuple[float, float] | None:
    """The interval of a difference in the family of the tests of non-inferiority, which is not that
    of the tests against 0; None without one.
    """
    one = d.against_margin
    if one is None or one.worst is None or d.difference is None:
        return None
    reach = one.worst + metric.sign * d.difference
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
    values = {
        name: one.metrics.get(str(scores.main), MetricValue())
        for name, one in scores.baselines.items()
    }
    found = {
        name: one.difference
        for name, one in values.items()
        if one.difference is not None and one.difference.difference is not None
    }
    return correct_pairs(found)


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
    interval = (
        describe_interval(lift, metric)
        if lift.corrected_lo is not None
        else str(explain_no_verdict(lift) or "no CI")
    )
    return f"{metric.difference(lift.difference)} over {lift.baseline.replace('_', ' ')} ({interval.removeprefix('no CI: ')})"


def compare_models(scores: Scores) -> dict[str, CorrectedDifference]:
    """The main metric of an encoder less that of each row of trained models that it is compared
    with, as one family; else of one seed each.
    """
    if scores.compared_rows is not None:
        return dict(scores.compared_rows)
    values = {
        name: one.metrics.get(str(scores.main), MetricValue()).difference
        for name, one in (scores.compared or {}).items()
    }
    return correct_pairs(
        {name: d for name, d in values.items() if d is not None and d.difference is not None},
        (1, 1),
    )


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
    ones where it reaches as much as the model, else behind them.
    """
    silent = [name for name, d in family.items() if explain_no_verdict(d) is not None]
    found = [
        ("exceeded", [name for name, d in family.items() if significance_sign(d) * sign < 0]),
        ("unclear", [name for name in silent if sign * (family[name].difference or 0.0) <= 0]),
        (
            "equal",
            [name for name, d in family.items() if name not in silent and not significance_sign(d)],
        ),
        ("unclear", silent),
        ("exceeds", list(family)),
    ]
    case, names = next((case, names) for case, names in found if names)
    return case, min(names, key=lambda name: sign * (family[name].difference or 0.0))


def judge_baselines(scores: TaskScores, data: str) -> BaselineVerdict:
    """The verdict on one trained model and its strongest baselines, in the main metric."""
    metric, family = PrintedMetric(str(scores.main), scores.unit), compare_baselines(scores)
    if not family:
        return BaselineVerdict("none", "", "")
    case, name = find_closest(family, metric.sign)
    d, words = family[name], f"the {name.replace('_', ' ')} baseline"
    unit, start = (
        scores.intervals.unit if scores.intervals else "subject",
        f"{words[0].upper()}{words[1:]}",
    )
    metric = metric.fit_difference(d)
    own, value = (
        metric.number(scores.metrics[metric.name].value),
        metric.number(scores.baselines[name].metrics[metric.name].value),
    )
    seed = "; this is one trained model, and nothing is said about the method"
    if case == "exceeded":
        over = f"Holm-corrected over {len(family)} baselines; {count_units(d.n_defined, unit)}"
        interval = f"95 % confidence interval {print_bounds(d, metric)}, {over}"
        text = f"{start} beats this trained model on {data} in {NAMES[metric.name]}: {value} and {own}, a difference of "
        text += f"{metric.difference(d.difference)} ({interval}){seed}."
    elif case == "unclear":
        why = str(explain_no_verdict(d)).removeprefix("no CI: ")
        ahead = metric.sign * (d.difference or 0.0) > 0
        behind = (
            f", the closest of {count_units(len(family), 'baseline')},"
            if ahead and len(family) > 1
            else ""
        )
        text = f"{start}{behind} reaches {value} in {NAMES[metric.name]} on {data}, this trained model {own}; no verdict ({why})."
    elif case == "equal":
        text = describe_no_difference(("this trained model", words), data, d, metric)
    else:
        text = f"It exceeds all {len(family)} baselines; the closest is {words}: {metric.difference(d.difference)}"
        text += f" ({describe_interval(d, metric)}){seed}."
    return BaselineVerdict(case, name, text)
