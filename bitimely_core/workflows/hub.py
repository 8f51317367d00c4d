"""Models on a hub: download and upload through huggingface_hub (extra `hub`).

The client uses its own credentials. No other module calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bitimely_core.errors import Reason, clean, input_error, integrity_error, safe_text, usage_error
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error

# downloaded files: weights without code, numbers and text
SAFE = ("*.safetensors", "*.json", "*.md")
NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


def load_client(field: str) -> Any:
    """huggingface_hub. Raises UserError (config, exit 2) naming `field` where the extra is
    missing.
    """
    try:
        import huggingface_hub  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise_system_error(error)
        raise usage_error(
            "huggingface_hub is not installed",
            "expected it for a repository of a hub"
            + (" (no run or folder has that name)" if field == "--init" else ""),
            "Install it with: pip install 'bitimely[hub]'",
            field=field,
        ) from error
    return huggingface_hub


def _call_hub(call: Callable[[], T], repo: str, field: str) -> T:
    """The result of `call`. Raises UserError (not_found, exit 4) for any error of the hub, its
    client or the network.
    """
    try:
        return call()
    except Exception as error:  # of several libraries, without a common class
        raise_system_error(error, stored=False)
        message = clean(str(error).strip().partition("\n")[0], 200)
        raise input_error(
            Reason.NOT_FOUND,
            f"{clean(repo, 100)}: {type(error).__name__}: {message}",
            "expected a repository of the hub that can be reached",
            "Look at its name, the network and the credentials, or give a folder",
            field=field,
        ) from error


def fetch_model(name: str, pinned: dict[str, str] | None = None) -> tuple[Path, dict[str, str]]:
    """The folder of the model `OWNER/NAME[@REVISION]` in the cache of the hub's client, and its
    origin: `repo` and the commit as `revision`.

    `pinned` is the origin of a resumed run: the same commit again, also when the branch has newer
    ones.

    Raises UserError: config (exit 2) for another form of name or without the extra; not_found (exit
    4) where the hub cannot be reached or has no such model; integrity (exit 5) where the weights
    differ from the hash in `run.json`.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        raise usage_error(
            "no model.safetensors there",
            "expected a run, a model folder or OWNER/NAME of a hub",
            code=Reason.NOT_FOUND,
            file=name,
            field="--init",
        )
    hub = load_client("--init")
    repo, revision = parts["repo"], parts["revision"]
    if revision is None and pinned and pinned.get("repo") == repo:
        revision = pinned["revision"]
    if revision is None or not COMMIT.fullmatch(revision):
        revision = str(
            _call_hub(lambda: hub.HfApi().model_info(repo, revision=revision), repo, "--init").sha
        )
    path = _call_hub(
        lambda: hub.snapshot_download(repo_id=repo, revision=revision, allow_patterns=list(SAFE)),
        repo,
        "--init",
    )
    folder = Path(path)
    check_weights(folder, f"{repo}@{revision}")
    return folder, {"repo": repo, "revision": revision}


def check_weights(folder: Path, name: str) -> None:
    """Compare the weights of an exported run with the hash in its run.json. Raises UserError
    (integrity, exit 5).
    """
    try:
        expected = json.loads((folder / "run.json").read_bytes())["weights"]
        actual = storage.hash_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_system_error(error, folder)
        problem = f"no weights with their hash ({type(error).__name__})"
        raise integrity_error(
            name, problem, "expected model.safetensors and run.json of bitimely export"
        ) from error
    if expected != actual:
        problem = f"model.safetensors has the hash {actual[:16]}"
        raise integrity_error(
            name, problem, f"expected {safe_text(expected)[:16]} as in run.json", "Do not use it"
        )


def upload_folder(folder: Path, repo: str, files: list[str]) -> str | None:
    """Upload `files` of `folder` to `repo`, which is made private where there is none. Returns the
    commit.

    Raises UserError: config (exit 2) without the extra, not_found (exit 4) where it cannot be
    reached.
    """
    hub = load_client("--push").HfApi()

    def upload() -> Any:
        hub.create_repo(repo_id=repo, repo_type="model", private=True, exist_ok=True)
        return hub.upload_folder(
            repo_id=repo, folder_path=str(folder), repo_type="model", allow_patterns=files
        )

    return getattr(_call_hub(upload, repo, "--push"), "oid", None)
