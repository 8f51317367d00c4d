"""The three engines of the table steps: polars in this process, DuckDB, Spark. One code path, written in narwhals.

Operations that differ between engines are avoided: dates are integers, texts are read in Python, and rows are sorted after collecting, by one
integer per record. Some engines return sums as decimals: `collect_rows` makes them integers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import narwhals as nw
import polars as pl
import polars.selectors as cs

from bitimely_core.errors import Reason, usage_error
from bitimely_core.system_errors import raise_system_error

Engine = Callable[[pl.DataFrame], nw.LazyFrame[Any]]
"""A frame in memory -> the same as a lazy frame of the engine."""

ENGINES = ("polars", "duckdb", "spark")


@contextmanager
def open_engine(name: str, *, threads: int | None = None, memory: str | None = None, folder: Path | None = None) -> Iterator[Engine]:
    """An engine (polars, duckdb or spark), ready for frames.

    `threads`: of DuckDB, and of a Spark session that this process starts; None: all. `memory`: limit of DuckDB, for instance `8GB`.
    `folder`: for DuckDB's spill files. Raises UserError: missing_extra (exit 2) when the engine is not installed; ValueError for another
    name.
    """
    if name == "polars":
        yield lambda frame: nw.from_native(frame.lazy())
    elif name == "duckdb":
        duckdb = _import_engine("duckdb", name)
        options = {"threads": threads, "memory_limit": memory, "temp_directory": folder and str(folder)}
        connection = duckdb.connect(config={key: value for key, value in options.items() if value is not None})
        try:
            yield lambda frame: nw.from_native(connection.from_arrow(frame.to_arrow()))
        finally:
            connection.close()
    elif name == "spark":
        session = open_spark(threads)
        yield lambda frame: nw.from_native(session.createDataFrame(frame.to_arrow()))
    else:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, found {name!r}")


def collect_rows(lazy: nw.LazyFrame[Any]) -> pl.DataFrame:
    """The rows in any order; decimals and 128-bit integers become Int64."""
    frame = lazy.collect("polars").to_native()
    return frame.with_columns((cs.decimal() | cs.by_dtype(pl.Int128)).cast(pl.Int64))


def _import_engine(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise_system_error(error)
        raise usage_error(
            f"the engine {extra} is not installed",
            hint=f"Install it with `pip install 'bitimely[{extra}]'`, or use --engine polars",
            code=Reason.MISSING_EXTRA,
        ) from None


def open_spark(threads: int | None = None) -> Any:
    """The active session of this process, else that of the master which `spark-submit` or Spark's settings name, else a local one; it stays
    open (a start takes most of a minute). Raises UserError: missing_extra.
    """
    sql, pyspark = _import_engine("pyspark.sql", "spark"), _import_engine("pyspark", "spark")
    running = sql.SparkSession.getActiveSession()
    if running is not None:
        return running
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of the executors; without it any python3
    pyspark.SparkContext._ensure_initialized()  # else SparkConf knows nothing of the settings of spark-submit
    settings = pyspark.SparkConf()
    options = {
        "spark.master": f"local[{threads or '*'}]",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.shuffle.partitions": str(threads or 4),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    chosen = {name: value for name, value in options.items() if not settings.contains(name)}
    session = sql.SparkSession.builder.config(map=chosen).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
