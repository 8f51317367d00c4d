"""Where the spine's own models, objectives, augmentations, analyses and kinds of data are
found. Wings say so in their `__init__`, plug-ins when they are imported.

This module is the first entry point of `bitimely.plugins`, see `pyproject.toml`.
"""

from bitimely_core.registry import (
    analyses,
    augmentations,
    data_kinds,
    methods,
    models,
    objectives,
    row_readers,
)

models.provide("bitimely_core.models.stack")
methods.provide("bitimely_core.methods")
objectives.provide("bitimely_core.objectives.token_objectives")
augmentations.provide("bitimely_core.augment")
analyses.provide("bitimely_core.analyses")
data_kinds.provide("bitimely_core.tokens.kind", "recordings")
row_readers.provide("bitimely_core.data", "tensors")
