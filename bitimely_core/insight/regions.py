"""Whether a map over the samples of windows (saliency, attention) concentrates on shapelets, in
held-out windows in which one is present.

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

from bitimely_core import data, evaluate
from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.evaluate.verdicts import count_units
from bitimely_core.insight.shapelet_mining import (
    MiningOptions,
    Shapelet,
    mine_shapelets,
    read_complete,
    require_classes,
)
from bitimely_core.insight.shapelets import parse_seconds, read_shapelets
from bitimely_core.models.tokenizers import samples_per_token
from bitimely_core.page import BarPlot, MetricLike, PageBuilder
from bitimely_core.schemas.scores import CorrectedDifference, MeanDifference, MetricValue
from bitimely_core.tokens import Windows
from bitimely_core.tokens.drawing import draw_held_out
from bitimely_core.types import Batch

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
    "Share of {what} inside the shapelets over their share of the length, mean over windows: 1 is "
    "no preference. Evidence for the model requires a ratio above that of random weights, above "
    f"shapelets at random places (bar: 95 % of {RANDOM_PLACES:,} draws), and above the magnitude "
    "of the signal; otherwise chance, architecture or amplitude explain it."
)
RATIOS = (
    "Ratio: share inside over share of the length, its 95 % CI over subjects on the logarithm. "
    f"Random weights: mean of {RANDOM_MODELS} draws. Beyond random weights: the ratio less that, "
    "window by window; beyond the signal's size: less the ratio of the signal's magnitude; both "
    "with 95 % CI that are not corrected, the first with the variance between the draws. p, random "
    f"places: share of {RANDOM_PLACES:,} random places with a ratio as large; it speaks of these "
    "windows only, not of other subjects. p, Holm: the largest of the three p after Holm "
    "correction of {tests}. A finding requires both differences above 0 and all three p of at most "
    "0.05 after correction; it speaks of this trained model."
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
    "Ratio of the first run less that of the other on the same windows, between these trained "
    "models; one family with Holm correction. If the corrected 95 % CI contains 0, the difference "
    "is not significant."
)
TESTS = {  # of a finding -> what explains the map where it fails
    "random weights": "with random weights",
    "signal size": "the size of the signal explains",
    "random places": "at random places",
}


def load_shapelets(
    windows: Windows, folder: str, lengths: str, seed: int
) -> tuple[list[Shapelet], Ints, float | None]:
    """The shapelets, the rows that they were mined from, and the p of the best one.

    They are those of a report of `analyze shapelets` (p is None), or, without `folder`, mined from
    the training split. Raises UserError: config (exit 2) for windows without classes and no folder,
    or a folder without shapelets; those of `mine_shapelets`.
    """
    if folder:
        shapelets = read_shapelets(folder)
        return shapelets, np.array([shapelet.window for shapelet in shapelets], np.int64), None
    require_classes(
        windows, "Give --data a view with classes, or --shapelets a report of analyze shapelets"
    )
    options = MiningOptions(parse_seconds(lengths), permutations=99, seed=seed)
    mined = mine_shapelets(windows, options)
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

    @property
    def n_subjects(self) -> int:
        """Distinct subjects."""
        return len(np.unique(self.subjects))

    def measure_ratios(self, maps: Array) -> Array:
        """`share_ratios` of maps [S, T] at the shapelets, [S]."""
        return share_ratios(maps, self.start, self.length)

    def find_span(self, k: int, rate: float) -> tuple[float, float]:
        """Start and end, in seconds, of the shapelet in window `k`."""
        start = int(self.start[k])
        return start / rate, (start + int(self.length[k])) / rate

    def test_mean(
        self, values: Array, bootstrap: int, draws: Sequence[float] = ()
    ) -> MeanDifference:
        """The mean of `values` [S] with its test against 0, as `evaluate.compare_with_zero`."""
        names, units = np.unique(self.subjects, return_inverse=True)
        return evaluate.compare_with_zero(
            values, units, len(names), draws=draws, bootstrap=bootstrap
        )


def find_shapelet_windows(
    windows: Windows,
    shapelets: Sequence[Shapelet],
    count: int,
    seed: int,
    exclude: npt.NDArray[Any],
) -> ShapeletWindows:
    """Up to `count` held-out windows among the tenth that is closest to a shapelet; in all others
    the closest segment is arbitrary.

    Distances are those of standardised segments. `exclude`: rows that the shapelets were mined
    from. Raises UserError: no_input, where nothing is held out; config (exit 2), where no shapelet
    is of a channel and rate of these windows.
    """
    fitting = [
        k
        for k, shapelet in enumerate(shapelets)
        if (shapelet.channel in windows.channel_names and shapelet.rate == windows.rate)
        and len(shapelet.values) <= windows.length
    ]
    if not fitting:
        raise usage_error(
            f"no shapelet is of a channel of {windows.name} at {windows.rate:g} Hz",
            f"expected one of {', '.join(windows.channel_names)}",
            field="--shapelets",
        )
    pool, split = draw_held_out(windows, POOL * count, seed)
    pool = pool[~np.isin(pool, exclude)]
    complete, values = read_complete(windows, pool)
    pool = pool[complete]
    if not len(pool):
        raise input_error(
            Reason.NO_INPUT, f"{windows.name} has no windows that the shapelets were not mined from"
        )
    shape = (len(shapelets), len(pool))
    rank, distance = np.full(shape, np.inf), np.full(shape, np.inf)
    starts = np.full(shape, -1)
    for k in fitting:
        d, places = (part.numpy() for part in shapelets[k].find_in(windows, values))
        rank[k, np.argsort(d, kind="stable")] = np.arange(len(pool))
        starts[k], distance[k] = places, d / len(shapelets[k].values)
    near = np.flatnonzero(rank.min(0) < max(1, round(PRESENT_SHARE * len(pool))))
    near = np.sort(np.random.default_rng([seed, 4]).permutation(near)[:count])
    which = rank.argmin(0)[near]
    lengths = np.array([len(shapelets[k].values) for k in which], np.int64)
    return ShapeletWindows(
        pool[near],
        which,
        starts[which, near],
        lengths,
        distance[which, near],
        windows.subjects()[np.searchsorted(windows.rows, pool[near])],
        split,
        len(pool),
    )


class ShapeletSample(NamedTuple):
    """Shapelets, held-out windows in which one is present, and the signal there."""

    shapelets: list[Shapelet]
    origin: str  # of the shapelets, in words
    p: float | None  # of the best shapelet; None: of a report
    windows: ShapeletWindows
    batch: Batch
    magnitudes: Array  # [S] ratios of the magnitude of the signal
    bootstrap: int  # replicates over subjects
    seed: int

    def average(self, values: Array) -> SubjectMean:
        """Mean over the windows [S] with its interval over subjects."""
        return mean_over_subjects(values, self.windows.subjects, self.bootstrap)

    def compare(self, maps: Array, controls: Sequence[Array]) -> RegionMeasures:
        """`compare_with_controls` of maps of the windows."""
        return compare_with_controls(
            maps, controls, self.magnitudes, self.windows, self.bootstrap, self.seed
        )

    def describe(self) -> dict[str, str]:
        """The facts of a page."""
        chosen = self.windows
        return {
            "Shapelets": f"{len(self.shapelets)}, {self.origin}",
            "Windows": f"{len(chosen.rows)} of {count_units(chosen.n_subjects)}: of "
            f"{chosen.looked} searched ({chosen.split} split) those among the closest tenth to a "
            "shapelet",
        }

    def list_notices(self, what: str) -> list[str]:
        """Whether `what` (attention on, saliency in) shapelets means little."""
        if self.p is None or self.p <= 0.05:
            return []
        return [
            f"The shapelets do not separate the classes significantly (p = {self.p:.2g}), which "
            f"limits what {what} them means."
        ]


def draw_sample(
    windows: Windows, folder: str, lengths: str, count: int, bootstrap: int, seed: int
) -> ShapeletSample:
    """Up to `count` held-out windows with shapelets. Raises UserError as `load_shapelets` and
    `find_shapelet_windows`.
    """
    shapelets, mined, p = load_shapelets(windows, folder, lengths, seed)
    chosen = find_shapelet_windows(windows, shapelets, count, seed, mined)
    batch = data.collate(windows, chosen.rows)
    channels = [windows.channel_names.index(shapelets[k].channel) for k in chosen.which]
    signals = batch.values.double().numpy()[np.arange(len(channels)), :, channels]
    sizes = normalise_rows(np.abs(signals - signals.mean(1, keepdims=True)))
    origin = f"from {folder}" if folder else f"mined from {len(mined)} training windows"
    magnitudes = chosen.measure_ratios(sizes)
    return ShapeletSample(shapelets, origin, p, chosen, batch, magnitudes, bootstrap, seed)


def normalise_rows(maps: Array) -> Array:
    """Rows to sum 1; NaN where all is 0."""
    total = maps.sum(1, keepdims=True)
    return np.divide(maps, total, out=np.full_like(maps, np.nan), where=total > 0)


def first_sample(samples: int, config: ModelConfig) -> int:
    """The first sample of the first token; earlier ones are cropped."""
    is_cropped = config.cuts_patches and config.crop == "start"
    return max(samples - config.patch, 0) % samples_per_token(config) if is_cropped else 0


def spread_over_samples(share: Array, samples: int, config: ModelConfig) -> Array:
    """Shares of tokens [N] spread evenly over the samples of each token, [T], with the same sum;
    overlapping patches add up.

    The samples of a patch are those that it reads, of other tokens those up to the next token;
    tokens that begin after the last sample (of spectra) have none.
    """
    step = samples_per_token(config)
    width = config.patch if config.cuts_patches else step
    # [N, width]
    places = (
        first_sample(samples, config) + step * np.arange(len(share))[:, None] + np.arange(width)
    )
    inside = places < samples
    parts = np.broadcast_to((share / np.maximum(inside.sum(1), 1))[:, None], places.shape)
    return np.bincount(places[inside], parts[inside], minlength=samples).astype(np.float64)


def share_ratios(maps: Array, start: Ints, length: Ints) -> Array:
    """(share of the map inside) / (share of the length inside) of each window, [S], from maps [S,
    T] with sum 1.
    """
    return _ratios_from_sums(_sum_up_to(maps), start, length)


def _sum_up_to(maps: Array) -> Array:
    return np.concatenate([np.zeros((len(maps), 1)), np.cumsum(maps, 1)], 1)


def _ratios_from_sums(sums: Array, start: Ints, length: Ints) -> Array:
    rows = np.arange(len(sums))
    inside = sums[rows, start + length] - sums[rows, start]
    return np.asarray(inside * (sums.shape[1] - 1) / length)


def random_placement(maps: Array, length: Ints, draws: int, seed: int) -> Array:
    """Mean ratio over the windows with each shapelet at a random place of its window, [draws]: the
    control.
    """
    rng = np.random.default_rng([seed, 5])
    defined = np.isfinite(maps).all(1)
    sums, length = _sum_up_to(maps[defined]), length[defined]
    last = maps.shape[1] - length + 1
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
    mean = evaluate.average_over_units(values, whose, len(names), "ratio", bootstrap)
    return SubjectMean(
        mean.value,
        mean.se,
        mean.lo,
        mean.hi,
        int(np.isfinite(values).sum()),
        mean.n_defined or 0,
        "no window has a gradient" if mean.value is None else mean.undefined_reason,
    )


def rank_agreement(a: Array, b: Array) -> float | None:
    """Mean rank correlation of two sets of maps [S, T], window by window; None where none is
    defined.
    """
    from scipy.stats import rankdata

    defined = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    x, y = (rankdata(maps[defined], axis=1) for maps in (a, b))
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
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

    def cells(self, finding: RegionFinding) -> list[object]:
        """The cells of `CONTROLS`."""
        return [
            self.random_weights,
            self.beyond_random_weights,
            self.beyond_signal_size,
            self.p_places,
            *finding.cells(),
        ]


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
    values = chosen.measure_ratios(maps)
    each = list(map(chosen.measure_ratios, controls))
    random = nan_mean(each)
    part = chosen.length / maps.shape[1]
    outside = 1 - values * part
    # of means per sample
    contrast = np.divide(
        values * (1 - part), outside, out=np.full_like(values, np.nan), where=outside > 1e-12
    )
    agreements = [rank_agreement(maps, control) for control in controls]
    defined = [agreement for agreement in agreements if agreement is not None]
    mean = mean_over_subjects(values, chosen.subjects, bootstrap)
    draws = [mean_over_subjects(ratios, chosen.subjects, 0).value for ratios in each]
    beyond_random, beyond_size = values - random, values - magnitudes
    drawn = [value for value in draws if value is not None]
    tests = {
        "random weights": chosen.test_mean(beyond_random, bootstrap, drawn),
        "signal size": chosen.test_mean(beyond_size, bootstrap),
    }
    limits, p = None, None
    if mean.value is not None:
        places = random_placement(maps, chosen.length, RANDOM_PLACES, seed)
        limits = RandomPlaces(*np.quantile(places, [0.025, 0.975]).tolist())
        p = float(1 + (places >= mean.value - 1e-12).sum()) / (1 + len(places))
    return RegionMeasures(
        ratio=mean,
        inside_over_outside=mean_over_subjects(contrast, chosen.subjects, bootstrap),
        random_weights=mean_over_subjects(random, chosen.subjects, bootstrap),
        random_draws=draws,
        beyond_random_weights=_describe_test(tests["random weights"], beyond_random),
        beyond_signal_size=_describe_test(tests["signal size"], beyond_size),
        tests=tests,
        random_places=limits,
        p_places=p,
        correlation_with_random_weights=float(np.mean(defined)) if defined else None,
    )


def _describe_test(test: MeanDifference, values: Array) -> SubjectMean:
    """A tested mean with the interval of its test, which has the variance between random draws."""
    from scipy.special import stdtrit

    lo, hi = None, None
    if test.p is not None and test.difference is not None and test.total_se is not None:
        reach = float(stdtrit(test.df, 0.975)) * test.total_se
        lo, hi = test.difference - reach, test.difference + reach
    return SubjectMean(
        test.difference,
        test.total_se,
        lo,
        hi,
        int(np.isfinite(values).sum()),
        test.n_defined or 0,
        test.undefined_reason,
    )


class RegionFinding(NamedTuple):
    """The three tests of one map after Holm correction over all maps of the family."""

    p: dict[str, float | None]  # of `TESTS`, corrected; None: not tested
    failed: list[str]  # of `TESTS`: not significant, or the difference is not above 0
    why: str  # why there is no verdict; "": there is one
    family: int  # tests that were corrected for

    @property
    def is_found(self) -> bool:
        """Whether all three hold."""
        return not self.why and not self.failed

    def cells(self) -> list[object]:
        """The last two cells of a row of a table."""
        p = [value for value in self.p.values() if value is not None]
        verdict = self.why or ("yes" if self.is_found else "no")
        return [max(p) if len(p) == len(TESTS) else None, verdict]


def judge_measures(measures: Mapping[Key, RegionMeasures]) -> dict[Key, RegionFinding]:
    """The findings of maps, of which all tests are one family."""
    p: dict[tuple[Key, str], float | None] = {}
    for key, measured in measures.items():
        p |= {(key, name): test.p for name, test in measured.tests.items()}
        p[key, "random places"] = measured.p_places
    corrected = {
        test: None if pair is None else pair[0]
        for test, pair in zip(p, evaluate.holm(list(p.values())), strict=True)
    }
    family = sum(value is not None for value in p.values())
    return {
        key: _judge_map(measured, {name: corrected[key, name] for name in TESTS}, family)
        for key, measured in measures.items()
    }


def _judge_map(measures: RegionMeasures, p: dict[str, float | None], family: int) -> RegionFinding:
    """The finding of one map, whose tests have the corrected `p`."""
    weights = measures.tests["random weights"]
    corrected = CorrectedDifference(**weights.model_dump(), p_holm=p["random weights"])
    why = (evaluate.explain_no_verdict(corrected) or "").removeprefix("no CI: ")
    failed = [name for name, value in p.items() if value is None or value > 0.05]
    failed += [name for name, test in measures.tests.items() if (test.difference or 0.0) <= 0]
    return RegionFinding(p, [name for name in TESTS if name in failed], why, family)


def count_tests(findings: Mapping[Key, RegionFinding]) -> str:
    """The families in words."""
    sizes = sorted({finding.family for finding in findings.values()})
    return f"{' or '.join(map(str, sizes))} tests, {len(TESTS)} of each map"


def describe_family(findings: Mapping[Key, RegionFinding], kind: str = "") -> str:
    """How to read a table of measures, with its family, one for each `kind` of map."""
    runs = f"all runs with the same {kind}" if kind else "all runs"
    return RATIOS.format(tests=f"{count_tests(findings)}, {runs} being one family")


def describe_finding(measures: RegionMeasures, finding: RegionFinding) -> str:
    """The verdict of one map as text; p of random places speaks of these windows alone."""
    values = [f"{value:.2f}" for value in measures.random_draws if value is not None]
    draws = f"random weights {', '.join(values)}"
    if finding.why:
        return f"no verdict ({finding.why}); {draws}"
    details = (
        f"(differences to random weights {_format_test(measures, 'random weights')}, "
        f"size of the signal {_format_test(measures, 'signal size')}; Holm-corrected over "
        f"{finding.family} tests; of random places in these windows only); {draws}"
    )
    if finding.is_found:
        return (
            "a finding, more than with random weights, than the size of the signal explains and "
            f"than at random places {details}"
        )
    failed = " or ".join(TESTS[name] for name in finding.failed)
    return f"no finding, not significantly more than {failed} {details}"


def _format_test(measures: RegionMeasures, name: str) -> str:
    value = measures.tests[name].difference
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")


def add_differences(
    page: PageBuilder, ratios: Mapping[str, Mapping[str, Array]], sample: ShapeletSample
) -> None:
    """Add a table, of several runs: of each kind of map the difference of the ratios [S] of the
    first run and each other one, all one family.
    """
    pairs = {}
    for kind, by_run in ratios.items():
        names = list(by_run)
        for name in names[1:]:
            pairs[names[0], name, kind] = by_run[names[0]] - by_run[name]
    if not pairs:
        return
    tested = [sample.windows.test_mean(values, sample.bootstrap) for values in pairs.values()]
    rows: list[list[object]] = []
    for pair, test in zip(pairs, evaluate.holm_correct(tested), strict=True):
        corrected = None
        if test.corrected_lo is not None:
            bounds = f"{test.corrected_lo:.2f} to {test.corrected_hi:.2f}"
            corrected = bounds.replace("-", "−")
        difference = MetricValue(value=test.difference, lo=test.lo, hi=test.hi)
        rows.append([*pair, difference, corrected, test.p_holm])
    title = "Differences to the first run"
    page.table("differences", title, DIFFERENCES, DIFFERENCE_COLUMNS, rows)


def add_headline(
    page: PageBuilder,
    title: str,
    measures: Mapping[str, RegionMeasures],
    size: SubjectMean,
    what: str,
) -> None:
    """Bars of the ratio of each run, of random weights, of the magnitude of the signal and of
    random places.
    """
    bars: dict[str, MetricLike] = {name: measured.ratio for name, measured in measures.items()}
    for name, measured in measures.items():
        bars[f"{name}, random weights"] = measured.random_weights
    bars["size of the signal"] = size
    places = next(iter(measures.values())).random_places
    if places is not None:
        bars["random places"] = MetricValue(value=1.0, lo=places.lo, hi=places.hi)
    values, lo, hi = zip(*((bar.value, bar.lo, bar.hi) for bar in bars.values()), strict=True)
    plot = BarPlot(list(bars), values, lo, hi, f"share of {what} / share of length")
    page.figure("main-score", title, HEADLINE.format(what=what), plot)


def name_class(windows: Windows, batch: Batch, row: int) -> str:
    """The class of a row of a batch; "" without classes."""
    if batch.target is None or windows.task != "classification":
        return ""
    return windows.class_names[int(batch.target[row])]
