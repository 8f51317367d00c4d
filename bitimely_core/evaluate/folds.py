"""Pooled scores of test folds: each window is predicted by the one run that was not trained on its
subject.

The scores of several models enter one ranking then, which tends to lower AUROC and AUPRC: a fold
with more of a class in its test set has less of it in training. The overlap of the training sets is
not part of the confidence intervals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate
from bitimely_core.errors import Reason, UserError, usage_error
from bitimely_core.evaluate import baselines
from bitimely_core.evaluate.stored_predictions import FOLDER
from bitimely_core.schemas.scores import Scores, TaskScores
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, read_result_table

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows, ScoredRun

FittedBaseline = tuple[TaskScores, "pl.DataFrame"]  # with a frame as `predictions.parquet`

CACHE_VERSION = 6  # of stored scores: raise it where the numbers change
# what the pooled predictions alone do not give
OF_ONE_RUN = ("comparison", "lift", "nights", "events", "risk_groups")


def pool_folds(runs: Sequence[ScoredRun], keep: Path, open_windows: OpenWindows) -> ScoredRun:
    """The runs of several folds as one scored run, which is stored under `keep` without subjects.

    `runs` are those of one row, data set and seed on test sets without a common window. The first
    one decides how they are scored. A single run is returned unchanged.

    Raises UserError: config (exit 2) where two runs score one window, or classes differ; not_found
    without the predictions of a run.
    """
    first = runs[0]
    if len(runs) == 1:
        return first
    files = _find_files(runs)
    settings, hashes = first.scores.settings, list(map(storage.hash_file, files))
    identity = storage.fingerprint([CACHE_VERSION, settings.bootstrap, settings.by, hashes])
    path = keep / f"folds-{identity[:24]}.json"
    if not has_result(path):
        score_folds(runs, join_predictions(runs), open_windows).save(path)
    return first._replace(scores=Scores.load(path), parts=tuple(runs))


def _find_files(runs: Sequence[ScoredRun]) -> list[Path]:
    """The files of the predictions of all folds. Raises UserError: config, not_found (exit 2)."""
    first, files = runs[0], [run.folder / "predictions.parquet" for run in runs]
    for run, file in zip(runs, files, strict=True):
        if not has_result(file):
            wanted = "expected those of a fold"
            raise usage_error("no predictions", wanted, code=Reason.NOT_FOUND, file=str(file))
        if run.scores.task != first.scores.task:
            raise _mismatch_error(first, run, f"{run.scores.task} and {first.scores.task}")
    return files


def join_predictions(runs: Sequence[ScoredRun]) -> pl.DataFrame:
    """The predictions of all folds, one fold after another. Raises UserError: config (exit 2) for
    other columns, or a window in two folds; not_found (exit 2).
    """
    import polars as pl

    frames = list(map(read_result_table, _find_files(runs)))
    for run, frame in zip(runs, frames, strict=True):
        if frame.columns != frames[0].columns:
            raise _mismatch_error(runs[0], run, "other columns")
    joined = pl.concat(frames)
    if joined.select(evaluate.IDENTITY[:2]).is_duplicated().any():
        problem = "a window is in the test sets of two folds"
        raise usage_error(problem, "expected each once", field="folds", file=runs[0].name)
    return joined


def score_folds(
    runs: Sequence[ScoredRun],
    frame: pl.DataFrame,
    open_windows: OpenWindows,
    fitted: Mapping[str, evaluate.ConstantBaseline] | None = None,
) -> Scores:
    """The scores of the predictions of all folds together, in the place of those of the first.

    `fitted`: predictions of further baselines on the same rows.
    """
    scores = runs[0].scores
    constants = {**_join_constants(runs, open_windows), **(fitted or {})}
    pooled = score_pooled(frame, scores, constants)
    remark = (
        f"{len(runs)} test folds together, each window predicted by the model that was not trained "
        "on its subject."
    )
    if "auroc" in pooled.metrics:
        remark += " AUROC and AUPRC rank scores of different models, which tends to lower them."
    changes = {name: getattr(pooled, name) for name in TaskScores.model_fields}
    changes |= dict.fromkeys(OF_ONE_RUN)
    changes |= {"remarks": [remark, *pooled.remarks], "folds": len(runs)}
    # no subject is tested in two folds
    shared = sum(run.scores.subjects_shared_with_training for run in runs)
    return scores.model_copy(update={**changes, "subjects_shared_with_training": shared})


def score_pooled(
    frame: pl.DataFrame, like: Scores, constants: Mapping[str, evaluate.ConstantBaseline]
) -> TaskScores:
    """`evaluate.score` of the content of a `predictions.parquet`, by the task, units and settings
    of the scores `like`; `constants` are predictions on the same rows.
    """
    task, by = like.task or "", like.settings.by
    names = evaluate.list_classes(frame)
    predictions = evaluate.parse_predictions(task, frame, names)
    return evaluate.score(
        task,
        predictions.target,
        predictions.prediction,
        predictions.groups,
        class_names=names,
        baselines={name: constant.prediction for name, constant in constants.items()},
        about={name: constant.about for name, constant in constants.items()},
        bootstrap=like.settings.bootstrap,
        by=by,
        unit=like.unit,
        subject=evaluate.name_unit(like) if by == "subject" else "subject",
    )


def fit_pooled_baseline(
    kind: str, run: ScoredRun, keep: Path, open_windows: OpenWindows
) -> FittedBaseline | str:
    """The scores and predictions of a baseline on each fold of a run as one, scored like the run.

    A text says why there is none. Arguments and errors: as `baselines.fit_baseline`.
    """
    import polars as pl

    fitted = []
    for fold in run.runs:
        baseline = baselines.fit_baseline(
            kind,
            fold.record,
            fold.scores,
            keep,
            open_windows=open_windows,
            also=[fold.folder / FOLDER],
        )
        if isinstance(baseline, str):
            return baseline
        fitted.append(baseline)
    if len(fitted) == 1:
        return fitted[0]
    frame = pl.concat([frame for _, frame in fitted])
    return score_pooled(frame, run.scores, {}), frame


def _join_constants(
    runs: Sequence[ScoredRun], open_windows: OpenWindows
) -> dict[str, evaluate.ConstantBaseline]:
    """Constant predictions for the rows of all folds, each from the training targets of its fold.

    Expected values of a prediction at random are no predictions and are left out.
    """
    joined = defaultdict[str, list[evaluate.ConstantBaseline]](list)
    for run in runs:
        windows: Any = open_windows(run.scores.data)
        train = np.asarray(windows["train"].targets(None)) if len(windows["train"]) else np.zeros(0)
        constants = evaluate.constant_baselines(
            windows.task, train, run.scores.n or 0, windows.class_names
        )
        for name, constant in constants.items():
            joined[name].append(constant)
    return {
        name: constants[0]._replace(prediction=np.concatenate([c.prediction for c in constants]))
        for name, constants in joined.items()
        if len(constants) == len(runs) and constants[0].decisions is None
    }


def _mismatch_error(first: ScoredRun, run: ScoredRun, what: str) -> UserError:
    problem = f"{first.name} and {run.name} differ: {what}"
    return usage_error(problem, "expected folds of one task", field="folds")
