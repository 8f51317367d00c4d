"""Type I error of every verdict that a page prints: how often each is given where it is not true.

    python benchmarks/verdicts.py                # a quarter of an hour
    python benchmarks/verdicts.py --cohorts 100  # quicker and coarser
    python benchmarks/verdicts.py --only report  # cases whose name holds a word

Verdicts: any difference among ten readouts that err alike, and against two controls (probing); a
finding at shapelets where one of its three conditions does not hold (saliency, attention), and any
finding among eight heads; over- or underconfidence of calibrated probabilities, also of any of five
labels (calibration); a baseline that beats a run which errs alike, of five (evaluate); any of four
rows of three seeds that is better or worse than the first, or than one of two baselines (report,
recipes); non-inferiority and equivalence at the margin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from side_by_side import Row, make_parser, report

from bitimely_core import evaluate
from bitimely_core.analyses.reliability import correct_gaps, estimate_reliability
from bitimely_core.evaluate import Predictions
from bitimely_core.evaluate.verdicts import judge_baselines
from bitimely_core.insight import regions

MOST = 0.06
NAMES = ("no", "yes")
Array = npt.NDArray[Any]
Generator = np.random.Generator


def draw_alike(count: int, subjects: int, rng: Generator) -> tuple[Array, Array, list[Array]]:
    """Subjects, classes and the probabilities [n, 2] of `count` models that err alike: a common
    part, one of the subject and one of the window.
    """
    groups = np.repeat(np.arange(subjects), rng.integers(5, 41, subjects))
    target = rng.integers(0, 2, len(groups))
    common = (
        1.5 * (2 * target - 1) + rng.normal(size=subjects)[groups] + rng.normal(size=len(groups))
    )
    each = [
        common + 0.6 * rng.normal(size=subjects)[groups] + 0.8 * rng.normal(size=len(groups))
        for _ in range(count)
    ]
    return groups, target, [np.stack([1 - p, p], 1) for p in (1 / (1 + np.exp(-s)) for s in each)]


def judge_readouts(subjects: int, rng: Generator, others: int = 10) -> bool:
    """Whether any of the other readouts is called better or worse than the default, as `analyze
    probing` does; two others: the controls.
    """
    groups, target, (default, *rest) = draw_alike(1 + others, subjects, rng)
    baselines = {str(k): one for k, one in enumerate(rest)}
    found = evaluate.score(
        "classification", target, default, groups, class_names=NAMES, baselines=baselines
    )
    differences = {
        name: one.metrics["accuracy"].difference for name, one in found.baselines.items()
    }
    return any(map(evaluate.significance_sign, evaluate.correct_pairs(differences).values()))


def judge_baseline(subjects: int, rng: Generator) -> bool:
    """Whether a page says that one of five baselines beats the run."""
    groups, target, (run, *rest) = draw_alike(6, subjects, rng)
    found = evaluate.score(
        "classification",
        target,
        run,
        groups,
        class_names=NAMES,
        baselines={str(k): p for k, p in enumerate(rest)},
    )
    return judge_baselines(found, "").case == "exceeded"


def judge_rows(subjects: int, rng: Generator, rows: int = 5, seeds: int = 3) -> bool:
    """Whether any row of a table is called better or worse than the first, as `report` and recipes
    do.
    """
    groups, target, each = draw_alike(rows * seeds, subjects, rng)
    runs = {
        str(k): Predictions(np.arange(len(target)), target, p, groups) for k, p in enumerate(each)
    }
    found = evaluate.estimate_runs("classification", runs, class_names=NAMES)
    of = [list(map(str, range(k * seeds, (k + 1) * seeds))) for k in range(rows)]
    corrected = evaluate.holm_correct(
        [evaluate.paired_difference(found, row, of[0]) for row in of[1:]]
    )
    return any(map(evaluate.significance_sign, corrected))


def judge_rows_and_baselines(
    subjects: int, rng: Generator, rows: int = 4, seeds: int = 3, others: int = 2
) -> bool:
    """Whether any row of seeds is called better or worse than any of the baselines that its runs
    store.
    """
    groups, target, each = draw_alike(rows * seeds + others, subjects, rng)
    baselines = {str(k): p for k, p in enumerate(each[rows * seeds :])}
    found = [
        evaluate.score("classification", target, p, groups, class_names=NAMES, baselines=baselines)
        for p in each[: rows * seeds]
    ]
    differences = [
        [one.baselines[name].metrics["accuracy"].difference for one in found] for name in baselines
    ]
    family = [
        evaluate.average_differences(of[k : k + seeds])
        for of in differences
        for k in range(0, rows * seeds, seeds)
    ]
    return any(map(evaluate.significance_sign, evaluate.holm_correct(family)))


def draw_maps(
    case: str, subjects: int, rng: Generator, samples: int = 60
) -> tuple[Array, list[Array], Array, regions.ShapeletWindows]:
    """Maps [S, T], those of random weights, ratios of the signal and the windows; `case`: the
    condition that does not hold, "": all do.

    Where it is random places, the shapelets are placed at random.
    """
    owners = np.repeat(np.arange(subjects), 4)
    n, length = len(owners), np.full(len(owners), 10)
    start = rng.integers(0, samples - 10 + 1, n)
    inside = (np.arange(samples) >= start[:, None]) & (
        np.arange(samples) < (start + length)[:, None]
    )
    level = 0.25 * rng.normal(size=subjects)[owners] + 0.25 * rng.normal(size=n)

    def draw(mean: float, shift: float = 0.0) -> Array:
        high = np.maximum(
            mean
            + level
            + shift
            + 0.2 * rng.normal(size=subjects)[owners]
            + 0.2 * rng.normal(size=n),
            0.05,
        )
        noise = rng.gamma(4.0, 0.25, (n, samples))
        share = high * length.sum() / n / samples  # of the map inside, so that its ratio is `high`
        share = np.clip(share, 0.01, 0.95)
        weights = np.where(
            inside, noise / (noise * inside).sum(1, keepdims=True) * share[:, None], 0.0
        )
        rest = noise * ~inside
        return weights + rest / rest.sum(1, keepdims=True) * (1 - share)[:, None]

    if case == "random places":
        rough = rng.gamma(1.0, 1.0, (n, samples))
        maps, low = rough / rough.sum(1, keepdims=True), 0.3
    else:
        maps, low = draw(2.5), 1.5
    controls = [
        draw(2.5 if case == "random weights" else low, 0.2 * rng.normal())
        for _ in range(regions.RANDOM_MODELS)
    ]
    size = (
        (2.5 if case == "signal size" else low)
        + level
        + 0.2 * rng.normal(size=subjects)[owners]
        + 0.2 * rng.normal(size=n)
    )
    chosen = regions.ShapeletWindows(
        np.arange(n), np.zeros(n, int), start, length, np.zeros(n), owners.astype(str), "test", n
    )
    return maps, controls, size, chosen


def judge_maps(case: str, subjects: int, rng: Generator, count: int = 1) -> bool:
    """Whether there is a finding on any of `count` maps."""
    measures = {}
    for k in range(count):
        maps, controls, size, chosen = draw_maps(case, subjects, rng)
        measures[k] = regions.compare_with_controls(
            maps, controls, size, chosen, 1000, int(rng.integers(1 << 30))
        )
    return any(one.is_found for one in regions.judge_measures(measures).values())


def judge_calibration(subjects: int, rng: Generator, labels: int = 1) -> bool:
    """Whether probabilities are called too high or too low though subjects deviate from them to
    both sides alike.
    """
    found = {}
    for k in range(labels):
        units = np.repeat(np.arange(subjects), rng.integers(5, 41, subjects))
        p = rng.uniform(0.3, 0.7, len(units))
        right = (rng.random(len(p)) < p + 0.25 * rng.uniform(-1, 1, subjects)[units]).astype(float)
        found[str(k)] = {
            "as_is": estimate_reliability(p, right, units, bins=5, bootstrap=2, seed=0)
        }
    return any(map(evaluate.significance_sign, correct_gaps(found).values()))


def judge_margin(subjects: int, rng: Generator, word: str = "non_inferior", count: int = 1) -> bool:
    """Whether any of `count` differences that are exactly at the margin is called non-inferior, or
    equivalent.
    """
    margin, units = 0.05, np.arange(subjects)
    values = [rng.normal(-margin, 0.03, subjects) for _ in range(count)]
    corrected = evaluate.holm_correct(
        [evaluate.compare_with_zero(one, units, subjects) for one in values]
    )
    tested = evaluate.apply_margins(corrected, [margin] * count, [1] * count)
    return any(getattr(d.against_margin, word) for d in tested)


CASES: dict[str, Callable[[int, Generator], bool]] = {
    "probing: any of ten readouts": judge_readouts,
    "probing: any of two controls": lambda subjects, rng: judge_readouts(subjects, rng, 2),
    "maps: not above random weights": lambda subjects, rng: judge_maps(
        "random weights", subjects, rng
    ),
    "maps: not above the signal's size": lambda subjects, rng: judge_maps(
        "signal size", subjects, rng
    ),
    "maps: not above random places": lambda subjects, rng: judge_maps(
        "random places", subjects, rng
    ),
    "maps: any of eight heads": lambda subjects, rng: judge_maps(
        "random weights", subjects, rng, 8
    ),
    "calibration: the gap": judge_calibration,
    "calibration: any of five labels": lambda subjects, rng: judge_calibration(subjects, rng, 5),
    "evaluate: a baseline beats the run": judge_baseline,
    "report: any of four rows": judge_rows,
    "report: any of four rows and two baselines": judge_rows_and_baselines,
    "margin: non-inferior": judge_margin,
    "margin: any of five non-inferior": lambda subjects, rng: judge_margin(subjects, rng, count=5),
    "margin: equivalent": lambda subjects, rng: judge_margin(subjects, rng, "equivalent"),
}


def bound_errors(cohorts: int) -> float:
    """The largest number of errors that a verdict given in `MOST` of cohorts exceeds in fewer than
    one of 200 simulations.
    """
    return float(stats.binom.ppf(0.995, cohorts, MOST))


def measure_errors(case: str, subjects: int, cohorts: int, seed: int = 0) -> float:
    """Share of cohorts in which the verdict is given."""
    return float(
        np.mean(
            [
                CASES[case](subjects, np.random.default_rng([seed, subjects, k]))
                for k in range(cohorts)
            ]
        )
    )


def measure(cohorts: int, seed: int, only: str, sizes: tuple[int, ...]) -> Iterator[Row]:
    """A row a case and number of subjects."""
    most = bound_errors(cohorts) / cohorts
    for case in (case for case in CASES if only in case):
        for subjects in sizes:
            share = measure_errors(case, subjects, cohorts, seed)
            figure = f"{case}, {subjects} subjects"
            yield Row(figure=figure, peer="nominal 5 %", value=share, most=most)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "2 cohorts of 6 subjects")
    parser.add_argument("--cohorts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the name of a case")
    given = parser.parse_args()
    cohorts, sizes = (2, (6,)) if given.quick else (given.cohorts, (6, 20, 50))
    rows = measure(cohorts, given.seed, given.only, sizes)
    return report(f"verdicts that are not true, {cohorts} cohorts a row", rows, given)


if __name__ == "__main__":
    sys.exit(main())
