"""Held-out windows in which a shapelet is present, and whether a map over their samples (saliency,
attention) concentrates on it.

The statistic is the ratio (share of the map inside the shapelet) / (share of the length inside it);
1 is no preference. A finding requires that it exceeds the same ratio of random weights, that of the
magnitude of the signal, and that of shapelets at random places of the same windows: three tests a
run, which with those of the other runs of a page are one family with Holm correction. A single
random initialisation can have a preference by chance, so several are drawn, and their variance
enters the test.

Legend: S windows, T samples, N tokens, R sets of random weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import evaluate
from bitimely_core.config import ModelConfig
from bitimely_core.data import draw_held_out
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.insight.shapelet_mining import (
    MiningOptions,
    Shapelet,
    compute_distances,
    mine_shapelets,
)
from bitimely_core.insight.shapelets import parse_seconds, read_shapelets
from bitimely_core.models.tokenizers import samples_per_token
from bitimely_core.page import BarPlot, PageBuilder
from bitimely_core.schemas.scores import CorrectedDifference, MeanDifference, MetricValue
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Progress

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = TypeVar("Key")  # of a map: a run, or a run and a head

POOL = 10  # held-out windows that are searched per window that is kept
PRESENT_SHARE = 0.1  # share of them, the closest, in which a shapelet counts as present
RANDOM_PLACES = 1000  # draws of random places
RANDOM_MODELS = 5  # sets of random weights
CONTROLS = (
    "random weights",
    "beyond random weights",
    "beyond the signal's size",
    "p, random places",
    "p, Holm",
    "finding?",
)  # columns of tables
HEADLINE = (
    f"Share of {{what}} inside the shapelets over their share of the length, mean over windows: 1 is no preference. Evidence for the model "
    f"requires a ratio above that of random weights, above shapelets at random places (bar: 95 % of {RANDOM_PLACES:,} draws), and above the "
    "magnitude of the signal; otherwise chance, architecture or amplitude explain it."
)
RATIOS = (
    f"Ratio: share inside over share of the length, its 95 % CI over subjects on the logarithm. Random weights: mean of {RANDOM_MODELS} draws. Beyond random weights: the ratio "
    "less that, window by window; beyond the signal's size: less the ratio of the signal's magnitude; both with 95 % CI that are not corrected, the first with the variance "
    f"between the draws. p, random places: share of {RANDOM_PLACES:,} random places with a ratio as large; it speaks of these windows only, not of other subjects. p, Holm: "
    "the largest of the three p after Holm correction of {tests}. A finding requires both differences above 0 and all three p of at most 0.05 after correction; it speaks of "
    "this trained model."
)
DIFFERENCE_COLUMNS = (
    "run",
    "against",
    "map",
    "difference of the ratios",
    "corrected 95 % CI",
    "p, Holm",
)
DIFFERENCES = (
    "Ratio of the first run less that of the other on the same windows, between these trained models; one family with Holm correction. If the corrected 95 % CI contains 0, the "
    "difference is not significant."
)


def load_shapelets(
    windows: Windows, folder: str, lengths: str, seed: int, progress: Progress | None
) -> tuple[list[Shapelet], Ints, float | None]:
    """The shapelets, the rows that they were mined from, and the p of the best one.

    They are those of a report of `analyze shapelets` (p is None), or, without `folder`, mined from
    the training split. Raises UserError: config (exit 2) for windows without classes and no folder,
    or a folder without shapelets; those of `mine_shapelets`.
    """
    if folder:
        found = read_shapelets(folder)
        return found, np.array([one.window for one in found], np.int64), None
    if windows.task != "classification":
        raise usage_error(
            f"{windows.name} has no classes",
            "shapelets separate classes",
            "Give --data a view with classes, or --shapelets a report of analyze shapelets",
            field="--data",
        )
    mined = mine_shapelets(
        windows, MiningOptions(parse_seconds(lengths), permutations=99, seed=seed), progress
    )
    return mined.shapelets, mined.drawn.rows, mined.shapelets[0].p


class ShapeletWindows(NamedTuple):
    """Held-out windows in which a shapelet is present."""

    rows: Ints  # [S]
    which: Ints  # [S] number of the shapelet
    start: Ints  # [S] samples
    length: Ints  # [S]
    distance: Array  # [S], per sample
    subjects: npt.NDArray[Any]  # [S]
    split: str
    looked: int  # windows that were searched


def find_shapelet_windows(
    windows: Windows, found: Sequence[Shapelet], count: int, seed: int, exclude: npt.NDArray[Any]
) -> ShapeletWindows:
    """Up to `count` held-out windows among the tenth that is closest to a shapelet; in all others
    the closest segment is arbitrary.

    Distances are those of standardised segments. `exclude`: rows that the shapelets were mined
    from. Raises UserError: no_input, where nothing is held out; config (exit 2), where no shapelet
    is of a channel and rate of these windows.
    """
    names = list(windows.channel_names)
    fitting = [
        k
        for k, one in enumerate(found)
        if one.channel in names and one.rate == windows.rate and len(one.values) <= windows.length
    ]
    if not fitting:
        raise usage_error(
            f"no shapelet is of a channel of {windows.name} at {windows.rate:g} Hz",
            f"expected one of {', '.join(names)}",
            field="--shapelets",
        )
    pool, split = draw_held_out(windows, POOL * count, seed)
    pool = pool[~np.isin(pool, exclude)]
    parts: Any = windows.arrays(pool)
    if parts.get("mask") is not None:
        complete = parts["mask"].reshape(len(pool), -1).all(1)
        pool, parts = pool[complete], {"values": parts["values"][complete]}
    if not len(pool):
        raise input_error(
            Reason.NO_INPUT, f"{windows.name} has no windows that the shapelets were not mined from"
        )
    values = torch.from_numpy(np.ascontiguousarray(parts["values"]))
    rank, places, distance = (
        np.full((len(found), len(pool)), fill) for fill in (np.inf, -1.0, np.inf)
    )
    for k in fitting:
        one = found[k]
        d, at = compute_distances(
            values[..., names.index(one.channel)].double(), torch.from_numpy(one.values)[None]
        )
        rank[k, np.argsort(d[0].numpy(), kind="stable")] = np.arange(len(pool))
        places[k], distance[k] = at[0].numpy(), d[0].numpy() / len(one.values)
    near = np.flatnonzero(rank.min(0) < max(1, round(PRESENT_SHARE * len(pool))))
    near = np.sort(np.random.default_rng([seed, 4]).permutation(near)[:count])
    which = rank.argmin(0)[near]
    lengths = np.array([len(found[k].values) for k in which], np.int64)
    subject_of = dict(zip(windows.rows.tolist(), windows.subjects().tolist(), strict=True))
    subjects = np.array([subject_of[row] for row in pool[near].tolist()])
    starts = places[which, near].astype(np.int64)
    return ShapeletWindows(
        pool[near], which, starts, lengths, distance[which, near], subjects, split, len(pool)
    )


def normalise_rows(maps: Array) -> Array:
    """Rows to sum 1; NaN where all is 0."""
    total = maps.sum(1, keepdims=True)
    return np.divide(maps, total, out=np.full_like(maps, np.nan), where=total > 0)


def first_sample(samples: int, config: ModelConfig) -> int:
    """The first sample of the first token; earlier ones are cropped."""
    is_cropped = config.tokenizer == "patch" and config.crop == "start"
    return max(samples - config.patch, 0) % samples_per_token(config) if is_cropped else 0


def spread_over_samples(share: Array, samples: int, config: ModelConfig) -> Array:
    """Shares of tokens [N] spread evenly over the samples of each token, [T], with the same sum;
    overlapping patches add up.

    The samples of a patch are those that it reads, of other tokens those up to the next token;
    tokens that begin after the last sample (of spectra) have none.
    """
    step = samples_per_token(config)
    width = config.patch if config.tokenizer == "patch" else step
    # [N, width]
    places = (
        first_sample(samples, config) + step * np.arange(len(share))[:, None] + np.arange(width)
    )
    inside = places < samples
    parts = np.broadcast_to((share / np.maximum(inside.sum(1), 1))[:, None], places.shape)
    return np.bincount(places[inside], parts[inside], minlength=samples).astype(np.float64)


def signal_magnitudes(
    values: Array, windows: Windows, found: Sequence[Shapelet], chosen: ShapeletWindows
) -> Array:
    """Share of the magnitude |x - mean| of the shapelet's channel at each sample, [S, T]."""
    x = values[
        np.arange(len(values)),
        :,
        [list(windows.channel_names).index(found[k].channel) for k in chosen.which],
    ]
    return normalise_rows(np.abs(x - x.mean(1, keepdims=True)))


