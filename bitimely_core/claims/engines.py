"""Runs work on shards of claims as tasks on the executors of a Spark cluster.

The other engine is this process. Both run the same polars code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from bitimely_core.cache.workers import POLL_SECONDS, StopFlag
from bitimely_core.errors import Exit, Reason, UserError, safe_text, usage_error
from bitimely_core.system_errors import find_system_error, raise_system_error

S = TypeVar("S")
T = TypeVar("T")

ENGINES = ("polars", "spark")
SPARK_DEFAULTS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def open_spark() -> Any:
    """The `SparkContext` of this process.

    Where there is none, one is started: on the master that `spark-submit` or Spark's settings name,
    else in this machine. It stays open, because a start takes most of a minute. Raises UserError:
    missing_extra (exit 2).
    """
    try:
        import pyspark
    except ImportError as error:
        raise_system_error(error)
        raise usage_error(
            "the engine spark is not installed",
            hint="Install it with `pip install 'bitimely[spark]'`, or use --engine polars",
            code=Reason.MISSING_EXTRA,
        ) from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors would take any python3
    # before it SparkConf lacks the settings of spark-submit
    pyspark.SparkContext._ensure_initialized()
    settings = pyspark.SparkConf()
    for name, value in SPARK_DEFAULTS.items():
        settings.setIfMissing(name, value)
    context = pyspark.SparkContext.getOrCreate(settings)
    context.setLogLevel("ERROR")
    return context


def run_tasks(task: Callable[[S], T], inputs: Sequence[S], stop: StopFlag | None = None) -> list[T]:
    """The results of `task` for some inputs, in their order; each is a Spark task of its own.

    Raises UserError: of a task; interrupted; resource_limit (exit 6) when the cluster gives a task
    up; missing_extra.
    """
    if not inputs:
        return []
    context, group = open_spark(), f"bitimely-{uuid4().hex}"

    def collect() -> list[Any]:
        context.setJobGroup(group, "bitimely", interruptOnCancel=True)
        return context.parallelize(inputs, len(inputs)).map(partial(_run_task, task)).collect()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(collect)
        try:
            while not wait([running], POLL_SECONDS).done:
                if stop is not None:
                    stop.check()
        except BaseException:
            context.cancelJobGroup(group)
            raise
    try:
        results = running.result()
    except Exception as error:  # of Java too, whose classes are not known here
        raise_system_error(error)
        raise UserError(
            Reason.RESOURCE_LIMIT,
            f"Spark has given up a task ({safe_text(_find_cause(error), 200)})",
            hint="Executors need this version of bitimely, its Python (spark.pyspark.python), the "
            "source and the workspace under the same paths",
            exit_code=Exit.RESOURCES,
        ) from error
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results


def _find_cause(error: Exception) -> str:
    """The last line of a trace that names an error, else the first line."""
    lines = list(filter(None, map(str.strip, str(error).splitlines())))
    causes = [line for line in lines if "Error" in line and not line.startswith(("at ", "File "))]
    return (causes[-1:] or lines or [type(error).__name__])[0]


def _run_task(task: Callable[[S], T], value: S) -> T | UserError:
    """On an executor: the result for an input, or the `UserError` that it ends with."""
    try:
        return task(value)
    except UserError as error:
        return error
    except Exception as error:
        if (fault := find_system_error(error)) is None:
            raise
        return fault
