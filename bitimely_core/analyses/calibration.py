"""Calibration, overall and by subject: reliability, confusion, classes, subjects, nights and the
learning curve of a fine-tuned model.

Of predictions with probability 0.8, eight in ten should be right. Windows are binned by the
probability of the predicted class (labels: of each label); the expected calibration error (ECE) is
the mean over windows of |share correct - mean probability| of their bin. It is never 0, because
bins of few windows vary by chance. It is therefore shown beside the ECE of a perfectly calibrated
model with the same probabilities (labels drawn from them), and the ECE after temperature scaling
fitted on the validation split. The verdict is that of the gap, the mean probability less the share
correct; of several labels the gaps are one family with Holm correction.

Legend: n rows, K classes or labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import plain_features
from bitimely_core.analyses.plain_features import format_metric
from bitimely_core.analyses.reliability import (
    Reliability,
    ReliabilityByName,
    ReliabilityCurve,
    apply_temperature,
    bin_means,
    correct_gaps,
    describe_bound,
    estimate_reliability,
    fit_temperature,
)
from bitimely_core.errors import Reason, UserError, usage_error
from bitimely_core.evaluate import conformal
from bitimely_core.evaluate.prediction import Computation
from bitimely_core.evaluate.prediction import predict_rows as predict_network
from bitimely_core.evaluate.verdicts import count_units
from bitimely_core.methods.method_contract import FittedMethod, MethodRows
from bitimely_core.page import (
    BarPlot,
    HeatMap,
    Hypnogram,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    StageTrack,
)
from bitimely_core.privacy import Sharing
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import CorrectedDifference, MetricValue, Scores, TaskScores
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import Windows
from bitimely_core.tokens.sets import require_plain_labels

Array = npt.NDArray[Any]

SUBJECTS = 40  # that are shown as bars
EPOCHS = 10  # fewest windows of a recording that is shown as a night
PREDICTED_CLASS = "class that the model names"  # a key of the summary


def predict_rows(head: Any, windows: Windows, rows: Array, label: str, device: str) -> Array:
    """Predictions of a fine-tuned model or fitted method for `rows`: probabilities [n, K] or values
    [n].
    """
    if isinstance(head, FittedMethod):
        part = windows.subset(np.isin(windows.rows, rows))
        return head.predict(MethodRows(part))[np.searchsorted(part.rows, rows)]
    return predict_network(head, windows, rows, label, Computation(device=device))


@analyses(
    AnalysisFacts(
        takes="run",
        scores=True,
        help="Calibration, overall and by subject: reliability, confusion, subjects, nights",
    )
)
def calibration(
    runs: list[Run],
    *,
    sequences: int = 20_000,
    bins: int = 10,
    bootstrap: int = 1000,
    seed: int = 0,
    device: str = "auto",
) -> Page:
    """Reliability of a fine-tuned run on the test split, and its errors by class, subject and
    night.

    `sequences` rows of the test and of the validation split are drawn at random where there are
    more; `bins` are of probability.

    Returns a page; its summary holds `metrics`, `by_class`, `confusion`, `reliability` (of labels:
    one each), `temperature`, `subjects` and `learning_curve`. Subjects are numbered at random;
    their ids are not stored. Raises UserError: a run without a head, without labels (exit 2);
    no_input without test rows.
    """
    run = runs[0]
    windows = run.windows()
    require_plain_labels(windows)
    head = _require_head(run)
    rows = {
        split: plain_features.draw_rows(windows, split, sequences, seed)
        for split in ("validation", "test")
    }
    plain_features.require_rows(windows, "test", rows["test"], "expected a test split with labels")
    parts = {
        split: PredictedRows(
            drawn,
            predict_rows(head, windows, drawn, f"predict {split}", device),
            np.asarray(windows.targets(drawn)),
        )
        for split, drawn in rows.items()
    }
    _, prediction, target = parts["test"]
    test = plain_features.TestSplit(windows, rows["test"], target, bootstrap)
    train = windows["train"]
    scores = test.score(prediction, train_target=train.targets(None) if len(train) else None)
    units, n_units = plain_features.number_subjects(test.subjects, seed)
    page = plain_features.start_scored_page(
        f"Calibration of {run.name}", run, "test", n_units, seed
    )
    page.notice(*scores.remarks)
    plain_features.describe_rows(page, windows, rows)
    page.fact("Subjects", f"{n_units}, numbered at random")
    page.fact("Bins", f"{bins} of equal width", Sharing.OPEN)
    page.fact("Bootstrap", f"{bootstrap:,} resamples of {n_units} subjects")
    summary: dict[str, object] = {
        "run": run.name,
        "data": windows.name,
        "task": windows.task,
        "n": len(units),
        "n_subjects": n_units,
        "seed": seed,
        "bins": bins,
        "metrics": scores.metrics,
        "by_class": scores.by_class,
        "confusion": scores.confusion,
    }
    temperature = None
    if windows.task == "regression":
        summary["reliability"], verdict = _add_values(
            page, prediction, target, bins, scores.metrics["mae"]
        )
    else:
        _, predicted, measured = parts["validation"]
        temperature = fit_temperature(windows.task, predicted, measured)
        page.notice(*filter(None, [describe_bound(temperature)]))
        estimate = partial(estimate_reliability, bins=bins, bootstrap=bootstrap, seed=seed)
        reliability = _measure_reliability(windows, parts["test"], temperature, units, estimate)
        _add_reliability(page, windows, reliability, temperature)
        _add_classes(page, scores, list(windows.class_names))
        summary |= {"reliability": reliability, "temperature": temperature}
        verdict = _verdict(reliability, windows.task)
    if windows.task != "multilabel":
        summary["conformal"] = _add_coverage(page, windows, parts, units, temperature)
    subjects = score_subjects(windows.task, prediction, target, units, n_units)
    _add_subjects(page, subjects)
    if windows.task == "classification":
        add_nights(page, windows, head, device)
    curve = read_learning_curve(run, str(scores.main))
    _add_learning_curve(page, run, curve, str(scores.main))
    summary["subjects"] = [subject.to_json() for subject in subjects]
    summary["learning_curve"] = curve
    return page.finish(verdict, summary)


def _require_head(run: Run) -> Any:
    """The head of a run. Raises UserError (config, exit 2) for one without."""
    head = run.head()
    if head is None:
        raise usage_error(
            f"{run.name} was only pre-trained",
            "expected a fine-tuned run, which predicts labels",
            f"Run: bitimely finetune {run.name} --data {_name_view(run.windows())}",
        )
    run.require_labels()
    return head


class PredictedRows(NamedTuple):
    """Rows of a split."""

    rows: Array
    prediction: Array  # probabilities [n, K] or values [n]
    target: Array


BAND = "the band is the 95 % CI over subjects, of each bin that has enough of them"
NO_BAND = "there is no band, as no bin has enough subjects for a confidence interval"
RELIABLE = (
    "Each point is a bin of windows: across, the mean predicted probability; up, the share of "
    "correct windows; {band}. On the dashed diagonal "
    "the model is perfectly calibrated; below it the model is overconfident. No verdict rests on "
    "the bins: that of the page is on the gap."
)
ERRORS = (
    "Expected calibration error: mean over windows of the distance between probability and share "
    "correct. By chance: that of a perfectly calibrated model with the same probabilities and as "
    "many independent windows; windows of one subject are not independent, so the true value is "
    "higher, and no verdict rests on it. Gap: mean probability less share correct, above 0 = "
    "overconfident, with its 95 % CI over subjects and p, Holm-corrected over the {family} of this "
    "page: the verdict is that of the gap alone."
)
ERROR_COLUMNS = [
    "of",
    "expected calibration error",
    "by chance, mean",
    "by chance, 95th",
    "gap",
    "p, Holm",
    "with temperature scaling",
    "temperature",
]
CONFIDENCE = (
    "Windows in each bin of the probability of the predicted class. Whether high confidence is "
    "justified shows in the reliability."
)


def _measure_reliability(
    windows: Windows,
    part: PredictedRows,
    temperature: float | None,
    units: Array,
    estimate: Callable[..., Reliability],
) -> dict[str, dict[str, Reliability]]:
    """Reliability of the predicted class, or of each label: `as_is`, and `tempered` after
    temperature scaling.
    """
    predictions = {"as_is": part.prediction}
    if temperature is not None:
        predictions["tempered"] = apply_temperature(windows.task, part.prediction, temperature)
    if windows.task == "classification":
        predicted = {
            key: estimate(p.max(1), p.argmax(1) == part.target, units)
            for key, p in predictions.items()
        }
        return {PREDICTED_CLASS: predicted}
    reliability = {}
    for k, name in enumerate(windows.class_names):
        labelled = np.isfinite(part.target[:, k])
        reliability[name] = {
            key: estimate(p[labelled, k], part.target[labelled, k], units[labelled])
            for key, p in predictions.items()
        }
    return reliability


def _add_reliability(
    page: PageBuilder, windows: Windows, reliability: ReliabilityByName, temperature: float | None
) -> None:
    is_classes = windows.task == "classification"
    curves = {name: parts["as_is"].curve for name, parts in reliability.items()}
    if is_classes:
        words = {"as_is": "without scaling", "tempered": "with temperature scaling"}
        parts = reliability[PREDICTED_CLASS]
        curves = {words[key]: part.curve for key, part in parts.items()}
    gaps = correct_gaps(reliability)
    ylabel = "share correct" if is_classes else "share with the label"
    _draw_curves(page, curves, ylabel)
    if is_classes:
        curve = curves["without scaling"]
        names = [f"around {p:.2f}" for p in curve.probability]
        bars = BarPlot(names, curve.windows, ylabel="windows")
        page.figure("confidence", "Confidence of predictions", CONFIDENCE, bars)
    rows = [
        _list_errors(name, parts, gaps[name], temperature) for name, parts in reliability.items()
    ]
    caption = ERRORS.format(family=count_units(len(rows), "gap"))
    page.table("calibration", "Calibration error", caption, ERROR_COLUMNS, rows)
    parts_as_is = {name: parts["as_is"] for name, parts in reliability.items()}
    fits = [[name, p.fit.slope, p.fit.intercept, p.fit.brier] for name, p in parts_as_is.items()]
    columns = ["of", "slope", "intercept", "Brier score"]
    page.table("slope", "Calibration slope and intercept", FITS, columns, fits)
    if not windows.vocabulary:  # of histories the pages of their scores have them, protected
        _add_tenths(page, parts_as_is, ylabel)


def _draw_curves(page: PageBuilder, curves: Mapping[str, ReliabilityCurve], ylabel: str) -> None:
    """The shares over the probabilities, with bands where they have some."""
    lines = [
        Line(name, curve.probability, curve.share, curve.lo, curve.hi)
        for name, curve in curves.items()
    ]
    lines.append(Line("perfect calibration", [0.0, 1.0], [0.0, 1.0], reference=True))
    plot = LinePlot(lines, xlabel="probability", ylabel=ylabel)
    has_band = any(low is not None for curve in curves.values() for low in curve.lo)
    caption = RELIABLE.format(band=BAND if has_band else NO_BAND)
    page.figure("reliability", "Reliability", caption, plot)


FITS = (
    "Slope: that of a logistic regression of the outcome on the log odds of the probability; 1 is "
    "right, below 1 the probabilities are too extreme. Intercept: with the slope fixed at 1; 0 is "
    "right, below 0 the probabilities are too high. Brier score: mean squared difference, 0 is "
    "best. 95 % CI over subjects. The outcome is that the event of the row happened."
)
TENTHS = (
    "Windows in ten groups of equal size by their probability. Calibrated: mean probability and "
    "share agree in each."
)


def _add_tenths(page: PageBuilder, parts: Mapping[str, Reliability], share: str) -> None:
    """The tenths of the probabilities."""
    tenths = [
        [name, number, *values]
        for name, part in parts.items()
        for number, values in enumerate(zip(*part.tenths, strict=True), 1)
    ]
    columns = ["of", "tenth", "windows", "mean probability", share]
    page.table("tenths", "Calibration in tenths", TENTHS, columns, tenths)


def _list_errors(
    name: str, parts: Mapping[str, Reliability], gap: CorrectedDifference, temperature: float | None
) -> list[object]:
    """The cells of `ERROR_COLUMNS`."""
    plain, scaled = parts["as_is"], parts.get("tempered")
    chance = plain.chance or (None, None)
    error = None if scaled is None else scaled.ece
    return [name, plain.ece, *chance, plain.gap, gap.p_holm, error, temperature]


def _verdict(reliability: ReliabilityByName, task: str) -> str:
    """Over- or underconfidence by the gap, of labels after correction; the calibration error is
    described only.
    """
    is_classes, gaps = task == "classification", correct_gaps(reliability)
    worst = max(reliability, key=lambda name: reliability[name]["as_is"].ece.value or 0.0)
    plain, scaled = reliability[worst]["as_is"], reliability[worst].get("tempered")
    words = [
        _describe_side(gaps, sign, side, is_classes=is_classes)
        for sign, side in ((1, "high"), (-1, "low"))
    ]
    text = "; ".join(filter(None, words)) or _describe_no_gap(
        gaps, _describe_gap(plain.gap, gaps[worst]) + ("" if is_classes else f" of {worst}")
    )
    if not is_classes:
        text += f" (Holm-corrected over {len(gaps)} labels)"
    text += f". Expected calibration error {format_metric(plain.ece)}"
    if not is_classes:
        text += f" (largest of {len(gaps)} labels, {worst})"
    if scaled is not None and scaled.ece.value is not None:
        text += f"; temperature scaling changes it to {scaled.ece.value:.3f}"
    return text + "."


def _describe_gap(gap: MetricValue, corrected: CorrectedDifference) -> str:
    """The gap with the interval that its verdict rests on."""
    if gap.value is None or corrected.corrected_lo is None:
        return f"gap {format_metric(gap)}"
    value, *bounds = (
        f"{number:.3f}".replace("-", "−")
        for number in (gap.value, corrected.corrected_lo, corrected.corrected_hi or 0.0)
    )
    return f"gap {value}, 95 % CI {' to '.join(bounds)}"


def _describe_side(
    gaps: Mapping[str, CorrectedDifference], sign: int, side: str, *, is_classes: bool
) -> str:
    """Which probabilities are too high (`sign` 1) or too low (-1); "": none."""
    significant = {name: d for name, d in gaps.items() if evaluate.significance_sign(d) == sign}
    if not significant:
        return ""
    sizes = ", ".join(f"{abs(d.difference or 0.0):.3f}" for d in significant.values())
    which = "Its probabilities"
    if not is_classes:
        which = f"The probabilities of {', '.join(significant)}"
    return f"{which} are too {side} by {sizes} on average"


def _describe_no_gap(gaps: Mapping[str, CorrectedDifference], size: str) -> str:
    """Why no gap is significant."""
    reasons = filter(None, map(evaluate.explain_no_verdict, gaps.values()))
    reason = next(reasons, "").removeprefix("no CI: ")
    if reason:
        return f"No verdict on the calibration ({reason}; {size})"
    return f"No significant over- or underconfidence on average ({size})"


COVERED = (
    "Share of the windows of each test subject whose conformal set or interval holds the truth. "
    "The threshold is fitted on the validation split with the subject as the unit, so that the "
    "mean over subjects reaches the level; single subjects lie above and below. Pooling windows "
    "would count subjects by their windows and promise more than a new subject gets."
)


def _add_coverage(
    page: PageBuilder,
    windows: Windows,
    parts: Mapping[str, PredictedRows],
    units: Array,
    temperature: float | None,
) -> dict[str, object]:
    """Coverage of conformal sets by subject; its summary."""
    scores = {}
    for split, (_, prediction, target) in parts.items():
        if temperature is not None:
            prediction = apply_temperature(windows.task, prediction, temperature)
        scores[split] = conformal.score_windows(windows.task, prediction, target)
    validation = windows["validation"]
    positions = np.searchsorted(validation.rows, parts["validation"].rows)
    threshold, reason = conformal.find_threshold(
        scores["validation"], validation.subjects()[positions]
    )
    page.section("Coverage")
    if threshold is None:
        page.text(f"No conformal sets: {reason}.")
        return {"level": conformal.COVERAGE, "threshold": None, "undefined_reason": reason}
    covered = (scores["test"] <= threshold).astype(float)
    shares = list(conformal.measure_coverage(covered, units).values())
    subjects = np.arange(len(shares))
    mean = evaluate.average_over_units(np.array(shares), subjects, len(shares), "share")
    names = [f"subject {k + 1}" for k in subjects[:SUBJECTS]]
    bars = BarPlot(names, shares[:SUBJECTS], ylabel="covered")
    page.figure("coverage", "Coverage by subject", COVERED, bars)
    columns = ["level", "threshold", "mean over subjects"]
    row = [conformal.COVERAGE, threshold, mean]
    page.table("conformal", "Conformal sets", COVERED, columns, [row])
    return {
        "level": conformal.COVERAGE,
        "threshold": threshold,
        "coverage": mean,
        "by_subject": shares,
    }


CONFUSION = (
    "Row: true class; column: predicted; each row sums to 1. A column with a large share of all "
    "rows is a classifier that predicts one class; errors between neighbouring classes are usual "
    "between experts, too."
)
CLASSES = (
    "Support is the number of test windows, subjects the number of subjects with such a window: "
    "scores of a class of few subjects do not generalise. 95 % CI over subjects."
)


def _add_classes(page: PageBuilder, scores: TaskScores, names: list[str]) -> None:
    page.section("Classes")
    if scores.confusion:
        confusion = np.array(scores.confusion, dtype=float)
        support = confusion.sum(1, keepdims=True)
        share = np.divide(
            confusion, support, out=np.full_like(confusion, np.nan), where=support > 0
        )
        plot = HeatMap(share, "predicted", "scored", row_names=names, column_names=names)
        page.figure("confusion", "Confusion: share of each true class", CONFUSION, plot)
    first = next(iter(scores.by_class.values()), None)
    fields = [] if first is None else list(first.model_dump())
    columns = ["class", *(evaluate.NAMES.get(key, key.replace("_", " ")) for key in fields)]
    rows = [
        [name, *(getattr(of_class, key) for key in fields)]
        for name, of_class in scores.by_class.items()
    ]
    page.table("classes", "Scores by class", CLASSES, columns, rows)


VALUES = (
    "Each point is one of {count} equal parts of the windows, ordered by prediction: across the "
    "mean prediction, up the mean target. On the dashed diagonal the model is calibrated; on a "
    "flatter line predictions are too extreme; a horizontal line has no predictive value."
)


def _add_values(
    page: PageBuilder, prediction: Array, target: Array, bins: int, error: MetricValue
) -> tuple[dict[str, object], str]:
    """Predicted against true values [n]: slope of the regression of targets on predictions, bias,
    means of binned rows; and the verdict.
    """
    variance, bias = float(np.var(prediction)), float((prediction - target).mean())
    slope = float(np.cov(prediction, target, bias=True)[0, 1] / variance) if variance > 0 else None
    curve = {key: values.tolist() for key, values in bin_means(prediction, target, bins).items()}
    predicted, measured = curve["prediction"], curve["target"]
    ends = [min(predicted + measured), max(predicted + measured)]
    lines = [
        Line("windows by prediction", predicted, measured),
        Line("perfect calibration", ends, ends, reference=True),
    ]
    page.figure(
        "reliability",
        "Predicted against measured",
        VALUES.format(count=len(predicted)),
        LinePlot(lines, xlabel="predicted", ylabel="measured"),
    )
    text = f"Mean absolute error {format_metric(error)}; mean bias {bias:+.3g}"
    text += f"; calibration slope {slope:.2f} (1 = calibrated)." if slope is not None else "."
    return {"slope": slope, "bias": bias, "curve": curve}, text


class SubjectScores(NamedTuple):
    """Scores of one subject, numbered at random."""

    subject: int
    windows: int
    scores: dict[str, float | None]  # mae; accuracy; of classes also kappa and confidence

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {"subject": self.subject, "windows": self.windows, **self.scores}


def score_subjects(
    task: str, prediction: Array, target: Array, units: Array, n_units: int
) -> list[SubjectScores]:
    """Scores of each subject; [] where each has one window."""
    if len(units) <= n_units:
        return []
    subjects = []
    for unit in range(n_units):
        rows = units == unit
        scores = _score_rows(task, prediction[rows], target[rows])
        subjects.append(SubjectScores(unit + 1, int(rows.sum()), scores))
    return subjects


def _score_rows(task: str, prediction: Array, target: Array) -> dict[str, float | None]:
    if task == "regression":
        return {"mae": float(np.abs(prediction - target).mean())}
    if task == "multilabel":  # the share of known labels that are correct
        right = ((prediction >= 0.5) == (target > 0.5))[np.isfinite(target)]
        return {"accuracy": float(right.mean()) if len(right) else None}
    predicted, classes = prediction.argmax(1), prediction.shape[1]
    counts = np.bincount(predicted, minlength=classes) * np.bincount(target, minlength=classes)
    chance, accuracy = float(counts.sum()) / len(target) ** 2, float((predicted == target).mean())
    kappa = None
    if chance < 1:
        kappa = (accuracy - chance) / (1 - chance)
        kappa = 0.0 if abs(kappa) < evaluate.ROUNDING else kappa
    return {"accuracy": accuracy, "kappa": kappa, "confidence": float(prediction.max(1).mean())}


BY_SUBJECT = (
    "{name} of each test subject, sorted; numbers of subjects are random. The interval over "
    "subjects comes from this variance; on subjects far from the others the model fails."
)


def _add_subjects(page: PageBuilder, subjects: list[SubjectScores]) -> None:
    page.section("Subjects")
    if not subjects:
        page.text("Every subject has one sequence, so there are no scores by subject.")
        return
    key = "mae" if "mae" in subjects[0].scores else "accuracy"
    name = evaluate.NAMES[key]
    scored = sorted(
        (subject.scores[key], subject.subject, subject.windows)
        for subject in subjects
        if subject.scores[key] is not None
    )
    values = np.array([value for value, _, _ in scored], np.float64).tolist()
    bars = [f"subject {number} ({windows:,} windows)" for _, number, windows in scored]
    plot: BarPlot | LinePlot = BarPlot(bars, values, ylabel=name)
    if len(values) > SUBJECTS:
        line = Line("subjects", (np.arange(len(values)) + 0.5) / len(values), values)
        plot = LinePlot([line], xlabel="share of the subjects", ylabel=name)
    caption = BY_SUBJECT.format(name=name.capitalize())
    page.figure("subjects", "Scores by subject", caption, plot)
    if values:
        best, worst = values[-1], values[0]
        if key in evaluate.LOWER_IS_BETTER:
            best, worst = worst, best
        page.text(
            f"Worst subject {worst:.3f}, median {float(np.median(values)):.3f}, best {best:.3f} of "
            f"{len(values)} subjects."
        )


class NightPrediction(NamedTuple):
    """True and predicted classes of the epochs of a recording."""

    agreement: float
    place: Array  # [m] number of each epoch
    truth: Array  # [m]
    predicted: Array  # [m]

    def tracks(self) -> list[StageTrack]:
        """Both, epoch by epoch, -1 where there is no window."""
        tracks = []
        for name, stages in (("scored", self.truth), ("predicted", self.predicted)):
            line = np.full(self.place[-1] + 1, -1)
            line[self.place] = stages
            tracks.append(StageTrack(name, line))
        return tracks


def _predict_nights(
    windows: Windows, head: Any, epoch: float, device: str
) -> list[NightPrediction]:
    """Up to 60 test recordings of ten or more windows that do not overlap."""
    test = windows["test"]
    recordings = test.index["recording_id"].to_numpy().astype(str)
    starts = test.index["start"].to_numpy().astype(float)
    nights = []
    names, counts = np.unique(recordings, return_counts=True)
    for recording in names[counts >= EPOCHS][:60]:
        rows = np.flatnonzero(recordings == recording)
        rows = rows[np.argsort(starts[rows])]
        place = np.round((starts[rows] - starts[rows[0]]) / epoch).astype(int)
        if len(np.unique(place)) < len(place):  # overlapping windows
            continue
        rows = test.rows[rows]
        predicted = predict_rows(head, windows, rows, "nights", device).argmax(1)
        truth = np.asarray(windows.targets(rows))
        nights.append(NightPrediction(float((predicted == truth).mean()), place, truth, predicted))
    return nights


NIGHT = (
    "Predicted and true classes of {windows} windows, one of {count} recordings of the test split. "
    "Errors at transitions between stages are usual; a stage that is never predicted is not. For "
    "scores see the tables."
)


def add_nights(page: PageBuilder, windows: Windows, head: Any, device: str) -> None:
    """Predicted and true classes of the test recordings of ten or more successive windows with the
    least, median and most agreement.
    """
    if not windows.rate:
        return
    epoch = windows.length / windows.rate
    nights = _predict_nights(windows, head, epoch, device)
    if not nights:
        return
    page.section("Nights")
    nights.sort(key=lambda night: night.agreement)
    count = len(nights)
    words = {0: "least", count - 1: "most"}
    for k in sorted({0, count // 2, count - 1}):
        night = nights[k]
        title = f"Recording with the {words.get(k, 'median')} agreement: {night.agreement:.2f}"
        if count == 1:
            title = f"One recording: agreement {night.agreement:.2f}"
        page.figure(
            f"night-{k + 1}",
            title,
            NIGHT.format(windows=len(night.place), count=count),
            Hypnogram(epoch, night.tracks(), list(windows.class_names)),
        )


class LearningPoint(NamedTuple):
    """Test score of a run that was fine-tuned on a fraction of the training subjects."""

    run: str
    fraction: float
    scratch: bool
    value: float | None
    lo: float | None
    hi: float | None


def read_learning_curve(run: Run, main: str) -> list[LearningPoint]:
    """Main test scores of this and all evaluated runs with the same pre-trained model, data,
    readout and seed, by fraction of the subjects.
    """
    if not run.folder.is_dir():
        return []
    points = []
    for path in sorted(run.folder.parent.glob("*/scores.json")):
        try:
            record = RunRecord.load(path.with_name("run.json"))
            scores = Scores.load_shared(path.parent)
        except UserError as error:
            raise_system_error(error)
            if error.code is Reason.INTEGRITY:
                raise
            continue
        is_comparable = (scores.data, scores.split) == (run.windows().name, "test") and (
            main in scores.metrics and _comparison_key(record) == _comparison_key(run.record)
        )
        if is_comparable:
            metric = scores.metrics[main]
            scratch = record.source is None or record.source.weights is None
            fraction = record.settings.data.fraction
            points.append(
                LearningPoint(record.run, fraction, scratch, metric.value, metric.lo, metric.hi)
            )
    return sorted(points, key=lambda point: (point.scratch, point.fraction, point.run))


def _comparison_key(record: RunRecord) -> tuple[object, ...]:
    source = record.source.run if record.source else None
    settings = record.settings.finetune.model_copy(update={"from_scratch": False})
    return record.kind, source, settings, record.data[0].fingerprint


NO_CURVE = (
    "A learning curve requires evaluated runs on other fractions of the training subjects: for F "
    "in 0.05 0.1 0.2 0.5 1: bitimely finetune {source} --data {view} --fraction F --run "
    "{source}-F, the same with --from-scratch --run {source}-F-scratch, then bitimely evaluate "
    "each of them, and this command again."
)
CURVE = (
    "Test score of runs fine-tuned on a fraction of the training subjects; bands are 95 % CI over "
    "test subjects, not over draws of training subjects. Where pre-training saves labels, its line "
    "is above that from scratch at small fractions."
)


def _add_learning_curve(page: PageBuilder, run: Run, curve: list[LearningPoint], main: str) -> None:
    page.section("Labels")
    defined = [point for point in curve if point.value is not None]
    if len({point.fraction for point in defined}) < 2:
        source = run.record.source.run if run.record.source else "RUN"
        page.text(NO_CURVE.format(source=source, view=_name_view(run.windows())))
        return
    lines = []
    for scratch, name in ((False, "pre-trained"), (True, "from scratch")):
        points = [point for point in defined if point.scratch == scratch]
        if points:
            fractions = [point.fraction for point in points]
            lines.append(Line.from_metrics(name, fractions, points))
    plot = LinePlot(
        lines, xlabel="share of the training subjects", ylabel=evaluate.NAMES[main], logx=True
    )
    page.figure("learning-curve", "Score against number of labels", CURVE, plot, Sharing.OPEN)


def _name_view(windows: Windows) -> str:
    """The data set, and its view, as options take them."""
    return f"{windows.dataset}/{windows.view}" if windows.view else windows.dataset
