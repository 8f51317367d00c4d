"""The verb `verify`: stored artefacts are compared with their checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from bitimely_core.errors import (
    HINTS,
    Exit,
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    select_errors,
)
from bitimely_core.formats.source import CHECKSUM_FILE, parse_checksums, scan_folder
from bitimely_core.progress import report_progress
from bitimely_core.run import FORMAT
from bitimely_core.schemas.reports import StageRecord, Summary
from bitimely_core.schemas.runs import RunRecord, TrialRecord
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import (
    BESIDE,
    ResultManifest,
    StoredRecord,
    describe_missing_manifest,
    find_changes,
    has_result,
    list_results,
)
from bitimely_core.system_errors import raise_system_error

RECORDS: dict[str, type[StoredRecord]] = {
    "run": RunRecord,
    "export": RunRecord,
    "report": Summary,
    "trial": TrialRecord,
    "stage": StageRecord,
}
KINDS = {  # of a folder that has these files, the first that fits
    "export": {"run.json", "model.safetensors"},
    "run": {"run.json"},
    "checkpoint": {"meta.json"},
    "model": {"config.json", "model.safetensors"},
    "tokens": {"statistics.json"},
    "report": {"summary.json"},
    "trial": {"trial.json"},
    "stage": {"stage.json"},
}
NAMES = {
    "run": "run.json",
    "export": "run.json",
    "report": "summary.json",
    "trial": "trial.json",
    "stage": "stage.json",
}


# of a workspace -> the kind of what is inside, where that is one
FOLDERS = {
    "cache": "cache",
    "tokens": "tokens",
    "runs": "run",
    "reports": None,
    "exports": None,
    "pipelines": None,
}
# of a folder -> exit code
STATES = {"good": Exit.OK, "incomplete": Exit.REFUSED, "damaged": Exit.INTEGRITY}


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


def verify(
    path: Path | None = None, *, workspace: Path = Path("workspace"), deep: bool = False
) -> VerifyResult:
    """Check a workspace, a cache, a token set, a run, a checkpoint, a model folder or a raw folder
    with SHA256SUMS.txt; `path` None: `workspace`.

    Raises UserError (exit 4) where none of them is found.
    """
    artefacts = _require_artefacts(Path(path or workspace))
    checked: list[CheckedFolder] = []
    findings: list[Finding] = []
    for done, (kind, folder) in enumerate(artefacts):
        report_progress("verify", done, len(artefacts))
        problems, files = _check_folder(kind, folder, deep)
        findings += problems
        name, state = clean(str(folder), 400), _judge_folder(problems)
        checked.append({"path": name, "kind": kind, "files": files, "state": state})
    report_progress("verify", len(artefacts), len(artefacts))
    return {
        "format_version": FORMAT,
        "checked": checked,
        "findings": findings,
        "exit_code": max(int(STATES[folder["state"]]) for folder in checked),
    }


def _judge_folder(problems: list[Finding]) -> str:
    """The state of a folder with these problems."""
    codes = {problem.code for problem in select_errors(problems)}
    if not codes:
        return "good"
    return "incomplete" if codes == {Reason.INCOMPLETE} else "damaged"


def _require_artefacts(path: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of every artefact at `path`. Raises UserError (exit 4) where there is none."""
    if path.is_file():
        raise input_error(
            Reason.CORRUPT,
            "a single file",
            "expected a folder made by bitimely, or a raw folder with SHA256SUMS.txt",
            "Models are folders of safetensors and JSON; other model files are never opened",
            file=str(path),
        )
    if not path.is_dir():
        raise input_error(
            Reason.NOT_FOUND,
            "no such folder",
            "expected a workspace, cache, tokens, run or model folder",
            file=str(path),
        )
    artefacts = _list_artefacts(path)
    if not artefacts:
        raise input_error(
            Reason.NO_INPUT,
            "no artefact of bitimely here",
            "expected a workspace, cache, tokens, run, model or raw folder with SHA256SUMS.txt",
            file=str(path),
        )
    return artefacts


