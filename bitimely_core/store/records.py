"""Stored records, and folders of results whose `manifest.json` guards every file in them.

A folder of results (a run, a report, a model, an export) has a `ResultManifest` of all its files
with SHA-256 and size; a folder inside with a manifest of its own guards itself. `write_results`
changes such a folder in one step: new content is written beside the old under the name
`<name>.new-<16 digits of its SHA-256>`, then the manifest is replaced, then the names are changed.
The manifest alone decides: a kill before its replacement leaves the former state, a kill after it
the new one, since readers take the file under either name and the next writer completes the
renames. `read_result` and `check_result` compare a file with the manifest before it is used. In a
cache or token set, whose `manifest.json` names the data, the `ResultManifest` of the report and
page beside them is `results.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitimely_core.errors import (
    HINTS,
    Finding,
    Reason,
    input_error,
    input_warning,
    integrity_error,
    safe_text,
    usage_error,
)
from bitimely_core.store import locks, manifests, storage
from bitimely_core.system_errors import RETRY_HINT, raise_system_error, translate_system_errors
from bitimely_core.types import leave_out

if TYPE_CHECKING:
    import polars as pl

FORMAT = 1  # `format_version` of every stored record
BESIDE = "results.json"
WAIT = 60.0  # seconds for another command that writes results into the same folder
STAGED_NAME = re.compile(r"(.+)\.new-([0-9a-f]{16})")
# what an unfinished training may have beyond its manifest
UNFINISHED = ("metrics.jsonl", "model/", "checkpoints/", "tuning/", "tensorboard/")


def _is_none(value: object) -> bool:
    return value is None


def omit_none(description: str = "") -> Any:
    """A field that is None by default. Its key is left out of the file then."""
    return Field(None, description=description, exclude_if=_is_none)


def describe_invalid(error: ValidationError) -> tuple[str, str, str]:
    """Field, value and message of the first fault that a check of types has found."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    return ".".join(map(str, first["loc"])), f"found {safe_text(first.get('input'))}", message


