"""The page of a run, before and after its evaluation: facts, scores beside baselines, loss curves,
and the sentence that it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, registry
from bitimely_core.config import ModelConfig, describe_tokens
from bitimely_core.evaluate.metrics import NAMES, is_lower_better
from bitimely_core.evaluate.result_table import read_curves
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    choose_places,
    compare_models,
    describe_difference,
    describe_lift,
    judge_baselines,
)
from bitimely_core.page import (
    Figure,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    Table,
    make_table,
    rename_units,
)
from bitimely_core.privacy import format_count, show_count
from bitimely_core.report.score_blocks import add_score_blocks, comparison_table
from bitimely_core.schemas.runs import FinalLosses, Reproduction, RunData, RunRecord
from bitimely_core.schemas.scores import Baseline, MetricValue, Scores
from bitimely_core.store.records import has_result
from bitimely_core.train import tuning
from bitimely_core.types import count_nouns

if TYPE_CHECKING:
    from bitimely_core.evaluate.result_table import ScoredRun
    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

ORDER = ["train", "validation", "test"]
SHOWN_VERSIONS = {"bitimely", "torch", "python"}
STAMP = {
    True: "leak-free",
    False: "not leak-free: the objective can see its targets",
    None: "without targets",
}
CURVES = (
    "Each point is one logged step; rel is the loss divided by the variance of the target (or the "
    "entropy of the labels): 1.0 = no better than predicting the mean (contrastive objectives: "
    "divided by the loss of identical vectors). A validation curve that rises while the training "
    "curve falls indicates overfitting."
)
# of `Scores.baselines`, those that a sentence on the scores names
MAIN_BASELINES = (
    "majority",
    "length_only",
    "single_code",
    "window_counts_logistic",
    "window_counts_trees",
    "hazard_counts",
    "hazard_trees",
)


# ---- facts


def stamp_text(stamp: bool | str | None) -> str:
    """`leak_free` of a run in words."""
    return f"leak-free {stamp}" if isinstance(stamp, str) else STAMP[stamp]


def name_parent(record: RunRecord) -> str | None:
    """The run whose weights a fine-tuning began with, if any."""
    return record.source.run if record.source and record.source.weights else None


def is_from_scratch(record: RunRecord) -> bool:
    """Whether a run was fine-tuned without pre-trained weights."""
    return record.is_finetuned and name_parent(record) is None


def list_reproductions(folder: Path) -> list[str]:
    """A notice where the same training once more gave other digits than the run in `folder`
    (`reproduce`).
    """
    path = folder / "reproduction.json"
    if not has_result(path):
        return []
    reproduction = Reproduction.load(path)
    changes = "; ".join(reproduction.list_changes())
    place = "; ".join(reproduction.differences) or "the same data, versions and environment"
    notice = (
        f"Trained again ({place}): {changes}. Results of one seed vary by that much: one seed "
        "cannot decide between two methods."
    )
    return [notice] if changes else []


def list_versions(record: RunRecord) -> list[str]:
    """The versions of bitimely, torch and Python that a run was computed with."""
    versions = record.versions.items()
    return [f"{name} {version}" for name, version in versions if name in SHOWN_VERSIONS]


def run_facts(record: RunRecord) -> dict[str, str]:
    """Facts at the top of a run's pages."""
    facts = {**_describe_data(record), "Model": _describe_model(record)}
    if record.tuning:
        facts["Learning rate"] = tuning.describe_tuning(record.tuning)
    if record.checkpoint:
        facts["Checkpoint"] = record.checkpoint.describe()
    facts["Seed"] = str(record.seed)
    facts["Versions"] = ", ".join(list_versions(record))
    if record.environment:
        facts["Computed on"] = record.environment.describe()
    facts["Fingerprint of the data"] = record.data[0].fingerprint[:16]
    return facts | _describe_pretraining(record)


def _describe_model(record: RunRecord) -> str:
    """The model with its size; a method with its settings."""
    if record.is_method:
        fields = registry.methods[record.model].facts.config.model_fields.keys()
        names = sorted(fields - ModelConfig.model_fields.keys())
        settings = (f"{name} {getattr(record.settings.model, name, None)}" for name in names)
        numbers = f"{record.parameters:,} numbers"
        return ", ".join([f"{record.model} (no network)", *settings, numbers])
    parameters = f"{record.parameters:,} parameters"
    if record.paper_parameters:
        parameters += f" (paper: {record.paper_parameters / 1e6:g} M)"
    tokens = describe_tokens(record.settings.model, record.data[0].rate)
    return f"{record.model}, preset {record.preset}, {tokens}, {parameters}"


