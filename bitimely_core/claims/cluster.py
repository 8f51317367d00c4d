"""Runs the first pass of an ingest on the executors of a Spark cluster; each task runs the polars
code in Python.

An executor reads its part of the source, cleans it and writes a row group for each shard of
subjects to the folder of unfinished work. In the second pass the task of a shard reads its row
groups of all parts and writes the finished shard. So rows are exchanged through the workspace,
which all executors and the driver share, and finished parts and shards survive a killed run. Only
counts and names of files come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bitimely_core.cache.workers import StopFlag
from bitimely_core.claims import engines, pass1_clean
from bitimely_core.claims.job import ClaimsJob, CleaningFindings

PART_BYTES = 64 << 20  # of the source that one task cleans: about a spill file


def clean_parts(job: ClaimsJob) -> tuple[ClaimsJob, int]:
    """Clean the parts of the source that are not finished on executors.

    Returns the job under the name of this work, and the number of parts.

    Raises UserError: as `pass1_clean.clean_source` and `engines.run_tasks`.
    """
    parts = job.claims.events.split(PART_BYTES)
    job = replace(job, stem=f"{job.stem}-spark{len(parts)}")
    missing = [
        part
        for part in range(1, len(parts) + 1)
        if not CleaningFindings.load(pass1_clean.findings_path(job.home, job.stem, part)).done
    ]
    engines.run_tasks(partial(_clean_part, detach_job(job), parts), missing, job.run.stop)
    return job, len(parts)


def _clean_part(job: ClaimsJob, parts: Sequence[Any], part: int) -> None:
    """One part, as if it were the source."""
    pass1_clean.clean_source(replace(job, claims=replace(job.claims, events=parts[part - 1])), part)


def detach_job(job: ClaimsJob) -> ClaimsJob:
    """The job without what belongs to this process, with paths that hold on other machines."""
    run = replace(job.run.restart(), out=job.run.out.resolve(), stop=StopFlag(), source=None)
    return replace(job, run=run, home=job.home.resolve())
