"""The last steps of `bitimely demo`: figures of a run, and one page of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core.report import run_page
from bitimely_core.report.comparison import comparison_page
from bitimely_core.run import FORMAT
from bitimely_core.schemas.scores import Scores
from bitimely_core.types import Progress
from bitimely_core.workflows.analyze import analyze
from bitimely_core.workspace import find_data_kind


def demonstrate(
    workspace: Path,
    *,
    data: str = "synthetic-staging",
    title: str = "Demonstration on a synthetic cohort",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The last three commands of `bitimely demo`: spectra, maps, and one page of the two runs with
    data, scores, curves and these figures.

    `workspace` holds `tiny`, pre-trained and fine-tuned on the tokens `data`, with and without its
    weights.
    """
    from bitimely_core import report as rendering
    from bitimely_core import tokens

    spectra = analyze("svd", ["tiny"], sequences=32, workspace=workspace, progress=progress)
    maps = analyze("attention", ["tiny"], workspace=workspace, progress=progress)
    names = [
        f"tiny-{data.removeprefix('synthetic-') if data == 'synthetic-staging' else data}{end}"
        for end in ("", "-scratch")
    ]
    evaluated = [workspace / "runs" / name for name in names]
    windows = tokens.open_tokens(workspace / "tokens" / data)
    table = run_page.audit_table(
        windows.name,
        find_data_kind(windows.dataset).summarize_tokens(windows.folder)["audit"],
        list(windows.class_names),
    )
    page = run_page.combine_pages(
        comparison_page(evaluated), [spectra["page"], maps["page"]], [table], title
    )
    path = rendering.write_report(workspace / "reports" / f"compare-{'-'.join(names)}", page)
    scores = [Scores.load_shared(folder).to_json() for folder in evaluated]
    return {
        "format_version": FORMAT,
        "report": str(path),
        "verdict": page.verdict,
        "metrics": {run["run"]: run["metrics"] for run in scores},
        "baselines": scores[0]["baselines"],
        "comparison": scores[0]["comparison"],
    }
