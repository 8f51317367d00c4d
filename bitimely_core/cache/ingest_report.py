"""The report of an ingest: status of every unit and row, and the verdict.

It holds no clock, host or duration: the same input, options and versions give the same bytes.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from bitimely_core import __version__
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error
from bitimely_core.registry import DatasetFacts, Entry, find_versions
from bitimely_core.schemas.ingest_records import (
    ErrorReport,
    FindingRecord,
    IngestReport,
    SourceReport,
    TableReport,
    ToolVersions,
    UnitCounts,
    UnitReport,
)
from bitimely_core.types import IngestUnit, Record, SourceRows

MAX_LISTED = 100_000  # units; beyond, accepted ones without a warning are not listed


def report_unit(
    unit: IngestUnit,
    reasons: Iterable[Finding],
    *,
    content: str | None = None,
    records: Sequence[Record] | None = None,
) -> UnitReport:
    """Status of one unit.

    Args:
        unit: the unit.
        reasons: what was found; without a file they get the first of the unit.
        content: hash of its content; None: it is quarantined.
        records: its recordings; None: it holds none.
    """
    file = next(iter(unit.files), unit.name)
    named = [finding.at(file) for finding in reasons]
    warned = any(finding.level != "info" for finding in named)
    status: Literal["accepted", "accepted_with_warning", "quarantined"] = (
        "accepted_with_warning" if warned else "accepted"
    )
    if content is None:
        status = "quarantined"
        if not warned:
            problem = "cannot be read, and the reader gives no reason"
            named.append(Finding(Reason.INTERNAL, problem, file=file))
    samples = channels = None
    if records is not None:
        samples = sum(map(_count_samples, records))
        channels = len({signal.channel for record in records for signal in record.signals})
    return UnitReport(
        unit=unit.name,
        files=list(unit.files),
        status=status,
        reasons=list(map(FindingRecord.from_finding, named)),
        content_sha256=content,
        samples=samples,
        channels=channels,
    )


def _count_samples(record: Record) -> int:
    """Samples of the channel with the highest rate."""
    fastest = max(record.signals, key=lambda signal: (signal.rate, len(signal.samples)))
    return sum(
        len(signal.samples) for signal in record.signals if signal.channel == fastest.channel
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
    records = list(map(FindingRecord.from_finding, reasons))
    return IngestReport(
        dataset=dataset.name,
        source=source,
        units=units if listed else _list_not_accepted(units),
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
            libraries=find_versions(("numpy", "pyarrow", "polars", "wfdb")),
        ),
    )


def _count_reasons(
    units: list[UnitReport], rows: list[TableReport], reasons: list[FindingRecord]
) -> dict[str, int]:
    """Reason code -> occurrences; rows whose file has the same reason are counted with it."""
    counts: Counter[str] = Counter()
    counted = set()
    for reason in _list_reasons(units, reasons):
        counts[reason.code] += reason.count
        counted.add((reason.file, reason.code))
    for table in rows:
        by_reason = Counter(table.dropped_by_reason)
        by_reason.update(table.quarantined_by_reason)
        by_reason.update(table.warned_by_reason)
        for code, count in by_reason.items():
            if (table.file, code) not in counted:
                counts[code] += count
    return dict(sorted(counts.items()))


def _list_reasons(
    units: Iterable[UnitReport], reasons: Iterable[FindingRecord]
) -> list[FindingRecord]:
    """The reasons of the units, then those of the data set."""
    return [*(chain.from_iterable(unit.reasons for unit in units)), *reasons]


def find_refusal(report: IngestReport, *, strict: bool, max_bad: float) -> UserError | None:
    """Why nothing may be published (exit 4).

    Nothing is left, more than `max_bad` is quarantined, or anything is under `strict`.
    """
    counts = report.counts
    if not counts.units_seen:
        return input_error(
            Reason.NO_INPUT,
            "no file was recognised",
            f"expected files of {report.dataset}",
            "Check the folder",
        )
    code, file = _find_most_common_fault(report.units)
    units = "units are quarantined" + (", this one among them" if counts.units_seen > 1 else "")
    totals = [(counts.quarantined, counts.units_seen, units, code, file)]
    for table in report.rows:
        code = Reason(_find_most_common(table.quarantined_by_reason))
        rows = f"{table.kind} are quarantined"
        totals.append((table.quarantined, table.seen, rows, code, table.file))
    for faulty, total, what, code, file in totals:
        if what is units and faulty == total:
            limit = "nothing is left"
        elif strict and faulty:
            limit = "none may be under --strict"
        elif faulty > max_bad * total:
            limit = f"more than --max-bad {max_bad:g}"
        else:
            continue
        hint = "Correct or remove the files named above"
        return input_error(code, f"{faulty} of {total} {what}", limit, hint, file=file)
    return None


def _find_most_common(counts: Mapping[str, int]) -> str:
    """The code with the highest count, of several the last one; `no_input` without any."""
    return max(counts, key=lambda code: (counts[code], code), default=str(Reason.NO_INPUT))


def _find_most_common_fault(units: list[UnitReport]) -> tuple[Reason, str | None]:
    """The most common first fault of the quarantined units, and a file that has it."""
    faults = [
        next(reason for reason in unit.reasons if reason.level != "info")
        for unit in units
        if unit.status == "quarantined"
    ]
    code = _find_most_common(Counter(fault.code for fault in faults))
    return Reason(code), next((fault.file for fault in faults if fault.code == code), None)


def publish_report(report: IngestReport, generation: int, content: str) -> IngestReport:
    """The report of a published cache: partial when a unit or a row was quarantined."""
    partial = report.counts.quarantined or any(table.quarantined for table in report.rows)
    return report.model_copy(
        update={
            "status": "partial" if partial else "published",
            "exit_code": int(Exit.PARTIAL if partial else Exit.OK),
            "published": True,
            "generation": generation,
            "content_sha256": content,
        }
    )


def leave_out_accepted(report: IngestReport) -> IngestReport:
    """The report as the manifest holds it: each opening of the cache reads that.

    Accepted units without a warning stand in the file of the units.
    """
    return report.model_copy(
        update={"units": _list_not_accepted(report.units), "units_listed": "not_accepted"}
    )


def _list_not_accepted(units: list[UnitReport]) -> list[UnitReport]:
    return [unit for unit in units if unit.status != "accepted"]


def fail_report(report: IngestReport, error: UserError) -> IngestReport:
    """The report of an ingest that `error` has ended."""
    words = {
        Exit.REFUSED: "refused",
        Exit.INTERRUPTED: "interrupted",
        Exit.TERMINATED: "interrupted",
    }
    return report.model_copy(
        update={
            "status": words.get(Exit(error.exit_code), "failed"),
            "exit_code": int(error.exit_code),
            "error": ErrorReport(code=str(error.code), message=str(error)),
        }
    )


def list_findings(report: IngestReport) -> list[Finding]:
    """Warnings and errors, those of units first; `line()` of each is its line on the screen."""
    return [
        Finding(Reason(reason.code), reason.message, level=reason.level, count=reason.count)
        for reason in _list_reasons(report.units, report.reasons)
        if reason.level != "info"
    ]
