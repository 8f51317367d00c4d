"""Checkpoints of a training run: a folder a step, written whole or not at all, verified before use, without pickles.

`checkpoints/step-N/` holds `model.safetensors` (weights and buffers), `optimizer.safetensors` (moments by parameter name) and `meta.json`:
step, epoch, seed, identity (what the run was started with), SHA-256 and size of the other files, and its own hash. Schedule, random numbers
and the order of the data are functions of the step, so the step is their state. A folder is filled as `step-N.tmp` and renamed when every
file is on the disk; `LATEST` is a hint for people and never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from bitimely_core import storage
from bitimely_core.errors import Finding, Reason, UserError, input_error, integrity_error, safe_text, usage_error

FORMAT = 1
STEP = re.compile(r"step-(\d{1,15})")
SPARE = 1 << 20  # bytes beyond the tensors that must be free: headers, meta.json, the log


class Checkpoint(NamedTuple):
    """A checkpoint that was verified."""

    folder: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(self.meta["step"])


def list_steps(folder: Path) -> list[int]:
    """Steps of which a folder exists, newest first; nothing is opened."""
    if not folder.is_dir():
        return []
    found = (STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write `folder/step-<step>/` and drop the checkpoints beyond the newest `keep`; those go only after the new one verified.

    Args:
        folder: The run's `checkpoints` folder.
        step: Optimizer steps done.
        tensors: One safetensors file a key, of CPU tensors by name.
        facts: JSON for `meta.json`.
        keep: How many checkpoints stay, at least 2.

    Raises:
        UserError: disk_full, io_error (exit 6), integrity (exit 5); what was written of the new one is removed, the former ones stay.
    """
    final, temporary = folder / f"step-{step}", folder / f"step-{step}.tmp"
    storage.make_folder(folder)
    storage.require_space(folder, SPARE + sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values()))
    _remove(temporary)
    try:
        storage.make_folder(temporary)
        files = {}
        for name, group in tensors.items():
            digest, size = write_tensors(temporary / f"{name}.safetensors", group)
            files[f"{name}.safetensors"] = {"sha256": digest, "size": size}
        meta = {"format_version": FORMAT, **facts, "step": step, "files": files}
        storage.write_json(temporary / "meta.json", {**meta, "sha256": storage.fingerprint(meta)})
        if final.is_dir():  # the same step, since then validated
            storage.os_replace(final, folder / f"step-{step}.former.tmp")
        storage.os_replace(temporary, final)
        _sync(folder)
        verify_checkpoint(final)
    except OSError as error:
        _remove(temporary)
        raise storage.os_error(error, final) from error
    except BaseException:
        _remove(temporary)
        raise
    storage.write_bytes(folder / "LATEST", f"step-{step}\n".encode())
    for old in list_steps(folder)[max(keep, 2) :]:
        path = folder / f"step-{old}"
        with suppress(OSError):
            storage.os_replace(path, path.with_suffix(".tmp"))  # a kill while it is removed leaves no half checkpoint under a final name
            _remove(path.with_suffix(".tmp"))
    _remove(folder / f"step-{step}.former.tmp")
    _remove(final.with_suffix(".damaged"))
    return final


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint after comparing its own hash, and size and hash of every file it names.

    Raises UserError (integrity, exit 5) that names the file at fault.
    """
    where = path / "meta.json"
    try:
        meta = json.loads(where.read_bytes())
        whole = meta.pop("sha256") == storage.fingerprint(meta) and isinstance(meta["files"], dict) and isinstance(meta["step"], int)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damage_error(where, f"not readable ({safe_text(str(error))})", "expected JSON with its own hash") from error
    if not whole:
        raise _damage_error(where, "differs from its own checksum", "expected it unchanged")
    if meta["format_version"] > FORMAT:
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            f"format version {meta['format_version']}",
            f"expected at most {FORMAT}",
            "Use a newer bitimely",
            file=str(where),
        )
    storage.check_files(path, meta)
    return dict(meta)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """The newest checkpoint that verifies, or None where there is none at all, and a warning for each newer one that does not.

    Raises UserError (integrity, exit 5) when checkpoints exist and none verifies.
    """
    bad: list[tuple[int, UserError]] = []
    for step in list_steps(folder):
        path = folder / f"step-{step}"
        try:
            meta = verify_checkpoint(path)
        except UserError as error:
            if error.code is not Reason.INTEGRITY:
                raise
            bad.append((step, error))
            continue
        return Checkpoint(path, meta), [_fallback_finding(path, error, f"step-{at}") for at, error in bad]
    if not bad:
        return None, []
    raise integrity_error(
        str(folder),
        f"none of {len(bad)} checkpoints verifies",
        "expected one whole checkpoint",
        "Start again with --force-new",
        details=[error.finding for _, error in bad],
    )


def sweep(folder: Path, former: Checkpoint | None) -> None:
    """Remove what a killed run left, and set aside (`step-N.damaged`) checkpoints newer than `former`. Only under the run's lock."""
    if not folder.is_dir():
        return
    for path in folder.glob("step-*.tmp"):
        _remove(path)
    storage.remove_temporary_files(folder)
    for step in list_steps(folder):
        if former is not None and step > former.step:
            path = folder / f"step-{step}"
            _remove(path.with_suffix(".damaged"))
            path.rename(path.with_suffix(".damaged"))


