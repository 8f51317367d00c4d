"""Several runs: means over seeds, paired differences, Holm correction, verdicts, ranks. Legend:
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.evaluate import intervals
from bitimely_core.evaluate.intervals import LEVEL
from bitimely_core.evaluate.metrics import (
    EMPTY,
    MAIN,
    NUMBER,
    POINTS,
    Array,
    Estimate,
    MetricUnit,
    Unit,
    check_rows,
    estimate_predictions,
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
Step = tuple[float, float]  # of Holm's correction: adjusted p and error rate


class RunEstimates(NamedTuple):
    """One metric of several runs on the same windows."""

    metric: str
    runs: dict[str, Estimate]
    undefined: str | None  # why there is no value
    uncertain: str | None  # why there is no interval
    unit: MetricUnit = POINTS  # of differences

    def mean(self, runs: Sequence[str]) -> Estimate:
        """The mean over `runs`, such as one run a seed."""
        values, influences, weights = zip(*(self.runs[run] for run in runs), strict=True)
        return Estimate(float(np.mean(values)), np.mean(influences, axis=0), weights[0])


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
        return RunEstimates(name, dict.fromkeys(runs, nothing), EMPTY, None, printed)
    rows = check_rows(task, target, predictions, groups, class_names, by, subject)
    estimates = estimate_predictions(rows)
    if label is None:
        values = {run: estimate.metrics[name] for run, estimate in estimates.items()}
        uncertain = intervals.explain_no_interval(rows, name, bootstrap)
        return RunEstimates(name, values, "not defined by these rows", uncertain, printed)
    k = rows.names.index(label)
    values = {run: estimate.each["auprc"][k] for run, estimate in estimates.items()}
    few = intervals.explain_few_units(rows, bootstrap)
    uncertain = few or intervals.explain_rare_class(rows, k)
    undefined = intervals.explain_absent_class(rows, k)
    return RunEstimates("auprc", values, undefined, uncertain, printed)


def mean_over_seeds(estimates: RunEstimates, runs: Sequence[str]) -> MetricValue:
    """The mean of a metric over `runs`, such as one run per seed, with its interval over
    subjects.
    """
    mean = estimates.mean(runs)
    return intervals.build_metric(estimates.metric, mean, estimates.undefined, estimates.uncertain)


def paired_difference(
    estimates: RunEstimates, first: Sequence[str], second: Sequence[str]
) -> MeanDifference:
    """The paired difference of the means of two sets of runs, such as two models with one run per
    seed each.

    `se`, `lo` and `hi` speak of these trained runs: `compare` has them for one pair. `total_se`
    adds the variance between the seeds of
    each set, its own and not pooled over others: `sqrt(se^2 + s_1^2 / S_1 + s_2^2 / S_2)`. `p` is
    two-sided, of the difference over `total_se` against Student's t with Welch and Satterthwaite's
    degrees of freedom. They are null where there is no interval.
    """
    draws = [[estimates.runs[run].value for run in runs] for runs in (first, second)]
    return _test_difference(estimates, first, second, draws, (len(first), len(second)))


def compare_with_baseline(
    estimates: RunEstimates, runs: Sequence[str], baseline: str
) -> MeanDifference:
    """The mean of one run a seed less a baseline, with the variance between seeds; below
    `MINIMUM_SEEDS` without it, of these trained models.
    """
    if len(runs) < MINIMUM_SEEDS:
        return _test_difference(estimates, runs, [baseline], [], (0, 0))
    difference = paired_difference(estimates, runs, [baseline])
    return difference.model_copy(update={"seeds": (len(runs), 0)})


def average_differences(differences: Sequence[Difference]) -> MeanDifference:
    """The same of stored differences, one a seed; the standard error over subjects is the mean of
    theirs, which that of the mean cannot exceed.
    """
    count, first = len(differences), differences[0]
    values = [d.difference for d in differences if d.difference is not None]
    reasons = _list_undefined(differences)
    df = next(filter(None, (d.df for d in differences)), None)
    mean = MeanDifference(
        difference=float(np.mean(values)),
        n_defined=first.n_defined,
        unit=first.unit,
        factor=first.factor,
        seeds=(count if count >= MINIMUM_SEEDS else 0, 0),
    )
    if reasons or df is None:
        reason = next(iter(reasons), first.undefined_reason)
        return mean.model_copy(update={"undefined_reason": reason})
    return mean.model_copy(update=_test_mean(values, [d.se or 0.0 for d in differences], df))


def _list_undefined(differences: Sequence[Difference]) -> list[str | None]:
    """Why differences have no standard error, but for those that do not vary."""
    no_spread = {f"no CI: {words}" for words in intervals.NO_SPREAD}
    undefined = (d.undefined_reason for d in differences if d.se is None)
    return [reason for reason in undefined if reason not in no_spread]


def _test_mean(values: Sequence[float], errors: Sequence[float], df: float) -> dict[str, float]:
    """The test of the mean of differences, one a seed.

    Args:
        values: differences.
        errors: their standard errors over subjects.
        df: degrees of freedom of the errors.
    """
    from scipy.special import stdtr, stdtrit

    count = len(values)
    value, se = float(np.mean(values)), float(np.mean(errors))
    of_seeds = float(np.var(values, ddof=1)) / count if count >= MINIMUM_SEEDS else 0.0
    total, reach = float(np.sqrt(se**2 + of_seeds)), float(stdtrit(df, (1 + LEVEL) / 2)) * se
    total_df = total**4 / (se**4 / df + of_seeds**2 / max(count - 1, 1))
    return {
        "se": se,
        "lo": value - reach,
        "hi": value + reach,
        "total_se": total,
        "df": total_df,
        "p": 2 * float(stdtr(total_df, -abs(value) / total)),
        "effective": df + 1,
    }


def _test_difference(
    estimates: RunEstimates,
    first: Sequence[str],
    second: Sequence[str],
    draws: Sequence[Sequence[float]],
    seeds: tuple[int, int],
) -> MeanDifference:
    """The difference of the means of two sets of runs with its test; `draws`: sets of random
    values, each of which adds the variance of its mean.
    """
    from scipy.special import stdtr

    a, b = estimates.mean(first), estimates.mean(second)
    untested = intervals.build_difference(a, b, estimates.uncertain, estimates.unit)
    difference = MeanDifference(
        **untested.model_dump(exclude={"p"}), effective=a.weights.effective, seeds=seeds
    )
    if difference.difference is None or estimates.uncertain is not None:
        return difference
    variance = intervals.estimate_variance(a.influence - b.influence, a.weights.leverage)
    parts = [(variance, a.weights.df)]
    parts += [
        (float(np.var(values, ddof=1)) / len(values), len(values) - 1.0)
        for values in draws
        if len(values) > 1
    ]
    total = sum(variance for variance, _ in parts)
    total_se = float(np.sqrt(total))
    if intervals.is_rounding(total_se, a.value, b.value, scaled=estimates.unit.scaled):
        return difference
    df = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    p = 2 * float(stdtr(df, -abs(difference.difference) / np.sqrt(total)))
    return difference.model_copy(update={"total_se": total_se, "df": float(df), "p": p})


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
    finite = np.isfinite(values)
    mean = intervals.estimate_mean(values[finite], units[finite], n_units)
    squares = mean.weights.leverage**2
    df = squares.sum() ** 2 / max(float((squares**2).sum()), np.finfo(float).tiny) - 1
    weights = mean.weights._replace(df=max(1.0, float(df)))
    runs = {
        "mean": mean._replace(weights=weights),
        "zero": Estimate(0.0, np.zeros(n_units), weights),
    }
    few = intervals.explain_few(len(np.unique(units[finite])), bootstrap)
    estimates = RunEstimates("mean", runs, None, few, NUMBER)
    return _test_difference(estimates, ["mean"], ["zero"], [draws], (0, 0))


def holm(p: Sequence[float | None]) -> list[Step | None]:
    """Holm's step-down correction of a family of comparisons; None marks a comparison without p,
    which is not counted.

    Returns:
        For each `(adjusted, alpha)`: the adjusted p, to be compared with 1 - `LEVEL`, and the error
        rate of its step. An interval of level 1 - alpha excludes zero exactly where the adjusted p
        is at most 1 - `LEVEL`.
    """
    steps: list[Step | None] = [None] * len(p)
    ordered = sorted((value, k) for k, value in enumerate(p) if value is not None)
    adjusted, alpha, significant = 0.0, 0.0, True
    for place, (value, k) in enumerate(ordered):
        remaining = len(ordered) - place
        adjusted = max(adjusted, min(1.0, remaining * value))
        if significant:  # nothing is from the first non-significant step on
            alpha = (1 - LEVEL) / remaining
            significant = value <= alpha
        steps[k] = (adjusted, alpha)
    return steps


def holm_correct(differences: Sequence[MeanDifference]) -> list[CorrectedDifference]:
    """Differences as one family: each with `p_holm` and the interval `corrected_lo` to
    `corrected_hi`, null without p.
    """
    from scipy.special import stdtrit

    family = []
    for d, step in zip(differences, holm([d.p for d in differences]), strict=True):
        corrected = CorrectedDifference(**d.model_dump())
        # of protected means df is withheld
        if step is not None and d.df is not None:
            value, total_se = d.difference or 0.0, d.total_se or 0.0
            reach = float(-stdtrit(d.df, step[1] / 2)) * total_se
            bounds = {"corrected_lo": value - reach, "corrected_hi": value + reach}
            corrected = corrected.model_copy(update={"p_holm": step[0], **bounds})
        family.append(corrected)
    return family


def correct_pairs(
    differences: Mapping[str, Difference], seeds: tuple[int, int] = (0, 0)
) -> dict[str, CorrectedDifference]:
    """Paired differences of one run each (`compare`, `score`) as one family; `seeds`: runs behind
    the two, 0: no seed matters here.
    """
    means = [
        MeanDifference(**d.model_dump(), total_se=d.se, effective=(d.df or 0.0) + 1.0, seeds=seeds)
        for d in differences.values()
    ]
    return dict(zip(differences, holm_correct(means), strict=True))


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
    worse, apart = [], []
    for d, margin, sign in zip(differences, margins, signs, strict=True):
        value = d.difference or 0.0
        worse.append(_test_distance(d, margin, sign * value, 2))
        apart.append(_test_distance(d, margin, -abs(value), 1))
    tests = map(_test_margin, differences, margins, signs, holm(worse), holm(apart))
    pairs = zip(differences, tests, strict=True)
    return [d.model_copy(update={"against_margin": test}) for d, test in pairs]


def _test_distance(
    d: CorrectedDifference, margin: float | None, value: float, sides: int
) -> float | None:
    """The p of the hypothesis that a value with the margin added is not above 0."""
    from scipy.special import stdtr

    if margin is None or d.p is None or d.total_se is None:
        return None
    return min(sides * float(stdtr(d.df, -(value + margin) / d.total_se)), 1.0)


def _test_margin(
    d: CorrectedDifference, margin: float | None, sign: int, worse: Step | None, apart: Step | None
) -> MarginTest | None:
    """The test of one difference from its steps of Holm's correction in the two families."""
    from scipy.special import stdtrit

    if margin is None:
        return None
    if worse is None or apart is None:
        return MarginTest(margin=margin)
    value, total_se = d.difference or 0.0, d.total_se or 0.0
    reach, narrow = (-float(stdtrit(d.df, a)) * total_se for a in (worse[1] / 2, apart[1]))
    worst, lo, hi = reach - sign * value, value - narrow, value + narrow
    return MarginTest(
        margin=margin,
        worst=worst,
        lo=lo,
        hi=hi,
        non_inferior=worst < margin,
        equivalent=-margin < lo and hi < margin and worst < margin,
    )


