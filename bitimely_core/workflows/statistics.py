"""The table of data-set statistics, a stage of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from bitimely_core.errors import UserError
from bitimely_core.report.dataset_statistics import ViewStatistics, count_view, statistics_page
from bitimely_core.run import FORMAT
from bitimely_core.store.workspace import locate, name_tokens
from bitimely_core.system_errors import raise_system_error


class StatisticsResult(TypedDict):
    """Result of `statistics`; rows as `ViewStatistics.to_json`."""

    format_version: int
    report: str
    rows: list[dict[str, int | str | None]]


def statistics(
    views: Sequence[str], *, title: str, description: str, workspace: Path, out: Path
) -> StatisticsResult:
    """Count channels, timesteps, windows, length, classes and subjects of each view; the note of a
    view without tokens has the reason.
    """
    from bitimely_core import report

    counted = [_count_tokens(view, workspace) for view in views]
    path = report.write_report(out, statistics_page(counted, title, description))
    return {
        "format_version": FORMAT,
        "report": str(path),
        "rows": [view.to_json() for view in counted],
    }


def _count_tokens(view: str, workspace: Path) -> ViewStatistics:
    from bitimely_core import tokens

    try:
        return count_view(
            view, tokens.open_tokens(locate(workspace, "tokens", name_tokens(view)), verify=False)
        )
    except UserError as error:
        raise_system_error(error)
        return count_view(view, None, error.finding.problem)
