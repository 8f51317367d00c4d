"""Metrics that may be undefined: intervals over subjects, baselines, paired comparisons. Records
are in `schemas`.

The value of a metric is null where the rows cannot define it (an absent class, one class only),
never a silent 0, 1 or NaN. `se`, `lo`, `hi` are null, with the reason, below the stated minima
(`intervals`). Macro means also count their classes.

The unit of the variance is the subject: every metric is known with its derivative with respect to
the weight of each subject, which one pass over the rows and one sort a class give.

Legend: n rows, U units (subjects, or rows with by="window"), R replicates, K classes or labels, G
groups of equal scores.
"""

from __future__ import annotations

from bitimely_core.evaluate import survival_metrics  # it registers its metrics
from bitimely_core.evaluate.bootstrap import MINIMUM_DEFINED, draw_counts
from bitimely_core.evaluate.intervals import MINIMUM_UNITS, average_over_units
from bitimely_core.evaluate.metrics import (
    LOWER_IS_BETTER,
    MAIN,
    METRICS,
    NAMES,
    ROUNDING,
    MetricUnit,
    find_unit,
    name_metric,
    to_probabilities,
)
from bitimely_core.evaluate.multiple import (
    RunEstimates,
    apply_margins,
    average_differences,
    compare_with_baseline,
    compare_with_zero,
    correct_pairs,
    estimate_runs,
    explain_no_verdict,
    holm,
    holm_correct,
    mean_over_seeds,
    nemenyi,
    paired_difference,
    rank_values,
    significance_sign,
)
from bitimely_core.evaluate.paired import (
    IDENTITY,
    Predictions,
    align_runs,
    compare,
    list_classes,
    parse_predictions,
    predictions_frame,
)
from bitimely_core.evaluate.scoring import (
    ConstantBaseline,
    constant_baselines,
    describe_units,
    length_baseline,
    name_unit,
    score,
    score_figure,
)

__all__ = [
    "IDENTITY",
    "LOWER_IS_BETTER",
    "MAIN",
    "METRICS",
    "MINIMUM_DEFINED",
    "MINIMUM_UNITS",
    "NAMES",
    "ROUNDING",
    "ConstantBaseline",
    "MetricUnit",
    "Predictions",
    "RunEstimates",
    "align_runs",
    "apply_margins",
    "average_differences",
    "average_over_units",
    "compare",
    "compare_with_baseline",
    "compare_with_zero",
    "constant_baselines",
    "correct_pairs",
    "describe_units",
    "draw_counts",
    "estimate_runs",
    "explain_no_verdict",
    "find_unit",
    "holm",
    "holm_correct",
    "length_baseline",
    "list_classes",
    "mean_over_seeds",
    "name_metric",
    "name_unit",
    "nemenyi",
    "paired_difference",
    "parse_predictions",
    "predictions_frame",
    "rank_values",
    "score",
    "score_figure",
    "significance_sign",
    "survival_metrics",
    "to_probabilities",
]
