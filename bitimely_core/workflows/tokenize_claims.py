"""`tokenize` of claims: sequences and their page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import cache, storage
from bitimely_core.errors import usage_error
from bitimely_core.report.claims_page import claims_page, open_examples, shortcut_table
from bitimely_core.run import FORMAT
from bitimely_core.types import Progress
from bitimely_core.workspace import locate, locate_new, name_tokens, parse_view

if TYPE_CHECKING:
    from bitimely_core.tokens import EventSequences


def tokenize_claims(
    data: str,
    *,
    workspace: Path = Path("workspace"),
    name: str | None = None,
    options: dict[str, Any] | None = None,
    verify: bool = True,
    force_new: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Sequences of cached claims under `tokens/<name>`, with `report.html`; returns folder, counts, shortcut baselines and audit of the split.

    With `options["task"]`, a folder of MEDS labels (and `ids`): sequences up to its prediction times, of the codes of `tokens/<data>`.

    Raises UserError: settings_differ, config (2), incomplete, no_input (4), integrity (5).
    """
    from bitimely_core import report as pages
    from bitimely_core.claims import tokenize

    dataset, _ = parse_view(data)
    out = locate_new(workspace, "tokens", name if name is not None else name_tokens(data), "--name")
    opened = cache.open_cache(workspace / "cache" / dataset, verify=False)
    if "task" in (options or {}):
        return _tokenize_task(
            data, opened, workspace, out, options or {}, verify=verify, force_new=force_new, dry_run=dry_run, progress=progress
        )
    plan = tokenize.resolve_plan(opened, **(options or {}))
    if dry_run:
        return {"folder": str(out), "options": plan.options, "subjects": opened.cohort().height}
    tokenize.write_sequences(plan, out, verify=verify, force_new=force_new, progress=progress)
    sequences = open_examples(out)
    statistics = sequences.code_statistics
    storage.write_bytes(out / "report.html", pages.render_html(claims_page(sequences), alone=True).encode())
    if plan.manifest.clock == "calendar":
        from bitimely_core.claims import meds_export
        from bitimely_core.tokens.sequences import open_sequences

        meds_export.write_meds(out / "meds", opened, open_sequences(out, verify=False))
    return {
        **_summarize(data, sequences),
        "honesty": shortcut_table(statistics),
        "selected": statistics.selected,
        "report": str(out / "report.html"),
    }


def _summarize(data: str, sequences: EventSequences) -> dict[str, Any]:
    """Summary of a build of sequences, of which only some shards may be open."""
    from bitimely_core.tokens.sequences import count_splits

    audit = count_splits(sequences.folder)
    return {
        "format_version": FORMAT,
        "name": sequences.name,
        "data": data,
        "folder": str(sequences.folder),
        "windows": sum(split["windows"] for split in audit.values()),
        "events": sequences.manifest.events,
        "codes": sequences.codes - 5,
        "task": sequences.task,
        "class_names": list(sequences.class_names),
        "split": sequences.split,
        "fingerprint": sequences.fingerprint,
        "notices": sequences.notices,
        "findings": [finding.model_dump() for finding in sequences.manifest.findings],
        "audit": audit,
    }


def _tokenize_task(
    data: str,
    opened: cache.Cache,
    workspace: Path,
    out: Path,
    options: dict[str, Any],
    *,
    verify: bool,
    force_new: bool,
    dry_run: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """Sequences up to the prediction times of a MEDS label folder. Raises UserError (config, exit 2) for other options or no name."""
    from bitimely_core.claims import tasks
    from bitimely_core.tokens import open_tokens

    base = locate(workspace, "tokens", name_tokens(data))
    problem = next((f"--{key.replace('_', '-')}" for key in options if key not in {"task", "ids"}), "" if out != base else "no --name")
    if problem:
        expected = f"expected only --name: the choices are those of {base.name}"
        raise usage_error(problem, expected, "Give --task with another --name", field="--task")
    if dry_run:
        return {"folder": str(out), "base": str(base), "rows": tasks.read_task_labels(options["task"]).height}
    codes = open_tokens(base, verify=verify)
    sequences = tasks.build_task_sequences(
        opened, codes, options["task"], out, ids=options.get("ids"), verify=verify, force_new=force_new, progress=progress
    )
    return {**_summarize(data, sequences), "honesty": []}
