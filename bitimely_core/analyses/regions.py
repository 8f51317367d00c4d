"""Do the maps of a model lie on the shapelets? Held-out windows in which one is present, and the share of a map that falls inside of it.

A map gives every sample of a window a share, sum 1: saliency, or attention. Its ratio is (share inside the shapelet) / (share of the
length inside); 1 is no preference. It stands beside the same ratio of random weights, of shapelets at random places of the same windows,
and of the plain size of the signal. One set of random weights can have a preference of its own, so several are drawn.

Legend: S windows, T samples, N tokens, R sets of random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import evaluate
from bitimely_core.analyses.shapelets import Shapelet, compute_distances, mine_shapelets, parse_seconds, read_shapelets
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.page import Figure
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POOL = 10  # held-out windows that are looked through, per window that is kept
PRESENT_SHARE = 0.1  # share of them, the closest, in which a shapelet counts as present
RANDOM_PLACES = 1000  # draws of random places
RANDOM_MODELS = 3  # sets of random weights


# --- windows ------------------------------------------------------------------------------------------------------------------------------


def draw_held_out(windows: Windows, count: int, seed: int) -> tuple[npt.NDArray[np.int64], str]:
    """Positions in the index of up to `count` windows of the first split of test, validation, train that has any, and which one it is.

    They are drawn without replacement, so that runs on the same windows see the same ones.

    Raises:
        UserError: no_input, where there are no windows at all.
    """
    for split in ("test", "validation", "train"):
        rows = windows[split].rows
        if len(rows):
            return np.sort(np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False)), split
    raise input_error(Reason.NO_INPUT, f"{windows.name} has no windows", hint="Tokenize it again with a shorter --window")


def load_shapelets(
    windows: Windows, folder: str, lengths: str, seed: int, progress: Progress | None
) -> tuple[list[Shapelet], Ints, float | None]:
    """The shapelets of a report of `analyze shapelets`, or mined here from the training split where `folder` is empty.

    Returns:
        The shapelets, the rows that they were mined from, and the p of the best one (None: from a report).

    Raises:
        UserError: config (exit 2): windows without classes and no folder, a folder without shapelets; no_input as `mine`.
    """
    if folder:
        found = read_shapelets(folder)
        return found, np.array([one.window for one in found], np.int64), None
    if windows.task != "classification":
        raise usage_error(
            f"{windows.name} has no classes",
            "shapelets tell classes apart",
            "Give --data a view with classes, or --shapelets a report of analyze shapelets",
            field="--data",
        )
    mined = mine_shapelets(windows, lengths=parse_seconds(lengths), permutations=99, seed=seed, progress=progress)
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
    looked: int  # windows that were looked through


def find_shapelet_windows(windows: Windows, found: Sequence[Shapelet], count: int, seed: int, but: npt.NDArray[Any]) -> ShapeletWindows:
    """Up to `count` held-out windows among the tenth that is closest to some shapelet: elsewhere the closest stretch is an arbitrary place.

    Distances are those of standardised stretches, whatever the shapelets were mined with.

    Args:
        windows: all splits.
        found: the shapelets.
        count: windows to keep; drawn where more have one.
        seed: of what is drawn.
        but: rows that the shapelets were mined from.

    Raises:
        UserError: no_input, where nothing is held out; config (exit 2), where no shapelet is of a channel and rate of these windows.
    """
    names = list(windows.channel_names)
    fitting = [k for k, one in enumerate(found) if one.channel in names and one.rate == windows.rate and len(one.values) <= windows.length]
    if not fitting:
        raise usage_error(
            f"no shapelet is of a channel of {windows.name} at {windows.rate:g} Hz", f"known are {', '.join(names)}", field="--shapelets"
        )
    pool, split = draw_held_out(windows, POOL * count, seed)
    pool = pool[~np.isin(pool, but)]
    parts: dict[str, Any] = windows.arrays(pool)
    if parts.get("mask") is not None:
        whole = parts["mask"].reshape(len(pool), -1).all(1)
        pool, parts = pool[whole], {"values": parts["values"][whole]}
    if not len(pool):
        raise input_error(Reason.NO_INPUT, f"{windows.name} has no windows that the shapelets were not mined from")
    values = torch.from_numpy(np.ascontiguousarray(parts["values"]))
    rank, places, apart = (np.full((len(found), len(pool)), fill) for fill in (np.inf, -1.0, np.inf))
    for k in fitting:
        one = found[k]
        d, at = compute_distances(values[..., names.index(one.channel)].double(), torch.from_numpy(one.values)[None])
        rank[k, np.argsort(d[0].numpy(), kind="stable")] = np.arange(len(pool))
        places[k], apart[k] = at[0].numpy(), d[0].numpy() / len(one.values)
    which = rank.argmin(0)
    here = np.flatnonzero(rank.min(0) < max(1, round(PRESENT_SHARE * len(pool))))
    here = np.sort(np.random.default_rng([seed, 4]).permutation(here)[:count])
    which = which[here]
    lengths = np.array([len(found[k].values) for k in which], np.int64)
    whose = dict(zip(windows.rows.tolist(), windows.subjects().tolist(), strict=True))
    subjects = np.array([whose[row] for row in pool[here].tolist()])
    return ShapeletWindows(pool[here], which, places[which, here].astype(np.int64), lengths, apart[which, here], subjects, split, len(pool))


# --- maps ---------------------------------------------------------------------------------------------------------------------------------


def normalise_rows(maps: Array) -> Array:
    """Rows to sum 1; NaN where all is 0."""
    total = maps.sum(1, keepdims=True)
    return np.divide(maps, total, out=np.full_like(maps, np.nan), where=total > 0)


def spread_over_samples(share: Array, samples: int, config: Any) -> Array:
    """Shares of tokens spread over the samples that they stand for, [T], sum kept: a patch its own samples, a convolution 4 each."""
    step = {"conv": 4, "steps": 1}.get(config.tokenizer, config.stride or config.patch)
    first = samples % config.patch if config.tokenizer == "patch" and config.crop == "start" else 0
    token = (np.arange(samples) - first) // step
    inside = (token >= 0) & (token < len(share))
    counts = np.bincount(token[inside], minlength=len(share))
    out = np.zeros(samples)
    out[inside] = share[token[inside]] / counts[token[inside]]
    return out


def signal_magnitudes(values: Array, windows: Windows, found: Sequence[Shapelet], chosen: ShapeletWindows) -> Array:
    """Share of the signal's own size |x - mean| at each sample of the shapelet's channel, [S, T]."""
    names = list(windows.channel_names)
    channel = np.array([names.index(found[k].channel) for k in chosen.which])
    x = values[np.arange(len(values)), :, channel]
    return normalise_rows(np.abs(x - x.mean(1, keepdims=True)))


def share_ratios(maps: Array, start: Ints, length: Ints) -> Array:
    """(share of the saliency inside) / (share of the length inside) of each window, [S], from maps [S, T] that sum to 1."""
    sums = np.concatenate([np.zeros((len(maps), 1)), np.cumsum(maps, 1)], 1)
    at = np.arange(len(maps))
    return np.asarray((sums[at, start + length] - sums[at, start]) * maps.shape[1] / length)


def _inside_over_outside(ratio: Array, length: Ints, samples: int) -> Array:
    """Mean saliency inside over that outside, from the ratio to the length's share; inf where nothing is outside."""
    part = length / samples
    rest = 1 - ratio * part
    return np.asarray(np.divide(ratio * (1 - part), rest, out=np.full_like(ratio, np.nan), where=rest > 1e-12))


