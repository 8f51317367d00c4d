"""`ingest` of recordings: the cache and its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitimely_core import cache
from bitimely_core.errors import Exit, Finding, UserError
from bitimely_core.report.ingest_page import write_ingest_page


def ingest(
    dataset: str, source: str | Path | None, out: str | Path, *, notice: Callable[[Finding], object] | None = None, **arguments: Any
) -> dict[str, Any]:
    """`cache.ingest`, and `report.html` beside its report.

    Args:
        dataset: registered name.
        source: raw folder; None for generated data sets.
        out: folder of the data set's cache.
        notice: called with a warning where the page could not be written.
        **arguments: the other arguments of `cache.ingest`.

    Returns:
        The report of `cache.ingest`.

    Raises:
        UserError: that of `cache.ingest`; the page of a refused data set has the reasons.
    """
    try:
        report = cache.ingest(dataset, source, out, **arguments)
    except UserError as error:
        if error.report is not None and error.exit_code == Exit.REFUSED:
            error.details = [*error.details, *write_ingest_page(out, error.report)]
        raise
    faults = write_ingest_page(out, report) if report.get("published") else []  # not of a shard or a dry run
    for fault in faults:
        if notice is not None:
            notice(fault)
    return report
