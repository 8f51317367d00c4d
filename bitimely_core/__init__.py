"""bitimely: representations of clinical time series, from raw files to reports.

The modules read in the order in which the data flows: formats, datasets, cache, tokens, data, tokenizers, ops, models,
objectives, heads, train, evaluate, analyses, report. Nothing heavy is imported here.
"""

__version__ = "0.1.0"
