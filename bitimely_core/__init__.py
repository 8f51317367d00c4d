"""bitimely: representations of clinical time series, from raw files to reports.

The modules read in the order in which the data flows: formats, datasets, cache, tokens, claims,
data, ops, models, objectives, training, evaluate, analyses, report, workflows, pipeline. Nothing
heavy is imported here.
"""

__version__ = "0.1.0"
