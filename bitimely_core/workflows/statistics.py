"""The table of data-set statistics: what is in the windows here beside what the paper counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitimely_core import registry
from bitimely_core.errors import UserError
from bitimely_core.page import Page, Table
from bitimely_core.run import FORMAT
from bitimely_core.workspace import dataset_and_view, tokens_name

COLUMNS = ("channels", "timesteps", "sequences", "length", "classes")


def statistics(views: Sequence[str], *, title: str, description: str, workspace: Path, out: Path) -> dict[str, Any]:
    """Count channels, timesteps, windows, their length, classes and subjects of each view; a view without tokens says why it is empty.

    Returns:
        report, and `rows`: one for each view with ours, and the paper's with `paper_` before the name.
    """
    from bitimely_core import report

    rows = [_row(view, workspace) for view in views]
    shown = Table(
        name="statistics",
        title="Data sets",
        caption="Ours are counted in the windows of this workspace, the paper's are those that it prints. Timesteps are windows times length. A smaller "
        "number of ours says that not the whole data set was ingested; a larger one that the paper left something out.",
        columns=["data", *(f"{name} ({whose})" for name in COLUMNS for whose in ("ours", "paper")), "subjects (ours)", "note"],
        rows=[
            [row["data"], *(row[key] for name in COLUMNS for key in (name, f"paper_{name}")), row["subjects"], row["note"]] for row in rows
        ],
    )
    found = [row for row in rows if row["sequences"]]
    page = Page(
        title=title or "Data sets",
        verdict=f"{len(found)} of {len(rows)} views have windows here.",
        blocks=[*([description] if description else []), shown],
        facts={},
        summary={"rows": rows},
    )
    return {"format_version": FORMAT, "report": str(report.write_report(out, page)), "rows": rows}


def _row(view: str, workspace: Path) -> dict[str, Any]:
    from bitimely_core import tokens

    dataset, name = dataset_and_view(view)
    paper = registry.datasets[dataset].facts.paper
    stated = paper.get(name, {}) if isinstance(paper.get(name, {}), dict) else {}
    row: dict[str, Any] = {"data": view, **dict.fromkeys((*COLUMNS, "subjects")), "note": paper.get("note", "")}
    row |= {f"paper_{key}": stated.get(key) for key in COLUMNS}
    try:
        windows = tokens.open_tokens(workspace / "tokens" / tokens_name(view), verify=False)
    except UserError as error:
        return {**row, "note": error.finding.problem}
    counted = {
        "channels": windows.channels,
        "timesteps": len(windows) * windows.length,
        "sequences": len(windows),
        "length": windows.length,
        "classes": windows.classes or None,
        "subjects": len(set(windows.subjects())),
    }
    return {**row, **counted}
