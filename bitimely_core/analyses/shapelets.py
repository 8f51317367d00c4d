"""Shapelets: short stretches of a signal whose presence tells the classes apart, mined from labelled windows.

A candidate s [m] is a stretch of a training window. Its distance to a window x is the least over all stretches of x,

    d(s, x) = min_t || z(s) - z(x[t : t + m]) ||^2 = min_t 2 m (1 - corr(s, x[t : t + m])),

with z the standardisation of a stretch (without it loudness decides, not shape). A candidate is good when the distances of the classes
differ: one-way F, or the information gain of the best threshold on d. The best of thousands looks good on noise too, so its score is
held against the best score of all candidates when the labels are permuted, and measured again on held-out windows, where nothing was
chosen.

Legend: n windows, T samples, V channels, m samples of a shapelet, C candidates, K classes, R permutations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitimely_core.errors import Reason, input_error, safe_text, usage_error
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses, unknown
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_SAMPLES = 8  # samples
FLAT_SHARE = 1e-3  # a stretch whose deviation is below this share of its series' own says nothing about shape
SAME_SHAPE = 0.9  # correlation, at the best shift, from which two shapelets of a channel are one
OVERLAP = 0.75  # of the shorter one, that a shift must leave
BLOCK = 1 << 22  # entries of a matrix of counts at a time
CACHED = 1 << 19  # entries of a matrix of distances at a time: as many as stay in the cache between the product and its least entries
MIN_ORDERS = 100  # of the labels, below which a p says so
MIN_SUBJECTS = 5  # subjects below which nothing is said about subjects at large


# --- distances ----------------------------------------------------------------------------------------------------------------------------


def subtract_mean(stretches: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches [..., m] less their mean, and that mean [...]."""
    mean = stretches.mean(-1)
    return stretches - mean[..., None], mean


def standardise_stretches(stretches: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """Stretches [..., m] less their mean, over their standard deviation; zeros where that is no more than `least`."""
    shape, _ = subtract_mean(stretches)
    spread = shape.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > least, shape / spread.clamp(min=1e-30), 0.0)


