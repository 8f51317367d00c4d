"""The manifest of a folder: `manifest.json`, written last, names every file with its SHA-256 and
holds its own hash; a commit replaces it.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

from bitimely_core.errors import (
    HINTS,
    Exit,
    Finding,
    Reason,
    UserError,
    input_error,
    integrity_error,
)
from bitimely_core.store import storage
from bitimely_core.system_errors import RETRY_HINT, describe_os_error, raise_system_error

Manifest = dict[str, Any]  # with `files`, `generation`, `manifest_sha256` and keys of its kind
FileFacts = dict[str, Any]  # of a file in a manifest: `sha256`, `size` and keys of its kind

MANIFEST = "manifest.json"
OLD_MANIFEST = re.compile(r"manifest-(\d+)\.json")


def sign_manifest(body: Manifest) -> Manifest:
    """A manifest with the hash of its other keys as `manifest_sha256`."""
    unsigned = {key: value for key, value in body.items() if key != "manifest_sha256"}
    return {**unsigned, "manifest_sha256": storage.fingerprint(unsigned)}


def publish(folder: Path, body: Manifest, files: dict[str, FileFacts], generation: int) -> Manifest:
    """Last step of a commit: make `files` the content of `folder`. The caller holds the lock.

    Args:
        folder: holds the files.
        body: the other keys of the manifest.
        files: name -> `{"sha256", "size"}` and further facts, for instance rows.
        generation: number of this generation, one more than that of the manifest which the caller
            has read (1 for the first).

    Returns:
        The manifest: body, files, generation and `manifest_sha256`. The previous one is kept as
        `manifest-<N>.json`.

    Raises:
        UserError: locked (exit 7) when another generation has been published meanwhile, integrity
            (exit 5) when a file is not as described, and those of `write_file`.
    """
    manifest = sign_manifest({**body, "files": files, "generation": generation})
    for name, facts in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["size"]:
            raise integrity_error(str(folder / name), "is not as it was written", hint=RETRY_HINT)
    path = folder / MANIFEST
    with storage.temporary_file(path) as temporary:
        storage.write_content(temporary, storage.encode_json(manifest) + b"\n")
        current = read_manifest(folder)["generation"] if path.exists() else 0
        if current != generation - 1:
            raise UserError(
                Reason.LOCKED,
                f"generation {current} was published meanwhile",
                f"expected {generation - 1}",
                RETRY_HINT,
                file=str(path),
                exit_code=Exit.LOCKED,
            )
        if current:
            # for readers of its generation
            storage.link_file(path, folder / f"manifest-{current}.json")
        storage.os_replace(temporary.path, path)
        storage.sync_folder(folder)
    return manifest


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """The published manifest, after comparing it with its own hash.

    Raises UserError: not_found or incomplete (exit 4) when there is none, integrity (exit 5) when
    it is damaged.
    """
    path = folder / name
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        code, problem = Reason.NOT_FOUND, "no such folder"
        if folder.is_dir():
            code, problem = Reason.INCOMPLETE, "incomplete: no manifest.json"
        hint = "Run the command that makes it; finished parts are kept"
        raise input_error(code, problem, hint=hint, file=str(folder)) from error
    except OSError as error:
        raise describe_os_error(error, path) from error
    try:
        body = json.loads(raw)
        intact = _is_intact(body) and storage.encode_json(body) + b"\n" == raw
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise integrity_error(str(path), "differs from its own checksum")
    return cast(Manifest, body)


def _is_intact(body: Manifest) -> bool:
    """Whether a manifest has the hash that it states, and the keys that every manifest has."""
    for facts in body["files"].values():
        if not isinstance(facts["sha256"], str) or not isinstance(facts["size"], int):
            return False
    return isinstance(body["generation"], int) and sign_manifest(body) == body


def find_damage(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None
) -> list[Finding]:
    """A finding for each file of `folder` that differs from its manifest; `names`: these alone."""
    files = manifest["files"]
    findings = (
        _find_file_damage(folder, name, files[name])
        for name in sorted(files if names is None else names)
    )
    return [finding for finding in findings if finding is not None]


def _find_file_damage(folder: Path, name: str, facts: FileFacts) -> Finding | None:
    path = folder / name

    def differs(problem: str, requirement: str) -> Finding:
        return Finding(
            Reason.INTEGRITY, problem, requirement, HINTS[Reason.INTEGRITY], file=str(path)
        )

    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        return differs("leaves the folder", "expected a name inside of it")
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            return differs("is no regular file", "expected the one in the manifest")
        if info.st_size != facts["size"]:
            return differs(f"has {info.st_size} bytes", f"expected {facts['size']}")
        digest = storage.hash_file(path)
    except FileNotFoundError:
        return differs("is missing", "the manifest names it")
    except OSError as error:
        raise_system_error(error, path)
        return differs(f"cannot be read ({error.strerror})", "the manifest names it")
    if digest != facts["sha256"]:
        return differs(f"has sha256 {digest[:16]}", f"expected {facts['sha256'][:16]}")
    return None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare size and SHA-256 of the files of `folder` with its manifest.

    Raises UserError: integrity (exit 5) naming the first file that is damaged or missing, the
    others in `details`.
    """
    findings = find_damage(folder, manifest)
    if findings:
        raise storage.damage_error(*findings)


@contextmanager
def require_agreement(folder: Path) -> Iterator[None]:
    """Raise UserError (integrity, exit 5) where the files of `folder` contradict its manifest in a
    way that breaks the reader.
    """
    import polars as pl

    try:
        yield
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        pl.exceptions.PolarsError,
    ) as error:
        raise_system_error(error, folder)
        raise integrity_error(
            str(folder / MANIFEST), f"contradicts the files ({type(error).__name__})"
        ) from error


def remove_old_files(folder: Path, pattern: re.Pattern[str]) -> None:
    """Remove files that neither the published generation nor the previous one names. The caller
    holds the lock.

    Only files whose name matches `pattern` (made by bitimely), and older manifests. Readers of the
    previous generation can finish; a file that cannot be removed is left for the next time.
    """
    now = read_manifest(folder)
    named = set(now["files"])
    former = folder / f"manifest-{now['generation'] - 1}.json"
    try:
        named |= set(json.loads(former.read_bytes())["files"])
    except (FileNotFoundError, ValueError, KeyError):
        pass
    except OSError:
        return  # its files are not known
    for path in storage.list_folder(folder):
        old = OLD_MANIFEST.fullmatch(path.name)
        if (old and int(old[1]) < now["generation"] - 1) or (
            pattern.fullmatch(path.name) and path.name not in named
        ):
            with suppress(OSError):
                storage.os_unlink(path)
