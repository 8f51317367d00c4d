"""Shortcut baselines: how well sequence length and counts of single codes predict the labels,
without any model (section 11).

A label derived from codes is predicted by the counts of these codes, and a selection by enrichment
by the length of a sequence. Scores of models are informative only above these. They come from small
tables of (feature, value) -> subjects, cases, which add up over shards.

Features are the length of a sequence (number -1) and the count of each code (its id). Subjects
without label are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitimely_core.claims.distinct import find_starts
from bitimely_core.claims.splits import SPLITS
from bitimely_core.schemas.tokens import (
    BestCode,
    PartScores,
    PrevalenceCount,
    SequenceFunnel,
    ShortcutScores,
)

LENGTH = -1
ALL = "all"
# average precision of the best single code above which the label leaks into the input
LEAK_SCORE = 0.9

ShortcutTally = dict[tuple[str, str], "NDArray[np.int64]"]
"""(label, split) -> [rows, 4]: feature, value > 0, subjects with it, cases among them; sorted by
feature, then value.
"""

ShortcutRow = dict[str, float | int | str | None]

Prevalence = dict[str, dict[str, PrevalenceCount]]
"""Label -> split -> subjects with a label, cases, prevalence."""


def average_precision(score: NDArray[Any], positive: NDArray[Any]) -> float | None:
    """Step-wise sum of precision over the steps of recall, tied scores as one step; None without
    positives.
    """
    value, place = np.unique(score, return_inverse=True)
    n = np.bincount(place, minlength=len(value))
    cases = np.bincount(place, weights=positive, minlength=len(value))
    return _average_grouped(n[::-1], cases[::-1])


def _average_grouped(n: NDArray[Any], cases: NDArray[Any]) -> float | None:
    """Average precision of groups of tied scores in falling order: subjects and cases of each."""
    total = cases.sum()
    if not total:
        return None
    found, seen = np.cumsum(cases), np.cumsum(n)
    return float(np.sum(cases / total * found / np.maximum(seen, 1)))


def count_shortcuts(
    offsets: NDArray[Any],
    ids: NDArray[Any],
    labels: Mapping[str, NDArray[Any]],
    split: NDArray[Any],
) -> ShortcutTally:
    """The tables of one shard: `offsets` [S + 1] of the sequences, `ids` [E] codes, labels [S] 1, 0
    or another value for unknown, `split` [S].
    """
    size = len(offsets) - 1
    lengths = np.diff(offsets).astype(np.int64)
    width = int(ids.max(initial=0)) + 1
    pairs = np.sort(np.repeat(np.arange(size), lengths) * width + ids)
    starts = find_starts(pairs)
    pairs, counts = pairs[starts], np.diff(starts, append=len(pairs))
    subject = np.concatenate([np.arange(size), pairs // width])
    feature = np.concatenate([np.full(size, LENGTH), pairs % width])
    value = np.concatenate([lengths, counts])
    low, span = min(LENGTH, 0), int(value.max(initial=0)) + 1
    cell, cells = (feature - low) * span + value, np.arange((width - low) * span)
    if len(cells) > len(cell):
        cells, cell = np.unique(cell, return_inverse=True)
    parts, other = (
        np.select([split == part for part in SPLITS], range(len(SPLITS)), -1),
        2 * len(SPLITS),
    )
    tally: ShortcutTally = {}
    for name, y in labels.items():
        # of each subject: split and label
        group = np.where((parts >= 0) & ((y == 0) | (y == 1)), 2 * parts + (y == 1), other)
        counts = np.bincount(
            cell * (other + 1) + group[subject], minlength=len(cells) * (other + 1)
        ).reshape(-1, other + 1)
        for i, part in enumerate(SPLITS):
            cases, known = counts[:, 2 * i + 1], counts[:, 2 * i] + counts[:, 2 * i + 1]
            there = known > 0
            tally[name, part] = np.column_stack(
                [cells[there] // span + low, cells[there] % span, known[there], cases[there]]
            ).astype(np.int64)
    return tally


def _sum_rows(rows: NDArray[Any]) -> NDArray[np.int64]:
    """One row a (feature, value), the others added to it."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    starts = (
        np.flatnonzero(np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(1)))
        if len(rows)
        else np.empty(0, np.intp)
    )
    sums = np.add.reduceat(rows[:, 2:], starts) if len(rows) else rows[:, 2:]
    return np.concatenate([rows[starts, :2], sums], 1)


def merge_tallies(tallies: Iterable[ShortcutTally]) -> ShortcutTally:
    """The tables of several shards as those of one."""
    parts: dict[tuple[str, str], list[NDArray[np.int64]]] = {}
    for one in tallies:
        for key, rows in one.items():
            parts.setdefault(key, []).append(rows)
    return {key: _sum_rows(np.concatenate(rows)) for key, rows in parts.items()}


