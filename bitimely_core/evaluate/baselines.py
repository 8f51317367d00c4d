"""What needs no pre-training, on the windows of a run: simple features and random convolution kernels, each with a linear model.

Both are fitted on the training windows that the run was fine-tuned on, their penalty is chosen on the validation split, and they predict the
split that the run was scored on; labels of that split are never read here. Kernels follow ROCKET (Dempster et al. 2020) with the weights of
MiniRocket (Dempster et al. 2021): nine taps of -1, three of them 2, dilated; features are the maximum and the share of values above a bias.

Legend: n windows, T samples, V channels, K kernels, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, storage
from bitimely_core.run import vocabulary_digest
from bitimely_core.types import Progress

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows

Array = npt.NDArray[Any]

CACHE_VERSION = 1  # of what is kept: raise it where predictions change
GROUPS, PATTERNS, TAPS = 40, 8, 9  # kernels share dilation and channels in groups
BLOCK = 16  # windows at a time: what fits in a cache of the processor
PENALTIES = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1)
MIN_PROBABILITY = 1e-6  # probability of a class
DESCRIPTIONS = {
    "features": "logistic regression (numbers: ridge) on simple features: of each channel mean, logarithm of the standard deviation and of the power "
    "in 16 bands; of events logarithms of counts of codes",
    "kernels": f"ridge on {GROUPS * PATTERNS} random dilated convolution kernels, maximum and share of positive values of each",
}
TITLES = {"features": "simple features", "kernels": "random kernels"}


class KernelGroup(NamedTuple):
    """Kernels that differ only in which three taps weigh 2."""

    dilation: int
    channels: Array  # which are added up
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

    Classes are regressed as indicators, whose predictions sum to one; they and labels are clipped to a probability.

    Args:
        task: classification, multilabel or regression.
        x: train, validation, test -> features [n, D].
        y: train, validation -> class ids [n], labels [n, C] (NaN: not known) or values [n].
        classes: C.

    Returns:
        [n, C] probabilities or [n] values of the rows of test.
    """
    from sklearn.linear_model import Ridge

    from bitimely_core.evaluate.linear import standardise

    train, held, new = standardise(x["train"], x["validation"], x["test"])
    target = {
        k: np.eye(classes)[v.astype(np.int64)] if task == "classification" else v.astype(np.float64).reshape(len(v), -1)
        for k, v in y.items()
    }

    def best(k: Array, of: slice) -> Array:
        """Predictions of the targets `of`, fitted on the training rows `k`."""
        found: tuple[float, Array] | None = None
        seen = np.isfinite(target["validation"][:, of]).all(1)
        for penalty in PENALTIES if seen.any() else (1e2,):
            model = Ridge(alpha=penalty).fit(train[k], target["train"][k, of])
            loss = (
                float(np.square(model.predict(held[seen]).reshape(int(seen.sum()), -1) - target["validation"][seen, of]).mean())
                if seen.any()
                else 0.0
            )
            if found is None or loss < found[0]:
                found = loss, np.asarray(model.predict(new)).reshape(len(new), -1)
        assert found is not None
        return found[1]

    if task == "multilabel":
        told = [np.isfinite(target["train"][:, k]) for k in range(classes)]
        out = np.hstack([best(known, slice(k, k + 1)) for k, known in enumerate(told)])
        return np.clip(out, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    out = best(np.ones(len(train), bool), slice(None))
    if task == "regression":
        return out[:, 0]
    out = np.clip(out, MIN_PROBABILITY, None)
    return np.asarray(out / out.sum(1, keepdims=True))


def _predict_from_features(windows: Any, parts: dict[str, Any], y: dict[str, Array], seed: int, progress: Progress | None) -> Array:
    from bitimely_core.evaluate.linear import extract_simple_features, fit_probe

    x = {name: extract_simple_features(part, part.rows) for name, part in parts.items()}
    width = x["train"].shape[1]
    x = {name: v.reshape(len(v), width) if len(v) else np.zeros((0, width), np.float32) for name, v in x.items()}
    return fit_probe(windows.task, x, y, max(windows.classes, 1)).prediction


def _predict_from_kernels(windows: Any, parts: dict[str, Any], y: dict[str, Array], seed: int, progress: Progress | None) -> Array:
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


PREDICTORS: dict[str, Callable[[Any, dict[str, Any], dict[str, Array], int, Progress | None], Array]] = {
    "features": _predict_from_features,
    "kernels": _predict_from_kernels,
}


def fit_baseline(
    kind: str, body: dict[str, Any], scores: dict[str, Any], *, keep: Path, open_windows: OpenWindows, progress: Progress | None = None
) -> tuple[dict[str, Any], pl.DataFrame] | str:
    """One baseline on the data of a fine-tuned run: its scores as `evaluate.score` makes them, and its predictions.

    Args:
        kind: a key of `ABOUT`.
        body: run.json of the run: its training windows are those of the baseline (data, limit, share of the subjects, seed).
        scores: scores.json of the run: split, unit of resampling and replicates are those of the baseline.
        keep: folder of what was made before; the same question is not computed again.
        open_windows: opens the tokens of that name.
        progress: told about the kernels.

    Returns:
        Scores and a frame as `predictions.parquet`; or in words why there is none.

    Raises:
        UserError: those of opening the tokens.
    """
    import polars as pl

    from bitimely_core import data

    chosen, options = body["settings"]["data"], scores["settings"]
    windows: Any = open_windows(scores["data"])
    if windows.fingerprint != body["data"][0]["fingerprint"]:
        return "the windows of the run are not there any more"
    if kind == "kernels" and vocabulary_digest(windows):
        return "events have no samples to convolve"
    seed = body["seed"]
    asked = {
        "kind": kind,
        "version": CACHE_VERSION,
        "data": windows.fingerprint,
        "fraction": chosen["fraction"],
        "limit": chosen.get("limit"),
    }
    asked |= {"seed": seed, "split": scores["split"], "bootstrap": options["bootstrap"], "by": options["by"]}
    stem = keep / f"{kind}-{storage.fingerprint(asked)[:24]}"
    kept, table = stem.with_suffix(".json"), stem.with_suffix(".parquet")
    test = windows[scores["split"]]
    target = np.asarray(test.targets(None)) if len(test) else np.zeros(0)

    def framed(prediction: Array) -> pl.DataFrame:
        made: pl.DataFrame = evaluate.predictions_frame(test.index, windows.task, windows.class_names, target, prediction)
        return made

    if kept.is_file() and table.is_file():  # without the windows they belong to: what is kept beside a page names no subject
        said = pl.read_parquet(table).to_numpy()
        return json.loads(kept.read_bytes()), framed(said[:, 0] if windows.task == "regression" else said)
    training = data.sample_subjects(data.limit_windows(windows, chosen.get("limit"), seed)["train"], chosen["fraction"], seed)
    if not len(training) or not len(test):
        return "a split holds no windows"
    parts = {"train": training, "validation": data.limit_windows(windows, chosen.get("limit"), seed)["validation"], "test": test}
    y = {name: np.asarray(parts[name].targets(None)) for name in ("train", "validation")}
    prediction = PREDICTORS[kind](windows, parts, y, seed, progress)
    found = evaluate.score(
        windows.task,
        target,
        prediction,
        test.subjects(),
        class_names=windows.class_names,
        bootstrap=options["bootstrap"],
        by=options["by"],
        seed=0,
    )
    columns = pl.DataFrame(prediction.reshape(len(prediction), -1), schema=[f"p{k}" for k in range(max(windows.classes, 1))])
    storage.make_folder(keep)
    storage.write_file(table, lambda out: columns.write_parquet(out, compression="zstd"))
    storage.write_json(
        kept, {"asked": asked, "training_windows": len(training), "metrics": found["metrics"], "by_class": found["by_class"]}
    )
    return json.loads(kept.read_bytes()), framed(prediction)
