"""Folders of a workspace, and names of views, tokens and runs."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bitimely_core import registry
from bitimely_core.errors import Reason, UserError, safe_text, unknown_name_error, usage_error
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, is_listed

FolderKind = Literal["cache", "tokens", "runs", "reports", "exports", "pipelines"]
NOUNS: dict[str, str] = {
    "cache": "data set",
    "tokens": "token set",
    "runs": "run",
    "reports": "report",
    "exports": "export",
    "pipelines": "recipe",
}


def locate_new(workspace: Path, kind: FolderKind, name: str, field: str | None = None) -> Path:
    """The folder `<workspace>/<kind>/<name>`, to be written.

    `field`: the option that gives the name. Raises UserError (exit 2): as `registry.check_name`;
    path_escape for a URL as workspace and for a link in the place of the folder, or of that of its
    kind to a folder outside the workspace.
    """
    storage.refuse_url(workspace)
    parent = workspace / kind
    if parent.is_symlink() and not parent.resolve().is_relative_to(workspace.resolve()):
        storage.refuse_link(parent)
    folder = parent / registry.check_name(name, NOUNS[kind], field)
    storage.refuse_link(folder)
    return folder


def locate(workspace: Path, kind: FolderKind, name: str) -> Path:
    """The folder `<workspace>/<kind>/<name>`, to be read.

    Raises UserError (path_escape, exit 2) for a name that leads elsewhere.
    """
    is_long = len(name.encode(errors="replace")) > 255
    if name in {"", ".", ".."} or is_long or re.search(r"[/\x00-\x1f]", name):
        raise usage_error(
            f"{safe_text(name)} is no name of a {NOUNS[kind]}",
            f"expected one folder in {workspace / kind}",
            "Give one that is there",
            code=Reason.PATH_ESCAPE,
        )
    return workspace / kind / name


def shorten_name(parts: list[str]) -> str:
    """The parts joined by `-`.

    Of a name that would be too long: the first parts, the number of the others and a hash.
    """
    name = "-".join(parts)
    if len(name) <= registry.MAX_NAME_LENGTH:
        return name
    return f"{'-'.join(parts[:2])[:75]}-and-{len(parts) - 2}-more-{storage.fingerprint(parts)[:8]}"


def refuse_inside_workspace(path: Path, workspace: Path) -> None:
    """Raises UserError (config, exit 2) for a path inside the workspace: only its owner may see raw
    ids.
    """
    if path.resolve().is_relative_to(workspace.resolve()):
        raise usage_error(
            "is in the workspace",
            "expected a folder that is not shared with caches and reports",
            file=str(path),
            field="--keep-ids",
        )


def parse_view(data: str) -> tuple[str, str]:
    """`sleep-edf/staging` -> (`sleep-edf`, `staging`).

    Raises UserError (unknown_name) with the closest names.
    """
    dataset, _, view = data.partition("/")
    facts = registry.datasets[dataset].facts
    if view not in facts.views:
        views = [f"{dataset}/{name}" if name else dataset for name in facts.views]
        raise unknown_name_error("view", data, views)
    return dataset, view


def load_dataset(name: str) -> registry.Entry[registry.DatasetFacts]:
    """The entry of a data set. Raises UserError (unknown_name), for a path with the commands that
    read it.
    """
    try:
        return registry.datasets[name]
    except UserError:
        is_path = False
        with suppress(OSError, ValueError):  # too long, a NUL
            is_path = Path(name).exists()
        if not is_path:
            raise
    path = shlex.quote(name)
    raise usage_error(
        f"{path} is a path, and no data set",
        "expected the name of a data set first",
        f"Recordings of your own are read by: bitimely ingest generic {path}. "
        f"Claims are read by: bitimely ingest pophr {path}",
        code=Reason.UNKNOWN_NAME,
    )


def find_data_kind(data: str) -> registry.DataKind:
    """The operations on a data set or view. Raises UserError: as `parse_view`."""
    return registry.data_kinds[registry.datasets[data.partition("/")[0]].facts.kind]


def find_dataset(data: str, workspace: Path) -> str:
    """The data set of `DATASET[/VIEW]`, or of the tokens that are called `data`."""
    path = locate(workspace, "tokens", name_tokens(data)) / "manifest.json"
    if "/" not in data and path.is_file():
        return str(json.loads(path.read_bytes())["options"]["dataset"])
    return data.partition("/")[0]


def name_tokens(data: str) -> str:
    """The default name of the tokens of `DATASET[/VIEW]`."""
    return data.replace("/", "-")


def find_run_folder(run: str | Path, workspace: Path) -> Path:
    """The folder of an existing run, given by name or path, or of a model that comes with the
    package.

    Its record may be missing where a manifest names it: who reads it is told. Raises UserError
    (not_found, exit 2) with the closest names.
    """
    name = str(run)
    folders = [Path(name)]
    if name not in {"", ".."} and name == Path(name).name:
        folders.insert(0, locate(workspace, "runs", name))
        folders.append(registry.PRETRAINED / name)
    for folder in folders:
        with suppress(OSError, ValueError):  # too long, a NUL
            if has_result(folder / "run.json") or is_listed(folder / "run.json"):
                return folder
    runs = sorted(path.parent.name for path in (workspace / "runs").glob("*/run.json"))
    runs += sorted(path.parent.name for path in registry.PRETRAINED.glob("*/run.json"))
    error = unknown_name_error("run", name, runs)
    error.requirement += ", or the folder of a run or export"
    error.file = str(workspace / "runs")
    raise error


def name_run(preset: str, model: str, objective: str, defaults: tuple[str, str]) -> str:
    """`<preset>[-<model>][-<objective>]`, without the defaults."""
    parts = [preset]
    for name, default in zip((model, objective), defaults, strict=True):
        if name != default:
            parts.append(name)
    return "-".join(parts)
