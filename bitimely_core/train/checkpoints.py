"""The checkpoints of a training run, from which it resumes: one folder a step.

A folder appears at once, is verified before use and holds no pickle.

`checkpoints/step-N/` holds `model.safetensors` (weights and buffers), `optimizer.safetensors`
(moments by parameter name) and `meta.json`: step, epoch, seed, identity (settings and data of the
run), SHA-256 and size of the other files, and its own hash. Schedule, random numbers and the order
of the data are functions of the step, so the step is their state. A folder is filled as
`step-N.tmp` and renamed when every file is on the disk; `LATEST` is for human readers and never
read. Tensors are encoded, which copies them, while the training stands; a thread writes the bytes,
which are hashed once, on their way to the disk, while it goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    integrity_error,
    raise_differences,
    safe_text,
)
from bitimely_core.schemas.runs import CheckpointMeta, flatten_keys
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import store_file
from bitimely_core.system_errors import describe_os_error, raise_system_error

STEP = re.compile(r"step-(\d{1,15})")
SPARE_BYTES = 1 << 20  # bytes beyond the tensors that must be free: headers, meta.json, the log


class Checkpoint(NamedTuple):
    """A checkpoint that was verified."""

    folder: Path
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.meta.step


def list_steps(folder: Path) -> list[int]:
    """Steps that have a folder, newest first; no file is opened."""
    if not folder.is_dir():
        return []
    matches = (STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def save_checkpoint(
    folder: Path, meta: CheckpointMeta, contents: Mapping[str, bytes], *, keep: int = 2
) -> Path:
    """Write `folder/step-<meta.step>/` (a file of `encode_tensors` a key), then remove the
    checkpoints beyond the newest `keep` (at least 2).

    Raises UserError: disk_full, io_error (exit 6); the incomplete one is removed, the previous ones
    stay.
    """
    step = meta.step
    final, temporary = folder / f"step-{step}", folder / f"step-{step}.tmp"
    storage.make_folder(folder)
    storage.require_space(folder, SPARE_BYTES + sum(map(len, contents.values())))
    _remove_folder(temporary)
    try:
        storage.make_folder(temporary)
        files = {}
        for name, content in contents.items():
            file = f"{name}.safetensors"
            files[file] = store_file(temporary / file, content)
        meta = meta.model_copy(update={"files": files})
        meta.model_copy(update={"sha256": _hash_meta(meta.to_json())}).save(temporary / "meta.json")
        if final.is_dir():  # the same step, now validated
            storage.rename(final, folder / f"step-{step}.previous.tmp")
        storage.rename(temporary, final)
    except OSError as error:
        raise describe_os_error(error, final) from error
    finally:
        _remove_folder(temporary)
    _remove_oldest(folder, keep)
    _remove_folder(folder / f"step-{step}.previous.tmp")
    _remove_folder(final.with_suffix(".damaged"))
    return final


def _remove_oldest(folder: Path, keep: int) -> None:
    """Name the newest checkpoint in `LATEST` and remove those beyond the newest `keep` (at least
    2).
    """
    steps, latest = list_steps(folder), folder / "LATEST"
    content = f"step-{steps[0]}\n".encode()
    if not latest.is_file() or latest.read_bytes() != content:
        storage.write_bytes(latest, content)
    for oldest in steps[max(keep, 2) :]:
        _remove_folder(folder / f"step-{oldest}")


def _hash_meta(values: Mapping[str, JsonValue]) -> str:
    """The hash of `meta.json` in itself: that of its other keys."""
    return storage.fingerprint({key: value for key, value in values.items() if key != "sha256"})


def verify_checkpoint(path: Path) -> CheckpointMeta:
    """`meta.json`, compared with its own hash, after every file that it names was compared with its
    size and hash.

    Raises UserError (integrity, exit 5).
    """
    file = path / "meta.json"
    try:
        values = json.loads(file.read_bytes())
        intact = values["sha256"] == _hash_meta(values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise_system_error(error, file)
        raise integrity_error(
            str(file), f"not readable ({safe_text(str(error))})", "expected JSON with its own hash"
        ) from error
    if not intact:
        raise integrity_error(str(file), "differs from its own checksum", "expected it unchanged")
    meta = CheckpointMeta.parse(values, file)
    manifests.check_files(path, values)
    return meta


def find_newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """The newest intact checkpoint, and a warning for each damaged newer one. Raises UserError
    (integrity, exit 5) when all are damaged.
    """
    damaged: list[tuple[int, UserError]] = []
    for step in list_steps(folder):
        path = folder / f"step-{step}"
        try:
            meta = verify_checkpoint(path)
        except UserError as error:
            if error.code is not Reason.INTEGRITY:
                raise
            damaged.append((step, error))
            continue
        return Checkpoint(path, meta), [
            input_warning(
                Reason.INTEGRITY,
                f"checkpoint step-{number} is damaged: {error.problem}",
                error.requirement,
                f"Resuming from {path.name}",
                file=error.file,
            )
            for number, error in damaged
        ]
    if not damaged:
        return None, []
    raise integrity_error(
        str(folder),
        f"none of {len(damaged)} checkpoints verifies",
        "expected one intact checkpoint",
        "Start again with --force-new",
        details=[error.finding for _, error in damaged],
    )


def load_latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The newest intact checkpoint of a run, None without any. Raises UserError (integrity, exit 5)
    when none of them verifies.
    """
    return find_newest_checkpoint(Path(folder) / "checkpoints")[0]


