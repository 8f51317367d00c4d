"""The ingest report: what became of every unit and row, and the verdict. Schema `bitimely.ingest_report/1`.

No clock, host or duration in it: the same input, options and versions give the same bytes.
"""

from __future__ import annotations

import functools
import platform
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from bitimely_core import __version__
from bitimely_core.errors import Exit, Finding, Level, Reason, UserError, input_error
from bitimely_core.types import IngestUnit, SourceRows

SCHEMA = "bitimely.ingest_report/1"
MAX_LISTED = 100_000  # units; beyond, plain accepted ones are left out of the list
STATUS = {
    Exit.OK: "published",
    Exit.PARTIAL: "partial",
    Exit.REFUSED: "refused",
    Exit.INTERRUPTED: "interrupted",
    Exit.TERMINATED: "interrupted",
}


def unit_to_json(
    unit: IngestUnit, reasons: Iterable[Finding], *, content: str | None = None, samples: int | None = None, channels: int | None = None
) -> dict[str, Any]:
    """The report's object of one unit; quarantined when there is no content. Findings without a file get the first of the unit."""
    file = unit.files[0] if unit.files else unit.name
    named = [finding.at(file) for finding in reasons]
    loud = any(finding.level != "info" for finding in named)
    if content is None and not loud:
        named.append(Finding(code=Reason.INTERNAL, problem="cannot be read, and the reader gives no reason", file=file))
    status = "quarantined" if content is None else "accepted_with_warning" if loud else "accepted"
    return {
        "unit": unit.name,
        "files": list(unit.files),
        "status": status,
        "reasons": [finding.as_dict() for finding in named],
        "content_sha256": content,
        "samples": samples,
        "channels": channels,
    }


def rows_to_json(rows: SourceRows) -> dict[str, Any]:
    """The report's object of one table."""
    dropped, quarantined = sum(rows.dropped.values()), sum(rows.quarantined.values())
    return {
        "file": rows.file,
        "kind": rows.kind,
        "seen": rows.seen,
        "used": rows.seen - dropped - quarantined,
        "dropped": dropped,
        "quarantined": quarantined,
        "dropped_by_reason": dict(rows.dropped),
        "quarantined_by_reason": dict(rows.quarantined),
        "warned_by_reason": dict(rows.warned),
    }


def build_report(
    dataset: str,
    source: dict[str, Any],
    units: list[dict[str, Any]],
    *,
    rows: list[dict[str, Any]],
    reasons: list[Finding],
    options: dict[str, Any],
    rules: dict[str, str],
) -> dict[str, Any]:
    """The report of an run, before its verdict: nothing published, no error.

    Args:
        dataset: name as on the command line.
        source: path, kind, files, bytes, sha256, sha256sums.
        units: objects of `unit_object`.
        rows: objects of `rows_object`.
        reasons: of the data set as a whole.
        options: as resolved.
        rules: the documented rules that were applied.
    """
    units = sorted(units, key=lambda unit: unit["unit"])
    status = Counter(unit["status"] for unit in units)
    whole = [finding.as_dict() for finding in reasons]
    few = len(units) <= MAX_LISTED
    return {
        "schema": SCHEMA,
        "format_version": 1,
        "dataset": dataset,
        "source": source,
        "status": "refused",
        "exit_code": int(Exit.REFUSED),
        "published": False,
        "generation": None,
        "manifest_sha256": None,
        "content_sha256": None,
        "units": units if few else [unit for unit in units if unit["status"] != "accepted"],
        "units_listed": "all" if few else "not_accepted",
        "counts": {"units_seen": len(units), **{key: status[key] for key in ("accepted", "accepted_with_warning", "quarantined")}},
        "rows": rows,
        "reasons": whole,
        "reason_counts": _count_reasons(units, rows, whole),
        "options": options,
        "rules": rules,
        "tool": {"version": __version__, "python": platform.python_version(), "libraries": dict(_find_library_versions())},
        "error": None,
    }


