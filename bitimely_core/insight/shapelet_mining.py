"""Finds shapelets, segments of a signal whose presence separates the classes, and scores them
against permuted labels.

A candidate s [m] is a segment of a training window. Its distance to a window x is the minimum over
all segments of x,

    d(s, x) = min_t || z(s) - z(x[t : t + m]) ||^2 = min_t 2 m (1 - corr(s, x[t : t + m])),

with z the standardisation of a segment (without it amplitude decides, not shape). A candidate is
good when the distances of the classes differ: one-way F, or the information gain of the best
threshold on d. The best of thousands scores well on noise, too, so its score is compared with the
best score of all candidates under permuted labels, and tested again on held-out windows.

Legend: n windows, T samples, V channels, m samples of a shapelet, C candidates, K classes, R
permutations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.evaluate.verdicts import count_units
from bitimely_core.progress import report_progress
from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_SAMPLES = 8  # of a shapelet
# standard deviation, relative to that of the series, below which a segment has no shape
FLAT_SHARE = 1e-3
# correlation, at the best shift, from which two shapelets of a channel count as one
SAME_SHAPE = 0.9
OVERLAP = 0.75  # of the shorter one, that a shift must leave
BLOCK = 1 << 22  # entries of a matrix of counts at a time
# entries of a matrix of distances at a time: so many stay in the cache until their minimum is found
CACHED = 1 << 19
# distinct permutations of the labels, below which the lower bound of p is reported
MIN_ORDERS = 100
MIN_SUBJECTS = 5  # below which results do not generalise to other subjects


def subtract_mean(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Segments [..., m] less their mean, and that mean [...]."""
    mean = segments.mean(-1)
    return segments - mean[..., None], mean


def standardise_segments(segments: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """Segments [..., m] less their mean, over their standard deviation; zeros where that is no more
    than `least`.
    """
    shape, _ = subtract_mean(segments)
    spread = shape.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > least, shape / spread.clamp(min=1e-30), 0.0)


