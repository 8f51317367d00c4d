"""Prevalence ratios and the PheCodes that they select (section 8). Counts are integers that add up
over shards; decisions are plain Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from typing import TypedDict

import numpy as np
import polars as pl

from bitimely_core.claims import codes
from bitimely_core.claims.distinct import sort_distinct

POPULATIONS = ("subjects", "observed")
DENOMINATORS = ("all", "controls")
Z = 1.96  # of a 95 % interval


@dataclass
class CodeCounts:
    """Counts for the selection. Counts of shards add up with `+`.

    Of training subjects with a label: `cases` and `known` by rule, `cases_with` and `known_with` by
    (rule, PheCode). Of all training
    subjects: `train_with` subjects and `records` by PheCode. Of all subjects: `carriers` by
    PheCode.
    """

    cases: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    cases_with: Counter[tuple[str, str]] = field(default_factory=Counter)
    known_with: Counter[tuple[str, str]] = field(default_factory=Counter)
    train_with: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    carriers: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: CodeCounts) -> CodeCounts:
        return CodeCounts(
            *(getattr(self, part.name) + getattr(other, part.name) for part in fields(self))
        )


class RatioCounts(TypedDict):
    """A prevalence ratio with its counts: cases and reference subjects, and those of them who carry
    the PheCode.
    """

    ratio: float
    n_case_with: int
    n_case: int
    n_ref_with: int
    n_ref: int


@dataclass(frozen=True, kw_only=True)
class PrevalenceRatio:
    """Prevalence of a PheCode among the cases of a label over that in the reference group."""

    ratio: float  # infinite when no reference subject carries it
    n_case_with: int
    n_case: int
    n_ref_with: int
    n_ref: int
    interval: tuple[float, float] | None  # 95 %
    selected: bool = False

    def counts(self) -> RatioCounts:
        """Ratio and the four counts."""
        return {
            "ratio": self.ratio,
            "n_case_with": self.n_case_with,
            "n_case": self.n_case,
            "n_ref_with": self.n_ref_with,
            "n_ref": self.n_ref,
        }


@dataclass(frozen=True, kw_only=True)
class CodeSelection:
    """PheCodes of the vocabulary in numeric order, and the ratios by which they were selected."""

    phecodes: list[str]
    ratios: dict[str, dict[str, PrevalenceRatio]]  # rule -> candidates in numeric order
    # rule -> upper bound of its ratios; None without case or reference subject
    max_attainable: dict[str, float | None]
    unseen: tuple[str, ...] = ()  # without selection: those of no training subject, read as [UNK]


def count_codes(
    records: pl.DataFrame,
    phecodes: Sequence[str],
    cohort: pl.DataFrame,
    names: Sequence[str],
    *,
    population: str = "subjects",
    frequency: bool = False,
) -> CodeCounts:
    """The counts of one shard.

    `records`: subject, day, phecode (index into `phecodes`). `cohort`: with `split` and `y_<name>`.
    `population`: subjects (all of `cohort`) or observed (those with a record). `frequency`: count
    the records of training subjects as well.
    """
    flags = _flag_subjects(cohort, names)
    counts = CodeCounts()
    for row in _count_carriers(records, phecodes, flags).iter_rows(named=True):
        phecode = row["phecode"]
        counts.carriers[phecode], counts.train_with[phecode] = row["all"], row["train"]
        for name in names:
            counts.cases_with[name, phecode], counts.known_with[name, phecode] = (
                row[f"case_{name}"],
                row[f"known_{name}"],
            )
    if frequency:
        in_training = flags["train"].gather(records["subject"]) == 1
        amounts = records.filter(in_training).group_by("phecode").len()
        counts.records.update({phecodes[number]: n for number, n in amounts.iter_rows()})
    if population == "observed":
        flags = flags[records["subject"].unique()]
    totals = flags.sum().row(0, named=True)
    for name in names:
        counts.cases[name], counts.known[name] = totals[f"case_{name}"], totals[f"known_{name}"]
    return counts


def _flag_subjects(cohort: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """A row for each subject with 0 or 1 (Int64) in `all` (always 1), `train`, and `case_<name>`
    and `known_<name>` of training subjects.
    """
    train = (pl.col("split") == "train").fill_null(value=False)
    cases = {
        f"case_{name}": (train & (pl.col(f"y_{name}") == 1)).fill_null(value=False)
        for name in names
    }
    known = {f"known_{name}": train & pl.col(f"y_{name}").is_not_null() for name in names}
    return (
        cohort.select(train.alias("train"), **cases, **known)
        .with_columns(all=pl.lit(1))
        .cast(pl.Int64)
    )


def _count_carriers(
    records: pl.DataFrame, phecodes: Sequence[str], flags: pl.DataFrame
) -> pl.DataFrame:
    """Every PheCode in the records, in order, with how many of the subjects who carry it have each
    flag.
    """
    groups = flags.unique(maintain_order=True)  # of subjects with the same flags: few
    group = flags.join(
        groups.with_row_index("group"), on=flags.columns, how="left", maintain_order="left"
    )["group"].to_numpy()
    bits = len(phecodes).bit_length()
    pairs = sort_distinct(
        (records["subject"].cast(pl.Int64) * (1 << bits) + records["phecode"]).to_numpy()
    )
    cells = (pairs & (1 << bits) - 1) * groups.height + group.astype(np.int64)[pairs >> bits]
    carriers = np.bincount(cells, minlength=len(phecodes) * groups.height).reshape(
        len(phecodes), groups.height
    )
    counts = pl.DataFrame(carriers @ groups.to_numpy(), schema=flags.columns)
    return counts.select(pl.Series("phecode", phecodes, dtype=pl.String), pl.all()).filter(
        pl.col("all") > 0
    )


def select_codes(
    counts: CodeCounts,
    names: Sequence[str],
    *,
    select: bool | str = True,
    denominator: str = "all",
    threshold: float = 5.0,
    top_k: int = 5,
    min_case_support: int = 1,
    min_case_fraction: float = 0.0,
    min_record_frequency: float = 0.001,
    floor: int = 0,
    exempt: Collection[str] = (),
) -> CodeSelection:
    """Ratios of every rule, and the vocabulary.

    Args:
        counts: of all shards.
        names: of the labels.
        select: True: PheCodes above the threshold, for a rule without any the top k; the union over
            the rules. False: every PheCode of a training subject; others are `unseen`. `frequency`:
            those with more than `min_record_frequency` of the records of training subjects.
        denominator: all: cases and non-cases; controls: non-cases.
        threshold: selected ratios exceed it.
        top_k: number of PheCodes selected where none does, by (-ratio, -carriers among the cases,
            PheCode).
        min_case_support: PheCodes with fewer carriers among the cases are not considered.
        min_case_fraction: the same as a share of the cases; the larger of the two limits applies.
        min_record_frequency: of `frequency`.
        floor: codes that are not ICD of fewer training subjects are not chosen: their texts may
            tell of a person.
        exempt: such codes to which it does not apply.
    """
    rare = {
        code
        for code in counts.carriers
        if codes.is_other(code) and counts.train_with[code] < floor and code not in exempt
    }
    ratios: dict[str, dict[str, PrevalenceRatio]] = {}
    for name in names:
        support = max(
            min_case_support, math.ceil(Decimal(repr(min_case_fraction)) * counts.cases[name])
        )
        candidates = _compute_ratios(counts, name, denominator=denominator, support=support)
        candidates = {
            phecode: ratio for phecode, ratio in candidates.items() if phecode not in rare
        }
        ratios[name] = (
            _mark_selected(candidates, threshold, top_k) if select is True else candidates
        )
    unseen: tuple[str, ...] = ()
    if select is True:
        chosen = {
            phecode
            for candidates in ratios.values()
            for phecode, ratio in candidates.items()
            if ratio.selected
        }
    elif select == "frequency":
        least = min_record_frequency * counts.records.total()
        chosen = {phecode for phecode, n in counts.records.items() if n > least} - rare
    else:
        chosen = {phecode for phecode, n in counts.train_with.items() if n} - rare
        unseen = tuple(sort_phecodes(counts.carriers.keys() - chosen))
    bounds = {
        name: _bound_ratio(counts.cases[name], counts.known[name], denominator) for name in names
    }
    return CodeSelection(
        phecodes=sort_phecodes(chosen), ratios=ratios, max_attainable=bounds, unseen=unseen
    )


def _mark_selected(
    candidates: Mapping[str, PrevalenceRatio], threshold: float, top_k: int
) -> dict[str, PrevalenceRatio]:
    """The ratios of a rule, `selected` where they exceed the threshold; where none does, the
    `top_k` greatest.
    """
    selected = [phecode for phecode, ratio in candidates.items() if ratio.ratio > threshold]
    if not selected:
        order = {
            phecode: (-ratio.ratio, -ratio.n_case_with, codes.phecode_sort_key(phecode))
            for phecode, ratio in candidates.items()
        }
        selected = sorted(candidates, key=order.__getitem__)[:top_k]
    return {
        phecode: replace(ratio, selected=phecode in selected)
        for phecode, ratio in candidates.items()
    }


def _bound_ratio(n_case: int, n_known: int, denominator: str) -> float | None:
    """The greatest ratio that a rule with so many cases among the subjects with a label can have;
    None where it can have none.
    """
    if not n_case:
        return None
    if denominator == "all":
        return n_known / n_case
    return math.inf if n_known > n_case else None


def sort_phecodes(phecodes: Iterable[str]) -> list[str]:
    """PheCodes in numeric order."""
    return sorted(phecodes, key=codes.phecode_sort_key)


def _compute_ratios(
    counts: CodeCounts, name: str, *, denominator: str, support: int
) -> dict[str, PrevalenceRatio]:
    """PheCode -> its ratio for one rule, where enough cases carry it."""
    cases, known = counts.cases[name], counts.known[name]
    reference = known if denominator == "all" else known - cases
    if not cases or not reference:
        return {}
    found = {}
    for phecode in sort_phecodes(phecode for rule, phecode in counts.cases_with if rule == name):
        cases_with, known_with = counts.cases_with[name, phecode], counts.known_with[name, phecode]
        if cases_with < support:
            continue
        reference_with = known_with if denominator == "all" else known_with - cases_with
        ratio = (cases_with / cases) / (reference_with / reference) if reference_with else math.inf
        span = compute_interval(
            ratio, cases_with, cases, known_with - cases_with, known - cases, denominator
        )
        found[phecode] = PrevalenceRatio(
            ratio=ratio,
            n_case_with=cases_with,
            n_case=cases,
            n_ref_with=reference_with,
            n_ref=reference,
            interval=span,
        )
    return found


def compute_interval(
    ratio: float, a1: int, n1: int, a0: int, n0: int, denominator: str
) -> tuple[float, float] | None:
    """95 % confidence interval of a ratio, on the log scale (section 8); None without non-cases or
    for an infinite ratio.

    `a1` of `n1` cases and `a0` of `n0` non-cases are carriers. `denominator`: controls, or all,
    whose cases are in both groups: the delta method on the two independent proportions.
    """
    if not n0 or math.isinf(ratio):
        return None
    p1, p0 = (a1 + 0.5) / (n1 + 1), (a0 + 0.5) / (n0 + 1)
    if denominator == "controls":
        variance = (1 - p1) / (n1 * p1) + (1 - p0) / (n0 * p0)
    else:
        share = n1 / (n1 + n0)
        mean = share * p1 + (1 - share) * p0
        variance = (1 / p1 - share / mean) ** 2 * p1 * (1 - p1) / n1 + (
            (1 - share) / mean
        ) ** 2 * p0 * (1 - p0) / n0
    reach = math.exp(Z * math.sqrt(variance))
    return ratio / reach, ratio * reach
