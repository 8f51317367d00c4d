"""The verb `evaluate`: scores of a run on one split, with predictions, page and comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.evaluate import endpoints, risk_calibration, verdicts
from bitimely_core.evaluate.baselines import (
    MOST_TRAINING,
    BaselinePredictions,
    count_observed,
    draw_windows,
    predict_baselines,
)
from bitimely_core.evaluate.prediction import EVALUATION_BATCH, Computation, predict
from bitimely_core.evaluate.scoring import ABOUT
from bitimely_core.evaluate.stored_predictions import predict_run
from bitimely_core.methods import hazards
from bitimely_core.methods.method_contract import MethodFit, MethodRows, fit_method, make_config
from bitimely_core.page import rename_units
from bitimely_core.privacy import EXACT, is_small
from bitimely_core.progress import report_progress
from bitimely_core.report import run_page
from bitimely_core.report.model_card import render_card
from bitimely_core.report.renderer import write_report
from bitimely_core.run import describe_data
from bitimely_core.schemas.reports import Summary
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    WITHOUT_FITTED,
    Baseline,
    Comparison,
    Difference,
    EvaluationSettings,
    EventScores,
    MetricValue,
    NightScores,
    Scores,
    TaskScores,
    TrainingScore,
)
from bitimely_core.store import storage
from bitimely_core.store.records import (
    describe_changes,
    has_result,
    read_result_table,
    refuse_other_manifest,
)
from bitimely_core.store.workspace import find_run_folder
from bitimely_core.system_errors import attach_result
from bitimely_core.tokens.drawing import limit_windows, sample_subjects
from bitimely_core.tokens.splits import EXTERNAL
from bitimely_core.tokens.trained_windows import is_trained_on
from bitimely_core.workflows.prepare import (
    Execution,
    hides_counts,
    open_run,
    prepare_windows,
    share_sizes,
)
from bitimely_core.workflows.report import check_margin
from bitimely_core.workflows.tokenize import apply_vocabulary, prepare_others

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

Unit = Literal["subject", "window"]
BaselineChoice = Literal["all", "cheap"]
# what an evaluation reads of a run; the rest it writes again
SOURCES = ("run.json", "train_subjects.json", "preprocessing.json", "model/")
# days on which curves of incidence are computed where small counts are shown, and else
EXACT_POINTS, CURVE_POINTS = 24, 4
SHARED_DIGITS = 2  # of the training score where counts of few people are withheld
OVER_WINDOWS = (
    "Intervals are over windows, not subjects (--by window): "
    "windows of one subject are not independent, so they are too narrow."
)
EXTERNAL_PEOPLE = (
    "External validation: all people of these data are scored. Their pseudonyms are not those "
    "of the training: whether some are in both cannot be told."
)
EXTERNAL_RECORDINGS = (
    "External validation: all subjects of these data are scored, normalised as the training was. "
    "Whether some of them were in the training cannot be told by their names."
)
TRAINED_PEOPLE = (
    "External validation: all people of these data are scored. The run was trained on some of "
    "them, whose data are the same: scores of new people are likely lower."
)
TEST_SPLIT_OF_OTHERS = (
    "Only the test split of these data is scored, normalised by their own training split. If none "
    "of their people were in the training of the run, tokenize --split external scores them all."
)
WITHOUT_TRAINING = (
    "There are no baselines: they are fitted on the tokens of the training, which are not there."
)
NOT_COMPARED = "Checksums were not compared (--no-verify)."
Predictions = dict[str, tuple[str, np.ndarray]]  # name -> description and prediction
Columns = dict[str, Any]  # target and prediction, in the order of the rows


class FittedBaselines(NamedTuple):
    """What baselines predict on the scored rows."""

    target: np.ndarray | None  # labels of the training; None: there are none
    shortcuts: Predictions
    fitted: dict[str, tuple[str, BaselinePredictions]]  # key of scores.json -> description, them
    remarks: list[str]  # on those that there are not


class ScoredWindows(NamedTuple):
    """The rows of a split, or a part of them."""

    target: np.ndarray  # [n], [n, K]
    prediction: np.ndarray  # [n], [n, K]
    subjects: np.ndarray  # [n]


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    split: str = "test",
    bootstrap: int = 1000,
    by: Unit = "subject",
    compare: str | None = None,
    margin: float | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    predictions: Path | None = None,
    ids: Path | None = None,
    baselines: BaselineChoice = "all",
    calibrate_on: str | None = None,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Score `run` on one split: scores.json, predictions.parquet and report.html in its folder;
    returns the scores.

    A fine-tuned run is scored by its task; a pre-trained one by the held-out loss and loss /
    Var(target) of its objective; of a run over folds or seeds the pooled scores are read. Intervals
    are over subjects (`by="window"` is stamped). A split without windows gives null metrics that
    say why. Of sequences up to prediction times `predictions` is written in the schema of
    MEDS-evaluation, `ids` is the table of the ingest (`tokens.tasks`). `baselines`: cheap leaves
    out those that are fitted (`evaluate.baselines`), which is recorded.

    A run on recordings is scored on all people of another data set, or of another workspace, where
    no tokens of `data` are there (`prepare_others`).

    A run on histories is scored on people with other codes (`data`) by its own vocabulary
    (`apply_vocabulary`), with the calibration of its risks. `calibrate_on` names tokens on whose
    labels they are recalibrated: the validation split where it has rows, else all; where these are
    the scored rows, in five parts, each by the other people.

    Raises UserError: subject_leakage (4), incomplete (4), integrity (5), config (2).
    """
    _check_arguments(split, by, baselines, compare, margin, workspace)
    others = {"--data": data, "--compare": compare, "--predictions": predictions}
    others |= {"--split": split.removeprefix("test"), "--by": by.removeprefix("subject")}
    if pooled := _read_pooled(find_run_folder(run, workspace), others):
        return pooled
    if device != "auto":  # which every machine has
        from bitimely_core.train.devices import select_device  # with torch

        select_device(device)
    if data is not None and not dry_run:
        data = apply_vocabulary(run, prepare_others(run, data, workspace), workspace)
    opened = open_run(run, Execution(workspace, verify=verify, dry_run=dry_run), data)
    record, folder, windows = opened.record, opened.folder, opened.windows()
    opened.adapter_for(windows)
    storage.refuse_link(folder)
    if predictions is not None:
        _check_prediction_times(windows, record.kind, predictions.parent)
    shared = opened.count_shared_subjects(split)
    rows = windows[split]
    source = {"run": record.run, "data": windows.name, "split": split}
    if dry_run:
        return {**source, "folder": str(folder), **share_sizes(rows)}
    settings = EvaluationSettings(
        bootstrap=bootstrap,
        by=by,
        baselines=baselines,
        verified=verify and record.verified,
        model=record.model,
        preset=record.preset,
        checkpoint=record.checkpoint,
        calibrated_on=calibrate_on,
    )
    before = _read_scores(folder)
    scores = Scores(
        **source,
        n=len(rows),
        n_subjects=len(set(rows.subjects())),
        settings=settings,
        leak_free=record.leak_free,
        subjects_shared_with_training=shared,
        notices=[
            *_list_changes(folder, compare, workspace),
            *_describe_others(opened, workspace, split),
            *_list_notices(record, windows, settings, shared, split),
            *_list_replaced(before, windows.name, split, len(rows)),
        ],
    )
    place = Computation(batch_size, device)
    scores, columns = _score_run(opened, rows, scores, workspace, place)
    scores = _add_training_score(opened, scores, before, place)
    with attach_result(lambda: protect_scores(scores, windows).to_json()):
        frame = _make_frame(rows, windows, columns)
        if predictions is not None:
            write = windows.data_kind.write_predictions
            assert write is not None  # as `_check_prediction_times` has seen
            write(predictions, rows, columns["prediction"], ids)
        if compare is not None:
            comparison = _compare_runs(frame, compare, workspace, windows, scores, margin)
            scores = scores.model_copy(update={"comparison": comparison})
        exact, scores = scores, protect_scores(scores, windows)
        report = _write_scores(opened, exact, scores, columns, frame)
    return {"report": str(report), **describe_scores(scores, exact)}