def _list_artefacts(path: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of every artefact at `path`."""
    artefacts = [("key", path / "id.key")] if (path / "id.key.sha256").exists() else []
    if _detect_kind(path) is not None:
        return [*artefacts, *_walk_artefacts(path)]
    for name, kind in FOLDERS.items():
        for folder in sorted((path / name).glob("*")):
            if not folder.is_dir() or storage.is_temporary(folder.name):
                continue
            if kind in {"cache", "tokens"}:
                artefacts.append((kind, folder))
            else:
                artefacts += _walk_artefacts(folder, kind)
    return artefacts


def _walk_artefacts(folder: Path, kind: str | None = None) -> Iterator[tuple[str, Path]]:
    """(kind, folder) of `folder`, of the given kind if it is none by its files, and of the folders
    inside.
    """
    kind = _detect_kind(folder) or kind
    if kind is not None:
        yield kind, folder
    if kind in {None, "run", "report", "results"}:
        for inner in sorted(folder.iterdir()):
            is_temporary = inner.name.endswith(".tmp") or storage.is_temporary(inner.name)
            if inner.is_dir() and not inner.is_symlink() and not is_temporary:
                yield from _walk_artefacts(inner)


def _detect_kind(path: Path) -> str | None:
    try:
        manifest = ResultManifest.find(path)
    except UserError as error:  # damaged, which the check of the folder finds
        raise_system_error(error, path)
        manifest = None
    if manifest is None or manifest.beside:
        names = {inner.name for inner in path.iterdir()}
        return _match_kind(names) or _detect_store(path)
    return _match_kind(set(manifest.files)) or "results"


def _match_kind(names: set[str]) -> str | None:
    return next((kind for kind, needed in KINDS.items() if needed <= names), None)


def _detect_store(path: Path) -> str | None:
    """The kind of a folder that is no result: tokens, a cache, raw files with checksums."""
    if (path / "index.parquet").is_file():
        return "tokens"
    is_written = any((path / name).is_file() for name in ("manifest.json", "ingest_report.json"))
    if is_written or any(path.glob("recordings-*.parquet")):
        return "cache"
    return "raw" if (path / CHECKSUM_FILE).is_file() else None


def _check_folder(kind: str, folder: Path, deep: bool) -> tuple[list[Finding], int]:
    try:
        if kind == "cache":
            from bitimely_core import cache

            return [*cache.verify(folder, deep=deep), *_check_beside(folder)], len(
                manifests.read_manifest(folder)["files"]
            )
        if kind == "tokens":
            manifest = manifests.read_manifest(folder)
            return [*manifests.find_damage(folder, manifest), *_check_beside(folder)], len(
                manifest["files"]
            )
        if kind == "key":
            fault = storage.find_secret_damage(folder)
            return [fault] if fault else [], 1
        if kind == "checkpoint":
            return _check_checkpoint(folder)
        if kind == "raw":
            return _check_raw(folder)
        return _check_results(kind, folder)
    except UserError as error:
        raise_system_error(error)
        return [error.finding, *error.details], 0


def _check_beside(folder: Path) -> list[Finding]:
    """Report and page of a cache or token set."""
    from bitimely_core.cache.ingest_run import PAGE, REPORT

    if (folder / BESIDE).is_file():
        return find_changes(folder)
    names = [name for name in (REPORT, PAGE) if (folder / name).is_file()]
    if not names:
        return []
    requirement = f"expected the checksums of {' and '.join(names)}"
    return [
        _make_finding(
            Reason.INTEGRITY, folder / BESIDE, "is missing", requirement, HINTS[Reason.INTEGRITY]
        )
    ]


def _check_checkpoint(folder: Path) -> tuple[list[Finding], int]:
    from bitimely_core.train import checkpoints

    files = checkpoints.verify_checkpoint(folder).files
    foreign = sorted(
        path.name for path in folder.iterdir() if path.name not in {"meta.json", *files}
    )
    hint = "Remove it"
    return [
        _make_finding(
            Reason.INTEGRITY, folder / name, "is not in meta.json", "expected its files alone", hint
        )
        for name in foreign
    ], len(files)


def _check_results(kind: str, folder: Path) -> tuple[list[Finding], int]:
    """A folder of results against its manifest, and the content of its record."""
    manifest = ResultManifest.find(folder)
    if manifest is None and not any(list_results(folder)):
        hint = "Repeat the command that started it"
        return [
            _make_finding(
                Reason.INCOMPLETE, folder, "nothing is stored yet", "expected a result", hint
            )
        ], 0
    if manifest is None:
        return [describe_missing_manifest(folder)], 0
    findings = find_changes(folder)
    if select_errors(findings):
        return findings, len(findings)
    record: StoredRecord | None = (
        RECORDS[kind].load(folder / NAMES[kind]) if kind in RECORDS else None
    )
    if isinstance(record, RunRecord):
        findings += _check_run(folder, record)
    elif kind == "model":
        findings += _check_model(folder, None)
    return findings, len(manifest.files)


def _check_run(folder: Path, record: RunRecord) -> list[Finding]:
    hint = "Repeat the command that started it: it resumes where it stopped"
    if record.members is not None and record.finished:
        return [
            _make_finding(
                Reason.INCOMPLETE, folder.parent / name, "is gone", "expected a run", hint
            )
            for name in record.members.runs
            if not has_result(folder.parent / name / "run.json")
        ]
    if record.finished:
        weights = folder if has_result(folder / "model.safetensors") else folder / "model"
        return _check_model(weights, record.weights)
    from bitimely_core.train import checkpoints, metrics_log

    newest = checkpoints.load_latest_checkpoint(folder)
    if newest is not None and newest.meta.log is not None:
        metrics_log.require_log(folder / "metrics.jsonl", newest.meta.log)
    return [
        _make_finding(
            Reason.INCOMPLETE, folder, "the training has not ended", "expected a finished run", hint
        )
    ]


def _check_model(folder: Path, digest: str | None) -> list[Finding]:
    """A model folder: the header of the safetensors file, and the hash in its manifest against that
    in run.json, `digest`.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    if not path.is_file():
        return [
            _make_finding(
                Reason.INTEGRITY, path, "missing", "expected the weights", "Repeat the training"
            )
        ]
    try:
        storage.decode_json((folder / "config.json").read_bytes())
        with safe_open(path, framework="numpy") as tensors:
            list(tensors.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise_system_error(error, path)
        return [
            _make_finding(
                Reason.INTEGRITY,
                path,
                f"not readable ({type(error).__name__})",
                "expected safetensors and JSON",
            )
        ]
    manifest = ResultManifest.find(folder)
    if manifest is None:
        return [describe_missing_manifest(folder)]
    if digest is not None and (actual := manifest.files[path.name].sha256) != digest:
        return [
            _make_finding(
                Reason.INTEGRITY,
                path,
                f"sha256 is {actual[:12]}",
                f"expected {digest[:12]}",
                "Repeat the training",
            )
        ]
    return []


def _make_finding(
    code: Reason, path: Path, problem: str, requirement: str, hint: str = ""
) -> Finding:
    return Finding(code=code, file=str(path), problem=problem, requirement=requirement, hint=hint)


def _check_raw(folder: Path) -> tuple[list[Finding], int]:
    """A raw folder with SHA256SUMS.txt: files that differ, that cannot be read, that are listed or
    here alone; how many were compared.
    """
    from bitimely_core.cache.unit_groups import describe_mismatch

    source = scan_folder(folder)
    try:
        listed = parse_checksums(source.path(CHECKSUM_FILE).read_text("utf-8", errors="replace"))
    except OSError as error:
        return [_describe_unreadable(error, folder, CHECKSUM_FILE)], 0
    findings: list[Finding] = []
    for name, wanted in listed.files.items():
        if name in source.rejected:
            findings.append(source.rejected[name])
        elif name in source.files:
            try:
                digest = storage.hash_file(folder / name)
            except OSError as error:
                findings.append(_describe_unreadable(error, folder, name))
                continue
            if digest != wanted:
                findings.append(describe_mismatch(name, digest, wanted))
    return [*findings, *listed.compare(source)], len(listed.files.keys() & source.files.keys())


def _describe_unreadable(error: OSError, folder: Path, name: str) -> Finding:
    raise_system_error(error, folder / name, stored=False)
    problem = f"cannot be read ({error.strerror or type(error).__name__})"
    return Finding(
        Reason.IO_ERROR,
        problem,
        "expected a file to compare",
        "Check its permissions and its disk",
        file=name,
    )
