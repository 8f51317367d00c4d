"""The ingest report: status of every unit and row, and the verdict. Schema
`bitimely.ingest_report/1`.

Without clock, host or duration: the same input, options and versions give the same bytes.
"""

from __future__ import annotations

import functools
import platform
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bitimely_core import __version__
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error
from bitimely_core.registry import DatasetFacts, Entry
from bitimely_core.schemas.ingest import (
    ErrorReport,
    FindingRecord,
    IngestReport,
    SourceReport,
    TableReport,
    ToolVersions,
    UnitCounts,
    UnitReport,
)
from bitimely_core.types import IngestUnit, SourceRows

MAX_LISTED = 100_000  # units; beyond, accepted ones without a warning are not listed


def report_unit(
    unit: IngestUnit,
    reasons: Iterable[Finding],
    *,
    content: str | None = None,
    samples: int | None = None,
    channels: int | None = None,
) -> UnitReport:
    """Status of one unit; quarantined when there is no content. Findings without a file get the
    first of the unit.
    """
    file = unit.files[0] if unit.files else unit.name
    named = [finding.at(file) for finding in reasons]
    warned = any(finding.level != "info" for finding in named)
    if content is None and not warned:
        named.append(
            Finding(Reason.INTERNAL, "cannot be read, and the reader gives no reason", file=file)
        )
    return UnitReport(
        unit=unit.name,
        files=list(unit.files),
        status="quarantined"
        if content is None
        else "accepted_with_warning"
        if warned
        else "accepted",
        reasons=[FindingRecord.from_finding(finding) for finding in named],
        content_sha256=content,
        samples=samples,
        channels=channels,
    )


def report_rows(rows: SourceRows) -> TableReport:
    """Status of the rows of one table."""
    dropped, quarantined = sum(rows.dropped.values()), sum(rows.quarantined.values())
    return TableReport(
        file=rows.file,
        kind=rows.kind,
        seen=rows.seen,
        used=rows.seen - dropped - quarantined,
        dropped=dropped,
        quarantined=quarantined,
        dropped_by_reason=dict(rows.dropped),
        quarantined_by_reason=dict(rows.quarantined),
        warned_by_reason=dict(rows.warned),
    )


def build_report(
    dataset: Entry[DatasetFacts],
    source: SourceReport,
    units: list[UnitReport],
    *,
    rows: list[TableReport],
    reasons: list[Finding],
    options: dict[str, Any],
) -> IngestReport:
    """The report of an ingest before its verdict: nothing published, no error. `reasons`: of the
    data set; `options`: resolved.
    """
    units = sorted(units, key=lambda unit: unit.unit)
    status = Counter(unit.status for unit in units)
    listed = len(units) <= MAX_LISTED
    records = [FindingRecord.from_finding(finding) for finding in reasons]
    return IngestReport(
        dataset=dataset.name,
        source=source,
        units=units if listed else [unit for unit in units if unit.status != "accepted"],
        units_listed="all" if listed else "not_accepted",
        counts=UnitCounts(
            units_seen=len(units),
            accepted=status["accepted"],
            accepted_with_warning=status["accepted_with_warning"],
            quarantined=status["quarantined"],
        ),
        rows=rows,
        reasons=records,
        reason_counts=_count_reasons(units, rows, records),
        options=options,
        rules=dict(dataset.facts.rules),
        tool=ToolVersions(
            version=__version__,
            python=platform.python_version(),
            libraries=dict(_find_library_versions()),
        ),
    )


def _count_reasons(
    units: list[UnitReport], rows: list[TableReport], reasons: list[FindingRecord]
) -> dict[str, int]:
    """Reason code -> occurrences. SourceRows whose code is also a reason of their file are counted
    there.
    """
    counts: Counter[str] = Counter()
    counted = set()
    for reason in [*(reason for unit in units for reason in unit.reasons), *reasons]:
        counts[reason.code] += reason.count
        counted.add((reason.file, reason.code))
    for table in rows:
        for by_reason in (
            table.dropped_by_reason,
            table.quarantined_by_reason,
            table.warned_by_reason,
        ):
            counts.update(
                {
                    code: count
                    for code, count in by_reason.items()
                    if (table.file, code) not in counted
                }
            )
    return dict(sorted(counts.items()))