def share_ratios(maps: Array, start: Ints, length: Ints) -> Array:
    """(share of the map inside) / (share of the length inside) of each window, [S], from maps [S,
    T] with sum 1.
    """
    return _ratios_from_sums(_sum_up_to(maps), start, length)


def _sum_up_to(maps: Array) -> Array:
    return np.concatenate([np.zeros((len(maps), 1)), np.cumsum(maps, 1)], 1)


def _ratios_from_sums(sums: Array, start: Ints, length: Ints) -> Array:
    at = np.arange(len(sums))
    return np.asarray((sums[at, start + length] - sums[at, start]) * (sums.shape[1] - 1) / length)


def random_placement(maps: Array, length: Ints, draws: int, seed: int) -> Array:
    """Mean ratio over the windows with each shapelet at a random place of its window, [draws]: the
    control.
    """
    rng = np.random.default_rng([seed, 5])
    known = np.isfinite(maps).all(1)
    maps, length = maps[known], length[known]
    if not len(maps):
        return np.empty(0)
    sums, last = _sum_up_to(maps), maps.shape[1] - length + 1
    return np.array(
        [_ratios_from_sums(sums, rng.integers(0, last), length).mean() for _ in range(draws)]
    )


class SubjectMean(NamedTuple):
    """A mean over windows with its standard error and 95 % CI over subjects."""

    value: float | None
    se: float | None
    lo: float | None
    hi: float | None
    n: int  # windows
    n_subjects: int
    undefined_reason: str | None

    def describe_interval(self) -> str:
        """The interval as text, or why there is none."""
        if self.lo is None:
            return str(self.undefined_reason)
        return f"95 % CI {self.lo:.2f} to {self.hi:.2f} over {self.n_subjects} subjects"


