"""Logistic regression on counts of codes: of all in windows before the index day, or of one code
for each label.

Legend: n sequences, D counts, K labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from bitimely_core.average_precision import average_precision
from bitimely_core.methods import hazards, window_counts
from bitimely_core.methods.classifiers import pack_classifiers, unpack_classifiers
from bitimely_core.methods.lengths import LengthModel, fit_lengths, predict_lengths
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import MethodFacts, methods
from bitimely_core.types import group_columns

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


class CountsConfig(MethodConfig):
    """Settings of counts."""

    form: Literal["windows", "single-code"] = Field(
        "windows",
        description="Counts of all codes in windows, or for each label that of the best one.",
    )
    tries: int = Field(
        4,
        ge=1,
        le=len(window_counts.PENALTIES),
        description="Penalties that are tried on the validation split.",
    )


def score(fitted: FittedMethod, rows: MethodRows) -> Array:
    """Probabilities, or of times to event risks."""
    assert isinstance(fitted.config, CountsConfig)
    arrays, is_survival = fitted.arrays, fitted.task == "survival"
    if fitted.config.form == "single-code" and is_survival:
        x, risks = count_ever(rows), np.zeros((len(rows), len(fitted.class_names)))
        for code, label in zip(arrays["codes"], hazards.unpack_hazards(arrays), strict=True):
            alone = label._replace(columns=np.arange(len(label.columns)))
            risks[:, label.columns] = hazards.predict_logistic([alone], x[:, [code]])
        return risks
    if fitted.config.form == "single-code":
        model = LengthModel(*(arrays[name] for name in LengthModel._fields))
        return predict_lengths("multilabel", model, rows.windows.counts()[:, arrays["codes"]])
    logs = window_counts.count_rows(rows.windows).log1p()
    if is_survival:
        return hazards.predict_logistic(hazards.unpack_hazards(arrays), logs)
    return window_counts.predict_labels(unpack_classifiers(arrays), logs)


@methods(
    MethodFacts(
        config=CountsConfig, input=("events",), tasks=("multilabel", "survival"), score=score
    )
)
def counts(config: CountsConfig, inputs: MethodFit) -> Arrays:
    """Logistic regression on logarithms of counts of every code in the 30, 180 and 365 days before
    the index day and ever; form single-code: for each label on the count of one code.
    """
    windows, y = inputs.train.windows, inputs.labels()
    is_survival = windows.task == "survival"
    if config.form == "single-code":
        fit = fit_codes_to_events if is_survival else fit_codes
        return fit(inputs.train, y["train"], windows.class_names)
    logs = inputs.map_splits(lambda rows: window_counts.count_rows(rows.windows).log1p())
    if is_survival:
        penalties = window_counts.PENALTIES[: config.tries]
        fitted = hazards.fit_logistic(logs, y, windows.class_names, penalties)
        return hazards.pack_hazards(fitted)
    return pack_classifiers(window_counts.fit_labels(window_counts.LOGISTIC, logs, y, config.tries))


def count_ever(rows: MethodRows) -> csr_matrix:
    """Logarithms of the counts of every code up to the index day, [n, codes]."""
    return window_counts.count_rows(rows.windows)[:, -rows.windows.codes :].log1p()


def fit_codes(rows: MethodRows, y: Array, names: tuple[str, ...]) -> Arrays:
    """For each label the code whose count has the highest average precision, and the logistic
    regression on it; `y`: labels [n, K], NaN: not known.
    """
    counted, codes = rows.windows.counts(), []
    for label in y.T:
        labelled = np.isfinite(label)
        precision = [
            average_precision(counted[labelled, code], label[labelled]) or 0.0
            for code in range(counted.shape[1])
        ]
        codes.append(int(np.argmax(precision)))
    model = fit_lengths("multilabel", counted[:, codes], y)
    return {"codes": np.array(codes, np.int64), **model._asdict()}


def fit_codes_to_events(rows: MethodRows, y: Array, names: tuple[str, ...]) -> Arrays:
    """For each label the code that drives the hazard most, and the logistic regression of the
    hazard on it; `y`: times and events [n, C, 2].
    """
    x, fitted = count_ever(rows), []
    codes = hazards.choose_codes(x, y, names)
    for code, (columns, _) in zip(codes, group_columns(names).values(), strict=True):
        parts = {"train": x[:, [code]], "validation": x[:0, [code]]}
        times = {"train": y[:, columns], "validation": y[:0, columns]}
        (label,) = hazards.fit_logistic(parts, times, [names[k] for k in columns])
        fitted.append(label._replace(columns=np.array(columns)))
    return {"codes": np.array(codes, np.int64), **hazards.pack_hazards(fitted)}
