"""Shards of cached claims with subjects, labels and numbers as a plan wants them: one after
another, or on the executors of a Spark cluster.
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

from bitimely_core.claims import code_values, codes, engines, steps, subject_splits
from bitimely_core.claims.label_rules import parse_rules
from bitimely_core.claims.periods import PERIOD_COLUMNS
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.steps import ClaimsShard, PhecodesOfCodes
from bitimely_core.errors import usage_error
from bitimely_core.store import storage

T = TypeVar("T")
DAY, MINUTE = 86_400_000_000, 60_000_000  # microseconds
# rows of all shards, some 13 bytes each, up to which they stay in memory from one pass to the next
HELD_ROWS = 1 << 24


@dataclass
class ShardReader:
    """Reads the shards of a plan one after another; subjects without any event come with the
    last.
    """

    plan: SequencePlan
    cohort: pl.DataFrame  # of `load_subjects`
    # of the codes of the shards read so far
    phecodes: PhecodesOfCodes = field(default_factory=dict)

    def __post_init__(self) -> None:
        # [subjects] whether no shard read so far has an event of theirs
        self.eventless = np.ones(self.cohort.height, bool)

    def read(self, number: int) -> ClaimsShard:
        """One shard with its labels, up to the index days."""
        plan = self.plan
        shard = self._load(number)
        pa.default_memory_pool().release_unused()  # the tables that were read are gone
        if not plan.choices.input_order:
            shard = replace(shard, rows=shard.rows.drop("row"))
        shard = steps.set_index_days(shard, plan.choices, plan.manifest.data_end)
        if plan.fitted is None or plan.choices.values != "deciles":
            return shard
        return code_values.bin_values(shard, plan.fitted)

    def _load(self, number: int) -> ClaimsShard:
        plan, manifest = self.plan, self.plan.manifest
        events = _read_events(plan, number, self.phecodes)
        member = np.zeros(self.cohort.height, bool)
        member[events["subject_id"].to_numpy()] = True
        self.eventless &= ~member
        if number == len(manifest.shards) - 1:
            member |= self.eventless
        subjects = np.flatnonzero(member)
        cohort = self.cohort[subjects].select(
            pl.Series("subject_id", subjects),
            pl.all().exclude("split"),
            pl.col("split").cast(pl.String),
        )
        place = pl.Series(np.cumsum(member, dtype=np.int32) - 1)
        events = events.with_columns(subject=place.gather(events["subject_id"]))
        rules = parse_rules(plan.rules)
        made = [rule["name"] for rule in manifest.rules if manifest.ruled]
        if plan.cohort is None:
            cohort = _fill_index_days(cohort, events)
        else:
            rules = (*rules, plan.cohort.outcome_rule)
        rows, numbered = steps.number_codes(
            events, self.phecodes, by_sex=_has_sex_restrictions(plan)
        )
        return ClaimsShard(
            rows=rows,
            codes=numbered,
            cohort=cohort,
            rule_labels=frozenset(made),
            rules=rules,
            defining=plan.rule_phecodes,
            number=number,
        )


@dataclass
class ShardMap:
    """Applies functions to the shards of a plan, in their order: in this process, or on the
    executors of a Spark cluster.
    """

    plan: SequencePlan
    cohort: pl.DataFrame | None  # None: each executor reads it
    # shards by number, where all of them fit
    held: dict[int, ClaimsShard] = field(default_factory=dict)
    reader: ShardReader | None = None

    def apply(self, function: Callable[[ClaimsShard], T]) -> Iterator[T]:
        """`function` of each shard; for Spark it can be pickled."""
        shards = self.plan.manifest.shards
        if self.plan.engine == "spark":
            cache = replace(self.plan.cache, folder=self.plan.cache.folder.resolve())
            split_file = self.plan.split_file and str(Path(self.plan.split_file).resolve())
            plan = replace(self.plan, cache=cache, split_file=split_file)
            task = partial(_apply_remotely, plan, self.cohort, function)
            yield from engines.run_tasks(task, range(len(shards)))
            return
        assert self.cohort is not None
        self.reader = self.reader or ShardReader(self.plan, self.cohort)
        n_rows = sum(self.plan.manifest.files[name].rows or 0 for name in shards)
        fits = len(shards) == 1 or n_rows <= HELD_ROWS
        for number in range(len(shards)):
            shard = self.held.get(number) or self.reader.read(number)
            if fits:
                self.held[number] = shard
            result = function(shard)
            del shard  # before the next is read
            yield result


_subjects: dict[str, pl.DataFrame] = {}  # of an executor: the last table of subjects, by plan


def _apply_remotely(
    plan: SequencePlan,
    cohort: pl.DataFrame | None,
    function: Callable[[ClaimsShard], T],
    number: int,
) -> T:
    """On an executor: `function` of one shard."""
    if cohort is None:
        folder = str(plan.cache.folder)
        key = storage.fingerprint([folder, plan.manifest.manifest_sha256, plan.options])
        if key not in _subjects:
            _subjects.clear()
            _subjects[key] = load_subjects(plan)
        cohort = _subjects[key]
    reader = ShardReader(plan, cohort)
    if number == len(plan.manifest.shards) - 1:
        for other in range(number):
            ids = plan.cache.shard(other, ("subject_id",))["subject_id"]
            reader.eventless[ids.unique().to_numpy()] = False
    return function(reader.read(number))


def load_subjects(plan: SequencePlan) -> pl.DataFrame:
    """Every subject with its split and labels, row i the subject i: some 26 bytes each with three
    labels.
    """
    columns = ["subject_id", "birth_day", "obs_end", "index_day", "sex", "split_bin", "split"]
    if plan.cohort is not None:
        columns.append("obs_start")
    if plan.cohort is not None or plan.choices.landmark is not None:
        columns += PERIOD_COLUMNS
    if plan.cohort is not None or plan.choices.time_to_event:
        columns.append("death_day")
    cohort = _place_subjects(plan, plan.cache.cohort(tuple(columns)))
    if "index_day" in cohort.columns and not cohort["index_day"].count():
        cohort = cohort.drop("index_day")
    if plan.cohort is None and plan.manifest.names:
        # one column of the labels in memory at a time
        cohort = cohort.with_columns(**_read_labels(plan, "y", "value"))
        cohort = cohort.with_columns(**_read_labels(plan, "onset", "onset_day"))
    pa.default_memory_pool().release_unused()
    return cohort.drop("subject_id")


def _place_subjects(plan: SequencePlan, cohort: pl.DataFrame) -> pl.DataFrame:
    """The subjects with their split: that of the split file, of the source, or by their hash.

    Raises UserError (config, exit 2) where the split file misses subjects.
    """
    names = pl.Enum(subject_splits.SPLITS)
    if plan.external and not plan.split_file:
        return cohort.with_columns(split=pl.lit("test", names)).drop("split_bin")
    if plan.split_file:
        path = Path(plan.split_file)
        placed = subject_splits.read_split_file(
            path, "numbers of subjects.parquet; give ids of the source to ingest", numbers=True
        )
        placed = placed.with_columns(pl.col("split").cast(names))
        cohort = cohort.drop("split", "split_bin", strict=False).join(
            placed, on="subject_id", how="left", maintain_order="left"
        )
        if missing := cohort["split"].null_count():
            text = f"misses {missing} of {cohort.height} subjects"
            raise usage_error(text, "expected all", file=plan.split_file, field="--split-file")
        return cohort
    bins = sorted(cohort["split_bin"].unique().to_list())
    split = pl.col("split_bin").replace_strict(
        bins, list(map(subject_splits.assign_split_of_bin, bins)), return_dtype=names
    )
    if "split" in cohort.columns:
        split = pl.col("split").cast(names).fill_null(split)
    return cohort.with_columns(split=split).drop("split_bin")


def _read_labels(plan: SequencePlan, prefix: str, column: str) -> dict[str, pl.Series]:
    """A column of the stored labels as one column a label, `<prefix>_<name>`, a row a subject."""
    names = sorted(plan.manifest.names)
    values = plan.cache.labels((column,))[column]  # by subject and name
    return {f"{prefix}_{name}": values[i :: len(names)] for i, name in enumerate(names)}


def _has_sex_restrictions(plan: SequencePlan) -> bool:
    """Whether rows of one code may have other PheCodes."""
    return bool(plan.manifest.settings.options.get("sex_restrictions"))


def _read_events(plan: SequencePlan, number: int, phecodes: PhecodesOfCodes) -> pl.DataFrame:
    """subject_id, day, code, source of the rows of a shard, in the order of the input where it
    matters; minute and value where they are needed.

    The column of PheCodes takes half of the time of reading. It is read only where `phecodes` lacks
    a code.
    """
    numeric = plan.choices.values != "none"
    ordered = plan.choices.input_order or numeric
    columns = ["subject_id", "time", "code", "source"]
    columns += ["row"] * ordered + ["numeric_value"] * numeric
    events = plan.cache.shard(number, tuple(columns), categories=("code",))
    if plan.prepared is not None and not _has_sex_restrictions(plan):
        texts = events["code"].unique().cast(pl.String).to_list()
        phecodes.update(
            codes.map_codes(plan.prepared.codemap.phecodes, set(texts) - phecodes.keys())
        )
    if _has_sex_restrictions(plan) or not phecodes.keys() >= set(events["code"].unique()):
        events = events.with_columns(plan.cache.shard(number, ("phecodes",)))
    if ordered:
        events = events.sort("subject_id", "row").drop("row")
    time = pl.col("time").cast(pl.Int64)
    measures = {}
    if plan.manifest.settings.options.get("time_unit") == "minute":
        measures["minute"] = time % DAY // MINUTE
    if numeric:
        value = pl.col("numeric_value")
        measures["value"] = pl.when(value == 0).then(0.0).otherwise(value)  # -0 sorts before 0
    return events.with_columns(day=(time // DAY).cast(pl.Int32), **measures)


def _fill_index_days(cohort: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Where the source gives index days: for subjects without one the day of their last row."""
    if "index_day" not in cohort.columns:
        return cohort
    if cohort["index_day"].null_count() == cohort.height:
        return cohort.drop("index_day")
    last = events.group_by("subject_id").agg(last=pl.col("day").max())
    cohort = cohort.join(last, on="subject_id", how="left", maintain_order="left")
    index_day = pl.coalesce("index_day", "last").cast(pl.Int64)
    return cohort.with_columns(index_day=index_day).drop("last")
