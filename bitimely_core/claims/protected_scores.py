"""Scores of models on sequences as they are written: without counts of few people, and without or
with fewer digits where such counts could be computed from scores (docs/pophr.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import NamedTuple, TypeVar

from bitimely_core import privacy
from bitimely_core.claims.disclosure import CountDisclosure, CountSystem, Key, open_disclosure
from bitimely_core.claims.shortcut_baselines import ALL
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
from bitimely_core.types import drop_none, leave_out, parse_horizon

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
GROUP_ORDER = {"risk": 1, "events": 2}
FIRST = 10  # tenths are withheld before thirds
INCIDENCE = ("incidence", "lo", "hi")
# people in a group beside whose interval, in whole percents, five numbers of censored ones fit
LARGE = 110


def protect_scores(scores: Scores, sequences: EventSequences) -> Scores:
    """The scores as they are written: without counts of few people, and without or with fewer
    digits where they could be computed from scores.

    A label with a withheld count has no scores, and one other label none either, so that a mean
    over labels does not show them.
    """
    disclosure = open_disclosure(sequences.folder)
    if disclosure.exact:
        return scores
    return privacy.share_record(_withhold_linked(scores, disclosure))


def _withhold_linked(scores: Scores, disclosure: CountDisclosure) -> Scores:
    """The scores without what is computed from counts of few people, or shows them in a sum."""
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
        by_class = baseline.by_class and leave_out(baseline.by_class, self.unranked)
        return baseline.model_copy(update={"metrics": metrics, "by_class": by_class})

    def protect_comparison(self, comparison: Comparison, main: str | None) -> Comparison:
        """The differences to another run of the metrics that are written, with few digits."""
        rounded = _round_comparison(comparison)
        metrics = {name: pair for name, pair in rounded.metrics.items() if not self.hides(name)}
        changed: dict[str, object] = {"metrics": metrics}
        if self.closed or main not in metrics:
            changed["sentence"] = None  # it names counts of rows
        return rounded.model_copy(update=changed)


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
    notices, few = list(scores.notices), _has_few_subjects(scores)
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


@dataclass(frozen=True, kw_only=True)
class WithheldTimes:
    """What is withheld of the scores of times to event."""

    closed: set[str]  # labels without any score
    is_cut: bool  # whether a count by risk group is withheld

    def protect_metrics(self, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        """Means over labels: none beside a closed label, from which it could be computed."""
        return _hide_or_round(metrics, hidden=bool(self.closed))

    def protect_label(self, name: str, label: ClassScores) -> ClassScores:
        """The scores of a label at a horizon, without counts."""
        metrics = {key: getattr(label, key) for key in OF_TIMES}
        defined = drop_none(metrics)
        hidden = parse_horizon(name)[0] in self.closed
        return label.model_copy(update={**HIDDEN_COUNTS, **_hide_or_round(defined, hidden=hidden)})

    def protect_baseline(self, name: str, baseline: Baseline) -> Baseline:
        """The scores of a baseline; none if they show a withheld count."""
        hidden = bool(self.closed) or (name in CONSTANT and self.is_cut)
        metrics = _hide_or_round(baseline.metrics, hidden=hidden)
        return baseline.model_copy(update={"metrics": metrics})


def _protect_times(scores: Scores) -> Scores:
    """Scores of times to event: counts by risk group without those of few people; a label with few
    events has no scores, and neither have the means over labels, from which they could be computed.
    """
    risk_groups, n = scores.risk_groups or {}, scores.n or 0
    printed = {label: protect_groups(groups, n) for label, groups in risk_groups.items()}
    withheld = WithheldTimes(
        closed={label for label, groups in risk_groups.items() if has_few_events(groups)},
        is_cut=any(map(has_withheld, printed.values())),
    )
    changed: dict[str, object] = {
        "metrics": withheld.protect_metrics(scores.metrics),
        "by_class": _map_items(withheld.protect_label, scores.by_class),
        "baselines": _map_items(withheld.protect_baseline, scores.baselines),
        "compared": scores.compared and _map_items(withheld.protect_baseline, scores.compared),
        "risk_groups": printed,
        "comparison": None,
        "notices": [*scores.notices, privacy.NOTICE],
    }
    if scores.comparison and not withheld.closed:
        changed["comparison"] = _round_comparison(scores.comparison)
    if _has_few_subjects(scores):
        changed |= HIDDEN_SIZE
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


def has_withheld(groups: RiskGroups) -> bool:
    """Whether any count of the thirds is withheld."""
    points = list(chain.from_iterable(group.points for group in groups.groups))
    return not points or any(None in (point.at_risk, point.events) for point in points)


def protect_groups(groups: RiskGroups, n: int) -> RiskGroups:
    """The groups of `n` subjects as they are printed: tenths only where they cost no count of the
    thirds, and neither where a reader could compute a count of few people.

    A reader is taken to know the sizes of groups, which follow from `n`, and all events up to the
    longest horizon, which the page of the token set may print. Where the time of a few people is
    not known, so that sizes would show how many they are, sizes are withheld.
    """
    none = groups.model_copy(
        update={"groups": [], "deciles": None if groups.deciles is None else []}
    )
    cells = _cut_cells(groups)
    if any(privacy.is_small(group.n) for group in groups.groups):
        return none
    thirds = _withhold_groups(none.model_copy(update={"groups": groups.groups}), [], n)
    if thirds is None or not groups.deciles or any(privacy.is_small(cell.size) for cell in cells):
        return thirds or none
    both = _withhold_groups(groups, cells, n)
    return both if both is not None and both.groups == thirds.groups else thirds


GroupDay = tuple[RiskGroup, Key]  # a group, and the end of the keys of its counts on a day


class OverlapCell(NamedTuple):
    """Successive people in the order of their risk whom no limit of a third or a tenth divides."""

    parts: tuple[int, int]  # which third and which tenth
    start: int  # place of the first
    end: int  # behind the last

    @property
    def size(self) -> int:
        """Number of people."""
        return self.end - self.start


def _cut_cells(groups: RiskGroups) -> list[OverlapCell]:
    """The overlaps of thirds and tenths, which divide the same people in one order."""
    ends = [
        list(accumulate(group.n or 0 for group in part))
        for part in (groups.groups, groups.deciles or [])
    ]
    limits = sorted({0, *ends[0], *ends[1]})
    return [
        OverlapCell((bisect_left(ends[0], end), bisect_left(ends[1], end)), start, end)
        for start, end in pairwise(limits)
    ]


def _withhold_groups(groups: RiskGroups, cells: list[OverlapCell], n: int) -> RiskGroups | None:
    """`protect_groups` of thirds and tenths together; None where withholding does not suffice."""
    system = _link_groups(groups, cells)
    withheld = system.find_withheld()
    is_protected = system.is_protected(withheld)  # also from who knows the sizes
    sizes: list[Key] = [("n", str(g)) for g in range(len(groups.groups))]
    if privacy.is_small(n - sum(system.counts[size] for size in sizes)):
        withheld |= {key for key in system.counts if key[0] == "n"}
        system.add_printed(("out",), n)
        system.add_difference(("out",), sizes, ("unknown",))
    if not (is_protected and system.is_protected(withheld)):
        return None
    thirds = [_withhold_group(group, key, withheld) for key, group in _name_thirds(groups).items()]
    tenths = [_withhold_group(group, key, withheld) for key, group in _name_tenths(groups).items()]
    return groups.model_copy(
        update={"groups": thirds, "deciles": None if groups.deciles is None else tenths}
    )


def _name_thirds(groups: RiskGroups) -> dict[str, RiskGroup]:
    """The thirds by the name in the keys of their counts."""
    return {str(g): group for g, group in enumerate(groups.groups)}


def _name_tenths(groups: RiskGroups) -> dict[str, RiskGroup]:
    """The tenths, likewise."""
    return {f"d{g}": group for g, group in enumerate(groups.deciles or [])}


def _link_groups(groups: RiskGroups, cells: list[OverlapCell]) -> CountSystem:
    """The counts of thirds and tenths with all that links them."""
    thirds, tenths = _name_thirds(groups), _name_tenths(groups)
    system = CountSystem()
    for key, group in thirds.items():
        _link_group(system, key, group, 0)
    for key, group in tenths.items():
        _link_group(system, key, group, FIRST)
    last = [("events", key, str(len(group.points) - 1)) for key, group in thirds.items()]
    system.add_printed(("events", ALL), sum(system.counts[part] for part in last))
    system.add_sum(("events", ALL), last)
    places = {point.day: str(k) for k, point in enumerate(groups.groups[0].points)}
    for h, day in enumerate(groups.horizons if tenths else []):
        # a tenth has a point at each horizon, a third more of them
        divisions: list[list[GroupDay]] = [
            [(group, (key, place)) for key, group in part.items()]
            for part, place in ((thirds, places[day]), (tenths, str(h)))
        ]
        _link_cells(system, cells, divisions, str(h))
    return system


def _link_group(system: CountSystem, key: str, group: RiskGroup, first: int) -> None:
    """The counts of a group day by day; `first` brings them forward in the order of withholding."""
    size: Key = ("n", key)
    system.add_printed(size, group.n or 0)
    for k, point in enumerate(group.points):
        day, before = (key, str(k)), (key, str(k - 1))
        risk, events, gone = ("risk", *day), ("events", *day), ("gone", *day)
        system.add_printed(risk, point.at_risk or 0, GROUP_ORDER["risk"] - first)
        system.add_printed(events, point.events or 0, GROUP_ORDER["events"] - first)
        system.add_difference(size, [risk, events], gone)
        system.add_difference(("risk", *before) if k else size, [risk], ("left", *day))
        if k:
            system.add_difference(events, [("events", *before)], ("new", *day))
            system.add_difference(gone, [("gone", *before)], ("newly gone", *day))


def _count_up_to_limits(
    system: CountSystem, divisions: list[list[GroupDay]], name: str
) -> dict[int, int]:
    """People before each limit of a division -> their count of this name."""
    reached = {0: 0}
    for division in divisions:
        end = count = 0
        for group, day in division:
            end, count = end + (group.n or 0), count + system.counts[name, *day]
            reached[end] = count
    return reached


def _link_cells(
    system: CountSystem, cells: list[OverlapCell], divisions: list[list[GroupDay]], horizon: str
) -> None:
    """What the counts of both divisions on the day of a horizon show of the cells in which they
    overlap.
    """
    for name in ("risk", "events"):
        reached = _count_up_to_limits(system, divisions, name)
        for i, cell in enumerate(cells):
            key: Key = (name, "cell", str(i), horizon)
            system.counts[key] = reached[cell.end] - reached[cell.start]
            system.unprinted.add(key)
        for place, division in enumerate(divisions):
            for g, (_, day) in enumerate(division):
                inside = [i for i, cell in enumerate(cells) if cell.parts[place] == g]
                keys = [(name, "cell", str(i), horizon) for i in inside]
                system.add_sum((name, *day), keys)
    for i, cell in enumerate(cells):
        size: Key = ("n", "cell", str(i), horizon)
        risk, events, gone = ((name, *size[1:]) for name in ("risk", "events", "gone"))
        system.add_printed(size, cell.size)
        system.add_difference(size, [risk, events], gone)


def _withhold_group(group: RiskGroup, key: str, withheld: frozenset[Key]) -> RiskGroup:
    """A group without its withheld counts and what is computed from them."""
    n = None if ("n", key) in withheld else group.n
    points = [
        _withhold_point(point, group.n or 0, (key, str(k)), withheld)
        for k, point in enumerate(group.points)
    ]
    predicted = group.predicted and [round(risk, privacy.DECIMALS) for risk in group.predicted]
    return group.model_copy(update={"points": points, "n": n, "predicted": predicted})


def _withhold_point(point: RiskPoint, size: int, day: Key, withheld: frozenset[Key]) -> RiskPoint:
    """The counts of a group on a day, and its incidence in whole percents where both are printed
    and it leaves those who are gone without the event enough possible causes.
    """
    at_risk = None if ("risk", *day) in withheld else point.at_risk
    events = None if ("events", *day) in withheld else point.events
    changed: dict[str, float | None] = {"at_risk": at_risk, "events": events}
    is_share = size == (at_risk or 0) + (events or 0) and ("n", day[0]) not in withheld
    if at_risk is None or events is None or not (is_share or _has_open_incidence(point, size)):
        changed |= dict.fromkeys(INCIDENCE)
    elif not is_share:
        changed |= {name: round(getattr(point, name), 2) for name in INCIDENCE}
    return point.model_copy(update=changed)


def _has_open_incidence(point: RiskPoint, size: int) -> bool:
    """Whether an incidence in whole percents does not show how many of the people gone without the
    event were censored, and how many died.

    The more are censored, and the earlier, the larger it is; `fewest` were censored at least.
    """
    events, gone = point.events or 0, size - (point.at_risk or 0) - (point.events or 0)
    incidence = round(point.incidence or 0.0, 2) - 0.005
    fewest = max(0.0, size - events / incidence) if events and incidence > 0 else 0.0
    return size >= LARGE and (not gone or gone - ceil(fewest) + 1 >= privacy.FEASIBLE)


# ---- numbers with few digits


def _round_comparison(comparison: Comparison) -> Comparison:
    """A comparison with few digits."""
    metrics = {
        name: _round_estimate(pair, (*DIFFERENCES, "first", "second"))
        for name, pair in comparison.metrics.items()
    }
    return comparison.model_copy(update={"metrics": metrics})


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
