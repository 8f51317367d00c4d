"""`ingest` of claims: the cache, then the sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitimely_core import cache, storage
from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.workflows.tokenize_claims import tokenize_claims


def ingest_claims(
    dataset: str,
    source: str | Path | None,
    out: str | Path,
    *,
    build: dict[str, Any] | None = None,
    name: str | None = None,
    notice: Callable[[Finding], object] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """`cache.ingest` of claims, then their sequences; warnings of the build are added to the ingest report.

    Args:
        dataset: pophr or synthetic-claims.
        source: raw folder.
        out: folder of the cache, `<workspace>/cache/<dataset>`.
        build: choices of the sequences (`claims.tokenize.resolve_plan`); `split_file` has the ids of the source and is an option of the cache.
        name: of the sequences.
        notice: called with a warning where the sequences could not be made, but the cache is complete.
        **given: the other arguments of `cache.ingest`.

    Raises:
        UserError: those of `cache.ingest`, and exit 2 for choices that do not fit.
    """
    from bitimely_core.claims import steps

    build = dict(build or {})
    if "split_file" in build:
        given["options"] = {**(given.get("options") or {}), "split_file": build.pop("split_file")}
    if (preset := build.get("preset")) and preset not in steps.PRESETS:
        from bitimely_core.registry import unknown

        raise unknown("preset", preset, list(steps.PRESETS))
    folder = Path(out)
    report = cache.ingest(dataset, source, folder, **given)
    if not report.get("published"):
        return report
    workspace = folder.parent.parent
    try:
        built = tokenize_claims(dataset, workspace=workspace, name=name, options=build, force_new=True, progress=given.get("progress"))
        found = built["findings"]
        report["tokens"] = {key: built[key] for key in ("folder", "windows", "events", "codes", "honesty", "selected")}
    except UserError as error:
        if error.exit_code != Exit.REFUSED:
            raise
        found = [Finding(Reason.MIN_CODES, error.problem, error.requirement, error.hint, level="warning").as_dict()]
        if notice is not None:
            notice(error.finding)
    report["reasons"] = [*report["reasons"], *found]
    counts = Counter(report["reason_counts"])
    counts.update({reason["code"]: reason["count"] for reason in found})
    report["reason_counts"] = dict(sorted(counts.items()))
    storage.write_json(folder / "ingest_report.json", report)
    return report
