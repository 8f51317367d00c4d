"""The page of an ingest: status of every unit, reasons, quality of every channel, and the first
recording drawn.

It shows faulty units, swapped channels and shifted hypnograms before training. It holds no subject
and no date, and names no unit that the ingest report does not name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitimely_core import cache, registry
from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.page import Page, PageBuilder, Table, make_table, make_tables, rename_units
from bitimely_core.report.channel_blocks import (
    channel_warnings,
    collect_channels,
    duration_figures,
    measure_recordings,
    quality_blocks,
)
from bitimely_core.report.page_text import format_duration
from bitimely_core.report.recording_figures import draw_recording, label_blocks
from bitimely_core.report.renderer import render_html
from bitimely_core.schemas.ingest_records import FindingRecord, IngestReport, TableReport
from bitimely_core.store import storage
from bitimely_core.store.records import read_result, write_results
from bitimely_core.system_errors import find_system_error, format_size
from bitimely_core.types import group_by

MAX_UNITS = 200  # listed
STATES = {
    "accepted": "accepted",
    "accepted, with a warning": "accepted_with_warning",
    "quarantined": "quarantined",
}
LEVELS = {"error": "quarantined", "warning": "warning", "info": "note"}  # the worst first
# options that the notices or other facts show
SHOWN_OPTIONS = {"keep_phi", "keep_dates", "strict", "max_bad", "follow_symlinks", "verify"}


def write_ingest_page(folder: str | Path, report: dict[str, Any]) -> list[Finding]:
    """Write `report.html` of an ingest (or of its error) into the cache's folder, unless it is
    there already.

    Returns a warning where that failed, whatever the cause: the cache is complete without it.
    """
    path = Path(folder) / cache.PAGE
    mark = storage.fingerprint(report)[:16]
    try:
        with suppress(OSError, UserError):  # absent or damaged
            if mark.encode() in read_result(path):
                return []
        page = ingest_page(folder, IngestReport.parse(report, path))
        page.facts["Fingerprint of the report"] = mark
        text = render_html(page, alone=True)
        write_results(path.parent, {path.name: text.encode()}, beside=True)
    except Exception as error:
        with suppress(UserError):
            # it would show another ingest
            write_results(path.parent, {}, gone=[path.name], beside=True)
        fault = find_system_error(error, path) or error
        reason = fault.problem if isinstance(fault, UserError) else type(error).__name__
        problem = f"the page could not be written ({reason})"
        requirement = "the cache is complete without it"
        return [Finding(Reason.INTERNAL, problem, requirement, level="warning", file=str(path))]
    return []


def ingest_page(folder: str | Path, report: IngestReport) -> Page:
    """The page of an ingest. `folder` is not opened when nothing was published. Raises UserError:
    the cache cannot be read.
    """
    page, subjects = PageBuilder(f"Ingest of {report.dataset}"), None
    page.notice(*_list_notices(report))
    page.add_facts(_list_facts(report))
    page.section("Status of the units")
    page.add(*_unit_tables(report))
    if report.published:
        # pages of Parquet have checksums of their own
        opened = cache.open_cache(folder, verify=False)
        if opened.manifest.kind == "recordings":
            _add_recordings(page, opened, report)
            subjects = opened.subjects()
    if report.rules:
        page.section("Rules")
        caption = "Decisions of the reader of this data set where its files are ambiguous."
        rows = [[key.replace("_", " "), text] for key, text in sorted(report.rules.items())]
        page.table("rules", "Rules that were applied", caption, ["about", "rule"], rows)
    unit = registry.find_subject_unit(report.dataset, subjects)
    return rename_units(page.finish(_describe_ingest(report)), unit)


def _add_recordings(page: PageBuilder, opened: cache.Cache, report: IngestReport) -> None:
    """The first recording, quality of the channels, lengths and labels."""
    rows, subjects = opened.signals().to_dicts(), opened.subjects()
    channels, lengths = collect_channels(rows), measure_recordings(rows)
    n, n_subjects = subjects.height, subjects["subject_id"].n_unique()
    counted = f"{n:,} recording{'s' * (n != 1)} of {n_subjects:,} subject{'s' * (n_subjects != 1)}"
    page.fact("In the cache", f"{counted}, {format_duration(sum(lengths.values()))} in total")
    page.notice(*channel_warnings(channels))
    first = next(iter(opened.records(only=set(opened.recording_ids()[:1]))), None)
    if first is not None and first.signals:
        page.section("The first recording")
        page.add(*draw_recording(first, report))
    page.section("Quality of the channels")
    page.add(*quality_blocks(channels))
    content = [*duration_figures(lengths), *label_blocks(opened, report)]
    if content:
        page.section("Lengths and labels")
        page.add(*content)


# ---- status of the units


def _describe_ingest(report: IngestReport) -> str:
    """How many units were accepted and quarantined, in one sentence."""
    counts = report.counts
    seen, lost, warned = counts.units_seen, counts.quarantined, counts.accepted_with_warning
    if not report.published:
        reason = report.error.message if report.error else "see the reasons below"
        return f"Refused, nothing was published: {reason}"
    clauses = [f"All {seen:,} units were accepted"]
    if seen == 1:
        clauses = ["The only unit was accepted"]
    elif lost:
        clauses = [f"{seen - lost:,} of {seen:,} units were accepted"]
    if lost:
        clauses.append(f"{lost:,} {'was' if lost == 1 else 'were'} quarantined")
    if warned:
        clauses.append("with a warning" if seen == warned else f"{warned:,} with a warning")
    return f"{', '.join(clauses)}."


def _list_notices(report: IngestReport) -> list[str]:
    """What a reader must know before the data are used or shared."""
    options = report.options
    notices = {
        "Nothing of this ingest is in the cache; an earlier generation, if any, is unchanged.": (
            not report.published
        ),
        "The files were not compared with SHA256SUMS.txt (--no-verify).": (
            options.get("verify") is False
        ),
        "Files that differ from SHA256SUMS.txt were quarantined.": (
            report.source.sha256sums == "mismatch"
        ),
        "Header text that can identify persons was kept (--keep-phi): do not share this cache.": (
            options.get("keep_phi")
        ),
        "Start times were kept (--keep-dates): do not share this cache.": options.get("keep_dates"),
    }
    return [notice for notice, applies in notices.items() if applies]


def _list_facts(report: IngestReport) -> dict[str, str]:
    source, dataset = report.source, registry.datasets.get(report.dataset)
    facts = {"Data set": dataset.facts.title if dataset else report.dataset}
    if source.path is not None:
        facts["Source"] = f"{source.path}: {source.files:,} files, {format_size(source.bytes)}"
        words = {"absent": "none", "skipped": "not compared"}
        facts["SHA256SUMS.txt"] = words.get(source.sha256sums, source.sha256sums)
    options = [
        f"{name} {value}"
        for name, value in sorted(report.options.items())
        if value is not None and name not in SHOWN_OPTIONS
    ]
    if options:
        facts["Options"] = ", ".join(options)
    if report.generation is not None:
        content = (report.content_sha256 or "")[:16]
        facts["Generation of the cache"] = f"{report.generation}, content {content}"
    return facts | {"Version": f"bitimely {report.tool.version}"}


def _unit_tables(report: IngestReport) -> Iterator[Table]:
    """Units by status, reasons, quarantined units, rows of tables."""
    yield make_table(
        "units",
        "Units",
        "A unit is accepted or quarantined as one: a recording with its labels, a record, or a "
        "table.",
        ["status", "units"],
        [[name, getattr(report.counts, key)] for name, key in STATES.items()],
    )
    yield from _reason_tables(report)
    lost = [unit for unit in report.units if unit.status == "quarantined"]
    part = f"The first {MAX_UNITS} of {len(lost):,}. " if len(lost) > MAX_UNITS else ""
    rows = []
    for unit in lost[:MAX_UNITS]:
        errors = [reason.message for reason in unit.reasons if reason.level == "error"]
        rows.append([unit.unit, "; ".join(errors)])
    yield from make_tables(
        "quarantined",
        "Quarantined units",
        f"{part}Correct or replace the files and repeat the command: it reads only what has "
        "changed.",
        ["unit", "reason"],
        rows,
    )
    columns = ["file", "kind", "seen", "used", "dropped", "quarantined"]
    yield from make_tables(
        "rows",
        "Rows of tables",
        "Seen = used + dropped + quarantined. Dropped: left out by a documented rule. Quarantined: "
        "faulty.",
        [*columns, "reason"],
        [[*(getattr(row, column) for column in columns), _reason_text(row)] for row in report.rows],
    )


def _reason_tables(report: IngestReport) -> list[Table]:
    """Reasons of all units and of the data set by code, the worst and most frequent first."""
    pairs: list[tuple[str | None, FindingRecord]] = []
    for unit in report.units:
        pairs += [(unit.unit, reason) for reason in unit.reasons]
    pairs += [(None, reason) for reason in report.reasons]
    groups = group_by(pairs, lambda pair: (pair[1].level, pair[1].code))
    order = list(LEVELS)
    lines = []
    for (level, code), members in groups.items():
        units = {name for name, _ in members} - {None}
        count = sum(reason.count for _, reason in members)
        words, example = code.replace("_", " "), members[0][1].message
        line = [LEVELS[level], words, len(units) or None, count, example]
        lines.append(((order.index(level), -len(members), code), line))
    return make_tables(
        "reasons",
        "Reasons",
        "Each reason with its number of occurrences and its first message. Reasons without units "
        "concern the data set. ingest_report.json beside this page lists all of them.",
        ["status", "reason", "units", "occurrences", "example"],
        [line for _, line in sorted(lines, key=lambda pair: pair[0])],
    )


def _reason_text(row: TableReport) -> str:
    """Why rows of a table were left out or warned about, with their counts."""
    parts = (row.quarantined_by_reason, row.dropped_by_reason, row.warned_by_reason)
    counts = itertools.chain.from_iterable(sorted(part.items()) for part in parts)
    return ", ".join(f"{code.replace('_', ' ')} {count:,}" for code, count in counts)
