"""Calibration, overall and by subject: reliability, confusion, classes, subjects, nights and the
learning curve of a fine-tuned model.

Of predictions with probability 0.8, eight in ten should be right. Windows are binned by the
probability of the predicted class (labels: of each label); the expected calibration error (ECE) is
the mean over windows of |share correct - mean probability| of their bin. It is never 0, because
bins of few windows vary by chance. It is therefore shown beside the ECE of a perfectly calibrated
model with the same probabilities (labels drawn from them), and the ECE after temperature scaling
fitted on the validation split. The verdict is that of the gap, the mean probability less the share
correct; of several labels the gaps are one family with Holm correction.

Legend: n rows, K classes or labels, U subjects, B bins, R replicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import features
from bitimely_core.errors import Reason, UserError, input_error, usage_error
from bitimely_core.evaluate import conformal
from bitimely_core.evaluate.predict import map_batches
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
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    ClassScores,
    CorrectedDifference,
    MeanDifference,
    MetricValue,
    Scores,
    TaskScores,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import Windows
from bitimely_core.types import Progress

Array = npt.NDArray[Any]

SUBJECTS = 40  # that are shown as bars
NIGHTS = 3
EPOCHS = 10  # fewest windows of a recording that is shown as a night
SEARCHED = 3.0  # temperatures from exp(-3) to exp(3)
NULL_DRAWS = 200  # draws of labels from the probabilities
PREDICTED_CLASS = "class that the model names"  # a key of the summary


def assign_bins(confidence: Array, bins: int) -> Array:
    """Bin of each probability among `bins` of equal width over (0, 1], [n] int; 0 is in the
    first.
    """
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def sum_bins(confidence: Array, right: Array, units: Array, n_units: int, bins: int) -> Array:
    """Windows, correct windows and summed probability of each subject and bin, [U, B, 3]."""
    out = np.zeros((n_units, bins, 3))
    np.add.at(
        out,
        (units, assign_bins(confidence, bins)),
        np.stack([np.ones_like(confidence), right, confidence], 1),
    )
    return out


def calibration_error(counts: Array) -> Array:
    """Expected calibration error of summed bins [..., B, 3]: sum over bins of |correct -
    probability| / windows.
    """
    total = counts[..., 0].sum(-1)
    with np.errstate(invalid="ignore"):
        return np.abs(counts[..., 1] - counts[..., 2]).sum(-1) / total


class ReliabilityCurve(NamedTuple):
    """Mean probability, share correct with its interval, and windows of every bin that has any."""

    probability: list[float]
    share: list[float | None]
    lo: list[float | None]
    hi: list[float | None]
    windows: list[int]


class NullError(NamedTuple):
    """Calibration error of a perfectly calibrated model with the same probabilities."""

    mean: float
    p95: float


class Reliability(NamedTuple):
    """Calibration of one set of probabilities."""

    ece: MetricValue
    gap: MetricValue  # mean probability - share correct; above 0: overconfident
    test: MeanDifference  # of the gap against 0
    curve: ReliabilityCurve
    chance: NullError | None


def estimate_reliability(
    confidence: Array, right: Array, units: Array, *, bins: int, bootstrap: int, seed: int
) -> Reliability:
    """Reliability curve and calibration error, with intervals over subjects.

    `confidence` [n] are probabilities, `right` [n] is 1 where the event happened, `units` [n]
    number the subjects. Those of other rows, whose label is not known, have no part in the
    intervals.
    """
    names, units = np.unique(units, return_inverse=True)
    n_units = len(names)
    table = sum_bins(confidence, right, units, n_units, bins)
    total = table.sum(0)
    draws = (
        evaluate.draw_counts(range(bootstrap), n_units, seed)
        if n_units and bootstrap
        else np.zeros((0, n_units))
    )
    drawn = np.einsum("ru,ubk->rbk", draws, table)
    with np.errstate(invalid="ignore"):
        error = features.make_metric(
            float(calibration_error(total)), calibration_error(drawn), n_units, bootstrap
        )
    chance = None
    if len(confidence):
        rng, of = np.random.default_rng([seed, 1]), assign_bins(confidence, bins)
        gaps_by_bin = (
            np.bincount(of, (rng.random(len(of)) < confidence) - confidence, bins)
            for _ in range(NULL_DRAWS)
        )
        errors = [float(np.abs(one).sum() / len(of)) for one in gaps_by_bin]
        chance = NullError(float(np.mean(errors)), float(np.percentile(errors, 95)))
    filled = np.flatnonzero(total[:, 0])
    binned = assign_bins(confidence, bins)
    of_bin = {b: binned == b for b in filled}
    points = [
        evaluate.average_over_units(
            right[rows].astype(float), units[rows], n_units, "share", bootstrap
        )
        for rows in of_bin.values()
    ]
    probability, windows = (
        [float(total[b, 2] / total[b, 0]) for b in filled],
        [int(total[b, 0]) for b in filled],
    )
    curve = ReliabilityCurve(
        probability,
        [p.value for p in points],
        [p.lo for p in points],
        [p.hi for p in points],
        windows,
    )
    gap = evaluate.average_over_units(confidence - right, units, n_units, bootstrap=bootstrap)
    return Reliability(
        error,
        gap,
        evaluate.compare_with_zero(confidence - right, units, n_units, bootstrap=bootstrap),
        curve,
        chance,
    )


def apply_temperature(task: str, prediction: Array, temperature: float) -> Array:
    """The probabilities with their logits divided by a temperature: above 1 less confident, the
    order of classes unchanged.
    """
    p = np.clip(np.asarray(prediction, np.float64), 1e-12, 1.0)
    if task == "classification":
        logits = np.log(p) / temperature
        return evaluate.to_probabilities(task, logits)
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return evaluate.to_probabilities(task, (np.log(p) - np.log1p(-p)) / temperature)


def fit_temperature(task: str, prediction: Array, target: Array) -> float | None:
    """The temperature with the least log loss on these rows; None without rows."""
    from scipy.optimize import minimize_scalar

    if not len(prediction):
        return None

    def loss(log_temperature: float) -> float:
        p = np.clip(
            apply_temperature(task, prediction, float(np.exp(log_temperature))), 1e-12, 1 - 1e-12
        )
        if task == "classification":
            return -float(np.log(p[np.arange(len(p)), target.astype(int)]).mean())
        known = np.isfinite(target)
        y = target[known]
        return -float((y * np.log(p[known]) + (1 - y) * np.log1p(-p[known])).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-SEARCHED, SEARCHED), method="bounded").x))


def describe_bound(temperature: float | None) -> str | None:
    """What a temperature at the end of the search means; None for one inside."""
    if temperature is None or abs(np.log(temperature)) < SEARCHED - 0.01:
        return None
    meaning = (
        "constant: they say nothing about its labels"
        if temperature > 1
        else "0 or 1: the model is far too unsure"
    )
    return f"The temperature is at the end of the search ({temperature:.3g}): the validation split fits best with probabilities that are nearly {meaning}."


def bin_means(prediction: Array, target: Array, bins: int) -> dict[str, Array]:
    """Mean prediction and mean target in `bins` groups of equally many rows, by prediction."""
    order = np.argsort(prediction, kind="stable")
    groups = [g for g in np.array_split(order, min(bins, len(order))) if len(g)]
    return {
        "prediction": np.array([prediction[g].mean() for g in groups]),
        "target": np.array([target[g].mean() for g in groups]),
    }


def predict_rows(
    head: Any,
    windows: Windows,
    rows: Array,
    progress: Progress | None = None,
    label: str = "predict",
    device: str = "cpu",
) -> Array:
    """Predictions of a fine-tuned model for `rows`: probabilities [n, K] or values [n]."""
    out = map_batches(
        head, head.predict, windows, label, device=device, rows=rows, progress=progress
    )
    return np.concatenate(out) if out else np.zeros((0, max(windows.classes, 1)), np.float32)


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
    progress: Progress | None = None,
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
    windows, head = features.require_labels(run, "calibration"), run.head()
    if head is None:
        view = f"/{windows.view}" if windows.view else ""
        raise usage_error(
            f"{run.name} was only pre-trained",
            "expected a fine-tuned run, which predicts labels",
            f"Run: bitimely finetune {run.name} --data {windows.dataset}{view}",
        )
    rows = {
        split: features.draw_rows(windows, split, sequences, seed)
        for split in ("validation", "test")
    }
    if not len(rows["test"]):
        raise input_error(
            Reason.NO_INPUT,
            f"{windows.name} has no test rows",
            "expected a test split with labels",
            "Tokenize more subjects",
        )
    prediction = {
        split: predict_rows(head, windows, at, progress, f"predict {split}", device)
        for split, at in rows.items()
    }
    target = {split: np.asarray(windows.targets(at)) for split, at in rows.items()}
    test, train = (
        features.TestSplit(windows, rows["test"], target["test"], bootstrap),
        windows["train"],
    )
    scores = test.score(
        prediction["test"], train_target=train.targets(None) if len(train) else None
    )
    main = str(scores.main)
    units, n_units = features.number_subjects(test.subjects, seed)
    page = features.start_scored_page(f"Calibration of {run.name}", run, "test", n_units, seed)
    page.notice(*scores.remarks)
    features.describe_rows(page, windows, rows)
    page.fact("Subjects", f"{n_units}, numbered at random")
    page.fact("Bins", f"{bins} of equal width")
    page.fact("Bootstrap", f"{bootstrap:,} resamples of {n_units} subjects")
    summary: dict[str, object] = {
        "run": run.name,
        "data": windows.name,
        "task": windows.task,
        "n": len(units),
        "n_subjects": n_units,
    }
    summary |= {
        "seed": seed,
        "bins": bins,
        "metrics": scores.metrics,
        "by_class": scores.by_class,
        "confusion": scores.confusion,
    }
    if windows.task == "regression":
        summary["reliability"], verdict = _add_values(
            page, prediction["test"], target["test"], bins, scores.metrics["mae"]
        )
    else:
        temperature = fit_temperature(windows.task, prediction["validation"], target["validation"])
        page.notice(*filter(None, [describe_bound(temperature)]))
        scaled = (
            None
            if temperature is None
            else apply_temperature(windows.task, prediction["test"], temperature)
        )
        found = _measure_reliability(
            windows, prediction["test"], scaled, target["test"], units, bins, bootstrap, seed
        )
        _add_reliability(page, found, windows.task, temperature)
        _add_classes(page, scores, list(windows.class_names))
        summary |= {"reliability": found, "temperature": temperature}
        verdict = _verdict(found, windows.task)
    if windows.task != "multilabel":
        summary["conformal"] = _add_coverage(
            page, windows, rows, prediction, target, units, summary.get("temperature")
        )
    subjects = score_subjects(windows.task, prediction["test"], target["test"], units, n_units)
    _add_subjects(page, subjects)
    if windows.task == "classification":
        add_nights(page, windows, head, progress, device)
    curve = read_learning_curve(run, main)
    _add_learning_curve(page, run, curve, main)
    summary["subjects"] = [
        {"subject": one.subject, "windows": one.windows, **one.scores} for one in subjects
    ]
    summary["learning_curve"] = curve
    return page.finish(verdict, summary)


RELIABLE = (
    "Each point is a bin of windows: across, the mean predicted probability; up, the share of correct windows; the band is the 95 % CI over "
    "subjects, bin by bin. On the dashed diagonal the model is perfectly calibrated; below it the model is overconfident. No verdict rests on the "
    "bins: that of the page is on the gap."
)
ERRORS = (
    "Expected calibration error: mean over windows of the distance between probability and share correct. By chance: that of a perfectly "
    "calibrated model with the same probabilities and as many independent windows; windows of one subject are not independent, so the true "
    "value is higher, and no verdict rests on it. Gap: mean probability less share correct, above 0 = overconfident, with its 95 % CI over subjects "
    "and p, Holm-corrected over the {family} of this page: the verdict is that of the gap alone."
)
CONFIDENCE = "Windows in each bin of the probability of the predicted class. Whether high confidence is justified shows in the reliability."


def _measure_reliability(
    windows: Windows,
    plain: Array,
    scaled: Array | None,
    target: Array,
    units: Array,
    bins: int,
    bootstrap: int,
    seed: int,
) -> dict[str, dict[str, Reliability]]:
    """Reliability of the predicted class, or of each label: `as_is`, and `tempered` after
    temperature scaling.
    """
    predictions = {"as_is": plain} | ({} if scaled is None else {"tempered": scaled})
    options = {"bins": bins, "bootstrap": bootstrap, "seed": seed}
    if windows.task == "classification":
        parts = {
            key: estimate_reliability(
                p.max(1).astype(np.float64),
                (p.argmax(1) == target).astype(np.float64),
                units,
                **options,
            )
            for key, p in predictions.items()
        }
        return {PREDICTED_CLASS: parts}
    found = {}
    for k, name in enumerate(windows.class_names):
        known = np.isfinite(target[:, k])
        found[name] = {
            key: estimate_reliability(
                p[known, k].astype(np.float64),
                target[known, k].astype(np.float64),
                units[known],
                **options,
            )
            for key, p in predictions.items()
        }
    return found


def _add_reliability(
    page: PageBuilder,
    found: Mapping[str, Mapping[str, Reliability]],
    task: str,
    temperature: float | None,
) -> None:
    is_classes = task == "classification"
    gaps = correct_gaps(found)
    lines, rows = [], []
    for name, parts in found.items():
        for key, one in parts.items() if is_classes else [("as_is", parts["as_is"])]:
            curve = one.curve
            label = (
                {"as_is": "without scaling", "tempered": "with temperature scaling"}[key]
                if is_classes
                else name
            )
            band = (curve.lo, curve.hi) if None not in curve.lo else (None, None)
            lines.append(Line(label, curve.probability, curve.share, *band))
        plain, scaled = parts["as_is"], parts.get("tempered")
        chance = plain.chance or (None, None)
        rows.append(
            [
                name,
                plain.ece,
                *chance,
                plain.gap,
                gaps[name].p_holm,
                scaled.ece if scaled else None,
                temperature,
            ]
        )
    lines.append(Line("perfect calibration", [0.0, 1.0], [0.0, 1.0], reference=True))
    ylabel = "share correct" if is_classes else "share with the label"
    page.figure(
        "reliability", "Reliability", RELIABLE, LinePlot(lines, xlabel="probability", ylabel=ylabel)
    )
    if is_classes:
        curve = found[PREDICTED_CLASS]["as_is"].curve
        bars = BarPlot(
            [f"around {p:.2f}" for p in curve.probability], curve.windows, ylabel="windows"
        )
        page.figure("confidence", "Confidence of predictions", CONFIDENCE, bars)
    columns = [
        "of",
        "expected calibration error",
        "by chance, mean",
        "by chance, 95th",
        "gap",
        "p, Holm",
        "with temperature scaling",
    ]
    family = f"{len(gaps)} gap{'s' * (len(gaps) != 1)}"
    page.table(
        "calibration",
        "Calibration error",
        ERRORS.format(family=family),
        [*columns, "temperature"],
        rows,
    )


def correct_gaps(found: Mapping[str, Mapping[str, Reliability]]) -> dict[str, CorrectedDifference]:
    """The gaps of the predictions as they are, of all labels one family."""
    return dict(
        zip(
            found,
            evaluate.holm_correct([parts["as_is"].test for parts in found.values()]),
            strict=True,
        )
    )


def _verdict(found: Mapping[str, Mapping[str, Reliability]], task: str) -> str:
    """Over- or underconfidence by the gap, of labels after correction; the calibration error is
    described only.
    """
    worst = max(found, key=lambda name: found[name]["as_is"].ece.value or 0.0)
    gaps, parts, is_classes = correct_gaps(found), found[worst], task == "classification"
    words = []
    for sign, side in ((1, "high"), (-1, "low")):
        named = [name for name, d in gaps.items() if evaluate.significance_sign(d) == sign]
        of = (
            "Its probabilities are"
            if is_classes
            else f"The probabilities of {', '.join(named)} are"
        )
        sizes = ", ".join(f"{abs(gaps[name].difference or 0.0):.3f}" for name in named)
        words += [f"{of} too {side} by {sizes} on average"] if named else []
    reason = next(
        (why for d in gaps.values() if (why := evaluate.explain_no_verdict(d))), ""
    ).removeprefix("no CI: ")
    shown = f"gap {features.format_metric(parts['as_is'].gap)}" + (
        "" if is_classes else f" of {worst}"
    )
    if not words:
        words = [
            f"No verdict on the calibration ({reason}; {shown})"
            if reason
            else f"No significant over- or underconfidence on average ({shown})"
        ]
    family = "" if is_classes else f" (Holm-corrected over {len(gaps)} labels)"
    where = "" if is_classes else f" (largest of {len(found)} labels, {worst})"
    text = f"{'; '.join(words)}{family}. Expected calibration error {features.format_metric(parts['as_is'].ece)}{where}"
    if "tempered" in parts and (scaled := parts["tempered"].ece.value) is not None:
        text += f"; temperature scaling changes it to {scaled:.3f}"
    return text + "."


COVERED = (
    "Share of the windows of each test subject whose conformal set or interval holds the truth. The threshold is fitted on the validation split with the "
    "subject as the unit, so that the mean over subjects reaches the level; single subjects lie above and below. Pooling windows would "
    "count subjects by their windows and promise more than a new subject gets."
)


def _add_coverage(
    page: PageBuilder, windows: Windows, rows: Mapping[str, Array], prediction: Mapping[str, Array], target: Mapping[str, Array], units: Array,
    temperature: Any,
) -> dict[str, Any]:  # fmt: skip
    """Coverage of conformal sets by subject; its summary."""
    tempered = {
        key: p if temperature is None else apply_temperature(windows.task, p, temperature)
        for key, p in prediction.items()
    }
    scores = {
        key: conformal.score_windows(windows.task, p, target[key]) for key, p in tempered.items()
    }
    position = np.searchsorted(windows["validation"].rows, rows["validation"])
    found = conformal.find_threshold(
        scores["validation"], windows["validation"].subjects()[position]
    )
    page.section("Coverage")
    if found.value is None:
        page.text(f"No conformal sets: {found.reason}.")
        return {"level": conformal.COVERAGE, "threshold": None, "undefined_reason": found.reason}
    covered = (scores["test"] <= found.value).astype(float)
    by_subject = conformal.measure_coverage(covered, units)
    n_units = int(units.max()) + 1
    mean = evaluate.average_over_units(
        np.array(list(by_subject.values())), np.arange(n_units), n_units, "share"
    )
    shown = dict(list(by_subject.items())[:SUBJECTS])
    page.figure(
        "coverage",
        "Coverage by subject",
        COVERED,
        BarPlot(
            [f"subject {k}" for k in range(1, len(shown) + 1)],
            list(shown.values()),
            ylabel="covered",
        ),
    )
    page.table(
        "conformal",
        "Conformal sets",
        COVERED,
        ["level", "threshold", "mean over subjects"],
        [[conformal.COVERAGE, found.value, mean]],
    )
    return {
        "level": conformal.COVERAGE,
        "threshold": found.value,
        "coverage": mean,
        "by_subject": list(by_subject.values()),
    }


def _add_classes(page: PageBuilder, scores: TaskScores, names: list[str]) -> None:
    page.section("Classes")
    if scores.confusion:
        confusion = np.array(scores.confusion, dtype=float)
        support = confusion.sum(1, keepdims=True)
        share = np.divide(
            confusion, support, out=np.full_like(confusion, np.nan), where=support > 0
        )
        page.figure(
            "confusion",
            "Confusion: share of each true class",
            "Row: true class; column: predicted; each row sums to 1. A column with a large share of all rows is a classifier that predicts one "
            "class; errors between neighbouring classes are usual between experts, too.",
            HeatMap(
                share, xlabel="predicted", ylabel="scored", row_names=names, column_names=names
            ),
        )
    fields = (
        list(next(iter(scores.by_class.values()), ClassScores()).model_dump())
        if scores.by_class
        else []
    )
    page.table(
        "classes",
        "Scores by class",
        "Support is the number of test windows, subjects the number of subjects with such a window: scores of a class of few subjects do not "
        "generalise. 95 % CI over subjects.",
        ["class", *(evaluate.NAMES.get(key, key.replace("_", " ")) for key in fields)],
        [[name, *(getattr(one, key) for key in fields)] for name, one in scores.by_class.items()],
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
        f"Each point is one of {len(predicted)} equal parts of the windows, ordered by prediction: across the mean prediction, up the mean target. On the dashed diagonal the "
        "model is calibrated; on a flatter line predictions are too extreme; a horizontal line has no predictive value.",
        LinePlot(lines, xlabel="predicted", ylabel="measured"),
    )

    text = f"Mean absolute error {features.format_metric(error)}; mean bias {bias:+.3g}"
    text += f"; calibration slope {slope:.2f} (1 = calibrated)." if slope is not None else "."
    return {"slope": slope, "bias": bias, "curve": curve}, text


class SubjectScores(NamedTuple):
    """Scores of one subject, numbered at random."""

    subject: int
    windows: int
    scores: dict[str, float | None]  # mae; accuracy; of classes also kappa and confidence


def score_subjects(
    task: str, prediction: Array, target: Array, units: Array, n_units: int
) -> list[SubjectScores]:
    """Scores of each subject; [] where each has one window."""
    if len(units) <= n_units:
        return []
    out = []
    for unit in range(n_units):
        at = units == unit
        out.append(
            SubjectScores(unit + 1, int(at.sum()), _score_rows(task, prediction[at], target[at]))
        )
    return out


def _score_rows(task: str, prediction: Array, target: Array) -> dict[str, float | None]:
    if task == "regression":
        return {"mae": float(np.abs(prediction - target).mean())}
    if task == "multilabel":  # the share of known labels that are correct
        known = np.isfinite(target)
        return {
            "accuracy": float(((prediction >= 0.5) == (target > 0.5))[known].mean())
            if known.any()
            else None
        }
    named, classes = prediction.argmax(1), prediction.shape[1]
    chance = (
        float(
            (np.bincount(named, minlength=classes) * np.bincount(target, minlength=classes)).sum()
        )
        / len(target) ** 2
    )
    accuracy = float((named == target).mean())
    kappa = (accuracy - chance) / (1 - chance) if chance < 1 else None
    kappa = 0.0 if kappa is not None and abs(kappa) < evaluate.ROUNDING else kappa
    return {"accuracy": accuracy, "kappa": kappa, "confidence": float(prediction.max(1).mean())}


def _add_subjects(page: PageBuilder, subjects: list[SubjectScores]) -> None:
    page.section("Subjects")
    if not subjects:
        page.text("Every subject has one sequence, so there are no scores by subject.")
        return
    key = "mae" if "mae" in subjects[0].scores else "accuracy"
    name = evaluate.NAMES[key]
    known = sorted((value, one) for one in subjects if (value := one.scores[key]) is not None)
    values = [value for value, _ in known]
    page.figure(
        "subjects",
        "Scores by subject",
        f"{name.capitalize()} of each test subject, sorted; numbers of subjects are random. The interval over subjects comes from this variance; "
        "on subjects far from the others the model fails.",
        BarPlot(
            [f"subject {one.subject} ({one.windows:,} windows)" for _, one in known],
            values,
            ylabel=name,
        )
        if len(known) <= SUBJECTS
        else LinePlot(
            [Line("subjects", (np.arange(len(known)) + 0.5) / len(known), values)],
            xlabel="share of the subjects",
            ylabel=name,
        ),
    )
    if values:
        worst, best = (
            (values[-1], values[0]) if key in evaluate.LOWER_IS_BETTER else (values[0], values[-1])
        )
        page.text(
            f"Worst subject {worst:.3f}, median {float(np.median(values)):.3f}, best {best:.3f} of {len(values)} subjects."
        )


class NightPrediction(NamedTuple):
    """True and predicted classes of the epochs of a recording."""

    agreement: float
    place: Array  # [m] number of each epoch
    truth: Array  # [m]
    predicted: Array  # [m]


def add_nights(
    page: PageBuilder,
    windows: Windows,
    head: Any,
    progress: Progress | None = None,
    device: str = "cpu",
) -> None:
    """Predicted and true classes of the test recordings of ten or more successive windows with the
    least, median and most agreement.
    """
    test = windows["test"]
    recordings = test.index["recording_id"].to_numpy().astype(str)
    starts = test.index["start"].to_numpy().astype(float)
    epoch = windows.length / windows.rate if windows.rate else 0.0
    found: list[NightPrediction] = []
    names, counts = np.unique(recordings, return_counts=True)
    for recording in names[counts >= EPOCHS][:60] if epoch else ():
        at = np.flatnonzero(recordings == recording)
        at = at[np.argsort(starts[at])]
        place = np.round((starts[at] - starts[at[0]]) / epoch).astype(int)
        if len(np.unique(place)) < len(place):  # overlapping windows
            continue
        predicted = predict_rows(head, windows, test.rows[at], progress, "nights", device).argmax(1)
        truth = np.asarray(windows.targets(test.rows[at]))
        found.append(NightPrediction(float((predicted == truth).mean()), place, truth, predicted))
    if not found:
        return
    page.section("Nights")
    found.sort(key=lambda night: night.agreement)
    words = {0: "least", len(found) - 1: "most"}
    for k in sorted({0, len(found) // 2, len(found) - 1})[:NIGHTS]:
        night = found[k]
        tracks = []
        for name, stages in (("scored", night.truth), ("predicted", night.predicted)):
            line = np.full(night.place[-1] + 1, -1)
            line[night.place] = stages
            tracks.append(StageTrack(name, line))
        title = (
            f"Recording with the {words.get(k, 'median')} agreement"
            if len(found) > 1
            else "One recording: agreement"
        )
        page.figure(
            f"night-{k + 1}",
            f"{title}: {night.agreement:.2f}"
            if len(found) > 1
            else f"{title} {night.agreement:.2f}",
            f"Predicted and true classes of {len(night.place)} windows, one of {len(found)} recordings of the test split. Errors at transitions "
            "between stages are usual; a stage that is never predicted is not. For scores see the tables.",
            Hypnogram(epoch, tracks, list(windows.class_names)),
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
    out = []
    for path in sorted(run.folder.parent.glob("*/scores.json")):
        try:
            record, scores = (
                RunRecord.load(path.with_name("run.json")),
                Scores.load_shared(path.parent),
            )
        except UserError as error:
            raise_system_error(error)
            if error.code is Reason.INTEGRITY:
                raise
            continue
        if (scores.data, scores.split) != (
            run.windows().name,
            "test",
        ) or main not in scores.metrics:
            continue
        if _comparison_key(record) == _comparison_key(run.record):
            metric = scores.metrics[main]
            scratch = record.source is None or record.source.weights is None
            out.append(
                LearningPoint(
                    record.run,
                    record.settings.data.fraction,
                    scratch,
                    metric.value,
                    metric.lo,
                    metric.hi,
                )
            )
    return sorted(out, key=lambda one: (one.scratch, one.fraction, one.run))


def _comparison_key(record: RunRecord) -> tuple[object, ...]:
    source = record.source.run if record.source else None
    return (
        record.kind,
        source,
        record.settings.finetune.model_copy(update={"from_scratch": False}),
        record.data[0].fingerprint,
    )


def _add_learning_curve(page: PageBuilder, run: Run, curve: list[LearningPoint], main: str) -> None:
    page.section("Labels")
    defined = [one for one in curve if one.value is not None]
    if len({one.fraction for one in defined}) < 2:
        windows = run.windows()
        source = run.record.source.run if run.record.source else "RUN"
        view = f"{windows.dataset}/{windows.view}" if windows.view else windows.dataset
        page.text(
            "A learning curve requires evaluated runs on other fractions of the training subjects: for F in 0.05 0.1 0.2 0.5 1: "
            f"bitimely finetune {source} --data {view} --fraction F --run {source}-F, the same with --from-scratch --run {source}-F-scratch, "
            "then bitimely evaluate each of them, and this command again."
        )
        return
    lines = []
    for scratch, name in ((False, "pre-trained"), (True, "from scratch")):
        points = [one for one in defined if one.scratch == scratch]
        if points:
            lines.append(Line.from_metrics(name, [one.fraction for one in points], points))
    page.figure(
        "learning-curve",
        "Score against number of labels",
        "Test score of runs fine-tuned on a fraction of the training subjects; bands are 95 % CI over test subjects, not over draws of training "
        "subjects. Where pre-training saves labels, its line is above that from scratch at small fractions.",
        LinePlot(
            lines, xlabel="share of the training subjects", ylabel=evaluate.NAMES[main], logx=True
        ),
    )
