"""Claims and EHR histories: sources to a cleaned cache, to labels, to sequences of PheCodes on an
irregular clock.

dates, codes, phecode_maps           texts to days, codes and PheCodes; each distinct text is read once
label_rules, labels                  labels as data; onsets, index dates and labels of subjects
clean                                claims as text to integers; every excluded row is counted by reason
prevalence                           PheCodes selected by prevalence ratio
choices                              choices of sequences, checked; presets
sequence_builder, steps              sequences of a shard of subjects, in two passes
engines, cluster                     shards in this process, or on the executors of a Spark cluster
build                                these steps on tables in memory
shortcut_baselines                   scores of sequence length and of single codes
sources, pass1_clean, pass2_write    raw files to the cache
sequence_plan, shard_map             choices of a build, and the shards of the cache as they want them
tokenize, tasks, meds_export         the cache to sequences, to sequences up to prediction times, to MEDS
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bitimely_core.registry import datasets

if TYPE_CHECKING:
    from bitimely_core.claims.build import build_sequences

datasets.provide("bitimely_core.claims.synthetic", "synthetic-claims")

__all__ = ["build_sequences"]


def __getattr__(name: str) -> Any:
    """Import the builder, and with it the libraries of tables, on first use."""
    if name in __all__:
        return getattr(importlib.import_module("bitimely_core.claims.build"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
