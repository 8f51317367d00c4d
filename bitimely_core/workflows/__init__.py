"""The verbs, one file each: read settings and folders, call the library, write one folder, return plain values."""

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
    "verify",
]
