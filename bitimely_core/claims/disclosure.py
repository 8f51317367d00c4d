"""Which counts of a build of sequences may be printed, and what may be derived from them
(`privacy`, docs/privacy.md).

All pages and messages on one token set use the same decisions, so that no two of them together
print what each of them withholds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import polars as pl

from bitimely_core import privacy
from bitimely_core.claims.codes import phecode_sort_key
from bitimely_core.claims.shortcut_baselines import ALL, Prevalence, ShortcutRow, count_prevalence
from bitimely_core.claims.splits import SPLITS
from bitimely_core.schemas.ingest import AgreementCell
from bitimely_core.schemas.scores import (
    Baseline,
    ClassScores,
    MetricValue,
    RiskGroup,
    RiskGroups,
    Scores,
    Uncertainty,
)
from bitimely_core.schemas.tokens import (
    CohortFlow,
    PrevalenceCount,
    SequenceManifest,
    SequenceStatistics,
    ShortcutScores,
)
from bitimely_core.tokens.sequences import EventSequences, count_carriers, count_splits
from bitimely_core.types import parse_horizon

Key = tuple[str, ...]
PARTS = (*SPLITS, ALL)
FEW_CODES = ("left out", "few codes")
Carriers = Mapping[str, Mapping[str, tuple[int, int]]]
"""Label -> split or all -> subjects with the best single code of the label, among the cases and
among the others.
"""


class CountSystem:
    """Counts of a token set with the sums that link them."""

    def __init__(self) -> None:
        self.counts: dict[Key, int] = {}
        self.sums: list[tuple[Key, tuple[Key, ...]]] = []
        self.unprinted: set[Key] = set()
        # of the printed counts that may be withheld beside small ones
        self.order: dict[Key, int] = {}

    def add_printed(self, key: Key, count: int, order: int | None = None) -> None:
        """A count that is printed somewhere, unless it is withheld."""
        self.counts[key] = count
        if order is not None:
            self.order[key] = order

    def add_difference(self, total: Key, parts: Sequence[Key], rest: Key) -> None:
        """The rest of a total, which is nowhere printed."""
        self.counts[rest] = self.counts[total] - sum(self.counts[part] for part in parts)
        self.unprinted.add(rest)
        self.sums.append((total, (*parts, rest)))

    def add_sum(self, total: Key, parts: Sequence[Key]) -> None:
        """A total all of whose parts are in the system."""
        if self.counts[total] == sum(self.counts[part] for part in parts):
            self.sums.append((total, tuple(parts)))

    def find_withheld(self) -> frozenset[Key]:
        """`privacy.find_withheld` of the system."""
        return privacy.find_withheld(self.counts, self.sums, self.unprinted, self.order)


@dataclass(frozen=True, kw_only=True)
class CountDisclosure:
    """Decisions on the counts of a token set."""

    withheld: frozenset[Key] = frozenset()
    carriers: Carriers | None = None  # None: scores of single codes are printed
    exact: bool = True  # --small-counts

    def get(self, count: int, *key: str) -> int | None:
        """The count, None if it is withheld."""
        return None if key in self.withheld else count

    def has_counts(self, label: str, stage: str, part: str = ALL) -> bool:
        """Whether subjects and cases of a label are printed, so that scores of it may be."""
        return not {(label, stage, part, kind) for kind in ("known", "cases")} & self.withheld

    def get_score(self, score: float | None, label: str, part: str = ALL) -> float | None:
        """A score of the sequence length."""
        return (
            score
            if self.exact
            else privacy.round_score(score)
            if self.has_counts(label, "after", part)
            else None
        )

    def get_code_score(self, scores: ShortcutScores, label: str, part: str = ALL) -> float | None:
        """The score of the best single code: only with enough people with and without the code in
        and out of the cases.
        """
        score = scores.best.count.get(part) if scores.best else None
        if self.carriers is None or label not in self.carriers:
            return self.get_score(score, label, part) if self.exact else None
        subjects, cases = scores.subjects.get(part, 0), scores.cases.get(part, 0)
        own, others = self.carriers[label].get(part, (0, 0))
        return (
            self.get_score(score, label, part)
            if privacy.has_open_table(own, cases, own + others, subjects)
            else None
        )


def open_disclosure(folder: Path) -> CountDisclosure:
    """The decisions on the token set in `folder`, which may not fit into memory."""
    manifest = SequenceManifest.read(folder)
    if manifest.options.small_counts:
        return CountDisclosure()
    audit = count_splits(folder)
    splits = {part: int(found["windows"]) for part, found in audit.items()}
    if manifest.base:
        return CountDisclosure(
            withheld=link_counts(
                splits, _count_labels(folder, manifest), None, folder, "all"
            ).find_withheld(),
            exact=False,
        )
    statistics = SequenceStatistics.load(folder / "statistics.json")
    system = link_counts(
        splits, statistics.prevalence["after"], statistics, folder, get_denominator(manifest)
    )
    best = {label: scores.best.phecode for label, scores in statistics.leaks.items() if scores.best}
    return CountDisclosure(
        withheld=system.find_withheld(), carriers=count_carriers(folder, best), exact=False
    )


def has_withheld_labels(folder: Path) -> bool:
    """Whether the token set in `folder` has a label some of whose counts after the filters are
    withheld.
    """
    return any(len(key) == 4 and key[1] == "after" for key in open_disclosure(folder).withheld)


def _count_labels(folder: Path, manifest: SequenceManifest) -> Prevalence:
    """Label -> split -> sequences with a label, cases."""
    labels = {f"y_{name}": name for name in manifest.class_names}
    frame = pl.concat(
        [pl.read_parquet(folder / name, columns=["split", *labels]) for name in manifest.shards]
    )
    values = {name: frame[column].fill_null(-1).to_numpy() for column, name in labels.items()}
    return count_prevalence(values, frame["split"].cast(pl.String).to_numpy())


def get_denominator(manifest: SequenceManifest) -> str:
    """Reference group of the prevalence ratios: all or controls."""
    return str((manifest.options.model_extra or {}).get("denominator", "all"))


def link_counts(
    splits: Mapping[str, int],
    after: Prevalence,
    statistics: SequenceStatistics | None,
    folder: Path,
    denominator: str,
) -> CountSystem:
    """The counts of subjects, or of sequences, that the pages of a token set print, and those that
    could be computed from them.

    `splits`: sequences by split; `after`: of each label and split. `statistics` are None for
    sequences up to prediction times.
    """
    system = CountSystem()
    system.add_printed(("out", ALL), sum(splits.values()), 1)
    for part, n in splits.items():
        system.add_printed(("out", part), n)
    system.add_sum(("out", ALL), [("out", part) for part in splits])
    if statistics is not None:
        system.add_printed(("in",), statistics.funnel.subjects_in, 0)
        system.add_printed(("no birth",), statistics.funnel.no_birth)
        system.add_difference(("in",), [("out", ALL)], ("excluded",))
        system.add_difference(("excluded",), [("no birth",)], ("few codes",))
    for label, counts in after.items():
        for part in PARTS:
            known, cases = ((label, "after", part, kind) for kind in ("known", "cases"))
            rank = {"validation": 3, "train": 4, "test": 5, ALL: 7}[part]
            system.add_printed(known, counts[part].subjects, rank)
            system.add_printed(cases, counts[part].cases, rank)
            system.add_difference(known, [cases], (label, "after", part, "others"))
            system.add_difference(("out", part), [known], (label, "after", part, "unknown"))
        for kind in ("known", "cases"):
            system.add_sum(
                (label, "after", ALL, kind), [(label, "after", part, kind) for part in SPLITS]
            )
        if statistics is not None:
            _link_label(system, label, statistics.prevalence["before"][label])
    if statistics is not None:
        ratios = (
            pl.read_parquet(folder / "ratios.parquet")
            .group_by("target")
            .agg(pl.col("n_case", "n_ref").first())
        )
        for label, cases, reference in ratios.iter_rows():
            for kind, n in (
                ("known", reference + cases * (denominator == "controls")),
                ("cases", cases),
            ):
                system.add_printed((label, "ratio", "train", kind), n, 6)
                system.add_difference(
                    (label, "before", "train", kind),
                    [(label, "ratio", "train", kind)],
                    (label, "unobserved", "train", kind),
                )
        _link_agreement(system, statistics.agreement)
        if statistics.cohort is not None:
            _link_flow(system, statistics.cohort, next(iter(after)))
    return system


def _link_label(system: CountSystem, label: str, before: Mapping[str, PrevalenceCount]) -> None:
    """The counts of a label before the filters."""
    for part in (ALL, *SPLITS):
        known, cases, others = (
            (label, "before", part, kind) for kind in ("known", "cases", "others")
        )
        printed = {ALL: 2, "train": 6}.get(part)
        for key, n in ((known, before[part].subjects), (cases, before[part].cases)):
            system.add_printed(key, n, printed)
            if printed is None:
                system.unprinted.add(key)
        system.add_difference(known, [cases], others)
        for kind in ("cases", "others"):
            system.add_difference(
                (label, "before", part, kind),
                [(label, "after", part, kind)],
                (label, "excluded", part, kind),
            )
    for kind in ("known", "cases"):
        system.add_sum(
            (label, "before", ALL, kind), [(label, "before", part, kind) for part in SPLITS]
        )
    system.add_difference(
        ("in",), [(label, "before", ALL, "known")], (label, "before", ALL, "unknown")
    )
    gone = [(label, "excluded", ALL, kind) for kind in ("cases", "others")]
    system.add_difference(("excluded",), gone, (label, "excluded", ALL, "unknown"))


def _link_flow(system: CountSystem, flow: CohortFlow, label: str) -> None:
    """The steps of the choice of a cohort, from all subjects to those whose label is known."""
    before: Key = ("in",)
    for step in flow.steps:
        left, out = ("left", step.reason), ("left out", step.reason)
        system.add_printed(left, step.left, 1)
        system.add_printed(out, step.left_out, 2)
        system.add_sum(before, [left, out])
        before = left
    system.add_sum(before, [(label, "before", ALL, "known")])
    system.add_printed(FEW_CODES, system.counts[before] - system.counts["out", ALL], 2)
    system.add_sum(before, [FEW_CODES, ("out", ALL)])


class FlowRow(NamedTuple):
    """A step of the choice of a cohort; None: withheld, or none."""

    step: str
    left_out: int | None
    left: int | None


def flow_table(statistics: SequenceStatistics, disclosure: CountDisclosure) -> list[FlowRow]:
    """All subjects, those left out and left at each step, last the members with the outcome."""
    flow, out = statistics.cohort, statistics.funnel.subjects_out
    assert flow is not None
    (label,) = statistics.prevalence["before"]
    few = flow.steps[-1].left - out
    return [
        FlowRow("all subjects", None, disclosure.get(flow.subjects, "in")),
        *(
            FlowRow(
                step.text,
                disclosure.get(step.left_out, "left out", step.reason),
                disclosure.get(step.left, "left", step.reason),
            )
            for step in flow.steps
        ),
        FlowRow(
            "too few codes up to the index day for a sequence",
            disclosure.get(few, *FEW_CODES),
            disclosure.get(out, "out", ALL),
        ),
        FlowRow(
            f"members of the cohort with the outcome ({label})",
            None,
            disclosure.get(flow.cases, label, "before", ALL, "cases"),
        ),
    ]


def _link_agreement(system: CountSystem, cells: list[AgreementCell]) -> None:
    """Cells of label rules against labels of the source; their margins may be the counts of these
    labels.
    """
    for (rule, flag), n in group_agreement(cells).items():
        keys = {cell: (rule, flag, cell) for cell in n}
        for cell, count in n.items():
            system.add_printed(keys[cell], count, 2)
        for label, parts in ((rule, ("tp", "fp")), (flag, ("tp", "fn"))):
            if (label, "before", ALL, "cases") in system.counts:
                system.add_sum((label, "before", ALL, "cases"), [keys[cell] for cell in parts])
                system.add_sum((label, "before", ALL, "known"), list(keys.values()))


def group_agreement(cells: list[AgreementCell]) -> dict[tuple[str, str], dict[str, int]]:
    """(rule, flag) -> tp, fp, fn, tn."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for cell in cells:
        found.setdefault((cell.rule, cell.flag), dict.fromkeys(("tp", "fp", "fn", "tn"), 0))[
            cell.cell
        ] = cell.n
    return dict(sorted(found.items()))