@functools.cache
def _find_library_versions() -> dict[str, str]:
    """Versions of what reads and writes."""
    versions = {}
    for name in ("numpy", "pyarrow", "polars", "wfdb"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # an extra that is not installed
            versions[name] = "absent"
    return versions


def find_refusal(report: IngestReport, *, strict: bool, max_bad: float) -> UserError | None:
    """Why nothing may be published (exit 4): nothing left, too much quarantined, or anything
    quarantined under `strict`.
    """
    if not report.counts.units_seen:
        return input_error(
            Reason.NO_INPUT,
            "no file was recognised",
            f"expected files of {report.dataset}",
            "Check the folder",
        )
    counts, (fault, example) = report.counts, _find_most_common_fault(report.units)
    faults: list[tuple[int, int, str, Reason, str | None]] = [
        (counts.quarantined, counts.units_seen, "units", fault, example)
    ]
    for table in report.rows:
        by_reason = table.quarantined_by_reason
        code = (
            Reason(max(by_reason, key=lambda reason: (by_reason[reason], reason)))
            if by_reason
            else Reason.NO_INPUT
        )
        faults.append((table.quarantined, table.seen, table.kind, code, table.file))
    for faulty, total, what, code, file in faults:
        limit = f"more than --max-bad {max_bad:g}" if faulty > max_bad * total else ""
        limit = "none may be under --strict" if strict and faulty else limit
        limit = "nothing is left" if what == "units" and faulty == total else limit
        if limit:
            hint = "Correct or remove the files named above"
            text = f"{faulty} of {total} {what} are quarantined" + (
                ", this one among them" if what == "units" and total > 1 else ""
            )
            return input_error(code, text, limit, hint, file=file)
    return None


def _find_most_common_fault(units: list[UnitReport]) -> tuple[Reason, str | None]:
    """The most common first fault of the quarantined units, and a file that has it."""
    first = [
        next(reason for reason in unit.reasons if reason.level != "info")
        for unit in units
        if unit.status == "quarantined"
    ]
    counts = Counter(reason.code for reason in first)
    code = max(counts, key=lambda code: (counts[code], code), default=str(Reason.NO_INPUT))
    return Reason(code), next((reason.file for reason in first if reason.code == code), None)


def publish_report(report: IngestReport, generation: int, content: str) -> IngestReport:
    """The report of a published cache: partial when a unit or a row was quarantined."""
    partial = report.counts.quarantined or any(table.quarantined for table in report.rows)
    status, code = ("partial", Exit.PARTIAL) if partial else ("published", Exit.OK)
    verdict = {"status": status, "exit_code": int(code), "published": True}
    return report.model_copy(
        update={**verdict, "generation": generation, "content_sha256": content}
    )


def fail_report(report: IngestReport, error: UserError) -> IngestReport:
    """The report of an ingest that `error` has ended."""
    words = {
        Exit.REFUSED: "refused",
        Exit.INTERRUPTED: "interrupted",
        Exit.TERMINATED: "interrupted",
    }
    status, shown = (
        words.get(Exit(error.exit_code), "failed"),
        ErrorReport(code=str(error.code), message=str(error)),
    )
    return report.model_copy(
        update={"status": status, "exit_code": int(error.exit_code), "error": shown}
    )


def list_findings(report: IngestReport) -> list[Finding]:
    """Findings of levels warning and error, units first; `line()` of each is its line on the
    screen.
    """
    reasons = [*(reason for unit in report.units for reason in unit.reasons), *report.reasons]
    return [
        Finding(Reason(one.code), one.message, level=one.level, count=one.count)
        for one in reasons
        if one.level != "info"
    ]
