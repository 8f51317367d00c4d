"""What a data set measures of its recordings: peaks, spectra, band powers, intervals of the ECG.

Each is a `DatasetBaseline` in the facts of the data set. Its measure is either the prediction, or
features for a linear model.

Legend: n windows, D numbers that are measured.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from bitimely_core.errors import check_choice, usage_error
from bitimely_core.methods.linear import LinearModel, fit_linear, predict_linear
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import DatasetBaseline, MethodFacts, datasets, methods


class SignalConfig(MethodConfig):
    """Settings of signal."""

    measure: str | None = Field(
        None, description="Which measure of the data set; none: the first for the view."
    )
    dataset: str | None = Field(None, description="Data set of the measure; none: that of --data.")


def list_measures(windows: object) -> dict[str, DatasetBaseline]:
    """The measures that the data set of these windows registers for their view."""
    dataset, view = getattr(windows, "dataset", ""), getattr(windows, "view", "")
    if dataset not in datasets:
        return {}
    return {
        baseline.name: baseline
        for baseline in datasets[dataset].facts.baselines
        if not baseline.views or view in baseline.views
    }


def resolve(config: SignalConfig, windows: object) -> SignalConfig:
    """The settings with the measure that is taken. Raises UserError (config, exit 2) without
    one.
    """
    measures = list_measures(windows)
    if not measures:
        raise usage_error(
            f"{getattr(windows, 'name', 'this view')} has no measure of its signals",
            "expected a view of a data set that registers one",
            "Use features or kernels, or register one (docs/extending.md)",
            field="MODEL",
        )
    name = config.measure or next(iter(measures))
    check_choice("measure", name, measures)
    chosen = {"measure": name, "dataset": getattr(windows, "dataset", None)}
    return config.model_copy(update=chosen)


def find_measure(config: SignalConfig) -> DatasetBaseline:
    """The measure of resolved settings."""
    measures = {
        baseline.name: baseline for baseline in datasets[str(config.dataset)].facts.baselines
    }
    check_choice("measure", str(config.measure), measures)
    return measures[str(config.measure)]


def measure_rows(baseline: DatasetBaseline, rows: MethodRows) -> Array:
    """The measure of every row, [n, D] float64, NaN where it cannot be taken.

    Raises UserError (config, exit 2) where rows have different numbers of them.
    """
    channels = baseline.channels or tuple(rows.windows.channel_names)
    measured = list(map(np.atleast_1d, rows.map_native(channels, baseline.measure)))
    if len({x.shape for x in measured}) > 1 or any(x.ndim != 1 for x in measured):
        raise usage_error(
            f"gives arrays of the shapes {', '.join(sorted({str(x.shape) for x in measured}))}",
            "expected as many numbers of every window",
            "Correct the function in the registration of the data set",
            field=f"measure {baseline.name} of {rows.windows.dataset}",
        )
    return np.array(measured, np.float64).reshape(len(measured), -1)


def score(fitted: FittedMethod, rows: MethodRows) -> Array:
    """What is measured, or predictions from it; of windows without it the training's median."""
    assert isinstance(fitted.config, SignalConfig)
    baseline, arrays = find_measure(fitted.config), dict(fitted.arrays)
    measured = measure_rows(baseline, rows)
    filled = np.where(np.isfinite(measured), measured, arrays.pop("missing"))
    if not baseline.fitted:
        return filled[:, 0]
    return predict_linear(fitted.task, LinearModel(**arrays), filled)


@methods(
    MethodFacts(
        config=SignalConfig,
        input=("signals",),
        tasks=("classification", "multilabel", "regression"),
        score=score,
        resolve=resolve,
    )
)
def signal(config: SignalConfig, inputs: MethodFit) -> Arrays:
    """Signal processing of the data set: what its peaks, spectrum, band powers or intervals tell,
    alone or through a linear model.
    """
    baseline, y = find_measure(config), inputs.labels()
    windows = inputs.train.windows
    if not baseline.fitted:
        if windows.task != "regression":
            raise usage_error(
                f"{baseline.name} measures a value, and {windows.name} has classes",
                "expected a measure that is fitted",
                "Choose another with --set model.measure",
                field="model.measure",
            )
        return {"missing": np.array([np.nanmean(y["train"])], np.float64)}
    x = inputs.map_splits(lambda rows: measure_rows(baseline, rows))
    missing = np.array(list(map(_find_median, x["train"].T)))
    for split, values in x.items():
        values = values.reshape(-1, len(missing))
        x[split] = np.where(np.isfinite(values), values, missing)
    fit = fit_linear(windows.task, x, y, max(windows.classes, 1))
    return {"missing": missing, **fit.model._asdict()}


def _find_median(values: Array) -> float:
    """The median of the finite values; 0 where there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0