def shortcut_table(
    statistics: SequenceStatistics, disclosure: CountDisclosure
) -> list[ShortcutRow]:
    """One row per label: average precision of chance, of the sequence length and of the best single
    code, before and after the filters.

    None: undefined, or withheld by `disclosure`.
    """
    return [
        {
            "label": label,
            "cases": disclosure.get(scores.cases["all"], label, "after", "all", "cases"),
            "prevalence before": statistics.prevalence["before"][label]["all"].prevalence
            if disclosure.has_counts(label, "before")
            else None,
            "prevalence (chance)": scores.prevalence["all"]
            if disclosure.has_counts(label, "after")
            else None,
            "length alone": disclosure.get_score(scores.length["all"], label),
            "best single code": disclosure.get_code_score(scores, label),
            "which": scores.best.phecode if scores.best else None,
            "length alone, test": disclosure.get_score(scores.length.get("test"), label, "test"),
            "single code, test": disclosure.get_code_score(scores, label, "test"),
            "largest possible ratio": statistics.max_attainable.get(label)
            if disclosure.has_counts(label, "before", "train")
            else None,
        }
        for label, scores in statistics.leaks.items()
    ]


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """A row of the table of selected PheCodes; None: withheld."""

    label: str
    code: str
    numbers: tuple[float | None, float | None, float | None]  # ratio with its interval
    # cases with the code, cases, reference with the code, reference
    counts: tuple[int | None, int | None, int | None, int | None]