def random_placement(maps: Array, length: Ints, draws: int, seed: int) -> Array:
    """Mean ratio over the windows when each shapelet stands at a random place of its window, [draws]: the control."""
    rng = np.random.default_rng([seed, 5])
    known = np.isfinite(maps).all(1)
    maps, length = maps[known], length[known]
    if not len(maps):
        return np.empty(0)
    return np.array([share_ratios(maps, rng.integers(0, maps.shape[1] - length + 1), length).mean() for _ in range(draws)])


def mean_over_subjects(values: Array, subjects: npt.NDArray[Any], bootstrap: int, seed: int) -> dict[str, Any]:
    """Mean over the windows [S] with its bootstrap over subjects; without an interval, why. NaN values are left out."""
    known = np.isfinite(values)
    out: dict[str, Any] = {"value": None, "se": None, "lo": None, "hi": None, "n": int(known.sum()), "n_subjects": 0}
    if not known.any():
        return {**out, "undefined_reason": "no window has a gradient"}
    names, whose = np.unique(subjects[known], return_inverse=True)
    n = len(names)
    out |= {"value": float(values[known].mean()), "n_subjects": n, "undefined_reason": None}
    if n < evaluate.MINIMUM_UNITS or bootstrap < 2:
        few = f"{n} subject{'s' * (n != 1)}, an interval needs at least {evaluate.MINIMUM_UNITS}"
        return {**out, "undefined_reason": f"no interval: {few if bootstrap > 1 else 'no bootstrap was asked for'}"}
    counts = evaluate.draw_counts(range(bootstrap), n, seed)
    sums, sizes = (np.bincount(whose, weights, n) for weights in (values[known], np.ones(known.sum())))
    means = (counts @ sums) / (counts @ sizes)
    lo, hi = np.percentile(means, [2.5, 97.5])
    return {**out, "se": float(means.std(ddof=1)), "lo": float(lo), "hi": float(hi)}