def _make_frame(rows: Windows, windows: Windows, columns: Columns) -> pl.DataFrame | None:
    """The table of predictions; None of a pre-trained run."""
    if not columns:
        return None
    return scoring.predictions_frame(rows.index, windows.task, windows.class_names, **columns)


def _write_scores(
    opened: Run, exact: Scores, shared: Scores, columns: Columns, frame: pl.DataFrame | None
) -> Path:
    """Write the scores of a run with its predictions, card and page in one step; the page's path.
    Card and page show the scores that may be shared.
    """
    files: dict[str, storage.Content | None] = {"scores.json": exact.encode()}
    if frame is not None:
        files["predictions.parquet"] = storage.encode_parquet(frame)
    if shared != exact:
        files[Scores.SHARED] = shared.encode()
    card = render_card(opened.folder, opened.record, shared, opened.train_subjects)
    return write_report(
        opened.folder,
        run_page.evaluation_page(opened, shared, columns),
        others={**files, "model_card.md": card},
        gone={Scores.SHARED} - files.keys(),
    )


def describe_scores(scores: Scores, exact: Scores) -> dict[str, object]:
    """Scores with the verdict, and under `exact` the same where scores are withheld."""
    described = {**scores.to_json(), "verdict": run_page.verdict_text(scores)}
    return described if scores == exact else {**described, EXACT: describe_scores(exact, exact)}


