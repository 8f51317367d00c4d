"""What the report says of an ingest of claims: a unit a table, every row accounted for, and what was noticed about the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bitimely_core.cache import report
from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.job import ClaimsJob, CleaningFindings
from bitimely_core.errors import Finding, Reason, safe_text
from bitimely_core.types import IngestUnit, SourceRows

REQUIREMENTS = {
    Reason.DATE: "expected a calendar date",
    Reason.DATE_OUTSIDE_LIFE: "expected a day between birth and death, within the data",
    Reason.EMPTY_CODE: "expected a code",
    Reason.AMBIGUOUS_CODE: "expected a code with its leading zeros",
    Reason.WRONG_VOCABULARY: "expected a code of the row's own vocabulary",
    Reason.BAD_CODE: "expected an ICD code",
    Reason.IDENTIFIER: "expected a subject",
    Reason.UNMAPPED_CODE: "no PheCode: kept for the label rules alone",
    Reason.DUPLICATES: "exact copies, used once",
    Reason.LABEL_LEAKAGE: "after the index date of the labels: no input",
}


def write_ingest_report(job: ClaimsJob, found: CleaningFindings, content: str) -> None:
    """Units, rows and findings of the report: one of each a table, and what was said about the whole."""
    run, claims = job.run, job.claims
    of_file: dict[str, list[Finding]] = {}
    for finding in (*claims.findings, *job.codemap.findings):
        if finding.file in {table.file for table in claims.rows}:
            of_file.setdefault(str(finding.file), []).append(finding)
        else:
            run.reasons.append(finding)
    rows: list[SourceRows] = []
    for table in claims.rows:
        account = found.accounts.get(table.file)
        if account is not None:
            dropped, quarantined = account.split()
            table = replace(
                table,
                dropped=dict(Counter(table.dropped) + Counter(dropped)),
                quarantined=dict(Counter(table.quarantined) + Counter(quarantined)),
            )
            of_file.setdefault(table.file, []).extend(
                Finding(
                    code=reason,
                    level="warning" if str(reason) in dropped else "error",
                    problem=f"{n} {table.kind}",
                    requirement=REQUIREMENTS.get(reason, ""),
                    file=table.file,
                    count=n,
                    examples=tuple(account.examples.get(reason, ())),
                )
                for reason, n in sorted(account.reasons.items())
                if n
            )
        rows.append(table)
    run.reasons += _find_unmet_rules(job, found)
    run.rows = [report.rows_to_json(table) for table in rows]
    for table in rows:
        add_unit(
            run, table.file, of_file.get(table.file, []), content if table.file in found.accounts else run.hashes.get(table.file, content)
        )


def _find_unmet_rules(job: ClaimsJob, found: CleaningFindings) -> list[Finding]:
    """Rules that look at kinds of claims of which the data have none."""
    from bitimely_core.claims.label_rules import SOURCES

    there = {SOURCES[kind] for kind in found.sources}
    if not job.ruled or not there:
        return []
    wanted = {rule.name: {kind for clause in rule.clauses for kind in clause.sources} for rule in job.rules}
    return [
        Finding(
            code=Reason.CLASS_MISSING,
            level="warning",
            problem=f"rule {safe_text(name)} looks at {' and '.join(sorted(kinds))} rows, and there are only {' and '.join(sorted(there))} ones",
            requirement="nobody can have this label",
            hint="Name the kind of claims: --default-source, or --col source=COLUMN",
        )
        for name, kinds in wanted.items()
        if not kinds & there
    ]


def add_unit(run: IngestRun, file: str, reasons: list[Finding], content: str | None) -> None:
    """Enter a table into the report."""
    one = IngestUnit(name=file, files=(file,), read=None)
    run.entries[file] = {"report": report.unit_to_json(one, reasons, content=content), "rows": []}
