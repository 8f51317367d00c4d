"""Coverage of the confidence intervals of scores, type I error of comparisons, and their cost.

    python benchmarks/intervals.py                # coverage and type I error in every setting, some minutes
    python benchmarks/intervals.py --cohorts 100  # quicker and coarser
    python benchmarks/intervals.py --only rate    # the other intervals whose name holds a word, a minute
    python benchmarks/intervals.py --cost         # a million windows: CPU seconds and memory beside the array of predictions

Cohorts: subjects with 5 to 40 windows (even) or 1 to 200 (wide), a shift and a gain of each
subject's scores, two classes; the truth is that of 40,000 subjects.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from side_by_side import Row, make_parser, report

from bitimely_core import evaluate
from bitimely_core.claims.prevalence import compute_interval
from bitimely_core.evaluate import Predictions, compare, score
from bitimely_core.evaluate.endpoints import limits_of_agreement
from bitimely_core.evaluate.intervals import average_over_units, average_rate
from bitimely_core.evaluate.survival_metrics import find_incidence_interval

METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "auroc", "auprc", "mae")
SETTINGS = {
    "even": (False, 1.0, False),
    "wide": (True, 1.0, False),
    "nearly all right": (False, 2.6, False),
    "labels by subject": (False, 1.0, True),
}
SUBJECTS = (5, 10, 20, 50)
LOWEST, HIGHEST, TYPE_ONE = {5: 0.90, 10: 0.93, 20: 0.93, 50: 0.93}, 0.97, 0.06
NAMES = ("no", "yes")
Array = npt.NDArray[Any]


class Cohort(NamedTuple):
    """Windows of one simulated data set: subject, class, probability of the second class, error of
    a regression.
    """

    groups: Array
    target: Array
    probability: Array
    error: Array


def draw_cohort(
    setting: str, subjects: int, rng: np.random.Generator, spread: float = 0.8
) -> Cohort:
    """A cohort in which an interval is defined."""
    wide, separation, by_subject = SETTINGS[setting]
    while True:
        sizes = (
            np.exp(rng.uniform(0, np.log(200), subjects)).astype(int)
            if wide
            else rng.integers(5, 41, subjects)
        )
        g = np.repeat(np.arange(subjects), sizes)
        share = rng.integers(0, 2, subjects) if by_subject else rng.beta(2.5, 2.5, subjects)
        y = (rng.random(len(g)) < share[g]).astype(int)
        if all(len(np.unique(g[y == k])) >= 2 and (y == k).sum() >= 5 for k in (0, 1)):
            break
    sign = 2 * y - 1
    shift, gain = spread * rng.normal(size=subjects), 0.7 * spread * rng.normal(size=subjects)
    s = (separation + gain[g]) * sign + shift[g] + rng.normal(size=len(g))
    error = (
        shift[g]
        + np.exp(0.5 * spread * rng.normal(size=subjects))[g] * rng.normal(size=len(g)) * 0.7
    )
    return Cohort(g, y, 1 / (1 + np.exp(-s)), error)


def score_cohort(one: Cohort) -> dict[str, Any]:
    """All metrics of a cohort."""
    p = np.stack([1 - one.probability, one.probability], 1)
    found = dict(score("classification", one.target, p, one.groups, class_names=NAMES).metrics)
    return {
        **found,
        "mae": score("regression", np.zeros(len(one.groups)), one.error, one.groups).metrics["mae"],
    }


NOMINAL = "nominal 95 %"


def make_coverage(figure: str, inside: list[bool], least: float, most: float | None = None) -> Row:
    """The share of intervals that hold the truth; its bounds allow for the simulation's error."""
    slack = 3 * np.sqrt(0.05 * 0.95 / max(len(inside), 1))
    share = float(np.mean(inside)) if inside else float("nan")
    highest = None if most is None else most + slack
    return Row(figure=figure, peer=NOMINAL, value=share, least=least - slack, most=highest)


