"""`evaluate`: scores of a run on one split, with predictions, page and comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

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
)
from bitimely_core.system_errors import attach_result
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import open_run
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
Columns = dict[str, Any]  # target and prediction, in the order of the rows


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
    from bitimely_core.train.devices import select_device

    _check_arguments(split, by, baselines, compare, margin, workspace)
    select_device(device)
    opened = open_run(run, workspace, data=data, verify=verify, dry_run=dry_run, progress=progress)
    record, folder, windows = opened.record, opened.folder, opened.windows()
    opened.adapter_for(windows)
    storage.refuse_link(folder)
    if predictions is not None:
        from bitimely_core.claims import tasks

        tasks.check_task_run(windows, record.kind, predictions.parent)
    shared = opened.count_shared_subjects(split)
    rows = windows[split]
    counts: dict[str, Any] = {
        "run": record.run,
        "data": windows.name,
        "split": split,
        "n": len(rows),
        "n_subjects": len(set(rows.subjects())),
    }
    if dry_run:
        hidden = (
            isinstance(windows, EventSequences)
            and not windows.options.small_counts
            and is_small(counts["n_subjects"])
        )
        return {
            **counts,
            **({"n": None, "n_subjects": None} if hidden else {}),
            "folder": str(folder),
        }
    scores = Scores(
        **counts,
        settings=_describe_settings(
            record, bootstrap, by, baselines, verified=verify and record.verified
        ),
        leak_free=record.leak_free,
        subjects_shared_with_training=shared,
        notices=_list_notices(
            record, windows, by, shared, split, verify, "" if opened.head() is None else baselines
        ),
    )
    columns: Columns = {}
    frame, files = cast("pl.DataFrame | None", None), cast("dict[str, storage.Content | None]", {})
    head = opened.head()
    if head is None:
        metrics = _score_objective(
            opened.model(), rows, record.settings.objective, batch_size, device, progress
        )
        scores = scores.model_copy(update={"metrics": metrics})
    else:
        columns = {
            "target": rows.targets(None),
            "prediction": predict(
                head, rows, batch_size=batch_size, device=device, progress=progress
            ),
        }
        task_scores = _score_task(opened, rows, scores.settings, columns, progress)
        scores = scores.model_copy(
            update={name: getattr(task_scores, name) for name in TaskScores.model_fields}
        )
        scores = scores.model_copy(update=score_endpoints(windows, rows, bootstrap, **columns))
        scores = scores.model_copy(update={"lift": verdicts.find_lift(scores)})
    with attach_result(lambda: protect_scores(scores, windows).to_json()):
        if head is not None:
            frame = scoring.predictions_frame(
                rows.index, windows.task, windows.class_names, **columns
            )
            files["predictions.parquet"] = storage.encode_parquet(frame)
        if predictions is not None and head is not None:
            from bitimely_core.claims import tasks

            tasks.write_predictions(predictions, rows, columns["prediction"], ids)
        if compare is not None:
            scores = scores.model_copy(
                update={
                    "comparison": _compare_runs(frame, compare, workspace, windows, scores, margin)
                }
            )
        files["scores.json"] = scores.encode()
        if (shown := protect_scores(scores, windows)) != scores:
            scores = shown
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


def _describe_settings(
    record: RunRecord, bootstrap: int, by: Unit, baselines: BaselineChoice, *, verified: bool
) -> EvaluationSettings:
    given = EvaluationSettings(bootstrap=bootstrap, by=by, baselines=baselines, verified=verified)
    return given.model_copy(
        update={name: getattr(record, name) for name in ("model", "preset", "checkpoint")}
    )


def protect_scores(scores: Scores, windows: Windows) -> Scores:
    """The scores as they are printed."""
    if not isinstance(windows, EventSequences):
        return scores
    from bitimely_core.claims import protected_scores  # with polars

    shown = protected_scores.protect_scores(scores, windows)
    return shown.model_copy(update={"lift": verdicts.find_lift(shown)})


def _list_notices(
    record: RunRecord,
    windows: Windows,
    by: str,
    shared: int,
    split: str,
    verify: bool,
    baselines: str,
) -> list[str]:
    out = list(record.notices)
    out += [line for line in windows.notices if line not in out]
    now, before = describe_data(windows), record.data[0]
    for key, old, new in (
        ("rate", before.rate, now.rate),
        ("reading", before.reading.model_dump(), now.reading.model_dump()),
    ):
        if old != new:
            out.append(f"The run was trained with {key} {old}; these were made with {new}.")
    if by == "window":
        out.append(
            "Intervals are over windows, not subjects (--by window): windows of one subject are not independent, so they are too narrow."
        )
    if shared:
        out.append(
            f"{shared} subjects of the {split} split were also in the training (split: {windows.split})."
        )
    if not verify or not record.verified:
        out.append("Checksums were not compared (--no-verify).")
    if baselines == "cheap":
        out.append(WITHOUT_FITTED)
    if split != "test":
        out.append(f"These are scores on the {split} split, not on the test split.")
    return [str(rename_units(line, windows.subject_unit)) for line in out]


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

    undefined = MetricValue(undefined_reason="the split has no windows")
    least = config.least_rows
    if len(windows) < least:
        return {"loss": undefined, "rel": undefined}
    from bitimely_core.train.devices import select_device

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
    windows = opened.windows()
    train_target = windows["train"].targets(None) if len(windows["train"]) else None
    fitted, remarks = cast("dict[str, tuple[str, BaselinePredictions]]", {}), list[str]()
    if settings.baselines == "all" and train_target is not None and len(rows):
        split = str(rows.index["split"][0])
        fitted, remarks = predict_baselines(
            opened.record, windows, split, folder=opened.folder, progress=progress
        )

    def score(
        at: np.ndarray | slice, predictions: dict[str, np.ndarray], constants: np.ndarray | None
    ) -> TaskScores:
        return scoring.score(
            windows.task,
            columns["target"][at],
            columns["prediction"][at],
            rows.subjects()[at],
            class_names=windows.class_names,
            train_target=constants,
            baselines=predictions,
            about={name: about for name, (about, _) in fitted.items()},
            bootstrap=settings.bootstrap,
            by=settings.by,
            unit=windows.target_unit,
            subject=windows.subject_unit,
        )

    complete = {
        name: one.prediction for name, (_, one) in fitted.items() if len(one.rows) == len(rows)
    }
    shortcuts = predict_shortcuts(windows, rows) if train_target is not None and len(rows) else {}
    found = score(slice(None), {**shortcuts, **complete}, train_target)
    if drawn := {name: one for name, (_, one) in fitted.items() if name not in complete}:
        at = next(iter(drawn.values())).rows
        part = score(at, {name: one.prediction for name, one in drawn.items()}, None).baselines
        note = f", on {len(at):,} of {len(rows):,} scored windows"
        part = {
            name: one.model_copy(update={"about": one.about + note}) for name, one in part.items()
        }
        found = found.model_copy(update={"baselines": {**found.baselines, **part}})
    tried = {
        k: one.model_copy(update={"settings": fitted[k][1].settings}) if k in fitted else one
        for k, one in found.baselines.items()
    }
    return found.model_copy(update={"baselines": tried, "remarks": [*found.remarks, *remarks]})


def score_endpoints(
    windows: Any, rows: Any, bootstrap: int, target: np.ndarray, prediction: np.ndarray
) -> dict[str, Any]:
    """Clinical endpoints of sleep stages night by night, of the second of two classes as events
    over time, and incidence by predicted risk.
    """
    if windows.task == "survival" and len(rows):
        points = EXACT_POINTS if windows.options.small_counts else CURVE_POINTS
        return {
            "risk_groups": scoring.survival.describe_groups(
                target, prediction, windows.class_names, points
            )
        }
    if windows.task != "classification" or windows.vocabulary or not len(rows):
        return {}
    names, options, named = windows.class_names, windows.options, prediction.argmax(1)
    if endpoints.is_staging(names) and options.epoch is not None:
        nights = endpoints.summarize_nights(
            endpoints.measure_nights(rows.index, target, named, names, options.epoch), bootstrap
        )
        return {
            "nights": NightScores.model_validate(
                rename_units(nights.model_dump(), windows.subject_unit)
            )
        }
    if len(names) == 2 and rows.index["recording_id"].n_unique() < len(rows):
        step = options.epoch if options.epoch is not None else options.stride / options.rate
        events = endpoints.score_events(rows.index, target, named, step, bootstrap)
        return {
            "events": EventScores.model_validate(
                rename_units(events.model_dump(), windows.subject_unit)
            )
        }
    return {}


def predict_shortcuts(windows: Any, rows: Any) -> dict[str, np.ndarray]:
    """Predictions from the number of events or observed samples, and of events for each label from
    the count of the best single code.
    """
    from bitimely_core.claims import shortcut_baselines

    train = windows["train"]
    if not windows.vocabulary:
        train = train.subset(
            np.isin(np.arange(len(train)), draw_positions(len(train), MOST_TRAINING))
        )
    lengths, own = count_observed(train), count_observed(rows)
    if lengths is None or own is None:
        return {}
    labels = train.targets(None)
    if windows.task == "survival":
        x = {
            "train": hazard_baselines.select_lengths(lengths),
            "test": hazard_baselines.select_lengths(own),
        }
        held = {"validation": x["train"][:0]}
        y = {"train": labels, "validation": labels[:0]}
        parts = (("train", train), ("test", rows))
        counts = {
            name: window_counts.count_windows(windows, part.rows)[:, -windows.codes :].log1p()
            for name, part in parts
        }
        return {
            "length_only": hazard_baselines.predict_from_hazards(
                {**x, **held}, y, windows.class_names
            ),
            "single_code": hazard_baselines.predict_from_code(counts, labels, windows.class_names),
        }
    out = {"length_only": scoring.length_baseline(windows.task, lengths, labels, own)}
    if windows.vocabulary:
        codes, counts, single = train.counts(), rows.counts(), []
        for k, label in enumerate(labels.T):
            known = np.isfinite(label)
            precision = [
                shortcut_baselines.average_precision(codes[known, c], label[known]) or 0.0
                for c in range(codes.shape[1])
            ]
            best = int(np.argmax(precision))
            single.append(
                scoring.length_baseline(
                    "multilabel", codes[:, best], labels[:, k : k + 1], counts[:, best]
                )
            )
        out["single_code"] = np.hstack(single)
    elif windows.task == "classification":
        out["length_only"] = np.pad(
            out["length_only"], ((0, 0), (0, windows.classes - out["length_only"].shape[1]))
        )
    return out


def _compare_runs(
    first: pl.DataFrame | None,
    other: str,
    workspace: Path,
    windows: Windows,
    own: Scores,
    margin: float | None,
) -> Comparison:
    """Paired differences of the predictions `first` to those of another run on the same windows."""
    second = find_run_folder(other, workspace)
    path = second / "predictions.parquet"
    scores = Scores.load(second / "scores.json") if has_result(second / "scores.json") else Scores()
    if not has_result(path) or (scores.data, scores.split) != (windows.name, own.split):
        raise input_error(
            Reason.INCOMPLETE,
            f"no predictions on {windows.name}, split {own.split}",
            "expected those of an earlier evaluation",
            f"Run: bitimely evaluate {other} --split {own.split}",
            file=str(second),
        )
    if first is None:
        raise usage_error(
            "a pre-trained run has no predictions",
            "expected a fine-tuned run",
            "Fine-tune it first",
            field="--compare",
        )
    settings, names = own.settings, windows.class_names
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
    name, pair = scoring.MAIN[windows.task], (own.run, RunRecord.load(second / "run.json").run)
    main = Difference(**metrics[name].model_dump(exclude={"first", "second"}))
    (d,) = scoring.correct_pairs({"": main}, (1, 1)).values()
    metric = verdicts.PrintedMetric(name, windows.target_unit)
    (d,) = scoring.apply_margins(
        [d], [None if margin is None else margin / metric.factor], [metric.sign]
    )
    sentence = verdicts.describe_difference(pair, windows.name, d, metric, scoring.name_unit(own))
    against = verdicts.describe_margin_of_models(pair, windows.name, d, metric)
    return Comparison(
        run=pair[1],
        metrics=metrics,
        sentence=" ".join(filter(None, [sentence, against])),
        margin=None if d.against_margin is None else d.against_margin.margin,
    )