def _score_run(
    opened: Run, rows: Windows, scores: Scores, workspace: Path, place: Computation
) -> tuple[Scores, Columns]:
    """The scores with those of a run on `rows`, and the predictions that they are made of, none of
    a pre-trained run.
    """
    if opened.record.is_finetuned:
        return _score_head(opened, rows, scores, workspace, place)
    metrics = _score_objective(opened, rows, place)
    return scores.model_copy(update={"metrics": metrics}), {}


def _score_head(
    opened: Run, rows: Windows, scores: Scores, workspace: Path, place: Computation
) -> tuple[Scores, Columns]:
    """The scores with those of the predictions of a fine-tuned run, and what they are made of."""
    opened.require_labels()
    settings, windows = scores.settings, opened.windows()
    columns: Columns = {
        "target": rows.targets(None),
        "prediction": predict_run(opened, rows, place),
    }
    trained = _find_trained(opened, workspace)
    task_scores = _score_task(opened, rows, trained, settings, columns)
    nights = score_endpoints(windows, rows, settings.bootstrap, **columns)
    scores = scores.model_copy(update={**dict(task_scores), **nights})
    scores = scores.model_copy(update={"lift": verdicts.find_lift(scores)})
    if opened.record.data[0].vocabulary and windows.task == "multilabel":
        calibrate_on = settings.calibrated_on
        recalibration = _recalibrate(opened, rows, calibrate_on, workspace, place)
        calibrated = risk_calibration.calibrate_labels(
            windows.class_names,
            columns["prediction"],
            columns["target"],
            rows.subjects(),
            **recalibration,
        )
        scores = scores.model_copy(update={"risk_calibration": calibrated})
    return scores, columns


def _read_pooled(folder: Path, others: Mapping[str, object]) -> dict[str, object] | None:
    """The result for a run over folds or seeds, which its training has pooled; None of another run.

    Raises UserError: config (exit 2) for `others`, options of another evaluation; incomplete (4).
    """
    members = RunRecord.load(folder / "run.json").members
    if members is None:
        return None
    if field := next((name for name, value in others.items() if value), None):
        raise usage_error(
            f"{folder.name} pools {members.describe()}, whose test windows train has scored",
            "expected no other evaluation",
            f"Evaluate one of its runs, such as {members.runs[0]}; compare by: bitimely report",
            field=field,
        )
    if not has_result(folder / "scores.json"):
        raise input_error(
            Reason.INCOMPLETE,
            f"not all of {members.describe()} are scored",
            "expected scores.json",
            "Repeat the command that started it: it resumes where it stopped",
            file=str(folder),
        )
    scores = Scores.load(folder / "scores.json")
    verdict = Summary.load(folder / "summary.json").report.verdict
    return {**scores.to_json(), "report": str(folder / "report.html"), "verdict": verdict}