class Part(BaseModel):
    """A part of a stored record."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True, defer_build=True)

    def __getitem__(self, key: str) -> Any:
        """A field by name, as in the JSON file. Raises KeyError."""
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None


class StoredRecord(Part):
    """A record with its own file."""

    REPAIR: ClassVar[str] = "Repeat the command that wrote it"

    format_version: int = FORMAT

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record at `path`, compared with the manifest of its folder where there is one.

        Raises UserError: integrity (exit 5) when the file is missing, differs from the manifest, is
        not JSON or lacks a field; unsupported_format (exit 4) for a newer format.
        """
        try:
            values = storage.decode_json(read_result(path))
        except (OSError, ValueError, RecursionError) as error:
            raise_system_error(error, path)
            raise integrity_error(
                str(path), f"not readable: {safe_text(str(error))}", "expected JSON", cls.REPAIR
            ) from error
        return cls.parse(values, path)

    @classmethod
    def parse(cls, values: Any, path: Path) -> Self:
        """The record of `values`, which `path` holds. Raises UserError: as `load`."""
        if not isinstance(values, dict):
            raise integrity_error(
                str(path), f"found {safe_text(values)}", "expected a JSON object", cls.REPAIR
            )
        cls._check_version(values.get("format_version"), path)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            field, value, message = describe_invalid(error)
            raise integrity_error(str(path), value, message, cls.REPAIR, field=field) from error

    @classmethod
    def _check_version(cls, version: object, path: Path) -> None:
        """Raises UserError: unsupported_format (exit 4) for a newer format, integrity (5) for none."""
        if type(version) is int and version > FORMAT:
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                f"format version {version}",
                f"expected {FORMAT}",
                "Use a newer bitimely",
                file=str(path),
            )
        if type(version) is not int or version != FORMAT:
            raise integrity_error(
                str(path),
                f"found {safe_text(version)}",
                f"expected {FORMAT}",
                cls.REPAIR,
                field="format_version",
            )

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored."""
        return self.model_dump(mode="json", by_alias=True)

    def encode(self) -> bytes:
        """The content of the file."""
        return storage.encode_json(self.to_json()) + b"\n"

    def save(self, path: Path) -> None:
        """Write the record to `path` in one step. Raises UserError: as `storage.write_file`."""
        storage.write_json(path, self.to_json())


class ResultRecord(StoredRecord):
    """A record in a folder of results, which is read only beside the manifest that names it."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record at `path`. Raises UserError: as `StoredRecord.load`; integrity (exit 5)
        where the folder has no manifest.
        """
        record = super().load(path)
        require_manifest(path.parent)
        return record

    def save(self, path: Path) -> None:
        """Write the record to `path` in one step, with its entry in the manifest. Raises UserError:
        as `write_results`.
        """
        write_results(path.parent, {path.name: self.encode()})


class StoredFile(Part):
    """A file that a manifest names."""

    sha256: str
    size: int  # bytes
    rows: int | None = omit_none()


def store_file(path: Path, content: storage.Content, rows: int | None = None) -> StoredFile:
    """`storage.write_file`; what a manifest says of the file."""
    sha256, size = storage.write_file(path, content)
    return StoredFile(sha256=sha256, size=size, rows=rows)


def store_hashed(
    folder: Path, stem: str, suffix: str, content: storage.Content, rows: int | None = None
) -> tuple[str, StoredFile]:
    """`storage.write_hashed`; the name of the file, and what a manifest says of it."""
    name, sha256, size = storage.write_hashed(folder, stem, suffix, content)
    return name, StoredFile(sha256=sha256, size=size, rows=rows)


class Manifest(StoredRecord):
    """The `manifest.json` of a folder: `manifests.publish` adds files, generation and the hash of
    all the rest.
    """

    REPAIR: ClassVar[str] = "Make it again, or restore a copy"

    files: dict[str, StoredFile] = {}
    generation: int = 0
    manifest_sha256: str = ""

    @classmethod
    def parse(cls, values: Any, path: Path) -> Self:
        """The manifest of `values` in the subclass of its kind. Raises UserError: as `load`."""
        kind = values.get("kind") if isinstance(values, dict) else None
        for record in cls.__subclasses__():
            if record.model_fields["kind"].default == kind:
                return super(Manifest, record).parse(values, path)
        return super().parse(values, path)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The published manifest of `folder`, compared with its own hash. Raises UserError: as
        `manifests.read_manifest` and `parse`.
        """
        return cls.parse(manifests.read_manifest(folder), folder / manifests.MANIFEST)

    def publish(self, folder: Path, generation: int = 1) -> Self:
        """Make this the manifest of `folder`; as it is published. Raises UserError: as
        `manifests.publish`.
        """
        body = self.to_json()
        return self.parse(
            manifests.publish(folder, body, body["files"], generation), folder / manifests.MANIFEST
        )

    def find_damage(self, folder: Path, names: Iterable[str] | None = None) -> list[Finding]:
        """One finding for each file of `folder` that differs; `names`: these alone."""
        return manifests.find_damage(
            folder, {"files": {name: file.model_dump() for name, file in self.files.items()}}, names
        )

    def check_files(self, folder: Path) -> None:
        """Raises UserError: integrity (exit 5) naming the files of `folder` that differ."""
        if findings := self.find_damage(folder):
            raise storage.damage_error(*findings)


# --- folders of results


class ResultManifest(Manifest):
    """The manifest of a folder of results: every file of it."""

    kind: Literal["results"] = "results"
    finished: bool = True  # False: a training that goes on and whose other files are not sealed yet
    shared: bool = False  # the folder had other files before, which are left alone
    gone: tuple[str, ...] = ()  # files that the last change removes
    beside: bool = False  # of a report and page beside data, as `BESIDE`

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """The manifest of `folder`; None where it has none, or one of another kind.

        Raises UserError: integrity (exit 5).
        """
        path = folder / (BESIDE if (folder / BESIDE).is_file() else manifests.MANIFEST)
        try:
            if path.name == manifests.MANIFEST and b'"kind":"results"' not in path.read_bytes():
                return None
        except OSError as error:
            # a missing one also while the error of a full disk is reported
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise_system_error(error, path)
            return None
        return cls.parse(manifests.read_manifest(folder, path.name), path)

    def locate(self, folder: Path, name: str) -> Path:
        """The file `name`, under its staged name where a change was not completed."""
        staged = folder / _staged_name(name, self.files[name].sha256)
        return staged if staged.is_file() else folder / name

    def publish_results(self, folder: Path) -> None:
        """Replace the manifest of `folder` by this one."""
        storage.write_json(
            folder / (BESIDE if self.beside else manifests.MANIFEST),
            manifests.sign_manifest(self.to_json()),
        )


def require_manifest(folder: Path) -> None:
    """Raises UserError: integrity (exit 5) where a folder of results has no manifest."""
    if ResultManifest.find(folder) is None:
        raise storage.damage_error(describe_missing_manifest(folder))