def list_ratio_rows(sequences: EventSequences, disclosure: CountDisclosure) -> list[RatioRow]:
    """The selected PheCodes by label: the printed ratios in falling order, then those that are
    withheld by code, which shows no order.
    """
    table = pl.read_parquet(sequences.folder / "ratios.parquet").filter("selected")
    controls = get_denominator(sequences.manifest) == "controls"
    tables = {}  # (label, code) -> cases with it, cases, subjects with it, subjects
    for row in table.iter_rows(named=True):
        a, cases, known_with, known = (
            row[name] for name in ("n_case_with", "n_case", "n_ref_with", "n_ref")
        )
        tables[row["target"], row["code"]] = (
            a,
            cases,
            known_with + a * controls,
            known + cases * controls,
        )
    closed = (
        set()
        if disclosure.exact
        else {key for key, of in tables.items() if not privacy.has_open_table(*of)}
    )
    # the row of another label would show too much
    narrow = {code for label, code in closed if _is_narrow(*tables[label, code])}
    rows = []
    for row in table.iter_rows(named=True):
        label, code = row["target"], row["code"]
        own = disclosure.has_counts(label, "ratio", "train")
        counts = [
            disclosure.get(row["n_case"], label, "ratio", "train", "cases"),
            disclosure.get(row["n_ref"], label, "ratio", "train", "known"),
        ]
        if controls and not own:
            counts = [None, None]
        is_open = own and (label, code) not in closed and code not in narrow
        numbers = (row["ratio"], row["lo"], row["hi"]) if is_open else (None, None, None)
        cells = (
            row["n_case_with"] if is_open else None,
            counts[0],
            row["n_ref_with"] if is_open else None,
            counts[1],
        )
        rows.append(RatioRow(label=label, code=code, numbers=numbers, counts=cells))
    return sorted(
        rows,
        key=lambda row: (
            row.label,
            row.counts[0] is None or row.numbers[0] is None,
            -(row.numbers[0] or 0.0),
            phecode_sort_key(row.code),
        ),
    )


