"""`build_sequences` under its documented import path; the builder is in `bitimely_core.claims`, a higher layer, and imported on use."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "build_sequences":
        return importlib.import_module("bitimely_core.claims.build").build_sequences
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
