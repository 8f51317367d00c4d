"""`verify`: stored artefacts are compared with their checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from bitimely_core import storage
from bitimely_core.errors import Exit, Finding, Reason, UserError, clean, input_error, input_warning
from bitimely_core.run import FORMAT
from bitimely_core.schemas import RunRecord
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Progress

KINDS = (  # kind of a folder, and patterns of files that it holds; the first that fits
    ("run", ("run.json",)),
    ("checkpoint", ("meta.json", "model.safetensors")),
    ("model", ("config.json", "model.safetensors")),
    *(("tokens", (name,)) for name in ("statistics.json", "index.parquet")),
    *(("cache", (name,)) for name in ("manifest.json", "ingest_report.json", "recordings-*.parquet")),
    ("raw", ("SHA256SUMS.txt",)),
)


class CheckedFolder(TypedDict):
    """One artefact that was checked."""

    path: str
    kind: str
    files: int
    state: str  # good, incomplete or damaged


class VerifyResult(TypedDict):
    """Result of `verify`."""

    format_version: int
    checked: list[CheckedFolder]
    findings: list[Finding]
    exit_code: int  # 0 good, 4 incomplete, 5 damaged


def verify(path: Path, *, deep: bool = False, progress: Progress | None = None) -> VerifyResult:
    """Check a workspace, a cache, a token set, a run, a checkpoint, a model folder or a raw folder with SHA256SUMS.txt.

    Raises UserError (exit 4) where none of them is found.
    """
    path = Path(path)
    if path.is_file():
        raise input_error(
            Reason.CORRUPT,
            "a single file",
            "expected a folder made by bitimely, or a raw folder with SHA256SUMS.txt",
            "Models are folders of safetensors and JSON; other model files are never opened",
            file=str(path),
        )
    if not path.is_dir():
        raise input_error(Reason.NOT_FOUND, "no such folder", "expected a workspace, cache, tokens, run or model folder", file=str(path))
    artefacts = list(_list_artefacts(path))
    if not artefacts:
        raise input_error(
            Reason.NO_INPUT,
            "no artefact of bitimely here",
            "expected a workspace, cache, tokens, run, model or raw folder with SHA256SUMS.txt",
            file=str(path),
        )
    checked: list[CheckedFolder] = []
    findings: list[Finding] = []
    for done, (kind, folder) in enumerate(artefacts):
        if progress is not None:
            progress("verify", done, len(artefacts))
        problems, files = _check_folder(kind, folder, deep)
        findings += problems
        worst = [f for f in problems if f.level == "error"]
        state = "good" if not worst else "incomplete" if all(f.code == Reason.INCOMPLETE for f in worst) else "damaged"
        checked.append({"path": clean(str(folder), 400), "kind": kind, "files": files, "state": state})
    states = {c["state"] for c in checked}
    code = Exit.INTEGRITY if "damaged" in states else Exit.REFUSED if "incomplete" in states else Exit.OK
    if progress is not None:
        progress("verify", len(artefacts), len(artefacts))
    return {"format_version": FORMAT, "checked": checked, "findings": findings, "exit_code": int(code)}


def _list_artefacts(path: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of every artefact at `path`."""
    own = _detect_kind(path)
    inside = (("cache", "cache"), ("tokens", "tokens"), ("runs", "run"))
    found = [(own, path)] if own else [(kind, p) for name, kind in inside for p in sorted((path / name).glob("*")) if p.is_dir()]
    out = []
    for kind, folder in found:
        steps = sorted((folder / "checkpoints").glob("step-*")) if kind == "run" else []
        out += [(kind, folder), *(("checkpoint", step) for step in steps if not step.name.endswith(".tmp"))]
    return out


def _detect_kind(path: Path) -> str | None:
    return next((kind for kind, patterns in KINDS if all(any(path.glob(pattern)) for pattern in patterns)), None)


def _check_folder(kind: str, folder: Path, deep: bool) -> tuple[list[Finding], int]:
    try:
        if kind == "cache":
            from bitimely_core import cache

            return cache.verify(folder, deep=deep), len(storage.read_manifest(folder)["files"])
        if kind == "tokens":
            manifest = storage.read_manifest(folder)
            storage.check_files(folder, manifest)
            return [], len(manifest["files"])
        if kind == "checkpoint":
            from bitimely_core.training import checkpoints

            return [], len(checkpoints.verify_checkpoint(folder).files)
        if kind == "raw":
            return _check_raw(folder)
        return _check_run(folder) if kind == "run" else _check_model(folder, None)
    except UserError as error:
        raise_system_error(error)
        return [error.finding, *error.details], 0


def _check_run(folder: Path) -> tuple[list[Finding], int]:
    record = RunRecord.load(folder / "run.json")
    if not record.finished:
        hint = "Repeat the command that started it: it resumes where it stopped"
        return [Finding(Reason.INCOMPLETE, "the training has not ended", "expected a finished run", hint, file=str(folder))], 1
    is_export = (folder / "model.safetensors").is_file()
    return _check_model(folder if is_export else folder / "model", record.weights)


def _check_model(folder: Path, digest: str | None) -> tuple[list[Finding], int]:
    """A model folder: the weights against the hash in run.json (or in config.json), and the header of the safetensors file."""
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    if not path.is_file():
        return [Finding(Reason.INTEGRITY, "missing", "expected the weights", "Repeat the training", file=str(path))], 0
    try:
        config = json.loads((folder / "config.json").read_bytes())
        with safe_open(path, framework="numpy") as tensors:
            list(tensors.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise_system_error(error, path)
        return [Finding(Reason.INTEGRITY, f"not readable ({type(error).__name__})", "expected safetensors and JSON", file=str(path))], 2
    expected, actual = digest or config.get("sha256"), storage.hash_file(path)
    if expected is not None and actual != expected:
        problem, requirement = f"sha256 is {actual[:12]}", f"expected {expected[:12]}"
        return [Finding(Reason.INTEGRITY, problem, requirement, "Repeat the training", file=str(path))], 2
    return [], 2


def _check_raw(folder: Path) -> tuple[list[Finding], int]:
    """A raw folder with SHA256SUMS.txt: listed and different, listed and absent."""
    findings: list[Finding] = []
    absent = files = 0
    for line in (folder / "SHA256SUMS.txt").read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.strip().partition(" ")
        name = name.strip().lstrip("*")
        target = folder / name
        if not name or not target.resolve().is_relative_to(folder.resolve()):
            continue
        if not target.is_file():
            absent += 1
            continue
        files += 1
        if storage.hash_file(target) != digest.lower():
            problem, requirement = "differs from SHA256SUMS.txt", "expected the listed hash"
            findings.append(Finding(Reason.SOURCE_CHECKSUM, problem, requirement, "Download the file again", file=name))
    if absent:
        problem = f"{absent} listed files are not here"
        findings.append(input_warning(Reason.SOURCE_CHECKSUM, problem, "expected all", file="SHA256SUMS.txt", count=absent))
    return findings, files
