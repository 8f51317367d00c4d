"""Baselines without pre-training: linear models on simple features and on random convolution kernels.

Both are fitted on the training windows of the fine-tuned run with the penalty chosen on the validation split, and predict the split that the
run was scored on, whose labels are not read. Kernels follow ROCKET (Dempster et al. 2020) with the weights of
MiniRocket (Dempster et al. 2021): nine taps of -1, three of them 2, dilated; features are the maximum and the share of values above a bias.

Legend: n windows, T samples, V channels, K kernels, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, storage
from bitimely_core.evaluate.linear import DEFAULT_PENALTY, MIN_PROBABILITY, PENALTIES, extract_simple_features, fit_probe, standardise
from bitimely_core.records import has_result, read_result, read_result_table, write_results
from bitimely_core.schemas import RunRecord, Scores, TaskScores
from bitimely_core.types import Progress

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

CACHE_VERSION = 2  # of stored predictions: raise it where they change
GROUPS, PATTERNS, TAPS = 40, 8, 9  # kernels share dilation and channels in groups
BLOCK = 16  # windows at a time, to fit the processor's cache
DESCRIPTIONS = {
    "features": "logistic regression (numbers: ridge) on simple features: of each channel mean, logarithm of the standard deviation and of the power "
    "in 16 bands; of events logarithms of counts of codes",
    "kernels": f"ridge on {GROUPS * PATTERNS} random dilated convolution kernels, maximum and share of positive values of each",
}
TITLES = {"features": "simple features", "kernels": "random kernels"}


class KernelGroup(NamedTuple):
    """Kernels that differ only in the three taps of weight 2."""

    dilation: int
    channels: Array  # summed
    taps: Array  # [PATTERNS, 3]
    padded: bool


def draw_kernels(length: int, channels: int, seed: int) -> list[KernelGroup]:
    """Random kernels for windows [T, V]; the longest spans the window."""
    draw = np.random.default_rng([seed, length, channels])
    widest = np.log2(max((length - 1) / (TAPS - 1), 1.0))
    out = []
    for k in range(GROUPS):
        size = int(2 ** draw.uniform(0, np.log2(min(channels, TAPS) + 1)))
        taps = np.stack([np.sort(draw.choice(TAPS, 3, replace=False)) for _ in range(PATTERNS)])
        out.append(KernelGroup(int(2 ** draw.uniform(0, widest)), np.sort(draw.choice(channels, size, replace=False)), taps, k % 2 == 0))
    return out


def convolve(x: Array, group: KernelGroup) -> Array:
    """The responses [PATTERNS, n, T'] of windows [n, T, V] to the kernels of a group; T' = T where they are padded with zeros."""
    reach = (TAPS - 1) * group.dilation
    s = x[:, :, group.channels].sum(2)
    padded = group.padded or s.shape[1] <= reach
    s = np.pad(s, ((0, 0), (reach // 2, reach // 2))) if padded else s
    width = s.shape[1] - reach
    shifted = [s[:, k * group.dilation : k * group.dilation + width] for k in range(TAPS)]
    total = -np.sum(shifted, axis=0)
    return np.stack([total + 3 * (shifted[a] + shifted[b] + shifted[c]) for a, b, c in group.taps.tolist()])


def choose_biases(x: Array, groups: Sequence[KernelGroup], seed: int) -> Array:
    """A bias a kernel, [K]: a random quantile of its response to a random one of the windows [n, T, V]."""
    draw = np.random.default_rng([seed, len(x)])
    out = []
    for group in groups:
        responses = convolve(x[draw.integers(len(x))][None], group)[:, 0]
        out += [float(np.quantile(r, q)) for r, q in zip(responses, draw.uniform(size=len(responses)), strict=True)]
    return np.array(out, np.float32)


def kernel_features(x: Array, groups: Sequence[KernelGroup], bias: Array) -> Array:
    """Maximum and share above the bias of every kernel, [n, 2 K] float32."""
    out = np.empty((len(x), 2, len(bias)), np.float32)
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK]
        for k, group in enumerate(groups):
            at = slice(k * PATTERNS, (k + 1) * PATTERNS)
            responses = convolve(part, group)
            out[start : start + BLOCK, 0, at] = responses.max(2).T
            out[start : start + BLOCK, 1, at] = (responses > bias[at, None, None]).mean(2).T
    return out.reshape(len(x), -1)


def fit_ridge(task: str, x: dict[str, Array], y: dict[str, Array], classes: int) -> Array:
    """Ridge regression on standardised features, the penalty with the least squared error on the validation split.

    Classes are regressed as indicators, whose predictions sum to one; they and labels are clipped to a probability. `x`: split ->
    features [n, D]; `y`: train, validation -> class ids [n], labels [n, C] (NaN: not known) or values [n]. Returns [n, C] probabilities
    or [n] values of the rows of test.
    """
    from sklearn.linear_model import Ridge

    train, held, new = standardise(x["train"], x["validation"], x["test"])
    target = {
        k: np.eye(classes)[v.astype(np.int64)] if task == "classification" else v.astype(np.float64).reshape(len(v), -1)
        for k, v in y.items()
    }

    def fit(k: Array, of: slice) -> Array:
        """Predictions of the targets `of`, fitted on the training rows `k`."""
        found: tuple[float, Array] | None = None
        known = np.isfinite(target["validation"][:, of]).all(1)
        for penalty in PENALTIES if known.any() else (DEFAULT_PENALTY,):
            model = Ridge(alpha=penalty).fit(train[k], target["train"][k, of])
            loss = (
                float(np.square(model.predict(held[known]).reshape(int(known.sum()), -1) - target["validation"][known, of]).mean())
                if known.any()
                else 0.0
            )
            if found is None or loss < found[0]:
                found = loss, np.asarray(model.predict(new)).reshape(len(new), -1)
        assert found is not None
        return found[1]

    if task == "multilabel":
        known = [np.isfinite(target["train"][:, k]) for k in range(classes)]
        out = np.hstack([fit(rows, slice(k, k + 1)) for k, rows in enumerate(known)])
        return np.clip(out, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    out = fit(np.ones(len(train), bool), slice(None))
    if task == "regression":
        return out[:, 0]
    out = np.clip(out, MIN_PROBABILITY, None)
    return np.asarray(out / out.sum(1, keepdims=True))


def _predict_from_features(windows: Any, parts: dict[str, Windows], y: dict[str, Array], seed: int, progress: Progress | None) -> Array:
    x = {name: extract_simple_features(part, part.rows) for name, part in parts.items()}
    width = x["train"].shape[1]
    x = {name: v.reshape(len(v), width) if len(v) else np.zeros((0, width), np.float32) for name, v in x.items()}
    return fit_probe(windows.task, x, y, max(windows.classes, 1)).prediction


def _predict_from_kernels(windows: Any, parts: dict[str, Windows], y: dict[str, Array], seed: int, progress: Progress | None) -> Array:
    groups = draw_kernels(windows.length, windows.channels, seed)
    draw = np.random.default_rng(seed)
    sample = np.sort(draw.choice(parts["train"].rows, min(64, len(parts["train"])), replace=False))
    bias = choose_biases(parts["train"].values(sample), groups, seed)
    x, done, total = {}, 0, sum(map(len, parts.values()))
    for name, part in parts.items():
        found = []
        for start in range(0, len(part), 256):
            found.append(kernel_features(part.values(part.rows[start : start + 256]), groups, bias))
            done += len(found[-1])
            if progress is not None:
                progress(f"random kernels {windows.name}", done, total)
        x[name] = np.concatenate(found) if found else np.zeros((0, 2 * len(bias)), np.float32)
    return fit_ridge(windows.task, x, y, max(windows.classes, 1))


PREDICTORS: dict[str, Callable[[Any, dict[str, Windows], dict[str, Array], int, Progress | None], Array]] = {
    "features": _predict_from_features,
    "kernels": _predict_from_kernels,
}


def fit_baseline(
    kind: str, record: RunRecord, scores: Scores, *, keep: Path, open_windows: OpenWindows, progress: Progress | None = None
) -> tuple[TaskScores, pl.DataFrame] | str:
    """One baseline (a key of `DESCRIPTIONS`) on the data of a fine-tuned run: its scores and a frame as `predictions.parquet`, or why there
    are none.

    Training windows (data, limit, share of the subjects, seed) are those of `record`; split, unit of resampling and replicates those of
    `scores`. Results are stored in `keep`. Raises UserError: those of opening the tokens.
    """
    import polars as pl

    from bitimely_core import data

    chosen, options = record.settings.data, scores.settings
    windows: Any = open_windows(scores.data)
    if windows.fingerprint != record.data[0].fingerprint:
        return "the windows of the run no longer exist"
    if kind == "kernels" and windows.vocabulary:
        return "events have no samples to convolve"
    seed = record.seed
    inputs = {"kind": kind, "version": CACHE_VERSION, "data": windows.fingerprint, "fraction": chosen.fraction}
    inputs |= {"limit": chosen.limit, "seed": seed, "split": scores.split, "bootstrap": options.bootstrap, "by": options.by}
    stem = keep / f"{kind}-{storage.fingerprint(inputs)[:24]}"
    stored, table = stem.with_suffix(".json"), stem.with_suffix(".parquet")
    test = windows[scores.split]
    target = np.asarray(test.targets(None)) if len(test) else np.zeros(0)
    if not (has_result(stored) and has_result(table)):
        training = data.sample_subjects(data.limit_windows(windows, chosen.limit, seed)["train"], chosen.fraction, seed)
        if not len(training) or not len(test):
            return "a split holds no windows"
        parts = {"train": training, "validation": data.limit_windows(windows, chosen.limit, seed)["validation"], "test": test}
        y = {name: np.asarray(parts[name].targets(None)) for name in ("train", "validation")}
        prediction = PREDICTORS[kind](windows, parts, y, seed, progress)
        found = evaluate.score(
            windows.task, target, prediction, test.subjects(), class_names=windows.class_names, bootstrap=options.bootstrap, by=options.by
        ).model_dump(include={"metrics", "by_class"})
        columns = pl.DataFrame(prediction.reshape(len(prediction), -1), schema=[f"p{k}" for k in range(max(windows.classes, 1))])
        scored = storage.encode_json({"asked": inputs, "training_windows": len(training), **found}) + b"\n"
        write_results(keep, {table.name: storage.encode_parquet(columns), stored.name: scored})  # no windows: they name subjects
    prediction = read_result_table(table).to_numpy()
    frame: pl.DataFrame = evaluate.predictions_frame(
        test.index, windows.task, windows.class_names, target, prediction[:, 0] if windows.task == "regression" else prediction
    )
    return TaskScores.model_validate_json(read_result(stored)), frame
