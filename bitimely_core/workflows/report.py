"""`report`: one comparison page of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core import storage
from bitimely_core.report.comparison import comparison_page
from bitimely_core.run import FORMAT
from bitimely_core.workflows.analyze import LONGEST
from bitimely_core.workspace import run_folder


def report(names: list[str], *, out: Path | None = None, workspace: Path = Path("workspace"), dry_run: bool = False) -> dict[str, Any]:
    """One comparison page of several evaluated runs. Returns report and verdict."""
    from bitimely_core import report as rendering

    found = [run_folder(n, workspace) for n in names]
    label = "compare-" + "-".join(p.name for p in found)
    if len(label) > LONGEST:
        label = f"compare-{found[0].name[: LONGEST // 2]}-and-{len(found) - 1}-more-{storage.fingerprint([p.name for p in found])[:8]}"
    target = out or workspace / "reports" / label
    if dry_run:
        return {"runs": [p.name for p in found], "report": str(target / "report.html")}
    page = comparison_page(found)
    return {"format_version": FORMAT, "report": str(rendering.write_report(target, page)), "verdict": page.verdict, "summary": page.summary}