def mean_over_subjects(values: Array, subjects: npt.NDArray[Any], bootstrap: int) -> SubjectMean:
    """Mean of positive ratios over the windows [S] with its interval over subjects; NaN values are
    excluded.
    """
    names, whose = np.unique(subjects, return_inverse=True)
    found = evaluate.average_over_units(values, whose, len(names), "ratio", bootstrap)
    reason = found.undefined_reason if found.value is not None else "no window has a gradient"
    return SubjectMean(
        found.value,
        found.se,
        found.lo,
        found.hi,
        int(np.isfinite(values).sum()),
        found.n_defined or 0,
        reason,
    )


def rank_agreement(a: Array, b: Array) -> float | None:
    """Mean rank correlation of two sets of maps [S, T], window by window; None where none is
    defined.
    """
    from scipy.stats import rankdata

    known = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    if not known.any():
        return None
    x, y = (
        ranks - ranks.mean(1, keepdims=True)
        for ranks in (rankdata(of[known], axis=1) for of in (a, b))
    )
    spread = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    varies = spread > 0
    return float(((x * y).sum(1)[varies] / spread[varies]).mean()) if varies.any() else None


def nan_mean(each: Sequence[Array]) -> Array:
    """Mean of arrays of one shape without NaN; NaN where all are."""
    return np.asarray(np.ma.masked_invalid(np.stack(each)).mean(0).filled(np.nan))


class RandomPlaces(NamedTuple):
    """95 % range of the mean ratio of shapelets at random places."""

    lo: float
    hi: float


class RegionMeasures(NamedTuple):
    """Ratios of a map at shapelets, with their controls."""

    ratio: SubjectMean
    inside_over_outside: SubjectMean
    random_weights: SubjectMean
    random_draws: list[float | None]  # of each random initialisation
    beyond_random_weights: SubjectMean  # ratio less that of random weights
    beyond_signal_size: SubjectMean  # ratio less that of the signal's magnitude
    tests: dict[str, MeanDifference]  # of these two differences against 0, by the names in `TESTS`
    random_places: RandomPlaces | None
    p_places: float | None  # share of random places with a ratio as large
    correlation_with_random_weights: float | None

    def controls(self) -> list[object]:
        """The first four cells of `CONTROLS`."""
        return [
            self.random_weights,
            self.beyond_random_weights,
            self.beyond_signal_size,
            self.p_places,
        ]

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {
            **self._asdict(),
            "tests": {name: one.model_dump() for name, one in self.tests.items()},
        }


