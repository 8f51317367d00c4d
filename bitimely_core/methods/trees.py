"""Gradient-boosted trees on counts of codes in windows before the index day.

Legend: n sequences, D counts, K labels.
"""

from __future__ import annotations

from pydantic import Field

from bitimely_core.methods import hazards, window_counts
from bitimely_core.methods.classifiers import pack_classifiers, unpack_classifiers
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import MethodFacts, methods


class TreesConfig(MethodConfig):
    """Settings of trees."""

    tries: int = Field(
        4,
        ge=1,
        le=len(window_counts.BOOSTING),
        description="Settings of the trees that are tried on the validation split.",
    )


def score(fitted: FittedMethod, rows: MethodRows) -> Array:
    """Probabilities, or of times to event risks."""
    x = window_counts.count_rows(rows.windows)[:, fitted.arrays["columns"]].toarray()
    if fitted.task == "survival":
        return hazards.predict_trees(hazards.unpack_hazards(fitted.arrays), x)
    return window_counts.predict_labels(unpack_classifiers(fitted.arrays), x)


@methods(
    MethodFacts(
        config=TreesConfig,
        input=("events",),
        tasks=("multilabel", "survival"),
        score=score,
        source="Ke et al. 2017, LightGBM; HistGradientBoostingClassifier of scikit-learn",
    )
)
def trees(config: TreesConfig, inputs: MethodFit) -> Arrays:
    """Gradient-boosted trees on counts of every code in the 30, 180 and 365 days before the index
    day and ever, the 400 that most training sequences have.
    """
    counts = inputs.map_splits(lambda rows: window_counts.count_rows(rows.windows))
    windows, y = inputs.train.windows, inputs.labels()
    is_survival = windows.task == "survival"
    most = hazards.count_columns(len(inputs.train)) if is_survival else window_counts.MOST_COLUMNS
    columns = window_counts.select_columns(counts["train"], most)
    x = {split: matrix[:, columns].toarray() for split, matrix in counts.items()}
    if is_survival:
        fitted = hazards.fit_trees(x, y, windows.class_names, config.tries)
        return {"columns": columns, **hazards.pack_hazards(fitted)}
    models = window_counts.fit_labels(window_counts.TREES, x, y, config.tries)
    return {"columns": columns, **pack_classifiers(models)}
