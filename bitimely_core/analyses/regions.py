"""Held-out windows in which a shapelet is present, and whether a map over their samples (saliency, attention) concentrates on it.

The statistic is the ratio (share of the map inside the shapelet) / (share of the length inside it); 1 is no preference. It is compared with
the same ratio of random weights, of shapelets at random places of the same windows, and of the magnitude of the signal. A single random
initialisation can have a preference by chance, so several are drawn.

Legend: S windows, T samples, N tokens, R sets of random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import evaluate
from bitimely_core.analyses.shapelets import MiningOptions, Shapelet, compute_distances, mine_shapelets, parse_seconds, read_shapelets
from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.page import BarPlot, PageBuilder
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Progress

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POOL = 10  # held-out windows that are searched per window that is kept
PRESENT_SHARE = 0.1  # share of them, the closest, in which a shapelet counts as present
RANDOM_PLACES = 1000  # draws of random places
RANDOM_MODELS = 3  # sets of random weights
CONTROLS = ("random weights", "beyond random weights", "p, random places")  # columns of tables
HEADLINE = (
    f"Share of {{what}} inside the shapelets over their share of the length, mean over windows: 1 is no preference. Evidence for the model "
    f"requires a ratio above that of random weights, above shapelets at random places (bar: 95 % of {RANDOM_PLACES:,} draws), and above the "
    "magnitude of the signal; otherwise chance, architecture or amplitude explain it."
)
RATIOS = (
    f"Ratio: share inside over share of the length. Random weights: mean of {RANDOM_MODELS} draws. Beyond random weights: the ratio less that, "
    "window by window. 95 % CI by bootstrap over subjects; p: share of random places with a ratio as large. An effect of training requires a "
    "ratio beyond all draws of random weights and a CI that excludes 0."
)
DIFFERENCES = (
    "Ratio of the first run less that of the second on the same windows. If the 95 % CI contains 0, the difference is not significant."
)


def draw_held_out(windows: Windows, count: int, seed: int) -> tuple[npt.NDArray[np.int64], str]:
    """Positions in the index of up to `count` windows of the first non-empty split of test, validation and train, and that split's name.

    They are drawn without replacement; runs on the same windows get the same ones. Raises UserError: no_input, without windows.
    """
    for split in ("test", "validation", "train"):
        rows = windows[split].rows
        if len(rows):
            return np.sort(np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False)), split
    raise input_error(Reason.NO_INPUT, f"{windows.name} has no windows", hint="Tokenize it again with a shorter --window")


def load_shapelets(
    windows: Windows, folder: str, lengths: str, seed: int, progress: Progress | None
) -> tuple[list[Shapelet], Ints, float | None]:
    """The shapelets, the rows that they were mined from, and the p of the best one.

    They are those of a report of `analyze shapelets` (p is None), or, without `folder`, mined from the training split. Raises UserError:
    config (exit 2) for windows without classes and no folder, or a folder without shapelets; those of `mine_shapelets`.
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
    mined = mine_shapelets(windows, MiningOptions(parse_seconds(lengths), permutations=99, seed=seed), progress)
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


def find_shapelet_windows(windows: Windows, found: Sequence[Shapelet], count: int, seed: int, exclude: npt.NDArray[Any]) -> ShapeletWindows:
    """Up to `count` held-out windows among the tenth that is closest to a shapelet; in all others the closest segment is arbitrary.

    Distances are those of standardised segments. `exclude`: rows that the shapelets were mined from. Raises UserError: no_input, where
    nothing is held out; config (exit 2), where no shapelet is of a channel and rate of these windows.
    """
    names = list(windows.channel_names)
    fitting = [k for k, one in enumerate(found) if one.channel in names and one.rate == windows.rate and len(one.values) <= windows.length]
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
        raise input_error(Reason.NO_INPUT, f"{windows.name} has no windows that the shapelets were not mined from")
    values = torch.from_numpy(np.ascontiguousarray(parts["values"]))
    rank, places, distance = (np.full((len(found), len(pool)), fill) for fill in (np.inf, -1.0, np.inf))
    for k in fitting:
        one = found[k]
        d, at = compute_distances(values[..., names.index(one.channel)].double(), torch.from_numpy(one.values)[None])
        rank[k, np.argsort(d[0].numpy(), kind="stable")] = np.arange(len(pool))
        places[k], distance[k] = at[0].numpy(), d[0].numpy() / len(one.values)
    near = np.flatnonzero(rank.min(0) < max(1, round(PRESENT_SHARE * len(pool))))
    near = np.sort(np.random.default_rng([seed, 4]).permutation(near)[:count])
    which = rank.argmin(0)[near]
    lengths = np.array([len(found[k].values) for k in which], np.int64)
    subject_of = dict(zip(windows.rows.tolist(), windows.subjects().tolist(), strict=True))
    subjects = np.array([subject_of[row] for row in pool[near].tolist()])
    starts = places[which, near].astype(np.int64)
    return ShapeletWindows(pool[near], which, starts, lengths, distance[which, near], subjects, split, len(pool))


