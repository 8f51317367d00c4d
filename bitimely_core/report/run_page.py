"""Pages of a run: training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate, registry
from bitimely_core.evaluate import endpoints
from bitimely_core.evaluate.metrics import NAMES
from bitimely_core.evaluate.result_table import read_curve
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    choose_places,
    compare_baselines,
    compare_models,
    describe_difference,
    describe_lift,
    judge_baselines,
    print_bounds,
)
from bitimely_core.page import (
    Figure,
    HeatMap,
    Hypnogram,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    ScatterPanel,
    ScatterPlot,
    StageTrack,
    Table,
    make_figure,
    make_table,
    rename_units,
)
from bitimely_core.privacy import format_count, is_small, round_message, show_count
from bitimely_core.records import has_result
from bitimely_core.schemas.runs import FinalLosses, Reproduction, RunData, RunRecord
from bitimely_core.schemas.scores import (
    ClassScores,
    Comparison,
    CorrectedDifference,
    EventScores,
    MetricValue,
    NightScores,
    RiskGroups,
    Scores,
    TaskScores,
)
from bitimely_core.train import tuning

if TYPE_CHECKING:
    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

ORDER = ["train", "validation", "test"]
STAMP = {
    True: "leak-free",
    False: "not leak-free: the objective can see its targets",
    None: "without targets",
}
CURVES = (
    "Each point is one logged step; rel is the loss divided by the variance of the target (or the entropy of the labels): 1.0 = no better than "
    "predicting the mean (contrastive objectives: divided by the loss of identical vectors). A validation curve that rises while the training "
    "curve falls indicates overfitting."
)


def stamp_text(stamp: bool | str | None) -> str:
    """`leak_free` of a run in words."""
    return f"leak-free {stamp}" if isinstance(stamp, str) else STAMP[stamp]


def is_from_scratch(record: RunRecord) -> bool:
    """Whether a run was fine-tuned without pre-trained weights."""
    return record.is_finetuned and not (record.source and record.source.weights)


def show_split(data: RunData, split: str, kind: str) -> str:
    """Subjects or windows of a split in a text; of claims withheld where they are few."""
    count: int = getattr(data.audit[split], kind)
    return format_count(
        None if data.vocabulary and not data.small_counts and is_small(count) else count
    )


def list_notices(record: RunRecord) -> list[str]:
    """The notices of a run, of claims without exact counts."""
    exact = not record.data[0].vocabulary or record.data[0].small_counts
    return list(record.notices) if exact else list(map(round_message, record.notices))


def list_reproductions(folder: Path) -> list[str]:
    """A notice where the same training once more gave other digits than the run in `folder`
    (`reproduce`).
    """
    path = folder / "reproduction.json"
    found = Reproduction.load(path) if has_result(path) else None
    if found is None or not (changes := found.list_changes()):
        return []
    where = "; ".join(found.differences) or "the same data, versions and environment"
    return [
        f"Trained again ({where}): {'; '.join(changes)}. Results of one seed vary by that much: one seed cannot decide between two methods."
    ]


def run_facts(record: RunRecord) -> dict[str, str]:
    """Facts at the top of a run's pages."""
    data, settings = record.data[0], record.settings
    per_split = ", ".join(
        f"{s} {show_split(data, s, 'subjects')} subjects / {show_split(data, s, 'windows')} windows"
        for s in ORDER
    )
    shape = f"{data.channels} channels, {data.length} samples at {data.rate:g} Hz"
    if data.vocabulary:
        shape = f"code sequences, the last {data.length} events"
    by_subject = data.split in {"subject", "official"}
    paper = f" (paper: {record.paper_parameters / 1e6:g} M)" if record.paper_parameters else ""
    objective = f"{settings.objective.name} ({stamp_text(record.leak_free)})"
    out = {
        "Data": f"{', '.join(d.name for d in record.data)} ({shape})",
        "Split": f"by {data.split}: {per_split}; 0 shared"
        if by_subject
        else f"{data.split}: {per_split}",
        "Model": f"{record.model}, preset {record.preset}, {settings.model.tokenizer} tokens, {record.parameters:,} parameters{paper}",
        **({"Learning rate": tuning.describe_tuning(record.tuning)} if record.tuning else {}),
        **({"Checkpoint": record.checkpoint.describe()} if record.checkpoint else {}),
        "Seed": str(record.seed),
        "Versions": ", ".join(
            f"{k} {v}" for k, v in record.versions.items() if k in {"bitimely", "torch", "python"}
        ),
        **({"Computed on": record.environment.describe()} if record.environment else {}),
        "Fingerprint of the data": data.fingerprint[:16],
    }
    if record.source is None:
        return out | {"Objective": objective}
    trained_on = ", ".join(d.name for d in record.pretraining_data or ())
    tuned = settings.finetune
    out["Pre-training"] = (
        "none (from scratch)"
        if is_from_scratch(record)
        else f"run {record.source.run} on {trained_on}, {objective}"
    )
    out["Readout"] = (
        f"{tuned.readout} of layer{'s' * (tuned.layers == 'last-two')} {tuned.layers}"
        + (", frozen" if tuned.freeze else "")
    )
    return out


