"""The verb `evaluate`: scores of a run on one split, with predictions, page and comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core import storage
from bitimely_core.config import ObjectiveConfig
from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.evaluate import endpoints, hazard_baselines, verdicts, window_counts
from bitimely_core.evaluate.baselines import (
    MOST_TRAINING,
    BaselinePredictions,
    count_observed,
    draw_positions,
    predict_baselines,
)
from bitimely_core.evaluate.predict import EVALUATION_BATCH, predict
from bitimely_core.page import rename_units
from bitimely_core.privacy import is_small
from bitimely_core.records import has_result, read_result_table
from bitimely_core.report import run_page
from bitimely_core.report.model_card import render_card
from bitimely_core.report.renderer import write_report
from bitimely_core.run import describe_data
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    WITHOUT_FITTED,
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
from bitimely_core.system_errors import attach_result
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import hides_counts, open_run
from bitimely_core.workflows.report import check_margin
from bitimely_core.workspace import find_run_folder

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

Unit = Literal["subject", "window"]
BaselineChoice = Literal["all", "cheap"]
# days on which curves of incidence are computed where small counts are shown, and else
EXACT_POINTS, CURVE_POINTS = 24, 4
SHARED_DIGITS = 2  # of the training score where counts of few people are withheld
OVER_WINDOWS = (
    "Intervals are over windows, not subjects (--by window): "
    "windows of one subject are not independent, so they are too narrow."
)
NOT_COMPARED = "Checksums were not compared (--no-verify)."
Predictions = dict[str, tuple[str, np.ndarray]]  # name -> description and prediction
Columns = dict[str, Any]  # target and prediction, in the order of the rows


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
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score `run` on one split: scores.json, predictions.parquet and report.html in its folder;
    returns the scores.

    A fine-tuned run is scored by its task; a pre-trained one by the held-out loss and loss /
    Var(target) of its objective. Intervals are over subjects (`by="window"` is stamped). A split
    without windows gives null metrics that say why. Of sequences up to prediction times
    `predictions` is written in the schema of MEDS-evaluation, `ids` is the table of the ingest
    (`tokens.tasks`). `baselines`: cheap leaves out those that are fitted (`evaluate.baselines`),
    which is recorded.

    Raises UserError: subject_leakage (4), incomplete (4), integrity (5), config (2).
    """
    from bitimely_core.claims import tasks
    from bitimely_core.train.devices import select_device

    _check_arguments(split, by, baselines, compare, margin, workspace)
    select_device(device)
    opened = open_run(run, workspace, data=data, verify=verify, dry_run=dry_run, progress=progress)
    record, folder, windows = opened.record, opened.folder, opened.windows()
    opened.adapter_for(windows)
    storage.refuse_link(folder)
    if predictions is not None:
        tasks.check_task_run(windows, record.kind, predictions.parent)
    shared = opened.count_shared_subjects(split)
    rows = windows[split]
    n_subjects = len(set(rows.subjects()))
    counts: dict[str, Any] = {"n": len(rows), "n_subjects": n_subjects}
    source = {"run": record.run, "data": windows.name, "split": split}
    if dry_run:
        if hides_counts(windows) and is_small(n_subjects):
            counts = {"n": None, "n_subjects": None}
        return {**source, **counts, "folder": str(folder)}
    settings = EvaluationSettings(
        bootstrap=bootstrap,
        by=by,
        baselines=baselines,
        verified=verify and record.verified,
        model=record.model,
        preset=record.preset,
        checkpoint=record.checkpoint,
    )
    scores = Scores(
        **source,
        **counts,
        settings=settings,
        leak_free=record.leak_free,
        subjects_shared_with_training=shared,
        notices=_list_notices(record, windows, settings, shared, split),
    )
    head = opened.head()
    columns: Columns = {}
    if head is None:
        metrics = _score_objective(
            opened.model(), rows, record.settings.objective, batch_size, device, progress
        )
        scores = scores.model_copy(update={"metrics": metrics})
    else:
        prediction = predict(head, rows, batch_size=batch_size, device=device, progress=progress)
        columns = {"target": rows.targets(None), "prediction": prediction}
        task_scores = _score_task(opened, rows, settings, columns, progress)
        nights = score_endpoints(windows, rows, bootstrap, **columns)
        scores = scores.model_copy(update={**dict(task_scores), **nights})
        scores = scores.model_copy(update={"lift": verdicts.find_lift(scores)})
    training = _score_training(opened, split, batch_size, device, progress)
    scores = scores.model_copy(update={"training": training})
    frame: pl.DataFrame | None = None
    files: dict[str, storage.Content | None] = {}
    with attach_result(lambda: protect_scores(scores, windows).to_json()):
        if head is not None:
            frame = scoring.predictions_frame(
                rows.index, windows.task, windows.class_names, **columns
            )
            files["predictions.parquet"] = storage.encode_parquet(frame)
            if predictions is not None:
                tasks.write_predictions(predictions, rows, prediction, ids)
        if compare is not None:
            comparison = _compare_runs(frame, compare, workspace, windows, scores, margin)
            scores = scores.model_copy(update={"comparison": comparison})
        files["scores.json"] = scores.encode()
        if (printed := protect_scores(scores, windows)) != scores:
            scores = printed
            files[Scores.SHARED] = scores.encode()
        files["model_card.md"] = render_card(folder, record, scores, opened.train_subjects)
        report = write_report(
            folder,
            run_page.evaluation_page(opened, scores, columns),
            others=files,
            gone={Scores.SHARED} - files.keys(),
        )
    return {**scores.to_json(), "report": str(report), "verdict": run_page.verdict_text(scores)}


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


