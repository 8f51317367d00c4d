"""Which counts of a build of sequences may be printed, and what may be derived from them (`privacy`, docs/privacy.md).

All pages and messages on one token set use the same decisions, so that no two of them together print what each of them withholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from bitimely_core import privacy
from bitimely_core.claims.codes import phecode_sort_key
from bitimely_core.claims.shortcut_baselines import ALL, Prevalence, ShortcutRow, count_prevalence
from bitimely_core.claims.splits import SPLITS
from bitimely_core.schemas import AgreementCell, PrevalenceCount, SequenceManifest, SequenceStatistics, ShortcutScores
from bitimely_core.tokens.sequences import EventSequences, count_carriers, count_splits

Key = tuple[str, ...]
PARTS = (*SPLITS, ALL)
Carriers = Mapping[str, Mapping[str, tuple[int, int]]]
"""Label -> split or all -> subjects with the best single code of the label, among the cases and among the others."""


class CountSystem:
    """Counts of a token set with the sums that link them."""

    def __init__(self) -> None:
        self.counts: dict[Key, int] = {}
        self.sums: list[tuple[Key, tuple[Key, ...]]] = []
        self.unprinted: set[Key] = set()
        self.order: dict[Key, int] = {}  # of the printed counts that may be withheld beside small ones

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
        return score if self.exact else privacy.round_score(score) if self.has_counts(label, "after", part) else None

    def get_code_score(self, scores: ShortcutScores, label: str, part: str = ALL) -> float | None:
        """The score of the best single code: only with enough people with and without the code in and out of the cases."""
        score = scores.best.count.get(part) if scores.best else None
        if self.carriers is None or label not in self.carriers:
            return self.get_score(score, label, part) if self.exact else None
        subjects, cases = scores.subjects.get(part, 0), scores.cases.get(part, 0)
        own, others = self.carriers[label].get(part, (0, 0))
        return self.get_score(score, label, part) if privacy.has_open_table(own, cases, own + others, subjects) else None


def open_disclosure(folder: Path) -> CountDisclosure:
    """The decisions on the token set in `folder`, which may not fit into memory."""
    manifest = SequenceManifest.read(folder)
    if manifest.options.small_counts:
        return CountDisclosure()
    audit = count_splits(folder)
    splits = {part: int(found["windows"]) for part, found in audit.items()}
    if manifest.base:
        return CountDisclosure(
            withheld=link_counts(splits, _count_labels(folder, manifest), None, folder, "all").find_withheld(), exact=False
        )
    statistics = SequenceStatistics.load(folder / "statistics.json")
    system = link_counts(splits, statistics.prevalence["after"], statistics, folder, get_denominator(manifest))
    best = {label: scores.best.phecode for label, scores in statistics.leaks.items() if scores.best}
    return CountDisclosure(withheld=system.find_withheld(), carriers=count_carriers(folder, best), exact=False)


def _count_labels(folder: Path, manifest: SequenceManifest) -> Prevalence:
    """Label -> split -> sequences with a label, cases."""
    labels = {f"y_{name}": name for name in manifest.class_names}
    frame = pl.concat([pl.read_parquet(folder / name, columns=["split", *labels]) for name in manifest.shards])
    values = {name: frame[column].fill_null(-1).to_numpy() for column, name in labels.items()}
    return count_prevalence(values, frame["split"].cast(pl.String).to_numpy())


def get_denominator(manifest: SequenceManifest) -> str:
    """Reference group of the prevalence ratios: all or controls."""
    return str((manifest.options.model_extra or {}).get("denominator", "all"))


def link_counts(
    splits: Mapping[str, int], after: Prevalence, statistics: SequenceStatistics | None, folder: Path, denominator: str
) -> CountSystem:
    """The counts of subjects, or of sequences, that the pages of a token set print, and those that could be computed from them.

    `splits`: sequences by split; `after`: of each label and split. `statistics` are None for sequences up to prediction times.
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
            system.add_sum((label, "after", ALL, kind), [(label, "after", part, kind) for part in SPLITS])
        if statistics is not None:
            _link_label(system, label, statistics.prevalence["before"][label])
    if statistics is not None:
        ratios = pl.read_parquet(folder / "ratios.parquet").group_by("target").agg(pl.col("n_case", "n_ref").first())
        for label, cases, reference in ratios.iter_rows():
            for kind, n in (("known", reference + cases * (denominator == "controls")), ("cases", cases)):
                system.add_printed((label, "ratio", "train", kind), n, 6)
                system.add_difference(
                    (label, "before", "train", kind), [(label, "ratio", "train", kind)], (label, "unobserved", "train", kind)
                )
        _link_agreement(system, statistics.agreement)
    return system