@torch.no_grad()
def compute_distances(series: Tensor, shapelets: Tensor, *, normalised: bool = True, placed: bool = True) -> tuple[Tensor, Tensor]:
    """Least squared distance of each shapelet to each series, and where it is.

    Args:
        series: [n, T].
        shapelets: [C, m], m <= T.
        normalised: compare standardised stretches. A flat stretch of a series then counts as uncorrelated, 2 m.
        placed: whether to look for the places, which takes half as long again.

    Returns:
        Distances [C, n], in the dtype of the series, and the first samples of the closest stretches [C, n] int64 (without `placed` [0]).
    """
    m = shapelets.shape[1]
    wanted, level = (standardise_stretches(shapelets), None) if normalised else subtract_mean(shapelets)
    own = 2.0 * m if normalised else wanted.square().sum(-1)[:, None]
    found = series.new_empty(len(shapelets), len(series))
    places = torch.empty((len(shapelets), len(series)) if placed else 0, dtype=torch.int64)
    block = max(1, CACHED // (series.shape[1] - m + 1))
    for i, one in enumerate(series):
        stretches = one.unfold(0, m, 1)
        if normalised:
            stretches = standardise_stretches(stretches, FLAT_SHARE * one.std(unbiased=False))
            sizes = stretches.new_zeros(len(stretches))
        else:  # shapes and levels apart: an offset of the signal would eat the digits of a difference of squares
            stretches, levels = subtract_mean(stretches)
            sizes = stretches.square().sum(-1)
        for start in range(0, len(wanted), block):
            rows = slice(start, start + block)
            d = torch.addmm(sizes, wanted[rows], stretches.T, alpha=-2)
            if level is not None:
                apart = level[rows, None] - levels
                d.addcmul_(apart, apart, value=m)
            found[rows, i] = d.amin(1)
            if placed:
                places[rows, i] = d.argmin(1)
    return (found + own).clamp(min=0), places


# --- scores -------------------------------------------------------------------------------------------------------------------------------


def f_statistic(d: Tensor, labels: Tensor) -> Tensor:
    """One-way F of distances [C, n] over the classes of labels [n] int64, [C] float64; NaN without two classes and n > K.

    Variance between the means of the K classes that are there, on K - 1 degrees of freedom, over that within them, on n - K.
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
    within = torch.where(within < 1e-12 * between, 0.0, within)  # what rounding leaves of a perfect separation
    return torch.where(between > 0, between / (k - 1) / (within / (n - k)), 0.0)


def information_gain(d: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What the best threshold on distances [C, n] says about labels [n] int64, in bits.

    Returns:
        Gain [C] float64 = H(labels) - mean entropy of the two sides; threshold [C], half way between two distances (NaN where all are
            equal).
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
    """Indicators [n, K] float64 of the classes that are there."""
    return torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()


def _entropy(counts: Tensor) -> Tensor:
    """Of counts [..., K], in bits."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1) / math.log(2)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"f": f_statistic, "information-gain": lambda d, y: information_gain(d, y)[0]}


# --- chance -------------------------------------------------------------------------------------------------------------------------------


def subject_classes(labels: Ints, subjects: npt.NDArray[Any]) -> Ints | None:
    """The class of each subject, in the order of their names, where every one of several has one class; else None."""
    _, first, whose = np.unique(subjects, return_index=True, return_inverse=True)
    return labels[first] if len(first) > 1 and (labels[first][whose] == labels).all() else None


def permute_labels(labels: Ints, subjects: npt.NDArray[Any], rng: np.random.Generator) -> Ints:
    """Labels [n] in another order that chance could have made: what windows of one subject share stays together.

    Where every subject has one class, the classes of the subjects are permuted; else labels are, within each subject.
    """
    names, whose = np.unique(subjects, return_inverse=True)
    whole = subject_classes(labels, subjects)
    if whole is not None:
        return np.asarray(rng.permutation(whole)[whose])
    out = labels.copy()
    for k in range(len(names)):
        out[whose == k] = rng.permutation(labels[whose == k])
    return out


def count_orders(labels: Ints, subjects: npt.NDArray[Any]) -> float:
    """How many different orders `permuted` can give: no p below its inverse is possible."""
    whole = subject_classes(labels, subjects)
    groups = [whole] if whole is not None else [labels[subjects == name] for name in np.unique(subjects)]
    log = sum(math.lgamma(len(g) + 1) - sum(math.lgamma(c + 1) for c in np.unique(g, return_counts=True)[1]) for g in groups)
    return round(math.exp(log)) if log < 30 else math.inf


def p_value(observed: float, null: Array) -> float:
    """Share of the null values that reach the observed one, itself among them: valid for any number of permutations, never 0."""
    reached = null >= observed * (1 - 1e-9) - 1e-12
    return float(1 + reached.sum()) / (1 + len(null))


def null_maxima(
    d: Tensor, labels: Ints, subjects: npt.NDArray[Any], score: str, permutations: int, seed: int, progress: Progress | None = None
) -> Array:
    """The best score of all candidates, distances [C, n], under permuted labels, [R]: the price of having chosen among them."""
    rng = np.random.default_rng([seed, 1])
    out = np.empty(permutations)
    for r in range(permutations):
        found = SCORES[score](d, torch.from_numpy(permute_labels(labels, subjects, rng)))
        out[r] = float(found.nan_to_num(0.0).max())
        if progress is not None and (r + 1) % 20 == 0:
            progress("permutations", r + 1, permutations)
    return out


# --- mining -------------------------------------------------------------------------------------------------------------------------------


class Shapelet(NamedTuple):
    """A stretch of a training window, and what it says."""

    values: Array  # [m], as the windows are read
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
    """Windows of one split that mining or checking reads."""

    rows: Ints
    values: Tensor  # [n, T, V] float32
    labels: Ints  # [n]
    subjects: npt.NDArray[Any]  # [n]
    split: str


class MinedShapelets(NamedTuple):
    """What was found."""

    shapelets: list[Shapelet]
    drawn: LabelledWindows
    candidates: int
    null: Array  # [R]
    notices: list[str]


def draw_windows(windows: Windows, splits: Sequence[str], count: int, seed: int) -> LabelledWindows | None:
    """Up to `count` windows of the first of `splits` that has any: as many of each class as there are, subjects in turn; None without any.

    Windows with missing values are left out.

    Raises:
        UserError: the windows have no classes (config, exit 2).
    """
    if windows.task != "classification":
        raise usage_error(
            f"{windows.name} has no classes",
            "shapelets tell classes apart",
            "Give --data a view with classes; `bitimely list views` says which have them",
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
        lists = [sorted((i for i in order.tolist() if labels[i] == c), key=lambda i: rank[i]) for c in classes]
        chosen: list[int] = []
        for k, one in enumerate(sorted(lists, key=len)):  # what a rare class lacks goes to the others
            chosen += one[: (count - len(chosen)) // (len(lists) - k)]
        at = np.sort(np.array(chosen, np.int64))
        rows = np.asarray(part.rows)[at]
        read: dict[str, Any] = windows.arrays(rows)
        whole = np.ones(len(rows), bool) if read.get("mask") is None else read["mask"].reshape(len(rows), -1).all(1)
        if whole.any():
            values = torch.from_numpy(np.ascontiguousarray(read["values"][whole]))
            return LabelledWindows(rows[whole], values, labels[at][whole].astype(np.int64), subjects[at][whole], split)
    return None


def mine_shapelets(
    windows: Windows,
    *,
    lengths: Sequence[float] = (),
    count: int = 5,
    sequences: int = 100,
    candidates: int = 2000,
    score: str = "f",
    normalised: bool = True,
    permutations: int = 500,
    channel: str = "",
    seed: int = 0,
    progress: Progress | None = None,
) -> MinedShapelets:
    """The best shapelets of the training split.

    Args:
        windows: labelled ones; only those of the training split are read.
        lengths: seconds; none: `usual`.
        count: how many to keep: at most one a window, and none that looks like a better one.
        sequences: training windows to mine, of every class alike.
        candidates: stretches to try, drawn from all of them at a tenth of their length (at least 1 sample) apart.
        score: f or information-gain.
        normalised: standardise stretches.
        permutations: of the labels.
        channel: look at this one alone; "" = at each.
        seed: of what is drawn.
        progress: told about windows and permutations.

    Raises:
        UserError: no classes, no length that fits, an unknown channel or score (exit 2); no_input where the training split has not two
            classes of two windows.
    """
    if score not in SCORES:
        raise unknown("score", score, list(SCORES))
    if channel and channel not in windows.channel_names:
        raise unknown("channel", channel, list(windows.channel_names))
    lengths = lengths or default_lengths(windows)
    fit = sorted({round(s * windows.rate) for s in lengths if MIN_SAMPLES <= round(s * windows.rate) <= windows.length // 2})
    if not fit:
        shortest, longest = MIN_SAMPLES / windows.rate, windows.length // 2 / windows.rate
        raise usage_error(
            f"lengths of {', '.join(f'{s:g}' for s in lengths)} s",
            f"expected {shortest:.3g} to {longest:.3g} s, half a window",
            field="--lengths",
        )
    train = draw_windows(windows, ("train",), sequences, seed)
    if train is None or min((np.unique(train.labels, return_counts=True)[1] > 1).sum(), len(train.labels) - 2) < 2:
        raise input_error(Reason.NO_INPUT, f"{windows.name} has too few training windows", "expected two classes of two windows each")
    channels = [windows.channel_names.index(channel)] if channel else list(range(windows.channels))
    tried = _draw_candidates(train, channels, fit, candidates, seed)
    if not len(tried):
        raise input_error(Reason.NO_INPUT, f"every stretch of {windows.name} is flat", "expected a signal that moves")
    d = _distances_to_all(train.values, tried, normalised, progress)
    labels = torch.from_numpy(train.labels)
    scores = SCORES[score](d, labels).nan_to_num(0.0)
    null = null_maxima(d, train.labels, train.subjects, score, permutations, seed, progress)
    shapelets: list[Shapelet] = []
    taken: list[tuple[int, int, Array]] = []
    for at in np.lexsort((-f_statistic(d, labels).nan_to_num(0.0).numpy(), -scores.numpy())).tolist():
        row, v, m, start = tried[at].tolist()
        if len(shapelets) == count:
            break
        if _is_redundant(taken, row, v, train.values[row, start : start + m, v]):
            continue
        step = _step_size(m)
        near = np.array([[row, v, m, s] for s in range(max(0, start - step + 1), min(windows.length - m, start + step - 1) + 1)])
        around = _distances_to_all(train.values, near, normalised)
        best = int(SCORES[score](around, labels).nan_to_num(0.0).argmax())
        one, begin = around[best : best + 1], int(near[best, 3])
        if _is_redundant(taken, row, v, train.values[row, begin : begin + m, v]):
            continue
        taken.append((row, v, train.values[row, begin : begin + m, v].double().numpy()))
        gain, threshold = information_gain(one, labels)
        means = {int(c): float(one[0, labels == c].mean()) for c in labels.unique()}
        shapelets.append(
            Shapelet(
                values=train.values[row, begin : begin + m, v].double().numpy(),
                channel=windows.channel_names[v],
                rate=windows.rate,
                start=begin,
                window=int(train.rows[row]),
                klass=windows.class_names[min(means, key=lambda c: means[c])],
                f=float(f_statistic(one, labels)),
                gain=float(gain),
                threshold=float(threshold),
                p=p_value(float(scores[at]), null),  # of the candidate before its start was moved: that move knew the labels
            )
        )
    shapelets.sort(key=lambda one: -(one.f if score == "f" else one.gain))  # a better start may have changed the order
    left = [f"{s:g} s" for s in lengths if round(s * windows.rate) not in fit]
    notices = (
        [f"Left out, for they do not fit a window twice or are shorter than {MIN_SAMPLES} samples: {', '.join(left)}."] if left else []
    )
    subjects = len(set(train.subjects.tolist()))
    if subjects < MIN_SUBJECTS:
        notices.append(f"Mined from {subjects} subject{'s' * (subjects != 1)}: what is found may be theirs alone.")
    possible = count_orders(train.labels, train.subjects)
    if possible < MIN_ORDERS:
        notices.append(f"Chance has {possible:,.0f} orders of these labels only: no p below {1 / possible:.2g} is possible.")
    return MinedShapelets(shapelets, train, len(tried), null, notices)


def default_lengths(windows: Windows) -> tuple[float, ...]:
    """Lengths to look at where nobody asks for some: 0.5, 1 and 2 s, of windows that hold none of them twice a 16th, an 8th and a quarter. Seconds."""
    half = windows.length / windows.rate / 2
    return (0.5, 1.0, 2.0) if half >= 0.5 else (half / 8, half / 4, half / 2)


def _step_size(m: int) -> int:
    return max(1, m // 10)


def _draw_candidates(train: LabelledWindows, channels: list[int], lengths: list[int], count: int, seed: int) -> Ints:
    """Row, channel, length, start of up to `count` stretches that are not flat, [C, 4], as many of every length."""
    n, samples, _ = train.values.shape
    rng = np.random.default_rng([seed, 3])
    out = []
    for k, m in enumerate(lengths):
        starts = np.arange(0, samples - m + 1, _step_size(m))
        every = np.stack(np.meshgrid(np.arange(n), channels, [m], starts, indexing="ij"), -1).reshape(-1, 4)
        want = count // len(lengths) + (k < count % len(lengths))
        some = every[np.sort(rng.permutation(len(every))[:want])]
        moves = np.array([float(train.values[i, s : s + m, v].std(unbiased=False)) for i, v, _, s in some])
        own = train.values.std(1, unbiased=False).numpy()[some[:, 0], some[:, 1]]
        out.append(some[moves > FLAT_SHARE * own])
    return np.concatenate(out)


def _distances_to_all(values: Tensor, tried: Ints, normalised: bool, progress: Progress | None = None) -> Tensor:
    """Distances [C, n] of stretches of the windows to all of them, each on its own channel."""
    out = torch.empty(len(tried), len(values), dtype=torch.float64)
    groups = sorted({(int(v), int(m)) for v, m in tried[:, 1:3]})
    for k, (v, m) in enumerate(groups):
        here = np.flatnonzero((tried[:, 1] == v) & (tried[:, 2] == m))
        stretches = torch.stack([values[i, s : s + m, v] for i, _, _, s in tried[here]])
        for i in range(len(values)):
            out[here, i] = compute_distances(values[i : i + 1, :, v], stretches, normalised=normalised, placed=False)[0][:, 0].double()
            if progress is not None and (i + 1) % 10 == 0:
                progress("distances", k * len(values) + i + 1, len(groups) * len(values))
    return out


def _is_redundant(taken: list[tuple[int, int, Array]], row: int, v: int, stretch: Tensor) -> bool:
    """Is there a better one of the same window, or one that looks like it?"""
    shape = stretch.double().numpy()
    return any(row == r or (v == w and max_correlation(shape, other) >= SAME_SHAPE) for r, w, other in taken)


def max_correlation(a: Array, b: Array) -> float:
    """Largest correlation of two stretches over all shifts that leave 75 % of the shorter one beside the longer one."""
    short, long = sorted((a, b), key=len)
    spare = len(short) - max(2, round(OVERLAP * len(short)))
    found = 0.0
    for shift in range(-spare, len(long) - len(short) + spare + 1):
        first, last = max(0, -shift), min(len(short), len(long) - shift)
        x, y = short[first:last] - short[first:last].mean(), long[first + shift : last + shift] - long[first + shift : last + shift].mean()
        size = float(np.sqrt((x**2).sum() * (y**2).sum()))
        found = max(found, float((x * y).sum()) / size if size > 0 else 0.0)
    return found


def read_shapelets(path: Path | str) -> list[Shapelet]:
    """The shapelets of a report of this analysis: its folder, or its summary.json. Raises UserError (not_found or config, exit 2)."""
    file = Path(path) / "summary.json" if Path(path).is_dir() else Path(path)
    try:
        stored = json.loads(file.read_bytes())["shapelets"]
        return [Shapelet(**{**one, "values": np.array(one["values"], np.float64)}) for one in stored]
    except OSError:
        raise usage_error(f"no report in {safe_text(str(path))}", "expected that of analyze shapelets", code=Reason.NOT_FOUND) from None
    except (ValueError, KeyError, TypeError):
        raise usage_error(f"{safe_text(str(file))} holds no shapelets") from None


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(AnalysisFacts(takes="data", help="Short stretches of the signal that tell the classes apart, held against permuted labels"))
def shapelets(
    windows: Windows,
    *,
    lengths: str = "",
    count: int = 5,
    sequences: int = 100,
    candidates: int = 2000,
    score: str = "f",
    normalise: str = "z",
    permutations: int = 500,
    channel: str = "",
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Stretches of training windows whose presence tells the classes apart, checked on held-out windows.

    Args:
        windows: of a view with classes.
        lengths: seconds, with commas between; empty: 0.5, 1 and 2, of shorter windows parts of them.
        count: shapelets to keep.
        sequences: training windows to mine, and held-out windows to check on.
        candidates: stretches to try.
        score: f or information-gain.
        normalise: z (compare shapes) or none (compare values).
        permutations: of the labels.
        channel: look at this one alone; empty = at each.
        seed: of what is drawn.
        progress: told about windows and permutations.

    Returns:
        A page; its summary holds the shapelets, which `analyze saliency --shapelets` reads.

    Raises:
        UserError: as `mine`; a length that is no number or a normalisation that is not known (exit 2).
    """
    if normalise not in {"z", "none"}:
        raise unknown("normalisation", normalise, ["z", "none"])
    found = mine_shapelets(
        windows,
        lengths=parse_seconds(lengths),
        count=count,
        sequences=sequences,
        candidates=candidates,
        score=score,
        normalised=normalise == "z",
        permutations=permutations,
        channel=channel,
        seed=seed,
        progress=progress,
    )
    check = draw_windows(windows, ("test", "validation"), sequences, seed)
    held = None if check is None else _check_held_out(found.shapelets, windows, check, score, normalise == "z", permutations, seed)
    notices = [*windows.notices, *found.notices]
    if held is None:
        notices.append("There are no held-out windows, so nothing here was checked on windows that it was not chosen on.")
    elif check is not None and len(set(check.subjects.tolist())) < MIN_SUBJECTS:
        notices.append(f"Checked on {len(set(check.subjects.tolist()))} subjects: no statement about others.")
    return Page(
        title=f"Shapelets of {windows.name}",
        verdict=_verdict(found, held, score),
        notices=notices,
        blocks=_blocks(found, held, check, windows, score, normalise == "z"),
        facts=_facts(found, check, windows, score, normalise, seed),
        summary=_summary(found, held, check, windows, score, normalise, seed),
    )


def parse_seconds(text: str) -> tuple[float, ...]:
    """`0.5,1` as numbers. Raises UserError (config, exit 2)."""
    try:
        return tuple(float(part) for part in str(text).split(",") if part.strip())
    except ValueError:
        raise usage_error(f"found {safe_text(str(text))}", "expected seconds, as in 0.5,1", field="--lengths") from None


class HeldOutScore(NamedTuple):
    """A shapelet on windows that it was not chosen on."""

    f: float
    gain: float
    p: float  # of the score, for this shapelet alone
    distances: Array  # [n]
    starts: Ints  # [n]


def _check_held_out(
    found: list[Shapelet], windows: Windows, check: LabelledWindows, score: str, normalised: bool, permutations: int, seed: int
) -> list[HeldOutScore]:
    labels, out = torch.from_numpy(check.labels), []
    for one in found:
        series = check.values[..., windows.channel_names.index(one.channel)]
        d, places = compute_distances(series.double(), torch.from_numpy(one.values)[None], normalised=normalised)
        reached = float(SCORES[score](d, labels).nan_to_num(0.0))
        null = null_maxima(d, check.labels, check.subjects, score, permutations, seed)
        out.append(
            HeldOutScore(
                float(f_statistic(d, labels)),
                float(information_gain(d, labels)[0]),
                p_value(reached, null),
                d[0].numpy(),
                places[0].numpy(),
            )
        )
    return out


def name_shapelets(shapelets: Sequence[Shapelet]) -> list[str]:
    """A name for each: number, class, channel."""
    several = len({one.channel for one in shapelets}) > 1
    return [f"{k + 1}: {one.klass}, {one.seconds:g} s" + (f", {one.channel}" if several else "") for k, one in enumerate(shapelets)]


CHANCE = (
    "Score of each shapelet on the windows it was mined from, with the best score that any of the same candidates gets when the labels are "
    "permuted (its start was then moved by less than a tenth of its length, which p leaves out). A shapelet below the last bar is what a "
    "search this wide finds in labels that mean nothing."
)
SHAPES = (
    "The shapelets, standardised, as they stand in their training windows. They are examples that lie close to many windows of one class, "
    "not averages; their class is the one that they are closest to, which may also be the one that lacks what the others have."
)
MATCHES = (
    "Shapelet 1 and the stretch of a held-out window that is closest to it, one window a class: the median of its class. If it stood for "
    "its class, the curve of that class would lie on it and the others would not."
)
APART = (
    "Distance of held-out windows to shapelet 1, divided by the number of samples: share of the windows of each class that are closer. "
    "0 is the same shape, 2 is no correlation. Curves that lie on each other refute the shapelet."
)
NULL = "The best score of all candidates under permuted labels, from the lowest to the highest, and that of shapelet 1 (vertical)."
TABLE = (
    "Mined: on the training windows that the shapelet was chosen on; p: share of the permutations in which any candidate is as good. Held "
    "out: on windows without a part in the choice, p for this shapelet alone. F: variance between classes over that within; gain: what the "
    "best threshold on the distance says about the class."
)


def _blocks(
    found: MinedShapelets, held: list[HeldOutScore] | None, check: LabelledWindows | None, windows: Windows, score: str, normalised: bool
) -> list[Figure | Table | str]:
    names = name_shapelets(found.shapelets)
    unit = "F" if score == "f" else "information gain, bits"
    scores = [one.f if score == "f" else one.gain for one in found.shapelets]
    chance = [float(np.quantile(found.null, 0.95))] if len(found.null) else []
    blocks: list[Figure | Table | str] = [
        Figure(
            name="main-score",
            title="Told apart better than by chance?",
            caption=CHANCE,
            kind="bars",
            data={"names": [*names, *(["permuted labels, 95 %"] * len(chance))], "values": [*scores, *chance], "ylabel": unit},
        ),
        Figure(
            name="shapelets",
            title="The shapelets",
            caption=SHAPES,
            kind="lines",
            data={
                "series": [
                    {"name": name, "x": np.arange(len(one.values)) / one.rate, "y": _standardise(one.values)}
                    for name, one in zip(names, found.shapelets, strict=True)
                ],
                "xlabel": "seconds",
                "ylabel": "standardised",
            },
        ),
    ]
    first = found.shapelets[0]
    v = windows.channel_names.index(first.channel)
    row = int(np.flatnonzero(found.drawn.rows == first.window)[0])
    blocks.append(
        Figure(
            name="source",
            title="Where shapelet 1 was found",
            caption=f"Training window {first.window} of class {windows.class_names[found.drawn.labels[row]]}, as models read it.",
            kind="traces",
            data={
                "rate": windows.rate,
                "signals": [{"name": first.channel, "unit": "", "values": found.drawn.values[row, :, v].numpy()}],
                "spans": [{"start": first.start / first.rate, "stop": first.start / first.rate + first.seconds, "name": "shapelet"}],
            },
        )
    )
    if held is not None and check is not None:
        best, m = held[0], len(first.values)
        matches = [{"name": "shapelet 1", "x": np.arange(m) / first.rate, "y": _standardise(first.values)}]
        apart = []
        for c in np.unique(check.labels):
            of_class = np.flatnonzero(check.labels == c)
            of_class = of_class[np.argsort(best.distances[of_class], kind="stable")]
            at = of_class[len(of_class) // 2]
            stretch = check.values[at, best.starts[at] : best.starts[at] + m, v].double().numpy()
            matches.append({"name": windows.class_names[c], "x": np.arange(m) / first.rate, "y": _standardise(stretch)})
            share = np.arange(1, len(of_class) + 1) / len(of_class)
            apart.append({"name": windows.class_names[c], "x": best.distances[of_class] / m, "y": share})
        axes = {"xlabel": "seconds", "ylabel": "standardised"}
        blocks.append(
            Figure(
                name="matches", title="The closest stretch in each class", caption=MATCHES, kind="lines", data={"series": matches, **axes}
            )
        )
        axes = {"xlabel": "distance / samples", "ylabel": "share of the windows"}
        caption = APART if normalised else APART.replace("0 is the same shape, 2 is no correlation.", "0 is the same stretch.")
        blocks.append(Figure(name="distances", title="Distance by class", caption=caption, kind="lines", data={"series": apart, **axes}))
    if len(found.null):
        line = {"name": "shapelet 1", "x": [scores[0]] * 2, "y": [0.0, 1.0]}
        chance_line = {"name": "permuted labels", "x": np.sort(found.null), "y": np.arange(1, len(found.null) + 1) / len(found.null)}
        axes = {"xlabel": f"best {unit}", "ylabel": "share of the permutations"}
        blocks.append(
            Figure(name="chance", title="What chance finds", caption=NULL, kind="lines", data={"series": [chance_line, line], **axes})
        )
    columns = ["shapelet", "window", "start, s", "F", "gain, bits", "p", "F, held out", "gain, held out"]
    rows: list[list[Any]] = []
    for k, one in enumerate(found.shapelets):
        also = [None, None, None] if held is None else [held[k].f, held[k].gain, held[k].p]
        rows.append([names[k], one.window, one.start / one.rate, one.f, one.gain, one.p, *also])
    blocks.append(Table(name="table", title="Shapelets, best first", caption=TABLE, columns=[*columns, "p, held out"], rows=rows))
    return blocks


def _standardise(values: Array) -> Array:
    return standardise_stretches(torch.from_numpy(np.asarray(values, np.float64))).numpy()


def _verdict(found: MinedShapelets, held: list[HeldOutScore] | None, score: str) -> str:
    one = found.shapelets[0]
    what = f"The best of {found.candidates:,} stretches, {one.seconds:g} s of {one.channel} near to class {one.klass},"
    beyond = "tells the classes apart better than chance" if one.p <= 0.05 else "tells the classes apart no better than chance would"
    said = f"{what} {beyond} (p = {one.p:.3g} after the choice)"
    if held is None:
        return f"{said}; nothing was held out to check it."
    again = "and does so again" if held[0].p <= 0.05 else "but not so" if one.p <= 0.05 else "nor does it"
    return f"{said} {again} on held-out windows (p = {held[0].p:.3g}, information gain {held[0].gain:.2f} bits)."


def _facts(found: MinedShapelets, check: LabelledWindows | None, windows: Windows, score: str, normalise: str, seed: int) -> dict[str, str]:
    def told(part: LabelledWindows) -> str:
        counts = np.bincount(part.labels, minlength=windows.classes)
        of_class = ", ".join(f"{name} {count}" for name, count in zip(windows.class_names, counts, strict=True))
        return f"{len(part.rows)} windows of {len(set(part.subjects.tolist()))} subjects, {part.split} split ({of_class})"

    return {
        "Data": f"{windows.name} ({windows.channels} channels, {windows.length} samples at {windows.rate:g} Hz)",
        "Split": f"by {windows.split}",
        "Mined": told(found.drawn),
        "Checked": "no held-out windows" if check is None else told(check),
        "Candidates": f"{found.candidates:,}",
        "Score": f"{score}, {'standardised stretches' if normalise == 'z' else 'stretches as they are'}",
        "Permutations": f"{len(found.null)}, of {_describe_permutation(found.drawn)}",
        "Seed": str(seed),
    }


def _describe_permutation(part: LabelledWindows) -> str:
    return "labels within each subject" if subject_classes(part.labels, part.subjects) is None else "the classes of subjects"


def _summary(
    found: MinedShapelets,
    held: list[HeldOutScore] | None,
    check: LabelledWindows | None,
    windows: Windows,
    score: str,
    normalise: str,
    seed: int,
) -> dict[str, Any]:
    options = {"score": score, "normalise": normalise, "seed": seed, "candidates": found.candidates, "permutations": len(found.null)}
    options |= {"data": windows.name, "fingerprint": windows.fingerprint, "windows": len(found.drawn.rows)}
    null = {f"{q:g}": float(np.quantile(found.null, q)) for q in (0.5, 0.95, 0.99)} if len(found.null) else {}
    return {
        "shapelets": [{**one._asdict(), "values": one.values.tolist()} for one in found.shapelets],
        "held_out": None
        if held is None or check is None
        else {
            "split": check.split,
            "windows": len(check.rows),
            "subjects": len(set(check.subjects.tolist())),
            "shapelets": [{"f": one.f, "gain": one.gain, "p": one.p} for one in held],
        },
        "best_by_chance": null,
        "options": options,
    }