def normalise_rows(maps: Array) -> Array:
    """Rows to sum 1; NaN where all is 0."""
    total = maps.sum(1, keepdims=True)
    return np.divide(maps, total, out=np.full_like(maps, np.nan), where=total > 0)


def samples_per_token(config: ModelConfig) -> int:
    """Samples from one token to the next."""
    return {"conv": 4, "steps": 1}.get(config.tokenizer, config.stride or config.patch)


def first_sample(samples: int, config: ModelConfig) -> int:
    """The first sample of the first token; earlier ones are cropped."""
    return samples % config.patch if config.tokenizer == "patch" and config.crop == "start" else 0


def spread_over_samples(share: Array, samples: int, config: ModelConfig) -> Array:
    """Shares of tokens spread evenly over the samples of each token, [T], with the same sum."""
    step = samples_per_token(config)
    token = (np.arange(samples) - first_sample(samples, config)) // step
    inside = (token >= 0) & (token < len(share))
    counts = np.bincount(token[inside], minlength=len(share))
    out = np.zeros(samples)
    out[inside] = share[token[inside]] / counts[token[inside]]
    return out


def signal_magnitudes(values: Array, windows: Windows, found: Sequence[Shapelet], chosen: ShapeletWindows) -> Array:
    """Share of the magnitude |x - mean| of the shapelet's channel at each sample, [S, T]."""
    x = values[np.arange(len(values)), :, [list(windows.channel_names).index(found[k].channel) for k in chosen.which]]
    return normalise_rows(np.abs(x - x.mean(1, keepdims=True)))


def share_ratios(maps: Array, start: Ints, length: Ints) -> Array:
    """(share of the map inside) / (share of the length inside) of each window, [S], from maps [S, T] with sum 1."""
    sums = np.concatenate([np.zeros((len(maps), 1)), np.cumsum(maps, 1)], 1)
    at = np.arange(len(maps))
    return np.asarray((sums[at, start + length] - sums[at, start]) * maps.shape[1] / length)


def random_placement(maps: Array, length: Ints, draws: int, seed: int) -> Array:
    """Mean ratio over the windows with each shapelet at a random place of its window, [draws]: the control."""
    rng = np.random.default_rng([seed, 5])
    known = np.isfinite(maps).all(1)
    maps, length = maps[known], length[known]
    if not len(maps):
        return np.empty(0)
    return np.array([share_ratios(maps, rng.integers(0, maps.shape[1] - length + 1), length).mean() for _ in range(draws)])


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


def mean_over_subjects(values: Array, subjects: npt.NDArray[Any], bootstrap: int, kind: str = "ratio") -> SubjectMean:
    """Mean over the windows [S] with its interval over subjects; NaN values are excluded. `kind`: as of `evaluate.average_over_units`."""
    names, whose = np.unique(subjects, return_inverse=True)
    found = evaluate.average_over_units(values, whose, len(names), kind, bootstrap)
    reason = found.undefined_reason if found.value is not None else "no window has a gradient"
    return SubjectMean(found.value, found.se, found.lo, found.hi, int(np.isfinite(values).sum()), found.n_defined or 0, reason)


def rank_agreement(a: Array, b: Array) -> float | None:
    """Mean rank correlation of two sets of maps [S, T], window by window; None where none is defined."""
    from scipy.stats import rankdata

    found = []
    for x, y in zip(a, b, strict=True):
        if np.isfinite(x).all() and np.isfinite(y).all():
            x, y = rankdata(x), rankdata(y)
            if x.std() > 0 and y.std() > 0:
                found.append(np.corrcoef(x, y)[0, 1])
    return float(np.mean(found)) if found else None


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
    random_places: RandomPlaces | None
    p_places: float | None  # share of random places with a ratio as large
    correlation_with_random_weights: float | None