@torch.no_grad()
def compute_distances(
    series: Tensor, shapelets: Tensor, *, normalised: bool = True, placed: bool = True
) -> tuple[Tensor, Tensor]:
    """Minimum squared distance of each shapelet [C, m] to each series [n, T], m <= T, and its
    position.

    `normalised` compares standardised segments; a flat segment of a series then counts as
    uncorrelated, 2 m. Positions take 1.5 times as long.

    Returns distances [C, n] in the dtype of the series and the first samples of the closest
    segments [C, n] int64 (without `placed` [0]).
    """
    m = shapelets.shape[1]
    wanted, level = (
        (standardise_segments(shapelets), None) if normalised else subtract_mean(shapelets)
    )
    size = 2.0 * m if normalised else wanted.square().sum(-1)[:, None]
    distances = series.new_empty(len(shapelets), len(series))
    places = torch.empty((len(shapelets), len(series)) if placed else 0, dtype=torch.int64)
    block = max(1, CACHED // (series.shape[1] - m + 1))
    for i, signal in enumerate(series):
        segments = signal.unfold(0, m, 1)
        if normalised:
            segments = standardise_segments(segments, FLAT_SHARE * signal.std(unbiased=False))
            sizes = segments.new_zeros(len(segments))
        else:
            # shapes and levels separately: an offset of the signal would eat the digits of a
            # difference of squares
            segments, levels = subtract_mean(segments)
            sizes = segments.square().sum(-1)
        for start in range(0, len(wanted), block):
            rows = slice(start, start + block)
            d = torch.addmm(sizes, wanted[rows], segments.T, alpha=-2)
            if level is not None:
                gap = level[rows, None] - levels
                d.addcmul_(gap, gap, value=m)
            distances[rows, i] = d.amin(1)
            if placed:
                places[rows, i] = d.argmin(1)
    return (distances + size).clamp(min=0), places


def f_statistic(d: Tensor, labels: Tensor) -> Tensor:
    """One-way F of distances [C, n] over the classes of labels [n] int64, [C] float64; NaN without
    two classes and n > K.
    """
    d = d.double()
    d = d - d.mean(1, keepdim=True)
    onehot = _onehot(labels)
    counts = onehot.sum(0)
    n, k = onehot.shape
    if k < 2 or n <= k:
        return torch.full((len(d),), torch.nan, dtype=torch.float64)
    between = (d @ onehot).square() @ (1 / counts)
    within = (d.square().sum(1) - between).clamp(min=0)
    # what rounding leaves of a perfect separation
    within = torch.where(within < 1e-12 * between, 0.0, within)
    return torch.where(between > 0, between / (k - 1) / (within / (n - k)), 0.0)


def information_gain(d: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gain [C] float64 in bits about labels [n] of the best threshold on distances [C, n],
    H(labels) - mean entropy of the two sides.

    Also the threshold [C], half way between two distances (NaN where all are equal).
    """
    onehot = _onehot(labels)
    n, k = onehot.shape
    gains, thresholds = [], []
    for part in d.double().split(max(1, BLOCK // (n * k))):
        ordered, order = part.sort(1)
        below = onehot[order].cumsum(1)[:, :-1]  # [C, n - 1, K]
        above = onehot.sum(0) - below
        share = torch.arange(1, n, dtype=torch.float64) / n
        gain = _entropy(onehot.sum(0)) - share * _entropy(below) - (1 - share) * _entropy(above)
        gain = torch.where(ordered[:, 1:] > ordered[:, :-1], gain, -1.0)
        best, place = gain.max(1, keepdim=True)
        middle = (ordered.gather(1, place) + ordered.gather(1, place + 1)) / 2
        gains.append(best.clamp(min=0))
        thresholds.append(torch.where(best >= 0, middle, torch.nan))
    return torch.cat(gains)[:, 0], torch.cat(thresholds)[:, 0]


def _onehot(labels: Tensor) -> Tensor:
    """Indicators [n, K] float64 of the present classes."""
    return torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()


def _entropy(counts: Tensor) -> Tensor:
    """Of counts [..., K], in bits."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1) / math.log(2)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "f": f_statistic,
    "information-gain": lambda d, y: information_gain(d, y)[0],
}


def subject_classes(labels: Ints, subjects: npt.NDArray[Any]) -> Ints | None:
    """The class of each subject, in the order of their names, where each of at least two subjects
    has one class; else None.
    """
    _, first, whose = np.unique(subjects, return_index=True, return_inverse=True)
    return labels[first] if len(first) > 1 and (labels[first][whose] == labels).all() else None


def permute_labels(labels: Ints, subjects: npt.NDArray[Any], rng: np.random.Generator) -> Ints:
    """Labels [n], permuted within each subject; where every subject has one class, the classes of
    the subjects. Their windows stay exchangeable.
    """
    names, whose = np.unique(subjects, return_inverse=True)
    by_subject = subject_classes(labels, subjects)
    if by_subject is not None:
        return np.asarray(rng.permutation(by_subject)[whose])
    out = labels.copy()
    for k in range(len(names)):
        out[whose == k] = rng.permutation(labels[whose == k])
    return out


def count_orders(labels: Ints, subjects: npt.NDArray[Any]) -> float:
    """Number of distinct results of `permute_labels`: no p below its inverse is possible."""
    by_subject = subject_classes(labels, subjects)
    if by_subject is not None:
        groups = [by_subject]
    else:
        groups = [labels[subjects == name] for name in np.unique(subjects)]
    log = 0.0
    for group in groups:
        counts = np.unique(group, return_counts=True)[1]
        log += math.lgamma(len(group) + 1) - sum(math.lgamma(count + 1) for count in counts)
    return round(math.exp(log)) if log < 30 else math.inf


def p_value(observed: float, null: Array) -> float:
    """Share of the null values that reach the observed one, which is counted, too: valid for any
    number of permutations, never 0.
    """
    reached = null >= observed * (1 - 1e-9) - 1e-12
    return float(1 + reached.sum()) / (1 + len(null))


def null_maxima(
    d: Tensor, labels: Ints, subjects: npt.NDArray[Any], score: str, permutations: int, seed: int
) -> Array:
    """The best score of all candidates, distances [C, n], under permuted labels, [R]: corrects p
    for the selection.
    """
    rng = np.random.default_rng([seed, 1])
    maxima = np.empty(permutations)
    for r in range(permutations):
        scores = SCORES[score](d, torch.from_numpy(permute_labels(labels, subjects, rng)))
        maxima[r] = float(scores.nan_to_num(0.0).max())
        if (r + 1) % 20 == 0:
            report_progress("permutations", r + 1, permutations)
    return maxima


class Shapelet(NamedTuple):
    """A segment of a training window, and its scores."""

    values: Array  # [m], as in the windows
    channel: str
    rate: float  # Hz
    start: int  # samples
    window: int  # position in the index of its windows
    klass: str  # the class that is closest to it
    f: float
    gain: float  # bits
    threshold: float  # on the distance
    p: float  # share of permutations in which some candidate is as good

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.values) / self.rate

    def score(self, name: str) -> float:
        """The score called `name`, a key of `SCORES`."""
        return self.f if name == "f" else self.gain

    def find_in(
        self, windows: Windows, values: Tensor, *, normalised: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Distances [n] of values [n, T, V] of `windows` to it, and the first samples [n] of the
        closest segments.
        """
        series = values[..., windows.channel_names.index(self.channel)].double()
        d, places = compute_distances(
            series, torch.from_numpy(self.values)[None], normalised=normalised
        )
        return d[0], places[0]


class LabelledWindows(NamedTuple):
    """Complete windows of one split, with their classes."""

    rows: Ints
    values: Tensor  # [n, T, V] float32
    labels: Ints  # [n]
    subjects: npt.NDArray[Any]  # [n]
    split: str

    @property
    def n_subjects(self) -> int:
        """Distinct subjects."""
        return len(np.unique(self.subjects))


class MinedShapelets(NamedTuple):
    """The shapelets with the windows they are from."""

    shapelets: list[Shapelet]
    drawn: LabelledWindows
    candidates: int
    null: Array  # [R]
    notices: list[str]


def require_classes(
    windows: Windows,
    hint: str = "Give --data a view with classes; `bitimely list views` lists them",
) -> None:
    """Raises UserError (config, exit 2), where the windows have no classes."""
    if windows.task != "classification":
        problem = f"{windows.name} has no classes"
        raise usage_error(problem, "shapelets separate classes", hint, field="--data")


def draw_windows(
    windows: Windows, splits: Sequence[str], count: int, seed: int
) -> LabelledWindows | None:
    """Up to `count` windows of the first non-empty one of `splits`, balanced over classes, with
    subjects in turn; None without windows.

    Windows with missing values are excluded. Raises UserError as `require_classes`.
    """
    require_classes(windows)
    for split in splits:
        part = windows[split]
        if not len(part):
            continue
        labels, subjects = np.asarray(part.targets()), np.asarray(part.subjects())
        drawn = _draw_balanced(labels, subjects, count, seed)
        rows = np.asarray(part.rows)[drawn]
        complete, values = read_complete(windows, rows)
        if complete.any():
            drawn, rows = drawn[complete], rows[complete]
            classes = labels[drawn].astype(np.int64)
            return LabelledWindows(rows, values, classes, subjects[drawn], split)
    return None


def _draw_balanced(labels: Ints, subjects: npt.NDArray[Any], count: int, seed: int) -> Ints:
    """Positions of up to `count` windows, ascending: each class as often, its subjects in turn."""
    order = np.random.default_rng([seed, 2]).permutation(len(labels)).tolist()
    turn: Counter[tuple[int, str]] = Counter()
    rank = np.empty(len(labels), np.int64)
    for i in order:
        key = (int(labels[i]), str(subjects[i]))
        rank[i] = turn[key]
        turn[key] += 1
    classes = [
        sorted((i for i in order if labels[i] == label), key=lambda i: rank[i])
        for label in np.unique(labels)
    ]
    drawn: list[int] = []
    # what a rare class lacks goes to the others
    for k, positions in enumerate(sorted(classes, key=len)):
        drawn += positions[: (count - len(drawn)) // (len(classes) - k)]
    return np.sort(np.array(drawn, np.int64))


def read_complete(windows: Windows, rows: Ints) -> tuple[npt.NDArray[np.bool_], Tensor]:
    """Which of `rows` have no missing values, bool [n], and the values of these, [n, T, V]."""
    arrays: Any = windows.arrays(rows)
    complete = np.ones(len(rows), bool)
    if arrays.get("mask") is not None:
        complete = arrays["mask"].reshape(len(rows), -1).all(1)
    return complete, torch.from_numpy(np.ascontiguousarray(arrays["values"][complete]))


@dataclass(frozen=True)
class MiningOptions:
    """How shapelets are mined.

    lengths: seconds; none: `default_lengths`.
    count: how many to keep: at most one a window, and none that resembles a better one.
    sequences: training windows to mine, balanced over classes.
    candidates: segments to try, drawn from all of them at a tenth of their length (at least 1
    sample) apart.
    score: f or information-gain.
    normalised: standardise segments.
    permutations: of the labels.
    channel: the only one to mine; "" = all.
    seed: of the draws.
    """

    lengths: Sequence[float] = ()
    count: int = 5
    sequences: int = 100
    candidates: int = 2000
    score: str = "f"
    normalised: bool = True
    permutations: int = 500
    channel: str = ""
    seed: int = 0


def mine_shapelets(windows: Windows, options: MiningOptions) -> MinedShapelets:
    """The best shapelets of the training split of labelled windows.

    Raises UserError: no classes, no length that fits, an unknown channel or score (exit 2);
    no_input without two classes of two windows.
    """
    check_choice("score", options.score, SCORES)
    if options.channel:
        check_choice("channel", options.channel, windows.channel_names)
    lengths = options.lengths or default_lengths(windows)
    fitting = _fit_lengths(windows, lengths, stated=bool(options.lengths))
    train = draw_windows(windows, ("train",), options.sequences, options.seed)
    if train is None or (np.unique(train.labels, return_counts=True)[1] > 1).sum() < 2:
        raise input_error(
            Reason.NO_INPUT,
            f"{windows.name} has too few training windows",
            "expected two classes of two windows each",
        )
    names = [options.channel] if options.channel else windows.channel_names
    channels = list(map(windows.channel_names.index, names))
    candidates = _draw_candidates(train, channels, fitting, options.candidates, options.seed)
    if not len(candidates):
        raise input_error(
            Reason.NO_INPUT,
            f"every segment of {windows.name} is flat",
            "expected a signal with variance",
        )
    d = _distances_to_all(train.values, candidates, options.normalised)
    null = null_maxima(
        d, train.labels, train.subjects, options.score, options.permutations, options.seed
    )
    shapelets = _select_best(windows, train, candidates, d, null, options)
    excluded = [s for s in lengths if round(s * windows.rate) not in fitting]
    return MinedShapelets(shapelets, train, len(candidates), null, _list_notices(train, excluded))


def _list_notices(train: LabelledWindows, excluded: Sequence[float]) -> list[str]:
    notices = []
    if excluded:
        texts = ", ".join(f"{seconds:g} s" for seconds in excluded)
        notices.append(
            f"Excluded lengths, longer than half a window or shorter than {MIN_SAMPLES} samples: "
            f"{texts}."
        )
    if train.n_subjects < MIN_SUBJECTS:
        notices.append(
            f"Mined from {count_units(train.n_subjects)}: shapelets may not generalise to other "
            "subjects."
        )
    orders = count_orders(train.labels, train.subjects)
    if orders < MIN_ORDERS:
        notices.append(
            f"The labels have only {orders:,.0f} distinct permutations: no p below "
            f"{1 / orders:.2g} is possible."
        )
    return notices


def _fit_lengths(windows: Windows, lengths: Sequence[float], *, stated: bool) -> list[int]:
    """Samples of the lengths that are long enough and at most half a window.

    Raises UserError (config, exit 2) without any, and where one of lengths that were `stated` does
    not fit.
    """
    outside = [
        s for s in lengths if not MIN_SAMPLES <= round(s * windows.rate) <= windows.length // 2
    ]
    fitting = sorted({round(s * windows.rate) for s in lengths if s not in outside})
    if not fitting or (stated and outside):
        shortest, longest = MIN_SAMPLES / windows.rate, windows.length // 2 / windows.rate
        raise usage_error(
            f"lengths of {', '.join(f'{s:g}' for s in outside)} s",
            f"expected {shortest:.3g} to {longest:.3g} s, half a window",
            field="--lengths",
        )
    return fitting


def _select_best(
    windows: Windows,
    train: LabelledWindows,
    candidates: Ints,
    d: Tensor,
    null: Array,
    options: MiningOptions,
) -> list[Shapelet]:
    """The best candidates by their distances [C, n], each moved to the best start nearby."""
    labels, score = torch.from_numpy(train.labels), SCORES[options.score]
    scores = score(d, labels).nan_to_num(0.0)
    ties = f_statistic(d, labels).nan_to_num(0.0)
    shapelets: list[Shapelet] = []
    for k in np.lexsort((-ties.numpy(), -scores.numpy())).tolist():
        if len(shapelets) == options.count:
            break
        row, v, m, start = candidates[k].tolist()
        window, channel = int(train.rows[row]), windows.channel_names[v]
        signal = train.values[row, :, v].double().numpy()
        if _is_redundant(shapelets, window, channel, signal[start : start + m]):
            continue
        step = _step_size(m)
        last = min(windows.length - m, start + step - 1)
        near = np.array([[row, v, m, s] for s in range(max(0, start - step + 1), last + 1)])
        around = _distances_to_all(train.values, near, options.normalised)
        best = int(score(around, labels).nan_to_num(0.0).argmax())
        moved, start = around[best : best + 1], int(near[best, 3])
        values = signal[start : start + m]
        if _is_redundant(shapelets, window, channel, values):
            continue
        gain, threshold = information_gain(moved, labels)
        means = {int(c): float(moved[0, labels == c].mean()) for c in labels.unique()}
        shapelets.append(
            Shapelet(
                values=values,
                channel=channel,
                rate=windows.rate,
                start=start,
                window=window,
                klass=windows.class_names[min(means, key=lambda c: means[c])],
                f=float(f_statistic(moved, labels)),
                gain=float(gain),
                threshold=float(threshold),
                # of the candidate before its start was moved, which used the labels
                p=p_value(float(scores[k]), null),
            )
        )
    # moving may change the order
    return sorted(shapelets, key=lambda shapelet: -shapelet.score(options.score))


def default_lengths(windows: Windows) -> tuple[float, ...]:
    """Default lengths, seconds: 0.5, 1 and 2 s; of windows shorter than 1 s a 16th, an 8th and a
    quarter.
    """
    half = windows.length / windows.rate / 2
    return (0.5, 1.0, 2.0) if half >= 0.5 else (half / 8, half / 4, half / 2)


def _step_size(m: int) -> int:
    return max(1, m // 10)


def _draw_candidates(
    train: LabelledWindows, channels: list[int], lengths: list[int], count: int, seed: int
) -> Ints:
    """Row, channel, length, start of up to `count` segments that are not flat, [C, 4], balanced
    over lengths.
    """
    n, samples, _ = train.values.shape
    spread = train.values.std(1, unbiased=False).numpy()
    rng = np.random.default_rng([seed, 3])
    candidates = []
    for k, m in enumerate(lengths):
        starts = np.arange(0, samples - m + 1, _step_size(m))
        grid = np.stack(np.meshgrid(np.arange(n), channels, [m], starts, indexing="ij"), -1)
        grid = grid.reshape(-1, 4)
        wanted = count // len(lengths) + (k < count % len(lengths))
        drawn = grid[np.sort(rng.permutation(len(grid))[:wanted])]
        segments = (train.values[i, s : s + m, v] for i, v, _, s in drawn)
        moves = np.array([float(segment.std(unbiased=False)) for segment in segments])
        candidates.append(drawn[moves > FLAT_SHARE * spread[drawn[:, 0], drawn[:, 1]]])
    return np.concatenate(candidates)


def _distances_to_all(values: Tensor, candidates: Ints, normalised: bool) -> Tensor:
    """Distances [C, n] of segments of the windows to all of them, each on its own channel."""
    distances = torch.empty(len(candidates), len(values), dtype=torch.float64)
    groups = np.unique(candidates[:, 1:3], axis=0).tolist()
    for k, (v, m) in enumerate(groups):
        rows = np.flatnonzero((candidates[:, 1:3] == (v, m)).all(1))
        segments = torch.stack([values[i, s : s + m, v] for i, _, _, s in candidates[rows]])
        for i in range(len(values)):
            series = values[i : i + 1, :, v]
            d, _ = compute_distances(series, segments, normalised=normalised, placed=False)
            distances[rows, i] = d[:, 0].double()
            if (i + 1) % 10 == 0:
                report_progress("distances", k * len(values) + i + 1, len(groups) * len(values))
    return distances


def _is_redundant(better: list[Shapelet], window: int, channel: str, values: Array) -> bool:
    """Whether a better shapelet is of the same window, or has the same shape."""
    return any(
        shapelet.window == window
        or (shapelet.channel == channel and max_correlation(values, shapelet.values) >= SAME_SHAPE)
        for shapelet in better
    )


def max_correlation(a: Array, b: Array) -> float:
    """Largest correlation of two segments over all shifts with 75 % of the shorter one inside the
    longer one.
    """
    short, long = sorted((a, b), key=len)
    spare = len(short) - max(2, round(OVERLAP * len(short)))
    largest = 0.0
    for shift in range(-spare, len(long) - len(short) + spare + 1):
        first, last = max(0, -shift), min(len(short), len(long) - shift)
        x, y = short[first:last], long[first + shift : last + shift]
        x, y = x - x.mean(), y - y.mean()
        size = float(np.sqrt((x**2).sum() * (y**2).sum()))
        if size > 0:
            largest = max(largest, float((x * y).sum()) / size)
    return largest