def _check_arguments(
    split: str, by: str, baselines: str, compare: str | None, margin: float | None, workspace: Path
) -> None:
    check_choice("split", split, ["train", "validation", "test"])
    check_choice("unit of --by", by, ["subject", "window"])
    check_choice("choice of --baselines", baselines, ["all", "cheap"])
    check_margin(margin)
    if margin is not None and compare is None:
        raise usage_error(
            "no run to compare with", "--margin needs one", "Add --compare RUN2", field="--margin"
        )
    if compare is not None:
        find_run_folder(compare, workspace)


def _check_prediction_times(windows: Windows, kind: str, folder: Path) -> None:
    """Raises UserError (config, exit 2) where no predictions up to prediction times can be written:
    for other tokens, a run that is not fine-tuned, a `folder` of data.
    """
    refuse_other_manifest(folder)
    has_times = windows.data_kind.write_predictions and getattr(windows.options, "asked", None)
    if kind != "finetune" or not has_times:
        problem = "no prediction times" if kind == "finetune" else "a run without a head"
        expected = "expected a fine-tuned run and sequences of tokenize --task"
        raise usage_error(problem, expected, file=str(windows.folder), field="--predictions")


def _list_changes(folder: Path, compare: str | None, workspace: Path) -> list[str]:
    """Sentences on the altered files of the run in `folder` and of the one it is compared with."""
    changes = describe_changes(folder, SOURCES)
    if compare is not None:
        changes += describe_changes(find_run_folder(compare, workspace))
    return changes


def _read_scores(folder: Path) -> Scores:
    """The scores that an earlier evaluation has stored; empty ones where there are none, or where
    they or what they were made from have changed.
    """
    stored = folder / "scores.json"
    if not has_result(stored) or describe_changes(folder, (stored.name, *SOURCES)):
        return Scores()
    return Scores.load(stored)


def _list_replaced(before: Scores, data: str, split: str, n: int) -> list[str]:
    """A sentence on scores of the run on other windows, which it had `before`."""
    if not before.run or (before.data, before.split, before.n) == (data, split, n):
        return []
    return [
        f"These scores replace those of the run on {before.data} ({before.split}): evaluate it on "
        "them again to have them back, or copy its folder first to keep both."
    ]


def _recalibrate(
    opened: Run, rows: Windows, calibrate_on: str | None, workspace: Path, place: Computation
) -> dict[str, Any]:
    """Arguments of `calibrate_labels`: what the risks are recalibrated by. Raises UserError:
    class_missing (exit 4) where no label can be recalibrated.
    """
    if calibrate_on is None:
        return {}
    from bitimely_core.workflows.calibrate import fit_recalibrations

    name = apply_vocabulary(opened.folder, calibrate_on, workspace)
    windows = prepare_windows(name, Execution(workspace))
    opened.adapter_for(windows)
    others = windows["validation"] if len(windows["validation"]) else windows
    if windows.fingerprint == rows.fingerprint and set(others.rows) & set(rows.rows):
        return {"crossed": True}
    head = opened.head()
    assert head is not None, "only risks are recalibrated"
    return {"fitted": fit_recalibrations(head, others, calibrate_on, place)}


def protect_scores(scores: Scores, windows: Windows) -> Scores:
    """The scores as they are printed."""
    printed: Scores = windows.data_kind.protect_scores(scores, windows)
    if printed is scores:
        return scores
    return printed.model_copy(update={"lift": verdicts.find_lift(printed)})


