"""The verbs export and reproduce: a run for others, and the same numbers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core import settings, store
from bitimely_core.batch import Progress
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.runs import folders, hub
from bitimely_core.runs.training import finetune, finished, pretrain

PARTS = ("run.json", "model_card.md", "scores.json")
DATA = ("channels", "length", "codes", "others")  # of the model: what the data decide
LOSS = 1e-6  # relative difference of the last loss that counts as the same on another machine


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
    folder = folders.run_folder(run, workspace)
    body = folders.read(folder)
    finished(folder, body)
    target = out or workspace / "exports" / str(body["run"])
    weights = folders.weights(folder, body)
    files = {"config.json": weights / "config.json", "model.safetensors": weights / "model.safetensors"}
    files |= {name: folder / name for name in PARTS if (folder / name).is_file()}
    told = {"format_version": folders.FORMAT, "run": body["run"], "out": str(target), "files": sorted(files)}
    if dry_run:
        return {**told, "pushed": push}
    if push is not None:
        hub.library("--push")
    if target.is_dir() and (foreign := {path.name for path in target.iterdir()} - set(files)):
        text = f"holds {len(foreign)} other files"
        raise UserError(Reason.CONFIG, text, wanted="expected an empty folder", file=str(target), field="--out", exit_code=Exit.USAGE)
    store.make_folder(target)
    hashes = {name: store.write_bytes(target / name, path.read_bytes())[0] for name, path in files.items()}
    revision = None if push is None else hub.push(target, push, sorted(files))
    return {**told, "sha256": hashes, "pushed": push, "revision": revision}


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
    folder = folders.run_folder(run, workspace)
    body = folders.read(folder)
    finished(folder, body)
    name = f"{body['run']}-again"
    differences = _differences(body, workspace, verify)
    told: dict[str, Any] = {"format_version": folders.FORMAT, "run": body["run"], "again": name, "differences": differences}
    if dry_run:
        return told
    sections = {key: body["settings"][key] for key in ("model", "objective", "data", "train")}
    if body["kind"] == "pretrain":
        sections["model"] = {key: value for key, value in sections["model"].items() if key not in DATA}
        done = pretrain(
            preset=body["preset"],
            flags=sections,
            init=_begun(body),
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
    again = folders.read(Path(done["folder"]))
    losses = [body["final"]["loss"], again["final"]["loss"]]
    near = None not in losses and abs(losses[0] - losses[1]) <= LOSS * max(abs(losses[0]), 1e-12)
    same = body["weights"] == again["weights"]
    return {**told, "loss": losses, "same_loss": losses[0] == losses[1] or near, "same_weights": same, "reproduced": same or near}


def _begun(body: dict[str, Any]) -> str | None:
    """What `--init` was, as far as the run says it. Raises UserError (config, exit 2) where it was a folder elsewhere."""
    origin = body.get("init_from") or {}
    if body["init"] and not origin:
        text = "the run started from the weights of a folder, and does not say which"
        raise UserError(Reason.CONFIG, text, action="Train it again with --init", file=str(body["run"]), exit_code=Exit.USAGE)
    return origin.get("run") or (f"{origin['repo']}@{origin['revision']}" if origin else None)


def _differences(body: dict[str, Any], workspace: Path, verify: bool) -> list[str]:
    """What is not as it was when the run was trained."""
    found = []
    for name, version in folders.versions().items():
        before = body["versions"].get(name)
        if before != version:
            found.append(f"{name} {version}, it was {before}")
    for data in body["data"]:
        windows = folders.windows_for(data["name"], workspace, settings.DataConfig(), verify=verify)
        if windows.fingerprint != data["fingerprint"]:
            found.append(f"{data['name']} has the fingerprint {windows.fingerprint[:16]}, it was {data['fingerprint'][:16]}")
    return found
