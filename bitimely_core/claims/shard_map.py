"""Shards of cached claims, one after another or on the executors of a Spark cluster, with subjects,
labels and numbers as a plan wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

from bitimely_core import storage
from bitimely_core.claims import code_values, engines, splits, steps
from bitimely_core.claims.label_rules import parse_rules
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.steps import ClaimsShard, PhecodesOfCodes
from bitimely_core.errors import usage_error
from bitimely_core.privacy import round_message

T = TypeVar("T")
DAY, MINUTE = 86_400_000_000, 60_000_000  # microseconds
# rows of all shards, some 13 bytes each, up to which they stay in memory from one pass to the next
HELD_ROWS = 1 << 24


@dataclass
class ShardMap:
    """Applies functions to the shards of a plan, in their order: in this process, or on the
    executors of a Spark cluster.
    """

    plan: SequencePlan
    cohort: pl.DataFrame | None  # None: each executor reads it
    # shards by number, where all of them fit
    held: dict[int, ClaimsShard] = field(default_factory=dict)
    # of the codes of the shards read so far
    phecodes: PhecodesOfCodes = field(default_factory=dict)

    def apply(self, function: Callable[[ClaimsShard, int], T]) -> Iterator[T]:
        """`function` of each shard and its number; for Spark it can be pickled."""
        total = len(self.plan.manifest.shards)
        if self.plan.engine == "spark":
            cache = replace(self.plan.cache, folder=self.plan.cache.folder.resolve())
            split_file = self.plan.split_file and str(Path(self.plan.split_file).resolve())
            task = partial(
                _apply_remotely,
                replace(self.plan, cache=cache, split_file=split_file),
                self.cohort,
                function,
            )
            yield from engines.run_tasks(task, range(total))
            return
        assert self.cohort is not None
        eventless = np.ones(self.cohort.height, bool)
        files = self.plan.manifest.files
        fits = (
            total == 1
            or sum(files[name].rows or 0 for name in self.plan.manifest.shards) <= HELD_ROWS
        )
        for number in range(total):
            shard = self.held.get(number) or _read_shard(
                self.plan, self.cohort, number, eventless, self.phecodes
            )
            if fits:
                self.held[number] = shard
            result = function(shard, number)
            del shard  # before the next is read
            yield result


_subjects: dict[str, pl.DataFrame] = {}  # of an executor: the last table of subjects, by plan


def _apply_remotely(
    plan: SequencePlan,
    cohort: pl.DataFrame | None,
    function: Callable[[ClaimsShard, int], T],
    number: int,
) -> T:
    """On an executor: `function` of one shard."""
    if cohort is None:
        key = storage.fingerprint(
            [str(plan.cache.folder), plan.manifest.manifest_sha256, plan.options]
        )
        if key not in _subjects:
            _subjects.clear()
            _subjects[key] = load_subjects(plan)
        cohort = _subjects[key]
    eventless = np.ones(cohort.height, bool)
    if number == len(plan.manifest.shards) - 1:
        for other in range(number):
            eventless[
                plan.cache.shard(other, ("subject_id",))["subject_id"].unique().to_numpy()
            ] = False
    return function(_read_shard(plan, cohort, number, eventless, {}), number)


def load_subjects(plan: SequencePlan) -> pl.DataFrame:
    """Every subject with its split and labels, row i the subject i: some 26 bytes each with three
    labels.
    """
    more = [
        *["obs_start"] * (plan.cohort is not None),
        *["death_day"] * bool(plan.cohort or plan.choices.time_to_event),
    ]
    cohort = plan.cache.cohort(
        ("subject_id", "birth_day", "obs_end", "index_day", "sex", "split_bin", "split", *more)
    )
    bins = sorted(cohort["split_bin"].unique().to_list())
    places = pl.Enum(splits.SPLITS)
    placed = pl.col("split_bin").replace_strict(
        bins, [splits.assign_split_of_bin(number) for number in bins], return_dtype=places
    )
    cohort = cohort.with_columns(
        split=pl.col("split").cast(places).fill_null(placed)
        if "split" in cohort.columns
        else placed
    )
    cohort = cohort.drop("split_bin")
    if plan.split_file:
        given = splits.read_split_file(
            Path(plan.split_file), "as in subjects.parquet", numbers=True
        )
        given = given.with_columns(pl.col("split").cast(places))
        cohort = cohort.drop("split").join(
            given, on="subject_id", how="left", maintain_order="left"
        )
        if missing := cohort["split"].null_count():
            text = round_message(f"misses {missing} of {cohort.height} subjects")
            raise usage_error(text, "expected all", file=plan.split_file, field="--split-file")
    names = sorted(plan.manifest.names) if plan.cohort is None else []
    columns: dict[str, pl.Series] = {}
    for kind, of in (("y", "value"), ("onset", "onset_day")):
        table = plan.cache.labels((of,))  # by subject and name
        columns |= {f"{kind}_{name}": table[of][i :: len(names)] for i, name in enumerate(names)}
        del table
    cohort = cohort.with_columns(
        columns[f"{kind}_{name}"].alias(f"{kind}_{name}")
        for name in names
        for kind in ("y", "onset")
    )
    pa.default_memory_pool().release_unused()
    return cohort.drop("subject_id")


def iter_shards(plan: SequencePlan, cohort: pl.DataFrame) -> Iterator[ClaimsShard]:
    """The cache's shards, labels marked; subjects without any event come with the last."""
    eventless, phecodes = np.ones(cohort.height, bool), PhecodesOfCodes()
    for number in range(len(plan.manifest.shards)):
        shard = _read_shard(plan, cohort, number, eventless, phecodes)
        yield shard
        del shard


