"""The report of an ingest of claims: one unit per table, every row accounted for, and findings on
all tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from bitimely_core import privacy
from bitimely_core.cache import ingest_report
from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.clean import RowAccount
from bitimely_core.claims.job import ClaimsJob, CleaningFindings
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.errors import Finding, Level, Reason, input_warning, safe_text
from bitimely_core.schemas.ingest import (
    CachedUnit,
    FindingRecord,
    IngestPart,
    IngestReport,
    TableReport,
)
from bitimely_core.types import IngestUnit, SourceRows

Report = TypeVar("Report", IngestReport, IngestPart)
SUBJECTS = "subjects"  # kind of a table with a row a subject
REQUIREMENTS = {
    Reason.DATE: "expected a calendar date",
    Reason.DATE_OUTSIDE_LIFE: "expected a day between birth and death, within the data",
    Reason.EMPTY_CODE: "expected a code",
    Reason.AMBIGUOUS_CODE: "expected a code with its leading zeros",
    Reason.WRONG_VOCABULARY: "expected a code of the row's own vocabulary",
    Reason.BAD_CODE: "expected an ICD code",
    Reason.IDENTIFIER: "expected a subject",
    Reason.UNMAPPED_CODE: "no PheCode: used only by the label rules",
    Reason.DUPLICATES: "exact copies, used once",
    Reason.LABEL_LEAKAGE: "after the index date of the labels: not in the input",
}


def write_ingest_report(job: ClaimsJob, found: CleaningFindings, content: str) -> None:
    """Enter units, rows and findings into the report of the ingest."""
    run, claims = job.run, job.claims
    findings: dict[str, list[Finding]] = {table.file: [] for table in claims.rows}
    for finding in (*claims.findings, *job.codemap.findings):
        findings.get(str(finding.file), run.reasons).append(finding)
    run.reasons += _find_unmet_rules(job, found)
    run.rows = []
    for table in claims.rows:
        account = found.accounts.get(table.file)
        if account is not None:
            dropped, quarantined = account.split()
            findings[table.file] += _list_reasons(table, account, dropped)
            dropped, quarantined = (
                Counter(table.dropped) + Counter(dropped),
                Counter(table.quarantined) + Counter(quarantined),
            )
            table = replace(table, dropped=dict(dropped), quarantined=dict(quarantined))
        run.rows.append(ingest_report.report_rows(table))
        digest = content if account is not None else run.hashes.get(table.file, content)
        add_unit(run, table.file, findings[table.file], digest)


def _list_reasons(
    table: SourceRows, account: RowAccount, dropped: Mapping[str, int]
) -> Iterator[Finding]:
    for reason, n in sorted(account.reasons.items()):
        if n:
            level: Level = "warning" if str(reason) in dropped else "error"
            examples, wanted = tuple(account.examples.get(reason, ())), REQUIREMENTS.get(reason, "")
            yield Finding(
                reason,
                f"{n} {table.kind}",
                wanted,
                level=level,
                file=table.file,
                count=n,
                examples=examples,
            )


def _find_unmet_rules(job: ClaimsJob, findings: CleaningFindings) -> Iterator[Finding]:
    """Warnings of rules none of whose kinds of claims occurs in the data."""
    present = {SOURCES[kind] for kind in findings.sources}
    for rule in job.rules if job.ruled and present else ():
        kinds = {kind for clause in rule.clauses for kind in clause.sources}
        if not kinds & present:
            text = f"rule {safe_text(rule.name)} needs {' or '.join(sorted(kinds))} rows, found only {' and '.join(sorted(present))} rows"
            hint = "Give the kind of claims with --default-source, or --col source=COLUMN"
            yield input_warning(Reason.CLASS_MISSING, text, "no subject can have this label", hint)


def add_unit(run: IngestRun, file: str, reasons: list[Finding], content: str | None) -> None:
    """Enter a table into the report."""
    one = IngestUnit(name=file, files=(file,), read=None)
    run.entries[file] = CachedUnit(
        key=None, sources={}, report=ingest_report.report_unit(one, reasons, content=content)
    )


def round_report(found: Report) -> Report:
    """An ingest report, or that of a part, as it is printed: counts of rows rounded up, without
    tables of subjects and examples of few rows.

    Totals are sums of rounded counts, so that seen = used + dropped + quarantined still.
    """
    units = [
        unit.model_copy(update={"reasons": list(map(round_reason, unit.reasons))})
        for unit in found.units
    ]
    return found.model_copy(
        update={
            "rows": [_round_table(table) for table in found.rows if table.kind != SUBJECTS],
            "units": units,
            "reasons": list(map(round_reason, found.reasons)),
            "reason_counts": _round_counts(found.reason_counts),
        }
    )


def round_reason(reason: FindingRecord) -> FindingRecord:
    """A finding without exact counts of rows and subjects."""
    examples: list[str] = [] if privacy.is_small(reason.count) else reason.examples
    rounded = {
        "message": privacy.round_message(reason.message),
        "count": privacy.round_rows(reason.count),
    }
    return reason.model_copy(update={**rounded, "examples": examples})


def _round_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {reason: privacy.round_rows(n) for reason, n in counts.items()}


def _round_table(table: TableReport) -> TableReport:
    dropped, quarantined, warned = map(
        _round_counts,
        (table.dropped_by_reason, table.quarantined_by_reason, table.warned_by_reason),
    )
    used, lost, faulty = (
        privacy.round_rows(table.used),
        sum(dropped.values()),
        sum(quarantined.values()),
    )
    by_reason = {
        "dropped_by_reason": dropped,
        "quarantined_by_reason": quarantined,
        "warned_by_reason": warned,
    }
    return table.model_copy(
        update={
            **by_reason,
            "used": used,
            "dropped": lost,
            "quarantined": faulty,
            "seen": used + lost + faulty,
        }
    )
