"""The figures and tables of a page of scores: metrics beside baselines, classes, risk groups,
nights and events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.evaluate import endpoints
from bitimely_core.evaluate.metrics import NAMES
from bitimely_core.evaluate.verdicts import PrintedMetric, compare_baselines, print_bounds
from bitimely_core.formats.wfdb_annotations import BEATS
from bitimely_core.page import (
    Figure,
    HeatMap,
    Hypnogram,
    Line,
    LinePlot,
    PageBuilder,
    PointPlot,
    ScatterPanel,
    ScatterPlot,
    StageTrack,
    Table,
    Trace,
    make_table,
    make_tables,
)
from bitimely_core.privacy import show_count
from bitimely_core.report.page_text import scale_number
from bitimely_core.schemas.scores import (
    ClassScores,
    Comparison,
    CorrectedDifference,
    EventScores,
    LabelCalibration,
    MetricValue,
    NightScores,
    RiskGroups,
    RiskPoint,
    Scores,
    TaskScores,
)

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.tokens import Windows

AGREEMENT = (
    "Bland-Altman agreement over nights: bias is predicted less scored, the limits hold 95 % of "
    "the differences of single nights; intervals are over subjects. Definitions are those of the "
    "AASM manual, over the scored windows of a night: wake that the view leaves out is not time in "
    "bed here."
)
NO_GROUPS = (
    "no groups of risk are shown. A third would have fewer than 11 people, or counts of 1 to 10 "
    "people could be computed from it."
)
SHOWN_ENDPOINTS = (
    "total_sleep_time",
    "sleep_efficiency",
    "sleep_onset_latency",
    "wake_after_sleep_onset",
)
STRETCH = 12  # points that a figure shows
TRAINING = "training windows"  # a column
UNDEFINED = " A dash: not defined; the remark has the reason."
# task -> columns of the table of classes that it does not have
RISK_CALIBRATION = (
    "Slope: that of a logistic regression of the label on the log odds of the risk; 1 is right, "
    "below 1 the risks are too extreme. Intercept: with the slope fixed at 1; 0 is right, above 0 "
    "the risks are too low. 95 % CI over subjects. Recalibrated: with both fitted on the data that "
    "--calibrate-on names."
)
ABSENT_SCORES = {
    "multilabel": {"c_index", "brier"},
    "survival": {"precision", "recall", "f1", "auprc", "base_rate", "unknown"},
}


def add_score_blocks(
    page: PageBuilder,
    rows: Windows,
    scores: Scores,
    columns: Mapping[str, npt.NDArray[Any]],
    compared: Sequence[Table],
) -> None:
    """Figures and tables of scores on the windows `rows`.

    Args:
        page: to which they are added.
        rows: the scored windows.
        scores: of a run or of vectors.
        columns: `target` and `prediction` of the rows; empty for a pre-training.
        compared: tables of paired differences.
    """
    figure = evaluate.score_figure(scores) if scores.task else None
    if figure:
        page.add(figure)
    page.add(metric_table(scores), *baseline_table(scores), *compared)
    for label, groups in (scores.risk_groups or {}).items():
        _add_groups(page, label, groups)
    if scores.by_class:
        page.add(class_table(scores))
    if scores.risk_calibration:
        columns_, lines = list_calibration(scores.risk_calibration)
        page.table("calibration", "Calibration of the risks", RISK_CALIBRATION, columns_, lines)
    if scores.confusion:
        _add_confusion(page, scores.confusion, list(rows.class_names))
    _add_courses(page, rows, scores, columns)


def _add_courses(
    page: PageBuilder, rows: Windows, scores: Scores, columns: Mapping[str, npt.NDArray[Any]]
) -> None:
    """What depends on the order of windows in time: hypnograms, nights and events."""
    if rows.task == "classification" and len(columns.get("target", ())):
        draw = _draw_points if rows.options.points else _hypnogram_figures
        page.add(*draw(rows, columns))
    if scores.nights is not None:
        _add_nights(page, scores.nights, rows, columns)
    if scores.events:
        _add_events(page, scores.events, scores.events.event or rows.class_names[1])


def _add_confusion(
    page: PageBuilder, confusion: Sequence[Sequence[float]], names: Sequence[str]
) -> None:
    page.figure(
        "confusion",
        "Confusion matrix",
        "Row: true class; column: predicted class. Rows sum to the support of the class. "
        "Confusion of neighbouring classes is usual; a column that holds all rows is a "
        "classifier that predicts one class.",
        HeatMap(
            np.array(confusion, dtype=float),
            "predicted",
            "true",
            row_names=names,
            column_names=names,
        ),
    )


def _add_events(page: PageBuilder, events: EventScores, name: str) -> None:
    page.table(
        "events",
        f"Detection of {name}",
        f"Successive windows of {name} are one event; it is found where any predicted event "
        "overlaps it, and predicted events that overlap none are false alarms: "
        f"{events.false_alarms:,} in {events.hours:.3g} h. 95 % CI over subjects.",
        ["measure", "events", "value"],
        [
            ["sensitivity", events.events, events.sensitivity],
            ["false alarms an hour", None, events.false_alarms_per_hour],
        ],
    )


# ---- metrics and baselines


def metric_table(scores: Scores) -> Table:
    """Metrics with standard error and interval beside those on training windows and of each
    baseline.
    """
    training: dict[str, list[float | None]] = {}
    if scores.training is not None:
        values = scores.training.metrics
        training = {name: [values.get(name, MetricValue()).value] for name in scores.metrics}
    has_remark = any(metric.undefined_reason for metric in scores.metrics.values())
    rows = []
    for name, metric in scores.metrics.items():
        baselines = [
            baseline.metrics.get(name, MetricValue()).value
            for baseline in scores.baselines.values()
        ]
        numbers = (metric.value, metric.se, metric.lo, metric.hi, *training.get(name, []))
        remark = [metric.undefined_reason or ""] if has_remark else []
        rows.append([evaluate.name_metric(name), *numbers, *baselines, *remark])
    columns = ["metric", "value", "standard error", "95 % CI lower", "upper"]
    columns += [TRAINING] if training else []
    return make_table(
        "metrics",
        "Scores",
        f"Standard error and 95 % CI over {evaluate.name_unit(scores)}s (linearised variance, "
        f"Student's t).{UNDEFINED if has_remark else ''}"
        f"{describe_training_score(scores)}",
        [*columns, *map(evaluate.name_metric, scores.baselines), *["remark"][:has_remark]],
        rows,
    )


def describe_training_score(scores: Scores) -> str:
    """What the scores on training windows are of, as the end of a caption; empty without any."""
    score = scores.training
    if score is None:
        return ""
    counts = "" if score.n is None else f" ({score.n:,} of {score.total:,})"
    return (
        f" {TRAINING.capitalize()}: the same weights on windows that the run was trained on"
        f"{counts}, without augmentation. Far better there than here: the model has learned its "
        "training people."
    )


def baseline_table(scores: Scores) -> list[Table]:
    """Each baseline with its interval and the paired difference, Holm-corrected over all
    baselines.
    """
    metric, family = PrintedMetric(str(scores.main), scores.unit), compare_baselines(scores)
    rows = []
    for name, baseline in scores.baselines.items():
        d = family.get(name, CorrectedDifference())
        difference = corrected = None
        if d.difference is not None:
            difference = metric.fit_difference(d).difference(d.difference)
        if d.corrected_lo is not None:
            corrected = print_bounds(d, metric)
        value = baseline.metrics.get(metric.name)
        words = name.replace("_", " ")
        rows.append([words, value, difference, corrected, d.p_holm, baseline.about])
    words = NAMES.get(metric.name, "")
    trained = f"these {scores.folds} trained models" if scores.folds else "this one trained model"
    model = "run" if scores.encoder is None else "encoder"
    return make_tables(
        "baselines",
        "Baselines",
        f"The same windows, 95 % CI as for the {model}. Difference: the {model} less the baseline, "
        f"paired, of the {words}; all {len(family)} differences are one family with Holm "
        "correction, whose intervals match the tests and are not simultaneous. They speak of "
        f"{trained}. A model that does not exceed them shows no benefit of its architecture or "
        "pre-training.",
        ["baseline", words, f"{model} less baseline", "corrected 95 % CI", "p, Holm", "method"],
        rows,
    )


def comparison_table(comparison: Comparison, run: str) -> Table:
    """The paired differences of a run to another one, metric by metric."""
    rows = []
    for name, d in comparison.metrics.items():
        factor = d.factor or 1
        numbers = (scale_number(number, factor) for number in (d.difference, d.se, d.lo, d.hi))
        rows.append([evaluate.name_metric(name), *numbers, d.unit, d.p])
    caption = (
        "Paired: subject by subject on the same windows. The intervals and p speak of these two "
        "trained runs, not of their methods, and are not corrected for the number of metrics."
    )
    if comparison.margin is not None and comparison.sentence:
        caption += f" {comparison.sentence}"
    columns = ["metric", "difference", "standard error", "95 % CI lower", "upper", "unit", "p"]
    return make_table("paired", f"{run} minus {comparison.run}", caption, columns, rows)


def class_table(scores: TaskScores) -> Table:
    """Scores of every class or label."""
    absent = ABSENT_SCORES.get(scores.task or "", {"unknown", "c_index", "brier"})
    columns = [name for name in ClassScores.model_fields if name not in absent]
    rows = []
    for name, row in scores.by_class.items():
        counted = row.model_copy(update={"support": show_count(row.support)})
        rows.append([name, *(getattr(counted, column) for column in columns)])
    caption = (
        "Support: number of scored windows of the class. A class without windows has no recall."
    )
    return make_table(
        "classes", "Scores by class", caption, ["class", *map(evaluate.name_metric, columns)], rows
    )


def list_calibration(labels: Mapping[str, LabelCalibration]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the calibration of each label, before and after a recalibration."""
    rows = []
    for name, label in labels.items():
        for words, part in ((name, label), (f"{name}, recalibrated", label.recalibrated)):
            if part is not None:
                shares = (part.observed, part.predicted)
                rows.append([words, *shares, part.slope, part.intercept, part.brier])
    return ["label", "observed", "mean risk", "slope", "intercept", "Brier score"], rows


