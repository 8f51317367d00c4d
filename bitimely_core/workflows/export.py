"""The verbs export and reproduce: a run for others, and the same numbers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core import storage
from bitimely_core.errors import usage_error
from bitimely_core.run import FORMAT, Run
from bitimely_core.workflows import hub

PARTS = ("run.json", "model_card.md", "scores.json")


def export(
    run: str | Path, *, out: Path | None = None, push: str | None = None, workspace: Path = Path("workspace"), dry_run: bool = False
) -> dict[str, Any]:
    """Weights, configuration, card, settings and scores of a finished run in one folder that `--init` and `models.load` read.

    No cache, no tokens, no predictions, no subject: nothing in it is about a person.

    Args:
        run: name or folder.
        out: the folder, `export-<run>` beside the workspace's runs when not given; must not exist with something else in it.
        push: `OWNER/NAME` of a model hub (extra `hub`): the folder is uploaded, to a repository that is made private where there is none.
        workspace: where runs lie.
        dry_run: say what would be written.

    Raises:
        UserError: incomplete (exit 4), config (2): the folder holds something, or the extra is missing; not_found (4): no way to the hub.
    """
    opened = Run.open(run, workspace).require_finished()
    target = out or workspace / "exports" / opened.name
    weights = opened.verified_weights()
    files = {"config.json": weights / "config.json", "model.safetensors": weights / "model.safetensors"}
    files |= {name: opened.folder / name for name in PARTS if (opened.folder / name).is_file()}
    result = {"format_version": FORMAT, "run": opened.name, "out": str(target), "files": sorted(files)}
    if dry_run:
        return {**result, "pushed": push}
    if push is not None:
        hub.library("--push")
    if target.is_dir() and (foreign := {path.name for path in target.iterdir()} - set(files)):
        text = f"holds {len(foreign)} other files"
        raise usage_error(text, "expected an empty folder", file=str(target), field="--out")
    storage.make_folder(target)
    hashes = {name: storage.write_bytes(target / name, path.read_bytes())[0] for name, path in files.items()}
    revision = None if push is None else hub.push(target, push, sorted(files))
    return {**result, "sha256": hashes, "pushed": push, "revision": revision}
