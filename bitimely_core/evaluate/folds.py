"""Test folds scored together: each window by the one run that had not seen its subject, as if all were of one run.

The scores of several models stand in one ranking then. Metrics of ranks (AUROC, AUPRC) are no higher for it, often lower: a fold whose test
set has more of a class has less of it in training. Training sets of folds overlap, which no interval over subjects holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate, storage
from bitimely_core.errors import Reason, UserError, usage_error

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.evaluate.result_table import OpenWindows, ScoredRun

CACHE_VERSION = 1  # of what is kept between calls: raise it where the numbers change


def pool_folds(parts: Sequence[ScoredRun], keep: Path, open_windows: OpenWindows) -> ScoredRun:
    """One scored run of those of several folds; its scores are kept under `keep`, which names no subject. A single one stays as it is.

    Args:
        parts: evaluated runs of one row, data set and seed on test sets without a common window. The first one says how it is scored.
        keep: folder of what was made before.
        open_windows: opens the tokens of that name.

    Raises:
        UserError: config (exit 2) where two runs score one window, or classes differ; not_found without the predictions of a run.
    """
    import polars as pl

    first = parts[0]
    if len(parts) == 1:
        return first
    files = [one.folder / "predictions.parquet" for one in parts]
    for one, file in zip(parts, files, strict=True):
        if not file.is_file():
            raise usage_error("no predictions", "expected those of a fold", code=Reason.NOT_FOUND, file=str(file))
        if one.scores["task"] != first.scores["task"]:
            raise _mismatch_error(first, one, f"{one.scores['task']} and {first.scores['task']}")
    options = first.scores["settings"]
    asked = [CACHE_VERSION, options["bootstrap"], options["by"], [storage.hash_file(file) for file in files]]
    made = keep / f"folds-{storage.fingerprint(asked)[:24]}.json"
    if not made.is_file():
        frames = [pl.read_parquet(file) for file in files]
        for one, frame in zip(parts, frames, strict=True):
            if frame.columns != frames[0].columns:
                raise _mismatch_error(first, one, "other columns")
        frame = pl.concat(frames)
        if frame.select(evaluate.IDENTITY[:2]).is_duplicated().any():
            raise usage_error("a window is in the test sets of two folds", "expected each once", field="folds", file=first.name)
        found = {**first.scores, **score_pooled(first.scores["task"], frame, options, constants=_constant_baselines(parts, open_windows))}
        found["remarks"] = [
            f"{len(parts)} test folds together, each window scored by the model that had not seen its subject. AUROC and AUPRC rank the scores of different models, which tends to "
            "lower them.",
            *found["remarks"],
        ]
        storage.make_folder(keep)
        storage.write_json(made, found)
    return first._replace(scores=json.loads(made.read_bytes()), parts=tuple(parts))


def score_pooled(
    task: str, frame: pl.DataFrame, options: Mapping[str, Any], constants: Mapping[str, tuple[str, Any]] | None = None
) -> dict[str, Any]:
    """`evaluate.score` of a frame as `predictions.parquet`. `constants`: name -> words and predictions on the same rows, beside it."""
    names = evaluate.list_classes(frame)
    said = evaluate.parse_predictions(task, frame, names)
    found = evaluate.score(
        task,
        said.target,
        said.prediction,
        said.groups,
        class_names=names,
        baselines={name: values for name, (_, values) in (constants or {}).items()},
        rows=said.rows,
        bootstrap=options["bootstrap"],
        by=options["by"],
        seed=0,
    )
    for name, (words, _) in (constants or {}).items():
        found["baselines"][name]["about"] = words
    return found


def pool_baseline(each: Sequence[tuple[dict[str, Any], pl.DataFrame]], scores: Mapping[str, Any]) -> tuple[dict[str, Any], pl.DataFrame]:
    """What `baselines.of` gives for each fold, as one: scored as the run of `scores` is."""
    import polars as pl

    if len(each) == 1:
        return each[0]
    frame = pl.concat([frame for _, frame in each])
    return score_pooled(scores["task"], frame, scores["settings"]), frame


def _constant_baselines(parts: Sequence[ScoredRun], open_windows: OpenWindows) -> dict[str, tuple[str, Any]]:
    """What a model that never looks at its input would say of the rows of each part, from the training targets of that part."""
    out: dict[str, tuple[str, list[Any]]] = {}
    for one in parts:
        windows: Any = open_windows(one.scores["data"])
        train = np.asarray(windows["train"].targets(None)) if len(windows["train"]) else np.zeros(0)
        for name, (words, values, decisions) in evaluate.constant_baselines(windows.task, train, one.scores["n"], windows.classes).items():
            if decisions is None:  # expected values have no prediction to put beside the others
                out.setdefault(name, (words, []))[1].append(values)
    return {name: (words, np.concatenate(values)) for name, (words, values) in out.items() if len(values) == len(parts)}


def _mismatch_error(first: ScoredRun, one: ScoredRun, what: str) -> UserError:
    return usage_error(f"{first.name} and {one.name} differ: {what}", "expected folds of one task", field="folds")
