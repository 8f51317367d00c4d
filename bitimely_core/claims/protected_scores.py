"""Scores of models on sequences as they are written: without counts of few people, and without or
with fewer digits where such counts could be computed from scores (docs/privacy.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from bitimely_core import privacy
from bitimely_core.claims.disclosure import CountDisclosure, CountSystem, Key, open_disclosure
from bitimely_core.schemas.scores import (
    Baseline,
    ClassScores,
    Comparison,
    LabelCalibration,
    MetricValue,
    RiskGroup,
    RiskGroups,
    RiskPoint,
    Scores,
    Uncertainty,
)
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.types import parse_horizon

# of a label: with its support they show the cells of its confusion matrix
THRESHOLDED = ("precision", "recall", "f1")
OF_THRESHOLDS = ("macro_f1", "accuracy")  # of all labels
AREAS = ("auroc", "auprc")  # of a label, its mean and that of all decisions
OF_TIMES = ("auroc", "c_index", "brier")  # of a label at a horizon
CONSTANT = ("majority", "prior")  # baselines whose scores are functions of the counts alone
OF_RISKS = ("slope", "intercept", "brier")
DIFFERENCES = ("difference", "p")
T = TypeVar("T")
Estimate = TypeVar("Estimate", bound=Uncertainty)
HIDDEN = MetricValue(n_defined=None, undefined_reason=privacy.WITHHELD)
HIDDEN_SIZE = {"n": None, "n_subjects": None, "intervals": None}
HIDDEN_COUNTS = {"support": None, "subjects": None, "unknown": None}
# of the counts of a risk group: which is withheld first beside a small one
GROUP_ORDER = {"risk": 1, "events": 2, "n": 4}
FIRST = 10  # tenths are withheld before thirds


def protect_scores(scores: Scores, sequences: EventSequences) -> Scores:
    """The scores as they are written: without counts of few people, and without or with fewer
    digits where they could be computed from scores.

    A label with a withheld count has no scores, and one other label none either, so that a mean
    over labels does not show them.
    """
    disclosure = open_disclosure(sequences.folder)
    if disclosure.exact:
        return scores
    if scores.task == "survival":
        return _protect_times(scores)
    if scores.task == "multilabel":
        return _protect_labels(scores, _choose_labels(scores, disclosure))
    return scores.model_copy(update=HIDDEN_SIZE) if _has_few_subjects(scores) else scores


def _has_few_subjects(scores: Scores) -> bool:
    return privacy.is_small(scores.n) or privacy.is_small(scores.n_subjects)


def _map_items(function: Callable[[str, T], T], values: Mapping[str, T]) -> dict[str, T]:
    """The values by name, each after `function` of its name and itself."""
    return {name: function(name, value) for name, value in values.items()}


# ---- several labels


@dataclass(frozen=True, kw_only=True)
class WithheldLabels:
    """What is withheld of the scores of several labels."""

    closed: set[str]  # labels without any score or count
    undecided: set[str]  # labels without precision, recall and F1
    unranked: set[str]  # labels without AUROC and AUPRC
    has_means: bool  # whether any mean over labels is written
    has_areas: bool  # whether means of AUROC and AUPRC are: not those of a single withheld label

    def hides(self, metric: str) -> bool:
        """Whether a metric of all labels is withheld."""
        if metric in OF_THRESHOLDS and self.undecided:
            return True
        return not self.has_means or (metric.startswith(AREAS) and not self.has_areas)

    def protect_metric(self, name: str, metric: MetricValue) -> MetricValue:
        """A metric of all labels: with few digits beside a closed label."""
        if self.hides(name):
            return HIDDEN
        return _round_metric(metric) if self.closed else metric

    def protect_label(self, name: str, label: ClassScores) -> ClassScores:
        """The scores of one label."""
        changed: dict[str, object] = {}
        if name in self.undecided:
            changed |= dict.fromkeys(THRESHOLDED, HIDDEN)
        if name in self.unranked:
            changed |= dict.fromkeys(AREAS, HIDDEN)
        if name in self.closed:
            changed |= {**HIDDEN_COUNTS, "base_rate": None}
        return label.model_copy(update=changed)

    def protect_baseline(self, name: str, baseline: Baseline) -> Baseline:
        """The scores of a baseline; none if they show the counts of a closed label."""
        metrics = _map_items(self.protect_metric, baseline.metrics)
        if name in CONSTANT and self.closed:
            metrics = dict.fromkeys(metrics, HIDDEN)
        by_class = baseline.by_class and {
            label: areas for label, areas in baseline.by_class.items() if label not in self.unranked
        }
        return baseline.model_copy(update={"metrics": metrics, "by_class": by_class})

    def protect_comparison(self, comparison: Comparison, main: str | None) -> Comparison:
        """The differences to another run of the metrics that are written, with few digits."""
        metrics = {
            name: _round_estimate(pair, (*DIFFERENCES, "first", "second"))
            for name, pair in comparison.metrics.items()
            if not self.hides(name)
        }
        changed: dict[str, object] = {"metrics": metrics}
        if self.closed or main not in metrics:
            changed["sentence"] = None  # it names counts of rows
        return comparison.model_copy(update=changed)


def _choose_labels(scores: Scores, disclosure: CountDisclosure) -> WithheldLabels:
    """What is withheld of multi-label scores: that from which a count of few people follows."""
    few, by_class = _has_few_subjects(scores), scores.by_class
    closed, undecided, ranked = set[str](), set[str](), set[str]()
    for name, label in by_class.items():
        is_open = disclosure.has_counts(name, "after", scores.split)
        if few or not is_open or privacy.is_small(label.subjects):
            closed.add(name)
        if _has_few_in_confusion(label, scores.n or 0):
            undecided.add(name)
        if (label.auroc.value, label.auprc.value) != (None, None):
            ranked.add(name)
    unranked = _add_companion(closed, ranked, by_class)
    return WithheldLabels(
        closed=closed,
        undecided=undecided | closed,
        unranked=unranked,
        has_means=not closed or not (few or len(by_class) == 1),
        has_areas=len(unranked & ranked) != 1,
    )


def _add_companion(
    closed: set[str], ranked: set[str], by_class: Mapping[str, ClassScores]
) -> set[str]:
    """The closed labels; where one of them alone has an area, which the mean would show, with the
    other label of the fewest cases.
    """
    others = ranked - closed
    if len(closed & ranked) != 1 or not others:
        return closed
    return closed | {min(others, key=lambda name: (by_class[name].support or 0, name))}


def _has_few_in_confusion(label: ClassScores, n: int) -> bool:
    """Whether decisions on a label, of `n` rows, have a cell of 1 to 10 people."""
    recall, precision, support = label.recall.value, label.precision.value, label.support or 0
    if not precision:  # no decision is right: the number of decisions is not known
        return True
    hits = round((recall or 0.0) * support)
    n_known = n - (label.unknown or 0)
    return not privacy.has_open_table(hits, support, round(hits / precision), n_known)


def _protect_labels(scores: Scores, withheld: WithheldLabels) -> Scores:
    """Multi-label scores without what is withheld."""
    changed: dict[str, object] = {
        "metrics": _map_items(withheld.protect_metric, scores.metrics),
        "by_class": _map_items(withheld.protect_label, scores.by_class),
        "baselines": _map_items(withheld.protect_baseline, scores.baselines),
        "risk_calibration": scores.risk_calibration
        and {
            name: _protect_calibration(label)
            for name, label in scores.risk_calibration.items()
            if name not in withheld.unranked
        },
        "compared": scores.compared and _map_items(withheld.protect_baseline, scores.compared),
    }
    notices, few = list(map(privacy.round_message, scores.notices)), _has_few_subjects(scores)
    if withheld.undecided:
        notices.append(privacy.NOTICE)
        if scores.comparison is not None:
            changed["comparison"] = withheld.protect_comparison(scores.comparison, scores.main)
    if withheld.undecided and few:
        reason = f"No confidence intervals: {privacy.WITHHELD}."
        changed["remarks"] = [
            reason if line.startswith("No conf") else line for line in scores.remarks
        ]
    return scores.model_copy(update={**changed, "notices": notices, **(HIDDEN_SIZE if few else {})})


def _protect_calibration(label: LabelCalibration) -> LabelCalibration:
    """The calibration of a label with few digits."""
    metrics = {name: _round_metric(getattr(label, name)) for name in OF_RISKS}
    shares = {name: privacy.round_score(getattr(label, name)) for name in ("observed", "predicted")}
    after = label.recalibrated and _protect_calibration(label.recalibrated)
    return label.model_copy(update={**metrics, **shares, "recalibrated": after})


# ---- times to event


def _protect_times(scores: Scores) -> Scores:
    """Scores of times to event: counts by risk group without those of few people; a label with few
    events has no scores, and neither have the means over labels, from which they could be computed.
    """
    risk_groups, n = scores.risk_groups or {}, scores.n or 0
    closed = {label for label, groups in risk_groups.items() if has_few_events(groups)}

    def protect_label(name: str, label: ClassScores) -> ClassScores:
        """The scores of a label at a horizon, without counts."""
        metrics = {key: getattr(label, key) for key in OF_TIMES}
        defined = {key: metric for key, metric in metrics.items() if metric is not None}
        hidden = parse_horizon(name)[0] in closed
        return label.model_copy(update={**HIDDEN_COUNTS, **_hide_or_round(defined, hidden=hidden)})

    def protect_baseline(name: str, baseline: Baseline) -> Baseline:
        metrics = _hide_or_round(baseline.metrics, hidden=bool(closed))
        return baseline.model_copy(update={"metrics": metrics})

    changed: dict[str, object] = {
        "metrics": _hide_or_round(scores.metrics, hidden=bool(closed)),
        "by_class": _map_items(protect_label, scores.by_class),
        "baselines": _map_items(protect_baseline, scores.baselines),
        "risk_groups": {label: protect_groups(groups, n) for label, groups in risk_groups.items()},
        "comparison": None if closed else scores.comparison,
        "notices": [*map(privacy.round_message, scores.notices), privacy.NOTICE],
        **(HIDDEN_SIZE if _has_few_subjects(scores) else {}),
    }
    return scores.model_copy(update=changed)


def _hide_or_round(metrics: Mapping[str, MetricValue], *, hidden: bool) -> dict[str, MetricValue]:
    """Metrics that are all withheld, or have few digits."""
    return {name: HIDDEN if hidden else _round_metric(metric) for name, metric in metrics.items()}


def has_few_events(groups: RiskGroups) -> bool:
    """Whether 1 to 10 people have the event up to some horizon."""
    events = Counter[float]()
    for group in groups.groups:
        events.update({point.day: point.events or 0 for point in group.points})
    return any(privacy.is_small(events[day]) for day in groups.horizons)


def protect_groups(groups: RiskGroups, n: int) -> RiskGroups:
    """The groups of `n` subjects as they are printed: tenths only where they cost no count of the
    thirds.
    """
    without = groups.model_copy(update={"deciles": None if groups.deciles is None else []})
    thirds = _withhold_groups(without, n)
    if not groups.deciles:
        return thirds
    both = _withhold_groups(groups, n)
    return both if both.groups == thirds.groups else thirds


def _withhold_groups(groups: RiskGroups, n: int) -> RiskGroups:
    """`protect_groups` of thirds and tenths together."""
    thirds = {str(g): group for g, group in enumerate(groups.groups)}
    tenths = {f"d{g}": group for g, group in enumerate(groups.deciles or [])}
    system = CountSystem()
    system.add_printed(("out",), n)
    for key, group in thirds.items():
        _link_group(system, key, group, 0)
    for key, group in tenths.items():
        _link_group(system, key, group, FIRST)
    system.add_difference(("out",), [("n", key) for key in thirds], ("unknown",))
    _link_tenths(system, groups)
    withheld = system.find_withheld()
    first, second = (
        [_withhold_group(group, key, withheld) for key, group in part.items()]
        for part in (thirds, tenths)
    )
    deciles = None if groups.deciles is None else second
    return groups.model_copy(update={"groups": first, "deciles": deciles})


def _link_group(system: CountSystem, key: str, group: RiskGroup, first: int) -> None:
    """The counts of a group day by day; `first` brings them forward in the order of withholding."""
    size: Key = ("n", key)
    system.add_printed(size, group.n or 0, GROUP_ORDER["n"] - first)
    for k, point in enumerate(group.points):
        day, before = (key, str(k)), (key, str(k - 1))
        risk, events = ("risk", *day), ("events", *day)
        system.add_printed(risk, point.at_risk or 0, GROUP_ORDER["risk"] - first)
        system.add_printed(events, point.events or 0, GROUP_ORDER["events"] - first)
        system.add_difference(size, [risk, events], ("gone", *day))
        system.add_difference(("risk", *before) if k else size, [risk], ("left", *day))
        if k:
            system.add_difference(events, [("events", *before)], ("new", *day))


def _withhold_group(group: RiskGroup, key: str, withheld: frozenset[Key]) -> RiskGroup:
    """A group without its withheld counts and what is computed from them."""
    points = [
        _withhold_point(point, (key, str(k)), withheld) for k, point in enumerate(group.points)
    ]
    n = None if ("n", key) in withheld else group.n
    predicted = None if n is None else group.predicted
    return group.model_copy(update={"points": points, "n": n, "predicted": predicted})


def _withhold_point(point: RiskPoint, day: Key, withheld: frozenset[Key]) -> RiskPoint:
    """The counts of a group on a day, and its incidence where both are printed."""
    at_risk = None if ("risk", *day) in withheld else point.at_risk
    events = None if ("events", *day) in withheld else point.events
    changed: dict[str, float | None] = {"at_risk": at_risk, "events": events}
    if at_risk is None or events is None:
        changed |= dict.fromkeys(("incidence", "lo", "hi"))
    return point.model_copy(update=changed)


def _link_tenths(system: CountSystem, groups: RiskGroups) -> None:
    """What the counts of thirds and tenths show of each other: both divide the same people in the
    order of their risk.
    """
    if not (groups.groups and groups.deciles):
        return
    sizes = [[group.n or 0 for group in part] for part in (groups.groups, groups.deciles)]

    def link(count: str, horizon: str, third: Key, tenth: Key) -> None:
        """Link a count of the thirds and the tenths; their keys end with these parts."""
        thirds, tenths = (list(accumulate(numbers)) for numbers in sizes)
        divisions = [
            {(count, str(g), *third): end for g, end in enumerate(thirds)},
            {(count, f"d{g}", *tenth): end for g, end in enumerate(tenths)},
        ]
        _link_divisions(system, (count, horizon), divisions)

    link("n", "", (), ())
    places = {point.day: str(k) for k, point in enumerate(groups.groups[0].points)}
    for h, day in enumerate(groups.horizons):
        for count in ("risk", "events"):
            # a tenth has a point at each horizon, a third more of them
            link(count, str(h), (places[day],), (str(h),))


def _link_divisions(system: CountSystem, name: Key, divisions: Sequence[Mapping[Key, int]]) -> None:
    """Link the parts of two divisions of the same people in one order.

    The limits of both cut the people into cells. A cell that begins and ends with a part is that
    part; others are differences, which are nowhere printed. A part is the sum of its cells.

    Args:
        system: has the counts of all parts.
        name: of this count; the keys of its cells begin with `between` and the name.
        divisions: key of each part, in order -> place in the order of people at which it ends.
    """
    limits = {**divisions[0], **divisions[1]}
    cells = defaultdict[Key, list[Key]](list)
    for end in sorted(set(limits.values())):
        parts = [
            next(part for part, limit in division.items() if limit >= end) for division in divisions
        ]
        ending, *others = (part for part in parts if limits[part] == end)
        cell = ending
        if cells[ending]:
            cell = ("between", *name, str(end))
            system.add_difference(ending, cells[ending], cell)
        for part in parts:
            if part != cell:
                cells[part].append(cell)
        for part in others:
            system.add_sum(part, cells[part])


# ---- numbers with few digits


def _round_metric(metric: MetricValue) -> MetricValue:
    """A mean over labels with few digits, and without reasons that name counts."""
    difference = metric.difference and _round_estimate(metric.difference, DIFFERENCES)
    return _round_estimate(metric, ("value",)).model_copy(update={"difference": difference})


def _round_estimate(estimate: Estimate, names: tuple[str, ...]) -> Estimate:
    """An estimate with few digits of `names` and of its interval, and without counts."""
    changed: dict[str, object] = {
        name: privacy.round_score(getattr(estimate, name)) for name in ("se", "lo", "hi", *names)
    }
    changed["undefined_reason"] = estimate.undefined_reason and "no CI: too few rows of a label"
    hidden = {"n_defined", "df"} & type(estimate).model_fields.keys()
    return estimate.model_copy(update={**changed, **dict.fromkeys(hidden)})
