"""Baselines without pre-training: linear models on simple features and on random convolution
kernels, and those that data sets register.

All are fitted on training windows of the fine-tuned run, choose on the validation split, and
predict the split that the run was scored on, whose labels they cannot read. Kernels follow ROCKET
(Dempster et al. 2020) with the weights of MiniRocket (Dempster et al. 2021): nine taps of -1, three
of them 2, dilated; features are the maximum and the share of values above a bias.

Legend: n windows, T samples, V channels, K kernels, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, registry, storage
from bitimely_core.errors import Reason, UserError, clean, input_error, usage_error
from bitimely_core.evaluate import hazard_baselines, window_counts
from bitimely_core.evaluate.linear import (
    DEFAULT_PENALTY,
    MIN_PROBABILITY,
    PENALTIES,
    extract_simple_features,
    fit_windows,
    standardise,
)
from bitimely_core.records import has_result, read_result_table, write_results
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores, TaskScores
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import BaselineInput, BaselineSplit, NativeWindow, Progress

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
    "features": "logistic regression (numbers: ridge) on simple features: of each channel mean, logarithm of the standard deviation and of the power "
    "in 16 bands; of events logarithms of counts of codes",
    "kernels": f"ridge on {GROUPS * PATTERNS} random dilated convolution kernels, maximum and share of positive values of each",
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
    out = []
    for k in range(GROUPS):
        size = int(2 ** draw.uniform(0, np.log2(min(channels, TAPS) + 1)))
        taps = np.stack([np.sort(draw.choice(TAPS, 3, replace=False)) for _ in range(PATTERNS)])
        out.append(
            KernelGroup(
                int(2 ** draw.uniform(0, widest)),
                np.sort(draw.choice(channels, size, replace=False)),
                taps,
                k % 2 == 0,
            )
        )
    return out


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
    out = []
    for group in groups:
        responses = convolve(x[draw.integers(len(x))][None], group)
        out += [
            float(np.quantile(r[0], q))
            for r, q in zip(responses, draw.uniform(size=len(group.taps)), strict=True)
        ]
    return np.array(out, np.float32)


def kernel_features(x: Array, groups: Sequence[KernelGroup], bias: Array) -> Array:
    """Maximum and share above the bias of every kernel, [n, 2 K] float32."""
    out = np.empty((len(x), 2, len(bias)), np.float32)
    for start in range(0, len(x), BLOCK):
        part, found = x[start : start + BLOCK], out[start : start + BLOCK]
        responses = itertools.chain.from_iterable(convolve(part, group) for group in groups)
        for k, response in enumerate(responses):
            response.max(1, out=found[:, 0, k])
            # a product counts fastest
            above = np.greater(response, bias[k]).astype(np.float32) @ np.ones(
                response.shape[1], np.float32
            )
            found[:, 1, k] = above.astype(np.float64) / response.shape[1]
    return out.reshape(len(x), -1)


def fit_ridge(task: str, x: dict[str, Array], y: dict[str, Array], classes: int) -> Array:
    """Ridge regression on standardised features, the penalty with the least squared error on the
    validation split.

    Classes are regressed as indicators, whose predictions sum to one; they and labels are clipped
    to a probability. `x`: split -> features [n, D]; `y`: train, validation -> class ids [n], labels
    [n, C] (NaN: not known) or values [n]. Returns [n, C] probabilities or [n] values of the rows of
    test.
    """
    from sklearn.linear_model import Ridge

    train, held, new = standardise(x["train"], x["validation"], x["test"])
    target = {
        k: np.eye(classes)[v.astype(np.int64)]
        if task == "classification"
        else v.astype(np.float64).reshape(len(v), -1)
        for k, v in y.items()
    }

    def fit(k: Array, of: slice) -> Array:
        """Predictions of the targets `of`, fitted on the training rows `k`."""
        found: tuple[float, Array] | None = None
        known = np.isfinite(target["validation"][:, of]).all(1)
        for penalty in PENALTIES if known.any() else (DEFAULT_PENALTY,):
            model = Ridge(alpha=penalty).fit(train[k], target["train"][k, of])
            loss = (
                float(
                    np.square(
                        model.predict(held[known]).reshape(int(known.sum()), -1)
                        - target["validation"][known, of]
                    ).mean()
                )
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


def _predict_from_features(
    windows: Any,
    parts: Mapping[str, Windows],
    y: Mapping[str, Array],
    seed: int,
    progress: Progress | None,
) -> Array:
    return fit_windows(
        windows, {name: extract_simple_features(part, part.rows) for name, part in parts.items()}, y
    ).prediction


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
        found = []
        for block in _read_blocks(part):
            found.append(kernel_features(block, groups, bias))
            done += len(found[-1])
            if progress is not None:
                progress(f"random kernels {windows.name}", done, total)
        x[name] = np.concatenate(found) if found else np.zeros((0, 2 * len(bias)), np.float32)
    return fit_ridge(windows.task, x, y, max(windows.classes, 1))


def count_observed(part: Any) -> Array | None:
    """Events, or observed samples, of each row; None where all windows have the same number."""
    if part.vocabulary:
        return np.asarray(part.lengths())
    if not part.manifest.missing:
        return None
    found = [
        part.mask(part.rows[start : start + 256]).any(2).sum(1)
        for start in range(0, len(part), 256)
    ]
    return np.concatenate(found) if found else np.zeros(0)


def _read_blocks(part: Any) -> Iterator[Array]:
    for start in range(0, len(part), 256):
        yield part.values(part.rows[start : start + 256])


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
    owner, start = part.index["recording_id"].to_list(), part.index["start"].to_list()
    places: dict[str, list[int]] = {}
    for k, recording in enumerate(owner):
        places.setdefault(recording, []).append(k)
    out: list[Any] = [None] * len(owner)
    for record in opened.records(channels, places, labels=False):
        for k in places[record.recording_id]:
            samples, rates = dict.fromkeys(channels, np.zeros(0)), dict.fromkeys(channels, 0.0)
            for signal in record.signals:
                first = round((start[k] - signal.onset) * signal.rate)
                found = signal.samples[
                    max(first, 0) : max(first + round(part.length / part.rate * signal.rate), 0)
                ]
                if len(found) > len(samples[signal.channel]):
                    samples[signal.channel], rates[signal.channel] = (
                        found * float(signal.scale) + signal.offset,
                        signal.rate,
                    )
            out[k] = function(NativeWindow(samples, rates))
    return out


def _describe_split(part: Any, targets: Array | None) -> BaselineSplit:
    return BaselineSplit(
        n=len(part),
        targets=targets,
        read=lambda: _read_blocks(part),
        map_native=lambda names, of: map_native(part, names, of),
    )


def find_registered(windows: Any) -> dict[str, registry.DatasetBaseline]:
    """The baselines that the data set registers for these windows."""
    if windows.dataset not in registry.datasets:
        return {}
    every = registry.datasets[windows.dataset].facts.baselines
    return {one.name: one for one in every if not one.views or windows.view in one.views}


def _predict_registered(
    one: registry.DatasetBaseline,
    windows: Any,
    parts: Mapping[str, Windows],
    y: Mapping[str, Array],
    seed: int,
) -> Array:
    given = BaselineInput(
        task=windows.task,
        class_names=windows.class_names,
        channels=tuple(windows.channel_names),
        rate=windows.rate,
        seconds=windows.length / windows.rate,
        seed=seed,
        **{name: _describe_split(part, y.get(name)) for name, part in parts.items()},
        fit_linear=lambda x: fit_windows(windows, x, y).prediction,
    )
    found = np.asarray(one.predict(given), np.float64)
    shape = (
        (len(parts["test"]),)
        if windows.task == "regression"
        else (len(parts["test"]), windows.classes)
    )
    if found.shape != shape or not np.isfinite(found).all():
        raise usage_error(
            f"its predictions have the shape {found.shape}"
            if found.shape != shape
            else "its predictions hold NaN or infinity",
            f"expected finite numbers of shape {shape}",
            "Correct the function in the registration of the data set",
            field=f"baseline {one.name} of {windows.dataset}",
        )
    return found


PREDICTORS: dict[
    str, Callable[[Any, dict[str, Windows], dict[str, Array], int, Progress | None], Array]
] = {"features": _predict_from_features, "kernels": _predict_from_kernels}


class BaselinePredictions(NamedTuple):
    """Predictions of one baseline on rows of the scored split."""

    rows: Array  # positions in the split
    prediction: Array
    training: int  # windows that it was fitted on
    of: int  # windows of the training split
    settings: int | None = None  # tried on the validation split, where as many as by the run


def draw_positions(count: int, most: int | None) -> Array:
    """`most` of `count` positions, drawn at random, ascending; None: all."""
    return (
        np.arange(count)
        if most is None or count <= most
        else np.sort(np.random.default_rng([count, most]).choice(count, most, replace=False))
    )


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

    from bitimely_core import data

    registered = find_registered(windows).get(kind)
    if registered is None and kind not in list_baselines(windows):
        if kind == "kernels":
            return "events have no samples to convolve"
        return (
            "it is for other inputs or labels"
            if kind in DESCRIPTIONS
            else "the data set does not register it"
        )
    chosen = record.settings.data
    # else all seeds share one
    seed = record.seed if chosen.fraction < 1 or chosen.limit is not None else 0
    inputs = {
        "kind": kind,
        "version": [CACHE_VERSION, registered.version if registered else 0],
        "data": windows.fingerprint,
    }
    settings = window_counts.count_settings(record) if kind in COUNTED else None
    inputs |= {"settings": settings} if settings else {}
    inputs |= {
        "fraction": chosen.fraction,
        "limit": chosen.limit,
        "seed": seed,
        "split": split,
        "most": [MOST_TRAINING, most],
    }
    limited = data.limit_windows(windows, chosen.limit, seed)
    parts = {
        "train": data.sample_subjects(limited["train"], chosen.fraction, seed),
        "validation": limited["validation"],
        "test": windows[split],
    }
    rows, of = draw_positions(len(parts["test"]), most), len(parts["train"])
    if not of or not len(rows):
        return "a split holds no windows"
    fitted = window_counts.MOST_TRAINING if settings else MOST_TRAINING
    for name, count in (("train", fitted), ("validation", fitted), ("test", most)):
        parts[name] = parts[name].subset(
            np.isin(np.arange(len(parts[name])), draw_positions(len(parts[name]), count))
        )
    file = f"{kind}-{storage.fingerprint(inputs)[:24]}.parquet"
    stored = next((folder / file for folder in (keep, *also) if has_result(folder / file)), None)
    if stored is None:
        y = {name: np.asarray(parts[name].targets(None)) for name in ("train", "validation")}
        parts["test"] = hide_labels(parts["test"])
        if registered is not None:
            prediction = _predict_registered(registered, windows, parts, y, seed)
        elif settings:
            rows_of = {name: part.rows for name, part in parts.items()}
            if kind in hazard_baselines.DESCRIPTIONS:
                prediction = _predict_hazards(kind, windows, rows_of, y, settings)
            else:
                prediction = window_counts.predict_from_counts(kind, windows, rows_of, y, settings)
        else:
            prediction = PREDICTORS[kind](windows, parts, y, seed, progress)
        columns = pl.DataFrame(
            prediction.reshape(len(prediction), -1),
            schema=[f"p{k}" for k in range(max(windows.classes, 1))],
        )
        stored = keep / file
        # no windows: they name subjects
        write_results(keep, {file: storage.encode_parquet(columns)})
    found = read_result_table(stored).to_numpy()
    return BaselinePredictions(
        rows,
        found[:, 0] if windows.task == "regression" else found,
        len(parts["train"]),
        of,
        settings,
    )


def _predict_hazards(
    kind: str, windows: Any, rows: dict[str, Array], y: dict[str, Array], settings: int
) -> Array:
    """Risks by a baseline of times to event on counts of codes; `rows`: split -> positions in the
    full index.
    """
    x = {name: window_counts.count_windows(windows, at) for name, at in rows.items()}
    if kind == hazard_baselines.TREES:
        return hazard_baselines.predict_from_trees(x, y, windows.class_names, settings)
    logs = {name: of.log1p() for name, of in x.items()}
    return hazard_baselines.predict_from_hazards(
        logs, y, windows.class_names, window_counts.PENALTIES[:settings]
    )


def list_baselines(windows: Any) -> dict[str, str]:
    """The fitted baselines of these windows: kind -> description."""
    if windows.task == "survival":
        return hazard_baselines.DESCRIPTIONS
    unfit = {"kernels", *hazard_baselines.DESCRIPTIONS} if windows.vocabulary else COUNTED
    known = {kind: about for kind, about in DESCRIPTIONS.items() if kind not in unfit}
    return {**known, **{name: one.about for name, one in find_registered(windows).items()}}


def title_baseline(kind: str) -> str:
    """The printed name of a baseline; its key in scores.json has underscores."""
    return TITLES.get(kind, kind.replace("-", " ").replace("_", " "))


def describe_baseline(kind: str) -> str:
    """What a baseline is, one that a data set registers, too."""
    every = [
        one
        for entry in registry.datasets.values()
        for one in entry.facts.baselines
        if one.name == kind
    ]
    return DESCRIPTIONS.get(kind) or (every[0].about if every else kind)


def predict_baselines(
    record: RunRecord, windows: Any, split: str, *, folder: Path, progress: Progress | None = None
) -> tuple[dict[str, tuple[str, BaselinePredictions]], list[str]]:
    """All fitted baselines of a run in `folder`: key of scores.json -> description and predictions;
    and a remark for each that there is not.

    Runs beside it on the same windows share their predictions.
    """
    out, remarks = {}, []
    also = (
        [one for one in sorted(folder.parent.glob(f"*/{FOLDER}")) if one.parent != folder]
        if folder.parent.name == "runs"
        else []
    )
    for kind, about in list_baselines(windows).items():
        try:
            found = predict_baseline(
                kind,
                record,
                windows,
                split,
                keep=folder / FOLDER,
                also=also,
                most=MOST_SCORED,
                progress=progress,
            )
        except UserError as error:
            raise_system_error(error)
            found = clean(error.finding.line(), 300)
        if not isinstance(found, str):
            drawn = (
                ""
                if found.training == found.of
                else f", on {found.training:,} of {found.of:,} training windows"
            )
            tried = (
                f", the best of {found.settings} settings on the validation split"
                if found.settings
                else ""
            )
            out[title_baseline(kind).replace(" ", "_")] = (about + tried + drawn, found)
        else:
            remarks.append(f"The baseline of {title_baseline(kind)} was left out: {found}.")
    return out, remarks


def fit_baseline(
    kind: str,
    record: RunRecord,
    scores: Scores,
    *,
    keep: Path,
    open_windows: OpenWindows,
    also: Sequence[Path] = (),
    progress: Progress | None = None,
) -> tuple[TaskScores, pl.DataFrame] | str:
    """One baseline on the data of a fine-tuned run: its scores and a frame as
    `predictions.parquet`, or why there are none.

    Split, unit of resampling and replicates are those of `scores`; see `predict_baseline`. Raises
    UserError: those of opening the tokens.
    """
    options, windows = scores.settings, open_windows(scores.data)
    if windows.fingerprint != record.data[0].fingerprint:
        return "the windows of the run no longer exist"
    made = predict_baseline(
        kind, record, windows, scores.split, keep=keep, also=also, progress=progress
    )
    if isinstance(made, str):
        return made
    test = windows[scores.split]
    target = np.asarray(test.targets(None))
    found = evaluate.score(
        windows.task,
        target,
        made.prediction,
        test.subjects(),
        class_names=windows.class_names,
        bootstrap=options.bootstrap,
        by=options.by,
        unit=windows.target_unit,
        subject=windows.subject_unit,
    )
    frame: pl.DataFrame = evaluate.predictions_frame(
        test.index, windows.task, windows.class_names, target, made.prediction
    )
    return found, frame
