"""Finds the subjects of an ingest between its two passes: who is present, what the source says of
them, and their pseudonyms.

A subject's pseudonym is the rank of its digest among those of all present subjects. Only the first
8 bytes of each digest are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from bitimely_core.claims import dates, spill
from bitimely_core.claims.job import SUBJECT_DATES, ClaimsJob, CleaningFindings
from bitimely_core.claims.pseudonyms import compute_digests, to_keys
from bitimely_core.claims.sources.columns import warn_of_rows
from bitimely_core.claims.spill import SpilledStretch
from bitimely_core.errors import Finding, Reason, integrity_error, quote_formula, usage_error
from bitimely_core.store import storage

CHUNK = 1 << 18  # subjects whose digests are computed together
PRESENCE = ("has_rows", "registered")  # how a subject is present


class CleanedSource(NamedTuple):
    """What the first pass leaves to the second."""

    findings: CleaningFindings
    stretches: Sequence[SpilledStretch]
    facts: Path | None  # of `write_subject_facts`


class SubjectCounts(NamedTuple):
    """Numbers of subjects."""

    subjects: int = 0  # registered, or with a valid row
    births: int = 0  # with a known birth
    sexes: int = 0  # with a known sex
    index_dates: int = 0  # with an index date
    registered: int = 0
    matched: int = 0  # registered and with a valid row
    with_rows: int = 0  # with a valid row

    def add(self, cohort: pl.DataFrame) -> SubjectCounts:
        """The numbers with those of `present_subjects` of a shard."""
        index_dates = cohort["index_day"].count() if "index_day" in cohort.columns else 0
        counts = (
            cohort.height,
            cohort["birth_day"].count(),
            int((cohort["sex"] > 0).sum()),
            index_dates,
            int(cohort["registered"].sum()),
            int((cohort["registered"] & cohort["has_rows"]).sum()),
            int(cohort["has_rows"].sum()),
        )
        return SubjectCounts(*map(sum, zip(self, counts, strict=True)))


def write_subject_facts(job: ClaimsJob) -> Path | None:
    """Write what the tables of the source hold of each subject, by digest and shard; None where
    they hold nothing.
    """
    path = job.home / f"{job.stem}-facts.arrow"
    joined = join_subject_tables(job)
    if joined is None:
        return None
    if not path.is_file():
        facts = _add_digests(joined, job).drop("subject_id")
        spill.write_partitions(path, facts, job.shards)
    return path


def _add_digests(table: pl.DataFrame, job: ClaimsJob) -> pl.DataFrame:
    """The rows with a subject_id, with `compute_digests` of each."""
    table = table.drop_nulls("subject_id")
    chunks = [chunk["subject_id"].to_list() for chunk in table.iter_slices(CHUNK)]
    return table.hstack(pl.concat(compute_digests(ids, job) for ids in chunks or [[]]))


def join_subject_tables(job: ClaimsJob) -> pl.DataFrame | None:
    """What the source says of each subject_id: its tables of subjects, of labels and of splits;
    None without any.
    """
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
    if job.claims.periods is not None:
        tables.append(job.claims.periods)
    if not tables:
        return None
    joined, *others = tables
    for table in others:
        joined = joined.join(table, on="subject_id", how="full", coalesce=True)
    return joined


def present_subjects(job: ClaimsJob, cleaned: CleanedSource, shard: int) -> pl.DataFrame:
    """The subjects of a shard, registered or with a valid row, sorted by digest: digest, split_bin,
    `PRESENCE` (Boolean) and all known facts.
    """
    findings, stretches = cleaned.findings, cleaned.stretches
    cohort = spill.read_subjects(stretches, shard)
    if findings.latest is not None and stretches:
        rows = spill.read_rows(stretches, shard)
        cohort = cohort[rows.filter(pl.col("day") <= findings.latest)["subject"].unique()]
    cohort = cohort.unique("digest").with_columns(has_rows=pl.lit(value=True))
    if cleaned.facts is not None:
        facts = spill.read_partition(cleaned.facts, shard)
        if "registered" in facts.columns:
            registered = facts.filter("registered").select("digest", "split_bin")
            registered = registered.join(cohort, on="digest", how="anti")
            cohort = pl.concat([cohort, registered.with_columns(has_rows=pl.lit(value=False))])
        cohort = cohort.join(facts.drop("split_bin"), on="digest", how="left")
    cohort = cohort.sort("digest")
    kinds: dict[str, type[pl.DataType]] = dict.fromkeys(SUBJECT_DATES.values(), pl.Int32)
    kinds |= {"sex": pl.UInt8, "registered": pl.Boolean}
    cohort = cohort.with_columns(
        pl.lit(None, kind).alias(name) for name, kind in kinds.items() if name not in cohort.columns
    )
    last = findings.span[1] if findings.span else None
    return cohort.with_columns(
        pl.col("obs_end").fill_null(pl.lit(last, pl.Int32)),
        pl.col("registered").fill_null(value=False),
    )


def assign_pseudonyms(job: ClaimsJob, cleaned: CleanedSource) -> tuple[np.ndarray, SubjectCounts]:
    """The keys of all present subjects, sorted: the position of a key is the subject's pseudonym,
    [n] uint64. Also what is known of how many of them.

    Raises UserError: config (exit 2) when a split file does not list them all; integrity (exit 5)
    when two digests have equal first 8 bytes.
    """
    parts, listed, counts = [], 0, SubjectCounts()
    for shard in range(job.shards):
        job.run.stop.check()
        cohort = present_subjects(job, cleaned, shard)
        parts.append(to_keys(cohort["digest"]))
        counts = counts.add(cohort)
        listed += cohort["split"].count() if job.splits is not None else 0
    keys = np.sort(np.concatenate(parts))
    if (keys[1:] == keys[:-1]).any():
        raise integrity_error(
            None, "two subjects have the same pseudonym key", hint="Give another key with --id-key"
        )
    if job.splits is not None:
        job.run.reasons += _check_splits(job, job.splits.height, listed, len(keys))
    return keys, counts


def _check_splits(job: ClaimsJob, rows: int, listed: int, subjects: int) -> list[Finding]:
    """Warnings where the split of the source, or of `--split-file`, names others than the subjects
    of the data: `rows` of it, `listed` of which are among the `subjects`.

    Raises UserError: config (exit 2) for a split file without some of them.
    """
    missing, unmatched = subjects - listed, rows - listed
    if not job.options.split_file:
        return warn_of_rows(
            missing,
            Reason.METADATA,
            f"of {subjects} subjects have no split in the splits of the source",
            "they are split by a hash",
            hint="Give the split of all subjects with --split-file",
        )
    if missing:
        raise usage_error(
            f"misses {missing} of {subjects} subjects",
            "expected all, by the ids of the source",
            file=job.options.split_file,
            field="--split-file",
        )
    return warn_of_rows(
        unmatched,
        Reason.UNMATCHED_LABELS,
        f"of {rows} subjects of the split file are not in the data",
        "they are ignored",
        field="--split-file",
    )


def write_id_table(job: ClaimsJob, keys: np.ndarray) -> None:
    """Write raw and new ids to `--keep-ids`, if it is given; the source is read once more."""
    if not job.options.keep_ids:
        return
    subjects = job.claims.subjects
    ids = pl.Series("subject_id", [], pl.String) if subjects is None else subjects["subject_id"]
    for frame in job.claims.events():
        ids = pl.concat([ids, frame["subject_id"]]).unique()
    table = _add_digests(ids.to_frame(), job)
    table = table.select("subject_id", key=pl.Series(to_keys(table["digest"])))
    present = pl.DataFrame({"key": keys}).with_row_index("new")
    text = (
        table.join(present, on="key")
        .sort("new")
        .select(pl.col("subject_id").map_elements(quote_formula, pl.String), "new")
        .write_csv()
    )
    storage.write_bytes(Path(job.options.keep_ids), text.encode())
