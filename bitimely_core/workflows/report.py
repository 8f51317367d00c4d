"""The verb `report`: one comparison page of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from bitimely_core.errors import usage_error
from bitimely_core.page import Page
from bitimely_core.report.comparison_page import comparison_page
from bitimely_core.run import FORMAT
from bitimely_core.store.workspace import find_run_folder, locate_new, shorten_name


class ReportResult(TypedDict, total=False):
    """Result of `report`; under dry_run the names of the runs and the file that would be
    written.
    """

    format_version: int
    report: str
    page: Page
    verdict: str
    notices: list[str]
    summary: Any
    runs: list[str]


def check_margin(margin: float | None) -> None:
    """Raises UserError (config, exit 2) for a margin that is no positive number."""
    if margin is not None and not 0 < margin < float("inf"):
        raise usage_error(
            f"found {margin:g}",
            "expected a number above 0, in points or in the unit of the error",
            field="--margin",
        )


def report(
    names: list[str],
    *,
    margin: float | None = None,
    out: Path | None = None,
    workspace: Path = Path("workspace"),
    dry_run: bool = False,
) -> ReportResult:
    """Write one comparison page of several evaluated runs.

    `margin`, in the units that the page prints (points, or those of the error), adds tests of
    non-inferiority and equivalence.
    """
    from bitimely_core import report as rendering

    check_margin(margin)
    if not names:
        raise usage_error("no run", "expected at least one RUN", "See: bitimely list runs")
    folders = [find_run_folder(name, workspace) for name in names]
    target = out or locate_new(
        workspace, "reports", shorten_name(["compare", *(p.resolve().name for p in folders)])
    )
    if dry_run:
        return {"runs": [p.name for p in folders], "report": str(target / "report.html")}
    page = comparison_page(folders, margin)
    return {
        "format_version": FORMAT,
        "report": str(rendering.write_report(target, page)),
        "page": page,
        "verdict": page.verdict,
        "notices": page.notices,
        "summary": page.summary,
    }
