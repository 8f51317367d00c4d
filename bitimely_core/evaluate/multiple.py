"""Several runs: means over seeds, paired differences, Holm correction, verdicts, ranks. Legend:
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.evaluate.intervals import (
    LEVEL,
    NO_SPREAD,
    build_difference,
    build_metric,
    estimate_mean,
    estimate_variance,
    explain_absent_class,
    explain_few,
    explain_few_units,
    explain_no_interval,
    explain_rare_class,
    is_rounding,
)
from bitimely_core.evaluate.metrics import (
    EMPTY,
    ESTIMATORS,
    MAIN,
    Array,
    Estimate,
    MetricUnit,
    Unit,
    check_rows,
    find_unit,
    weigh_units,
)
from bitimely_core.evaluate.paired import Predictions, align_runs
from bitimely_core.schemas.scores import (
    CorrectedDifference,
    Difference,
    MarginTest,
    MeanDifference,
    MetricValue,
)

MINIMUM_SEEDS = 3  # trained runs behind each mean, required for a verdict
MINIMUM_VERDICT = 4.0  # effective number of subjects required for a verdict


class RunEstimates(NamedTuple):
    """One metric of several runs on the same windows."""

    metric: str
    runs: dict[str, Estimate]
    n_subjects: int
    undefined: str | None  # why there is no value
    uncertain: str | None  # why there is no interval
    unit: MetricUnit = MetricUnit("points", 100.0)  # of differences

    def mean(self, runs: Sequence[str]) -> Estimate:
        """The mean over `runs`, such as one run a seed."""
        found = [self.runs[run] for run in runs]
        return Estimate(
            float(np.mean([one.value for one in found])),
            np.mean([one.influence for one in found], axis=0),
            found[0].weights,
        )


def estimate_runs(
    task: str,
    runs: Mapping[str, Predictions],
    *,
    class_names: Sequence[str] = (),
    metric: str | None = None,
    label: str | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    unit: str | None = None,
    subject: str = "subject",
) -> RunEstimates:
    """One metric of all `runs` on the same windows, for `mean_over_seeds` and `paired_difference`.

    `metric`: None is the main one of the task; `label`: the average precision of this class or
    label instead.

    Raises UserError: settings_differ (exit 4), where the windows, their targets or their subjects
    differ; non_finite.
    """
    target, groups, predictions = align_runs(runs)
    name = metric or MAIN[task]
    printed = find_unit(name, unit)
    if not len(target):
        nothing = Estimate(float("nan"), np.empty(0), weigh_units(np.empty(0), 0))
        return RunEstimates(name, dict.fromkeys(runs, nothing), 0, EMPTY, None, printed)
    rows = check_rows(task, target, predictions, groups, class_names, by)._replace(subject=subject)
    found = {run: ESTIMATORS[task](rows, values, None) for run, values in rows.predictions.items()}
    if label is None:
        few, values = (
            explain_no_interval(rows, name, bootstrap),
            {run: one.metrics[name] for run, one in found.items()},
        )
        return RunEstimates(
            name, values, rows.n_subjects, "not defined by these rows", few, printed
        )
    k = rows.names.index(label)
    undefined, uncertain = (
        explain_absent_class(rows, k),
        explain_few_units(rows, bootstrap) or explain_rare_class(rows, k),
    )
    return RunEstimates(
        "auprc",
        {run: one.each["auprc"][k] for run, one in found.items()},
        rows.n_subjects,
        undefined,
        uncertain,
        printed,
    )


def mean_over_seeds(found: RunEstimates, runs: Sequence[str]) -> MetricValue:
    """The mean of a metric over `runs`, such as one run per seed, with its interval over
    subjects.
    """
    return build_metric(found.metric, found.mean(runs), found.undefined, found.uncertain)


def paired_difference(
    found: RunEstimates, first: Sequence[str], second: Sequence[str]
) -> MeanDifference:
    """The paired difference of the means of two sets of runs, such as two models with one run per
    seed each.

    `se`, `lo` and `hi` speak of these trained runs: `compare` has them for one pair. `total_se`
    adds the variance between the seeds of
    each set, its own and not pooled over others: `sqrt(se^2 + s_1^2 / S_1 + s_2^2 / S_2)`. `p` is
    two-sided, of the difference over `total_se` against Student's t with Welch and Satterthwaite's
    degrees of freedom. They are null where there is no interval.
    """
    one, other = found.mean(first), found.mean(second)
    seeds = [
        (
            float(np.var([found.runs[run].value for run in runs], ddof=1)) / len(runs),
            len(runs) - 1.0,
        )
        for runs in (first, second)
        if len(runs) > 1
    ]
    return _test_difference(
        one, other, found.uncertain, seeds, (len(first), len(second)), found.unit
    )


def compare_with_baseline(
    found: RunEstimates, runs: Sequence[str], baseline: str
) -> MeanDifference:
    """The mean of one run a seed less a baseline, with the variance between seeds; below
    `MINIMUM_SEEDS` without it, of these trained models.
    """
    if len(runs) >= MINIMUM_SEEDS:
        return paired_difference(found, runs, [baseline]).model_copy(
            update={"seeds": (len(runs), 0)}
        )
    return _test_difference(
        found.mean(runs), found.mean([baseline]), found.uncertain, (), (0, 0), found.unit
    )


def average_differences(each: Sequence[Difference]) -> MeanDifference:
    """The same of stored differences, one a seed; the standard error over subjects is the mean of
    theirs, which that of the mean cannot exceed.
    """
    from scipy.special import stdtr, stdtrit

    values = [one.difference for one in each if one.difference is not None]
    spread = [one.se or 0.0 for one in each]
    why = next(
        (
            one.undefined_reason
            for one in each
            if one.se is None and str(one.undefined_reason).removeprefix("no CI: ") not in NO_SPREAD
        ),
        None,
    )
    free, value, se = (
        next((one.df for one in each if one.df is not None), None),
        float(np.mean(values)),
        float(np.mean(spread)),
    )
    several = len(each) >= MINIMUM_SEEDS
    of_seeds = float(np.var(values, ddof=1)) / len(each) if several else 0.0
    out = MeanDifference(
        difference=value,
        n_defined=each[0].n_defined,
        unit=each[0].unit,
        factor=each[0].factor,
        seeds=(len(each) if several else 0, 0),
    )
    if why is not None or free is None:
        return out.model_copy(update={"undefined_reason": why or each[0].undefined_reason})
    total, reach = float(np.sqrt(se**2 + of_seeds)), float(stdtrit(free, (1 + LEVEL) / 2)) * se
    df = total**4 / (se**4 / free + of_seeds**2 / max(len(each) - 1, 1))
    tested = {
        "total_se": total,
        "df": df,
        "p": 2 * float(stdtr(df, -abs(value) / total)),
        "effective": free + 1,
    }
    return out.model_copy(update={"se": se, "lo": value - reach, "hi": value + reach, **tested})


def _test_difference(
    one: Estimate,
    other: Estimate,
    uncertain: str | None,
    random: Sequence[tuple[float, float]],
    seeds: tuple[int, ...],
    unit: MetricUnit,
) -> MeanDifference:
    """A paired difference with its test; `random`: further variances with their degrees of
    freedom.
    """
    from scipy.special import stdtr

    out = MeanDifference(
        **build_difference(one, other, uncertain, unit).model_dump(),
        effective=one.weights.effective,
        seeds=seeds,
    )
    out = out.model_copy(update={"p": None})
    if out.difference is None or uncertain is not None:
        return out
    parts = [
        (estimate_variance(one.influence - other.influence, one.weights.leverage), one.weights.df),
        *random,
    ]
    total = sum(v for v, _ in parts)
    if is_rounding(float(np.sqrt(total)), one.value, other.value, scaled=unit.scaled):
        return out
    df = total**2 / sum(v**2 / n for v, n in parts)
    p = 2 * float(stdtr(df, -abs(out.difference) / np.sqrt(total)))
    return out.model_copy(update={"total_se": float(np.sqrt(total)), "df": float(df), "p": p})


def compare_with_zero(
    values: Array, units: Array, n_units: int, *, draws: Sequence[float] = (), bootstrap: int = 1000
) -> MeanDifference:
    """The mean of paired differences `values` [n] (NaN: left out) over `units` [n], with its
    two-sided test against 0.

    `draws`: the mean of each random draw of what is subtracted, such as sets of random weights;
    their variance over their number is added.
    Degrees of freedom are those of a variance that goes with the squared leverage of the units: a
    family of tests needs the far tail of t.
    """
    known = np.isfinite(values)
    one = estimate_mean(values[known], units[known], n_units)
    squares = one.weights.leverage**2
    free = squares.sum() ** 2 / max(float((squares**2).sum()), np.finfo(float).tiny) - 1
    one = one._replace(weights=one.weights._replace(df=max(1.0, float(free))))
    nothing = Estimate(0.0, np.zeros(n_units), one.weights)
    random = (
        [(float(np.var(draws, ddof=1)) / len(draws), len(draws) - 1.0)] if len(draws) > 1 else []
    )
    return _test_difference(
        one,
        nothing,
        explain_few(len(np.unique(units[known])), bootstrap),
        random,
        (0, 0),
        MetricUnit("1", 1.0),
    )


def holm(p: Sequence[float | None]) -> list[tuple[float, float] | None]:
    """Holm's step-down correction of a family of comparisons; None marks a comparison without p,
    which is not counted.

    Returns:
        For each `(adjusted, alpha)`: the adjusted p, to be compared with 1 - `LEVEL`, and the error
        rate of its step. An interval of level 1 - alpha excludes zero exactly where the adjusted p
        is at most 1 - `LEVEL`.
    """
    out: list[tuple[float, float] | None] = [None] * len(p)
    known = sorted((value, k) for k, value in enumerate(p) if value is not None)
    highest, kept = 0.0, None
    for place, (value, k) in enumerate(known):
        left = len(known) - place
        highest = max(highest, min(1.0, left * value))
        alpha = (1 - LEVEL) / left
        if kept is None and value > alpha:
            kept = alpha  # nothing is significant from the first non-significant step on
        out[k] = (highest, alpha if kept is None else kept)
    return out


def holm_correct(differences: Sequence[MeanDifference]) -> list[CorrectedDifference]:
    """Differences as one family: each with `p_holm` and the interval `corrected_lo` to
    `corrected_hi`, null without p.
    """
    from scipy.special import stdtrit

    out = []
    for d, found in zip(differences, holm([d.p for d in differences]), strict=True):
        one = CorrectedDifference(**d.model_dump())
        # of protected means df is withheld
        if (
            found is not None
            and d.difference is not None
            and d.total_se is not None
            and d.df is not None
        ):
            reach = float(-stdtrit(d.df, found[1] / 2)) * d.total_se
            one = one.model_copy(
                update={
                    "p_holm": found[0],
                    "corrected_lo": d.difference - reach,
                    "corrected_hi": d.difference + reach,
                }
            )
        out.append(one)
    return out


def correct_pairs(
    found: Mapping[str, Difference], seeds: tuple[int, int] = (0, 0)
) -> dict[str, CorrectedDifference]:
    """Paired differences of one run each (`compare`, `score`) as one family; `seeds`: runs behind
    the two, 0: no seed matters here.
    """
    means = [
        MeanDifference(**d.model_dump(), total_se=d.se, effective=(d.df or 0.0) + 1.0, seeds=seeds)
        for d in found.values()
    ]
    return dict(zip(found, holm_correct(means), strict=True))


def apply_margins(
    differences: Sequence[CorrectedDifference],
    margins: Sequence[float | None],
    signs: Sequence[int],
) -> list[CorrectedDifference]:
    """Differences with their tests of non-inferiority and of equivalence against margins (None:
    none), each kind one family with Holm correction.

    The first is non-inferior where the bound of the corrected two-sided 95 % interval is above
    -margin; the two are equivalent where the corrected 90 % interval is inside +-margin (TOST) and
    the first is non-inferior, which is tested at half the error rate. `signs`: -1 for errors, of
    which more is worse. Margins are in units of the score.
    """
    from scipy.special import stdtr, stdtrit

    # one-sided, that the distance is above 0
    def test(d: CorrectedDifference, distance: float) -> float | None:
        return (
            None
            if d.p is None or d.total_se is None
            else float(stdtr(d.df, -distance / d.total_se))
        )

    pairs = list(zip(differences, margins, signs, strict=True))
    inferior = [
        None
        if m is None or (p := test(d, sign * (d.difference or 0.0) + m)) is None
        else min(2 * p, 1.0)
        for d, m, sign in pairs
    ]
    apart = [None if m is None else test(d, m - abs(d.difference or 0.0)) for d, m, _ in pairs]
    out = []
    for (d, m, sign), first, second in zip(pairs, holm(inferior), holm(apart), strict=True):
        if m is None:
            out.append(d)
            continue
        one = MarginTest(margin=m)
        if (
            first is not None
            and second is not None
            and d.difference is not None
            and d.total_se is not None
        ):
            reach, narrow = (
                -float(stdtrit(d.df, alpha)) * d.total_se for alpha in (first[1] / 2, second[1])
            )
            worst, lo, hi = (
                reach - sign * d.difference,
                d.difference - narrow,
                d.difference + narrow,
            )
            inside = -m < lo and hi < m
            one = MarginTest(
                margin=m,
                worst=worst,
                lo=lo,
                hi=hi,
                non_inferior=worst < m,
                equivalent=inside and worst < m,
            )
        out.append(d.model_copy(update={"against_margin": one}))
    return out


def explain_no_verdict(difference: CorrectedDifference) -> str | None:
    """Why neither of the two can be called better, whatever the interval, or None."""
    if difference.p_holm is None:
        return difference.undefined_reason or "no interval"
    if any(0 < count < MINIMUM_SEEDS for count in difference.seeds):
        return f"fewer than {MINIMUM_SEEDS} seeds"
    if difference.effective < MINIMUM_VERDICT:
        return f"effectively {difference.effective:.2f} subjects of equal weight, at least {MINIMUM_VERDICT:.0f} required"
    return None


def significance_sign(difference: CorrectedDifference) -> int:
    """1 or -1 where the corrected interval is above or below zero and a verdict is allowed
    (`explain_no_verdict`), else 0.
    """
    lo, hi = difference.corrected_lo, difference.corrected_hi
    return (
        0
        if lo is None or hi is None or explain_no_verdict(difference)
        else int(lo > 0) - int(hi < 0)
    )


def rank_values(
    values: Sequence[float | None], *, lower_is_better: bool = False
) -> list[float | None]:
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


def nemenyi(table: Any) -> RankTest:
    """Mean ranks over data sets ([N data sets, k rows] ranks) and their critical difference
    (Nemenyi's test; Demsar 2006, section 3.2.2).

    `critical` = q sqrt(k (k + 1) / 6 N), q = the studentised range at infinite degrees of freedom
    over sqrt(2). 1 - `LEVEL` is the error rate over all pairs.
    """
    from scipy import stats

    x = np.asarray(table, dtype=np.float64)
    n, k = x.shape
    q = float(stats.studentized_range.ppf(LEVEL, k, np.inf)) / np.sqrt(2)
    p = float(stats.friedmanchisquare(*x.T).pvalue) if k > 2 and n > 1 else None
    return RankTest(x.mean(0).tolist(), float(q * np.sqrt(k * (k + 1) / (6 * n))), p)
