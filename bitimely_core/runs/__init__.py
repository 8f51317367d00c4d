"""The verbs on runs. Each reads settings and folders, calls the library, writes one folder and returns plain values."""

from bitimely_core.runs.analyzing import analyze, demonstration, report
from bitimely_core.runs.checking import verify
from bitimely_core.runs.claims import ingest as ingest_claims
from bitimely_core.runs.folders import of_events
from bitimely_core.runs.ingesting import ingest
from bitimely_core.runs.results import results
from bitimely_core.runs.scoring import embed, evaluate
from bitimely_core.runs.sharing import export, reproduce
from bitimely_core.runs.statistics import statistics
from bitimely_core.runs.tokenizing import tokenize
from bitimely_core.runs.training import finetune, pretrain

__all__ = [
    "analyze",
    "demonstration",
    "embed",
    "evaluate",
    "export",
    "finetune",
    "ingest",
    "ingest_claims",
    "of_events",
    "pretrain",
    "report",
    "reproduce",
    "results",
    "statistics",
    "tokenize",
    "verify",
]
