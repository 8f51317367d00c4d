"""Calibration of a fine-tuned run: temperature and conformal threshold.

It is stored with the run, or made for one person from labelled recordings.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.evaluate import conformal, list_classes, name_unit, parse_predictions
from bitimely_core.evaluate.prediction import Computation
from bitimely_core.evaluate.prediction import predict as predict_windows
from bitimely_core.evaluate.risk_calibration import LEAST, Recalibration, fit_recalibration
from bitimely_core.privacy import share_record
from bitimely_core.run import Run
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import Calibration, Preprocessing
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, read_result_table, write_results
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.channel_maps import ChannelMap
from bitimely_core.tokens.new_recordings import find_recordings
from bitimely_core.tokens.unlabelled import cut_unlabelled, label_texts
from bitimely_core.workflows.prepare import hides_counts

if TYPE_CHECKING:
    from bitimely_core.heads import Head
    from bitimely_core.methods.method_contract import FittedMethod
    from bitimely_core.tokens import Windows

CALIBRATION = "calibration.json"
LEAST_CASES = 20  # labels of each value on which a temperature of several labels is fitted


def fit_calibration(
    task: str,
    prediction: np.ndarray,
    target: np.ndarray,
    subjects: np.ndarray | None,
    *,
    weights: str,
    data: str,
    subject: str = "subject",
) -> Calibration:
    """Temperature with the least log loss on these windows, and the threshold of conformal sets
    with it.

    `prediction` [n, K] probabilities or [n] values, `target` [n]; `subjects` [n], None: of one
    person, each window is a unit. Classes have a temperature where there are units enough for sets.
    Labels of a multi-label task have a temperature and no sets.
    `subject`: word for what they are.
    """
    # they import torch
    from bitimely_core.analyses.reliability import apply_temperature, fit_temperature

    temperature, n_units = None, len(target) if subjects is None else len(np.unique(subjects))
    if task == "multilabel" or (
        task == "classification"
        and n_units >= conformal.LEAST_UNITS
        # where no window is wrong it would be 0, and every window of others certain
        and (prediction.argmax(1) != target).any()
    ):
        temperature = fit_temperature(task, prediction, target)
    threshold = conformal.ConformalThreshold(
        None, "sets are made of classes and values, not of labels"
    )
    if task not in ("multilabel", "survival"):
        if temperature is not None:
            prediction = apply_temperature(task, prediction, temperature)
        scores = conformal.score_windows(task, prediction, target)
        threshold = conformal.find_threshold(scores, subjects, subject=subject)
    return Calibration(
        weights=weights,
        data=data,
        unit="window" if subjects is None else subject,
        units=n_units,
        windows=len(target),
        level=conformal.COVERAGE,
        temperature=temperature,
        threshold=threshold.value,
        undefined_reason=threshold.reason,
    )


def find_calibration(
    run: Run, head: Head | FittedMethod, *, store: bool = True
) -> Calibration | None:
    """The calibration that is stored with the run; else it is fitted on the validation windows of
    the training and, with `store`, stored.

    None where they are not in the workspace, have changed since the training, or hold no rows.
    """
    path = run.folder / CALIBRATION
    if has_result(path) and (stored := Calibration.load(path)).weights == run.record.weights:
        return stored
    calibration = calibrate_run(run, [head])
    if calibration is not None and store and os.access(run.folder, os.W_OK):
        write_results(run.folder, {CALIBRATION: calibration.encode()})
    return calibration


def calibrate_run(run: Run, heads: Sequence[Head | FittedMethod]) -> Calibration | None:
    """The calibration of the mean of `heads` on the validation windows of the training of `run`.

    None as for `find_calibration`.
    """
    try:
        windows = run.windows()
    except UserError as error:
        raise_system_error(error)
        return None
    if windows.fingerprint != run.record.data[0].fingerprint:
        return None
    return calibrate_on_validation(heads, windows, str(run.record.weights))


def calibrate_on_validation(
    heads: Sequence[Head | FittedMethod], windows: Windows, weights: str
) -> Calibration | None:
    """The calibration of the mean of `heads` on the validation windows of a training; None where
    there are none, or too few of any label. Of histories whose small counts are withheld its sizes
    are rounded up.
    """
    rows = windows["validation"]
    if not len(rows):
        return None
    target = rows.targets(None)
    assert target is not None, "a fine-tuned run has labels"
    if windows.task == "multilabel" and min(np.sum(target == 1), np.sum(target == 0)) < LEAST_CASES:
        return None
    predictions = [predict_windows(head, rows) for head in heads]
    fitted = fit_calibration(
        windows.task,
        predictions[0] if len(heads) == 1 else np.mean(predictions, axis=0),
        target,
        rows.subjects(),
        weights=weights,
        data=f"{windows.name}, validation",
        subject=windows.subject_unit,
    )
    return share_record(fitted) if hides_counts(windows) else fitted


def calibrate_folds(run: Run) -> Calibration | None:
    """The calibration of a run over test folds on their pooled predictions: each subject's are by
    the model that was not trained on it. None where they are missing.

    It is that of single models: their mean, which `predict` gives, is a little less confident.
    """
    path, members = run.folder / "predictions.parquet", run.record.members
    if members is None or not has_result(path):
        return None
    frame, scores = read_result_table(path), Scores.load(path.with_name("scores.json"))
    names = list_classes(frame)
    predictions = parse_predictions(scores.task or "", frame, names)
    return fit_calibration(
        scores.task or "",
        predictions.prediction,
        predictions.target,
        predictions.groups,
        weights=storage.fingerprint(list(members.runs)),
        data=f"{scores.data}, pooled test folds",
        subject=name_unit(scores),
    )


def fit_recalibrations(
    head: Head | FittedMethod, rows: Windows, name: str, place: Computation
) -> list[Recalibration | None]:
    """The recalibration of each label on the labels of `rows`, the tokens called `name`; None for a
    label of too few. Raises UserError: class_missing (exit 4) where there is none.
    """
    target = rows.targets(None)
    assert target is not None, "histories of a fine-tuned run have labels"
    risks = predict_windows(head, rows, place)
    fitted, fewest = [], []
    for k in range(risks.shape[1]):
        labelled = np.isfinite(target[:, k])
        y = target[labelled, k].astype(np.float64)
        fitted.append(fit_recalibration(risks[labelled, k], y))
        fewest.append(min(np.sum(y == 1), np.sum(y == 0)))
    if any(fitted):
        return fitted
    problem, hint = f"no label has {LEAST} people with it and {LEAST} without", "Give more people"
    if max(fewest) >= LEAST:
        problem = "the risks of the run are nearly the same for all people, or separate the labels"
        hint = "Train the run for more steps, or give more people"
    raise input_error(
        Reason.CLASS_MISSING,
        problem,
        "expected labels and risks that a logistic regression can be fitted to",
        hint,
        file=name,
        field="--calibrate-on",
    )


def calibrate_on(
    path: Path,
    run: Run,
    head: Head | FittedMethod,
    preprocessing: Preprocessing,
    mapping: ChannelMap,
) -> Calibration:
    """The calibration on one person's own labelled recordings: a file with annotations, a BIDS
    folder with events, or a cache.

    Raises UserError: unmatched_labels (exit 4) where no window has a label, and the faults of the
    files.
    """
    texts = label_texts(preprocessing)
    predictions, targets = [], []
    for recording in find_recordings([path], preprocessing.options, mapping, texts):
        record, name = recording.read(), recording.name
        cut = cut_unlabelled(record, name, preprocessing, labels=True)
        windows = cut.windows
        target = windows.targets(None)
        assert target is not None, "labels were read"
        predictions.append(predict_windows(head, windows, record=cut.record))
        targets.append(target)
    if not targets:
        raise input_error(
            Reason.UNMATCHED_LABELS,
            "no labelled recording there",
            "expected annotations of the run's classes",
            file=str(path),
        )
    return fit_calibration(
        preprocessing.options.task,
        np.concatenate(predictions),
        np.concatenate(targets),
        None,
        weights=str(run.record.weights),
        data=path.name,
    )