def measure_coverage(cohorts: int, seed: int, largest: int) -> Iterator[Row]:
    """Coverage of the scores' intervals in every setting; the truth is that of `largest`
    subjects.
    """
    for setting in SETTINGS:
        whole = score_cohort(draw_cohort(setting, largest, np.random.default_rng(seed)))
        truth = {metric: found.value for metric, found in whole.items()}
        for subjects in SUBJECTS:
            rng = np.random.default_rng([seed, subjects, 1])
            inside: dict[str, list[bool]] = {metric: [] for metric in METRICS}
            for _ in range(cohorts):
                for metric, v in score_cohort(draw_cohort(setting, subjects, rng)).items():
                    if metric in inside and v.lo is not None:
                        inside[metric].append(v.lo <= truth[metric] <= v.hi)
            most = HIGHEST if setting in {"even", "wide"} and subjects > 5 else None
            for metric, of in inside.items():
                figure = f"{metric}, {setting}, {subjects} subjects"
                yield make_coverage(figure, of, LOWEST[subjects], most)


def measure_type_one(cohorts: int, seed: int) -> Iterator[Row]:
    """How often two runs that err alike differ at 0.05."""
    slack = 3 * np.sqrt(0.05 * 0.95 / cohorts)
    for setting in ("even", "wide"):
        for subjects in SUBJECTS:
            rng, rejected = np.random.default_rng([seed, subjects, 2]), []
            for _ in range(cohorts):
                one = draw_cohort(setting, subjects, rng)
                runs = [draw_run(one, subjects, rng) for _ in range(2)]
                found = compare("classification", *runs, class_names=NAMES).metrics
                rejected += [
                    d.p <= 0.05 for m in METRICS if m in found and (d := found[m]).p is not None
                ]
            yield Row(
                figure=f"two runs that err alike, {setting}, {subjects} subjects",
                peer="nominal 5 %",
                value=float(np.mean(rejected)),
                most=TYPE_ONE + slack,
            )


def draw_run(cohort: Cohort, subjects: int, rng: np.random.Generator) -> Predictions:
    """Predictions with errors of their own, of subjects and of windows."""
    logit = np.log(cohort.probability / (1 - cohort.probability))
    own = 0.5 * rng.normal(size=subjects)[cohort.groups] + 0.7 * rng.normal(size=len(logit))
    p = 1 / (1 + np.exp(-(logit + own)))
    return Predictions(np.arange(len(p)), cohort.target, np.stack([1 - p, p], 1), cohort.groups)


class Drawn(NamedTuple):
    """An interval of a simulated cohort and the truth; bounds are None where there is none."""

    lo: float | None
    hi: float | None
    truth: float


def draw_rate(
    subjects: int, rng: np.random.Generator, mean: float = 3.0, spread: float = 1.0
) -> Drawn:
    """False alarms an hour: `mean` alarms a subject, in half an hour to a day; the rates of
    subjects are distributed exponentially, or as a gamma distribution of such a `spread` (standard
    deviation over mean).
    """
    hours = np.exp(rng.uniform(np.log(0.5), np.log(24.0), subjects))
    truth = mean * np.log(48.0) / 23.5  # the mean of these hours is 23.5 / log 48
    rates = truth * (rng.gamma(spread**-2, spread**2, subjects) if spread else np.ones(subjects))
    alarms = rng.poisson(rates * hours).astype(float)
    rate = average_rate(alarms, hours, highest=3600.0)
    return Drawn(rate.lo, rate.hi, truth)


def draw_rare(
    subjects: int,
    rng: np.random.Generator,
    positives: float = 8.0,
    separation: float = 1.5,
    rows: int = 1,
) -> Drawn:
    """Average precision of a rare label: ten rows for each of `subjects`, of people with `rows`
    each, with `positives` among 200 on average; scores are normal, `separation` apart, and of
    several rows of one person half of the variance is theirs.
    """
    from scipy.stats import norm

    share = positives / 200
    y = (rng.random(10 * subjects) < share).astype(np.int64)
    people = np.arange(len(y)) // rows
    common = 0.5 if rows > 1 else 0.0
    s = np.sqrt(1 - common) * rng.normal(size=len(y)) + separation * y
    s += np.sqrt(common) * rng.normal(size=len(y))[people]
    p = (1 / (1 + np.exp(-s)))[:, None]
    auprc = score("multilabel", y[:, None], p, people, class_names=["a"]).metrics["auprc"]
    grid = np.linspace(-9.0, 9.0 + separation, 20_001)
    hit, alarm = share * norm.sf(grid - separation), (1 - share) * norm.sf(grid)
    density = norm.pdf(grid - separation)
    truth = float(np.trapezoid(density * hit / (hit + alarm), grid))
    return Drawn(auprc.lo, auprc.hi, truth)


