"""The verb `dashboard`: one page of the workspace. Each verb that writes there makes it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict, get_args

from bitimely_core.errors import Reason, usage_error
from bitimely_core.page import Page
from bitimely_core.report.dashboard_page import (
    ENTRIES,
    INDEX,
    StoredEntries,
    WorkspaceReader,
    dashboard_page,
    read_stored,
)
from bitimely_core.report.renderer import render_index
from bitimely_core.run import FORMAT
from bitimely_core.store import locks, storage
from bitimely_core.store.workspace import FolderKind
from bitimely_core.system_errors import is_later_process

WAIT = 10.0  # seconds for another command that writes the page


class DashboardResult(TypedDict):
    """Result of `dashboard`."""

    format_version: int
    page: str
    verdict: str
    notices: list[str]


def dashboard(
    *, workspace: Path = Path("workspace"), out: Path | None = None, dry_run: bool = False
) -> DashboardResult:
    """Write `index.html`, which leads to everything in `workspace`: one file that makes no network
    request.

    `out`: another file, or a folder for it. Raises UserError: not_found (exit 2) for a workspace
    that is not there.
    """
    storage.refuse_url(workspace)
    if not workspace.is_dir():
        raise usage_error(
            "is not there",
            "expected a workspace",
            "Give one with --workspace",
            code=Reason.NOT_FOUND,
            file=str(workspace),
        )
    path = workspace / INDEX if out is None else out if out.suffix == ".html" else out / INDEX
    if dry_run:
        return _describe(path, dashboard_page(WorkspaceReader(workspace, path.parent)))
    if not path.parent.is_dir():
        storage.make_folder(path.parent)
    # what is read here is not older than what another process writes
    with locks.take_turns(path.parent, WAIT):
        storage.remove_temporary_files(path.parent)
        page = _write_page(workspace, path, is_index=out is None)
    return _describe(path, page)


def _describe(path: Path, page: Page) -> DashboardResult:
    return {
        "format_version": FORMAT,
        "page": str(path),
        "verdict": page.verdict,
        "notices": page.notices,
    }


def _write_page(workspace: Path, path: Path, *, is_index: bool) -> Page:
    """Write the page where it differs, and beside the index what it was made from: the links of a
    page elsewhere are others.
    """
    stored = read_stored(workspace / ENTRIES) if is_index else StoredEntries()
    reader = WorkspaceReader(workspace, path.parent, stored)
    page = dashboard_page(reader)
    storage.refuse_link(path)
    content = render_index(page).encode()
    if not path.is_file() or content != path.read_bytes():
        storage.write_bytes(path, content)
    if is_index and reader.former != reader.present:
        storage.write_bytes(workspace / ENTRIES, reader.present.model_dump_json().encode())
    return page


def refresh_dashboard(workspace: Path) -> None:
    """The page of `workspace` after a verb; nothing where there is no workspace to describe, or it
    may only be read. Raises as `dashboard`.
    """
    kinds = (workspace / kind for kind in get_args(FolderKind))
    if (
        not is_later_process()
        and any(kind.is_dir() for kind in kinds)
        and os.access(workspace, os.W_OK)
    ):
        dashboard(workspace=workspace)
