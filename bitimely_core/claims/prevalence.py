"""Prevalence ratios, and the PheCodes of a vocabulary, which they select (section 8 of the
builder's reference).

Counts are integers that add up over shards; decisions are plain Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal

import numpy as np
import polars as pl

from bitimely_core.claims import codes
from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.claims.sequence_choices import SequenceChoices

Z = 1.96  # of a 95 % interval


@dataclass
class CodeCounts:
    """Counts for the selection. Counts of shards add up with `+`."""

    # of training subjects, by label: cases, and all whose label is known
    cases: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    # those of them with a PheCode, by (label, PheCode)
    cases_with: Counter[tuple[str, str]] = field(default_factory=Counter)
    known_with: Counter[tuple[str, str]] = field(default_factory=Counter)
    # by PheCode: training subjects with it, their records, and all subjects with it
    train_with: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    carriers: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: CodeCounts) -> CodeCounts:
        return CodeCounts(
            *(getattr(self, part.name) + getattr(other, part.name) for part in fields(self))
        )


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


@dataclass(frozen=True, kw_only=True)
class CodeSelection:
    """PheCodes of the vocabulary in numeric order, and the ratios by which they were selected."""

    phecodes: list[str]
    ratios: dict[str, dict[str, PrevalenceRatio]]  # label -> candidates in numeric order
    # label -> upper bound of its ratios; None without case or reference subject
    max_attainable: dict[str, float | None]
    unseen: tuple[str, ...] = ()  # without selection: those of no training subject, read as [UNK]


def count_codes(
    records: pl.DataFrame,
    phecodes: Sequence[str],
    cohort: pl.DataFrame,
    names: Sequence[str],
    choices: SequenceChoices,
) -> CodeCounts:
    """The counts of one shard.

    Args:
        records: subject, day, phecode (index into `phecodes`).
        phecodes: names of the PheCodes.
        cohort: with `split` and `y_<name>`.
        names: of the labels.
        choices: `population`, and whether `select` needs the records of training subjects.
    """
    flags = _flag_subjects(cohort, names)
    counts = CodeCounts()
    for row in _count_carriers(records, phecodes, flags).iter_rows(named=True):
        phecode = row["phecode"]
        counts.carriers[phecode] = row["all"]
        counts.train_with[phecode] = row["train"]
        for name in names:
            counts.cases_with[name, phecode] = row[f"case_{name}"]
            counts.known_with[name, phecode] = row[f"known_{name}"]
    if choices.select == "frequency":
        in_training = flags["train"].gather(records["subject"]) == 1
        amounts = records.filter(in_training).group_by("phecode").len()
        counts.records.update({phecodes[number]: n for number, n in amounts.iter_rows()})
    if choices.population == "observed":
        flags = flags[records["subject"].unique()]
    totals = flags.sum().row(0, named=True)
    for name in names:
        counts.cases[name] = totals[f"case_{name}"]
        counts.known[name] = totals[f"known_{name}"]
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
    labelled = {f"known_{name}": train & pl.col(f"y_{name}").is_not_null() for name in names}
    return (
        cohort.select(train.alias("train"), **cases, **labelled)
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
    choices: SequenceChoices,
    floor: int = 0,
    exempt: Collection[str] = (),
) -> CodeSelection:
    """Between the passes: the ratios of every label, and the vocabulary.

    Args:
        counts: of all shards.
        names: of the labels.
        choices: of the selection.
        floor: training subjects that a code needs which is not ICD: its text may tell of a person.
        exempt: such codes that need none.
    """
    rare = {
        code
        for code in counts.carriers
        if codes.is_other(code) and counts.train_with[code] < floor and code not in exempt
    }
    ratios = {name: _compute_ratios(counts, name, choices, rare) for name in names}
    if choices.select is True:
        ratios = {name: _mark_selected(rows, choices) for name, rows in ratios.items()}
    chosen = _choose_codes(counts, ratios, choices) - rare
    unseen = counts.carriers.keys() - chosen if choices.select is False else ()
    bounds = {
        name: _bound_ratio(counts.cases[name], counts.known[name], choices.denominator)
        for name in names
    }
    return CodeSelection(
        phecodes=sort_phecodes(chosen),
        ratios=ratios,
        max_attainable=bounds,
        unseen=tuple(sort_phecodes(unseen)),
    )


def fix_codes(
    vocabulary: Sequence[str], carried: Iterable[str], choices: SequenceChoices
) -> CodeSelection:
    """The vocabulary of a run, for the PheCodes that are `carried`."""
    unseen = set(carried) - set(vocabulary) if choices.select is False else ()
    return CodeSelection(
        phecodes=list(vocabulary), ratios={}, max_attainable={}, unseen=tuple(sort_phecodes(unseen))
    )


def _choose_codes(
    counts: CodeCounts, ratios: dict[str, dict[str, PrevalenceRatio]], choices: SequenceChoices
) -> set[str]:
    """The PheCodes that `choices.select` names."""
    if choices.select == "frequency":
        least = choices.min_record_frequency * counts.records.total()
        return {phecode for phecode, n in counts.records.items() if n > least}
    if not choices.select:
        return {phecode for phecode, n in counts.train_with.items() if n}
    chosen = set[str]()
    for candidates in ratios.values():
        chosen |= {phecode for phecode, ratio in candidates.items() if ratio.selected}
    return chosen


def _mark_selected(
    candidates: Mapping[str, PrevalenceRatio], choices: SequenceChoices
) -> dict[str, PrevalenceRatio]:
    """The ratios of a label, `selected` where they exceed the threshold; where none does, the
    `top_k` greatest, with more carriers among the cases first.
    """
    selected = [code for code, ratio in candidates.items() if ratio.ratio > choices.threshold]
    if not selected:
        order = {
            code: (-ratio.ratio, -ratio.n_case_with, codes.phecode_sort_key(code))
            for code, ratio in candidates.items()
        }
        selected = sorted(candidates, key=order.__getitem__)[: choices.top_k]
    return {code: replace(ratio, selected=code in selected) for code, ratio in candidates.items()}


def _bound_ratio(n_case: int, n_known: int, denominator: str) -> float | None:
    """The greatest ratio that a label with so many cases among the subjects with a known one can
    have; None where it can have none.
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
    counts: CodeCounts, name: str, choices: SequenceChoices, rare: Collection[str]
) -> dict[str, PrevalenceRatio]:
    """PheCode -> its ratio for one label, where enough cases carry it; without `rare` ones."""
    n_case, n_known = counts.cases[name], counts.known[name]
    with_cases = choices.denominator == "all"  # in the reference group
    n_ref = n_known if with_cases else n_known - n_case
    if not n_case or not n_ref:
        return {}
    least = math.ceil(Decimal(repr(choices.min_case_fraction)) * n_case)
    least = max(choices.min_case_support, least)
    ratios = {}
    for phecode in sort_phecodes(phecode for rule, phecode in counts.cases_with if rule == name):
        case_with, known_with = counts.cases_with[name, phecode], counts.known_with[name, phecode]
        if case_with < least or phecode in rare:
            continue
        ref_with = known_with if with_cases else known_with - case_with
        ratio = (case_with / n_case) / (ref_with / n_ref) if ref_with else math.inf
        others = (known_with - case_with, n_known - n_case)
        ratios[phecode] = PrevalenceRatio(
            ratio=ratio,
            n_case_with=case_with,
            n_case=n_case,
            n_ref_with=ref_with,
            n_ref=n_ref,
            interval=compute_interval(ratio, case_with, n_case, *others, choices.denominator),
        )
    return ratios


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