def draw_incidence(subjects: int, rng: np.random.Generator) -> Drawn:
    """Cumulative incidence on day 100 with deaths and censoring of constant hazards."""
    hazards = np.array([0.004, 0.002, 0.003])  # event, death, censoring
    times = rng.exponential(1 / hazards[:, None], (3, subjects))
    event = np.array([1, 2, 0])[times.argmin(0)]
    _, lo, hi = find_incidence_interval(times.min(0), event, 100.0)
    both = hazards[:2].sum()
    return Drawn(lo, hi, float(hazards[0] / both * -np.expm1(-100 * both)))


def draw_limit(subjects: int, rng: np.random.Generator) -> Drawn:
    """The lower limit of agreement of two nights a subject: standard deviations of 4 between
    subjects and of 3 within them.
    """
    units = np.repeat(np.arange(subjects), 2)
    difference = 4 * rng.normal(size=subjects)[units] + 3 * rng.normal(size=len(units))
    low, _ = limits_of_agreement(difference, units)
    return Drawn(low.lo, low.hi, -1.96 * 5)


def draw_mean(subjects: int, rng: np.random.Generator, kind: str) -> Drawn:
    """A mean over subjects with 1 to 8 values each: normal (`mean`), lognormal (`ratio`) or whether
    an event is found (`share`).
    """
    units = np.repeat(np.arange(subjects), rng.integers(1, 9, subjects))
    normal = 0.5 * rng.normal(size=subjects)[units] + 0.5 * rng.normal(size=len(units))
    values, truth = normal, 0.0
    if kind == "ratio":
        values, truth = np.exp(normal), float(np.exp(0.25))
    if kind == "share":
        values, truth = (rng.random(len(units)) < rng.beta(4, 2, subjects)[units]) * 1.0, 4 / 6
    mean = average_over_units(values, units, subjects, kind)
    return Drawn(mean.lo, mean.hi, truth)


def draw_prevalence(subjects: int, rng: np.random.Generator) -> Drawn:
    """A prevalence ratio of 20 cases and as many others for each of `subjects`: a code that .3 of
    the cases and .1 of the others carry.
    """
    n = 20 * subjects
    cases, others = int(rng.binomial(n, 0.3)), int(rng.binomial(n, 0.1))
    bounds = compute_interval(cases / max(others, 1), cases, n, others, n, "controls")
    return Drawn(*(bounds or (None, None)), 3.0)


OTHERS: dict[str, Callable[[int, np.random.Generator], Drawn]] = {
    "rate: equal rates of subjects": partial(draw_rate, spread=0.0),
    "rate: exponential rates": draw_rate,
    "rate: exponential rates, few alarms": partial(draw_rate, mean=0.5),
    "rate: exponential rates, many alarms": partial(draw_rate, mean=40.0),
    "incidence on a day": draw_incidence,
    "limit of agreement": draw_limit,
    "mean over subjects": partial(draw_mean, kind="mean"),
    "mean of ratios": partial(draw_mean, kind="ratio"),
    "share of events that are found": partial(draw_mean, kind="share"),
    "prevalence ratio": draw_prevalence,
    "rare label: 8 of 200 positive": draw_rare,
    "rare label: 15 of 200 positive, little skill": partial(
        draw_rare, positives=15.0, separation=0.7
    ),
    # at 20: of 50 people
    "rare label: 5 of 200, four rows a person": partial(draw_rare, positives=5.0, rows=4),
    "rare label: 8 of 200, four rows a person": partial(draw_rare, rows=4),
    "rare label: 15 of 200, four rows a person": partial(
        draw_rare, positives=15.0, separation=0.7, rows=4
    ),
}