def loss_curves(folder: Path, name: str = "curves", title: str = "Training") -> list[Figure]:
    """The training and validation curves of a run, as loss / Var(target) where it is known, else as
    loss.
    """
    series, key = [], ""
    for split in ("train", "validation"):
        key, x, y = read_curve(folder, split)
        if len(x):
            series.append(Line(split, x, y))
    return (
        [make_figure(name, title, CURVES, LinePlot(series, "optimizer step", key))]
        if series
        else []
    )


def training_page(folder: Path, record: RunRecord, unit: str = "subject") -> Page:
    """The page of a run that has been trained but not evaluated; `unit`: what its subjects are."""
    final = record.final or FinalLosses()
    validation = record.checkpoint or final.validation
    rel = final.rel if validation is None or validation.rel is None else validation.rel
    where = "validation" if final.validation else "training"
    contrastive = (
        not record.is_finetuned
        and registry.objectives[record.settings.objective.name].facts.rows > 1
    )
    reference = "identical vectors for all windows" if contrastive else "predicting the mean"
    page = PageBuilder(f"Run {record.run}")
    page.notice(*list_reproductions(folder), *list_notices(record))
    page.add(*loss_curves(folder))
    page.add_facts(run_facts(record))
    loss = f"; {where} loss is {rel:.3f} of that of {reference}" if rel is not None else ""
    return rename_units(
        page.finish(f"{record.run}: {final.step:,} steps{loss}.", final.model_dump()), unit
    )


def evaluation_page(run: Run, scores: Scores, columns: Mapping[str, npt.NDArray[Any]]) -> Page:
    """The page of an evaluated run: scores beside the baselines, confusion matrix, classes, loss
    curves.

    `columns`: target and prediction of the scored rows; empty for a pre-training.
    """
    windows, source = run.windows(), run.record.source
    page = PageBuilder(f"Scores of {scores.run}")
    page.notice(*list_reproductions(run.folder), *scores.notices, *scores.remarks)
    page.add_facts(run_facts(run.record) | list_lift(scores))
    compared = [_comparison_table(scores.comparison, scores.run)] if scores.comparison else []
    add_score_blocks(page, windows[scores.split], scores, columns, compared)
    page.add(*loss_curves(run.folder))
    if (
        source
        and source.weights
        and has_result((parent := run.folder.parent / source.run) / "metrics.jsonl")
    ):
        page.add(*loss_curves(parent, "pretraining-curves", "Pre-training"))
    return rename_units(page.finish(verdict_text(scores), scores.to_json()), windows.subject_unit)


def add_score_blocks(
    page: PageBuilder,
    rows: Windows,
    scores: Scores,
    columns: Mapping[str, npt.NDArray[Any]],
    compared: Sequence[Table],
) -> None:
    """Figures and tables of scores on the windows `rows`; `columns` as for `evaluation_page`,
    `compared`: tables of paired differences.
    """
    if scores.task and (figure := evaluate.score_figure(scores)):
        page.add(figure)
    page.add(metric_table(scores), *baseline_table(scores), *compared)
    for label, groups in (scores.risk_groups or {}).items():
        page.add(*_risk_blocks(label, groups))
    if scores.by_class:
        page.add(class_table(scores))
    if scores.confusion:
        page.add(confusion_figure(scores.confusion, rows.class_names))
    if rows.task == "classification" and columns and len(columns["target"]):
        page.add(*_hypnogram_figures(rows, columns))
    if scores.nights is not None:
        _add_nights(page, scores.nights, rows, columns)
    if scores.events is not None:
        page.add(_event_table(scores.events))