def _count_reasons(units: list[dict[str, Any]], rows: list[dict[str, Any]], reasons: list[dict[str, Any]]) -> dict[str, int]:
    """Reason code -> occurrences. Rows whose code is also a reason of their file are counted there."""
    counts: Counter[str] = Counter()
    said = set()
    for reason in [*(reason for unit in units for reason in unit["reasons"]), *reasons]:
        counts[reason["code"]] += reason["count"]
        said.add((reason["file"], reason["code"]))
    for table in rows:
        for kind in ("dropped_by_reason", "quarantined_by_reason", "warned_by_reason"):
            for code, count in table[kind].items():
                if (table["file"], code) not in said:
                    counts[code] += count
    return dict(sorted(counts.items()))


@functools.cache
def _find_library_versions() -> dict[str, str]:
    """Versions of what reads and writes."""
    found = {}
    for name in ("numpy", "pyarrow", "polars", "wfdb"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # an extra that this machine does without
            found[name] = "absent"
    return found


def find_refusal(report: dict[str, Any], *, strict: bool, max_bad: float) -> UserError | None:
    """Why nothing may be published (exit 4): nothing left, too much quarantined, or anything quarantined under `strict`."""
    counts = report["counts"]
    seen, bad = counts["units_seen"], counts["quarantined"]
    if not seen:
        wanted = f"expected files of {report['dataset']}"
        return input_error(Reason.NO_INPUT, "nothing was recognised in it", wanted, "Check the folder")
    faults = [(bad, seen, "units", _find_most_common_fault(report["units"]), None)]
    for table in report["rows"]:
        by_reason = table["quarantined_by_reason"]
        code = Reason(max(by_reason, key=lambda reason: (by_reason[reason], reason))) if by_reason else Reason.NO_INPUT
        faults.append((table["quarantined"], table["seen"], "rows", code, table["file"]))
    for faulty, total, what, code, file in faults:
        limit = (
            "nothing is left"
            if what == "units" and faulty == total
            else "none may be under --strict"
            if strict and faulty
            else f"more than --max-bad {max_bad:g}"
            if faulty > max_bad * total
            else None
        )
        if limit:
            text = f"{faulty} of {total} {what} are quarantined"
            return input_error(code, text, limit, "Mend or remove what is named above", file=file)
    return None


def _find_most_common_fault(units: list[dict[str, Any]]) -> Reason:
    """The commonest first fault of the quarantined units."""
    counts: Counter[str] = Counter()
    for unit in units:
        if unit["status"] == "quarantined":
            counts[next(reason["code"] for reason in unit["reasons"] if reason["level"] != "info")] += 1
    return Reason(max(counts, key=lambda code: (counts[code], code))) if counts else Reason.NO_INPUT


def derive_exit_code(report: dict[str, Any]) -> Exit:
    """The exit code of a report that is published: partial when a unit or a row was quarantined."""
    lost = report["counts"]["quarantined"] or any(table["quarantined"] for table in report["rows"])
    return Exit.PARTIAL if lost else Exit.OK


def finish_report(report: dict[str, Any], code: int, error: UserError | None = None) -> dict[str, Any]:
    """The report with its verdict: status, exit code, published, error."""
    return report | {
        "status": STATUS.get(Exit(code), "failed"),
        "exit_code": int(code),
        "published": code in {Exit.OK, Exit.PARTIAL},
        "error": None if error is None else {"code": str(error.code), "message": str(error)},
    }


def list_findings(report: dict[str, Any]) -> list[Finding]:
    """Everything in a report that is worth a line on the screen (levels warning and error), units first; `line()` of each is that line."""
    reasons = [*(reason for unit in report["units"] for reason in unit["reasons"]), *report["reasons"]]
    return [
        Finding(code=Reason(reason["code"]), level=cast("Level", reason["level"]), problem=reason["message"], count=reason["count"])
        for reason in reasons
        if reason["level"] != "info"
    ]
