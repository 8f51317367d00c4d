"""The table of data-set statistics: the windows of the workspace beside the numbers of the
paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitimely_core import registry
from bitimely_core.page import Page, PageBuilder
from bitimely_core.tokens import EventSequences, Windows
from bitimely_core.workspace import parse_view

COLUMNS = ("channels", "timesteps", "sequences", "length", "classes")
CAPTION = (
    "Ours are counted in the windows of this workspace, the paper's are as printed. Timesteps are windows times length. A smaller number of ours "
    "means that a part of the data set was ingested; a larger one that the paper excluded some data."
)


@dataclass(frozen=True, kw_only=True)
class ViewStatistics:
    """Counts of one view `DATASET[/VIEW]`: ours by the names in `COLUMNS` (None without windows)
    and the paper's; `subjects` are ours.

    `note` is on the paper's numbers, or why ours are missing.
    """

    data: str
    counts: dict[str, int | None]
    paper: dict[str, int | None]
    subjects: int | None
    note: str

    def to_json(self) -> dict[str, int | str | None]:
        """One row: ours by name, the paper's with `paper_` before the name."""
        paper = {f"paper_{name}": value for name, value in self.paper.items()}
        return {
            "data": self.data,
            **self.counts,
            "subjects": self.subjects,
            "note": self.note,
            **paper,
        }


def count_view(data: str, windows: Windows | None, problem: str = "") -> ViewStatistics:
    """The counts of the view `data`; without windows `problem` is the note."""
    dataset, view = parse_view(data)
    paper = registry.datasets[dataset].facts.paper
    printed = paper.get(view, {}) if isinstance(paper.get(view, {}), dict) else {}
    counts: dict[str, int | None] = dict.fromkeys(COLUMNS)
    if windows is not None:
        from bitimely_core.claims.disclosure import open_disclosure

        n = (
            len(windows)
            if not isinstance(windows, EventSequences)
            else open_disclosure(windows.folder).get(len(windows), "out", "all")
        )
        sizes = (
            windows.channels,
            None if n is None else n * windows.length,
            n,
            windows.length,
            windows.classes or None,
        )
        counts = dict(zip(COLUMNS, sizes, strict=True))
    return ViewStatistics(
        data=data,
        counts=counts,
        paper={name: printed.get(name) for name in COLUMNS},
        subjects=None
        if windows is None or counts["sequences"] is None
        else len(set(windows.subjects())),
        note=paper.get("note", "") if windows is not None else problem,
    )


def statistics_page(views: Sequence[ViewStatistics], title: str, description: str) -> Page:
    """The page of the table."""
    page = PageBuilder(title or "Data sets")
    if description:
        page.text(description)
    rows = [
        [
            v.data,
            *(part[name] for name in COLUMNS for part in (v.counts, v.paper)),
            v.subjects,
            v.note,
        ]
        for v in views
    ]
    columns = [
        "data",
        *(f"{name} ({source})" for name in COLUMNS for source in ("ours", "paper")),
        "subjects (ours)",
        "note",
    ]
    page.table("statistics", "Data sets", CAPTION, columns, rows)
    present = sum(bool(view.counts["sequences"]) for view in views)
    return page.finish(
        f"{present} of {len(views)} views have windows here.",
        {"rows": [view.to_json() for view in views]},
    )
