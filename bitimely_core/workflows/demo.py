"""The end of `bitimely demo`: how its models did beside the best method without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from bitimely_core.evaluate.metrics import NAMES
from bitimely_core.run import FORMAT
from bitimely_core.schemas.scores import Scores


class Demonstration(TypedDict):
    """Result of `demo`."""

    format_version: int
    verdict: str  # a line for each model
    metrics: dict[str, float]  # run -> its main score
    pages: list[str]  # of the predictions for new nights and new people


def demonstrate(workspace: Path, runs: Sequence[str], pages: Sequence[Path]) -> Demonstration:
    """What the evaluated `runs` of a workspace reach, and the pages of what they predicted."""
    scores = [Scores.load_shared(workspace / "runs" / run) for run in runs]
    return {
        "format_version": FORMAT,
        "verdict": "\n".join(map(describe_score, scores)),
        "metrics": {run.run: run.metrics[run.main or ""].value or 0.0 for run in scores},
        "pages": list(map(str, pages)),
    }


def describe_score(scores: Scores) -> str:
    """A sentence on the main score of a run and on that of its best baseline, both metrics for
    which higher is better.
    """
    metric = scores.main or ""
    reached = f"{scores.run}: {NAMES[metric]} {scores.metrics[metric].value:.3f}"
    best = scores.find_best_baseline(metric, lower=False)
    if best is None:
        return f"{reached}."
    return f"{reached}; best of {len(scores.baselines)} baselines: {best.name}, {best.value:.3f}."