def compare_with_controls(
    maps: Array,
    controls: Sequence[Array],
    magnitudes: Array,
    chosen: ShapeletWindows,
    bootstrap: int,
    seed: int,
) -> RegionMeasures:
    """Measures of maps [S, T] of the chosen windows against those of random weights, R times [S,
    T], and the ratios `magnitudes` [S].
    """
    values = share_ratios(maps, chosen.start, chosen.length)
    each = [share_ratios(control, chosen.start, chosen.length) for control in controls]
    random = nan_mean(each)
    part = chosen.length / maps.shape[1]
    outside = 1 - values * part
    # of means per sample
    contrast = np.divide(
        values * (1 - part), outside, out=np.full_like(values, np.nan), where=outside > 1e-12
    )
    correlations = [
        found for control in controls if (found := rank_agreement(maps, control)) is not None
    ]
    places = random_placement(maps, chosen.length, RANDOM_PLACES, seed)
    names, whose = np.unique(chosen.subjects, return_inverse=True)

    def average(of: Array, intervals: int = bootstrap) -> SubjectMean:
        return mean_over_subjects(of, chosen.subjects, intervals)

    def test(of: Array, draws: Sequence[float] = ()) -> MeanDifference:
        return evaluate.compare_with_zero(of, whose, len(names), draws=draws, bootstrap=bootstrap)

    mean, draws = average(values), [average(one, 0).value for one in each]
    tests = {
        "random weights": test(values - random, [one for one in draws if one is not None]),
        "signal size": test(values - magnitudes),
    }
    beyond_random, beyond_size = map(
        _describe_test, tests.values(), (values - random, values - magnitudes)
    )
    reached = places >= mean.value - 1e-12 if mean.value is not None else np.array([])
    return RegionMeasures(
        ratio=mean,
        inside_over_outside=average(contrast),
        random_weights=average(random),
        random_draws=draws,
        beyond_random_weights=beyond_random,
        beyond_signal_size=beyond_size,
        tests=tests,
        random_places=RandomPlaces(*np.quantile(places, [0.025, 0.975]).tolist())
        if len(places)
        else None,
        p_places=float(1 + reached.sum()) / (1 + len(places)) if len(places) else None,
        correlation_with_random_weights=float(np.mean(correlations)) if correlations else None,
    )


def _describe_test(one: MeanDifference, values: Array) -> SubjectMean:
    """A tested mean with the interval of its test, which has the variance between random draws."""
    from scipy.special import stdtrit

    reach = (
        None
        if one.p is None or one.total_se is None
        else float(stdtrit(one.df, 0.975)) * one.total_se
    )
    lo, hi = (
        (None, None)
        if reach is None or one.difference is None
        else (one.difference - reach, one.difference + reach)
    )
    return SubjectMean(
        one.difference,
        one.total_se,
        lo,
        hi,
        int(np.isfinite(values).sum()),
        one.n_defined or 0,
        one.undefined_reason,
    )


TESTS = {
    "random weights": "with random weights",
    "signal size": "the size of the signal explains",
    "random places": "at random places",
}


class RegionFinding(NamedTuple):
    """The three tests of one map after Holm correction over all maps of the family."""

    p: dict[str, float | None]  # of `TESTS`, corrected; None: not tested
    above: dict[str, bool]  # whether the difference is above 0
    why: str  # why there is no verdict; "": there is one
    family: int  # tests that were corrected for

    @property
    def is_found(self) -> bool:
        """Whether all three hold."""
        return not self.why and all(
            self.above[name] and (p if (p := self.p[name]) is not None else 1.0) <= 0.05
            for name in TESTS
        )

    def cells(self) -> list[object]:
        """The last two cells of a row of a table."""
        known = [p for p in self.p.values() if p is not None]
        return [
            max(known) if len(known) == len(TESTS) else None,
            self.why or ("yes" if self.is_found else "no"),
        ]


def judge_measures(found: Mapping[Key, RegionMeasures]) -> dict[Key, RegionFinding]:
    """The findings of maps, of which all tests are one family."""
    tests: dict[tuple[Key, str], float | None] = {}
    for key, one in found.items():
        tests |= {(key, name): test.p for name, test in one.tests.items()} | {
            (key, "random places"): one.p_places
        }
    corrected = {
        test: None if of is None else of[0]
        for test, of in zip(tests, evaluate.holm(list(tests.values())), strict=True)
    }
    family, out = sum(p is not None for p in tests.values()), {}
    for key, one in found.items():
        weights = one.tests["random weights"]
        judged = CorrectedDifference(**weights.model_dump()).model_copy(
            update={"p_holm": corrected[key, "random weights"]}
        )
        above = {name: (test.difference or 0.0) > 0 for name, test in one.tests.items()} | {
            "random places": True
        }
        out[key] = RegionFinding(
            {name: corrected[key, name] for name in TESTS},
            above,
            (evaluate.explain_no_verdict(judged) or "").removeprefix("no CI: "),
            family,
        )
    return out