def _describe_data(record: RunRecord) -> dict[str, str]:
    """The data sets of a run, and how the first of them is split."""
    data = record.share().data[0]
    shape = f"{data.channels} channels, {data.length} samples at {data.rate:g} Hz"
    if data.vocabulary:
        shape = f"code sequences, the last {data.length} events"
    counts = ", ".join(
        f"{split} {format_count(data.audit[split].subjects)} subjects"
        f" / {format_count(data.audit[split].windows)} windows"
        for split in ORDER
    )
    split = f"{data.split}: {counts}"
    if data.split in {"subject", "official"}:
        split = f"by {split}; 0 shared"
    return {"Data": f"{_join_names(record.data)} ({shape})", "Split": split}


def _join_names(data: Sequence[RunData]) -> str:
    return ", ".join(part.name for part in data)


def _describe_pretraining(record: RunRecord) -> dict[str, str]:
    """The objective of a pre-training; of a fine-tuning what it started from, and its readout."""
    settings = record.settings
    if record.is_method:
        return {}
    objective = f"{settings.objective.name} ({stamp_text(record.leak_free)})"
    if not record.is_finetuned:
        return {"Objective": objective}
    pretraining = "none (from scratch)"
    if parent := name_parent(record):
        trained_on = _join_names(record.pretraining_data or ())
        pretraining = f"run {parent} on {trained_on}, {objective}"
    layers = settings.finetune.layers
    readout = f"{settings.finetune.readout} of layer{'s' * (layers == 'last-two')} {layers}"
    frozen = ", frozen" if settings.finetune.freeze else ""
    names = ", ".join(settings.finetune.augment) or "none"
    scales = settings.finetune.label_scales
    if "stretch" in settings.finetune.augment and scales in {"rate", "duration"}:
        names += f" (the label is a {scales} and follows the stretch)"
    return {"Pre-training": pretraining, "Readout": readout + frozen, "Augmentation": names}


# ---- pages


def loss_curves(folder: Path, name: str = "curves", title: str = "Training") -> list[Figure]:
    """The training and validation curves of a run, as loss / Var(target) where it is known, else as
    loss.
    """
    key, curves = read_curves(folder)
    lines = [Line(split, *curve) for split, curve in curves.items()]
    plot = LinePlot(lines, "optimizer step", key)
    return [Figure(name, title, CURVES, plot)] if lines else []


def training_page(folder: Path, record: RunRecord, unit: str = "subject") -> Page:
    """The page of a run that has been trained but not evaluated; `unit`: what its subjects are."""
    final = record.final or FinalLosses()
    page = PageBuilder(f"Run {record.run}")
    page.notice(*list_reproductions(folder), *record.share().notices)
    page.add(*loss_curves(folder))
    page.add_facts(run_facts(record))
    trained = count_nouns(final.step, "step")
    if record.is_method:
        trained = f"{record.model}, fitted at once"
    verdict = f"{record.run}: {trained}{_describe_loss(record, final)}."
    return rename_units(page.finish(verdict, final.model_dump()), unit)


def _describe_loss(record: RunRecord, final: FinalLosses) -> str:
    """The end of a sentence: the relative loss, in words; empty where it is not known."""
    validation = record.checkpoint or final.validation
    rel = final.rel if validation is None or validation.rel is None else validation.rel
    if rel is None:
        return ""
    split = "validation" if final.validation else "training"
    objective = registry.objectives[record.settings.objective.name].facts
    is_contrastive = objective.rows > 1 and not record.is_finetuned
    reference = "identical vectors for all windows" if is_contrastive else "predicting the mean"
    return f"; {split} loss is {rel:.3f} of that of {reference}"


def evaluation_page(run: Run, scores: Scores, columns: Mapping[str, npt.NDArray[Any]]) -> Page:
    """The page of an evaluated run: scores beside the baselines, confusion matrix, classes, loss
    curves.

    `columns`: target and prediction of the scored rows; empty for a pre-training.
    """
    windows, parent = run.windows(), name_parent(run.record)
    page = PageBuilder(f"Scores of {scores.run}")
    page.notice(*list_reproductions(run.folder), *scores.notices, *scores.remarks)
    page.add_facts(run_facts(run.record))
    _add_lift(page, scores)
    compared = [comparison_table(scores.comparison, scores.run)] if scores.comparison else []
    add_score_blocks(page, windows[scores.split], scores, columns, compared)
    page.add(*loss_curves(run.folder))
    if parent:
        page.add(*loss_curves(run.folder.parent / parent, "pretraining-curves", "Pre-training"))
    return rename_units(page.finish(verdict_text(scores), scores.to_json()), windows.subject_unit)


def _add_lift(page: PageBuilder, scores: Scores) -> None:
    """How much the run exceeds its best baseline, as a fact."""
    if scores.lift is not None:
        metric = PrintedMetric(str(scores.main), scores.unit)
        lift = describe_lift(scores.lift, metric)
        page.fact(f"Lift in {NAMES[metric.name]} over the best baseline", lift)


