"""The page of scored vectors of an encoder: its linear probe beside runs and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.evaluate.intervals import list_values
from bitimely_core.evaluate.metrics import NAMES
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    compare_models,
    name_verdict,
    print_bounds,
)
from bitimely_core.page import Page, PageBuilder, Table, make_tables, rename_units
from bitimely_core.report.run_page import verdict_text
from bitimely_core.report.score_blocks import add_score_blocks
from bitimely_core.schemas.scores import ComparedRow, MetricValue, Scores

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

ABOUT = (
    "The encoder is frozen: on its vectors a linear model is fitted to the training split, its "
    "penalty is chosen by the loss on the validation split, and it is scored on the test split. "
    "What the encoder learnt shows in the difference to random weights and to simple features, not "
    "in the score. Evidence against a benefit of the encoder: a baseline that is not significantly "
    "worse."
)


def encoder_page(windows: Windows, scores: Scores, columns: Mapping[str, npt.NDArray[Any]]) -> Page:
    """The page of scored vectors. `windows`: those of the scores; `columns`: their target and
    prediction, empty for a part of a split.
    """
    encoder = scores.encoder
    assert encoder is not None, "scores of vectors"
    page = PageBuilder(f"Vectors of {scores.run} on {scores.data}")
    page.notice(*scores.notices, *scores.remarks)
    declared = "not declared"
    if encoder.pretrained_on is not None:
        declared = ", ".join(encoder.pretrained_on) or "none (declared)"
    task, penalty = "ridge" if windows.task == "regression" else "logistic", encoder.penalty
    method = f"{task} regression on standardised vectors, penalty {np.median(penalty):g}"
    page.fact("Encoder", f"{scores.run}, vectors of {encoder.width:,} numbers")
    page.fact("File", f"{encoder.file} (SHA-256 {encoder.sha256[:16]})")
    page.fact("Pre-training data", declared)
    page.fact("Probe", f"{method} by validation loss")
    if encoder.fitted_on:
        counts = [f"{count:,} {split} windows" for split, count in encoder.fitted_on.items()]
        page.fact("Fitted on", ", ".join(counts))
    page.fact("Data", f"{scores.data}, split by {windows.split}")
    page.fact("Fingerprint of the data", windows.fingerprint[:16])
    add_score_blocks(page, windows, scores, columns, compared_table(scores))
    page.text(ABOUT)
    return rename_units(page.finish(verdict_text(scores), scores.to_json()), windows.subject_unit)


def compared_table(scores: Scores) -> list[Table]:
    """Trained models on the same windows, and the paired differences of the encoder to them,
    Holm-corrected.
    """
    metric, family = PrintedMetric(str(scores.main), scores.unit), compare_models(scores)
    rows, compared = [], scores.compared or {}
    for name, d in family.items():
        models = [compared[key] for key in (d.models if isinstance(d, ComparedRow) else (name,))]
        values = [model.metrics.get(metric.name, MetricValue()) for model in models]
        mean = values[0]
        if len(values) > 1:
            mean = MetricValue(value=float(np.mean(list_values(values))))
        difference = metric.fit_difference(d).difference(d.difference)
        corrected = None if d.corrected_lo is None else print_bounds(d, metric)
        test = (difference, corrected, d.p_holm, name_verdict(d, metric))
        rows.append([name, mean, len(models), *test, models[0].about])
    words, unit = NAMES.get(metric.name, ""), evaluate.name_unit(scores)
    test_columns = ("encoder less model", "corrected 95 % CI", "p, Holm", "significant?")
    return make_tables(
        "compared",
        "Other models on the same windows",
        f"The same windows. Difference: the encoder less the model, paired {unit} by {unit}, of "
        f"the {words}; all {len(family)} are one family with Holm correction, whose intervals "
        "match the tests and are not simultaneous. They speak of these trained models: with fewer "
        "than 3 seeds of each nothing is said about the methods.",
        ["model", words, "seeds", *test_columns, "method"],
        rows,
    )
