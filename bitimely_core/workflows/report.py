"""`report`: one comparison page of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from bitimely_core.report.comparison import comparison_page
from bitimely_core.run import FORMAT
from bitimely_core.workspace import find_run_folder, locate_new, shorten_name


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
    target = out or locate_new(workspace, "reports", shorten_name(["compare", *(p.resolve().name for p in folders)]))
    if dry_run:
        return {"runs": [p.name for p in folders], "report": str(target / "report.html")}
    page = comparison_page(folders)
    return {"format_version": FORMAT, "report": str(rendering.write_report(target, page)), "verdict": page.verdict, "summary": page.summary}
