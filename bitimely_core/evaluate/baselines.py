"""Baselines without pre-training: linear models on simple features and on random convolution
kernels, and those that data sets register.

All are fitted on training windows of the fine-tuned run, choose on the validation split, and
predict the split that the run was scored on, whose labels they cannot read. Kernels follow ROCKET
(Dempster et al. 2020) with the weights of MiniRocket (Dempster et al. 2021): nine taps of -1, three
of them 2, dilated; features are the maximum and the share of values above a bias.

Legend: n windows, T samples, V channels, K kernels, C classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, registry, storage
from bitimely_core.config import DataConfig
from bitimely_core.errors import Reason, UserError, clean, input_error, usage_error
from bitimely_core.evaluate import hazard_baselines, window_counts
from bitimely_core.methods.linear import (
    MIN_PROBABILITY,
    Pair,
    choose_ridge,
    extract_simple_features,
    fit_windows,
    standardise,
)
from bitimely_core.records import has_result, read_result_table, write_results
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores, TaskScores
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import BaselineInput, BaselineSplit, NativeWindow, Progress, Record

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

CACHE_VERSION = 4  # of stored predictions: raise it where they change
# windows of train and of validation that a baseline is fitted on, drawn at random
MOST_TRAINING = 5_000
MOST_SCORED = 20_000  # windows of the page of one run that a baseline predicts, likewise
FOLDER = "baselines"  # in the folder of a run: stored predictions
GROUPS, PATTERNS, TAPS = 40, 8, 9  # kernels share dilation and channels in groups
BLOCK = 16  # windows at a time, to fit the processor's cache
DESCRIPTIONS = {
    "features": "logistic regression (numbers: ridge) on simple features: of each channel mean, "
    "logarithm of the standard deviation and of the power in 16 bands; of events logarithms of "
    "counts of codes",
    "kernels": f"ridge on {GROUPS * PATTERNS} random dilated convolution kernels, maximum and "
    "share of positive values of each",
    **window_counts.DESCRIPTIONS,
    **hazard_baselines.DESCRIPTIONS,
}
TITLES = {"features": "simple features", "kernels": "random kernels", **window_counts.TITLES}
# from counts in windows, tuned with the budget of the run
COUNTED = (*window_counts.TITLES, *hazard_baselines.DESCRIPTIONS)


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
    groups = []
    for k in range(GROUPS):
        size = int(2 ** draw.uniform(0, np.log2(min(channels, TAPS) + 1)))
        taps = np.stack([np.sort(draw.choice(TAPS, 3, replace=False)) for _ in range(PATTERNS)])
        dilation = int(2 ** draw.uniform(0, widest))
        summed = np.sort(draw.choice(channels, size, replace=False))
        groups.append(KernelGroup(dilation, summed, taps, padded=k % 2 == 0))
    return groups


def convolve(x: Array, group: KernelGroup) -> Iterator[Array]:
    """The responses [n, T'] of windows [n, T, V] to each kernel of a group, one after the other in
    the same memory; T' = T where they are padded with zeros.
    """
    reach = (TAPS - 1) * group.dilation
    s = x[:, :, group.channels].sum(2)
    padded = group.padded or s.shape[1] <= reach
    s = np.pad(s, ((0, 0), (reach // 2, reach // 2))) if padded else s
    width = s.shape[1] - reach
    shifted = [s[:, k * group.dilation : k * group.dilation + width] for k in range(TAPS)]
    total = np.sum(shifted, axis=0)
    response = np.empty_like(total)
    for a, b, c in group.taps.tolist():
        np.add(shifted[a], shifted[b], out=response)
        response += shifted[c]
        response *= 3
        response -= total
        yield response


def choose_biases(x: Array, groups: Sequence[KernelGroup], seed: int) -> Array:
    """A bias a kernel, [K]: a random quantile of its response to a random one of the windows [n, T,
    V].
    """
    draw = np.random.default_rng([seed, len(x)])
    biases = []
    for group in groups:
        responses = convolve(x[draw.integers(len(x))][None], group)
        shares = draw.uniform(size=len(group.taps))
        for response, share in zip(responses, shares, strict=True):
            biases.append(float(np.quantile(response[0], share)))
    return np.array(biases, np.float32)


def kernel_features(x: Array, groups: Sequence[KernelGroup], bias: Array) -> Array:
    """Maximum and share above the bias of every kernel, [n, 2 K] float32."""
    out = np.empty((len(x), 2, len(bias)), np.float32)
    for start in range(0, len(x), BLOCK):
        windows, features = x[start : start + BLOCK], out[start : start + BLOCK]
        responses = chain.from_iterable(convolve(windows, group) for group in groups)
        for k, response in enumerate(responses):
            response.max(1, out=features[:, 0, k])
            ones = np.ones(response.shape[1], np.float32)
            # a product counts fastest
            above = np.greater(response, bias[k]).astype(np.float32) @ ones
            features[:, 1, k] = above.astype(np.float64) / len(ones)
    return out.reshape(len(x), -1)


def fit_ridge(task: str, x: dict[str, Array], y: dict[str, Array], classes: int) -> Array:
    """Ridge regression on standardised features, the penalty with the least squared error on the
    validation split.

    Classes are regressed as indicators, whose predictions sum to one; they and labels are clipped
    to a probability. `x`: split -> features [n, D]; `y`: train, validation -> class ids [n], labels
    [n, C] (NaN: not known) or values [n]. Returns [n, C] probabilities or [n] values of the rows of
    test.
    """
    train, validation, new = standardise(x["train"], x["validation"], x["test"])
    if task == "classification":
        targets = {name: np.eye(classes)[v.astype(np.int64)] for name, v in y.items()}
    else:
        targets = {name: v.astype(np.float64).reshape(len(v), -1) for name, v in y.items()}
    held_out = (validation, targets["validation"])
    if task == "multilabel":
        columns = []
        for k in range(classes):
            rows, label = np.isfinite(targets["train"][:, k]), slice(k, k + 1)
            fitted = (train[rows], targets["train"][rows, label])
            columns.append(_predict_ridge(fitted, (validation, held_out[1][:, label]), new))
        return np.clip(np.hstack(columns), MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    predicted = _predict_ridge((train, targets["train"]), held_out, new)
    if task == "regression":
        return predicted[:, 0]
    shares = np.clip(predicted, MIN_PROBABILITY, None)
    return np.asarray(shares / shares.sum(1, keepdims=True))


def _predict_ridge(train: Pair, validation: Pair, new: Array) -> Array:
    """Predictions [n, K] for `new`; the penalty is chosen on the known rows of validation."""
    rows = np.isfinite(validation[1]).all(1)
    model = choose_ridge(train, (validation[0][rows], validation[1][rows]))
    return np.asarray(model.predict(new)).reshape(len(new), -1)


def _predict_from_features(
    windows: Any,
    parts: Mapping[str, Windows],
    y: Mapping[str, Array],
    seed: int,
    progress: Progress | None,
) -> Array:
    features = {name: extract_simple_features(part, part.rows) for name, part in parts.items()}
    return fit_windows(windows, features, y).prediction


def _predict_from_kernels(
    windows: Any,
    parts: Mapping[str, Windows],
    y: dict[str, Array],
    seed: int,
    progress: Progress | None,
) -> Array:
    groups = draw_kernels(windows.length, windows.channels, seed)
    draw = np.random.default_rng(seed)
    sample = np.sort(draw.choice(parts["train"].rows, min(64, len(parts["train"])), replace=False))
    bias = choose_biases(parts["train"].values(sample), groups, seed)
    x, done, total = {}, 0, sum(map(len, parts.values()))
    for name, part in parts.items():
        features = [np.zeros((0, 2 * len(bias)), np.float32)]
        for block in _read_blocks(part):
            features.append(kernel_features(block, groups, bias))
            done += len(block)
            if progress is not None:
                progress(f"random kernels {windows.name}", done, total)
        x[name] = np.concatenate(features)
    return fit_ridge(windows.task, x, y, max(windows.classes, 1))


def count_observed(part: Any) -> Array | None:
    """Events, or observed samples, of each row; None where all windows have the same number."""
    if part.vocabulary:
        return np.asarray(part.lengths())
    if not part.manifest.missing:
        return None
    counts = [part.mask(rows).any(2).sum(1) for rows in _cut_rows(part)]
    return np.concatenate(counts) if counts else np.zeros(0)


def _cut_rows(part: Any) -> Iterator[Array]:
    """Positions of 256 windows at a time."""
    for start in range(0, len(part), 256):
        yield part.rows[start : start + 256]


def _read_blocks(part: Any) -> Iterator[Array]:
    return map(part.values, _cut_rows(part))


def map_native(
    part: Any, channels: Collection[str], function: Callable[[NativeWindow], Any]
) -> list[Any]:
    """`function` of the recording under each window of `part`, in their order, from the cache that
    the windows were made of.

    Raises UserError (incomplete, exit 4) where that cache has gone or changed.
    """
    from bitimely_core import cache

    folder = part.folder.parents[1] / "cache" / part.dataset
    opened = cache.open_cache(folder, verify=False)
    if opened.manifest.manifest_sha256 != part.manifest.cache:
        raise input_error(
            Reason.INCOMPLETE,
            "another cache than that of the windows",
            "expected the recordings",
            "Tokenize again",
            file=str(folder),
        )
    starts = part.index["start"].to_list()
    places = defaultdict[str, list[int]](list)
    for place, recording in enumerate(part.index["recording_id"].to_list()):
        places[recording].append(place)
    results: list[Any] = [None] * len(starts)
    for record in opened.records(channels, places, labels=False):
        for place in places[record.recording_id]:
            seconds = (starts[place], part.length / part.rate)
            results[place] = function(_cut_native(record, channels, *seconds))
    return results


def _cut_native(
    record: Record, channels: Collection[str], start: float, duration: float
) -> NativeWindow:
    """The samples of each channel in a window, of its longest segment there, in its unit."""
    samples, rates = dict.fromkeys(channels, np.zeros(0)), dict.fromkeys(channels, 0.0)
    for signal in record.signals:
        first = round((start - signal.onset) * signal.rate)
        last = first + round(duration * signal.rate)
        inside = signal.samples[max(first, 0) : max(last, 0)]
        if len(inside) > len(samples[signal.channel]):
            samples[signal.channel] = inside * float(signal.scale) + signal.offset
            rates[signal.channel] = signal.rate
    return NativeWindow(samples, rates)


def find_registered(windows: Any) -> dict[str, registry.DatasetBaseline]:
    """The baselines that the data set registers for these windows."""
    if windows.dataset not in registry.datasets:
        return {}
    return {
        baseline.name: baseline
        for baseline in registry.datasets[windows.dataset].facts.baselines
        if not baseline.views or windows.view in baseline.views
    }


def _predict_registered(
    baseline: registry.DatasetBaseline,
    windows: Any,
    parts: Mapping[str, Windows],
    y: Mapping[str, Array],
    seed: int,
) -> Array:
    splits = {
        name: BaselineSplit(
            n=len(part),
            targets=y.get(name),
            read=partial(_read_blocks, part),
            map_native=partial(map_native, part),
        )
        for name, part in parts.items()
    }
    data = BaselineInput(
        task=windows.task,
        class_names=windows.class_names,
        channels=tuple(windows.channel_names),
        rate=windows.rate,
        seconds=windows.length / windows.rate,
        seed=seed,
        **splits,
        fit_linear=lambda x: fit_windows(windows, x, y).prediction,
    )
    prediction = np.asarray(baseline.predict(data), np.float64)
    classes = () if windows.task == "regression" else (windows.classes,)
    shape = (len(parts["test"]), *classes)
    if prediction.shape != shape or not np.isfinite(prediction).all():
        raise usage_error(
            f"its predictions have the shape {prediction.shape}, or hold NaN or infinity",
            f"expected finite numbers of shape {shape}",
            "Correct the function in the registration of the data set",
            field=f"baseline {baseline.name} of {windows.dataset}",
        )
    return prediction


PREDICTORS: dict[
    str, Callable[[Any, dict[str, Windows], dict[str, Array], int, Progress | None], Array]
] = {"features": _predict_from_features, "kernels": _predict_from_kernels}


class BaselinePredictions(NamedTuple):
    """Predictions of one baseline on rows of the scored split."""

    rows: Array  # positions in the split
    prediction: Array
    training: int  # windows that it was fitted on
    available: int  # windows of the training split
    settings: int | None = None  # tried on the validation split, where as many as by the run


def draw_positions(count: int, most: int | None) -> Array:
    """`most` of `count` positions, drawn at random, ascending; None: all."""
    if most is None or count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng([count, most]).choice(count, most, replace=False))


def hide_labels(part: Any) -> Any:
    """The windows without their labels."""
    import polars as pl

    return replace(part, target=None, whole_index=part.whole_index.with_columns(label=pl.lit(None)))


def predict_baseline(
    kind: str,
    record: RunRecord,
    windows: Any,
    split: str,
    *,
    keep: Path,
    also: Sequence[Path] = (),
    most: int | None = None,
    progress: Progress | None = None,
) -> BaselinePredictions | str:
    """Predictions of one baseline (a key of `DESCRIPTIONS`, or one that the data set registers) on
    `split`, or why there are none.

    Training windows (limit, share of the subjects, seed) are those of `record`, at most
    `MOST_TRAINING` of them; `most` windows are predicted. Predictions are stored in `keep`, and
    found there and in `also`.
    """
    import polars as pl

    registered = find_registered(windows).get(kind)
    if registered is None and kind not in list_baselines(windows):
        return "it is for other data"
    choices = record.settings.data
    # else all seeds share one
    seed = record.seed if choices.fraction < 1 or choices.limit is not None else 0
    settings = window_counts.count_settings(record) if kind in COUNTED else None
    parts = _limit_parts(windows, split, choices, seed)
    rows, training = draw_positions(len(parts["test"]), most), len(parts["train"])
    if not training or not len(rows):
        return "a split holds no windows"
    fitted = window_counts.MOST_TRAINING if settings else MOST_TRAINING
    for name, count in (("train", fitted), ("validation", fitted), ("test", most)):
        parts[name] = _draw_windows(parts[name], count)
    inputs = {
        "kind": kind,
        "version": [CACHE_VERSION, registered.version if registered else 0],
        "data": windows.fingerprint,
        "fraction": choices.fraction,
        "limit": choices.limit,
        "seed": seed,
        "split": split,
        "most": [MOST_TRAINING, most],
    }
    if settings:
        inputs["settings"] = settings
    file = f"{kind}-{storage.fingerprint(inputs)[:24]}.parquet"
    stored = next((folder / file for folder in (keep, *also) if has_result(folder / file)), None)
    if stored is None:
        prediction = _fit_baseline(kind, windows, parts, seed, settings, progress)
        stored = keep / file
        # without windows: they name subjects
        names = [f"p{k}" for k in range(max(windows.classes, 1))]
        table = pl.DataFrame(prediction.reshape(len(prediction), -1), schema=names)
        write_results(keep, {file: storage.encode_parquet(table)})
    columns = read_result_table(stored).to_numpy()
    prediction = columns[:, 0] if windows.task == "regression" else columns
    return BaselinePredictions(rows, prediction, len(parts["train"]), training, settings)


def _limit_parts(windows: Any, split: str, choices: DataConfig, seed: int) -> dict[str, Any]:
    """The windows of training and validation that a run reads, and those of `split` as test."""
    from bitimely_core.data import limit_windows, sample_subjects

    limited = limit_windows(windows, choices.limit, seed)
    return {
        "train": sample_subjects(limited["train"], choices.fraction, seed),
        "validation": limited["validation"],
        "test": windows[split],
    }


def _draw_windows(part: Any, most: int | None) -> Any:
    """`most` windows of a split, drawn at random; None: all."""
    positions = draw_positions(len(part), most)
    return part.subset(np.isin(np.arange(len(part)), positions))


def _fit_baseline(
    kind: str,
    windows: Any,
    parts: Mapping[str, Any],
    seed: int,
    settings: int | None,
    progress: Progress | None,
) -> Array:
    """Predictions [n, C], or [n] of a regression, for `test`, whose labels are hidden."""
    y = {name: np.asarray(parts[name].targets(None)) for name in ("train", "validation")}
    parts = {**parts, "test": hide_labels(parts["test"])}
    registered = find_registered(windows).get(kind)
    if registered is not None:
        return _predict_registered(registered, windows, parts, y, seed)
    if not settings:
        return PREDICTORS[kind](windows, parts, y, seed, progress)
    rows = {name: part.rows for name, part in parts.items()}
    if kind in hazard_baselines.DESCRIPTIONS:
        return _predict_hazards(kind, windows, rows, y, settings)
    return window_counts.predict_from_counts(kind, windows, rows, y, settings)


def _predict_hazards(
    kind: str, windows: Any, rows: dict[str, Array], y: dict[str, Array], settings: int
) -> Array:
    """Risks by a baseline of times to event on counts of codes; `rows`: split -> positions in the
    full index.
    """
    counts = {name: window_counts.count_windows(windows, places) for name, places in rows.items()}
    names = windows.class_names
    if kind == hazard_baselines.TREES:
        return hazard_baselines.predict_from_trees(counts, y, names, settings)
    logs = {name: matrix.log1p() for name, matrix in counts.items()}
    penalties = window_counts.PENALTIES[:settings]
    return hazard_baselines.predict_from_hazards(logs, y, names, penalties)


def list_baselines(windows: Any) -> dict[str, str]:
    """The fitted baselines of these windows: kind -> description."""
    if windows.task == "survival":
        return hazard_baselines.DESCRIPTIONS
    unfit = {"kernels", *hazard_baselines.DESCRIPTIONS} if windows.vocabulary else COUNTED
    fitted = {kind: about for kind, about in DESCRIPTIONS.items() if kind not in unfit}
    registered = find_registered(windows).items()
    return fitted | {name: baseline.about for name, baseline in registered}


def title_baseline(kind: str) -> str:
    """The printed name of a baseline; its key in scores.json has underscores."""
    return TITLES.get(kind, kind.replace("-", " ").replace("_", " "))


def describe_baseline(kind: str) -> str:
    """What a baseline is, one that a data set registers, too."""
    if kind in DESCRIPTIONS:
        return DESCRIPTIONS[kind]
    entries = (entry.facts.baselines for entry in registry.datasets.values())
    registered = {baseline.name: baseline.about for baseline in chain.from_iterable(entries)}
    return registered.get(kind, kind)


def predict_baselines(
    record: RunRecord, windows: Any, split: str, *, folder: Path, progress: Progress | None = None
) -> tuple[dict[str, tuple[str, BaselinePredictions]], list[str]]:
    """All fitted baselines of a run in `folder`: key of scores.json -> description and predictions;
    and a remark for each that there is not.

    Runs beside it on the same windows share their predictions.
    """
    fitted, remarks = {}, []
    beside: list[Path] = []
    if folder.parent.name == "runs":
        folders = sorted(folder.parent.glob(f"*/{FOLDER}"))
        beside = [other for other in folders if other.parent != folder]
    for kind, about in list_baselines(windows).items():
        title = title_baseline(kind)
        try:
            predictions = predict_baseline(
                kind,
                record,
                windows,
                split,
                keep=folder / FOLDER,
                also=beside,
                most=MOST_SCORED,
                progress=progress,
            )
        except UserError as error:
            raise_system_error(error)
            predictions = clean(error.finding.line(), 300)
        if isinstance(predictions, str):
            remarks.append(f"The baseline of {title} was left out: {predictions}.")
        else:
            words = about + _describe_fit(predictions)
            fitted[title.replace(" ", "_")] = (words, predictions)
    return fitted, remarks


def _describe_fit(predictions: BaselinePredictions) -> str:
    """How many settings were tried, and on which share of the training windows, behind a comma."""
    words = ""
    if predictions.settings:
        words += f", the best of {predictions.settings} settings on the validation split"
    if predictions.training != predictions.available:
        words += f", on {predictions.training:,} of {predictions.available:,} training windows"
    return words


def fit_baseline(
    kind: str,
    record: RunRecord,
    scores: Scores,
    keep: Path,
    *,
    open_windows: OpenWindows,
    also: Sequence[Path] = (),
    progress: Progress | None = None,
) -> tuple[TaskScores, pl.DataFrame] | str:
    """One baseline on the data of a fine-tuned run: its scores and a frame as
    `predictions.parquet`, or why there are none.

    Split, unit of resampling and replicates are those of `scores`; see `predict_baseline`. Raises
    UserError: those of opening the tokens.
    """
    windows = open_windows(scores.data)
    if windows.fingerprint != record.data[0].fingerprint:
        return "the windows of the run no longer exist"
    predictions = predict_baseline(
        kind, record, windows, scores.split, keep=keep, also=also, progress=progress
    )
    if isinstance(predictions, str):
        return predictions
    test, names = windows[scores.split], windows.class_names
    target, prediction = np.asarray(test.targets(None)), predictions.prediction
    scored = evaluate.score(
        windows.task,
        target,
        prediction,
        test.subjects(),
        class_names=names,
        bootstrap=scores.settings.bootstrap,
        by=scores.settings.by,
        unit=windows.target_unit,
        subject=windows.subject_unit,
    )
    frame = evaluate.predictions_frame(test.index, windows.task, names, target, prediction)
    return scored, frame