def count_tests(judged: Mapping[Key, RegionFinding]) -> str:
    """The families in words."""
    sizes = sorted({one.family for one in judged.values()})
    return f"{' or '.join(map(str, sizes))} tests, {len(TESTS)} of each map"


def describe_family(judged: Mapping[Key, RegionFinding], kind: str = "") -> str:
    """How to read a table of measures, with its family, one for each `kind` of map."""
    return RATIOS.format(
        tests=count_tests(judged)
        + (
            f", all runs with the same {kind} being one family"
            if kind
            else ", all runs being one family"
        )
    )


def describe_finding(found: RegionMeasures, judged: RegionFinding) -> str:
    """The verdict of one map as text; p of random places speaks of these windows alone."""
    numbers = ", ".join(
        [
            *(
                f"{name} {_show(test.difference)}"
                for name, test in (
                    ("random weights", found.tests["random weights"]),
                    ("size of the signal", found.tests["signal size"]),
                )
            )
        ]
    )
    draws = f"random weights {', '.join(f'{value:.2f}' for value in found.random_draws if value is not None)}"
    if judged.why:
        return f"no verdict ({judged.why}); {draws}"
    over = f"Holm-corrected over {judged.family} tests; of random places in these windows only"
    if judged.is_found:
        return f"a finding, more than with random weights, than the size of the signal explains and than at random places (differences to {numbers}; {over}); {draws}"
    missing = [
        words
        for name, words in TESTS.items()
        if not (judged.above[name] and (p if (p := judged.p[name]) is not None else 1.0) <= 0.05)
    ]
    return f"no finding, not significantly more than {' or '.join(missing)} (differences to {numbers}; {over}); {draws}"


def _show(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")


def compare_with_first(
    ratios: Mapping[str, Mapping[str, Array]], chosen: ShapeletWindows, bootstrap: int
) -> list[list[object]]:
    """Rows of a table: of each kind of map the difference of the ratios [S] of the first run and
    each other one, all one family.
    """
    names, whose = np.unique(chosen.subjects, return_inverse=True)
    pairs = {
        (next(iter(of)), other, kind): of for kind, of in ratios.items() for other in list(of)[1:]
    }
    tested = [
        evaluate.compare_with_zero(of[first] - of[other], whose, len(names), bootstrap=bootstrap)
        for (first, other, _), of in pairs.items()
    ]
    rows: list[list[object]] = []
    for pair, one in zip(pairs, evaluate.holm_correct(tested), strict=True):
        corrected = (
            None
            if one.corrected_lo is None
            else f"{one.corrected_lo:.2f} to {one.corrected_hi:.2f}".replace("-", "−")
        )
        rows.append(
            [*pair, MetricValue(value=one.difference, lo=one.lo, hi=one.hi), corrected, one.p_holm]
        )
    return rows


def add_headline(
    page: PageBuilder, title: str, found: Mapping[str, RegionMeasures], size: SubjectMean, what: str
) -> None:
    """Bars of the ratio of each run, of random weights, of the magnitude of the signal and of
    random places.
    """
    bars = [(name, one.ratio) for name, one in found.items()]
    bars += [(f"{name}, random weights", one.random_weights) for name, one in found.items()]
    bars.append(("size of the signal", size))
    names = [name for name, _ in bars]
    values, lo, hi = ([getattr(one, key) for _, one in bars] for key in ("value", "lo", "hi"))
    places = next(iter(found.values())).random_places
    if places is not None:
        names, values, lo, hi = (
            [*names, "random places"],
            [*values, 1.0],
            [*lo, places.lo],
            [*hi, places.hi],
        )
    page.figure(
        "main-score",
        title,
        HEADLINE.format(what=what),
        BarPlot(names, values, lo, hi, f"share of {what} / share of length"),
    )


def name_class(windows: Windows, batch: Batch, row: int) -> str:
    """The class of a row of a batch; "" without classes."""
    return (
        windows.class_names[int(batch.target[row])]
        if batch.target is not None and windows.task == "classification"
        else ""
    )


def describe_windows(chosen: ShapeletWindows) -> str:
    """Number of the windows and how they were selected, for the facts of a page."""
    n = len(set(chosen.subjects.tolist()))
    searched = f"of {chosen.looked} searched ({chosen.split} split) those among the closest tenth to a shapelet"
    return f"{len(chosen.rows)} of {n} subject{'s' * (n != 1)}: {searched}"
