"""A run on disk: its record, its weights, the adapter that fits some windows."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import __version__, storage
from bitimely_core.config import Settings, validate
from bitimely_core.errors import Reason, UserError, input_error, integrity_error, safe_text, usage_error

if TYPE_CHECKING:
    from bitimely_core.tokens import Sequences, Windows


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows


FORMAT = 1


def adapter_channels(body: dict[str, Any]) -> tuple[int, ...]:
    """The channels that the adapters of a run read, in their order."""
    model = body["settings"]["model"]
    return (model["channels"], *model.get("others", ()))


def vocabulary_digest(windows: Windows | Sequences) -> str:
    """SHA-256 of the names of the codes; "" for signals."""
    names = getattr(windows, "vocabulary", ())
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""


def find_adapter(windows: Windows, body: dict[str, Any]) -> int | None:
    """Which adapter of a run fits `windows`: that of the same tokens, of the same data set, of as many channels; None: none does."""
    if body["settings"]["model"].get("channel_independent"):
        return 0
    if vocabulary_digest(windows):
        return next((0 for data in body["data"] if data.get("vocabulary") == vocabulary_digest(windows)), None)
    fits = [at for at, count in enumerate(adapter_channels(body)) if count == windows.channels]
    trained = {at: body["data"][at] for at in fits if at < len(body["data"])}
    same = [at for at, data in trained.items() if data["name"] == windows.name]
    same += [at for at, data in trained.items() if data["dataset"] == windows.dataset]
    return next(iter([*same, *fits]), None)


def read_run(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder. Raises UserError (integrity, exit 5) when it does not parse."""
    path = folder / "run.json"
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise integrity_error(
            str(path), f"not readable: {safe_text(str(error))}", "expected JSON", "Repeat the training under --force-new"
        ) from error
    if body.get("format_version", 0) > FORMAT:
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            f"format version {body.get('format_version')}",
            f"expected at most {FORMAT}",
            "Use a newer bitimely",
            file=str(path),
        )
    return body


def check_weights(folder: Path, body: dict[str, Any]) -> Path:
    """The model folder of a finished run, its weights compared with the hash in `run.json`. Raises UserError (integrity, exit 5)."""
    path = folder / "model" / "model.safetensors"
    if not path.is_file() or storage.sha256(path) != body["weights"]:
        raise integrity_error(
            str(path),
            "missing" if not path.is_file() else "differs from its hash",
            "expected the weights that the training wrote",
            "Restore the file, or train again under --force-new",
        )
    return folder / "model"


def list_versions() -> dict[str, str]:
    """Versions of what decides numbers."""
    out = {"bitimely": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "polars", "pyarrow", "scikit-learn", "scipy", "safetensors"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def claim_folder(folder: Path, body: dict[str, Any], *, force_new: bool) -> bool:
    """Take `folder` for the run described by `body`: False when it is already finished under the same description.

    What must agree: settings, data, source. Raises UserError (settings_differ, exit 2) with the differing keys unless `force_new`,
    which removes the old run.
    """
    import shutil

    from bitimely_core.errors import Finding

    if (folder / "run.json").is_file():
        old = _fill_defaults(read_run(folder))
        differing = [
            key
            for key in flatten_compared(body) | flatten_compared(old)
            if flatten_compared(body).get(key) != flatten_compared(old).get(key)
        ]
        if not differing and not force_new:
            return not old.get("finished", False)
        if not force_new:
            shown = [
                Finding(
                    code=Reason.SETTINGS_DIFFER,
                    file=str(folder / "run.json"),
                    field=key,
                    problem=f"the run has {safe_text(flatten_compared(old).get(key))}",
                    requirement=f"now {safe_text(flatten_compared(body).get(key))}",
                )
                for key in sorted(differing)
            ]
            first, *rest = shown
            raise usage_error(
                first.problem,
                first.requirement,
                "Give another --run NAME, or --force-new to replace this one",
                code=Reason.SETTINGS_DIFFER,
                file=first.file,
                field=first.field,
                details=rest,
            )
        with storage.lock(folder):
            pass  # not while another process trains there
        shutil.rmtree(folder)
    storage.make_folder(folder)
    storage.write_json(folder / "run.json", {**body, "finished": False})
    return True


def _fill_defaults(body: dict[str, Any]) -> dict[str, Any]:
    """A run as an earlier version wrote it, with the settings that did not exist then at their defaults."""
    try:
        known = validate(Settings, body["settings"]).model_dump(mode="json", by_alias=True)
    except UserError:  # settings that no longer exist: the comparison names them
        return body
    return {**body, "settings": known}


COMPARED = ("kind", "model", "preset", "settings", "data", "source", "init")


RESUME_EXEMPT = {  # may change between a stop and its continuation: they do not change the numbers, or only where they are computed
    "settings.train.device",
    "settings.train.devices",
    "settings.train.compile",
    "settings.train.log_every",
    "settings.train.keep",
    "settings.train.checkpoint_every",
}


def flatten_compared(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What must agree between two runs of one name: dotted key -> value, of the keys in `COMPARED` without those in `FREE`."""
    out: dict[str, Any] = {}
    for key, value in body.items():
        if not prefix and key not in COMPARED:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out |= flatten_compared(value, f"{name}.")
        elif name not in RESUME_EXEMPT:
            out[name] = list(value) if isinstance(value, tuple) else value
    return out


def load_trained(folder: Path, body: dict[str, Any], windows: Windows) -> nn.Module:
    """The trained model of a run folder, with its head when it was fine-tuned; of a mixed pre-training with the adapter for `windows`.

    Raises UserError (config, exit 2) where the run has none for their channels.
    """
    from bitimely_core import models
    from bitimely_core.models import heads

    at = _select_adapter(windows, body, folder)
    path = check_weights(folder, body)
    if body["kind"] == "finetune":
        return heads.load(path)
    model = models.load(path)
    model.settle(at)
    return model


def _select_adapter(windows: Windows, body: dict[str, Any], folder: Path) -> int:
    """Which adapter of the run reads `windows`. Raises UserError (config, exit 2) where none does."""
    at = find_adapter(windows, body)
    if at is None:
        raise usage_error(
            f"{windows.name} has {'another vocabulary' if vocabulary_digest(windows) else f'{windows.channels} channels'}",
            f"the run reads {'its own' if vocabulary_digest(windows) else ' or '.join(str(n) for n in adapter_channels(body))}",
            f"Fine-tune on it first: bitimely finetune {body['run']} --data {windows.name}",
            file=str(folder),
        )
    return at