def explain_no_verdict(difference: CorrectedDifference) -> str | None:
    """Why neither of the two can be called better, whatever the interval, or None."""
    if difference.p_holm is None:
        return (difference.undefined_reason or "no interval").removeprefix("no CI: ")
    if any(0 < count < MINIMUM_SEEDS for count in difference.seeds):
        return f"fewer than {MINIMUM_SEEDS} seeds"
    if difference.effective >= MINIMUM_VERDICT:
        return None
    effective = f"effectively {difference.effective:.2f} subjects of equal weight"
    return f"{effective}, at least {MINIMUM_VERDICT:.0f} required"


def find_margin_test(difference: CorrectedDifference) -> MarginTest | None:
    """The test against a margin, where there is one and a verdict is allowed."""
    test = difference.against_margin
    if test is None or test.worst is None or explain_no_verdict(difference) is not None:
        return None
    return test


def significance_sign(difference: CorrectedDifference) -> int:
    """1 or -1 where the corrected interval is above or below zero and a verdict is allowed
    (`explain_no_verdict`), else 0.
    """
    lo, hi = difference.corrected_lo, difference.corrected_hi
    if lo is None or hi is None or explain_no_verdict(difference):
        return 0
    return int(lo > 0) - int(hi < 0)


def rank_values(
    values: Sequence[float | None], *, lower_is_better: bool = False
) -> list[float | None]:
    """Rank of each value, 1 the best, equal ones their mean rank; None has none."""
    from scipy.stats import rankdata

    scores = np.array(values, np.float64)
    ranks = rankdata(scores if lower_is_better else -scores, nan_policy="omit")
    return [None if np.isnan(rank) else rank for rank in ranks.tolist()]


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