def describe_missing_manifest(folder: Path) -> Finding:
    """The finding for a folder of results without a manifest."""
    path, requirement = str(folder / manifests.MANIFEST), "expected the checksums of this folder"
    return Finding(Reason.INTEGRITY, "is missing", requirement, HINTS[Reason.INTEGRITY], file=path)


class _Location(NamedTuple):
    """Where the content of a result is, and what the manifest has of it (None: nothing)."""

    path: Path
    expected: StoredFile | None


def _staged_name(name: str, sha256: str) -> str:
    return f"{name}.new-{sha256[:16]}"


def write_results(
    folder: Path,
    files: Mapping[str, storage.Content | None],
    *,
    gone: Iterable[str] = (),
    finished: bool = True,
    held: bool = False,
    beside: bool = False,
) -> None:
    """Change a folder of results in one step.

    Args:
        folder: made if it is missing; its lock is taken meanwhile.
        files: name -> content; None: the file is there and enters the manifest as it is, also one
            of a folder inside (`a/b`).
        gone: names to remove.
        finished: False for a training that goes on.
        held: the caller holds the lock.
        beside: the folder is a cache or token set, whose own manifest does not name `files`.

    Raises:
        UserError: locked (exit 7), integrity (exit 5) for a damaged manifest, config (exit 2) for a
            manifest of something else, and those of `storage.write_file`. The former state is
            intact.
    """
    removed = set(gone)
    lock = nullcontext() if held else locks.lock_folder(folder, WAIT)
    with translate_system_errors(folder), lock:
        manifest = _complete_changes(folder)
        if manifest is None or manifest.beside != beside:
            manifest = (
                ResultManifest(beside=True, shared=True)
                if beside
                else _start_manifest(folder, removed | files.keys())
            )
        stored = leave_out(manifest.files, removed)
        for name, content in files.items():
            if content is None:
                sha256, size = storage.hash_with_size(folder / name)
                stored[name] = StoredFile(sha256=sha256, size=size)
            else:
                _, stored[name] = store_hashed(folder, f"{name}.new", "", content)
        unwanted = sorted(name for name in removed - files.keys() if (folder / name).is_file())
        changes = {"files": stored, "finished": finished, "gone": tuple(unwanted)}
        manifest.model_copy(update=changes).publish_results(folder)
        _complete_changes(folder)