def _is_narrow(a: int, cases: int, known_with: int, known: int) -> bool:
    """Whether the margins of a two by two table leave a cell of 1 to 10 too few values."""
    others, without = known - cases, known - known_with
    cells = (
        (a, cases, known_with),
        (cases - a, cases, without),
        (known_with - a, others, known_with),
        (others - known_with + a, others, without),
    )
    return any(
        privacy.is_small(cell)
        and privacy.count_feasible(margin, other, known, cell) < privacy.FEASIBLE
        for cell, margin, other in cells
    )


# ---- scores of models


# of a label: with its support they show the cells of its confusion matrix
THRESHOLDED = ("precision", "recall", "f1")
OF_THRESHOLDS = ("macro_f1", "accuracy")  # of all labels
AREAS = ("auroc", "auprc")  # of a label, its mean and that of all decisions
CONSTANT = ("majority", "prior")  # baselines whose scores are functions of the counts alone
DIFFERENCES = ("difference", "p")
Estimate = TypeVar("Estimate", bound=Uncertainty)
HIDDEN = MetricValue(n_defined=None, undefined_reason=privacy.WITHHELD)


def protect_scores(scores: Scores, sequences: EventSequences) -> Scores:
    """The scores as they are written: without counts of few people, and without or with fewer
    digits where they could be computed from scores.

    A label with a withheld count has no scores, and one other label none either, so that a mean
    over labels does not show them.
    """
    disclosure = open_disclosure(sequences.folder)
    empty = privacy.is_small(scores.n) or privacy.is_small(scores.n_subjects)
    if scores.task == "survival" and not disclosure.exact:
        return _protect_times(scores)
    if disclosure.exact or scores.task != "multilabel":
        return (
            scores
            if disclosure.exact or not empty
            else scores.model_copy(update={"n": None, "n_subjects": None})
        )
    closed = {
        name
        for name, one in scores.by_class.items()
        if empty
        or not disclosure.has_counts(name, "after", scores.split)
        or privacy.is_small(one.subjects)
    }
    cells = {
        name
        for name, one in scores.by_class.items()
        if name in closed or _has_few_in_confusion(one, scores.n or 0)
    }
    few_rows = set(closed)
    defined = {
        name
        for name, one in scores.by_class.items()
        if one.auroc.value is not None or one.auprc.value is not None
    }
    if len(few_rows & defined) == 1 and defined - few_rows:
        few_rows.add(
            min(defined - few_rows, key=lambda name: (scores.by_class[name].support or 0, name))
        )
    none = bool(closed) and (empty or len(scores.by_class) == 1)
    of_one = (
        {name for name in scores.metrics if name.startswith(AREAS)}
        if len(few_rows & defined) == 1
        else set()
    )  # mean of a single label

    def protect(
        metrics: Mapping[str, MetricValue], *, constant: bool = False
    ) -> dict[str, MetricValue]:
        hidden = (
            metrics.keys()
            if none or (constant and closed)
            else {*OF_THRESHOLDS, *of_one}
            if cells
            else of_one
        )
        return {
            name: HIDDEN if name in hidden else _round_metric(metric) if closed else metric
            for name, metric in metrics.items()
        }

    by_class = {}
    for name, one in scores.by_class.items():
        hidden = [*THRESHOLDED] * (name in cells) + [*AREAS] * (name in few_rows)
        gone = (
            {"support": None, "subjects": None, "base_rate": None, "unknown": None}
            if name in closed
            else {}
        )
        by_class[name] = one.model_copy(update={**dict.fromkeys(hidden, HIDDEN), **gone})

    def protect_baselines(found: Mapping[str, Baseline]) -> dict[str, Baseline]:
        out = {}
        for name, baseline in found.items():
            kept = {
                label: of
                for label, of in (baseline.by_class or {}).items()
                if label not in few_rows
            }
            own = None if baseline.by_class is None else kept
            out[name] = baseline.model_copy(
                update={
                    "metrics": protect(baseline.metrics, constant=name in CONSTANT),
                    "by_class": own,
                }
            )
        return out

    notices = list(map(privacy.round_message, scores.notices))
    n = {
        "notices": notices,
        "n": None if empty else scores.n,
        "n_subjects": None if empty else scores.n_subjects,
        "intervals": None if empty else scores.intervals,
    }
    baselines, compared = (
        protect_baselines(scores.baselines),
        scores.compared and protect_baselines(scores.compared),
    )
    changed: dict[str, object] = {
        "metrics": protect(scores.metrics),
        "by_class": by_class,
        "baselines": baselines,
        "compared": compared,
        **n,
    }
    if scores.comparison is not None and (closed or cells):
        kept_pairs = (
            {}
            if none
            else {
                k: _round_estimate(v, (*DIFFERENCES, "first", "second"))
                for k, v in scores.comparison.metrics.items()
                if k not in {*OF_THRESHOLDS, *of_one}
            }
        )
        # it names counts of rows
        sentence = scores.comparison.sentence if scores.main in kept_pairs and not closed else None
        changed["comparison"] = scores.comparison.model_copy(
            update={"metrics": kept_pairs, "sentence": sentence}
        )
    if closed or cells:
        changed["remarks"] = [
            f"No confidence intervals: {privacy.WITHHELD}."
            if one.startswith("No conf") and empty
            else one
            for one in scores.remarks
        ]
        changed["notices"] = [*notices, privacy.NOTICE]
    return scores.model_copy(update=changed)