def protect_scores(scores: Scores, windows: Windows) -> Scores:
    """The scores as they are printed."""
    if not isinstance(windows, EventSequences):
        return scores
    from bitimely_core.claims import protected_scores  # with polars

    printed = protected_scores.protect_scores(scores, windows)
    return printed.model_copy(update={"lift": verdicts.find_lift(printed)})


def _list_notices(
    record: RunRecord, windows: Windows, settings: EvaluationSettings, shared: int, split: str
) -> list[str]:
    """Caveats of the run, of its windows and of how it is scored."""
    notices = list(dict.fromkeys([*record.notices, *windows.notices]))
    now, before = describe_data(windows), record.data[0]
    for key, old, new in (
        ("rate", before.rate, now.rate),
        ("reading", before.reading.model_dump(), now.reading.model_dump()),
    ):
        if old != new:
            notices.append(f"The run was trained with {key} {old}; these were made with {new}.")
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


def _score_objective(
    model: Any,
    windows: Windows,
    config: ObjectiveConfig,
    batch_size: int | None,
    device: str,
    progress: Progress | None,
) -> dict[str, MetricValue]:
    """Mean held-out loss and rel of the pre-training objective, weighted by windows, no
    interval.
    """
    import torch

    from bitimely_core import data, objectives
    from bitimely_core.train.devices import select_device

    undefined = MetricValue(undefined_reason="the split has no windows")
    least = config.least_rows
    if len(windows) < least:
        return {"loss": undefined, "rel": undefined}
    place = select_device(device)
    model = model.to(place).eval()
    objective = objectives.get(config)
    batches = data.batches(windows, batch_size or EVALUATION_BATCH, shuffle=False, least=least)
    sums: dict[str, float] = {}
    scored = 0
    with torch.no_grad():
        for step, batch in enumerate(batches(0)):
            out = objective(
                model, data.to_device(batch, place), torch.Generator().manual_seed(step)
            )
            size = len(batch.values)
            scored += size
            for key, value in {"loss": out["loss"], "rel": out["rel"], **out["parts"]}.items():
                sums[key] = sums.get(key, 0.0) + float(value) * size
            if progress is not None:
                progress(f"evaluate {windows.name}", step + 1, batches.steps)
    return {key: MetricValue(value=total / scored) for key, total in sums.items()}