def score_shortcuts(
    tally: ShortcutTally,
    phecodes: Mapping[int, str],
    own: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, ShortcutScores]:
    """Label -> average precision of the shortcuts over train, validation, test and all subjects.

    `phecodes`: id -> PheCode; `own`: label -> the PheCodes of its own rule. `best` is the PheCode
    whose count is best on train, `leak` whether it exceeds 0.9 on all subjects.
    """
    scores = {}
    ids = {phecode: code for code, phecode in phecodes.items()}
    for name in dict.fromkeys(label for label, _ in tally):
        parts = {part: tally[name, part] for part in SPLITS if (name, part) in tally}
        parts[ALL] = _sum_rows(np.concatenate(list(parts.values())))
        totals = {part: rows[rows[:, 0] == LENGTH, 2:].sum(0) for part, rows in parts.items()}
        on_train = (
            {
                code: _score_feature(parts["train"], code, totals["train"])
                for code in sorted(phecodes)
            }
            if "train" in parts
            else {}
        )
        known = {code: value for code, value in on_train.items() if value is not None}
        best = None
        if known:
            code = max(known, key=lambda code: known[code])
            best = BestCode(phecode=phecodes[code], count=_score_parts(parts, code, totals))
        scores[name] = ShortcutScores(
            subjects={part: int(total[0]) for part, total in totals.items()},
            cases={part: int(total[1]) for part, total in totals.items()},
            prevalence={
                part: float(total[1] / total[0]) if total[0] else None
                for part, total in totals.items()
            },
            length=_score_parts(parts, LENGTH, totals),
            best=best,
            own={
                phecode: _score_parts(parts, ids[phecode], totals)
                for phecode in (own or {}).get(name, ())
                if phecode in ids
            },
            leak=best is not None and (best.count[ALL] or 0.0) > LEAK_SCORE,
        )
    return scores


def _score_parts(
    parts: Mapping[str, NDArray[np.int64]], feature: int, totals: Mapping[str, NDArray[np.int64]]
) -> PartScores:
    return {part: _score_feature(rows, feature, totals[part]) for part, rows in parts.items()}


def _score_feature(rows: NDArray[np.int64], feature: int, total: NDArray[np.int64]) -> float | None:
    """Average precision of a feature; subjects without a row have the value 0."""
    first, last = np.searchsorted(rows[:, 0], [feature, feature + 1])
    counted = rows[first:last, 2:][::-1]
    return _average_grouped(*np.concatenate([counted, [total - counted.sum(0)]]).T)


def count_prevalence(labels: Mapping[str, NDArray[Any]], split: NDArray[Any]) -> Prevalence:
    """Label -> split -> subjects with a label, cases, prevalence: of all subjects before, of those
    with a sequence after the filters.

    Labels [S] are 1, 0, or another value for unknown.
    """
    prevalence: Prevalence = {}
    members = {part: (split == part) | (part == ALL) for part in (*SPLITS, ALL)}
    for name, y in labels.items():
        for part, member in members.items():
            own = y[member]
            prevalence.setdefault(name, {})[part] = _make_prevalence_count(
                int(np.isin(own, (0, 1)).sum()), int((own == 1).sum())
            )
    return prevalence


def add_prevalence(shards: Sequence[Prevalence]) -> Prevalence:
    """The `count_prevalence` of several shards as that of one."""
    return {
        name: {
            part: _make_prevalence_count(
                sum(one[name][part].subjects for one in shards),
                sum(one[name][part].cases for one in shards),
            )
            for part in parts
        }
        for name, parts in shards[0].items()
    }


def _make_prevalence_count(subjects: int, cases: int) -> PrevalenceCount:
    return PrevalenceCount(
        subjects=subjects, cases=cases, prevalence=cases / subjects if subjects else None
    )


def count_agreement(label: NDArray[Any], flag: NDArray[Any]) -> dict[str, int]:
    """A rule against a flag of the source, or another rule: tp, fp, fn, tn over the subjects where
    both are 0 or 1 [S].
    """
    cells = {"tp": (1, 1), "fp": (1, 0), "fn": (0, 1), "tn": (0, 0)}
    return {name: int(((label == a) & (flag == b)).sum()) for name, (a, b) in cells.items()}


def list_attrition(funnel: SequenceFunnel) -> list[tuple[str, str, int]]:
    """The funnel as rows (unit, step, count) of a table."""
    dates = {
        name: getattr(funnel, name)
        for name in ("identifier", "bad_date", "before_birth", "after_death", "future")
    }
    excluded = dates | {f"bad_code, {kind}": n for kind, n in funnel.bad_code.items()}
    valid = sum(funnel.mapped.values()) + funnel.unmapped
    return [
        ("rows", "read", funnel.rows),
        *(("rows", f"excluded: {name}", n) for name, n in excluded.items() if n),
        ("rows", "valid", valid),
        ("rows", "without PheCode (label rules only)", funnel.unmapped),
        *(("rows", f"PheCode found, {step}", n) for step, n in funnel.mapped.items() if n),
        ("subjects", "known", funnel.subjects_in),
        *[("subjects", "excluded: no birth date", funnel.no_birth)] * bool(funnel.no_birth),
        ("subjects", "with a sequence", funnel.subjects_out),
        ("events", "in sequences", funnel.events),
    ]
