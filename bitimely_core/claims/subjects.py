"""Finds the subjects of an ingest between its two passes: who is present, what the source says of
them, and their pseudonyms.

A subject's pseudonym is the rank of its digest among those of all present subjects. Only the first
8 bytes of each digest are in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from bitimely_core import storage
from bitimely_core.claims import dates, spill
from bitimely_core.claims.job import SUBJECT_DATES, ClaimsJob, CleaningFindings
from bitimely_core.claims.pseudonyms import compute_digests, to_keys
from bitimely_core.claims.spill import Stretch
from bitimely_core.errors import Reason, input_warning, integrity_error, quote_formula, usage_error
from bitimely_core.privacy import round_message

CHUNK = 1 << 18  # subjects whose digests are computed together


class CleanedSource(NamedTuple):
    """What the first pass leaves to the second."""

    findings: CleaningFindings
    stretches: Sequence[Stretch]
    facts: Path | None  # of `write_subject_facts`


def join_subject_tables(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Tables with one row for each subject_id as one, with the subjects of all."""
    joined, *others = tables
    for table in others:
        joined = joined.join(table, on="subject_id", how="full", coalesce=True)
    return joined


def write_subject_facts(job: ClaimsJob) -> Path | None:
    """Write what the tables of the source hold of each subject, by digest and shard; None where
    they hold nothing.
    """
    path = job.home / f"{job.stem}-facts.parquet"
    tables = _list_subject_tables(job)
    if not tables:
        return None
    if not path.is_file():
        facts = join_subject_tables(tables).drop_nulls("subject_id")
        ids = facts["subject_id"].to_list()
        digests = pl.concat(
            compute_digests(ids[i : i + CHUNK], job) for i in range(0, max(len(ids), 1), CHUNK)
        )
        facts = pl.concat([digests, facts.drop("subject_id")], how="horizontal")
        spill.write_partitions(path, spill.partition_rows(facts, job.shards))
    return path


def _list_subject_tables(job: ClaimsJob) -> list[pl.DataFrame]:
    """The tables of subjects, of labels and of splits, as far as the source has them."""
    subjects, labels, tables = job.claims.subjects, job.claims.labels, []
    if subjects is not None:
        days = {new: dates.parse_days(subjects[old]) for old, new in SUBJECT_DATES.items()}
        tables.append(subjects.select("subject_id", "sex", registered=pl.lit(value=True), **days))
    if labels is not None:
        flags = [pl.col(name).alias(f"flag_{name}") for name in job.flags]
        if "index_date" in labels.columns:
            labels = labels.with_columns(index_day=dates.parse_days(labels["index_date"]))
            flags.append(pl.col("index_day"))
        tables.append(labels.select("subject_id", *flags))
    if job.splits is not None:
        tables.append(job.splits)
    return tables


def present_subjects(job: ClaimsJob, cleaned: CleanedSource, shard: int) -> pl.DataFrame:
    """The subjects of a shard, registered or with a valid row, sorted by digest: digest, split_bin
    and all known facts.
    """
    findings = cleaned.findings
    cohort = _select_with_rows(cleaned, shard)
    if cleaned.facts is not None:
        facts = spill.read_partition(cleaned.facts, shard)
        if "registered" in facts.columns:
            registered = facts.filter("registered").select(cohort.columns)
            cohort = pl.concat([cohort, registered]).unique("digest")
        facts = facts.drop("split_bin")
        cohort = cohort.sort("digest").join(facts, on="digest", how="left", maintain_order="left")
    else:
        cohort = cohort.sort("digest")
    kinds = dict.fromkeys(SUBJECT_DATES.values(), pl.Int32) | {"sex": pl.UInt8}
    cohort = cohort.with_columns(
        pl.lit(None, kind).alias(name) for name, kind in kinds.items() if name not in cohort.columns
    )
    last = findings.span[1] if findings.span else None
    return cohort.drop("registered", strict=False).with_columns(
        pl.col("obs_end").fill_null(pl.lit(last, pl.Int32))
    )


