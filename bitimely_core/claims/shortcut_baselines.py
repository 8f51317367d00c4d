"""Shortcut baselines: how well the length of a sequence and the count of a single code predict the
labels, without any model (section 11 of the builder's reference).

A label that is derived from codes is predicted by the counts of these codes. A selection by
enrichment makes the length of a sequence predict it. Scores of models are informative only above
these. They come from small tables of (feature, value) -> subjects, cases, which add up over shards.

Features are the length of a sequence (number -1) and the count of each code (its id). Subjects
without label are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.average_precision import average_groups
from bitimely_core.claims.distinct import find_starts
from bitimely_core.claims.subject_splits import SPLITS
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

Array = NDArray[Any]
Ints = NDArray[np.int64]
ShortcutTally = dict[tuple[str, str], Ints]
"""(label, split) -> [rows, 4]: feature, value > 0, subjects with it, cases among them; sorted by
feature, then value.
"""

ShortcutRow = dict[str, float | int | str | None]

Prevalence = dict[str, dict[str, PrevalenceCount]]
"""Label -> split -> subjects with a label, cases, prevalence."""


def count_shortcuts(
    offsets: Array, ids: Array, labels: Mapping[str, Array], split: Array
) -> ShortcutTally:
    """The tables of one shard.

    Args:
        offsets: [S + 1] of the sequences.
        ids: [E] codes.
        labels: name -> [S], 1, 0 or another value for unknown.
        split: [S].
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
    span = int(value.max(initial=0)) + 1
    # of each row the number of its (feature, value)
    cell, cells = (feature - LENGTH) * span + value, np.arange((width - LENGTH) * span)
    if len(cells) > len(cell):
        cells, cell = np.unique(cell, return_inverse=True)
    features, values = cells // span + LENGTH, cells % span
    part = np.select([split == name for name in SPLITS], range(len(SPLITS)), -1)
    other = 2 * len(SPLITS)
    tally: ShortcutTally = {}
    for label, y in labels.items():
        # of each subject: split and label
        group = np.where((part >= 0) & ((y == 0) | (y == 1)), 2 * part + (y == 1), other)
        counts = np.bincount(
            cell * (other + 1) + group[subject], minlength=len(cells) * (other + 1)
        ).reshape(-1, other + 1)
        for i, name in enumerate(SPLITS):
            cases = counts[:, 2 * i + 1]
            subjects = counts[:, 2 * i] + cases
            table = np.column_stack([features, values, subjects, cases]).astype(np.int64)
            tally[label, name] = table[subjects > 0]
    return tally


def _sum_rows(rows: Array) -> Ints:
    """One row a (feature, value), the others added to it."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    if not len(rows):
        return rows
    starts = np.flatnonzero(np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(1)))
    return np.concatenate([rows[starts, :2], np.add.reduceat(rows[:, 2:], starts)], 1)


def merge_tallies(tallies: Sequence[ShortcutTally]) -> ShortcutTally:
    """The tables of several shards as those of one."""
    return {key: _sum_rows(np.concatenate([tally[key] for tally in tallies])) for key in tallies[0]}


def score_shortcuts(
    tally: ShortcutTally, phecodes: Mapping[int, str], own_codes: Mapping[str, Sequence[str]]
) -> dict[str, ShortcutScores]:
    """Label -> average precision of the shortcuts over train, validation, test and all subjects.

    `phecodes`: id -> PheCode; `own_codes`: label -> the PheCodes of its own rule. `best` is the
    PheCode whose count is best on train, `leak` whether it exceeds 0.9 on all subjects.
    """
    return {
        label: _score_label({part: tally[label, part] for part in SPLITS}, phecodes, codes)
        for label, codes in own_codes.items()
    }


def _score_label(
    parts: Mapping[str, Ints], phecodes: Mapping[int, str], own_codes: Sequence[str]
) -> ShortcutScores:
    """The scores of a label from its tables by split."""
    parts = {**parts, ALL: _sum_rows(np.concatenate(list(parts.values())))}
    totals = {part: rows[rows[:, 0] == LENGTH, 2:].sum(0) for part, rows in parts.items()}
    subjects = {part: int(total[0]) for part, total in totals.items()}
    cases = {part: int(total[1]) for part, total in totals.items()}

    def score(feature: int) -> PartScores:
        return {part: _score_feature(rows, feature, totals[part]) for part, rows in parts.items()}

    def score_on_train(phecode: str) -> float:
        return _score_feature(parts["train"], features[phecode], totals["train"]) or 0.0

    features = {phecode: code for code, phecode in sorted(phecodes.items())}
    best = None
    if features and cases["train"]:  # without cases no score is defined
        phecode = max(features, key=score_on_train)
        best = BestCode(phecode=phecode, count=score(features[phecode]))
    return ShortcutScores(
        subjects=subjects,
        cases=cases,
        prevalence={part: cases[part] / n if n else None for part, n in subjects.items()},
        length=score(LENGTH),
        best=best,
        own={phecode: score(features[phecode]) for phecode in own_codes if phecode in features},
        leak=best is not None and (best.count[ALL] or 0.0) > LEAK_SCORE,
    )


def _score_feature(rows: Ints, feature: int, total: Ints) -> float | None:
    """Average precision of a feature; subjects without a row have the value 0."""
    first, last = np.searchsorted(rows[:, 0], [feature, feature + 1])
    counted = rows[first:last, 2:][::-1]
    return average_groups(*np.concatenate([counted, [total - counted.sum(0)]]).T)


def count_prevalence(rows: pl.DataFrame, names: Iterable[str]) -> Prevalence:
    """Label -> split -> subjects with a label, cases, prevalence: of all subjects before, of those
    with a sequence after the filters.

    `rows`: split, and a column y_<name> for each label.
    """
    split = rows["split"].cast(pl.String)
    parts = {part: rows.filter(split == part) for part in SPLITS} | {ALL: rows}
    prevalence: Prevalence = {}
    for name in names:
        labels = {part: members[f"y_{name}"] for part, members in parts.items()}
        prevalence[name] = {
            part: _make_prevalence_count(y.count(), int((y == 1).sum()))
            for part, y in labels.items()
        }
    return prevalence


def add_prevalence(shards: Sequence[Prevalence]) -> Prevalence:
    """The `count_prevalence` of several shards as that of one."""
    total: Prevalence = {}
    for name, parts in shards[0].items():
        total[name] = {}
        for part in parts:
            counts = [shard[name][part] for shard in shards]
            subjects = sum(count.subjects for count in counts)
            cases = sum(count.cases for count in counts)
            total[name][part] = _make_prevalence_count(subjects, cases)
    return total


def _make_prevalence_count(subjects: int, cases: int) -> PrevalenceCount:
    return PrevalenceCount(
        subjects=subjects, cases=cases, prevalence=cases / subjects if subjects else None
    )


def count_agreement(label: Array, flag: Array) -> dict[str, int]:
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
