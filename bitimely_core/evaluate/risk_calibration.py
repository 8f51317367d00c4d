"""Calibration of predicted risks, label by label, and logistic recalibration (Cox 1958; Van Calster
et al. 2019).

With the log odds z of the predicted risks, the slope b is that of the logistic regression of the
label on z, the intercept a that of the one with z as an offset (calibration in the large). Right
risks have a = 0 and b = 1; b < 1: they are too extreme. Legend: `evaluate`; n rows, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate.intervals import build_metric, explain_few
from bitimely_core.evaluate.metrics import Estimate, weigh_units
from bitimely_core.schemas.scores import LabelCalibration, MetricValue

Array = npt.NDArray[np.float64]
LEAST = 10  # rows of each value of a label, below which nothing is fitted
STEPS, SMALL_STEP, STEEPEST = 50, 1e-10, 50.0
PARTS = 5  # of the people, where the same people are scored and recalibrated on


class Recalibration(NamedTuple):
    """Changes risks to 1 / (1 + exp(-(intercept + slope z)))."""

    intercept: float
    slope: float

    def apply(self, risks: npt.NDArray[np.floating]) -> Array:
        """The recalibrated risks [n]."""
        return _expit(self.intercept + self.slope * to_log_odds(risks))


IDENTITY = Recalibration(0.0, 1.0)


def to_log_odds(risks: npt.NDArray[np.floating]) -> Array:
    """The log odds of risks, which are kept away from 0 and 1 by 1e-12."""
    p = np.clip(np.asarray(risks, np.float64), 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


def _expit(z: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(z, -700, 700))))


class LogisticFit(NamedTuple):
    """A logistic regression by maximum likelihood."""

    coefficients: Array
    influence: Array  # of each row on each coefficient


def fit_logistic(x: Array, y: Array, offset: Array | float = 0.0) -> LogisticFit | None:
    """The regression of y [n] in {0, 1} on x [n, P] by Newton's method; None where it does not
    converge, as for labels that are separated.
    """
    beta = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = _expit(x @ beta + offset)
        information = (x * (p * (1 - p))[:, None]).T @ x
        if np.linalg.cond(information) > 1 / np.finfo(np.float64).eps:
            return None
        step = np.linalg.solve(information, x.T @ (y - p))
        beta = beta + step
        if np.abs(beta).max() > STEEPEST:
            return None
        if np.abs(step).max() < SMALL_STEP:
            residuals = x * (y - _expit(x @ beta + offset))[:, None]
            influence = np.linalg.solve(information, residuals.T).T
            return LogisticFit(beta, influence.astype(np.float64))
    return None


def fit_recalibration(risks: npt.NDArray[np.floating], y: Array) -> Recalibration | None:
    """Intercept and slope on these rows, of which none is NaN; None where they are too few."""
    if min(np.sum(y == 1), np.sum(y == 0)) < LEAST:
        return None
    z = to_log_odds(risks)
    fitted = fit_logistic(np.stack([np.ones_like(z), z], axis=1), y)
    return None if fitted is None else Recalibration(*map(float, fitted.coefficients))


def measure_calibration(
    risks: npt.NDArray[np.floating], y: Array, subjects: npt.NDArray[np.generic]
) -> LabelCalibration:
    """Slope, intercept and Brier score of the risks [n] of a label with intervals over subjects.
    Rows with y NaN are left out.
    """
    labelled = np.isfinite(y)
    y, p = y[labelled].astype(np.float64), np.asarray(risks, np.float64)[labelled]
    units = np.unique(subjects[labelled], return_inverse=True)[1]
    n_units = int(units.max(initial=-1)) + 1
    z = to_log_odds(p)
    slopes = np.stack([np.ones_like(z), z], axis=1)
    few = min(np.sum(y == 1), np.sum(y == 0)) < LEAST
    reason = "does not converge"
    if few:
        reason = f"fewer than {LEAST} rows with or without the label"
    fits = {
        "slope": None if few else fit_logistic(slopes, y),
        "intercept": None if few else fit_logistic(slopes[:, :1], y, z),
    }
    values = {name: _measure(fit, units, n_units, reason) for name, fit in fits.items()}
    errors = (y - p) ** 2
    brier = float(errors.mean()) if len(y) else float("nan")
    spread: Array = np.bincount(units, errors - brier, n_units) / float(max(len(y), 1))
    return LabelCalibration(
        **values,
        brier=_build("brier", brier, spread, units, n_units, "no row has the label"),
        observed=float(y.mean()) if len(y) else None,
        predicted=float(p.mean()) if len(y) else None,
    )


def _measure(
    fit: LogisticFit | None, units: npt.NDArray[np.intp], n_units: int, reason: str
) -> MetricValue:
    """The last coefficient of a regression; `reason`: why there is none."""
    if fit is None:
        return MetricValue(undefined_reason=reason)
    influence: Array = np.bincount(units, fit.influence[:, -1], n_units).astype(np.float64)
    return _build("mean", float(fit.coefficients[-1]), influence, units, n_units, reason)


def _build(
    metric: str,
    value: float,
    influence: Array,
    units: npt.NDArray[np.intp],
    n_units: int,
    reason: str,
) -> MetricValue:
    shares = np.bincount(units, minlength=n_units) / max(len(units), 1)
    estimate = Estimate(value, influence, weigh_units(shares, len(units)))
    return build_metric(metric, estimate, reason, explain_few(n_units))


def cross_recalibrate(
    risks: npt.NDArray[np.floating], y: Array, subjects: npt.NDArray[np.generic]
) -> Array | None:
    """Risks [n] recalibrated by what is fitted on the other subjects, in five parts; None where a
    part cannot be fitted.
    """
    number = np.unique(subjects, return_inverse=True)[1]
    part = np.random.Generator(np.random.PCG64(0)).permutation(number.max(initial=0) + 1) % PARTS
    labelled, out = np.isfinite(y), np.asarray(risks, np.float64).copy()
    for k in range(PARTS):
        scored = part[number] == k
        fitted = fit_recalibration(risks[labelled & ~scored], y[labelled & ~scored])
        if fitted is None:
            return None
        out[scored] = fitted.apply(risks[scored])
    return out


def calibrate_labels(
    names: Sequence[str],
    risks: npt.NDArray[np.floating],
    target: Array,
    subjects: npt.NDArray[np.generic],
    fitted: Sequence[Recalibration | None] | None = None,
    *,
    crossed: bool = False,
) -> dict[str, LabelCalibration]:
    """`measure_calibration` of each label of risks [n, K], with the recalibrated ones where they
    are recalibrated: by `fitted`, or `crossed` on the other subjects of the same rows.
    """
    scores = {}
    for k, name in enumerate(names):
        label = measure_calibration(risks[:, k], target[:, k], subjects)
        recalibration, changed = None, None
        if crossed:
            labelled = np.isfinite(target[:, k])
            recalibration = fit_recalibration(risks[labelled, k], target[labelled, k])
            changed = cross_recalibrate(risks[:, k], target[:, k], subjects)
        elif fitted is not None and (recalibration := fitted[k]) is not None:
            changed = recalibration.apply(risks[:, k])
        if recalibration is not None and changed is not None:
            after = measure_calibration(changed, target[:, k], subjects)
            label = label.model_copy(
                update={"recalibration": recalibration._asdict(), "recalibrated": after}
            )
        scores[name] = label
    return scores
