"""`report`: one comparison page of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from bitimely_core import storage
from bitimely_core.report.comparison import comparison_page
from bitimely_core.run import FORMAT
from bitimely_core.workflows.analyze import MAX_NAME_LENGTH
from bitimely_core.workspace import find_run_folder


class ReportResult(TypedDict, total=False):
    """Result of `report`; under dry_run the names of the runs and the file that would be written."""

    format_version: int
    report: str
    verdict: str
    summary: Any
    runs: list[str]


def report(names: list[str], *, out: Path | None = None, workspace: Path = Path("workspace"), dry_run: bool = False) -> ReportResult:
    """Write one comparison page of several evaluated runs."""
    from bitimely_core import report as rendering

    folders = [find_run_folder(name, workspace) for name in names]
    label = "compare-" + "-".join(p.name for p in folders)
    if len(label) > MAX_NAME_LENGTH:
        label = f"compare-{folders[0].name[: MAX_NAME_LENGTH // 2]}-and-{len(folders) - 1}-more-{storage.fingerprint([p.name for p in folders])[:8]}"
    target = out or workspace / "reports" / label
    if dry_run:
        return {"runs": [p.name for p in folders], "report": str(target / "report.html")}
    page = comparison_page(folders)
    return {"format_version": FORMAT, "report": str(rendering.write_report(target, page)), "verdict": page.verdict, "summary": page.summary}