def load_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The CPU tensors of `<name>.safetensors`, by name; its bytes are compared with the hash once more as they are read."""
    path = checkpoint.folder / f"{name}.safetensors"
    try:
        body = path.read_bytes()
        if hashlib.sha256(body).hexdigest() != checkpoint.meta["files"][path.name]["sha256"]:
            raise _damage_error(path, "its hash differs", "expected it unchanged")
        return from_bytes(body)
    except (OSError, SafetensorError) as error:
        raise _damage_error(path, safe_text(str(error)), "expected safetensors") from error


def refuse_other_run(checkpoint: Checkpoint, identity: Mapping[str, Any], free: frozenset[str]) -> None:
    """Compare `identity` with that of the checkpoint, apart from `train.<key>` for the keys in `free`.

    Raises UserError (settings_differ, exit 2) with one finding a differing key.
    """
    was, now = flatten(checkpoint.meta["identity"]), flatten(json.loads(storage.encode_json(identity)))
    differing = sorted(
        key
        for key in was.keys() | now.keys()
        if was.get(key) != now.get(key) and not (key.split(".")[-2:-1] == ["train"] and key.split(".")[-1] in free)
    )
    code = Reason.SETTINGS_DIFFER
    if differing:
        raise usage_error(
            f"{_count(differing, 'key differs', 'keys differ')} from the run to continue: {', '.join(differing)}",
            "expected the settings and data it was started with",
            "Repeat the former command, choose another --run, or start over with --force-new",
            code=code,
            file=str(checkpoint.folder),
            details=[
                Finding(
                    code=code,
                    field=key,
                    problem=f"the checkpoint has {safe_text(was.get(key))}",
                    requirement=f"now {safe_text(now.get(key))}",
                )
                for key in differing
            ],
        )


def refuse_other_shapes(checkpoint: Checkpoint, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises UserError (shapes_differ, exit 4) with one finding a tensor that is missing, unknown or of another shape or type."""

    def said(tensors: Mapping[str, Tensor], key: str) -> str:
        return f"{list(tensors[key].shape)} {str(tensors[key].dtype).removeprefix('torch.')}" if key in tensors else "nothing"

    differing = sorted(key for key in saved.keys() | wanted.keys() if said(saved, key) != said(wanted, key))
    code = Reason.SHAPES_DIFFER
    if differing:
        raise input_error(
            code,
            f"{_count(differing, 'tensor differs', 'tensors differ')}: {', '.join(differing)}",
            "expected the architecture of the checkpoint",
            "Build the model with the settings of the run",
            file=str(checkpoint.folder),
            details=[
                Finding(
                    code=code, field=key, problem=f"the checkpoint has {said(saved, key)}", requirement=f"the model has {said(wanted, key)}"
                )
                for key in differing
            ],
        )


def flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are values."""
    if not isinstance(nested, dict):
        return {prefix: nested}
    return {
        key: value for name, inner in nested.items() for key, value in flatten(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def write_tensors(path: Path, group: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write a safetensors file; its SHA-256 and size. Raises UserError (exit 6)."""
    return storage.write_bytes(path, to_bytes(_unshare(group)))


def _unshare(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with memory of its own: safetensors refuses shared memory (tied weights)."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in group.items():
        cpu = tensor.detach().to("cpu").contiguous()
        out[name] = cpu.clone() if cpu.untyped_storage().data_ptr() in seen else cpu
        seen.add(out[name].untyped_storage().data_ptr())
    return out


def all_finite(group: Mapping[str, Tensor]) -> bool:
    """Whether every floating-point tensor is finite."""
    return all(bool(torch.isfinite(t).all()) for t in group.values() if t.is_floating_point())


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = storage.os_open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems cannot flush folders
            storage.os_fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _count(items: list[str], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}"


def _damage_error(path: Path, text: str, wanted: str) -> UserError:
    return integrity_error(str(path), text, wanted)


def _fallback_finding(used: Path, error: UserError, name: str) -> Finding:
    return Finding(
        code=Reason.INTEGRITY,
        level="warning",
        file=error.file,
        problem=f"checkpoint {name} is damaged: {error.problem}",
        requirement=error.requirement,
        hint=f"Continuing from {used.name}",
    )