# ---- risk groups


def _add_groups(page: PageBuilder, label: str, groups: RiskGroups) -> None:
    """Incidence and calibration by predicted risk, or why they are not shown."""
    if not groups.groups:
        page.text(f"{label}: {NO_GROUPS}")
        return
    page.add(*_incidence_figures(label, groups), _at_risk_table(label, groups))
    page.add(_calibration_table(label, groups), *_calibration_figures(label, groups))


def _draw_incidence(name: str, x: Sequence[float], points: Sequence[RiskPoint]) -> Line:
    """Observed incidence in % with its band, where it is known."""
    y, lo, hi = (
        [100 * float(getattr(point, key)) for point in points] for key in ("incidence", "lo", "hi")
    )
    return Line(name, x, y, lo, hi)


def _incidence_figures(label: str, groups: RiskGroups) -> list[Figure]:
    """A curve for each risk group; no figure where all are withheld."""
    start = RiskPoint(day=0.0, at_risk=None, events=None, incidence=0.0, lo=0.0, hi=0.0)
    lines = []
    for group in groups.groups:
        points = [point for point in group.points if point.incidence is not None]
        if points:
            points = [start, *points]
            days = [point.day for point in points]
            lines.append(_draw_incidence(f"{group.name} risk", days, points))
    figure = Figure(
        f"incidence-{label}",
        f"{label}: who of each risk group had it",
        "Share of people with the event up to a day (%), in groups of equal size by the predicted "
        "risk; death without it is a competing event (Aalen and Johansen), bands: 95 % CI. Curves "
        "that lie apart in the order of their names show that the risk sorts people.",
        LinePlot(lines, "days at risk", "with the event, %"),
    )
    return [figure] if lines else []


