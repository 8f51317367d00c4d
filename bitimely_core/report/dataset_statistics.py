"""The table of data-set statistics: the windows of the workspace beside the numbers of the
paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bitimely_core import registry
from bitimely_core.page import Page, PageBuilder
from bitimely_core.store.workspace import parse_view
from bitimely_core.tokens import Windows

COLUMNS = ("channels", "timesteps", "sequences", "length", "classes")
CAPTION = (
    "Ours are counted in the windows of this workspace, the paper's are as printed. Timesteps are "
    "windows times length. A smaller number of ours means that a part of the data set was "
    "ingested; a larger one that the paper excluded some data."
)


@dataclass(frozen=True)
class ViewStatistics:
    """Counts of one view, ours beside the paper's, by the names in `COLUMNS`."""

    data: str  # DATASET[/VIEW]
    counts: dict[str, int | None]  # ours, None without windows
    paper: dict[str, int | None]
    subjects: int | None  # ours
    note: str  # on the paper's numbers, or why ours are missing

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
    printed = paper.get(view)
    if not isinstance(printed, dict):
        printed = {}
    counts: dict[str, int | None] = dict.fromkeys(COLUMNS)
    subjects, note = None, problem
    if windows is not None:
        # of histories None where it is withheld
        n = windows.data_kind.summarize_tokens(windows.folder)["windows"]
        note = paper.get("note", "")
        timesteps = None if n is None else n * windows.length
        sizes = (windows.channels, timesteps, n, windows.length, windows.classes or None)
        counts = dict(zip(COLUMNS, sizes, strict=True))
        subjects = None if n is None else len(set(windows.subjects()))
    printed = {name: printed.get(name) for name in COLUMNS}
    return ViewStatistics(data, counts, printed, subjects, note)


def statistics_page(views: Sequence[ViewStatistics], title: str, description: str) -> Page:
    """The page of the table."""
    page = PageBuilder(title or "Data sets")
    if description:
        page.text(description)
    rows = []
    for view in views:
        pairs = [(view.counts[name], view.paper[name]) for name in COLUMNS]
        rows.append([view.data, *itertools.chain(*pairs), view.subjects, view.note])
    columns = [f"{name} ({source})" for name in COLUMNS for source in ("ours", "paper")]
    columns = ["data", *columns, "subjects (ours)", "note"]
    page.table("statistics", "Data sets", CAPTION, columns, rows)
    present = sum(bool(view.counts["sequences"]) for view in views)
    return page.finish(
        f"{present} of {len(views)} views have windows here.",
        {"rows": [view.to_json() for view in views]},
    )
