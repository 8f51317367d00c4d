"""Metrics that may be undefined: bootstrap over subjects, baselines, paired comparisons. Records are in `schemas`.

The value of a metric is null where the rows cannot define it (an absent class, one class only), never a silent 0, 1 or NaN. `se`, `lo`, `hi`
are the standard deviation and the 2.5 and 97.5 percentiles over bootstrap replicates; they are null, with the reason, below the stated
minima. Replicates in which the metric is not defined are dropped. Macro means also count their classes.

The unit of resampling is the subject: a replicate draws as many subjects as there are, with replacement, and weights every row by how often
its subject was drawn. So rows are neither sorted again nor copied: a metric is a function of the weights, evaluated on many replicates at once.

Legend: n rows, U units of resampling (subjects, or rows with by="window"), R replicates, K classes or labels, G groups of equal scores.
"""

from __future__ import annotations

from bitimely_core.evaluate.bootstrap import MINIMUM_DEFINED, MINIMUM_UNITS, draw_counts
from bitimely_core.evaluate.metrics import LOWER_IS_BETTER, MAIN, METRICS, NAMES, STATISTICS, to_probabilities
from bitimely_core.evaluate.multiple import (
    Replicates,
    draw_replicates,
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
    compare_frames,
    list_classes,
    parse_predictions,
    predictions_frame,
)
from bitimely_core.evaluate.scores import constant_baselines, length_baseline, score, score_figure

__all__ = [
    "IDENTITY",
    "LOWER_IS_BETTER",
    "MAIN",
    "METRICS",
    "MINIMUM_DEFINED",
    "MINIMUM_UNITS",
    "NAMES",
    "STATISTICS",
    "Predictions",
    "Replicates",
    "align_runs",
    "compare",
    "compare_frames",
    "constant_baselines",
    "draw_counts",
    "draw_replicates",
    "holm",
    "holm_correct",
    "length_baseline",
    "list_classes",
    "mean_over_seeds",
    "nemenyi",
    "paired_difference",
    "parse_predictions",
    "predictions_frame",
    "rank_values",
    "score",
    "score_figure",
    "significance_sign",
    "to_probabilities",
]