def sweep_folder(folder: Path, newest: Checkpoint | None, *, keep: int = 2) -> None:
    """Remove leftovers of a killed run, all checkpoints but `keep`, and rename checkpoints newer
    than `newest` to `step-N.damaged`. Only under the run's lock.
    """
    if not folder.is_dir():
        return
    for path in folder.glob("step-*.tmp"):
        _remove_folder(path)
    storage.remove_temporary_files(folder)
    for step in list_steps(folder):
        if newest is not None and step > newest.step:
            path = folder / f"step-{step}"
            _remove_folder(path.with_suffix(".damaged"))
            storage.rename(path, path.with_suffix(".damaged"))
    if newest is not None:
        _remove_oldest(folder, keep)


def load_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The CPU tensors of `<name>.safetensors`, by name. Raises UserError (integrity, exit 5)."""
    path = checkpoint.folder / f"{name}.safetensors"
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != checkpoint.meta.files[path.name].sha256:
            raise integrity_error(str(path), "its hash differs", "expected it unchanged")
        return from_bytes(content)
    except (OSError, SafetensorError) as error:
        raise_system_error(error, path)
        raise integrity_error(str(path), safe_text(str(error)), "expected safetensors") from error


def require_same_run(
    checkpoint: Checkpoint, identity: dict[str, JsonValue], exempt: frozenset[str]
) -> None:
    """Raises UserError (settings_differ, exit 2), a finding a key, where `identity` differs apart
    from `train.<key>` for keys in `exempt`.
    """
    before, now = (
        {key: value for key, value in flatten_keys(settings).items() if not _is_exempt(key, exempt)}
        for settings in (checkpoint.meta.identity, json.loads(storage.encode_json(identity)))
    )
    raise_differences(
        before,
        now,
        checkpoint.folder,
        "Repeat the previous command, choose another --run, or start over with --force-new",
    )


def _is_exempt(key: str, exempt: frozenset[str]) -> bool:
    """Whether the dotted `key` is one of the `exempt` settings of a training."""
    section, _, name = key.rpartition(".")
    return section.rpartition(".")[2] == "train" and name in exempt


def require_same_shapes(
    checkpoint: Checkpoint, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Raises UserError (shapes_differ, exit 4) with one finding a tensor that is missing, unknown
    or of another shape or type.
    """

    def describe(tensors: Mapping[str, Tensor], key: str) -> str:
        if key not in tensors:
            return "nothing"
        return f"{list(tensors[key].shape)} {str(tensors[key].dtype).removeprefix('torch.')}"

    differing = sorted(
        key
        for key in saved.keys() | expected.keys()
        if describe(saved, key) != describe(expected, key)
    )
    if differing:
        words = "tensor differs" if len(differing) == 1 else "tensors differ"
        raise input_error(
            Reason.SHAPES_DIFFER,
            f"{len(differing)} {words}: {', '.join(differing)}",
            "expected the architecture of the checkpoint",
            "Build the model with the settings of the run",
            file=str(checkpoint.folder),
            details=[
                Finding(
                    Reason.SHAPES_DIFFER,
                    f"the checkpoint has {describe(saved, k)}",
                    f"the model has {describe(expected, k)}",
                    field=k,
                )
                for k in differing
            ],
        )


def encode_tensors(group: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of the tensors as they are now. Shared memory (tied weights) is copied."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in group.items():
        cpu = tensor.detach().to("cpu").contiguous()
        if cpu.untyped_storage().data_ptr() in seen:
            cpu = cpu.clone()
        seen.add(cpu.untyped_storage().data_ptr())
        tensors[name] = cpu
    return to_bytes(tensors)


def is_finite(group: Mapping[str, Tensor]) -> bool:
    """Whether every floating-point tensor is finite."""
    return all(bool(torch.isfinite(t).all()) for t in group.values() if t.is_floating_point())


def _remove_folder(path: Path) -> None:
    """Remove a folder that is no longer needed; what cannot be removed now is removed the next
    time.
    """
    with suppress(UserError):
        storage.remove_folder(path)


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a model by name, on its device."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model as they are now, on the CPU."""
    return {
        name: value.detach().to("cpu", copy=True) for name, value in list_tensors(model).items()
    }