# every function of the package with a quantile of a distribution -> where it is simulated
SIMULATED = {
    "evaluate/intervals.py:bound_share": "incidence on a day",  # where nobody has the event
    "evaluate/intervals.py:find_interval": "mean over subjects",  # and `measure_coverage`
    "evaluate/intervals.py:_bound_on_logit": "rare label: 8 of 200 positive",
    "evaluate/intervals.py:_reach_of_rate": "rate: exponential rates",
    "evaluate/intervals.py:build_difference": "measure_type_one",
    "evaluate/endpoints.py:limits_of_agreement": "limit of agreement",
    "evaluate/survival_metrics.py:find_incidence_interval": "incidence on a day",
    "claims/prevalence.py:compute_interval": "prevalence ratio",
    "evaluate/multiple.py": "verdicts.py",
    "insight/regions.py": "verdicts.py",
    # percentiles of the bootstrap, which are said to be too narrow, and of random draws
    "analyses/plain_features.py:make_metric": "docs/statistics.md: where the bootstrap is used",
    "analyses/reliability.py:_draw_null": "no interval: calibrated probabilities",
    "insight/regions.py:_compare_places": "no interval: random places",
    "insight/shapelets.py": "no interval: permuted labels",
}


def measure_other(name: str, subjects: int, cohorts: int, seed: int = 0) -> tuple[float, float]:
    """The share of intervals that hold the truth, and of cohorts without an interval."""
    draws = [
        OTHERS[name](subjects, np.random.default_rng([seed, subjects, k])) for k in range(cohorts)
    ]
    inside = [d.lo <= d.truth <= d.hi for d in draws if d.lo is not None and d.hi is not None]
    return float(np.mean(inside)) if inside else float("nan"), 1 - len(inside) / cohorts


def measure_others(cohorts: int, seed: int, only: str = "") -> Iterator[Row]:
    """Coverage of the other intervals."""
    for name in (name for name in OTHERS if only in name):
        for subjects in (8, 10, 20, 50):
            share, absent = measure_other(name, subjects, cohorts, seed)
            none = f", none in {absent:.0%}" if absent else ""
            least = LOWEST[10] - 3 * np.sqrt(0.05 * 0.95 / cohorts)
            figure = f"{name}, {subjects} subjects{none}"
            yield Row(figure=figure, peer=NOMINAL, value=share, least=least)


def measure_cost(rows: int = 1_000_000, subjects: int = 1_000, classes: int = 5) -> Iterator[Row]:
    """All scores with intervals of `rows` windows, beside two constant baselines."""
    rng = np.random.default_rng(0)
    y, g = rng.integers(0, classes, rows), rng.integers(0, subjects, rows)
    p = rng.random((rows, classes), dtype=np.float32)
    p /= p.sum(1, keepdims=True)
    # imports
    evaluate.score("classification", y[:999], p[:999], g[:999], class_names=list("abcde"))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    evaluate.score("classification", y, p, g, class_names=list("abcde"), train_target=y)
    seconds = time.process_time() - started
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    what = f"scores of {rows:,} windows"
    yield Row(figure=what, value=seconds, unit="CPU s", most=60.0)
    yield Row(figure=what, value=memory, unit="MiB", most=600.0)


def measure(cohorts: int, seed: int, largest: int) -> Iterator[Row]:
    """All rows but the cost."""
    yield from measure_coverage(cohorts, seed, largest)
    yield from measure_type_one(cohorts, seed)
    yield from measure_others(cohorts, seed)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "2 cohorts")
    parser.add_argument("--cohorts", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="cost alone")
    parser.add_argument("--only", help="part of the name of one of the other intervals")
    given = parser.parse_args()
    cohorts, largest = (2, 400) if given.quick else (given.cohorts, 40_000)
    if given.cost:
        return report("cost of intervals", measure_cost(), given)
    title = f"coverage of 95 % intervals and type I error, {cohorts} cohorts a row"
    if given.only is not None:
        return report(title, measure_others(cohorts, given.seed, given.only), given)
    return report(title, measure(cohorts, given.seed, largest), given)


if __name__ == "__main__":
    sys.exit(main())