def _protect_times(scores: Scores) -> Scores:
    """Scores of times to event: counts by risk group without those of few people; a label with few
    events has no scores, and neither have the means over labels, from which they could be computed.
    """
    found = {
        label: _protect_groups(groups, scores.n or 0)
        for label, groups in (scores.risk_groups or {}).items()
    }
    closed = {label for label, (_, is_open) in found.items() if not is_open}
    by_class = {}
    for name, one in scores.by_class.items():
        gone: dict[str, object] = {"support": None, "subjects": None, "unknown": None}
        own = ("auroc", "c_index", "brier")
        hidden = parse_horizon(name)[0] in closed
        values = {
            key: HIDDEN if hidden else _round_metric(value)
            for key in own
            if (value := getattr(one, key)) is not None
        }
        by_class[name] = one.model_copy(update={**gone, **values})

    def protect(metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        return {
            name: HIDDEN if closed else _round_metric(metric) for name, metric in metrics.items()
        }

    few = privacy.is_small(scores.n) or privacy.is_small(scores.n_subjects)
    changed: dict[str, object] = {
        "metrics": protect(scores.metrics),
        "by_class": by_class,
        "baselines": {
            name: one.model_copy(update={"metrics": protect(one.metrics)})
            for name, one in scores.baselines.items()
        },
        "risk_groups": {label: groups for label, (groups, _) in found.items()},
        "comparison": None if closed else scores.comparison,
        "notices": [*map(privacy.round_message, scores.notices), privacy.NOTICE],
        **({"n": None, "n_subjects": None, "intervals": None} if few else {}),
    }
    return scores.model_copy(update=changed)


def _protect_groups(found: RiskGroups, out: int) -> tuple[RiskGroups, bool]:
    """The groups of `out` subjects as they are printed, and whether the events at all horizons may
    be known; tenths only where they cost no count of the thirds.
    """
    thirds, is_open = _withhold_groups(
        found.model_copy(update={"deciles": None if found.deciles is None else []}), out
    )
    if not found.deciles:
        return thirds, is_open
    both, _ = _withhold_groups(found, out)
    return both if both.groups == thirds.groups else thirds, is_open


def _withhold_groups(found: RiskGroups, out: int) -> tuple[RiskGroups, bool]:
    """`_protect_groups` of thirds and tenths together."""
    system = CountSystem()
    system.add_printed(("out",), out)
    tenths = [(f"d{g}", group) for g, group in enumerate(found.deciles or [])]
    for g, group in [*enumerate(found.groups), *tenths]:
        first = 10 * isinstance(g, str)  # tenths are withheld before thirds
        system.add_printed(("n", str(g)), group.n or 0, 4 - first)
        for k, point in enumerate(group.points):
            at = (str(g), str(k))
            before = (str(g), str(k - 1))
            system.add_printed(("risk", *at), point.at_risk or 0, 1 - first)
            system.add_printed(("events", *at), point.events or 0, 2 - first)
            system.add_difference(("n", str(g)), [("risk", *at), ("events", *at)], ("gone", *at))
            system.add_difference(
                ("risk", *before) if k else ("n", str(g)), [("risk", *at)], ("left", *at)
            )
            if k:
                system.add_difference(("events", *at), [("events", *before)], ("new", *at))
    system.add_difference(("out",), [("n", str(g)) for g in range(len(found.groups))], ("unknown",))
    _link_tenths(system, found)
    withheld = system.find_withheld()
    groups, deciles = list[RiskGroup](), list[RiskGroup]()
    for g, group in [*enumerate(found.groups), *tenths]:
        points = []
        for k, point in enumerate(group.points):
            risk, events = (
                None if (what, str(g), str(k)) in withheld else n
                for what, n in (("risk", point.at_risk), ("events", point.events))
            )
            none = (
                {"incidence": None, "lo": None, "hi": None}
                if risk is None or events is None
                else {}
            )
            points.append(point.model_copy(update={"at_risk": risk, "events": events, **none}))
        n = None if ("n", str(g)) in withheld else group.n
        made = group.model_copy(
            update={
                "points": points,
                "n": n,
                "predicted": group.predicted if n is not None else None,
            }
        )
        (deciles if isinstance(g, str) else groups).append(made)
    days = {point.day: k for k, point in enumerate(found.groups[0].points)} if found.groups else {}
    sums = [
        sum(group.points[days[day]].events or 0 for group in found.groups)
        for day in found.horizons
        if day in days
    ]
    changed = {"groups": groups, **({"deciles": deciles} if found.deciles is not None else {})}
    return found.model_copy(update=changed), not any(map(privacy.is_small, sums))


def _link_tenths(system: CountSystem, found: RiskGroups) -> None:
    """What the counts of thirds and tenths by the same risk tell of each other: of the people
    between two limits in their order.
    """
    last = (
        {point.day: str(k) for k, point in enumerate(found.groups[0].points)}
        if found.groups
        else {}
    )
    for what, h, day in [
        ("n", "", 0.0),
        *(
            (what, str(h), day)
            for h, day in enumerate(found.horizons)
            for what in ("risk", "events")
        ),
    ]:
        at = ((last[day],), (h,)) if h else ((), ())
        parts = [[((what, str(g), *at[0]), group.n or 0) for g, group in enumerate(found.groups)]]
        parts.append(
            [((what, f"d{g}", *at[1]), group.n or 0) for g, group in enumerate(found.deciles or [])]
        )
        ends = [list(accumulate(n for _, n in one)) for one in parts]
        cells: dict[Key, list[Key]] = {key: [] for one in parts for key, _ in one}
        for end in sorted({*ends[0], *ends[1]}) if all(ends) else []:
            open_parts = [one[bisect_left(of, end)][0] for one, of in zip(parts, ends, strict=True)]
            closed = [key for key, of in zip(open_parts, ends, strict=True) if end in of]
            cell: Key = ("between", what, h, str(end)) if cells[closed[0]] else closed[0]
            if cells[closed[0]]:
                system.add_difference(closed[0], cells[closed[0]], cell)
            for key in set(open_parts) - {cell}:
                cells[key].append(cell)
            for key in closed[1:]:
                system.add_sum(key, cells[key])


def _has_few_in_confusion(one: ClassScores, n: int) -> bool:
    """Whether decisions on a label have a cell of 1 to 10 people."""
    recall, precision, support = one.recall.value, one.precision.value, one.support or 0
    hits = round((recall or 0.0) * support)
    found = round(hits / precision) if precision else None
    known = n - (one.unknown or 0)
    if found is None:  # none right: the number found is not known
        return True
    return not privacy.has_open_table(hits, found, support, known)


def _round_metric(metric: MetricValue) -> MetricValue:
    """A mean over labels with few digits, and without reasons that name counts."""
    rounded = _round_estimate(metric, ("value",))
    return rounded.model_copy(
        update={"difference": metric.difference and _round_estimate(metric.difference, DIFFERENCES)}
    )


def _round_estimate(found: Estimate, names: tuple[str, ...]) -> Estimate:
    ends = {name: privacy.round_score(getattr(found, name)) for name in ("se", "lo", "hi", *names)}
    reason = found.undefined_reason and "no CI: too few rows of a label"
    return found.model_copy(
        update={
            **ends,
            "n_defined": None,
            "undefined_reason": reason,
            **({"df": None} if "df" in type(found).model_fields else {}),
        }
    )
