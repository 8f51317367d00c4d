"""Baselines without pre-training: methods that `bitimely train` offers too, beside every score.

They are fitted on training windows of the fine-tuned run, choose on the validation split, and
predict the split that the run was scored on, whose labels they cannot read.

Legend: n windows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core import evaluate, registry
from bitimely_core.config import DataConfig
from bitimely_core.errors import UserError, clean
from bitimely_core.evaluate.stored_predictions import FOLDER, find_prediction, store_prediction
from bitimely_core.methods import hazards, window_counts
from bitimely_core.methods.method_contract import (
    Array,
    MethodFit,
    MethodRows,
    fit_method,
    make_config,
)
from bitimely_core.methods.signal import list_measures
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores, TaskScores
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.drawing import limit_windows, sample_subjects
from bitimely_core.tokens.sets import TokenSet
from bitimely_core.types import SPLITS, leave_out

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows

CACHE_VERSION = 5  # of stored predictions: raise it where they change
# windows of train and of validation that a baseline is fitted on, drawn at random: so many, or more
# where they hold fewer samples than `MOST_SAMPLES`
MOST_TRAINING, MOST_SAMPLES = 5_000, 20_000_000
MOST_SEQUENCES = 50_000  # likewise sequences of events
MOST_SCORED = 20_000  # windows of the page of one run that a baseline predicts, likewise
LEAST_SETTINGS = 4  # that a baseline from counts tries on the validation split


class PageBaseline(NamedTuple):
    """A method as it stands beside scores."""

    method: str
    title: str
    about: str


BASELINES = {
    "features": PageBaseline(
        "features",
        "simple features",
        "logistic regression (numbers: ridge) on simple features: of each channel mean, "
        "logarithm of the standard deviation and of the power in 16 bands; of events logarithms of "
        "counts of codes",
    ),
    "kernels": PageBaseline(
        "kernels",
        "random kernels",
        "ridge on 5,040 dilated convolution kernels, the share of samples above a threshold of "
        "each (MiniRocket, Dempster et al. 2021)",
    ),
    "counts-logistic": PageBaseline(
        "counts",
        "window counts logistic",
        f"logistic regression on logarithms of {window_counts.WINDOWS}",
    ),
    "counts-trees": PageBaseline(
        "trees",
        "window counts trees",
        f"gradient-boosted trees on {window_counts.WINDOWS} (the {window_counts.MOST_COLUMNS} "
        "counts that most training sequences have)",
    ),
    "hazard-counts": PageBaseline(
        "counts",
        "hazard counts",
        f"logistic regression of the hazard in {hazards.INTERVALS} intervals on logarithms of "
        f"{window_counts.WINDOWS}",
    ),
    "hazard-trees": PageBaseline(
        "trees",
        "hazard trees",
        f"gradient-boosted trees of the hazard in {hazards.INTERVALS} intervals on the interval "
        f"and {window_counts.WINDOWS} (at most the {window_counts.MOST_COLUMNS} counts that most "
        "training sequences have)",
    ),
}
DESCRIPTIONS = {kind: baseline.about for kind, baseline in BASELINES.items()}
HAZARDS = ("hazard-counts", "hazard-trees")  # of times to event
# tuned on the validation split, with the budget of the run
COUNTED = ("counts-logistic", "counts-trees", *HAZARDS)


def count_observed(part: Any) -> Array | None:
    """Events, or observed samples, of each row; None where all windows have the same number."""
    if part.vocabulary:
        return np.asarray(part.lengths())
    if not part.manifest.missing:
        return None
    counted = [
        part.mask(part.rows[start : start + 256]).any(2).sum(1)
        for start in range(0, len(part), 256)
    ]
    return np.concatenate(counted) if counted else np.zeros(0)


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
    test: Any,
    *,
    keep: Path,
    also: Sequence[Path] = (),
    most: int | None = None,
) -> BaselinePredictions | str:
    """Predictions of one baseline (a key of `DESCRIPTIONS`, or one that the data set registers) on
    `test`, a split of `windows` or other windows of their form; or why there are none.

    Training windows (limit, share of the subjects, seed) are those of `windows` that `record` read,
    at most `MOST_TRAINING` of them; `most` windows of `test` are predicted. Predictions are stored
    in `keep`, and found there and in `also`.
    """
    registered = list_measures(windows).get(kind)
    if kind not in list_baselines(windows):
        return "it is for other data"
    choices = record.settings.data
    draws_rows = choices.fraction < 1 or choices.limit is not None
    seed = record.seed if draws_rows else 0  # of all rows the predictions are those of every seed
    settings = count_settings(record) if kind in COUNTED else None
    parts = _limit_parts(windows, choices, seed) | {"test": test}
    rows, training = draw_positions(len(parts["test"]), most), len(parts["train"])
    if not training or not len(rows):
        return "a split holds no windows"
    fitted = count_fitted(windows)
    for name, count in (("train", fitted), ("validation", fitted), ("test", most)):
        parts[name] = draw_windows(parts[name], count)
    inputs = {
        "kind": kind,
        "version": [CACHE_VERSION, registered.version if registered else 0],
        "data": " ".join(dict.fromkeys([windows.fingerprint, test.fingerprint])),
        "fraction": choices.fraction,
        "limit": choices.limit,
        "seed": seed,
        "split": str(test.index["split"][0]),
        "most": [fitted, most],
    }
    if settings:
        inputs["settings"] = settings
    file = f"{kind}-{storage.fingerprint(inputs)[:24]}.parquet"
    prediction = find_prediction(file, (keep, *also), windows.task)
    if prediction is None:
        prediction = fit_and_predict(kind, parts, seed, settings)
        store_prediction(keep / file, prediction)
    return BaselinePredictions(rows, prediction, len(parts["train"]), training, settings)


def _limit_parts(windows: Any, choices: DataConfig, seed: int) -> dict[str, Any]:
    """The windows of training and validation that a run reads."""
    limited = limit_windows(windows, choices.limit, seed)
    return {
        "train": sample_subjects(limited["train"], choices.fraction, seed),
        "validation": limited["validation"],
    }


def draw_windows(part: Any, most: int | None) -> Any:
    """`most` windows of a split, drawn at random; None: all."""
    return part.subset(draw_positions(len(part), most))


def count_fitted(windows: Any) -> int:
    """The most windows of train and of validation that a baseline is fitted on."""
    if windows.vocabulary:
        return MOST_SEQUENCES
    return max(MOST_TRAINING, MOST_SAMPLES // max(windows.length * windows.channels, 1))


def count_settings(record: RunRecord) -> int:
    """How many settings a baseline of a run tries on the validation split."""
    return max(LEAST_SETTINGS, len(record.tuning.trials) if record.tuning else 1)


def fit_and_predict(
    kind: str, parts: Mapping[str, TokenSet], seed: int, settings: int | None = None
) -> Array:
    """Predictions [n, C], or [n] of a regression, for `test`, whose labels are hidden, by the
    method of a baseline fitted on `train` and `validation`.
    """
    train, validation, test = (parts[split] for split in SPLITS)
    if kind in BASELINES:
        choices = {} if settings is None else {"tries": settings}
        config = make_config(BASELINES[kind].method, train, **choices)
    else:
        config = make_config("signal", train, measure=kind)
    rows = MethodRows(train), MethodRows(validation)
    fitted = fit_method(config, MethodFit(*rows, seed))
    return fitted.predict(MethodRows(hide_labels(test)))


def list_baselines(windows: Any) -> dict[str, str]:
    """The fitted baselines of these windows: kind -> description."""
    if windows.task == "survival":
        return {kind: DESCRIPTIONS[kind] for kind in HAZARDS}
    unfit = {"kernels", *HAZARDS} if windows.vocabulary else COUNTED
    fitted = leave_out(DESCRIPTIONS, unfit)
    return fitted | {name: baseline.about for name, baseline in list_measures(windows).items()}


def title_baseline(kind: str) -> str:
    """The printed name of a baseline; its key in scores.json has underscores."""
    if kind in BASELINES:
        return BASELINES[kind].title
    return kind.replace("-", " ").replace("_", " ")


def describe_baseline(kind: str) -> str:
    """What a baseline is, one that a data set registers, too."""
    if kind in DESCRIPTIONS:  # without the import of all data sets
        return DESCRIPTIONS[kind]
    entries = (entry.facts.baselines for entry in registry.datasets.values())
    registered = {baseline.name: baseline.about for baseline in chain.from_iterable(entries)}
    return registered.get(kind, kind)


def is_same_method(record: RunRecord, kind: str) -> bool:
    """Whether a run is of the very method of a baseline."""
    if kind in BASELINES:
        form = getattr(record.settings.model, "form", "windows")  # of counts
        return record.model == BASELINES[kind].method and form == "windows"
    return record.model == "signal" and getattr(record.settings.model, "measure", None) == kind


def predict_baselines(
    record: RunRecord, windows: Any, test: Any, *, folder: Path
) -> tuple[dict[str, tuple[str, BaselinePredictions]], list[str]]:
    """All baselines of a run in `folder`, fitted on its `windows`: key of scores.json ->
    description and predictions of `test`; and a remark for each that there is not.

    Runs beside it on the same windows share their predictions.
    """
    fitted, remarks = {}, []
    beside: list[Path] = []
    if folder.parent.name == "runs":
        folders = sorted(folder.parent.glob(f"*/{FOLDER}"))
        beside = [other for other in folders if other.parent != folder]
    for kind, about in list_baselines(windows).items():
        if is_same_method(record, kind):
            continue
        title = title_baseline(kind)
        try:
            predictions = predict_baseline(
                kind, record, windows, test, keep=folder / FOLDER, also=beside, most=MOST_SCORED
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
) -> tuple[TaskScores, pl.DataFrame] | str:
    """One baseline on the data of a fine-tuned run: its scores and a frame as
    `predictions.parquet`, or why there are none.

    Split, unit of resampling and replicates are those of `scores`; see `predict_baseline`. Raises
    UserError: those of opening the tokens.
    """
    windows = open_windows(scores.data)
    if windows.fingerprint != record.data[0].fingerprint:
        return "the windows of the run no longer exist"
    test, names = windows[scores.split], windows.class_names
    predictions = predict_baseline(kind, record, windows, test, keep=keep, also=also)
    if isinstance(predictions, str):
        return predictions
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
