"""Linear models on simple features: of signals means, deviations and spectra, of events counts.

Legend: n rows, D features, K classes or labels.
"""

from __future__ import annotations

from bitimely_core.errors import usage_error
from bitimely_core.methods.linear import (
    LinearModel,
    extract_simple_features,
    fit_linear,
    predict_linear,
)
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import MethodFacts, methods


class FeaturesConfig(MethodConfig):
    """Settings of features: none."""


def score(fitted: FittedMethod, rows: MethodRows) -> Array:
    """Predictions of rows by the linear model."""
    model = LinearModel(**fitted.arrays)
    features = extract_simple_features(rows.windows, rows.windows.rows)
    if features.shape[1] != len(model.mean):
        raise usage_error(
            f"{features.shape[1]} features of each row",
            f"expected {len(model.mean)}, of the windows that the run was trained on",
            "Give windows of the same length",
            field="--data",
        )
    return predict_linear(fitted.task, model, features)


@methods(
    MethodFacts(
        config=FeaturesConfig,
        input=("signals", "events"),
        tasks=("classification", "multilabel", "regression"),
        score=score,
    )
)
def features(config: FeaturesConfig, inputs: MethodFit) -> Arrays:
    """Logistic or ridge regression on simple features: of each channel mean, logarithm of the
    standard deviation and of the power in 16 bands; of events logarithms of counts of codes.
    """
    windows = inputs.train.windows
    x = inputs.map_splits(lambda rows: extract_simple_features(rows.windows, rows.windows.rows))
    # no rows give no columns
    x["validation"] = x["validation"].reshape(-1, x["train"].shape[1])
    fit = fit_linear(windows.task, x, inputs.labels(), max(windows.classes, 1))
    return fit.model._asdict()
