"""Several runs: means over seeds, paired differences on the same draws, Holm correction, ranks. Legend: `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.evaluate.bootstrap import (
    LEVEL,
    build_difference,
    build_metric,
    explain_absent_class,
    explain_few_units,
    explain_no_interval,
    explain_rare_class,
    run_bootstrap,
)
from bitimely_core.evaluate.metrics import EMPTY, MAIN, STATISTICS, Array, ScoredRows, Statistic, Unit, check_rows, rank_scores
from bitimely_core.evaluate.paired import Predictions, align_runs
from bitimely_core.schemas import CorrectedDifference, MeanDifference, MetricValue


class Replicates(NamedTuple):
    """One metric of several runs on the same windows and the same draws."""

    values: dict[str, float]  # by run
    draws: dict[str, Array]  # [R] by run
    units: int
    n_subjects: int
    undefined: str | None  # why there is no value
    uncertain: str | None  # why there is no interval


def draw_replicates(
    task: str,
    runs: Mapping[str, Predictions],
    *,
    class_names: Sequence[str] = (),
    metric: str | None = None,
    label: str | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    seed: int = 0,
) -> Replicates:
    """One metric of all `runs` on the same windows with its replicates, for `paired_difference`. Draws are those of `score` and `compare`.

    `metric`: None is the main one of the task; `label`: the average precision of this class or label instead.

    Raises UserError: settings_differ (exit 4), where the windows, their targets or their subjects differ; non_finite.
    """
    target, groups, ids, predictions = align_runs(runs)
    if not len(target):
        return Replicates(dict.fromkeys(runs, np.nan), dict.fromkeys(runs, np.empty(0)), 0, 0, EMPTY, None)
    rows = check_rows(task, target, predictions, groups, class_names, by, ids)
    name = metric or MAIN[task]
    k = None if label is None else rows.names.index(label)
    points, draws = run_bootstrap(
        {run: _single_statistic(rows, values, name, k) for run, values in rows.predictions.items()}, rows, bootstrap, seed
    )
    undefined = explain_absent_class(rows, k) if k is not None else "not defined by these rows"
    uncertain = (
        explain_no_interval(rows, name, bootstrap) if k is None else explain_few_units(rows, bootstrap) or explain_rare_class(rows, k)
    )
    values = {run: float(point["value"]) for run, point in points.items()}
    return Replicates(values, {run: d["value"] for run, d in draws.items()}, rows.n_units, rows.n_subjects, undefined, uncertain)


def _single_statistic(rows: ScoredRows, prediction: Array, metric: str, label: int | None) -> Statistic:
    """One metric as `value`; accuracy and single labels without computing all the others."""
    if label is not None:
        kept = rows.known[:, label]
        areas = rank_scores(prediction[kept, label], rows.positive[kept, label], rows.units[kept])
        return lambda counts: {"value": areas(counts)[1]}
    if rows.task == "classification" and metric == "accuracy":
        hits, total = (np.bincount(rows.units, w, rows.n_units) for w in (prediction.argmax(1) == rows.target, np.ones(len(prediction))))
        return lambda counts: {"value": (counts @ hits) / (counts @ total)}
    every = STATISTICS[rows.task](rows, prediction, None)
    return lambda counts: {"value": every(counts)[metric]}


def mean_over_seeds(found: Replicates, runs: Sequence[str]) -> MetricValue:
    """The mean of a metric over `runs`, such as one run per seed, on the same draws."""
    drawn = np.mean([found.draws[run] for run in runs], axis=0)
    return build_metric(float(np.mean([found.values[run] for run in runs])), drawn, found.undefined, found.uncertain)


def paired_difference(
    found: Replicates, first: Sequence[str], second: Sequence[str], spread: tuple[float, float] | None = None
) -> MeanDifference:
    """The paired difference of the means of two sets of runs, such as two models with one run per seed each.

    `se`, `lo` and `hi` are those of the mean difference on the same draws of subjects, as `compare` has them for one pair. `total_se`
    adds the variance between seeds where `spread` has it with its degrees of freedom: `sqrt(se^2 U / (U - 1) + variance)`. `p` is
    two-sided, of the difference over `total_se` against Student's t with Welch-Satterthwaite degrees of freedom: replicates do not
    resolve the tails that a correction for many comparisons needs. `total_se`, `df` and `p` are null where there is no interval.
    """
    from scipy import stats

    (value, drawn), (other, others) = (
        (np.mean([found.values[run] for run in runs]), np.mean([found.draws[run] for run in runs], axis=0)) for runs in (first, second)
    )
    out = MeanDifference(**build_difference(float(value - other), drawn - others, found.uncertain).model_dump())
    if out.se is None or out.difference is None:
        return out
    units = found.units  # the variance of a mean over replicates is too small by (U - 1) / U
    variances = [(out.se**2 * units / (units - 1), float(units - 1)), *([spread] if spread is not None and spread[1] > 0 else [])]
    total = sum(v for v, _ in variances)
    if total == 0:  # the runs agree on every row
        return out.model_copy(update={"total_se": 0.0, "df": float(units - 1), "p": 1.0 if out.difference == 0 else None})
    df = total**2 / sum(v**2 / n for v, n in variances)
    p = 2 * float(stats.t.sf(abs(out.difference) / np.sqrt(total), df))
    return out.model_copy(update={"total_se": float(np.sqrt(total)), "df": float(df), "p": p})


def holm(p: Sequence[float | None], level: float = LEVEL) -> list[tuple[float, float] | None]:
    """Holm's step-down correction of a family of comparisons; None marks a comparison without p, which is not counted.

    Returns:
        For each `(adjusted, alpha)`: the adjusted p, to be compared with 1 - level, and the error rate of its step. An interval of level
        1 - alpha excludes zero exactly where the adjusted p is at most 1 - level.
    """
    out: list[tuple[float, float] | None] = [None] * len(p)
    known = sorted((value, k) for k, value in enumerate(p) if value is not None)
    highest, kept = 0.0, None
    for place, (value, k) in enumerate(known):
        left = len(known) - place
        highest = max(highest, min(1.0, left * value))
        alpha = (1 - level) / left
        if kept is None and value > alpha:
            kept = alpha  # nothing is significant from the first non-significant step on
        out[k] = (highest, alpha if kept is None else kept)
    return out


def holm_correct(differences: Sequence[MeanDifference], level: float = LEVEL) -> list[CorrectedDifference]:
    """Differences as one family: each with `p_holm` and the interval `corrected_lo` to `corrected_hi`, null without p."""
    from scipy import stats

    out = []
    for d, found in zip(differences, holm([d.p for d in differences], level), strict=True):
        one = CorrectedDifference(**d.model_dump())
        if found is not None and d.difference is not None and d.total_se is not None:
            reach = float(stats.t.isf(found[1] / 2, d.df)) * d.total_se
            one = one.model_copy(update={"p_holm": found[0], "corrected_lo": d.difference - reach, "corrected_hi": d.difference + reach})
        out.append(one)
    return out


def significance_sign(difference: CorrectedDifference) -> int:
    """1 or -1 where the corrected interval is above or below zero, else 0."""
    lo, hi = difference.corrected_lo, difference.corrected_hi
    return 0 if lo is None or hi is None else int(lo > 0) - int(hi < 0)


def rank_values(values: Sequence[float | None], *, lower_is_better: bool = False) -> list[float | None]:
    """Rank of each value, 1 the best, equal ones their mean rank; None has none."""
    from scipy import stats

    known = [k for k, value in enumerate(values) if value is not None]
    found = stats.rankdata([values[k] if lower_is_better else -values[k] for k in known])  # type: ignore[operator]
    out: list[float | None] = [None] * len(values)
    for k, rank in zip(known, found.tolist(), strict=True):
        out[k] = rank
    return out


class RankTest(NamedTuple):
    """Nemenyi's test over data sets."""

    mean_ranks: list[float]
    critical: float  # difference of mean ranks
    friedman_p: float | None  # of equal rows; None below three rows


def nemenyi(table: Any, level: float = LEVEL) -> RankTest:
    """Mean ranks over data sets ([N data sets, k rows] ranks) and their critical difference (Nemenyi's test; Demsar 2006, section 3.2.2).

    `critical` = q sqrt(k (k + 1) / 6 N), q = the studentised range at infinite degrees of freedom over sqrt(2). 1 - `level` is the error
    rate over all pairs.
    """
    from scipy import stats

    x = np.asarray(table, dtype=np.float64)
    n, k = x.shape
    q = float(stats.studentized_range.ppf(level, k, np.inf)) / np.sqrt(2)
    p = float(stats.friedmanchisquare(*x.T).pvalue) if k > 2 and n > 1 else None
    return RankTest(x.mean(0).tolist(), float(q * np.sqrt(k * (k + 1) / (6 * n))), p)