def _select_with_rows(cleaned: CleanedSource, shard: int) -> pl.DataFrame:
    """Digest and split_bin of the subjects of a shard with a valid row up to the end of the
    data.
    """
    cohort = spill.read_subjects(cleaned.stretches, shard)
    latest = cleaned.findings.latest
    if latest is not None and cleaned.stretches:
        rows = spill.read_rows(cleaned.stretches, shard, ("subject", "day"))
        cohort = cohort[rows.filter(pl.col("day") <= latest)["subject"].unique()]
    return cohort.unique("digest")


def assign_pseudonyms(job: ClaimsJob, cleaned: CleanedSource) -> np.ndarray:
    """The keys of all present subjects, sorted: the position of a key is the subject's pseudonym,
    [n] uint64.

    Raises UserError: config (exit 2) when a split file does not list them all; integrity (exit 5)
    when two digests have equal first 8 bytes.
    """
    parts, listed = [], 0
    for shard in range(job.shards):
        job.run.stop.check()
        cohort = present_subjects(job, cleaned, shard)
        parts.append(to_keys(cohort["digest"]))
        listed += cohort["split"].count() if job.splits is not None else 0
    keys = np.sort(np.concatenate(parts))
    if (keys[1:] == keys[:-1]).any():
        text, hint = "two subjects have the same pseudonym key", "Give another key with --id-key"
        raise integrity_error(None, text, hint=hint)
    if job.splits is not None and job.options.split_file:
        _check_split_file(job, job.splits.height, listed, len(keys))
    return keys


def _check_split_file(job: ClaimsJob, height: int, listed: int, present: int) -> None:
    """Compare the subjects of a split file (`height`) with those that are present; `listed` are
    both.

    Raises UserError: config (exit 2) when it does not list all present ones.
    """
    if listed < present:
        text = round_message(f"misses {present - listed} of {present} subjects")
        expected = "expected all, by the ids of the source"
        raise usage_error(text, expected, file=job.options.split_file, field="--split-file")
    if unmatched := height - listed:
        text = f"{unmatched} of {height} subjects of the split file are not in the data"
        job.run.reasons.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                text,
                "they are ignored",
                field="--split-file",
                count=unmatched,
            )
        )


def refuse_inside_workspace(path: Path, workspace: Path) -> None:
    """Raises UserError (config, exit 2) for a path inside the workspace: only its owner may see raw
    ids.
    """
    if path.resolve().is_relative_to(workspace.resolve()):
        expected = "expected a folder that is not shared with caches and reports"
        raise usage_error("is in the workspace", expected, file=str(path), field="--keep-ids")


def write_id_table(job: ClaimsJob, keys: np.ndarray) -> None:
    """Write raw and new ids to `--keep-ids`; the source is read once more."""
    registered = [] if job.claims.subjects is None else [job.claims.subjects["subject_id"]]
    table = pl.DataFrame(schema={"subject_id": pl.String, "new": pl.Int64})
    for ids in itertools.chain(registered, (frame["subject_id"] for frame in job.claims.events())):
        fresh = ids.drop_nulls().unique().to_frame("subject_id")
        fresh = fresh.join(table, on="subject_id", how="anti")
        fresh_keys = to_keys(compute_digests(fresh["subject_id"].to_list(), job)["digest"])
        position = np.searchsorted(keys, fresh_keys)
        present = np.append(keys, np.uint64(0))[position] == fresh_keys
        present &= position < len(keys)
        rows = fresh.with_columns(new=pl.Series(position, dtype=pl.Int64))
        table = table.vstack(rows.filter(pl.Series(present)))
    ids_column = pl.col("subject_id").map_elements(quote_formula, pl.String)
    text = table.sort("new").select(ids_column, "new").write_csv()
    storage.write_bytes(Path(job.options.keep_ids), text.encode())