def rank_agreement(a: Array, b: Array) -> float | None:
    """Mean rank correlation of two sets of maps [S, T], window by window; None where none is defined."""
    found = []
    for x, y in zip(a, b, strict=True):
        if np.isfinite(x).all() and np.isfinite(y).all():
            x, y = _rank_values(x), _rank_values(y)
            if x.std() > 0 and y.std() > 0:
                found.append(np.corrcoef(x, y)[0, 1])
    return float(np.mean(found)) if found else None


def _rank_values(x: Array) -> Array:
    """Ranks, equal values share their mean."""
    _, whose, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[whose], np.float64)


def nan_mean(each: Sequence[Array]) -> Array:
    """Mean of arrays of one shape, without what is NaN; NaN where all are."""
    values = np.stack(each)
    known = np.isfinite(values)
    count = known.sum(0)
    return np.asarray(np.divide(np.where(known, values, 0.0).sum(0), count, out=np.full(count.shape, np.nan), where=count > 0))


def compare_with_controls(maps: Array, controls: Sequence[Array], chosen: ShapeletWindows, bootstrap: int, seed: int) -> dict[str, Any]:
    """What maps [S, T] of the chosen windows and those of several random weights, R times [S, T], say about the shapelets in them."""
    values = share_ratios(maps, chosen.start, chosen.length)
    each = [share_ratios(control, chosen.start, chosen.length) for control in controls]
    untrained = nan_mean(each)
    agreeing = [found for control in controls if (found := rank_agreement(maps, control)) is not None]
    places = random_placement(maps, chosen.length, RANDOM_PLACES, seed)
    mean = mean_over_subjects(values, chosen.subjects, bootstrap, seed)
    reached = places >= mean["value"] - 1e-12 if mean["value"] is not None else np.array([])
    return {
        "ratio": mean,
        "inside_over_outside": mean_over_subjects(
            _inside_over_outside(values, chosen.length, maps.shape[1]), chosen.subjects, bootstrap, seed
        ),
        "random_weights": mean_over_subjects(untrained, chosen.subjects, bootstrap, seed),
        "random_draws": [mean_over_subjects(one, chosen.subjects, 0, seed)["value"] for one in each],
        "beyond_random_weights": mean_over_subjects(values - untrained, chosen.subjects, bootstrap, seed),
        "random_places": {"lo": float(np.quantile(places, 0.025)), "hi": float(np.quantile(places, 0.975))} if len(places) else None,
        "p_places": float(1 + reached.sum()) / (1 + len(places)) if len(places) else None,
        "correlation_with_random_weights": float(np.mean(agreeing)) if agreeing else None,
    }


def compare_with_first(
    ratio: Mapping[str, Array], chosen: ShapeletWindows, bootstrap: int, seed: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The first of some runs less each other one, window by window: their names and the mean difference of ratios [S]."""
    first, *others = ratio
    for other in others:
        yield first, other, mean_over_subjects(ratio[first] - ratio[other], chosen.subjects, bootstrap, seed)


def make_headline(found: Mapping[str, dict[str, Any]], size: dict[str, Any], *, title: str, caption: str, ylabel: str) -> Figure:
    """Bars of what was `measured` of each run, beside random weights, the size of the signal and random places."""
    bars = [(name, one["ratio"]) for name, one in found.items()]
    bars += [(f"{name}, random weights", one["random_weights"]) for name, one in found.items()]
    bars.append(("size of the signal", size))
    places = next(iter(found.values()))["random_places"]
    if places is not None:
        bars.append(("random places", {"value": 1.0, **places}))
    data: dict[str, Any] = {"names": [name for name, _ in bars], "values": [one["value"] for _, one in bars], "ylabel": ylabel}
    data |= {end: [one[end] for _, one in bars] for end in ("lo", "hi")}
    return Figure(name="main-score", title=title, caption=caption, kind="bars", data=data)


def describe_ratio(found: dict[str, Any]) -> str:
    """How the ratio compares with random places and random weights, in words: beyond all of them, and by an interval without 0."""
    gap, ratio = found["beyond_random_weights"], found["ratio"]["value"]
    draws = [value for value in found["random_draws"] if value is not None]
    places = "more than" if found["p_places"] <= 0.05 else "no more than"
    if gap["lo"] is None:
        trained = "against"
    elif gap["lo"] > 0 and ratio > max(draws):
        trained = "more than"
    elif gap["hi"] < 0 and ratio < min(draws):
        trained = "less than"
    else:
        trained = "not to be told from that"
    return f"{places} at random places, {trained} with random weights ({', '.join(f'{value:.2f}' for value in draws)})"


def describe_interval(mean: dict[str, Any]) -> str:
    """The interval of a mean in words, or why there is none."""
    if mean["lo"] is None:
        return str(mean["undefined_reason"])
    return f"95 % {mean['lo']:.2f} to {mean['hi']:.2f} over {mean['n_subjects']} subjects"
