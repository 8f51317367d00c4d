"""`tokenize`: the windows of a view, with an audit of the split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from bitimely_core import registry
from bitimely_core.run import FORMAT
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import ensure_cache
from bitimely_core.workflows.train import Flags
from bitimely_core.workspace import locate_new, name_tokens, parse_view

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows


class SplitAudit(TypedDict):
    """Size of one split."""

    subjects: int
    windows: int
    classes: dict[str, int]


def tokenize(
    data: str,
    *,
    workspace: Path = Path("workspace"),
    name: str | None = None,
    options: Flags | None = None,
    verify: bool = True,
    force_new: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the tokens of `DATASET[/VIEW]` under `tokens/<name>`; returns folder, shape, notices, findings and the audit of the split.

    Raises UserError: unknown_name, settings_differ (2), incomplete (4), integrity (5).
    """
    from bitimely_core import tokens

    dataset, view = parse_view(data)
    if registry.datasets[dataset].facts.kind == "events":
        from bitimely_core.workflows.tokenize_claims import tokenize_claims

        return tokenize_claims(
            data, workspace=workspace, name=name, options=options, verify=verify, force_new=force_new, dry_run=dry_run, progress=progress
        )
    out = locate_new(workspace, "tokens", name if name is not None else name_tokens(data), "--name")
    source = workspace / "cache" / dataset if dry_run else ensure_cache(dataset, workspace, progress=progress)
    if dry_run:
        return {**tokens.plan(source, view=view, **(options or {})), "folder": str(out)}
    windows = tokens.build(source, view=view, out=out, verify=verify, force_new=force_new, progress=progress, **(options or {}))
    return {
        "format_version": FORMAT,
        "name": windows.name,
        "data": data,
        "folder": str(out),
        "windows": len(windows),
        "length": windows.length,
        "channels": windows.channels,
        "channel_names": list(windows.channel_names),
        "rate": windows.rate,
        "task": windows.task,
        "class_names": list(windows.class_names),
        "split": windows.split,
        "bandpass": windows.options.bandpass,
        "notch": windows.options.notch,
        "fingerprint": windows.fingerprint,
        "notices": windows.notices,
        "findings": [finding.model_dump() for finding in windows.manifest.findings],
        "audit": audit_splits(windows),
    }


def audit_splits(windows: Windows) -> dict[str, SplitAudit]:
    """Subjects, windows and windows a class in each split."""
    out: dict[str, SplitAudit] = {}
    for split in ("train", "validation", "test"):
        part = windows[split]
        target, classes = part.targets(None) if len(part) else None, [0] * windows.classes
        if target is not None and windows.task == "classification":
            classes = np.bincount(np.asarray(target, dtype=np.int64), minlength=windows.classes).tolist()
        elif target is not None and windows.task == "multilabel":
            classes = [int(n) for n in np.nansum(target, axis=0)]
        counts = dict(zip(windows.class_names, classes, strict=False)) if target is not None and windows.task != "regression" else {}
        out[split] = {"subjects": len(set(part.subjects())), "windows": len(part), "classes": counts}
    return out