def _describe_others(run: Run, workspace: Path, split: str) -> list[str]:
    """What is scored of other data than those of the training, and whether the run was trained on
    some of their people: by the data themselves, as names and pseudonyms do not tell it.
    """
    windows = run.windows()
    if windows.split != EXTERNAL:
        scores_part = split == "test" and run.record.is_finetuned and not windows.vocabulary
        return [TEST_SPLIT_OF_OTHERS] if scores_part and _are_others(run, workspace) else []
    homes = (workspace, run.folder.parent.parent)
    if any(is_trained_on(run.find_training(home), windows) for home in homes):
        return [TRAINED_PEOPLE]
    return [EXTERNAL_PEOPLE if windows.vocabulary else EXTERNAL_RECORDINGS]


def _are_others(run: Run, workspace: Path) -> bool:
    """Whether the windows are of another data set than those of the training, or of another
    workspace.
    """
    windows, data = run.windows(), run.record.data
    if windows.fingerprint in {part.fingerprint for part in data}:
        return False
    is_from_here = run.folder.resolve().parent.parent == workspace.resolve()
    return not is_from_here or windows.dataset not in {part.dataset for part in data}


def _list_notices(
    record: RunRecord, windows: Windows, settings: EvaluationSettings, shared: int, split: str
) -> list[str]:
    """Caveats of the run, of its windows and of how it is scored."""
    notices = [*_join_notices(record, windows), *_list_differences(record, windows)]
    if settings.by == "window":
        notices.append(OVER_WINDOWS)
    if shared:
        notices.append(
            f"{shared} subjects of the {split} split were also in the training "
            f"(split: {windows.split})."
        )
    if not settings.verified:
        notices.append(NOT_COMPARED)
    if settings.baselines == "cheap" and record.is_finetuned:
        notices.append(WITHOUT_FITTED)
    if split != "test":
        notices.append(f"These are scores on the {split} split, not on the test split.")
    return [str(rename_units(line, windows.subject_unit)) for line in notices]


def _list_differences(record: RunRecord, windows: Windows) -> list[str]:
    """What of the windows is not as the run was trained."""
    now, before = describe_data(windows), record.data[0]
    return [
        f"The run was trained with {key} {old}; these were made with {new}."
        for key, old, new in (
            ("rate", before.rate, now.rate),
            ("reading", before.reading.model_dump(), now.reading.model_dump()),
        )
        if old != new
    ]


def _join_notices(record: RunRecord, windows: Windows) -> list[str]:
    """Notices of the run and of its windows; exact only where those of these scores are
    protected.
    """
    trained = record.notices if hides_counts(windows) else record.share().notices
    return list(dict.fromkeys([*trained, *windows.notices]))


def _score_objective(opened: Run, windows: Windows, place: Computation) -> dict[str, MetricValue]:
    """Mean held-out loss and rel of the pre-training objective, weighted by windows, no
    interval.
    """
    import torch

    from bitimely_core import data, objectives
    from bitimely_core.train.devices import select_device

    config = opened.record.settings.objective
    undefined = MetricValue(undefined_reason="the split has no windows")
    least = config.least_rows
    if len(windows) < least:
        return {"loss": undefined, "rel": undefined}
    device = select_device(place.device)
    model = opened.model().to(device).eval()
    objective = objectives.get(config)
    batches = data.batches(
        windows, place.batch_size or EVALUATION_BATCH, shuffle=False, least=least
    )
    sums: dict[str, float] = {}
    scored = 0
    with torch.no_grad():
        for step, batch in enumerate(batches(0)):
            out = objective(
                model, data.to_device(batch, device), torch.Generator().manual_seed(step)
            )
            size = len(batch.values)
            scored += size
            for key, value in {"loss": out["loss"], "rel": out["rel"], **out["parts"]}.items():
                sums[key] = sums.get(key, 0.0) + float(value) * size
            report_progress(f"evaluate {windows.name}", step + 1, batches.steps)
    return {key: MetricValue(value=total / scored) for key, total in sums.items()}


