"""bitimely: representations of clinical time series, from raw files to reports.

The public names of the library, each imported on first use:

    import bitimely as bt

    bt.ingest("sleep-edf", "raw/", "workspace/cache/sleep-edf")
    tokens = "workspace/tokens/sleep-edf-staging"
    windows = bt.tokens.build("workspace/cache/sleep-edf", view="staging", out=tokens)
    model = bt.build_model("bitimelygpt", preset="tiny", channels=windows.channels)
    batches = bt.batches(windows["train"], 32, seed=0)
    bt.fit(model, batches, bt.get_objective("next-previous"), epochs=2)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bitimely_core import __version__, workflows

if TYPE_CHECKING:
    from bitimely.fit_progress import fit
    from bitimely_core import cache, data, heads, models, objectives, tokens
    from bitimely_core.cache import open_cache
    from bitimely_core.config import Settings
    from bitimely_core.data import batches, collate
    from bitimely_core.errors import UserError
    from bitimely_core.heads import Classifier, MultiLabel, Regressor
    from bitimely_core.models import build as build_model
    from bitimely_core.models import load as load_model
    from bitimely_core.objectives import get as get_objective
    from bitimely_core.ops.retention import retention
    from bitimely_core.pipeline import run
    from bitimely_core.run import Run
    from bitimely_core.store.records import read_tables
    from bitimely_core.tokens import open_tokens
    from bitimely_core.types import Batch, Encoded, Record
    from bitimely_core.workflows import (
        analyze,
        dashboard,
        embed,
        evaluate,
        evaluate_vectors,
        export,
        finetune,
        from_pretrained,
        ingest,
        predict,
        pretrain,
        report,
        reproduce,
        tokenize,
        train,
        verify,
    )
    from bitimely_core.workflows.encoder import Encoder

VERBS = tuple(name for name in workflows.__all__ if name not in {"demonstrate", "statistics"})
MODULES = ("cache", "data", "heads", "models", "objectives", "tokens")
SOURCES = {  # public name -> module and name in it
    **{name: ("bitimely_core.workflows", name) for name in VERBS},
    "run": ("bitimely_core.pipeline", "run"),
    "open_cache": ("bitimely_core.cache", "open_cache"),
    "open_tokens": ("bitimely_core.tokens", "open_tokens"),
    "build_model": ("bitimely_core.models", "build"),
    "load_model": ("bitimely_core.models", "load"),
    "get_objective": ("bitimely_core.objectives", "get"),
    "fit": ("bitimely.fit_progress", "fit"),
    "batches": ("bitimely_core.data", "batches"),
    "collate": ("bitimely_core.data", "collate"),
    "retention": ("bitimely_core.ops.retention", "retention"),
    "Classifier": ("bitimely_core.heads", "Classifier"),
    "MultiLabel": ("bitimely_core.heads", "MultiLabel"),
    "Regressor": ("bitimely_core.heads", "Regressor"),
    "read_tables": ("bitimely_core.store.records", "read_tables"),
    "Batch": ("bitimely_core.types", "Batch"),
    "Encoded": ("bitimely_core.types", "Encoded"),
    "Encoder": ("bitimely_core.workflows.encoder", "Encoder"),
    "Record": ("bitimely_core.types", "Record"),
    "Run": ("bitimely_core.run", "Run"),
    "Settings": ("bitimely_core.config", "Settings"),
    "UserError": ("bitimely_core.errors", "UserError"),
}

__all__ = [
    "Batch",
    "Classifier",
    "Encoded",
    "Encoder",
    "MultiLabel",
    "Record",
    "Regressor",
    "Run",
    "Settings",
    "UserError",
    "__version__",
    "analyze",
    "batches",
    "build_model",
    "cache",
    "collate",
    "dashboard",
    "data",
    "embed",
    "evaluate",
    "evaluate_vectors",
    "export",
    "finetune",
    "fit",
    "from_pretrained",
    "get_objective",
    "heads",
    "ingest",
    "load_model",
    "models",
    "objectives",
    "open_cache",
    "open_tokens",
    "predict",
    "pretrain",
    "read_tables",
    "report",
    "reproduce",
    "retention",
    "run",
    "tokenize",
    "tokens",
    "train",
    "verify",
]


if not TYPE_CHECKING:  # type checkers see the imports above, and refuse other names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562), so that `import bitimely` loads neither
        torch nor pyarrow.
        """
        if name in MODULES:
            return importlib.import_module(f"bitimely_core.{name}")
        if name in SOURCES:
            module, source = SOURCES[name]
            return getattr(importlib.import_module(module), source)
        raise AttributeError(f"module 'bitimely' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