def _score_training(
    opened: Run, split: str, batch_size: int | None, device: str, progress: Progress | None
) -> TrainingScore | None:
    """Scores on at most 5,000 of the windows that the run was trained on; None where it was trained
    on other tokens than those that are scored, or `split` is the training itself.
    """
    from bitimely_core import data

    windows, settings = opened.windows(), opened.record.settings
    trained_on = {part.fingerprint for part in opened.record.data}
    rows = data.limit_windows(windows, settings.data.limit, settings.train.seed)["train"]
    if split == "train" or windows.fingerprint not in trained_on or not len(rows):
        return None
    if opened.record.is_finetuned:
        rows = data.sample_subjects(rows, settings.data.fraction, settings.train.seed)
    total, subjects = len(rows), len(set(rows.subjects()))
    rows = rows.subset(draw_positions(total, MOST_TRAINING))
    head = opened.head()
    if head is None:
        metrics = _score_objective(
            opened.model(), rows, settings.objective, batch_size, device, progress
        )
        return TrainingScore(n=len(rows), total=total, metrics=metrics)
    prediction = predict(head, rows, batch_size=batch_size, device=device, progress=progress)
    target = rows.targets(None)
    assert target is not None, "a fine-tuned run has labels"
    scored = ScoredWindows(target, prediction, rows.subjects())
    metrics = score_windows(windows, scored, {}, None, EvaluationSettings(bootstrap=0)).metrics
    if not hides_counts(windows):
        return TrainingScore(n=len(rows), total=total, metrics=metrics)
    main = scoring.MAIN[windows.task]
    value = metrics[main].value
    if value is None or is_small(subjects):
        return None
    rounded = MetricValue(value=round(value, SHARED_DIGITS), n_defined=None)
    return TrainingScore(n=None, total=None, metrics={main: rounded})


def _score_task(
    opened: Run,
    rows: Windows,
    settings: EvaluationSettings,
    columns: Columns,
    progress: Progress | None,
) -> TaskScores:
    """Scores of a fine-tuned run beside its baselines; those on a part of the windows are compared
    with the run on that part.
    """
    windows, total = opened.windows(), len(rows)
    train_target = windows["train"].targets(None) if len(windows["train"]) else None
    fitted: dict[str, tuple[str, BaselinePredictions]] = {}
    remarks: list[str] = []
    predictions: Predictions = {}
    if train_target is not None and total:
        predictions = predict_shortcuts(windows, rows)
        if settings.baselines == "all":
            split = str(rows.index["split"][0])
            fitted, remarks = predict_baselines(
                opened.record, windows, split, folder=opened.folder, progress=progress
            )
    drawn: Predictions = {}
    for name, (about, baseline) in fitted.items():
        part = predictions if len(baseline.rows) == total else drawn
        part[name] = about, baseline.prediction
    scored = ScoredWindows(columns["target"], columns["prediction"], rows.subjects())
    scores = score_windows(windows, scored, predictions, train_target, settings)
    baselines = dict(scores.baselines)
    if drawn:
        positions = fitted[next(iter(drawn))][1].rows
        on_part = ScoredWindows(*(values[positions] for values in scored))
        note = f", on {len(positions):,} of {total:,} scored windows"
        for name, row in score_windows(windows, on_part, drawn, None, settings).baselines.items():
            baselines[name] = row.model_copy(update={"about": row.about + note})
    for name in baselines.keys() & fitted.keys():
        tried = {"settings": fitted[name][1].settings}
        baselines[name] = baselines[name].model_copy(update=tried)
    return scores.model_copy(
        update={"baselines": baselines, "remarks": [*scores.remarks, *remarks]}
    )


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
    """Clinical endpoints of sleep stages night by night, of the second of two classes as events
    over time, and incidence by predicted risk.
    """
    if not len(rows):
        return {}
    names, options = windows.class_names, windows.options
    if windows.task == "survival":
        points = EXACT_POINTS if options.small_counts else CURVE_POINTS
        groups = scoring.survival.describe_groups(target, prediction, names, points)
        return {"risk_groups": groups}
    if windows.task != "classification" or windows.vocabulary:
        return {}
    classes, unit = prediction.argmax(1), windows.subject_unit
    if endpoints.is_staging(names) and options.epoch is not None:
        nights = endpoints.summarize_nights(
            endpoints.measure_nights(rows.index, target, classes, names, options.epoch), bootstrap
        )
        return {"nights": NightScores.model_validate(rename_units(nights.model_dump(), unit))}
    if len(names) == 2 and rows.index["recording_id"].n_unique() < len(rows):
        step = options.epoch or options.stride / options.rate
        events = endpoints.score_events(rows.index, target, classes, step, bootstrap)
        return {"events": EventScores.model_validate(rename_units(events.model_dump(), unit))}
    return {}