def _add_training_score(opened: Run, scores: Scores, before: Scores, place: Computation) -> Scores:
    """The scores with that on the training windows, where others of the same tokens are scored. It
    is a fact of the run: that of `before`, an earlier evaluation, stays.
    """
    trained_on = {part.fingerprint for part in opened.record.data}
    if scores.split == "train" or opened.windows().fingerprint not in trained_on:
        return scores
    training = before.training or _score_training(opened, place)
    return scores.model_copy(update={"training": training})


def _score_training(opened: Run, place: Computation) -> TrainingScore | None:
    """Scores on at most 5,000 of the windows that the run was trained on; None without any."""
    windows, settings = opened.windows(), opened.record.settings
    rows = limit_windows(windows, settings.data.limit, settings.train.seed)["train"]
    if not len(rows):
        return None
    if opened.record.is_finetuned:
        rows = sample_subjects(rows, settings.data.fraction, settings.train.seed)
    total, subjects = len(rows), len(set(rows.subjects()))
    rows = draw_windows(rows, MOST_TRAINING)
    head = opened.head()
    if head is None:
        metrics = _score_objective(opened, rows, place)
        return TrainingScore(n=len(rows), total=total, metrics=metrics)
    prediction = predict(head, rows, place)
    target = rows.targets(None)
    assert target is not None, "a fine-tuned run has labels"
    scored = ScoredWindows(target, prediction, rows.subjects())
    metrics = score_windows(windows, scored, {}, None, EvaluationSettings(bootstrap=0)).metrics
    if not hides_counts(windows):
        return TrainingScore(n=len(rows), total=total, metrics=metrics)
    main = scoring.MAIN[windows.task]
    return _protect_training(main, metrics[main].value, subjects)


def _protect_training(main: str, value: float | None, subjects: int) -> TrainingScore | None:
    """The main score of a training on real people, rounded and without counts; None of few."""
    if value is None or is_small(subjects):
        return None
    rounded = MetricValue(value=round(value, SHARED_DIGITS), n_defined=None)
    return TrainingScore(n=None, total=None, metrics={main: rounded})


def _find_trained(opened: Run, workspace: Path) -> Any:
    """The tokens that baselines are fitted on: those that are scored, or those of the training for
    other people, where a workspace holds them; else None.
    """
    windows = opened.windows()
    if windows.split != EXTERNAL:
        return windows
    homes = (workspace, opened.folder.parent.parent)
    held = map(opened.find_tokens, homes)
    return next((trained for trained in held if trained is not None), None)


def _predict_baselines(
    opened: Run, rows: Windows, trained: Any, settings: EvaluationSettings
) -> FittedBaselines:
    """The baselines of `rows`, fitted on the tokens `trained`."""
    if trained is None:
        return FittedBaselines(None, {}, {}, [WITHOUT_TRAINING])
    train = trained["train"]
    target = train.targets(None) if len(train) else None
    if target is None or not len(rows):
        return FittedBaselines(target, {}, {}, [])
    shortcuts = predict_shortcuts(trained, rows)
    if settings.baselines != "all":
        return FittedBaselines(target, shortcuts, {}, [])
    fitted, remarks = predict_baselines(opened.record, trained, rows, folder=opened.folder)
    return FittedBaselines(target, shortcuts, fitted, remarks)


def _score_task(
    opened: Run, rows: Windows, trained: Any, settings: EvaluationSettings, columns: Columns
) -> TaskScores:
    """Scores of a fine-tuned run beside its baselines, which are fitted on the tokens `trained`;
    those on a part of the windows are compared with the run on that part.
    """
    windows, total = opened.windows(), len(rows)
    train_target, predictions, fitted, remarks = _predict_baselines(opened, rows, trained, settings)
    drawn: Predictions = {}
    for name, (about, baseline) in fitted.items():
        part = predictions if len(baseline.rows) == total else drawn
        part[name] = about, baseline.prediction
    scored = ScoredWindows(columns["target"], columns["prediction"], rows.subjects())
    scores = score_windows(windows, scored, predictions, train_target, settings)
    baselines = dict(scores.baselines)
    if drawn:
        positions = fitted[next(iter(drawn))][1].rows
        baselines |= _score_on_part(windows, scored, positions, drawn, settings)
    for name in baselines.keys() & fitted.keys():
        tried = {"settings": fitted[name][1].settings}
        baselines[name] = baselines[name].model_copy(update=tried)
    return scores.model_copy(
        update={"baselines": baselines, "remarks": [*scores.remarks, *remarks]}
    )


