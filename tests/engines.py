"""The engine of claims beside polars, as a parameter of tests, which are skipped where it is not
installed.
"""

from __future__ import annotations

import importlib.util
import shutil

import pytest

SPARK = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("pyspark") and shutil.which("java")),
        reason="pyspark or Java is not installed",
    ),
]
SPARK_ENGINE = pytest.param("spark", marks=SPARK)