def predict_shortcuts(windows: Any, rows: Any) -> Predictions:
    """Predictions from the number of events or observed samples, and of events for each label from
    the count of the best single code.
    """
    train = windows["train"]
    if not windows.vocabulary:
        train = train.subset(
            np.isin(np.arange(len(train)), draw_positions(len(train), MOST_TRAINING))
        )
    train_lengths, lengths = count_observed(train), count_observed(rows)
    if train_lengths is None or lengths is None:
        return {}
    labels = train.targets(None)
    if windows.task == "survival":
        select = hazard_baselines.select_lengths
        x = {"train": select(train_lengths), "test": select(lengths)}
        y = {"train": labels, "validation": labels[:0]}
        counts = {
            name: window_counts.count_windows(windows, part.rows)[:, -windows.codes :].log1p()
            for name, part in (("train", train), ("test", rows))
        }
        x["validation"] = x["train"][:0]
        by_length = hazard_baselines.predict_from_hazards(x, y, windows.class_names)
        by_code = hazard_baselines.predict_from_code(counts, labels, windows.class_names)
        return _describe_shortcuts(by_length, by_code)
    by_length = scoring.length_baseline(windows.task, train_lengths, labels, lengths)
    if windows.vocabulary:
        return _describe_shortcuts(by_length, _predict_by_code(train, rows, labels))
    if windows.task == "classification":  # classes that the training has not
        by_length = np.pad(by_length, ((0, 0), (0, windows.classes - by_length.shape[1])))
    return _describe_shortcuts(by_length)


def _describe_shortcuts(*predictions: np.ndarray) -> Predictions:
    """Predictions from the length and, of events, from a single code, by their names."""
    names = ("length_only", "single_code")
    about = scoring.scores.ABOUT
    return {name: (about[name], values) for name, values in zip(names, predictions, strict=False)}


def _predict_by_code(train: Any, rows: Any, labels: np.ndarray) -> np.ndarray:
    """Predictions [n, K] of each label from the count of the code with the highest average
    precision on the training.
    """
    from bitimely_core.claims import shortcut_baselines

    codes, counts, columns = train.counts(), rows.counts(), []
    for k, label in enumerate(labels.T):
        labelled = np.isfinite(label)
        precision = [
            shortcut_baselines.average_precision(codes[labelled, code], label[labelled]) or 0.0
            for code in range(codes.shape[1])
        ]
        best = int(np.argmax(precision))
        columns.append(
            scoring.length_baseline(
                "multilabel", codes[:, best], labels[:, k : k + 1], counts[:, best]
            )
        )
    return np.hstack(columns)


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
    path = second / "predictions.parquet"
    stored = Scores()
    if has_result(second / "scores.json"):
        stored = Scores.load(second / "scores.json")
    if not has_result(path) or (stored.data, stored.split) != (windows.name, scores.split):
        raise input_error(
            Reason.INCOMPLETE,
            f"no predictions on {windows.name}, split {scores.split}",
            "expected those of an earlier evaluation",
            f"Run: bitimely evaluate {other} --split {scores.split}",
            file=str(second),
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
