"""Mining of shapelets: segments of a signal whose presence separates the classes, scored against
permuted labels.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitimely_core.errors import Reason, check_choice, input_error, unknown_name_error, usage_error
from bitimely_core.tokens import Windows
from bitimely_core.types import Progress

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_SAMPLES = 8  # samples
# standard deviation, relative to that of the series, below which a segment has no shape
FLAT_SHARE = 1e-3
# correlation, at the best shift, from which two shapelets of a channel count as one
SAME_SHAPE = 0.9
OVERLAP = 0.75  # of the shorter one, that a shift must leave
BLOCK = 1 << 22  # entries of a matrix of counts at a time
# entries of a matrix of distances at a time: as many as stay in the cache between the product and
# its least entries
CACHED = 1 << 19
# distinct permutations of the labels, below which the lower bound of p is reported
MIN_ORDERS = 100
MIN_SUBJECTS = 5  # below which results do not generalise to other subjects


def subtract_mean(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches [..., m] less their mean, and that mean [...]."""
    mean = segments.mean(-1)
    return segments - mean[..., None], mean


def standardise_segments(segments: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """Stretches [..., m] less their mean, over their standard deviation; zeros where that is no
    more than `least`.
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
    own = 2.0 * m if normalised else wanted.square().sum(-1)[:, None]
    found = series.new_empty(len(shapelets), len(series))
    places = torch.empty((len(shapelets), len(series)) if placed else 0, dtype=torch.int64)
    block = max(1, CACHED // (series.shape[1] - m + 1))
    for i, one in enumerate(series):
        segments = one.unfold(0, m, 1)
        if normalised:
            segments = standardise_segments(segments, FLAT_SHARE * one.std(unbiased=False))
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
            found[rows, i] = d.amin(1)
            if placed:
                places[rows, i] = d.argmin(1)
    return (found + own).clamp(min=0), places


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
        left = onehot[order].cumsum(1)[:, :-1]  # [C, n - 1, K]
        right = onehot.sum(0) - left
        share = torch.arange(1, n, dtype=torch.float64) / n
        gain = _entropy(onehot.sum(0)) - share * _entropy(left) - (1 - share) * _entropy(right)
        gain = torch.where(ordered[:, 1:] > ordered[:, :-1], gain, -1.0)
        best, at = gain.max(1)
        middle = (ordered.gather(1, at[:, None]) + ordered.gather(1, at[:, None] + 1))[:, 0] / 2
        gains.append(best.clamp(min=0))
        thresholds.append(torch.where(best >= 0, middle, torch.nan))
    return torch.cat(gains), torch.cat(thresholds)


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
    groups = (
        [by_subject]
        if by_subject is not None
        else [labels[subjects == name] for name in np.unique(subjects)]
    )
    log = sum(
        math.lgamma(len(g) + 1)
        - sum(math.lgamma(c + 1) for c in np.unique(g, return_counts=True)[1])
        for g in groups
    )
    return round(math.exp(log)) if log < 30 else math.inf


def p_value(observed: float, null: Array) -> float:
    """Share of the null values that reach the observed one, which is counted, too: valid for any
    number of permutations, never 0.
    """
    reached = null >= observed * (1 - 1e-9) - 1e-12
    return float(1 + reached.sum()) / (1 + len(null))


def null_maxima(
    d: Tensor,
    labels: Ints,
    subjects: npt.NDArray[Any],
    score: str,
    permutations: int,
    seed: int,
    progress: Progress | None = None,
) -> Array:
    """The best score of all candidates, distances [C, n], under permuted labels, [R]: corrects p
    for the selection.
    """
    rng = np.random.default_rng([seed, 1])
    out = np.empty(permutations)
    for r in range(permutations):
        found = SCORES[score](d, torch.from_numpy(permute_labels(labels, subjects, rng)))
        out[r] = float(found.nan_to_num(0.0).max())
        if progress is not None and (r + 1) % 20 == 0:
            progress("permutations", r + 1, permutations)
    return out


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
        return len(set(self.subjects.tolist()))


class MinedShapelets(NamedTuple):
    """The shapelets with the windows they are from."""

    shapelets: list[Shapelet]
    drawn: LabelledWindows
    candidates: int
    null: Array  # [R]
    notices: list[str]


def draw_windows(
    windows: Windows, splits: Sequence[str], count: int, seed: int
) -> LabelledWindows | None:
    """Up to `count` windows of the first non-empty one of `splits`, balanced over classes, with
    subjects in turn; None without windows.

    Windows with missing values are excluded. Raises UserError: config (exit 2), where the windows
    have no classes.
    """
    if windows.task != "classification":
        raise usage_error(
            f"{windows.name} has no classes",
            "shapelets separate classes",
            "Give --data a view with classes; `bitimely list views` lists them",
            field="--data",
        )
    for split in splits:
        part = windows[split]
        if not len(part):
            continue
        labels, subjects = np.asarray(part.targets()), np.asarray(part.subjects())
        rng = np.random.default_rng([seed, 2])
        order = rng.permutation(len(part))
        turn: dict[tuple[int, str], int] = {}
        rank = np.empty(len(part), np.int64)
        for i in order:
            key = (int(labels[i]), str(subjects[i]))
            rank[i] = turn[key] = turn.get(key, -1) + 1
        classes = np.unique(labels)
        lists = [
            sorted((i for i in order.tolist() if labels[i] == c), key=lambda i: rank[i])
            for c in classes
        ]
        chosen: list[int] = []
        # what a rare class lacks goes to the others
        for k, one in enumerate(sorted(lists, key=len)):
            chosen += one[: (count - len(chosen)) // (len(lists) - k)]
        at = np.sort(np.array(chosen, np.int64))
        rows = np.asarray(part.rows)[at]
        arrays: Any = windows.arrays(rows)
        complete = (
            np.ones(len(rows), bool)
            if arrays.get("mask") is None
            else arrays["mask"].reshape(len(rows), -1).all(1)
        )
        if complete.any():
            values = torch.from_numpy(np.ascontiguousarray(arrays["values"][complete]))
            return LabelledWindows(
                rows[complete],
                values,
                labels[at][complete].astype(np.int64),
                subjects[at][complete],
                split,
            )
    return None


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


def mine_shapelets(
    windows: Windows, options: MiningOptions, progress: Progress | None = None
) -> MinedShapelets:
    """The best shapelets of the training split of labelled windows.

    Raises UserError: no classes, no length that fits, an unknown channel or score (exit 2);
    no_input without two classes of two windows.
    """
    check_choice("score", options.score, SCORES)
    if options.channel and options.channel not in windows.channel_names:
        raise unknown_name_error("channel", options.channel, list(windows.channel_names))
    lengths = options.lengths or default_lengths(windows)
    fitting = _fit_lengths(windows, lengths, stated=bool(options.lengths))
    train = draw_windows(windows, ("train",), options.sequences, options.seed)
    if (
        train is None
        or min((np.unique(train.labels, return_counts=True)[1] > 1).sum(), len(train.labels) - 2)
        < 2
    ):
        raise input_error(
            Reason.NO_INPUT,
            f"{windows.name} has too few training windows",
            "expected two classes of two windows each",
        )
    channels = (
        [windows.channel_names.index(options.channel)]
        if options.channel
        else list(range(windows.channels))
    )
    tried = _draw_candidates(train, channels, fitting, options.candidates, options.seed)
    if not len(tried):
        raise input_error(
            Reason.NO_INPUT,
            f"every segment of {windows.name} is flat",
            "expected a signal with variance",
        )
    d = _distances_to_all(train.values, tried, options.normalised, progress)
    null = null_maxima(
        d, train.labels, train.subjects, options.score, options.permutations, options.seed, progress
    )
    shapelets = _select_best(windows, train, tried, d, null, options)
    excluded = [f"{s:g} s" for s in lengths if round(s * windows.rate) not in fitting]
    notices = []
    if excluded:
        notices.append(
            f"Excluded lengths, longer than half a window or shorter than {MIN_SAMPLES} samples: {', '.join(excluded)}."
        )
    if train.n_subjects < MIN_SUBJECTS:
        notices.append(
            f"Mined from {train.n_subjects} subject{'s' * (train.n_subjects != 1)}: shapelets may not generalise to other subjects."
        )
    possible = count_orders(train.labels, train.subjects)
    if possible < MIN_ORDERS:
        notices.append(
            f"The labels have only {possible:,.0f} distinct permutations: no p below {1 / possible:.2g} is possible."
        )
    return MinedShapelets(shapelets, train, len(tried), null, notices)


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
    tried: Ints,
    d: Tensor,
    null: Array,
    options: MiningOptions,
) -> list[Shapelet]:
    """The best candidates by their distances [C, n], each moved to the best start nearby."""
    labels, score = torch.from_numpy(train.labels), SCORES[options.score]
    scores = score(d, labels).nan_to_num(0.0)
    shapelets: list[Shapelet] = []
    kept: list[tuple[int, int, Array]] = []
    for at in np.lexsort(
        (-f_statistic(d, labels).nan_to_num(0.0).numpy(), -scores.numpy())
    ).tolist():
        row, v, m, start = tried[at].tolist()
        if len(shapelets) == options.count:
            break
        if _is_redundant(kept, row, v, train.values[row, start : start + m, v]):
            continue
        step = _step_size(m)
        near = np.array(
            [
                [row, v, m, s]
                for s in range(
                    max(0, start - step + 1), min(windows.length - m, start + step - 1) + 1
                )
            ]
        )
        around = _distances_to_all(train.values, near, options.normalised)
        best = int(score(around, labels).nan_to_num(0.0).argmax())
        moved, begin = around[best : best + 1], int(near[best, 3])
        segment = train.values[row, begin : begin + m, v]
        if _is_redundant(kept, row, v, segment):
            continue
        values = segment.double().numpy()
        kept.append((row, v, values))
        gain, threshold = information_gain(moved, labels)
        means = {int(c): float(moved[0, labels == c].mean()) for c in labels.unique()}
        shapelets.append(
            Shapelet(
                values=values,
                channel=windows.channel_names[v],
                rate=windows.rate,
                start=begin,
                window=int(train.rows[row]),
                klass=windows.class_names[min(means, key=lambda c: means[c])],
                f=float(f_statistic(moved, labels)),
                gain=float(gain),
                threshold=float(threshold),
                # of the candidate before its start was moved, which used the labels
                p=p_value(float(scores[at]), null),
            )
        )
    # moving may change the order
    return sorted(shapelets, key=lambda one: -(one.f if options.score == "f" else one.gain))


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
    rng = np.random.default_rng([seed, 3])
    out = []
    for k, m in enumerate(lengths):
        starts = np.arange(0, samples - m + 1, _step_size(m))
        every = np.stack(
            np.meshgrid(np.arange(n), channels, [m], starts, indexing="ij"), -1
        ).reshape(-1, 4)
        want = count // len(lengths) + (k < count % len(lengths))
        some = every[np.sort(rng.permutation(len(every))[:want])]
        moves = np.array(
            [float(train.values[i, s : s + m, v].std(unbiased=False)) for i, v, _, s in some]
        )
        own = train.values.std(1, unbiased=False).numpy()[some[:, 0], some[:, 1]]
        out.append(some[moves > FLAT_SHARE * own])
    return np.concatenate(out)


def _distances_to_all(
    values: Tensor, tried: Ints, normalised: bool, progress: Progress | None = None
) -> Tensor:
    """Distances [C, n] of segments of the windows to all of them, each on its own channel."""
    out = torch.empty(len(tried), len(values), dtype=torch.float64)
    groups = sorted({(int(v), int(m)) for v, m in tried[:, 1:3]})
    for k, (v, m) in enumerate(groups):
        here = np.flatnonzero((tried[:, 1] == v) & (tried[:, 2] == m))
        segments = torch.stack([values[i, s : s + m, v] for i, _, _, s in tried[here]])
        for i in range(len(values)):
            out[here, i] = compute_distances(
                values[i : i + 1, :, v], segments, normalised=normalised, placed=False
            )[0][:, 0].double()
            if progress is not None and (i + 1) % 10 == 0:
                progress("distances", k * len(values) + i + 1, len(groups) * len(values))
    return out


def _is_redundant(kept: list[tuple[int, int, Array]], row: int, v: int, segment: Tensor) -> bool:
    """Whether a better one is of the same window, or has the same shape."""
    shape = segment.double().numpy()
    return any(
        row == r or (v == w and max_correlation(shape, other) >= SAME_SHAPE) for r, w, other in kept
    )


def max_correlation(a: Array, b: Array) -> float:
    """Largest correlation of two segments over all shifts with 75 % of the shorter one inside the
    longer one.
    """
    short, long = sorted((a, b), key=len)
    spare = len(short) - max(2, round(OVERLAP * len(short)))
    found = 0.0
    for shift in range(-spare, len(long) - len(short) + spare + 1):
        first, last = max(0, -shift), min(len(short), len(long) - shift)
        x, y = (
            short[first:last] - short[first:last].mean(),
            long[first + shift : last + shift] - long[first + shift : last + shift].mean(),
        )
        size = float(np.sqrt((x**2).sum() * (y**2).sum()))
        found = max(found, float((x * y).sum()) / size if size > 0 else 0.0)
    return found
