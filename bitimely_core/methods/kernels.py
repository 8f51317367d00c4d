"""MiniRocket (Dempster et al. 2021): ridge regression on thousands of dilated convolution kernels.

A kernel has nine taps, three of weight 2 and six of weight -1: 84 patterns. It is dilated by one
of up to 32 steps, the longest of which spans the window, and read at thresholds that are quantiles
of its response to training windows. Its feature is the share of samples above the threshold.

Two things differ from the paper. Of several channels, the patterns of a dilation share seven random
subsets in place of one each. The features are standardised before the ridge regression.

Legend: n windows, T samples, V channels, G groups, P patterns of a group, D features, K classes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from bitimely_core.methods.linear import (
    DEFAULT_PENALTY,
    MIN_PROBABILITY,
    PENALTIES,
    LinearModel,
    measure_moments,
    share_out,
)
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import MethodFacts, methods

TAPS = 9
PATTERNS = np.array(list(itertools.combinations(range(TAPS), 3)))  # [84, 3], places of weight 2
SUBSETS = 7  # random subsets of channels of a dilation
MOST_DILATIONS = 32
GOLDEN = (np.sqrt(5) + 1) / 2  # its multiples modulo 1 are spread evenly: the quantiles
BLOCK_SAMPLES = 48_000  # of the windows that are convolved at a time, to fit the processor's cache
ROWS = 1024  # of features that are multiplied at a time
IN_MEMORY = 1 << 30  # bytes of features; larger ones are in a temporary file


class KernelsConfig(MethodConfig):
    """Settings of kernels."""

    kernels: int = Field(
        5040,
        ge=len(PATTERNS),
        le=100_000,
        description="Kernels with their thresholds; rounded down to a multiple of 84.",
    )


class KernelGroup(NamedTuple):
    """Kernels of one dilation and subset of channels."""

    dilation: int
    channels: Array  # summed
    patterns: Array  # [P] rows of `PATTERNS`
    biases: Array  # [P, thresholds of a pattern] float32
    parity: int  # patterns whose number plus this is odd are not padded


def draw_groups(length: int, channels: int, kernels: int, seed: int) -> list[KernelGroup]:
    """Groups for windows [T, V], with zeros for biases."""
    draw = np.random.default_rng([seed, length, channels])
    thresholds = kernels // len(PATTERNS)
    steps = min(thresholds, MOST_DILATIONS)
    widest = max(np.log2(max(length - 1, 1) / (TAPS - 1)), 0.0)
    exponents = np.logspace(0, widest, steps, base=2).astype(np.int64)
    dilations, counts = np.unique(exponents, return_counts=True)
    shares = counts * thresholds // steps
    # the first dilations get what is left
    shares[: thresholds - shares.sum()] += 1
    parts = np.array_split(np.arange(len(PATTERNS)), 1 if channels == 1 else SUBSETS)
    groups = []
    for parity, (dilation, share) in enumerate(zip(dilations, shares, strict=True)):
        for patterns in parts:
            size = int(2 ** draw.uniform(0, np.log2(min(channels, TAPS) + 1)))
            subset = np.sort(draw.choice(channels, size, replace=False))
            biases = np.zeros((len(patterns), share), np.float32)
            groups.append(KernelGroup(int(dilation), subset, patterns, biases, parity))
    return groups


def convolve(x: Array, group: KernelGroup) -> Iterator[Array]:
    """The responses [n, T'] of windows [n, T, V] to each pattern of a group, one after the other in
    the same memory; T' = T where they are padded with zeros.
    """
    half = (TAPS - 1) // 2 * group.dilation
    length = x.shape[1]
    s = np.pad(x[:, :, group.channels].sum(2), ((0, 0), (half, half)))
    places = [slice(k * group.dilation, k * group.dilation + length) for k in range(TAPS)]
    base = -s[:, places[0]]
    for place in places[1:]:
        base -= s[:, place]
    s *= 3
    tripled = [s[:, place] for place in places]
    pair, before = np.empty_like(base), (-1, -1)
    response = np.empty_like(base)
    for number, (a, b, c) in zip(group.patterns, PATTERNS[group.patterns].tolist(), strict=True):
        if (a, b) != before:
            np.add(tripled[a], tripled[b], out=pair)
            pair += base
            before = (a, b)
        np.add(pair, tripled[c], out=response)
        is_padded = (number + group.parity) % 2 == 0 or length <= 2 * half
        yield response if is_padded else response[:, half:-half]


def choose_biases(x: Array, groups: list[KernelGroup], seed: int) -> None:
    """Set the biases to quantiles of the responses, each pattern of a dilation to a random one of
    the windows [n, T, V].
    """
    draw = np.random.default_rng([seed, len(x)])
    multiples = itertools.count(1)
    for group in groups:
        for row, window in enumerate(draw.integers(len(x), size=len(group.patterns))):
            shares = [next(multiples) * GOLDEN % 1 for _ in range(group.biases.shape[1])]
            single = group._replace(patterns=group.patterns[row : row + 1])
            (response,) = convolve(x[window][None], single)
            group.biases[row] = np.quantile(response[0], shares)


def compute_features(x: Array, groups: list[KernelGroup]) -> Array:
    """The share of samples above each bias, of windows [n, T, V]: [n, D] float32."""
    features = np.empty((len(x), sum(group.biases.size for group in groups)), np.float32)
    size = max(1, BLOCK_SAMPLES // x.shape[1])
    for start in range(0, len(x), size):
        block, column = x[start : start + size], 0
        for group in groups:
            for response, biases in zip(convolve(block, group), group.biases, strict=True):
                above, samples = np.empty(response.shape, bool), response.shape[1]
                for bias in biases:
                    np.greater(response, bias, out=above)
                    # sums of bytes count fastest
                    counts = above.view(np.uint8).sum(1, dtype=np.min_scalar_type(samples))
                    features[start : start + size, column] = counts / samples
                    column += 1
    return features


def read_features(rows: MethodRows, groups: list[KernelGroup], inputs: MethodFit) -> Array:
    """The features of all rows, [n, D] float32, in a temporary file where they are large."""
    shape = len(rows), sum(group.biases.size for group in groups)
    features: Array
    if shape[0] * shape[1] * 4 > IN_MEMORY:
        with tempfile.TemporaryFile() as file:  # the array keeps it open
            features = np.memmap(file, np.float32, "w+", shape=shape)
    else:
        features = np.empty(shape, np.float32)
    done = 0
    for block in rows.read_blocks():
        features[done : done + len(block)] = compute_features(block, groups)
        done += len(block)
        inputs.report("kernels", done, shape[0])
    return features


def fit_ridge(
    task: str, x: Mapping[str, Array], y: Mapping[str, Array], classes: int
) -> LinearModel:
    """Ridge regression on standardised features, the penalty with the least squared error on
    validation; classes are regressed as indicators, which sum to one.

    `x`: train and validation -> features [n, D]; `y`: class ids [n], labels [n, K] (NaN: not known)
    or values [n].
    """
    if task == "classification":
        targets = {split: np.eye(classes)[ids.astype(np.int64)] for split, ids in y.items()}
    else:
        targets = {split: v.astype(np.float64).reshape(len(v), -1) for split, v in y.items()}
    mean, scale = measure_moments(x["train"])
    width = targets["train"].shape[1]
    weights, bias = np.zeros((x["train"].shape[1], width)), np.zeros(width)
    # labels that are known of the same rows are fitted together
    observed: dict[str, Array] = {split: np.isfinite(v) for split, v in targets.items()}
    patterns, group = np.unique(observed["train"], axis=1, return_inverse=True)
    for number in range(patterns.shape[1]):
        columns = np.flatnonzero(group.ravel() == number)
        pairs = {
            split: (
                x[split],
                targets[split][:, columns],
                np.all(observed[split][:, columns], axis=1),
            )
            for split in x
        }
        weights[:, columns], bias[columns] = _fit_columns(
            pairs, mean, scale, together=task != "multilabel"
        )
    return LinearModel(mean, scale, weights, bias)


def _fit_columns(
    pairs: Mapping[str, tuple[Array, Array, Array]], mean: Array, scale: Array, *, together: bool
) -> tuple[Array, Array]:
    """Weights [D, K] and bias [K] of targets with the same known rows; `pairs`: split -> features
    [n, D], targets [n, K] and which rows are known; `together`: with one penalty.
    """
    x, y, rows = pairs["train"]
    places = np.flatnonzero(rows)
    if not len(places):
        return np.zeros((x.shape[1], y.shape[1])), np.full(y.shape[1], 0.5)

    def read(features: Array, positions: Array) -> Iterator[tuple[Array, Array]]:
        """Blocks of positions and of standardised features."""
        for start in range(0, len(positions), ROWS):
            part = positions[start : start + ROWS]
            yield part, (features[part] - mean) / scale

    bias = y[places].mean(0)
    centre = np.zeros(x.shape[1])
    for _, z in read(x, places):
        centre += z.sum(0) / len(places)
    held_out, truth, rows = pairs["validation"]
    penalties = PENALTIES if rows.any() else (DEFAULT_PENALTY,)
    blocks = ((z - centre, y[part] - bias) for part, z in read(x, places))
    if len(places) < x.shape[1]:
        solutions = _solve_few(blocks, penalties)
    else:
        solutions = _solve_many(blocks, x.shape[1], penalties)
    losses = np.zeros((len(penalties), y.shape[1]))
    for part, z in read(held_out, np.flatnonzero(rows)):
        for k, solution in enumerate(solutions):
            losses[k] += np.square((z - centre) @ solution + bias - truth[part]).sum(0)
    best = np.broadcast_to(losses.sum(1).argmin(), y.shape[1:]) if together else losses.argmin(0)
    weights = np.stack([solutions[k][:, column] for column, k in enumerate(best)], 1)
    return weights, bias - centre @ weights


def _solve_many(
    blocks: Iterator[tuple[Array, Array]], width: int, penalties: Sequence[float]
) -> list[Array]:
    """The weights [D, K] of each penalty from the products of D features."""
    gram, cross = np.zeros((width, width)), np.zeros((width, 1))
    for z, y in blocks:
        gram += z.T @ z
        cross = cross + z.T @ y
    return [_solve(gram, cross, penalty) for penalty in penalties]


def _solve_few(blocks: Iterator[tuple[Array, Array]], penalties: Sequence[float]) -> list[Array]:
    """As `_solve_many` from the products of n rows, for fewer rows than features."""
    z, y = map(np.concatenate, zip(*blocks, strict=True))
    gram = z @ z.T
    return [z.T @ _solve(gram, y, penalty) for penalty in penalties]


def _solve(gram: Array, cross: Array, penalty: float) -> Array:
    """(gram + penalty I)^-1 cross."""
    from scipy.linalg import solve

    regular = gram.copy()
    regular.flat[:: len(gram) + 1] += penalty
    return np.asarray(solve(regular, cross, assume_a="pos", overwrite_a=True))


def predict_shares(task: str, model: LinearModel, x: Array) -> Array:
    """Probabilities [n, K] of rows [n, D] by ridge regression, or values [n]."""
    values = model.compute(x)
    if task == "regression":
        return values[:, 0]
    if task == "multilabel":
        return np.clip(values, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return share_out(values)


def pack_groups(groups: list[KernelGroup], channels: int) -> Arrays:
    """The groups as arrays."""
    summed = np.zeros((len(groups), channels), np.uint8)
    for row, group in zip(summed, groups, strict=True):
        row[group.channels] = 1
    return {
        "dilations": np.array([group.dilation for group in groups], np.int64),
        "channels": summed,
        "first_pattern": np.array([group.patterns[0] for group in groups], np.int64),
        "patterns": np.array([len(group.patterns) for group in groups], np.int64),
        "thresholds": np.array([group.biases.shape[1] for group in groups], np.int64),
        "parity": np.array([group.parity for group in groups], np.int64),
        "biases": np.concatenate([group.biases.ravel() for group in groups]),
    }


def unpack_groups(arrays: Arrays) -> list[KernelGroup]:
    """The groups of `pack_groups`."""
    names = ("dilations", "first_pattern", "patterns", "thresholds", "parity")
    table = np.stack([arrays[name] for name in names], 1).tolist()
    groups, start = [], 0
    for row, summed in zip(table, arrays["channels"], strict=True):
        dilation, first, count, thresholds, parity = row
        biases = arrays["biases"][start : start + count * thresholds].reshape(count, thresholds)
        start += biases.size
        patterns = np.arange(first, first + count)
        groups.append(KernelGroup(dilation, np.flatnonzero(summed), patterns, biases, parity))
    return groups


def score(fitted: FittedMethod, rows: MethodRows) -> Array:
    """Predictions of rows by the ridge regression."""
    groups = unpack_groups(fitted.arrays)
    model = LinearModel(*(fitted.arrays[name] for name in LinearModel._fields))
    parts = [
        predict_shares(fitted.task, model, compute_features(block, groups))
        for block in rows.read_blocks()
    ]
    return np.concatenate(parts)


@methods(
    MethodFacts(
        config=KernelsConfig,
        input=("signals",),
        tasks=("classification", "multilabel", "regression"),
        score=score,
        source="Dempster et al. 2021, MiniRocket: A Very Fast (Almost) Deterministic Transform for "
        "Time Series Classification",
    )
)
def kernels(config: KernelsConfig, inputs: MethodFit) -> Arrays:
    """MiniRocket: ridge regression on shares of samples above thresholds of dilated convolution
    kernels.
    """
    windows = inputs.train.windows
    groups = draw_groups(windows.length, windows.channels, config.kernels, inputs.seed)
    draw = np.random.default_rng(inputs.seed)
    rows = np.sort(draw.choice(windows.rows, min(256, len(windows)), replace=False))
    choose_biases(windows.values(rows), groups, inputs.seed)
    x = inputs.map_splits(lambda rows: read_features(rows, groups, inputs))
    model = fit_ridge(windows.task, x, inputs.labels(), max(windows.classes, 1))
    return {**pack_groups(groups, windows.channels), **model._asdict()}
