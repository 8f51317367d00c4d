"""Claims and EHR histories: sources to a cleaned cache, to labels, to sequences of PheCodes on an
irregular clock.

From raw files to the cache:

sources, options, job         layouts of raw files, options of an ingest, and both checked
dates, codes, phecode_maps    texts to days, to codes and to PheCodes
clean, distinct               claims as text to integers; each distinct text is read once
subjects, splits              raw ids to pseudonyms; train, validation and test
label_rules, labels           labels as data; onsets, index dates and labels of subjects
pass1_clean, spill            pass 1: clean rows by shard, in memory or on the disk
pass2_write, ingest_report    pass 2: the shards of the cache; the report on all rows
ingest                        these steps, from a source to the published cache

From the cache to sequences:

choices, sequence_plan        choices of a build, checked alone and against the cache
cohorts, event_times          who is at risk of an outcome, and times to it
engines, cluster              shards in this process, or on the executors of a Spark cluster
shard_map                     the shards of the cache as a plan wants them
steps, sequence_builder       the sequences of a shard, in two passes
prevalence, code_values       PheCodes selected by prevalence ratio; numbers of other codes
shortcut_baselines            scores of sequence length and of single codes
tokenize, tasks               the cache to sequences, and to sequences up to prediction times
build_findings                warnings and notices of a build
build                         the same steps on tables in memory
disclosure, protected_scores  which counts and scores may be printed
meds_export                   sequences to MEDS

kind                          the operations on all of them, as the kind of data `events`
synthetic, synthetic_draws, synthetic_config    claims of a made-up population
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bitimely_core.registry import data_kinds, datasets

if TYPE_CHECKING:
    from bitimely_core.claims.build import build_sequences

data_kinds.provide("bitimely_core.claims.event_kind", "events")
datasets.provide("bitimely_core.claims.synthetic_claims", "synthetic-claims")

__all__ = ["build_sequences"]


def __getattr__(name: str) -> Any:
    """Import the builder, and with it the libraries of tables, on first use."""
    if name in __all__:
        return getattr(importlib.import_module("bitimely_core.claims.build"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