def compare_with_controls(maps: Array, controls: Sequence[Array], chosen: ShapeletWindows, bootstrap: int, seed: int) -> RegionMeasures:
    """Measures of maps [S, T] of the chosen windows against those of random weights, R times [S, T]."""
    values = share_ratios(maps, chosen.start, chosen.length)
    each = [share_ratios(control, chosen.start, chosen.length) for control in controls]
    random = nan_mean(each)
    part = chosen.length / maps.shape[1]
    outside = 1 - values * part
    contrast = np.divide(values * (1 - part), outside, out=np.full_like(values, np.nan), where=outside > 1e-12)  # of means per sample
    correlations = [found for control in controls if (found := rank_agreement(maps, control)) is not None]
    places = random_placement(maps, chosen.length, RANDOM_PLACES, seed)

    def average(of: Array, intervals: int = bootstrap, kind: str = "ratio") -> SubjectMean:
        return mean_over_subjects(of, chosen.subjects, intervals, kind)

    mean = average(values)
    reached = places >= mean.value - 1e-12 if mean.value is not None else np.array([])
    return RegionMeasures(
        ratio=mean,
        inside_over_outside=average(contrast),
        random_weights=average(random),
        random_draws=[average(one, 0).value for one in each],
        beyond_random_weights=average(values - random, kind="mean"),
        random_places=RandomPlaces(*np.quantile(places, [0.025, 0.975]).tolist()) if len(places) else None,
        p_places=float(1 + reached.sum()) / (1 + len(places)) if len(places) else None,
        correlation_with_random_weights=float(np.mean(correlations)) if correlations else None,
    )


def compare_with_first(ratio: Mapping[str, Array], chosen: ShapeletWindows, bootstrap: int) -> Iterator[tuple[str, str, SubjectMean]]:
    """Names and mean difference of the ratios [S] of the first run and each other one, window by window."""
    first, *others = ratio
    for other in others:
        yield first, other, mean_over_subjects(ratio[first] - ratio[other], chosen.subjects, bootstrap, "mean")


def add_headline(page: PageBuilder, title: str, found: Mapping[str, RegionMeasures], size: SubjectMean, what: str) -> None:
    """Bars of the ratio of each run, of random weights, of the magnitude of the signal and of random places."""
    bars = [(name, one.ratio) for name, one in found.items()]
    bars += [(f"{name}, random weights", one.random_weights) for name, one in found.items()]
    bars.append(("size of the signal", size))
    names = [name for name, _ in bars]
    values, lo, hi = ([getattr(one, key) for _, one in bars] for key in ("value", "lo", "hi"))
    places = next(iter(found.values())).random_places
    if places is not None:
        names, values, lo, hi = [*names, "random places"], [*values, 1.0], [*lo, places.lo], [*hi, places.hi]
    page.figure("main-score", title, HEADLINE.format(what=what), BarPlot(names, values, lo, hi, f"share of {what} / share of length"))


def describe_ratio(found: RegionMeasures) -> str:
    """The ratio against random places and random weights as text; larger or smaller than all random draws, with a 95 % CI that excludes 0."""
    gap, ratio = found.beyond_random_weights, found.ratio.value
    draws = [value for value in found.random_draws if value is not None]
    places = "more than" if found.p_places is not None and found.p_places <= 0.05 else "not significantly more than"
    if gap.lo is None or gap.hi is None or ratio is None:
        trained = "compared with"
    elif gap.lo > 0 and ratio > max(draws):
        trained = "more than with"
    elif gap.hi < 0 and ratio < min(draws):
        trained = "less than with"
    else:
        trained = "not significantly different from"
    return f"{places} at random places, {trained} random weights ({', '.join(f'{value:.2f}' for value in draws)})"


def name_class(windows: Windows, batch: Batch, row: int) -> str:
    """The class of a row of a batch; "" without classes."""
    return windows.class_names[int(batch.target[row])] if batch.target is not None and windows.task == "classification" else ""


def describe_windows(chosen: ShapeletWindows) -> str:
    """Number of the windows and how they were selected, for the facts of a page."""
    n = len(set(chosen.subjects.tolist()))
    searched = f"of {chosen.looked} searched ({chosen.split} split) those among the closest tenth to a shapelet"
    return f"{len(chosen.rows)} of {n} subject{'s' * (n != 1)}: {searched}"