def refuse_other_manifest(folder: Path) -> None:
    """Raises UserError where `manifest.json` of a folder is not that of results.

    Of something else: config (exit 2); damaged: integrity (exit 5).
    """
    path, manifest = folder / manifests.MANIFEST, ResultManifest.find(folder)
    if path.exists() and (manifest is None or manifest.beside):
        try:
            is_ours = "manifest_sha256" in json.loads(path.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise_system_error(error, path)
            is_ours = True
        if is_ours:
            manifests.read_manifest(folder)  # raises for a damaged one
        raise usage_error(
            "is a manifest of something else",
            "expected a folder for results",
            "Choose another folder",
            file=str(path),
        )


def _start_manifest(folder: Path, names: set[str]) -> ResultManifest:
    """The manifest of a folder that has none: shared where files beside `names` are there.

    Raises UserError: as `refuse_other_manifest`.
    """
    refuse_other_manifest(folder)
    others = {path.name for path in folder.iterdir() if path.is_file()} - names
    return ResultManifest(shared=bool(others - {locks.LOCK_FILE}))


def _complete_changes(folder: Path) -> ResultManifest | None:
    """Complete what a killed command left: renames, removals, temporary files.

    Returns the manifest of `folder`.
    """
    manifest = ResultManifest.find(folder)
    files = {} if manifest is None else manifest.files
    storage.remove_temporary_files(folder)
    staged_names = {_staged_name(name, file.sha256): name for name, file in files.items()}
    for path in sorted(folder.iterdir()):
        if path.name in staged_names:
            storage.rename(path, folder / staged_names[path.name])
        elif STAGED_NAME.fullmatch(path.name):
            storage.remove_file(path)
    if manifest is None or not manifest.gone:
        return manifest
    for name in manifest.gone:
        storage.remove_file(folder / name)
    manifest = manifest.model_copy(update={"gone": ()})
    manifest.publish_results(folder)
    return manifest


def complete_results(folder: Path, *, held: bool = False) -> None:
    """Complete a change of `folder` that a killed command left, and remove its temporary files.

    `held`: the caller holds the lock. Raises UserError: locked (exit 7), integrity (exit 5) for a
    damaged manifest.
    """
    manifest = ResultManifest.find(folder)
    if any(map(_is_leftover, folder.iterdir())) or (manifest and manifest.gone):
        with nullcontext() if held else locks.lock_folder(folder):
            _complete_changes(folder)


def _is_leftover(path: Path) -> bool:
    """Whether a file has a name that only a killed command leaves."""
    return storage.is_temporary(path.name) or STAGED_NAME.fullmatch(path.name) is not None


def list_results(folder: Path) -> Iterator[str]:
    """Names of the files of `folder` that its manifest may name.

    Of a folder inside that guards itself, its manifest or meta.json.
    """
    for path in sorted(folder.iterdir()):
        if _is_leftover(path) or path.name in {locks.LOCK_FILE, manifests.MANIFEST}:
            continue
        if not path.is_dir() or path.is_symlink():
            yield path.name
            continue
        guards = (name for name in (manifests.MANIFEST, "meta.json") if (path / name).is_file())
        guard = next(guards, None)
        for name in list_results(path) if guard is None else [guard]:
            yield f"{path.name}/{name}"


def _locate_result(path: Path) -> _Location:
    """Where the content of a file of results is.

    Raises UserError (integrity, exit 5) for a file that the manifest of a finished folder does not
    name.
    """
    manifest = ResultManifest.find(path.parent)
    if manifest is not None and path.name in manifest.files:
        return _Location(manifest.locate(path.parent, path.name), manifest.files[path.name])
    if manifest is not None and manifest.finished and not manifest.shared and path.exists():
        raise storage.damage_error(_describe_foreign(path))
    return _Location(path, None)


def has_result(path: Path) -> bool:
    """Whether there is a file of that name, by the manifest or on the disk."""
    return path.is_file() or _locate_result(path).path.is_file()


def is_listed(path: Path) -> bool:
    """Whether the manifest of its folder names a file, which may be missing."""
    manifest = ResultManifest.find(path.parent)
    return manifest is not None and path.name in manifest.files


def read_result(path: Path) -> bytes:
    """The content of a file of results, compared with the manifest of its folder, if there is one.

    Raises OSError where nothing is known of the file, UserError: integrity (exit 5).
    """
    return check_result(path, bytes_of=True)[1]


def read_result_table(path: Path) -> pl.DataFrame:
    """A Parquet file of results as a frame. Raises as `read_result`."""
    import polars as pl

    return pl.read_parquet(read_result(path))


def read_tables(result: Mapping[str, Any] | str | Path) -> dict[str, pl.DataFrame]:
    """The tables of a result as polars frames (`to_pandas()`), by the names of their Parquet files.

    Args:
        result: what a verb returned (`evaluate`: metrics, classes, predictions; `report`:
            all-scores, differences; `predict`, `embed`, `analyze`), or the folder of a run or a
            report.

    Raises UserError: not_found (exit 2) where there is no table, integrity (exit 5).
    """
    place = _find_place(result)
    folder = place if place.is_dir() else place.parent
    names = _list_tables(folder)
    if place.suffix == ".parquet":
        names &= {place.name}
    if not names:
        raise usage_error(
            "no table there",
            "expected a result of a verb or its folder",
            code=Reason.NOT_FOUND,
            file=str(place),
        )
    return {Path(name).stem: read_result_table(folder / name) for name in sorted(names)}


def _find_place(result: Mapping[str, Any] | str | Path) -> Path:
    """The file or folder that a verb wrote."""
    if isinstance(result, Mapping):
        return Path(str(result.get("report") or result.get("out") or "."))
    return Path(result)


def _list_tables(folder: Path) -> set[str]:
    """Names of the Parquet files of `folder`: those of its manifest, or those that are there."""
    manifest = ResultManifest.find(folder)
    if manifest is None or manifest.shared:
        return {path.name for path in folder.glob("*.parquet")}
    return {name for name in manifest.files if name.endswith(".parquet")}


def check_result(path: Path, *, bytes_of: bool = False) -> tuple[Path, bytes]:
    """Where the content of a file of results is, after comparing it with the manifest.

    With `bytes_of` the content too. Raises as `read_result`.
    """
    before = None
    while True:
        location = _locate_result(path)
        content, digest, problem = _read_location(location, path, bytes_of=bytes_of)
        if location.expected is None or digest == location.expected.sha256:
            return location.path, content
        if location == before:  # no other process changed the folder meanwhile
            raise integrity_error(str(path), problem, f"expected {location.expected.sha256[:16]}")
        before = location


def _read_location(location: _Location, path: Path, *, bytes_of: bool) -> tuple[bytes, str, str]:
    """The content, its SHA-256, and in words what is there in place of the expected one.

    The content is b"" without `bytes_of`. Raises OSError where the manifest has nothing of the
    file, UserError: a fault of this machine (exit 6).
    """
    content, digest = b"", ""
    try:
        if bytes_of:
            content = location.path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
        elif location.expected is not None:
            digest = storage.hash_file(location.path)
    except OSError as error:
        raise_system_error(error, path)
        if location.expected is None:
            raise
        if location.path.exists():
            return b"", "", f"cannot be read ({error.strerror})"
        return b"", "", "is missing"
    return content, digest, f"has sha256 {digest[:16]}"


def find_missing(folder: Path) -> list[str]:
    """Names of files that the manifest of `folder` has and the disk has not."""
    manifest = ResultManifest.find(folder)
    if manifest is None:
        return []
    return [name for name in manifest.files if not manifest.locate(folder, name).is_file()]


def find_changes(folder: Path) -> list[Finding]:
    """A finding for each altered, missing or foreign file of a folder of results.

    One more for a change that was not completed. Raises UserError: integrity (exit 5) for a damaged
    manifest, incomplete (exit 4) without one.
    """
    manifest = ResultManifest.find(folder) or ResultManifest.read(folder)
    findings: list[Finding] = []
    for name in manifest.files:
        findings += _find_file_changes(manifest, folder, name)
    for name in list_results(folder):
        if _is_foreign(manifest, name):
            findings.append(_describe_foreign(folder / name))
    return findings + _find_leftovers(manifest, folder)


def describe_changes(folder: Path, parts: tuple[str, ...] = ("",)) -> list[str]:
    """A sentence that names the altered, missing and foreign files of a run and its model, or
    none; a folder without a manifest is left to `verify`. `parts`: what the paths of the files that
    matter begin with. Raises UserError: integrity (exit 5) for a damaged manifest.
    """
    names = []
    for part in (folder, folder / "model"):
        for finding in _find_alterations(part):
            path = Path(finding.file or folder).relative_to(folder).as_posix()
            names += [f"{path} ({finding.problem})"] if path.startswith(parts) else []
    if not names:
        return []
    listed = ", ".join(dict.fromkeys(names))
    return [
        f"Of run {folder.resolve().name} these files are not as they were written: {listed}. "
        "Numbers and drawings from them may be wrong."
    ]


def _find_alterations(folder: Path) -> list[Finding]:
    """As `find_changes`, without changes that a command has not completed, its own or one that runs
    at this moment.
    """
    manifest, before = ResultManifest.find(folder), None
    findings: list[Finding] = []
    while manifest is not None and manifest != before:
        findings = [f for f in find_changes(folder) if f.code != Reason.INCOMPLETE]
        manifest, before = ResultManifest.find(folder) if findings else None, manifest
    return findings


def _find_file_changes(manifest: ResultManifest, folder: Path, name: str) -> list[Finding]:
    """Findings for a file that the manifest names."""
    path = manifest.locate(folder, name)
    facts = {path.relative_to(folder).as_posix(): manifest.files[name].model_dump()}
    findings = manifests.find_damage(folder, {"files": facts})
    if path.name != Path(name).name:
        findings.append(
            Finding(
                Reason.INCOMPLETE,
                "a change of it was not completed",
                "expected it under its name",
                RETRY_HINT,
                file=str(folder / name),
            )
        )
    return findings


def _is_foreign(manifest: ResultManifest, name: str) -> bool:
    """Whether the file `name` of a folder of results does not belong there."""
    if manifest.shared or name in manifest.files or name in manifest.gone:
        return False
    # a folder inside that guards itself
    if name.endswith(f"/{manifests.MANIFEST}") and name.count("/") == 1:
        return False
    return manifest.finished or not name.startswith(UNFINISHED)


def _find_leftovers(manifest: ResultManifest, folder: Path) -> list[Finding]:
    """A warning where a killed command left files."""
    paths = [
        path
        for path in folder.iterdir()
        if storage.is_temporary(path.name) or path.name in manifest.gone
    ]
    if not paths:
        return []
    problem = f"{len(paths)} files of a killed command"
    return [
        input_warning(Reason.INCOMPLETE, problem, "expected none", RETRY_HINT, file=str(paths[0]))
    ]


def _describe_foreign(path: Path) -> Finding:
    return Finding(
        Reason.INTEGRITY,
        "is not in manifest.json",
        "expected its files alone",
        "Remove it",
        file=str(path),
    )