def _read_shard(
    plan: SequencePlan,
    cohort: pl.DataFrame,
    number: int,
    eventless: np.ndarray,
    phecodes: PhecodesOfCodes,
) -> ClaimsShard:
    """One shard; `eventless` [subjects] becomes False for its subjects, and the last shard takes
    those for whom it is still True.

    `phecodes` grows by those of its codes.
    """
    manifest, choices = plan.manifest, plan.choices
    events = _read_events(plan, number, phecodes)
    member = np.zeros(cohort.height, bool)
    member[events["subject_id"].to_numpy()] = True
    eventless &= ~member
    if number == len(manifest.shards) - 1:
        member |= eventless
    rows, place = np.flatnonzero(member), pl.Series(np.cumsum(member, dtype=np.int32) - 1)
    shard_cohort = cohort[rows].select(
        pl.Series("subject_id", rows), pl.all().exclude("split"), pl.col("split").cast(pl.String)
    )
    events = events.with_columns(subject=place.gather(events["subject_id"]))
    rules = parse_rules(manifest.rules)
    shard = steps.load_shard(
        events,
        _fill_index_days(shard_cohort, events) if plan.cohort is None else shard_cohort,
        rule_labels=[rule.name for rule in rules if manifest.ruled],
        rules=rules if plan.cohort is None else (*rules, plan.cohort.outcome_rule),
        defining=plan.defining.union(*manifest.defining.values()),
        by_sex=_has_sex_restrictions(plan),
        phecodes_of_codes=phecodes,
    )
    del events, shard_cohort
    pa.default_memory_pool().release_unused()
    if not choices.input_order:
        shard = replace(shard, rows=shard.rows.drop("row"))
    shard = steps.set_index_days(shard, choices, manifest.data_end)
    return (
        shard
        if plan.fitted is None or choices.values != "deciles"
        else code_values.bin_values(shard, plan.fitted)
    )


def _has_sex_restrictions(plan: SequencePlan) -> bool:
    """Whether rows of one code may have other PheCodes."""
    return bool(plan.manifest.settings.options.get("sex_restrictions"))


def _read_events(plan: SequencePlan, number: int, phecodes: PhecodesOfCodes) -> pl.DataFrame:
    """subject_id, day, code, source of the rows of a shard, in the order of the input where it
    matters, with minute and value where needed.

    The column of PheCodes, half of the time of reading, is read only where `phecodes` lacks a code.
    """
    options, numeric = plan.manifest.settings.options, plan.choices.values != "none"
    columns = ["subject_id", "time", "code", "source"]
    ordered = plan.choices.input_order or numeric
    if ordered:
        columns.append("row")
    if numeric:
        columns.append("numeric_value")
    events = plan.cache.shard(number, tuple(columns), categories=("code",))
    if _has_sex_restrictions(plan) or not phecodes.keys() >= set(events["code"].unique()):
        events = events.with_columns(plan.cache.shard(number, ("phecodes",)))
    if ordered:
        events = events.sort("subject_id", "row").drop("row")
    since = pl.col("time").cast(pl.Int64)
    measures = {"minute": since % DAY // MINUTE} if options.get("time_unit") == "minute" else {}
    if numeric:
        # without -0, which sorts as 0
        measures["value"] = (
            pl.when(pl.col("numeric_value") == 0).then(0.0).otherwise("numeric_value")
        )
    return events.with_columns(day=(since // DAY).cast(pl.Int32), **measures)


def _fill_index_days(cohort: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Where the source gives index days: for subjects without one the day of their last row."""
    if "index_day" not in cohort.columns:
        return cohort
    if cohort["index_day"].null_count() == cohort.height:
        return cohort.drop("index_day")
    last = events.group_by("subject_id").agg(last=pl.col("day").max())
    cohort = cohort.join(last, on="subject_id", how="left", maintain_order="left")
    return cohort.with_columns(index_day=pl.coalesce("index_day", "last").cast(pl.Int64)).drop(
        "last"
    )
