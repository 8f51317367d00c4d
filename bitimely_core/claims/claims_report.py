"""Fills the report of an ingest of claims: one unit for each table, every row accounted for, and
the findings.

Reports that are printed have their counts of rows and subjects rounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from bitimely_core import privacy
from bitimely_core.cache import ingest_report
from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.clean import RULE_REASONS, RowAccount
from bitimely_core.claims.codes import list_shapes
from bitimely_core.claims.job import ClaimsJob, CleaningFindings
from bitimely_core.claims.sources.columns import warn_of_rows
from bitimely_core.claims.sources.source_options import REFUSED
from bitimely_core.claims.unknown_dates import describe_days
from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.schemas.ingest_records import CachedUnit, IngestPart, IngestReport, TableReport
from bitimely_core.types import IngestUnit

Report = TypeVar("Report", IngestReport, IngestPart)
SUBJECTS = "subjects"  # kind of a table with a row a subject
# how codes of diseases begin, and those of the Danish SKS, which are of no vocabulary
DISEASE = re.compile(r"\W*([A-Z]\d|\d{3}\.)", re.IGNORECASE)
PREFIXED = re.compile(r"\W*D[A-Z]\d", re.IGNORECASE)
LOOKS = {Reason.WRONG_VOCABULARY: DISEASE, Reason.BAD_CODE: PREFIXED}
REQUIREMENTS = {  # what was expected of rows that are left out
    Reason.DATE: "expected a calendar date",
    Reason.DATE_OUTSIDE_LIFE: "expected a day between birth and death, within the data",
    Reason.EMPTY_CODE: "expected a code",
    Reason.AMBIGUOUS_CODE: "expected a code with its leading zeros",
    Reason.WRONG_VOCABULARY: "expected a code of the row's own vocabulary",
    Reason.BAD_CODE: "expected an ICD code",
    Reason.NOT_DIAGNOSED: "ruled out, suspected or past, by the letter beside the code: dropped",
    Reason.REVERSED: "reversed or replaced by another claim: dropped with it",
    Reason.IDENTIFIER: "expected a subject",
    Reason.UNMAPPED_CODE: "no PheCode: used only by the label rules",
    Reason.DUPLICATES: "exact copies, used once",
    Reason.LABEL_LEAKAGE: "after the index date of the labels: not in the input",
}


def write_ingest_report(job: ClaimsJob, cleaning: CleaningFindings, content: str) -> None:
    """Enter units, rows and findings into the report of the ingest."""
    run, claims = job.run, job.claims
    findings: dict[str, list[Finding]] = {table.file: [] for table in claims.rows}
    for finding in (*claims.findings, *job.codemap.findings):
        findings.get(str(finding.file), run.reasons).append(finding)
    run.rows = []
    for table in claims.rows:
        digest: str | None = content
        account = cleaning.accounts.get(table.file)
        if account is None:
            digest = run.hashes.get(table.file, content)
        else:
            kind = "codes" if account.added else table.kind
            for reason, n in sorted(account.reasons.items()):
                shapes = account.shapes.get(reason)
                finding = Finding(
                    reason,
                    f"{n} {kind} (they look like {list_shapes(shapes)})"
                    if shapes
                    else f"{n} {kind}",
                    REQUIREMENTS.get(reason, ""),
                    _advise_codes(job, account, reason, table.file),
                    level="warning" if reason in RULE_REASONS else "error",
                    file=table.file,
                    count=n,
                    examples=tuple(account.examples.get(reason, ())),
                )
                findings[table.file].append(finding)
            dropped, quarantined = account.split()
            dropped = dict(Counter(table.dropped) + Counter(dropped))
            seen = table.seen + account.added
            table = replace(table, kind=kind, seen=seen, dropped=dropped, quarantined=quarantined)
            findings[table.file] += _report_cells(table.file, account)
        run.rows.append(ingest_report.report_rows(table))
        add_unit(run, table.file, findings[table.file], digest)


# codes of which a spreadsheet has made numbers and dates: 2.50E+02, 1-Feb, Feb-01
SPREADSHEET = re.compile(
    r"\W*(\d(\.\d+)?E\+\d+|\d+-[A-Z]{3}(-\d+)?|[A-Z]{3}-\d+)\W*", re.IGNORECASE | re.ASCII
)
SPREADSHEET_HINT = (
    "A spreadsheet has made numbers and dates of codes, which cannot be undone: write the table "
    "again from its origin"
)
HINTS = {
    Reason.AMBIGUOUS_CODE: "Give --pad-undotted if they are diagnoses that have lost their zeros",
    Reason.DATE: "If they have a form of their own, give it, as --date-format %d/%m/%Y: dates as "
    "YYYY-MM-DD beside them stay so",
}
NO_DATES = "Their dates are missing: fill them in where the source has them"


def _advise_codes(job: ClaimsJob, account: RowAccount, reason: Reason, file: str) -> str:
    """The option that reads rows that are left out for their dates or codes: of codes of the other
    vocabulary the one that tells ICD-9 from ICD-10 by the date, where nothing states that of each.
    """
    examples = account.examples.get(reason, [])
    if any(map(SPREADSHEET.fullmatch, examples)):
        return SPREADSHEET_HINT
    survey, tables = job.claims.survey, job.claims.events.tables
    if reason in HINTS:
        is_missing = reason == Reason.DATE and file not in survey.odd_dates
        return NO_DATES if is_missing else HINTS[reason]
    is_stated = survey.stated == "surely" or any("vocab" in t.table.columns for t in tables)
    if reason not in LOOKS or is_stated or not any(map(LOOKS[reason].match, examples)):
        return ""
    switch = "Give --icd10-from DATE if codes are of ICD-9 before a day and of ICD-10 from it on"
    if "col" in REFUSED.get(job.options.source, ()):
        return f"{switch}: 1900-01-01 if all are of ICD-10"
    return (
        f"{switch}, --col vocab=icd10 if all are of ICD-10; where those of this table are, call "
        "their column icd10"
    )


def _report_cells(file: str, account: RowAccount) -> list[Finding]:
    """Warnings of cells with several codes and of days that stand for an unknown date."""
    unknown = account.unknown_days
    return [
        *warn_of_rows(
            account.added,
            Reason.CODE_FORM,
            "codes stand behind others in one cell",
            "each is a diagnosis of its row",
            file=file,
        ),
        *warn_of_rows(
            unknown.total(),
            Reason.DATE,
            f"rows are of {describe_days(unknown)}",
            "which stands for an unknown date: they are left out",
            file=file,
        ),
    ]


def add_unit(run: IngestRun, file: str, reasons: list[Finding], content: str | None) -> None:
    """Enter a table into the report; without `content` it is quarantined."""
    unit = IngestUnit(name=file, files=(file,), read=None)
    report = ingest_report.report_unit(unit, reasons, content=content)
    run.entries[file] = CachedUnit(key=None, sources={}, report=report)


def round_report(report: Report) -> Report:
    """An ingest report, or that of a part, as it is printed: counts of rows rounded up, without
    tables of subjects and examples of few rows.

    Totals are sums of rounded counts, so that seen = used + dropped + quarantined still holds.
    """
    units = [
        unit.model_copy(update={"reasons": [reason.round_counts() for reason in unit.reasons]})
        for unit in report.units
    ]
    return report.model_copy(
        update={
            "rows": [_round_table(table) for table in report.rows if table.kind != SUBJECTS],
            "units": units,
            "reasons": [reason.round_counts() for reason in report.reasons],
            "reason_counts": {
                reason: privacy.round_rows(n) for reason, n in report.reason_counts.items()
            },
        }
    )


@contextmanager
def round_refusal() -> Iterator[None]:
    """An error about data or options that leaves this block, and its details, have rounded counts;
    those of `exact` are not rounded.
    """
    try:
        yield
    except UserError as error:
        if error.exit_code in {Exit.REFUSED, Exit.USAGE}:
            error.exact = [error.finding, *error.details]
            first, *error.details = map(_round_finding, error.exact)
            error.problem, error.requirement = first.problem, first.requirement
        raise


def _round_finding(finding: Finding) -> Finding:
    problem, requirement = map(privacy.round_message, (finding.problem, finding.requirement))
    return replace(finding, problem=problem, requirement=requirement)


def _round_table(table: TableReport) -> TableReport:
    """The account of a table with rounded counts and their totals."""
    shared = privacy.share_record(table)
    dropped = sum(shared.dropped_by_reason.values())
    quarantined = sum(shared.quarantined_by_reason.values())
    seen = shared.used + dropped + quarantined
    totals = {"dropped": dropped, "quarantined": quarantined, "seen": seen}
    return shared.model_copy(update=totals)