def _score_on_part(
    windows: Windows,
    scored: ScoredWindows,
    positions: np.ndarray,
    drawn: Predictions,
    settings: EvaluationSettings,
) -> dict[str, Baseline]:
    """The baselines that predict the windows at `positions` alone, compared with the run there."""
    part = ScoredWindows(*(values[positions] for values in scored))
    note = f", on {len(positions):,} of {len(scored.prediction):,} scored windows"
    rows = score_windows(windows, part, drawn, None, settings).baselines
    return {name: row.model_copy(update={"about": row.about + note}) for name, row in rows.items()}


def score_windows(
    windows: Windows,
    rows: ScoredWindows,
    baselines: Predictions,
    train_target: np.ndarray | None,
    settings: EvaluationSettings,
) -> TaskScores:
    """The scores of predictions on `rows` beside those of `baselines`, with constants where
    `train_target` holds the labels of the training.
    """
    return scoring.score(
        windows.task,
        rows.target,
        rows.prediction,
        rows.subjects,
        class_names=windows.class_names,
        train_target=train_target,
        baselines={name: prediction for name, (_, prediction) in baselines.items()},
        about={name: about for name, (about, _) in baselines.items()},
        bootstrap=settings.bootstrap,
        by=settings.by,
        unit=windows.target_unit,
        subject=windows.subject_unit,
    )


def score_endpoints(
    windows: Any, rows: Any, bootstrap: int, target: np.ndarray, prediction: np.ndarray
) -> dict[str, Any]:
    """Clinical endpoints of sleep stages night by night, of one of two classes as events over time
    (`endpoints.choose_event`), and incidence by predicted risk.
    """
    if not len(rows):
        return {}
    names, options = windows.class_names, windows.options
    if windows.task == "survival":
        points = EXACT_POINTS if options.small_counts else CURVE_POINTS
        groups = scoring.survival_metrics.describe_groups(target, prediction, names, points)
        return {"risk_groups": groups}
    if windows.task != "classification" or windows.vocabulary or options.points:
        return {}  # points are scored one by one
    classes = prediction.argmax(1)
    if endpoints.is_staging(names) and options.epoch is not None:
        return {"nights": _score_nights(windows, rows, bootstrap, target, classes)}
    if len(names) == 2 and rows.index["recording_id"].n_unique() < len(rows):
        return {"events": _score_events(windows, rows, bootstrap, target, classes)}
    return {}


def _score_nights(
    windows: Any, rows: Any, bootstrap: int, target: np.ndarray, classes: np.ndarray
) -> NightScores:
    """Agreement of hypnograms night by night; `classes`: the predicted stages [n]."""
    measured = endpoints.measure_nights(
        rows.index, target, classes, windows.class_names, windows.options.epoch
    )
    nights = endpoints.summarize_nights(measured, bootstrap)
    return NightScores.model_validate(rename_units(nights.model_dump(), windows.subject_unit))


def _score_events(
    windows: Any, rows: Any, bootstrap: int, target: np.ndarray, classes: np.ndarray
) -> EventScores:
    """Events of one of two classes over time; `classes`: the predicted ones [n]."""
    names, options = windows.class_names, windows.options
    event = endpoints.choose_event(names)
    step = options.epoch or options.stride / options.rate
    events = endpoints.score_events(rows.index, target == event, classes == event, step, bootstrap)
    renamed = rename_units(events.model_dump(), windows.subject_unit)
    return EventScores.model_validate({**renamed, "event": names[event]})