def _risk_blocks(label: str, found: RiskGroups) -> list[Figure | Table]:
    """Observed incidence by predicted risk: curves, numbers at risk, and calibration at the
    horizons.
    """

    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value

    lines = []
    for group in found.groups:
        shown = [one for one in group.points if one.incidence is not None]
        y, lo, hi = (
            [0.0, *(100 * float(getattr(one, key)) for one in shown)]
            for key in ("incidence", "lo", "hi")
        )
        if shown:
            lines.append(Line(f"{group.name} risk", [0.0, *(one.day for one in shown)], y, lo, hi))
    figure = make_figure(
        f"incidence-{label}",
        f"{label}: who of each risk group had it",
        "Share of people with the event up to a day (%), in groups of equal size by the predicted risk; death without it is a competing event (Aalen and Johansen), bands: 95 % CI. "
        "Curves that lie apart in the order of their names show that the risk sorts people.",
        LinePlot(lines, "days at risk", "with the event, %"),
    )
    every = [point.day for point in found.groups[0].points] if found.groups else []
    days = [
        day
        for k, day in enumerate(every)
        if day in found.horizons or (k + 1) % max(len(every) // 4, 1) == 0
    ]
    kept = [[point for point in group.points if point.day in days] for group in found.groups]
    rows = [
        [group.name, show_count(group.n), *(show_count(point.at_risk) for point in of)]
        for group, of in zip(found.groups, kept, strict=True)
    ]
    caption = "People under observation without event or death behind each day."
    table = make_table(
        f"at-risk-{label}",
        f"{label}: numbers at risk",
        caption,
        ["risk", "at first", *(f"day {day:g}" for day in days)],
        rows,
    )
    calibration = []
    for h, day in enumerate(found.horizons):
        for group in found.groups:
            point = next(one for one in group.points if one.day == day)
            observed = MetricValue(
                value=percent(point.incidence), lo=percent(point.lo), hi=percent(point.hi)
            )
            predicted = percent(group.predicted[h]) if group.predicted else None
            calibration.append(
                [
                    f"{day:g}",
                    group.name,
                    show_count(group.n),
                    show_count(point.events),
                    predicted,
                    observed,
                ]
            )
    caption = "Mean predicted risk against the observed incidence, in %. Calibrated: the predicted risk lies inside the interval of the observed one. A dash: withheld or not defined."
    columns = ["within days", "risk", "people", "events", "predicted", "observed (95 % CI)"]
    curves: list[Figure | Table] = [
        *([figure] if lines else []),
        table,
        make_table(f"calibration-{label}", f"{label}: calibration", caption, columns, calibration),
    ]
    return [*curves, *_calibration_figures(label, found)]


def _calibration_figures(label: str, found: RiskGroups) -> list[Figure]:
    """Predicted against observed risk at each horizon, in tenths of the people; none where all are
    withheld.
    """
    lines = []
    for h, day in enumerate(found.horizons):
        kept = [
            (100 * of.predicted[h], of.points[h])
            for of in found.deciles or []
            if of.predicted and of.points[h].incidence is not None
        ]
        y, lo, hi = (
            [100 * float(getattr(point, key)) for _, point in kept]
            for key in ("incidence", "lo", "hi")
        )
        if kept:
            lines.append(Line(f"within {day:g} days", [x for x, _ in kept], y, lo, hi))
    if not lines:
        return []
    most = max(max([*line.x, *line.y]) for line in lines)
    caption = (
        "Mean predicted risk against the observed incidence (Aalen and Johansen; without deaths one less Kaplan and Meier's), in tenths of the people by the predicted risk; bands: 95 % CI. On the "
        "dashed line the prediction is right, above it too low. Tenths with counts of 1 to 10 people are left out."
    )
    data = LinePlot(
        [*lines, Line("predicted = observed", [0.0, most], [0.0, most], reference=True)],
        "predicted, %",
        "observed, %",
    )
    return [
        make_figure(f"calibration-tenths-{label}", f"{label}: calibration in tenths", caption, data)
    ]


def class_table(scores: TaskScores) -> Table:
    """Scores of every class or label."""
    left_out = {
        "multilabel": {"c_index", "brier"},
        "survival": {"precision", "recall", "f1", "auprc", "base_rate", "unknown"},
    }
    gone = left_out.get(scores.task or "", {"unknown", "c_index", "brier"})
    columns = [name for name in ClassScores.model_fields if name not in gone]
    rows = [
        [
            name,
            *(show_count(getattr(one, c)) if c == "support" else getattr(one, c) for c in columns),
        ]
        for name, one in scores.by_class.items()
    ]
    caption = (
        "Support: number of scored windows of the class. A class without windows has no recall."
    )
    return make_table("classes", "Scores by class", caption, ["class", *columns], rows)


def confusion_figure(confusion: Sequence[Sequence[int]], class_names: Sequence[str]) -> Figure:
    """The confusion matrix."""
    caption = (
        "Row: true class; column: predicted class. Rows sum to the support of the class. Confusion of neighbouring classes is usual; a column that holds all rows is a "
        "classifier that predicts one class."
    )
    names = list(class_names)
    data = HeatMap(
        np.array(confusion, dtype=float), "predicted", "true", row_names=names, column_names=names
    )
    return make_figure("confusion", "Confusion matrix", caption, data)


def main_metric(scores: Scores) -> str:
    """The metric of the verdict: that of the task, or the relative loss of a pre-training."""
    return scores.main or "rel"


def verdict_text(scores: Scores) -> str:
    """The main score with its interval and the baselines; where a baseline is not exceeded, the
    first sentence says so.
    """
    name = main_metric(scores)
    metric, words = scores.metrics.get(name), name.replace("_", " ")
    if metric is None:
        return f"{scores.run}: nothing could be scored."
    if metric.value is None:
        return f"{scores.run}: {words} is undefined on {scores.data} ({metric.undefined_reason})."
    places = find_places(name, metric)
    interval = (
        f"95 % CI {metric.lo:.{places}f} to {metric.hi:.{places}f}"
        if metric.lo is not None
        else "no CI"
    )
    scored = f"{format_count(scores.n)} {scores.split} windows of {evaluate.describe_units(scores)}"
    text = f"{words.capitalize()} {metric.value:.{places}f} ({interval}) on {scored}{describe_baselines(scores, name)}."
    found, printed = judge_baselines(scores, scores.data), PrintedMetric(name, scores.unit)
    first = (
        f"{text} {found.sentence}".strip()
        if found.case in {"exceeds", "none"}
        else f"{found.sentence} {text}"
    )
    unit = evaluate.name_unit(scores)
    compared = [
        describe_difference((scores.run, other), scores.data, d, printed, unit)
        for other, d in compare_models(scores).items()
    ]
    return str(rename_units(" ".join([first, *compared]), unit))


def find_places(name: str, metric: MetricValue) -> int:
    """Decimals of a score: more than three for errors in small units."""
    return (
        choose_places(3, metric.se, metric.value, metric.lo, metric.hi)
        if evaluate.find_unit(name).scaled
        else 3
    )


def list_lift(scores: Scores) -> dict[str, str]:
    """The lift over the best baseline as a fact of a page."""
    metric = PrintedMetric(str(scores.main), scores.unit)
    return (
        {f"Lift in {NAMES[metric.name]} over the best baseline": describe_lift(scores.lift, metric)}
        if scores.lift
        else {}
    )


def describe_baselines(scores: Scores, metric: str) -> str:
    """The end of a sentence on a metric: what the baselines reach; empty without any."""
    places = find_places(metric, scores.metrics.get(metric, MetricValue()))
    reached = [
        f"the {base} baseline reaches {value:.{places}f}"
        for base, value in baseline_values(scores, metric).items()
    ]
    return f"; {' and '.join(reached)}" if reached else ""


def baseline_values(scores: Scores, metric: str) -> dict[str, float]:
    """A metric of the main baselines: majority class; of claims the sequence length, the best
    single code and counts in windows.
    """
    found = {}
    counted = ("window_counts_logistic", "window_counts_trees", "hazard_counts", "hazard_trees")
    for name in ("majority", "length_only", "single_code", *counted):
        value = scores.baselines[name].metrics.get(metric) if name in scores.baselines else None
        if value is not None and value.value is not None:
            found[name.replace("_", "-")] = value.value
    return found


def metric_table(scores: Scores) -> Table:
    """Metrics with standard error and interval beside each baseline."""
    rows = []
    for name, m in scores.metrics.items():
        base = [
            one.metrics[name].value if name in one.metrics else None
            for one in scores.baselines.values()
        ]
        rows.append(
            [name.replace("_", " "), m.value, m.se, m.lo, m.hi, *base, m.undefined_reason or ""]
        )
    caption = f"Standard error and 95 % CI over {evaluate.name_unit(scores)}s (linearised variance, Student's t). A dash: not defined; the remark has the reason."
    columns = [
        "metric",
        "value",
        "standard error",
        "95 % CI lower",
        "upper",
        *scores.baselines,
        "remark",
    ]
    return make_table("metrics", "Scores", caption, columns, rows)


def baseline_table(scores: Scores) -> list[Table]:
    """Each baseline with its interval and the paired difference, Holm-corrected over all
    baselines.
    """
    metric, family, rows = (
        PrintedMetric(str(scores.main), scores.unit),
        compare_baselines(scores),
        [],
    )
    for name, one in scores.baselines.items():
        d = family.get(name, CorrectedDifference())
        corrected = None if d.corrected_lo is None else print_bounds(d, metric)
        difference = (
            None if d.difference is None else metric.fit_difference(d).difference(d.difference)
        )
        rows.append(
            [
                name.replace("_", " "),
                one.metrics.get(metric.name),
                difference,
                corrected,
                d.p_holm,
                one.about,
            ]
        )
    words = NAMES.get(metric.name, "")
    ours = "run" if scores.encoder is None else "encoder"
    caption = (
        f"The same windows, 95 % CI as for the {ours}. Difference: the {ours} less the baseline, paired, of the {words}; all {len(family)} differences are one family with Holm "
        "correction, whose intervals match the tests and are not simultaneous. They speak of this one trained model. A model that does not exceed them shows no benefit of its architecture or pre-training."
    )
    heads = ["baseline", words, f"{ours} less baseline", "corrected 95 % CI", "p, Holm", "method"]
    return [make_table("baselines", "Baselines", caption, heads, rows)] if rows else []


def _comparison_table(comparison: Comparison, run: str) -> Table:
    rows = []
    for name, d in comparison.metrics.items():
        numbers = (
            None if v is None else v * (d.factor or 1) for v in (d.difference, d.se, d.lo, d.hi)
        )
        rows.append([name.replace("_", " "), *numbers, d.unit, d.p])
    caption = (
        "Paired: subject by subject on the same windows. The intervals and p speak of these two trained runs, not of their methods, and are not corrected for the number "
        "of metrics."
        + (
            f" {comparison.sentence}"
            if comparison.margin is not None and comparison.sentence
            else ""
        )
    )
    columns = ["metric", "difference", "standard error", "95 % CI lower", "upper", "unit", "p"]
    return make_table("paired", f"{run} minus {comparison.run}", caption, columns, rows)


def _hypnogram_figures(rows: Windows, columns: Mapping[str, npt.NDArray[Any]]) -> list[Figure]:
    """Predicted beside true stages of the first recording of the split, of at least ten windows."""
    keep = np.flatnonzero((rows.index["recording_id"] == rows.index["recording_id"][0]).to_numpy())
    if len(keep) < 10:
        return []
    target, prediction = (np.asarray(columns[name])[keep] for name in ("target", "prediction"))
    tracks = [StageTrack("scored", target), StageTrack("predicted", prediction.argmax(1))]
    caption = f"The first recording of the split ({len(keep)} windows). Its agreement is not the score; the tables cover all subjects."
    data = Hypnogram(rows.length / rows.rate, tracks, list(rows.class_names))
    return [make_figure("hypnogram", "One recording: predicted and scored", caption, data)]


AGREEMENT = (
    "Bland-Altman agreement over nights: bias is predicted less scored, the limits hold 95 % of the differences of single nights; intervals are over "
    "subjects. Definitions are those of the AASM manual, over the scored windows of a night: wake that the view leaves out is not time in bed here."
)
SHOWN_ENDPOINTS = (
    "total_sleep_time",
    "sleep_efficiency",
    "sleep_onset_latency",
    "wake_after_sleep_onset",
)


def _add_nights(
    page: PageBuilder, found: NightScores, rows: Windows, columns: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Agreement of the clinical endpoints: a table, and the differences of single nights."""
    page.section("Clinical endpoints")
    spread = (
        f", from {found.kappa_range[0]:.2f} to {found.kappa_range[1]:.2f}"
        if found.kappa_range
        else ""
    )
    cells = [[name.replace("_", " "), one.unit, one.nights, one.scored, one.predicted, one.bias, one.lower_limit, one.upper_limit]
             for name, one in found.endpoints.items()]  # fmt: skip
    kappa: list[Any] = ["kappa of a night", "", found.nights, None, None, found.kappa, None, None]
    title = f"Sleep endpoints of {found.nights} nights of {found.subjects} subjects"
    names = [
        "endpoint",
        "unit",
        "nights",
        "scored",
        "predicted",
        "bias",
        "lower limit",
        "upper limit",
    ]
    page.table(
        "endpoints",
        title,
        f"{AGREEMENT} Kappa of a night: its mean over nights{spread}.",
        names,
        [kappa, *cells],
    )
    epoch = float(rows.options.epoch or rows.options.length)
    nights = endpoints.measure_nights(
        rows.index, columns["target"], columns["prediction"].argmax(1), rows.class_names, epoch
    )
    panels = []
    for name in SHOWN_ENDPOINTS:
        scored, predicted = endpoints.pair_endpoint(nights, name).T
        keep = np.isfinite(scored + predicted)
        panels.append(
            ScatterPanel(
                name.replace("_", " "),
                (scored + predicted)[keep] / 2,
                (predicted - scored)[keep],
                [-1] * int(keep.sum()),
            )
        )
    caption = "Each point is a night: across, the mean of the predicted and the scored value; up, predicted less scored. Points around 0 agree."
    page.figure(
        "bland-altman",
        "Differences of single nights",
        caption,
        ScatterPlot(panels, (), "mean of both", "predicted - scored", ticks=True),
    )


def _event_table(found: EventScores) -> Table:
    caption = (
        "Successive windows of the second class are one event; it is found where any predicted event overlaps it, and predicted events that overlap none "
        f"are false alarms: {found.false_alarms:,} in {found.hours:.3g} h. 95 % CI over subjects."
    )
    rows: list[list[Any]] = [
        ["sensitivity", found.events, found.sensitivity],
        ["false alarms an hour", None, found.false_alarms_per_hour],
    ]
    return make_table(
        "events", "Detection of events", caption, ["measure", "events", "value"], rows
    )


def combine_pages(page: Page, others: list[Page], tables: list[Table], title: str) -> Page:
    """`page` with the tables in front and the blocks of `others` behind, each under its own
    title.
    """
    blocks: list[Figure | Table | str] = [*tables, *page.blocks]
    for other in others:
        blocks += [f"{other.title}. {other.verdict}", *other.blocks]
    notices = list(
        dict.fromkeys([*page.notices, *(line for other in others for line in other.notices)])
    )
    return Page(
        title=title,
        verdict=page.verdict,
        notices=notices,
        blocks=blocks,
        facts=page.facts,
        summary=page.summary,
    )


def audit_table(name: str, audit: Mapping[str, Mapping[str, Any]], class_names: list[str]) -> Table:
    """Subjects, windows and windows of each class by split."""
    caption = (
        "No subject is in two splits; normalisation statistics come from the training split only."
    )
    rows = [
        [
            split,
            *map(
                show_count,
                (a["subjects"], a["windows"], *(a["classes"].get(c, 0) for c in class_names)),
            ),
        ]
        for split, a in audit.items()
    ]
    return make_table(
        "audit", f"Data: {name}", caption, ["split", "subjects", "windows", *class_names], rows
    )
