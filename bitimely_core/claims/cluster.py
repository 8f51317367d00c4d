"""The two passes of an ingest, and of the sequences, on the executors of a Spark cluster; each task runs the polars code in Python.

Executors read their part of the source, clean it and write one row group per shard of subjects to the folder of unfinished work; a task of a
shard reads its row groups of all parts and writes the finished shard. So the exchange by subject goes through the folder of the workspace, which
all executors and the driver share, and finished parts and shards survive a killed run. Only counts and names of files come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from bitimely_core.cache.workers import POLL_SECONDS, StopFlag
from bitimely_core.claims import engines, pass1_clean
from bitimely_core.claims.job import ClaimsJob, CleaningFindings
from bitimely_core.errors import Exit, Reason, UserError, safe_text
from bitimely_core.system_errors import find_system_error, raise_system_error

T = TypeVar("T")
PART_BYTES = 64 << 20  # of the source that one task cleans: about a spill file


def clean_parts(job: ClaimsJob) -> tuple[ClaimsJob, int]:
    """The first pass: the source in parts, those that are not finished cleaned on executors; the job under the name of this work, and the parts.

    Raises UserError: as `pass1_clean.clean_source` and `run_tasks`.
    """
    parts = job.claims.events.split(PART_BYTES)
    job = replace(job, stem=f"{job.stem}-spark{len(parts)}")
    every = range(1, len(parts) + 1)
    missing = [part for part in every if not CleaningFindings.load(pass1_clean.findings_path(job.home, job.stem, part)).done]
    run_tasks(partial(_clean_part, detach_job(job), parts), missing, job.run.stop)
    return job, len(parts)


def _clean_part(job: ClaimsJob, parts: Sequence[Any], part: int) -> None:
    """One part, as if it were the source."""
    pass1_clean.clean_source(replace(job, claims=replace(job.claims, events=parts[part - 1])), part)


def detach_job(job: ClaimsJob) -> ClaimsJob:
    """The job without what belongs to this process, with paths that hold on other machines."""
    run = replace(job.run.restart(), out=job.run.out.resolve(), progress=None, stop=StopFlag(), source=None)
    return replace(job, run=run, home=job.home.resolve())


def run_tasks(task: Callable[[int], T], numbers: Sequence[int], stop: StopFlag | None = None) -> dict[int, T]:
    """The results of `task` for some numbers, each a Spark task of its own on an executor.

    Raises UserError: of a task; interrupted; resource_limit (exit 6) when the cluster gives a task up; missing_extra.
    """
    if not numbers:
        return {}
    session, group = engines.open_spark(), f"bitimely-{uuid4().hex}"
    context = session.sparkContext

    def collect() -> list[Any]:
        context.setJobGroup(group, "bitimely", interruptOnCancel=True)
        return context.parallelize(numbers, len(numbers)).map(partial(_run_task, task)).collect()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(collect)
        try:
            while not wait([running], POLL_SECONDS).done:
                if stop is not None:
                    stop.check()
        except BaseException:
            context.cancelJobGroup(group)
            raise
    results = dict(_get_results(running.result))
    for result in results.values():
        if isinstance(result, UserError):
            raise result
    return {number: results[number] for number in numbers}


def _get_results(collect: Callable[[], list[Any]]) -> list[Any]:
    """Numbers and results of a finished job. Raises UserError: resource_limit where Spark has given it up."""
    try:
        return collect()
    except Exception as error:  # of Java too, whose classes are not known here
        raise_system_error(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        found = next((line for line in reversed(lines) if "Error" in line and not line.startswith(("at ", "File "))), lines[0])
        hint = (
            "Executors need this version of bitimely, its Python (spark.pyspark.python), the source and the workspace under the same paths"
        )
        raise UserError(
            Reason.RESOURCE_LIMIT, f"Spark has given up a task ({safe_text(found, 200)})", hint=hint, exit_code=Exit.RESOURCES
        ) from error


def _run_task(task: Callable[[int], T], number: int) -> tuple[int, T | UserError]:
    """On an executor: the number with its result, or with the `UserError` that it ends with."""
    try:
        return number, task(number)
    except UserError as error:
        return number, error
    except Exception as error:
        if (found := find_system_error(error)) is None:
            raise
        return number, found