def folds_page(
    record: RunRecord,
    scores: Scores,
    rows: Windows,
    columns: Mapping[str, npt.NDArray[Any]],
    runs: Sequence[ScoredRun],
) -> Page:
    """The page of all test folds together: as that of one run, with a row and a curve a fold.

    `columns`: target and prediction of `rows`, which are those of all folds.
    """
    page = PageBuilder(f"Scores of {scores.run}")
    page.notice(*scores.notices, *scores.remarks)
    subjects = format_count(record.share().data[0].audit["test"].subjects)
    pooled = {
        "Data": _describe_data(record)["Data"],
        "Split": f"{len(runs)} folds by subject, each of {subjects} subjects is tested once",
        "Fingerprint of the data": record.data[0].fingerprint[:16],
    }
    page.add_facts({**run_facts(runs[0].record), **pooled})
    _add_lift(page, scores)
    add_score_blocks(page, rows, scores, columns, [_fold_table(runs)])
    if not record.is_method:  # which is fitted at once
        lines = []
        for number, run in enumerate(runs, 1):
            key, curves = read_curves(run.folder)
            lines.append(Line(f"fold {number}", *curves.get("train", np.empty((2, 0)))))
        plot = LinePlot(lines, "optimizer step", key)
        page.figure("curves", "Training of each fold", CURVES, plot)
    return rename_units(page.finish(verdict_text(scores), scores.to_json()), rows.subject_unit)


def _fold_table(runs: Sequence[ScoredRun]) -> Table:
    """What each fold was trained and tested on, and its scores."""
    names = list(runs[0].scores.metrics)
    table = []
    for number, run in enumerate(runs, 1):
        audit = run.record.share().data[0].audit
        people = [show_count(audit[split].subjects) for split in ORDER]
        values = [run.scores.metrics[name].value for name in names]
        table.append([str(number), run.name, *people, run.scores.n, *values])
    columns = ["fold", "run", *(f"{split} subjects" for split in ORDER), "test windows"]
    return make_table(
        "folds",
        "Each fold by itself",
        "Folds differ in their subjects; the spread between them is no standard error. The scores "
        "above are of all folds together.",
        [*columns, *map(evaluate.name_metric, names)],
        table,
    )


# ---- the sentence on the scores


def main_metric(scores: Scores) -> str:
    """The metric of the verdict: that of the task, or the relative loss of a pre-training."""
    return scores.main or "rel"


def find_places(name: str, metric: MetricValue) -> int:
    """Decimals of a score: more than three for errors in small units."""
    if not evaluate.find_unit(name).scaled:
        return 3
    return choose_places(3, metric.se, metric.value, metric.lo, metric.hi)


def verdict_text(scores: Scores) -> str:
    """The main score with its interval and the baselines; where a baseline is not exceeded, the
    first sentence says so.
    """
    name = main_metric(scores)
    metric, words = scores.metrics.get(name), evaluate.name_metric(name)
    if metric is None:
        return f"{scores.run}: nothing could be scored."
    if metric.value is None:
        return f"{scores.run}: {words} is undefined on {scores.data} ({metric.undefined_reason})."
    unit, printed = evaluate.name_unit(scores), PrintedMetric(name, scores.unit)
    verdict, places = judge_baselines(scores, scores.data), find_places(name, metric)
    interval = "no CI"
    if metric.lo is not None:
        interval = f"95 % CI {metric.lo:.{places}f} to {metric.hi:.{places}f}"
    scored = f"{format_count(scores.n)} {scores.split} windows of {evaluate.describe_units(scores)}"
    text = (
        f"{evaluate.name_metric(name, first=True)} {metric.value:.{places}f} ({interval}) "
        f"on {scored}"
        f"{describe_baselines(scores, name)}."
    )
    sentences = [verdict.sentence, text]
    if verdict.case in {"exceeds", "none"}:
        sentences = [text, verdict.sentence]
    sentences += [
        describe_difference((scores.run, other), scores.data, difference, printed, unit)
        for other, difference in compare_models(scores).items()
    ]
    return str(rename_units(" ".join(filter(None, sentences)), unit))


def describe_baselines(scores: Scores, metric: str) -> str:
    """The end of a sentence on a metric: what the best baseline reaches; empty without any."""
    best = scores.find_best_baseline(metric, lower=is_lower_better(metric))
    if best is None:
        return ""
    places = find_places(metric, scores.metrics.get(metric, MetricValue()))
    return f"; the best baseline, {best.name}, reaches {best.value:.{places}f}"


def baseline_values(scores: Scores, metric: str) -> dict[str, float]:
    """A metric of the main baselines: majority class; of claims the sequence length, the best
    single code and counts in windows.
    """
    values = {}
    for name in MAIN_BASELINES:
        baseline = scores.baselines.get(name, Baseline())
        value = baseline.metrics.get(metric, MetricValue()).value
        if value is not None:
            values[name.replace("_", "-")] = value
    return values