def _at_risk_table(label: str, groups: RiskGroups) -> Table:
    """People under observation at the horizons and at about four days more."""
    days = [point.day for point in groups.groups[0].points]
    quarter = max(len(days) // 4, 1)
    days = sorted({*groups.horizons, *days[quarter - 1 :: quarter]} & set(days))
    rows = []
    for group in groups.groups:
        at_risk = [point.at_risk for point in group.points if point.day in days]
        rows.append([group.name, *map(show_count, (group.n, *at_risk))])
    return make_table(
        f"at-risk-{label}",
        f"{label}: numbers at risk",
        "People under observation without event or death behind each day.",
        ["risk", "at first", *(f"day {day:g}" for day in days)],
        rows,
    )


def _calibration_table(label: str, groups: RiskGroups) -> Table:
    """Predicted and observed risk of each group at each horizon."""
    rows = []
    for h, day in enumerate(groups.horizons):
        for group in groups.groups:
            point = next(point for point in group.points if point.day == day)
            observed = MetricValue(
                value=scale_number(point.incidence, 100),
                lo=scale_number(point.lo, 100),
                hi=scale_number(point.hi, 100),
            )
            predicted = 100 * group.predicted[h] if group.predicted else None
            counts = map(show_count, (group.n, point.events))
            rows.append([f"{day:g}", group.name, *counts, predicted, observed])
    return make_table(
        f"calibration-{label}",
        f"{label}: calibration",
        "Mean predicted risk against the observed incidence, in %. Calibrated: the predicted risk "
        "lies inside the interval of the observed one. A dash: withheld or not defined.",
        ["within days", "risk", "people", "events", "predicted", "observed (95 % CI)"],
        rows,
    )


def _calibration_figures(label: str, groups: RiskGroups) -> list[Figure]:
    """Predicted against observed risk at each horizon, in tenths of the people; none where all are
    withheld.
    """
    lines = []
    for h, day in enumerate(groups.horizons):
        predicted, points = [], []
        for tenth in groups.deciles or []:
            point = tenth.points[h]
            if tenth.predicted and point.incidence is not None:
                predicted.append(100 * tenth.predicted[h])
                points.append(point)
        if points:
            lines.append(_draw_incidence(f"within {day:g} days", predicted, points))
    most = max((max(*line.x, *line.y) for line in lines), default=0.0)
    if not most:  # nobody had it, and none was predicted
        return []
    diagonal = Line("predicted = observed", [0.0, most], [0.0, most], reference=True)
    figure = Figure(
        f"calibration-tenths-{label}",
        f"{label}: calibration in tenths",
        "Mean predicted risk against the observed incidence (Aalen and Johansen; without deaths "
        "one less Kaplan and Meier's), in tenths of the people by the predicted risk; bands: 95 % "
        "CI. On the dashed line the prediction is right, above it too low. Tenths with counts of 1 "
        "to 10 people are left out.",
        LinePlot([*lines, diagonal], "predicted, %", "observed, %"),
    )
    return [figure]


# ---- nights and events


def _hypnogram_figures(rows: Windows, columns: Mapping[str, npt.NDArray[Any]]) -> list[Figure]:
    """Predicted beside true stages of the first recording of the split, of at least ten windows in
    a row.
    """
    keep = np.flatnonzero((rows.index["recording_id"] == rows.index["recording_id"][0]).to_numpy())
    target, prediction = (np.asarray(columns[name])[keep] for name in ("target", "prediction"))
    tracks = [StageTrack("scored", target), StageTrack("predicted", prediction.argmax(1))]
    figure = Figure(
        "hypnogram",
        "One recording: predicted and scored",
        f"The first recording of the split ({len(keep)} windows). Its agreement is not the score; "
        "the tables cover all subjects.",
        Hypnogram(rows.length / rows.rate, tracks, list(rows.class_names)),
    )
    return [figure] if len(keep) >= 10 else []


def _draw_points(rows: Windows, columns: Mapping[str, npt.NDArray[Any]]) -> list[Figure]:
    """True and predicted classes of some successive points, below the signal around them."""
    target, prediction = columns["target"], columns["prediction"].argmax(1)
    chosen = choose_stretch(rows.index, target, prediction)
    starts, length = rows.index["start"].to_numpy()[chosen], rows.length
    values = join_windows(starts, rows.values(rows.rows[chosen])[:, :, 0], rows.rate)
    are_beats = all(name in BEATS or "beat" in name.lower() for name in rows.class_names)
    points, channel = "beats" if are_beats else "points", rows.channel_names[0]
    plot = PointPlot(
        times=starts + length / rows.rate / 2,
        true=target[chosen],
        predicted=prediction[chosen],
        classes=rows.class_names,
        signal=Trace(channel, values),
        start=float(starts[0]),
        rate=rows.rate,
    )
    right = int(np.sum(plot.true == plot.predicted))
    caption = (
        f"{len(chosen)} successive {points} of one recording, {right} of them right. Of all such "
        f"stretches with several true classes it is the one with the median share of right {points}"
        f", the first among equals. The times of {points} are given, and the model names their "
        "classes. Missed: of the class of the row, but called another. Extra: called so, but of "
        "another. The signal is the first channel as the model reads it, in its windows of "
        f"{length / rows.rate:g} s."
    )
    title = f"{points.capitalize()}: true and predicted"
    return [Figure("points", title, caption, plot)]


def choose_stretch(
    index: pl.DataFrame, target: npt.NDArray[Any], prediction: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Positions of successive points with the median share of right classes, among stretches with
    several true classes, where there are any.
    """
    stretches = [
        recording[first : first + STRETCH]
        for recording in endpoints.list_recordings(index)
        for first in range(0, len(recording), STRETCH)
    ]
    mixed = [stretch for stretch in stretches if len(set(target[stretch].tolist())) > 1]
    stretches = mixed or stretches
    shares = [float(np.mean(target[part] == prediction[part])) for part in stretches]
    order = sorted(range(len(stretches)), key=shares.__getitem__)
    return stretches[order[(len(order) - 1) // 2]]


def join_windows(
    starts: npt.NDArray[Any], windows: npt.NDArray[Any], rate: float
) -> npt.NDArray[Any]:
    """The signal of windows [n, T] that begin at ascending seconds; NaN between them."""
    places = np.rint((starts - starts[0]) * rate).astype(int)
    signal = np.full(places[-1] + windows.shape[1], np.nan)
    for place, window in zip(places.tolist(), windows, strict=True):
        signal[place : place + len(window)] = window
    return signal


def _add_nights(
    page: PageBuilder, scores: NightScores, rows: Windows, columns: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Agreement of the clinical endpoints: a table, and the differences of single nights."""
    page.section("Clinical endpoints")
    page.table(
        "night-kappa",
        f"Agreement of the stages of a night, {scores.nights} nights",
        "Cohen's kappa of each night; the mean has its interval over subjects.",
        ["mean kappa of a night", "lowest", "highest"],
        [[scores.kappa, *(scores.kappa_range or (None, None))]],
    )
    lines: list[list[Any]] = []
    for name, endpoint in scores.endpoints.items():
        means = (endpoint.scored, endpoint.predicted)
        agreement = (endpoint.bias, endpoint.lower_limit, endpoint.upper_limit)
        lines.append([name.replace("_", " "), endpoint.unit, endpoint.nights, *means, *agreement])
    counts = ("endpoint", "unit", "nights", "scored", "predicted")
    page.table(
        "endpoints",
        f"Sleep endpoints of {scores.nights} nights of {scores.subjects} subjects",
        AGREEMENT,
        [*counts, "bias", "lower limit", "upper limit"],
        lines,
    )
    epoch = float(rows.options.epoch or rows.options.length)
    stages = columns["prediction"].argmax(1)
    nights = endpoints.measure_nights(
        rows.index, columns["target"], stages, rows.class_names, epoch
    )
    panels = []
    for name in SHOWN_ENDPOINTS:
        scored, predicted = endpoints.pair_endpoint(nights, name).T
        keep = np.isfinite(scored + predicted)
        mean, difference = (scored + predicted)[keep] / 2, (predicted - scored)[keep]
        panels.append(ScatterPanel(name.replace("_", " "), mean, difference, [-1] * len(mean)))
    page.figure(
        "bland-altman",
        "Differences of single nights",
        "Each point is a night: across, the mean of the predicted and the scored value; up, "
        "predicted less scored. Points around 0 agree.",
        ScatterPlot(panels, (), "mean of both", "predicted − scored", ticks=True),
    )
