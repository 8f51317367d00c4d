"""Says what a source of claims does not tell of its subjects, what depends on it, and what to give;
and refuses an ingest that leaves no row, or no subject with any label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from bitimely_core.claims.clean import RULE_REASONS
from bitimely_core.claims.job import ClaimsJob, CleaningFindings
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.claims.sources.source_options import parse_label_columns
from bitimely_core.claims.subjects import SubjectCounts
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text

# rules by which a row is not lost: it is understood, is there already, or has no place in the input
# alone
HARMLESS = {
    Reason.DUPLICATES,
    Reason.UNMAPPED_CODE,
    Reason.LABEL_LEAKAGE,
    Reason.NOT_DIAGNOSED,
    Reason.REVERSED,
}
TASK_LABELS = {"meds"}  # layouts whose labels come in folders of their own
ALIKE = (
    "Write the ids alike in both tables: zeros before a number, and words such as Patient/, are "
    "part of them"
)
ADD_PATIENTS = "Put patients.csv with patient_id, birth_date and sex beside the claims"
GIVE_KINDS = {  # layout -> what to do where no rule can see the kinds of its claims
    "claims": "Give the kind of claims with --default-source, or --col source=COLUMN",
    "omop": "Give the kind of claims with --default-source",
    "meds": "Give the kind of claims with --default-source",
    "synpuf": "Put the files of inpatient and carrier claims beside those that are there",
}
NO_LABELS = (
    "For dates and codes alone give --cohort diabetes-codes --no-select; for histories without "
    "labels --rules none --no-select"
)


class LabelCounts(NamedTuple):
    """Subjects by what is known of one label."""

    cases: int = 0
    unknown: int = 0


def count_labels(path: Path, names: Sequence[str]) -> dict[str, LabelCounts]:
    """The counts of each label in a table of labels of the cache."""
    table = pl.scan_parquet(path, glob=False).group_by("name", "value").len().collect()
    rows = {(name, value): n for name, value, n in table.iter_rows()}
    return {name: LabelCounts(rows.get((name, 1), 0), rows.get((name, None), 0)) for name in names}


def find_missing_facts(job: ClaimsJob, counts: SubjectCounts) -> Iterator[Finding]:
    """Warnings of births, sexes and index dates that are not known of all subjects, and of
    registered subjects none of whom has claims.
    """
    tables = [table.file for table in job.claims.rows if table.kind == "subjects"]
    file = tables[0] if job.claims.subjects is not None and tables else job.claims.rows[0].file
    yield from _describe_unmatched(counts, file)
    if counts.births < counts.subjects:
        yield _describe_births(job, counts, file)
    if counts.sexes < counts.subjects:
        yield _describe_sexes(job, counts, file)
    if 0 < counts.index_dates < counts.subjects:
        missing = counts.subjects - counts.index_dates
        yield input_warning(
            Reason.UNMATCHED_LABELS,
            f"{missing} of {counts.subjects} subjects have no index date",
            "their whole history is the input, that of the others ends on their index date",
            "Give each of them an index date in the table of labels",
            count=missing,
            file=tables[-1] if tables else file,
            field="index_date",
        )


def _describe_unmatched(counts: SubjectCounts, file: str) -> Iterator[Finding]:
    """A warning of ids that the table of patients and the claims do not share."""
    if counts.registered and not counts.matched and counts.with_rows:
        yield input_warning(
            Reason.UNMATCHED_LABELS,
            f"0 of {counts.registered} ids of patients are among the claims",
            f"nothing is known of the {counts.with_rows} subjects with claims",
            ALIKE,
            file=file,
            field="subject",
        )
    elif counts.matched < min(counts.registered, counts.with_rows):
        without = counts.with_rows - counts.matched
        yield input_warning(
            Reason.UNMATCHED_LABELS,
            f"{without} of {counts.with_rows} subjects with claims are not among the "
            f"{counts.registered} ids of patients",
            f"and {counts.registered - counts.matched} of these have no claims",
            ALIKE,
            count=without,
            file=file,
            field="subject",
        )


def _describe_births(job: ClaimsJob, counts: SubjectCounts, file: str) -> Finding:
    """A warning of births that are not known, an info where no label needs them."""
    names = list_aged_labels(job)
    effect = f"without one nobody has the label {_join_names(names)}" if names else "ages need them"
    return input_warning(
        Reason.METADATA,
        f"births of {counts.births} of {counts.subjects} subjects are known",
        effect,
        _find_advice(job, "birth"),
        level="warning" if names or not counts.births else "info",
        count=counts.subjects - counts.births,
        file=file,
        field="birth",
    )


def _describe_sexes(job: ClaimsJob, counts: SubjectCounts, file: str) -> Finding:
    """A warning of sexes that are not known; an info where few are missing, or there is no table
    that could tell them.
    """
    is_minor = 2 * counts.sexes >= counts.subjects or job.claims.subjects is None
    return input_warning(
        Reason.METADATA,
        f"sexes of {counts.sexes} of {counts.subjects} subjects are known",
        "--sex-restrictions and cohorts by sex need them",
        _find_advice(job, "sex"),
        level="info" if is_minor else "warning",
        count=counts.subjects - counts.sexes,
        file=file,
        field="sex",
    )


def list_aged_labels(job: ClaimsJob) -> list[str]:
    """The labels whose rules need an age; none for a cohort, whose outcome is the label."""
    if not job.ruled or job.options.for_cohort:
        return []
    return [rule.name for rule in job.rules if rule.min_age_years is not None]


def _find_advice(job: ClaimsJob, key: str) -> str:
    """What to give so that `key` is known."""
    return job.claims.advice.get(key, ADD_PATIENTS if job.options.source == "claims" else "")


def _join_names(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(map(safe_text, names[:-1])), safe_text(names[-1]))))


class _Cause(NamedTuple):
    """Why no subject has a label."""

    text: str
    hint: str = ""
    field: str | None = None


def _find_cause(
    job: ClaimsJob, name: str, label: LabelCounts, counts: SubjectCounts, present: frozenset[str]
) -> _Cause:
    """Why no subject has a label. `present`: kinds of claims among the rows."""
    rule = next((rule for rule in job.rules if job.ruled and rule.name == name), None)
    if rule is None:
        return _Cause("its column holds no 1")
    needed = frozenset[str]().union(*(clause.sources for clause in rule.clauses))
    if present and needed.isdisjoint(present):
        kinds = f"found only {' and '.join(sorted(present))} rows"
        text = f"its rule needs {' or '.join(sorted(needed))} rows, {kinds}"
        return _Cause(text, GIVE_KINDS.get(job.options.source, ""), "source")
    if label.unknown and rule.min_age_years is not None and counts.births < counts.subjects:
        text = f"its rule needs an age, births of {counts.births} of {counts.subjects} are known"
        return _Cause(text, _find_advice(job, "birth"), "birth")
    return _Cause("no history fulfils its rule")


def find_caseless_labels(
    job: ClaimsJob,
    cleaning: CleaningFindings,
    counts: SubjectCounts,
    labels: Mapping[str, LabelCounts],
) -> list[Finding]:
    """Warnings of labels that no subject has, one for each reason, as far as it is known."""
    present = frozenset(SOURCES[kind] for kind in cleaning.sources)
    groups: dict[_Cause, list[str]] = {}
    for name, label in labels.items():
        if not label.cases:
            groups.setdefault(_find_cause(job, name, label, counts, present), []).append(name)
    return [
        input_warning(
            Reason.CLASS_MISSING,
            f"0 of {counts.subjects} subjects have the label {_join_names(names)}",
            cause.text,
            cause.hint,
            field=cause.field,
        )
        for cause, names in groups.items()
    ]


def find_row_refusal(
    job: ClaimsJob, cleaning: CleaningFindings, counts: SubjectCounts
) -> UserError | None:
    """Why the rows that are left are too few: none, or more than `--max-bad` were dropped by a
    rule.
    """
    total = Counter[Reason]()
    for table in job.claims.rows:
        account = cleaning.accounts.get(table.file)
        if account is None:
            continue
        total.update(account.reasons)
        lost = sum(account.reasons[reason] for reason in RULE_REASONS - HARMLESS)
        if lost > job.run.run_options["max_bad"] * table.seen and counts.with_rows:
            return _refuse_rows(
                f"{lost} of {table.seen} {table.kind} are dropped by a rule",
                f"more than --max-bad {job.run.run_options['max_bad']:g}",
                account.reasons,
                table.file,
            )
    if counts.with_rows:
        return None
    seen = sum(account.rows for account in cleaning.accounts.values())
    return _refuse_rows(f"none of {seen} rows is left", "", total, None)


def _refuse_rows(
    problem: str, limit: str, reasons: Mapping[Reason, int], file: str | None
) -> UserError:
    """The refusal, with the counts of the rules by which rows left."""
    lost = {reason: n for reason, n in reasons.items() if reason not in HARMLESS and n}
    rules = ", ".join(f"{n} rows {reason}" for reason, n in sorted(lost.items()))
    most = max(lost, key=lambda reason: lost[reason], default=Reason.NO_INPUT)
    hint = "Check the rows that the report names"
    if most == Reason.DATE_OUTSIDE_LIFE:
        hint = "Check --date-format, and births and deaths in the table of patients"
    return input_error(most, ": ".join(filter(None, (problem, rules))), limit, hint, file=file)


def find_label_refusal(
    job: ClaimsJob, labels: Mapping[str, LabelCounts], findings: Sequence[Finding]
) -> UserError | None:
    """Why the labels are useless: no subject has any of them, or one that `--label-column` asks
    for. A cohort has its own outcome, and MEDS has folders of labels (`--task`). Without a birth
    the labels are unknown, and the histories are worth having: the findings say so.

    `findings`: of `find_caseless_labels`.
    """
    asked = {job.name_flag(label.name) for label in parse_label_columns(job.options)}
    has_others = job.options.for_cohort or job.options.source in TASK_LABELS
    lacks_births = any(finding.field == "birth" for finding in findings)
    if not asked and (has_others or lacks_births):
        return None
    cases = {name for name, label in labels.items() if label.cases}
    if not labels or (cases and asked <= cases):
        return None
    first, *others = findings
    hint = ". ".join(filter(None, (first.hint, NO_LABELS if job.ruled else "")))
    return input_error(
        first.code, first.problem, first.requirement, hint, field=first.field, details=others
    )
