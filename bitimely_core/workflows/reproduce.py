"""`reproduce`: a run once more from its record, or what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core.config import DataConfig
from bitimely_core.errors import usage_error
from bitimely_core.run import FORMAT, list_versions, read_run
from bitimely_core.types import Progress
from bitimely_core.workflows.export import DATA
from bitimely_core.workflows.prepare import prepare_windows
from bitimely_core.workflows.train import finetune, pretrain, require_finished
from bitimely_core.workspace import run_folder

LOSS = 1e-6  # relative difference of the last loss that counts as the same on another machine


def reproduce(
    run: str | Path,
    *,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    force_new: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a run again from its run.json, under `<run>-again`, and compare: weights bit for bit, last loss to rounding.

    Returns:
        `differences` (what is not as it was: data, versions, source weights), `same_weights`, `same_loss`, `loss` of both, `reproduced`.

    Raises:
        UserError: incomplete (exit 4), and those of the training.
    """
    folder = run_folder(run, workspace)
    body = read_run(folder)
    require_finished(folder, body)
    name = f"{body['run']}-again"
    differences = _list_differences(body, workspace, verify)
    told: dict[str, Any] = {"format_version": FORMAT, "run": body["run"], "again": name, "differences": differences}
    if dry_run:
        return told
    sections = {key: body["settings"][key] for key in ("model", "objective", "data", "train")}
    if body["kind"] == "pretrain":
        sections["model"] = {key: value for key, value in sections["model"].items() if key not in DATA}
        done = pretrain(
            preset=body["preset"],
            flags=sections,
            init=_initial_run(body),
            run=name,
            workspace=workspace,
            verify=verify,
            force_new=force_new,
            progress=progress,
        )
    else:
        del sections["model"]
        flags = {**sections, "finetune": body["settings"]["finetune"]}
        source, data = body["source"]["run"], body["data"][0]["name"]
        done = finetune(
            source, data=data, flags=flags, run=name, workspace=workspace, verify=verify, force_new=force_new, progress=progress
        )
    again = read_run(Path(done["folder"]))
    losses = [body["final"]["loss"], again["final"]["loss"]]
    near = None not in losses and abs(losses[0] - losses[1]) <= LOSS * max(abs(losses[0]), 1e-12)
    same = body["weights"] == again["weights"]
    return {**told, "loss": losses, "same_loss": losses[0] == losses[1] or near, "same_weights": same, "reproduced": same or near}


def _initial_run(body: dict[str, Any]) -> str | None:
    """What `--init` was, as far as the run says it. Raises UserError (config, exit 2) where it was a folder elsewhere."""
    origin = body.get("init_from") or {}
    if body["init"] and not origin:
        text = "the run started from the weights of a folder, and does not say which"
        raise usage_error(text, hint="Train it again with --init", file=str(body["run"]))
    return origin.get("run") or (f"{origin['repo']}@{origin['revision']}" if origin else None)


def _list_differences(body: dict[str, Any], workspace: Path, verify: bool) -> list[str]:
    """What is not as it was when the run was trained."""
    found = []
    for name, version in list_versions().items():
        before = body["versions"].get(name)
        if before != version:
            found.append(f"{name} {version}, it was {before}")
    for data in body["data"]:
        windows = prepare_windows(data["name"], workspace, DataConfig(), verify=verify)
        if windows.fingerprint != data["fingerprint"]:
            found.append(f"{data['name']} has the fingerprint {windows.fingerprint[:16]}, it was {data['fingerprint'][:16]}")
    return found
