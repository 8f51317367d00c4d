"""Recordings that a program holds in memory, as files: what is read from a file has one way in."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitimely_core.errors import usage_error


@contextmanager
def place_recordings(files: Any) -> Iterator[list[Path]]:
    """The paths of `files`: paths as they are, each Raw of MNE in a temporary folder.

    Raises UserError (config, exit 2) for anything else.
    """
    items = [files] if _is_single(files) else list(files)
    with tempfile.TemporaryDirectory() as folder:
        yield [_place_recording(item, Path(folder), k) for k, item in enumerate(items, 1)]


def _is_single(files: Any) -> bool:
    """Whether this is no series of recordings: a path, signals of MNE, or values in a table."""
    is_table = len(getattr(files, "shape", (0,))) != 1
    return isinstance(files, str | os.PathLike | None) or hasattr(files, "get_data") or is_table


def _place_recording(item: Any, folder: Path, number: int) -> Path:
    if isinstance(item, str | os.PathLike):
        return Path(item)
    if not _is_raw(item):
        raise usage_error(
            f"{type(item).__name__} in the place of a recording",
            "expected a path, or a Raw of MNE",
            "Make one of an array: mne.io.RawArray(values, mne.create_info(names, rate, 'eeg'))",
            field="files",
        )
    path = folder / f"recording-{number}_raw.fif"
    item.save(path, verbose="ERROR")
    return path


def _is_raw(item: Any) -> bool:
    mne = sys.modules.get("mne")  # nobody holds a Raw of a library that is not loaded
    return mne is not None and isinstance(item, mne.io.BaseRaw)
