"""Pooled scores of test folds: each window is predicted by the one run that was not trained on its
subject.

The scores of several models enter one ranking then, which tends to lower AUROC and AUPRC: a fold
with more of a class in its test set has less of it in training. The overlap of the training sets is
not part of the confidence intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate, storage
from bitimely_core.errors import Reason, UserError, usage_error
from bitimely_core.records import has_result, read_result_table
from bitimely_core.schemas.scores import EvaluationSettings, Scores, TaskScores

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows, ScoredRun

CACHE_VERSION = 5  # of stored scores: raise it where the numbers change
# what the pooled predictions alone do not give
OF_ONE_RUN = ("comparison", "lift", "nights", "events", "risk_groups")


def pool_folds(parts: Sequence[ScoredRun], keep: Path, open_windows: OpenWindows) -> ScoredRun:
    """The runs of several folds as one scored run, which is stored under `keep` without subjects. A
    single run is returned unchanged.

    `parts` are runs of one row, data set and seed on test sets without a common window. The first
    one decides how they are scored.

    Raises UserError: config (exit 2) where two runs score one window, or classes differ; not_found
    without the predictions of a run.
    """
    import polars as pl

    first = parts[0]
    if len(parts) == 1:
        return first
    files = [one.folder / "predictions.parquet" for one in parts]
    for one, file in zip(parts, files, strict=True):
        if not has_result(file):
            raise usage_error(
                "no predictions", "expected those of a fold", code=Reason.NOT_FOUND, file=str(file)
            )
        if one.scores.task != first.scores.task:
            raise _mismatch_error(first, one, f"{one.scores.task} and {first.scores.task}")
    settings = first.scores.settings
    inputs = [
        CACHE_VERSION,
        settings.bootstrap,
        settings.by,
        [storage.hash_file(file) for file in files],
    ]
    path = keep / f"folds-{storage.fingerprint(inputs)[:24]}.json"
    if not has_result(path):
        frames = [read_result_table(file) for file in files]
        for one, frame in zip(parts, frames, strict=True):
            if frame.columns != frames[0].columns:
                raise _mismatch_error(first, one, "other columns")
        frame = pl.concat(frames)
        if frame.select(evaluate.IDENTITY[:2]).is_duplicated().any():
            raise usage_error(
                "a window is in the test sets of two folds",
                "expected each once",
                field="folds",
                file=first.name,
            )
        found = score_pooled(
            first.scores.task or "",
            frame,
            settings,
            _constant_baselines(parts, open_windows),
            like=first.scores,
        )
        remark = (
            f"{len(parts)} test folds together, each window predicted by the model that was not trained on its subject. AUROC and AUPRC rank "
            "scores of different models, which tends to lower them."
        )
        fields = {name: getattr(found, name) for name in TaskScores.model_fields}
        fields |= dict.fromkeys(OF_ONE_RUN) | {"remarks": [remark, *found.remarks]}
        # no subject is tested in two folds
        shared = sum(one.scores.subjects_shared_with_training for one in parts)
        first.scores.model_copy(update={**fields, "subjects_shared_with_training": shared}).save(
            path
        )
    return first._replace(scores=Scores.load(path), parts=tuple(parts))


def score_pooled(
    task: str,
    frame: pl.DataFrame,
    settings: EvaluationSettings,
    constants: Mapping[str, tuple[str, Any]] | None = None,
    *,
    like: TaskScores | None = None,
) -> TaskScores:
    """`evaluate.score` of the content of a `predictions.parquet`. `constants`: baseline ->
    description and predictions on the same rows.

    Units are those of the scores `like`.
    """
    names = evaluate.list_classes(frame)
    predictions = evaluate.parse_predictions(task, frame, names)
    found = evaluate.score(
        task,
        predictions.target,
        predictions.prediction,
        predictions.groups,
        class_names=names,
        baselines={name: values for name, (_, values) in (constants or {}).items()},
        bootstrap=settings.bootstrap,
        by=settings.by,
        unit=like.unit if like else None,
        subject=evaluate.name_unit(like) if like and settings.by == "subject" else "subject",
    )
    about = {name: words for name, (words, _) in (constants or {}).items()}
    named = {
        name: one.model_copy(update={"about": about.get(name, one.about)})
        for name, one in found.baselines.items()
    }
    return found.model_copy(update={"baselines": named})


def pool_baseline(
    each: Sequence[tuple[TaskScores, pl.DataFrame]], scores: Scores
) -> tuple[TaskScores, pl.DataFrame]:
    """The results of `fit_baseline` on each fold as one, scored like the run of `scores`."""
    import polars as pl

    if len(each) == 1:
        return each[0]
    frame = pl.concat([frame for _, frame in each])
    return score_pooled(scores.task or "", frame, scores.settings, like=scores), frame


def _constant_baselines(
    parts: Sequence[ScoredRun], open_windows: OpenWindows
) -> dict[str, tuple[str, Any]]:
    """Constant predictions for the rows of each fold, from its training targets."""
    out: dict[str, tuple[str, list[Any]]] = {}
    for one in parts:
        windows: Any = open_windows(one.scores.data)
        train = np.asarray(windows["train"].targets(None)) if len(windows["train"]) else np.zeros(0)
        for name, (words, values, decisions) in evaluate.constant_baselines(
            windows.task, train, one.scores.n or 0, windows.classes
        ).items():
            if decisions is None:  # expected values are no predictions
                out.setdefault(name, (words, []))[1].append(values)
    return {
        name: (words, np.concatenate(values))
        for name, (words, values) in out.items()
        if len(values) == len(parts)
    }


def _mismatch_error(first: ScoredRun, one: ScoredRun, what: str) -> UserError:
    return usage_error(
        f"{first.name} and {one.name} differ: {what}", "expected folds of one task", field="folds"
    )