def predict_shortcuts(windows: Any, rows: Any) -> Predictions:
    """Predictions from the number of events or observed samples, and of events for each label from
    the count of the best single code.
    """
    train = windows["train"]
    if not windows.vocabulary:
        train = draw_windows(train, MOST_TRAINING)
    train_lengths, lengths = count_observed(train), count_observed(rows)
    if train_lengths is None or lengths is None:
        return {}
    labels = train.targets(None)
    if windows.task == "survival":
        x = hazards.select_lengths(train_lengths)
        parts, y = (
            {"train": values, "validation": values[:0]} for values in (x, np.asarray(labels))
        )
        fitted = hazards.fit_logistic(parts, y, windows.class_names)
        by_length = hazards.predict_logistic(fitted, hazards.select_lengths(lengths))
    else:
        by_length = scoring.length_baseline(windows.task, train_lengths, labels, lengths)
    if windows.task == "classification":  # classes that the training has not
        by_length = np.pad(by_length, ((0, 0), (0, windows.classes - by_length.shape[1])))
    if not windows.vocabulary:
        return _describe_shortcuts(by_length)
    config = make_config("counts", windows, form="single-code")
    method = fit_method(config, MethodFit(MethodRows(train), MethodRows(windows["validation"]), 0))
    return _describe_shortcuts(by_length, method.predict(MethodRows(rows)))


def _describe_shortcuts(*predictions: np.ndarray) -> Predictions:
    """Predictions from the length and, of events, from a single code, by their names."""
    names = ("length_only", "single_code")
    return {name: (ABOUT[name], values) for name, values in zip(names, predictions, strict=False)}


def _compare_runs(
    first: pl.DataFrame | None,
    other: str,
    workspace: Path,
    windows: Windows,
    scores: Scores,
    margin: float | None,
) -> Comparison:
    """Paired differences of the predictions `first` to those of another run on the same windows."""
    second = find_run_folder(other, workspace)
    path, record = second / "predictions.parquet", second / "scores.json"
    stored = Scores()
    if has_result(record):
        stored = Scores.load(record)
    if not has_result(path) or (stored.data, stored.split) != (windows.name, scores.split):
        raise input_error(
            Reason.INCOMPLETE,
            f"no predictions on {windows.name}, split {scores.split}",
            "expected those of an earlier evaluation",
            f"Run: bitimely evaluate {other} --split {scores.split}",
            file=str(path if has_result(record) else record),
        )
    if first is None:
        raise usage_error(
            "a pre-trained run has no predictions",
            "expected a fine-tuned run",
            "Fine-tune it first",
            field="--compare",
        )
    settings, names = scores.settings, windows.class_names
    frames = (first, read_result_table(path))
    metrics = scoring.compare(
        windows.task,
        *(scoring.parse_predictions(windows.task, frame, names) for frame in frames),
        class_names=names,
        bootstrap=settings.bootstrap,
        by=settings.by,
        unit=windows.target_unit,
        subject=windows.subject_unit,
    ).metrics
    name, pair = scoring.MAIN[windows.task], (scores.run, RunRecord.load(second / "run.json").run)
    main = Difference(**metrics[name].model_dump(exclude={"first", "second"}))
    (d,) = scoring.correct_pairs({"": main}, (1, 1)).values()
    metric = verdicts.PrintedMetric(name, windows.target_unit)
    (d,) = scoring.apply_margins(
        [d], [None if margin is None else margin / metric.factor], [metric.sign]
    )
    sentence = verdicts.describe_difference(
        pair, windows.name, d, metric, scoring.name_unit(scores)
    )
    against = verdicts.describe_margin_of_models(pair, windows.name, d, metric)
    return Comparison(
        run=pair[1],
        metrics=metrics,
        sentence=" ".join(filter(None, [sentence, against])),
        margin=None if d.against_margin is None else d.against_margin.margin,
    )
