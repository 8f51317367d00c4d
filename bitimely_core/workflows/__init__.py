"""The verbs of the command line as functions, one file each.

A verb reads settings and folders, calls the library, writes one folder and returns plain values.
Each is imported on first use, so that an ingest does not load the libraries of models. Paths may
be given as texts.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bitimely_core.text_paths import accept_texts

if TYPE_CHECKING:
    from bitimely_core.workflows.analyze import analyze
    from bitimely_core.workflows.dashboard import dashboard
    from bitimely_core.workflows.demo import demonstrate
    from bitimely_core.workflows.embed import embed
    from bitimely_core.workflows.evaluate import evaluate
    from bitimely_core.workflows.export import export
    from bitimely_core.workflows.finetune import finetune
    from bitimely_core.workflows.ingest import ingest
    from bitimely_core.workflows.predict import from_pretrained, predict
    from bitimely_core.workflows.pretrain import pretrain
    from bitimely_core.workflows.report import report
    from bitimely_core.workflows.reproduce import reproduce
    from bitimely_core.workflows.statistics import statistics
    from bitimely_core.workflows.tokenize import tokenize
    from bitimely_core.workflows.train import train
    from bitimely_core.workflows.vectors import evaluate_vectors
    from bitimely_core.workflows.verify import verify

__all__ = [
    "analyze",
    "dashboard",
    "demonstrate",
    "embed",
    "evaluate",
    "evaluate_vectors",
    "export",
    "finetune",
    "from_pretrained",
    "ingest",
    "predict",
    "pretrain",
    "report",
    "reproduce",
    "statistics",
    "tokenize",
    "train",
    "verify",
]
ELSEWHERE = {
    "demonstrate": "demo",
    "evaluate_vectors": "vectors",
    "from_pretrained": "predict",
}  # verbs -> their files, where these have other names


@functools.cache
def _find_verb(module: ModuleType, name: str) -> Any:
    return accept_texts(getattr(module, name))


class _VerbModule(ModuleType):
    """A module whose attribute `ingest` is the function also where the file of that name has been
    imported.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        file = importlib.import_module(f"{self.__name__}.{ELSEWHERE.get(name, name)}")
        return _find_verb(file, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name,
            _find_verb(value, name) if name in __all__ and isinstance(value, ModuleType) else value,
        )


sys.modules[__name__].__class__ = _VerbModule