def _link_label(system: CountSystem, label: str, before: Mapping[str, PrevalenceCount]) -> None:
    """The counts of a label before the filters."""
    for part in (ALL, *SPLITS):
        known, cases, others = ((label, "before", part, kind) for kind in ("known", "cases", "others"))
        printed = {ALL: 2, "train": 6}.get(part)
        for key, n in ((known, before[part].subjects), (cases, before[part].cases)):
            system.add_printed(key, n, printed)
            if printed is None:
                system.unprinted.add(key)
        system.add_difference(known, [cases], others)
        for kind in ("cases", "others"):
            system.add_difference((label, "before", part, kind), [(label, "after", part, kind)], (label, "excluded", part, kind))
    for kind in ("known", "cases"):
        system.add_sum((label, "before", ALL, kind), [(label, "before", part, kind) for part in SPLITS])
    system.add_difference(("in",), [(label, "before", ALL, "known")], (label, "before", ALL, "unknown"))
    gone = [(label, "excluded", ALL, kind) for kind in ("cases", "others")]
    system.add_difference(("excluded",), gone, (label, "excluded", ALL, "unknown"))


def _link_agreement(system: CountSystem, cells: list[AgreementCell]) -> None:
    """Cells of label rules against labels of the source; their margins may be the counts of these labels."""
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
        found.setdefault((cell.rule, cell.flag), dict.fromkeys(("tp", "fp", "fn", "tn"), 0))[cell.cell] = cell.n
    return dict(sorted(found.items()))


def shortcut_table(statistics: SequenceStatistics, disclosure: CountDisclosure) -> list[ShortcutRow]:
    """One row per label: average precision of chance, of the sequence length and of the best single code, before and after the filters.

    None: undefined, or withheld by `disclosure`.
    """
    return [
        {
            "label": label,
            "cases": disclosure.get(scores.cases["all"], label, "after", "all", "cases"),
            "prevalence before": statistics.prevalence["before"][label]["all"].prevalence
            if disclosure.has_counts(label, "before")
            else None,
            "prevalence (chance)": scores.prevalence["all"] if disclosure.has_counts(label, "after") else None,
            "length alone": disclosure.get_score(scores.length["all"], label),
            "best single code": disclosure.get_code_score(scores, label),
            "which": scores.best.phecode if scores.best else None,
            "length alone, test": disclosure.get_score(scores.length.get("test"), label, "test"),
            "single code, test": disclosure.get_code_score(scores, label, "test"),
            "largest possible ratio": statistics.max_attainable.get(label) if disclosure.has_counts(label, "before", "train") else None,
        }
        for label, scores in statistics.leaks.items()
    ]


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """A row of the table of selected PheCodes; None: withheld."""

    label: str
    code: str
    numbers: tuple[float | None, float | None, float | None]  # ratio with its interval
    counts: tuple[int | None, int | None, int | None, int | None]  # cases with the code, cases, reference with the code, reference


def list_ratio_rows(sequences: EventSequences, disclosure: CountDisclosure) -> list[RatioRow]:
    """The selected PheCodes by label: the printed ratios in falling order, then those that are withheld by code, which shows no order."""
    table = pl.read_parquet(sequences.folder / "ratios.parquet").filter("selected")
    controls = get_denominator(sequences.manifest) == "controls"
    tables = {}  # (label, code) -> cases with it, cases, subjects with it, subjects
    for row in table.iter_rows(named=True):
        a, cases, known_with, known = (row[name] for name in ("n_case_with", "n_case", "n_ref_with", "n_ref"))
        tables[row["target"], row["code"]] = (a, cases, known_with + a * controls, known + cases * controls)
    closed = set() if disclosure.exact else {key for key, of in tables.items() if not privacy.has_open_table(*of)}
    narrow = {code for label, code in closed if _is_narrow(*tables[label, code])}  # the row of another label would show too much
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
        cells = (row["n_case_with"] if is_open else None, counts[0], row["n_ref_with"] if is_open else None, counts[1])
        rows.append(RatioRow(label=label, code=code, numbers=numbers, counts=cells))
    return sorted(
        rows,
        key=lambda row: (row.label, row.counts[0] is None or row.numbers[0] is None, -(row.numbers[0] or 0.0), phecode_sort_key(row.code)),
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
        privacy.is_small(cell) and privacy.count_feasible(margin, other, known, cell) < privacy.FEASIBLE for cell, margin, other in cells
    )
