"""The engines of claims beside polars, as parameters of tests, which are skipped where an engine is not installed."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

SPARK = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(not (importlib.util.find_spec("pyspark") and shutil.which("java")), reason="pyspark or Java is not installed"),
]
ENGINES = [
    pytest.param("duckdb", marks=pytest.mark.skipif(not importlib.util.find_spec("duckdb"), reason="duckdb is not installed")),
    pytest.param("spark", marks=SPARK),
]
