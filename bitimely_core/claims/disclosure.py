"""Which counts of a build of sequences may be printed, and what may be derived from them
(`privacy`, docs/pophr.md).

All pages and messages on one token set use the same decisions, so that no two of them together
print what each of them withholds. `protected_scores` withholds in scores of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from bitimely_core import privacy
from bitimely_core.claims.codes import phecode_sort_key
from bitimely_core.claims.shortcut_baselines import ALL, Prevalence, ShortcutRow, count_prevalence
from bitimely_core.claims.subject_splits import SPLITS
from bitimely_core.schemas.ingest_records import AgreementCell
from bitimely_core.schemas.tokens import (
    CohortFlow,
    PrevalenceCount,
    SequenceManifest,
    SequenceStatistics,
    ShortcutScores,
)
from bitimely_core.tokens.sequences import EventSequences, count_carriers, count_splits

Key = tuple[str, ...]
PARTS = (*SPLITS, ALL)
SYNTHETIC = "synthetic-claims"
OPEN_LAYOUTS = ("synpuf",)  # DE-SynPUF is published synthetic data
FEW_CODES = ("left out", "few codes")
# of labels after the filters: which part is withheld first beside a small count
PART_ORDER = {"validation": 3, "train": 4, "test": 5, ALL: 7}
Carriers = Mapping[str, Mapping[str, tuple[int, int]]]
"""Label -> split or all -> subjects with the best single code of the label, among the cases and
among the others.
"""


def is_open_source(dataset: str, layout: str | None) -> bool:
    """Whether the people of a data set, whose files have this layout (option `source`), are
    synthetic: no count of them is withheld, unless that is asked for.
    """
    return dataset == SYNTHETIC or layout in OPEN_LAYOUTS


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

    def is_protected(self, withheld: frozenset[Key]) -> bool:
        """Whether every count of 1 to 10 keeps enough possible values beside what is printed."""
        return not privacy.find_narrow(self.counts, self.sums, self.unprinted, withheld)


@dataclass(frozen=True, kw_only=True)
class CountDisclosure:
    """Decisions on the counts of a token set."""

    withheld: frozenset[Key] = frozenset()
    carriers: Carriers = field(default_factory=dict)
    exact: bool = True  # --small-counts

    def get(self, count: int, *key: str) -> int | None:
        """The count, None if it is withheld."""
        return None if key in self.withheld else count

    def has_counts(self, label: str, stage: str, part: str = ALL) -> bool:
        """Whether subjects and cases of a label are printed, so that scores of it may be."""
        return not {(label, stage, part, kind) for kind in ("known", "cases")} & self.withheld

    def get_score(self, score: float | None, label: str, part: str = ALL) -> float | None:
        """A score of the sequence length, with few digits unless small counts are shown; None if it
        is withheld.
        """
        if self.exact:
            return score
        return privacy.round_score(score) if self.has_counts(label, "after", part) else None

    def get_code_score(self, scores: ShortcutScores, label: str, part: str = ALL) -> float | None:
        """The score of the best single code: only with enough people with and without the code in
        and out of the cases.
        """
        if scores.best is None:
            return None
        score = scores.best.count[part]
        if self.exact:
            return score
        cases_with, others_with = self.carriers[label][part]
        table = (cases_with, scores.cases[part], cases_with + others_with, scores.subjects[part])
        return self.get_score(score, label, part) if privacy.has_open_table(*table) else None


def open_disclosure(folder: Path) -> CountDisclosure:
    """The decisions on the token set in `folder`, which may not fit into memory."""
    manifest = SequenceManifest.read(folder)
    if manifest.options.small_counts:
        return CountDisclosure()
    system = _link_sizes({part: int(row["windows"]) for part, row in count_splits(folder).items()})
    if manifest.base:
        for label, counts in _count_labels(folder, manifest).items():
            _link_label(system, label, counts)
        return CountDisclosure(withheld=system.find_withheld(), exact=False)
    statistics = SequenceStatistics.load(folder / "statistics.json")
    _link_statistics(system, statistics, _count_ratio_groups(folder, manifest))
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
    columns = ["split", *(f"y_{name}" for name in manifest.class_names)]
    parts = [
        pl.read_parquet(folder / name, columns=columns, glob=False) for name in manifest.shards
    ]
    return count_prevalence(pl.concat(parts), manifest.class_names)


def _has_controls(manifest: SequenceManifest) -> bool:
    """Whether the reference group of the prevalence ratios are the controls, and not all
    subjects.
    """
    return (manifest.options.model_extra or {}).get("denominator") == "controls"


def _count_ratio_groups(folder: Path, manifest: SequenceManifest) -> list[tuple[str, int, int]]:
    """Label, known subjects and cases behind the prevalence ratios of each label."""
    ratios = pl.read_parquet(folder / "ratios.parquet", glob=False)
    groups = ratios.group_by("target", maintain_order=True).agg(pl.col("n_case", "n_ref").first())
    controls = _has_controls(manifest)
    return [
        (label, reference + cases * controls, cases)
        for label, cases, reference in groups.iter_rows()
    ]


# ---- the counts and the sums that link them


def _link_sizes(splits: Mapping[str, int]) -> CountSystem:
    """The number of sequences, in all and by split."""
    system = CountSystem()
    system.add_printed(("out", ALL), sum(splits.values()), 1)
    for part, n in splits.items():
        system.add_printed(("out", part), n)
    system.add_sum(("out", ALL), [("out", part) for part in splits])
    return system


def _link_label(system: CountSystem, label: str, after: Mapping[str, PrevalenceCount]) -> None:
    """The counts of a label after the filters."""
    for part in PARTS:
        labelled, cases = (label, "after", part, "known"), (label, "after", part, "cases")
        system.add_printed(labelled, after[part].subjects, PART_ORDER[part])
        system.add_printed(cases, after[part].cases, PART_ORDER[part])
        system.add_difference(labelled, [cases], (label, "after", part, "others"))
        system.add_difference(("out", part), [labelled], (label, "after", part, "unknown"))
    _link_splits(system, label, "after")


def _link_splits(system: CountSystem, label: str, stage: str) -> None:
    """The sums of a label over the splits."""
    for kind in ("known", "cases"):
        system.add_sum((label, stage, ALL, kind), [(label, stage, part, kind) for part in SPLITS])


def _link_statistics(
    system: CountSystem, statistics: SequenceStatistics, ratio_groups: list[tuple[str, int, int]]
) -> None:
    """What the page of a token set prints beside the number of sequences, and what could be
    computed from it.
    """
    system.add_printed(("in",), statistics.funnel.subjects_in, 0)
    system.add_printed(("no birth",), statistics.funnel.no_birth)
    system.add_difference(("in",), [("out", ALL)], ("excluded",))
    system.add_difference(("excluded",), [("no birth",)], ("few codes",))
    after = statistics.prevalence["after"]
    for label, counts in after.items():
        _link_label(system, label, counts)
        _link_excluded(system, label, statistics.prevalence["before"][label])
    for label, n_known, n_cases in ratio_groups:
        for kind, n in (("known", n_known), ("cases", n_cases)):
            total, ratio, rest = (
                (label, stage, "train", kind) for stage in ("before", "ratio", "unobserved")
            )
            system.add_printed(ratio, n, 6)
            system.add_difference(total, [ratio], rest)
    _link_agreement(system, statistics.agreement)
    if statistics.cohort is not None:
        _link_flow(system, statistics.cohort, next(iter(after)))


def _link_excluded(system: CountSystem, label: str, before: Mapping[str, PrevalenceCount]) -> None:
    """The counts of a label before the filters, and of those whom the filters exclude."""
    for part in (ALL, *SPLITS):
        labelled, cases, others = (
            (label, "before", part, kind) for kind in ("known", "cases", "others")
        )
        order = {ALL: 2, "train": 6}.get(part)
        for key, n in ((labelled, before[part].subjects), (cases, before[part].cases)):
            system.add_printed(key, n, order)
            if order is None:
                system.unprinted.add(key)
        system.add_difference(labelled, [cases], others)
        for kind in ("cases", "others"):
            total, remaining, rest = (
                (label, stage, part, kind) for stage in ("before", "after", "excluded")
            )
            system.add_difference(total, [remaining], rest)
    _link_splits(system, label, "before")
    labelled, unlabelled = ((label, "before", ALL, kind) for kind in ("known", "unknown"))
    system.add_difference(("in",), [labelled], unlabelled)
    *excluded, rest = ((label, "excluded", ALL, kind) for kind in ("cases", "others", "unknown"))
    system.add_difference(("excluded",), excluded, rest)


def _link_flow(system: CountSystem, flow: CohortFlow, label: str) -> None:
    """The steps of the choice of a cohort, from all subjects to those whose label is known."""
    before: Key = ("in",)
    for step in flow.steps:
        remaining, left_out = ("left", step.reason), ("left out", step.reason)
        system.add_printed(remaining, step.left, 1)
        system.add_printed(left_out, step.left_out, 2)
        system.add_sum(before, [remaining, left_out])
        before = remaining
    system.add_sum(before, [(label, "before", ALL, "known")])
    system.add_printed(FEW_CODES, system.counts[before] - system.counts["out", ALL], 2)
    system.add_sum(before, [FEW_CODES, ("out", ALL)])


def _link_agreement(system: CountSystem, cells: list[AgreementCell]) -> None:
    """Cells of label rules against labels of the source; their margins may be the counts of these
    labels.
    """
    for (rule, flag), table in group_agreement(cells).items():
        keys = {cell: (rule, flag, cell) for cell in table}
        for cell, count in table.items():
            system.add_printed(keys[cell], count, 2)
        for label, positive in ((rule, ("tp", "fp")), (flag, ("tp", "fn"))):
            if (label, "before", ALL, "cases") in system.counts:
                system.add_sum((label, "before", ALL, "cases"), [keys[cell] for cell in positive])
                system.add_sum((label, "before", ALL, "known"), list(keys.values()))


# ---- tables of the page


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
    few_codes = "too few codes up to the index day for a sequence"
    outcome = f"members of the cohort with the outcome ({label})"
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
            few_codes,
            disclosure.get(flow.steps[-1].left - out, *FEW_CODES),
            disclosure.get(out, "out", ALL),
        ),
        FlowRow(outcome, None, disclosure.get(flow.cases, label, "before", ALL, "cases")),
    ]


def group_agreement(cells: list[AgreementCell]) -> dict[tuple[str, str], dict[str, int]]:
    """(rule, flag) -> tp, fp, fn, tn."""
    pairs = sorted({(cell.rule, cell.flag) for cell in cells})
    tables = {pair: {"tp": 0, "fp": 0, "fn": 0, "tn": 0} for pair in pairs}
    for cell in cells:
        tables[cell.rule, cell.flag][cell.cell] = cell.n
    return tables


def shortcut_table(
    statistics: SequenceStatistics, disclosure: CountDisclosure
) -> list[ShortcutRow]:
    """One row per label: average precision of chance, of the sequence length and of the best single
    code, before and after the filters.

    None: undefined, or withheld by `disclosure`.
    """
    table: list[ShortcutRow] = []
    for label, scores in statistics.leaks.items():
        before = statistics.prevalence["before"][label][ALL].prevalence
        chance, bound = scores.prevalence[ALL], statistics.max_attainable.get(label)
        has_bound = disclosure.has_counts(label, "before", "train")
        table.append(
            {
                "label": label,
                "cases": disclosure.get(scores.cases[ALL], label, "after", ALL, "cases"),
                "prevalence before": before if disclosure.has_counts(label, "before") else None,
                "prevalence (chance)": chance if disclosure.has_counts(label, "after") else None,
                "length alone": disclosure.get_score(scores.length[ALL], label),
                "best single code": disclosure.get_code_score(scores, label),
                "which": scores.best.phecode if scores.best else None,
                "length alone, test": disclosure.get_score(scores.length["test"], label, "test"),
                "single code, test": disclosure.get_code_score(scores, label, "test"),
                "largest possible ratio": bound if has_bound else None,
            }
        )
    return table


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
    ratios = pl.read_parquet(sequences.folder / "ratios.parquet", glob=False).filter("selected")
    controls = _has_controls(sequences.manifest)
    closed = set[tuple[str, str]]() if disclosure.exact else _find_closed_ratios(ratios, controls)
    rows = []
    for ratio in ratios.iter_rows(named=True):
        label, code = ratio["target"], ratio["code"]
        has_counts = disclosure.has_counts(label, "ratio", "train")
        n_case = disclosure.get(ratio["n_case"], label, "ratio", "train", "cases")
        n_ref = disclosure.get(ratio["n_ref"], label, "ratio", "train", "known")
        if controls and not has_counts:
            n_case = n_ref = None
        if has_counts and (label, code) not in closed:
            numbers = (ratio["ratio"], ratio["lo"], ratio["hi"])
            counts = (ratio["n_case_with"], n_case, ratio["n_ref_with"], n_ref)
        else:
            numbers, counts = (None, None, None), (None, n_case, None, n_ref)
        rows.append(RatioRow(label=label, code=code, numbers=numbers, counts=counts))
    return sorted(rows, key=_order_ratio)


def _order_ratio(row: RatioRow) -> tuple[Any, ...]:
    ratio = row.numbers[0]
    return row.label, ratio is None, -(ratio or 0.0), phecode_sort_key(row.code)


def _find_closed_ratios(ratios: pl.DataFrame, controls: bool) -> set[tuple[str, str]]:
    """(label, code) of the ratios that are withheld.

    A table of cases and carriers with a cell of 1 to 10 people is withheld. Where its margins leave
    such a cell too few values, the rows of its code at all labels are withheld, since they show the
    number of carriers.
    """
    tables = {}  # (label, code) -> cases with the code, cases, subjects with it, subjects
    for row in ratios.iter_rows(named=True):
        cases_with, cases = row["n_case_with"], row["n_case"]
        carriers, subjects = row["n_ref_with"], row["n_ref"]
        if controls:
            carriers, subjects = carriers + cases_with, subjects + cases
        tables[row["target"], row["code"]] = (cases_with, cases, carriers, subjects)
    closed = {key for key, table in tables.items() if not privacy.has_open_table(*table)}
    narrow = {code for label, code in closed if _is_narrow(*tables[label, code])}
    return closed | {(label, code) for label, code in tables if code in narrow}


def _is_narrow(cases_with: int, cases: int, carriers: int, subjects: int) -> bool:
    """Whether the margins of a two by two table leave a cell of 1 to 10 too few values."""
    others, without = subjects - cases, subjects - carriers
    cells = (
        (cases_with, cases, carriers),
        (cases - cases_with, cases, without),
        (carriers - cases_with, others, carriers),
        (others - carriers + cases_with, others, without),
    )
    return any(
        privacy.is_small(cell)
        and privacy.count_feasible(margin, other, subjects, cell) < privacy.FEASIBLE
        for cell, margin, other in cells
    )
