"""Between the passes: present subjects, their facts from the source, and their pseudonyms.

A subject's pseudonym is the rank of its digest among those of all present subjects. Only the first
8 bytes of each digest are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from bitimely_core import storage
from bitimely_core.claims import dates, pass1_clean, spill
from bitimely_core.claims.job import SUBJECT_DATES, ClaimsJob, CleaningFindings
from bitimely_core.claims.spill import Stretch
from bitimely_core.errors import Reason, input_warning, integrity_error, quote_formula, usage_error
from bitimely_core.privacy import round_message

CHUNK = 1 << 18  # subjects whose digests are computed together


def write_subject_facts(job: ClaimsJob) -> Path | None:
    """Write what the tables of the source hold of each subject, by digest and shard; None where
    they hold nothing.
    """
    claims, path = job.claims, job.home / f"{job.stem}-facts.parquet"
    facts: pl.DataFrame | None = None
    if claims.subjects is not None:
        spans = {new: dates.parse_days(claims.subjects[old]) for old, new in SUBJECT_DATES.items()}
        facts = claims.subjects.select("subject_id", "sex", registered=pl.lit(value=True), **spans)
    if claims.labels is not None:
        flags = claims.labels.select(
            "subject_id", *(pl.col(name).alias(f"flag_{name}") for name in job.flags)
        )
        if "index_date" in claims.labels.columns:
            flags = flags.with_columns(index_day=dates.parse_days(claims.labels["index_date"]))
        facts = (
            flags
            if facts is None
            else facts.join(flags, on="subject_id", how="full", coalesce=True)
        )
    if job.splits is not None:
        facts = (
            job.splits
            if facts is None
            else facts.join(job.splits, on="subject_id", how="full", coalesce=True)
        )
    if facts is None:
        return None
    if not path.is_file():
        facts = facts.drop_nulls("subject_id")
        ids = facts["subject_id"].to_list()
        parts = [
            pass1_clean.compute_digests(ids[i : i + CHUNK], job)
            for i in range(0, max(len(ids), 1), CHUNK)
        ]
        table = pl.concat([pl.concat(parts), facts.drop("subject_id")], how="horizontal")
        spill.write_partitions(path, spill.partition_rows(table, job.shards))
    return path


def present_subjects(
    job: ClaimsJob,
    findings: CleaningFindings,
    spilled: Sequence[Stretch],
    facts_file: Path | None,
    shard: int,
) -> pl.DataFrame:
    """The subjects of a shard, registered or with a valid row, sorted by digest: digest, split_bin
    and all known facts.
    """
    cohort = spill.read_subjects(spilled, shard)
    facts = cohort.clear() if facts_file is None else spill.read_partition(facts_file, shard)
    if findings.latest is not None and spilled:
        cohort = cohort[
            spill.read_rows(spilled, shard, ("subject", "day"))
            .filter(pl.col("day") <= findings.latest)["subject"]
            .unique()
        ]
    cohort = cohort.unique("digest")
    if "registered" in facts.columns:
        cohort = pl.concat(
            [cohort, facts.filter(pl.col("registered")).select(cohort.columns)]
        ).unique("digest")
    cohort = cohort.sort("digest")
    if facts_file is not None:
        cohort = cohort.join(
            facts.drop("split_bin"), on="digest", how="left", maintain_order="left"
        )
    absent = dict.fromkeys(SUBJECT_DATES.values(), pl.Int32) | {"sex": pl.UInt8}
    cohort = cohort.with_columns(
        pl.lit(None, kind).alias(name)
        for name, kind in absent.items()
        if name not in cohort.columns
    )
    last = findings.span[1] if findings.span else None
    return cohort.drop("registered", strict=False).with_columns(
        pl.col("obs_end").fill_null(pl.lit(last, pl.Int32))
    )


def assign_pseudonyms(
    job: ClaimsJob, findings: CleaningFindings, spilled: Sequence[Stretch], facts_file: Path | None
) -> np.ndarray:
    """The keys of all present subjects, sorted: the position of a key is the subject's pseudonym,
    [n] uint64.

    Raises UserError: config (exit 2) when a split file does not list them all; integrity (exit 5)
    when two digests have equal first 8 bytes.
    """
    parts, listed = [], 0
    for shard in range(job.shards):
        job.run.stop.check()
        cohort = present_subjects(job, findings, spilled, facts_file, shard)
        parts.append(pass1_clean.to_keys(cohort["digest"]))
        listed += cohort["split"].count() if job.splits is not None else 0
    keys = np.sort(np.concatenate(parts))
    if (keys[1:] == keys[:-1]).any():
        raise integrity_error(
            None, "two subjects have the same pseudonym key", hint="Give another key with --id-key"
        )
    if job.splits is not None and job.options.split_file:
        if listed < len(keys):
            text, wanted = (
                round_message(f"misses {len(keys) - listed} of {len(keys)} subjects"),
                "expected all, by the ids of the source",
            )
            raise usage_error(text, wanted, file=job.options.split_file, field="--split-file")
        if unmatched := job.splits.height - listed:
            text = (
                f"{unmatched} of {job.splits.height} subjects of the split file are not in the data"
            )
            warning = input_warning(
                Reason.UNMATCHED_LABELS,
                text,
                "they are ignored",
                field="--split-file",
                count=unmatched,
            )
            job.run.reasons.append(warning)
    return keys


def refuse_inside_workspace(path: Path, workspace: Path) -> None:
    """Raises UserError (config, exit 2) for a path inside the workspace: only its owner may see raw
    ids.
    """
    if path.resolve().is_relative_to(workspace.resolve()):
        expected = "expected a folder that is not shared with caches and reports"
        raise usage_error("is in the workspace", expected, file=str(path), field="--keep-ids")


def write_id_table(job: ClaimsJob, keys: np.ndarray) -> None:
    """Write raw and new ids to `--keep-ids`; the source is read once more."""
    own = [] if job.claims.subjects is None else [job.claims.subjects["subject_id"]]
    known = pl.DataFrame(schema={"subject_id": pl.String, "new": pl.Int64})
    for ids in (*own, *(frame["subject_id"] for frame in job.claims.events())):
        fresh = (
            ids.drop_nulls()
            .unique()
            .to_frame("subject_id")
            .join(known, on="subject_id", how="anti")["subject_id"]
        )
        fresh_keys = pass1_clean.to_keys(
            pass1_clean.compute_digests(fresh.to_list(), job)["digest"]
        )
        position = np.searchsorted(keys, fresh_keys)
        present = (np.append(keys, np.uint64(0))[position] == fresh_keys) & (position < len(keys))
        known = known.vstack(
            pl.DataFrame({"subject_id": fresh, "new": position}, schema=known.schema).filter(
                pl.Series(present)
            )
        )
    text = (
        known.sort("new")
        .select(pl.col("subject_id").map_elements(quote_formula, pl.String), "new")
        .write_csv()
    )
    storage.write_bytes(Path(job.options.keep_ids), text.encode())
