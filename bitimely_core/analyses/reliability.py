"""How well probabilities fit what happens: binned reliability, calibration error, and temperature
scaling.

Legend: n rows, K classes or labels, U subjects, B bins, R replicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses.plain_features import make_metric
from bitimely_core.evaluate.risk_calibration import measure_calibration
from bitimely_core.schemas.scores import (
    CorrectedDifference,
    LabelCalibration,
    MeanDifference,
    MetricValue,
)

Array = npt.NDArray[Any]

SEARCHED = 3.0  # temperatures from exp(-3) to exp(3)
NULL_DRAWS = 200  # draws of labels from the probabilities


def assign_bins(confidence: Array, bins: int) -> Array:
    """Bin of each probability among `bins` of equal width over (0, 1], [n] int; 0 is in the
    first.
    """
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def sum_bins(confidence: Array, right: Array, units: Array, n_units: int, bins: int) -> Array:
    """Windows, correct windows and summed probability of each subject and bin, [U, B, 3]."""
    sums = np.zeros((n_units, bins, 3))
    values = np.stack([np.ones_like(confidence), right, confidence], 1)
    np.add.at(sums, (units, assign_bins(confidence, bins)), values)
    return sums


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


class Tenths(NamedTuple):
    """Groups of equally many rows by their probability: rows, mean probability, share correct."""

    windows: list[int]
    probability: list[float]
    share: list[float]


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
    fit: LabelCalibration  # slope and intercept of the log odds, Brier score
    tenths: Tenths


# of the predicted class or of each label: `as_is`, and `tempered` after temperature scaling
ReliabilityByName = Mapping[str, Mapping[str, Reliability]]


def estimate_reliability(
    confidence: Array, right: Array, units: Array, *, bins: int, bootstrap: int, seed: int
) -> Reliability:
    """Reliability curve and calibration error, with intervals over subjects.

    `confidence` [n] are probabilities, `right` [n] is 1 where the event happened, `units` [n]
    number the subjects. Those of other rows, whose label is not known, have no part in the
    intervals.
    """
    confidence, right = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    names, units = np.unique(units, return_inverse=True)
    n_units = len(names)
    table = sum_bins(confidence, right, units, n_units, bins)
    draws = np.zeros((0, n_units))
    if n_units and bootstrap:
        draws = evaluate.draw_counts(range(bootstrap), n_units, seed)
    errors = calibration_error(np.einsum("ru,ubk->rbk", draws, table))
    total = table.sum(0)
    gaps = confidence - right
    return Reliability(
        make_metric(float(calibration_error(total)), errors, n_units, bootstrap),
        evaluate.average_over_units(gaps, units, n_units, bootstrap=bootstrap),
        evaluate.compare_with_zero(gaps, units, n_units, bootstrap=bootstrap),
        _measure_curve(assign_bins(confidence, bins), right, units, total, bootstrap),
        _draw_null(confidence, bins, seed),
        measure_calibration(confidence, right, units),
        _measure_tenths(confidence, right),
    )


def _measure_tenths(confidence: Array, right: Array) -> Tenths:
    means = bin_means(confidence, right, 10)
    sizes = list(map(len, np.array_split(confidence, min(10, len(confidence)) or 1)))
    return Tenths(sizes[: len(means["target"])], *(means[k].tolist() for k in means))


def _draw_null(confidence: Array, bins: int, seed: int) -> NullError | None:
    """The calibration error with labels drawn from the probabilities; None without rows."""
    count = len(confidence)
    if not count:
        return None
    rng, which = np.random.default_rng([seed, 1]), assign_bins(confidence, bins)
    errors = []
    for _ in range(NULL_DRAWS):
        gaps = np.bincount(which, (rng.random(count) < confidence) - confidence, bins)
        errors.append(float(np.abs(gaps).sum() / count))
    return NullError(float(np.mean(errors)), float(np.percentile(errors, 95)))


def _measure_curve(
    which: Array, right: Array, units: Array, total: Array, bootstrap: int
) -> ReliabilityCurve:
    """The curve of rows in bins `which` [n], whose sums are `total` [B, 3]."""
    curve = ReliabilityCurve([], [], [], [], [])
    for b in np.unique(which):
        rows, (windows, _, probability) = which == b, total[b].tolist()
        share = evaluate.average_over_units(
            right[rows], units[rows], int(units.max()) + 1, "share", bootstrap
        )
        curve.probability.append(probability / windows)
        curve.share.append(share.value)
        curve.lo.append(share.lo)
        curve.hi.append(share.hi)
        curve.windows.append(int(windows))
    return curve


def correct_gaps(reliability: ReliabilityByName) -> dict[str, CorrectedDifference]:
    """The gaps of the predictions as they are, of all labels one family."""
    tests = [parts["as_is"].test for parts in reliability.values()]
    return dict(zip(reliability, evaluate.holm_correct(tests), strict=True))


def apply_temperature(task: str, prediction: Array, temperature: float) -> Array:
    """The probabilities with their logits divided by a temperature: above 1 less confident, the
    order of classes unchanged.
    """
    p = np.clip(np.asarray(prediction, np.float64), 1e-12, 1.0)
    if task == "classification":
        return evaluate.to_probabilities(task, np.log(p) / temperature)
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return evaluate.to_probabilities(task, (np.log(p) - np.log1p(-p)) / temperature)


def fit_temperature(task: str, prediction: Array, target: Array) -> float | None:
    """The temperature with the least log loss on these rows; None without rows."""
    from scipy.optimize import minimize_scalar

    if not len(prediction):
        return None

    def loss(log_temperature: float) -> float:
        p = apply_temperature(task, prediction, float(np.exp(log_temperature)))
        p = np.clip(p, 1e-12, 1 - 1e-12)
        if task == "classification":
            return -float(np.log(p[np.arange(len(p)), target.astype(int)]).mean())
        labelled = np.isfinite(target)
        y, p = target[labelled], p[labelled]
        return -float((y * np.log(p) + (1 - y) * np.log1p(-p)).mean())

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
    return (
        f"The temperature is at the end of the search ({temperature:.3g}): the validation split "
        f"fits best with probabilities that are nearly {meaning}."
    )


def bin_means(prediction: Array, target: Array, bins: int) -> dict[str, Array]:
    """Mean prediction and mean target in `bins` groups of equally many rows, by prediction."""
    order = np.argsort(prediction, kind="stable")
    groups = np.array_split(order, min(bins, len(order))) if len(order) else []
    return {
        "prediction": np.array([prediction[group].mean() for group in groups]),
        "target": np.array([target[group].mean() for group in groups]),
    }
